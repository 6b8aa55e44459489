//! Tests of a scrub with a simulated device and clock.

mod bounds;
mod bytes;
mod commands;
mod pace;
mod schedule;

use std::num::NonZeroU64;
use std::time::Duration;

use sealblock_units::{BlockSize, Extent};

use crate::{Activity, CheckResult, DeviceProfile, Now, Scrub, ScrubStep, Settings};

const DAY: u64 = 86_400;

/// A scrub with a simulated device and clock.
struct Harness {
    scrub: Scrub,
    now: Now,
    activity: Activity,
    /// The pieces that were checked, and when.
    pieces: Vec<(Duration, Extent)>,
    /// Blocks that are bad, and whether they can be repaired.
    bad: Vec<(u64, bool)>,
}

fn profile(capacity_blocks: u64) -> DeviceProfile {
    DeviceProfile { block_size: BlockSize::B4096, capacity_blocks, max_blocks: 1 << 20, uuid: Some([7; 16]) }
}

fn rate(bytes: u64) -> Option<NonZeroU64> {
    NonZeroU64::new(bytes)
}

impl Harness {
    fn new(capacity_blocks: u64, settings: Settings) -> Harness {
        Harness::of(Scrub::new(profile(capacity_blocks), settings))
    }

    fn of(scrub: Scrub) -> Harness {
        let now = Now { steady: Duration::from_secs(100), unix_s: 1_000 * DAY };
        Harness { scrub, now, activity: Activity::default(), pieces: Vec::new(), bad: Vec::new() }
    }

    fn pass(&mut self, time: Duration) {
        let before = self.now.steady.as_secs();
        self.now.steady += time;
        self.now.unix_s += self.now.steady.as_secs() - before;
    }

    /// One step; a piece is checked in no time.
    fn step(&mut self) -> ScrubStep {
        let step = self.scrub.step(self.now, self.activity);
        if let ScrubStep::Check(extent) = step {
            self.pieces.push((self.now.steady, extent));
            self.finish_piece(extent);
        }
        step
    }

    fn finish_piece(&mut self, extent: Extent) {
        let inside = |lba: u64| (extent.start().get()..=extent.last().get()).contains(&lba);
        let bad: Vec<_> = self.bad.iter().filter(|(lba, _)| inside(*lba)).collect();
        let repaired = bad.iter().filter(|(_, repaired)| *repaired).count();
        let found = CheckResult { bad_blocks: bad.len() as u64, repaired: repaired as u64, unchecked: 0 };
        self.scrub.checked(self.now, extent, found);
    }

    /// Lets `time` pass while the scrub runs.
    fn run_for(&mut self, time: Duration) {
        let end = self.now.steady + time;
        while self.now.steady < end {
            match self.step() {
                ScrubStep::Check(_) => {}
                ScrubStep::Wait(wait) => self.pass(wait.min(end - self.now.steady)),
                ScrubStep::Idle => self.pass(end - self.now.steady),
            }
        }
    }

    /// The first and last block of all pieces, which have to follow each other.
    #[track_caller]
    fn checked_blocks(&self) -> Option<(u64, u64)> {
        let (first, last) = (self.pieces.first()?.1, self.pieces.last()?.1);
        for pair in self.pieces.windows(2) {
            assert_eq!(pair[0].1.last().get() + 1, pair[1].1.start().get(), "each block once, in order");
        }
        Some((first.start().get(), last.last().get()))
    }
}
