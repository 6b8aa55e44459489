//! Which block groups are initialized: the group map, which is read when the volume is opened and kept in memory.
//!
//! A block group is initialized before its first map entry is written, and stays so. Until then all of its blocks are
//! unwritten, and its map pages are not read, whatever is there. The bit of a block group is set only when its
//! generations are durable. Its two copies are written one after the other, with a sync in between, so that one of them
//! is always intact.

use std::cell::RefCell;
use std::ops::Range;

use sealblock_block::{Medium, MediumError, MediumErrorKind};

use crate::format::{Generations, GroupMapSector, Layout, Seed, Superblock};
use crate::medium::lost_copies::LostCopies;
use crate::medium::read_sectors;

/// Copies of the map.
const COPIES: u64 = 2;

/// Which block groups are initialized.
pub(crate) struct BlockGroups {
    layout: Layout,
    seed: Seed,
    sectors: RefCell<Vec<GroupMapSector>>,
    /// Sectors of which a copy is lost or older than the other.
    to_repair: RefCell<Vec<u64>>,
    lost_copies: LostCopies,
    /// A sector says that the volume was resized.
    is_marked_resized: bool,
    /// Sectors that have lost both copies.
    guessed: Vec<u64>,
}

impl BlockGroups {
    /// The map of a new volume: no block group is initialized.
    pub fn uninitialized(layout: Layout, seed: Seed) -> BlockGroups {
        let sectors = (0..layout.group_map_sectors()).map(|index| uninitialized_sector(&layout, index)).collect();
        BlockGroups {
            layout,
            seed,
            sectors: RefCell::new(sectors),
            to_repair: RefCell::default(),
            lost_copies: LostCopies::default(),
            is_marked_resized: false,
            guessed: Vec::new(),
        }
    }

    /// Reads the map.
    ///
    /// # Errors
    /// When the medium fails as a whole. Lost sectors are no error: if both copies are lost, or the map is older than
    /// the superblock, the generations of the block groups in question are read. If fewer are found than the superblock
    /// counts, all of these block groups count as initialized, so that none of their blocks reads as never written.
    pub async fn read<M: Medium>(medium: &M, superblock: &Superblock) -> Result<BlockGroups, MediumError> {
        let layout = superblock.layout;
        let mut groups = BlockGroups::uninitialized(layout, superblock.seed());
        let [first, second] = [groups.read_copy(medium, 0).await?, groups.read_copy(medium, 1).await?];
        let (mut doubtful, mut disputed) = (Vec::new(), Vec::new());
        for (index, copies) in (0_u64..).zip(first.into_iter().zip(second)) {
            let (newest, lost, is_behind) = match copies {
                (Some(a), Some(b)) if a == b => (Some(a), 0, false),
                (Some(a), Some(b)) if a.write_seq == b.write_seq => (Some(a.united_with(&b)), 0, true),
                (Some(a), Some(b)) => {
                    let [newer, older] = if b.write_seq > a.write_seq { [b, a] } else { [a, b] };
                    let first = index * layout.groups_per_map_sector();
                    disputed.extend(
                        newer
                            .groups_missing_of(&older)
                            .map(|group| first + group)
                            .filter(|group| *group < layout.block_groups()),
                    );
                    (Some(newer), 0, true)
                }
                (Some(one), None) | (None, Some(one)) => (Some(one), 1, false),
                (None, None) => (None, 2, false),
            };
            groups.lost_copies.add(lost + u64::from(is_behind && superblock.is_clean));
            if lost > 0 || is_behind {
                groups.to_repair.get_mut().push(index);
            }
            match newest {
                Some(newest) => groups.adopt(newest),
                None => doubtful.push(index),
            }
        }
        groups.reconcile(medium, &disputed).await?;
        groups.guessed = doubtful.clone();
        if groups.initialized_count() < superblock.initialized_groups {
            doubtful = (0..layout.group_map_sectors()).collect();
            groups.to_repair = RefCell::new(doubtful.clone());
        }
        groups.find_by_generations(medium, &doubtful).await?;
        if groups.initialized_count() < superblock.initialized_groups {
            groups.mark_initialized(&doubtful);
        }
        Ok(groups)
    }

    /// Takes over a sector, without the bits of block groups that the volume does not have.
    fn adopt(&mut self, mut sector: GroupMapSector) {
        let groups = self.layout.block_groups() - sector.index * self.layout.groups_per_map_sector();
        self.is_marked_resized |= sector.is_resized;
        sector.is_resized = self.layout.is_resized();
        for (at, byte) in (0_u64..).zip(&mut sector.bits) {
            let bits = groups.saturating_sub(at * 8).min(8);
            *byte &= ((1_u16 << bits) - 1) as u8;
        }
        let index = sector.index as usize;
        self.sectors.get_mut()[index] = sector;
    }

