//! Cases with known results; random ones are in `model`.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use super::*;
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::extent_refs::ExtentRef;
use sealblock_btrfs_format::features::{Compat, CompatRo, Features, Incompat};
use sealblock_btrfs_format::item_changes::{ItemChange, ItemChanges};
use sealblock_btrfs_format::key::{ItemType, Key};
use sealblock_btrfs_format::superblock::Geometry;

mod model;

/// Bytes of a sector.
const S: u64 = 4096;
const MANY: NonZeroUsize = NonZeroUsize::new(1000).unwrap();

type Tree = BTreeMap<Key, Vec<u8>>;

fn file() -> File {
    File { root: 5, ino: 257, sector_bytes: 4096, node_bytes: 16_384, has_hole_items: false, has_sums: true }
}

fn geometry() -> Geometry {
    Geometry {
        sector_bytes: 4096,
        node_bytes: 16_384,
        checksum: ChecksumType::Crc32c,
        features: Features { compat: Compat::empty(), compat_ro: CompatRo::empty(), incompat: Incompat::empty() },
        node_uuid: [0; 16],
        generation: 1 << 40,
    }
}

fn apply_items(tree: &mut Tree, changes: ItemChanges) {
    for (key, change) in changes {
        match change {
            ItemChange::Insert(data) => assert!(tree.insert(key, data).is_none(), "{key}"),
            ItemChange::Replace(data) => assert!(tree.insert(key, data).is_some(), "{key}"),
            ItemChange::Delete => assert!(tree.remove(&key).is_some(), "{key}"),
        }
    }
}

fn inline(bytes: u64, generation: u64) -> InlinePart {
    InlinePart { generation, compression: Compression::None, plain_bytes: bytes, stored: vec![7; bytes as usize] }
}

/// Runs a plan and returns what else changes.
fn plan(
    tree: &mut Tree,
    file: File,
    steps: impl FnOnce(&mut FileEdit<Tree>) -> Result<(), FileMapError>,
) -> FileChanges {
    let before = tree.clone();
    let mut edit = FileEdit::new(file, &before);
    steps(&mut edit).unwrap();
    let mut changes = edit.finish();
    apply_items(tree, std::mem::take(&mut changes.items));
    changes
}

/// A part of an extent without compression. All but the address in sectors.
fn part(start: u64, sectors: u64, (bytenr, all, offset): (u64, u64, u64)) -> ExtentPart {
    let extent = DiskExtent::plain(bytenr, all * S);
    ExtentPart { start: start * S, bytes: sectors * S, generation: 7, is_prealloc: false, extent, offset: offset * S }
}

fn parts(tree: &Tree) -> Vec<Mapping> {
    FileMap::new(file(), tree).parts(0..1 << 30, MANY).unwrap().parts
}

fn extents(tree: &Tree) -> Vec<ExtentPart> {
    let extent = |part| if let Mapping::Extent(part) = part { Some(part) } else { None };
    parts(tree).into_iter().filter_map(extent).collect()
}

fn refs(changes: &FileChanges) -> Vec<(u64, u64, i64)> {
    let offset = |what| if let ExtentRef::Data { offset, .. } = what { offset } else { panic!("{what:?}") };
    changes.refs.iter().map(|(bytenr, what, by)| (bytenr, offset(what), by)).collect()
}

const A: u64 = 1 << 30;
const B: u64 = 2 << 30;

