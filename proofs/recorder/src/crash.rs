//! Every state that a power cut can leave, by number.
//!
//! States are listed at the crash points that matter: a cut between two events that change nothing of what can survive,
//! and promise nothing new, leaves what a later cut leaves as well. Where the set of volatile changes is largest, just
//! before something becomes durable, subsets are listed systematically: all of them if they are few, otherwise each
//! change missing, alone and torn, and each subset of devices. Everywhere else some are drawn at random.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use crate::image::Image;
use crate::log::{Event, Log, RequestId};
use crate::survivors::{Moment, Rules, Survivor, Survivors};

/// The maximum number of changes of one crash point that are listed as missing, alone and torn; of more, a sample.
const MAX_SINGLES: usize = 256;
/// The maximum number of devices of which every subset is listed.
const MAX_DEVICES: usize = 6;

/// What is enumerated.
#[derive(Clone, Debug)]
pub struct CrashOptions {
    /// The seed of random choices.
    pub seed: u64,
    /// Up to this many volatile changes, all of their subsets are listed; at most 16.
    pub exhaustive: usize,
    /// Random subsets at each crash point.
    pub random_per_point: u32,
    /// Random subsets where something becomes durable.
    pub random_per_flush: u32,
    /// Bytes of a sector, the unit in which changes are torn: a divisor of a block, or a multiple of it if every change has
    /// whole sectors.
    pub sector_bytes: u32,
    /// The offsets of superblocks in bytes, the same on every device: all subsets of devices with new superblocks are
    /// listed.
    pub superblocks: Vec<u64>,
    /// Bytes of a superblock.
    pub superblock_bytes: u64,
    /// True if superblocks are never torn.
    pub atomic_superblocks: bool,
    /// The maximum number of states; of more, a sample.
    pub limit: usize,
}

impl Default for CrashOptions {
    fn default() -> CrashOptions {
        CrashOptions {
            seed: 0,
            exhaustive: 4,
            random_per_point: 1,
            random_per_flush: 8,
            sector_bytes: 512,
            superblocks: Vec::new(),
            superblock_bytes: 4096,
            atomic_superblocks: false,
            limit: 20_000,
        }
    }
}

/// The states that a power cut can leave. The same log and options give the same states with the same numbers.
pub struct CrashStates {
    log: Log,
    rules: Rules,
    seed: u64,
    durable_at: Vec<Option<usize>>,
    plan: Vec<Planned>,
    base: RefCell<Base>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Planned {
    point: usize,
    choice: Survivors,
}

/// The content of the devices with everything applied that landed before `upto`, kept because the next state needs
/// little more.
struct Base {
    upto: usize,
    images: Vec<Image>,
}

/// One state.
pub struct CrashState<'a> {
    log: &'a Log,
    planned: Planned,
    seed: u64,
    /// Its number.
    pub index: usize,
    /// The content of each device.
    pub images: Vec<Image>,
}

impl CrashStates {
    /// Lists the states of a log.
    ///
    /// # Panics
    /// If sectors are longer than blocks of a device, or no divisor of them.
    pub fn new(log: Log, options: &CrashOptions) -> CrashStates {
        for image in &log.before {
            let (block, sector) = (image.block_size().bytes() as u64, u64::from(options.sector_bytes));
            let is_whole = block.is_multiple_of(sector) || sector.is_multiple_of(block);
            assert!(is_whole, "sectors of {sector} bytes are neither parts of a block nor whole blocks");
        }
        let rules = Rules {
            sector_bytes: options.sector_bytes.into(),
            superblocks: options
                .superblocks
                .iter()
                .map(|at| *at..at.saturating_add(options.superblock_bytes))
                .collect(),
            atomic_superblocks: options.atomic_superblocks,
        };
        let durable_at = log.durable_at();
        let planner = Planner { log: &log, rules: &rules, options, plan: Vec::new(), volatile: BTreeSet::new() };
        let plan = planner.plan(&durable_at);
        let base = RefCell::new(Base { upto: 0, images: log.before.clone() });
        CrashStates { log, rules, seed: options.seed, durable_at, plan, base }
    }

    /// The number of states.
    pub fn len(&self) -> usize {
        self.plan.len()
    }

    /// True if there are no states, which happens only with a limit of zero.
    pub fn is_empty(&self) -> bool {
        self.plan.is_empty()
    }

