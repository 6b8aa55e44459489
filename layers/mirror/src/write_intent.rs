//! What the mirror knows of its legs, and how that gets to be durable.
//!
//! Invariants. Before a change goes to any leg, the labels say that its regions may differ (`noted`). Before a change that a
//! leg has missed is answered, the labels of the others say that it was left behind, and what it lacks. So whatever
//! survives a crash tells what may not be trusted. A region leaves the labels only when nothing is under way there and
//! every leg has flushed.
//!
//! A leg that is gone and had everything when it went is *unmissed* until something is changed: labels go on calling it
//! current, so that an opening that changed nothing leaves nothing behind that would speak against a leg. The first change of
//! an opening, and every one that a leg starts to miss, is in the lineage before it is carried out.

use std::cell::{Cell, RefCell};
use std::ops::RangeInclusive;
use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_block::{Clock, Condition, Error, ErrorKind, Request, ReservedArea};
use sealblock_runtime_memory::Slice;
use sealblock_units::Extent;

use crate::label::{Label, ReplicaRecord, ReplicaState};
use crate::lineage::Lineage;
use crate::mirror::Mirror;
use crate::paging::Paging;
use crate::regions::Regions;
use crate::replica::Replica;
use crate::test_hooks::Mutation;

/// How far the session of this opening is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Phase {
    /// Nothing was changed since the mirror was opened.
    Idle,
    /// Something is to be changed.
    Wanted,
    /// Labels were sent that announce the session.
    Announced,
    /// They are where they should be.
    Heard,
    /// Labels were sent that confirm it.
    Confirmed,
    /// They are where they should be: changes may be carried out.
    Durable,
}

/// What is known, and what is noted of it.
pub(crate) struct WriteIntent {
    pub events: Cell<u64>,
    /// The openings that have changed the mirror.
    lineage: RefCell<Lineage>,
    /// As in labels.
    changed: Cell<u64>,
    is_tentative: Cell<bool>,
    /// Drawn for the session of this opening.
    drawn: u64,
    /// How far its labels are from those that are written elsewhere.
    apart: u64,
    phase: Cell<Phase>,
    /// The next label comes before a change of a new kind.
    pub is_changing: Cell<bool>,
    /// Such a label is under way, or was and is not known to be anywhere: who does not get it lacks what it says, be it
    /// only who the legs are.
    is_binding: Cell<bool>,
    /// Counts changes; and how many there were when all current legs had last flushed and nothing was under way.
    changes: Cell<u64>,
    even: Cell<u64>,
    /// Regions in which the current legs may differ.
    pub dirty: RefCell<Regions>,
    /// Those of them that the labels are not known to have.
    fresh: RefCell<Regions>,
    /// Just the regions that were written since the group around them was clean and flushed; after a crash, which forgets
    /// them, all that is dirty.
    pub written: RefCell<Regions>,
    /// Regions in which the current legs may differ although nothing is under way.
    pub nosync: RefCell<Regions>,
    /// Counts what was added to `suspect`.
    pub suspected: Cell<u64>,
    /// Counts copies with which current legs were made alike; and how many of them are known to be durable.
    pub copied: Cell<u64>,
    pub copies_flushed: Cell<u64>,
    /// Regions that were changed since the last look.
    written_since_sweep: RefCell<Regions>,
    wanted: Cell<u64>,
    /// What somebody has tried to note, and what some leg's label is known to say.
    attempted_seq: Cell<u64>,
    durable_seq: Cell<u64>,
    /// When a leg was last left behind.
    failure_seq: Cell<u64>,
    failure: RefCell<Option<Error>>,
    writing: Cell<bool>,
    /// Labels were written since the mirror was opened.
    has_begun: Cell<bool>,
    turned: Condition,
    /// What is in the bitmap pages of the legs.
    pub paging: RefCell<Paging>,
    /// A block that is withheld may have a good copy somewhere by now.
    pub examine: Cell<bool>,
}

