//! Writes that our client sends again, to servers that are processes of their own: `sealblock serve`, whose device is slow for some
//! requests, and qemu-nbd. The deterministic tests, with fake servers, are those of `transport/tests/resend`.
//!
//! In each round a client loses its connection when the bytes of a write were sent and before the answer has come. It sends the write
//! again, unless nobody waits for it any more, and something newer behind it, which is acknowledged and flushed. The first copy
//! still runs at the server meanwhile, or lies in front of it, whole or in part, and reaches it later. The newer content has to be
//! there at the end.
//! Rounds of a batch run side by side, each with a client, a proxy and blocks of its own. `SEALBLOCK_RESENT_ROUNDS` sets how many there are,
//! `SEALBLOCK_RESENT_TARGET` names a foreign NVMe/TCP target that gets them as well.

mod proxy;

use std::cell::Cell;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::future::{join_all, select};
use sealblock_block::{Device, Durability, DynDevice, Error, Expectations, Request, Response};
use sealblock_integrity::{Sealed, Tags};
use sealblock_media_nbd::{Address, NbdDevice, Options as NbdOptions};
use sealblock_media_nvme_tcp::{HostPort, NvmeTcpDevice, Options as NvmeOptions, Reconnect};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{Config, Reactor, now, sleep, spawn};
use sealblock_units::Extent;

use crate::common::server::Server;
use crate::common::{BLOCK, Place, has, noise, skipped};
use proxy::{End, Proxy};

/// Longer than any step takes.
const LATE: Duration = Duration::from_secs(60);
/// Time after which the client takes it that a server without fences has ended a connection. Much longer than the first copy is kept.
const QUIESCE: Duration = Duration::from_secs(3);
/// Rounds that run side by side.
const BATCH: u64 = 20;
/// Blocks of a round, of which it writes some.
const ROOM: u64 = 16;
/// What some requests of a slow server wait for, before anything else.
const SLOW: Duration = Duration::from_millis(60);

/// Who serves.
#[derive(Clone, Debug)]
enum Peer {
    /// Over NBD, an export.
    Nbd(SocketAddr, &'static str),
    /// Over NVMe/TCP, a subsystem.
    Nvme(SocketAddr, String),
}

impl Peer {
    fn address(&self) -> SocketAddr {
        match self {
            Peer::Nbd(address, _) | Peer::Nvme(address, _) => *address,
        }
    }

    /// A client of it, at the address of a proxy.
    async fn open(&self, at: SocketAddr, quiesce: Duration) -> DynDevice {
        let reconnect = Reconnect {
            attempts: 1000,
            total: Duration::from_secs(20),
            first_delay: Duration::from_millis(2),
            max_delay: Duration::from_millis(20),
        };
        match self {
            Peer::Nbd(_, export) => {
                let options = NbdOptions { reconnect, quiesce, ..NbdOptions::default() };
                DynDevice::new("nbd", NbdDevice::connect(Address::from(at), export, options).await.unwrap())
            }
            Peer::Nvme(_, subsystem) => {
                let (keep_alive, connect_timeout) = (Duration::ZERO, LATE);
                let options = NvmeOptions { reconnect, quiesce, keep_alive, connect_timeout, ..NvmeOptions::default() };
                let subsystem = subsystem.parse().unwrap();
                let device = NvmeTcpDevice::connect(HostPort::from(at), subsystem, Some(1), options).await;
                DynDevice::new("nvme", device.unwrap())
            }
        }
    }
}

/// Where the first copy is when its connection is lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FirstCopy {
    /// The server has it, and both sides lose the connection.
    Running,
    /// The server has none of it, or the beginning, and takes the connection for alive.
    Unread(usize),
}

/// When the server gets the rest of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Delivered {
    /// The write that was sent again is acknowledged.
    AfterRepetition,
    /// So is the newer one, and flushed.
    AfterNewer,
}

