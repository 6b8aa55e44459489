//! The filesystems for tests of readers: how each is made and filled, and its content as the kernel's own mount shows
//! it.
//!
//! The standard set has every format, profile and kind of content once, and takes seconds. The large set, which
//! [`LARGE`] in the environment chooses, takes some ten minutes.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::activity::{run_activity, run_stress};
use crate::changes::{change_uuid, convert, exchange_devices, make_seed, pause_balance};
use crate::manifest::Manifest;
use crate::programs::{Mount, copy_images, mkfs};
use crate::subvolumes::{half_drop, make_default};
use crate::{files, inodes, items, subvolumes};

/// The environment variable for the set: `large`, or `standard` for the whole standard set where a test would use only
/// a part of it.
pub const LARGE: &str = "SEALBLOCK_BTRFS_IMAGES";
/// The variable with the seed of random activity.
pub const SEED: &str = "SEALBLOCK_BTRFS_SEED";

/// The variable with the path of the program that fills additional filesystems, each with another seed; without it
/// there are none.
pub const FSSTRESS: &str = "SEALBLOCK_FSSTRESS";
/// The variable with prefixes of names, separated by commas: only these filesystems are made.
pub const ONLY: &str = "SEALBLOCK_BTRFS_ONLY";
/// The number of filesystems that the program of [`FSSTRESS`] makes.
const STRESSED: u64 = 20;

/// Profiles of data, each with a number of devices, the profile of metadata, and the number of devices that may be
/// missing.
pub const PROFILES: [(&str, usize, &str, usize); 8] = [
    ("raid0", 3, "raid1", 0),
    ("raid1", 2, "raid1", 1),
    ("raid1c3", 3, "raid1c3", 2),
    ("raid1c4", 4, "raid1c4", 3),
    ("raid10", 4, "raid10", 1),
    ("raid5", 3, "raid1", 1),
    ("raid6", 4, "raid1c3", 2),
    ("single", 2, "raid1", 0),
];

/// Formats: options of `mkfs.btrfs` (several lists if versions of the program differ), and options of the mount.
const FORMATS: [(&str, &[&[&str]], &str); 9] = [
    ("crc32c", &[&["--csum", "crc32c"]], "noatime"),
    ("xxhash-4k", &[&["--csum", "xxhash", "-n", "4096"]], "relatime"),
    ("sha256-64k", &[&["--csum", "sha256", "-n", "65536"]], "commit=1"),
    ("blake2-holes", &[&["--csum", "blake2", "-O", "^no-holes,^skinny-metadata"]], "autodefrag"),
    ("mixed", &[&["--mixed"]], "flushoncommit"),
    (
        "no-free-space-tree",
        &[&["-O", "^free-space-tree,^block-group-tree"], &["-R", "^free-space-tree"]],
        "nospace_cache",
    ),
    ("cache-v1", &[&["-O", "^free-space-tree,^block-group-tree"], &["-R", "^free-space-tree"]], "space_cache=v1"),
    ("block-group-tree", &[&["-O", "block-group-tree"], &["-R", "block-group-tree"]], "compress-force=zstd"),
    ("quota-single", &[&["-O", "quota", "-m", "single"], &["-R", "quota", "-m", "single"]], "compress=lzo"),
];

/// The content of a filesystem.
#[derive(Clone, Debug)]
pub enum Fill {
    /// Every kind of file, inode and subvolume.
    Everything,
    /// Every kind of file.
    Files,
    /// Subvolumes; one is the default and, with small nodes, one is half deleted.
    Subvolumes,
    /// This number of small files.
    Many(usize),
    /// A directory that lost most of its entries.
    Crowd,
    /// Random activity: seed, and number of operations.
    Activity(u64, u32),
    /// The content that a stress program (`fsstress`) makes, with snapshots: the program, and its seed.
    Stress(PathBuf, u64),
    /// Every type of item; the images are copied before they are unmounted, so that the copies have a log tree.
    Log,
    /// Every kind of file; a balance is unfinished.
    Balance,
    /// Every kind of file; the superblock has another UUID than the nodes.
    NewUuid,
    /// Every kind of file; it is a seed device.
    Seed,
    /// Every kind of file; a device was added and the first one removed.
    Devices,
    /// Converted from another filesystem (ext4) with plain files; the image of the old filesystem is still in it.
    Converted,
}

/// How a filesystem is made.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Its name, and the prefix of its images.
    pub name: String,
    /// Its number of devices.
    pub devices: usize,
    /// The size of each device.
    pub mebibytes: u64,
    /// Options of `mkfs.btrfs`; the first list that it supports is used.
    pub mkfs: Vec<Vec<&'static str>>,
    /// Options of the mount through which it is filled.
    pub mount: &'static str,
    /// Its content.
    pub fill: Fill,
}

/// A filesystem that was made.
pub struct Made {
    /// Its images, in the order of `mkfs.btrfs`.
    pub images: Vec<PathBuf>,
    /// The kernel's manifest of it, from the top subvolume with all other subvolumes below it.
    pub manifest: Manifest,
    /// The path of the default subvolume in the manifest; empty for the top one.
    pub default_path: Vec<u8>,
}