#[test]
fn an_extent_is_in_use_until_its_last_sector_is_overwritten() {
    let mut tree = Tree::new();
    let changes = plan(&mut tree, file(), |edit| edit.insert(part(0, 10, (A, 10, 0))));
    assert_eq!((refs(&changes), changes.added_bytes, changes.removed_bytes), (vec![(A, 0, 1)], 10 * S, 0));
    // All but one sector, in the middle: cut in two, trimmed twice.
    let overwrite = |tree: &mut Tree, range: Range<u64>, bytenr| {
        plan(tree, file(), |edit| {
            assert!(edit.drop_range(range.start * S..range.end * S, Order::FromStart, MANY)?.is_empty());
            let sectors = range.end - range.start;
            edit.insert(part(range.start, sectors, (bytenr, sectors, 0)))
        })
    };
    let changes = overwrite(&mut tree, 3..5, B);
    assert_eq!(refs(&changes), [(A, 0, 1), (B, 3 * S, 1)]);
    assert_eq!(refs(&overwrite(&mut tree, 0..3, B + (1 << 20))), [(A, 0, -1), (B + (1 << 20), 0, 1)]);
    assert_eq!(refs(&overwrite(&mut tree, 6..10, B + (2 << 20))), [(B + (2 << 20), 6 * S, 1)]);
    let left = extents(&tree).into_iter().find(|part| part.extent.bytenr == A).unwrap();
    assert_eq!(left, part(5, 1, (A, 10, 5)));
    let changes = overwrite(&mut tree, 5..6, B + (3 << 20));
    assert_eq!(refs(&changes), [(A, 0, -1), (B + (3 << 20), 5 * S, 1)]);
    assert_eq!((changes.added_bytes, changes.removed_bytes), (S, S));
}

#[test]
fn the_offset_of_a_reference_wraps_below_zero_and_trimming_keeps_it() {
    let (mut tree, below) = (Tree::new(), (2 * S).wrapping_neg());
    let changes = plan(&mut tree, file(), |edit| edit.insert(part(1, 5, (A, 8, 3))));
    assert_eq!(refs(&changes), [(A, below, 1)]);
    for range in [0..2, 5..9] {
        let changes = plan(&mut tree, file(), |edit| {
            edit.drop_range(range.start * S..range.end * S, Order::FromEnd, MANY).map(drop)
        });
        assert_eq!((refs(&changes), changes.removed_bytes), (vec![], S));
    }
    assert_eq!(extents(&tree), [part(2, 3, (A, 8, 4))]);
    assert_eq!(extents(&tree)[0].reference(5, 257), ExtentRef::Data { root: 5, objectid: 257, offset: below });
}

#[test]
fn a_hundred_cuts_keep_the_size_of_the_extent() {
    let mut random = fastrand::Rng::with_seed(2);
    for compression in [Compression::None, Compression::Zstd] {
        let (mut tree, plain_bytes) = (Tree::new(), 32 * S);
        let bytes = if compression == Compression::None { plain_bytes } else { S };
        let extent = DiskExtent { bytenr: A, bytes, plain_bytes, compression };
        let whole = ExtentPart { extent, ..part(0, 32, (A, 32, 0)) };
        plan(&mut tree, file(), |edit| edit.insert(whole));
        for _ in 0..100 {
            let start = random.u64(..32) * S;
            plan(&mut tree, file(), |edit| edit.drop_range(start..start + S, Order::FromEnd, MANY).map(drop));
            for left in extents(&tree) {
                assert_eq!((left.extent, left.generation, left.start), (extent, 7, left.offset));
            }
            for (key, data) in &tree {
                let item = sealblock_btrfs_format::items::file_extent::FileExtent::decode(data).unwrap();
                let location = item.location().unwrap();
                assert_eq!((item.head().ram_bytes.get(), location.disk_num_bytes.get()), (plain_bytes, bytes), "{key}");
            }
        }
        assert!(extents(&tree).len() < 8);
    }
}

