//! I/O queues on the core where their namespaces are: two subsystems, each with a device on a core of its own.

use std::net::SocketAddr;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use sealblock_block::DynDevice;
use sealblock_exports_nvme_tcp::{Limits, Namespace, Subsystem, Target};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::{Config, Cores, JoinHandle, Placement, sleep, spawn};
use sealblock_units::BlockSize;

use crate::common::early::{Early, SETUP_BYTES};
use crate::common::spread::*;
use crate::common::*;

const FIRST: &str = "nqn.2026-11.org.example:first";
const SECOND: &str = "nqn.2026-11.org.example:second";

/// A target on two cores, with a device on each.
struct Homes {
    cores: Cores,
    target: Target,
    address: SocketAddr,
    served: mpsc::Receiver<std::io::Result<()>>,
    devices: [SharedDevice; 2],
}

fn homes(limits: Limits, change: impl FnOnce(Target) -> Target) -> Homes {
    let config = Config { pool_arena_bytes: 4 << 20, ..Config::default() };
    let cores = Cores::start(Placement::Count(2), config).expect("cores start");
    let latch = Arc::new(Latch::default());
    let devices = [0, 1].map(|core| device(&cores.handle(core).unwrap(), &latch));
    let target = change(Target::new([], limits).unwrap().with_cores(cores.handles()));
    for (nqn, device) in [FIRST, SECOND].into_iter().zip(&devices) {
        target.add_subsystem(of(nqn, [(1, device)])).unwrap();
    }
    let (address, served) = listen(&target, &cores, 0);
    Homes { cores, target, address, served, devices }
}

/// A subsystem with these namespaces.
fn of<'a>(nqn: &str, devices: impl IntoIterator<Item = (u32, &'a SharedDevice)>) -> Subsystem {
    let subsystem = Subsystem::new(nqn.parse().unwrap(), "SN1");
    devices.into_iter().fold(subsystem, |subsystem, (nsid, device)| {
        subsystem.with_namespace(nsid, Namespace::new(device.clone(), [nsid as u8; 16])).unwrap()
    })
}

impl Homes {
    fn crossings(&self) -> u64 {
        self.devices.iter().map(SharedDevice::crossings).sum()
    }

