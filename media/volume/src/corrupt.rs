//! Damage on purpose, for tests and for experiments with a stack.
//!
//! Each kind leaves the volume as a fault of the medium would, below everything that keeps it consistent.

use std::rc::Rc;

use sealblock_block::{Clock, Error, Medium};
use sealblock_integrity::{PiFormat, Sealed, Tags, Tuple};
use sealblock_runtime_memory::Buffer;
use sealblock_units::Lba;

use crate::format::{MAP_ENTRY_BYTES, MapEntry, MapEntryKind};
use crate::map::map_page::{MapLookup, MapPage};
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
    /// The last write of the block is undone: it gets an older block whose tags match it.
    LostWrite,
    /// A write meant for another block lands here, with tags that match its data.
    Misdirected,
}

/// Why a block cannot be damaged.
#[derive(Debug, thiserror::Error)]
pub enum CorruptionError {
    /// The block is past the end.
    #[error("block {lba} is past the last block, {last}")]
    Range {
        /// The block.
        lba: Lba,
        /// The last block of the volume.
        last: u64,
    },
    /// The block has no data.
    #[error("block {0} holds no data: write it first")]
    Empty(Lba),
    /// The block is damaged already.
    #[error("block {0} is damaged already")]
    Damaged(Lba),
    /// Without protection information, blocks have no such field.
    #[error("the volume has no protection information, so its blocks have no such field")]
    Unprotected,
    /// The volume has one block, so no other write can be misdirected to it.
    #[error("the volume has only one block")]
    Single,
    /// The volume failed.
    #[error("{0}")]
    Volume(#[from] Error),
}

impl CorruptionError {
    /// The same of a block that is called `lba` where the volume is a part of something.
    #[must_use]
    pub fn at(self, lba: Lba) -> CorruptionError {
        match self {
            CorruptionError::Empty(_) => CorruptionError::Empty(lba),
            CorruptionError::Damaged(_) => CorruptionError::Damaged(lba),
            CorruptionError::Range { last, .. } => CorruptionError::Range { lba, last },
            other => other,
        }
    }
}

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Damages a block that has been written. Close the volume afterwards.
    ///
    /// # Errors
    /// When the block cannot be damaged this way; the volume is unchanged then.
    pub async fn damage(&self, lba: Lba, kind: CorruptionKind) -> Result<(), CorruptionError> {
        if lba.get() >= self.geometry.capacity_blocks {
            return Err(CorruptionError::Range { lba, last: self.geometry.capacity_blocks - 1 });
        }
        self.check_writable()?;
        self.flush().await?;
        // The damage is done on the medium, so everything must be written first.
        self.checkpoint(false).await?;
        let entry = self.stored(lba).await?;
        let protection = || self.geometry.protection.ok_or(CorruptionError::Unprotected);
        match kind {
            CorruptionKind::Data => {
                let mut data = self.stored_data(&entry).await?;
                data[0] = data[0].wrapping_add(1);
                self.put_stored_data(&entry, data).await?;
            }
            CorruptionKind::Guard => {
                self.corrupt_tuple(&entry, protection()?, |t| t.guard = t.guard.wrapping_add(1)).await?
            }
            CorruptionKind::RefTag => {
                self.corrupt_tuple(&entry, protection()?, |t| t.ref_tag = t.ref_tag.wrapping_add(1)).await?;
            }
            CorruptionKind::AppTag => {
                // Not FFFFh, which disables checks.
                self.corrupt_tuple(&entry, protection()?, |t| t.app_tag = (t.app_tag + 1) % 0x8000).await?;
            }
            CorruptionKind::LostWrite => self.lose_write(&entry).await?,
            CorruptionKind::Misdirected => self.misdirect(&entry).await?,
        }
        Ok(())
    }

    async fn stored(&self, lba: Lba) -> Result<MapEntry, CorruptionError> {
        match self.held(lba).await?.1 {
            MapLookup::Mapped(entry) if entry.kind == MapEntryKind::Stored && self.layout.holds(&entry) => Ok(entry),
            MapLookup::Mapped(_) | MapLookup::Unwritten => Err(CorruptionError::Empty(lba)),
            MapLookup::Stale { .. } | MapLookup::Damaged(_) | MapLookup::Unreadable => {
                Err(CorruptionError::Damaged(lba))
            }
        }
    }

