//! Tags of data without checksums: which ones they get, and what they find.

use std::rc::Rc;

use futures_executor::block_on;
use sealblock_block::{Abilities, Device, DynDevice, Geometry, Operation, Outcome, Request, WriteData};
use sealblock_btrfs::inode::Inode;
use sealblock_btrfs::tags::tag_of;
use sealblock_btrfs::{BadCopy, CopyFault, Filesystem, FsError, Place};
use sealblock_btrfs_engine::data::FilePlace;
use sealblock_btrfs_engine::engine::{Engine, EngineError, EngineOptions};
use sealblock_btrfs_engine::operations::{NewSnapshot, SubvolumePlace};
use sealblock_btrfs_format::commit_record::{CommitRecord, RECORD_OFFSET};
use sealblock_btrfs_format::superblock::{COPY_OFFSETS, Superblock};
use sealblock_integrity::{Tags, Tuple, Unsealed};
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_memory::Slice;
use zerocopy::FromBytes;

use crate::data_faults::{open, place, time};
use crate::disks::{Disks, read_blocks, write_block};
use crate::files::{Kind, ROOT, assert_content, create, read_committed, write};

pub const SECTOR: usize = 4096;
pub const MIRROR: [&str; 4] = ["-m", "raid1", "-d", "raid1"];

pub fn engine_on(disks: &Disks) -> Engine {
    open(disks, EngineOptions::default()).0
}

/// A file in the last commit.
pub fn inode_of(filesystem: &Filesystem, ino: u64) -> Inode {
    let tree = block_on(filesystem.tree(ROOT)).unwrap().unwrap();
    block_on(filesystem.inode(tree, ino)).unwrap()
}

/// The places of a sector of a file in the last commit, and the transaction that its item has.
pub fn places_of(disks: &Disks, ino: u64, at: u64) -> (Vec<Place>, u64) {
    let filesystem = disks.open();
    let inode = inode_of(&filesystem, ino);
    let part = block_on(filesystem.parts(&inode, at, at + 1)).unwrap().remove(0);
    let stored = match part.content {
        sealblock_btrfs::extents::Content::Stored(stored) => stored,
        other => panic!("{other:?}"),
    };
    let logical = stored.logical + stored.offset + (at - part.start);
    let copies = filesystem.storage().map.locate(logical, SECTOR as u64).unwrap().copies;
    (copies.to_vec(), part.generation)
}

pub fn tuple_at(disks: &Disks, place: Place) -> Tuple {
    let memory = disks.memory(place.devid as usize - 1);
    read_blocks(memory, place.offset / SECTOR as u64, 1).tuples().next().unwrap()
}

/// Another write to this place, which is intact.
pub fn overwrite(disks: &Disks, place: Place, generation: Option<u64>) {
    let lba = place.offset / SECTOR as u64;
    let app_tag = generation.map_or(0, tag_of);
    let tags = Tags { app_tag, storage_tag: generation.unwrap_or(0), initial_ref_tag: lba };
    write_block(disks.memory(place.devid as usize - 1), lba, &[0xee; SECTOR], tags);
}

/// Every copy has the tag of the transaction in the file's item, which is returned.
pub fn assert_tagged(disks: &Disks, ino: u64, at: u64) -> u64 {
    let (places, generation) = places_of(disks, ino, at);
    for place in places {
        assert_eq!(tuple_at(disks, place).app_tag, tag_of(generation), "{place:?}");
    }
    generation
}

pub fn first_superblock(disks: &Disks, index: usize) -> Superblock {
    let blocks = read_blocks(disks.memory(index), COPY_OFFSETS[0] / SECTOR as u64, 1);
    Superblock::read_from_bytes(&blocks.joined_data()).unwrap()
}

