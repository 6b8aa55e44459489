//! Systems under test: protected volumes, or anything else that stores blocks on a medium.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::pin::Pin;
use std::time::Duration;

use sealblock_block::{DynDevice, ReservedArea};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_media_volume::format::{
    Layout, LogSector, RESERVED_HEAD_BYTES, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Seed, Superblock,
};
use sealblock_media_volume::{
    AnsweredChanges, CreateOptions, Mutation, OpenOptions, ResizeError, ResizeOptions, create, open, resize,
};
use sealblock_units::BlockSize;

use crate::disk::{Image, SimDisk};
use crate::executor::Executor;
use crate::random::Random;
use crate::workload::{GROUP_BLOCKS, Workload};

/// The shape of a device under test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VolumeProfile {
    /// Size of a block.
    pub block_size: BlockSize,
    /// Bytes of a sector of the disk.
    pub sector_bytes: u32,
    /// Blocks of the device.
    pub capacity_blocks: u64,
    /// Format of the protection information.
    pub protection: Option<PiFormat>,
    /// Cache size of the device in bytes.
    pub cache_bytes: usize,
    /// Time without requests after which it is idle, in microseconds.
    pub idle_us: u64,
    /// Minimum bytes of a write that is sealed while it is in flight.
    pub seal_in_flight_bytes: u64,
    /// Maximum bytes of a half of the area for notes.
    pub notes_half_bytes: u32,
    /// Identity of the device.
    pub uuid: [u8; 16],
}

impl VolumeProfile {
    /// Draws a shape that fits a load.
    pub fn draw(workload: Workload, random: &Random) -> VolumeProfile {
        let small = matches!(workload, Workload::Zones | Workload::Wide) || random.chance(50);
        let block_size = if small { BlockSize::B512 } else { BlockSize::B4096 };
        let sector_bytes = if small { 512 } else { *random.pick(&[512, 4096]) };
        let capacity_blocks = match workload {
            Workload::Zones => GROUP_BLOCKS + random.between(1, 500),
            Workload::Wide => random.between(4_000, 12_000),
            Workload::Laps => random.between(8, 100),
            _ => *random.pick(&[random.between(4, 40), random.between(40, 200), random.between(200, 700)]),
        };
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&random.word().to_le_bytes());
        let cache_bytes = *random.pick(&[0, 64 << 10, 1 << 20]);
        // An idle time between any two requests, sometimes, or never.
        let idle_us = *random.pick(&[1, 200, 5_000, 100_000]);
        // For all writes, some, only long ones, or none.
        let seal_in_flight_bytes = *random.pick(&[0, 4096, 64 << 10, u64::MAX]);
        VolumeProfile {
            idle_us,
            block_size,
            sector_bytes,
            capacity_blocks,
            protection: draw_format(random),
            cache_bytes,
            seal_in_flight_bytes,
            notes_half_bytes: 1 << 20,
            uuid,
        }
    }

    /// Sometimes gives the device room for notes in addition to a longest write; small devices have none.
    pub fn with_notes(self, workload: Workload, random: &Random) -> VolumeProfile {
        let notes_half_bytes = *random.pick(&[4096, 8192, 1 << 20]);
        if matches!(workload, Workload::Zones | Workload::Wide | Workload::Laps) || random.chance(50) {
            return VolumeProfile { notes_half_bytes, ..self };
        }
        let capacity_blocks = match self.block_size {
            BlockSize::B512 => random.between(2_100, 2_400),
            BlockSize::B4096 => random.between(300, 700),
        };
        VolumeProfile { notes_half_bytes, capacity_blocks, ..self }
    }
}

fn draw_format(random: &Random) -> Option<PiFormat> {
    if random.chance(8) {
        return None;
    }
    let guard = *random.pick(&GuardKind::ALL);
    let protection = *random.pick(&ProtectionType::ALL);
    let (least, most) = guard.storage_tag_limits();
    let bits = if random.chance(70) { least } else { random.between(u64::from(least), u64::from(most)) as u8 };
    PiFormat::new(guard, protection, bits).ok()
}

impl fmt::Display for VolumeProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} blocks of {}, sectors of {}, ", self.capacity_blocks, self.block_size, self.sector_bytes)?;
        match self.protection {
            None => write!(f, "no protection"),
            Some(format) => {
                let storage = format.storage_tag_bits();
                write!(f, "{} {:?} storage tag {storage} bits", format.guard(), format.protection())
            }
        }
    }
}

/// A future that does nothing until it is awaited.
pub type BoxedWork<T> = Pin<Box<dyn Future<Output = Result<T, String>>>>;

/// An open device.
pub struct Session {
    /// The device, behind its gate.
    pub stack: DynDevice,
    /// Closes it in good order.
    pub close: BoxedWork<()>,
    /// Clears the record that completed changes may be lost, if there is one and hosts do not know.
    pub lost: Option<BoxedWork<()>>,
}

/// The result of a resize.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resizing {
    /// The device has the new size.
    Done,
    /// Blocks after the new end contain data.
    InUse,
    /// The disk is too small, or the device cannot record the new layout.
    NoRoom,
}

