//! Places that were taken from devices that the kernel wrote, and properties of every profile.

use proptest::prelude::*;
use sealblock_btrfs_format::items::chunk::{BlockGroupFlags, ChunkBuf, ChunkHead, Stripe};
use zerocopy::FromBytes;

use super::*;

const LOGICAL: u64 = 1 << 30;

/// A map with one chunk, whose stripes begin at different places of the devices 1, 2 and so on.
fn map(profile: Profile, stripes: u16, bytes: u64) -> ChunkMap {
    let mut map = ChunkMap::default();
    add(&mut map, LOGICAL, profile, stripes, bytes).unwrap();
    map
}

fn add(map: &mut ChunkMap, logical: u64, profile: Profile, stripes: u16, bytes: u64) -> Result<(), MapError> {
    let mut head = ChunkHead::read_from_bytes(&[0; size_of::<ChunkHead>()]).unwrap();
    (head.length, head.flags) = (bytes.into(), (profile.flag() | BlockGroupFlags::DATA).bits().into());
    let stripe = |index: u16| {
        let index = u64::from(index);
        Stripe { devid: (index + 1).into(), offset: ((index + 1) << 20).into(), dev_uuid: [0; 16] }
    };
    let stripes: Vec<Stripe> = (0..stripes).map(stripe).collect();
    map.add(logical, &Chunk { head: &head, stripes: &stripes })
}

/// The stripe, and the offset in it.
fn stripes_of(located: &Located) -> Vec<(u64, u64)> {
    located.copies.iter().map(|place| (place.devid - 1, place.offset - (place.devid << 20))).collect()
}

#[test]
fn places_are_those_that_the_kernel_chose() {
    // Byte 335,872 of a chunk is byte 8192 of its piece number 5.
    const STRIPE: u64 = STRIPE_BYTES;
    for (profile, stripes, expected) in [
        (Profile::Single, 1, vec![(0, 335_872)]),
        (Profile::Dup, 2, vec![(0, 335_872), (1, 335_872)]),
        (Profile::Raid1C3, 3, vec![(0, 335_872), (1, 335_872), (2, 335_872)]),
        (Profile::Raid0, 3, vec![(2, STRIPE + 8192)]),
        (Profile::Raid10, 4, vec![(2, 2 * STRIPE + 8192), (3, 2 * STRIPE + 8192)]),
        (Profile::Raid5, 3, vec![(0, 2 * STRIPE + 8192)]),
        (Profile::Raid6, 4, vec![(3, 2 * STRIPE + 8192)]),
        (Profile::Raid0, 1, vec![(0, 335_872)]),
        (Profile::Raid10, 2, vec![(0, 335_872), (1, 335_872)]),
    ] {
        let located = map(profile, stripes, 3 << 20).locate(LOGICAL + 335_872, 4096).unwrap();
        assert_eq!((stripes_of(&located), located.bytes), (expected, 4096), "{profile:?}");
    }
}

#[test]
fn what_is_left_without_devices_follows_from_the_profile() {
    let survives =
        |profile, stripes, lost: &[u64]| map(profile, stripes, 1 << 20).survives_without(|id| lost.contains(&id));
    for (profile, stripes, lost, expected) in [
        (Profile::Single, 1, &[1][..], false),
        (Profile::Single, 1, &[2], true),
        (Profile::Raid1, 2, &[2], true),
        (Profile::Raid1, 2, &[1, 2], false),
        (Profile::Raid1C3, 3, &[1, 3], true),
        (Profile::Raid0, 2, &[2], false),
        (Profile::Raid10, 4, &[1, 4], true),
        (Profile::Raid10, 4, &[3, 4], false),
        (Profile::Raid6, 4, &[1], false),
        (Profile::Raid6, 4, &[], true),
    ] {
        assert_eq!(survives(profile, stripes, lost), expected, "{profile:?} without {lost:?}");
    }
    let mut two = map(Profile::Raid1, 2, 1 << 20);
    add(&mut two, 2 * LOGICAL, Profile::Single, 1, 1 << 20).unwrap();
    assert!(two.survives_without(|id| id == 2) && !two.survives_without(|id| id == 1), "one chunk is on it alone");
}

#[test]
fn parity_turns_with_the_rows() {
    let map = map(Profile::Raid6, 4, 8 << 20);
    for row in 0..5_u64 {
        let located = map.locate(LOGICAL + row * 2 * STRIPE_BYTES, 1).unwrap().row.unwrap();
        let devices: Vec<u64> = located.pieces.iter().map(|(_, place)| (place.devid - 1 + 4 - row % 4) % 4).collect();
        assert_eq!(devices, [0, 1, 2, 3], "row {row} is the first one, turned");
        let roles: Vec<Role> = located.pieces.iter().map(|(role, _)| *role).collect();
        assert_eq!(roles, [Role::Data(0), Role::Data(1), Role::P, Role::Q]);
        assert_eq!(located.wanted, 0);
    }
}

