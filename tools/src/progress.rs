//! How far the work is: bytes, rate, time left, bad blocks so far.
//!
//! Shown on standard error, only on a terminal, and only when the work has taken longer than a second: short work stays
//! silent, and so do pipes, `--json` and `--quiet`. Counting continues meanwhile, so that the bar is right when it appears.
//!
//! Each picture is one line of the terminal as it is then: what is wider than the terminal would stay behind when it is erased.

use std::fmt::{self, Write as _};
use std::io::{self, IsTerminal, Write as _};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle, TermLike};
use sealblock_units::ByteCount;

use crate::tally::rate;
use crate::terminal::columns;

/// Work that is done sooner shows nothing.
const SHOW_DELAY: Duration = Duration::from_secs(1);
/// How often the picture is renewed.
const DRAWS_PER_SECOND: u8 = 10;

/// The lines of the terminal: work on several targets has one each.
static LINES: LazyLock<MultiProgress> = LazyLock::new(|| {
    MultiProgress::with_draw_target(ProgressDrawTarget::term_like_with_hz(Box::<Screen>::default(), DRAWS_PER_SECOND))
});

const PICTURE: &str = "{picture}";
const STEPS: &str = "{elapsed} {wide_msg}";
/// The columns of a bar, of the least one that is shown, and of a name that is cut to make room for it.
const BAR: usize = 30;
const MIN_BAR: usize = 8;
const MIN_NAME: usize = 12;
/// Columns that stay free: a terminal shows a Ctrl-C as `^C` behind the picture, and where that begins a line the picture above it stays.
const MARGIN: usize = 3;
/// Where the width of the terminal cannot be read.
const COLUMNS: usize = 80;

/// Whether progress may be shown at all.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Show {
    /// When standard error is a terminal.
    OnTerminal,
    /// Never: for `--json` and `--quiet`.
    Never,
}

/// The progress of one piece of work. Any thread may report to it. Dropping it clears the screen line.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    bad_blocks: Arc<AtomicU64>,
    /// Bytes that were read or written: what the rate counts, since holes are covered in no time.
    moved: Arc<AtomicU64>,
    /// When the bar may appear; nothing once it has, or when it never will.
    due: Mutex<Option<Instant>>,
    /// Whether `due` is worth looking at, so that reporting takes no lock afterwards.
    waiting: AtomicBool,
}

impl Progress {
    /// Work named `what`, over this much data where that is known.
    pub fn new(what: &str, total: Option<ByteCount>, show: Show) -> Progress {
        let visible = show == Show::OnTerminal && io::stderr().is_terminal();
        Progress::due_at(what, total, visible.then(|| Instant::now() + SHOW_DELAY))
    }

    fn due_at(what: &str, total: Option<ByteCount>, due: Option<Instant>) -> Progress {
        let bar = ProgressBar::with_draw_target(total.map(ByteCount::get), ProgressDrawTarget::hidden());
        let (moved, bad_blocks) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let (counted, bad, name) = (Arc::clone(&moved), Arc::clone(&bad_blocks), what.to_owned());
        bar.set_style(drawn_by(move |state, width| {
            let bad = bad.load(Ordering::Relaxed);
            let picture = Picture {
                name: &name,
                done: state.pos(),
                total: state.len(),
                rate: rate(counted.load(Ordering::Relaxed), state.elapsed()),
                left: state.eta(),
                bad: if bad > 0 { format!(", {bad} bad") } else { String::new() },
            };
            picture.line(width)
        }));
        let waiting = AtomicBool::new(due.is_some());
        Progress { bar, bad_blocks, moved, due: Mutex::new(due), waiting }
    }

    /// This much more data is done, and was read or written for it.
    pub fn advance(&self, bytes: u64) {
        self.advance_by(bytes, bytes);
    }

    /// This much more data is done, of which so much was really read or written: the rest were holes.
    pub fn advance_by(&self, bytes: u64, moved: u64) {
        self.moved.fetch_add(moved, Ordering::Relaxed);
        self.bar.inc(bytes);
        if self.waiting.load(Ordering::Relaxed) {
            self.appear(Instant::now());
        }
    }

    /// This many more blocks are bad.
    pub fn bad(&self, blocks: u64) {
        self.bad_blocks.fetch_add(blocks, Ordering::Relaxed);
        self.bar.tick();
    }

    /// Bytes done so far.
    pub fn done_bytes(&self) -> u64 {
        self.bar.position()
    }

    /// Bad blocks so far.
    pub fn bad_blocks(&self) -> u64 {
        self.bad_blocks.load(Ordering::Relaxed)
    }

    /// Prints something without disturbing this bar or another one.
    pub fn aside<T>(&self, print: impl FnOnce() -> T) -> T {
        LINES.suspend(print)
    }

