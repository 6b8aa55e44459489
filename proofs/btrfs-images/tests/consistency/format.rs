//! Filesystems that this project makes: `btrfs check` in both modes and this project's own check find nothing in them.
//! The kernel mounts them, writes files, takes a snapshot, changes it and scrubs everything; then nothing is wrong
//! either.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use sealblock_btrfs::check::Verdict;
use sealblock_btrfs::space::profile_name;
use sealblock_btrfs_engine::datasum::Datasum;
use sealblock_btrfs_engine::format::{
    self, DEFAULT_INCOMPAT, FormatOptions, FormattedImage, NewDevice, SECTOR_BYTES, Stage, minimum_bytes,
};
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::features::Incompat;
use sealblock_btrfs_format::items::chunk::Profile::{self, Dup, Raid0, Raid1, Raid1C3, Raid1C4, Raid10, Single};
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_proofs_btrfs_images::programs::{Mount, run};
use sealblock_proofs_btrfs_images::{has_mounts, skip};

use crate::{checked, program_error};

const MIB: u64 = 1 << 20;
const PROFILES: [Profile; 7] = [Single, Dup, Raid0, Raid1, Raid1C3, Raid1C4, Raid10];
const NODES: [u32; 5] = [4096, 8192, 16_384, 32_768, 65_536];

/// A filesystem to be made.
struct Case {
    name: String,
    options: FormatOptions,
    sizes: Vec<u64>,
}

impl Case {
    /// On as many devices as the profiles need, of unequal sizes.
    fn new(number: u8, metadata: Profile, data: Profile, checksum: ChecksumType, node_bytes: u32) -> Case {
        let needed = |profile| match profile {
            Raid1C4 => 4,
            Raid1C3 => 3,
            // With two devices, there would be no second stripe.
            Raid10 => 4,
            Raid1 | Raid0 => 2,
            _ => 1,
        };
        let count = needed(metadata).max(needed(data));
        let options = FormatOptions {
            label: b"made here".to_vec(),
            fsid: [number; 16],
            chunk_tree_uuid: [0xcc; 16],
            subvolume_uuid: [0xdd; 16],
            time: Timespec { seconds: 1_700_000_000.into(), nanoseconds: 7.into() },
            sector_bytes: SECTOR_BYTES,
            node_bytes,
            checksum,
            data,
            metadata,
            incompat: DEFAULT_INCOMPAT,
            block_group_tree: false,
            datasum: Datasum::Csum,
            first_transaction: 1,
            is_host_sealed: false,
        };
        let sizes = (0..count).map(|index| (400 - 30 * index) * MIB + 12_288 * index).collect();
        let name = format!("{} {} {checksum:?} {node_bytes}", profile_name(metadata), profile_name(data));
        Case { name, options, sizes }
    }

    fn of_sizes(self, sizes: &[u64]) -> Case {
        Case { name: format!("{} on {sizes:?}", self.name), sizes: sizes.to_vec(), ..self }
    }

    fn with(mut self, name: &str, change: impl FnOnce(&mut FormatOptions)) -> Case {
        change(&mut self.options);
        self.name += name;
        self
    }

    /// On devices as small as possible.
    fn smallest(self) -> Case {
        let minimum = minimum_bytes(&self.options);
        let sizes = vec![minimum; self.sizes.len()];
        self.of_sizes(&sizes)
    }

    fn image(&self) -> FormattedImage {
        let uuid = |number: u8| [[self.options.fsid[0]; 8], [number; 8]].concat().try_into().unwrap();
        let devices = (1..).zip(&self.sizes).map(|(number, bytes)| NewDevice { bytes: *bytes, uuid: uuid(number) });
        format::format(&self.options, &devices.collect::<Vec<_>>()).unwrap()
    }

    /// Makes the filesystem in sparse files.
    fn make(&self, folder: &Path) -> Vec<PathBuf> {
        let images: Vec<PathBuf> = (1..=self.sizes.len()).map(|devid| folder.join(format!("disk{devid}"))).collect();
        for (image, bytes) in images.iter().zip(&self.sizes) {
            File::create(image).unwrap().set_len(*bytes).unwrap();
        }
        let files: Vec<File> = images.iter().map(|image| OpenOptions::new().write(true).open(image).unwrap()).collect();
        let file = |devid: u64| &files[devid as usize - 1];
        for stage in self.image().stages() {
            match stage {
                // The files are new.
                Stage::Erase(_) => {}
                Stage::Write(writes) => {
                    writes.iter().for_each(|one| file(one.devid).write_all_at(&one.bytes, one.offset).unwrap());
                }
            }
        }
        images
    }

    /// Makes it, lets the kernel use it, and returns everything that is wrong.
    fn run(&self, folder: &Path) -> Vec<String> {
        let images = self.make(folder);
        let mut wrong = self.errors(&images, "when new");
        if let Err(why) = use_it(&images) {
            wrong.push(format!("{}: the kernel: {why}", self.name));
        }
        wrong.extend(self.errors(&images, "after use"));
        images.iter().for_each(|image| fs::remove_file(image).unwrap());
        wrong
    }

