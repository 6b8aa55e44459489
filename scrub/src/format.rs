//! The bytes of a [`ScrubRecord`], as drawn in `docs/formats/scrub-state.md`.
//!
//! They lie beside the blocks, where damage and strangers reach them, so nothing of them counts until all of it is checked.

use std::num::NonZeroU64;

use sealblock_integrity::guard::crc32c;

use crate::record::{Counts, MOST_RUNS, Phase, Run, RunResult, ScrubRecord};

/// The version that is written. The one before is read, too: its runs did not count what they could not check.
pub const VERSION: u16 = 2;
/// Bytes of a record at most.
pub const MOST_BYTES: usize = HEAD_BYTES + MOST_RUNS * RUN_BYTES;

const MAGIC: [u8; 4] = *b"SCRB";
const AT_CHECKSUM: usize = 4;
const AT_VERSION: usize = 8;
const HEAD_BYTES: usize = 112;
const RUN_BYTES: usize = 72;
/// Bytes of the head and of a run in version 1, which end before what was not checked.
const FIRST_VERSION_BYTES: (usize, usize) = (HEAD_BYTES - 8, RUN_BYTES - 8);

/// Why bytes are no record.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FormatError {
    /// Some of them are missing, or there are too many.
    #[error("invalid length: {0} bytes")]
    Length(usize),
    /// They are something else.
    #[error("bad magic")]
    Magic,
    /// They are not what was written.
    #[error("its checksum does not fit")]
    Checksum,
    /// They are whole, and of a version that is not known here.
    #[error("it has version {0}, and versions up to {VERSION} are known")]
    Version(u16),
    /// A field has a value that it cannot have.
    #[error("{0} has a value that it cannot have")]
    Field(&'static str),
}

/// The bytes of a record, about a device of so many blocks.
pub(crate) fn encode(record: &ScrubRecord, capacity_blocks: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEAD_BYTES + record.runs.len() * RUN_BYTES);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    let phase = match record.phase {
        Phase::Idle => 0,
        Phase::Running => 1,
        Phase::Paused => 2,
    };
    bytes.extend_from_slice(&[phase, record.runs.len() as u8, 0, 0, 0, 0]);
    let Counts { blocks, bad_blocks: bad, repaired, unrepaired: lost, unchecked } = record.counts;
    let or_zero = |value: Option<u64>| value.unwrap_or(0);
    let numbers = [
        capacity_blocks,
        record.position,
        record.from,
        record.started_unix_s,
        blocks,
        bad,
        repaired,
        lost,
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

fn encode_run(run: &Run, bytes: &mut Vec<u8>) {
    let Counts { blocks, bad_blocks: bad, repaired, unrepaired: lost, unchecked } = run.counts;
    let ended = match run.ended {
        RunResult::Finished => 1,
        RunResult::Stopped => 2,
    };
    let Run { started_unix_s, ended_unix_s, from, .. } = *run;
    put(bytes, &[started_unix_s, ended_unix_s, from, blocks, bad, repaired, lost, ended, unchecked]);
}

fn put(bytes: &mut Vec<u8>, numbers: &[u64]) {
    for number in numbers {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
}

/// Reads a record about a device of so many blocks. One about as many as it had before it was resized is fitted to those it has.
pub(crate) fn decode(bytes: &[u8], capacity_blocks: u64) -> Result<ScrubRecord, FormatError> {
    let version = check(bytes)?;
    let (head_bytes, run_bytes) = match version {
        1 => FIRST_VERSION_BYTES,
        VERSION => (HEAD_BYTES, RUN_BYTES),
        _ => return Err(FormatError::Version(version)),
    };
    let (head, runs) = bytes.split_at_checked(head_bytes).ok_or(FormatError::Length(bytes.len()))?;
    let phase = match head[10] {
        0 => Phase::Idle,
        1 => Phase::Running,
        2 => Phase::Paused,
        _ => return Err(FormatError::Field("the state")),
    };
    let count = usize::from(head[11]);
    if count > MOST_RUNS || runs.len() != count * run_bytes {
        return Err(FormatError::Length(bytes.len()));
    }
    if head[12..16] != [0; 4] {
        return Err(FormatError::Field("a reserved field"));
    }
    let number = |index: usize| number(head, 16 + 8 * index);
    let some = |index: usize| Some(number(index)).filter(|value| *value != 0);
    let record = ScrubRecord {
        phase,
        position: number(1),
        from: number(2),
        started_unix_s: number(3),
        counts: counts(head, 48, 104),
        rate: NonZeroU64::new(number(8)),
        completed_unix_s: some(9),
        schedule_from_unix_s: some(10),
        runs: runs.chunks_exact(run_bytes).map(decode_run).collect::<Result<_, _>>()?,
    };
    let mut record = sound(record, number(0))?;
    record.fit(capacity_blocks);
    Ok(record)
}

/// What all versions have in common: the start, the checksum, the version.
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

/// The counts from byte `at` on, and what was not checked, where the version has it.
fn counts(bytes: &[u8], at: usize, at_unchecked: usize) -> Counts {
    let unchecked = if bytes.len() > at_unchecked { number(bytes, at_unchecked) } else { 0 };
    let [blocks, bad, repaired, lost] = [0, 8, 16, 24].map(|behind| number(bytes, at + behind));
    Counts { blocks, bad_blocks: bad, repaired, unrepaired: lost, unchecked }
}

fn decode_run(bytes: &[u8]) -> Result<Run, FormatError> {
    let number = |index: usize| number(bytes, 8 * index);
    let run = Run {
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
    if run.counts.is_sound() { Ok(run) } else { Err(FormatError::Field("the counts of a run")) }
}

/// Refuses what no scrub has ever written.
fn sound(record: ScrubRecord, capacity_blocks: u64) -> Result<ScrubRecord, FormatError> {
    let is_idle = record.phase == Phase::Idle;
    let nothing = (0, 0, 0, Counts::default(), None);
    let held = (record.position, record.from, record.started_unix_s, record.counts, record.rate);
    if is_idle && held != nothing {
        return Err(FormatError::Field("the run under way, without one,"));
    }
    let is_within = record.from <= record.position && (is_idle || record.position < capacity_blocks);
    if !is_within || record.counts.blocks != record.position - record.from {
        return Err(FormatError::Field("the position"));
    }
    if record.counts.is_sound() { Ok(record) } else { Err(FormatError::Field("the counts")) }
}

fn number(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}
