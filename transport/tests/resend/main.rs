//! Clients that send changes again, over NBD and NVMe/TCP, on one path and on several. The first copy is executed late,
//! because the server is still executing it or because it is unread in a socket. It must not undo a newer change.
//!
//! Each test stops the first copy of a write at some point, loses its connection, and makes the client send the write
//! again and then a newer write. The first copy continues only once the newer write was acknowledged, or after
//! [`NEWER_MAY_TAKE`], because the newer write should wait. At the end the device must have the newer content.

mod proxy;
mod servers;

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, select};
use sealblock_block::{
    Clock, Device, DeviceOpener, Durability, DynDevice, Error, ErrorKind, Expectations, Outcome, Request, Response,
};
use sealblock_integrity::{Sealed, Tags};
use sealblock_layers_multipath::{MultipathLayer, PathConfig, RetryPolicy};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{Config, Reactor, now, sleep, spawn, timeout};
use sealblock_units::{BlockSize, Extent};

use proxy::{End, Proxy};
use servers::{Client, HeldWrite, Protocol, Settings, open, serve, serve_as};

/// The time after which the first copy continues even if no newer write was acknowledged.
const NEWER_MAY_TAKE: Duration = Duration::from_millis(150);
/// The time after which clients assume that a foreign server has ended a connection; much longer than
/// [`NEWER_MAY_TAKE`].
const QUIESCE: Duration = Duration::from_secs(3);
/// Longer than any step.
const LATE: Duration = Duration::from_secs(60);

fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    let reactor = Reactor::new(Config::default()).expect("a reactor starts");
    reactor.block_on(test());
}

fn write(byte: u8) -> Request {
    let data = Slice::copy_from(&[byte; 4096]);
    let data = Sealed::seal(data, BlockSize::B4096, None, &Tags::default());
    Request::write(Extent::from_raw(8, 1).unwrap(), data, Durability::Volatile)
}

async fn first_byte(device: &impl Device) -> u8 {
    match device.execute(Request::read(Extent::from_raw(8, 1).unwrap(), Expectations::NONE)).await.unwrap() {
        Response::Data(data) => data.joined_data()[0],
        other => panic!("a read is answered with data, not {other:?}"),
    }
}

async fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let begun = now();
    while !is_so() {
        assert!(begun.elapsed() < LATE, "{what}");
        sleep(Duration::from_millis(1)).await;
    }
}

/// A served device whose first write of 1 can be held, and a client that uses it through a proxy.
struct Setup {
    held: HeldWrite,
    proxy: Proxy,
    device: DynDevice,
}

impl Setup {
    async fn new(protocol: Protocol) -> Setup {
        let (held, server) = serve(protocol);
        let proxy = Proxy::start(server);
        let device = open(protocol, proxy.address, Settings { quiesce: QUIESCE, reconnects: true }).await.unwrap();
        Setup { held, proxy, device }
    }

    /// Writes 1, then 2, and sends a Flush; waits for each of them.
    fn both(&self) -> Newer {
        let device = self.device.clone();
        Newer::begin(async move {
            device.execute(write(1)).await?;
            newer(device).await
        })
    }

    /// Lets the first copy continue, and checks the final content.
    async fn end(self, newer: Newer, go_on: impl AsyncFnOnce(&Setup)) {
        newer.wait_a_moment().await;
        go_on(&self).await;
        newer.finish().await.unwrap();
        // Late requests may arrive during this time.
        sleep(Duration::from_millis(30)).await;
        assert_eq!(first_byte(&self.device).await, 2, "the newer write was undone");
        assert_eq!(self.held.content(), 2, "the newer write was undone");
    }
}

async fn newer(device: DynDevice) -> Outcome {
    device.execute(write(2)).await?;
    device.execute(Request::flush()).await
}

/// A task, and its outcome.
struct Newer(Rc<Cell<Option<Outcome>>>);

impl Newer {
    fn begin(work: impl Future<Output = Outcome> + 'static) -> Newer {
        let outcome = Rc::new(Cell::new(None));
        let there = Rc::clone(&outcome);
        spawn(async move { there.set(Some(work.await)) });
        Newer(outcome)
    }

    fn has_ended(&self) -> bool {
        let outcome = self.0.take();
        let has_ended = outcome.is_some();
        self.0.set(outcome);
        has_ended
    }

    async fn wait_a_moment(&self) {
        let begun = now();
        while !self.has_ended() && begun.elapsed() < NEWER_MAY_TAKE {
            sleep(Duration::from_millis(1)).await;
        }
    }

    async fn finish(self) -> Result<(), Error> {
        wait_until("the newer write is acknowledged", || self.has_ended()).await;
        self.0.take().expect("it has ended").map(drop)
    }
}

/// The connection is lost while the server executes the write: closed, or reset.
async fn running(protocol: Protocol, end: End) {
    let setup = Setup::new(protocol).await;
    setup.held.arm();
    let newer = setup.both();
    wait_until("the write runs", || setup.held.is_held()).await;
    setup.proxy.cut(end);
    setup.end(newer, async |setup| setup.held.release()).await;
}

