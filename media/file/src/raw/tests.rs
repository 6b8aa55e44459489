//! Twin tests of raw blocks, on media in RAM that can be made to fail, and on a file.

use std::cell::Cell;

use futures_util::FutureExt;
use sealblock_block::{
    Ability, BadBlockCause, BlockState, Device, Durability, ErrorKind, Expectations, Gate, Medium, MediumError,
    MediumErrorKind, Outcome, Request, RequestKind, Response,
};
use sealblock_integrity::{Sealed, Tags};
use sealblock_media_memory::MemoryMedium;
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::{Config, Reactor};
use sealblock_units::{BlockSize, Extent};

use super::{BlockError, RawDevice};
use crate::{FileMedium, Options};

/// A medium that fails reads of some bytes, and counts syncs.
struct Flaky {
    inner: MemoryMedium,
    /// Bytes that cannot be read.
    bad: Vec<u64>,
    /// Reads that fail wherever they read, one after the other.
    passing_failures: Cell<u32>,
    punches: bool,
    holes: Cell<u32>,
    syncs: Cell<u32>,
}

impl Flaky {
    fn new() -> Flaky {
        let inner = MemoryMedium::new(1 << 20, 512);
        Flaky {
            inner,
            bad: Vec::new(),
            passing_failures: Cell::new(0),
            punches: true,
            holes: Cell::new(0),
            syncs: Cell::new(0),
        }
    }
}

impl Medium for Flaky {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn sector_bytes(&self) -> u32 {
        512
    }

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }

    fn can_punch(&self) -> bool {
        self.punches
    }

    async fn read(&self, offset_bytes: u64, into: Buffer) -> (Result<(), MediumError>, Buffer) {
        let end = offset_bytes + into.len() as u64;
        let passing = self.passing_failures.get();
        self.passing_failures.set(passing.saturating_sub(1));
        if passing > 0 || self.bad.iter().any(|at| (offset_bytes..end).contains(at)) {
            let reason = "unreadable".to_owned();
            return (Err(MediumError { kind: MediumErrorKind::Failed, doing: "read", offset_bytes, reason }), into);
        }
        self.inner.read(offset_bytes, into).await
    }

    async fn write(&self, offset_bytes: u64, from: Slice) -> Result<(), MediumError> {
        self.inner.write(offset_bytes, from).await
    }

    async fn sync(&self) -> Result<(), MediumError> {
        self.syncs.set(self.syncs.get() + 1);
        Ok(())
    }

    async fn drain(&self) {
        self.inner.drain().await;
    }

    async fn punch(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.holes.set(self.holes.get() + 1);
        self.inner.punch(offset_bytes, length_bytes).await
    }

    async fn zero(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.inner.zero(offset_bytes, length_bytes).await
    }
}

fn gate(medium: Flaky) -> Gate<RawDevice<Flaky>> {
    Gate::new("raw", RawDevice::new(medium, BlockSize::B4096).unwrap())
}

fn run<D: Device>(device: &D, operation: Request) -> Outcome {
    device.execute(operation).now_or_never().expect("RAM never waits")
}

fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

fn write(at: Extent, byte: u8, durability: Durability) -> Request {
    let data = Slice::copy_from(&vec![byte; at.bytes(BlockSize::B4096) as usize]);
    let data = Sealed::seal(data, BlockSize::B4096, None, &Tags::default());
    Request::write(at, data, durability)
}

fn read(at: Extent) -> Request {
    Request::read(at, Expectations::NONE)
}

fn done(outcome: Outcome) {
    assert!(matches!(outcome, Ok(Response::Done)), "{outcome:?}");
}

fn bytes(outcome: Outcome) -> Vec<u8> {
    match outcome {
        Ok(Response::Data(data)) => data.joined_data().to_vec(),
        other => panic!("no data but {other:?}"),
    }
}

#[test]
fn blocks_lie_one_behind_the_other() {
    let gate = gate(Flaky::new());
    assert_eq!(gate.geometry().capacity_blocks, 256);
    done(run(&gate, write(extent(3, 2), 7, Durability::Volatile)));
    assert_eq!(bytes(run(&gate, read(extent(2, 4)))), [vec![0; 4096], vec![7; 8192], vec![0; 4096]].concat());
    assert_eq!(gate.device().medium().inner.peek(3 * 4096 - 1, 2), [0, 7]);
}

