//! Random bytes, correct sessions with corrupted bytes, and correct sessions that are cut short.

use anyhow::{Context, Result};
use sealblock_protocols_nvme::fabrics::{FabricsCommand, PropertySet};
use sealblock_protocols_nvme::{AdminOpcode, Command};

use super::context::{TestContext, queues};
use crate::process::PLAIN;
use crate::wire::{Peer, SUBNQN, capsule, connect, icreq, in_capsule, transport};
use fastrand::Rng;

/// What a host sends until it has identified the controller.
fn session() -> Vec<u8> {
    let (command, data) = connect(SUBNQN, 0, 32, 0xFFFF, 0);
    let enable = PropertySet { offset: 0x14, bytes: 4, value: 0x0046_0001 };
    let mut identify = Command::new(AdminOpcode::Identify.code(), 0).with_cid(3);
    identify.cdw10 = 1.into();
    [
        icreq(0),
        capsule(&in_capsule(command.with_cid(1), &data), &data),
        capsule(&transport(FabricsCommand::PropertySet(enable).encode().with_cid(2), 0), &[]),
        capsule(&transport(identify, 4096), &[]),
    ]
    .concat()
}

/// What a host sends on an I/O queue: a Write with in-capsule data, a Write with data by R2T, a Read.
fn io_session() -> Result<Vec<u8>> {
    let (write, read) = (super::context::write_command(4096)?, Command::new(2, PLAIN).with_cid(3));
    let data = [9; 4096];
    Ok([
        capsule(&in_capsule(write.with_cid(1), &data), &data),
        capsule(&write.with_cid(2), &[]),
        capsule(&transport(read, 4096), &[]),
        crate::wire::h2c(true, 2, 0, 0, &data),
    ]
    .concat())
}

/// Sends bytes, closes the sending half, and waits until the target closes the connection. The target may reply with
/// anything well-formed.
fn throw(mut peer: Peer, bytes: &[u8]) -> Result<()> {
    peer.try_send(bytes);
    peer.half_close();
    peer.read_to_end()?;
    Ok(())
}

pub(super) fn truncated(context: &TestContext) -> Result<()> {
    let whole = session();
    for cut in 0..=whole.len() {
        let mut peer = Peer::open(context.address)?;
        peer.send(&whole[..cut])?;
        if cut % 2 == 0 {
            peer.half_close();
            peer.read_to_end().with_context(|| format!("cut off after {cut} bytes"))?;
        } else {
            peer.reset();
        }
    }
    let whole = io_session()?;
    for cut in (0..whole.len()).step_by(61) {
        let (_admin, io) = queues(context)?;
        throw(io, &whole[..cut]).with_context(|| format!("an I/O queue cut off after {cut} bytes"))?;
    }
    Ok(())
}

pub(super) fn random(context: &TestContext) -> Result<()> {
    let mut random = Rng::with_seed(context.seed);
    for turn in 0..context.effort * 300 {
        let len = random.usize(..4096);
        let mut bytes: Vec<u8> = (0..len).map(|_| random.u8(..)).collect();
        // Half of them begin like a capsule or like data.
        if turn % 2 == 0 && len > 8 {
            let head = if turn % 4 == 0 { [4, 0, 72, 0, 72, 0, 0, 0] } else { [6, 4, 24, 24, 24, 16, 0, 0] };
            bytes[..8].copy_from_slice(&head);
        }
        let peer = match turn % 3 {
            0 => Peer::open(context.address)?,
            1 => Peer::ready(context.address, (turn % 4) as u8)?,
            _ => Peer::admin(context.address, SUBNQN, 0)?.0,
        };
        throw(peer, &bytes).with_context(|| format!("turn {turn} of seed {}", context.seed))?;
    }
    Ok(())
}

pub(super) fn mutated(context: &TestContext) -> Result<()> {
    let mut random = Rng::with_seed(context.seed ^ 0x5EED);
    let (session, io_session) = (session(), io_session()?);
    for turn in 0..context.effort * 300 {
        let (mut bytes, queue) = if turn % 2 == 0 { (session.clone(), None) } else { (io_session.clone(), Some(())) };
        for _ in 0..1 + random.u64(..4) {
            let at = random.usize(..bytes.len());
            match random.u64(..4) {
                0 => bytes[at] ^= 1 << random.u64(..8),
                1 => bytes[at] = random.u8(..),
                2 => drop(bytes.drain(at..(at + 1 + random.usize(..80)).min(bytes.len()))),
                _ => {
                    let part = bytes[at..(at + 72).min(bytes.len())].to_vec();
                    let to = random.usize(..bytes.len());
                    bytes.splice(to..to, part);
                }
            }
            if bytes.is_empty() {
                break;
            }
        }
        let turn_text = || format!("turn {turn} of seed {}", context.seed);
        match queue {
            None => throw(Peer::open(context.address)?, &bytes).with_context(turn_text)?,
            Some(()) => {
                let (_admin, io) = queues(context)?;
                throw(io, &bytes).with_context(turn_text)?;
            }
        }
    }
    Ok(())
}
