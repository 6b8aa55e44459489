//! Write intent and replica states, and how labels make them durable.
//!
//! Invariants. Before a change goes to any replica, the labels mark its regions dirty. Before a change that a replica
//! missed completes, the labels of the others mark that replica out of sync, with the regions that it lacks. So after
//! any crash the labels tell what is not to be trusted. A region leaves the labels only when no change is in flight
//! there and every replica has flushed.
//!
//! A replica that fails with everything that was written stays *listed in sync* until the next change: so an opening
//! that changes nothing leaves no mark against a replica. The lineage has the first change of an opening, and every
//! change that a replica starts to miss, before any replica executes it.

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
    /// A change waits for the session.
    Wanted,
    /// Labels that announce the session were sent.
    Announced,
    /// These labels are durable.
    AnnouncedDurable,
    /// Labels that confirm the session were sent.
    Confirmed,
    /// These labels are durable: replicas may execute changes.
    Durable,
}

/// The state that labels record, and how much of it they have.
pub(crate) struct WriteIntent {
    pub events: Cell<u64>,
    /// The sessions that changed the mirror.
    lineage: RefCell<Lineage>,
    /// As in [`Label`].
    changed: Cell<u64>,
    is_tentative: Cell<bool>,
    /// Random number for the session of this opening.
    session_id: u64,
    /// Distance of its event counts from those of other openings.
    events_gap: u64,
    phase: Cell<SessionPhase>,
    /// The next label precedes a change that earlier labels do not allow.
    pub is_changing: Cell<bool>,
    /// Such a label is in flight, or was and may be durable or not: a replica that does not get it is out of sync,
    /// even if only the list of replicas changed.
    is_binding: Cell<bool>,
    /// Counts changes; and their number when all in-sync replicas last flushed with no change in flight.
    changes: Cell<u64>,
    flushed_changes: Cell<u64>,
    /// Regions in which in-sync replicas may differ.
    pub dirty: RefCell<Regions>,
    /// Those of them that durable labels may lack.
    unrecorded: RefCell<Regions>,
    /// The exact regions that were written since their group was last clean. After a crash, which loses these, all
    /// dirty ones.
    pub written: RefCell<Regions>,
    /// Regions in which in-sync replicas may differ although no change is in flight.
    pub nosync: RefCell<Regions>,
    /// Counts additions to `nosync`.
    pub nosync_count: Cell<u64>,
    /// Counts pieces that were reconciled; and how many of them are durable.
    pub reconciled_count: Cell<u64>,
    pub reconciled_durable: Cell<u64>,
    /// Regions that were changed since the last sweep.
    written_since_sweep: RefCell<Regions>,
    requested_seq: Cell<u64>,
    /// Newest request that a label write covered, and the newest one that a durable label covers.
    attempted_seq: Cell<u64>,
    durable_seq: Cell<u64>,
    /// The request that records the last failure of a replica.
    failure_seq: Cell<u64>,
    write_error: RefCell<Option<Error>>,
    writing: Cell<bool>,
    /// Labels were written since the mirror was opened.
    has_written_labels: Cell<bool>,
    write_ended: Condition,
    /// What the bitmap pages of the replicas hold.
    pub paged_sets: RefCell<PagedSets>,
    /// A withheld block may have a good copy by now.
    pub is_stale_check_due: Cell<bool>,
}

/// Least distance between the event counts of two openings. A random number is added, so that two openings that do
/// not know of each other do not write labels with the same event count.
const MIN_EVENTS_GAP: u64 = 16;

/// What a mirror starts from, out of the newest label.
pub(crate) struct PriorState {
    /// The highest of all labels.
    pub events: u64,
    pub lineage: Lineage,
    pub changed: u64,
    pub is_tentative: bool,
    pub dirty: Regions,
}

