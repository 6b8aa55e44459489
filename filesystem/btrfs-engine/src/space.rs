//! The space of the filesystem: block groups, what is free in them, and what will be free when the open transaction is
//! durable.
//!
//! A group's free space is read from the free space tree when the group is first used. From then on it is in memory
//! twice: as it will be stored ([`GroupFreeSpace`]), which changes with the items of extents; and as runs from which is
//! allocated. The runs have less: not what was freed and is still part of the durable trees, not what is allocated and
//! has no item yet, and not the places of superblocks, which the tree lists as free.
//!
//! Invariants:
//! - Space that the open transaction freed is *pinned*: the trees of the last durable transaction have it. It is
//!   allocated again only after [`Space::unpin`], when the open transaction has become durable, and what was sent to
//!   these addresses, discards too, has completed.
//! - The free space of a group is forgotten when it was not needed for some commits, and all that the tree lists as free
//!   can be allocated: then nothing is lost that the tree does not have.
//! - Nodes are allocated at multiples of their size from the start of their group, so none crosses a multiple of 64 KiB
//!   from there.

mod runs;

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};

use sealblock_btrfs_format::free_space::{FreeSpaceError, GroupFreeSpace};
use sealblock_btrfs_format::item_changes::ItemChanges;
use sealblock_btrfs_format::items::chunk::{BlockGroupFlags, BlockGroupItem};
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use zerocopy::IntoBytes;

use crate::tree::TreeError;
use crate::view::Items;

pub use runs::Runs;

/// The number of commits after which free space that was not needed is forgotten.
const KEPT_COMMITS: u64 = 8;

/// What space is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// Nodes of the chunk tree.
    System,
    /// Nodes of other trees.
    Metadata,
    /// Data of files.
    Data,
}

/// Why space cannot be read, allocated or freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SpaceError {
    /// A node is not in memory.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// The free space tree contradicts itself, or what is allocated and freed.
    #[error("free space: {0}")]
    FreeSpace(#[from] FreeSpaceError),
    /// No block group has an address.
    #[error("no block group has the address {0}")]
    NoGroup(u64),
    /// A block group would have fewer than 0 bytes in use, or more than it has.
    #[error("the block group at {start} has {used} bytes in use, which change by {by}")]
    Used {
        /// Where it begins.
        start: u64,
        /// Its bytes in use.
        used: u64,
        /// The change.
        by: i64,
    },
    /// There is no space.
    #[error("there is no space left for {0:?}")]
    Full(Use),
}

/// A block group.
struct Group {
    bytes: u64,
    flags: BlockGroupFlags,
    chunk_objectid: u64,
    used: u64,
    /// The bytes in use that its item has.
    stored_used: u64,
    /// Where superblocks lie.
    superblocks: Vec<(u64, u64)>,
    free: Option<Free>,
}

/// The free space of a group that was read.
struct Free {
    stored: GroupFreeSpace,
    runs: Runs,
    /// The number of commits before it was needed last.
    needed_at: u64,
}

impl Group {
    /// Bytes that can be allocated, as far as is known.
    fn free_bytes(&self) -> u64 {
        match &self.free {
            Some(free) => free.runs.free_bytes(),
            None => {
                let lost: u64 = self.superblocks.iter().map(|(_, bytes)| bytes).sum();
                self.bytes.saturating_sub(self.used).saturating_sub(lost)
            }
        }
    }
}

impl Free {
    fn new(stored: GroupFreeSpace, superblocks: &[(u64, u64)], needed_at: u64) -> Free {
        let runs = allocatable(&stored, superblocks);
        Free { stored, runs, needed_at }
    }

    /// True if all that is free in the tree can be allocated: nothing is pinned, and all that was allocated has an item.
    fn is_settled(&self, superblocks: &[(u64, u64)]) -> bool {
        self.runs.free_bytes() == allocatable(&self.stored, superblocks).free_bytes()
    }
}

/// What the tree lists as free, but for the places of superblocks.
fn allocatable(stored: &GroupFreeSpace, superblocks: &[(u64, u64)]) -> Runs {
    let mut runs = Runs::default();
    for run in stored.runs() {
        let was_used = runs.insert(run);
        debug_assert!(was_used, "the runs of a group do not overlap");
    }
    superblocks.iter().for_each(|(start, bytes)| runs.remove_free(*start..start + bytes));
    runs
}

