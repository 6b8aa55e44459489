//! One verify, shared by the cores that work on it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use sealblock_block::{Abilities, BadBlock, Coverage, Device, Expectations, Request, RequestKind, Response, Unchecked};
use sealblock_integrity::PiFormat;
use sealblock_stack::range::{BlockRange, BlockSpan, Run};
use sealblock_stack::target::TargetName;
use sealblock_stack::{Cause, MemberNames, OpenTarget, StackError, device_error};
use sealblock_units::{BlockCount, ByteCount, Extent, Lba};

use super::pace::{DeviceLoad, Pacer};
use super::pieces::PieceTracker;
use super::record::{MAX_ERRORS, Record};
use super::text::{Damage, block_error, not_checked};
use crate::cli::{Mode, Verify};
use crate::findings::{Findings as Lines, MAX_LISTED, OutputStream};
use crate::interrupt;
use crate::progress::{Progress, Show};
use crate::report::{BlockError, NotChecked};

/// Blocks that are checked again at the end, to see if all replicas are still in sync: of a stripe of mirrors these include some of
/// every mirror.
const FINAL_CHECK_BLOCKS: u64 = 4096;
/// Max. bytes of a piece, so that findings and Ctrl-C are not delayed: of a local piece, and of one that another host
/// checks.
const MAX_PIECE_BYTES: [u64; 2] = [8 << 20, 64 << 20];
/// Bytes from which on another core pays.
const LONG_BYTES: u64 = 64 << 20;

/// Which target is verified, and how.
#[derive(Clone, Copy)]
pub(super) struct VerifyRequest<'a> {
    /// The command.
    pub(super) arguments: &'a Verify,
    /// One of its targets.
    pub(super) target: &'a TargetName,
}

impl VerifyRequest<'_> {
    /// What lines begin with: the target, if the command has several.
    pub(super) fn prefix(self) -> String {
        if self.arguments.targets.len() > 1 { format!("{}: ", self.target) } else { String::new() }
    }
}

/// The coverage of a check of these blocks now, whatever it finds.
pub async fn coverage_of(opened: &OpenTarget, extent: Extent) -> Result<Coverage, StackError> {
    let verify = Request::verify(extent, Expectations::NONE);
    match opened.device.execute(verify).await {
        Ok(Response::Verified(verified)) => Ok(verified.coverage),
        Ok(_) => Ok(Coverage::default()),
        Err(error) => match error.into_damage() {
            Ok((_, coverage)) => Ok(coverage),
            Err(error) => Err(device_error(format!("verify {extent}"), &error)),
        },
    }
}

/// One verify: the rest of its range, and what it has found.
pub struct VerifyJob {
    span: BlockSpan,
    /// The first block of the whole verify, which an earlier run may have begun.
    begin: Lba,
    piece_blocks: u64,
    is_long: bool,
    /// True if only one piece may be in flight.
    is_alone: bool,
    /// True if repairs were asked for.
    repairs: bool,
    next: AtomicU64,
    how: VerifyPath,
    pace: Option<Pacer>,
    progress: Progress,
    members: MemberNames,
    /// What lines begin with.
    prefix: Arc<str>,
    format: Option<PiFormat>,
    state: Mutex<JobState>,
    /// True once the checks count, since replicas were in sync after them.
    is_settled: AtomicBool,
}

/// What the finished pieces found.
struct JobState {
    ledger: PieceTracker,
    lines: Lines<Damage>,
    findings: Findings,
    transfer: Transfer,
}

/// Who executes the checks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum VerifyPath {
    /// The device, which is remote.
    Offloaded,
    /// The device, in this process.
    Local,
    /// This process, after reading the blocks.
    ReadAndCheck,
    /// The device, which has replicas and repairs bad blocks.
    Repair,
}

