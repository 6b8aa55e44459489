//! Relocation: the blocks of an extent that small overwrites have scattered are brought together again.
//!
//! A move is a read and a write of the volume's own. The data are checked against their record, the strongest check that
//! it has; a block that does not check stays where it is. They are written to free slots, and a record goes into
//! the overlay that differs from the old one in its slot alone: nothing is sealed. It does so only if the block's
//! record is still the one that was read, so any write in between wins. From there on it is like any other record:
//! made durable by a commit, and only then is the old slot free.

use futures_util::future::join_all;
use sealblock_block::{BadBlock, Clock, Error, Medium, MediumError};
use sealblock_integrity::{Sealed, Tags};
use sealblock_runtime_memory::Slice;
use sealblock_units::{Extent, Lba};

use crate::block_allocator::Taken;
use crate::format::{MapEntry, MapEntryKind};
use crate::free_map::FreeMap;
use crate::lookup::{BlockLocation, LocatedBlocks, data_match};
use crate::map_page::MapLookup;
use crate::open::Mutation;
use crate::upkeep::Quiet;
use crate::volume::{State, Volume};

/// A block that is to be moved: its offset in the extent, and its record.
type Block = (u32, MapEntry);

/// How a step ended.
#[derive(PartialEq, Eq)]
enum Step {
    /// The extent is as it should be, or cannot be made so.
    Done,
    /// There are no free slots to move it to.
    NoRoom,
    /// A request has come.
    Disturbed,
}

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Brings together the extents of zones that were written to, one after the other, while no request comes. Whether it came
    /// to the end: nothing is left that could be moved now.
    pub(crate) async fn relocate_all(&self, quiet: &Quiet<'_>) -> bool {
        for zone in self.slots.zones() {
            let (mut from, mut waited) = (0, false);
            while let Some(extent) = self.slots.with(zone, |map| map.scattered(from)).flatten() {
                if !quiet.lasts() || self.state.get() != State::Open {
                    return false;
                }
                match self.relocate(zone, extent, quiet).await {
                    Ok(Step::Done) => (from, waited) = (extent + 1, false),
                    Ok(Step::NoRoom) if !waited && !self.memtable.is_empty() => {
                        self.wait_for_commit().await;
                        waited = true;
                    }
                    Ok(Step::NoRoom) => break,
                    Ok(Step::Disturbed) => return false,
                    Err(error) => {
                        tracing::warn!(%error, "blocks were not moved");
                        self.slots.with(zone, |map| map.set_pieces(extent, 0));
                    }
                }
            }
        }
        quiet.lasts()
    }

    /// Brings one extent of a zone together.
    async fn relocate(&self, zone: u64, extent: u32, quiet: &Quiet<'_>) -> Result<Step, Error> {
        let _change = self.begin_change()?;
        let place = self.extent_of(zone, extent)?;
        let (blocks, _reading) = loop {
            // Slots in use now stay so until this is dropped, so a record with the same slot is about the same write until then.
            let (_, reading) = self.locate(place).await?;
            if let Some(blocks) = self.stored_now(place) {
                break (blocks, reading);
            }
        };
        let pieces = pieces_of(&blocks);
        let (strays, allowed, has_new_home) = self
            .slots
            .with(zone, |map| (strays_of(map, extent, &blocks), map.pieces_allowed(), map.has_new_home()))
            .unwrap_or_default();
        let (chosen, anew) = match pieces > allowed && has_new_home {
            true => (blocks, true),
            false => (strays, false),
        };
        if chosen.is_empty() {
            return Ok(if pieces > allowed { Step::NoRoom } else { self.done(zone, extent) });
        }
        let (chosen, data) = self.read_checked(place, chosen).await;
        if !quiet.lasts() {
            return Ok(Step::Disturbed);
        }
        let offsets: Vec<u32> = chosen.iter().map(|(offset, _)| *offset).collect();
        let taken = self.slots.take_by(zone, |map| match anew {
            _ if offsets.is_empty() => None,
            true => map.take_new_home(extent, &offsets),
            false => map.take_at_home(extent, &offsets),
        });
        let Some(taken) = taken else {
            // Where nothing checks, nothing is to be done until somebody writes.
            return Ok(if offsets.is_empty() { self.done(zone, extent) } else { Step::NoRoom });
        };
        self.put_down(zone, place, &chosen, &data, taken).await?;
        Ok(self.done(zone, extent))
    }

    /// Notes that an extent needs no move.
    fn done(&self, zone: u64, extent: u32) -> Step {
        self.slots.with(zone, |map| map.set_pieces(extent, 0));
        self.request_early_commit(zone);
        Step::Done
    }

    /// The blocks of an extent of a zone.
    fn extent_of(&self, zone: u64, extent: u32) -> Result<Extent, Error> {
        let size = u64::from(self.slots.with(zone, |map| map.extent_blocks()).unwrap_or(1));
        let place = self.layout.block_group(zone).expect("zones come from blocks of the volume");
        let first = u64::from(extent) * size;
        let blocks = size.min(place.blocks - first);
        Ok(Extent::from_raw(place.first.get() + first, blocks).expect("extents lie in their zones"))
    }

    /// The record of a block, if it is stored and its record is beyond doubt; nothing at all when its page is not in memory.
    pub(crate) fn record_now(&self, lba: Lba) -> Option<Option<MapEntry>> {
        let record = match self.memtable.get(lba) {
            Some(record) => Some(record),
            None => match self.entry_now(lba)? {
                MapLookup::Mapped(record) if self.plausible(&record) => Some(record),
                _ => None,
            },
        };
        Some(record.filter(|record| record.kind == MapEntryKind::Stored))
    }

    /// The blocks of an extent that are stored, from memory alone; nothing when a page is not there.
    fn stored_now(&self, place: Extent) -> Option<Vec<Block>> {
        let records: Option<Vec<Option<MapEntry>>> = place.iter().map(|lba| self.record_now(lba)).collect();
        Some((0..).zip(records?).filter_map(|(offset, record)| Some((offset, record?))).collect())
    }

    /// Reads blocks of an extent, at their places in a buffer for all of it. Leaves out those that do not check, or that cannot
    /// be checked because their guards were made wrong.
    async fn read_checked(&self, place: Extent, mut blocks: Vec<Block>) -> (Vec<Block>, Slice) {
        let shift = self.geometry.block_size.shift();
        blocks.retain(|(_, record)| !record.guard_unverified);
        let mut located: LocatedBlocks = place.iter().map(|_| BlockLocation::Zeroes).collect();
        for (offset, record) in &blocks {
            located[*offset as usize] = BlockLocation::Stored { slot: record.pbn, tuple: record.tuple };
        }
        let mut faults: Vec<BadBlock> = Vec::new();
        let buffer = self.medium.buffer(place.bytes(self.geometry.block_size) as usize);
        let data = self.collect(place, &self.pieces(place, &located), buffer, &mut faults).await.freeze();
        blocks.retain_mut(|(offset, record)| {
            let block = &data[(*offset as usize) << shift..(*offset as usize + 1) << shift];
            if self.mutation == Mutation::MoveUnchecked {
                // A fault put in on purpose: whatever was found is sealed anew.
                self.seal_anew(record, block);
                return true;
            }
            let is_good = faults.iter().all(|fault| fault.lba != record.lba)
                && data_match(record, self.geometry.protection, block);
            if !is_good {
                tracing::warn!(lba = record.lba.get(), "a block does not check, and is not moved");
                self.upkeep.count(|counts| counts.blocks_unfit += 1);
            }
            is_good
        });
        (blocks, data)
    }

    /// Writes blocks to the slots taken for them, and puts their records into the overlay where nobody has written meanwhile.
    async fn put_down(
        &self,
        zone: u64,
        place: Extent,
        blocks: &[Block],
        data: &Slice,
        taken: Taken<'_>,
    ) -> Result<(), Error> {
        let shift = self.geometry.block_size.shift();
        let slots: Vec<u32> = taken.runs().iter().flat_map(|&(start, len)| start..start + len).collect();
        let targets: Vec<(u32, u32)> = blocks.iter().zip(&slots).map(|(block, slot)| (block.0, *slot)).collect();
        let follows = |a: &(u32, u32), b: &(u32, u32)| a.0 + 1 == b.0 && a.1 + 1 == b.1;
        let writes = targets.chunk_by(follows).map(|run| {
            let (from, to) = ((run[0].0 as usize) << shift, (run[0].0 as usize + run.len()) << shift);
            self.medium.write(self.slot_offset(zone, run[0].1), data.slice(from..to))
        });
        if let Err(error) = join_all(writes).await.into_iter().collect::<Result<(), MediumError>>() {
            taken.give_back();
            return Err(error.into());
        }
        let is_here = |(_, record): &Block| self.record_now(record.lba).is_some();
        while !blocks.iter().all(is_here) {
            self.locate(place).await?;
        }
        taken.keep();
        for ((_, read), slot) in blocks.iter().zip(slots) {
            let now = self.record_now(read.lba).flatten();
            let is_same = now.is_some_and(|now| now.pbn == read.pbn) || self.mutation == Mutation::MoveOverNewer;
            if is_same {
                self.replace(zone, MapEntry { pbn: slot, ..*read }, false);
                self.upkeep.count(|counts| counts.blocks_moved += 1);
            } else {
                self.slots.give_back(zone, &[(slot, 1)]);
            }
        }
        self.commits.schedule();
        Ok(())
    }

    /// A fault put in on purpose: a record is made to fit the data.
    fn seal_anew(&self, record: &mut MapEntry, block: &[u8]) {
        let (size, format) = (self.geometry.block_size, self.geometry.protection);
        let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: record.lba.get() };
        self.fill_tuple(record, &Sealed::seal(Slice::copy_from(block), size, format, &tags), 0);
    }

    /// Asks for a commit and waits for its end.
    async fn wait_for_commit(&self) {
        let since = self.commits.ended.get();
        self.commits.request_space();
        self.slots.freed.wait_until(|| self.commits.ended.get() != since || self.state.get() != State::Open).await;
    }
}

/// In how many pieces blocks lie.
fn pieces_of(blocks: &[Block]) -> u32 {
    let follows = |a: &Block, b: &Block| a.0 + 1 == b.0 && a.1.pbn + 1 == b.1.pbn;
    blocks.chunk_by(follows).count() as u32
}

/// The blocks that do not lie at home.
fn strays_of(map: &FreeMap, extent: u32, blocks: &[Block]) -> Vec<Block> {
    blocks.iter().filter(|(_, record)| !map.is_home(extent, record.pbn)).copied().collect()
}