    async fn read_copy<M: Medium>(&self, medium: &M, copy: u64) -> Result<Vec<Option<GroupMapSector>>, MediumError> {
        let sector = self.layout.sector_bytes() as usize;
        let length = self.layout.group_map_sectors() as usize * sector;
        let (bytes, _) = read_sectors(medium, self.layout.group_map_offset(copy), length, sector).await?;
        let decode = |(index, bytes)| {
            let found = GroupMapSector::decode(bytes, self.seed, index);
            let salt = GroupMapSector::trace_salt(bytes, index).filter(|_| found.is_none());
            salt.into_iter().for_each(|salt| self.lost_copies.add_foreign("the block group map", salt, 1));
            found
        };
        Ok((0_u64..).zip(bytes.chunks_exact(sector)).map(decode).collect())
    }

    /// Finds the block groups of these sectors by their generations, which were all written before the bit was set.
    #[cold]
    async fn find_by_generations<M: Medium>(&mut self, medium: &M, sectors: &[u64]) -> Result<(), MediumError> {
        for index in sectors {
            tracing::warn!(sector = index, "group map lost or old; finding its block groups by their map pages");
            for group in self.groups_of(*index) {
                if !self.is_initialized(group) && self.has_generations(medium, group).await? {
                    self.set_bit(group);
                }
            }
        }
        Ok(())
    }

    /// Decides by the block map whether block groups are initialized that only an older copy of the map has. The only
    /// fault that causes this restores the older copy from before the volume shrank; its map pages were wiped when the
    /// volume grew again.
    async fn reconcile<M: Medium>(&mut self, medium: &M, disputed: &[u64]) -> Result<(), MediumError> {
        for &group in disputed {
            if self.has_generations(medium, group).await? {
                tracing::warn!(
                    group,
                    "the newer copy of the group map lacks a block group whose map pages exist; the older copy counts"
                );
                self.set_bit(group);
            }
        }
        Ok(())
    }

    /// True if generations of a block group are on the medium. It is an error if some cannot be read, since a block
    /// group without map pages reads as never written.
    async fn has_generations<M: Medium>(&self, medium: &M, group: u64) -> Result<bool, MediumError> {
        let sector = self.layout.sector_bytes() as usize;
        let pages = self.layout.pages_of_group(group);
        let places: Vec<_> = pages.filter_map(|number| self.layout.page_offsets(number)).collect();
        let Some(first) = places.first() else { return Ok(false) };
        let (bytes, missing) = read_sectors(medium, first.second_offset, places.len() * sector, sector).await?;
        let is_there = |bytes: &[u8], at: usize| {
            Generations::decode(bytes, self.seed, places[at].first, self.layout.page_blocks()).is_some()
        };
        if bytes.chunks_exact(sector).enumerate().any(|(at, bytes)| is_there(bytes, at)) {
            return Ok(true);
        }
        let (bytes, missing_first) = read_sectors(medium, first.offset, sector, sector).await?;
        if is_there(&bytes, 0) || (missing.is_empty() && missing_first.is_empty()) {
            return Ok(is_there(&bytes, 0));
        }
        let reason = "neither the group map nor the block map of a block group can be read".to_owned();
        Err(MediumError { kind: MediumErrorKind::Failed, doing: "read", offset_bytes: first.offset, reason })
    }

    /// True if a block group is initialized.
    pub fn is_initialized(&self, group: u64) -> bool {
        let (sector, bit) = self.place(group);
        self.sectors.borrow().get(sector).is_some_and(|sector| sector.has(bit))
    }

    /// The sector of a block group, and its bit in it.
    fn place(&self, group: u64) -> (usize, usize) {
        let per_sector = self.layout.groups_per_map_sector();
        ((group / per_sector) as usize, (group % per_sector) as usize)
    }

    /// The block groups of a sector.
    fn groups_of(&self, sector: u64) -> Range<u64> {
        let first = sector * self.layout.groups_per_map_sector();
        first..(first + self.layout.groups_per_map_sector()).min(self.layout.block_groups())
    }

    /// The number of initialized block groups.
    pub fn initialized_count(&self) -> u64 {
        let ones = |sector: &GroupMapSector| sector.bits.iter().map(|byte| u64::from(byte.count_ones())).sum::<u64>();
        self.sectors.borrow().iter().map(ones).sum()
    }

    /// The counter of lost copies.
    pub fn lost_copies(&self) -> LostCopies {
        self.lost_copies.clone()
    }

    /// True if the map says that the volume was resized.
    pub fn is_marked_resized(&self) -> bool {
        self.is_marked_resized
    }

    /// Treats every block group of lost sectors as initialized: without a superblock that certainly belongs to the
    /// volume, missing map pages do not prove that a block group has none.
    pub fn assume_initialized(&self) {
        self.mark_initialized(&self.guessed);
    }

    /// Treats every block group of these sectors as initialized: some are, and it is unknown which, so none may read as
    /// never written.
    fn mark_initialized(&self, sectors: &[u64]) {
        sectors.iter().flat_map(|sector| self.groups_of(*sector)).for_each(|group| self.set_bit(group));
    }

    /// The number of initialized block groups below `end`.
    pub fn initialized_below(&self, end: u64) -> u64 {
        (0..end.min(self.layout.block_groups())).filter(|group| self.is_initialized(*group)).count() as u64
    }

