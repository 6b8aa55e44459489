//! Errors and varints of labels and bitmap pages. Drawn in `docs/formats/mirror-label.md`.

pub(crate) use sealblock_units::little_endian::{get, put};

/// Version of the label format.
pub(crate) const VERSION: u64 = 2;

/// Why bytes are no valid label.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LabelError {
    /// They are the label of something else, which begins like this.
    #[error("it has the label of another kind of group")]
    Other([u8; 8]),
    /// They are cut off or damaged.
    #[error("the mirror's label is damaged")]
    Damaged,
    /// Another version of the format.
    #[error("the mirror's label has version {0}; this program knows version {VERSION}")]
    Version(u64),
    /// A field has an invalid value.
    #[error("invalid {0} in the mirror's label")]
    Field(&'static str),
}

/// Appends a varint: seven bits a byte, lowest first.
pub(crate) fn put_varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

/// Reader of the variable part of a label.
pub(crate) struct LabelReader<'a>(pub &'a [u8]);

impl<'a> LabelReader<'a> {
    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], LabelError> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(LabelError::Damaged)?;
        self.0 = rest;
        Ok(taken)
    }

    /// A varint of at most 56 bits, in its shortest form.
    pub fn varint(&mut self, what: &'static str) -> Result<u64, LabelError> {
        let (mut value, mut shift) = (0, 0);
        loop {
            let byte = self.bytes(1)?[0];
            value |= u64::from(byte & 0x7F) << shift;
            shift += 7;
            match byte {
                0 if shift > 7 => return Err(LabelError::Field(what)),
                0..0x80 => return Ok(value),
                _ if shift >= 56 => return Err(LabelError::Field(what)),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn varints_have_one_form_and_an_end() {
        for value in [0, 1, 0x7F, 0x80, 0x3FFF, 0x4000, (1 << 56) - 1] {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, value);
            bytes.push(9);
            let mut reader = LabelReader(&bytes);
            assert_eq!((reader.varint("number"), reader.0), (Ok(value), &[9][..]), "{value:#x}");
        }
        let read = |bytes: &[u8]| LabelReader(bytes).varint("number");
        assert_eq!(read(&[0x81, 0]), Err(LabelError::Field("number")), "longer than it need be");
        assert_eq!(read(&[0xFF; 9]), Err(LabelError::Field("number")), "more than 56 bits");
        assert_eq!((read(&[0x80]), read(&[])), (Err(LabelError::Damaged), Err(LabelError::Damaged)));
    }
}
