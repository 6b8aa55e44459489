//! What `compare` answers, in JSON and in words.

use std::time::Duration;

use sealblock_block::{Device, WhyOlder};
use sealblock_stack::quantity::count;
use sealblock_stack::range::{BlockRange, Run};
use sealblock_stack::{ByteView, Cause, StackError};
use sealblock_units::BlockSize;
use serde::{Serialize, Serializer};

use crate::exit::Exit;
use crate::findings::{Finding, Findings};
use crate::interrupt;
use crate::report::say;
use crate::tally::Tally;

/// Reports on standard error how to resume, if a signal ended the command.
pub(super) fn report_resume(names: &str, range: Option<BlockRange>, resume_lba: Option<u64>) {
    if let Some(block) = resume_lba {
        let last = range.and_then(BlockRange::last).map_or(String::new(), |last| last.to_string());
        let go_on = format!("--range {block}..{last} resumes the command");
        interrupt::report(format!("comparing {names}"), format!("at block {block}"), go_on);
    }
}

/// The answer of `compare`.
#[derive(Serialize)]
pub(super) struct Report {
    target_a: String,
    target_b: String,
    pub equal: bool,
    #[serde(serialize_with = "in_bytes")]
    pub block_size: BlockSize,
    pub bytes_compared: u64,
    pub bytes_transferred: u64,
    bytes_a: u64,
    bytes_b: u64,
    pub offloaded: bool,
    pub elapsed_s: f64,
    pub blocks_different: u64,
    /// The first byte that differs; `None` if none does, or if only checksums show that its block does.
    pub first_different_byte: Option<u64>,
    pub differences: Vec<Run<Differ>>,
    pub blocks_unreadable: u64,
    unreadable: Vec<Run<Unreadable>>,
    /// Blocks in runs that are not listed.
    #[serde(skip)]
    unlisted: u64,
    /// Whether it goes to the ends of both sides.
    #[serde(skip)]
    whole: bool,
    /// Why blocks of a side may be older than what was written there, if so.
    may_be_older: Option<&'static str>,
    /// The first block that was not compared, when a signal ended it.
    pub resume_lba: Option<u64>,
}

fn in_bytes<S: Serializer>(size: &BlockSize, serializer: S) -> Result<S::Ok, S::Error> {
    size.bytes().serialize(serializer)
}

/// Blocks that both sides have, and that are not the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(super) struct Differ {}

/// Blocks that cannot be read, so that there is nothing to compare.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(super) struct Unreadable {
    pub target: String,
    pub why: String,
}

/// A finding about blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum What {
    Differ,
    Unreadable(Unreadable),
}

impl Finding for What {
    fn line(run: &Run<What>) -> String {
        match (&run.what, run.blocks) {
            (What::Differ, 1) => format!("{} differs", run.place()),
            (What::Differ, _) => format!("{} differ", run.place()),
            (What::Unreadable(Unreadable { target, why }), _) => {
                format!("{} of {target} cannot be read: {why}", run.place())
            }
        }
    }
}

impl Report {
    /// The report before anything was compared, and the block size of the comparison: the larger of the two, in which both
    /// sides can be read.
    pub fn empty(a: &ByteView, b: Option<&ByteView>) -> (Report, BlockSize) {
        let size = |side: &ByteView| side.opened.device.geometry().block_size;
        let block = b.map_or(size(a), |b| size(a).max(size(b)));
        let (bytes_a, bytes_b) = (a.len_bytes(), b.map_or(a.len_bytes(), ByteView::len_bytes));
        let report = Report {
            target_a: a.opened.target().to_string(),
            target_b: b.map_or_else(|| "zeroes".to_owned(), |b| b.opened.target().to_string()),
            equal: bytes_a == bytes_b,
            block_size: block,
            bytes_compared: bytes_a.min(bytes_b),
            bytes_transferred: 0,
            bytes_a,
            bytes_b,
            offloaded: false,
            elapsed_s: 0.0,
            blocks_different: 0,
            first_different_byte: None,
            differences: Vec::new(),
            blocks_unreadable: 0,
            unreadable: Vec::new(),
            unlisted: 0,
            whole: true,
            may_be_older: a.opened.why_older().or(b.and_then(|b| b.opened.why_older())).map(WhyOlder::as_str),
            resume_lba: None,
        };
        (report, block)
    }

