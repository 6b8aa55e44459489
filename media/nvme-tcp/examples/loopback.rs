//! Random 4 KiB reads and writes of a null device over loopback; the target runs on one core and this host on another.
//!
//! `loopback [SECONDS] [DEPTH ...]`; with `ADDRESS=host:port NQN=name` in the environment it uses that target instead.

use std::cell::Cell;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use sealblock_block::{Device, Durability, DynDevice, Expectations, Request};
use sealblock_exports_nvme_tcp::{Limits, Namespace, Subsystem, Target};
use sealblock_integrity::{Sealed, Tags};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_null::NullDevice;
use sealblock_media_nvme_tcp::{HostPort, NvmeTcpDevice, Options};
use sealblock_runtime_memory::Buffer;
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{Config, Reactor, spawn};
use sealblock_units::{BlockSize, Extent};

const NQN: &str = "nqn.2026-11.org.sealblock:load";
const BLOCKS: u64 = 1 << 20;

fn config() -> Config {
    Config { spin_us: 50, ..Config::default() }
}

/// Serves a null device on its own thread until the process ends.
fn serve() -> SocketAddr {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        let reactor = Reactor::new(config()).expect("a reactor starts");
        reactor.block_on(async {
            let null = NullDevice::new(BlockSize::B4096, BLOCKS, None);
            let namespace = Namespace::new(SharedDevice::publish(DynDevice::new("null", null)), [1; 16]);
            let subsystem = Subsystem::new(NQN.parse().expect("a valid name"), "LOAD");
            let subsystem = subsystem.with_namespace(1, namespace).expect("a valid namespace");
            let limits = Limits { commands: 256, ..Limits::default() };
            let target = Target::new([subsystem], limits).expect("one subsystem");
            let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 16).expect("a port");
            tell.send(listener.local_addr().expect("an address")).expect("the receiver is alive");
            let _ = target.serve(listener).await;
        });
    });
    told.recv().expect("the target starts")
}

/// One request after another until the time is up.
async fn one(device: NvmeTcpDevice, seed: u64, writes: Option<Sealed>, until: Instant, done: Rc<Cell<u64>>) {
    let mut state = seed | 1;
    loop {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let extent = Extent::from_raw(state % BLOCKS, 1).expect("one block");
        let operation = match &writes {
            None => Request::read(extent, Expectations::NONE),
            Some(data) => Request::write(extent, data.clone(), Durability::Volatile),
        };
        device.execute(operation).await.expect("requests succeed");
        done.set(done.get() + 1);
        if Instant::now() >= until {
            return;
        }
    }
}

/// Core time that this thread has used, in nanoseconds; time used by others does not count.
fn cpu_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|field| field.parse().ok()).unwrap_or(0)
}

async fn measure(device: &NvmeTcpDevice, depth: usize, writes: bool, time: Duration) {
    let data = Sealed::seal(Buffer::zeroed(4096).freeze(), BlockSize::B4096, None, &Tags::default());
    let (begin, begin_cpu, done) = (Instant::now(), cpu_ns(), Rc::new(Cell::new(0)));
    let tasks: Vec<_> = (0..depth)
        .map(|i| {
            let data = writes.then(|| data.clone());
            let work = one(
                device.clone(),
                (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15),
                data,
                begin + time,
                Rc::clone(&done),
            );
            spawn(work)
        })
        .collect();
    for task in tasks {
        task.await.expect("nothing is aborted");
    }
    let iops = done.get() as f64 / begin.elapsed().as_secs_f64();
    let cpu_us = (cpu_ns() - begin_cpu) as f64 / 1e3 / done.get() as f64;
    let kind = if writes { "write" } else { "read" };
    println!(
        "4 KiB random {kind:5} depth {depth:3}: {iops:8.0} IOPS, {:7.2} us each, {cpu_us:5.2} us of this core",
        depth as f64 * 1e6 / iops
    );
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let seconds: f64 = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(2.0);
    let mut depths: Vec<usize> = arguments.filter_map(|text| text.parse().ok()).collect();
    if depths.is_empty() {
        depths = vec![1, 32, 128];
    }
    let address = match std::env::var("ADDRESS").ok().and_then(|text| text.parse::<SocketAddr>().ok()) {
        Some(address) => address,
        None => serve(),
    };
    let nqn = std::env::var("NQN").unwrap_or_else(|_| NQN.to_owned());
    let reactor = Reactor::new(config()).expect("a reactor starts");
    reactor.block_on(async {
        let options = Options { queue_depth: 128, ..Options::default() };
        let subsystem = nqn.parse().expect("NQN is a name");
        let device = NvmeTcpDevice::connect(HostPort::from(address), subsystem, None, options).await;
        let device = device.unwrap_or_else(|error| panic!("{error}"));
        for &depth in &depths {
            for writes in [false, true] {
                measure(&device, depth, writes, Duration::from_secs_f64(seconds)).await;
            }
        }
        device.close().await;
    });
}