#[test]
fn a_compressed_extent_is_truncated_in_its_middle() {
    let mut tree = Tree::new();
    let extent = DiskExtent { bytenr: A, bytes: 2 * S, plain_bytes: 8 * S, compression: Compression::Lzo };
    plan(&mut tree, file(), |edit| edit.insert(ExtentPart { extent, ..part(0, 8, (A, 8, 0)) }));
    let size = 3 * S + 100;
    let zero = FileMap::new(file(), &tree).plan_zero(size..4 * S, 8 * S).unwrap();
    assert_eq!(
        zero,
        ZeroPlan { rewrite: vec![Rewrite::Sector { start: 3 * S, zero: size..4 * S }], whole: 4 * S..4 * S }
    );
    let changes = plan(&mut tree, file(), |edit| {
        assert_eq!(edit.truncate(size, 8 * S, MANY)?, Truncated { size, rest: 4 * S..4 * S });
        Ok(())
    });
    assert_eq!((refs(&changes), changes.removed_bytes), (vec![], 4 * S));
    assert_eq!(extents(&tree), [ExtentPart { extent, ..part(0, 4, (A, 8, 0)) }]);
    assert_eq!(extents(&tree)[0].stored(), A..A + 2 * S);
}

#[test]
fn a_truncation_goes_from_the_end_and_its_size_follows() {
    let mut tree = Tree::new();
    // The last one lies behind the end of the file.
    plan(&mut tree, file(), |edit| (0..5).try_for_each(|at| edit.insert(part(2 * at, 1, (A + at * S, 1, 0)))));
    let (mut size, mut sizes) = (7 * S + 5, Vec::new());
    loop {
        let before = tree.clone();
        let mut edit = FileEdit::new(file(), &before);
        let step = edit.truncate(S + 1, size, NonZeroUsize::MIN).unwrap();
        apply_items(&mut tree, edit.finish().items);
        size = step.size;
        sizes.push(size / S);
        assert!(extents(&tree).iter().all(|part| part.start < size));
        if step.rest.is_empty() {
            break;
        }
    }
    assert_eq!((size, sizes), (S + 1, vec![7, 6, 4, 1]));
    assert_eq!(extents(&tree).len(), 1);
    let mut edit = FileEdit::new(file(), &tree);
    assert!(matches!(edit.truncate(9, 8, MANY), Err(FileMapError::Range { .. })));
}

#[test]
fn four_hundred_references_to_one_extent_come_and_go() {
    use crate::refs::{DelayedRefs, Fate, NewExtent};
    use sealblock_btrfs_format::items::extent::ExtentFlags;
    use sealblock_btrfs_format::items::extent_buf::ExtentItemBuf;

    let (mut tree, mut extents, mut delayed) = (Tree::new(), Tree::new(), DelayedRefs::new());
    let item = ExtentItemBuf::new(7, ExtentFlags::DATA, None);
    delayed.insert(NewExtent { key: Key::new(A, ItemType::EXTENT_ITEM, 2 * S), item }).unwrap();
    let changes = plan(&mut tree, file(), |edit| edit.insert(part(0, 2, (A, 2, 0))));
    changes.refs.apply(&mut delayed).unwrap();
    // 200 shares of each of the two sectors.
    for at in 0..400 {
        let source = FileMap::new(file(), &tree).parts(at % 2 * S..at % 2 * S + S, MANY).unwrap();
        let changes =
            plan(&mut tree, file(), |edit| edit.clone_range(&source, (10 + 3 * at) * S, (1 << 30, 9), MANY).map(drop));
        assert_eq!(changes.added_bytes, S);
        changes.refs.apply(&mut delayed).unwrap();
    }
    let fate = delayed.take(A).unwrap().run(A, &mut extents, 16_384).unwrap();
    assert!(matches!(fate, Fate::Lives(_)));
    let keyed = extents.keys().filter(|key| key.item_type == ItemType::EXTENT_DATA_REF).count();
    assert!(keyed > 300 && keyed < 400, "{keyed}");
    let mut random = fastrand::Rng::with_seed(8);
    loop {
        let all = self::extents(&tree);
        let Some(gone) = random.choice(&all) else { break };
        let changes =
            plan(&mut tree, file(), |edit| edit.drop_range(gone.start..gone.end(), Order::FromEnd, MANY).map(drop));
        changes.refs.apply(&mut delayed).unwrap();
        if random.bool() || all.len() == 1 {
            let fate = delayed.take(A).unwrap().run(A, &mut extents, 16_384).unwrap();
            assert_eq!(matches!(fate, Fate::Lives(_)), all.len() > 1);
        }
    }
    assert!(extents.is_empty());
}

