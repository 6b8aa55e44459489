//! Each single request of a workload with data fails: once or for ever, on one device or on all. What is said to be
//! durable is; what fails changes nothing, or is known to be in part; the filesystem is at worst only read any more.
//! Afterwards all devices are there again, also after a power cut.

use futures_executor::block_on;
use sealblock_block::RequestKind;
use sealblock_btrfs_engine::engine::{Engine, EngineError, EngineOptions};
use sealblock_recorder::{CrashStates, FailedWrite, Fault, Image, Options, Recorder, Repeat};

use crate::crash::crash_options;
use crate::disks::Disks;
use crate::history::{Histories, Moment};
use crate::recovered::{Examiner, Expects};
use crate::workload::Work;
use crate::{images_of, open_devices, share};

/// Steps of the workload: each kind of them comes, and commits.
const STEPS: usize = 40;

/// What came of a workload.
struct Outcome {
    recorder: Recorder,
    histories: Histories,
    errors: usize,
    has_stopped: bool,
}

fn is_stopped(error: &EngineError) -> bool {
    matches!(error, EngineError::Stopped(_))
}

/// Runs the workload with faults, which count requests from when the filesystem is open.
fn run(images: &[Image], seed: u64, faults: Vec<Fault>, what: &str) -> Outcome {
    let recorder = Recorder::new(images.to_vec(), Options { seed, ..Options::default() });
    let opened = open_devices(recorder.devices()).unwrap();
    let first = opened.superblock().generation.get();
    // As little as possible stays in memory, so that it is read again.
    let options = EngineOptions { discards: true, cache_bytes: 0, ..EngineOptions::default() };
    let engine = block_on(Engine::open(&opened, options)).unwrap();
    let histories = Histories::new(first, Vec::new(), Vec::new());
    let mut work = Work::new(&engine, &recorder, 41, histories);
    faults.into_iter().for_each(|fault| recorder.inject(fault));
    let (mut errors, mut has_stopped, mut begun) = (0, false, 0);
    for step in 0..STEPS + 2 {
        begun = work.histories.clock;
        let done = match step {
            0 => work.create_files(),
            last if last > STEPS => work.commit(),
            _ => work.step(),
        };
        let Err(error) = done else { continue };
        errors += 1;
        has_stopped = is_stopped(&error);
        // What cannot be read, or was never created, cannot be worked on.
        if work.look_again().is_err() || has_stopped || work.histories.names.last().is_empty() {
            break;
        }
    }
    has_stopped |= block_on(engine.commit()).is_err();
    if has_stopped {
        let again = block_on(engine.commit());
        assert!(again.as_ref().is_err_and(is_stopped), "{what}: something is committed after a failure: {again:?}");
        work.histories.note_failed_commit(begun);
    } else {
        work.tick();
    }
    block_on(engine.finish_writes());
    let histories = work.histories;
    Outcome { recorder, histories, errors, has_stopped }
}

/// What a run of all faults found.
#[derive(Default)]
struct Counts {
    faults: usize,
    errors: usize,
    stopped: usize,
    states: usize,
}

fn judge(outcome: &Outcome, counts: &mut Counts, what: &str) {
    let mut examiner = Examiner::expecting(Expects::Faults);
    let (found, _) = examiner.examine(&outcome.recorder.images(), &what);
    let now = Moment::now(&outcome.histories);
    outcome.histories.judge(&found, &now).unwrap_or_else(|why| panic!("{what}: {why}"));
    let states = CrashStates::new(outcome.recorder.log(), &crash_options(counts.faults as u64, 6));
    for state in states.iter() {
        let (found, _) = examiner.examine(&state.images, &format!("{what}: {state}"));
        let judged = outcome.histories.judge(&found, &Moment::of(&state));
        judged.unwrap_or_else(|why| panic!("{what}: {state}: transaction {}: {why}", found.generation));
    }
    counts.states += 1 + states.len();
    counts.faults += 1;
    counts.errors += usize::from(outcome.errors > 0);
    counts.stopped += usize::from(outcome.has_stopped);
}

/// Which devices fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Failing {
    Last,
    All,
}

