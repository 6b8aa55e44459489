//! A device of one core, used from others.
//!
//! A device and everything below it belong to the core that opened them. [`SharedDevice::publish`] makes a handle there that may
//! travel; [`SharedDevice::attach`] turns it into a [`sealblock_block::Device`] of the core that calls it. At home that is the
//! device itself, without a hop. Elsewhere requests and answers cross between the two cores in batches.
//!
//! Invariants:
//! - A request that was handed over is carried out once and answered once, whether or not the caller still waits.
//! - Requests of one core are begun in the order in which they were handed over, but for those that wait while it is quiesced.
//! - While a device is quiesced ([`SharedDevice::quiesce`]) another one may take its place, as one that has another size: requests
//!   wait, fail for no reason of that, and whoever is to be told of a failed flush still is.
//! - A home that stops, and work that panics, answer [`sealblock_block::ErrorKind::Unreachable`]; nobody waits for ever.
//!
//! Shape: one `link::Link` for each core and device, shared by all attachments there. It has a mailbox for each direction.
//! Whoever puts something into a mailbox whose reader has gone to sleep wakes it; while the reader is busy, things gather and
//! are taken together. A reactor that is awake, or spins, is woken without a system call. A mailbox is locked for one
//! push or swap, so two cores meet there for some nanoseconds at most. Beyond this the number of requests in flight is
//! that of the callers, which exports limit.
//!
//! The gate stands at home, in front of the device, so an attachment needs none of its own.

mod call_table;
mod durable;
mod link;
mod mailbox;
#[cfg(test)]
mod mailbox_tests;
mod owner;
mod place;
mod shared;
/// What [`mailbox`] is made of; a model checker puts its own in their place.
mod sync {
    pub(crate) use std::sync::{Mutex, MutexGuard};
}

pub use place::Quiesced;
pub use shared::{Attached, CrossCoreRequest, Locked, Observer, SharedDevice};
