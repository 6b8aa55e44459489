//! Power cuts: every state that one can leave of the devices has a whole filesystem, the one of the last transaction that
//! was durable or of the one that was being committed.

use futures_executor::block_on;
use sealblock_block::RequestKind;
use sealblock_btrfs::Filesystem;
use sealblock_btrfs_engine::change::Change;
use sealblock_btrfs_engine::drop::Dropped;
use sealblock_btrfs_engine::engine::{Engine, EngineOptions};
use sealblock_btrfs_format::key::objectid;
use sealblock_btrfs_format::superblock::COPY_OFFSETS;
use sealblock_proofs_btrfs_images::programs::{Loops, Mount, run};
use sealblock_recorder::{CrashOptions, CrashState, CrashStates, Discarded, Image, Options, Recorder};

use crate::disks::Disks;
use crate::drop;
use crate::items::Attributes;
use crate::{assert_scrubbed, findings, images_of, open_devices};

/// Bytes of a node, unless an option says otherwise.
const NODE_BYTES: usize = 16_384;

fn open(state: &CrashState) -> Filesystem {
    let devices = state.images.iter().enumerate().map(|(index, image)| image.device(&format!("crashed {index}")));
    open_devices(devices).unwrap_or_else(|error| panic!("state {} {:?}: {error}", state.index, state.survivors()))
}

/// The filesystem of a state is whole, and not older than the last commit that returned.
fn assert_whole(state: &CrashState, first: u64) {
    let filesystem = open(state);
    let durable = state.marks().filter_map(|mark| mark.strip_prefix("commit ")?.parse::<u64>().ok()).max();
    let generation = filesystem.superblock().generation.get();
    assert!(generation >= durable.unwrap_or(first), "state {}: {generation} is older than {durable:?}", state.index);
    // No device missed more than a superblock, so none is stale, and the opening commit of the next mount makes them equal.
    assert!(filesystem.storage().devices.iter().all(|(_, device)| !device.is_stale), "state {}", state.index);
    let mut findings = findings(&filesystem);
    findings.retain(|finding| !finding.starts_with("superblock: "));
    assert!(findings.is_empty(), "state {} {:?}: {findings:#?}", state.index, state.survivors());
}

/// Runs changes with a commit after each round, and returns what the devices saw.
fn record(images: Vec<Image>, seed: u64, rounds: usize) -> Recorder {
    record_with(images, Options { seed, ..Options::default() }, EngineOptions::default(), rounds)
}

fn record_with(images: Vec<Image>, options: Options, engine: EngineOptions, rounds: usize) -> Recorder {
    let seed = options.seed;
    let recorder = Recorder::new(images, options);
    let opened = open_devices(recorder.devices()).unwrap();
    let engine = block_on(Engine::open(&opened, engine)).unwrap();
    recorder.mark(format!("commit {}", engine.durable_generation()));
    let mut attributes = Attributes::new(seed);
    let (mut snapshots, mut dying) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        for index in 0..attributes.random.usize(1..60) {
            let changes = attributes.change(500);
            let change = Change::of(objectid::FS_TREE, changes);
            block_on(engine.change(|transaction| transaction.apply_change(&change))).unwrap();
            if index == 20 {
                snapshots.push(drop::snapshot(&engine, objectid::FS_TREE, &format!("{seed} {round}")));
            }
        }
        if round % 2 == 1 && !snapshots.is_empty() {
            let id = snapshots.remove(0);
            drop::delete(&engine, id);
            dying.push(id);
        }
        dying.retain(|id| {
            // Some steps in each transaction.
            let mut steps = (0..3).map(|_| block_on(engine.change(|transaction| transaction.drop_step(*id))).unwrap());
            steps.all(|step| step == Dropped::Some)
        });
        let generation = block_on(engine.commit()).unwrap();
        recorder.mark(format!("commit {generation}"));
    }
    recorder
}

fn crash_options(seed: u64, limit: usize) -> CrashOptions {
    CrashOptions { seed, superblocks: COPY_OFFSETS[..2].to_vec(), limit, ..CrashOptions::default() }
}

#[test]
fn every_state_after_a_power_cut_is_whole() {
    for (devices, options, limit) in [
        (1, &["-m", "single"][..], 500),
        // So few nodes that their places are used again soon.
        (1, &["-m", "single", "-n", "65536"], 500),
        (1, &["-m", "dup", "-n", "4096"], 500),
        (2, &["-m", "raid1"], 500),
        (3, &["-m", "raid1c3", "-d", "raid0"], 300),
    ] {
        let Some(disks) = Disks::make(devices, 256, options) else { return };
        let images = images_of(&disks);
        let first = disks.open().superblock().generation.get();
        let recorder = record(images, 1, 12);
        let states = CrashStates::new(recorder.log(), &crash_options(1, limit));
        println!("{devices} devices {options:?}: {} states", states.len());
        assert!(states.len() > 100);
        states.iter().for_each(|state| assert_whole(&state, first));
    }
}

