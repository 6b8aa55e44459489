//! The mirror and its state: which replicas are used, how one fails, and which may be read and written.
//!
//! Nothing here waits for a device. The files above do: `labels`, `change`, `reconcile`, `read`, `resync`.

pub(crate) mod delegation;
pub(crate) mod hot_groups;
pub(crate) mod labels;
pub(crate) mod probe;
pub(crate) mod replica;
pub(crate) mod samples;
pub(crate) mod write_intent;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use futures_channel::mpsc::UnboundedReceiver;
use sealblock_block::{
    Abilities, Ability, BadBlock, Clock, Condition, Error, ErrorKind, Freshness, Geometry, RangeLock, RequestKind,
};
use sealblock_units::{Extent, Lba};
use smallvec::SmallVec;

use crate::label::ReplicaState;
use crate::label::name::MirrorName;
use crate::label::regions::{RegionMap, Regions};
use crate::mirror::delegation::{Call, Delegation, LockedBlocks};
use crate::mirror::hot_groups::HotGroups;
use crate::mirror::replica::Replica;
use crate::mirror::write_intent::{SessionPhase, WriteIntent};

/// Replicas that a request goes to.
pub(crate) type Replicas = SmallVec<[Rc<Replica>; 2]>;

/// A mirror of several replicas. Open one with [`crate::open`], and run its [`crate::Worker`] beside it.
pub struct Mirror<C> {
    pub(crate) clock: C,
    pub(crate) geometry: Geometry,
    pub(crate) abilities: Abilities,
    /// What the background work has found of [`Mirror::read_freshness`].
    pub(crate) found_freshness: Cell<Freshness>,
    pub(crate) map: RegionMap,
    pub(crate) uuid: [u8; 16],
    pub(crate) name: Option<MirrorName>,
    /// True if labels record the mirror: they were found, or this open wrote them. Otherwise its identity is unused.
    is_labelled: bool,
    pub(crate) is_read_only: bool,
    pub(crate) mutation: Mutation,
    /// In the order of the records in labels.
    pub(crate) replicas: RefCell<Vec<Rc<Replica>>>,
    /// Index of the replica whose label assembly took for the newest, or of one that was there while the only one with a label was away.
    /// Where in-sync replicas differ, its content counts: another replica may be an image from before that label.
    authority: Cell<usize>,
    pub(crate) range_lock: RangeLock,
    /// What other cores may do by themselves.
    pub(crate) delegation: Arc<Delegation>,
    /// Their calls, until the worker takes them.
    pub(crate) calls: Cell<Option<UnboundedReceiver<Call>>>,
    pub(crate) write_intent: WriteIntent,
    /// The groups that labels mark dirty since the mirror was opened.
    pub(crate) hot: RefCell<HotGroups>,
    /// The event count before the first label of this opening.
    pub(crate) opened_events: u64,
    /// The next flush fails: unflushed writes may be lost, because the last in-sync replica went offline and came
    /// back, or an internal flush failed.
    pub(crate) writes_lost: Cell<bool>,
    /// The labels' record of a possible loss that was not reported to hosts.
    pub(crate) unreported_loss: Cell<bool>,
    pub(crate) lost_blocks: Cell<u64>,
    /// Blocks of which a check has found good copies that differ, at most [`MAX_CONFLICTS`]: they are read no more until they are written
    /// or the copies are found equal.
    pub(crate) conflicts: RefCell<BTreeSet<Lba>>,
    /// Bad copies that reconciling or a resync has rewritten, until a repair names them.
    pub(crate) reconciled_damage: RefCell<Vec<BadBlock>>,
    /// Identity of the replica that serves nosync regions of a read-only mirror, once one was read: readers must not
    /// see two contents.
    pub(crate) nosync_source: Cell<Option<[u8; 16]>>,
    /// Counts reads, for turns.
    pub(crate) next_read: Cell<usize>,
    pub(crate) work: Condition,
    pub(crate) is_closing: Cell<bool>,
}

/// The parts from which [`crate::open`] and [`crate::create`] make a mirror.
pub(crate) struct MirrorParts {
    pub geometry: Geometry,
    pub map: RegionMap,
    pub uuid: [u8; 16],
    pub name: Option<MirrorName>,
    pub replicas: Vec<Rc<Replica>>,
    pub authority: usize,
    pub write_intent: WriteIntent,
    /// Whether the authoritative content may be outdated.
    pub freshness: Freshness,
    /// It may lack completed but unflushed changes.
    pub unreported_loss: bool,
    /// Labels were found.
    pub is_labelled: bool,
    pub hooks: TestHooks,
}

