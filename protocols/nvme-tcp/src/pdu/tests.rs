//! Each PDU against bytes written down by hand from the tables of clause 3.6.2.

use sealblock_protocols_nvme::{Command, Completion, DataPointer, StatusCode};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::*;
use crate::violation::{FatalErrorStatus, Violation};

const TO_CONTROLLER: PduRules =
    PduRules { direction: Direction::ToController, header_digest: true, data_digest: true, alignment_bytes: 64 };
const TO_HOST: PduRules =
    PduRules { direction: Direction::ToHost, header_digest: true, data_digest: true, alignment_bytes: 16 };

/// Hexadecimal digits, spaces between; `*` stands for zeroes up to `len` bytes.
fn hex(text: &str, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        text.split_whitespace().filter(|t| *t != "*").map(|t| u8::from_str_radix(t, 16).unwrap()).collect();
    bytes.resize(len, 0);
    bytes
}

fn holds<T>(pdu: T, bytes: Vec<u8>, rules: &PduRules, expected: Frame)
where
    T: FromBytes + IntoBytes + Immutable + KnownLayout + PartialEq + std::fmt::Debug,
{
    assert_eq!(pdu.as_bytes(), bytes);
    assert_eq!(T::read_from_bytes(&bytes).unwrap(), pdu);
    let common = CommonHeader::read_from_prefix(&bytes).unwrap().0;
    let kind = begin(&common, rules).unwrap();
    assert_eq!(kind.header_bytes(), bytes.len());
    assert_eq!(frame(&common, kind, rules), Ok(expected));
}

#[test]
fn icreq() {
    let bytes = hex("00 00 80 00 80 00 00 00  00 00 03 02 04 03 02 01 *", 128);
    holds(
        IcReq::new(3, DIGEST_DATA, 0x0102_0304),
        bytes,
        &PduRules::initial(Direction::ToController),
        Frame::default(),
    );
}

#[test]
fn icresp() {
    let bytes = hex("01 00 80 00 80 00 00 00  00 00 0f 01 00 00 02 00 *", 128);
    holds(IcResp::new(15, DIGEST_HEADER, 0x2_0000), bytes, &PduRules::initial(Direction::ToHost), Frame::default());
}

#[test]
fn termination_requests() {
    let violation = Violation::field(0x0A, "clause", "what");
    let bytes = hex("02 00 18 00 20 00 00 00  01 00 0a 00 00 00 *", 24);
    let expected = Frame { data_bytes: 8, ..Frame::default() };
    holds(TermReq::new(Direction::ToController, &violation, 8), bytes, &TO_CONTROLLER, expected);
    let bytes = hex("03 00 18 00 98 00 00 00  03 00 ef be ad de *", 24);
    let expected = Frame { data_bytes: 128, ..Frame::default() };
    holds(TermReq::new(Direction::ToHost, &Violation::header_digest(0xDEAD_BEEF), 128), bytes, &TO_HOST, expected);
}

#[test]
fn capsules() {
    let command = Command::new(0x01, 1).with_cid(0x0102).with_data(DataPointer::Transport { length_bytes: 4096 });
    let sqe = "01 40 02 01 01 00 00 00  00 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00 \
               00 00 00 00 00 00 00 00  00 10 00 00 00 00 00 5a *";
    let bytes = hex(&format!("04 01 48 00 4c 00 00 00 {sqe}"), 72);
    holds(CapsuleCmd::new(&TO_CONTROLLER, command, 0), bytes, &TO_CONTROLLER, Frame::default());
    // 72 bytes of header, 4 of digest, 52 of padding to 128; 512 of data and 4 of digest.
    let bytes = hex(&format!("04 03 48 80 84 02 00 00 {sqe}"), 72);
    let expected = Frame { pad_bytes: 52, data_bytes: 512, data_digest: true };
    holds(CapsuleCmd::new(&TO_CONTROLLER, command, 512), bytes, &TO_CONTROLLER, expected);
    let completion = Completion::new(0x0102, StatusCode::LBA_OUT_OF_RANGE.status(), 5).with_sqhd(7);
    let bytes = hex("05 01 18 00 1c 00 00 00  05 00 00 00 00 00 00 00  07 00 00 00 02 01 00 81", 24);
    holds(CapsuleResp::new(&TO_HOST, completion), bytes, &TO_HOST, Frame::default());
}

#[test]
fn data_and_r2t() {
    // 24 bytes of header, 4 of digest, 36 of padding to 64; 4096 of data and 4 of digest.
    let bytes = hex("06 07 18 40 44 10 00 00  02 01 04 03 00 20 00 00 00 10 00 00 *", 24);
    let expected = Frame { pad_bytes: 36, data_bytes: 4096, data_digest: true };
    let pdu = TransferPdu::h2c_data(&TO_CONTROLLER, true, 0x0102, 0x0304, 0x2000, 0x1000);
    assert_eq!(pdu.check(PduType::H2CData, &expected), Ok(()));
    holds(pdu, bytes, &TO_CONTROLLER, expected);
    // 24 bytes of header, 4 of digest, 4 of padding to 32.
    let bytes = hex("07 0f 18 20 24 10 00 00  02 01 00 00 00 20 00 00 00 10 00 00 *", 24);
    let expected = Frame { pad_bytes: 4, data_bytes: 4096, data_digest: true };
    let pdu = TransferPdu::c2h_data(&TO_HOST, flags::LAST | flags::SUCCESS, 0x0102, 0x2000, 0x1000);
    assert_eq!(pdu.check(PduType::C2HData, &expected), Ok(()));
    holds(pdu, bytes, &TO_HOST, expected);
    let bytes = hex("09 01 18 00 1c 00 00 00  02 01 04 03 00 20 00 00 00 10 00 00 *", 24);
    let pdu = TransferPdu::r2t(&TO_HOST, 0x0102, 0x0304, 0x2000, 0x1000);
    assert_eq!(pdu.check(PduType::R2T, &Frame::default()), Ok(()));
    holds(pdu, bytes, &TO_HOST, Frame::default());
}

#[test]
fn the_specifications_examples_of_padding() {
    // Clause 3.3: CPDA 0Fh pads H2CData by 40 bytes, HPDA 03h pads C2HData by 8, both without header digest.
    let offset = |direction, code, kind| {
        PduRules { alignment_bytes: alignment_bytes(code), ..PduRules::initial(direction) }.data_offset(kind) - 24
    };
    assert_eq!(offset(Direction::ToController, 0x0F, PduType::H2CData), 40);
    assert_eq!(offset(Direction::ToHost, 0x03, PduType::C2HData), 8);
    assert_eq!((alignment_bytes(0), alignment_bytes(31), alignment_bytes(255)), (4, 128, 128));
}

#[test]
fn all_opcodes_that_are_not_in_the_table_are_refused() {
    for opcode in 0..=u8::MAX {
        let known = PduType::from_opcode(opcode);
        assert_eq!(known.is_some(), matches!(opcode, 0..=7 | 9));
        assert!(known.is_none_or(|kind| kind as u8 == opcode));
        let header = CommonHeader { pdu_type: opcode, hlen: 24, ..CommonHeader::default() };
        if known.is_none() {
            let violation = begin(&header, &TO_HOST).unwrap_err();
            assert_eq!((violation.fes, violation.fei), (FatalErrorStatus::InvalidHeaderField, 0));
        }
    }
}
