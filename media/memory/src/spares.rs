//! What a channel keeps for its next changes: memory for chunks that are missing, and chunks that were replaced while
//! responses shared them.
//!
//! Invariants: after [`Spare::top_up`] there is memory for one change, so that nothing is allocated under the lock of a
//! chunk. Replaced chunks are kept until their last slice is gone, and are then reused or freed, a few with each
//! operation. While there are many of them, the channel shares nothing more. So a reader that keeps slices can make a
//! channel use, beyond what is stored, as much again as was stored when it got them, and [`HELD_BYTES`].

use std::collections::VecDeque;

use sealblock_runtime_memory::{Buffer, Slice};

/// If replaced chunks have this many bytes, nothing more is shared.
const HELD_BYTES: usize = 16 << 20;
/// How many replaced chunks an operation looks at: more than it can add, so that the number of unused ones falls.
const LOOKS: usize = 2;

/// The spares of a channel.
pub(crate) struct Spares {
    /// Data of chunks, zeroed.
    pub(crate) data: Spare,
    /// Tags of chunks, all ones.
    pub(crate) tags: Spare,
}

/// Spares of one kind.
pub(crate) struct Spare {
    /// Bytes of each.
    length_bytes: usize,
    /// Unused ones, filled as missing bytes read.
    fresh: Vec<Buffer>,
    /// Replaced ones that were shared then.
    held: VecDeque<Slice>,
}

impl Spares {
    /// No spares, for chunks with these bytes of data and of tags.
    pub(crate) fn new(data_bytes: usize, tag_bytes: usize) -> Spares {
        let spare = |length_bytes| Spare { length_bytes, fresh: Vec::new(), held: VecDeque::new() };
        Spares { data: spare(data_bytes), tags: spare(tag_bytes) }
    }

    /// True if replaced chunks use so much that nothing more is to be shared.
    #[inline]
    pub(crate) fn hold_much(&self) -> bool {
        self.data.holds_much() || self.tags.holds_much()
    }

    /// Frees replaced chunks that no response shares any more, if there are any among the first few.
    #[inline]
    pub(crate) fn look(&mut self) {
        self.data.look();
        self.tags.look();
    }

    /// Bytes of replaced chunks, as far as is known.
    pub(crate) fn held_bytes(&self) -> u64 {
        [&self.data, &self.tags].map(|spare| (spare.held.len() * spare.length_bytes) as u64).iter().sum()
    }

    /// Takes data and tags that a chunk does not need any more: they are kept as long as they are shared.
    pub(crate) fn give(&mut self, [data, tags]: [Option<Slice>; 2]) {
        self.data.give(data);
        self.tags.give(tags);
    }
}

impl Spare {
    /// Gets new ones from `make`, which appends at least one, if there is none for the next change.
    #[inline]
    pub(crate) fn top_up(&mut self, make: impl FnOnce(&mut Vec<Buffer>)) {
        if self.fresh.is_empty() {
            make(&mut self.fresh);
        }
    }

    /// The only handle on bytes: on these themselves if there is no other, otherwise on a copy, or on new ones where
    /// there were none. The second value is true if they were shared and copied; if not `copies`, the result may have
    /// any bytes then.
    #[inline]
    pub(crate) fn unshare(&mut self, bytes: Option<Slice>, copies: bool) -> (Buffer, bool) {
        match bytes.map(Slice::try_unfreeze) {
            Some(Ok(bytes)) => (bytes, false),
            Some(Err(shared)) => {
                let mut other = self.free().unwrap_or_else(|| self.fresh());
                if copies {
                    other.copy_from_slice(&shared);
                }
                self.held.push_back(shared);
                (other, copies)
            }
            None => (self.fresh(), false),
        }
    }

    fn fresh(&mut self) -> Buffer {
        self.fresh.pop().expect("topped up before the lock was taken")
    }

    fn give(&mut self, bytes: Option<Slice>) {
        self.held.extend(bytes.and_then(|bytes| bytes.try_unfreeze().err()));
    }

    fn look(&mut self) {
        if !self.held.is_empty() {
            drop(self.free());
        }
    }

    fn holds_much(&self) -> bool {
        self.held.len() * self.length_bytes >= HELD_BYTES
    }

    /// A replaced chunk that no response shares any more, if there is one among the first few; the others go to the
    /// back.
    fn free(&mut self) -> Option<Buffer> {
        for _ in 0..LOOKS.min(self.held.len()) {
            match self.held.pop_front()?.try_unfreeze() {
                Ok(buffer) => return Some(buffer),
                Err(shared) => self.held.push_back(shared),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spare() -> Spare {
        Spare { length_bytes: 1 << 20, fresh: Vec::new(), held: VecDeque::new() }
    }

    fn top_up(spare: &mut Spare) {
        spare.top_up(|fresh| fresh.push(Buffer::zeroed(1 << 20)));
    }

    #[test]
    fn bytes_without_another_handle_are_changed_where_they_are() {
        let mut spare = spare();
        let bytes = Slice::copy_from(&[7; 1 << 20]);
        let at = bytes.as_ptr();
        let (unshared, was_copied) = spare.unshare(Some(bytes), true);
        assert!(unshared.as_ptr() == at && !was_copied && spare.held.is_empty());
    }

    #[test]
    fn shared_bytes_are_copied_and_kept_until_nobody_has_them() {
        let mut spare = spare();
        top_up(&mut spare);
        let shared = Slice::copy_from(&[7; 1 << 20]);
        let (copy, was_copied) = spare.unshare(Some(shared.clone()), true);
        assert!(was_copied && copy.as_ptr() != shared.as_ptr() && copy[..] == shared[..]);
        spare.look();
        assert_eq!(spare.held.len(), 1);
        let old = shared.as_ptr();
        drop(shared);
        // What nobody has any more is used first.
        let other = copy.freeze();
        let (copy, _) = spare.unshare(Some(other.clone()), true);
        assert!(copy.as_ptr() == old && copy[..] == other[..] && spare.held.len() == 1);
        drop(other);
        spare.look();
        assert!(spare.held.is_empty());
    }

    #[test]
    fn nothing_is_shared_while_too_much_is_held() {
        let mut spares = Spares::new(1 << 20, 0);
        let mut slices = Vec::new();
        for _ in 0..HELD_BYTES >> 20 {
            assert!(!spares.hold_much());
            top_up(&mut spares.data);
            slices.push(Slice::copy_from(&[1; 1 << 20]));
            drop(spares.data.unshare(slices.last().cloned(), true));
        }
        assert!(spares.hold_much() && spares.held_bytes() == HELD_BYTES as u64);
        slices.truncate(1);
        assert!((0..LOOKS).any(|_| {
            spares.look();
            !spares.hold_much()
        }));
    }
}
