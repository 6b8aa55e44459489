//! A verify with a resume file: the blocks verified earlier, and when progress is saved.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::time::{Duration, Instant};

use sealblock_server::dates::{date, unix_s};
use sealblock_server::status::health::Checked;
use sealblock_stack::range::{BlockRange, BlockSpan};
use sealblock_stack::{OpenTarget, StackError};
use sealblock_units::Lba;

use super::job::{VerifyJob, VerifyProgress, VerifyRequest};
use super::lineage::current;
use super::record::{Asked, Record, join};
use super::resume::{ResumeFile, begun_text};
use crate::cli::Mode;
use crate::findings::MAX_LISTED;
use crate::report::{VerifiedBefore, VerifiedPart, VerifyReport, note};

/// How often a running verify is saved: what a crash costs.
const SAVE_EVERY: Duration = Duration::from_secs(5);
/// How often it is saved while bad blocks are found. A repaired block is good when it is verified again, so after a crash only the file
/// knows that it was bad.
const SAVE_FOUND_EVERY: Duration = Duration::from_millis(500);
/// How often that is looked at.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);

/// A run with a resume file.
pub(super) struct Session {
    file: ResumeFile,
    /// What was verified before, and found then.
    earlier: Record,
    /// True if another run can resume: something identifies the target.
    can_resume: bool,
    /// True if what was verified before may have been written since.
    is_untraced: bool,
    offloaded: Cell<bool>,
    started: Instant,
    started_unix_s: u64,
    last_save: Cell<Instant>,
    saved_errors: Cell<u64>,
    /// The first failure to save since the last success.
    trouble: RefCell<Option<StackError>>,
}

impl Session {
    /// Starts a run, or resumes that of the locked file.
    ///
    /// # Errors
    /// When the file is damaged, or of another target or run, or cannot be written.
    pub(super) fn begin(
        file: ResumeFile,
        order: VerifyRequest<'_>,
        opened: &OpenTarget,
        span: BlockSpan,
    ) -> Result<Session, StackError> {
        let asked = Asked {
            target: order.target.to_string(),
            first: span.first().get(),
            last: span.last().get(),
            mode: mode_text(order.arguments.mode).to_owned(),
            repair: order.arguments.repair,
        };
        let now = current(opened);
        // Repairs are writes, so states are not compared.
        let (can_resume, is_untraced) = (now.unidentified.is_none(), now.is_untraced || asked.repair);
        let (earlier, why) = file.begin(asked, now)?;
        if let Some(why) = why {
            note(&format_args!("verifying {} starts over: {why}", order.target));
        }
        if let Some(text) = begun_text(&earlier).filter(|_| !order.arguments.quiet) {
            note(&format_args!("verifying {} {text}", order.target));
        }
        let (started, started_unix_s) = (Instant::now(), unix_s());
        Ok(Session {
            file,
            earlier,
            can_resume,
            is_untraced,
            offloaded: Cell::new(false),
            started,
            started_unix_s,
            last_save: Cell::new(started),
            saved_errors: Cell::new(0),
            trouble: RefCell::default(),
        })
    }

    /// What was verified before.
    pub(super) fn earlier(&self) -> &Record {
        &self.earlier
    }

    /// The blocks that are left; nothing when all were verified, and only not reported.
    pub(super) fn rest(&self) -> Option<BlockSpan> {
        if self.earlier.is_complete() {
            return None;
        }
        let (next, last) = (self.earlier.next(), self.earlier.asked.last);
        let range = BlockRange::new(Lba::new(next), Some(Lba::new(last))).ok()?;
        range.resolve(self.earlier.identity.blocks).ok()
    }

    /// Saves the job from time to time. Ends only when it is dropped.
    pub(super) async fn save_regularly(&self, job: &VerifyJob, opened: &OpenTarget) {
        loop {
            sealblock_runtime_reactor::sleep(PROBE_INTERVAL).await;
            let passed = self.last_save.get().elapsed();
            let found = passed >= SAVE_FOUND_EVERY && job.damaged() != self.saved_errors.get();
            if found || passed >= SAVE_EVERY {
                self.save(job, opened);
            }
        }
    }

    /// Saves the progress of the job. A failure is reported once and does not end the work.
    pub(super) fn save(&self, job: &VerifyJob, opened: &OpenTarget) {
        let Some(so_far) = job.so_far() else { return };
        self.offloaded.set(job.offloads());
        self.last_save.set(Instant::now());
        self.saved_errors.set(so_far.damaged);
        let lost = if self.earlier.asked.repair { Vec::new() } else { opened.info.lost_metadata().superblocks() };
        let record = self.record(so_far, lost);
        match self.file.save(&record) {
            Ok(()) => drop(self.trouble.take()),
            Err(failure) => {
                if self.trouble.replace(Some(failure.clone())).is_none() {
                    note(&format_args!("{}; the verify continues and retries that", failure.in_short()));
                }
            }
        }
    }