#[test]
fn data_without_checksums_have_the_tag_of_their_transaction() {
    let Some(disks) = Disks::make(2, 256, &MIRROR) else { return };
    let engine = engine_on(&disks);
    let file = create(&engine, "file", Kind::NoCow);
    write(&engine, file, 0, &[1; 10 * SECTOR]);
    let summed = create(&engine, "summed", Kind::Plain);
    write(&engine, summed, 0, &[1; 10 * SECTOR]);
    block_on(engine.allocate_range(ROOT, file, (10 * SECTOR as u64, 10 * SECTOR as u64), false)).unwrap();
    let first = block_on(engine.commit()).unwrap();
    assert_eq!(assert_tagged(&disks, file, 0), first);
    let (places, _) = places_of(&disks, summed, 0);
    assert!(places.iter().all(|place| tuple_at(&disks, *place).app_tag == 0), "checksums prove what these are");
    // In place, also into space that was allocated in advance: the item keeps its transaction, and the data have its tag.
    write(&engine, file, SECTOR as u64, &[2; SECTOR]);
    write(&engine, file, 12 * SECTOR as u64, &[2; SECTOR]);
    block_on(engine.commit()).unwrap();
    assert_eq!([1, 12].map(|sector| assert_tagged(&disks, file, sector * SECTOR as u64)), [first; 2]);
    // After a snapshot they go to new places.
    let new = NewSnapshot { source: ROOT, uuid: [7; 16], is_read_only: false };
    block_on(engine.create_snapshot(new, SubvolumePlace { root: ROOT, place: place("snapshot") }, time())).unwrap();
    let between = block_on(engine.commit()).unwrap();
    write(&engine, file, SECTOR as u64, &[3; SECTOR]);
    block_on(engine.commit()).unwrap();
    assert!(assert_tagged(&disks, file, SECTOR as u64) > between);
    assert_eq!(assert_tagged(&disks, file, 2 * SECTOR as u64), first);
    // Written zeroes have none.
    block_on(engine.write_zeroes(ROOT, file, 20 * SECTOR as u64, 4 * SECTOR as u64)).unwrap();
    block_on(engine.commit()).unwrap();
    let (places, _) = places_of(&disks, file, 20 * SECTOR as u64);
    assert!(places.iter().all(|place| tuple_at(&disks, *place).app_tag == 0xFFFF));
    drop(engine);
    let content = read_committed(&disks, file);
    assert!(content[..SECTOR] == [1; SECTOR] && content[SECTOR..2 * SECTOR] == [3; SECTOR]);
    assert!(content[12 * SECTOR..13 * SECTOR] == [2; SECTOR] && content[20 * SECTOR..] == [0; 4 * SECTOR]);
    disks.assert_consistent();
    disks.assert_checked_by_program();
}

/// The first bad copy of an error.
fn lost_copy(error: &EngineError) -> Option<&BadCopy> {
    match error {
        EngineError::Read(FsError::Lost(lost)) => lost.copies.first(),
        _ => None,
    }
}

#[test]
fn what_was_written_to_the_wrong_place_or_never_is_found_and_healed() {
    for (devices, options, kind) in
        [(1, &["-m", "single"][..], Kind::NoSum), (2, &MIRROR, Kind::NoSum), (1, &["-m", "single"], Kind::NoCow)]
    {
        let Some(disks) = Disks::make(devices, 256, options) else { return };
        let engine = engine_on(&disks);
        let file = create(&engine, "file", kind);
        write(&engine, file, 0, &[1; 8 * SECTOR]);
        let first = block_on(engine.commit()).unwrap();
        let other = create(&engine, "other", Kind::NoCow);
        write(&engine, other, 0, &[2; 8 * SECTOR]);
        let second = block_on(engine.commit()).unwrap();
        assert!(second > first);
        for (sector, generation) in [(2, Some(second)), (4, None), (6, Some(first + 65_534))] {
            let at = sector * SECTOR as u64;
            let (places, item) = places_of(&disks, file, at);
            assert_eq!(item, first);
            overwrite(&disks, places[0], generation);
            if kind == Kind::NoCow && generation.is_none() {
                // Linux may have written it, and ended before its transaction.
                assert_eq!(block_on(engine.read(ROOT, file, at, SECTOR as u64)).unwrap()[..], [0xee; SECTOR]);
            } else if devices == 1 {
                let error = block_on(engine.read(ROOT, file, at, SECTOR as u64)).unwrap_err();
                let copy = lost_copy(&error).unwrap_or_else(|| panic!("{error}"));
                assert!(matches!(copy.fault, CopyFault::Tag(found) if found.generation == first), "{error}");
                assert!(error.to_string().contains("are not those of transaction"), "{error}");
                // The same for who only reads.
                let filesystem = disks.open();
                let inode = inode_of(&filesystem, file);
                assert!(block_on(filesystem.read(&inode, at, SECTOR)).is_err());
                assert!(block_on(filesystem.read(&inode, at - SECTOR as u64, SECTOR)).unwrap()[..] == [1; SECTOR]);
            } else {
                assert_content(&engine, file, &[1; 8 * SECTOR]);
                let [healed, good] = [0, 1].map(|copy| tuple_at(&disks, places[copy]));
                assert_eq!((healed.app_tag, healed.storage_tag), (good.app_tag, good.storage_tag), "healed");
                assert_eq!(assert_tagged(&disks, file, at), first);
            }
        }
    }
}

/// What a backup to a file and back does.
pub fn lose_tags(memory: &MemoryDevice) {
    for lba in 0..Device::geometry(memory).capacity_blocks {
        let block = read_blocks(memory, lba, 1);
        if block.tuples().any(|tuple| tuple.app_tag != 0xFFFF) {
            write_block(memory, lba, &block.joined_data(), Tags { initial_ref_tag: lba, ..Tags::default() });
        }
    }
}

