//! The Internet checksum (RFC 1071) as a guard: the "IP" guard of DIX host buffers.
//!
//! Byte order. The value is that of RFC 1071 over 16-bit words in network byte order: each even-numbered byte is the
//! more significant of its word, an odd last byte is padded with a zero byte behind it, the sum's carries are added
//! back, and the result is inverted. A tuple stores it big-endian like every guard. That puts the same two bytes into
//! the tuple as an implementation that sums and stores words in a little-endian machine's own order, such as the
//! block layer of Linux, because swapping the bytes of all words swaps the bytes of their one's-complement sum (RFC
//! 1071, section 2 (B)). The sum of all-zero data is 0, so its guard is FFFFh; any other data that sums to a multiple
//! of FFFFh has guard 0.
//!
//! The loop adds 32-bit words into sixteen 64-bit lanes, which the compiler turns into vector code; no lane can
//! overflow before 2^32 words. Folding a sum of 32-bit words down to 16 bits gives the same value as adding 16-bit
//! words, since 2^16 is 1 modulo FFFFh.

/// Lanes and bytes of one step.
const LANES: usize = 16;
const STEP_BYTES: usize = LANES * 4;

/// The IP checksum of `bytes`, inverted as RFC 1071 stores it. See the module for the byte order.
pub fn ip_checksum(bytes: &[u8]) -> u16 {
    !fold(sum(bytes))
}

/// The IP checksum of what `checksum` was computed over followed by `bytes`; start with FFFFh. What came before
/// must have had an even number of bytes.
pub fn ip_checksum_append(checksum: u16, bytes: &[u8]) -> u16 {
    let before = (!checksum).swap_bytes();
    !fold(sum(bytes) + u64::from(before))
}

/// The plain sum of the little-endian 32-bit words; an odd tail is padded with zeroes.
// Both versions compile from this one body: AVX2 nearly doubles the speed of the baseline, and it beats the code that
// the compiler makes of the same loop for AVX-512, which is why no wider version is listed.
#[multiversion::multiversion(targets("x86_64+avx2"))]
fn sum(bytes: &[u8]) -> u64 {
    let mut lanes = [0_u64; LANES];
    let (steps, tail) = bytes.as_chunks::<STEP_BYTES>();
    for step in steps {
        let (words, _) = step.as_chunks::<4>();
        for (lane, word) in lanes.iter_mut().zip(words) {
            *lane += u64::from(u32::from_le_bytes(*word));
        }
    }
    let mut total: u64 = lanes.iter().sum();
    for pair in tail.chunks(2) {
        total += u64::from(pair[0]) + pair.get(1).map_or(0, |high| u64::from(*high) << 8);
    }
    total
}

/// A sum of little-endian words as a 16-bit one's-complement sum in network byte order.
fn fold(sum: u64) -> u16 {
    let sum = (sum >> 32) + (sum & 0xFFFF_FFFF);
    let sum = (sum >> 32) + (sum & 0xFFFF_FFFF);
    let sum = (sum >> 16) + (sum & 0xFFFF);
    let sum = (sum >> 16) + (sum & 0xFFFF);
    let sum = (sum >> 16) + (sum & 0xFFFF);
    (sum as u16).swap_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, word by word.
    fn plain(bytes: &[u8]) -> u16 {
        let mut sum = 0_u32;
        for pair in bytes.chunks(2) {
            sum += u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
            sum = (sum & 0xFFFF) + (sum >> 16);
        }
        !(sum as u16)
    }

    #[test]
    fn the_example_of_rfc_1071() {
        // Section 3: the words 0001 f203 f4f5 f6f7 sum to ddf2.
        assert_eq!(ip_checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
    }

    #[test]
    fn zeroes_and_ones_have_the_two_zeroes() {
        assert_eq!(ip_checksum(&[]), 0xFFFF);
        assert_eq!(ip_checksum(&[0; 4096]), 0xFFFF);
        assert_eq!(ip_checksum(&[0xFF; 4096]), 0);
    }

    #[test]
    fn words_that_change_places_go_unseen() {
        // The weakness that the documentation promises; a test, so that nobody relies on the contrary.
        assert_eq!(ip_checksum(&[1, 2, 3, 4]), ip_checksum(&[3, 4, 1, 2]));
        assert_ne!(ip_checksum(&[1, 2, 3, 4]), ip_checksum(&[2, 1, 3, 4]));
    }

    proptest! {
        #[test]
        fn equals_the_definition(bytes in proptest::collection::vec(any::<u8>(), 0..700)) {
            prop_assert_eq!(ip_checksum(&bytes), plain(&bytes));
        }

        #[test]
        fn append_continues(bytes in proptest::collection::vec(any::<u8>(), 0..700), cut in 0_usize..350) {
            let cut = (cut * 2).min(bytes.len() & !1);
            prop_assert_eq!(ip_checksum_append(ip_checksum(&bytes[..cut]), &bytes[cut..]), plain(&bytes));
        }
    }
}
