//! Commands whose fields contradict each other, the namespace or the queue.

use anyhow::{Result, bail, ensure};
use sealblock_protocols_nvme::fabrics::{FabricsCommand, PropertySet};
use sealblock_protocols_nvme::nvm::{IoCommand, WriteZeroes};
use sealblock_protocols_nvme::{AdminOpcode, Command, DataPointer};

use super::context::{TestContext, blocks, queues};
use crate::process::{BLOCK_BYTES, BLOCKS, PLAIN, PROTECTED, limits};
use crate::wire::{C2H_DATA, Data, Peer, R2T, RESPONSE, capsule, h2c, in_capsule, transport};

const INVALID_FIELD: u16 = 0x002;
const INVALID_NAMESPACE: u16 = 0x00B;
const SGL_LENGTH: u16 = 0x00F;
const SGL_TYPE: u16 = 0x011;
const SGL_OFFSET: u16 = 0x016;
const OUT_OF_RANGE: u16 = 0x080;
const EVENT_LIMIT: u16 = 0x105;
/// The offset of the data pointer's identifier in a capsule.
const SGL_IDENTIFIER_AT: usize = 8 + 39;
const IN_CAPSULE: u8 = 0x01;
const TRANSPORT: u8 = 0x5A;

/// Sends a capsule, sends the data that the target requests, receives everything, and returns the status.
fn status(peer: &mut Peer, pdu: &[u8]) -> Result<u16> {
    peer.send(pdu)?;
    loop {
        let pdu = peer.receive()?;
        match pdu.kind {
            R2T => {
                let data = vec![0; pdu.dword(16) as usize];
                peer.send(&h2c(true, pdu.short(8), pdu.short(10), pdu.dword(12), &data))?;
            }
            C2H_DATA if pdu.flags & 8 != 0 => return Ok(0),
            C2H_DATA => {}
            RESPONSE => return Ok(pdu.short(22) >> 1 & 0x7FF),
            _ => bail!("answered by {pdu:?}"),
        }
    }
}

pub(super) fn data_pointers(context: &TestContext) -> Result<()> {
    let (mut admin, mut io) = queues(context)?;
    let write = IoCommand::Write(blocks(0, 1)?).encode(PLAIN)?;
    let read = IoCommand::Read(blocks(0, 1)?).encode(PLAIN)?;
    let identify = Command::new(AdminOpcode::Identify.code(), PLAIN);
    for identifier in 0..=255_u8 {
        for command in [write, read, identify] {
            let queue = if command.opcode == identify.opcode { &mut admin } else { &mut io };
            let mut pdu = capsule(&transport(command.with_cid(5), 4096), &[]);
            pdu[SGL_IDENTIFIER_AT] = identifier;
            let got = status(queue, &pdu)?;
            let allowed: &[u16] = match identifier {
                TRANSPORT => &[0],
                // This capsule carries no data, and a Read accepts none in a capsule.
                IN_CAPSULE => &[SGL_LENGTH, SGL_TYPE, INVALID_FIELD],
                _ => &[SGL_TYPE, INVALID_FIELD],
            };
            ensure!(allowed.contains(&got), "a descriptor {identifier:#x} on {:#x}: {got:#x}", command.opcode);
        }
    }
    lengths(&mut io, write, read)
}

