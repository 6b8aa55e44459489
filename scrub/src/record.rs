//! The record of a scrub: what it remembers over a restart, and its bytes as drawn in `docs/formats/scrub-state.md`.
//!
//! The bytes lie in the reserved area, where corruption and other writers reach them, so no field is used before all of them are
//! checked.

use std::num::NonZeroU64;

use sealblock_integrity::guard::crc32c;

/// Maximum runs in a record.
pub const MAX_RUNS: usize = 16;

/// The counters of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RunCounts {
    /// Blocks that were checked, bad ones included.
    pub blocks: u64,
    /// Blocks that were bad.
    pub bad_blocks: u64,
    /// Bad blocks that were rewritten from another copy.
    pub repaired: u64,
    /// Bad blocks that were not repaired: there is no good copy, or the rewrite failed.
    pub unrepaired: u64,
    /// Blocks with a copy that was not checked: its member was offline, out of sync, or failed without naming blocks.
    pub unchecked: u64,
}

/// The result of the check of one piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CheckResult {
    /// Blocks that were bad.
    pub bad_blocks: u64,
    /// Bad blocks that were rewritten from another copy.
    pub repaired: u64,
    /// Blocks with a copy that was not checked.
    pub unchecked: u64,
}

impl RunCounts {
    /// Adds the result of a piece of `blocks` blocks.
    pub(crate) fn add(&mut self, blocks: u64, found: CheckResult) {
        let bad = found.bad_blocks.min(blocks);
        let repaired = found.repaired.min(bad);
        self.unchecked += found.unchecked.min(blocks);
        self.blocks += blocks;
        self.bad_blocks += bad;
        self.repaired += repaired;
        self.unrepaired += bad - repaired;
    }

    /// True if the counters are consistent with each other.
    pub(crate) fn is_consistent(&self) -> bool {
        self.bad_blocks <= self.blocks
            && self.unchecked <= self.blocks
            && self.repaired.checked_add(self.unrepaired) == Some(self.bad_blocks)
    }
}

/// How a run ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RunResult {
    /// It reached the last block.
    Finished,
    /// An operator stopped it.
    Stopped,
}

/// A run that has ended. Times are seconds since 1970.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScrubRun {
    /// When it was started.
    pub started_unix_s: u64,
    /// When it ended.
    pub ended_unix_s: u64,
    /// Its first block.
    pub from: u64,
    /// Its counters.
    pub counts: RunCounts,
    /// How it ended.
    pub ended: RunResult,
}

/// Whether a run is active.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RunPhase {
    /// There is no run.
    #[default]
    Idle,
    /// A run is active.
    Running,
    /// An operator has paused the run.
    Paused,
}

/// The record of a scrub. Times are seconds since 1970.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ScrubRecord {
    /// Whether a run is active.
    pub phase: RunPhase,
    /// The next block of the active run; 0 without one.
    pub position: u64,
    /// The first block of the active run; 0 without one.
    pub from: u64,
    /// When the active run was started; 0 without one.
    pub started_unix_s: u64,
    /// The counters of the active run; zero without one.
    pub counts: RunCounts,
    /// The rate limit that the active run was started with, in bytes per second.
    pub rate: Option<NonZeroU64>,
    /// When a run over all blocks finished last.
    pub completed_unix_s: Option<u64>,
    /// The base of the schedule: when a run over all blocks finished, or an operator stopped any run.
    pub schedule_from_unix_s: Option<u64>,
    /// The last runs, oldest first; at most [`MAX_RUNS`].
    pub runs: Vec<ScrubRun>,
}

impl ScrubRecord {
    /// Starts a run.
    pub(crate) fn begin(&mut self, now_unix_s: u64, from: u64, rate: Option<NonZeroU64>) {
        self.phase = RunPhase::Running;
        (self.position, self.from) = (from, from);
        (self.started_unix_s, self.counts, self.rate) = (now_unix_s, RunCounts::default(), rate);
    }

    /// Adapts the record to a new capacity. A run continues at its position; a run past the new end restarts, because its counters
    /// are of blocks that no longer exist.
    pub(crate) fn fit(&mut self, capacity_blocks: u64) {
        if self.phase != RunPhase::Idle && self.position >= capacity_blocks {
            (self.position, self.from, self.counts) = (0, 0, RunCounts::default());
        }
    }

