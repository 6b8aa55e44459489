//! The log of the server: lines on standard error, as text or as JSON objects.
//!
//! Invariants: a log entry is always one line and cannot affect a terminal: control characters are written as escapes.
//! What a call site logs too often is logged `MAX_LINES` times in `WINDOW`, and then only counted; debug lines are
//! never suppressed. The last warnings and errors are kept for `status`, `MAX_KEPT_LINES` for each call site, so that
//! one that logs much does not displace the lines of the others.

use std::collections::{HashMap, VecDeque};
use std::env;
use std::fmt::{self, Write as _};
use std::io;
use std::sync::{LazyLock, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use sealblock_stack::{Cause, Program, StackError, printable, set_program};
use serde_json::{Map, Value};
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Registry, reload};

use crate::control::protocol::{ControlError, ControlErrorKind, LogLevel, LogReport};
use crate::line_writer::LineWriter;

/// The variable with the level, if the command line has none.
const VARIABLE: &str = "SEALBLOCK_LOG";
/// The maximum number of lines of one call site in [`WINDOW`].
const MAX_LINES: u32 = 20;
/// The time after which a call site may log again.
const WINDOW: Duration = Duration::from_secs(10);
/// The field with the number of suppressed lines.
const SUPPRESSED_FIELD: &str = "suppressed";

/// The number of kept lines for each call site.
const MAX_KEPT_LINES: usize = 8;
/// The maximum number of characters of one text that are kept.
const MAX_CHARACTERS: usize = 300;

static RECENT: LazyLock<Mutex<Recent>> = LazyLock::new(Mutex::default);

/// From now on writes log lines to standard error: warnings and errors, or the requested level.
///
/// # Errors
/// Bad usage, if the variable does not contain a level.
pub fn install(asked: Option<LogLevel>, json: bool) -> Result<LogGuard, StackError> {
    let level = match (asked, env::var(VARIABLE)) {
        (Some(level), _) => level,
        (None, Ok(text)) => {
            level_of(&text).map_err(|why| StackError::new(Cause::Usage, "read the environment", why))?
        }
        (None, Err(_)) => LogLevel::default(),
    };
    let writer = LineWriter::start(io::stderr(), move |lost| lost_text(lost, json))
        .map_err(|error| StackError::io("start", &error))?;
    let (made, handle) = reload::Layer::new(made(level));
    let to_lines = writer.clone();
    let lines = tracing_subscriber::fmt::layer()
        // If standard error is closed, this is no reason to end.
        .log_internal_errors(false)
        .event_format(Lines { json, quotas: Mutex::default() })
        .with_writer(move || to_lines.clone());
    *lock(&LEVEL) = level;
    let installed = tracing_subscriber::registry().with(made).with(lines).try_init();
    installed.map_err(|error| StackError::new(Cause::Io, "start", error))?;
    // There was nothing before, otherwise there would have been an error.
    let _ = MADE.set(handle);
    set_program(Program::SERVER);
    Ok(LogGuard(writer))
}

/// The end of the log: dropping it writes the remaining lines.
pub struct LogGuard(LineWriter);

impl LogGuard {
    /// Logs why the server ends, as a JSON object.
    pub fn report_end(&self, failure: &StackError) {
        let mut line = LogLine::begin(Level::ERROR);
        line.put("message", Value::from(one_line(&failure.in_short())));
        if let Some(advice) = failure.advice() {
            line.put("try", Value::from(one_line(advice)));
        }
        self.0.put(line.into_line(true).into_bytes());
    }
}

impl Drop for LogGuard {
    fn drop(&mut self) {
        self.0.finish();
    }
}

fn lost_text(lost: u64, json: bool) -> Vec<u8> {
    let mut line = LogLine::begin(Level::WARN);
    line.put("message", Value::from("log lines were dropped because standard error was not read"));
    line.put("lines", Value::from(lost));
    line.into_line(json).into_bytes()
}

/// The level of the lines that are written.
static LEVEL: Mutex<LogLevel> = Mutex::new(LogLevel::Warn);
/// Selects the lines that are formatted at all.
static MADE: OnceLock<reload::Handle<LevelFilter, Registry>> = OnceLock::new();

