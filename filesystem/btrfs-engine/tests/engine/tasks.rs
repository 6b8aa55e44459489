//! Several tasks change the filesystem while transactions are committed, on devices that let them wait, with the least
//! memory for nodes.

use std::cell::Cell;
use std::collections::BTreeSet;

use futures_executor::block_on;
use futures_util::future::{join, join_all};
use sealblock_btrfs_engine::engine::{Engine, EngineOptions};
use sealblock_btrfs_engine::inode::Ownership;
use sealblock_btrfs_engine::names::{NewFile, Place};
use sealblock_btrfs_engine::operations::{NewSnapshot, SubvolumePlace};
use sealblock_btrfs_engine::xattrs::XattrMode;
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_btrfs_format::key::objectid;
use sealblock_proofs_btrfs_images::manifest::Manifest;
use sealblock_proofs_btrfs_images::programs::Mount;

use crate::disks::{Disks, turns};
use crate::scan::{TOP, assert_same, scan};

const ROOT: u64 = objectid::FS_TREE;
const OWNER: Ownership = Ownership { uid: 0, gid: 0, permissions: 0o700 };

fn now() -> Timespec {
    Timespec { seconds: 1_700_000_000.into(), nanoseconds: 0.into() }
}

/// One task: files in its own directory of a subvolume, and snapshots of the subvolume now and then. Returns the names.
async fn change(engine: &Engine, root: u64, number: u64, steps: u64) -> BTreeSet<u64> {
    let mut random = fastrand::Rng::with_seed(number);
    let name = format!("directory{number}");
    let place = Place { directory: TOP, name: name.as_bytes() };
    let directory = engine.create(root, place, NewFile::Directory, &OWNER, now()).await.unwrap();
    let mut names = BTreeSet::new();
    for step in 0..steps {
        turns(random.usize(..20)).await;
        let file = random.u64(..400);
        let name = format!("file{file}");
        let place = Place { directory, name: name.as_bytes() };
        if names.remove(&file) {
            let unlinked = engine.unlink(root, place, now()).await.unwrap();
            assert!(engine.release(root, unlinked.ino).await.unwrap());
        } else {
            let ino = engine.create(root, place, NewFile::Regular, &OWNER, now()).await.unwrap();
            let value = vec![random.u8(..); random.usize(..500)];
            engine.set_xattr(root, ino, (b"user.a", &value), XattrMode::Create, now()).await.unwrap();
            names.insert(file);
        }
        if step % 100 == 50 {
            let name = format!("snapshot{number}-{step}");
            let to = SubvolumePlace { root: ROOT, place: Place { directory: TOP, name: name.as_bytes() } };
            let uuid = random.u128(1..).to_le_bytes();
            engine.create_snapshot(NewSnapshot { source: root, uuid, is_read_only: false }, to, now()).await.unwrap();
        }
    }
    names
}

#[test]
fn tasks_change_files_while_transactions_are_committed() {
    for options in [&["-m", "single", "-n", "4096"][..], &["-m", "dup"]] {
        let Some(disks) = Disks::make(1, 256, options) else { return };
        let engine = block_on(Engine::open(
            &disks.open_waiting(5),
            EngineOptions { cache_bytes: 0, ..EngineOptions::default() },
        ))
        .unwrap();
        let to = SubvolumePlace { root: ROOT, place: Place { directory: TOP, name: b"other" } };
        let other = block_on(engine.create_subvolume(to, [1; 16], &OWNER, now())).unwrap();
        let is_done = Cell::new(false);
        let tasks = async {
            let names = join_all((0..8).map(|task| change(&engine, [ROOT, other][task as usize % 2], task, 700))).await;
            is_done.set(true);
            names
        };
        let commits = async {
            let mut count = 0;
            while !is_done.get() {
                engine.commit().await.unwrap();
                count += 1;
                if count % 20 == 0 {
                    disks.check().await;
                }
            }
            count
        };
        let (names, commits) = block_on(join(tasks, commits));
        assert!(commits > 20, "{commits}");
        block_on(engine.commit()).unwrap();
        disks.assert_consistent();
        disks.assert_checked_by_program();
        let found = scan(&engine, ROOT);
        for (task, names) in names.iter().enumerate() {
            let prefix = format!("{}directory{task}/", if task % 2 == 0 { "" } else { "other/" });
            let expected: BTreeSet<Vec<u8>> = names.iter().map(|file| format!("{prefix}file{file}").into()).collect();
            let found = found.entries.keys().filter(|path| path.starts_with(prefix.as_bytes())).cloned();
            assert_eq!(found.collect::<BTreeSet<_>>(), expected);
        }
        let mount = Mount::new(&disks.images, "noatime").unwrap();
        assert_same(Manifest::scan(&mount.path("")).unwrap(), found);
        mount.unmount().unwrap();
    }
}
