//! Subvolumes and snapshots under changes: each must go on to have what it had when it was made, in the engine and for
//! the kernel.

use std::collections::BTreeMap;

use futures_executor::block_on;
use sealblock_btrfs_engine::engine::{Engine, EngineOptions};
use sealblock_btrfs_engine::inode::Ownership;
use sealblock_btrfs_engine::names::{NewFile, Place, RenameMode, Renamed};
use sealblock_btrfs_engine::operations::{NewSnapshot, Resolved, SubvolumePlace};
use sealblock_btrfs_engine::xattrs::XattrMode;
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_btrfs_format::key::objectid;
use sealblock_proofs_btrfs_images::manifest::Manifest;
use sealblock_proofs_btrfs_images::programs::{Mount, run};

use crate::disks::Disks;
use crate::scan::{TOP, assert_same, scan, scan_alone, without_content};
use crate::{assert_scrubbed, share};

const ROOT: u64 = objectid::FS_TREE;
const OWNER: Ownership = Ownership { uid: 0, gid: 0, permissions: 0o750 };

fn now() -> Timespec {
    Timespec { seconds: 1_700_000_000.into(), nanoseconds: 1.into() }
}

fn open(disks: &Disks) -> Engine {
    block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap()
}

fn commit(engine: &Engine, disks: &Disks) {
    block_on(engine.commit()).unwrap();
    disks.assert_consistent();
}

fn uuid(random: &mut fastrand::Rng) -> [u8; 16] {
    random.u128(1..).to_le_bytes()
}

fn at(root: u64, name: &str) -> SubvolumePlace<'_> {
    SubvolumePlace { root, place: in_top(name) }
}

fn in_top(name: &str) -> Place<'_> {
    Place { directory: TOP, name: name.as_bytes() }
}

fn snapshot(engine: &Engine, random: &mut fastrand::Rng, source: u64, to: SubvolumePlace<'_>) -> u64 {
    let new = NewSnapshot { source, uuid: uuid(random), is_read_only: false };
    block_on(engine.create_snapshot(new, to, now())).unwrap()
}

/// Files of a subvolume that are changed at random, by their names in its top directory.
fn change(engine: &Engine, random: &mut fastrand::Rng, root: u64, files: &mut BTreeMap<u64, u64>, steps: usize) {
    for _ in 0..steps {
        let number = random.u64(..3000);
        let (name, now) = (format!("file{number}"), now());
        let place = in_top(&name);
        match files.get(&number) {
            None => {
                let ino = block_on(engine.create(root, place, NewFile::Regular, &OWNER, now)).unwrap();
                files.insert(number, ino);
            }
            Some(_) if random.bool() => {
                let unlinked = block_on(engine.unlink(root, place, now)).unwrap();
                assert!(unlinked.is_orphan && block_on(engine.release(root, unlinked.ino)).unwrap());
                files.remove(&number);
            }
            Some(ino) => {
                let value = vec![random.u8(..); random.usize(..400)];
                block_on(engine.set_xattr(root, *ino, (b"user.a", &value), XattrMode::Set, now)).unwrap();
            }
        }
    }
}

fn kernel_sees(disks: &Disks, ours: &Manifest) {
    disks.save();
    let mount = Mount::new(&disks.images, "noatime").unwrap();
    assert_same(Manifest::scan(&mount.path("")).unwrap(), ours.clone());
    mount.unmount().unwrap();
}

#[test]
fn snapshots_keep_the_moment_while_all_change() {
    for options in [&["-m", "single", "-n", "4096"][..], &["-m", "dup"], &["--mixed", "-n", "4096"]] {
        let Some(disks) = Disks::make(1, 256, options) else { return };
        let (engine, mut random) = (open(&disks), fastrand::Rng::with_seed(3));
        let mut files = BTreeMap::from([(ROOT, BTreeMap::new())]);
        change(&engine, &mut random, ROOT, files.get_mut(&ROOT).unwrap(), 3000);
        // Subvolumes that do not change, and what they had.
        let mut frozen: Vec<(u64, Manifest)> = Vec::new();
        for round in 0..share(16) {
            // Of any subvolume, into any other one; with changes in the same transaction before and after it.
            let all: Vec<u64> = files.keys().copied().collect();
            let (source, parent) = (all[random.usize(..all.len())], all[random.usize(..all.len())]);
            if random.bool() {
                commit(&engine, &disks);
            }
            change(&engine, &mut random, source, files.get_mut(&source).unwrap(), 20);
            let name = format!("snapshot{round}");
            let before = files_of(&engine, source);
            let new = NewSnapshot { source, uuid: uuid(&mut random), is_read_only: round % 3 == 0 };
            let id = block_on(engine.create_snapshot(new, at(parent, &name), now())).unwrap();
            assert_eq!(files_of(&engine, id), before);
            if new.is_read_only {
                frozen.push((id, before));
            } else {
                let copy = files[&source].clone();
                files.insert(id, copy);
            }
            for (root, files) in &mut files {
                change(&engine, &mut random, *root, files, if *root == source { 100 } else { 10 });
            }
            commit(&engine, &disks);
            for (root, files) in &mut files {
                change(&engine, &mut random, *root, files, 10);
            }
            commit(&engine, &disks);
            for (id, expected) in &frozen {
                assert_eq!(files_of(&engine, *id), *expected);
            }
        }
        disks.assert_checked_by_program();
        kernel_sees(&disks, &scan(&engine, ROOT));
        let mount = Mount::new(&disks.images, "noatime").unwrap();
        assert_scrubbed(&mount);
        kernel_changes(&mount);
        mount.unmount().unwrap();
        disks.load();
        let engine = open(&disks);
        disks.assert_consistent();
        for (root, files) in &mut files {
            change(&engine, &mut random, *root, files, 50);
        }
        commit(&engine, &disks);
        disks.assert_checked_by_program();
    }
}

