//! The parameters of an attack, and functions that many attacks use.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use sealblock_protocols_nvme::Command;
use sealblock_protocols_nvme::nvm::{BlockCommand, IoCommand};
use sealblock_units::Extent;

use crate::process::{PLAIN, limits};
use crate::wire::{Peer, R2T, SUBNQN, capsule, transport};

/// The parameters of an attack.
pub struct TestContext {
    /// Where the target listens.
    pub address: SocketAddr,
    /// The seed of random attacks.
    pub seed: u64,
    /// The number of repetitions of attacks that repeat: 1 in tests.
    pub effort: usize,
    /// The maximum duration of a flood.
    pub time: Duration,
}

impl TestContext {
    /// The digest combinations that attacks use: none and both, and with more effort each alone.
    pub(super) fn digests(&self) -> &'static [u8] {
        if self.effort > 1 { &[0, 1, 2, 3] } else { &[0, 3] }
    }
}

/// An admin queue and an I/O queue of a new controller.
pub(super) fn queues(context: &TestContext) -> Result<(Peer, Peer)> {
    let (admin, cntlid) = Peer::admin(context.address, SUBNQN, 0)?;
    let io = Peer::io(context.address, SUBNQN, 1, cntlid)?;
    Ok((admin, io))
}

/// Blocks of a command.
pub(super) fn blocks(start: u64, count: u64) -> Result<BlockCommand> {
    Ok(BlockCommand::new(Extent::from_raw(start, count)?))
}

/// A Write whose data the target requests by R2T.
pub(super) fn write_command(bytes: usize) -> Result<Command> {
    let count = bytes / crate::process::BLOCK_BYTES;
    Ok(transport(IoCommand::Write(blocks(0, count as u64)?).encode(PLAIN)?, bytes))
}

/// An I/O queue with a Write in flight that has received its R2T; returns the CID and TTAG too.
pub(super) fn fetching(context: &TestContext, bytes: usize) -> Result<(Peer, Peer, u16, u16)> {
    let (admin, mut io) = queues(context)?;
    let cid = io.cid();
    io.send(&capsule(&write_command(bytes)?.with_cid(cid), &[]))?;
    let pdu = io.receive()?;
    anyhow::ensure!(pdu.kind == R2T && pdu.short(8) == cid, "a Write is answered by {pdu:?}");
    Ok((admin, io, cid, pdu.short(10)))
}

/// The maximum number of commands in flight of a queue.
pub(super) fn max_commands() -> u16 {
    limits().commands
}
