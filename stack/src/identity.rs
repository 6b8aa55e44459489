//! Identities: random ones, and ones made from names, which are the same at every start and differ with the name.

use std::fs::File;
use std::io::Read;

use sealblock_media_file::FileInfo;
use sealblock_media_nvme_tcp::ConnectionInfo;
use sha2::{Digest, Sha256};

use crate::error::StackError;
use crate::kernel::below::nodes_under;

/// Start and factor of the 128-bit FNV-1a hash (RFC 9923). Names are no secrets and a collision is no attack.
const FNV_BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
const FNV_PRIME: u128 = (1 << 88) + 0x13b;

/// A UUID of version 8, whose content RFC 9562 leaves to its maker.
pub fn uuid_of(parts: &[&str]) -> [u8; 16] {
    let mut hash = FNV_BASIS;
    for byte in parts.iter().flat_map(|part| part.bytes().chain([0])) {
        hash = (hash ^ u128::from(byte)).wrapping_mul(FNV_PRIME);
    }
    let mut uuid = hash.to_be_bytes();
    uuid[6] = uuid[6] & 0x0f | 0x80;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}

/// The identity of this machine as a host, from its machine-id(5), which this does not show: a hash with a name, as that page asks for.
/// `None` if there is none, as before the first boot of an image.
pub(crate) fn host_of_machine(machine_id: &str) -> Option<[u8; 16]> {
    let is_one = machine_id.len() == 32 && machine_id.bytes().all(|byte| byte.is_ascii_hexdigit());
    let hash =
        is_one.then(|| Sha256::new().chain_update(b"sealblock NVMe host").chain_update(machine_id).finalize())?;
    let mut uuid: [u8; 16] = hash.first_chunk().copied()?;
    uuid[6] = uuid[6] & 0x0f | 0x80;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    Some(uuid)
}

/// A random identity.
pub fn new_uuid() -> Result<[u8; 16], StackError> {
    let mut uuid = [0; 16];
    File::open("/dev/urandom")
        .and_then(|mut random| random.read_exact(&mut uuid))
        .map_err(|error| StackError::io("generate a UUID", &error))?;
    // Version 4, variant 1, as RFC 9562 has it for random ones.
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    Ok(uuid)
}

/// What distinguishes a namespace over NVMe/TCP from others: its identifier, if it has one, its number, and the name and serial number of
/// its subsystem. The identifier alone does not: a copy of a volume has that of the volume, and is another device.
pub fn namespace_text(remote: &ConnectionInfo) -> String {
    let ConnectionInfo { subsystem, serial, namespace, .. } = remote;
    let id = match (&remote.uuid, &remote.nguid, &remote.eui64) {
        (Some(uuid), ..) => format!("{} (", uuid_text(uuid)),
        (_, Some(nguid), _) => format!("{} (", hex(nguid)),
        (.., Some(eui64)) => format!("{} (", hex(eui64)),
        (None, None, None) => "(".to_owned(),
    };
    format!("namespace {id}number {namespace} of {subsystem}, serial number {serial:?})")
}

/// The identity of a namespace over NVMe/TCP, wherever it is served: of one that a gateway passes on, that of the namespace behind it.
pub fn namespace_identity(remote: &ConnectionInfo) -> [u8; 16] {
    remote.origin.unwrap_or_else(|| uuid_of(&[&namespace_text(remote)]))
}

/// What the kernel has to distinguish this block device from others, wherever it is connected; `None` if that is nothing.
pub fn device_id(device: &FileInfo) -> Option<String> {
    nodes_under(&device.path).ok().and_then(|nodes| nodes.into_iter().next()?.id)
}

/// Bytes in hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub use sealblock_media_volume::format::uuid_text;

/// The UUID in its form of 36 characters, or its 32 digits alone.
pub fn uuid_from(text: &str) -> Option<[u8; 16]> {
    const DASHES: [usize; 4] = [8, 13, 18, 23];
    let is_formed = match text.len() {
        36 => {
            text.bytes().enumerate().all(|(i, b)| if DASHES.contains(&i) { b == b'-' } else { b.is_ascii_hexdigit() })
        }
        32 => text.bytes().all(|b| b.is_ascii_hexdigit()),
        _ => false,
    };
    let digits = text.replace('-', "");
    is_formed.then(|| u128::from_str_radix(&digits, 16).ok().map(u128::to_be_bytes)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_stable_and_differ() {
        // Written down: another value would make every host see new devices.
        assert_eq!(uuid_text(&uuid_of(&["machine", "/v"])), "9c323d42-bc01-804a-bf48-4199606eb519");
        let all = [uuid_of(&["a", "b"]), uuid_of(&["ab", ""]), uuid_of(&["", "ab"]), uuid_of(&["a", "c"])];
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a != b));
            assert_eq!((a[6] >> 4, a[8] >> 6), (8, 2));
        }
    }

    #[test]
    fn a_machine_is_one_host_and_what_is_no_machine_id_is_none() {
        let id = "0123456789abcdef0123456789abcdef";
        let host = host_of_machine(id).unwrap();
        // Written down: another value would make each machine another host to its servers.
        assert_eq!(uuid_text(&host), "45cd5b72-df60-80dc-81ef-4078a51c79ff");
        assert_ne!(host_of_machine(&id.replace('0', "1")), Some(host));
        for none in ["", "uninitialized", &id[1..], &format!("{id}0"), &id.replace('0', "x")] {
            assert_eq!(host_of_machine(none), None, "{none}");
        }
    }

    #[test]
    fn uuids_read_back_and_nothing_else_is_one() {
        let uuid = uuid_of(&["x"]);
        assert_eq!(uuid_from(&uuid_text(&uuid)), Some(uuid));
        assert_eq!(uuid_from(&hex(&uuid).to_uppercase()), Some(uuid), "without dashes, too");
        for text in [
            "",
            "1",
            &"0".repeat(36),
            &uuid_text(&uuid).replace('8', "g"),
            &hex(&uuid).replace('8', "-"),
            &format!("{}0", uuid_text(&uuid)),
        ] {
            assert_eq!(uuid_from(text), None, "{text}");
        }
    }
}
