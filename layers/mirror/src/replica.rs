//! A leg: one of the devices that a mirror is made of, as far as it is there.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use futures_util::future::LocalBoxFuture;
use sealblock_block::{
    BadBlock, BlockState, Coverage, Device, Durability, DynDevice, Error, ErrorKind, MemberPath as LegPath, Outcome,
    Request, RequestKind, Response, StatusRun, StatusRuns, Unchecked,
};
use sealblock_integrity::{Checks, PiFormat, Sealed};
use sealblock_units::{BlockCount, Extent};

use crate::label::{ReplicaRecord, ReplicaState};
use crate::paging::ReplicaPages;
use crate::regions::Regions;
use crate::stale::Stale;

/// Opens a leg's device anew, after it was lost.
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

/// A leg. Its place among the members of the mirror is its place in the mirror's list.
pub(crate) struct Replica {
    name: RefCell<Rc<str>>,
    /// Its number among the legs as they were given.
    pub number: Cell<usize>,
    pub id: [u8; 16],
    pub standing: Cell<ReplicaState>,
    /// It is away since the opening, as others are, and has its name by the order of the names: it may be one of those.
    pub is_guessed: Cell<bool>,
    /// A device is in its place that has no label of the mirror's.
    pub is_unlabelled: Cell<bool>,
    /// The generation of the last label that is known to be on it.
    pub acked_events: Cell<u64>,
    /// The generation of the last label that was sent to it.
    pub sent_events: Cell<u64>,
    /// The regions it lacks, as the labels say.
    pub out_of_sync: RefCell<Regions>,
    /// It was never in sync since it was made a leg.
    pub is_new: Cell<bool>,
    /// It is gone, or not up to date yet, and labels call it current: nothing was changed since it had everything.
    pub is_unmissed: Cell<bool>,
    /// Blocks of which it holds only an older copy.
    pub stale: RefCell<Stale>,
    /// What is in the bitmap pages of its device.
    pub pages: RefCell<ReplicaPages>,
    /// The regions that are still to be brought to it.
    pub to_resync: RefCell<Regions>,
    device: RefCell<Option<DynDevice>>,
    /// Counts the devices that were put here and taken away.
    attach_count: Cell<u64>,
    /// The device that is here cannot be reached.
    is_lost: Cell<bool>,
    /// Requests under way.
    busy: Cell<u32>,
    /// Its label was written since it began to be brought up to date.
    pub is_told: Cell<bool>,
    /// It has room for a label, now and ever.
    pub has_room: bool,
    pub healed: Cell<u64>,
    pub failures: Cell<u64>,
    pub copied_bytes: Cell<u64>,
    pub why: RefCell<String>,
    pub reopen: RefCell<Option<Reopen>>,
}

impl Replica {
    pub fn new(source: ReplicaSource, number: usize, member: &ReplicaRecord) -> Replica {
        let (device, why) = match source.device {
            Ok(device) => (Some(device), String::new()),
            Err(why) => (None, why),
        };
        let leg = Replica {
            name: RefCell::new(source.name.into()),
            number: Cell::new(number),
            id: member.id,
            standing: Cell::new(member.standing),
            to_resync: RefCell::new(member.out_of_sync.clone()),
            out_of_sync: RefCell::new(member.out_of_sync.clone()),
            is_guessed: Cell::new(false),
            is_unlabelled: Cell::new(false),
            is_new: Cell::new(member.is_new),
            is_unmissed: Cell::new(false),
            stale: RefCell::new(Stale::new(&member.stale)),
            acked_events: Cell::new(member.acked_events),
            sent_events: Cell::new(member.sent_events),
            pages: RefCell::default(),
            device: RefCell::default(),
            attach_count: Cell::new(0),
            is_lost: Cell::new(false),
            busy: Cell::new(0),
            is_told: Cell::new(false),
            has_room: member.has_room,
            healed: Cell::new(0),
            failures: Cell::new(0),
            copied_bytes: Cell::new(0),
            why: RefCell::new(why),
            reopen: RefCell::new(source.reopen),
        };
        leg.set_device(device);
        leg
    }

