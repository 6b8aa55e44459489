//! The ways of drawing structures, on small ones.

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
