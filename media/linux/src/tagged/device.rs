//! A block device whose tags are transferred with the kernel's ordinary reads and writes.
//!
//! Invariants: before each read the memory for tags is filled with a pattern that matches no data, so that a tag that
//! the kernel does not fill in is never valid; every block that is returned has been checked here, whatever the device
//! checks.
//!
//! Read and Write carry tags; from them the gate emulates Verify, Compare and Write Zeroes. Zeroes are written with
//! their tags, because drives differ in the tags of their own zeroes. A Discard is left to the kernel, and its blocks
//! are read afterwards: zeroes with tags are then written to the blocks whose tags do not match.

use std::cell::RefCell;
use std::io;

use sealblock_block::{
    Abilities, BadBlock, BadBlockCause, BadBlocks, BlockProbe, Device, Durability, Error, ErrorKind, Expectations,
    Geometry, Limits, MediumError, Operation, Outcome, Request, RequestKind, Response, find_bad_blocks,
};
use sealblock_integrity::{Sealed, Tags};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::{DeviceChecks, File, pool};
use sealblock_units::{Extent, Lba};

use super::profile::{TagProfile, WhyNoTags};
use crate::block_codec::{BlockCodec, Memory};
use crate::node::{KernelLimits, call_error};

/// Bytes of data in one transfer, the largest allocation of a reactor's arena; the gate splits larger requests.
const TRANSFER_BYTES: usize = 1 << 20;
/// Bytes of one extent of a Discard, whose blocks are read afterwards.
const DISCARD_BYTES: u64 = 64 << 20;
/// The contents of the memory for tags before a read.
const PATTERN: u8 = 0xA5;
/// How often the first block is read to test whether the kernel fills in tags: others may write it meanwhile.
const TRIES: u32 = 4;

/// Reads and writes blocks with tags; tests replace it.
pub trait TaggedIo {
    /// Reads data and metadata from this offset on; the first block has this reference tag. Returns the bytes of data.
    fn read(
        &self,
        data: Buffer,
        metadata: Buffer,
        offset_bytes: u64,
        seed: u64,
    ) -> impl Future<Output = (io::Result<usize>, Buffer, Buffer)>;

    /// Writes data and metadata; the device is to check the fields that it can. Returns the bytes of data.
    fn write(
        &self,
        data: Slice,
        metadata: Buffer,
        offset_bytes: u64,
        seed: u64,
        checks: DeviceChecks,
    ) -> impl Future<Output = io::Result<usize>>;

    /// True if the kernel supports tags of reads and writes: then it refuses meaningless ones.
    fn knows_tags(&self, data: Buffer, metadata: Buffer) -> impl Future<Output = io::Result<bool>>;
}

impl TaggedIo for File {
    async fn read(
        &self,
        data: Buffer,
        metadata: Buffer,
        offset_bytes: u64,
        seed: u64,
    ) -> (io::Result<usize>, Buffer, Buffer) {
        // Blocks are checked here, where the error can name the block and the cause; without requested checks NVMe
        // drives return blocks that do not match.
        self.read_tagged_at(data, metadata, offset_bytes, seed, DeviceChecks::NONE).await
    }

    async fn write(
        &self,
        data: Slice,
        metadata: Buffer,
        offset_bytes: u64,
        seed: u64,
        checks: DeviceChecks,
    ) -> io::Result<usize> {
        self.write_tagged_at(data, metadata, offset_bytes, seed, checks).await.0
    }

    async fn knows_tags(&self, data: Buffer, metadata: Buffer) -> io::Result<bool> {
        self.refuses_unknown_attributes(data, metadata).await
    }
}

/// A block device whose tags are transferred. `D` is the same blocks through the kernel's block I/O without tags, for
/// all requests other than Read and Write.
pub struct TaggedDevice<D, T = File> {
    io: T,
    ordinary: D,
    profile: TagProfile,
    codec: BlockCodec,
    geometry: Geometry,
}

