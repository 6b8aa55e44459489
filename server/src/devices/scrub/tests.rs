//! Tests with devices that repair, fail and return.

use sealblock_block::{
    Abilities, Ability, BadBlock, BadBlocks, Error, ErrorKind, Geometry, Limits, RequestKind, Response, Unchecked,
    VerifyStats, WhyUnchecked,
};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_runtime_reactor::{Config, Reactor, sleep};
use sealblock_units::{BlockSize, Extent, Lba};

use super::*;
use crate::status::health::Health;
use crate::status::scrub::{ResultWord, StateWord};

const BLOCKS: u64 = 1000;

/// A device with blocks in several bad states.
struct Ailing {
    geometry: Geometry,
    mends: bool,
    /// Blocks that its medium cannot read, without reporting which ones.
    dead: Vec<u64>,
    /// Blocks that are bad, and that it reports.
    bad: RefCell<Vec<u64>>,
    is_away: Cell<bool>,
    /// Blocks of which it has a copy that it cannot check.
    unchecked: Option<Extent>,
    asked: RefCell<Vec<(RequestKind, Extent)>>,
}

impl Ailing {
    fn new(mends: bool) -> Ailing {
        let block_size = BlockSize::B4096;
        let limits = Limits::new(block_size, 1 << 20, 1 << 10);
        Ailing {
            geometry: Geometry { block_size, capacity_blocks: BLOCKS, protection: None, limits },
            mends,
            dead: Vec::new(),
            bad: RefCell::default(),
            is_away: Cell::new(false),
            unchecked: None,
            asked: RefCell::default(),
        }
    }

    fn check(&self, extent: Extent) -> Result<(), Error> {
        let inside = |lba: &&u64| (extent.start().get()..=extent.last().get()).contains(*lba);
        if self.is_away.get() {
            return Err(ErrorKind::Unreachable { reason: "it is offline".to_owned() }.into());
        }
        if self.dead.iter().any(|lba| inside(&lba)) {
            return Err(ErrorKind::Media { reason: "it says no more".to_owned() }.into());
        }
        let repaired = self.mends;
        let fault = |lba: &u64| BadBlock { repaired, ..BadBlock::media(Lba::new(*lba)) };
        let faults = self.bad.borrow().iter().filter(inside).map(fault).collect();
        if self.mends {
            self.bad.borrow_mut().retain(|lba| !inside(&lba));
        }
        BadBlocks::new(faults).map_or(Ok(()), |faults| Err(faults.into()))
    }
}

impl Device for Ailing {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        Abilities::BASIC
            .with([RequestKind::Verify], Ability::Native)
            .with([RequestKind::Repair], Ability::native_if(self.mends))
    }

    async fn execute(&self, operation: Request) -> Outcome {
        let extent = operation.extent().expect("a scrub asks for blocks only");
        self.asked.borrow_mut().push((operation.kind(), extent));
        let mut verified = VerifyStats::default();
        let last = extent.last().min(self.unchecked.map_or(Lba::ZERO, Extent::last));
        if let Some(unchecked) = self.unchecked.filter(|_| last >= extent.start()) {
            let first = extent.start().max(unchecked.start());
            let run = Unchecked { first, last, ..Unchecked::new(unchecked, WhyUnchecked::Absent) };
            verified.coverage.add(run);
        }
        self.check(extent).map(|()| Response::Verified(verified))
    }
}

/// Runs a test with the scrub of a device, after it was configured.
fn with_scrub<F: Future<Output = ()>>(device: Ailing, test: impl FnOnce(Rc<ScrubTask>, Rc<Ailing>) -> F) {
    let reactor = Reactor::new(Config { pool_arena_bytes: 0, ..Config::default() }).unwrap();
    reactor.block_on(async {
        let device = Rc::new(device);
        let gate = DynDevice::new("ailing", Rc::clone(&device));
        let target = "ailing".parse().unwrap();
        let attached = SharedDevice::publish(gate.clone()).attach();
        let scrub_task = ScrubTask::open(
            TargetLabel::of(&target),
            None,
            (gate, Vec::new()),
            attached,
            Weak::new(),
            EventSender::here(|_| ()),
        )
        .await;
        scrub_task.configure(Settings::default());
        scrub_task.with_scrub(|scrub, now| scrub.start(now, None, None)).unwrap();
        test(Rc::clone(&scrub_task), device).await;
        scrub_task.close().await;
    });
}

