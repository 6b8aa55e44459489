use std::num::NonZeroU64;

use proptest::prelude::*;
use sealblock_block::{BadBlockCause, DamageRun, ReservedArea};
use sealblock_integrity::guard::crc32c;

use crate::record::{MAX_RUNS, RunCounts, RunPhase, RunResult, SavedState, ScrubRecord, ScrubRun};
use crate::{FormatError, MAX_BYTES};

const CAPACITY: u64 = 1_000_000;

fn counts() -> RunCounts {
    RunCounts { blocks: 300, bad_blocks: 5, repaired: 3, unrepaired: 2, unchecked: 17 }
}

fn record() -> ScrubRecord {
    let run = |at| ScrubRun {
        started_unix_s: at,
        ended_unix_s: at + 9,
        from: 4,
        counts: counts(),
        ended: RunResult::Stopped,
    };
    ScrubRecord {
        phase: RunPhase::Running,
        position: 310,
        from: 10,
        started_unix_s: 1_790_000_000,
        counts: counts(),
        rate: NonZeroU64::new(7 << 20),
        completed_unix_s: Some(1_780_000_000),
        schedule_from_unix_s: Some(1_785_000_000),
        runs: vec![run(5), ScrubRun { ended: RunResult::Finished, ..run(20) }],
    }
}

/// What is saved with a record: identities and the bad blocks of the volume that it lies on.
fn state(record: ScrubRecord) -> SavedState {
    let damage = vec![DamageRun::exact(3, 3, BadBlockCause::Media), DamageRun::exact(700, 709, BadBlockCause::Media)];
    SavedState {
        record,
        capacity_blocks: CAPACITY,
        device: [7; 16],
        writes: 9,
        leaf: [8; 16],
        damage,
        forgotten_from: None,
    }
}

fn encode(record: &ScrubRecord, capacity_blocks: u64) -> Vec<u8> {
    SavedState { capacity_blocks, ..state(record.clone()) }.encode()
}

fn decode(bytes: &[u8], capacity_blocks: u64) -> Result<ScrubRecord, FormatError> {
    SavedState::decode(bytes).map(|state| state.record_for(capacity_blocks))
}

