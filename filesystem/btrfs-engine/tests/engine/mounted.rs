//! What a mount relies on: sizes that are ahead, renames that wait for writes, holes, free space, commits only where
//! something changed.

use futures_executor::block_on;
use futures_util::FutureExt;
use futures_util::future::join;
use sealblock_btrfs_engine::data::WriteMode;
use sealblock_btrfs_engine::engine::{Engine, EngineError, EngineOptions};
use sealblock_btrfs_engine::inode::Ownership;
use sealblock_btrfs_engine::names::{Place, RenameMode, Renamed};
use sealblock_btrfs_engine::operations::Resolved;
use sealblock_btrfs_format::items::directory::FileType;
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_runtime_memory::Slice;

use crate::data_faults::open;
use crate::disks::Disks;
use crate::files::{Kind, ROOT, assert_content, create, read_committed, write};

const TOP: u64 = 256;
const SINGLE: [&str; 2] = ["-m", "single"];

fn time(seconds: i64) -> Timespec {
    Timespec { seconds: seconds.into(), nanoseconds: 0.into() }
}

fn mode(sets_times: bool) -> WriteMode {
    WriteMode { sets_times, is_open: true }
}

fn place(name: &str) -> Place<'_> {
    Place { directory: TOP, name: name.as_bytes() }
}

fn size(engine: &Engine, ino: u64) -> u64 {
    block_on(engine.stat(ROOT, ino)).unwrap().size.get()
}

#[test]
fn a_file_replaces_another_one_when_its_writes_have_completed() {
    let Some(disks) = Disks::make(1, 256, &SINGLE) else { return };
    let (engine, faults) = open(&disks, EngineOptions::default());
    for (target, waits) in [("old", true), ("free", false)] {
        let ino = create(&engine, "new", Kind::Plain);
        write(&engine, ino, 0, &[1; 4096]);
        if waits {
            create(&engine, target, Kind::Plain);
        }
        faults[0].hold(1);
        let mut first = Box::pin(engine.write(ROOT, ino, 4096, Slice::copy_from(&[2; 4096])));
        assert!((&mut first).now_or_never().is_none());
        write(&engine, ino, 8192, &[3; 4096]);
        assert_eq!(size(&engine, ino), 12_288, "programs see what is written");
        let (old, new) = ((ROOT, place("new")), (ROOT, place(target)));
        let mut rename = Box::pin(engine.rename(old, new, RenameMode::Replace, time(1)));
        let done = (&mut rename).now_or_never();
        assert_eq!(done.is_none(), waits, "{target}");
        faults[0].release();
        let renamed = match done {
            Some(renamed) => {
                block_on(first).unwrap();
                renamed
            }
            None => block_on(join(first, rename)).1,
        };
        assert!(matches!(renamed.unwrap(), Renamed::Moved(replaced) if replaced.is_some() == waits));
        assert_eq!(size(&engine, ino), 12_288);
        block_on(engine.commit()).unwrap();
        let content = [[1; 4096], [2; 4096], [3; 4096]].concat();
        assert_eq!(read_committed(&disks, ino), content, "{target}");
    }
    drop(engine);
    disks.assert_consistent();
    disks.assert_checked_by_program();
}

#[test]
fn data_and_holes_are_found() {
    let Some(disks) = Disks::make(1, 256, &SINGLE) else { return };
    let (engine, _) = open(&disks, EngineOptions::default());
    let find = |ino, from| block_on(engine.next_data(ROOT, ino, from)).unwrap();
    let small = create(&engine, "small", Kind::Plain);
    assert_eq!(find(small, 0), None);
    write(&engine, small, 0, b"in the item");
    assert_eq!((find(small, 0), find(small, 5), find(small, 11)), (Some(0..11), Some(5..11), None));
    let large = create(&engine, "large", Kind::Plain);
    // Each second sector, in more items than one step reads.
    let sectors = 700_u64;
    for index in (0..sectors).step_by(2) {
        write(&engine, large, index * 4096, &[7; 4096]);
    }
    let (mut at, mut count) = (0, 0);
    while let Some(run) = find(large, at) {
        assert_eq!(run, count * 8192..count * 8192 + 4096);
        (at, count) = (run.end, count + 1);
    }
    assert_eq!(count, sectors / 2);
    // Space that was never written is a hole, and extents that touch are one run.
    block_on(engine.allocate_range(ROOT, large, (0, sectors * 4096), false)).unwrap();
    assert_eq!(find(large, 4096), Some(8192..12_288));
    write(&engine, large, 0, &vec![8; (sectors * 4096) as usize]);
    assert_eq!(find(large, 100), Some(100..sectors * 4096));
    write(&engine, large, sectors * 4096, b"the end");
    assert_eq!(find(large, sectors * 4096 + 3), Some(sectors * 4096 + 3..sectors * 4096 + 7));
    assert!(matches!(block_on(engine.next_data(ROOT, TOP, 0)), Err(EngineError::Change(_))), "a directory");
}

