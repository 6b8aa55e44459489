//! A superblock as mkfs makes it passes; with one wrong field it is refused for that field.

use super::*;
use crate::captured;
use crate::checker_items::check_chunk;
use crate::key::objectid;

/// A superblock of a new filesystem on one device, with one copy of the chunk tree.
fn good() -> Superblock {
    let mut superblock = Superblock::read_from_bytes(&[0; SUPERBLOCK_BYTES]).unwrap();
    superblock.magic = MAGIC;
    superblock.fsid = [1; 16];
    superblock.metadata_uuid = [2; 16];
    superblock.dev_item.fsid = [1; 16];
    superblock.bytenr = COPY_OFFSETS[0].into();
    superblock.generation = 9.into();
    superblock.chunk_root_generation = 8.into();
    superblock.root = (30 << 20).into();
    superblock.chunk_root = (22 << 20).into();
    superblock.total_bytes = (256 << 20).into();
    superblock.bytes_used = (6 << 14).into();
    superblock.num_devices = 1.into();
    (superblock.sector_bytes, superblock.stripe_bytes) = (4096.into(), 4096.into());
    (superblock.node_bytes, superblock.leaf_bytes) = ((16 << 10).into(), (16 << 10).into());
    superblock.sys_chunk_array_bytes = 97.into();
    let key = Key::new(objectid::FIRST_CHUNK_TREE, ItemType::CHUNK_ITEM, 22 << 20);
    superblock.sys_chunk_array[..17].copy_from_slice(DiskKey::from(key).as_bytes());
    superblock.sys_chunk_array[17 + 44] = 1;
    superblock.label[..5].copy_from_slice(b"label");
    superblock.padding[0xE00 - 0xDCB] = 77;
    superblock.seal();
    superblock
}

#[test]
fn a_good_one_passes_and_keeps_every_byte() {
    let superblock = good();
    let bytes = superblock.as_bytes();
    let geometry = Superblock::decode(bytes).unwrap().check(COPY_OFFSETS[0]).unwrap();
    assert_eq!((geometry.sector_bytes, geometry.node_bytes, geometry.generation), (4096, 16_384, 9));
    assert_eq!((geometry.node_uuid, geometry.checksum), ([1; 16], ChecksumType::Crc32c));
    assert_eq!(superblock.label(), b"label");
    assert_eq!(bytes[0xE00], 77);
    assert!(Superblock::decode(&bytes[1..]).is_err());
}

#[test]
fn fields_lie_where_the_format_has_them() {
    let base = good();
    let at = |change: fn(&mut Superblock)| {
        let mut changed = base;
        change(&mut changed);
        base.as_bytes().iter().zip(changed.as_bytes()).position(|(a, b)| a != b).unwrap()
    };
    assert_eq!(at(|sb| sb.magic[0] ^= 1), 0x40);
    assert_eq!(at(|sb| sb.root.as_mut_bytes()[0] ^= 1), 0x50);
    assert_eq!(at(|sb| sb.leaf_bytes.as_mut_bytes()[0] ^= 1), 0x98);
    assert_eq!(at(|sb| sb.incompat.as_mut_bytes()[0] ^= 1), 0xbc);
    assert_eq!(at(|sb| sb.csum_type.as_mut_bytes()[0] ^= 1), 0xc4);
    assert_eq!(at(|sb| sb.dev_item.devid.as_mut_bytes()[0] ^= 1), 0xc9);
    assert_eq!(at(|sb| sb.label[0] ^= 1), 0x12b);
    assert_eq!(at(|sb| sb.metadata_uuid[0] ^= 1), 0x23b);
    assert_eq!(at(|sb| sb.sys_chunk_array[0] ^= 1), 0x32b);
    assert_eq!(at(|sb| sb.backup_roots[0].tree_root.as_mut_bytes()[0] ^= 1), 0xb2b);
    assert_eq!(at(|sb| sb.padding[0] ^= 1), 0xdcb);
}

