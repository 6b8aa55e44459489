//! What a host says to a target that violates the protocol, each beside the PDU that is right.

use sealblock_protocols_nvme::{Completion, Status};
use zerocopy::IntoBytes;

use super::{Prey, TO_CONTROLLER, TO_HOST, Term, pdu, pool};
use crate::HostConfig;
use crate::pdu::{CapsuleCmd, CapsuleResp, IcResp, PduRules, TermReq, TransferPdu, flags};
use crate::violation::{Closed, Violation};

const FIELD: u16 = 1;
const SEQUENCE: u16 = 2;
const HEADER_DIGEST: u16 = 3;
const OUT_OF_RANGE: u16 = 4;
const LIMIT: u16 = 5;
const UNSUPPORTED: u16 = 6;

fn config() -> HostConfig {
    HostConfig::new(pool())
}

fn with(mut bytes: Vec<u8>, at: usize, value: &[u8]) -> Vec<u8> {
    bytes[at..at + value.len()].copy_from_slice(value);
    bytes
}

/// `good` passes, and `bad` gets this answer, with its header as far as it was read.
#[track_caller]
fn twins(make: impl Fn() -> Prey, good: &[u8], bad: &[u8], fes: u16, fei: u32) {
    assert_eq!(make().reaction(good), None);
    let header_bytes = if bad[0] == good[0] && bad[2] == good[2] { usize::from(good[2]) } else { 8 };
    let expected: Term = (fes, fei, bad[..header_bytes].to_vec());
    assert_eq!(make().reaction(bad), Some(expected));
}

#[test]
fn icresp() {
    let mut asks = config();
    asks.header_digest = true;
    let make = || Prey::new(asks.clone());
    let good = IcResp::new(31, 1, 4096).as_bytes().to_vec();
    for (at, value, fes, fei) in [
        (0, vec![8], FIELD, 0),
        (2, vec![24], FIELD, 2),
        (4, vec![24], FIELD, 4),
        (8, vec![1], UNSUPPORTED, 8),
        (10, vec![32], FIELD, 10),
        (11, vec![2], FIELD, 11),
        (12, 0_u32.to_le_bytes().to_vec(), FIELD, 12),
        (12, 4098_u32.to_le_bytes().to_vec(), FIELD, 12),
        (12, 4092_u32.to_le_bytes().to_vec(), UNSUPPORTED, 12),
    ] {
        twins(make, &good, &with(good.clone(), at, &value), fes, fei);
    }
    let response = response(1);
    assert_eq!(make().reaction(&response), Some((SEQUENCE, 0, response)));
    assert_eq!(Prey::connected(config(), 0).reaction(&good), Some((SEQUENCE, 0, good)));
    let unasked = Prey(crate::Host::new(config())).reaction(IcResp::new(0, 0, 4096).as_bytes());
    assert_eq!(unasked.map(|term| term.0), Some(SEQUENCE), "a response before the request has left");
}

fn response(cid: u16) -> Vec<u8> {
    CapsuleResp::new(&TO_HOST, Completion::new(cid, Status::SUCCESS, 0)).as_bytes().to_vec()
}

/// A host with a command in flight, and its CID.
fn reading() -> (Prey, u16) {
    let mut prey = Prey::connected(config(), 0);
    let cid = prey.read(8192);
    (prey, cid)
}

#[test]
fn responses() {
    let cid = reading().1;
    let good = response(cid);
    let bad = |bytes: Vec<u8>, fes, fei| twins(|| reading().0, &good, &bytes, fes, fei);
    bad(response(cid + 1), FIELD, 20);
    bad(with(good.clone(), 1, &[1]), FIELD, 1);
    bad(with(good.clone(), 4, &[28]), FIELD, 4);
    // A second response to the same command.
    let (mut prey, cid) = reading();
    assert_eq!(prey.reaction(&response(cid)), None);
    assert_eq!(prey.reaction(&response(cid)).map(|term| (term.0, term.1)), Some((FIELD, 20)));
    // A response to a command that has not left.
    let mut prey = Prey::connected(config(), 0);
    let cid = prey.0.submit(sealblock_protocols_nvme::Command::new(0, 1), Default::default()).unwrap();
    assert_eq!(prey.reaction(&response(cid.0)).map(|term| term.0), Some(SEQUENCE));
    let wrong_way = CapsuleCmd::new(&TO_CONTROLLER, sealblock_protocols_nvme::Command::new(0, 1), 0);
    assert_eq!(reading().0.reaction(wrong_way.as_bytes()).map(|term| term.0), Some(SEQUENCE));
}

fn c2h(more_flags: u8, cid: u16, at: u32, len: u32) -> Vec<u8> {
    pdu(&TransferPdu::c2h_data(&TO_HOST, more_flags, cid, at, len), &vec![1; len as usize])
}

