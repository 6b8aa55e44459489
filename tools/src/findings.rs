//! Findings are printed during the work: runs of blocks, each on its own line when it has ended.
//!
//! A device with every second block bad has too many runs to read, and printing them must not slow down the work.
//! So lines are rate limited; the others are queued and printed when the limit permits, at the latest at the end.

use std::time::{Duration, Instant};

use sealblock_stack::StackError;
use sealblock_stack::range::Run;
use sealblock_units::Lba;

use crate::progress::Progress;
use crate::report::{say, say_aside};

/// Runs that are kept; blocks of further ones are counted.
pub const MAX_LISTED: usize = 1 << 20;
/// Lines that may be printed at once.
const BURST: u32 = 100;
/// One more line may be printed each time this has passed: twenty a second.
const LINE_EVERY: Duration = Duration::from_millis(50);

/// Where lines go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OutputStream {
    /// Standard output.
    Output,
    /// Standard error: standard output is for data.
    Error,
    /// Nowhere: the report has them.
    Silent,
}

/// How often a run is printed as far as it goes that has not ended.
const OPEN_EVERY: Duration = Duration::from_secs(2);

/// Runs in the order in which their blocks were looked at, and how many of them were printed.
pub struct Findings<T> {
    voice: OutputStream,
    runs: Vec<Run<T>>,
    /// Runs that may still grow. Several if blocks have findings on several members.
    open: Vec<Run<T>>,
    /// When an open run was printed last, as far as it went, or else when the first of them began.
    last_word: Option<Instant>,
    printed: usize,
    unlisted: u64,
    budget: Budget,
    trouble: Option<StackError>,
}

/// What may be found of blocks.
pub trait Finding: PartialEq + Sized {
    /// The line for these blocks.
    fn line(run: &Run<Self>) -> String;
}

impl<T: Finding> Findings<T> {
    /// None yet.
    pub fn new(voice: OutputStream) -> Findings<T> {
        let budget = Budget::new(Instant::now());
        Findings {
            voice,
            runs: Vec::new(),
            open: Vec::new(),
            last_word: None,
            printed: 0,
            unlisted: 0,
            budget,
            trouble: None,
        }
    }

    /// Adds a finding of these blocks, which are not before those of earlier calls.
    pub fn note(&mut self, more: Run<T>) {
        match self.open.iter_mut().find(|run| run.end() == more.lba && run.what == more.what) {
            Some(run) => run.blocks += more.blocks,
            None => {
                self.close(more.lba);
                self.open.push(more);
            }
        }
    }

    /// Everything before this block was looked at: runs that end before it have ended, and are printed as far as the rate allows.
    pub fn reached(&mut self, lba: Lba, progress: &Progress) {
        self.close(lba.get());
        if self.voice == OutputStream::Silent {
            return;
        }
        let now = Instant::now();
        self.budget.refill(now);
        while self.printed < self.runs.len() && self.budget.take() {
            self.print_next(progress);
        }
        if let Some(line) = self.line_so_far(now) {
            self.print(&line, progress);
        }
    }

    /// The line of a run that goes on and on, each time that nothing was said of it for so long: a target that fails everywhere has
    /// one run, which ends with the work.
    fn line_so_far(&mut self, now: Instant) -> Option<String> {
        let run = self.open.first().filter(|_| self.printed == self.runs.len());
        let since = match run {
            Some(_) => *self.last_word.get_or_insert(now),
            None => {
                self.last_word = None;
                return None;
            }
        };
        let line = run.filter(|_| now.saturating_duration_since(since) >= OPEN_EVERY).map(T::line)?;
        self.last_word = Some(now);
        Some(format!("{line}; continued"))
    }

    /// Prints all lines that were not printed yet.
    ///
    /// # Errors
    /// When it could not be printed; a reader that has gone is no error.
    pub fn finish(&mut self, progress: &Progress) -> Result<(), StackError> {
        self.close(u64::MAX);
        while self.voice != OutputStream::Silent && self.printed < self.runs.len() {
            self.print_next(progress);
        }
        self.trouble.take().map_or(Ok(()), Err)
    }

    /// All runs that are listed, in order, and how many blocks are in runs that are not.
    pub fn into_runs(mut self) -> (Vec<Run<T>>, u64) {
        self.close(u64::MAX);
        (self.runs, self.unlisted)
    }

    /// Blocks in runs that are not listed.
    pub fn unlisted(&self) -> u64 {
        self.unlisted
    }

    fn close(&mut self, before: u64) {
        // A run that ends right there may go on.
        let ended = self.open.extract_if(.., |run| run.end() < before || before == u64::MAX);
        for run in ended {
            if self.runs.len() < MAX_LISTED {
                self.runs.push(run);
            } else {
                self.unlisted += run.blocks;
            }
        }
    }

    fn print_next(&mut self, progress: &Progress) {
        let line = T::line(&self.runs[self.printed]);
        self.printed += 1;
        self.print(&line, progress);
    }

