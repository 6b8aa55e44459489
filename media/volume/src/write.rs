//! Writes.

use futures_util::future::join_all;
use sealblock_block::{Clock, Durability, Error, Medium, MediumError, Outcome, Response};
use sealblock_integrity::{GuardKind, PiFormat, Sealed, Tuple, guard};
use sealblock_units::Extent;

use crate::block_allocator::Taken;
use crate::format::{MapEntry, MapEntryKind};
use crate::free_map::Run;
use crate::open::Mutation;
use crate::volume::{State, Volume};

/// Commits that a long write waits for at most, so that it has a place of its own.
const MOST_WAITS: u32 = 4;

impl<M: Medium, C: Clock> Volume<M, C> {
    pub(crate) async fn write(&self, extent: Extent, data: &Sealed, durability: Durability) -> Outcome {
        self.store(extent, data).await?;
        match durability {
            Durability::Volatile => Ok(Response::Done),
            Durability::ForceUnitAccess => self.flush().await,
        }
    }

    /// Writes blocks to free slots and puts their records into the overlay.
    pub(crate) async fn store(&self, extent: Extent, data: &Sealed) -> Result<(), Error> {
        let _change = self.begin_change()?;
        let mut from = 0;
        for (zone, piece) in self.layout.group_pieces(extent) {
            if piece == extent {
                return self.store_in_zone(zone, extent, data).await;
            }
            let blocks = piece.len() as usize;
            self.store_in_zone(zone, piece, &data.slice(from, blocks)).await?;
            from += blocks;
        }
        Ok(())
    }

    async fn store_in_zone(&self, zone: u64, extent: Extent, data: &Sealed) -> Result<(), Error> {
        let taken = self.allocate(zone, extent).await?;
        let runs = taken.runs();
        let shift = self.geometry.block_size.shift();
        let written = match runs {
            [(slot, _)] => self.medium.write(self.slot_offset(zone, *slot), data.data().clone()).await,
            _ => {
                let mut at = 0;
                let writes = runs.iter().map(|&(slot, blocks)| {
                    let bytes = (blocks as usize) << shift;
                    at += bytes;
                    self.medium.write(self.slot_offset(zone, slot), data.data().slice(at - bytes..at))
                });
                join_all(writes).await.into_iter().collect::<Result<(), MediumError>>()
            }
        };
        if let Err(error) = written {
            // Every write has ended, and no record names the slots.
            taken.give_back();
            return Err(error.into());
        }
        self.record(zone, extent, data, runs);
        taken.keep();
        Ok(())
    }

