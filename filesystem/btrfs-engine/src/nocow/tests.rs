//! A part that may be written in place, and for each rule one that may not.

use std::collections::BTreeMap;

use super::*;
use crate::file_map::{DiskExtent, Hole};
use crate::refs::NewExtent;
use sealblock_btrfs_format::extent_refs::ExtentRef;
use sealblock_btrfs_format::items::extent_buf::{KeyedRefs, keyed_data};

type Tree = BTreeMap<Key, Vec<u8>>;

const S: u64 = 4096;
const A: u64 = 1 << 30;

/// A filesystem in which the part may be written.
#[derive(Clone)]
struct World {
    file: File,
    part: ExtentPart,
    has_nodatacow: bool,
    last_snapshot: u64,
    is_snapshot_pending: bool,
    is_read_only: bool,
    extents: Tree,
    delayed: DelayedRefs,
    released: Released,
    csums: Tree,
}

fn of_file(ino: u64, offset: u64) -> ExtentRef {
    ExtentRef::Data { root: 5, objectid: ino, offset }
}

fn extent_key() -> Key {
    Key::new(A, ItemType::EXTENT_ITEM, 8 * S)
}

fn item(generation: u64, refs: &[(ExtentRef, u32)]) -> ExtentItemBuf {
    let mut item = ExtentItemBuf::new(generation, ExtentFlags::DATA, None);
    for (what, count) in refs {
        item.add(*what, *count, KeyedRefs::default(), 16_384).unwrap();
    }
    item
}

impl World {
    /// Written data of an extent that has three items, two of them of this file.
    fn new() -> World {
        let file =
            File { root: 5, ino: 257, sector_bytes: 4096, node_bytes: 16_384, has_hole_items: false, has_sums: false };
        let extent = DiskExtent::plain(A, 8 * S);
        let part =
            ExtentPart { start: 10 * S, bytes: 2 * S, generation: 30, is_prealloc: false, extent, offset: 4 * S };
        World {
            file,
            part,
            has_nodatacow: true,
            last_snapshot: 29,
            is_snapshot_pending: false,
            is_read_only: false,
            extents: Tree::from([(extent_key(), item(30, &[(of_file(257, 6 * S), 3)]).encode())]),
            delayed: DelayedRefs::new(),
            released: Released::default(),
            // Those of other sectors of the same extent and of its neighbours do not matter.
            csums: [3, 6, 9].map(|at| (Key::new(-10_i64 as u64, ItemType::EXTENT_CSUM, A + at * S), vec![0; 4])).into(),
        }
    }

    fn result(&self) -> Result<Option<MustCow>, NocowError> {
        let test = NocowTest {
            file: self.file,
            has_nodatacow: self.has_nodatacow,
            last_snapshot: self.last_snapshot,
            is_snapshot_pending: self.is_snapshot_pending,
            extents: &self.extents,
            delayed: &self.delayed,
            released: &self.released,
            csums: &self.csums,
            shape: CsumShape { sector_bytes: 4096, node_bytes: 16_384, csum_bytes: 4 },
        };
        test.must_cow(&Mapping::Extent(self.part), |bytenr| bytenr == A && self.is_read_only)
    }

    fn put(&mut self, item: ExtentItemBuf) {
        self.extents.insert(extent_key(), item.encode());
    }
}

#[track_caller]
fn expect(expected: Option<MustCow>, change: impl FnOnce(&mut World)) {
    let mut world = World::new();
    change(&mut world);
    assert_eq!(world.result(), Ok(expected));
}

#[test]
fn data_with_nodatacow_and_space_that_was_never_written_are_written_in_place() {
    expect(None, |_| ());
    expect(None, |world| (world.has_nodatacow, world.part.is_prealloc) = (false, true));
    expect(Some(MustCow::Data), |world| world.has_nodatacow = false);
}

