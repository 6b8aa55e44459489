//! Filesystems that no program creates: damaged copies, directory loops, invalid names, items that contradict each
//! other. Good data can be read, bad data are reported, and every operation ends.

use std::collections::BTreeMap;

use futures_executor::block_on;
use sealblock_block::{Device, Durability, DynDevice, Request};
use sealblock_btrfs::inode::{FileKind, Inode};
use sealblock_btrfs::verify::{Finding, Unwatched, Verdict, VerifyOptions, verify};
use sealblock_btrfs::walk::{Met, Walk};
use sealblock_btrfs::{Candidate, CopyFault, Filesystem, FsError, OpenOptions};
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::items::directory::FileType;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_integrity::{Sealed, Tags};
use sealblock_media_memory::MemoryDevice;
use sealblock_proofs_btrfs_images::handmade::{
    DATA_START, DEVICE_BYTES, Handmade, Pieces, SECTOR_BYTES, Storage, regular,
};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};

const TOP: u64 = objectid::FIRST_FREE;
/// The distance from the first copies of nodes to the second ones.
const SECOND_COPY: u64 = 4 << 20;
const METADATA: std::ops::Range<u64> = 4 << 20..8 << 20;

fn content(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at / 7 + at / 4096 + 1) as u8).collect()
}

fn write(device: &DynDevice, offset: u64, bytes: &[u8]) {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().next_multiple_of(SECTOR_BYTES), 0);
    if bytes.is_empty() {
        return;
    }
    let extent = Extent::from_raw(offset / 4096, bytes.len() as u64 / 4096).unwrap();
    let data = Sealed::seal(Slice::copy_from(&bytes), BlockSize::B4096, None, &Tags::default());
    block_on(device.execute(Request::write(extent, data, Durability::Volatile))).unwrap();
}

fn device(pieces: &Pieces) -> DynDevice {
    let memory = MemoryDevice::new(BlockSize::B4096, DEVICE_BYTES / 4096, None);
    let device = DynDevice::new("memory", memory);
    pieces.0.iter().for_each(|(offset, bytes)| write(&device, *offset, bytes));
    device
}

fn open(pieces: &Pieces) -> Result<Filesystem, FsError> {
    let candidates = vec![Candidate { name: "memory".into(), device: device(pieces) }];
    block_on(Filesystem::open(candidates, OpenOptions::default()))
}

fn top(filesystem: &Filesystem) -> Inode {
    let subvolume = block_on(filesystem.subvolume(objectid::FS_TREE)).unwrap();
    block_on(filesystem.top(&subvolume)).unwrap()
}

/// Paths with their content, or their fault.
fn walk(filesystem: &Filesystem) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut walk = Walk::new(filesystem, top(filesystem), true);
    while let Some(visit) = block_on(walk.next()) {
        let told = match visit.met {
            Met::Inode(inode) if inode.kind == FileKind::Regular => {
                match block_on(filesystem.read(&inode, 0, 1 << 20)) {
                    Ok(data) if data[..] == content(data.len()) => format!("{} bytes", data.len()),
                    Ok(_) => "WRONG DATA".to_owned(),
                    Err(error) => error.to_string(),
                }
            }
            Met::Inode(inode) => format!("{:?}", inode.kind),
            Met::EmptyDirectory { .. } => "elsewhere".to_owned(),
            Met::Lost(error) => format!("lost: {error}"),
            Met::BadName(error) => format!("bad name: {error}"),
        };
        let path = String::from_utf8_lossy(&visit.path).into_owned();
        found.entry(path).and_modify(|before: &mut String| before.push_str(&format!("; {told}"))).or_insert(told);
    }
    found
}

