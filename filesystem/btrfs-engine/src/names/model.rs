//! What the tests of names share: a tree in a map, names with equal hashes, and the rules that all items of a subvolume
//! must obey together.

use std::collections::{BTreeMap, BTreeSet};

use sealblock_btrfs_format::checker_items::{Context, check_item};
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::features::{Compat, CompatRo, Features, Incompat};
use sealblock_btrfs_format::item_changes::{ItemChange, ItemChanges};
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::directory::{FileType, Target};
use sealblock_btrfs_format::items::inode::{InodeItem, Timespec};
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::names::name_hash;
use sealblock_btrfs_format::node::{ITEM_HEAD_BYTES, leaf_capacity};
use sealblock_btrfs_format::superblock::Geometry;

use crate::datasum::Datasum;
use crate::inode::Ownership;
use crate::plan::{Plan, PlanContext, PlanError};

pub(crate) type Tree = BTreeMap<Key, Vec<u8>>;

/// The open transaction of the tests.
pub(crate) const GENERATION: u64 = 100;
pub(crate) const TOP: u64 = objectid::FIRST_FREE;
pub(crate) const OWNER: Ownership = Ownership { uid: 1000, gid: 100, permissions: 0o644 };

/// A filesystem with nodes of 4 KiB, so lists of names are soon full.
pub(crate) fn geometry() -> Geometry {
    Geometry {
        sector_bytes: 4096,
        node_bytes: 4096,
        checksum: ChecksumType::Crc32c,
        features: Features {
            compat: Compat::empty(),
            compat_ro: CompatRo::empty(),
            incompat: Incompat::SKINNY_METADATA | Incompat::NO_HOLES | Incompat::EXTENDED_IREF,
        },
        node_uuid: [3; 16],
        generation: GENERATION - 1,
    }
}

pub(crate) fn time(seconds: i64) -> Timespec {
    Timespec { seconds: seconds.into(), nanoseconds: 7.into() }
}

pub(crate) fn context(geometry: &Geometry) -> PlanContext<'_> {
    PlanContext { geometry, generation: GENERATION, now: time(50), has_device_sums: false }
}

/// The tree of a new subvolume.
pub(crate) fn new_tree() -> Tree {
    let (mut tree, geometry) = (Tree::new(), geometry());
    let mut plan = Plan::new(&tree, PlanContext { generation: 1, now: time(1), ..context(&geometry) });
    plan.create_top(&Ownership { uid: 0, gid: 0, permissions: 0o755 }, Datasum::Csum).unwrap();
    let changes = plan.into_changes();
    apply(&mut tree, changes);
    tree
}

/// Applies changes, and demands that each is what it says.
pub(crate) fn apply(tree: &mut Tree, changes: ItemChanges) {
    for (key, change) in changes {
        match change {
            ItemChange::Insert(data) => assert_eq!(tree.insert(key, data), None, "{key} is inserted, and is there"),
            ItemChange::Replace(data) => {
                assert!(tree.insert(key, data).is_some(), "{key} is replaced, and is not there")
            }
            ItemChange::Delete => assert!(tree.remove(&key).is_some(), "{key} is deleted, and is not there"),
        }
    }
}

/// Names that all have one hash: a name of 8 bytes is changed by differences that have no effect on a CRC.
///
/// A CRC is linear: bits that are flipped in a name flip bits of the hash which depend on nothing else. Among 64
/// flipped bits and 32 bits of a hash, there are at least 32 independent sets of bits whose effects cancel each other.
pub(crate) fn colliding_names(count: usize) -> Vec<Vec<u8>> {
    let base = *b"a-name-x";
    let hash_of = |bits: u64| name_hash(&(u64::from_le_bytes(base) ^ bits).to_le_bytes()) ^ name_hash(&base);
    // Rows of a matrix in echelon form: by the highest bit of the effect, the effect and the flipped bits.
    let (mut rows, mut neutral) = (BTreeMap::<u32, (u64, u64)>::new(), Vec::new());
    for bit in 0..64 {
        let (mut effect, mut bits) = (hash_of(1 << bit), 1_u64 << bit);
        while effect != 0 {
            let Some((other, with)) = rows.get(&effect.ilog2()) else {
                rows.insert(effect.ilog2(), (effect, bits));
                break;
            };
            (effect, bits) = (effect ^ other, bits ^ with);
        }
        if effect == 0 {
            neutral.push(bits);
        }
    }
    let names = (0_u64..).map(|number| {
        let chosen = neutral.iter().enumerate().filter(|(index, _)| number >> index & 1 == 1);
        let bits = chosen.fold(0, |all, (_, bits)| all ^ bits);
        (u64::from_le_bytes(base) ^ bits).to_le_bytes().to_vec()
    });
    names.filter(|name| !name.iter().any(|byte| matches!(byte, 0 | b'/'))).take(count).collect()
}

/// What the items of a subvolume say about an inode.
#[derive(Default)]
struct Found {
    inode: Option<InodeItem>,
    /// Directory, index and name, as the inode has them.
    backrefs: BTreeSet<(u64, u64, Vec<u8>)>,
    /// Name, target and kind by DIR_ITEM, and by DIR_INDEX.
    by_name: BTreeSet<(Vec<u8>, Key, u8)>,
    by_index: BTreeMap<u64, (Vec<u8>, Key, u8)>,
    has_extents: bool,
    is_orphan: bool,
}

