//! A host of the device under test: it sends requests, reports them to the checker, and ends the run at the first
//! violation.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use sealblock_block::{
    Ability, BadBlock, BadBlockCause, Device, Durability, DynDevice, Error, ErrorKind, Expectations, Request,
    RequestKind, Response, WriteData,
};
use sealblock_integrity::Sealed;
use sealblock_units::{BlockCount, Extent, Lba};

use crate::checker::{Change, Checker, Content};
use crate::executor::Executor;
use crate::random::Random;

/// A request failed and its task must end, because of a finding or a planned fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stop;

/// The state that the hosts of one machine share.
pub struct RunContext {
    /// The checker; it outlives the machine.
    pub checker: Rc<RefCell<Checker>>,
    /// True if faults are planned, so that requests may fail.
    pub faults_planned: bool,
    /// True if reads of the disk are planned to fail, so that metadata may be unreadable.
    pub misreads: bool,
    /// True if a disk has injected bit rot: an unreadable block may be reported with another cause.
    pub decayed: Cell<bool>,
    /// The first violation.
    pub finding: RefCell<Option<String>>,
    /// Requests that succeeded.
    pub completed: Cell<u64>,
    /// Requests that failed with an error that a planned fault explains.
    pub failed: Cell<u64>,
    /// The machine; once it has stopped, no host receives replies.
    pub executor: Option<Executor>,
}

impl RunContext {
    /// A context for one machine.
    pub fn new(checker: Rc<RefCell<Checker>>, faults_planned: bool) -> RunContext {
        let (decayed, finding, completed, failed) = Default::default();
        RunContext { checker, faults_planned, misreads: false, decayed, finding, completed, failed, executor: None }
    }

    /// Called when a reply has arrived; never returns if the machine stopped at that moment.
    async fn heard<T>(&self, answer: T) -> T {
        match self.executor.as_ref().is_some_and(Executor::is_halted) {
            true => std::future::pending().await,
            false => answer,
        }
    }

    /// Keeps the first finding.
    pub fn find(&self, finding: String) -> Stop {
        self.finding.borrow_mut().get_or_insert(finding);
        Stop
    }
}

/// A change that was issued. Dropped before its end it may have taken effect or not, as after an error; it must not take effect later.
struct IssuedChange<'a> {
    context: &'a RunContext,
    change: Option<Change>,
}

impl IssuedChange<'_> {
    fn end(&mut self, done: bool) {
        if let Some(change) = self.change.take() {
            self.context.checker.borrow_mut().end_change(change, done);
        }
    }
}

impl Drop for IssuedChange<'_> {
    fn drop(&mut self) {
        self.end(false);
    }
}

/// A host. Clones are other hosts of the same device.
#[derive(Clone)]
pub struct Client {
    stack: DynDevice,
    context: Rc<RunContext>,
}

impl Client {
    /// A host of `stack`.
    pub fn new(stack: DynDevice, context: Rc<RunContext>) -> Client {
        Client { stack, context }
    }

    /// Blocks of the device.
    pub fn capacity_blocks(&self) -> u64 {
        self.stack.geometry().capacity_blocks
    }

    /// The device.
    pub fn stack(&self) -> &DynDevice {
        &self.stack
    }

    /// The state that the hosts share.
    pub fn context(&self) -> &RunContext {
        &self.context
    }

    /// Counts a failed request if a planned fault explains its error; otherwise the failure is a finding.
    fn failed(&self, what: &str, error: &Error) -> Stop {
        let explained = match error.kind() {
            ErrorKind::Media { .. }
            | ErrorKind::NoSpace { .. }
            | ErrorKind::ReadOnly
            | ErrorKind::Unreachable { .. } => true,
            // Explained: a block could not be read. Never explained: a block was read but is wrong, unless the metadata
            // needed to detect that could not be read.
            ErrorKind::Integrity(bad_blocks) => {
                self.context.misreads
                    || bad_blocks.as_slice().iter().all(|bad_block| bad_block.cause == BadBlockCause::Media)
            }
            _ => false,
        };
        if self.context.faults_planned && explained {
            self.context.failed.set(self.context.failed.get() + 1);
            return Stop;
        }
        self.context.find(format!("{what} failed: {error}"))
    }

    fn completed(&self) {
        self.context.completed.set(self.context.completed.get() + 1);
    }

    /// Writes one version to an extent, with tags made by the host or by the device; sometimes writes the existing
    /// version again.
    pub async fn write(&self, extent: Extent, force_unit_access: bool, random: &Random) -> Result<(), Stop> {
        let (change, data) = {
            let mut checker = self.context.checker.borrow_mut();
            let again = random.chance(4).then(|| checker.certain(extent.start())).flatten();
            let version = match again {
                Some(Content::Version(version)) => version,
                _ => checker.new_version(),
            };
            let data = checker.patterns().unsealed(extent, version);
            let data = if random.chance(50) { WriteData::from(data.seal()) } else { data.into() };
            (checker.begin_change(vec![extent], Content::Version(version), false, force_unit_access), data)
        };
        let durability = durability(force_unit_access);
        self.change(change, Request::write(extent, data, durability), &format!("write of {extent}")).await
    }

