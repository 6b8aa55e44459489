//! Damage made on purpose, for tests and for trying out what a stack does about it.
//!
//! Each kind leaves the volume as some fault of a medium would, below everything that keeps it consistent.

use std::rc::Rc;

use sealblock_block::{Clock, Error, Medium};
use sealblock_integrity::{PiFormat, Sealed, Tags, Tuple};
use sealblock_runtime_memory::Buffer;
use sealblock_units::Lba;

use crate::format::{MapEntry, MapEntryKind};
use crate::map_page::{MapLookup, MapPage};
use crate::volume::Volume;

/// A kind of damage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CorruptionKind {
    /// The data change.
    Data,
    /// The stored guard changes.
    Guard,
    /// The stored reference tag changes.
    RefTag,
    /// The stored application tag changes.
    AppTag,
    /// The last write of the block is undone: an older block with tags that match it is put back.
    LostWrite,
    /// A write meant for another block lands here, with tags that match its data.
    Misdirected,
}

/// Why no damage can be made.
#[derive(Debug, thiserror::Error)]
pub enum DamageError {
    /// The block is past the end.
    #[error("block {lba} is past the last block, {last}")]
    Range {
        /// The block.
        lba: Lba,
        /// The last block of the volume.
        last: u64,
    },
    /// The block holds nothing that could be damaged.
    #[error("block {0} holds no data: write it first")]
    Empty(Lba),
    /// The block is damaged already.
    #[error("block {0} is damaged already")]
    Damaged(Lba),
    /// Without protection information, such damage would never be found.
    #[error("the volume has no protection information, so nothing could find this kind of damage")]
    Unprotected,
    /// The volume has one block, so no write can have been meant for another.
    #[error("the volume has only one block")]
    Single,
    /// The volume failed.
    #[error("{0}")]
    Volume(#[from] Error),
}

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Damages a block that has been written. Close the volume afterwards.
    ///
    /// # Errors
    /// When the block cannot be damaged this way; the volume is unchanged then.
    pub async fn damage(&self, lba: Lba, kind: CorruptionKind) -> Result<(), DamageError> {
        if lba.get() >= self.geometry.capacity_blocks {
            return Err(DamageError::Range { lba, last: self.geometry.capacity_blocks - 1 });
        }
        self.check_writable()?;
        self.flush().await?;
        // The damage is to what lies on the medium, so that has to be all there is.
        self.checkpoint(false).await?;
        let record = self.stored(lba).await?;
        let protection = || self.geometry.protection.ok_or(DamageError::Unprotected);
        match kind {
            CorruptionKind::Data => {
                protection()?;
                let mut data = self.slot_data(&record).await?;
                data[0] = data[0].wrapping_add(1);
                self.put_slot_data(&record, data).await?;
            }
            CorruptionKind::Guard => {
                self.damage_tuple(&record, protection()?, |t| t.guard = t.guard.wrapping_add(1)).await?
            }
            CorruptionKind::RefTag => {
                self.damage_tuple(&record, protection()?, |t| t.ref_tag = t.ref_tag.wrapping_add(1)).await?;
            }
            CorruptionKind::AppTag => {
                // Not to FFFFh, which turns checking off.
                self.damage_tuple(&record, protection()?, |t| t.app_tag = (t.app_tag + 1) % 0x8000).await?;
            }
            CorruptionKind::LostWrite => self.lose_write(&record).await?,
            CorruptionKind::Misdirected => self.misdirect(&record).await?,
        }
        Ok(())
    }

    async fn stored(&self, lba: Lba) -> Result<MapEntry, DamageError> {
        match self.held(lba).await?.1 {
            MapLookup::Mapped(record) if record.kind == MapEntryKind::Stored && self.plausible(&record) => Ok(record),
            MapLookup::Mapped(_) | MapLookup::Unwritten => Err(DamageError::Empty(lba)),
            MapLookup::Stale { .. } | MapLookup::Damaged(_) | MapLookup::Unreadable => Err(DamageError::Damaged(lba)),
        }
    }

