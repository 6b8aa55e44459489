use std::collections::BTreeMap;

use futures_executor::block_on;
use sealblock_block::{Device, Durability, DynDevice, Expectations, Request, Response};
use sealblock_btrfs::check::{CheckOptions, Verdict, check};
use sealblock_btrfs::tags::tags_of;
use sealblock_btrfs::verify::Unwatched;
use sealblock_btrfs::{Candidate, Filesystem, OpenOptions};
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::commit_record::CommitRecord;
use sealblock_btrfs_format::features::Incompat;
use sealblock_btrfs_format::items::chunk::Profile;
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_btrfs_format::superblock::{COPY_OFFSETS, SUPERBLOCK_BYTES, Superblock, copy_offsets};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, Sealed};
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};

use super::*;
use crate::datasum::Datasum;

const MIB: u64 = 1 << 20;
const SECTOR: u64 = SECTOR_BYTES as u64;
const PROTECTION: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type1);

/// Every byte differs from filesystem to filesystem.
fn options(number: u8) -> FormatOptions {
    FormatOptions {
        label: b"label".to_vec(),
        fsid: [number; 16],
        chunk_tree_uuid: [number + 1; 16],
        subvolume_uuid: [number + 2; 16],
        time: Timespec { seconds: 1_700_000_000.into(), nanoseconds: 5.into() },
        sector_bytes: SECTOR_BYTES,
        node_bytes: 16 << 10,
        checksum: ChecksumType::Crc32c,
        data: Profile::Single,
        metadata: Profile::Dup,
        incompat: DEFAULT_INCOMPAT,
        block_group_tree: false,
        datasum: Datasum::Csum,
        first_transaction: 1,
        is_host_sealed: false,
    }
}

fn devices(sizes: &[u64]) -> Vec<NewDevice> {
    let uuid = |number: u128| (0x64 << 120 | number).to_be_bytes();
    (1..).zip(sizes).map(|(number, bytes)| NewDevice { bytes: *bytes, uuid: uuid(number) }).collect()
}

/// Devices in memory, by their numbers.
struct Disks(BTreeMap<u64, DynDevice>);

impl Disks {
    fn new(sizes: &[u64]) -> Disks {
        Disks::with(sizes, None)
    }

    fn with(sizes: &[u64], protection: Option<PiFormat>) -> Disks {
        let memory = |bytes: &u64| MemoryDevice::new(BlockSize::B4096, bytes / SECTOR, protection);
        let disk = |bytes: &u64| DynDevice::new("memory", memory(bytes));
        Disks((1..).zip(sizes.iter().map(disk)).collect())
    }

    fn write(&self, devid: u64, offset: u64, bytes: &[u8], tag: Option<u64>) {
        let extent = Extent::from_raw(offset / SECTOR, bytes.len() as u64 / SECTOR).unwrap();
        let (tags, format) = (tags_of(tag, offset / SECTOR), self.0[&devid].geometry().protection);
        let data = Sealed::seal(Slice::copy_from(bytes), BlockSize::B4096, format, &tags);
        block_on(self.0[&devid].execute(Request::write(extent, data, Durability::Volatile))).unwrap();
    }

    fn read(&self, devid: u64, offset: u64, bytes: usize) -> Vec<u8> {
        let extent = Extent::from_raw(offset / SECTOR, bytes as u64 / SECTOR).unwrap();
        match block_on(self.0[&devid].execute(Request::read(extent, Expectations::NONE))) {
            Ok(Response::Data(data)) => data.joined_data().to_vec(),
            other => panic!("{other:?}"),
        }
    }

    /// Does a part of a stage: each of its writes with this probability.
    fn apply(&self, stage: Stage, random: &mut fastrand::Rng, probability: f32) {
        match stage {
            Stage::Erase(ranges) => {
                for range in ranges {
                    for at in (0..range.bytes).step_by(SUPERBLOCK_BYTES).filter(|_| random.f32() < probability) {
                        self.write(range.devid, range.offset + at, &[0; SUPERBLOCK_BYTES], None);
                    }
                }
            }
            Stage::Write(writes) => {
                for write in writes.iter().filter(|_| random.f32() < probability) {
                    self.write(write.devid, write.offset, &write.bytes, write.tag);
                }
            }
        }
    }

    fn format(&self, image: &FormattedImage) {
        image.stages().for_each(|stage| self.apply(stage, &mut fastrand::Rng::with_seed(0), 1.1));
    }

