//! One trial: a volume, one damage, and the result, first read-only and then in use.

use std::collections::{BTreeMap, BTreeSet};

use sealblock_block::{Device, Durability, DynDevice, Request};
use sealblock_simulator::checker::Content;
use sealblock_simulator::executor::Executor;
use sealblock_simulator::random::Random;
use sealblock_units::{Extent, Lba};

use crate::damage::Damage;
use crate::kept::Kept;
use crate::look::{BlockChecker, Open, Seen, VolumeView, look, on_executor, start};
use crate::medium::Overlay;
use crate::specimen::{IDLE, Specimen};

/// First version that a trial writes: above all versions of its volume.
const FIRST_VERSION: u64 = 1 << 32;
/// The maximum number of blocks of one write of a trial.
const MOST_AT_ONCE: u64 = 16;

/// The verdict on a block.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Verdict {
    /// The model permits it.
    Right,
    /// An error.
    Lost,
    /// An earlier content of the block.
    Stale,
    /// As [`Verdict::Stale`], for a block written by the last commit before a crash.
    Window,
    /// Wrong bytes with a matching 16-bit guard.
    Collision,
    /// Anything else.
    Wrong(String),
}

/// The result of a trial.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The reason if the volume did not open for reading.
    pub refused: Option<String>,
    /// The reason if it did not open for writing, or refused writes.
    pub unwritable: Option<String>,
    /// Blocks with bytes that no client wrote, or that read as if never written.
    pub wrong: u64,
    /// Blocks with content from before the last flush.
    pub stale: u64,
    /// Like `stale`, within the last commit before a crash.
    pub window: u64,
    /// Blocks with wrong bytes and a matching 16-bit guard.
    pub collisions: u64,
    /// Blocks that cannot be read.
    pub lost: u64,
    /// Blocks that the damage may cost.
    pub bound: u64,
    /// Blocks that were lost although the damage did not cover them.
    pub beyond: u64,
    /// All violations, as text.
    pub findings: Vec<String>,
}

struct Trial<'a> {
    specimen: &'a Specimen,
    damage: &'a Damage,
    /// Blocks that the damage may cost.
    allowed: BTreeSet<Lba>,
    outcome: Outcome,
}

/// Runs a trial. All its random choices come from `random`.
pub fn run(specimen: &Specimen, damage: &Damage, random: &Random) -> Outcome {
    let allowed = specimen.places.allowed(&damage.ranges, damage.is_unreadable());
    let mut trial = Trial { specimen, damage, allowed, outcome: Outcome::default() };
    let overlay = Overlay::new(&specimen.image, specimen.shape.sector_bytes, true);
    damage.inflict(specimen, &overlay);
    let (before, kept, used) = (trial.read_only(&overlay), Kept::before(specimen, &overlay), overlay.fork(false));
    trial.in_use(&used, before.as_ref(), random);
    if let Some(at) = kept.lost(&used).first() {
        trial.finding(format!("the good record at byte {at} was overwritten"));
    }
    trial.outcome
}

