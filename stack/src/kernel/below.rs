//! How local devices are stacked: the devices below a block device or a file.
//!
//! Partitions, linear, striped and mirrored tables of device-mapper, RAID1 of md, and loop devices are mapped sector by sector
//! (`mapping.rs`); of others the members are named and how they lie is unknown. Nothing here opens a block device.

mod mapping;
mod sysfs;
mod table;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use sealblock_runtime_ioctl::btrfs;
use sealblock_runtime_ioctl::device_mapper::{self, Target};

pub use mapping::{Arrangement, Map, MapError, On, Piece, Place, SECTOR_BYTES, Sectors, Segment};
pub use sysfs::{DeviceNode, NodeKind};

use crate::kernel::DeviceNumber;
use crate::kernel::mounts::mount_of;
use sysfs::Sysfs;

/// Where the kernel shows devices.
const SYSFS: &str = "/sys";
/// Max. levels of files on devices on files.
const MAX_LEVELS: usize = 8;

/// A block device and all devices below it.
///
/// # Errors
/// When there is no such device, or sysfs is not what it should be.
pub fn node(number: DeviceNumber) -> io::Result<DeviceNode> {
    Sysfs { root: Path::new(SYSFS), tables: &table_of }.node(number)
}

/// The block device at a path, or those that the file system of a file lies on (several only for btrfs), each with all that it lies on.
///
/// # Errors
/// When there is none, as for a file on tmpfs, or it does not tell.
pub fn nodes_under(path: &Path) -> io::Result<Vec<DeviceNode>> {
    let number = DeviceNumber::of(&fs::metadata(path)?);
    if number.is_device() {
        return Ok(vec![node(number)?]);
    }
    let unknown = || io::Error::new(io::ErrorKind::Unsupported, "its file system is on no known block device");
    // Another file system without a number may lie on anything.
    let mount = mount_of(path).filter(|mount| mount.kind == "btrfs").ok_or_else(unknown)?;
    let mounted = File::open(&mount.point)?;
    let mut nodes = Vec::new();
    for (_, device) in btrfs::devices(mounted.as_fd())? {
        let about = fs::metadata(Path::new(OsStr::from_bytes(&device)))?;
        if !about.file_type().is_block_device() {
            return Err(unknown());
        }
        nodes.push(node(DeviceNumber::of(&about))?);
    }
    if nodes.is_empty() { Err(unknown()) } else { Ok(nodes) }
}

/// All devices whose load is that of a target at this path: the devices at the bottom, through loop devices and files, and the loop
/// devices on the way.
///
/// # Errors
/// When one of them is not known.
pub fn disks_under(path: &Path) -> io::Result<BTreeSet<DeviceNumber>> {
    let mut disks = BTreeSet::new();
    let mut paths = vec![path.to_owned()];
    for _ in 0..MAX_LEVELS {
        let mut files = Vec::new();
        for path in &paths {
            nodes_under(path)?.iter().for_each(|node| bottom(node, &mut disks, &mut files));
        }
        if files.is_empty() {
            return Ok(disks);
        }
        paths = files;
    }
    Err(io::Error::other(format!("more than {MAX_LEVELS} levels of loop devices on files")))
}

fn bottom(node: &DeviceNode, disks: &mut BTreeSet<DeviceNumber>, files: &mut Vec<PathBuf>) {
    match (&node.kind, &node.members[..]) {
        (NodeKind::Loop { file, .. }, _) => {
            if disks.insert(node.number) {
                files.push(file.clone());
            }
        }
        (_, []) => drop(disks.insert(node.number)),
        (_, members) => members.iter().for_each(|member| bottom(member, disks, files)),
    }
}

fn table_of(number: DeviceNumber) -> io::Result<Vec<Target>> {
    let control = File::options().read(true).write(true).open(device_mapper::CONTROL)?;
    device_mapper::table(control.as_fd(), number.major, number.minor)
}

impl DeviceNode {
    /// Which sectors of this device lie in these of a device below it, at any depth. At most `limit` runs.
    pub fn up_from(&self, below: DeviceNumber, wanted: Sectors, limit: usize) -> Vec<Sectors> {
        if self.number == below {
            return vec![wanted];
        }
        let Some(map) = &self.map else { return Vec::new() };
        let mut found = Vec::new();
        for (number, member) in self.members.iter().enumerate() {
            for part in member.up_from(below, wanted, limit) {
                let room = limit.saturating_sub(found.len());
                found.extend(map.up(number, part).take(room).map(|piece| piece.sectors));
            }
        }
        found
    }

