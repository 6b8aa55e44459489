//! The record of a scrub: what it remembers over a restart, and its bytes as drawn in `docs/formats/scrub-state.md`.
//!
//! The bytes lie in the reserved area, where corruption and other writers reach them, so no field is used before all of them are
//! checked.

use std::num::NonZeroU64;

use sealblock_block::DamageRun;
use sealblock_integrity::guard::crc32c;

use crate::damage::{self, MAX_DAMAGE_BYTES};

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
    /// are of blocks that no longer exist. A run that finished before the device grew was not one of all blocks; the schedule counts
    /// from it nevertheless.
    pub(crate) fn fit(&mut self, before_blocks: u64, capacity_blocks: u64) {
        if capacity_blocks > before_blocks {
            self.completed_unix_s = None;
        }
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

/// What is saved of a scrub and of the device that it is saved on.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SavedState {
    /// The record of the scrub.
    pub record: ScrubRecord,
    /// Blocks of the device that is scrubbed.
    pub capacity_blocks: u64,
    /// Identity of the device that is scrubbed; zero if it has none.
    pub device: [u8; 16],
    /// How often the state was saved: of several copies the one with the most counts.
    pub writes: u64,
    /// Identity of the volume that the state lies on, which may be a replica of the device; zero if it is not known.
    pub leaf: [u8; 16],
    /// Bad blocks of that volume, in order.
    pub damage: Vec<DamageRun>,
    /// The first block of that volume that may be missing in the list, because an earlier list was lost and the block was
    /// not checked since; `None` if the list is whole.
    pub forgotten_from: Option<u64>,
}

impl SavedState {
    /// The bytes of the state. A list of bad blocks that does not fit gets coarse.
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// Decodes a state.
    ///
    /// # Errors
    /// When the bytes are none.
    pub fn decode(bytes: &[u8]) -> Result<SavedState, FormatError> {
        decode(bytes)
    }

    /// The record for a device of so many blocks: one from before a resize is adapted to the new capacity.
    pub fn record_for(&self, capacity_blocks: u64) -> ScrubRecord {
        let mut record = self.record.clone();
        record.fit(self.capacity_blocks, capacity_blocks);
        record
    }

    /// True if this is the state of another device than this one. Earlier versions did not say of which it is.
    pub fn is_foreign(&self, device: &[u8; 16]) -> bool {
        self.device != [0; 16] && self.device != *device
    }
}

/// The last version that is read, which is written only while a list is not whole. Programs that do not know it leave such a record as it
/// is, so they never take its list for a whole one.
pub const VERSION: u16 = 4;
/// The version of a record with a whole list. Earlier ones are read too: version 2 has no identities and no bad blocks, and version 1 did
/// not count unchecked blocks.
const WHOLE_VERSION: u16 = 3;
/// Maximum bytes of a record.
pub const MAX_BYTES: usize = HEADER_BYTES + MAX_RUNS * RUN_BYTES + MAX_DAMAGE_BYTES;

const MAGIC: [u8; 4] = *b"SCRB";
const AT_CHECKSUM: usize = 4;
const AT_VERSION: usize = 8;
const HEADER_BYTES: usize = 160;
const RUN_BYTES: usize = 72;
const AT_DEVICE: usize = 112;
const AT_WRITES: usize = 128;
const AT_LEAF: usize = 136;
const AT_FORGOTTEN: usize = 152;
/// Bytes of the header and of a run in version 2, which has no identities.
const SECOND_VERSION_BYTES: (usize, usize) = (AT_DEVICE, RUN_BYTES);
/// Bytes of the header and of a run in version 1, which end before the unchecked blocks.
const FIRST_VERSION_BYTES: (usize, usize) = (AT_DEVICE - 8, RUN_BYTES - 8);

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
    /// The state of another device.
    #[error("it is of another device")]
    Foreign,
}

/// Encodes a state.
fn encode(state: &SavedState) -> Vec<u8> {
    let SavedState { record, capacity_blocks, device, writes, leaf, damage, forgotten_from } = state;
    let version = if forgotten_from.is_some() { VERSION } else { WHOLE_VERSION };
    let (damage, damage_runs) = damage::encode(damage);
    let mut bytes = Vec::with_capacity(HEADER_BYTES + record.runs.len() * RUN_BYTES + damage.len());
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&version.to_le_bytes());
    let phase = match record.phase {
        RunPhase::Idle => 0,
        RunPhase::Running => 1,
        RunPhase::Paused => 2,
    };
    bytes.extend_from_slice(&[phase, record.runs.len() as u8]);
    bytes.extend_from_slice(&damage_runs.to_le_bytes());
    bytes.extend_from_slice(&[0; 2]);
    let RunCounts { blocks, bad_blocks: bad, repaired, unrepaired, unchecked } = record.counts;
    let or_zero = |value: Option<u64>| value.unwrap_or(0);
    let numbers = [
        *capacity_blocks,
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
    bytes.extend_from_slice(device);
    put(&mut bytes, &[*writes]);
    bytes.extend_from_slice(leaf);
    put(&mut bytes, &[forgotten_from.unwrap_or(0)]);
    record.runs.iter().for_each(|run| encode_run(run, &mut bytes));
    bytes.extend_from_slice(&damage);
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

/// Decodes a state.
fn decode(bytes: &[u8]) -> Result<SavedState, FormatError> {
    let version = check(bytes)?;
    let (header_bytes, run_bytes) = match version {
        1 => FIRST_VERSION_BYTES,
        2 => SECOND_VERSION_BYTES,
        WHOLE_VERSION | VERSION => (HEADER_BYTES, RUN_BYTES),
        _ => return Err(FormatError::Version(version)),
    };
    let wrong_length = FormatError::Length(bytes.len());
    let (header, rest) = bytes.split_at_checked(header_bytes).ok_or(wrong_length)?;
    let phase = match header[10] {
        0 => RunPhase::Idle,
        1 => RunPhase::Running,
        2 => RunPhase::Paused,
        _ => return Err(FormatError::Field("the state")),
    };
    let count = usize::from(header[11]);
    let (runs, damage) = rest.split_at_checked(count * run_bytes).ok_or(wrong_length)?;
    let has_list = version >= WHOLE_VERSION;
    if count > MAX_RUNS || !has_list && !damage.is_empty() {
        return Err(wrong_length);
    }
    let damage_runs = if has_list { u16::from_le_bytes([header[12], header[13]]) } else { 0 };
    let from = if version == VERSION { HEADER_BYTES } else { header_bytes.min(AT_FORGOTTEN) };
    let reserved = [&header[if has_list { 14 } else { 12 }..16], &header[from..]].concat();
    if reserved.iter().any(|byte| *byte != 0) {
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
    let capacity_blocks = number(0);
    let state =
        SavedState { record: check_consistency(record, capacity_blocks)?, capacity_blocks, ..SavedState::default() };
    if !has_list {
        return Ok(state);
    }
    Ok(SavedState {
        device: identity(header, AT_DEVICE),
        writes: self::number(header, AT_WRITES),
        forgotten_from: (version == VERSION).then(|| self::number(header, AT_FORGOTTEN)),
        leaf: identity(header, AT_LEAF),
        damage: damage::decode(damage, damage_runs).ok_or(FormatError::Field("the list of bad blocks"))?,
        ..state
    })
}

fn identity(header: &[u8], at: usize) -> [u8; 16] {
    *header[at..].first_chunk().expect("the header is longer")
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
