//! Filesystems without checksums: tags alone show which nodes are those that were written.

use std::path::Path;

use futures_executor::block_on;
use sealblock_block::DynDevice;
use sealblock_btrfs::check::{CheckOptions, Verdict, WhyNotChecked, check};
use sealblock_btrfs::tags::{tag_of, tags_of};
use sealblock_btrfs::verify::{self, Mode, Report, Unwatched, VerifyOptions, WhyUnchecked};
use sealblock_btrfs::{CopyFault, Filesystem, FsError, OpenOptions, Place, RootSource, RootsFrom, TreeRoot};
use sealblock_btrfs_engine::data::FilePlace;
use sealblock_btrfs_engine::engine::{Engine, EngineError, EngineOptions};
use sealblock_btrfs_engine::format::FormatOptions;
use sealblock_btrfs_engine::operations::{NewSnapshot, SubvolumePlace};
use sealblock_btrfs_format::commit_record::{CommitRecord, RECORD_OFFSET};
use sealblock_btrfs_format::features::Incompat;
use sealblock_btrfs_format::items::chunk::Profile;
use sealblock_btrfs_format::items::inode::InodeFlags;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::superblock::{COPY_OFFSETS, SUPERBLOCK_BYTES, Superblock};
use sealblock_integrity::Tags;
use sealblock_media_memory::Corruption;
use sealblock_proofs_btrfs_images::programs::{Mount, run};
use sealblock_proofs_btrfs_images::{has_mounts, skip};
use sealblock_units::Lba;
use zerocopy::{FromBytes, IntoBytes};

use crate::data_faults::{open, place, time};
use crate::disks::{Disks, format_options, read_blocks, write_block};
use crate::files::{Kind, ROOT, assert_content, create, read_committed, write};
use crate::tags::{OwnTags, first_superblock, inode_of, lose_tags, tuple_at};

const SECTOR: usize = 4096;
const NODE: u64 = 16_384;

fn disks_of(devices: usize, metadata: Profile, data: Profile) -> Disks {
    Disks::without_checksums(devices, 256, FormatOptions { metadata, data, ..format_options() })
}

fn engine_on(disks: &Disks) -> Engine {
    open(disks, EngineOptions::default()).0
}

fn verified(filesystem: &Filesystem, mode: Mode) -> Report {
    let options = VerifyOptions { mode, ..VerifyOptions::default() };
    block_on(verify::verify(filesystem, options, &Unwatched)).unwrap()
}

#[track_caller]
fn assert_clean(disks: &Disks) {
    for mode in [Mode::Auto, Mode::Offload, Mode::Emulate] {
        let report = verified(&disks.open(), mode);
        assert_eq!(report.verdict(), verify::Verdict::Clean, "{:#?} {:?}", report.findings, report.unchecked);
    }
    disks.assert_consistent();
}

/// The places of the copies of the root node of a tree, and the node.
fn root_of(filesystem: &Filesystem, id: u64) -> (Vec<Place>, TreeRoot) {
    let root = block_on(filesystem.tree(id)).unwrap().unwrap();
    let located = filesystem.storage().map.locate(root.bytenr, NODE).unwrap();
    assert_eq!(located.bytes, NODE);
    (located.copies.to_vec(), root)
}

/// The blocks of a node's copy have these tags.
fn assert_tagged(disks: &Disks, copy: Place, generation: u64) {
    for at in (0..NODE).step_by(SECTOR) {
        let tuple = tuple_at(disks, Place { offset: copy.offset + at, ..copy });
        assert_eq!(tuple.app_tag, tag_of(generation), "byte {at} of the node at {copy:?}");
    }
}

/// Gives a block of a device the tags of another transaction, or none, as a write to the wrong place does.
fn retag(disks: &Disks, at: Place, data: Option<&[u8]>, generation: Option<u64>) {
    let (memory, lba) = (disks.memory(at.devid as usize - 1), at.offset / SECTOR as u64);
    let old = read_blocks(memory, lba, 1).joined_data();
    write_block(memory, lba, data.unwrap_or(&old), tags_of(generation, lba));
}