/// Which lines are formatted: lines that are not written are still kept for `status`.
fn made(level: LogLevel) -> LevelFilter {
    filter(level).max(LevelFilter::WARN)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the level, if one is given; returns the previous and the current level.
///
/// # Errors
/// If this log was not installed in this process.
pub fn change(level: Option<LogLevel>) -> Result<LogReport, ControlError> {
    let before = *lock(&LEVEL);
    let report = LogReport { pid: std::process::id(), before, level: level.unwrap_or(before) };
    if report.level == before {
        return Ok(report);
    }
    let tell = || tracing::info!(before = before.as_str(), level = report.level.as_str(), "the log level was changed");
    let is_less = filter(report.level) < filter(before);
    // Logged at the more verbose of the two levels.
    if is_less {
        tell();
    }
    let reloaded = MADE.get().map(|handle| handle.reload(made(report.level)));
    match reloaded {
        Some(Ok(())) => *lock(&LEVEL) = report.level,
        Some(Err(error)) => return Err(ControlError::new(ControlErrorKind::Failed, error)),
        None => return Err(ControlError::new(ControlErrorKind::Failed, "this process has no log")),
    }
    if !is_less {
        tell();
    }
    Ok(report)
}

fn level_of(text: &str) -> Result<LogLevel, String> {
    LogLevel::from_name(text).ok_or_else(|| format!("{VARIABLE}={text}: must be off, error, warn, info or debug"))
}

fn filter(level: LogLevel) -> LevelFilter {
    level.as_str().parse().expect("filters have the same names")
}

/// The format of lines, and the limits for their number.
struct Lines {
    json: bool,
    /// By call site; the number of call sites is limited.
    quotas: Mutex<HashMap<Identifier, Quota>>,
}

/// What one call site has logged in this window.
#[derive(Default)]
struct Quota {
    since: Option<Instant>,
    told: u32,
    left_out: u64,
}

impl Quota {
    /// If the line may be logged, how many were suppressed before it.
    fn take(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= WINDOW) {
            (self.since, self.told) = (Some(now), 0);
        }
        if self.told >= MAX_LINES {
            self.left_out += 1;
            return None;
        }
        self.told += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

impl Lines {
    fn left_out_before(&self, event: &Event<'_>) -> Option<u64> {
        if *event.metadata().level() >= Level::DEBUG {
            return Some(0);
        }
        lock(&self.quotas).entry(event.metadata().callsite()).or_default().take(Instant::now())
    }
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        // A suppressed line is not formatted.
        let Some(left_out) = self.left_out_before(event) else { return Ok(()) };
        let mut line = LogLine::begin(*event.metadata().level());
        event.record(&mut line);
        if left_out > 0 {
            line.put(SUPPRESSED_FIELD, Value::from(left_out));
        }
        if *event.metadata().level() <= Level::WARN {
            keep(event.metadata().callsite(), &line.fields);
        }
        if *event.metadata().level() > filter(*lock(&LEVEL)) {
            return Ok(());
        }
        writer.write_str(&line.into_line(self.json))
    }
}

/// The fields of one line.
struct LogLine {
    fields: Map<String, Value>,
}

impl LogLine {
    fn begin(level: Level) -> LogLine {
        let mut time = String::new();
        // A time before 1970 cannot be formatted.
        let _ = SystemTime.format_time(&mut Writer::new(&mut time));
        let mut line = LogLine { fields: Map::new() };
        line.put("time", Value::from(time));
        line.put("level", Value::from(level.as_str().to_ascii_lowercase()));
        line
    }

    fn put(&mut self, name: &str, value: Value) {
        self.fields.insert(name.to_owned(), value);
    }

    /// The line with its end, as a JSON object or as text for people.
    fn into_line(self, json: bool) -> String {
        let text = if json { Value::Object(self.fields).to_string() } else { self.to_text() };
        text + "\n"
    }

    /// Text for people: time, level, message, and the other fields.
    fn to_text(&self) -> String {
        let text = |name: &str| self.fields.get(name).and_then(Value::as_str).unwrap_or_default();
        let mut words = format!("{} {:>5} {}", text("time"), text("level").to_ascii_uppercase(), text("message"));
        for (name, value) in
            self.fields.iter().filter(|(name, _)| !["time", "level", "message"].contains(&name.as_str()))
        {
            let shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            write!(words, " {name}={shown}").expect("a text takes what is written to it");
        }
        words
    }
}

impl Visit for LogLine {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field.name(), Value::from(one_line(&format!("{value:?}"))));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field.name(), Value::from(one_line(value)));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field.name(), Value::from(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field.name(), Value::from(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field.name(), Value::from(value));
    }
}

