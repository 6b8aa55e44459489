//! One verify, shared by the cores that work on it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sealblock_block::{Abilities, Ability, Answer, Coverage, Device, Fault, Operation, Unchecked};
use sealblock_units::{BlockCount, ByteCount, Extent, Lba};

use crate::cli::{Mode, Verify};
use crate::exit::{Cause, Failure};
use crate::progress::{Progress, Show};
use crate::range::BlockSpan;
use crate::stack::{Opened, of_block};

/// Damaged blocks that are listed one by one; further ones are counted. Bounds memory where everything is damaged.
const MOST_LISTED: usize = 1 << 20;
/// Blocks that are looked at once more in the end, to see whether copies are in sync still: of a stripe of mirrors some of
/// every mirror.
const LAST_LOOK_BLOCKS: u64 = 4096;
/// Pieces a second at least, where the rate is limited.
const PIECES_PER_SECOND: u64 = 10;

/// How far a check of these blocks goes just now, whatever it finds.
pub async fn coverage_of(opened: &Opened, extent: Extent) -> Result<Coverage, Failure> {
    let verify = Operation::Verify { extent, checks: opened.checks(extent) };
    match opened.gate.execute(verify).await {
        Ok(Answer::Verified(verified)) => Ok(verified.coverage),
        Ok(_) => Ok(Coverage::default()),
        Err(error) => match error.into_damage() {
            Ok((_, coverage)) => Ok(coverage),
            Err(error) => Err(of_block(format!("verifying {extent}"), &error)),
        },
    }
}

/// One verify: what is left of it, and what it has found.
pub struct Job {
    span: BlockSpan,
    piece_blocks: u64,
    next: AtomicU64,
    how: How,
    pace: Option<Pace>,
    progress: Progress,
    findings: Mutex<Findings>,
}

/// Who checks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// The device, which is away from this host.
    Away,
    /// The device, in this process.
    Here,
    /// This process, out of what it reads.
    Read,
    /// The device, which holds copies and mends what it finds.
    Mend,
}

impl How {
    /// Who checks a device with these abilities.
    fn of(arguments: &Verify, abilities: &Abilities) -> Result<How, Failure> {
        if arguments.repair && abilities.repair == Ability::Native {
            return Ok(How::Mend);
        }
        match (arguments.mode, abilities.verify == Ability::Native) {
            (Mode::Emulate, _) | (Mode::Auto, false) => Ok(How::Read),
            (Mode::Auto | Mode::Offload, true) if abilities.offloads => Ok(How::Away),
            (Mode::Auto | Mode::Offload, true) => Ok(How::Here),
            (Mode::Offload, false) => {
                Err(Failure::new(Cause::Absent, "verifying", "the device cannot verify by itself")
                    .on(&arguments.target)
                    .advise("--mode auto or --mode emulate"))
            }
        }
    }
}

/// What a verify has found.
#[derive(Default)]
pub struct Findings {
    /// The damaged blocks, in order once the job is done.
    pub faults: Vec<Fault>,
    /// Damaged blocks that are not listed.
    pub unlisted: u64,
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
        sealblock_runtime_reactor::sleep(due.saturating_sub(self.started.elapsed())).await;
    }
}

impl Job {
    /// The job that these arguments ask for.
    pub fn new(arguments: &Verify, opened: &Opened, span: BlockSpan, show: Show) -> Result<Job, Failure> {
        let geometry = opened.gate.geometry();
        let abilities = opened.gate.abilities();
        let how = How::of(arguments, &abilities)?;
        let whole = if how == How::Read { geometry.limits.transfer } else { geometry.limits.verify };
        let pace = arguments.rate.map(|rate| Pace {
            started: Instant::now(),
            bytes_per_second: rate.bytes_per_second().get(),
            bytes: AtomicU64::new(0),
        });
        let paced = pace.as_ref().map_or(u64::MAX, |pace| {
            ((pace.bytes_per_second / PIECES_PER_SECOND) >> geometry.block_size.shift()).max(1)
        });
        let total = ByteCount::new(span.blocks().saturating_mul(geometry.block_size.bytes() as u64));
        Ok(Job {
            span,
            piece_blocks: u64::from(whole.get()).min(paced),
            next: AtomicU64::new(0),
            how,
            pace,
            progress: Progress::new(&format!("verifying {}", arguments.target), Some(total), show),
            findings: Mutex::default(),
        })
    }