/// How far the generations of one opening are from those of the one before, at least. How much farther is drawn, so that two
/// openings that do not know of each other do not write labels of the same generation.
const LABELS_APART: u64 = 16;

/// What a mirror begins with, from the label that tells.
pub(crate) struct Past {
    /// The highest of all labels.
    pub events: u64,
    pub lineage: Lineage,
    pub changed: u64,
    pub is_tentative: bool,
    pub dirty: Regions,
}

impl WriteIntent {
    /// The notes of an opening for which these bytes were drawn.
    pub fn new(past: Past, random: &[u8; 16]) -> WriteIntent {
        let Past { events: generation, lineage, changed, is_tentative, dirty } = past;
        let none = Regions::none(dirty.most());
        let drawn = u64::from_le_bytes(*random.last_chunk().expect("sixteen bytes have eight"));
        let skipped = u32::from_le_bytes(*random.first_chunk().expect("sixteen bytes have four"));
        WriteIntent {
            events: Cell::new(generation),
            lineage: RefCell::new(lineage),
            changed: Cell::new(changed),
            is_tentative: Cell::new(is_tentative),
            drawn,
            apart: LABELS_APART + u64::from(skipped),
            phase: Cell::new(Phase::Idle),
            is_changing: Cell::new(false),
            is_binding: Cell::new(false),
            changes: Cell::new(0),
            even: Cell::new(0),
            nosync: RefCell::new(dirty.clone()),
            suspected: Cell::new(0),
            copied: Cell::new(0),
            copies_flushed: Cell::new(0),
            fresh: RefCell::new(dirty.clone()),
            written: RefCell::new(dirty.clone()),
            dirty: RefCell::new(dirty),
            written_since_sweep: RefCell::new(none),
            wanted: Cell::new(0),
            attempted_seq: Cell::new(0),
            durable_seq: Cell::new(0),
            failure_seq: Cell::new(0),
            failure: RefCell::default(),
            writing: Cell::new(false),
            has_begun: Cell::new(false),
            turned: Condition::default(),
            paging: RefCell::default(),
            examine: Cell::new(true),
        }
    }

    /// From now on labels are later than one of this generation, which others know of, and apart from those that they write after it.
    pub fn go_beyond(&self, generation: u64) {
        self.events.set(generation + self.apart);
    }

    /// Whether the labels are known to have all of these regions.
    fn has_noted(&self, regions: &RangeInclusive<u32>) -> bool {
        self.dirty.borrow().contains_all(regions.clone()) && !self.fresh.borrow().contains_any(regions.clone())
    }

    /// Something is to be changed that the next label has to come before.
    pub fn begin_change(&self) {
        self.is_changing.set(true);
        if self.phase.get() == Phase::Idle {
            self.phase.set(Phase::Wanted);
        }
    }

    /// Whether the last label before a change, of an earlier opening, may have been under way when all stopped.
    pub fn is_in_doubt(&self) -> bool {
        self.is_tentative.get() && self.phase.get() < Phase::Confirmed
    }

    /// Takes the session a step further, in the label of this generation; whether legs that were unmissed are missed from it on.
    fn advance(&self, generation: u64) -> bool {
        let mut lineage = self.lineage.borrow_mut();
        match self.phase.get() {
            Phase::Wanted => {
                lineage.begin(self.drawn, generation);
                self.phase.set(Phase::Announced);
            }
            Phase::Heard => {
                self.phase.set(Phase::Confirmed);
                self.is_changing.set(true);
            }
            _ => {}
        }
        let may_change = self.phase.get() >= Phase::Confirmed;
        if may_change && self.is_changing.replace(false) {
            // One that no leg in sync is known to have got came before no change.
            if !self.is_binding.get() {
                self.changed.set(lineage.sessions().first().map_or(0, |session| session.until));
            }
            self.is_tentative.set(true);
            lineage.confirm(generation);
            self.is_binding.set(true);
            return true;
        }
        if self.phase.get() == Phase::Durable && !self.is_binding.get() {
            self.is_tentative.set(false);
        }
        false
    }

