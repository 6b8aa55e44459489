//! Peers that do not do their part: they do not read, do not answer, do not send, or stop in the middle.

use std::io::{Read, Write};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use sealblock_protocols_nvme::admin::{GetLogPage, SetFeatures};
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_protocols_nvme::{AdminOpcode, Command};

use super::{TestContext, blocks, fetching, most_commands, queues, write_command};
use crate::process::{BLOCK_BYTES, PLAIN, limits};
use crate::wire::{
    C2H_DATA, Data, HANG, Peer, R2T, RESPONSE, SUBNQN, capsule, connect, h2c, icreq, in_capsule, transport,
};

/// As many commands as a queue of the target takes, less a few for what goes on beside.
fn many() -> u16 {
    most_commands() - 4
}

pub(super) fn unread(scene: &TestContext) -> Result<()> {
    let bytes = limits().transfer_bytes as usize;
    let read = IoCommand::Read(blocks(0, (bytes / BLOCK_BYTES) as u64)?).encode(PLAIN)?;
    let pdus: Vec<u8> = (0..many()).flat_map(|cid| capsule(&transport(read.with_cid(cid), bytes), &[])).collect();
    // Nobody ever reads; the connection is dropped with everything in it.
    for _ in 0..scene.effort {
        let (_admin, mut io) = queues(scene)?;
        io.send(&pdus)?;
        sleep(Duration::from_millis(200));
    }
    // Somebody reads late, and must find everything.
    let (_admin, mut io) = queues(scene)?;
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

pub(super) fn hoard(scene: &TestContext) -> Result<()> {
    const PAGE_BYTES: usize = 1 << 20;
    let (mut admin, _) = Peer::admin(scene.address, SUBNQN, 0)?;
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

pub(super) fn unanswered(scene: &TestContext) -> Result<()> {
    for _ in 0..scene.effort {
        let (mut admin, mut io) = queues(scene)?;
        let bytes = limits().transfer_bytes as usize;
        let write = write_command(bytes)?;
        let pdus: Vec<u8> = (0..many()).flat_map(|cid| capsule(&write.with_cid(cid), &[])).collect();
        io.send(&pdus)?;
        let pdu = io.receive()?;
        ensure!(pdu.kind == R2T, "a Write is answered by {pdu:?}");
        sleep(Duration::from_millis(100));
        // The controller is not hurt, and the queue's end gives everything back.
        let alive = admin.call(Command::new(AdminOpcode::KeepAlive.code(), 0), Data::None)?;
        ensure!(alive.status == 0, "Keep Alive: {alive:?}");
        // Half of one transfer, and then nothing more.
        io.send(&h2c(false, pdu.short(8), pdu.short(10), 0, &vec![0; bytes / 2]))?;
        io.half_close();
        io.finished()?;
    }
    Ok(())
}

pub(super) fn half_closed(scene: &TestContext) -> Result<()> {
    let (command, data) = connect(SUBNQN, 0, 32, 0xFFFF, 0);
    let whole = [icreq(0), capsule(&in_capsule(command, &data), &data)].concat();
    for cut in [0, 4, 128, 150, whole.len()] {
        let mut peer = Peer::open(scene.address)?;
        peer.send(&whole[..cut])?;
        peer.half_close();
        peer.finished()?;
    }
    let (_admin, mut io, cid, ttag) = fetching(scene, 8192)?;
    io.send(&h2c(true, cid, ttag, 0, &[0; 8192])[..1000])?;
    io.half_close();
    io.finished()?;
    let (_admin, io, _, _) = fetching(scene, 8192)?;
    io.reset();
    Ok(())
}

/// Sends what a host would send, a byte at a time; tells how many bytes the target took before it hung up.
fn drip(mut peer: Peer, bytes: &[u8], rest: Duration) -> Result<usize> {
    let start = Instant::now();
    peer.stream.set_read_timeout(Some(rest))?;
    let mut taken = 0;
    loop {
        ensure!(start.elapsed() < HANG, "the target waits on, {taken} bytes into {}", bytes.len());
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

pub(super) fn drips(scene: &TestContext) -> Result<()> {
    let (command, data) = connect(SUBNQN, 0, 32, 0xFFFF, 0);
    let whole = [icreq(0), capsule(&in_capsule(command, &data), &data)].concat();
    // Whole it is good: so what is cut off below is cut off for its slowness.
    let mut good = Peer::open(scene.address)?;
    good.send(&whole)?;
    ensure!(good.receive()?.kind == 1 && good.receive()?.kind == RESPONSE, "a session that is not slow");
    std::thread::scope(|scope| {
        let mut slow = Vec::new();
        for silent_from in [0, 1, 8, 128, 200, whole.len() - 1] {
            // So many bytes at once, and then silence; or the rest by drips.
            for drips in [false, true] {
                let mut peer = Peer::open(scene.address)?;
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

pub(super) fn keep_alive(scene: &TestContext) -> Result<()> {
    let (mut admin, mut io, cntlid) = {
        let (admin, cntlid) = Peer::admin(scene.address, SUBNQN, 0)?;
        (admin, Peer::io(scene.address, SUBNQN, 1, cntlid)?, cntlid)
    };
    // Set only now, so that a slow machine gets to this point. It is answered before it counts.
    let timer = SetFeatures { fid: 0x0F, save: false, nsid: 0, cdw11: 500 };
    let set = admin.call(timer.encode(), Data::None)?;
    ensure!(set.status == 0, "Keep Alive Timer: {set:?}");
    // Commands on I/O queues are no signs of life: those may go on for as long as they like.
    io.send(&capsule(&transport(Command::new(0, PLAIN).with_cid(1), 0), &[]))?;
    admin.finished()?;
    io.finished()?;
    let mut late = Peer::ready(scene.address, 0)?;
    let (command, data) = connect(SUBNQN, 1, 32, cntlid, 0);
    ensure!(late.call(command, Data::Write(&data))?.status != 0, "the controller is gone");
    Ok(())
}