    /// Makes blocks read as zeroes.
    pub async fn zeroes(&self, extent: Extent, may_unmap: bool, force_unit_access: bool) -> Result<(), Stop> {
        let change =
            self.context.checker.borrow_mut().begin_change(vec![extent], Content::Zero, false, force_unit_access);
        let durability = durability(force_unit_access);
        let request = Request::write_zeroes(extent, may_unmap, durability);
        self.change(change, request, &format!("zeroing of {extent}")).await
    }

    /// Makes blocks unreadable; zeroes them if the device cannot do that.
    pub async fn spoil(&self, extent: Extent, force_unit_access: bool) -> Result<(), Stop> {
        if self.stack.abilities().of(RequestKind::WriteUncorrectable) == Ability::Absent {
            return self.zeroes(extent, true, force_unit_access).await;
        }
        let change =
            self.context.checker.borrow_mut().begin_change(vec![extent], Content::Unreadable, false, force_unit_access);
        let request = Request::write_uncorrectable(extent, durability(force_unit_access));
        self.change(change, request, &format!("spoiling of {extent}")).await
    }

    /// The blocks of an extent that may be unreadable because they were made so.
    fn unreadable(&self, extent: Extent) -> Vec<Lba> {
        let checker = self.context.checker.borrow();
        extent.iter().filter(|lba| checker.may_be_unreadable(*lba)).collect()
    }

    /// True if an error names only blocks that were possibly made unreadable when the request was issued, or later.
    fn is_made_unreadable(&self, error: &Error, before: &[Lba]) -> bool {
        let checker = self.context.checker.borrow();
        error.bad_blocks().is_some_and(|bad_blocks| {
            let explained = |bad_block: &BadBlock| {
                // A replica that was offline keeps its older copy, which reads do not return.
                (matches!(bad_block.cause, BadBlockCause::Media | BadBlockCause::Stale)
                    || self.context.decayed.get()
                    || checker.is_doubted(bad_block.lba))
                    && !(self.context.misreads && checker.is_doubted(bad_block.lba))
                    && (before.contains(&bad_block.lba) || checker.may_be_unreadable(bad_block.lba))
            };
            bad_blocks.as_slice().iter().all(explained)
        })
    }

    /// Deallocates blocks.
    pub async fn discard(&self, extents: Vec<Extent>) -> Result<(), Stop> {
        let change = self.context.checker.borrow_mut().begin_change(extents.clone(), Content::Zero, true, false);
        self.change(change, Request::discard(extents), "discard").await
    }

    async fn change(&self, change: Change, request: Request, what: &str) -> Result<(), Stop> {
        let mut issued = IssuedChange { context: &self.context, change: Some(change) };
        let outcome = self.context.heard(self.stack.execute(request).await).await;
        issued.end(outcome.is_ok());
        match outcome {
            Ok(Response::Done) => self.completed(),
            Ok(other) => return Err(self.context.find(format!("{what} was answered {other:?}"))),
            Err(error) => return Err(self.failed(what, &error)),
        }
        Ok(())
    }

    /// Makes completed changes durable.
    pub async fn flush(&self) -> Result<(), Stop> {
        let flush = self.context.checker.borrow_mut().begin_flush();
        let outcome = self.context.heard(self.stack.execute(Request::flush()).await).await;
        self.context.checker.borrow_mut().end_flush(flush, outcome.is_ok());
        outcome.map(|_| self.completed()).map_err(|error| self.failed("flush", &error))
    }

    /// Reads with every check, and compares with the permitted contents.
    pub async fn read(&self, extent: Extent) -> Result<(), Stop> {
        let unreadable = self.unreadable(extent);
        let read = self.context.checker.borrow_mut().begin_read(extent);
        let what = format!("read of {extent}");
        match self.stack.execute(Request::read(extent, Expectations::NONE)).await {
            Ok(Response::Data(found)) => {
                self.completed();
                let checked = self.context.checker.borrow_mut().end_read(read, &found);
                checked.map_err(|violation| self.context.find(format!("{what}: {violation}")))
            }
            Ok(other) => Err(self.context.find(format!("{what} was answered {other:?}"))),
            Err(error) if self.is_made_unreadable(&error, &unreadable) && extent.len() == 1 => {
                self.completed();
                let checked = self.context.checker.borrow_mut().end_failed_read(read);
                checked.map_err(|violation| self.context.find(format!("{what}: {violation}")))
            }
            // Reading single blocks shows which of the others are good.
            Err(error) if self.is_made_unreadable(&error, &unreadable) => {
                for lba in extent.iter() {
                    Box::pin(self.read(Extent::one(lba))).await?;
                }
                Ok(())
            }
            Err(error) => Err(self.failed(&what, &error)),
        }
    }

