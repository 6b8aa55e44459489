//! Devices that fail or are slow while data are written, requests that are given up, and bad copies.

use std::rc::Rc;

use futures_executor::block_on;
use futures_util::FutureExt;
use futures_util::future::join;
use sealblock_block::DynDevice;
use sealblock_btrfs::FsError;
use sealblock_btrfs::check::{CheckOptions, Verdict, WhyNotChecked, check};
use sealblock_btrfs::verify::Unwatched;
use sealblock_btrfs_engine::data::FilePlace;
use sealblock_btrfs_engine::engine::{Engine, EngineError, EngineOptions};
use sealblock_btrfs_engine::names::{Place, RenameMode};
use sealblock_btrfs_engine::operations::{NewSnapshot, SubvolumePlace};
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_media_memory::Corruption;
use sealblock_runtime_memory::Slice;
use sealblock_units::Lba;

use crate::disks::Disks;
use crate::faulty::{Faults, FaultyDevice};
use crate::files::{Kind, ROOT, assert_content, assert_same, create, read_all, read_committed, write};

/// An engine, and what its devices do to writes.
pub fn open(disks: &Disks, options: EngineOptions) -> (Engine, Vec<Rc<Faults>>) {
    let faults = std::cell::RefCell::new(Vec::new());
    let filesystem = disks.open_through(|name, memory| {
        let own = Rc::new(Faults::default());
        faults.borrow_mut().push(Rc::clone(&own));
        DynDevice::new(name, FaultyDevice { memory, faults: own })
    });
    (block_on(Engine::open(&filesystem, options)).unwrap(), faults.into_inner())
}

const MIRROR: [&str; 4] = ["-m", "raid1", "-d", "raid1"];

#[test]
fn a_copy_that_cannot_be_written_leaves_its_device_behind() {
    for kind in [Kind::Plain, Kind::NoCow] {
        let Some(disks) = Disks::make(2, 256, &MIRROR) else { return };
        let (engine, faults) = open(&disks, EngineOptions::default());
        let ino = create(&engine, "file", kind);
        write(&engine, ino, 0, &[1; 100_000]);
        block_on(engine.commit()).unwrap();
        faults[0].failing.set(1);
        write(&engine, ino, 0, &[2; 100_000]);
        assert_content(&engine, ino, &[2; 100_000]);
        block_on(engine.commit()).unwrap();
        assert_content(&engine, ino, &[2; 100_000]);
        drop(engine);
        assert_first_is_behind(&disks);
    }
}

/// The first of two devices missed the last transaction, and nothing is changed without it.
fn assert_first_is_behind(disks: &Disks) {
    let filesystem = disks.open();
    let stale: Vec<bool> = filesystem.storage().devices.iter().map(|(_, device)| device.is_stale).collect();
    assert_eq!(stale, [true, false]);
    let opened = block_on(Engine::open(&filesystem, EngineOptions::default()));
    assert!(matches!(opened, Err(EngineError::Read(FsError::NotWritable(_)))));
    let report = block_on(check(&filesystem, CheckOptions::default(), &Unwatched));
    assert_eq!((report.finding_count, report.verdict()), (0, Verdict::Incomplete));
    assert!(report.not_checked.contains(&WhyNotChecked::StaleDevice));
}

#[test]
fn a_copy_of_the_superblock_that_cannot_be_written_is_told_once() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let (engine, faults) = open(&disks, EngineOptions::default());
    for _ in 0..3 {
        create(&engine, &format!("file {}", fastrand::u64(..)), Kind::Plain);
        // The second copy, at 64 MiB.
        faults[0].failing_at.set(Some((64 << 20) / 4096));
        block_on(engine.commit()).unwrap();
    }
    let bad = engine.take_bad_copies();
    assert_eq!(bad.iter().map(|copy| (copy.mirror, copy.logical)).collect::<Vec<_>>(), [(2, None)], "{bad:?}");
    assert!(engine.failed_devices().is_empty());
}

