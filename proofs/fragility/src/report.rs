//! The results of all trials: a line for each region, damage and state.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use crate::damage::{Cell, Fault, Reach, Target};
use crate::specimen::State;
use crate::trial::Outcome;

/// A line of the result table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Key {
    /// The place and the kind of damage.
    pub cell: Cell,
    /// The state.
    pub state: State,
    /// Bytes of a sector.
    pub sector_bytes: u32,
}

/// The results of the trials of a line.
#[derive(Clone, Copy, Default, Debug)]
pub struct Line {
    /// Trials.
    pub trials: u64,
    /// Trials in which the volume did not open read-only.
    pub refused: u64,
    /// Trials in which it opened read-only but could not be written.
    pub unwritable: u64,
    /// Trials in which a block had bytes that no client wrote, or read as if it had never been written.
    pub wrong: u64,
    /// Trials in which a block had an older content.
    pub stale: u64,
    /// Trials in which a block of the last commit before a crash had an older content.
    pub window: u64,
    /// Trials in which a 16-bit guard matched by chance.
    pub collisions: u64,
    /// Trials in which a block was lost that the damage did not cover.
    pub beyond: u64,
    /// The maximum number of lost blocks.
    pub worst: u64,
    /// The maximum number of blocks that the damage may cost.
    pub bound: u64,
    /// Trials with violations.
    pub broken: u64,
}

impl Line {
    /// The result of one trial.
    fn of(outcome: &Outcome, is_broken: bool) -> Line {
        Line {
            trials: 1,
            refused: u64::from(outcome.refused.is_some()),
            unwritable: u64::from(outcome.refused.is_none() && outcome.unwritable.is_some()),
            wrong: u64::from(outcome.wrong > 0),
            stale: u64::from(outcome.stale > 0),
            window: u64::from(outcome.window > 0),
            collisions: u64::from(outcome.collisions > 0),
            beyond: u64::from(outcome.beyond > 0),
            worst: outcome.lost,
            bound: outcome.bound,
            broken: u64::from(is_broken),
        }
    }

    /// Adds other trials.
    fn join(&mut self, other: &Line) {
        self.trials += other.trials;
        self.refused += other.refused;
        self.unwritable += other.unwritable;
        self.wrong += other.wrong;
        self.stale += other.stale;
        self.window += other.window;
        self.collisions += other.collisions;
        self.beyond += other.beyond;
        self.worst = self.worst.max(other.worst);
        self.bound = self.bound.max(other.bound);
        self.broken += other.broken;
    }
}

/// True if the damage cannot be detected, as the format documents. Older contents: a block's map entry and every copy
/// of its generation are rolled back together. A smaller volume: all superblocks are rolled back to a state before it
/// grew; contents are older only if the volume says so and opens for reading only. Lost blocks: an old log
/// names physical blocks that have other data by now; the volume detects that the log is older.
pub fn is_named(cell: Cell, outcome: &Outcome) -> bool {
    let is_all_of = |class: &str| cell.reach == Reach::Copies && cell.target.class() == class;
    let is_told = outcome.wrong == 0 && (outcome.stale == 0 || outcome.unwritable.is_some());
    if is_all_of("superblock") && cell.fault == Fault::Stale {
        return is_told && outcome.beyond == outcome.lost;
    }
    if cell.target == Target::SuperblocksAndLog {
        return is_told;
    }
    let only_stale = outcome.refused.is_none()
        && outcome.unwritable.is_none()
        && outcome.wrong == 0
        && outcome.beyond == 0
        && outcome.stale > 0;
    only_stale && (cell.target == Target::Tables && cell.fault == Fault::Stale)
}

/// All trials.
#[derive(Clone, Default, Debug)]
pub struct Report {
    lines: BTreeMap<Key, Line>,
}

impl Report {
    /// Adds a trial.
    pub fn take(&mut self, key: Key, outcome: &Outcome) -> bool {
        let is_broken = !outcome.findings.is_empty() && !is_named(key.cell, outcome);
        self.lines.entry(key).or_default().join(&Line::of(outcome, is_broken));
        is_broken
    }

    /// The totals of all trials, in one line.
    pub fn total(&self) -> Line {
        self.sum(|_| true)
    }

    fn sum(&self, of: impl Fn(&Key) -> bool) -> Line {
        let mut sum = Line::default();
        self.lines.iter().filter(|(key, _)| of(key)).for_each(|(_, line)| sum.join(line));
        sum
    }

