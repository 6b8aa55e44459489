//! Superblocks that are valid and of another filesystem or device: they are reported, and the copies of the filesystem
//! that the device is used for are used, wherever they are.

use futures_executor::block_on;
use sealblock_block::{Device, Durability, DynDevice, Request};
use sealblock_btrfs::verify::{Finding, Unwatched, Verdict, VerifyOptions, verify};
use sealblock_btrfs::{Candidate, CopyFault, Filesystem, FsError, OpenOptions, RootsFrom};
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::key::objectid;
use sealblock_btrfs_format::superblock::{COPY_OFFSETS, SUPERBLOCK_BYTES, Superblock};
use sealblock_integrity::{Sealed, Tags};
use sealblock_media_memory::MemoryDevice;
use sealblock_proofs_btrfs_images::handmade::{Handmade, Identity, Pieces, Storage};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};
use zerocopy::{FromBytes, IntoBytes};

/// Bytes of the target: two copies of the superblock fit.
const TARGET_BYTES: u64 = 80 << 20;
const FIRST: u64 = COPY_OFFSETS[0];
const SECOND: u64 = COPY_OFFSETS[1];

const OWN: Identity = Identity {
    fsid: *b"the own one.....",
    device_uuid: *b"its own device..",
    device_bytes: TARGET_BYTES,
    shift_bytes: 0,
};
/// Another filesystem, whose nodes are elsewhere.
const OTHER: Identity = Identity {
    fsid: *b"another one.....",
    device_uuid: *b"another device..",
    device_bytes: TARGET_BYTES,
    shift_bytes: 512 << 10,
};
/// Another filesystem with the same UUID, as `mkfs.btrfs -U` makes it, and with its nodes at the same places.
const SAME_UUID: Identity = Identity { device_uuid: *b"another device..", ..OWN };

/// The content of a filesystem with one file.
fn made(identity: Identity) -> Pieces {
    let mut made = Handmade::of(identity, 4096, ChecksumType::Crc32c);
    made.file(objectid::FIRST_FREE, b"file", &identity.fsid.repeat(1000), Storage::Summed);
    made.build()
}

/// A superblock of a filesystem.
fn superblock(pieces: &Pieces, offset: u64) -> Vec<u8> {
    pieces.0.iter().find(|(at, _)| *at == offset).unwrap().1.clone()
}

/// The same pieces with some of them replaced, or more of them.
fn with(pieces: &Pieces, changes: &[(u64, Vec<u8>)]) -> Pieces {
    let mut all = pieces.0.clone();
    all.extend_from_slice(changes);
    Pieces(all)
}

fn candidate(pieces: &Pieces) -> Candidate {
    let device = DynDevice::new("memory", MemoryDevice::new(BlockSize::B4096, TARGET_BYTES / 4096, None));
    for (offset, bytes) in &pieces.0 {
        let mut bytes = bytes.clone();
        bytes.resize(bytes.len().next_multiple_of(4096), 0);
        let extent = Extent::from_raw(offset / 4096, bytes.len() as u64 / 4096).unwrap();
        let data = Sealed::seal(Slice::copy_from(&bytes), BlockSize::B4096, None, &Tags::default());
        block_on(device.execute(Request::write(extent, data, Durability::Volatile))).unwrap();
    }
    Candidate { name: "memory".into(), device }
}

fn open(pieces: &Pieces, roots: RootsFrom) -> Result<Filesystem, FsError> {
    block_on(Filesystem::open(vec![candidate(pieces)], OpenOptions { roots, ..OpenOptions::default() }))
}

