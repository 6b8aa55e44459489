//! Devices with protection information over images that have none: each block lies with its tuple in a unit of several
//! blocks of the image, which a power cut never tears.
//!
//! Such images have blocks of 512 bytes, and all others have blocks of 4096. That tells them apart.

use futures_executor::block_on;
use sealblock_block::{
    Abilities, Ability, BadBlock, BadBlocks, Device, Durability, DynDevice, Expectations, Geometry, Limits, Operation,
    Outcome, Request, RequestKind, Response,
};
use sealblock_btrfs::tags::tags_of;
use sealblock_btrfs_engine::format::FormatOptions;
use sealblock_integrity::{Checks, Sealed, Unsealed, Unverified};
use sealblock_recorder::{CrashOptions, Image};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};

use crate::disks::{FORMAT, format_writes};

const BLOCK: usize = 4096;
const TUPLE: usize = FORMAT.tuple_bytes();
/// The blocks of the image that a block takes with its tuple.
const UNIT_BLOCKS: u64 = 9;
const UNIT: usize = UNIT_BLOCKS as usize * 512;

/// The device itself, or one with protection information if its image is for that.
pub fn with_tags(device: DynDevice) -> DynDevice {
    let inner = device.geometry();
    if inner.block_size != BlockSize::B512 {
        return device;
    }
    let (block_size, capacity_blocks) = (BlockSize::B4096, inner.capacity_blocks / UNIT_BLOCKS);
    let limits = Limits::new(block_size, 1 << 20, 1 << 20);
    let geometry = Geometry { block_size, capacity_blocks, protection: Some(FORMAT), limits };
    DynDevice::new(device.name().to_owned(), TaggedDevice { geometry, inner: device })
}

struct TaggedDevice {
    geometry: Geometry,
    inner: DynDevice,
}

impl TaggedDevice {
    async fn read(&self, extent: Extent) -> Outcome {
        let stored = match self.inner.execute(Request::read(inner(&extent), Expectations::NONE)).await? {
            Response::Data(stored) => stored.joined_data(),
            other => panic!("{other:?}"),
        };
        let (mut data, mut tuples) = (Vec::new(), Vec::new());
        for unit in stored.chunks(UNIT) {
            data.extend_from_slice(&unit[..BLOCK]);
            let tuple = &unit[BLOCK..BLOCK + TUPLE];
            // No block has this tuple, so it was never written, or it was deallocated.
            let is_written = tuple.iter().any(|byte| *byte != 0);
            tuples.extend(tuple.iter().map(|byte| if is_written { *byte } else { 0xFF }));
        }
        let (data, tuples) = (Slice::copy_from(&data), Slice::copy_from(&tuples));
        let blocks = Unverified::new(data, tuples, self.geometry.block_size, Some(FORMAT)).expect("whole units");
        match blocks.verify(&Checks::full(FORMAT, extent.start())) {
            Ok(sealed) => Ok(Response::Data(sealed)),
            Err(found) => {
                let bad = found.iter().map(|mismatch| BadBlock::of_mismatch(extent.start(), mismatch)).collect();
                BadBlocks::fail_if_any(bad)?;
                unreachable!("there is a mismatch")
            }
        }
    }

    async fn write(&self, extent: Extent, sealed: Sealed, durability: Durability) -> Outcome {
        let mut stored = Vec::with_capacity(sealed.blocks() * UNIT);
        for (data, tuple) in sealed.iter() {
            let start = stored.len();
            stored.extend_from_slice(data);
            stored.extend_from_slice(tuple);
            stored.resize(start + UNIT, 0);
        }
        let unsealed = Unsealed::new(Slice::copy_from(&stored), BlockSize::B512, None, tags_of(None, 0));
        self.inner.execute(Request::write(inner(&extent), unsealed, durability)).await
    }
}

fn inner(extent: &Extent) -> Extent {
    Extent::from_raw(extent.start().get() * UNIT_BLOCKS, extent.len() * UNIT_BLOCKS).unwrap()
}

impl Device for TaggedDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        Abilities { unmap_zeroes: true, seals: true, ..Abilities::BASIC }
            .with([RequestKind::WriteZeroes, RequestKind::Discard], Ability::Native)
    }

    async fn execute(&self, request: Request) -> Outcome {
        let durability = request.durability;
        match request.operation {
            Operation::Read(_) => self.read(request.extents.one()).await,
            Operation::Write(data) => self.write(request.extents.one(), data.into_sealed(), durability).await,
            Operation::WriteZeroes { may_unmap } => {
                let request = Request::write_zeroes(inner(&request.extents.one()), may_unmap, durability);
                self.inner.execute(request).await
            }
            Operation::Discard => self.inner.execute(Request::discard(request.extents.iter().map(inner))).await,
            Operation::Flush => self.inner.execute(request).await,
            other => panic!("{other:?}"),
        }
    }
}

/// Images of a new filesystem without checksums on devices of this size.
pub fn images_without_checksums(devices: usize, mebibytes: u64, options: FormatOptions) -> Vec<Image> {
    let blocks = (mebibytes << 20) / BLOCK as u64 * UNIT_BLOCKS;
    let blank = || Image::blank(BlockSize::B512, blocks).watched_device("new");
    let (made, watched): (Vec<_>, Vec<_>) =
        (0..devices).map(|_| blank()).map(|(device, watched)| (with_tags(device), watched)).unzip();
    for one in format_writes(devices, mebibytes << 20, options) {
        let device = &made[one.devid as usize - 1];
        let extent =
            Extent::from_raw(one.offset / BLOCK as u64, (one.bytes.len() / BLOCK) as u64).expect("whole blocks");
        let tags = tags_of(one.tag, extent.start().get());
        let data = Unsealed::new(Slice::copy_from(&one.bytes), BlockSize::B4096, Some(FORMAT), tags);
        block_on(device.execute(Request::write(extent, data, Durability::Volatile))).unwrap();
    }
    watched.iter().map(|watched| watched.image()).collect()
}

/// The same states of such images: units are not torn.
pub fn of_units(options: CrashOptions) -> CrashOptions {
    let superblocks = options.superblocks.iter().map(|offset| offset / BLOCK as u64 * UNIT as u64).collect();
    CrashOptions { sector_bytes: UNIT as u32, superblocks, superblock_bytes: UNIT as u64, ..options }
}