#[test]
fn a_file_goes_from_inline_to_an_extent_and_back() {
    let mut tree = Tree::new();
    let changes = plan(&mut tree, file(), |edit| edit.insert_inline(&inline(100, 8), 100));
    assert_eq!((changes.added_bytes, changes.refs.is_empty()), (100, true));
    assert_eq!(parts(&tree)[0], Mapping::Inline(inline(100, 8)));
    // It grows: the caller writes these bytes into an extent, and then the item goes.
    let zero = FileMap::new(file(), &tree).plan_zero(100..S, 5000).unwrap();
    assert_eq!(zero.rewrite, [Rewrite::Inline { inline: inline(100, 8), zero: 100..S }]);
    let changes = plan(&mut tree, file(), |edit| {
        edit.drop_range(0..S, Order::FromEnd, MANY)?;
        edit.insert(part(0, 2, (A, 2, 0)))
    });
    assert_eq!((changes.added_bytes, changes.removed_bytes), (2 * S, 100));
    // It shrinks and is rewritten.
    let changes = plan(&mut tree, file(), |edit| {
        edit.truncate(0, 5000, MANY)?;
        edit.insert_inline(&inline(2048, 9), 2048)
    });
    assert_eq!((changes.added_bytes, changes.removed_bytes, refs(&changes)), (2048, 2 * S, vec![(A, 0, -1)]));
    // An inline file is shortened in its item.
    let changes = plan(&mut tree, file(), |edit| edit.truncate(10, 2048, MANY).map(drop));
    assert_eq!((changes.removed_bytes, parts(&tree).remove(0)), (2038, Mapping::Inline(inline(10, 9))));
    // A part of it is never cut off, and nothing is put beside it.
    let mut edit = FileEdit::new(file(), &tree);
    let beside = FileEdit::new(file(), &tree).insert(part(0, 1, (A, 1, 0)));
    assert_eq!(beside, Err(FileMapError::Occupied { ino: 257, start: 0 }));
    assert!(edit.drop_range(S..2 * S, Order::FromEnd, MANY).unwrap().is_empty());
    assert_eq!(edit.finish(), FileChanges::default());
}

#[test]
fn a_compressed_inline_file_is_rewritten_before_it_is_shortened() {
    use sealblock_btrfs_format::compress::encode::{Method, compress};

    let (mut tree, plain) = (Tree::new(), b"abcdefgh".repeat(512));
    let stored = compress(Method::Zstd, &plain, 4096, 2048).unwrap();
    let item = InlinePart { generation: 8, compression: Compression::Zstd, plain_bytes: S, stored };
    plan(&mut tree, file(), |edit| edit.insert_inline(&item, S));
    let mut edit = FileEdit::new(file(), &tree);
    assert_eq!(edit.truncate(1000, S, MANY), Err(FileMapError::Inline(257)));
    let zero = FileMap::new(file(), &tree).plan_zero(1000..S, S).unwrap();
    let [Rewrite::Inline { inline, zero }] = &zero.rewrite[..] else { panic!("{zero:?}") };
    assert_eq!((inline.plain(4096).unwrap(), zero), (plain.clone(), &(1000..S)));
    let short =
        InlinePart { compression: Compression::None, plain_bytes: 1000, stored: plain[..1000].to_vec(), ..item };
    let changes = plan(&mut tree, file(), |edit| {
        edit.drop_range(0..S, Order::FromEnd, MANY)?;
        edit.insert_inline(&short, 1000)?;
        edit.truncate(1000, S, MANY).map(drop)
    });
    assert_eq!((changes.added_bytes, changes.removed_bytes), (1000, S));
}