impl WriteIntent {
    /// The state of an opening for which `random` was drawn.
    pub fn new(prior: PriorState, random: &[u8; 16]) -> WriteIntent {
        let PriorState { events, lineage, changed, is_tentative, dirty } = prior;
        let none = Regions::none(dirty.capacity());
        let session_id = u64::from_le_bytes(*random.last_chunk().expect("sixteen bytes have eight"));
        let skipped = u32::from_le_bytes(*random.first_chunk().expect("sixteen bytes have four"));
        WriteIntent {
            events: Cell::new(events),
            lineage: RefCell::new(lineage),
            changed: Cell::new(changed),
            is_tentative: Cell::new(is_tentative),
            session_id,
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

    /// Makes event counts continue far beyond `events`, which other replicas know, and apart from those that these
    /// write after it.
    pub fn skip_events_past(&self, events: u64) {
        self.events.set(events + self.events_gap);
    }

    /// True if durable labels have all of these regions.
    fn is_recorded(&self, regions: &RangeInclusive<u32>) -> bool {
        self.dirty.borrow().contains_all(regions.clone()) && !self.unrecorded.borrow().contains_any(regions.clone())
    }

    /// Demands that the next label precede a change.
    pub fn begin_change(&self) {
        self.is_changing.set(true);
        if self.phase.get() == SessionPhase::Idle {
            self.phase.set(SessionPhase::Wanted);
        }
    }

    /// True if the last label before a change, of an earlier opening, may have been in flight at a crash.
    pub fn is_in_doubt(&self) -> bool {
        self.is_tentative.get() && self.phase.get() < SessionPhase::Confirmed
    }

    /// Advances the session, in the label with this event count. True if that label must list offline replicas out of
    /// sync.
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
            // A label that no in-sync replica is known to have got preceded no change.
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

    /// Advances the session when labels are durable; true if further labels must follow.
    fn labels_durable(&self) -> bool {
        match self.phase.get() {
            SessionPhase::Announced => self.phase.set(SessionPhase::AnnouncedDurable),
            SessionPhase::Confirmed => self.phase.set(SessionPhase::Durable),
            _ => {}
        }
        self.is_binding.set(false);
        self.phase.get() == SessionPhase::AnnouncedDurable
    }

    /// Requests that the labels be written; returns the number of the request.
    pub fn request_write(&self) -> u64 {
        self.requested_seq.set(self.requested_seq.get() + 1);
        self.requested_seq.get()
    }

    /// True if labels are being written.
    pub fn is_writing(&self) -> bool {
        self.writing.get()
    }

    /// True if a request to write labels is outstanding.
    pub fn has_unwritten(&self) -> bool {
        self.durable_seq.get() < self.requested_seq.get()
    }

    /// Requests that the labels record a failed replica before any request that it misses completes.
    pub fn request_failure_write(&self) {
        self.failure_seq.set(self.request_write());
    }

    /// True if durable labels do not record the last failure of a replica.
    pub fn has_unrecorded_failure(&self) -> bool {
        self.durable_seq.get() < self.failure_seq.get()
    }
}

/// A label for a replica.
struct NewLabel {
    replica: Rc<Replica>,
    /// The replica's attach count when the label was made.
    attach_count: u64,
    events: u64,
    bytes: Slice,
}

/// Result of sending labels.
struct LabelsSent {
    /// Number of in-sync replicas that are known to have their label.
    durable_count: usize,
    /// A replica that should get its label failed since, whether it is back or not.
    has_lost: bool,
}

/// The right to write labels; released when dropped, also if the request is dropped half-way.
struct LabelWriteGuard<'a>(&'a WriteIntent);

impl Drop for LabelWriteGuard<'_> {
    fn drop(&mut self) {
        self.0.writing.set(false);
        self.0.write_ended.notify();
    }
}

