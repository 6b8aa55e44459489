//! Filesystems in memory that the kernel filled: their devices, and the place of each sector of each file, found by its
//! content and without the code under test.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use futures_util::FutureExt;
use sealblock_block::{Device, Durability, DynDevice, Expectations, Request};
use sealblock_btrfs::{Candidate, Filesystem, OpenOptions};
use sealblock_integrity::{PiFormat, Sealed, Tags};
use sealblock_media_memory::{Corruption, MemoryDevice};
use sealblock_proofs_btrfs_images::programs::{Mount, mkfs};
use sealblock_proofs_btrfs_images::skip;
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent, Lba};

const IMAGE_BYTES: u64 = 256 << 20;
pub const SECTOR: usize = 4096;

/// The options of a filesystem.
#[derive(Clone, Copy)]
pub struct Setup {
    pub data: &'static str,
    pub metadata: &'static str,
    pub devices: usize,
    pub checksum: &'static str,
}

impl Setup {
    pub const SINGLE: Setup = Setup { data: "single", metadata: "dup", devices: 1, checksum: "crc32c" };
    pub const MIRRORED: Setup = Setup { data: "raid1", metadata: "raid1", devices: 2, checksum: "crc32c" };
}

/// Makes a filesystem in files and fills it; prints to standard error if it cannot.
pub fn make(folder: &Path, setup: Setup, fill: impl Fn(&Path)) -> Option<Vec<PathBuf>> {
    let images: Vec<PathBuf> = (0..setup.devices).map(|number| folder.join(format!("image-{number}"))).collect();
    let options = ["-d", setup.data, "-m", setup.metadata, "--csum", setup.checksum];
    let made = mkfs(&images, IMAGE_BYTES >> 20, &options).and_then(|()| mounted(&images, fill));
    made.map_err(|why| skip(&format!("{}: {why}", setup.data))).ok().map(|()| images)
}

/// Mounts the filesystem in files, runs an action on it, and unmounts it.
pub fn mounted(images: &[PathBuf], fill: impl Fn(&Path)) -> Result<(), String> {
    let mount = Mount::new(images, "noatime")?;
    fill(&mount.path(""));
    mount.unmount()
}

/// The content of file `number`: every eight bytes have their offset.
pub fn content(number: u64, bytes: usize) -> Vec<u8> {
    let words = (0..bytes.div_ceil(8) as u64).flat_map(|word| (number << 40 | (word * 8 + 1)).to_le_bytes());
    words.take(bytes).collect()
}

/// A sector of a file, and a copy of it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct SectorCopy {
    pub devid: u64,
    pub place: u64,
    pub file: u64,
    pub offset: u64,
}

/// The devices of a filesystem in memory.
pub struct Devices {
    pub all: Vec<Rc<MemoryDevice>>,
    /// Every copy of every whole sector of files that [`content`] made.
    pub sectors: Vec<SectorCopy>,
}

impl Devices {
    /// Reads images into devices with or without protection information.
    pub fn load(images: &[PathBuf], protection: Option<PiFormat>) -> Devices {
        let (mut all, mut sectors) = (Vec::new(), Vec::new());
        for (index, image) in images.iter().enumerate() {
            let (file, size) = (File::open(image).unwrap(), BlockSize::B4096);
            let device = Rc::new(MemoryDevice::new(size, IMAGE_BYTES / SECTOR as u64, protection));
            let mut chunk = vec![0; 1 << 20];
            for at in (0..IMAGE_BYTES).step_by(chunk.len()) {
                file.read_exact_at(&mut chunk, at).unwrap();
                if chunk.iter().all(|byte| *byte == 0) {
                    continue;
                }
                let extent = Extent::from_raw(at >> size.shift(), (chunk.len() / SECTOR) as u64).unwrap();
                let tags = Tags { initial_ref_tag: extent.start().get(), ..Tags::default() };
                let sealed = Sealed::seal(Slice::copy_from(&chunk), size, protection, &tags);
                let write = Request::write(extent, sealed, Durability::Volatile);
                now(Device::execute(&device, write)).unwrap();
                let of_files = chunk.chunks(SECTOR).enumerate().filter_map(|(sector, bytes)| {
                    let (file, offset) = file_of(bytes)?;
                    Some(SectorCopy { devid: index as u64 + 1, place: at + (sector * SECTOR) as u64, file, offset })
                });
                sectors.extend(of_files);
            }
            all.push(device);
        }
        Devices { all, sectors }
    }

    /// Inverts a bit of a byte of a device.
    pub fn damage(&self, devid: u64, place: u64) {
        let damage = Corruption::Data { at: place as usize % SECTOR, mask: 0x10 };
        assert!(self.all[devid as usize - 1].damage(Lba::new(place / SECTOR as u64), damage), "{devid} {place}");
    }

    pub fn read(&self, devid: u64, place: u64, bytes: usize) -> Vec<u8> {
        let extent = Extent::from_raw(place / SECTOR as u64, (bytes / SECTOR) as u64).unwrap();
        let request = Request::read(extent, Expectations::NONE);
        match now(Device::execute(&self.all[devid as usize - 1], request)).unwrap() {
            sealblock_block::Response::Data(data) => data.joined_data().to_vec(),
            other => panic!("{other:?}"),
        }
    }

    pub fn write(&self, devid: u64, place: u64, bytes: &[u8]) {
        let extent = Extent::from_raw(place / SECTOR as u64, (bytes.len() / SECTOR) as u64).unwrap();
        let sealed = Sealed::seal(Slice::copy_from(bytes), BlockSize::B4096, None, &Tags::default());
        let write = Request::write(extent, sealed, Durability::Volatile);
        now(Device::execute(&self.all[devid as usize - 1], write)).unwrap();
    }

    /// Opens the filesystem without some of its devices.
    pub fn open_without(&self, missing: &[u64]) -> Filesystem {
        self.open_as(missing, |device| DynDevice::new("memory", device))
    }

    pub fn open(&self) -> Filesystem {
        self.open_without(&[])
    }

    pub fn open_as(&self, missing: &[u64], of: impl Fn(Rc<MemoryDevice>) -> DynDevice) -> Filesystem {
        let there = (1..).zip(&self.all).filter(|(devid, _)| !missing.contains(devid));
        let candidate = |(devid, device): (u64, &Rc<MemoryDevice>)| Candidate {
            name: format!("device-{devid}"),
            device: of(Rc::clone(device)),
        };
        now(Filesystem::open(there.map(candidate).collect(), OpenOptions::default())).unwrap()
    }
}

/// The file and offset that a sector belongs to, if the whole sector matches.
fn file_of(sector: &[u8]) -> Option<(u64, u64)> {
    let word = u64::from_le_bytes(*sector.first_chunk()?);
    let (file, offset) = (word >> 40, (word & ((1 << 40) - 1)).checked_sub(1)?);
    let is_one = (1..100).contains(&file) && offset % SECTOR as u64 == 0;
    (is_one && sector == &content_at(file, offset)[..]).then_some((file, offset))
}

fn content_at(file: u64, offset: u64) -> Vec<u8> {
    (0..SECTOR as u64 / 8).flat_map(|word| (file << 40 | (offset + word * 8 + 1)).to_le_bytes()).collect()
}

/// Devices in memory complete at once, so the future never waits.
pub fn now<T>(future: impl Future<Output = T>) -> T {
    future.now_or_never().expect("memory never waits")
}

/// Numbers from a seed, the same on every machine.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((u128::from(self.0) * bound as u128) >> 64) as usize
    }
}