    /// The log.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// All states, in the order of their crash points, which is the cheapest.
    pub fn iter(&self) -> impl Iterator<Item = CrashState<'_>> {
        (0..self.len()).map(|index| self.get(index))
    }

    /// The state with this number.
    ///
    /// # Panics
    /// If there are not as many.
    pub fn get(&self, index: usize) -> CrashState<'_> {
        let planned = self.plan[index];
        let (point, volatile) = (planned.point, self.volatile(planned.point));
        let moment = Moment { log: &self.log, point, volatile, rules: &self.rules };
        // Everything that landed before the first volatile change did, or can have, is durable.
        let landed = |id: &RequestId| {
            let request = self.log.request(*id);
            request.landed_by(point).unwrap_or(request.started)
        };
        let settled = moment.volatile.iter().map(landed).min().unwrap_or(point);
        let mut images = self.base(settled);
        let mut rng = fastrand::Rng::with_seed(self.seed ^ (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut kept = moment.survivors(planned.choice, &mut rng);
        kept.extend(self.durable(settled..point, point));
        kept.sort_by_key(|survivor| (survivor.landed, survivor.id));
        for survivor in &kept {
            let image = &mut images[self.log.request(survivor.id).device];
            survivor.pieces.iter().for_each(|piece| image.apply(piece));
        }
        CrashState { log: &self.log, planned, seed: self.seed, index, images }
    }

    /// The changes that had started by `point` and were not durable, in the order of their starts.
    fn volatile(&self, point: usize) -> Vec<RequestId> {
        let started = self.log.requests.partition_point(|request| request.started < point);
        let is_volatile = |id: &RequestId| {
            !self.log.request(*id).is_flush() && self.durable_at[id.0].is_none_or(|durable| durable >= point)
        };
        (0..started).map(RequestId).filter(is_volatile).collect()
    }

    /// The changes that landed in `events` and are durable at `point`.
    fn durable(&self, events: Range<usize>, point: usize) -> impl Iterator<Item = Survivor> {
        let landed = events.filter_map(move |at| match self.log.events[at] {
            Event::End(id) | Event::Land(id) => Some((at, id)),
            Event::Start(_) | Event::Mark(_) => None,
        });
        let is_durable = move |id: RequestId| self.durable_at[id.0].is_some_and(|durable| durable < point);
        landed.filter(move |(_, id)| is_durable(*id)).map(move |(landed, id)| {
            let pieces = self.log.request(id).pieces_at(point).to_vec();
            Survivor { landed, id, pieces }
        })
    }

    /// The devices with everything that landed before `upto`.
    fn base(&self, upto: usize) -> Vec<Image> {
        let mut base = self.base.borrow_mut();
        if upto < base.upto {
            *base = Base { upto: 0, images: self.log.before.clone() };
        }
        for at in base.upto..upto {
            let (Event::End(id) | Event::Land(id)) = self.log.events[at] else { continue };
            let request = self.log.request(id);
            let image = &mut base.images[request.device];
            request.pieces_at(usize::MAX).iter().for_each(|piece| image.apply(piece));
        }
        base.upto = upto;
        base.images.clone()
    }
}

impl CrashState<'_> {
    /// What was promised before the power was cut, in order.
    pub fn marks(&self) -> impl Iterator<Item = &str> {
        self.log.marks(self.planned.point)
    }

    /// True if this was promised before the power was cut.
    pub fn has_mark(&self, name: &str) -> bool {
        self.marks().any(|mark| mark == name)
    }

    /// The event before which the power was cut; the number of events if it was after all of them.
    pub fn point(&self) -> usize {
        self.planned.point
    }

    /// What survived.
    pub fn survivors(&self) -> Survivors {
        self.planned.choice
    }
}

impl fmt::Display for CrashState<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Planned { point, choice } = self.planned;
        write!(f, "state {} of seed {}: power cut before event {point}", self.index, self.seed)?;
        match self.log.events.get(point) {
            Some(Event::Start(id)) => write!(f, " (start of {}: {})", id.0, self.log.request(*id))?,
            Some(Event::Land(id)) => write!(f, " (late landing of {}: {})", id.0, self.log.request(*id))?,
            Some(Event::End(id)) => write!(f, " (end of {}: {})", id.0, self.log.request(*id))?,
            Some(Event::Mark(_)) | None => {}
        }
        write!(f, "; {choice}")?;
        if let Survivors::Without(id) | Survivors::Only(id) | Survivors::Torn(id) = choice {
            write!(f, " ({})", self.log.request(id))?;
        }
        match self.marks().last() {
            Some(mark) => write!(f, "; last promise: {mark}"),
            None => f.write_str("; nothing promised"),
        }
    }
}

/// Lists the states of one log.
struct Planner<'a> {
    log: &'a Log,
    rules: &'a Rules,
    options: &'a CrashOptions,
    plan: Vec<Planned>,
    /// At the current crash point.
    volatile: BTreeSet<RequestId>,
}

