//! NVMe Qualified Names: who a host and a subsystem are (Base, "NVMe Qualified Names").
//!
//! A name is UTF-8 without NUL, at most 223 bytes, and has one of two forms: `nqn.yyyy-mm.reversed.domain:text`, or
//! `nqn.2014-08.org.nvmexpress:uuid:` and a UUID. On the wire it fills 256 bytes, padded with NUL.

use std::fmt;
use std::str::FromStr;

use crate::wire::Field;

/// The longest name in bytes, without the NUL behind it.
pub const MAX_BYTES: usize = 223;
/// Bytes that a name fills on the wire.
pub const FIELD_BYTES: usize = 256;
/// The name of the discovery subsystem that every host knows.
pub const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";
/// What the names made of a UUID start with.
pub const UUID_PREFIX: &str = "nqn.2014-08.org.nvmexpress:uuid:";

/// A valid NVMe Qualified Name.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Nqn(Box<str>);

/// Why a text is no NVMe Qualified Name.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NqnError {
    /// There is nothing.
    #[error("the name is empty")]
    Empty,
    /// There is too much.
    #[error("the name has {bytes} bytes; {MAX_BYTES} are the most")]
    TooLong {
        /// Bytes of it.
        bytes: usize,
    },
    /// The 256 bytes have no NUL behind the name.
    #[error("no NUL ends the name")]
    Unterminated,
    /// It is not text.
    #[error("the name is not UTF-8")]
    NotUtf8,
    /// It has a control character.
    #[error("the name has a control character")]
    Control,
    /// It has neither form.
    #[error("the name does not have the form nqn.yyyy-mm.reversed.domain:text")]
    Form,
    /// It claims to be made of a UUID and is not.
    #[error("what stands behind {UUID_PREFIX} is not a UUID")]
    Uuid,
}

impl Nqn {
    /// The discovery subsystem.
    pub fn discovery() -> Nqn {
        Nqn(DISCOVERY.into())
    }

    /// The name made of a UUID.
    pub fn from_uuid(uuid: [u8; 16]) -> Nqn {
        let hex = format!("{:032x}", u128::from_be_bytes(uuid));
        let [a, b, c, d, e] = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &hex[part]);
        Nqn(format!("{UUID_PREFIX}{a}-{b}-{c}-{d}-{e}").into())
    }

    /// The name in a field of the wire: up to the first NUL, which must be there. Bytes behind it are not looked at.
    pub fn from_field(field: &[u8; FIELD_BYTES]) -> Result<Nqn, NqnError> {
        let end = field.iter().position(|&byte| byte == 0).ok_or(NqnError::Unterminated)?;
        std::str::from_utf8(&field[..end]).map_err(|_| NqnError::NotUtf8)?.parse()
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether this is the discovery subsystem that every host knows.
    pub fn is_discovery(&self) -> bool {
        &*self.0 == DISCOVERY
    }
}

impl FromStr for Nqn {
    type Err = NqnError;

    fn from_str(text: &str) -> Result<Nqn, NqnError> {
        if text.is_empty() {
            return Err(NqnError::Empty);
        }
        if text.len() > MAX_BYTES {
            return Err(NqnError::TooLong { bytes: text.len() });
        }
        if text.chars().any(char::is_control) {
            return Err(NqnError::Control);
        }
        if let Some(uuid) = text.strip_prefix(UUID_PREFIX) {
            return if is_uuid(uuid) { Ok(Nqn(text.into())) } else { Err(NqnError::Uuid) };
        }
        if text == DISCOVERY || has_date_form(text) { Ok(Nqn(text.into())) } else { Err(NqnError::Form) }
    }
}

/// Whether the text is `nqn.yyyy-mm.domain:text`, with something for the domain and for the text.
fn has_date_form(text: &str) -> bool {
    let Some(rest) = text.strip_prefix("nqn.") else { return false };
    let Some((date, rest)) = rest.split_once('.') else { return false };
    let digits = |s: &str, n: usize| s.len() == n && s.bytes().all(|byte| byte.is_ascii_digit());
    let dated = date
        .split_once('-')
        .is_some_and(|(year, month)| digits(year, 4) && digits(month, 2) && ("01"..="12").contains(&month));
    let named = rest.split_once(':').is_some_and(|(domain, text)| !domain.is_empty() && !text.is_empty());
    dated && named
}

