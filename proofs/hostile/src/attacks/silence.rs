//! Peers that do not read, do not reply, do not send, or stop halfway.

use std::io::{Read, Write};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use sealblock_protocols_nvme::admin::{GetLogPage, SetFeatures};
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_protocols_nvme::{AdminOpcode, Command};

use super::context::{TestContext, blocks, fetching, max_commands, queues, write_command};
use crate::process::{BLOCK_BYTES, PLAIN, limits};
use crate::wire::{
    C2H_DATA, Data, HANG_TIMEOUT, Peer, R2T, RESPONSE, SUBNQN, capsule, connect, h2c, icreq, in_capsule, transport,
};

/// The number of commands in flight that a queue allows, minus a few for other commands.
fn many() -> u16 {
    max_commands() - 4
}

pub(super) fn unread(context: &TestContext) -> Result<()> {
    let bytes = limits().transfer_bytes as usize;
    let read = IoCommand::Read(blocks(0, (bytes / BLOCK_BYTES) as u64)?).encode(PLAIN)?;
    let pdus: Vec<u8> = (0..many()).flat_map(|cid| capsule(&transport(read.with_cid(cid), bytes), &[])).collect();
    // The attacker never receives, and drops the connection while everything is in flight.
    for _ in 0..context.effort {
        let (_admin, mut io) = queues(context)?;
        io.send(&pdus)?;
        sleep(Duration::from_millis(200));
    }
    // A host that receives late must get everything.
    let (_admin, mut io) = queues(context)?;
    io.send(&pdus)?;
    sleep(Duration::from_millis(200));
    let (mut answered, mut received) = (0, 0);
    while answered < many() {
        let pdu = io.receive()?;
        match pdu.kind {
            C2H_DATA => received += pdu.data.len(),
            RESPONSE if pdu.short(22) >> 1 == 0 => answered += 1,
            _ => bail!("a Read is answered by {pdu:?}"),
        }
    }
    ensure!(received == bytes * usize::from(many()), "{received} bytes came");
    Ok(())
}

pub(super) fn hoard(context: &TestContext) -> Result<()> {
    const PAGE_BYTES: usize = 1 << 20;
    let (mut admin, _) = Peer::admin(context.address, SUBNQN, 0)?;
    for lid in [1, 2, 5] {
        let log = GetLogPage::new(lid, PAGE_BYTES as u64).encode();
        let pdus: Vec<u8> =
            (0..many()).flat_map(|cid| capsule(&transport(log.with_cid(cid), PAGE_BYTES), &[])).collect();
        admin.send(&pdus)?;
        sleep(Duration::from_millis(200));
        let mut answered = 0;
        while answered < many() {
            let pdu = admin.receive()?;
            ensure!(pdu.kind == C2H_DATA || pdu.kind == RESPONSE, "a log page is answered by {pdu:?}");
            answered += u16::from(pdu.kind == RESPONSE);
        }
    }
    Ok(())
}

pub(super) fn unanswered(context: &TestContext) -> Result<()> {
    for _ in 0..context.effort {
        let (mut admin, mut io) = queues(context)?;
        let bytes = limits().transfer_bytes as usize;
        let write = write_command(bytes)?;
        let pdus: Vec<u8> = (0..many()).flat_map(|cid| capsule(&write.with_cid(cid), &[])).collect();
        io.send(&pdus)?;
        let pdu = io.receive()?;
        ensure!(pdu.kind == R2T, "a Write is answered by {pdu:?}");
        sleep(Duration::from_millis(100));
        // The controller still works, and the end of the queue releases everything.
        let alive = admin.call(Command::new(AdminOpcode::KeepAlive.code(), 0), Data::None)?;
        ensure!(alive.status == 0, "Keep Alive: {alive:?}");
        // Sends half of one transfer, and then nothing more.
        io.send(&h2c(false, pdu.short(8), pdu.short(10), 0, &vec![0; bytes / 2]))?;
        io.half_close();
        io.read_to_end()?;
    }
    Ok(())
}

