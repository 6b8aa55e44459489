//! Devices that fail: each request of a workload fails once, or for ever from there on. Whatever happens, what was
//! committed stays, and nothing is said to be committed that is not.

use futures_executor::block_on;
use sealblock_block::RequestKind;
use sealblock_btrfs_engine::change::Change;
use sealblock_btrfs_engine::engine::{Engine, EngineError, EngineOptions};
use sealblock_btrfs_format::key::objectid;
use sealblock_recorder::{FailedWrite, Fault, Image, Options, Recorder, Repeat};

use crate::disks::Disks;
use crate::items::Attributes;
use crate::{findings, images_of, open_devices};

/// Runs commits with changes until one fails. Returns the last transaction that was committed, and the error.
fn work(recorder: &Recorder, fault: Option<Fault>) -> (Option<u64>, Option<EngineError>) {
    let opened = open_devices(recorder.devices()).unwrap();
    fault.into_iter().for_each(|fault| recorder.inject(fault));
    let engine = match block_on(Engine::open(&opened, EngineOptions::default())) {
        Ok(engine) => engine,
        Err(error) => return (None, Some(error)),
    };
    let mut attributes = Attributes::new(5);
    let mut committed = engine.durable_generation();
    for _ in 0..3 {
        for _ in 0..20 {
            let change = Change::of(objectid::FS_TREE, attributes.change(300));
            if let Err(error) = block_on(engine.change(|transaction| transaction.apply_change(&change))) {
                return (Some(committed), Some(error));
            }
        }
        match block_on(engine.commit()) {
            Ok(generation) => committed = generation,
            Err(error) => {
                let again = block_on(engine.commit());
                assert!(matches!(again, Err(EngineError::Stopped(_))), "nothing is committed after a failure");
                return (Some(committed), Some(error));
            }
        }
    }
    (Some(committed), None)
}

/// What is on the devices afterwards is whole, and has all that was committed.
fn assert_whole(images: &[Image], committed: u64, what: &str) {
    let devices = images.iter().enumerate().map(|(index, image)| image.device(&format!("after {index}")));
    let filesystem = open_devices(devices).unwrap();
    let generation = filesystem.superblock().generation.get();
    assert!(generation >= committed, "{what}: {generation} is on the devices, and {committed} was committed");
    let mut findings = findings(&filesystem);
    // A device that was left behind has old copies, which are named.
    let is_copy = |finding: &String| finding.starts_with("superblock: ") || finding.contains("copy ");
    findings.retain(|finding| !is_copy(finding));
    assert!(findings.is_empty(), "{what}: {findings:#?}");
}

#[test]
fn every_request_fails_once_or_for_ever() {
    for (devices, options) in [(1, &["-m", "single"][..]), (2, &["-m", "raid1"])] {
        let Some(disks) = Disks::make(devices, 256, options) else { return };
        let images = images_of(&disks);
        let first = disks.open().superblock().generation.get();
        let new = |seed| Recorder::new(images.clone(), Options { seed, ..Options::default() });
        let good = new(1);
        let (committed, error) = work(&good, None);
        assert_eq!((committed, error.is_none()), (Some(first + 6), true));
        for kind in [RequestKind::Write, RequestKind::Flush, RequestKind::Read] {
            let log = good.log();
            let is_like = |one: &&sealblock_recorder::Recorded| one.device == devices - 1 && one.kind == kind;
            // Reads are not in the log.
            let count = if kind == RequestKind::Read { 30 } else { log.requests().iter().filter(is_like).count() };
            let (mut failed, mut tried) = (0, 0);
            for nth in 1..=count as u64 {
                for (repeat, stores) in [(Repeat::Once, FailedWrite::Lost), (Repeat::Forever, FailedWrite::Torn)] {
                    // It fails on the last device, so that a mirror has another one.
                    let fault = Fault::nth(nth).on(devices - 1).of_kind(kind).repeated(repeat).storing(stores);
                    let recorder = new(nth);
                    let (committed, error) = work(&recorder, Some(fault));
                    let what = format!("{devices} devices, {kind:?} {nth} {repeat:?} {stores:?}: {error:?}");
                    assert_whole(&recorder.images(), committed.unwrap_or(first), &what);
                    // Another device has all, unless it is not known what is durable.
                    assert!(devices == 1 || kind == RequestKind::Flush || error.is_none(), "{what}");
                    (failed, tried) = (failed + usize::from(error.is_some()), tried + 1);
                }
            }
            println!("{devices} devices: {tried} times a {kind:?} failed, and {failed} times a commit");
            assert!(tried > 4 && (failed > 0 || devices > 1));
        }
    }
}
