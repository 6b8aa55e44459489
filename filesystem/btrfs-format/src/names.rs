//! Hashes of names: the sort keys of directory entries, extended attributes and long back references.
//!
//! The hash of a name is the offset of its item's key. Names with the same hash share an item, so a look-up also
//! compares the names. The hash protects against nothing: names with the same hash are easy to make.

use crate::checksum::raw_crc32c;

/// The longest name of a file, a subvolume or an extended attribute, in bytes.
pub const MAX_NAME_BYTES: usize = 255;

/// The initial value of a name's CRC.
const NAME_SEED: u32 = 0xffff_fffe;

/// The hash of a name in a directory, or of an extended attribute.
pub fn name_hash(name: &[u8]) -> u64 {
    u64::from(raw_crc32c(NAME_SEED, name))
}

/// The hash of a name in the directory `parent`, by which long back references are sorted. Only the low half of the
/// directory's number has an effect.
pub fn extref_hash(parent: u64, name: &[u8]) -> u64 {
    u64::from(raw_crc32c(parent as u32, name))
}

/// Why a name is not valid for a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NameError {
    /// No bytes, or more than [`MAX_NAME_BYTES`].
    #[error("a name of {0} bytes: it has from 1 to 255")]
    Length(usize),
    /// A slash or a zero byte, which no path can contain.
    #[error("a name with the byte {0:#04x}")]
    Byte(u8),
    /// One dot or two, which stand for directories.
    #[error("a name of dots alone")]
    Dots,
}

/// Checks a name of a file. Stored names may be invalid. They cannot be opened, and must not be given to code that
/// builds paths.
///
/// # Errors
/// If it is not valid.
pub fn check_file_name(name: &[u8]) -> Result<(), NameError> {
    if !(1..=MAX_NAME_BYTES).contains(&name.len()) {
        return Err(NameError::Length(name.len()));
    }
    if let Some(byte) = name.iter().find(|byte| matches!(byte, 0 | b'/')) {
        return Err(NameError::Byte(*byte));
    }
    if matches!(name, b"." | b"..") { Err(NameError::Dots) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn hashes_of_known_names() {
        // The first is the key of the entry that every filesystem has for its default subvolume; Linux stored the
        // others.
        for (name, hash) in [
            (&b"default"[..], 2_378_154_706_u64),
            (b"linked", 240_998_133),
            (b"copy-130", 3_243_183),
            (b"user.small", 95_888_091),
            (b"", 0xffff_fffe),
        ] {
            assert_eq!(name_hash(name), hash, "{}", name.escape_ascii());
        }
    }

    #[test]
    fn a_hash_of_a_back_reference_depends_on_the_low_half_of_the_parent() {
        assert_eq!(extref_hash(256, b"a"), extref_hash(256 | 1 << 32, b"a"));
        assert_ne!(extref_hash(256, b"a"), extref_hash(257, b"a"));
        assert_eq!(extref_hash(0xffff_fffe, b"a"), name_hash(b"a"));
        // The value that Linux stored.
        assert_eq!(extref_hash(256, format!("{:0>200}", 81).as_bytes()), 5_315_563);
    }

    #[test]
    fn invalid_names_are_refused_with_the_reason() {
        for good in [&b"a"[..], b"...", b".a", &[b'n'; 255], b"\xff\n"] {
            assert_eq!(check_file_name(good), Ok(()));
        }
        for (bad, error) in [
            (&b""[..], NameError::Length(0)),
            (&[b'n'; 256], NameError::Length(256)),
            (b"a/b", NameError::Byte(b'/')),
            (b"a\0", NameError::Byte(0)),
            (b".", NameError::Dots),
            (b"..", NameError::Dots),
        ] {
            assert_eq!(check_file_name(bad), Err(error));
        }
    }

    #[test]
    fn different_names_can_have_one_hash() {
        // Among half a million names, about thirty pairs are expected.
        let mut seen = HashMap::new();
        let name = |number: u64| format!("{:016x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let pair = (1..500_000_u64).find_map(|number| {
            let earlier = seen.insert(name_hash(name(number).as_bytes()), number)?;
            Some((name(earlier), name(number)))
        });
        let (first, second) = pair.unwrap();
        assert_ne!(first, second);
        assert_eq!(name_hash(first.as_bytes()), name_hash(second.as_bytes()));
    }
}