/// A block of a copy.
fn block_of(copy: Place, index: u64) -> Place {
    Place { offset: copy.offset + index * SECTOR as u64, ..copy }
}

#[test]
fn a_filesystem_without_checksums_is_written_and_proven_by_tags() {
    for (devices, metadata, data) in [
        (1, Profile::Dup, Profile::Single),
        (2, Profile::Raid1, Profile::Raid0),
        (3, Profile::Raid1C3, Profile::Raid1),
        (4, Profile::Raid10, Profile::Raid10),
    ] {
        let disks = disks_of(devices, metadata, data);
        assert_clean(&disks);
        let engine = engine_on(&disks);
        let [plain, in_place, small] = [("plain", Kind::Plain), ("in place", Kind::NoCow), ("small", Kind::Compress)]
            .map(|(name, kind)| {
                let ino = create(&engine, name, kind);
                write(&engine, ino, 0, &[1; 1000]);
                ino
            });
        write(&engine, plain, 0, &[2; 300_000]);
        write(&engine, in_place, 0, &[3; 300_000]);
        block_on(engine.commit()).unwrap();
        for round in 0..40_u8 {
            write(&engine, plain, u64::from(round) * 5000, &[round; 9000]);
            write(&engine, in_place, u64::from(round) * 5000, &[round; 9000]);
            let ino = create(&engine, &format!("file {round}"), Kind::Plain);
            write(&engine, ino, 0, &vec![round; 700 * usize::from(round)]);
            if round % 8 == 0 {
                block_on(engine.commit()).unwrap();
            }
        }
        let new = NewSnapshot { source: ROOT, uuid: [7; 16], is_read_only: false };
        let at = SubvolumePlace { root: ROOT, place: place("snapshot") };
        block_on(engine.create_snapshot(new, at, time())).unwrap();
        let copy = create(&engine, "copy", Kind::Plain);
        let from = |ino| FilePlace { root: ROOT, ino, offset: 0 };
        block_on(engine.clone_range(from(plain), from(copy), 204_800)).unwrap();
        block_on(engine.truncate(ROOT, plain, 100_000)).unwrap();
        block_on(engine.write_zeroes(ROOT, in_place, 0, 8192)).unwrap();
        block_on(engine.commit()).unwrap();
        assert!(engine.take_bad_copies().is_empty());
        drop(engine);
        assert_files(&disks, &[plain, in_place, small, copy]);
        // Zeroes that a device makes have no tags.
        let report = disks.verify(Mode::Emulate);
        assert_eq!((report.verdict(), report.damage_count), (verify::Verdict::Incomplete, 0));
        assert!(report.unchecked.keys().all(|why| *why == WhyUnchecked::Unattested), "{:?}", report.unchecked);
        let engine = engine_on(&disks);
        write(&engine, in_place, 0, &[5; 8192]);
        block_on(engine.commit()).unwrap();
        drop(engine);
        assert_clean(&disks);
        let size = |ino| read_committed(&disks, ino).len();
        assert_eq!([plain, in_place, copy].map(size), [100_000, 300_000, 204_800]);
        // Once more, from what is there.
        let engine = engine_on(&disks);
        assert_content(&engine, small, &[1; 1000]);
        write(&engine, small, 0, &[4; 9000]);
        block_on(engine.commit()).unwrap();
        drop(engine);
        assert_clean(&disks);
        let record = CommitRecord::read(&first_superblock(&disks, 0)).unwrap();
        assert_eq!(record.windows.iter().count(), 1, "nobody else can have written");
    }
}