/// The last lines of a call site, each with its number among all lines.
type KeptLines = VecDeque<(u64, Map<String, Value>)>;

/// Lines by call site.
#[derive(Default)]
struct Recent {
    told: u64,
    by_place: HashMap<Identifier, KeptLines>,
}

/// Keeps a line.
fn keep(place: Identifier, line: &Map<String, Value>) {
    let mut recent = lock(&RECENT);
    recent.told += 1;
    let number = recent.told;
    put(recent.by_place.entry(place).or_default(), number, line);
}

fn put(lines: &mut KeptLines, number: u64, line: &Map<String, Value>) {
    if lines.len() >= MAX_KEPT_LINES {
        lines.pop_front();
    }
    lines.push_back((number, line.iter().map(|(name, value)| (name.clone(), cut(value))).collect()));
}

fn cut(value: &Value) -> Value {
    match value {
        Value::String(text) => Value::from(text.chars().take(MAX_CHARACTERS).collect::<String>()),
        other => other.clone(),
    }
}

/// The last warnings and errors, at most `most` of them, oldest first.
pub fn last(most: usize) -> Vec<Map<String, Value>> {
    let recent = lock(&RECENT);
    let mut lines: Vec<_> = recent.by_place.values().flatten().collect();
    lines.sort_unstable_by_key(|(number, _)| *number);
    lines[lines.len().saturating_sub(most)..].iter().map(|(_, line)| line.clone()).collect()
}

/// The text in one line, without characters that move the cursor.
fn one_line(text: &str) -> String {
    printable(&text.trim_end().replace(['\n', '\r', '\t'], " ")).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_known_by_name_and_others_refused_with_the_names() {
        assert_eq!(level_of("Debug"), Ok(LogLevel::Debug));
        assert_eq!(level_of("off").map(filter), Ok(LevelFilter::OFF));
        assert!(level_of("loud").unwrap_err().contains("SEALBLOCK_LOG=loud: must be off, error, warn"));
    }

    #[test]
    fn a_flood_is_told_as_a_number() {
        let (mut quota, start) = (Quota::default(), Instant::now());
        for _ in 0..MAX_LINES {
            assert_eq!(quota.take(start), Some(0));
        }
        for _ in 0..300 {
            assert_eq!(quota.take(start + WINDOW / 2), None);
        }
        assert_eq!(quota.take(start + WINDOW), Some(300));
        assert_eq!(quota.take(start + WINDOW), Some(0));
    }

    #[test]
    fn a_line_is_one_line_and_spells_its_fields() {
        let mut line = LogLine::begin(Level::WARN);
        line.put("message", Value::from(one_line("it failed:\n\u{1b}[2Jtry something\n")));
        line.put("blocks", Value::from(7));
        line.put("target", Value::from("v"));
        let words = line.to_text();
        assert!(words.ends_with("  WARN it failed: \\u{1b}[2Jtry something blocks=7 target=v"), "{words}");
        assert!(words.starts_with("20") && words.contains('T'), "{words}");
    }

    #[test]
    fn a_place_that_tells_much_keeps_its_last_lines_and_no_long_ones() {
        let mut lines = VecDeque::new();
        for number in 0..100 {
            let text = "x".repeat(10_000);
            let line = Map::from_iter([("n".to_owned(), number.into()), ("text".to_owned(), Value::from(text))]);
            put(&mut lines, number, &line);
        }
        assert_eq!(
            (lines.len(), lines[0].0, lines[MAX_KEPT_LINES - 1].0),
            (MAX_KEPT_LINES, 100 - MAX_KEPT_LINES as u64, 99)
        );
        assert_eq!(lines[0].1["text"].as_str().map(str::len), Some(MAX_CHARACTERS));
    }
}
