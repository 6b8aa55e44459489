//! The bytes that a path stands for, whatever the path is called: byte ranges of files and of block devices, below loop devices,
//! partitions and mappings.
//!
//! Two paths with equal leaves are one device: hard links, symbolic links, bind mounts, a file and the loop device over it. Paths whose
//! leaves overlap share bytes. A path never has fewer bytes here than it has: where a mapping is unknown, whole members are taken.
//! Nothing here opens a block device.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use sealblock_media_linux::block_node;
use serde::{Deserialize, Serialize};

use crate::kernel::DeviceNumber;
use crate::kernel::below::{Arrangement, DeviceNode, NodeKind, SECTOR_BYTES, Sectors, Segment, node};

/// Max. ranges of one path; above it whole members are taken.
const MAX_RANGES: usize = 1024;

/// A file or a block device without known devices below it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Storage {
    /// A file by the number of its file system and its inode.
    File {
        /// `st_dev`.
        device: u64,
        /// `st_ino`.
        inode: u64,
    },
    /// A block device.
    Device(DeviceNumber),
}

/// A range of bytes of a file or block device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Leaf {
    /// Of which.
    pub storage: Storage,
    /// The first byte.
    pub first_byte: u64,
    /// The first byte behind it; `u64::MAX` for all that there is and will be.
    pub end_byte: u64,
}

impl Storage {
    /// Of an open file, or of what is at a path.
    pub fn of(about: &Metadata) -> Storage {
        if about.file_type().is_block_device() {
            Storage::Device(DeviceNumber::from_raw(about.rdev()))
        } else {
            Storage::File { device: about.dev(), inode: about.ino() }
        }
    }
}

impl Leaf {
    /// All of a file or block device.
    pub fn whole(storage: Storage) -> Leaf {
        Leaf { storage, first_byte: 0, end_byte: u64::MAX }
    }

    /// True if both have some byte.
    pub fn overlaps(&self, other: &Leaf) -> bool {
        self.storage == other.storage && self.first_byte < other.end_byte && other.first_byte < self.end_byte
    }

    /// True if both are the same range. A loop device over all of a file is the file, though the file may have grown since.
    pub fn is_same(&self, other: &Leaf) -> bool {
        let is_whole = self.end_byte == u64::MAX || other.end_byte == u64::MAX;
        self.storage == other.storage
            && self.first_byte == other.first_byte
            && (self.end_byte == other.end_byte || is_whole)
    }
}

/// The bytes of the file or device at a path, in order and each range once.
///
/// # Errors
/// When there is nothing at the path, or neither a file nor a device.
pub fn leaves_at(path: &Path) -> io::Result<Vec<Leaf>> {
    let mut about = fs::metadata(path)?;
    if about.file_type().is_char_device() {
        // A generic node of a drive has the same blocks as the block device beside it.
        if let Some(block) = path.canonicalize().ok().and_then(|path| block_node(&path)) {
            about = fs::metadata(block).unwrap_or(about);
        }
    }
    leaves_of(&about)
}

