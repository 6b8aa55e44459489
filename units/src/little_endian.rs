//! Numbers in structures on a medium: little-endian, of any width from 1 to 8 bytes, at a place of their own.
//!
//! The structures of volumes, mirrors and stripes are drawn as tables of places in `docs/formats`, and are read and written by them.

/// The number of `N` bytes at `at`.
///
/// # Panics
/// Where `bytes` end before the number does: the length of a structure is checked before its fields are read.
pub fn get<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    const { assert!(1 <= N && N <= 8, "a number has 1 to 8 bytes") };
    let mut wide = [0; 8];
    wide[..N].copy_from_slice(&bytes[at..at + N]);
    u64::from_le_bytes(wide)
}

/// Stores the low `N` bytes of `value` at `at`. The caller has checked that the value fits.
///
/// # Panics
/// Where `bytes` end before the number does.
pub fn put<const N: usize>(bytes: &mut [u8], at: usize, value: u64) {
    const { assert!(1 <= N && N <= 8, "a number has 1 to 8 bytes") };
    bytes[at..at + N].copy_from_slice(&value.to_le_bytes()[..N]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_their_place_and_change_nothing_beside_it() {
        let mut bytes = [0xEE; 12];
        put::<1>(&mut bytes, 0, 0x0102);
        put::<3>(&mut bytes, 2, 0x0004_0302);
        put::<6>(&mut bytes, 6, 0x0807_0605_0403);
        assert_eq!(bytes, [2, 0xEE, 2, 3, 4, 0xEE, 3, 4, 5, 6, 7, 8]);
        assert_eq!((get::<1>(&bytes, 0), get::<3>(&bytes, 2), get::<6>(&bytes, 6)), (2, 0x0004_0302, 0x0807_0605_0403));
    }

    #[test]
    fn every_width_keeps_its_low_bytes() {
        fn width<const N: usize>() {
            for value in [0, 1, 0x80, 0xFEDC_BA98_7654_3210, u64::MAX] {
                let mut bytes = [0x5A; 10];
                put::<N>(&mut bytes, 1, value);
                assert_eq!(get::<N>(&bytes, 1), value & (u64::MAX >> (64 - 8 * N)), "{N} bytes of {value:#x}");
                assert!(bytes[0] == 0x5A && bytes[1 + N..].iter().all(|byte| *byte == 0x5A), "{N} bytes: {bytes:x?}");
            }
        }
        width::<1>();
        width::<2>();
        width::<3>();
        width::<4>();
        width::<5>();
        width::<6>();
        width::<7>();
        width::<8>();
    }

    #[test]
    fn the_largest_number_comes_back() {
        let mut bytes = [0; 8];
        put::<8>(&mut bytes, 0, u64::MAX);
        assert_eq!(
            (get::<8>(&bytes, 0), get::<4>(&bytes, 4), get::<2>(&bytes, 6)),
            (u64::MAX, u32::MAX.into(), 0xFFFF)
        );
    }

    #[test]
    fn bytes_that_end_too_soon_are_no_number() {
        let get_beyond = std::panic::catch_unwind(|| get::<4>(&[0; 6], 3));
        assert!(get_beyond.is_err());
        let put_beyond = std::panic::catch_unwind(|| put::<2>(&mut [0; 4], 3, 1));
        assert!(put_beyond.is_err());
    }
}
