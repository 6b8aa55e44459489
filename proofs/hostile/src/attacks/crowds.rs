//! Many connections: at once, and one after the other.

use std::net::Ipv4Addr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::TestContext;
use crate::process::limits;
use crate::wire::{HANG, Peer, SUBNQN, icreq};

/// Connections of a flood for each unit of effort.
const FLOOD: usize = 2000;
/// Loopback addresses that a flood comes from, 127.0.0.1 and on: the ports of one would not do for a million, since some
/// connections end well and keep theirs for a minute.
const SOURCES: u8 = 64;

pub(super) fn crowd(scene: &TestContext) -> Result<()> {
    let most = limits().connections;
    let mut crowd = Vec::new();
    // Those that are there already, such as a neighbour's, leave less than the limit.
    while let Ok(peer) = Peer::ready(scene.address, 0) {
        crowd.push(peer);
        ensure!(crowd.len() <= most, "{} connections where {most} are the limit", crowd.len());
    }
    ensure!(crowd.len() + 8 > most, "only {} connections where {most} are the limit", crowd.len());
    for _ in 0..most {
        let mut late = Peer::open(scene.address)?;
        late.try_send(&icreq(0));
        ensure!(late.finished()?.is_empty(), "a connection above the limit is served");
    }
    // The places are given back, some by a reset.
    for (index, peer) in crowd.into_iter().enumerate() {
        if index % 2 == 0 {
            peer.reset();
        }
    }
    back_to_normal(scene)
}

/// Waits until a good host is served again.
fn back_to_normal(scene: &TestContext) -> Result<()> {
    let start = Instant::now();
    loop {
        match Peer::admin(scene.address, SUBNQN, 0) {
            Ok(_) => return Ok(()),
            Err(error) => ensure!(start.elapsed() < HANG, "nobody is served any more: {error:#}"),
        }
        sleep(Duration::from_millis(20));
    }
}

pub(super) fn flood(scene: &TestContext) -> Result<()> {
    let start = Instant::now();
    let mut made = 0;
    while made < FLOOD * scene.effort && start.elapsed() < scene.time {
        let source = Ipv4Addr::new(127, 0, 0, 1 + (made % usize::from(SOURCES)) as u8);
        let mut peer = Peer::open_from(source, scene.address).with_context(|| format!("connection {made}"))?;
        match made % 4 {
            0 => {}
            1 => drop(peer.try_send(&icreq(0))),
            2 => drop(peer.try_send(&icreq(0)[..made % 128])),
            _ => drop(peer.try_send(&[0xA5; 200])),
        }
        // Without resets this side would run out of ports all the same.
        if made % 61 == 0 {
            drop(peer)
        } else {
            peer.reset()
        }
        made += 1;
    }
    println!("    {made} connections in {:.1} s", start.elapsed().as_secs_f64());
    back_to_normal(scene)
}

pub(super) fn controllers(scene: &TestContext) -> Result<()> {
    for turn in 0..scene.effort * 200 {
        let (admin, cntlid) = Peer::admin(scene.address, SUBNQN, 0)?;
        let io = Peer::io(scene.address, SUBNQN, 1, cntlid)?;
        match turn % 3 {
            0 => drop((admin, io)),
            1 => {
                io.reset();
                admin.reset();
            }
            _ => {
                admin.reset();
                let mut io = io;
                io.finished()?;
            }
        }
    }
    Ok(())
}
