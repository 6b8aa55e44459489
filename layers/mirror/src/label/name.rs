//! The name of a mirror, which its administrator chose: `mirror:NAME` stands for the list of its replicas.
//!
//! It is read from devices of any origin, printed, and typed as a part of target names. So its alphabet is small:
//! letters, digits, `-`, `_` and `.`, of which the first is a letter or digit. None of them has a special meaning in a
//! terminal, a shell or a path.

use std::fmt;
use std::str::FromStr;

/// Most bytes of a name.
pub const MAX_NAME_BYTES: usize = 24;

/// A name, zeroes behind it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MirrorName([u8; MAX_NAME_BYTES]);

/// Text is no name of a mirror.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "a name has 1 to {MAX_NAME_BYTES} letters, digits, hyphens, underscores and dots, and begins with a letter or digit"
)]
pub struct NameError;

impl MirrorName {
    /// Decodes a name from a label; `None` if there is none.
    ///
    /// # Errors
    /// When the bytes are no name.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Option<MirrorName>, NameError> {
        let length = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        let (text, rest) = bytes.split_at(length);
        match (text, rest.iter().all(|byte| *byte == 0)) {
            ([], true) => Ok(None),
            (_, true) => std::str::from_utf8(text).map_err(|_| NameError)?.parse().map(Some),
            (_, false) => Err(NameError),
        }
    }

    /// Its bytes in a label.
    pub(crate) fn bytes(&self) -> &[u8; MAX_NAME_BYTES] {
        &self.0
    }

    /// Its text.
    pub fn as_str(&self) -> &str {
        let length = self.0.iter().position(|byte| *byte == 0).unwrap_or(MAX_NAME_BYTES);
        std::str::from_utf8(&self.0[..length]).expect("a name is made of ASCII only")
    }
}

impl FromStr for MirrorName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<MirrorName, NameError> {
        let is_known = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
        let is_name =
            text.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric) && text.as_bytes().iter().all(is_known);
        let mut bytes = [0; MAX_NAME_BYTES];
        let room = bytes.get_mut(..text.len()).filter(|_| is_name).ok_or(NameError)?;
        room.copy_from_slice(text.as_bytes());
        Ok(MirrorName(bytes))
    }
}

impl fmt::Display for MirrorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for MirrorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back_and_what_a_terminal_or_path_would_take_for_more_is_none() {
        for text in ["a", "photos", "9", "A-b_c.d", "123456789012345678901234"] {
            let name: MirrorName = text.parse().unwrap();
            assert_eq!((name.as_str(), name.to_string().as_str()), (text, text));
            assert_eq!(MirrorName::from_bytes(name.bytes()), Ok(Some(name)));
        }
        for text in [
            "",
            ".",
            "..",
            "-a",
            "_a",
            "a/b",
            "a b",
            "a,b",
            "a:b",
            "[a]",
            "a\u{1b}[2J",
            "ä",
            "a\n",
            "1234567890123456789012345",
        ] {
            assert_eq!(text.parse::<MirrorName>(), Err(NameError), "{text:?}");
        }
        assert_eq!(MirrorName::from_bytes(&[0; MAX_NAME_BYTES]), Ok(None));
        let mut bytes = [0; MAX_NAME_BYTES];
        for bad in [b"a\0b".as_slice(), b"\0a", b"a\x1b", b"\xff"] {
            bytes[..bad.len()].copy_from_slice(bad);
            assert_eq!(MirrorName::from_bytes(&bytes), Err(NameError), "{bad:?}");
            bytes.fill(0);
        }
    }
}
