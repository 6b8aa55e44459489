//! Fused Compare and Write: two commands that execute as one (Base, "Fused Operations"; NVM, "Compare and Write").
//!
//! Invariants: the second command of a pair directly follows the first on its queue, and both complete. The write
//! executes only if the compare found its blocks equal, and no other change of these blocks, from any export, executes
//! between the two.
//!
//! Shape: the data of the two halves arrives independently, so a half waits here until both are ready.

use std::cell::RefCell;
use std::rc::Rc;

use sealblock_protocols_nvme::{Command, FABRICS_OPCODE, Fuse, Invalid, StatusCode};
use sealblock_protocols_nvme_tcp::target::Token;
use sealblock_runtime_memory::Buffer;
use sealblock_runtime_reactor::spawn;
use sealblock_units::Extent;

use crate::command_error::CommandError;
use crate::connection::{Connection, Reply, Role};
use crate::io::{IoRequest, RemainingWork};
use crate::member::NamespaceHandle;

/// The blocks that Compare and Write changes atomically (ACWU, as a 1's based value).
pub(crate) const ATOMIC_BLOCKS: u64 = 1;

/// The pairs of one queue that are not complete yet.
#[derive(Default)]
pub(crate) struct FusedPairs(RefCell<Vec<FusedPair>>);

struct FusedPair {
    first: FusedHalf,
    /// `None` until the second half arrives, and for good if another command came between.
    second: Option<FusedHalf>,
    is_orphan: bool,
}

struct FusedHalf {
    token: Token,
    command: Command,
    progress: HalfProgress,
}

enum HalfProgress {
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
    /// Forgets halves, and with them their share of the controller: a reset waits for that.
    pub(crate) fn clear(&self) {
        let pairs = self.0.take();
        drop(pairs);
    }
}

impl Connection {
    /// Takes every command in order. Fails a second half without its first, and returns `false`.
    pub(crate) fn fuse(self: &Rc<Self>, token: Token, command: &Command) -> bool {
        let is_half = self.is_half(command);
        if !is_half && self.pairs.0.borrow().is_empty() {
            return true;
        }
        let fuse = if is_half { command.fuse() } else { Fuse::Normal };
        let is_accepted = {
            let mut pairs = self.pairs.0.borrow_mut();
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
        };
        self.complete_pairs();
        if !is_accepted {
            self.complete(token, command, Err(StatusCode::ABORTED_MISSING_FUSED.into()));
        }
        is_accepted
    }

    /// Records that a half failed.
    pub(crate) fn fail_half(self: &Rc<Self>, token: Token, error: CommandError) {
        self.set_half_progress(token, HalfProgress::Failed(error));
    }

    /// Records that a half has its data.
    pub(crate) fn half_ready(self: &Rc<Self>, token: Token, request: IoRequest, data: Buffer) {
        self.set_half_progress(token, HalfProgress::Ready(Box::new(request), data));
    }

    fn set_half_progress(self: &Rc<Self>, token: Token, progress: HalfProgress) {
        {
            let mut pairs = self.pairs.0.borrow_mut();
            let mut halves = pairs.iter_mut().flat_map(|pair| std::iter::once(&mut pair.first).chain(&mut pair.second));
            match halves.find(|half| half.token == token) {
                Some(half) => half.progress = progress,
                None => return,
            }
        }
        self.complete_pairs();
    }

    /// Executes or fails the pairs whose halves are both known.
    fn complete_pairs(self: &Rc<Self>) {
        loop {
            let whole = {
                let mut pairs = self.pairs.0.borrow_mut();
                let is_whole = |pair: &FusedPair| match &pair.second {
                    Some(second) => !pair.first.is_fetching() && !second.is_fetching(),
                    None => pair.is_orphan,
                };
                pairs.iter().position(is_whole).map(|place| pairs.remove(place))
            };
            match whole {
                None => return,
                Some(FusedPair { first, second: Some(second), .. }) => self.run_pair(first, second),
                Some(FusedPair { first, second: None, .. }) => {
                    self.cancel_fetch(first.token);
                    self.complete(first.token, &first.command, Err(StatusCode::ABORTED_MISSING_FUSED.into()));
                }
            }
        }
    }

    /// True if the command is half of a pair on this queue.
    pub(crate) fn is_half(&self, command: &Command) -> bool {
        matches!(command.fuse(), Fuse::First | Fuse::Second)
            && command.opcode != FABRICS_OPCODE
            && matches!(&*self.role.borrow(), Role::Io(..))
    }

    /// Stops waiting for its data.
    fn cancel_fetch(&self, token: Token) {
        self.take_fetching(token);
        self.waiting.borrow_mut().retain(|waiting| waiting.token() != token);
    }

    fn pair_started(&self) {
        self.running_pairs.set(self.running_pairs.get() + 1);
    }

    fn pair_completed(&self) {
        // A completion counts as traffic for Keep Alive, as for other commands.
        self.signal.note_traffic();
        self.running_pairs.set(self.running_pairs.get() - 1);
        self.slots.task().wake_by_ref();
    }

    fn run_pair(self: &Rc<Self>, first: FusedHalf, second: FusedHalf) {
        let failed_pair = || Err(StatusCode::ABORTED_FAILED_FUSED.into());
        match (first.progress, second.progress) {
            (HalfProgress::Ready(compare, old), HalfProgress::Ready(write, new)) => {
                let connection = Rc::clone(self);
                let (one, two) = ((first.token, first.command), (second.token, second.command));
                self.pair_started();
                spawn(async move {
                    let (compared, written) = execute_pair(*compare, old, *write, new).await;
                    connection.complete(one.0, &one.1, compared);
                    connection.complete(two.0, &two.1, written.unwrap_or_else(failed_pair));
                    connection.pair_completed();
                });
            }
            (HalfProgress::Failed(error), second_progress) => {
                self.complete(first.token, &first.command, Err(error));
                let outcome = match second_progress {
                    HalfProgress::Failed(error) => Err(error),
                    HalfProgress::Fetching | HalfProgress::Ready(..) => failed_pair(),
                };
                self.complete(second.token, &second.command, outcome);
            }
            (_, HalfProgress::Failed(error)) => {
                self.complete(first.token, &first.command, failed_pair());
                self.complete(second.token, &second.command, Err(error));
            }
            (HalfProgress::Fetching, _) | (_, HalfProgress::Fetching) => {
                self.complete(first.token, &first.command, failed_pair());
                self.complete(second.token, &second.command, failed_pair());
            }
        }
    }
}

type PairResults = (Result<Reply, CommandError>, Option<Result<Reply, CommandError>>);

/// Compares and writes; the outcome of the write is `None` if it did not start.
async fn execute_pair(compare: IoRequest, old: Buffer, write: IoRequest, new: Buffer) -> PairResults {
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
