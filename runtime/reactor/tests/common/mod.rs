//! Runs one test with every way to set up a reactor.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use sealblock_runtime_memory::Buffer;
use sealblock_runtime_reactor::net::{Listener, Stream};
use sealblock_runtime_reactor::{Backend, BackendChoice, Config, Reactor, TaskrunMode, spawn, timeout, yield_now};

/// A small configuration, since tests start many reactors.
pub fn small() -> Config {
    Config { pool_arena_bytes: 4 << 20, ..Config::default() }
}

pub fn uring() -> Config {
    Config { runtime: BackendChoice::Uring, ..small() }
}

pub fn syscalls() -> Config {
    Config { runtime: BackendChoice::Syscalls, ..small() }
}

/// True if this kernel allows a ring. If not, the tests still run on the other backend.
pub fn has_uring() -> bool {
    let has = Reactor::new(uring()).is_ok();
    if !has {
        eprintln!("no io_uring here: only the system call backend is tested");
    }
    has
}

pub fn configurations() -> Vec<Config> {
    let mut all = vec![syscalls(), Config { syscall_threads: 1, spin_us: 50, ..syscalls() }];
    if has_uring() {
        all.push(uring());
        all.push(Config { fixed_files_limit: 0, pool_arena_bytes: 0, ..uring() });
        all.push(Config { operations_in_flight_limit: 2, fixed_files_limit: 1, ..uring() });
        all.push(Config { spin_us: 50, ..uring() });
        all.push(Config { best_taskrun: TaskrunMode::Cooperative, ..uring() });
        all.push(Config { best_taskrun: TaskrunMode::Plain, ..uring() });
    }
    all
}

pub fn everywhere(test: impl Fn(&Reactor)) {
    for config in configurations() {
        let reactor = Reactor::new(config).expect("a reactor starts");
        eprintln!("on {}", reactor.backend());
        test(&reactor);
    }
}

pub fn is_uring(reactor: &Reactor) -> bool {
    matches!(reactor.backend(), Backend::Uring(_))
}

/// Polls once, so that the operation starts. True if it is still in flight.
pub async fn start<F: Future>(future: Pin<&mut F>) -> bool {
    let mut future = Some(future);
    std::future::poll_fn(|_| {
        let future = future.take().expect("polled once");
        Poll::Ready(future.poll(&mut Context::from_waker(Waker::noop())).is_pending())
    })
    .await
}

/// Longer than any test takes on this machine, so that a test that would hang fails.
pub const LATE: Duration = Duration::from_secs(30);

/// Any free port of the loopback interface.
pub fn loopback() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

pub fn listen() -> (Listener, SocketAddr) {
    let listener = Listener::bind(loopback(), 256).expect("listens");
    let address = listener.local_addr().expect("has an address");
    (listener, address)
}

/// Two ends of a connection: the one that connected, and the one that was accepted.
pub async fn pair() -> (Stream, Stream) {
    let (listener, address) = listen();
    let connecting = spawn(Stream::connect(address));
    let (accepted, peer) = listener.accept().await.expect("accepts");
    let connected = connecting.await.expect("is not aborted").expect("connects");
    assert_eq!(connected.local_addr().expect("has an address"), peer);
    (connected, accepted)
}

/// Receives until `len` bytes are there, with room for `chunk_bytes` at a time; stops early at the end of the stream.
pub async fn receive(stream: &Stream, len: usize, chunk_bytes: usize) -> Vec<u8> {
    let (mut all, mut buffer) = (Vec::new(), Buffer::zeroed(chunk_bytes));
    while all.len() < len {
        let result;
        (result, buffer) = timeout(LATE, stream.recv(buffer)).await.expect("bytes that were sent arrive");
        match result.expect("receives") {
            0 => break,
            count => all.extend_from_slice(&buffer[..count]),
        }
    }
    all
}

/// Lets the reactor run enough turns that everything that was started makes all the progress that needs no peer.
pub async fn settle() {
    for _ in 0..20 {
        yield_now().await;
    }
}

pub fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i / 251 + i * 7 + seed * 31) as u8).collect()
}
