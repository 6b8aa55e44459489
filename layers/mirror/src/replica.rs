//! A replica: one of the devices of a mirror, online or not.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use futures_util::future::LocalBoxFuture;
use sealblock_block::{
    BadBlock, BlockState, Coverage, Device, Durability, DynDevice, Error, ErrorKind, MemberPath, Outcome, Request,
    RequestKind, Response, StatusRun, StatusRuns, Unchecked,
};
use sealblock_integrity::{Checks, PiFormat, Sealed};
use sealblock_units::{BlockCount, Extent};

use crate::label::{ReplicaRecord, ReplicaState};
use crate::paging::ReplicaPages;
use crate::regions::Regions;
use crate::stale::StaleBlocks;

/// Opens a replica's device again after it failed.
pub type Reopen = Box<dyn Fn() -> LocalBoxFuture<'static, Result<DynDevice, String>>>;

/// A device for a mirror.
pub struct ReplicaSource {
    /// Name of the replica on the command line.
    pub name: String,
    /// The device behind its gate, or why it cannot be opened.
    pub device: Result<DynDevice, String>,
    /// How to open it again.
    pub reopen: Option<Reopen>,
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

    /// Swaps the names of two offline replicas, with how each is opened and what was counted under its name.
    pub fn swap_names(&self, other: &Replica) {
        self.name.swap(&other.name);
        self.number.swap(&other.number);
        self.reopen.swap(&other.reopen);
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

    /// The attached device.
    pub fn device(&self) -> Option<DynDevice> {
        self.device.borrow().clone()
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

    /// True if changes go to it. Not before its own label says that it lacks regions: opened alone it would count as
    /// in sync.
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

    /// Executes a request on the device, whose format is that of all replicas. Stale blocks are bad until they are
    /// written.
    pub async fn execute(&self, format: Option<PiFormat>, request: Request) -> Outcome {
        if self.stale.borrow().is_empty() {
            return self.execute_raw(format, request).await;
        }
        let (kind, extent) = (request.kind(), request.extent());
        let reads =
            matches!(kind, RequestKind::Read | RequestKind::Verify | RequestKind::Checksum | RequestKind::Compare);
        match extent {
            Some(extent) if reads => {
                let withheld = self.stale.borrow().within(extent);
                match withheld.is_empty() {
                    true => self.execute_raw(format, request).await,
                    false => self.execute_around_stale(format, request, extent, &withheld).await,
                }
            }
            _ => {
                let outcome = self.execute_raw(format, request).await;
                if let (Ok(_), Some(extent), true) = (&outcome, extent, kind.changes_blocks()) {
                    self.stale.borrow_mut().mark_rewritten(extent);
                }
                outcome
            }
        }
    }

    /// Executes a request on the device, stale blocks included.
    pub(crate) async fn execute_raw(&self, format: Option<PiFormat>, request: Request) -> Outcome {
        let Some(device) = self.device() else { return Err(self.offline()) };
        if self.lacks_own_label() && is_change(&request) {
            // The caller chose this replica before it was detached and attached again.
            return Err(self.lost_in_flight());
        }
        self.in_flight.set(self.in_flight.get() + 1);
        let _busy = InFlightGuard(self);
        let attach_count = self.attach_count.get();
        debug_assert_eq!(device.geometry().protection, format);
        let outcome = device.execute(request).await;
        // A detached device may have lost what it executed, and its error says nothing about the device that is
        // attached now.
        if self.attach_count.get() != attach_count {
            return Err(self.lost_in_flight());
        }
        outcome.inspect_err(|error| self.is_unreachable.set(self.is_unreachable.get() || is_unreachable(error)))
    }

    /// Reads blocks.
    pub async fn read(&self, format: Option<PiFormat>, extent: Extent, checks: Checks) -> Result<Sealed, Error> {
        match self.execute(format, Request::read(extent, checks)).await? {
            Response::Data(data) => Ok(data),
            _ => Err(unexpected_response()),
        }
    }

    /// CRC-64 of the data of blocks, and the bytes that were transferred for it.
    pub async fn checksum(
        &self,
        format: Option<PiFormat>,
        extent: Extent,
        checks: Checks,
    ) -> Result<sealblock_block::Checksum, Error> {
        match self.execute(format, Request::checksum(extent, checks)).await? {
            Response::Checksum(checksum) => Ok(checksum),
            _ => Err(unexpected_response()),
        }
    }

    /// Writes blocks as another replica has them.
    pub async fn put(&self, format: Option<PiFormat>, extent: Extent, data: &Sealed) -> Result<(), Error> {
        for request in copies(extent, data) {
            self.execute(format, request).await?;
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

/// True if a request changes the content of blocks.
fn is_change(request: &Request) -> bool {
    let kinds = [RequestKind::Write, RequestKind::WriteZeroes, RequestKind::WriteUncorrectable];
    kinds.contains(&request.kind())
}

/// True if an error means that a device is unreachable.
pub(crate) fn is_unreachable(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unreachable { .. })
}

/// Counts a request in flight down when dropped.
struct InFlightGuard<'a>(&'a Replica);

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.0.in_flight.set(self.0.in_flight.get() - 1);
    }
}

/// True if a device has a reserved area.
pub(crate) fn has_reserved_area(device: &DynDevice) -> bool {
    device.abilities().reserved == sealblock_block::Ability::Native
}

#[cold]
pub(crate) fn unexpected_response() -> Error {
    ErrorKind::Media { reason: "unexpected response of a replica".to_owned() }.into()
}
