//! A device simple enough to verify by reading its code: an append-only log of blocks, to test the simulator with.
//!
//! Each written block becomes one entry, a sector of header and the block, at the end of the log. The content of a
//! block is its entry with the highest number and a valid checksum. Space is never reused.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use sealblock_block::{
    Abilities, Ability, BadBlock, BadBlocks, Device, Durability, DynDevice, Error, ErrorKind, Expectations, Geometry,
    Limits, Medium, Operation, Outcome, Request, RequestKind, Response,
};
use sealblock_integrity::{Checks, Sealed, Tags, Unverified, guard};
use sealblock_runtime_memory::Buffer;
use sealblock_units::{BlockSize, Extent, Lba};

use crate::disk::SimDisk;
use crate::executor::Executor;
use crate::system::{BoxedWork, Session, System, VolumeProfile};

const MAGIC: u64 = 0x746f_795f_6c6f_6721;
const HEADER_BYTES: usize = 64;

/// Reference devices, right or with one defect.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReferenceSystem {
    /// Flushes do nothing.
    pub(crate) skip_sync: bool,
    /// Entries count even if their data did not arrive.
    pub(crate) trust: bool,
    /// The percentage of syncs for which the disk does nothing.
    pub(crate) lie_percent: u64,
    /// Flushes never end.
    pub(crate) hang: bool,
}

/// One block's newest entry.
#[derive(Clone, Copy)]
struct EntryLocation {
    number: u64,
    offset_bytes: u64,
    stored: bool,
}

struct ReferenceDevice {
    disk: SimDisk,
    kind: ReferenceSystem,
    profile: VolumeProfile,
    geometry: Geometry,
    locations: RefCell<BTreeMap<u64, EntryLocation>>,
    next: Cell<u64>,
    end: Cell<u64>,
}

fn entry_bytes(profile: &VolumeProfile) -> u64 {
    profile.sector_bytes as u64 + profile.block_size.bytes() as u64
}

impl ReferenceDevice {
    async fn open(disk: SimDisk, kind: ReferenceSystem, profile: VolumeProfile) -> Result<ReferenceDevice, String> {
        let limits = Limits::new(profile.block_size, 64 * profile.block_size.bytes(), 64);
        let VolumeProfile { block_size, capacity_blocks, protection, .. } = profile;
        let geometry = Geometry { block_size, capacity_blocks, protection, limits };
        let locations = RefCell::default();
        let device =
            ReferenceDevice { disk, kind, profile, geometry, locations, next: Cell::new(1), end: Cell::new(0) };
        let entry = entry_bytes(&profile);
        let chunk = entry * 256;
        let mut at = 0;
        while at + entry <= device.disk.len_bytes() {
            let length = chunk.min((device.disk.len_bytes() - at) / entry * entry);
            let (read, bytes) = device.disk.read(at, Buffer::zeroed(length as usize)).await;
            read.map_err(|error| error.to_string())?;
            (at..)
                .step_by(entry as usize)
                .zip(bytes.chunks_exact(entry as usize))
                .for_each(|(at, entry)| device.take(at, entry));
            at += length;
        }
        Ok(device)
    }

    /// Adds an entry found on the disk.
    fn take(&self, offset_bytes: u64, entry: &[u8]) {
        let word =
            |i: usize| u64::from_le_bytes(*entry[i * 8..].first_chunk().expect("entries are longer than headers"));
        if word(0) != MAGIC {
            return;
        }
        self.end.set(offset_bytes + entry.len() as u64);
        self.next.set(self.next.get().max(word(1) + 1));
        let arrived = word(7) == checksum(entry, self.profile.sector_bytes as usize);
        if arrived || self.kind.trust {
            self.put(word(2), EntryLocation { number: word(1), offset_bytes, stored: word(3) == 1 });
        }
    }

    fn put(&self, lba: u64, location: EntryLocation) {
        let mut locations = self.locations.borrow_mut();
        let newest = locations.entry(lba).or_insert(location);
        if newest.number < location.number {
            *newest = location;
        }
    }

    async fn append(&self, extent: Extent, data: Option<&Sealed>, durability: Durability) -> Outcome {
        let (entry, sector) = (entry_bytes(&self.profile) as usize, self.profile.sector_bytes as usize);
        let mut bytes = Buffer::zeroed(entry * extent.len() as usize);
        let first = self.next.get();
        self.next.set(first + extent.len());
        for (i, (lba, entry)) in extent.iter().zip(bytes.chunks_exact_mut(entry)).enumerate() {
            for (at, word) in [MAGIC, first + i as u64, lba.get(), u64::from(data.is_some())].into_iter().enumerate() {
                entry[at * 8..at * 8 + 8].copy_from_slice(&word.to_le_bytes());
            }
            if let Some(block) = data.map(|data| data.slice(i, 1)) {
                entry[32..32 + block.joined_tags().len()].copy_from_slice(&block.joined_tags());
                entry[sector..].copy_from_slice(&block.joined_data());
            }
            let checksum = checksum(entry, sector);
            entry[56..64].copy_from_slice(&checksum.to_le_bytes());
        }
        let offset_bytes = self.end.get();
        self.end.set(offset_bytes + bytes.len() as u64);
        self.disk.write(offset_bytes, bytes.freeze()).await?;
        for (i, lba) in extent.iter().enumerate() {
            let offset_bytes = offset_bytes + (i * entry) as u64;
            self.put(lba.get(), EntryLocation { number: first + i as u64, offset_bytes, stored: data.is_some() });
        }
        match durability {
            Durability::Volatile => Ok(Response::Done),
            Durability::ForceUnitAccess => self.flush().await,
        }
    }

