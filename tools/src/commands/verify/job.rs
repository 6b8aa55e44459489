//! One verify, shared by the cores that work on it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use sealblock_block::{Abilities, Ability, BadBlock, Coverage, Device, Request, Response, Unchecked};
use sealblock_integrity::PiFormat;
use sealblock_units::{BlockCount, ByteCount, Extent, Lba};

use super::pieces::PieceTracker;
use super::text::{Damage, block_error};
use crate::cli::{Mode, Verify};
use crate::exit::{Cause, CliError};
use crate::findings::{Findings as Lines, MAX_LISTED, Run, Voice};
use crate::interrupt;
use crate::progress::{Progress, Show};
use crate::range::{BlockRange, BlockSpan};
use crate::stack::{OpenTarget, of_block};
use crate::target::TargetName;

/// Blocks that are looked at once more in the end, to see whether copies are in sync still: of a stripe of mirrors some of
/// every mirror.
const FINAL_CHECK_BLOCKS: u64 = 4096;
/// Bytes of a piece at most, so that what is found is told soon, and Ctrl-C is heeded: of one that is done here, and of one that
/// another host does.
const MAX_PIECE_BYTES: [u64; 2] = [8 << 20, 64 << 20];
/// What is worth another core.
const LONG_BYTES: u64 = 64 << 20;
/// Pieces a second at least, where the rate is limited.
const PIECES_PER_SECOND: u64 = 10;

/// How far a check of these blocks goes just now, whatever it finds.
pub async fn coverage_of(opened: &OpenTarget, extent: Extent) -> Result<Coverage, CliError> {
    let verify = Request::Verify { extent, checks: opened.checks(extent) };
    match opened.gate.execute(verify).await {
        Ok(Response::Verified(verified)) => Ok(verified.coverage),
        Ok(_) => Ok(Coverage::default()),
        Err(error) => match error.into_damage() {
            Ok((_, coverage)) => Ok(coverage),
            Err(error) => Err(of_block(format!("verifying {extent}"), &error)),
        },
    }
}

/// One verify: what is left of it, and what it has found.
pub struct VerifyJob {
    span: BlockSpan,
    piece_blocks: u64,
    is_long: bool,
    next: AtomicU64,
    how: VerifyPath,
    pace: Option<Pace>,
    progress: Progress,
    target: TargetName,
    format: Option<PiFormat>,
    state: Mutex<JobState>,
}

/// What is known of the blocks that were looked at.
struct JobState {
    ledger: PieceTracker,
    lines: Lines<Damage>,
    findings: Findings,
}

/// Who checks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum VerifyPath {
    /// The device, which is away from this host.
    Offloaded,
    /// The device, in this process.
    Local,
    /// This process, out of what it reads.
    ReadAndCheck,
    /// The device, which holds copies and mends what it finds.
    Repair,
}

impl VerifyPath {
    /// Who checks a device with these abilities.
    fn of(arguments: &Verify, abilities: &Abilities) -> Result<VerifyPath, CliError> {
        if arguments.repair && abilities.repair == Ability::Native {
            return Ok(VerifyPath::Repair);
        }
        match (arguments.mode, abilities.verify == Ability::Native) {
            (Mode::Emulate, _) | (Mode::Auto, false) => Ok(VerifyPath::ReadAndCheck),
            (Mode::Auto | Mode::Offload, true) if abilities.offloads => Ok(VerifyPath::Offloaded),
            (Mode::Auto | Mode::Offload, true) => Ok(VerifyPath::Local),
            (Mode::Offload, false) => {
                Err(CliError::new(Cause::Absent, "verifying", "the device cannot verify by itself")
                    .on(&arguments.target)
                    .advise("--mode auto or --mode emulate"))
            }
        }
    }
}

