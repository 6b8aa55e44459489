//! Addresses, counts and sizes of blocks, each with its own type.
//!
//! Invariants: an [`Extent`] is never empty and never wraps past the last address; a [`BlockSize`] is one of the
//! sizes this system stores. The types depend on nothing, so that every other crate may speak them.

mod block_size;
mod extent;
mod size;

pub use block_size::BlockSize;
pub use extent::{BlockCount, Extent, Lba, RangeError};
pub use size::{ByteCount, SizeError};