    fn errors(&self, images: &[PathBuf], when: &str) -> Vec<String> {
        let modes = ["original", "lowmem"].into_iter();
        let mut wrong: Vec<String> = modes.filter_map(|mode| program_error(images, mode)).collect();
        let report = checked(images);
        if report.verdict() != Verdict::Clean || !report.notes.is_empty() {
            wrong.push(format!("{:?} {:?} {:?}", report.findings, report.not_checked, report.notes));
        }
        wrong.iter().map(|why| format!("{} {when}: {why}", self.name)).collect()
    }
}

/// Writes, takes a snapshot, changes it, and scrubs.
fn use_it(images: &[PathBuf]) -> Result<(), String> {
    let mount = Mount::new(images, "noatime")?;
    let used = use_mount(&mount);
    let unmounted = mount.unmount();
    used.and(unmounted)
}

fn use_mount(mount: &Mount) -> Result<(), String> {
    let text = |path: &Path| path.to_str().map(str::to_owned).ok_or("a path that is no text");
    let write = |name: String, bytes: usize| {
        fs::write(mount.path(&name), vec![name.len() as u8; bytes]).map_err(|error| format!("{name}: {error}"))
    };
    run("btrfs", ["subvolume", "create", &text(&mount.path("inner"))?])?;
    for number in 0..40 {
        write(format!("inner/file{number}"), number * 3000)?;
    }
    write("large".to_owned(), 5 << 20)?;
    run("btrfs", ["subvolume", "snapshot", &text(&mount.path("inner"))?, &text(&mount.path("copy"))?])?;
    for number in 0..20 {
        write(format!("copy/file{number}"), 50_000)?;
        fs::remove_file(mount.path(&format!("inner/file{}", number * 2))).map_err(|error| error.to_string())?;
    }
    mount.sync()?;
    // It fails if it finds or corrects an error.
    run("btrfs", ["scrub", "start", "-B", &text(&mount.path(""))?]).map(drop)
}

/// Each profile, checksum, node size and feature at least once, and the edges of sizes.
fn representative() -> Vec<Case> {
    let checksums = ChecksumType::ALL.into_iter().cycle();
    let nodes = NODES.into_iter().cycle();
    let profiles = PROFILES.into_iter().zip(checksums).zip(nodes);
    let mut cases: Vec<Case> = (1..)
        .zip(profiles)
        .map(|(number, ((profile, checksum), node))| Case::new(number, profile, profile, checksum, node))
        .collect();
    let usual = |number| Case::new(number, Dup, Single, ChecksumType::Crc32c, 16_384);
    let mixed = |options: &mut FormatOptions| {
        options.incompat |= Incompat::MIXED_GROUPS;
        (options.node_bytes, options.metadata) = (4096, options.data);
    };
    cases.extend([
        Case::new(20, Raid1, Single, ChecksumType::XxHash64, 16_384),
        // The second copies of nodes lie around the second superblock.
        usual(21).of_sizes(&[393 * MIB]),
        // The third superblock.
        usual(22).of_sizes(&[(300 << 30) + 8192]),
        usual(23).with(" block-group-tree", |options| options.block_group_tree = true),
        usual(24).with(" old", |options| options.incompat = Incompat::empty()),
        usual(25).smallest(),
        usual(26).with(" 64 KiB", |options| options.node_bytes = 65_536).smallest(),
        usual(27).with(" mixed", mixed),
        usual(28).with(" mixed", mixed).smallest(),
        Case::new(31, Raid1, Raid1, ChecksumType::Crc32c, 4096).with(" mixed", mixed).smallest(),
        // Stripes on one device, and pairs of stripes on two.
        Case::new(29, Raid0, Raid0, ChecksumType::Crc32c, 16_384).of_sizes(&[300 * MIB]),
        Case::new(30, Raid10, Raid10, ChecksumType::Crc32c, 16_384).of_sizes(&[300 * MIB, 250 * MIB]),
    ]);
    cases
}

/// Every pair of profiles with every checksum and size of nodes, and the representative ones.
fn all() -> Vec<Case> {
    let mut cases = representative();
    for (number, metadata) in (40..).zip(PROFILES) {
        for data in PROFILES {
            for checksum in ChecksumType::ALL {
                cases.extend(NODES.map(|node| Case::new(number, metadata, data, checksum, node)));
            }
        }
    }
    cases
}

#[test]
fn new_filesystems_are_consistent_before_and_after_the_kernel_uses_them() {
    if let Err(why) = has_mounts() {
        return skip(&why);
    }
    let folder = tempfile::tempdir().unwrap();
    let is_all = std::env::var("SEALBLOCK_BTRFS_FORMATS").is_ok_and(|value| value == "all");
    let cases = if is_all { all() } else { representative() };
    let mut wrong = Vec::new();
    for case in &cases {
        wrong.extend(case.run(folder.path()));
    }
    eprintln!("{} filesystems made, used and checked", cases.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
