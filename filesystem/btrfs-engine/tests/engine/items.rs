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
use sealblock_proofs_btrfs_images::programs::Mount;

use crate::disks::Disks;
use crate::{assert_scrubbed, share};

fn attribute(family: u64, number: u64, bytes: usize, value: u8) -> (Key, Vec<u8>) {
    let name = format!("user.{family}.{number}");
    let key = Key::new(256, ItemType::XATTR_ITEM, name_hash(name.as_bytes()));
    let data = vec![value; bytes];
    let entry =
        DirEntry { location: Key::MIN, transid: 0, kind: FileType::Xattr as u8, name: name.as_bytes(), data: &data };
    let mut item = Vec::new();
    push_entry(&mut item, &entry, usize::MAX).unwrap();
    (key, item)
}

/// Random changes of the attributes of the top directory.
pub struct Attributes {
    pub random: fastrand::Rng,
    /// Attributes of different families have different names.
    family: u64,
    model: BTreeMap<u64, (usize, u8)>,
    pub grows: bool,
}

impl Attributes {
    pub fn new(seed: u64) -> Attributes {
        Attributes { random: fastrand::Rng::with_seed(seed), family: seed, model: BTreeMap::new(), grows: true }
    }

    /// The same attributes, for a snapshot.
    pub fn clone_of(&self, seed: u64) -> Attributes {
        let (random, model) = (fastrand::Rng::with_seed(seed), self.model.clone());
        Attributes { random, family: self.family, model, grows: true }
    }

    /// One change of one of so many attributes.
    pub fn change(&mut self, most: u64) -> ItemChanges {
        let mut changes = ItemChanges::new();
        let number = self.random.u64(..most);
        let (bytes, value) = (self.random.usize(1..1500), self.random.u8(..));
        let (key, data) = attribute(self.family, number, bytes, value);
        match self.model.contains_key(&number) {
            true if !self.grows || self.random.u8(..8) == 0 => {
                self.model.remove(&number);
                changes.delete(key);
            }
            true => {
                self.model.insert(number, (bytes, value));
                changes.replace(key, data);
            }
            false if !self.grows => {}
            false => {
                self.model.insert(number, (bytes, value));
                changes.insert(key, data);
            }
        }
        changes
    }
}

fn random_changes(disks: &Disks, seed: u64, rounds: usize) {
    let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
    let mut attributes = Attributes::new(seed);
    for round in 0..rounds {
        attributes.grows = round % 6 < 4;
        for _ in 0..attributes.random.usize(1..900) {
            let change = Change::of(objectid::FS_TREE, attributes.change(20_000));
            block_on(engine.change(|transaction| transaction.apply_change(&change))).unwrap();
        }
        block_on(engine.commit()).unwrap();
        disks.assert_consistent();
    }
    disks.assert_checked_by_program();
    let mount = Mount::new(&disks.images, "noatime").unwrap();
    assert_scrubbed(&mount);
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
        random_changes(&disks, 1, share(rounds));
    }
}
