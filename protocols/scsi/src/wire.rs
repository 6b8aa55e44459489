//! Big-endian fields at byte offsets, as the tables of the standards have them.

/// Fewer bytes than the structure has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[error("{structure} needs {needed} bytes and got {got}")]
pub struct TooShort {
    /// What was to be read.
    pub structure: &'static str,
    /// Bytes of it.
    pub needed: usize,
    /// Bytes there were.
    pub got: usize,
}

/// The first `N` bytes.
pub(crate) fn head<'a, const N: usize>(structure: &'static str, bytes: &'a [u8]) -> Result<&'a [u8; N], TooShort> {
    bytes.first_chunk().ok_or(TooShort { structure, needed: N, got: bytes.len() })
}

macro_rules! big_endian {
    ($($get:ident, $put:ident, $ty:ty;)*) => {$(
        /// The number at an offset of a structure whose length was checked.
        pub(crate) fn $get(bytes: &[u8], at: usize) -> $ty {
            let field = bytes[at..].first_chunk().expect("the structure is as long as its table");
            <$ty>::from_be_bytes(*field)
        }

        /// Writes the number at an offset.
        pub(crate) fn $put(bytes: &mut [u8], at: usize, value: $ty) {
            bytes[at..at + size_of::<$ty>()].copy_from_slice(&value.to_be_bytes());
        }
    )*};
}
big_endian! {
    u16_at, put_u16, u16;
    u32_at, put_u32, u32;
    u64_at, put_u64, u64;
}

/// True if the bit is set.
pub(crate) const fn bit(byte: u8, number: u8) -> bool {
    byte >> number & 1 == 1
}

/// A bit at its place.
pub(crate) const fn flag(is_set: bool, number: u8) -> u8 {
    (is_set as u8) << number
}
