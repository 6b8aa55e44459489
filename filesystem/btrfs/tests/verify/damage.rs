//! Damage of everything except file data; unchecked data; limits.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use futures_util::future::LocalBoxFuture;
use sealblock_block::DynDevice;
use sealblock_btrfs::cursor::TreeRoot;
use sealblock_btrfs::verify::{
    DataFault, Finding, Progress, Report, Unwatched, Verdict, VerifyOptions, Watch, WhyUnchecked, verify, verify_files,
};
use sealblock_btrfs::{CopyFault, Filesystem, FsError, Place};
use sealblock_btrfs_format::items::inode::InodeFlags;
use sealblock_btrfs_format::items::root::RootHead;
use sealblock_btrfs_format::key::{DiskKey, ItemType, objectid};
use sealblock_btrfs_format::node::{HEADER_BYTES, ItemHead, Node};
use sealblock_btrfs_format::superblock::{COPY_OFFSETS, SUPERBLOCK_BYTES, Superblock};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_proofs_btrfs_images::programs::{Mount, copy_images, run};
use zerocopy::{FromBytes, IntoBytes};

use crate::images::{Devices, SECTOR, Setup, content, make, mounted, now};
use crate::{FILES, assert_clean, checked, fill, name_of, sectors_of};

const NODE: u64 = 16_384;

fn places(fs: &Filesystem, bytenr: u64) -> Vec<Place> {
    fs.storage().map.locate(bytenr, NODE).unwrap().copies.to_vec()
}

fn root(fs: &Filesystem, id: u64) -> TreeRoot {
    now(fs.tree(id)).unwrap().unwrap()
}

/// A filesystem as [`fill`] fills it.
fn filled(setup: Setup) -> Option<Devices> {
    let folder = tempfile::tempdir().unwrap();
    make(folder.path(), setup, fill).map(|images| Devices::load(&images, None))
}

/// Verifies with these places damaged.
fn damaged(devices: &Devices, places: &[Place]) -> Report {
    places.iter().for_each(|place| devices.damage(place.devid, place.offset + 700));
    let report = checked(&devices.open());
    places.iter().for_each(|place| devices.damage(place.devid, place.offset + 700));
    report
}

/// The report of a verification below a path in the first subvolume.
fn checked_below(fs: &Filesystem, path: &[u8]) -> Report {
    let top = now(fs.top(&now(fs.subvolume(5)).unwrap())).unwrap();
    let start = now(fs.resolve(top, path, true)).unwrap();
    now(verify_files(fs, start, VerifyOptions::default(), &Unwatched)).unwrap()
}

#[test]
fn a_damaged_copy_of_any_node_is_named_and_the_rest_is_not() {
    for setup in [Setup::SINGLE, Setup::MIRRORED] {
        let Some(devices) = filled(setup) else { return };
        let fs = devices.open();
        let trees = [1, 2, 3, 4, 5, 7, 10].map(|id| root(&fs, id));
        let mut nodes: Vec<(u64, u64, u8)> = trees.iter().map(|tree| (tree.id, tree.bytenr, tree.level)).collect();
        // A leaf with inline data.
        let of_files = now(fs.nodes().load(&root(&fs, 5).expected())).unwrap();
        assert!(!of_files.view().pointers().is_empty(), "the tree of files has several leaves");
        nodes.push((5, of_files.view().pointers()[1].blockptr.get(), 0));
        for (tree, bytenr, level) in nodes {
            for (mirror, place) in places(&fs, bytenr).into_iter().enumerate() {
                let report = damaged(&devices, &[place]);
                let [Finding::Node { tree: found, level: at_level, copy, .. }] = &report.findings[..] else {
                    panic!("tree {tree}: {:?}", report.findings);
                };
                assert_eq!((*found, *at_level, copy.logical, copy.place), (tree, Some(level), Some(bytenr), place));
                assert_eq!((copy.mirror, report.verdict()), (mirror + 1, Verdict::Damaged));
                assert!(matches!(copy.fault, CopyFault::Node(_)) && report.unchecked.is_empty());
            }
        }
    }
}