/// Otherwise the copies would differ, and nobody would know.
#[test]
fn a_copy_that_misses_a_write_whose_request_is_gone_leaves_its_device_behind() {
    for kind in [Kind::NoCow, Kind::Plain] {
        let Some(disks) = Disks::make(2, 256, &MIRROR) else { return };
        let (engine, faults) = open(&disks, EngineOptions::default());
        let ino = create(&engine, "file", kind);
        write(&engine, ino, 0, &[1; 100_000]);
        block_on(engine.commit()).unwrap();
        faults[0].failing.set(1);
        faults[1].hold(1);
        assert!(engine.write(ROOT, ino, 0, Slice::copy_from(&[2; 8192])).now_or_never().is_none());
        faults[1].release();
        block_on(engine.finish_writes());
        block_on(engine.commit()).unwrap();
        assert_eq!(read_all(&engine, ino, 100_000)[..8192], if kind == Kind::NoCow { [2; 8192] } else { [1; 8192] });
        drop(engine);
        match kind {
            Kind::NoCow => assert_first_is_behind(&disks),
            // What was written in a new place belongs to nobody.
            _ => assert!(disks.open().storage().devices.iter().all(|(_, device)| !device.is_stale)),
        }
    }
}

#[test]
fn data_of_which_no_copy_can_be_written_change_nothing() {
    for (devices, options) in [(1, &["-m", "single"][..]), (2, &MIRROR)] {
        let Some(disks) = Disks::make(devices, 256, options) else { return };
        let (engine, faults) = open(&disks, EngineOptions::default());
        let ino = create(&engine, "file", Kind::Plain);
        write(&engine, ino, 0, &[1; 9000]);
        faults.iter().for_each(|faults| faults.failing.set(1));
        let failed = block_on(engine.write(ROOT, ino, 5000, Slice::copy_from(&[2; 9000])));
        assert!(matches!(failed, Err(EngineError::Read(FsError::WriteFailed(_)))), "{failed:?}");
        assert_content(&engine, ino, &[1; 9000]);
        assert_eq!(engine.size_ahead(ROOT, ino), None);
        block_on(engine.commit()).unwrap();
        assert_content(&engine, ino, &[1; 9000]);
        write(&engine, ino, 5000, &[3; 9000]);
        block_on(engine.commit()).unwrap();
        drop(engine);
        disks.assert_consistent();
        disks.assert_checked_by_program();
    }
}

#[test]
fn checksums_are_made_while_the_data_are_written() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    for sync_csum in [false, true] {
        let (engine, faults) = open(&disks, EngineOptions { sync_csum, ..EngineOptions::default() });
        let ino = create(&engine, &format!("file {sync_csum}"), Kind::Plain);
        faults[0].delays.set(1000);
        write(&engine, ino, 0, &vec![5; 2 << 20]);
        let counters = engine.data_counters();
        assert!(counters.sum_time > std::time::Duration::ZERO);
        assert_eq!(counters.hidden_sum_time.is_zero(), sync_csum, "{counters:?}");
        assert_content(&engine, ino, &vec![5; 2 << 20]);
    }
}

