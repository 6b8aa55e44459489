//! Commands of unusual hosts: what they hold, what waits for them, and what remains of them.

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use crate::common::requests::*;
use crate::common::*;
use sealblock_block::{Abilities, BadBlock, Device, DynDevice, Geometry, Outcome, Request, RequestKind};
use sealblock_exports_nvme_tcp::{Limits, Namespace, NamespaceState, Subsystem, Target};
use sealblock_integrity::ChecksumKind;
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::{Corruption, MemoryDevice};
use sealblock_protocols_nvme::admin::{Abort, Cns, FeatureSelect, GetFeatures, SetFeatures};
use sealblock_protocols_nvme::identify::NvmController;
use sealblock_protocols_nvme::nvm::{
    CopyCommand, CopyDescriptorFormat, CopyRange, DatasetManagement, DsmRange, GetLbaStatus, IoCommand,
    LbaStatusAction, ProtectionInfo, WriteZeroes,
};
use sealblock_protocols_nvme::{AdminOpcode, Command, Count8};
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{sleep, spawn, timeout};
use sealblock_units::{BlockSize, Lba};
use zerocopy::IntoBytes;

/// Only a hang takes that long.
const HANG: Duration = Duration::from_secs(30);
/// Blocks of the long namespace: 256 ranges of the longest length.
const MANY: u64 = 256 << 16;

/// Counts requests of one kind, and holds them until released.
struct Held {
    below: Rc<MemoryDevice>,
    kind: RequestKind,
    state: Rc<HeldState>,
}

#[derive(Default)]
struct HeldState {
    begun: Cell<usize>,
    now: Cell<usize>,
    most: Cell<usize>,
    is_released: Cell<bool>,
}

impl Device for Held {
    fn geometry(&self) -> &Geometry {
        self.below.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.below.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        let state = &self.state;
        if request.kind() != self.kind {
            return self.below.execute(request).await;
        }
        state.begun.set(state.begun.get() + 1);
        state.now.set(state.now.get() + 1);
        state.most.set(state.most.get().max(state.now.get()));
        while !state.is_released.get() {
            sleep(Duration::from_millis(1)).await;
        }
        let outcome = self.below.execute(request).await;
        state.now.set(state.now.get() - 1);
        outcome
    }
}

struct Long {
    target: Target,
    address: SocketAddr,
    memory: Rc<MemoryDevice>,
    held: Rc<HeldState>,
    state: std::sync::Arc<NamespaceState>,
}

/// A long namespace in memory that holds requests of one kind; `None` holds none.
fn serve_long(limits: Limits, kind: Option<RequestKind>) -> Long {
    let memory = Rc::new(MemoryDevice::new(BlockSize::B4096, MANY, Some(format())));
    let held = Rc::new(HeldState::default());
    let device = match kind {
        Some(kind) => holding(&memory, kind, &held),
        None => DynDevice::new("mem", Rc::clone(&memory)),
    };
    let namespace = Namespace::new(SharedDevice::publish(device), [1; 16]);
    let state = namespace.state();
    let subsystem = Subsystem::new(SUBNQN.parse().unwrap(), "SN1").with_namespace(PLAIN, namespace).unwrap();
    let (target, address) = serve_subsystem(subsystem, limits);
    Long { target, address, memory, held, state }
}

fn holding(below: &Rc<MemoryDevice>, kind: RequestKind, state: &Rc<HeldState>) -> DynDevice {
    DynDevice::new("mem", Held { below: Rc::clone(below), kind, state: Rc::clone(state) })
}

