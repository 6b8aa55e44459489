//! Mirrors of replicas in memory, which can be damaged, and can go away and come back.

mod assemble;
mod coverage;
mod create;
mod damage;
mod delegated;
mod expected;
mod flushes;
mod hot;
mod interrupted;
mod labels;
mod lineage;
mod older;
mod paging;
mod replicas;
mod requests;
mod samples;
mod sets;
mod stale;
mod unfit;

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::pending;
use sealblock_block::{
    Abilities, Clock, Device, Durability, DynDevice, Error, ErrorKind, Expectations, Freshness, Gate, Geometry,
    Operation, Outcome, Request, RequestKind, ReservedArea, Response,
};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};

use crate::label::ReplicaState;
use crate::{Mirror, MirrorError, Mutation, OpenOptions, ReplicaSource, TestHooks, open, open_with_hooks};

/// Blocks of a replica: eight groups of 16 regions of 64 KiB.
pub const BLOCKS: u64 = 8 * 256;
pub const TYPE1: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc64, ProtectionType::Type1);

/// A clock that never fires: tests do the work of the worker themselves.
#[derive(Clone, Copy)]
pub struct StoppedClock;

impl Clock for StoppedClock {
    async fn sleep(&self, _: Duration) {
        pending().await
    }
}

/// A replica whose content outlives mirrors of it.
#[derive(Clone)]
pub struct TestReplica {
    pub name: &'static str,
    pub memory: Rc<Gate<MemoryDevice>>,
    /// It fails all requests as unreachable.
    pub is_offline: Rc<Cell<bool>>,
    /// It fails checks without naming blocks.
    pub hides_bad_blocks: Rc<Cell<bool>>,
    /// It fails writes.
    pub is_full: Rc<Cell<bool>>,
    /// Fails the next flush only: earlier writes may be lost or not.
    pub fails_flush: Rc<Cell<bool>>,
    /// It goes offline after so many requests.
    pub requests_left: Rc<Cell<u64>>,
    /// Requests never complete.
    pub is_hung: Rc<Cell<bool>>,
    /// Requests wait.
    pub holds_requests: Rc<Cell<bool>>,
    /// Flushes wait.
    pub holds_flushes: Rc<Cell<bool>>,
    /// Label writes wait.
    pub holds_labels: Rc<Cell<bool>>,
    /// Number of labels and of bitmap pages that were written to it.
    pub label_writes: Rc<Cell<u64>>,
    pub page_writes_count: Rc<Cell<u64>>,
    /// Number of reserved-area writes before each write of a page.
    pub page_writes: Rc<RefCell<Vec<u64>>>,
    /// It hangs after so many reserved-area writes, with the next one half done.
    pub reserved_writes_left: Rc<Cell<u64>>,
    /// Whether it has what was written to it last.
    pub freshness: Rc<Cell<Freshness>>,
    /// It takes no writes.
    pub is_read_only: Rc<Cell<bool>>,
    /// It has no room for a label.
    pub has_no_label_room: bool,
    /// It hides its protection information, and makes and checks it itself, as a target does for hosts without PI.
    pub hides_pi: bool,
    pub plain_geometry: Geometry,
    pub written_blocks: Rc<Cell<u64>>,
    /// Labels that are still written before it hangs; shared by the replicas of a machine.
    pub labels_left: Rc<Cell<Option<u32>>>,
    /// It fails further labels instead of hanging.
    pub labels_fail: bool,
    /// It executes the next request in place; every other one, so that mirrors are tested with both.
    pub is_in_place: Rc<Cell<bool>>,
}

impl TestReplica {
    pub fn new(name: &'static str, format: Option<PiFormat>) -> TestReplica {
        TestReplica::sized(name, format, BLOCKS)
    }

    pub fn sized(name: &'static str, format: Option<PiFormat>, blocks: u64) -> TestReplica {
        let memory = Gate::new(name, MemoryDevice::new(BlockSize::B4096, blocks, format));
        let shown = Geometry { protection: None, ..memory.geometry().clone() };
        TestReplica {
            name,
            memory: Rc::new(memory),
            is_offline: Rc::default(),
            hides_bad_blocks: Rc::default(),
            is_full: Rc::default(),
            fails_flush: Rc::default(),
            requests_left: Rc::new(Cell::new(u64::MAX)),
            is_hung: Rc::default(),
            holds_requests: Rc::default(),
            holds_flushes: Rc::default(),
            holds_labels: Rc::default(),
            label_writes: Rc::default(),
            page_writes_count: Rc::default(),
            page_writes: Rc::default(),
            reserved_writes_left: Rc::new(Cell::new(u64::MAX)),
            freshness: Rc::default(),
            is_read_only: Rc::default(),
            has_no_label_room: false,
            hides_pi: false,
            plain_geometry: shown,
            written_blocks: Rc::default(),
            labels_left: Rc::default(),
            labels_fail: false,
            is_in_place: Rc::default(),
        }
    }