#[test]
fn a_lost_node_is_named_with_its_unreachable_keys() {
    let Some(devices) = filled(Setup::SINGLE) else { return };
    let fs = devices.open();
    let sums = root(&fs, objectid::CSUM_TREE);
    let report = damaged(&devices, &places(&fs, sums.bytenr));
    let [Finding::LostNode(node), of_data @ ..] = &report.findings[..] else { panic!("{:?}", report.findings) };
    assert_eq!((&node.trees[..], node.from, node.before, node.lost.copies.len()), (&[7][..], None, None, 2));
    // No file with checksums can be read without them.
    let mut cannot_be_read = BTreeMap::<String, u64>::new();
    for finding in of_data {
        let Finding::Data(data) = finding else { panic!("{finding}") };
        assert!(matches!(data.fault, DataFault::SumsLost), "{finding}");
        for file in &data.uses.files {
            let path = String::from_utf8_lossy(file.paths.last().unwrap())[1..].to_owned();
            *cannot_be_read.entry(path).or_default() += file.bytes;
        }
    }
    let stored = FILES.map(|(_, name, bytes)| (name.to_owned(), bytes.next_multiple_of(SECTOR) as u64));
    assert_eq!(cannot_be_read, stored.into());
    assert!(report.unchecked.contains_key(&WhyUnchecked::ChecksumsLost), "data are not called good without checksums");

    let flip = || places(&fs, sums.bytenr).iter().for_each(|place| devices.damage(place.devid, place.offset + 700));
    flip();
    let report = checked_below(&devices.open(), b"odd");
    flip();
    let of_data = report.findings.iter().filter_map(|finding| match finding {
        Finding::Data(data) if matches!(data.fault, DataFault::SumsLost) => Some(data.bytes),
        _ => None,
    });
    assert_eq!(of_data.sum::<u64>(), 777_777_u64.next_multiple_of(SECTOR as u64));

    let of_files = now(fs.nodes().load(&root(&fs, 5).expected())).unwrap();
    let keys: Vec<_> = of_files.view().pointers().iter().map(|pointer| pointer.key()).collect();
    let leaf = of_files.view().pointers()[1].blockptr.get();
    let report = damaged(&devices, &places(&fs, leaf));
    let [Finding::LostNode(node)] = &report.findings[..] else { panic!("{:?}", report.findings) };
    assert_eq!((&node.trees[..], node.from, node.before), (&[5][..], Some(keys[1]), keys.get(2).copied()));
    let text = report.findings[0].to_string();
    assert!(text.contains("tree 5 is lost") && text.contains("copy 2 on device 1"), "{text}");
}

#[test]
fn copies_of_the_superblock_are_checked() {
    let Some(devices) = filled(Setup::MIRRORED) else { return };
    for (devid, offset, mirror) in [(1, 64 << 10, 1), (2, 64 << 20, 2)] {
        let report = damaged(&devices, &[Place { devid, offset }]);
        let [Finding::Superblock(copy)] = &report.findings[..] else { panic!("{:?}", report.findings) };
        assert_eq!((copy.place, copy.mirror), (Place { devid, offset }, mirror));
    }
}

/// A superblock, put where another one was.
fn moved(devices: &Devices, from: (u64, u64), to: (u64, u64)) {
    let mut bytes = devices.read(from.0, from.1, SUPERBLOCK_BYTES);
    let superblock = Superblock::mut_from_bytes(&mut bytes).unwrap();
    superblock.bytenr = to.1.into();
    superblock.seal();
    devices.write(to.0, to.1, &bytes);
}