impl<C: Clock> Mirror<C> {
    /// Marks the regions of an extent dirty; durable when it returns. Labels get whole groups, so that sequential
    /// writes cost no further label; the exact regions are kept in memory.
    pub(crate) async fn mark_dirty(&self, extent: Extent) -> Result<(), Error> {
        let regions = self.map.of(extent);
        self.write_intent.changes.set(self.write_intent.changes.get() + 1);
        self.write_intent.written_since_sweep.borrow_mut().insert_all(regions.clone());
        self.write_intent.written.borrow_mut().insert_all(regions.clone());
        let groups = self.map.groups(&regions);
        let is_recorded = self.write_intent.is_recorded(&groups)
            && self.write_intent.phase.get() == SessionPhase::Durable
            && !self.has_listed_in_sync();
        for replica in self.replicas.borrow().iter() {
            // After a crash it also lacks whatever is dirty.
            let is_missing = replica.state.get() == ReplicaState::OutOfSync;
            if replica.lacks_own_label() || (is_missing && !(is_recorded && self.mutation == Mutation::ForgetOutOfSync))
            {
                replica.out_of_sync.borrow_mut().insert_all(regions.clone());
            }
            if replica.lacks_own_label() {
                replica.to_resync.borrow_mut().insert_all(regions.clone());
            }
        }
        if is_recorded {
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

    /// True if an offline or resyncing replica is listed in sync, because nothing was changed since it had
    /// everything.
    pub(crate) fn has_listed_in_sync(&self) -> bool {
        self.replicas.borrow().iter().any(|replica| replica.is_listed_in_sync.get())
    }

    /// Records failed replicas in durable labels, before a reader sees, or a change rewrites, content that they may
    /// lack.
    pub(crate) async fn record_failures(&self) -> Result<(), Error> {
        if self.has_listed_in_sync() {
            self.write_intent.begin_change();
        } else if !self.write_intent.has_unrecorded_failure() {
            return Ok(());
        }
        self.write_labels().await
    }

    /// True if every in-sync replica has everything, durably, and no change is in flight.
    pub(crate) fn is_flushed(&self) -> bool {
        let has_changed = self.write_intent.phase.get() >= SessionPhase::Confirmed;
        let is_quiet = || {
            !self.write_intent.is_binding.get()
                && self.range_lock.is_idle()
                && self.write_intent.nosync.borrow().is_empty()
        };
        !has_changed || (self.write_intent.flushed_changes.get() == self.write_intent.changes.get() && is_quiet())
    }

    /// Makes all completed writes durable on every replica, without reporting earlier losses.
    pub(crate) async fn flush_replicas(&self) -> Result<(), Error> {
        let (changes, is_idle, rewritten) =
            (self.write_intent.changes.get(), self.range_lock.is_idle(), self.rewritten());
        let asked = self.execute_on(&self.write_targets(), &Request::flush()).await;
        let flushed = self.complete_write(asked, None).await;
        if flushed.is_err() {
            // Each replica may have lost other writes, also a resyncing one.
            self.mark_dirty_nosync();
        }
        flushed?;
        if is_idle {
            self.write_intent.flushed_changes.set(changes);
        }
        if rewritten.is_empty() {
            return Ok(());
        }
        // A block that labels still list would become stale again at a crash.
        self.forget_rewritten(&rewritten);
        self.write_labels().await
    }

    /// Marks an extent nosync: in-sync replicas may differ there until it is reconciled.
    pub(crate) fn mark_nosync(&self, extent: Extent) {
        let mut regions = Regions::none(self.map.count());
        regions.insert_all(self.map.of(extent));
        self.mark_regions_nosync(&regions);
    }

    /// Marks all regions with unflushed changes nosync, and to resync on resyncing replicas.
    pub(crate) fn mark_dirty_nosync(&self) {
        self.mark_regions_nosync(&self.write_intent.written.borrow());
    }

    fn mark_regions_nosync(&self, regions: &Regions) {
        self.write_intent.nosync.borrow_mut().add(regions);
        self.write_intent.nosync_count.set(self.write_intent.nosync_count.get() + 1);
        for replica in self.replicas.borrow().iter().filter(|replica| replica.state.get() == ReplicaState::Resyncing) {
            // Out of sync too: if the resync stops before it has copied them, they may have left the labels.
            replica.out_of_sync.borrow_mut().add(regions);
            replica.to_resync.borrow_mut().add(regions);
        }
        self.work.notify();
    }

    /// Makes the current state durable: writes the label of every replica that has room, and of at least one.
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

    /// Writes labels until writing them changes nothing that they record.
    async fn write_label_round(&self) -> Result<(), Error> {
        loop {
            self.write_intent.events.set(self.write_intent.events.get() + 1);
            if self.write_intent.advance(self.write_intent.events.get()) {
                self.list_out_of_sync();
            }
            let covers = self.write_intent.requested_seq.get();
            self.write_pages().await;
            // No await from here until the labels are made, or the pages would not match them.
            let (unrecorded, sets) = (self.write_intent.unrecorded.borrow().clone(), self.sets());
            let (first, rest) = self.new_labels();
            let LabelsSent { durable_count, has_lost } = self.send_in_order(first, rest).await;
            if durable_count > 0 {
                self.write_intent.paged_sets.borrow_mut().labels_written(&sets, has_lost);
            }
            if has_lost && self.replicas.borrow().iter().any(|replica| replica.is_readable()) {
                continue;
            }
            let is_durable = durable_count > 0 || self.needs_no_label();
            // The first durable labels must be followed by labels that record them: that tells them from labels that
            // other openings write. And a session is announced before it is confirmed.
            let is_first = durable_count > 0 && !self.write_intent.has_written_labels.replace(true);
            if is_durable && (self.write_intent.labels_durable() || is_first) {
                continue;
            }
            // No caller waits for more than the labels had when they were made.
            self.write_intent.attempted_seq.set(covers);
            if !is_durable {
                return Err(no_label_written());
            }
            // Nosync regions can be reconciled now that the labels record which replicas failed.
            self.work.notify();
            self.write_intent.durable_seq.set(covers);
            self.write_intent.unrecorded.borrow_mut().subtract(&unrecorded);
            return Ok(());
        }
    }

    /// Lists replicas out of sync, from the next label on, that were listed in sync since they failed.
    fn list_out_of_sync(&self) {
        for replica in self.replicas.borrow().iter().filter(|replica| replica.is_listed_in_sync.replace(false)) {
            if replica.state.get() != ReplicaState::InSync {
                self.write_intent.request_failure_write();
            }
        }
    }

    /// The labels of all replicas that get one: of the in-sync ones, and of the resyncing ones.
    fn new_labels(&self) -> (Vec<NewLabel>, Vec<NewLabel>) {
        let replicas = self.replicas.borrow();
        let replicas: Vec<&Rc<Replica>> =
            replicas.iter().filter(|replica| replica.takes_labels() && replica.has_room).collect();
        replicas.iter().for_each(|replica| replica.sent_events.set(self.write_intent.events.get()));
        let labels = replicas.into_iter().map(|replica| NewLabel {
            replica: replica.clone(),
            attach_count: replica.attach_count(),
            events: replica.sent_events.get(),
            bytes: Slice::copy_from(&self.label_bytes(replica)),
        });
        labels.partition(|labels| labels.replica.is_readable())
    }

    /// Sends resyncing replicas their labels once all in-sync ones have theirs: a label that only a resyncing replica
    /// has must not record a change that no in-sync replica knows.
    async fn send_in_order(&self, first: Vec<NewLabel>, rest: Vec<NewLabel>) -> LabelsSent {
        let heard = self.send_labels(first).await;
        if heard.durable_count == 0 || heard.has_lost {
            return heard;
        }
        let then = self.send_labels(rest).await;
        LabelsSent { durable_count: heard.durable_count + then.durable_count, has_lost: then.has_lost }
    }

    /// Sends replicas their labels.
    async fn send_labels(&self, labels: Vec<NewLabel>) -> LabelsSent {
        let is_there =
            |labels: &&NewLabel| labels.replica.takes_labels() && labels.replica.attach_count() == labels.attach_count;
        let writes = labels.iter().filter(is_there).map(|labels| {
            let write = Request::write_reserved(ReservedArea::GroupLabel, labels.bytes.clone());
            async move { (labels, labels.replica.execute(self.geometry.protection, write).await) }
        });
        let outcomes = join_all(writes).await;
        let mut durable_count = 0;
        for (NewLabel { replica, attach_count, events, .. }, outcome) in outcomes {
            match outcome {
                Ok(_) => {
                    replica.acked_events.set(*events);
                    replica.has_own_label.set(true);
                    durable_count += usize::from(replica.is_readable());
                }
                // The device that is attached now gets its label when its resync starts.
                Err(_) if replica.attach_count() != *attach_count => {}
                Err(error) => self.fail_replica(replica, &format!("cannot write its label: {error}")),
            }
        }
        LabelsSent { durable_count, has_lost: !labels.iter().all(|labels| is_there(&labels)) }
    }

    /// Writes a replica's own label that it is removed, if it is online.
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
        let written =
            replica.execute(self.geometry.protection, Request::write_reserved(ReservedArea::GroupLabel, bytes)).await;
        if let Err(error) = written {
            tracing::warn!(replica = %replica.name(), %error, "cannot write the label of a removed replica");
        }
    }

    /// True if no replica is out of sync. Then labels only record where a crash may leave differences, and a mirror
    /// whose devices have no room for labels works without.
    fn needs_no_label(&self) -> bool {
        self.replicas
            .borrow()
            .iter()
            .all(|replica| matches!(replica.state.get(), ReplicaState::InSync | ReplicaState::Removed))
    }

    /// The label of a replica with the current state.
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

    /// Takes groups of regions out of the labels in which nothing was changed since the last sweep, after a flush of
    /// every replica.
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
            // The same labels record what an offline replica lacks of it.
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
    let reason = "cannot record a failed replica: no remaining replica has room for a label".to_owned();
    ErrorKind::Media { reason }.into()
}
