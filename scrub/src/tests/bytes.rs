use std::num::NonZeroU64;

use proptest::prelude::*;
use sealblock_block::ReservedArea;
use sealblock_integrity::guard::crc32c;

use crate::record::{MAX_RUNS, RunCounts, RunPhase, RunResult, ScrubRecord, ScrubRun};
use crate::record::{decode, encode};
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

/// The bytes of the record with some of them replaced, and a checksum that fits.
fn with(at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut all = encode(&record(), CAPACITY);
    all[at..at + bytes.len()].copy_from_slice(bytes);
    let checksum = crc32c(&all[8..]);
    all[4..8].copy_from_slice(&checksum.to_le_bytes());
    all
}

#[test]
fn a_record_comes_back() {
    for record in [record(), ScrubRecord::default(), ScrubRecord { phase: RunPhase::Paused, ..record() }] {
        assert_eq!(decode(&encode(&record, CAPACITY), CAPACITY), Ok(record));
    }
}

#[test]
fn the_bytes_are_those_of_the_drawing() {
    let bytes = encode(&record(), CAPACITY);
    assert_eq!(bytes.len(), 112 + 2 * 72);
    assert_eq!((&bytes[..4], &bytes[8..12]), (&b"SCRB"[..], &[2, 0, 1, 2][..]));
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let numbers = [16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104].map(number);
    assert_eq!(numbers[..4], [CAPACITY, 310, 10, 1_790_000_000]);
    assert_eq!(numbers[4..], [300, 5, 3, 2, 7 << 20, 1_780_000_000, 1_785_000_000, 17]);
    assert_eq!([112, 120, 128, 136, 144, 152, 160, 168, 176].map(number), [5, 14, 4, 300, 5, 3, 2, 2, 17]);
    assert_eq!(number(184 + 56), 1);
    // Written down: other bytes would be another format.
    assert_eq!(bytes[4..8], crc32c(&bytes[8..]).to_le_bytes());
}

#[test]
fn a_record_of_the_first_version_is_read_and_says_nothing_of_what_was_not_checked() {
    let whole = encode(&record(), CAPACITY);
    let runs = whole[112..].chunks(72).flat_map(|run| run[..64].to_vec());
    let mut first: Vec<u8> = whole[..104].iter().copied().chain(runs).collect();
    first[8] = 1;
    let checksum = crc32c(&first[8..]);
    first[4..8].copy_from_slice(&checksum.to_le_bytes());
    let nothing = |counts| RunCounts { unchecked: 0, ..counts };
    let runs = record().runs.into_iter().map(|run| ScrubRun { counts: nothing(run.counts), ..run }).collect();
    assert_eq!(decode(&first, CAPACITY), Ok(ScrubRecord { counts: nothing(counts()), runs, ..record() }));
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
    for larger_or_not_past_it in [CAPACITY * 3, 311] {
        assert_eq!(decode(&bytes, larger_or_not_past_it), Ok(record()));
    }
    let anew = ScrubRecord { position: 0, from: 0, counts: RunCounts::default(), ..record() };
    for past_it in [310, 11, 9] {
        assert_eq!(decode(&bytes, past_it), Ok(anew.clone()), "{past_it} blocks");
    }
    let idle = ScrubRecord::default();
    assert_eq!(decode(&encode(&idle, CAPACITY), 1), Ok(idle));
}

#[test]
fn invalid_records_with_a_good_checksum_are_rejected_with_the_reason() {
    let run = |field: usize| 112 + 8 * field;
    for (bytes, why) in [
        (with(8, &[3]), FormatError::Version(3)),
        (with(8, &[1]), FormatError::Length(256)),
        (with(8, &[0]), FormatError::Version(0)),
        (with(8, &[1, 1]), FormatError::Version(257)),
        (with(10, &[3]), FormatError::Field("the state")),
        (with(11, &[1]), FormatError::Length(256)),
        (with(11, &[17]), FormatError::Length(256)),
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
    let bytes = encode(&ScrubRecord { runs, ..record() }, CAPACITY);
    assert_eq!(bytes.len(), MAX_BYTES);
    const { assert!(MAX_BYTES <= ReservedArea::ScrubState.max_bytes()) };
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..1400), fix: bool) {
        if fix && bytes.len() >= 12 {
            bytes[..4].copy_from_slice(b"SCRB");
            bytes[8..10].copy_from_slice(&[2, 0]);
            let checksum = crc32c(&bytes[8..]);
            bytes[4..8].copy_from_slice(&checksum.to_le_bytes());
        }
        if let Ok(record) = decode(&bytes, CAPACITY) {
            prop_assert_eq!(encode(&record, CAPACITY), bytes);
        }
    }
}
