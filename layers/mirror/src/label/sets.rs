//! Encoding of sets of regions: in the label as far as they fit, and in bitmap pages beside it. The format is in
//! `docs/formats/mirror-label.md`.
//!
//! The label has a set as runs, or as a bit for each region, whichever is shorter. A set that is too scattered for both
//! has bitmap pages in the reserved area; the label lists the valid pages, and the regions that were added since. A
//! page that is torn, unreadable, or not the one of the label counts as all of its regions: then more is compared and
//! nothing is missed. All bytes are untrusted until they were checked.

use std::ops::RangeInclusive;

use sealblock_block::ReservedArea;
use sealblock_integrity::guard;

use crate::label::codec::{LabelError, LabelReader, get, put, put_varint};
use crate::label::regions::{MAX_REGIONS_IN_LABEL, Regions, bytes_of};

const PAGE_BYTES: usize = ReservedArea::Bitmap { page: 0 }.max_bytes();
const PAGE_HEAD_BYTES: usize = 64;
/// Regions of a page.
pub const PAGE_REGIONS: u32 = ((PAGE_BYTES - PAGE_HEAD_BYTES) * 8) as u32;

const MAGIC: [u8; 4] = *b"SBMP";
const AT_CHECKSUM: usize = 4;
const AT_UUID: usize = 8;
const AT_EPOCH: usize = 24;
const AT_PAGE: usize = 32;
const AT_SET: usize = 36;

/// Encodings of a set.
const EMPTY: u8 = 0;
const RUNS: u8 = 1;
const BITS: u8 = 2;
const PAGED: u8 = 3;

/// Bitmap pages of a set of `regions`; 0 if its bits always fit the label.
pub fn pages_of_set(regions: u32) -> u32 {
    if u64::from(regions) <= MAX_REGIONS_IN_LABEL { 0 } else { regions.div_ceil(PAGE_REGIONS) }
}

/// A page of a set.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PageId {
    /// 0 for the dirty regions, else one more than the index of the replica whose out-of-sync regions they are.
    pub set: u8,
    /// Number of the page in its set, from 0.
    pub page: u32,
}

impl PageId {
    /// Its place in the reserved area of a mirror with so many regions.
    pub fn area(self, regions: u32) -> ReservedArea {
        ReservedArea::Bitmap { page: u32::from(self.set) * pages_of_set(regions) + self.page }
    }

    /// The regions whose bits it holds, of so many.
    pub fn regions(self, regions: u32) -> RangeInclusive<u32> {
        let first = self.page * PAGE_REGIONS;
        first..=first.saturating_add(PAGE_REGIONS - 1).min(regions - 1)
    }

    /// Encodes the page.
    pub fn encode(self, uuid: &[u8; 16], epoch: u64, set: &Regions) -> Vec<u8> {
        let mut bytes = vec![0; PAGE_HEAD_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[AT_UUID..AT_UUID + 16].copy_from_slice(uuid);
        put::<8>(&mut bytes, AT_EPOCH, epoch);
        put::<4>(&mut bytes, AT_PAGE, u64::from(self.page));
        put::<1>(&mut bytes, AT_SET, u64::from(self.set));
        bytes.extend_from_slice(&set.to_bytes(self.regions(set.capacity())));
        bytes.resize(PAGE_BYTES, 0);
        let checksum = guard::crc32c(&bytes[AT_UUID..]);
        put::<4>(&mut bytes, AT_CHECKSUM, u64::from(checksum));
        bytes
    }

    /// The bits of a page, if these bytes are this page of this mirror and epoch.
    fn bits<'a>(self, bytes: &'a [u8], uuid: &[u8; 16], epoch: u64) -> Option<&'a [u8]> {
        let is_page = bytes.len() == PAGE_BYTES
            && bytes.starts_with(&MAGIC)
            && get::<4>(bytes, AT_CHECKSUM) == u64::from(guard::crc32c(&bytes[AT_UUID..]))
            && bytes[AT_UUID..AT_UUID + 16] == *uuid
            && get::<8>(bytes, AT_EPOCH) == epoch
            && get::<4>(bytes, AT_PAGE) == u64::from(self.page)
            && get::<1>(bytes, AT_SET) == u64::from(self.set);
        bits_of(bytes).filter(|_| is_page)
    }
}

/// The bits of any page.
fn bits_of(bytes: &[u8]) -> Option<&[u8]> {
    (bytes.len() == PAGE_BYTES).then(|| &bytes[PAGE_HEAD_BYTES..])
}

/// The runs of a set, each as the gap before it and its length less one; `None` if they take more than `max_bytes`.
fn runs_bytes(set: &Regions, max_bytes: usize) -> Option<Vec<u8>> {
    let (mut bytes, mut next) = (Vec::new(), 0);
    for run in set.runs() {
        put_varint(&mut bytes, u64::from(run.start() - next));
        put_varint(&mut bytes, u64::from(run.end() - run.start()));
        if bytes.len() > max_bytes {
            return None;
        }
        next = run.end() + 1;
    }
    let mut whole = Vec::with_capacity(bytes.len() + 3);
    put_varint(&mut whole, bytes.len() as u64);
    whole.extend_from_slice(&bytes);
    Some(whole).filter(|whole| whole.len() <= max_bytes)
}

