//! The block map: map pages and generations, of which those in use are cached, and the map entries to be written there.
//!
//! Pages in memory equal those on the medium. Map entries that are durable in the log but not in the block map yet are
//! patches. The number of cached pages is bounded.
//!
//! Unreadable sectors cost only the blocks whose map entries are there: a page's generations have two copies, and map
//! entries beside a lost sector are served. Such a sector is left alone, and may be readable the next time, until a map
//! entry in it changes or its block group is written. Then it is rewritten, and its lost entries are damage for good.

pub(crate) mod block_groups;
pub(crate) mod map_entries;
pub(crate) mod map_page;
pub(crate) mod memtable;
pub(crate) mod patches;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

use futures_util::future::join;
use rustc_hash::{FxHashMap, FxHashSet};
use sealblock_block::{Medium, MediumError, RangeLock};
use sealblock_units::Lba;

use crate::format::{Generations, Layout, MAP_ENTRY_BYTES, PAGE_SECTORS, PageOffsets, Seed, Superblock};
use crate::map::block_groups::BlockGroups;
use crate::map::map_page::{GENERATIONS_BIT, MapLookup, MapPage};
use crate::map::patches::Patches;
use crate::medium::lost_copies::LostCopies;
use crate::medium::{padded, read_sectors};
use crate::options::{Mutation, OpenOptions};

/// The number of pages that are considered for eviction per page read, so that many pages in use do not cost quadratic
/// time.
const MAX_EVICTION_PROBES: usize = 32;
/// The minimum number of cached pages.
const MIN_CACHED_PAGES: usize = 8;
/// The minimum memory for map entries that the block map does not have yet.
const MIN_PATCHES_BYTES: usize = 64 << 10;
/// Bytes of pages that are read at once if all pages of a block group are read.
const SCAN_BYTES: u64 = 1 << 20;

/// The block map of a volume.
pub(crate) struct BlockMap {
    layout: Layout,
    seed: Seed,
    mutation: Mutation,
    /// Which block groups are initialized.
    pub groups: BlockGroups,
    /// The map entries that the block map does not have yet.
    pub patches: Patches,
    /// The page of every uninitialized block group.
    unwritten: Rc<MapPage>,
    pages: RefCell<FxHashMap<u64, Rc<MapPage>>>,
    order: RefCell<VecDeque<u64>>,
    /// Pages that are being read, so that each is read once.
    loading: RangeLock,
    /// Sectors with map entries that stay lost even if the medium returns them again, by page: the physical blocks that
    /// they name may have been reused.
    lost_sectors: RefCell<FxHashMap<u64, u32>>,
    /// Pages with a lost or old copy of the generations.
    to_repair: RefCell<FxHashSet<u64>>,
    lost_copies: LostCopies,
    /// The sequence number after the last log sector that was found, and that of the first sector which this open
    /// writes.
    log_end: Cell<(u64, u64)>,
    /// The last log sector that is in a page which this open has written.
    written: Cell<u64>,
    /// The block groups of pages which this open has written.
    written_groups: RefCell<FxHashSet<u64>>,
    /// Pages that include log sectors after the end of the log.
    newer: RefCell<FxHashSet<u64>>,
    /// The volume was closed cleanly: then only damage makes one copy older than the other.
    was_clean: bool,
    cache_bytes: usize,
}

impl BlockMap {
    /// The block map of a volume with this superblock and group map; for `log_end` see the field.
    pub fn new(superblock: &Superblock, groups: BlockGroups, log_end: (u64, u64), options: &OpenOptions) -> BlockMap {
        BlockMap {
            layout: superblock.layout,
            seed: superblock.seed(),
            mutation: options.mutation,
            lost_copies: groups.lost_copies(),
            groups,
            patches: Patches::new(superblock.seed()),
            unwritten: Rc::default(),
            pages: RefCell::default(),
            order: RefCell::default(),
            loading: RangeLock::default(),
            lost_sectors: RefCell::default(),
            to_repair: RefCell::default(),
            written: Cell::new(log_end.1),
            log_end: Cell::new(log_end),
            written_groups: RefCell::default(),
            newer: RefCell::default(),
            was_clean: superblock.is_clean,
            cache_bytes: options.cache_bytes,
        }
    }

    /// The page of a block, and the block's index in it.
    pub fn locate(&self, lba: Lba) -> (u64, usize) {
        self.layout.page_of(lba)
    }

    /// The block group of a page.
    pub fn group_of(&self, number: u64) -> u64 {
        number / self.layout.group_pages()
    }

