//! Small filesystems are filled in several ways, and emptied again: no transaction fails for lack of space, whatever is
//! full can be emptied, and afterwards as much fits as before.

use futures_executor::block_on;
use sealblock_btrfs_engine::data::FilePlace;
use sealblock_btrfs_engine::engine::{Engine, EngineError, EngineOptions};
use sealblock_btrfs_engine::inode::Ownership;
use sealblock_btrfs_engine::names::NewFile;
use sealblock_btrfs_engine::operations::{NewSnapshot, SubvolumePlace};
use sealblock_btrfs_engine::xattrs::XattrMode;
use sealblock_btrfs_format::items::inode::InodeFlags;
use sealblock_runtime_memory::Slice;

use crate::disks::Disks;
use crate::files::ROOT;
use crate::recovered::drop_all;
use crate::share;
use crate::workload::{place, time};

/// How a filesystem is filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Filling {
    /// Large writes.
    Data,
    /// Writes of single sectors at random places.
    Sectors,
    /// Small files with attributes.
    Metadata,
    /// Snapshots, between which all is written anew.
    Snapshots,
    /// Files that share single sectors of others.
    Clones,
    /// Data in place, which snapshots take the place from.
    InPlace,
    /// Space in advance, and writes into it.
    Preallocated,
}

const FILLINGS: [Filling; 7] = [
    Filling::Data,
    Filling::Sectors,
    Filling::Metadata,
    Filling::Snapshots,
    Filling::Clones,
    Filling::InPlace,
    Filling::Preallocated,
];
/// After so many refusals, a filesystem is full.
const REFUSALS: usize = 12;
/// Sectors that are shared at once.
const CLONES: u64 = 4;
/// The most that is done. By then each filesystem here is full.
const MOST_OPERATIONS: usize = 100_000;
/// What is left free before small pieces fill it.
const LEFT_FREE: u64 = 8 << 20;
const OWNER: Ownership = Ownership { uid: 0, gid: 0, permissions: 0o700 };

type Done = Result<u64, EngineError>;

struct Full<'a> {
    engine: &'a Engine,
    random: fastrand::Rng,
    files: Vec<(String, u64)>,
    /// A file that takes most of the space.
    taken: Option<(String, u64)>,
    snapshots: Vec<String>,
    next: u64,
}

