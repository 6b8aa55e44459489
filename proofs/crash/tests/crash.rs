//! Two hundred kills; and tasks on several cores that write the same few blocks at once, while others read and verify
//! them.
//!
//! In the second test, one core owns the volume and the others call it. It is bounded by counts, not by time.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_executor::block_on;
use futures_util::future::join_all;
use sealblock_block::{Device, Durability, Expectations, Request};
use sealblock_crash::history::History;
use sealblock_crash::pattern::{recognise, rng};
use sealblock_crash::report::{Change, Event};
use sealblock_crash::rounds::{self, Plan};
use sealblock_crash::worker::sealed;
use sealblock_media_volume::Mutation;
use sealblock_runtime_reactor::{BackendChoice, Config, CoreHandle, Cores, Placement};
use sealblock_stack::target::TargetName;
use sealblock_stack::{Access, OpenTarget, data_of, open};
use sealblock_units::Extent;

const CORES: usize = 3;
const TASKS_PER_CORE: u64 = 4;
const REQUESTS_PER_TASK: u64 = 250;
/// So few that nearly every request overlaps another one.
const BLOCKS: u64 = 12;

thread_local! {
    /// The volume, on the core that owns it.
    static VOLUME: RefCell<Option<Rc<OpenTarget>>> = const { RefCell::new(None) };
}

type Shared = Arc<Mutex<History>>;

fn volume() -> Rc<OpenTarget> {
    VOLUME.with_borrow(|volume| volume.clone().expect("this core owns the volume"))
}

/// Changes blocks, and records the change before and after.
async fn change(history: Shared, request_id: u64, extent: Extent, change: Change, durability: Durability) {
    let open_volume = volume();
    let request = match change {
        Change::Write(version) => {
            Request::write(extent, sealed(open_volume.device.geometry(), extent, version), durability)
        }
        Change::Zero => Request::write_zeroes(extent, request_id.is_multiple_of(2), durability),
    };
    let begin = Event::Begin { request_id, extent, change, fua: durability == Durability::ForceUnitAccess };
    history.lock().unwrap().record(begin);
    open_volume.device.execute(request).await.expect("changes succeed");
    history.lock().unwrap().record(Event::Done { request_id });
}

/// Reads blocks: each must be whole, and not older than changes that completed before the read.
async fn read(history: Shared, extent: Extent) {
    let open_volume = volume();
    let started = history.lock().unwrap().now();
    let data = data_of(open_volume.read(extent).await.expect("reads of what others write succeed"));
    let size = open_volume.device.geometry().block_size.bytes();
    let history = history.lock().unwrap();
    for (lba, block) in extent.iter().zip(data.chunks(size)) {
        history.check_read(lba, recognise(block, lba), started).unwrap_or_else(|report| panic!("{report}"));
    }
}

async fn verify(extent: Extent) {
    let open_volume = volume();
    open_volume
        .device
        .execute(Request::verify(extent, Expectations::NONE))
        .await
        .expect("verifies of what others write are clean");
}

async fn flush() {
    volume().flush().await.expect("flushes succeed");
}

/// One task on any core: draws requests and has the owner core execute them.
async fn work(owner: CoreHandle, history: Shared, seed: u64, task: u64) {
    let mut rng = rng(seed, task);
    for index in 0..REQUESTS_PER_TASK {
        let request_id = task * REQUESTS_PER_TASK + index + 1;
        let blocks = 1 + rng.u64(..8);
        let extent = Extent::from_raw(rng.u64(..BLOCKS - blocks + 1), blocks).unwrap();
        let (kind, history) = (rng.u64(..16), history.clone());
        let write = Change::Write(request_id);
        match kind {
            0 => owner.call(flush).await,
            1 => owner.call(move || change(history, request_id, extent, Change::Zero, Durability::Volatile)).await,
            2 => owner.call(move || change(history, request_id, extent, write, Durability::ForceUnitAccess)).await,
            3..9 => owner.call(move || change(history, request_id, extent, write, Durability::Volatile)).await,
            9..11 => owner.call(move || verify(extent)).await,
            _ => owner.call(move || read(history, extent)).await,
        }
        .expect("the owner's side did not panic");
    }
}