    /// Ends the active run.
    pub(crate) fn end(&mut self, now_unix_s: u64, ended: RunResult) -> ScrubRun {
        let (started_unix_s, from, counts) = (self.started_unix_s, self.from, self.counts);
        let run = ScrubRun { started_unix_s, ended_unix_s: now_unix_s, from, counts, ended };
        if self.runs.len() == MAX_RUNS {
            self.runs.remove(0);
        }
        self.runs.push(run);
        let is_complete = ended == RunResult::Finished && from == 0;
        if is_complete {
            self.completed_unix_s = Some(now_unix_s);
        }
        if is_complete || ended == RunResult::Stopped {
            self.schedule_from_unix_s = Some(now_unix_s);
        }
        self.phase = RunPhase::Idle;
        (self.position, self.from, self.started_unix_s) = (0, 0, 0);
        (self.counts, self.rate) = (RunCounts::default(), None);
        run
    }
}

/// The version that is written. Version 1 is read too: its runs did not count unchecked blocks.
pub const VERSION: u16 = 2;
/// Maximum bytes of a record.
pub const MAX_BYTES: usize = HEADER_BYTES + MAX_RUNS * RUN_BYTES;

const MAGIC: [u8; 4] = *b"SCRB";
const AT_CHECKSUM: usize = 4;
const AT_VERSION: usize = 8;
const HEADER_BYTES: usize = 112;
const RUN_BYTES: usize = 72;
/// Bytes of the header and of a run in version 1, which end before the unchecked blocks.
const FIRST_VERSION_BYTES: (usize, usize) = (HEADER_BYTES - 8, RUN_BYTES - 8);

/// Why bytes are not a valid record.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FormatError {
    /// Bytes are missing, or there are too many.
    #[error("invalid length: {0} bytes")]
    Length(usize),
    /// The magic is wrong: the bytes are something else.
    #[error("bad magic")]
    Magic,
    /// The bytes are corrupt.
    #[error("checksum mismatch")]
    Checksum,
    /// The version is unknown.
    #[error("unknown version {0}; versions up to {VERSION} are known")]
    Version(u16),
    /// A field has an invalid value.
    #[error("{0} has an invalid value")]
    Field(&'static str),
}

/// Encodes the record of a device of `capacity_blocks` blocks.
pub(crate) fn encode(record: &ScrubRecord, capacity_blocks: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + record.runs.len() * RUN_BYTES);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    let phase = match record.phase {
        RunPhase::Idle => 0,
        RunPhase::Running => 1,
        RunPhase::Paused => 2,
    };
    bytes.extend_from_slice(&[phase, record.runs.len() as u8, 0, 0, 0, 0]);
    let RunCounts { blocks, bad_blocks: bad, repaired, unrepaired, unchecked } = record.counts;
    let or_zero = |value: Option<u64>| value.unwrap_or(0);
    let numbers = [
        capacity_blocks,
        record.position,
        record.from,
        record.started_unix_s,
        blocks,
        bad,
        repaired,
        unrepaired,
        record.rate.map_or(0, NonZeroU64::get),
        or_zero(record.completed_unix_s),
        or_zero(record.schedule_from_unix_s),
        unchecked,
    ];
    put(&mut bytes, &numbers);
    record.runs.iter().for_each(|run| encode_run(run, &mut bytes));
    let checksum = crc32c(&bytes[AT_VERSION..]);
    bytes[AT_CHECKSUM..AT_VERSION].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

fn encode_run(run: &ScrubRun, bytes: &mut Vec<u8>) {
    let RunCounts { blocks, bad_blocks: bad, repaired, unrepaired, unchecked } = run.counts;
    let ended = match run.ended {
        RunResult::Finished => 1,
        RunResult::Stopped => 2,
    };
    let ScrubRun { started_unix_s, ended_unix_s, from, .. } = *run;
    put(bytes, &[started_unix_s, ended_unix_s, from, blocks, bad, repaired, unrepaired, ended, unchecked]);
}

