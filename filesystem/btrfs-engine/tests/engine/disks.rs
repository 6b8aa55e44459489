//! Devices in memory with the content of images, and the programs that judge what was written to them.

use std::cell::RefCell;
use std::fs::File;
use std::future::poll_fn;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::rc::Rc;
use std::task::Poll;

use futures_executor::block_on;
use sealblock_block::{Abilities, Device, Durability, DynDevice, Expectations, Geometry, Outcome, Request, Response};
use sealblock_btrfs::check::{CheckOptions, check};
use sealblock_btrfs::tags::tags_of;
use sealblock_btrfs::verify::{Mode, Report, Unwatched, VerifyOptions, WhyUnchecked, verify};
use sealblock_btrfs::{Candidate, Filesystem, OpenOptions};
use sealblock_btrfs_engine::datasum::Datasum;
use sealblock_btrfs_engine::format::{
    self, DEFAULT_INCOMPAT, DeviceWrite, FormatOptions, NewDevice, SECTOR_BYTES, Stage,
};
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::items::chunk::Profile;
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_media_memory::MemoryDevice;
use sealblock_proofs_btrfs_images::programs::{Loops, mkfs, run, sparse};
use sealblock_proofs_btrfs_images::{has_mounts, skip};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};

const BLOCK: u64 = 4096;

const PIECE: u64 = 1 << 20;

/// The protection information of the devices.
pub const FORMAT: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type1);

fn one_block(lba: u64) -> Extent {
    Extent::from_raw(lba, 1).unwrap()
}

/// Blocks of a device, with their tags.
pub fn read_blocks(memory: &MemoryDevice, lba: u64, blocks: u64) -> Sealed {
    let extent = Extent::from_raw(lba, blocks).unwrap();
    match block_on(Device::execute(memory, Request::read(extent, Expectations::NONE))) {
        Ok(Response::Data(data)) => data,
        other => panic!("memory can be read: {other:?}"),
    }
}

/// Writes a block of a device with these tags.
pub fn write_block(memory: &MemoryDevice, lba: u64, data: &[u8], tags: Tags) {
    let data = Sealed::seal(Slice::copy_from(data), BlockSize::B4096, Some(FORMAT), &tags);
    block_on(Device::execute(memory, Request::write(one_block(lba), data, Durability::Volatile))).unwrap();
}