#[test]
fn superblocks_of_other_filesystems_and_devices_are_named_on_any_device() {
    let (first, second) = (COPY_OFFSETS[0], COPY_OFFSETS[1]);
    for metadata in ["raid1", "single"] {
        let setup = Setup { data: "single", metadata, ..Setup::MIRRORED };
        let (Some(own), Some(other)) = (filled(setup), filled(setup)) else { return };
        let intact = [1, 2].map(|devid| [first, second].map(|offset| own.read(devid, offset, SUPERBLOCK_BYTES)));
        let check = |expected: &[(u64, u64)], is_other_filesystem: bool| {
            let report = checked(&own.open());
            let found = report.findings.iter().map(|finding| match finding {
                Finding::Superblock(copy) => {
                    let is_named = match is_other_filesystem {
                        true => matches!(copy.fault, CopyFault::OtherFilesystem { .. }),
                        false => matches!(copy.fault, CopyFault::OtherDevice { .. }),
                    };
                    assert!(is_named, "{finding}");
                    (copy.place.devid, copy.place.offset)
                }
                other => panic!("{other}"),
            });
            assert_eq!(found.collect::<Vec<_>>(), expected, "{metadata}");
            for (devid, copies) in (1..).zip(&intact) {
                copies.iter().zip([first, second]).for_each(|(bytes, offset)| own.write(devid, offset, bytes));
            }
        };
        for devid in [1, 2] {
            for offset in [first, second] {
                own.write(devid, offset, &other.read(devid, offset, SUPERBLOCK_BYTES));
                check(&[(devid, offset)], true);
                moved(&own, (3 - devid, offset), (devid, offset));
                check(&[(devid, offset)], false);
            }
        }
        // The first superblocks of both devices.
        for devid in [1, 2] {
            own.write(devid, first, &other.read(devid, first, SUPERBLOCK_BYTES));
        }
        check(&[(1, first), (2, first)], true);
        moved(&own, (1, second), (2, first));
        moved(&own, (2, second), (1, first));
        check(&[(1, first), (2, first)], false);
        check(&[], true);
    }
}

#[test]
fn without_a_device_nothing_is_clean_and_the_other_copies_are_checked() {
    let Some(devices) = filled(Setup::MIRRORED) else { return };
    let report = checked(&devices.open_without(&[2]));
    assert_eq!((report.verdict(), report.damage_count), (Verdict::Incomplete, 0), "{:?}", report.findings);
    assert!(report.unchecked[&WhyUnchecked::MissingDevice] > 4 << 20 && report.bytes_verified > 4 << 20);
    let copy = *devices.sectors.iter().find(|copy| copy.devid == 1).unwrap();
    devices.damage(1, copy.place);
    let report = checked(&devices.open_without(&[2]));
    let expected = (1, copy.place, name_of(copy.file).to_owned(), copy.offset);
    assert_eq!(sectors_of(&report).into_iter().collect::<Vec<_>>(), [expected]);
}

#[test]
fn missed_transactions_of_a_device_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let Some(images) = make(folder.path(), Setup::MIRRORED, fill) else { return };
    let old = copy_images(&images[1..], "old").unwrap().remove(0);
    let add = |point: &Path| fs::write(point.join("late"), content(9, 64 << 10)).unwrap();
    mounted(&images, add).unwrap();
    let report = checked(&Devices::load(&images, None).open());
    assert_clean(&report, "both are new");
    let devices = Devices::load(&[images[0].clone(), old], None);
    let report = checked(&devices.open());
    assert_eq!(report.verdict(), Verdict::Damaged);
    let is_old = |finding: &&Finding| match finding {
        Finding::Superblock(copy) => copy.place.devid == 2 && matches!(copy.fault, CopyFault::Old { .. }),
        Finding::Node { copy, .. } => copy.place.devid == 2,
        Finding::Data(data) => {
            let DataFault::Copy { copy, is_lost, .. } = &data.fault else { return false };
            copy.place.devid == 2 && !is_lost && data.uses.files[0].paths == [b"/late".to_vec()]
        }
        _ => false,
    };
    let odd: Vec<_> = report.findings.iter().filter(|finding| !is_old(finding)).collect();
    assert!(odd.is_empty(), "{odd:?}");
    let of_data = report.findings.iter().filter(|finding| matches!(finding, Finding::Data(_))).count();
    assert_eq!(of_data, (64 << 10) / SECTOR, "all of what was written since");
}

/// A file without checksums, empty before it is written.
fn fill_without_sums(point: &Path) {
    fs::write(point.join("plain"), []).unwrap();
    run("chattr", ["+C".as_ref(), point.join("plain").as_os_str()]).unwrap();
    fs::write(point.join("plain"), content(1, 1 << 20)).unwrap();
    fs::write(point.join("summed"), content(2, 64 << 10)).unwrap();
}

