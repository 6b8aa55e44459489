//! The channel between a caller's core and the owner core of a device: a mailbox in each direction, and the calls that
//! travel in them.
//!
//! Invariants: a call is in one place at a time: gathered at one end, in a mailbox, or executed. It comes back to the
//! caller's core, where what the request holds is dropped, so that memory returns to the thread that provided it; but
//! if the link is gone, the owner core drops it.
//!
//! Shape: a call is one box, which travels there and back and is used again. The calls of one turn are pushed together,
//! with one lock and at most one wake for a batch, and so are their outcomes.

use sealblock_block::{Error, ErrorKind, Outcome, Request, WriteData};
use sealblock_runtime_reactor::Mailbox;

use crate::shared::Origin;

/// Calls that are pushed before the turn ends, because so many were gathered. With more of them, one core waits while
/// the other gathers.
pub(crate) const BATCH: usize = 4;
/// A request on its way to the owner core, and its outcome on the way back.
pub(crate) struct Call {
    /// The caller's place in the table of its calls.
    pub(crate) place: usize,
    pub(crate) work: OwnerWork,
    pub(crate) from: Origin,
    /// A second handle on the data of a write that the device took, so that the last one is dropped by the caller.
    pub(crate) data: Option<WriteData>,
    pub(crate) outcome: Option<Outcome>,
}

/// The work of the owner core.
pub(crate) enum OwnerWork {
    Execute(Request),
    /// Fence the changes of the session that arrived earlier. The outcome is [`sealblock_block::Response::Done`].
    Fence,
    /// The device has taken the request.
    Taken,
}

/// The two directions of a link.
#[derive(Default)]
pub(crate) struct Channels {
    pub(crate) requests: Mailbox<Box<Call>>,
    pub(crate) replies: Mailbox<Box<Call>>,
}

/// The error of a request that the owner core cannot execute any more.
#[cold]
pub(crate) fn unreachable(device: &str) -> Error {
    let reason = "its core has stopped, or its work panicked".to_owned();
    Error::from(ErrorKind::Unreachable { reason }).with_device(device)
}