    /// A page, if it is in memory.
    pub fn cached(&self, number: u64) -> Option<Rc<MapPage>> {
        let page = self.pages.borrow().get(&number).cloned();
        page.or_else(|| (!self.groups.is_initialized(self.group_of(number))).then(|| self.unwritten.clone()))
    }

    /// Drops a page that could be read only in part, so that the next use reads it again.
    pub fn retry(&self, number: u64) {
        let mut pages = self.pages.borrow_mut();
        // A page that is referenced may be about to be written. A second one, read meanwhile, would be neither the old
        // nor the new page.
        let is_whole = |page: &Rc<MapPage>| page.unreadable() == 0 && page.lost_copies() == 0;
        if pages.get(&number).is_some_and(|page| !is_whole(page) && Rc::strong_count(page) == 1) {
            pages.remove(&number);
        }
    }

    /// Reads a page as far as it is readable. Tasks that want the same page read it once.
    ///
    /// # Errors
    /// When the medium fails as a whole. Unreadable sectors are no error.
    pub async fn page<M: Medium>(&self, medium: &M, number: u64) -> Result<Rc<MapPage>, MediumError> {
        if let Some(page) = self.cached(number) {
            return Ok(page);
        }
        let _alone = self.loading.lock(number..=number).await;
        if let Some(page) = self.cached(number) {
            return Ok(page);
        }
        let page = self.read(medium, number..number + 1).await?.pop().map(Rc::new).expect("one was asked for");
        self.note_losses(number, &page);
        self.cache(number, &page);
        Ok(page)
    }

    /// The position of a page.
    pub fn offsets(&self, number: u64) -> PageOffsets {
        self.layout.page_offsets(number).expect("pages are asked for blocks of the volume")
    }

    /// Reads pages of one block group, as far as they are readable.
    async fn read<M: Medium>(&self, medium: &M, numbers: Range<u64>) -> Result<Vec<MapPage>, MediumError> {
        let (place, count) = (self.offsets(numbers.start), (numbers.end - numbers.start) as usize);
        let (page_bytes, sector) = (self.layout.page_bytes() as usize, self.layout.sector_bytes() as usize);
        let (pages, second) = join(
            read_sectors(medium, place.offset, count * page_bytes, sector),
            read_sectors(medium, place.second_offset, count * sector, sector),
        )
        .await;
        let ((pages, missing), (second, _)) = (pages?, second?);
        let pieces = pages.chunks_exact(page_bytes).zip(second.chunks_exact(sector)).enumerate();
        let pages = numbers.zip(pieces).map(|(number, (at, (bytes, second)))| {
            let sectors = at * PAGE_SECTORS as usize..(at + 1) * PAGE_SECTORS as usize;
            let here = missing.iter().filter(|missing| sectors.contains(missing));
            let unreadable = here.fold(0, |bits, missing| bits | 1 << (missing - sectors.start));
            self.decode(number, bytes, second, unreadable)
        });
        Ok(pages.collect())
    }

    /// Decodes a page from its bytes and its second generations; `unreadable` has the bits of sectors that could not be
    /// read.
    fn decode(&self, number: u64, bytes: &[u8], second: &[u8], unreadable: u32) -> MapPage {
        let place = self.offsets(number);
        let (head, body) = bytes.split_at(self.layout.sector_bytes() as usize);
        let generations = |sector: &[u8]| {
            let found = Generations::decode(sector, self.seed, place.first, self.layout.page_blocks());
            // If the page was read before, its losses were counted then.
            let is_new = found.is_none() && !self.to_repair.borrow().contains(&number);
            let salt = Generations::trace_salt(sector).filter(|(first, _)| is_new && *first == place.first);
            salt.into_iter().for_each(|(_, salt)| self.lost_copies.add_foreign("the map pages", salt, 1));
            found
        };
        let copies = match self.mutation.injected() {
            Mutation::OneCopy => [generations(head), generations(head)],
            _ => [generations(head), generations(second)],
        };
        let page = MapPage::new(body.as_chunks::<MAP_ENTRY_BYTES>().0.to_vec(), unreadable & !GENERATIONS_BIT, copies);
        page.mark_unreadable(self.lost_sectors(number));
        page
    }

    /// Bits of the sectors of a page that are given up as lost.
    fn lost_sectors(&self, number: u64) -> u32 {
        self.lost_sectors.borrow().get(&number).copied().unwrap_or(0)
    }

