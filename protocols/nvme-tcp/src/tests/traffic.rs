//! Reads and writes of any size, through any chunks, under any agreement.

use std::num::NonZeroU32;

use proptest::prelude::*;
use sealblock_protocols_nvme::{Command, Completion, Status};
use sealblock_runtime_memory::{Buffer, Pool, Slice};

use super::pair::{Pair, READ, WRITE};
use crate::host::{Cid, Event, HostData};
use crate::{BlockLayout, HostConfig, Payload, TargetConfig, TransmitLimit, target};

fn pool() -> Pool {
    Pool::new(0, usize::MAX)
}

fn command(opcode: u8, at: usize) -> Command {
    let mut command = Command::new(opcode, 1);
    command.set_cdw10_11(at as u64);
    command
}

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + seed * 17 + i / 253) as u8).collect()
}

fn configs() -> impl Strategy<Value = (HostConfig, TargetConfig)> {
    let host =
        (any::<(bool, bool)>(), 0_u8..32, 1_u32..5, prop::sample::select(vec![0_u32, 4096, 8192]), 512_usize..9000);
    let target = (any::<(bool, bool)>(), 0_u8..32, 4096_u32..20_000, 1024_u32..40_000, 1_u32..5, 512_u32..20_000);
    (host, target, 128_usize..70_000, 1_usize..10_000).prop_map(|(h, t, staging_bytes, direct_bytes)| {
        let mut host = HostConfig::new(pool());
        ((host.header_digest, host.data_digest), host.hpda) = (h.0, h.1);
        host.max_r2ts = NonZeroU32::new(h.2).unwrap();
        host.max_in_capsule_bytes = h.3;
        (host.staging_bytes, host.direct_bytes) = (staging_bytes, h.4);
        let mut target = TargetConfig::new(pool());
        ((target.header_digest, target.data_digest), target.cpda) = (t.0, t.1);
        (target.max_h2c_data_bytes, target.max_r2t_bytes) = (t.2, t.3);
        target.max_r2ts = NonZeroU32::new(t.4).unwrap();
        target.max_c2h_data_bytes = t.5;
        (target.staging_bytes, target.direct_bytes) = (staging_bytes, direct_bytes);
        (host, target)
    })
}

fn completion_of(pair: &mut Pair, cid: Cid) -> (u16, Option<Vec<u8>>) {
    let is_it = |event: &Event| matches!(event, Event::Completed { cid: of, .. } if *of == cid);
    let at = pair.completed.iter().position(is_it).expect("every command completes");
    match pair.completed.swap_remove(at) {
        Event::Completed { completion, data, .. } => {
            (completion.status().code().get(), data.map(|data| data.buffer.to_vec()))
        }
        _ => unreachable!("it was looked for"),
    }
}

/// Each write has completed once and is on the disk, and reads back.
fn read_back(pair: &mut Pair, written: Vec<(Cid, usize, Vec<u8>)>) -> Result<(), TestCaseError> {
    let mut reads = Vec::new();
    for (cid, at, data) in written {
        prop_assert_eq!(completion_of(pair, cid), (0, None));
        prop_assert!(pair.disk[at..at + data.len()] == data[..]);
        let buffer = Buffer::zeroed(data.len());
        let read = HostData::Read { buffer, layout: pair.layout.clone() };
        reads.push((pair.host.submit(command(READ, at), read).unwrap(), data));
    }
    pair.run();
    for (cid, data) in reads {
        let (status, read) = completion_of(pair, cid);
        prop_assert_eq!(status, 0);
        prop_assert!(read.unwrap() == data);
    }
    Ok(())
}

/// Both sides count the same bytes, and with digests each was checksummed once.
fn counts_agree(pair: &Pair) -> Result<(), TestCaseError> {
    let (host, target) = (pair.host.counters(), pair.target.counters());
    prop_assert_eq!(host.payload_bytes_sent, target.received.payload_bytes);
    prop_assert_eq!(target.payload_bytes_sent, host.received.payload_bytes);
    let digests = pair.host.negotiated().unwrap().data_digest;
    for (all, checksummed) in [
        (host.payload_bytes_sent, host.payload_bytes_sent_checksummed),
        (host.received.payload_bytes, host.received.payload_bytes_checksummed),
        (target.received.payload_bytes, target.received.payload_bytes_checksummed),
    ] {
        prop_assert_eq!(checksummed, if digests { all } else { 0 });
    }
    let most = if digests { target.payload_bytes_sent } else { 0 };
    prop_assert!(target.payload_bytes_sent_checksummed <= most);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 96, ..ProptestConfig::default() })]

    /// What is written is what the export stores and what is read again; each command completes once; with digests
    /// each byte is checksummed once, however it was cut.
    #[test]
    fn what_is_written_is_read(
        (host, target) in configs(),
        pieces in prop::collection::vec(prop_oneof![1_usize..100, 1000_usize..200_000], 1..6),
        sizes in prop::collection::vec(1_usize..12_000, 1..12),
        (reorder, success_flag, send_crcs, shaped) in any::<(bool, bool, bool, bool)>(),
        limit_bytes in 1_usize..100_000,
    ) {
        let mut pair = Pair::new(host, target, &pieces);
        (pair.reorder, pair.send_crcs) = (reorder, send_crcs);
        pair.layout = BlockLayout::new(512, 0).filter(|_| shaped);
        pair.limit = TransmitLimit { bytes: limit_bytes, slices: 64 };
        pair.target.set_success_flag(success_flag);
        let (mut at, mut written) = (0, Vec::new());
        for (index, dwords) in sizes.iter().enumerate() {
            let data = pattern(index, dwords * 4);
            let cut = data.len() / 3;
            let payload = Payload::new([Slice::copy_from(&data[..cut]), Slice::copy_from(&data[cut..])]);
            let cid = pair.host.submit(command(WRITE, at), HostData::Write(payload)).unwrap();
            written.push((cid, at, data));
            at += dwords * 4;
        }
        pair.run();
        read_back(&mut pair, written)?;
        prop_assert!(pair.completed.is_empty());
        prop_assert_eq!((pair.host.commands_in_flight(), pair.target.commands_in_flight()), (0, 0));
        prop_assert_eq!(pair.target.bytes_in_flight(), 0);
        prop_assert_eq!((pair.host.closed(), pair.target.closed()), (None, None));
        counts_agree(&pair)?;
    }
}

