//! The free space of a block group, as the free space tree has it: runs with items of their own, or bitmaps.
//!
//! [`GroupFreeSpace`] has all of it in memory in the form that is stored. Each change names exactly the items that
//! become other ones, so whoever owns the tree applies them, and needs no look at it.
//!
//! Invariants:
//! - Runs never touch: each is as long as it can be.
//! - In the form of bitmaps every part of the group has its bitmap, also an empty one.
//! - The count of runs is stored, in both forms, and follows from what is free.
//! - A group has the other form as soon as its runs are too many for the one, or few enough for the other. Between both
//!   limits it stays as it is, so a group does not change its form at each step.
//!
//! What is freed twice, or allocated when it is not free, is an error and changes nothing: the tree or whoever uses it
//! is wrong, and data would be overwritten.

use std::collections::BTreeMap;
use std::ops::Range;

use zerocopy::IntoBytes;

use crate::bitmap::Bitmap;
use crate::error::DecodeError;
use crate::item_changes::ItemChanges;
use crate::items::Item;
use crate::items::chunk::FreeSpaceInfo;
use crate::key::{ItemType, Key};
use crate::node::ITEM_HEAD_BYTES;

/// Bytes of a bitmap, except for the last one of a group.
const BITMAP_BYTES: usize = 256;
/// Sectors of a part of a group, which has a bitmap.
const PART_SECTORS: usize = BITMAP_BYTES * 8;
/// How far the two limits are apart, in runs.
const HYSTERESIS: u64 = 100;
/// The maximum number of sectors of a group: 1 TiB with sectors of 4 KiB. Chunks are much smaller, and a damaged one
/// must not make bitmaps of any size.
const MAX_SECTORS: u64 = 1 << 28;

/// Why free space cannot be read or changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FreeSpaceError {
    /// An item has not the form of its type.
    #[error(transparent)]
    Shape(#[from] DecodeError),
    /// The sector size is no size, or the group's range is not made of sectors.
    #[error("a group of {bytes} bytes at {start} with sectors of {sector_bytes}")]
    Group {
        /// Where the group begins.
        start: u64,
        /// Its bytes.
        bytes: u64,
        /// Bytes of a sector.
        sector_bytes: u32,
    },
    /// A range is empty, not in the group, or not made of sectors.
    #[error("{bytes} bytes at {start} are not sectors of the group")]
    Range {
        /// Where the range begins.
        start: u64,
        /// Its bytes.
        bytes: u64,
    },
    /// An item that does not belong to the group in its form, or not behind the item before it.
    #[error("{0} is out of place")]
    Item(Key),
    /// The stored count differs from the runs that are there.
    #[error("{stored} runs are counted, and {found} are there")]
    Count {
        /// The count.
        stored: u32,
        /// What is there.
        found: u64,
    },
    /// A part of the range that is allocated is not free.
    #[error("{bytes} bytes at {start} are not all free")]
    InUse {
        /// Where the range begins.
        start: u64,
        /// Its bytes.
        bytes: u64,
    },
    /// A part of the range that is freed is free.
    #[error("some of {bytes} bytes at {start} are free already")]
    Free {
        /// Where the range begins.
        start: u64,
        /// Its bytes.
        bytes: u64,
    },
}

/// The range and the units of a group. Inside, everything is counted in sectors from the start of the group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Group {
    start: u64,
    bytes: u64,
    sector_bytes: u32,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Form {
    /// Where runs begin, and their sectors.
    Extents(BTreeMap<usize, usize>),
    /// The bitmap of each part, in their order.
    Bitmaps(Vec<Bitmap>),
}

/// The free space of one block group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupFreeSpace {
    group: Group,
    /// Flags besides the one of the form; kept.
    other_flags: u32,
    count: u64,
    form: Form,
}

