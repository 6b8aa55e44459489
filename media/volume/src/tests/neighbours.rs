//! Extents stay together or are moved together, and free physical blocks take no space.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use futures_util::future::join;
use sealblock_block::{Device, Durability, Expectations, MediumErrorKind, Request};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent, Lba};

use super::setup::{Harness, TestMedium, UUID, created, pattern, protection};
use crate::format::Layout;
use crate::{CreateOptions, IdleWorkCounts, Mutation, OpenOptions, VolumeError, create};

const IDLE: Duration = Duration::from_millis(100);
/// Eight extents of blocks of 4 KiB; two more clusters are free.
const BLOCKS: u64 = 2048;

fn format() -> Option<PiFormat> {
    protection(GuardKind::Crc16, ProtectionType::Type1)
}

/// A volume each of whose blocks was overwritten separately, in an order that leaves no two together; and its data.
fn scattered(options: OpenOptions) -> (Harness, Vec<u8>) {
    let harness = Harness::open_with(&created(BlockSize::B4096, 512, BLOCKS, format()), options).unwrap();
    harness.write(0, &pattern(1, BLOCKS as usize * 4096)).unwrap();
    let mut data = vec![0; BLOCKS as usize * 4096];
    for step in 0..BLOCKS {
        let block = step * 389 % BLOCKS;
        let bytes = pattern(step + 2, 4096);
        harness.write(block, &bytes).unwrap();
        data[block as usize * 4096..][..4096].copy_from_slice(&bytes);
        if step % 64 == 63 {
            harness.flush().unwrap();
        }
    }
    (harness, data)
}

/// The number of contiguous pieces in which these blocks are stored.
fn pieces(harness: &Harness, first: u64, blocks: u64) -> usize {
    let extent = Extent::from_raw(first, blocks).unwrap();
    let (located, _) = harness.run(harness.gate.device().locate(extent)).unwrap();
    harness.gate.device().pieces(extent, &located).len()
}

/// Lets a volume be idle for a long time, including commits and checkpoints.
fn rest(harness: &Harness) {
    (0..300).for_each(|_| harness.wait(IDLE));
}

#[test]
fn scattered_blocks_are_read_together_and_each_is_checked() {
    let (harness, data) = scattered(OpenOptions { relocate: false, ..OpenOptions::default() });
    assert!(pieces(&harness, 256, 256) > 100, "the test scatters");
    harness.flush().unwrap();
    let pbns = harness.gate.device().layout.block_group(0).unwrap().data_offset;
    for (first, blocks) in [(0, 256), (256, 256), (300, 200), (700, 1), (0, 1024)] {
        assert!(harness.read(first, blocks).unwrap() == data[first as usize * 4096..][..blocks as usize * 4096]);
    }
    // One physical block that cannot be read, and one whose data change.
    let slot_of = |block: u64| {
        let entry = harness.gate.device().stored_entry_now(Lba::new(block)).flatten().expect("it is stored");
        pbns + u64::from(entry.pbn) * 4096
    };
    harness.medium.unreadable.set((slot_of(300), slot_of(300) + 512));
    harness.medium.bytes.borrow_mut()[slot_of(400) as usize + 7] ^= 1;
    let why = harness.read(256, 256).unwrap_err();
    let mut bad: Vec<u64> = why.bad_blocks().unwrap().as_slice().iter().map(|bad_block| bad_block.lba.get()).collect();
    bad.sort_unstable();
    assert_eq!(bad, [300, 400], "and no others, though they were read with them");
    assert!(harness.read(0, 256).unwrap() == data[..256 * 4096]);
}

