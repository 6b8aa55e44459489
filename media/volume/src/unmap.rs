//! Discard, WriteZeroes and WriteUncorrectable: changes without data.

use sealblock_block::{Clock, Durability, Error, Medium, Outcome, Response};
use sealblock_integrity::{Sealed, Tags};
use sealblock_runtime_memory::Buffer;
use sealblock_units::Extent;

use crate::format::{MapEntry, MapEntryKind};
use crate::map_page::MapLookup;
use crate::volume::{State, Volume};

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Gives up blocks. They read as zeroes afterwards, and their space goes back to the medium once that is durable.
    pub(crate) async fn discard(&self, extents: &[Extent]) -> Outcome {
        for extent in extents {
            self.mark(*extent, MapEntryKind::Deallocated).await?;
        }
        Ok(Response::Done)
    }

    pub(crate) async fn write_zeroes(&self, extent: Extent, may_unmap: bool, durability: Durability) -> Outcome {
        if may_unmap {
            self.mark(extent, MapEntryKind::Deallocated).await?;
        } else {
            self.store_zeroes(extent).await?;
        }
        match durability {
            Durability::Volatile => Ok(Response::Done),
            Durability::ForceUnitAccess => self.flush().await,
        }
    }

    /// Zeroes that keep their space are blocks like any other.
    async fn store_zeroes(&self, extent: Extent) -> Result<(), Error> {
        let (size, max) = (self.geometry.block_size, self.geometry.limits.max_transfer_blocks);
        let zeroes = Buffer::zeroed(extent.bytes(size).min(max.bytes(size)) as usize).freeze();
        for piece in extent.split_aligned(max) {
            let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: piece.start().get() };
            let data = zeroes.slice(..piece.bytes(size) as usize);
            self.store(piece, &Sealed::seal(data, size, self.geometry.protection, &tags)).await?;
        }
        Ok(())
    }

    /// Makes blocks unreadable. What they held is deallocated.
    pub(crate) async fn write_uncorrectable(&self, extent: Extent, durability: Durability) -> Outcome {
        self.commits.uncorrectable.set(true);
        self.mark(extent, MapEntryKind::Uncorrectable).await?;
        match durability {
            Durability::Volatile => Ok(Response::Done),
            Durability::ForceUnitAccess => self.flush().await,
        }
    }

    /// Gives every block of an extent a map entry without data, of this kind, where it has none yet.
    ///
    /// Page by page, so that one long extent holds neither many pages nor the core for long.
    async fn mark(&self, extent: Extent, kind: MapEntryKind) -> Result<(), Error> {
        let _change = self.begin_change()?;
        for (number, piece) in self.layout.page_pieces(extent) {
            let group = self.layout.group_of(piece.start());
            self.load_group(group).await?;
            self.wait_for_room().await?;
            let _held = self.block_map.page(&self.medium, number).await?;
            for lba in piece.iter() {
                let known = match self.memtable.get(lba) {
                    Some(entry) => entry.kind == kind,
                    None => match self.lookup_cached(lba) {
                        Some(MapLookup::Unwritten) => kind == MapEntryKind::Deallocated,
                        Some(MapLookup::Mapped(entry)) => entry.kind == kind,
                        Some(MapLookup::Stale { .. } | MapLookup::Damaged(_) | MapLookup::Unreadable) | None => false,
                    },
                };
                if !known {
                    self.replace(group, MapEntry { kind, ..MapEntry::deallocated(lba) }, true);
                }
            }
            self.commits.schedule();
        }
        Ok(())
    }

    /// Waits until the memtable takes more map entries.
    async fn wait_for_room(&self) -> Result<(), Error> {
        loop {
            self.check_writable()?;
            if self.memtable.active_len() < self.commits.max_uncommitted {
                return Ok(());
            }
            let since = self.commits.ended.get();
            self.commits.request_space();
            self.allocator
                .freed
                .wait_until(|| self.commits.ended.get() != since || self.state.get() != State::Open)
                .await;
            if let Some(error) = self.commits.error_since(since) {
                return Err(error);
            }
        }
    }
}