    /// True if it is this device, or above it at any depth.
    pub fn lies_on(&self, below: DeviceNumber) -> bool {
        self.number == below || self.members.iter().any(|member| member.lies_on(below))
    }

    /// What it is, in words.
    pub fn to_text(&self) -> String {
        let kind = match &self.kind {
            NodeKind::Disk => return self.name.clone(),
            NodeKind::Partition => match self.map.as_ref().and_then(|map| map.segments().first()) {
                Some(Segment { how: Arrangement::Linear(on), .. }) => format!("partition from sector {}", on.sector),
                _ => "partition".to_owned(),
            },
            NodeKind::Loop { file, offset_bytes: 0 } => format!("loop over {}", file.display()),
            NodeKind::Loop { file, offset_bytes } => format!("loop over {} from byte {offset_bytes}", file.display()),
            NodeKind::DeviceMapper => format!("device-mapper, {}", self.arrangement_text()),
            NodeKind::Md { level, absent: 0 } => format!("md {level}"),
            NodeKind::Md { level, absent } => format!("md {level}, {absent} absent"),
        };
        format!("{}: {kind}", self.name)
    }

    /// Its mapping to its members, in a word.
    pub fn arrangement_text(&self) -> &'static str {
        let word = |segment: &Segment| match segment.how {
            Arrangement::Linear(_) => "linear",
            Arrangement::Striped { .. } => "striped",
            Arrangement::Copies(_) => "copies",
            Arrangement::Nowhere => "nowhere",
            Arrangement::Unknown => "unknown",
        };
        let mut words = self.map.iter().flat_map(Map::segments).map(word);
        let Some(first) = words.next() else { return "unknown" };
        if words.all(|word| word == first) { first } else { "mixed" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(minor: u32) -> DeviceNumber {
        DeviceNumber { major: 8, minor }
    }

    fn node(minor: u32, members: Vec<DeviceNode>, how: Option<Arrangement>) -> DeviceNode {
        let kind = if members.is_empty() { NodeKind::Disk } else { NodeKind::Partition };
        let segments = how.map(|how| vec![Segment { sectors: Sectors { start: 0, count: 100 }, how }]);
        let map = segments.map(|segments| Map::new(segments, members.len()).unwrap());
        let name = format!("sd{minor}");
        DeviceNode { number: number(minor), name, kind, sectors: 100, id: None, members, map, unknown: None }
    }

    #[test]
    fn sectors_come_up_through_all_levels_and_through_each_member() {
        let linear = |sector| Some(Arrangement::Linear(On { member: 0, sector }));
        let disk = || node(0, Vec::new(), None);
        let both = vec![node(1, vec![disk()], linear(10)), node(2, vec![disk()], linear(500))];
        let copies = [(0, 3), (1, 0)].map(|(member, sector)| On { member, sector }).to_vec();
        let top = node(3, both, Some(Arrangement::Copies(copies)));
        let up = |start, count, limit| top.up_from(number(0), Sectors { start, count }, limit);
        assert_eq!(up(20, 4, 9), [Sectors { start: 7, count: 4 }]);
        assert_eq!(up(500, 4, 9), [Sectors { start: 0, count: 4 }]);
        assert_eq!(up(0, 1000, 9).len(), 2);
        assert_eq!(up(0, 1000, 1).len(), 1);
        assert_eq!(up(0, 10, 9), []);
        assert!(top.lies_on(number(0)) && top.lies_on(number(3)) && !top.lies_on(number(4)));
        let (mut disks, mut files) = (BTreeSet::new(), Vec::new());
        bottom(&top, &mut disks, &mut files);
        assert_eq!((disks.into_iter().collect::<Vec<_>>(), files.len()), (vec![number(0)], 0));
    }

    #[test]
    fn the_device_under_this_folder_is_told_or_the_reason_is() {
        match nodes_under(Path::new(".")) {
            Ok(nodes) => assert!(nodes.iter().all(|node| node.sectors > 0 && !node.name.is_empty()), "{nodes:?}"),
            Err(error) => eprintln!("skipped: {error}"),
        }
    }
}
