//! One target on several cores: controllers with queues on different cores, and how they end. The host in these tests
//! runs on a separate reactor.

use std::net::Shutdown;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::common::spread::*;
use crate::common::*;
use sealblock_exports_nvme_tcp::Limits;
use sealblock_protocols_nvme::admin::{Cns, SetFeatures};
use sealblock_protocols_nvme::identify::{Controller, Ctratt};
use sealblock_protocols_nvme::logs::Health;
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_protocols_nvme::{Command, FabricsType};
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::{sleep, spawn, timeout};

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
        let spread = spread_by_device(short());
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

/// Of two hosts, one has a slow write in flight when it ends its queue; what the other one writes then stays.
async fn a_write_after_the_end_stays(end: impl AsyncFnOnce(&Spread, &mut Queue, &mut Queue)) {
    let spread = spread(short());
    let (mut admin, mut io) = host(spread.address, 1).await;
    let (_other, mut others) = host(spread.address, 1).await;
    let old = IoCommand::Write(blocks(SLOW, 1)).encode(1).unwrap();
    io[0].submit(old, Data::Write(pattern(4096, 1))).await;
    spread.latch.holds(1).await;
    end(&spread, &mut admin, &mut io[0]).await;
    write(&mut others[0], 1, SLOW, 2, 1).await;
    assert_reads(&mut others[0], 1, SLOW, 2, 1).await;
}

#[test]
fn a_shutdown_is_complete_when_the_commands_in_flight_are() {
    run(|| async {
        a_write_after_the_end_stays(async |spread, admin, _| {
            admin.configure(0x0046_4001).await;
            sleep(Duration::from_millis(50)).await;
            assert_eq!(admin.property(0x1C, 4).await, 5, "a write is in flight");
            spread.latch.open();
            while admin.property(0x1C, 4).await != 9 {
                sleep(Duration::from_millis(1)).await;
            }
            // Twin: nothing is connected to a controller that is shut down, and a reset ends that.
            let mut again = Queue::open(spread.address, false).await;
            assert_ne!(again.connect(SUBNQN, 1, admin.cntlid, 0).await.status(), 0);
            admin.configure(0x0046_0000).await;
            admin.configure(0x0046_0001).await;
            let mut again = Queue::open(spread.address, false).await;
            again.connect(SUBNQN, 1, admin.cntlid, 0).await.ok();
        })
        .await;
    });
}