    /// Shows the bar if it is due at `now`.
    fn appear(&self, now: Instant) {
        // A thread that panicked while it held the lock left nothing half done: the value is replaced whole.
        let mut due = self.due.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if due.is_some_and(|due| due <= now) {
            *due = None;
            self.waiting.store(false, Ordering::Relaxed);
            LINES.add(self.bar.clone());
        }
    }

    #[cfg(test)]
    fn has_appeared(&self) -> bool {
        !self.waiting.load(Ordering::Relaxed)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
        LINES.remove(&self.bar);
    }
}

/// Erases what is shown, for the last words of a process that ends before its work does.
pub fn erase() {
    // What cannot be erased is on no terminal.
    let _ = LINES.clear();
    LINES.set_draw_target(ProgressDrawTarget::hidden());
}

/// A style whose whole line is made for the width of the terminal as it is when it is drawn.
fn drawn_by(line: impl Fn(&ProgressState, usize) -> String + Clone + Send + Sync + 'static) -> ProgressStyle {
    let picture = move |state: &ProgressState, words: &mut dyn fmt::Write| {
        let width = columns(io::stderr()).unwrap_or(COLUMNS).saturating_sub(MARGIN);
        // Infallible for the text that it goes to.
        let _ = words.write_str(&line(state, width));
    };
    ProgressStyle::with_template(PICTURE).expect("the template above is well formed").with_key("picture", picture)
}

/// Standard error, on which pictures are drawn. The library fills each line with spaces to have the next one begin; here the cursor stays
/// behind the text of the last one, see [`MARGIN`].
#[derive(Debug, Default)]
struct Screen(Mutex<Drawing>);

#[derive(Debug, Default)]
struct Drawing {
    text: String,
    /// Whether a line is full, so that what follows is on the next one.
    is_full: bool,
}

impl Screen {
    fn put(&self, words: fmt::Arguments<'_>) -> io::Result<()> {
        let mut drawing = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        drawing.text.write_fmt(words).map_err(io::Error::other)
    }

    fn take(&self) -> String {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())).text
    }
}

impl TermLike for Screen {
    fn width(&self) -> u16 {
        u16::try_from(columns(io::stderr()).unwrap_or(COLUMNS)).unwrap_or(u16::MAX)
    }

    fn move_cursor_up(&self, lines: usize) -> io::Result<()> {
        if lines > 0 { self.put(format_args!("\x1b[{lines}A")) } else { Ok(()) }
    }

    fn move_cursor_down(&self, lines: usize) -> io::Result<()> {
        if lines > 0 { self.put(format_args!("\x1b[{lines}B")) } else { Ok(()) }
    }

    fn move_cursor_right(&self, columns: usize) -> io::Result<()> {
        if columns > 0 { self.put(format_args!("\x1b[{columns}C")) } else { Ok(()) }
    }

    fn move_cursor_left(&self, columns: usize) -> io::Result<()> {
        if columns > 0 { self.put(format_args!("\x1b[{columns}D")) } else { Ok(()) }
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.put(format_args!("{text}\n"))
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        let mut drawing = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if text.trim_matches(' ').is_empty() {
            drawing.is_full = true;
            return Ok(());
        }
        if std::mem::take(&mut drawing.is_full) {
            drawing.text.push('\n');
        }
        drawing.text.push_str(text);
        Ok(())
    }

    fn clear_line(&self) -> io::Result<()> {
        self.put(format_args!("\r\x1b[2K"))
    }

    fn flush(&self) -> io::Result<()> {
        io::stderr().write_all(self.take().as_bytes())
    }
}

/// What is shown of a piece of work.
struct Picture<'a> {
    name: &'a str,
    done: u64,
    total: Option<u64>,
    rate: String,
    left: Duration,
    bad: String,
}

impl Picture<'_> {
    /// All of it in at most so many columns: first the bar goes, then a part of the name.
    fn line(&self, width: usize) -> String {
        let Picture { name, done, total, rate, left, bad } = self;
        let bytes = |bytes: u64| ByteCount::new(bytes).to_string();
        let numbers = match total {
            Some(total) => {
                format!("{} of {} {rate}, {} left{bad}", bytes(*done), bytes(*total), short(*left))
            }
            None => format!("{} {rate}{bad}", bytes(*done)),
        };
        let room = width.saturating_sub(numbers.chars().count() + 1);
        let name_length = name.chars().count();
        let bar = match total {
            Some(_) => {
                room.saturating_sub(name_length.min(room.saturating_sub(MIN_BAR + 1).max(MIN_NAME)) + 1).min(BAR)
            }
            None => 0,
        };
        let bar = if bar < MIN_BAR { 0 } else { bar };
        let name = shortened(name, if bar == 0 { room } else { room - bar - 1 });
        let line = match (bar, total) {
            (1.., Some(total)) => {
                let filled = (u128::from(*done) * bar as u128 / u128::from(*total).max(1)) as usize;
                let filled = filled.min(bar);
                format!("{name} {}{} {numbers}", "█".repeat(filled), "░".repeat(bar - filled))
            }
            _ => format!("{name} {numbers}"),
        };
        line.chars().take(width).collect()
    }
}

