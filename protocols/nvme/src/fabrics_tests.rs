//! Byte vectors, twins and round trips of Fabrics commands.

use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::*;
use crate::nqn;

/// The Connect that Linux sends for the admin queue.
#[test]
fn a_connect_has_these_bytes() {
    let connect = Connect { queue: 0, entries: 32, attributes: ConnectAttributes::NONE, keep_alive_ms: 5000 };
    let command = connect.encode().with_cid(7);
    let mut expected = [0_u8; 64];
    expected[..5].copy_from_slice(&[0x7F, 0x40, 7, 0, 1]);
    expected[44] = 31;
    expected[48..50].copy_from_slice(&5000_u16.to_le_bytes());
    assert_eq!(command.as_bytes(), expected);
    assert_eq!(FabricsCommand::decode(&command), Ok(FabricsCommand::Connect(connect)));
}

#[test]
fn a_property_set_has_these_bytes() {
    let set = PropertySet { offset: 0x14, bytes: 4, value: 0x0046_0001 };
    let command = FabricsCommand::PropertySet(set).encode();
    assert_eq!(command.as_bytes()[..5], [0x7F, 0x40, 0, 0, 0]);
    assert_eq!(
        command.as_bytes()[40..],
        [0, 0, 0, 0, 0x14, 0, 0, 0, 1, 0, 0x46, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    );
    let get = FabricsCommand::PropertyGet(PropertyGet { offset: 0, bytes: 8 }).encode();
    assert_eq!((get.as_bytes()[4], get.as_bytes()[40]), (4, 1));
}

#[test]
fn what_is_wrong_with_a_command_is_said() {
    let good = Connect { queue: 1, entries: 2, attributes: ConnectAttributes::NONE, keep_alive_ms: 0 }.encode();
    assert_eq!(Connect::decode(&good).unwrap().entries, 2);
    let mut bad = good;
    bad.cdw11 = U32::ZERO;
    assert_eq!(Connect::decode(&bad), Err(InvalidParameter::SQSIZE.into()));
    bad = good;
    bad.cdw10 = U32::new(1);
    let error = Connect::decode(&bad).unwrap_err();
    assert_eq!(error, ConnectError::Format(1));
    assert_eq!(error.completion(3).status().code(), StatusCode::CONNECT_INCOMPATIBLE_FORMAT);
    let mut get = FabricsCommand::PropertyGet(PropertyGet { offset: 0, bytes: 8 }).encode();
    get.cdw10 = U32::new(2);
    assert_eq!(FabricsCommand::decode(&get), Err(Invalid::field("ATTRIB", 10, 0)));
    get.nsid = U32::new(0x77);
    assert_eq!(FabricsCommand::decode(&get), Err(Invalid::Opcode(0x7F)));
}

fn data() -> ConnectData {
    let hostnqn = Some(Nqn::from_uuid([7; 16]));
    let subnqn = "nqn.2026-11.org.sealblock:default".parse().unwrap();
    ConnectData { hostid: [9; 16], cntlid: CNTLID_DYNAMIC, subnqn, hostnqn }
}

#[test]
fn connect_data_has_its_fields_at_these_offsets() {
    let bytes = data().encode();
    assert_eq!(bytes[..18], [[9; 16].as_slice(), &[0xFF, 0xFF]].concat());
    assert!(bytes[18..256].iter().chain(&bytes[768..]).all(|&byte| byte == 0));
    assert!(bytes[256..].starts_with(b"nqn.2026-11.org.sealblock:default\0"));
    assert!(bytes[512..].starts_with(nqn::UUID_PREFIX.as_bytes()));
    assert_eq!(ConnectData::parse(&bytes), Ok(data()));
}

#[test]
fn bad_names_are_refused_with_the_offset_of_their_parameter() {
    for (at, parameter) in [(256, InvalidParameter::SUBNQN), (512, InvalidParameter::HOSTNQN)] {
        for garbage in [b'x', 0xFF] {
            let mut bytes = data().encode();
            bytes[at..at + 256].fill(garbage);
            let error = ConnectData::parse(&bytes).unwrap_err();
            assert_eq!(error, ConnectError::Parameter(parameter));
            let completion = error.completion(5);
            assert_eq!(completion.status().code(), StatusCode::CONNECT_INVALID_PARAMETERS);
            assert_eq!(completion.dword0(), 1 << 16 | at as u32);
            assert_eq!(InvalidParameter::from_dword0(completion.dword0()), parameter);
        }
    }
    let short = ConnectData::parse(&data().encode()[..1023]);
    assert_eq!(short, Err(ConnectError::DataLength { got_bytes: 1023 }));
}

#[test]
fn a_host_may_be_nameless_and_a_subsystem_may_not() {
    let mut bytes = data().encode();
    bytes[512..768].fill(0);
    let nameless = ConnectData { hostnqn: None, ..data() };
    assert_eq!(ConnectData::parse(&bytes), Ok(nameless.clone()));
    assert_eq!(nameless.encode(), bytes);
    bytes[256..512].fill(0);
    assert_eq!(ConnectData::parse(&bytes), Err(InvalidParameter::SUBNQN.into()));
}

#[test]
fn the_answer_carries_controller_and_demands() {
    let result = Connect::result(0x1234, AuthenticationRequired::TRANSACTION);
    assert_eq!(result, 0x0002_1234);
    assert_eq!(Connect::from_result(result), (0x1234, AuthenticationRequired::TRANSACTION));
    assert_eq!(Connect::result(1, AuthenticationRequired::SECURE_CHANNEL), 1 << 18 | 1);
}

proptest! {
    #[test]
    fn commands_round_trip(queue: u16, entries in 2..=65_536_u32, attributes: u8, keep_alive_ms: u32, value: u64, wide: bool) {
        let attributes = ConnectAttributes::from_bits_retain(attributes);
        let bytes = if wide { 8 } else { 4 };
        for command in [
            FabricsCommand::Connect(Connect { queue, entries, attributes, keep_alive_ms }),
            FabricsCommand::PropertyGet(PropertyGet { offset: keep_alive_ms, bytes }),
            FabricsCommand::PropertySet(PropertySet { offset: keep_alive_ms, bytes, value }),
            FabricsCommand::Disconnect,
        ] {
            prop_assert_eq!(FabricsCommand::decode(&command.encode()), Ok(command));
        }
    }

    #[test]
    fn any_connect_data_is_parsed_or_refused(data in proptest::collection::vec(any::<u8>(), 0..1100)) {
        if ConnectData::parse(&data).is_err() {
            return Ok(());
        }
        prop_assert!(data.len() >= 1024);
    }
}
