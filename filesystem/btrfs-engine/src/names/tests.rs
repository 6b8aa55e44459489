//! What each operation leaves, and each error with its twin that passes.

use sealblock_btrfs_format::features::Incompat;
use sealblock_btrfs_format::items::directory::{FileType, Target};
use sealblock_btrfs_format::items::entries::{Entries, push_entry};
use sealblock_btrfs_format::items::inode::{InodeExtref, InodeFlags, InodeItem, InodeRef};
use sealblock_btrfs_format::key::{ItemType, Key};
use zerocopy::{FromBytes, IntoBytes};

use super::model::{
    GENERATION, OWNER, TOP, Tree, apply, change, check, colliding_names, context, geometry, new_tree, time,
};
use super::{DirectoryEntry, MAX_LINKS, NewFile, Place, RenameMode, Renamed, Unlinked};
use crate::datasum::Datasum;
use crate::inode::Ownership;
use crate::plan::{Plan, PlanError};

fn at(directory: u64, name: &str) -> Place<'_> {
    Place { directory, name: name.as_bytes() }
}

fn create(tree: &mut Tree, directory: u64, name: &str, file: NewFile<'_>) -> u64 {
    change(tree, |plan| plan.create(at(directory, name), file, &OWNER)).unwrap()
}

fn inode(tree: &Tree, ino: u64) -> InodeItem {
    *InodeItem::ref_from_bytes(&tree[&Key::new(ino, ItemType::INODE_ITEM, 0)]).unwrap()
}

fn edit(tree: &mut Tree, ino: u64, change: impl FnOnce(&mut InodeItem)) {
    let mut inode = inode(tree, ino);
    change(&mut inode);
    tree.insert(Key::new(ino, ItemType::INODE_ITEM, 0), inode.as_bytes().to_vec());
}

fn has(tree: &Tree, ino: u64, item_type: ItemType, offset: u64) -> bool {
    tree.contains_key(&Key::new(ino, item_type, offset))
}

#[test]
fn the_top_directory_has_the_items_of_an_empty_subvolume() {
    let mut tree = new_tree();
    check(&tree, &geometry());
    assert_eq!(tree.len(), 2);
    let names = &tree[&Key::new(TOP, ItemType::INODE_REF, TOP)];
    assert_eq!(names, b"\0\0\0\0\0\0\0\0\x02\0..");
    let error = change(&mut tree, |plan| plan.create_top(&OWNER, Datasum::Csum));
    assert_eq!(error, Err(PlanError::Exists));
}

