//! Filesystems on several devices that the kernel filled, for every profile. A file is read through the chunk map: once
//! from each copy, and with parity also once without each device. All data must equal what was written, node by node
//! and sector by sector.
//!
//! Needs root, loop devices, `mkfs.btrfs` and the filesystem. Without these the tests print what is missing and are
//! skipped.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use sealblock_btrfs::chunk_map::{ChunkMap, Located, Place};
use sealblock_btrfs::parity::{Role, restore};
use sealblock_btrfs_format::checker::{Expected, check_node};
use sealblock_btrfs_format::checker_items::check_chunk;
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::file_extent::FileExtent;
use sealblock_btrfs_format::key::{Key, objectid};
use sealblock_btrfs_format::superblock::{COPY_OFFSETS, Geometry, SUPERBLOCK_BYTES, Superblock};
use sealblock_proofs_btrfs_images::programs::{Mount, mkfs};
use sealblock_proofs_btrfs_images::sets::PROFILES;
use sealblock_proofs_btrfs_images::skip;

const FILE_BYTES: usize = 5 << 20;

/// The content of the file: every eight bytes have their offset.
fn content() -> Vec<u8> {
    (0..FILE_BYTES as u64 / 8).flat_map(|word| (word * 8 + 1).to_le_bytes()).collect()
}

/// Makes a filesystem on this number of images and writes the file.
fn make(folder: &Path, profile: &str, devices: usize) -> Result<Vec<PathBuf>, String> {
    let images: Vec<PathBuf> = (0..devices).map(|number| folder.join(format!("{profile}-{number}"))).collect();
    mkfs(&images, 256, &["-m", "raid1", "-d", profile])?;
    let mount = Mount::new(&images, "noatime")?;
    fs::write(mount.path("file"), content()).unwrap();
    mount.unmount()?;
    Ok(images)
}

/// The images of a filesystem, by device number.
struct Devices {
    files: Vec<(u64, File)>,
    map: ChunkMap,
    geometry: Geometry,
}

impl Devices {
    fn read_place(&self, place: Place, bytes: usize) -> Vec<u8> {
        let (_, file) = self.files.iter().find(|(devid, _)| *devid == place.devid).expect("a device with this number");
        let mut data = vec![0; bytes];
        file.read_exact_at(&mut data, place.offset).unwrap();
        data
    }

    /// Reads a piece, from this copy of it.
    fn read_copy(&self, located: &Located, copy: usize) -> Vec<u8> {
        self.read_place(located.copies[copy % located.copies.len()], located.bytes as usize)
    }

    /// Reads a piece as if these devices were absent.
    fn read_without(&self, located: &Located, absent: &[u64]) -> Option<Vec<u8>> {
        if let Some(place) = located.copies.iter().find(|place| !absent.contains(&place.devid)) {
            return Some(self.read_place(*place, located.bytes as usize));
        }
        let row = located.row.as_ref()?;
        let read = |role: &dyn Fn(&Role) -> bool| -> Vec<Option<Vec<u8>>> {
            let of_role = row.pieces.iter().filter(|(piece, _)| role(piece));
            of_role
                .map(|(_, place)| {
                    (!absent.contains(&place.devid)).then(|| self.read_place(*place, located.bytes as usize))
                })
                .collect()
        };
        let data = read(&|role| matches!(role, Role::Data(_)));
        let (p, q) = (read(&|role| *role == Role::P), read(&|role| *role == Role::Q));
        let data: Vec<Option<&[u8]>> = data.iter().map(Option::as_deref).collect();
        let parity = |list: &'static str, all: &'_ [Option<Vec<u8>>]| -> Option<Vec<u8>> {
            assert!(all.len() <= 1, "{list}");
            all.first().cloned().flatten()
        };
        let (p, q) = (parity("P", &p), parity("Q", &q));
        restore(row.wanted, &data, p.as_deref(), q.as_deref()).ok()
    }

    /// Reads a logical range piece by piece.
    fn read(&self, logical: u64, bytes: u64, read: impl Fn(&Located) -> Option<Vec<u8>>) -> Option<Vec<u8>> {
        let mut data = Vec::new();
        while (data.len() as u64) < bytes {
            let at = data.len() as u64;
            data.extend(read(&self.map.locate(logical + at, bytes - at).unwrap())?);
        }
        Some(data)
    }

