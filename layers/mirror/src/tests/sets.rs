//! Sets of regions against a plain model, and their encodings.

use std::collections::BTreeSet;

use proptest::prelude::*;
use sealblock_block::ReservedArea;
use sealblock_units::BlockSize;

use crate::label::codec::LabelReader;
use crate::label::regions::{MAX_BLOCKS, MAX_REGIONS, MAX_REGIONS_IN_LABEL, RegionMap, Regions};
use crate::label::sets::{NoPages, PAGE_REGIONS, PageId, Pages, encode_paged, encode_plain, pages_of_set, pages_with};
use crate::label::{LabelError, MAX_REPLICAS, MAX_SETS, max_set_bytes};

const UUID: [u8; 16] = [7; 16];

#[test]
fn regions_cover_the_device_and_are_64_kib_up_to_1_tib() {
    for (size, capacity) in [
        (BlockSize::B4096, 1),
        (BlockSize::B4096, 16),
        (BlockSize::B4096, 257),
        (BlockSize::B512, (8 << 30) / 512),
        (BlockSize::B4096, (1 << 40) / 4096),
        (BlockSize::B4096, (8 << 40) / 4096 + 1),
        (BlockSize::B512, MAX_BLOCKS),
    ] {
        let map = RegionMap::new(size, capacity, MAX_REGIONS).unwrap();
        let region_bytes = (1_u64 << map.shift()) * size.bytes() as u64;
        let bytes = capacity.saturating_mul(size.bytes() as u64);
        assert_eq!(region_bytes == 64 << 10, bytes <= 1 << 40, "{bytes}");
        assert!(u64::from(map.count()) <= MAX_REGIONS);
        assert_eq!(RegionMap::with_shift(size, capacity, map.shift()), Some(map));
        let last = map.extent(map.count() - 1);
        assert_eq!((map.extent(0).start().get(), last.last().get()), (0, capacity - 1));
        assert_eq!(map.of(last), map.count() - 1..=map.count() - 1);
        assert_eq!(map.blocks(&Regions::all(map.count())), capacity);
        assert_eq!(map.group_extent(&map.group(map.count() - 1)).last().get(), capacity - 1);
    }
}

#[test]
fn devices_that_cannot_be_tracked_are_refused_and_do_not_panic() {
    // With 8192 regions of 2^31 blocks at most.
    assert!(RegionMap::new(BlockSize::B512, 1 << 44, MAX_REGIONS_IN_LABEL).is_some());
    assert_eq!(RegionMap::new(BlockSize::B512, (1 << 44) + 1, MAX_REGIONS_IN_LABEL), None);
    for capacity in [0, MAX_BLOCKS + 1, u64::MAX] {
        assert_eq!(RegionMap::new(BlockSize::B4096, capacity, MAX_REGIONS), None);
    }
    assert_eq!(RegionMap::with_shift(BlockSize::B4096, 8, 60), None);
    assert_eq!(RegionMap::with_shift(BlockSize::B4096, 1 << 40, 10), None, "too many");
}

#[test]
fn groups_are_a_mebibyte_and_small_devices_have_several() {
    let map = |bytes: u64| RegionMap::new(BlockSize::B4096, bytes / 4096, MAX_REGIONS).unwrap();
    assert_eq!(map(1 << 30).group(17), 16..=31);
    assert_eq!(map(1 << 30).groups(&(15..=16)), 0..=31);
    assert_eq!(map(16 << 40).group(17), 0..=63, "regions are a mebibyte themselves");
    assert_eq!(map(1 << 20).group(5), 4..=5, "eight of them");
    assert_eq!(map((1 << 30) + 4096).group(1 << 14), 1 << 14..=1 << 14, "the last one is cut short");
}

#[test]
fn a_device_has_the_pages_that_its_mirror_may_need() {
    for bytes in [1 << 20, 512 << 20, (512 << 20) + 4096, 1 << 34, 1 << 40, (1 << 40) + 4096, 1 << 50] {
        let map = RegionMap::new(BlockSize::B4096, bytes / 4096, MAX_REGIONS).unwrap();
        let needed = MAX_SETS as u32 * pages_of_set(map.count());
        assert!(needed <= ReservedArea::bitmap_pages(bytes), "{bytes}");
    }
}

/// Pages in memory; those in `spoilt` are torn.
struct Stored<'a> {
    content: &'a Regions,
    epoch: u64,
    spoilt: BTreeSet<u32>,
    held: Vec<u8>,
}

impl Pages for Stored<'_> {
    fn page(&mut self, id: PageId) -> Option<&[u8]> {
        self.held = id.encode(&UUID, self.epoch, self.content);
        if self.spoilt.contains(&id.page) {
            self.held[100] ^= 1;
        }
        Some(&self.held)
    }
}

fn set_of(len: u32, runs: &[(u32, u32)]) -> Regions {
    let mut set = Regions::none(len);
    for (first, more) in runs {
        set.insert_all(*first % len..=(*first % len).saturating_add(*more).min(len - 1));
    }
    set
}

