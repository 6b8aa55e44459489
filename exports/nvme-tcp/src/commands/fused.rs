//! Fused Compare and Write: two commands that are one (Base, "Fused Operations"; NVM, "Compare and Write").
//!
//! Invariants: the second command of a pair is the one right behind the first on its queue, and both are answered; the write
//! is carried out only if the compare found its blocks equal, and between the two no other change of these blocks is, whoever asks
//! for it by whichever export.
//!
//! Shape: the data of each half comes in its own time, so halves are put side by side here until both are ready.

use std::cell::RefCell;
use std::rc::Rc;

use sealblock_protocols_nvme::{Command, FABRICS_OPCODE, Fuse, Invalid, StatusCode};
use sealblock_protocols_nvme_tcp::target::Token;
use sealblock_runtime_memory::Buffer;
use sealblock_runtime_reactor::spawn;
use sealblock_units::Extent;

use crate::command_error::CommandError;
use crate::connection::{Connection, Reply, Role};
use crate::io::{IoRequest, Work};
use crate::member::NamespaceHandle;

/// ACWU: blocks that are compared and written as one, as a 0's based value.
pub(crate) const ATOMIC_BLOCKS: u64 = 1;

/// The pairs of one queue that are not whole yet.
#[derive(Default)]
pub(crate) struct Pairs(RefCell<Vec<Pair>>);

struct Pair {
    first: Half,
    /// Nothing yet, or for good once another command has come in between.
    second: Option<Half>,
    is_orphan: bool,
}

struct Half {
    token: Token,
    command: Command,
    progress: Progress,
}

enum Progress {
    /// Its data is on the way.
    Coming,
    Ready(Box<IoRequest>, Buffer),
    Refused(CommandError),
}

impl Half {
    fn new(token: Token, command: &Command) -> Half {
        Half { token, command: *command, progress: Progress::Coming }
    }

    fn is_coming(&self) -> bool {
        matches!(self.progress, Progress::Coming)
    }
}

impl Pairs {
    /// Forgets halves, and with them their share of the controller: a reset waits for that.
    pub(crate) fn clear(&self) {
        let pairs = self.0.take();
        drop(pairs);
    }
}

impl Connection {
    /// Sees every command as it comes. A second half without its first is answered here, and `false` returned.
    pub(crate) fn fuse(self: &Rc<Self>, token: Token, command: &Command) -> bool {
        let is_half = self.is_half(command);
        if !is_half && self.pairs.0.borrow().is_empty() {
            return true;
        }
        let fuse = if is_half { command.fuse() } else { Fuse::Normal };
        let takes_it = {
            let mut pairs = self.pairs.0.borrow_mut();
            let open = pairs.last_mut().filter(|pair| pair.second.is_none() && !pair.is_orphan);
            match (fuse, open) {
                (Fuse::Second, Some(pair)) => {
                    pair.second = Some(Half::new(token, command));
                    true
                }
                (Fuse::Second, None) => false,
                (_, open) => {
                    if let Some(pair) = open {
                        pair.is_orphan = true;
                    }
                    if fuse == Fuse::First {
                        pairs.push(Pair { first: Half::new(token, command), second: None, is_orphan: false });
                    }
                    true
                }
            }
        };
        self.settle_pairs();
        if !takes_it {
            self.finish(token, command, Err(StatusCode::ABORTED_MISSING_FUSED.into()));
        }
        takes_it
    }

    /// A half that cannot be carried out.
    pub(crate) fn fused_refused(self: &Rc<Self>, token: Token, refusal: CommandError) {
        self.half_came(token, Progress::Refused(refusal));
    }

    /// A half whose data is there.
    pub(crate) fn fused_ready(self: &Rc<Self>, token: Token, job: IoRequest, data: Buffer) {
        self.half_came(token, Progress::Ready(Box::new(job), data));
    }

    fn half_came(self: &Rc<Self>, token: Token, progress: Progress) {
        {
            let mut pairs = self.pairs.0.borrow_mut();
            let mut halves = pairs.iter_mut().flat_map(|pair| std::iter::once(&mut pair.first).chain(&mut pair.second));
            match halves.find(|half| half.token == token) {
                Some(half) => half.progress = progress,
                None => return,
            }
        }
        self.settle_pairs();
    }