    fn open(&self) -> Result<Filesystem, String> {
        let candidates =
            self.0.iter().map(|(devid, device)| Candidate { name: format!("device {devid}"), device: device.clone() });
        block_on(Filesystem::open(candidates.collect(), OpenOptions::default())).map_err(|error| error.to_string())
    }

    /// All intact superblocks: UUID, device, place.
    fn superblocks(&self) -> Vec<([u8; 16], u64, u64)> {
        let mut found = Vec::new();
        for (devid, device) in &self.0 {
            for offset in copy_offsets(device.geometry().capacity_bytes()) {
                let bytes = self.read(*devid, offset, SUPERBLOCK_BYTES);
                let superblock = Superblock::decode(&bytes).unwrap();
                if superblock.check(offset).is_ok() {
                    found.push((superblock.fsid, *devid, offset));
                }
            }
        }
        found
    }

    /// True if all nodes and all copies of them are there.
    fn has_nodes(&self, image: &FormattedImage) -> bool {
        image.nodes.iter().all(|node| self.read(node.devid, node.offset, node.bytes.len()) == node.bytes)
    }

    fn assert_clean(&self, what: &str) {
        let filesystem = self.open().unwrap_or_else(|why| panic!("{what}: {why}"));
        let report = block_on(check(&filesystem, CheckOptions::default(), &Unwatched));
        assert_eq!(report.verdict(), Verdict::Clean, "{what}: {:?} {:?}", report.findings, report.not_checked);
        assert!(report.notes.is_empty(), "{what}: {:?}", report.notes);
    }
}

/// Makes a filesystem in memory, which must be consistent, and keeps superblocks free of nodes.
fn make(options: &FormatOptions, sizes: &[u64]) -> FormattedImage {
    let what = format!("{options:?} on {sizes:?}");
    let image = format(options, &devices(sizes)).unwrap_or_else(|why| panic!("{what}: {why}"));
    let has_none = options.checksum == ChecksumType::None;
    let disks = Disks::with(sizes, has_none.then_some(PROTECTION));
    disks.format(&image);
    disks.assert_clean(&what);
    for node in &image.nodes {
        for copy in COPY_OFFSETS {
            let end = node.offset + node.bytes.len() as u64;
            assert!(end <= copy || node.offset >= copy + (64 << 10), "{what}: a node at {}", node.offset);
        }
    }
    let copies: usize = sizes.iter().map(|bytes| copy_offsets(bytes / SECTOR * SECTOR).count()).sum();
    assert_eq!(disks.superblocks().len(), copies, "{what}");
    image
}

const PROFILES: [(Profile, usize); 7] = [
    (Profile::Single, 1),
    (Profile::Dup, 1),
    (Profile::Raid0, 1),
    (Profile::Raid1, 2),
    (Profile::Raid1C3, 3),
    (Profile::Raid1C4, 4),
    (Profile::Raid10, 2),
];

#[test]
fn every_profile_checksum_and_node_size_gives_a_consistent_filesystem() {
    let sizes = [700 * MIB, 300 * MIB, 500 * MIB, 400 * MIB];
    for (metadata, of_metadata) in PROFILES {
        for (data, of_data) in PROFILES {
            for count in of_metadata.max(of_data)..=4 {
                for (checksum, node_bytes) in ChecksumType::ALL.into_iter().zip([4096, 16_384, 65_536, 8192]) {
                    let options = FormatOptions { metadata, data, checksum, node_bytes, ..options(1) };
                    make(&options, &sizes[..count]);
                }
            }
        }
    }
}