/// A rule that the mirror breaks, to show that simulations detect it. It takes effect only in a build with the feature
/// `mutations`, which proofs enable; the product has none of these places.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mutation {
    /// None.
    #[default]
    None,
    /// Changes go to the replicas before the labels mark their regions dirty.
    SkipMark,
    /// Changes complete before the labels mark the replicas that missed them out of sync.
    CompleteEarly,
    /// Reads go to resyncing replicas too.
    ReadResyncing,
    /// Regions leave the labels without a flush of the replicas.
    ClearUnflushed,
    /// Regions that make room for others leave the labels without a flush of the replicas.
    EvictUnflushed,
    /// A resync makes blocks unreadable that every in-sync replica has lost, although the resyncing replica can read
    /// them.
    PoisonLastCopy,
    /// An older copy counts as the current one.
    ForgetStale,
    /// A region that becomes nosync, or is reconciled, during the flush of a resync counts as resynced.
    ForgetFlushing,
    /// The regions that an offline replica lacks are forgotten when the regions around them are clean.
    ForgetOutOfSync,
    /// Assembly ignores lineages: replicas diverged only where labels mark each other out of sync.
    SkipLineage,
    /// Changes go to a resyncing replica before its own label lists the regions that it lacks.
    SkipOwnLabel,
    /// The own label of a removed replica is not written.
    SkipRemovedLabel,
    /// A replica that is written alone forgets the sessions that changed it.
    ForgetSessions,
    /// A replica that was offline at the open is matched by the order of the names, whatever its label.
    TrustOrder,
    /// Reattaching skips the check for changes that were made without the other replicas.
    ReattachDiverged,
    /// A replica that reattaches while labels are written counts as having its own label.
    LateLabel,
    /// Event counts continue without a gap at each opening.
    CountOn,
    /// Bitmap pages count as read, without a check of their bytes.
    TrustPages,
    /// Replicas have bitmap pages of one epoch, so that each one's pages pass for another's.
    SharedEpoch,
    /// Overlapping changes do not wait for each other.
    Unordered,
    /// Regions with changes in flight leave the labels when the mirror is closed.
    CloseInFlight,
    /// Other cores go on by themselves when replicas fail or may differ.
    KeepDelegating,
    /// Other cores do not look whether they may still execute what they have executed.
    TrustOldTerms,
    /// Other cores read blocks that are being changed.
    ReadLocked,
}

impl Mutation {
    /// The rule that is broken: none, a constant, without the feature.
    pub(crate) fn injected(self) -> Mutation {
        if cfg!(any(test, feature = "mutations")) { self } else { Mutation::None }
    }

    /// True if it breaks `rule`.
    pub(crate) fn is(self, rule: Mutation) -> bool {
        self.injected() == rule
    }
}

/// How a mirror of a test differs from one in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TestHooks {
    /// The rule that it breaks.
    pub mutation: Mutation,
    /// Base-2 logarithm of the blocks of a region of a new mirror; `None` for the usual size.
    pub region_shift: Option<u32>,
    /// Most groups of regions that labels mark dirty; `None` for the usual number.
    pub hot_groups: Option<u32>,
}

/// State of a mirror.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MirrorState {
    /// All replicas are in sync and online.
    Optimal,
    /// At least one replica is in sync and online, but not all are; or a crash may have left replicas different.
    Degraded,
    /// No in-sync replica is online.
    Failed,
    /// No label makes the devices a mirror: they are blank, and open read-only, so that none was written.
    Unlabelled,
}

impl MirrorState {
    /// The name in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            MirrorState::Optimal => "optimal",
            MirrorState::Degraded => "degraded",
            MirrorState::Failed => "failed",
            MirrorState::Unlabelled => "unlabelled",
        }
    }
}

/// State of a mirror and of its replicas.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MirrorInfo {
    /// Identity of the mirror, as its labels have it; `None` without any.
    pub uuid: Option<[u8; 16]>,
    /// Its name, if it has one.
    pub name: Option<MirrorName>,
    /// Bytes of a region, the unit of resync.
    pub region_bytes: u64,
    /// State of the mirror.
    pub state: MirrorState,
    /// Bytes of the dirty regions: where changes were made or are expected, so that they wait for no label. After a crash now, replicas
    /// are compared there.
    pub dirty_bytes: u64,
    /// The most that `dirty_bytes` can be beside regions in which replicas differ, and changes that are larger by themselves.
    pub max_dirty_bytes: u64,
    /// Bytes of the nosync regions: replicas may differ there and no change is in flight; they wait for
    /// reconciliation.
    pub nosync_bytes: u64,
    /// Blocks of requests that had no good copy on any replica.
    pub lost_blocks: u64,
    /// Its replicas, in the order of their records.
    pub replicas: Vec<ReplicaInfo>,
}

