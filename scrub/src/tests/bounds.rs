//! The bounds of the number of bad blocks, whatever happens to a list: found, saved without room, loaded, checked again
//! by pieces, written.

use std::collections::BTreeSet;

use proptest::prelude::*;
use sealblock_block::{
    BadBlock, BadBlockCause, BadBlocks, DamageCount, DamageRecord, DamageRun, Durability, Expectations, Outcome,
    Request, Response, VerifyStats, WatchedRequest, merge_runs,
};
use sealblock_integrity::Field;
use sealblock_units::{Extent, Lba};

use crate::record::{SavedState, ScrubRecord};

const CAPACITY: u64 = 60_000;
const GUARD: BadBlockCause = BadBlockCause::Tag(Field::Guard);

/// What happens to a device.
#[derive(Clone, Debug)]
enum Step {
    /// Blocks rot: so many, from this one on, and these distances apart.
    Rot { first: u64, blocks: u64, strides: Vec<u64> },
    /// A check of these blocks.
    Check { first: u64, blocks: u64 },
    /// A read that says nothing of other copies fails for a block, if that is bad.
    Read { lba: u64 },
    /// A write of these blocks, which heals them.
    Write { first: u64, blocks: u64 },
    /// A host makes these blocks unreadable.
    MakeUnreadable { first: u64, blocks: u64 },
    /// A check of all blocks, by pieces of this size.
    Scrub { piece_blocks: u64 },
    /// The list is saved, and loaded by another process.
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let range = (0..CAPACITY, 1..4000_u64);
    prop_oneof![
        3 => (0..CAPACITY / 2, 1..5000_u64, prop::collection::vec(1..30_u64, 1..7))
            .prop_map(|(first, blocks, strides)| Step::Rot { first, blocks, strides }),
        2 => range.clone().prop_map(|(first, blocks)| Step::Check { first, blocks }),
        1 => (0..CAPACITY).prop_map(|lba| Step::Read { lba }),
        2 => range.prop_map(|(first, blocks)| Step::Write { first, blocks }),
        1 => (0..CAPACITY, 1..50_u64).prop_map(|(first, blocks)| Step::MakeUnreadable { first, blocks }),
        3 => (1..3000_u64).prop_map(|piece_blocks| Step::Scrub { piece_blocks }),
        3 => Just(Step::Restart),
    ]
}

/// A device with what is true of it, and its list.
struct Model {
    record: DamageRecord,
    rotten: BTreeSet<u64>,
    made: BTreeSet<u64>,
    /// Bad blocks that a check has found and nothing has healed.
    found: BTreeSet<u64>,
}

fn extent(first: u64, blocks: u64) -> Extent {
    Extent::from_raw(first, blocks.min(CAPACITY - first)).unwrap()
}

impl Model {
    fn new() -> Model {
        let none = BTreeSet::new;
        Model { record: DamageRecord::new(CAPACITY), rotten: none(), made: none(), found: none() }
    }

    fn is_bad(&self, lba: u64) -> Option<BadBlock> {
        match (self.rotten.contains(&lba), self.made.contains(&lba)) {
            (true, _) => Some(BadBlock::new(Lba::new(lba), GUARD, Some(1), Some(2))),
            (false, true) => Some(BadBlock::media(Lba::new(lba))),
            (false, false) => None,
        }
    }

    fn observe(&self, request: &Request, copies: bool, outcome: &Outcome) {
        self.record.observe(&WatchedRequest::of(request, copies), outcome);
    }

    fn check(&mut self, first: u64, blocks: u64) {
        let extent = extent(first, blocks);
        let bad: Vec<BadBlock> = extent.iter().filter_map(|lba| self.is_bad(lba.get())).collect();
        self.found.extend(bad.iter().map(|bad| bad.lba.get()));
        let outcome = match BadBlocks::new(bad) {
            Some(bad) => Err(bad.into()),
            None => Ok(Response::Verified(VerifyStats::default())),
        };
        self.observe(&Request::verify(extent, Expectations::NONE), false, &outcome);
    }

    fn heal(&mut self, extent: Extent) {
        for set in [&mut self.rotten, &mut self.made, &mut self.found] {
            set.retain(|lba| !(extent.start().get()..=extent.last().get()).contains(lba));
        }
    }