impl GroupFreeSpace {
    /// A new group, all of which is free.
    ///
    /// # Errors
    /// If it is not made of sectors.
    pub fn create(
        start: u64,
        bytes: u64,
        sector_bytes: u32,
        changes: &mut ItemChanges,
    ) -> Result<GroupFreeSpace, FreeSpaceError> {
        let group = Group::new(start, bytes, sector_bytes)?;
        let form = Form::Extents(BTreeMap::from([(0, group.sectors())]));
        let space = GroupFreeSpace { group, other_flags: 0, count: 1, form };
        space.items().into_iter().for_each(|(key, data)| changes.insert(key, data));
        Ok(space)
    }

    /// Reads the free space of a group from its items: FREE_SPACE_INFO first, then the others, by rising keys.
    ///
    /// # Errors
    /// If an item is missing or out of place, or the count is wrong.
    pub fn load<'a>(
        sector_bytes: u32,
        items: impl IntoIterator<Item = (Key, &'a [u8])>,
    ) -> Result<GroupFreeSpace, FreeSpaceError> {
        let mut items = items.into_iter();
        let (key, data) = items.next().ok_or(FreeSpaceError::Item(Key::MIN))?;
        let Item::FreeSpaceInfo(info) = Item::decode(key, data)? else { return Err(FreeSpaceError::Item(key)) };
        let group = Group::new(key.objectid, key.offset, sector_bytes)?;
        let form = match info.flags.get() & FreeSpaceInfo::USING_BITMAPS {
            0 => load_extents(&group, items)?,
            _ => load_bitmaps(&group, items)?,
        };
        let other_flags = info.flags.get() & !FreeSpaceInfo::USING_BITMAPS;
        let mut space = GroupFreeSpace { group, other_flags, count: 0, form };
        space.count = space.runs().count() as u64;
        if space.count == u64::from(info.extent_count.get()) {
            return Ok(space);
        }
        Err(FreeSpaceError::Count { stored: info.extent_count.get(), found: space.count })
    }

    /// All items, by rising keys.
    pub fn items(&self) -> Vec<(Key, Vec<u8>)> {
        let mut items = vec![self.info()];
        match &self.form {
            Form::Extents(runs) => {
                items.extend(runs.iter().map(|(at, sectors)| (self.group.run_key(*at, *sectors), Vec::new())));
            }
            Form::Bitmaps(bitmaps) => items.extend((0..bitmaps.len()).map(|part| self.bitmap(bitmaps, part))),
        }
        items
    }

    /// The address where the group begins.
    pub fn start(&self) -> u64 {
        self.group.start
    }

    /// The number of runs.
    pub fn extent_count(&self) -> u64 {
        self.count
    }

    /// True in the form of bitmaps.
    pub fn is_bitmaps(&self) -> bool {
        matches!(self.form, Form::Bitmaps(_))
    }