pub(super) fn half_closed(context: &TestContext) -> Result<()> {
    let (command, data) = connect(SUBNQN, 0, 32, 0xFFFF, 0);
    let whole = [icreq(0), capsule(&in_capsule(command, &data), &data)].concat();
    for cut in [0, 4, 128, 150, whole.len()] {
        let mut peer = Peer::open(context.address)?;
        peer.send(&whole[..cut])?;
        peer.half_close();
        peer.read_to_end()?;
    }
    let (_admin, mut io, cid, ttag) = fetching(context, 8192)?;
    io.send(&h2c(true, cid, ttag, 0, &[0; 8192])[..1000])?;
    io.half_close();
    io.read_to_end()?;
    let (_admin, io, _, _) = fetching(context, 8192)?;
    io.reset();
    Ok(())
}

/// Sends the bytes of a correct host one at a time; returns how many the target accepted before it closed the
/// connection.
fn drip(mut peer: Peer, bytes: &[u8], rest: Duration) -> Result<usize> {
    let start = Instant::now();
    peer.stream.set_read_timeout(Some(rest))?;
    let mut taken = 0;
    loop {
        ensure!(start.elapsed() < HANG_TIMEOUT, "the target waits on, {taken} bytes into {}", bytes.len());
        if let Some(byte) = bytes.get(taken) {
            if peer.stream.write_all(&[*byte]).is_err() {
                return Ok(taken);
            }
            taken += 1;
        }
        let mut buffer = [0; 512];
        match peer.stream.read(&mut buffer) {
            Ok(0) => return Ok(taken),
            Ok(_) => {}
            Err(error) if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {}
            Err(_) => return Ok(taken),
        }
    }
}

pub(super) fn drips(context: &TestContext) -> Result<()> {
    let (command, data) = connect(SUBNQN, 0, 32, 0xFFFF, 0);
    let whole = [icreq(0), capsule(&in_capsule(command, &data), &data)].concat();
    // Sent at once, the same bytes succeed, so the sessions below are closed because they are slow.
    let mut good = Peer::open(context.address)?;
    good.send(&whole)?;
    ensure!(good.receive()?.kind == 1 && good.receive()?.kind == RESPONSE, "a session that is not slow");
    std::thread::scope(|scope| {
        let mut slow = Vec::new();
        for silent_from in [0, 1, 8, 128, 200, whole.len() - 1] {
            // Sends this many bytes at once, and then nothing, or the rest one byte at a time.
            for drips in [false, true] {
                let mut peer = Peer::open(context.address)?;
                peer.send(&whole[..silent_from])?;
                let left = if drips { whole[silent_from..whole.len() - 1].to_vec() } else { Vec::new() };
                slow.push(
                    scope.spawn(move || drip(peer, &left, Duration::from_millis(50)).map(|taken| (taken, left.len()))),
                );
            }
        }
        for slow in slow {
            let (taken, left) = slow.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
            ensure!(left < 400 || taken < left, "{taken} bytes came by drips");
        }
        Ok(())
    })
}

pub(super) fn keep_alive(context: &TestContext) -> Result<()> {
    let (mut admin, mut io, cntlid) = {
        let (admin, cntlid) = Peer::admin(context.address, SUBNQN, 0)?;
        (admin, Peer::io(context.address, SUBNQN, 1, cntlid)?, cntlid)
    };
    // The timer is set only now, so that a slow machine reaches this point. The new timeout applies after the
    // completion.
    let timer = SetFeatures { fid: 0x0F, save: false, nsid: 0, cdw11: 500 };
    let set = admin.call(timer.encode(), Data::None)?;
    ensure!(set.status == 0, "Keep Alive Timer: {set:?}");
    // Commands in flight on I/O queues do not restart the keep alive timer; they may take longer than it.
    io.send(&capsule(&transport(Command::new(0, PLAIN).with_cid(1), 0), &[]))?;
    admin.read_to_end()?;
    io.read_to_end()?;
    let mut late = Peer::ready(context.address, 0)?;
    let (command, data) = connect(SUBNQN, 1, 32, cntlid, 0);
    ensure!(late.call(command, Data::Write(&data))?.status != 0, "the controller is gone");
    Ok(())
}