/// The files of a subvolume, without its top, which has other sizes where there are other subvolumes.
fn files_of(engine: &Engine, root: u64) -> Manifest {
    let mut found = without_content(scan_alone(engine, root));
    found.entries.remove(&b""[..]);
    found
}

/// The kernel makes a snapshot, and changes files of the top that the engine does not.
fn kernel_changes(mount: &Mount) {
    let (top, copy) = (mount.path(""), mount.path("of the kernel"));
    run("btrfs", ["subvolume".as_ref(), "snapshot".as_ref(), top.as_os_str(), copy.as_os_str()]).unwrap();
    for index in 0..300 {
        std::fs::write(copy.join(format!("new{index}")), vec![index as u8; 100 * index]).unwrap();
        std::fs::write(mount.path(&format!("new{index}")), vec![1; 5000]).unwrap();
    }
}

#[test]
fn subvolumes_are_made_moved_and_deleted() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let (engine, mut random) = (open(&disks), fastrand::Rng::with_seed(4));
    let new = |to, random: &mut _| block_on(engine.create_subvolume(to, uuid(random), &OWNER, now()));
    let one = new(at(ROOT, "one"), &mut random).unwrap();
    let two = new(at(ROOT, "two"), &mut random).unwrap();
    let inner = new(at(one, "inner"), &mut random).unwrap();
    assert_eq!(new(at(ROOT, "one"), &mut random).unwrap_err().errno(), libc::EEXIST);
    let mkdir = |root, name| block_on(engine.create(root, in_top(name), NewFile::Directory, &OWNER, now())).unwrap();
    let (directory, _) = (mkdir(ROOT, "directory"), mkdir(ROOT, "empty"));
    let file = block_on(engine.create(one, in_top("file"), NewFile::Regular, &OWNER, now())).unwrap();
    commit(&engine, &disks);
    let number = |error: sealblock_btrfs_engine::engine::EngineError| error.errno();
    let rename = |from, to, mode| block_on(engine.rename(from, to, mode, now())).map_err(number);
    let top = |name| (ROOT, in_top(name));
    // Within the subvolume: to a new name, another directory, over an empty directory, exchanged with a file.
    assert_eq!(rename(top("one"), top("uno"), RenameMode::NoReplace), Ok(Renamed::Moved(None)));
    let below = (ROOT, Place { directory, name: b"below" });
    assert_eq!(rename(top("two"), below, RenameMode::Replace), Ok(Renamed::Moved(None)));
    assert!(
        matches!(rename(below, top("empty"), RenameMode::Replace), Ok(Renamed::Moved(Some(gone))) if gone.is_orphan)
    );
    assert_eq!(rename(top("uno"), top("empty"), RenameMode::Exchange), Ok(Renamed::Exchanged));
    assert_eq!(rename(top("directory"), top("uno"), RenameMode::Exchange), Ok(Renamed::Exchanged));
    commit(&engine, &disks);
    // Now `uno` is the directory, `directory` is two, and `empty` is one.
    let resolved = |name| block_on(engine.lookup(ROOT, in_top(name))).unwrap().unwrap().target;
    assert_eq!(resolved("uno"), Resolved::Inode(directory));
    assert_eq!((resolved("directory"), resolved("empty")), (Resolved::Subvolume(two), Resolved::Subvolume(one)));
    assert_eq!(rename(top("directory"), top("empty"), RenameMode::Replace), Err(libc::ENOTEMPTY));
    assert_eq!(rename(top("uno"), top("empty"), RenameMode::Replace), Err(libc::ENOTEMPTY));
    assert_eq!(rename((one, in_top("file")), (two, in_top("file")), RenameMode::Replace), Err(libc::EXDEV));
    // Into another subvolume, but not below itself.
    assert_eq!(rename(top("empty"), (inner, in_top("x")), RenameMode::Replace), Err(libc::EINVAL));
    assert_eq!(rename(top("empty"), (two, in_top("x")), RenameMode::Replace), Ok(Renamed::Moved(None)));
    commit(&engine, &disks);
    let remove = |to| block_on(engine.delete_subvolume(to, now())).map_err(number);
    let rmdir = |root, name| block_on(engine.rmdir(root, in_top(name), now())).map_err(number);
    assert_eq!(rmdir(ROOT, "directory"), Err(libc::ENOTEMPTY));
    only_empty_subvolumes_are_removed_as_directories(&engine, at(ROOT, "directory"));
    assert_eq!((remove(at(ROOT, "directory")), remove(at(ROOT, "uno"))), (Err(libc::ENOTEMPTY), Err(libc::EINVAL)));
    // A snapshot has what is left of the subvolumes in it.
    let copy = snapshot(&engine, &mut random, two, at(ROOT, "copy"));
    let left = block_on(engine.lookup(copy, in_top("x"))).unwrap().unwrap().target;
    assert_eq!(left, Resolved::Elsewhere(one));
    assert_eq!(rename((copy, in_top("x")), (copy, in_top("y")), RenameMode::Replace), Err(libc::ENOTEMPTY));
    commit(&engine, &disks);
    kernel_sees(&disks, &scan(&engine, ROOT));
    assert_eq!(rmdir(copy, "x"), Ok(None));
    commit(&engine, &disks);
    read_only_subvolumes_do_not_change(&engine, one, file);
    // The nodes of deleted subvolumes are dropped by others: here they stay, and the kernel drops them.
    assert_eq!(remove(at(one, "inner")), Ok(inner));
    assert_eq!(block_on(engine.stat(inner, TOP)).map_err(number), Err(libc::ENOENT));
    block_on(engine.commit()).unwrap();
    assert_eq!((remove(at(two, "x")), remove(at(ROOT, "copy"))), (Ok(one), Ok(copy)));
    block_on(engine.commit()).unwrap();
    kernel_sees(&disks, &scan(&engine, ROOT));
    disks.assert_checked_by_program();
    let mount = Mount::new(&disks.images, "noatime").unwrap();
    run("btrfs", ["subvolume", "sync", mount.path("").to_str().unwrap()]).unwrap();
    mount.unmount().unwrap();
    disks.load();
    disks.assert_consistent();
    let engine = open(&disks);
    assert!(new_number_is_higher(&engine, &mut random) > two);
    commit(&engine, &disks);
}

