//! One target on several cores: controllers whose queues are apart, their ends, and changes while it serves. The host of these
//! tests runs on a reactor of its own.

mod common;

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

use common::*;
use sealblock_block::{Abilities, Device, Gate, Geometry, Operation, Outcome, Stack};
use sealblock_exports_nvme_tcp::{Hosts, Limits, Namespace, SetupError, Subsystem, Target};
use sealblock_layers_remote_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_protocols_nvme::admin::{Cns, SetFeatures};
use sealblock_protocols_nvme::identify::{Controller, Ctratt, parse_namespace_list};
use sealblock_protocols_nvme::logs::Health;
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_runtime_reactor::net::{Listener, Stream};
use sealblock_runtime_reactor::{Config, CoreHandle, Cores, Placement, sleep, spawn};
use sealblock_units::BlockSize;

const LATE: Duration = Duration::from_secs(30);
/// A write to this block takes its time.
const SLOW: u64 = 4000;

/// A device whose writes to one block last long enough to be met by whatever a test does meanwhile.
struct Slowly(MemoryDevice);

impl Device for Slowly {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }

    async fn execute(&self, operation: Operation) -> Outcome {
        if operation.extent().is_some_and(|extent| extent.start().get() == SLOW) {
            sleep(Duration::from_millis(150)).await;
        }
        self.0.execute(operation).await
    }
}

/// A target on three cores, with devices on the first and the last.
struct Spread {
    cores: Cores,
    target: Target,
    address: SocketAddr,
    served: mpsc::Receiver<std::io::Result<()>>,
}

/// Has a core make something.
fn on<T: Send + 'static>(core: &CoreHandle, make: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = mpsc::channel();
    core.post().send(move || send.send(make()).expect("the test waits")).expect("the core runs");
    receive.recv_timeout(LATE).expect("the core answers")
}

fn device(core: &CoreHandle) -> SharedDevice {
    on(core, || {
        let memory = MemoryDevice::new(BlockSize::from_bytes(4096).unwrap(), BLOCKS, None);
        SharedDevice::publish(Rc::new(Gate::new("mem", Stack::new(Slowly(memory)))))
    })
}

fn spread(limits: Limits) -> Spread {
    let config = Config { pool_arena_bytes: 4 << 20, ..Config::default() };
    let cores = Cores::start(Placement::Count(3), config).expect("cores start");
    let (first, last) = (cores.handle(0).unwrap(), cores.handle(2).unwrap());
    let subsystem = Subsystem::new(nqn(), "SN1")
        .with_namespace(1, Namespace::new(device(&first), [1; 16]))
        .and_then(|all| all.with_namespace(2, Namespace::new(device(&last), [2; 16])))
        .unwrap();
    let target = Target::new([subsystem], limits).unwrap().with_cores(cores.handles());
    let (address, served) = listen(&target, &cores, 0);
    Spread { cores, target, address, served }
}

/// Serves one more listener, on this core.
fn listen(target: &Target, cores: &Cores, core: usize) -> (SocketAddr, mpsc::Receiver<std::io::Result<()>>) {
    let (send, served) = mpsc::channel();
    let target = target.clone();
    let address = on(&cores.handle(core).unwrap(), move || {
        let listener = Listener::bind((std::net::Ipv4Addr::LOCALHOST, 0).into(), 64).unwrap();
        let address = listener.local_addr().unwrap();
        // The test may have ended before.
        drop(spawn(async move { drop(send.send(target.serve(listener).await)) }));
        address
    });
    (address, served)
}

fn nqn() -> Nqn {
    SUBNQN.parse().unwrap()
}

async fn connections(target: &Target, wanted: usize) {
    while target.connections() != wanted {
        sleep(Duration::from_millis(1)).await;
    }
}