    /// Whether the device does the checking, away from this host.
    pub fn offloads(&self) -> bool {
        self.how == How::Away
    }

    /// Whether what is found is mended, which only one may do.
    pub fn mends(&self) -> bool {
        self.how == How::Mend
    }

    /// Whether the work is worth another core.
    pub fn is_long(&self) -> bool {
        self.span.blocks() > self.piece_blocks * 4
    }

    /// Works on the job until nothing is left of it. Several may, on several cores, each with its own open target.
    pub async fn work(&self, opened: &Opened) -> Result<(), Failure> {
        while let Some(extent) = self.take() {
            let bytes = extent.bytes(opened.gate.geometry().block_size);
            if let Some(pace) = &self.pace {
                pace.wait(bytes).await;
            }
            self.check(opened, extent, bytes).await?;
            self.progress.advance(bytes);
        }
        Ok(())
    }

    /// What was found, once everybody is done.
    pub fn findings(&self) -> Findings {
        let mut findings = std::mem::take(&mut *self.lock());
        findings.faults.sort_by_key(|fault| fault.lba);
        findings.coverage.sort();
        findings
    }

    /// Looks once more whether all copies are there and in sync: what was checked of a member is out of date if it was left
    /// behind since. Only devices with copies need it.
    pub async fn look_again(&self, opened: &Opened) -> Result<(), Failure> {
        let blocks = self.span.blocks().min(self.piece_blocks).min(LAST_LOOK_BLOCKS);
        let first = Extent::from_raw(self.span.first().get(), blocks).ok();
        let Some(first) = first.filter(|_| opened.gate.abilities().copies && self.how != How::Read) else {
            return Ok(());
        };
        let coverage = coverage_of(opened, first).await?;
        let last = Lba::new(self.span.first().get() + self.span.blocks() - 1);
        let everything = |run: Unchecked| Unchecked { first: self.span.first(), last, ..run };
        self.lock().coverage.merge(coverage.map(everything));
        Ok(())
    }

    fn take(&self) -> Option<Extent> {
        let at = self.next.fetch_add(self.piece_blocks, Ordering::Relaxed);
        let left = self.span.blocks().checked_sub(at).filter(|left| *left > 0)?;
        let blocks = BlockCount::new(left.min(self.piece_blocks) as u32)?;
        Extent::new(Lba::new(self.span.first().get() + at), blocks).ok()
    }

    async fn check(&self, opened: &Opened, extent: Extent, bytes: u64) -> Result<(), Failure> {
        let checks = opened.checks(extent);
        let outcome = match self.how {
            How::Read => opened.gate.verify_by_reading(extent, checks).await,
            How::Mend => opened.gate.execute(Operation::Repair { extent, checks }).await,
            How::Away | How::Here => opened.gate.execute(Operation::Verify { extent, checks }).await,
        };
        let mut findings = self.lock();
        match outcome {
            Ok(Answer::Verified(verified)) => {
                findings.bytes_transferred += verified.bytes_transferred;
                findings.coverage.merge(verified.coverage);
            }
            Ok(_) => unreachable!("gates answer a check with what it cost"),
            Err(error) => match error.into_damage() {
                Ok((faults, coverage)) => {
                    findings.coverage.merge(coverage);
                    findings.bytes_transferred += if self.how == How::Away { 0 } else { bytes };
                    let room = MOST_LISTED - findings.faults.len();
                    findings.unlisted += faults.len().saturating_sub(room) as u64;
                    self.progress.bad(faults.len() as u64);
                    findings.faults.extend(faults.into_iter().take(room));
                }
                Err(error) => return Err(of_block(format!("verifying {extent}"), &error)),
            },
        }
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Findings> {
        // A panic elsewhere leaves whole findings behind; they are still true.
        self.findings.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
