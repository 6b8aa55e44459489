//! What a target says to a host that violates the protocol, each beside the PDU that is right.

use sealblock_protocols_nvme::{Completion, DataPointer, Status};
use zerocopy::IntoBytes;

use super::{TO_CONTROLLER, TO_HOST, Term, Victim, command, pdu, pool};
use crate::TargetConfig;
use crate::pdu::{CapsuleCmd, CapsuleResp, IcReq, TermReq, TransferPdu};
use crate::target::{CommandData, DataError, Event};
use crate::violation::{Closed, Violation};

const FIELD: u16 = 1;
const SEQUENCE: u16 = 2;
const HEADER_DIGEST: u16 = 3;
const OUT_OF_RANGE: u16 = 4;
const LIMIT: u16 = 5;
const UNSUPPORTED: u16 = 6;

fn config() -> TargetConfig {
    let mut config = TargetConfig::new(pool());
    config.max_h2c_data_bytes = 8192;
    config.max_r2t_bytes = 16384;
    config
}

fn with(mut bytes: Vec<u8>, at: usize, value: &[u8]) -> Vec<u8> {
    bytes[at..at + value.len()].copy_from_slice(value);
    bytes
}

/// `good` passes, and `bad` gets this answer, with its header as far as it was read.
#[track_caller]
fn twins(make: impl Fn() -> Victim, good: &[u8], bad: &[u8], fes: u16, fei: u32) {
    assert_eq!(make().reaction(good), None);
    let header_bytes = if bad[0] == good[0] && bad[2] == good[2] { usize::from(good[2]) } else { 8 };
    let expected: Term = (fes, fei, bad[..header_bytes].to_vec());
    assert_eq!(make().reaction(bad), Some(expected));
}

#[test]
fn icreq() {
    let good = IcReq::new(0, 3, 0).as_bytes().to_vec();
    for (at, value, fes, fei) in
        [(0, 8, FIELD, 0), (2, 72, FIELD, 2), (4, 129, FIELD, 4), (8, 1, UNSUPPORTED, 8), (10, 32, FIELD, 10)]
    {
        twins(|| Victim::new(config()), &good, &with(good.clone(), at, &[value]), fes, fei);
    }
    let capsule = CapsuleCmd::new(&TO_CONTROLLER, command(0, 1, DataPointer::None), 0);
    let reaction = Victim::new(config()).reaction(capsule.as_bytes());
    assert_eq!(reaction, Some((SEQUENCE, 0, capsule.as_bytes().to_vec())));
    let reaction = Victim::connected(config(), 0).reaction(&good);
    assert_eq!(reaction, Some((SEQUENCE, 0, good)));
}

#[test]
fn the_wrong_direction() {
    let response = CapsuleResp::new(&TO_HOST, Completion::new(1, Status::SUCCESS, 0));
    let reaction = Victim::connected(config(), 0).reaction(response.as_bytes());
    assert_eq!(reaction, Some((SEQUENCE, 0, response.as_bytes()[..8].to_vec())));
}

#[test]
fn capsules() {
    let connected = || Victim::connected(config(), 0);
    let pointer = DataPointer::InCapsule { offset_bytes: 0, length_bytes: 512 };
    let good = pdu(&CapsuleCmd::new(&TO_CONTROLLER, command(1, 1, pointer), 512), &[9; 512]);
    for (at, value, fei) in [(1, 1, 1), (1, 2, 1), (2, 24, 2), (3, 76, 3), (3, 0, 3)] {
        twins(connected, &good, &with(good.clone(), at, &[value]), FIELD, fei);
    }
    for plen in [0_u32, 71] {
        twins(connected, &good, &with(good.clone(), 4, &plen.to_le_bytes()), FIELD, 4);
    }
    // More than the target takes, and data that the command does not speak of.
    let huge = with(good.clone(), 4, &(72 + 8196_u32).to_le_bytes());
    twins(connected, &good, &huge, FIELD, 4);
    let undefined = CapsuleCmd::new(&TO_CONTROLLER, command(1, 1, DataPointer::Transport { length_bytes: 512 }), 512);
    twins(connected, &good, &pdu(&undefined, &[9; 512]), FIELD, 4);
    // A CID that is in use.
    let plain = |cid| CapsuleCmd::new(&TO_CONTROLLER, command(0, cid, DataPointer::None), 0).as_bytes().to_vec();
    let busy = || {
        let mut victim = connected();
        victim.feed(&plain(7));
        victim
    };
    twins(busy, &plain(8), &plain(7), FIELD, 10);
}

