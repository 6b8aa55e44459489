//! Files whose checksums are in the tree, and files whose checksums the devices keep, side by side: many damages, lost
//! writes and misdirected writes are found in both, exactly where they are, and healed where there is a second copy. What
//! was written in place and lost is found in neither.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use futures_executor::block_on;
use sealblock_block::{
    Abilities, Device, Durability, DynDevice, Expectations, Geometry, Operation, Outcome, Request, Response,
};
use sealblock_btrfs::extents::Content;
use sealblock_btrfs::verify::{DataFault, Finding, Mode, Verdict, repair};
use sealblock_btrfs::{Filesystem, Place};
use sealblock_btrfs_engine::engine::{Engine, EngineOptions};
use sealblock_integrity::{Sealed, Tags};
use sealblock_media_memory::{Corruption, MemoryDevice};
use sealblock_units::{Extent, Lba};

use crate::disks::{Disks, read_blocks, write_block};
use crate::files::{Kind, ROOT, create, write};
use crate::tags::{MIRROR, SECTOR};

const SECTORS: usize = 2600;
const FLIPS: usize = 1000;
const LOST: usize = 100;
const MISDIRECTED: usize = 100;

/// What blocks were before they were last written, by device and block.
type Before = Rc<RefCell<BTreeMap<(u64, u64), Sealed>>>;

/// A device that remembers what its blocks were before they were last written.
struct Remembering {
    devid: u64,
    memory: Rc<MemoryDevice>,
    before: Before,
}

impl Device for Remembering {
    fn geometry(&self) -> &Geometry {
        Device::geometry(&*self.memory)
    }

    fn abilities(&self) -> Abilities {
        Device::abilities(&*self.memory)
    }

    async fn execute(&self, request: Request) -> Outcome {
        if let Operation::Write(_) = &request.operation {
            let extent = request.extents.one();
            for lba in extent.start().get()..extent.start().get() + u64::from(extent.blocks().get()) {
                let read = Request::read(Extent::from_raw(lba, 1).unwrap(), Expectations::NONE);
                let Ok(Response::Data(block)) = Device::execute(&*self.memory, read).await else { panic!("{lba}") };
                self.before.borrow_mut().insert((self.devid, lba), block);
            }
        }
        Device::execute(&*self.memory, request).await
    }
}

/// Writes blocks as they were, with their tags; those that were never written are deallocated.
fn put_back(disks: &Disks, place: Place, block: &Sealed) {
    let (memory, lba) = (disks.memory(place.devid as usize - 1), place.offset / SECTOR as u64);
    let tuple = block.tuples().next().unwrap();
    if tuple.app_tag == 0xFFFF {
        let extent = Extent::from_raw(lba, 1).unwrap();
        block_on(Device::execute(memory, Request::write_zeroes(extent, true, Durability::Volatile))).unwrap();
        assert_eq!(read_blocks(memory, lba, 1).tuples().next().unwrap().app_tag, 0xFFFF);
    } else {
        let tags = Tags { app_tag: tuple.app_tag, storage_tag: tuple.storage_tag, initial_ref_tag: lba };
        write_block(memory, lba, &block.joined_data(), tags);
    }
}

/// The places of all sectors of a file in the last commit.
fn places(filesystem: &Filesystem, ino: u64) -> Vec<Vec<Place>> {
    let tree = block_on(filesystem.tree(ROOT)).unwrap().unwrap();
    let inode = block_on(filesystem.inode(tree, ino)).unwrap();
    let mut all = Vec::new();
    for part in block_on(filesystem.parts(&inode, 0, u64::MAX)).unwrap() {
        let Content::Stored(stored) = part.content else { panic!("{part:?}") };
        for at in (0..part.bytes).step_by(SECTOR) {
            let located = filesystem.storage().map.locate(stored.logical + stored.offset + at, SECTOR as u64).unwrap();
            all.push(located.copies.to_vec());
        }
    }
    all
}

/// The content of a sector.
fn sector(ino: u64, index: usize, version: u64) -> Vec<u8> {
    let seed = ino << 40 | (index as u64) << 8 | version;
    let mut random = fastrand::Rng::with_seed(seed);
    (0..SECTOR).map(|_| random.u8(..)).collect()
}

/// A file, its content, and what was damaged of it.
struct Subject {
    ino: u64,
    versions: Vec<u64>,
    bad: BTreeSet<u64>,
}

