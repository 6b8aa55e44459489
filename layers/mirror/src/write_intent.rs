//! What the mirror knows of its replicas, and how that gets to be durable.
//!
//! Invariants. Before a change goes to any replica, the labels say that its regions may differ (`noted`). Before a change that a
//! replica has missed is answered, the labels of the others say that it was left behind, and what it lacks. So whatever
//! survives a crash tells what may not be trusted. A region leaves the labels only when nothing is under way there and
//! every replica has flushed.
//!
//! A replica that is gone and had everything when it went is *unmissed* until something is changed: labels go on calling it
//! current, so that an opening that changed nothing leaves nothing behind that would speak against a replica. The first change of
//! an opening, and every one that a replica starts to miss, is in the lineage before it is carried out.

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
use crate::paging::PagedSets;
use crate::regions::Regions;
use crate::replica::Replica;
use crate::test_hooks::Mutation;

/// How far the session of this opening is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum SessionPhase {
    /// Nothing was changed since the mirror was opened.
    Idle,
    /// Something is to be changed.
    Wanted,
    /// Labels were sent that announce the session.
    Announced,
    /// They are where they should be.
    AnnouncedDurable,
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
    session_id: u64,
    /// How far its labels are from those that are written elsewhere.
    events_gap: u64,
    phase: Cell<SessionPhase>,
    /// The next label comes before a change of a new kind.
    pub is_changing: Cell<bool>,
    /// Such a label is under way, or was and is not known to be anywhere: who does not get it lacks what it says, be it
    /// only who the replicas are.
    is_binding: Cell<bool>,
    /// Counts changes; and how many there were when all current replicas had last flushed and nothing was under way.
    changes: Cell<u64>,
    flushed_changes: Cell<u64>,
    /// Regions in which the current replicas may differ.
    pub dirty: RefCell<Regions>,
    /// Those of them that the labels are not known to have.
    unrecorded: RefCell<Regions>,
    /// Just the regions that were written since the group around them was clean and flushed; after a crash, which forgets
    /// them, all that is dirty.
    pub written: RefCell<Regions>,
    /// Regions in which the current replicas may differ although nothing is under way.
    pub nosync: RefCell<Regions>,
    /// Counts what was added to `suspect`.
    pub nosync_count: Cell<u64>,
    /// Counts copies with which current replicas were made alike; and how many of them are known to be durable.
    pub reconciled_count: Cell<u64>,
    pub reconciled_durable: Cell<u64>,
    /// Regions that were changed since the last look.
    written_since_sweep: RefCell<Regions>,
    requested_seq: Cell<u64>,
    /// What somebody has tried to note, and what some replica's label is known to say.
    attempted_seq: Cell<u64>,
    durable_seq: Cell<u64>,
    /// When a replica was last left behind.
    failure_seq: Cell<u64>,
    write_error: RefCell<Option<Error>>,
    writing: Cell<bool>,
    /// Labels were written since the mirror was opened.
    has_written_labels: Cell<bool>,
    write_ended: Condition,
    /// What is in the bitmap pages of the replicas.
    pub paged_sets: RefCell<PagedSets>,
    /// A block that is withheld may have a good copy somewhere by now.
    pub is_stale_check_due: Cell<bool>,
}

/// How far the generations of one opening are from those of the one before, at least. How much farther is drawn, so that two
/// openings that do not know of each other do not write labels of the same generation.
const MIN_EVENTS_GAP: u64 = 16;

/// What a mirror begins with, from the label that tells.
pub(crate) struct PriorState {
    /// The highest of all labels.
    pub events: u64,
    pub lineage: Lineage,
    pub changed: u64,
    pub is_tentative: bool,
    pub dirty: Regions,
}