/// Some files in some directories.
fn sample(checksum: ChecksumType) -> Handmade {
    let mut made = Handmade::new(4096, checksum);
    made.file(TOP, b"inline", &content(100), Storage::Inline);
    made.file(TOP, b"summed", &content(70_000), Storage::Summed);
    made.file(TOP, b"unsummed", &content(9000), Storage::Unsummed);
    let folder = made.directory(TOP, b"folder");
    for number in 0..40 {
        made.file(folder, format!("file-{number}").as_bytes(), &content(10 * number), Storage::Inline);
    }
    made
}

#[test]
fn handmade_filesystems_are_read() {
    for checksum in ChecksumType::ALL {
        let found = walk(&open(&sample(checksum).build()).unwrap());
        assert_eq!(found.len(), 45, "{found:?}");
        assert_eq!(found["inline"], "100 bytes");
        assert_eq!((&found["summed"][..], &found["unsummed"][..]), ("70000 bytes", "9000 bytes"));
        assert_eq!((&found["folder"][..], &found["folder/file-39"][..]), ("Directory", "390 bytes"));
    }
}

#[test]
fn data_without_checksums_are_read_where_they_are_asked_for_and_named() {
    let mut made = Handmade::new(4096, ChecksumType::Crc32c);
    // Each checksum item covers 32 sectors.
    let (sectors, sector) = (80, SECTOR_BYTES as u64);
    made.file(TOP, b"summed", &content(sectors * SECTOR_BYTES - 5), Storage::Summed);
    let (whole, bytes) = (made.clone(), sectors * SECTOR_BYTES);
    let second = Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, DATA_START + 32 * sector);
    made.trees.get_mut(&objectid::CSUM_TREE).unwrap().remove(&second).unwrap();
    let read = |pieces: &Pieces, at: u64, bytes: usize| {
        let filesystem = open(pieces).unwrap();
        let inode = block_on(filesystem.resolve(top(&filesystem), b"summed", true)).unwrap();
        (block_on(filesystem.read(&inode, at, bytes)), block_on(filesystem.read_any(&inode, at, bytes)))
    };
    let (plain, any) = read(&whole.build(), 0, bytes);
    assert_eq!((&plain.unwrap()[..], any.unwrap().1), (&content(bytes - 5)[..], Vec::new()));
    let mut pieces = made.build();
    let (plain, any) = read(&pieces, 0, bytes);
    assert!(matches!(plain, Err(FsError::NoSum { logical }) if logical == DATA_START + 32 * sector));
    let (data, unverified) = any.unwrap();
    assert_eq!(
        (&data[..], &unverified[..]),
        (&content(bytes - 5)[..], std::slice::from_ref(&(32 * sector..64 * sector)))
    );
    // A range that begins and ends within sectors.
    let (_, any) = read(&pieces, 40 * sector + 7, 9000);
    let range = 40 * sector + 7..40 * sector + 9007;
    assert_eq!(any.unwrap().1, std::slice::from_ref(&range));

    // A sector that does not match its checksum is not returned, but a sector without a checksum is returned as stored.
    let data = pieces.0.iter_mut().find(|(at, _)| *at == DATA_START).unwrap();
    data.1[70 * SECTOR_BYTES] ^= 1;
    data.1[40 * SECTOR_BYTES] ^= 1;
    assert!(matches!(read(&pieces, 60 * sector, bytes).1, Err(FsError::Lost(_))));
    let (data, unverified) = read(&pieces, 40 * sector, SECTOR_BYTES).1.unwrap();
    assert_eq!((data[0], unverified.len()), (content(bytes)[40 * SECTOR_BYTES] ^ 1, 1));
}

#[test]
fn paths_are_resolved() {
    let filesystem = open(&sample(ChecksumType::Crc32c).build()).unwrap();
    let resolve = |path: &[u8]| block_on(filesystem.resolve(top(&filesystem), path, true));
    assert_eq!(resolve(b"folder/../folder/./file-3").unwrap().size(), 30);
    assert_eq!(resolve(b"../../inline").unwrap().size(), 100);
    assert!(matches!(resolve(b"folder/absent"), Err(FsError::Absent(_))));
    assert!(matches!(resolve(b"inline/below"), Err(FsError::Kind(_))));
    let file = resolve(b"folder/file-3").unwrap();
    assert_eq!(block_on(filesystem.paths(file.tree, file.ino)).unwrap(), [b"/folder/file-3".to_vec()]);
}

