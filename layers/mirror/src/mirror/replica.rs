//! A replica: one of the devices of a mirror, online or not, and the blocks that it withholds.
//!
//! A *stale* block is one of which an in-sync replica has only an older copy, and no other replica has any. It is withheld:
//! every request finds it bad until it is written, a good copy is found, or the administrator accepts it.
//!
//! Invariant: a label drops a block from the list only when the write to it is durable. A crash before that makes a
//! good block stale again, and the worker corrects it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use futures_util::future::{LocalBoxFuture, join_all, join3};
use sealblock_block::{
    BadBlock, BadBlockCause, BlockState, Checksum, Coverage, Device, Durability, DynDevice, Error, ErrorKind,
    Expectations, Freshness, MemberPath, Outcome, Request, RequestKind, Response, StatusRun, StatusRuns, Tally,
    Unchecked, VerifyStats,
};
use sealblock_integrity::{ChecksumKind, Sealed};
use sealblock_units::{BlockCount, Extent, Lba};

use crate::label::regions::Regions;
use crate::label::{MAX_SETS, ReplicaRecord, ReplicaState};

/// Opens a replica's device again after it failed.
pub type Reopen = Box<dyn Fn() -> LocalBoxFuture<'static, Result<DynDevice, String>>>;

/// Reports that a replica's device is lost, without a request; `None` while it is not known to be lost.
pub type LossMonitor = Box<dyn Fn() -> Option<Loss>>;

/// What is known of a device that is lost.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Loss {
    /// Why.
    pub reason: String,
    /// Blocks that it had are lost, and it does not say which: should it return, it lacks everything. Otherwise it
    /// lacks what it missed.
    pub lacks_everything: bool,
}

/// A device for a mirror.
pub struct ReplicaSource {
    /// Name of the replica on the command line.
    pub name: String,
    /// The device behind its gate, or why it cannot be opened.
    pub device: Result<DynDevice, String>,
    /// The device is there and cannot be opened, and its label is lost with it.
    pub has_lost_label: bool,
    /// How to open it again.
    pub reopen: Option<Reopen>,
    /// Whether the device that is open now is lost. The mirror then detaches it without waiting for a request to fail.
    pub loss_monitor: Option<LossMonitor>,
}

impl ReplicaSource {
    /// A device of this name, whose label is not known to be lost.
    pub fn new(name: impl Into<String>, device: Result<DynDevice, String>, reopen: Option<Reopen>) -> ReplicaSource {
        ReplicaSource { name: name.into(), device, has_lost_label: false, reopen, loss_monitor: None }
    }
}

/// A replica. Its index in the mirror's list is the index of its record in labels.
pub(crate) struct Replica {
    name: RefCell<Rc<str>>,
    /// Its number among the names on the command line; bad blocks carry it.
    pub number: Cell<usize>,
    pub id: [u8; 16],
    pub state: Cell<ReplicaState>,
    /// It is offline since the opening, like others, and got its name by the order of the names: it may be one of the
    /// others.
    pub is_name_assumed: Cell<bool>,
    /// The device under its name has no label of the mirror.
    pub is_unlabelled: Cell<bool>,
    /// Event count of the last label that it is known to hold.
    pub acked_events: Cell<u64>,
    /// Event count of the last label that was sent to it.
    pub sent_events: Cell<u64>,
    /// The regions that labels say it lacks.
    pub out_of_sync: RefCell<Regions>,
    /// It never was in sync since it was added.
    pub is_new: Cell<bool>,
    /// It is offline or resyncing, and labels still list it in sync: nothing was changed since it had everything.
    pub is_listed_in_sync: Cell<bool>,
    /// It was in sync when it failed, and the only one with room for a label: no label can record that it failed, so no change completes
    /// until it is back.
    pub is_failure_unrecorded: Cell<bool>,
    /// Blocks of which it has only an older copy.
    pub stale: RefCell<StaleBlocks>,
    /// What the bitmap pages of its device hold.
    pub pages: RefCell<ReplicaPages>,
    /// The regions that are still to resync.
    pub to_resync: RefCell<Regions>,
    device: RefCell<Option<DynDevice>>,
    /// Counts attached and detached devices.
    attach_count: Cell<u64>,
    /// The attached device completed a request as unreachable.
    is_unreachable: Cell<bool>,
    /// Number of requests in flight.
    in_flight: Cell<u32>,
    /// Its own label was written since its resync started.
    pub has_own_label: Cell<bool>,
    /// It has room for a label; this never changes.
    pub has_room: bool,
    pub repaired_blocks: Cell<u64>,
    pub failures: Cell<u64>,
    pub resynced_bytes: Cell<u64>,
    pub last_error: RefCell<String>,
    pub reopen: RefCell<Option<Reopen>>,
    pub loss_monitor: RefCell<Option<LossMonitor>>,
    /// Its last device lost blocks, and another replica had them: one that returns counts as lacking everything.
    pub has_lost_blocks: Cell<bool>,
}

