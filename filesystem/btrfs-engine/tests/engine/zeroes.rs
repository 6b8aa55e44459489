//! Ranges that become written zeroes: what the file and its extents are then, to which devices it was done, and what a
//! power cut leaves.

use std::path::Path;
use std::rc::Rc;

use futures_executor::block_on;
use futures_util::FutureExt;
use sealblock_block::{DynDevice, RequestKind};
use sealblock_btrfs::FsError;
use sealblock_btrfs_engine::engine::{Engine, EngineError, EngineOptions};
use sealblock_btrfs_engine::operations::{NewSnapshot, SubvolumePlace};
use sealblock_btrfs_format::superblock::COPY_OFFSETS;
use sealblock_proofs_btrfs_images::programs::{Mount, run};
use sealblock_recorder::{CrashOptions, CrashStates, Options, Recorder};

use crate::data_faults::{open, place, time};
use crate::disks::Disks;
use crate::faulty::{Faults, FaultyDevice};
use crate::files::{Kind, ROOT, assert_content, assert_same, create, is_full, read_committed, write};
use crate::{assert_scrubbed, drop, findings, images_of, open_devices};

const MIB: u64 = 1 << 20;
const MIRROR: [&str; 4] = ["-m", "raid1", "-d", "raid1"];
/// What free space has.
const GARBAGE: u8 = 0xa5;

fn zero(engine: &Engine, ino: u64, offset: u64, bytes: u64) {
    block_on(engine.write_zeroes(ROOT, ino, offset, bytes)).unwrap();
}

/// Fills a part of the free space with garbage.
fn spoil(engine: &Engine, bytes: u64) {
    let ino = create(engine, "garbage", Kind::NoCow);
    (0..bytes / MIB).for_each(|at| write(engine, ino, at * MIB, &[GARBAGE; MIB as usize]));
    block_on(engine.commit()).unwrap();
    block_on(engine.truncate(ROOT, ino, 0)).unwrap();
    block_on(engine.commit()).unwrap();
}

/// The extents that the kernel shows of a file, with their flags.
fn kernel_extents(path: &Path) -> String {
    run("filefrag", ["-v", path.to_str().unwrap()]).unwrap()
}

#[test]
fn later_writes_to_written_zeroes_change_no_metadata() {
    for (devices, options) in [
        (1, &["-m", "single"][..]),
        (1, &["-m", "dup", "-d", "dup", "-n", "4096"]),
        (2, &["-m", "raid1", "-d", "raid0"]),
        (4, &["-m", "raid10", "-d", "raid10"]),
    ] {
        let Some(disks) = Disks::make(devices, 512, options) else { return };
        let (engine, faults) = open(&disks, EngineOptions::default());
        spoil(&engine, 12 * MIB);
        let ino = create(&engine, "file", Kind::NoCow);
        // A hole, allocated space, and data.
        block_on(engine.allocate_range(ROOT, ino, (2 * MIB, MIB), false)).unwrap();
        write(&engine, ino, 4 * MIB, &[1; 100_000]);
        let written = faults.iter().map(|faults| faults.written_bytes.get()).sum::<u64>();
        zero(&engine, ino, 0, 10 * MIB);
        let more = faults.iter().map(|faults| faults.written_bytes.get()).sum::<u64>() - written;
        assert_eq!(more, 0, "the devices make the zeroes");
        assert_content(&engine, ino, &vec![0; 10 * MIB as usize]);
        block_on(engine.fsync(ROOT, ino)).unwrap();
        let durable = engine.durable_generation();
        for at in [0, 3 * MIB - 4096, 5 * MIB + 8192, 10 * MIB - 4096] {
            write(&engine, ino, at, &[7; 4096]);
            block_on(engine.sync_data(ROOT, ino)).unwrap();
        }
        assert_eq!(engine.durable_generation(), durable, "none of these needed a commit");
        let mut content = vec![0; 10 * MIB as usize];
        for at in [0, 3 * MIB - 4096, 5 * MIB + 8192, 10 * MIB - 4096] {
            content[at as usize..][..4096].fill(7);
        }
        block_on(engine.commit()).unwrap();
        std::mem::drop(engine);
        disks.assert_consistent();
        disks.assert_checked_by_program();
        let mount = Mount::new(&disks.images, "noatime").unwrap();
        assert_same(&std::fs::read(mount.path("file")).unwrap(), &content);
        let extents = kernel_extents(&mount.path("file"));
        assert!(extents.contains("extent") && !extents.contains("unwritten"), "{extents}");
        assert_scrubbed(&mount);
        mount.unmount().unwrap();
    }
}