#[test]
fn one_damaged_copy_of_a_node_is_reported_and_the_other_read() {
    let good = sample(ChecksumType::Crc32c).build();
    let expected = walk(&open(&good).unwrap());
    let nodes = good.0.iter().filter(|(offset, _)| METADATA.contains(offset)).count();
    assert!(nodes > 10);
    for damaged in 0..nodes {
        let mut pieces = good.clone();
        let node = pieces.0.iter_mut().filter(|(offset, _)| METADATA.contains(offset)).nth(damaged).unwrap();
        node.1[200] ^= 1;
        let filesystem = open(&pieces).unwrap();
        assert_eq!(walk(&filesystem), expected);
        let bad = filesystem.take_bad_copies();
        // A tree that was not requested was not read.
        assert!(bad.len() <= 1, "{bad:?}");
        assert!(bad.iter().all(|copy| copy.mirror == 1 && matches!(copy.fault, CopyFault::Node(_))), "{bad:?}");
    }
}

#[test]
fn a_node_with_two_damaged_copies_is_lost_and_the_rest_is_read() {
    let good = sample(ChecksumType::Crc32c).build();
    let expected = walk(&open(&good).unwrap());
    let places: Vec<u64> =
        good.0.iter().map(|(offset, _)| *offset).filter(|offset| METADATA.contains(offset)).collect();
    let mut losses = 0;
    for place in places {
        let mut pieces = good.clone();
        for (offset, bytes) in &mut pieces.0 {
            if [place, place + SECOND_COPY].contains(offset) {
                bytes[200] ^= 1;
            }
        }
        let Ok(filesystem) = open(&pieces) else { continue };
        let Ok(subvolume) = block_on(filesystem.subvolume(objectid::FS_TREE)) else { continue };
        if block_on(filesystem.top(&subvolume)).is_err() {
            continue;
        }
        let found = walk(&filesystem);
        for (path, told) in &found {
            let same = expected.get(path) == Some(told);
            assert!(same || told.contains("lost"), "{path}: {told}");
            losses += usize::from(!same);
        }
    }
    assert!(losses > 20, "{losses}");
}

/// The same device, with a change in the second copy of the node at this place: the copy is valid, but has different
/// content.
fn with_another_second_copy(good: &Pieces, place: u64) -> Pieces {
    /// The offset in a node of the UUID of the chunk tree, which no rule covers.
    const CHUNK_TREE_UUID: usize = 64;
    let mut pieces = good.clone();
    let (_, node) = pieces.0.iter_mut().find(|(offset, _)| *offset == place + SECOND_COPY).unwrap();
    node[CHUNK_TREE_UUID] ^= 1;
    ChecksumType::Crc32c.seal(node);
    pieces
}

#[test]
fn copies_of_a_node_on_one_device_that_pass_and_differ_are_never_clean() {
    let good = sample(ChecksumType::Crc32c).build();
    let check = |filesystem: &Filesystem| block_on(verify(filesystem, VerifyOptions::default(), &Unwatched)).unwrap();
    let same = check(&open(&good).unwrap());
    assert_eq!((same.verdict(), same.damage_count), (Verdict::Incomplete, 0), "it has data without checksums");
    let (mut roots, mut told) = (0, 0);
    let places = good.0.iter().map(|(offset, _)| *offset).filter(|offset| METADATA.contains(offset));
    for place in places.collect::<Vec<_>>() {
        let filesystem = open(&with_another_second_copy(&good, place)).unwrap();
        roots += filesystem.differing_roots().len();
        let report = check(&filesystem);
        assert_eq!((report.verdict(), report.damage_count), (Verdict::Damaged, 1));
        let is_told = |finding: &Finding| matches!(finding, Finding::Node { copy, .. } if copy.mirror == 2 && matches!(copy.fault, CopyFault::Differs(1)));
        assert!(is_told(&report.findings[0]), "{:?}", report.findings);
        told += 1;
    }
    assert!(roots == 1 && told > 10, "{roots} {told}");
}