fn put(bytes: &mut Vec<u8>, numbers: &[u64]) {
    for number in numbers {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
}

/// Decodes the record of a device of `capacity_blocks` blocks. A record from before a resize is adapted to the new capacity.
pub(crate) fn decode(bytes: &[u8], capacity_blocks: u64) -> Result<ScrubRecord, FormatError> {
    let version = check(bytes)?;
    let (header_bytes, run_bytes) = match version {
        1 => FIRST_VERSION_BYTES,
        VERSION => (HEADER_BYTES, RUN_BYTES),
        _ => return Err(FormatError::Version(version)),
    };
    let (header, runs) = bytes.split_at_checked(header_bytes).ok_or(FormatError::Length(bytes.len()))?;
    let phase = match header[10] {
        0 => RunPhase::Idle,
        1 => RunPhase::Running,
        2 => RunPhase::Paused,
        _ => return Err(FormatError::Field("the state")),
    };
    let count = usize::from(header[11]);
    if count > MAX_RUNS || runs.len() != count * run_bytes {
        return Err(FormatError::Length(bytes.len()));
    }
    if header[12..16] != [0; 4] {
        return Err(FormatError::Field("a reserved field"));
    }
    let number = |index: usize| number(header, 16 + 8 * index);
    let some = |index: usize| Some(number(index)).filter(|value| *value != 0);
    let record = ScrubRecord {
        phase,
        position: number(1),
        from: number(2),
        started_unix_s: number(3),
        counts: counts(header, 48, 104),
        rate: NonZeroU64::new(number(8)),
        completed_unix_s: some(9),
        schedule_from_unix_s: some(10),
        runs: runs.chunks_exact(run_bytes).map(decode_run).collect::<Result<_, _>>()?,
    };
    let mut record = check_consistency(record, number(0))?;
    record.fit(capacity_blocks);
    Ok(record)
}

/// Checks what all versions share, magic and checksum; returns the version.
fn check(bytes: &[u8]) -> Result<u16, FormatError> {
    let Some((start, rest)) = bytes.split_at_checked(AT_VERSION) else { return Err(FormatError::Length(bytes.len())) };
    let Some(version) = rest.first_chunk::<2>() else { return Err(FormatError::Length(bytes.len())) };
    if start[..AT_CHECKSUM] != MAGIC {
        return Err(FormatError::Magic);
    }
    if start[AT_CHECKSUM..] != crc32c(rest).to_le_bytes() {
        return Err(FormatError::Checksum);
    }
    Ok(u16::from_le_bytes(*version))
}

/// Decodes the counters at byte `at`, and the unchecked blocks if the version has them.
fn counts(bytes: &[u8], at: usize, at_unchecked: usize) -> RunCounts {
    let unchecked = if bytes.len() > at_unchecked { number(bytes, at_unchecked) } else { 0 };
    let [blocks, bad, repaired, unrepaired] = [0, 8, 16, 24].map(|behind| number(bytes, at + behind));
    RunCounts { blocks, bad_blocks: bad, repaired, unrepaired, unchecked }
}

fn decode_run(bytes: &[u8]) -> Result<ScrubRun, FormatError> {
    let number = |index: usize| number(bytes, 8 * index);
    let run = ScrubRun {
        started_unix_s: number(0),
        ended_unix_s: number(1),
        from: number(2),
        counts: counts(bytes, 24, 64),
        ended: match number(7) {
            1 => RunResult::Finished,
            2 => RunResult::Stopped,
            _ => return Err(FormatError::Field("the end of a run")),
        },
    };
    if run.counts.is_consistent() { Ok(run) } else { Err(FormatError::Field("the counts of a run")) }
}

/// Rejects a record that no scrub writes.
fn check_consistency(record: ScrubRecord, capacity_blocks: u64) -> Result<ScrubRecord, FormatError> {
    let is_idle = record.phase == RunPhase::Idle;
    let nothing = (0, 0, 0, RunCounts::default(), None);
    let active = (record.position, record.from, record.started_unix_s, record.counts, record.rate);
    if is_idle && active != nothing {
        return Err(FormatError::Field("the active run, without one,"));
    }
    let is_within = record.from <= record.position && (is_idle || record.position < capacity_blocks);
    if !is_within || record.counts.blocks != record.position - record.from {
        return Err(FormatError::Field("the position"));
    }
    if record.counts.is_consistent() { Ok(record) } else { Err(FormatError::Field("the counts")) }
}

fn number(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}
