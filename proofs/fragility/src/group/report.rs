//! The results of all trials of groups: a line for each kind of damage.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write};

use crate::damage::Reach;
use crate::group::damage::{Cell, On, What};
use crate::group::shape::Kind;
use crate::group::trial::Outcome;

/// The results of the trials in one line of the table.
#[derive(Clone, Copy, Default, Debug)]
pub struct Line {
    trials: u64,
    refused: u64,
    unwritable: u64,
    without: u64,
    wrong: u64,
    older: u64,
    lost: u64,
    broken: u64,
}

impl Line {
    fn of(outcome: &Outcome) -> Line {
        Line {
            trials: 1,
            refused: u64::from(outcome.refused.is_some()),
            unwritable: u64::from(outcome.refused.is_none() && outcome.unwritable.is_some()),
            without: u64::from(outcome.is_without),
            wrong: u64::from(outcome.wrong > 0),
            older: u64::from(outcome.older > 0),
            lost: u64::from(outcome.lost > 0),
            broken: u64::from(!outcome.findings.is_empty()),
        }
    }

    fn join(&mut self, other: &Line) {
        self.trials += other.trials;
        self.refused += other.refused;
        self.unwritable += other.unwritable;
        self.without += other.without;
        self.wrong += other.wrong;
        self.older += other.older;
        self.lost += other.lost;
        self.broken += other.broken;
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Line { trials, refused, unwritable, without, wrong, older, lost, broken } = self;
        write!(f, "{trials} trials, {refused} refused, {unwritable} not writable, {without} without a member, ")?;
        write!(f, "{wrong} with wrong data, {older} with older data, {lost} with lost blocks, {broken} not as promised")
    }
}

/// All trials.
#[derive(Clone, Default, Debug)]
pub struct Report {
    lines: BTreeMap<(Kind, Cell), Line>,
}

/// The key of a line: mirrors or stripes, the damaged part, the members, and the size.
type Row = (bool, What, On, Reach);

fn row_of((kind, cell): &(Kind, Cell)) -> Row {
    (!kind.is_mirror(), cell.what, cell.on, cell.reach)
}

impl Report {
    /// Adds a trial.
    pub fn take(&mut self, key: (Kind, Cell), outcome: &Outcome) {
        self.lines.entry(key).or_default().join(&Line::of(outcome));
    }

    /// The totals of all trials, in one line.
    pub fn total(&self) -> Line {
        self.sum(|_| true)
    }

    fn sum(&self, of: impl Fn(&(Kind, Cell)) -> bool) -> Line {
        let mut sum = Line::default();
        self.lines.iter().filter(|(key, _)| of(key)).for_each(|(_, line)| sum.join(line));
        sum
    }

    /// The table, in Markdown.
    pub fn table(&self) -> String {
        let mut text = String::from(
            "| group | damage | on | trials | not opened | not written | without a member | wrong | older | lost |\n\
             | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
        );
        for row in self.lines.keys().map(row_of).collect::<BTreeSet<Row>>() {
            let (is_stripe, what, on, reach) = row;
            let group = if is_stripe { "stripe" } else { "mirror" };
            let how_much = match (what, reach) {
                (What::Label | What::Device, _) => String::new(),
                (_, Reach::Sector) => ", one sector".to_owned(),
                (_, Reach::Region) => ", one copy".to_owned(),
                (_, reach) => format!(", {}", reach.name()),
            };
            let Line { trials, refused, unwritable, without, wrong, older, lost, .. } =
                self.sum(|key| row_of(key) == row);
            // Writing to a String does not fail.
            let _ = writeln!(
                text,
                "| {group} | {what}{how_much} | {on} | {trials} | {refused} | {unwritable} | {without} | {wrong} | {older} | {lost} |"
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::damage::NewContent;

    #[test]
    fn a_row_has_all_replacement_contents_and_both_sizes_of_mirrors() {
        let cell = Cell { what: What::Log, reach: Reach::Run, content: NewContent::Stale, on: On::One };
        let mut report = Report::default();
        report.take((Kind::Mirror2, cell), &Outcome { lost: 3, ..Outcome::default() });
        report.take((Kind::Mirror3, Cell { content: NewContent::Blank, ..cell }), &Outcome::default());
        let refused =
            Outcome { refused: Some("no".to_owned()), findings: vec!["bad".to_owned()], ..Outcome::default() };
        report.take((Kind::Stripe2, cell), &refused);
        let table = report.table();
        assert!(table.contains("| mirror | log, 64 KiB | one member | 2 | 0 | 0 | 0 | 0 | 0 | 1 |"), "{table}");
        assert!(table.contains("| stripe | log, 64 KiB | one member | 1 | 1 | 0 | 0 | 0 | 0 | 0 |"), "{table}");
        assert!(report.total().to_string().ends_with("1 not as promised"));
    }
}
