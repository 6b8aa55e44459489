//! The devices below a block device, from sysfs.
//!
//! Everything in sysfs is taken as untrusted text: numbers are bounded, names go nowhere but into messages, and a device that lies on itself is
//! found by a limit on depth. What does not match is a reason in words, and the map is unknown then; nothing is guessed.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use sealblock_runtime_ioctl::device_mapper::Target;

use super::mapping::{Arrangement, Map, On, SECTOR_BYTES, Sectors, Segment};
use super::table;
use crate::kernel::DeviceNumber;

/// Max. levels of devices on devices.
const MAX_DEPTH: usize = 16;
/// Max. members of a device.
const MAX_MEMBERS: usize = 256;
/// Max. bytes that are read of a file.
const MAX_TEXT_BYTES: u64 = 4096;

/// The active table of a device of device-mapper.
pub(super) type Tables<'a> = &'a dyn Fn(DeviceNumber) -> io::Result<Vec<Target>>;

/// What kind of device it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NodeKind {
    /// A whole disk, or what looks like one from here.
    Disk,
    /// A part of another device.
    Partition,
    /// A file as a device.
    Loop {
        /// The file, as sysfs has it.
        file: PathBuf,
        /// Its byte that is byte 0 of the device.
        offset_bytes: u64,
    },
    /// A device of device-mapper.
    DeviceMapper,
    /// An array of md.
    Md {
        /// Such as `raid1`.
        level: String,
        /// Members that are not there.
        absent: u64,
    },
}

/// A block device and the devices below it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceNode {
    /// Its number.
    pub number: DeviceNumber,
    /// Its name in sysfs, such as `sda1`; of a device of device-mapper, the name it was given.
    pub name: String,
    /// What it is.
    pub kind: NodeKind,
    /// Its length.
    pub sectors: u64,
    /// What distinguishes it from other devices, where the kernel knows that.
    pub id: Option<String>,
    /// The devices directly below it.
    pub members: Vec<DeviceNode>,
    /// Its mapping to them; `None` without devices below, or if the mapping is unknown.
    pub map: Option<Map>,
    /// Why that is not known.
    pub unknown: Option<String>,
}

/// A tree of sysfs.
pub(super) struct Sysfs<'a> {
    /// `/sys`.
    pub(super) root: &'a Path,
    pub(super) tables: Tables<'a>,
}

