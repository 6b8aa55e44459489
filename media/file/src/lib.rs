//! Files and block devices: bytes for a protected volume to stand on, and blocks without protection information.
//!
//! [`FileMedium`] is a file or block device opened through the reactor, past the page cache where the file system allows it,
//! and locked against other processes. [`RawDevice`] makes a raw device of any medium: blocks, no tags.
//!
//! Invariants: what a medium says about itself ([`FileMedium::is_direct`], `can_punch`) is what it does; one that is open for
//! writing is the only one; nothing past the end is ever written, so a file grows only by `set_len`.

mod backing;
mod kernel;
mod medium;
mod notes;
mod open;
mod raw;

pub use backing::{Backing, BackingError, open_files};
pub use kernel::punches_beside;
pub use medium::{FileInfo, FileMedium};
pub use open::{OpenError, Options};
pub use raw::{BlockError, RawDevice};
