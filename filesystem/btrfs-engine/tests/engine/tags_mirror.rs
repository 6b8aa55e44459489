//! A filesystem on a mirror of devices with protection information, of which one has lost a write.

use std::future::pending;
use std::rc::Rc;
use std::time::Duration;

use futures_executor::block_on;
use sealblock_block::{BlockState, Clock, Device, Durability, DynDevice, Expectations, Request, Response};
use sealblock_btrfs::tags::tag_of;
use sealblock_btrfs::{Candidate, CopyFault, Filesystem, FsError, OpenOptions};
use sealblock_btrfs_engine::engine::{Engine, EngineOptions};
use sealblock_integrity::{Sealed, Tags};
use sealblock_layers_mirror::{Mirror, ReplicaSource};
use sealblock_media_memory::MemoryDevice;
use sealblock_units::{BlockSize, Extent};

use crate::data_faults::open;
use crate::disks::{Disks, read_blocks, write_block};
use crate::files::{Kind, ROOT, create, write};
use crate::tags::places_of;

const SECTOR: usize = 4096;
const SECTORS: u64 = 8;

/// A clock that never fires: the mirror has nothing to do in the background.
struct StoppedClock;

impl Clock for StoppedClock {
    async fn sleep(&self, _: Duration) {
        pending().await
    }
}

/// A filesystem with one file of eight sectors without checksums, on a mirror.
struct Mirrored {
    replicas: [Rc<MemoryDevice>; 2],
    mirror: Rc<Mirror<StoppedClock>>,
    ino: u64,
    /// The first block of the file, and the transaction in which it was written.
    first: u64,
    generation: u64,
}

impl Mirrored {
    fn make() -> Option<Mirrored> {
        let disks = Disks::make(1, 256, &["-m", "single"])?;
        let engine = open(&disks, EngineOptions::default()).0;
        let ino = create(&engine, "file", Kind::NoSum);
        write(&engine, ino, 0, &[1; SECTORS as usize * SECTOR]);
        block_on(engine.commit()).unwrap();
        drop(engine);
        let (places, generation) = places_of(&disks, ino, 0);
        let (size, format) = (BlockSize::B4096, Device::geometry(disks.memory(0)).protection);
        let blocks = Device::geometry(disks.memory(0)).capacity_blocks;
        let replicas = [0, 1].map(|_| Rc::new(MemoryDevice::new(size, blocks, format)));
        let source = |(index, memory): (usize, &Rc<MemoryDevice>)| {
            let name = format!("replica {index}");
            ReplicaSource::new(name.clone(), Ok(DynDevice::new(name, Rc::clone(memory))), None)
        };
        let sources = replicas.iter().enumerate().map(source).collect();
        let options =
            sealblock_layers_mirror::OpenOptions { is_read_only: false, accepts_lost_label: false, random: [7; 16] };
        let mirror = block_on(sealblock_layers_mirror::open(sources, StoppedClock, options)).unwrap().mirror;
        copy_all(disks.memory(0), &mirror);
        Some(Mirrored { replicas, mirror, ino, first: places[0].offset / SECTOR as u64, generation })
    }

    fn open(&self) -> Filesystem {
        let device = DynDevice::new("mirror", Rc::clone(&self.mirror));
        let candidates = vec![Candidate { device, name: "mirror".to_owned() }];
        block_on(Filesystem::open(candidates, OpenOptions::default())).unwrap()
    }

    fn read(&self) -> Result<Vec<u8>, FsError> {
        let filesystem = self.open();
        block_on(async {
            let subvolume = filesystem.subvolume(ROOT).await?;
            let inode = filesystem.inode(subvolume.root, self.ino).await?;
            filesystem.read(&inode, 0, SECTORS as usize * SECTOR).await.map(|data| data.to_vec())
        })
    }

    /// Reads the file with each replica as the first one, whichever is that after the reads of an opening.
    fn assert_reads(&self) {
        for turn in 0..4 {
            if turn % 2 == 0 {
                let one = Extent::from_raw(0, 1).unwrap();
                block_on(self.mirror.execute(Request::read(one, Expectations::NONE))).unwrap();
            }
            assert!(self.read().unwrap() == [1; SECTORS as usize * SECTOR]);
        }
    }

    /// A replica has what was in a sector before the last write: the data of an earlier transaction.
    fn lose_write(&self, replica: usize, sector: u64) {
        let (lba, earlier) = (self.first + sector, self.generation - 1);
        let tags = Tags { app_tag: tag_of(earlier), storage_tag: earlier, initial_ref_tag: lba };
        write_block(&self.replicas[replica], lba, &[0xee; SECTOR], tags);
    }