impl<D: Device> TaggedDevice<D> {
    /// Opens the block device that `file` is open on, for direct I/O if `is_direct` says so. It needs no privilege
    /// other than the open file.
    ///
    /// # Errors
    /// The reason why its tags cannot be transferred, with `ordinary` unchanged.
    ///
    /// # Panics
    /// Outside a reactor.
    pub async fn open(file: File, is_direct: bool, ordinary: D) -> Result<TaggedDevice<D>, (WhyNoTags, D)> {
        match TagProfile::of_device(&file, is_direct, ordinary.geometry().block_size) {
            Ok((profile, kernel)) => TaggedDevice::with(file, profile, &kernel, ordinary).await,
            Err(why) => Err((why, ordinary)),
        }
    }
}

impl<D: Device, T: TaggedIo> TaggedDevice<D, T> {
    pub(super) async fn with(
        io: T,
        profile: TagProfile,
        kernel: &KernelLimits,
        ordinary: D,
    ) -> Result<TaggedDevice<D, T>, (WhyNoTags, D)> {
        let plain = ordinary.geometry();
        let (size, shift) = (plain.block_size, plain.block_size.shift());
        let mut most = TRANSFER_BYTES;
        if let Some(bytes) = kernel.transfer_bytes {
            // Metadata are a separate transfer with the same limit.
            let by_metadata = (bytes / profile.metadata_bytes as u64).saturating_mul(size.bytes() as u64);
            most = most.min(usize::try_from(bytes.min(by_metadata)).unwrap_or(usize::MAX));
        }
        let limits = Limits::new(size, most, (DISCARD_BYTES >> shift) as u32);
        let geometry = Geometry { protection: Some(profile.format), limits, ..plain.clone() };
        let codec = BlockCodec::apart(size, profile.format, profile.metadata_bytes, profile.tuple_at);
        let device = TaggedDevice { io, ordinary, profile, codec, geometry };
        match device.probe().await {
            Ok(()) => Ok(device),
            Err(why) => Err((why, device.ordinary)),
        }
    }

    /// The tags.
    pub fn profile(&self) -> &TagProfile {
        &self.profile
    }

    /// Tests whether the kernel transfers tags. A block that cannot be read does not fail this.
    async fn probe(&self) -> Result<(), WhyNoTags> {
        if self.geometry.capacity_blocks == 0 {
            return Err(WhyNoTags::Contradiction("the device has no blocks".to_owned()));
        }
        let (data, metadata) = self.room(Extent::one(Lba::ZERO), PATTERN);
        match self.io.knows_tags(data, metadata).await {
            Ok(true) => {}
            Ok(false) => return Err(WhyNoTags::KernelIgnores),
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => return Err(WhyNoTags::NoUring),
            Err(error) => return Err(WhyNoTags::Probe(error)),
        }
        for _ in 0..TRIES {
            let (Some(one), Some(other)) = (self.probe_with(PATTERN).await?, self.probe_with(!PATTERN).await?) else {
                return Ok(());
            };
            if one[..] == other[..] {
                return Ok(());
            }
        }
        Err(WhyNoTags::NotFilledIn)
    }

    /// The metadata of the first block, read over this pattern; `None` if the block cannot be read.
    async fn probe_with(&self, pattern: u8) -> Result<Option<Buffer>, WhyNoTags> {
        let (data, metadata) = self.room(Extent::one(Lba::ZERO), pattern);
        let length_bytes = data.len();
        match self.io.read(data, metadata, 0, 0).await {
            (Ok(count), _, metadata) if count == length_bytes => Ok(Some(metadata)),
            (Ok(_), ..) => Err(WhyNoTags::Probe(io::ErrorKind::UnexpectedEof.into())),
            (Err(error), ..) if is_about_blocks(&error) => Ok(None),
            (Err(error), ..) => Err(WhyNoTags::Probe(error)),
        }
    }

    /// Memory for a read, with a pattern in place of the metadata.
    fn room(&self, extent: Extent, pattern: u8) -> (Buffer, Buffer) {
        let Memory { data, metadata } = self.codec.room(extent, &pool());
        let mut metadata = metadata.unwrap_or_else(|| Buffer::zeroed(0));
        metadata.fill(pattern);
        (data, metadata)
    }