fn serve_subsystem(subsystem: Subsystem, limits: Limits) -> (Target, SocketAddr) {
    let target = Target::new([subsystem], limits).unwrap();
    let listener = Listener::bind((std::net::Ipv4Addr::LOCALHOST, 0).into(), 16).unwrap();
    let address = listener.local_addr().unwrap();
    let serving = target.clone();
    drop(spawn(async move { serving.serve(listener).await }));
    (target, address)
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let waiting = async {
        while !is_so() {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(HANG, waiting).await.unwrap_or_else(|_| panic!("{what}"));
}

/// The deallocation of everything, in 256 ranges.
fn deallocate_all() -> (Command, Data) {
    let range = |at: u64| DsmRange::new(extent(at << 16, 1 << 16)).as_bytes().to_vec();
    let command = IoCommand::DatasetManagement(DatasetManagement::deallocate(256).unwrap()).encode(PLAIN).unwrap();
    (command, Data::Write((0..256).flat_map(range).collect()))
}

fn event_request() -> Command {
    Command::new(AdminOpcode::AsynchronousEventRequest.code(), 0)
}

fn keep_alive() -> Command {
    Command::new(AdminOpcode::KeepAlive.code(), 0)
}

fn set(fid: u8, cdw11: u32) -> Command {
    SetFeatures { fid, save: false, nsid: 0, cdw11 }.encode()
}

#[test]
fn an_event_request_that_waits_for_its_interval_is_aborted_at_once() {
    run(|| async {
        let served = serve_long(short(), None);
        let mut admin = Queue::admin(served.address, SUBNQN, false).await;
        admin.call(set(0x0B, 0x2100), Data::None).await.ok();
        // Nearly two hours.
        admin.call(set(0x15, 0xFFFF), Data::None).await.ok();
        served.state.report_damage(&[BadBlock::media(Lba::new(1))]);
        let told = admin.submit(event_request(), Data::None).await;
        admin.done(told).await.ok();
        admin.log(0x0E, 64).await.ok();
        served.state.report_damage(&[BadBlock::media(Lba::new(2))]);
        let waiting = admin.submit(event_request(), Data::None).await;
        let abort = admin.call(Abort { queue: 0, cid: waiting }.encode(), Data::None).await.ok();
        assert_eq!(abort.completion.dword0(), 0);
        let aborted = timeout(HANG, admin.done(waiting)).await.expect("it does not wait for its interval");
        assert_eq!(aborted.status(), 0x007);
        // Another event also does not wait for that interval.
        let waiting = admin.submit(event_request(), Data::None).await;
        served.state.report_changed();
        timeout(HANG, admin.done(waiting)).await.expect("another event").ok();
    });
}

#[test]
fn a_reset_restores_every_feature() {
    run(|| async {
        let served = serve_long(short(), None);
        let mut admin = Queue::admin(served.address, SUBNQN, false).await;
        let get = |fid| GetFeatures { fid, select: FeatureSelect::Current, nsid: 0, cdw11: 0 }.encode();
        let words = [0x04, 0x06, 0x07, 0x0A, 0x0B, 0x0F, 0x15];
        let mut before = Vec::new();
        for fid in words {
            before.push(admin.call(get(fid), Data::None).await.ok().completion.dword0());
        }
        for (fid, value) in
            [(0x04, 300), (0x06, 0), (0x07, 0x0003_0003), (0x0A, 1), (0x0B, 0x100), (0x0F, 99_000), (0x15, 9)]
        {
            admin.call(set(fid, value), Data::None).await.ok();
        }
        admin.call(set(0x16, 0), Data::Write(vec![1; 512])).await.ok();
        admin.call(set(0x0E, 0), Data::Write((1_u64 << 40).to_le_bytes().to_vec())).await.ok();
        admin.configure(0x0046_0000).await;
        admin.configure(0x0046_0001).await;
        for (fid, before) in words.into_iter().zip(before) {
            let now = admin.call(get(fid), Data::None).await.ok().completion.dword0();
            assert_eq!(now, before, "feature {fid:#x}");
        }
        assert_eq!(admin.call(get(0x16), Data::Read(512)).await.ok().data, vec![0; 512]);
        let stamp = admin.call(get(0x0E), Data::Read(8)).await.ok().data;
        // Milliseconds since the reset, in six bytes; two more say what set the time.
        let milliseconds = stamp[..6].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
        assert!(milliseconds < 1 << 32, "{stamp:?}");
    });
}

#[test]
fn commands_outstanding_at_a_reset_have_no_completions() {
    run(|| async {
        let served = serve_long(short(), Some(RequestKind::Verify));
        let mut admin = Queue::admin(served.address, SUBNQN, false).await;
        let waiting = admin.submit(event_request(), Data::None).await;
        let scan = GetLbaStatus {
            start: Lba::new(0),
            max_bytes: 4096,
            action: LbaStatusAction::ScanUntracked,
            range_blocks: 8,
        };
        let scanning = admin.submit(scan.encode(PLAIN), Data::Read(4096)).await;
        until("the scan begins", || served.held.begun.get() > 0).await;
        admin.configure(0x0046_0000).await;
        served.held.is_released.set(true);
        until("the scan ends", || served.held.now.get() == 0).await;
        admin.configure(0x0046_0001).await;
        // Events are only reported to requests from after the reset.
        admin.call(set(0x0B, 0x2100), Data::None).await.ok();
        let again = admin.submit(event_request(), Data::None).await;
        served.state.report_changed();
        admin.done(again).await.ok();
        admin.call(keep_alive(), Data::None).await.ok();
        assert!(!admin.is_done(waiting) && !admin.is_done(scanning));
        // Nothing of them remains in the queue, however often this happens.
        for _ in 0..100 {
            admin.submit(event_request(), Data::None).await;
            admin.configure(0x0046_0000).await;
            admin.configure(0x0046_0001).await;
        }
        admin.call(keep_alive(), Data::None).await.ok();
    });
}

#[test]
fn an_identifier_that_is_used_again_takes_the_place_of_its_event_request() {
    run(|| async {
        let served = serve_long(short(), None);
        let mut admin = Queue::admin(served.address, SUBNQN, false).await;
        admin.call(set(0x0B, 0x2100), Data::None).await.ok();
        let mut request = event_request();
        (request.flags, request.cid) = (0x40, 900.into());
        for _ in 0..20 {
            admin.send_raw(&capsule(&request)).await;
            admin.call(keep_alive(), Data::None).await.ok();
        }
        // One is outstanding, so there is room for three more.
        for _ in 0..3 {
            admin.submit(event_request(), Data::None).await;
        }
        assert_eq!(admin.call(event_request(), Data::None).await.status(), 0x105);
    });
}

#[test]
fn a_deallocation_of_everything_ends_with_its_host() {
    run(|| async {
        let served = serve_long(short(), Some(RequestKind::Discard));
        let (admin, mut io) = Queue::pair(served.address, false).await;
        let (command, list) = deallocate_all();
        io.submit(command, list).await;
        until("it begins", || served.held.begun.get() > 0).await;
        drop((admin, io));
        let address = served.address;
        let next = spawn(async move { Queue::pair(address, false).await });
        until("the connections end", || served.target.connections() < 3).await;
        served.held.is_released.set(true);
        let (_admin, mut io) = timeout(HANG, next).await.expect("the next controller becomes ready").unwrap();
        // The device's limits divide a step into several pieces; there are 4,096 steps.
        assert!(served.held.begun.get() <= 64, "{} pieces of 65,536", served.held.begun.get());
        write_and_read_as_ever(&mut io).await;
    });
}

#[test]
fn a_deallocation_of_everything_lets_others_have_their_turn() {
    run(|| async {
        let served = serve_long(short(), None);
        let (_admin, mut io) = Queue::pair(served.address, false).await;
        let (_other_admin, mut other) = Queue::pair(served.address, false).await;
        served
            .memory
            .execute(Request::write_zeroes(extent(0, 1), false, sealblock_block::Durability::Volatile))
            .await
            .unwrap();
        let is_done = Rc::new(Cell::new(false));
        let done = Rc::clone(&is_done);
        let long = spawn(async move {
            let (command, list) = deallocate_all();
            io.call(command, list).await.ok();
            done.set(true);
        });
        sleep(Duration::from_millis(1)).await;
        for _ in 0..3 {
            write_and_read_as_ever(&mut other).await;
        }
        assert!(!is_done.get(), "64 GiB in a few steps");
        timeout(HANG, long).await.expect("it ends").unwrap();
    });
}

#[test]
fn long_commands_are_one_command_to_their_host() {
    run(|| async {
        let served = serve_long(short(), None);
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        let (first, last) = (100, 60_000);
        for lba in [first, last] {
            write(&mut io, PLAIN, lba, 1, 7).await;
        }
        let all = blocks(0, 65_536);
        let sum = io.io(PLAIN, checksum(all), Data::None).await.ok().completion.result.get();
        let kind = ChecksumKind::Crc64Nvme;
        let block = pattern(4096, 7);
        let zeroes = |sum, blocks: u64| kind.combine(sum, kind.of_zeroes(blocks << 12), blocks << 12);
        let expected = zeroes(
            kind.append(zeroes(kind.append(kind.of_zeroes(first << 12), &block), last - first - 1), &block),
            65_535 - last,
        );
        assert_eq!(sum, expected);
        for lba in [first, last] {
            served.memory.damage(Lba::new(lba), Corruption::Data { at: 1, mask: 1 });
        }
        assert_eq!(io.io(PLAIN, IoCommand::Verify(all), Data::None).await.status(), 0x282);
        assert_eq!(admin.newest_error().await.lba, first);
        let known: Vec<u64> = damage_log(&mut admin, PLAIN).await.entries.iter().map(|entry| entry.lba.get()).collect();
        assert_eq!(known, [first, last], "a check goes on behind bad blocks");
        let zeroes = |start, deallocate| {
            IoCommand::WriteZeroes(WriteZeroes { blocks: blocks(start, 8192), deallocate, whole_namespace: false })
        };
        io.io(PLAIN, zeroes(0, false), Data::None).await.ok();
        assert_eq!(read(&mut io, PLAIN, 8191, 1).await.ok().data, vec![0; 4096]);
        io.io(PLAIN, IoCommand::WriteUncorrectable(extent(0, 65_536)), Data::None).await.ok();
        assert_eq!(read(&mut io, PLAIN, 65_535, 1).await.status(), 0x281);
        io.io(PLAIN, zeroes(57_344, true), Data::None).await.ok();
        assert_eq!(read(&mut io, PLAIN, 65_535, 1).await.ok().data, vec![0; 4096]);
        let page = NvmController::decode(&admin.identify(Cns::CommandSetController, 0).await.ok().data).unwrap();
        assert_eq!((page.dmrl, page.dmrsl, page.dmsl), (32, 65_536, 262_144));
    });
}

#[test]
fn copies_wait_for_memory_and_all_are_made() {
    run(|| async {
        let served = serve_long(short(), Some(RequestKind::Read));
        let (admin, mut io) = Queue::pair(served.address, false).await;
        let copy = |at: u64| {
            let command = CopyCommand {
                destination: Lba::new(1_000_000 + at * 512),
                ranges: Count8::saturating(1),
                format: CopyDescriptorFormat::Format0,
                read: ProtectionInfo::NONE,
                write: ProtectionInfo::NONE,
                force_unit_access: false,
                limited_retry: false,
            };
            let from = CopyRange { extent: extent(at * 512, 512), protection: ProtectionInfo::NONE };
            (IoCommand::Copy(command).encode(PLAIN).unwrap(), command.encode_ranges(&[from]).unwrap())
        };
        let mut cids = Vec::new();
        for at in 0..24 {
            let (command, list) = copy(at);
            cids.push(io.submit(command, Data::Write(list)).await);
        }
        until("some begin", || served.held.begun.get() >= 8).await;
        // By then, what follows them on the queue has been processed.
        io.call(Command::new(0, PLAIN), Data::None).await.ok();
        assert_eq!(served.held.most.get(), 8, "8 MiB on a connection, of which each holds 1 MiB");
        served.held.is_released.set(true);
        for cid in cids {
            timeout(HANG, io.done(cid)).await.expect("it gets its turn").ok();
        }
        // Those that still wait when their host is gone do not start.
        served.held.is_released.set(false);
        let begun = served.held.begun.get();
        for at in 0..24 {
            let (command, list) = copy(at);
            io.submit(command, Data::Write(list)).await;
        }
        until("some begin", || served.held.begun.get() >= begun + 8).await;
        drop((admin, io));
        until("the connections end", || served.target.connections() <= 1).await;
        served.held.is_released.set(true);
        until("those that had begun end", || served.target.connections() == 0).await;
        assert_eq!(served.held.begun.get(), begun + 8);
    });
}

#[test]
fn a_queue_that_paused_while_another_had_too_much_memory_receives_again() {
    const OTHER: u32 = 2;
    const AT_ONCE: usize = 24;
    run(|| async {
        // Of the memory, nothing is left beside what is reserved for each connection.
        let bytes = Limits { bytes_in_flight: 160 << 10, total_bytes_in_flight: 256 << 10, ..short() };
        let limits = Limits { connections: 4, transfer_bytes: 8 << 10, ..bytes };
        let memory = Rc::new(MemoryDevice::new(BlockSize::B4096, BLOCKS, None));
        let [held, held_beside] = [(); 2].map(|()| Rc::new(HeldState::default()));
        let subsystem = [(PLAIN, &held), (OTHER, &held_beside)].into_iter().fold(
            Subsystem::new(SUBNQN.parse().unwrap(), "SN1"),
            |subsystem, (nsid, state)| {
                let device = SharedDevice::publish(holding(&memory, RequestKind::Write, state));
                subsystem.with_namespace(nsid, Namespace::new(device, [nsid as u8; 16])).unwrap()
            },
        );
        let (_target, address) = serve_subsystem(subsystem, limits);
        let (_admin, mut flooding) = Queue::pair(address, false).await;
        let (_other_admin, mut beside) = Queue::pair(address, false).await;
        let write = |nsid, at| IoCommand::Write(blocks(at, 2)).encode(nsid).unwrap();
        let mut cids = Vec::new();
        for at in 0..AT_ONCE {
            cids.push(flooding.submit(write(PLAIN, 2 * at as u64), Data::Write(pattern(8192, 1))).await);
        }
        until("more has arrived than is reserved", || held.begun.get() > 8).await;
        let cid = beside.submit(write(OTHER, 1000), Data::Write(pattern(8192, 2))).await;
        until("it is at the device", || held_beside.begun.get() == 1).await;
        held_beside.is_released.set(true);
        timeout(HANG, beside.done(cid)).await.expect("the write completes").ok();
        for _ in 0..3 {
            timeout(HANG, write_and_read_beside(&mut beside, OTHER)).await.expect("its queue is read");
        }
        held.is_released.set(true);
        for cid in cids {
            timeout(HANG, flooding.done(cid)).await.expect("the flooding queue is read").ok();
        }
    });
}

async fn write_and_read_beside(io: &mut Queue, nsid: u32) {
    let written = write(io, nsid, 2000, 2, 3).await;
    assert_eq!(read(io, nsid, 2000, 2).await.ok().data, written);
}