/// Whether the text is a UUID in its form of 36 characters.
fn is_uuid(text: &str) -> bool {
    text.len() == 36
        && text.bytes().enumerate().all(|(i, byte)| match i {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
}

impl fmt::Display for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Text in a fixed field padded with NUL, as received: unchecked until it is read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PaddedText<const N: usize>([u8; N]);

impl<const N: usize> PaddedText<N> {
    /// The text, cut to at most `N - 1` bytes at a character's end, with NUL behind it.
    pub fn new(text: &str) -> PaddedText<N> {
        let mut bytes = [0; N];
        let end = text.floor_char_boundary(N.saturating_sub(1));
        bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
        PaddedText(bytes)
    }

    /// The text before the first NUL, or before the spaces that some targets pad with. What is not UTF-8 is replaced.
    pub fn text(&self) -> String {
        let end = self.0.iter().position(|&byte| byte == 0).unwrap_or(N);
        String::from_utf8_lossy(&self.0[..end]).trim_end_matches(' ').to_owned()
    }

    /// The bytes of the field.
    pub const fn bytes(&self) -> &[u8; N] {
        &self.0
    }
}

impl<const N: usize> fmt::Debug for PaddedText<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.text(), f)
    }
}

impl<const N: usize> Field for PaddedText<N> {
    const BYTES: usize = N;
    const ZERO: Self = PaddedText([0; N]);
    fn put(&self, to: &mut [u8]) {
        to.copy_from_slice(&self.0);
    }
    fn get(from: &[u8]) -> Self {
        PaddedText(<[u8; N]>::get(from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6";

    #[test]
    fn both_forms_and_the_discovery_name_are_names() {
        for text in [UUID, DISCOVERY, "nqn.2026-11.org.sealblock:default", "nqn.2014-08.com.example:nvme.host.sys.xyz"]
        {
            let nqn: Nqn = text.parse().unwrap();
            assert_eq!((nqn.as_str(), Nqn::from_field(PaddedText::new(nqn.as_str()).bytes())), (text, Ok(nqn.clone())));
        }
    }

    #[test]
    fn what_is_no_name_says_why() {
        let long = format!("nqn.2014-08.com.example:{}", "x".repeat(MAX_BYTES - 23));
        for (text, error) in [
            ("", NqnError::Empty),
            (&long, NqnError::TooLong { bytes: MAX_BYTES + 1 }),
            ("nqn.2014-08.com.example:a\nb", NqnError::Control),
            ("iqn.2014-08.com.example:a", NqnError::Form),
            ("nqn.2014-13.com.example:a", NqnError::Form),
            ("nqn.14-08.com.example:a", NqnError::Form),
            ("nqn.2014-08.com.example", NqnError::Form),
            ("nqn.2014-08.:a", NqnError::Form),
            (&UUID[..UUID.len() - 1], NqnError::Uuid),
            (&format!("{UUID_PREFIX}g81d4fae-7dec-11d0-a765-00a0c91e6bf6"), NqnError::Uuid),
        ] {
            assert_eq!(text.parse::<Nqn>(), Err(error), "{text}");
        }
        assert!(long[..MAX_BYTES].parse::<Nqn>().is_ok());
    }

    #[test]
    fn a_field_must_be_ended_and_be_text() {
        assert_eq!(Nqn::from_field(&[b'a'; 256]), Err(NqnError::Unterminated));
        let mut field = *PaddedText::new(DISCOVERY).bytes();
        field[5] = 0xFF;
        assert_eq!(Nqn::from_field(&field), Err(NqnError::NotUtf8));
        assert_eq!(Nqn::from_field(&[0; 256]), Err(NqnError::Empty));
    }

    #[test]
    fn a_uuid_makes_a_name() {
        let uuid: [u8; 16] =
            [0xF8, 0x1D, 0x4F, 0xAE, 0x7D, 0xEC, 0x11, 0xD0, 0xA7, 0x65, 0, 0xA0, 0xC9, 0x1E, 0x6B, 0xF6];
        assert_eq!(Nqn::from_uuid(uuid).as_str(), UUID);
    }

    #[test]
    fn padded_text_is_cut_between_characters() {
        assert_eq!(PaddedText::<4>::new("abcé").text(), "abc");
        assert_eq!(PaddedText::<5>::new("abcé").text(), "abc");
        assert_eq!(PaddedText::<4>::get(b"4420").text(), "4420");
        assert_eq!(PaddedText::<6>::get(b"44 \0\0x").text(), "44");
    }

    proptest::proptest! {
        #[test]
        fn any_field_is_a_name_or_refused(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 256)) {
            let field: [u8; 256] = bytes.try_into().unwrap();
            if let Ok(nqn) = Nqn::from_field(&field) {
                assert!(nqn.as_str().len() <= MAX_BYTES);
            }
        }
    }
}