    /// The last labels are where they should be; whether others have to follow.
    fn heard(&self) -> bool {
        match self.phase.get() {
            Phase::Announced => self.phase.set(Phase::Heard),
            Phase::Confirmed => self.phase.set(Phase::Durable),
            _ => {}
        }
        self.is_binding.set(false);
        self.phase.get() == Phase::Heard
    }

    /// Something changed that should be noted some time.
    pub fn want(&self) -> u64 {
        self.wanted.set(self.wanted.get() + 1);
        self.wanted.get()
    }

    /// Whether labels are being written.
    pub fn is_writing(&self) -> bool {
        self.writing.get()
    }

    /// Whether something is to be noted.
    pub fn is_due(&self) -> bool {
        self.durable_seq.get() < self.wanted.get()
    }

    /// A leg was left behind, which is to be noted before anything that it lacks is answered.
    pub fn want_left(&self) {
        self.failure_seq.set(self.want());
    }

    /// Whether the labels do not say yet that a leg was left behind.
    pub fn has_unrecorded_failure(&self) -> bool {
        self.durable_seq.get() < self.failure_seq.get()
    }
}

/// A label that a leg is to get.
struct Made {
    leg: Rc<Replica>,
    /// Which of its devices the label is for.
    epoch: u64,
    events: u64,
    bytes: Slice,
}

/// What came of sending labels.
struct Heard {
    /// How many legs that have everything are known to have theirs now.
    durable_seq: usize,
    /// One that was to get its label has gone, and is back with another device or not.
    has_lost: bool,
}

/// Gives up the right to write labels, also when a request is dropped half-way.
struct Writing<'a>(&'a WriteIntent);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.writing.set(false);
        self.0.turned.notify();
    }
}

impl<C: Clock> Mirror<C> {
    /// Says that the regions of an extent may differ from now on; durable when it returns. Whole groups are said, so that
    /// writing on costs no further label, and what exactly is written is remembered here.
    pub(crate) async fn mark_dirty(&self, extent: Extent) -> Result<(), Error> {
        let regions = self.map.of(extent);
        self.write_intent.changes.set(self.write_intent.changes.get() + 1);
        self.write_intent.written_since_sweep.borrow_mut().insert_all(regions.clone());
        self.write_intent.written.borrow_mut().insert_all(regions.clone());
        let groups = self.map.groups(&regions);
        let is_noted = self.write_intent.has_noted(&groups)
            && self.write_intent.phase.get() == Phase::Durable
            && !self.has_unmissed();
        for leg in self.legs.borrow().iter() {
            // After a crash it lacks whatever is dirty besides.
            let is_missing = leg.standing.get() == ReplicaState::OutOfSync;
            if leg.is_untold() || (is_missing && !(is_noted && self.mutation == Mutation::ForgetMissed)) {
                leg.out_of_sync.borrow_mut().insert_all(regions.clone());
            }
            if leg.is_untold() {
                leg.to_resync.borrow_mut().insert_all(regions.clone());
            }
        }
        if is_noted {
            return Ok(());
        }
        self.write_intent.fresh.borrow_mut().insert_all(groups.clone());
        self.write_intent.dirty.borrow_mut().insert_all(groups);
        if self.mutation == Mutation::SkipMark {
            return Ok(());
        }
        self.write_intent.begin_change();
        self.write_labels().await
    }

    /// Whether a leg is gone that labels call current, nothing having been changed since.
    pub(crate) fn has_unmissed(&self) -> bool {
        self.legs.borrow().iter().any(|leg| leg.is_unmissed.get())
    }

    /// Makes durable who is gone, before somebody sees or changes what they may lack.
    pub(crate) async fn note_left(&self) -> Result<(), Error> {
        if self.has_unmissed() {
            self.write_intent.begin_change();
        } else if !self.write_intent.has_unrecorded_failure() {
            return Ok(());
        }
        self.write_labels().await
    }

