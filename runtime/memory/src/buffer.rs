//! Unique ranges.

use std::fmt;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::ALIGNMENT;
use crate::arena::ArenaId;
use crate::heap::Heap;
use crate::owner::Owner;
use crate::slice::Slice;

/// The only handle on a range of initialised bytes, which it may read and write.
pub struct Buffer {
    start: NonNull<u8>,
    len: usize,
    owner: Owner,
}

/// How a ring knows the arena that a buffer comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The arena.
    pub arena: ArenaId,
    /// Its io_uring buffer index (`buf_index`), in the ring that registered it.
    pub index: u16,
}

// SAFETY: a buffer is the only handle on its bytes, and the counts behind its owner are atomic.
unsafe impl Send for Buffer {}
// SAFETY: a shared buffer offers only shared access to its bytes.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len` zeroed bytes on the heap, aligned to [`ALIGNMENT`]. No memory is allocated for a length of zero.
    ///
    /// # Panics
    /// When `len` exceeds what an address space can hold; the process aborts when the system has no memory left.
    pub fn zeroed(len: usize) -> Buffer {
        if len == 0 {
            return Buffer::default();
        }
        let (start, owner) = Heap::zeroed(len);
        Buffer { start, len, owner }
    }

    /// A heap buffer, aligned to [`ALIGNMENT`], that holds a copy of `bytes`.
    pub fn copy_from(bytes: &[u8]) -> Buffer {
        let mut buffer = Buffer::zeroed(bytes.len());
        buffer.copy_from_slice(bytes);
        buffer
    }

    /// # Safety
    /// `start` is valid for `len` initialised bytes as long as `owner` lives, and no live handle overlaps them.
    pub(crate) unsafe fn from_parts(start: NonNull<u8>, len: usize, owner: Owner) -> Buffer {
        Buffer { start, len, owner }
    }

    pub(crate) fn into_parts(self) -> (NonNull<u8>, usize, Owner) {
        (self.start, self.len, self.owner)
    }

    /// Cuts in two without copying: `self` keeps `[..at]`, the result is `[at..]`.
    ///
    /// The result's start is aligned only as far as `at` is.
    ///
    /// # Panics
    /// When `at` is greater than the length.
    pub fn split_off(&mut self, at: usize) -> Buffer {
        assert!(at <= self.len, "split at {at} of a buffer of {} bytes", self.len);
        // SAFETY: `at` is within the range or just behind it, as asserted.
        let start = unsafe { self.start.add(at) };
        let rest = Buffer { start, len: self.len - at, owner: self.owner.clone() };
        self.len = at;
        rest
    }

    /// Cuts in two without copying: `self` keeps `[at..]`, the result is `[..at]`.
    ///
    /// # Panics
    /// When `at` is greater than the length.
    pub fn split_to(&mut self, at: usize) -> Buffer {
        let rest = self.split_off(at);
        mem::replace(self, rest)
    }

    /// Makes one range of `self` and `next` when `next` begins where `self` ends in the same allocation, or when either
    /// is empty. Otherwise returns both, unchanged.
    pub fn try_join(self, next: Buffer) -> Result<Buffer, (Buffer, Buffer)> {
        if next.is_empty() {
            return Ok(self);
        }
        if self.is_empty() {
            return Ok(next);
        }
        // SAFETY: the range ends within its allocation or just behind it.
        let end = unsafe { self.start.add(self.len) };
        if !self.owner.is_same(&next.owner) || end != next.start {
            return Err((self, next));
        }
        let (start, len, owner) = self.into_parts();
        Ok(Buffer { start, len: len + next.len, owner })
    }

    /// Keeps the first `len` bytes; does nothing when there are no more. The memory behind them stays allocated until the
    /// last handle on the allocation is dropped.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Gives up the right to write, and with it the sole ownership.
    pub fn freeze(self) -> Slice {
        Slice::from(self)
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

impl Default for Buffer {
    /// An empty buffer, which owns no memory.
    fn default() -> Buffer {
        let address = std::num::NonZeroUsize::new(ALIGNMENT).expect("the alignment is not zero");
        Buffer { start: NonNull::without_provenance(address), len: 0, owner: Owner::Nothing }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range is initialised, lives as long as the owner, and has no other handle.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for Buffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The bytes stay out: they are user data, and megabytes of it.
        f.debug_struct("Buffer").field("len", &self.len).field("arena", &self.arena_id()).finish()
    }
}