    async fn flush(&self) -> Outcome {
        if self.kind.hang {
            std::future::pending::<()>().await;
        }
        if !self.kind.skip_sync {
            self.disk.sync().await?;
        }
        Ok(Response::Done)
    }

    async fn read(&self, extent: Extent, expectations: Expectations) -> Outcome {
        let mut parts = Vec::new();
        let mut bad_blocks = Vec::new();
        for lba in extent.iter() {
            match self.read_block(lba).await? {
                Ok(block) => parts.push(block),
                Err(bad_block) => bad_blocks.push(bad_block),
            }
        }
        BadBlocks::fail_if_any(bad_blocks)?;
        let data = Sealed::join(parts);
        expectations.check(extent, &data).map(|()| Response::Data(data))
    }

    async fn read_block(&self, lba: Lba) -> Result<Result<Sealed, BadBlock>, Error> {
        let location = self.locations.borrow().get(&lba.get()).copied().filter(|location| location.stored);
        let (size, format) = (self.profile.block_size, self.profile.protection);
        let Some(location) = location else {
            let zeroes = Buffer::zeroed(size.bytes()).freeze();
            return Ok(Ok(Sealed::seal(zeroes, size, format, &Tags { initial_ref_tag: lba.get(), ..Tags::default() })));
        };
        let (read, bytes) =
            self.disk.read(location.offset_bytes, Buffer::zeroed(entry_bytes(&self.profile) as usize)).await;
        read?;
        let bytes = bytes.freeze();
        let tags = bytes.slice(32..32 + format.map_or(0, |format| format.tuple_bytes()));
        let unverified = Unverified::new(bytes.slice(self.profile.sector_bytes as usize..), tags, size, format)
            .map_err(|error| Error::from(ErrorKind::Media { reason: error.to_string() }))?;
        let checks = format.map_or(Checks::NONE, |format| Checks::full(format, lba));
        Ok(unverified.verify(&checks).map_err(|found| BadBlock::of_mismatch(lba, &found[0])))
    }
}

fn checksum(entry: &[u8], sector: usize) -> u64 {
    let header = u64::from(guard::crc32c(&entry[..HEADER_BYTES - 8]));
    header << 32 | u64::from(guard::crc32c(&entry[sector..]))
}

impl Device for ReferenceDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        Abilities::BASIC.with([RequestKind::Discard, RequestKind::WriteZeroes], Ability::Native)
    }

    async fn execute(&self, request: Request) -> Outcome {
        let kind = request.kind();
        let Request { operation, extents, durability } = request;
        match operation {
            Operation::Read(expectations) => self.read(extents.one(), expectations).await,
            Operation::Write(data) => self.append(extents.one(), Some(&data.into_sealed()), durability).await,
            Operation::Flush => self.flush().await,
            Operation::WriteZeroes { .. } => self.append(extents.one(), None, durability).await,
            Operation::Discard => {
                for extent in extents.iter() {
                    self.append(*extent, None, Durability::Volatile).await?;
                }
                Ok(Response::Done)
            }
            Operation::Verify(_)
            | Operation::Copy { .. }
            | Operation::Compare(_)
            | Operation::CompareAndWrite(_)
            | Operation::WriteUncorrectable { .. }
            | Operation::Checksum(..)
            | Operation::Repair
            | Operation::Salvage
            | Operation::BlockStatus
            | Operation::ReadReserved(_)
            | Operation::WriteReserved(..) => Err(ErrorKind::Absent(kind).into()),
        }
    }
}

impl System for ReferenceSystem {
    fn disk_bytes(&self, profile: &VolumeProfile) -> u64 {
        match profile.block_size {
            BlockSize::B512 => 8 << 20,
            BlockSize::B4096 => 64 << 20,
        }
    }

    fn finds_damage(&self) -> bool {
        false
    }

    fn lie_percent(&self) -> u64 {
        self.lie_percent
    }

    fn create(&self, disk: SimDisk, _: VolumeProfile) -> BoxedWork<()> {
        Box::pin(async move { disk.sync().await.map_err(|error| error.to_string()) })
    }

    fn open(&self, disk: SimDisk, _: Executor, profile: VolumeProfile, _: bool) -> BoxedWork<Session> {
        let kind = *self;
        Box::pin(async move {
            let device = Rc::new(ReferenceDevice::open(disk, kind, profile).await?);
            let stack = DynDevice::new("toy", Rc::clone(&device));
            let close = Box::pin(async move { device.flush().await.map(|_| ()).map_err(|error| error.to_string()) });
            Ok(Session { stack, close, lost: None })
        })
    }
}
