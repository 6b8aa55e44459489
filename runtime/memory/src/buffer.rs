//! The two handles on a range of bytes, [`Buffer`] and [`Slice`].

use std::fmt;
use std::mem;
use std::ops::{Bound, Deref, DerefMut, RangeBounds};
use std::ptr::NonNull;

use crate::ALIGNMENT;
use crate::arena::{ArenaId, Registration};
use crate::owner::{Heap, Lent, Owner};

/// The only handle on a range of initialised bytes; it may read and write them.
pub struct Buffer {
    start: NonNull<u8>,
    len: usize,
    owner: Owner,
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

    /// The bytes that `lender` hands out now, without copying: memory of a guest, of the kernel, or of a library. The
    /// lender is dropped with the last handle, on the thread that drops it, and not used before.
    ///
    /// The start is aligned as the lender's is, which direct I/O may refuse.
    pub fn lent(lender: impl AsMut<[u8]> + Send + 'static) -> Buffer {
        let (bytes, owner) = Lent::own(lender);
        Buffer { start: bytes.cast(), len: bytes.len(), owner }
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
        // SAFETY: `at` is within the range or just after it, as asserted.
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
        // SAFETY: the range ends within its allocation or just after it.
        let end = unsafe { self.start.add(self.len) };
        if !self.owner.is_same(&next.owner) || end != next.start {
            return Err((self, next));
        }
        let (start, len, owner) = self.into_parts();
        Ok(Buffer { start, len: len + next.len, owner })
    }

    /// Keeps the first `len` bytes; does nothing when there are no more. The memory after them stays allocated until
    /// the last handle on the allocation is dropped.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Converts the buffer to a shared, read-only slice.
    pub fn freeze(self) -> Slice {
        Slice::from(self)
    }

    /// The registration of the memory, if it is in a registered arena.
    pub fn registration(&self) -> Option<Registration> {
        self.owner.registration()
    }

    /// The arena that contains the memory, registered or not; `None` on the heap and for lent memory.
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

/// A shared handle on a range of initialised bytes. The bytes do not change while a slice of them lives.
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
    /// When the range is reversed or ends after the end of the slice, as indexing does.
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
        // SAFETY: `first` is within the range or just after it, as asserted.
        let start = unsafe { self.start.add(first) };
        Slice { start, len: end - first, owner: self.owner.clone() }
    }

    /// Converts the slice back to a buffer if it is the only handle on its allocation; otherwise returns the slice.
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

    /// The registration of the memory, if it is in a registered arena.
    pub fn registration(&self) -> Option<Registration> {
        self.owner.registration()
    }

    /// The arena that contains the memory, registered or not; `None` on the heap and for lent memory.
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
        // SAFETY: the range is initialised, lives as long as the owner, and no handle writes it while a slice lives.
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