/// Requires that the file of a filesystem is read, and returns the reported superblocks, as number and text.
fn read_from(pieces: &Pieces, identity: Identity) -> Vec<(usize, String)> {
    let mut reported = None;
    for roots in [RootsFrom::Newest, RootsFrom::Best] {
        let filesystem = open(pieces, roots).unwrap();
        let subvolume = block_on(filesystem.subvolume(objectid::FS_TREE)).unwrap();
        let top = block_on(filesystem.top(&subvolume)).unwrap();
        let file = block_on(filesystem.resolve(top, b"file", true)).unwrap();
        assert_eq!(block_on(filesystem.read(&file, 0, 1 << 20)).unwrap()[..], identity.fsid.repeat(1000)[..]);
        assert_eq!(filesystem.superblock().dev_item.uuid, identity.device_uuid);
        let bad = filesystem.storage().devices.bad_superblocks();
        let bad: Vec<_> = bad.iter().map(|copy| (copy.mirror, copy.fault.to_string())).collect();
        assert_eq!(filesystem.storage().devices.may_be_older(), bad.iter().any(|(mirror, _)| *mirror == 1));
        let report = block_on(verify(&filesystem, VerifyOptions::default(), &Unwatched)).unwrap();
        let found = report.findings.iter().map(|finding| match finding {
            Finding::Superblock(copy) => (copy.mirror, copy.fault.to_string()),
            other => panic!("{other}"),
        });
        assert_eq!(found.collect::<Vec<_>>(), bad);
        assert_eq!(report.verdict(), if bad.is_empty() { Verdict::Clean } else { Verdict::Damaged });
        assert!(report.nodes_verified >= 5, "{}", report.nodes_verified);
        assert!(reported.replace(bad.clone()).is_none_or(|before| before == bad));
    }
    reported.unwrap()
}

#[test]
fn a_copy_of_another_filesystem_is_reported_and_the_own_one_used() {
    let (own, other, same) = (made(OWN), made(OTHER), made(SAME_UUID));
    assert_eq!(read_from(&own, OWN), []);
    for (offset, mirror) in [(FIRST, 1), (SECOND, 2)] {
        let reported = read_from(&with(&own, &[(offset, superblock(&other, offset))]), OWN);
        let uuids = [OTHER.fsid, OWN.fsid].map(|uuid| sealblock_btrfs::devices::uuid(&uuid));
        let expected = format!("it is of another filesystem, with the UUID {}; that of {} is used", uuids[0], uuids[1]);
        assert_eq!(reported, [(mirror, expected)]);

        let reported = read_from(&with(&own, &[(offset, superblock(&same, offset))]), OWN);
        let [(found, text)] = &reported[..] else { panic!("{reported:?}") };
        let device = sealblock_btrfs::devices::uuid(&SAME_UUID.device_uuid);
        assert!(*found == mirror && text.contains("of another device, number 1") && text.contains(&device), "{text}");

        // A blank copy is lost in the same way.
        let reported = read_from(&with(&own, &[(offset, vec![0; SUPERBLOCK_BYTES])]), OWN);
        let [(found, text)] = &reported[..] else { panic!("{reported:?}") };
        assert!(*found == mirror && text.contains("no magic"), "{text}");
    }
}

#[test]
fn a_newer_superblock_of_another_filesystem_does_not_count() {
    let own = made(OWN);
    for identity in [OTHER, SAME_UUID] {
        let mut bytes = superblock(&made(identity), FIRST);
        let superblock = Superblock::mut_from_bytes(&mut bytes).unwrap();
        superblock.generation = 100.into();
        superblock.seal();
        assert_eq!(read_from(&with(&own, &[(FIRST, bytes)]), OWN).len(), 1);
    }
}

#[test]
fn the_remains_of_an_older_larger_filesystem_are_no_damage() {
    // Both filesystems can be read, and only the older one reaches the second copy.
    let small = Identity { device_bytes: 48 << 20, shift_bytes: 512 << 10, ..OTHER };
    let both = with(&made(OWN), &made(small).0);
    assert_eq!(superblock(&both, SECOND), superblock(&made(OWN), SECOND));
    assert_eq!(read_from(&both, small), []);
    // What is beyond the end of a filesystem is no copy of it, damaged or not.
    assert_eq!(read_from(&with(&both, &[(SECOND, vec![7; SUPERBLOCK_BYTES])]), small), []);
    // If it has a copy there, the one of the older filesystem is damage.
    let large = Identity { device_bytes: TARGET_BYTES, ..small };
    let both = with(&both, &[(FIRST, superblock(&made(large), FIRST))]);
    let filesystem = open(&both, RootsFrom::Newest).unwrap();
    let bad = filesystem.storage().devices.bad_superblocks();
    assert!(matches!(bad, [copy] if matches!(copy.fault, CopyFault::OtherFilesystem { .. })), "{bad:?}");
    // Without the superblock of the newer one, the older one is all that is left.
    let older = with(&both, &[(FIRST, vec![0; SUPERBLOCK_BYTES])]);
    assert_eq!(open(&older, RootsFrom::Newest).unwrap().superblock().fsid, OWN.fsid);
}

