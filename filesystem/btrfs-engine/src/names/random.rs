//! Random operations, compared with a filesystem of maps.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::RangeInclusive;

use sealblock_btrfs_format::items::directory::FileType;
use sealblock_btrfs_format::key::{ItemType, Key};
use sealblock_btrfs_format::superblock::Geometry;

use super::files::{Answer, File, Files, Op, files_of};
use super::model::{OWNER, TOP, Tree, apply, check, colliding_names, context, geometry, new_tree};
use super::{NewFile, Place, RenameMode};
use crate::inode::AttributeChanges;
use crate::plan::{Plan, PlanError};
use crate::tree::TreeError;
use crate::view::Items;
use crate::xattrs::XattrMode;

fn run<V: Items>(plan: &mut Plan<'_, V>, op: &Op) -> Result<Answer, PlanError> {
    let place = |directory: &u64, name| Place { directory: *directory, name };
    match op {
        Op::Create(directory, name, kind) => {
            let file = match kind {
                FileType::Regular => NewFile::Regular,
                FileType::Directory => NewFile::Directory,
                FileType::Symlink => NewFile::Symlink(b"target"),
                FileType::Fifo => NewFile::Fifo,
                FileType::Socket => NewFile::Socket,
                FileType::CharacterDevice => NewFile::CharacterDevice(0x10_0003),
                FileType::BlockDevice => NewFile::BlockDevice(0x80_0001),
                FileType::Unknown | FileType::Xattr => unreachable!("no such file"),
            };
            plan.create(place(directory, name), file, &OWNER).map(Answer::Ino)
        }
        Op::CreateUnnamed(directory) => plan.create_unnamed(*directory, &OWNER).map(Answer::Ino),
        Op::Link(ino, directory, name) => plan.link(*ino, place(directory, name)).map(|()| Answer::Done),
        Op::LinkUnnamed(ino, directory, name) => plan.link_unnamed(*ino, place(directory, name)).map(|()| Answer::Done),
        Op::Unlink(directory, name) => plan.unlink(place(directory, name)).map(Answer::Unlinked),
        Op::Rmdir(directory, name) => plan.rmdir(place(directory, name)).map(Answer::Unlinked),
        Op::Rename(from, old, to, new, mode) => {
            plan.rename(place(from, old), place(to, new), *mode).map(Answer::Renamed)
        }
        Op::AddSubvolume(directory, name, id) => {
            plan.add_subvolume_entry(place(directory, name), *id).map(|_| Answer::Done)
        }
        Op::RemoveSubvolume(directory, name) => {
            plan.remove_subvolume_entry(place(directory, name), None).map(Answer::Subvolume)
        }
        Op::SetXattr(ino, name, value, mode) => plan.set_xattr(*ino, name, value, *mode).map(|()| Answer::Done),
        Op::RemoveXattr(ino, name) => plan.remove_xattr(*ino, name).map(|()| Answer::Done),
        Op::SetPermissions(ino, bits) => {
            let changes = AttributeChanges { permissions: Some(*bits), ..AttributeChanges::default() };
            plan.set_attributes(*ino, &changes).map(|_| Answer::Done)
        }
        Op::Delete(ino, most) => plan.delete_inode(*ino, *most).map(Answer::Deleted),
    }
}

struct Names {
    short: Vec<Vec<u8>>,
    alike: Vec<Vec<u8>>,
    long: Vec<Vec<u8>>,
}

/// No node.
const NEED: TreeError = TreeError::Need(sealblock_btrfs_format::checker::Expected {
    bytenr: 4096,
    owner: 5,
    level: 0,
    generation: 7,
    first_key: None,
});

impl Names {
    fn new() -> Names {
        Names {
            short: (b'a'..b'f').map(|byte| vec![byte]).collect(),
            // More than a leaf of 4 KiB can have in one item.
            alike: colliding_names(120),
            // Fourteen of these fill an INODE_REF.
            long: (0..40).map(|number| format!("{number:0255}").into_bytes()).collect(),
        }
    }

    fn pick(&self, random: &mut fastrand::Rng) -> Vec<u8> {
        let list = match random.u8(..4) {
            0 => &self.alike,
            1 => &self.long,
            _ => &self.short,
        };
        list[random.usize(..list.len())].clone()
    }
}