impl Replica {
    pub fn new(source: ReplicaSource, number: usize, record: &ReplicaRecord) -> Replica {
        let (device, reason) = match source.device {
            Ok(device) => (Some(device), String::new()),
            Err(reason) => (None, reason),
        };
        let replica = Replica {
            name: RefCell::new(source.name.into()),
            number: Cell::new(number),
            id: record.id,
            state: Cell::new(record.state),
            to_resync: RefCell::new(record.out_of_sync.clone()),
            out_of_sync: RefCell::new(record.out_of_sync.clone()),
            is_name_assumed: Cell::new(false),
            is_unlabelled: Cell::new(false),
            is_new: Cell::new(record.is_new),
            is_listed_in_sync: Cell::new(false),
            is_failure_unrecorded: Cell::new(false),
            stale: RefCell::new(StaleBlocks::new(&record.stale)),
            acked_events: Cell::new(record.acked_events),
            sent_events: Cell::new(record.sent_events),
            pages: RefCell::default(),
            device: RefCell::default(),
            attach_count: Cell::new(0),
            is_unreachable: Cell::new(false),
            in_flight: Cell::new(0),
            has_own_label: Cell::new(false),
            has_room: record.has_room,
            repaired_blocks: Cell::new(0),
            failures: Cell::new(0),
            resynced_bytes: Cell::new(0),
            last_error: RefCell::new(reason),
            reopen: RefCell::new(source.reopen),
            loss_monitor: RefCell::new(source.loss_monitor),
            has_lost_blocks: Cell::new(false),
        };
        replica.set_device(device);
        replica
    }

    /// Its name on the command line.
    pub fn name(&self) -> Rc<str> {
        self.name.borrow().clone()
    }

    /// Renames it.
    pub fn set_name(&self, name: String) {
        *self.name.borrow_mut() = name.into();
    }

    /// Counts and logs a bad copy that was rewritten, and is good.
    pub fn count_repaired(&self, bad: &BadBlock) {
        self.repaired_blocks.set(self.repaired_blocks.get() + 1);
        tracing::warn!(replica = %self.name(), %bad, "bad block repaired");
    }

    /// Swaps the names of two offline replicas, with their way to be opened and the counters of their names.
    pub fn swap_names(&self, other: &Replica) {
        self.name.swap(&other.name);
        self.number.swap(&other.number);
        self.reopen.swap(&other.reopen);
        self.loss_monitor.swap(&other.loss_monitor);
        self.last_error.swap(&other.last_error);
        self.is_unlabelled.swap(&other.is_unlabelled);
        self.repaired_blocks.swap(&other.repaired_blocks);
        self.failures.swap(&other.failures);
        self.resynced_bytes.swap(&other.resynced_bytes);
    }

    /// Its record in labels now.
    pub fn record(&self) -> ReplicaRecord {
        let is_unmissed = self.is_listed_in_sync.get();
        let out_of_sync = self.out_of_sync.borrow();
        ReplicaRecord {
            id: self.id,
            state: if is_unmissed { ReplicaState::InSync } else { self.state.get() },
            has_room: self.has_room,
            is_new: self.is_new.get(),
            out_of_sync: if is_unmissed { Regions::none(out_of_sync.capacity()) } else { out_of_sync.clone() },
            stale: self.stale.borrow().listed(),
            acked_events: self.acked_events.get(),
            sent_events: self.sent_events.get(),
        }
    }

    pub fn set_device(&self, device: Option<DynDevice>) {
        *self.device.borrow_mut() = device;
        self.attach_count.set(self.attach_count.get() + 1);
        self.is_unreachable.set(false);
        self.pages.take();
    }

    /// True if the attached device completed a request as unreachable.
    pub fn is_unreachable(&self) -> bool {
        self.is_unreachable.get()
    }

    /// What is known of the loss of its attached device.
    pub fn loss(&self) -> Option<Loss> {
        self.device.borrow().as_ref()?;
        self.loss_monitor.borrow().as_ref()?()
    }

    /// The attached device.
    pub fn device(&self) -> Option<DynDevice> {
        self.device.borrow().clone()
    }

    /// True if its device may lack its last writes, and still has to report it: any change of a block ends that.
    pub fn may_be_older(&self) -> bool {
        !self.freshness().is_current()
    }

