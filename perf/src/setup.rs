//! Files for measurements: raw ones and protected volumes, both in the same state of preallocation.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::str::FromStr;

use anyhow::{Context, bail};
use sealblock_block::{DynDevice, Gate, Medium};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_media_file::{FileMedium, Options, RawDevice};
use sealblock_media_memory::MemoryMedium;
use sealblock_media_volume::format::{Container, Layout};
use sealblock_media_volume::shards::create_shards;
use sealblock_media_volume::{CreateOptions, OpenOptions, Volume, create, open, probe};
use sealblock_runtime_reactor::{Config, JoinHandle, Reactor, pool, spawn};
use sealblock_units::BlockSize;

use crate::counted::{Counted, Counts};
use crate::load::{self, Load, Until};
use crate::medium::AnyMedium;
pub use crate::medium::{Turn, TurnClock};

/// Sectors of media in memory.
const MEMORY_SECTOR_BYTES: u32 = 512;
/// The salt of checksums; files of one run may share it.
const UUID: [u8; 16] = *b"sealblock-perf!!";

/// A guard kind in Type 1, or none.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Protection(pub Option<PiFormat>);

impl Protection {
    /// The default of `sealblock create`.
    pub const CRC32C: Protection =
        Protection(Some(PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type1)));

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        self.0.map_or("none", |format| format.guard().as_str())
    }
}

impl FromStr for Protection {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> anyhow::Result<Protection> {
        let Some(kind) = GuardKind::ALL.into_iter().find(|kind| kind.as_str() == name) else {
            return if name == "none" { Ok(Protection(None)) } else { bail!("'{name}' is no guard") };
        };
        Ok(Protection(Some(PiFormat::with_default_storage_tag(kind, ProtectionType::Type1))))
    }
}

/// The state of a file's blocks before the measurement.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Prepared {
    /// Space is reserved (`fallocate`); no block was ever written.
    Reserved,
    /// Every byte of the file was written, and then every block of the device.
    Written,
}

/// A file that is removed on drop.
pub struct Scratch(pub PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // If it cannot be removed, it is left for the user.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The type of every measured volume.
pub type PerfVolume = Volume<Counted, TurnClock>;

/// An open protected volume with its worker.
pub struct OpenVolume {
    /// The volume.
    pub gate: Rc<Gate<Rc<PerfVolume>>>,
    /// True while its clock runs.
    pub on_turn: Turn,
    worker: JoinHandle<()>,
    /// The counters of its medium.
    pub counts: Counts,
}

/// Writes every block once.
pub const FILL: Load = Load { name: "fill", write: true, blocks: 256, random: false, depth: 8, flush_every: 0 };

/// A path for a new file.
pub fn new_path(dir: &Path, name: &str) -> anyhow::Result<Scratch> {
    let path = dir.join(format!("sealblock-perf-{}-{}", std::process::id(), name.replace(' ', "-")));
    let _ = std::fs::remove_file(&path);
    Ok(Scratch(path))
}

/// A new file whose space is reserved or written, with direct I/O. On tmpfs there is none, and no disk either.
pub async fn new_file(path: &Path, bytes: u64, prepared: Prepared) -> anyhow::Result<FileMedium> {
    let medium = FileMedium::open(path, Options::CREATE)?;
    let is_in_memory = medium.describe()?.file_system.as_deref() == Some("tmpfs");
    anyhow::ensure!(medium.is_direct() || is_in_memory, "{} has no direct I/O", path.display());
    medium.set_len_bytes(bytes)?;
    reserve(path, bytes)?;
    if prepared == Prepared::Written {
        let mut zeroes = pool().take(load::PAYLOAD_BYTES);
        zeroes.fill(0);
        let zeroes = zeroes.freeze();
        for offset in (0..bytes).step_by(zeroes.len()) {
            let length = (bytes - offset).min(zeroes.len() as u64) as usize;
            medium.write(offset, zeroes.slice(..length)).await?;
        }
    }
    medium.sync().await?;
    Ok(medium)
}

/// Reserves space for every byte of a file without writing it.
fn reserve(path: &Path, bytes: u64) -> anyhow::Result<()> {
    let file = std::fs::OpenOptions::new().write(true).open(path)?;
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes).context("reserving space")
}