#[test]
fn a_write_that_still_runs_undoes_nothing_newer() {
    for protocol in Protocol::ALL {
        for end in [End::Close, End::Reset] {
            run(|| running(protocol, end));
        }
    }
}

/// The connection is lost for the client. The server has not read the write yet, and its side of the connection is
/// still open.
async fn unread(protocol: Protocol, end: End) {
    let setup = Setup::new(protocol).await;
    setup.proxy.hold();
    let newer = setup.both();
    wait_until("the write is on its way", || setup.proxy.has_held()).await;
    setup.proxy.cut_clients();
    setup.end(newer, async |setup| setup.proxy.deliver(end).await).await;
}

#[test]
fn a_write_that_was_not_read_yet_undoes_nothing_newer() {
    for protocol in Protocol::ALL {
        for end in [End::Close, End::Reset] {
            run(|| unread(protocol, end));
        }
    }
}

/// An address leads to one gateway of a device, and then to another one, which knows nothing of the write that the first one still
/// executes.
async fn moved(protocol: Protocol, listed: [&'static [[u8; 16]]; 2], quiesce: Duration) -> u8 {
    let held = HeldWrite::new();
    let servers = listed.map(|listed| serve_as(protocol, &held, listed));
    let proxy = Proxy::start(servers[0]);
    let device = open(protocol, proxy.address, Settings { quiesce, reconnects: true }).await.unwrap();
    let setup = Setup { held, proxy, device };
    setup.held.arm();
    let newer = setup.both();
    wait_until("the write runs", || setup.held.is_held()).await;
    setup.proxy.lead_to(servers[1]);
    setup.proxy.cut(End::Reset);
    newer.wait_a_moment().await;
    setup.held.release();
    newer.finish().await.unwrap();
    sleep(Duration::from_millis(30)).await;
    setup.held.content()
}

#[test]
fn a_write_that_another_gateway_behind_the_address_executes_undoes_nothing_newer() {
    const GATEWAYS: [&[[u8; 16]]; 2] = [&[[1; 16], [9; 16]], &[[2; 16], [9; 16]]];
    for protocol in [Protocol::Nbd, Protocol::Nvme] {
        run(|| async move {
            assert_eq!(moved(protocol, GATEWAYS, QUIESCE / 10).await, 2, "{protocol:?}");
            // Twin: as one server, which would have fenced it.
            assert_eq!(moved(protocol, [GATEWAYS[0]; 2], QUIESCE / 10).await, 1, "{protocol:?}");
        });
    }
}

/// No caller waits for the write any more; its connection is still open.
async fn dropped(protocol: Protocol, is_lost: bool) {
    let setup = Setup::new(protocol).await;
    setup.held.arm();
    let first: Pin<Box<dyn Future<Output = Outcome> + '_>> = Box::pin(setup.device.execute(write(1)));
    let runs = Box::pin(wait_until("the write runs", || setup.held.is_held()));
    let Either::Right(((), first)) = select(first, runs).await else { panic!("the write is held") };
    drop(first);
    if is_lost {
        setup.proxy.cut(End::Reset);
    }
    let newer = Newer::begin(newer(setup.device.clone()));
    setup.end(newer, async |setup| setup.held.release()).await;
}

#[test]
fn a_write_whose_future_was_dropped_undoes_nothing_newer() {
    for protocol in Protocol::ALL {
        run(|| dropped(protocol, false));
        run(|| dropped(protocol, true));
    }
}

/// Before a client is closed, it waits until the server has executed the write that nobody waits for any more: another host knows
/// nothing of it.
async fn closing_beside_a_dropped_write(protocol: Protocol) {
    let (held, server) = serve(protocol);
    let client = Client::connect(protocol, server, Settings { quiesce: QUIESCE, reconnects: true }).await.unwrap();
    held.arm();
    let device = client.device();
    let first: Pin<Box<dyn Future<Output = Outcome> + '_>> = Box::pin(device.execute(write(1)));
    let runs = Box::pin(wait_until("the write runs", || held.is_held()));
    let Either::Right(((), first)) = select(first, runs).await else { panic!("the write is held") };
    drop(first);
    assert!(timeout(NEWER_MAY_TAKE, client.settled()).await.is_err(), "{protocol:?}: it may still be executed");
    held.release();
    assert_eq!(timeout(QUIESCE / 2, client.settled()).await, Ok(true), "{protocol:?}: it has been");
}

#[test]
fn a_close_waits_for_a_write_that_was_dropped() {
    for protocol in Protocol::ALL {
        run(|| closing_beside_a_dropped_write(protocol));
    }
}

/// Whether all of its changes have ended once a client is closed, beside a write that is still in flight or has ended.
async fn closed_beside_a_write(protocol: Protocol, has_ended: bool) -> bool {
    let (held, server) = serve(protocol);
    let client = Client::connect(protocol, server, Settings { quiesce: QUIESCE, reconnects: true }).await.unwrap();
    held.arm();
    let device = client.device();
    let first = Newer::begin(async move { device.execute(write(1)).await });
    wait_until("the write runs", || held.is_held()).await;
    if has_ended {
        held.release();
        first.finish().await.unwrap();
    }
    client.close().await
}

#[test]
fn what_is_in_flight_when_a_client_is_closed_may_still_be_executed() {
    for protocol in Protocol::ALL {
        run(|| async move {
            assert!(!closed_beside_a_write(protocol, false).await, "{protocol:?}");
            assert!(closed_beside_a_write(protocol, true).await, "{protocol:?}");
        });
    }
}

/// The client waits for a server that does not fence sessions, but no longer than the limit.
#[test]
fn a_change_that_waits_too_long_for_a_late_one_fails_and_says_why() {
    run(|| async {
        let (held, server) = serve(Protocol::ForeignNbd);
        let proxy = Proxy::start(server);
        let settings = Settings { quiesce: LATE * 10, reconnects: true };
        let device = open(Protocol::ForeignNbd, proxy.address, settings).await.unwrap();
        held.arm();
        let first = Newer::begin({
            let device = device.clone();
            async move { device.execute(write(1)).await }
        });
        wait_until("the write runs", || held.is_held()).await;
        proxy.cut(End::Close);
        first.finish().await.unwrap();
        // Changes to other blocks are not delayed.
        let beside = Request::write_zeroes(Extent::from_raw(9, 1).unwrap(), false, Durability::Volatile);
        device.execute(beside).await.unwrap();
        assert_eq!(first_byte(&device).await, 1);
        let waiting = Newer::begin(newer(device.clone()));
        waiting.wait_a_moment().await;
        assert!(!waiting.has_ended());
    });
}

struct ReactorClock;

impl Clock for ReactorClock {
    async fn sleep(&self, delay: Duration) {
        sleep(delay).await;
    }
}

/// Two paths to one server, each through its own proxy.
async fn several_paths(protocol: Protocol, lose: impl AsyncFnOnce(&[Proxy; 2], &HeldWrite, &DynDevice) -> Newer) {
    let (held, server) = serve(protocol);
    let proxies = [Proxy::start(server), Proxy::start(server)];
    let mut paths = Vec::new();
    for proxy in &proxies {
        let address = proxy.address;
        let settings = Settings { quiesce: QUIESCE, reconnects: false };
        let source = DeviceOpener::new("path", move || async move {
            open(protocol, address, settings).await.map_err(|reason| ErrorKind::Unreachable { reason }.into())
        });
        let device = Some(source.open().await.unwrap());
        paths.push(PathConfig { source, quiesce: None, device });
    }
    let policy = RetryPolicy { quiesce_time: QUIESCE, ..RetryPolicy::default() };
    let (layer, worker) = MultipathLayer::new(paths, ReactorClock, policy).unwrap();
    spawn(worker.run());
    let device = DynDevice::new("multipath", layer);
    let newer = lose(&proxies, &held, &device).await;
    newer.wait_a_moment().await;
    held.release();
    for proxy in &proxies {
        proxy.deliver(End::Close).await;
    }
    // The Flush fails if a path was lost with unflushed writes, and reports it.
    let _ = newer.finish().await;
    sleep(Duration::from_millis(30)).await;
    assert_eq!(held.content(), 2, "the newer write was undone");
}

fn both_on(device: &DynDevice) -> Newer {
    let device = device.clone();
    Newer::begin(async move {
        device.execute(write(1)).await?;
        device.execute(write(2)).await
    })
}

#[test]
fn a_late_write_of_one_path_undoes_nothing_that_another_one_brought() {
    for protocol in Protocol::ALL {
        run(|| {
            several_paths(protocol, async |proxies, held, device| {
                held.arm();
                let newer = both_on(device);
                wait_until("the write runs", || held.is_held()).await;
                proxies.iter().for_each(|proxy| proxy.cut(End::Reset));
                newer
            })
        });
        run(|| {
            several_paths(protocol, async |proxies, _, device| {
                proxies.iter().for_each(Proxy::hold);
                let newer = both_on(device);
                wait_until("the write is on its way", || proxies.iter().any(Proxy::has_held)).await;
                proxies.iter().for_each(Proxy::cut_clients);
                newer
            })
        });
    }
}

#[test]
fn a_dropped_write_of_one_path_undoes_nothing_that_another_one_brought() {
    for protocol in Protocol::ALL {
        run(|| {
            several_paths(protocol, async |_, held, device| {
                held.arm();
                let first: Pin<Box<dyn Future<Output = Outcome> + '_>> = Box::pin(device.execute(write(1)));
                let runs = Box::pin(wait_until("the write runs", || held.is_held()));
                let Either::Right(((), first)) = select(first, runs).await else { panic!("the write is held") };
                drop(first);
                let device = device.clone();
                Newer::begin(async move { device.execute(write(2)).await })
            })
        });
    }
}
