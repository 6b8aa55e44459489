//! The theoretical rate of faults that guards miss, on random data.
//!
//! A CRC of `n` bits misses an error exactly if its polynomial divides that of the error. So it detects every error of
//! one bit, every burst of up to `n` bits, and every error of two bits that are closer than the order of x modulo the
//! polynomial. Of longer bursts, in which every pattern is equally likely, it misses one in 2^n. Units that change
//! places make an error of (x^d + 1) times the difference of the units. So any common divisor of x^d + 1 and the
//! polynomial makes the CRC that much weaker. The Internet checksum adds up words modulo FFFFh: bit `i` of a word
//! counts as 2^i, with the sign of the change. The polynomials here are taken from the specifications, not from the
//! code of the guards.

use std::collections::HashMap;

use sealblock_integrity::GuardKind;

use super::faults::{Fault, LOST_BITS, ONES_WORDS, SECTOR_BYTES};
use super::residues::ONES;

const WORD_BITS: usize = 16;

/// A polynomial over the field with two elements; bit `i` stands for x^i.
type Polynomial = u128;

/// The fraction of faults of this kind that a guard misses in blocks of this size.
pub fn undetected(kind: GuardKind, fault: Fault, block_bytes: usize) -> f64 {
    match polynomial(kind) {
        Some(polynomial) => crc(polynomial, fault, block_bytes * 8),
        None => internet_checksum(fault, block_bytes * 8),
    }
}

/// The polynomial of a CRC: CRC-16 of T10 SBC, CRC-32C of RFC 3720, CRC-64 of the NVM Command Set specification. `None`
/// for the Internet checksum.
fn polynomial(kind: GuardKind) -> Option<Polynomial> {
    match kind {
        GuardKind::Crc16 => Some(0x1_8BB7),
        GuardKind::Crc32c => Some(0x1_1EDC_6F41),
        GuardKind::Crc64 => Some(0x1_AD93_D235_94C9_3659),
        GuardKind::IpChecksum => None,
    }
}

fn degree(polynomial: Polynomial) -> u32 {
    polynomial.ilog2()
}

/// A polynomial times x, modulo another.
fn times_x(value: Polynomial, modulus: Polynomial) -> Polynomial {
    let value = value << 1;
    if value >> degree(modulus) & 1 == 1 { value ^ modulus } else { value }
}

/// The remainder of a polynomial.
fn remainder(mut value: Polynomial, modulus: Polynomial) -> Polynomial {
    while value != 0 && degree(value) >= degree(modulus) {
        value ^= modulus << (degree(value) - degree(modulus));
    }
    value
}

/// The degree of the greatest common divisor of both polynomials; if one is 0, the degree of the other.
fn common_degree(mut a: Polynomial, mut b: Polynomial) -> u32 {
    while b != 0 {
        (a, b) = (b, remainder(a, b));
    }
    degree(a)
}

/// x^0, x^1 and so on modulo a polynomial.
fn powers(modulus: Polynomial) -> impl Iterator<Item = Polynomial> {
    std::iter::successors(Some(1), move |power| Some(times_x(*power, modulus)))
}

/// The fraction of all non-zero patterns of this many bits that a polynomial of this degree divides.
fn multiples(bits: u32, degree: u32) -> f64 {
    match bits.checked_sub(degree) {
        None | Some(0) => 0.0,
        Some(more) => (2.0_f64.powi(more as i32) - 1.0) / (2.0_f64.powi(bits as i32) - 1.0),
    }
}

fn crc(polynomial: Polynomial, fault: Fault, bits: usize) -> f64 {
    let width = degree(polynomial);
    match fault {
        Fault::Flips(2) => pairs(polynomial, bits) / choose(bits, 2),
        Fault::Flips(3) => triples(polynomial, bits) / choose(bits, 3),
        // One wrong bit is x^n, which no such polynomial divides.
        Fault::Flips(_) => 0.0,
        Fault::Burst(burst) => multiples(burst as u32, width),
        Fault::SwappedWords => {
            swapped(polynomial, WORD_BITS, bits / WORD_BITS, |weaker| multiples(WORD_BITS as u32, width - weaker))
        }
        Fault::LostBytes => multiples(LOST_BITS as u32, width),
        Fault::ZeroesAsOnes => {
            let divides = |words: usize| remainder(u128::MAX >> (128 - words * WORD_BITS), polynomial) == 0;
            (1..=ONES_WORDS).filter(|words| divides(*words)).count() as f64 / ONES_WORDS as f64
        }
        Fault::LostSector | Fault::OtherData => 2.0_f64.powi(-(width as i32)),
        Fault::SwappedSectors => {
            let sector = SECTOR_BYTES * 8;
            swapped(polynomial, sector, bits / sector, |weaker| 2.0_f64.powi(weaker as i32 - width as i32))
        }
    }
}