#[test]
fn nothing_is_demanded_of_a_copy_without_tags() {
    let Some(disks) = Disks::make(2, 256, &MIRROR) else { return };
    let engine = engine_on(&disks);
    let file = create(&engine, "file", Kind::NoSum);
    write(&engine, file, 0, &[1; 8 * SECTOR]);
    block_on(engine.commit()).unwrap();
    drop(engine);
    lose_tags(disks.memory(0));
    assert_eq!(read_committed(&disks, file), [1; 8 * SECTOR]);
    let (places, _) = places_of(&disks, file, 0);
    let first = places.iter().position(|place| place.devid == 1).unwrap();
    assert_eq!(tuple_at(&disks, places[first]).app_tag, 0);
    // The other device has its tags, and needs them.
    overwrite(&disks, places[1 - first], Some(3));
    assert_eq!(read_committed(&disks, file), [1; 8 * SECTOR]);
    // From then on they may be missing in what is older, and not in what is written.
    let engine = engine_on(&disks);
    write(&engine, file, 4 * SECTOR as u64, &[2; 4 * SECTOR]);
    let other = create(&engine, "other", Kind::NoSum);
    write(&engine, other, 0, &[3; SECTOR]);
    block_on(engine.commit()).unwrap();
    assert_tagged(&disks, other, 0);
    drop(engine);
    assert!(read_committed(&disks, file)[..4 * SECTOR] == [1; 4 * SECTOR]);
    let (places, _) = places_of(&disks, other, 0);
    places.iter().for_each(|place| overwrite(&disks, *place, None));
    let lost = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| read_committed(&disks, other)));
    assert!(lost.is_err(), "no copy has the tag");
}

#[test]
fn windows_go_on_until_somebody_else_writes() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let windows = |disks: &Disks| CommitRecord::read(&first_superblock(disks, 0)).unwrap().windows;
    let engine = engine_on(&disks);
    let file = create(&engine, "file", Kind::NoCow);
    write(&engine, file, 0, &[1; 8 * SECTOR]);
    let first = block_on(engine.commit()).unwrap();
    drop(engine);
    let begun = windows(&disks).iter().collect::<Vec<_>>();
    assert_eq!(begun, [(first - 1, first)]);
    // Opened again.
    let engine = engine_on(&disks);
    let last = engine.durable_generation();
    drop(engine);
    assert_eq!(windows(&disks).iter().collect::<Vec<_>>(), [(first - 1, last)]);
    let (places, _) = places_of(&disks, file, 0);
    overwrite(&disks, places[0], Some(last));
    let read = |disks: &Disks| {
        let filesystem = disks.open();
        block_on(filesystem.read(&inode_of(&filesystem, file), 0, SECTOR)).map(|data| data[0])
    };
    assert!(read(&disks).is_err());
    // Without the record nothing is demanded, and a new window begins with the next opening.
    let mut bytes = read_blocks(disks.memory(0), COPY_OFFSETS[0] / SECTOR as u64, 1).joined_data().to_vec();
    bytes[RECORD_OFFSET..].fill(0);
    let sum = first_superblock(&disks, 0).csum_type;
    assert_eq!(sum.get(), 0, "CRC-32C");
    let crc = sealblock_btrfs_format::checksum::ChecksumType::Crc32c.compute(&bytes[32..]);
    bytes[..4].copy_from_slice(&crc.as_bytes()[..4]);
    let lba = COPY_OFFSETS[0] / SECTOR as u64;
    write_block(disks.memory(0), lba, &bytes, Tags { initial_ref_tag: lba, ..Tags::default() });
    assert_eq!(read(&disks).unwrap(), 0xee, "nobody knows who wrote it");
    let engine = engine_on(&disks);
    let third = engine.durable_generation();
    drop(engine);
    assert_eq!(windows(&disks).iter().collect::<Vec<_>>(), [(third, third)]);
    assert_eq!(read(&disks).unwrap(), 0xee);
}

