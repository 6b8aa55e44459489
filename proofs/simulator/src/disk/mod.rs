//! A disk that reorders and tears writes, loses unsynced ones, and fails on request.
//!
//! Every I/O takes a random time, so I/Os finish in any order. A longer write may reach the disk in two parts at random
//! moments; so overlapping writes mix sector by sector, and a read may see half of one. A write is durable once a sync
//! has finished that *started* after the write returned. The machine can be stopped at the n-th start or end of an I/O;
//! from then on nothing reaches the disk, and [`SimDisk::power_off`] chooses the state that the next machine finds.
//!
//! Each I/O is a separate task, because it continues when its future is dropped.

mod crash;
mod faults;
mod image;
#[cfg(test)]
mod tests;

pub use crash::Survival;
pub use faults::{FaultRule, IoKind};
pub use image::Image;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{Medium, MediumError, MediumErrorKind, NoteKeeping};
use sealblock_runtime_memory::{Buffer, Slice};

use crate::executor::Executor;
use crate::random::{Random, Trace};
use faults::{Faults, error};
use image::{InFlight, Payload, WriteMark};

/// The behaviour of a disk on one machine.
#[derive(Clone, Debug, Default)]
pub struct Behaviour {
    /// Stops the machine at this start or end of an I/O, counted from 1.
    pub crash_at: Option<u64>,
    /// The faults.
    pub faults: Vec<FaultRule>,
    /// The disk reports that it is read-only.
    pub read_only: bool,
    /// Any write is a finding, even if the disk does not report itself as read-only.
    pub forbid_writes: bool,
    /// The disk lies: this percentage of syncs does nothing but reports success. For tests of the simulator itself.
    pub lie_percent: u64,
    /// The disk keeps its length.
    pub keeps_length: bool,
    /// The percentage of I/Os that are slower by a factor of about a hundred.
    pub slow_percent: u64,
    /// Stops the machine after this many more starts and ends of I/Os on all disks that share the counter.
    pub fuse: Option<Rc<Cell<u64>>>,
}

impl Behaviour {
    /// Counts the disk's n-th start or end of an I/O; true if the machine stops there.
    fn stops_at(&self, boundary: u64) -> bool {
        let is_last = |fuse: &Rc<Cell<u64>>| {
            let left = fuse.get();
            fuse.set(left.saturating_sub(1));
            left == 1
        };
        let is_blown = self.fuse.as_ref().is_some_and(is_last);
        is_blown || self.crash_at == Some(boundary)
    }
}

/// The counters of one machine's disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct IoCounts {
    /// I/Os started.
    pub ios: u64,
    /// Starts and ends of I/Os: the points at which a machine can be made to stop.
    pub boundaries: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// The number of injected failures.
    pub faults: u64,
}

struct DiskState {
    image: RefCell<Option<Image>>,
    behaviour: Behaviour,
    faults: Faults,
    executor: Executor,
    random: Random,
    trace: Trace,
    in_flight: RefCell<Vec<InFlight>>,
    /// Changes in flight, by number.
    in_progress: RefCell<BTreeSet<u64>>,
    asked: Cell<u64>,
    counts: Cell<IoCounts>,
    off: Cell<bool>,
    finding: RefCell<Option<String>>,
    sector_bytes: u32,
    len_bytes: Cell<u64>,
}

/// A handle of a disk for one machine. Clones are the same handle.
#[derive(Clone)]
pub struct SimDisk(Rc<DiskState>);

impl SimDisk {
    /// Attaches `image` to the machine that `executor` runs.
    pub fn new(image: Image, behaviour: Behaviour, executor: &Executor, random: Random, trace: Trace) -> SimDisk {
        SimDisk(Rc::new(DiskState {
            sector_bytes: image.sector_bytes(),
            len_bytes: Cell::new(image.len_bytes()),
            image: RefCell::new(Some(image)),
            faults: Faults::new(behaviour.faults.clone()),
            behaviour,
            executor: executor.clone(),
            random,
            trace,
            in_flight: RefCell::default(),
            in_progress: RefCell::default(),
            asked: Cell::new(0),
            counts: Cell::default(),
            off: Cell::new(false),
            finding: RefCell::default(),
        }))
    }

    /// The counters so far.
    pub fn counts(&self) -> IoCounts {
        IoCounts { faults: self.0.faults.fired(), ..self.0.counts.get() }
    }

