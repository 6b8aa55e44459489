//! Shared ranges.

use std::fmt;
use std::ops::{Bound, Deref, RangeBounds};
use std::ptr::NonNull;

use crate::arena::ArenaId;
use crate::buffer::{Buffer, Registration};
use crate::owner::Owner;

/// A handle on a range of initialised bytes that others may share; nobody can write them while it lives.
#[derive(Clone)]
pub struct Slice {
    start: NonNull<u8>,
    len: usize,
    owner: Owner,
}

// SAFETY: the bytes are immutable while any slice of them lives, and the counts behind the owner are atomic.
unsafe impl Send for Slice {}
// SAFETY: as above.
unsafe impl Sync for Slice {}

impl Slice {
    /// No bytes, and no memory.
    pub fn empty() -> Slice {
        Buffer::default().freeze()
    }

    /// A heap slice, aligned to [`crate::ALIGNMENT`], that holds a copy of `bytes`.
    pub fn copy_from(bytes: &[u8]) -> Slice {
        Buffer::copy_from(bytes).freeze()
    }

    /// A handle on part of the range, without copying.
    ///
    /// # Panics
    /// When the range is reversed or ends behind the slice, as indexing does.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Slice {
        let first = match range.start_bound() {
            Bound::Included(&first) => first,
            Bound::Excluded(&before) => before.checked_add(1).expect("a range that starts within the address space"),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(&last) => last.checked_add(1).expect("a range that ends within the address space"),
            Bound::Excluded(&end) => end,
            Bound::Unbounded => self.len,
        };
        assert!(first <= end && end <= self.len, "range {first}..{end} of a slice of {} bytes", self.len);
        // SAFETY: `first` is within the range or just behind it, as asserted.
        let start = unsafe { self.start.add(first) };
        Slice { start, len: end - first, owner: self.owner.clone() }
    }

    /// Takes back the right to write this range, when this is the only handle on its allocation; otherwise returns it.
    ///
    /// Other slices and buffers of the same allocation count, even when their ranges do not overlap.
    pub fn try_unfreeze(self) -> Result<Buffer, Slice> {
        if !self.owner.is_only() {
            return Err(self);
        }
        let Slice { start, len, owner } = self;
        // SAFETY: no other handle exists and, with this one consumed, none can be cloned from anywhere.
        Ok(unsafe { Buffer::from_parts(start, len, owner) })
    }

    /// How a ring knows the memory, when it lies in an arena that is registered.
    pub fn registration(&self) -> Option<Registration> {
        self.owner.registration()
    }

    /// The arena the memory lies in, registered or not; `None` on the heap.
    pub fn arena_id(&self) -> Option<ArenaId> {
        self.owner.arena_id()
    }
}

impl From<Buffer> for Slice {
    fn from(buffer: Buffer) -> Slice {
        let (start, len, owner) = buffer.into_parts();
        Slice { start, len, owner }
    }
}

impl Default for Slice {
    fn default() -> Slice {
        Slice::empty()
    }
}

impl Deref for Slice {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range is initialised, lives as long as the owner, and nobody writes it while a slice lives.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for Slice {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slice").field("len", &self.len).field("arena", &self.arena_id()).finish()
    }
}
