//! Rates as people write them: a size per second, such as `100MiB/s`.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;

use sealblock_units::{ByteCount, SizeError};

use crate::size::exact;

/// A rate in bytes per second; never zero, since a limit of zero would never end.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Rate(NonZeroU64);

/// Why a text is no rate.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RateError {
    /// It does not end in `/s`.
    #[error("'{0}' is no rate: write a size per second, such as 100MiB/s")]
    Form(String),
    /// What stands before `/s` is no size.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// No bytes per second.
    #[error("at 0 bytes per second the work would never end: leave the limit out, or give at least 1B/s")]
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

#[cfg(test)]
mod tests {
    use super::*;

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

    proptest::proptest! {
        #[test]
        fn a_rate_prints_as_it_reads(bytes in 1..=u64::MAX) {
            let rate: Rate = format!("{bytes}/s").parse().unwrap();
            proptest::prop_assert_eq!(rate.to_string().parse(), Ok(rate));
        }
    }
}
