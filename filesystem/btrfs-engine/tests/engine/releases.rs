//! Files with data lose their last name and are deleted: what the kernel wrote, alone or shared with a snapshot.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use futures_executor::block_on;
use sealblock_btrfs_engine::engine::{Engine, EngineOptions};
use sealblock_btrfs_engine::inode::Ownership;
use sealblock_btrfs_engine::names::{NewFile, Place};
use sealblock_btrfs_engine::operations::{NewSnapshot, Resolved, SubvolumePlace};
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_btrfs_format::key::objectid;
use sealblock_proofs_btrfs_images::manifest::Manifest;
use sealblock_proofs_btrfs_images::programs::{Mount, run};
use sealblock_runtime_memory::Slice;

use crate::assert_scrubbed;
use crate::disks::Disks;
use crate::scan::TOP;

const ROOT: u64 = objectid::FS_TREE;
const OWNER: Ownership = Ownership { uid: 0, gid: 0, permissions: 0o600 };
const NAMES: [&str; 9] = ["large", "sparse", "inline", "ahead", "reflink", "plain", "zeroes", "hole", "linked"];

fn now() -> Timespec {
    Timespec { seconds: 1_700_000_000.into(), nanoseconds: 0.into() }
}

fn in_top(name: &str) -> Place<'_> {
    Place { directory: TOP, name: name.as_bytes() }
}

/// Files of all kinds of extents, in a folder.
fn fill(folder: &Path) {
    let noise: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(3_000_000).collect();
    fs::write(folder.join("large"), &noise).unwrap();
    fs::write(folder.join("inline"), &noise[..700]).unwrap();
    fs::write(folder.join("zeroes"), vec![0; 1_000_000]).unwrap();
    let path = |name| folder.join(name).to_str().unwrap().to_owned();
    let sparse = File::create(folder.join("sparse")).unwrap();
    for index in 0..300 {
        sparse.write_all_at(&noise[index * 1000..][..4096], index as u64 * 12_288).unwrap();
    }
    File::create(folder.join("hole")).unwrap().set_len(1 << 30).unwrap();
    File::create(folder.join("ahead")).unwrap();
    run("fallocate", ["-n", "-l", "2000000", &path("ahead")]).unwrap();
    File::create(folder.join("plain")).unwrap();
    run("chattr", ["+C", &path("plain")]).unwrap();
    fs::write(folder.join("plain"), &noise[..500_000]).unwrap();
    run("sync", ["-f", folder.to_str().unwrap()]).unwrap();
    run("cp", ["--reflink=always", &path("large"), &path("reflink")]).unwrap();
    File::options().write(true).open(folder.join("reflink")).unwrap().write_all_at(&noise[..8000], 40_960).unwrap();
    fs::write(folder.join("linked"), &noise[..100_000]).unwrap();
    fs::hard_link(folder.join("linked"), folder.join("other name")).unwrap();
}

fn open(disks: &Disks) -> Engine {
    block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap()
}

fn commit(engine: &Engine, disks: &Disks) {
    block_on(engine.commit()).unwrap();
    disks.assert_consistent();
}

fn ino_of(engine: &Engine, root: u64, name: &str) -> u64 {
    match block_on(engine.lookup(root, in_top(name))).unwrap().expect("a name that is there").target {
        Resolved::Inode(ino) => ino,
        other => panic!("{other:?}"),
    }
}

