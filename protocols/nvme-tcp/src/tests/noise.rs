//! Noise, and good streams with faults in them: nothing panics and no limit is exceeded.

use proptest::prelude::*;
use sealblock_protocols_nvme::{Completion, DataPointer, Status};
use zerocopy::IntoBytes;

use super::{TO_CONTROLLER, TO_HOST, command, pdu};
use crate::fuzz;
use crate::pdu::{CapsuleCmd, CapsuleResp, TransferPdu};

/// PDUs that a host might send, with small numbers in their fields, so that some of them fit together.
fn host_pdu() -> impl Strategy<Value = Vec<u8>> {
    let small = || 0_u32..5;
    prop_oneof![
        (1_u8..4, 0_u16..4, small()).prop_map(|(opcode, cid, len)| {
            let pointer = DataPointer::Transport { length_bytes: len * 2048 };
            CapsuleCmd::new(&TO_CONTROLLER, command(opcode, cid, pointer), 0).as_bytes().to_vec()
        }),
        (0_u16..4, small()).prop_map(|(cid, len)| {
            let pointer = DataPointer::InCapsule { offset_bytes: 0, length_bytes: len * 512 };
            pdu(&CapsuleCmd::new(&TO_CONTROLLER, command(1, cid, pointer), len * 512), &vec![1; len as usize * 512])
        }),
        (any::<bool>(), 0_u16..4, 0_u16..20, small(), small()).prop_map(|(last, cid, ttag, at, len)| {
            let header = TransferPdu::h2c_data(&TO_CONTROLLER, last, cid, ttag, at * 2048, len * 2048);
            pdu(&header, &vec![2; len as usize * 2048])
        }),
    ]
}

/// PDUs that a target might send, likewise.
fn target_pdu() -> impl Strategy<Value = Vec<u8>> {
    let small = || 0_u32..5;
    prop_oneof![
        (0_u16..30).prop_map(|cid| {
            CapsuleResp::new(&TO_HOST, Completion::new(cid, Status::SUCCESS, 0)).as_bytes().to_vec()
        }),
        (0_u8..4, 0_u16..30, small(), small()).prop_map(|(flags, cid, at, len)| {
            pdu(&TransferPdu::c2h_data(&TO_HOST, flags << 2, cid, at * 2048, len * 2048), &vec![3; len as usize * 2048])
        }),
        (0_u16..30, 0_u16..9, small(), small()).prop_map(|(cid, ttag, at, len)| {
            TransferPdu::r2t(&TO_HOST, cid, ttag, at * 2048, len * 2048).as_bytes().to_vec()
        }),
    ]
}

/// A stream with some bytes changed.
fn mutated(pdu: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let faults = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    (any::<(u8, u8)>(), prop::collection::vec(pdu, 1..20), faults).prop_map(|((choice, piece), pdus, faults)| {
        let mut stream = pdus.concat();
        for (at, value) in faults {
            if !stream.is_empty() {
                let at = at.index(stream.len());
                stream[at] = value;
            }
        }
        // Digests mostly off and ICReq or ICResp mostly there, or little would be read.
        let choice = if piece % 8 == 0 { choice } else { choice & 0x1F | 1 };
        [vec![choice, piece], stream].concat()
    })
}

/// An input with data in flight to a target whose host closes by itself.
const HOST_CLOSES: &[u8] = &[
    0x2A, 0x00, 0xF8, 0x2F, 0xDD, 0x27, 0xBD, 0x2A, 0x40, 0x2F, 0xDD, 0x27, 0xBD, 0x27, 0xDD, 0xD9, 0x00, 0x79, 0x79,
    0x79, 0x79, 0x79, 0x79, 0x79, 0xAA, 0xAA, 0xAA, 0xFE, 0x00, 0xBD, 0xFE, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x01, 0xA1,
    0x31, 0x31, 0xDD, 0x27, 0x27, 0x00, 0xBD, 0xFE, 0x31, 0xDD, 0x27, 0x27, 0xFE, 0x00, 0xBD, 0xFE, 0xFF, 0xFF, 0xFF,
    0xDD, 0x27, 0x27, 0x00, 0x00, 0x00, 0x00, 0xFF, 0xA1, 0x27, 0x00, 0x00, 0x00, 0x01, 0x86, 0x4E, 0xA1, 0x5A, 0x00,
    0x24, 0xFF, 0xBD, 0xFE, 0x00, 0x27, 0xBD, 0xFE, 0xFF, 0x02, 0x00, 0xBD, 0xAA, 0xAA, 0xBD, 0x0A,
];

#[test]
fn scripts_that_were_found() {
    fuzz::pair(HOST_CLOSES);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        fuzz::target(&bytes);
        fuzz::host(&bytes);
    }

    #[test]
    fn scripts(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        fuzz::pair(&bytes);
    }

    #[test]
    fn mutated_hosts(bytes in mutated(host_pdu())) {
        fuzz::target(&bytes);
    }

    #[test]
    fn mutated_targets(bytes in mutated(target_pdu())) {
        fuzz::host(&bytes);
    }
}