#[test]
fn a_damaged_sector_is_an_error_and_its_neighbours_are_read() {
    let mut made = Handmade::new(4096, ChecksumType::Crc32c);
    made.file(TOP, b"summed", &content(70_000), Storage::Summed);
    let mut pieces = made.build();
    let data = pieces.0.iter_mut().find(|(offset, _)| *offset == DATA_START).unwrap();
    data.1[3 * SECTOR_BYTES + 5] ^= 1;
    let filesystem = open(&pieces).unwrap();
    let file = block_on(filesystem.resolve(top(&filesystem), b"summed", true)).unwrap();
    let read = |at: usize, bytes: usize| block_on(filesystem.read(&file, at as u64, bytes));
    let Err(FsError::Lost(lost)) = read(0, 70_000) else { panic!("damage is an error") };
    assert_eq!((lost.logical, lost.bytes), (DATA_START + 3 * SECTOR_BYTES as u64, SECTOR_BYTES as u64));
    assert!(matches!(lost.copies[..], [ref copy] if matches!(copy.fault, CopyFault::Checksum(_))));
    assert_eq!(read(100, 3 * SECTOR_BYTES - 100).unwrap()[..], content(3 * SECTOR_BYTES)[100..]);
    let behind = 4 * SECTOR_BYTES;
    assert_eq!(read(behind + 1, 100_000).unwrap()[..], content(70_000)[behind + 1..]);
    assert!(read(3 * SECTOR_BYTES + 4000, 1).is_err());
    assert!(read(70_000, 1).unwrap().is_empty());
}

#[test]
fn a_sector_without_the_checksum_that_it_should_have_is_no_data() {
    let mut made = Handmade::new(4096, ChecksumType::Crc32c);
    let logical = made.store(&content(8192), false);
    let file = made.file(TOP, b"file", &content(8192), Storage::Inline);
    made.put_extent(file, 0, &regular(logical, 8192, 0, 8192));
    let filesystem = open(&made.build()).unwrap();
    let file = block_on(filesystem.resolve(top(&filesystem), b"file", true)).unwrap();
    let error = block_on(filesystem.read(&file, 0, 8192)).unwrap_err();
    assert!(matches!(error, FsError::NoSum { logical: found } if found == logical), "{error}");
}

#[test]
fn directories_with_two_names_or_below_themselves_are_entered_once() {
    let mut made = Handmade::new(4096, ChecksumType::Crc32c);
    let outer = made.directory(TOP, b"outer");
    let inner = made.directory(outer, b"inner");
    made.put_entry(inner, b"again", outer, FileType::Directory);
    made.put_entry(TOP, b"second", inner, FileType::Directory);
    made.put_entry(inner, b"top", TOP, FileType::Directory);
    let found = walk(&open(&made.build()).unwrap());
    for path in ["outer/inner/again", "outer/inner/top", "second"] {
        assert!(found[path].contains("second name, or lies below itself"), "{path}: {found:?}");
    }
    assert_eq!(found["outer/inner"], "Directory");
}

#[test]
fn invalid_names_are_reported_and_not_entered() {
    let mut made = Handmade::new(4096, ChecksumType::Crc32c);
    let folder = made.directory(TOP, b"folder");
    made.file(folder, b"good", &content(5), Storage::Inline);
    for name in [&b".."[..], b".", b"a/b", b"nul\0"] {
        made.put_entry(TOP, name, folder, FileType::Directory);
    }
    let found = walk(&open(&made.build()).unwrap());
    assert_eq!(found.values().filter(|told| told.starts_with("bad name")).count(), 4, "{found:?}");
    assert_eq!(found["folder/good"], "5 bytes");
}