#[test]
fn without_checksums_every_profile_gives_a_filesystem_that_tags_prove() {
    let sizes = [700 * MIB, 300 * MIB, 500 * MIB, 400 * MIB];
    for (profile, count) in PROFILES {
        for node_bytes in [4096, 16_384, 65_536] {
            let (checksum, metadata, data) = (ChecksumType::None, profile, profile);
            let first_transaction = 70_000 + u64::from(node_bytes);
            let mut options = FormatOptions { checksum, metadata, data, node_bytes, first_transaction, ..options(1) };
            options.incompat.set(Incompat::MIXED_GROUPS, node_bytes == 4096);
            let image = make(&options, &sizes[..count]);
            let writes = [&image.nodes, &image.mirrors, &image.superblocks];
            assert!(writes.into_iter().flatten().all(|write| write.tag == Some(options.first_transaction)));
            assert!(image.nodes.iter().all(|node| node.bytes[..32] == [0; 32]));
            let superblock = Superblock::decode(&image.superblocks[0].bytes).unwrap();
            let record = CommitRecord::read(superblock).unwrap();
            assert!(record.is_of(superblock) && record.is_tagged(superblock.dev_item.uuid));
            assert_eq!(
                record.windows.iter().collect::<Vec<_>>(),
                [(options.first_transaction, options.first_transaction)]
            );
        }
    }
    // The same bytes without tags, and on a device that cannot have any, are not proven.
    let image = format(&FormatOptions { checksum: ChecksumType::None, ..options(1) }, &devices(&[200 * MIB])).unwrap();
    let of_type = |protection| Some(PiFormat::with_default_storage_tag(GuardKind::Crc32c, protection));
    let no_address = "its protection information is not of Type 1, which alone shows the address of a block";
    for (protection, why) in [
        (Some(PROTECTION), "it has lost the tags of its blocks"),
        (None, "it shows no protection information"),
        (of_type(ProtectionType::Type2), no_address),
        (of_type(ProtectionType::Type3), no_address),
    ] {
        let disks = Disks::with(&[200 * MIB], protection);
        for write in [&image.nodes, &image.mirrors, &image.superblocks].into_iter().flatten() {
            disks.write(write.devid, write.offset, &write.bytes, None);
        }
        let filesystem = disks.open().unwrap();
        let unproven: Vec<_> = filesystem.storage().devices.unproven().map(|(devid, _, why)| (devid, why)).collect();
        assert_eq!(unproven, [(1, why)]);
        let report = block_on(check(&filesystem, CheckOptions::default(), &Unwatched));
        assert_eq!((report.verdict(), report.findings.len()), (Verdict::Incomplete, 0));
    }
    // Other filesystems are written as ever.
    let image = format(&options(1), &devices(&[200 * MIB])).unwrap();
    assert!([&image.nodes, &image.mirrors, &image.superblocks].into_iter().flatten().all(|write| write.tag.is_none()));
    let options = FormatOptions { checksum: ChecksumType::None, ..options(1) };
    assert_eq!(format(&options, &devices(&[200 * MIB; 29])), Err(FormatError::TooManyTagged(29)));
    assert!(format(&options, &devices(&[200 * MIB; 28])).is_ok());
    let options = FormatOptions { checksum: ChecksumType::Crc32c, datasum: Datasum::Device, ..options };
    assert_eq!(format(&options, &devices(&[200 * MIB; 29])), Err(FormatError::TooManyTagged(29)));
    assert!(format(&options, &devices(&[200 * MIB; 28])).is_ok());
}

#[test]
fn the_first_transaction_is_the_one_that_is_asked_for() {
    for first_transaction in [1, 2, 70_000, MAX_FIRST_TRANSACTION] {
        let image = make(&FormatOptions { first_transaction, ..options(1) }, &[200 * MIB]);
        let superblock = Superblock::decode(&image.superblocks[0].bytes).unwrap();
        assert_eq!(superblock.generation.get(), first_transaction);
    }
    for first_transaction in [0, MAX_FIRST_TRANSACTION + 1, u64::MAX] {
        let refused = format(&FormatOptions { first_transaction, ..options(1) }, &devices(&[200 * MIB]));
        assert_eq!(refused, Err(FormatError::FirstTransaction(first_transaction)));
    }
}

#[test]
fn mixed_block_groups_have_any_profile() {
    for (profile, count) in PROFILES {
        let incompat = DEFAULT_INCOMPAT | Incompat::MIXED_GROUPS;
        let options = FormatOptions { data: profile, metadata: profile, node_bytes: 4096, incompat, ..options(1) };
        let minimum = minimum_bytes(&options);
        make(&options, &vec![minimum; count]);
        make(&options, &[300 * MIB, 100 * MIB, 200 * MIB, 150 * MIB]);
    }
}

#[test]
fn every_choice_of_features_gives_a_consistent_filesystem() {
    for bits in 0..32 {
        let mut options = options(1);
        options.incompat = Incompat::empty();
        options.incompat.set(Incompat::NO_HOLES, bits & 1 > 0);
        options.incompat.set(Incompat::SKINNY_METADATA, bits & 2 > 0);
        options.incompat.set(Incompat::EXTENDED_IREF, bits & 4 > 0);
        options.incompat.set(Incompat::MIXED_GROUPS, bits & 8 > 0);
        options.block_group_tree = bits & 16 > 0;
        (options.data, options.metadata) = default_profiles(1, options.is_mixed());
        options.node_bytes = default_node_bytes(options.is_mixed());
        if options.block_group_tree && bits & 1 == 0 {
            assert_eq!(format(&options, &devices(&[200 * MIB])), Err(FormatError::BlockGroupTree));
            continue;
        }
        let image = make(&options, &[200 * MIB]);
        assert_eq!(image.groups.len(), if options.is_mixed() { 2 } else { 3 });
    }
}