/// What happens in a round.
#[derive(Clone, Copy, Debug)]
struct Round {
    number: u64,
    first: u64,
    blocks: u64,
    first_copy: FirstCopy,
    end: End,
    delivered: Delivered,
    /// Between the first copy and the loss.
    pause: Duration,
    /// Nobody waits for the first write any more when its connection is lost, so it is not sent again.
    is_dropped: bool,
}

impl Round {
    fn of(number: u64, delivered: Option<Delivered>) -> Round {
        let chance = noise(number + 1, 8);
        // What a command of NVMe/TCP carries without being asked for: the server asks for nothing that reaches the client.
        let blocks = u64::from(chance[0]) % 2 + 1;
        let first_copy = match chance[1] % 4 {
            0 | 1 => FirstCopy::Running,
            2 => FirstCopy::Unread(0),
            _ => FirstCopy::Unread(usize::from(chance[2]) * 16),
        };
        let late = if chance[3].is_multiple_of(2) { Delivered::AfterRepetition } else { Delivered::AfterNewer };
        Round {
            number,
            first: number * ROOM + u64::from(chance[4]) % 8,
            blocks,
            first_copy,
            end: if chance[5].is_multiple_of(2) { End::Close } else { End::Reset },
            delivered: delivered.unwrap_or(late),
            pause: Duration::from_millis(u64::from(chance[6]) % 8),
            is_dropped: chance[7].is_multiple_of(4),
        }
    }

    fn extent(&self) -> Extent {
        Extent::from_raw(self.first, self.blocks).unwrap()
    }

    /// The content of the round's first, second or third write.
    fn content(&self, which: u64) -> Vec<u8> {
        noise(1 + self.number * 3 + which, self.blocks as usize * BLOCK)
    }

    fn write(&self, which: u64, device: &DynDevice) -> Request {
        let data = Slice::copy_from(&self.content(which));
        let data = Sealed::seal(data, device.geometry().block_size, None, &Tags::default());
        Request::write(self.extent(), data, Durability::Volatile)
    }

    /// Which of its writes a device has there.
    async fn found(&self, device: &DynDevice) -> Option<u64> {
        let read = device.execute(Request::read(self.extent(), Expectations::NONE)).await.unwrap();
        let Response::Data(data) = read else { panic!("a read is answered with {read:?}") };
        (0..3).find(|which| data.joined_data()[..] == self.content(*which)[..])
    }

    /// The round, up to the newer write, which is acknowledged and flushed.
    async fn run(self, peer: &Peer, quiesce: Duration) {
        let proxy = Proxy::start(peer.address());
        let device = peer.open(proxy.address, quiesce).await;
        device.execute(self.write(0, &device)).await.unwrap();
        // What is not flushed may be gone with the connection, and the next Flush would tell of it.
        device.execute(Request::flush()).await.unwrap();
        let connections = proxy.connections();
        proxy.catch(match self.first_copy {
            FirstCopy::Running => usize::MAX,
            FirstCopy::Unread(passing) => passing,
        });
        let stage = Rc::new(Cell::new(Stage::Sending));
        let newer = spawn_work(self, device.clone(), Rc::clone(&stage));
        let sent_bytes = self.blocks as usize * BLOCK;
        self.wait("the write is sent", || proxy.caught() >= sent_bytes).await;
        stage.set(Stage::Sent);
        sleep(self.pause).await;
        match self.first_copy {
            FirstCopy::Running => proxy.cut(self.end),
            FirstCopy::Unread(_) => {
                proxy.cut_clients();
                let due = if self.delivered == Delivered::AfterRepetition { Stage::Newer } else { Stage::Ended };
                self.wait("what comes before the rest of the first copy", || stage.get() >= due).await;
                proxy.deliver(self.end).await;
            }
        }
        self.wait("the newer write is acknowledged and flushed", || stage.get() == Stage::Ended).await;
        newer.take().expect("it has ended").unwrap_or_else(|error| panic!("{self:?}: {error}"));
        assert!(proxy.connections() > connections, "{self:?}: no connection was lost");
    }

