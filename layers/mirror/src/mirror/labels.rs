//! Making write intent and replica states durable: the labels of the replicas, and the bitmap pages that they refer to.
//!
//! The rules are in `write_intent`. Pages are written in place. A torn page counts as all of its regions, and so does one
//! that was written while the device was attached before: its epoch differs.

use std::ops::RangeInclusive;
use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_block::{Clock, Error, ErrorKind, Request, ReservedArea};
use sealblock_runtime_memory::Slice;
use sealblock_units::Extent;

use crate::label::regions::Regions;
use crate::label::sets::{PageId, encode_paged, encode_plain, pages_of_set, pages_with};
use crate::label::{Label, MAX_SETS, ReplicaRecord, ReplicaState};
use crate::mirror::replica::Replica;
use crate::mirror::write_intent::{SessionPhase, WriteIntent};
use crate::mirror::{Mirror, Mutation};

/// Pages that are written to a replica at once.
const PAGES_AT_ONCE: usize = 16;

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
        let (intent, regions) = (&self.write_intent, self.map.of(extent));
        let (groups, change) = (self.map.groups(&regions), intent.begin_numbered());
        intent.written.borrow_mut().insert_all(regions.clone());
        intent.leftover.borrow_mut().remove_all(groups.clone());
        for group in self.map.group_numbers(&regions) {
            self.hot.borrow_mut().touch(group, change, intent.sweeps.get());
        }
        let is_recorded =
            intent.is_recorded(&groups) && intent.phase.get() == SessionPhase::Durable && !self.has_listed_in_sync();
        for replica in self.replicas.borrow().iter() {
            // After a crash it also lacks whatever is dirty.
            let is_missing = replica.state.get() == ReplicaState::OutOfSync;
            if replica.lacks_own_label()
                || (is_missing && !(is_recorded && self.mutation.is(Mutation::ForgetOutOfSync)))
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
        self.mark_ahead(&regions, change);
        intent.unrecorded.borrow_mut().insert_all(groups.clone());
        intent.dirty.borrow_mut().insert_all(groups);
        if self.hot.borrow().is_due() {
            intent.room_changed.notify();
        }
        if self.mutation.is(Mutation::SkipMark) {
            return Ok(());
        }
        intent.begin_change();
        self.write_labels().await
    }

    /// Marks groups around the one of these regions dirty, if that is not marked yet: the same labels record them.
    fn mark_ahead(&self, regions: &RangeInclusive<u32>, change: u64) {
        let (intent, groups) = (&self.write_intent, self.map.group_numbers(regions));
        let is_marked = |group| intent.dirty.borrow().contains_all(self.map.group_at(group));
        if groups.start() != groups.end() || is_marked(*groups.start()) {
            return;
        }
        let around = self.hot.borrow_mut().mark(*groups.start());
        for group in around.filter(|group| *group != *groups.start() && !is_marked(*group)) {
            self.hot.borrow_mut().touch(group, change, intent.sweeps.get());
            intent.unrecorded.borrow_mut().insert_all(self.map.group_at(group));
            intent.dirty.borrow_mut().insert_all(self.map.group_at(group));
        }
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

    /// Writes the first labels of an opening, which only make them equal: the labels that record these are those of the first change, or
    /// of what else must not be taken for the work of another opening.
    pub(crate) async fn write_equal_labels(&self) -> Result<(), Error> {
        self.write_intent.leaves_follow_up.set(true);
        let written = self.write_labels().await;
        self.write_intent.leaves_follow_up.set(false);
        written
    }

    /// True if completed but unflushed changes may be lost, and hosts do not know it yet: the authoritative content
    /// lacks them.
    pub fn may_be_lost(&self) -> bool {
        self.unreported_loss.get()
    }

    /// Records that completed but unflushed changes may be lost with the content that the mirror was made from.
    /// Replicas that get this content do not know that themselves.
    ///
    /// # Errors
    /// When no label can be written.
    pub async fn say_lost(&self) -> Result<(), Error> {
        self.unreported_loss.set(true);
        self.write_labels().await
    }

    /// Records that hosts know of the loss, or need not. Does nothing on a read-only mirror.
    ///
    /// # Errors
    /// When no label can be written. Then later opens may report it again.
    pub async fn forget_lost(&self) -> Result<(), Error> {
        if self.is_read_only || !self.unreported_loss.get() {
            return Ok(());
        }
        self.unreported_loss.set(false);
        self.write_labels().await.inspect_err(|_| self.unreported_loss.set(true))
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
            self.write_intent.begin_labels();
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
            let is_alone = is_first && self.write_intent.leaves_follow_up.get();
            if is_durable && (self.write_intent.labels_durable() || (is_first && !is_alone)) {
                continue;
            }
            if is_durable && !is_alone {
                self.write_intent.is_followed_up.set(true);
            }
            // No caller waits for more than the labels had when they were made.
            self.write_intent.attempted_seq.set(covers);
            if !is_durable {
                return Err(no_label_written());
            }
            if durable_count > 0 {
                self.replicas.borrow().iter().for_each(|replica| replica.is_failure_unrecorded.set(false));
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
            async move { (labels, labels.replica.execute(write).await) }
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
        let written = replica.execute(Request::write_reserved(ReservedArea::GroupLabel, bytes)).await;
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
            name: self.name,
            events: self.write_intent.events.get(),
            changed: self.write_intent.changed.get(),
            is_tentative: self.write_intent.is_tentative.get(),
            unreported_loss: self.unreported_loss.get(),
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

    /// The sets in labels: dirty regions, and the out-of-sync regions of each replica.
    pub(crate) fn sets(&self) -> Vec<Regions> {
        let out_of_sync = |replica: &Rc<Replica>| replica.record().out_of_sync;
        [self.write_intent.dirty.borrow().clone()]
            .into_iter()
            .chain(self.replicas.borrow().iter().map(out_of_sync))
            .collect()
    }

    /// The bytes of a replica's label, which refer to pages that [`Mirror::write_pages`] wrote.
    pub(crate) fn label_bytes(&self, replica: &Replica) -> Vec<u8> {
        let (label, paging) = (self.label(replica), self.write_intent.paged_sets.borrow());
        let epoch = replica.pages.borrow().epoch;
        let sets = label.sets().zip(&paging.sets).map(|(set, paged)| match paged {
            None => encode_plain(set, usize::MAX).expect("any set can be written without pages"),
            Some(paged) => {
                encode_paged(set, &paged.content, epoch, usize::MAX).expect("runs of any length can be written")
            }
        });
        label.encode_with(&sets.collect::<Vec<_>>())
    }

    /// Writes the pages that the next labels refer to, on every replica that gets a label. A replica that fails a
    /// page is marked out of sync.
    pub(crate) async fn write_pages(&self) {
        if pages_of_set(self.map.count()) == 0 {
            return;
        }
        loop {
            let changed = self.write_intent.paged_sets.borrow_mut().plan(&self.sets());
            let replicas: Vec<_> = self
                .replicas
                .borrow()
                .iter()
                .filter(|replica| replica.takes_labels() && replica.has_room)
                .cloned()
                .collect();
            let mut is_done = true;
            let mut writes = Vec::new();
            for replica in &replicas {
                let due = self.due_pages(replica, &changed);
                is_done &= due.is_empty();
                if !due.is_empty() {
                    writes.push(self.write_replica_pages(replica, due));
                }
            }
            if is_done {
                return;
            }
            join_all(writes).await;
        }
    }

    /// The pages that a replica must get before its label refers to them. Until they are written it counts as having
    /// none of these sets, also if the caller is dropped.
    fn due_pages(&self, replica: &Replica, changed: &[Vec<u32>; MAX_SETS]) -> Vec<(PageId, u64)> {
        let (paging, mut pages, mut due) =
            (self.write_intent.paged_sets.borrow(), replica.pages.borrow_mut(), Vec::new());
        for (number, paged) in paging.sets.iter().enumerate() {
            let Some(paged) = paged else {
                pages.written[number] = 0;
                continue;
            };
            if pages.written[number] == paged.write_number {
                continue;
            }
            let id = |page| (PageId { set: number as u8, page }, paged.write_number);
            // A replica with the write before lacks only the pages that changed since; any other lacks all of them.
            match pages.written[number] != 0
                && pages.written[number] == paged.previous_write
                && !changed[number].is_empty()
            {
                true => due.extend(changed[number].iter().copied().map(id)),
                false => due.extend(pages_with(&paged.content).map(id)),
            }
            pages.written[number] = 0;
        }
        if pages.epoch == 0 && !due.is_empty() {
            // Drawn for this stay of this device: two replicas can have the same event counts, and what one lacks is not what
            // the other lacks.
            pages.epoch = match self.mutation.injected() {
                Mutation::SharedEpoch => self.write_intent.events.get(),
                _ => self.write_intent.draw_epoch(),
            };
        }
        due
    }

    async fn write_replica_pages(&self, replica: &Rc<Replica>, due: Vec<(PageId, u64)>) {
        let attach_count = replica.attach_count();
        for pages in due.chunks(PAGES_AT_ONCE) {
            let write = |(id, _): &(PageId, u64)| {
                let (epoch, paging) = (replica.pages.borrow().epoch, self.write_intent.paged_sets.borrow());
                let content = paging.sets[usize::from(id.set)].as_ref().map(|paged| &paged.content);
                let bytes = content.map(|content| Slice::copy_from(&id.encode(&self.uuid, epoch, content)));
                let slot = id.area(self.map.count());
                async move {
                    let Some(bytes) = bytes else { return Ok(()) };
                    replica.execute(Request::write_reserved(slot, bytes)).await.map(drop)
                }
            };
            let written: Result<Vec<()>, Error> = join_all(pages.iter().map(write)).await.into_iter().collect();
            // The device that is attached now gets its pages with its label.
            if replica.attach_count() != attach_count {
                return;
            }
            if let Err(error) = written {
                self.fail_replica(replica, &format!("cannot write its bitmap pages: {error}"));
                return;
            }
        }
        let mut pages = replica.pages.borrow_mut();
        for (id, writing) in due {
            pages.written[usize::from(id.set)] = writing;
        }
    }
}

#[cold]
fn no_label_written() -> Error {
    let reason = "cannot record a failed replica: no remaining replica has room for a label".to_owned();
    ErrorKind::Media { reason }.into()
}
