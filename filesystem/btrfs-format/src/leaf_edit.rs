//! Edits a leaf in its buffer: inserts, deletes, resizes and moves items.
//!
//! [`LeafMut::open`] checks once that the leaf is packed and its keys ascend, and every edit keeps that: the data of an
//! item end where those of the item before it begin. No edit copies the leaf or allocates memory.
//!
//! Invariants:
//! - An edit that fails changes nothing.
//! - An edit leaves only zeroes in the bytes that it frees. So deleted data do not return to the medium, and a leaf has
//!   the bytes that [`write_leaf`](crate::node::write_leaf) gives for the same items, except for its checksum. A leaf
//!   that another program made may have other bytes between heads and data; [`LeafMut::zero_gap`] removes these.
//! - The checksum and the rest of the header stay as they are. Whoever writes the leaf seals it.
//!
//! `leaf_split` decides where to split and what to move.

use std::ops::{Deref, Range};

use zerocopy::FromBytes;

use crate::error::EditError;
use crate::key::Key;
use crate::node::{HEADER_BYTES, Header, ITEM_HEAD_BYTES, ItemHead, Node};
use crate::node_buffer::NodeBuffer;

/// A packed leaf with ascending keys.
#[derive(Debug)]
pub struct LeafMut<'a> {
    node: NodeBuffer<'a>,
}

impl<'a> Deref for LeafMut<'a> {
    type Target = NodeBuffer<'a>;

    fn deref(&self) -> &NodeBuffer<'a> {
        &self.node
    }
}