/// All block groups.
pub struct Space {
    groups: BTreeMap<u64, Group>,
    node_bytes: u64,
    sector_bytes: u32,
    /// Ranges that the open transaction freed.
    pinned: Vec<Range<u64>>,
    /// The number of commits so far.
    commits: u64,
}

impl Space {
    /// No block groups.
    pub fn new(node_bytes: u32, sector_bytes: u32) -> Space {
        Space { groups: BTreeMap::new(), node_bytes: node_bytes.into(), sector_bytes, pinned: Vec::new(), commits: 0 }
    }

    /// Adds a block group: where it begins, its bytes, its item, and the ranges of superblocks in it.
    pub fn add_group(&mut self, start: u64, bytes: u64, item: &BlockGroupItem, superblocks: Vec<(u64, u64)>) {
        let (used, flags) = (item.used.get(), BlockGroupFlags::from_bits_retain(item.flags.get()));
        let chunk_objectid = item.chunk_objectid.get();
        let group = Group { bytes, flags, chunk_objectid, used, stored_used: used, superblocks, free: None };
        self.groups.insert(start, group);
    }

    /// Makes a block group for a new chunk. All of it is free. Returns the changes of the free space tree, and the item
    /// of the group with its key.
    ///
    /// # Errors
    /// If it is not made of sectors.
    pub fn create_group(
        &mut self,
        start: u64,
        bytes: u64,
        flags: BlockGroupFlags,
        superblocks: Vec<(u64, u64)>,
    ) -> Result<(ItemChanges, Key, BlockGroupItem), SpaceError> {
        let mut changes = ItemChanges::new();
        let stored = GroupFreeSpace::create(start, bytes, self.sector_bytes, &mut changes)?;
        let chunk_objectid = objectid::FIRST_CHUNK_TREE;
        let item = BlockGroupItem { used: 0.into(), chunk_objectid: chunk_objectid.into(), flags: flags.bits().into() };
        self.add_group(start, bytes, &item, superblocks);
        let group = self.groups.get_mut(&start).expect("it was added");
        group.free = Some(Free::new(stored, &group.superblocks, self.commits));
        Ok((changes, Key::new(start, ItemType::BLOCK_GROUP_ITEM, bytes), item))
    }

    /// A group goes in which nothing is used. Returns the changes of the free space tree.
    pub fn delete_group(&mut self, start: u64) -> ItemChanges {
        let mut changes = ItemChanges::new();
        if let Some(free) = self.groups.remove(&start).and_then(|group| group.free) {
            free.stored.delete(&mut changes);
        }
        changes
    }

    /// Use and profile of new chunks: those of the last group of this use.
    pub fn flags_for(&self, what: Use) -> Option<BlockGroupFlags> {
        self.groups.values().rev().map(|group| group.flags).find(|flags| is_for(*flags, what))
    }

    /// A group of which nothing is used or pinned, and that is not needed: where it begins, its bytes and flags. Only
    /// groups whose free space was read are looked at. New chunks stay of the same profile without it.
    pub fn empty_group(&self) -> Option<(u64, u64, BlockGroupFlags)> {
        let is_empty = |group: &Group| {
            let lost: u64 = group.superblocks.iter().map(|(_, bytes)| bytes).sum();
            group.used == 0 && group.free.as_ref().is_some_and(|free| free.runs.free_bytes() == group.bytes - lost)
        };
        let is_unneeded = |start: u64, group: &Group| {
            let what = match group.flags.intersection(BlockGroupFlags::TYPES) {
                BlockGroupFlags::DATA => Use::Data,
                BlockGroupFlags::METADATA => Use::Metadata,
                _ => return false,
            };
            let others = || self.groups_of(what).filter(|(other, _)| *other != start).map(|(_, other)| other);
            let keeps_profile = others().last().is_some_and(|last| Some(last.flags) == self.flags_for(what));
            keeps_profile && (what == Use::Data || leave_room(others(), group.bytes))
        };
        let found = self.groups.iter().rev().find(|(start, group)| is_empty(group) && is_unneeded(**start, group));
        found.map(|(start, group)| (*start, group.bytes, group.flags))
    }

    /// The number of groups.
    pub fn group_count(&self) -> u64 {
        self.groups.len() as u64
    }

