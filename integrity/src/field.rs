//! Arithmetic modulo the polynomial of a CRC.
//!
//! Everything is `const`, so that tables and constants computed with it cost nothing at run time. It computes bit by
//! bit: on the path of a request it may be used only to create a table once.

/// Arithmetic modulo the polynomial of a CRC of at most 64 bits.
///
/// Elements are remainders in the bit order of the CRC: in a plain CRC the least significant bit is the coefficient of
/// x^0, in a reflected one it is that of the highest power.
#[derive(Clone, Copy)]
pub struct CrcField {
    width: u32,
    /// The polynomial without its highest term, in the bit order of elements.
    polynomial: u64,
    is_reflected: bool,
    /// x^8, x^16, x^32, ...: entry `n` is the factor for 2^n zero bytes.
    powers: [u64; 64],
}

impl CrcField {
    /// A CRC that processes the most significant bit of each byte first.
    pub const fn plain(width: u32, polynomial: u64) -> CrcField {
        CrcField { width, polynomial, is_reflected: false, powers: [0; 64] }.with_powers()
    }

    /// A CRC that processes the least significant bit of each byte first; `polynomial` is in the usual, unreflected
    /// form.
    pub const fn reflected(width: u32, polynomial: u64) -> CrcField {
        let polynomial = polynomial.reverse_bits() >> (64 - width);
        CrcField { width, polynomial, is_reflected: true, powers: [0; 64] }.with_powers()
    }

    const fn with_powers(mut self) -> CrcField {
        let mut power = self.one();
        let mut bit = 0;
        while bit < 8 {
            power = self.times_x(power);
            bit += 1;
        }
        let mut n = 0;
        while n < 64 {
            self.powers[n] = power;
            power = self.multiply(power, power);
            n += 1;
        }
        self
    }

    /// Bits of an element.
    pub const fn width(&self) -> u32 {
        self.width
    }

    const fn one(&self) -> u64 {
        if self.is_reflected { 1 << (self.width - 1) } else { 1 }
    }

    const fn times_x(&self, a: u64) -> u64 {
        if self.is_reflected {
            (a >> 1) ^ if a & 1 == 1 { self.polynomial } else { 0 }
        } else {
            let high = a >> (self.width - 1) & 1 == 1;
            let shifted = a << 1 & (u64::MAX >> (64 - self.width));
            shifted ^ if high { self.polynomial } else { 0 }
        }
    }

    /// The product of two elements.
    pub const fn multiply(&self, a: u64, b: u64) -> u64 {
        let (mut product, mut shifted, mut power) = (0, b, 0);
        while power < self.width {
            let coefficient = if self.is_reflected { self.width - 1 - power } else { power };
            if a >> coefficient & 1 == 1 {
                product ^= shifted;
            }
            shifted = self.times_x(shifted);
            power += 1;
        }
        product
    }

    /// x^`bits`.
    pub const fn power_of_bits(&self, bits: u64) -> u64 {
        let (mut power, mut left) = (self.power_of_bytes(bits / 8), bits % 8);
        while left > 0 {
            power = self.times_x(power);
            left -= 1;
        }
        power
    }

    /// x^(8 `bytes`): the factor for `bytes` zero bytes.
    pub const fn power_of_bytes(&self, bytes: u64) -> u64 {
        let (mut power, mut n) = (self.one(), 0);
        while n < 64 {
            if bytes >> n & 1 == 1 {
                power = self.multiply(power, self.powers[n]);
            }
            n += 1;
        }
        power
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: CrcField = CrcField::plain(16, 0x8BB7);
    const REFLECTED: CrcField = CrcField::reflected(32, 0x1EDC_6F41);

    #[test]
    fn powers_multiply_as_their_exponents_add() {
        for field in [PLAIN, REFLECTED] {
            for (a, b) in [(0, 0), (1, 7), (8, 8), (33, 479), (1000, 4096)] {
                let product = field.multiply(field.power_of_bits(a), field.power_of_bits(b));
                assert_eq!(product, field.power_of_bits(a + b), "x^{a} times x^{b}");
            }
            assert_eq!(field.power_of_bits(8 * 77), field.power_of_bytes(77));
        }
    }

    #[test]
    fn the_lowest_power_that_does_not_fit_is_the_polynomial() {
        assert_eq!(PLAIN.power_of_bits(16), 0x8BB7);
        assert_eq!(REFLECTED.power_of_bits(32), u64::from(0x1EDC_6F41_u32.reverse_bits()));
        assert_eq!((PLAIN.power_of_bits(15), REFLECTED.power_of_bits(31)), (1 << 15, 1));
    }
}