impl<'a> LeafMut<'a> {
    /// Opens the leaf in a buffer.
    ///
    /// # Errors
    /// If it is not a leaf, is not packed, or its keys do not ascend.
    pub fn open(bytes: &'a mut [u8]) -> Result<LeafMut<'a>, EditError> {
        let buffer = NodeBuffer::new(bytes)?;
        let node = Node::decode(buffer.bytes())?;
        if node.header().level != 0 {
            return Err(EditError::Level(node.header().level));
        }
        let (mut data_end, mut previous) = (node.node_bytes() - HEADER_BYTES, None);
        for (slot, item) in node.items().iter().enumerate() {
            let packed = node.data(item).is_some_and(|data| item.offset.get() as usize + data.len() == data_end);
            if !packed {
                return Err(EditError::Unpacked { slot });
            }
            let key = item.key();
            if previous.replace(key).is_some_and(|previous| previous >= key) {
                return Err(EditError::Order { slot, key });
            }
            data_end = item.offset.get() as usize;
        }
        Ok(LeafMut { node: buffer })
    }

    /// Opens a leaf that [`LeafMut::open`] or [`LeafMut::create`] opened before, and that only edits changed since: they
    /// kept what was checked then. Builds with debug assertions check it again.
    ///
    /// # Errors
    /// If it is not a leaf.
    pub fn reopen(bytes: &'a mut [u8]) -> Result<LeafMut<'a>, EditError> {
        if cfg!(debug_assertions) {
            return LeafMut::open(bytes);
        }
        let node = NodeBuffer::new(bytes)?;
        match Node::decode(node.bytes())?.header().level {
            0 => Ok(LeafMut { node }),
            level => Err(EditError::Level(level)),
        }
    }

    /// Makes an empty leaf of the whole buffer, with this header, whose level must be 0.
    ///
    /// # Errors
    /// If no leaf has this size, or the header is that of an inner node.
    pub fn create(bytes: &'a mut [u8], header: &Header) -> Result<LeafMut<'a>, EditError> {
        let mut node = NodeBuffer::new(bytes)?;
        if header.level != 0 {
            return Err(EditError::Level(header.level));
        }
        node.clear(header);
        Ok(LeafMut { node })
    }

    /// Gives it another header. Its level and count stay.
    pub fn set_header(&mut self, header: &Header) {
        self.node.set_header(header);
    }

    /// The bytes for items and their heads.
    pub fn capacity(&self) -> usize {
        self.body().len()
    }

    /// The bytes that are free.
    pub fn free_bytes(&self) -> usize {
        self.data_end(self.len()) - self.len() * ITEM_HEAD_BYTES
    }

    /// Bytes of the items and their heads.
    pub fn used_bytes(&self) -> usize {
        self.capacity() - self.free_bytes()
    }

    /// The heads of the items.
    pub fn items(&self) -> &[ItemHead] {
        let table = &self.body()[..self.len() * ITEM_HEAD_BYTES];
        <[ItemHead]>::ref_from_bytes(table).expect("a table of whole heads")
    }

    /// The key of an item.
    pub fn key(&self, slot: usize) -> Option<Key> {
        self.items().get(slot).map(ItemHead::key)
    }

    /// The data of an item.
    pub fn data(&self, slot: usize) -> Option<&[u8]> {
        self.items().get(slot).map(|item| &self.body()[range_of(item)])
    }

    /// The data of an item, to be changed without a change of their size.
    pub fn data_mut(&mut self, slot: usize) -> Option<&mut [u8]> {
        let range = self.items().get(slot).map(range_of)?;
        Some(&mut self.node.body_mut()[range])
    }

    /// The index of the item with this key; the error is the index at which it would be inserted.
    pub fn search(&self, key: Key) -> Result<usize, usize> {
        self.items().binary_search_by_key(&key, ItemHead::key)
    }

    /// Inserts an item before the one at index `slot`, or behind the last one.
    ///
    /// # Errors
    /// If there is no such place, the key does not belong there, or there is no room.
    pub fn insert(&mut self, slot: usize, key: Key, data: &[u8]) -> Result<(), EditError> {
        let (count, size) = (self.len(), data.len());
        self.check_insert(slot, key)?;
        self.check_room(ITEM_HEAD_BYTES.saturating_add(size))?;
        let (low, end) = (self.data_end(count), self.data_end(slot));
        let body = self.node.body_mut();
        body.copy_within(low..end, low - size);
        body[end - size..end].copy_from_slice(data);
        body.copy_within(slot * ITEM_HEAD_BYTES..count * ITEM_HEAD_BYTES, (slot + 1) * ITEM_HEAD_BYTES);
        self.node.set_len(count + 1);
        // A node has at most 64 KiB, so offsets and sizes have at most 17 bits.
        self.items_mut()[slot] = ItemHead::new(key, (end - size) as u32, size as u32);
        self.move_offsets(slot + 1, -(size as isize));
        Ok(())
    }

    /// Deletes the items of a range.
    ///
    /// # Errors
    /// If there are no such items.
    pub fn delete(&mut self, range: Range<usize>) -> Result<(), EditError> {
        let count = self.len();
        if range.start > range.end || range.end > count {
            return Err(EditError::Slot { slot: range.start.max(range.end), count });
        }
        let (start, low, high) = (self.data_end(count), self.data_end(range.end), self.data_end(range.start));
        let (removed, left) = (high - low, count - range.len());
        let body = self.node.body_mut();
        body.copy_within(start..low, start + removed);
        body[start..start + removed].fill(0);
        body.copy_within(range.end * ITEM_HEAD_BYTES..count * ITEM_HEAD_BYTES, range.start * ITEM_HEAD_BYTES);
        body[left * ITEM_HEAD_BYTES..count * ITEM_HEAD_BYTES].fill(0);
        self.node.set_len(left);
        self.move_offsets(range.start, removed as isize);
        Ok(())
    }

    /// Replaces bytes of an item by others, of any number: the whole item, or a part that grows, shrinks, begins
    /// earlier or ends later.
    ///
    /// # Errors
    /// If there is no such item, it has no such bytes, or there is no room.
    pub fn splice(&mut self, slot: usize, range: Range<usize>, with: &[u8]) -> Result<(), EditError> {
        let count = self.len();
        let item = *self.items().get(slot).ok_or(EditError::Slot { slot, count })?;
        let (offset, size) = (item.offset.get() as usize, item.size.get() as usize);
        if range.start > range.end || range.end > size {
            return Err(EditError::Range { start: range.start, end: range.end, size });
        }
        self.check_room(with.len().saturating_sub(range.len()))?;
        let by = range.len() as isize - with.len() as isize;
        // What is behind the range stays: data are counted from the end of the leaf.
        let (low, end) = (self.data_end(count), offset + range.end);
        let body = self.node.body_mut();
        let new_low = low.strict_add_signed(by);
        body.copy_within(low..offset + range.start, new_low);
        body[end - with.len()..end].copy_from_slice(with);
        if new_low > low {
            body[low..new_low].fill(0);
        }
        self.move_offsets(slot, by);
        self.items_mut()[slot].size = ((size - range.len() + with.len()) as u32).into();
        Ok(())
    }

    /// Gives an item another key.
    ///
    /// # Errors
    /// If there is no such item, or the key does not belong there.
    pub fn set_key(&mut self, slot: usize, key: Key) -> Result<(), EditError> {
        let count = self.len();
        let item = *self.items().get(slot).ok_or(EditError::Slot { slot, count })?;
        let before = slot.checked_sub(1).and_then(|before| self.key(before));
        self.check_between(before, slot, key, self.key(slot + 1))?;
        self.items_mut()[slot] = ItemHead::new(key, item.offset.get(), item.size.get());
        Ok(())
    }

    /// Moves the last `count` items to the front of the leaf after this one.
    ///
    /// # Errors
    /// If there are not as many, the leaves are not neighbours, or `right` has no room.
    pub fn shift_right(&mut self, right: &mut LeafMut, count: usize) -> Result<(), EditError> {
        check_neighbours(self, right)?;
        let (len, capacity) = (self.len(), self.capacity());
        let from = len.checked_sub(count).ok_or(EditError::Slot { slot: count, count: len })?;
        let (low, high) = (self.data_end(len), self.data_end(from));
        let size = high - low;
        right.check_room(size + count * ITEM_HEAD_BYTES)?;
        let (there, start) = (right.len(), right.data_end(right.len()));
        let body = right.node.body_mut();
        body.copy_within(start..capacity, start - size);
        body[capacity - size..].copy_from_slice(&self.body()[low..high]);
        body.copy_within(..there * ITEM_HEAD_BYTES, count * ITEM_HEAD_BYTES);
        right.node.set_len(there + count);
        right.move_offsets(count, -(size as isize));
        right.copy_heads(0, &self.items()[from..], (capacity - high) as isize);
        self.delete(from..len)
    }

    /// Moves the first `count` items of the leaf after this one to the end of this one.
    ///
    /// # Errors
    /// If there are not as many, the leaves are not neighbours, or this leaf has no room.
    pub fn shift_left(&mut self, right: &mut LeafMut, count: usize) -> Result<(), EditError> {
        check_neighbours(self, right)?;
        let (len, capacity) = (self.len(), self.capacity());
        if count > right.len() {
            return Err(EditError::Slot { slot: count, count: right.len() });
        }
        let (low, start) = (right.data_end(count), self.data_end(len));
        let size = capacity - low;
        self.check_room(size + count * ITEM_HEAD_BYTES)?;
        self.node.body_mut()[start - size..start].copy_from_slice(&right.body()[low..]);
        self.node.set_len(len + count);
        self.copy_heads(len, &right.items()[..count], start as isize - capacity as isize);
        right.delete(0..count)
    }

    /// Fills the bytes between heads and data with zeroes.
    pub fn zero_gap(&mut self) {
        let gap = self.len() * ITEM_HEAD_BYTES..self.data_end(self.len());
        self.node.body_mut()[gap].fill(0);
    }

    /// Checks that a key may be inserted at an index.
    pub(crate) fn check_insert(&self, slot: usize, key: Key) -> Result<(), EditError> {
        let count = self.len();
        if slot > count {
            return Err(EditError::Slot { slot, count });
        }
        let before = slot.checked_sub(1).and_then(|before| self.key(before));
        self.check_between(before, slot, key, self.key(slot))
    }

    fn check_between(&self, before: Option<Key>, slot: usize, key: Key, behind: Option<Key>) -> Result<(), EditError> {
        let fits = before.is_none_or(|before| before < key) && behind.is_none_or(|behind| key < behind);
        if fits { Ok(()) } else { Err(EditError::Order { slot, key }) }
    }

    fn check_room(&self, needed: usize) -> Result<(), EditError> {
        let free = self.free_bytes();
        if needed <= free { Ok(()) } else { Err(EditError::Full { needed, free }) }
    }

    /// Where the data of the item at this index end, and those of the items before it begin. For the number of items,
    /// where the data of the leaf begin.
    fn data_end(&self, slot: usize) -> usize {
        slot.checked_sub(1).map_or(self.capacity(), |before| self.items()[before].offset.get() as usize)
    }

    fn items_mut(&mut self) -> &mut [ItemHead] {
        let count = self.len();
        let table = &mut self.node.body_mut()[..count * ITEM_HEAD_BYTES];
        <[ItemHead]>::mut_from_bytes(table).expect("a table of whole heads")
    }

    /// Moves the recorded places of the data of all items from `slot` on.
    fn move_offsets(&mut self, slot: usize, by: isize) {
        for item in &mut self.items_mut()[slot..] {
            item.offset = item.offset.get().strict_add_signed(by as i32).into();
        }
    }

    fn copy_heads(&mut self, slot: usize, from: &[ItemHead], by: isize) {
        for (item, from) in self.items_mut()[slot..].iter_mut().zip(from) {
            *item = ItemHead::new(from.key(), from.offset.get().strict_add_signed(by as i32), from.size.get());
        }
    }
}

fn range_of(item: &ItemHead) -> Range<usize> {
    let start = item.offset.get() as usize;
    start..start + item.size.get() as usize
}

fn check_neighbours(left: &LeafMut, right: &LeafMut) -> Result<(), EditError> {
    if left.body().len() != right.body().len() {
        return Err(EditError::Siblings);
    }
    match (left.items().last(), right.key(0)) {
        (Some(last), Some(key)) if last.key() >= key => Err(EditError::Order { slot: 0, key }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
