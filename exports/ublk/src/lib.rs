//! Presents any device as a block device of this machine's kernel, by ublk: `/dev/ublkbN`.
//!
//! An [`Attachment`] creates the block device, and a [`QueueServer`] serves each of its queues on a core. With a
//! [`HostGuard`], the kernel's block layer makes a tag for every block that it writes and checks the tag of every block
//! that it reads. The tags are passed along with the data, and the pass that checks them also converts them to those of
//! the device.
//!
//! Invariants:
//! - A write is acknowledged after the device has executed it, a flush after it is durable. So when a server dies
//!   nothing that it acknowledged is lost, and the driver gives the other requests to its successor.
//! - A block that does not match its tag is neither written nor returned.
//! - A block device in use is removed only by force, and the kernel's dirty data for it are written back first.
//! - The kernel's requests are checked before a device gets them, and no request makes this crate panic.
//! - Memory: one transfer of at most 512 KiB with its tags for each request in flight, at most depth times queues.

mod attachment;
mod requests;
mod server;
mod tags;
mod users;

pub use attachment::{AttachError, Attachment, MAX_QUEUES, Options, detach};
pub use sealblock_runtime_ublk::{CONTROL_PATH, MAX_DEPTH, block_path};
pub use server::{QueueServer, Tampering, all_or_none};
pub use tags::HostGuard;
pub use users::{User, Users};