/// Lets other tasks have their turns a number of times.
pub async fn turns(mut count: usize) {
    poll_fn(|context| {
        let is_done = count == 0;
        count = count.saturating_sub(1);
        context.waker().wake_by_ref();
        if is_done { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// A device whose requests are executed after other tasks had their turns a few times.
struct WaitingDevice {
    memory: Rc<MemoryDevice>,
    random: Rc<RefCell<fastrand::Rng>>,
}

impl Device for WaitingDevice {
    fn geometry(&self) -> &Geometry {
        self.memory.geometry()
    }

    fn abilities(&self) -> Abilities {
        Device::abilities(&*self.memory)
    }

    async fn execute(&self, request: Request) -> Outcome {
        let count = self.random.borrow_mut().usize(..4);
        turns(count).await;
        Device::execute(&self.memory, request).await
    }
}

/// How filesystems are made here, with two copies of nodes on a device.
pub fn format_options() -> FormatOptions {
    FormatOptions {
        label: b"made here".to_vec(),
        fsid: fastrand::u128(1..).to_le_bytes(),
        chunk_tree_uuid: [0xcc; 16],
        subvolume_uuid: [0xdd; 16],
        time: Timespec { seconds: 1_700_000_000.into(), nanoseconds: 7.into() },
        sector_bytes: SECTOR_BYTES,
        node_bytes: 16_384,
        checksum: ChecksumType::Crc32c,
        data: Profile::Single,
        metadata: Profile::Dup,
        incompat: DEFAULT_INCOMPAT,
        block_group_tree: true,
        datasum: Datasum::Csum,
        first_transaction: 1,
        is_host_sealed: false,
    }
}

/// What is written to devices of this size for a filesystem without checksums. The devices are new, and nothing is to be
/// erased.
pub fn format_writes(devices: usize, bytes: u64, options: FormatOptions) -> Vec<DeviceWrite> {
    let options = FormatOptions { checksum: ChecksumType::None, ..options };
    let new = |_| NewDevice { bytes, uuid: fastrand::u128(1..).to_le_bytes() };
    let made = format::format(&options, &(0..devices).map(new).collect::<Vec<_>>()).unwrap();
    [made.nodes, made.mirrors, made.superblocks].concat()
}

/// Images, and devices in memory with the same content.
pub struct Disks {
    _folder: tempfile::TempDir,
    pub images: Vec<PathBuf>,
    memory: Vec<Rc<MemoryDevice>>,
}

impl Disks {
    /// New filesystems of this size for each device. Prints what is missing if they cannot be made.
    pub fn make(devices: usize, mebibytes: u64, options: &[&str]) -> Option<Disks> {
        has_mounts().map_err(|why| skip(&why)).ok()?;
        let folder = tempfile::tempdir().unwrap();
        let images: Vec<PathBuf> = (0..devices).map(|index| folder.path().join(format!("image{index}"))).collect();
        mkfs(&images, mebibytes, options).map_err(|why| skip(&why)).ok()?;
        Some(Disks::of(folder, images, mebibytes))
    }

    fn of(folder: tempfile::TempDir, images: Vec<PathBuf>, mebibytes: u64) -> Disks {
        let memory = images
            .iter()
            .map(|_| Rc::new(MemoryDevice::new(BlockSize::B4096, (mebibytes << 20) / BLOCK, Some(FORMAT))));
        let disks = Disks { memory: memory.collect(), images, _folder: folder };
        disks.load();
        disks
    }

    /// As [`Disks::make`], but made by this crate, with these profiles of metadata and data, and with a tree of block
    /// groups.
    pub fn format(
        devices: usize,
        mebibytes: u64,
        (metadata, data): (Profile, Profile),
        checksum: ChecksumType,
    ) -> Option<Disks> {
        has_mounts().map_err(|why| skip(&why)).ok()?;
        let folder = tempfile::tempdir().unwrap();
        let images: Vec<PathBuf> = (0..devices).map(|index| folder.path().join(format!("image{index}"))).collect();
        let options = FormatOptions { metadata, data, checksum, ..format_options() };
        let new = |_| NewDevice { bytes: mebibytes << 20, uuid: fastrand::u128(1..).to_le_bytes() };
        let made = format::format(&options, &(0..devices).map(new).collect::<Vec<_>>()).unwrap();
        images.iter().try_for_each(|image| sparse(image, mebibytes)).unwrap();
        for stage in made.stages() {
            // The files are new, and nothing is to be erased.
            let Stage::Write(writes) = stage else { continue };
            for one in writes {
                let file = File::options().write(true).open(&images[one.devid as usize - 1]).unwrap();
                file.write_all_at(&one.bytes, one.offset).unwrap();
            }
        }
        Some(Disks::of(folder, images, mebibytes))
    }

    /// A filesystem without checksums, made by this crate.
    pub fn without_checksums(devices: usize, mebibytes: u64, options: FormatOptions) -> Disks {
        let folder = tempfile::tempdir().unwrap();
        let images: Vec<PathBuf> = (0..devices).map(|index| folder.path().join(format!("image{index}"))).collect();
        images.iter().try_for_each(|image| sparse(image, mebibytes)).unwrap();
        let disks = Disks::of(folder, images, mebibytes);
        for one in format_writes(devices, mebibytes << 20, options) {
            let memory = disks.memory(one.devid as usize - 1);
            for (lba, block) in (one.offset / BLOCK..).zip(one.bytes.chunks(BLOCK as usize)) {
                write_block(memory, lba, block, tags_of(one.tag, lba));
            }
        }
        disks
    }

    /// Takes over what the images have, as if Linux had written it to the devices: blocks that it changed have no tags.
    pub fn load(&self) {
        for (path, memory) in self.images.iter().zip(&self.memory) {
            let (file, mut piece) = (File::open(path).unwrap(), vec![0; PIECE as usize]);
            for at in (0..file.metadata().unwrap().len()).step_by(piece.len()) {
                file.read_exact_at(&mut piece, at).unwrap();
                let before = read_blocks(memory, at / BLOCK, PIECE / BLOCK).joined_data();
                if before[..] == piece {
                    continue;
                }
                let blocks = piece.chunks_exact(BLOCK as usize).zip(before.chunks_exact(BLOCK as usize));
                for (lba, (block, _)) in (at / BLOCK..).zip(blocks).filter(|(_, (block, before))| block != before) {
                    match block.iter().any(|byte| *byte != 0) {
                        true => write_block(memory, lba, block, Tags { initial_ref_tag: lba, ..Tags::default() }),
                        false => {
                            let zeroes = Request::write_zeroes(one_block(lba), true, Durability::Volatile);
                            block_on(Device::execute(memory, zeroes)).unwrap();
                        }
                    }
                }
            }
        }
    }

    /// Gives the images what the devices have.
    pub fn save(&self) {
        for (path, memory) in self.images.iter().zip(&self.memory) {
            let file = File::options().write(true).open(path).unwrap();
            let bytes = file.metadata().unwrap().len();
            file.set_len(0).unwrap();
            file.set_len(bytes).unwrap();
            for at in (0..bytes).step_by(PIECE as usize) {
                let data = read_blocks(memory, at / BLOCK, PIECE / BLOCK).joined_data();
                if data.iter().any(|byte| *byte != 0) {
                    file.write_all_at(&data, at).unwrap();
                }
            }
        }
    }

    pub fn open(&self) -> Filesystem {
        block_on(self.open_in_task())
    }

    /// As [`Disks::open`], for a task.
    async fn open_in_task(&self) -> Filesystem {
        self.open_as(DynDevice::new).await
    }

    /// Opens it on devices whose requests wait, so that others begin meanwhile.
    pub fn open_waiting(&self, seed: u64) -> Filesystem {
        let random = Rc::new(RefCell::new(fastrand::Rng::with_seed(seed)));
        self.open_through(|name, memory| DynDevice::new(name, WaitingDevice { memory, random: Rc::clone(&random) }))
    }

    /// Opens it with something in front of each device.
    pub fn open_through(&self, through: impl Fn(String, Rc<MemoryDevice>) -> DynDevice) -> Filesystem {
        block_on(self.open_as(through))
    }

    /// Opens it in a certain way.
    pub fn open_with(&self, options: OpenOptions) -> Filesystem {
        block_on(Filesystem::open(self.candidates(DynDevice::new), options)).unwrap()
    }

    async fn open_as(&self, through: impl Fn(String, Rc<MemoryDevice>) -> DynDevice) -> Filesystem {
        Filesystem::open(self.candidates(through), OpenOptions::default()).await.unwrap()
    }

    fn candidates(&self, through: impl Fn(String, Rc<MemoryDevice>) -> DynDevice) -> Vec<Candidate> {
        let candidate = |(index, memory): (usize, &Rc<MemoryDevice>)| {
            let name = format!("memory {index}");
            Candidate { device: through(name.clone(), Rc::clone(memory)), name }
        };
        self.memory.iter().enumerate().map(candidate).collect()
    }

    /// A device.
    pub fn memory(&self, index: usize) -> &MemoryDevice {
        &self.memory[index]
    }

    /// Our own check finds nothing.
    pub fn assert_consistent(&self) {
        block_on(self.check());
    }

    /// As [`Disks::assert_consistent`], for a task.
    pub async fn check(&self) {
        let filesystem = self.open_in_task().await;
        let report = check(&filesystem, CheckOptions::default(), &Unwatched).await;
        let findings: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
        assert!(report.finding_count == 0 && report.not_checked.is_empty(), "{findings:#?} {:?}", report.not_checked);
    }

    /// Checks every copy of everything.
    pub fn verify(&self, mode: Mode) -> Report {
        let options = VerifyOptions { mode, ..VerifyOptions::default() };
        block_on(verify(&self.open(), options, &Unwatched)).unwrap()
    }

    /// No copy of anything is damaged; data without checksums may be unattested.
    pub fn assert_undamaged(&self) {
        let Report { findings, damage_count, unchecked, .. } = self.verify(Mode::Auto);
        let findings: Vec<String> = findings.iter().map(ToString::to_string).collect();
        let is_known = |why: &WhyUnchecked| *why == WhyUnchecked::Unattested;
        assert!(damage_count == 0 && unchecked.keys().all(is_known), "{findings:#?} {unchecked:?}");
    }

    /// `btrfs check` finds nothing, in both modes.
    pub fn assert_checked_by_program(&self) {
        self.save();
        let loops = Loops::attach(&self.images, true).unwrap();
        for mode in ["original", "lowmem"] {
            let checked =
                run("btrfs", ["check", "--readonly", "--check-data-csum", "--mode", mode, &loops.devices()[0]]);
            assert!(checked.is_ok(), "{mode}: {}", checked.unwrap_err());
        }
    }
}
