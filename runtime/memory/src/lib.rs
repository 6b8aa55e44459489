//! Aligned buffers that can be registered with io_uring.
//!
//! A [`Buffer`] is the only handle on its bytes and may write them; a [`Slice`] shares its bytes and may only read them.
//! Both are ranges of a reference-counted allocation, which is either on the heap or a slot of a [`Pool`]'s arena.
//!
//! Invariants:
//! - The range of a live `Buffer` overlaps the range of no other live handle.
//! - All memory is initialised: an allocation is zeroed when it is first obtained from the system. Memory that a pool
//!   hands out again holds the bytes of its former use, so a pool's buffer is filled before it is sent anywhere.
//! - The thread that drops the last handle of an allocation returns it.
//!
//! Shape: direct I/O and registered buffers both want an address that the allocator, not the caller, chose, and a write
//! may be retried or mirrored while its data is still being sent. Hence one owner type that fills and one shared type
//! that travels, as in the `bytes` crate, but aligned, joinable again after a split, and aware of the arena.

#![allow(unsafe_code)]

mod arena;
mod buddy;
mod buffer;
#[cfg(feature = "counting")]
pub mod counting;
mod heap;
mod pool;

pub use arena::{Arena, ArenaId};
pub use buffer::{Buffer, Registration, Slice};
pub use pool::{Counters, OverLimit, Pool};

/// Alignment, in bytes, of the start of every heap buffer and of every pool buffer of at least this length.
///
/// It is the page size of the platforms supported and the largest logical block size that direct I/O asks for.
pub const ALIGNMENT: usize = 4096;
