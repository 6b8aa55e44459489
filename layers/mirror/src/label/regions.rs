//! Regions, into which a mirror divides its blocks to track differences, and sets of regions.
//!
//! A set takes memory in proportion to its content: it is divided into pages of 4096 regions, and a page that is
//! empty or full has no bits. Counting costs nothing, and searches skip whole words and pages.

use std::ops::RangeInclusive;
use std::rc::Rc;

use sealblock_units::{BlockCount, BlockSize, Extent, Lba};

/// Most regions of a device whose reserved area has room for bitmap pages.
pub const MAX_REGIONS: u64 = 1 << 24;
/// Most regions of a device that keeps its sets in labels alone.
pub const MAX_REGIONS_IN_LABEL: u64 = 8192;
/// Most blocks of a device.
pub const MAX_BLOCKS: u64 = 1 << 52;
/// The smallest region, in bytes.
const MIN_REGION_BYTES: u64 = 64 << 10;
/// Most groups of a device that has not the largest ones. Labels mark the regions of a group dirty together: writes everywhere on a
/// device wait for so many labels at most.
const GROUPS: u64 = 1024;
/// Bytes of the smallest and the largest group.
const MIN_GROUP_BYTES: u64 = 1 << 20;
const MAX_GROUP_BYTES: u64 = 64 << 20;
/// Fewest groups of a small device.
const MIN_GROUPS: u64 = 8;
/// Base-2 logarithm of the most blocks of a region: its extent has a 32-bit length.
const MAX_SHIFT: u32 = 31;

/// How a device is divided into regions, and regions into groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionMap {
    capacity_blocks: u64,
    shift: u32,
    group_shift: u32,
}

impl RegionMap {
    /// The finest map that has no more than `max_regions` regions, of 64 KiB at least. `None` if the device has no blocks,
    /// more than [`MAX_BLOCKS`], or too many for so few regions.
    pub fn new(size: BlockSize, capacity_blocks: u64, max_regions: u64) -> Option<RegionMap> {
        let min_shift = (MIN_REGION_BYTES >> size.shift()).trailing_zeros();
        let fits = |shift: &u32| capacity_blocks.div_ceil(1 << shift) <= max_regions;
        let shift = (min_shift..=MAX_SHIFT).find(fits)?;
        RegionMap::with_shift(size, capacity_blocks, shift)
    }

    /// The map whose regions have `1 << shift` blocks; `None` if the device cannot have it.
    pub fn with_shift(size: BlockSize, capacity_blocks: u64, shift: u32) -> Option<RegionMap> {
        let fits = shift <= MAX_SHIFT
            && (1..=MAX_BLOCKS).contains(&capacity_blocks)
            && capacity_blocks.div_ceil(1 << shift) <= MAX_REGIONS;
        if !fits {
            return None;
        }
        let [min, max] = [MIN_GROUP_BYTES, MAX_GROUP_BYTES].map(|bytes| bytes >> size.shift());
        let group_blocks = capacity_blocks.div_ceil(GROUPS).next_power_of_two().clamp(min, max);
        let mut group_shift = group_blocks.trailing_zeros().saturating_sub(shift);
        while group_shift > 0 && capacity_blocks.div_ceil(1 << (shift + group_shift)) < MIN_GROUPS {
            group_shift -= 1;
        }
        Some(RegionMap { capacity_blocks, shift, group_shift })
    }

    /// Base-2 logarithm of the blocks of a region.
    pub fn shift(&self) -> u32 {
        self.shift
    }

    /// Number of regions.
    pub fn count(&self) -> u32 {
        self.capacity_blocks.div_ceil(1 << self.shift) as u32
    }

    /// The regions that an extent touches.
    pub fn of(&self, extent: Extent) -> RangeInclusive<u32> {
        (extent.start().get() >> self.shift) as u32..=(extent.last().get() >> self.shift) as u32
    }

    /// The whole groups that these regions lie in.
    pub fn groups(&self, regions: &RangeInclusive<u32>) -> RangeInclusive<u32> {
        *self.group(*regions.start()).start()..=*self.group(*regions.end()).end()
    }

