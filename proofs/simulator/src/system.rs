//! What is put to the test: protected volumes, or anything else that keeps blocks on a medium.

use std::fmt;
use std::pin::Pin;

use sealblock_block::{Gate, Stack};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_media_volume::format::Layout;
use sealblock_media_volume::{CreateOptions, Mutation, OpenOptions, create, open};
use sealblock_units::BlockSize;

use crate::disk::SimDisk;
use crate::executor::Executor;
use crate::random::Random;
use crate::workload::Workload;

/// Blocks of a full zone of a protected volume with the smaller blocks.
pub const ZONE_BLOCKS: u64 = 1 << 18;

/// The shape of a device under test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Size of a block.
    pub block_size: BlockSize,
    /// Bytes of a sector of the disk.
    pub sector_bytes: u32,
    /// Blocks of the device.
    pub capacity_blocks: u64,
    /// Format of the protection information.
    pub protection: Option<PiFormat>,
    /// Memory for what the device caches, in bytes.
    pub cache_bytes: usize,
    /// Identity of the device.
    pub uuid: [u8; 16],
}

impl Shape {
    /// Draws a shape that fits a load.
    pub fn draw(workload: Workload, random: &Random) -> Shape {
        let small = matches!(workload, Workload::Zones | Workload::Wide) || random.chance(50);
        let block_size = if small { BlockSize::B512 } else { BlockSize::B4096 };
        let sector_bytes = if small { 512 } else { *random.pick(&[512, 4096]) };
        let capacity_blocks = match workload {
            Workload::Zones => ZONE_BLOCKS + random.between(1, 500),
            Workload::Wide => random.between(4_000, 12_000),
            Workload::Laps => random.between(8, 100),
            _ => *random.pick(&[random.between(4, 40), random.between(40, 200), random.between(200, 700)]),
        };
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&random.word().to_le_bytes());
        let cache_bytes = *random.pick(&[0, 64 << 10, 1 << 20]);
        Shape { block_size, sector_bytes, capacity_blocks, protection: draw_format(random), cache_bytes, uuid }
    }
}

fn draw_format(random: &Random) -> Option<PiFormat> {
    if random.chance(8) {
        return None;
    }
    let guard = *random.pick(&GuardKind::ALL);
    let protection = *random.pick(&ProtectionType::ALL);
    let (least, most) = guard.storage_tag_limits();
    let bits = if random.chance(70) { least } else { random.between(u64::from(least), u64::from(most)) as u8 };
    PiFormat::new(guard, protection, bits).ok()
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} blocks of {}, sectors of {}, ", self.capacity_blocks, self.block_size, self.sector_bytes)?;
        match self.protection {
            None => write!(f, "no protection"),
            Some(format) => {
                let storage = format.storage_tag_bits();
                write!(f, "{} {:?} storage tag {storage} bits", format.guard(), format.protection())
            }
        }
    }
}

/// Work that does nothing until it is awaited.
pub type Promise<T> = Pin<Box<dyn Future<Output = Result<T, String>>>>;

/// A device that is up.
pub struct Session {
    /// The device, behind its gate.
    pub stack: Stack,
    /// Closes it in good order.
    pub close: Promise<()>,
}

/// Something that makes a device out of a disk.
pub trait System {
    /// Bytes of the disk that a device of this shape needs.
    fn disk_bytes(&self, shape: &Shape) -> u64;

    /// Whether damage to long durable data is found, and not taken for data that never arrived.
    fn finds_damage(&self) -> bool {
        true
    }

    /// How many of a hundred syncs the disk only pretends to do. For tests of the tests.
    fn lie_percent(&self) -> u64 {
        0
    }

    /// Makes an empty device, durable once this returns.
    fn create(&self, disk: SimDisk, shape: Shape) -> Promise<()>;

    /// Brings the device up.
    fn open(&self, disk: SimDisk, executor: Executor, shape: Shape, read_only: bool) -> Promise<Session>;
}

/// Protected volumes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Volumes {
    /// A fault put into the volume, to show that it is noticed.
    pub mutation: Mutation,
}

impl System for Volumes {
    fn disk_bytes(&self, shape: &Shape) -> u64 {
        let layout = Layout::new(shape.block_size, shape.sector_bytes, shape.capacity_blocks);
        layout.expect("drawn shapes are possible").medium_bytes()
    }

    fn create(&self, disk: SimDisk, shape: Shape) -> Promise<()> {
        let options = CreateOptions {
            block_size: shape.block_size,
            capacity_blocks: shape.capacity_blocks,
            protection: shape.protection,
            uuid: shape.uuid,
        };
        Box::pin(async move { create(&disk, &options).await.map_err(|error| error.to_string()) })
    }

    fn open(&self, disk: SimDisk, executor: Executor, shape: Shape, read_only: bool) -> Promise<Session> {
        let options = OpenOptions { read_only, cache_bytes: shape.cache_bytes, mutation: self.mutation };
        Box::pin(async move {
            let opened = open(disk, executor.clone(), &options).await.map_err(|error| error.to_string())?;
            drop(executor.spawn("worker", opened.worker.run()));
            let volume = opened.volume;
            let stack = Stack::new(Gate::new("volume", volume.clone()));
            let close = Box::pin(async move { volume.close().await.map_err(|error| error.to_string()) });
            Ok(Session { stack, close })
        })
    }
}