#[test]
fn data_without_checksums_are_never_clean_because_the_device_has_seals() {
    let folder = tempfile::tempdir().unwrap();
    let Some(images) = make(folder.path(), Setup::SINGLE, fill_without_sums) else { return };
    let devices = Devices::load(&images, None);
    let report = checked(&devices.open());
    assert_eq!((report.verdict(), &report.findings.len()), (Verdict::Incomplete, &0));
    assert_eq!(report.unchecked.into_iter().collect::<Vec<_>>(), [(WhyUnchecked::NoChecksum, 1 << 20)]);

    let format = PiFormat::with_default_storage_tag(GuardKind::Crc64, ProtectionType::Type1);
    let devices = Devices::load(&images, Some(format));
    let report = checked(&devices.open());
    assert_eq!((report.verdict(), &report.findings.len()), (Verdict::Incomplete, &0), "Linux gives no tags");
    assert_eq!(report.unchecked.into_iter().collect::<Vec<_>>(), [(WhyUnchecked::Unattested, 1 << 20)]);
    let copy = *devices.sectors.iter().find(|copy| copy.file == 1 && copy.offset == 5 * SECTOR as u64).unwrap();
    devices.damage(1, copy.place + 9);
    let report = checked(&devices.open());
    let [Finding::Data(data)] = &report.findings[..] else { panic!("{:?}", report.findings) };
    let DataFault::Copy { copy: bad, is_lost: true, .. } = &data.fault else { panic!("{data}") };
    assert!(matches!(&bad.fault, CopyFault::Unreadable(error) if error.bad_blocks().is_some()), "{data}");
    assert_eq!((bad.place, data.bytes), (Place { devid: 1, offset: copy.place }, SECTOR as u64));
    assert_eq!((&data.uses.files[0].paths[..], data.uses.files[0].offset), (&[b"/plain".to_vec()][..], copy.offset));

    let fs = devices.open();
    let of = |name: &[u8]| checked_below(&fs, name);
    assert_eq!((of(b"plain").verdict(), of(b"plain").damage_count), (Verdict::Damaged, 1));
    assert_clean(&of(b"summed"), "another file");
}

#[test]
fn copies_of_data_without_checksums_that_differ_are_named() {
    for setup in [Setup::MIRRORED, Setup { data: "dup", ..Setup::SINGLE }] {
        let folder = tempfile::tempdir().unwrap();
        let Some(images) = make(folder.path(), setup, fill_without_sums) else { continue };
        let devices = Devices::load(&images, None);
        let report = checked(&devices.open());
        assert_eq!((report.verdict(), report.findings.len()), (Verdict::Incomplete, 0), "equal copies prove nothing");
        assert_eq!(report.unchecked.into_iter().collect::<Vec<_>>(), [(WhyUnchecked::NoChecksum, 2 << 20)]);
        // Two consecutive sectors, and one elsewhere, each damaged in one of its copies.
        let copies = |offset: usize| {
            let is_it = |copy: &&_| matches!(copy, crate::images::SectorCopy { file: 1, offset: at, .. } if *at == offset as u64);
            let place = |copy: &crate::images::SectorCopy| Place { devid: copy.devid, offset: copy.place };
            devices.sectors.iter().filter(is_it).map(place).collect::<Vec<_>>()
        };
        let starts = [(5 * SECTOR, 2 * SECTOR), (90 * SECTOR, SECTOR)];
        for (offset, copy) in [(5 * SECTOR, 0), (6 * SECTOR, 1), (90 * SECTOR, 1)] {
            let place = copies(offset)[copy];
            devices.damage(place.devid, place.offset + 44);
        }
        let whole = checked(&devices.open());
        for report in [whole, checked_below(&devices.open(), b"plain")] {
            assert_eq!((report.verdict(), report.damage_count), (Verdict::Damaged, 2), "{:?}", report.findings);
            for (finding, (offset, bytes)) in report.findings.iter().zip(starts) {
                let Finding::Data(data) = finding else { panic!("{finding}") };
                let DataFault::CopiesDiffer(named) = &data.fault else { panic!("{finding}") };
                let mut places: Vec<Place> = named.iter().map(|(_, place)| *place).collect();
                places.sort_by_key(|place| (place.devid, place.offset));
                assert_eq!(places, copies(offset), "{finding}");
                let file = &data.uses.files[0];
                assert_eq!(
                    (&file.paths[0][..], file.offset, file.bytes),
                    (&b"/plain"[..], offset as u64, bytes as u64)
                );
            }
        }
        assert_clean(&checked_below(&devices.open(), b"summed"), "another file");
    }
}