#[test]
fn files_with_data_are_deleted_and_what_a_snapshot_shares_stays() {
    for (options, mount_options) in [
        (&["-m", "single"][..], "noatime,compress-force=zstd"),
        (&["-m", "dup", "-n", "4096"], "noatime"),
        (&["-m", "single", "-O", "^no-holes"], "noatime"),
        (&["--mixed", "-n", "4096"], "noatime"),
    ] {
        let Some(disks) = Disks::make(1, 256, options) else { return };
        let mount = Mount::new(&disks.images, mount_options).unwrap();
        fill(&mount.path(""));
        let (top, copy) = (mount.path(""), mount.path("copy"));
        run("btrfs", ["subvolume".as_ref(), "snapshot".as_ref(), top.as_os_str(), copy.as_os_str()]).unwrap();
        let before = Manifest::scan(&copy).unwrap();
        mount.unmount().unwrap();
        disks.load();
        let mut engine = open(&disks);
        let mut inos = Vec::new();
        for (index, name) in NAMES.into_iter().enumerate() {
            let ino = ino_of(&engine, ROOT, name);
            let unlinked = block_on(engine.unlink(ROOT, in_top(name), now())).unwrap();
            assert_eq!(unlinked.is_orphan, name != "linked");
            if index % 2 == 0 {
                assert_eq!(block_on(engine.release(ROOT, ino)).unwrap(), unlinked.is_orphan);
                commit(&engine, &disks);
            }
            inos.extend(unlinked.is_orphan.then_some(ino));
        }
        commit(&engine, &disks);
        // Half of them are still orphans. A snapshot has none of these, and the next mount deletes them.
        let new = NewSnapshot { source: ROOT, uuid: [9; 16], is_read_only: true };
        let to = SubvolumePlace { root: ROOT, place: in_top("second") };
        let second = block_on(engine.create_snapshot(new, to, now())).unwrap();
        let is_there = |engine: &Engine, root, ino| block_on(engine.stat(root, ino)).is_ok();
        assert!(!inos.iter().any(|ino| is_there(&engine, second, *ino)), "a snapshot has no orphan that is in use");
        assert!(inos.iter().any(|ino| is_there(&engine, ROOT, *ino)), "it may be in use");
        commit(&engine, &disks);
        engine = open(&disks);
        assert!(inos.iter().any(|ino| is_there(&engine, ROOT, *ino)));
        block_on(engine.recover_orphans(ROOT)).unwrap();
        assert!(!inos.iter().any(|ino| is_there(&engine, ROOT, *ino)));
        let unnamed = block_on(engine.create_unnamed(ROOT, TOP, &OWNER, now())).unwrap();
        block_on(engine.link_unnamed(ROOT, unnamed, in_top("named"), now())).unwrap();
        assert!(!block_on(engine.release(ROOT, unnamed)).unwrap(), "it has a name");
        commit(&engine, &disks);
        disks.assert_checked_by_program();
        let mount = Mount::new(&disks.images, "noatime").unwrap();
        let after = Manifest::scan(&mount.path("copy")).unwrap();
        assert_eq!(before.difference(&after), Vec::<String>::new());
        let mut left: Vec<_> = fs::read_dir(mount.path("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["copy", "named", "other name", "second"]);
        assert_scrubbed(&mount);
        mount.unmount().unwrap();
    }
}

/// Many files without names are open while a snapshot is made: it has none of them. What a mount leaves that ends then, the
/// next one deletes in every subvolume, also where nothing is changed.
#[test]
fn no_subvolume_keeps_files_without_names() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let mut engine = open(&disks);
    fn to(name: &str) -> SubvolumePlace<'_> {
        SubvolumePlace { root: ROOT, place: in_top(name) }
    }
    let subvolume = block_on(engine.create_subvolume(to("subvolume"), [7; 16], &OWNER, now())).unwrap();
    let mut inos = Vec::new();
    for root in [ROOT, subvolume] {
        for index in 0..300 {
            let name = format!("file{index}");
            let ino = block_on(engine.create(root, in_top(&name), NewFile::Regular, &OWNER, now())).unwrap();
            block_on(engine.write(root, ino, 0, Slice::copy_from(&[7; 5000]))).unwrap();
            assert!(block_on(engine.unlink(root, in_top(&name), now())).unwrap().is_orphan);
            inos.push((root, ino));
        }
    }
    commit(&engine, &disks);
    let is_there = |engine: &Engine, root, ino| block_on(engine.stat(root, ino)).is_ok();
    for (number, is_read_only) in [(8, false), (9, true)] {
        let new = NewSnapshot { source: subvolume, uuid: [number; 16], is_read_only };
        let name = format!("snapshot{number}");
        let id = block_on(engine.create_snapshot(new, to(&name), now())).unwrap();
        assert!(!inos.iter().any(|(root, ino)| *root == subvolume && is_there(&engine, id, *ino)));
        commit(&engine, &disks);
        disks.assert_checked_by_program();
    }
    assert!(inos.iter().all(|(root, ino)| is_there(&engine, *root, *ino)), "they may be open");
    block_on(engine.set_read_only(subvolume, true)).unwrap();
    commit(&engine, &disks);

    engine = open(&disks);
    block_on(engine.recover_all_orphans(|| true)).unwrap();
    assert!(inos.iter().all(|(root, ino)| is_there(&engine, *root, *ino)), "it was over");
    block_on(engine.recover_all_orphans(|| false)).unwrap();
    assert!(!inos.iter().any(|(root, ino)| is_there(&engine, *root, *ino)));
    commit(&engine, &disks);
    disks.assert_checked_by_program();
}
