//! Checksums and the reserved area.

use std::time::Duration;

use sealblock_block::{BadBlockCause, Checksum, Device, Error, Expectations, Medium, Request, ReservedArea, Response};
use sealblock_integrity::{ChecksumKind, Field, GuardKind, ProtectionType};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent, Lba};

use super::setup::{Harness, TestMedium, created, pattern, protection};
use crate::format::{Layout, RESERVED_HEAD_BYTES};
use crate::{CorruptionKind, CreateOptions, create};

fn digest(harness: &Harness, kind: ChecksumKind, start: u64, blocks: u64) -> Result<Checksum, Error> {
    let extent = Extent::from_raw(start, blocks).unwrap();
    match harness.run(harness.gate.execute(Request::checksum(extent, kind, Expectations::NONE)))? {
        Response::Checksum(digested) => Ok(digested),
        other => panic!("no digest but {other:?}"),
    }
}

#[test]
fn a_digest_sums_what_is_read_holes_included() {
    let guards = GuardKind::ALL.map(|guard| protection(guard, ProtectionType::Type1));
    for format in guards.into_iter().chain([None]) {
        let harness = Harness::new(BlockSize::B4096, 700, format);
        harness.write(100, &pattern(1, 33 * 4096)).unwrap();
        harness.write(400, &pattern(2, 4096)).unwrap();
        for (start, blocks) in [(0, 700), (0, 64), (90, 20), (100, 33), (399, 3), (512, 188)] {
            let data = harness.read(start, blocks).unwrap();
            for kind in ChecksumKind::ALL {
                let found = digest(&harness, kind, start, blocks).unwrap();
                assert_eq!((found.kind, found.value), (kind, kind.compute(&data)), "{blocks} from {start}");
            }
        }
        let empty = digest(&harness, ChecksumKind::Crc32c, 448, 128).unwrap();
        assert_eq!(empty.bytes_transferred, 0, "nothing is stored there");
    }
}

#[test]
fn damage_fails_a_digest_at_its_block() {
    // Also if the stored guards would give the checksum of the data before their damage.
    for (guard, kind) in [GuardKind::Crc64, GuardKind::Crc32c].into_iter().zip(ChecksumKind::ALL) {
        let harness = Harness::new(BlockSize::B512, 700, protection(guard, ProtectionType::Type1));
        harness.write(0, &pattern(1, 700 * 512)).unwrap();
        harness.flush().unwrap();
        for lba in [3, 650] {
            harness.run(harness.gate.device().damage(Lba::new(lba), CorruptionKind::Data)).unwrap();
        }
        for asked in ChecksumKind::ALL {
            let error = digest(&harness, asked, 0, 700).unwrap_err();
            let bad_blocks = error.bad_blocks().unwrap().as_slice().iter().map(|bad| (bad.lba.get(), bad.cause));
            let guard = BadBlockCause::Tag(Field::Guard);
            assert_eq!(bad_blocks.collect::<Vec<_>>(), [(3, guard), (650, guard)]);
        }
        let found = digest(&harness, kind, 4, 646).unwrap();
        assert_eq!(found.value, kind.compute(&harness.read(4, 646).unwrap()));
    }
}

fn note(harness: &Harness, area: ReservedArea, text: &[u8]) -> Result<(), Error> {
    harness.run(harness.gate.execute(Request::write_reserved(area, Slice::copy_from(text)))).map(drop)
}

fn noted(harness: &Harness, area: ReservedArea) -> Vec<u8> {
    match harness.run(harness.gate.execute(Request::read_reserved(area))) {
        Ok(Response::Reserved(bytes)) => bytes.to_vec(),
        other => panic!("no reserved area but {other:?}"),
    }
}

fn medium() -> TestMedium {
    created(BlockSize::B4096, 512, 64, protection(GuardKind::Crc32c, ProtectionType::Type1))
}

#[test]
fn the_reserved_area_is_durable_and_beside_the_blocks() {
    let medium = medium();
    let harness = Harness::open(&medium, false).unwrap();
    assert_eq!(noted(&harness, ReservedArea::GroupLabel), b"");
    harness.write(0, &pattern(1, 64 * 4096)).unwrap();
    for round in 0..5_u8 {
        note(&harness, ReservedArea::GroupLabel, &vec![round; ReservedArea::GroupLabel.max_bytes()]).unwrap();
        note(&harness, ReservedArea::ScrubState, &[round; 9]).unwrap();
        assert_eq!(noted(&harness, ReservedArea::ScrubState), [round; 9]);
    }
    drop(harness);
    for read_only in [true, false] {
        let harness = Harness::open(&medium, read_only).unwrap();
        assert_eq!(noted(&harness, ReservedArea::GroupLabel), vec![4; ReservedArea::GroupLabel.max_bytes()]);
        assert_eq!(noted(&harness, ReservedArea::ScrubState), [4; 9]);
        assert_eq!(note(&harness, ReservedArea::ScrubState, &[4; 9]).is_err(), read_only);
        harness.verify().unwrap();
    }
}

