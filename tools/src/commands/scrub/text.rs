//! A scrub as text.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use sealblock_stack::quantity::count;
use sealblock_units::ByteCount;

use crate::control::status::{KeptWord, ResultWord, RunStatus, ScrubStatus, StateWord};
use crate::report::Checked;

/// The whole state.
pub fn to_text(status: &ScrubStatus) -> String {
    let mut text = String::new();
    put(&mut text, line(status));
    if let Some(trouble) = &status.trouble {
        put(&mut text, format!("  suspended: {trouble}"));
    }
    if let Some(run) = &status.run {
        put(&mut text, format!("  under way since {}: {}", date(run.started_unix_s), counts(run, status.checked)));
    }
    let rate = status.rate.map(|rate| format!("at most {}/s", ByteCount::new(rate.get())));
    let every = status.every_s.map(|every| format!("every {}", span(every)));
    let settings: Vec<String> = [rate, every].into_iter().flatten().collect();
    if !settings.is_empty() {
        put(&mut text, format!("  {}", settings.join(", ")));
    }
    if let Some(next) = status.next_unix_s {
        put(&mut text, format!("  the next begins {}", date(next)));
    }
    match status.completed_unix_s {
        Some(at) => put(&mut text, format!("  all blocks were checked last {}", date(at))),
        None => put(&mut text, "  all blocks were never checked".to_owned()),
    }
    for run in status.runs.iter().rev() {
        put(&mut text, format!("  {}", past(run, status.checked)));
    }
    if status.kept == KeptWord::InMemory {
        let why = status.kept_why.as_deref().unwrap_or("there is no room for it on the device");
        put(&mut text, format!("  this is kept in memory only, until the server ends: {why}"));
    }
    text
}

/// The most important in one line.
pub fn line(status: &ScrubStatus) -> String {
    format!("{}: {}", status.target, run_text(status))
}

/// The same without the target.
pub fn run_text(status: &ScrubStatus) -> String {
    let state = match status.state {
        StateWord::Idle => "idle",
        StateWord::Running if status.yielding => "running, giving way to other requests",
        StateWord::Running => "running",
        StateWord::Paused => "paused",
        StateWord::Waiting => "waiting for its time",
        StateWord::Interrupted => "interrupted, goes on when it is served",
    };
    let mut line = state.to_owned();
    if status.run.is_some() {
        let (position, blocks, percent) = (status.position, status.blocks, status.percent);
        line.push_str(&format!(", at block {position} of {blocks} ({percent:.1} %)"));
    }
    if let Some(speed) = status.speed {
        line.push_str(&format!(", {}/s", ByteCount::new(speed)));
    }
    if let Some(left) = status.left_s {
        line.push_str(&format!(", {} left", span(left)));
    }
    line
}

/// A run that has ended.
pub fn past(run: &RunStatus, checked: Checked) -> String {
    let result = match run.result {
        Some(ResultWord::Finished) => "finished",
        Some(ResultWord::Incomplete) => "incomplete",
        Some(ResultWord::Stopped) => "stopped",
        None => "ended",
    };
    let took = run.ended_unix_s.map_or(0, |ended| ended.saturating_sub(run.started_unix_s));
    let from = if run.from == 0 { String::new() } else { format!(" from block {}", run.from) };
    format!("{}: {result} after {}{from}: {}", date(run.started_unix_s), span(took), counts(run, checked))
}

/// What a run has met, in the words of `verify`.
fn counts(run: &RunStatus, checked: Checked) -> String {
    let blocks = count(run.blocks, "block");
    let found = match (run.bad, run.unchecked, checked) {
        (0, 0, Checked::Seals) => format!("{blocks}, clean"),
        (0, 0, Checked::Readability) => format!("{blocks}, readable; nothing to check against"),
        (0, ..) => blocks,
        (bad, ..) => format!("{blocks}, {bad} bad, {} repaired, {} unrepaired", run.repaired, run.unrepaired),
    };
    match run.unchecked {
        0 => found,
        blocks => format!("{found}, {blocks} with a copy that was not checked"),
    }
}

/// A duration in one unit, or two.
pub fn span(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

/// A date and time, and how far that is from now.
pub fn date(unix_s: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    match now.checked_sub(unix_s) {
        Some(ago) => format!("{} ({} ago)", utc(unix_s), span(ago)),
        None => format!("{} (in {})", utc(unix_s), span(unix_s - now)),
    }
}

/// A date and time in UTC, from seconds since 1970.
fn utc(unix_s: u64) -> String {
    let mut days = unix_s / 86_400;
    let mut year = 1970 + days / 146_097 * 400;
    days %= 146_097;
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let days_of = |year: u64| if is_leap(year) { 366 } else { 365 };
    while days >= days_of(year) {
        days -= days_of(year);
        year += 1;
    }
    let february = if is_leap(year) { 29 } else { 28 };
    let mut month = 1;
    for days_of in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < days_of {
            break;
        }
        days -= days_of;
        month += 1;
    }
    format!("{year}-{month:02}-{:02} {:02}:{:02} UTC", days + 1, unix_s / 3600 % 24, unix_s / 60 % 60)
}

fn put(text: &mut String, line: String) {
    writeln!(text, "{line}").expect("a text takes what is written to it");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (unix_s, expected) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (951_868_799, "2000-02-29 23:59 UTC"),
            (951_868_800, "2000-03-01 00:00 UTC"),
            (1_735_689_599, "2024-12-31 23:59 UTC"),
            (1_735_689_600, "2025-01-01 00:00 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
            (16_725_225_600, "2500-01-01 00:00 UTC"),
        ] {
            assert_eq!(utc(unix_s), expected);
        }
        assert!(utc(u64::MAX).ends_with(" UTC"));
    }

    #[test]
    fn spans_say_what_matters() {
        let words = [5, 65, 3_700, 90_000].map(span);
        assert_eq!(words, ["5 s", "1 min 5 s", "1 h 1 min", "1 d 1 h"]);
    }
}