#[test]
fn an_idle_volume_brings_extents_together_and_a_closed_one_keeps_them_so() {
    let (harness, data) = scattered(OpenOptions::default());
    assert!((0..8).all(|extent| pieces(&harness, extent * 256, 256) > 100));
    rest(&harness);
    assert!((0..8).all(|extent| pieces(&harness, extent * 256, 256) == 1), "each is one piece");
    let counts = harness.gate.device().upkeep();
    assert_eq!((counts.blocks_moved >= 2000, counts.blocks_unfit), (true, 0), "{counts:?}");
    assert!(harness.read(0, BLOCKS).unwrap() == data);
    harness.verify().unwrap();
    rest(&harness);
    assert_eq!(harness.gate.device().upkeep().blocks_moved, counts.blocks_moved, "there is nothing left to move");
    let again = Harness::open(&harness.close(), false).unwrap();
    assert!(again.read(0, BLOCKS).unwrap() == data);
    again.verify().unwrap();
    assert_eq!(pieces(&again, 0, 256), 1);
}

#[test]
fn relocation_can_be_switched_off_and_a_busy_volume_does_none() {
    let (harness, _) = scattered(OpenOptions { relocate: false, ..OpenOptions::default() });
    rest(&harness);
    assert_eq!(harness.gate.device().upkeep().blocks_moved, 0);
    let (harness, _) = scattered(OpenOptions::default());
    for _ in 0..100 {
        harness.wait(IDLE * 3 / 4);
        harness.read(0, 1).unwrap();
    }
    assert_eq!(harness.gate.device().upkeep().blocks_moved, 0);
}

#[test]
fn moved_blocks_survive_a_crash_at_any_time() {
    let (harness, data) = scattered(OpenOptions::default());
    harness.flush().unwrap();
    for _ in 0..60 {
        harness.wait(Duration::from_millis(50));
        for read_only in [true, false] {
            let again = Harness::open(&harness.medium.copy(), read_only).unwrap();
            assert!(again.read(0, BLOCKS).unwrap() == data);
        }
    }
    assert!(harness.gate.device().upkeep().blocks_moved > 0);
}

#[test]
fn a_block_that_does_not_check_is_not_moved_and_the_others_are() {
    let (harness, data) = scattered(OpenOptions::default());
    harness.flush().unwrap();
    let pbns = harness.gate.device().layout.block_group(0).unwrap().data_offset;
    let slot_of = |block: u64| harness.gate.device().stored_entry_now(Lba::new(block)).flatten().unwrap().pbn;
    let (changed, lost) = (slot_of(1700), slot_of(1900));
    harness.medium.bytes.borrow_mut()[(pbns + u64::from(changed) * 4096) as usize] ^= 4;
    let at = pbns + u64::from(lost) * 4096;
    harness.medium.unreadable.set((at, at + 4096));
    rest(&harness);
    assert_eq!((slot_of(1700), slot_of(1900)), (changed, lost), "they are where they were");
    let IdleWorkCounts { blocks_moved, blocks_unfit, .. } = harness.gate.device().upkeep();
    assert!(blocks_moved >= 2000 && blocks_unfit == 2, "{blocks_moved} {blocks_unfit}");
    assert!((0..8).all(|extent| pieces(&harness, extent * 256, 256) <= 3));
    let why = harness.read(0, BLOCKS).unwrap_err();
    let mut bad: Vec<u64> = why.bad_blocks().unwrap().as_slice().iter().map(|bad_block| bad_block.lba.get()).collect();
    bad.sort_unstable();
    assert_eq!(bad, [1700, 1900]);
    harness.medium.unreadable.set((0, 0));
    assert!(harness.read(1701, BLOCKS - 1701).unwrap() == data[1701 * 4096..], "what can be read again is as it was");
}

#[test]
fn moves_that_check_nothing_would_bless_damage() {
    let errors = [Mutation::None, Mutation::MoveUnchecked].map(|mutation| {
        let (harness, _) = scattered(OpenOptions { mutation, ..OpenOptions::default() });
        harness.flush().unwrap();
        let entry = harness.gate.device().stored_entry_now(Lba::new(1700)).flatten().unwrap();
        let at = harness.gate.device().pbn_offset(0, entry.pbn) as usize;
        harness.medium.bytes.borrow_mut()[at] ^= 4;
        rest(&harness);
        harness.verify().is_err()
    });
    assert_eq!(errors, [true, false], "the test tells");
}

