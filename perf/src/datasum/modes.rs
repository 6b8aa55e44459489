//! What is measured: where checksums of data are kept, on which filesystem, and how much is written between two commits.

use std::path::PathBuf;

use sealblock_btrfs_format::items::chunk::Profile;
use sealblock_units::ByteCount;

/// Bytes of a request, and of a block of a file.
pub const BLOCK_BYTES: u64 = 4096;
/// Items of 4 KiB extents in a leaf of 16 KiB that was filled in random order: 25 + 53 bytes each, in a leaf that is
/// two thirds full.
const ITEMS_OF_LEAF: f64 = 140.0;
/// Blocks of a leaf.
const BLOCKS_OF_LEAF: f64 = 4.0;

/// Where the checksums of data are kept, and whether data are written in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// In the tree, on a device without protection information.
    Csum,
    /// In the tree, on a device with protection information.
    CsumProtected,
    /// With the blocks (`--datasum device`), on a device with protection information.
    Device,
    /// Nowhere: NODATASUM on a device without protection information.
    Nodatasum,
    /// Nowhere, and data are written in place.
    Nodatacow,
    /// In the tree, by the kernel.
    KernelCsum,
    /// Nowhere, by the kernel.
    KernelNodatasum,
    /// Nowhere and in place, by the kernel.
    KernelNodatacow,
}

impl Mode {
    /// Those of this project, and those of the kernel.
    pub const ALL: [Mode; 8] = [
        Mode::Csum,
        Mode::CsumProtected,
        Mode::Device,
        Mode::Nodatasum,
        Mode::Nodatacow,
        Mode::KernelCsum,
        Mode::KernelNodatasum,
        Mode::KernelNodatacow,
    ];

    /// The name on the command line and in reports, and what it is.
    pub fn names(self) -> (&'static str, &'static str) {
        match self {
            Mode::Csum => ("csum", "checksums in the tree, device without protection information"),
            Mode::CsumProtected => ("csum-pi", "checksums in the tree, device with protection information"),
            Mode::Device => ("device", "checksums kept by the device, which has protection information"),
            Mode::Nodatasum => ("nodatasum", "no checksums (NODATASUM), device without protection information"),
            Mode::Nodatacow => ("nodatacow", "no checksums, written in place (NODATACOW)"),
            Mode::KernelCsum => ("kernel-csum", "the kernel, checksums in the tree"),
            Mode::KernelNodatasum => ("kernel-nodatasum", "the kernel, mounted with nodatasum"),
            Mode::KernelNodatacow => ("kernel-nodatacow", "the kernel, mounted with nodatacow"),
        }
    }

    /// The name alone.
    pub fn name(self) -> &'static str {
        self.names().0
    }

    /// True for a mount by the kernel.
    pub fn is_kernel(self) -> bool {
        matches!(self, Mode::KernelCsum | Mode::KernelNodatasum | Mode::KernelNodatacow)
    }

    /// True if its device has protection information.
    pub fn has_protection(self) -> bool {
        matches!(self, Mode::CsumProtected | Mode::Device)
    }

    /// The mode with checksums in the tree of the same implementation.
    pub fn baseline(self) -> Mode {
        if self.is_kernel() { Mode::KernelCsum } else { Mode::Csum }
    }

    /// What the kernel has that corresponds to a mode of this project.
    pub fn of_kernel(self) -> Option<Mode> {
        match self {
            Mode::Csum | Mode::CsumProtected => Some(Mode::KernelCsum),
            Mode::Device | Mode::Nodatasum => Some(Mode::KernelNodatasum),
            Mode::Nodatacow => Some(Mode::KernelNodatacow),
            Mode::KernelCsum | Mode::KernelNodatasum | Mode::KernelNodatacow => None,
        }
    }
}

/// What is written between two commits.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Batch {
    /// As many requests as the file has blocks.
    Blocks,
    /// This number of requests.
    Writes(u64),
    /// What is written in so many seconds.
    Seconds(f64),
}

/// A filesystem and a load on it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Point {
    /// Bytes of the file.
    pub size: ByteCount,
    /// How nodes are placed on the device: once or twice.
    pub metadata: Profile,
    /// What is written between two commits.
    pub batch: Batch,
}