impl VerifyPath {
    /// The path for a device with these abilities.
    fn of(order: VerifyRequest<'_>, abilities: &Abilities) -> Result<VerifyPath, StackError> {
        let VerifyRequest { arguments, target } = order;
        let is_native = abilities.is_native(RequestKind::Verify);
        let refuse = |why: &str, advice: &str| {
            Err(StackError::new(Cause::Absent, "verify", why).on(target).advise(advice.to_owned()))
        };
        match arguments.mode {
            Mode::Offload if !is_native => {
                refuse("the device does not support verification", "use --mode auto or --mode emulate")
            }
            Mode::Offload if !abilities.offloads => {
                refuse("this process checks some of its blocks: there is no device to offload to", "use --mode auto")
            }
            // The repairing process compares the copies where they are, and does not read one of them.
            Mode::Emulate if arguments.repair && abilities.is_native(RequestKind::Repair) => {
                refuse("repairs need every copy, and --mode emulate reads only one", "use --repair without --mode")
            }
            _ if arguments.repair && abilities.is_native(RequestKind::Repair) => Ok(VerifyPath::Repair),
            Mode::Emulate => Ok(VerifyPath::ReadAndCheck),
            Mode::Auto if !is_native => Ok(VerifyPath::ReadAndCheck),
            Mode::Auto | Mode::Offload if abilities.offloads => Ok(VerifyPath::Offloaded),
            Mode::Auto | Mode::Offload => Ok(VerifyPath::Local),
        }
    }
}

/// What a verify has found.
#[derive(Default)]
pub struct Findings {
    /// The bad blocks, in order. Bounded, in case every block is bad.
    pub errors: Vec<BlockError>,
    /// Bad blocks that are not listed there.
    pub unlisted: u64,
    /// Bad blocks without a printed line.
    pub unprinted: u64,
    /// Blocks that were checked.
    pub blocks: u64,
    /// The rest of the range, if the verify ended early: it starts at the first unchecked block.
    pub resume: Option<BlockRange>,
    /// The coverage of all checks.
    pub coverage: Coverage,
    /// Bytes of payload that crossed from the device to this host.
    pub bytes_transferred: u64,
}

/// What a job has verified without a gap, from its first block on.
pub(super) struct VerifyProgress {
    /// The first block behind it.
    pub(super) next: u64,
    /// Bad blocks, as many as a record keeps.
    pub(super) errors: Vec<BlockError>,
    /// Bad blocks that are not listed there.
    pub(super) unlisted: u64,
    /// All bad blocks, listed or not.
    pub(super) damaged: u64,
    /// Blocks of which a copy was not checked.
    pub(super) unchecked: Vec<NotChecked>,
    /// True if every block had a seal.
    pub(super) is_sealed: bool,
    /// Bytes of payload that crossed from the device to this host; also of blocks behind a gap.
    pub(super) bytes_transferred: u64,
}

/// Bytes of checked pieces, and of what crossed from the device for them.
#[derive(Default)]
struct Transfer {
    known: u64,
    crossed: u64,
    /// Of pieces with bad blocks, whose checks do not tell what crossed.
    unknown: u64,
}

impl Transfer {
    fn add(&mut self, bytes: u64, crossed: Option<u64>) {
        match crossed {
            Some(crossed) => {
                self.known += bytes;
                self.crossed += crossed;
            }
            None => self.unknown += bytes,
        }
    }

    /// What crossed for all pieces. Those with bad blocks count like the others, since a mirror reads each copy; once, if
    /// there are no others.
    fn total(&self) -> u64 {
        let of_unknown = u128::from(self.unknown) * u128::from(self.crossed);
        let unknown = of_unknown.checked_div(u128::from(self.known)).unwrap_or(u128::from(self.unknown));
        self.crossed + u64::try_from(unknown).unwrap_or(u64::MAX - self.crossed)
    }
}