    /// A device with the content of this one now.
    pub fn image(&self) -> TestReplica {
        let image = TestReplica {
            labels_left: self.labels_left.clone(),
            ..TestReplica::new(self.name, self.memory.geometry().protection)
        };
        let Ok(Response::BlockStatus(runs)) = run(&*self.memory, Request::block_status(extent(0, BLOCKS))) else {
            panic!("a device in RAM tells which blocks it holds")
        };
        let mut next = 0;
        for found in runs {
            let blocks = u64::from(found.blocks.get());
            if found.state == sealblock_block::BlockState::Allocated {
                let at = extent(next, blocks);
                let Ok(Response::Data(data)) = run(&*self.memory, Request::read(at, Expectations::NONE)) else {
                    panic!("no data")
                };
                run(&*image.memory, Request::write(at, data, Durability::Volatile)).unwrap();
            }
            next += blocks;
        }
        let slot = sealblock_block::ReservedArea::GroupLabel;
        let Ok(Response::Reserved(bytes)) = run(&*self.memory, Request::read_reserved(slot)) else {
            panic!("no label")
        };
        run(&*image.memory, Request::write_reserved(slot, bytes)).unwrap();
        image
    }

    pub fn stack(&self) -> DynDevice {
        DynDevice::new(self.name, self.clone())
    }

    async fn count_reserved(&self, slot: ReservedArea, bytes: &Slice) {
        let counter = if slot == ReservedArea::GroupLabel { &self.label_writes } else { &self.page_writes_count };
        if slot != ReservedArea::GroupLabel {
            self.page_writes.borrow_mut().push(self.label_writes.get() + self.page_writes_count.get());
        }
        counter.set(counter.get() + 1);
        if self.reserved_writes_left.get() == 0 {
            self.is_hung.set(true);
            if slot != ReservedArea::GroupLabel {
                // Pages are written in place.
                let torn = [&bytes[..bytes.len() / 2], &vec![0; bytes.len() - bytes.len() / 2]].concat();
                let write = Request::write_reserved(slot, Slice::copy_from(&torn));
                self.memory.execute(write).await.unwrap();
            }
            pending().await
        }
        self.reserved_writes_left.set(self.reserved_writes_left.get() - 1);
    }

    async fn execute_plain(&self, request: Request) -> Outcome {
        let own = self.memory.geometry().protection;
        let seal = |data: &Sealed, format, at: Extent| {
            let tags = Tags { initial_ref_tag: at.start().get(), ..Tags::default() };
            Sealed::seal(data.joined_data(), BlockSize::B4096, format, &tags)
        };
        let extent = request.extent();
        match (extent, request.operation) {
            (Some(extent), Operation::Read(_)) => {
                match self.memory.execute(Request::read(extent, Expectations::NONE)).await? {
                    Response::Data(data) => Ok(Response::Data(seal(&data, None, extent))),
                    other => Ok(other),
                }
            }
            (Some(extent), Operation::Write(data)) => {
                let data = seal(&data.into_sealed(), own, extent);
                self.memory.execute(Request::write(extent, data, request.durability)).await
            }
            (_, operation) => {
                let request = Request { operation, ..request };
                self.memory.execute(request.map_expectations(|_| Expectations::NONE)).await
            }
        }
    }

    pub fn source(&self) -> ReplicaSource {
        let device = if self.is_offline.get() { Err("gone".to_owned()) } else { Ok(self.stack()) };
        ReplicaSource::new(self.name, device, None)
    }
}

impl Device for TestReplica {
    fn geometry(&self) -> &Geometry {
        if self.hides_pi { &self.plain_geometry } else { self.memory.geometry() }
    }

    fn abilities(&self) -> Abilities {
        let reserved = sealblock_block::Ability::native_if(!self.has_no_label_room);
        let (writable, freshness) = (!self.is_read_only.get(), self.freshness.get());
        Abilities { writable, freshness, ..self.memory.abilities() }.with([RequestKind::ReadReserved], reserved)
    }

