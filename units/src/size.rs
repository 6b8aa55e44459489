//! Sizes in bytes as people write and read them.

use std::fmt;
use std::str::FromStr;

/// A number of bytes. Reads and prints the forms of the command line: `4096`, `4KiB`, `1GiB`, `1GB`, `1.5GiB`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct ByteCount(u64);

impl ByteCount {
    /// This many bytes.
    pub const fn new(bytes: u64) -> ByteCount {
        ByteCount(bytes)
    }

    /// The number of bytes.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// Why a text is not a size.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SizeError {
    /// No number stands at the start.
    #[error("'{0}' is not a size: write a number and a unit, such as 4096, 4KiB, 1.5GiB or 1GB")]
    NoNumber(String),
    /// The unit is not known.
    #[error(
        "'{unit}' is not a unit of size: use B, KiB, MiB, GiB, TiB, PiB, EiB (powers of 1024) or KB, MB, GB, TB, PB, EB (powers of 1000)"
    )]
    Unit {
        /// What stood behind the number.
        unit: String,
    },
    /// The size does not fit in 64 bits.
    #[error("'{0}' is larger than 2^64 - 1 bytes")]
    TooLarge(String),
    /// A fraction of a unit that is not a whole number of bytes.
    #[error("'{0}' is not a whole number of bytes: omit the fraction, or use fewer digits")]
    Fraction(String),
}

/// Units by the text behind the number, lower case. A bare letter means the power of 1024, as in every disk tool.
const UNITS: &[(&str, u64)] = &[
    ("", 1),
    ("b", 1),
    ("k", 1 << 10),
    ("kib", 1 << 10),
    ("kb", 1_000),
    ("m", 1 << 20),
    ("mib", 1 << 20),
    ("mb", 1_000_000),
    ("g", 1 << 30),
    ("gib", 1 << 30),
    ("gb", 1_000_000_000),
    ("t", 1 << 40),
    ("tib", 1 << 40),
    ("tb", 1_000_000_000_000),
    ("p", 1 << 50),
    ("pib", 1 << 50),
    ("pb", 1_000_000_000_000_000),
    ("e", 1 << 60),
    ("eib", 1 << 60),
    ("eb", 1_000_000_000_000_000_000),
];

impl FromStr for ByteCount {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<ByteCount, SizeError> {
        let trimmed = text.trim();
        let digits = trimmed.len() - trimmed.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, unit) = trimmed.split_at(digits);
        if number.is_empty() {
            return Err(SizeError::NoNumber(text.to_owned()));
        }
        let too_large = || SizeError::TooLarge(text.to_owned());
        let number: u64 = number.parse().map_err(|_| too_large())?;
        let (fraction, unit) = match unit.strip_prefix('.') {
            Some(rest) => rest.split_at(rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len()),
            None => ("", unit),
        };
        let unit = unit.trim_start().to_ascii_lowercase();
        let &(_, scale) = UNITS.iter().find(|(name, _)| *name == unit).ok_or(SizeError::Unit { unit })?;
        let part = part_of(fraction, scale).ok_or_else(|| SizeError::Fraction(text.to_owned()))?;
        number.checked_mul(scale).and_then(|bytes| bytes.checked_add(part)).map(ByteCount).ok_or_else(too_large)
    }
}

/// The bytes of a decimal fraction of a unit; none if they are not a whole number.
fn part_of(fraction: &str, scale: u64) -> Option<u64> {
    let digits = fraction.trim_end_matches('0');
    if digits.is_empty() {
        return Some(0);
    }
    // 38 digits fit in 128 bits, and no unit has as many as 20.
    let (numerator, denominator) = (digits.parse::<u64>().ok()?, 10_u128.checked_pow(digits.len() as u32)?);
    let bytes = u128::from(numerator) * u128::from(scale);
    bytes.is_multiple_of(denominator).then(|| (bytes / denominator) as u64)
}

impl fmt::Display for ByteCount {
    /// The shortest exact form in powers of 1024, otherwise one decimal of the largest fitting unit.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let power = if self.0 == 0 { 0 } else { self.0.ilog2() / 10 };
        let unit = 1_u64 << (power * 10);
        let name = NAMES[power as usize];
        if self.0.is_multiple_of(unit) {
            write!(f, "{} {name}", self.0 / unit)
        } else {
            write!(f, "{:.1} {name}", self.0 as f64 / unit as f64)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_forms_of_the_command_line() {
        for (text, bytes) in [
            ("4096", 4096),
            ("4KiB", 4096),
            ("1GiB", 1 << 30),
            ("1GB", 1_000_000_000),
            ("2 MiB", 2 << 20),
            ("8k", 8192),
            ("1.5GiB", 3 << 29),
            ("1.5 GB", 1_500_000_000),
            ("0.5k", 512),
            ("2.50MB", 2_500_000),
            ("4096.0", 4096),
            ("1EiB", 1 << 60),
            ("15.5EiB", 31 << 59),
            ("18EB", 18_000_000_000_000_000_000),
        ] {
            assert_eq!(text.parse::<ByteCount>().unwrap().get(), bytes, "{text}");
        }
    }

    #[test]
    fn invalid_sizes_say_why() {
        assert!(matches!("".parse::<ByteCount>(), Err(SizeError::NoNumber(_))));
        assert!(matches!("-4".parse::<ByteCount>(), Err(SizeError::NoNumber(_))));
        assert!(matches!("4QiB".parse::<ByteCount>(), Err(SizeError::Unit { .. })));
        for text in ["1.5", "1.0001KiB", "0.3GiB", "1.00000000000000000000000001GiB"] {
            assert!(matches!(text.parse::<ByteCount>(), Err(SizeError::Fraction(_))), "{text}");
        }
        for text in ["16EiB", "15.99999999999999999EiB", "18446744073709551616"] {
            assert!(text.parse::<ByteCount>().is_err(), "{text}");
        }
        assert!(matches!("1.5.5GiB".parse::<ByteCount>(), Err(SizeError::Unit { .. })));
        assert!(matches!(".5GiB".parse::<ByteCount>(), Err(SizeError::NoNumber(_))));
        assert!(matches!("99999999999PiB".parse::<ByteCount>(), Err(SizeError::TooLarge(_))));
        assert!(matches!("99999999999999999999999".parse::<ByteCount>(), Err(SizeError::TooLarge(_))));
    }

    #[test]
    fn sizes_print_exactly_or_with_one_decimal() {
        assert_eq!(ByteCount::new(0).to_string(), "0 B");
        assert_eq!(ByteCount::new(4096).to_string(), "4 KiB");
        assert_eq!(ByteCount::new(1536).to_string(), "1.5 KiB");
        assert_eq!(ByteCount::new(u64::MAX).to_string(), "16.0 EiB");
    }
}