/// No file has checksums, and only the one for which it was asked is written in place. Every root node has its tags.
fn assert_files(disks: &Disks, files: &[u64]) {
    let filesystem = disks.open();
    for (index, ino) in files.iter().enumerate() {
        let flags = inode_of(&filesystem, *ino).item.flags();
        assert!(flags.contains(InodeFlags::NODATASUM), "inode {ino}");
        assert_eq!(flags.contains(InodeFlags::NODATACOW), index == 1, "inode {ino}");
    }
    let sums = block_on(filesystem.csum_tree()).unwrap();
    let mut cursor = filesystem.cursor(sums, Key::MIN..=Key::MAX);
    assert!(block_on(cursor.next()).unwrap().is_none(), "there are checksums");
    for root in block_on(filesystem.trees()).0 {
        let (copies, root) = root_of(&filesystem, root.id);
        for copy in copies {
            assert_tagged(disks, copy, root.generation);
            let blocks = read_blocks(disks.memory(copy.devid as usize - 1), copy.offset / SECTOR as u64, 1);
            assert_eq!(blocks.joined_data()[..32], [0; 32]);
        }
    }
}

/// What happens to a block of a copy of a node.
#[derive(Clone, Copy, Debug)]
enum Damage {
    /// An older write to the same place is still there: its tags are of another transaction.
    LostWrite,
    /// The same, of 65,534 transactions before, whose application tag is the same.
    OldWrite,
    /// Other blocks were written to the place: the last block of another node, which is intact.
    OtherNode,
    /// Something without tags was written to the place.
    Untagged,
    /// The place was never written, or was deallocated.
    Unwritten,
    /// Bits changed on the medium.
    BitRot,
    /// The device wrote blocks of another place here.
    Misdirected,
}

use Damage::{BitRot, LostWrite, Misdirected, OldWrite, OtherNode, Untagged, Unwritten};

fn damage(disks: &Disks, at: Place, generation: u64, kind: Damage) {
    let (memory, lba) = (disks.memory(at.devid as usize - 1), at.offset / SECTOR as u64);
    let other = root_of(&disks.open(), objectid::DEV_TREE).0[0];
    let other_lba = other.offset / SECTOR as u64;
    let data = read_blocks(disks.memory(other.devid as usize - 1), other_lba, 1).joined_data();
    match kind {
        LostWrite => retag(disks, at, None, Some(generation - 1)),
        OldWrite => retag(disks, at, None, Some(generation + 65_534)),
        OtherNode => retag(disks, at, Some(&data), Some(generation - 2)),
        Untagged => retag(disks, at, None, None),
        Unwritten => {
            let old = read_blocks(memory, lba, 1).joined_data();
            write_block(memory, lba, &old, Tags { app_tag: 0xFFFF, storage_tag: u64::MAX, initial_ref_tag: lba });
        }
        BitRot => assert!(memory.damage(Lba::new(lba), Corruption::Data { at: 77, mask: 4 })),
        // Its reference tag is that of the other place.
        Misdirected => assert!(memory.damage(Lba::new(lba), Corruption::Tag { at: 15, mask: 1 })),
    }
}

const ALL: [Damage; 7] = [LostWrite, OldWrite, OtherNode, Untagged, Unwritten, BitRot, Misdirected];

/// A filesystem with some transactions, and a commit in which the tree of subvolume 5 was written.
fn with_files(devices: usize, metadata: Profile) -> (Disks, u64) {
    let disks = disks_of(devices, metadata, Profile::Single);
    let engine = engine_on(&disks);
    let mut file = 0;
    for round in 0..4 {
        file = create(&engine, &format!("file {round}"), Kind::Plain);
        write(&engine, file, 0, &[round; 10_000]);
        block_on(engine.commit()).unwrap();
    }
    (disks, file)
}