fn pick_op(random: &mut fastrand::Rng, files: &Files, names: &Names) -> Op {
    let all: Vec<u64> = files.0.keys().copied().collect();
    let live: Vec<u64> = files
        .0
        .iter()
        .filter(|(_, file)| file.kind == FileType::Directory && file.nlink > 0)
        .map(|(ino, _)| *ino)
        .collect();
    let any = |random: &mut fastrand::Rng| match random.u8(..40) {
        0 => 9999,
        _ => all[random.usize(..all.len())],
    };
    let directory = |random: &mut fastrand::Rng| match random.u8(..20) {
        0 => any(random),
        // Most names are in few directories, whose lists become long.
        1..10 => live[random.usize(..live.len().min(3))],
        _ => live[random.usize(..live.len())],
    };
    // A name that is there, with which most operations succeed.
    let used = |random: &mut fastrand::Rng, directory: u64| match files.0.get(&directory) {
        Some(file) if !file.entries.is_empty() && random.u8(..8) > 0 => {
            file.entries.keys().nth(random.usize(..file.entries.len())).unwrap().clone()
        }
        _ => names.pick(random),
    };
    let (one, two) = (directory(random), directory(random));
    let is_crowded = files.0.len() > 150;
    let unnamed = files.0.iter().find(|(_, file)| file.nlink == 0).map_or(TOP, |(ino, _)| *ino);
    let kinds = [
        FileType::Regular,
        FileType::Directory,
        FileType::Directory,
        FileType::Symlink,
        FileType::Fifo,
        FileType::Socket,
        FileType::CharacterDevice,
        FileType::BlockDevice,
    ];
    match random.u8(..if is_crowded { 100 } else { 130 }) {
        0..12 => Op::Link(any(random), one, names.pick(random)),
        12..27 => Op::Unlink(one, used(random, one)),
        27..42 => Op::Rmdir(one, used(random, one)),
        42..62 => {
            let modes = [RenameMode::Replace, RenameMode::NoReplace, RenameMode::Exchange];
            let mode = modes[random.usize(..3)];
            let new = if mode == RenameMode::Exchange { used(random, two) } else { names.pick(random) };
            Op::Rename(one, used(random, one), two, new, mode)
        }
        62..68 => {
            let (name, modes) = (names.pick(random), [XattrMode::Set, XattrMode::Create, XattrMode::Replace]);
            // One name of those with equal hashes: the model has an item for each.
            let name = if names.alike.contains(&name) { names.alike[0].clone() } else { name };
            let value = vec![random.u8(..); if random.u8(..4) == 0 { random.usize(..4000) } else { 3 }];
            Op::SetXattr(any(random), name, value, modes[random.usize(..3)])
        }
        68..72 => {
            let ino = any(random);
            let name = files.0.get(&ino).and_then(|file| file.xattrs.keys().next().cloned());
            Op::RemoveXattr(ino, name.unwrap_or_else(|| names.pick(random)))
        }
        72..75 => Op::SetPermissions(any(random), random.u32(..0o10000)),
        75..88 => Op::Delete(if random.u8(..8) == 0 { any(random) } else { unnamed }, random.usize(..5)),
        88..90 => Op::AddSubvolume(one, names.pick(random), 256 + random.u64(..9)),
        90..94 => Op::RemoveSubvolume(one, used(random, one)),
        94..97 => Op::LinkUnnamed(if random.u8(..4) == 0 { any(random) } else { unnamed }, one, names.pick(random)),
        97..99 => Op::CreateUnnamed(one),
        _ => Op::Create(one, names.pick(random), kinds[random.usize(..kinds.len())]),
    }
}

/// Items of which only so many can be read: then a node is not in memory.
struct Limited<'a> {
    items: &'a Tree,
    left: Cell<usize>,
}

impl Limited<'_> {
    fn read(&self) -> Result<(), TreeError> {
        let left = self.left.get();
        self.left.set(left.saturating_sub(1));
        if left == 0 { Err(NEED) } else { Ok(()) }
    }
}

impl Items for Limited<'_> {
    fn at(&self, key: Key) -> Result<Option<&[u8]>, TreeError> {
        self.read().and_then(|()| self.items.at(key))
    }

    fn first(&self, range: RangeInclusive<Key>) -> Result<Option<(Key, &[u8])>, TreeError> {
        self.read().and_then(|()| self.items.first(range))
    }

    fn last(&self, range: RangeInclusive<Key>) -> Result<Option<(Key, &[u8])>, TreeError> {
        self.read().and_then(|()| self.items.last(range))
    }
}