#[test]
fn what_is_too_long_or_empty_is_not_inline() {
    let (tree, file) = (Tree::new(), file());
    for (bytes, may) in [(0, false), (1, true), (2047, true), (2048, true), (2049, false), (4095, false)] {
        assert_eq!(file.may_be_inline(bytes, bytes, Compression::None), may, "{bytes}");
        assert_eq!(FileEdit::new(file, &tree).insert_inline(&inline(bytes, 8), bytes).is_ok(), may);
        assert!(FileEdit::new(file, &tree).insert_inline(&inline(bytes, 8), bytes + 1).is_err());
    }
    for (size, stored, may) in [(4096, 2048, true), (4097, 2048, false), (4096, 2049, false), (4096, 0, false)] {
        assert_eq!(file.may_be_inline(size, stored, Compression::Zlib), may, "{size} {stored}");
    }
    let large = File { sector_bytes: 65_536, ..file };
    for (file, most) in [(file, 4095), (large, 16_283 - 25 - 21), (File { node_bytes: 4096, ..large }, 3995 - 46)] {
        assert_eq!(file.max_symlink_bytes(), most);
        for (bytes, may) in [(0, false), (1, true), (most, true), (most + 1, false)] {
            let mut edit = FileEdit::new(file, &tree);
            assert_eq!(edit.insert_symlink(&vec![b'x'; bytes as usize], 8).is_ok(), may, "{bytes}");
        }
    }
    // Space behind the end of the file.
    let mut edit = FileEdit::new(file, &tree);
    edit.insert(ExtentPart { is_prealloc: true, ..part(5, 1, (A, 1, 0)) }).unwrap();
    assert!(matches!(edit.insert_inline(&inline(5, 8), 5), Err(FileMapError::Occupied { .. })));
}

#[test]
fn space_behind_the_end_stays_when_the_file_grows_into_it() {
    let with_items = File { has_hole_items: true, ..file() };
    let (mut tree, ahead) = (Tree::new(), ExtentPart { is_prealloc: true, ..part(4, 4, (A, 4, 0)) });
    plan(&mut tree, with_items, |edit| edit.insert(ahead));
    // From 0 to six sectors: a hole before the space.
    plan(&mut tree, with_items, |edit| {
        assert!(edit.fill_holes(0..6 * S, 9, MANY)?.is_empty());
        Ok(())
    });
    assert_eq!(tree.keys().map(|key| key.offset / S).collect::<Vec<_>>(), [0, 4]);
    // A write into its middle, and then beside it.
    let mark = |tree: &mut Tree, range: Range<u64>, mark| {
        plan(tree, with_items, |edit| edit.mark_written(range.start * S..range.end * S, mark, MANY).map(drop))
    };
    assert_eq!(refs(&mark(&mut tree, 5..6, Mark::New(20))), [(A, 4 * S, 2)]);
    let shape = |tree: &Tree| {
        let all = extents(tree);
        all.iter().map(|part| (part.start / S, part.bytes / S, part.generation, part.is_prealloc)).collect::<Vec<_>>()
    };
    assert_eq!(shape(&tree), [(4, 1, 7, true), (5, 1, 20, false), (6, 2, 7, true)]);
    assert_eq!(refs(&mark(&mut tree, 6..7, Mark::New(21))), []);
    assert_eq!(shape(&tree), [(4, 1, 7, true), (5, 2, 21, false), (7, 1, 7, true)]);
    // With the generation of the space, only equal ones become one.
    assert_eq!(refs(&mark(&mut tree, 7..8, Mark::Keep)), []);
    assert_eq!(refs(&mark(&mut tree, 4..5, Mark::New(22))), [(A, 4 * S, -1)]);
    assert_eq!(shape(&tree), [(4, 3, 22, false), (7, 1, 7, false)]);
}

