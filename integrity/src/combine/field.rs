//! Arithmetic modulo a CRC's polynomial.
//!
//! Elements are remainders in the bit order of the CRC itself: in a plain CRC the least significant bit is the
//! coefficient of x^0, in a reflected one it is that of the highest power.

/// The arithmetic of one CRC of at most 64 bits.
#[derive(Clone, Copy)]
pub struct CrcField {
    width: u32,
    /// The polynomial without its highest term, in the bit order of elements.
    polynomial: u64,
    reflected: bool,
    /// x^8, x^16, x^32, ...: entry `n` is what 2^n zero bytes multiply by.
    powers: [u64; 64],
}

impl CrcField {
    /// A CRC that takes the most significant bit of each byte first.
    pub const fn plain(width: u32, polynomial: u64) -> CrcField {
        CrcField { width, polynomial, reflected: false, powers: [0; 64] }.with_powers()
    }

    /// A CRC that takes the least significant bit of each byte first; `polynomial` in the usual, unreflected form.
    pub const fn reflected(width: u32, polynomial: u64) -> CrcField {
        let polynomial = polynomial.reverse_bits() >> (64 - width);
        CrcField { width, polynomial, reflected: true, powers: [0; 64] }.with_powers()
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
        if self.reflected { 1 << (self.width - 1) } else { 1 }
    }

    const fn times_x(&self, a: u64) -> u64 {
        if self.reflected {
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
            let coefficient = if self.reflected { self.width - 1 - power } else { power };
            if a >> coefficient & 1 == 1 {
                product ^= shifted;
            }
            shifted = self.times_x(shifted);
            power += 1;
        }
        product
    }

    /// x^(8 `bytes`): what `bytes` zero bytes multiply by.
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
