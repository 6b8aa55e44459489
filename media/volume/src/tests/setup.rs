//! A medium in memory, a clock that only tests advance, and a volume on them.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use futures_executor::LocalPool;
use futures_util::task::LocalSpawnExt;
use sealblock_block::{
    Clock, Condition, Device, Durability, Error, Expectations, Freshness, Gate, Medium, MediumError, MediumErrorKind,
    NoteKeeping, Request, Response,
};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::{BlockSize, Extent};

use crate::{CreateOptions, OpenOptions, Volume, VolumeError, create, format::Layout, open};

/// Bytes in memory. Clones are the same medium.
#[derive(Clone)]
pub struct TestMedium {
    pub bytes: Rc<RefCell<Vec<u8>>>,
    pub syncs: Rc<Cell<u64>>,
    pub written_bytes: Rc<Cell<u64>>,
    pub punched_bytes: Rc<Cell<u64>>,
    /// Whether each 4 KiB takes space.
    pub allocated: Rc<RefCell<Vec<bool>>>,
    /// Whether space can be reserved.
    pub reserves: Rc<Cell<bool>>,
    /// Writes from this offset on fail for lack of space.
    pub full_from: Rc<Cell<u64>>,
    pub read_only: Rc<Cell<bool>>,
    /// The number of writes, syncs, holes and changes of length before all of them fail, as if the machine had stopped.
    pub changes_left: Rc<Cell<u64>>,
    /// It can be extended without space for it, as files can.
    pub grows_full: Rc<Cell<bool>>,
    /// Its length cannot change.
    pub keeps_length: Rc<Cell<bool>>,
    /// The number of syncs that succeed before they fail.
    pub syncs_left: Rc<Cell<u64>>,
    /// The range of bytes that cannot be read.
    pub unreadable: Rc<Cell<(u64, u64)>>,
    /// The range of bytes whose writes wait until they are released.
    pub held: Rc<Cell<(u64, u64)>>,
    pub let_go: Rc<Condition>,
    /// How often a request is polled before it executes.
    pub turns: Rc<Cell<u32>>,
    /// The bytes of writes in flight at each call of submit.
    pub submits: Rc<RefCell<Vec<u64>>>,
    /// Writes fail at the end, and none of their bytes have been stored.
    pub fails_late: Rc<Cell<bool>>,
    /// Bytes of writes in flight.
    pub in_flight_bytes: Rc<Cell<u64>>,
    /// Writes whose futures were dropped; they stay in flight until [`Medium::drain`].
    pub late: Rc<RefCell<Vec<(u64, Slice)>>>,
    pub sector_bytes: u32,
    /// The unit of reads, if it is smaller than a sector.
    pub read_unit_bytes: u32,
    /// The boot of its machine, if notes are supported.
    pub boot: Rc<Cell<Option<u8>>>,
    pub note_fails: Rc<Cell<bool>>,
}

/// The unit in which space is allocated.
const SPACE_BYTES: u64 = 4096;

/// A write in flight. If it is dropped, it stays in flight.
struct Flight<'a> {
    medium: &'a TestMedium,
    length_bytes: u64,
    write: Option<(u64, Slice)>,
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        let left = self.medium.in_flight_bytes.get() - self.length_bytes;
        self.medium.in_flight_bytes.set(left);
        self.medium.late.borrow_mut().extend(self.write.take());
    }
}

impl TestMedium {
    pub fn new(len_bytes: u64, sector_bytes: u32) -> TestMedium {
        TestMedium {
            bytes: Rc::new(RefCell::new(vec![0; len_bytes as usize])),
            syncs: Rc::default(),
            written_bytes: Rc::default(),
            punched_bytes: Rc::default(),
            allocated: Rc::default(),
            reserves: Rc::new(Cell::new(true)),
            full_from: Rc::new(Cell::new(u64::MAX)),
            read_only: Rc::default(),
            changes_left: Rc::new(Cell::new(u64::MAX)),
            grows_full: Rc::default(),
            keeps_length: Rc::default(),
            syncs_left: Rc::new(Cell::new(u64::MAX)),
            unreadable: Rc::default(),
            held: Rc::default(),
            let_go: Rc::default(),
            turns: Rc::default(),
            submits: Rc::default(),
            fails_late: Rc::default(),
            in_flight_bytes: Rc::default(),
            late: Rc::default(),
            boot: Rc::new(Cell::new(Some(1))),
            note_fails: Rc::default(),
            sector_bytes,
            read_unit_bytes: sector_bytes,
        }
    }