    /// A violation by the machine, such as a write through a read-only handle.
    pub fn finding(&self) -> Option<String> {
        self.0.finding.borrow().clone()
    }

    /// Detaches the disk from its machine and chooses what survives. Later I/Os of the machine never end.
    ///
    /// # Panics
    /// If the disk was already detached.
    pub fn power_off(&self, survival: Survival, random: &Random) -> Image {
        self.0.off.set(true);
        let mut image = self.0.image.borrow_mut().take().expect("a disk is taken away once");
        crash::survive(&mut image, &self.0.in_flight.borrow(), survival, random);
        image
    }

    fn with<R>(&self, use_image: impl FnOnce(&mut Image) -> R) -> R {
        let mut image = self.0.image.borrow_mut();
        use_image(image.as_mut().expect("no task runs once the disk is taken away"))
    }

    /// A start or an end of an I/O. Never returns once the machine is off.
    async fn boundary(&self) {
        self.is_last_boundary();
        self.wait_if_off().await;
    }

    /// Counts a start or an end of an I/O; true if the machine stops there.
    fn is_last_boundary(&self) -> bool {
        let mut counts = self.0.counts.get();
        counts.boundaries += 1;
        self.0.counts.set(counts);
        let is_last = self.0.behaviour.stops_at(counts.boundaries);
        if is_last {
            self.0.off.set(true);
            self.0.executor.halt();
        }
        is_last
    }

    async fn wait_if_off(&self) {
        if self.0.off.get() {
            std::future::pending::<()>().await;
        }
    }

    /// Waits for a part of the duration of an I/O.
    async fn pass(&self) {
        let slow = self.0.random.chance(self.0.behaviour.slow_percent);
        let delay_us = if slow { self.0.random.between(500, 20_000) } else { self.0.random.between(5, 200) };
        self.0.executor.delay(Duration::from_micros(delay_us)).await;
        self.wait_if_off().await;
    }

    /// Refuses requests that every medium refuses.
    fn check(&self, kind: IoKind, offset_bytes: u64, length_bytes: u64) -> Result<(u64, u64), MediumError> {
        let sector = u64::from(self.0.sector_bytes);
        if !offset_bytes.is_multiple_of(sector) || !length_bytes.is_multiple_of(sector) {
            self.find(format!("{} of {length_bytes} bytes at byte {offset_bytes} is not aligned", kind.name()));
            return Err(error(MediumErrorKind::Failed, kind, offset_bytes, "not aligned to sectors"));
        }
        match offset_bytes.checked_add(length_bytes) {
            Some(end) if end <= self.0.len_bytes.get() => Ok((offset_bytes / sector, end / sector)),
            _ => Err(error(MediumErrorKind::PastEnd, kind, offset_bytes, "past the end")),
        }
    }

    fn find(&self, finding: String) {
        self.0.finding.borrow_mut().get_or_insert(finding);
    }

    fn start(&self, kind: IoKind, first: u64, second: u64) {
        let mut counts = self.0.counts.get();
        counts.ios += 1;
        self.0.counts.set(counts);
        self.0.trace.note(kind as u8, first, second);
    }

    async fn change(self, kind: IoKind, offset: u64, length: u64, payload: Payload) -> Result<(), MediumError> {
        self.wait_if_off().await;
        let (first, end) = self.check(kind, offset, length)?;
        if self.0.behaviour.forbid_writes {
            self.find(format!("{} of {length} bytes at byte {offset} by a reader", kind.name()));
        }
        if self.0.behaviour.read_only {
            return Err(error(MediumErrorKind::ReadOnly, kind, offset, "the disk takes no writes"));
        }
        let fault = self.0.faults.next(kind);
        if let Some(fault) = fault.filter(|fault| fault.how == MediumErrorKind::NoSpace) {
            self.boundary().await;
            self.pass().await;
            return Err(error(fault.how, kind, offset, "made to fail"));
        }
        let mark = self.begin(first, end, payload);
        self.boundary().await;
        self.pass().await;
        if end - first > 1 && self.0.random.chance(40) {
            self.take_part(&mark, 50);
            self.pass().await;
        }
        self.boundary().await;
        let write = self.finish(&mark, if fault.is_some() { 50 } else { 100 });
        let mut counts = self.0.counts.get();
        counts.written_bytes += if matches!(write.payload, Payload::Bytes(_)) { length } else { 0 };
        self.0.counts.set(counts);
        match fault {
            Some(fault) => Err(error(fault.how, kind, offset, "made to fail")),
            None => {
                let returned = self.with(Image::next_return);
                mark.set_returned(returned);
                Ok(())
            }
        }
    }