#[test]
fn a_new_file_of_each_type_has_its_items_and_its_directory_counts_it() {
    let mut tree = new_tree();
    for (number, (file, mode, rdev)) in [
        (NewFile::Regular, 0o100_644, 0),
        (NewFile::Directory, 0o040_644, 0),
        (NewFile::Symlink(b"to/somewhere"), 0o120_644, 0),
        (NewFile::Fifo, 0o010_644, 0),
        (NewFile::Socket, 0o140_644, 0),
        (NewFile::CharacterDevice(0x10_0003), 0o020_644, 0x10_0003),
        (NewFile::BlockDevice(0x80_0001), 0o060_644, 0x80_0001),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("file{number}");
        let ino = create(&mut tree, TOP, &name, file);
        assert_eq!(ino, 257 + number as u64);
        let (inode, top) = (inode(&tree, ino), inode(&tree, TOP));
        assert_eq!((inode.mode.get(), inode.nlink.get(), inode.rdev.get()), (mode, 1, rdev));
        assert_eq!((inode.uid.get(), inode.gid.get(), inode.flags.get(), inode.sequence.get()), (1000, 100, 0, 0));
        assert_eq!((inode.generation.get(), inode.transid.get()), (GENERATION, GENERATION));
        assert_eq!((inode.atime, inode.ctime, inode.mtime, inode.otime), (time(50), time(50), time(50), time(50)));
        assert_eq!((top.size.get(), top.nlink.get()), (10 * (number as u64 + 1), 1));
        assert_eq!((top.transid.get(), top.sequence.get()), (GENERATION, number as u64 + 1));
        assert_eq!((top.mtime, top.ctime, top.otime), (time(50), time(50), time(1)));
        assert!(has(&tree, TOP, ItemType::DIR_INDEX, 2 + number as u64));
    }
    let symlink = &tree[&Key::new(259, ItemType::EXTENT_DATA, 0)];
    assert_eq!((symlink.len(), &symlink[21..]), (21 + 12, &b"to/somewhere"[..]));
    check(&tree, &geometry());
    let refuse = |file| change(&mut new_tree(), |plan| plan.create(at(TOP, "n"), file, &OWNER)).unwrap_err();
    assert!(matches!(refuse(NewFile::BlockDevice(1 << 32)), PlanError::InvalidArgument(_)));
    assert!(matches!(refuse(NewFile::Symlink(b"")), PlanError::EmptyTarget));
    assert!(matches!(refuse(NewFile::Symlink(b"a\0")), PlanError::InvalidName));
    let most = 4096 - 101 - 25 - 21;
    create(&mut tree, TOP, "longest", NewFile::Symlink(&vec![b't'; most]));
    check(&tree, &geometry());
    assert_eq!(refuse(NewFile::Symlink(&vec![b't'; most + 1])), PlanError::NameTooLong { length: most + 1, most });
    // With larger nodes, a target must still be smaller than a sector.
    let geometry = sealblock_btrfs_format::superblock::Geometry { node_bytes: 16_384, ..geometry() };
    let mut plan = Plan::new(&tree, context(&geometry));
    plan.create(at(TOP, "in"), NewFile::Symlink(&[b't'; 4095]), &OWNER).unwrap();
    let error = plan.create(at(TOP, "out"), NewFile::Symlink(&[b't'; 4096]), &OWNER);
    assert_eq!(error, Err(PlanError::NameTooLong { length: 4096, most: 4095 }));
}

#[test]
fn names_that_no_file_can_have_are_refused() {
    let mut tree = new_tree();
    create(&mut tree, TOP, &"n".repeat(255), NewFile::Regular);
    for name in ["", ".", "..", "a/b", "a\0b"] {
        let results = [
            change(&mut tree, |plan| plan.create(at(TOP, name), NewFile::Regular, &OWNER)).map(drop),
            change(&mut tree, |plan| plan.unlink(at(TOP, name))).map(drop),
            change(&mut tree, |plan| plan.rename(at(TOP, &"n".repeat(255)), at(TOP, name), RenameMode::Replace))
                .map(drop),
        ];
        assert_eq!(results, [Err(PlanError::InvalidName); 3], "{name:?}");
    }
    let long = "n".repeat(256);
    let error = change(&mut tree, |plan| plan.link(257, at(TOP, &long)));
    assert_eq!(error, Err(PlanError::NameTooLong { length: 256, most: 255 }));
}

#[test]
fn places_are_free_or_taken_and_directories_are_directories() {
    let mut tree = new_tree();
    let (file, directory) =
        (create(&mut tree, TOP, "file", NewFile::Regular), create(&mut tree, TOP, "dir", NewFile::Directory));
    let inner = create(&mut tree, directory, "inner", NewFile::Directory);
    let new = |tree: &mut Tree, ino, name| change(tree, |plan| plan.create(at(ino, name), NewFile::Regular, &OWNER));
    assert_eq!(new(&mut tree, TOP, "file"), Err(PlanError::Exists));
    assert_eq!(new(&mut tree, file, "a"), Err(PlanError::NotADirectory));
    assert_eq!(new(&mut tree, 999, "a"), Err(PlanError::NotFound));
    let unlink = |tree: &mut Tree, name| change(tree, |plan| plan.unlink(at(TOP, name)));
    let rmdir = |tree: &mut Tree, ino, name| change(tree, |plan| plan.rmdir(at(ino, name)));
    assert_eq!(unlink(&mut tree, "absent"), Err(PlanError::NotFound));
    assert_eq!(unlink(&mut tree, "dir"), Err(PlanError::IsADirectory));
    assert_eq!(rmdir(&mut tree, TOP, "file"), Err(PlanError::NotADirectory));
    assert_eq!(rmdir(&mut tree, TOP, "dir"), Err(PlanError::NotEmpty));
    assert_eq!(rmdir(&mut tree, directory, "inner"), Ok(Unlinked { ino: inner, is_orphan: true }));
    assert_eq!(new(&mut tree, inner, "a"), Err(PlanError::NotFound), "a removed directory gets no entries");
    assert_eq!(rmdir(&mut tree, TOP, "dir"), Ok(Unlinked { ino: directory, is_orphan: true }));
    assert_eq!(unlink(&mut tree, "file"), Ok(Unlinked { ino: file, is_orphan: true }));
    assert_eq!((inode(&tree, TOP).size.get(), inode(&tree, file).ctime), (0, time(50)));
    check(&tree, &geometry());
}