/// Wherever a node is missing, an operation says so and changes nothing; with all nodes, it does what it does.
fn check_missing_nodes(tree: &Tree, geometry: &Geometry, op: &Op, plan: &Plan<'_, Tree>) {
    for reads in 0.. {
        let items = Limited { items: tree, left: Cell::new(reads) };
        let mut limited = Plan::new(&items, context(geometry));
        if run(&mut limited, op) != Err(PlanError::Tree(NEED)) {
            assert_eq!(limited.changes(), plan.changes());
            return;
        }
        assert!(limited.changes().is_empty());
    }
}

/// What the caller of plans may remember between them.
#[derive(Default)]
struct Remembered {
    next_ino: u64,
    next_index: HashMap<u64, u64>,
}

impl Remembered {
    fn tell(&self, plan: &mut Plan<'_, Tree>) {
        plan.set_next_ino(self.next_ino.max(TOP + 1));
        self.next_index.iter().for_each(|(directory, index)| plan.set_next_index(*directory, *index));
    }

    fn learn(&mut self, plan: &Plan<'_, Tree>, files: &Files) {
        self.next_ino = self.next_ino.max(plan.next_ino().unwrap_or(0));
        self.next_index.retain(|directory, _| files.0.contains_key(directory));
        for directory in files.0.keys() {
            if let Some(index) = plan.next_index(*directory) {
                let known = self.next_index.entry(*directory).or_default();
                *known = index.max(*known);
            }
        }
    }
}

/// The name of a variant; what it contains may be long.
fn variant(value: &impl fmt::Debug) -> String {
    struct Name(String);
    impl fmt::Write for Name {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            let name = text.split(['(', ' ']).next().unwrap_or_default();
            self.0.push_str(name);
            if name.len() == text.len() { Ok(()) } else { Err(fmt::Error) }
        }
    }
    let mut name = Name(String::new());
    // It ends with an error where the name ends.
    let _ = fmt::write(&mut name, format_args!("{value:?}"));
    name.0
}

fn run_random_operations(seed: u64, count: usize) {
    let (mut random, names, geometry) = (fastrand::Rng::with_seed(seed), Names::new(), geometry());
    let mut tree = new_tree();
    let (mut files, mut remembered) = (files_of(&tree), Remembered::default());
    let (mut done, mut has_extref) = (BTreeMap::<String, usize>::new(), false);
    for number in 0..count {
        // At times a file gets more names in one directory than an INODE_REF, or a DIR_ITEM, can have.
        let popular = files.0.iter().find(|(_, file)| file.kind != FileType::Directory && file.nlink > 0);
        let op = match (number % 5000, popular) {
            (4800..4930, Some((ino, _))) => Op::Link(*ino, TOP, names.alike[number % names.alike.len()].clone()),
            (_, Some((ino, _))) if number % 1000 >= 980 => {
                Op::Link(*ino, TOP, names.long[number % names.long.len()].clone())
            }
            _ => pick_op(&mut random, &files, &names),
        };
        let remembers = random.bool();
        let mut plan = Plan::new(&tree, context(&geometry));
        let new_ino = files.0.keys().next_back().unwrap() + 1;
        let new_ino = if remembers { new_ino.max(remembered.next_ino) } else { new_ino };
        if remembers {
            remembered.tell(&mut plan);
        }
        let mut after = files.clone();
        let expected = after.run(&op, new_ino);
        let found = run(&mut plan, &op);
        assert_eq!(found, expected, "seed {seed}, operation {number}: {op:?}");
        let outcome = found.as_ref().map_or_else(variant, |_| "Ok".to_owned());
        *done.entry(format!("{} {outcome}", variant(&op))).or_default() += 1;
        if number % 97 == 0 && !remembers {
            check_missing_nodes(&tree, &geometry, &op, &plan);
        }
        if found.is_err() {
            assert!(plan.changes().is_empty(), "seed {seed}, operation {number}: {op:?}");
            continue;
        }
        files = after;
        remembered.learn(&plan, &files);
        let changes = plan.into_changes();
        apply(&mut tree, changes);
        if found == Ok(Answer::Deleted(false)) {
            finish_deletions(&mut tree, &mut files, &geometry);
        }
        if number % 32 == 0 {
            check(&tree, &geometry);
            has_extref |= tree.keys().any(|key| key.item_type == ItemType::INODE_EXTREF);
            let found = files_of(&tree);
            for ino in files.0.keys().chain(found.0.keys()) {
                assert_eq!(found.0.get(ino), files.0.get(ino), "seed {seed}, operation {number}: inode {ino}");
            }
        }
    }
    assert!(has_extref, "names overflowed into INODE_EXTREF");
    for outcome in ["Create Ok", "Link Ok", "Rename Ok", "Delete Ok", "LinkUnnamed Ok", "RemoveSubvolume Ok"] {
        assert!(done.keys().any(|one| one.starts_with(outcome)), "{outcome}: {done:?}");
    }
    for error in ["CollisionsFull", "BelowItself", "NotEmpty", "NoSpaceForXattr", "IsSubvolume", "IsADirectory"] {
        assert!(done.keys().any(|one| one.contains(error)), "{error}: {done:?}");
    }
}

