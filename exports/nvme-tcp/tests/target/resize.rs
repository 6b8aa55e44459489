//! A namespace whose device is resized while hosts write to it, on several cores.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use crate::common::spread::{Spread, host, nqn, on, spread};
use crate::common::*;
use sealblock_block::{Abilities, BadBlock, Device, DynDevice, Geometry, Outcome, Request};
use sealblock_exports_nvme_tcp::{Namespace, NamespaceState};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_protocols_nvme::admin::{Cns, SetFeatures};
use sealblock_protocols_nvme::features::{AsynchronousEvent, EventConfiguration};
use sealblock_protocols_nvme::identify::Namespace as Page;
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_protocols_nvme::{AdminOpcode, Command, StatusCode};
use sealblock_runtime_reactor::{CoreHandle, CoreLocal, spawn, yield_now};
use sealblock_units::{BlockSize, Lba};

/// The namespace under test.
const NSID: u32 = 7;
/// Bytes of a block, which the pattern of each fills.
const BLOCK: usize = 4096;
/// Requests of each queue that must succeed between two resizes.
const STEPS: u64 = 40;

/// The first blocks of a memory device.
struct Part(Rc<MemoryDevice>, Geometry);

impl Device for Part {
    fn geometry(&self) -> &Geometry {
        &self.1
    }

    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        // Each request takes a while, as on a disk, so that a resize must wait for requests.
        yield_now().await;
        self.0.execute(request).await
    }
}

fn part(memory: &Rc<MemoryDevice>, capacity_blocks: u64) -> DynDevice {
    let geometry = Geometry { capacity_blocks, ..memory.geometry().clone() };
    DynDevice::new("part", Part(Rc::clone(memory), geometry))
}

/// A namespace that can be resized, next to others.
struct Harness {
    spread: Spread,
    home: CoreHandle,
    memory: CoreLocal<MemoryDevice>,
    shared: SharedDevice,
    state: Arc<NamespaceState>,
}

impl Harness {
    fn new(capacity_blocks: u64) -> Harness {
        let spread = spread(short());
        let home = spread.cores.handle(1).unwrap();
        let (memory, shared) = on(&home, move || {
            let memory = Rc::new(MemoryDevice::new(BlockSize::B4096, BLOCKS, None));
            let shared = SharedDevice::publish(part(&memory, capacity_blocks));
            (CoreLocal::new(memory), shared)
        });
        let state = Arc::<NamespaceState>::default();
        let namespace = Namespace::new(shared.clone(), [7; 16]).with_state(Arc::clone(&state));
        spread.target.add_namespace(&nqn(), NSID, namespace).unwrap();
        Harness { spread, home, memory, shared, state }
    }

    /// Does what a server does after its volume was closed, resized and reopened.
    async fn resize(&self, capacity_blocks: u64) {
        let (memory, shared) = (self.memory.clone(), self.shared.clone());
        let resized = self.home.call(move || async move {
            let quiesced = shared.quiesce().expect("no other resize runs");
            quiesced.drained().await;
            quiesced.replace(part(&memory.get().unwrap(), capacity_blocks))
        });
        let resized = resized.await.unwrap();
        self.state.report_resized(capacity_blocks);
        self.spread.target.resize_namespace(&nqn(), NSID, resized).unwrap();
    }
}

/// A host that writes its own third of the blocks and reads them back.
struct Load {
    capacity_blocks: Cell<u64>,
    is_over: Cell<bool>,
    done: [Cell<u64>; 3],
}

impl Load {
    async fn run(self: Rc<Load>, mut io: Queue, number: u64) -> Queue {
        let mut step = 0u64;
        while !self.is_over.get() {
            step += 1;
            let own = self.capacity_blocks.get() / 3;
            let lba = (step * 7919 % own) * 3 + number;
            let data = pattern(BLOCK, (step % 251) as u8);
            io.io(NSID, IoCommand::Write(blocks(lba, 1)), Data::Write(data.clone())).await.ok();
            if step.is_multiple_of(8) {
                io.io(NSID, IoCommand::Flush, Data::None).await.ok();
            }
            let read = io.io(NSID, IoCommand::Read(blocks(lba, 1)), Data::Read(BLOCK)).await.ok().data;
            assert!(read == data, "block {lba} of queue {number}");
            self.done[number as usize].set(step);
        }
        io
    }

    /// Waits until each queue has made progress.
    async fn goes_on(&self) {
        let from: Vec<u64> = self.done.iter().map(Cell::get).collect();
        while self.done.iter().zip(&from).any(|(done, from)| done.get() < from + STEPS) {
            yield_now().await;
        }
    }
}

/// Sends an Asynchronous Event Request.
async fn ask(admin: &mut Queue) -> u16 {
    admin.submit(Command::new(AdminOpcode::AsynchronousEventRequest.code(), 0), Data::None).await
}