#[test]
fn a_file_that_should_have_checksums_and_has_none_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let Some(images) = make(folder.path(), Setup::SINGLE, fill_without_sums) else { return };
    let devices = Devices::load(&images, None);
    let fs = devices.open();
    let leaf = root(&fs, 5);
    assert_eq!(leaf.level, 0);
    // Clears the flags that say that the inode has no checksums, in every copy of its leaf.
    let top = now(fs.top(&now(fs.subvolume(5)).unwrap())).unwrap();
    let ino = now(fs.resolve(top, b"plain", true)).unwrap().ino;
    for place in places(&fs, leaf.bytenr) {
        let mut node = devices.read(place.devid, place.offset, NODE as usize);
        let view = Node::decode(&node).unwrap();
        let item =
            view.items().iter().find(|item| item.key().objectid == ino && item.key().item_type == ItemType::INODE_ITEM);
        let flags = HEADER_BYTES + item.unwrap().offset.get() as usize + 64;
        assert_eq!(u64::from(node[flags]) & InodeFlags::NODATASUM.bits(), 1);
        node[flags] &= !3;
        fs.storage().geometry().checksum.seal(&mut node);
        devices.write(place.devid, place.offset, &node);
    }
    let report = checked(&devices.open());
    let [Finding::Data(data)] = &report.findings[..] else { panic!("{:?}", report.findings) };
    assert!(matches!(data.fault, DataFault::NoSum), "{data}");
    assert_eq!((data.bytes, &data.uses.files[0].paths[..]), (1 << 20, &[b"/plain".to_vec()][..]));
    let fs = devices.open();
    let inode = now(fs.inode(root(&fs, 5), ino)).unwrap();
    let report = now(verify_files(&fs, inode, VerifyOptions::default(), &Unwatched)).unwrap();
    assert!(matches!(&report.findings[..], [Finding::Data(data)] if matches!(data.fault, DataFault::NoSum)));
}

/// A snapshot, a compressed file, and a reflink.
fn fill_shared(point: &Path) {
    let path = |name: &str| point.join(name);
    run("btrfs", ["subvolume".as_ref(), "create".as_ref(), path("sub").as_os_str()]).unwrap();
    fs::write(path("sub/large"), content(1, 1 << 20)).unwrap();
    (0..400).for_each(|number| fs::write(path(&format!("sub/inline-{number}")), [b'i'; 500]).unwrap());
    fs::write(path("sub/packed"), []).unwrap();
    run(
        "btrfs",
        ["property".as_ref(), "set".as_ref(), path("sub/packed").as_os_str(), "compression".as_ref(), "zstd".as_ref()],
    )
    .unwrap();
    let text: Vec<u8> = (0..60_000_u64).flat_map(|line| format!("line {line}\n").into_bytes()).take(300_000).collect();
    fs::write(path("sub/packed"), text).unwrap();
    assert!(Command::new("sync").status().unwrap().success());
    run("btrfs", ["subvolume".as_ref(), "snapshot".as_ref(), path("sub").as_os_str(), path("snap").as_os_str()])
        .unwrap();
    run("cp", ["--reflink=always".as_ref(), path("sub/large").as_os_str(), path("sub/again").as_os_str()]).unwrap();
}