/// The header of the node is in its first block, so nothing but tags shows what is wrong in another one.
#[test]
fn what_is_wrong_in_any_block_of_a_node_is_found_on_one_device() {
    for kind in ALL {
        for index in 0..NODE / SECTOR as u64 {
            let (disks, file) = with_files(1, Profile::Single);
            let (copies, root) = root_of(&disks.open(), ROOT);
            damage(&disks, block_of(copies[0], index), root.generation, kind);
            let filesystem = disks.open();
            let error = block_on(filesystem.nodes().load(&root.expected())).err().unwrap();
            let FsError::Lost(lost) = &error else { panic!("{kind:?} {index}: {error}") };
            let is_right = match kind {
                BitRot | Misdirected => matches!(lost.copies[0].fault, CopyFault::Unreadable(_)),
                _ => matches!(lost.copies[0].fault, CopyFault::Tag(found) if found.generation == root.generation),
            };
            assert!(is_right && lost.copies.len() == 1, "{kind:?} {index}: {error}");
            let report = verified(&filesystem, Mode::Auto);
            assert_eq!(report.verdict(), verify::Verdict::Damaged, "{kind:?} {index}");
            let engine = engine_on(&disks);
            let read = block_on(engine.read(ROOT, file, 0, 10_000));
            assert!(matches!(read, Err(EngineError::Read(FsError::Lost(_)))), "{kind:?} {index}: {read:?}");
        }
    }
}

#[test]
fn what_is_wrong_in_one_copy_of_a_node_is_healed_from_the_other() {
    for (devices, metadata) in [(1, Profile::Dup), (2, Profile::Raid1)] {
        for (index, kind) in (0..).zip(ALL) {
            let (disks, file) = with_files(devices, metadata);
            let (copies, root) = root_of(&disks.open(), ROOT);
            assert_eq!(copies.len(), 2);
            let at = block_of(copies[index % 2], index as u64 % 4);
            damage(&disks, at, root.generation, kind);
            let report = verified(&disks.open(), Mode::Auto);
            assert_eq!((report.verdict(), report.damage_count), (verify::Verdict::Damaged, 1), "{kind:?}");
            let engine = engine_on(&disks);
            assert_content(&engine, file, &[3; 10_000]);
            // A node that is damaged and changed lies elsewhere then, so only what stays must be healed.
            block_on(engine.commit()).unwrap();
            drop(engine);
            assert_eq!(root_of(&disks.open(), ROOT).1, root, "nothing of the tree was changed");
            // The engine reads one copy, which may be the good one.
            if verified(&disks.open(), Mode::Auto).damage_count > 0 {
                assert_eq!(index % 2, 1, "{kind:?}: the first copy is always read");
                continue;
            }
            copies.iter().for_each(|copy| assert_tagged(&disks, *copy, root.generation));
            assert_clean(&disks);
        }
    }
}

/// The whole node is the one that was there before, which is intact. Its header shows it, too.
#[test]
fn an_old_node_in_the_place_of_a_new_one_is_found_and_healed() {
    let disks = disks_of(2, Profile::Raid1, Profile::Single);
    let engine = engine_on(&disks);
    let file = create(&engine, "file", Kind::Plain);
    // Places come back after some transactions.
    let mut seen: Vec<(u64, u64, Vec<u8>)> = Vec::new();
    let (copies, root, old) = loop {
        write(&engine, file, 0, &[1; 100]);
        block_on(engine.commit()).unwrap();
        let filesystem = disks.open();
        let (copies, root) = root_of(&filesystem, ROOT);
        if let Some((_, _, old)) = seen.iter().find(|(bytenr, ..)| *bytenr == root.bytenr) {
            break (copies, root, old.clone());
        }
        for tree in block_on(filesystem.trees()).0 {
            let (copies, root) = root_of(&filesystem, tree.id);
            let (memory, lba) = (disks.memory(copies[0].devid as usize - 1), copies[0].offset / SECTOR as u64);
            let data = read_blocks(memory, lba, NODE / SECTOR as u64).joined_data();
            seen.push((root.bytenr, root.generation, data.to_vec()));
        }
        assert!(seen.len() < 20_000, "no place is used again");
    };
    let before = seen.iter().find(|(bytenr, ..)| *bytenr == root.bytenr).unwrap().1;
    drop(engine);
    for (index, block) in (0..).zip(old.chunks(SECTOR)) {
        retag(&disks, block_of(copies[0], index), Some(block), Some(before));
    }
    let report = verified(&disks.open(), Mode::Auto);
    assert_eq!((report.verdict(), report.damage_count), (verify::Verdict::Damaged, 1));
    let engine = engine_on(&disks);
    assert_content(&engine, file, &[1; 100]);
    block_on(engine.commit()).unwrap();
    drop(engine);
    assert_clean(&disks);
}

