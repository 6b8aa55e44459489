//! Regions: the device in pieces small enough that little is copied for one changed block, and sets of them.
//!
//! A set takes memory in proportion to what is in it: it is cut into pages of 4096 regions, and a page in which there is
//! nothing, or everything, has no bits. Counting is a look at a number, and no walk visits regions one by one where whole words
//! or pages tell.

use std::ops::RangeInclusive;
use std::rc::Rc;

use sealblock_units::{BlockCount, BlockSize, Extent, Lba};

/// Regions of a device at most, where there is room beside the blocks for a bit for each.
pub const MAX_REGIONS: u64 = 1 << 24;
/// Regions of a device at most that keeps them in its labels alone.
pub const MAX_REGIONS_IN_LABEL: u64 = 8192;
/// Blocks of a device at most.
pub const MAX_BLOCKS: u64 = 1 << 52;
/// The smallest region, in bytes.
const LEAST_REGION_BYTES: u64 = 64 << 10;
/// What is marked as under way at once, in bytes: so much is written between two labels by somebody who writes in order.
const GROUP_BYTES: u64 = 1 << 20;
/// Groups of a small device, at least.
const LEAST_GROUPS: u64 = 8;
/// A region has two to the power of this many blocks at most, so that its extent has a 32-bit length.
const MOST_SHIFT: u32 = 31;

/// How a device is cut into regions, and these into groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionMap {
    capacity_blocks: u64,
    shift: u32,
    group_shift: u32,
}

impl RegionMap {
    /// The finest map of a device of this shape that has no more than `most` regions, and never smaller ones than 64 KiB;
    /// nothing where the device has more than [`MOST_BLOCKS`], none at all, or too many for so few regions.
    pub fn new(size: BlockSize, capacity_blocks: u64, most: u64) -> Option<RegionMap> {
        let least = (LEAST_REGION_BYTES >> size.shift()).trailing_zeros();
        let fits = |shift: &u32| capacity_blocks.div_ceil(1 << shift) <= most;
        let shift = (least..=MOST_SHIFT).find(fits)?;
        RegionMap::with_shift(size, capacity_blocks, shift)
    }

    /// The map whose regions have two to the power of `shift` blocks; nothing where it cannot be.
    pub fn with_shift(size: BlockSize, capacity_blocks: u64, shift: u32) -> Option<RegionMap> {
        let fits = shift <= MOST_SHIFT
            && (1..=MAX_BLOCKS).contains(&capacity_blocks)
            && capacity_blocks.div_ceil(1 << shift) <= MAX_REGIONS;
        if !fits {
            return None;
        }
        let mut group_shift = (GROUP_BYTES >> size.shift()).trailing_zeros().saturating_sub(shift).min(4);
        while group_shift > 0 && capacity_blocks.div_ceil(1 << (shift + group_shift)) < LEAST_GROUPS {
            group_shift -= 1;
        }
        Some(RegionMap { capacity_blocks, shift, group_shift })
    }

    /// Two to the power of this is the number of blocks of a region.
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

    /// The blocks of the regions of a group, or of any that lie in one.
    pub fn group_extent(&self, group: &RangeInclusive<u32>) -> Extent {
        let (first, last) = (self.extent(*group.start()), self.extent(*group.end()));
        Extent::from_raw(first.start().get(), last.last().get() + 1 - first.start().get())
            .expect("a group has fewer blocks than an extent can have")
    }

    /// How many blocks these regions have.
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
    /// No region of it.
    None,
    /// Every region of it that there is.
    All,
    /// Some: neither none nor all, so that equal sets are equal page by page. Copies of a set share it until one is changed.
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
    /// None at all while the set is new and empty.
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

    /// How many regions a page has.
    fn page_len(&self, page: usize) -> u32 {
        (self.len - page as u32 * PAGE).min(PAGE)
    }