impl Recipe {
    fn new(name: &str, mkfs: &[&[&'static str]], mount: &'static str, fill: Fill) -> Recipe {
        let mkfs = mkfs.iter().map(|options| options.to_vec()).collect();
        Recipe { name: name.to_owned(), devices: 1, mebibytes: 512, mkfs, mount, fill }
    }

    /// Makes and fills the filesystem in a folder, and scans it through the kernel.
    ///
    /// # Errors
    /// If a requirement is missing, if the programs do not support an option, or if a program fails. The caller decides
    /// from the error whether the machine lacks something.
    pub fn make(&self, folder: &Path) -> Result<Made, String> {
        self.try_make(folder).map_err(|error| format!("{}: {error}", self.name))
    }

    fn try_make(&self, folder: &Path) -> Result<Made, String> {
        let mut images: Vec<_> =
            (0..self.devices).map(|number| folder.join(format!("{}-{number}", self.name))).collect();
        if matches!(self.fill, Fill::Converted) {
            convert(&images[0], self.mebibytes)?;
        } else {
            self.make_empty(&images)?;
            images = self.fill(images)?;
        }
        let mut default_path = Vec::new();
        match &self.fill {
            Fill::Subvolumes => {
                default_path = b"outer/inner".to_vec();
                if !half_drop(&images, 20)? {
                    return Err("the kernel never left a subvolume half deleted".to_owned());
                }
            }
            Fill::Balance if !pause_balance(&images)? => {
                return Err("the kernel never left a balance half done".to_owned());
            }
            Fill::NewUuid => change_uuid(&images[0])?,
            Fill::Seed => make_seed(&images[0])?,
            Fill::Devices => images = exchange_devices(&images, self.mebibytes)?,
            _ => {}
        }
        let mount = Mount::read_only(&images, Some(5))?;
        let manifest = Manifest::scan(&mount.path(""))?;
        mount.unmount()?;
        Ok(Made { images, manifest, default_path })
    }

    /// Runs `mkfs.btrfs` with the first options that it supports.
    fn make_empty(&self, images: &[PathBuf]) -> Result<(), String> {
        let mut made = Err("no options of mkfs.btrfs".to_owned());
        for options in &self.mkfs {
            made = mkfs(images, self.mebibytes, options);
            if made.is_ok() {
                break;
            }
        }
        made
    }

    /// Fills it through a mount, and returns the images in their final state.
    fn fill(&self, images: Vec<PathBuf>) -> Result<Vec<PathBuf>, String> {
        let mount = Mount::new(&images, self.mount)?;
        let root = mount.path("");
        match &self.fill {
            Fill::Everything => everything(&mount)?,
            Fill::Files | Fill::Balance | Fill::NewUuid | Fill::Seed | Fill::Devices => {
                plain(files::fill(&root.join("files")))?;
            }
            Fill::Subvolumes => {
                subvolumes::fill(&root)?;
                make_default(&mount, "outer/inner")?;
            }
            Fill::Many(number) => plain(inodes::many(&root.join("many"), *number))?,
            Fill::Crowd => plain(inodes::crowd(&root.join("crowd")))?,
            Fill::Activity(seed, operations) => {
                run_activity(&root, *seed, *operations)?;
            }
            Fill::Stress(program, seed) => run_stress(program, &root, *seed)?,
            Fill::Log => drop(items::fill_mount(&mount)?),
            Fill::Converted => {}
        }
        if !matches!(self.fill, Fill::Log) {
            mount.unmount()?;
            return Ok(images);
        }
        // The copy is made before the unmount, which would commit the content of the log.
        let crashed = copy_images(&images, "crashed")?;
        mount.unmount()?;
        images.iter().try_for_each(|image| plain(fs::remove_file(image)))?;
        Ok(crashed)
    }
}

fn plain<T>(result: io::Result<T>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}

fn everything(mount: &Mount) -> Result<(), String> {
    let root = mount.path("");
    plain(files::fill(&root.join("files")))?;
    plain(inodes::fill(&root.join("inodes")))?;
    subvolumes::fill(&root.join("subvolumes"))?;
    // These are in nodes with another owner.
    plain(inodes::fill(&root.join("subvolumes/orphaned/inodes")))
}

/// The seed of random activity: from the environment, or a constant.
pub fn seed() -> u64 {
    std::env::var(SEED).ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

/// True if the environment names a set or filesystems; then none of them may be skipped.
pub fn is_named() -> bool {
    [LARGE, ONLY, FSSTRESS].iter().any(|variable| std::env::var_os(variable).is_some())
}

/// The set that the environment chooses.
///
/// # Panics
/// If it names an unknown set.
pub fn chosen() -> Vec<Recipe> {
    let mut recipes = match std::env::var(LARGE).as_deref() {
        Ok("large") => large(),
        Ok("standard") | Err(_) => standard(),
        Ok(other) => panic!("{LARGE}={other}: neither standard nor large"),
    };
    if let Some(program) = std::env::var_os(FSSTRESS) {
        recipes.extend(stressed(Path::new(&program)));
    }
    if let Ok(only) = std::env::var(ONLY) {
        recipes.retain(|recipe| only.split(',').any(|name| recipe.name.starts_with(name)));
    }
    recipes
}

/// Content made by a stress program from several seeds, on each format in turn.
fn stressed(program: &Path) -> Vec<Recipe> {
    let formats = FORMATS.iter().cycle();
    let of = |(seed, (format, mkfs, mount)): (u64, &(&str, &[&[&'static str]], &'static str))| {
        let recipe =
            Recipe::new(&format!("stress-{seed}-{format}"), mkfs, mount, Fill::Stress(program.to_owned(), seed));
        Recipe { mebibytes: 2048, ..recipe }
    };
    (seed()..).zip(formats).take(STRESSED as usize).map(of).collect()
}

/// Each format, profile and kind of content once.
pub fn standard() -> Vec<Recipe> {
    let of_format = |(name, mkfs, mount): &(&str, &[&[&'static str]], &'static str)| {
        let recipe = Recipe::new(name, mkfs, mount, Fill::Everything);
        // The kernel keeps space caches of version 1 only for block groups of at least 100 MiB, and a group is at most
        // a tenth of the device.
        let mebibytes = if mount.contains("space_cache=v1") { 2048 } else { recipe.mebibytes };
        Recipe { mebibytes, ..recipe }
    };
    let mut recipes: Vec<_> = FORMATS.iter().map(of_format).collect();
    recipes.extend(PROFILES.iter().map(|profile| of_profile(profile, Fill::Files)));
    let small_nodes: &[&[&str]] = &[&["-n", "4096"]];
    recipes.push(Recipe::new("subvolumes", small_nodes, "noatime", Fill::Subvolumes));
    recipes.push(Recipe::new("many", small_nodes, "noatime", Fill::Many(3000)));
    recipes.push(Recipe::new("crowd", &[&[]], "noatime", Fill::Crowd));
    recipes.push(Recipe::new("log", &[&[]], "noatime", Fill::Log));
    recipes
        .push(Recipe { mebibytes: 1024, ..Recipe::new("balancing", &[&["-d", "single"]], "noatime", Fill::Balance) });
    recipes.push(Recipe::new("new-uuid", &[&[]], "noatime", Fill::NewUuid));
    recipes.push(Recipe::new("seed", &[&[]], "noatime", Fill::Seed));
    let devices = Recipe::new("devices", &[&["-m", "raid1", "-d", "raid1"]], "noatime", Fill::Devices);
    recipes.push(Recipe { devices: 2, ..devices });
    recipes.push(Recipe::new("converted", &[], "noatime", Fill::Converted));
    let old: &[&[&str]] = &[
        &["-O", "^extref,^skinny-metadata,^no-holes,^free-space-tree,^block-group-tree"],
        &["-O", "^extref,^skinny-metadata,^no-holes", "-R", "^free-space-tree"],
    ];
    recipes.push(Recipe::new("old", old, "nospace_cache", Fill::Files));
    recipes.push(Recipe::new("active", &[&[]], "noatime", Fill::Activity(seed(), 800)));
    recipes.push(Recipe::new("active-zlib", small_nodes, "compress-force=zlib", Fill::Activity(seed() + 1, 800)));
    recipes
}

/// More of everything: a million files, long activity on every format and profile, and formats with every node size.
pub fn large() -> Vec<Recipe> {
    let mut recipes = standard();
    let named = |recipe: Recipe, prefix: &str| Recipe { name: format!("{prefix}-{}", recipe.name), ..recipe };
    for (number, (name, mkfs, mount)) in (100..).zip(FORMATS) {
        let recipe = Recipe::new(name, mkfs, mount, Fill::Activity(seed() + number, 10_000));
        recipes.push(Recipe { mebibytes: 4096, ..named(recipe, "long") });
    }
    for (number, profile) in (200..).zip(&PROFILES) {
        let recipe = of_profile(profile, Fill::Activity(seed() + number, 10_000));
        recipes.push(Recipe { mebibytes: 4096, ..named(recipe, "long") });
    }
    for node_bytes in ["4096", "8192", "16384", "32768", "65536"] {
        for csum in ["crc32c", "xxhash", "sha256", "blake2"] {
            let options: &[&[&'static str]] = &[&["-n", node_bytes, "--csum", csum]];
            recipes.push(Recipe::new(&format!("{csum}-{node_bytes}"), options, "noatime", Fill::Everything));
        }
    }
    let million = Recipe::new("million", &[&[]], "noatime", Fill::Many(1_000_000));
    recipes.push(Recipe { mebibytes: 8192, ..million });
    recipes
}

fn of_profile((data, devices, metadata, _): &(&'static str, usize, &'static str, usize), fill: Fill) -> Recipe {
    let recipe = Recipe::new(data, &[&["-m", metadata, "-d", data]], "noatime", fill);
    Recipe { devices: *devices, mebibytes: 256, ..recipe }
}