#[test]
fn a_cid_may_be_used_again_when_its_response_has_left_and_not_before() {
    let plain = CapsuleCmd::new(&TO_CONTROLLER, command(0, 7, DataPointer::None), 0);
    let mut victim = Victim::connected(config(), 0);
    for _ in 0..3 {
        assert_eq!(victim.reaction(plain.as_bytes()), None);
        while let Some(event) = victim.0.next_event() {
            if let Event::Command { token, .. } = event {
                victim.0.respond(token, Completion::new(0, Status::SUCCESS, 0)).unwrap();
                assert!(victim.0.respond(token, Completion::new(0, Status::SUCCESS, 0)).is_err());
            }
        }
        assert_eq!(victim.0.commands_in_flight(), 1);
        victim.drain();
        assert_eq!(victim.0.commands_in_flight(), 0);
    }
}

#[test]
fn the_cid_of_a_kept_command_may_be_used_again_and_no_other() {
    let capsule = |cid| CapsuleCmd::new(&TO_CONTROLLER, command(0, cid, DataPointer::None), 0);
    let mut victim = Victim::connected(config(), 0);
    for cid in [7, 8] {
        assert_eq!(victim.reaction(capsule(cid).as_bytes()), None);
    }
    let mut tokens = Vec::new();
    while let Some(event) = victim.0.next_event() {
        tokens.extend(if let Event::Command { token, .. } = event { Some(token) } else { None });
    }
    victim.0.allow_unanswered(tokens[0]);
    assert_eq!(victim.reaction(capsule(7).as_bytes()), None);
    assert_eq!(victim.0.commands_in_flight(), 2);
    assert!(victim.0.respond(tokens[0], Completion::new(0, Status::SUCCESS, 0)).is_err(), "it is forgotten");
    for cid in [7, 8] {
        let mut victim = Victim::connected(config(), 0);
        assert_eq!(victim.reaction(capsule(cid).as_bytes()), None);
        let again = capsule(cid);
        assert_eq!(victim.reaction(again.as_bytes()), Some((FIELD, 10, again.as_bytes().to_vec())));
    }
}

#[test]
fn more_commands_than_entries() {
    let mut victim = Victim::connected(config(), 0);
    for cid in 0..=128 {
        let capsule = CapsuleCmd::new(&TO_CONTROLLER, command(0, cid, DataPointer::None), 0);
        let expected = (cid == 128).then(|| (SEQUENCE, 0, capsule.as_bytes().to_vec()));
        assert_eq!(victim.reaction(capsule.as_bytes()), expected);
    }
}