/// Encodes a set without pages; `None` if it takes more than `max_bytes`.
pub fn encode_plain(set: &Regions, max_bytes: usize) -> Option<Vec<u8>> {
    if set.is_empty() {
        return Some(vec![EMPTY]);
    }
    let bits = bytes_of(set.capacity());
    let (form, bytes) = match runs_bytes(set, bits.min(max_bytes.saturating_sub(1))) {
        Some(runs) => (RUNS, runs),
        None if bits < max_bytes => (BITS, set.to_bytes(0..=set.capacity() - 1)),
        None => return None,
    };
    Some([&[form], &bytes[..]].concat())
}

/// Encodes a set whose pages hold `content` and were written at `epoch`; `None` if it takes more than `max_bytes`.
pub fn encode_paged(set: &Regions, content: &Regions, epoch: u64, max_bytes: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![PAGED];
    bytes.extend_from_slice(&epoch.to_le_bytes());
    let mut used = vec![0; bytes_of(pages_of_set(set.capacity()))];
    for page in pages_with(content) {
        used[page as usize / 8] |= 1 << (page % 8);
    }
    bytes.extend_from_slice(&used);
    let runs = runs_bytes(&set.without(content), max_bytes.checked_sub(bytes.len())?)?;
    bytes.extend_from_slice(&runs);
    Some(bytes)
}

/// The numbers of the pages in which a set has regions.
pub(crate) fn pages_with(set: &Regions) -> impl Iterator<Item = u32> + '_ {
    let mut from = Some(0);
    std::iter::from_fn(move || {
        let page = set.next(from?)? / PAGE_REGIONS;
        from = (page + 1).checked_mul(PAGE_REGIONS);
        Some(page)
    })
}

/// Source of bitmap pages for decoding a label.
pub trait Pages {
    /// The bytes of a page; `None` if it is unreadable.
    fn page(&mut self, id: PageId) -> Option<&[u8]>;

    /// True if pages count without a check; only if a test breaks that rule.
    fn are_trusted(&self) -> bool {
        false
    }
}

/// No pages: each counts as all of its regions.
pub struct NoPages;

impl Pages for NoPages {
    fn page(&mut self, _: PageId) -> Option<&[u8]> {
        None
    }
}

impl LabelReader<'_> {
    /// Decodes set `number` of a mirror with this identity and so many regions.
    pub fn set(
        &mut self,
        number: usize,
        regions: u32,
        uuid: &[u8; 16],
        pages: &mut dyn Pages,
    ) -> Result<Regions, LabelError> {
        let mut set = Regions::none(regions);
        match self.bytes(1)?[0] {
            EMPTY => {}
            RUNS => self.runs(&mut set)?,
            BITS => {
                let bits = self.bytes(bytes_of(regions))?;
                if !regions.is_multiple_of(8) && bits.last().is_some_and(|last| last >> (regions % 8) != 0) {
                    return Err(LabelError::Field("regions"));
                }
                set.add_bytes(0, bits);
            }
            PAGED => self.paged(&mut set, number, uuid, pages)?,
            _ => return Err(LabelError::Field("encoding of a set of regions")),
        }
        Ok(set)
    }

    fn paged(
        &mut self,
        set: &mut Regions,
        number: usize,
        uuid: &[u8; 16],
        pages: &mut dyn Pages,
    ) -> Result<(), LabelError> {
        let count = pages_of_set(set.capacity());
        let epoch = get::<8>(self.bytes(8)?, 0);
        let used = self.bytes(bytes_of(count))?;
        for page in (0..count).filter(|page| used[*page as usize / 8] & (1 << (page % 8)) != 0) {
            let id = PageId { set: number as u8, page };
            let regions = id.regions(set.capacity());
            let are_believed = pages.are_trusted();
            let bits = |bytes| if are_believed { bits_of(bytes) } else { id.bits(bytes, uuid, epoch) };
            match pages.page(id).and_then(bits) {
                Some(bits) => set.add_bytes(*regions.start(), &bits[..bytes_of(regions.end() + 1 - regions.start())]),
                None => set.insert_all(regions),
            }
        }
        self.runs(set)
    }

    fn runs(&mut self, set: &mut Regions) -> Result<(), LabelError> {
        let wrong = LabelError::Field("regions");
        let count = self.varint("regions")?;
        let mut rest = LabelReader(self.bytes(usize::try_from(count).map_err(|_| LabelError::Damaged)?)?);
        let mut next = 0_u64;
        while !rest.0.is_empty() {
            let first = next + rest.varint("regions")?;
            let last = first + rest.varint("regions")?;
            if last >= u64::from(set.capacity()) {
                return Err(wrong);
            }
            set.insert_all(first as u32..=last as u32);
            next = last + 1;
        }
        Ok(())
    }
}