#[test]
fn a_request_that_is_given_up_changes_nothing_and_its_space_waits_for_the_device() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    for kind in [Kind::Plain, Kind::NoCow] {
        let (engine, faults) = open(&disks, EngineOptions::default());
        let ino = create(&engine, &format!("{kind:?}"), kind);
        write(&engine, ino, 0, &[1; 8192]);
        block_on(engine.commit()).unwrap();
        faults[0].hold(1);
        assert!(engine.write(ROOT, ino, 0, Slice::copy_from(&[2; 8192])).now_or_never().is_none());
        assert_eq!(engine.data_counters().abandoned_writes, 1);
        if kind == Kind::Plain {
            assert_content(&engine, ino, &[1; 8192]);
            // The space is not used again, whatever is committed meanwhile.
            for round in 0..3 {
                write(&engine, ino, 0, &[round; 8192]);
                block_on(engine.commit()).unwrap();
                assert_content(&engine, ino, &[round; 8192]);
            }
        } else {
            // Data in place are locked until the device has answered.
            let mut waits = Box::pin(engine.read(ROOT, ino, 0, 10));
            assert!((&mut waits).now_or_never().is_none());
            faults[0].release();
            assert_eq!(block_on(waits).unwrap()[..], [2; 10]);
        }
        faults[0].release();
        block_on(engine.finish_writes());
        let expected = read_all(&engine, ino, 8192);
        block_on(engine.commit()).unwrap();
        assert_content(&engine, ino, &expected);
        drop(engine);
        disks.assert_consistent();
    }
    disks.assert_checked_by_program();
}

#[test]
fn a_size_is_stored_when_all_before_it_is_written() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let (engine, faults) = open(&disks, EngineOptions::default());
    for fails in [false, true] {
        let ino = create(&engine, &format!("{fails}"), Kind::Plain);
        write(&engine, ino, 0, &[1; 4096]);
        faults[0].hold(1);
        let mut first = Box::pin(engine.write(ROOT, ino, 4096, Slice::copy_from(&[2; 4096])));
        assert!((&mut first).now_or_never().is_none());
        write(&engine, ino, 8192, &[3; 4096]);
        assert_eq!(engine.size_ahead(ROOT, ino), Some(12288));
        block_on(engine.commit()).unwrap();
        disks.assert_consistent();
        let stored = read_committed(&disks, ino);
        assert_eq!(stored, [1; 4096], "the last commit has no bytes behind those that are still written");
        let (done, synced) = if fails {
            drop(first);
            (
                None,
                block_on(async {
                    faults[0].release();
                    engine.fsync(ROOT, ino).await
                }),
            )
        } else {
            let both = block_on(join(first, async {
                let synced = engine.fsync(ROOT, ino);
                faults[0].release();
                synced.await
            }));
            (Some(both.0.unwrap()), both.1)
        };
        synced.unwrap();
        assert_eq!((engine.size_ahead(ROOT, ino), done.is_some()), (None, !fails));
        let middle = if fails { 0 } else { 2 };
        assert_content(&engine, ino, &[[1; 4096], [middle; 4096], [3; 4096]].concat());
    }
    block_on(engine.finish_writes());
    block_on(engine.commit()).unwrap();
    drop(engine);
    disks.assert_consistent();
    disks.assert_checked_by_program();
}

#[test]
fn what_is_in_the_item_of_a_file_does_not_come_back_over_a_write() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let (engine, faults) = open(&disks, EngineOptions::default());
    for (name, small) in [("small", 6), ("one sector", 4096)] {
        let ino = create(&engine, name, Kind::Compressed("zstd"));
        write(&engine, ino, 0, &vec![9; small]);
        // Both have been planned when the first one becomes visible.
        faults[0].hold(2);
        let data = |byte| Slice::copy_from(&[byte; 8192]);
        let mut first = Box::pin(engine.write(ROOT, ino, 0, data(1)));
        assert!((&mut first).now_or_never().is_none());
        let mut second = Box::pin(engine.write(ROOT, ino, 8192, data(2)));
        assert!((&mut second).now_or_never().is_none());
        faults[0].release();
        let (first, second) = block_on(join(first, second));
        assert_eq!((first.unwrap(), second.unwrap()), (8192, 8192));
        assert_content(&engine, ino, &[[1; 8192], [2; 8192]].concat());
    }
    block_on(engine.commit()).unwrap();
    drop(engine);
    disks.assert_consistent();
    disks.assert_checked_by_program();
}

