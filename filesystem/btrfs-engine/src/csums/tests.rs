//! Random runs of checksums, compared with a map of sectors, and cases with known results.

use std::collections::BTreeMap;

use super::*;
use sealblock_btrfs_format::checker_items::{Context, check_item};
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::features::{Compat, CompatRo, Features, Incompat};
use sealblock_btrfs_format::item_changes::ItemChange;
use sealblock_btrfs_format::superblock::Geometry;

type Tree = BTreeMap<Key, Vec<u8>>;

const MANY: NonZeroUsize = NonZeroUsize::new(1000).unwrap();
const S: u64 = 4096;

fn shape(kind: ChecksumType, node_bytes: u32) -> CsumShape {
    CsumShape { sector_bytes: 4096, node_bytes, csum_bytes: kind.bytes() }
}

fn apply(tree: &mut Tree, changes: ItemChanges) {
    for (key, change) in changes {
        match change {
            ItemChange::Insert(data) => assert!(tree.insert(key, data).is_none(), "{key}"),
            ItemChange::Replace(data) => assert!(tree.insert(key, data).is_some(), "{key}"),
            ItemChange::Delete => assert!(tree.remove(&key).is_some(), "{key}"),
        }
    }
}

/// Every item passes the rules, and is not longer than allowed.
fn check(tree: &Tree, kind: ChecksumType, shape: CsumShape) {
    let features = Features { compat: Compat::empty(), compat_ro: CompatRo::empty(), incompat: Incompat::empty() };
    let CsumShape { sector_bytes, node_bytes, .. } = shape;
    let geometry = Geometry { sector_bytes, node_bytes, checksum: kind, features, node_uuid: [0; 16], generation: 100 };
    let mut previous = None;
    for (key, data) in tree {
        let context = Context { geometry: &geometry, owner: objectid::CSUM_TREE, key: *key, previous };
        check_item(&context, data).unwrap_or_else(|rule| panic!("{key}: {rule}"));
        assert!(data.len() <= shape.max_sums() * shape.csum_bytes);
        previous = Some((*key, &data[..]));
    }
}

#[test]
fn random_runs_leave_what_a_map_of_sectors_has() {
    for (seed, kind) in ChecksumType::ALL.into_iter().enumerate() {
        for (node_bytes, sectors, steps) in [(4096, 3000, 4000), (16_384, 9000, 1500), (65_536, 20_000, 300)] {
            let shape = shape(kind, node_bytes);
            let mut random = fastrand::Rng::with_seed(seed as u64);
            let (mut tree, mut model, mut done) = (Tree::new(), BTreeMap::<u64, Vec<u8>>::new(), [0; 4]);
            for _ in 0..steps {
                let most = if random.bool() { 8 } else { sectors / 4 };
                let start = random.u64(..sectors);
                let end = sectors.min(start + random.u64(1..=most));
                let before = tree.clone();
                let mut edit = CsumEdit::new(shape, &before);
                match random.u8(..5) {
                    0..3 => {
                        // The free sectors from there on, or one that is taken.
                        let free = (start..end).take_while(|sector| !model.contains_key(sector)).count() as u64;
                        if free == 0 {
                            let sums = vec![1; shape.csum_bytes * (end - start) as usize];
                            assert_eq!(edit.insert(start * S, &sums), Err(CsumError::Exists(start * S)));
                            done[0] += 1;
                            continue;
                        }
                        let sums: Vec<Vec<u8>> =
                            (0..free).map(|_| (0..shape.csum_bytes).map(|_| random.u8(..)).collect()).collect();
                        edit.insert(start * S, &sums.concat()).unwrap();
                        model.extend((start..).zip(sums));
                        done[1] += 1;
                    }
                    3 => {
                        let limit = NonZeroUsize::new(random.usize(1..4)).unwrap();
                        let rest = edit.delete(start * S..end * S, limit).unwrap();
                        assert!(rest.is_empty() || rest.end == end * S);
                        let end = if rest.is_empty() { end } else { rest.start / S };
                        model.retain(|sector, _| !(start..end).contains(sector));
                        done[2 + usize::from(!rest.is_empty())] += 1;
                    }
                    _ => {
                        let (runs, at) = edit.csums().runs(start * S..end * S, MANY).unwrap();
                        let sums = |run: &CsumRun| {
                            let sums = run.sums.chunks(shape.csum_bytes).map(<[u8]>::to_vec);
                            (run.start / S..).zip(sums).collect::<Vec<_>>()
                        };
                        let found: BTreeMap<_, _> = runs.iter().flat_map(sums).collect();
                        let expected = model.range(start..end).map(|(sector, sum)| (*sector, sum.clone())).collect();
                        assert_eq!((found, at), (expected, end * S));
                        assert!(runs.windows(2).all(|two| two[0].start < two[1].start));
                    }
                }
                apply(&mut tree, edit.finish());
                check(&tree, kind, shape);
                let all: usize = tree.values().map(Vec::len).sum();
                assert_eq!(all, model.len() * shape.csum_bytes);
            }
            let (runs, _) = Csums::new(shape, &tree).runs(0..sectors * S, NonZeroUsize::MAX).unwrap();
            let found: Vec<u8> = runs.into_iter().flat_map(|run| run.sums).collect();
            assert_eq!(found, model.into_values().flatten().collect::<Vec<u8>>());
            assert!(done.iter().all(|count| *count > 0), "{done:?}");
        }
    }
}

