//! Data without tags are sealed before or during the write, with the same result.

use futures_util::FutureExt;
use sealblock_block::{Ability, Device, Durability, ErrorKind, Request, RequestKind};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, Sealed, Tags, Unsealed};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent, Lba};

use super::setup::{Harness, created, pattern, protection};
use crate::OpenOptions;
use crate::format::MapEntry;

const SIZE: BlockSize = BlockSize::B4096;
const TAGS: Tags = Tags { app_tag: 0x1234, storage_tag: 0, initial_ref_tag: 0 };

fn at(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

fn tags(start: u64) -> Tags {
    Tags { initial_ref_tag: start, ..TAGS }
}

fn unsealed(harness: &Harness, start: u64, bytes: &[u8]) -> Request {
    let data = Unsealed::new(Slice::copy_from(bytes), SIZE, harness.gate.geometry().protection, tags(start));
    Request::write(at(start, (bytes.len() / 4096) as u64), data, Durability::Volatile)
}

fn sealed(harness: &Harness, start: u64, bytes: &[u8]) -> Request {
    let data = Sealed::seal(Slice::copy_from(bytes), SIZE, harness.gate.geometry().protection, &tags(start));
    Request::write(at(start, (bytes.len() / 4096) as u64), data, Durability::Volatile)
}

/// A volume opened so that writes of this many bytes are sealed in flight.
fn harness(format: Option<PiFormat>, seal_in_flight_bytes: u64) -> Harness {
    let options = OpenOptions { seal_in_flight_bytes, ..OpenOptions::default() };
    let harness = Harness::open_with(&created(SIZE, 512, 256, format), options).unwrap();
    harness.medium.turns.set(3);
    harness
}

fn entries(harness: &Harness, blocks: u64) -> Vec<MapEntry> {
    let entry = |lba| harness.gate.device().memtable.get(Lba::new(lba)).expect("a map entry that is not durable");
    (0..blocks).map(entry).map(|entry| MapEntry { generation: 0, ..entry }).collect()
}

/// Every format, with and without an additional CRC-32C: data sealed before, after or during the write get the same map
/// entries, and a crash leaves all of them valid.
#[test]
fn when_blocks_are_sealed_shows_in_no_map_entry() {
    let guards = GuardKind::ALL.into_iter().flat_map(|guard| ProtectionType::ALL.map(|kind| protection(guard, kind)));
    for format in guards.chain([None]) {
        let bytes = pattern(7, 24 * 4096);
        let made = [(0, true), (0, false), (u64::MAX, true), (u64::MAX, false)].map(|(in_flight_from, is_sealed)| {
            let harness = harness(format, in_flight_from);
            assert_eq!(harness.gate.device().abilities().get(RequestKind::Write), Ability::Native);
            let request = if is_sealed { sealed(&harness, 0, &bytes) } else { unsealed(&harness, 0, &bytes) };
            harness.run(harness.gate.execute(request)).unwrap();
            let made = entries(&harness, 24);
            harness.flush().unwrap();
            let medium = harness.medium.clone();
            drop(harness);
            let again = Harness::open(&medium, false).unwrap();
            assert!(again.read(0, 24).is_ok_and(|read| read == bytes), "{format:?}");
            again.verify().unwrap();
            made
        });
        assert!(made.iter().all(|other| *other == made[0]), "{format:?}");
    }
}

#[test]
fn data_with_good_tags_are_not_waited_for_unless_their_entries_take_a_pass() {
    for (guard, waits) in [(GuardKind::Crc32c, 0), (GuardKind::Crc64, 0), (GuardKind::Crc16, 1)] {
        let harness = harness(protection(guard, ProtectionType::Type1), 0);
        harness.run(harness.gate.execute(sealed(&harness, 0, &pattern(1, 16 * 4096)))).unwrap();
        assert_eq!(harness.medium.submits.borrow().len(), waits, "{guard}");
        harness.run(harness.gate.execute(unsealed(&harness, 0, &pattern(2, 16 * 4096)))).unwrap();
        assert_eq!(harness.medium.submits.borrow().len(), waits + 1, "{guard}");
        assert!(harness.read(0, 16).unwrap() == pattern(2, 16 * 4096));
    }
}

#[test]
fn only_long_writes_wait_until_their_data_are_on_their_way() {
    let harness = harness(protection(GuardKind::Crc16, ProtectionType::Type1), 8 * 4096);
    harness.run(harness.gate.execute(unsealed(&harness, 0, &pattern(1, 7 * 4096)))).unwrap();
    assert_eq!(harness.medium.submits.borrow()[..], [0; 0]);
    harness.run(harness.gate.execute(unsealed(&harness, 0, &pattern(2, 8 * 4096)))).unwrap();
    assert_eq!(harness.medium.submits.take(), [8 * 4096], "with the write in flight");
    assert_eq!(harness.read(0, 8).unwrap(), pattern(2, 8 * 4096));
    // If the medium completes the write at once, nothing waits for it.
    harness.medium.turns.set(0);
    harness.run(harness.gate.execute(unsealed(&harness, 0, &pattern(3, 8 * 4096)))).unwrap();
    assert_eq!(harness.medium.submits.borrow()[..], [0; 0]);
    assert_eq!(harness.read(0, 8).unwrap(), pattern(3, 8 * 4096));
}

/// The write is refused at once or while it is in flight. No block changes, and its physical blocks are free again.
#[test]
fn a_write_that_fails_leaves_no_map_entry() {
    for in_flight_from in [0, u64::MAX] {
        let harness = harness(protection(GuardKind::Crc16, ProtectionType::Type1), in_flight_from);
        let old = pattern(1, 16 * 4096);
        harness.run(harness.gate.execute(unsealed(&harness, 0, &old))).unwrap();
        harness.flush().unwrap();
        let free = || harness.gate.device().allocator.free(0);
        let (before, turns) = (free(), harness.medium.turns.get());
        for turns in [0, turns] {
            harness.medium.turns.set(turns);
            harness.medium.full_from.set(0);
            let refused = harness.run(harness.gate.execute(unsealed(&harness, 0, &pattern(2, 16 * 4096)))).unwrap_err();
            assert!(matches!(refused.kind(), ErrorKind::NoSpace { .. }), "{refused}");
            harness.medium.full_from.set(u64::MAX);
            harness.medium.changes_left.set(0);
            harness.run(harness.gate.execute(unsealed(&harness, 0, &pattern(2, 16 * 4096)))).unwrap_err();
            harness.medium.changes_left.set(u64::MAX);
            harness.medium.fails_late.set(true);
            harness.run(harness.gate.execute(unsealed(&harness, 0, &pattern(2, 16 * 4096)))).unwrap_err();
            harness.medium.fails_late.set(false);
            assert_eq!(free(), before);
            assert!(harness.read(0, 16).unwrap() == old && harness.gate.device().memtable.active_len() == 0);
        }
        harness.run(harness.gate.execute(unsealed(&harness, 0, &pattern(3, 16 * 4096)))).unwrap();
        assert!(harness.read(0, 16).unwrap() == pattern(3, 16 * 4096));
        harness.verify().unwrap();
    }
}

/// While its data are held back, a write has no map entry, although its tags are computed. If it is dropped then, it
/// never gets one.
#[test]
fn nothing_names_data_that_have_not_arrived() {
    let harness = harness(protection(GuardKind::Crc32c, ProtectionType::Type1), 0);
    harness.run(harness.gate.execute(unsealed(&harness, 0, &pattern(1, 16 * 4096)))).unwrap();
    harness.flush().unwrap();
    for is_dropped in [false, true] {
        harness.medium.held.set((0, u64::MAX));
        let new = pattern(2 + u64::from(is_dropped), 16 * 4096);
        let mut write = Box::pin(harness.gate.execute(unsealed(&harness, 0, &new)));
        for _ in 0..20 {
            assert!(write.as_mut().now_or_never().is_none());
        }
        assert_eq!(harness.gate.device().memtable.active_len(), 0);
        assert!(harness.read(0, 16).unwrap() == pattern(1 + u64::from(is_dropped), 16 * 4096));
        if is_dropped {
            drop(write);
            harness.medium.let_all_go();
        } else {
            harness.medium.let_all_go();
            harness.run(write).unwrap();
            assert!(harness.read(0, 16).unwrap() == new);
            harness.flush().unwrap();
        }
    }
    assert!(harness.read(0, 16).unwrap() == pattern(2, 16 * 4096), "the one that was dropped has changed nothing");
    harness.verify().unwrap();
}
