//! Sizes in the form that reads back.
//!
//! [`ByteCount`] prints for people and rounds; a target or a rate is printed so that it can be typed again.

use sealblock_units::ByteCount;

/// The size in the largest unit that is exact, without a space: `1GiB`, `1537`.
pub(crate) fn exact(size: ByteCount) -> String {
    const UNITS: [&str; 7] = ["", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let bytes = size.get();
    // A zero has 64 trailing zeroes, and prints as 0.
    let power = if bytes == 0 { 0 } else { (bytes.trailing_zeros() as usize / 10).min(UNITS.len() - 1) };
    format!("{}{}", bytes >> (10 * power), UNITS[power])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_exact_unit_is_taken() {
        for (bytes, text) in
            [(0, "0"), (1, "1"), (1537, "1537"), (1536, "1536"), (4096, "4KiB"), (1 << 30, "1GiB"), (3 << 60, "3EiB")]
        {
            assert_eq!(exact(ByteCount::new(bytes)), text);
        }
    }

    proptest::proptest! {
        #[test]
        fn sizes_read_back(bytes: u64) {
            proptest::prop_assert_eq!(exact(ByteCount::new(bytes)).parse(), Ok(ByteCount::new(bytes)));
        }
    }
}
