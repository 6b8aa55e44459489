//! Guards: the CRCs and the IP checksum of bytes.
//!
//! CRC-32C is computed by our own code (`crc32c.rs`) where the processor has the instructions for it. Elsewhere it is
//! computed by `crc-fast`, like the other CRCs, through fixed entry points: the `Digest`, which `append` needs, copies
//! some 200 bytes of parameters first. `append` continues a finished CRC: all three CRCs have equal initial and final
//! XOR, so the finished value of an empty message is 0, and the running state can be computed from a finished value.
//!
//! The IP checksum is the Internet checksum (RFC 1071) as a guard: the "IP" guard of DIX host buffers. The value is
//! that of RFC 1071 over 16-bit words in network byte order: each even-numbered byte is the more significant one of its
//! word, a zero byte is appended to an odd last byte, the sum's carries are added to it, and the result is inverted. A
//! tuple stores it big-endian like every guard. Implementations that sum and store words in the byte order of a
//! little-endian machine, such as the block layer of Linux, store the same two bytes in the tuple, because swapping the
//! bytes of all words swaps the bytes of their one's-complement sum (RFC 1071, section 2 (B)). The sum of all-zero data
//! is 0, so its guard is FFFFh; any other data whose sum is a multiple of FFFFh has guard 0.
//!
//! The loop adds 32-bit words to sixteen 64-bit lanes, which the compiler turns into vector code; no lane can overflow
//! before 2^32 words. Folding a sum of 32-bit words to 16 bits gives the same value as adding 16-bit words, since 2^16
//! is 1 modulo FFFFh.

use crc_fast::{CrcAlgorithm, Digest};

use crate::{GuardKind, crc32c};

// Do not inline these into other crates: each would bring all of `crc-fast` with it, once for every kind of processor.

/// CRC-16/T10-DIF of `bytes` (polynomial 8BB7h, not reflected, initial value 0).
pub fn crc16(bytes: &[u8]) -> u16 {
    match bytes.try_into() {
        Ok(block) if !bytes.as_ptr().addr().is_multiple_of(VECTOR_BYTES) => crc16_realigned(block),
        _ => crc_fast::checksum(CrcAlgorithm::Crc16T10Dif, bytes) as u16,
    }
}

/// The alignment at which `crc-fast` is fast: it computes the bytes before and after the whole vectors in small steps.
const VECTOR_BYTES: usize = 16;

/// Every second block of 512 bytes that is interleaved with 8-byte tuples starts in the middle of a vector. Copying it
/// first takes less than half as long as the slow steps; larger blocks gain nothing from a copy.
fn crc16_realigned(block: &[u8; 512]) -> u16 {
    #[repr(align(64))]
    struct Aligned([u8; 512]);
    crc_fast::checksum(CrcAlgorithm::Crc16T10Dif, &Aligned(*block).0) as u16
}

/// CRC-32C of `bytes` (polynomial 1EDC6F41h, reflected; RFC 3720 appendix B.4).
pub fn crc32c(bytes: &[u8]) -> u32 {
    match crc32c::update(!0, bytes) {
        Some(state) => !state,
        None => crc_fast::crc32_iscsi(bytes),
    }
}

/// CRC-64/NVME of `bytes` (polynomial AD93D23594C93659h, reflected; the 64-bit guard of the NVM Command Set
/// specification).
pub fn crc64(bytes: &[u8]) -> u64 {
    crc_fast::crc64_nvme(bytes)
}

/// Continues a CRC-16/T10-DIF: that of the bytes that `crc` covers, followed by `bytes`. Start with 0.
pub fn crc16_append(crc: u16, bytes: &[u8]) -> u16 {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc16T10Dif, u64::from(crc));
    digest.update(bytes);
    digest.finalize() as u16
}

/// Continues a CRC-32C: that of the bytes that `crc` covers, followed by `bytes`. Start with 0.
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    if let Some(state) = crc32c::update(!crc, bytes) {
        return !state;
    }
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    digest.update(bytes);
    digest.finalize() as u32
}

/// Continues a CRC-64/NVME: that of the bytes that `crc` covers, followed by `bytes`. Start with 0.
pub fn crc64_append(crc: u64, bytes: &[u8]) -> u64 {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc64Nvme, !crc);
    digest.update(bytes);
    digest.finalize()
}

/// The guard of `bytes`, in the low [`GuardKind::bits`] bits.
pub fn compute(kind: GuardKind, bytes: &[u8]) -> u64 {
    match kind {
        GuardKind::Crc16 => u64::from(crc16(bytes)),
        GuardKind::Crc32c => u64::from(crc32c(bytes)),
        GuardKind::Crc64 => crc64(bytes),
        GuardKind::IpChecksum => u64::from(ip_checksum(bytes)),
    }
}

/// The guard of no bytes: the start value for [`append`].
pub const fn empty(kind: GuardKind) -> u64 {
    match kind {
        GuardKind::Crc16 | GuardKind::Crc32c | GuardKind::Crc64 => 0,
        GuardKind::IpChecksum => 0xFFFF,
    }
}

/// Continues a guard: that of the bytes that `guard` covers, followed by `bytes`. For the IP checksum all parts but the
/// last must have an even number of bytes, since its words have 16 bits.
pub fn append(kind: GuardKind, guard: u64, bytes: &[u8]) -> u64 {
    match kind {
        GuardKind::Crc16 => u64::from(crc16_append(guard as u16, bytes)),
        GuardKind::Crc32c => u64::from(crc32c_append(guard as u32, bytes)),
        GuardKind::Crc64 => crc64_append(guard, bytes),
        GuardKind::IpChecksum => u64::from(ip_checksum_append(guard as u16, bytes)),
    }
}

/// The lanes and bytes of one step.
const LANES: usize = 16;
const STEP_BYTES: usize = LANES * 4;

/// The IP checksum of `bytes`, inverted as RFC 1071 stores it. The module's header describes the byte order.
pub fn ip_checksum(bytes: &[u8]) -> u16 {
    !fold(sum(bytes))
}

/// Continues an IP checksum: that of the bytes that `checksum` covers, followed by `bytes`. Start with FFFFh.
/// `checksum` must cover an even number of bytes.
pub fn ip_checksum_append(checksum: u16, bytes: &[u8]) -> u16 {
    let before = (!checksum).swap_bytes();
    !fold(sum(bytes) + u64::from(before))
}

/// The plain sum of the little-endian 32-bit words; an incomplete last word is padded with zeroes.
// Both versions are compiled from this code: AVX2 nearly doubles the speed of the baseline, and is faster than what the
// compiler generates from the same loop for AVX-512, so no wider version is listed.
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

/// Folds a sum of little-endian words to a 16-bit one's-complement sum in network byte order.
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

    /// The definition, word by word, for comparison.
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
        // The documentation states this weakness; the test checks that it exists.
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