#[test]
fn nothing_is_committed_where_nothing_changed() {
    let Some(disks) = Disks::make(1, 256, &SINGLE) else { return };
    let (engine, _) = open(&disks, EngineOptions::default());
    let durable = engine.durable_generation();
    assert!(!engine.is_dirty());
    assert_eq!(block_on(engine.sync()).unwrap(), durable);
    let ino = create(&engine, "file", Kind::Plain);
    assert!(engine.is_dirty());
    assert_eq!(block_on(engine.sync()).unwrap(), durable + 1);
    assert_eq!((engine.is_dirty(), block_on(engine.fsync(ROOT, ino)).unwrap()), (false, durable + 1));
    write(&engine, ino, 0, &[1; 5000]);
    assert_eq!(block_on(engine.fsync(ROOT, ino)).unwrap(), durable + 2);
    assert_eq!(read_committed(&disks, ino), [1; 5000]);
    assert_eq!(block_on(engine.commit()).unwrap(), durable + 3, "a commit that is wanted is made");
}

#[test]
fn free_space_is_that_of_data_and_stays_when_it_is_discarded() {
    let Some(disks) = Disks::make(2, 256, &["-m", "raid1", "-d", "raid1"]) else { return };
    let (engine, _) = open(&disks, EngineOptions::default());
    let before = engine.data_space();
    assert_eq!(before.total_bytes, 256 << 20, "of two copies, one counts");
    assert!(before.free_bytes > 100 << 20 && before.free_bytes < before.total_bytes);
    let ino = create(&engine, "file", Kind::Plain);
    let content: Vec<u8> = (0..3 << 20).map(|_| fastrand::u8(..)).collect();
    write(&engine, ino, 0, &content);
    let after = engine.data_space();
    assert_eq!(before.free_bytes - after.free_bytes, 3 << 20, "at once");
    block_on(engine.commit()).unwrap();
    assert!(engine.data_space().used_bytes >= before.used_bytes + (3 << 20));
    let discarded = block_on(engine.discard_free(0)).unwrap();
    assert!(discarded > 0 && discarded < before.free_bytes, "{discarded}");
    assert_eq!(block_on(engine.discard_free(u64::MAX)).unwrap(), 0, "no run is as long");
    assert_eq!(engine.data_space().free_bytes, after.free_bytes);
    assert_content(&engine, ino, &content);
    write(&engine, ino, 1 << 20, &content);
    block_on(engine.commit()).unwrap();
    drop(engine);
    disks.assert_consistent();
}

#[test]
fn a_renamed_file_leaves_a_whiteout_and_directories_know_their_parents() {
    let Some(disks) = Disks::make(1, 256, &SINGLE) else { return };
    let (engine, _) = open(&disks, EngineOptions::default());
    let ino = create(&engine, "file", Kind::Plain);
    let owner = Ownership { uid: 1, gid: 2, permissions: 0 };
    let renamed = engine.rename_to_whiteout(ROOT, place("file"), place("moved"), &owner, time(5));
    assert_eq!(block_on(renamed).unwrap(), Renamed::Moved(None));
    let look_up = |name| block_on(engine.lookup(ROOT, place(name))).unwrap().unwrap();
    assert_eq!(look_up("moved").target, Resolved::Inode(ino));
    let whiteout = look_up("file");
    assert_eq!(whiteout.kind, FileType::CharacterDevice);
    let Resolved::Inode(device) = whiteout.target else { panic!("{whiteout:?}") };
    let item = block_on(engine.stat(ROOT, device)).unwrap();
    assert_eq!((item.rdev.get(), item.uid.get(), item.mode.get() & 0o7777), (0, 1, 0));
    assert_eq!(block_on(engine.parent(ROOT, TOP)).unwrap(), None);
    block_on(engine.commit()).unwrap();
    drop(engine);
    disks.assert_consistent();
}

#[test]
fn a_write_leaves_the_times_where_that_is_wanted() {
    let Some(disks) = Disks::make(1, 256, &SINGLE) else { return };
    let (engine, _) = open(&disks, EngineOptions::default());
    for bytes in [10, 10_000] {
        let ino = create(&engine, &format!("{bytes}"), Kind::Plain);
        let written = |engine: &Engine| block_on(engine.stat(ROOT, ino)).unwrap().mtime;
        let before = written(&engine);
        let data = || Slice::copy_from(&vec![1; bytes]);
        block_on(engine.write_as(ROOT, ino, (0, data()), mode(false))).unwrap();
        assert_eq!((written(&engine), size(&engine, ino)), (before, bytes as u64));
        block_on(engine.write_as(ROOT, ino, (0, data()), mode(true))).unwrap();
        assert_ne!(written(&engine), before);
    }
}