    /// Nodes of metadata for which there is space, without what is pinned.
    pub fn free_nodes(&self) -> u64 {
        self.groups_of(Use::Metadata).map(|(_, group)| group.free_bytes() / self.node_bytes).sum()
    }

    /// Bytes of data for which there is space, with those that are free only after the commit.
    pub fn unused_data_bytes(&self) -> u64 {
        let is_data =
            |range: &&Range<u64>| self.group_at(range.start).is_ok_and(|(_, one)| is_for(one.flags, Use::Data));
        let pinned = self.pinned.iter().filter(is_data).map(|range| range.end - range.start);
        self.groups_of(Use::Data).map(|(_, group)| group.free_bytes()).chain(pinned).fold(0, u64::saturating_add)
    }

    /// Bytes in use of all groups.
    pub fn used_bytes(&self) -> u64 {
        self.groups.values().map(|group| group.used).fold(0, u64::saturating_add)
    }

    /// The keys of the free space of the group that has an address. To change it, all of them must be in memory.
    ///
    /// # Errors
    /// If no group has the address.
    pub fn keys_of(&self, at: u64) -> Result<RangeInclusive<Key>, SpaceError> {
        let (start, group) = self.group_at(at)?;
        Ok(keys_of(start, group.bytes))
    }

    /// Reads the free space of the group that has an address, if it is not in memory.
    ///
    /// # Errors
    /// If a node is not in memory, or the free space contradicts itself.
    pub fn load(&mut self, at: u64, tree: &impl Items) -> Result<(), SpaceError> {
        let (start, group) = self.group_at(at)?;
        let range = keys_of(start, group.bytes);
        if let Some(free) = self.groups.get_mut(&start).and_then(|group| group.free.as_mut()) {
            free.needed_at = self.commits;
            return Ok(());
        }
        let mut items: Vec<(Key, &[u8])> = Vec::new();
        let mut next = Some(*range.start());
        while let Some(from) = next {
            let item = tree.first(from..=*range.end())?;
            items.extend(item);
            next = item.and_then(|(key, _)| key.next());
        }
        let stored = GroupFreeSpace::load(self.sector_bytes, items)?;
        let commits = self.commits;
        let group = self.groups.get_mut(&start).expect("it was found");
        group.free = Some(Free::new(stored, &group.superblocks, commits));
        Ok(())
    }

    /// Sees to it that this number of nodes can be allocated, by reading the free space of groups until they have it.
    ///
    /// # Errors
    /// If a node of the free space tree is not in memory, or there is no space.
    pub fn prepare(&mut self, what: Use, nodes: u64, tree: &impl Items) -> Result<(), SpaceError> {
        let mut found = 0;
        let starts: Vec<u64> = self.groups_of(what).map(|(start, _)| start).collect();
        for start in starts {
            self.load(start, tree)?;
            let free = self.groups[&start]
                .free
                .as_ref()
                .map_or(0, |free| free.runs.count(self.node_bytes, start, self.node_bytes, nodes));
            found += free;
            if found >= nodes {
                return Ok(());
            }
        }
        Err(SpaceError::Full(what))
    }

    /// Allocates a node in a group whose free space was read.
    pub fn allocate_node(&mut self, what: Use) -> Option<u64> {
        let bytes = self.node_bytes;
        let groups = self.groups.iter_mut().filter(|(_, group)| is_for(group.flags, what));
        let free = groups.filter_map(|(start, group)| Some((*start, group.free.as_mut()?)));
        free.into_iter().find_map(|(start, free)| free.runs.allocate(bytes, start, bytes))
    }

