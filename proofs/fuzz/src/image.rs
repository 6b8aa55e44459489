//! A small volume whose metadata is overwritten from the input, and the rules for opening it.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::OnceLock;

use sealblock_block::{Device, Durability, DynDevice, Error, Expectations, Request, Response};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_media_volume::OpenOptions;
use sealblock_media_volume::format::{Layout, MAP_ENTRY_BYTES, SUPERBLOCK_OFFSETS};
use sealblock_media_volume::rescue::profile::Hints;
use sealblock_media_volume::rescue::open_remains;
use sealblock_simulator::checker::{Content, Patterns};
use sealblock_simulator::disk::{Behaviour, Image, SimDisk, Survival};
use sealblock_simulator::executor::{Executor, RunEnd, RunLimits};
use sealblock_simulator::random::Random;
use sealblock_simulator::random::Trace;
use sealblock_simulator::system::{Resizing, System, VolumeProfile, Volumes};
use sealblock_units::{BlockSize, Extent, Lba};

use crate::{Pieces, forge_log_sector, forge_map_entry, forge_sector, forge_superblock};

const UUID: [u8; 16] = *b"fuzzed volume  1";
const SECTOR: usize = 512;
/// Few, because each input reads all of them four times.
const BLOCKS: u64 = 16;
const LIMITS: RunLimits = RunLimits { steps: 200_000, seconds: 3600 };

fn shape() -> VolumeProfile {
    let protection = Some(PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1));
    let (block_size, sector_bytes) = (BlockSize::B512, SECTOR as u32);
    VolumeProfile {
        block_size,
        sector_bytes,
        capacity_blocks: BLOCKS,
        protection,
        cache_bytes: 1 << 20,
        uuid: UUID,
        idle_us: 100_000,
        seal_in_flight_bytes: 64 << 10,
        notes_half_bytes: 1 << 20,
    }
}

/// Runs `work` on a disk with this image; returns its result and the image.
fn on<T: 'static, F: Future<Output = T> + 'static>(
    image: Image,
    forbid_writes: bool,
    work: impl FnOnce(SimDisk, Executor) -> F,
) -> (T, Image) {
    let executor = Executor::new(Random::new(1), Trace::default());
    let behaviour = Behaviour { forbid_writes, ..Behaviour::default() };
    let disk = SimDisk::new(image, behaviour, &executor, Random::new(2), Trace::default());
    let result = match executor.run(LIMITS, work(disk.clone(), executor.clone())) {
        RunEnd::Finished(result) => result,
        RunEnd::Halted => unreachable!("nothing halts the machine"),
        RunEnd::Stuck(stuck) => panic!("{stuck}"),
    };
    assert_eq!(disk.finding(), None);
    (result, disk.power_off(Survival::Everything, &Random::new(3)))
}

/// A volume to corrupt.
struct Template {
    layout: Layout,
    sectors: Vec<(u64, Vec<u8>)>,
}

/// A volume that was created, written to, and left with a log.
fn plain() -> &'static Template {
    static TEMPLATE: OnceLock<Template> = OnceLock::new();
    TEMPLATE.get_or_init(|| template(&[BLOCKS]))
}

/// The same in three segments, the last of which has shrunk.
fn grown() -> &'static Template {
    static TEMPLATE: OnceLock<Template> = OnceLock::new();
    TEMPLATE.get_or_init(|| template(&[5, 11, BLOCKS + 3, BLOCKS]))
}

/// A volume that was created with the first of these numbers of blocks, resized to the others, and used.
fn template(sizes: &[u64]) -> Template {
    let shape = VolumeProfile { capacity_blocks: sizes[0], ..shape() };
    let mut layout = Layout::new(shape.block_size, shape.sector_bytes, shape.capacity_blocks).expect("a small volume");
    let blank = Image::blank(SECTOR as u32, layout.medium_bytes());
    let (_, mut image) = on(blank, false, |disk, _| async move {
        Volumes::default().create(disk, shape).await.expect("a blank disk takes a volume");
    });
    for &size in &sizes[1..] {
        let (resized, after) = on(image, false, |disk, executor| Volumes::default().resize(disk, executor, size));
        assert_eq!(resized, Ok(Resizing::Done));
        layout = layout.with_capacity(size).expect("a small volume");
        image = after;
    }
    let ((), image) = on(image, false, use_twice);
    Template { layout, sectors: image.visible().map(|(sector, bytes)| (sector, bytes.to_vec())).collect() }
}

