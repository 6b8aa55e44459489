//! Write intent: the content of labels, and how much of it is durable. Without I/O.
//!
//! Invariants, which `labels` and `change` keep with it. Before a change goes to any replica, the labels mark its regions dirty.
//! Before a change that a replica missed completes, the labels of the others mark that replica out of sync, with the
//! regions that it lacks. So after any crash the labels tell what is not to be trusted. A region leaves the labels only
//! when no change is in flight there and every replica has flushed. It may stay longer, so that the next change there waits for
//! no label: which leave, and when, is the matter of `hot_groups` and `sweep`.
//!
//! A replica that fails with everything that was written stays *listed in sync* until the next change, so an open that
//! changes nothing leaves no mark against a replica. The lineage records the first change of an open, and every change
//! that a replica starts to miss, before any replica executes it.
//!
//! A set of regions that does not fit the labels is in bitmap pages (`sets`). Whatever label a crash leaves on a
//! replica, its pages have at least the set of that label. So pages are written before labels refer to them, with the
//! union of the sets of the last labels and of the next; regions that left a set leave the pages one write later.

use std::cell::{Cell, RefCell};
use std::ops::RangeInclusive;

use sealblock_block::{Condition, Error};
use sealblock_integrity::guard;

use crate::label::lineage::Lineage;
use crate::label::regions::Regions;
use crate::label::sets::{encode_paged, encode_plain, pages_with};
use crate::label::{MAX_SETS, max_set_bytes};

