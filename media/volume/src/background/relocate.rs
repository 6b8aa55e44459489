//! Relocation: moves the blocks of an extent together after small overwrites have scattered them.
//!
//! A move is a read and a write by the volume itself. The data are checked against their map entry, with the strongest
//! check that it has; a block that fails stays where it is. The data are written to free physical blocks, and the
//! memtable gets a map entry that differs from the old one only in its physical block: nothing is sealed. This happens
//! only if the block's map entry is still the one that was read, so a write in between wins. From there on it is an
//! ordinary map entry: a commit makes it durable, and only then is the old physical block free.

use futures_util::future::join_all;
use sealblock_block::{BadBlock, Clock, Error, Medium, MediumError};
use sealblock_integrity::{Sealed, Tags};
use sealblock_runtime_memory::Slice;
use sealblock_units::{Extent, Lba};

use crate::format::{MapEntry, MapEntryKind};
use crate::log::notes::Pending;
use crate::map::map_page::MapLookup;
use crate::options::Mutation;
use crate::requests::lookup::{BlockLocation, LocatedBlocks, data_match, has_data_crc};
use crate::space::Allocation;
use crate::space::free_map::FreeMap;
use crate::space::idle::IdlePeriod;
use crate::volume::{Volume, VolumeState};

/// A block to move: its offset in the extent, and its map entry.
type Block = (u32, MapEntry);