/// The number of ways to choose `of` from `count`.
fn choose(count: usize, of: usize) -> f64 {
    (0..of).map(|taken| (count - taken) as f64 / (taken + 1) as f64).product()
}

/// Pairs of bits whose sum the polynomial divides.
fn pairs(polynomial: Polynomial, bits: usize) -> f64 {
    let distances = powers(polynomial).take(bits).enumerate().skip(1).filter(|(_, power)| *power == 1);
    distances.map(|(distance, _)| (bits - distance) as f64).sum()
}

/// Triples of bits whose sum the polynomial divides: x^0 + x^i + x^j at each position where they fit.
fn triples(polynomial: Polynomial, bits: usize) -> f64 {
    // For each power, at how many places it occurs.
    let mut places: HashMap<Polynomial, usize> = HashMap::new();
    let mut found = 0.0;
    for (last, power) in powers(polynomial).take(bits).enumerate().skip(1) {
        let closer = places.get(&(power ^ 1)).copied().unwrap_or(0);
        found += (closer * (bits - last)) as f64;
        *places.entry(power).or_default() += 1;
    }
    found
}

/// The fraction that is missed, averaged over all pairs of units that change places; `missed` gives it for the degree
/// of the common divisor of x^d + 1 and the polynomial.
fn swapped(polynomial: Polynomial, unit_bits: usize, units: usize, missed: impl Fn(u32) -> f64) -> f64 {
    let steps = powers(polynomial).step_by(unit_bits).take(units).enumerate().skip(1);
    let of_distance = |(distance, power): (usize, Polynomial)| {
        (units - distance) as f64 * missed(common_degree(polynomial, power ^ 1))
    };
    steps.map(of_distance).sum::<f64>() / choose(units, 2)
}

fn internet_checksum(fault: Fault, bits: usize) -> f64 {
    let ones = ONES as f64;
    match fault {
        Fault::Flips(count) => flips(count, bits / WORD_BITS),
        Fault::Burst(burst) => bursts(burst),
        // Words that change places leave the sum unchanged, and adding FFFFh is adding 0.
        Fault::SwappedWords | Fault::SwappedSectors | Fault::ZeroesAsOnes => 1.0,
        // The sum of a block of zeroes is the other representation of zero.
        Fault::LostSector if bits == SECTOR_BYTES * 8 => 0.0,
        // The sum of several random words is any number modulo FFFFh, with equal probability up to 2^-100.
        Fault::LostBytes | Fault::LostSector | Fault::OtherData => 1.0 / ones,
    }
}

/// For flips of this number of bits in this number of words: sums over all weights of the bits, with all signs.
fn flips(count: usize, words: usize) -> f64 {
    let mut missed = 0.0;
    for combination in 0..32_usize.pow(count as u32) {
        let choices = (0..count).map(|at| combination >> (5 * at) & 31);
        let mut taken = [0_usize; WORD_BITS];
        let (mut sum, mut ways) = (0_i64, 1.0);
        for choice in choices {
            let (bit, sign) = (choice / 2, if choice % 2 == 0 { 1 } else { -1 });
            sum += sign << bit;
            ways *= (words - taken[bit]) as f64;
            taken[bit] += 1;
        }
        if sum.rem_euclid(ONES as i64) == 0 {
            missed += ways;
        }
    }
    // Bits in order, each of them zero or one before.
    missed / (0..count).map(|taken| 2.0 * (words * WORD_BITS - taken) as f64).product::<f64>()
}

