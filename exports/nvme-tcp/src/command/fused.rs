//! Fused Compare and Write: two commands that execute as one (Base, "Fused Operations"; NVM, "Compare and Write").
//!
//! Invariants: the second command of a pair directly follows the first on its queue, and both complete. The write
//! executes only if the compare found its blocks equal, and no other change of these blocks, from any export, executes
//! between the two.
//!
//! Shape: the data of the two halves arrives independently, so a half waits here until both are ready.

use std::cell::RefCell;
use std::rc::Rc;

use sealblock_protocols_nvme::{Command, Fuse, Invalid, StatusCode};
use sealblock_protocols_nvme_tcp::target::Token;
use sealblock_runtime_memory::Buffer;
use sealblock_units::Extent;

use crate::command::io::{IoRequest, RemainingWork};
use crate::command::queue_context::NamespaceHandle;
use crate::command::reply::Reply;
use crate::model::command_error::CommandError;

/// The blocks that Compare and Write changes atomically (ACWU, as a 1's based value).
pub(crate) const ATOMIC_BLOCKS: u64 = 1;

/// The pairs of one queue that are not complete yet.
#[derive(Default)]
pub(crate) struct FusedPairs(RefCell<Vec<FusedPair>>);

pub(crate) struct FusedPair {
    pub(crate) first: FusedHalf,
    /// `None` until the second half arrives, and for good if another command came between.
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
    /// Drops all halves, and with them their references to the controller, for which a reset waits.
    pub(crate) fn clear(&self) {
        let pairs = self.0.take();
        drop(pairs);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    /// Takes the next command of the queue; `fuse` is `Normal` for one that is no half. False for a second half without its
    /// first.
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

    /// Takes a pair whose halves are both known, or the first half of one that never gets its second.
    pub(crate) fn take_known(&self) -> Option<FusedPair> {
        let mut pairs = self.0.borrow_mut();
        let is_known = |pair: &FusedPair| match &pair.second {
            Some(second) => !pair.first.is_fetching() && !second.is_fetching(),
            None => pair.is_orphan,
        };
        pairs.iter().position(is_known).map(|index| pairs.remove(index))
    }
}

type PairResults = (Result<Reply, CommandError>, Option<Result<Reply, CommandError>>);

/// Compares and writes; the outcome of the write is `None` if it did not start.
pub(crate) async fn execute_pair(compare: IoRequest, old: Buffer, write: IoRequest, new: Buffer) -> PairResults {
    let (extent, namespace) = match matched_extent(&compare, &write) {
        Ok(fits) => fits,
        Err(error) => return (Err(error), Some(Err(error))),
    };
    let locked = namespace.device.lock(extent).await;
    let compared = compare.execute(RemainingWork::All(old)).await;
    if compared.is_err() {
        return (compared, None);
    }
    (compared, Some(write.execute_with_lock(RemainingWork::All(new), Some(&locked)).await))
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
