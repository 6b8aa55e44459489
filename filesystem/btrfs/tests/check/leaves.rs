//! Rules about items that follow each other in different leaves. Within a leaf the checker of nodes already refuses
//! them, so these filesystems are built by hand, with few items in a leaf.

use std::collections::BTreeSet;

use futures_executor::block_on;
use sealblock_block::{Device, Durability, DynDevice, Request};
use sealblock_btrfs::check::{CheckOptions, Finding, Report, Rule, check};
use sealblock_btrfs::verify::Unwatched;
use sealblock_btrfs::{Candidate, Filesystem, OpenOptions};
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::key::objectid::{CSUM_TREE, DEV_TREE, EXTENT_CSUM, EXTENT_TREE, FIRST_FREE, FS_TREE};
use sealblock_btrfs_format::key::{ItemType, Key};
use sealblock_integrity::{Sealed, Tags};
use sealblock_media_memory::MemoryDevice;
use sealblock_proofs_btrfs_images::handmade::{DATA_START, DEVICE_BYTES, Handmade, SECTOR_BYTES, Storage, regular};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};

/// The rules that are tested here.
pub const RULES: &[Rule] =
    &[Rule::ExtentOverlap, Rule::ChecksumOverlap, Rule::FileOverlap, Rule::DeviceOverlap, Rule::NodePlace];

/// The findings of one rule; `None` if the checker of nodes refuses a node.
fn findings(made: &Handmade, rule: Rule) -> Option<Vec<Finding>> {
    let report = report(made, CheckOptions::default());
    let is_whole = report.findings.iter().all(|finding| finding.rule != Rule::LostNode);
    is_whole.then(|| report.findings.into_iter().filter(|finding| finding.rule == rule).collect())
}

fn report(made: &Handmade, options: CheckOptions) -> Report {
    let device = DynDevice::new("memory", MemoryDevice::new(BlockSize::B4096, DEVICE_BYTES / 4096, None));
    for (offset, bytes) in made.build().0 {
        let mut bytes = bytes;
        bytes.resize(bytes.len().next_multiple_of(SECTOR_BYTES), 0);
        if !bytes.is_empty() {
            let extent = Extent::from_raw(offset / 4096, bytes.len() as u64 / 4096).unwrap();
            let data = Sealed::seal(Slice::copy_from(&bytes), BlockSize::B4096, None, &Tags::default());
            block_on(device.execute(Request::write(extent, data, Durability::Volatile))).unwrap();
        }
    }
    let candidates = vec![Candidate { name: "memory".into(), device }];
    let fs = block_on(Filesystem::open(candidates, OpenOptions::default())).unwrap();
    block_on(check(&fs, options, &Unwatched))
}

/// Makes one item too long, each in turn. The last item of a leaf breaks the rule once; any other item makes its leaf
/// invalid. Without a long item nothing breaks the rule.
fn once_across_leaves(rule: Rule, make: impl Fn(Option<u64>) -> Handmade) {
    assert_eq!(findings(&make(None), rule), Some(Vec::new()));
    let counts: BTreeSet<Option<usize>> =
        (0..24).map(|long| findings(&make(Some(long)), rule).map(|found| found.len())).collect();
    assert_eq!(counts, BTreeSet::from([None, Some(1)]), "{rule}");
}

fn empty() -> Handmade {
    Handmade::new(4096, ChecksumType::Crc32c)
}

#[test]
fn checksums_overlap_across_leaves() {
    once_across_leaves(Rule::ChecksumOverlap, |long| {
        let mut made = empty();
        for index in 0..30 {
            let bytes = if long == Some(index) { 8 } else { 4 };
            let key = Key::new(EXTENT_CSUM, ItemType::EXTENT_CSUM, DATA_START + index * 4096);
            made.put(CSUM_TREE, key, vec![1; bytes]);
        }
        made
    });
}

#[test]
fn extents_overlap_across_leaves() {
    once_across_leaves(Rule::ExtentOverlap, |long| {
        let mut made = empty();
        for index in 0..30 {
            let bytes = if long == Some(index) { 8192 } else { 4096 };
            let key = Key::new(DATA_START + index * 4096, ItemType::EXTENT_ITEM, bytes);
            made.put(EXTENT_TREE, key, [&1_u64.to_le_bytes()[..], &[1; 1], &[0; 7], &[1; 1], &[0; 7]].concat());
        }
        made
    });
}

#[test]
fn parts_of_a_file_overlap_across_leaves() {
    once_across_leaves(Rule::FileOverlap, |long| {
        let mut made = empty();
        let file = made.file(FIRST_FREE, b"file", &[7; 100], Storage::Inline);
        for index in 0..30 {
            let bytes = if long == Some(index) { 8192 } else { 4096 };
            made.put_extent(file, index * 4096, &regular(DATA_START, 40 * 4096, index * 4096, bytes));
        }
        made
    });
}

#[test]
fn device_extents_overlap_across_leaves() {
    once_across_leaves(Rule::DeviceOverlap, |long| {
        let mut made = empty();
        for index in 0..30 {
            let bytes = if long == Some(index) { 8192_u64 } else { 4096 };
            let numbers = [3, 256, DATA_START, bytes].map(u64::to_le_bytes).concat();
            let key = Key::new(1, ItemType::DEV_EXTENT, (1 << 20) + index * 4096);
            made.put(DEV_TREE, key, [&numbers[..], &[0; 16]].concat());
        }
        made
    });
}

#[test]
fn a_node_across_a_border_of_64_kib_is_found() {
    let mut made = empty();
    let node = |at: u64| Key::new((4 << 20) + at, ItemType::METADATA_ITEM, 0);
    let item = [&1_u64.to_le_bytes()[..], &[1; 1], &[0; 7], &[2; 1], &[0; 7]].concat();
    let mut made_large = Handmade::new(8192, ChecksumType::Crc32c);
    made.put(EXTENT_TREE, node((64 << 10) - 4096), item.clone());
    assert_eq!(findings(&made, Rule::NodePlace), Some(Vec::new()));
    made_large.put(EXTENT_TREE, node((64 << 10) - 4096), item);
    assert_eq!(findings(&made_large, Rule::NodePlace).map(|found| found.len()), Some(1));
}

/// Directories in each other; the type of the last one is that of a file, and not that of its entry.
fn nested(is_wrong: bool) -> Handmade {
    let mut made = empty();
    let last = (0..30).fold(FIRST_FREE, |parent, _| made.directory(parent, b"inner"));
    if is_wrong {
        let mut inode = vec![0; 160];
        inode[40] = 1;
        inode[52..56].copy_from_slice(&0o100_644_u32.to_le_bytes());
        made.put(FS_TREE, Key::new(last, ItemType::INODE_ITEM, 0), inode);
    }
    made
}

/// The limit is too low for the types of all inodes, and high enough for the names, of which few are open at a time.
#[test]
fn names_that_disagree_are_a_finding_even_if_the_limit_hides_which() {
    for (most_names, rule) in [(CheckOptions::default().most_names, Rule::NameKind), (20, Rule::Name)] {
        let options = CheckOptions { most_names, ..CheckOptions::default() };
        let of = |is_wrong| {
            let findings = report(&nested(is_wrong), options).findings;
            findings.into_iter().filter(|one| matches!(one.rule, Rule::Name | Rule::NameKind)).collect::<Vec<_>>()
        };
        assert_eq!(of(false), Vec::new());
        let found = of(true);
        assert!(found.len() == 1 && found[0].rule == rule, "{found:?}");
    }
}