/// Pieces of which every node of the chunk tree is lost.
fn without_chunk_tree(pieces: &Pieces) -> Pieces {
    let lost = |offset: u64| (1 << 20..3 << 20).contains(&offset);
    Pieces(pieces.0.iter().map(|(at, bytes)| (*at, if lost(*at) { vec![0; 4096] } else { bytes.clone() })).collect())
}

#[test]
fn if_no_copy_leads_to_nodes_the_first_one_counts_and_the_other_is_reported() {
    let (own, other) = (without_chunk_tree(&made(OWN)), made(OTHER));
    for (offset, first) in [(FIRST, OTHER), (SECOND, OWN)] {
        let filesystem = open(&with(&own, &[(offset, superblock(&other, offset))]), RootsFrom::Best).unwrap();
        assert_eq!(filesystem.superblock().fsid, first.fsid);
        let bad = filesystem.storage().devices.bad_superblocks();
        assert!(matches!(bad, [copy] if copy.mirror == 2), "{bad:?}");
        assert!(!filesystem.lost_chunks().is_empty());
    }
    // The only superblock that is left is of a filesystem with the same UUID, so its nodes pass.
    let lost = [FIRST, SECOND].map(|offset| (offset, superblock(&made(SAME_UUID), offset)));
    let pieces = with(&made(OWN), &lost);
    // It counts more than one of a filesystem without any node here.
    for offset in [FIRST, SECOND] {
        let pieces = with(&pieces, &[(offset, superblock(&other, offset))]);
        assert_eq!(open(&pieces, RootsFrom::Best).unwrap().superblock().dev_item.uuid, SAME_UUID.device_uuid);
    }
    // But not if the own one is left, even without its chunk tree.
    let mut bytes = superblock(&made(OWN), SECOND);
    let changed = Superblock::mut_from_bytes(&mut bytes).unwrap();
    changed.chunk_root = (changed.chunk_root.get() + (64 << 10)).into();
    changed.seal();
    let own_is_left = with(&pieces, &[(SECOND, bytes)]);
    assert_eq!(open(&own_is_left, RootsFrom::Best).unwrap().superblock().dev_item.uuid, OWN.device_uuid);
    let error = open(&pieces, RootsFrom::Newest).map(drop).unwrap_err();
    let uuids = [OWN.device_uuid, SAME_UUID.device_uuid].map(|uuid| sealblock_btrfs::devices::uuid(&uuid));
    assert!(error.is_damage() && uuids.iter().all(|uuid| error.to_string().contains(uuid)), "{error}");
    let filesystem = open(&pieces, RootsFrom::Best).unwrap();
    assert!(matches!(filesystem.lost_chunks(), [FsError::Contradiction { .. }]));
    let subvolume = block_on(filesystem.subvolume(objectid::FS_TREE)).unwrap();
    assert!(block_on(filesystem.top(&subvolume)).is_ok());
}

#[test]
fn a_superblock_that_leads_to_the_remains_of_a_chunk_tree_counts() {
    // The newest root of the chunk tree is lost, and an older one is left in the system chunks.
    let own = made(OWN);
    let mut bytes = superblock(&own, SECOND);
    let changed = Superblock::mut_from_bytes(&mut bytes).unwrap();
    (changed.generation, changed.chunk_root_generation) = (10.into(), 10.into());
    changed.chunk_root = (changed.chunk_root.get() + (64 << 10)).into();
    changed.seal();
    let pieces = with(&own, &[(FIRST, superblock(&made(OTHER), FIRST)), (SECOND, bytes.clone())]);
    let filesystem = open(&pieces, RootsFrom::Best).unwrap();
    assert_eq!(filesystem.superblock().fsid, OWN.fsid);
}

#[test]
fn superblocks_with_any_system_chunks_are_refused_or_opened_without_a_panic() {
    let (own, other) = (made(OWN), superblock(&made(OTHER), FIRST));
    // From the level of the root and from the start of the system chunks on.
    for at in (197..201).chain(811..811 + 97 + 32) {
        for change in [1, 0x80, 0xFF] {
            let mut bytes = other.clone();
            bytes[at] ^= change;
            let mut changed = Superblock::read_from_bytes(&bytes).unwrap();
            changed.seal();
            let pieces = with(&own, &[(FIRST, changed.as_bytes().to_vec())]);
            assert_eq!(open(&pieces, RootsFrom::Newest).unwrap().superblock().fsid, OWN.fsid, "{at} {change}");
        }
    }
}