#[test]
fn addresses_outside_all_chunks_have_no_place_and_chunks_do_not_overlap() {
    let mut map = map(Profile::Single, 1, 1 << 20);
    for logical in [0, LOGICAL - 1, LOGICAL + (1 << 20), u64::MAX] {
        assert_eq!(map.locate(logical, 1), Err(MapError::Unmapped(logical)));
    }
    assert_eq!(map.locate(LOGICAL + (1 << 20) - 1, 4096).unwrap().bytes, 1);
    assert_eq!(add(&mut map, LOGICAL, Profile::Single, 1, 1 << 20), Ok(()), "the same one again");
    for (logical, bytes) in [(LOGICAL, 4096), (LOGICAL - 4096, 8192), (LOGICAL + 4096, 4096), (LOGICAL - 1, 2 << 20)] {
        let error = add(&mut map, logical, Profile::Single, 1, bytes).unwrap_err();
        assert_eq!(error, MapError::Overlap { logical, other: LOGICAL });
    }
    add(&mut map, LOGICAL + (1 << 20), Profile::Dup, 2, 4096).unwrap();
    add(&mut map, LOGICAL - 4096, Profile::Dup, 2, 4096).unwrap();
    assert_eq!(map.ranges().map(|(_, bytes)| bytes).collect::<Vec<_>>(), [4096, 1 << 20, 4096]);
}

#[test]
fn chunks_that_cannot_be_are_refused() {
    let mut map = ChunkMap::default();
    for (logical, profile, stripes, bytes) in [
        (0, Profile::Single, 1, 0),
        (u64::MAX, Profile::Single, 1, 2),
        (0, Profile::Raid10, 3, 4096),
        (0, Profile::Raid6, 2, 4096),
        (0, Profile::Single, 1, u64::MAX),
    ] {
        assert_eq!(add(&mut map, logical, profile, stripes, bytes), Err(MapError::Impossible(logical)));
    }
    assert_eq!((map.is_empty(), map.len()), (true, 0));
}

/// A profile with a number of stripes that it allows.
fn shapes() -> impl Strategy<Value = (Profile, u16)> {
    (proptest::sample::select(Profile::ALL.to_vec()), 1..9_u16).prop_map(|(profile, stripes)| {
        let allowed = (stripes..=10).chain((1..stripes).rev()).find(|count| profile.allows_stripes(*count));
        (profile, allowed.unwrap_or(1))
    })
}

proptest! {
    #[test]
    fn no_two_addresses_share_a_byte_of_a_device((profile, stripes) in shapes(), rows in 1..6_u64) {
        let bytes = rows * u64::from(profile.data_stripes(stripes)) * STRIPE_BYTES;
        let map = map(profile, stripes, bytes);
        let (mut used, mut offset) = (std::collections::BTreeSet::new(), 0);
        while offset < bytes {
            let located = map.locate(LOGICAL + offset, STRIPE_BYTES).unwrap();
            prop_assert_eq!(located.bytes, STRIPE_BYTES);
            for place in &located.copies {
                prop_assert!(used.insert((place.devid, place.offset)), "{:?} twice", place);
                let end = place.offset - (place.devid << 20) + located.bytes;
                prop_assert!(end <= rows * STRIPE_BYTES, "it ends with its stripe");
            }
            if let Some(row) = located.row {
                prop_assert_eq!(row.pieces[row.wanted], (Role::Data(row.wanted), located.copies[0]));
                let devices: std::collections::BTreeSet<u64> = row.pieces.iter().map(|(_, at)| at.devid).collect();
                prop_assert_eq!(devices.len(), usize::from(stripes), "each piece is on a device of its own");
                for (role, place) in row.pieces.iter().filter(|(role, _)| !matches!(role, Role::Data(_))) {
                    prop_assert!(row.wanted > 0 || used.insert((place.devid, place.offset)), "{:?} twice", role);
                }
            }
            offset += located.bytes;
        }
    }

    #[test]
    fn a_range_is_found_byte_by_byte_and_at_once((profile, stripes) in shapes(), start in 0..300_000_u64, bytes in 1..100_000_u64) {
        let map = map(profile, stripes, 4 << 20);
        let located = map.locate(LOGICAL + start, bytes).unwrap();
        prop_assert!((1..=bytes).contains(&located.bytes));
        let last = map.locate(LOGICAL + start + located.bytes - 1, 1).unwrap();
        for (first, last) in located.copies.iter().zip(&last.copies) {
            prop_assert_eq!((first.devid, first.offset + located.bytes - 1), (last.devid, last.offset));
        }
    }
}

#[test]
fn the_ranges_of_superblocks_are_those_whose_places_they_are_in() {
    for profile in Profile::ALL {
        let stripes = (1..=4).rev().find(|count| profile.allows_stripes(*count)).unwrap();
        let data = u64::from(profile.data_stripes(stripes));
        let stripe = |devid: u64| Stripe { devid: devid.into(), offset: (63 << 20).into(), dev_uuid: [0; 16] };
        let stripes: Vec<Stripe> = (1..=u64::from(stripes)).map(stripe).collect();
        let buf = ChunkBuf::new(data * (4 << 20), BlockGroupFlags::METADATA | profile.flag(), 4096, stripes);
        let mut map = ChunkMap::default();
        map.add(LOGICAL, &buf.as_item()).unwrap();
        let ranges = map.superblock_ranges(LOGICAL);
        if matches!(profile, Profile::Raid5 | Profile::Raid6) {
            assert_eq!(ranges, []);
            continue;
        }
        assert!(!ranges.is_empty(), "{profile:?}");
        for piece in 0..data * (4 << 20) / STRIPE_BYTES {
            let at = LOGICAL + piece * STRIPE_BYTES;
            let places = map.locate(at, STRIPE_BYTES).unwrap().copies;
            let has_superblock =
                places.iter().any(|place| (place.offset..place.offset + STRIPE_BYTES).contains(&(64 << 20)));
            assert_eq!(ranges.contains(&(at, STRIPE_BYTES)), has_superblock, "{profile:?} {piece}");
        }
    }
}
