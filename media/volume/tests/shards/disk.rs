//! A disk in memory, and a volume in shards on it, all of whose shards are on one core.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use futures_executor::LocalPool;
use futures_util::task::LocalSpawnExt;
use sealblock_block::{
    Clock, Device, Durability, DynDevice, Error, Expectations, Medium, MediumError, MediumErrorKind, Request, Response,
    WriteData, yield_once,
};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, Tags, Unsealed};
use sealblock_layers_stripe::ShardLayer;
use sealblock_media_volume::format::Container;
use sealblock_media_volume::shards::{OpenShards, create_shards, open_shards, summarise};
use sealblock_media_volume::{CreateOptions, OpenOptions, Volume, VolumeError, VolumeInfo, VolumeMedium};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::{BlockSize, ByteCount, Extent};

pub const UUID: [u8; 16] = *b"an identEty here";

/// Bytes in memory. Clones are the same disk.
#[derive(Clone, Default)]
pub struct Disk {
    pub bytes: Rc<RefCell<Vec<u8>>>,
    /// The range of bytes whose writes fail.
    pub unwritable: Rc<Cell<(u64, u64)>>,
    /// The number of changes and syncs before all of them fail, as if the machine had stopped.
    pub left: Rc<Cell<Option<u64>>>,
    pub syncs: Rc<Cell<u64>>,
    /// The next sync fails, and no later one does.
    pub sync_fails: Rc<Cell<bool>>,
}

impl Disk {
    pub fn new(length_bytes: u64) -> Disk {
        Disk { bytes: Rc::new(RefCell::new(vec![0; length_bytes as usize])), ..Disk::default() }
    }

    /// Another disk with the same bytes.
    pub fn copy(&self) -> Disk {
        Disk { bytes: Rc::new(RefCell::new(self.bytes.borrow().clone())), ..Disk::default() }
    }

    pub fn fill(&self, offset: u64, length: u64, byte: u8) {
        self.bytes.borrow_mut()[offset as usize..(offset + length) as usize].fill(byte);
    }

    pub fn put_from(&self, other: &Disk, offset: u64, length: u64, from: u64) {
        let part = other.bytes.borrow()[from as usize..(from + length) as usize].to_vec();
        self.bytes.borrow_mut()[offset as usize..][..part.len()].copy_from_slice(&part);
    }

    fn change(&self, doing: &'static str, offset_bytes: u64) -> Result<(), MediumError> {
        match self.left.get() {
            Some(0) => {
                let reason = "the machine has stopped".to_owned();
                Err(MediumError { kind: MediumErrorKind::Failed, doing, offset_bytes, reason })
            }
            left => {
                self.left.set(left.map(|left| left - 1));
                Ok(())
            }
        }
    }
}

impl Medium for Disk {
    fn len_bytes(&self) -> u64 {
        self.bytes.borrow().len() as u64
    }

    fn sector_bytes(&self) -> u32 {
        512
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn can_punch(&self) -> bool {
        true
    }

    async fn read(&self, offset_bytes: u64, mut into: Buffer) -> (Result<(), MediumError>, Buffer) {
        let length = into.len();
        into.copy_from_slice(&self.bytes.borrow()[offset_bytes as usize..][..length]);
        (Ok(()), into)
    }

    async fn write(&self, offset_bytes: u64, from: Slice) -> Result<(), MediumError> {
        self.change("write", offset_bytes)?;
        let (start, end) = self.unwritable.get();
        if offset_bytes < end && offset_bytes + from.len() as u64 > start {
            let reason = "a bad place".to_owned();
            return Err(MediumError { kind: MediumErrorKind::Failed, doing: "write", offset_bytes, reason });
        }
        self.bytes.borrow_mut()[offset_bytes as usize..][..from.len()].copy_from_slice(&from);
        Ok(())
    }

    async fn sync(&self) -> Result<(), MediumError> {
        self.change("sync", 0)?;
        self.syncs.set(self.syncs.get() + 1);
        // It takes longer than it takes all shards to write their logs.
        for _ in 0..100 {
            yield_once().await;
        }
        if self.sync_fails.replace(false) {
            let reason = "a write-back failed".to_owned();
            return Err(MediumError { kind: MediumErrorKind::Failed, doing: "sync", offset_bytes: 0, reason });
        }
        Ok(())
    }

    async fn drain(&self) {}

    async fn punch(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.change("punch a hole", offset_bytes)?;
        self.fill(offset_bytes, length_bytes, 0);
        Ok(())
    }

    async fn zero(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.punch(offset_bytes, length_bytes).await
    }
}

/// A clock that stands still.
#[derive(Clone)]
pub struct NoClock;

impl Clock for NoClock {
    fn sleep(&self, _: Duration) -> impl Future<Output = ()> {
        std::future::pending()
    }
}

pub fn options(bytes: u64) -> CreateOptions {
    CreateOptions {
        block_size: BlockSize::B4096,
        capacity_blocks: bytes >> 12,
        protection: Some(PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type1)),
        uuid: UUID,
        preallocate: false,
    }
}

