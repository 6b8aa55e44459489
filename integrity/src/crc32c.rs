//! CRC-32C by carry-less multiplication and the CRC instruction at the same time.
//!
//! Processors with AVX-512 can compute a CRC in two units that work in parallel: VPCLMULQDQ multiplies four 128-bit
//! lanes at once, and CRC32 processes eight bytes. Where a multiplication of 64 bytes takes two cycles, as on AMD Zen
//! 4, that unit alone limits a CRC to 16 bytes per cycle; both units together are a third faster. `crc-fast` uses only
//! the first unit for long messages.
//!
//! A message is divided into rounds of eight lines of 64 bytes. Lines 0 to 2 and 4 to 6 are folded into six
//! accumulators. Lines 3 and 7 are processed by two chains of CRC instructions that start with 0. The CRC of a chain is
//! the state at the start of the next line, and a state is applied by adding it to the first four bytes that follow. So
//! no chain needs an additional multiplication, and memory is read in the order of addresses, as the prefetchers need
//! it: when the chains had a separate part of the block, reading from memory was three times slower. The bytes after
//! the last round are processed by the CRC instruction.
//!
//! The end of a block costs no more than a round: the accumulators are multiplied by the distance to the end of the
//! block, instead of by the length of a round. So blocks of one round and of eight cost nearly the same per byte. With
//! rounds of 384 bytes they would not: of a block of 4096 bytes, 256 would remain for the CRC instruction alone.
//!
//! Invariants: the state is that of the CRC instruction, which is inverted neither at the start nor at the end. The
//! result does not depend on alignment. Without these processor features there is no result, and the caller computes
//! the CRC in another way. There is also none in a program that was built only for such a processor (`-C target-cpu`):
//! to call this code without a check at run time would require `unsafe`.

#[cfg(not(all(target_feature = "avx512vbmi2", target_feature = "vpclmulqdq")))]
use multiversion::{multiversion, target::match_target};

/// The state of a CRC after `bytes`, from its state before them; `None` if this processor lacks the instructions.
#[cfg(not(all(target_feature = "avx512vbmi2", target_feature = "vpclmulqdq")))]
#[multiversion(targets("x86_64+avx512f+vpclmulqdq+sse4.2"))]
pub(crate) fn update(state: u32, bytes: &[u8]) -> Option<u32> {
    match_target! {
        "x86_64+avx512f+vpclmulqdq+sse4.2" => Some(kernel::update(state, bytes)),
        _ => {
            let _ = (state, bytes);
            None
        }
    }
}

/// `None`: this program was built for a processor with the instructions.
#[cfg(all(target_feature = "avx512vbmi2", target_feature = "vpclmulqdq"))]
pub(crate) fn update(_: u32, _: &[u8]) -> Option<u32> {
    None
}

#[cfg(all(target_arch = "x86_64", not(all(target_feature = "avx512vbmi2", target_feature = "vpclmulqdq"))))]
mod kernel {
    use std::arch::x86_64::{
        __m512i, _mm_crc32_u8, _mm_crc32_u64, _mm_cvtsi64_si128, _mm_cvtsi128_si64, _mm_extract_epi64, _mm_xor_si128,
        _mm256_castsi256_si128, _mm256_extracti128_si256, _mm256_xor_si256, _mm512_castsi512_si256,
        _mm512_clmulepi64_epi128, _mm512_extracti64x4_epi64, _mm512_setzero_si512, _mm512_ternarylogic_epi64,
        _mm512_xor_si512, _mm512_zextsi128_si512,
    };

    use zerocopy::transmute;

    use crate::field::CrcField;

    const FIELD: CrcField = CrcField::reflected(32, 0x1EDC_6F41);

    /// Bytes of a vector, called a line.
    const LINE_BYTES: usize = 64;
    /// Lines of a round.
    const LINES: usize = 8;
    /// Lines that are folded. Lines 3 and 7 are not.
    const FOLDED: [usize; 6] = [0, 1, 2, 4, 5, 6];
    /// 128-bit lanes of a line.
    const LANES: usize = 4;

