//! Big-endian fields from and to bytes.

/// What is left of some bytes. Every read beyond the end gives `None` and takes nothing.
pub(crate) struct FieldReader<'a>(pub(crate) &'a [u8]);

impl<'a> FieldReader<'a> {
    pub(crate) fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (now, later) = self.0.split_at_checked(len)?;
        self.0 = later;
        Some(now)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string with its length in 32 bits before it.
    pub(crate) fn string(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.bytes(usize::try_from(len).ok()?)
    }

    /// `Some` when nothing is left.
    pub(crate) fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_big_endian_and_end_where_the_bytes_do() {
        let mut fields = FieldReader(&[0, 1, 0, 0, 0, 2, b'a', b'b', 9]);
        assert_eq!(fields.u16(), Some(1));
        assert_eq!(fields.string(), Some(&b"ab"[..]));
        assert_eq!((fields.u16(), fields.end()), (None, None), "one byte is left, and stays");
        assert_eq!(fields.bytes(1), Some(&[9][..]));
        assert_eq!(fields.end(), Some(()));
        assert_eq!(FieldReader(&[255; 4]).string(), None);
        assert_eq!(FieldReader(&[0, 0, 0, 0, 0, 0, 1, 0]).u64(), Some(256));
    }
}