/// For bursts of up to this many bits: the probability of each difference, computed bit by bit. Each bit stays
/// unchanged with a probability of one half, and increases or decreases with one quarter each.
fn bursts(bits: usize) -> f64 {
    let modulus = ONES as usize;
    let mut chances = vec![0.0; modulus];
    chances[0] = 1.0;
    for bit in 0..bits {
        let weight = (1 << (bit % WORD_BITS)) % modulus;
        let chance = |sum: usize| {
            let (less, more) = ((sum + modulus - weight) % modulus, (sum + weight) % modulus);
            chances[sum] / 2.0 + (chances[less] + chances[more]) / 4.0
        };
        chances = (0..modulus).map(chance).collect();
    }
    // All patterns except the one without an error.
    let none = 2.0_f64.powi(-(bits as i32));
    (chances[0] - none) / (1.0 - none)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_integrity::guard;

    fn is_near(value: f64, expected: f64) -> bool {
        value == expected || (value / expected - 1.0).abs() < 1e-6
    }

    #[test]
    fn guards_have_the_polynomials_of_the_specifications() {
        // The last bit of a message is x^0; its remainder, shifted by the width, is the polynomial without its highest
        // power.
        let difference = |kind, bit: u8| guard::compute(kind, &[bit; 1]) ^ guard::compute(kind, &[0; 1]);
        let low = |kind: GuardKind| polynomial(kind).unwrap() as u64;
        assert_eq!(difference(GuardKind::Crc16, 1), low(GuardKind::Crc16) & 0xFFFF);
        let crc32c = difference(GuardKind::Crc32c, 0x80) as u32;
        assert_eq!(u64::from(crc32c.reverse_bits()), low(GuardKind::Crc32c) & 0xFFFF_FFFF);
        assert_eq!(difference(GuardKind::Crc64, 0x80).reverse_bits(), low(GuardKind::Crc64));
    }

    #[test]
    fn crcs_see_what_they_promise_to_see() {
        for kind in [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64] {
            let width = kind.bits() as usize;
            for bytes in [512, 4096] {
                assert_eq!(undetected(kind, Fault::Flips(1), bytes), 0.0);
                assert_eq!(undetected(kind, Fault::Flips(2), bytes), 0.0, "{kind}, {bytes}");
                assert_eq!(undetected(kind, Fault::Burst(width), bytes), 0.0);
                let longer = undetected(kind, Fault::Burst(width + 1), bytes);
                assert!(is_near(longer, 1.0 / (2.0_f64.powi(width as i32 + 1) - 1.0)), "{kind} {longer}");
                assert_eq!(undetected(kind, Fault::ZeroesAsOnes, bytes), 0.0);
                assert!(is_near(undetected(kind, Fault::OtherData, bytes), 2.0_f64.powi(-(width as i32))));
            }
        }
        // x + 1 divides the polynomial of CRC-32C, so it detects every odd number of wrong bits; it does not divide the
        // polynomial of CRC-16.
        assert_eq!(undetected(GuardKind::Crc32c, Fault::Flips(3), 4096), 0.0);
        assert!(undetected(GuardKind::Crc16, Fault::Flips(3), 512) > 0.0);
        // For the same reason it is only half as good at detecting units that change places.
        assert!(is_near(undetected(GuardKind::Crc32c, Fault::SwappedSectors, 4096), 2.0_f64.powi(-31)));
        assert!(is_near(undetected(GuardKind::Crc16, Fault::SwappedSectors, 4096), 2.0_f64.powi(-16)));
    }

    #[test]
    fn small_blocks_counted_bit_by_bit_agree() {
        // x^3 + x + 1 has order 7, in a block of 16 bits.
        let count = |wrong: u32| {
            let errors = (1_u128..1 << 16).filter(|error| error.count_ones() == wrong);
            let (missed, all) = errors
                .fold((0, 0), |(missed, all), error| (missed + u32::from(remainder(error, 0b1011) == 0), all + 1));
            f64::from(missed) / f64::from(all)
        };
        assert!(is_near(crc(0b1011, Fault::Flips(2), 16), count(2)) && count(2) > 0.0);
        assert!(is_near(crc(0b1011, Fault::Flips(3), 16), count(3)) && count(3) > 0.0);
        assert_eq!(common_degree(0b1001, 0b11), 1);
    }

    /// Counts all errors in two words with all previous data, if `is_error` accepts the pattern.
    fn internet_checksum_of_all(bits: u32, is_error: impl Fn(u32) -> bool) -> f64 {
        let (mut missed, mut all) = (0_u64, 0_u64);
        let sum = |value: u32| (value & 0xFFFF) + (value >> 16);
        for error in (0_u32..1 << bits).filter(|error| is_error(*error)) {
            for before in 0_u32..1 << bits {
                all += 1;
                missed += u64::from(sum(before) % 0xFFFF == sum(before ^ error) % 0xFFFF);
            }
        }
        missed as f64 / all as f64
    }

    #[test]
    fn sums_counted_bit_by_bit_agree() {
        // The low 12 bits never carry, so no burst among them is missed; from 16 bits on, a burst is missed if all bits
        // flip in the same direction.
        assert_eq!(internet_checksum_of_all(12, |error| error != 0), 0.0);
        assert!(bursts(12).abs() < 1e-15, "{}", bursts(12));
        assert!(is_near(bursts(16), 2.0 * 2.0_f64.powi(-16) / 65535.0), "{}", bursts(16));
        // Two bits in the same column of two words are missed if one was set and the other was not.
        assert!(is_near(flips(2, 2), 16.0 / choose(32, 2) / 2.0), "{}", flips(2, 2));
        assert!((flips(2, 2048) - 0.0312).abs() < 1e-4, "{}", flips(2, 2048));
        assert_eq!(flips(1, 256), 0.0);
        assert!((bursts(65) * 65535.0 - 1.0).abs() < 0.1, "{}", bursts(65));
    }

    #[test]
    fn what_words_cannot_tell_apart_is_always_missed() {
        for fault in [Fault::SwappedWords, Fault::SwappedSectors, Fault::ZeroesAsOnes] {
            assert_eq!(undetected(GuardKind::IpChecksum, fault, 4096), 1.0);
        }
        assert_eq!(undetected(GuardKind::IpChecksum, Fault::LostSector, 512), 0.0);
        assert!(is_near(undetected(GuardKind::IpChecksum, Fault::LostSector, 4096), 1.0 / 65535.0));
    }
}