    fn begin(&self, first: u64, end: u64, payload: Payload) -> WriteMark {
        let mark = self.with(Image::next_write);
        let sector_bytes = self.0.sector_bytes as usize;
        let write = InFlight { mark: mark.clone(), first, end, sector_bytes, payload, taken: Vec::new() };
        self.0.in_flight.borrow_mut().push(write);
        mark
    }

    /// Lets the disk accept about `percent` of what is left of a write.
    fn take_part(&self, mark: &WriteMark, percent: u64) {
        let mut in_flight = self.0.in_flight.borrow_mut();
        let Some(write) = in_flight.iter_mut().find(|write| write.mark.number() == mark.number()) else { return };
        self.with(|image| {
            for sector in write.left(image) {
                if self.0.random.chance(percent) {
                    image.take(sector, write.content(sector), mark);
                    write.taken.push(sector);
                }
            }
        });
    }

    /// Lets the disk accept what is left of a write, or a part of that if the write fails.
    fn finish(&self, mark: &WriteMark, percent: u64) -> InFlight {
        self.take_part(mark, percent);
        let mut in_flight = self.0.in_flight.borrow_mut();
        let at = in_flight.iter().position(|write| write.mark.number() == mark.number());
        in_flight.swap_remove(at.expect("a write in flight stays listed until here"))
    }

    async fn read_all(&self, offset: u64, into: &mut [u8]) -> Result<(), MediumError> {
        let (first, end) = self.check(IoKind::Read, offset, into.len() as u64)?;
        self.start(IoKind::Read, offset, into.len() as u64);
        let fault = self.0.faults.next(IoKind::Read);
        self.boundary().await;
        self.pass().await;
        let sectors = || (first..end).zip(0usize..);
        let sector_bytes = self.0.sector_bytes as usize;
        let mut early = Vec::new();
        if end - first > 1 && self.0.random.chance(20) {
            early = sectors().map(|_| self.0.random.chance(50)).collect();
            self.copy(sectors().filter(|(_, i)| early[*i]), into, sector_bytes);
            self.pass().await;
        }
        self.boundary().await;
        self.copy(sectors().filter(|(_, i)| !early.get(*i).copied().unwrap_or(false)), into, sector_bytes);
        fault.map_or(Ok(()), |fault| Err(error(fault.how, IoKind::Read, offset, "made to fail")))
    }

    fn copy(&self, sectors: impl Iterator<Item = (u64, usize)>, into: &mut [u8], sector_bytes: usize) {
        self.with(|image| {
            for (sector, i) in sectors {
                image.read_sector(sector, &mut into[i * sector_bytes..(i + 1) * sector_bytes]);
            }
        });
    }

    /// Makes durable the writes that had returned when the disk had counted `mark` returns.
    async fn sync_all(self, mark: u64) -> Result<(), MediumError> {
        let fault = self.0.faults.next(IoKind::Sync);
        self.boundary().await;
        self.pass().await;
        self.boundary().await;
        if let Some(fault) = fault {
            if fault.forgets {
                self.with(|image| image.lose_track(mark));
            }
            return Err(error(fault.how, IoKind::Sync, 0, "made to fail"));
        }
        let lie = self.0.behaviour.lie_percent;
        if lie == 0 || !self.0.random.chance(lie) {
            self.with(|image| image.sync(mark));
        }
        Ok(())
    }

    /// Runs a change as a separate task, for which [`Medium::drain`] waits.
    async fn spawn_change(&self, kind: IoKind, offset: u64, length: u64, payload: Payload) -> Result<(), MediumError> {
        let number = self.0.asked.get();
        self.0.asked.set(number + 1);
        self.0.in_progress.borrow_mut().insert(number);
        let (disk, change) = (self.clone(), self.clone().change(kind, offset, length, payload));
        let counted = async move {
            let result = change.await;
            disk.0.in_progress.borrow_mut().remove(&number);
            result
        };
        self.spawn_io(kind, (offset, length), counted).await
    }