#[test]
fn data_pointers_that_fail_their_command_alone() {
    let capsule =
        |pointer, data: &[u8]| pdu(&CapsuleCmd::new(&TO_CONTROLLER, command(1, 1, pointer), data.len() as u32), data);
    let in_capsule = |offset_bytes, length_bytes| DataPointer::InCapsule { offset_bytes, length_bytes };
    for (bytes, expected) in [
        (capsule(in_capsule(0, 512), &[1; 512]), None),
        (capsule(in_capsule(4, 512), &[1; 512]), Some(DataError::Offset)),
        (capsule(in_capsule(0, 256), &[1; 512]), Some(DataError::Length)),
        (capsule(in_capsule(0, 512), &[]), Some(DataError::Length)),
    ] {
        let mut victim = Victim::connected(config(), 0);
        assert_eq!(victim.reaction(&bytes), None);
        let event = std::iter::from_fn(|| victim.0.next_event()).last();
        let Some(Event::Command { data, .. }) = event else { panic!("no command: {event:?}") };
        match (data, expected) {
            (CommandData::InCapsule(received), None) => assert!(received.buffer[..] == [1; 512]),
            (CommandData::Unusable(error), Some(expected)) => assert_eq!(error, expected),
            (data, expected) => panic!("{data:?}, not {expected:?}"),
        }
    }
    // A descriptor of a keyed type, with data in the capsule that is passed over.
    let mut bytes = capsule(in_capsule(0, 512), &[1; 512]);
    bytes[8 + 39] = 0x40;
    let mut victim = Victim::connected(config(), 0);
    assert_eq!(victim.reaction(&bytes), None);
    let event = std::iter::from_fn(|| victim.0.next_event()).last();
    assert!(matches!(event, Some(Event::Command { data: CommandData::Unusable(DataError::Sgl(_)), .. })));
    assert_eq!(victim.reaction(&with(capsule(in_capsule(0, 512), &[1; 512]), 10, &[2])), None);
}

/// A target that awaits 32 KiB for command 5, in two R2Ts of which both are out.
fn fetching() -> (Victim, u16) {
    let mut config = config();
    config.max_r2ts = std::num::NonZeroU32::new(2).unwrap();
    let mut victim = Victim::connected(config, 0);
    let ttag = victim.write(5, 32768);
    (victim, ttag)
}

fn h2c(last: bool, cid: u16, ttag: u16, at: u32, len: u32) -> Vec<u8> {
    pdu(&TransferPdu::h2c_data(&TO_CONTROLLER, last, cid, ttag, at, len), &vec![1; len as usize])
}

#[test]
fn h2c_data() {
    let ttag = fetching().1;
    let good = h2c(false, 5, ttag, 0, 8192);
    let bad = |bytes: Vec<u8>, fes, fei| twins(|| fetching().0, &good, &bytes, fes, fei);
    bad(h2c(false, 5, ttag + 1, 0, 8192), FIELD, 10);
    bad(h2c(false, 6, ttag, 0, 8192), FIELD, 8);
    bad(h2c(false, 5, ttag, 4, 8192), SEQUENCE, 0);
    bad(h2c(false, 5, ttag, 8192, 8192), SEQUENCE, 0);
    bad(h2c(false, 5, ttag, 16384, 8192), OUT_OF_RANGE, 0);
    bad(h2c(false, 5, ttag, 12288, 8192), OUT_OF_RANGE, 0);
    bad(h2c(false, 5, ttag, 0xFFFF_FFFC, 8192), OUT_OF_RANGE, 0);
    bad(h2c(false, 5, ttag, 0, 12288), LIMIT, 0);
    bad(h2c(true, 5, ttag, 0, 8192), FIELD, 1);
    bad(with(good.clone(), 12, &[2]), FIELD, 12);
    bad(with(h2c(false, 5, ttag, 0, 8190), 0, &[6]), FIELD, 16);
    bad(with(good.clone(), 16, &4096_u32.to_le_bytes()), FIELD, 4);
    bad(with(good.clone(), 4, &24_u32.to_le_bytes()), FIELD, 4);
    bad(with(good.clone(), 3, &[28]), FIELD, 3);
}

#[test]
fn h2c_data_at_the_end_of_an_r2t_and_behind_the_last() {
    let first_half = |last| {
        let (mut victim, ttag) = fetching();
        assert_eq!(victim.reaction(&h2c(false, 5, ttag, 0, 8192)), None);
        victim.reaction(&h2c(last, 5, ttag, 8192, 8192))
    };
    assert_eq!(first_half(true), None);
    assert_eq!(first_half(false).map(|term| (term.0, term.1)), Some((FIELD, 1)));
    let (mut victim, ttag) = fetching();
    for (index, last) in [false, true, false, true].into_iter().enumerate() {
        assert_eq!(victim.reaction(&h2c(last, 5, ttag, index as u32 * 8192, 8192)), None);
    }
    let event = victim.0.next_event();
    assert!(matches!(event, Some(Event::DataReady { data: Ok(_), .. })), "{event:?}");
    let again = victim.reaction(&h2c(true, 5, ttag, 24576, 8192));
    assert_eq!(again.map(|term| (term.0, term.1)), Some((SEQUENCE, 0)));
}