/// The zeroes are written like other data, and the result is the same.
#[test]
fn zeroes_are_transferred_to_devices_that_cannot_make_them() {
    let Some(disks) = Disks::make(2, 256, &MIRROR) else { return };
    let slow = Rc::new(Faults::default());
    slow.lacks_zeroes.set(true);
    let filesystem = disks.open_through(|name, memory| {
        let faults = if name.ends_with('1') { Rc::clone(&slow) } else { Rc::default() };
        DynDevice::new(name, FaultyDevice { memory, faults })
    });
    let engine = block_on(Engine::open(&filesystem, EngineOptions::default())).unwrap();
    let native: Vec<bool> = engine.devices().iter().map(|(_, device)| device.has_native_zeroes()).collect();
    assert_eq!(native, [true, false]);
    spoil(&engine, 6 * MIB);
    let ino = create(&engine, "file", Kind::NoCow);
    let before = slow.written_bytes.get();
    zero(&engine, ino, 0, 5 * MIB);
    assert_eq!(slow.written_bytes.get() - before, 5 * MIB);
    assert_content(&engine, ino, &vec![0; 5 * MIB as usize]);
    slow.failing.set(1);
    zero(&engine, ino, 0, MIB);
    assert_eq!(engine.failed_devices(), [2]);
    assert_content(&engine, ino, &vec![0; 5 * MIB as usize]);
}

#[test]
fn ends_within_sectors_keep_their_other_bytes() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
    for (number, (size, offset, bytes)) in [
        (20_000, 5000, 3000),
        (20_000, 100, 50),
        (20_000, 4096, 100),
        (20_000, 8000, 12_000),
        (20_000, 19_000, 30_000),
        (20_000, 20_479, 2),
        (20_000, 30_001, 5000),
        (0, 1, 1),
        (5000, 0, 9000),
    ]
    .into_iter()
    .enumerate()
    {
        let ino = create(&engine, &format!("file{number}"), Kind::NoCow);
        let mut content = vec![3; size];
        if size > 0 {
            write(&engine, ino, 0, &content);
        }
        zero(&engine, ino, offset as u64, bytes as u64);
        content.resize(size.max(offset + bytes), 0);
        content[offset..offset + bytes].fill(0);
        assert_content(&engine, ino, &content);
        block_on(engine.truncate(ROOT, ino, 100_000)).unwrap();
        content.resize(100_000, 0);
        assert_content(&engine, ino, &content);
    }
    block_on(engine.commit()).unwrap();
    disks.assert_consistent();
    disks.assert_checked_by_program();
}

#[test]
fn files_that_are_copied_on_write_are_refused() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
    for kind in [Kind::Plain, Kind::Compressed("zstd"), Kind::Compress, Kind::NoSum] {
        let ino = create(&engine, &format!("{kind:?}"), kind);
        write(&engine, ino, 0, &[1; 9000]);
        let refused = block_on(engine.write_zeroes(ROOT, ino, 0, 4096)).unwrap_err();
        assert_eq!(refused.errno(), libc::EOPNOTSUPP, "{kind:?}: {refused}");
        assert!(refused.to_string().contains("NODATACOW"), "{refused}");
        assert_content(&engine, ino, &[1; 9000]);
    }
    let ino = create(&engine, "file", Kind::NoCow);
    for (offset, bytes, errno) in [(0, 0, libc::EINVAL), (1 << 63, 1, libc::EFBIG), (u64::MAX, 5, libc::EFBIG)] {
        let refused = block_on(engine.write_zeroes(ROOT, ino, offset, bytes)).unwrap_err();
        assert_eq!(refused.errno(), errno, "{refused}");
    }
    assert_eq!(block_on(engine.write_zeroes(ROOT, 256, 0, 1)).unwrap_err().errno(), libc::EISDIR);
}