    /// Waits until this many queues are on each core.
    async fn queues(&self, wanted: [usize; 2]) {
        let begun = std::time::Instant::now();
        while self.target.queues_on_cores() != wanted {
            assert!(begun.elapsed() < LATE, "{:?}, not {wanted:?}", self.target.queues_on_cores());
            sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Writes and reads with each queue, for each host a part of its own.
async fn use_queues(io: &mut [Queue], first: u64) {
    for (i, queue) in io.iter_mut().enumerate() {
        for count in [1, 40] {
            write(queue, 1, first + i as u64 * 50, i as u8, count).await;
            assert_reads(queue, 1, first + i as u64 * 50, i as u8, count).await;
        }
    }
}

#[test]
fn queues_go_to_the_core_of_their_device_and_no_request_crosses() {
    for moves in [true, false] {
        run(|| async {
            let homes = homes(short(), |target| if moves { target } else { target.without_moves() });
            let (_admin, mut first) = host_of(homes.address, FIRST, 3).await;
            let (_other, mut second) = host_of(homes.address, SECOND, 4).await;
            use_queues(&mut first, 0).await;
            use_queues(&mut second, 0).await;
            assert_eq!(homes.crossings() == 0, moves, "the twin that keeps connections in place crosses");
            let queues: Vec<usize> = homes.target.connected_hosts().iter().map(|host| host.io_queues).collect();
            assert_eq!((queues, homes.target.connections()), (vec![3, 4], 9));
            if moves {
                assert_eq!(homes.target.queues_on_cores(), [3, 4]);
                drop(second.remove(0));
                homes.queues([3, 3]).await;
            }
            drop((first, second));
            homes.queues([0, 0]).await;
        });
    }
}

#[test]
fn a_core_with_too_many_queues_gets_no_more_and_devices_on_all_cores_move_nothing() {
    run(|| async {
        let homes = homes(short(), |target| target);
        let (_admin, mut io) = host_of(homes.address, FIRST, 12).await;
        let queues = homes.target.queues_on_cores();
        assert!(queues[0] > 6 && queues[0] < 12 && queues.iter().sum::<usize>() == 12, "{queues:?}");
        use_queues(&mut io, 0).await;
        assert!(homes.crossings() > 0);
        drop(io);
        homes.queues([0, 0]).await;
        let everywhere = on(&homes.cores.handle(0).unwrap(), || {
            // Each core has its own blocks, which is enough here.
            let open = || DynDevice::new("mem", MemoryDevice::new(BlockSize::B4096, BLOCKS, None));
            SharedDevice::publish(open().on_every_core(move || Ok(open())))
        });
        homes.target.add_subsystem(of(SUBNQN, [(1, &everywhere)])).unwrap();
        let (_admin, mut io) = host_of(homes.address, SUBNQN, 4).await;
        use_queues(&mut io, 0).await;
        assert_eq!((homes.target.queues_on_cores(), everywhere.crossings()), (vec![2, 2], 0));
    });
}

#[test]
fn the_core_of_the_most_namespaces_counts_and_equal_ones_take_turns() {
    run(|| async {
        let homes = homes(short(), |target| target);
        let [first, second] = &homes.devices;
        let more = device(&homes.cores.handle(1).unwrap(), &Arc::default());
        homes.target.add_subsystem(of(SUBNQN, [(1, first), (2, second), (3, &more)])).unwrap();
        let (admin, io) = host_of(homes.address, SUBNQN, 4).await;
        assert_eq!(homes.target.queues_on_cores(), [0, 4]);
        drop((admin, io));
        homes.queues([0, 0]).await;
        homes.target.remove_namespace(&nqn(), 3).unwrap();
        let (_admin, _io) = host_of(homes.address, SUBNQN, 4).await;
        assert_eq!(homes.target.queues_on_cores(), [2, 2]);
    });
}

/// An early host's Connect to the second subsystem, then a write and a read.
fn early(digests: bool, cntlid: u16, seed: u8) -> Early {
    let [write, read] = [IoCommand::Write(blocks(7, 1)), IoCommand::Read(blocks(7, 1))];
    Early::new(digests)
        .connect(SECOND, 1, cntlid)
        .submit(write.encode(1).unwrap(), Data::Write(pattern(4096, seed)))
        .submit(read.encode(1).unwrap(), Data::Read(4096))
}

#[test]
fn what_arrives_with_and_after_the_connect_is_executed_once_on_the_other_core_however_it_is_split() {
    run(|| async {
        let homes = homes(short(), |target| target);
        // Without it, the core that accepts could be the right one.
        let (_other, _one) = host_of(homes.address, SECOND, 1).await;
        for digests in [false, true] {
            let len = early(digests, 1, 0).bytes.len();
            let connected = SETUP_BYTES + 72 + 1024 + if digests { 8 } else { 0 };
            let splits: [&[usize]; 9] = [
                &[],
                &[SETUP_BYTES],
                &[1, SETUP_BYTES - 1],
                &[SETUP_BYTES + 1, SETUP_BYTES + 8, SETUP_BYTES + 72],
                &[SETUP_BYTES + 500, connected - 1],
                &[connected],
                &[connected + 1],
                &[SETUP_BYTES, connected + 3000],
                &[len - 1],
            ];
            for (seed, cuts) in splits.into_iter().enumerate() {
                let mut admin = admin_of(homes.address, SECOND, 1).await;
                let early = early(digests, admin.cntlid, seed as u8);
                let cids = early.cids.clone();
                let mut io = early.send(homes.address, cuts).await;
                io.done(cids[0]).await.ok();
                io.done(cids[1]).await.ok();
                assert!(io.done(cids[2]).await.ok().data == pattern(4096, seed as u8), "{digests}, {cuts:?}");
                assert_eq!(homes.target.queues_on_cores(), [0, 2], "{digests}, {cuts:?}");
                use_queues(std::slice::from_mut(&mut io), 100).await;
                let health = admin.log(2, 512).await.ok().data;
                let health = sealblock_protocols_nvme::logs::Health::decode(&health).unwrap();
                let before = (seed + if digests { splits.len() } else { 0 }) as u128 * 3;
                assert_eq!((health.host_writes, health.host_reads), (before + 3, before + 3), "each once");
                drop((admin, io));
                homes.queues([0, 1]).await;
            }
        }
        assert_eq!(homes.crossings(), 0);
    });
}

#[test]
fn hostile_hosts_get_errors_and_leave_nothing_behind() {
    run(|| async {
        let homes = homes(short(), |target| target);
        let (_other, mut alive) = host_of(homes.address, SECOND, 1).await;
        let admin = admin_of(homes.address, SECOND, 2).await;
        // A second Connect, also right behind the first one.
        let twice = Early::new(false).connect(SECOND, 1, admin.cntlid).connect(SECOND, 2, admin.cntlid);
        let cids = twice.cids.clone();
        let mut io = twice.send(homes.address, &[]).await;
        io.done(cids[0]).await.ok();
        assert_eq!(io.done(cids[1]).await.status(), 0x00C);
        assert_eq!(io.connect(SECOND, 2, admin.cntlid, 0).await.status(), 0x00C);
        write(&mut io, 1, 0, 1, 1).await;
        // A Connect that is not the first command is executed where the connection is, and each command once.
        let read = || IoCommand::Read(blocks(7, 1)).encode(1).unwrap();
        let late = Early::new(true).submit(read(), Data::Read(4096)).connect(SECOND, 2, admin.cntlid);
        let cids = late.cids.clone();
        let mut late = late.submit(read(), Data::Read(4096)).send(homes.address, &[]).await;
        assert_eq!(late.done(cids[0]).await.status(), 0x00C);
        late.done(cids[1]).await.ok();
        assert_eq!(homes.target.queues_on_cores(), [1, 2], "it was accepted by the core with fewer queues");
        // Connects that fail.
        for (subnqn, queue, cntlid) in [(SECOND, 3, admin.cntlid), (SECOND, 1, 0xFFE0), (FIRST, 1, admin.cntlid)] {
            let mut wrong = Queue::open(homes.address, true).await;
            assert_ne!(wrong.connect(subnqn, queue, cntlid, 0).await.status(), 0);
        }
        drop((io, late));
        homes.queues([0, 1]).await;
        // Data that must be requested first.
        let mut asked = Queue::open(homes.address, true).await;
        asked.put_no_data_in_capsules();
        asked.connect(SECOND, 1, admin.cntlid, 0).await.ok();
        write(&mut asked, 1, 0, 1, 1).await;
        assert_eq!(homes.target.queues_on_cores(), [1, 1], "it stays, too");
        drop(asked);
        homes.queues([0, 1]).await;
        // Garbage, and an end, at each place.
        let whole = early(false, admin.cntlid, 3);
        for len in (0..whole.bytes.len()).step_by(61).chain([SETUP_BYTES, SETUP_BYTES + 72 + 1024]) {
            drop(whole.send_part(homes.address, &[], len).await);
            let garbage = whole.send_part(homes.address, &[len / 2], len).await;
            let _ = garbage.send_all([Slice::copy_from(&[0xA5; 300])]).await;
        }
        connections(&homes.target, 3).await;
        homes.queues([0, 1]).await;
        use_queues(&mut alive, 200).await;
        assert_eq!(homes.target.connected_hosts()[1].io_queues, 0);
    });
}

/// Queues that a host in the following tests may have.
const QUEUES: u16 = 8;

/// Connects an I/O queue; returns the status, or `None` if the target ends the connection.
async fn try_connect(address: SocketAddr, early: Early) -> Option<u16> {
    let stream = Stream::connect(address).await.ok()?;
    stream.send_all([Slice::copy_from(&early.bytes)]).await.ok()?;
    let mut replies = Vec::new();
    // ICResp, and a capsule whose last field is the status.
    while replies.len() < SETUP_BYTES + 24 {
        let (result, buffer) = stream.recv(Buffer::zeroed(SETUP_BYTES + 24 - replies.len())).await;
        let Ok(len @ 1..) = result else { return None };
        replies.extend(&buffer[..len]);
    }
    Some(u16::from_le_bytes([replies[SETUP_BYTES + 22], replies[SETUP_BYTES + 23]]) >> 1)
}

/// Connects queues to both subsystems in turn, each of which it closes at once; returns how many were answered, and how
/// many connected.
async fn connect_in_turn(address: SocketAddr, cntlids: [u16; 2], rounds: u16) -> (u16, u16) {
    let (mut answered, mut connected) = (0, 0);
    for round in 0..rounds {
        let which = usize::from(round % 2);
        let early = Early::new(round % 3 == 0);
        let early = early.connect([FIRST, SECOND][which], 1 + round / 2 % QUEUES, cntlids[which]);
        let Some(status) = try_connect(address, early).await else { break };
        answered += 1;
        connected += u16::from(status == 0);
    }
    (answered, connected)
}

/// Three hosts with admin queues that begin to connect queues.
async fn begin_to_connect(address: SocketAddr, rounds: u16) -> (Vec<Queue>, Vec<JoinHandle<(u16, u16)>>) {
    let (mut admins, mut hosts) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let pair = [admin_of(address, FIRST, QUEUES).await, admin_of(address, SECOND, QUEUES).await];
        hosts.push(spawn(connect_in_turn(address, [pair[0].cntlid, pair[1].cntlid], rounds)));
        admins.extend(pair);
    }
    (admins, hosts)
}

#[test]
fn a_target_or_its_cores_that_stop_meanwhile_end_all_connections() {
    for round in 0..16 {
        run(|| async {
            let Homes { cores, target, address, served, .. } = homes(short(), |target| target);
            let (admins, hosts) = begin_to_connect(address, u16::MAX).await;
            sleep(Duration::from_millis(round / 2 * 3)).await;
            if round % 2 == 0 {
                target.stop();
                served.recv_timeout(LATE).unwrap().unwrap();
            }
            let stopper = std::thread::spawn(move || cores.shutdown(LATE));
            let mut all = 0;
            for host in hosts {
                all += host.await.unwrap().1;
            }
            assert!(all > 0 || round < 4, "queues were connected");
            let stopped = stopper.join().unwrap();
            assert_eq!((stopped.aborted_tasks, stopped.panicked_cores), (0, 0));
            assert_eq!((target.connections(), target.queues_on_cores()), (0, vec![0, 0]));
            drop(admins);
        });
    }
}

#[test]
fn namespaces_that_change_meanwhile_lose_no_connection() {
    run(|| async {
        let homes = homes(short(), |target| target);
        let (admins, hosts) = begin_to_connect(homes.address, 100).await;
        let nqns: [Nqn; 2] = [FIRST, SECOND].map(|nqn| nqn.parse().unwrap());
        for round in 0..100 {
            let which = round % 2;
            homes.target.remove_namespace(&nqns[which], 1).unwrap();
            sleep(Duration::from_millis(1)).await;
            // The device of the other core gets the number, and then this one again.
            let device = homes.devices[(which + round / 2) % 2].clone();
            homes.target.add_namespace(&nqns[which], 1, Namespace::new(device, [1; 16])).unwrap();
        }
        for host in hosts {
            let (answered, connected) = host.await.unwrap();
            assert!(answered == 100 && connected > 50, "{answered}, {connected}");
        }
        connections(&homes.target, admins.len()).await;
        homes.queues([0, 0]).await;
    });
}
