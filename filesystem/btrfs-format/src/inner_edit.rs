//! Edits an inner node in its buffer: inserts, deletes, replaces and moves pointers.
//!
//! [`InnerMut::open`] checks once that the keys ascend, and every edit keeps that. An edit that fails changes nothing.
//! The bytes behind the last pointer that an edit frees become zero, so a node has the bytes that
//! [`write_inner`](crate::node::write_inner) gives for the same pointers, except for its checksum.

use std::ops::{Deref, Range};

use zerocopy::{FromBytes, IntoBytes};

use crate::error::EditError;
use crate::key::Key;
use crate::node::{Header, KeyPointer, Node};
use crate::node_buffer::NodeBuffer;
use crate::superblock::MAX_LEVELS;

const POINTER_BYTES: usize = size_of::<KeyPointer>();

/// An inner node with ascending keys.
#[derive(Debug)]
pub struct InnerMut<'a> {
    node: NodeBuffer<'a>,
}

impl<'a> Deref for InnerMut<'a> {
    type Target = NodeBuffer<'a>;

    fn deref(&self) -> &NodeBuffer<'a> {
        &self.node
    }
}

impl<'a> InnerMut<'a> {
    /// Opens the node in a buffer.
    ///
    /// # Errors
    /// If it is not an inner node, or its keys do not ascend.
    pub fn open(bytes: &'a mut [u8]) -> Result<InnerMut<'a>, EditError> {
        let buffer = NodeBuffer::new(bytes)?;
        let node = Node::decode(buffer.bytes())?;
        check_level(node.header())?;
        let is_sorted = |pair: &[KeyPointer]| pair[0].key() < pair[1].key();
        if let Some(before) = node.pointers().windows(2).position(|pair| !is_sorted(pair)) {
            return Err(EditError::Order { slot: before + 1, key: node.pointers()[before + 1].key() });
        }
        Ok(InnerMut { node: buffer })
    }

    /// Opens a node that [`InnerMut::open`] or [`InnerMut::create`] opened before, and that only edits changed since: they
    /// kept what was checked then. Builds with debug assertions check it again.
    ///
    /// # Errors
    /// If it is not an inner node.
    pub fn reopen(bytes: &'a mut [u8]) -> Result<InnerMut<'a>, EditError> {
        if cfg!(debug_assertions) {
            return InnerMut::open(bytes);
        }
        let node = NodeBuffer::new(bytes)?;
        check_level(Node::decode(node.bytes())?.header())?;
        Ok(InnerMut { node })
    }

    /// Makes a node without pointers of the whole buffer, with this header. A node needs a pointer before it is
    /// written.
    ///
    /// # Errors
    /// If no node has this size, or the header is not that of an inner node.
    pub fn create(bytes: &'a mut [u8], header: &Header) -> Result<InnerMut<'a>, EditError> {
        let mut node = NodeBuffer::new(bytes)?;
        check_level(header)?;
        node.clear(header);
        Ok(InnerMut { node })
    }

    /// Gives it another header. Its level and count stay.
    pub fn set_header(&mut self, header: &Header) {
        self.node.set_header(header);
    }

    /// The number of pointers for which there is room altogether.
    pub fn capacity(&self) -> usize {
        self.body().len() / POINTER_BYTES
    }

    /// The pointers.
    pub fn pointers(&self) -> &[KeyPointer] {
        let table = &self.body()[..self.len() * POINTER_BYTES];
        <[KeyPointer]>::ref_from_bytes(table).expect("a table of whole pointers")
    }

    /// The index of the child that has this key, or would have it: the last one whose first key is not above it. A key
    /// below all others belongs to the first child, whose first key then changes.
    pub fn child_of(&self, key: Key) -> usize {
        self.pointers().partition_point(|pointer| pointer.key() <= key).saturating_sub(1)
    }

    /// Inserts a pointer before the one at index `slot`, or behind the last one.
    ///
    /// # Errors
    /// If there is no such place, the key does not belong there, or there is no room.
    pub fn insert(&mut self, slot: usize, pointer: KeyPointer) -> Result<(), EditError> {
        let count = self.len();
        if slot > count {
            return Err(EditError::Slot { slot, count });
        }
        self.check_between(slot, pointer.key(), slot)?;
        self.check_room(1)?;
        self.node.body_mut().copy_within(slot * POINTER_BYTES..count * POINTER_BYTES, (slot + 1) * POINTER_BYTES);
        self.node.set_len(count + 1);
        self.put(slot, &[pointer]);
        Ok(())
    }

    /// Deletes the pointers of a range.
    ///
    /// # Errors
    /// If there are no such pointers.
    pub fn delete(&mut self, range: Range<usize>) -> Result<(), EditError> {
        let count = self.len();
        if range.start > range.end || range.end > count {
            return Err(EditError::Slot { slot: range.start.max(range.end), count });
        }
        let left = count - range.len();
        let table = self.node.body_mut();
        table.copy_within(range.end * POINTER_BYTES..count * POINTER_BYTES, range.start * POINTER_BYTES);
        table[left * POINTER_BYTES..count * POINTER_BYTES].fill(0);
        self.node.set_len(left);
        Ok(())
    }

    /// Replaces a pointer: the child has been copied to another place, or has another first key.
    ///
    /// # Errors
    /// If there is no such pointer, or the key does not belong there.
    pub fn replace(&mut self, slot: usize, pointer: KeyPointer) -> Result<(), EditError> {
        let count = self.len();
        if slot >= count {
            return Err(EditError::Slot { slot, count });
        }
        self.check_between(slot, pointer.key(), slot + 1)?;
        self.put(slot, &[pointer]);
        Ok(())
    }

    /// The index from which on pointers move to a new node, to make room for a pointer at index `slot`: the middle, or
    /// none moves if the pointer goes behind all others. The new pointer goes to the new node if its index is at least
    /// this one, and to this node otherwise.
    ///
    /// # Errors
    /// If there is no such index.
    pub fn split_point(&self, slot: usize) -> Result<usize, EditError> {
        let count = self.len();
        match slot {
            _ if slot == count => Ok(count),
            _ if slot > count => Err(EditError::Slot { slot, count }),
            _ => Ok(count.div_ceil(2)),
        }
    }

    /// Moves the last `count` pointers to the front of the node after this one.
    ///
    /// # Errors
    /// If there are not as many, the nodes are not neighbours, or `right` has no room.
    pub fn shift_right(&mut self, right: &mut InnerMut, count: usize) -> Result<(), EditError> {
        self.check_neighbour(right)?;
        let (len, there) = (self.len(), right.len());
        let from = len.checked_sub(count).ok_or(EditError::Slot { slot: count, count: len })?;
        right.check_room(count)?;
        right.node.body_mut().copy_within(..there * POINTER_BYTES, count * POINTER_BYTES);
        right.node.set_len(there + count);
        right.put(0, &self.pointers()[from..]);
        self.delete(from..len)
    }

    /// Moves the first `count` pointers of the node after this one to the end of this one.
    ///
    /// # Errors
    /// If there are not as many, the nodes are not neighbours, or this node has no room.
    pub fn shift_left(&mut self, right: &mut InnerMut, count: usize) -> Result<(), EditError> {
        self.check_neighbour(right)?;
        let (len, there) = (self.len(), right.len());
        if count > there {
            return Err(EditError::Slot { slot: count, count: there });
        }
        self.check_room(count)?;
        self.node.set_len(len + count);
        self.put(len, &right.pointers()[..count]);
        right.delete(0..count)
    }

    /// Fills the bytes behind the last pointer with zeroes.
    pub fn zero_gap(&mut self) {
        let used = self.len() * POINTER_BYTES;
        self.node.body_mut()[used..].fill(0);
    }

    /// Checks a key that is to come before index `behind`, at index `slot`.
    fn check_between(&self, slot: usize, key: Key, behind: usize) -> Result<(), EditError> {
        let at = |slot: usize| self.pointers().get(slot).map(KeyPointer::key);
        let before = slot.checked_sub(1).and_then(at);
        let fits = before.is_none_or(|before| before < key) && at(behind).is_none_or(|behind| key < behind);
        if fits { Ok(()) } else { Err(EditError::Order { slot, key }) }
    }

    fn check_room(&self, pointers: usize) -> Result<(), EditError> {
        let free = self.capacity().saturating_sub(self.len());
        let full = EditError::Full { needed: pointers.saturating_mul(POINTER_BYTES), free: free * POINTER_BYTES };
        if pointers <= free { Ok(()) } else { Err(full) }
    }

    fn check_neighbour(&self, right: &InnerMut) -> Result<(), EditError> {
        if self.body().len() != right.body().len() || self.header().level != right.header().level {
            return Err(EditError::Siblings);
        }
        match (self.pointers().last(), right.pointers().first()) {
            (Some(last), Some(first)) if last.key() >= first.key() => {
                Err(EditError::Order { slot: 0, key: first.key() })
            }
            _ => Ok(()),
        }
    }

    fn put(&mut self, slot: usize, pointers: &[KeyPointer]) {
        let bytes = pointers.as_bytes();
        self.node.body_mut()[slot * POINTER_BYTES..][..bytes.len()].copy_from_slice(bytes);
    }
}

fn check_level(header: &Header) -> Result<(), EditError> {
    if (1..MAX_LEVELS).contains(&header.level) { Ok(()) } else { Err(EditError::Level(header.level)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::ChecksumType;
    use crate::key::ItemType;
    use crate::node::{HEADER_BYTES, write_inner};

    fn header(level: u8) -> Header {
        let mut header = Header::read_from_bytes(&[7; HEADER_BYTES]).unwrap();
        (header.level, header.nritems) = (level, 0.into());
        header
    }

    fn pointer(number: u64) -> KeyPointer {
        KeyPointer::new(Key::new(number, ItemType::INODE_ITEM, 0), number << 14, number)
    }

    /// The node has exactly the bytes of these pointers.
    fn assert_same(buffer: &[u8], model: &[KeyPointer]) {
        let mut sealed = buffer.to_vec();
        ChecksumType::Crc32c.seal(&mut sealed);
        let wanted = write_inner(&header(2), model, buffer.len() as u32, ChecksumType::Crc32c).unwrap();
        assert!(sealed == wanted, "{} pointers", model.len());
    }

    /// Random edits of two neighbours, compared with a list for each.
    fn random_edits(seed: u64, node_bytes: usize, edits: usize) {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut buffers = [vec![0; node_bytes], vec![0; node_bytes]];
        let mut models = [Vec::new(), Vec::new()];
        for buffer in &mut buffers {
            InnerMut::create(buffer, &header(2)).unwrap();
        }
        let most = (node_bytes - HEADER_BYTES) / POINTER_BYTES;
        for _ in 0..edits {
            let [first, second] = &mut buffers;
            let mut nodes = [InnerMut::open(first).unwrap(), InnerMut::open(second).unwrap()];
            let side = random.usize(..2);
            let (node, model) = (&mut nodes[side], &mut models[side]);
            match random.u8(..10) {
                0..5 => {
                    // Keys of the left node are below those of the right one.
                    let new = pointer(((side as u64) << 32) + random.u64(1..1 << 12) * 8);
                    let slot = model.partition_point(|one: &KeyPointer| one.key() < new.key());
                    let result = node.insert(slot, new);
                    if model.get(slot).is_some_and(|one| one.key() == new.key()) {
                        assert_eq!(result, Err(EditError::Order { slot, key: new.key() }));
                    } else if model.len() == most {
                        assert!(matches!(result, Err(EditError::Full { needed: 33, .. })), "{result:?}");
                    } else {
                        result.unwrap();
                        model.insert(slot, new);
                    }
                    let child = model.iter().rposition(|one| one.key() <= new.key()).unwrap_or(0);
                    assert_eq!(node.child_of(new.key()), child);
                }
                5..7 => {
                    let start = random.usize(..=model.len());
                    let end = (start + random.usize(..4)).min(model.len());
                    node.delete(start..end).unwrap();
                    model.drain(start..end);
                }
                7 if !model.is_empty() => {
                    let slot = random.usize(..model.len());
                    let key = model[slot].key();
                    let new = KeyPointer::new(Key::new(key.objectid, key.item_type, key.offset + 1), 77 << 14, 9);
                    let is_taken = model.get(slot + 1).is_some_and(|next| next.key() == new.key());
                    assert_eq!(node.replace(slot, new).is_err(), is_taken);
                    if !is_taken {
                        model[slot] = new;
                    }
                }
                _ => {
                    let [left, right] = &mut nodes;
                    let [left_model, right_model] = &mut models;
                    // Items go back before the next edit, so that keys stay on their sides.
                    let count = random.usize(..=left_model.len());
                    let result = left.shift_right(right, count);
                    assert_eq!(result.is_ok(), right_model.len() + count <= most);
                    if result.is_ok() {
                        let mut moved = left_model.split_off(left_model.len() - count);
                        moved.append(right_model);
                        assert_eq!((left.pointers(), right.pointers()), (&left_model[..], &moved[..]));
                        left.shift_left(right, count).unwrap();
                        *right_model = moved.split_off(count);
                        left_model.append(&mut moved);
                    }
                }
            }
            buffers.iter().zip(&models).for_each(|(buffer, model)| assert_same(buffer, model));
        }
    }

    #[test]
    fn a_node_after_any_edits_has_the_bytes_of_its_pointers() {
        random_edits(1, 4096, 20_000);
        random_edits(2, 16_384, 10_000);
    }

    #[test]
    fn a_split_makes_room_in_the_middle_or_behind_all_others() {
        let mut buffer = vec![0; 4096];
        let mut node = InnerMut::create(&mut buffer, &header(1)).unwrap();
        (0..121).for_each(|number| node.insert(number, pointer(number as u64)).unwrap());
        assert_eq!((node.split_point(121), node.split_point(0), node.split_point(120)), (Ok(121), Ok(61), Ok(61)));
        assert_eq!(node.split_point(122), Err(EditError::Slot { slot: 122, count: 121 }));
    }

    #[test]
    fn what_is_no_inner_node_is_refused_and_bad_edits_change_nothing() {
        let pointers = [pointer(1), pointer(2), pointer(3)];
        let good = write_inner(&header(2), &pointers, 4096, ChecksumType::Crc32c).unwrap();
        for (at, value, is_good) in [(100, 2, true), (100, 0, false), (100, 8, false), (96, 200, false)] {
            let mut bytes = good.clone();
            bytes[at] = value;
            assert_eq!(InnerMut::open(&mut bytes).is_ok(), is_good, "{at} {value}");
        }
        let unsorted = [pointer(2), pointer(2)];
        let mut bytes = write_inner(&header(2), &unsorted, 4096, ChecksumType::Crc32c).unwrap();
        assert_eq!(InnerMut::open(&mut bytes).err(), Some(EditError::Order { slot: 1, key: pointer(2).key() }));
        assert_eq!(InnerMut::open(&mut [0; 100]).err(), Some(EditError::NodeBytes(100)));
        assert_eq!(InnerMut::create(&mut bytes, &header(0)).err(), Some(EditError::Level(0)));

        let (mut bytes, mut other) = (good.clone(), good.clone());
        let mut node = InnerMut::open(&mut bytes).unwrap();
        assert!(node.insert(4, pointer(9)).is_err() && node.insert(0, pointer(2)).is_err());
        assert!(node.replace(1, pointer(3)).is_err() && node.replace(3, pointer(9)).is_err());
        assert!(node.delete(2..4).is_err() && node.delete(Range { start: 2, end: 1 }).is_err());
        let mut other = InnerMut::open(&mut other).unwrap();
        assert!(node.shift_right(&mut other, 1).is_err() && node.shift_left(&mut other, 1).is_err());
        let mut larger = vec![0; 8192];
        let mut larger = InnerMut::create(&mut larger, &header(2)).unwrap();
        assert_eq!(node.shift_right(&mut larger, 1), Err(EditError::Siblings));
        assert_eq!(bytes, good);
    }
}
