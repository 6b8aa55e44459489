//! Blocks and bytes in RAM: the device behind `mem:SIZE`, and a medium for tests and for volumes without a disk.
//!
//! Invariants: memory is obtained when it is first written and given back when a whole chunk holds nothing any more, so a
//! device costs what is stored on it, up to its size. A block that was never written reads as zeroes, and its tuple is
//! all ones, which switches checking off (deallocated blocks of the NVM Command Set specification). What a read was answered
//! with never changes.
//!
//! Shape: [`MemoryDevice`] is two sparse stretches of bytes, one for data and one for tuples, whose unwritten bytes are
//! zeroes and ones. Every request completes without waiting, so requests never overlap and no block is
//! ever seen with another's tag. Read responses share the stored bytes, and a write copies what is shared
//! first. [`MemoryMedium`] is one such stretch.

mod device;
mod medium;
mod sparse;
mod table;

pub use device::{Corruption, MemoryDevice};
pub use medium::MemoryMedium;
