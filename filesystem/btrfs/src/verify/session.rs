//! What all parts of one verification share: the checks, the observer and the findings so far.

use sealblock_integrity::ChecksumKind;
use std::cell::{Cell, OnceCell, RefCell};

use futures_util::future::LocalBoxFuture;
use sealblock_block::{Ability, Device as _, Error, ErrorKind};
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_integrity::combine::{Combiner, Crc32c};

use super::ranges::{MAX_RANGES, RangeList};
use super::report::{BadData, DataFault, Finding, Report, Unattested, Uses, WhyUnchecked};
use super::strips::Strip;
use crate::chunk_map::Place;
use crate::devices::Device;
use crate::error::{BadCopy, CopyFault, FsError};
use crate::extents::Sums;
use crate::filesystem::Filesystem;
use crate::replicas::Check;
use crate::tags::WrittenIn;

/// The maximum number of nodes that are remembered as checked: 16 million, which is 256 GiB of nodes of 16 KiB.
pub const MAX_NODES: usize = 16 << 20;
/// The default limit of listed findings.
pub const MAX_LISTED: usize = 10_000;
/// The observer is called after this number of bytes.
const STEP_BYTES: u64 = 1 << 20;
/// The observer is called after this number of nodes or inodes if no bytes are checked meanwhile.
const STEP_TURNS: u64 = 64;

/// Who computes checksums of data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mode {
    /// Each device that can do it without transferring the data, and this host for the others.
    #[default]
    Auto,
    /// Devices; an error if one cannot.
    Offload,
    /// This host.
    Emulate,
}

/// Options of a verification.
#[derive(Clone, Copy, Debug)]
pub struct VerifyOptions {
    /// Who computes checksums of data.
    pub mode: Mode,
    /// The limit of listed findings.
    pub most_listed: usize,
    /// The limit of nodes that are remembered as checked, so that shared nodes are checked once.
    pub most_nodes: usize,
    /// The limit of scattered ranges of data that are remembered.
    pub most_ranges: usize,
}

impl Default for VerifyOptions {
    fn default() -> VerifyOptions {
        VerifyOptions { mode: Mode::Auto, most_listed: MAX_LISTED, most_nodes: MAX_NODES, most_ranges: MAX_RANGES }
    }
}

/// The progress of a verification.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Progress {
    /// Bytes that were checked or could not be checked, counting each copy.
    pub bytes: u64,
    /// An estimate of the total.
    pub expected_bytes: u64,
    /// Findings so far.
    pub damage_count: u64,
}

/// Observes the progress; can stop or slow down the verification.
pub trait Watch {
    /// Called between pieces. Return false to stop the verification.
    fn go_on(&self, progress: Progress) -> LocalBoxFuture<'_, bool>;
}

/// No observer.
pub struct Unwatched;

impl Watch for Unwatched {
    fn go_on(&self, _: Progress) -> LocalBoxFuture<'_, bool> {
        Box::pin(std::future::ready(true))
    }
}

/// It was stopped.
#[derive(Debug)]
pub(super) struct Stopped;

/// One verification.
pub(super) struct Session<'a> {
    pub fs: &'a Filesystem,
    pub options: VerifyOptions,
    watch: &'a dyn Watch,
    /// True if all data without checksums are listed, also those whose tags show nothing.
    lists_all: bool,
    report: RefCell<Report>,
    /// Logical ranges of unattested data.
    unattested: RefCell<RangeList>,
    expected_bytes: u64,
    /// Unchecked bytes that count as progress.
    progressed_bytes: Cell<u64>,
    step_at: Cell<u64>,
    turns: Cell<u64>,
    transferred_before: u64,
    combiner: OnceCell<Combiner<Crc32c>>,
}