/// True if a host's changes survive that were made while moved blocks were being written.
fn changes_win(mutation: Mutation) -> bool {
    (0..7).all(|turns| {
        let (harness, mut data) = scattered(OpenOptions { mutation, relocate: false, ..OpenOptions::default() });
        harness.medium.turns.set(7);
        let host = async {
            let before = harness.medium.written_bytes.get();
            while harness.medium.written_bytes.get() == before {
                pass_turns(1).await;
            }
            pass_turns(turns).await;
            // The host's request is fast; those in flight are slow.
            harness.medium.turns.set(0);
            let extents = vec![Extent::from_raw(9, 100).unwrap()];
            data[9 * 4096..109 * 4096].fill(0);
            harness.gate.execute(Request::discard(extents)).await.unwrap();
            let writes = [3, 130, 255].map(|block| (block, pattern(1000 + block, 4096)));
            for (block, bytes) in writes {
                data[block as usize * 4096..][..4096].copy_from_slice(&bytes);
                let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: block };
                let extent = Extent::from_raw(block, 1).unwrap();
                let data = Sealed::seal(Slice::copy_from(&bytes), BlockSize::B4096, format(), &tags);
                let durability = Durability::Volatile;
                harness.gate.execute(Request::write(extent, data, durability)).await.unwrap();
            }
        };
        let volume = harness.gate.device();
        let idle_period = volume.upkeep.idle_period();
        harness.run(join(volume.relocate_all(&idle_period), host));
        assert!(volume.upkeep().blocks_moved > 0);
        rest(&harness);
        harness.read(0, BLOCKS).is_ok_and(|found| found == data)
    })
}

async fn pass_turns(turns: u32) {
    let mut left = turns;
    poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(());
        }
        left -= 1;
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

#[test]
fn a_change_in_the_middle_of_a_move_wins() {
    assert!(changes_win(Mutation::None));
    assert!(!changes_win(Mutation::MoveOverNewer), "the test tells");
}

fn discard(harness: &Harness, start: u64, blocks: u64) {
    let extents = vec![Extent::from_raw(start, blocks).unwrap()];
    harness.run(harness.gate.execute(Request::discard(extents))).unwrap();
}

/// The bytes that a volume takes without any blocks: everything but its physical blocks.
fn overhead(layout: &Layout) -> u64 {
    let group = layout.block_group(0).unwrap();
    layout.medium_bytes() - (group.end_offset - group.data_offset)
}

#[test]
fn a_volume_that_is_trimmed_all_over_takes_no_space_for_its_physical_blocks() {
    for at_rest in [true, false] {
        let (harness, _) = scattered(OpenOptions { relocate: false, ..OpenOptions::default() });
        let layout = harness.gate.device().layout;
        assert!(harness.medium.allocated_bytes() > BLOCKS * 4096);
        discard(&harness, 0, BLOCKS);
        let medium = match at_rest {
            true => {
                rest(&harness);
                harness.medium.clone()
            }
            false => harness.close(),
        };
        assert!(medium.allocated_bytes() <= overhead(&layout), "{} bytes", medium.allocated_bytes());
        let again = Harness::open(&medium, true).unwrap();
        assert!(again.read(0, BLOCKS).unwrap() == vec![0; BLOCKS as usize * 4096]);
    }
}

#[test]
fn physical_blocks_that_overwriting_has_freed_take_no_space_after_a_while() {
    let (harness, data) = scattered(OpenOptions::default());
    let layout = harness.gate.device().layout;
    let before = harness.medium.allocated_bytes();
    rest(&harness);
    let after = harness.medium.allocated_bytes();
    assert!(after < before && after <= overhead(&layout) + (BLOCKS + 64) * 4096, "{before} before, {after} after");
    assert!(harness.gate.device().upkeep().bytes_punched > 0);
    assert!(harness.read(0, BLOCKS).unwrap() == data);
    harness.verify().unwrap();
    // Twin: punching beyond the free physical blocks is detected.
    let (harness, _) = scattered(OpenOptions { mutation: Mutation::PunchBeyond, ..OpenOptions::default() });
    rest(&harness);
    assert!(harness.verify().is_err());
}