impl Planner<'_> {
    fn plan(mut self, durable_at: &[Option<usize>]) -> Vec<Planned> {
        let mut becoming: Vec<Vec<RequestId>> = vec![Vec::new(); self.log.events.len()];
        for (id, at) in durable_at.iter().enumerate().filter_map(|(id, at)| Some((id, (*at)?))) {
            becoming[at].push(RequestId(id));
        }
        let mut rng = fastrand::Rng::with_seed(self.options.seed);
        // Something has landed or was promised since the last crash point.
        let mut is_new = true;
        for point in 0..=self.log.events.len() {
            let event = self.log.events.get(point);
            if let Some(Event::Mark(_)) = event {
                is_new = true;
                continue;
            }
            if std::mem::take(&mut is_new) {
                self.push(point, Survivors::Landed);
            }
            let is_largest = event.is_none() || !becoming[point].is_empty();
            if is_largest && !self.volatile.is_empty() {
                self.list(point, &mut rng);
            }
            if !self.volatile.is_empty() {
                let draws = if is_largest { self.options.random_per_flush } else { self.options.random_per_point };
                (0..draws).for_each(|draw| self.push(point, Survivors::Random(draw)));
            }
            match event {
                Some(Event::Start(id)) if !self.log.request(*id).is_flush() => drop(self.volatile.insert(*id)),
                Some(Event::End(id) | Event::Land(id)) => is_new = !self.log.request(*id).is_flush(),
                _ => {}
            }
            for id in becoming.get(point).into_iter().flatten() {
                self.volatile.remove(id);
            }
        }
        sample_states(self.plan, self.options.limit, &mut rng)
    }

    fn push(&mut self, point: usize, choice: Survivors) {
        self.plan.push(Planned { point, choice });
    }

    /// Lists subsets of the volatile changes systematically.
    fn list(&mut self, point: usize, rng: &mut fastrand::Rng) {
        let volatile: Vec<RequestId> = self.volatile.iter().copied().collect();
        let singles = sample(volatile.clone(), MAX_SINGLES, rng);
        if volatile.len() <= self.options.exhaustive.min(16) {
            (0..1 << volatile.len()).for_each(|bits| self.push(point, Survivors::Subset(bits)));
        } else {
            self.push(point, Survivors::None);
            self.push(point, Survivors::All);
            singles.iter().for_each(|id| self.push(point, Survivors::Without(*id)));
            singles.iter().for_each(|id| self.push(point, Survivors::Only(*id)));
            let masks = strict_subsets(volatile.iter().map(|id| self.log.request(*id).device));
            masks.into_iter().for_each(|mask| self.push(point, Survivors::Devices(mask)));
        }
        for id in singles {
            if self.rules.can_tear(self.log.request(id), point) {
                self.push(point, Survivors::Torn(id));
            }
        }
        let superblocks = volatile.iter().map(|id| self.log.request(*id));
        let superblocks = superblocks.filter(|request| self.rules.is_superblock(request));
        let masks = strict_subsets(superblocks.map(|request| request.device));
        masks.into_iter().for_each(|mask| self.push(point, Survivors::Superblocks(mask)));
    }
}

/// The masks of all subsets of these devices but the whole; of many devices, of each alone and of all but each.
fn strict_subsets(devices: impl Iterator<Item = usize>) -> Vec<u64> {
    let devices: BTreeSet<usize> = devices.filter(|device| *device < 64).collect();
    let bits: Vec<u64> = devices.iter().map(|device| 1 << device).collect();
    let all: u64 = bits.iter().sum();
    if bits.len() > MAX_DEVICES {
        return bits.iter().flat_map(|bit| [*bit, all & !bit]).chain([0]).collect();
    }
    let chosen = |subset: u64| bits.iter().enumerate().filter(move |(i, _)| subset >> i & 1 == 1).map(|(_, bit)| bit);
    (0..(1 << bits.len()) - 1).map(|subset| chosen(subset).sum()).collect()
}

/// At most `limit` of these, in their order.
fn sample<T: Clone>(mut items: Vec<T>, limit: usize, rng: &mut fastrand::Rng) -> Vec<T> {
    if items.len() <= limit {
        return items;
    }
    let mut chosen: Vec<usize> = rng.choose_multiple(0..items.len(), limit);
    chosen.sort_unstable();
    let kept = chosen.into_iter().map(|at| items[at].clone()).collect();
    items.clear();
    kept
}

/// At most `limit` states, in their order; half of them may be those with everything that had landed.
fn sample_states(plan: Vec<Planned>, limit: usize, rng: &mut fastrand::Rng) -> Vec<Planned> {
    if plan.len() <= limit {
        return plan;
    }
    let all = plan.into_iter().enumerate();
    let (landed, others): (Vec<_>, Vec<_>) = all.partition(|(_, planned)| planned.choice == Survivors::Landed);
    let landed = sample(landed, (limit / 2).max(limit.saturating_sub(others.len())), rng);
    let mut kept = sample(others, limit - landed.len(), rng);
    kept.extend(landed);
    kept.sort_by_key(|(at, _)| *at);
    kept.into_iter().map(|(_, planned)| planned).collect()
}

#[cfg(test)]
mod tests;