#[test]
fn c2h_data() {
    let cid = reading().1;
    let good = c2h(0, cid, 0, 4096);
    let bad = |bytes: Vec<u8>, fes, fei| twins(|| reading().0, &good, &bytes, fes, fei);
    bad(c2h(0, cid + 1, 0, 4096), FIELD, 8);
    bad(c2h(0, cid, 4, 4096), SEQUENCE, 0);
    bad(c2h(0, cid, 4096, 8192), OUT_OF_RANGE, 0);
    bad(c2h(0, cid, 0xFFFF_FFFC, 4), OUT_OF_RANGE, 0);
    bad(c2h(flags::SUCCESS, cid, 0, 4096), FIELD, 1);
    bad(with(good.clone(), 12, &[1]), FIELD, 12);
    bad(c2h(0, cid, 0, 4094), FIELD, 16);
    bad(with(good.clone(), 16, &4092_u32.to_le_bytes()), FIELD, 4);
    bad(with(good.clone(), 3, &[32]), FIELD, 3);
    bad(with(good.clone(), 1, &[2]), FIELD, 1);
    let (mut prey, cid) = reading();
    assert_eq!(prey.reaction(&c2h(flags::LAST, cid, 0, 4096)), None);
    assert_eq!(prey.reaction(&c2h(0, cid, 4096, 4096)).map(|term| term.0), Some(SEQUENCE), "behind the last");
    let mut prey = Prey::connected(config(), 0);
    let cid = prey.write(8192);
    assert_eq!(prey.reaction(&c2h(0, cid, 0, 4096)).map(|term| term.0), Some(SEQUENCE), "for a write");
}

#[test]
fn success_ends_the_command() {
    let (mut prey, cid) = reading();
    assert_eq!(prey.reaction(&c2h(0, cid, 0, 4096)), None);
    assert_eq!(prey.reaction(&c2h(flags::LAST | flags::SUCCESS, cid, 4096, 4096)), None);
    assert_eq!(prey.0.commands_in_flight(), 0);
    assert_eq!(prey.reaction(&response(cid)).map(|term| (term.0, term.1)), Some((FIELD, 20)));
}

/// A host with a write of 16 KiB in flight that takes two R2Ts at once.
fn writing() -> (Prey, u16) {
    let mut config = config();
    config.max_r2ts = std::num::NonZeroU32::new(2).unwrap();
    let mut prey = Prey::connected(config, 0);
    let cid = prey.write(16384);
    (prey, cid)
}

fn r2t(cid: u16, at: u32, len: u32) -> Vec<u8> {
    TransferPdu::r2t(&TO_HOST, cid, 77, at, len).as_bytes().to_vec()
}

#[test]
fn r2ts() {
    let cid = writing().1;
    let good = r2t(cid, 0, 8192);
    let bad = |bytes: Vec<u8>, fes, fei| twins(|| writing().0, &good, &bytes, fes, fei);
    bad(r2t(cid + 1, 0, 8192), FIELD, 8);
    bad(r2t(cid, 4096, 8192), SEQUENCE, 0);
    bad(r2t(cid, 0, 16388), OUT_OF_RANGE, 0);
    bad(r2t(cid, 0xFFFF_FFFC, 4), OUT_OF_RANGE, 0);
    bad(r2t(cid, 0, 0), FIELD, 16);
    bad(r2t(cid, 0, 2), FIELD, 16);
    bad(r2t(cid, 2, 4), FIELD, 12);
    bad(with(good.clone(), 4, &[28]), FIELD, 4);
    let (mut prey, cid) = reading();
    assert_eq!(prey.reaction(&r2t(cid, 0, 4096)).map(|term| term.0), Some(SEQUENCE), "for a read");
}

#[test]
fn r2ts_beyond_the_limit() {
    let (mut prey, cid) = writing();
    for at in [0, 4096] {
        assert_eq!(prey.reaction(&r2t(cid, at, 4096)), None);
    }
    // With the data of both sent, two more may come; without, a third is too many.
    let mut patient = writing();
    for at in [0, 4096, 8192, 12288] {
        assert_eq!(patient.0.reaction(&r2t(patient.1, at, 4096)), None);
        assert_eq!(patient.0.drain().iter().map(|slice| slice.len()).sum::<usize>(), 24 + 4096);
    }
    assert_eq!(prey.reaction(&r2t(cid, 8192, 4096)).map(|term| (term.0, term.1)), Some((LIMIT, 0)));
}

#[test]
fn header_digests() {
    let mut config = config();
    config.header_digest = true;
    let make = || {
        let mut prey = Prey::connected(config.clone(), 1);
        prey.read(4096);
        prey
    };
    let rules = PduRules { header_digest: true, ..TO_HOST };
    let header = CapsuleResp::new(&rules, Completion::new(0, Status::SUCCESS, 0));
    let digest = sealblock_integrity::guard::crc32c(header.as_bytes());
    let good = pdu(&header, &digest.to_le_bytes());
    twins(make, &good, &with(good.clone(), 9, &[1]), HEADER_DIGEST, digest);
    twins(make, &good, &with(good.clone(), 24, &(!digest).to_le_bytes()), HEADER_DIGEST, !digest);
}

#[test]
fn termination_requests_are_not_answered() {
    let violation = Violation::sequence("", "");
    let request = TermReq::new(crate::pdu::Direction::ToHost, &violation, 0).as_bytes().to_vec();
    for (plen, expected) in [
        (24, Closed::Terminated { fes: 2, fei: 0 }),
        (152, Closed::Terminated { fes: 2, fei: 0 }),
        (153, Closed::MalformedTermination),
        (23, Closed::MalformedTermination),
    ] {
        for mut prey in [Prey::new(config()), reading().0] {
            assert_eq!(prey.reaction(&with(request.clone(), 4, &[plen])), None);
            assert_eq!(prey.0.closed(), Some(expected));
        }
    }
}
