//! Subvolumes: new ones, snapshots, and their deletion as far as names and roots are concerned. The nodes of a deleted
//! subvolume are dropped step by step (`drop`).
//!
//! Invariants:
//! - A subvolume, its place in the root tree, its UUID and the entry in its directory come and go in one step.
//! - A snapshot has the source as it is in the open transaction, without the snapshot's own entry: the roots are
//!   separated before the entry is made. Whoever makes it has seen to it that no write is in flight that the snapshot
//!   would have halfway.
//! - A subvolume is deleted only if it has no other one below it, is not the default one, and nobody uses it.

use sealblock_btrfs_format::item_changes::{ItemChange, ItemChanges};
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_btrfs_format::items::root::{RootFlags, RootItemBuf, RootNode, RootRef, RootTail};
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use zerocopy::FromZeros;

use crate::change::Change;
use crate::cow::Sharing;
pub use crate::error::SubvolumeError;
use crate::names::{MovedSubvolume, Place};
use crate::transaction::{ChangeError, Transaction};
use crate::view::Items;

/// Nodes that a new tree needs, or one whose root is copied.
const NODES_OF_A_TREE: u64 = 2;

/// The entry of a subvolume in the directory that it is in: planned with [`names`](crate::names).
#[derive(Clone, Debug)]
pub struct Entry<'a> {
    /// The subvolume of the directory.
    pub parent: u64,
    /// The directory.
    pub directory: u64,
    /// The entry's index.
    pub index: u64,
    /// Its name.
    pub name: &'a [u8],
    /// The changes of items in the parent that make or remove the entry.
    pub items: &'a ItemChanges,
}

/// What a new subvolume gets.
#[derive(Clone, Copy, Debug)]
pub struct NewSubvolume {
    /// Its number, see [`Transaction::next_subvolume`].
    pub id: u64,
    /// Its UUID.
    pub uuid: [u8; 16],
    /// The time.
    pub now: Timespec,
    /// True if it cannot be changed.
    pub is_read_only: bool,
}

/// What a subvolume is opened for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// To be read.
    Read,
    /// To be changed, which a read-only one is not.
    Change,
}

impl Transaction {
    /// Opens a subvolume, if it is not open.
    ///
    /// # Errors
    /// [`SubvolumeError::Absent`], [`SubvolumeError::ReadOnly`]; or if a node of the root tree is not in memory.
    pub fn open_subvolume(&mut self, id: u64, access: Access) -> Result<(), ChangeError> {
        let absent = SubvolumeError::Absent(id);
        if !objectid::is_subvolume(id) {
            return Err(absent.into());
        }
        match self.open_tree(id) {
            Err(ChangeError::NoTree(tree)) if tree == id => return Err(absent.into()),
            result => result?,
        }
        let (_, item) = self.root_item(id).ok_or(absent)?;
        let flags = RootFlags::from_bits_retain(item.head.flags.get());
        match () {
            () if item.head.refs.get() == 0 || flags.contains(RootFlags::DEAD) => Err(absent.into()),
            () if access == Access::Change && flags.contains(RootFlags::READONLY) => {
                Err(SubvolumeError::ReadOnly(id).into())
            }
            () => Ok(()),
        }
    }

    /// True if an open subvolume is read-only.
    ///
    /// # Errors
    /// If it is not open.
    pub fn is_read_only(&self, id: u64) -> Result<bool, ChangeError> {
        let (_, item) = self.root_item(id).ok_or(ChangeError::NoTree(id))?;
        Ok(RootFlags::from_bits_retain(item.head.flags.get()).contains(RootFlags::READONLY))
    }

    /// The number of the next new subvolume: above all others.
    ///
    /// # Errors
    /// If a node of the root tree is not in memory, or no number is left.
    pub fn next_subvolume(&self) -> Result<u64, ChangeError> {
        // Numbers above these are those of quota groups.
        let last = (1 << 48) - 1;
        let range =
            Key::new(objectid::FIRST_FREE, ItemType::UNTYPED, 0)..=Key::new(last, ItemType::ROOT_ITEM, u64::MAX);
        let found =
            self.view(objectid::ROOT_TREE)?.last(range)?.map_or(objectid::FIRST_FREE - 1, |(key, _)| key.objectid);
        // The numbers of deleted ones are not used again while something may remember them.
        let highest = found.max(self.highest_subvolume);
        if highest >= last { Err(SubvolumeError::NoNumber.into()) } else { Ok(highest + 1) }
    }