/// Writes to a volume in two sessions; only the first one closes it.
async fn use_twice(disk: SimDisk, executor: Executor) {
    for close in [true, false] {
        let opening = Volumes::default().open(disk.clone(), executor.clone(), shape(), false);
        let session = opening.await.expect("a new volume opens");
        for lba in 0..BLOCKS / 2 {
            let lba = Lba::new(lba + if close { 0 } else { BLOCKS / 4 });
            write(&session.stack, lba).await.expect("there is room");
        }
        session.stack.execute(Request::flush()).await.expect("the disk works");
        if close {
            session.close.await.expect("the disk works");
        }
    }
}

fn patterns() -> Patterns {
    Patterns::new(7, shape().block_size, shape().protection)
}

async fn write(stack: &DynDevice, lba: Lba) -> Result<(), Error> {
    let extent = Extent::one(lba);
    let data = patterns().sealed(extent, 1);
    let durability = Durability::Volatile;
    stack.execute(Request::write(extent, data, durability)).await.map(|_| ())
}

/// The image with the changes from the input: each has a kind, a place, and bytes. Only one copy of the block group map
/// gets a valid checksum. Blocks that both copies mark as unwritten read as zeroes, whatever the medium has, until the
/// block group gets its map pages.
fn forged(template: &Template, input: &[u8]) -> Image {
    let (layout, mut pieces) = (&template.layout, Pieces::new(input));
    let mut forged_map = None;
    let mut image = Image::blank(SECTOR as u32, layout.medium_bytes());
    template.sectors.iter().for_each(|(sector, bytes)| image.damage_sector(*sector, bytes));
    while !pieces.is_empty() {
        let (kind, place, at) = (pieces.byte(), u64::from(pieces.byte()), usize::from(pieces.short()) % SECTOR);
        let length = usize::from(pieces.byte()).min(SECTOR - at);
        let group = layout.block_group(place / 32 % layout.block_groups()).expect("a block group of the volume");
        let sector = match kind % 6 {
            0 => place % 2 * 64,
            1 => layout.log_sector_offset(place / 2, place) / SECTOR as u64,
            2 => group.pages_offset / SECTOR as u64 + 1 + place % 15,
            3 => layout.group_map_offset(place % 2) / SECTOR as u64,
            4 => [group.pages_offset, group.second_offset][place as usize % 2] / SECTOR as u64,
            _ => place * layout.medium_bytes() / SECTOR as u64 / 256,
        };
        let mut bytes = vec![0; SECTOR];
        image.read_sector(sector, &mut bytes);
        let new = pieces.bytes(length);
        bytes[at..at + new.len()].copy_from_slice(new);
        match kind % 6 {
            0 if kind & 64 != 0 => forge_superblock(&mut bytes),
            1 if kind & 64 != 0 => forge_log_sector(&mut bytes, &UUID),
            3 if kind & 64 != 0 && *forged_map.get_or_insert(place % 2) == place % 2 => forge_sector(&mut bytes, &UUID),
            4 if kind & 64 != 0 => forge_sector(&mut bytes, &UUID),
            // Empty map entries stay empty.
            2 => bytes
                .chunks_exact_mut(MAP_ENTRY_BYTES)
                .filter(|entry| entry.iter().any(|byte| *byte != 0))
                .for_each(|entry| forge_map_entry(entry, &UUID)),
            _ => {}
        }
        image.damage_sector(sector, &bytes);
    }
    image
}

/// The content of each block of an open volume; `None` for a failed read.
type Seen = Vec<Option<Vec<u8>>>;

async fn see(stack: &DynDevice) -> Seen {
    let mut seen = Vec::new();
    for lba in 0..stack.geometry().capacity_blocks.min(BLOCKS) {
        let extent = Extent::one(Lba::new(lba));
        let read = stack.execute(Request::read(extent, Expectations::NONE)).await;
        let verify = stack.execute(Request::verify(extent, Expectations::NONE)).await;
        assert_eq!(read.is_ok(), verify.is_ok(), "Read and Verify of block {lba} disagree");
        seen.push(match read {
            Ok(Response::Data(data)) => Some(data.joined_data().to_vec()),
            Ok(other) => panic!("a read returned {other:?}"),
            Err(_) => None,
        });
    }
    seen
}

