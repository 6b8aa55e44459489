//! Tests of a store with several channels: on one core against a model, and on several cores at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use sealblock_block::{BadBlockCause, BlockState, Device, Durability, Expectations, Outcome, Request, Response};
use sealblock_integrity::{Checks, ChecksumKind, GuardKind, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent, Lba};

use super::{CHUNK_BYTES, MemoryStore};
use crate::{Corruption, MemoryDevice};

const SIZE: BlockSize = BlockSize::B4096;
const FORMAT: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type1);
/// Blocks of a chunk.
const CHUNK: u64 = (CHUNK_BYTES / 4096) as u64;

fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

fn run(device: &MemoryDevice, request: Request) -> Outcome {
    device.execute(request).now_or_never().expect("memory never waits")
}

/// Blocks whose data begin with the application tag of their tags.
fn stamped(at: Extent, stamp: u16, format: Option<PiFormat>) -> Sealed {
    let mut bytes = vec![stamp as u8; at.bytes(SIZE) as usize];
    bytes.chunks_exact_mut(4096).for_each(|block| block[..2].copy_from_slice(&stamp.to_le_bytes()));
    let tags = Tags { app_tag: stamp, storage_tag: 0, initial_ref_tag: at.start().get() };
    Sealed::seal(Slice::copy_from(&bytes), SIZE, format, &tags)
}

fn write(device: &MemoryDevice, at: Extent, stamp: u16) {
    let request = Request::write(at, stamped(at, stamp, device.geometry().protection), Durability::Volatile);
    assert!(matches!(run(device, request), Ok(Response::Done)));
}

/// The stamp of each block, as the data have it; 0 for a block that was not written. `None` if data and tags of any do
/// not belong together.
fn stamps(device: &MemoryDevice, at: Extent) -> Option<Vec<u16>> {
    // The device compares guards and reference tags.
    let Ok(Response::Data(read)) = run(device, Request::read(at, Expectations::NONE)) else { return None };
    let stamp = |block: &[u8]| u16::from_le_bytes([block[0], block[1]]);
    let stamps: Vec<u16> = read.iter().map(|(block, _)| stamp(block)).collect();
    let belong = |(stamp, tuple): (&u16, sealblock_integrity::Tuple)| match tuple.app_tag {
        0xFFFF => *stamp == 0,
        tag => *stamp == tag,
    };
    stamps.iter().zip(read.tuples()).all(belong).then_some(stamps)
}

/// What a block should be.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Block {
    Stamped(u16),
    /// Zeroes with tags that are checked.
    Zeroed,
    Unmapped,
    Unreadable,
}

/// A simple model, two channels, and responses that are still held.
struct Trial {
    model: Vec<Block>,
    channels: [MemoryDevice; 2],
    held: Vec<(Sealed, Vec<u8>)>,
    rng: fastrand::Rng,
}

impl Trial {
    fn new(store: MemoryStore, seed: u64) -> Trial {
        let (blocks, store) = (store.geometry().capacity_blocks as usize, Arc::new(store));
        let channels = [MemoryDevice::on(Arc::clone(&store)), MemoryDevice::on(store)];
        Trial { model: vec![Block::Unmapped; blocks], channels, held: Vec::new(), rng: fastrand::Rng::with_seed(seed) }
    }

    fn extent(&mut self) -> Extent {
        let start = self.rng.u64(..self.model.len() as u64);
        // Often a whole chunk, or two.
        let (start, length) = match self.rng.u8(..4) {
            0 => (start - start % CHUNK, CHUNK * self.rng.u64(1..3)),
            _ => {
                let power = self.rng.u32(..7);
                (start, 1 + self.rng.u64(..1 << power))
            }
        };
        extent(start, length.min(self.model.len() as u64 - start))
    }