#[test]
fn hundreds_of_names_in_one_directory_overflow_into_long_references() {
    let mut tree = new_tree();
    let ino = create(&mut tree, TOP, "name-0000", NewFile::Regular);
    let names: Vec<String> = (1..500).map(|number| format!("name-{number:04}")).collect();
    for name in &names {
        change(&mut tree, |plan| plan.link(ino, at(TOP, name))).unwrap();
    }
    check(&tree, &geometry());
    assert_eq!(inode(&tree, ino).nlink.get(), 500);
    let in_refs = Entries::<InodeRef<'_>>::decode(&tree[&Key::new(ino, ItemType::INODE_REF, TOP)]).unwrap();
    assert_eq!(in_refs.iter().count(), (4096 - 101 - 25) / 19);
    assert!(tree.keys().filter(|key| key.item_type == ItemType::INODE_EXTREF).count() > 200);
    let mut random = fastrand::Rng::with_seed(1);
    let mut order = names.clone();
    random.shuffle(&mut order);
    for (number, name) in order.iter().enumerate() {
        let unlinked = change(&mut tree, |plan| plan.unlink(at(TOP, name)));
        assert_eq!(unlinked, Ok(Unlinked { ino, is_orphan: false }));
        if number % 50 == 0 {
            check(&tree, &geometry());
        }
    }
    check(&tree, &geometry());
    assert!(!tree.keys().any(|key| key.item_type == ItemType::INODE_EXTREF));
}

#[test]
fn without_long_references_the_last_name_that_fits_is_the_last_one() {
    let (mut tree, mut geometry) = (new_tree(), geometry());
    geometry.features.incompat.remove(Incompat::EXTENDED_IREF);
    let ino = create(&mut tree, TOP, "name-0000", NewFile::Regular);
    for number in 1.. {
        let mut plan = Plan::new(&tree, context(&geometry));
        let result = plan.link(ino, at(TOP, &format!("name-{number:04}")));
        let changes = plan.into_changes();
        if number == (4096 - 101 - 25) / 19 {
            assert_eq!((result, changes.is_empty()), (Err(PlanError::TooManyLinks), true));
            return;
        }
        assert_eq!(result, Ok(()));
        apply(&mut tree, changes);
    }
}

