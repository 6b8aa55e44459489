//! A small device for tests: it keeps blocks and tags in two vectors and records its requests.

use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use sealblock_integrity::{Checks, ChecksumKind, GuardKind, PiFormat, ProtectionType, Sealed, Tags, Unverified};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockCount, BlockSize, Extent, Lba};

use crate::{
    Abilities, BadBlock, BadBlocks, BlockState, Checksum, Device, Durability, Error, ErrorKind, Expectations, Gate,
    Geometry, Limits, Operation, Outcome, Request, RequestKind, Response, Salvaged, StatusRun, VerifyStats,
};

/// A recorded request: kind, first block, number of blocks, first reference tag checked.
pub type Seen = (RequestKind, u64, u64, Option<u64>);

/// Blocks of the device.
pub const CAPACITY: u64 = 64;

/// The device. Everything may be set before it gets its gate.
pub struct FakeDevice {
    pub geometry: Geometry,
    pub abilities: Abilities,
    /// Blocks that cannot be read.
    pub broken: Vec<u64>,
    /// Reads that start at this block or later fail as a whole.
    pub lost_from: Option<u64>,
    /// The error of every Write, if any.
    pub write_error: Option<ErrorKind>,
    /// The kind of checksum that it returns, whichever was requested.
    pub checksum_kind: Option<ChecksumKind>,
    pub seen: RefCell<Vec<Seen>>,
    pub durable: Cell<u32>,
    /// Writes that came without tags.
    pub unsealed: Cell<u32>,
    /// True if the device executes requests in place.
    pub instant: bool,
    data: RefCell<Vec<u8>>,
    tags: RefCell<Vec<u8>>,
}

impl FakeDevice {
    /// A device that can only read, write and flush, in whole transfers.
    pub fn new(protection: Option<PiFormat>) -> FakeDevice {
        let all = BlockCount::new(CAPACITY as u32).unwrap();
        let tuple_bytes = protection.map_or(0, PiFormat::tuple_bytes);
        let device = FakeDevice {
            geometry: Geometry {
                block_size: BlockSize::B512,
                capacity_blocks: CAPACITY,
                protection,
                limits: Limits { max_transfer_blocks: all, max_verify_blocks: all, max_zero_blocks: all },
            },
            abilities: Abilities::BASIC,
            broken: Vec::new(),
            lost_from: None,
            write_error: None,
            checksum_kind: None,
            seen: RefCell::default(),
            durable: Cell::new(0),
            unsealed: Cell::new(0),
            instant: false,
            data: RefCell::new(vec![0; CAPACITY as usize * 512]),
            tags: RefCell::new(vec![0; CAPACITY as usize * tuple_bytes]),
        };
        device.store(0, &sealed_zeroes(protection));
        device
    }

    /// The same, with limits of `blocks` blocks for each request.
    pub fn limited(protection: Option<PiFormat>, blocks: u32) -> FakeDevice {
        let max_blocks = BlockCount::new(blocks).unwrap();
        let mut device = FakeDevice::new(protection);
        device.geometry.limits =
            Limits { max_transfer_blocks: max_blocks, max_verify_blocks: max_blocks, max_zero_blocks: max_blocks };
        device
    }

    pub fn gate(self) -> Gate<FakeDevice> {
        Gate::new("tiny", self)
    }

    /// Corrupts the data of a block and leaves its tags.
    pub fn corrupt(&self, block: u64) {
        self.data.borrow_mut()[block as usize * 512 + 7] ^= 0x10;
    }

    pub fn block(&self, block: u64) -> Vec<u8> {
        self.data.borrow()[block as usize * 512..][..512].to_vec()
    }

    /// Takes the requests recorded since the last call.
    pub fn take_seen(&self) -> Vec<Seen> {
        self.seen.take()
    }

    fn store(&self, start: u64, sealed: &Sealed) {
        let at = start as usize * 512;
        self.data.borrow_mut()[at..at + sealed.joined_data().len()].copy_from_slice(&sealed.joined_data());
        let at = start as usize * self.geometry.protection.map_or(0, PiFormat::tuple_bytes);
        self.tags.borrow_mut()[at..at + sealed.joined_tags().len()].copy_from_slice(&sealed.joined_tags());
    }

    /// Blocks that have passed the device's own check, and are as expected.
    fn load(&self, extent: Extent, expectations: &Expectations) -> Result<Sealed, Error> {
        if self.lost_from.is_some_and(|from| extent.start().get() >= from) {
            return Err(ErrorKind::Unreachable { reason: "gone".to_owned() }.into());
        }
        let unreadable = extent.iter().filter(|lba| self.broken.contains(&lba.get())).map(BadBlock::media);
        if let Some(bad_blocks) = BadBlocks::new(unreadable.collect()) {
            return Err(bad_blocks.into());
        }
        let cut = |bytes: &RefCell<Vec<u8>>, unit: usize| {
            Slice::copy_from(&bytes.borrow()[extent.start().get() as usize * unit..][..extent.len() as usize * unit])
        };
        let format = self.geometry.protection;
        let tags = cut(&self.tags, format.map_or(0, PiFormat::tuple_bytes));
        let loaded = Unverified::new(cut(&self.data, 512), tags, BlockSize::B512, format).unwrap();
        let own = format.map_or(Checks::NONE, |format| Checks::full(format, extent.start()));
        let sealed = loaded.verify(&own).map_err(|mismatches| {
            let bad_blocks = mismatches.iter().map(|mismatch| BadBlock::of_mismatch(extent.start(), mismatch));
            Error::from(BadBlocks::new(bad_blocks.collect()).unwrap())
        })?;
        expectations.check(extent, &sealed).map(|()| sealed)
    }