impl Sysfs<'_> {
    /// A device and all devices below it.
    ///
    /// # Errors
    /// When there is no such device, or the tree is too deep.
    pub(super) fn node(&self, number: DeviceNumber) -> io::Result<DeviceNode> {
        self.node_at(number, 0)
    }

    fn node_at(&self, number: DeviceNumber, depth: usize) -> io::Result<DeviceNode> {
        if depth >= MAX_DEPTH {
            return Err(io::Error::other(format!("more than {MAX_DEPTH} levels of stacked devices")));
        }
        let folder = self.root.join(format!("dev/block/{number}"));
        let sectors = number_in(&folder.join("size"))?;
        let name = fs::canonicalize(&folder)?;
        let name = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let disk = DeviceNode {
            number,
            name,
            kind: NodeKind::Disk,
            sectors,
            id: None,
            members: Vec::new(),
            map: None,
            unknown: None,
        };
        let has = |name: &str| folder.join(name).exists();
        if has("partition") {
            self.partition(&folder, disk, depth)
        } else if has("loop/backing_file") {
            self.loop_device(&folder, disk, depth)
        } else if has("dm") {
            self.device_mapper(&folder, disk, depth)
        } else if has("md") {
            self.md(&folder, disk, depth)
        } else {
            let id = ["wwid", "device/wwid", "device/serial", "serial"]
                .iter()
                .find_map(|file| text_in(&folder.join(file)).ok());
            Ok(DeviceNode { id: id.filter(|id| !id.is_empty()), ..disk })
        }
    }

    fn partition(&self, folder: &Path, node: DeviceNode, depth: usize) -> io::Result<DeviceNode> {
        let start = number_in(&folder.join("start"))?;
        let whole = self.member_in(&folder.join("../dev"), depth)?;
        let id = whole.id.as_ref().map(|id| format!("{id} partition at sector {start}"));
        let end = start.checked_add(node.sectors).filter(|end| *end <= whole.sectors);
        let how = Arrangement::Linear(On { member: 0, sector: start });
        let node = DeviceNode { kind: NodeKind::Partition, id, ..node };
        Ok(match end {
            Some(_) => with_map(node, vec![whole], how),
            None => without_map(node, vec![whole], "the partition extends past the end of its device".to_owned()),
        })
    }

    fn loop_device(&self, folder: &Path, node: DeviceNode, depth: usize) -> io::Result<DeviceNode> {
        let file = PathBuf::from(text_in(&folder.join("loop/backing_file"))?);
        let offset_bytes = number_in(&folder.join("loop/offset"))?;
        let id = Some(format!("{} from byte {offset_bytes}", file.display()));
        // A file lies on its file system, which is no matter of sectors; a device under a loop device is one.
        let device = fs::metadata(&file).ok().filter(|about| about.file_type().is_block_device());
        let node = DeviceNode { kind: NodeKind::Loop { file, offset_bytes }, id, ..node };
        let Some(about) = device else { return Ok(node) };
        let whole = self.node_at(DeviceNumber::of(&about), depth + 1)?;
        let on = On { member: 0, sector: offset_bytes / SECTOR_BYTES };
        let fits = on.sector.checked_add(node.sectors).is_some_and(|end| end <= whole.sectors);
        Ok(match fits && offset_bytes.is_multiple_of(SECTOR_BYTES) {
            true => with_map(node, vec![whole], Arrangement::Linear(on)),
            false => without_map(node, vec![whole], "it extends past the end of its device".to_owned()),
        })
    }

    fn device_mapper(&self, folder: &Path, node: DeviceNode, depth: usize) -> io::Result<DeviceNode> {
        let named = text_in(&folder.join("dm/name")).ok().filter(|name| !name.is_empty());
        let id = text_in(&folder.join("dm/uuid")).ok().filter(|id| !id.is_empty());
        let name = named.map_or(node.name.clone(), |name| format!("{} ({name})", node.name));
        let node = DeviceNode { kind: NodeKind::DeviceMapper, name, id, ..node };
        let slaves = || self.slaves(folder, depth);
        let table = match (self.tables)(node.number) {
            Ok(table) => table,
            Err(error) => return Ok(without_map(node, slaves()?, format!("its table cannot be read: {error}"))),
        };
        let (segments, numbers) = table::segments(&table);
        let unknown = segments.iter().zip(&table).find(|(segment, _)| segment.how == Arrangement::Unknown);
        if let Some((_, target)) = unknown {
            return Ok(without_map(node, slaves()?, format!("it has type {:?}, which is not supported", target.kind)));
        }
        if numbers.len() > MAX_MEMBERS {
            return Ok(without_map(node, slaves()?, "it has more members than are supported".to_owned()));
        }
        let members =
            numbers.into_iter().map(|number| self.node_at(number, depth + 1)).collect::<io::Result<Vec<_>>>()?;
        Ok(of_segments(node, members, segments))
    }

    fn md(&self, folder: &Path, node: DeviceNode, depth: usize) -> io::Result<DeviceNode> {
        let level = text_in(&folder.join("md/level"))?;
        let id = text_in(&folder.join("md/uuid")).ok().filter(|id| !id.is_empty());
        let node = DeviceNode { kind: NodeKind::Md { level: level.clone(), absent: 0 }, id, ..node };
        let disks = number_in(&folder.join("md/raid_disks")).unwrap_or(0);
        if level != "raid1" || disks == 0 || disks > MAX_MEMBERS as u64 {
            let why = format!("it is an array of level {level:?}, which is not supported");
            return Ok(without_map(node, self.slaves(folder, depth)?, why));
        }
        let mut ons = Vec::new();
        let mut members = Vec::new();
        for disk in 0..disks {
            // A missing one has no link.
            let Ok(member) = fs::canonicalize(folder.join(format!("md/rd{disk}"))) else { continue };
            // Only a member in sync holds what the array holds.
            let state = text_in(&member.join("state")).unwrap_or_default();
            let sector = number_in(&member.join("offset"))?;
            members.push(self.member_in(&member.join("block/dev"), depth)?);
            if state.split(',').any(|word| word == "in_sync") {
                ons.push(On { member: members.len() - 1, sector });
            }
        }
        let absent = disks.saturating_sub(members.len() as u64);
        let node = DeviceNode { kind: NodeKind::Md { level, absent }, ..node };
        if ons.is_empty() {
            return Ok(without_map(node, members, "no member of the array is in sync".to_owned()));
        }
        Ok(with_map(node, members, Arrangement::Copies(ons)))
    }

    fn slaves(&self, folder: &Path, depth: usize) -> io::Result<Vec<DeviceNode>> {
        let mut slaves: Vec<PathBuf> =
            fs::read_dir(folder.join("slaves"))?.flatten().map(|entry| entry.path()).collect();
        slaves.sort();
        slaves.truncate(MAX_MEMBERS);
        slaves.iter().map(|slave| self.member_in(&slave.join("dev"), depth)).collect()
    }

    /// The device whose number is in this file.
    fn member_in(&self, file: &Path, depth: usize) -> io::Result<DeviceNode> {
        let number = text_in(file)?.parse().map_err(|_| invalid(file))?;
        self.node_at(number, depth + 1)
    }
}