    fn print(&mut self, line: &str, progress: &Progress) {
        if self.trouble.is_none() {
            let voice = self.voice;
            let said = progress.aside(|| match voice {
                OutputStream::Error => {
                    say_aside(line);
                    Ok(())
                }
                _ => say(line),
            });
            self.trouble = said.err();
        }
    }
}

/// How many lines may be printed.
struct Budget {
    lines: u32,
    refilled: Instant,
}

impl Budget {
    fn new(now: Instant) -> Budget {
        Budget { lines: BURST, refilled: now }
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.refilled);
        let lines = (passed.as_millis() / LINE_EVERY.as_millis()).min(BURST.into()) as u32;
        if lines > 0 {
            self.refilled = now;
            self.lines = (self.lines + lines).min(BURST);
        }
    }

    fn take(&mut self) -> bool {
        self.lines.checked_sub(1).map(|left| self.lines = left).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Show;

    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    struct On(&'static str);

    impl Finding for On {
        fn line(run: &Run<On>) -> String {
            format!("{} on {}", run.place(), run.what.0)
        }
    }

    fn lines(findings: Findings<On>) -> Vec<String> {
        findings.into_runs().0.iter().map(On::line).collect()
    }

    #[test]
    fn blocks_in_a_row_are_one_run_for_each_of_what_there_is_to_say() {
        let mut findings = Findings::new(OutputStream::Silent);
        for lba in [7, 8, 9, 11] {
            findings.note(Run::new(lba, 1, On("a")));
            if lba < 9 {
                findings.note(Run::new(lba, 1, On("b")));
            }
        }
        findings.note(Run::new(12, 20, On("a")));
        assert_eq!(lines(findings), ["blocks 7..9 on a", "blocks 7..8 on b", "blocks 11..31 on a"]);
    }

    #[test]
    fn a_run_is_told_when_it_has_ended_and_not_before() {
        let progress = Progress::new("x", None, Show::Never);
        let mut findings = Findings::new(OutputStream::Error);
        findings.note(Run::new(5, 2, On("a")));
        findings.reached(Lba::new(7), &progress);
        assert_eq!(findings.printed, 0, "block 7 may be one of them");
        findings.reached(Lba::new(8), &progress);
        assert_eq!((findings.printed, findings.runs.len()), (1, 1));
        findings.note(Run::new(9, 1, On("a")));
        findings.finish(&progress).unwrap();
        assert_eq!(findings.printed, 2);
    }

    #[test]
    fn a_run_that_does_not_end_is_told_as_far_as_it_goes() {
        let mut findings = Findings::new(OutputStream::Error);
        let start = Instant::now();
        assert_eq!(findings.line_so_far(start), None, "there is none");
        findings.note(Run::new(0, 8, On("a")));
        assert_eq!(findings.line_so_far(start), None, "it may end at once");
        findings.note(Run::new(8, 8, On("a")));
        let told = findings.line_so_far(start + OPEN_EVERY);
        assert_eq!(told.as_deref(), Some("blocks 0..15 on a; continued"));
        assert_eq!(findings.line_so_far(start + OPEN_EVERY), None, "not over and over");
        findings.note(Run::new(16, 4, On("a")));
        let told = findings.line_so_far(start + OPEN_EVERY * 2);
        assert_eq!(told.as_deref(), Some("blocks 0..19 on a; continued"));
        findings.finish(&Progress::new("x", None, Show::Never)).unwrap();
        assert_eq!(findings.line_so_far(start + OPEN_EVERY * 9), None);
        assert_eq!(lines(findings), ["blocks 0..19 on a"], "the run itself stays one");
    }

    #[test]
    fn what_comes_too_fast_is_told_later_and_nothing_is_left_out() {
        let mut budget = Budget::new(Instant::now());
        let printed = |budget: &mut Budget| std::iter::from_fn(|| budget.take().then_some(())).count();
        assert_eq!(printed(&mut budget), BURST as usize);
        let start = budget.refilled;
        budget.refill(start + LINE_EVERY / 2);
        assert_eq!(printed(&mut budget), 0);
        budget.refill(start + LINE_EVERY * 3);
        assert_eq!(printed(&mut budget), 3);
        budget.refill(start + Duration::from_secs(3600));
        assert_eq!(printed(&mut budget), BURST as usize);

        let progress = Progress::new("x", None, Show::Never);
        let mut findings = Findings::new(OutputStream::Error);
        for lba in 0..u64::from(BURST) + 50 {
            findings.note(Run::new(lba * 2, 1, On("a")));
            findings.reached(Lba::new(lba * 2 + 2), &progress);
        }
        assert!((BURST as usize..BURST as usize + 20).contains(&findings.printed), "{}", findings.printed);
        findings.finish(&progress).unwrap();
        assert_eq!((findings.printed, findings.runs.len()), (150, 150));
    }

    #[test]
    fn runs_beyond_the_most_are_counted() {
        let mut findings = Findings::new(OutputStream::Silent);
        for lba in 0..MAX_LISTED as u64 + 3 {
            findings.note(Run::new(lba * 3, 2, On("a")));
        }
        let (runs, unlisted) = findings.into_runs();
        assert_eq!((runs.len(), unlisted), (MAX_LISTED, 6));
    }
}