    fn step(&mut self) {
        let (at, which) = (self.extent(), self.rng.usize(..2));
        let (range, format) = (at.start().get() as usize..(at.last().get() + 1) as usize, self.protection());
        let durability = Durability::Volatile;
        let (request, becomes) = match self.rng.u8(..12) {
            0..4 => {
                let stamp = self.rng.u16(1..0xFFFF);
                let whole = stamped(at, stamp, format);
                let cut = self.rng.usize(..whole.blocks());
                let parts = [whole.slice(0, cut), whole.slice(cut, whole.blocks() - cut)];
                let data = if cut == 0 { whole } else { Sealed::join(parts) };
                (Request::write(at, data, durability), Block::Stamped(stamp))
            }
            4 => (Request::write_zeroes(at, true, durability), Block::Unmapped),
            5 => (Request::write_zeroes(at, false, durability), format.map_or(Block::Unmapped, |_| Block::Zeroed)),
            6 => (Request::discard([at]), Block::Unmapped),
            7 if self.rng.u8(..4) == 0 => (Request::write_uncorrectable(at, durability), Block::Unreadable),
            _ => return self.look(at, which),
        };
        assert!(matches!(run(&self.channels[which], request), Ok(Response::Done)));
        self.model[range].fill(becomes);
    }

    fn protection(&self) -> Option<PiFormat> {
        self.channels[0].geometry().protection
    }

    /// Reads, verifies and compares.
    fn look(&mut self, at: Extent, which: usize) {
        let device = &self.channels[which];
        let wanted = &self.model[at.start().get() as usize..][..at.len() as usize];
        let bad: Vec<Lba> =
            at.iter().zip(wanted).filter(|(_, block)| **block == Block::Unreadable).map(|(lba, _)| lba).collect();
        let kind = ChecksumKind::Crc32c;
        let outcomes = [
            run(device, Request::read(at, Expectations::NONE)),
            run(device, Request::verify(at, Expectations::NONE)),
            run(device, Request::checksum(at, kind, Expectations::NONE)),
        ];
        if !bad.is_empty() {
            for outcome in outcomes {
                let error = outcome.expect_err("unreadable blocks");
                let found = error.bad_blocks().expect("they are named").as_slice();
                assert!(found.iter().all(|block| block.cause == BadBlockCause::Media));
                assert_eq!(found.iter().map(|block| block.lba).collect::<Vec<_>>(), bad);
            }
            return;
        }
        let [Ok(Response::Data(read)), Ok(Response::Verified(_)), Ok(Response::Checksum(sum))] = outcomes else {
            panic!("{at} is good")
        };
        for (block, (data, _)) in wanted.iter().zip(read.iter()) {
            let stamp = if let Block::Stamped(stamp) = block { *stamp } else { 0 };
            assert_eq!(u16::from_le_bytes([data[0], data[1]]), stamp, "{at}");
            assert!(data[2..].iter().all(|byte| *byte == stamp as u8));
        }
        if device.geometry().protection.is_some() {
            for (block, tuple) in wanted.iter().zip(read.tuples()) {
                let tag = match block {
                    Block::Stamped(stamp) => *stamp,
                    Block::Zeroed | Block::Unreadable => 0,
                    Block::Unmapped => 0xFFFF,
                };
                assert_eq!(tuple.app_tag, tag, "{at}");
            }
        }
        assert_eq!(sum.value, kind.compute(&read.joined_data()));
        assert!(run(device, Request::compare(at, read.clone())).is_ok());
        let copy = [&read.joined_data()[..], &read.joined_tags()[..]].concat();
        self.held.push((read, copy));
        if self.held.len() > 20 {
            self.held.swap_remove(self.rng.usize(..20));
        }
    }

    /// Checks what does not change, and what is a hole.
    fn check(&self) {
        for (held, copy) in &self.held {
            assert_eq!([&held.joined_data()[..], &held.joined_tags()[..]].concat(), *copy, "a response changed");
        }
        let whole = extent(0, self.model.len() as u64);
        let Ok(Response::BlockStatus(runs)) = run(&self.channels[1], Request::block_status(whole)) else { panic!() };
        let states = runs.iter().flat_map(|run| std::iter::repeat_n(run.state, run.blocks.get() as usize));
        for (block, state) in self.model.iter().zip(states) {
            assert!(*block == Block::Unmapped || state == BlockState::Allocated);
        }
    }
}