/// The result of moving one extent.
#[derive(PartialEq, Eq)]
enum RelocateStep {
    /// The extent is contiguous, or cannot be.
    Done,
    /// There are not enough free physical blocks.
    NoSpace,
    /// A request arrived.
    Interrupted,
}

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Relocates extents of block groups that were written, one after the other, while no request arrives. True if
    /// nothing is left to move now.
    pub(crate) async fn relocate_all(&self, idle_period: &IdlePeriod<'_>) -> bool {
        for group in self.allocator.groups() {
            let (mut from, mut waited) = (0, false);
            while let Some(extent) = self.allocator.with(group, |map| map.find_fragmented(from)).flatten() {
                if !idle_period.lasts() || self.state.get() != VolumeState::Open {
                    return false;
                }
                match self.relocate(group, extent, idle_period).await {
                    Ok(RelocateStep::Done) => (from, waited) = (extent + 1, false),
                    Ok(RelocateStep::NoSpace) if !waited && !self.memtable.is_empty() => {
                        // A failure shows when the extent is retried.
                        let _ = self.wait_for_commit().await;
                        waited = true;
                    }
                    Ok(RelocateStep::NoSpace) => break,
                    Ok(RelocateStep::Interrupted) => return false,
                    Err(error) => {
                        tracing::warn!(%error, "cannot move blocks");
                        self.allocator.with(group, |map| map.set_fragments(extent, 0));
                    }
                }
            }
        }
        idle_period.lasts()
    }

    /// Relocates one extent of a block group.
    async fn relocate(&self, group: u64, extent: u32, idle_period: &IdlePeriod<'_>) -> Result<RelocateStep, Error> {
        let _change = self.begin_block_change().await?;
        self.prepare_notes(group).await?;
        let place = self.extent_of(group, extent);
        let (blocks, _reading) = loop {
            // Physical blocks in use now stay so until this is dropped, so a map entry with the same physical block is
            // of the same write until then.
            let (_, reading) = self.locate(place).await?;
            if let Some(blocks) = self.stored_entries_now(place) {
                break (blocks, reading);
            }
        };
        let fragments = fragments_of(&blocks);
        let (misplaced, allowed, has_free_cluster) = self
            .allocator
            .with(group, |map| (misplaced_of(map, extent, &blocks), map.max_fragments(), map.has_free_cluster()))
            .unwrap_or_default();
        let (chosen, anew) = match fragments > allowed && has_free_cluster {
            true => (blocks, true),
            false => (misplaced, false),
        };
        if chosen.is_empty() {
            return Ok(if fragments > allowed { RelocateStep::NoSpace } else { self.done(group, extent) });
        }
        let (chosen, data) = self.read_checked(place, chosen).await;
        if !idle_period.lasts() {
            return Ok(RelocateStep::Interrupted);
        }
        let offsets: Vec<u32> = chosen.iter().map(|(offset, _)| *offset).collect();
        let taken = self.allocator.take_by(group, |map| match anew {
            _ if offsets.is_empty() => None,
            true => map.take_in_free_cluster(extent, &offsets),
            false => map.take_at_home(extent, &offsets),
        });
        let Some(taken) = taken else {
            // No block passes its check, so nothing can be moved until a write.
            return Ok(if offsets.is_empty() { self.done(group, extent) } else { RelocateStep::NoSpace });
        };
        self.write_moved(group, place, &chosen, &data, taken).await?;
        Ok(self.done(group, extent))
    }

    /// Records that an extent needs no move.
    fn done(&self, group: u64, extent: u32) -> RelocateStep {
        self.allocator.with(group, |map| map.set_fragments(extent, 0));
        self.request_early_commit(group);
        RelocateStep::Done
    }

    /// The blocks of an extent of a block group.
    fn extent_of(&self, group: u64, extent: u32) -> Extent {
        let size = u64::from(self.allocator.with(group, |map| map.extent_blocks()).unwrap_or(1));
        let place = self.block_group(group);
        let first = u64::from(extent) * size;
        let blocks = size.min(place.blocks - first);
        Extent::from_raw(place.first.get() + first, blocks).expect("extents lie in their block groups")
    }

    /// The map entry of a block, if it has data and the entry is valid; an error value if its page is not in memory.
    pub(crate) fn stored_entry_now(&self, lba: Lba) -> Option<Option<MapEntry>> {
        let entry = match self.memtable.get(lba) {
            Some(entry) => Some(entry),
            None => match self.lookup_cached(lba)? {
                MapLookup::Mapped(entry) if self.layout.holds(&entry) => Some(entry),
                _ => None,
            },
        };
        Some(entry.filter(|entry| entry.kind == MapEntryKind::Stored))
    }

    /// The blocks of an extent with data, from memory only; `None` if a page is not in memory.
    fn stored_entries_now(&self, place: Extent) -> Option<Vec<Block>> {
        let entries: Option<Vec<Option<MapEntry>>> = place.iter().map(|lba| self.stored_entry_now(lba)).collect();
        Some((0..).zip(entries?).filter_map(|(offset, entry)| Some((offset, entry?))).collect())
    }

    /// Reads blocks of an extent into their positions of one buffer. Omits blocks that fail their check, or that cannot
    /// be checked because the host's guards do not match.
    async fn read_checked(&self, place: Extent, mut blocks: Vec<Block>) -> (Vec<Block>, Slice) {
        let shift = self.geometry.block_size.shift();
        let has_data_crc = has_data_crc(self.geometry.protection);
        blocks.retain(|(_, entry)| has_data_crc || !entry.guard_unverified);
        let mut located: LocatedBlocks = place.iter().map(|_| BlockLocation::Zeroes).collect();
        for (offset, entry) in &blocks {
            located[*offset as usize] = BlockLocation::Stored(*entry);
        }
        let mut bad_blocks: Vec<BadBlock> = Vec::new();
        let buffer = self.medium.buffer(place.bytes(self.geometry.block_size) as usize);
        let data = self.collect(place, &self.pieces(place, &located), buffer, &mut bad_blocks).await.freeze();
        blocks.retain_mut(|(offset, entry)| {
            let block = &data[(*offset as usize) << shift..(*offset as usize + 1) << shift];
            if self.mutation.is(Mutation::MoveUnchecked) {
                // An injected fault: the data are sealed again whatever they are.
                self.seal_anew(entry, block);
                return true;
            }
            let is_good = bad_blocks.iter().all(|bad_block| bad_block.lba != entry.lba)
                && data_match(entry, self.geometry.protection, block);
            if !is_good {
                tracing::warn!(lba = entry.lba.get(), "block not moved: its data do not match its map entry");
                self.upkeep.count(|counts| counts.blocks_unfit += 1);
            }
            is_good
        });
        (blocks, data)
    }

    /// Writes blocks to their new physical blocks, and puts map entries into the memtable for those that were not
    /// written meanwhile.
    async fn write_moved(
        &self,
        group: u64,
        place: Extent,
        blocks: &[Block],
        data: &Slice,
        taken: Allocation<'_>,
    ) -> Result<(), Error> {
        let shift = self.geometry.block_size.shift();
        let pbns: Vec<u32> = taken.runs().iter().flat_map(|&(start, len)| start..start + len).collect();
        let targets: Vec<(u32, u32)> = blocks.iter().zip(&pbns).map(|(block, pbn)| (block.0, *pbn)).collect();
        let follows = |a: &(u32, u32), b: &(u32, u32)| a.0 + 1 == b.0 && a.1 + 1 == b.1;
        let writes = targets.chunk_by(follows).map(|run| {
            let (from, to) = ((run[0].0 as usize) << shift, (run[0].0 as usize + run.len()) << shift);
            self.medium.write(self.pbn_offset(group, run[0].1), data.slice(from..to))
        });
        if let Err(error) = join_all(writes).await.into_iter().collect::<Result<(), MediumError>>() {
            taken.release();
            return Err(error.into());
        }
        let is_here = |(_, entry): &Block| self.stored_entry_now(entry.lba).is_some();
        while !blocks.iter().all(is_here) {
            self.locate(place).await?;
        }
        taken.commit();
        let entries = blocks.iter().zip(pbns).map(|((_, read), pbn)| (MapEntry { pbn, ..*read }, read.pbn));
        let moved =
            entries.map(|(entry, from)| Pending { moved_from: Some(from), ..Pending::new(group, entry.into(), 0) });
        self.enter(moved).noted().await
    }

    /// An injected fault: a map entry is made to fit the data.
    fn seal_anew(&self, entry: &mut MapEntry, block: &[u8]) {
        let (size, format) = (self.geometry.block_size, self.geometry.protection);
        let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: entry.lba.get() };
        let sealed = Sealed::seal(Slice::copy_from(block), size, format, &tags);
        self.fill_tuple(entry, sealed.iter().next().expect("one block was sealed"), sealed.has_verified_guards());
    }
}

/// The number of fragments of the blocks.
fn fragments_of(blocks: &[Block]) -> u32 {
    let follows = |a: &Block, b: &Block| a.0 + 1 == b.0 && a.1.pbn + 1 == b.1.pbn;
    blocks.chunk_by(follows).count() as u32
}

/// The blocks that are not in their home position.
fn misplaced_of(map: &FreeMap, extent: u32, blocks: &[Block]) -> Vec<Block> {
    blocks.iter().filter(|(_, entry)| !map.is_home(extent, entry.pbn)).copied().collect()
}