/// Sectors of metadata that have a second copy.
#[derive(Clone, Debug)]
pub struct Redundant {
    /// Runs of sectors. One fault may cover a whole run.
    pub runs: Vec<Range<u64>>,
    /// True if an open repairs a lost copy. Otherwise the repair waits until a read needs the copy, and a fault in
    /// another kind of metadata before that would be a second fault.
    pub is_repaired_at_open: bool,
}

/// A system that makes a device on a disk.
pub trait System {
    /// Bytes of disk that a device of this shape needs.
    fn disk_bytes(&self, profile: &VolumeProfile) -> u64;

    /// True if damage to data that were durable for long is found, and not mistaken for data that never arrived.
    fn finds_damage(&self) -> bool {
        true
    }

    /// True if all completed changes are still there after the process was killed.
    fn survives_kills(&self) -> bool {
        false
    }

    /// The percentage of syncs that the disk only pretends to execute. For tests of the simulator itself.
    fn lie_percent(&self) -> u64 {
        0
    }

    /// Kinds of metadata that the device stores twice, so that one fault there loses nothing durable.
    fn redundant(&self, _shape: &VolumeProfile, _image: &Image) -> Vec<Redundant> {
        Vec::new()
    }

    /// How many parts the device has that commit by themselves, and in units of how many blocks it is dealt to them.
    fn parts(&self, _profile: &VolumeProfile) -> (u32, u64) {
        (1, 1)
    }

    /// True if devices can be resized.
    fn resizes(&self) -> bool {
        false
    }

    /// The size of the device on a disk, in blocks.
    fn capacity(&self, profile: &VolumeProfile, _image: &Image) -> u64 {
        profile.capacity_blocks
    }

    /// Resizes a device that is not open.
    fn resize(&self, _disk: SimDisk, _executor: Executor, _capacity_blocks: u64) -> BoxedWork<Resizing> {
        Box::pin(async { Err("it keeps its size".to_owned()) })
    }

    /// The sectors of the log with entries that may be durable and have no second copy: those of the last small commit.
    fn single_copy(&self, _shape: &VolumeProfile, _image: &Image) -> Vec<u64> {
        Vec::new()
    }

    /// Makes an empty device, durable once this returns.
    fn create(&self, disk: SimDisk, profile: VolumeProfile) -> BoxedWork<()>;

    /// Opens the device.
    fn open(&self, disk: SimDisk, executor: Executor, profile: VolumeProfile, read_only: bool) -> BoxedWork<Session>;
}

/// Protected volumes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Volumes {
    /// A mutation of the volume, used to show that the simulator detects it.
    pub mutation: Mutation,
}

fn layout_of(profile: &VolumeProfile) -> Layout {
    let layout = Layout::new(profile.block_size, profile.sector_bytes, profile.capacity_blocks);
    layout.expect("drawn shapes are possible")
}

/// The volume's layout from the superblocks on a disk; that of a new volume if there are none.
fn layout_on(profile: &VolumeProfile, image: &Image) -> Layout {
    let read = |offset: u64| {
        let mut bytes = vec![0; image.sector_bytes() as usize];
        image.read_sector(offset / u64::from(image.sector_bytes()), &mut bytes);
        Superblock::decode(&bytes[..SUPERBLOCK_BYTES]).ok()
    };
    let newest = SUPERBLOCK_OFFSETS.into_iter().filter_map(read).max_by_key(|superblock| superblock.write_seq);
    newest.map_or_else(|| layout_of(profile), |superblock| superblock.layout)
}

/// The sectors of each copy of a volume's group label, in the order of their places.
pub(crate) fn label_copies(profile: &VolumeProfile, image: &Image) -> [Range<u64>; 4] {
    let layout = layout_on(profile, image);
    let sector = u64::from(layout.sector_bytes());
    let [even, odd] = [0, 1].map(|turn| layout.reserved_offsets(ReservedArea::GroupLabel, turn));
    let length = (ReservedArea::GroupLabel.max_bytes() + RESERVED_HEAD_BYTES) as u64 / sector;
    [even[0], even[1], odd[0], odd[1]].map(|at| at / sector..at / sector + length)
}

/// The sectors of a volume's log.
fn log_of(layout: &Layout) -> Range<u64> {
    let sector = u64::from(layout.sector_bytes());
    layout.log_offset() / sector..(layout.log_offset() + layout.log_bytes()) / sector
}

/// The parts of a volume that have two copies, in sectors from its start.
pub(crate) fn redundant_parts(layout: &Layout) -> Vec<Redundant> {
    let sector = u64::from(layout.sector_bytes());
    let run = |offset: u64, sectors: u64| offset / sector..offset / sector + sectors;
    let maps = [0, 1].map(|copy| run(layout.group_map_offset(copy), layout.group_map_sectors()));
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for group in 0..layout.block_groups() {
        let places: Vec<_> = layout.pages_of_group(group).filter_map(|number| layout.page_offsets(number)).collect();
        first.extend(places.iter().map(|place| run(place.offset, 1)));
        second.extend(places.first().map(|place| run(place.second_offset, places.len() as u64)));
    }
    vec![
        Redundant { runs: vec![log_of(layout)], is_repaired_at_open: true },
        Redundant { runs: maps.to_vec(), is_repaired_at_open: true },
        Redundant { runs: first, is_repaired_at_open: false },
        Redundant { runs: second, is_repaired_at_open: false },
    ]
}