#[test]
fn bad_copies_are_written_anew_when_they_are_read() {
    let Some(disks) = Disks::make(2, 256, &MIRROR) else { return };
    let (engine, _) = open(&disks, EngineOptions::default());
    let ino = create(&engine, "file", Kind::Plain);
    let mark = [0xa7; 32];
    let mut content = vec![7; 300_000];
    content[200_000..200_032].copy_from_slice(&mark);
    write(&engine, ino, 0, &content);
    block_on(engine.commit()).unwrap();
    // The sector with the mark, on the first device.
    disks.save();
    let image = std::fs::read(&disks.images[0]).unwrap();
    let at = image.windows(32).position(|bytes| bytes == mark).unwrap() as u64;
    assert!(disks.memory(0).damage(Lba::new(at / 4096), Corruption::Data { at: 9, mask: 1 }));
    assert_content(&engine, ino, &content);
    let bad = engine.take_bad_copies();
    assert_eq!((bad.len(), engine.data_counters().repaired_sectors), (1, 1), "{bad:?}");
    assert_content(&engine, ino, &content);
    assert!(engine.take_bad_copies().is_empty());
    drop(engine);
    disks.assert_checked_by_program();
}

#[test]
fn bad_copies_of_nodes_are_written_anew_with_the_next_commit() {
    for (devices, options) in [(2, &MIRROR[..]), (1, &["-m", "dup"])] {
        let Some(disks) = Disks::make(devices, 256, options) else { return };
        let (engine, _) = open(&disks, EngineOptions::default());
        let name = "a name that no other node has";
        create(&engine, name, Kind::Plain);
        block_on(engine.commit()).unwrap();
        drop(engine);
        // The first copies of all nodes with the name, of which the last one is in use.
        disks.save();
        let image = std::fs::read(&disks.images[0]).unwrap();
        let has_name = |sector: &[u8]| sector.windows(name.len()).any(|bytes| bytes == name.as_bytes());
        let mut sectors: Vec<u64> =
            (0..).zip(image.chunks(4096)).filter(|(_, sector)| has_name(sector)).map(|(at, _)| at).collect();
        sectors.truncate(if devices == 1 { sectors.len() / 2 } else { sectors.len() });
        for sector in &sectors {
            assert!(disks.memory(0).damage(Lba::new(*sector), Corruption::Data { at: 9, mask: 1 }));
        }
        let (engine, _) = open(&disks, EngineOptions::default());
        assert!(block_on(engine.lookup(ROOT, place(name))).unwrap().is_some());
        assert_eq!(engine.take_bad_copies().len(), 1);
        assert!(engine.is_dirty(), "there is something to write");
        block_on(engine.sync()).unwrap();
        assert!(!engine.is_dirty());
        drop(engine);
        let (engine, _) = open(&disks, EngineOptions::default());
        assert!(block_on(engine.lookup(ROOT, place(name))).unwrap().is_some());
        assert!(engine.take_bad_copies().is_empty());
        drop(engine);
        disks.assert_consistent();
        disks.assert_checked_by_program();
    }
}

pub fn place(name: &str) -> Place<'_> {
    Place { directory: 256, name: name.as_bytes() }
}

pub fn time() -> Timespec {
    Timespec { seconds: 1_700_000_000.into(), nanoseconds: 0.into() }
}