    fn file_on(&self, replica: usize) -> Sealed {
        read_blocks(&self.replicas[replica], self.first, SECTORS)
    }

    /// Both replicas have the data and the tags of the transaction.
    fn assert_healed(&self) {
        for replica in 0..2 {
            let blocks = self.file_on(replica);
            assert!(blocks.joined_data()[..] == [1; SECTORS as usize * SECTOR], "replica {replica}");
            assert!(blocks.tuples().all(|tuple| tuple.app_tag == tag_of(self.generation)), "replica {replica}");
        }
    }
}

/// Copies all blocks with their tags.
fn copy_all(from: &MemoryDevice, to: &impl Device) {
    let all = Extent::from_raw(0, Device::geometry(from).capacity_blocks).unwrap();
    let Ok(Response::BlockStatus(runs)) = block_on(Device::execute(from, Request::block_status(all))) else {
        panic!("a device in memory knows which blocks it holds")
    };
    let mut next = 0;
    for run in runs {
        let blocks = u64::from(run.blocks.get());
        for at in (next..next + blocks).step_by(256).filter(|_| run.state == BlockState::Allocated) {
            let part = Extent::from_raw(at, 256.min(next + blocks - at)).unwrap();
            let data = read_blocks(from, at, part.len());
            block_on(to.execute(Request::write(part, data, Durability::Volatile))).unwrap();
        }
        next += blocks;
    }
}

#[test]
fn a_write_that_one_replica_has_lost_is_read_from_the_other_and_healed() {
    for replica in 0..2 {
        let Some(mirrored) = Mirrored::make() else { return };
        assert!(mirrored.read().unwrap() == [1; SECTORS as usize * SECTOR]);
        mirrored.lose_write(replica, 2);
        mirrored.lose_write(replica, 3);
        mirrored.lose_write(1 - replica, 6);
        mirrored.assert_reads();
        mirrored.assert_healed();
        // A block that was never written has no tag to be read by.
        let lost = Extent::from_raw(mirrored.first + 4, 1).unwrap();
        block_on(Device::execute(&*mirrored.replicas[replica], Request::discard([lost]))).unwrap();
        mirrored.assert_reads();
        mirrored.assert_healed();
    }
}

#[test]
fn copies_that_a_check_has_found_to_differ_are_told_apart_by_the_tag() {
    let Some(mirrored) = Mirrored::make() else { return };
    mirrored.lose_write(1, 2);
    let file = Extent::from_raw(mirrored.first, SECTORS).unwrap();
    let found = block_on(mirrored.mirror.execute(Request::verify(file, Expectations::NONE))).unwrap_err();
    assert_eq!(found.bad_blocks().unwrap().as_slice().len(), 1, "{found}");
    assert!(mirrored.read().unwrap() == [1; SECTORS as usize * SECTOR]);
    mirrored.assert_healed();
    block_on(mirrored.mirror.execute(Request::verify(file, Expectations::NONE))).unwrap();
}

#[test]
fn a_write_that_both_replicas_have_lost_is_an_error_that_names_the_tag() {
    let Some(mirrored) = Mirrored::make() else { return };
    (0..2).for_each(|replica| mirrored.lose_write(replica, 2));
    for _ in 0..2 {
        let Err(FsError::Lost(lost)) = mirrored.read() else { panic!("no copy has the tag") };
        let fault = &lost.copies[0].fault;
        assert!(matches!(fault, CopyFault::Tag(found) if found.generation == mirrored.generation), "{fault}");
        assert!(fault.to_string().contains("are not those of transaction"), "{fault}");
    }
    for replica in 0..2 {
        let tuple = mirrored.file_on(replica).tuples().nth(2).unwrap();
        assert_eq!(tuple.app_tag, tag_of(mirrored.generation - 1), "nothing was written");
    }
    // The engine's reads, too.
    let engine = block_on(Engine::open(&mirrored.open(), EngineOptions::default())).unwrap();
    assert!(block_on(engine.read(ROOT, mirrored.ino, 2 * SECTOR as u64, SECTOR as u64)).is_err());
    let rest = block_on(engine.read(ROOT, mirrored.ino, 3 * SECTOR as u64, SECTOR as u64)).unwrap();
    assert!(rest[..] == [1; SECTOR]);
}