impl Subject {
    fn new(engine: &Engine, name: &str, kind: Kind) -> Subject {
        let ino = create(engine, name, kind);
        let mut subject = Subject { ino, versions: vec![0; SECTORS], bad: BTreeSet::new() };
        subject.write(engine, 0..SECTORS);
        subject
    }

    fn write(&mut self, engine: &Engine, sectors: impl IntoIterator<Item = usize>) {
        for index in sectors {
            self.versions[index] += 1;
            write(engine, self.ino, (index * SECTOR) as u64, &sector(self.ino, index, self.versions[index]));
        }
    }

    /// Every sector can be read and is right, unless it is bad everywhere.
    fn assert_read(&self, engine: &Engine, bad_everywhere: bool) {
        for index in 0..SECTORS {
            let at = (index * SECTOR) as u64;
            let read = block_on(engine.read(ROOT, self.ino, at, SECTOR as u64));
            if bad_everywhere && self.bad.contains(&at) {
                assert!(read.is_err(), "{} at {at}", self.ino);
            } else {
                assert!(read.unwrap()[..] == sector(self.ino, index, self.versions[index]), "{} at {at}", self.ino);
            }
        }
    }
}

/// The sectors that a verification finds, of each file.
fn found(disks: &Disks, is_lost: bool) -> BTreeMap<u64, BTreeSet<u64>> {
    let mut all: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
    let report = disks.verify(Mode::Auto);
    assert!(
        report.damage_count == report.findings.len() as u64 && report.unchecked.is_empty(),
        "{:?}",
        report.unchecked
    );
    for finding in &report.findings {
        let Finding::Data(data) = finding else { panic!("{finding}") };
        assert!(matches!(data.fault, DataFault::Copy { is_lost: lost, .. } if lost == is_lost), "{data}");
        for file in &data.uses.files {
            for at in (file.offset..file.offset + file.bytes).step_by(SECTOR) {
                assert!(all.entry(file.ino).or_default().insert(at), "twice: {data}");
            }
        }
    }
    all
}

/// Sectors that are damaged: bits change, the last write is lost, and a write that should have gone to the first place of a
/// pair went to the second.
struct Damages {
    flipped: Vec<usize>,
    lost: Vec<usize>,
    misdirected: Vec<(usize, usize)>,
}

impl Damages {
    fn new(random: &mut fastrand::Rng) -> Damages {
        let mut sectors: Vec<usize> = (0..SECTORS).collect();
        random.shuffle(&mut sectors);
        let (flipped, rest) = sectors.split_at(FLIPS);
        let (lost, rest) = rest.split_at(LOST);
        let (from, to) = (&rest[..MISDIRECTED], &rest[MISDIRECTED..2 * MISDIRECTED]);
        let misdirected = from.iter().copied().zip(to.iter().copied()).collect();
        Damages { flipped: flipped.to_vec(), lost: lost.to_vec(), misdirected }
    }

    /// Damages one copy of each sector. Returns the places in the file.
    fn apply(&self, disks: &Disks, before: &Before, ino: u64, random: &mut fastrand::Rng) -> BTreeSet<u64> {
        let places = places(&disks.open(), ino);
        let mut place_of = |index: usize| places[index][random.usize(..places[index].len())];
        let was = |place: Place| before.borrow()[&(place.devid, place.offset / SECTOR as u64)].clone();
        let memory = |place: Place| disks.memory(place.devid as usize - 1);
        for index in &self.flipped {
            let place = place_of(*index);
            let damage = Corruption::Data { at: *index * 37 % SECTOR, mask: 1 << (index % 8) };
            assert!(memory(place).damage(Lba::new(place.offset / SECTOR as u64), damage));
        }
        for index in &self.lost {
            let place = place_of(*index);
            put_back(disks, place, &was(place));
        }
        for (from, to) in &self.misdirected {
            // The block of one place lies in the other, with its tags and so another reference tag.
            let (from, to) = (place_of(*from), place_of(*to));
            put_back(disks, to, &read_blocks(memory(from), from.offset / SECTOR as u64, 1));
            let distance = (from.offset ^ to.offset) / SECTOR as u64;
            // The reference tag is the end of the tuple.
            for (at, mask) in (0..4).map(|byte| (15 - byte, (distance >> (8 * byte)) as u8)).filter(|one| one.1 != 0) {
                memory(to).damage(Lba::new(to.offset / SECTOR as u64), Corruption::Tag { at, mask });
            }
            put_back(disks, from, &was(from));
        }
        let pairs = self.misdirected.iter().flat_map(|(from, to)| [from, to]);
        let bad: BTreeSet<u64> =
            self.flipped.iter().chain(&self.lost).chain(pairs).map(|index| (*index * SECTOR) as u64).collect();
        assert_eq!(bad.len(), FLIPS + LOST + 2 * MISDIRECTED);
        bad
    }
}

