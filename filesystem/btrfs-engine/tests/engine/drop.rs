//! Snapshots that share nodes with their sources, changes of both, and their deletion in random orders.

use std::collections::BTreeMap;

use futures_executor::block_on;
use sealblock_btrfs_engine::change::Change;
use sealblock_btrfs_engine::drop::Dropped;
use sealblock_btrfs_engine::engine::{Engine, EngineError, EngineOptions};
use sealblock_btrfs_engine::names::Place;
use sealblock_btrfs_engine::plan::Plan;
use sealblock_btrfs_engine::subvolumes::{Entry, NewSubvolume};
use sealblock_btrfs_engine::transaction::{ChangeError, Transaction};
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_btrfs_format::key::objectid;
use sealblock_proofs_btrfs_images::programs::{Mount, run};

use crate::disks::Disks;
use crate::items::Attributes;
use crate::{assert_scrubbed, share};

const TOP: u64 = 256;

fn time() -> Timespec {
    Timespec { seconds: 1_800_000_000.into(), nanoseconds: 5.into() }
}

/// Plans the entry of a subvolume in the top directory of another one.
fn plan_entry(
    transaction: &Transaction,
    parent: u64,
    name: &str,
    id: Option<u64>,
) -> Result<(u64, sealblock_btrfs_format::item_changes::ItemChanges), ChangeError> {
    let view = transaction.view(parent)?;
    let geometry = *transaction.geometry();
    let mut plan = Plan::new(&view, transaction.plan_context(&geometry, time()));
    let place = Place { directory: TOP, name: name.as_bytes() };
    let index = match id {
        Some(id) => plan.add_subvolume_entry(place, id)?,
        None => {
            plan.remove_subvolume_entry(place, None)?;
            0
        }
    };
    Ok((index, plan.into_changes()))
}

/// Makes a snapshot in the top directory of the first subvolume.
pub fn snapshot(engine: &Engine, source: u64, name: &str) -> u64 {
    let made = engine.change(|transaction| {
        transaction.open_tree(source)?;
        let id = transaction.next_subvolume()?;
        let (index, items) = plan_entry(transaction, objectid::FS_TREE, name, Some(id))?;
        let uuid = [id as u8 + 1; 16];
        let new = NewSubvolume { id, uuid, now: time(), is_read_only: false };
        let entry = Entry { parent: objectid::FS_TREE, directory: TOP, index, name: name.as_bytes(), items: &items };
        transaction.snapshot(source, new, &entry)?;
        Ok(id)
    });
    block_on(made).unwrap()
}

/// Deletes a subvolume, whose nodes stay.
pub fn delete(engine: &Engine, id: u64) {
    let deleted = engine.change(|transaction| {
        transaction.open_tree(id)?;
        let (parent, directory, index, name) = transaction.place_of(id)?;
        let (_, items) = plan_entry(transaction, parent, std::str::from_utf8(&name).unwrap(), None)?;
        let entry = Entry { parent, directory, index, name: &name, items: &items };
        transaction.delete_subvolume(id, &entry, time())
    });
    block_on(deleted).unwrap();
}

/// Drops a deleted subvolume, with a commit after each number of steps.
fn drop_all(engine: &Engine, disks: &Disks, id: u64, steps: usize) -> usize {
    let mut count = 0;
    loop {
        count += 1;
        match block_on(engine.change(|transaction| transaction.drop_step(id))).unwrap() {
            Dropped::Some => {}
            Dropped::All => return count,
            Dropped::LeftToLinux => panic!("nobody else began"),
        }
        if count % steps == 0 {
            block_on(engine.commit()).unwrap();
            disks.assert_consistent();
        }
    }
}

/// Puts all subvolumes through random changes, snapshots and deletions.
fn rounds(disks: &Disks, seed: u64, rounds: usize) {
    let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
    let mut random = fastrand::Rng::with_seed(seed);
    let mut subvolumes = BTreeMap::from([(objectid::FS_TREE, Attributes::new(seed))]);
    let mut dropped = 0;
    for round in 0..rounds {
        for _ in 0..random.usize(1..400) {
            let ids: Vec<u64> = subvolumes.keys().copied().collect();
            let id = ids[random.usize(..ids.len())];
            let attributes = subvolumes.get_mut(&id).unwrap();
            attributes.grows = random.u8(..3) > 0;
            let change = Change::of(id, attributes.change(4000));
            block_on(engine.change(|transaction| {
                transaction.open_tree(id)?;
                transaction.apply_change(&change)
            }))
            .unwrap();
        }
        if subvolumes.len() < 5 || random.bool() {
            let ids: Vec<u64> = subvolumes.keys().copied().collect();
            let source = ids[random.usize(..ids.len())];
            let id = snapshot(&engine, source, &format!("s{round}"));
            let attributes = subvolumes[&source].clone_of(seed + round as u64);
            subvolumes.insert(id, attributes);
        }
        if random.u8(..4) > 0 {
            block_on(engine.commit()).unwrap();
            disks.assert_consistent();
        }
        if subvolumes.len() > 4 {
            let ids: Vec<u64> = subvolumes.keys().copied().filter(|id| *id != objectid::FS_TREE).collect();
            let id = ids[random.usize(..ids.len())];
            subvolumes.remove(&id);
            delete(&engine, id);
            dropped += drop_all(&engine, disks, id, random.usize(1..40));
        }
    }
    block_on(engine.commit()).unwrap();
    disks.assert_checked_by_program();
    let mount = Mount::new(&disks.images, "noatime").unwrap();
    assert_scrubbed(&mount);
    let listed = run("btrfs", ["subvolume", "list", mount.path("").to_str().unwrap()]).unwrap();
    assert_eq!(listed.lines().count(), subvolumes.len() - 1, "{listed}");
    for (id, _) in subvolumes.iter().filter(|(id, _)| **id != objectid::FS_TREE) {
        let id = id.to_string();
        run("btrfs", ["subvolume", "delete", "--subvolid", &id, mount.path("").to_str().unwrap()]).unwrap();
    }
    run("btrfs", ["subvolume", "sync", mount.path("").to_str().unwrap()]).unwrap();
    mount.unmount().unwrap();
    disks.load();
    disks.assert_consistent();
    println!("{dropped} steps of dropping");
}

#[test]
fn snapshots_are_changed_and_deleted_in_random_orders() {
    for (devices, options, count, seed) in [
        (1, &["-m", "single", "-n", "4096"][..], 40, 1),
        (1, &["-m", "dup"], 25, 2),
        (2, &["-m", "raid1", "-n", "4096"], 25, 3),
    ] {
        let Some(disks) = Disks::make(devices, 256, options) else { return };
        rounds(&disks, seed, share(count));
    }
}

#[test]
fn a_subvolume_that_is_not_deleted_is_not_dropped() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
    let id = snapshot(&engine, objectid::FS_TREE, "snapshot");
    let refused = block_on(engine.change(|transaction| transaction.drop_step(id)));
    assert!(matches!(refused, Err(EngineError::Change(ChangeError::Item(_)))));
    block_on(engine.commit()).unwrap();
    disks.assert_consistent();
}