    /// The page of a block, and the block's map entry in it.
    async fn held(&self, lba: Lba) -> Result<(Rc<MapPage>, MapLookup), CorruptionError> {
        let (number, index) = self.block_map.locate(lba);
        let page = self.block_map.page(&self.medium, number).await.map_err(Error::from)?;
        let lookup = page.lookup(index, lba, self.seed);
        Ok((page, lookup))
    }

    async fn stored_data(&self, entry: &MapEntry) -> Result<Buffer, CorruptionError> {
        let offset = self.pbn_offset(self.layout.group_of(entry.lba), entry.pbn);
        let buffer = self.medium.buffer(self.geometry.block_size.bytes());
        let (read, data) = self.medium.read(offset, buffer).await;
        read.map_err(Error::from)?;
        Ok(data)
    }

    async fn put_stored_data(&self, entry: &MapEntry, data: Buffer) -> Result<(), CorruptionError> {
        let offset = self.pbn_offset(self.layout.group_of(entry.lba), entry.pbn);
        Ok(self.medium.write(offset, data.freeze()).await.map_err(Error::from)?)
    }

    /// Changes the tuple but no checksum of the data, as a flipped bit would.
    async fn corrupt_tuple(
        &self,
        entry: &MapEntry,
        format: PiFormat,
        change: impl FnOnce(&mut Tuple),
    ) -> Result<(), CorruptionError> {
        let (page, _) = self.held(entry.lba).await?;
        let mut raw = page.raw(self.block_map.locate(entry.lba).1);
        let mut tuple = Tuple::read(format, &raw[..format.tuple_bytes()]);
        change(&mut tuple);
        tuple.write(format, &mut raw[..format.tuple_bytes()]);
        self.put_entry(entry.lba, raw).await
    }

    /// Replaces a block's map entry, and keeps the generation of its page.
    async fn put_entry(&self, lba: Lba, bytes: [u8; MAP_ENTRY_BYTES]) -> Result<(), CorruptionError> {
        Ok(self.block_map.write_raw(&self.medium, lba, bytes).await.map_err(Error::from)?)
    }

    async fn lose_write(&self, entry: &MapEntry) -> Result<(), CorruptionError> {
        let mut data = self.stored_data(entry).await?;
        // The previous data are gone, so any block that differs from the current one serves as the older block.
        data.iter_mut().for_each(|byte| *byte = !*byte);
        let generation = if entry.generation > 1 { entry.generation - 1 } else { u16::MAX };
        let older = self.sealed_entry(entry.lba, entry.pbn, generation, &data);
        self.put_stored_data(entry, data).await?;
        self.put_entry(entry.lba, older.encode(self.seed)).await
    }

    async fn misdirect(&self, entry: &MapEntry) -> Result<(), CorruptionError> {
        let lba = entry.lba;
        let other = if lba.get() > 0 { lba.get() - 1 } else { 1 };
        if other >= self.geometry.capacity_blocks {
            return Err(CorruptionError::Single);
        }
        let mut data = self.stored_data(entry).await?;
        data.iter_mut().for_each(|byte| *byte = byte.rotate_left(1) ^ 0x5a);
        let landed = self.sealed_entry(Lba::new(other), entry.pbn, entry.generation, &data);
        self.put_stored_data(entry, data).await?;
        self.put_entry(lba, landed.encode(self.seed)).await
    }

    /// The map entry that a write of `data` to `lba` would have made.
    fn sealed_entry(&self, lba: Lba, pbn: u32, generation: u16, data: &Buffer) -> MapEntry {
        let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: lba.get() };
        let data = Buffer::copy_from(data).freeze();
        let sealed = Sealed::seal(data, self.geometry.block_size, self.geometry.protection, &tags);
        let mut entry = MapEntry { kind: MapEntryKind::Stored, pbn, generation, ..MapEntry::deallocated(lba) };
        let block = sealed.iter().next().expect("one block was sealed");
        self.fill_tuple(&mut entry, block, sealed.has_verified_guards());
        entry
    }
}