    fn page_count(&self, page: usize) -> u32 {
        match self.pages.get(page) {
            None | Some(Page::None) => 0,
            Some(Page::All) => self.page_len(page),
            Some(Page::Some(bits)) => bits.count,
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
        match self.pages.get((at / PAGE) as usize) {
            None | Some(Page::None) => 0,
            Some(Page::All) => word_below(self.page_len((at / PAGE) as usize), (at % PAGE / 64) as usize),
            Some(Page::Some(bits)) => bits.words[(at % PAGE / 64) as usize],
        }
    }

    /// Adds a region; whether it was not there.
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

    /// Takes a region out; whether it was there.
    pub fn remove(&mut self, region: u32) -> bool {
        let was_there = self.contains(region);
        self.remove_all(region..=region);
        was_there
    }

    /// Takes these regions out.
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

    /// Changes the words of each page that these regions touch; the first argument has their bits.
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

    /// Whether a region is in the set.
    pub fn contains(&self, region: u32) -> bool {
        self.word(region) & (1 << (region % 64)) != 0
    }

    /// Whether all of these are in the set.
    pub fn contains_all(&self, regions: RangeInclusive<u32>) -> bool {
        self.next_absent(*regions.start()).is_none_or(|absent| absent > *regions.end())
    }

    /// Whether one of these is in the set.
    pub fn contains_any(&self, regions: RangeInclusive<u32>) -> bool {
        self.next(*regions.start()).is_some_and(|next| next <= *regions.end())
    }

    /// The first region of the set from one on.
    pub fn next(&self, from: u32) -> Option<u32> {
        self.seek(from, |page| matches!(page, Page::None), |word| word)
    }

    /// The first region from one on that is not in the set.
    fn next_absent(&self, from: u32) -> Option<u32> {
        self.seek(from, |page| matches!(page, Page::All), |word| !word)
    }

    /// The first region from one on whose bit `of` gives; pages of which `skip` says so have none.
    fn seek(&self, from: u32, skip: impl Fn(&Page) -> bool, of: impl Fn(u64) -> u64) -> Option<u32> {
        let mut at = from;
        while at < self.len {
            let page = self.pages.get((at / PAGE) as usize).unwrap_or(&Page::None);
            if skip(page) {
                at = (at / PAGE + 1) * PAGE;
                continue;
            }
            let bits = of(self.word(at)) & !word_below(at % 64, 0);
            let found = at / 64 * 64 + bits.trailing_zeros();
            if bits != 0 {
                return Some(found).filter(|found| *found < self.len);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }

    /// Adds all regions of another set of as many.
    pub fn add(&mut self, other: &Regions) {
        let same = other.len == self.len;
        for page in (0..other.pages.len()).filter(|_| same) {
            match &other.pages[page] {
                Page::None => {}
                Page::All => {
                    let first = page as u32 * PAGE;
                    self.insert_all(first..=first + (self.page_len(page) - 1));
                }
                Page::Some(bits) => {
                    self.change(page, |words| words.iter_mut().zip(&bits.words).for_each(|(word, bit)| *word |= bit));
                }
            }
        }
    }

    /// Keeps what is in both.
    pub fn intersect(&mut self, other: &Regions) {
        for page in 0..self.pages.len() {
            match other.pages.get(page) {
                Some(Page::All) => {}
                Some(Page::Some(bits)) => {
                    self.change(page, |words| words.iter_mut().zip(&bits.words).for_each(|(word, bit)| *word &= bit));
                }
                None | Some(Page::None) => self.change(page, |words| *words = [0; WORDS]),
            }
        }
    }

    /// Takes all regions of another set out.
    pub fn subtract(&mut self, other: &Regions) {
        for page in 0..self.pages.len() {
            match (&self.pages[page], other.pages.get(page)) {
                (Page::None, _) | (_, None | Some(Page::None)) => {}
                (_, Some(Page::All)) => self.change(page, |words| *words = [0; WORDS]),
                // Two copies that nobody has changed since.
                (Page::Some(own), Some(Page::Some(bits))) if Rc::ptr_eq(own, bits) => {
                    self.change(page, |words| *words = [0; WORDS]);
                }
                (_, Some(Page::Some(bits))) => {
                    self.change(page, |words| words.iter_mut().zip(&bits.words).for_each(|(word, bit)| *word &= !bit));
                }
            }
        }
    }

    /// Those of the set that are not in another one.
    pub fn without(&self, other: &Regions) -> Regions {
        let mut rest = self.clone();
        rest.subtract(other);
        rest
    }

    /// Whether there is no region in the set.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// How many regions are in the set.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// How many there could be.
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

    /// A bit for each of these regions, in bytes from the lowest bit on.
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

    /// Adds the regions from `first` on that these bytes say. Bits for regions that are not there are not looked at.
    pub fn add_bytes(&mut self, first: u32, bytes: &[u8]) {
        let of = |at: u32| bytes.get((at / 8) as usize).is_some_and(|byte| byte & (1 << (at % 8)) != 0);
        let most = (bytes.len() as u64 * 8).min(u64::from(self.len - first)) as u32;
        let mut at = 0;
        while at < most {
            let run = (at..most).take_while(|at| of(*at)).count() as u32;
            if run > 0 {
                self.insert_all(first + at..=first + at + (run - 1));
            }
            at += run + 1;
        }
    }
}

/// The bits of word `word` that stand for the first `count` regions of a page.
const fn word_below(count: u32, word: usize) -> u64 {
    let below = count.saturating_sub(word as u32 * 64);
    if below >= 64 { u64::MAX } else { (1 << below) - 1 }
}

/// Bytes of a bit for each of `len` regions.
pub fn bytes_of(len: u32) -> usize {
    len.div_ceil(8) as usize
}