#[test]
fn what_a_snapshot_has_stays_there() {
    let Some(disks) = Disks::make(1, 512, &["-m", "single"]) else { return };
    let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
    let ino = create(&engine, "file", Kind::NoCow);
    write(&engine, ino, 0, &vec![5; MIB as usize]);
    block_on(engine.allocate_range(ROOT, ino, (MIB, MIB), false)).unwrap();
    block_on(engine.commit()).unwrap();
    let snapshot = drop::snapshot(&engine, ROOT, "snapshot");
    block_on(engine.commit()).unwrap();
    // Twice: the second time it is in place.
    for byte in [0, 9] {
        write(&engine, ino, 0, &[byte; 8192]);
        zero(&engine, ino, 100, 2 * MIB - 200);
        let mut content = vec![0; 2 * MIB as usize];
        content[..100].fill(byte);
        assert_content(&engine, ino, &content);
        let old = block_on(engine.read(snapshot, ino, 0, 2 * MIB)).unwrap();
        assert!(old[..MIB as usize].iter().all(|byte| *byte == 5) && old[MIB as usize..].iter().all(|byte| *byte == 0));
        block_on(engine.commit()).unwrap();
        disks.assert_consistent();
    }
    disks.assert_checked_by_program();
}

#[test]
fn a_device_that_fails_is_left_behind_and_without_a_copy_nothing_changes() {
    let Some(disks) = Disks::make(2, 256, &MIRROR) else { return };
    let (engine, faults) = open(&disks, EngineOptions::default());
    let ino = create(&engine, "file", Kind::NoCow);
    write(&engine, ino, 0, &[1; 100_000]);
    block_on(engine.commit()).unwrap();
    faults.iter().for_each(|faults| faults.failing.set(1));
    let failed = block_on(engine.write_zeroes(ROOT, ino, 200_000, 5000)).unwrap_err();
    assert!(matches!(failed, EngineError::Read(FsError::WriteFailed(_))), "{failed}");
    assert_content(&engine, ino, &[1; 100_000]);
    assert!(engine.failed_devices().is_empty());
    faults[0].failing.set(1);
    zero(&engine, ino, 4096, 100_000);
    assert_eq!(engine.failed_devices(), [1]);
    let content = [vec![1; 4096], vec![0; 100_000]].concat();
    assert_content(&engine, ino, &content);
    block_on(engine.commit()).unwrap();
    std::mem::drop(engine);
    let stale: Vec<bool> = disks.open().storage().devices.iter().map(|(_, device)| device.is_stale).collect();
    assert_eq!(stale, [true, false]);
    assert_same(&read_committed(&disks, ino), &content);
}

#[test]
fn a_request_that_is_given_up_shows_nothing_and_its_space_waits() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let (engine, faults) = open(&disks, EngineOptions::default());
    spoil(&engine, MIB);
    let ino = create(&engine, "file", Kind::NoCow);
    write(&engine, ino, 0, &[1; 8192]);
    block_on(engine.commit()).unwrap();
    faults[0].hold(1);
    // A new place; the file does not change.
    assert!(engine.write_zeroes(ROOT, ino, 8192, 65536).now_or_never().is_none());
    assert_eq!(engine.data_counters().abandoned_writes, 1);
    assert_content(&engine, ino, &[1; 8192]);
    for round in 0..3 {
        write(&engine, ino, 8192, &[round; 65536]);
        block_on(engine.commit()).unwrap();
    }
    faults[0].release();
    block_on(engine.finish_writes());
    assert_content(&engine, ino, &[vec![1; 8192], vec![2; 65536]].concat());
    // In place: others wait until the device has answered.
    faults[0].hold(1);
    assert!(engine.write_zeroes(ROOT, ino, 0, 4096).now_or_never().is_none());
    assert!(engine.read(ROOT, ino, 0, 4096).now_or_never().is_none());
    let new = NewSnapshot { source: ROOT, uuid: [7; 16], is_read_only: true };
    let to = SubvolumePlace { root: ROOT, place: place("snapshot") };
    assert!(engine.create_snapshot(new, to, time()).now_or_never().is_none(), "a snapshot waits, too");
    faults[0].release();
    block_on(engine.finish_writes());
    assert_content(&engine, ino, &[vec![0; 4096], vec![1; 4096], vec![2; 65536]].concat());
    block_on(engine.commit()).unwrap();
    disks.assert_consistent();
    disks.assert_checked_by_program();
}

