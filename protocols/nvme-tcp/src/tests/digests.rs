//! Data digests: a wrong digest fails a command and not the connection, and with known CRCs no byte is read twice.

use sealblock_integrity::guard;
use sealblock_protocols_nvme::{Command, Completion, DataPointer, Status, StatusCode};
use sealblock_runtime_memory::{Buffer, Slice};
use zerocopy::IntoBytes;

use super::pair::{Pair, READ, WRITE};
use super::{Prey, TO_CONTROLLER, TO_HOST, Victim, command, pdu, pool};
use crate::host::{self, HostData};
use crate::pdu::{CapsuleCmd, CapsuleResp, PduRules, TransferPdu, flags};
use crate::target::{CommandData, DataError, Event};
use crate::{BlockCrcs, BlockLayout, HostConfig, Payload, TargetConfig};

const DATA_DIGEST: u8 = 2;
const H2C: PduRules = PduRules { data_digest: true, ..TO_CONTROLLER };
const C2H: PduRules = PduRules { data_digest: true, ..TO_HOST };

/// A PDU with data and its digest, in which `flip` changes one bit of the data.
fn digested(header: &(impl IntoBytes + zerocopy::Immutable), data: &[u8], flip: bool) -> Vec<u8> {
    let mut bytes = pdu(header, data);
    bytes.extend_from_slice(&guard::crc32c(data).to_le_bytes());
    let at = header.as_bytes().len() + data.len() / 2;
    bytes[at] ^= u8::from(flip);
    bytes
}