async fn until(scrub_task: &ScrubTask, is_so: impl Fn(&ScrubStatus) -> bool) -> ScrubStatus {
    let start = now();
    loop {
        let status = scrub_task.status(&scrub_task.gate.borrow().clone().unwrap());
        if is_so(&status) {
            return status;
        }
        assert!(now() - start < Duration::from_secs(60), "{status:?}");
        sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn a_device_that_holds_copies_mends_what_is_bad() {
    let device = Ailing { bad: RefCell::new(vec![0, 300, 999]), ..Ailing::new(true) };
    with_scrub(device, |scrub_task, device| async move {
        let status = until(&scrub_task, |status| status.state == StateWord::Idle).await;
        let run = &status.runs[0];
        assert_eq!((run.blocks, run.bad, run.repaired, run.unrepaired), (BLOCKS, 3, 3, 0));
        assert_eq!(status.health(), Health::Healthy);
        assert!(device.asked.borrow().iter().all(|(kind, _)| *kind == RequestKind::Repair));
    });
}

#[test]
fn what_is_mended_waits_for_who_has_locked_its_blocks() {
    let device = Ailing { bad: RefCell::new(vec![300]), ..Ailing::new(true) };
    let reactor = Reactor::new(Config { pool_arena_bytes: 0, ..Config::default() }).unwrap();
    reactor.block_on(async {
        let device = Rc::new(device);
        let gate = DynDevice::new("ailing", Rc::clone(&device));
        let shared = SharedDevice::publish(gate.clone());
        let (target, scrub_events) = ("ailing".parse().unwrap(), EventSender::here(|_| ()));
        let scrub_task = ScrubTask::open(
            TargetLabel::of(&target),
            None,
            (gate, Vec::new()),
            shared.attach(),
            Weak::new(),
            scrub_events,
        )
        .await;
        let host = shared.attach();
        let locked = host.lock(Extent::from_raw(300, 1).unwrap()).await;
        scrub_task.configure(Settings::default());
        scrub_task.with_scrub(|scrub, now| scrub.start(now, None, None)).unwrap();
        while device.asked.borrow().is_empty() {
            sleep(Duration::from_millis(1)).await;
        }
        sleep(Duration::from_millis(20)).await;
        let reached =
            |lba: &u64| device.asked.borrow().iter().any(|(_, extent)| extent.iter().any(|at| at.get() == *lba));
        assert!(reached(&0) && !reached(&300), "between a compare and its write nothing is mended");
        drop(locked);
        until(&scrub_task, |status| status.state == StateWord::Idle).await;
        assert!(reached(&300) && device.bad.borrow().is_empty());
        scrub_task.close().await;
    });
}

#[test]
fn a_medium_that_names_no_block_is_asked_until_each_is_known() {
    let device = Ailing { dead: vec![5, 6, 257, 999], ..Ailing::new(false) };
    with_scrub(device, |scrub_task, device| async move {
        let status = until(&scrub_task, |status| status.state == StateWord::Idle).await;
        let run = &status.runs[0];
        assert_eq!((run.blocks, run.bad, run.repaired, run.unrepaired), (BLOCKS, 4, 0, 4));
        assert_eq!(status.health(), Health::Damaged);
        let asked = device.asked.borrow();
        assert!(asked.iter().all(|(kind, _)| *kind == RequestKind::Verify));
        assert!(asked.len() < 200, "{} requests for four blocks", asked.len());
    });
}

#[test]
fn a_run_that_cannot_check_everything_ends_incomplete() {
    let device = Ailing { unchecked: Some(Extent::from_raw(0, 300).unwrap()), ..Ailing::new(true) };
    with_scrub(device, |scrub_task, _| async move {
        let status = until(&scrub_task, |status| status.state == StateWord::Idle).await;
        let run = &status.runs[0];
        assert_eq!((run.blocks, run.bad, run.unchecked), (BLOCKS, 0, 300));
        assert_eq!((run.result, status.health()), (Some(ResultWord::Incomplete), Health::Incomplete));
    });
    let device = Ailing { unchecked: Some(Extent::from_raw(0, 300).unwrap()), dead: vec![700], ..Ailing::new(false) };
    with_scrub(device, |scrub_task, _| async move {
        let status = until(&scrub_task, |status| status.state == StateWord::Idle).await;
        let run = &status.runs[0];
        assert_eq!((run.unrepaired, run.unchecked, run.result), (1, 300, Some(ResultWord::Incomplete)));
        assert_eq!(status.health(), Health::Damaged, "damage counts more");
    });
}

#[test]
fn a_device_that_is_away_is_no_damage() {
    let device = Ailing::new(false);
    device.is_away.set(true);
    with_scrub(device, |scrub_task, device| async move {
        let status = until(&scrub_task, |status| status.error.is_some()).await;
        assert_eq!((status.state, status.position, status.health()), (StateWord::Running, 0, Health::Healthy));
        assert!(status.error.unwrap().contains("it is offline"));
        assert_eq!(device.asked.borrow().len(), 1, "it is left alone for a while");
        device.is_away.set(false);
        // A client that knows that the device is back need not wait.
        scrub_task.with_scrub(|scrub, now| scrub.start(now, None, None)).unwrap();
        let status = until(&scrub_task, |status| status.state == StateWord::Idle).await;
        assert_eq!((status.runs[0].blocks, status.error), (BLOCKS, None));
    });
}
