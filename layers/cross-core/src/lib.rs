//! A device of one core, used from others.
//!
//! A device and all its inner devices belong to the core that opened them, their *owner*. [`SharedDevice::publish`] makes a handle
//! there that is `Send`; [`SharedDevice::attach`] makes it a [`sealblock_block::Device`] of the calling core. On the owner core that
//! is the device itself. From any other core, requests and replies cross between the two cores in batches.
//!
//! Invariants:
//! - A request that was handed over is executed once and gets one reply, whether or not the caller still waits.
//! - Requests of one core start in the order in which they were handed over, except those that wait while the device is quiesced.
//! - While a device is quiesced ([`SharedDevice::quiesce`]) another one may replace it, for example after a resize: requests wait and
//!   do not fail because of that, and clients still learn of failed flushes.
//! - When the owner core stops or a request panics, the request fails as [`sealblock_block::ErrorKind::Unreachable`]; no caller
//!   waits forever.
//!
//! Each core has one `Link` per device, which its attachments share, with a mailbox for each direction. A push wakes a reader
//! that sleeps; while the reader is busy, items gather, and it takes them together. A reactor that is awake, or polls busily,
//! is woken without a system call. A mailbox is locked for one push or swap, so two cores contend for some nanoseconds at most.
//! The number of requests in flight is that of the callers, which exports limit.
//!
//! The gate is on the owner core, in front of the device, so an attachment needs none.

mod attached;
mod channel;
mod device_slot;
mod durable;
mod shared;

pub use attached::{Attached, Locked};
pub use shared::{Observer, Quiesced, RequestInfo, SharedDevice};