#[test]
fn an_entry_without_an_inode_is_damage() {
    let mut made = Handmade::new(4096, ChecksumType::Crc32c);
    made.put_entry(TOP, b"gone", 999, FileType::Regular);
    let found = walk(&open(&made.build()).unwrap());
    assert!(found["gone"].starts_with("lost") && found["gone"].contains("inode 999"), "{found:?}");
}

#[test]
fn parts_of_a_file_that_overlap_are_an_error_wherever_the_leaf_ends() {
    let mut contradictions = 0;
    for long in 0..29_u64 {
        let mut made = Handmade::new(4096, ChecksumType::Crc32c);
        let logical = made.store(&content(40 * SECTOR_BYTES), true);
        let file = made.file(TOP, b"file", &content(30 * SECTOR_BYTES), Storage::Inline);
        for index in 0..30 {
            let bytes = if index == long { 8192 } else { 4096 };
            let part = regular(logical, 40 * 4096, index * 4096, bytes);
            made.put_extent(file, index * 4096, &part);
        }
        let filesystem = open(&made.build()).unwrap();
        let subvolume = block_on(filesystem.subvolume(objectid::FS_TREE)).unwrap();
        // If both items are in one leaf, perhaps with the inode, the checker already refuses the leaf.
        let Ok(file) = block_on(filesystem.inode(subvolume.root, file)) else { continue };
        let error = block_on(filesystem.read(&file, 0, 1 << 20)).unwrap_err();
        contradictions += usize::from(matches!(error, FsError::Contradiction { .. }));
    }
    assert!((1..10).contains(&contradictions), "{contradictions}");
}

#[test]
fn holes_read_as_zeroes_and_nothing_is_read_after_the_end() {
    let mut made = Handmade::new(4096, ChecksumType::Crc32c);
    let logical = made.store(&content(8192), true);
    let file = made.file(TOP, b"file", &content(20_000), Storage::Inline);
    let tree = made.trees.get_mut(&objectid::FS_TREE).unwrap();
    tree.remove(&Key::new(file, ItemType::EXTENT_DATA, 0));
    made.put_extent(file, 8192, &regular(logical, 8192, 4096, 4096));
    made.put_extent(file, 16_384, &regular(logical, 8192, 0, 8192));
    let filesystem = open(&made.build()).unwrap();
    let file = block_on(filesystem.resolve(top(&filesystem), b"file", true)).unwrap();
    let data = block_on(filesystem.read(&file, 0, 1 << 20)).unwrap();
    let stored = content(8192);
    let expected = [&[0; 8192][..], &stored[4096..], &[0; 4096], &stored[..20_000 - 16_384]].concat();
    assert!(data[..] == expected);
    let run = |from| block_on(filesystem.next_data(&file, from, 1 << 20)).unwrap();
    assert_eq!((run(0), run(9000), run(12_288)), (Some((8192, 12_288)), Some((9000, 12_288)), Some((16_384, 24_576))));
    assert_eq!((run(24_576), block_on(filesystem.next_data(&file, 0, 100)).unwrap()), (None, Some((8192, 8292))));
}

#[test]
fn devices_that_do_not_belong_together_are_refused_by_name() {
    let pieces = sample(ChecksumType::Crc32c).build();
    let candidate = |name: &str, device| Candidate { name: name.into(), device };
    let open =
        |candidates| block_on(Filesystem::open(candidates, OpenOptions::default())).map(drop).unwrap_err().to_string();
    let twice = open(vec![candidate("a", device(&pieces)), candidate("b", device(&pieces))]);
    assert!(twice.contains("a and b are both device 1"), "{twice}");
    let blank = open(vec![candidate("blank", device(&Pieces::default()))]);
    assert!(blank.contains("blank: no superblock of Btrfs"), "{blank}");
    assert!(open(Vec::new()).contains("0 devices"));
}
