//! Chunks against block groups, and block groups against the extents in them.

use std::collections::BTreeMap;

use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::chunk::{BlockGroupFlags, STRIPE_BYTES, Stripe};
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::node::Node;

use super::extents::{Extent, Extents};
use super::report::{Place, Rule};
use super::session::Session;

/// A chunk of the chunk tree.
#[derive(Clone, Debug)]
pub(super) struct ChunkFacts {
    pub bytes: u64,
    pub flags: u64,
    pub stripes: Vec<Stripe>,
    /// Bytes of each stripe.
    pub stripe_bytes: u64,
    /// The item, for a comparison.
    pub item: Vec<u8>,
}

/// A block group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub bytes: u64,
    used: u64,
    flags: u64,
}

impl Group {
    fn allows(&self, extent: &Extent) -> bool {
        let flags = BlockGroupFlags::from_bits_retain(self.flags);
        match extent.is_data() {
            true => flags.contains(BlockGroupFlags::DATA),
            false => flags.intersects(BlockGroupFlags::METADATA | BlockGroupFlags::SYSTEM),
        }
    }
}

/// All chunks and block groups.
#[derive(Default)]
pub(super) struct Groups {
    pub chunks: BTreeMap<u64, ChunkFacts>,
    pub groups: BTreeMap<u64, Group>,
    /// The tree with block groups.
    tree: u64,
    /// True if some chunks, or some block groups, are lost.
    pub has_lost_chunks: bool,
    pub has_lost_groups: bool,
}

impl Groups {
    /// None yet; block groups are in this tree.
    pub fn new(tree: u64) -> Groups {
        Groups { tree, ..Groups::default() }
    }

    /// Takes the chunks of a leaf of the chunk tree.
    pub fn take_chunks(&mut self, session: &Session<'_>, leaf: &Node<'_>) {
        for (key, data) in leaf.entries() {
            let Ok(Item::Chunk(chunk)) = Item::decode(key, data) else { continue };
            let (count, sector) = (chunk.head.num_stripes.get(), chunk.head.sector_size.get());
            if u64::from(sector) != session.sector_bytes() {
                let why = format!("the chunk has sectors of {sector} bytes, which no other sectors are");
                session.found(Rule::GroupChunk, Place::item(objectid::CHUNK_TREE, key), why);
            }
            let data_stripes = chunk.flags().profile().map_or(1, |profile| profile.data_stripes(count)).max(1);
            let bytes = chunk.head.length.get();
            let facts = ChunkFacts {
                bytes,
                flags: chunk.head.flags.get(),
                stripes: chunk.stripes.to_vec(),
                stripe_bytes: bytes / u64::from(data_stripes),
                item: data.to_vec(),
            };
            self.chunks.insert(key.offset, facts);
        }
    }

    /// Takes the block groups of a leaf.
    pub fn take_groups(&mut self, session: &Session<'_>, leaf: &Node<'_>) {
        for (key, data) in leaf.entries() {
            let Ok(Item::BlockGroup(group)) = Item::decode(key, data) else { continue };
            let (start, bytes) = (key.objectid, key.offset);
            if let Some((before, other)) = self.groups.range(..start.saturating_add(bytes)).next_back()
                && before.saturating_add(other.bytes) > start
            {
                let why = format!("the block group overlaps the one at {before}");
                session.found(Rule::GroupChunk, Place::item(self.tree, key), why);
            }
            let group = Group { bytes, used: group.used.get(), flags: group.flags.get() };
            self.groups.entry(start).or_insert(group);
        }
    }

    /// Compares chunks with block groups, and block groups with extents.
    pub fn finish(&self, session: &Session<'_>, extents: &Extents) {
        if !self.has_lost_chunks && !self.has_lost_groups {
            self.compare_chunks(session);
        }
        if !self.has_lost_groups && extents.is_complete() {
            self.compare_extents(session, extents.all());
        }
    }

    fn place(&self, start: u64, bytes: u64) -> Place {
        let key = Key::new(start, ItemType::BLOCK_GROUP_ITEM, bytes);
        Place { logical: Some(start), ..Place::item(self.tree, key) }
    }

    fn compare_chunks(&self, session: &Session<'_>) {
        for (start, chunk) in &self.chunks {
            let place = Place { tree: Some(objectid::CHUNK_TREE), ..Place::at(*start) };
            let why = match self.groups.get(start) {
                None => "the chunk has no block group".to_owned(),
                Some(group) if group.bytes != chunk.bytes => {
                    format!("the chunk has {} bytes, and its block group {}", chunk.bytes, group.bytes)
                }
                Some(group) if group.flags != chunk.flags => {
                    format!("the chunk has the flags {:#x}, and its block group {:#x}", chunk.flags, group.flags)
                }
                Some(_) => continue,
            };
            session.found(Rule::GroupChunk, place, why);
        }
        for (start, group) in &self.groups {
            if !self.chunks.contains_key(start) {
                let why = "the block group has no chunk";
                session.found(Rule::GroupChunk, self.place(*start, group.bytes), why);
            }
        }
    }

    fn compare_extents(&self, session: &Session<'_>, extents: &[Extent]) {
        let mut rest = extents;
        let mut total = 0_u64;
        for (start, group) in &self.groups {
            let end = start.saturating_add(group.bytes);
            let (before, behind) = rest.split_at(rest.partition_point(|extent| extent.start < *start));
            before.iter().for_each(|extent| report_outside(session, extent));
            let (within, behind) = behind.split_at(behind.partition_point(|extent| extent.start < end));
            rest = behind;
            let mut used = 0_u64;
            for extent in within {
                used = used.saturating_add(extent.bytes);
                check_within(session, (*start, group), extent);
            }
            total = total.saturating_add(used);
            if used != group.used {
                let why = format!("the block group counts {} used bytes, and its extents have {used}", group.used);
                session.found(Rule::GroupUsed, self.place(*start, group.bytes), why);
            }
        }
        rest.iter().for_each(|extent| report_outside(session, extent));
        let counted = session.fs.superblock().bytes_used.get();
        if counted != total {
            let why = format!("the superblock counts {counted} used bytes, and all extents have {total}");
            session.found(Rule::BytesUsed, Place::default(), why);
        }
    }
}

fn report_outside(session: &Session<'_>, extent: &Extent) {
    session.found(Rule::ExtentGroup, Place::at(extent.start), "the extent is in no block group");
}

fn check_within(session: &Session<'_>, (start, group): (u64, &Group), extent: &Extent) {
    let place = Place::at(extent.start);
    if extent.end() > start.saturating_add(group.bytes) {
        session.found(Rule::ExtentGroup, place, format!("the extent reaches beyond its block group at {start}"));
    }
    if !group.allows(extent) {
        let what = if extent.is_data() { "data" } else { "nodes" };
        session.found(Rule::ExtentGroup, place, format!("the block group at {start} is not for {what}"));
    }
    let within = (extent.start - start) % STRIPE_BYTES;
    if !extent.is_data() && within.saturating_add(extent.bytes) > STRIPE_BYTES {
        let why = format!("the node crosses a border of 64 KiB, counted from its block group at {start}");
        session.found(Rule::NodePlace, place, why);
    }
}
