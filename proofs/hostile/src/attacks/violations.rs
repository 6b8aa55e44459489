//! Violations of the transport, each with its fatal error (NVMe/TCP 3.5, 3.6.2).

use anyhow::{Context, Result, ensure};
use sealblock_integrity::guard::crc32c;
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_protocols_nvme::{Command, DataPointer};

use super::context::{TestContext, blocks, fetching, max_commands, queues, write_command};
use crate::process::PLAIN;
use crate::wire::{self, Data, Peer, R2T, RESPONSE, SUBNQN, capsule, h2c, in_capsule, transport};

const FIELD: u16 = 1;
const SEQUENCE: u16 = 2;
const HEADER_DIGEST: u16 = 3;
const OUT_OF_RANGE: u16 = 4;
const LIMIT: u16 = 5;
const UNSUPPORTED: u16 = 6;
const TRANSIENT_TRANSPORT_ERROR: u16 = 0x022;

fn with(mut bytes: Vec<u8>, at: usize, value: &[u8]) -> Vec<u8> {
    bytes[at..at + value.len()].copy_from_slice(value);
    bytes
}

/// Sends the bytes, and requires this fatal error.
fn fatal(peer: Peer, what: &str, bytes: &[u8], fes: u16, fei: u32) -> Result<()> {
    fatal_on((None, peer), what, bytes, fes, fei)
}

/// The same on an I/O queue; its admin queue, if any, must stay open until then.
fn fatal_on(queues: (Option<Peer>, Peer), what: &str, bytes: &[u8], fes: u16, fei: u32) -> Result<()> {
    let (_admin, mut peer) = queues;
    peer.send(bytes)?;
    let error = peer.fatal_error().with_context(|| format!("after {what}"))?;
    ensure!(error == (fes, fei), "{what}: fatal error {error:?}, not {:?}", (fes, fei));
    Ok(())
}

/// An I/O queue with its admin queue.
fn io_queue(context: &TestContext) -> Result<(Option<Peer>, Peer)> {
    let (admin, io) = queues(context)?;
    Ok((Some(admin), io))
}

/// The same for one of several fatal errors, because the specification leaves the order of checks open.
fn one_of(queues: (Peer, Peer), what: &str, bytes: &[u8], allowed: &[u16]) -> Result<()> {
    let (_admin, mut peer) = queues;
    peer.send(bytes)?;
    let error = peer.fatal_error().with_context(|| format!("after {what}"))?;
    ensure!(allowed.contains(&error.0), "{what}: fatal error {error:?}");
    Ok(())
}

pub(super) fn icreq(context: &TestContext) -> Result<()> {
    let open = || Peer::open(context.address);
    let good = wire::icreq(0);
    for (what, at, value, fes, fei) in [
        ("PFV 1", 8, 1, UNSUPPORTED, 8),
        ("HPDA 32", 10, 32, FIELD, 10),
        ("HPDA 255", 10, 255, FIELD, 10),
        ("HLEN 127", 2, 127, FIELD, 2),
        ("HLEN 0", 2, 0, FIELD, 2),
        ("PLEN 129", 4, 129, FIELD, 4),
        ("PLEN 0", 4, 0, FIELD, 4),
        ("type 8", 0, 8, FIELD, 0),
        ("type 255", 0, 255, FIELD, 0),
        ("ICResp", 0, 1, SEQUENCE, 0),
    ] {
        fatal(open()?, what, &with(good.clone(), at, &[value]), fes, fei)?;
    }
    fatal(open()?, "PLEN of 4 GiB", &with(good.clone(), 4, &[0xFF; 4]), FIELD, 4)?;
    let capsule = capsule(&transport(Command::new(0, 1), 0), &[]);
    fatal(open()?, "a capsule before ICReq", &capsule, SEQUENCE, 0)?;
    fatal(open()?, "data before ICReq", &h2c(true, 0, 0, 0, &[0; 512]), SEQUENCE, 0)?;
    fatal(Peer::ready(context.address, 0)?, "a second ICReq", &good, SEQUENCE, 0)?;
    fatal_on(io_queue(context)?, "an ICReq on an I/O queue", &good, SEQUENCE, 0)?;
    for digests in 0..4 {
        let mut peer = Peer::ready(context.address, digests)?;
        let (command, data) = wire::connect(SUBNQN, 0, 32, 0xFFFF, 0);
        let answer = peer.call(command, Data::Write(&data))?;
        ensure!(answer.status == 0, "digests {digests}: {answer:?}");
    }
    Ok(())
}