    /// Verifies blocks, which must be clean.
    pub async fn verify(&self, extent: Extent) -> Result<(), Stop> {
        let unreadable = self.unreadable(extent);
        let due: Vec<Lba> = {
            let checker = self.context.checker.borrow();
            extent.iter().filter(|lba| checker.certain(*lba) == Some(Content::Unreadable)).collect()
        };
        match self.stack.execute(Request::verify(extent, Expectations::NONE)).await {
            Ok(_) => {
                self.completed();
                let checker = self.context.checker.borrow();
                if let Some(missed) = due.iter().find(|lba| checker.certain(**lba) == Some(Content::Unreadable)) {
                    return Err(self.context.find(format!("verify of {extent} passed over unreadable block {missed}")));
                }
            }
            Err(error) if self.is_made_unreadable(&error, &unreadable) => {
                self.completed();
                for bad_block in error.bad_blocks().into_iter().flat_map(|bad_blocks| bad_blocks.as_slice()) {
                    self.read(Extent::one(bad_block.lba)).await?;
                }
            }
            Err(error) => return Err(self.failed(&format!("verify of {extent}"), &error)),
        }
        Ok(())
    }

    /// Repairs blocks of a device that has several copies: only blocks that were made unreadable may be damaged.
    pub async fn repair(&self, extent: Extent) -> Result<(), Stop> {
        let unreadable = self.unreadable(extent);
        match self.stack.execute(Request::repair(extent)).await {
            Ok(_) => self.completed(),
            Err(error) if self.is_made_unreadable(&error, &unreadable) => self.completed(),
            Err(error) => return Err(self.failed(&format!("repair of {extent}"), &error)),
        }
        Ok(())
    }

    /// Compares a block with its certain content, if there is one, and with a content that it cannot have.
    pub async fn compare(&self, lba: Lba) -> Result<(), Stop> {
        let extent = Extent::one(lba);
        let (certain, patterns) = {
            let checker = self.context.checker.borrow();
            (checker.certain(lba), checker.patterns())
        };
        let Some(Content::Version(version)) = certain else { return self.verify(extent).await };
        let outcome = self.compare_with(extent, patterns.sealed(extent, version)).await;
        // If another host may have written meanwhile, the result is not certain.
        if self.context.checker.borrow().certain(lba) != certain {
            return Ok(());
        }
        match outcome {
            Ok(()) => self.completed(),
            Err(error) => return Err(self.failed(&format!("compare of block {lba} with its content"), &error)),
        }
        match self.compare_with(extent, patterns.sealed(extent, u64::MAX)).await {
            Err(error) if *error.kind() == (ErrorKind::Miscompare { lba }) => Ok(()),
            Err(error) => Err(self.failed(&format!("compare of block {lba} with other content"), &error)),
            Ok(()) => Err(self.context.find(format!("compare of block {lba} with other content found no difference"))),
        }
    }

    async fn compare_with(&self, extent: Extent, data: Sealed) -> Result<(), Error> {
        self.stack.execute(Request::compare(extent, data)).await.map(|_| ())
    }

    /// Reads blocks after a crash; see [`Checker::audit`]. Returns the error if a read fails.
    pub async fn audit(&self, extent: Extent, is_durable: bool) -> Result<(), Stop> {
        let unreadable = self.unreadable(extent);
        match self.stack.execute(Request::read(extent, Expectations::NONE)).await {
            Ok(Response::Data(found)) => {
                let checked = self.context.checker.borrow_mut().audit(extent, &found, is_durable);
                checked.map_err(|violation| self.context.find(format!("after a crash, {violation}")))
            }
            Ok(other) => Err(self.context.find(format!("read of {extent} was answered {other:?}"))),
            Err(error) if self.is_made_unreadable(&error, &unreadable) && extent.len() == 1 => {
                let checked = self.context.checker.borrow_mut().audit_failed(extent.start(), is_durable);
                checked.map_err(|violation| self.context.find(format!("after a crash, {violation}")))
            }
            Err(error) if self.is_made_unreadable(&error, &unreadable) => {
                for lba in extent.iter() {
                    Box::pin(self.audit(Extent::one(lba), is_durable)).await?;
                }
                Ok(())
            }
            Err(error) => Err(self.failed(&format!("after a crash, read of {extent}"), &error)),
        }
    }