    /// All items of a tree, with every node read from every copy.
    fn items(&self, owner: u64, bytenr: u64, level: u8, generation: u64) -> Vec<(Key, Vec<u8>)> {
        let mut pending = vec![Expected { bytenr, owner, level, generation, first_key: None }];
        let mut items = Vec::new();
        while let Some(expected) = pending.pop() {
            for copy in (0..2).rev() {
                let read = |located: &Located| Some(self.read_copy(located, copy));
                let bytes = self.read(expected.bytenr, u64::from(self.geometry.node_bytes), read).unwrap();
                let node = check_node(&bytes, &self.geometry, &expected).unwrap();
                if copy == 0 {
                    pending.extend((0..node.pointers().len()).rev().map(|slot| node.child(slot, owner).unwrap()));
                    items.extend(node.entries().map(|(key, data)| (key, data.to_vec())));
                }
            }
        }
        items
    }
}

/// Opens the images, reads the chunk tree, and finds the extents of the file: address, bytes, offset in the file.
fn open(images: &[PathBuf]) -> (Devices, Vec<(u64, u64, usize)>) {
    let mut files = Vec::new();
    let mut superblock = vec![0; SUPERBLOCK_BYTES];
    for image in images {
        let file = File::open(image).unwrap();
        file.read_exact_at(&mut superblock, COPY_OFFSETS[0]).unwrap();
        files.push((Superblock::decode(&superblock).unwrap().dev_item.devid.get(), file));
    }
    let superblock = Superblock::decode(&superblock).unwrap();
    let geometry = superblock.check(COPY_OFFSETS[0]).unwrap();
    let mut devices = Devices { files, map: ChunkMap::default(), geometry };
    for chunk in superblock.sys_chunks() {
        let (key, chunk) = chunk.unwrap();
        check_chunk(&geometry, key, &chunk).unwrap();
        devices.map.add(key.offset, &chunk).unwrap();
    }
    let (root, level) = (superblock.chunk_root.get(), superblock.chunk_root_level);
    for (key, data) in devices.items(objectid::CHUNK_TREE, root, level, superblock.chunk_root_generation.get()) {
        if let Item::Chunk(chunk) = Item::decode(key, &data).unwrap() {
            devices.map.add(key.offset, &chunk).unwrap();
        }
    }
    let (root, level) = (superblock.root.get(), superblock.root_level);
    let mut extents = Vec::new();
    for (key, data) in devices.items(objectid::ROOT_TREE, root, level, superblock.generation.get()) {
        if let (objectid::FS_TREE, Item::Root(root)) = (key.objectid, Item::decode(key, &data).unwrap()) {
            let (bytenr, generation) = (root.head.bytenr.get(), root.head.generation.get());
            for (key, data) in devices.items(objectid::FS_TREE, bytenr, root.head.level, generation) {
                if let Item::FileExtent(FileExtent::Regular(_, at)) = Item::decode(key, &data).unwrap() {
                    let start = at.disk_bytenr.get() + at.offset.get();
                    extents.push((start, at.num_bytes.get(), key.offset as usize));
                }
            }
        }
    }
    (devices, extents)
}

fn compare(profile: &str, images: &[PathBuf], may_be_absent: usize) {
    let (devices, extents) = open(images);
    let content = content();
    assert_eq!(extents.iter().map(|(_, bytes, _)| *bytes as usize).sum::<usize>(), FILE_BYTES, "{profile}");
    let ids: Vec<u64> = devices.files.iter().map(|(devid, _)| *devid).collect();
    for (logical, bytes, offset) in extents {
        let expected = &content[offset..offset + bytes as usize];
        for copy in 0..4 {
            let found = devices.read(logical, bytes, |located| Some(devices.read_copy(located, copy))).unwrap();
            assert!(found == expected, "{profile}: copy {copy} of {offset}");
        }
        for one in 0..ids.len() {
            for other in one..ids.len() {
                let mut absent = vec![ids[one], ids[other]];
                absent.dedup();
                if absent.len() <= may_be_absent {
                    let read = |located: &Located| devices.read_without(located, &absent);
                    assert!(devices.read(logical, bytes, read).unwrap() == expected, "{profile} without {absent:?}");
                }
            }
        }
    }
    if profile == "raid5" {
        let gone = [ids[0], ids[1]];
        let (logical, bytes, _) = open(images).1[0];
        assert_eq!(devices.read(logical, bytes, |located| devices.read_without(located, &gone)), None);
    }
}

#[test]
fn files_are_read_from_the_devices_of_every_profile_and_without_those_that_may_be_absent() {
    let folder = tempfile::tempdir().unwrap();
    for (profile, devices, _, may_be_absent) in PROFILES {
        match make(folder.path(), profile, devices) {
            Ok(images) => compare(profile, &images, may_be_absent),
            Err(why) => skip(&format!("{profile}: {why}")),
        }
    }
}