    fn offset_bytes(&self, lba: Lba) -> u64 {
        lba.get() << self.geometry.block_size.shift()
    }

    /// Reads once. The inner error is one that blocks may be the cause of.
    async fn try_read(&self, extent: Extent) -> Result<Result<Memory<Buffer>, io::Error>, Error> {
        let (data, metadata) = self.room(extent, PATTERN);
        let length_bytes = data.len();
        let start = extent.start();
        match self.io.read(data, metadata, self.offset_bytes(start), start.get()).await {
            (Ok(count), data, metadata) if count == length_bytes => Ok(Ok(Memory { data, metadata: Some(metadata) })),
            (Ok(count), ..) => Err(cut_off("read", extent, count, length_bytes)),
            (Err(error), ..) if is_about_blocks(&error) => Ok(Err(error)),
            (Err(error), ..) => Err(call_error("a read with tags", &error)),
        }
    }

    async fn read(&self, extent: Extent, expectations: &Expectations) -> Outcome {
        let failed = match self.try_read(extent).await? {
            Ok(memory) => return self.codec.check_read(extent, memory, expectations, &pool()),
            Err(failed) => failed,
        };
        let search = Search { device: self, mismatches: RefCell::default() };
        let mut bad_blocks = find_bad_blocks(&search, extent, &failed).await?;
        bad_blocks.extend(search.mismatches.take());
        if let Some(bad_blocks) = BadBlocks::new(bad_blocks) {
            return Err(bad_blocks.into());
        }
        // The search read every block, so the failure was transient.
        match self.try_read(extent).await? {
            Ok(memory) => self.codec.check_read(extent, memory, expectations, &pool()),
            Err(failed) => Err(call_error("a read with tags", &failed)),
        }
    }

    async fn write(&self, extent: Extent, blocks: &Sealed) -> Result<(), Error> {
        let Memory { mut data, metadata } = self.codec.memory_of(blocks, &pool());
        if !data.as_ptr().addr().is_multiple_of(self.geometry.block_size.bytes()) {
            let mut aligned = pool().take(data.len());
            aligned.copy_from_slice(&data);
            data = aligned.freeze();
        }
        let tags = metadata.unwrap_or_else(Slice::empty);
        // The kernel may change them, so they are not shared.
        let mut metadata = pool().take(tags.len());
        metadata.copy_from_slice(&tags);
        let is_counted = self.profile.format.protection().increments_ref_tag();
        let checks = DeviceChecks { guard: true, ref_tag: is_counted };
        let (start, length_bytes) = (extent.start(), data.len());
        let offset_bytes = self.offset_bytes(start);
        match self.io.write(data, metadata, offset_bytes, start.get(), checks).await {
            Ok(count) if count == length_bytes => Ok(()),
            Ok(count) => Err(cut_off("write", extent, count, length_bytes)),
            Err(error) if error.raw_os_error() == Some(libc::EILSEQ) => {
                let reason = format!("on the way to the device {extent} no longer matched its tags: {error}");
                Err(ErrorKind::Media { reason }.into())
            }
            // Fails like a write without tags: a full device is not reported as a bad one.
            Err(error) => Err(MediumError::from_io("write with tags", offset_bytes, &error).into()),
        }
    }

    /// Waits for the medium if the request requires it.
    async fn sync_if_required(&self, durability: Durability) -> Outcome {
        match durability {
            Durability::Volatile => Ok(Response::Done),
            Durability::ForceUnitAccess => self.ordinary.execute(Request::flush()).await,
        }
    }