impl Trial<'_> {
    fn finding(&mut self, what: String) {
        const MOST: usize = 8;
        if self.outcome.findings.len() < MOST {
            self.outcome.findings.push(what);
        }
    }

    /// Opens the volume read-only, which must succeed, and reads everything.
    fn read_only(&mut self, overlay: &Overlay) -> Option<BTreeMap<Lba, Verdict>> {
        let looked = match look(self.specimen, overlay) {
            Ok(looked) => looked,
            Err(why) => {
                if !self.damage.is_multiple() {
                    self.finding(format!("does not open for reading: {why}"));
                }
                self.outcome.refused = Some(why);
                return None;
            }
        };
        if overlay.changes() > 0 {
            self.finding("a reader wrote".to_owned());
        }
        let verdicts = self.verdicts(&looked);
        self.count(&verdicts, looked.is_told);
        self.check_names(&looked);
        Some(verdicts)
    }

    /// Checks that Verify reports exactly the unreadable blocks.
    fn check_names(&mut self, looked: &VolumeView) {
        let failed = looked.blocks.iter().filter(|(_, seen)| matches!(seen, Seen::Lost(_)));
        let failed: BTreeSet<Lba> = failed.map(|(lba, _)| *lba).collect();
        if let Some(lba) = failed.symmetric_difference(&looked.named).next() {
            let (reads, verify) = (failed.contains(lba), looked.named.contains(lba));
            self.finding(format!("block {lba}: the read fails: {reads}; Verify names it: {verify}"));
        }
    }

    fn verdicts(&self, looked: &VolumeView) -> BTreeMap<Lba, Verdict> {
        looked.blocks.iter().map(|(lba, seen)| (*lba, self.verdict(*lba, seen))).collect()
    }

    fn verdict(&self, lba: Lba, seen: &Seen) -> Verdict {
        let model = &self.specimen.model;
        match seen {
            Seen::Content(content) if model.permits(lba, *content) => Verdict::Right,
            Seen::Lost(_) if model.permits(lba, Content::Unreadable) => Verdict::Right,
            Seen::Lost(_) => Verdict::Lost,
            Seen::Collision => Verdict::Collision,
            Seen::Foreign(why) => Verdict::Wrong(why.clone()),
            Seen::Content(content) if !model.held(lba, *content) => Verdict::Wrong(format!("block {lba}: {content:?}")),
            Seen::Content(_) if self.is_in_window(lba) => Verdict::Window,
            Seen::Content(Content::Zero) if !self.damage.is_stale() && !self.damage.is_multiple() => {
                Verdict::Wrong(format!("block {lba}: reads as never written"))
            }
            Seen::Content(_) => Verdict::Stale,
        }
    }

    /// True if damage to this block looks like a write that never arrived: the block is in the last commit, and the
    /// damage covers its data, or every place of its map entry.
    fn is_in_window(&self, lba: Lba) -> bool {
        self.specimen.places.window.contains(&lba) && self.allowed.contains(&lba)
    }

    fn count(&mut self, verdicts: &BTreeMap<Lba, Verdict>, is_told: bool) {
        self.outcome.bound = self.allowed.len() as u64;
        for (lba, verdict) in verdicts {
            match verdict {
                Verdict::Right => {}
                Verdict::Collision => self.outcome.collisions += 1,
                Verdict::Window => self.outcome.window += 1,
                Verdict::Lost => {
                    self.outcome.lost += 1;
                    self.outcome.beyond += u64::from(!self.allowed.contains(lba));
                }
                Verdict::Stale => {
                    self.outcome.stale += 1;
                    if !(self.damage.is_multiple() && is_told) {
                        self.finding(format!("block {lba}: an older content"));
                    }
                }
                Verdict::Wrong(why) => {
                    self.outcome.wrong += 1;
                    self.finding(why.clone());
                }
            }
        }
        if self.outcome.beyond > 0 {
            let Outcome { lost, bound, beyond, .. } = self.outcome;
            self.finding(format!("{lost} blocks lost, {beyond} of them without need; {bound} may be lost"));
        }
    }

    /// Opens the volume for writing, which must succeed, writes some blocks, stops in one of several ways, and reads
    /// again.
    fn in_use(&mut self, overlay: &Overlay, before: Option<&BTreeMap<Lba, Verdict>>, random: &Random) {
        let (checker, watched) = (BlockChecker::of(self.specimen), self.specimen.watched.clone());
        let host = Host::draw(self.specimen, random);
        let (disk, writes) = (overlay.clone(), host.writes.clone());
        let used = on_executor(move |executor| async move {
            let session = start(&disk, &executor, false).await?;
            let looked = session.look(&checker, &watched).await;
            host.work(session, &checker, &executor).await.map(|()| looked)
        });
        let looked = match used.and_then(|used| used) {
            Ok(looked) => looked,
            Err(why) => {
                if !self.damage.is_multiple() {
                    self.finding(format!("cannot be written to: {why}"));
                }
                if self.outcome.refused.is_some() && overlay.changes() > 0 {
                    self.finding(format!("an opening that was refused wrote: {why}"));
                }
                self.outcome.unwritable = Some(why);
                return;
            }
        };
        let open = self.verdicts(&looked);
        if let Some(before) = before {
            self.compare("opened for writing", before, &open, &BTreeSet::new());
        }
        self.check_names(&looked);
        self.look_again(overlay, &open, &writes);
    }

    /// Opens read-only once more: the writes must be there, and other blocks may only have improved.
    fn look_again(&mut self, overlay: &Overlay, open: &BTreeMap<Lba, Verdict>, writes: &[(Extent, u64)]) {
        let reader = overlay.fork(true);
        let again = match look(self.specimen, &reader) {
            Ok(again) => again,
            Err(why) => {
                self.finding(format!("does not open again: {why}"));
                self.outcome.unwritable = Some(why);
                return;
            }
        };
        let mut due: BTreeMap<Lba, u64> = BTreeMap::new();
        for (extent, version) in writes {
            due.extend(extent.iter().map(|lba| (lba, *version)));
        }
        for (lba, seen) in &again.blocks {
            if let Some(version) = due.get(lba)
                && *seen != Seen::Content(Content::Version(*version))
            {
                self.finding(format!("block {lba}, written after the damage, is {seen:?}"));
                self.outcome.wrong += 1;
            }
        }
        let after = self.verdicts(&again);
        self.compare("opened again", open, &after, &due.into_keys().collect());
    }

    /// Checks that no block gets worse from one open to the next.
    fn compare(
        &mut self,
        when: &str,
        before: &BTreeMap<Lba, Verdict>,
        after: &BTreeMap<Lba, Verdict>,
        written: &BTreeSet<Lba>,
    ) {
        for (lba, was) in before.iter().filter(|(lba, _)| !written.contains(lba)) {
            let Some(is) = after.get(lba) else { continue };
            let got_worse = match is {
                Verdict::Right => false,
                Verdict::Wrong(_) | Verdict::Stale => was != is,
                Verdict::Lost | Verdict::Window | Verdict::Collision => *was == Verdict::Right,
            };
            if got_worse {
                self.finding(format!("block {lba}, {when}: {is:?}, and was {was:?}"));
                self.outcome.wrong += u64::from(matches!(is, Verdict::Wrong(_)));
                self.outcome.stale += u64::from(*is == Verdict::Stale);
                self.outcome.beyond += u64::from(*is == Verdict::Lost);
            }
        }
    }
}

