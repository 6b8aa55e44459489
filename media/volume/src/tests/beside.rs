//! Digests and the annex.

use sealblock_block::{AnnexSlot, Answer, Device, Digested, Error, FaultField, Operation};
use sealblock_integrity::{Field, GuardKind, ProtectionType, guard};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent, Lba};

use super::setup::{Rig, TestMedium, created, pattern, protection};
use crate::DamageKind;
use crate::format::{ANNEX_HEAD_BYTES, Layout};

fn digest(rig: &Rig, start: u64, blocks: u64) -> Result<Digested, Error> {
    let extent = Extent::from_raw(start, blocks).unwrap();
    match rig.run(rig.gate.execute(Operation::Digest { extent, checks: rig.checks(extent) }))? {
        Answer::Digest(digested) => Ok(digested),
        other => panic!("no digest but {other:?}"),
    }
}

#[test]
fn a_digest_sums_what_is_read_holes_included() {
    for format in [protection(GuardKind::Crc16, ProtectionType::Type1), None] {
        let rig = Rig::new(BlockSize::B4096, 700, format);
        rig.write(100, &pattern(1, 33 * 4096)).unwrap();
        rig.write(400, &pattern(2, 4096)).unwrap();
        for (start, blocks) in [(0, 700), (0, 64), (90, 20), (100, 33), (399, 3), (512, 188)] {
            let found = digest(&rig, start, blocks).unwrap();
            assert_eq!(found.crc64, guard::crc64(&rig.read(start, blocks).unwrap()), "{blocks} from {start}");
        }
        assert_eq!(digest(&rig, 448, 128).unwrap().bytes_transferred, 0, "nothing is stored there");
    }
}

#[test]
fn damage_fails_a_digest_at_its_block() {
    let rig = Rig::new(BlockSize::B512, 700, protection(GuardKind::Crc64, ProtectionType::Type1));
    rig.write(0, &pattern(1, 700 * 512)).unwrap();
    rig.flush().unwrap();
    for lba in [3, 650] {
        rig.run(rig.gate.device().damage(Lba::new(lba), DamageKind::Data)).unwrap();
    }
    let error = digest(&rig, 0, 700).unwrap_err();
    let faults: Vec<_> =
        error.faults().unwrap().as_slice().iter().map(|fault| (fault.lba.get(), fault.field)).collect();
    assert_eq!(faults, [(3, FaultField::Tag(Field::Guard)), (650, FaultField::Tag(Field::Guard))]);
    assert!(digest(&rig, 4, 646).is_ok());
}

fn note(rig: &Rig, slot: AnnexSlot, text: &[u8]) -> Result<(), Error> {
    rig.run(rig.gate.execute(Operation::WriteAnnex { slot, bytes: Slice::copy_from(text) })).map(drop)
}

fn noted(rig: &Rig, slot: AnnexSlot) -> Vec<u8> {
    match rig.run(rig.gate.execute(Operation::ReadAnnex { slot })) {
        Ok(Answer::Annex(bytes)) => bytes.to_vec(),
        other => panic!("no annex but {other:?}"),
    }
}

fn medium() -> TestMedium {
    created(BlockSize::B4096, 512, 64, protection(GuardKind::Crc32c, ProtectionType::Type1))
}

#[test]
fn the_annex_is_durable_and_beside_the_blocks() {
    let medium = medium();
    let rig = Rig::open(&medium, false).unwrap();
    assert_eq!(noted(&rig, AnnexSlot::Group), b"");
    rig.write(0, &pattern(1, 64 * 4096)).unwrap();
    for round in 0..5_u8 {
        note(&rig, AnnexSlot::Group, &vec![round; AnnexSlot::Group.most_bytes()]).unwrap();
        note(&rig, AnnexSlot::Scrub, &[round; 9]).unwrap();
        assert_eq!(noted(&rig, AnnexSlot::Scrub), [round; 9]);
    }
    drop(rig);
    for read_only in [true, false] {
        let rig = Rig::open(&medium, read_only).unwrap();
        assert_eq!(noted(&rig, AnnexSlot::Group), vec![4; AnnexSlot::Group.most_bytes()]);
        assert_eq!(noted(&rig, AnnexSlot::Scrub), [4; 9]);
        assert_eq!(note(&rig, AnnexSlot::Scrub, &[4; 9]).is_err(), read_only);
        rig.verify().unwrap();
    }
}

