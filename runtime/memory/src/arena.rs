//! One region of page-aligned, zeroed memory that a pool carves up and a ring may register.
//!
//! Invariant: the region stays mapped, at the same address, for the life of the `Region`.

use std::num::NonZeroU64;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Names one arena for the life of the process; no two arenas share an identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ArenaId(NonZeroU64);

impl ArenaId {
    fn next() -> ArenaId {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        ArenaId(NonZeroU64::new(id).expect("2^64 arenas are never made"))
    }
}

/// The location of an arena, for a reactor that registers it with its ring.
///
/// The address is for the kernel only. An access through it needs a buffer of that range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arena {
    /// The arena's name.
    pub id: ArenaId,
    /// First byte; page aligned. Dangling when the length is zero.
    pub base: *mut u8,
    /// Length in bytes, a multiple of 1 MiB, possibly zero.
    pub len_bytes: usize,
}

/// The registration of a buffer's arena with a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The arena.
    pub arena: ArenaId,
    /// Its io_uring buffer index (`buf_index`), in the ring that registered it.
    pub index: u16,
}

pub(crate) struct Region {
    pub(crate) id: ArenaId,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a region is memory and an address; all access goes through handles whose ranges do not overlap.
unsafe impl Send for Region {}
// SAFETY: as above; the region itself offers no access to its bytes.
unsafe impl Sync for Region {}

impl Region {
    pub(crate) fn zeroed(len: usize) -> Region {
        let base = if len == 0 { NonNull::dangling() } else { map(len) };
        Region { id: ArenaId::next(), base, len }
    }

    pub(crate) fn describe(&self) -> Arena {
        Arena { id: self.id, base: self.base.as_ptr(), len_bytes: self.len }
    }

    /// The address `offset` bytes in, which lies inside the region.
    pub(crate) fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset < self.len, "an offset inside the arena");
        // SAFETY: the offset lies inside the one mapping that starts at `base`, as asserted above.
        unsafe { self.base.add(offset) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: `map` made this region with this length, and no slot of it is left, because each keeps the pool.
            unsafe { unmap(self.base, self.len) };
        }
    }
}

#[cfg(not(miri))]
fn map(len: usize) -> NonNull<u8> {
    // SAFETY: an anonymous private mapping at an address of the kernel's choice touches no existing memory.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if base == libc::MAP_FAILED {
        std::alloc::handle_alloc_error(layout(len));
    }
    NonNull::new(base.cast()).expect("the kernel never maps address zero unasked")
}

#[cfg(not(miri))]
unsafe fn unmap(base: NonNull<u8>, len: usize) {
    // SAFETY: the caller passes a mapping of `map` without a handle. A failure would only leak it.
    unsafe { libc::munmap(base.as_ptr().cast(), len) };
}

// Miri has no mmap, so there the region comes from the allocator, which checks accesses more strictly anyway.
#[cfg(miri)]
fn map(len: usize) -> NonNull<u8> {
    // SAFETY: the length is not zero; the caller checks.
    let base = unsafe { std::alloc::alloc_zeroed(layout(len)) };
    NonNull::new(base).unwrap_or_else(|| std::alloc::handle_alloc_error(layout(len)))
}

#[cfg(miri)]
unsafe fn unmap(base: NonNull<u8>, len: usize) {
    // SAFETY: the caller passes memory of `map` with its length.
    unsafe { std::alloc::dealloc(base.as_ptr(), layout(len)) };
}

fn layout(len: usize) -> std::alloc::Layout {
    std::alloc::Layout::from_size_align(len, crate::ALIGNMENT).expect("an arena is shorter than the address space")
}