#[test]
fn zeroes_without_tags_are_not_shared_by_who_needs_tags() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let engine = engine_on(&disks);
    let [in_place, other, plain] =
        [("in place", Kind::NoCow), ("other", Kind::NoCow), ("plain", Kind::NoSum)].map(|(name, kind)| {
            let ino = create(&engine, name, kind);
            write(&engine, ino, 0, &[1; 4 * SECTOR]);
            ino
        });
    block_on(engine.write_zeroes(ROOT, in_place, 0, 2 * SECTOR as u64)).unwrap();
    let place = |ino| FilePlace { root: ROOT, ino, offset: 0 };
    let share = |from, to| block_on(engine.clone_range(place(from), place(to), 4 * SECTOR as u64));
    share(in_place, other).unwrap();
    let refused = share(in_place, plain).unwrap_err();
    assert!(refused.errno() == libc::EINVAL && refused.to_string().contains("must have tags"), "{refused}");
    share(plain, other).unwrap();
    share(plain, in_place).unwrap();
    block_on(engine.commit()).unwrap();
    for ino in [in_place, other, plain] {
        assert_content(&engine, ino, &[1; 4 * SECTOR]);
    }
}

/// A device that sets all application tags to 0, as drives may that own them.
pub struct OwnTags(pub Rc<MemoryDevice>);

impl Device for OwnTags {
    fn geometry(&self) -> &Geometry {
        Device::geometry(&*self.0)
    }

    fn abilities(&self) -> Abilities {
        Device::abilities(&*self.0)
    }

    async fn execute(&self, request: Request) -> Outcome {
        let data = match &request.operation {
            Operation::Write(WriteData::Unsealed(data)) => data.data().clone(),
            Operation::Write(WriteData::Sealed(data)) => data.joined_data(),
            _ => return Device::execute(&*self.0, request).await,
        };
        let (extent, geometry) = (request.extents.one(), Device::geometry(&*self.0));
        let tags = Tags { initial_ref_tag: extent.start().get(), ..Tags::default() };
        let data = Unsealed::new(data, geometry.block_size, geometry.protection, tags);
        Device::execute(&*self.0, Request::write(extent, data, request.durability)).await
    }
}

#[test]
fn nothing_is_demanded_of_a_device_that_changes_tags() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let filesystem = disks.open_through(|name, memory| DynDevice::new(name, OwnTags(memory)));
    let engine = block_on(Engine::open(&filesystem, EngineOptions::default())).unwrap();
    let file = create(&engine, "file", Kind::NoSum);
    write(&engine, file, 0, &[1; 4 * SECTOR]);
    assert_content(&engine, file, &[1; 4 * SECTOR]);
    block_on(engine.commit()).unwrap();
    drop(engine);
    let (places, _) = places_of(&disks, file, 0);
    assert_eq!(tuple_at(&disks, places[0]).app_tag, 0);
    assert_eq!(read_committed(&disks, file), [1; 4 * SECTOR]);
}

/// Changes a byte of data with tags on their way to the device.
struct Changing(Rc<MemoryDevice>);

impl Device for Changing {
    fn geometry(&self) -> &Geometry {
        Device::geometry(&*self.0)
    }

    fn abilities(&self) -> Abilities {
        Device::abilities(&*self.0)
    }

    async fn execute(&self, request: Request) -> Outcome {
        let change = |data: Slice| {
            let mut changed = data.to_vec();
            // Superblocks stay as they are.
            changed[100] ^= u8::from(changed[..32] == [0x77; 32]);
            Slice::copy_from(&changed)
        };
        let Operation::Write(_) = &request.operation else { return Device::execute(&*self.0, request).await };
        let start = request.extents.one().start().get();
        let request = request.map_data(|data| match data {
            WriteData::Sealed(data) => data.clone().with_fault(change(data.joined_data())).into(),
            WriteData::Unsealed(data) => {
                let (size, format) = (data.size(), data.format());
                let Tuple { app_tag, storage_tag, .. } = data.clone().seal().tuples().next().unwrap();
                let tags = Tags { app_tag, storage_tag, initial_ref_tag: start };
                Unsealed::new(change(data.data().clone()), size, format, tags).into()
            }
        });
        Device::execute(&*self.0, request).await
    }
}

#[test]
fn a_change_on_the_way_is_found_if_the_guard_was_made_before() {
    for is_host_sealed in [false, true] {
        let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
        let filesystem = disks.open_through(|name, memory| DynDevice::new(name, Changing(memory)));
        let engine = block_on(Engine::open(&filesystem, EngineOptions::default())).unwrap();
        engine.devices().set_host_sealed(is_host_sealed);
        let file = create(&engine, "file", Kind::NoSum);
        write(&engine, file, 0, &[0x77; 4 * SECTOR]);
        block_on(engine.commit()).unwrap();
        drop(engine);
        assert_eq!(CommitRecord::read(&first_superblock(&disks, 0)).unwrap().is_host_sealed, is_host_sealed);
        let filesystem = disks.open();
        assert_eq!(filesystem.storage().devices.is_host_sealed(), is_host_sealed, "whoever writes next does the same");
        let read = block_on(filesystem.read(&inode_of(&filesystem, file), 0, SECTOR));
        assert_eq!(read.is_err(), is_host_sealed);
    }
}