    /// What people call it.
    pub fn name(&self) -> Rc<str> {
        self.name.borrow().clone()
    }

    /// Calls it something else.
    pub fn call(&self, name: String) {
        *self.name.borrow_mut() = name.into();
    }

    /// Trades what another leg is called, and how it is opened, for that of this one. Both are away.
    pub fn trade_names(&self, other: &Replica) {
        self.name.swap(&other.name);
        self.number.swap(&other.number);
        self.reopen.swap(&other.reopen);
        self.why.swap(&other.why);
        self.is_unlabelled.swap(&other.is_unlabelled);
        self.healed.swap(&other.healed);
        self.failures.swap(&other.failures);
        self.copied_bytes.swap(&other.copied_bytes);
    }

    /// What labels say of it now.
    pub fn member(&self) -> ReplicaRecord {
        let is_unmissed = self.is_unmissed.get();
        let missed = self.out_of_sync.borrow();
        ReplicaRecord {
            id: self.id,
            standing: if is_unmissed { ReplicaState::InSync } else { self.standing.get() },
            has_room: self.has_room,
            is_new: self.is_new.get(),
            out_of_sync: if is_unmissed { Regions::none(missed.most()) } else { missed.clone() },
            stale: self.stale.borrow().listed(),
            acked_events: self.acked_events.get(),
            sent_events: self.sent_events.get(),
        }
    }

    pub fn set_device(&self, device: Option<DynDevice>) {
        *self.device.borrow_mut() = device;
        self.attach_count.set(self.attach_count.get() + 1);
        self.is_lost.set(false);
        self.pages.take();
    }