    /// The freshness of its device; current if there is none.
    pub fn freshness(&self) -> Freshness {
        self.device.borrow().as_ref().map_or(Freshness::Current, |device| device.abilities().freshness)
    }

    /// A number that differs before and after the device is attached or detached.
    pub fn attach_count(&self) -> u64 {
        self.attach_count.get()
    }

    /// True if its device has a reserved area.
    pub fn has_reserved_area(&self) -> bool {
        self.device.borrow().as_ref().is_some_and(has_reserved_area)
    }

    /// True if a device is attached.
    pub fn is_online(&self) -> bool {
        self.device.borrow().is_some()
    }

    /// True if it is in sync and online, so reads may go to it.
    pub fn is_readable(&self) -> bool {
        self.state.get() == ReplicaState::InSync && self.is_online()
    }

    /// True if labels go to it: it is in sync or resyncing, and online.
    pub fn takes_labels(&self) -> bool {
        matches!(self.state.get(), ReplicaState::InSync | ReplicaState::Resyncing) && self.is_online()
    }

    /// True if changes go to it. Not before its own label lists it as out of sync: opened alone it would count as in
    /// sync.
    pub fn is_writable(&self) -> bool {
        self.takes_labels() && !self.lacks_own_label()
    }

    /// True if it is resyncing and its own label does not say so yet.
    pub fn lacks_own_label(&self) -> bool {
        self.state.get() == ReplicaState::Resyncing && self.has_room && !self.has_own_label.get()
    }

    /// Number of requests in flight.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.get()
    }

    /// The path of a member of it, from the mirror.
    fn path(&self, within: MemberPath) -> MemberPath {
        within.within(self.number.get())
    }

    /// The same bad block with a path from the mirror.
    pub fn bad_block(&self, bad: &BadBlock) -> BadBlock {
        BadBlock { member: self.path(bad.member), ..*bad }
    }

    /// The same coverage with paths from the mirror.
    pub fn coverage(&self, coverage: Coverage) -> Coverage {
        coverage.map(|run| self.unchecked(run))
    }

    /// The same run with a path from the mirror.
    pub fn unchecked(&self, run: Unchecked) -> Unchecked {
        Unchecked { member: self.path(run.member), ..run }
    }

    /// Executes a request on the device, in place if it need not wait. Stale blocks are bad until they are written.
    pub async fn execute(&self, request: Request) -> Outcome {
        match self.try_execute(&request) {
            Some(outcome) => outcome,
            None => self.execute_waiting(request).await,
        }
    }

    /// True if its device may execute requests in place.
    pub fn executes_in_place(&self) -> bool {
        self.device.borrow().as_ref().is_some_and(Device::executes_in_place)
    }

    /// Executes a request in place if the device need not wait for anything; `None` if it was not started.
    pub fn try_execute(&self, request: &Request) -> Option<Outcome> {
        if self.lacks_own_label() || !self.stale.borrow().is_empty() {
            return None;
        }
        let outcome = self.device()?.try_execute(request)?;
        Some(outcome.inspect_err(|error| self.note_error(error)))
    }

    /// Executes a request that has to wait for the device, or that stale blocks concern.
    pub async fn execute_waiting(&self, request: Request) -> Outcome {
        if self.stale.borrow().is_empty() {
            return self.execute_raw(request).await;
        }
        let (kind, extent) = (request.kind(), request.extent());
        let reads =
            matches!(kind, RequestKind::Read | RequestKind::Verify | RequestKind::Checksum | RequestKind::Compare);
        match extent {
            Some(extent) if reads => {
                let withheld = self.stale.borrow().within(extent);
                match withheld.is_empty() {
                    true => self.execute_raw(request).await,
                    false => self.execute_around_stale(request, extent, &withheld).await,
                }
            }
            _ => {
                let outcome = self.execute_raw(request).await;
                if let (Ok(_), Some(extent), true) = (&outcome, extent, kind.changes_blocks()) {
                    self.stale.borrow_mut().mark_rewritten(extent);
                }
                outcome
            }
        }
    }

    /// Executes a request on the device, stale blocks included.
    pub async fn execute_raw(&self, request: Request) -> Outcome {
        let Some(device) = self.device() else { return Err(self.offline()) };
        if self.lacks_own_label() && is_change(&request) {
            // The caller chose this replica before it was detached and attached again.
            return Err(self.lost_in_flight());
        }
        self.in_flight.set(self.in_flight.get() + 1);
        let _busy = InFlightGuard(self);
        let attach_count = self.attach_count.get();
        let outcome = device.execute(request).await;
        // A detached device may have lost what it executed, and its error says nothing about the device that is
        // attached now.
        if self.attach_count.get() != attach_count {
            return Err(self.lost_in_flight());
        }
        outcome.inspect_err(|error| self.note_error(error))
    }

    fn note_error(&self, error: &Error) {
        self.is_unreachable.set(self.is_unreachable.get() || is_unreachable(error));
    }

    /// Reads blocks.
    pub async fn read(&self, extent: Extent) -> Result<Sealed, Error> {
        self.read_expecting(extent, &Expectations::NONE).await
    }

    /// Reads blocks, with the caller's expectations of their tags.
    pub async fn read_expecting(&self, extent: Extent, expectations: &Expectations) -> Result<Sealed, Error> {
        match self.execute(Request::read(extent, *expectations)).await? {
            Response::Data(data) => Ok(data),
            _ => Err(unexpected_response()),
        }
    }

    /// Checksum of the data of blocks, and the bytes that were transferred for it.
    pub async fn checksum(
        &self,
        extent: Extent,
        kind: ChecksumKind,
        expectations: Expectations,
    ) -> Result<Checksum, Error> {
        match self.execute(Request::checksum(extent, kind, expectations)).await? {
            Response::Checksum(checksum) if checksum.kind == kind => Ok(checksum),
            _ => Err(unexpected_response()),
        }
    }

    /// Writes blocks as another replica has them.
    pub async fn put(&self, extent: Extent, data: &Sealed) -> Result<(), Error> {
        for request in copies(extent, data) {
            self.execute(request).await?;
        }
        Ok(())
    }

    #[cold]
    fn lost_in_flight(&self) -> Error {
        ErrorKind::Unreachable { reason: format!("replica {} failed during the request", self.name()) }.into()
    }

    fn offline(&self) -> Error {
        ErrorKind::Unreachable { reason: format!("replica {} is offline: {}", self.name(), self.last_error.borrow()) }
            .into()
    }
}

