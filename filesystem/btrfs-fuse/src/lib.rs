//! Presents a Btrfs filesystem to `filesystem/fuse`: one that this process reads ([`Mounted`]), or one that it changes
//! ([`Writable`]).
//!
//! A mount has one device number for all subvolumes, but inode numbers of different subvolumes overlap. So an inode
//! number here has two parts: the highest 16 bits number the subvolumes in the order in which they were first seen, and
//! the other bits are the inode's own number. Programs that identify files by their numbers never take two files for
//! one.
//!
//! Every file uses only the files above it:
//! - `numbers.rs` (inode numbers), `values.rs` (attributes)
//! - `mounted.rs` (for reading)
//! - `writable.rs` and `writable/` (for reading and writing)

mod mounted;
mod numbers;
mod values;
mod writable;

pub use mounted::Mounted;
pub use writable::commands;
pub use writable::{Writable, WritableOptions};
