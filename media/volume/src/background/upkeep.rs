//! What an idle volume does by itself: extents that lie in many fragments are brought together
//! (`relocate`), and the space of free physical blocks goes back to the medium.
//!
//! It runs beside commits and checkpoints and does nothing that a request could not do: physical blocks that it uses are taken,
//! map entries are put into the memtable, and it counts as a change while it does so. A request that comes has to wait for one
//! step at most.

use std::future::pending;

use sealblock_block::{Clock, Medium};

use crate::options::Mutation;
use crate::space::Allocation;
use crate::space::free_map::PUNCH_BYTES;
use crate::space::idle::{IdlePeriod, UpkeepCounts};
use crate::volume::{Volume, VolumeState};

/// Idle times in a row after which the space of free physical blocks is given back: physical blocks that are used again soon
/// keep theirs.
const PUNCH_AFTER_IDLE_TIMES: u32 = 100;
/// Units given back in one step: 8 MiB.
const PUNCH_UNITS: u32 = 128;

impl<M: Medium, C: Clock> Volume<M, C> {
    /// What the volume has done by itself since it was opened.
    pub fn upkeep(&self) -> UpkeepCounts {
        self.upkeep.counts.get()
    }

    /// Keeps physical blocks in order whenever the volume is idle, for as long as it is polled.
    pub(crate) async fn run_upkeep(&self) {
        loop {
            self.allocator.touched.wait_until(|| self.allocator.changed.get()).await;
            let idle_period = self.upkeep.idle_period();
            self.clock.sleep(self.upkeep.idle_after).await;
            if self.state.get() != VolumeState::Open {
                return pending().await;
            }
            if !idle_period.lasts() {
                continue;
            }
            self.allocator.changed.set(false);
            let moved = !self.upkeep.relocates || self.relocate_all(&idle_period).await;
            if !moved || !self.stays_idle(&idle_period).await || !self.punch_idle(&idle_period).await {
                self.allocator.changed.set(true);
            }
        }
    }

    /// Waits until the volume has been idle for long; whether it has.
    async fn stays_idle(&self, idle_period: &IdlePeriod<'_>) -> bool {
        for _ in 0..PUNCH_AFTER_IDLE_TIMES {
            self.clock.sleep(self.upkeep.idle_after).await;
            if !idle_period.lasts() || self.allocator.changed.get() {
                return false;
            }
        }
        true
    }

    /// Gives the space of free physical blocks back while the volume is idle. A close waits for the step in flight.
    async fn punch_idle(&self, idle_period: &IdlePeriod<'_>) -> bool {
        let Ok(_change) = self.begin_change() else { return false };
        self.punch_all(|| idle_period.lasts() && self.state.get() == VolumeState::Open).await
    }

    /// Gives the space of free physical blocks back as closing does, beside requests, while `goes_on` says so: before one that
    /// is not to take long.
    pub async fn give_space_back(&self, goes_on: impl Fn() -> bool) {
        if let Ok(_change) = self.begin_change() {
            self.punch_all(|| goes_on() && self.state.get() == VolumeState::Open).await;
        }
    }

    /// Gives the space of all free physical blocks of block groups that were written to back, in whole units, while `goes_on`
    /// says so. Whether it came to the end.
    pub(crate) async fn punch_all(&self, goes_on: impl Fn() -> bool) -> bool {
        if !self.allocator.gives_space_back() || !self.medium.can_punch() {
            return true;
        }
        for group in self.allocator.groups() {
            let mut from = 0;
            while let Some((taken, next)) = self.allocator.take_unpunched(group, from, PUNCH_UNITS) {
                self.punch(group, taken).await;
                if !goes_on() {
                    return false;
                }
                from = next;
            }
        }
        true
    }

    /// Gives the space of free physical blocks back to the medium. They count as in use meanwhile.
    pub(crate) async fn punch(&self, group: u64, taken: Allocation<'_>) {
        for &(start, count) in taken.runs() {
            let (offset, mut length) =
                (self.pbn_offset(group, start), u64::from(count) << self.geometry.block_size.shift());
            if self.mutation.is(Mutation::PunchBeyond) {
                // An injected fault: the physical blocks behind the free ones lose their data.
                let end = self.layout.block_group(group).map_or(0, |group| group.end_offset);
                length = (length + u64::from(PUNCH_BYTES)).min(end - offset);
            }
            // Where no space would come back, zeroes would be written for nothing: a free physical block is never read.
            if !self.medium.can_punch() || self.medium.is_hole(offset, length) {
                continue;
            }
            match self.medium.punch(offset, length).await {
                Ok(()) => self.upkeep.count(|counts| counts.bytes_punched += length),
                Err(error) => tracing::debug!(%error, "the medium kept the space of free physical blocks"),
            }
        }
        taken.release();
    }
}