#[test]
fn all_files_that_share_damaged_data_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let Some(images) = make(folder.path(), Setup::SINGLE, fill_shared) else { return };
    let devices = Devices::load(&images, None);
    let fs = devices.open();
    assert_clean(&checked(&fs), "shared");
    let copy = *devices.sectors.iter().find(|copy| copy.offset == 40 * SECTOR as u64).unwrap();
    devices.damage(1, copy.place);
    let report = checked(&devices.open());
    devices.damage(1, copy.place);
    let [Finding::Data(data)] = &report.findings[..] else { panic!("{:?}", report.findings) };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let uses = data.uses.files.iter().map(|file| {
        assert_eq!((file.offset, file.bytes), (copy.offset, SECTOR as u64));
        text(file.subvolume_path.as_ref().unwrap()) + &text(&file.paths[0])
    });
    let mut uses: Vec<String> = uses.collect();
    uses.sort();
    assert_eq!(uses, ["/snap/large", "/sub/again", "/sub/large"]);

    // A compressed extent is damaged as a whole.
    let sub = now(fs.subvolume(256)).unwrap();
    let inode = now(fs.resolve(now(fs.top(&sub)).unwrap(), b"packed", true)).unwrap();
    let part = now(fs.parts(&inode, 128 << 10, 129 << 10)).unwrap().remove(0);
    let sealblock_btrfs::extents::Content::Stored(stored) = part.content else { panic!("{part:?}") };
    assert!(stored.stored_bytes < stored.plain_bytes);
    let report = damaged(&devices, &[fs.storage().map.locate(stored.logical, 4096).unwrap().copies[0]]);
    let [Finding::Data(data)] = &report.findings[..] else { panic!("{:?}", report.findings) };
    let uses: Vec<_> = data.uses.files.iter().map(|file| (file.subvolume, file.offset, file.bytes)).collect();
    assert_eq!(uses, [(256, part.start, part.bytes), (257, part.start, part.bytes)]);

    // A shared leaf is lost for the snapshot too.
    let node = |id| now(fs.nodes().load(&root(&fs, id).expected())).unwrap();
    let leaves = |id| node(id).view().pointers().iter().map(|pointer| pointer.blockptr.get()).collect::<Vec<_>>();
    let (ours, theirs) = (leaves(256), leaves(257));
    let shared = ours.iter().find(|leaf| theirs.contains(leaf)).expect("some leaf did not change");
    let report = damaged(&devices, &places(&fs, *shared));
    let lost = report.findings.iter().find_map(|finding| match finding {
        Finding::LostNode(node) => Some(node),
        _ => None,
    });
    let mut trees = lost.expect("both copies are damaged").trees.clone();
    trees.sort_unstable();
    assert_eq!(trees, [256, 257]);
}

#[test]
fn all_below_a_directory_is_checked_once_and_its_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let Some(images) = make(folder.path(), Setup::SINGLE, fill_shared) else { return };
    let devices = Devices::load(&images, None);
    let fs = devices.open();
    let (whole, below) = (checked(&fs), checked_below(&fs, b""));
    assert_clean(&below, "below the top");
    let copies = places(&fs, root(&fs, 5).bytenr).len() as u64;
    let data = |report: &Report| report.bytes_verified - report.nodes_verified * copies * NODE;
    assert_eq!(data(&below), data(&whole), "all data, and what is shared once");
    assert!(below.nodes_verified < whole.nodes_verified);

    let copy = *devices.sectors.iter().find(|copy| copy.offset == 40 * SECTOR as u64).unwrap();
    devices.damage(1, copy.place);
    let named = |path: &[u8]| {
        let report = checked_below(&devices.open(), path);
        let [Finding::Data(data)] = &report.findings[..] else { panic!("{:?}", report.findings) };
        let uses = data.uses.files.iter().map(|file| (file.subvolume, file.paths[0].clone(), file.offset));
        uses.collect::<Vec<_>>()
    };
    let of_sub = [(256, b"/large".to_vec(), copy.offset), (256, b"/again".to_vec(), copy.offset)];
    let of_snap = (257, b"/large".to_vec(), copy.offset);
    assert_eq!(named(b"sub"), of_sub);
    assert_eq!(named(b"snap"), std::slice::from_ref(&of_snap));
    assert_eq!(named(b""), [&of_sub[..], &[of_snap]].concat());
    assert_clean(&checked_below(&devices.open(), b"sub/packed"), "another file");
    devices.damage(1, copy.place);

    // A directory is not clean if an entry refers to a lost inode.
    let leaf =
        now(fs.nodes().load(&root(&fs, 256).expected())).unwrap().view().pointers().last().unwrap().blockptr.get();
    places(&fs, leaf).iter().for_each(|place| devices.damage(place.devid, place.offset + 500));
    let report = checked_below(&devices.open(), b"sub");
    let is_of_leaf = |finding: &Finding| match finding {
        Finding::Tree { tree: 256, error: FsError::Lost(lost) } => lost.logical == leaf,
        _ => false,
    };
    assert!(report.findings.iter().any(is_of_leaf), "{:?}", report.findings);
}