    /// Ends the pairs of which everything is known.
    fn settle_pairs(self: &Rc<Self>) {
        loop {
            let whole = {
                let mut pairs = self.pairs.0.borrow_mut();
                let is_whole = |pair: &Pair| match &pair.second {
                    Some(second) => !pair.first.is_coming() && !second.is_coming(),
                    None => pair.is_orphan,
                };
                pairs.iter().position(is_whole).map(|place| pairs.remove(place))
            };
            match whole {
                None => return,
                Some(Pair { first, second: Some(second), .. }) => self.run_pair(first, second),
                Some(Pair { first, second: None, .. }) => {
                    self.forget_fetch(first.token);
                    self.finish(first.token, &first.command, Err(StatusCode::ABORTED_MISSING_FUSED.into()));
                }
            }
        }
    }

    /// Whether the command is half of a pair on this queue.
    pub(crate) fn is_half(&self, command: &Command) -> bool {
        matches!(command.fuse(), Fuse::First | Fuse::Second)
            && command.opcode != FABRICS_OPCODE
            && matches!(&*self.role.borrow(), Role::Io(..))
    }

    /// Its data is not waited for any more.
    fn forget_fetch(&self, token: Token) {
        self.take_fetching(token);
        self.waiting.borrow_mut().retain(|waiting| waiting.token() != token);
    }

    fn begin(&self) {
        self.running_pairs.set(self.running_pairs.get() + 1);
    }

    fn ended(&self) {
        // An answer is a sign of life, as it is of other commands.
        self.line.note_traffic();
        self.running_pairs.set(self.running_pairs.get() - 1);
        self.slots.task().wake_by_ref();
    }

    fn run_pair(self: &Rc<Self>, first: Half, second: Half) {
        let failed_pair = || Err(StatusCode::ABORTED_FAILED_FUSED.into());
        match (first.progress, second.progress) {
            (Progress::Ready(compare, old), Progress::Ready(write, new)) => {
                let connection = Rc::clone(self);
                let (one, two) = ((first.token, first.command), (second.token, second.command));
                self.begin();
                spawn(async move {
                    let (compared, written) = run(*compare, old, *write, new).await;
                    connection.finish(one.0, &one.1, compared);
                    connection.finish(two.0, &two.1, written.unwrap_or_else(failed_pair));
                    connection.ended();
                });
            }
            (Progress::Refused(refusal), second_progress) => {
                self.finish(first.token, &first.command, Err(refusal));
                let outcome = match second_progress {
                    Progress::Refused(refusal) => Err(refusal),
                    Progress::Coming | Progress::Ready(..) => failed_pair(),
                };
                self.finish(second.token, &second.command, outcome);
            }
            (_, Progress::Refused(refusal)) => {
                self.finish(first.token, &first.command, failed_pair());
                self.finish(second.token, &second.command, Err(refusal));
            }
            (Progress::Coming, _) | (_, Progress::Coming) => {
                self.finish(first.token, &first.command, failed_pair());
                self.finish(second.token, &second.command, failed_pair());
            }
        }
    }
}

type Ends = (Result<Reply, CommandError>, Option<Result<Reply, CommandError>>);

/// Compares and writes; the write's outcome is missing if it was not begun.
async fn run(compare: IoRequest, old: Buffer, write: IoRequest, new: Buffer) -> Ends {
    let (extent, namespace) = match fits(&compare, &write) {
        Ok(fits) => fits,
        Err(refusal) => return (Err(refusal), Some(Err(refusal))),
    };
    let locked = namespace.device.lock(extent).await;
    let compared = compare.run(Work::New(old)).await;
    if compared.is_err() {
        return (compared, None);
    }
    (compared, Some(write.run_on(Work::New(new), Some(&locked)).await))
}

/// The blocks of a pair, if it is a Compare and a Write of the same ones, and of no more than are one.
fn fits(compare: &IoRequest, write: &IoRequest) -> Result<(Extent, Rc<NamespaceHandle>), CommandError> {
    let (Some((namespace, compared)), Some((other, written))) = (compare.compares(), write.writes()) else {
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