/// Flips a bit in the content of the copy at this offset.
fn turn_a_bit(medium: &TestMedium, offset: u64) {
    medium.bytes.borrow_mut()[offset as usize + RESERVED_HEAD_BYTES] ^= 1;
}

#[test]
fn one_damaged_copy_costs_nothing_and_torn_twins_leave_what_was_there_before() {
    let medium = medium();
    let harness = Harness::open(&medium, false).unwrap();
    note(&harness, ReservedArea::GroupLabel, b"old").unwrap();
    note(&harness, ReservedArea::GroupLabel, b"new").unwrap();
    drop(harness);
    let twins = Layout::new(BlockSize::B4096, 512, 64).unwrap().reserved_offsets(ReservedArea::GroupLabel, 2);
    for twin in twins {
        turn_a_bit(&medium, twin);
        let harness = Harness::open(&medium, true).unwrap();
        assert_eq!((noted(&harness, ReservedArea::GroupLabel), harness.lost_copies()), (b"new".to_vec(), 1));
        turn_a_bit(&medium, twin);
    }
    // Both belong to one write, which a crash can tear.
    twins.iter().for_each(|twin| turn_a_bit(&medium, *twin));
    let harness = Harness::open(&medium, false).unwrap();
    assert_eq!(noted(&harness, ReservedArea::GroupLabel), b"old");
    note(&harness, ReservedArea::GroupLabel, b"newer").unwrap();
    assert_eq!(noted(&Harness::open(&medium, true).unwrap(), ReservedArea::GroupLabel), b"newer");
}

#[test]
fn an_open_volume_rewrites_a_lost_copy_after_a_minute_with_the_newest_content() {
    let medium = medium();
    let harness = Harness::open(&medium, false).unwrap();
    note(&harness, ReservedArea::GroupLabel, b"old").unwrap();
    drop(harness);
    let [start, _] = Layout::new(BlockSize::B4096, 512, 64).unwrap().reserved_offsets(ReservedArea::GroupLabel, 1);
    turn_a_bit(&medium, start);
    let reader = Harness::open(&medium, true).unwrap();
    assert_eq!((noted(&reader, ReservedArea::GroupLabel), reader.lost_copies()), (b"old".to_vec(), 1));
    reader.wait(Duration::from_secs(100));
    assert_eq!(reader.lost_copies(), 1, "a volume that is not written keeps what it has lost");
    drop(reader);
    let harness = Harness::open(&medium, false).unwrap();
    assert_eq!((noted(&harness, ReservedArea::GroupLabel), harness.lost_copies()), (b"old".to_vec(), 1));
    harness.wait(Duration::from_secs(59));
    assert_eq!(harness.lost_copies(), 1, "long enough to be seen");
    harness.wait(Duration::from_secs(2));
    assert_eq!(harness.lost_copies(), 0);
    drop(harness);
    let reader = Harness::open(&medium, true).unwrap();
    assert_eq!((noted(&reader, ReservedArea::GroupLabel), reader.lost_copies()), (b"old".to_vec(), 0));
    drop(reader);
    // A change meanwhile is not undone.
    let [start, _] = Layout::new(BlockSize::B4096, 512, 64).unwrap().reserved_offsets(ReservedArea::GroupLabel, 2);
    turn_a_bit(&medium, start);
    let harness = Harness::open(&medium, false).unwrap();
    assert_eq!((noted(&harness, ReservedArea::GroupLabel), harness.lost_copies()), (b"old".to_vec(), 1));
    note(&harness, ReservedArea::GroupLabel, b"new").unwrap();
    harness.wait(Duration::from_secs(61));
    assert_eq!((noted(&harness, ReservedArea::GroupLabel), harness.lost_copies()), (b"new".to_vec(), 0));
    drop(harness);
    assert_eq!(noted(&Harness::open(&medium, true).unwrap(), ReservedArea::GroupLabel), b"new");
}

/// Copies that are lost, and of how many of them a crash may be the cause.
fn losses(harness: &Harness) -> (u64, u64) {
    let lost = harness.gate.device().block_map.groups.lost_copies();
    (lost.count(), lost.maybe_cut_off())
}

