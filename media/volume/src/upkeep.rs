//! What a volume does by itself while nobody asks anything of it: extents that lie in many pieces are brought together
//! (`relocate`), and the space of free slots goes back to the medium.
//!
//! It runs beside commits and checkpoints and does nothing that a request could not do: slots that it uses are taken,
//! records are put into the overlay, and it counts as a change while it does so. A request that comes has to wait for one
//! step at most.

use std::cell::Cell;
use std::future::pending;
use std::time::Duration;

use sealblock_block::{Clock, Medium};

use crate::block_allocator::Taken;
use crate::free_map::PUNCH_BYTES;
use crate::open::{Mutation, OpenOptions};
use crate::volume::{State, Volume};

/// Idle times in a row after which the space of free slots is given back: slots that are used again soon keep theirs.
const PUNCH_AFTER_IDLE_TIMES: u32 = 100;
/// Units given back in one step: 8 MiB.
const PUNCH_UNITS: u32 = 128;

/// What upkeep has done since the volume was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct UpkeepCounts {
    /// Blocks that were moved to lie beside their neighbours.
    pub blocks_moved: u64,
    /// Blocks that were to be moved and did not check, or could not be read: they stay as they are.
    pub blocks_unfit: u64,
    /// Bytes of free slots given back to the medium.
    pub bytes_punched: u64,
}

/// How upkeep is done, and what it has done.
pub(crate) struct Upkeep {
    relocates: bool,
    idle_after: Duration,
    /// Counts requests.
    pub requests: Cell<u64>,
    pub counts: Cell<UpkeepCounts>,
}

impl Upkeep {
    /// For a volume opened like this.
    pub fn new(options: &OpenOptions) -> Upkeep {
        let OpenOptions { relocate, idle_after, .. } = *options;
        Upkeep { relocates: relocate, idle_after, requests: Cell::new(0), counts: Cell::default() }
    }

    /// Notes a request.
    pub fn disturb(&self) {
        self.requests.set(self.requests.get().wrapping_add(1));
    }

    /// Adds to what has been done.
    pub fn count(&self, add: impl FnOnce(&mut UpkeepCounts)) {
        let mut counts = self.counts.get();
        add(&mut counts);
        self.counts.set(counts);
    }
}

/// A time without requests: over as soon as one comes.
pub(crate) struct Quiet<'a> {
    upkeep: &'a Upkeep,
    since: u64,
}

impl Quiet<'_> {
    /// Whether no request has come.
    pub fn lasts(&self) -> bool {
        self.upkeep.requests.get() == self.since
    }
}

impl<M: Medium, C: Clock> Volume<M, C> {
    /// What the volume has done by itself since it was opened.
    pub fn upkeep(&self) -> UpkeepCounts {
        self.upkeep.counts.get()
    }

    /// Keeps slots in order whenever the volume is idle, for as long as it is polled.
    pub(crate) async fn keep_up(&self) {
        loop {
            self.slots.touched.wait_until(|| self.slots.changed.get()).await;
            let quiet = self.quiet();
            self.clock.sleep(self.upkeep.idle_after).await;
            if self.state.get() != State::Open {
                return pending().await;
            }
            if !quiet.lasts() {
                continue;
            }
            self.slots.changed.set(false);
            let moved = !self.upkeep.relocates || self.relocate_all(&quiet).await;
            if !moved || !self.stays_idle(&quiet).await || !self.punch_idle(&quiet).await {
                self.slots.changed.set(true);
            }
        }
    }

    /// A time without requests that begins now.
    pub(crate) fn quiet(&self) -> Quiet<'_> {
        Quiet { upkeep: &self.upkeep, since: self.upkeep.requests.get() }
    }

    /// Waits until the volume has been idle for long; whether it has.
    async fn stays_idle(&self, quiet: &Quiet<'_>) -> bool {
        for _ in 0..PUNCH_AFTER_IDLE_TIMES {
            self.clock.sleep(self.upkeep.idle_after).await;
            if !quiet.lasts() || self.slots.changed.get() {
                return false;
            }
        }
        true
    }

    /// Gives the space of free slots back while the volume is idle. A close waits for the step under way.
    async fn punch_idle(&self, quiet: &Quiet<'_>) -> bool {
        let Ok(_change) = self.begin_change() else { return false };
        self.punch_all(|| quiet.lasts() && self.state.get() == State::Open).await
    }

    /// Gives the space of free slots back as closing does, beside requests, while `goes_on` says so: before one that is not to
    /// take long.
    pub async fn give_space_back(&self, goes_on: impl Fn() -> bool) {
        if let Ok(_change) = self.begin_change() {
            self.punch_all(|| goes_on() && self.state.get() == State::Open).await;
        }
    }

    /// Gives the space of all free slots of zones that were written to back, in whole units, while `goes_on` says so. Whether
    /// it came to the end.
    pub(crate) async fn punch_all(&self, goes_on: impl Fn() -> bool) -> bool {
        if !self.slots.gives_space_back() || !self.medium.can_punch() {
            return true;
        }
        for zone in self.slots.zones() {
            let mut from = 0;
            while let Some((taken, next)) = self.slots.take_stale(zone, from, PUNCH_UNITS) {
                self.punch(zone, taken).await;
                if !goes_on() {
                    return false;
                }
                from = next;
            }
        }
        true
    }

    /// Gives the space of free slots back to the medium. Nobody uses them meanwhile.
    pub(crate) async fn punch(&self, zone: u64, taken: Taken<'_>) {
        for &(start, count) in taken.runs() {
            let (offset, mut length) =
                (self.slot_offset(zone, start), u64::from(count) << self.geometry.block_size.shift());
            if self.mutation == Mutation::PunchBeyond {
                // A fault put in on purpose: the slots behind the free ones lose their data.
                let end = self.layout.block_group(zone).map_or(0, |zone| zone.end_offset);
                length = (length + u64::from(PUNCH_BYTES)).min(end - offset);
            }
            // Where no space would come back, zeroes would be written to no end: nobody reads a free slot.
            if !self.medium.can_punch() || self.medium.is_hole(offset, length) {
                continue;
            }
            match self.medium.punch(offset, length).await {
                Ok(()) => self.upkeep.count(|counts| counts.bytes_punched += length),
                Err(error) => tracing::debug!(%error, "the medium kept the space of free slots"),
            }
        }
        taken.give_back();
    }
}
