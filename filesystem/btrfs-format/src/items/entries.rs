//! Lists of entries that follow each other without gaps until the item ends: names with the same hash, links of one
//! inode in one directory, references of files.
//!
//! Decoding checks the whole list once, so iterating over it afterwards finds every entry complete.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use crate::error::{DecodeError, TooLong};

/// An entry of a list: a fixed part, followed by parts whose lengths it contains.
pub trait Entry<'a>: Sized {
    /// Its name in error messages.
    const WHAT: &'static str;

    /// Splits the entry off the start of `bytes`, which begin at byte `at` of the item; returns it and what follows.
    ///
    /// # Errors
    /// If the entry continues past the end.
    fn split(bytes: &'a [u8], at: usize) -> Result<(Self, &'a [u8]), DecodeError>;

    /// Appends its bytes.
    ///
    /// # Errors
    /// If a part is too long for its length field.
    fn write(&self, out: &mut Vec<u8>) -> Result<(), TooLong>;
}

/// All entries of an item; at least one.
pub struct Entries<'a, E> {
    bytes: &'a [u8],
    kind: PhantomData<fn() -> E>,
}

impl<'a, E: Entry<'a>> Entries<'a, E> {
    /// Reads a list that fills `bytes`.
    ///
    /// # Errors
    /// If there is no entry, or the last one is cut off.
    pub fn decode(bytes: &'a [u8]) -> Result<Entries<'a, E>, DecodeError> {
        Entries::decode_at(bytes, 0)
    }

    /// Reads a list that fills `bytes`, which begin at byte `at` of the item.
    ///
    /// # Errors
    /// If there is no entry, or the last one is cut off.
    pub fn decode_at(bytes: &'a [u8], at: usize) -> Result<Entries<'a, E>, DecodeError> {
        let mut rest = bytes;
        loop {
            rest = E::split(rest, at + (bytes.len() - rest.len()))?.1;
            if rest.is_empty() {
                return Ok(Entries { bytes, kind: PhantomData });
            }
        }
    }

    /// The entries, in the order in which they are stored.
    pub fn iter(&self) -> impl Iterator<Item = E> + use<'a, E> {
        let mut rest = self.bytes;
        std::iter::from_fn(move || {
            let (entry, behind) = E::split(rest, 0).ok()?;
            rest = behind;
            Some(entry)
        })
    }

    /// The first entry that is the wanted one, and its bytes in the list.
    pub fn find(&self, mut is_wanted: impl FnMut(&E) -> bool) -> Option<(Range<usize>, E)> {
        let mut rest = self.bytes;
        while let Ok((entry, behind)) = E::split(rest, 0) {
            let start = self.bytes.len() - rest.len();
            if is_wanted(&entry) {
                return Some((start..self.bytes.len() - behind.len(), entry));
            }
            rest = behind;
        }
        None
    }

    /// Removes the first entry that is the wanted one: it, and the list without it, which may be empty. An item that
    /// has an empty list is deleted.
    pub fn without(&self, is_wanted: impl FnMut(&E) -> bool) -> Option<(E, Vec<u8>)> {
        let (range, entry) = self.find(is_wanted)?;
        Some((entry, [&self.bytes[..range.start], &self.bytes[range.end..]].concat()))
    }

    /// Appends the bytes of all entries.
    ///
    /// # Errors
    /// If a part of an entry is too long for its length field.
    pub fn write(&self, out: &mut Vec<u8>) -> Result<(), TooLong> {
        self.iter().try_for_each(|entry| entry.write(out))
    }
}

impl<E> Clone for Entries<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for Entries<'_, E> {}

impl<E> PartialEq for Entries<'_, E> {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl<'a, E: Entry<'a> + fmt::Debug> fmt::Debug for Entries<'a, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Appends an entry to the bytes of a list, which may be empty, as Linux does. The list may have at most `most` bytes
/// then: an item is never larger than a leaf.
///
/// # Errors
/// If the list would be longer, or a part of the entry is too long for its length field. The list is then unchanged.
pub fn push_entry<'e, E: Entry<'e>>(list: &mut Vec<u8>, entry: &E, most: usize) -> Result<(), TooLong> {
    let before = list.len();
    let mut result = entry.write(list);
    let length = list.len();
    if result.is_ok() && length > most {
        result = Err(TooLong { what: E::WHAT, length, most });
    }
    if result.is_err() {
        list.truncate(before);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::take;

    /// A length, and as many bytes.
    #[derive(Debug, PartialEq)]
    struct Text<'a>(&'a [u8]);

    impl<'a> Entry<'a> for Text<'a> {
        const WHAT: &'static str = "text";

        fn split(bytes: &'a [u8], at: usize) -> Result<(Self, &'a [u8]), DecodeError> {
            let (length, rest) = take(Self::WHAT, bytes, at, 1)?;
            let (text, rest) = take(Self::WHAT, rest, at + 1, usize::from(length[0]))?;
            Ok((Text(text), rest))
        }

        fn write(&self, out: &mut Vec<u8>) -> Result<(), TooLong> {
            out.push(self.0.len() as u8);
            out.extend_from_slice(self.0);
            Ok(())
        }
    }

    #[test]
    fn complete_lists_decode_and_truncated_ones_are_refused_at_the_cut() {
        let bytes = b"\x03one\x00\x05three";
        let list = Entries::<Text>::decode(bytes).unwrap();
        assert_eq!(list.iter().collect::<Vec<_>>(), [Text(b"one"), Text(b""), Text(b"three")]);
        let mut out = Vec::new();
        list.write(&mut out).unwrap();
        assert_eq!(out, bytes);
        for length in 0..bytes.len() {
            let is_whole = matches!(length, 4 | 5);
            assert_eq!(Entries::<Text>::decode(&bytes[..length]).is_ok(), is_whole, "{length}");
        }
        let found = list.find(|text| text.0 == b"").unwrap();
        assert_eq!((found, list.find(|text| text.0 == b"on").is_none()), ((4..5, Text(b"")), true));
        let error = Entries::<Text>::decode(&bytes[..8]).unwrap_err();
        assert_eq!(error, DecodeError::Short { what: "text", at: 6, needed: 5, left: 2 });
    }

    #[test]
    fn entries_are_pushed_and_removed_like_those_of_a_list_of_values() {
        let mut random = fastrand::Rng::with_seed(1);
        let (mut bytes, mut model, most) = (Vec::new(), Vec::<Vec<u8>>::new(), 100);
        for _ in 0..5000 {
            let text = vec![random.u8(b'a'..b'e'); random.usize(..30)];
            if random.bool() {
                let pushed = push_entry(&mut bytes, &Text(&text), most);
                let length = bytes.len() + text.len() + 1;
                if pushed.is_ok() {
                    model.push(text);
                } else {
                    assert_eq!(pushed, Err(TooLong { what: "text", length, most }));
                }
            } else if !bytes.is_empty() {
                let list = Entries::<Text>::decode(&bytes).unwrap();
                let removed = list.without(|one| one.0.first() == text.first());
                let index = model.iter().position(|one| one.first() == text.first());
                let expected = index.map(|index| model.remove(index));
                assert_eq!(removed.as_ref().map(|(one, _)| one.0), expected.as_deref());
                if let Some((_, rest)) = removed {
                    bytes = rest;
                }
            }
            let mut wanted = Vec::new();
            model.iter().for_each(|text| Text(text).write(&mut wanted).unwrap());
            assert_eq!(bytes, wanted);
        }
    }
}
