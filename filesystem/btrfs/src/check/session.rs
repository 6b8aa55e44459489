//! What all parts of one check share: the filesystem, the limits, the observer, and the findings so far.

use std::cell::{Cell, RefCell};

use futures_util::future::LocalBoxFuture;
use sealblock_btrfs_format::features::Incompat;
use sealblock_btrfs_format::superblock::Geometry;

use super::report::{Finding, Place, Report, Rule, WhyNotChecked};
use crate::error::FsError;
use crate::filesystem::Filesystem;
use crate::verify::{Progress, Watch, why_unchecked};

/// The default limit of listed findings.
pub const MAX_LISTED: usize = 10_000;
/// The default limit of extents, and that of references: 8 million each, which need up to 720 MiB.
pub const MAX_EXTENTS: usize = 8 << 20;
/// The default limit of shared nodes with a summary, which need up to 350 MiB.
pub const MAX_SHARED: usize = 500_000;
/// The default limit of scattered ranges of data in each list, which needs up to 64 MiB.
pub const MAX_RANGES: usize = 4 << 20;
/// The default limit of names that are compared one by one, and of orphans, which need up to 128 MiB.
pub const MAX_NAMES: usize = 4 << 20;
/// The maximum number of notes.
const MAX_NOTES: usize = 100;
/// The observer is called after the first node, and then after this number of nodes.
const STEP_NODES: u64 = 64;

/// Limits of a check. Together they bound its memory.
#[derive(Clone, Copy, Debug)]
pub struct CheckOptions {
    /// Findings that are listed.
    pub most_listed: usize,
    /// Extents, and references in the extent tree.
    pub most_extents: usize,
    /// Nodes that several trees share.
    pub most_shared: usize,
    /// Scattered ranges of data, in each list of them.
    pub most_ranges: usize,
    /// Names that are compared one by one in a subvolume whose names disagree, and inodes to be deleted.
    pub most_names: usize,
}

impl Default for CheckOptions {
    fn default() -> CheckOptions {
        CheckOptions {
            most_listed: MAX_LISTED,
            most_extents: MAX_EXTENTS,
            most_shared: MAX_SHARED,
            most_ranges: MAX_RANGES,
            most_names: MAX_NAMES,
        }
    }
}

/// It was stopped.
#[derive(Debug)]
pub(super) struct Stopped;

/// One check.
pub(super) struct Session<'a> {
    pub fs: &'a Filesystem,
    pub options: CheckOptions,
    watch: &'a dyn Watch,
    report: RefCell<Report>,
    /// Nodes that were read, some of them several times.
    read: Cell<u64>,
    expected_bytes: u64,
}

impl<'a> Session<'a> {
    pub fn new(fs: &'a Filesystem, options: CheckOptions, watch: &'a dyn Watch, expected_bytes: u64) -> Session<'a> {
        Session { fs, options, watch, report: RefCell::default(), read: Cell::new(0), expected_bytes }
    }

    pub fn geometry(&self) -> &'a Geometry {
        self.fs.storage().geometry()
    }

    pub fn sector_bytes(&self) -> u64 {
        u64::from(self.geometry().sector_bytes)
    }

    pub fn node_bytes(&self) -> u64 {
        u64::from(self.geometry().node_bytes)
    }

    pub fn has(&self, feature: Incompat) -> bool {
        self.geometry().features.incompat.contains(feature)
    }

    /// Adds a finding.
    pub fn found(&self, rule: Rule, place: Place, why: impl Into<String>) {
        let mut report = self.report.borrow_mut();
        report.finding_count += 1;
        if report.findings.len() < self.options.most_listed {
            report.findings.push(Finding { rule, place, paths: Vec::new(), why: why.into() });
        }
    }

    /// Adds a node that cannot be read. If its devices are missing, it is not damaged.
    pub fn lost_node(&self, place: Place, error: &FsError) {
        if let FsError::Lost(lost) = error
            && lost.copies.iter().all(|copy| why_unchecked(&copy.fault).is_some())
        {
            self.not_checked(WhyNotChecked::MissingDevice);
        } else {
            self.found(Rule::LostNode, place, error.to_string());
        }
    }

    /// Adds a note.
    pub fn note(&self, note: String) {
        let mut report = self.report.borrow_mut();
        if report.notes.len() < MAX_NOTES {
            report.notes.push(note);
        }
    }

    pub fn not_checked(&self, why: WhyNotChecked) {
        self.report.borrow_mut().not_checked.insert(why);
    }

    /// The findings so far, listed or not.
    pub fn finding_count(&self) -> u64 {
        self.report.borrow().finding_count
    }

    /// The nodes that were visited so far.
    pub fn node_count(&self) -> u64 {
        self.report.borrow().nodes
    }

    /// Changes the counts of the report.
    pub fn count(&self, change: impl FnOnce(&mut Report)) {
        change(&mut self.report.borrow_mut());
    }

    /// Counts a node that was read, and calls the observer from time to time.
    pub async fn step(&self) -> Result<(), Stopped> {
        let read = self.read.get() + 1;
        self.read.set(read);
        if read > 1 && !read.is_multiple_of(STEP_NODES) {
            return Ok(());
        }
        let bytes = read.saturating_mul(self.node_bytes());
        let damage_count = self.report.borrow().finding_count;
        let progress = Progress { bytes, expected_bytes: self.expected_bytes.max(bytes), damage_count };
        if self.watch.go_on(progress).await { Ok(()) } else { Err(Stopped) }
    }

    /// The report, with its findings in order.
    pub fn finish(self) -> Report {
        let mut report = self.report.into_inner();
        report.findings.sort_by(|a, b| (a.rule, a.place, &a.why).cmp(&(b.rule, b.place, &b.why)));
        report
    }

    /// Takes the findings out, so that they can be extended at the end.
    pub fn take_findings(&self) -> Vec<Finding> {
        std::mem::take(&mut self.report.borrow_mut().findings)
    }

    /// Puts them back.
    pub fn put_findings(&self, findings: Vec<Finding>) {
        self.report.borrow_mut().findings = findings;
    }
}

/// An estimate of the bytes of nodes that a check reads: the used bytes of the block groups for nodes, and those of the
/// extent tree once more. 0 if block groups cannot be read.
pub(super) fn expected_bytes(fs: &Filesystem) -> LocalBoxFuture<'_, u64> {
    use sealblock_btrfs_format::items::chunk::BlockGroupFlags;
    Box::pin(async move {
        let Ok(space) = fs.space().await else { return 0 };
        let is_of_nodes = |bits: u64| {
            BlockGroupFlags::from_bits_retain(bits).intersects(BlockGroupFlags::METADATA | BlockGroupFlags::SYSTEM)
        };
        let used = space.iter().filter(|(bits, _)| is_of_nodes(**bits)).map(|(_, space)| space.used_bytes);
        used.fold(0, u64::saturating_add)
    })
}
