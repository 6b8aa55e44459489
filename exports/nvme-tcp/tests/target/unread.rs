//! Hosts that read but never receive the data: what they can make the target hold, and for how long.

use std::time::Duration;

use crate::common::*;
use sealblock_exports_nvme_tcp::Limits;
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_protocols_nvme::{Command, DataPointer};
use sealblock_runtime_reactor::{sleep, timeout};

const HOSTS: usize = 64;
const READS: usize = 16;
const READ_BYTES: usize = 1 << 20;
/// Commands over Fabrics have SGLs (Base, "Command Dword 0").
const PSDT_SGL: u8 = 0x40;

/// Anonymous memory of this process, in bytes.
fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().trim().parse::<usize>().unwrap() << 10
}

fn read() -> Command {
    IoCommand::Read(blocks(0, READ_BYTES as u64 / 4096)).encode(PLAIN).unwrap()
}

async fn ask(io: &mut Queue) -> u16 {
    io.submit(read(), Data::Read(READ_BYTES)).await
}

/// Sends the same request on a queue whose socket buffers are full.
async fn ask_without_receiving(io: &mut Queue, cid: u16) {
    let mut command = read();
    (command.flags, command.cid) = (PSDT_SGL, cid.into());
    command.dptr = DataPointer::Transport { length_bytes: READ_BYTES as u32 }.descriptor();
    io.send_raw(&capsule(&command)).await;
}

#[test]
fn many_hosts_that_never_receive_stay_within_the_limit_and_delay_no_other() {
    run(|| async {
        // The reserve of each connection, and little more. A single address gets at most three quarters of the
        // connections.
        let limits = Limits { connections: 3 * HOSTS, total_bytes_in_flight: 0, ..short() };
        let most_bytes = limits.connections * (READ_BYTES + (64 << 10));
        let served = serve(limits);
        let (_admin, mut good) = Queue::pair(served.address, false).await;
        let data = pattern(READ_BYTES, 3);
        let write = IoCommand::Write(blocks(0, READ_BYTES as u64 / 4096));
        good.io(PLAIN, write, Data::Write(data.clone())).await.ok();
        let mut hosts = Vec::new();
        for _ in 0..HOSTS {
            hosts.push(Queue::pair(served.address, false).await);
        }
        let before = resident_bytes();
        for (_, io) in &mut hosts {
            for cid in 0..READS {
                ask_without_receiving(io, cid as u16).await;
            }
        }
        let mut highest = 0;
        for _ in 0..20 {
            sleep(Duration::from_millis(50)).await;
            highest = highest.max(resident_bytes().saturating_sub(before));
        }
        assert!(highest <= most_bytes, "{highest} bytes, of {most_bytes} at most");
        assert!(highest > HOSTS * READ_BYTES / 2, "{highest} bytes: that is all that is held of what was asked for");
        for _ in 0..4 {
            let cid = ask(&mut good).await;
            let done = timeout(Duration::from_secs(20), good.done(cid)).await.expect("other hosts delay none");
            assert!(done.ok().data == data);
        }
    });
}

#[test]
fn a_host_that_receives_nothing_times_out_and_a_slow_one_does_not() {
    run(|| async {
        let served = serve(Limits { receive: Duration::from_secs(1), ..short() });
        let (_good_admin, mut slow) = Queue::pair(served.address, false).await;
        let (_admin, mut deaf) = Queue::pair(served.address, false).await;
        let mut cids = Vec::new();
        for cid in 0..READS {
            ask_without_receiving(&mut deaf, cid as u16).await;
            cids.push(ask(&mut slow).await);
        }
        let gone = async {
            while served.target.connections() > 3 {
                sleep(Duration::from_millis(20)).await;
            }
        };
        let slowly = async {
            for cid in cids {
                sleep(Duration::from_millis(300)).await;
                slow.done(cid).await.ok();
            }
        };
        slowly.await;
        timeout(Duration::from_secs(20), gone).await.expect("a queue that takes nothing is ended");
        assert_eq!(served.target.connections(), 3, "the others stay");
        let cid = ask(&mut slow).await;
        slow.done(cid).await.ok();
    });
}