/// A second power cut in the next mount must not let anything of the first one appear: both mounts may have had the same
/// transactions and addresses.
#[test]
fn every_state_after_two_power_cuts_is_whole() {
    for (devices, options) in [(1, &["-m", "single"][..]), (2, &["-m", "raid1"])] {
        let Some(disks) = Disks::make(devices, 256, options) else { return };
        let images = images_of(&disks);
        let first = disks.open().superblock().generation.get();
        let states = CrashStates::new(record(images, 2, 3).log(), &crash_options(2, 12));
        let mut count = 0;
        for state in states.iter() {
            let again = record(state.images.clone(), 3, 2);
            let second = CrashStates::new(again.log(), &crash_options(3, 60));
            second.iter().for_each(|state| assert_whole(&state, first));
            count += second.len();
        }
        println!("{devices} devices {options:?}: {count} states");
    }
}

/// A discard that a device runs late must not take what was written to its place since.
#[test]
fn discards_that_are_late_take_nothing() {
    // So few nodes that their places are used again soon.
    for (devices, options) in [(1, &["-m", "single", "-n", "65536"][..]), (4, &["-m", "raid10", "-n", "65536"])] {
        let Some(disks) = Disks::make(devices, 256, options) else { return };
        let images = images_of(&disks);
        let first = disks.open().superblock().generation.get();
        for discarded in [Discarded::Zeroes, Discarded::Garbage] {
            let options = Options { seed: 9, discard_delay: 3, discarded, ..Options::default() };
            let engine = EngineOptions { discards: true, ..EngineOptions::default() };
            let recorder = record_with(images.clone(), options, engine, 12);
            let count = recorder.log().requests().iter().filter(|one| one.kind == RequestKind::Discard).count();
            assert!(count > 0);
            let states = CrashStates::new(recorder.log(), &crash_options(9, 150));
            states.iter().for_each(|state| assert_whole(&state, first));
        }
    }
}

/// A mount wrote nodes and was cut off before its superblock. The next one writes other nodes to the same places, and one
/// of these writes is lost: what lies there is a valid node of the transaction that never was. It is no part of this one.
#[test]
fn what_a_lost_write_leaves_of_a_lost_transaction_is_found() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let base = images_of(&disks).remove(0);
    let cut_off = {
        // All but the superblock of the second transaction, whose first one was empty.
        let opened = record(vec![base.clone()], 11, 0).images().remove(0);
        let mut image = record(vec![base], 11, 1).images().remove(0);
        for offset in &COPY_OFFSETS[..2] {
            let mut superblock = vec![0; 4096];
            opened.read(*offset, &mut superblock);
            image.write(*offset, &superblock);
        }
        image
    };
    // The opening of the next mount is where both have the same places.
    let again = record(vec![cut_off.clone()], 12, 0);
    let is_found =
        |image: &Image| open_devices([image.device("lost write")]).map_or(true, |opened| !findings(&opened).is_empty());
    let mut lost = 0;
    let log = again.log();
    let writes = log.requests().iter().filter(|one| one.kind == RequestKind::Write);
    // One request has several nodes.
    let nodes = writes.flat_map(|request| &request.pieces).flat_map(|piece| {
        let range = piece.range();
        range.clone().step_by(NODE_BYTES).map(move |start| start..range.end.min(start + NODE_BYTES as u64))
    });
    for range in nodes {
        let (mut image, mut damaged) = (again.images().remove(0), again.images().remove(0));
        let mut before = vec![0; (range.end - range.start) as usize];
        damaged.write(range.start, &vec![0xff; before.len()]);
        cut_off.read(range.start, &mut before);
        image.write(range.start, &before);
        let is_superblock = COPY_OFFSETS.contains(&range.start);
        let is_same = image.has_same_content(&again.images()[0]);
        // What is replaced later in the same mount is no part of the filesystem, and damage to it does not matter.
        if is_superblock || is_same || !is_found(&damaged) {
            continue;
        }
        assert!(is_found(&image), "the lost write of {range:?} is not found");
        lost += 1;
    }
    println!("{lost} lost writes are found");
    assert!(lost > 2);
}

/// Linux mounts by the first superblock alone, so here none is torn.
#[test]
fn some_states_are_checked_and_mounted_by_other_programs() {
    for (devices, options) in [(1, &["-m", "dup"][..]), (2, &["-m", "raid1", "-d", "raid1", "-n", "4096"])] {
        let Some(disks) = Disks::make(devices, 128, options) else { return };
        let images = images_of(&disks);
        let options = CrashOptions { atomic_superblocks: true, ..crash_options(7, 8) };
        let states = CrashStates::new(record(images, 7, 6).log(), &options);
        for state in states.iter() {
            for (image, path) in state.images.iter().zip(&disks.images) {
                image.save(path).unwrap();
            }
            let loops = Loops::attach(&disks.images, true).unwrap();
            let checked = run("btrfs", ["check", "--readonly", &loops.devices()[0]]);
            assert!(checked.is_ok(), "state {} {:?}: {}", state.index, state.survivors(), checked.unwrap_err());
            std::mem::drop(loops);
            let mount = Mount::new(&disks.images, "noatime").unwrap();
            std::fs::write(mount.path("of the kernel"), vec![1; 100_000]).unwrap();
            mount.sync().unwrap();
            assert_scrubbed(&mount);
            mount.unmount().unwrap();
        }
    }
}