    /// The table, in Markdown: a line for each region and damage; with `states`, one for each state of the volume as
    /// well.
    pub fn table(&self, states: bool) -> String {
        let mut text = head();
        let cells: BTreeSet<(Target, Reach, Fault)> =
            self.lines.keys().map(|Key { cell, .. }| (cell.target, cell.reach, cell.fault)).collect();
        for (target, reach, fault) in cells {
            let cell = Cell { target, reach, fault };
            let (place, damage) = (cell.target.to_string(), cell.damage());
            for state in State::ALL.iter().filter(|_| states) {
                let is = |key: &Key| key.cell == cell && key.state == *state;
                self.row(&mut text, &format!("{place} | {damage}, {state}"), is);
            }
            if !states {
                self.row(&mut text, &format!("{place} | {damage}"), |key| key.cell == cell);
            }
        }
        text
    }

    /// The same, shorter: one line for all copies of a region and all kinds of damage of one size.
    pub fn summary(&self) -> String {
        let mut text = head();
        let class = |key: &Key| (key.cell.target.class(), key.cell.reach, key.cell.fault == Fault::Flipped);
        let mut places: Vec<_> = self.lines.keys().map(class).collect();
        places.dedup();
        let mut seen = BTreeSet::new();
        places.retain(|place| seen.insert(*place));
        places.sort_by_key(|(place, reach, is_bit)| (first_of(self, place), *reach, !is_bit));
        for place in places {
            let damage = match place {
                (_, _, true) => "one bit",
                (_, Reach::Sector, _) => "one sector",
                (_, Reach::Run, _) => "64 KiB",
                (_, Reach::Region, _) => "a region",
                (_, Reach::Copies, _) => "all copies",
            };
            self.row(&mut text, &format!("{} | {damage}", place.0), |key| class(key) == place);
        }
        text
    }

    fn row(&self, text: &mut String, name: &str, is: impl Fn(&Key) -> bool) {
        let line = self.sum(&is);
        if line.trials == 0 {
            return;
        }
        let loss = |sector_bytes| {
            let line = self.sum(|key| is(key) && key.sector_bytes == sector_bytes);
            match line.trials {
                0 => "-".to_owned(),
                _ if line.beyond > 0 => format!("**{}** ({})", line.worst, line.bound),
                _ => format!("{} ({})", line.worst, line.bound),
            }
        };
        let Line { trials, refused, unwritable, wrong, stale, window, .. } = line;
        // Writing to a String does not fail.
        let _ = writeln!(
            text,
            "| {name} | {trials} | {refused} | {unwritable} | {wrong} | {stale} | {window} | {} | {} |",
            loss(512),
            loss(4096)
        );
    }
}

/// The position of the first region with this name.
fn first_of(report: &Report, class: &str) -> Option<usize> {
    report.lines.keys().position(|key| key.cell.target.class() == class)
}

fn head() -> String {
    String::from(
        "| where | damage | trials | not read | not written | wrong | older | of the last commit | lost of 512 | lost of 4096 |\n\
         | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_media_volume::format::RegionKind;

    const LOG: Cell = Cell { target: Target::Region(RegionKind::Log(0)), reach: Reach::Run, fault: Fault::Zeroed };

    fn key(cell: Cell, state: State) -> Key {
        Key { cell, state, sector_bytes: 512 }
    }

    #[test]
    fn lines_add_up_and_the_worst_counts() {
        let mut report = Report::default();
        let fine = Outcome { lost: 3, bound: 4, ..Outcome::default() };
        let bad = Outcome { lost: 9, bound: 1, beyond: 8, findings: vec!["lost".to_owned()], ..Outcome::default() };
        assert!(!report.take(key(LOG, State::Clean), &fine));
        assert!(report.take(key(LOG, State::Torn), &bad));
        let total = report.total();
        assert_eq!((total.trials, total.broken, total.worst, total.bound), (2, 1, 9, 4));
        assert!(report.table(false).contains("| log 0 | 64 KiB zeroed | 2 | 0 | 0 | 0 | 0 | 0 | **9** (4) | - |"));
        assert_eq!(report.table(true).lines().count(), 4);
        let other = Cell { target: Target::Region(RegionKind::Log(1)), fault: Fault::Stale, ..LOG };
        report.take(key(other, State::Idle), &Outcome::default());
        assert_eq!(report.table(false).lines().count(), 4);
        assert!(
            report.summary().ends_with("| log | 64 KiB | 3 | 0 | 0 | 0 | 0 | 0 | **9** (4) | - |\n"),
            "all copies in one"
        );
    }

    #[test]
    fn an_older_content_is_reported_only_if_map_entry_and_generations_were_restored_together() {
        let stale = Outcome { stale: 2, findings: vec!["older".to_owned()], ..Outcome::default() };
        let tables = Cell { target: Target::Tables, reach: Reach::Sector, fault: Fault::Stale };
        assert!(is_named(tables, &stale) && !is_named(LOG, &stale));
        assert!(!is_named(tables, &Outcome { wrong: 1, ..stale.clone() }));
        assert!(!is_named(Cell { fault: Fault::Zeroed, ..tables }, &stale));
    }
}
