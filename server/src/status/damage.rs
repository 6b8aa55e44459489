//! Known bad blocks, as `status`, `scrub status`, `mirror status` and `info` show them: how many, where, and the text.

use sealblock_block::{DamageCount, DamageRun, DamageSource};
use sealblock_exports_nvme_tcp::DamageHandle;
use sealblock_stack::quantity::count;
use sealblock_stack::{DamageView, lost_lists_text};
use serde::{Deserialize, Serialize};

use super::health::Health;
use crate::devices::bad_runs::blocks_text;

/// The maximum number of listed runs.
const MAX_RUNS: usize = 64;
/// The maximum number of runs that a sentence names.
const MAX_NAMED_RUNS: usize = 4;

/// Blocks that are known to be bad.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DamageStatus {
    /// Their minimum number.
    pub blocks: u64,
    /// Their maximum number: if there are too many runs to list, neighbouring ones are listed as one, which may contain
    /// good blocks.
    #[serde(default)]
    pub blocks_at_most: u64,
    /// True if these are all bad blocks that were found, all of them are bad, and no list was lost.
    pub complete: bool,
    /// The first of them, as runs.
    pub runs: Vec<RunOfDamage>,
    /// The number of blocks that are in none of these runs.
    pub unlisted: u64,
    /// Blocks that hosts have made unreadable on purpose; not counted above.
    pub made_unreadable: u64,
    /// Devices whose lists are lost when the process ends, each with the reason.
    #[serde(default)]
    pub not_saved: Vec<String>,
    /// Devices on other hosts whose servers may know of more, each with the reason why they were not queried.
    #[serde(default)]
    pub not_asked: Vec<String>,
    /// Devices whose lists were lost or put back to an earlier state, and of which not every block has been checked since:
    /// bad blocks that were known are not known any more.
    #[serde(default)]
    pub lost_lists: Vec<String>,
}

/// Consecutive bad blocks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RunOfDamage {
    /// The first block.
    pub first: u64,
    /// The last one.
    pub last: u64,
    /// What is wrong with them: a `field` as in `verify`.
    pub field: String,
}

impl DamageStatus {
    /// What is known about a served device.
    pub fn of_served(known: &DamageHandle) -> DamageStatus {
        DamageStatus::of_runs(&known.runs(), known.is_complete(), known.lost_lists())
    }

    /// What is known about an open target.
    pub fn of(view: &DamageView) -> DamageStatus {
        let texts = |devices: Vec<(String, &str)>| devices.iter().map(|(name, why)| format!("{name}: {why}")).collect();
        let (not_saved, not_asked) = (texts(view.not_saved()), texts(view.not_asked()));
        let known = DamageStatus::of_runs(&view.summary().0, view.is_complete(), view.lost_lists());
        DamageStatus { not_saved, not_asked, ..known }
    }

    fn of_runs(runs: &[DamageRun], is_complete: bool, lost_lists: Vec<String>) -> DamageStatus {
        let mut total = DamageCount::default();
        runs.iter().for_each(|run| total.add(run));
        let mut listed: Vec<RunOfDamage> = Vec::new();
        let mut unlisted = 0;
        for run in runs.iter().filter(|run| !run.is_made) {
            let (field, is_full) = (run.cause.as_str(), listed.len() == MAX_RUNS);
            match listed.last_mut() {
                // Once a run was left out, no block is joined to the last run.
                Some(last) if last.last + 1 == run.first && last.field == field && unlisted == 0 => {
                    last.last = run.last;
                }
                _ if is_full => unlisted += run.bad_blocks,
                _ => listed.push(RunOfDamage { first: run.first, last: run.last, field: field.to_owned() }),
            }
        }
        DamageStatus {
            blocks: total.least,
            blocks_at_most: total.most,
            complete: is_complete && total.least == total.most && lost_lists.is_empty(),
            runs: listed,
            unlisted,
            made_unreadable: total.made,
            not_saved: Vec::new(),
            not_asked: Vec::new(),
            lost_lists,
        }
    }

    /// True if no block is known to be bad, but a list was lost.
    pub fn is_only_lost(&self) -> bool {
        self.blocks.max(self.blocks_at_most) == 0 && !self.lost_lists.is_empty()
    }

    /// True if blocks are bad, or may be.
    pub fn has_any(&self) -> bool {
        self.blocks.max(self.blocks_at_most) > 0 || !self.complete
    }

    /// The health that follows from it, in every report: damaged if blocks are known to be bad, incomplete if it is only
    /// known that some may be.
    pub fn health(&self) -> Health {
        match (self.blocks, self.blocks_at_most) {
            (0, 1..) => Health::Incomplete,
            _ if self.is_only_lost() => Health::Incomplete,
            _ if self.has_any() => Health::Damaged,
            _ => Health::Healthy,
        }
    }

    /// How many blocks hosts have made unreadable, as text; `None` if there are none.
    pub fn made_text(&self) -> Option<String> {
        let blocks = count(self.made_unreadable, "block");
        (self.made_unreadable > 0)
            .then(|| format!("{blocks} made unreadable by hosts (Write Uncorrectable): no damage"))
    }