    /// Makes an empty subvolume with these items, of which the first is that of its top directory.
    ///
    /// # Errors
    /// If a node is not in memory, or there is no space.
    pub fn create_subvolume(&mut self, new: NewSubvolume, top: &ItemChanges, entry: &Entry) -> Result<(), ChangeError> {
        let mut in_roots = self.entry_in_roots(new.id, entry)?;
        let place = RootNode { bytenr: 0, level: 0, generation: self.generation() };
        let mut item = RootItemBuf::new(place, objectid::FIRST_FREE, self.geometry().node_bytes);
        item.tail = Some(RootTail {
            // With another one, all of the tail would count as left by a kernel that did not know it.
            generation_v2: item.head.generation,
            uuid: new.uuid,
            otransid: self.generation().into(),
            otime: new.now,
            ..RootTail::new_zeroed()
        });
        let key = Key::new(new.id, ItemType::ROOT_ITEM, 0);
        in_roots.insert(key, item.encode());
        let change = Change {
            items: vec![
                (entry.parent, entry.items.clone()),
                (objectid::ROOT_TREE, in_roots),
                (objectid::UUID_TREE, self.uuid_added(new.uuid, new.id)?),
            ],
            ..Change::default()
        };
        self.prepare_trees(counts(&change), NODES_OF_A_TREE)?;
        self.apply_change(&change)?;
        self.create_tree(new.id, key, item)?;
        self.edit(new.id, |tree, editor| Ok::<_, ChangeError>(tree.apply(editor, top)?))?;
        self.mark_changed(new.id, new.now);
        self.mark_changed(entry.parent, new.now);
        self.highest_subvolume = self.highest_subvolume.max(new.id);
        Ok(())
    }

    /// Makes a snapshot of a subvolume, which is open.
    ///
    /// # Errors
    /// If a node is not in memory, or there is no space.
    pub fn snapshot(&mut self, source: u64, new: NewSubvolume, entry: &Entry) -> Result<(), ChangeError> {
        let generation = self.generation();
        let mut in_roots = self.entry_in_roots(new.id, entry)?;
        let (source_key, mut of_source) = self.root_item(source).ok_or(ChangeError::NoTree(source))?;
        of_source.head.last_snapshot = generation.into();
        let key = Key::new(new.id, ItemType::ROOT_ITEM, generation);
        let item = snapshot_item(&of_source, &new, generation);
        in_roots.insert(key, item.encode());
        in_roots.replace(source_key, of_source.encode());
        let change = Change {
            items: vec![(objectid::ROOT_TREE, in_roots), (objectid::UUID_TREE, self.uuid_added(new.uuid, new.id)?)],
            ..Change::default()
        };
        // From now on all nodes of the source may be shared. So what has to be in memory is more than before.
        let sharing = Sharing { last_snapshot: generation, is_now: true };
        let mut children = self.children_of_root(source)?;
        for (key, _) in entry.items.iter() {
            let is_source = entry.parent == source;
            children += self.touch_as(entry.parent, key..=key, is_source.then_some(sharing))?;
        }
        let changes = 2 * entry.items.len() as u64 + 8;
        self.admit_more(entry.parent, changes, children)?;
        let in_parent = (entry.parent, entry.items.len() as u64);
        self.prepare_trees(counts(&change).chain([in_parent]), 2 * NODES_OF_A_TREE)?;
        self.apply_change(&change)?;
        self.set_root_item(source, source_key, of_source);
        self.copy_as_snapshot(source, new.id, key, item)?;
        self.edit(entry.parent, |tree, editor| Ok::<_, ChangeError>(tree.apply(editor, entry.items)?))?;
        self.mark_changed(entry.parent, new.now);
        self.highest_subvolume = self.highest_subvolume.max(new.id);
        Ok(())
    }

    /// Deletes a subvolume: it has no place any more, and its nodes are to be dropped. Its entry is planned with its
    /// index, which [`Transaction::place_of`] returns.
    ///
    /// # Errors
    /// If it is in use, a node is not in memory, or there is no space.
    pub fn delete_subvolume(&mut self, id: u64, entry: &Entry, now: Timespec) -> Result<(), ChangeError> {
        self.check_deletable(id)?;
        let (key, mut item) = self.root_item(id).ok_or(ChangeError::NoTree(id))?;
        item.head.refs = 0.into();
        item.head.flags = (item.head.flags.get() | RootFlags::DEAD.bits()).into();
        let mut in_roots = ItemChanges::new();
        in_roots.replace(key, item.encode());
        in_roots.delete(Key::new(entry.parent, ItemType::ROOT_REF, id));
        in_roots.delete(Key::new(id, ItemType::ROOT_BACKREF, entry.parent));
        in_roots.insert(Key::new(objectid::ORPHAN, ItemType::ORPHAN_ITEM, id), Vec::new());
        let mut in_uuids = ItemChanges::new();
        if let Some(tail) = item.tail {
            self.change_uuid(&mut in_uuids, (ItemType::UUID_SUBVOL, tail.uuid), id, false)?;
            self.change_uuid(&mut in_uuids, (ItemType::UUID_RECEIVED_SUBVOL, tail.received_uuid), id, false)?;
        }
        let items =
            vec![(entry.parent, entry.items.clone()), (objectid::ROOT_TREE, in_roots), (objectid::UUID_TREE, in_uuids)];
        self.apply_change(&Change { items, frees_space: true, ..Change::default() })?;
        self.set_root_item(id, key, item);
        self.mark_changed(entry.parent, now);
        Ok(())
    }