/// State of a replica.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReplicaInfo {
    /// Identity, which no other replica of the mirror ever had.
    pub id: [u8; 16],
    /// Name of the replica on the command line.
    pub name: String,
    /// State that labels give it.
    pub state: ReplicaState,
    /// True if a device is attached to it.
    pub is_online: bool,
    /// False if its device has no reserved area for a label: another device of its size under its name is taken for it.
    pub has_label_room: bool,
    /// Why it is offline or out of sync; empty if it is neither.
    pub last_error: String,
    /// Bytes of the regions that it lacks.
    pub out_of_sync_bytes: u64,
    /// Bytes that resync and reconciliation wrote to it since the mirror was opened.
    pub resynced_bytes: u64,
    /// Blocks on it that were rewritten from another replica.
    pub repaired_blocks: u64,
    /// Blocks of which it has an older copy and no replica has a newer one; see [`Mirror::accept_stale`].
    pub stale_blocks: u64,
    /// How often it failed since the mirror was opened.
    pub failures: u64,
}

impl<C: Clock> Mirror<C> {
    pub(crate) fn new(clock: C, parts: MirrorParts, abilities: Abilities, read_only: bool) -> Mirror<C> {
        let MirrorParts { geometry, map, uuid, name, replicas, authority, write_intent, freshness, .. } = parts;
        let MirrorParts { unreported_loss, is_labelled, hooks, .. } = parts;
        let hot = HotGroups::new(&map, geometry.block_size, hooks.hot_groups);
        let (delegation, calls) = Delegation::new();
        Mirror {
            clock,
            geometry,
            abilities: Abilities { freshness, ..abilities },
            found_freshness: Cell::default(),
            map,
            uuid,
            name,
            // An open or creation for writing has written the labels before any other code sees the mirror.
            is_labelled: is_labelled || !read_only,
            is_read_only: read_only,
            mutation: hooks.mutation,
            replicas: RefCell::new(replicas),
            authority: Cell::new(authority),
            range_lock: RangeLock::default(),
            delegation,
            calls: Cell::new(Some(calls)),
            opened_events: write_intent.events.get(),
            write_intent,
            hot: RefCell::new(hot),
            writes_lost: Cell::new(false),
            unreported_loss: Cell::new(unreported_loss),
            lost_blocks: Cell::new(0),
            conflicts: RefCell::default(),
            reconciled_damage: RefCell::default(),
            nosync_source: Cell::new(None),
            next_read: Cell::new(0),
            work: Condition::default(),
            is_closing: Cell::new(false),
        }
    }

    /// State of the mirror and of its replicas.
    pub fn describe(&self) -> MirrorInfo {
        let shift = self.geometry.block_size.shift();
        let describe = |replica: &Rc<Replica>| ReplicaInfo {
            id: replica.id,
            name: replica.name().to_string(),
            state: replica.state.get(),
            is_online: replica.is_online(),
            has_label_room: !replica.is_online() || replica.has_reserved_area(),
            last_error: replica.last_error.borrow().clone(),
            out_of_sync_bytes: match replica.state.get() {
                ReplicaState::InSync | ReplicaState::Removed => 0,
                ReplicaState::OutOfSync => self.map.blocks(&replica.out_of_sync.borrow()) << shift,
                ReplicaState::Resyncing => self.map.blocks(&replica.to_resync.borrow()) << shift,
            },
            resynced_bytes: replica.resynced_bytes.get(),
            repaired_blocks: replica.repaired_blocks.get(),
            stale_blocks: replica.stale.borrow().count(),
            failures: replica.failures.get(),
        };
        MirrorInfo {
            uuid: Some(self.uuid).filter(|_| self.has_label()),
            name: self.name,
            region_bytes: 1 << (self.map.shift() + shift),
            state: self.state(),
            dirty_bytes: self.map.blocks(&self.write_intent.dirty.borrow()) << shift,
            max_dirty_bytes: self.max_dirty_bytes(),
            nosync_bytes: self.map.blocks(&self.write_intent.nosync.borrow()) << shift,
            lost_blocks: self.lost_blocks.get(),
            replicas: self.replicas.borrow().iter().map(describe).collect(),
        }
    }