    /// The same bytes on a medium with these sectors, which can also read smaller units.
    pub fn on_sectors(&self, sector_bytes: u32) -> TestMedium {
        TestMedium { sector_bytes, ..self.copy() }
    }

    /// Lets some of the time of an operation pass.
    async fn pass(&self) {
        let mut left = self.turns.get();
        poll_fn(|context| {
            if left == 0 {
                return Poll::Ready(());
            }
            left -= 1;
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    /// The number of allocated bytes.
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated.borrow().iter().filter(|&&taken| taken).count() as u64 * SPACE_BYTES
    }

    /// Whether each 4 KiB takes space, extended to the length of the medium.
    fn space(&self) -> std::cell::RefMut<'_, Vec<bool>> {
        let mut space = self.allocated.borrow_mut();
        space.resize(self.len_bytes().div_ceil(SPACE_BYTES) as usize, false);
        space
    }

    fn take_space(&self, offset_bytes: u64, length_bytes: u64) {
        let range = offset_bytes / SPACE_BYTES..(offset_bytes + length_bytes).div_ceil(SPACE_BYTES);
        self.space()[range.start as usize..range.end as usize].fill(true);
    }

    fn put(&self, offset_bytes: u64, from: &[u8]) {
        self.take_space(offset_bytes, from.len() as u64);
        self.bytes.borrow_mut()[offset_bytes as usize..][..from.len()].copy_from_slice(from);
    }

    /// Releases all held writes.
    pub fn let_all_go(&self) {
        self.held.set((0, 0));
        self.let_go.notify();
    }

    /// Has these parts, each with its offset and length, be those of another medium.
    pub fn put_back(&self, from: &TestMedium, parts: &[(u64, u64)]) {
        for &(start, length) in parts {
            let range = start as usize..(start + length) as usize;
            self.bytes.borrow_mut()[range.clone()].copy_from_slice(&from.bytes.borrow()[range]);
        }
    }

    /// Another medium with the same bytes and the same unreadable range.
    pub fn copy(&self) -> TestMedium {
        let bytes = Rc::new(RefCell::new(self.bytes.borrow().clone()));
        let unreadable = Rc::new(Cell::new(self.unreadable.get()));
        let allocated = Rc::new(RefCell::new(self.allocated.borrow().clone()));
        TestMedium { bytes, unreadable, allocated, ..TestMedium::new(0, self.sector_bytes) }
    }

    /// Completes dropped writes.
    pub fn land(&self) {
        self.late.take().iter().for_each(|(offset, bytes)| self.put(*offset, bytes));
    }

    /// Counts a change. Refuses it if the machine has stopped.
    fn count_change(&self, doing: &'static str) -> Result<(), MediumError> {
        if let Some(left) = self.changes_left.get().checked_sub(1) {
            self.changes_left.set(left);
            return Ok(());
        }
        let reason = "the machine has stopped".to_owned();
        Err(MediumError { kind: MediumErrorKind::Failed, doing, offset_bytes: 0, reason })
    }

    fn check(&self, doing: &'static str, offset_bytes: u64, length: u64) -> Result<(), MediumError> {
        let error = |kind, reason: &str| Err(MediumError { kind, doing, offset_bytes, reason: reason.to_owned() });
        let sector = u64::from(if doing == "read" { self.read_unit_bytes } else { self.sector_bytes });
        assert!(offset_bytes.is_multiple_of(sector) && length.is_multiple_of(sector), "{doing} of whole sectors");
        if offset_bytes + length > self.len_bytes() {
            return error(MediumErrorKind::PastEnd, "past the end");
        }
        let (from, to) = self.unreadable.get();
        if doing == "read" && offset_bytes < to && offset_bytes + length > from {
            return error(MediumErrorKind::Failed, "unreadable");
        }
        if doing != "read" && self.read_only.get() {
            return error(MediumErrorKind::ReadOnly, "read-only");
        }
        if doing == "write" && offset_bytes + length > self.full_from.get() {
            return error(MediumErrorKind::NoSpace, "full");
        }
        Ok(())
    }
}

impl Medium for TestMedium {
    fn len_bytes(&self) -> u64 {
        self.bytes.borrow().len() as u64
    }