    async fn wait(&self, what: &str, is_so: impl Fn() -> bool) {
        let begun = now();
        while !is_so() {
            assert!(begun.elapsed() < LATE, "{self:?}: {what}");
            sleep(Duration::from_millis(1)).await;
        }
    }
}

/// How far the work of a round is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Debug)]
enum Stage {
    /// The first write is being sent.
    Sending,
    /// All its bytes are.
    Sent,
    /// It was sent again and acknowledged, or nobody waits for it any more.
    Newer,
    /// The newer one is acknowledged and flushed.
    Ended,
}

/// The write that is lost and sent again, then a newer one and a Flush.
fn spawn_work(round: Round, device: DynDevice, stage: Rc<Cell<Stage>>) -> Rc<Cell<Option<Result<(), Error>>>> {
    let outcome = Rc::new(Cell::new(None));
    let there = Rc::clone(&outcome);
    spawn(async move {
        let reached = Rc::clone(&stage);
        let work = async {
            // In a box, so that it is gone when it is dropped.
            let first = Box::pin(device.execute(round.write(1, &device)));
            let is_sent = || round.is_dropped && reached.get() == Stage::Sent;
            let sent = Box::pin(round.wait("the write is sent", is_sent));
            match round.is_dropped {
                true => drop(select(first, sent).await),
                false => drop(first.await?),
            }
            reached.set(Stage::Newer);
            device.execute(round.write(2, &device)).await?;
            device.execute(Request::flush()).await.map(drop)
        };
        there.set(Some(work.await));
        stage.set(Stage::Ended);
    });
    outcome
}

fn on_reactor(test: impl AsyncFnOnce()) {
    Reactor::new(Config::default()).expect("a reactor starts").block_on(async { test().await });
}

fn rounds() -> u64 {
    std::env::var("SEALBLOCK_RESENT_ROUNDS").map_or(BATCH, |text| text.parse().expect("a number of rounds"))
}

/// Blocks that all rounds need.
fn blocks() -> u64 {
    (rounds() + 1) * ROOM
}

/// All rounds, and what is there in the end: the newer content of each. `delivered` is when first copies arrive, if not as chance has it.
async fn none_is_undone(peer: &Peer, quiesce: Duration, delivered: Option<Delivered>) {
    none_of_batches(peer, quiesce, delivered, BATCH).await;
}

/// The same with so many rounds side by side.
async fn none_of_batches(peer: &Peer, quiesce: Duration, delivered: Option<Delivered>, batch: u64) {
    let all: Vec<Round> = (0..rounds()).map(|number| Round::of(number, delivered)).collect();
    for batch in all.chunks(batch as usize) {
        join_all(batch.iter().map(|round| round.run(peer, quiesce))).await;
    }
    // What is late may come now.
    sleep(2 * SLOW).await;
    let reader = peer.open(peer.address(), quiesce).await;
    let mut undone = Vec::new();
    for round in &all {
        let found = round.found(&reader).await;
        if found != Some(2) {
            undone.push(format!("write {found:?} instead of 2 after {round:?}"));
        }
    }
    assert!(undone.is_empty(), "{} of {} newer writes were undone:\n{}", undone.len(), all.len(), undone.join("\n"));
}

/// Our server, on a volume of which two in five requests are slow.
fn serve(place: &Place) -> Server {
    place.run(&format!("create v --size {}", blocks() * BLOCK as u64)).succeeds();
    let target = format!("fault:[seed=7;delay={}ms%40],v", SLOW.as_millis());
    let configuration = format!(
        "[[nbd]]\naddress = \"127.0.0.1:0\"\n[[subsystems]]\nname = \"v\"\nnamespaces = [{{ target = \"{target}\" }}]\n"
    );
    place.write("serve.toml", configuration.as_bytes());
    Server::start(place, "--config serve.toml")
}