    /// Whether every current leg has everything, durably, and nothing is under way.
    pub(crate) fn is_even(&self) -> bool {
        let has_changed = self.write_intent.phase.get() >= Phase::Confirmed;
        let is_quiet = || {
            !self.write_intent.is_binding.get() && self.claims.is_idle() && self.write_intent.nosync.borrow().is_empty()
        };
        !has_changed || (self.write_intent.even.get() == self.write_intent.changes.get() && is_quiet())
    }

    /// Makes everything written so far durable on every leg, without saying what was lost before.
    pub(crate) async fn ask_flush(&self) -> Result<(), Error> {
        let (changes, is_idle, renewed) = (self.write_intent.changes.get(), self.claims.is_idle(), self.renewed());
        let asked = self.ask_all(&self.write_targets(), &Request::Flush).await;
        let flushed = self.complete_write(asked, None).await;
        if flushed.is_err() {
            // Each may have lost something else, also one that is being brought up to date.
            self.suspect_dirty();
        }
        flushed?;
        if is_idle {
            self.write_intent.even.set(changes);
        }
        if renewed.is_empty() {
            return Ok(());
        }
        // As long as labels list them a crash would make what is durable there an older copy again.
        self.settle_renewed(&renewed);
        self.write_labels().await
    }

    /// Says that current legs may differ in an extent, until that was looked after.
    pub(crate) fn nosync(&self, extent: Extent) {
        let mut regions = Regions::none(self.map.count());
        regions.insert_all(self.map.of(extent));
        self.suspect_regions(&regions);
    }

    /// Says that current legs, and those that are being brought up to date, may differ wherever something was not flushed.
    pub(crate) fn suspect_dirty(&self) {
        self.suspect_regions(&self.write_intent.written.borrow());
    }

    fn suspect_regions(&self, regions: &Regions) {
        self.write_intent.nosync.borrow_mut().add(regions);
        self.write_intent.suspected.set(self.write_intent.suspected.get() + 1);
        for leg in self.legs.borrow().iter().filter(|leg| leg.standing.get() == ReplicaState::Resyncing) {
            // Missed, too: should it leave again before they are brought to it, they may be out of the labels by then.
            leg.out_of_sync.borrow_mut().add(regions);
            leg.to_resync.borrow_mut().add(regions);
        }
        self.work.notify();
    }

    /// Makes everything that is known durable on every leg that has room, and on one at least.
    pub(crate) async fn write_labels(&self) -> Result<(), Error> {
        if self.read_only {
            return Ok(());
        }
        let ticket = self.write_intent.want();
        while self.write_intent.attempted_seq.get() < ticket {
            if self.write_intent.writing.get() {
                self.write_intent
                    .turned
                    .wait_until(|| !self.write_intent.writing.get() || self.write_intent.attempted_seq.get() >= ticket)
                    .await;
                continue;
            }
            self.write_intent.writing.set(true);
            let _writing = Writing(&self.write_intent);
            let result = self.write_label_round().await;
            *self.write_intent.failure.borrow_mut() = result.err();
        }
        self.write_intent.failure.borrow().clone().map_or(Ok(()), Err)
    }