/// An admin queue and this many I/O queues of one controller.
async fn host(address: SocketAddr, queues: u16) -> (Queue, Vec<Queue>) {
    let mut admin = Queue::admin(address, SUBNQN, false).await;
    let granted = u32::from(queues - 1) << 16 | u32::from(queues - 1);
    let ask = SetFeatures { fid: 7, save: false, nsid: 0, cdw11: granted };
    assert_eq!(admin.call(ask.encode(), Data::None).await.ok().completion.dword0(), granted);
    let mut all = Vec::new();
    for queue in 1..=queues {
        let mut io = Queue::open(address, queue % 2 == 0).await;
        io.connect(SUBNQN, queue, admin.cntlid, 0).await.ok();
        all.push(io);
    }
    (admin, all)
}

async fn write(io: &mut Queue, nsid: u32, start: u64, seed: u8, count: usize) {
    let write = IoCommand::Write(blocks(start, count as u64));
    io.io(nsid, write, Data::Write(pattern(count << 12, seed))).await.ok();
}

async fn assert_reads(io: &mut Queue, nsid: u32, start: u64, seed: u8, count: usize) {
    let read = IoCommand::Read(blocks(start, count as u64));
    let data = io.io(nsid, read, Data::Read(count << 12)).await.ok().data;
    assert!(data == pattern(count << 12, seed), "namespace {nsid}, block {start}");
}

#[test]
fn queues_on_three_cores_write_and_read_the_same_blocks() {
    run(|| async {
        let spread = spread(short());
        let (mut admin, mut io) = host(spread.address, 6).await;
        for round in 0..10_u8 {
            for (nsid, count) in [(1, 1), (2, 3), (1, 40)] {
                for (i, queue) in io.iter_mut().enumerate() {
                    write(queue, nsid, i as u64 * 50, round ^ i as u8, count).await;
                }
                for reader in 0..io.len() {
                    let writer = (reader + 1) % io.len();
                    assert_reads(&mut io[reader], nsid, writer as u64 * 50, round ^ writer as u8, count).await;
                }
            }
        }
        let mut cids = Vec::new();
        for (i, queue) in io.iter_mut().enumerate() {
            for depth in 0..20_u64 {
                let write = IoCommand::Write(blocks(1000 + i as u64 * 100 + depth * 4, 4)).encode(1 + i as u32 % 2);
                cids.push((i, queue.submit(write.unwrap(), Data::Write(pattern(4 << 12, depth as u8))).await));
            }
        }
        for (i, cid) in cids {
            io[i].done(cid).await.ok();
        }
        for (i, queue) in io.iter_mut().enumerate() {
            assert_reads(queue, 1 + i as u32 % 2, 1000 + i as u64 * 100 + 76, 19, 4).await;
        }
        let health = Health::decode(&admin.log(2, 512).await.ok().data).unwrap();
        assert_eq!((health.host_writes, health.host_reads), (180 + 120, 180 + 6), "all cores count");
        drop(io);
        connections(&spread.target, 1).await;
        let health = Health::decode(&admin.log(2, 512).await.ok().data).unwrap();
        assert_eq!((health.host_writes, health.host_reads), (300, 186), "queues that are gone count, too");
    });
}

#[test]
fn errors_on_other_cores_are_in_the_log_and_shutdown_flushes_all_devices() {
    run(|| async {
        let spread = spread(short());
        let (mut admin, mut io) = host(spread.address, 3).await;
        for (i, queue) in io.iter_mut().enumerate() {
            let beyond = IoCommand::Read(blocks(BLOCKS, 1));
            assert_eq!(queue.io(2, beyond, Data::Read(4096)).await.status(), 0x080);
            assert_eq!(admin.newest_error().await.sqid, i as u16 + 1);
        }
        admin.configure(0x0046_4001).await;
        while admin.property(0x1C, 4).await != 9 {
            sleep(Duration::from_millis(1)).await;
        }
    });
}

