//! The command line of `fs bench`.

use std::path::PathBuf;

use clap::Args;
use sealblock_btrfs_format::items::chunk::Profile;
use sealblock_perf::datasum::modes::{BLOCK_BYTES, Mode};
use sealblock_units::ByteCount;

use super::bench::{SIZE_STEP, seconds, size};
use super::values::{self, one_of};

/// The most rounds, and commits in a turn.
const MAX_COUNT: i64 = 1000;
/// The most requests in flight.
const MAX_DEPTH: i64 = 1024;
const MODES: &values::Names<Mode> = &[
    ("csum", "Checksums in the tree, on a device without protection information", Mode::Csum),
    ("csum-pi", "Checksums in the tree, on a device with protection information", Mode::CsumProtected),
    ("device", "Checksums kept by the device (`--datasum device`), which has protection information", Mode::Device),
    ("nodatasum", "No checksums, on a device without protection information", Mode::Nodatasum),
    ("nodatacow", "No checksums, written in place", Mode::Nodatacow),
];

const PROFILES: &values::Names<Profile> =
    &[("single", "One copy", Profile::Single), ("dup", "Two copies on one device", Profile::Dup)];

const BENCH_HELP: &str = "\
Examples:
  sealblock fs bench                                    # a file of 256 MiB in memory
  sealblock fs bench --commit-writes 16384,65536,131072 --metadata single,dup
  sealblock fs bench --dir /mnt/disk --kernel --json

Each turn makes a new device with a new filesystem and one file, writes each block of the file once in random order, and then
measures random writes of 4 KiB with a commit after each batch of them. All modes have a turn in each round, in a new order; ratios
compare turns of the same round. Every combination of --size, --metadata and --commit-writes is measured.

Bytes are counted where they reach the device: data, nodes of each tree, superblocks, and what the device writes for its tags. The
model is 1 + 4c(2N/140)/W bytes a byte, for files of N blocks, W writes between commits and c copies of nodes, of which W writes
reach not more than there are.

With --kernel, the kernel's Btrfs is measured in the same rounds, on a loop device over a file in --dir or in /dev/shm. This needs root.

Files are created in --dir, bypass the page cache, and are removed at the end, also after Ctrl-C. Nothing else is written.";

/// Arguments of `fs bench`.
#[derive(Args, Debug)]
#[command(after_help = BENCH_HELP)]
pub struct FsBench {
    /// Where checksums of data are kept, separated by commas. [default: csum,device,nodatasum,nodatacow]
    #[arg(long, value_name = "MODE,...", value_delimiter = ',', hide_default_value = true, value_parser = one_of(MODES),
        default_values = ["csum", "device", "nodatasum", "nodatacow"])]
    pub modes: Vec<Mode>,
    /// Size of the file: a multiple of 1 MiB. More than one can be given, separated by commas.
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', default_value = "256MiB", value_parser = size)]
    pub size: Vec<ByteCount>,
    /// How metadata are placed: single or dup, or both, separated by commas.
    #[arg(long, value_name = "PROFILE,...", value_delimiter = ',', default_value = "single", value_parser = one_of(PROFILES))]
    pub metadata: Vec<Profile>,
    /// Writes between two commits. More than one number can be given, separated by commas. [default: as many as the file has
    /// blocks]
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    pub commit_writes: Vec<u64>,
    /// Seconds between two commits, instead of a number of writes.
    #[arg(long, value_name = "N", conflicts_with_all = ["commit_writes", "buffered"], value_parser = seconds)]
    pub commit_interval: Option<f64>,
    /// Collect writes in memory until the commit, as a page cache does. By default each goes to the device at once.
    #[arg(long)]
    pub buffered: bool,
    /// Requests in flight.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u64).range(1..=MAX_DEPTH as u64))]
    pub queue_depth: u64,
    /// Commits of a turn.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=MAX_COUNT))]
    pub commits: u32,
    /// Number of rounds.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=MAX_COUNT))]
    pub rounds: u32,
    /// Memory for changed nodes, after which the filesystem commits by itself.
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    pub dirty_memory: ByteCount,
    /// Directory for devices in files. Devices with protection information are volumes. [default: devices are in memory]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Size of each device. [default: what the file needs]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub device_size: Option<ByteCount>,
    /// Also measure the kernel's Btrfs with checksums, with nodatasum and with nodatacow, on a loop device.
    #[arg(long)]
    pub kernel: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// The blocks of a file are counted in blocks of this many bytes.
const _: () = assert!(SIZE_STEP.get().is_multiple_of(BLOCK_BYTES));