#[test]
fn a_snapshot_or_another_reference_forbids_it() {
    let own = of_file(257, 6 * S);
    expect(Some(MustCow::Snapshot), |world| world.last_snapshot = 30);
    expect(Some(MustCow::Snapshot), |world| world.part.generation = 29);
    expect(Some(MustCow::Snapshot), |world| world.put(item(29, &[(own, 3)])));
    expect(Some(MustCow::Snapshot), |world| world.is_snapshot_pending = true);
    for other in [of_file(258, 6 * S), of_file(257, 7 * S), ExtentRef::SharedData { parent: 1 << 20 }] {
        expect(Some(MustCow::Shared), |world| world.put(item(30, &[(other, 3)])));
        expect(Some(MustCow::Shared), |world| world.put(item(30, &[(own, 2), (other, 1)])));
        expect(Some(MustCow::Shared), |world| world.delayed.add(A, other, 1).unwrap());
        // A reference that is dropped later is there until then.
        expect(Some(MustCow::Shared), |world| world.delayed.drop(A, other, 1).unwrap());
        expect(Some(MustCow::Shared), |world| drop(world.extents.insert(other.key(A), keyed_data(other, 1))));
    }
    // One that is gone comes back in a power cut, until that is durable.
    expect(Some(MustCow::Shared), |world| world.released.insert(A));
    expect(None, |world| {
        world.released.insert(A);
        world.released.freeze();
        assert!(world.released.contains(A));
        world.released.thaw();
    });
    // More references than those behind the item.
    expect(Some(MustCow::Shared), |world| {
        let mut bytes = item(30, &[(own, 3)]).encode();
        bytes[0] = 4;
        world.extents.insert(extent_key(), bytes);
    });
    expect(Some(MustCow::Shared), |world| world.put(item(30, &[])));
}

#[test]
fn delayed_references_of_the_same_part_do_not_matter() {
    let own = of_file(257, 6 * S);
    expect(None, |world| world.delayed.add(A, own, 2).unwrap());
    expect(None, |world| world.delayed.drop(A, own, 2).unwrap());
    expect(Some(MustCow::Missing), |world| world.delayed.drop(A, own, 3).unwrap());
    // Allocated in this transaction.
    let fresh = |world: &mut World, refs: u32| {
        world.extents.clear();
        let item = ExtentItemBuf::new(31, ExtentFlags::DATA, None);
        world.delayed.insert(NewExtent { key: extent_key(), item }).unwrap();
        if refs > 0 {
            world.delayed.add(A, own, refs).unwrap();
        }
    };
    expect(None, |world| fresh(world, 1));
    expect(Some(MustCow::Missing), |world| fresh(world, 0));
    expect(Some(MustCow::Snapshot), |world| {
        fresh(world, 1);
        (world.last_snapshot, world.part.generation) = (31, 32);
    });
    expect(Some(MustCow::Missing), |world| world.extents.clear());
}

#[test]
fn checksums_compression_and_read_only_groups_forbid_it() {
    for (at, expected) in [(3, None), (4, Some(MustCow::Summed)), (5, Some(MustCow::Summed)), (6, None)] {
        expect(expected, |world| {
            world.csums = Tree::from([(Key::new(-10_i64 as u64, ItemType::EXTENT_CSUM, A + at * S), vec![0; 4])]);
        });
    }
    // One that begins before the part and reaches into it.
    expect(Some(MustCow::Summed), |world| {
        world.csums = Tree::from([(Key::new(-10_i64 as u64, ItemType::EXTENT_CSUM, A), vec![0; 20])]);
    });
    expect(Some(MustCow::Compressed), |world| world.part.extent.compression = Compression::Lzo);
    expect(Some(MustCow::ReadOnly), |world| world.is_read_only = true);
}

#[test]
fn holes_are_no_extents_and_damaged_items_are_errors() {
    let mut world = World::new();
    let hole = Mapping::Hole(Hole { start: 0, bytes: S, generation: None });
    let test = NocowTest {
        file: world.file,
        has_nodatacow: true,
        last_snapshot: 0,
        is_snapshot_pending: false,
        extents: &world.extents,
        delayed: &world.delayed,
        released: &world.released,
        csums: &world.csums,
        shape: CsumShape { sector_bytes: 4096, node_bytes: 16_384, csum_bytes: 4 },
    };
    assert_eq!(test.must_cow(&hole, |_| false), Ok(Some(MustCow::NoExtent)));
    world.extents.insert(extent_key(), vec![0; 10]);
    assert!(matches!(world.result(), Err(NocowError::Extent { bytenr: A, .. })));
    let mut world = World::new();
    world.csums.insert(Key::new(-10_i64 as u64, ItemType::EXTENT_CSUM, A + 4 * S), vec![0; 3]);
    assert!(matches!(world.result(), Err(NocowError::Csums(CsumError::Item { .. }))));
}