#[test]
fn blocks_smaller_than_a_sector_are_refused() {
    assert!(RawDevice::new(MemoryMedium::new(1 << 20, 512), BlockSize::B512).is_ok());
    assert!(RawDevice::new(MemoryMedium::new(1 << 20, 4096), BlockSize::B4096).is_ok());
    let refused = RawDevice::new(MemoryMedium::new(1 << 20, 4096), BlockSize::B512).err();
    assert_eq!(refused, Some(BlockError::SectorsTooLarge { block_size: BlockSize::B512, sector_bytes: 4096 }));
    let tail = RawDevice::new(MemoryMedium::new(4096 + 512, 512), BlockSize::B4096).unwrap();
    assert_eq!(tail.geometry().capacity_blocks, 1, "half a block is none");
}

#[test]
fn unreadable_blocks_are_named_one_by_one() {
    let mut medium = Flaky::new();
    medium.bad = vec![5 * 4096 + 9, 8 * 4096];
    let gate = gate(medium);
    assert!(run(&gate, read(extent(6, 2))).is_ok());
    for operation in [read(extent(0, 16)), Request::verify(extent(0, 16), Expectations::NONE)] {
        let error = run(&gate, operation).unwrap_err();
        let faults: Vec<_> = error.bad_blocks().unwrap().as_slice().iter().map(|f| (f.lba.get(), f.cause)).collect();
        assert_eq!(faults, [(5, BadBlockCause::Media), (8, BadBlockCause::Media)]);
    }
}

#[test]
fn a_passing_failure_costs_only_time() {
    let medium = Flaky::new();
    medium.passing_failures.set(1);
    let gate = gate(medium);
    done(run(&gate, write(extent(1, 1), 7, Durability::Volatile)));
    assert_eq!(bytes(run(&gate, read(extent(0, 2)))), [vec![0; 4096], vec![7; 4096]].concat());
}

#[test]
fn what_must_last_is_synced_and_nothing_else() {
    let gate = gate(Flaky::new());
    let zero = |durability| Request::write_zeroes(extent(0, 1), true, durability);
    let syncs = || gate.device().medium().syncs.get();
    done(run(&gate, write(extent(0, 1), 1, Durability::Volatile)));
    done(run(&gate, zero(Durability::Volatile)));
    assert_eq!(syncs(), 0);
    done(run(&gate, write(extent(0, 1), 1, Durability::ForceUnitAccess)));
    done(run(&gate, zero(Durability::ForceUnitAccess)));
    done(run(&gate, Request::flush()));
    assert_eq!(syncs(), 3);
}

#[test]
fn abilities_follow_the_medium() {
    let zero = |may_unmap| Request::write_zeroes(extent(0, 2), may_unmap, Durability::Volatile);
    let discard = || Request::discard([extent(0, 1), extent(1, 1)]);
    for punches in [true, false] {
        let gate = gate(Flaky { punches, ..Flaky::new() });
        assert_eq!(gate.abilities().unmap_zeroes, punches);
        for may_unmap in [false, true] {
            done(run(&gate, write(extent(0, 3), 1, Durability::Volatile)));
            done(run(&gate, zero(may_unmap)));
            assert_eq!(gate.device().medium().holes.get(), u32::from(may_unmap), "holes only where they are allowed");
            assert_eq!(bytes(run(&gate, read(extent(0, 3)))), [vec![0; 8192], vec![1; 4096]].concat());
        }
        assert_eq!(run(&gate, discard()).is_ok(), punches);
        assert_eq!(gate.abilities().is_native(RequestKind::Discard), punches);
    }
    let mut medium = Flaky::new();
    medium.inner = medium.inner.as_read_only();
    let gate = gate(medium);
    let refused = run(&gate, write(extent(0, 1), 1, Durability::Volatile)).unwrap_err();
    assert_eq!(refused.into_kind(), ErrorKind::ReadOnly);
    assert!(run(&gate, read(extent(0, 1))).is_ok());
}