    fn executes_in_place(&self) -> bool {
        true
    }

    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        let waits = match request.kind() {
            RequestKind::Read | RequestKind::Write => self.holds_requests.get(),
            RequestKind::Flush => self.holds_requests.get() || self.holds_flushes.get(),
            _ => true,
        };
        let is_in_place = !waits && !self.is_hung.get() && self.is_in_place.replace(!self.is_in_place.get());
        is_in_place.then(|| self.execute(request.clone()).now_or_never())?
    }

    async fn execute(&self, request: Request) -> Outcome {
        if self.is_hung.get() {
            return pending().await;
        }
        let is_flush = request.kind() == RequestKind::Flush;
        let is_label = matches!(request.operation, Operation::WriteReserved(ReservedArea::GroupLabel, _));
        let waits = || {
            self.holds_requests.get() || (is_flush && self.holds_flushes.get()) || (is_label && self.holds_labels.get())
        };
        poll_fn(|_| if waits() { Poll::Pending } else { Poll::Ready(()) }).await;
        if let Operation::WriteReserved(slot, bytes) = &request.operation {
            self.count_reserved(*slot, bytes).await;
        }
        self.is_offline.set(self.is_offline.get() || self.requests_left.get() == 0);
        self.requests_left.set(self.requests_left.get().saturating_sub(1));
        if self.is_offline.get() {
            return Err(ErrorKind::Unreachable { reason: "gone".to_owned() }.into());
        }
        if let (RequestKind::WriteReserved, Some(left)) = (request.kind(), self.labels_left.get()) {
            if left == 0 && self.labels_fail {
                return Err(ErrorKind::Media { reason: "no label gets here".to_owned() }.into());
            }
            if left == 0 {
                return pending().await;
            }
            self.labels_left.set(Some(left - 1));
        }
        if request.kind() == RequestKind::Flush && self.fails_flush.take() {
            return Err(ErrorKind::Media { reason: "these writes may be lost".to_owned() }.into());
        }
        if self.hides_bad_blocks.get() && matches!(request.kind(), RequestKind::Verify | RequestKind::Checksum) {
            return Err(ErrorKind::Media { reason: "it says no more".to_owned() }.into());
        }
        if request.kind() == RequestKind::Write {
            if self.is_full.get() {
                return Err(ErrorKind::NoSpace { reason: "full".to_owned() }.into());
            }
            self.written_blocks.set(self.written_blocks.get() + request.blocks());
            // As a volume gives up a lost log.
            self.freshness.set(Freshness::Current);
        }
        if self.hides_pi { self.execute_plain(request).await } else { self.memory.execute(request).await }
    }
}