    /// Allocates space for data: at most these bytes, all in one piece, and as many as there are if there is no such piece.
    /// It belongs to nobody until an extent gets it ([`crate::change::Change`]). Until then it can be given back if nothing
    /// was sent to it, and must be pinned ([`Space::pin`]) otherwise.
    ///
    /// # Errors
    /// If a node of the free space tree is not in memory, or there is no space.
    pub fn allocate_data(&mut self, bytes: u64, tree: &impl Items) -> Result<Range<u64>, SpaceError> {
        // Groups with too little space are looked at last, so that they need not be in memory.
        let (small, large): (Vec<_>, Vec<_>) =
            self.groups_of(Use::Data).partition(|(_, group)| group.free_bytes() < bytes);
        let starts: Vec<u64> = large.into_iter().chain(small).map(|(start, _)| start).collect();
        let mut largest: Option<(u64, u64)> = None;
        for start in starts {
            if self.groups[&start].free_bytes() == 0 {
                continue;
            }
            self.load(start, tree)?;
            let Some(free) = self.groups.get_mut(&start).and_then(|group| group.free.as_mut()) else { continue };
            if let Some(at) = free.runs.allocate(bytes, 0, 1) {
                return Ok(at..at + bytes);
            }
            let longest = free.runs.iter().map(|run| run.end - run.start).max().unwrap_or(0);
            if longest > largest.map_or(0, |(_, bytes)| bytes) {
                largest = Some((start, longest));
            }
        }
        let (start, longest) = largest.ok_or(SpaceError::Full(Use::Data))?;
        let free = self.groups.get_mut(&start).and_then(|group| group.free.as_mut());
        let at = free.and_then(|free| free.runs.allocate(longest, 0, 1)).ok_or(SpaceError::Full(Use::Data))?;
        Ok(at..at + longest)
    }

    /// The groups that have only data, and end behind an address.
    pub(crate) fn data_groups_from(&self, from: u64) -> Vec<u64> {
        let is_data = |group: &Group| group.flags.intersection(BlockGroupFlags::TYPES) == BlockGroupFlags::DATA;
        let found = self.groups.iter().filter(|(start, group)| is_data(group) && **start + group.bytes > from);
        found.map(|(start, _)| *start).collect()
    }

    /// Takes free runs of a group out that begin at an address or behind it, until these bytes are reached.
    pub(crate) fn take_free_data(
        &mut self,
        group: u64,
        from: u64,
        enough_bytes: u64,
        is_wanted: impl Fn(&Range<u64>) -> bool,
    ) -> Vec<Range<u64>> {
        let Some(free) = self.groups.get_mut(&group).and_then(|group| group.free.as_mut()) else { return Vec::new() };
        let (mut taken, mut bytes) = (Vec::new(), 0);
        for run in free.runs.iter().filter(|run| run.start >= from && is_wanted(run)) {
            if bytes >= enough_bytes {
                break;
            }
            bytes += run.end - run.start;
            taken.push(run);
        }
        taken.iter().for_each(|run| free.runs.remove_free(run.clone()));
        taken
    }

    /// Gives back what was allocated and never written, and has no item.
    ///
    /// # Errors
    /// If it is free.
    pub fn give_back(&mut self, range: Range<u64>) -> Result<(), SpaceError> {
        let (start, bytes) = (range.start, range.end.saturating_sub(range.start));
        let (group, _) = self.group_at(start)?;
        let group = self.groups.get_mut(&group).ok_or(SpaceError::NoGroup(start))?;
        let free = group.free.as_mut().ok_or(SpaceError::NoGroup(start))?;
        if !free.runs.insert(range) {
            return Err(FreeSpaceError::Free { start, bytes }.into());
        }
        // A damaged filesystem may have had an extent there.
        group.superblocks.iter().for_each(|(start, bytes)| free.runs.remove_free(*start..start + bytes));
        Ok(())
    }

    /// An extent gets its item: its space is no longer free in the tree.
    ///
    /// # Errors
    /// If it is not free there.
    pub fn extent_added(&mut self, start: u64, bytes: u64) -> Result<ItemChanges, SpaceError> {
        let mut changes = ItemChanges::new();
        self.change_used(start, bytes, true)?;
        self.free_at(start)?.stored.remove(start, bytes, &mut changes)?;
        Ok(changes)
    }

    /// The item of an extent goes: its space is free in the tree, and pinned.
    ///
    /// # Errors
    /// If it is free there.
    pub fn extent_removed(&mut self, start: u64, bytes: u64) -> Result<ItemChanges, SpaceError> {
        let mut changes = ItemChanges::new();
        self.change_used(start, bytes, false)?;
        self.free_at(start)?.stored.add(start, bytes, &mut changes)?;
        self.pinned.push(start..start + bytes);
        Ok(changes)
    }

    /// Pins a range that was allocated and is not used, but may have been written to.
    pub fn pin(&mut self, range: Range<u64>) {
        self.pinned.push(range);
    }

