//! A replica: one of the devices that a mirror is made of, as far as it is there.

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

/// Opens a replica's device anew, after it was lost.
pub type Reopen = Box<dyn Fn() -> LocalBoxFuture<'static, Result<DynDevice, String>>>;

/// What a mirror is to be made of.
pub struct ReplicaSource {
    /// What people call it.
    pub name: String,
    /// The device, behind its gate; why not, where it cannot be opened.
    pub device: Result<DynDevice, String>,
    /// How to open it anew.
    pub reopen: Option<Reopen>,
}

/// A replica. Its place among the members of the mirror is its place in the mirror's list.
pub(crate) struct Replica {
    name: RefCell<Rc<str>>,
    /// Its number among the replicas as they were given.
    pub number: Cell<usize>,
    pub id: [u8; 16],
    pub state: Cell<ReplicaState>,
    /// It is away since the opening, as others are, and has its name by the order of the names: it may be one of those.
    pub is_name_assumed: Cell<bool>,
    /// A device is in its place that has no label of the mirror's.
    pub is_unlabelled: Cell<bool>,
    /// The generation of the last label that is known to be on it.
    pub acked_events: Cell<u64>,
    /// The generation of the last label that was sent to it.
    pub sent_events: Cell<u64>,
    /// The regions it lacks, as the labels say.
    pub out_of_sync: RefCell<Regions>,
    /// It was never in sync since it was made a replica.
    pub is_new: Cell<bool>,
    /// It is gone, or not up to date yet, and labels call it current: nothing was changed since it had everything.
    pub is_listed_in_sync: Cell<bool>,
    /// Blocks of which it holds only an older copy.
    pub stale: RefCell<StaleBlocks>,
    /// What is in the bitmap pages of its device.
    pub pages: RefCell<ReplicaPages>,
    /// The regions that are still to be brought to it.
    pub to_resync: RefCell<Regions>,
    device: RefCell<Option<DynDevice>>,
    /// Counts the devices that were put here and taken away.
    attach_count: Cell<u64>,
    /// The device that is here cannot be reached.
    is_unreachable: Cell<bool>,
    /// Requests under way.
    in_flight: Cell<u32>,
    /// Its label was written since it began to be brought up to date.
    pub has_own_label: Cell<bool>,
    /// It has room for a label, now and ever.
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

    /// What people call it.
    pub fn name(&self) -> Rc<str> {
        self.name.borrow().clone()
    }

    /// Calls it something else.
    pub fn set_name(&self, name: String) {
        *self.name.borrow_mut() = name.into();
    }

    /// Trades what another replica is called, and how it is opened, for that of this one. Both are away.
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

    /// What labels say of it now.
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

    /// Whether the device that is here has answered that it cannot be reached.
    pub fn is_unreachable(&self) -> bool {
        self.is_unreachable.get()
    }

    /// The device that is there.
    pub fn device(&self) -> Option<DynDevice> {
        self.device.borrow().clone()
    }

    /// Which of its devices is there: another number after it was lost or came back.
    pub fn attach_count(&self) -> u64 {
        self.attach_count.get()
    }

    /// Whether it has room beside its blocks.
    pub fn has_reserved_area(&self) -> bool {
        self.device.borrow().as_ref().is_some_and(has_reserved_area)
    }

    /// Whether a device is there.
    pub fn is_online(&self) -> bool {
        self.device.borrow().is_some()
    }

    /// Whether reads may be asked of it.
    pub fn is_readable(&self) -> bool {
        self.state.get() == ReplicaState::InSync && self.is_online()
    }

    /// Whether it is in use: labels go to it.
    pub fn takes_labels(&self) -> bool {
        matches!(self.state.get(), ReplicaState::InSync | ReplicaState::Resyncing) && self.is_online()
    }

    /// Whether changes go to it. Not before its own label says that it lacks others: opened alone it would be taken for
    /// one that has everything.
    pub fn is_writable(&self) -> bool {
        self.takes_labels() && !self.lacks_own_label()
    }

    /// Whether it is brought up to date and its own label does not say so yet.
    pub fn lacks_own_label(&self) -> bool {
        self.state.get() == ReplicaState::Resyncing && self.has_room && !self.has_own_label.get()
    }

