//! A new filesystem on a device that is made for it, in memory or in a file, and is gone afterwards.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, ensure};
use sealblock_block::{Device, Durability, DynDevice, Request};
use sealblock_btrfs::{Candidate, Filesystem, OpenOptions};
use sealblock_btrfs_engine::datasum::Datasum;
use sealblock_btrfs_engine::engine::{Engine, EngineOptions};
use sealblock_btrfs_engine::format::{
    DEFAULT_INCOMPAT, FormatOptions, FormattedImage, NewDevice, SECTOR_BYTES, Stage, format,
};
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::items::chunk::Profile;
use sealblock_btrfs_format::items::inode::InodeFlags;
use sealblock_integrity::{Tags, Unsealed};
use sealblock_media_file::{FileMedium, Options as FileOptions, RawDevice};
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};

use super::counting::{CountingDevice, Counts, Transferred};
use super::modes::{Mode, Point};
use crate::engine_files::{create, engine_options, forbid_sums, now};
use crate::setup::{self, OpenVolume, Prepared, Protection};

/// Bytes of a node.
const NODE_BYTES: u32 = 16 << 10;
/// The name of the file that is written.
pub const FILE: &str = "file";

/// Where the device of a turn is.
#[derive(Clone, Copy)]
pub struct Ground<'a> {
    /// A folder, or none for memory.
    pub dir: Option<&'a Path>,
    /// Bytes of the device.
    pub bytes: u64,
}

/// A device with a new filesystem.
pub struct Scratch {
    device: DynDevice,
    counts: Rc<Counts>,
    volume: Option<OpenVolume>,
    /// Removed on drop.
    _file: Option<setup::Scratch>,
}

/// A filesystem that is laid out for one device.
fn image(bytes: u64, metadata: Profile, datasum: Datasum, fsid: [u8; 16]) -> anyhow::Result<FormattedImage> {
    let uuid = || fastrand::u128(1..).to_le_bytes();
    let options = FormatOptions {
        label: Vec::new(),
        fsid,
        chunk_tree_uuid: uuid(),
        subvolume_uuid: uuid(),
        time: now(),
        sector_bytes: SECTOR_BYTES,
        node_bytes: NODE_BYTES,
        checksum: ChecksumType::Crc32c,
        data: Profile::Single,
        metadata,
        incompat: DEFAULT_INCOMPAT,
        block_group_tree: false,
        datasum,
        first_transaction: 1,
        is_host_sealed: false,
    };
    Ok(format(&options, &[NewDevice { bytes, uuid: uuid() }])?)
}

/// Writes a filesystem to a device that is new, so that nothing is to be erased.
async fn write_image(image: &FormattedImage, device: &DynDevice) -> anyhow::Result<()> {
    let geometry = device.geometry();
    for stage in image.stages() {
        let Stage::Write(writes) = stage else { continue };
        for one in writes {
            let shift = geometry.block_size.shift();
            let extent = Extent::from_raw(one.offset >> shift, one.bytes.len() as u64 >> shift)?;
            let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: extent.start().get() };
            let data = Unsealed::new(Slice::copy_from(&one.bytes), geometry.block_size, geometry.protection, tags);
            device.execute(Request::write(extent, data, Durability::Volatile)).await?;
        }
        device.execute(Request::flush()).await?;
    }
    Ok(())
}

/// A new image in a file, for the kernel.
pub async fn image_file(path: &Path, ground: Ground<'_>, metadata: Profile) -> anyhow::Result<()> {
    let medium = match ground.dir {
        Some(_) => setup::new_file(path, ground.bytes, Prepared::Reserved).await?,
        // Memory is used as it is written.
        None => {
            let medium = FileMedium::open(path, FileOptions::CREATE)?;
            medium.set_len_bytes(ground.bytes)?;
            medium
        }
    };
    let device = DynDevice::new("image", RawDevice::new(medium, BlockSize::B4096)?);
    let fsid = fastrand::u128(1..).to_le_bytes();
    write_image(&image(ground.bytes, metadata, Datasum::Csum, fsid)?, &device).await
}