#[test]
fn damages_lost_and_misdirected_writes_are_found_with_both_kinds_of_checksums() {
    for (devices, options) in [(1, &["-m", "single"][..]), (2, &MIRROR)] {
        let Some(disks) = Disks::make(devices, 512, options) else { return };
        let before = Before::default();
        let filesystem = disks.open_through(|name, memory| {
            let devid = name.rsplit(' ').next().unwrap().parse::<u64>().unwrap() + 1;
            DynDevice::new(name, Remembering { devid, memory, before: Rc::clone(&before) })
        });
        let engine = block_on(Engine::open(&filesystem, EngineOptions::default())).unwrap();
        let mut random = fastrand::Rng::with_seed(37);
        let mut subjects =
            [("summed", Kind::Plain), ("tagged", Kind::NoSum)].map(|(name, kind)| Subject::new(&engine, name, kind));
        block_on(engine.commit()).unwrap();
        for _ in 0..6 {
            for subject in &mut subjects {
                let first = random.usize(..SECTORS / 2);
                subject.write(&engine, (first..first + SECTORS / 2).filter(|_| random.u8(..) < 120));
            }
            block_on(engine.commit()).unwrap();
        }
        drop(engine);
        assert_eq!(disks.verify(Mode::Auto).verdict(), Verdict::Clean);
        let damages = Damages::new(&mut random);
        for subject in &mut subjects {
            subject.bad = damages.apply(&disks, &before, subject.ino, &mut random);
        }
        let expected: BTreeMap<_, _> = subjects.iter().map(|one| (one.ino, one.bad.clone())).collect();
        assert!(found(&disks, devices == 1) == expected, "each of them, and nothing else");
        // A read takes what is good, and repairs what it finds bad on the way.
        let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
        subjects.iter().for_each(|subject| subject.assert_read(&engine, devices == 1));
        block_on(engine.commit()).unwrap();
        drop(engine);
        if devices == 2 {
            let report = disks.verify(Mode::Auto);
            assert!(report.damage_count > 0 && report.damage_count < 2 * (FLIPS + LOST + 2 * MISDIRECTED) as u64);
            let repaired = block_on(repair(&disks.open(), &report)).unwrap();
            assert_eq!((repaired.nodes, repaired.failed.len()), (0, 0));
            assert_eq!(disks.verify(Mode::Auto).verdict(), Verdict::Clean, "healed");
        } else {
            let repaired = block_on(repair(&disks.open(), &disks.verify(Mode::Auto))).unwrap();
            assert_eq!(repaired.data_bytes, 0, "there is no other copy");
            assert!(found(&disks, true) == expected);
        }
        disks.assert_consistent();
    }
}

#[test]
fn writes_in_place_that_were_lost_are_found_by_nothing() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let before = Before::default();
    let filesystem = disks.open_through(|name, memory| {
        DynDevice::new(name, Remembering { devid: 1, memory, before: Rc::clone(&before) })
    });
    let engine = block_on(Engine::open(&filesystem, EngineOptions::default())).unwrap();
    let mut subject = Subject::new(&engine, "in place", Kind::NoCow);
    block_on(engine.commit()).unwrap();
    subject.write(&engine, 0..SECTORS);
    block_on(engine.commit()).unwrap();
    drop(engine);
    let places = places(&disks.open(), subject.ino);
    for index in (0..SECTORS).step_by(SECTORS / LOST) {
        let place = places[index][0];
        let was = before.borrow()[&(place.devid, place.offset / SECTOR as u64)].clone();
        put_back(&disks, place, &was);
        subject.versions[index] -= 1;
    }
    assert_eq!(disks.verify(Mode::Auto).verdict(), Verdict::Clean, "as the documents say");
    let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
    subject.assert_read(&engine, false);
}