#[test]
fn a_reset_waits_for_commands_on_other_cores_and_then_the_controller_starts_anew() {
    run(|| async {
        let spread = spread(short());
        let (mut admin, mut io) = host(spread.address, 3).await;
        for queue in &mut io {
            let write = IoCommand::Write(blocks(SLOW, 1)).encode(1).unwrap();
            queue.submit(write, Data::Write(pattern(4096, 8))).await;
        }
        // Until the slow writes are under way the reset may overtake them; afterwards it must not.
        sleep(Duration::from_millis(30)).await;
        admin.configure(0x0046_0000).await;
        assert_eq!(admin.property(0x1C, 4).await, 1, "commands are being carried out");
        for queue in &mut io {
            while queue.receive().await {}
        }
        while admin.property(0x1C, 4).await != 0 {
            sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(spread.target.connections(), 1, "no queue and no command of theirs is left");
        let mut early = Queue::open(spread.address, false).await;
        assert_eq!(early.connect(SUBNQN, 1, admin.cntlid, 0).await.status(), 0x00C, "not enabled yet");
        admin.configure(0x0046_0001).await;
        let mut again = Queue::open(spread.address, false).await;
        again.connect(SUBNQN, 1, admin.cntlid, 0).await.ok();
        assert_reads(&mut again, 1, SLOW, 8, 1).await;
    });
}

#[test]
fn the_end_of_the_admin_connection_ends_queues_on_other_cores() {
    run(|| async {
        let spread = spread(short());
        let (admin, mut io) = host(spread.address, 5).await;
        let (_other, mut alive) = host(spread.address, 2).await;
        drop(admin);
        for queue in &mut io {
            while queue.receive().await {}
        }
        connections(&spread.target, 3).await;
        assert_eq!(spread.target.controllers(&nqn()), 1);
        write(&mut alive[1], 2, 0, 1, 1).await;
    });
}

#[test]
fn a_silent_host_is_given_up_on_all_cores_and_traffic_keeps_another_alive() {
    run(|| async {
        let spread = spread(short());
        let (mut silent, _silent_io) = host(spread.address, 3).await;
        let (mut busy, mut busy_io) = host(spread.address, 3).await;
        let page = Controller::decode(&busy.identify(Cns::Controller, 0).await.ok().data).unwrap();
        assert!(page.ctratt.contains(Ctratt::TRAFFIC_BASED_KEEP_ALIVE));
        let keep_alive = |ms| SetFeatures { fid: 0x0F, save: false, nsid: 0, cdw11: ms }.encode();
        busy.call(keep_alive(1000), Data::None).await.ok();
        silent.call(keep_alive(300), Data::None).await.ok();
        // Commands on I/O queues alone, for longer than the timeout of either.
        let mut rounds = 0_u64;
        let start = std::time::Instant::now();
        while start.elapsed() < Duration::from_millis(2500) || spread.target.connections() > 4 {
            write(&mut busy_io[rounds as usize % 3], 1, rounds % 100, 1, 1).await;
            sleep(Duration::from_millis(5)).await;
            rounds += 1;
        }
        assert_eq!(spread.target.connections(), 4, "the silent host's are gone, the other's are not");
        busy.identify(Cns::Controller, 0).await.ok();
        while silent.receive().await {}
    });
}

#[test]
fn the_limit_of_connections_counts_all_cores() {
    run(|| async {
        let spread = spread(Limits { connections: 4, ..short() });
        let (mut admin, _io) = host(spread.address, 3).await;
        let fifth = Stream::connect(spread.address).await.unwrap();
        let (result, _) = fifth.recv(sealblock_runtime_memory::Buffer::zeroed(16)).await;
        assert!(!matches!(result, Ok(1..)));
        admin.identify(Cns::Controller, 0).await.ok();
        drop(_io);
        connections(&spread.target, 1).await;
        host(spread.address, 2).await;
    });
}

#[test]
fn several_listeners_on_several_cores_are_one_target() {
    run(|| async {
        let spread = spread(short());
        let (other, served) = listen(&spread.target, &spread.cores, 1);
        let (admin, mut io) = host(spread.address, 1).await;
        let mut second = Queue::open(other, false).await;
        let granted = second.connect(SUBNQN, 2, admin.cntlid, 0).await;
        assert_eq!(granted.status(), 0x182, "one queue was granted, and the controller is known here, too");
        write(&mut io[0], 1, 0, 1, 1).await;
        spread.target.stop();
        for served in [served, spread.served] {
            served.recv_timeout(LATE).unwrap().unwrap();
        }
        assert_eq!(spread.target.connections(), 0);
        assert!(Stream::connect(other).await.is_err() && Stream::connect(spread.address).await.is_err());
        assert_eq!(spread.cores.shutdown(LATE).aborted_tasks, 0);
    });
}

#[test]
fn a_target_that_stops_answers_commands_on_every_core() {
    run(|| async {
        let spread = spread(short());
        let (_admin, mut io) = host(spread.address, 6).await;
        let mut cids = Vec::new();
        for queue in &mut io {
            let write = IoCommand::Write(blocks(SLOW, 1)).encode(1).unwrap();
            cids.push(queue.submit(write, Data::Write(pattern(4096, 2))).await);
            // Answered after the slow one was taken.
            queue.io(2, IoCommand::Flush, Data::None).await.ok();
        }
        spread.target.stop();
        for (queue, cid) in io.iter_mut().zip(cids) {
            queue.done(cid).await.ok();
            while queue.receive().await {}
        }
        spread.served.recv_timeout(LATE).unwrap().unwrap();
        assert_eq!(spread.target.connections(), 0);
        assert_eq!(spread.cores.shutdown(LATE).aborted_tasks, 0);
    });
}

#[test]
fn cores_that_stop_answer_commands_first() {
    run(|| async {
        let spread = spread(short());
        let (_admin, mut io) = host(spread.address, 3).await;
        let mut cids = Vec::new();
        for queue in &mut io {
            let write = IoCommand::Write(blocks(SLOW, 1)).encode(2).unwrap();
            cids.push(queue.submit(write, Data::Write(pattern(4096, 2))).await);
            queue.io(1, IoCommand::Flush, Data::None).await.ok();
        }
        let cores = spread.cores;
        let stopper = std::thread::spawn(move || cores.shutdown(LATE));
        for (queue, cid) in io.iter_mut().zip(cids) {
            queue.done(cid).await.ok();
        }
        assert_eq!(stopper.join().unwrap().aborted_tasks, 0);
    });
}

#[test]
fn data_that_was_asked_for_before_the_stop_is_still_written_and_later_commands_are_not() {
    run(|| async {
        let spread = spread(short());
        let (_admin, mut io) = host(spread.address, 1).await;
        // More than a capsule holds, so the target asks for it; the host's answer waits until the target stops.
        let write = IoCommand::Write(blocks(0, 64)).encode(1).unwrap();
        let cid = io[0].submit_and_hold(write, pattern(64 << 12, 7)).await;
        spread.target.stop();
        // Long enough for the stop to be carried out on all cores.
        sleep(Duration::from_millis(100)).await;
        // Sends the data along.
        let late = io[0].submit(IoCommand::Flush.encode(1).unwrap(), Data::None).await;
        io[0].done(cid).await.ok();
        while io[0].receive().await {}
        assert!(!io[0].is_done(late), "not read, or not answered");
        spread.served.recv_timeout(LATE).unwrap().unwrap();
    });
}

#[test]
fn a_host_that_sends_no_data_holds_a_stop_up_for_the_drain_only() {
    run(|| async {
        let spread = spread(Limits { drain: Duration::from_millis(100), ..Limits::default() });
        let (_admin, mut io) = host(spread.address, 1).await;
        let write = IoCommand::Write(blocks(0, 64)).encode(1).unwrap();
        io[0].submit_and_hold(write, pattern(64 << 12, 7)).await;
        spread.target.stop();
        spread.served.recv_timeout(LATE).unwrap().unwrap();
        assert_eq!(spread.target.connections(), 0);
    });
}

#[test]
fn namespaces_come_and_go_while_commands_run() {
    run(|| async {
        let spread = spread(short());
        let (mut admin, mut io) = host(spread.address, 3).await;
        let slow = IoCommand::Write(blocks(SLOW, 1)).encode(1).unwrap();
        let cid = io[0].submit(slow, Data::Write(pattern(4096, 2))).await;
        io[0].io(2, IoCommand::Flush, Data::None).await.ok();
        spread.target.remove_namespace(&nqn(), 1).unwrap();
        assert_eq!(spread.target.remove_namespace(&nqn(), 1), Err(SetupError::UnknownNsid(1)));
        for queue in &mut io[1..] {
            assert_eq!(queue.io(1, IoCommand::Flush, Data::None).await.status(), 0x00B);
        }
        io[0].done(cid).await.ok();
        assert_eq!(io[0].io(1, IoCommand::Flush, Data::None).await.status(), 0x00B);
        let fresh = device(&spread.cores.handle(1).unwrap());
        spread.target.add_namespace(&nqn(), 7, Namespace::new(fresh, [7; 16])).unwrap();
        assert_eq!(spread.target.namespaces(&nqn()), Ok(vec![2, 7]));
        for (i, queue) in io.iter_mut().enumerate() {
            write(queue, 7, i as u64, 3, 1).await;
        }
        let list = admin.identify(Cns::ActiveNamespaces, 0).await.ok().data;
        assert_eq!(parse_namespace_list(&list).collect::<Vec<_>>(), [2, 7]);
    });
}

#[test]
fn a_subsystem_that_is_removed_ends_its_controllers_and_no_others() {
    run(|| async {
        let spread = spread(short());
        let other: Nqn = "nqn.2026-11.org.example:other".parse().unwrap();
        let subsystem = || {
            let namespace = Namespace::new(device(&spread.cores.handle(1).unwrap()), [9; 16]);
            Subsystem::new(other.clone(), "SN2").with_namespace(1, namespace).unwrap()
        };
        spread.target.add_subsystem(subsystem()).unwrap();
        assert_eq!(spread.target.add_subsystem(subsystem()), Err(SetupError::DuplicateNqn(other.clone())));
        let mut bystander = Queue::admin(spread.address, other.as_str(), false).await;
        let (_admin, mut io) = host(spread.address, 3).await;
        let mut cids = Vec::new();
        for queue in &mut io {
            let slow = IoCommand::Write(blocks(SLOW, 1)).encode(1).unwrap();
            cids.push(queue.submit(slow, Data::Write(pattern(4096, 2))).await);
            queue.io(2, IoCommand::Flush, Data::None).await.ok();
        }
        spread.target.remove_subsystem(&nqn()).unwrap();
        assert_eq!(spread.target.remove_subsystem(&nqn()), Err(SetupError::UnknownNqn(nqn())));
        for (queue, cid) in io.iter_mut().zip(cids) {
            queue.done(cid).await.ok();
            while queue.receive().await {}
        }
        connections(&spread.target, 1).await;
        assert_eq!((spread.target.controllers(&nqn()), spread.target.controllers(&other)), (0, 1));
        bystander.identify(Cns::Controller, 0).await.ok();
        let mut queue = Queue::open(spread.address, false).await;
        assert_eq!(queue.connect(SUBNQN, 0, 0xFFFF, 0).await.status(), 0x182, "no such subsystem");
    });
}

#[test]
fn hosts_that_may_not_connect_any_more_are_ended() {
    run(|| async {
        let spread = spread(short());
        let (_admin, mut io) = host(spread.address, 2).await;
        let this: Nqn = "nqn.2026-11.org.example:host".parse().unwrap();
        spread.target.set_hosts(&nqn(), Hosts::Only(vec![this])).unwrap();
        write(&mut io[0], 1, 0, 1, 1).await;
        spread.target.set_hosts(&nqn(), Hosts::Only(vec![])).unwrap();
        for queue in &mut io {
            while queue.receive().await {}
        }
        connections(&spread.target, 0).await;
        let mut queue = Queue::open(spread.address, false).await;
        assert_eq!(queue.connect(SUBNQN, 0, 0xFFFF, 0).await.status(), 0x184);
    });
}