#[track_caller]
fn assert_unproven(disks: &Disks, why: &str) {
    let filesystem = disks.open();
    let refused = block_on(Engine::open(&filesystem, EngineOptions::default())).err().map(|error| error.to_string());
    assert!(refused.as_ref().is_some_and(|error| error.contains(why)), "{refused:?}");
    let report = verified(&filesystem, Mode::Auto);
    assert_eq!(report.verdict(), verify::Verdict::Incomplete, "{:#?}", report.findings);
    assert!(report.unchecked.contains_key(&WhyUnchecked::NodeTags));
    let report = block_on(check(&filesystem, CheckOptions::default(), &Unwatched));
    assert_eq!((report.verdict(), report.finding_count), (Verdict::Incomplete, 0));
    assert!(report.not_checked.contains(&WhyNotChecked::NodeTags));
}

#[test]
fn without_tags_it_is_read_and_not_written_and_never_called_clean() {
    let (disks, file) = with_files(1, Profile::Dup);
    lose_tags(disks.memory(0));
    assert_unproven(&disks, "it has lost the tags of its blocks");
    assert_eq!(read_committed(&disks, file), [3; 10_000]);
    let report = verified(&disks.open(), Mode::Auto);
    assert_eq!((report.nodes_verified > 0, report.unchecked[&WhyUnchecked::NodeTags] % NODE), (true, 0));
    assert!(report.unchecked[&WhyUnchecked::NodeTags] >= 20 * NODE);
}

/// What a node says of itself is all that there is on the device without tags. So it is not used.
#[test]
fn a_device_with_tags_counts_for_more_than_one_that_lost_them() {
    let (disks, file) = with_files(2, Profile::Raid1);
    lose_tags(disks.memory(0));
    assert_unproven(&disks, "it has lost the tags of its blocks");
    let (copies, root) = root_of(&disks.open(), ROOT);
    let first = copies.iter().find(|copy| copy.devid == 1).unwrap();
    // A bit of a time stamp: no rule of nodes shows it.
    let (memory, lba) = (disks.memory(0), first.offset / SECTOR as u64 + 3);
    let mut data = read_blocks(memory, lba, 1).joined_data().to_vec();
    data[SECTOR - 20] ^= 1;
    write_block(memory, lba, &data, tags_of(None, lba));
    let filesystem = disks.open();
    let node = block_on(filesystem.nodes().load(&root.expected())).unwrap();
    assert_eq!(node.view().header().generation.get(), root.generation);
    let copies = block_on(filesystem.nodes().read_copies(&root.expected())).unwrap();
    assert!(matches!(copies.bad[..], [ref bad] if bad.place.devid == 1 && matches!(bad.fault, CopyFault::Differs(_))));
    assert_eq!(copies.unproven, 0, "the other copy has its tags");
    assert_eq!(read_committed(&disks, file), [3; 10_000]);
}

#[test]
fn without_its_record_it_is_not_written() {
    let (disks, _) = with_files(1, Profile::Dup);
    let mut superblock = first_superblock(&disks, 0);
    let generation = superblock.generation.get();
    superblock.as_mut_bytes()[RECORD_OFFSET..].fill(0);
    for offset in &COPY_OFFSETS[..2] {
        let copy = superblock.copy_for(&superblock.dev_item, *offset);
        retag(&disks, Place { devid: 1, offset: *offset }, Some(copy.as_bytes()), Some(generation));
    }
    assert_unproven(&disks, "no valid record of tags");
}

#[test]
fn a_device_that_changes_tags_is_not_written() {
    let (disks, _) = with_files(1, Profile::Dup);
    let filesystem = disks.open_through(|name, memory| DynDevice::new(name, OwnTags(memory)));
    // It is found at the first commit, with which the tags of the superblocks are gone.
    let error = block_on(Engine::open(&filesystem, EngineOptions::default())).err().unwrap().to_string();
    assert!(error.contains("does not keep application tags"), "{error}");
    assert_unproven(&disks, "it has lost the tags of its blocks");
}

