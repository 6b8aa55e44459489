//! Many connections, at once and in sequence.

use std::net::Ipv4Addr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::context::TestContext;
use crate::process::limits;
use crate::wire::{Data, HANG_TIMEOUT, Peer, SUBNQN, connect, icreq};

/// The number of connections of a flood for each unit of effort.
const FLOOD: usize = 2000;
/// The number of loopback source addresses of a flood, from 127.0.0.1 on. One address has too few ports for a million
/// connections, because some ports stay in TIME_WAIT for a minute.
const SOURCES: u8 = 64;

pub(super) fn crowd(context: &TestContext) -> Result<()> {
    let most = limits().connections;
    let mut crowd = Vec::new();
    // Existing connections, such as the bystander's, count against the limit. A single address gets only a share of the
    // connections.
    for (source, share) in [(2, most / 2), (3, most / 4), (4, most / 4)] {
        let before = crowd.len();
        while let Ok(peer) = Peer::ready_from(Ipv4Addr::new(127, 0, 0, source), context.address) {
            crowd.push(peer);
            ensure!(crowd.len() <= most, "{} connections where {most} are the limit", crowd.len());
        }
        let got = crowd.len() - before;
        ensure!(got <= share, "{got} silent connections of an address whose share is {share}");
    }
    ensure!(crowd.len() + 8 > most, "only {} connections where {most} are the limit", crowd.len());
    // A host from another address is still served: a silent connection is closed to make room.
    let mut host = Peer::ready_from(Ipv4Addr::new(127, 0, 0, 5), context.address)?;
    let (command, data) = connect(SUBNQN, 0, 32, 0xFFFF, 0);
    let answer = host.call(command, Data::Write(&data))?;
    ensure!(answer.status == 0, "Connect beside a crowd: {answer:?}");
    ensure!(host.property_get(0x1C, 4)?.status == 0, "the host's controller does not answer");
    for _ in 0..most {
        let mut late = Peer::open_from(Ipv4Addr::new(127, 0, 0, 2), context.address)?;
        late.try_send(&icreq(0));
        ensure!(late.read_to_end()?.is_empty(), "a connection above the limit is served");
    }
    // All connections end, some by a reset.
    for (index, peer) in crowd.into_iter().enumerate() {
        if index % 2 == 0 {
            peer.reset();
        }
    }
    wait_served(context)
}

/// Waits until a correct host can connect again.
fn wait_served(context: &TestContext) -> Result<()> {
    let start = Instant::now();
    loop {
        match Peer::admin(context.address, SUBNQN, 0) {
            Ok(_) => return Ok(()),
            Err(error) => ensure!(start.elapsed() < HANG_TIMEOUT, "no host is served any more: {error:#}"),
        }
        sleep(Duration::from_millis(20));
    }
}

pub(super) fn flood(context: &TestContext) -> Result<()> {
    let start = Instant::now();
    let mut made = 0;
    while made < FLOOD * context.effort && start.elapsed() < context.time {
        let source = Ipv4Addr::new(127, 0, 0, 1 + (made % usize::from(SOURCES)) as u8);
        let mut peer = Peer::open_from(source, context.address).with_context(|| format!("connection {made}"))?;
        match made % 4 {
            0 => {}
            1 => drop(peer.try_send(&icreq(0))),
            2 => drop(peer.try_send(&icreq(0)[..made % 128])),
            _ => drop(peer.try_send(&[0xA5; 200])),
        }
        // Without resets, the attacker would run out of ports nevertheless.
        if made % 61 == 0 {
            drop(peer)
        } else {
            peer.reset()
        }
        made += 1;
    }
    println!("    {made} connections in {:.1} s", start.elapsed().as_secs_f64());
    wait_served(context)
}

pub(super) fn controllers(context: &TestContext) -> Result<()> {
    for turn in 0..context.effort * 200 {
        let (admin, cntlid) = Peer::admin(context.address, SUBNQN, 0)?;
        let io = Peer::io(context.address, SUBNQN, 1, cntlid)?;
        match turn % 3 {
            0 => drop((admin, io)),
            1 => {
                io.reset();
                admin.reset();
            }
            _ => {
                admin.reset();
                let mut io = io;
                io.read_to_end()?;
            }
        }
    }
    Ok(())
}