    /// Bytes of the most groups that labels mark dirty.
    fn max_dirty_bytes(&self) -> u64 {
        let blocks = u64::from(self.hot.borrow().limit()) * self.map.group_blocks();
        blocks.min(self.geometry.capacity_blocks) << self.geometry.block_size.shift()
    }

    /// Locks blocks for a change of them, or for a look at all their copies.
    pub(crate) async fn lock_blocks(&self, extent: Extent) -> LockedBlocks<'_> {
        let lock = self.range_lock.lock(extent.into()).await;
        self.delegation.locked(extent, lock)
    }

    /// State of the mirror.
    pub fn state(&self) -> MirrorState {
        let replicas = self.replicas.borrow();
        let mut members = replicas.iter().filter(|replica| replica.state.get() != ReplicaState::Removed);
        if !replicas.iter().any(|replica| replica.is_readable()) {
            return MirrorState::Failed;
        }
        // Dirty regions do not count: the change in flight makes replicas identical when it completes. Nosync regions
        // count. A replica with stale blocks counts as degraded, because these blocks have one copy less.
        let is_whole = |replica: &Rc<Replica>| replica.is_readable() && replica.stale.borrow().count() == 0;
        match members.all(is_whole) && self.write_intent.nosync.borrow().is_empty() {
            true if !self.has_label() => MirrorState::Unlabelled,
            true => MirrorState::Optimal,
            false => MirrorState::Degraded,
        }
    }

    /// Whether labels record the mirror. None does where the last replica that has room for one was removed.
    pub(crate) fn has_label(&self) -> bool {
        let replicas = self.replicas.borrow();
        let mut members = replicas.iter().filter(|replica| replica.state.get() != ReplicaState::Removed);
        self.is_labelled && members.any(|replica| replica.has_room)
    }

    /// Waits until the state is another than `known` or the mirror is closed, and returns the state.
    pub async fn state_changed(&self, known: MirrorState) -> MirrorState {
        self.work.wait_until(|| self.state() != known || self.is_closing.get()).await;
        self.state()
    }

    /// True if the mirror was closed.
    pub fn is_closed(&self) -> bool {
        self.is_closing.get()
    }

    /// The replicas that are in sync and online, from the one whose content counts where they differ.
    pub(crate) fn in_sync(&self) -> Replicas {
        let replicas = self.replicas.borrow();
        let (before, from) = replicas.split_at(self.authority.get().min(replicas.len()));
        from.iter().chain(before).filter(|replica| replica.is_readable()).cloned().collect()
    }

    /// Where replicas differ, the content of this one counts.
    pub(crate) fn set_authority(&self, id: [u8; 16]) {
        let at = self.replicas.borrow().iter().position(|replica| replica.id == id);
        self.authority.set(at.unwrap_or(self.authority.get()));
    }

    /// The replicas that changes go to.
    pub(crate) fn write_targets(&self) -> Replicas {
        let replicas = self.replicas.borrow();
        replicas.iter().filter(|replica| replica.is_writable()).cloned().collect()
    }

    /// Moves the replica with the fewest requests in flight to the front; among equals they alternate, by a counter
    /// that readers increment.
    pub(crate) fn balance(&self, mut replicas: Replicas) -> Replicas {
        if replicas.len() > 1 {
            let count = replicas.len();
            replicas.rotate_left(self.next_read.get() % count);
            let idlest = (0..count).min_by_key(|at| replicas[*at].in_flight()).unwrap_or(0);
            replicas.swap(0, idlest);
        }
        replicas
    }

    /// The error of a request while no replica is online.
    pub(crate) fn no_replica(&self) -> Error {
        let reasons: Vec<String> = self
            .replicas
            .borrow()
            .iter()
            .map(|replica| format!("{}: {}", replica.name(), replica.last_error.borrow()))
            .collect();
        ErrorKind::Unreachable { reason: format!("no replica of the mirror is online ({})", reasons.join("; ")) }.into()
    }

    pub(crate) fn named_replica(&self, name: &str) -> Option<Rc<Replica>> {
        let named = |replica: &&Rc<Replica>| *replica.name() == *name && replica.state.get() != ReplicaState::Removed;
        self.replicas.borrow().iter().find(named).cloned()
    }

    /// True if in-sync replicas may differ in some of these blocks although no change is in flight there.
    pub(crate) fn is_nosync(&self, extent: Extent) -> bool {
        self.write_intent.nosync.borrow().contains_any(self.map.of(extent))
    }

    /// The parts of an extent in which in-sync replicas may differ although no change is in flight there.
    pub(crate) fn nosync_parts(&self, extent: Extent) -> Vec<Extent> {
        let nosync = self.write_intent.nosync.borrow();
        let regions = self.map.of(extent).filter(|region| nosync.contains(*region));
        regions.filter_map(|region| common(extent, self.map.extent(region))).collect()
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
        self.revoke();
        self.write_intent.nosync.borrow_mut().add(regions);
        self.write_intent.nosync_count.set(self.write_intent.nosync_count.get() + 1);
        for replica in self.replicas.borrow().iter().filter(|replica| replica.state.get() == ReplicaState::Resyncing) {
            // Out of sync too: if the resync stops before it has copied them, they may have left the labels.
            replica.out_of_sync.borrow_mut().add(regions);
            replica.to_resync.borrow_mut().add(regions);
        }
        self.work.notify();
    }

    /// True if an offline or resyncing replica is listed in sync, because nothing was changed since it had
    /// everything.
    pub(crate) fn has_listed_in_sync(&self) -> bool {
        self.replicas.borrow().iter().any(|replica| replica.is_listed_in_sync.get())
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

    /// Marks the replica out of sync if `error` means that its device is unreachable.
    pub(crate) fn fail_if_unreachable(&self, replica: &Replica, error: &Error) {
        if replica.is_unreachable() {
            self.fail_replica(replica, &error.to_string());
        }
    }

    /// Fails a replica whose device failed a request, unless another device is attached by now.
    pub(crate) fn fail_replica_if_attached(&self, replica: &Replica, attach_count: u64, reason: &str) {
        if replica.attach_count() == attach_count {
            self.fail_replica(replica, reason);
        }
    }

    /// The freshness of the replicas that reads may go to: a device may find out while it is in use that it was put back.
    pub(crate) fn read_freshness(&self) -> Freshness {
        let replicas = self.replicas.borrow();
        let readable = replicas.iter().filter(|replica| replica.is_readable());
        readable.fold(Freshness::Current, |all, replica| all.and(replica.freshness()))
    }

    /// Why a replica lacks its last writes, if its device found that out since it was attached and another replica has
    /// these writes. It is attached again as one that lacks everything.
    pub(crate) fn why_outdated(&self, replica: &Replica) -> Option<String> {
        let why = replica.freshness().why_older().filter(|_| !self.is_read_only && replica.is_readable())?;
        let is_other = |other: &Rc<Replica>| other.is_readable() && !other.may_be_older();
        let has_other = self.replicas.borrow().iter().any(is_other);
        has_other.then(|| ErrorKind::MayBeOlder(why).to_string())
    }

    /// True if another replica is readable and has lost nothing.
    pub(crate) fn has_whole_beside(&self, replica: &Replica) -> bool {
        let is_whole = |other: &Replica| other.is_readable() && !other.loss().is_some_and(|loss| loss.lacks_everything);
        self.replicas.borrow().iter().any(|other| other.id != replica.id && is_whole(other))
    }

    /// Detaches a replica's device and marks the replica out of sync in all dirty regions, or in all if it has lost
    /// blocks. The labels must record it before any request that it misses completes.
    pub(crate) fn fail_replica(&self, replica: &Replica, reason: &str) {
        if !replica.takes_labels() {
            return;
        }
        self.revoke();
        replica.failures.set(replica.failures.get() + 1);
        *replica.last_error.borrow_mut() = reason.to_owned();
        if let Some(loss) = replica.loss().filter(|loss| loss.lacks_everything) {
            // Whichever request failed first. Opened again the device would not know it.
            *replica.last_error.borrow_mut() = loss.reason;
            replica.has_lost_blocks.set(true);
        }
        replica.set_device(None);
        let was_current = replica.state.get() == ReplicaState::InSync;
        let is_any_current = self.replicas.borrow().iter().any(|replica| replica.is_readable());
        if was_current && !is_any_current {
            tracing::error!(replica = %replica.name(), %reason, "last in-sync replica failed: requests fail until it is back");
            // The last in-sync replica stays in sync: no other one could take over. Requests fail until it is back,
            // or until a resync of another one ends.
            self.work.notify();
            return;
        }
        match is_any_current {
            true => tracing::warn!(replica = %replica.name(), %reason, "replica failed, mirror degraded"),
            false => {
                tracing::warn!(replica = %replica.name(), %reason, "replica failed; the mirror has no in-sync replica")
            }
        }
        self.demote(replica);
    }

    /// Marks offline replicas out of sync that were the last in-sync ones when they failed, once another one is in
    /// sync.
    pub(crate) fn demote_offline(&self) {
        for replica in self.replicas.borrow().iter() {
            if replica.state.get() == ReplicaState::InSync && !replica.is_online() {
                self.demote(replica);
            }
        }
    }

    /// Marks an offline replica out of sync in all regions that may differ, or in all if it has lost blocks.
    fn demote(&self, replica: &Replica) {
        let was_current = replica.state.get() == ReplicaState::InSync;
        let is_recorded = self.in_sync().iter().any(|other| other.has_room);
        replica.is_failure_unrecorded.set(was_current && replica.has_room && !is_recorded);
        replica.state.set(ReplicaState::OutOfSync);
        replica.out_of_sync.borrow_mut().add(&self.write_intent.written.borrow());
        if replica.has_lost_blocks.get() {
            *replica.out_of_sync.borrow_mut() = Regions::all(self.map.count());
        } else if was_current && self.is_flushed() {
            replica.is_listed_in_sync.set(true);
        }
        if !replica.is_listed_in_sync.get() {
            self.write_intent.is_changing.set(self.write_intent.is_changing.get() || was_current);
            self.write_intent.request_failure_write();
        }
        self.work.notify();
    }

    /// Starts the resync of an online replica.
    pub(crate) fn start_resync(&self, replica: &Replica) {
        self.revoke();
        *replica.to_resync.borrow_mut() = replica.out_of_sync.borrow().clone();
        let is_late = self.mutation.is(Mutation::LateLabel) && self.write_intent.is_writing();
        replica.has_own_label.set(self.mutation.is(Mutation::SkipOwnLabel) || is_late);
        replica.state.set(ReplicaState::Resyncing);
        self.work.notify();
    }
}