/// Otherwise a request that cannot succeed would fill the filesystem.
#[test]
fn a_range_for_which_there_is_no_space_gets_none() {
    let Some(disks) = Disks::make(1, 256, &["-m", "dup"]) else { return };
    let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
    spoil(&engine, 20 * MIB);
    let ino = create(&engine, "file", Kind::NoCow);
    write(&engine, ino, MIB, &[1; 4096]);
    let before = block_on(engine.stat(ROOT, ino)).unwrap();
    for bytes in [1 << 30, 1 << 62] {
        let refused = [
            block_on(engine.write_zeroes(ROOT, ino, 0, bytes)),
            block_on(engine.allocate_range(ROOT, ino, (0, bytes), true)),
            block_on(engine.zero_range(ROOT, ino, (0, bytes), false)),
        ];
        for refused in refused {
            assert!(is_full(&refused.unwrap_err()));
        }
        let after = block_on(engine.stat(ROOT, ino)).unwrap();
        assert_eq!((after.size, after.nbytes), (before.size, before.nbytes));
        assert_content(&engine, ino, &[vec![0; MIB as usize], vec![1; 4096]].concat());
    }
    // What there is space for is allocated.
    let free = engine.data_space().free_bytes;
    block_on(engine.allocate_range(ROOT, ino, (0, free * 3 / 4), true)).unwrap();
    zero(&engine, ino, 0, free * 3 / 4);
    block_on(engine.commit()).unwrap();
    disks.assert_consistent();
    disks.assert_checked_by_program();
}

/// In every state the file has, in each sector, what was durable, or zeroes; and what became durable is there.
#[test]
fn a_power_cut_leaves_the_old_content_or_zeroes() {
    for (devices, options) in [(1, &["-m", "single"][..]), (2, &MIRROR)] {
        let Some(disks) = Disks::make(devices, 256, options) else { return };
        let ino = {
            let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
            spoil(&engine, 16 * MIB);
            let ino = create(&engine, "file", Kind::NoCow);
            write(&engine, ino, 0, &[1; 300_000]);
            block_on(engine.allocate_range(ROOT, ino, (MIB, MIB), false)).unwrap();
            block_on(engine.commit()).unwrap();
            disks.save();
            ino
        };
        let recorder = Recorder::new(images_of(&disks), Options { seed: 5, ..Options::default() });
        let engine = block_on(Engine::open(&open_devices(recorder.devices()).unwrap(), EngineOptions::default()));
        let engine = engine.unwrap();
        recorder.mark("begun");
        zero(&engine, ino, 100_000, MIB);
        block_on(engine.commit()).unwrap();
        recorder.mark("first");
        zero(&engine, ino, 1_200_000, 3 * MIB);
        zero(&engine, ino, 0, 4096);
        block_on(engine.fsync(ROOT, ino)).unwrap();
        recorder.mark("second");
        let zeroes = recorder.log().requests().iter().filter(|one| one.kind == RequestKind::WriteZeroes).count();
        assert!(zeroes > 0);
        let limit = 400;
        let options =
            CrashOptions { seed: 5, superblocks: COPY_OFFSETS[..2].to_vec(), limit, ..CrashOptions::default() };
        let states = CrashStates::new(recorder.log(), &options);
        println!("{devices} devices: {} states", states.len());
        assert!(states.len() > 50);
        for state in states.iter() {
            let opened = state.images.iter().enumerate().map(|(index, image)| image.device(&format!("cut {index}")));
            let filesystem = open_devices(opened).unwrap();
            let mut found = findings(&filesystem);
            found.retain(|finding| !finding.starts_with("superblock: "));
            assert!(found.is_empty(), "state {}: {found:?}", state.index);
            let content = block_on(async {
                let subvolume = filesystem.subvolume(ROOT).await.unwrap();
                let inode = filesystem.inode(subvolume.root, ino).await.unwrap();
                filesystem.read(&inode, 0, 8 << 20).await.unwrap()
            });
            assert_state(&content, &|mark| state.has_mark(mark), state.index);
        }
    }
}

fn assert_state(content: &[u8], has: &dyn Fn(&str) -> bool, index: usize) {
    let old = |at: usize| if at < 300_000 { 1 } else { 0 };
    let wrong = content.iter().enumerate().position(|(at, byte)| *byte != 0 && *byte != old(at));
    assert!(wrong.is_none(), "state {index}: byte {wrong:?} of {} is {:?}", content.len(), wrong.map(|at| content[at]));
    let is = |range: std::ops::Range<usize>, byte: u8| content[range].iter().all(|found| *found == byte);
    // Nobody touched this, and nothing becomes zeroes before it was to.
    assert!(is(4096..100_000 / 4096 * 4096, 1), "state {index}");
    assert!(has("begun") || is(0..300_000, 1), "state {index}");
    if has("first") {
        assert!(is(100_000..300_000, 0) && content.len() as u64 >= 2 * MIB, "state {index}");
    }
    if has("second") {
        assert!(is(0..4096, 0) && content.len() as u64 == 1_200_000 + 3 * MIB, "state {index}");
    }
}