#[test]
fn what_contradicts_itself_is_refused() {
    let (mut tree, file) = (Tree::new(), file());
    plan(&mut tree, file, |edit| edit.insert(part(2, 2, (A, 2, 0))));
    let edit = || FileEdit::new(file, &tree);
    let is_range = |result| matches!(result, Err(FileMapError::Range { .. }));
    assert!(is_range(edit().drop_range(1..S, Order::FromEnd, MANY).map(drop)));
    assert!(is_range(edit().drop_range(Range { start: S, end: 0 }, Order::FromEnd, MANY).map(drop)));
    assert!(is_range(edit().mark_written(2 * S..3 * S, Mark::Keep, MANY).map(drop)));
    assert!(is_range(edit().mark_written(0..S, Mark::Keep, MANY).map(drop)));
    let zstd = DiskExtent { compression: Compression::Zstd, ..DiskExtent::plain(A, S) };
    let bad = [
        ExtentPart { bytes: 100, ..part(0, 1, (A, 1, 0)) },
        ExtentPart { start: 1, ..part(0, 1, (A, 1, 0)) },
        part(0, 0, (A, 1, 0)),
        part(0, 1, (0, 1, 0)),
        part(0, 2, (A, 1, 0)),
        part(0, 1, (A, 1, 1)),
        part(0, 1, (u64::MAX - S + 1, 1, 0)),
        ExtentPart { start: file.max_bytes(), ..part(0, 1, (A, 1, 0)) },
        ExtentPart { extent: zstd, is_prealloc: true, ..part(0, 1, (A, 1, 0)) },
    ];
    for part in bad {
        assert!(matches!(edit().insert(part), Err(FileMapError::New { .. })), "{part:?}");
    }
    assert!(edit().insert(part(0, 1, (A, 1, 0))).is_ok());
    let compressed = ExtentPart { extent: zstd, ..part(0, 1, (A, 1, 0)) };
    for (has_sums, may) in [(true, true), (false, false)] {
        let file = File { has_sums, ..file };
        assert_eq!(FileEdit::new(file, &tree).insert(compressed).is_ok(), may);
        assert!(FileEdit::new(file, &tree).insert(part(0, 1, (A, 1, 0))).is_ok());
        assert_eq!(file.may_be_inline(S, 100, Compression::Zstd), may);
    }
    let source = FileMap::new(File { has_sums: false, ..file }, &tree).parts(0..4 * S, MANY).unwrap();
    assert_eq!(edit().clone_range(&source, 8 * S, (12 * S, 9), MANY), Err(FileMapError::Sums { from: 257, to: 257 }));
    let source = FileMap::new(file, &tree).parts(0..4 * S, MANY).unwrap();
    assert!(is_range(edit().clone_range(&source, 3 * S, (12 * S, 9), MANY).map(drop)));
    assert!(is_range(edit().clone_range(&source, u64::MAX - S, (12 * S, 9), MANY).map(drop)));
    assert!(edit().clone_range(&source, 4 * S, (12 * S, 9), MANY).unwrap().is_empty());
}

#[test]
fn damaged_items_are_errors() {
    let mut tree = Tree::new();
    plan(&mut tree, file(), |edit| edit.insert(part(2, 2, (A, 2, 0))));
    let key = *tree.keys().next().unwrap();
    let read = |tree: &Tree| FileMap::new(file(), tree).parts(0..8 * S, MANY).map(drop);
    for (at, value) in [(16, 9), (17, 1), (18, 1), (20, 3), (21, 1), (29, 1), (37, 1), (38, 0x40), (45, 1), (46, 0x40)]
    {
        let mut bad = tree.clone();
        bad.get_mut(&key).unwrap()[at] = value;
        let error = read(&bad).unwrap_err();
        assert!(matches!(error, FileMapError::Item { .. } | FileMapError::Shape { .. }), "{at}: {error}");
    }
    read(&tree).unwrap();
    // Two items with one sector.
    tree.insert(file().key(3 * S), part(3, 1, (B, 1, 0)).encode());
    assert_eq!(read(&tree), Err(FileMapError::Overlap { ino: 257, start: 3 * S, end: 4 * S }));
}