    fn sector_bytes(&self) -> u32 {
        self.sector_bytes
    }

    fn read_unit_bytes(&self) -> u32 {
        self.read_unit_bytes
    }

    fn is_read_only(&self) -> bool {
        self.read_only.get()
    }

    fn can_punch(&self) -> bool {
        true
    }

    async fn read(&self, offset_bytes: u64, mut into: Buffer) -> (Result<(), MediumError>, Buffer) {
        if let Err(error) = self.check("read", offset_bytes, into.len() as u64) {
            return (Err(error), into);
        }
        self.pass().await;
        let len = into.len();
        into.copy_from_slice(&self.bytes.borrow()[offset_bytes as usize..][..len]);
        (Ok(()), into)
    }

    async fn write(&self, offset_bytes: u64, from: Slice) -> Result<(), MediumError> {
        self.check("write", offset_bytes, from.len() as u64)?;
        self.count_change("write")?;
        self.written_bytes.set(self.written_bytes.get() + from.len() as u64);
        let (length_bytes, end_bytes) = (from.len() as u64, offset_bytes + from.len() as u64);
        self.in_flight_bytes.set(self.in_flight_bytes.get() + length_bytes);
        let mut flight = Flight { medium: self, length_bytes, write: Some((offset_bytes, from)) };
        self.pass().await;
        let is_held = || offset_bytes < self.held.get().1 && end_bytes > self.held.get().0;
        self.let_go.wait_until(|| !is_held()).await;
        let Some((offset, from)) = flight.write.take() else { return Ok(()) };
        if self.fails_late.get() {
            let (kind, reason) = (MediumErrorKind::Failed, "it failed in flight".to_owned());
            return Err(MediumError { kind, doing: "write", offset_bytes, reason });
        }
        self.put(offset, &from);
        Ok(())
    }

    fn note_keeping(&self) -> NoteKeeping {
        self.boot.get().map_or(NoteKeeping::None, |boot| NoteKeeping::UntilReboot([boot; 16]))
    }