#[test]
fn contradictions_are_refused_with_the_name_of_the_field() {
    type Change = fn(&mut Superblock);
    let changes: [(&str, Change); 14] = [
        ("sector size", |sb| sb.sector_bytes = 2048.into()),
        ("sector size", |sb| sb.sector_bytes = 0.into()),
        ("node size", |sb| sb.node_bytes = (128 << 10).into()),
        ("leaf size", |sb| sb.leaf_bytes = 4096.into()),
        ("stripe size", |sb| sb.stripe_bytes = 8192.into()),
        ("node size", |sb| sb.incompat = Incompat::MIXED_GROUPS.bits().into()),
        ("root", |sb| sb.root = 4097.into()),
        ("chunk root", |sb| sb.chunk_root = 0.into()),
        ("log root", |sb| sb.log_root_level = 8),
        ("generation", |sb| (sb.generation, sb.chunk_root_generation) = (0.into(), 0.into())),
        ("chunk root generation", |sb| sb.chunk_root_generation = 10.into()),
        ("number of devices", |sb| sb.num_devices = 0.into()),
        ("bytes used", |sb| sb.bytes_used = 5.into()),
        ("size of the system chunks", |sb| sb.sys_chunk_array_bytes = 2049.into()),
    ];
    for (name, change) in changes {
        let mut bad = good();
        change(&mut bad);
        bad.seal();
        let error = bad.check(COPY_OFFSETS[0]).unwrap_err();
        assert!(matches!(error, SuperblockError::Field { field, .. } if field == name), "{name}: {error}");
    }
}

#[test]
fn a_superblock_of_the_kernel_passes_and_every_changed_bit_is_refused() {
    let bytes = captured::superblock();
    let superblock = Superblock::decode(&bytes).unwrap();
    let geometry = superblock.check(COPY_OFFSETS[0]).unwrap();
    assert_eq!((superblock.label(), geometry.node_bytes, superblock.num_devices.get()), (&b"a label"[..], 16_384, 1));
    assert_eq!((geometry.features.check_writing(), superblock.log_root.get()), (Ok(()), 0));
    for chunk in superblock.sys_chunks() {
        let (key, chunk) = chunk.unwrap();
        check_chunk(&geometry, key, &chunk).unwrap();
    }
    let newest = &superblock.backup_roots[superblock.newest_backup()];
    assert_eq!((newest.tree_root, newest.tree_root_generation), (superblock.root, superblock.generation));
    let mut sealed = *superblock;
    sealed.csum = [0; FIELD_BYTES];
    sealed.seal();
    assert_eq!(sealed.as_bytes(), bytes);
    for bit in (0..SUPERBLOCK_BYTES * 8).step_by(97).filter(|bit| !(32..256).contains(bit)) {
        let mut bad = bytes.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(Superblock::decode(&bad).unwrap().check(COPY_OFFSETS[0]).is_err(), "bit {bit}");
    }
}

#[test]
fn a_larger_sector_may_come_with_the_usual_stripe() {
    let mut superblock = good();
    superblock.sector_bytes = (16 << 10).into();
    superblock.seal();
    assert_eq!(superblock.check(COPY_OFFSETS[0]).map(|geometry| geometry.sector_bytes), Ok(16 << 10));
}

#[test]
fn identity_is_checked_before_anything_else() {
    let mut bad = good();
    bad.magic[7] = b'X';
    assert_eq!(bad.check(COPY_OFFSETS[0]), Err(SuperblockError::Magic));
    let mut bad = good();
    bad.csum_type = 4.into();
    assert_eq!(bad.check(COPY_OFFSETS[0]), Err(SuperblockError::ChecksumType(4)));
    let mut bad = good();
    bad.root = 8192.into();
    assert!(matches!(bad.check(COPY_OFFSETS[0]), Err(SuperblockError::Checksum(_))));
    let (expected, found) = (COPY_OFFSETS[1], COPY_OFFSETS[0]);
    assert_eq!(good().check(expected), Err(SuperblockError::Offset { expected, found }));
    let mut bad = good();
    bad.incompat = Incompat::METADATA_UUID.bits().into();
    bad.seal();
    assert_eq!(bad.check(COPY_OFFSETS[0]), Err(SuperblockError::DeviceUuid));
    bad.dev_item.fsid = [2; 16];
    bad.seal();
    assert_eq!(bad.check(COPY_OFFSETS[0]).map(|geometry| geometry.node_uuid), Ok([2; 16]));
}

#[test]
fn every_type_of_checksum_seals_and_no_changed_byte_passes() {
    for checksum in ChecksumType::ALL {
        let mut superblock = good();
        superblock.csum_type = checksum.number().into();
        superblock.seal();
        superblock.check(COPY_OFFSETS[0]).unwrap();
        for at in (0..SUPERBLOCK_BYTES).step_by(61).filter(|at| !(checksum.bytes()..FIELD_BYTES).contains(at)) {
            let mut bad = superblock;
            bad.as_mut_bytes()[at] ^= 0x80;
            assert!(bad.check(COPY_OFFSETS[0]).is_err(), "{checksum:?} {at}");
        }
    }
}

