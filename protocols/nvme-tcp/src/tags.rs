//! A set of 16-bit numbers.

/// One bit for each number: 8 KiB, allocated with the first.
#[derive(Default)]
pub(crate) struct TagSet(Option<Box<[u64; 1024]>>);

impl TagSet {
    /// Adds `tag`; `false` if it was there.
    pub(crate) fn insert(&mut self, tag: u16) -> bool {
        let words = self.0.get_or_insert_with(|| Box::new([0; 1024]));
        let (word, bit) = (&mut words[usize::from(tag >> 6)], 1 << (tag & 63));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    pub(crate) fn remove(&mut self, tag: u16) {
        if let Some(words) = &mut self.0 {
            words[usize::from(tag >> 6)] &= !(1 << (tag & 63));
        }
    }

    pub(crate) fn contains(&self, tag: u16) -> bool {
        self.0.as_ref().is_some_and(|words| words[usize::from(tag >> 6)] & 1 << (tag & 63) != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_its_own() {
        let mut set = TagSet::default();
        for tag in [0, 1, 63, 64, 65, u16::MAX] {
            assert!(!set.contains(tag) && set.insert(tag) && !set.insert(tag) && set.contains(tag));
        }
        set.remove(64);
        assert!(!set.contains(64) && set.contains(63) && set.contains(65));
    }
}
