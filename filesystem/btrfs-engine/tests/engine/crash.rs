//! Power cuts: every state that one can leave of the devices has a whole filesystem, the one of the last transaction that
//! was durable or of the one that was being committed.

use futures_executor::block_on;
use sealblock_block::RequestKind;
use sealblock_btrfs::Filesystem;
use sealblock_btrfs_engine::change::Change;
use sealblock_btrfs_engine::drop::Dropped;
use sealblock_btrfs_engine::engine::{Engine, EngineOptions};
use sealblock_btrfs_format::key::objectid;
use sealblock_btrfs_format::node::{HEADER_BYTES, Header};
use sealblock_btrfs_format::superblock::COPY_OFFSETS;
use sealblock_proofs_btrfs_images::programs::{Loops, Mount, run};
use sealblock_recorder::{CrashOptions, CrashState, CrashStates, Discarded, Image, Options, Recorder};
use zerocopy::FromBytes;

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

pub fn crash_options(seed: u64, limit: usize) -> CrashOptions {
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

/// A mount that was cut off before the superblock of its second transaction, whose nodes are all there. The first one
/// was empty.
fn cut_off(base: &Image, change: impl Fn(&Engine)) -> Image {
    let mount = |has_second: bool| {
        let recorder = Recorder::new(vec![base.clone()], Options::default());
        let opened = open_devices(recorder.devices()).unwrap();
        let engine = block_on(Engine::open(&opened, EngineOptions::default())).unwrap();
        if has_second {
            change(&engine);
            block_on(engine.commit()).unwrap();
        }
        recorder.images().remove(0)
    };
    let (first, mut second) = (mount(false), mount(true));
    for offset in &COPY_OFFSETS[..2] {
        let mut superblock = vec![0; 4096];
        first.read(*offset, &mut superblock);
        second.write(*offset, &superblock);
    }
    second
}

/// What one lost write of the next mount's opening leaves, and what damage in the same place does.
struct LostWrite {
    place: std::ops::Range<u64>,
    image: Image,
    damaged: Image,
    /// True if a node of the same tree and level was there before.
    is_alike: bool,
}

/// The lost writes that leave something else than they should, of nodes and data.
fn lost_writes(before: &Image) -> Vec<LostWrite> {
    let again = record(vec![before.clone()], 12, 0);
    let whole = again.images().remove(0);
    let node = |image: &Image, at: u64| {
        let mut header = [0; HEADER_BYTES];
        image.read(at, &mut header);
        let header = Header::read_from_bytes(&header).unwrap();
        (header.bytenr.get(), header.owner.get(), header.level)
    };
    let mut lost = Vec::new();
    let log = again.log();
    let writes = log.requests().iter().filter(|one| one.kind == RequestKind::Write);
    // One request has several nodes.
    let nodes = writes.flat_map(|request| &request.pieces).flat_map(|piece| {
        let range = piece.range();
        range.clone().step_by(NODE_BYTES).map(move |start| start..range.end.min(start + NODE_BYTES as u64))
    });
    for place in nodes {
        let (mut image, mut damaged) = (whole.clone(), whole.clone());
        let mut old = vec![0; (place.end - place.start) as usize];
        damaged.write(place.start, &vec![0xff; old.len()]);
        before.read(place.start, &mut old);
        image.write(place.start, &old);
        let is_alike = node(before, place.start) == node(&whole, place.start);
        let is_superblock = COPY_OFFSETS.contains(&place.start);
        if !is_superblock && !image.has_same_content(&whole) {
            lost.push(LostWrite { place, image, damaged, is_alike });
        }
    }
    lost
}

fn is_found(image: &Image) -> bool {
    open_devices([image.device("lost write")]).map_or(true, |opened| !findings(&opened).is_empty())
}

/// A mount wrote nodes and was cut off before its superblock. The next one writes other nodes to the same places, and one
/// of these writes is lost: what lies there is a valid node of the transaction that never was. It is no part of this one.
#[test]
fn what_a_lost_write_leaves_of_a_lost_transaction_is_found() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let base = images_of(&disks).remove(0);
    let mut attributes = Attributes::new(11);
    let changes: Vec<Change> = (0..30).map(|_| Change::of(objectid::FS_TREE, attributes.change(500))).collect();
    let before = cut_off(&base, |engine| {
        for change in &changes {
            block_on(engine.change(|transaction| transaction.apply_change(change))).unwrap();
        }
    });
    // What is replaced later in the same mount is no part of the filesystem, and damage to it does not matter.
    let lost: Vec<LostWrite> = lost_writes(&before).into_iter().filter(|lost| is_found(&lost.damaged)).collect();
    println!("{} lost writes are found", lost.len());
    assert!(lost.len() > 2 && lost.iter().all(|lost| is_found(&lost.image)));
}

/// The same, where the node that was lost and the one of the lost transaction belong to the same tree, at the same place:
/// only their transactions tell them apart. If the number of a lost transaction were given again, a change that never was
/// would appear, and no check could find it.
#[test]
fn the_number_of_a_lost_transaction_is_not_used_again() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let subvolume = {
        let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
        let id = drop::snapshot(&engine, objectid::FS_TREE, "subvolume");
        block_on(engine.commit()).unwrap();
        id
    };
    disks.save();
    let mut base = images_of(&disks).remove(0);
    let mut alike = 0;
    // Whether the places are the same depends on where the mount before began.
    for mounts in 0..4 {
        // The first node that this copies is that of the root tree, as in the opening of a mount.
        let before = cut_off(&base, |engine| block_on(engine.set_read_only(subvolume, true)).unwrap());
        for lost in lost_writes(&before) {
            alike += usize::from(lost.is_alike);
            let is_there = is_found(&lost.image) || !is_found(&lost.damaged);
            assert!(is_there, "after {mounts} mounts, the lost write of {:?} is not found", lost.place);
        }
        base = record(vec![base], 13, 0).images().remove(0);
    }
    println!("{alike} lost writes to nodes of the same tree");
    assert!(alike > 0);
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
