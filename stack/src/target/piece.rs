//! Parts of a text that know where they begin, so that an error names its column; and the escapes of URIs in them.

use super::error::{TargetError, TargetErrorKind};

/// A part of the text, and the byte where it begins.
#[derive(Clone, Copy)]
pub(super) struct Piece<'a> {
    pub text: &'a str,
    pub at: usize,
}

/// A problem and the byte where it is.
#[derive(Debug)]
pub(super) struct Fail {
    pub at: usize,
    pub problem: TargetErrorKind,
}

impl<'a> Piece<'a> {
    /// What is behind `prefix`, if the piece begins with it.
    pub fn strip(self, prefix: &str) -> Option<Piece<'a>> {
        let text = self.text.strip_prefix(prefix)?;
        Some(Piece { text, at: self.at + prefix.len() })
    }

    /// The parts before and behind the first `mark`.
    pub fn split_once(self, mark: char) -> Option<(Piece<'a>, Piece<'a>)> {
        let (before, behind) = self.text.split_once(mark)?;
        let at = self.at + before.len() + mark.len_utf8();
        Some((Piece { text: before, at: self.at }, Piece { text: behind, at }))
    }

    /// The parts between marks; the whole if there is none.
    pub fn split(self, mark: char) -> impl Iterator<Item = Piece<'a>> {
        let mut at = self.at;
        self.text.split(mark).map(move |text| {
            let part = Piece { text, at };
            at += text.len() + mark.len_utf8();
            part
        })
    }

    /// The problem, at the beginning of this piece.
    pub fn fail<T>(self, problem: impl Into<TargetErrorKind>) -> Result<T, Fail> {
        Err(Fail { at: self.at, problem: problem.into() })
    }

    /// The problem, this many bytes behind the beginning of this piece.
    pub fn fail_at<T>(self, offset: usize, problem: TargetErrorKind) -> Result<T, Fail> {
        Err(Fail { at: self.at + offset, problem })
    }
}

/// The error with the place of its problem in characters.
pub(super) fn located(text: &str, Fail { at, problem }: Fail) -> TargetError {
    let column = 1 + text.char_indices().take_while(|(byte, _)| *byte < at).count();
    TargetError { column, problem }
}

/// The text if it is made of digits; Rust's own numbers also take a sign.
pub(super) fn digits(text: &str) -> Option<&str> {
    (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())).then_some(text)
}

/// The text with `%` and two digits as the byte they stand for.
pub(super) fn decode(piece: Piece<'_>) -> Result<String, Fail> {
    let mut bytes = Vec::with_capacity(piece.text.len());
    let mut rest = piece.text.as_bytes();
    while let [first, behind @ ..] = rest {
        rest = behind;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let [high, low, behind @ ..] = rest else { return percent(piece, rest.len() + 1) };
        let (Some(high), Some(low)) = (hex(*high), hex(*low)) else { return percent(piece, rest.len() + 1) };
        bytes.push(high << 4 | low);
        rest = behind;
    }
    String::from_utf8(bytes).or_else(|_| percent(piece, piece.text.len()))
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok())
}

/// A bad escape, this many bytes before the end of the piece.
fn percent<T>(piece: Piece<'_>, before_end_bytes: usize) -> Result<T, Fail> {
    Err(Fail { at: piece.at + piece.text.len().saturating_sub(before_end_bytes), problem: TargetErrorKind::Percent })
}

/// The text with everything escaped but letters, digits, `-`, `.`, `_`, `~` and what `keep` names.
pub fn encode(text: &str, keep: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || keep.as_bytes().contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}