impl Replica {
    /// Executes a request on a replica that withholds some of its blocks: these are bad, and the request runs on all
    /// others. A withheld block that is unreadable has its own cause.
    async fn execute_around_stale(&self, request: Request, extent: Extent, withheld: &[Lba]) -> Outcome {
        let Some(format) = self.device().map(|device| device.geometry().protection) else { return Err(self.offline()) };
        let mut found = Tally::default();
        for &lba in withheld {
            let one = Extent::one(lba);
            match self.execute_raw(Request::verify(one, Expectations::NONE)).await {
                Ok(_) => found.bad_blocks.push(BadBlock::new(lba, BadBlockCause::Stale, None, None)),
                Err(error) => found.take(error)?,
            }
        }
        let without = withheld.iter().copied().collect();
        for run in runs_between(extent, &without) {
            if request.kind() == RequestKind::Compare {
                // The other replicas tell whether they are equal.
                break;
            }
            match self.execute_raw(request.part(extent, run, format)).await {
                Ok(
                    Response::Verified(VerifyStats { coverage, .. }) | Response::Checksum(Checksum { coverage, .. }),
                ) => {
                    found.coverage.merge(coverage);
                }
                Ok(_) => {}
                Err(error) => found.take(error)?,
            }
        }
        found.finish()?;
        Err(unexpected_response())
    }
}

/// What the pages of one replica's device hold.
#[derive(Default)]
pub(crate) struct ReplicaPages {
    /// Tells pages that were written since the device was attached from older ones.
    pub epoch: u64,
    /// Number of the write of each set that it has; 0 for none.
    pub written: [u64; MAX_SETS],
}

/// The stale blocks of a replica.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct StaleBlocks {
    /// Blocks that requests find bad.
    withheld: BTreeSet<u64>,
    /// Blocks that were written since; the write may not be durable, so labels go on listing them.
    rewritten: BTreeSet<u64>,
}

impl StaleBlocks {
    pub fn new(listed: &[u64]) -> StaleBlocks {
        StaleBlocks { withheld: listed.iter().copied().collect(), rewritten: BTreeSet::new() }
    }

    /// The blocks for the list in labels.
    pub fn listed(&self) -> Vec<u64> {
        self.withheld.union(&self.rewritten).copied().collect()
    }

    /// Number of withheld blocks.
    pub fn count(&self) -> u64 {
        self.withheld.len() as u64
    }

    /// True if no block is withheld.
    pub fn is_empty(&self) -> bool {
        self.withheld.is_empty()
    }

