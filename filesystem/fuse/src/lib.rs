//! Mounts any filesystem that can be read ([`ReadFs`]) or changed ([`WriteFs`]) with this machine's kernel.
//!
//! ```no_run
//! use std::path::Path;
//!
//! use sealblock_fuse::{Options, ReadFs, Session};
//! use sealblock_runtime_reactor::shutdown_signal;
//!
//! async fn mount(fs: &impl ReadFs) -> Result<(), sealblock_fuse::MountError> {
//!     let session = Session::mount(Path::new("/mnt"), fs.root(), &Options::default())?;
//!     let stop = async { drop(shutdown_signal().await) };
//!     session.serve(fs, stop).await.map(drop)
//! }
//! ```
//!
//! [`Options::write`] and [`Session::serve_writable`] make a mount that can be changed.
//!
//! The kernel caches replies as long as the mount lasts: attributes, names (also absent ones), targets of links,
//! directories, and content. It is the only one that may change the filesystem. What changes otherwise, for example by
//! a command ([`WriteFs::ioctl`]), it must be told with a [`Notifier`].
//!
//! Invariants:
//! - Nothing is changed through a read-only mount, or by [`Session::serve`]: every request for a change is refused.
//! - The filesystem is used on one core, by futures that need not be `Send`. Requests arrive on threads of the session,
//!   and a mailbox of the reactor carries them; replies are sent from the core.
//! - The number of calls in flight, and with it the memory for data, is limited; at the limit the kernel waits. What it
//!   forgets is not limited, because it cannot forget more inodes than it knew.
//! - Every request gets exactly one reply. If a request is dropped, because its future panicked or serving ended, the
//!   reply is EIO.
//! - Every inode that a reply has made known to the kernel is forgotten once by the filesystem: when the kernel forgets
//!   it, or when serving ends.
//! - The core never waits for the kernel. Threads of their own unmount and give notices, because the kernel then waits
//!   for answers of the core.
//!
//! Shape: `fuser` implements the protocol and the kernel's device, without libfuse. It is hidden behind the trait, so
//! that our own implementation can replace it; none of its types is in this interface.
//!
//! Every file uses only the files above it:
//! - `interface.rs` and `changes.rs` (the traits) with `error.rs`
//! - `attributes.rs` (values of the protocol), `call.rs` (requests between threads), `mounts.rs` (the kernel's mount
//!   table), `notices.rs` (what the kernel is told)
//! - `known.rs` (inodes that the kernel knows), `mounted.rs` (how a mount ends)
//! - `kernel.rs` (receives requests), `home.rs` (answers them)
//! - `work.rs` (what is in flight)
//! - `session.rs` (mounts, serves, unmounts)
//!
//! The serving process must not use its own mount on the core's thread, because that thread would wait for itself. If a
//! process dies without unmounting, the kernel returns ENOTCONN for its mount until it is unmounted (`umount -l`).

mod attributes;
mod call;
mod changes;
mod error;
mod home;
mod interface;
mod kernel;
mod known;
mod mounted;
mod mounts;
mod notices;
mod session;
mod work;

pub use changes::{
    Allocate, Caller, Changes, Content, CopyRange, MAX_IOCTL_BYTES, MAX_WRITE_BYTES, NewInode, NewTime, OpenMode,
    Opened, RenameMode, Write, WriteDurability, WriteFs, XattrMode,
};
pub use error::{FsError, MountError};
pub use interface::{
    Attributes, DirectoryEntry, Kind, MAX_COOKIE, MAX_NAME_BYTES, MAX_READ_BYTES, MAX_XATTR_BYTES, ReadFs, Seek,
    Statistics, Time,
};
pub use notices::{Notifier, Waiting};
pub use session::{DEFAULT_CALLS, Ended, MAX_CALLS, Options, Session, WriteOptions};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_those_that_are_documented() {
        assert_eq!(DEFAULT_CALLS as u64 * u64::from(MAX_READ_BYTES), 64 << 20, "bytes of data in memory");
        assert_eq!((MAX_CALLS, MAX_NAME_BYTES, MAX_XATTR_BYTES), (4096, 255, 64 << 10));
        assert_eq!(Options::default().calls, DEFAULT_CALLS);
    }
}