#[test]
fn two_channels_of_a_store_behave_as_a_simple_list_of_blocks() {
    for seed in 0..12 {
        let format = (seed % 3 != 0).then_some(FORMAT);
        // Some with slabs, and some filled ahead.
        let blocks = if seed % 2 == 0 { 300 } else { 1000 };
        let mut store = MemoryStore::new(SIZE, blocks, format);
        let is_preallocated = seed % 4 == 3;
        if is_preallocated {
            store = store.preallocate().expect("a few MiB");
        }
        let mut trial = Trial::new(store, seed);
        for step in 0..1500 {
            trial.step();
            if step % 100 == 0 {
                trial.check();
            }
        }
        trial.check();
        trial.held.clear();
        assert!(run(&trial.channels[0], Request::discard([extent(0, blocks)])).is_ok());
        for _ in 0..200 {
            trial.channels.iter().for_each(|device| drop(run(device, Request::read(extent(0, 1), Expectations::NONE))));
        }
        let left = if is_preallocated { blocks.div_ceil(CHUNK) * CHUNK_BYTES as u64 } else { 0 };
        let found = [&trial.channels[0], &trial.channels[1]].map(MemoryDevice::allocated_bytes);
        assert_eq!(found, [left; 2], "memory comes back, seed {seed}");
    }
}

#[test]
fn what_one_channel_does_others_see() {
    let one = MemoryDevice::new(SIZE, 64, Some(FORMAT));
    let other = MemoryDevice::on(Arc::clone(one.store()));
    write(&one, extent(3, 2), 7);
    assert_eq!(stamps(&other, extent(2, 4)), Some(vec![0, 7, 7, 0]));
    assert!(other.damage(Lba::new(3), Corruption::Data { at: 0, mask: 1 }));
    assert!(run(&one, Request::read(extent(3, 1), Expectations::NONE)).is_err());
    let area = sealblock_block::ReservedArea::GroupLabel;
    assert!(run(&one, Request::write_reserved(area, Slice::copy_from(b"label"))).is_ok());
    let Ok(Response::Reserved(read)) = run(&other, Request::read_reserved(area)) else { panic!("an area") };
    assert_eq!(&read[..], b"label");
}

