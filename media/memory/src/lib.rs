//! Blocks and bytes in RAM: the device of `mem:SIZE`, and a medium for tests and for volumes without a disk.
//!
//! Invariants: memory is allocated when it is first written and freed when a whole chunk is empty, so a device uses as
//! much as is stored on it, up to its size. A block that was never written reads as zeroes, and its tuple is all ones,
//! which disables checks (deallocated blocks of the NVM Command Set specification). The data of a read response never
//! change. No block is ever seen with another's tag, on any core.
//!
//! A [`MemoryStore`] is common to all cores: chunks of blocks, each with its data, tags and marks behind one lock. A
//! [`MemoryDevice`] is one core's channel to it, with what that core needs for itself. Every request completes without
//! waiting, except for the lock of a chunk that another core copies just then. Read responses share the stored bytes,
//! and a write copies what is shared first. [`MemoryMedium`] is such chunks without tags.

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