/// The sector size of a file at this path, on which the length of a volume depends. It is known only of an open file.
async fn sector_bytes_at(path: &Path) -> anyhow::Result<u32> {
    let sector_bytes = new_file(path, 1 << 20, Prepared::Reserved).await?.sector_bytes();
    std::fs::remove_file(path)?;
    Ok(sector_bytes)
}

/// A new volume in a new file, whose space is reserved or written, including physical blocks that are never used.
pub async fn new_volume(path: &Path, blocks: u64, guard: Protection, prepared: Prepared) -> anyhow::Result<Layout> {
    let layout = Layout::new(BlockSize::B4096, sector_bytes_at(path).await?, blocks)?;
    let medium = AnyMedium::File(new_file(path, layout.medium_bytes(), prepared).await?);
    let shape = shape(blocks, guard);
    create(&medium, &shape).await?;
    // Creating a volume punches holes for its tables, so the space is reserved again.
    reserve(path, layout.medium_bytes())?;
    medium.sync().await?;
    Ok(layout)
}

/// A new volume in a new sparse file, which gets space only for written blocks.
pub async fn sparse_volume(path: &Path, blocks: u64, guard: Protection) -> anyhow::Result<()> {
    let medium = FileMedium::open(path, Options::CREATE)?;
    let layout = Layout::new(BlockSize::B4096, medium.sector_bytes(), blocks)?;
    medium.set_len_bytes(layout.medium_bytes())?;
    let medium = AnyMedium::File(medium);
    create(&medium, &shape(blocks, guard)).await?;
    Ok(medium.sync().await?)
}

/// A new volume in shards, in a new file whose space is reserved.
pub async fn new_shards(path: &Path, blocks: u64, guard: Protection, shards: u32) -> anyhow::Result<()> {
    let shape = shape(blocks, guard);
    let profile = (shape.block_size, sector_bytes_at(path).await?);
    let container = Container::new(shape.uuid, profile, blocks, shape.protection, (shards, 0))?;
    let medium = new_file(path, container.medium_bytes(), Prepared::Reserved).await?;
    create_shards(&AnyMedium::File(medium), &shape, shards).await?;
    reserve(path, container.medium_bytes())
}

/// A volume in memory with every block written, whose worker runs until its core is dropped.
pub async fn memory_volume(blocks: u64, guard: Protection) -> anyhow::Result<DynDevice> {
    let layout = Layout::new(BlockSize::B4096, MEMORY_SECTOR_BYTES, blocks)?;
    let medium = AnyMedium::Memory(MemoryMedium::new(layout.medium_bytes(), MEMORY_SECTOR_BYTES));
    let shape = shape(blocks, guard);
    create(&medium, &shape).await?;
    let opened = open(Counted::not(medium), TurnClock::new(Turn::endless()), &OpenOptions::default()).await?;
    drop(spawn(opened.worker.run()));
    let gate = Rc::new(Gate::new("volume", opened.volume));
    load::drive(Rc::clone(&gate), FILL, Until::Asked(blocks / FILL.blocks), 1).await?;
    Ok(DynDevice::from(gate))
}

/// A new volume of blocks of 4 KiB.
fn shape(capacity_blocks: u64, guard: Protection) -> CreateOptions {
    let (block_size, protection) = (BlockSize::B4096, guard.0);
    CreateOptions { block_size, capacity_blocks, protection, uuid: UUID, preallocate: false }
}

/// Makes and removes a file in this folder.
///
/// # Errors
/// Why the folder does not support files.
pub fn takes_files(dir: &Path) -> anyhow::Result<()> {
    let scratch = new_path(dir, "folder")?;
    std::fs::File::create(&scratch.0).with_context(|| format!("making a file in {}", dir.display()))?;
    Ok(())
}