    fn set_bit(&self, group: u64) {
        let (sector, bit) = self.place(group);
        self.sectors.borrow_mut()[sector].set(bit);
    }

    /// Marks block groups as initialized, in order, once their generations are durable; durable on return.
    ///
    /// # Errors
    /// When the medium fails. Whether the map says so is then unknown; the map pages of the block groups are
    /// initialized either way.
    pub async fn set_initialized<M: Medium>(&self, medium: &M, groups: &[u64]) -> Result<(), MediumError> {
        let per_sector = self.layout.groups_per_map_sector();
        let mut sectors: Vec<u64> = groups.iter().map(|group| group / per_sector).collect();
        sectors.dedup();
        self.rewrite(medium, &sectors, groups).await
    }

    /// Rewrites the sectors of which a copy is lost or old, for a volume that is open for writing. Durable on return.
    ///
    /// # Errors
    /// When the medium fails.
    pub async fn repair<M: Medium>(&self, medium: &M) -> Result<(), MediumError> {
        let sectors = self.to_repair.borrow().clone();
        if sectors.is_empty() { Ok(()) } else { self.rewrite(medium, &sectors, &[]).await }
    }

    /// Rewrites sectors with the bits that they have and those of `groups`.
    async fn rewrite<M: Medium>(&self, medium: &M, sectors: &[u64], groups: &[u64]) -> Result<(), MediumError> {
        let image = |index: &u64| {
            let mut sector = self.sectors.borrow()[*index as usize].clone();
            sector.write_seq += 1;
            let places = groups.iter().map(|group| self.place(*group));
            places.filter(|(of, _)| *of as u64 == *index).for_each(|(_, bit)| sector.set(bit));
            sector
        };
        let images: Vec<GroupMapSector> = sectors.iter().map(image).collect();
        self.write_copies(medium, &images).await?;
        for image in images {
            self.to_repair.borrow_mut().retain(|index| *index != image.index);
            let index = image.index as usize;
            self.sectors.borrow_mut()[index] = image;
        }
        Ok(())
    }

    /// Writes one copy of sectors and then the other; each is durable before the next step.
    async fn write_copies<M: Medium>(&self, medium: &M, images: &[GroupMapSector]) -> Result<(), MediumError> {
        for copy in 0..COPIES {
            self.write_copy(medium, copy, images).await?;
            medium.sync().await?;
        }
        Ok(())
    }

    async fn write_copy<M: Medium>(&self, medium: &M, copy: u64, images: &[GroupMapSector]) -> Result<(), MediumError> {
        let bytes = self.layout.sector_bytes() as usize;
        for image in images {
            let mut buffer = medium.buffer(bytes);
            image.encode(&mut buffer, self.seed);
            let offset = self.layout.group_map_offset(copy) + image.index * bytes as u64;
            medium.write(offset, buffer.freeze()).await?;
        }
        Ok(())
    }

    /// Writes the whole map for a layout with more or fewer block groups, or once more for the same: with the existing
    /// bits, and none for added block groups, whatever an earlier size left there. Durable on return, one copy after
    /// the other.
    ///
    /// # Errors
    /// When the medium fails. Either way the map has the same bits for the existing block groups.
    pub async fn rewrite_for<M: Medium>(&self, medium: &M, to: Layout, resized: bool) -> Result<(), MediumError> {
        let (here, there) = (self.layout.group_map_sectors(), to.group_map_sectors());
        let wide = if there > here { to } else { self.layout };
        let old = BlockGroups::uninitialized(wide, self.seed);
        let [first, second] = [old.read_copy(medium, 0).await?, old.read_copy(medium, 1).await?];
        let write_seq =
            |copy: &[Option<GroupMapSector>], index: usize| copy[index].as_ref().map_or(0, |copy| copy.write_seq);
        let images: Vec<GroupMapSector> = (0..wide.group_map_sectors())
            .map(|index| {
                let known = self.sectors.borrow().get(index as usize).cloned();
                // Higher than what is there, so that it never counts again.
                let [a, b] = [&first, &second].map(|copy| write_seq(copy, index as usize));
                GroupMapSector {
                    write_seq: a.max(b) + 1,
                    is_resized: resized,
                    ..known.unwrap_or_else(|| uninitialized_sector(&wide, index))
                }
            })
            .collect();
        self.write_copies(medium, &images).await
    }

    /// Writes both copies of every sector of the map of a new volume; durable after the next sync.
    ///
    /// # Errors
    /// When the medium fails.
    pub async fn create<M: Medium>(&self, medium: &M) -> Result<(), MediumError> {
        let images = self.sectors.borrow().clone();
        for copy in 0..COPIES {
            self.write_copy(medium, copy, &images).await?;
        }
        Ok(())
    }
}

fn uninitialized_sector(layout: &Layout, index: u64) -> GroupMapSector {
    let bits = vec![0; (layout.groups_per_map_sector() / 8) as usize];
    GroupMapSector { index, write_seq: 0, bits, is_resized: layout.is_resized() }
}