#[test]
fn a_copy_whose_write_a_power_cut_tore_is_not_called_damage_and_is_written_anew() {
    for area in ReservedArea::ALL {
        let (old, new) = (vec![1; area.max_bytes()], vec![2; area.max_bytes()]);
        let whole = medium();
        let harness = Harness::open(&whole, false).unwrap();
        note(&harness, area, &old).unwrap();
        let before = whole.copy();
        note(&harness, area, &new).unwrap();
        drop(harness);
        let twins = Layout::new(BlockSize::B4096, 512, 64).unwrap().reserved_offsets(area, 2);
        let length = area.max_bytes() + RESERVED_HEAD_BYTES;
        // Bytes of the first and of the second copy that reached the medium.
        for (first, second, expected, lost) in [
            (0, 0, &old, 0),
            (512, 0, &old, 0),
            (length - 512, length - 512, &old, 0),
            (length, 0, &new, 1),
            (length, 512, &new, 1),
            (512, length, &new, 1),
            (length, length, &new, 0),
        ] {
            let cut = before.copy();
            for (at, reached) in twins.into_iter().zip([first, second]) {
                let reached = at as usize..at as usize + reached;
                cut.bytes.borrow_mut()[reached.clone()].copy_from_slice(&whole.bytes.borrow()[reached]);
            }
            let harness = Harness::open(&cut, true).unwrap();
            assert_eq!(
                (noted(&harness, area) == **expected, losses(&harness)),
                (true, (lost, lost)),
                "{first} {second}"
            );
            // Whoever opens it for writing and looks at the area ends that.
            let harness = Harness::open(&cut, false).unwrap();
            assert!(noted(&harness, area) == **expected);
            harness.run(harness.gate.device().close()).unwrap();
            assert_eq!(losses(&harness), (0, 0));
            let harness = Harness::open(&cut, true).unwrap();
            assert_eq!((noted(&harness, area) == **expected, losses(&harness)), (true, (0, 0)), "{first} {second}");
        }
    }
}

#[test]
fn a_copy_of_a_write_that_is_known_to_be_durable_is_damaged() {
    for (area, is_closed) in [
        (ReservedArea::GroupLabel, true),
        (ReservedArea::ScrubState, true),
        // The high-water mark counts it.
        (ReservedArea::ScrubState, false),
    ] {
        let medium = medium();
        let harness = Harness::open(&medium, false).unwrap();
        note(&harness, area, b"old").unwrap();
        note(&harness, area, b"new").unwrap();
        if is_closed {
            harness.run(harness.gate.device().close()).unwrap();
        }
        drop(harness);
        for twin in Layout::new(BlockSize::B4096, 512, 64).unwrap().reserved_offsets(area, 2) {
            let damaged = medium.copy();
            turn_a_bit(&damaged, twin);
            let harness = Harness::open(&damaged, true).unwrap();
            assert_eq!((noted(&harness, area), losses(&harness)), (b"new".to_vec(), (1, 0)), "{is_closed}");
        }
    }
}

#[test]
fn either_end_of_the_volume_can_be_lost_without_what_the_reserved_area_holds() {
    let layout = Layout::new(BlockSize::B4096, 512, 64).unwrap();
    let end = layout.medium_bytes() as usize;
    for writes in 1..4_u8 {
        let medium = medium();
        let harness = Harness::open(&medium, false).unwrap();
        for round in 1..=writes {
            note(&harness, ReservedArea::GroupLabel, &[round; 20]).unwrap();
            note(&harness, ReservedArea::ScrubState, &[round; 9]).unwrap();
        }
        drop(harness);
        let whole = medium.bytes.borrow().clone();
        for lost in [0..64 << 10, end - (64 << 10)..end, 512..(64 << 10) + 512, end - (65 << 10)..end - 1024] {
            medium.bytes.borrow_mut().copy_from_slice(&whole);
            medium.bytes.borrow_mut()[lost.clone()].fill(0xa5);
            for read_only in [true, false] {
                let harness = Harness::open(&medium, read_only).unwrap();
                assert_eq!(noted(&harness, ReservedArea::GroupLabel), [writes; 20], "{lost:?}");
                assert_eq!(noted(&harness, ReservedArea::ScrubState), [writes; 9], "{lost:?}");
            }
        }
    }
}