/// True if files in this folder support direct I/O. Must not be called from a reactor.
pub fn has_direct_io(dir: &Path) -> anyhow::Result<bool> {
    let scratch = new_path(dir, "direct")?;
    let opened = Reactor::new(Config::default())?.block_on(async {
        let medium = FileMedium::open(&scratch.0, Options::CREATE)?;
        anyhow::Ok(medium.is_direct())
    });
    opened.with_context(|| format!("making a file in {}", dir.display()))
}

/// A raw file with every block written, in `dir`.
pub async fn filled_file(dir: &Path, name: &str, blocks: u64) -> anyhow::Result<Scratch> {
    let scratch = new_path(dir, name)?;
    let medium = new_file(&scratch.0, blocks << BlockSize::B4096.shift(), Prepared::Written).await?;
    let device = Rc::new(Gate::new("raw", RawDevice::new(medium, BlockSize::B4096)?));
    load::drive(device, FILL, Until::Asked(blocks / FILL.blocks), 1).await?;
    Ok(scratch)
}

/// A raw file in which every block is written, as a device.
pub async fn raw_device(dir: &Path, name: &str, blocks: u64) -> anyhow::Result<(Rc<DynDevice>, Scratch)> {
    let scratch = filled_file(dir, name, blocks).await?;
    let medium = FileMedium::open(&scratch.0, Options::WRITE)?;
    Ok((Rc::new(DynDevice::new("file", RawDevice::new(medium, BlockSize::B4096)?)), scratch))
}

/// An open volume in a file in which every block is written, with CRC-32C.
pub async fn volume_device(dir: &Path, name: &str, blocks: u64) -> anyhow::Result<(OpenVolume, Scratch)> {
    let (scratch, _) = filled_volume(dir, name, blocks, Protection::CRC32C, Prepared::Reserved).await?;
    Ok((open_volume(&scratch.0, Turn::endless()).await?, scratch))
}

/// A volume with every block written, closed, in `dir`.
pub async fn filled_volume(
    dir: &Path,
    name: &str,
    blocks: u64,
    guard: Protection,
    prepared: Prepared,
) -> anyhow::Result<(Scratch, Layout)> {
    let scratch = new_path(dir, name)?;
    let layout = new_volume(&scratch.0, blocks, guard, prepared).await?;
    open_volume(&scratch.0, Turn::endless()).await?.fill_and_close(blocks).await?;
    Ok((scratch, layout))
}

/// Opens a volume for writing and starts its worker, whose clock runs while `on_turn` is set.
pub async fn open_volume(path: &Path, on_turn: Turn) -> anyhow::Result<OpenVolume> {
    let medium = AnyMedium::File(FileMedium::open(path, Options::WRITE)?);
    let layout = probe(&medium).await?.layout;
    let medium = Counted::new(medium, layout, false);
    let counts = medium.counts();
    let opened = open(medium, TurnClock::new(on_turn.clone()), &OpenOptions::default()).await?;
    let worker = spawn(opened.worker.run());
    Ok(OpenVolume { gate: Rc::new(Gate::new("volume", opened.volume)), on_turn, worker, counts })
}

impl OpenVolume {
    /// The volume as a part of a larger stack.
    pub fn stack(&self) -> DynDevice {
        DynDevice::from(Rc::clone(&self.gate))
    }

    /// The volume as a device.
    pub fn device(&self) -> Rc<impl sealblock_block::Device + use<>> {
        Rc::clone(&self.gate)
    }

    /// Closes the volume.
    pub async fn close(self) -> anyhow::Result<()> {
        self.gate.device().close().await?;
        self.worker.await?;
        Ok(())
    }

    /// Writes every block and closes the volume.
    pub async fn fill_and_close(self, blocks: u64) -> anyhow::Result<()> {
        load::drive(Rc::clone(&self.gate), FILL, Until::Asked(blocks / FILL.blocks), 1).await?;
        self.close().await
    }
}