    /// Whether the device that is here has answered that it cannot be reached.
    pub fn is_lost(&self) -> bool {
        self.is_lost.get()
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
    pub fn has_annex(&self) -> bool {
        self.device.borrow().as_ref().is_some_and(has_annex)
    }

    /// Whether a device is there.
    pub fn is_here(&self) -> bool {
        self.device.borrow().is_some()
    }

    /// Whether reads may be asked of it.
    pub fn is_current(&self) -> bool {
        self.standing.get() == ReplicaState::InSync && self.is_here()
    }

    /// Whether it is in use: labels go to it.
    pub fn takes_labels(&self) -> bool {
        matches!(self.standing.get(), ReplicaState::InSync | ReplicaState::Resyncing) && self.is_here()
    }

    /// Whether changes go to it. Not before its own label says that it lacks others: opened alone it would be taken for
    /// one that has everything.
    pub fn takes_changes(&self) -> bool {
        self.takes_labels() && !self.is_untold()
    }

    /// Whether it is brought up to date and its own label does not say so yet.
    pub fn is_untold(&self) -> bool {
        self.standing.get() == ReplicaState::Resyncing && self.has_room && !self.is_told.get()
    }

    /// Requests under way.
    pub fn busy(&self) -> u32 {
        self.busy.get()
    }

    /// The path of faults on it.
    fn path(&self, within: LegPath) -> LegPath {
        within.within(self.number.get())
    }

    /// The same fault as one of this leg.
    pub fn fault(&self, fault: &BadBlock) -> BadBlock {
        BadBlock { member: self.path(fault.member), ..*fault }
    }

    /// How far its check of blocks went, told as this leg's.
    pub fn coverage(&self, coverage: Coverage) -> Coverage {
        coverage.map(|run| self.unchecked(run))
    }

    /// The same run as one of this leg.
    pub fn unchecked(&self, run: Unchecked) -> Unchecked {
        Unchecked { leg: self.path(run.leg), ..run }
    }

    /// Asks the device, which has protection information of format `format`, as all legs have. Blocks of
    /// which it holds only an older copy are faults until they are written.
    pub async fn ask(&self, format: Option<PiFormat>, operation: Request) -> Outcome {
        if self.stale.borrow().is_empty() {
            return self.ask_as_it_is(format, operation).await;
        }
        match operation {
            Request::Read { extent, .. }
            | Request::Verify { extent, .. }
            | Request::Checksum { extent, .. }
            | Request::Compare { extent, .. } => {
                let withheld = self.stale.borrow().within(extent);
                match withheld.is_empty() {
                    true => self.ask_as_it_is(format, operation).await,
                    false => self.ask_around(format, operation, extent, &withheld).await,
                }
            }
            _ => {
                let extent = operation.extent();
                let outcome = self.ask_as_it_is(format, operation).await;
                if let (Ok(_), Some(extent)) = (&outcome, extent) {
                    self.stale.borrow_mut().renew(extent);
                }
                outcome
            }
        }
    }

    /// The same for whatever it holds, older copies included.
    pub(crate) async fn ask_as_it_is(&self, format: Option<PiFormat>, operation: Request) -> Outcome {
        let Some(device) = self.device() else { return Err(self.gone()) };
        if self.is_untold() && is_change(&operation) {
            // Whoever asks has chosen it before it went and came back.
            return Err(self.lost_meanwhile());
        }
        self.busy.set(self.busy.get() + 1);
        let _busy = Busy(self);
        let epoch = self.attach_count.get();
        debug_assert_eq!(device.geometry().protection, format);
        let outcome = device.execute(operation).await;
        // What a device did that is gone since may be gone with it, and what it says tells nothing about the one that is back.
        if self.attach_count.get() != epoch {
            return Err(self.lost_meanwhile());
        }
        outcome.inspect_err(|error| self.is_lost.set(self.is_lost.get() || is_away(error)))
    }

    /// The data of blocks.
    pub async fn read(&self, format: Option<PiFormat>, extent: Extent, checks: Checks) -> Result<Sealed, Error> {
        match self.ask(format, Request::Read { extent, checks }).await? {
            Response::Data(data) => Ok(data),
            _ => Err(answered_wrongly()),
        }
    }

    /// The digest of blocks, and the bytes that came here for it.
    pub async fn digest(
        &self,
        format: Option<PiFormat>,
        extent: Extent,
        checks: Checks,
    ) -> Result<sealblock_block::Checksum, Error> {
        match self.ask(format, Request::Checksum { extent, checks }).await? {
            Response::Checksum(digested) => Ok(digested),
            _ => Err(answered_wrongly()),
        }
    }

    /// Puts blocks on it as another leg has them.
    pub async fn put(&self, format: Option<PiFormat>, extent: Extent, data: &Sealed) -> Result<(), Error> {
        for operation in copies(extent, data) {
            self.ask(format, operation).await?;
        }
        Ok(())
    }

    #[cold]
    fn lost_meanwhile(&self) -> Error {
        ErrorKind::Unreachable { reason: format!("leg {} was lost while it was asked", self.name()) }.into()
    }

    fn gone(&self) -> Error {
        ErrorKind::Unreachable { reason: format!("leg {} is not there: {}", self.name(), self.why.borrow()) }.into()
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
        let operation = match run.state {
            BlockState::Hole => Request::WriteZeroes { extent, may_unmap: true, durability },
            BlockState::Data => Request::Write { extent, data: data.slice(first, blocks), durability },
        };
        first += blocks;
        operation
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
fn is_change(operation: &Request) -> bool {
    let kinds = [RequestKind::Write, RequestKind::WriteZeroes, RequestKind::WriteUncorrectable];
    kinds.contains(&operation.kind())
}

/// Whether an error says that a device cannot be reached.
pub(crate) fn is_away(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unreachable { .. })
}

/// Counts a request down, however it ends.
struct Busy<'a>(&'a Replica);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.busy.set(self.0.busy.get() - 1);
    }
}

/// Whether a device has room beside its blocks.
pub(crate) fn has_annex(device: &DynDevice) -> bool {
    device.abilities().reserved == sealblock_block::Ability::Native
}

#[cold]
pub(crate) fn answered_wrongly() -> Error {
    ErrorKind::Media { reason: "a leg answered with something else than it was asked for".to_owned() }.into()
}