    /// All withheld blocks.
    pub fn withheld(&self) -> Vec<Lba> {
        self.withheld.iter().map(|lba| Lba::new(*lba)).collect()
    }

    /// The withheld blocks of an extent.
    pub fn within(&self, extent: Extent) -> Vec<Lba> {
        let (first, last) = (extent.start().get(), extent.last().get());
        if self.withheld.is_empty() {
            return Vec::new();
        }
        self.withheld.range(first..=last).map(|lba| Lba::new(*lba)).collect()
    }

    pub fn withhold(&mut self, lba: Lba) {
        self.rewritten.remove(&lba.get());
        self.withheld.insert(lba.get());
    }

    /// Marks the blocks of an extent as written.
    pub fn mark_rewritten(&mut self, extent: Extent) {
        for lba in self.within(extent) {
            self.withheld.remove(&lba.get());
            self.rewritten.insert(lba.get());
        }
    }

    /// Withholds written blocks again: the device may have lost unflushed writes, and have the older copies again.
    pub fn withhold_again(&mut self) {
        self.withheld.append(&mut self.rewritten);
    }

    /// The written blocks that still need a flush.
    pub fn rewritten(&self) -> &BTreeSet<u64> {
        &self.rewritten
    }

    /// Drops blocks whose write is durable.
    pub fn forget_rewritten(&mut self, rewritten: &BTreeSet<u64>) {
        self.rewritten.retain(|lba| !rewritten.contains(lba));
    }
}

/// Counts a request in flight down when dropped.
struct InFlightGuard<'a>(&'a Replica);

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.0.in_flight.set(self.0.in_flight.get() - 1);
    }
}

/// Runs futures side by side. Allocates only for more than two of them.
pub(crate) async fn side_by_side<F: Future<Output = ()>>(mut futures: impl Iterator<Item = F>) {
    match (futures.next(), futures.next()) {
        (Some(first), Some(second)) => drop(join3(first, second, join_all(futures)).await),
        (Some(only), None) => only.await,
        (None, _) => {}
    }
}

/// Requests that make the blocks of an extent equal to `data`, holes included.
pub(crate) fn copies(extent: Extent, data: &Sealed) -> Vec<Request> {
    let (durability, mut first) = (Durability::Volatile, 0);
    let copy = |run: StatusRun| {
        let blocks = run.blocks.get() as usize;
        let extent = Extent::from_raw(extent.start().get() + first as u64, blocks as u64)
            .expect("a run of an extent's blocks is an extent");
        // A copy of the tags of an unwritten block would disable all checks of the copy.
        let request = match run.state {
            BlockState::Hole => Request::write_zeroes(extent, true, durability),
            BlockState::Allocated => Request::write(extent, data.slice(first, blocks), durability),
        };
        first += blocks;
        request
    };
    runs(data).into_iter().map(copy).collect()
}

/// Status of these blocks: a hole was never written, as its tags and data show.
fn runs(data: &Sealed) -> Vec<StatusRun> {
    let is_all = |bytes: &[u8], value| bytes.iter().all(|byte| *byte == value);
    let mut runs = StatusRuns::default();
    for (block, tuple) in data.iter() {
        let is_hole = !tuple.is_empty() && is_all(tuple, 0xFF) && is_all(block, 0);
        runs.push(BlockCount::ONE, if is_hole { BlockState::Hole } else { BlockState::Allocated });
    }
    runs.into_vec()
}

/// The runs of an extent without these blocks.
pub(crate) fn runs_between(extent: Extent, without: &BTreeSet<Lba>) -> Vec<Extent> {
    let (mut runs, mut from) = (Vec::new(), extent.start().get());
    let end = extent.start().get() + extent.len();
    for stop in without.iter().map(|lba| lba.get()).filter(|lba| extent.contains(Lba::new(*lba))).chain([end]) {
        runs.extend(Extent::from_raw(from, stop.saturating_sub(from)).ok());
        from = stop + 1;
    }
    runs
}

/// True if a request changes the content of blocks.
fn is_change(request: &Request) -> bool {
    let kinds = [RequestKind::Write, RequestKind::WriteZeroes, RequestKind::WriteUncorrectable];
    kinds.contains(&request.kind())
}

/// True if an error means that a device is unreachable.
pub(crate) fn is_unreachable(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unreachable { .. })
}

/// True if a device has a reserved area.
pub(crate) fn has_reserved_area(device: &DynDevice) -> bool {
    device.abilities().is_native(RequestKind::ReadReserved)
}

#[cold]
pub(crate) fn unexpected_response() -> Error {
    ErrorKind::Media { reason: "unexpected response of a replica".to_owned() }.into()
}