/// Lengths that do not match the blocks, in the capsule and by R2T.
fn lengths(io: &mut Peer, write: Command, read: Command) -> Result<()> {
    for length in [0, 1, 3, 4, 512, 4095, 4097, 4104, 8192, 1 << 20, 1 << 31, u32::MAX] {
        for command in [write, read] {
            let pointer = DataPointer::Transport { length_bytes: length };
            let got = status(io, &capsule(&command.with_data(pointer).with_cid(6), &[]))?;
            ensure!([SGL_LENGTH, INVALID_FIELD].contains(&got), "{length} bytes for a block of 4096: {got:#x}");
        }
    }
    let data = vec![3; BLOCK_BYTES];
    for (len, got_len) in [(4, 4096), (4096, 4), (0, 4096), (4096, 8192), (4100, 4096), (512, 512)] {
        let pointer = DataPointer::InCapsule { offset_bytes: 0, length_bytes: got_len };
        let data = vec![3; len];
        let got = status(io, &capsule(&write.with_data(pointer).with_cid(6), &data))?;
        ensure!([SGL_LENGTH, INVALID_FIELD].contains(&got), "{len} bytes said to be {got_len}: {got:#x}");
    }
    for offset_bytes in [1, 4, 4096, u64::MAX] {
        let pointer = DataPointer::InCapsule { offset_bytes, length_bytes: 4096 };
        let got = status(io, &capsule(&write.with_data(pointer).with_cid(6), &data))?;
        ensure!([SGL_OFFSET, INVALID_FIELD].contains(&got), "an offset of {offset_bytes}: {got:#x}");
    }
    let got = status(io, &capsule(&in_capsule(write.with_cid(6), &data), &data))?;
    ensure!(got == 0, "the right length: {got:#x}");
    Ok(())
}

pub(super) fn opcodes(context: &TestContext) -> Result<()> {
    let (mut admin, mut io) = queues(context)?;
    let data = vec![0; 4096];
    for opcode in 0..=255_u8 {
        for nsid in [0, PLAIN, PROTECTED, 77, u32::MAX] {
            let command = Command::new(opcode, nsid).with_cid(8);
            let pdus = [
                capsule(&transport(command, 0), &[]),
                capsule(&in_capsule(command, &data), &data),
                capsule(&transport(command, 4096), &[]),
            ];
            for pdu in pdus {
                status(&mut io, &pdu)?;
                // Only event requests beyond the limit complete; a reset would end the session.
                if opcode != AdminOpcode::AsynchronousEventRequest.code() {
                    status(&mut admin, &pdu)?;
                }
            }
        }
    }
    let got = status(&mut io, &capsule(&transport(Command::new(0, PLAIN).with_cid(1), 0), &[]))?;
    ensure!(got == 0, "Flush after all opcodes: {got:#x}");
    Ok(())
}

fn six(start: u64, count: u64) -> Result<[(IoCommand, u64); 6]> {
    let blocks = blocks(start, count)?;
    let bytes = count * BLOCK_BYTES as u64;
    let zeroes = WriteZeroes { blocks, deallocate: true, whole_namespace: false };
    Ok([
        (IoCommand::Read(blocks), bytes),
        (IoCommand::Write(blocks), bytes),
        (IoCommand::Compare(blocks), bytes),
        (IoCommand::Verify(blocks), 0),
        (IoCommand::WriteZeroes(zeroes), 0),
        (IoCommand::WriteZeroes(WriteZeroes { deallocate: false, ..zeroes }), 0),
    ])
}

fn refused(io: &mut Peer, nsid: u32, ranges: &[(u64, u64)], allowed: &[u16]) -> Result<()> {
    for &(start, count) in ranges {
        for (command, bytes) in six(start, count)? {
            let pointer = DataPointer::Transport { length_bytes: bytes as u32 };
            let pdu = capsule(&command.encode(nsid)?.with_data(pointer).with_cid(3), &[]);
            let got = status(io, &pdu)?;
            ensure!(allowed.contains(&got), "{command:?} of namespace {nsid}: {got:#x}, not one of {allowed:x?}");
        }
    }
    Ok(())
}