#[test]
fn a_disconnect_is_answered_after_the_commands_in_flight() {
    run(|| async {
        a_write_after_the_end_stays(async |spread, _, io| {
            let disconnect = Command::new(0x7F, u32::from(FabricsType::Disconnect.code()));
            let cid = io.submit(disconnect, Data::None).await;
            let answered = async {
                io.done(cid).await.ok();
                Instant::now()
            };
            let opened = async {
                sleep(Duration::from_millis(50)).await;
                spread.latch.open();
                Instant::now()
            };
            let (answered, opened) = futures_util::future::join(answered, opened).await;
            assert!(answered >= opened, "a write was in flight");
        })
        .await;
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
        spread.latch.holds(3).await;
        admin.configure(0x0046_0000).await;
        assert_eq!(admin.property(0x1C, 4).await, 1, "commands are being carried out");
        for queue in &mut io {
            while queue.receive().await {}
        }
        assert_eq!(admin.property(0x1C, 4).await, 1, "the queues are gone, but the commands are not");
        spread.latch.open();
        while admin.property(0x1C, 4).await != 0 {
            sleep(Duration::from_millis(1)).await;
        }
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
        let spread = spread_by_device(short());
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
fn a_silent_host_times_out_on_all_cores_and_traffic_keeps_another_alive() {
    run(|| async {
        // If the machine suspends the busy host for longer than the timeout, that proves nothing, so the test repeats
        // with a longer timeout.
        for keep_alive in [1500, 6000, 24_000].map(Duration::from_millis) {
            if traffic_keeps_alive(keep_alive).await {
                return;
            }
        }
        panic!("this machine stands still for many seconds again and again");
    });
}

/// The controller of a silent host ends, and one that sends only I/O commands outlives this timeout twice; `false` if
/// the pauses of the machine were too long to prove it.
async fn traffic_keeps_alive(keep_alive: Duration) -> bool {
    let spread = spread_by_device(short());
    let (mut silent, _silent_io) = host(spread.address, 3).await;
    let (mut busy, mut busy_io) = host(spread.address, 3).await;
    let page = Controller::decode(&busy.identify(Cns::Controller, 0).await.ok().data).unwrap();
    assert!(page.ctratt.contains(Ctratt::TRAFFIC_BASED_KEEP_ALIVE));
    let timer = |cdw11| SetFeatures { fid: 0x0F, save: false, nsid: 0, cdw11 }.encode();
    busy.call(timer(keep_alive.as_millis() as u32), Data::None).await.ok();
    silent.call(timer(300), Data::None).await.ok();
    // Sends commands only on I/O queues, for longer than either timeout.
    let (start, mut rounds) = (Instant::now(), 0);
    let (mut last, mut pause) = (start, Duration::ZERO);
    while start.elapsed() < keep_alive * 2 + keep_alive / 3 || spread.target.connections() > 4 {
        let is_answered = busy_io[rounds % 3].tries(IoCommand::Flush.encode(1).unwrap()).await;
        pause = pause.max(last.elapsed());
        last = Instant::now();
        if pause > keep_alive / 2 {
            return false;
        }
        assert!(is_answered, "a busy host timed out, whose longest pause was {pause:?}");
        sleep(Duration::from_millis(5)).await;
        rounds += 1;
    }
    assert_eq!(spread.target.connections(), 4, "the silent host's are gone, the other's are not");
    busy.identify(Cns::Controller, 0).await.ok();
    while silent.receive().await {}
    true
}

#[test]
fn the_limit_of_connections_counts_all_cores() {
    run(|| async {
        let spread = spread_by_device(Limits { connections: 4, ..short() });
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
fn a_stopping_target_completes_commands_on_every_core() {
    run(|| async {
        let spread = spread(short());
        let (_admin, mut io) = host(spread.address, 6).await;
        let mut cids = Vec::new();
        for queue in &mut io {
            let write = IoCommand::Write(blocks(SLOW, 1)).encode(1).unwrap();
            cids.push(queue.submit(write, Data::Write(pattern(4096, 2))).await);
            // Completes after the slow command was started.
        }
        spread.latch.holds(6).await;
        spread.target.stop();
        spread.latch.open();
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
fn stopping_cores_complete_commands_first() {
    run(|| async {
        let spread = spread_by_device(short());
        let (_admin, mut io) = host(spread.address, 3).await;
        let mut cids = Vec::new();
        for queue in &mut io {
            let write = IoCommand::Write(blocks(SLOW, 1)).encode(2).unwrap();
            cids.push(queue.submit(write, Data::Write(pattern(4096, 2))).await);
        }
        spread.latch.holds(3).await;
        let cores = spread.cores;
        let stopper = std::thread::spawn(move || cores.shutdown(LATE));
        while Stream::connect(spread.address).await.is_ok() {
            sleep(Duration::from_millis(1)).await;
        }
        spread.latch.open();
        for (queue, cid) in io.iter_mut().zip(cids) {
            queue.done(cid).await.ok();
        }
        assert_eq!(stopper.join().unwrap().aborted_tasks, 0);
    });
}

#[test]
fn data_requested_before_the_stop_is_written_and_later_commands_are_not() {
    run(|| async {
        // Longer than any delay of a slow machine, so the drain time does not end it.
        let spread = spread(Limits { drain: LATE, ..Limits::default() });
        let (_admin, mut io) = host(spread.address, 6).await;
        let (io, idle) = io.split_at_mut(1);
        // More than a capsule holds, so the target sends an R2T; the host sends the data only after the target stops.
        let write = IoCommand::Write(blocks(0, 64)).encode(1).unwrap();
        let cid = io[0].submit_and_hold(write, pattern(64 << 12, 7)).await;
        spread.target.stop();
        // Idle queues are on every core, and their ends prove that the stop has reached it.
        for queue in idle {
            while queue.receive().await {}
        }
        // Sends the data.
        let late = io[0].submit(IoCommand::Flush.encode(1).unwrap(), Data::None).await;
        io[0].done(cid).await.ok();
        while io[0].receive().await {}
        assert!(!io[0].is_done(late), "not received, or not completed");
        spread.served.recv_timeout(LATE).unwrap().unwrap();
    });
}

#[test]
fn a_host_that_sends_no_data_delays_a_stop_by_the_drain_time_only() {
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

/// Blocks the second core, which has no device, until the result is dropped.
fn stall(spread: &Spread) -> mpsc::Sender<()> {
    let (release, released) = mpsc::channel::<()>();
    let (begin, begun) = mpsc::channel();
    let stalled = move || {
        begin.send(()).expect("the test waits");
        // Ends when the sender is dropped.
        let _ = released.recv_timeout(LATE);
    };
    spread.cores.handle(1).unwrap().address().send(stalled).expect("the core runs");
    begun.recv_timeout(LATE).expect("the core stands still");
    release
}

/// Divides queues into those that reply and those that do not; nothing can be received on the latter any more.
async fn answering(queues: Vec<Queue>) -> (Vec<Queue>, Vec<Queue>) {
    let (mut some, mut none) = (Vec::new(), Vec::new());
    for mut queue in queues {
        let read = IoCommand::Read(blocks(9, 1)).encode(1).unwrap();
        let cid = queue.submit(read, Data::Read(4096)).await;
        match timeout(Duration::from_millis(100), queue.done(cid)).await {
            Ok(_) => some.push(queue),
            Err(_) => none.push(queue),
        }
    }
    (some, none)
}

#[test]
fn what_lies_unread_on_a_path_that_was_closed_undoes_nothing() {
    run(|| async {
        let spread = spread(short());
        let (admin, paths) = host(spread.address, 3).await;
        let (_other, more) = host(spread.address, 3).await;
        let stalled = stall(&spread);
        let (alive, mut silent) = answering(paths).await;
        let (mut here, _others) = answering(more).await;
        let old = IoCommand::Write(blocks(0, 1)).encode(1).unwrap();
        for _ in 0..20 {
            silent[0].submit(old, Data::Write(pattern(4096, 1))).await;
        }
        // The host gives up this path, sends the write again on the other one, and then a newer write. Ended here
        // explicitly, because a stream that is dropped is closed only later.
        silent[0].stream.shutdown(Shutdown::Both).unwrap();
        drop((admin, alive, silent));
        let new = IoCommand::Write(blocks(0, 1)).encode(1).unwrap();
        let mut here = here.remove(0);
        let newer = spawn(async move {
            here.call(new, Data::Write(pattern(4096, 2))).await.ok();
            here
        });
        sleep(Duration::from_millis(200)).await;
        assert!(!newer.is_finished(), "the write waits for the end of the other path");
        assert_eq!(spread.target.controllers(&nqn()), 1);
        assert_eq!(spread.target.connected_hosts().len(), 2, "what the other one sent may still be executed");
        drop(stalled);
        let mut here = newer.await.unwrap();
        connections(&spread.target, 4).await;
        assert_eq!(spread.target.connected_hosts().len(), 1);
        assert_reads(&mut here, 1, 0, 2, 1).await;
    });
}
