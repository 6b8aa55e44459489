//! A scrub as text.

use sealblock_stack::quantity::count;
use sealblock_units::ByteCount;

use crate::report::Lines;

use sealblock_server::dates::{date, span};
use sealblock_server::status::damage::DamageStatus;
use sealblock_server::status::health::Checked;
use sealblock_server::status::scrub::{ResultWord, RunStatus, SavedWord, ScrubStatus, StateWord};

/// The whole state.
pub fn to_text(status: &ScrubStatus) -> String {
    let mut text = Lines::new(0);
    text.line(line(status));
    if let Some(error) = &status.error {
        text.line(format!("  suspended: {error}"));
    }
    if let Some(run) = &status.run {
        text.line(format!(
            "  running since {}: {}",
            date(run.started_unix_s),
            counts(run, status.checked, status.why_older().is_some())
        ));
    }
    let rate = status.rate.map(|rate| format!("at most {}/s", ByteCount::new(rate.get())));
    let every = status.every_s.map(|every| format!("every {}", span(every)));
    let settings: Vec<String> = [rate, every].into_iter().flatten().collect();
    if !settings.is_empty() {
        text.line(format!("  {}", settings.join(", ")));
    }
    if let Some(next) = status.next_unix_s {
        text.line(format!("  next scrub {}", date(next)));
    }
    match status.completed_unix_s {
        Some(at) => text.line(format!("  last full scrub {}", date(at))),
        None => text.line(format!("  {}", never_text(status))),
    }
    // Without a server, a note on standard error says the same.
    if let Some(why) = status.why_older().filter(|_| status.server_pid.is_some()) {
        text.line(format!("  blocks may be older than what was written: {why}"));
    }
    if let Some(damage) = status.damage.as_ref().filter(|damage| damage.has_any()) {
        let known = if damage.is_only_lost() { "" } else { "known damage: " };
        text.line(format!("  {known}{}", damage.to_text()));
    }
    if let Some(made) = status.damage.as_ref().and_then(DamageStatus::made_text) {
        text.line(format!("  {made}; a scrub counts them as unrepaired"));
    }
    for run in status.runs.iter().rev() {
        text.line(format!("  {}", past(run, status)));
    }
    if status.saved == SavedWord::InMemory {
        let why = status.saved_why.as_deref().unwrap_or("the device has no room for it");
        text.line(format!("  these results are in memory only, until the server exits: {why}"));
    }
    text.into_text()
}

/// What is known of a target of which no scrub has checked all blocks that it has now.
fn never_text(status: &ScrubStatus) -> &'static str {
    let is_lost = status.damage.as_ref().is_some_and(|damage| !damage.lost_lists.is_empty());
    let is_earlier =
        |run: &RunStatus| run.from == 0 && matches!(run.result, Some(ResultWord::Finished | ResultWord::Incomplete));
    match (status.runs.iter().any(is_earlier), is_lost) {
        (true, _) => "never fully scrubbed since it grew",
        (false, true) => "last full scrub unknown: the state of the scrub was lost, too",
        (false, false) => "never fully scrubbed",
    }
}

/// The most important in one line.
pub fn line(status: &ScrubStatus) -> String {
    format!("{}: {}", status.target, run_text(status))
}

/// The same without the target.
pub fn run_text(status: &ScrubStatus) -> String {
    let state = match status.state {
        StateWord::Idle => "idle",
        StateWord::Running if status.yielding => "running, yielding to other requests",
        StateWord::Running => "running",
        StateWord::Paused => "paused",
        StateWord::Waiting => "scheduled",
        StateWord::Interrupted => "interrupted, continues when served",
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
pub fn past(run: &RunStatus, status: &ScrubStatus) -> String {
    let result = match run.result {
        Some(ResultWord::Finished) => "finished",
        Some(ResultWord::Incomplete) => "incomplete",
        Some(ResultWord::Stopped) => "stopped",
        None => "ended",
    };
    let took = run.ended_unix_s.map_or(0, |ended| ended.saturating_sub(run.started_unix_s));
    let from = if run.from == 0 { String::new() } else { format!(" from block {}", run.from) };
    format!(
        "{}: {result} after {}{from}: {}",
        date(run.started_unix_s),
        span(took),
        counts(run, status.checked, status.why_older().is_some())
    )
}

/// What a run has met, in the words of `verify`.
fn counts(run: &RunStatus, checked: Checked, is_older: bool) -> String {
    let blocks = count(run.blocks, "block");
    let found = match (run.bad, run.unchecked, checked) {
        (0, 0, _) if is_older => format!("{blocks}, no damage found"),
        (0, 0, Checked::Seals) => format!("{blocks}, clean"),
        (0, 0, Checked::Readability) => format!("{blocks}, readable; not every block has a seal"),
        (0, ..) => blocks,
        (bad, ..) => format!("{blocks}, {bad} bad, {} repaired, {} unrepaired", run.repaired, run.unrepaired),
    };
    match run.unchecked {
        0 => found,
        blocks => format!("{found}, {blocks} with unchecked copies"),
    }
}