/// The machine that uses the volume after the damage.
struct Host {
    writes: Vec<(Extent, u64)>,
    patterns: sealblock_simulator::checker::Patterns,
    /// 0: closes; 1: stays idle; 2: the process ends after a flush.
    ends: u64,
}

impl Host {
    /// Chooses the writes: near the damage, and anywhere.
    fn draw(specimen: &Specimen, random: &Random) -> Host {
        let mut writes = Vec::new();
        for version in FIRST_VERSION..FIRST_VERSION + random.between(1, 12) {
            let piece = *random.pick(&specimen.watched);
            let start = piece.start().get() + random.below(piece.len());
            let room = specimen.shape.capacity_blocks.min(piece.last().get() + 1) - start;
            writes
                .extend(Extent::from_raw(start, random.between(1, MOST_AT_ONCE).min(room)).ok().map(|e| (e, version)));
        }
        Host { writes, patterns: specimen.patterns, ends: random.below(3) }
    }

    async fn work(self, session: Open, checker: &BlockChecker, executor: &Executor) -> Result<(), String> {
        let Open { stack, close, .. } = session;
        for (extent, version) in &self.writes {
            let data = self.patterns.sealed(*extent, *version);
            let operation = Request::write(*extent, data, Durability::Volatile);
            stack.execute(operation).await.map_err(|error| format!("write: {error}"))?;
            self.check(&stack, checker, *extent, *version).await?;
        }
        stack.execute(Request::flush()).await.map_err(|error| format!("flush: {error}"))?;
        match self.ends {
            0 => close.await.map_err(|error| format!("close: {error}"))?,
            1 => executor.delay(IDLE).await,
            _ => {}
        }
        Ok(())
    }