    type Line = [u8; LINE_BYTES];
    type Round = [Line; LINES];
    /// Two factors for each lane: one for its first eight bytes, one for its last.
    type Factors = [u64; 2 * LANES];

    /// The factors that move a lane by `bits` bits towards the end of the message.
    ///
    /// A lane is its first eight bytes times x^64, plus its last. Because bits are reflected (the lowest bit of a word
    /// is its highest power), the product of eight bytes and a 32-bit factor contains an additional x^33.
    const fn factors(bits: u64) -> [u64; 2] {
        [FIELD.power_of_bits(bits + 64 - 33), FIELD.power_of_bits(bits - 33)]
    }

    /// Moves each lane by one round.
    const ONE_ROUND: Factors = {
        let [first, last] = factors((LINES * LINE_BYTES * 8) as u64);
        [first, last, first, last, first, last, first, last]
    };

    /// Moves each lane of the last round to the last 16 bytes of the round.
    const TO_THE_END: [Factors; LINES] = {
        let mut all = [[0; 2 * LANES]; LINES];
        let mut lane = 0;
        while lane < LANES * LINES - 1 {
            let [first, last] = factors(((LANES * LINES - 1 - lane) * 128) as u64);
            all[lane / LANES][2 * (lane % LANES)] = first;
            all[lane / LANES][2 * (lane % LANES) + 1] = last;
            lane += 1;
        }
        all
    };

    /// See [`super::update`].
    #[target_feature(enable = "avx512f,vpclmulqdq,sse4.2")]
    pub(super) fn update(state: u32, bytes: &[u8]) -> u32 {
        let (lines, rest) = bytes.as_chunks::<LINE_BYTES>();
        let (rounds, lines) = lines.as_chunks::<LINES>();
        let state = match rounds.split_first() {
            Some((first, others)) => fold(state, first, others),
            None => state,
        };
        let state = words(u64::from(state), lines.as_flattened());
        let (_, last) = rest.as_chunks::<8>();
        let state = words(state, &rest[..rest.len() - last.len()]);
        last.iter().fold(state as u32, |state, byte| _mm_crc32_u8(state, *byte))
    }