/// Checks each item by itself, and all of them together.
pub(crate) fn check(tree: &Tree, geometry: &Geometry) {
    let mut all = BTreeMap::<u64, Found>::new();
    let mut previous: Option<(Key, &[u8])> = None;
    for (key, data) in tree {
        assert!(data.len() + ITEM_HEAD_BYTES <= leaf_capacity(geometry.node_bytes), "{key} fits into no leaf");
        // A leaf could begin with any item.
        let previous_of_leaf = previous.filter(|(before, _)| before.objectid == key.objectid);
        let is_attached = key.item_type == ItemType::INODE_ITEM || key.item_type == ItemType::ORPHAN_ITEM;
        assert!(is_attached || previous_of_leaf.is_some(), "{key} has no inode before it");
        let context = Context { geometry, owner: objectid::FS_TREE, key: *key, previous: previous_of_leaf };
        check_item(&context, data).unwrap_or_else(|rule| panic!("{key}: {rule}"));
        collect(&mut all, *key, data);
        previous = Some((*key, data));
    }
    all.iter().for_each(|(ino, found)| check_inode(&all, *ino, found));
}

fn collect(all: &mut BTreeMap<u64, Found>, key: Key, data: &[u8]) {
    let is_new = |is_new: bool| assert!(is_new, "{key} has something twice");
    if key.item_type == ItemType::ORPHAN_ITEM {
        assert_eq!(key.objectid, objectid::ORPHAN);
        all.entry(key.offset).or_default().is_orphan = true;
        return;
    }
    let found = all.entry(key.objectid).or_default();
    match Item::decode(key, data).unwrap() {
        Item::Inode(inode) => found.inode = Some(*inode),
        Item::InodeRefs(refs) => {
            refs.iter().for_each(|one| is_new(found.backrefs.insert((key.offset, one.index, one.name.to_vec()))));
        }
        Item::InodeExtrefs(refs) => {
            refs.iter().for_each(|one| is_new(found.backrefs.insert((one.parent, one.index, one.name.to_vec()))));
        }
        Item::DirItems(entries) => {
            entries.iter().for_each(|one| is_new(found.by_name.insert((one.name.to_vec(), one.location, one.kind))));
        }
        Item::DirIndex(entries) => {
            assert!(key.offset >= 2, "{key}");
            let one = entries.iter().next().unwrap();
            is_new(found.by_index.insert(key.offset, (one.name.to_vec(), one.location, one.kind)).is_none());
        }
        Item::Xattrs(entries) => {
            let names: BTreeSet<_> = entries.iter().map(|one| one.name.to_vec()).collect();
            is_new(names.len() == entries.iter().count());
        }
        Item::FileExtent(_) => found.has_extents = true,
        other => panic!("{key}: {other:?}"),
    }
}

fn check_inode(all: &BTreeMap<u64, Found>, ino: u64, found: &Found) {
    let inode = found.inode.unwrap_or_else(|| panic!("items of {ino} have no inode"));
    let kind = FileType::of_mode(inode.mode.get()).unwrap();
    assert_eq!(inode.nlink.get() as usize, found.backrefs.len(), "names of {ino}");
    assert_eq!(found.is_orphan, inode.nlink.get() == 0, "{ino} is an orphan if it has no names");
    for (parent, index, name) in &found.backrefs {
        if (*parent, ino, &name[..]) == (TOP, TOP, b"..") {
            continue;
        }
        let expected = (name.clone(), Target::Inode(ino).location(), kind as u8);
        assert_eq!(all[parent].by_index.get(index), Some(&expected), "the name of {ino} in {parent}");
    }
    assert_eq!(found.has_extents, kind == FileType::Symlink, "only a symbolic link has an extent here: {ino}");
    if kind != FileType::Directory {
        assert!(found.by_name.is_empty() && found.by_index.is_empty(), "{ino} is no directory, and has entries");
        assert_eq!(inode.size, inode.nbytes, "{ino}");
        return;
    }
    let by_index: BTreeSet<_> = found.by_index.values().cloned().collect();
    assert_eq!((&by_index, by_index.len()), (&found.by_name, found.by_index.len()), "entries of {ino}");
    let size: usize = found.by_name.iter().map(|(name, ..)| 2 * name.len()).sum();
    assert_eq!(inode.size.get(), size as u64, "size of {ino}");
    for (index, (name, location, _)) in &found.by_index {
        if let Target::Inode(target) = Target::of(*location) {
            let backrefs = &all[&target].backrefs;
            assert!(backrefs.contains(&(ino, *index, name.clone())), "{target} knows its name in {ino}");
        }
    }
}

/// Plans an operation on a tree and applies it.
pub(crate) fn change<T>(
    tree: &mut Tree,
    operation: impl FnOnce(&mut Plan<'_, Tree>) -> Result<T, PlanError>,
) -> Result<T, PlanError> {
    let geometry = geometry();
    let mut plan = Plan::new(tree, context(&geometry));
    let result = operation(&mut plan);
    let changes = plan.into_changes();
    assert!(result.is_ok() || changes.is_empty());
    apply(tree, changes);
    result
}