impl VerifyJob {
    /// The job for these arguments.
    pub fn new(
        order: VerifyRequest<'_>,
        opened: &OpenTarget,
        span: BlockSpan,
        earlier: Option<&Record>,
        show: Show,
    ) -> Result<VerifyJob, StackError> {
        let VerifyRequest { arguments, target } = order;
        let geometry = opened.device.geometry();
        let abilities = opened.device.abilities();
        let how = VerifyPath::of(order, &abilities)?;
        let whole = if how == VerifyPath::ReadAndCheck {
            geometry.limits.max_transfer_blocks
        } else {
            geometry.limits.max_verify_blocks
        };
        let rate = arguments.rate.map(|rate| rate.bytes_per_second());
        let load = if arguments.idle { Some(DeviceLoad::under(target)?) } else { None };
        let is_alone = load.is_some();
        let pace = (rate.is_some() || is_alone).then(|| Pacer::new(rate, load));
        let paced = pace.as_ref().map_or(u64::MAX, |pace| (pace.piece_bytes() >> geometry.block_size.shift()).max(1));
        let most = MAX_PIECE_BYTES[usize::from(how == VerifyPath::Offloaded)] >> geometry.block_size.shift();
        let total = ByteCount::new(span.blocks().saturating_mul(geometry.block_size.bytes() as u64));
        let prefix: Arc<str> = order.prefix().into();
        let mut lines = Lines::new(if arguments.json { OutputStream::Silent } else { OutputStream::Output });
        for error in earlier.iter().flat_map(|earlier| &earlier.errors) {
            lines.note(Run::new(error.lba, 1, Damage::of(error, &prefix)));
        }
        Ok(VerifyJob {
            span,
            begin: earlier.map_or(span.first(), |earlier| Lba::new(earlier.asked.first)),
            piece_blocks: u64::from(whole.get()).min(most).min(paced),
            is_long: total.get() > LONG_BYTES,
            is_alone,
            repairs: arguments.repair,
            next: AtomicU64::new(0),
            how,
            pace,
            progress: Progress::new(&format!("verifying {target}"), Some(total), show),
            members: opened.member_names(),
            prefix,
            format: geometry.protection,
            state: Mutex::new(JobState {
                ledger: PieceTracker::new(span.first()),
                lines,
                findings: Findings::default(),
                transfer: Transfer::default(),
            }),
            is_settled: AtomicBool::new(false),
        })
    }

    /// True if a remote device executes the checks.
    pub fn offloads(&self) -> bool {
        self.how == VerifyPath::Offloaded
    }

    /// True if the target is open for writing, for repairs, also where it has no copies: no other core can open it then.
    pub fn repairs(&self) -> bool {
        self.repairs
    }

    /// True if only one piece may be in flight: what others do on the device is seen between two pieces.
    pub fn is_alone(&self) -> bool {
        self.is_alone
    }

    /// True if another core pays.
    pub fn is_long(&self) -> bool {
        self.is_long
    }

    /// Executes pieces until none is left or a signal ends the job. Several cores may do so, each with its own open
    /// target.
    pub async fn run(&self, opened: &OpenTarget) -> Result<(), StackError> {
        let block_size = opened.device.geometry().block_size;
        while self.is_left() {
            if let Some(pace) = &self.pace {
                pace.wait(self.piece_blocks << block_size.shift(), || self.is_left()).await;
            }
            // A piece is taken only when it may start: one that waits while later ones are checked would be a gap.
            let Some(extent) = (if interrupt::came() { None } else { self.take() }) else { break };
            self.check(opened, extent, extent.bytes(block_size)).await?;
        }
        Ok(())
    }

    /// The findings until now, after all lines were printed.
    ///
    /// # Errors
    /// When it could not be printed.
    pub fn findings(&self) -> Result<Findings, StackError> {
        self.finish_findings(&mut self.lock())
    }

    /// The same, or `None` if another core is printing, which may block.
    pub fn findings_now(&self) -> Option<Result<Findings, StackError>> {
        self.state.try_lock().ok().map(|mut state| self.finish_findings(&mut state))
    }

    fn finish_findings(&self, state: &mut JobState) -> Result<Findings, StackError> {
        let rest = state.ledger.take_rest();
        self.add(state, rest);
        state.lines.finish(&self.progress)?;
        let mut findings = std::mem::take(&mut state.findings);
        findings.bytes_transferred = state.transfer.total();
        findings.coverage.sort();
        findings.unprinted = state.lines.unlisted();
        findings.blocks = state.ledger.checked();
        let next = state.ledger.next();
        let is_left = findings.blocks < self.span.blocks() && next <= self.span.last();
        findings.resume = is_left.then(|| BlockRange::new(next, Some(self.span.last())).ok()).flatten();
        Ok(findings)
    }

    /// Adds bad blocks in the order of their addresses.
    fn add(&self, state: &mut JobState, faults: Vec<BadBlock>) {
        for fault in &faults {
            let error = block_error(fault, self.format, &self.members);
            state.lines.note(Run::new(error.lba, 1, Damage::of(&error, &self.prefix)));
            if state.findings.errors.len() < MAX_LISTED {
                state.findings.errors.push(error);
            } else {
                state.findings.unlisted += 1;
            }
        }
    }