/// What a verify has found.
#[derive(Default)]
pub struct Findings {
    /// The damaged blocks, in order. Bounded, for where everything is damaged.
    pub faults: Vec<BadBlock>,
    /// Damaged blocks that are not listed there.
    pub unlisted: u64,
    /// Damaged blocks for which there was no line.
    pub untold: u64,
    /// Blocks that were looked at.
    pub blocks: u64,
    /// The blocks from the first one on that was not looked at, if the verify was ended before the last one.
    pub resume: Option<BlockRange>,
    /// How far the checks went.
    pub coverage: Coverage,
    /// Bytes of payload that crossed from the device to this host.
    pub bytes_transferred: u64,
}

/// A limit on bytes a second, over all cores.
struct Pace {
    started: Instant,
    bytes_per_second: u64,
    bytes: AtomicU64,
}

impl Pace {
    /// Waits until `bytes` more are due.
    async fn wait(&self, bytes: u64) {
        let before = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let due = Duration::from_secs_f64(before as f64 / self.bytes_per_second as f64);
        interrupt::sleep(due.saturating_sub(self.started.elapsed())).await;
    }
}

impl VerifyJob {
    /// The job that these arguments ask for.
    pub fn new(arguments: &Verify, opened: &OpenTarget, span: BlockSpan, show: Show) -> Result<VerifyJob, CliError> {
        let geometry = opened.gate.geometry();
        let abilities = opened.gate.abilities();
        let how = VerifyPath::of(arguments, &abilities)?;
        let whole = if how == VerifyPath::ReadAndCheck {
            geometry.limits.max_transfer_blocks
        } else {
            geometry.limits.max_verify_blocks
        };
        let pace = arguments.rate.map(|rate| Pace {
            started: Instant::now(),
            bytes_per_second: rate.bytes_per_second().get(),
            bytes: AtomicU64::new(0),
        });
        let paced = pace.as_ref().map_or(u64::MAX, |pace| {
            ((pace.bytes_per_second / PIECES_PER_SECOND) >> geometry.block_size.shift()).max(1)
        });
        let most = MAX_PIECE_BYTES[usize::from(how == VerifyPath::Offloaded)] >> geometry.block_size.shift();
        let total = ByteCount::new(span.blocks().saturating_mul(geometry.block_size.bytes() as u64));
        Ok(VerifyJob {
            span,
            piece_blocks: u64::from(whole.get()).min(most).min(paced),
            is_long: total.get() > LONG_BYTES,
            next: AtomicU64::new(0),
            how,
            pace,
            progress: Progress::new(&format!("verifying {}", arguments.target), Some(total), show),
            target: arguments.target.clone(),
            format: geometry.protection,
            state: Mutex::new(JobState {
                ledger: PieceTracker::new(span.first()),
                lines: Lines::new(if arguments.json { Voice::Silent } else { Voice::Output }),
                findings: Findings::default(),
            }),
        })
    }

    /// Whether the device does the checking, away from this host.
    pub fn offloads(&self) -> bool {
        self.how == VerifyPath::Offloaded
    }

    /// Whether what is found is mended, which only one may do.
    pub fn repairs(&self) -> bool {
        self.how == VerifyPath::Repair
    }

    /// Whether the work is worth another core.
    pub fn is_long(&self) -> bool {
        self.is_long
    }

    /// Works on the job until nothing is left of it, or a signal ends it. Several may, on several cores, each with its own open
    /// target.
    pub async fn run(&self, opened: &OpenTarget) -> Result<(), CliError> {
        while let Some(extent) = self.take() {
            let bytes = extent.bytes(opened.gate.geometry().block_size);
            if let Some(pace) = &self.pace {
                pace.wait(bytes).await;
            }
            if interrupt::came() {
                break;
            }
            self.check(opened, extent, bytes).await?;
        }
        Ok(())
    }

    /// What was found until now, all of it told.
    ///
    /// # Errors
    /// When it could not be printed.
    pub fn findings(&self) -> Result<Findings, CliError> {
        self.settle(&mut self.lock())
    }

    /// The same, unless somebody is printing just now who may do so for long.
    pub fn findings_now(&self) -> Option<Result<Findings, CliError>> {
        self.state.try_lock().ok().map(|mut state| self.settle(&mut state))
    }