pub(super) fn headers(context: &TestContext) -> Result<()> {
    let ready = || Peer::ready(context.address, 0);
    let (command, data) = wire::connect(SUBNQN, 0, 32, 0xFFFF, 0);
    let good = capsule(&in_capsule(command, &data), &data);
    for kind in [8, 10, 11, 64, 128, 255] {
        fatal(ready()?, &format!("type {kind}"), &with(good.clone(), 0, &[kind]), FIELD, 0)?;
    }
    for kind in [1, 3, 5, 7, 9] {
        fatal(ready()?, &format!("type {kind}, which is a target's"), &with(good.clone(), 0, &[kind]), SEQUENCE, 0)?;
    }
    for (what, at, value, fei) in [
        ("a header digest flag", 1, 1, 1),
        ("a data digest flag", 1, 2, 1),
        ("HLEN 0", 2, 0, 2),
        ("HLEN 71", 2, 71, 2),
        ("HLEN 255", 2, 255, 2),
        ("PDO 0", 3, 0, 3),
        ("PDO 71", 3, 71, 3),
        ("PDO 76", 3, 76, 3),
        ("PDO 255", 3, 255, 3),
    ] {
        fatal(ready()?, what, &with(good.clone(), at, &[value]), FIELD, fei)?;
    }
    for plen in [0_u32, 1, 7, 8, 71, 72 + 8193, 1 << 20, 1 << 31, u32::MAX] {
        let bytes = with(good.clone(), 4, &plen.to_le_bytes());
        fatal(ready()?, &format!("PLEN {plen}"), &bytes, FIELD, 4)?;
    }
    // A termination request gets no reply.
    for plen in [24_u32, 152, 0, 23, 153, u32::MAX] {
        let mut peer = ready()?;
        let mut bytes = vec![2, 0, 24, 0];
        bytes.extend(plen.to_le_bytes());
        bytes.extend([0xEE; 16]);
        peer.send(&bytes)?;
        ensure!(peer.read_to_end()?.is_empty(), "a termination request of {plen} bytes is answered");
    }
    Ok(())
}

pub(super) fn capsules(context: &TestContext) -> Result<()> {
    let write = IoCommand::Write(blocks(0, 1)?).encode(PLAIN)?;
    let data = vec![1; 8196];
    fatal_on(
        io_queue(context)?,
        "more than 8192 bytes in a capsule",
        &capsule(&in_capsule(write, &data), &data),
        FIELD,
        4,
    )?;
    let unwanted = capsule(&transport(write, 4096), &data[..4096]);
    fatal_on(io_queue(context)?, "data that the command keeps elsewhere", &unwanted, FIELD, 4)?;
    let (admin, io, cid, _) = fetching(context, 4096)?;
    let again = transport(IoCommand::Flush.encode(PLAIN)?, 0).with_cid(cid);
    fatal_on((Some(admin), io), "a CID that is in use", &capsule(&again, &[]), FIELD, 10)?;
    let mut crowd = Vec::new();
    for cid in 0..=max_commands() {
        crowd.extend(capsule(&write_command(4096)?.with_cid(cid), &[]));
    }
    fatal_on(io_queue(context)?, "more commands than the queue has entries", &crowd, SEQUENCE, 0)
}

pub(super) fn h2c_data(context: &TestContext) -> Result<()> {
    let part = vec![5; 4096];
    let fetch = || fetching(context, 8192);
    let try_one = |what: &str, make: &dyn Fn(u16, u16) -> Vec<u8>, fes, fei| {
        let (admin, io, cid, ttag) = fetch()?;
        fatal_on((Some(admin), io), what, &make(cid, ttag), fes, fei)
    };
    try_one("a wrong TTAG", &|cid, ttag| h2c(false, cid, ttag ^ 0x5555, 0, &part), FIELD, 10)?;
    try_one("a wrong CCCID", &|cid, ttag| h2c(false, cid ^ 1, ttag, 0, &part), FIELD, 8)?;
    try_one("a gap", &|cid, ttag| h2c(true, cid, ttag, 4096, &part), SEQUENCE, 0)?;
    try_one("an offset past the transfer", &|cid, ttag| h2c(false, cid, ttag, 8192, &part), OUT_OF_RANGE, 0)?;
    try_one("an end past the transfer", &|cid, ttag| h2c(false, cid, ttag, 6144, &part), OUT_OF_RANGE, 0)?;
    try_one("an offset that wraps", &|cid, ttag| h2c(false, cid, ttag, 0xFFFF_FFFC, &part), OUT_OF_RANGE, 0)?;
    try_one("an odd offset", &|cid, ttag| h2c(false, cid, ttag, 2, &part), FIELD, 12)?;
    try_one("LAST_PDU too early", &|cid, ttag| h2c(true, cid, ttag, 0, &part), FIELD, 1)?;
    let wrong_length = |cid, ttag| with(h2c(false, cid, ttag, 0, &part), 16, &2048_u32.to_le_bytes());
    try_one("DATAL that is not PLEN's", &wrong_length, FIELD, 4)?;
    let too_much = |cid, ttag| h2c(true, cid, ttag, 0, &vec![5; 12288]);
    try_one("too much data", &too_much, OUT_OF_RANGE, 0)?;
    let no_last = |cid, ttag| [h2c(false, cid, ttag, 0, &part), h2c(false, cid, ttag, 4096, &part)].concat();
    try_one("no LAST_PDU", &no_last, FIELD, 1)?;
    let (admin, io, cid, ttag) = fetch()?;
    one_of((admin, io), "no data", &h2c(false, cid, ttag, 0, &[]), &[FIELD])?;
    let (admin, io, cid, ttag) = fetch()?;
    let doubled = [h2c(false, cid, ttag, 0, &part), h2c(false, cid, ttag, 0, &part)].concat();
    one_of((admin, io), "the same data twice", &doubled, &[SEQUENCE, OUT_OF_RANGE])?;
    // Sends all of the data and then more, although the transfer has completed.
    let (admin, io, cid, ttag) = fetch()?;
    let all = h2c(true, cid, ttag, 0, &vec![5; 8192]);
    one_of((admin, io), "data after the last", &[all.clone(), all].concat(), &[FIELD, SEQUENCE])?;
    one_of(queues(context)?, "data without an R2T", &h2c(true, 1, 0, 0, &part), &[FIELD, SEQUENCE])?;
    let mut huge = h2c(true, 1, 0, 0, &part);
    huge[4..8].copy_from_slice(&(24 + (2_u32 << 20)).to_le_bytes());
    huge[16..20].copy_from_slice(&(2_u32 << 20).to_le_bytes());
    one_of(queues(context)?, "more than MAXH2CDATA without an R2T", &huge, &[FIELD, SEQUENCE, LIMIT])
}