    fn note(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediumError> {
        self.check("write", offset_bytes, bytes.len() as u64)?;
        if self.note_fails.get() {
            let reason = "it takes no notes any more".to_owned();
            return Err(MediumError { kind: MediumErrorKind::Failed, doing: "note", offset_bytes, reason });
        }
        self.count_change("note")?;
        self.put(offset_bytes, bytes);
        Ok(())
    }

    async fn submitted(&self) {
        self.submits.borrow_mut().push(self.in_flight_bytes.get());
        self.pass().await;
    }

    async fn sync(&self) -> Result<(), MediumError> {
        self.pass().await;
        self.count_change("sync")?;
        self.syncs.set(self.syncs.get() + 1);
        match self.syncs_left.get().checked_sub(1) {
            Some(left) => self.syncs_left.set(left),
            None => {
                let reason = "the sync failed".to_owned();
                return Err(MediumError { kind: MediumErrorKind::Failed, doing: "sync", offset_bytes: 0, reason });
            }
        }
        Ok(())
    }

    async fn drain(&self) {
        self.pass().await;
        self.land();
    }

    async fn punch(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.punched_bytes.set(self.punched_bytes.get() + length_bytes);
        let whole = offset_bytes.div_ceil(SPACE_BYTES)..(offset_bytes + length_bytes) / SPACE_BYTES;
        self.space()[whole.start as usize..whole.end as usize].fill(false);
        self.zero(offset_bytes, length_bytes).await
    }

    async fn reserve(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        if !self.reserves.get() {
            let reason = "no space can be reserved".to_owned();
            return Err(MediumError { kind: MediumErrorKind::Unsupported, doing: "reserve", offset_bytes, reason });
        }
        self.take_space(offset_bytes, length_bytes);
        Ok(())
    }

    fn is_hole(&self, offset_bytes: u64, length_bytes: u64) -> bool {
        let range = offset_bytes / SPACE_BYTES..(offset_bytes + length_bytes).div_ceil(SPACE_BYTES);
        !self.space()[range.start as usize..range.end as usize].contains(&true)
    }

    async fn zero(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.check("zero", offset_bytes, length_bytes)?;
        self.count_change("zero")?;
        self.bytes.borrow_mut()[offset_bytes as usize..][..length_bytes as usize].fill(0);
        Ok(())
    }

    async fn set_len(&self, length_bytes: u64) -> Result<(), MediumError> {
        self.count_change("set the length")?;
        if length_bytes > self.full_from.get() && !self.grows_full.get() {
            let (kind, reason) = (MediumErrorKind::NoSpace, "full".to_owned());
            return Err(MediumError { kind, doing: "set the length", offset_bytes: length_bytes, reason });
        }
        if !self.keeps_length.get() {
            self.bytes.borrow_mut().resize(length_bytes as usize, 0);
            self.space();
            return Ok(());
        }
        // As the default does.
        let reason = "the medium keeps its length".to_owned();
        let kind = MediumErrorKind::NoSpace;
        match length_bytes <= self.len_bytes() {
            true => Ok(()),
            false => Err(MediumError { kind, doing: "set the length", offset_bytes: length_bytes, reason }),
        }
    }
}

/// A clock that the test advances. Clones are the same clock.
#[derive(Clone, Default)]
pub struct TestClock {
    now: Rc<Cell<Duration>>,
    moved: Rc<Condition>,
}

impl TestClock {
    pub fn pass(&self, time: Duration) {
        self.now.set(self.now.get() + time);
        self.moved.notify();
    }
}

impl Clock for TestClock {
    fn sleep(&self, delay: Duration) -> impl Future<Output = ()> {
        let until = self.now.get() + delay;
        self.moved.wait_until(move || self.now.get() >= until)
    }
}

/// A volume on a medium in memory, with its worker running whenever a request runs.
pub struct Harness {
    pool: RefCell<LocalPool>,
    pub medium: TestMedium,
    pub clock: TestClock,
    pub gate: Gate<Rc<Volume<TestMedium, TestClock>>>,
}

pub const UUID: [u8; 16] = *b"an identity here";

pub fn protection(guard: GuardKind, protection: ProtectionType) -> Option<PiFormat> {
    Some(PiFormat::with_default_storage_tag(guard, protection))
}

/// A new medium with an empty volume of this shape.
pub fn created(size: BlockSize, sector_bytes: u32, blocks: u64, protection: Option<PiFormat>) -> TestMedium {
    let layout = Layout::new(size, sector_bytes, blocks).unwrap();
    let medium = TestMedium::new(layout.medium_bytes(), sector_bytes);
    let options =
        CreateOptions { block_size: size, capacity_blocks: blocks, protection, uuid: UUID, preallocate: false };
    futures_executor::block_on(create(&medium, &options)).unwrap();
    medium
}

impl Harness {
    pub fn open(medium: &TestMedium, read_only: bool) -> Result<Harness, VolumeError> {
        Harness::open_with(medium, OpenOptions { read_only, ..OpenOptions::default() })
    }

    pub fn open_with(medium: &TestMedium, options: OpenOptions) -> Result<Harness, VolumeError> {
        Harness::open_as(medium, OpenOptions { keeps_answered: false, ..options })
    }

    /// Opens a volume with notes.
    pub fn open_noted(medium: &TestMedium, options: OpenOptions) -> Result<Harness, VolumeError> {
        Harness::open_as(medium, options)
    }