/// Checks that the host receives the event and sees the new size.
async fn hears_of(admin: &mut Queue, waiting: u16, capacity_blocks: u64) {
    let event = AsynchronousEvent::from_dword0(admin.done(waiting).await.ok().completion.dword0());
    assert_eq!(event, AsynchronousEvent::NAMESPACE_CHANGED);
    assert_eq!(admin.log(4, 4096).await.ok().data[..8], [NSID as u8, 0, 0, 0, 0, 0, 0, 0]);
    let page = Page::decode(&admin.identify(Cns::Namespace, NSID).await.ok().data).unwrap();
    assert_eq!((page.nsze, page.ncap, page.nuse), (capacity_blocks, capacity_blocks, capacity_blocks));
    assert_eq!(page.nvmcap, u128::from(capacity_blocks) * BLOCK as u128);
}

async fn listens(admin: &mut Queue) {
    let cdw11 = EventConfiguration::NAMESPACE_ATTRIBUTE.bits();
    admin.call(SetFeatures { fid: 0x0B, save: false, nsid: 0, cdw11 }.encode(), Data::None).await.ok();
}

#[test]
fn a_namespace_grows_twice_and_shrinks_once_under_load_and_hosts_see_it() {
    run(|| async {
        let harness = Harness::new(96);
        let (mut admin, io) = host(harness.spread.address, 3).await;
        listens(&mut admin).await;
        let load =
            Rc::new(Load { capacity_blocks: Cell::new(96), is_over: Cell::new(false), done: Default::default() });
        let queues: Vec<_> = io.into_iter().zip(0..).map(|(io, i)| spawn(Rc::clone(&load).run(io, i))).collect();
        load.goes_on().await;
        for (capacity_blocks, used) in [(960, 960), (3000, 90), (120, 120)] {
            let waiting = ask(&mut admin).await;
            harness.resize(capacity_blocks).await;
            hears_of(&mut admin, waiting, capacity_blocks).await;
            load.capacity_blocks.set(used);
            load.goes_on().await;
            // Before the resize, the load restricts itself to the smaller size.
            load.goes_on().await;
        }
        load.is_over.set(true);
        for queue in queues {
            let mut io = queue.await.unwrap();
            let last = io.io(NSID, IoCommand::Read(blocks(119, 1)), Data::Read(BLOCK)).await;
            assert_eq!(last.status(), 0, "the last block is there");
            for beyond in [blocks(120, 1), blocks(119, 2), blocks(2999, 1)] {
                let bytes = beyond.extent.len() as usize * BLOCK;
                let read = io.io(NSID, IoCommand::Read(beyond), Data::Read(bytes)).await;
                assert_eq!(read.status(), StatusCode::LBA_OUT_OF_RANGE.get());
            }
        }
    });
}

#[test]
fn a_shrink_drops_bad_blocks_beyond_the_end() {
    run(|| async {
        let harness = Harness::new(96);
        let (mut admin, _io) = host(harness.spread.address, 1).await;
        let bad = |lba| BadBlock::media(Lba::new(lba));
        let known = async |admin: &mut Queue| {
            let log = requests::damage_log(admin, NSID).await;
            log.entries.iter().map(|entry| entry.lba.get()).collect::<Vec<_>>()
        };
        harness.state.report_damage(&[bad(3), bad(50), bad(90)]);
        assert_eq!(known(&mut admin).await, [3, 50, 90]);
        harness.resize(50).await;
        assert_eq!(known(&mut admin).await, [3]);
        // A request from before the resize that completes late.
        harness.state.report_damage(&[bad(49), bad(50)]);
        assert_eq!(known(&mut admin).await, [3, 49]);
        harness.resize(96).await;
        assert_eq!(known(&mut admin).await, [3, 49], "what comes anew was never damaged");
        harness.state.report_damage(&[bad(50)]);
        assert_eq!(known(&mut admin).await, [3, 49, 50]);
    });
}

#[test]
fn hosts_without_events_use_the_new_blocks_too() {
    run(|| async {
        let harness = Harness::new(8);
        let (_admin, mut io) = host(harness.spread.address, 3).await;
        let write = |lba: u64| IoCommand::Write(blocks(lba, 1));
        for queue in &mut io {
            let refused = queue.io(NSID, write(8), Data::Write(pattern(BLOCK, 1))).await;
            assert_eq!(refused.status(), StatusCode::LBA_OUT_OF_RANGE.get());
        }
        harness.resize(16).await;
        for (i, queue) in io.iter_mut().enumerate() {
            queue.io(NSID, write(8 + i as u64), Data::Write(pattern(BLOCK, 1))).await.ok();
        }
        assert!(
            harness.spread.target.resize_namespace(&nqn(), 9, harness.shared.clone()).is_err(),
            "there is no such namespace"
        );
    });
}