fn new_number_is_higher(engine: &Engine, random: &mut fastrand::Rng) -> u64 {
    let made = block_on(engine.create_subvolume(at(ROOT, "later"), uuid(random), &OWNER, now())).unwrap();
    let again = snapshot(engine, random, made, at(made, "in itself"));
    assert!(again > made);
    again
}

/// As in Linux since 4.18.
fn only_empty_subvolumes_are_removed_as_directories(engine: &Engine, full: SubvolumePlace<'_>) {
    let remove = |to| block_on(engine.delete_empty_subvolume(to, now())).map_err(|error| error.errno());
    let name = "for rmdir";
    let id = block_on(engine.create_subvolume(at(ROOT, name), [0x77; 16], &OWNER, now())).unwrap();
    let file = block_on(engine.create(id, in_top("file"), NewFile::Regular, &OWNER, now())).unwrap();
    assert_eq!((remove(full), remove(at(ROOT, name))), (Err(libc::ENOTEMPTY), Err(libc::ENOTEMPTY)));
    let unlinked = block_on(engine.unlink(id, in_top("file"), now())).unwrap();
    assert!(unlinked.ino == file && block_on(engine.release(id, file)).unwrap());
    block_on(engine.set_read_only(id, true)).unwrap();
    assert_eq!((remove(at(ROOT, name)), remove(at(ROOT, name))), (Ok(id), Err(libc::ENOENT)));
    assert_eq!(remove(at(ROOT, "uno")), Err(libc::EINVAL), "a directory");
}