#[test]
fn a_volume_that_is_closed_for_a_moment_gives_space_back_before_that_or_not_at_all() {
    let punched = |harness: &Harness| harness.gate.device().upkeep().bytes_punched;
    for gives in [false, true] {
        let (harness, data) = scattered(OpenOptions { relocate: false, ..OpenOptions::default() });
        let before = harness.medium.allocated_bytes();
        harness.run(harness.gate.device().give_space_back(|| gives));
        if gives {
            assert!(harness.medium.allocated_bytes() < before && punched(&harness) > 0);
        }
        let (allocated, count) = (harness.medium.allocated_bytes(), punched(&harness));
        harness.run(harness.gate.device().close_for_a_moment()).unwrap();
        assert_eq!(punched(&harness), count, "closing took no time for it");
        assert!(harness.medium.allocated_bytes() >= allocated);
        let again = Harness::open(&harness.medium, true).unwrap();
        assert!(again.read(0, BLOCKS).unwrap() == data);
        again.verify().unwrap();
    }
}

#[test]
fn a_physical_block_is_not_punched_while_it_is_read() {
    for turns in 0..40 {
        let harness = Harness::new(BlockSize::B4096, BLOCKS, format());
        let data = pattern(1, 256 * 4096);
        harness.write(0, &data).unwrap();
        harness.flush().unwrap();
        harness.medium.turns.set(5);
        let extent = Extent::from_raw(0, 256).unwrap();
        let read = harness.gate.execute(Request::read(extent, Expectations::NONE));
        let trim = async {
            pass_turns(turns).await;
            harness.gate.execute(Request::discard([extent])).await.unwrap();
            harness.gate.execute(Request::flush()).await.unwrap();
        };
        let (read, ()) = harness.run(join(read, trim));
        assert!(read.is_ok(), "{:?}", read.err());
        harness.idle();
        assert!(harness.medium.punched_bytes.get() >= 256 * 4096);
    }
}

fn preallocated(reserves: bool) -> Result<TestMedium, VolumeError> {
    let layout = Layout::new(BlockSize::B4096, 512, BLOCKS).unwrap();
    let medium = TestMedium::new(layout.medium_bytes(), 512);
    medium.reserves.set(reserves);
    let options = CreateOptions {
        block_size: BlockSize::B4096,
        capacity_blocks: BLOCKS,
        protection: format(),
        uuid: UUID,
        preallocate: true,
    };
    futures_executor::block_on(create(&medium, &options)).map(|()| medium)
}

#[test]
fn preallocated_space_is_taken_at_once_and_kept() {
    let medium = preallocated(true).unwrap();
    let layout = Layout::new(BlockSize::B4096, 512, BLOCKS).unwrap();
    assert_eq!(medium.allocated_bytes(), layout.medium_bytes());
    let harness = Harness::open(&medium, false).unwrap();
    harness.write(0, &pattern(1, BLOCKS as usize * 4096)).unwrap();
    discard(&harness, 0, BLOCKS);
    rest(&harness);
    assert!(harness.read(0, BLOCKS).unwrap() == vec![0; BLOCKS as usize * 4096]);
    let medium = harness.close();
    assert_eq!((medium.allocated_bytes(), medium.punched_bytes.get()), (layout.medium_bytes(), 0));
    match preallocated(false).err() {
        Some(VolumeError::Medium(error)) => assert_eq!(error.kind, MediumErrorKind::Unsupported),
        other => panic!("{other:?}"),
    }
    // If nothing can be reserved, a volume without preallocation works nevertheless.
    let medium = created(BlockSize::B4096, 512, BLOCKS, format());
    medium.reserves.set(false);
    Harness::open(&medium, false).unwrap().write(0, &pattern(1, 4096)).unwrap();
}