impl<C: Clock> std::fmt::Debug for Mirror<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Mirror").field(&self.describe()).finish()
    }
}

/// The abilities of a mirror of these devices: those that all of them have.
pub(crate) fn abilities(devices: &[Abilities], read_only: bool) -> Abilities {
    let all = |can: &dyn Fn(&Abilities) -> bool| devices.iter().all(can);
    let all_have = |kind| Ability::native_if(all(&|of| of.get(kind) == Ability::Native));
    let unmap_zeroes = all(&|of| of.unmap_zeroes);
    let abilities = Abilities {
        writable: !read_only && all(&|of| of.writable),
        // One replica may miscompare where another one has written already.
        compare_and_write_blocks: 0,
        // Bitmap pages belong to the mirror, as the label does.
        bitmap_pages: 0,
        unmap_zeroes,
        offloads: all(&|of| of.offloads),
        seals: all(&|of| of.seals),
        copies: true,
        // The freshness of a mirror is not that of each replica: it is determined when the mirror is opened.
        freshness: Freshness::Current,
        ..Abilities::BASIC
    };
    // Absent are: a Write without tags, whose tags are made once, in front of the mirror, and not by each replica; a
    // Salvage, because a bad block of one replica is read from another one, and combining the remains of all of them
    // would not give a valid block; and a Copy, whose copies would come from as many sources, of which any may be
    // damaged.
    abilities
        .with([RequestKind::Verify, RequestKind::Compare, RequestKind::WriteZeroes], Ability::Native)
        .with([RequestKind::Repair], Ability::Native)
        .with_checksums(Ability::Native)
        // Blocks must read the same on all replicas after a Discard, so the mirror zeroes them.
        .with([RequestKind::Discard], Ability::native_if(unmap_zeroes))
        .with([RequestKind::WriteUncorrectable], all_have(RequestKind::WriteUncorrectable))
        .with([RequestKind::ReadReserved], all_have(RequestKind::ReadReserved))
}

/// The blocks that both extents have.
fn common(a: Extent, b: Extent) -> Option<Extent> {
    let first = a.start().max(b.start()).get();
    let last = a.last().min(b.last()).get();
    Extent::from_raw(first, (last + 1).saturating_sub(first)).ok()
}