/// Writers of these blocks, each with its own stamps, and readers of them, for at least so many reads. `write` gets
/// the device, the extent and the stamp. Returns whether a reader saw data with the tags of another write.
fn race(write: impl Fn(&MemoryDevice, Extent, u16) + Sync, whole_chunks: bool, min_reads: u64) -> bool {
    let store = Arc::new(MemoryStore::new(SIZE, 1024, Some(FORMAT)));
    let (is_over, is_torn, reads) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
    let deadline = Instant::now() + Duration::from_secs(60);
    let place = move |rng: &mut fastrand::Rng| match whole_chunks {
        true => extent(CHUNK * rng.u64(..2), CHUNK),
        false => extent(rng.u64(..2 * CHUNK), rng.u64(1..CHUNK + 8)),
    };
    thread::scope(|scope| {
        for writer in 1..=2_u16 {
            let (store, write, is_over) = (&store, &write, &is_over);
            scope.spawn(move || {
                let device = MemoryDevice::on(Arc::clone(store));
                let mut rng = fastrand::Rng::with_seed(u64::from(writer));
                while !is_over.load(Ordering::Relaxed) {
                    let (at, stamp) = (place(&mut rng), writer * 20_000 + rng.u16(..20_000));
                    match rng.u8(..16) {
                        0 => drop(run(&device, Request::discard([at]))),
                        _ => write(&device, at, stamp),
                    }
                }
            });
        }
        for reader in 0..2 {
            let (store, is_over, is_torn, reads) = (&store, &is_over, &is_torn, &reads);
            scope.spawn(move || {
                let (device, mut rng) = (MemoryDevice::on(Arc::clone(store)), fastrand::Rng::with_seed(reader + 10));
                while !is_over.load(Ordering::Relaxed) {
                    let at = place(&mut rng);
                    let found = stamps(&device, at);
                    let is_whole = found.is_some_and(|found| !whole_chunks || found.iter().all(|s| *s == found[0]));
                    let is_good = is_whole && run(&device, Request::verify(at, Expectations::NONE)).is_ok();
                    is_torn.fetch_or(!is_good, Ordering::Relaxed);
                    let read = reads.fetch_add(1, Ordering::Relaxed);
                    if !is_good || read >= min_reads || Instant::now() > deadline {
                        is_over.store(true, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    is_torn.into_inner()
}

#[test]
fn no_reader_sees_data_with_the_tags_of_another_write() {
    assert!(!race(write, false, 20_000));
}

#[test]
fn a_write_of_a_chunk_is_seen_whole_or_not_at_all() {
    assert!(!race(write, true, 10_000));
}

/// As a device would write that has data and tags behind two locks.
fn write_under_two_locks(device: &MemoryDevice, at: Extent, stamp: u16) {
    let (chunks, sealed) = (&device.store().chunks, stamped(at, stamp, Some(FORMAT)));
    let (shape, data, tags) = (chunks.shape, sealed.joined_data(), sealed.joined_tags());
    let mut spares = chunks.spares();
    for part in chunks.shape.parts(at.start().get(), at.len()) {
        // Only a part, so that the other bytes stay as they are.
        for half in [0..part.within.len() / 2, part.within.len() / 2..part.within.len()] {
            let mut half_part = part.clone();
            half_part.within = part.within.start + half.start..part.within.start + half.end;
            half_part.of_whole = part.of_whole.start + half.start..part.of_whole.start + half.end;
            let (within, of_whole) = (half_part.within.clone(), half_part.of_whole.clone());
            chunks.change(&half_part, &mut spares, |bytes, _| {
                bytes.data[shape.data_of(&within)].copy_from_slice(&data[shape.data_of(&of_whole)]);
            });
            chunks.change(&half_part, &mut spares, |bytes, _| {
                bytes.tags[shape.tags_of(&within)].copy_from_slice(&tags[shape.tags_of(&of_whole)]);
            });
        }
    }
}

#[test]
fn the_race_finds_data_and_tags_that_are_not_under_one_lock() {
    assert!(race(write_under_two_locks, false, u64::MAX));
}

#[test]
fn unproven_guards_are_noted_under_the_lock_of_their_write() {
    let device = MemoryDevice::new(SIZE, 64, Some(FORMAT));
    let at = extent(30, 4);
    // Guards that prove nothing, over two chunks.
    let good = stamped(at, 7, Some(FORMAT));
    let damaged: Vec<u8> = good.joined_data().iter().map(|byte| byte ^ 1).collect();
    let unchecked =
        sealblock_integrity::Unverified::new(Slice::copy_from(&damaged), good.joined_tags(), SIZE, Some(FORMAT));
    let written = unchecked.unwrap().verify(&Checks::NONE).unwrap();
    assert!(run(&device, Request::write(at, written, Durability::Volatile)).is_ok());
    let Ok(Response::Data(read)) = run(&device, Request::read(at, Expectations::NONE)) else { panic!("not damaged") };
    assert_eq!(read.joined_data()[..], damaged[..]);
    // A write with good guards ends that.
    write(&device, extent(31, 1), 8);
    assert!(device.damage(Lba::new(31), Corruption::Data { at: 9, mask: 1 }));
    let error = run(&device, Request::read(at, Expectations::NONE)).expect_err("damage");
    assert_eq!(error.bad_blocks().unwrap().as_slice().len(), 1);
}
