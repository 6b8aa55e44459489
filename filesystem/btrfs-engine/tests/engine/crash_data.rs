//! Power cuts while data are written: what is left is whole, has all that was made durable, and nothing that never was.

use std::rc::Rc;

use futures_executor::block_on;
use sealblock_btrfs_engine::engine::{Engine, EngineOptions};
use sealblock_btrfs_engine::format::FormatOptions;
use sealblock_btrfs_engine::xattrs::XattrMode;
use sealblock_btrfs_format::items::chunk::Profile;
use sealblock_recorder::{CrashOptions, CrashStates, Discarded, Image, Options, Recorder};

use crate::crash::crash_options;
use crate::disks::{Disks, format_options};
use crate::files::{Kind, ROOT};
use crate::history::{Histories, ModelFile};
use crate::recovered::Examiner;
use crate::tagged_images::{images_without_checksums, of_units};
use crate::workload::{Work, time};
use crate::{images_of, open_devices, share};

/// The kernel mounts one of so many states.
const MOUNTED: usize = 500;

/// A workload on devices with these images.
struct Run {
    seed: u64,
    steps: usize,
    devices: Options,
    engine: EngineOptions,
}

impl Run {
    fn new(seed: u64, steps: usize) -> Run {
        let devices = Options { seed, ..Options::default() };
        Run { seed, steps, devices, engine: EngineOptions::default() }
    }

    /// Random steps. Returns what the devices saw and what was promised.
    fn random(&self, images: Vec<Image>, histories: Histories) -> (Recorder, Histories) {
        self.with(images, histories, |work| {
            if work.histories.files.is_empty() {
                work.create_files().unwrap();
            }
            for _ in 0..self.steps {
                work.step().unwrap();
            }
        })
    }

