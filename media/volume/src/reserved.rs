//! The reserved area: small durable areas beside the blocks, for the layers above: a group label and the state of scrubs.
//!
//! Each area has two places, written in turn, so one of them always holds something whole; and each place is there twice,
//! behind a superblock and in the tail, so that the loss of either end of the volume costs nothing. Bitmap pages lie behind
//! the log and are written in place; what a torn one holds is for its reader to find out.

use std::cell::{Cell, RefCell};

use sealblock_block::{Clock, Condition, Error, ErrorKind, Medium, ReservedArea};
use sealblock_runtime_memory::Slice;

use crate::format::{BITMAP_PAGE_BYTES, RESERVED_HEAD_BYTES, ReservedCopy};
use crate::volume::Volume;

/// What is known of the areas, and who may write them: one at a time.
#[derive(Default)]
pub(crate) struct ReservedAreas {
    write_seqs: [Cell<Option<u64>>; ReservedArea::ALL.len()],
    writing: Cell<bool>,
    written: Condition,
    /// What the areas hold, once they have been read or written.
    held: RefCell<[Option<Slice>; ReservedArea::ALL.len()]>,
}

/// The lock on the reserved area: released when dropped, also with a request that is dropped half-way.
struct Writing<'a>(&'a ReservedAreas);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.writing.set(false);
        self.0.written.notify();
    }
}

impl ReservedAreas {
    async fn lock(&self) -> Writing<'_> {
        self.written.wait_until(|| !self.writing.get()).await;
        self.writing.set(true);
        Writing(self)
    }
}

impl<M: Medium, C: Clock> Volume<M, C> {
    /// What an area holds; empty when nothing was ever written to it.
    pub(crate) async fn read_reserved(&self, area: ReservedArea) -> Result<Slice, Error> {
        if let ReservedArea::Bitmap { page } = area {
            let (read, bytes) =
                self.medium.read(self.bitmap_page(page)?, self.medium.buffer(BITMAP_PAGE_BYTES as usize)).await;
            read?;
            return Ok(bytes.freeze());
        }
        let _alone = self.reserved.lock().await;
        self.load_reserved(area).await
    }

    async fn load_reserved(&self, area: ReservedArea) -> Result<Slice, Error> {
        if let Some(held) = &self.reserved.held.borrow()[area.index()] {
            return Ok(held.clone());
        }
        let (mut write_seqs, mut failed) = ([None; 4], [0; 2]);
        let mut newest: Option<ReservedCopy> = None;
        for (at, offset) in [0, 1].into_iter().flat_map(|turn| self.layout.reserved_offsets(area, turn)).enumerate() {
            let room = self.medium.buffer(area.max_bytes() + RESERVED_HEAD_BYTES);
            let (read, bytes) = self.medium.read(offset, room).await;
            // An unreadable copy is no more than a damaged one. Two copies of one place that are both unreadable may have been
            // the newest, so the read fails.
            failed[at / 2] += usize::from(read.is_err());
            if let (Err(error), 2) = (&read, failed[at / 2]) {
                let reason = format!("cannot read either copy of the reserved area: {error}");
                return Err(ErrorKind::Media { reason }.into());
            }
            let found = read.ok().and_then(|()| ReservedCopy::decode(&bytes, area, self.seed));
            // A copy in the place of the other parity was misdirected or forged.
            let Some(found) = found.filter(|found| found.write_seq % 2 == at as u64 / 2) else { continue };
            write_seqs[at] = Some(found.write_seq);
            if newest.as_ref().is_none_or(|newest| newest.write_seq < found.write_seq) {
                newest = Some(found);
            }
        }
        if let Some(newest) = &newest {
            // One that is whole and older was not reached by the last write, which a crash may do; it is no loss.
            let twins = &write_seqs[(newest.write_seq % 2 * 2) as usize..][..2];
            self.block_map
                .groups
                .lost_copies()
                .add(twins.iter().filter(|write_seq| write_seq.is_none()).count() as u64);
        }
        self.reserved.write_seqs[area.index()].set(Some(newest.as_ref().map_or(0, |newest| newest.write_seq)));
        let held = Slice::copy_from(newest.as_ref().map_or(&[][..], |newest| &newest.bytes));
        self.reserved.held.borrow_mut()[area.index()] = Some(held.clone());
        Ok(held)
    }

    /// Where a bitmap page lies.
    fn bitmap_page(&self, page: u32) -> Result<u64, Error> {
        let limit = u64::from(self.layout.bitmap_pages());
        if u64::from(page) >= limit {
            return Err(ErrorKind::Limit { what: "bitmap page", limit, actual: u64::from(page) }.into());
        }
        Ok(self.layout.bitmap_offset() + u64::from(page) * BITMAP_PAGE_BYTES)
    }

    /// Replaces what an area holds; durable in the end.
    pub(crate) async fn write_reserved(&self, area: ReservedArea, bytes: &Slice) -> Result<(), Error> {
        let _change = self.begin_change()?;
        if let ReservedArea::Bitmap { page } = area {
            let mut buffer = self.medium.buffer(BITMAP_PAGE_BYTES as usize);
            buffer.fill(0);
            buffer[..bytes.len()].copy_from_slice(bytes);
            {
                let _in_order = self.reserved.lock().await;
                // As below: a dropped write is still in flight, and could land on this one.
                self.medium.drain().await;
                self.medium.write(self.bitmap_page(page)?, buffer.freeze()).await?;
            }
            return self.medium.sync().await.map_err(|error| self.fail(&error));
        }
        let _alone = self.reserved.lock().await;
        // A dropped write is still in flight, and could land on the same copy.
        self.medium.drain().await;
        if self.reserved.write_seqs[area.index()].get().is_none() {
            self.load_reserved(area).await?;
        }
        let write_seq = self.reserved.write_seqs[area.index()].get().unwrap_or(0) + 1;
        let copy = ReservedCopy { write_seq, bytes: bytes.to_vec() };
        let encoded = copy.encode(area, self.seed);
        let sector = self.layout.sector_bytes() as usize;
        let mut buffer = self.medium.buffer(encoded.len().next_multiple_of(sector));
        buffer.fill(0);
        buffer[..encoded.len()].copy_from_slice(&encoded);
        let (bytes_written, [start, tail]) = (buffer.freeze(), self.layout.reserved_offsets(area, write_seq));
        self.medium.write(start, bytes_written.clone()).await?;
        if let Err(error) = self.medium.write(tail, bytes_written).await {
            tracing::warn!(%error, "cannot write the second copy of the reserved area");
        }
        // The sync makes other writes durable, too, or loses them; the volume must know.
        self.medium.sync().await.map_err(|error| self.fail(&error))?;
        self.reserved.write_seqs[area.index()].set(Some(write_seq));
        self.reserved.held.borrow_mut()[area.index()] = Some(Slice::copy_from(bytes));
        Ok(())
    }
}
