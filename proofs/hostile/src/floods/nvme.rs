//! Floods over NVMe/TCP, on admin or I/O queues.

use std::io::Write;
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::Ordering;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use sealblock_protocols_nvme::fabrics::CNTLID_DYNAMIC;
use sealblock_protocols_nvme::{Command, Completion};

use super::commands::{Flood, Kind, Set};
use super::queues::{Busy, Effort, QUEUES, Queues};
use crate::wire::{C2H_DATA, Data, HANG_TIMEOUT, Pdu, Peer, R2T, RESPONSE, SUBNQN, connect, h2c};

/// Opens the queues and starts to flood.
///
/// # Errors
/// If the server refuses a queue.
pub fn start(address: SocketAddr, flood: &'static Flood, kind: Kind, effort: &Effort) -> Result<Queues> {
    let mut queues = Queues::default();
    let entries = u32::from(effort.limits.commands);
    for number in 0..QUEUES as u64 {
        let (admin, cntlid) = Peer::admin_of(address, SUBNQN, entries, 0)?;
        let peer = match flood.set {
            Set::Admin => admin,
            Set::Io => {
                queues.keep(admin);
                let (peer, answer) = Peer::connecting(address, 0, connect(SUBNQN, 1, entries, cntlid, 0))?;
                ensure!(answer.status == 0, "Connect: {answer:?}");
                peer
            }
        };
        let end = peer.stream.try_clone()?;
        let cut = move || {
            // Fails only if the connection has ended.
            let _ = end.shutdown(Shutdown::Both);
        };
        let outstanding = effort.outstanding.min(effort.limits.commands - 8);
        let transfer_bytes = effort.limits.transfer_bytes;
        queues.add(cut, move |busy| keep_busy(peer, number, flood, kind, (outstanding, transfer_bytes), busy));
    }
    Ok(queues)
}

/// Keeps commands outstanding on one queue until told to stop. Its owner holds the connection.
fn keep_busy(
    mut peer: Peer,
    number: u64,
    flood: &'static Flood,
    kind: Kind,
    (outstanding, transfer_bytes): (u16, u32),
    busy: &Busy,
) -> Result<()> {
    let mut sender = peer.stream.try_clone()?;
    let (send, sends) = std::sync::mpsc::channel::<Vec<u8>>();
    // In a separate thread: a client that waits for room to send does not receive, and then a server that waits for the
    // client receives nothing either.
    thread::spawn(move || {
        for bytes in sends {
            if sender.write_all(&bytes).is_err() {
                return;
            }
        }
    });
    let mut turn = number << 32;
    let mut submit = |cid: u16| {
        turn += 1;
        send.send(flood.pdu(kind, turn, transfer_bytes, cid)).map_err(|_| anyhow!("the connection ended"))
    };
    if flood.repeats_cid() {
        return repeat(&mut peer, &mut submit, busy);
    }
    for cid in 0..outstanding {
        submit(cid)?;
    }
    while !busy.is_stopping.load(Ordering::Relaxed) {
        let pdu = peer.receive()?;
        match completion(&pdu) {
            Some((cid, status)) => {
                busy.completed.fetch_add(1, Ordering::Relaxed);
                if status != 0 {
                    busy.failed.store(status.into(), Ordering::Relaxed);
                }
                submit(cid)?;
            }
            None if pdu.kind == R2T => {
                let data = vec![0; pdu.dword(16) as usize];
                let answer = h2c(true, pdu.short(8), pdu.short(10), pdu.dword(12), &data);
                send.send(answer).map_err(|_| anyhow!("the connection ended"))?;
            }
            None => {}
        }
    }
    Ok(())
}

/// Repeatedly submits a command that does not complete, always with one identifier. The server must have received each
/// before the next is sent, which a Keep Alive in between proves.
fn repeat(peer: &mut Peer, submit: &mut impl FnMut(u16) -> Result<()>, busy: &Busy) -> Result<()> {
    while !busy.is_stopping.load(Ordering::Relaxed) {
        submit(1)?;
        let answer = peer.call(Command::new(0x18, 0), Data::None)?;
        ensure!(answer.status == 0, "Keep Alive: {answer:?}");
        busy.completed.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// The command that a PDU completes, and its status.
fn completion(pdu: &Pdu) -> Option<(u16, u16)> {
    match pdu.kind {
        RESPONSE => Completion::from_prefix(&pdu.header[8..])
            .map(|completion| (completion.cid.get(), completion.status().code().get())),
        C2H_DATA if pdu.flags & 8 != 0 => Some((pdu.short(8), 0)),
        _ => None,
    }
}

/// The time until the flooding host's next controller is ready.
///
/// # Errors
/// If it is not ready within several times [`HANG_TIMEOUT`].
pub fn ready_again(address: SocketAddr) -> Result<Duration> {
    let start = Instant::now();
    let (mut peer, answer) = Peer::connecting(address, 0, connect(SUBNQN, 0, 32, CNTLID_DYNAMIC, 0))?;
    ensure!(answer.status == 0, "Connect: {answer:?}");
    peer.property(0x14, 4, 0x0046_0001)?;
    while peer.property_get(0x1C, 4)?.result & 1 == 0 {
        ensure!(start.elapsed() < HANG_TIMEOUT * 8, "CSTS.RDY stays 0");
        sleep(Duration::from_millis(2));
    }
    let answer = peer.call(Command::new(0x18, 0), Data::None)?;
    ensure!(answer.status == 0, "Keep Alive: {answer:?}");
    Ok(start.elapsed())
}