/// The same bytes as an earlier version has them.
fn earlier(version: u8, header_bytes: usize, run_bytes: usize) -> Vec<u8> {
    let whole = SavedState { damage: Vec::new(), ..state(record()) }.encode();
    let runs = whole[160..].chunks(72).flat_map(|run| run[..run_bytes].to_vec());
    let mut bytes: Vec<u8> = whole[..header_bytes].iter().copied().chain(runs).collect();
    bytes[8] = version;
    let checksum = crc32c(&bytes[8..]);
    bytes[4..8].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// The bytes of the record with some of them replaced, and a checksum that fits.
fn with(at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut all = encode(&record(), CAPACITY);
    all[at..at + bytes.len()].copy_from_slice(bytes);
    let checksum = crc32c(&all[8..]);
    all[4..8].copy_from_slice(&checksum.to_le_bytes());
    all
}

#[test]
fn a_state_comes_back() {
    for record in [record(), ScrubRecord::default(), ScrubRecord { phase: RunPhase::Paused, ..record() }] {
        assert_eq!(SavedState::decode(&state(record.clone()).encode()), Ok(state(record)));
    }
}

#[test]
fn the_bytes_are_those_of_the_drawing() {
    let bytes = encode(&record(), CAPACITY);
    assert_eq!(bytes.len(), 160 + 2 * 72 + 3 + 4);
    assert_eq!((&bytes[..4], &bytes[8..16]), (&b"SCRB"[..], &[3, 0, 1, 2, 2, 0, 0, 0][..]));
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let numbers = [16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104].map(number);
    assert_eq!(numbers[..4], [CAPACITY, 310, 10, 1_790_000_000]);
    assert_eq!(numbers[4..], [300, 5, 3, 2, 7 << 20, 1_780_000_000, 1_785_000_000, 17]);
    assert_eq!((&bytes[112..128], number(128), &bytes[136..152], number(152)), (&[7; 16][..], 9, &[8; 16][..], 0));
    assert_eq!([160, 168, 176, 184, 192, 200, 208, 216, 224].map(number), [5, 14, 4, 300, 5, 3, 2, 2, 17]);
    assert_eq!(number(232 + 56), 1);
    assert_eq!(bytes[304..], [3, 0, 0, 0xb8, 5, 9, 0]);
    // Written down: other bytes would be another format.
    assert_eq!(bytes[4..8], crc32c(&bytes[8..]).to_le_bytes());
}

#[test]
fn records_of_earlier_versions_are_read_and_say_nothing_of_what_they_lack() {
    let nothing = |counts| RunCounts { unchecked: 0, ..counts };
    let runs = record().runs.into_iter().map(|run| ScrubRun { counts: nothing(run.counts), ..run }).collect();
    let first = ScrubRecord { counts: nothing(counts()), runs, ..record() };
    for (bytes, record) in [(earlier(1, 104, 64), first), (earlier(2, 112, 72), record())] {
        let read = SavedState::decode(&bytes).unwrap();
        assert_eq!(read, SavedState { record, capacity_blocks: CAPACITY, ..SavedState::default() });
        assert!(!read.is_foreign(&[7; 16]), "of which device it is was not said");
    }
}

#[test]
fn a_list_that_is_not_whole_has_a_version_that_earlier_programs_leave_alone() {
    for first in [0, 1, 700_000] {
        let lost = SavedState { forgotten_from: Some(first), ..state(record()) };
        let bytes = lost.encode();
        assert_eq!((bytes[8], &bytes[152..160]), (4, &first.to_le_bytes()[..]));
        assert_eq!(SavedState::decode(&bytes), Ok(lost));
    }
    assert_eq!(encode(&record(), CAPACITY)[8], 3, "as before");
}

#[test]
fn the_state_of_another_device_is_not_taken() {
    let state = state(record());
    assert!(!state.is_foreign(&[7; 16]) && state.is_foreign(&[6; 16]));
    let mut scrub = crate::Scrub::new(super::profile(CAPACITY), crate::Settings::default());
    scrub.restore(&state.encode()).unwrap();
    let other = SavedState { device: [6; 16], ..state };
    assert_eq!(scrub.restore(&other.encode()), Err(FormatError::Foreign));
    let saved = SavedState::decode(&scrub.last_to_save(crate::Now::default()).unwrap_or_else(|| {
        scrub.stop(crate::Now::default()).unwrap();
        scrub.last_to_save(crate::Now::default()).unwrap()
    }));
    let saved = saved.unwrap();
    assert_eq!((saved.device, saved.writes, saved.damage.len()), ([7; 16], 10, 0), "it was saved once more");
}

#[test]
fn no_bit_may_differ_and_no_byte_be_missing_or_too_many() {
    let bytes = encode(&record(), CAPACITY);
    for bit in 0..bytes.len() * 8 {
        let mut bad = bytes.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        let expected = if bit < 32 { FormatError::Magic } else { FormatError::Checksum };
        assert_eq!(decode(&bad, CAPACITY), Err(expected), "bit {bit}");
    }
    for length in 0..bytes.len() {
        assert!(decode(&bytes[..length], CAPACITY).is_err(), "{length} bytes");
    }
    assert_eq!(decode(&[&bytes[..], &[0]].concat(), CAPACITY), Err(FormatError::Checksum));
}

#[test]
fn a_record_of_before_the_device_was_resized_goes_on_or_begins_anew() {
    let bytes = encode(&record(), CAPACITY);
    for not_larger in [CAPACITY, 311] {
        assert_eq!(decode(&bytes, not_larger), Ok(record()));
    }
    let grown = ScrubRecord { completed_unix_s: None, ..record() };
    assert_eq!(decode(&bytes, CAPACITY + 1), Ok(grown), "no run has checked the last block");
    let anew = ScrubRecord { position: 0, from: 0, counts: RunCounts::default(), ..record() };
    for past_it in [310, 11, 9] {
        assert_eq!(decode(&bytes, past_it), Ok(anew.clone()), "{past_it} blocks");
    }
    let idle = ScrubRecord::default();
    assert_eq!(decode(&encode(&idle, CAPACITY), 1), Ok(idle));
}

#[test]
fn invalid_records_with_a_good_checksum_are_rejected_with_the_reason() {
    let run = |field: usize| 160 + 8 * field;
    for (bytes, why) in [
        (with(8, &[5]), FormatError::Version(5)),
        (with(8, &[2]), FormatError::Length(311)),
        (with(8, &[1]), FormatError::Length(311)),
        (with(8, &[0]), FormatError::Version(0)),
        (with(8, &[1, 1]), FormatError::Version(257)),
        (with(10, &[3]), FormatError::Field("the state")),
        (with(11, &[1]), FormatError::Field("the list of bad blocks")),
        (with(11, &[17]), FormatError::Length(311)),
        (with(12, &[1]), FormatError::Field("the list of bad blocks")),
        (with(12, &[3]), FormatError::Field("the list of bad blocks")),
        (with(306, &[9]), FormatError::Field("the list of bad blocks")),
        (with(159, &[1]), FormatError::Field("a reserved field")),
        (with(152, &[1]), FormatError::Field("a reserved field")),
        (with(15, &[1]), FormatError::Field("a reserved field")),
        (with(16, &310u64.to_le_bytes()), FormatError::Field("the position")),
        (with(24, &[0x37]), FormatError::Field("the position")),
        (with(24, &CAPACITY.to_le_bytes()), FormatError::Field("the position")),
        (with(32, &[0xff; 8]), FormatError::Field("the position")),
        (with(56, &[6]), FormatError::Field("the counts")),
        (with(72, &[0xff; 8]), FormatError::Field("the counts")),
        (with(104, &[0xff; 8]), FormatError::Field("the counts")),
        (with(10, &[0]), FormatError::Field("the active run, without one,")),
        (with(run(7), &[3]), FormatError::Field("the end of a run")),
        (with(run(4), &[4]), FormatError::Field("the counts of a run")),
        (with(run(8), &[0xff; 8]), FormatError::Field("the counts of a run")),
    ] {
        assert_eq!(decode(&bytes, CAPACITY), Err(why));
    }
}

#[test]
fn the_largest_record_fits_the_reserved_area() {
    let runs = vec![record().runs[0]; MAX_RUNS];
    let damage = (0..30_000).map(|n| DamageRun::exact(n * 977, n * 977, BadBlockCause::Media)).collect();
    let bytes = SavedState { damage, ..state(ScrubRecord { runs, ..record() }) }.encode();
    assert!((MAX_BYTES - 100..=MAX_BYTES).contains(&bytes.len()), "{}", bytes.len());
    const { assert!(MAX_BYTES <= ReservedArea::ScrubState.max_bytes()) };
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..1400), fix: bool) {
        if fix && bytes.len() >= 12 {
            bytes[..4].copy_from_slice(b"SCRB");
            bytes[8..10].copy_from_slice(&[3, 0]);
            let checksum = crc32c(&bytes[8..]);
            bytes[4..8].copy_from_slice(&checksum.to_le_bytes());
        }
        if let Ok(state) = SavedState::decode(&bytes) {
            prop_assert!(bytes[8] < 3 || state.encode() == bytes);
        }
    }
}