    /// Requests under way.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.get()
    }

    /// The path of faults on it.
    fn path(&self, within: MemberPath) -> MemberPath {
        within.within(self.number.get())
    }

    /// The same fault as one of this replica.
    pub fn bad_block(&self, bad: &BadBlock) -> BadBlock {
        BadBlock { member: self.path(bad.member), ..*bad }
    }

    /// How far its check of blocks went, told as this replica's.
    pub fn coverage(&self, coverage: Coverage) -> Coverage {
        coverage.map(|run| self.unchecked(run))
    }

    /// The same run as one of this replica.
    pub fn unchecked(&self, run: Unchecked) -> Unchecked {
        Unchecked { leg: self.path(run.leg), ..run }
    }

    /// Asks the device, which has protection information of format `format`, as all replicas have. Blocks of
    /// which it holds only an older copy are faults until they are written.
    pub async fn execute(&self, format: Option<PiFormat>, request: Request) -> Outcome {
        if self.stale.borrow().is_empty() {
            return self.execute_raw(format, request).await;
        }
        match request {
            Request::Read { extent, .. }
            | Request::Verify { extent, .. }
            | Request::Checksum { extent, .. }
            | Request::Compare { extent, .. } => {
                let withheld = self.stale.borrow().within(extent);
                match withheld.is_empty() {
                    true => self.execute_raw(format, request).await,
                    false => self.execute_around_stale(format, request, extent, &withheld).await,
                }
            }
            _ => {
                let extent = request.extent();
                let outcome = self.execute_raw(format, request).await;
                if let (Ok(_), Some(extent)) = (&outcome, extent) {
                    self.stale.borrow_mut().mark_rewritten(extent);
                }
                outcome
            }
        }
    }

    /// The same for whatever it holds, older copies included.
    pub(crate) async fn execute_raw(&self, format: Option<PiFormat>, request: Request) -> Outcome {
        let Some(device) = self.device() else { return Err(self.offline()) };
        if self.lacks_own_label() && is_change(&request) {
            // Whoever asks has chosen it before it went and came back.
            return Err(self.lost_in_flight());
        }
        self.in_flight.set(self.in_flight.get() + 1);
        let _busy = InFlightGuard(self);
        let attach_count = self.attach_count.get();
        debug_assert_eq!(device.geometry().protection, format);
        let outcome = device.execute(request).await;
        // What a device did that is gone since may be gone with it, and what it says tells nothing about the one that is back.
        if self.attach_count.get() != attach_count {
            return Err(self.lost_in_flight());
        }
        outcome.inspect_err(|error| self.is_unreachable.set(self.is_unreachable.get() || is_unreachable(error)))
    }

    /// The data of blocks.
    pub async fn read(&self, format: Option<PiFormat>, extent: Extent, checks: Checks) -> Result<Sealed, Error> {
        match self.execute(format, Request::Read { extent, checks }).await? {
            Response::Data(data) => Ok(data),
            _ => Err(unexpected_response()),
        }
    }

    /// The digest of blocks, and the bytes that came here for it.
    pub async fn checksum(
        &self,
        format: Option<PiFormat>,
        extent: Extent,
        checks: Checks,
    ) -> Result<sealblock_block::Checksum, Error> {
        match self.execute(format, Request::Checksum { extent, checks }).await? {
            Response::Checksum(checksum) => Ok(checksum),
            _ => Err(unexpected_response()),
        }
    }

    /// Puts blocks on it as another replica has them.
    pub async fn put(&self, format: Option<PiFormat>, extent: Extent, data: &Sealed) -> Result<(), Error> {
        for request in copies(extent, data) {
            self.execute(format, request).await?;
        }
        Ok(())
    }

    #[cold]
    fn lost_in_flight(&self) -> Error {
        ErrorKind::Unreachable { reason: format!("replica {} was lost while it was asked", self.name()) }.into()
    }

    fn offline(&self) -> Error {
        ErrorKind::Unreachable { reason: format!("replica {} is not there: {}", self.name(), self.last_error.borrow()) }
            .into()
    }
}

/// What makes the blocks of an extent those that were read, holes included.
pub(crate) fn copies(extent: Extent, data: &Sealed) -> Vec<Request> {
    let (durability, mut first) = (Durability::Volatile, 0);
    let copy = |run: StatusRun| {
        let blocks = run.blocks.get() as usize;
        let extent = Extent::from_raw(extent.start().get() + first as u64, blocks as u64)
            .expect("a run of an extent's blocks is an extent");
        // A copy of the tags of a block that was never written would switch off all checks of the copy.
        let request = match run.state {
            BlockState::Hole => Request::WriteZeroes { extent, may_unmap: true, durability },
            BlockState::Data => Request::Write { extent, data: data.slice(first, blocks), durability },
        };
        first += blocks;
        request
    };
    runs(data).into_iter().map(copy).collect()
}

/// Which of these blocks are holes: they were never written, as their tags say.
fn runs(data: &Sealed) -> Vec<StatusRun> {
    let tuple = data.tags().len() / data.blocks().max(1);
    let is_hole = |block: usize| {
        let tags = &data.tags()[block * tuple..][..tuple];
        !tags.is_empty() && tags.iter().all(|byte| *byte == 0xFF) && {
            data.slice(block, 1).data().iter().all(|byte| *byte == 0)
        }
    };
    let mut runs = StatusRuns::default();
    for block in 0..data.blocks() {
        runs.push(BlockCount::ONE, if is_hole(block) { BlockState::Hole } else { BlockState::Data });
    }
    runs.into_vec()
}

/// Whether a request changes what blocks hold.
fn is_change(request: &Request) -> bool {
    let kinds = [RequestKind::Write, RequestKind::WriteZeroes, RequestKind::WriteUncorrectable];
    kinds.contains(&request.kind())
}

/// Whether an error says that a device cannot be reached.
pub(crate) fn is_unreachable(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unreachable { .. })
}

/// Counts a request down, however it ends.
struct InFlightGuard<'a>(&'a Replica);

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.0.in_flight.set(self.0.in_flight.get() - 1);
    }
}

/// Whether a device has room beside its blocks.
pub(crate) fn has_reserved_area(device: &DynDevice) -> bool {
    device.abilities().reserved == sealblock_block::Ability::Native
}

#[cold]
pub(crate) fn unexpected_response() -> Error {
    ErrorKind::Media { reason: "a replica answered with something else than it was asked for".to_owned() }.into()
}
