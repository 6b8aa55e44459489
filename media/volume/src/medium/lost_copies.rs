//! Counts lost copies of metadata, and records of other volumes in their places.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::format::Seed;

/// Records that must agree on a salt other than the volume's: a single one is just damage.
pub(crate) const MIN_AGREEING: u64 = 2;
/// The maximum number of salts that are counted. Damaged records have one each; those of another volume share one.
const MAX_SALTS: usize = 4096;

/// Counts copies of metadata, except superblocks, that were found since the volume was opened to be lost, or older than
/// the other copy in a way that only a fault explains. They do no harm while the other copy exists.
///
/// Only the core of a volume counts; every core may read.
#[derive(Clone, Default, Debug)]
pub struct LostCopies {
    own: Arc<Losses>,
    /// Those of the shards of a volume.
    shards: Arc<[LostCopies]>,
}

#[derive(Default, Debug)]
struct Losses {
    lost: Count,
    /// Those of them whose write a crash may have cut off.
    maybe_cut_off: Count,
    /// Those of the newest content of reserved areas. Others stay counted when they are written again; these do not.
    areas: Count,
    newer_pages: Count,
    is_scrub_state_lost: AtomicBool,
    /// For each salt, the places where records with it were found, and their number.
    foreign: Mutex<ForeignRecords>,
}

type ForeignRecords = BTreeMap<Seed, BTreeMap<&'static str, u64>>;

/// A number that one core changes.
#[derive(Default, Debug)]
struct Count(AtomicU64);

impl Count {
    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }
}

impl LostCopies {
    /// Those of all shards of a volume.
    pub(crate) fn of_all(shards: Vec<LostCopies>) -> LostCopies {
        LostCopies { shards: shards.into(), ..LostCopies::default() }
    }

    fn sum(&self, of: fn(&Losses) -> u64) -> u64 {
        of(&self.own) + self.shards.iter().map(|shard| shard.sum(of)).sum::<u64>()
    }

    /// The number of lost copies.
    pub fn count(&self) -> u64 {
        self.sum(|losses| losses.lost.get())
    }

    /// Of how many of them nothing shows whether they are damaged or a crash cut their write off.
    pub fn maybe_cut_off(&self) -> u64 {
        self.sum(|losses| losses.maybe_cut_off.get())
    }

    /// How many of them are copies of labels and scrub states that have not been written again.
    pub fn of_areas(&self) -> u64 {
        self.sum(|losses| losses.areas.get())
    }

    /// How many, and what is known of the cause, as text.
    pub fn to_text(&self) -> String {
        const CAUSES: &str = "damaged, or cut off by a crash while written";
        match (self.count(), self.maybe_cut_off()) {
            (all, 0) => all.to_string(),
            (all, cut_off) if all == cut_off => format!("{all}, {CAUSES}"),
            (all, cut_off) => format!("{all}, {cut_off} of them {CAUSES}"),
        }
    }

    /// True if every copy of the newest scrub state is lost, and none has been written since. No copy of it is counted:
    /// nothing is left that could be used or rewritten.
    pub fn is_scrub_state_lost(&self) -> bool {
        self.sum(|losses| u64::from(losses.is_scrub_state_lost.load(Ordering::Relaxed))) > 0
    }

    pub(crate) fn set_scrub_state_lost(&self, is_lost: bool) {
        self.own.is_scrub_state_lost.store(is_lost, Ordering::Relaxed);
    }

    /// The places where records of other volumes replace those of this one, and their number.
    pub fn foreign(&self) -> Vec<(&'static str, u64)> {
        let mut places: BTreeMap<&'static str, u64> = BTreeMap::new();
        {
            let foreign = self.own.foreign();
            for of_salt in foreign.values().filter(|places| places.values().sum::<u64>() >= MIN_AGREEING) {
                of_salt.iter().for_each(|(place, records)| *places.entry(place).or_default() += records);
            }
        }
        let of_shards = self.shards.iter().flat_map(LostCopies::foreign);
        of_shards.for_each(|(place, records)| *places.entry(place).or_default() += records);
        places.into_iter().collect()
    }