fn sums(count: usize) -> Vec<u8> {
    (0..count as u32).flat_map(u32::to_le_bytes).collect()
}

/// The first sector and the number of checksums of each item.
fn items(tree: &Tree) -> Vec<(u64, usize)> {
    tree.iter().map(|(key, data)| (key.offset / S, data.len() / 4)).collect()
}

fn edit(tree: &mut Tree, step: impl FnOnce(&mut CsumEdit<Tree>)) {
    let before = tree.clone();
    let mut edit = CsumEdit::new(shape(ChecksumType::Crc32c, 16_384), &before);
    step(&mut edit);
    apply(tree, edit.finish());
}

#[test]
fn an_item_has_as_many_checksums_as_in_linux() {
    let most = |kind, node_bytes| shape(kind, node_bytes).max_sums();
    assert_eq!(most(ChecksumType::Crc32c, 16_384), 4057);
    assert_eq!(most(ChecksumType::XxHash64, 16_384), 2028);
    assert_eq!(most(ChecksumType::Sha256, 16_384), 506);
    assert_eq!(most(ChecksumType::Blake2b, 4096), 122);
    let mut tree = Tree::new();
    edit(&mut tree, |edit| edit.insert(0, &sums(4056)).unwrap());
    edit(&mut tree, |edit| edit.insert(4056 * S, &sums(2)).unwrap());
    assert_eq!(items(&tree), [(0, 4057), (4057, 1)]);
    edit(&mut tree, |edit| edit.insert(4058 * S, &sums(9000)).unwrap());
    assert_eq!(items(&tree), [(0, 4057), (4057, 4057), (8114, 4057), (12_171, 887)]);
    assert_eq!(tree[&key(4057 * S)][4..], sums(4056));
}

#[test]
fn a_deletion_may_cut_an_item_in_two_and_span_many() {
    let mut tree = Tree::new();
    edit(&mut tree, |edit| edit.insert(0, &sums(3 * 4057 + 5)).unwrap());
    edit(&mut tree, |edit| assert!(edit.delete(10 * S..20 * S, MANY).unwrap().is_empty()));
    assert_eq!(items(&tree), [(0, 10), (20, 4037), (4057, 4057), (8114, 4057), (12_171, 5)]);
    assert_eq!((&tree[&key(0)], &tree[&key(20 * S)][..4]), (&sums(10), &20_u32.to_le_bytes()[..]));
    // Across three items, the second of which goes.
    edit(&mut tree, |edit| assert!(edit.delete(100 * S..8200 * S, MANY).unwrap().is_empty()));
    assert_eq!(items(&tree), [(0, 10), (20, 80), (8200, 4057 - 86), (12_171, 5)]);
    // In steps of one item.
    edit(&mut tree, |edit| {
        let rest = edit.delete(5 * S..12_172 * S, NonZeroUsize::MIN).unwrap();
        assert_eq!(rest, 10 * S..12_172 * S);
        let rest = edit.delete(rest, NonZeroUsize::new(2).unwrap()).unwrap();
        assert_eq!(rest, 12_171 * S..12_172 * S);
        assert!(edit.delete(rest, NonZeroUsize::MIN).unwrap().is_empty());
    });
    assert_eq!(items(&tree), [(0, 5), (12_172, 4)]);
    edit(&mut tree, |edit| assert!(edit.delete(0..u64::MAX / S * S, MANY).unwrap().is_empty()));
    assert!(tree.is_empty());
}