    /// Writes labels until nothing that they say has changed meanwhile because of them.
    async fn write_label_round(&self) -> Result<(), Error> {
        loop {
            self.write_intent.events.set(self.write_intent.events.get() + 1);
            if self.write_intent.advance(self.write_intent.events.get()) {
                self.miss();
            }
            let covers = self.write_intent.wanted.get();
            self.write_pages().await;
            // From here until the labels are made nothing may wait, or the pages would not be what they refer to.
            let (fresh, sets) = (self.write_intent.fresh.borrow().clone(), self.sets());
            let (first, rest) = self.made_labels();
            let Heard { durable_seq: held, has_lost } = self.send_in_order(first, rest).await;
            if held > 0 {
                self.write_intent.paging.borrow_mut().said(&sets, has_lost);
            }
            if has_lost && self.legs.borrow().iter().any(|leg| leg.is_current()) {
                continue;
            }
            let is_held = held > 0 || self.needs_no_label();
            // The first label that is answered for must say which labels the others have since this opening: by that it is
            // told from what others write without them. And a session is announced before it is confirmed.
            let is_first = held > 0 && !self.write_intent.has_begun.replace(true);
            if is_held && (self.write_intent.heard() || is_first) {
                continue;
            }
            // Nobody waits for more than what was known when the labels were made.
            self.write_intent.attempted_seq.set(covers);
            if !is_held {
                return Err(nobody_notes());
            }
            // Those that are suspect are made alike once who lacks them is noted.
            self.work.notify();
            self.write_intent.durable_seq.set(covers);
            self.write_intent.fresh.borrow_mut().subtract(&fresh);
            return Ok(());
        }
    }

    /// From the label that is made now on, legs that are gone are called so.
    fn miss(&self) {
        for leg in self.legs.borrow().iter().filter(|leg| leg.is_unmissed.replace(false)) {
            if leg.standing.get() != ReplicaState::InSync {
                self.write_intent.want_left();
            }
        }
    }

    /// The labels of all legs that get one, as of now: of those in sync, and of those that are brought up to date.
    fn made_labels(&self) -> (Vec<Made>, Vec<Made>) {
        let legs = self.legs.borrow();
        let legs: Vec<&Rc<Replica>> = legs.iter().filter(|leg| leg.takes_labels() && leg.has_room).collect();
        legs.iter().for_each(|leg| leg.sent_events.set(self.write_intent.events.get()));
        let made = legs.into_iter().map(|leg| Made {
            leg: leg.clone(),
            epoch: leg.attach_count(),
            events: leg.sent_events.get(),
            bytes: Slice::copy_from(&self.label_bytes(leg)),
        });
        made.partition(|made| made.leg.is_current())
    }

    /// Legs that are brought up to date get their labels once all that are in sync have theirs: what their labels know that
    /// an in-sync leg lacks was durable on one, and may have been changed.
    async fn send_in_order(&self, first: Vec<Made>, rest: Vec<Made>) -> Heard {
        let heard = self.send_labels(first).await;
        if heard.durable_seq == 0 || heard.has_lost {
            return heard;
        }
        let then = self.send_labels(rest).await;
        Heard { durable_seq: heard.durable_seq + then.durable_seq, has_lost: then.has_lost }
    }

    /// Sends legs their labels.
    async fn send_labels(&self, made: Vec<Made>) -> Heard {
        let is_there = |made: &&Made| made.leg.takes_labels() && made.leg.attach_count() == made.epoch;
        let writes = made.iter().filter(is_there).map(|made| {
            let write = Request::WriteReserved { slot: ReservedArea::GroupLabel, bytes: made.bytes.clone() };
            async move { (made, made.leg.ask(self.geometry.protection, write).await) }
        });
        let outcomes = join_all(writes).await;
        let mut held = 0;
        for (Made { leg, epoch, events: generation, .. }, outcome) in outcomes {
            match outcome {
                Ok(_) => {
                    leg.acked_events.set(*generation);
                    leg.is_told.set(true);
                    held += usize::from(leg.is_current());
                }
                // The device that is there now gets its label when it is brought up to date.
                Err(_) if leg.attach_count() != *epoch => {}
                Err(error) => self.fail_replica(leg, &format!("its label could not be written: {error}")),
            }
        }
        Heard { durable_seq: held, has_lost: !made.iter().all(|made| is_there(&made)) }
    }