    /// True if the same command resumes: the file has all that was verified, and something identifies the target.
    pub(super) fn resumes(&self) -> bool {
        self.can_resume && self.trouble.borrow().is_none()
    }

    /// The blocks that were verified before and may have been written since.
    fn verified_before(&self) -> Option<VerifiedBefore> {
        let (first, last) = (self.earlier.parts.first()?, self.earlier.parts.last()?);
        let blocks = VerifiedBefore { first: first.first, last: last.last, ended_unix_s: last.ended_unix_s };
        self.is_untraced.then_some(blocks)
    }

    /// All that was verified, with the part of this run.
    fn record(&self, so_far: VerifyProgress, lost_metadata: Vec<String>) -> Record {
        let mut record = self.earlier.clone();
        let Some(part) = self.part(so_far.next, so_far.bytes_transferred) else { return record };
        let found = Record {
            checked: Checked::of(so_far.is_sealed),
            errors: so_far.errors,
            errors_unlisted: so_far.unlisted,
            unchecked: so_far.unchecked,
            lost_metadata,
            ..Record::new(self.earlier.asked.clone(), self.earlier.identity.clone())
        };
        record.add(part, found);
        record
    }

    /// The part of this run, up to the block `next`; nothing if it has none.
    fn part(&self, next: u64, bytes_transferred: u64) -> Option<VerifiedPart> {
        let first = self.earlier.next();
        (next > first).then(|| VerifiedPart {
            first,
            last: next - 1,
            started_unix_s: self.started_unix_s,
            ended_unix_s: unix_s(),
            elapsed_s: self.started.elapsed().as_secs_f64(),
            bytes_transferred,
            offloaded: self.offloaded.get(),
        })
    }

    /// The report of all parts: that of this run, and what was found before.
    pub(super) fn merge(&self, report: VerifyReport, block_bytes: u64) -> VerifyReport {
        let earlier = &self.earlier;
        let end = report.resume.map_or(earlier.asked.last + 1, |rest| rest.first().get());
        let parts: Vec<_> = earlier.parts.iter().cloned().chain(self.part(end, report.bytes_transferred)).collect();
        let before = earlier.next() - earlier.asked.first;
        let room = MAX_LISTED.saturating_sub(earlier.errors.len());
        let unlisted = report.errors.len().saturating_sub(room) as u64;
        let lost = report.lost_metadata.into_iter().filter(|lost| !earlier.lost_metadata.contains(lost));
        VerifyReport {
            blocks_verified: before + report.blocks_verified,
            bytes_verified: before * block_bytes + report.bytes_verified,
            bytes_transferred: parts.iter().map(|part| part.bytes_transferred).fold(0, u64::saturating_add),
            offloaded: !parts.is_empty() && parts.iter().all(|part| part.offloaded),
            elapsed_s: parts.iter().map(|part| part.elapsed_s).sum(),
            checked: if earlier.checked == Checked::Readability { earlier.checked } else { report.checked },
            errors: earlier.errors.iter().cloned().chain(report.errors.into_iter().take(room)).collect(),
            errors_unlisted: earlier.errors_unlisted + report.errors_unlisted + unlisted,
            unchecked: join(earlier.unchecked.clone(), report.unchecked),
            lost_metadata: earlier.lost_metadata.iter().cloned().chain(lost).collect(),
            unprinted: earlier.errors_unlisted + report.unprinted,
            verified_before: self.verified_before().filter(|_| report.resume.is_none()),
            parts,
            ..report
        }
    }

    /// Ends the run, after its report was printed.
    ///
    /// # Errors
    /// When the file could not be removed.
    pub(super) fn finish(self) -> Result<(), StackError> {
        self.file.finish()
    }
}

/// Locks the file of `--resume`, before anything is opened.
///
/// # Errors
/// When another process has it, or the folder cannot be written.
pub(super) fn lock(path: Option<&Path>) -> Result<Option<ResumeFile>, StackError> {
    path.map(ResumeFile::lock).transpose()
}

/// The line of a part.
pub(super) fn part_text(part: &VerifiedPart) -> String {
    format!("blocks {} to {}: verified {}", part.first, part.last, date(part.ended_unix_s))
}

const fn mode_text(mode: Mode) -> &'static str {
    match mode {
        Mode::Auto => "auto",
        Mode::Offload => "offload",
        Mode::Emulate => "emulate",
    }
}