    /// Records what a page that was read has lost.
    fn note_losses(&self, number: u64, page: &MapPage) {
        let first = self.offsets(number).first;
        if page.unreadable() != 0 {
            tracing::warn!(%first, "cannot read sectors of the block map; the blocks whose map entries lie there are lost");
        }
        if page.lost_copies() > 1 {
            tracing::warn!(%first, "both copies of a page's generations are lost; its map entries count");
        }
        let lost = page.lost_copies() + u32::from(page.is_behind() && self.was_clean);
        if (page.lost_copies() > 0 || page.is_behind()) && self.to_repair.borrow_mut().insert(number) {
            self.lost_copies.add(u64::from(lost));
        }
        // A page is written only when the log sectors that it includes are durable, and before a superblock frees them.
        // So if it includes sectors after the end of the log, the log and the superblocks are from before that write.
        let ((end, next), written) = (self.log_end.get(), self.written.get());
        // A recovery that was interrupted may have written any page, as of `next`: this open writes the same again. What
        // is written later is only in block groups that were compared before.
        let is_written = |at: u64| {
            let is_group_written = || self.written_groups.borrow().contains(&self.group_of(number));
            at == next || (next..=written).contains(&at) && is_group_written()
        };
        let is_newer = page.sequence().is_some_and(|at| at > end && !is_written(at));
        if is_newer && self.newer.borrow_mut().insert(number) {
            tracing::warn!(%first, "a page of the block map is newer than the log and the superblocks; blocks may be older than what was written");
            self.lost_copies.add_newer_page();
        }
    }

    /// True if pages were found that are newer than the log and the superblocks.
    pub fn has_newer_pages(&self) -> bool {
        self.lost_copies.newer_pages() > 0
    }

    /// Accepts pages that are newer than the log that was found: the log continues after all of them.
    pub fn forget_newer_pages(&self) {
        let (_, next) = self.log_end.get();
        self.log_end.set((next, next));
        self.newer.borrow_mut().clear();
        self.lost_copies.forget_newer_pages();
    }

    fn cache(&self, number: u64, page: &Rc<MapPage>) {
        self.pages.borrow_mut().insert(number, page.clone());
        self.order.borrow_mut().push_back(number);
        self.evict();
    }

    /// Drops unreferenced pages over the limit; a page that was used since it was last considered gets a second chance.
    /// Memory that patches use is not available to pages.
    fn evict(&self) {
        let page_bytes = (self.layout.page_bytes() + u64::from(self.layout.sector_bytes())) as usize;
        let limit = (self.cache_bytes.saturating_sub(self.patches.bytes()) / page_bytes).max(MIN_CACHED_PAGES);
        let (mut pages, mut order) = (self.pages.borrow_mut(), self.order.borrow_mut());
        let mut looks = MAX_EVICTION_PROBES;
        while pages.len() > limit && looks > 0 {
            looks -= 1;
            let Some(number) = order.pop_front() else { return };
            let Some(page) = pages.get(&number) else { continue };
            if page.touched.replace(false) || Rc::strong_count(page) > 1 {
                order.push_back(number);
            } else {
                pages.remove(&number);
            }
        }
    }

    /// True if the patches take so much memory that commits wait for a checkpoint.
    pub fn is_full(&self) -> bool {
        self.patches.bytes() > self.cache_bytes.max(MIN_PATCHES_BYTES)
    }

    /// True if the patches take so much memory that a checkpoint is due.
    pub fn is_dirty_limit_reached(&self) -> bool {
        self.patches.active_bytes() * 2 > self.cache_bytes.max(MIN_PATCHES_BYTES)
    }

    /// Reads the block map of a block group, page by page, and calls `see` for each block. With `give_up`, unreadable
    /// sectors stay lost.
    ///
    /// # Errors
    /// When the medium fails as a whole, or seems to fail as a whole.
    pub async fn scan<M: Medium>(
        &self,
        medium: &M,
        group: u64,
        give_up: bool,
        mut see: impl FnMut(MapLookup),
    ) -> Result<(), MediumError> {
        if !self.groups.is_initialized(group) {
            return Ok(());
        }
        let numbers = self.layout.pages_of_group(group);
        let at_once = (SCAN_BYTES / self.layout.page_bytes()).max(1);
        for first in numbers.clone().step_by(at_once as usize) {
            let numbers = first..numbers.end.min(first + at_once);
            for (number, page) in numbers.clone().zip(self.read(medium, numbers).await?) {
                if self.report_entries(number, &page, &mut see) && give_up {
                    self.check_medium_reads(medium, &self.offsets(number)).await?;
                    self.mark_sectors_lost(number, page.unreadable());
                }
            }
        }
        Ok(())
    }