fn stress(runtime: BackendChoice, options: &str) {
    let seed = u64::from(std::process::id());
    println!("seed {seed}, {runtime:?}, {options}");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v");
    run(&format!("create VOLUME --size 1MiB {options}"), &path);
    let cores = Cores::start(Placement::Count(CORES), Config { runtime, ..Config::default() }).unwrap();
    let owner = cores.handle(0).unwrap();
    let target = TargetName::File(path.clone());
    block_on(owner.call(move || async move {
        let open_volume = open(&target, Access::Write).await.unwrap();
        VOLUME.set(Some(Rc::new(open_volume)));
    }))
    .unwrap();

    let history = Shared::default();
    let tasks = (0..CORES as u64 * TASKS_PER_CORE).map(|task| {
        let (owner, history) = (owner.clone(), history.clone());
        let core = cores.handle(task as usize % CORES).unwrap();
        async move { core.call(move || work(owner, history, seed, task)).await }
    });
    for done in block_on(join_all(tasks)) {
        done.expect("no task panicked");
    }
    let history_at_the_end = history.clone();
    block_on(owner.call(move || async move {
        flush().await;
        verify(Extent::from_raw(0, 256).unwrap()).await;
        read(history_at_the_end, Extent::from_raw(0, BLOCKS).unwrap()).await;
        let open_volume = VOLUME.take().and_then(Rc::into_inner).expect("no task uses the volume any more");
        open_volume.close(Ok(())).await.unwrap();
    }))
    .unwrap();
    let stopped = cores.shutdown(Duration::from_secs(10));
    assert_eq!((stopped.panicked_cores, stopped.aborted_tasks), (0, 0));
    assert!(history.lock().unwrap().counts().0 > 1000);
    run("verify VOLUME --quiet", &path);
}

/// Runs a command, which must succeed.
fn run(arguments: &str, path: &Path) {
    use clap::Parser;
    let words = arguments.split(' ').map(|word| if word == "VOLUME" { path.to_str().unwrap() } else { word });
    let cli = sealblock::cli::Cli::parse_from(std::iter::once("sealblock").chain(words));
    let exit = sealblock::commands::run(&cli.command).unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!(exit, sealblock::exit::Exit::Clean);
}

#[test]
fn many_cores_on_few_blocks_with_the_default_runtime() {
    stress(BackendChoice::Auto, "--guard crc64 --block-size 4096");
    stress(BackendChoice::Auto, "--guard crc16 --block-size 512");
}

#[test]
fn many_cores_on_few_blocks_with_system_calls() {
    stress(BackendChoice::Syscalls, "--guard crc32c --block-size 4096");
    stress(BackendChoice::Syscalls, "--guard crc16 --block-size 512 --type 3");
}

fn plan(folder: &Path, rounds: u64, mutation: Mutation) -> Plan {
    let seed = match std::env::var("SEALBLOCK_CRASH_SEED") {
        Ok(seed) => seed.parse().expect("the seed is a number"),
        Err(_) => u64::from(std::process::id()),
    };
    println!("SEALBLOCK_CRASH_SEED={seed}");
    let program = PathBuf::from(env!("CARGO_BIN_EXE_sealblock-crash"));
    Plan { program, folder: folder.to_owned(), rounds, seed, mutation }
}

#[test]
fn no_change_that_was_answered_is_lost_in_200_kills() {
    let folder = tempfile::tempdir().unwrap();
    let totals = rounds::run(&plan(folder.path(), 200, Mutation::None)).unwrap_or_else(|error| {
        panic!("{error:?}\nthe volume is kept in {}", folder.keep().display());
    });
    println!("{totals:?}");
    // Workers that are killed before any change would test nothing.
    assert!(totals.changes > 2000 && totals.durable > 500, "{totals:?}");
    assert!(totals.changes > totals.durable, "some changes were in flight when the worker was killed: {totals:?}");
}

/// The counterparts: a volume that completes changes before they are in its notes is detected, and so is a small one
/// without notes that completes flushes before the tags are durable.
#[test]
fn answers_that_come_too_early_are_detected() {
    for mutation in [Mutation::NoteLate, Mutation::LateTags] {
        let folder = tempfile::tempdir().unwrap();
        let error = rounds::run(&plan(folder.path(), 100, mutation)).expect_err("the fault shows within 100 rounds");
        assert!(format!("{error:?}").contains("and may hold"), "{mutation:?}: {error:?}");
    }
}