#[test]
fn damaged_in_capsule_data_fails_its_command() {
    for flip in [false, true] {
        let mut victim = Victim::connected(TargetConfig::new(pool()), DATA_DIGEST);
        let pointer = DataPointer::InCapsule { offset_bytes: 0, length_bytes: 512 };
        let capsule = digested(&CapsuleCmd::new(&H2C, command(1, 1, pointer), 512), &[3; 512], flip);
        assert_eq!(victim.reaction(&capsule), None);
        match std::iter::from_fn(|| victim.0.next_event()).last() {
            Some(Event::Command { data: CommandData::InCapsule(_), .. }) => assert!(!flip),
            Some(Event::Command { data: CommandData::Unusable(error), .. }) => {
                assert!(flip);
                assert_eq!(error, DataError::Digest);
                assert_eq!(error.status_code(), StatusCode::TRANSIENT_TRANSPORT_ERROR);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn damaged_h2c_data_fails_its_command_when_all_has_come() {
    for flip in [false, true] {
        let mut config = TargetConfig::new(pool());
        config.header_digest = false;
        let mut victim = Victim::connected(config, DATA_DIGEST);
        let ttag = victim.write(9, 8192);
        let part = |last, at, flip| digested(&TransferPdu::h2c_data(&H2C, last, 9, ttag, at, 4096), &[4; 4096], flip);
        assert_eq!(victim.reaction(&part(false, 0, flip)), None);
        assert!(victim.0.next_event().is_none());
        assert_eq!(victim.reaction(&part(true, 4096, false)), None);
        match victim.0.next_event() {
            Some(Event::DataReady { data, .. }) => assert_eq!(data.err(), flip.then_some(DataError::Digest)),
            other => panic!("{other:?}"),
        }
        assert_eq!(victim.0.counters().received.payload_bytes_checksummed, 8192);
    }
}

#[test]
fn damaged_c2h_data_turns_success_into_a_transport_error() {
    let failure = StatusCode::LBA_OUT_OF_RANGE.status();
    let transient = StatusCode::TRANSIENT_TRANSPORT_ERROR.status();
    for (flip, success_flag, status, expected) in [
        (false, false, Status::SUCCESS, Status::SUCCESS),
        (true, false, Status::SUCCESS, transient),
        (false, true, Status::SUCCESS, Status::SUCCESS),
        (true, true, Status::SUCCESS, transient),
        (true, false, failure, failure),
    ] {
        let mut config = HostConfig::new(pool());
        config.data_digest = true;
        let mut prey = Prey::connected(config, DATA_DIGEST);
        let cid = prey.read(4096);
        let more_flags = flags::LAST | if success_flag { flags::SUCCESS } else { 0 };
        let data = digested(&TransferPdu::c2h_data(&C2H, more_flags, cid, 0, 4096), &[6; 4096], flip);
        assert_eq!(prey.reaction(&data), None);
        if !success_flag {
            assert_eq!(prey.reaction(CapsuleResp::new(&C2H, Completion::new(cid, status, 0)).as_bytes()), None);
        }
        match std::iter::from_fn(|| prey.0.next_event()).last() {
            Some(host::Event::Completed { completion, data: Some(data), .. }) => {
                assert_eq!((completion.status(), data.is_damaged), (expected, flip));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn less_data_than_asked_for_shortens_the_buffer() {
    let mut prey = Prey::connected(HostConfig::new(pool()), 0);
    let cid = prey.read(8192);
    assert_eq!(prey.reaction(&pdu(&TransferPdu::c2h_data(&TO_HOST, flags::LAST, cid, 0, 4096), &[1; 4096])), None);
    assert_eq!(prey.reaction(CapsuleResp::new(&TO_HOST, Completion::new(cid, Status::SUCCESS, 0)).as_bytes()), None);
    match std::iter::from_fn(|| prey.0.next_event()).last() {
        Some(host::Event::Completed { data: Some(data), .. }) => assert!(data.buffer[..] == [1; 4096]),
        other => panic!("{other:?}"),
    }
}

fn crcs_of(layout: &BlockLayout, data: &[u8]) -> BlockCrcs {
    let crc = |block: &[u8]| guard::crc32c(&block[..layout.data_bytes()]);
    BlockCrcs { layout: layout.clone(), guards: data.chunks(layout.stride_bytes()).map(crc).collect() }
}

/// A pair with all digests and with CRCs both ways, whose PDUs cut the blocks.
fn pair_with_crcs(layout: &BlockLayout) -> Pair {
    let mut host = HostConfig::new(pool());
    (host.header_digest, host.data_digest) = (true, true);
    let mut target = TargetConfig::new(pool());
    target.max_h2c_data_bytes = 20_000;
    target.max_c2h_data_bytes = 30_000;
    let of = layout.clone();
    target.layout_of = Some(crate::config::LayoutOf::new(move |_| Some(of.clone())));
    let mut pair = Pair::new(host, target, &[1 << 20]);
    (pair.layout, pair.send_crcs) = (Some(layout.clone()), true);
    pair
}

/// Guards known at the sender, digests on the wire, guards for the receiver: the sender reads no block, only tuples,
/// and the receiver checksums each byte once, in both directions, though PDUs and R2Ts cut the blocks.
#[test]
fn each_byte_is_summed_once_at_each_end() {
    for metadata_bytes in [0_usize, 16] {
        let layout = BlockLayout::new(4096, metadata_bytes).unwrap();
        let mut pair = pair_with_crcs(&layout);
        let data: Vec<u8> = (0..32 * layout.stride_bytes()).map(|i| (i * 13 + i / 4096) as u8).collect();
        let payload = Payload::from(Slice::copy_from(&data)).with_crcs(crcs_of(&layout, &data));
        pair.host.submit(Command::new(WRITE, 1), HostData::Write(payload)).unwrap();
        let small = Payload::from(Slice::copy_from(&data[..layout.stride_bytes()]));
        let small = small.with_crcs(crcs_of(&layout, &data[..layout.stride_bytes()]));
        pair.host.submit(Command::new(WRITE, 1), HostData::Write(small)).unwrap();
        pair.run();
        assert!(pair.disk[..data.len()] == data[..]);
        assert_eq!(pair.sums_seen, 2);
        let (sent, received) = (pair.host.counters(), pair.target.counters().received);
        assert_eq!(sent.payload_bytes_sent_checksummed, 33 * metadata_bytes as u64);
        assert_eq!(received.payload_bytes, sent.payload_bytes_sent);
        assert_eq!(received.payload_bytes_checksummed, received.payload_bytes);

        let read = HostData::Read { buffer: Buffer::zeroed(data.len()), layout: Some(layout.clone()) };
        pair.completed.clear();
        pair.host.submit(Command::new(READ, 1), read).unwrap();
        pair.run();
        match pair.completed.pop() {
            Some(host::Event::Completed { data: Some(read), .. }) => {
                assert!(!read.is_damaged && read.buffer[..] == data[..]);
                assert_eq!(read.crcs.unwrap().guards, crcs_of(&layout, &data).guards);
            }
            other => panic!("{other:?}"),
        }
        let (sent, received) = (pair.target.counters(), pair.host.counters().received);
        assert_eq!(sent.payload_bytes_sent_checksummed, 32 * metadata_bytes as u64);
        assert_eq!(
            (received.payload_bytes, received.payload_bytes_checksummed),
            (data.len() as u64, data.len() as u64)
        );
    }
}

#[test]
fn wrong_sums_are_seen_as_a_wrong_digest() {
    let layout = BlockLayout::new(4096, 0).unwrap();
    let mut host = HostConfig::new(pool());
    host.data_digest = true;
    let mut pair = Pair::new(host, TargetConfig::new(pool()), &[1 << 20]);
    let data = vec![8; 16384];
    let mut crcs = crcs_of(&layout, &data);
    crcs.guards[2] ^= 1;
    pair.host
        .submit(Command::new(WRITE, 1), HostData::Write(Payload::from(Slice::copy_from(&data)).with_crcs(crcs)))
        .unwrap();
    pair.run();
    match pair.completed.pop() {
        Some(host::Event::Completed { completion, .. }) => {
            assert_eq!(completion.status().code(), StatusCode::TRANSIENT_TRANSPORT_ERROR);
        }
        other => panic!("{other:?}"),
    }
    assert!(pair.disk[..16384].iter().all(|&byte| byte == 0));
}
