//! Presents a Btrfs filesystem to `filesystem/fuse`: one that this process reads ([`Mounted`]), or one that it changes
//! ([`Writable`]).
//!
//! A mount has one device number for all subvolumes, but inode numbers of different subvolumes overlap. So an inode
//! number here has two parts: the highest 16 bits number the subvolumes in the order in which they were first seen, and
//! the other bits are the inode's own number. Programs that identify files by their numbers never take two files for
//! one.
//!
//! # Who does what of a change
//!
//! | | by |
//! | --- | --- |
//! | permissions, also by access control lists; sticky bits; who may change a mode or an owner | the kernel |
//! | the set-group-ID bit of a mode that a user outside the group sets, or asks for in a new file | the kernel |
//! | lengths of names and paths; loops of symbolic links; leases and locks of files | the kernel |
//! | pages: writes that are collected, mappings, reading ahead, what is dropped after direct writes | the kernel |
//! | the times of files whose writes it collects | the kernel |
//! | owner and group of a new inode, the set-group-ID bit of a new directory, flags, compression | the engine |
//! | access control lists: those of new inodes, and those that change with the mode, and the mode with them | the engine |
//! | set-ID bits and capabilities that go when content or owner change | here, when the kernel asks for it |
//! | EXDEV for names across subvolumes; EROFS in read-only ones; EMLINK; flags that forbid changes | here and the engine |
//! | inodes without names, which stay until the kernel has forgotten them | here |
//! | subvolumes that were deleted, whose nodes stay until no inode of them is known | here |
//! | what is durable when a request is answered | here and the engine |
//!
//! # Times
//!
//! A change sets mtime and ctime as Linux does: of a directory that gets or loses a name, and ctime of an inode that gets
//! or loses one, moves, or whose attributes change. Reading changes no time.
//!
//! # Limits
//!
//! - [`MAX_SUBVOLUMES`] subvolumes, with those that were deleted while the filesystem is mounted; inode numbers of 48 bits.
//! - A subvolume that a snapshot shows in place of another one is an empty directory that never has an entry. It can be
//!   removed, which removes the name and nothing else, but it cannot be renamed.
//! - A file that was opened before `chattr +S` is synchronous only when it is opened again.
//!
//! # Files
//!
//! Every file uses only the files above it:
//! - `numbers.rs` (inode numbers), `values.rs` (attributes)
//! - `mounted.rs` (for reading)
//! - `writable/known.rs`, `writable/error.rs`, `writable.rs` (for reading and writing)
//! - `writable/data.rs`, `writable/changes.rs` (changes), `writable/commands.rs` (ioctl), `writable/background.rs` (commits)
//!
//! # Order of what ends a mount
//!
//! The session ends, which forgets all inodes; the work in the background ends ([`Writable::end_background`]) and is
//! awaited, since a commit that has begun is completed; then [`Writable::close`] makes the last commit. Only after that may
//! the devices be closed.

mod mounted;
mod numbers;
mod values;
mod writable;

pub use mounted::Mounted;
pub use numbers::MAX_SUBVOLUMES;
pub use writable::commands;
pub use writable::{Writable, WritableOptions};