    /// Makes an open subvolume read-only or writable.
    ///
    /// # Errors
    /// If a node is not in memory, or there is no space.
    pub fn set_read_only(&mut self, id: u64, is_read_only: bool) -> Result<(), ChangeError> {
        if self.is_read_only(id)? == is_read_only {
            return Ok(());
        }
        let (key, mut item) = self.root_item(id).ok_or(ChangeError::NoTree(id))?;
        let flags = RootFlags::from_bits_retain(item.head.flags.get());
        let mut in_uuids = ItemChanges::new();
        if is_read_only {
            item.head.flags = flags.union(RootFlags::READONLY).bits().into();
        } else {
            item.head.flags = flags.difference(RootFlags::READONLY).bits().into();
            let received = item.tail.map_or([0; 16], |tail| tail.received_uuid);
            self.change_uuid(&mut in_uuids, (ItemType::UUID_RECEIVED_SUBVOL, received), id, false)?;
            item.clear_received();
        }
        let mut in_roots = ItemChanges::new();
        in_roots.replace(key, item.encode());
        let items = vec![(objectid::ROOT_TREE, in_roots), (objectid::UUID_TREE, in_uuids)];
        self.apply_change(&Change { items, ..Change::default() })?;
        self.set_root_item(id, key, item);
        Ok(())
    }

    /// The index of the entry of a subvolume, if its place is this one.
    ///
    /// # Errors
    /// If a node is not in memory, or the item is damaged.
    pub fn index_of_subvolume(&self, id: u64, parent: u64, place: Place<'_>) -> Result<Option<u64>, ChangeError> {
        let roots = self.view(objectid::ROOT_TREE)?;
        let key = Key::new(parent, ItemType::ROOT_REF, id);
        let Some(data) = roots.at(key)? else { return Ok(None) };
        let found = RootRef::decode(data).map_err(|_| ChangeError::Item(key))?;
        let is_here = found.dirid == place.directory && found.name == place.name;
        Ok(is_here.then_some(found.sequence))
    }

    /// The changes of the root tree when a subvolume moves from one subvolume to another, or within one.
    ///
    /// # Errors
    /// If the name is too long.
    pub(crate) fn move_place(
        &self,
        changes: &mut ItemChanges,
        (from, to): (u64, u64),
        moved: &MovedSubvolume<'_>,
    ) -> Result<(), ChangeError> {
        let MovedSubvolume { id, place, index } = *moved;
        changes.delete(Key::new(from, ItemType::ROOT_REF, id));
        changes.delete(Key::new(id, ItemType::ROOT_BACKREF, from));
        let entry =
            Entry { parent: to, directory: place.directory, index, name: place.name, items: &ItemChanges::new() };
        for (key, change) in self.entry_in_roots(id, &entry)? {
            if let ItemChange::Insert(data) = change {
                changes.insert(key, data);
            }
        }
        Ok(())
    }

    /// The subvolume that is mounted if nothing else is named: that of the entry `default` of the root tree, or the
    /// first one.
    ///
    /// # Errors
    /// If a node of the root tree is not in memory.
    pub fn default_subvolume(&self) -> Result<u64, ChangeError> {
        let roots = self.view(objectid::ROOT_TREE)?;
        let first = Key::new(objectid::ROOT_TREE_DIR, ItemType::DIR_ITEM, 0);
        let Some((key, data)) = roots.first(first..=Key { offset: u64::MAX, ..first })? else {
            return Ok(objectid::FS_TREE);
        };
        let Ok(Item::DirItems(entries)) = Item::decode(key, data) else { return Err(ChangeError::Item(key)) };
        let default = entries.iter().find(|entry| entry.name == b"default");
        Ok(default.map_or(objectid::FS_TREE, |entry| entry.location.objectid))
    }

    /// The place of a subvolume: the subvolume and directory that it is in, and the index and name of its entry.
    ///
    /// # Errors
    /// If it has none, or a node is not in memory.
    pub fn place_of(&self, id: u64) -> Result<(u64, u64, u64, Vec<u8>), ChangeError> {
        let range = Key::new(id, ItemType::ROOT_BACKREF, 0)..=Key::new(id, ItemType::ROOT_BACKREF, u64::MAX);
        let roots = self.view(objectid::ROOT_TREE)?;
        let (key, data) = roots.first(range)?.ok_or(SubvolumeError::Absent(id))?;
        let place = RootRef::decode(data).map_err(|_| ChangeError::Item(key))?;
        Ok((key.offset, place.dirid, place.sequence, place.name.to_vec()))
    }