    /// Pages of the block map that are newer than the log and the superblocks: these were restored from an earlier
    /// state, so blocks may be older than their last writes.
    pub fn newer_pages(&self) -> u64 {
        self.sum(|losses| losses.newer_pages.get())
    }

    /// This many copies of a reserved area were rewritten. `is_maybe_cut_off`: nothing durable showed their write to
    /// have been complete.
    pub(crate) fn remove_of_area(&self, copies: u64, is_maybe_cut_off: bool) {
        let fewer = |count: &Count| count.set(count.get().saturating_sub(copies));
        fewer(&self.own.lost);
        fewer(&self.own.areas);
        if is_maybe_cut_off {
            fewer(&self.own.maybe_cut_off);
        }
    }

    /// Counts copies of a reserved area. `is_maybe_cut_off`: nothing durable shows their write to have been complete, so
    /// that they are damage, or what a crash left of it.
    pub(crate) fn add_of_area(&self, copies: u64, is_maybe_cut_off: bool) {
        self.add(copies);
        self.own.areas.set(self.own.areas.get() + copies);
        if is_maybe_cut_off {
            self.own.maybe_cut_off.set(self.own.maybe_cut_off.get() + copies);
        }
    }

    pub(crate) fn add_newer_page(&self) {
        self.own.newer_pages.set(self.own.newer_pages.get() + 1);
    }

    pub(crate) fn forget_newer_pages(&self) {
        self.own.newer_pages.set(0);
    }

    pub(crate) fn add(&self, copies: u64) {
        self.own.lost.set(self.own.lost.get() + copies);
    }

    /// Counts records that are valid under another salt than the volume's.
    pub(crate) fn add_foreign(&self, place: &'static str, salt: Seed, records: u64) {
        let mut foreign = self.own.foreign();
        if foreign.len() < MAX_SALTS || foreign.contains_key(&salt) {
            *foreign.entry(salt).or_default().entry(place).or_default() += records;
        }
    }
}

impl Losses {
    fn foreign(&self) -> MutexGuard<'_, ForeignRecords> {
        self.foreign.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_crash_may_have_done_is_not_called_damage_alone() {
        let lost = LostCopies::default();
        lost.add_of_area(1, true);
        assert_eq!((lost.count(), lost.to_text()), (1, "1, damaged, or cut off by a crash while written".to_owned()));
        lost.add(2);
        let both = "3, 1 of them damaged, or cut off by a crash while written";
        assert_eq!((lost.count(), lost.maybe_cut_off(), lost.to_text()), (3, 1, both.to_owned()));
        lost.add_of_area(1, false);
        assert_eq!((lost.count(), lost.of_areas()), (4, 2));
        lost.remove_of_area(1, false);
        lost.remove_of_area(1, true);
        assert_eq!((lost.count(), lost.maybe_cut_off(), lost.to_text()), (2, 0, "2".to_owned()));
        assert_eq!(lost.of_areas(), 0);
    }

    #[test]
    fn records_that_agree_on_another_salt_are_another_volumes_and_a_single_one_is_damage() {
        let lost = LostCopies::default();
        lost.add(3);
        lost.add_foreign("the log", Seed(1), 1);
        lost.add_foreign("the log", Seed(2), 1);
        assert_eq!((lost.count(), lost.foreign()), (3, vec![]));
        lost.clone().add_foreign("the block group map", Seed(1), 1);
        assert_eq!(lost.foreign(), [("the block group map", 1), ("the log", 1)]);
        for salt in 0..2 * MAX_SALTS as u32 {
            lost.add_foreign("the log", Seed(salt), 1);
        }
        assert!(lost.own.foreign().len() <= MAX_SALTS);
        assert_eq!(lost.foreign()[1], ("the log", 4), "two of each salt that was there before");
    }
}