#[test]
fn a_reserved_area_that_cannot_be_read_is_not_an_empty_one() {
    let medium = medium();
    let harness = Harness::open(&medium, false).unwrap();
    note(&harness, ReservedArea::GroupLabel, b"old").unwrap();
    note(&harness, ReservedArea::GroupLabel, b"new").unwrap();
    drop(harness);
    let harness = Harness::open(&medium, true).unwrap();
    medium.unreadable.set((4096, u64::MAX));
    let why = harness.run(harness.gate.execute(Request::read_reserved(ReservedArea::GroupLabel))).unwrap_err();
    assert!(why.to_string().contains("cannot read either copy"), "{why}");
    medium.unreadable.set((4096, 64 << 10));
    assert_eq!(noted(&harness, ReservedArea::GroupLabel), b"new");
}

/// The four copies of the label, in the order in which the places are written.
fn label_copies() -> [u64; 4] {
    let layout = Layout::new(BlockSize::B4096, 512, 64).unwrap();
    let [first, second] = [1, 2].map(|seq| layout.reserved_offsets(ReservedArea::GroupLabel, seq));
    [first[0], first[1], second[0], second[1]]
}

#[test]
fn labels_of_another_volume_in_every_place_are_damage_and_not_a_device_that_never_had_one() {
    let own = medium();
    // Another volume of the same shape.
    let (other, protection) =
        (TestMedium::new(own.len_bytes(), 512), protection(GuardKind::Crc32c, ProtectionType::Type1));
    let uuid = *b"another identity";
    let options =
        CreateOptions { block_size: BlockSize::B4096, capacity_blocks: 64, protection, uuid, preallocate: false };
    futures_executor::block_on(create(&other, &options)).unwrap();
    for (medium, text) in [(&own, b"mine"), (&other, b"hers")] {
        let harness = Harness::open(medium, false).unwrap();
        (0..2).for_each(|_| note(&harness, ReservedArea::GroupLabel, text).unwrap());
    }
    let length = ReservedArea::GroupLabel.max_bytes() + RESERVED_HEAD_BYTES;
    let copies = label_copies();
    for (number, at) in copies.into_iter().enumerate() {
        let room = at as usize..at as usize + length;
        let foreign = other.bytes.borrow()[room.clone()].to_vec();
        own.bytes.borrow_mut()[room].copy_from_slice(&foreign);
        let harness = Harness::open(&own, true).unwrap();
        if number < 3 {
            assert_eq!(noted(&harness, ReservedArea::GroupLabel), b"mine", "{number} copies are foreign");
            continue;
        }
        let why = harness.run(harness.gate.execute(Request::read_reserved(ReservedArea::GroupLabel))).unwrap_err();
        assert!(why.to_string().contains("every copy of the label"), "{why}");
    }
    // An open for writing changes none of them, and a new label can be written explicitly.
    let before = own.bytes.borrow().clone();
    let harness = Harness::open(&own, false).unwrap();
    assert!(copies.iter().all(|at| own.bytes.borrow()[*at as usize..][..length] == before[*at as usize..][..length]));
    note(&harness, ReservedArea::GroupLabel, b"new").unwrap();
    drop(harness);
    assert_eq!(noted(&Harness::open(&own, true).unwrap(), ReservedArea::GroupLabel), b"new");
}

#[test]
fn what_an_earlier_volume_has_left_is_no_label_of_a_new_one() {
    let medium = medium();
    let harness = Harness::open(&medium, false).unwrap();
    (0..2).for_each(|_| note(&harness, ReservedArea::GroupLabel, b"earlier").unwrap());
    drop(harness);
    let protection = protection(GuardKind::Crc32c, ProtectionType::Type1);
    let uuid = *b"another identity";
    let options =
        CreateOptions { block_size: BlockSize::B4096, capacity_blocks: 64, protection, uuid, preallocate: false };
    futures_executor::block_on(create(&medium, &options)).unwrap();
    assert_eq!(noted(&Harness::open(&medium, true).unwrap(), ReservedArea::GroupLabel), b"");
    assert!(label_copies().iter().all(|at| medium.bytes.borrow()[*at as usize..][..512].iter().all(|byte| *byte == 0)));
}

#[test]
fn a_first_label_that_a_crash_tore_is_none() {
    let medium = medium();
    note(&Harness::open(&medium, false).unwrap(), ReservedArea::GroupLabel, b"first").unwrap();
    label_copies()[..2].iter().for_each(|at| turn_a_bit(&medium, *at));
    assert_eq!(noted(&Harness::open(&medium, true).unwrap(), ReservedArea::GroupLabel), b"");
}

#[test]
fn a_failed_sync_of_the_reserved_area_stops_writes() {
    let medium = medium();
    let harness = Harness::open(&medium, false).unwrap();
    medium.syncs_left.set(0);
    assert!(note(&harness, ReservedArea::GroupLabel, b"x").is_err());
    assert!(harness.write(0, &pattern(1, 4096)).is_err(), "what else the sync lost is not known");
}
