//! Files and block devices: bytes for a protected volume, and blocks without protection information.
//!
//! [`FileMedium`] is a file or block device opened through the reactor, past the page cache where the file system
//! allows it, and locked against other processes. [`RawDevice`] makes a raw device of any medium: blocks without tags.
//!
//! Invariants: what a medium reports about itself ([`FileMedium::is_direct`], `can_punch`) is true; a medium open for
//! writing is the only one of its file; nothing after the end is ever written, so a file grows only by `set_len`.

mod backing;
mod kernel;
mod medium;
mod notes;
mod open;
mod raw;

pub use backing::{Backing, BackingError, open_files};
pub use kernel::punches_beside;
pub use medium::{FileElsewhere, FileInfo, FileMedium};
pub use open::{OpenError, Options};
pub use raw::{BlockError, RawDevice};
