//! Which of the volatile changes a power cut leaves.

use std::fmt;
use std::ops::Range;

use crate::image::Piece;
use crate::log::{Log, Recorded, RequestId};
use crate::tear;

/// Which of the changes that are not known to be durable survive a power cut. Those in flight reach the medium last, in
/// the order in which they started, unless the choice is random.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Survivors {
    /// Everything that had reached the medium, and nothing in flight: what reads returned last.
    Landed,
    /// None.
    None,
    /// All of them, also those in flight.
    All,
    /// Those whose bits are set, by their order among the volatile changes.
    Subset(u32),
    /// All but this one.
    Without(RequestId),
    /// This one alone.
    Only(RequestId),
    /// All of them, but of this one only some sectors.
    Torn(RequestId),
    /// All of these devices, by the bits of their indices, and none of the others.
    Devices(u64),
    /// All that are no superblocks, and the superblocks of these devices.
    Superblocks(u64),
    /// Each at random, on each device with another probability, in random order with those in flight; with every other
    /// draw, also torn.
    Random(u32),
}

impl fmt::Display for Survivors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Survivors::Landed => f.write_str("all completed changes survive"),
            Survivors::None => f.write_str("no volatile change survives"),
            Survivors::All => f.write_str("all changes survive, also those in flight"),
            Survivors::Subset(bits) => write!(f, "volatile changes {bits:#b} survive"),
            Survivors::Without(id) => write!(f, "all changes but {} survive", id.0),
            Survivors::Only(id) => write!(f, "of the volatile changes only {} survives", id.0),
            Survivors::Torn(id) => write!(f, "all changes survive, {} in part", id.0),
            Survivors::Devices(mask) => write!(f, "volatile changes of devices {mask:#b} survive"),
            Survivors::Superblocks(mask) => {
                write!(f, "superblocks of devices {mask:#b} survive, and all other changes")
            }
            Survivors::Random(draw) => write!(f, "random changes survive, draw {draw}"),
        }
    }
}

/// A change that survives.
pub(crate) struct Survivor {
    /// When it reached the medium.
    pub(crate) landed: usize,
    pub(crate) id: RequestId,
    pub(crate) pieces: Vec<Piece>,
}

/// The volatile changes at a crash point.
pub(crate) struct Moment<'a> {
    pub(crate) log: &'a Log,
    pub(crate) point: usize,
    /// In the order of their starts.
    pub(crate) volatile: Vec<RequestId>,
    pub(crate) rules: &'a Rules,
}

/// What can be torn.
pub(crate) struct Rules {
    pub(crate) sector_bytes: u64,
    pub(crate) superblocks: Vec<Range<u64>>,
    pub(crate) atomic_superblocks: bool,
}

impl Rules {
    /// True if all bytes of the change belong to one superblock.
    pub(crate) fn is_superblock(&self, request: &Recorded) -> bool {
        let is_within = |super_range: &Range<u64>| {
            let mut ranges = request.pieces.iter().map(Piece::range);
            ranges.all(|range| super_range.start <= range.start && range.end <= super_range.end)
        };
        !request.pieces.is_empty() && self.superblocks.iter().any(is_within)
    }

    /// True if the change can survive in part.
    pub(crate) fn can_tear(&self, request: &Recorded, point: usize) -> bool {
        let is_atomic = self.atomic_superblocks && self.is_superblock(request);
        !is_atomic && tear::can_tear(request.pieces_at(point), self.sector_bytes)
    }
}

impl Moment<'_> {
    /// The changes that survive, in no particular order.
    pub(crate) fn survivors(&self, choice: Survivors, rng: &mut fastrand::Rng) -> Vec<Survivor> {
        if let Survivors::Random(draw) = choice {
            return self.random(draw % 2 == 1, rng);
        }
        let bit = |bits: u64, index: usize| index < 64 && bits >> index & 1 == 1;
        let of_id = |id: RequestId| self.log.request(id);
        let survives = |(index, id): (usize, RequestId)| match choice {
            Survivors::Landed => of_id(id).landed_by(self.point).is_some(),
            Survivors::None => false,
            Survivors::All | Survivors::Torn(_) | Survivors::Random(_) => true,
            Survivors::Subset(bits) => bit(bits.into(), index),
            Survivors::Without(dropped) => id != dropped,
            Survivors::Only(kept) => id == kept,
            Survivors::Devices(mask) => bit(mask, of_id(id).device),
            Survivors::Superblocks(mask) => !self.rules.is_superblock(of_id(id)) || bit(mask, of_id(id).device),
        };
        let kept = self.volatile.iter().copied().enumerate().filter(|(index, id)| survives((*index, *id)));
        kept.map(|(_, id)| {
            let is_torn = choice == Survivors::Torn(id);
            self.survivor(id, of_id(id).landed_by(self.point).unwrap_or(self.point), is_torn, rng)
        })
        .collect()
    }

    fn random(&self, may_tear: bool, rng: &mut fastrand::Rng) -> Vec<Survivor> {
        let percents: Vec<u32> = self.log.before.iter().map(|_| [5, 50, 50, 95][rng.usize(..4)]).collect();
        let mut kept = Vec::new();
        for id in &self.volatile {
            let request = self.log.request(*id);
            if rng.u32(..100) >= percents[request.device] {
                continue;
            }
            let at_random = rng.usize(request.started..=self.point);
            let is_torn = may_tear && rng.bool() && self.rules.can_tear(request, self.point);
            kept.push(self.survivor(*id, request.landed_by(self.point).unwrap_or(at_random), is_torn, rng));
        }
        kept
    }

    fn survivor(&self, id: RequestId, landed: usize, is_torn: bool, rng: &mut fastrand::Rng) -> Survivor {
        let pieces = self.log.request(id).pieces_at(self.point);
        let pieces = if is_torn { tear::torn(pieces, self.rules.sector_bytes, rng) } else { pieces.to_vec() };
        Survivor { landed, id, pieces }
    }
}
