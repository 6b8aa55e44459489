//! Fused Compare and Write: two commands that execute as one (Base, "Fused Operations"; NVM, "Compare and Write").
//!
//! Invariants: the second command of a pair directly follows the first on its queue, and both complete. The write
//! executes only if the compare found its blocks equal, and no other change of these blocks, from any export, executes
//! between the two. If the device compares and writes itself, this includes changes from its other initiators.
//!
//! Shape: a device that compares and writes itself gets one request. For any other device, the blocks are locked,
//! compared and written. The data of the two halves arrives independently, so a half waits here until both are ready.

use std::cell::RefCell;
use std::rc::Rc;

use sealblock_block::{Device, ErrorKind, Operation, Request};
use sealblock_integrity::Sealed;
use sealblock_protocols_nvme::{Command, Fuse, Invalid, StatusCode};
use sealblock_protocols_nvme_tcp::target::Token;
use sealblock_runtime_memory::Buffer;
use sealblock_units::Extent;

use crate::command::io::{IoRequest, RemainingWork};
use crate::command::queue_context::{NamespaceHandle, record};
use crate::command::reply::Reply;
use crate::model::command_error::CommandError;
use crate::model::damage_list::RequestSummary;
use crate::model::namespace::NO_TAGS;

/// The blocks that Compare and Write changes atomically (ACWU, as a 1's based value).
pub(crate) const ATOMIC_BLOCKS: u64 = 1;

/// The pairs of one queue that are not complete yet.
#[derive(Default)]
pub(crate) struct FusedPairs(RefCell<Vec<FusedPair>>);

pub(crate) struct FusedPair {
    pub(crate) first: FusedHalf,
    /// `None` until the second half arrives, and permanently if another command came in between.
    pub(crate) second: Option<FusedHalf>,
    is_orphan: bool,
}

pub(crate) struct FusedHalf {
    pub(crate) token: Token,
    pub(crate) command: Command,
    pub(crate) progress: HalfProgress,
}

pub(crate) enum HalfProgress {
    /// Its data is being fetched.
    Fetching,
    Ready(Box<IoRequest>, Buffer),
    Failed(CommandError),
}

impl FusedHalf {
    fn new(token: Token, command: &Command) -> FusedHalf {
        FusedHalf { token, command: *command, progress: HalfProgress::Fetching }
    }

    fn is_fetching(&self) -> bool {
        matches!(self.progress, HalfProgress::Fetching)
    }
}

