//! Rounds of writes that are sent again to a server in a process of its own, whoever wrote it: none may undo a newer one.
//!
//! ```console
//! $ sealblock serve v --nbd 127.0.0.1:10809 &
//! $ cargo run --release -p sealblock-transport --example resend -- nbd 127.0.0.1:10809 v 100 $!
//! ```
//!
//! Each round writes a block, loses the connection behind it, writes something newer to the block and flushes. With the number of the
//! server's process it is stopped (SIGSTOP) before the write and goes on after the loss, so that the first copy lies unread in its
//! socket; without it the server should delay writes (`fault:[delay=30ms@8],v`), so that the first copy runs.

#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../tests/resend/proxy.rs"]
mod proxy;

use std::net::SocketAddr;
use std::process::{Command, ExitCode};
use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{Device, Durability, DynDevice, Error, Outcome, Request, Response};
use sealblock_integrity::{Checks, Sealed, Tags};
use sealblock_media_nbd::{Address, NbdDevice, Options as NbdOptions};
use sealblock_media_nvme_tcp::{HostPort, NvmeTcpDevice, Options as NvmeOptions, Reconnect};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{Config, Reactor, sleep, spawn};
use sealblock_units::{BlockSize, Extent};

use proxy::{End, Proxy};

/// Blocks of this many bytes of the export are written.
const BYTES: u64 = 4096;
/// The block, in these.
const BLOCK: u64 = 8;
/// How long a foreign server may take to end a connection.
const QUIESCE: Duration = Duration::from_millis(300);
/// How long bytes may take through the proxy into the server's socket.
const ON_THE_WAY: Duration = Duration::from_millis(8);

type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(report) => {
            println!("{report}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<String, Failure> {
    let [protocol, address, export, rounds, process @ ..] = arguments else {
        return Err("usage: resend nbd|nvme ADDRESS:PORT EXPORT|NQN ROUNDS [PID]".into());
    };
    let (address, rounds): (SocketAddr, u64) = (address.parse()?, rounds.parse()?);
    let process = process.first().map(String::as_str);
    let reactor = Reactor::new(Config::default())?;
    reactor.block_on(async {
        let proxy = Proxy::start(address);
        let device = open(protocol, proxy.address, export).await?;
        let (mut undone, mut failed) = (0, 0);
        for number in 0..rounds {
            match round(&device, &proxy, number, process).await {
                Ok(true) => {}
                Ok(false) => undone += 1,
                // A flush after a loss says once that writes may be lost.
                Err(error) if number == 0 => return Err(error.into()),
                Err(_) => failed += 1,
            }
        }
        match undone {
            0 => Ok(format!("{rounds} rounds: none undone, {failed} without an outcome")),
            _ => Err(format!("{rounds} rounds: {undone} UNDONE").into()),
        }
    })
}

async fn open(protocol: &str, address: SocketAddr, export: &str) -> Result<DynDevice, Failure> {
    let (first_delay, max_delay) = (Duration::from_millis(1), Duration::from_millis(10));
    let reconnect = Reconnect { attempts: 10_000, total: Duration::from_secs(60), first_delay, max_delay };
    Ok(match protocol {
        "nbd" => {
            let options =
                NbdOptions { reconnect, quiesce: QUIESCE, max_connection_losses: u8::MAX, ..NbdOptions::default() };
            let device = NbdDevice::connect(Address::from(address), export, options).await?;
            println!("the server fences: {}", device.info().is_fenced);
            DynDevice::new("nbd", device)
        }
        "nvme" => {
            let options = NvmeOptions { reconnect, max_connection_losses: u8::MAX, ..NvmeOptions::default() };
            DynDevice::new(
                "nvme",
                NvmeTcpDevice::connect(HostPort::from(address), export.parse()?, Some(1), options).await?,
            )
        }
        other => return Err(format!("{other} is no protocol: write nbd or nvme").into()),
    })
}

/// True if the newer write is there.
async fn round(device: &DynDevice, proxy: &Proxy, number: u64, process: Option<&str>) -> Result<bool, Error> {
    let (first, newer) = ((number * 2) as u8 | 1, (number * 2) as u8 & !1);
    signal(process, "STOP");
    let outcome = Rc::new(std::cell::Cell::new(None::<Outcome>));
    let (there, writes) = (Rc::clone(&outcome), device.clone());
    spawn(async move {
        let both = async {
            writes.execute(write(&writes, first)).await?;
            writes.execute(write(&writes, newer)).await
        };
        there.set(Some(both.await));
    });
    sleep(ON_THE_WAY).await;
    match number % 3 {
        0 => proxy.cut(End::Close),
        1 => proxy.cut(End::Reset),
        // The server takes its connection for alive.
        _ => proxy.cut_clients(),
    }
    sleep(ON_THE_WAY).await;
    signal(process, "CONT");
    let outcome = loop {
        match outcome.take() {
            Some(outcome) => break outcome,
            None => sleep(Duration::from_millis(1)).await,
        }
    };
    outcome?;
    let flushed = device.execute(Request::flush()).await;
    // What is late may come now.
    sleep(Duration::from_millis(40)).await;
    let there = device.execute(Request::read(extent(device), Checks::NONE)).await?;
    let Response::Data(data) = there else { return Ok(false) };
    let is_newer = data.joined_data().iter().all(|byte| *byte == newer);
    if is_newer { flushed.map(|_| true) } else { Ok(false) }
}

fn signal(process: Option<&str>, name: &str) {
    if let Some(process) = process {
        let done = Command::new("kill").args([&format!("-{name}"), process]).status();
        assert!(done.is_ok_and(|status| status.success()), "kill -{name} {process}");
    }
}

fn extent(device: &DynDevice) -> Extent {
    let blocks = BYTES / device.geometry().block_size.bytes() as u64;
    Extent::from_raw(BLOCK * blocks, blocks).expect("an extent has blocks")
}

fn write(device: &DynDevice, byte: u8) -> Request {
    let size: BlockSize = device.geometry().block_size;
    let (extent, data) = (extent(device), Slice::copy_from(&[byte; BYTES as usize]));
    let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: extent.start().get() };
    Request::write(extent, Sealed::seal(data, size, device.geometry().protection, &tags), Durability::Volatile)
}