/// The bytes of an open file or device.
///
/// # Errors
/// When it is neither a file nor a device.
pub fn leaves_of(about: &Metadata) -> io::Result<Vec<Leaf>> {
    let kind = about.file_type();
    if kind.is_block_device() {
        return Ok(leaves_of_device(DeviceNumber::from_raw(about.rdev())));
    }
    if kind.is_file() || kind.is_char_device() {
        return Ok(vec![Leaf::whole(Storage::of(about))]);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a file nor a block device"))
}

/// The bytes of a block device; the device itself if sysfs shows no devices below it.
pub(crate) fn leaves_of_device(number: DeviceNumber) -> Vec<Leaf> {
    node(number).map_or_else(|_| vec![Leaf::whole(Storage::Device(number))], |node| leaves_below(&node))
}

/// The bytes of a device, as bytes of the devices below it.
pub(crate) fn leaves_below(node: &DeviceNode) -> Vec<Leaf> {
    let mut leaves = Vec::new();
    add(node, None, &mut leaves);
    leaves.sort_unstable();
    leaves.dedup();
    leaves
}

/// Adds the leaves of these sectors of a device, or of all of it.
fn add(node: &DeviceNode, wanted: Option<Sectors>, leaves: &mut Vec<Leaf>) {
    if let NodeKind::Loop { file, offset_bytes } = &node.kind
        && node.members.is_empty()
    {
        // A file that was deleted or is in another mount namespace has no path here: the loop device stands for it.
        let storage = fs::metadata(file).map_or(Storage::Device(node.number), |about| Storage::of(&about));
        let from = if storage == Storage::Device(node.number) { 0 } else { *offset_bytes };
        return leaves.push(bytes_of(storage, from, wanted.unwrap_or(Sectors::new(0, node.sectors))));
    }
    let segments = node.map.as_ref().map(|map| map.segments());
    match segments.filter(|segments| leaves.len() + segments.len() <= MAX_RANGES) {
        Some(segments) => segments.iter().for_each(|segment| add_segment(node, segment, wanted, leaves)),
        None if !node.members.is_empty() => node.members.iter().for_each(|member| add(member, None, leaves)),
        None => leaves.push(match wanted {
            Some(wanted) => bytes_of(Storage::Device(node.number), 0, wanted),
            None => Leaf::whole(Storage::Device(node.number)),
        }),
    }
}

fn add_segment(node: &DeviceNode, segment: &Segment, wanted: Option<Sectors>, leaves: &mut Vec<Leaf>) {
    let all = segment.sectors;
    let part = wanted.map_or(all, |wanted| {
        let start = all.start.max(wanted.start);
        Sectors::new(start, all.end().min(wanted.end()).saturating_sub(start))
    });
    if part.count == 0 {
        return;
    }
    let parts: Vec<(usize, Sectors)> = match &segment.how {
        Arrangement::Linear(_) | Arrangement::Copies(_) => {
            let skipped = part.start - all.start;
            segment.how.ons().iter().map(|on| (on.member, Sectors::new(on.sector + skipped, part.count))).collect()
        }
        // Of each member all that the segment has of it: chunks by themselves would be too many.
        Arrangement::Striped { members, .. } => {
            let each = all.count / members.len().max(1) as u64;
            members.iter().map(|on| (on.member, Sectors::new(on.sector, each))).collect()
        }
        Arrangement::Nowhere => Vec::new(),
        Arrangement::Unknown => {
            return node.members.iter().for_each(|member| add(member, None, leaves));
        }
    };
    for (number, sectors) in parts {
        if let Some(member) = node.members.get(number) {
            add(member, Some(sectors), leaves);
        }
    }
}

fn bytes_of(storage: Storage, from: u64, sectors: Sectors) -> Leaf {
    let at = |sector: u64| sector.saturating_mul(SECTOR_BYTES).saturating_add(from);
    Leaf { storage, first_byte: at(sectors.start), end_byte: at(sectors.end()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::below::{Map, On};
    use std::os::unix::fs::symlink;

    fn number(minor: u32) -> DeviceNumber {
        DeviceNumber { major: 8, minor }
    }

    fn node(minor: u32, sectors: u64, members: Vec<DeviceNode>, segments: Vec<Segment>) -> DeviceNode {
        let map = (!segments.is_empty()).then(|| Map::new(segments, members.len()).unwrap());
        let (name, kind) = (format!("sd{minor}"), NodeKind::Disk);
        DeviceNode { number: number(minor), name, kind, sectors, id: None, members, map, unknown: None }
    }

    fn linear(start: u64, count: u64, member: usize, sector: u64) -> Segment {
        Segment { sectors: Sectors { start, count }, how: Arrangement::Linear(On { member, sector }) }
    }

    fn leaf(minor: u32, first: u64, end: u64) -> Leaf {
        let storage = Storage::Device(number(minor));
        Leaf { storage, first_byte: first * SECTOR_BYTES, end_byte: end * SECTOR_BYTES }
    }

    fn disk(minor: u32) -> DeviceNode {
        node(minor, 1000, Vec::new(), Vec::new())
    }

    #[test]
    fn a_file_is_one_by_all_its_names_and_a_copy_of_it_is_another() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("v"), "1").unwrap();
        fs::hard_link(at("v"), at("hard")).unwrap();
        symlink("v", at("soft")).unwrap();
        fs::copy(at("v"), at("copy")).unwrap();
        let [v] = leaves_at(&at("v")).unwrap()[..] else { panic!("one leaf") };
        for name in ["hard", "soft", "./v"] {
            assert!(leaves_at(&at(name)).unwrap()[0].is_same(&v), "{name}");
        }
        let file = fs::File::open(at("v")).unwrap();
        fs::rename(at("v"), at("elsewhere")).unwrap();
        assert_eq!(leaves_of(&file.metadata().unwrap()).unwrap(), [v], "by what it is, and not by where it was");
        let copy = leaves_at(&at("copy")).unwrap()[0];
        assert!(!copy.is_same(&v) && !copy.overlaps(&v));
        assert!(leaves_at(&at("v")).is_err() && leaves_at(folder.path()).is_err());
    }

    #[test]
    fn a_mapping_is_the_bytes_below_it() {
        let partition = |minor, start, count| node(minor, count, vec![disk(0)], vec![linear(0, count, 0, start)]);
        let first = leaves_below(&partition(1, 10, 90));
        assert_eq!(first, [leaf(0, 10, 100)]);
        let second = leaves_below(&partition(2, 100, 900));
        assert!(!first[0].overlaps(&second[0]), "two partitions share nothing");
        let whole = Leaf::whole(Storage::Device(number(0)));
        assert!(whole.overlaps(&first[0]) && !whole.is_same(&first[0]), "a partition is a part of its disk");
        // A mapping over a partition has the partition's part of the disk, cut off where it ends.
        let over = node(3, 50, vec![partition(1, 10, 90)], vec![linear(0, 50, 0, 5)]);
        assert_eq!(leaves_below(&over), [leaf(0, 15, 65)]);
    }

    #[test]
    fn never_fewer_bytes_are_named_than_a_mapping_has() {
        let ons = |pairs: [(usize, u64); 2]| pairs.map(|(member, sector)| On { member, sector }).to_vec();
        let segment = |how| Segment { sectors: Sectors { start: 0, count: 80 }, how };
        let over = |how| leaves_below(&node(9, 80, vec![disk(0), disk(1)], vec![segment(how)]));
        assert_eq!(over(Arrangement::Copies(ons([(0, 3), (1, 0)]))), [leaf(0, 3, 83), leaf(1, 0, 80)]);
        let striped = Arrangement::Striped { chunk: 8, members: ons([(0, 3), (1, 0)]) };
        assert_eq!(over(striped), [leaf(0, 3, 43), leaf(1, 0, 40)]);
        let all = [0, 1].map(|minor| Leaf::whole(Storage::Device(number(minor))));
        assert_eq!(over(Arrangement::Unknown), all);
        assert_eq!(over(Arrangement::Nowhere), []);
        let unknown = DeviceNode { map: None, ..node(9, 80, vec![disk(0), disk(1)], Vec::new()) };
        assert_eq!(leaves_below(&unknown), all);
    }

    #[test]
    fn a_loop_device_is_the_part_of_the_file_below_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("v");
        fs::write(&file, "").unwrap();
        let over = |file: &Path, offset_bytes| {
            let kind = NodeKind::Loop { file: file.to_owned(), offset_bytes };
            leaves_below(&DeviceNode { kind, ..node(7, 100, Vec::new(), Vec::new()) })
        };
        let of_file = leaves_at(&file).unwrap()[0];
        let [whole] = over(&file, 0)[..] else { panic!("one leaf") };
        assert!(whole.is_same(&of_file) && whole.end_byte == 100 * SECTOR_BYTES);
        let [part] = over(&file, 4096)[..] else { panic!("one leaf") };
        assert!(part.overlaps(&of_file) && !part.is_same(&of_file) && part.first_byte == 4096);
        let gone = over(&folder.path().join("gone"), 4096);
        assert_eq!(gone, [leaf(7, 0, 100)], "the device stands for a file that cannot be seen");
    }
}