#[test]
fn devices_of_any_size_from_the_minimum_on_are_formatted() {
    let mut random = fastrand::Rng::with_seed(7);
    for node_bytes in [4096, 16_384, 65_536] {
        let options = FormatOptions { node_bytes, ..options(1) };
        let minimum = minimum_bytes(&options);
        make(&options, &[minimum]);
        make(&options, &[minimum + 4095]);
        let why = FormatError::DeviceTooSmall { devid: 1, bytes: minimum - 1, minimum };
        assert_eq!(format(&options, &devices(&[minimum - 1])), Err(why));
        // The second copy of nodes moves over the second superblock.
        for mebibytes in 380..410 {
            make(&options, &[mebibytes * MIB + random.u64(..MIB)]);
        }
        for _ in 0..20 {
            make(&options, &[minimum + (random.u64(..1 << 20) << random.u32(..22))]);
        }
    }
}

#[test]
fn nodes_make_room_for_a_superblock() {
    let jumps = (380..410 * 8).filter(|size| {
        let image = format(&options(1), &devices(&[300 * MIB + size * MIB / 8])).unwrap();
        let mut offsets: Vec<u64> = image.nodes.iter().map(|node| node.offset).collect();
        offsets.sort_unstable();
        offsets.windows(2).any(|pair| pair[0] < COPY_OFFSETS[1] && pair[1] == COPY_OFFSETS[1] + (64 << 10))
    });
    assert!(jumps.count() > 0, "no size has nodes around a superblock");
}

#[test]
fn many_and_unequal_devices_are_formatted() {
    let mut random = fastrand::Rng::with_seed(3);
    for count in [5, 33, 60, 122, 256] {
        for (profile, _) in PROFILES {
            for node_bytes in [4096, 16_384] {
                let options = FormatOptions { data: profile, metadata: profile, node_bytes, ..options(1) };
                let minimum = minimum_bytes(&options);
                let sizes: Vec<u64> =
                    (0..count).map(|_| minimum + (random.u64(..1 << 14) << random.u32(..26))).collect();
                let image = format(&options, &devices(&sizes)).unwrap();
                assert!(image.groups.iter().all(|group| group.stripes.len() <= count && group.stripe_bytes <= 1 << 30));
            }
        }
    }
    // Trees of two levels.
    let sizes = [200 * MIB; 256];
    let options = FormatOptions { data: Profile::Raid0, metadata: Profile::Raid1, node_bytes: 4096, ..options(1) };
    let image = make(&options, &sizes);
    assert!(image.bytes_used > 20 * 4096, "{}", image.bytes_used);
    let too_many = format(&options, &devices(&[200 * MIB; 257]));
    assert_eq!(too_many, Err(FormatError::DeviceCount(257)));
    assert_eq!(format(&options, &[]), Err(FormatError::DeviceCount(0)));
}

#[test]
fn the_third_superblock_and_the_largest_groups_are_used_on_large_devices() {
    for (bytes, copies) in [(256 << 30, 2), ((256 << 30) + 4096, 2), ((256 << 30) + 8192, 3), (8 << 40, 3)] {
        let image = make(&options(1), &[bytes]);
        assert_eq!(image.mirrors.len() + image.superblocks.len(), copies);
        // An older filesystem may have had a superblock that ends with the device.
        assert_eq!(image.superblock_places.len(), if bytes > 256 << 30 { 3 } else { 2 });
        let sizes: Vec<u64> = image.groups.iter().map(|group| group.bytes).collect();
        assert_eq!(sizes, [8 * MIB, 1 << 30, 1 << 30]);
    }
}

