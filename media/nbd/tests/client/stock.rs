//! Stock servers: nbdkit and qemu-nbd. Without them these tests print that they are skipped.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::*;
use sealblock_block::{BlockState, Device, Durability, Expectations, Request, Response};
use sealblock_media_nbd::{Options, discover};

/// Longer than any of them takes to start.
const LATE: Duration = Duration::from_secs(30);

/// True if a program is installed; prints visibly if it is not.
fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !found {
        // The output of passed tests is hidden; this is shown without `--nocapture`.
        let _ = writeln!(std::io::stderr(), "skipped: there is no {program} here");
    }
    found
}

/// Another project's server, stopped at the end of the test.
struct Stock {
    child: Child,
    address: SocketAddr,
}

impl Stock {
    fn start(program: &str, arguments: impl Fn(&str) -> Vec<String>) -> Stock {
        let begun = Instant::now();
        loop {
            // Neither accepts port 0. Another program may use the port in between; then there is another attempt.
            let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
            let mut command = Command::new(program);
            command.args(arguments(&free.port().to_string())).stdin(Stdio::null()).stdout(Stdio::null());
            let mut child = command.stderr(Stdio::null()).spawn().unwrap();
            while begun.elapsed() < LATE && child.try_wait().unwrap().is_none() {
                if TcpStream::connect(free).is_ok() {
                    return Stock { child, address: free };
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = child.kill();
            let _ = child.wait();
            assert!(begun.elapsed() < LATE, "{program} does not start");
        }
    }

    fn nbdkit(plugin: &[&str]) -> Stock {
        Stock::start("nbdkit", |port| {
            let fixed = ["-f", "-i", "127.0.0.1", "-p", port];
            fixed.iter().chain(plugin).map(ToString::to_string).collect()
        })
    }
}

impl Drop for Stock {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A file that is deleted at the end of the test.
struct Scratch(std::path::PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

async fn runs(device: &impl Device, start: u64, blocks: u64) -> Vec<(u32, bool)> {
    let answer = device.execute(Request::block_status(extent(start, blocks))).await.unwrap();
    let Response::BlockStatus(runs) = answer else { panic!("{answer:?}") };
    let mut joined: Vec<(u32, bool)> = Vec::new();
    for (blocks, is_hole) in runs.iter().map(|run| (run.blocks.get(), run.state == BlockState::Hole)) {
        match joined.last_mut() {
            Some((last, same)) if *same == is_hole => *last += blocks,
            _ => joined.push((blocks, is_hole)),
        }
    }
    joined
}

/// What must work with every server.
async fn use_it(address: SocketAddr, export: &str, connections: u16) {
    let device = open(address, export, Options { connections, ..options() }).await;
    for (start, blocks) in [(0, 1), (100, 600), (2000, 17)] {
        write(&device, extent(start, blocks), start as u8).await.unwrap();
    }
    write_with(&device, extent(3000, 1), 9, Durability::ForceUnitAccess).await.unwrap();
    flush(&device).await.unwrap();
    for (start, blocks) in [(0, 1), (100, 600), (2000, 17)] {
        assert!(holds(&device, extent(start, blocks), start as u8).await);
    }
    for may_unmap in [true, false] {
        write(&device, extent(1000, 64), 5).await.unwrap();
        let zero = Request::write_zeroes(extent(1000, 64), may_unmap, Durability::Volatile);
        device.execute(zero).await.unwrap();
        assert!(read(&device, extent(1000, 64)).await.unwrap().joined_data().iter().all(|byte| *byte == 0));
    }
    device.execute(Request::discard([extent(2000, 8)])).await.unwrap();
    device.execute(Request::verify(extent(0, 4096), Expectations::NONE)).await.unwrap();
    device.device().close().await;
}

#[test]
fn nbdkit_stores_and_tells_holes() {
    if !has("nbdkit") {
        return;
    }
    run(|| async {
        let stock = Stock::nbdkit(&["memory", "16M"]);
        use_it(stock.address, "", 3).await;
        let device = open(stock.address, "", Options { connections: 3, ..options() }).await;
        assert_eq!(device.device().info().connections, 3);
        // nbdkit stores its memory in pages of 32 KiB, 8 blocks.
        assert_eq!(runs(&device, 0, 16).await, [(8, false), (8, true)]);
        let all: u32 = runs(&device, 0, 4096).await.iter().map(|run| run.0).sum();
        assert_eq!(all, 4096);
    });
}

#[test]
fn nbdkit_names_the_blocks_that_it_cannot_read() {
    if !has("nbdkit") {
        return;
    }
    run(|| async {
        // Reads that touch bytes of the block fail, and nbdkit's errors have no offset.
        let script = [
            "eval",
            "get_size=echo 16777216",
            "pread=if [ $4 -le 40960 ] && [ $(($4 + $3)) -gt 40960 ]; then echo EIO bad >&2; exit 1; fi; \
             dd if=/dev/zero count=$3 iflag=count_bytes 2>/dev/null",
        ];
        let stock = Stock::nbdkit(&script);
        let device = open(stock.address, "", options()).await;
        assert_eq!(bad(&read(&device, extent(8, 5)).await.unwrap_err()), [10]);
        read(&device, extent(11, 2)).await.unwrap();
        assert!(!device.abilities().writable);
    });
}

#[test]
fn qemu_stores_and_tells_holes() {
    if !has("qemu-nbd") {
        return;
    }
    run(|| async {
        let scratch = Scratch(std::env::temp_dir().join(format!("sealblock-media-nbd-{}", std::process::id())));
        std::fs::File::create(&scratch.0).unwrap().set_len(16 << 20).unwrap();
        let path = scratch.0.to_str().unwrap().to_owned();
        let stock = Stock::start("qemu-nbd", |port| {
            let fixed =
                ["-t", "-e", "4", "-b", "127.0.0.1", "-f", "raw", "-x", "disk", "-D", "words", "--discard=unmap"];
            fixed.iter().copied().chain(["-p", port, &path]).map(ToString::to_string).collect()
        });
        let names = discover(stock.address.into(), options()).await.unwrap();
        assert_eq!((names.len(), &names[0].name[..], &names[0].description[..]), (1, "disk", "words"));
        use_it(stock.address, "disk", 2).await;
        let bytes = std::fs::read(&scratch.0).unwrap();
        let device = open(stock.address, "disk", options()).await;
        assert!(bytes[..4096] == sealed(&device, extent(0, 1), 0).joined_data()[..], "it is in the file");
        let reported = runs(&device, 0, 4096).await;
        assert_eq!(reported.iter().map(|run| run.0).sum::<u32>(), 4096);
        assert!(reported.iter().any(|run| run.1) && reported.iter().any(|run| !run.1), "holes and data: {reported:?}");
    });
}