/// A subvolume whose tree has several leaves.
fn fill_subvolume(point: &Path) {
    run("btrfs", ["subvolume".as_ref(), "create".as_ref(), point.join("sub").as_os_str()]).unwrap();
    (0..400).for_each(|number| fs::write(point.join(format!("sub/inline-{number}")), [b'i'; 500]).unwrap());
}

#[test]
fn of_a_subvolume_that_is_being_deleted_only_the_rest_is_checked() {
    let folder = tempfile::tempdir().unwrap();
    let Some(images) = make(folder.path(), Setup::SINGLE, fill_subvolume) else { return };
    let devices = Devices::load(&images, None);
    let fs = devices.open();
    let sub = root(&fs, 256);
    assert_eq!(sub.level, 1);
    let node = now(fs.nodes().load(&sub.expected())).unwrap();
    let leaves: Vec<_> = node.view().pointers().iter().map(|pointer| (pointer.key(), pointer.blockptr.get())).collect();
    // The state in which Linux leaves it when two leaves are gone: no references, and the key of the third leaf.
    let progress = DiskKey::from(leaves[2].0);
    let roots = fs.root_tree();
    assert_eq!(roots.level, 0);
    for place in places(&fs, roots.bytenr) {
        let mut bytes = devices.read(place.devid, place.offset, NODE as usize);
        let view = Node::decode(&bytes).unwrap();
        let of_sub = |item: &&ItemHead| (item.key().objectid, item.key().item_type) == (256, ItemType::ROOT_ITEM);
        let item = HEADER_BYTES + view.items().iter().find(of_sub).unwrap().offset.get() as usize;
        let refs = std::mem::offset_of!(RootHead, refs);
        bytes[item + refs..][..4].fill(0);
        bytes[item + std::mem::offset_of!(RootHead, drop_progress)..][..17].copy_from_slice(progress.as_bytes());
        bytes[item + std::mem::offset_of!(RootHead, drop_level)] = 1;
        fs.storage().geometry().checksum.seal(&mut bytes);
        devices.write(place.devid, place.offset, &bytes);
    }
    let before = |count: usize| leaves[..count].iter().flat_map(|(_, leaf)| places(&fs, *leaf)).collect::<Vec<_>>();
    assert_clean(&damaged(&devices, &before(2)), "what is gone may be anything");
    let report = damaged(&devices, &before(3));
    let [Finding::LostNode(lost)] = &report.findings[..] else { panic!("{:?}", report.findings) };
    assert_eq!((&lost.trees[..], lost.from), (&[256][..], Some(leaves[2].0)));
}

#[test]
fn a_log_is_skipped_and_reported() {
    let folder = tempfile::tempdir().unwrap();
    let Some(images) = make(folder.path(), Setup::SINGLE, fill) else { return };
    let mount = Mount::new(&images, "noatime,commit=300").unwrap();
    let file = fs::File::create(mount.path("synced")).unwrap();
    file.write_all_at(&content(9, 64 << 10), 0).unwrap();
    file.sync_all().unwrap();
    let crashed = copy_images(&images, "crashed").unwrap();
    drop(file);
    mount.unmount().unwrap();
    let fs = Devices::load(&crashed, None).open();
    assert!(fs.has_log());
    let report = checked(&fs);
    assert!(report.findings.is_empty(), "{}", report.findings[0]);
    assert_eq!(report.unchecked.keys().copied().collect::<Vec<_>>(), [WhyUnchecked::LogTree]);
    assert_eq!(report.verdict(), Verdict::Incomplete);
}