    /// What was verified without a gap until now; nothing while another core prints, which may block.
    pub(super) fn so_far(&self) -> Option<VerifyProgress> {
        let state = self.state.try_lock().ok()?;
        let (mut next, findings) = (state.ledger.next().get(), &state.findings);
        if !self.is_settled.load(Ordering::Acquire) {
            // The last check of all decides whether the others count: until then the last block is left to verify.
            next = next.min(self.span.last().get());
        }
        let below = findings.errors.partition_point(|error| error.lba < next);
        let errors = findings.errors[..below.min(MAX_ERRORS)].to_vec();
        let damaged = findings.errors.len() as u64 + findings.unlisted;
        let unchecked = findings.coverage.unchecked().iter().filter(|run| run.first.get() < next);
        let unchecked = unchecked.map(|run| {
            let run = not_checked(run, &self.members);
            NotChecked { last: run.last.min(next - 1), ..run }
        });
        Some(VerifyProgress {
            next,
            unlisted: (below - errors.len()) as u64 + findings.unlisted,
            damaged,
            errors,
            unchecked: unchecked.collect(),
            is_sealed: findings.coverage.is_sealed(),
            bytes_transferred: state.transfer.total(),
        })
    }

    /// Bad blocks until now; none while another core prints.
    pub(super) fn damaged(&self) -> u64 {
        let state = self.state.try_lock().ok();
        state.map_or(0, |state| state.findings.errors.len() as u64 + state.findings.unlisted)
    }

    /// Checks again if all replicas are online and in sync: the checks of a replica are obsolete if it failed
    /// since. Only devices with replicas need it.
    pub async fn check_sync_again(&self, opened: &OpenTarget) -> Result<(), StackError> {
        let blocks = self.span.blocks().min(self.piece_blocks).min(FINAL_CHECK_BLOCKS);
        let first = Extent::from_raw(self.span.first().get(), blocks).ok();
        let Some(first) = first.filter(|_| opened.device.abilities().copies && self.how != VerifyPath::ReadAndCheck)
        else {
            self.is_settled.store(true, Ordering::Release);
            return Ok(());
        };
        let coverage = coverage_of(opened, first).await?;
        let last = Lba::new(self.span.first().get() + self.span.blocks() - 1);
        // Also what was verified before an interruption.
        let everything = |run: Unchecked| Unchecked { first: self.begin, last, ..run };
        self.lock().findings.coverage.merge(coverage.map(everything));
        self.is_settled.store(true, Ordering::Release);
        Ok(())
    }

    /// True if a piece is left to take.
    fn is_left(&self) -> bool {
        self.next.load(Ordering::Relaxed) < self.span.blocks()
    }

    fn take(&self) -> Option<Extent> {
        let at = self.next.fetch_add(self.piece_blocks, Ordering::Relaxed);
        let left = self.span.blocks().checked_sub(at).filter(|left| *left > 0)?;
        let blocks = BlockCount::new(left.min(self.piece_blocks) as u32)?;
        Extent::new(Lba::new(self.span.first().get() + at), blocks).ok()
    }

    async fn check(&self, opened: &OpenTarget, extent: Extent, bytes: u64) -> Result<(), StackError> {
        let outcome = match self.how {
            VerifyPath::ReadAndCheck => opened.device.verify_by_reading(extent, Expectations::NONE).await,
            VerifyPath::Repair => opened.device.execute(Request::repair(extent)).await,
            VerifyPath::Offloaded | VerifyPath::Local => {
                opened.device.execute(Request::verify(extent, Expectations::NONE)).await
            }
        };
        let is_offloaded = self.how == VerifyPath::Offloaded;
        let (faults, coverage, read) = match outcome {
            Ok(Response::Verified(verified)) => (Vec::new(), verified.coverage, Some(verified.bytes_transferred)),
            Ok(_) => unreachable!("a gate completes a check with its cost"),
            Err(error) => match error.into_damage() {
                Ok((faults, coverage)) => (faults, coverage, is_offloaded.then_some(0)),
                Err(error) => return Err(device_error(format!("verify {extent}"), &error)),
            },
        };
        if !faults.is_empty() {
            self.progress.bad(faults.len() as u64);
        }
        // The host cannot know how much of a failed remote request was executed: all of it counts.
        self.progress.advance_by(bytes, read.filter(|_| !is_offloaded).unwrap_or(bytes));
        let mut state = self.lock();
        state.findings.coverage.merge(coverage);
        state.transfer.add(bytes, read);
        let in_order = state.ledger.done(extent, faults);
        self.add(&mut state, in_order);
        let JobState { ledger, lines, .. } = &mut *state;
        lines.reached(ledger.next(), &self.progress);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, JobState> {
        // Findings are consistent after a panic on another core: use them.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
