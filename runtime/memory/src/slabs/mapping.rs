//! The memory of one slab: a huge page, if the system has one.
//!
//! Invariant: the memory stays mapped, at the same address, for the life of the [`Mapping`], and all of it is
//! initialised: a page that was never written, or that was discarded, is zeroes.

use std::alloc::Layout;
use std::io;
use std::ptr::NonNull;

/// Bytes of a slab, and its alignment: the size of a huge page on x86-64, and on arm64 with pages of 4 KiB.
pub(super) const SLAB_BYTES: usize = 2 << 20;
/// The layout of a slab.
pub(super) const LAYOUT: Layout = match Layout::from_size_align(SLAB_BYTES, SLAB_BYTES) {
    Ok(layout) => layout,
    Err(_) => panic!("a power of two"),
};

/// See the module's header.
pub(super) struct Mapping {
    base: NonNull<u8>,
}

// SAFETY: a mapping is an address; all access goes through chunks, whose ranges do not overlap.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Zeroes, whose pages are made when they are first written.
    pub(super) fn new() -> io::Result<Mapping> {
        Ok(Mapping { base: map()? })
    }

    /// Zeroes in memory.
    pub(super) fn populated() -> io::Result<Mapping> {
        let mapping = Mapping::new()?;
        // SAFETY: the memory was mapped just now, with this length, and nothing else has its address.
        unsafe { populate(mapping.base, SLAB_BYTES) }?;
        Ok(mapping)
    }

    /// The address `offset` bytes in, which lies inside the slab.
    pub(super) fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset < SLAB_BYTES, "an offset inside the slab");
        // SAFETY: the offset lies inside the one mapping that starts at `base`, as asserted above.
        unsafe { self.base.add(offset) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `map` made this memory, and no chunk of it is left, by the invariants of the slabs.
        unsafe { unmap(self.base) };
    }
}

/// Maps a slab at an aligned address, and asks for a huge page.
#[cfg(not(miri))]
fn map() -> io::Result<NonNull<u8>> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let length = 2 * SLAB_BYTES;
    // SAFETY: an anonymous private mapping at an address of the kernel's choice touches no existing memory.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let before = start.align_offset(SLAB_BYTES);
    let (start, after) = (start.cast::<u8>(), SLAB_BYTES - before);
    // SAFETY: both ranges are parts of the new mapping, at its ends, to which nothing refers; an aligned slab lies
    // between them. A failure only leaves address space unused.
    let base = unsafe {
        if before > 0 {
            libc::munmap(start.cast(), before);
        }
        if after > 0 {
            libc::munmap(start.add(before + SLAB_BYTES).cast(), after);
        }
        start.add(before)
    };
    // SAFETY: a hint about memory that is mapped; a kernel without huge pages refuses it, and that is as good.
    unsafe { libc::madvise(base.cast(), SLAB_BYTES, libc::MADV_HUGEPAGE) };
    Ok(NonNull::new(base).expect("the kernel never maps address zero unasked"))
}

#[cfg(not(miri))]
unsafe fn unmap(base: NonNull<u8>) {
    // SAFETY: the caller passes a mapping of `map` without a handle. A failure would only leak it.
    unsafe { libc::munmap(base.as_ptr().cast(), SLAB_BYTES) };
}

/// Makes all pages of a range of zeroes.
///
/// # Errors
/// The system's, if it has no memory for them.
///
/// # Safety
/// The range is page aligned, inside a mapping, all zeroes, and has no handle.
#[cfg(not(miri))]
pub(super) unsafe fn populate(base: NonNull<u8>, length: usize) -> io::Result<()> {
    loop {
        // SAFETY: the range is mapped, by the caller's promise; no byte of it changes.
        if unsafe { libc::madvise(base.as_ptr().cast(), length, libc::MADV_POPULATE_WRITE) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR | libc::EAGAIN) => {}
            // Before Linux 5.14.
            Some(libc::EINVAL) => break,
            _ => return Err(error),
        }
    }
    for page in (0..length).step_by(crate::ALIGNMENT) {
        // SAFETY: inside the range, to which the caller has the only access, and zero already.
        unsafe { base.add(page).write_volatile(0) };
    }
    Ok(())
}

/// Returns the pages of a range to the system; it is zeroes from then on.
///
/// # Errors
/// The system's; the range is then as it was, or partly zeroes.
///
/// # Safety
/// The range is page aligned, inside a mapping, and has no handle.
#[cfg(not(miri))]
pub(super) unsafe fn discard(base: NonNull<u8>, length: usize) -> io::Result<()> {
    // SAFETY: the range is private anonymous memory without a handle, by the caller's promise.
    match unsafe { libc::madvise(base.as_ptr().cast(), length, libc::MADV_DONTNEED) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

// Miri has no madvise, so there a slab comes from the allocator, which checks accesses more strictly anyway.
#[cfg(miri)]
fn map() -> io::Result<NonNull<u8>> {
    // SAFETY: the length of the layout is not zero.
    NonNull::new(unsafe { std::alloc::alloc_zeroed(LAYOUT) }).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

#[cfg(miri)]
unsafe fn unmap(base: NonNull<u8>) {
    // SAFETY: the caller passes memory of `map`.
    unsafe { std::alloc::dealloc(base.as_ptr(), LAYOUT) };
}

#[cfg(miri)]
pub(super) unsafe fn populate(_base: NonNull<u8>, _length: usize) -> io::Result<()> {
    Ok(())
}

#[cfg(miri)]
pub(super) unsafe fn discard(_base: NonNull<u8>, _length: usize) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