    /// Runs an I/O as a separate task.
    async fn spawn_io(
        &self,
        kind: IoKind,
        where_and_what: (u64, u64),
        io: impl Future<Output = Result<(), MediumError>> + 'static,
    ) -> Result<(), MediumError> {
        self.start(kind, where_and_what.0, where_and_what.1);
        self.0.executor.spawn(kind.name(), io).await
    }
}

impl Medium for SimDisk {
    fn len_bytes(&self) -> u64 {
        self.0.len_bytes.get()
    }

    fn sector_bytes(&self) -> u32 {
        self.0.sector_bytes
    }

    fn is_read_only(&self) -> bool {
        self.0.behaviour.read_only
    }

    fn can_punch(&self) -> bool {
        true
    }

    async fn read(&self, offset_bytes: u64, mut into: Buffer) -> (Result<(), MediumError>, Buffer) {
        let done = self.read_all(offset_bytes, &mut into).await;
        (done, into)
    }

    async fn write(&self, offset_bytes: u64, from: Slice) -> Result<(), MediumError> {
        let length = from.len() as u64;
        self.spawn_change(IoKind::Write, offset_bytes, length, Payload::Bytes(from)).await
    }

    fn note_keeping(&self) -> NoteKeeping {
        let boot = self.0.image.borrow().as_ref().map_or(0, Image::boot);
        NoteKeeping::UntilReboot(u128::from(boot).to_le_bytes())
    }

    /// The note is visible at once and becomes durable at any time or never, as in the page cache. If the machine stops
    /// first, the caller gets no reply.
    fn note(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediumError> {
        const KIND: IoKind = IoKind::Write;
        if self.0.off.get() {
            return Ok(());
        }
        let (first, end) = self.check(KIND, offset_bytes, bytes.len() as u64)?;
        if self.0.behaviour.forbid_writes {
            self.find(format!("a note of {} bytes at byte {offset_bytes} by a reader", bytes.len()));
        }
        if self.0.behaviour.read_only {
            return Err(error(MediumErrorKind::ReadOnly, KIND, offset_bytes, "the disk takes no writes"));
        }
        self.start(KIND, offset_bytes, bytes.len() as u64);
        if self.is_last_boundary() {
            return Ok(());
        }
        if let Some(fault) = self.0.faults.next(KIND) {
            return Err(error(fault.how, KIND, offset_bytes, "made to fail"));
        }
        let mark = self.begin(first, end, Payload::Bytes(Slice::copy_from(bytes)));
        self.finish(&mark, 100);
        if self.0.random.chance(50) {
            mark.set_returned(self.with(Image::next_return));
        }
        Ok(())
    }

    /// Returns after the write has started, and sometimes only after it has ended.
    async fn submitted(&self) {
        self.pass().await;
    }

    async fn sync(&self) -> Result<(), MediumError> {
        self.wait_if_off().await;
        let mark = self.with(|image| image.returns());
        self.spawn_io(IoKind::Sync, (0, 0), self.clone().sync_all(mark)).await
    }

    async fn drain(&self) {
        const LOOK_AGAIN: Duration = Duration::from_micros(5);
        let until = self.0.asked.get();
        while self.0.in_progress.borrow().first().is_some_and(|first| *first < until) {
            self.0.executor.delay(LOOK_AGAIN).await;
        }
    }

    async fn punch(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.spawn_change(IoKind::Punch, offset_bytes, length_bytes, Payload::Zeroes).await
    }

    async fn zero(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.spawn_change(IoKind::Zero, offset_bytes, length_bytes, Payload::Zeroes).await
    }

    async fn set_len(&self, length_bytes: u64) -> Result<(), MediumError> {
        self.wait_if_off().await;
        if self.0.behaviour.forbid_writes {
            self.find(format!("a change of length to {length_bytes} bytes by a reader"));
        }
        if self.0.behaviour.keeps_length {
            let is_there = length_bytes <= self.len_bytes();
            let too_long = || error(MediumErrorKind::NoSpace, IoKind::Length, length_bytes, "it keeps its length");
            return if is_there { Ok(()) } else { Err(too_long()) };
        }
        self.start(IoKind::Length, length_bytes, 0);
        self.boundary().await;
        self.pass().await;
        self.with(|image| image.set_len(length_bytes));
        self.0.len_bytes.set(length_bytes);
        self.boundary().await;
        Ok(())
    }
}