/// Turns a bit of what a copy at this offset holds.
fn turn_a_bit(medium: &TestMedium, offset: u64) {
    medium.bytes.borrow_mut()[offset as usize + ANNEX_HEAD_BYTES] ^= 1;
}

#[test]
fn one_damaged_copy_costs_nothing_and_torn_twins_leave_what_was_there_before() {
    let medium = medium();
    let rig = Rig::open(&medium, false).unwrap();
    note(&rig, AnnexSlot::Group, b"old").unwrap();
    note(&rig, AnnexSlot::Group, b"new").unwrap();
    drop(rig);
    let twins = Layout::new(BlockSize::B4096, 512, 64).unwrap().annex_offsets(AnnexSlot::Group, 2);
    for twin in twins {
        turn_a_bit(&medium, twin);
        let rig = Rig::open(&medium, true).unwrap();
        assert_eq!((noted(&rig, AnnexSlot::Group), rig.lost_copies()), (b"new".to_vec(), 1));
        turn_a_bit(&medium, twin);
    }
    // Both hang on one write, which a crash can tear.
    twins.iter().for_each(|twin| turn_a_bit(&medium, *twin));
    let rig = Rig::open(&medium, false).unwrap();
    assert_eq!(noted(&rig, AnnexSlot::Group), b"old");
    note(&rig, AnnexSlot::Group, b"newer").unwrap();
    assert_eq!(noted(&Rig::open(&medium, true).unwrap(), AnnexSlot::Group), b"newer");
}

#[test]
fn either_end_of_the_volume_can_be_lost_without_what_the_annex_holds() {
    let layout = Layout::new(BlockSize::B4096, 512, 64).unwrap();
    let end = layout.medium_bytes() as usize;
    for writes in 1..4_u8 {
        let medium = medium();
        let rig = Rig::open(&medium, false).unwrap();
        for round in 1..=writes {
            note(&rig, AnnexSlot::Group, &[round; 20]).unwrap();
            note(&rig, AnnexSlot::Scrub, &[round; 9]).unwrap();
        }
        drop(rig);
        let whole = medium.bytes.borrow().clone();
        for lost in [0..64 << 10, end - (64 << 10)..end, 512..(64 << 10) + 512, end - (65 << 10)..end - 1024] {
            medium.bytes.borrow_mut().copy_from_slice(&whole);
            medium.bytes.borrow_mut()[lost.clone()].fill(0xa5);
            for read_only in [true, false] {
                let rig = Rig::open(&medium, read_only).unwrap();
                assert_eq!(noted(&rig, AnnexSlot::Group), [writes; 20], "{lost:?}");
                assert_eq!(noted(&rig, AnnexSlot::Scrub), [writes; 9], "{lost:?}");
            }
        }
    }
}

#[test]
fn an_annex_that_cannot_be_read_is_not_an_empty_one() {
    let medium = medium();
    let rig = Rig::open(&medium, false).unwrap();
    note(&rig, AnnexSlot::Group, b"old").unwrap();
    note(&rig, AnnexSlot::Group, b"new").unwrap();
    drop(rig);
    let rig = Rig::open(&medium, true).unwrap();
    medium.unreadable.set((4096, u64::MAX));
    let why = rig.run(rig.gate.execute(Operation::ReadAnnex { slot: AnnexSlot::Group })).unwrap_err();
    assert!(why.to_string().contains("neither copy"), "{why}");
    medium.unreadable.set((4096, 64 << 10));
    assert_eq!(noted(&rig, AnnexSlot::Group), b"new");
}

#[test]
fn a_failed_sync_of_the_annex_stops_writes() {
    let medium = medium();
    let rig = Rig::open(&medium, false).unwrap();
    medium.syncs_left.set(0);
    assert!(note(&rig, AnnexSlot::Group, b"x").is_err());
    assert!(rig.write(0, &pattern(1, 4096)).is_err(), "what else the sync lost is not known");
}
