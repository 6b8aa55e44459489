//! Holes: blocks that were never written or were deallocated, and no others.

use sealblock_block::{BlockState, Device, Durability, Request, Response};
use sealblock_integrity::{GuardKind, ProtectionType};
use sealblock_units::{BlockSize, Extent, Lba};

use super::setup::{Harness, pattern, protection};
use crate::CorruptionKind;

/// The runs of blocks: their length, and whether they are holes. Runs that are split between pieces are joined.
fn runs(harness: &Harness, start: u64, blocks: u64) -> Vec<(u64, bool)> {
    let extent = Extent::from_raw(start, blocks).unwrap();
    let answer = harness.run(harness.gate.execute(Request::block_status(extent))).unwrap();
    let Response::BlockStatus(found) = answer else { panic!("no runs but {answer:?}") };
    let mut joined: Vec<(u64, bool)> = Vec::new();
    for (blocks, is_hole) in found.iter().map(|run| (u64::from(run.blocks.get()), run.state == BlockState::Hole)) {
        match joined.last_mut() {
            Some((last, same)) if *same == is_hole => *last += blocks,
            _ => joined.push((blocks, is_hole)),
        }
    }
    joined
}

fn zero(harness: &Harness, start: u64, blocks: u64, may_unmap: bool) {
    let (extent, durability) = (Extent::from_raw(start, blocks).unwrap(), Durability::Volatile);
    harness.run(harness.gate.execute(Request::write_zeroes(extent, may_unmap, durability))).unwrap();
}

#[test]
fn what_is_stored_is_data_before_and_after_a_flush() {
    for format in [protection(GuardKind::Crc16, ProtectionType::Type1), None] {
        let harness = Harness::new(BlockSize::B4096, 2000, format);
        assert_eq!(runs(&harness, 0, 2000), [(2000, true)]);
        harness.write(100, &pattern(1, 33 * 4096)).unwrap();
        harness.write(400, &pattern(2, 4096)).unwrap();
        for _ in 0..2 {
            assert_eq!(runs(&harness, 0, 2000), [(100, true), (33, false), (267, true), (1, false), (1599, true)]);
            assert_eq!(runs(&harness, 99, 2), [(1, true), (1, false)]);
            harness.flush().unwrap();
        }
    }
}

#[test]
fn what_was_given_up_is_a_hole_and_reads_as_zeroes() {
    let harness = Harness::new(BlockSize::B512, 700, protection(GuardKind::Crc64, ProtectionType::Type1));
    harness.write(0, &pattern(1, 700 * 512)).unwrap();
    harness.flush().unwrap();
    zero(&harness, 10, 5, true);
    let extents = vec![Extent::from_raw(600, 100).unwrap()];
    harness.run(harness.gate.execute(Request::discard(extents))).unwrap();
    assert_eq!(runs(&harness, 0, 700), [(10, false), (5, true), (585, false), (100, true)]);
    for (start, blocks) in [(10, 5), (600, 100)] {
        assert!(harness.read(start, blocks).unwrap().iter().all(|byte| *byte == 0));
    }
}

#[test]
fn bad_blocks_are_no_holes() {
    let harness = Harness::new(BlockSize::B4096, 700, protection(GuardKind::Crc16, ProtectionType::Type1));
    harness.write(3, &pattern(1, 4096)).unwrap();
    let (extent, durability) = (Extent::from_raw(9, 1).unwrap(), Durability::Volatile);
    harness.run(harness.gate.execute(Request::write_uncorrectable(extent, durability))).unwrap();
    harness.flush().unwrap();
    harness.run(harness.gate.device().damage(Lba::new(3), CorruptionKind::Data)).unwrap();
    assert_eq!(runs(&harness, 0, 12), [(3, true), (1, false), (5, true), (1, false), (2, true)]);
}
