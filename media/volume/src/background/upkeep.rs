//! The work of an idle volume: it relocates fragmented extents (`relocate`), and deallocates free physical blocks.
//!
//! It runs concurrently with commits and checkpoints and works like a request: its physical blocks are taken, map
//! entries go into the memtable, and it counts as a change meanwhile. A request waits for at most one step of it.

use std::future::pending;
use std::time::Duration;

use sealblock_block::{Clock, Medium};

use crate::options::Mutation;
use crate::space::Allocation;
use crate::space::free_map::PUNCH_BYTES;
use crate::space::idle::{IdlePeriod, IdleWorkCounts};
use crate::volume::{Volume, VolumeState};

/// The number of consecutive idle times after which free physical blocks are deallocated: those that are soon reused
/// keep their space.
const PUNCH_AFTER_IDLE_TIMES: u32 = 100;
/// How long a lost copy of a reserved area stays as it was found, so that `status` can show it.
const MEND_AFTER: Duration = Duration::from_secs(60);
/// Units that one step deallocates: 8 MiB.
const PUNCH_UNITS: u32 = 128;

impl<M: Medium, C: Clock> Volume<M, C> {
    /// The counters of this work since the volume was opened.
    pub fn upkeep(&self) -> IdleWorkCounts {
        self.upkeep.counts.get()
    }

    /// Does this work whenever the volume is idle, for as long as it is polled.
    pub(crate) async fn run_idle_work(&self) {
        loop {
            self.allocator.touched.wait_until(|| self.allocator.changed.get()).await;
            let idle_period = self.upkeep.idle_period();
            self.clock.sleep(self.upkeep.idle_after).await;
            if self.state.get() != VolumeState::Open || self.block_map.has_newer_pages() {
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

    /// Rewrites lost copies of reserved areas some time after they were found, for as long as it is polled.
    pub(crate) async fn run_mending(&self) {
        loop {
            self.reserved.wait_for_lost().await;
            self.clock.sleep(MEND_AFTER).await;
            let Ok(_change) = self.begin_change() else { return pending().await };
            // Otherwise it is retried when the volume is closed.
            if !self.mend_reserved().await {
                return pending().await;
            }
        }
    }

    /// Waits until the volume has been idle for long; true if it has.
    async fn stays_idle(&self, idle_period: &IdlePeriod<'_>) -> bool {
        for _ in 0..PUNCH_AFTER_IDLE_TIMES {
            self.clock.sleep(self.upkeep.idle_after).await;
            if !idle_period.lasts() || self.allocator.changed.get() {
                return false;
            }
        }
        true
    }

    /// Deallocates free physical blocks while the volume is idle. A close waits for the step in flight.
    async fn punch_idle(&self, idle_period: &IdlePeriod<'_>) -> bool {
        let Ok(_change) = self.begin_change() else { return false };
        self.punch_all(|| idle_period.lasts() && self.state.get() == VolumeState::Open).await
    }

    /// Deallocates free physical blocks as a close does, concurrently with requests, while `goes_on` returns true:
    /// before a close that must be short.
    pub async fn give_space_back(&self, goes_on: impl Fn() -> bool) {
        if let Ok(_change) = self.begin_change() {
            self.punch_all(|| goes_on() && self.state.get() == VolumeState::Open).await;
        }
    }

    /// Deallocates all free physical blocks of block groups that were written, in whole units, while `goes_on` returns
    /// true. True if it is complete.
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

    /// Deallocates free physical blocks. They count as in use meanwhile.
    pub(crate) async fn punch(&self, group: u64, taken: Allocation<'_>) {
        for &(start, count) in taken.runs() {
            let (offset, mut length) =
                (self.pbn_offset(group, start), u64::from(count) << self.geometry.block_size.shift());
            if self.mutation.is(Mutation::PunchBeyond) {
                // An injected fault: the physical blocks after the free ones lose their data.
                let end = self.layout.block_group(group).map_or(0, |group| group.end_offset);
                length = (length + u64::from(PUNCH_BYTES)).min(end - offset);
            }
            // If no space would be freed, this would only write zeroes: a free physical block is never read.
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