/// The sectors of a volume's log with entries that may be durable and have no second copy. The volume begins at sector
/// `start`.
pub(crate) fn lone_entries(layout: &Layout, image: &Image, start: u64, seed: Seed) -> Vec<u64> {
    let mut bytes = vec![0; layout.sector_bytes() as usize];
    let (mut mark, mut repeated, mut places) = (0, BTreeSet::new(), BTreeMap::<u64, Vec<(usize, u64)>>::new());
    for sector in log_of(layout).map(|sector| start + sector) {
        image.read_sector(sector, &mut bytes);
        let Ok(found) = LogSector::decode(&bytes, seed) else { continue };
        mark = mark.max(found.header.durable_seq);
        places.entry(found.header.sequence).or_default().push((found.entries().len(), sector));
        if !found.repeats().is_empty() {
            repeated.insert(found.header.sequence - 1);
        }
    }
    // The last completed commit is the one before the newest mark if only a part of the newest one is there;
    // otherwise it is the newest. Only one place has it: the place with the most sectors.
    let last = places.into_iter().filter(|(sequence, _)| sequence + 1 >= mark && !repeated.contains(sequence));
    let only = last.filter_map(|(_, mut places)| {
        places.sort_unstable();
        match places[..] {
            [(_, only)] => Some(only),
            [(less, _), (most, only)] => (less < most).then_some(only),
            _ => None,
        }
    });
    only.collect()
}

impl System for Volumes {
    fn disk_bytes(&self, profile: &VolumeProfile) -> u64 {
        layout_of(profile).medium_bytes()
    }

    fn resizes(&self) -> bool {
        true
    }

    fn survives_kills(&self) -> bool {
        true
    }

    fn capacity(&self, profile: &VolumeProfile, image: &Image) -> u64 {
        layout_on(profile, image).capacity_blocks()
    }

    fn resize(&self, disk: SimDisk, executor: Executor, capacity_blocks: u64) -> BoxedWork<Resizing> {
        let options = ResizeOptions { capacity_blocks, bars: |_| None, mutation: self.mutation };
        Box::pin(async move {
            match resize(&disk, executor, &options).await {
                Ok(_) => Ok(Resizing::Done),
                Err(ResizeError::InUse { .. }) => Ok(Resizing::InUse),
                Err(ResizeError::Room { .. } | ResizeError::Limit(_)) => Ok(Resizing::NoRoom),
                Err(error) => Err(error.to_string()),
            }
        })
    }

    fn redundant(&self, profile: &VolumeProfile, image: &Image) -> Vec<Redundant> {
        redundant_parts(&layout_on(profile, image))
    }

    fn single_copy(&self, profile: &VolumeProfile, image: &Image) -> Vec<u64> {
        lone_entries(&layout_on(profile, image), image, 0, Seed::of(&profile.uuid))
    }

    fn create(&self, disk: SimDisk, profile: VolumeProfile) -> BoxedWork<()> {
        let options = CreateOptions {
            block_size: profile.block_size,
            capacity_blocks: profile.capacity_blocks,
            protection: profile.protection,
            uuid: profile.uuid,
            preallocate: false,
        };
        Box::pin(async move { create(&disk, &options).await.map_err(|error| error.to_string()) })
    }

    fn open(&self, disk: SimDisk, executor: Executor, profile: VolumeProfile, read_only: bool) -> BoxedWork<Session> {
        let idle_after = Duration::from_micros(profile.idle_us);
        let VolumeProfile { cache_bytes, seal_in_flight_bytes, notes_half_bytes, .. } = profile;
        let mutation = self.mutation;
        let options = OpenOptions {
            read_only,
            cache_bytes,
            idle_after,
            seal_in_flight_bytes,
            notes_half_bytes,
            mutation,
            ..OpenOptions::default()
        };
        Box::pin(async move {
            let opened = open(disk, executor.clone(), &options).await.map_err(|error| error.to_string())?;
            drop(executor.spawn("worker", opened.worker.run()));
            let volume = opened.volume;
            let stack = DynDevice::new("volume", volume.clone());
            let handle = volume.clone();
            let lost: Option<BoxedWork<()>> = match opened.description.answered {
                AnsweredChanges::MayBeLost(_) => {
                    Some(Box::pin(async move { handle.forget_lost().await.map_err(|error| error.to_string()) }))
                }
                AnsweredChanges::AllDurable | AnsweredChanges::Noted(_) => None,
            };
            let close = Box::pin(async move { volume.close().await.map_err(|error| error.to_string()) });
            Ok(Session { stack, close, lost })
        })
    }
}