impl<'a> Session<'a> {
    /// # Errors
    /// If devices must compute checksums and one cannot.
    pub fn new(fs: &'a Filesystem, options: VerifyOptions, watch: &'a dyn Watch) -> Result<Session<'a>, FsError> {
        let devices = &fs.storage().devices;
        let session = Session {
            fs,
            options,
            watch,
            lists_all: false,
            report: RefCell::default(),
            unattested: RefCell::new(RangeList::new(options.most_ranges)),
            expected_bytes: expected_bytes(fs),
            progressed_bytes: Cell::new(0),
            step_at: Cell::new(STEP_BYTES),
            turns: Cell::new(0),
            transferred_before: devices.transferred_bytes(),
            combiner: OnceCell::new(),
        };
        // Without checksums there is nothing to compute.
        let must_offload = options.mode == Mode::Offload && !devices.nodes_need_tags();
        let unable = devices.iter().find(|(_, device)| must_offload && !session.offloads(device));
        match unable {
            None => Ok(session),
            Some((_, device)) => {
                let why = match fs.storage().geometry().checksum {
                    ChecksumType::Crc32c => "it does not compute CRC-32C without the data crossing",
                    _ => "no device computes the checksums of this filesystem",
                };
                Err(FsError::Devices(format!("{} cannot check data itself: {why}", device.name)))
            }
        }
    }

    /// One that only lists data without checksums.
    pub fn listing(fs: &'a Filesystem, options: VerifyOptions, watch: &'a dyn Watch) -> Result<Session<'a>, FsError> {
        Ok(Session { lists_all: true, ..Session::new(fs, options, watch)? })
    }

    /// Reports devices whose end is cut off. Which data are lost by that is only seen when they are read, so this is
    /// reported even for a single file.
    pub fn note_sizes(&self) {
        self.fs.short_devices().into_iter().for_each(|device| self.found(Finding::ShortDevice(device)));
    }

    /// Reports devices that consist of several copies, of which only one was read.
    pub fn note_copies_below(&self) {
        let mut devices = self.fs.storage().devices.iter();
        if devices.any(|(_, device)| device.device.abilities().copies) {
            self.unchecked(WhyUnchecked::CopiesBelow, 0);
        }
    }

    /// True if a device can compare data with their checksums without a transfer of the data.
    pub fn offloads(&self, device: &Device) -> bool {
        let abilities = device.device.abilities();
        self.options.mode != Mode::Emulate
            && self.fs.storage().geometry().checksum == ChecksumType::Crc32c
            && abilities.offloads
            && abilities.of_checksum(ChecksumKind::Crc32c) == Ability::Native
    }

    /// Combines checksums of sectors.
    pub fn combiner(&self) -> &Combiner<Crc32c> {
        self.combiner.get_or_init(|| Combiner::new(u64::from(self.fs.storage().geometry().sector_bytes)))
    }

    /// Adds a finding.
    pub fn found(&self, finding: Finding) {
        let mut report = self.report.borrow_mut();
        report.damage_count += 1;
        if report.findings.len() < self.options.most_listed {
            report.findings.push(finding);
        }
    }

    /// When data were written, if that is asked, or the tags of some device can show it.
    pub fn provable(&self, written: WrittenIn) -> Option<WrittenIn> {
        if self.lists_all { Some(written) } else { self.fs.storage().devices.provable(written) }
    }

    /// Reports a bad copy of data; of those without checksums, with what their tags must show.
    pub fn bad_data(&self, copy: BadCopy, bytes: u64, written: Option<WrittenIn>) {
        let logical = copy.logical.unwrap_or_default();
        match why_unchecked(&copy.fault) {
            Some(why) => self.unchecked(why, bytes),
            None => {
                self.verified(bytes);
                let fault = DataFault::Copy { copy, is_lost: false, written };
                self.found(Finding::Data(Box::new(BadData { logical, bytes, fault, uses: Uses::default() })));
            }
        }
    }

    /// Counts unchecked bytes.
    pub fn unchecked(&self, why: WhyUnchecked, bytes: u64) {
        *self.report.borrow_mut().unchecked.entry(why).or_default() += bytes;
        self.progressed_bytes.set(self.progressed_bytes.get() + bytes);
    }

    /// Counts checked bytes, good or bad.
    pub fn verified(&self, bytes: u64) {
        self.report.borrow_mut().bytes_verified += bytes;
        self.progressed_bytes.set(self.progressed_bytes.get() + bytes);
    }

    /// Counts bytes without a checksum that a device found intact, and whose tags do not show that they are those that
    /// were written last.
    pub fn unattested(&self, strip: &Strip, from: u64, to: u64) {
        self.verified(to - from);
        *self.report.borrow_mut().unchecked.entry(WhyUnchecked::Unattested).or_default() += to - from;
        let sector = u64::from(self.fs.storage().geometry().sector_bytes);
        let mut unattested = self.unattested.borrow_mut();
        strip.sectors(from, to, sector).for_each(|(_, logical)| unattested.add(logical, logical + sector));
    }

    /// The unattested ranges, as many as are listed, and whether these are all.
    pub fn unattested_ranges(&self) -> (Vec<(u64, u64)>, bool) {
        let mut unattested = self.unattested.borrow_mut();
        unattested.sort_and_merge();
        let most = self.options.most_listed;
        let listed: Vec<(u64, u64)> = unattested.iter().take(most).collect();
        let is_all = !unattested.is_cut() && unattested.iter().count() == listed.len();
        (listed, is_all)
    }

    /// Adds unattested data with their files to the report.
    pub fn tell_unattested(&self, unattested: Vec<Unattested>, is_all: bool) {
        let mut report = self.report.borrow_mut();
        (report.unattested, report.has_more_unattested) = (unattested, !is_all);
    }

    /// Counts a node.
    pub fn verified_node(&self) {
        self.report.borrow_mut().nodes_verified += 1;
    }

    /// Counts bytes that a device checked.
    pub fn verified_by_device(&self, bytes: u64) {
        self.report.borrow_mut().is_offloaded = true;
        self.verified(bytes);
    }

    /// Bad copies of data, as addresses and bytes; `None` if not all of them are listed.
    pub fn bad_ranges(&self) -> Option<Vec<(u64, u64)>> {
        let report = self.report.borrow();
        let ranges = report.findings.iter().filter_map(|finding| match finding {
            Finding::Data(data) => Some((data.logical, data.logical.saturating_add(data.bytes))),
            Finding::LostNode(node) => Some((node.lost.logical, node.lost.logical.saturating_add(node.lost.bytes))),
            Finding::Node { copy, .. } => {
                let start = copy.logical?;
                Some((start, start.saturating_add(u64::from(self.fs.storage().geometry().node_bytes))))
            }
            _ => None,
        });
        (report.damage_count == report.findings.len() as u64).then(|| ranges.collect())
    }

    /// Calls the observer after each `STEP_BYTES`.
    pub async fn step(&self) -> Result<(), Stopped> {
        let bytes = self.progressed_bytes.get();
        if bytes < self.step_at.get() {
            return Ok(());
        }
        self.step_at.set(bytes + STEP_BYTES);
        self.ask().await
    }

    /// Like [`Session::step`], after nodes or inodes that require no check of bytes.
    pub async fn turn(&self) -> Result<(), Stopped> {
        self.turns.set(self.turns.get() + 1);
        if self.turns.get().is_multiple_of(STEP_TURNS) { self.ask().await } else { Ok(()) }
    }

    async fn ask(&self) -> Result<(), Stopped> {
        let bytes = self.progressed_bytes.get();
        let damage_count = self.report.borrow().damage_count;
        let expected_bytes = self.expected_bytes.max(bytes);
        match self.watch.go_on(Progress { bytes, expected_bytes, damage_count }).await {
            true => Ok(()),
            false => Err(Stopped),
        }
    }

    /// Takes the findings out, so that they can be extended at the end.
    pub fn take_findings(&self) -> Vec<Finding> {
        std::mem::take(&mut self.report.borrow_mut().findings)
    }

    /// Puts them back.
    pub fn put_findings(&self, mut findings: Vec<Finding>) {
        findings.sort_by_key(Finding::order);
        self.report.borrow_mut().findings = findings;
    }

    /// The report.
    pub fn finish(self) -> Report {
        let mut report = self.report.into_inner();
        report.bytes_transferred = self.fs.storage().devices.transferred_bytes() - self.transferred_before;
        report
    }
}