    fn settle(&self, state: &mut JobState) -> Result<Findings, CliError> {
        let rest = state.ledger.take_rest();
        self.add(state, rest);
        state.lines.finish(&self.progress)?;
        let mut findings = std::mem::take(&mut state.findings);
        findings.coverage.sort();
        findings.untold = state.lines.unlisted();
        findings.blocks = state.ledger.checked();
        let next = state.ledger.next();
        let is_left = findings.blocks < self.span.blocks() && next <= self.span.last();
        findings.resume = is_left.then(|| BlockRange::new(next, Some(self.span.last())).ok()).flatten();
        Ok(findings)
    }

    /// Adds faults in the order of the blocks.
    fn add(&self, state: &mut JobState, faults: Vec<BadBlock>) {
        for fault in &faults {
            let error = block_error(fault, self.format, &self.target);
            state.lines.note(Run::new(error.lba, 1, Damage::of(&error)));
        }
        let room = MAX_LISTED - state.findings.faults.len();
        state.findings.unlisted += faults.len().saturating_sub(room) as u64;
        state.findings.faults.extend(faults.into_iter().take(room));
    }

    /// Looks once more whether all copies are there and in sync: what was checked of a member is out of date if it was left
    /// behind since. Only devices with copies need it.
    pub async fn check_sync_again(&self, opened: &OpenTarget) -> Result<(), CliError> {
        let blocks = self.span.blocks().min(self.piece_blocks).min(FINAL_CHECK_BLOCKS);
        let first = Extent::from_raw(self.span.first().get(), blocks).ok();
        let Some(first) = first.filter(|_| opened.gate.abilities().copies && self.how != VerifyPath::ReadAndCheck)
        else {
            return Ok(());
        };
        let coverage = coverage_of(opened, first).await?;
        let last = Lba::new(self.span.first().get() + self.span.blocks() - 1);
        let everything = |run: Unchecked| Unchecked { first: self.span.first(), last, ..run };
        self.lock().findings.coverage.merge(coverage.map(everything));
        Ok(())
    }

    fn take(&self) -> Option<Extent> {
        let at = self.next.fetch_add(self.piece_blocks, Ordering::Relaxed);
        let left = self.span.blocks().checked_sub(at).filter(|left| *left > 0)?;
        let blocks = BlockCount::new(left.min(self.piece_blocks) as u32)?;
        Extent::new(Lba::new(self.span.first().get() + at), blocks).ok()
    }

    async fn check(&self, opened: &OpenTarget, extent: Extent, bytes: u64) -> Result<(), CliError> {
        let checks = opened.checks(extent);
        let outcome = match self.how {
            VerifyPath::ReadAndCheck => opened.gate.verify_by_reading(extent, checks).await,
            VerifyPath::Repair => opened.gate.execute(Request::Repair { extent, checks }).await,
            VerifyPath::Offloaded | VerifyPath::Local => opened.gate.execute(Request::Verify { extent, checks }).await,
        };
        let (faults, coverage, read) = match outcome {
            Ok(Response::Verified(verified)) => (Vec::new(), verified.coverage, verified.bytes_transferred),
            Ok(_) => unreachable!("gates answer a check with what it cost"),
            Err(error) => match error.into_damage() {
                Ok((faults, coverage)) => (faults, coverage, if self.how == VerifyPath::Offloaded { 0 } else { bytes }),
                Err(error) => return Err(of_block(format!("verifying {extent}"), &error)),
            },
        };
        if !faults.is_empty() {
            self.progress.bad(faults.len() as u64);
        }
        // Nothing is known of what another host has read, so all of it counts.
        self.progress.advance_by(bytes, if self.how == VerifyPath::Offloaded { bytes } else { read });
        let mut state = self.lock();
        state.findings.coverage.merge(coverage);
        state.findings.bytes_transferred += read;
        let in_order = state.ledger.done(extent, faults);
        self.add(&mut state, in_order);
        let JobState { ledger, lines, .. } = &mut *state;
        lines.reached(ledger.next(), &self.progress);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, JobState> {
        // A panic elsewhere leaves whole findings behind; they are still true.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