/// Stops after some calls.
struct Stop(Cell<u32>);

impl Watch for Stop {
    fn go_on(&self, progress: Progress) -> LocalBoxFuture<'_, bool> {
        assert!(progress.bytes > 0 && progress.expected_bytes >= progress.bytes);
        self.0.set(self.0.get().saturating_sub(1));
        Box::pin(std::future::ready(self.0.get() > 0))
    }
}

#[test]
fn nothing_is_clean_after_a_limit_or_a_stop() {
    let Some(devices) = filled(Setup::SINGLE) else { return };
    let with = |options, watch: &dyn Watch| now(verify(&devices.open(), options, watch)).unwrap();
    let default = VerifyOptions::default();
    let unchecked = |report: &Report| report.unchecked.keys().copied().collect::<Vec<_>>();
    let report = with(default, &Stop(Cell::new(2)));
    assert_eq!((report.verdict(), unchecked(&report)), (Verdict::Incomplete, vec![WhyUnchecked::Stopped]));
    assert_clean(&with(default, &Stop(Cell::new(u32::MAX))), "not stopped");
    let report = with(VerifyOptions { most_nodes: 5, ..default }, &Unwatched);
    assert!(unchecked(&report).contains(&WhyUnchecked::TooManyNodes) && report.damage_count == 0);
    let report = with(VerifyOptions { most_ranges: 0, ..default }, &Unwatched);
    assert!(
        unchecked(&report).contains(&WhyUnchecked::TooManyRanges) && report.damage_count == 0,
        "{:?}",
        report.findings
    );

    let some: Vec<_> = devices.sectors.iter().take(5).collect();
    some.iter().for_each(|copy| devices.damage(1, copy.place));
    let report = with(VerifyOptions { most_listed: 2, ..default }, &Unwatched);
    assert_eq!((report.findings.len(), report.damage_count), (2, 5));
}

#[test]
fn one_file_is_checked_in_all_its_copies() {
    let Some(devices) = filled(Setup::MIRRORED) else { return };
    let verify_one = |devices: &Devices, name: &[u8]| {
        let fs = devices.open_as(&[], |device| DynDevice::new("memory", device));
        checked_below(&fs, name)
    };
    for (_, name, bytes) in FILES {
        let report = verify_one(&devices, name.as_bytes());
        assert_clean(&report, name);
        let stored = 2 * bytes.next_multiple_of(SECTOR) as u64;
        assert_eq!(report.bytes_verified, stored + report.nodes_verified * 2 * NODE, "{name}");
    }
    let inline = verify_one(&devices, b"inline-7");
    assert_clean(&inline, "inline");
    assert!(inline.nodes_verified >= 3, "the root tree, the tree of files and its leaf");
    for copy in devices.sectors.iter().filter(|copy| copy.file == 3).step_by(5) {
        devices.damage(copy.devid, copy.place);
        let report = verify_one(&devices, b"folder/deep");
        let expected = (copy.devid, copy.place, name_of(copy.file).to_owned(), copy.offset);
        assert_eq!(sectors_of(&report).into_iter().collect::<Vec<_>>(), [expected]);
        assert_clean(&verify_one(&devices, b"large"), "another file");
        devices.damage(copy.devid, copy.place);
    }
    // A node that is only on the path to the file: the one with the entries of its parent directory.
    let fs = devices.open();
    let first = now(fs.nodes().load(&root(&fs, 5).expected())).unwrap().view().pointers()[0].blockptr.get();
    let first = places(&fs, first)[0];
    devices.damage(first.devid, first.offset + 900);
    let report = verify_one(&devices, b"inline-299");
    devices.damage(first.devid, first.offset + 900);
    assert!(matches!(&report.findings[..], [Finding::Node { tree: 5, copy, .. }] if copy.place == first));
    let place = places(&fs, root(&fs, objectid::CSUM_TREE).bytenr)[1];
    devices.damage(place.devid, place.offset + 900);
    let report = verify_one(&devices, b"large");
    assert!(matches!(&report.findings[..], [Finding::Node { tree: 7, copy, .. }] if copy.place == place));
}