    /// How many blocks are bad, and where, and what is not known any more, as text.
    pub fn to_text(&self) -> String {
        let lost = lost_lists_text(&self.lost_lists);
        let known = (!self.is_only_lost()).then(|| self.blocks_text());
        known.into_iter().chain(lost).collect::<Vec<_>>().join("; ")
    }

    fn blocks_text(&self) -> String {
        let named = self.runs.iter().take(MAX_NAMED_RUNS);
        let mut runs: Vec<String> = named.map(|run| blocks_text(run.first, run.last)).collect();
        if self.runs.len() > MAX_NAMED_RUNS || self.unlisted > 0 {
            runs.push("and more".to_owned());
        }
        let places = if runs.is_empty() { String::new() } else { format!(" ({})", runs.join(", ")) };
        let are = if self.blocks == 1 { "is" } else { "are" };
        let blocks = count(self.blocks, "block");
        match (self.blocks, self.blocks_at_most) {
            (0, most) if most > 0 => format!("up to {} may be bad{places}", count(most, "block")),
            (least, most) if most > least => format!("at least {blocks}, at most {most}, {are} bad{places}"),
            (0, _) => "more blocks were bad than could be listed".to_owned(),
            _ if !self.complete && self.lost_lists.is_empty() => format!("at least {blocks} {are} bad{places}"),
            _ => format!("{blocks} {are} bad{places}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_block::BadBlockCause;
    use sealblock_integrity::Field;

    const GUARD: BadBlockCause = BadBlockCause::Tag(Field::Guard);

    fn of(runs: &[DamageRun]) -> DamageStatus {
        DamageStatus::of_runs(runs, true, Vec::new())
    }

    fn text(runs: &[DamageRun]) -> String {
        of(runs).to_text()
    }

    #[test]
    fn bad_blocks_are_counted_and_named() {
        let block = |lba| DamageRun::exact(lba, lba, GUARD);
        assert_eq!(text(&[block(9)]), "1 block is bad (9)");
        assert_eq!(text(&[block(5), block(6), block(9)]), "3 blocks are bad (5..6, 9)");
        let many: Vec<_> = (0..6).map(|n| block(n * 10)).collect();
        assert_eq!(text(&many), "6 blocks are bad (0, 10, 20, 30, and more)");
        let coarse = DamageRun { bad_blocks: 3, ..DamageRun::exact(0, 9, GUARD) };
        assert_eq!(text(&[coarse]), "at least 3 blocks, at most 10, are bad (0..9)");
        let rewritten = DamageRun { bad_blocks: 0, ..coarse };
        assert_eq!(text(&[rewritten]), "up to 10 blocks may be bad (0..9)");
        assert!(!of(&[]).has_any() && of(&[rewritten]).has_any());
        let health = |runs: &[DamageRun], is_complete| DamageStatus::of_runs(runs, is_complete, Vec::new()).health();
        assert_eq!(
            [&[][..], &[rewritten], &[coarse]].map(|runs| health(runs, true)),
            [Health::Healthy, Health::Incomplete, Health::Damaged]
        );
        assert_eq!(health(&[], false), Health::Damaged, "more than could be listed");
    }

    #[test]
    fn a_lost_list_is_not_complete_and_no_damage_by_itself() {
        let lost = |runs: &[DamageRun]| DamageStatus::of_runs(runs, true, vec!["a".to_owned()]);
        const LOST: &str = "the list of bad blocks of a was lost or put back to an earlier state: bad blocks that were known are not known any more";
        let none = lost(&[]);
        assert_eq!((none.complete, none.health(), none.to_text().as_str()), (false, Health::Incomplete, LOST));
        let one = lost(&[DamageRun::exact(9, 9, GUARD)]);
        let text = format!("1 block is bad (9); {LOST}");
        assert_eq!((one.complete, one.health(), one.to_text()), (false, Health::Damaged, text));
        let coarse = lost(&[DamageRun { bad_blocks: 0, ..DamageRun::exact(0, 9, GUARD) }]);
        assert_eq!(coarse.health(), Health::Incomplete);
        assert!(of(&[]).complete && of(&[]).health() == Health::Healthy);
    }

    #[test]
    fn what_hosts_made_unreadable_is_no_damage_and_what_is_not_listed_is_counted() {
        let made = DamageRun { is_made: true, ..DamageRun::exact(0, 3, BadBlockCause::Media) };
        let status = of(&[made]);
        assert_eq!((status.blocks, status.made_unreadable, status.has_any()), (0, 4, false));
        let runs: Vec<_> = (0..MAX_RUNS as u64 + 5).map(|n| DamageRun::exact(n * 3, n * 3, GUARD)).collect();
        let status = of(&runs);
        assert_eq!((status.runs.len(), status.unlisted, status.blocks), (MAX_RUNS, 5, MAX_RUNS as u64 + 5));
    }
}