    /// Takes slots for an extent of a zone; waits for commits to free some when there are too few.
    async fn allocate(&self, zone: u64, extent: Extent) -> Result<Taken<'_>, Error> {
        self.load_zone(zone).await?;
        let (first, count) = (self.index_in_zone(extent.start()), extent.len() as u32);
        // Without a line, many that want much would take whatever becomes free before one that wants little is woken.
        let mut place = (!self.slots.queue.is_empty(zone)).then(|| self.slots.queue.join(zone));
        if let Some(place) = &place {
            place.first().await;
        }
        let mut waits = 0;
        loop {
            self.check_writable()?;
            // A long write waits for a commit that may make room for it in one piece.
            let is_tight = || {
                waits < MOST_WAITS
                    && self.slots.with(zone, |map| map.is_tight(count, self.memtable.len())) == Some(true)
            };
            if !is_tight()
                && self.memtable.active_len() < self.commits.max_uncommitted
                && let Some(taken) = self.slots.take(zone, first, count)
            {
                self.request_early_commit(zone);
                return Ok(taken);
            }
            let _place = place.get_or_insert_with(|| self.slots.queue.join(zone));
            let since = self.commits.ended.get();
            let _starved = self.commits.starve(self.memtable.active_len() > 0);
            // Looked at anew each time: what makes it tight ends with a commit that may have been under way already.
            let room = || {
                !is_tight()
                    && self.slots.free(zone) >= count
                    && self.memtable.active_len() < self.commits.max_uncommitted
            };
            self.slots
                .freed
                .wait_until(|| room() || self.commits.ended.get() != since || self.state.get() != State::Open)
                .await;
            waits += 1;
            if let Some(error) = self.commits.error_since(since) {
                return Err(error);
            }
        }
    }

    /// Asks for a commit before free slots or room for records run out, so that writers need not wait for one, and before
    /// extents run out of spare slots at home. Not before it would free a good part of the slots: some may be out of
    /// use for good, named by damaged records.
    pub(crate) fn request_early_commit(&self, zone: u64) {
        let open = self.memtable.active_len();
        let spare = self.layout.spare_blocks(zone) as u32;
        let slots_low = self.slots.free(zone) < spare / 4 * 3 && open >= spare as usize / 8;
        if slots_low || open * 2 >= self.commits.max_uncommitted {
            self.commits.request_space();
        }
    }

    /// Puts the records of written blocks into the overlay, giving up the slots of records they replace there.
    fn record(&self, zone: u64, extent: Extent, data: &Sealed, runs: &[Run]) {
        let slots = runs.iter().flat_map(|&(start, len)| start..start + len);
        for ((index, lba), slot) in extent.iter().enumerate().zip(slots) {
            let mut record = MapEntry {
                lba,
                kind: MapEntryKind::Stored,
                pbn: slot,
                generation: 0,
                tuple: [0; 16],
                guard_unverified: false,
            };
            self.fill_tuple(&mut record, data, index);
            self.replace(zone, record, false);
        }
        self.commits.schedule();
    }

    /// Fills in the tuple of a record from the block with this index in `data`.
    pub(crate) fn fill_tuple(&self, record: &mut MapEntry, data: &Sealed, index: usize) {
        let bytes = self.geometry.block_size.bytes();
        let block = &data.data()[index * bytes..(index + 1) * bytes];
        if let Some(format) = self.geometry.protection {
            let tuple_bytes = format.tuple_bytes();
            let tags = &data.tags()[index * tuple_bytes..(index + 1) * tuple_bytes];
            record.tuple[..tuple_bytes].copy_from_slice(tags);
            record.guard_unverified = !data.has_verified_guards() && guard_is_off(format, tags, block);
        }
        if strong_check_due(self.geometry.protection) {
            record.set_data_crc(guard::crc32c(block));
        }
    }

    /// Puts a record into the overlay. A slot named only by the record it replaces there is given up at once: that
    /// record was never durable.
    pub(crate) fn replace(&self, zone: u64, record: MapEntry, punch: bool) {
        if self.mutation == Mutation::ReuseEarly {
            self.retire_durable_early(zone, &record);
        }
        if let Some(old) = self.memtable.put(record).filter(|old| old.kind == MapEntryKind::Stored) {
            self.slots.defer_free(zone, old.pbn, punch);
        }
    }

    /// A fault put in on purpose: the slot of the durable record is given up before the new record is durable.
    fn retire_durable_early(&self, zone: u64, record: &MapEntry) {
        if let Some(old) = self.memtable.get(record.lba).is_none().then(|| self.durable(record.lba)).flatten()
            && old.kind == MapEntryKind::Stored
        {
            self.slots.defer_free(zone, old.pbn, false);
        }
    }

    fn durable(&self, lba: sealblock_units::Lba) -> Option<MapEntry> {
        match self.entry_now(lba)? {
            crate::map_page::MapLookup::Mapped(record) => Some(record),
            _ => None,
        }
    }
}

/// Whether a record of this format has a CRC-32C of the data besides its tuple: where the guard is short or missing.
fn strong_check_due(format: Option<PiFormat>) -> bool {
    format.is_none_or(|format| matches!(format.guard(), GuardKind::Crc16 | GuardKind::IpChecksum))
}

/// Whether a host's guard does not match the data, which it may do where it asked for no check.
fn guard_is_off(format: PiFormat, tags: &[u8], data: &[u8]) -> bool {
    !strong_check_due(Some(format)) && Tuple::read(format, tags).guard != guard::compute(format.guard(), data)
}