    /// Number of groups.
    pub fn group_count(&self) -> u32 {
        self.count().div_ceil(1 << self.group_shift)
    }

    /// Blocks of a group that is not cut short.
    pub fn group_blocks(&self) -> u64 {
        1 << (self.shift + self.group_shift)
    }

    /// The numbers of the groups that these regions lie in.
    pub fn group_numbers(&self, regions: &RangeInclusive<u32>) -> RangeInclusive<u32> {
        regions.start() >> self.group_shift..=regions.end() >> self.group_shift
    }

    /// The regions of the group with this number.
    pub fn group_at(&self, number: u32) -> RangeInclusive<u32> {
        self.group(number << self.group_shift)
    }

    /// The regions of the group that a region is in.
    pub fn group(&self, region: u32) -> RangeInclusive<u32> {
        let first = region >> self.group_shift << self.group_shift;
        let last = first + ((1 << self.group_shift) - 1);
        first..=last.min(self.count() - 1)
    }

    /// The blocks of a region.
    pub fn extent(&self, region: u32) -> Extent {
        let start = u64::from(region) << self.shift;
        let blocks = (1 << self.shift).min(self.capacity_blocks - start);
        let blocks = BlockCount::new(blocks as u32).expect("a region of the map has a block");
        Extent::new(Lba::new(start), blocks).expect("regions lie within the device")
    }

    /// The blocks of the regions of a group, or of a part of one.
    pub fn group_extent(&self, group: &RangeInclusive<u32>) -> Extent {
        let (first, last) = (self.extent(*group.start()), self.extent(*group.end()));
        Extent::from_raw(first.start().get(), last.last().get() + 1 - first.start().get())
            .expect("a group has fewer blocks than an extent can have")
    }

    /// Number of blocks in these regions.
    pub fn blocks(&self, regions: &Regions) -> u64 {
        let last = self.count() - 1;
        let whole = u64::from(regions.count()) << self.shift;
        let short = (1 << self.shift) - self.extent(last).len();
        if regions.contains(last) { whole - short } else { whole }
    }
}

/// Regions of a page of a set.
const PAGE: u32 = 4096;
const WORDS: usize = (PAGE / 64) as usize;

/// A part of a set.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Page {
    /// No region.
    None,
    /// Every region.
    All,
    /// Some regions, neither none nor all, so that equal sets have equal pages. Copies of a set share the bits until
    /// one is changed.
    Some(Rc<Bits>),
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Bits {
    words: [u64; WORDS],
    count: u32,
}

/// A set of regions.
#[derive(Clone, Debug, Default)]
pub struct Regions {
    /// Empty until the first insertion.
    pages: Vec<Page>,
    len: u32,
    count: u32,
}

impl PartialEq for Regions {
    fn eq(&self, other: &Regions) -> bool {
        let same = self.len == other.len && self.count == other.count;
        same && (self.count == 0 || self.pages == other.pages)
    }
}

impl Eq for Regions {}

impl Regions {
    /// None of `len` regions.
    pub fn none(len: u32) -> Regions {
        Regions { pages: Vec::new(), len, count: 0 }
    }

    /// All of `len` regions.
    pub fn all(len: u32) -> Regions {
        Regions { pages: vec![Page::All; len.div_ceil(PAGE) as usize], len, count: len }
    }

    fn page(&self, page: u32) -> &Page {
        self.pages.get(page as usize).unwrap_or(&Page::None)
    }

    /// How many regions a page has.
    fn page_len(&self, page: usize) -> u32 {
        (self.len - page as u32 * PAGE).min(PAGE)
    }

    fn page_count(&self, page: usize) -> u32 {
        match self.page(page as u32) {
            Page::None => 0,
            Page::All => self.page_len(page),
            Page::Some(bits) => bits.count,
        }
    }