    fn open_as(medium: &TestMedium, options: OpenOptions) -> Result<Harness, VolumeError> {
        let options = OpenOptions { cache_bytes: 64 << 10, ..options };
        let (mut pool, clock) = (LocalPool::new(), TestClock::default());
        let opened = pool.run_until(open(medium.clone(), clock.clone(), &options))?;
        pool.spawner().spawn_local(opened.worker.run()).unwrap();
        let gate = Gate::new("volume", opened.volume);
        Ok(Harness { pool: RefCell::new(pool), medium: medium.clone(), clock, gate })
    }

    pub fn new(size: BlockSize, blocks: u64, protection: Option<PiFormat>) -> Harness {
        Harness::open(&created(size, 512, blocks, protection), false).unwrap()
    }

    pub fn run<T>(&self, future: impl Future<Output = T>) -> T {
        self.pool.borrow_mut().run_until(future)
    }

    /// Lets time pass, and runs the worker.
    pub fn wait(&self, time: Duration) {
        self.idle();
        self.clock.pass(time);
        self.idle();
    }

    /// Runs the worker until it has nothing to do.
    pub fn idle(&self) {
        self.pool.borrow_mut().run_until_stalled();
    }

    /// The number of copies of metadata that were found lost so far.
    pub fn lost_copies(&self) -> u64 {
        self.gate.device().block_map.groups.lost_copies().count()
    }

    pub fn size(&self) -> BlockSize {
        self.gate.geometry().block_size
    }

    pub fn write(&self, start: u64, data: &[u8]) -> Result<(), Error> {
        self.write_durably(start, data, Durability::Volatile)
    }

    pub fn write_durably(&self, start: u64, data: &[u8], durability: Durability) -> Result<(), Error> {
        self.write_tagged(start, data, durability, start)
    }

    /// Writes with reference tags that the writer chooses.
    pub fn write_with_first_ref(&self, start: u64, data: &[u8], first_ref: u64) -> Result<(), Error> {
        self.write_tagged(start, data, Durability::Volatile, first_ref)
    }

    fn write_tagged(&self, start: u64, data: &[u8], durability: Durability, first_ref: u64) -> Result<(), Error> {
        let (size, format) = (self.size(), self.gate.geometry().protection);
        let extent = Extent::from_raw(start, (data.len() >> size.shift()) as u64).unwrap();
        let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: first_ref };
        let data = Sealed::seal(Slice::copy_from(data), size, format, &tags);
        self.run(self.gate.execute(Request::write(extent, data, durability))).map(drop)
    }

    pub fn read(&self, start: u64, blocks: u64) -> Result<Vec<u8>, Error> {
        let extent = Extent::from_raw(start, blocks).unwrap();
        match self.run(self.gate.execute(Request::read(extent, Expectations::NONE)))? {
            Response::Data(data) => Ok(data.joined_data().to_vec()),
            other => panic!("a read was answered with {other:?}"),
        }
    }

    pub fn verify(&self) -> Result<(), Error> {
        let extent = Extent::from_raw(0, self.gate.geometry().capacity_blocks).unwrap();
        self.run(self.gate.execute(Request::verify(extent, Expectations::NONE))).map(drop)
    }

    pub fn flush(&self) -> Result<(), Error> {
        self.run(self.gate.execute(Request::flush())).map(drop)
    }

    pub fn close(self) -> TestMedium {
        self.run(self.gate.device().close()).unwrap();
        self.medium
    }
}

/// Bytes that differ for each block and each seed.
pub fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let words = (0..bytes as u64 / 8).map(|i| (seed << 32 | i).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    words.flat_map(u64::to_le_bytes).collect()
}

/// The result of an open for reading or for writing, with or without accepting older content.
pub fn opened(medium: &TestMedium, read_only: bool, accept_older: bool) -> Result<Harness, VolumeError> {
    Harness::open_with(medium, OpenOptions { read_only, accept_older, ..OpenOptions::default() })
}

/// What an open volume says of the age of its content.
pub fn freshness(harness: &Harness) -> Freshness {
    harness.gate.abilities().freshness
}