    fn apply(&mut self, step: &Step) {
        match step {
            Step::Rot { first, blocks, strides } => {
                let mut lba = *first;
                for stride in strides.iter().cycle().take(*blocks as usize) {
                    if lba < CAPACITY {
                        self.rotten.insert(lba);
                    }
                    lba += stride;
                }
            }
            Step::Check { first, blocks } => self.check(*first, *blocks),
            Step::Read { lba } => {
                if let Some(bad) = self.is_bad(*lba) {
                    self.found.insert(*lba);
                    let outcome = Err(BadBlocks::new(vec![bad]).unwrap().into());
                    self.observe(&Request::read(extent(*lba, 1), Expectations::NONE), true, &outcome);
                }
            }
            Step::Write { first, blocks } => {
                let extent = extent(*first, *blocks);
                self.heal(extent);
                let request = Request::write_zeroes(extent, true, Durability::Volatile);
                self.observe(&request, false, &Ok(Response::Done));
            }
            Step::MakeUnreadable { first, blocks } => {
                let extent = extent(*first, *blocks);
                self.heal(extent);
                self.made.extend(extent.iter().map(Lba::get));
                self.found.extend(extent.iter().map(Lba::get));
                let request = Request::write_uncorrectable(extent, Durability::Volatile);
                self.observe(&request, false, &Ok(Response::Done));
            }
            Step::Scrub { piece_blocks } => {
                (0..CAPACITY).step_by(*piece_blocks as usize).for_each(|first| self.check(first, *piece_blocks));
            }
            Step::Restart => {
                let state = SavedState {
                    record: ScrubRecord::default(),
                    capacity_blocks: CAPACITY,
                    device: [7; 16],
                    writes: 1,
                    leaf: [8; 16],
                    damage: self.record.runs(),
                    forgotten_from: None,
                };
                self.record = DamageRecord::new(CAPACITY);
                self.record.restore(&SavedState::decode(&state.encode()).unwrap().damage);
            }
        }
    }
}

fn count(runs: &[DamageRun]) -> DamageCount {
    let mut count = DamageCount::default();
    runs.iter().for_each(|run| count.add(run));
    count
}

/// Fails unless the runs have the bounds of what was found, and each block of it.
fn hold(runs: &[DamageRun], unreadable: &BTreeSet<u64>, found: &BTreeSet<u64>) -> Result<(), TestCaseError> {
    prop_assert!(runs.windows(2).all(|two| two[0].last < two[1].first), "no two overlap");
    for run in runs {
        let bad = unreadable.range(run.first..=run.last).count() as u64;
        prop_assert!(run.bad_blocks <= bad && bad <= run.blocks(), "{bad} are bad of {run:?}");
    }
    let count = count(runs);
    let is_listed =
        |lba: &u64| runs.get(runs.partition_point(|run| run.last < *lba)).is_some_and(|run| run.first <= *lba);
    prop_assert!(found.iter().all(is_listed), "a bad block is not listed");
    prop_assert!(count.least + count.made <= unreadable.len() as u64);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn the_true_number_is_within_the_bounds(steps in prop::collection::vec(step(), 1..14)) {
        let mut model = Model::new();
        for step in &steps {
            model.apply(step);
            let unreadable: BTreeSet<u64> = model.rotten.union(&model.made).copied().collect();
            let runs = model.record.runs();
            hold(&runs, &unreadable, &model.found)?;
            let is_rot_hidden = |lba: &&u64| {
                let at = runs.partition_point(|run| run.last < **lba);
                runs[at].is_made && !model.made.contains(lba)
            };
            let rot = model.rotten.intersection(&model.found).find(is_rot_hidden);
            prop_assert_eq!(rot, None, "a rotten block is called one that a host made unreadable");
            if matches!(step, Step::Scrub { .. }) {
                let count = count(&runs);
                let all = (count.least + count.made, count.most + count.made);
                prop_assert_eq!(all, (unreadable.len() as u64, unreadable.len() as u64), "after a check of all blocks");
            }
        }
    }

    #[test]
    fn the_lists_of_two_copies_give_bounds_of_both(
        of_a in prop::collection::vec(step(), 1..8),
        of_b in prop::collection::vec(step(), 1..8),
    ) {
        let (mut a, mut b) = (Model::new(), Model::new());
        of_a.iter().for_each(|step| a.apply(step));
        of_b.iter().for_each(|step| b.apply(step));
        let union = |sets: [&BTreeSet<u64>; 4]| sets.into_iter().flatten().copied().collect::<BTreeSet<u64>>();
        let unreadable = union([&a.rotten, &a.made, &b.rotten, &b.made]);
        let found = union([&a.found, &b.found, &BTreeSet::new(), &BTreeSet::new()]);
        hold(&merge_runs([a.record.runs(), b.record.runs()].concat()), &unreadable, &found)?;
    }
}

#[test]
fn a_scrub_after_a_restart_counts_thousands_of_scattered_blocks_as_the_one_before_it() {
    let mut model = Model::new();
    model.apply(&Step::Rot { first: 17, blocks: 4_721, strides: vec![1, 19, 4, 27, 9] });
    for _ in 0..3 {
        model.apply(&Step::Scrub { piece_blocks: 256 });
        let exact = count(&model.record.runs());
        assert_eq!((exact.least, exact.most), (4_721, 4_721));
        model.apply(&Step::Restart);
        let saved = count(&model.record.runs());
        assert_eq!(saved.least, 4_721, "each is still counted");
        assert!(saved.most > 4_721, "there is no room for each run");
    }
}