    /// Has a leg's own label say that it was taken out, if it can be reached.
    pub(crate) async fn tell_removed(&self, leg: &Rc<Replica>) {
        if !leg.is_here() || !leg.has_room {
            return;
        }
        while self.write_intent.writing.get() {
            self.write_intent.turned.wait_until(|| !self.write_intent.writing.get()).await;
        }
        self.write_intent.writing.set(true);
        let _writing = Writing(&self.write_intent);
        self.write_intent.events.set(self.write_intent.events.get() + 1);
        leg.sent_events.set(self.write_intent.events.get());
        let mut label = self.label(leg);
        let own = label.own_index;
        label.members[own] = ReplicaRecord { standing: ReplicaState::Removed, is_new: false, ..leg.member() };
        let bytes = Slice::copy_from(&label.encode_alone());
        let told =
            leg.ask(self.geometry.protection, Request::WriteReserved { slot: ReservedArea::GroupLabel, bytes }).await;
        if let Err(error) = told {
            tracing::warn!(replica = %leg.name(), %error, "a leg that is taken out could not be told so");
        }
    }

    /// Without any leg left behind labels only tell where a crash may have left differences; a mirror of devices that
    /// have no room for them goes without.
    fn needs_no_label(&self) -> bool {
        self.legs.borrow().iter().all(|leg| matches!(leg.standing.get(), ReplicaState::InSync | ReplicaState::Removed))
    }

    /// The label of a leg, as of now.
    pub(crate) fn label(&self, of: &Replica) -> Label {
        let legs = self.legs.borrow();
        Label {
            uuid: self.uuid,
            events: self.write_intent.events.get(),
            changed: self.write_intent.changed.get(),
            is_tentative: self.write_intent.is_tentative.get(),
            lineage: self.write_intent.lineage.borrow().clone(),
            map: self.map,
            capacity_blocks: self.geometry.capacity_blocks,
            block_size: self.geometry.block_size,
            protection: self.geometry.protection,
            own_index: legs.iter().position(|leg| leg.id == of.id).unwrap_or(0),
            members: legs.iter().map(|leg| leg.member()).collect(),
            dirty: self.write_intent.dirty.borrow().clone(),
        }
    }

    /// Takes groups of regions out of the labels in which nothing has happened since the last look and every leg has flushed.
    pub(crate) async fn clear_clean_regions(&self) -> Result<(), Error> {
        let recent = self.write_intent.written_since_sweep.replace(Regions::none(self.map.count()));
        let is_quiet = |group: &RangeInclusive<u32>| {
            !self.write_intent.written_since_sweep.borrow().contains_any(group.clone())
                && !self.write_intent.nosync.borrow().contains_any(group.clone())
                && !self.claims.touches(self.map.group_extent(group))
        };
        let mut quiet = self.dirty_groups();
        quiet.retain(|group| !recent.contains_any(group.clone()) && is_quiet(group));
        if quiet.is_empty() && !self.has_renewed() {
            return if self.write_intent.is_due() { self.write_labels().await } else { Ok(()) };
        }
        if self.mutation != Mutation::ClearUnflushed {
            self.flush_legs().await?;
        }
        for group in quiet.into_iter().filter(is_quiet) {
            // What a leg that is away has missed of it is said by the same labels.
            self.write_intent.dirty.borrow_mut().remove_all(group.clone());
            self.write_intent.fresh.borrow_mut().remove_all(group.clone());
            self.write_intent.written.borrow_mut().remove_all(group);
        }
        self.write_labels().await
    }

    fn dirty_groups(&self) -> Vec<RangeInclusive<u32>> {
        let (dirty, mut groups, mut from) = (self.write_intent.dirty.borrow(), Vec::new(), 0);
        while let Some(region) = dirty.next(from) {
            let group = self.map.group(region);
            from = group.end() + 1;
            groups.push(group);
        }
        groups
    }
}

#[cold]
fn nobody_notes() -> Error {
    let reason = "no leg that is left has room to note that another one was left behind".to_owned();
    ErrorKind::Media { reason }.into()
}