/// Checks that writes to a volume that could be opened can be read back.
async fn use_it(stack: &DynDevice, round: u64) {
    for step in 0..6 {
        let lba = Lba::new((round + step * 7) % stack.geometry().capacity_blocks.min(BLOCKS));
        if stack.geometry().protection != shape().protection || stack.geometry().block_size != shape().block_size {
            return;
        }
        write(stack, lba).await.expect("the disk works and has room");
        let extent = Extent::one(lba);
        match stack.execute(Request::read(extent, Expectations::NONE)).await.expect("what was written can be read") {
            Response::Data(data) => {
                assert_eq!(patterns().recognise(lba, &data.joined_data()), Some(Content::Version(1)))
            }
            other => panic!("a read returned {other:?}"),
        }
    }
    stack.execute(Request::flush()).await.expect("the disk works");
}

/// Removes the superblocks of an image made from `input`, and opens what is left. There must be no panic, no hang and
/// no write, and Read and Verify must agree on every block.
pub fn try_remains(input: &[u8]) {
    let mut image = forged(plain(), input);
    let sectors = [0, SUPERBLOCK_OFFSETS[1], plain().layout.third_offset()].map(|offset| offset / SECTOR as u64);
    sectors.into_iter().for_each(|sector| image.damage_sector(sector, &[0; SECTOR]));
    on(image, true, |disk, executor| async move {
        let (hints, options) = (Hints::default(), OpenOptions::default());
        if let Ok((opened, _)) = open_remains(disk, executor, &hints, &options).await {
            see(&DynDevice::new("remains", opened.volume)).await;
        }
    });
}

/// Opens an image made from `input` read-only and writable. There must be no panic, no hang and no write by the reader;
/// if both opens succeed, they must read the same.
pub fn try_image(input: &[u8]) {
    try_forged(plain(), input);
}

/// The same for a volume that was resized.
pub fn try_resized(input: &[u8]) {
    try_forged(grown(), input);
}

fn try_forged(template: &Template, input: &[u8]) {
    let open = |image: Image, read_only: bool| {
        let seen = Rc::new(RefCell::new(None));
        let out = Rc::clone(&seen);
        let (_, image) = on(image, read_only, move |disk, executor| async move {
            if let Ok(session) = Volumes::default().open(disk, executor, shape(), read_only).await {
                *out.borrow_mut() = Some(see(&session.stack).await);
                if !read_only {
                    use_it(&session.stack, 3).await;
                    session.close.await.expect("the disk works");
                }
            }
        });
        (seen.take(), image)
    };
    let (reader, image) = open(forged(template, input), true);
    let (writer, _) = open(image, false);
    if let (Some(reader), Some(writer)) = (reader, writer) {
        assert_eq!(reader, writer, "a reader and a writer see different blocks");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(template: &Template, input: &[u8]) -> Seen {
        let (seen, _) = on(forged(template, input), true, |disk, executor| async move {
            let session = Volumes::default().open(disk, executor, shape(), true).await.expect("enough is whole");
            see(&session.stack).await
        });
        seen
    }

    #[test]
    fn the_templates_open_and_hold_what_was_written() {
        assert!(grown().layout.segments().len() > 1 && !plain().layout.is_resized());
        for template in [plain(), grown()] {
            let seen = seen(template, &[]);
            assert_eq!(seen.iter().filter(|block| block.is_some()).count() as u64, BLOCKS);
            assert!(seen[11].as_ref().is_some_and(|bytes| bytes.iter().any(|byte| *byte != 0)));
            assert!(seen[12].as_ref().is_some_and(|bytes| bytes.iter().all(|byte| *byte == 0)));
        }
    }

    #[test]
    fn changed_entries_get_past_their_checksums() {
        // Changes the guard of the first entry, in the log and in the block map: exactly this block must fail.
        let entry = [2, 0, 0, 0, 2, 0xaa, 0xbb];
        for template in [plain(), grown()] {
            let seen = seen(template, &entry);
            assert_eq!(seen.iter().position(Option::is_none), Some(0));
            assert_eq!(seen.iter().filter(|block| block.is_none()).count(), 1);
        }
        try_image(&entry);
        try_resized(&entry);
        try_remains(&entry);
        try_remains(&[]);
    }
}