pub(super) fn digests(context: &TestContext) -> Result<()> {
    let flush = transport(Command::new(0, 1), 0).with_cid(1);
    let peer = Peer::ready(context.address, 1)?;
    let good = peer.digested(&capsule(&flush, &[]), 0);
    let digest = crc32c(&good[..72]);
    let (field, corrupted) = (with(good.clone(), 72, &(!digest).to_le_bytes()), with(good, 60, &[0xAA]));
    fatal(peer, "a wrong header digest", &field, HEADER_DIGEST, !digest)?;
    fatal(Peer::ready(context.address, 1)?, "a corrupted header", &corrupted, HEADER_DIGEST, digest)?;
    // A wrong data digest fails its command, but not the connection.
    for digests in [2, 3] {
        let mut peer = Peer::ready(context.address, digests)?;
        let (command, data) = wire::connect(SUBNQN, 0, 32, 0xFFFF, 0);
        let pdu = peer.digested(&capsule(&in_capsule(command.with_cid(9), &data), &data), data.len());
        let at = pdu.len() - 100;
        let corrupted = with(pdu.clone(), at, &[pdu[at] ^ 1]);
        peer.send(&corrupted)?;
        let answer = peer.receive()?;
        let status = answer.short(22) >> 1 & 0x7FF;
        ensure!(answer.kind == RESPONSE && status == TRANSIENT_TRANSPORT_ERROR, "corrupted data: {answer:?}");
        peer.send(&pdu)?;
        let answer = peer.receive()?;
        ensure!(answer.kind == RESPONSE && answer.short(22) >> 1 == 0, "the same data, intact: {answer:?}");
    }
    Ok(())
}

/// PDUs of a correct session in every order of three: only orders that violate the sequence fail.
pub(super) fn reordered(context: &TestContext) -> Result<()> {
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    for order in orders {
        let (_admin, mut io, cid, ttag) = fetching(context, 12288)?;
        let part = |index: usize| h2c(index == 2, cid, ttag, index as u32 * 4096, &[index as u8; 4096]);
        let bytes: Vec<u8> = order.iter().flat_map(|&index| part(index)).collect();
        io.send(&bytes)?;
        if order == [0, 1, 2] {
            let pdu = io.receive()?;
            ensure!(pdu.kind == RESPONSE && pdu.short(22) >> 1 == 0, "data in order: {pdu:?}");
        } else {
            let error = io.fatal_error()?;
            ensure!(error.0 == SEQUENCE, "data in the order {order:?}: {error:?}");
        }
    }
    // Data of two commands may alternate.
    let (_admin, mut io, first, first_tag) = fetching(context, 8192)?;
    let second = io.cid();
    io.send(&capsule(&write_command(8192)?.with_cid(second), &[]))?;
    let pdu = io.receive()?;
    ensure!(pdu.kind == R2T, "a second Write: {pdu:?}");
    let second_tag = pdu.short(10);
    for (last, at) in [(false, 0), (true, 4096)] {
        io.send(&h2c(last, second, second_tag, at, &[2; 4096]))?;
        io.send(&h2c(last, first, first_tag, at, &[1; 4096]))?;
    }
    for _ in 0..2 {
        let pdu = io.receive()?;
        ensure!(pdu.kind == RESPONSE && pdu.short(22) >> 1 == 0, "data that alternates: {pdu:?}");
    }
    let unused = DataPointer::None;
    io.send(&capsule(&Command::new(0, PLAIN).with_data(unused).with_cid(99), &[]))?;
    ensure!(io.receive()?.kind == RESPONSE, "the queue goes on");
    Ok(())
}