    /// The addresses of all runs, rising.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let run = self.next_run(at)?;
            at = run.end;
            Some(self.group.address(run.start)..self.group.address(run.end))
        })
    }

    /// The first free range at or behind an address, up to where its run ends. If the address is within a run, the
    /// range begins there.
    pub fn next_free(&self, from: u64) -> Option<Range<u64>> {
        let from = from.saturating_sub(self.group.start).div_ceil(u64::from(self.group.sector_bytes));
        let run = self.next_run(usize::try_from(from).ok()?)?;
        Some(self.group.address(run.start)..self.group.address(run.end))
    }

    /// A range is allocated: it is no longer free.
    ///
    /// # Errors
    /// If it is not all free, or not made of sectors of the group.
    pub fn remove(&mut self, start: u64, bytes: u64, changes: &mut ItemChanges) -> Result<(), FreeSpaceError> {
        let range = self.group.range(start, bytes).ok_or(FreeSpaceError::Range { start, bytes })?;
        if !self.is_all(&range, true) {
            return Err(FreeSpaceError::InUse { start, bytes });
        }
        let (before, behind) = self.neighbours(&range);
        match &mut self.form {
            Form::Extents(runs) => {
                let (at, sectors) = runs
                    .range(..=range.start)
                    .next_back()
                    .map(|(at, sectors)| (*at, *sectors))
                    .expect("the range is in a run");
                runs.remove(&at);
                changes.delete(self.group.run_key(at, sectors));
                for rest in [at..range.start, range.end..at + sectors].into_iter().filter(|rest| !rest.is_empty()) {
                    runs.insert(rest.start, rest.len());
                    changes.insert(self.group.run_key(rest.start, rest.len()), Vec::new());
                }
            }
            Form::Bitmaps(_) => self.fill(&range, false, changes),
        }
        self.set_count(self.count - 1 + before + behind, changes);
        Ok(())
    }

    /// A range is freed.
    ///
    /// # Errors
    /// If a part of it is free already, or it is not made of sectors of the group.
    pub fn add(&mut self, start: u64, bytes: u64, changes: &mut ItemChanges) -> Result<(), FreeSpaceError> {
        let range = self.group.range(start, bytes).ok_or(FreeSpaceError::Range { start, bytes })?;
        if !self.is_all(&range, false) {
            return Err(FreeSpaceError::Free { start, bytes });
        }
        let (before, behind) = self.neighbours(&range);
        match &mut self.form {
            Form::Extents(runs) => {
                let mut whole = range.clone();
                if before > 0 {
                    let (at, sectors) = runs
                        .range(..range.start)
                        .next_back()
                        .map(|(at, n)| (*at, *n))
                        .expect("the sector before is in a run");
                    whole.start = at;
                    changes.delete(self.group.run_key(at, sectors));
                }
                if let Some(sectors) = runs.remove(&range.end) {
                    whole.end += sectors;
                    changes.delete(self.group.run_key(range.end, sectors));
                }
                runs.insert(whole.start, whole.len());
                changes.insert(self.group.run_key(whole.start, whole.len()), Vec::new());
            }
            Form::Bitmaps(_) => self.fill(&range, true, changes),
        }
        self.set_count(self.count + 1 - before - behind, changes);
        Ok(())
    }

    /// The group goes, with all its items.
    pub fn delete(self, changes: &mut ItemChanges) {
        self.items().into_iter().for_each(|(key, _)| changes.delete(key));
    }

    /// The first free sectors from a sector on.
    fn next_run(&self, from: usize) -> Option<Range<usize>> {
        match &self.form {
            Form::Extents(runs) => {
                let around = runs.range(..from).next_back().map(|(at, sectors)| from..at + sectors);
                let behind = || runs.range(from..).next().map(|(at, sectors)| *at..at + sectors);
                around.filter(|around| !around.is_empty()).or_else(behind)
            }
            Form::Bitmaps(bitmaps) => {
                let start = find(bitmaps, from, true)?;
                let end = find(bitmaps, start, false).unwrap_or(self.group.sectors());
                Some(start..end)
            }
        }
    }

    /// One for each side on which the sector beside a range is free.
    fn neighbours(&self, range: &Range<usize>) -> (u64, u64) {
        let is_free = |sector: usize| sector < self.group.sectors() && self.is_all(&(sector..sector + 1), true);
        (u64::from(range.start > 0 && is_free(range.start - 1)), u64::from(is_free(range.end)))
    }

    /// True if all sectors of a range are free, or none is. Looks at no others: a group may be large.
    fn is_all(&self, range: &Range<usize>, value: bool) -> bool {
        match &self.form {
            Form::Extents(_) => match self.next_run(range.start) {
                Some(run) if value => run.start == range.start && run.end >= range.end,
                Some(run) => run.start >= range.end,
                None => !value,
            },
            Form::Bitmaps(bitmaps) => {
                parts(range).all(|(part, bits)| bitmaps.get(part).is_some_and(|bitmap| bitmap.is_all(bits, value)))
            }
        }
    }

    /// Sets the bits of a range, which may be in several bitmaps.
    fn fill(&mut self, range: &Range<usize>, value: bool, changes: &mut ItemChanges) {
        for (part, bits) in parts(range) {
            let Form::Bitmaps(bitmaps) = &mut self.form else { return };
            bitmaps[part].fill(bits, value);
            let Form::Bitmaps(bitmaps) = &self.form else { return };
            let (key, data) = self.bitmap(bitmaps, part);
            changes.replace(key, data);
        }
    }

    /// Changes the count of runs, and the form if the count is over its limit.
    fn set_count(&mut self, count: u64, changes: &mut ItemChanges) {
        if count == self.count {
            return;
        }
        self.count = count;
        let (low, high) = self.group.limits();
        let form = match &self.form {
            Form::Extents(_) if count > high => self.to_bitmaps(),
            Form::Bitmaps(_) if count < low => self.to_extents(),
            _ => {
                let (key, info) = self.info();
                return changes.replace(key, info);
            }
        };
        self.items().into_iter().skip(1).for_each(|(key, _)| changes.delete(key));
        self.form = form;
        self.items().into_iter().skip(1).for_each(|(key, data)| changes.insert(key, data));
        let (key, info) = self.info();
        changes.replace(key, info);
    }

    fn to_bitmaps(&self) -> Form {
        let sectors = self.group.sectors();
        let sizes = (0..sectors).step_by(PART_SECTORS).map(|at| PART_SECTORS.min(sectors - at));
        let mut bitmaps: Vec<_> = sizes.map(Bitmap::new).collect();
        let mut at = 0;
        while let Some(run) = self.next_run(at) {
            at = run.end;
            parts(&run).for_each(|(part, bits)| bitmaps[part].fill(bits, true));
        }
        Form::Bitmaps(bitmaps)
    }

    fn to_extents(&self) -> Form {
        let (mut runs, mut at) = (BTreeMap::new(), 0);
        while let Some(run) = self.next_run(at) {
            at = run.end;
            runs.insert(run.start, run.len());
        }
        Form::Extents(runs)
    }

    fn info(&self) -> (Key, Vec<u8>) {
        let form = if self.is_bitmaps() { FreeSpaceInfo::USING_BITMAPS } else { 0 };
        // A group has fewer sectors than 32 bits can count.
        let info = FreeSpaceInfo { extent_count: (self.count as u32).into(), flags: (self.other_flags | form).into() };
        (Key::new(self.group.start, ItemType::FREE_SPACE_INFO, self.group.bytes), info.as_bytes().to_vec())
    }

    fn bitmap(&self, bitmaps: &[Bitmap], part: usize) -> (Key, Vec<u8>) {
        let bitmap = &bitmaps[part];
        (self.group.bitmap_key(part * PART_SECTORS, bitmap.bits()), bitmap.as_bytes().to_vec())
    }
}