#[test]
fn blocks_of_a_file_are_read_back() {
    let directory = tempfile::tempdir().unwrap();
    Reactor::new(Config::default()).unwrap().block_on(async {
        let medium = FileMedium::open(directory.path().join("raw"), Options::CREATE).unwrap();
        medium.set_len_bytes(8 << 20).unwrap();
        let gate = Gate::new("raw", RawDevice::new(medium, BlockSize::B4096).unwrap());
        done(gate.execute(write(extent(1, 700), 5, Durability::ForceUnitAccess)).await);
        let read = bytes(gate.execute(read(extent(0, 702))).await);
        assert_eq!(read, [vec![0; 4096], vec![5; 700 * 4096], vec![0; 4096]].concat());
    });
}

fn runs(outcome: Outcome) -> Vec<(u32, bool)> {
    let Ok(Response::BlockStatus(runs)) = outcome else { panic!("no runs but {outcome:?}") };
    runs.iter().map(|run| (run.blocks.get(), run.state == BlockState::Hole)).collect()
}

#[test]
fn holes_of_a_file_are_reported_in_blocks() {
    let directory = tempfile::tempdir().unwrap();
    Reactor::new(Config::default()).unwrap().block_on(async {
        let medium = FileMedium::open(directory.path().join("sparse"), Options::CREATE).unwrap();
        medium.set_len_bytes(16 << 20).unwrap();
        let device = RawDevice::new(medium, BlockSize::B4096).unwrap();
        assert_eq!(device.abilities().get(RequestKind::BlockStatus), Ability::Native);
        let ask = |start, blocks| device.execute(Request::block_status(extent(start, blocks)));
        assert_eq!(runs(ask(0, 256).await), [(256, true)]);
        for start in [16, 128] {
            done(device.execute(write(extent(start, 16), 7, Durability::ForceUnitAccess)).await);
        }
        let told = runs(ask(0, 256).await);
        assert_eq!(told, [(16, true), (16, false), (96, true), (16, false), (112, true)]);
        assert_eq!(runs(ask(20, 4).await), [(4, false)]);
        let durability = Durability::ForceUnitAccess;
        let zero = Request::write_zeroes(extent(16, 16), true, durability);
        done(device.execute(zero).await);
        if device.medium().can_punch() {
            assert_eq!(runs(ask(0, 64).await), [(64, true)]);
        }
    });
}

/// A medium whose holes lie between blocks.
struct Odd(Flaky);

impl Medium for Odd {
    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn sector_bytes(&self) -> u32 {
        512
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn can_punch(&self) -> bool {
        false
    }

    async fn read(&self, offset_bytes: u64, into: Buffer) -> (Result<(), MediumError>, Buffer) {
        self.0.read(offset_bytes, into).await
    }

    async fn write(&self, offset_bytes: u64, from: Slice) -> Result<(), MediumError> {
        self.0.write(offset_bytes, from).await
    }

    async fn sync(&self) -> Result<(), MediumError> {
        Ok(())
    }

    async fn drain(&self) {
        self.0.drain().await;
    }

    async fn punch(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.0.punch(offset_bytes, length_bytes).await
    }

    async fn zero(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.0.zero(offset_bytes, length_bytes).await
    }

    /// A hole from byte 1024 to 10240, and data otherwise.
    fn status_at(&self, offset_bytes: u64, length_bytes: u64) -> (u64, bool) {
        match offset_bytes {
            0..1024 => (length_bytes.min(1024 - offset_bytes), false),
            1024..10240 => (length_bytes.min(10240 - offset_bytes), true),
            _ => (length_bytes, false),
        }
    }
}

#[test]
fn a_block_is_a_hole_only_if_all_of_it_is() {
    let ask = |size| {
        let device = RawDevice::new(Odd(Flaky::new()), size).unwrap();
        let blocks = (16384 >> size.shift()) as u64;
        runs(run(&device, Request::block_status(extent(0, blocks))))
    };
    assert_eq!(ask(BlockSize::B512), [(2, false), (18, true), (12, false)]);
    assert_eq!(ask(BlockSize::B4096), [(1, false), (1, true), (2, false)]);
}