/// How far the session of this opening is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) enum SessionPhase {
    /// Nothing was changed since the mirror was opened.
    #[default]
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
#[derive(Default)]
pub(crate) struct WriteIntent {
    pub events: Cell<u64>,
    /// The sessions that changed the mirror.
    pub lineage: RefCell<Lineage>,
    /// As in [`Label`].
    pub changed: Cell<u64>,
    pub is_tentative: Cell<bool>,
    /// Random number for the session of this opening.
    session_id: u64,
    /// Distance of its event counts from those of other openings.
    events_gap: u64,
    /// The source of the epochs of bitmap pages, and their number.
    epoch_seed: [u8; 16],
    epochs_drawn: Cell<u64>,
    pub phase: Cell<SessionPhase>,
    /// The next label precedes a change that earlier labels do not allow.
    pub is_changing: Cell<bool>,
    /// Such a label is in flight, or was and may be durable or not: a replica that does not get it is out of sync,
    /// even if only the list of replicas changed.
    pub is_binding: Cell<bool>,
    /// Counts changes. A group has the number of its last one.
    pub changes: Cell<u64>,
    /// The highest number that a flush of all in-sync replicas covered: groups with a later one have changes that may not be durable.
    pub flushed_changes: Cell<u64>,
    /// Counts sweeps of the worker; and the sweep after which the last change came.
    pub sweeps: Cell<u64>,
    pub last_change_sweep: Cell<u64>,
    /// The number of changes at the last sweep.
    pub swept_changes: Cell<u64>,
    /// The sweep, and the number of changes, before labels were last written.
    pub labels_sweep: Cell<u64>,
    labels_changes: Cell<u64>,
    /// Regions in which in-sync replicas may differ.
    pub dirty: RefCell<Regions>,
    /// Those of them that durable labels may lack.
    pub unrecorded: RefCell<Regions>,
    /// The exact regions that were written and are not known to be durable on all in-sync replicas: what one of them may lack when it
    /// fails. After a crash, which loses these, all dirty ones until they leave the labels.
    pub written: RefCell<Regions>,
    /// Groups that were dirty when the mirror was opened and were not changed since.
    pub leftover: RefCell<Regions>,
    /// Groups make room for others.
    pub is_making_room: Cell<bool>,
    pub room_changed: Condition,
    /// Regions in which in-sync replicas may differ although no change is in flight.
    pub nosync: RefCell<Regions>,
    /// Counts additions to `nosync`.
    pub nosync_count: Cell<u64>,
    /// Counts pieces that were reconciled; and how many of them are durable.
    pub reconciled_count: Cell<u64>,
    pub reconciled_durable: Cell<u64>,
    pub requested_seq: Cell<u64>,
    /// Newest request that a label write covered, and the newest one that a durable label covers.
    pub attempted_seq: Cell<u64>,
    pub durable_seq: Cell<u64>,
    /// The request that records the last failure of a replica.
    failure_seq: Cell<u64>,
    pub write_error: RefCell<Option<Error>>,
    pub writing: Cell<bool>,
    /// Labels were written since the mirror was opened.
    pub has_written_labels: Cell<bool>,
    /// The labels that follow the first ones are left to the next that are written.
    pub leaves_follow_up: Cell<bool>,
    /// Labels were written that record the first ones of this opening.
    pub is_followed_up: Cell<bool>,
    pub write_ended: Condition,
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
        let session_id = u64::from_le_bytes(*random.last_chunk().expect("sixteen bytes have eight"));
        let skipped = u32::from_le_bytes(*random.first_chunk().expect("sixteen bytes have four"));
        WriteIntent {
            events: Cell::new(events),
            lineage: RefCell::new(lineage),
            changed: Cell::new(changed),
            is_tentative: Cell::new(is_tentative),
            session_id,
            events_gap: MIN_EVENTS_GAP + u64::from(skipped),
            epoch_seed: *random,
            nosync: RefCell::new(dirty.clone()),
            unrecorded: RefCell::new(dirty.clone()),
            written: RefCell::new(dirty.clone()),
            leftover: RefCell::new(dirty.clone()),
            dirty: RefCell::new(dirty),
            is_stale_check_due: Cell::new(true),
            ..WriteIntent::default()
        }
    }

    /// An epoch that no other replica's pages have, nor earlier ones of this replica.
    pub fn draw_epoch(&self) -> u64 {
        self.epochs_drawn.set(self.epochs_drawn.get() + 1);
        let drawn = [&self.epoch_seed[..], &self.epochs_drawn.get().to_le_bytes()].concat();
        guard::crc64(&drawn).max(1)
    }

    /// The number of a change that begins now.
    pub fn begin_numbered(&self) -> u64 {
        self.changes.set(self.changes.get() + 1);
        self.last_change_sweep.set(self.sweeps.get());
        self.changes.get()
    }

    /// Records that labels are about to be written.
    pub fn begin_labels(&self) {
        self.labels_sweep.set(self.sweeps.get());
        self.labels_changes.set(self.changes.get());
    }

    /// True if changes began since labels were last written.
    pub fn has_changed_since_labels(&self) -> bool {
        self.labels_changes.get() != self.changes.get()
    }

    /// True if changes completed, or are in flight, that may not be durable on all in-sync replicas. Where nothing may be lost, a
    /// replica that fails loses nothing.
    pub fn has_unflushed(&self) -> bool {
        !self.written.borrow().is_empty()
    }

    /// Makes event counts continue far beyond `events`, which other replicas know, and apart from those that these
    /// write after it.
    pub fn skip_events_past(&self, events: u64) {
        self.events.set(events + self.events_gap);
    }

    /// True if durable labels have all of these regions.
    pub fn is_recorded(&self, regions: &RangeInclusive<u32>) -> bool {
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
    pub fn advance(&self, events: u64) -> bool {
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
    pub fn labels_durable(&self) -> bool {
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

    /// True if the last failure of a replica is unrecorded, and nobody tried to record it since. Where that fails,
    /// reads go on, and the next change tries again: the last replica is detached if it does not take its label.
    pub fn has_new_failure(&self) -> bool {
        self.has_unrecorded_failure() && self.attempted_seq.get() < self.failure_seq.get()
    }
}

/// What the pages of the replicas hold.
#[derive(Default)]
pub(crate) struct PagedSets {
    /// By set number; `None` if the label has room for the set.
    pub sets: [Option<PagedSet>; MAX_SETS],
    write_count: u64,
}

/// A set that has pages.
pub(crate) struct PagedSet {
    /// The regions in the pages.
    pub content: Regions,
    /// The set in the labels that were last written, on any replica.
    pub labelled: Regions,
    /// Number of the last write of the pages, and of the write before; 0 for none.
    pub write_number: u64,
    pub previous_write: u64,
}

impl PagedSets {
    /// Records that labels with these sets were written. If a replica failed meanwhile, others may still have the
    /// labels before.
    pub fn labels_written(&mut self, sets: &[Regions], has_lost: bool) {
        for (paged, set) in self.sets.iter_mut().zip(sets) {
            match paged {
                Some(paged) if has_lost => paged.labelled.add(set),
                Some(paged) => paged.labelled = set.clone(),
                None => {}
            }
        }
    }

    /// Decides which sets have pages, and what these hold, so that the rest fits the labels. Returns the pages that
    /// change, by set.
    pub fn plan(&mut self, sets: &[Regions]) -> [Vec<u32>; MAX_SETS] {
        let max_bytes = max_set_bytes(sets.len() - 1);
        let mut changed = [const { Vec::new() }; MAX_SETS];
        for (number, set) in sets.iter().enumerate() {
            let Some(paged) = &mut self.sets[number] else {
                if encode_plain(set, max_bytes).is_none() {
                    self.write_count += 1;
                    let (content, said, writing) = (set.clone(), set.clone(), self.write_count);
                    self.sets[number] =
                        Some(PagedSet { content, labelled: said, write_number: writing, previous_write: 0 });
                }
                continue;
            };
            // Half of the room, so that a set does not get and lose pages in turn.
            if encode_plain(set, max_bytes / 2).is_some() {
                self.sets[number] = None;
                continue;
            }
            let mut content = paged.labelled.clone();
            content.add(set);
            let has_room = encode_paged(set, &paged.content, 0, max_bytes).is_some();
            let is_smaller = content.count() <= paged.content.count() - paged.content.count() / 8;
            if content != paged.content && (!has_room || is_smaller) {
                self.write_count += 1;
                let mut differs = content.without(&paged.content);
                differs.add(&paged.content.without(&content));
                changed[number] = pages_with(&differs).collect();
                paged.content = content;
                paged.previous_write = std::mem::replace(&mut paged.write_number, self.write_count);
            }
        }
        changed
    }
}