impl Group {
    fn new(start: u64, bytes: u64, sector_bytes: u32) -> Result<Group, FreeSpaceError> {
        let sector = u64::from(sector_bytes);
        let is_made_of_sectors = sector_bytes.is_power_of_two()
            && bytes > 0
            && (start | bytes) & (sector - 1) == 0
            && start.checked_add(bytes).is_some()
            && bytes / sector <= MAX_SECTORS;
        if is_made_of_sectors {
            return Ok(Group { start, bytes, sector_bytes });
        }
        Err(FreeSpaceError::Group { start, bytes, sector_bytes })
    }

    fn sectors(&self) -> usize {
        // At most MAX_SECTORS.
        (self.bytes / u64::from(self.sector_bytes)) as usize
    }

    /// The limits between the forms: below the first, bitmaps become runs; above the second, runs become bitmaps.
    fn limits(&self) -> (u64, u64) {
        let bitmaps = self.sectors().div_ceil(PART_SECTORS) as u64;
        // As many runs as need the bytes of all bitmaps.
        let head = ITEM_HEAD_BYTES as u64;
        let high = bitmaps * (BITMAP_BYTES as u64 + head) / head;
        (high.saturating_sub(HYSTERESIS), high)
    }

    /// The sectors of a range; `None` if it is not made of sectors of the group.
    fn range(&self, start: u64, bytes: u64) -> Option<Range<usize>> {
        let sector = u64::from(self.sector_bytes);
        let (from, end) = (start.checked_sub(self.start)?, start.checked_add(bytes)?);
        let is_in = bytes > 0 && end <= self.start + self.bytes && (from | bytes) & (sector - 1) == 0;
        is_in.then(|| (from / sector) as usize..((from + bytes) / sector) as usize)
    }

