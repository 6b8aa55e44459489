use sealblock_integrity::{GuardKind, ProtectionType};

use super::*;
use crate::format::{Seed, Superblock, crc32c};

const GIB: u64 = 1 << 30;

fn container(bytes: u64, shards: u32) -> Result<Container, ContainerError> {
    let protection = PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type1);
    Container::new([7; 16], (BlockSize::B4096, 512), bytes >> 12, Some(protection), (shards, 0))
}

/// A superblock with a right checksum in which a field has another value.
fn forged<const N: usize>(at: usize, value: u64) -> Result<Container, ContainerError> {
    let mut bytes = container(4 * GIB, 4).unwrap().encode();
    put::<N>(&mut bytes, at, value);
    seal(&mut bytes);
    Container::decode(&bytes)
}

fn seal(bytes: &mut [u8]) {
    let checksum = crc32c(&bytes[..AT_CHECKSUM]);
    put::<4>(bytes, AT_CHECKSUM, u64::from(checksum));
}

#[test]
fn what_is_encoded_is_decoded_and_ends_with_the_medium() {
    for (block_size, sector_bytes) in [(BlockSize::B4096, 512), (BlockSize::B4096, 4096), (BlockSize::B512, 512)] {
        for (bytes, shards, medium_bytes) in [(4 * GIB, 4, 0), (128 << 20, 2, 0), (9 * GIB + 512, 16, 20 * GIB + 512)] {
            let (capacity, profile) = (bytes >> block_size.shift(), (block_size, sector_bytes));
            let made = Container::new([1; 16], profile, capacity, None, (shards, medium_bytes)).unwrap();
            assert_eq!(Container::decode(&made.encode()), Ok(made));
            assert!(made.medium_bytes() == made.windows_end() + TAIL_BYTES || made.medium_bytes() == 20 * GIB);
            assert_eq!(made.copy_offsets()[2] + THIRD_FROM_END_BYTES, made.medium_bytes());
            let data_bytes = (u64::from(shards) * made.shard_layout().capacity_blocks()) << block_size.shift();
            assert!(data_bytes >= capacity << block_size.shift());
            assert!(data_bytes < (capacity << block_size.shift()) + u64::from(shards) * SHARD_UNIT_BYTES);
        }
    }
}

#[test]
fn windows_follow_each_other_and_each_has_room_for_its_shard() {
    let made = container(4 * GIB, 4).unwrap();
    let windows: Vec<Window> = (0..4).map(|shard| made.window(shard)).collect();
    assert_eq!(windows[0].offset, 64 << 10);
    assert!(windows.windows(2).all(|two| two[0].offset + two[0].length == two[1].offset));
    assert!(windows.iter().all(|window| window.length == made.shard_layout().medium_bytes()));
    assert_eq!(windows[3].offset + windows[3].length, made.windows_end());
}

#[test]
fn each_block_has_one_place() {
    let made = container(3 * GIB + 4096, 2).unwrap();
    assert_eq!(made.shard_of(Lba::new(255)), (0, Lba::new(255)));
    assert_eq!(made.shard_of(Lba::new(256)), (1, Lba::new(0)));
    assert_eq!(made.shard_of(Lba::new(512)), (0, Lba::new(256)));
    for lba in (0..made.capacity_blocks()).step_by(101).chain([made.capacity_blocks() - 1]) {
        let (shard, place) = made.shard_of(Lba::new(lba));
        assert_eq!(made.block_at(shard, place), Lba::new(lba));
        assert!(place.get() < made.shard_layout().capacity_blocks());
    }
}

#[test]
fn shards_have_identities_of_their_own() {
    let made = container(16 * GIB, 16).unwrap();
    let mut salts: Vec<u32> = (0..16).map(|shard| Seed::of(&made.shard_uuid(shard)).0).collect();
    salts.sort_unstable();
    salts.dedup();
    assert_eq!(salts.len(), 16);
    assert!((0..16).all(|shard| Container::may_be_shard(&made.shard_uuid(shard))));
    assert!(!Container::may_be_shard(&made.uuid()), "{:?}", made.uuid());
}

#[test]
fn every_flipped_bit_is_noticed() {
    let good = container(4 * GIB, 4).unwrap().encode();
    for bit in 0..good.len() * 8 {
        let mut bytes = good;
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(Container::decode(&bytes).is_err(), "bit {bit}");
    }
    assert_eq!(Container::decode(&good[..511]), Err(ContainerError::Truncated));
    assert_eq!(Container::decode(&[]), Err(ContainerError::Magic));
}