impl FusedPairs {
    /// Drops all halves, and with them their references to the controller, which delay a reset.
    pub(crate) fn clear(&self) {
        let pairs = self.0.take();
        drop(pairs);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    /// Takes the next command of the queue; `fuse` is `Normal` if it is not half of a pair. Returns false for a second
    /// half without its first.
    pub(crate) fn add(&self, token: Token, command: &Command, fuse: Fuse) -> bool {
        let mut pairs = self.0.borrow_mut();
        let open = pairs.last_mut().filter(|pair| pair.second.is_none() && !pair.is_orphan);
        match (fuse, open) {
            (Fuse::Second, Some(pair)) => {
                pair.second = Some(FusedHalf::new(token, command));
                true
            }
            (Fuse::Second, None) => false,
            (_, open) => {
                if let Some(pair) = open {
                    pair.is_orphan = true;
                }
                if fuse == Fuse::First {
                    pairs.push(FusedPair { first: FusedHalf::new(token, command), second: None, is_orphan: false });
                }
                true
            }
        }
    }

    /// Sets the progress of a half; false if no pair has it.
    pub(crate) fn set_progress(&self, token: Token, progress: HalfProgress) -> bool {
        let mut pairs = self.0.borrow_mut();
        let mut halves = pairs.iter_mut().flat_map(|pair| std::iter::once(&mut pair.first).chain(&mut pair.second));
        match halves.find(|half| half.token == token) {
            Some(half) => half.progress = progress,
            None => return false,
        }
        true
    }

    /// Takes a pair whose halves are both known, or the first half of a pair that never gets its second.
    pub(crate) fn take_known(&self) -> Option<FusedPair> {
        let mut pairs = self.0.borrow_mut();
        let is_known = |pair: &FusedPair| match &pair.second {
            Some(second) => !pair.first.is_fetching() && !second.is_fetching(),
            None => pair.is_orphan,
        };
        pairs.iter().position(is_known).map(|index| pairs.remove(index))
    }
}

/// The results of both halves.
type PairResults = (Result<Reply, CommandError>, Option<Result<Reply, CommandError>>);

/// Compares and writes; the result of the write is `None` if it did not start.
pub(crate) async fn execute_pair(compare: IoRequest, old: Buffer, write: IoRequest, new: Buffer) -> PairResults {
    let (extent, namespace) = match matched_extent(&compare, &write) {
        Ok(fits) => fits,
        Err(error) => return (Err(error), Some(Err(error))),
    };
    // If tags are visible to hosts they are compared too, which no device does.
    if namespace.format().is_none() && u64::from(namespace.device.abilities().compare_and_write_blocks) >= extent.len()
    {
        return by_device(&namespace, (&compare, old), (&write, new)).await;
    }
    let locked = namespace.device.lock(extent).await;
    let compared = compare.execute(RemainingWork::All(old)).await;
    if compared.is_err() {
        return (compared, None);
    }
    (compared, Some(write.execute_with_lock(RemainingWork::All(new), Some(&locked)).await))
}

/// Executes a pair as one request to the device of a plain namespace. If the request fails for a reason other than the
/// stored content, the Write fails, and its status says whether it may be sent again.
async fn by_device(
    namespace: &NamespaceHandle,
    (compare, old): (&IoRequest, Buffer),
    (write, new): (&IoRequest, Buffer),
) -> PairResults {
    let write_failed = |error| {
        let aborted = CommandError::from(StatusCode::ABORTED_FAILED_FUSED);
        (Err(aborted), Some(write.finish(namespace, Err(error))))
    };
    let (extents, new, durability) = match write.translate(namespace, new) {
        Ok(RemainingWork::Request(Request { operation: Operation::Write(new), extents, durability })) => {
            (extents, new, durability)
        }
        Ok(_) => return write_failed(StatusCode::INTERNAL_ERROR.into()),
        Err(error) => return write_failed(error),
    };
    let geometry = namespace.device.geometry();
    let expected = Sealed::seal(old.freeze(), geometry.block_size, None, &NO_TAGS);
    let request = Request::compare_and_write(extents.one(), expected, new.into_sealed(), durability);
    let summary = RequestSummary::of(&request, geometry);
    let outcome = namespace.device.execute(request).await;
    let is_of_compare = outcome
        .as_ref()
        .is_err_and(|error| matches!(error.kind(), ErrorKind::Miscompare { .. } | ErrorKind::Integrity(_)));
    match record(namespace, &summary, outcome) {
        Ok(_) => {
            let done = || Ok(Reply::Done(0));
            (compare.finish(namespace, done()), Some(write.finish(namespace, done())))
        }
        Err(error) if is_of_compare => (compare.finish(namespace, Err(error)), None),
        Err(error) => write_failed(error),
    }
}

/// Returns the blocks of a pair, if it is a Compare and a Write of the same blocks, and within the atomic limit.
fn matched_extent(compare: &IoRequest, write: &IoRequest) -> Result<(Extent, Rc<NamespaceHandle>), CommandError> {
    let (Some((namespace, compared)), Some((other, written))) = (compare.compared_extent(), write.written_extent())
    else {
        return Err(Invalid::field("FUSE", 0, 8).into());
    };
    if !Rc::ptr_eq(namespace, other) {
        return Err(Invalid::field("NSID", 1, 0).into());
    }
    if compared.start() != written.start() {
        return Err(Invalid::field("SLBA", 10, 0).into());
    }
    if compared.len() != written.len() {
        return Err(Invalid::field("NLB", 12, 0).into());
    }
    if compared.len() > ATOMIC_BLOCKS {
        return Err(StatusCode::ATOMIC_WRITE_UNIT_EXCEEDED.into());
    }
    Ok((compared, Rc::clone(namespace)))
}