#[test]
fn a_snapshot_waits_for_data_that_are_written_in_place() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let (engine, faults) = open(&disks, EngineOptions::default());
    let ino = create(&engine, "file", Kind::NoCow);
    write(&engine, ino, 0, &[1; 8192]);
    block_on(engine.fsync(ROOT, ino)).unwrap();
    let durable = engine.durable_generation();
    faults[0].hold(1);
    let mut in_place = Box::pin(engine.write(ROOT, ino, 0, Slice::copy_from(&[2; 8192])));
    assert!((&mut in_place).now_or_never().is_none());
    let new = NewSnapshot { source: ROOT, uuid: [7; 16], is_read_only: true };
    let to = SubvolumePlace { root: ROOT, place: place("snapshot") };
    let mut snapshot = Box::pin(engine.create_snapshot(new, to, time()));
    assert!((&mut snapshot).now_or_never().is_none(), "half of the write would be in it");
    let mut waits = Box::pin(engine.write(ROOT, ino, 0, Slice::copy_from(&[3; 8192])));
    assert!((&mut waits).now_or_never().is_none());
    faults[0].release();
    let ((written, id), later) = block_on(join(join(in_place, snapshot), waits));
    assert_eq!((written.unwrap(), later.unwrap()), (8192, 8192));
    let in_snapshot = block_on(engine.read(id.unwrap(), ino, 0, 8192)).unwrap();
    assert_same(&in_snapshot, &[2; 8192]);
    assert_content(&engine, ino, &[3; 8192]);
    assert_eq!(engine.durable_generation(), durable);
    drop(engine);
    disks.assert_consistent();
}

#[test]
fn data_in_place_need_no_commit_and_their_size_does() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let (engine, _) = open(&disks, EngineOptions::default());
    let ino = create(&engine, "file", Kind::NoCow);
    write(&engine, ino, 0, &[1; 8192]);
    let durable = block_on(engine.fsync(ROOT, ino)).unwrap();
    write(&engine, ino, 0, &[3; 8192]);
    block_on(engine.sync_data(ROOT, ino)).unwrap();
    assert_eq!(engine.durable_generation(), durable);
    write(&engine, ino, 8192, &[4; 10]);
    block_on(engine.sync_data(ROOT, ino)).unwrap();
    assert_eq!(engine.durable_generation(), durable + 1);
}

/// A power cut would leave both devices with superblocks of the same transaction, and no checksum tells which copy is
/// old.
#[test]
fn data_in_place_that_one_copy_missed_are_durable_only_with_a_commit() {
    let Some(disks) = Disks::make(2, 256, &MIRROR) else { return };
    let (engine, faults) = open(&disks, EngineOptions::default());
    let (ino, other) = (create(&engine, "file", Kind::NoCow), create(&engine, "other", Kind::NoCow));
    write(&engine, ino, 0, &[1; 100_000]);
    write(&engine, other, 0, &[1; 100_000]);
    let durable = block_on(engine.fsync(ROOT, ino)).unwrap();
    faults[0].failing.set(1);
    write(&engine, ino, 0, &[2; 100_000]);
    block_on(engine.sync_data(ROOT, ino)).unwrap();
    assert_eq!(engine.durable_generation(), durable + 1, "the other device must be older");
    write(&engine, other, 0, &[3; 100_000]);
    block_on(engine.sync_data(ROOT, other)).unwrap();
    assert_eq!(engine.durable_generation(), durable + 1, "it is by now");
    assert_same(&read_committed(&disks, ino), &[2; 100_000]);
    assert_same(&read_committed(&disks, other), &[3; 100_000]);
}

/// Both files had the same data. One is deleted, and a power cut before that is durable brings it back: as it was.
#[test]
fn what_a_deleted_file_had_is_not_written_over_before_its_deletion_is_durable() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let (engine, faults) = open(&disks, EngineOptions::default());
    let (ino, clone) = (create(&engine, "file", Kind::NoCow), create(&engine, "clone", Kind::NoCow));
    write(&engine, ino, 0, &[1; 8192]);
    let file = |ino| FilePlace { root: ROOT, ino, offset: 0 };
    block_on(engine.clone_range(file(ino), file(clone), 0)).unwrap();
    block_on(engine.fsync(ROOT, ino)).unwrap();
    block_on(engine.unlink(ROOT, place("clone"), time())).unwrap();
    assert!(block_on(engine.release(ROOT, clone)).unwrap());
    write(&engine, ino, 0, &[2; 4096]);
    assert_same(&read_committed(&disks, clone), &[1; 8192]);
    faults[0].hold(1);
    let mut commit = Box::pin(engine.commit());
    assert!((&mut commit).now_or_never().is_none());
    write(&engine, ino, 4096, &[3; 4096]);
    assert_same(&read_committed(&disks, clone), &[1; 8192]);
    faults[0].release();
    block_on(commit).unwrap();
    let durable = block_on(engine.fsync(ROOT, ino)).unwrap();
    write(&engine, ino, 0, &[4; 8192]);
    block_on(engine.sync_data(ROOT, ino)).unwrap();
    assert_eq!(engine.durable_generation(), durable, "now nobody else has it");
    drop(engine);
    disks.assert_consistent();
}