#[test]
fn the_type_without_checksums_and_its_feature_come_together() {
    let of = |kind: ChecksumType, incompat: Incompat| {
        let mut superblock = good();
        (superblock.csum_type, superblock.incompat) = (kind.number().into(), incompat.bits().into());
        superblock.seal();
        superblock
    };
    let superblock = of(ChecksumType::None, Incompat::NO_CHECKSUMS);
    let geometry = superblock.check(COPY_OFFSETS[0]).unwrap();
    assert_eq!((geometry.checksum, geometry.features.check_writing()), (ChecksumType::None, Ok(())));
    ChecksumType::Crc32c.verify(superblock.as_bytes()).unwrap();
    for at in (0..SUPERBLOCK_BYTES).step_by(61).filter(|at| !(4..FIELD_BYTES).contains(at)) {
        let mut bad = superblock;
        bad.as_mut_bytes()[at] ^= 0x80;
        assert!(bad.check(COPY_OFFSETS[0]).is_err(), "{at}");
    }
    for (kind, incompat, error) in [
        (ChecksumType::None, Incompat::empty(), "checksum type 0xff00 without the feature NO_CHECKSUMS"),
        (ChecksumType::Sha256, Incompat::NO_CHECKSUMS, "checksum type 0x2 with the feature NO_CHECKSUMS"),
        (
            ChecksumType::None,
            Incompat::NO_CHECKSUMS | Incompat::RAID56,
            "the feature RAID56 in a filesystem without checksums",
        ),
    ] {
        assert_eq!(of(kind, incompat).check(COPY_OFFSETS[0]).unwrap_err().to_string(), error);
    }
}

#[test]
fn system_chunks_are_read_until_the_array_ends_or_is_broken() {
    let superblock = good();
    let chunks: Vec<_> = superblock.sys_chunks().map(Result::unwrap).collect();
    assert_eq!((chunks.len(), chunks[0].0.offset, chunks[0].1.stripes.len()), (1, 22 << 20, 1));
    for (change, is_some) in [(96_u32, true), (98, true), (0, false), (u32::MAX, true)] {
        let mut bad = superblock;
        bad.sys_chunk_array_bytes = change.into();
        let read: Vec<_> = bad.sys_chunks().collect();
        assert_eq!(read.last().is_some_and(Result::is_err), is_some, "{change}");
        assert!(read.len() <= 3);
    }
}

#[test]
fn a_device_has_the_copies_that_end_before_it_ends() {
    let copies = |bytes| copy_offsets(bytes).count();
    assert_eq!((copies(0), copies((64 << 10) + 4096), copies((64 << 10) + 4097)), (0, 0, 1));
    assert_eq!((copies((64 << 20) + 4096), copies((64 << 20) + 4097)), (1, 2));
    assert_eq!((copies((256 << 30) + 4096), copies(u64::MAX)), (2, 3));
}

#[test]
fn the_newest_backup_is_the_one_of_the_highest_transaction() {
    let mut superblock = good();
    for (slot, generation) in superblock.backup_roots.iter_mut().zip([8_u64, 9, 6, 7]) {
        slot.tree_root_generation = generation.into();
    }
    assert_eq!(superblock.newest_backup(), 1);
}

#[test]
fn copies_agree_but_for_place_and_log() {
    let base = good();
    let mut changed = base;
    changed.bytenr = COPY_OFFSETS[1].into();
    (changed.log_root, changed.log_root_transid, changed.log_root_level) = ((31 << 20).into(), 9.into(), 1);
    changed.seal();
    assert!(base.says_the_same_as(&changed) && changed.says_the_same_as(&base));
    let mine: [std::ops::Range<usize>; 4] = [0..0x20, 0x30..0x38, 0x60..0x70, 0xc8..0xc9];
    for at in 0..SUPERBLOCK_BYTES {
        let mut bytes = *base.as_bytes().first_chunk::<SUPERBLOCK_BYTES>().unwrap();
        bytes[at] ^= 1;
        let other = Superblock::decode(&bytes).unwrap();
        assert_eq!(base.says_the_same_as(other), mine.iter().any(|own| own.contains(&at)), "byte {at}");
    }
}
