//! How large structures are drawn: fields at byte offsets, as the tables of the specifications have them.
//!
//! A data structure of 4096 bytes of which eighty fields mean something is best read in the form of its table, so
//! `layout!` takes offset, name and type of each field and makes a plain struct of native values from it, with
//! `encode` and `decode`. The compiler checks that fields ascend and do not overlap. What is reserved is written as
//! zero and ignored when read. `flags!` makes a set of named bits. Small structures that travel by the million
//! (commands, completions) are `zerocopy` structs instead.

use std::fmt;

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

/// Where a field of a structure stands; the tests compare these with the tables of the specification.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FieldAt {
    /// The specification's mnemonic, in lower case.
    pub name: &'static str,
    /// Bytes from the start of the structure.
    pub offset_bytes: usize,
    /// Bytes of the field.
    pub size_bytes: usize,
}

/// A value that has a place in a structure. `put` and `get` are called with exactly `BYTES` bytes.
pub trait Field: Sized {
    /// Bytes on the wire.
    const BYTES: usize;
    /// The value of bytes that are all zero.
    const ZERO: Self;
    /// Writes the value.
    fn put(&self, to: &mut [u8]);
    /// Reads the value; any bytes are one.
    fn get(from: &[u8]) -> Self;
}

macro_rules! integer_fields {
    ($($ty:ty),*) => {$(
        impl Field for $ty {
            const BYTES: usize = size_of::<$ty>();
            const ZERO: Self = 0;
            fn put(&self, to: &mut [u8]) {
                to.copy_from_slice(&self.to_le_bytes());
            }
            fn get(from: &[u8]) -> Self {
                <$ty>::from_le_bytes(from.try_into().expect("a field gets as many bytes as its type has"))
            }
        }
    )*};
}
integer_fields!(u8, u16, u32, u64, u128);

impl<T: Field + Copy, const N: usize> Field for [T; N] {
    const BYTES: usize = T::BYTES * N;
    const ZERO: Self = [T::ZERO; N];
    fn put(&self, to: &mut [u8]) {
        for (value, to) in self.iter().zip(to.chunks_exact_mut(T::BYTES)) {
            value.put(to);
        }
    }
    fn get(from: &[u8]) -> Self {
        std::array::from_fn(|i| T::get(&from[i * T::BYTES..(i + 1) * T::BYTES]))
    }
}

/// Text of at most `N` ASCII characters, padded with spaces on the wire (Base, "ASCII strings").
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ascii<const N: usize>([u8; N]);

impl<const N: usize> Ascii<N> {
    /// The text, cut to `N` characters; what is not printable ASCII becomes a question mark.
    pub fn new(text: &str) -> Ascii<N> {
        let mut bytes = [b' '; N];
        for (to, c) in bytes.iter_mut().zip(text.chars()) {
            *to = if c.is_ascii_graphic() || c == ' ' { c as u8 } else { b'?' };
        }
        Ascii(bytes)
    }

    /// The text without its padding; what is not printable ASCII reads as a question mark.
    pub fn text(&self) -> String {
        let end = self.0.iter().rposition(|byte| !matches!(byte, b' ' | 0)).map_or(0, |last| last + 1);
        let printable = |&byte: &u8| if byte.is_ascii_graphic() || byte == b' ' { char::from(byte) } else { '?' };
        self.0[..end].iter().map(printable).collect()
    }
}

impl<const N: usize> fmt::Debug for Ascii<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.text(), f)
    }
}

impl<const N: usize> Field for Ascii<N> {
    const BYTES: usize = N;
    const ZERO: Self = Ascii([0; N]);
    fn put(&self, to: &mut [u8]) {
        to.copy_from_slice(&self.0);
    }
    fn get(from: &[u8]) -> Self {
        Ascii(<[u8; N]>::get(from))
    }
}

/// A count of 1 to 256 that stands on the wire in one byte as one less (a 0's based value).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Count8(u8);

/// A count of 1 to 65,536 that stands on the wire in two bytes as one less (a 0's based value).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Count16(u16);