pub(super) fn ranges(context: &TestContext) -> Result<()> {
    let (_admin, mut io) = queues(context)?;
    let past = [(BLOCKS, 1), (BLOCKS - 1, 2), (u64::MAX - 1, 1), (1 << 63, 65536), (BLOCKS, 65536)];
    refused(&mut io, PLAIN, &past, &[OUT_OF_RANGE])?;
    refused(&mut io, 4, &[(0, 1)], &[INVALID_FIELD])?;
    for nsid in [0, 0xFFFF_FFFE, u32::MAX] {
        refused(&mut io, nsid, &[(0, 1)], &[INVALID_NAMESPACE])?;
    }
    // Verify and Write Zeroes of many blocks are allowed; transfers above MDTS are not.
    let above = u64::from(limits().transfer_bytes) / BLOCK_BYTES as u64 + 1;
    for (command, bytes) in &six(0, above)?[..3] {
        let pointer = DataPointer::Transport { length_bytes: *bytes as u32 };
        let got = status(&mut io, &capsule(&command.encode(PLAIN)?.with_data(pointer).with_cid(3), &[]))?;
        ensure!([INVALID_FIELD, SGL_LENGTH].contains(&got), "a transfer above MDTS: {got:#x}");
    }
    // Ranges of Dataset Management that lie outside, wrap, or are empty.
    for (slba, blocks, wanted) in [(BLOCKS, 1, true), (u64::MAX, 2, true), (0, u32::MAX, true), (0, 0, false)] {
        let mut range = vec![0; 16];
        range[4..8].copy_from_slice(&blocks.to_le_bytes());
        range[8..].copy_from_slice(&slba.to_le_bytes());
        let mut command = Command::new(9, PLAIN).with_cid(3);
        command.cdw11 = 4.into();
        let got = status(&mut io, &capsule(&in_capsule(command, &range), &range))?;
        ensure!((got != 0) == wanted, "{blocks} blocks from {slba}: {got:#x}");
    }
    Ok(())
}

pub(super) fn event_requests(context: &TestContext) -> Result<()> {
    let (mut admin, _) = queues(context)?;
    let event = transport(Command::new(AdminOpcode::AsynchronousEventRequest.code(), 0), 0);
    let most = limits().commands;
    for cid in 0..most / 2 {
        admin.send(&capsule(&event.with_cid(100 + cid), &[]))?;
    }
    let alive = transport(Command::new(AdminOpcode::KeepAlive.code(), 0), 0).with_cid(1);
    admin.send(&capsule(&alive, &[]))?;
    let mut refused = 0;
    loop {
        let pdu = admin.receive()?;
        ensure!(pdu.kind == RESPONSE, "answered by {pdu:?}");
        if pdu.short(20) == 1 {
            break;
        }
        ensure!(pdu.short(22) >> 1 & 0x7FF == EVENT_LIMIT, "an event request is answered by {pdu:?}");
        refused += 1;
    }
    ensure!(refused > 0 && refused < most / 2, "{refused} event requests were refused");
    Ok(())
}

pub(super) fn resets(context: &TestContext) -> Result<()> {
    for _ in 0..context.effort * 4 {
        let (mut admin, mut io) = queues(context)?;
        let mut bytes = Vec::new();
        // Fewer commands than the queue holds. They enable, shut down, reset, and enable again.
        for cid in 0..24_u16 {
            let value = [0x0046_0001, 0x0046_4001, 0x0046_0000, 0x0046_8001][usize::from(cid % 4)];
            let set = FabricsCommand::PropertySet(PropertySet { offset: 0x14, bytes: 4, value });
            bytes.extend(capsule(&transport(set.encode().with_cid(cid), 0), &[]));
        }
        admin.send(&bytes)?;
        for _ in 0..24 {
            let pdu = admin.receive()?;
            ensure!(pdu.kind == RESPONSE && pdu.short(22) >> 1 == 0, "CC is answered by {pdu:?}");
        }
        // A reset deletes the I/O queues.
        io.try_send(&capsule(&transport(Command::new(0, PLAIN), 0), &[]));
        io.read_to_end()?;
        let answer = admin.call(Command::new(AdminOpcode::KeepAlive.code(), 0), Data::None);
        ensure!(answer.is_ok(), "the admin queue outlives resets: {answer:?}");
    }
    Ok(())
}