/// Deletes symbolic links whose deletion began. They have no target, which the rules of all items demand.
fn finish_deletions(tree: &mut Tree, files: &mut Files, geometry: &Geometry) {
    let is_begun = |(ino, file): (&u64, &File)| {
        let has_target = tree.contains_key(&Key::new(*ino, ItemType::EXTENT_DATA, 0));
        (file.kind == FileType::Symlink && !has_target).then_some(*ino)
    };
    for ino in files.0.iter().filter_map(is_begun).collect::<Vec<_>>() {
        let mut plan = Plan::new(tree, context(geometry));
        assert_eq!(plan.delete_inode(ino, 1000), Ok(true));
        let changes = plan.into_changes();
        apply(tree, changes);
        files.0.remove(&ino);
    }
}

// A hundred thousand operations, which run side by side.

#[test]
fn random_operations_leave_the_files_of_a_map() {
    run_random_operations(1, 25_000);
}

#[test]
fn random_operations_leave_the_files_of_a_map_with_another_seed() {
    run_random_operations(2, 25_000);
}

#[test]
fn random_operations_leave_the_files_of_a_map_with_a_third_seed() {
    run_random_operations(3, 25_000);
}

#[test]
fn random_operations_leave_the_files_of_a_map_with_a_fourth_seed() {
    run_random_operations(4, 25_000);
}

#[test]
fn damaged_items_are_refused_or_changed_and_never_end_a_program() {
    let (mut random, names, geometry) = (fastrand::Rng::with_seed(9), Names::new(), geometry());
    let mut tree = new_tree();
    for _ in 0..400 {
        let op = pick_op(&mut random, &files_of(&tree), &names);
        let mut plan = Plan::new(&tree, context(&geometry));
        if run(&mut plan, &op).is_ok() {
            let changes = plan.into_changes();
            apply(&mut tree, changes);
        }
    }
    let files = files_of(&tree);
    let mut errors = BTreeMap::<String, usize>::new();
    for _ in 0..3000 {
        let mut damaged = tree.clone();
        for _ in 0..random.usize(1..20) {
            let key = *damaged.keys().nth(random.usize(..damaged.len())).unwrap();
            let mut data = damaged.remove(&key).unwrap();
            if !data.is_empty() {
                let at = random.usize(..data.len());
                data[at] = if random.bool() { random.u8(..) } else { u8::MAX };
                data.truncate(if random.u8(..4) == 0 { random.usize(..data.len()) } else { data.len() });
            }
            let moved = Key { offset: key.offset.wrapping_sub(random.u64(..3)), ..key };
            let _ = damaged.insert(if random.u8(..4) == 0 { moved } else { key }, data);
        }
        for _ in 0..5 {
            let op = pick_op(&mut random, &files, &names);
            let mut plan = Plan::new(&damaged, context(&geometry));
            match run(&mut plan, &op) {
                // What is inserted is not there, and what is replaced or deleted is.
                Ok(_) => apply(&mut damaged.clone(), plan.into_changes()),
                Err(error) => *errors.entry(variant(&error)).or_default() += 1,
            }
        }
    }
    assert!(errors.contains_key("Damaged") && errors.contains_key("Shape"), "{errors:?}");
}