    /// Processes bytes in whole words, with one chain of CRC instructions.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq,sse4.2")]
    fn words(state: u64, bytes: &[u8]) -> u64 {
        let (words, _) = bytes.as_chunks::<8>();
        words.iter().fold(state, |state, word| _mm_crc32_u64(state, u64::from_le_bytes(*word)))
    }

    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq,sse4.2")]
    fn fold(state: u32, first: &Round, others: &[Round]) -> u32 {
        let (mut sums, mut chain) = load(u64::from(state), first);
        let factors: __m512i = transmute!(ONE_ROUND);
        for round in others {
            let lines;
            (lines, chain) = load(chain, round);
            for line in FOLDED {
                sums[line] = multiply_add(sums[line], factors, lines[line]);
            }
        }
        let factors: [__m512i; LINES] = transmute!(TO_THE_END);
        let mut sum = _mm512_setzero_si512();
        for line in FOLDED {
            sum = multiply_add(sums[line], factors[line], sum);
        }
        let half = _mm256_xor_si256(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
        let lane = _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        let remainder = _mm_crc32_u64(0, _mm_cvtsi128_si64(lane) as u64);
        (_mm_crc32_u64(remainder, _mm_extract_epi64(lane, 1) as u64) ^ chain) as u32
    }

    /// Returns the lines of a round, after adding the state before them and that of the first chain; and the state of
    /// the second chain, which applies to the next round. Do not fold lines 3 and 7.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq,sse4.2")]
    fn load(state: u64, round: &Round) -> ([__m512i; LINES], u64) {
        let mut lines: [__m512i; LINES] = transmute!(*round);
        let ((one, _), (other, _)) = (round[3].as_chunks::<8>(), round[7].as_chunks::<8>());
        let (mut middle, mut end) = (0, 0);
        for (one, other) in one.iter().zip(other) {
            middle = _mm_crc32_u64(middle, u64::from_le_bytes(*one));
            end = _mm_crc32_u64(end, u64::from_le_bytes(*other));
        }
        lines[0] = add_state(lines[0], state);
        lines[4] = add_state(lines[4], middle);
        (lines, end)
    }

    /// A line with a state added to its first bytes.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq,sse4.2")]
    fn add_state(line: __m512i, state: u64) -> __m512i {
        _mm512_xor_si512(line, _mm512_zextsi128_si512(_mm_cvtsi64_si128(state as i64)))
    }

    /// The lanes of `a` times their factors, plus `b`.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq,sse4.2")]
    fn multiply_add(a: __m512i, factors: __m512i, b: __m512i) -> __m512i {
        /// The truth table of the exclusive or of three operands.
        const XOR: i32 = 0x96;
        let (first, last) = (_mm512_clmulepi64_epi128(a, factors, 0x00), _mm512_clmulepi64_epi128(a, factors, 0x11));
        _mm512_ternarylogic_epi64(first, last, b, XOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crc_fast::{CrcAlgorithm, Digest};
    use proptest::prelude::*;

    /// The definition, bit by bit.
    fn plain(state: u32, bytes: &[u8]) -> u32 {
        bytes.iter().fold(state, |state, byte| {
            (0..8).fold(state ^ u32::from(*byte), |state, _| {
                (state >> 1) ^ if state & 1 == 1 { 0x1EDC_6F41_u32.reverse_bits() } else { 0 }
            })
        })
    }

    fn noise(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|i| (i * 31 + i / 57 + i / 4001) as u8).collect()
    }

    /// Without the instructions there is no result to compare.
    fn assert_is(state: u32, bytes: &[u8], expected: u32) {
        assert!(update(state, bytes).is_none_or(|found| found == expected), "{state:08x}, {} bytes", bytes.len());
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn there_is_a_result_just_where_the_processor_has_the_instructions() {
        // VBMI2 is how `multiversion` recognises AVX-512 that does not slow the processor down.
        let all = is_x86_feature_detected!("avx512vbmi2")
            && is_x86_feature_detected!("vpclmulqdq")
            && is_x86_feature_detected!("sse4.2");
        let built_for_it = cfg!(all(target_feature = "avx512vbmi2", target_feature = "vpclmulqdq"));
        assert_eq!(update(0, &[]).is_some(), all && !built_for_it);
    }

    #[test]
    fn every_length_up_to_three_rounds_is_that_of_the_definition() {
        let bytes = noise(3 * 512 + 70);
        let mut expected = !0;
        for length in 0..bytes.len() {
            assert_is(!0, &bytes[..length], expected);
            expected = plain(expected, &bytes[length..=length]);
        }
    }

    #[test]
    fn every_single_bit_of_a_block_counts() {
        let zero = plain(0, &[0; 4096]);
        let mut block = [0; 4096];
        for bit in 0..block.len() * 8 {
            block[bit / 8] = 1 << (bit % 8);
            let expected = crc_fast::crc32_iscsi(&block) ^ crc_fast::crc32_iscsi(&[0; 4096]) ^ zero;
            assert_is(0, &block, expected);
            block[bit / 8] = 0;
        }
    }

    proptest! {
        #[test]
        fn any_length_at_any_address_from_any_state_is_that_of_others(
            length in 0_usize..20_000, start in 0_usize..130, state in any::<u32>(), seed in any::<u8>(),
        ) {
            let bytes: Vec<u8> = noise(start + length).iter().map(|byte| byte ^ seed).collect();
            let bytes = &bytes[start..];
            let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(state));
            digest.update(bytes);
            let expected = !(digest.finalize() as u32);
            prop_assert_eq!(expected, plain(state, bytes));
            assert_is(state, bytes, expected);
        }
    }
}