/// A write that was answered, before whose place another one was given up: the size is stored before the file gets the
/// name of another one, or a power cut would leave the name with a part of it.
#[test]
fn a_file_that_replaces_another_one_has_all_that_was_written() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let (engine, faults) = open(&disks, EngineOptions::default());
    let (new, old) = (create(&engine, "new", Kind::Plain), create(&engine, "old", Kind::Plain));
    write(&engine, old, 0, &[9; 12288]);
    write(&engine, new, 0, &[1; 4096]);
    faults[0].hold(1);
    let mut first = Box::pin(engine.write(ROOT, new, 4096, Slice::copy_from(&[2; 4096])));
    assert!((&mut first).now_or_never().is_none());
    write(&engine, new, 8192, &[3; 4096]);
    drop(first);
    assert_eq!(engine.size_ahead(ROOT, new), Some(12288));
    block_on(engine.rename((ROOT, place("new")), (ROOT, place("old")), RenameMode::Replace, time())).unwrap();
    block_on(engine.commit()).unwrap();
    assert_same(&read_committed(&disks, new), &[[1; 4096], [0; 4096], [3; 4096]].concat());
    faults[0].release();
    block_on(engine.finish_writes());
    block_on(engine.commit()).unwrap();
    drop(engine);
    disks.assert_consistent();
}

#[test]
fn one_of_two_copies_on_a_device_is_enough_for_what_has_a_checksum() {
    let Some(disks) = Disks::make(1, 256, &["-m", "dup", "-d", "dup"]) else { return };
    let (engine, faults) = open(&disks, EngineOptions::default());
    let (ino, unsummed) = (create(&engine, "file", Kind::Plain), create(&engine, "no sums", Kind::NoSum));
    faults[0].failing.set(1);
    write(&engine, ino, 0, &[1; 9000]);
    assert_eq!(engine.take_bad_copies().len(), 1);
    faults[0].failing.set(1);
    let failed = block_on(engine.write(ROOT, unsummed, 0, Slice::copy_from(&[2; 9000])));
    assert!(matches!(failed, Err(EngineError::Read(FsError::WriteFailed(_)))), "nothing tells which copy is good");
    faults[0].failing.set(1);
    block_on(engine.commit()).unwrap();
    assert_eq!(engine.take_bad_copies().len(), 1, "a node");
    assert_content(&engine, ino, &[1; 9000]);
    assert_content(&engine, unsummed, &[]);
}

#[test]
fn nothing_is_written_any_more_when_the_writing_of_a_transaction_is_given_up() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let (engine, faults) = open(&disks, EngineOptions::default());
    let ino = create(&engine, "file", Kind::Plain);
    block_on(engine.commit()).unwrap();
    write(&engine, ino, 0, &[1; 9000]);
    faults[0].hold(1);
    assert!(engine.commit().now_or_never().is_none());
    faults[0].release();
    assert!(matches!(block_on(engine.commit()), Err(EngineError::Stopped(_))));
    assert!(matches!(block_on(engine.fsync(ROOT, ino)), Err(EngineError::Stopped(_))));
    assert_eq!(read_committed(&disks, ino), [], "the last commit");
    drop(engine);
    disks.assert_consistent();
}
