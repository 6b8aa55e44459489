//! Sizes, rates and times as people write them, such as `1GiB`, `100MiB/s` and `2min`.
//!
//! What is printed here reads back: [`ByteCount`] prints for people and rounds, so a target or a rate has a form of its own.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::Duration;

use sealblock_units::{ByteCount, SizeError};

/// The size in the largest unit that is exact, without a space: `1GiB`, `1537`.
pub fn exact(size: ByteCount) -> String {
    const SIZE_UNITS: [&str; 7] = ["", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let bytes = size.get();
    // A zero has 64 trailing zeroes, and prints as 0.
    let power = if bytes == 0 { 0 } else { (bytes.trailing_zeros() as usize / 10).min(SIZE_UNITS.len() - 1) };
    format!("{}{}", bytes >> (10 * power), SIZE_UNITS[power])
}

/// A number of things: `1 block`, `2 blocks`.
pub fn count(number: u64, thing: &str) -> String {
    let ending = if number == 1 { "" } else { "s" };
    format!("{number} {thing}{ending}")
}

/// A rate in bytes per second; never zero, since a limit of zero would never end.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Rate(NonZeroU64);

/// Why a text is no rate.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RateError {
    /// It does not end in `/s`.
    #[error("'{0}' is not a rate: use a size per second, such as 100MiB/s")]
    Form(String),
    /// What stands before `/s` is no size.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// No bytes per second.
    #[error("a rate must be at least 1B/s; omit it for no limit")]
    Zero,
}

impl Rate {
    /// Bytes per second.
    pub const fn bytes_per_second(self) -> NonZeroU64 {
        self.0
    }
}

impl FromStr for Rate {
    type Err = RateError;

    fn from_str(text: &str) -> Result<Rate, RateError> {
        let size = text.strip_suffix("/s").ok_or_else(|| RateError::Form(text.to_owned()))?;
        let size: ByteCount = size.parse()?;
        NonZeroU64::new(size.get()).map(Rate).ok_or(RateError::Zero)
    }
}

impl fmt::Display for Rate {
    /// An exact form that reads back.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/s", exact(ByteCount::new(self.0.get())))
    }
}

/// A time, as it is written in a configuration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Time(pub Duration);

/// Why a text is no time.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("'{0}' is not a time: use a whole number and ms, s, min, h or d, such as 500ms or 7d")]
pub struct TimeError(String);

const TIME_UNITS: [(&str, u64); 5] = [("ms", 1), ("s", 1000), ("min", 60_000), ("h", 3_600_000), ("d", 86_400_000)];

impl FromStr for Time {
    type Err = TimeError;

    fn from_str(text: &str) -> Result<Time, TimeError> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let milliseconds = TIME_UNITS
            .iter()
            .find(|(name, _)| *name == unit.trim_start())
            .and_then(|(_, factor)| number.parse::<u64>().ok()?.checked_mul(*factor));
        milliseconds.map(|ms| Time(Duration::from_millis(ms))).ok_or_else(|| TimeError(text.to_owned()))
    }
}

impl fmt::Display for Time {
    /// The largest unit that is exact; reads back.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.0.as_millis();
        let (name, factor) = TIME_UNITS
            .into_iter()
            .rev()
            .find(|(_, factor)| ms > 0 && ms.is_multiple_of(u128::from(*factor)))
            .unwrap_or(("ms", 1));
        write!(f, "{}{name}", ms / u128::from(factor))
    }
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

    #[test]
    fn one_thing_is_no_plural() {
        assert_eq!([0, 1, 2].map(|number| count(number, "block")), ["0 blocks", "1 block", "2 blocks"]);
    }

    #[test]
    fn a_rate_is_a_size_per_second() {
        assert_eq!("100MiB/s".parse::<Rate>().unwrap().bytes_per_second().get(), 100 << 20);
        assert_eq!("1/s".parse::<Rate>().unwrap().bytes_per_second().get(), 1);
    }

    #[test]
    fn what_is_no_rate_says_why() {
        assert_eq!("100MiB".parse::<Rate>(), Err(RateError::Form("100MiB".to_owned())));
        assert!(matches!("fast/s".parse::<Rate>(), Err(RateError::Size(_))));
        assert_eq!("0/s".parse::<Rate>(), Err(RateError::Zero));
    }

    #[test]
    fn times_read_and_print() {
        for (text, ms, printed) in [
            ("500ms", 500, "500ms"),
            ("10s", 10_000, "10s"),
            ("120 s", 120_000, "2min"),
            ("2h", 7_200_000, "2h"),
            ("7d", 604_800_000, "7d"),
            ("48h", 172_800_000, "2d"),
            ("0s", 0, "0ms"),
        ] {
            let time: Time = text.parse().unwrap();
            assert_eq!((time, time.to_string()), (Time(Duration::from_millis(ms)), printed.to_owned()));
        }
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for text in ["", "10", "s", "1.5s", "-1s", "10 years", "18446744073709551615h"] {
            assert_eq!(text.parse::<Time>(), Err(TimeError(text.to_owned())));
        }
    }

    proptest::proptest! {
        #[test]
        fn sizes_read_back(bytes: u64) {
            proptest::prop_assert_eq!(exact(ByteCount::new(bytes)).parse(), Ok(ByteCount::new(bytes)));
        }

        #[test]
        fn a_rate_prints_as_it_reads(bytes in 1..=u64::MAX) {
            let rate: Rate = format!("{bytes}/s").parse().unwrap();
            proptest::prop_assert_eq!(rate.to_string().parse(), Ok(rate));
        }
    }
}