impl WriteIntent {
    /// The notes of an opening for which these bytes were drawn.
    pub fn new(past: PriorState, random: &[u8; 16]) -> WriteIntent {
        let PriorState { events, lineage, changed, is_tentative, dirty } = past;
        let none = Regions::none(dirty.capacity());
        let drawn = u64::from_le_bytes(*random.last_chunk().expect("sixteen bytes have eight"));
        let skipped = u32::from_le_bytes(*random.first_chunk().expect("sixteen bytes have four"));
        WriteIntent {
            events: Cell::new(events),
            lineage: RefCell::new(lineage),
            changed: Cell::new(changed),
            is_tentative: Cell::new(is_tentative),
            session_id: drawn,
            events_gap: MIN_EVENTS_GAP + u64::from(skipped),
            phase: Cell::new(SessionPhase::Idle),
            is_changing: Cell::new(false),
            is_binding: Cell::new(false),
            changes: Cell::new(0),
            flushed_changes: Cell::new(0),
            nosync: RefCell::new(dirty.clone()),
            nosync_count: Cell::new(0),
            reconciled_count: Cell::new(0),
            reconciled_durable: Cell::new(0),
            unrecorded: RefCell::new(dirty.clone()),
            written: RefCell::new(dirty.clone()),
            dirty: RefCell::new(dirty),
            written_since_sweep: RefCell::new(none),
            requested_seq: Cell::new(0),
            attempted_seq: Cell::new(0),
            durable_seq: Cell::new(0),
            failure_seq: Cell::new(0),
            write_error: RefCell::default(),
            writing: Cell::new(false),
            has_written_labels: Cell::new(false),
            write_ended: Condition::default(),
            paged_sets: RefCell::default(),
            is_stale_check_due: Cell::new(true),
        }
    }

    /// From now on labels are later than one of this generation, which others know of, and apart from those that they write after it.
    pub fn skip_events_past(&self, events: u64) {
        self.events.set(events + self.events_gap);
    }

    /// Whether the labels are known to have all of these regions.
    fn is_recorded(&self, regions: &RangeInclusive<u32>) -> bool {
        self.dirty.borrow().contains_all(regions.clone()) && !self.unrecorded.borrow().contains_any(regions.clone())
    }

    /// Something is to be changed that the next label has to come before.
    pub fn begin_change(&self) {
        self.is_changing.set(true);
        if self.phase.get() == SessionPhase::Idle {
            self.phase.set(SessionPhase::Wanted);
        }
    }

    /// Whether the last label before a change, of an earlier opening, may have been under way when all stopped.
    pub fn is_in_doubt(&self) -> bool {
        self.is_tentative.get() && self.phase.get() < SessionPhase::Confirmed
    }

    /// Takes the session a step further, in the label of this generation; whether replicas that were unmissed are missed from it on.
    fn advance(&self, events: u64) -> bool {
        let mut lineage = self.lineage.borrow_mut();
        match self.phase.get() {
            SessionPhase::Wanted => {
                lineage.begin(self.session_id, events);
                self.phase.set(SessionPhase::Announced);
            }
            SessionPhase::AnnouncedDurable => {
                self.phase.set(SessionPhase::Confirmed);
                self.is_changing.set(true);
            }
            _ => {}
        }
        let may_change = self.phase.get() >= SessionPhase::Confirmed;
        if may_change && self.is_changing.replace(false) {
            // One that no replica in sync is known to have got came before no change.
            if !self.is_binding.get() {
                self.changed.set(lineage.sessions().first().map_or(0, |session| session.until));
            }
            self.is_tentative.set(true);
            lineage.confirm(events);
            self.is_binding.set(true);
            return true;
        }
        if self.phase.get() == SessionPhase::Durable && !self.is_binding.get() {
            self.is_tentative.set(false);
        }
        false
    }

    /// The last labels are where they should be; whether others have to follow.
    fn labels_durable(&self) -> bool {
        match self.phase.get() {
            SessionPhase::Announced => self.phase.set(SessionPhase::AnnouncedDurable),
            SessionPhase::Confirmed => self.phase.set(SessionPhase::Durable),
            _ => {}
        }
        self.is_binding.set(false);
        self.phase.get() == SessionPhase::AnnouncedDurable
    }

    /// Something changed that should be noted some time.
    pub fn request_write(&self) -> u64 {
        self.requested_seq.set(self.requested_seq.get() + 1);
        self.requested_seq.get()
    }

    /// Whether labels are being written.
    pub fn is_writing(&self) -> bool {
        self.writing.get()
    }

    /// Whether something is to be noted.
    pub fn has_unwritten(&self) -> bool {
        self.durable_seq.get() < self.requested_seq.get()
    }

    /// A replica was left behind, which is to be noted before anything that it lacks is answered.
    pub fn request_failure_write(&self) {
        self.failure_seq.set(self.request_write());
    }

    /// Whether the labels do not say yet that a replica was left behind.
    pub fn has_unrecorded_failure(&self) -> bool {
        self.durable_seq.get() < self.failure_seq.get()
    }
}

/// A label that a replica is to get.
struct NewLabel {
    replica: Rc<Replica>,
    /// Which of its devices the label is for.
    attach_count: u64,
    events: u64,
    bytes: Slice,
}

