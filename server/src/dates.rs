//! Times and durations as text. Times are seconds since 1970; dates are in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since 1970.
pub fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A duration in one or two units.
pub fn span(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

/// A date and time, and how far away that is.
pub fn date(unix_s: u64) -> String {
    let now = self::unix_s();
    match now.checked_sub(unix_s) {
        Some(ago) => format!("{} ({} ago)", utc(unix_s), span(ago)),
        None => format!("{} (in {})", utc(unix_s), span(unix_s - now)),
    }
}

/// Year, month and day.
pub fn day(unix_s: u64) -> String {
    // 64 bits of seconds are 48 bits of days.
    civil((unix_s / 86_400) as i64)
}

/// A time to the second in UTC, possibly before 1970.
pub fn moment(unix_s: i64) -> String {
    let second = unix_s.rem_euclid(86_400);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{} {hour:02}:{minute:02}:{second:02} UTC", civil(unix_s.div_euclid(86_400)))
}

/// The date of a day, counted from 1970 (H. Hinnant, "chrono-Compatible Low-Level Date Algorithms", civil_from_days).
fn civil(day: i64) -> String {
    const DAYS_OF_400_YEARS: i64 = 146_097;
    // In years that begin in March, the leap day is at the end.
    let days = day + 719_468;
    let (era, day) = (days.div_euclid(DAYS_OF_400_YEARS), days.rem_euclid(DAYS_OF_400_YEARS));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = if month < 10 { (year, month + 3) } else { (year + 1, month - 9) };
    format!("{:04}-{month:02}-{day:02}", year + era * 400)
}

fn utc(unix_s: u64) -> String {
    format!("{} {:02}:{:02} UTC", day(unix_s), unix_s / 3600 % 24, unix_s / 60 % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (unix_s, expected) in [
            (0, "1970-01-01 00:00 UTC"),
            (59 * 86_400 + 86_399, "1970-03-01 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (951_868_799, "2000-02-29 23:59 UTC"),
            (951_868_800, "2000-03-01 00:00 UTC"),
            (1_735_689_599, "2024-12-31 23:59 UTC"),
            (1_735_689_600, "2025-01-01 00:00 UTC"),
            (20_780 * 86_400, "2026-11-23 00:00 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
            (16_725_225_600, "2500-01-01 00:00 UTC"),
        ] {
            assert_eq!(utc(unix_s), expected);
        }
        assert!(utc(u64::MAX).ends_with(" UTC"));
        for (unix_s, expected) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (1_709_164_799, "2024-02-28 23:59:59 UTC"),
            (-1, "1969-12-31 23:59:59 UTC"),
            (-2_203_891_200, "1900-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(moment(unix_s), expected);
        }
        assert!([i64::MIN, i64::MAX].iter().all(|unix_s| moment(*unix_s).ends_with(" UTC")));
    }

    #[test]
    fn spans_say_what_matters() {
        let words = [5, 65, 3_700, 90_000].map(span);
        assert_eq!(words, ["5 s", "1 min 5 s", "1 h 1 min", "1 d 1 h"]);
    }
}