    /// Changes the words of a page; bits beyond the end are never set.
    fn change(&mut self, page: usize, change: impl FnOnce(&mut [u64; WORDS])) {
        let (len, before) = (self.page_len(page), self.page_count(page));
        if self.pages.is_empty() {
            self.pages = vec![Page::None; self.len.div_ceil(PAGE) as usize];
        }
        let mut bits = match std::mem::replace(&mut self.pages[page], Page::None) {
            Page::Some(bits) => bits,
            Page::None => Rc::new(Bits { words: [0; WORDS], count: 0 }),
            Page::All => Rc::new(Bits { words: std::array::from_fn(|word| word_below(len, word)), count: len }),
        };
        let own = Rc::make_mut(&mut bits);
        change(&mut own.words);
        own.count = own.words.iter().map(|word| word.count_ones()).sum();
        let count = own.count;
        self.count = self.count - before + count;
        self.pages[page] = match count {
            0 => Page::None,
            all if all == len => Page::All,
            _ => Page::Some(bits),
        };
    }

    fn word(&self, at: u32) -> u64 {
        match self.page(at / PAGE) {
            Page::None => 0,
            Page::All => word_below(self.page_len((at / PAGE) as usize), (at % PAGE / 64) as usize),
            Page::Some(bits) => bits.words[(at % PAGE / 64) as usize],
        }
    }

    /// Adds a region; true if it is new.
    pub fn insert(&mut self, region: u32) -> bool {
        let is_new = !self.contains(region);
        if is_new {
            self.insert_all(region..=region);
        }
        is_new
    }

    /// Adds these regions.
    pub fn insert_all(&mut self, regions: RangeInclusive<u32>) {
        if self.contains_all(regions.clone()) {
            return;
        }
        self.each_page(regions, |page, words| {
            for (word, mask) in words.iter_mut().zip(page) {
                *word |= mask;
            }
        });
    }

    /// Removes a region; true if it was in the set.
    pub fn remove(&mut self, region: u32) -> bool {
        let was_there = self.contains(region);
        self.remove_all(region..=region);
        was_there
    }

    /// Removes these regions.
    pub fn remove_all(&mut self, regions: RangeInclusive<u32>) {
        if !self.contains_any(regions.clone()) {
            return;
        }
        self.each_page(regions, |page, words| {
            for (word, mask) in words.iter_mut().zip(page) {
                *word &= !mask;
            }
        });
    }

    /// Changes the words of each page of these regions; `change` gets their bits first.
    fn each_page(&mut self, regions: RangeInclusive<u32>, change: impl Fn(&[u64; WORDS], &mut [u64; WORDS])) {
        let (first, last) = regions.into_inner();
        debug_assert!(last < self.len, "regions of the set");
        for page in first / PAGE..=last / PAGE {
            let from = first.max(page * PAGE) - page * PAGE;
            let to = last.min(page * PAGE + (PAGE - 1)) - page * PAGE;
            let mask = std::array::from_fn(|word| word_below(to + 1, word) & !word_below(from, word));
            self.change(page as usize, |words| change(&mask, words));
        }
    }

    /// True if a region is in the set.
    pub fn contains(&self, region: u32) -> bool {
        self.word(region) & (1 << (region % 64)) != 0
    }

    /// True if all of these regions are in the set.
    pub fn contains_all(&self, regions: RangeInclusive<u32>) -> bool {
        self.seek(regions, |page| matches!(page, Page::All), |word| !word).is_none()
    }

    /// True if one of these regions is in the set.
    pub fn contains_any(&self, regions: RangeInclusive<u32>) -> bool {
        self.count > 0 && self.seek(regions, |page| matches!(page, Page::None), |word| word).is_some()
    }

    /// The first region of the set at or after `from`.
    pub fn next(&self, from: u32) -> Option<u32> {
        self.seek(from..=self.len.checked_sub(1)?, |page| matches!(page, Page::None), |word| word)
    }

    /// The first region at or after `from` that is not in the set.
    fn next_absent(&self, from: u32) -> Option<u32> {
        self.seek(from..=self.len.checked_sub(1)?, |page| matches!(page, Page::All), |word| !word)
    }

