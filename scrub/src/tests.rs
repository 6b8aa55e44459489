//! A scrub with a device and a clock that exist only here.

mod bytes;
mod commands;
mod pace;
mod schedule;

use std::num::NonZeroU64;
use std::time::Duration;

use sealblock_units::{BlockSize, Extent};

use crate::{Activity, Checked, Now, Scrub, Settings, Shape, Step};

const DAY: u64 = 86_400;

/// A scrub and the time it has.
struct World {
    scrub: Scrub,
    now: Now,
    activity: Activity,
    /// The pieces that were checked, and when.
    pieces: Vec<(Duration, Extent)>,
    /// Blocks that are bad, and whether they can be repaired.
    bad: Vec<(u64, bool)>,
}

fn shape(capacity_blocks: u64) -> Shape {
    Shape { block_size: BlockSize::B4096, capacity_blocks, most_blocks: 1 << 20 }
}

fn rate(bytes: u64) -> Option<NonZeroU64> {
    NonZeroU64::new(bytes)
}

impl World {
    fn new(capacity_blocks: u64, settings: Settings) -> World {
        World::of(Scrub::new(shape(capacity_blocks), settings))
    }

    fn of(scrub: Scrub) -> World {
        let now = Now { steady: Duration::from_secs(100), unix_s: 1_000 * DAY };
        World { scrub, now, activity: Activity::default(), pieces: Vec::new(), bad: Vec::new() }
    }

    fn pass(&mut self, time: Duration) {
        let before = self.now.steady.as_secs();
        self.now.steady += time;
        self.now.unix_s += self.now.steady.as_secs() - before;
    }

    /// One step; what it wants is done, in no time. Whether anything is left to do by itself.
    fn step(&mut self) -> Step {
        let step = self.scrub.step(self.now, self.activity);
        if let Step::Check(extent) = step {
            self.pieces.push((self.now.steady, extent));
            self.finish_piece(extent);
        }
        step
    }

    fn finish_piece(&mut self, extent: Extent) {
        let inside = |lba: u64| (extent.start().get()..=extent.last().get()).contains(&lba);
        let met: Vec<_> = self.bad.iter().filter(|(lba, _)| inside(*lba)).collect();
        let repaired = met.iter().filter(|(_, repaired)| *repaired).count();
        let found = Checked { bad_blocks: met.len() as u64, repaired: repaired as u64, unchecked: 0 };
        self.scrub.checked(self.now, extent, found);
    }

    /// Lets time pass for so long, during which it does what it wants.
    fn run_for(&mut self, time: Duration) {
        let end = self.now.steady + time;
        while self.now.steady < end {
            match self.step() {
                Step::Check(_) => {}
                Step::Wait(wait) => self.pass(wait.min(end - self.now.steady)),
                Step::Idle => self.pass(end - self.now.steady),
            }
        }
    }

    /// The blocks of all pieces, which have to follow each other.
    #[track_caller]
    fn checked_blocks(&self) -> Option<(u64, u64)> {
        let (first, last) = (self.pieces.first()?.1, self.pieces.last()?.1);
        for pair in self.pieces.windows(2) {
            assert_eq!(pair[0].1.last().get() + 1, pair[1].1.start().get(), "each block once, in order");
        }
        Some((first.start().get(), last.last().get()))
    }
}