impl Scratch {
    /// Makes a device and a filesystem on it.
    pub async fn new(mode: Mode, point: &Point, ground: Ground<'_>) -> anyhow::Result<Scratch> {
        let fsid = fastrand::u128(1..).to_le_bytes();
        let (counts, blocks) = (Counts::new(fsid, NODE_BYTES), ground.bytes >> BlockSize::B4096.shift());
        let protection = mode.has_protection().then_some(Protection::CRC32C.0).flatten();
        let (device, volume, file) = match ground.dir {
            None => {
                let memory = MemoryDevice::new(BlockSize::B4096, blocks, protection);
                let counting = CountingDevice { device: memory, counts: Rc::clone(&counts) };
                (DynDevice::new("memory", counting), None, None)
            }
            Some(dir) if mode.has_protection() => {
                let file = setup::new_path(dir, mode.name())?;
                setup::new_volume(&file.0, blocks, Protection::CRC32C, Prepared::Reserved).await?;
                let volume = setup::open_volume(&file.0, setup::Turn::endless()).await?;
                let counting = CountingDevice { device: volume.stack(), counts: Rc::clone(&counts) };
                (DynDevice::new("volume", counting), Some(volume), Some(file))
            }
            Some(dir) => {
                let file = setup::new_path(dir, mode.name())?;
                let medium = setup::new_file(&file.0, ground.bytes, Prepared::Reserved).await?;
                let raw = RawDevice::new(medium, BlockSize::B4096)?;
                let counting = CountingDevice { device: raw, counts: Rc::clone(&counts) };
                (DynDevice::new("file", counting), None, Some(file))
            }
        };
        let datasum = if mode == Mode::Device { Datasum::Device } else { Datasum::Csum };
        write_image(&image(ground.bytes, point.metadata, datasum, fsid)?, &device).await?;
        Ok(Scratch { device, counts, volume, _file: file })
    }

    /// Opens the filesystem, and makes an empty file in it. Returns its inode number, too.
    pub async fn open(&self, mode: Mode, dirty_bytes: usize) -> anyhow::Result<(Rc<Engine>, u64)> {
        let candidate = Candidate { name: self.device.name().to_owned(), device: self.device.clone() };
        let filesystem = Filesystem::open(vec![candidate], OpenOptions::default()).await?;
        let options = EngineOptions { max_dirty_bytes: dirty_bytes, ..engine_options() };
        let engine = Engine::open(&filesystem, options).await?;
        let flags = if mode == Mode::Nodatacow { InodeFlags::NODATACOW } else { InodeFlags::empty() };
        let ino = create(&engine, FILE, flags).await?;
        match mode {
            Mode::Device => ensure!(engine.devices_without_sums().is_empty(), "the device keeps no checksums of data"),
            Mode::Nodatasum => forbid_sums(&engine, ino).await?,
            _ => {}
        }
        Ok((Rc::new(engine), ino))
    }

    /// What was transferred until now. Tags are what the device stores beside the blocks: for a volume all that its file
    /// gets more than they are.
    pub fn transferred(&self) -> Transferred {
        let counted = self.counts.transferred();
        let Some(volume) = &self.volume else { return counted };
        let blocks = counted.data + counted.superblocks + counted.nodes();
        let written = volume.counts.written_in_all();
        Transferred { tags: written.saturating_sub(blocks), read: volume.counts.read(), ..counted }
    }

    /// Closes the device.
    pub async fn close(self) -> anyhow::Result<()> {
        let Scratch { device, volume, .. } = self;
        drop(device);
        match volume {
            Some(volume) => volume.close().await.context("closing the volume"),
            None => Ok(()),
        }
    }
}

/// Where the image of the kernel's filesystem is made: in the folder, or in memory.
pub fn kernel_dir(ground: &Ground<'_>) -> PathBuf {
    ground.dir.unwrap_or(Path::new("/dev/shm")).to_owned()
}