    fn address(&self, sector: usize) -> u64 {
        self.start + sector as u64 * u64::from(self.sector_bytes)
    }

    fn run_key(&self, at: usize, sectors: usize) -> Key {
        self.key(ItemType::FREE_SPACE_EXTENT, at, sectors)
    }

    fn bitmap_key(&self, at: usize, sectors: usize) -> Key {
        self.key(ItemType::FREE_SPACE_BITMAP, at, sectors)
    }

    fn key(&self, item_type: ItemType, at: usize, sectors: usize) -> Key {
        Key::new(self.address(at), item_type, sectors as u64 * u64::from(self.sector_bytes))
    }
}

/// The parts that have sectors of a range, and the bits of these in each part's bitmap.
fn parts(range: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
    let Range { start, end } = *range;
    (start / PART_SECTORS..end.div_ceil(PART_SECTORS)).map(move |part| {
        let first = part * PART_SECTORS;
        (part, start.max(first) - first..end.min(first + PART_SECTORS) - first)
    })
}

/// The first sector from `from` on whose bit has this value.
fn find(bitmaps: &[Bitmap], from: usize, value: bool) -> Option<usize> {
    let (first, mut at) = (from / PART_SECTORS, from % PART_SECTORS);
    for (part, bitmap) in bitmaps.iter().enumerate().skip(first) {
        let bit = bitmap.next(at, value);
        if bit < bitmap.bits() {
            return Some(part * PART_SECTORS + bit);
        }
        at = 0;
    }
    None
}

fn load_extents<'a>(group: &Group, items: impl Iterator<Item = (Key, &'a [u8])>) -> Result<Form, FreeSpaceError> {
    let (mut runs, mut end) = (BTreeMap::new(), None);
    for (key, data) in items {
        Item::decode(key, data)?;
        let range = group.range(key.objectid, key.offset).ok_or(FreeSpaceError::Item(key))?;
        // A run that touches the one before it should be one with it.
        let is_behind = end.is_none_or(|end| end < range.start);
        if key.item_type != ItemType::FREE_SPACE_EXTENT || !is_behind {
            return Err(FreeSpaceError::Item(key));
        }
        end = Some(range.end);
        runs.insert(range.start, range.len());
    }
    Ok(Form::Extents(runs))
}

fn load_bitmaps<'a>(group: &Group, mut items: impl Iterator<Item = (Key, &'a [u8])>) -> Result<Form, FreeSpaceError> {
    let (mut bitmaps, sectors) = (Vec::new(), group.sectors());
    for at in (0..sectors).step_by(PART_SECTORS) {
        let bits = PART_SECTORS.min(sectors - at);
        let wanted = group.bitmap_key(at, bits);
        let (key, data) = items.next().ok_or(FreeSpaceError::Item(wanted))?;
        let bitmap = Bitmap::from_bytes(data, bits).filter(|_| key == wanted);
        bitmaps.push(bitmap.ok_or(FreeSpaceError::Item(key))?);
    }
    match items.next() {
        Some((key, _)) => Err(FreeSpaceError::Item(key)),
        None => Ok(Form::Bitmaps(bitmaps)),
    }
}

#[cfg(test)]
mod tests;