    async fn check(
        &self,
        stack: &DynDevice,
        checker: &BlockChecker,
        extent: Extent,
        version: u64,
    ) -> Result<(), String> {
        let bad = |(_, seen): &(Lba, Seen)| *seen != Seen::Content(Content::Version(version));
        match checker.see(stack, extent).await.into_iter().find(bad) {
            Some((lba, seen)) => Err(format!("block {lba} was written just now and is {seen:?}")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::damage::{Cell, Fault, Reach, Target};
    use crate::specimen::{Kind, State};
    use sealblock_media_volume::format::RegionKind;

    fn physical_blocks(fault: Fault) -> Cell {
        Cell { target: Target::Region(RegionKind::PhysicalBlocks), reach: Reach::Sector, fault }
    }

    #[test]
    fn an_undamaged_volume_in_any_state_is_right() {
        for kind in [Kind::Small, Kind::Shards] {
            for state in kind.states().iter().copied() {
                let specimen = Specimen::make(5, state, kind).unwrap();
                let segments = specimen.parts[0].layout.segments().len();
                assert_eq!((specimen.parts.len() > 1, segments > 1), (kind == Kind::Shards, state == State::Resized));
                let outcome = run(&specimen, &Damage::none(), &Random::new(1));
                assert_eq!((outcome.findings, outcome.lost, outcome.bound), (Vec::new(), 0, 0), "{specimen}");
            }
        }
    }

    #[test]
    fn a_resized_volume_loses_no_more_than_a_new_one() {
        let kinds = |specimen: &Specimen| -> std::collections::BTreeSet<RegionKind> {
            specimen.regions().iter().map(|region| region.kind).collect()
        };
        for (seed, (state, shares)) in
            (40..).zip(State::ALL.into_iter().zip([&[30, 70][..], &[50], &[10, 130], &[60, 90]]))
        {
            let specimen = Specimen::grown(seed, state, Kind::Small, shares).unwrap();
            assert!(specimen.parts[0].layout.is_resized());
            let undamaged = run(&specimen, &Damage::none(), &Random::new(1));
            assert_eq!((undamaged.findings, undamaged.lost), (Vec::new(), 0), "{specimen}");
            for kind in kinds(&specimen) {
                for (draw, fault) in (0..).zip([Fault::Zeroed, Fault::Random, Fault::Stale]) {
                    for reach in [Reach::Sector, Reach::Run] {
                        let cell = Cell { target: Target::Region(kind), reach, fault };
                        let Some(damage) = Damage::draw(cell, &specimen, &Random::new(seed + draw)) else { continue };
                        let outcome = run(&specimen, &damage, &Random::new(2));
                        assert_eq!(outcome.findings, Vec::<String>::new(), "{specimen}: {kind} {fault:?} {reach:?}");
                        assert!(
                            outcome.lost <= outcome.bound,
                            "{specimen}: {kind} {fault:?} {reach:?}: {}",
                            outcome.lost
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn damaged_data_cost_their_block_and_no_other() {
        [Kind::Small, Kind::Shards].into_iter().for_each(assert_damaged_data_cost_their_block);
    }

    fn assert_damaged_data_cost_their_block(kind: Kind) {
        let specimen = Specimen::make(6, State::Clean, kind).unwrap();
        let losses: Vec<_> = (0..20)
            .filter_map(|seed| Damage::draw(physical_blocks(Fault::Random), &specimen, &Random::new(seed)))
            .map(|damage| run(&specimen, &damage, &Random::new(2)))
            .map(|outcome| (outcome.lost, outcome.bound, outcome.findings.len()))
            .collect();
        assert!(
            losses.contains(&(1, 1, 0)) && losses.iter().all(|loss| [(0, 0, 0), (1, 1, 0)].contains(loss)),
            "{losses:?}"
        );
    }

    #[test]
    fn a_volume_in_shards_needs_one_superblock_and_the_tables_of_each_shard() {
        let specimen = Specimen::make(8, State::Crashed, Kind::Shards).unwrap();
        let outcome = |cell, seed| {
            let damage = Damage::draw(cell, &specimen, &Random::new(seed))?;
            Some(run(&specimen, &damage, &Random::new(2)))
        };
        let container = |reach: Reach| {
            let is_it = move |cell: &Cell| {
                matches!(cell.target, Target::Region(RegionKind::Container(_))) && cell.reach == reach
            };
            Cell::all(&specimen).into_iter().filter(is_it)
        };
        for one in container(Reach::Run).filter_map(|cell| outcome(cell, 3)) {
            assert_eq!((one.findings, one.lost, one.refused), (Vec::new(), 0, None));
        }
        let all: Vec<Outcome> = container(Reach::Copies).filter_map(|cell| outcome(cell, 4)).collect();
        assert!(!all.is_empty() && all.iter().all(|one| one.refused.is_some() && one.findings.is_empty()), "{all:?}");
        let tables = |seed| outcome(Cell { target: Target::Tables, reach: Reach::Sector, fault: Fault::Zeroed }, seed);
        for one in (0..8).filter_map(tables) {
            assert!(one.findings.is_empty() && one.lost > 0 && one.lost <= one.bound, "{one:?}");
        }
    }

    #[test]
    fn a_volume_that_lies_is_caught() {
        let mut specimen = Specimen::make(6, State::Clean, Kind::Small).unwrap();
        let (&lba, _) = specimen.found.iter().find(|(_, content)| **content != Content::Zero).unwrap();
        // The host assumes that a later write is durable, so the volume returns an older content.
        specimen.model.found(lba, Content::Version(FIRST_VERSION - 1));
        let outcome = run(&specimen, &Damage::none(), &Random::new(1));
        assert_eq!((outcome.stale, outcome.wrong), (1, 0));
        assert!(outcome.findings[0].contains("older content"), "{:?}", outcome.findings);
    }

    #[test]
    fn a_loss_that_need_not_be_is_caught() {
        let mut specimen = Specimen::make(6, State::Clean, Kind::Small).unwrap();
        let damage = (0..40)
            .filter_map(|seed| Damage::draw(physical_blocks(Fault::Unreadable), &specimen, &Random::new(seed)))
            .find(|damage| !specimen.places.allowed(&damage.ranges, true).is_empty())
            .unwrap();
        specimen.places = crate::specimen::Places::default();
        let outcome = run(&specimen, &damage, &Random::new(1));
        assert_eq!((outcome.lost, outcome.bound, outcome.beyond), (1, 0, 1));
        assert!(!outcome.findings.is_empty());
    }
}