fn decode(bytes: &[u8], len: u32, pages: &mut dyn Pages) -> Result<Regions, LabelError> {
    let mut rest = LabelReader(bytes);
    let set = rest.set(0, len, &UUID, pages)?;
    assert!(rest.0.is_empty());
    Ok(set)
}

#[test]
fn bits_always_fit_and_impossible_sets_are_refused() {
    let mut scattered = Regions::none(MAX_REGIONS_IN_LABEL as u32);
    (0..scattered.capacity()).step_by(2).for_each(|region| assert!(scattered.insert(region)));
    let bytes = encode_plain(&scattered, max_set_bytes(MAX_REPLICAS)).unwrap();
    assert_eq!(decode(&bytes, scattered.capacity(), &mut NoPages), Ok(scattered.clone()));
    let mut large = Regions::none(1 << 24);
    large.add_bytes(0, &[0x55; 20_000]);
    assert_eq!(encode_plain(&large, max_set_bytes(1)), None, "that is what pages are for");
    assert_eq!(encode_plain(&Regions::all(1 << 24), 16).map(|bytes| bytes.len()), Some(7));
    for (bytes, len) in [(&[9_u8][..], 8), (&[2, 0b1000_0000], 7), (&[1, 2, 7, 1], 8), (&[1, 3, 0x80, 0, 0], 8)] {
        assert!(matches!(decode(bytes, len, &mut NoPages), Err(LabelError::Field(_))), "{bytes:?}");
    }
    assert_eq!(decode(&[1, 5, 0], 8, &mut NoPages), Err(LabelError::Damaged));
}

proptest! {
    #[test]
    fn sets_are_as_a_plain_model_says(
        len in 1_u32..20_000,
        steps in proptest::collection::vec((any::<bool>(), any::<u32>(), 0_u32..6000), 0..40),
        probe: u32,
    ) {
        let (mut set, mut model) = (Regions::none(len), BTreeSet::new());
        for (adds, first, more) in steps {
            let first = first % len;
            let range = first..=(first + more).min(len - 1);
            if adds {
                set.insert_all(range.clone());
                model.extend(range);
            } else {
                set.remove_all(range.clone());
                model.retain(|region| !range.contains(region));
            }
        }
        let probe = probe % len;
        prop_assert_eq!(set.count() as usize, model.len());
        prop_assert_eq!(set.is_empty(), model.is_empty());
        prop_assert_eq!(set.next(probe), model.range(probe..).next().copied());
        prop_assert_eq!(set.contains_all(probe..=len - 1), (probe..len).all(|region| model.contains(&region)));
        prop_assert!(set.iter().eq(model.iter().copied()));
        let mut again = Regions::none(len);
        again.add_bytes(0, &set.to_bytes(0..=len - 1));
        prop_assert_eq!(&again, &set);
        again.intersect(&Regions::all(len));
        again.add(&Regions::none(len));
        prop_assert_eq!(&again, &set);
        again.subtract(&set);
        prop_assert!(again.is_empty());
        let mut rest = Regions::all(len).without(&set);
        prop_assert_eq!(rest.count(), len - set.count());
        rest.add(&set);
        prop_assert_eq!(rest, Regions::all(len));
    }

    #[test]
    fn sets_come_back_from_labels_and_pages_and_a_torn_page_says_more_never_less(
        runs in proptest::collection::vec((any::<u32>(), 0_u32..40), 0..200),
        added in proptest::collection::vec((any::<u32>(), 0_u32..4), 0..20),
        spoilt in proptest::collection::btree_set(0_u32..4, 0..3),
        epoch in 1_u64..9,
        other: bool,
    ) {
        let len = 3 * PAGE_REGIONS + 77;
        let content = set_of(len, &runs);
        let mut set = content.clone();
        set.add(&set_of(len, &added));
        let plain = encode_plain(&set, usize::MAX).unwrap();
        prop_assert_eq!(decode(&plain, len, &mut NoPages), Ok(set.clone()));
        let paged = encode_paged(&set, &content, epoch, usize::MAX).unwrap();
        let held = Vec::new();
        let mut pages = Stored { content: &content, epoch: epoch + u64::from(other), spoilt: spoilt.clone(), held };
        let read = decode(&paged, len, &mut pages).unwrap();
        prop_assert!(set.without(&read).is_empty(), "never less");
        let is_whole = !other && pages_with(&content).all(|page| !spoilt.contains(&page));
        if is_whole {
            prop_assert_eq!(&read, &set);
        }
        for page in (0..4).filter(|page| other || spoilt.contains(page)) {
            let id = PageId { set: 0, page };
            prop_assert!(!content.contains_any(id.regions(len)) || read.contains_all(id.regions(len)));
        }
    }

    #[test]
    fn no_bytes_of_a_set_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100), len in 1_u32..100_000) {
        let _ = LabelReader(&bytes).set(1, len, &UUID, &mut NoPages);
    }
}