macro_rules! counts {
    ($($name:ident, $raw:ty, $wide:ty;)*) => {$(
        impl $name {
            /// This count; `None` for 0 and for what has no room.
            pub const fn new(count: $wide) -> Option<$name> {
                if count == 0 || count - 1 > <$raw>::MAX as $wide { None } else { Some($name((count - 1) as $raw)) }
            }

            /// The nearest count that can be said.
            pub const fn saturating(count: $wide) -> $name {
                match $name::new(count) {
                    Some(count) => count,
                    None if count == 0 => $name(0),
                    None => $name(<$raw>::MAX),
                }
            }

            /// The count, at least 1.
            pub const fn get(self) -> $wide {
                self.0 as $wide + 1
            }
        }

        impl Field for $name {
            const BYTES: usize = size_of::<$raw>();
            const ZERO: Self = $name(0);
            fn put(&self, to: &mut [u8]) {
                self.0.put(to);
            }
            fn get(from: &[u8]) -> Self {
                $name(<$raw>::get(from))
            }
        }
    )*};
}
counts! {
    Count8, u8, u16;
    Count16, u16, u32;
}

macro_rules! layout {
    (
        $(#[$meta:meta])*
        pub struct $name:ident[$bytes:literal] {
            $($(#[$field_meta:meta])* $offset:literal => $field:ident: $ty:ty,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub struct $name {
            $(
                #[doc = concat!("From byte ", stringify!($offset), ": ")]
                $(#[$field_meta])*
                pub $field: $ty,
            )*
        }

        impl $name {
            /// Bytes of the structure.
            pub const BYTES: usize = $bytes;

            /// Where each field stands.
            pub const FIELDS: &'static [$crate::wire::FieldAt] = &[$(
                $crate::wire::FieldAt {
                    name: stringify!($field),
                    offset_bytes: $offset,
                    size_bytes: <$ty as $crate::wire::Field>::BYTES,
                },
            )*];

            /// The bytes of the structure; what is reserved is zero.
            pub fn encode(&self) -> [u8; $bytes] {
                use $crate::wire::Field;
                let mut to = [0; $bytes];
                $(self.$field.put(&mut to[$offset..$offset + <$ty as Field>::BYTES]);)*
                to
            }

            /// The structure in the first bytes of `from`; refused only if there are too few.
            pub fn decode(from: &[u8]) -> Result<$name, $crate::wire::TooShort> {
                use $crate::wire::Field;
                let Some(from) = from.get(..$bytes) else {
                    let structure = stringify!($name);
                    return Err($crate::wire::TooShort { structure, needed: $bytes, got: from.len() });
                };
                Ok($name { $($field: <$ty as Field>::get(&from[$offset..$offset + <$ty as Field>::BYTES]),)* })
            }
        }

        impl Default for $name {
            fn default() -> $name {
                $name { $($field: <$ty as $crate::wire::Field>::ZERO,)* }
            }
        }

        impl $crate::wire::Field for $name {
            const BYTES: usize = $bytes;
            const ZERO: Self = $name { $($field: <$ty as $crate::wire::Field>::ZERO,)* };
            fn put(&self, to: &mut [u8]) {
                to.copy_from_slice(&self.encode());
            }
            fn get(from: &[u8]) -> Self {
                $name::decode(from).expect("a field gets as many bytes as its type has")
            }
        }

        const _: () = {
            let (mut field, mut end) = (0, 0);
            while field < $name::FIELDS.len() {
                assert!($name::FIELDS[field].offset_bytes >= end, "fields ascend and do not overlap");
                end = $name::FIELDS[field].offset_bytes + $name::FIELDS[field].size_bytes;
                field += 1;
            }
            assert!(end <= $bytes, "fields end within the structure");
        };
    };
}
pub(crate) use layout;

macro_rules! flags {
    (
        $(#[$($meta:tt)*])*
        pub struct $name:ident($raw:ty) {
            $($(#[$($bit_meta:tt)*])* $bit:ident = $at:literal,)*
        }
    ) => {
        bitflags::bitflags! {
            $(#[$($meta)*])*
            #[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
            pub struct $name: $raw {
                $(
                    #[doc = concat!("Bit ", stringify!($at), ": ")]
                    $(#[$($bit_meta)*])*
                    const $bit = 1 << $at;
                )*
                // Bits that have no name here stay as they are.
                const _ = !0;
            }
        }

        impl $name {
            /// No bit.
            pub const NONE: $name = $name::empty();
        }

        impl $crate::wire::Field for $name {
            const BYTES: usize = size_of::<$raw>();
            const ZERO: Self = $name::NONE;
            fn put(&self, to: &mut [u8]) {
                self.bits().put(to);
            }
            fn get(from: &[u8]) -> Self {
                $name::from_bits_retain(<$raw>::get(from))
            }
        }
    };
}
pub(crate) use flags;

macro_rules! codes {
    (
        $(#[$meta:meta])*
        pub enum $name:ident: $raw:ty {
            $($(#[$code_meta:meta])* $code:ident = $value:literal,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        #[repr($raw)]
        pub enum $name {
            $(
                #[doc = concat!("`", stringify!($value), "`: ")]
                $(#[$code_meta])*
                $code = $value,
            )*
        }

        impl $name {
            /// Every code known here.
            pub const ALL: &'static [$name] = &[$($name::$code),*];

            /// The code with this number, if it is a known one.
            pub const fn from_code(code: $raw) -> Option<$name> {
                match code {
                    $($value => Some($name::$code),)*
                    _ => None,
                }
            }

            /// The number on the wire.
            pub const fn code(self) -> $raw {
                self as $raw
            }
        }
    };
}
pub(crate) use codes;

/// Bits `low` to `low + width - 1` of a dword; `width` is 1 to 31.
pub(crate) const fn bits(dword: u32, low: u32, width: u32) -> u32 {
    (dword >> low) & ((1 << width) - 1)
}

/// Bit `at` of a dword.
pub(crate) const fn bit(dword: u32, at: u32) -> bool {
    dword & (1 << at) != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    layout! {
        /// A small one.
        pub struct Small[16] {
            /// One.
            1 => one: u8,
            /// Two.
            4 => two: u32,
            /// Name.
            8 => name: Ascii<4>,
            /// Count.
            12 => count: Count16,
            /// Pair.
            14 => pair: [u8; 2],
        }
    }

    #[test]
    fn a_layout_writes_and_reads_its_offsets() {
        let count = Count16::new(65_536).unwrap();
        let small = Small { one: 1, two: 0x0506_0708, name: Ascii::new("ab"), count, pair: [3, 4] };
        let bytes = small.encode();
        assert_eq!(bytes, [0, 1, 0, 0, 8, 7, 6, 5, b'a', b'b', b' ', b' ', 0xFF, 0xFF, 3, 4]);
        assert_eq!(Small::decode(&bytes), Ok(small));
        assert_eq!(Small::decode(&bytes[..15]), Err(TooShort { structure: "Small", needed: 16, got: 15 }));
        assert_eq!(Small::decode(&[0; Small::BYTES]), Ok(Small::default()));
    }

    #[test]
    fn counts_are_one_less_on_the_wire_and_never_none() {
        assert_eq!((Count8::new(0), Count8::new(257)), (None, None));
        assert_eq!(Count8::new(256).unwrap().get(), 256);
        assert_eq!((Count16::new(0), Count16::new(65_537)), (None, None));
        assert_eq!((Count8::saturating(0).get(), Count8::saturating(999).get()), (1, 256));
    }

    #[test]
    fn text_is_cut_padded_and_made_printable() {
        assert_eq!(Ascii::<4>::new("sealblock").text(), "seal");
        assert_eq!(Ascii::<4>::new("é\n").text(), "??");
        assert_eq!(Ascii::<4>::get(&[b'a', 0, 0xFF, 0]).text(), "a??");
        assert_eq!(Ascii::<4>::ZERO.text(), "");
    }
}