#[test]
fn data_and_nodes_share_block_groups_without_checksums() {
    let mut options =
        FormatOptions { metadata: Profile::Dup, data: Profile::Dup, node_bytes: 4096, ..format_options() };
    options.incompat |= Incompat::MIXED_GROUPS;
    let disks = Disks::without_checksums(1, 128, options);
    let engine = engine_on(&disks);
    let file = create(&engine, "file", Kind::Plain);
    for round in 0..60_u8 {
        write(&engine, file, u64::from(round) * 3000, &[round; 20_000]);
        block_on(engine.commit()).unwrap();
    }
    drop(engine);
    assert_clean(&disks);
    let filesystem = disks.open();
    let reference = Key::new(256, ItemType::INODE_ITEM, 0);
    let tree = block_on(filesystem.tree(ROOT)).unwrap().unwrap();
    assert!(block_on(filesystem.cursor(tree, reference..=reference).next()).unwrap().is_some());
}

/// Who searches for a root of older transactions knows no generation. So a node has to have the tags of its own.
#[test]
fn a_search_takes_no_node_whose_blocks_are_not_all_its_own() {
    let (disks, _) = with_files(1, Profile::Single);
    let mut superblock = first_superblock(&disks, 0);
    let generation = superblock.generation.get();
    superblock.backup_roots.as_mut_bytes().fill(0);
    for offset in &COPY_OFFSETS[..2] {
        let copy = superblock.copy_for(&superblock.dev_item, *offset);
        retag(&disks, Place { devid: 1, offset: *offset }, Some(copy.as_bytes()), Some(generation));
    }
    let (copies, root) = root_of(&disks.open(), objectid::ROOT_TREE);
    damage(&disks, block_of(copies[0], 2), root.generation, LostWrite);
    let roots = OpenOptions { roots: RootsFrom::Best, ..OpenOptions::default() };
    let found = |disks: &Disks| {
        let found = disks.open_with(roots).roots().trees;
        assert_eq!(found.source, RootSource::Search);
        found.root
    };
    let first = found(&disks);
    assert!(first.generation < root.generation);
    let filesystem = disks.open_with(roots);
    let place = filesystem.storage().map.locate(first.bytenr, NODE).unwrap().copies[0];
    retag(&disks, block_of(place, 3), None, None);
    let second = found(&disks);
    assert!(second.generation < first.generation, "{second:?} after {first:?}");
}

/// No other program may take it for a filesystem that it knows.
#[test]
fn other_programs_refuse_it() {
    let (disks, _) = with_files(1, Profile::Dup);
    let superblock = first_superblock(&disks, 0);
    assert_eq!((superblock.csum_type.get(), superblock.incompat.get() >> 63), (0xFF00, 1));
    if let Err(why) = has_mounts() {
        return skip(&why);
    }
    disks.save();
    refused_by_programs(&disks.images[0]);
    assert!(Mount::new(&disks.images, "ro").is_err(), "the kernel mounted it");
    // With a type that they know, the feature alone is refused.
    let mut bytes = std::fs::read(&disks.images[0]).unwrap();
    let at = COPY_OFFSETS[0] as usize;
    let mut known = Superblock::read_from_bytes(&bytes[at..at + SUPERBLOCK_BYTES]).unwrap();
    known.csum_type = 0.into();
    known.seal();
    bytes[at..at + SUPERBLOCK_BYTES].copy_from_slice(known.as_bytes());
    std::fs::write(&disks.images[0], bytes).unwrap();
    refused_by_programs(&disks.images[0]);
    assert!(Mount::new(&disks.images, "ro").is_err(), "the kernel mounted it");
}

fn refused_by_programs(image: &Path) {
    let checked = run("btrfs", ["check", "--readonly", image.to_str().unwrap()]);
    println!("{}", checked.as_ref().expect_err("btrfs check opened it"));
}
