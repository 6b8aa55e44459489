//! The annex: room beside the blocks, for the notes of whoever stands on the volume.
//!
//! Each slot has two copies, one behind each superblock, written in turn, so one of them is always whole. Bitmap pages lie
//! behind the log and are written in place; what a torn one holds is for its reader to find out.

use std::cell::{Cell, RefCell};

use sealblock_block::{AnnexSlot, Clock, Error, Event, Failure, Medium};
use sealblock_runtime_memory::Slice;

use crate::format::{ANNEX_HEAD_BYTES, AnnexCopy, BITMAP_PAGE_BYTES, annex_offset};
use crate::volume::Volume;

/// What is known of the slots, and who may write them: one at a time.
#[derive(Default)]
pub(crate) struct Annex {
    serials: [Cell<Option<u64>>; AnnexSlot::ALL.len()],
    writing: Cell<bool>,
    written: Event,
    /// What the slots hold, once they have been read or written.
    held: RefCell<[Option<Slice>; AnnexSlot::ALL.len()]>,
}

/// Gives up the right to write, also when a request is dropped half-way.
struct Writing<'a>(&'a Annex);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.writing.set(false);
        self.0.written.notify();
    }
}

impl Annex {
    async fn lock(&self) -> Writing<'_> {
        self.written.until(|| !self.writing.get()).await;
        self.writing.set(true);
        Writing(self)
    }
}

impl<M: Medium, C: Clock> Volume<M, C> {
    /// What a slot holds; empty when nothing was ever written to it.
    pub(crate) async fn read_annex(&self, slot: AnnexSlot) -> Result<Slice, Error> {
        if let AnnexSlot::Bitmap { page } = slot {
            let (read, bytes) =
                self.medium.read(self.bitmap_page(page)?, self.medium.buffer(BITMAP_PAGE_BYTES as usize)).await;
            read?;
            return Ok(bytes.freeze());
        }
        let _alone = self.annex.lock().await;
        self.load_annex(slot).await
    }

    async fn load_annex(&self, slot: AnnexSlot) -> Result<Slice, Error> {
        if let Some(held) = &self.annex.held.borrow()[slot.index()] {
            return Ok(held.clone());
        }
        let mut newest: Option<AnnexCopy> = None;
        for copy in [0, 1] {
            let room = self.medium.buffer(slot.most_bytes() + ANNEX_HEAD_BYTES);
            let (read, bytes) = self.medium.read(annex_offset(slot, copy), room).await;
            // One unreadable copy is no more than one damaged copy; two are an error below.
            if let (Ok(()), Some(found)) = (read, AnnexCopy::decode(&bytes, slot, self.seed))
                && newest.as_ref().is_none_or(|newest| newest.serial < found.serial)
            {
                newest = Some(found);
            }
        }
        self.annex.serials[slot.index()].set(Some(newest.as_ref().map_or(0, |newest| newest.serial)));
        let held = Slice::copy_from(newest.as_ref().map_or(&[][..], |newest| &newest.bytes));
        self.annex.held.borrow_mut()[slot.index()] = Some(held.clone());
        Ok(held)
    }

    /// Where a bitmap page lies.
    fn bitmap_page(&self, page: u32) -> Result<u64, Error> {
        let limit = u64::from(self.layout.bitmap_pages());
        if u64::from(page) >= limit {
            return Err(Failure::Limit { what: "bitmap page", limit, actual: u64::from(page) }.into());
        }
        Ok(self.layout.bitmap_offset() + u64::from(page) * BITMAP_PAGE_BYTES)
    }

    /// Replaces what a slot holds; durable in the end.
    pub(crate) async fn write_annex(&self, slot: AnnexSlot, bytes: &Slice) -> Result<(), Error> {
        let _change = self.begin_change()?;
        if let AnnexSlot::Bitmap { page } = slot {
            let mut buffer = self.medium.buffer(BITMAP_PAGE_BYTES as usize);
            buffer.fill(0);
            buffer[..bytes.len()].copy_from_slice(bytes);
            {
                let _in_order = self.annex.lock().await;
                // As below: what was dropped goes on, and would land on what comes now.
                self.medium.drain().await;
                self.medium.write(self.bitmap_page(page)?, buffer.freeze()).await?;
            }
            return self.medium.sync().await.map_err(|error| self.fail(&error));
        }
        let _alone = self.annex.lock().await;
        // A write that was dropped goes on, and would land on the same copy.
        self.medium.drain().await;
        if self.annex.serials[slot.index()].get().is_none() {
            self.load_annex(slot).await?;
        }
        let serial = self.annex.serials[slot.index()].get().unwrap_or(0) + 1;
        let copy = AnnexCopy { serial, bytes: bytes.to_vec() };
        let encoded = copy.encode(slot, self.seed);
        let sector = self.layout.sector_bytes() as usize;
        let mut buffer = self.medium.buffer(encoded.len().next_multiple_of(sector));
        buffer.fill(0);
        buffer[..encoded.len()].copy_from_slice(&encoded);
        self.medium.write(annex_offset(slot, serial % 2), buffer.freeze()).await?;
        // The sync makes other writes durable, too, or loses them; the volume must know.
        self.medium.sync().await.map_err(|error| self.fail(&error))?;
        self.annex.serials[slot.index()].set(Some(serial));
        self.annex.held.borrow_mut()[slot.index()] = Some(Slice::copy_from(bytes));
        Ok(())
    }
}
