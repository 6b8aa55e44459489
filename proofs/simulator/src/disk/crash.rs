//! What survives when a machine stops.

use std::fmt;

use super::image::{Content, Image, InFlight};
use crate::random::Random;

/// Which of the sectors that are not known to be durable survive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Survival {
    /// Power cut: none of them.
    Nothing,
    /// Power cut: the last version of each that the disk had accepted.
    Everything,
    /// Power cut: each sector at random, in any of its versions, including those in flight.
    Coin {
        /// The probability that a sector survives, in percent.
        percent: u64,
    },
    /// Power cut: everything that the disk had accepted up to a random moment, and nothing later.
    Prefix,
    /// Power cut: all but one sector.
    AllButOne,
    /// Power cut: only the sectors of the last few writes.
    LastWrites {
        /// The number of writes.
        writes: u64,
    },
    /// The disk was lost and has returned, with a part of its page cache, and the system has not stopped. Like a power
    /// cut, but nothing shows that it happened.
    DiskLost {
        /// The probability that a sector survives, in percent; at 100 all but one do.
        percent: u64,
    },
    /// The process was killed and the system runs on: all accepted writes are visible, and none of them is durable yet.
    Kill,
}

impl Survival {
    /// A random kind.
    pub fn draw(random: &Random) -> Survival {
        match random.below(12) {
            0 => Survival::Nothing,
            1 | 2 => Survival::Everything,
            3..=6 => Survival::Coin { percent: *random.pick(&[5, 30, 50, 70, 95]) },
            7 | 8 => Survival::Prefix,
            9 => Survival::AllButOne,
            10 => Survival::LastWrites { writes: random.between(1, 6) },
            _ => Survival::Kill,
        }
    }

    /// A random kind, more often one after which the system continues to run.
    pub fn draw_of_process(random: &Random) -> Survival {
        match random.below(8) {
            0 | 1 => Survival::Kill,
            2 => Survival::DiskLost { percent: *random.pick(&[5, 50, 100, 100]) },
            _ => Survival::draw(random),
        }
    }

    /// True for a power cut, after which the remaining content is durable.
    pub fn is_power_cut(self) -> bool {
        !matches!(self, Survival::Kill | Survival::DiskLost { .. })
    }
}

impl fmt::Display for Survival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Survival::Nothing => write!(f, "power cut keeping nothing unsynced"),
            Survival::Everything => write!(f, "power cut keeping everything taken"),
            Survival::Coin { percent } => write!(f, "power cut keeping {percent} % of sectors"),
            Survival::Prefix => write!(f, "power cut keeping a prefix"),
            Survival::AllButOne => write!(f, "power cut losing one sector"),
            Survival::LastWrites { writes } => write!(f, "power cut keeping only the last {writes} writes"),
            Survival::DiskLost { percent } => write!(f, "loss of the disk keeping {percent} % of sectors"),
            Survival::Kill => write!(f, "kill"),
        }
    }
}

/// Turns the disk of a stopped machine into the disk that the next one finds.
pub(super) fn survive(image: &mut Image, in_flight: &[InFlight], survival: Survival, random: &Random) {
    if survival == Survival::Kill {
        land_some(image, in_flight, random);
        image.adopt_all();
        return;
    }
    if !matches!(survival, Survival::DiskLost { .. }) {
        image.reboot();
    }
    if let Survival::Coin { percent } | Survival::DiskLost { percent } = survival {
        // Writes in flight may have reached any of their sectors; as versions, these take part in the choice below.
        land_percent(image, in_flight, percent, random);
    } else if survival != Survival::Nothing && random.chance(50) {
        land_some(image, in_flight, random);
    }
    if image.is_len_open() {
        let is_kept = match survival {
            Survival::Nothing => false,
            Survival::Everything => true,
            _ => random.chance(50),
        };
        image.resolve_len(is_kept);
    }
    let dirty = image.dirty();
    let view = View::new(image, &dirty, survival, random);
    for number in dirty {
        let kept = view.choose(image, number, random);
        image.resolve_sector(number, kept);
    }
}

fn land_some(image: &mut Image, in_flight: &[InFlight], random: &Random) {
    let percent = *random.pick(&[0, 20, 50, 80, 100]);
    land_percent(image, in_flight, percent, random);
}

fn land_percent(image: &mut Image, in_flight: &[InFlight], percent: u64, random: &Random) {
    for write in in_flight {
        for sector in write.left(image) {
            if random.chance(percent) {
                image.take(sector, write.content(sector), &write.mark);
            }
        }
    }
}

/// Facts about the whole disk that some kinds of survival need.
struct View {
    survival: Survival,
    /// For [`Survival::Prefix`]: the last accepted number that survives.
    cut: u64,
    /// For [`Survival::AllButOne`]: the sector that does not survive.
    lost: Option<u64>,
    /// For [`Survival::LastWrites`]: the first write that survives.
    first_write: u64,
}

impl View {
    fn new(image: &Image, dirty: &[u64], survival: Survival, random: &Random) -> View {
        let versions = || dirty.iter().filter_map(|number| image.sector(*number)).flat_map(|sector| &sector.versions);
        let taken = versions().map(|version| version.taken);
        let (first, last) = (taken.clone().min().unwrap_or(0), taken.max().unwrap_or(0));
        let mut writes: Vec<u64> = versions().map(|version| version.write.number()).collect();
        writes.sort_unstable();
        writes.dedup();
        let keep = if let Survival::LastWrites { writes: keep } = survival { keep as usize } else { 0 };
        View {
            survival,
            cut: random.between(first.saturating_sub(1), last),
            lost: (!dirty.is_empty()).then(|| *random.pick(dirty)),
            first_write: writes.iter().rev().take(keep).next_back().copied().unwrap_or(u64::MAX),
        }
    }

    fn choose(&self, image: &Image, number: u64, random: &Random) -> Content {
        let sector = image.sector(number)?;
        let last = |wanted: &dyn Fn(u64, u64) -> bool| {
            let found = sector.versions.iter().rev().find(|v| wanted(v.taken, v.write.number()));
            found.map_or_else(|| sector.durable.clone(), |version| version.content.clone())
        };
        match self.survival {
            Survival::Nothing => sector.durable.clone(),
            Survival::Everything | Survival::Kill => last(&|_, _| true),
            Survival::Prefix => last(&|taken, _| taken <= self.cut),
            Survival::LastWrites { .. } => last(&|_, write| write >= self.first_write),
            Survival::AllButOne | Survival::DiskLost { percent: 100 } if self.lost == Some(number) => {
                sector.durable.clone()
            }
            Survival::AllButOne | Survival::DiskLost { percent: 100 } => last(&|_, _| true),
            Survival::Coin { percent } | Survival::DiskLost { percent } if random.chance(percent) => {
                if random.chance(50) { last(&|_, _| true) } else { random.pick(&sector.versions).content.clone() }
            }
            Survival::Coin { .. } | Survival::DiskLost { .. } => sector.durable.clone(),
        }
    }
}
