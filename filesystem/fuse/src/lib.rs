//! Any filesystem that can be read ([`ReadFs`]), as a mount of this machine's kernel.
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
//! The kernel keeps what it received for as long as the mount lasts: attributes, names and also that there is no such name, targets of
//! links, directories, and content. So a filesystem may answer differently only after it was mounted again.
//!
//! Invariants:
//! - Nothing is ever changed: the mount is read-only, and every request for a change is refused besides.
//! - The filesystem is used on one core, by futures that need not be `Send`. Requests come on threads of the session, and a
//!   mailbox of the reactor carries them; replies are given where the answer is.
//! - The number of calls at once, and with it the memory for data, has a limit; the kernel waits when it is reached.
//! - Every request is answered once. One that is dropped, because its future panicked or serving ended, is answered with EIO.
//!
//! Shape: the protocol and the device of the kernel are `fuser`'s, without libfuse. It stands behind the trait, so that a session of our own
//! can take its place; no type of it is in this interface.
//!
//! Every file uses only those of the lines above its own:
//! - `interface.rs` (the trait) with `error.rs`
//! - `attributes.rs` (values in those of the protocol), `call.rs` (what crosses), `mounts.rs` (the kernel's table)
//! - `kernel.rs` (takes requests), `home.rs` (answers them)
//! - `session.rs` (mounts, serves, unmounts)
//!
//! The process that serves must not use its own mount from the thread of the core that answers: it would wait for itself. When a
//! process dies without unmounting, the kernel answers ENOTCONN for its mount until it is unmounted it (`umount -l`).

mod attributes;
mod call;
mod error;
mod home;
mod interface;
mod kernel;
mod mounts;
mod session;

pub use error::{FsError, MountError};
pub use interface::{
    Attributes, DirectoryEntry, Kind, MAX_COOKIE, MAX_NAME_BYTES, MAX_READ_BYTES, MAX_XATTR_BYTES, ReadFs, Seek,
    Statistics, Time,
};
pub use session::{DEFAULT_CALLS, Ended, MAX_CALLS, Options, Session};

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