    /// Keeps to a range of blocks, and gives where it begins and ends, in bytes. A range with a last block is compared for itself,
    /// whatever the sizes are.
    ///
    /// # Errors
    /// When any of it lies behind the end of a side.
    pub fn narrow(&mut self, range: Option<BlockRange>) -> Result<(u64, u64), StackError> {
        let common = self.bytes_compared;
        let Some(range) = range else { return Ok((0, common)) };
        let usage = |why| StackError::new(Cause::Usage, "use the range on", why).on(self.names());
        let span = range.resolve(common.div_ceil(self.block_size.bytes() as u64)).map_err(usage)?;
        let shift = self.block_size.shift();
        let end = ((span.last().get() + 1) << shift).min(common);
        self.whole = range.last().is_none();
        self.equal |= !self.whole;
        Ok((span.first().get() << shift, end))
    }

    /// Whether a side has bytes that the other one lacks, where that counts.
    fn sizes_differ(&self) -> bool {
        self.whole && self.bytes_a != self.bytes_b
    }

    /// Takes over the runs that were found.
    pub fn list(&mut self, findings: Findings<What>) {
        let (runs, unlisted) = findings.into_runs();
        self.unlisted = unlisted;
        for Run { lba, blocks, what } in runs {
            match what {
                What::Differ => self.differences.push(Run::new(lba, blocks, Differ {})),
                What::Unreadable(why) => self.unreadable.push(Run::new(lba, blocks, why)),
            }
        }
    }

    /// How the command ends.
    pub fn exit(&self) -> Exit {
        match (self.resume_lba, self.equal) {
            (Some(_), _) => Exit::Interrupted,
            (None, true) => Exit::Clean.unless_older(self.may_be_older.is_some()),
            (None, false) => Exit::DamageFound,
        }
    }

    /// What is compared with what.
    pub fn names(&self) -> String {
        format!("{} and {}", self.target_a, self.target_b)
    }

    /// Prints what follows the lines of runs.
    pub fn print_text(&self) -> Result<(), StackError> {
        if self.unlisted > 0 {
            say(&format!("and {} more", count(self.unlisted, "block")))?;
        }
        if let Some(byte) = self.first_different_byte {
            say(&format!("first difference at byte {byte}"))?;
        }
        if self.sizes_differ() {
            let sizes = [self.bytes_a, self.bytes_b].map(|bytes| count(bytes, "byte"));
            say(&format!("the sizes differ: {} and {}", sizes[0], sizes[1]))?;
        }
        say(&self.to_text())
    }

    fn to_text(&self) -> String {
        let different = self.blocks_different > 0 || self.sizes_differ();
        let verdict = match (self.equal, different, self.resume_lba) {
            (true, ..) => "equal",
            (false, true, _) => "different",
            (false, false, Some(_)) => "interrupted, no difference so far",
            (false, false, None) => "no difference in readable blocks",
        };
        let blocks = count(self.bytes_compared.div_ceil(self.block_size.bytes() as u64), "block");
        let verb = if self.blocks_different == 1 { "differs" } else { "differ" };
        let unreadable = match self.blocks_unreadable {
            0 => String::new(),
            blocks => format!(", {blocks} cannot be read"),
        };
        let elapsed = Duration::from_secs_f64(self.elapsed_s);
        let tally = Tally { read: self.bytes_transferred, written: 0, elapsed }.to_text();
        let Report { target_a, target_b, blocks_different, .. } = self;
        format!("{target_a} and {target_b}: {verdict} ({blocks_different} of {blocks} {verb}{unreadable}) {tally}")
    }
}