/// Random bytes of an opening, never the same twice.
pub fn random() -> [u8; 16] {
    thread_local!(static DRAWN: Cell<u64> = const { Cell::new(0) });
    DRAWN.set(DRAWN.get() + 1);
    let mut random = [3; 16];
    random[..8].copy_from_slice(&(DRAWN.get() * 77).to_le_bytes());
    random[8..].copy_from_slice(&DRAWN.get().wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
    random
}

pub type TestMirror = Rc<Mirror<StoppedClock>>;

/// A mirror of these replicas that breaks a rule.
pub fn opened_with(replicas: &[&TestReplica], mutation: Mutation) -> TestMirror {
    opened_with_hooks(replicas, TestHooks { mutation, ..TestHooks::default() })
}

/// A mirror of these replicas with these hooks.
pub fn opened_with_hooks(replicas: &[&TestReplica], hooks: TestHooks) -> TestMirror {
    let sources = replicas.iter().map(|replica| replica.source()).collect();
    let options = OpenOptions { is_read_only: false, accepts_lost_label: false, random: random() };
    let opened = open_with_hooks(sources, StoppedClock, options, hooks).now_or_never().expect("RAM never waits");
    opened.map(|opened| opened.mirror).unwrap()
}

pub fn try_open(replicas: &[&TestReplica], read_only: bool) -> Result<TestMirror, MirrorError> {
    let sources = replicas.iter().map(|replica| replica.source()).collect();
    let options = OpenOptions { is_read_only: read_only, accepts_lost_label: false, random: random() };
    open(sources, StoppedClock, options).now_or_never().expect("RAM never waits").map(|opened| opened.mirror)
}

/// A mirror that goes on without replicas whose labels are lost.
pub fn opened_by_the_others(replicas: &[&TestReplica]) -> TestMirror {
    let sources = replicas.iter().map(|replica| replica.source()).collect();
    let options = OpenOptions { is_read_only: false, accepts_lost_label: true, random: random() };
    let opened = open(sources, StoppedClock, options).now_or_never().expect("RAM never waits");
    opened.map(|opened| opened.mirror).unwrap()
}

pub fn opened(replicas: &[&TestReplica]) -> TestMirror {
    try_open(replicas, false).unwrap()
}

/// Two replicas with the same content, and their mirror.
pub fn pair(format: Option<PiFormat>) -> (TestReplica, TestReplica, TestMirror) {
    let (a, b) = (TestReplica::new("a", format), TestReplica::new("b", format));
    let mirror = opened(&[&a, &b]);
    (a, b, mirror)
}

pub fn run(device: &impl Device, request: Request) -> Outcome {
    device.execute(request).now_or_never().expect("RAM never waits")
}

pub fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

/// Blocks that hold `seed` and their own numbers.
pub fn content(at: Extent, seed: u8) -> Vec<u8> {
    at.iter().flat_map(|lba| [lba.get().to_le_bytes(), [seed; 8]].concat().repeat(256)).collect()
}

pub fn write_of(device: &impl Device, at: Extent, seed: u8) -> Request {
    let tags = Tags { app_tag: 5, storage_tag: 0, initial_ref_tag: at.start().get() };
    let data = Slice::copy_from(&content(at, seed));
    let data = Sealed::seal(data, BlockSize::B4096, device.geometry().protection, &tags);
    Request::write(at, data, Durability::Volatile)
}

pub fn write(device: &impl Device, at: Extent, seed: u8) -> Result<(), Error> {
    run(device, write_of(device, at, seed)).map(drop)
}

pub fn read(device: &impl Device, at: Extent) -> Result<Vec<u8>, Error> {
    match run(device, Request::read(at, Expectations::NONE))? {
        Response::Data(data) => Ok(data.joined_data().to_vec()),
        other => panic!("no data but {other:?}"),
    }
}

pub fn assert_reads(device: &impl Device, at: Extent, seed: u8) {
    assert!(read(device, at).unwrap() == content(at, seed), "{at} is not of seed {seed}");
}

pub fn verify(device: &impl Device) -> Outcome {
    let at = extent(0, device.geometry().capacity_blocks);
    run(device, Request::verify(at, Expectations::NONE))
}

pub fn repair(device: &impl Device) -> Outcome {
    let at = extent(0, device.geometry().capacity_blocks);
    run(device, Request::repair(at))
}

/// What the worker does when nothing was changed for a while: clean regions leave the labels.
pub fn sweep(mirror: &TestMirror) {
    mirror.clear_clean_regions().now_or_never().expect("RAM never waits").unwrap();
}

/// Reconciles, and resyncs the replicas that are back, as the worker does.
pub fn resync(mirror: &TestMirror) {
    mirror.reconcile_all().now_or_never().expect("RAM never waits").unwrap();
    let replicas: Vec<_> = mirror.replicas.borrow().clone();
    for replica in replicas {
        if replica.is_online() && replica.state.get() == ReplicaState::OutOfSync {
            mirror.start_resync(&replica);
        }
        if replica.state.get() == ReplicaState::Resyncing {
            mirror.resync(&replica).now_or_never().expect("RAM never waits").unwrap();
        }
    }
}

pub fn reattach(mirror: &TestMirror, replica: &TestReplica) -> Result<(), String> {
    let own = mirror.replicas.borrow().iter().find(|own| *own.name() == *replica.name).cloned().unwrap();
    mirror.reattach(&own, replica.stack()).now_or_never().expect("RAM never waits")
}

pub fn states(mirror: &TestMirror) -> Vec<ReplicaState> {
    mirror.describe().replicas.iter().map(|replica| replica.state).collect()
}

/// Closes a mirror without errors.
pub fn close(mirror: &TestMirror) {
    mirror.close().now_or_never().expect("RAM never waits").unwrap();
}

/// Writes these bytes where a replica has its label.
pub fn set_label(replica: &TestReplica, bytes: &[u8]) {
    let slot = ReservedArea::GroupLabel;
    run(&*replica.memory, Request::write_reserved(slot, Slice::copy_from(bytes))).unwrap();
}