    fn with(
        &self,
        images: Vec<Image>,
        histories: Histories,
        steps: impl FnOnce(&mut Work<'_>),
    ) -> (Recorder, Histories) {
        let recorder = Recorder::new(images, self.devices.clone());
        let opened = open_devices(recorder.devices()).unwrap();
        let engine = block_on(Engine::open(&opened, self.engine)).unwrap();
        let mut work = Work::new(&engine, &recorder, self.seed, histories);
        steps(&mut work);
        work.commit().unwrap();
        let histories = work.histories;
        block_on(engine.finish_writes());
        (recorder, histories)
    }
}

fn new_histories(disks: &Disks) -> Histories {
    Histories::new(disks.open().superblock().generation.get(), Vec::new(), Vec::new())
}

fn judge(disks: &Disks, run: &(Recorder, Histories), options: &CrashOptions, what: &str) -> usize {
    judge_with(Some((disks, MOUNTED)), run, options, what)
}

fn judge_with(
    kernel: Option<(&Disks, usize)>,
    (recorder, histories): &(Recorder, Histories),
    options: &CrashOptions,
    what: &str,
) -> usize {
    let states = CrashStates::new(recorder.log(), options);
    let mut examiner = Examiner::default();
    examiner.judge_all(&states, histories, kernel);
    let tally = examiner.tally;
    println!("{what}: {} states, {} distinct, {} mounted by the kernel", tally.states, tally.distinct, tally.mounted);
    tally.states
}

fn random_run((devices, options): (usize, &[&str]), (seed, steps, limit): (u64, usize, usize)) {
    let Some(disks) = Disks::make(devices, 128, options) else { return };
    let run = Run::new(seed, steps).random(images_of(&disks), new_histories(&disks));
    let states = judge(&disks, &run, &crash_options(seed, share(limit)), &format!("{devices} devices {options:?}"));
    assert!(states > limit / 5);
    let (commits, syncs) = run.1.promises();
    assert!(commits > 10 && syncs > 0, "{commits} commits were promised, and {syncs} syncs of data in place");
}

#[test]
fn every_state_on_one_device_has_what_was_promised() {
    random_run((1, &["-m", "single"]), (21, 160, 4000));
    random_run((1, &["-m", "dup", "-n", "4096"]), (22, 160, 3000));
    random_run((1, &["--mixed", "-n", "4096"]), (23, 120, 1500));
    random_run((1, &["-m", "single", "-n", "65536"]), (33, 160, 3000));
}

/// Tags prove nodes and data. No other program reads these states.
#[test]
fn every_state_without_checksums_has_what_was_promised() {
    for (devices, node_bytes, profiles, seed) in [
        (1, 4096, (Profile::Dup, Profile::Single), 41),
        (1, 65_536, (Profile::Single, Profile::Single), 42),
        (2, 16_384, (Profile::Raid1, Profile::Raid0), 43),
    ] {
        let options = FormatOptions { metadata: profiles.0, data: profiles.1, node_bytes, ..format_options() };
        let images = images_without_checksums(devices, 128, options);
        let run = Run::new(seed, 120).random(images, Histories::new(1, Vec::new(), Vec::new()));
        let options = of_units(crash_options(seed, share(2000)));
        let states = judge_with(None, &run, &options, &format!("no checksums, {devices} devices {profiles:?}"));
        assert!(states > 400 && run.1.promises().0 > 10);
    }
}

/// A place may have what a transaction left that was lost in the first cut. No tag of it is ever right again.
#[test]
fn every_state_without_checksums_after_two_power_cuts_has_what_was_promised() {
    let images = images_without_checksums(2, 128, FormatOptions { metadata: Profile::Raid1, ..format_options() });
    let (recorder, histories) = Run::new(44, 60).random(images, Histories::new(1, Vec::new(), Vec::new()));
    let states = CrashStates::new(recorder.log(), &of_units(crash_options(44, share(12))));
    for state in states.iter() {
        let (found, _) = Examiner::default().examine(&state.images, &state);
        histories.judge(&found, &crate::history::Moment::of(&state)).unwrap_or_else(|why| panic!("{state}: {why}"));
        let again = Run::new(45 + state.index as u64, 25).random(state.images.clone(), histories.adopt(&found));
        judge_with(None, &again, &of_units(crash_options(45, 200)), "no checksums, after another power cut");
    }
}

#[test]
fn every_state_on_mirrors_and_stripes_has_what_was_promised() {
    random_run((2, &["-m", "raid1", "-d", "raid1", "--csum", "xxhash"]), (24, 120, 3000));
    // Superblocks on some devices, and data without checksums on all of them.
    random_run((3, &["-m", "raid1c3", "-d", "raid0"]), (25, 120, 3000));
    random_run((4, &["-m", "raid10", "-d", "raid10", "--csum", "blake2", "-n", "4096"]), (26, 100, 2000));
}

/// Discards take effect when their places are long in use again.
#[test]
fn late_discards_take_no_data() {
    let Some(disks) = Disks::make(1, 128, &["-m", "single", "-n", "65536"]) else { return };
    let images = images_of(&disks);
    for discarded in [Discarded::Zeroes, Discarded::Garbage] {
        let mut run = Run::new(27, 120);
        run.devices = Options { discard_delay: 3, discarded, ..run.devices };
        run.engine.discards = true;
        let recorded = run.random(images.clone(), new_histories(&disks));
        judge(&disks, &recorded, &crash_options(27, share(1200)), &format!("discards, {discarded:?}"));
    }
}

/// The power is cut again in the mount after a power cut.
#[test]
fn every_state_after_two_power_cuts_has_what_was_promised() {
    for (devices, options) in [(1, &["-m", "single"][..]), (2, &["-m", "raid1", "-d", "raid1"])] {
        let Some(disks) = Disks::make(devices, 128, options) else { return };
        let (recorder, histories) = Run::new(28, 60).random(images_of(&disks), new_histories(&disks));
        let states = CrashStates::new(recorder.log(), &crash_options(28, share(12)));
        let mut count = 0;
        for state in states.iter() {
            let (found, _) = Examiner::default().examine(&state.images, &state);
            histories.judge(&found, &crate::history::Moment::of(&state)).unwrap_or_else(|why| panic!("{state}: {why}"));
            let again = Run::new(29 + state.index as u64, 25).random(state.images.clone(), histories.adopt(&found));
            count += judge(&disks, &again, &crash_options(29, 200), "after another power cut");
        }
        println!("{devices} devices {options:?}: {count} states after two power cuts");
    }
}

/// A file of many extents becomes shorter in steps, each of which is committed: its size and its extents agree.
#[test]
fn a_file_of_many_extents_is_truncated_in_steps() {
    let Some(disks) = Disks::make(1, 128, &["-m", "single", "-n", "4096"]) else { return };
    let (images, ino, content) = many_extents(&disks, 900);
    let histories = || {
        let generation = open_devices([images[0].device("before")]).unwrap().superblock().generation.get();
        let file = ModelFile::new(ino, Kind::Plain, content.clone(), 0);
        Histories::new(generation, vec![("file".into(), file)], Vec::new())
    };
    for step in 0..3 {
        let mut run = Run::new(30 + step, 0);
        run.engine.max_dirty_bytes = 0;
        let recorded = run.with(images.clone(), histories(), |work| {
            let engine = work.engine;
            if step == 2 {
                let mut new = content.clone();
                new[4096..content.len() - 5000].fill(0);
                let bytes = content.len() as u64 - 5000 - 4096;
                work.change_in_steps(0, new, Box::pin(engine.punch(ROOT, ino, 4096, bytes))).unwrap();
            } else {
                let size = [1_000_001, 0][step as usize];
                let change = engine.truncate(ROOT, ino, size);
                work.change_in_steps(0, content[..size as usize].to_vec(), Box::pin(change)).unwrap();
            }
            // The rest goes without a name.
            work.unlink_file("file").unwrap();
        });
        judge(&disks, &recorded, &crash_options(30, share(800)), "steps of a change of many extents");
    }
}

/// A file each of whose sectors is an extent.
fn many_extents(disks: &Disks, sectors: u64) -> (Vec<Image>, u64, Vec<u8>) {
    let (device, watched) = images_of(disks)[0].watched_device("before");
    let engine = block_on(Engine::open(&open_devices([device]).unwrap(), EngineOptions::default())).unwrap();
    let ino = crate::files::create(&engine, "file", Kind::Plain);
    let mut random = fastrand::Rng::with_seed(1);
    let mut order: Vec<u64> = (0..sectors).collect();
    random.shuffle(&mut order);
    let mut content = vec![0; sectors as usize * 4096];
    for sector in order {
        let data = vec![random.u8(1..); 4096];
        crate::files::write(&engine, ino, sector * 4096, &data);
        content[sector as usize * 4096..][..4096].copy_from_slice(&data);
    }
    block_on(engine.commit()).unwrap();
    drop(engine);
    (vec![watched.image()], ino, content)
}

/// Chunks are made for space that is allocated, and removed when it is free again; their room is used for others.
#[test]
fn chunks_come_and_go() {
    for (devices, options) in [(1, &["-m", "single"][..]), (2, &["-m", "raid1", "-d", "raid0"])] {
        let Some(disks) = Disks::make(devices, 256, options) else { return };
        let run = Run::new(31, 0);
        let recorded = run.with(images_of(&disks), new_histories(&disks), |work| {
            work.create_files().unwrap();
            for round in 0..10 {
                let large = work.create(&format!("large{round}"), [Kind::Plain, Kind::NoCow][round % 2]).unwrap();
                let ino = work.histories.files[large].ino;
                let bytes = 30 << 20;
                block_on(work.engine.allocate_range(ROOT, ino, (0, bytes), true)).unwrap();
                let noise = vec![round as u8 + 1; 50_000];
                work.write(large, 0, &noise).unwrap();
                (0..3).for_each(|_| work.step().unwrap());
                if round >= 2 {
                    work.unlink_file(&format!("large{}", round - 2)).unwrap();
                }
                work.commit().unwrap();
            }
        });
        judge(&disks, &recorded, &crash_options(31, share(1000)), "chunks");
    }
}

/// Attributes take chunks of metadata, which are removed when they are gone, and whose room data get then.
#[test]
fn chunks_of_metadata_come_and_go() {
    for (devices, options, count) in [(1, &["-m", "dup"][..], 3000), (2, &["-m", "raid1", "-d", "raid0"], 6000)] {
        let Some(disks) = Disks::make(devices, 256, options) else { return };
        let recorded = Run::new(33, 0).with(images_of(&disks), new_histories(&disks), |work| {
            work.create_files().unwrap();
            let free = |work: &Work<'_>| work.engine.data_space().free_bytes;
            for round in 0..3 {
                let before = free(work);
                let full = work.create(&format!("full{round}"), Kind::Plain).unwrap();
                let ino = work.histories.files[full].ino;
                for number in 0..count {
                    let (name, value) = (format!("user.{number}"), [round as u8; 15_000]);
                    let set = (name.as_bytes(), &value[..]);
                    block_on(work.engine.set_xattr(ROOT, ino, set, XattrMode::Create, time())).unwrap();
                }
                work.commit().unwrap();
                let least = free(work);
                work.unlink_file(&format!("full{round}")).unwrap();
                for _ in 0..4 {
                    work.commit().unwrap();
                    (0..3).for_each(|_| work.step().unwrap());
                }
                assert!(least < before && free(work) > least, "{options:?}: no chunk was made and removed");
            }
            work.commit().unwrap();
        });
        judge(&disks, &recorded, &crash_options(33, share(1000)), "chunks of metadata");
    }
}

/// A judge must know what is wrong: each of these has something that never was, or lacks what was promised.
#[test]
fn what_never_was_and_what_is_missing_is_found() {
    let Some(disks) = Disks::make(1, 128, &["-m", "single"]) else { return };
    let (recorder, histories) = Run::new(32, 0).with(images_of(&disks), new_histories(&disks), |work| {
        work.create_files().unwrap();
        (0..40).for_each(|_| work.step().unwrap());
        for (name, kind) in [("plain", Kind::Plain), ("in place", Kind::NoCow)] {
            let file = work.create(name, kind).unwrap();
            work.write(file, 0, &[7; 10_000]).unwrap();
        }
    });
    let (found, _) = Examiner::default().examine(&recorder.images(), &"the end");
    let now = crate::history::Moment::now(&histories);
    histories.judge(&found, &now).unwrap();
    let found = Rc::into_inner(found).unwrap();
    crate::history::assert_judged(&histories, found, &now);
}