impl<'a> Full<'a> {
    fn new(engine: &'a Engine, seed: u64) -> Full<'a> {
        let random = fastrand::Rng::with_seed(seed);
        Full { engine, random, files: Vec::new(), taken: None, snapshots: Vec::new(), next: 0 }
    }

    fn name(&mut self, prefix: &str) -> String {
        self.next += 1;
        format!("{prefix}{}", self.next)
    }

    fn create(&mut self, flags: InodeFlags) -> Done {
        let name = self.name("file");
        let ino = block_on(self.engine.create(ROOT, place(&name), NewFile::Regular, &OWNER, time()))?;
        self.files.push((name, ino));
        if !flags.is_empty() {
            block_on(self.engine.set_flags(ROOT, ino, flags, time()))?;
        }
        Ok(ino)
    }

    /// One of a few files.
    fn file(&mut self, most: usize, flags: InodeFlags) -> Done {
        if self.files.len() < most {
            return self.create(flags);
        }
        Ok(self.files[self.random.usize(..self.files.len())].1)
    }

    fn write(&mut self, ino: u64, at: u64, bytes: usize) -> Done {
        let mut data = vec![self.random.u8(1..); bytes];
        self.random.fill(&mut data[..bytes.min(64)]);
        block_on(self.engine.write(ROOT, ino, at, Slice::copy_from(&data)))
    }

    fn snapshot(&mut self) -> Done {
        let (name, uuid) = (self.name("snapshot"), self.random.u128(1..).to_le_bytes());
        let new = NewSnapshot { source: ROOT, uuid, is_read_only: true };
        let to = SubvolumePlace { root: ROOT, place: place(&name) };
        block_on(self.engine.create_snapshot(new, to, time()))?;
        self.snapshots.push(name);
        Ok(0)
    }

    /// One operation. Returns the bytes that it added.
    fn add(&mut self, filling: Filling) -> Done {
        let sector = |random: &mut fastrand::Rng, most: u64| random.u64(..most) * 4096;
        let none = InodeFlags::empty();
        match filling {
            Filling::Data => {
                let (ino, at) = (self.create(none)?, self.random.u64(..100));
                self.write(ino, at, 700_000)
            }
            Filling::Sectors => {
                let (ino, at) = (self.file(3, none)?, sector(&mut self.random, 30_000));
                self.write(ino, at, 4096)
            }
            Filling::Metadata => {
                let (ino, bytes) = (self.create(none)?, self.random.usize(1..2000));
                let value = vec![7; self.random.usize(1..1000)];
                block_on(self.engine.set_xattr(ROOT, ino, (b"user.a", &value), XattrMode::Set, time()))?;
                self.write(ino, 0, bytes)
            }
            Filling::Snapshots if self.random.u8(..12) == 0 => self.snapshot(),
            Filling::InPlace if self.random.u8(..30) == 0 => self.snapshot(),
            Filling::Snapshots => {
                let (ino, at, bytes) =
                    (self.file(20, none)?, sector(&mut self.random, 100), self.random.usize(1..90_000));
                self.write(ino, at, bytes)
            }
            Filling::InPlace => {
                let ino = self.file(4, InodeFlags::NODATACOW)?;
                let (at, bytes) = (sector(&mut self.random, 500), self.random.usize(1..200_000));
                self.write(ino, at, bytes)
            }
            Filling::Clones => self.clone_sectors(),
            Filling::Preallocated => {
                let (ino, at) = (self.file(6, none)?, sector(&mut self.random, 10_000));
                block_on(self.engine.allocate_range(ROOT, ino, (at, 900_000), self.random.bool()))?;
                self.write(ino, at + 5000, 50_000)
            }
        }
    }

    fn clone_sectors(&mut self) -> Done {
        if self.files.is_empty() {
            let ino = self.create(InodeFlags::empty())?;
            return self.write(ino, 0, 2 << 20);
        }
        let source = self.files[0].1;
        let ino = if self.files.len() < 12 || self.random.u8(..100) == 0 {
            self.create(InodeFlags::empty())?
        } else {
            self.files[self.random.usize(1..self.files.len())].1
        };
        for _ in 0..CLONES {
            let [from, to] = [500, 20_000].map(|most| self.random.u64(..most) * 4096);
            let place = |ino, offset| FilePlace { root: ROOT, ino, offset };
            block_on(self.engine.clone_range(place(source, from), place(ino, to), 4096))?;
        }
        Ok(CLONES * 4096)
    }

    /// Takes all space but a little of it.
    fn take(&mut self) {
        let ino = self.create(InodeFlags::empty()).unwrap();
        let (mut end, mut piece) = (0, 64 << 20);
        while piece >= 64 << 10 {
            match block_on(self.engine.allocate_range(ROOT, ino, (end, piece), false)) {
                Ok(()) => end += piece,
                Err(error) => {
                    assert_eq!(error.errno(), libc::ENOSPC, "{error}");
                    piece /= 2;
                }
            }
        }
        block_on(self.engine.truncate(ROOT, ino, end.saturating_sub(LEFT_FREE))).unwrap();
        block_on(self.engine.commit()).unwrap();
        // The others write to files of their own.
        self.taken = self.files.pop();
    }

    /// Returns the bytes that were added until it was full.
    fn fill(&mut self, filling: Filling) -> u64 {
        let (mut refused, mut bytes) = (0, 0);
        if matches!(filling, Filling::Sectors | Filling::Metadata | Filling::Clones) {
            self.take();
        }
        for count in 0..MOST_OPERATIONS {
            match self.add(filling) {
                Ok(more) => bytes += more,
                Err(error) => {
                    assert_eq!(error.errno(), libc::ENOSPC, "{filling:?}: {error}");
                    block_on(self.engine.commit()).unwrap();
                    refused += 1;
                }
            }
            if refused == REFUSALS {
                break;
            }
            if count % 500 == 499 {
                block_on(self.engine.commit()).unwrap();
            }
        }
        assert_eq!(refused, REFUSALS, "{filling:?}: it is not full");
        bytes
    }

    /// Deletes all, in any order. What there is no space for now, there is when others are gone.
    fn empty(&mut self, filling: Filling) {
        let mut passes = 0;
        self.files.extend(self.taken.take());
        while !self.files.is_empty() || !self.snapshots.is_empty() {
            let before = (self.files.len(), self.snapshots.len());
            self.random.shuffle(&mut self.files);
            let mut files = std::mem::take(&mut self.files);
            files.retain(|(name, ino)| {
                let unlinked = match block_on(self.engine.lookup(ROOT, place(name))).unwrap() {
                    Some(_) => block_on(self.engine.unlink(ROOT, place(name), time())).map(drop),
                    None => Ok(()),
                };
                let released = unlinked.and_then(|()| block_on(self.engine.release(ROOT, *ino)).map(drop));
                is_refused(released, filling)
            });
            self.files = files;
            let mut snapshots = std::mem::take(&mut self.snapshots);
            snapshots.retain(|name| {
                let at = SubvolumePlace { root: ROOT, place: place(name) };
                match block_on(self.engine.delete_subvolume(at, time())) {
                    Ok(id) => {
                        drop_all(self.engine, id);
                        false
                    }
                    Err(error) => is_refused(Err(error), filling),
                }
            });
            self.snapshots = snapshots;
            block_on(self.engine.commit()).unwrap();
            passes += 1;
            let after = (self.files.len(), self.snapshots.len());
            assert!(after < before, "{filling:?}: {before:?} files and snapshots stay, after {passes} passes");
        }
    }
}

fn is_refused(result: Result<(), EngineError>, filling: Filling) -> bool {
    result.is_err_and(|error| {
        assert_eq!(error.errno(), libc::ENOSPC, "{filling:?}: {error}");
        true
    })
}

fn fill_and_empty((devices, mebibytes, options): (usize, u64, &[&str]), fillings: &[Filling]) {
    let Some(disks) = Disks::make(devices, mebibytes, options) else { return };
    let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
    let mut report = String::new();
    for (index, filling) in fillings.iter().enumerate() {
        let mut first = 0;
        for round in 0..2 {
            let mut full = Full::new(&engine, index as u64);
            let bytes = full.fill(*filling);
            block_on(engine.commit()).unwrap();
            disks.assert_consistent();
            full.empty(*filling);
            first = if round == 0 { bytes } else { first };
            assert!(bytes >= first - first / 4, "{filling:?}: {bytes} bytes fit, and {first} at first");
        }
        disks.assert_consistent();
        report += &format!(" {filling:?} {} KiB,", first >> 10);
    }
    drop(engine);
    disks.assert_checked_by_program();
    println!("{options:?}, filled and emptied twice with{report}");
}

/// Many small files take chunks of metadata, which data can have when the files are gone.
#[test]
fn space_of_small_files_can_be_used_for_data() {
    let Some(disks) = Disks::make(1, 400, &["-m", "dup"]) else { return };
    let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
    let free = || engine.data_space().free_bytes;
    let (before, mut full) = (free(), Full::new(&engine, 1));
    for _ in 0..20_000 {
        let ino = full.create(InodeFlags::empty()).unwrap();
        full.write(ino, 0, 2000).unwrap();
    }
    block_on(engine.commit()).unwrap();
    let least = free();
    assert!(least < before - (64 << 20), "{least} bytes are left of {before}");
    full.empty(Filling::Metadata);
    // Nodes go to the first chunks when they change.
    for _ in 0..8 {
        let ino = full.create(InodeFlags::empty()).unwrap();
        full.write(ino, 0, 100_000).unwrap();
        block_on(engine.commit()).unwrap();
        full.empty(Filling::Data);
    }
    assert!(free() >= before - before / 10, "{} bytes are free, {before} were before, and {least} meanwhile", free());
    disks.assert_consistent();
    drop(engine);
    disks.assert_checked_by_program();
}

#[test]
fn what_is_full_can_be_emptied() {
    let all = [
        (1, 64, &["-m", "single", "-n", "4096"][..]),
        (1, 24, &["--mixed", "-n", "4096"]),
        (1, 110, &["-m", "dup", "-n", "4096"]),
        (1, 64, &["-m", "single"]),
        (2, 160, &["-m", "raid1", "-d", "raid1"]),
        (2, 160, &["-m", "raid1", "-d", "raid0", "--csum", "blake2", "-n", "4096"]),
    ];
    let is_all = share(4) == 4;
    for (index, one) in all.into_iter().take(if is_all { all.len() } else { 2 }).enumerate() {
        let fillings = if is_all { &FILLINGS[..] } else { &FILLINGS[3 * index..3 * index + 4] };
        fill_and_empty(one, fillings);
    }
}
