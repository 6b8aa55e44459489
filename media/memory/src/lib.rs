//! Blocks and bytes in RAM: the device of `mem:SIZE`, and a medium for tests and for volumes without a disk.
//!
//! Invariants: memory is allocated when it is first written and freed when a whole chunk is empty, so a device uses as
//! much as is stored on it, up to its size. A block that was never written reads as zeroes, and its tuple is all ones,
//! which disables checks (deallocated blocks of the NVM Command Set specification). The data of a read response never
//! change.
//!
//! [`MemoryDevice`] is two sparse ranges of bytes, one for data and one for tuples, whose unwritten bytes are zeroes
//! and ones. Every request completes without waiting, so requests never overlap and no block is ever seen with
//! another's tag. Read responses share the stored bytes, and a write copies what is shared first. [`MemoryMedium`] is
//! one such range.

mod chunk;
mod device;
mod loaded;
mod medium;
mod preallocate;
mod spares;
mod store;
mod table;

pub use device::{Corruption, MemoryDevice};
pub use medium::MemoryMedium;
pub use preallocate::PreallocateError;
pub use store::MemoryStore;