#[test]
fn data_before_its_r2t_has_left() {
    let (_, ttag) = fetching();
    let mut victim = Victim::connected(config(), 0);
    let pointer = DataPointer::Transport { length_bytes: 8192 };
    victim.feed(CapsuleCmd::new(&TO_CONTROLLER, command(1, 5, pointer), 0).as_bytes());
    let event = std::iter::from_fn(|| victim.0.next_event()).last();
    let Some(Event::Command { token, .. }) = event else { panic!("no command") };
    let buffer = sealblock_runtime_memory::Buffer::zeroed(8192);
    victim.0.fetch_data(token, buffer, None).unwrap();
    victim.feed(&h2c(true, 5, ttag, 0, 8192));
    let closed = victim.0.closed();
    assert!(matches!(closed, Some(Closed::Violated(Violation { fes: crate::FatalErrorStatus::SequenceError, .. }))));
}

#[test]
fn header_digests() {
    let make = || Victim::connected(config(), 1);
    let rules = crate::pdu::PduRules { header_digest: true, ..TO_CONTROLLER };
    let header = CapsuleCmd::new(&rules, command(0, 1, DataPointer::None), 0);
    let digest = sealblock_integrity::guard::crc32c(header.as_bytes());
    let good = pdu(&header, &digest.to_le_bytes());
    twins(make, &good, &with(good.clone(), 40, &[1]), HEADER_DIGEST, digest);
    twins(make, &good, &with(good.clone(), 72, &(!digest).to_le_bytes()), HEADER_DIGEST, !digest);
}

#[test]
fn termination_requests_are_not_answered() {
    let violation = Violation::field(4, "", "");
    let request = TermReq::new(crate::pdu::Direction::ToController, &violation, 0).as_bytes().to_vec();
    for (plen, expected) in [
        (24, Closed::Terminated { fes: 1, fei: 4 }),
        (152, Closed::Terminated { fes: 1, fei: 4 }),
        (153, Closed::MalformedTermination),
        (23, Closed::MalformedTermination),
    ] {
        for mut victim in [Victim::new(config()), Victim::connected(config(), 0)] {
            assert_eq!(victim.reaction(&with(request.clone(), 4, &[plen])), None);
            assert_eq!(victim.0.closed(), Some(expected));
        }
    }
}

#[test]
fn a_command_answered_while_its_data_is_on_the_way_waits_for_what_was_asked_for() {
    let mut victim = Victim::connected(config(), 0);
    let pointer = DataPointer::Transport { length_bytes: 32768 };
    victim.feed(CapsuleCmd::new(&TO_CONTROLLER, command(1, 5, pointer), 0).as_bytes());
    let event = std::iter::from_fn(|| victim.0.next_event()).last();
    let Some(Event::Command { token, .. }) = event else { panic!("no command") };
    let buffer = sealblock_runtime_memory::Buffer::zeroed(32768);
    victim.0.fetch_data(token, buffer, None).unwrap();
    let sent = victim.drain();
    let ttag = u16::from_le_bytes([sent[0][10], sent[0][11]]);
    assert_eq!(victim.reaction(&h2c(false, 5, ttag, 0, 8192)), None);
    victim.0.respond(token, Completion::new(0, Status::SUCCESS, 0)).unwrap();
    assert!(victim.drain().is_empty(), "the response waits");
    assert_eq!(victim.reaction(&h2c(true, 5, ttag, 8192, 8192)), None);
    let sent = victim.drain();
    assert_eq!((sent.len(), sent[0][0], sent[0].len()), (1, 5, 24), "the response and no second R2T");
    assert_eq!(victim.0.commands_in_flight(), 0);
}