#[test]
fn what_is_no_run_of_checksums_is_refused() {
    let tree = Tree::from([(key(8 * S), sums(4))]);
    let shape = shape(ChecksumType::Crc32c, 16_384);
    let insert = |start, sums: &[u8]| CsumEdit::new(shape, &tree).insert(start, sums);
    assert_eq!(insert(S, &[]), Err(CsumError::Sums(0)));
    assert_eq!(insert(S, &[0; 7]), Err(CsumError::Sums(7)));
    assert!(matches!(insert(1, &sums(1)), Err(CsumError::Range { .. })));
    assert!(matches!(insert(u64::MAX - S + 1, &sums(1)), Err(CsumError::Range { .. })));
    assert_eq!(insert(4 * S, &sums(5)), Err(CsumError::Exists(8 * S)));
    assert_eq!(insert(11 * S, &sums(1)), Err(CsumError::Exists(11 * S)));
    assert_eq!((insert(4 * S, &sums(4)), insert(12 * S, &sums(1))), (Ok(()), Ok(())));
    let backwards = Range { start: S, end: 0 };
    for range in [1..S, 0..S + 1, backwards] {
        assert!(matches!(CsumEdit::new(shape, &tree).delete(range.clone(), MANY), Err(CsumError::Range { .. })));
        assert!(matches!(Csums::new(shape, &tree).runs(range, MANY), Err(CsumError::Range { .. })));
    }
    for bad in [CsumShape { node_bytes: 100, ..shape }, CsumShape { sector_bytes: 0, ..shape }] {
        assert!(matches!(CsumEdit::new(bad, &tree).insert(0, &sums(1)), Err(CsumError::Shape { .. })));
        assert!(matches!(Csums::new(bad, &tree).runs(0..S, MANY), Err(CsumError::Shape { .. })));
    }
}

#[test]
fn without_checksums_there_is_nothing_to_read_or_delete_and_nothing_is_inserted() {
    let (tree, shape) = (Tree::new(), shape(ChecksumType::None, 16_384));
    let mut edit = CsumEdit::new(shape, &tree);
    assert_eq!(Csums::new(shape, &tree).runs(S..9 * S, MANY), Ok((Vec::new(), 9 * S)));
    assert_eq!(edit.delete(S..9 * S, MANY), Ok(9 * S..9 * S));
    assert_eq!(edit.insert(S, &[0; 4]), Err(CsumError::Sums(4)));
    assert!(matches!(edit.delete(1..S, MANY), Err(CsumError::Range { .. })));
    assert!(edit.finish().is_empty());
}

#[test]
fn damaged_items_are_errors() {
    let shape = shape(ChecksumType::Crc32c, 16_384);
    for (start, data, is_good) in [
        (0, vec![0; 8], true),
        (0, vec![], false),
        (0, vec![0; 7], false),
        (1, vec![0; 4], false),
        (u64::MAX - 2 * S + 1, vec![0; 4], true),
        (u64::MAX - 2 * S + 1, vec![0; 8], false),
    ] {
        let (tree, range) = (Tree::from([(key(start), data)]), 0..u64::MAX / S * S);
        let wrong = |error| matches!(error, Some(CsumError::Item { .. }));
        let read = Csums::new(shape, &tree).runs(range.clone(), MANY).err();
        let delete = CsumEdit::new(shape, &tree).delete(range, MANY).err();
        assert_eq!((wrong(read), wrong(delete)), (!is_good, !is_good), "{start} {read:?} {delete:?}");
    }
}