    /// Calls `see` for each block of a page. True if the map entry of a block is in an unreadable sector.
    fn report_entries(&self, number: u64, page: &MapPage, see: &mut impl FnMut(MapLookup)) -> bool {
        self.note_losses(number, page);
        let place = self.offsets(number);
        let mut is_lost = false;
        for (index, lba) in (0..place.blocks).map(|index| (index as usize, place.first.get() + index)) {
            let lookup = page.lookup(index, Lba::new(lba), self.seed);
            is_lost |= matches!(lookup, MapLookup::Unreadable);
            see(lookup);
        }
        is_lost
    }

    /// Treats sectors of a page as lost, whatever the medium returns from now on.
    fn mark_sectors_lost(&self, number: u64, sectors: u32) {
        self.lost_sectors.borrow_mut().insert(number, sectors);
        if let Some(cached) = self.pages.borrow().get(&number) {
            cached.mark_unreadable(sectors);
        }
    }

    /// Fails if the whole medium is unreadable, rather than single sectors: before unreadable sectors are overwritten,
    /// a copy of the page's generations must be readable.
    async fn check_medium_reads<M: Medium>(&self, medium: &M, place: &PageOffsets) -> Result<(), MediumError> {
        let buffer = || medium.buffer(self.layout.sector_bytes() as usize);
        if medium.read(place.second_offset, buffer()).await.0.is_ok() {
            return Ok(());
        }
        medium.read(place.offset, buffer()).await.0
    }

    /// The pages that a checkpoint must write, in order: those for which it has taken map entries, and those that have
    /// lost something.
    pub fn to_write(&self) -> Vec<u64> {
        let mut numbers = self.patches.taken_pages();
        numbers.extend(self.to_repair.borrow().iter());
        numbers.extend(self.lost_sectors.borrow().keys());
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    /// Writes the map entries that a checkpoint has taken to their page, as of the log sector `sequence`. They are
    /// durable after the next sync.
    ///
    /// # Errors
    /// When the medium fails. The page in memory is unchanged, and the map entries can be written again.
    pub async fn write<M: Medium>(&self, medium: &M, number: u64, sequence: u64) -> Result<(), MediumError> {
        // Unreadable sectors are read once more, because they would be lost for good.
        self.retry(number);
        let page = self.page(medium, number).await?;
        let patches = self.patches.taken(number);
        let place = self.offsets(number);
        let image = page.image(&self.layout, self.seed, &place, &patches, sequence, self.lost_sectors(number));
        if image.changed & page.unreadable() != 0 || page.lost_copies() > 1 {
            self.check_medium_reads(medium, &place).await?;
        }
        self.written.set(self.written.get().max(sequence));
        self.written_groups.borrow_mut().insert(self.group_of(number));
        let sector = self.layout.sector_bytes() as usize;
        let bytes = padded(medium, &image.bytes, image.bytes.len());
        let mut at = 0;
        while image.changed >> at != 0 {
            let run = (!(image.changed >> at)).trailing_zeros() as usize;
            if run > 0 {
                let offset = place.offset + (at * sector) as u64;
                medium.write(offset, bytes.slice(at * sector..(at + run) * sector)).await?;
            }
            at += run.max(1);
        }
        medium.write(place.second_offset, bytes.slice(..sector)).await?;
        page.apply(image);
        self.lost_sectors.borrow_mut().remove(&number);
        self.to_repair.borrow_mut().remove(&number);
        Ok(())
    }

    /// Overwrites the bytes of one map entry, which may be invalid, and leaves the generations unchanged: damage on
    /// purpose. No checkpoint may run, and no map entry of the block may wait for one.
    ///
    /// # Errors
    /// When the medium fails.
    pub async fn write_raw<M: Medium>(
        &self,
        medium: &M,
        lba: Lba,
        bytes: [u8; MAP_ENTRY_BYTES],
    ) -> Result<(), MediumError> {
        let (number, index) = self.locate(lba);
        let page = self.page(medium, number).await?;
        page.set_raw(index, bytes);
        let (sector, bytes) = page.sector_of(index);
        let offset = self.offsets(number).offset + sector * bytes.len() as u64;
        medium.write(offset, padded(medium, &bytes, bytes.len())).await?;
        medium.sync().await
    }
}
