//! The commands in flight of a connection, by a token for the caller and a 16-bit tag for the wire.
//!
//! Invariants: never more entries than the limit; the token or tag of a removed entry finds nothing until its generation
//! wraps around (after 65,536 uses of one index for tokens; fewer for tags, by the bits left of 16).

use std::num::NonZeroU16;

struct SlabEntry<T> {
    generation: u16,
    value: Option<T>,
}

/// At most `limit` values.
pub(crate) struct Slab<T> {
    entries: Vec<SlabEntry<T>>,
    free: Vec<u16>,
    limit: NonZeroU16,
    /// Bits of a tag that hold the index; the others hold the generation.
    index_bits: u32,
}

impl<T> Slab<T> {
    pub(crate) fn new(limit: NonZeroU16) -> Slab<T> {
        let index_bits = 16 - (limit.get() - 1).leading_zeros();
        Slab { entries: Vec::new(), free: Vec::new(), limit, index_bits }
    }

    /// Number of values.
    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Inserts a value; returns its token, or `None` at the limit.
    pub(crate) fn insert(&mut self, value: T) -> Option<u32> {
        self.insert_with(|| value)
    }

    /// The same for a large value, constructed in place.
    #[inline]
    pub(crate) fn insert_with(&mut self, make: impl FnOnce() -> T) -> Option<u32> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.entries.len() < usize::from(self.limit.get()) => {
                self.entries.push(SlabEntry { generation: 0, value: None });
                (self.entries.len() - 1) as u16
            }
            None => return None,
        };
        let entry = &mut self.entries[usize::from(index)];
        entry.value = Some(make());
        Some(u32::from(entry.generation) << 16 | u32::from(index))
    }

    pub(crate) fn get(&self, token: u32) -> Option<&T> {
        let entry = self.entries.get(usize::from(token as u16))?;
        entry.value.as_ref().filter(|_| entry.generation == (token >> 16) as u16)
    }

    pub(crate) fn get_mut(&mut self, token: u32) -> Option<&mut T> {
        let entry = self.entries.get_mut(usize::from(token as u16))?;
        entry.value.as_mut().filter(|_| entry.generation == (token >> 16) as u16)
    }

    pub(crate) fn remove(&mut self, token: u32) -> Option<T> {
        let value = self.occupied(token)?.value.take();
        self.free.push(token as u16);
        value
    }

    /// Drops a value in place; returns what `look` reads of it before.
    pub(crate) fn release<R>(&mut self, token: u32, look: impl FnOnce(&T) -> R) -> Option<R> {
        let entry = self.occupied(token)?;
        let seen = entry.value.as_ref().map(look);
        entry.value = None;
        self.free.push(token as u16);
        seen
    }

    /// The entry of a value that is removed; its generation advances.
    fn occupied(&mut self, token: u32) -> Option<&mut SlabEntry<T>> {
        let entry = self.entries.get_mut(usize::from(token as u16))?;
        if entry.value.is_none() || entry.generation != (token >> 16) as u16 {
            return None;
        }
        entry.generation = entry.generation.wrapping_add(1);
        Some(entry)
    }

    /// The tag of the value with this token.
    pub(crate) fn tag(&self, token: u32) -> u16 {
        self.tag_of(token as u16, (token >> 16) as u16)
    }

    /// The index in a tag; below the limit for every tag of this slab.
    pub(crate) fn place(&self, tag: u16) -> usize {
        usize::from((u32::from(tag) & ((1 << self.index_bits) - 1)) as u16)
    }

    /// The token of the value with this tag.
    pub(crate) fn by_tag(&self, tag: u16) -> Option<u32> {
        let index = self.place(tag) as u16;
        let entry = self.entries.get(usize::from(index)).filter(|entry| entry.value.is_some())?;
        let token = u32::from(entry.generation) << 16 | u32::from(index);
        (self.tag_of(index, entry.generation) == tag).then_some(token)
    }

    /// Removes all values.
    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.free.clear();
    }

    /// Tokens of all values.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = u32> {
        let live = self.entries.iter().enumerate().filter(|(_, entry)| entry.value.is_some());
        live.map(|(index, entry)| u32::from(entry.generation) << 16 | index as u32)
    }

    fn tag_of(&self, index: u16, generation: u16) -> u16 {
        (u32::from(generation) << self.index_bits) as u16 | index
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slab(limit: u16) -> Slab<u8> {
        Slab::new(NonZeroU16::new(limit).unwrap())
    }

    #[test]
    fn the_limit_holds_and_indexes_are_reused() {
        for limit in [1, 2, 3, 64, u16::MAX] {
            let mut slab = slab(limit);
            let tokens: Vec<u32> = (0..limit).map(|_| slab.insert(1).unwrap()).collect();
            assert_eq!(slab.insert(1), None);
            assert_eq!(slab.len(), usize::from(limit));
            for &token in &tokens {
                assert_eq!(slab.by_tag(slab.tag(token)), Some(token));
                assert!(slab.place(slab.tag(token)) < usize::from(limit));
            }
            assert_eq!(slab.remove(tokens[0]), Some(1));
            assert!(slab.insert(2).is_some());
        }
    }

    #[test]
    fn a_removed_value_is_not_found() {
        let mut slab = slab(4);
        let old = slab.insert(1).unwrap();
        let tag = slab.tag(old);
        slab.remove(old);
        assert_eq!(slab.by_tag(tag), None);
        let new = slab.insert(2).unwrap();
        assert_eq!(new as u16, old as u16);
        assert!(slab.get_mut(old).is_none() && slab.remove(old).is_none() && slab.by_tag(tag).is_none());
        assert_eq!(slab.get_mut(new), Some(&mut 2));
        assert_eq!(slab.tokens().collect::<Vec<_>>(), [new]);
    }
}
