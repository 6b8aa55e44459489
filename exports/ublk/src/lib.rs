//! Block devices of this machine's kernel, by ublk: `/dev/ublkbN`, whose blocks are those of any device.
//!
//! An [`Attachment`] makes the block device, and a [`QueueServer`] serves each of its queues on a core. With a [`HostGuard`] the
//! kernel's block layer makes a tag for every block that it writes and checks that of every block that it reads; the
//! tags travel with the data, and change to those of the device in the pass that checks them.
//!
//! Invariants:
//! - A write is answered after the device has executed it, a flush after it is durable. So a server that dies loses nothing that was
//!   answered, and the driver gives its successor what was not.
//! - A block that does not match its tag is neither written nor returned.
//! - A block device in use is removed only by force, and the kernel's dirty data for it are written back first.
//! - What the kernel asks is checked before a device sees it, and no request makes this crate panic.
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
