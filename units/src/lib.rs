//! Addresses, counts and sizes of blocks, each with its own type, and how numbers stand on a medium.
//!
//! Invariants: an [`Extent`] is never empty and never wraps past the last address; a [`BlockSize`] is one of the
//! sizes this system stores. The types depend on nothing, so that every other crate can use them.

mod extent;
pub mod little_endian;
mod size;

pub use extent::{BlockCount, BlockSize, Extent, Lba, RangeError};
pub use size::{ByteCount, SizeError};