impl Point {
    /// Blocks of the file.
    pub fn blocks(&self) -> u64 {
        self.size.get() / BLOCK_BYTES
    }

    /// Requests between two commits, if they are known.
    pub fn writes(&self) -> Option<u64> {
        match self.batch {
            Batch::Blocks => Some(self.blocks()),
            Batch::Writes(writes) => Some(writes),
            Batch::Seconds(_) => None,
        }
    }

    /// Copies of a node.
    pub fn copies(&self) -> u32 {
        if self.metadata == Profile::Dup { 2 } else { 1 }
    }

    /// Bytes written for each byte of data, by the model: each write changes a random leaf of the subvolume's tree, and
    /// one of the extent tree, each of which is written once in a commit.
    pub fn model(&self) -> Option<f64> {
        let (leaves, writes) = (self.blocks() as f64 / ITEMS_OF_LEAF, self.writes()? as f64);
        let changed = leaves * (1.0 - (-writes / leaves).exp());
        Some(1.0 + f64::from(self.copies()) * BLOCKS_OF_LEAF * 2.0 * changed / writes)
    }

    /// Bytes of a device on which the file is, as large extents that were made first and of which all but one block was
    /// written anew, with what is written between two commits, and nodes twice.
    pub fn device_bytes(&self) -> u64 {
        let batch = match self.batch {
            Batch::Seconds(_) => self.size.get().saturating_add(4 << 30),
            Batch::Blocks | Batch::Writes(_) => self.writes().unwrap_or(0).saturating_mul(2 * BLOCK_BYTES),
        };
        let nodes = self.blocks().saturating_mul(2048).saturating_add(1 << 30);
        self.size.get().saturating_mul(2).saturating_add(batch).saturating_add(nodes) >> 20 << 20
    }
}

/// What is measured.
#[derive(Clone, PartialEq, Debug)]
pub struct Options {
    /// The filesystems and loads.
    pub points: Vec<Point>,
    /// The modes, each with a turn in each round.
    pub modes: Vec<Mode>,
    /// True if requests are collected in memory until the commit, as a page cache does.
    pub is_buffered: bool,
    /// Requests in flight.
    pub depth: u64,
    /// Commits in a turn.
    pub commits: u32,
    /// Rounds.
    pub rounds: u32,
    /// Folder of the devices, or none for devices in memory.
    pub dir: Option<PathBuf>,
    /// Bytes of a device; `None` for what the file needs.
    pub device_bytes: Option<ByteCount>,
    /// Bytes of changed nodes after which a filesystem of this project commits by itself.
    pub dirty_bytes: ByteCount,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(batch: Batch, metadata: Profile) -> Point {
        Point { size: ByteCount::new(256 << 20), metadata, batch }
    }

    #[test]
    fn the_model_is_one_and_a_part_for_each_copy_of_a_leaf() {
        let of = |batch, metadata| point(batch, metadata).model().unwrap();
        let near = |one: f64, other: f64| assert!((one - other).abs() < 0.001, "{one} {other}");
        near(of(Batch::Blocks, Profile::Single), 1.0 + 8.0 / 140.0);
        near(of(Batch::Blocks, Profile::Dup), 1.0 + 16.0 / 140.0);
        near(of(Batch::Writes(4 * 65_536), Profile::Single), 1.0 + 2.0 / 140.0);
        // A lone write changes one leaf of each tree.
        assert!((of(Batch::Writes(1), Profile::Single) - 9.0).abs() < 0.01);
        assert_eq!(point(Batch::Seconds(1.0), Profile::Single).model(), None);
    }

    #[test]
    fn modes_have_names_of_their_own_and_a_baseline() {
        for (index, mode) in Mode::ALL.into_iter().enumerate() {
            assert!(Mode::ALL[..index].iter().all(|other| other.name() != mode.name()));
            assert_eq!(mode.baseline().is_kernel(), mode.is_kernel());
            assert_eq!(mode.of_kernel().is_none(), mode.is_kernel());
            assert_eq!(mode.name().starts_with("kernel-"), mode.is_kernel());
        }
    }
}
