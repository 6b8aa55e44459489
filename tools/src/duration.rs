//! Times as people write them: a whole number and a unit, such as `500ms`, `10s`, `2min`, `1h` or `7d`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A time, as it is written in a configuration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Time(pub Duration);

/// Why a text is no time.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("'{0}' is no time: write a whole number and ms, s, min, h or d, such as 500ms or 7d")]
pub struct TimeError(String);

const UNITS: [(&str, u64); 5] = [("ms", 1), ("s", 1000), ("min", 60_000), ("h", 3_600_000), ("d", 86_400_000)];

impl FromStr for Time {
    type Err = TimeError;

    fn from_str(text: &str) -> Result<Time, TimeError> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let milliseconds = UNITS
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
        let (name, factor) = UNITS
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
}