    fn record(&self, request: &Request) {
        let (start, blocks) = request.extents.first().map_or((0, 0), |extent| (extent.start().get(), extent.len()));
        self.seen.borrow_mut().push((request.kind(), start, blocks, request.expectations().checks().initial_ref_tag));
    }

    fn respond(&self, request: Request) -> Outcome {
        self.record(&request);
        let Request { operation, extents, durability } = request;
        match operation {
            Operation::Read(expectations) => self.load(extents.one(), &expectations).map(Response::Data),
            Operation::Salvage => {
                let bad_blocks = match self.load(extents.one(), &Expectations::NONE).map_err(Error::into_bad_blocks) {
                    Ok(_) => Vec::new(),
                    Err(bad_blocks) => bad_blocks?,
                };
                let start = extents.one().start().get();
                let blocks = numbered(start, extents.one().len(), self.geometry.protection);
                Ok(Response::Salvaged(Salvaged { blocks, bad_blocks }))
            }
            Operation::Write(data) => {
                if let Some(error) = &self.write_error {
                    return Err(error.clone().into());
                }
                self.durable.set(self.durable.get() + u32::from(durability == Durability::ForceUnitAccess));
                self.unsealed.set(self.unsealed.get() + u32::from(!data.is_sealed()));
                self.store(extents.one().start().get(), &data.into_sealed());
                Ok(Response::Done)
            }
            Operation::Verify(expectations) => {
                self.load(extents.one(), &expectations).map(|_| Response::Verified(VerifyStats::default()))
            }
            Operation::Checksum(kind, expectations) => {
                let kind = self.checksum_kind.unwrap_or(kind);
                let loaded = self.load(extents.one(), &expectations)?;
                Ok(Response::Checksum(Checksum { kind, value: loaded.checksum(kind), ..Checksum::default() }))
            }
            Operation::BlockStatus => {
                let run = StatusRun { blocks: extents.one().blocks(), state: BlockState::Hole };
                Ok(Response::BlockStatus(vec![run]))
            }
            Operation::ReadReserved(_) => Ok(Response::Reserved(Slice::copy_from(b"label"))),
            Operation::Copy { source, expectations } => {
                let data = self.load(source, &expectations)?;
                self.store(extents.one().start().get(), &data);
                Ok(Response::Done)
            }
            Operation::CompareAndWrite(both) => {
                let stored = self.load(extents.one(), &Expectations::NONE)?;
                if let Some(index) = stored.first_difference(&both.expected, false) {
                    return Err(ErrorKind::Miscompare { lba: extents.one().iter().nth(index).unwrap() }.into());
                }
                self.store(extents.one().start().get(), &both.new);
                Ok(Response::Done)
            }
            Operation::Flush
            | Operation::Discard
            | Operation::WriteReserved(..)
            | Operation::WriteUncorrectable { .. } => Ok(Response::Done),
            Operation::WriteZeroes { .. } | Operation::Compare(_) | Operation::Repair => {
                panic!("not native on this device")
            }
        }
    }
}

impl Device for FakeDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        self.abilities
    }

    async fn execute(&self, request: Request) -> Outcome {
        self.respond(request)
    }

    fn executes_in_place(&self) -> bool {
        true
    }

    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        self.instant.then(|| self.respond(request.clone()))
    }
}

/// Type 1 with the 16-bit guard.
pub const TYPE1: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);

/// The whole device full of sealed zeroes.
fn sealed_zeroes(protection: Option<PiFormat>) -> Sealed {
    let data = Slice::copy_from(&vec![0; CAPACITY as usize * 512]);
    Sealed::seal(data, BlockSize::B512, protection, &Tags::default())
}

/// Blocks that are each filled with their own number, sealed for their addresses.
pub fn numbered(start: u64, blocks: u64, protection: Option<PiFormat>) -> Sealed {
    let bytes: Vec<u8> = (start..start + blocks).flat_map(|block| [block as u8 + 1; 512]).collect();
    let tags = Tags { initial_ref_tag: start, ..Tags::default() };
    Sealed::seal(Slice::copy_from(&bytes), BlockSize::B512, protection, &tags)
}

/// The run of `blocks` blocks from `start`.
pub fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

/// Expects guards and reference tags as Type 1 has them, from `start` on.
pub fn full(start: u64) -> Expectations {
    Expectations::new(Checks::full(TYPE1, Lba::new(start)))
}

/// A write of numbered blocks.
pub fn write(start: u64, blocks: u64, protection: Option<PiFormat>) -> Request {
    let data = numbered(start, blocks, protection);
    Request::write(extent(start, blocks), data, Durability::Volatile)
}

/// Runs a future that never waits for anything outside.
pub fn run<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..10_000 {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
    }
    panic!("the future never becomes ready");
}
