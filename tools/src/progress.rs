//! How far the work is: bytes, rate, time left, bad blocks so far.
//!
//! Shown on standard error, only on a terminal, and only when the work has taken longer than a second: short work stays
//! silent, and so do pipes, `--json` and `--quiet`. Counting continues meanwhile, so that the bar is right when it appears.

use std::fmt::Write;
use std::io::{self, IsTerminal};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, MultiProgress, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use sealblock_units::ByteCount;

/// Work that is done sooner shows nothing.
const SHOW_DELAY: Duration = Duration::from_secs(1);
/// How often the picture is renewed.
const DRAWS_PER_SECOND: u8 = 10;

/// The lines of the terminal: work on several targets has one each.
static LINES: LazyLock<MultiProgress> =
    LazyLock::new(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(DRAWS_PER_SECOND)));

const BOUNDED: &str = "{prefix} {bar:30} {bytes}/{total_bytes} {rate} {eta} left{msg}";
const UNBOUNDED: &str = "{prefix} {spinner} {bytes} {rate}{msg}";
const STEPS: &str = "{elapsed} {msg}";

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
    bad_blocks: AtomicU64,
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
        let template = if total.is_some() { BOUNDED } else { UNBOUNDED };
        let moved = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&moved);
        let rate = move |state: &ProgressState, words: &mut dyn Write| {
            let rate = counted.load(Ordering::Relaxed) as f64 / state.elapsed().as_secs_f64().max(1e-3);
            // Infallible for the text that it goes to.
            let _ = write!(words, "{}/s", HumanBytes(rate as u64));
        };
        let style = ProgressStyle::with_template(template).expect("the templates above are well formed");
        bar.set_style(style.with_key("rate", rate));
        bar.set_prefix(what.to_owned());
        let waiting = AtomicBool::new(due.is_some());
        Progress { bar, bad_blocks: AtomicU64::new(0), moved, due: Mutex::new(due), waiting }
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
        let bad = self.bad_blocks.fetch_add(blocks, Ordering::Relaxed).saturating_add(blocks);
        self.bar.set_message(format!(", {bad} bad"));
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
        assert_eq!(progress.bar.message(), ", 3 bad");
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
    fn both_pictures_are_well_formed() {
        for total in [None, Some(ByteCount::new(1))] {
            assert_eq!(Progress::due_at("x", total, None).bar.prefix(), "x");
        }
    }
}