/// What came of sending labels.
struct LabelsSent {
    /// How many replicas that have everything are known to have theirs now.
    durable_count: usize,
    /// One that was to get its label has gone, and is back with another device or not.
    has_lost: bool,
}

/// Gives up the right to write labels, also when a request is dropped half-way.
struct LabelWriteGuard<'a>(&'a WriteIntent);

impl Drop for LabelWriteGuard<'_> {
    fn drop(&mut self) {
        self.0.writing.set(false);
        self.0.write_ended.notify();
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
        let is_noted = self.write_intent.is_recorded(&groups)
            && self.write_intent.phase.get() == SessionPhase::Durable
            && !self.has_listed_in_sync();
        for replica in self.replicas.borrow().iter() {
            // After a crash it lacks whatever is dirty besides.
            let is_missing = replica.state.get() == ReplicaState::OutOfSync;
            if replica.lacks_own_label() || (is_missing && !(is_noted && self.mutation == Mutation::ForgetOutOfSync)) {
                replica.out_of_sync.borrow_mut().insert_all(regions.clone());
            }
            if replica.lacks_own_label() {
                replica.to_resync.borrow_mut().insert_all(regions.clone());
            }
        }
        if is_noted {
            return Ok(());
        }
        self.write_intent.unrecorded.borrow_mut().insert_all(groups.clone());
        self.write_intent.dirty.borrow_mut().insert_all(groups);
        if self.mutation == Mutation::SkipMark {
            return Ok(());
        }
        self.write_intent.begin_change();
        self.write_labels().await
    }

    /// Whether a replica is gone that labels call current, nothing having been changed since.
    pub(crate) fn has_listed_in_sync(&self) -> bool {
        self.replicas.borrow().iter().any(|replica| replica.is_listed_in_sync.get())
    }

    /// Makes durable who is gone, before somebody sees or changes what they may lack.
    pub(crate) async fn record_failures(&self) -> Result<(), Error> {
        if self.has_listed_in_sync() {
            self.write_intent.begin_change();
        } else if !self.write_intent.has_unrecorded_failure() {
            return Ok(());
        }
        self.write_labels().await
    }

    /// Whether every current replica has everything, durably, and nothing is under way.
    pub(crate) fn is_flushed(&self) -> bool {
        let has_changed = self.write_intent.phase.get() >= SessionPhase::Confirmed;
        let is_quiet = || {
            !self.write_intent.is_binding.get()
                && self.range_lock.is_idle()
                && self.write_intent.nosync.borrow().is_empty()
        };
        !has_changed || (self.write_intent.flushed_changes.get() == self.write_intent.changes.get() && is_quiet())
    }

    /// Makes everything written so far durable on every replica, without saying what was lost before.
    pub(crate) async fn flush_replicas(&self) -> Result<(), Error> {
        let (changes, is_idle, renewed) =
            (self.write_intent.changes.get(), self.range_lock.is_idle(), self.rewritten());
        let asked = self.execute_on(&self.write_targets(), &Request::Flush).await;
        let flushed = self.complete_write(asked, None).await;
        if flushed.is_err() {
            // Each may have lost something else, also one that is being brought up to date.
            self.mark_dirty_nosync();
        }
        flushed?;
        if is_idle {
            self.write_intent.flushed_changes.set(changes);
        }
        if renewed.is_empty() {
            return Ok(());
        }
        // As long as labels list them a crash would make what is durable there an older copy again.
        self.forget_rewritten(&renewed);
        self.write_labels().await
    }

    /// Says that current replicas may differ in an extent, until that was looked after.
    pub(crate) fn mark_nosync(&self, extent: Extent) {
        let mut regions = Regions::none(self.map.count());
        regions.insert_all(self.map.of(extent));
        self.mark_regions_nosync(&regions);
    }

    /// Says that current replicas, and those that are being brought up to date, may differ wherever something was not flushed.
    pub(crate) fn mark_dirty_nosync(&self) {
        self.mark_regions_nosync(&self.write_intent.written.borrow());
    }

    fn mark_regions_nosync(&self, regions: &Regions) {
        self.write_intent.nosync.borrow_mut().add(regions);
        self.write_intent.nosync_count.set(self.write_intent.nosync_count.get() + 1);
        for replica in self.replicas.borrow().iter().filter(|replica| replica.state.get() == ReplicaState::Resyncing) {
            // Missed, too: should it leave again before they are brought to it, they may be out of the labels by then.
            replica.out_of_sync.borrow_mut().add(regions);
            replica.to_resync.borrow_mut().add(regions);
        }
        self.work.notify();
    }

    /// Makes everything that is known durable on every replica that has room, and on one at least.
    pub(crate) async fn write_labels(&self) -> Result<(), Error> {
        if self.is_read_only {
            return Ok(());
        }
        let ticket = self.write_intent.request_write();
        while self.write_intent.attempted_seq.get() < ticket {
            if self.write_intent.writing.get() {
                self.write_intent
                    .write_ended
                    .wait_until(|| !self.write_intent.writing.get() || self.write_intent.attempted_seq.get() >= ticket)
                    .await;
                continue;
            }
            self.write_intent.writing.set(true);
            let _writing = LabelWriteGuard(&self.write_intent);
            let result = self.write_label_round().await;
            *self.write_intent.write_error.borrow_mut() = result.err();
        }
        self.write_intent.write_error.borrow().clone().map_or(Ok(()), Err)
    }

    /// Writes labels until nothing that they say has changed meanwhile because of them.
    async fn write_label_round(&self) -> Result<(), Error> {
        loop {
            self.write_intent.events.set(self.write_intent.events.get() + 1);
            if self.write_intent.advance(self.write_intent.events.get()) {
                self.list_out_of_sync();
            }
            let covers = self.write_intent.requested_seq.get();
            self.write_pages().await;
            // From here until the labels are made nothing may wait, or the pages would not be what they refer to.
            let (fresh, sets) = (self.write_intent.unrecorded.borrow().clone(), self.sets());
            let (first, rest) = self.new_labels();
            let LabelsSent { durable_count: held, has_lost } = self.send_in_order(first, rest).await;
            if held > 0 {
                self.write_intent.paged_sets.borrow_mut().labels_written(&sets, has_lost);
            }
            if has_lost && self.replicas.borrow().iter().any(|replica| replica.is_readable()) {
                continue;
            }
            let is_held = held > 0 || self.needs_no_label();
            // The first label that is answered for must say which labels the others have since this opening: by that it is
            // told from what others write without them. And a session is announced before it is confirmed.
            let is_first = held > 0 && !self.write_intent.has_written_labels.replace(true);
            if is_held && (self.write_intent.labels_durable() || is_first) {
                continue;
            }
            // Nobody waits for more than what was known when the labels were made.
            self.write_intent.attempted_seq.set(covers);
            if !is_held {
                return Err(no_label_written());
            }
            // Those that are suspect are made alike once who lacks them is noted.
            self.work.notify();
            self.write_intent.durable_seq.set(covers);
            self.write_intent.unrecorded.borrow_mut().subtract(&fresh);
            return Ok(());
        }
    }

    /// From the label that is made now on, replicas that are gone are called so.
    fn list_out_of_sync(&self) {
        for replica in self.replicas.borrow().iter().filter(|replica| replica.is_listed_in_sync.replace(false)) {
            if replica.state.get() != ReplicaState::InSync {
                self.write_intent.request_failure_write();
            }
        }
    }

    /// The labels of all replicas that get one, as of now: of those in sync, and of those that are brought up to date.
    fn new_labels(&self) -> (Vec<NewLabel>, Vec<NewLabel>) {
        let replicas = self.replicas.borrow();
        let replicas: Vec<&Rc<Replica>> =
            replicas.iter().filter(|replica| replica.takes_labels() && replica.has_room).collect();
        replicas.iter().for_each(|replica| replica.sent_events.set(self.write_intent.events.get()));
        let made = replicas.into_iter().map(|replica| NewLabel {
            replica: replica.clone(),
            attach_count: replica.attach_count(),
            events: replica.sent_events.get(),
            bytes: Slice::copy_from(&self.label_bytes(replica)),
        });
        made.partition(|made| made.replica.is_readable())
    }

    /// Replicas that are brought up to date get their labels once all that are in sync have theirs: what their labels know that
    /// an in-sync replica lacks was durable on one, and may have been changed.
    async fn send_in_order(&self, first: Vec<NewLabel>, rest: Vec<NewLabel>) -> LabelsSent {
        let heard = self.send_labels(first).await;
        if heard.durable_count == 0 || heard.has_lost {
            return heard;
        }
        let then = self.send_labels(rest).await;
        LabelsSent { durable_count: heard.durable_count + then.durable_count, has_lost: then.has_lost }
    }

    /// Sends replicas their labels.
    async fn send_labels(&self, made: Vec<NewLabel>) -> LabelsSent {
        let is_there =
            |made: &&NewLabel| made.replica.takes_labels() && made.replica.attach_count() == made.attach_count;
        let writes = made.iter().filter(is_there).map(|made| {
            let write = Request::WriteReserved { slot: ReservedArea::GroupLabel, bytes: made.bytes.clone() };
            async move { (made, made.replica.execute(self.geometry.protection, write).await) }
        });
        let outcomes = join_all(writes).await;
        let mut held = 0;
        for (NewLabel { replica, attach_count, events, .. }, outcome) in outcomes {
            match outcome {
                Ok(_) => {
                    replica.acked_events.set(*events);
                    replica.has_own_label.set(true);
                    held += usize::from(replica.is_readable());
                }
                // The device that is there now gets its label when it is brought up to date.
                Err(_) if replica.attach_count() != *attach_count => {}
                Err(error) => self.fail_replica(replica, &format!("its label could not be written: {error}")),
            }
        }
        LabelsSent { durable_count: held, has_lost: !made.iter().all(|made| is_there(&made)) }
    }

    /// Has a replica's own label say that it was taken out, if it can be reached.
    pub(crate) async fn write_removed_label(&self, replica: &Rc<Replica>) {
        if !replica.is_online() || !replica.has_room {
            return;
        }
        while self.write_intent.writing.get() {
            self.write_intent.write_ended.wait_until(|| !self.write_intent.writing.get()).await;
        }
        self.write_intent.writing.set(true);
        let _writing = LabelWriteGuard(&self.write_intent);
        self.write_intent.events.set(self.write_intent.events.get() + 1);
        replica.sent_events.set(self.write_intent.events.get());
        let mut label = self.label(replica);
        let own = label.own_index;
        label.replicas[own] = ReplicaRecord { state: ReplicaState::Removed, is_new: false, ..replica.record() };
        let bytes = Slice::copy_from(&label.encode_alone());
        let told = replica
            .execute(self.geometry.protection, Request::WriteReserved { slot: ReservedArea::GroupLabel, bytes })
            .await;
        if let Err(error) = told {
            tracing::warn!(replica = %replica.name(), %error, "a replica that is taken out could not be told so");
        }
    }

    /// Without any replica left behind labels only tell where a crash may have left differences; a mirror of devices that
    /// have no room for them goes without.
    fn needs_no_label(&self) -> bool {
        self.replicas
            .borrow()
            .iter()
            .all(|replica| matches!(replica.state.get(), ReplicaState::InSync | ReplicaState::Removed))
    }

    /// The label of a replica, as of now.
    pub(crate) fn label(&self, of: &Replica) -> Label {
        let replicas = self.replicas.borrow();
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
            own_index: replicas.iter().position(|replica| replica.id == of.id).unwrap_or(0),
            replicas: replicas.iter().map(|replica| replica.record()).collect(),
            dirty: self.write_intent.dirty.borrow().clone(),
        }
    }

    /// Takes groups of regions out of the labels in which nothing has happened since the last look and every replica has flushed.
    pub(crate) async fn clear_clean_regions(&self) -> Result<(), Error> {
        let recent = self.write_intent.written_since_sweep.replace(Regions::none(self.map.count()));
        let is_quiet = |group: &RangeInclusive<u32>| {
            !self.write_intent.written_since_sweep.borrow().contains_any(group.clone())
                && !self.write_intent.nosync.borrow().contains_any(group.clone())
                && !self.range_lock.is_locked(self.map.group_extent(group))
        };
        let mut quiet = self.dirty_groups();
        quiet.retain(|group| !recent.contains_any(group.clone()) && is_quiet(group));
        if quiet.is_empty() && !self.has_rewritten() {
            return if self.write_intent.has_unwritten() { self.write_labels().await } else { Ok(()) };
        }
        if self.mutation != Mutation::ClearUnflushed {
            self.flush_internally().await?;
        }
        for group in quiet.into_iter().filter(is_quiet) {
            // What a replica that is away has missed of it is said by the same labels.
            self.write_intent.dirty.borrow_mut().remove_all(group.clone());
            self.write_intent.unrecorded.borrow_mut().remove_all(group.clone());
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
fn no_label_written() -> Error {
    let reason = "no replica that is left has room to note that another one was left behind".to_owned();
    ErrorKind::Media { reason }.into()
}
