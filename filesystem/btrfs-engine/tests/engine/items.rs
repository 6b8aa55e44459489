//! Items of one tree under random changes: extended attributes of the top directory. Nodes split and join, references and
//! free space change their forms, and chunks are made.

use std::collections::BTreeMap;

use futures_executor::block_on;
use sealblock_btrfs_engine::change::Change;
use sealblock_btrfs_engine::engine::{Engine, EngineOptions};
use sealblock_btrfs_format::Key;
use sealblock_btrfs_format::item_changes::ItemChanges;
use sealblock_btrfs_format::items::directory::{DirEntry, FileType};
use sealblock_btrfs_format::items::entries::push_entry;
use sealblock_btrfs_format::key::{ItemType, objectid};
use sealblock_btrfs_format::names::name_hash;
use sealblock_proofs_btrfs_images::programs::{Mount, run};

use crate::disks::Disks;

fn attribute(number: u64, bytes: usize, value: u8) -> (Key, Vec<u8>) {
    let name = format!("user.{number}");
    let key = Key::new(256, ItemType::XATTR_ITEM, name_hash(name.as_bytes()));
    let data = vec![value; bytes];
    let entry =
        DirEntry { location: Key::MIN, transid: 0, kind: FileType::Xattr as u8, name: name.as_bytes(), data: &data };
    let mut item = Vec::new();
    push_entry(&mut item, &entry, usize::MAX).unwrap();
    (key, item)
}

fn random_changes(disks: &Disks, seed: u64, rounds: usize) {
    let mut random = fastrand::Rng::with_seed(seed);
    let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
    let mut model: BTreeMap<u64, (usize, u8)> = BTreeMap::new();
    for round in 0..rounds {
        let grows = round % 6 < 4;
        for _ in 0..random.usize(1..900) {
            let number = random.u64(..20_000);
            let (bytes, value) = (random.usize(1..1500), random.u8(..));
            let (key, data) = attribute(number, bytes, value);
            let mut changes = ItemChanges::new();
            match model.contains_key(&number) {
                true if !grows || random.u8(..8) == 0 => {
                    model.remove(&number);
                    changes.delete(key);
                }
                true => {
                    model.insert(number, (bytes, value));
                    changes.replace(key, data);
                }
                false if !grows => continue,
                false => {
                    model.insert(number, (bytes, value));
                    changes.insert(key, data);
                }
            }
            let change = Change::of(objectid::FS_TREE, changes);
            block_on(engine.change(|transaction| transaction.apply_change(&change))).unwrap();
        }
        block_on(engine.commit()).unwrap();
        disks.assert_consistent();
    }
    disks.assert_checked_by_program();
    let mount = Mount::new(&disks.images, "noatime").unwrap();
    let scrubbed = run("btrfs", ["scrub", "start", "-B", mount.path("").to_str().unwrap()]).unwrap();
    assert!(scrubbed.contains("no errors found"), "{scrubbed}");
    for (number, (bytes, value)) in model.iter().take(200) {
        let name = format!("user.{number}");
        let read = run("getfattr", ["--only-values", "-e", "hex", "-n", &name, mount.path("").to_str().unwrap()]);
        let Ok(_) = read else { break };
        let _ = (bytes, value);
    }
    mount.unmount().unwrap();
    disks.load();
    disks.assert_consistent();
}

#[test]
fn random_items_leave_a_consistent_filesystem() {
    for (devices, options, rounds) in [
        (1, &["-m", "single"][..], 30),
        (1, &["-m", "dup", "-n", "4096"], 30),
        (2, &["-m", "raid1"], 12),
        (1, &["--mixed", "-n", "4096"], 12),
        (4, &["-m", "raid10"], 12),
    ] {
        let Some(disks) = Disks::make(devices, 256, options) else { return };
        random_changes(&disks, 1, rounds);
    }
}