/// The length of the shortest medium of such a volume.
pub fn length_of(bytes: u64, shards: u32) -> u64 {
    let of = options(bytes);
    let made = Container::new(UUID, (of.block_size, 512), of.capacity_blocks, of.protection, (shards, 0)).unwrap();
    made.medium_bytes()
}

/// A disk with a new volume in shards.
pub fn created(bytes: u64, shards: u32) -> Disk {
    let disk = Disk::new(length_of(bytes, shards));
    futures_executor::block_on(create_shards(&disk, &options(bytes), shards)).unwrap();
    disk
}

/// An open volume in shards, whose workers run whenever a request runs.
pub struct Harness {
    pool: RefCell<LocalPool>,
    pub device: DynDevice,
    pub container: Container,
    pub info: VolumeInfo,
    pub volumes: Vec<Rc<Volume<VolumeMedium<Disk>, NoClock>>>,
}

impl Harness {
    pub fn open(disk: &Disk) -> Result<Harness, VolumeError> {
        Harness::open_with(disk, &OpenOptions::default())
    }

    pub fn open_with(disk: &Disk, options: &OpenOptions) -> Result<Harness, VolumeError> {
        // The disk takes no notes, and with this every write would be flushed.
        let options = OpenOptions { keeps_answered: false, ..*options };
        let mut pool = LocalPool::new();
        let opened = pool.run_until(open_shards(disk.clone(), NoClock, &options))?;
        let OpenShards { shards, volumes } = opened.expect("a volume in shards");
        let infos: Vec<(u32, VolumeInfo)> =
            (0..).zip(&volumes).map(|(shard, opened)| (shard, opened.description.clone())).collect();
        let container = *shards.container();
        let info = summarise(&container, shards.copies(), &infos);
        let volumes: Vec<_> = volumes
            .into_iter()
            .map(|opened| {
                pool.spawner().spawn_local(opened.worker.run()).unwrap();
                opened.volume
            })
            .collect();
        let gates = (0..).zip(&volumes).map(|(shard, volume)| DynDevice::new(format!("shard {shard}"), volume.clone()));
        let unit = ByteCount::new(container.unit_blocks() << container.block_size().shift());
        let layer = ShardLayer::new(gates.collect(), unit, container.capacity_blocks()).unwrap();
        let device = DynDevice::new("volume", layer);
        Ok(Harness { pool: RefCell::new(pool), device, container, info, volumes })
    }

    pub fn run<T>(&self, future: impl Future<Output = T>) -> T {
        self.pool.borrow_mut().run_until(future)
    }

    pub fn write(&self, start: u64, data: &[u8]) -> Result<(), Error> {
        let extent = Extent::from_raw(start, (data.len() >> 12) as u64).unwrap();
        let tags = Tags { app_tag: 7, storage_tag: 0, initial_ref_tag: start };
        let geometry = self.device.geometry().clone();
        let data = Unsealed::new(Slice::copy_from(data), geometry.block_size, geometry.protection, tags);
        let request = Request::write(extent, WriteData::from(data), Durability::Volatile);
        self.run(self.device.execute(request)).map(drop)
    }

    pub fn read(&self, start: u64, blocks: u64) -> Result<Vec<u8>, Error> {
        let extent = Extent::from_raw(start, blocks).unwrap();
        match self.run(self.device.execute(Request::read(extent, Expectations::NONE)))? {
            Response::Data(data) => Ok(data.joined_data().to_vec()),
            other => panic!("a read was answered with {other:?}"),
        }
    }

    pub fn verify(&self) -> Result<(), Error> {
        let extent = Extent::from_raw(0, self.device.geometry().capacity_blocks).unwrap();
        self.run(self.device.execute(Request::verify(extent, Expectations::NONE))).map(drop)
    }

    pub fn execute(&self, request: Request) -> Result<Response, Error> {
        self.run(self.device.execute(request))
    }

    pub fn flush(&self) -> Result<(), Error> {
        self.execute(Request::flush()).map(drop)
    }

    pub fn close(self) -> Result<(), Error> {
        self.run(async {
            let closed = futures_util::future::join_all(self.volumes.iter().map(|volume| volume.close())).await;
            closed.into_iter().collect()
        })
    }
}

/// Bytes that differ for each block and each seed.
pub fn pattern(seed: u64, blocks: u64) -> Vec<u8> {
    let words = (0..blocks * 512).map(|i| (seed << 32 | i).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    words.flat_map(u64::to_le_bytes).collect()
}