fn every_request_fails((devices, options): (usize, &[&str]), failing: Failing, seed: u64) {
    let Some(disks) = Disks::make(devices, 256, options) else { return };
    let images = images_of(&disks);
    let good = run(&images, seed, Vec::new(), "no fault");
    assert_eq!((good.errors, good.has_stopped), (0, false));
    let log = good.recorder.log();
    let stride = if share(4) == 4 { 1 } else { 16 };
    for kind in [RequestKind::Write, RequestKind::Flush, RequestKind::Discard, RequestKind::Read] {
        let is_like = |one: &&sealblock_recorder::Recorded| one.device == devices - 1 && one.kind == kind;
        // Reads are not in the log.
        let count = if kind == RequestKind::Read { 120 } else { log.requests().iter().filter(is_like).count() };
        let mut counts = Counts::default();
        let first = if stride == 1 { 1 } else { 1 + seed as usize % count.clamp(1, stride) };
        for nth in (first..=count).step_by(stride.min(count.div_ceil(2).max(1))) {
            for (repeat, stores) in [
                (Repeat::Once, FailedWrite::Lost),
                (Repeat::Once, FailedWrite::Stored),
                (Repeat::Forever, FailedWrite::Torn),
            ] {
                if kind != RequestKind::Write && stores == FailedWrite::Stored {
                    continue;
                }
                let fault = Fault::nth(nth as u64).of_kind(kind).repeated(repeat).storing(stores);
                let failing_devices = if failing == Failing::All { 0..devices } else { devices - 1..devices };
                let faults = failing_devices.map(|device| fault.clone().on(device)).collect();
                let what = format!("{options:?} {failing:?} {kind:?} {nth} {repeat:?} {stores:?}");
                let outcome = run(&images, seed, faults, &what);
                judge(&outcome, &mut counts, &what);
                // Another device has all.
                let is_harmless = kind == RequestKind::Discard || devices > 1 && failing == Failing::Last;
                assert!(!is_harmless || outcome.errors == 0, "{what}: an error");
                assert!(!is_harmless || !outcome.has_stopped, "{what}: it stopped");
            }
        }
        let Counts { faults, errors, stopped, states } = counts;
        println!(
            "{options:?} {failing:?}, {kind:?}: {faults} faults, {errors} errors, {stopped} stops, {states} states"
        );
        assert!(faults > 0);
    }
}

#[test]
fn every_request_of_one_device_fails() {
    every_request_fails((1, &["-m", "single"]), Failing::Last, 1);
    every_request_fails((1, &["-m", "dup", "-d", "dup", "-n", "4096"]), Failing::Last, 2);
}

#[test]
fn every_request_of_one_or_both_mirrors_fails() {
    let mirrors = (2, &["-m", "raid1", "-d", "raid1"][..]);
    every_request_fails(mirrors, Failing::Last, 3);
    every_request_fails(mirrors, Failing::All, 4);
}

/// After a failure, what is there can be read.
#[test]
fn files_can_be_read_when_nothing_is_written_any_more() {
    let Some(disks) = Disks::make(1, 128, &["-m", "single"]) else { return };
    let recorder = Recorder::new(images_of(&disks), Options::default());
    let opened = open_devices(recorder.devices()).unwrap();
    let engine = block_on(Engine::open(&opened, EngineOptions::default())).unwrap();
    let ino = crate::files::create(&engine, "file", crate::files::Kind::Plain);
    crate::files::write(&engine, ino, 0, &[1; 50_000]);
    block_on(engine.commit()).unwrap();
    crate::files::write(&engine, ino, 10_000, &[2; 50_000]);
    recorder.inject(Fault::nth(1).of_kind(RequestKind::Write).repeated(Repeat::Forever));
    assert!(is_stopped(&block_on(engine.commit()).unwrap_err()));
    crate::files::assert_content(&engine, ino, &[[1; 10_000].as_slice(), &[2; 50_000]].concat());
    let place = crate::workload::place("file");
    assert!(block_on(engine.lookup(crate::files::ROOT, place)).unwrap().is_some());
    let written = block_on(engine.write(crate::files::ROOT, ino, 0, sealblock_runtime_memory::Slice::copy_from(&[3])));
    assert_eq!(written.unwrap_err().errno(), libc::EROFS);
}