    /// Discards, and makes what is left match its tags.
    async fn discard(&self, extents: Vec<Extent>) -> Outcome {
        self.ordinary.execute(Request::discard(extents.iter().copied())).await?;
        let most = self.geometry.limits.max_transfer_blocks;
        for piece in extents.into_iter().flat_map(|extent| extent.split_aligned(most)) {
            let left = self.read(piece, &Expectations::NONE).await;
            let Err(error) = left else { continue };
            let Some(bad_blocks) = error.bad_blocks() else { return Err(error) };
            for bad_block in bad_blocks.as_slice() {
                let zeroes = Buffer::zeroed(self.geometry.block_size.bytes()).freeze();
                let tags = Tags { initial_ref_tag: bad_block.lba.get(), ..Tags::default() };
                let zeroes = Sealed::seal(zeroes, self.geometry.block_size, Some(self.profile.format), &tags);
                self.write(Extent::one(bad_block.lba), &zeroes).await?;
            }
        }
        Ok(Response::Done)
    }
}

impl<D: Device, T: TaggedIo> Device for TaggedDevice<D, T> {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        let ordinary = self.ordinary.abilities();
        Abilities { writable: ordinary.writable, seals: true, ..Abilities::BASIC }
            .with([RequestKind::Discard], ordinary.get(RequestKind::Discard))
            .with([RequestKind::BlockStatus], ordinary.get(RequestKind::BlockStatus))
    }

    async fn execute(&self, request: Request) -> Outcome {
        let kind = request.kind();
        let Request { operation, extents, durability } = request;
        match operation {
            Operation::Read(expectations) => self.read(extents.one(), &expectations).await,
            Operation::Write(data) => {
                self.write(extents.one(), &data.into_sealed()).await?;
                self.sync_if_required(durability).await
            }
            Operation::Discard => self.discard(extents.to_vec()).await,
            Operation::Flush => self.ordinary.execute(Request::flush()).await,
            Operation::BlockStatus => self.ordinary.execute(Request::block_status(extents.one())).await,
            Operation::Verify(_)
            | Operation::Compare(_)
            | Operation::CompareAndWrite(_)
            | Operation::WriteZeroes { .. }
            | Operation::WriteUncorrectable { .. }
            | Operation::Copy { .. }
            | Operation::Checksum(..)
            | Operation::Repair
            | Operation::Salvage
            | Operation::ReadReserved(_)
            | Operation::WriteReserved(..) => Err(ErrorKind::Absent(kind).into()),
        }
    }
}

/// Reads runs of blocks, and remembers which of the readable ones do not match their tags.
struct Search<'a, D, T> {
    device: &'a TaggedDevice<D, T>,
    mismatches: RefCell<Vec<BadBlock>>,
}

impl<D: Device, T: TaggedIo> BlockProbe for Search<'_, D, T> {
    type Failed = io::Error;

    async fn probe(&self, run: Extent) -> Result<Option<io::Error>, Error> {
        let memory = match self.device.try_read(run).await? {
            Ok(memory) => memory,
            Err(failed) => return Ok(Some(failed)),
        };
        if let Err(error) = self.device.codec.check_read(run, memory, &Expectations::NONE, &pool()) {
            let bad_blocks = error.bad_blocks().map(|bad_blocks| bad_blocks.as_slice().to_vec());
            self.mismatches.borrow_mut().extend(bad_blocks.unwrap_or_default());
        }
        Ok(None)
    }

    /// If a device does not return blocks that do not match their tags, the field that differs is unknown.
    fn cause(&self, _: &io::Error) -> BadBlockCause {
        BadBlockCause::Media
    }

    async fn hints(&self, _: Extent, _: &io::Error) -> Vec<Lba> {
        Vec::new()
    }

    async fn named(&self, _: Extent, _: &io::Error) -> Option<Lba> {
        None
    }

    fn describe(&self, failed: &io::Error) -> String {
        failed.to_string()
    }
}

/// True for the errors with which the kernel reports unreadable blocks: tags that did not match in the device, errors
/// of the medium, and others.
fn is_about_blocks(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EILSEQ | libc::ENODATA | libc::EIO))
}

fn cut_off(doing: &str, extent: Extent, count: usize, length_bytes: usize) -> Error {
    let reason = format!("the {doing} of {extent} with tags ended after {count} of {length_bytes} bytes");
    ErrorKind::Media { reason }.into()
}