    /// The page of a block, and what it says of the block.
    async fn held(&self, lba: Lba) -> Result<(Rc<MapPage>, MapLookup), DamageError> {
        let (number, index) = self.block_map.locate(lba);
        let page = self.block_map.page(&self.medium, number).await.map_err(Error::from)?;
        let entry = page.lookup(index, lba, self.seed);
        Ok((page, entry))
    }

    async fn slot_data(&self, record: &MapEntry) -> Result<Buffer, DamageError> {
        let offset = self.slot_offset(self.layout.group_of(record.lba), record.pbn);
        let buffer = self.medium.buffer(self.geometry.block_size.bytes());
        let (read, data) = self.medium.read(offset, buffer).await;
        read.map_err(Error::from)?;
        Ok(data)
    }

    async fn put_slot_data(&self, record: &MapEntry, data: Buffer) -> Result<(), DamageError> {
        let offset = self.slot_offset(self.layout.group_of(record.lba), record.pbn);
        Ok(self.medium.write(offset, data.freeze()).await.map_err(Error::from)?)
    }

    /// Changes the tuple and not the record's own checksum, as a bit that fell over would.
    async fn damage_tuple(
        &self,
        record: &MapEntry,
        format: PiFormat,
        change: impl FnOnce(&mut Tuple),
    ) -> Result<(), DamageError> {
        let (page, _) = self.held(record.lba).await?;
        let mut raw = page.raw(self.block_map.locate(record.lba).1);
        let mut tuple = Tuple::read(format, &raw[..format.tuple_bytes()]);
        change(&mut tuple);
        tuple.write(format, &mut raw[..format.tuple_bytes()]);
        Ok(self.block_map.write_raw(&self.medium, record.lba, raw).await.map_err(Error::from)?)
    }

    /// Puts a record in place of a block's that is whole and right in itself, under the block's present generation.
    async fn put_entry(&self, lba: Lba, planted: &MapEntry) -> Result<(), DamageError> {
        let bytes = planted.encode(self.seed);
        Ok(self.block_map.write_raw(&self.medium, lba, bytes).await.map_err(Error::from)?)
    }

    async fn lose_write(&self, record: &MapEntry) -> Result<(), DamageError> {
        let mut data = self.slot_data(record).await?;
        // What the block held before is gone, so the older block is one that differs from the present one.
        data.iter_mut().for_each(|byte| *byte = !*byte);
        let generation = if record.generation > 1 { record.generation - 1 } else { u16::MAX };
        let older = self.sealed_record(record.lba, record.lba, record.pbn, generation, &data);
        self.put_slot_data(record, data).await?;
        self.put_entry(record.lba, &older).await
    }

    async fn misdirect(&self, record: &MapEntry) -> Result<(), DamageError> {
        let lba = record.lba;
        let other = if lba.get() > 0 { lba.get() - 1 } else { 1 };
        if other >= self.geometry.capacity_blocks {
            return Err(DamageError::Single);
        }
        let mut data = self.slot_data(record).await?;
        data.iter_mut().for_each(|byte| *byte = byte.rotate_left(1) ^ 0x5a);
        let landed = self.sealed_record(Lba::new(other), Lba::new(other), record.pbn, record.generation, &data);
        self.put_slot_data(record, data).await?;
        self.put_entry(lba, &landed).await
    }

    /// A record as a write of `data` to `lba` would have made it.
    fn sealed_record(&self, lba: Lba, reference: Lba, slot: u32, generation: u16, data: &Buffer) -> MapEntry {
        let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: reference.get() };
        let data = Buffer::copy_from(data).freeze();
        let sealed = Sealed::seal(data, self.geometry.block_size, self.geometry.protection, &tags);
        let mut record = MapEntry {
            lba,
            kind: MapEntryKind::Stored,
            pbn: slot,
            generation,
            tuple: [0; 16],
            guard_unverified: false,
        };
        self.fill_tuple(&mut record, &sealed, 0);
        record
    }
}