#[test]
fn what_cannot_be_made_is_refused_by_name() {
    let refused = |change: &dyn Fn(&mut FormatOptions), count: usize| {
        let mut options = options(1);
        change(&mut options);
        format(&options, &devices(&vec![200 * MIB; count])).unwrap_err()
    };
    assert_eq!(refused(&|o| o.sector_bytes = 16_384, 1), FormatError::SectorBytes(16_384));
    for node_bytes in [0, 2048, 12_288, 131_072] {
        assert_eq!(refused(&|o| o.node_bytes = node_bytes, 1), FormatError::NodeBytes(node_bytes));
    }
    for parity in [Profile::Raid5, Profile::Raid6] {
        assert_eq!(refused(&|o| o.data = parity, 4), FormatError::Parity(parity));
        assert_eq!(refused(&|o| o.metadata = parity, 4), FormatError::Parity(parity));
    }
    for (profile, needed) in PROFILES.into_iter().filter(|(_, needed)| *needed > 1) {
        let why = FormatError::TooFewDevices { profile, needed, given: needed - 1 };
        assert_eq!(refused(&|o| o.data = profile, needed - 1), why);
        assert_eq!(refused(&|o| o.metadata = profile, needed - 1), why);
    }
    assert_eq!(refused(&|o| o.incompat |= Incompat::ZONED, 1), FormatError::Incompat(Incompat::ZONED));
    let mixed = |options: &mut FormatOptions| {
        options.incompat |= Incompat::MIXED_GROUPS;
        options.node_bytes = 4096;
    };
    let why = FormatError::MixedProfiles { data: Profile::Single, metadata: Profile::Dup };
    assert_eq!(refused(&|o| mixed(o), 1), why);
    assert_eq!(refused(&|o| o.incompat |= Incompat::MIXED_GROUPS, 1), FormatError::MixedNodeBytes(16_384));
    assert_eq!(refused(&|o| o.label = b"a\0".to_vec(), 1), FormatError::LabelZero);
    assert!(matches!(refused(&|o| o.label = vec![b'x'; 256], 1), FormatError::TooLong(_)));
    assert_eq!(refused(&|o| o.fsid = [0; 16], 1), FormatError::NoUuid("filesystem"));
    let same = [NewDevice { bytes: 200 * MIB, uuid: [9; 16] }; 2];
    assert_eq!(format(&options(1), &same), Err(FormatError::SameUuid));
    let huge = devices(&[1 << 62, 1 << 62, 1 << 62]);
    assert_eq!(format(&options(1), &huge), Err(FormatError::TooLarge));
}

#[test]
fn the_same_arguments_give_the_same_bytes() {
    let make = || format(&options(1), &devices(&[200 * MIB])).unwrap();
    assert_eq!(make(), make());
    let image = make();
    let superblock = Superblock::decode(&image.superblocks[0].bytes).unwrap();
    assert_eq!((superblock.label(), superblock.fsid, superblock.generation.get()), (&b"label"[..], [1; 16], 1));
    assert_eq!(superblock.total_bytes.get(), 200 * MIB);
}

/// Formats over an old filesystem, and stops at a random point: of the stage in progress any writes may be done.
#[test]
fn a_crash_leaves_the_old_filesystem_or_none_or_the_new_one() {
    let mut random = fastrand::Rng::with_seed(11);
    let mut seen = BTreeMap::<&str, u32>::new();
    for round in 0..84 {
        let sizes = [vec![180 * MIB], vec![150 * MIB, 300 * MIB, 200 * MIB]][round % 2].clone();
        let (data, metadata) = default_profiles(sizes.len(), false);
        let old = format(&FormatOptions { data, metadata, ..options(1) }, &devices(&sizes)).unwrap();
        let new = FormatOptions { data, metadata, node_bytes: 4096, ..options(51) };
        let new = format(&new, &devices(&sizes)).unwrap();
        let disks = Disks::new(&sizes);
        disks.format(&old);
        let stages: Vec<Stage> = new.stages().collect();
        let last = round / 2 % stages.len();
        let done = |random: &mut fastrand::Rng| random.f32() * 1.2;
        stages[..last].iter().for_each(|stage| disks.apply(*stage, &mut random, 1.1));
        let probability = done(&mut random);
        disks.apply(stages[last], &mut random, probability);

        let found = disks.superblocks();
        let is_old = found.iter().any(|(fsid, ..)| *fsid == [1; 16]);
        let is_new = found.iter().any(|(fsid, ..)| *fsid == [51; 16]);
        assert!(!(is_old && is_new), "round {round}: superblocks of both: {found:?}");
        assert!(!is_old || disks.has_nodes(&old), "round {round}: the old filesystem has lost nodes");
        assert!(!is_new || disks.has_nodes(&new), "round {round}: the new filesystem lacks nodes");
        let of_linux = found.iter().filter(|(.., offset)| *offset == COPY_OFFSETS[0]).count();
        let state = match (is_old, is_new) {
            (true, _) => "old",
            (_, true) if of_linux == sizes.len() => {
                // The first superblock of device 1 is the last thing that is written.
                assert_eq!(found.len(), sizes.iter().map(|bytes| copy_offsets(*bytes).count()).sum::<usize>());
                disks.assert_clean("new");
                "new"
            }
            (_, true) => "new, and Linux does not see all devices",
            _ => "none",
        };
        *seen.entry(state).or_default() += 1;
    }
    assert_eq!(seen.len(), 4, "{seen:?}");
}