#[test]
fn impossible_fields_are_refused_by_name() {
    use ContainerError::{Features, Field, Layout, Version};
    let field = |refused: Result<Container, ContainerError>| match refused {
        Err(Field { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(forged::<4>(AT_VERSION, 4), Err(Version(4)));
    assert_eq!(forged::<4>(AT_VERSION, 2), Err(Version(2)));
    assert_eq!(forged::<4>(AT_FEATURES, 0x10), Err(Features(0x10)));
    assert_eq!(field(forged::<4>(AT_BLOCK_BYTES, 1024)), "block size");
    assert!(matches!(forged::<4>(AT_SECTOR_BYTES, 8192), Err(Layout(_))));
    assert_eq!(field(forged::<8>(AT_CAPACITY, 0)), "capacity");
    assert_eq!(field(forged::<8>(AT_CAPACITY, u64::MAX)), "capacity");
    assert_eq!(field(forged::<8>(AT_CAPACITY, 1 << 40)), "length of the medium");
    assert_eq!(field(forged::<1>(56, 9)), "guard");
    assert_eq!(field(forged::<1>(57, 9)), "protection type");
    assert_eq!(field(forged::<1>(58, 200)), "storage tag size");
    assert_eq!(field(forged::<1>(AT_SHARDS, 0)), "number of shards");
    assert_eq!(field(forged::<1>(AT_SHARDS, 17)), "number of shards");
    for unit_bytes in [0, 4095, 3 << 20] {
        assert_eq!(field(forged::<4>(AT_UNIT_BYTES, unit_bytes)), "unit");
    }
    // The blocks of a unit are whole, but its bytes are not.
    assert_eq!(field(forged::<4>(AT_UNIT_BYTES, (1 << 20) + 1)), "byte");
    assert_eq!(field(forged::<8>(AT_WINDOWS_OFFSET, 128 << 10)), "shards' offset");
    assert_eq!(field(forged::<8>(AT_WINDOW_BYTES, 1 << 30)), "length of a shard");
    assert_eq!(field(forged::<8>(AT_MEDIUM_BYTES, 4 * GIB)), "length of the medium");
    assert_eq!(field(forged::<8>(AT_MEDIUM_BYTES, 20 * GIB + 512)), "length of the medium");
    assert_eq!(field(forged::<8>(32, 5)), "byte");
    assert_eq!(field(forged::<8>(AT_UNUSED, 5)), "unused byte");
    // Another length of the medium is another place of the third copy.
    assert!(forged::<8>(AT_MEDIUM_BYTES, 20 * GIB).is_ok());
}

#[test]
fn any_fields_are_refused_or_mean_what_writing_them_again_means() {
    let (mut state, mut taken) = (0x9e37_79b9_7f4a_7c15_u64, 0);
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 11
    };
    for _ in 0..50_000 {
        let mut bytes = container((1 + draw() % 64) * GIB, 1 << (draw() % 4)).map(|made| made.encode());
        let Ok(bytes) = &mut bytes else { continue };
        let at = [AT_CAPACITY, AT_MEDIUM_BYTES, AT_WINDOW_BYTES, AT_SHARDS, AT_UNIT_BYTES][draw() as usize % 5];
        let (value, before) = (draw() >> (draw() % 53), get::<8>(bytes, at));
        match at {
            AT_SHARDS => put::<1>(bytes, at, value % 20),
            AT_UNIT_BYTES => put::<4>(bytes, at, 1 << (value % 32)),
            AT_CAPACITY => put::<8>(bytes, at, before - value % 64),
            _ => put::<8>(bytes, at, before + (value % 3) * 4096),
        }
        seal(bytes);
        let Ok(found) = Container::decode(bytes) else { continue };
        taken += 1;
        assert_eq!(found.encode(), *bytes);
        assert!(found.windows_end() + TAIL_BYTES <= found.medium_bytes());
        let (shard, place) = found.shard_of(Lba::new(found.capacity_blocks() - 1));
        assert!(shard < found.shards() && place.get() < found.shard_layout().capacity_blocks());
    }
    assert!(taken > 1000, "{taken} were taken");
}

#[test]
fn too_many_shards_for_a_size_are_refused() {
    let is_too_small = |bytes, shards| match container(bytes, shards) {
        Err(ContainerError::TooSmall { .. }) => true,
        Ok(_) => false,
        Err(other) => panic!("{other}"),
    };
    assert!(is_too_small((128 << 20) - 4096, 2) && !is_too_small(128 << 20, 2));
    assert!(!is_too_small(512 << 20, 8) && is_too_small(512 << 20, 16));
    // The bitmaps of a mirror of more than 512 MiB need pages, and shards of at most 512 MiB have none.
    assert!(is_too_small((512 << 20) + 4096, 2) && is_too_small(GIB, 2));
    assert!(!is_too_small(GIB + 4096, 2) && !is_too_small(9 * GIB, 16) && is_too_small(8 * GIB, 16));
}

#[test]
fn a_program_for_version_2_takes_it_for_a_damaged_superblock() {
    let bytes = container(4 * GIB, 4).unwrap().encode();
    assert!(Superblock::decode(&bytes).is_err() && Superblock::is_trace(&bytes));
    assert!(Superblock::is_trace_at(&bytes, 12_345_344), "wherever it is");
    assert!(!Container::recognise(
        &Superblock::new([1; 16], *container(4 * GIB, 4).unwrap().shard_layout(), None).encode()
    ));
}