#[test]
fn long_data_lands_in_place() {
    let mut target = TargetConfig::new(pool());
    target.staging_bytes = 64 << 10;
    let mut pair = Pair::new(HostConfig::new(pool()), target, &[1 << 20]);
    pair.limit.bytes = usize::MAX;
    let data = pattern(1, 256 << 10);
    let write = HostData::Write(Slice::copy_from(&data).into());
    let cid = pair.host.submit(command(WRITE, 0), write).unwrap();
    pair.run();
    assert_eq!(completion_of(&mut pair, cid).0, 0);
    assert!(pair.disk[..data.len()] == data);
    let received = pair.target.counters().received;
    assert_eq!(received.payload_bytes, 256 << 10);
    assert!(received.payload_bytes_copied <= 4096, "{received:?}");
    let read = HostData::Read { buffer: Buffer::zeroed(256 << 10), layout: None };
    let cid = pair.host.submit(command(READ, 0), read).unwrap();
    pair.run();
    assert!(completion_of(&mut pair, cid).1.unwrap() == data);
    assert!(pair.host.counters().received.payload_bytes_copied <= 4096);
}

#[test]
fn a_queue_takes_as_many_commands_as_it_may_and_then_more() {
    let mut pair = Pair::new(HostConfig::new(pool()), TargetConfig::new(pool()), &[100]);
    for _ in 0..3 {
        let cids: Vec<Cid> = std::iter::from_fn(|| pair.host.submit(command(0, 0), HostData::None).ok()).collect();
        assert_eq!(cids.len(), 128);
        assert!(!pair.host.can_submit());
        pair.run();
        for cid in cids {
            assert_eq!(completion_of(&mut pair, cid), (0, None));
        }
    }
}

#[test]
fn lengths_that_are_no_dwords_are_not_submitted() {
    let mut pair = Pair::new(HostConfig::new(pool()), TargetConfig::new(pool()), &[100]);
    for len in [0, 3, 4098] {
        let write = HostData::Write(Slice::copy_from(&vec![0; len]).into());
        assert!(pair.host.submit(command(WRITE, 0), write).is_err());
        let read = HostData::Read { buffer: Buffer::zeroed(len), layout: None };
        assert!(pair.host.submit(command(READ, 0), read).is_err());
    }
    assert_eq!(pair.host.commands_in_flight(), 0);
}

#[test]
fn in_capsule_data_beyond_the_bytes_in_flight_waits_for_responses() {
    let mut target = TargetConfig::new(pool());
    target.max_bytes_in_flight = 4096;
    let mut pair = Pair::new(HostConfig::new(pool()), target, &[1 << 20]);
    let mut bytes = Vec::new();
    for at in [0, 4096] {
        let data = HostData::Write(Slice::copy_from(&[7; 4096]).into());
        pair.host.submit(command(WRITE, at), data).unwrap();
        let mut out = Vec::new();
        pair.host.transmit(&mut out, TransmitLimit::default());
        out.iter().for_each(|slice| bytes.extend_from_slice(slice));
    }
    // All of the first capsule and the header of the second, then its data in two pieces.
    let mut sent = 0;
    for (to, is_lent) in [(2000, true), (72 + 4096, true), (72 + 4096 + 72, false), (8000, true), (bytes.len(), true)] {
        let lent = pair.target.receive_buffer();
        assert_eq!(lent.is_some(), is_lent, "{to}");
        let mut buffer = lent.unwrap_or_else(|| {
            let Some(target::Event::Command { token, .. }) = pair.target.next_event() else {
                panic!("the first command came")
            };
            pair.target.respond(token, Completion::new(0, Status::SUCCESS, 0)).unwrap();
            assert!(pair.target.receive_buffer().is_none(), "the response has not left");
            pair.target.transmit(&mut Vec::new(), TransmitLimit::default());
            pair.target.receive_buffer().expect("there is room again")
        });
        buffer[..to - sent].copy_from_slice(&bytes[sent..to]);
        pair.target.received(buffer, to - sent);
        sent = to;
    }
    assert!(matches!(pair.target.next_event(), Some(target::Event::Command { .. })), "the second is there");
    assert_eq!((pair.target.closed(), pair.target.bytes_in_flight()), (None, 4096));
}