/// A time in its two largest units.
fn short(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

/// A name in at most so many columns: its middle goes.
fn shortened(name: &str, columns: usize) -> String {
    let length = name.chars().count();
    if length <= columns {
        return name.to_owned();
    }
    let kept = columns.saturating_sub(1);
    let head = kept / 2;
    let tail = name.chars().skip(length - (kept - head));
    name.chars().take(head).chain((columns > 0).then_some('…')).chain(tail).collect()
}

/// The progress of work that has steps and no bytes: time so far, and what is done now. Dropping it clears the screen line.
///
/// It draws at a step only, so that it takes nothing from what is being measured between two.
#[derive(Debug)]
pub struct Steps(ProgressBar);

impl Steps {
    /// Work that begins now.
    pub fn new(show: Show) -> Steps {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        bar.set_style(ProgressStyle::with_template(STEPS).expect("the template above is well formed"));
        let visible = show == Show::OnTerminal && io::stderr().is_terminal();
        Steps(if visible { LINES.add(bar) } else { bar })
    }

    /// What is done from now on.
    pub fn at(&self, what: String) {
        self.0.set_message(what);
        self.0.tick();
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        self.0.finish_and_clear();
        LINES.remove(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_told_unseen() {
        let steps = Steps::new(Show::Never);
        steps.at("round 1 of 3".to_owned());
        assert_eq!((steps.0.message().as_str(), steps.0.is_hidden()), ("round 1 of 3", true));
    }

    #[test]
    fn counts_go_on_unseen() {
        let progress = Progress::new("verify v", Some(ByteCount::new(100)), Show::Never);
        progress.advance(30);
        progress.advance(12);
        progress.bad(1);
        progress.bad(2);
        assert_eq!((progress.done_bytes(), progress.bad_blocks()), (42, 3));
        assert!(progress.bar.is_hidden());
    }

    #[test]
    fn the_cursor_stays_behind_the_last_line() {
        let screen = Screen::default();
        for text in ["one", "    ", "two", "   "] {
            screen.write_str(text).unwrap();
        }
        assert_eq!(screen.take(), "one\ntwo");
        screen.write_str("\r").unwrap();
        screen.clear_line().unwrap();
        screen.move_cursor_up(0).unwrap();
        screen.move_cursor_up(2).unwrap();
        assert_eq!(screen.take(), "\r\r\x1b[2K\x1b[2A");
    }

    #[test]
    fn the_bar_appears_when_it_is_due_and_not_before() {
        let due = Instant::now() + Duration::from_secs(3600);
        let progress = Progress::due_at("copy", None, Some(due));
        progress.advance(1);
        assert!(!progress.has_appeared());
        progress.appear(due - Duration::from_nanos(1));
        assert!(!progress.has_appeared());
        progress.appear(due);
        assert!(progress.has_appeared());
    }

    #[test]
    fn a_picture_fits_the_terminal() {
        let picture = |name, total| Picture {
            name,
            done: 5 << 30,
            total,
            rate: "512 MiB/s".to_owned(),
            left: Duration::from_secs(90),
            bad: ", 3 bad".to_owned(),
        };
        let uri = "verifying nvme+tcp://192.0.2.7:4420/nqn.2026-11.io.sealblock:photos";
        for total in [Some(10 << 30), Some(0), None] {
            for width in 1..200 {
                for name in [uri, "verifying v"] {
                    let line = picture(name, total).line(width);
                    assert!(line.chars().count() <= width, "{width}: {line}");
                }
            }
        }
        let line = picture("verifying v", Some(10 << 30)).line(79);
        assert_eq!(line, "verifying v ███████████░░░░░░░░░░░ 5 GiB of 10 GiB 512 MiB/s, 1m30s left, 3 bad");
        let line = picture(uri, Some(10 << 30)).line(59);
        assert_eq!(line, "verify…:photos 5 GiB of 10 GiB 512 MiB/s, 1m30s left, 3 bad");
        assert_eq!([59, 3600, 90_000].map(|s| short(Duration::from_secs(s))), ["59s", "1h00m", "1d01h"]);
        assert_eq!(shortened("abcdef", 3), "a…f");
    }
}