    /// The items of the groups whose items do not have their bytes in use.
    pub fn changed_groups(&self) -> ItemChanges {
        let mut changes = ItemChanges::new();
        for (start, group) in self.groups.iter().filter(|(_, group)| group.used != group.stored_used) {
            let (used, flags) = (group.used.into(), group.flags.bits().into());
            let item = BlockGroupItem { used, chunk_objectid: group.chunk_objectid.into(), flags };
            changes.replace(Key::new(*start, ItemType::BLOCK_GROUP_ITEM, group.bytes), item.as_bytes().to_vec());
        }
        changes
    }

    /// The items of [`Space::changed_groups`] are about to be stored.
    pub fn groups_stored(&mut self) {
        self.groups.values_mut().for_each(|group| group.stored_used = group.used);
    }

    /// Takes all that the open transaction freed. [`Space::unpin`] makes it free when the transaction is durable.
    pub fn take_pinned(&mut self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.pinned)
    }

    /// Ranges are free that a transaction freed which is durable now. Forgets free space that was not needed for long.
    ///
    /// # Errors
    /// If one is free already.
    pub fn unpin(&mut self, ranges: Vec<Range<u64>>) -> Result<(), SpaceError> {
        ranges.into_iter().try_for_each(|range| self.give_back(range))?;
        self.commits += 1;
        let before = self.commits.saturating_sub(KEPT_COMMITS);
        for group in self.groups.values_mut() {
            // Empty groups are found by their free space, and it is one run.
            let is_kept = |free: &Free| free.needed_at >= before || group.used == 0;
            if group.free.as_ref().is_some_and(|free| !is_kept(free) && free.is_settled(&group.superblocks)) {
                group.free = None;
            }
        }
        Ok(())
    }

    /// The number of groups whose free space is in memory, and of the runs that they have there.
    pub fn in_memory(&self) -> (u64, u64) {
        let free = self.groups.values().filter_map(|group| group.free.as_ref());
        free.fold((0, 0), |(groups, runs), free| (groups + 1, runs + free.runs.iter().count() as u64))
    }

    fn groups_of(&self, what: Use) -> impl Iterator<Item = (u64, &Group)> {
        let groups = self.groups.iter().filter(move |(_, group)| is_for(group.flags, what));
        groups.map(|(start, group)| (*start, group))
    }

    fn group_at(&self, at: u64) -> Result<(u64, &Group), SpaceError> {
        let found = self.groups.range(..=at).next_back();
        let found = found.filter(|(start, group)| at - **start < group.bytes).ok_or(SpaceError::NoGroup(at))?;
        Ok((*found.0, found.1))
    }

    fn free_at(&mut self, at: u64) -> Result<&mut Free, SpaceError> {
        let (start, _) = self.group_at(at)?;
        let group = self.groups.get_mut(&start).ok_or(SpaceError::NoGroup(at))?;
        group.free.as_mut().ok_or(SpaceError::NoGroup(at))
    }

    fn change_used(&mut self, at: u64, bytes: u64, is_more: bool) -> Result<(), SpaceError> {
        let (start, group) = self.group_at(at)?;
        let used = if is_more { group.used.checked_add(bytes) } else { group.used.checked_sub(bytes) };
        let by = if is_more { bytes as i64 } else { -(bytes as i64) };
        let used = used.filter(|used| *used <= group.bytes).ok_or(SpaceError::Used { start, used: group.used, by })?;
        self.groups.get_mut(&start).expect("it was found").used = used;
        Ok(())
    }
}

/// The keys of the free space of a group.
pub fn keys_of(start: u64, bytes: u64) -> RangeInclusive<Key> {
    let last = start + (bytes - 1);
    Key::new(start, ItemType::FREE_SPACE_INFO, 0)..=Key::new(last, ItemType::FREE_SPACE_BITMAP, u64::MAX)
}

/// True if groups of metadata can do without another one of this size: at least half of that, and as much as they have in
/// use, is free in them. So a group is not made and removed again with each few changes.
fn leave_room<'g>(groups: impl Iterator<Item = &'g Group>, bytes: u64) -> bool {
    let (mut used, mut free) = (0_u64, 0_u64);
    for group in groups {
        (used, free) = (used.saturating_add(group.used), free.saturating_add(group.free_bytes()));
    }
    free >= used.saturating_add(bytes / 2)
}

fn is_for(flags: BlockGroupFlags, what: Use) -> bool {
    flags.contains(match what {
        Use::System => BlockGroupFlags::SYSTEM,
        Use::Metadata => BlockGroupFlags::METADATA,
        Use::Data => BlockGroupFlags::DATA,
    })
}