/// A device that lies on its members in one way.
fn with_map(node: DeviceNode, members: Vec<DeviceNode>, how: Arrangement) -> DeviceNode {
    let sectors = Sectors::new(0, node.sectors);
    of_segments(node, members, vec![Segment { sectors, how }])
}

fn of_segments(node: DeviceNode, members: Vec<DeviceNode>, segments: Vec<Segment>) -> DeviceNode {
    match Map::new(segments, members.len()) {
        Ok(map) => DeviceNode { members, map: Some(map), ..node },
        Err(why) => without_map(node, members, why.to_string()),
    }
}

fn without_map(node: DeviceNode, members: Vec<DeviceNode>, why: String) -> DeviceNode {
    DeviceNode { members, unknown: Some(why), ..node }
}

/// The text of a file, without the end of its line.
fn text_in(file: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(file)?.take(MAX_TEXT_BYTES).read_to_string(&mut text)?;
    let text = text.trim_end_matches('\n').trim();
    if text.chars().any(char::is_control) { Err(invalid(file)) } else { Ok(text.to_owned()) }
}

fn number_in(file: &Path) -> io::Result<u64> {
    let text = text_in(file)?;
    // `parse` takes a sign.
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten().ok_or_else(|| invalid(file))
}

fn invalid(file: &Path) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{} has unexpected content", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::below::mapping::{Piece, Place};

    /// A folder as `/sys`: each line is a path and its content.
    fn sysfs(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            match content.strip_prefix("-> ") {
                Some(link) => std::os::unix::fs::symlink(link, path).unwrap(),
                None => fs::write(path, format!("{content}\n")).unwrap(),
            }
        }
        root
    }

    const DISKS: &[(&str, &str)] = &[
        ("dev/block/8:0", "-> ../../block/sda"),
        ("dev/block/8:1", "-> ../../block/sda/sda1"),
        ("dev/block/8:16", "-> ../../block/sdb"),
        ("block/sda/dev", "8:0"),
        ("block/sda/size", "10000"),
        ("block/sda/device/wwid", "naa.5000"),
        ("block/sda/sda1/dev", "8:1"),
        ("block/sda/sda1/size", "4000"),
        ("block/sda/sda1/partition", "1"),
        ("block/sda/sda1/start", "2048"),
        ("block/sdb/dev", "8:16"),
        ("block/sdb/size", "5000"),
    ];

    fn no_tables(_: DeviceNumber) -> io::Result<Vec<Target>> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn node_of(root: &Path, number: &str) -> io::Result<DeviceNode> {
        Sysfs { root, tables: &no_tables }.node(number.parse().unwrap())
    }

    fn with(more: &[(&str, &str)]) -> tempfile::TempDir {
        sysfs(&DISKS.iter().chain(more).copied().collect::<Vec<_>>())
    }

    #[test]
    fn a_partition_lies_on_its_disk_and_one_past_its_end_is_refused() {
        let root = sysfs(DISKS);
        let part = node_of(root.path(), "8:1").unwrap();
        assert_eq!(
            (part.name.as_str(), part.kind.clone(), part.members[0].name.as_str()),
            ("sda1", NodeKind::Partition, "sda")
        );
        assert_eq!(part.id.as_deref(), Some("naa.5000 partition at sector 2048"));
        let sectors = Sectors { start: 10, count: 5 };
        let place = Place::On(On { member: 0, sector: 2058 });
        assert_eq!(part.map.as_ref().unwrap().down(sectors).collect::<Vec<_>>(), [Piece { sectors, place }]);
        fs::write(root.path().join("block/sda/size"), "6047\n").unwrap();
        let part = node_of(root.path(), "8:1").unwrap();
        assert!(part.map.is_none() && part.unknown.unwrap().contains("past the end"));
    }

    #[test]
    fn what_sysfs_says_is_checked() {
        let root = sysfs(DISKS);
        assert_eq!(node_of(root.path(), "9:9").unwrap_err().kind(), io::ErrorKind::NotFound);
        for (file, content) in
            [("size", "-1"), ("size", ""), ("size", "18446744073709551616"), ("sda1/start", "x"), ("dev", "8")]
        {
            let path = root.path().join("block/sda").join(file);
            let before = fs::read(&path).unwrap();
            fs::write(&path, content).unwrap();
            assert_eq!(node_of(root.path(), "8:1").unwrap_err().kind(), io::ErrorKind::InvalidData, "{file} {content}");
            fs::write(&path, before).unwrap();
        }
        // A device that lies on itself.
        fs::write(root.path().join("block/sda/partition"), "1\n").unwrap();
        fs::write(root.path().join("block/sda/start"), "0\n").unwrap();
        fs::write(root.path().join("block/dev"), "8:0\n").unwrap();
        assert!(node_of(root.path(), "8:1").unwrap_err().to_string().contains("levels"));
    }

    #[test]
    fn a_table_of_device_mapper_is_a_map_and_without_the_right_there_are_members_and_a_reason() {
        let root = with(&[
            ("dev/block/252:0", "-> ../../block/dm-0"),
            ("block/dm-0/size", "300"),
            ("block/dm-0/dm/name", "data"),
            ("block/dm-0/dm/uuid", "LVM-x"),
            ("block/dm-0/slaves/sda1", "-> ../../sda/sda1"),
            ("block/dm-0/slaves/sdb", "-> ../../sdb"),
        ]);
        let bare = node_of(root.path(), "252:0").unwrap();
        assert!(bare.map.is_none() && bare.unknown.unwrap().contains("table"));
        assert_eq!(bare.members.iter().map(|member| member.name.as_str()).collect::<Vec<_>>(), ["sda1", "sdb"]);

        let table = |targets: &'static [(u64, u64, &str, &str)]| {
            move |_| -> io::Result<Vec<Target>> {
                let each = targets.iter().map(|(start_sectors, length_sectors, kind, parameters)| Target {
                    start_sectors: *start_sectors,
                    length_sectors: *length_sectors,
                    kind: (*kind).to_owned(),
                    parameters: (*parameters).to_owned(),
                });
                Ok(each.collect())
            }
        };
        let both = table(&[(0, 100, "linear", "8:16 7"), (100, 200, "linear", "8:1 0")]);
        let sysfs = Sysfs { root: root.path(), tables: &both };
        let node = sysfs.node("252:0".parse().unwrap()).unwrap();
        assert_eq!((node.name.as_str(), node.id.as_deref(), &node.unknown), ("dm-0 (data)", Some("LVM-x"), &None));
        assert_eq!(node.members.iter().map(|member| member.name.as_str()).collect::<Vec<_>>(), ["sdb", "sda1"]);
        assert_eq!(node.members[1].members[0].name, "sda");
        let thin = table(&[(0, 300, "thin", "8:16 7")]);
        let node = Sysfs { root: root.path(), tables: &thin }.node("252:0".parse().unwrap()).unwrap();
        assert!(node.map.is_none() && node.unknown.unwrap().contains("\"thin\"") && node.members.len() == 2);
    }

    #[test]
    fn copies_of_raid1_are_those_of_members_in_sync() {
        let files = [
            ("dev/block/9:0", "-> ../../block/md0"),
            ("block/md0/size", "1000"),
            ("block/md0/md/level", "raid1"),
            ("block/md0/md/raid_disks", "3"),
            ("block/md0/md/rd0", "-> dev-sda1"),
            ("block/md0/md/rd1", "-> dev-sdb"),
            ("block/md0/md/dev-sda1/state", "in_sync"),
            ("block/md0/md/dev-sda1/offset", "264"),
            ("block/md0/md/dev-sda1/block", "-> ../../../sda/sda1"),
            ("block/md0/md/dev-sdb/state", "spare"),
            ("block/md0/md/dev-sdb/offset", "264"),
            ("block/md0/md/dev-sdb/block", "-> ../../../sdb"),
            ("block/md0/slaves/sdb", "-> ../../sdb"),
        ];
        let root = with(&files);
        let array = node_of(root.path(), "9:0").unwrap();
        assert_eq!((array.members.len(), &array.kind), (2, &NodeKind::Md { level: "raid1".to_owned(), absent: 1 }));
        let how = Arrangement::Copies(vec![On { member: 0, sector: 264 }]);
        assert_eq!(array.map.unwrap().segments()[0].how, how);
        fs::write(root.path().join("block/md0/md/dev-sda1/state"), "faulty,in_sync_not\n").unwrap();
        assert!(node_of(root.path(), "9:0").unwrap().unknown.unwrap().contains("in sync"));
        fs::write(root.path().join("block/md0/md/level"), "raid5\n").unwrap();
        let array = node_of(root.path(), "9:0").unwrap();
        assert!(array.map.is_none() && array.members.len() == 1 && array.unknown.unwrap().contains("raid5"));
    }

    #[test]
    fn a_loop_device_names_its_file() {
        let root = with(&[
            ("dev/block/7:0", "-> ../../block/loop0"),
            ("block/loop0/size", "8"),
            ("block/loop0/loop/backing_file", "/srv/disk image"),
            ("block/loop0/loop/offset", "512"),
        ]);
        let node = node_of(root.path(), "7:0").unwrap();
        assert_eq!(node.kind, NodeKind::Loop { file: "/srv/disk image".into(), offset_bytes: 512 });
    }
}