    fn check_deletable(&self, id: u64) -> Result<(), ChangeError> {
        let roots = self.view(objectid::ROOT_TREE)?;
        let below = Key::new(id, ItemType::ROOT_REF, 0)..=Key::new(id, ItemType::ROOT_REF, u64::MAX);
        if let Some((key, _)) = roots.first(below)? {
            return Err(SubvolumeError::HasSubvolume(key.offset).into());
        }
        if id == objectid::FS_TREE || self.default_subvolume()? == id {
            return Err(SubvolumeError::IsDefault.into());
        }
        Ok(())
    }

    /// The items of the root tree that say where a subvolume is.
    fn entry_in_roots(&self, id: u64, entry: &Entry) -> Result<ItemChanges, ChangeError> {
        let mut data = Vec::new();
        let place = RootRef { dirid: entry.directory, sequence: entry.index, name: entry.name };
        place.write(&mut data).map_err(|_| SubvolumeError::Name)?;
        let mut changes = ItemChanges::new();
        changes.insert(Key::new(entry.parent, ItemType::ROOT_REF, id), data.clone());
        changes.insert(Key::new(id, ItemType::ROOT_BACKREF, entry.parent), data);
        Ok(changes)
    }

    /// The change of the UUID tree, if there is one, that adds a subvolume.
    fn uuid_added(&self, uuid: [u8; 16], id: u64) -> Result<ItemChanges, ChangeError> {
        let mut changes = ItemChanges::new();
        self.change_uuid(&mut changes, (ItemType::UUID_SUBVOL, uuid), id, true)?;
        Ok(changes)
    }

    /// The change of the UUID tree that adds a subvolume to those of a UUID, or removes it.
    fn change_uuid(
        &self,
        changes: &mut ItemChanges,
        (kind, uuid): (ItemType, [u8; 16]),
        id: u64,
        is_new: bool,
    ) -> Result<(), ChangeError> {
        if self.root(objectid::UUID_TREE).is_none() || uuid == [0; 16] {
            return Ok(());
        }
        let half = |at: usize| u64::from_le_bytes(uuid[at..at + 8].try_into().unwrap_or_default());
        let key = Key::new(half(0), kind, half(8));
        let tree = self.view(objectid::UUID_TREE)?;
        let Some(data) = tree.at(key)? else {
            if is_new {
                changes.insert(key, id.to_le_bytes().to_vec());
            }
            return Ok(());
        };
        let Ok(Item::UuidSubvolumes(ids)) = Item::decode(key, data) else { return Err(ChangeError::Item(key)) };
        let mut left: Vec<u64> = ids.iter().map(|one| one.get()).filter(|one| *one != id).collect();
        left.extend(is_new.then_some(id));
        match left.is_empty() {
            true => changes.delete(key),
            false => changes.replace(key, left.iter().flat_map(|id| id.to_le_bytes()).collect()),
        }
        Ok(())
    }
}

/// The trees that a change changes, and how many changes each has.
fn counts(change: &Change) -> impl Iterator<Item = (u64, u64)> {
    change.items.iter().map(|(tree, items)| (*tree, items.len() as u64))
}

/// The root item of a snapshot, before it has its root node.
fn snapshot_item(source: &RootItemBuf, new: &NewSubvolume, generation: u64) -> RootItemBuf {
    let mut item = *source;
    let of_source = source.tail.unwrap_or_else(RootTail::new_zeroed);
    item.tail = Some(RootTail {
        uuid: new.uuid,
        parent_uuid: of_source.uuid,
        otransid: generation.into(),
        otime: new.now,
        ctransid: of_source.ctransid,
        ctime: of_source.ctime,
        // What is valid of the second part is told by this.
        generation_v2: item.head.generation,
        ..RootTail::new_zeroed()
    });
    if new.is_read_only {
        if let Some(tail) = &mut item.tail {
            (tail.received_uuid, tail.stransid, tail.rtransid) =
                (of_source.received_uuid, of_source.stransid, of_source.rtransid);
            (tail.stime, tail.rtime) = (of_source.stime, of_source.rtime);
        }
        item.head.flags = (item.head.flags.get() | RootFlags::READONLY.bits()).into();
    } else {
        item.head.flags = (item.head.flags.get() & !RootFlags::READONLY.bits()).into();
    }
    item.head.refs = 1.into();
    item.head.drop_progress = Key::MIN.into();
    item.head.drop_level = 0;
    item
}