#[test]
fn long_references_of_one_hash_share_an_item() {
    let (mut tree, names) = (new_tree(), colliding_names(40));
    let ino = create(&mut tree, TOP, "file", NewFile::Regular);
    for number in 0..14 {
        change(&mut tree, |plan| plan.link(ino, at(TOP, &format!("{number:0255}")))).unwrap();
    }
    // With one seed or another: a CRC of names of one length collides for both.
    for name in &names {
        change(&mut tree, |plan| plan.link(ino, Place { directory: TOP, name })).unwrap();
    }
    check(&tree, &geometry());
    let shared = tree.iter().find(|(key, _)| key.item_type == ItemType::INODE_EXTREF).unwrap();
    assert!(Entries::<InodeExtref<'_>>::decode(shared.1).unwrap().iter().count() > 20);
    for name in &names {
        change(&mut tree, |plan| plan.unlink(Place { directory: TOP, name })).unwrap();
        check(&tree, &geometry());
    }
}

#[test]
fn names_of_one_hash_share_an_item_until_it_fills_a_leaf() {
    let (mut tree, names) = (new_tree(), colliding_names(105));
    let most = (4096 - 101 - 25) / 38;
    let new = |tree: &mut Tree, name: &Vec<u8>| {
        change(tree, |plan| plan.create(Place { directory: TOP, name }, NewFile::Fifo, &OWNER))
    };
    for name in &names[..most] {
        new(&mut tree, name).unwrap();
    }
    assert_eq!(tree.keys().filter(|key| key.item_type == ItemType::DIR_ITEM).count(), 1);
    check(&tree, &geometry());
    assert_eq!(new(&mut tree, &names[most]), Err(PlanError::CollisionsFull));
    create(&mut tree, TOP, "other", NewFile::Fifo);
    let rename = |tree: &mut Tree, old: &[u8], new: &[u8], mode| {
        change(tree, |plan| plan.rename(Place { directory: TOP, name: old }, Place { directory: TOP, name: new }, mode))
    };
    let error = rename(&mut tree, b"other", &names[most], RenameMode::Replace);
    assert_eq!(error, Err(PlanError::CollisionsFull));
    // A name that goes makes room for one of its hash, in one step.
    assert_eq!(rename(&mut tree, &names[0], &names[most], RenameMode::NoReplace), Ok(Renamed::Moved(None)));
    assert_eq!(rename(&mut tree, b"other", &names[1], RenameMode::Exchange), Ok(Renamed::Exchanged));
    check(&tree, &geometry());
}

#[test]
fn links_are_counted_up_to_the_limit_and_directories_have_one() {
    let mut tree = new_tree();
    let (file, directory) =
        (create(&mut tree, TOP, "file", NewFile::Regular), create(&mut tree, TOP, "dir", NewFile::Directory));
    let link = |tree: &mut Tree, ino, name| change(tree, |plan| plan.link(ino, at(TOP, name)));
    assert_eq!(link(&mut tree, directory, "a"), Err(PlanError::LinkOfDirectory));
    edit(&mut tree, file, |inode| inode.nlink = (MAX_LINKS - 1).into());
    assert_eq!(link(&mut tree, file, "a"), Ok(()));
    assert_eq!(link(&mut tree, file, "b"), Err(PlanError::TooManyLinks));
    let symlink = create(&mut tree, TOP, "symlink", NewFile::Symlink(b"x"));
    edit(&mut tree, symlink, |inode| inode.ctime = time(3));
    assert_eq!(link(&mut tree, symlink, "c"), Ok(()));
    let linked = inode(&tree, symlink);
    assert_eq!((linked.nlink.get(), linked.ctime, linked.mtime, linked.sequence.get()), (2, time(50), time(50), 1));
    change(&mut tree, |plan| plan.unlink(at(TOP, "c"))).unwrap();
    change(&mut tree, |plan| plan.unlink(at(TOP, "symlink"))).unwrap();
    assert_eq!(link(&mut tree, symlink, "d"), Err(PlanError::NotFound), "what lost its last name does not come back");
}

#[test]
fn a_file_without_a_name_is_an_orphan_until_it_gets_one() {
    let mut tree = new_tree();
    let ino = change(&mut tree, |plan| plan.create_unnamed(TOP, &OWNER)).unwrap();
    check(&tree, &geometry());
    assert_eq!(inode(&tree, TOP).size.get(), 0);
    let link = |tree: &mut Tree, name| change(tree, |plan| plan.link_unnamed(ino, at(TOP, name)));
    assert_eq!(link(&mut tree, "a"), Ok(()));
    check(&tree, &geometry());
    assert_eq!(link(&mut tree, "b"), Err(PlanError::InvalidArgument("the file has a name")));
}

#[test]
fn a_directory_does_not_move_below_itself() {
    let mut tree = new_tree();
    let one = create(&mut tree, TOP, "one", NewFile::Directory);
    let two = create(&mut tree, one, "two", NewFile::Directory);
    let three = create(&mut tree, two, "three", NewFile::Directory);
    create(&mut tree, TOP, "side", NewFile::Directory);
    let rename = |tree: &mut Tree, from, to, mode| change(tree, |plan| plan.rename(from, to, mode));
    for directory in [one, two, three] {
        let error = rename(&mut tree, at(TOP, "one"), at(directory, "new"), RenameMode::Replace);
        assert_eq!(error, Err(PlanError::BelowItself));
    }
    let exchange = RenameMode::Exchange;
    assert_eq!(rename(&mut tree, at(TOP, "one"), at(two, "three"), exchange), Err(PlanError::BelowItself));
    assert_eq!(rename(&mut tree, at(two, "three"), at(TOP, "one"), exchange), Err(PlanError::BelowItself));
    assert_eq!(rename(&mut tree, at(two, "three"), at(TOP, "one"), RenameMode::Replace), Err(PlanError::NotEmpty));
    assert_eq!(rename(&mut tree, at(two, "three"), at(TOP, "side"), exchange), Ok(Renamed::Exchanged));
    assert_eq!(rename(&mut tree, at(one, "two"), at(three, "two"), RenameMode::NoReplace), Ok(Renamed::Moved(None)));
    check(&tree, &geometry());
    // A damaged tree whose directories lead to each other.
    let mut list = Vec::new();
    push_entry(&mut list, &InodeRef { index: 2, name: b"x" }, 100).unwrap();
    tree.retain(|key, _| !(key.objectid == three && key.item_type == ItemType::INODE_REF));
    tree.insert(Key::new(three, ItemType::INODE_REF, two), list);
    let error = rename(&mut tree, at(TOP, "one"), at(two, "new"), RenameMode::Replace).unwrap_err();
    assert!(matches!(error, PlanError::Damaged { why: "the directory lies below itself", .. }), "{error}");
}

#[test]
fn a_rename_marks_what_it_changes_and_gives_a_new_index() {
    let mut tree = new_tree();
    let file = create(&mut tree, TOP, "file", NewFile::Regular);
    let directory = create(&mut tree, TOP, "dir", NewFile::Directory);
    for ino in [TOP, file, directory] {
        edit(&mut tree, ino, |inode| (inode.ctime, inode.mtime, inode.transid) = (time(2), time(2), 9.into()));
    }
    let rename = |tree: &mut Tree, from, to, mode| change(tree, |plan| plan.rename(from, to, mode));
    change(&mut tree, |plan| plan.link(file, at(TOP, "same"))).unwrap();
    let before = tree.clone();
    for mode in [RenameMode::Replace, RenameMode::Exchange] {
        assert_eq!(rename(&mut tree, at(TOP, "file"), at(TOP, "same"), mode), Ok(Renamed::Same));
    }
    let error = rename(&mut tree, at(TOP, "file"), at(TOP, "same"), RenameMode::NoReplace);
    assert_eq!((error, tree == before), (Err(PlanError::Exists), true));
    let error = rename(&mut tree, at(TOP, "file"), at(TOP, "absent"), RenameMode::Exchange);
    assert_eq!(error, Err(PlanError::NotFound));
    assert!(has(&tree, TOP, ItemType::DIR_INDEX, 4) && !has(&tree, TOP, ItemType::DIR_INDEX, 5));
    let moved = rename(&mut tree, at(TOP, "same"), at(TOP, "other"), RenameMode::Replace);
    assert_eq!(moved, Ok(Renamed::Moved(None)));
    // The last index is not used again, although its entry went.
    assert!(!has(&tree, TOP, ItemType::DIR_INDEX, 4) && has(&tree, TOP, ItemType::DIR_INDEX, 5));
    let replaced = rename(&mut tree, at(TOP, "file"), at(directory, "new"), RenameMode::Replace);
    assert_eq!(replaced, Ok(Renamed::Moved(None)));
    for ino in [TOP, directory] {
        assert_eq!((inode(&tree, ino).mtime, inode(&tree, ino).transid.get()), (time(50), GENERATION));
    }
    assert_eq!((inode(&tree, file).mtime, inode(&tree, file).ctime), (time(2), time(50)));
    let victim = create(&mut tree, TOP, "victim", NewFile::Symlink(b"x"));
    let error = rename(&mut tree, at(TOP, "victim"), at(TOP, "dir"), RenameMode::Replace);
    assert_eq!(error, Err(PlanError::IsADirectory));
    let error = rename(&mut tree, at(TOP, "dir"), at(TOP, "victim"), RenameMode::Replace);
    assert_eq!(error, Err(PlanError::NotADirectory));
    let replaced = rename(&mut tree, at(TOP, "other"), at(TOP, "victim"), RenameMode::Replace);
    assert_eq!(replaced, Ok(Renamed::Moved(Some(Unlinked { ino: victim, is_orphan: true }))));
    check(&tree, &geometry());
}

#[test]
fn entries_of_subvolumes_come_and_go_alone() {
    let mut tree = new_tree();
    let index = change(&mut tree, |plan| plan.add_subvolume_entry(at(TOP, "snap"), 300)).unwrap();
    create(&mut tree, TOP, "file", NewFile::Regular);
    check(&tree, &geometry());
    assert_eq!((index, inode(&tree, TOP).size.get()), (2, 16));
    let geometry = geometry();
    let plan = Plan::new(&tree, context(&geometry));
    let entry = DirectoryEntry { target: Target::Subvolume(300), kind: FileType::Directory };
    assert_eq!(plan.lookup(TOP, b"snap"), Ok(Some(entry)));
    assert_eq!(change(&mut tree, |plan| plan.rmdir(at(TOP, "snap"))), Err(PlanError::IsSubvolume(300)));
    assert_eq!(change(&mut tree, |plan| plan.unlink(at(TOP, "snap"))), Err(PlanError::IsADirectory));
    let error = change(&mut tree, |plan| plan.rename(at(TOP, "snap"), at(TOP, "new"), RenameMode::Replace));
    assert_eq!(error, Err(PlanError::IsSubvolume(300)));
    let error = change(&mut tree, |plan| plan.remove_subvolume_entry(at(TOP, "snap"), Some(3))).unwrap_err();
    assert!(matches!(error, PlanError::Damaged { .. }), "the index of another entry");
    let error = change(&mut tree, |plan| plan.remove_subvolume_entry(at(TOP, "file"), None)).unwrap_err();
    assert!(matches!(error, PlanError::InvalidArgument(_)));
    let error = change(&mut tree, |plan| plan.add_subvolume_entry(at(TOP, "top"), 5)).unwrap_err();
    assert!(matches!(error, PlanError::InvalidArgument(_)));
    // A rename by its caller, in one step: the index is needed for the ROOT_REF.
    let index = change(&mut tree, |plan| {
        let id = plan.remove_subvolume_entry(at(TOP, "snap"), Some(2))?;
        plan.add_subvolume_entry(at(TOP, "moved"), id)
    });
    assert_eq!(index, Ok(4));
    // Linux gives an entry that it renames the key of the root item.
    for (key, data) in tree.iter_mut().filter(|(key, _)| key.objectid == TOP) {
        if matches!(key.item_type, ItemType::DIR_ITEM | ItemType::DIR_INDEX) && data.ends_with(b"moved") {
            data[9..17].copy_from_slice(&77_u64.to_le_bytes());
        }
    }
    // What a snapshot has in the place of a subvolume.
    assert_eq!(change(&mut tree, |plan| plan.remove_subvolume_entry(at(TOP, "moved"), None)), Ok(300));
    check(&tree, &geometry);
}

#[test]
fn inodes_that_must_not_change_keep_their_names() {
    let mut tree = new_tree();
    let file = create(&mut tree, TOP, "file", NewFile::Regular);
    let directory = create(&mut tree, TOP, "dir", NewFile::Directory);
    create(&mut tree, directory, "inner", NewFile::Regular);
    let protect = |tree: &mut Tree, ino, flags: InodeFlags| edit(tree, ino, |inode| inode.flags = flags.bits().into());
    for (flags, flag) in
        [(InodeFlags::IMMUTABLE, "immutable"), (InodeFlags::APPEND, "append-only"), (InodeFlags::READONLY, "read-only")]
    {
        protect(&mut tree, file, flags);
        let refused = Err(PlanError::Protected { ino: file, flag });
        assert_eq!(change(&mut tree, |plan| plan.unlink(at(TOP, "file"))).map(drop), refused);
        assert_eq!(change(&mut tree, |plan| plan.link(file, at(TOP, "new"))), refused);
        let rename = |plan: &mut Plan<'_, Tree>| plan.rename(at(TOP, "file"), at(TOP, "new"), RenameMode::Replace);
        assert_eq!(change(&mut tree, rename).map(drop), refused);
        let onto =
            |plan: &mut Plan<'_, Tree>| plan.rename(at(directory, "inner"), at(TOP, "file"), RenameMode::Replace);
        assert_eq!(change(&mut tree, onto).map(drop), refused);
        protect(&mut tree, file, InodeFlags::empty());
        protect(&mut tree, directory, flags);
        let refused = Err(PlanError::Protected { ino: directory, flag });
        assert_eq!(change(&mut tree, |plan| plan.unlink(at(directory, "inner"))).map(drop), refused);
        let made = change(&mut tree, |plan| plan.create(at(directory, flag), NewFile::Fifo, &OWNER)).map(drop);
        // Where entries may only come, they come.
        assert_eq!(made, if flags == InodeFlags::APPEND { Ok(()) } else { refused });
        protect(&mut tree, directory, InodeFlags::empty());
    }
    assert!(change(&mut tree, |plan| plan.unlink(at(TOP, "file"))).is_ok());
    check(&tree, &geometry());
}

#[test]
fn items_that_contradict_each_other_stop_an_operation() {
    let mut good = new_tree();
    let ino = create(&mut good, TOP, "file", NewFile::Regular);
    create(&mut good, TOP, "dir", NewFile::Directory);
    let item = |item_type| *good.keys().find(|key| key.objectid == TOP && key.item_type == item_type).unwrap();
    let (by_name, reference) = (item(ItemType::DIR_ITEM), Key::new(ino, ItemType::INODE_REF, TOP));
    let by_index = Key::new(TOP, ItemType::DIR_INDEX, 2);
    type Damage<'a> = (&'a str, &'a dyn Fn(&mut Tree));
    let damages: [Damage<'_>; 10] = [
        ("no inode", &|tree| drop(tree.remove(&Key::new(ino, ItemType::INODE_ITEM, 0)))),
        ("no reference", &|tree| drop(tree.remove(&reference))),
        ("a reference of another index", &|tree| tree.get_mut(&reference).unwrap()[0] = 3),
        ("a reference that is cut off", &|tree| tree.get_mut(&reference).unwrap().truncate(13)),
        ("no index", &|tree| drop(tree.remove(&by_index))),
        ("an index of another inode", &|tree| tree.get_mut(&by_index).unwrap()[0] = 9),
        ("another type", &|tree| edit(tree, ino, |inode| inode.mode = 0o010_644.into())),
        ("no links", &|tree| edit(tree, ino, |inode| inode.nlink = 0.into())),
        ("an unknown flag", &|tree| edit(tree, ino, |inode| inode.flags = (1 << 60).into())),
        ("a directory that is too small", &|tree| edit(tree, TOP, |inode| inode.size = 3.into())),
    ];
    for (what, damage) in damages {
        let mut tree = good.clone();
        damage(&mut tree);
        let error = change(&mut tree, |plan| plan.unlink(at(TOP, "file"))).expect_err(what);
        assert!(matches!(error, PlanError::Damaged { .. } | PlanError::Shape { .. }), "{what}: {error:?}");
    }
    let mut tree = good.clone();
    tree.get_mut(&by_name).unwrap()[8] = 2;
    let name = if good[&by_name].ends_with(b"file") { "file" } else { "dir" };
    let error = change(&mut tree, |plan| plan.rename(at(TOP, name), at(TOP, "new"), RenameMode::Replace)).unwrap_err();
    assert!(matches!(error, PlanError::Damaged { .. }), "an entry that leads to an item of no inode: {error:?}");
    assert!(change(&mut good, |plan| plan.unlink(at(TOP, "file"))).is_ok());
}

#[test]
fn numbers_come_from_the_tree_or_from_the_caller() {
    let mut tree = new_tree();
    let geometry = geometry();
    let mut plan = Plan::new(&tree, context(&geometry));
    plan.set_next_ino(500);
    plan.set_next_index(TOP, 40);
    assert_eq!(plan.create(at(TOP, "a"), NewFile::Fifo, &OWNER), Ok(500));
    assert_eq!(plan.create(at(TOP, "b"), NewFile::Fifo, &OWNER), Ok(501));
    assert_eq!((plan.next_ino(), plan.next_index(TOP)), (Some(502), Some(42)));
    let changes = plan.into_changes();
    apply(&mut tree, changes);
    check(&tree, &geometry);
    assert_eq!(create(&mut tree, TOP, "c", NewFile::Fifo), 502);
    assert!(has(&tree, TOP, ItemType::DIR_INDEX, 42));
    for (ino, index) in [(501, 60), (600, 41), (600, 1), (255, 60)] {
        let mut plan = Plan::new(&tree, context(&geometry));
        plan.set_next_ino(ino);
        plan.set_next_index(TOP, index);
        let error = plan.create(at(TOP, "d"), NewFile::Fifo, &OWNER).unwrap_err();
        assert!(matches!(error, PlanError::InvalidArgument(_)), "{ino} {index}: {error}");
    }
    let last = -256_i64 as u64;
    for (ino, index) in [(last, 60), (600, i64::MAX as u64)] {
        let mut plan = Plan::new(&tree, context(&geometry));
        plan.set_next_ino(ino);
        plan.set_next_index(TOP, index);
        let error = plan.create(at(TOP, "d"), NewFile::Fifo, &OWNER).unwrap_err();
        assert!(matches!(error, PlanError::NoNumber(_)), "{ino} {index}: {error}");
    }
}

#[test]
fn a_new_file_has_what_its_directory_hands_down() {
    let cases: [(InodeFlags, NewFile<'_>, InodeFlags); 10] = {
        use InodeFlags as F;
        let all = F::SYNC | F::NOATIME | F::NODUMP | F::DIRSYNC | F::NODATASUM | F::PREALLOC;
        [
            (F::COMPRESS, NewFile::Regular, F::COMPRESS),
            (F::COMPRESS, NewFile::Directory, F::COMPRESS),
            (F::COMPRESS | F::NOCOMPRESS, NewFile::Regular, F::NOCOMPRESS),
            (F::NOCOMPRESS, NewFile::Regular, F::NOCOMPRESS),
            (F::NODATACOW, NewFile::Regular, F::NODATACOW.union(F::NODATASUM)),
            (F::NODATACOW, NewFile::Directory, F::NODATACOW),
            (F::NODATASUM, NewFile::Regular, F::empty()),
            (all, NewFile::Regular, F::empty()),
            (F::NODATASUM, NewFile::Directory, F::NODATASUM),
            (all, NewFile::Directory, F::NODATASUM),
        ]
    };
    for (flags, file, expected) in cases {
        let mut tree = new_tree();
        edit(&mut tree, TOP, |inode| inode.flags = flags.bits().into());
        let ino = create(&mut tree, TOP, "new", file);
        assert_eq!(inode(&tree, ino).flags(), expected, "{flags:?}");
    }
    let mut tree = new_tree();
    edit(&mut tree, TOP, |inode| (inode.mode, inode.gid) = (0o042_755.into(), 77.into()));
    let owner = Ownership { permissions: 0o755, ..OWNER };
    for (file, mode) in [(NewFile::Regular, 0o100_755), (NewFile::Directory, 0o042_755)] {
        let ino = change(&mut tree, |plan| plan.create(at(TOP, &format!("{mode}")), file, &owner)).unwrap();
        assert_eq!((inode(&tree, ino).mode.get(), inode(&tree, ino).gid.get()), (mode, 77));
    }
}