/// The reason, if a copy could not be checked; `None` if it is damaged.
pub fn why_unchecked(fault: &CopyFault) -> Option<WhyUnchecked> {
    match fault {
        CopyFault::Missing => Some(WhyUnchecked::MissingDevice),
        CopyFault::Stale => Some(WhyUnchecked::StaleDevice),
        CopyFault::Unreadable(error) if is_unreachable(error) => Some(WhyUnchecked::Unreachable),
        _ => None,
    }
}

/// True if a device did not respond, rather than reporting an error.
pub(super) fn is_unreachable(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unreachable { .. })
}

/// A damaged copy of data.
pub(super) fn copy_of_data(logical: u64, place: Place, mirror: usize, fault: CopyFault) -> BadCopy {
    BadCopy { logical: Some(logical), place, mirror: mirror + 1, fault }
}

/// What data are checked against whose checksums were looked up: these, or what tags must show.
pub(super) fn check_of(sums: &[Sums], logical: u64, written: Option<WrittenIn>) -> Check<'_> {
    match sums {
        [run] if run.logical == logical => Check::Sums(&run.bytes),
        _ => written.map_or(Check::None, Check::Tags),
    }
}

/// An estimate of the bytes that a verification of the whole filesystem checks, counting each copy: the used bytes in
/// the superblock times the average number of copies of a chunk.
pub fn expected_bytes(fs: &Filesystem) -> u64 {
    let map = &fs.storage().map;
    let (mut bytes, mut stored) = (0_u128, 0_u128);
    for (logical, length) in map.ranges() {
        let copies = map.locate(logical, 1).map_or(1, |located| located.copies.len());
        bytes += u128::from(length);
        stored += u128::from(length) * copies as u128;
    }
    let used = u128::from(fs.superblock().bytes_used.get());
    u64::try_from((used * stored).checked_div(bytes).unwrap_or(used)).unwrap_or(u64::MAX)
}