    /// Accepts the current content of blocks as right, if it is any written content.
    pub async fn learn(&self, extent: Extent) -> Result<(), Stop> {
        for lba in extent.iter() {
            let extent = Extent::one(lba);
            let content = match self.stack.execute(Request::read(extent, Expectations::NONE)).await {
                Ok(Response::Data(found)) => {
                    let contents = self.context.checker.borrow().patterns().contents(extent, &found);
                    contents.map_err(|violation| self.context.find(violation))?[0]
                }
                Ok(other) => return Err(self.context.find(format!("read of {extent} was answered {other:?}"))),
                Err(error) if error.bad_blocks().is_some() => Content::Unreadable,
                Err(error) => return Err(self.failed(&format!("read of {extent}"), &error)),
            };
            self.context.checker.borrow_mut().learn(lba, content);
        }
        Ok(())
    }

    /// Requires that reads fail for exactly two kinds of blocks: the one without a copy, and those that were made
    /// unreadable.
    pub async fn expect_loss(&self, extent: Extent, lost: Lba) -> Result<(), Stop> {
        match self.read_or_lose(extent, lost).await? || !extent.contains(lost) {
            true => Ok(()),
            false => Err(self.context.find(format!("lost block {lost} was read"))),
        }
    }

    /// Requires the right content of each block. Only the block that may have no copy may fail, and alone; returns
    /// whether it does.
    pub async fn read_or_lose(&self, extent: Extent, lost: Lba) -> Result<bool, Stop> {
        for one in extent.iter().filter(|lba| *lba != lost).map(Extent::one) {
            self.read(one).await?;
        }
        if !extent.contains(lost) {
            return Ok(false);
        }
        let one = Extent::one(lost);
        match self.stack.execute(Request::read(one, Expectations::NONE)).await {
            Err(error)
                if error.bad_blocks().is_some_and(|bad_blocks| bad_blocks.as_slice().iter().all(|f| f.lba == lost)) =>
            {
                Ok(true)
            }
            _ => self.read(one).await.map(|()| false),
        }
    }

    /// Requires that Read and Verify of `extent` find exactly `damaged`, by guard or as unreadable.
    pub async fn expect_damage(&self, extent: Extent, damaged: Lba) -> Result<(), Stop> {
        let due: Vec<Lba> = {
            let checker = self.context.checker.borrow();
            extent.iter().filter(|lba| *lba == damaged || checker.is_unreadable(*lba)).collect()
        };
        let operations = [Request::verify(extent, Expectations::NONE), Request::read(extent, Expectations::NONE)];
        for request in operations {
            let kind = request.kind();
            let found = match self.stack.execute(request).await {
                Ok(_) => Vec::new(),
                Err(error) => match error.bad_blocks() {
                    Some(bad_blocks) => bad_blocks.as_slice().iter().map(|bad_block| bad_block.lba).collect(),
                    None => return Err(self.context.find(format!("{} of {extent} failed: {error}", kind.name()))),
                },
            };
            if found != due {
                let report =
                    format!("{} of {extent} found damage in {found:?}; there is damage in {due:?}", kind.name());
                return Err(self.context.find(report));
            }
        }
        Ok(())
    }

    /// Reads blocks of a disk with bit rot: each must have a permitted content, or fail its check.
    pub async fn check_decayed(&self, extent: Extent) -> Result<(), Stop> {
        for lba in extent.iter() {
            let extent = Extent::one(lba);
            match self.stack.execute(Request::read(extent, Expectations::NONE)).await {
                Ok(Response::Data(found)) => {
                    let checked = self.context.checker.borrow_mut().audit(extent, &found, false);
                    checked.map_err(|violation| self.context.find(format!("on a decayed disk, {violation}")))?;
                }
                Ok(other) => return Err(self.context.find(format!("read of {extent} was answered {other:?}"))),
                Err(error) if error.bad_blocks().is_some() => {}
                Err(error) => return Err(self.context.find(format!("on a decayed disk, {error}"))),
            }
        }
        Ok(())
    }

    /// All blocks of the device, in pieces that one request can have; on a large device only the neighbourhood of
    /// writes.
    pub fn pieces(&self, random: &Random) -> Vec<Extent> {
        const SMALL_BLOCKS: u64 = 2048;
        let most = BlockCount::new(random.between(1, 64) as u32).unwrap_or(BlockCount::ONE);
        let capacity = self.capacity_blocks();
        if capacity <= SMALL_BLOCKS {
            return self.stack.geometry().whole(most).collect();
        }
        let mut pieces: Vec<Extent> = Vec::new();
        for lba in self.context.checker.borrow().touched() {
            if pieces.last().is_none_or(|last| !last.contains(lba)) {
                let blocks = u64::from(most.get()).min(capacity - lba.get());
                pieces.extend(Extent::from_raw(lba.get(), blocks).ok());
            }
        }
        pieces
    }
}

fn durability(force_unit_access: bool) -> Durability {
    if force_unit_access { Durability::ForceUnitAccess } else { Durability::Volatile }
}