#[test]
fn our_server_executes_no_write_of_a_lost_connection_after_a_newer_one() {
    let place = Place::new();
    let server = serve(&place);
    let nbd = server.ready["nbd"]["listeners"][0].as_str().unwrap().parse().unwrap();
    let subsystem = "nqn.2026-11.io.sealblock:v".to_owned();
    for peer in [Peer::Nbd(nbd, "v"), Peer::Nvme(server.address().parse().unwrap(), subsystem)] {
        // Its fences are all that there is: a client that waited instead would do so for longer than any step may take.
        on_reactor(async || none_is_undone(&peer, 10 * LATE, None).await);
    }
    server.stop().is_clean();
    place.run("verify v").succeeds();
}

/// qemu-nbd on a plain file, ended with the test.
struct Qemu {
    child: Child,
    address: SocketAddr,
}

impl Qemu {
    fn start(place: &Place) -> Qemu {
        File::create(place.path("disk")).unwrap().set_len(blocks() * BLOCK as u64).unwrap();
        let begun = Instant::now();
        loop {
            // It takes no port 0. Another may take the port in between; then there is another attempt.
            let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
            let mut command = Command::new("qemu-nbd");
            command.args(["-t", "-e", "0", "-b", "127.0.0.1", "-f", "raw", "-x", "disk", "-p"]);
            command.arg(address.port().to_string()).arg(place.path("disk"));
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let mut child = command.spawn().unwrap();
            while begun.elapsed() < LATE && child.try_wait().unwrap().is_none() {
                if TcpStream::connect(address).is_ok() {
                    return Qemu { child, address };
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = child.kill();
            let _ = child.wait();
            assert!(begun.elapsed() < LATE, "qemu-nbd does not start");
        }
    }

    fn peer(&self) -> Peer {
        Peer::Nbd(self.address, "disk")
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A server that has no fences gets nothing newer before the quiesce time, and the first copy comes within it.
#[test]
fn a_write_that_reaches_a_foreign_server_within_the_quiesce_time_undoes_nothing_newer() {
    if !has("qemu-nbd") {
        return skipped("there is no qemu-nbd here");
    }
    let place = Place::new();
    let qemu = Qemu::start(&place);
    on_reactor(async || none_is_undone(&qemu.peer(), QUIESCE, Some(Delivered::AfterRepetition)).await);
}

/// The same of any NVMe/TCP target, which has a namespace 1 of blocks of 4096 bytes to write to: Linux' nvmet is one, in a guest.
#[test]
fn a_write_that_reaches_a_foreign_target_within_the_quiesce_time_undoes_nothing_newer() {
    let Ok(given) = std::env::var("SEALBLOCK_RESENT_TARGET") else {
        return skipped("no SEALBLOCK_RESENT_TARGET=ADDRESS:PORT/NQN is given");
    };
    let (address, subsystem) = given.split_once('/').expect("ADDRESS:PORT/NQN");
    let peer = Peer::Nvme(address.parse().unwrap(), subsystem.to_owned());
    // It may be an emulated machine, and slow to connect to.
    on_reactor(async || none_of_batches(&peer, 4 * QUIESCE, Some(Delivered::AfterRepetition), BATCH / 4).await);
}

/// The limit of what a client can do alone: a server without fences that executes a write of a lost connection after the quiesce time
/// undoes a newer one. It also shows that rounds like these find what is undone.
#[test]
fn a_write_that_reaches_a_foreign_server_after_the_quiesce_time_is_executed() {
    if !has("qemu-nbd") {
        return skipped("there is no qemu-nbd here");
    }
    let place = Place::new();
    let qemu = Qemu::start(&place);
    on_reactor(async || {
        let peer = qemu.peer();
        let chosen = Round::of(0, Some(Delivered::AfterNewer));
        let round = Round { first_copy: FirstCopy::Unread(0), end: End::Close, is_dropped: false, ..chosen };
        round.run(&peer, Duration::ZERO).await;
        let reader = peer.open(peer.address(), Duration::ZERO).await;
        let begun = now();
        while round.found(&reader).await != Some(1) {
            assert!(begun.elapsed() < LATE, "the first copy is not executed");
            sleep(Duration::from_millis(5)).await;
        }
    });
}