fn read_only_subvolumes_do_not_change(engine: &Engine, root: u64, file: u64) {
    block_on(engine.set_read_only(root, true)).unwrap();
    let (place, new) = (in_top("file"), in_top("new"));
    let attribute = (&b"user.a"[..], &b"1"[..]);
    let changes = sealblock_btrfs_engine::inode::AttributeChanges::default();
    let results = [
        block_on(engine.create(root, new, NewFile::Regular, &OWNER, now())).map(drop),
        block_on(engine.create_unnamed(root, TOP, &OWNER, now())).map(drop),
        block_on(engine.link(root, file, new, now())),
        block_on(engine.unlink(root, place, now())).map(drop),
        block_on(engine.rmdir(root, place, now())).map(drop),
        block_on(engine.rename((root, place), (root, new), RenameMode::Replace, now())).map(drop),
        block_on(engine.set_xattr(root, file, attribute, XattrMode::Set, now())),
        block_on(engine.remove_xattr(root, file, b"user.a", now())),
        block_on(engine.set_attributes(root, file, &changes, now())).map(drop),
        block_on(engine.delete_subvolume(at(root, "inner"), now())).map(drop),
        block_on(engine.create_subvolume(at(root, "new"), [1; 16], &OWNER, now())).map(drop),
    ];
    for result in results {
        assert_eq!(result.unwrap_err().errno(), libc::EROFS);
    }
    assert!(block_on(engine.is_read_only(root)).unwrap());
    assert!(block_on(engine.lookup(root, place)).unwrap().is_some());
    block_on(engine.set_read_only(root, false)).unwrap();
    block_on(engine.set_xattr(root, file, attribute, XattrMode::Set, now())).unwrap();
}

/// Snapshots share nodes, so each change takes space, and deletions do too.
#[test]
fn a_filesystem_full_of_snapshots_goes_on() {
    for (seed, mebibytes, options) in [
        (1, 64, &["-m", "single", "-n", "4096"][..]),
        (2, 110, &["-m", "dup", "-n", "4096"]),
        (3, 64, &["-m", "single"]),
        (4, 24, &["--mixed", "-n", "4096"]),
    ] {
        let Some(disks) = Disks::make(1, mebibytes, options) else { return };
        let (engine, mut random) = (open(&disks), fastrand::Rng::with_seed(seed));
        let mut files = BTreeMap::from([(ROOT, BTreeMap::new())]);
        change(&engine, &mut random, ROOT, files.get_mut(&ROOT).unwrap(), 1000);
        let (mut refused, mut made) = (0, 0);
        while refused < share(40) {
            let all: Vec<u64> = files.keys().copied().collect();
            let (source, parent) = (all[random.usize(..all.len())], all[random.usize(..all.len())]);
            let name = format!("snapshot{}", random.u64(..));
            let new = NewSnapshot { source, uuid: uuid(&mut random), is_read_only: false };
            match block_on(engine.create_snapshot(new, at(parent, &name), now())) {
                Ok(id) => drop(files.insert(id, files[&source].clone())),
                Err(error) => {
                    assert_eq!(error.errno(), libc::ENOSPC, "{error}");
                    refused += 1;
                }
            }
            made += 1;
            for _ in 0..4 {
                let root = all[random.usize(..all.len())];
                refused += fill_or_empty(&engine, &mut random, root, files.get_mut(&root).unwrap());
            }
            if random.u8(..4) == 0 {
                block_on(engine.commit()).unwrap();
            }
            if made % 20 == 0 {
                commit(&engine, &disks);
            }
        }
        commit(&engine, &disks);
        eprintln!("{options:?}: {made} rounds, {} subvolumes", files.len());
        for (root, files) in &mut files {
            for number in std::mem::take(files).into_keys() {
                let name = format!("file{number}");
                let unlinked = block_on(engine.unlink(*root, in_top(&name), now()));
                let released = unlinked.map(|unlinked| block_on(engine.release(*root, unlinked.ino)).map(drop));
                if let Err(error) = released.and_then(|released| released) {
                    assert_eq!(error.errno(), libc::ENOSPC, "{error}");
                }
            }
        }
        commit(&engine, &disks);
        disks.assert_checked_by_program();
    }
}

/// Changes some files of a subvolume. Returns the number of changes for which there was no space.
fn fill_or_empty(engine: &Engine, random: &mut fastrand::Rng, root: u64, files: &mut BTreeMap<u64, u64>) -> usize {
    let mut refused = 0;
    for _ in 0..random.usize(..40) {
        let number = random.u64(..3000);
        let name = format!("file{number}");
        let value = vec![random.u8(..); random.usize(..900)];
        let changed = match files.get(&number).copied() {
            None => block_on(engine.create(root, in_top(&name), NewFile::Regular, &OWNER, now())).map(|ino| {
                files.insert(number, ino);
            }),
            Some(ino) if random.u8(..3) > 0 => {
                block_on(engine.set_xattr(root, ino, (b"user.a", &value), XattrMode::Set, now()))
            }
            Some(ino) => block_on(engine.unlink(root, in_top(&name), now())).and_then(|_| {
                let released = block_on(engine.release(root, ino)).map(drop);
                files.remove(&number);
                released
            }),
        };
        if let Err(error) = changed {
            assert_eq!(error.errno(), libc::ENOSPC, "{error}");
            refused += 1;
        }
    }
    refused
}