    /// The first of these regions whose bit is set in `of` of its word, except in pages for which `skip` is true.
    fn seek(&self, regions: RangeInclusive<u32>, skip: impl Fn(&Page) -> bool, of: impl Fn(u64) -> u64) -> Option<u32> {
        let (mut at, last) = regions.into_inner();
        while at <= last {
            if skip(self.page(at / PAGE)) {
                at = (at / PAGE + 1) * PAGE;
                continue;
            }
            let bits = of(self.word(at)) & !word_below(at % 64, 0);
            let found = at / 64 * 64 + bits.trailing_zeros();
            if bits != 0 {
                return Some(found).filter(|found| *found <= last);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }

    /// Adds all regions of another set.
    pub fn add(&mut self, other: &Regions) {
        self.combine(other, |_, other| *other == Page::None, |own, other| own | other);
    }

    /// Keeps only regions that are in both sets.
    pub fn intersect(&mut self, other: &Regions) {
        self.combine(other, |own, other| *own == Page::None || *other == Page::All, |own, other| own & other);
    }

    /// Removes all regions of another set.
    pub fn subtract(&mut self, other: &Regions) {
        self.combine(other, |own, other| *own == Page::None || *other == Page::None, |own, other| own & !other);
    }

    /// Changes each word by that of another set of the same capacity, except in pages that `stay`.
    fn combine(&mut self, other: &Regions, stay: impl Fn(&Page, &Page) -> bool, change: impl Fn(u64, u64) -> u64) {
        // A label of another capacity says nothing about these regions.
        let pages = if self.len == other.len { self.len.div_ceil(PAGE) } else { 0 };
        for page in 0..pages {
            if !stay(self.page(page), other.page(page)) {
                self.change(page as usize, |words| {
                    for (word, own) in words.iter_mut().enumerate() {
                        *own = change(*own, other.word(page * PAGE + word as u32 * 64));
                    }
                });
            }
        }
    }

    /// The regions that are not in another set.
    pub fn without(&self, other: &Regions) -> Regions {
        let mut rest = self.clone();
        rest.subtract(other);
        rest
    }

    /// True if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Number of regions in the set.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Number of regions that it can hold.
    pub fn capacity(&self) -> u32 {
        self.len
    }

    /// The regions of the set in rising order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.runs().flatten()
    }

    /// The regions of the set as runs without a gap, in rising order.
    pub fn runs(&self) -> impl Iterator<Item = RangeInclusive<u32>> + '_ {
        let mut from = Some(0);
        std::iter::from_fn(move || {
            let first = self.next(from?)?;
            from = self.next_absent(first);
            Some(first..=from.unwrap_or(self.len) - 1)
        })
    }

    /// A bit for each of these regions, lowest bit first.
    pub fn to_bytes(&self, regions: RangeInclusive<u32>) -> Vec<u8> {
        let (first, last) = regions.into_inner();
        let mut bytes = vec![0; bytes_of(last + 1 - first)];
        let mut at = first;
        while let Some(region) = self.next(at).filter(|region| *region <= last) {
            bytes[((region - first) / 8) as usize] |= 1 << ((region - first) % 8);
            at = region + 1;
        }
        bytes
    }

    /// Adds the regions from `first` on whose bits are set in `bytes`. Bits beyond the last region are ignored.
    pub fn add_bytes(&mut self, first: u32, bytes: &[u8]) {
        let of = |at: u32| bytes.get((at / 8) as usize).is_some_and(|byte| byte & (1 << (at % 8)) != 0);
        let bits = (bytes.len() as u64 * 8).min(u64::from(self.len - first)) as u32;
        let mut at = 0;
        while at < bits {
            let run = (at..bits).take_while(|at| of(*at)).count() as u32;
            if run > 0 {
                self.insert_all(first + at..=first + at + (run - 1));
            }
            at += run + 1;
        }
    }
}

/// The bits of word `word` for the first `count` regions of a page.
const fn word_below(count: u32, word: usize) -> u64 {
    let below = count.saturating_sub(word as u32 * 64);
    if below >= 64 { u64::MAX } else { (1 << below) - 1 }
}

/// Bytes that `len` bits take.
pub fn bytes_of(len: u32) -> usize {
    len.div_ceil(8) as usize
}
