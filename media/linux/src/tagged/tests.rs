//! A simulated block device: it accepts reads and writes with metadata as the kernel does, keeps both in memory, and
//! misbehaves as configured.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;

use proptest::prelude::*;
use sealblock_block::{
    Abilities, Ability, BadBlockCause, Coverage, Device, Durability, ErrorKind, Expectations, Gate, Geometry, Limits,
    Operation, Outcome, Request, RequestKind, Response,
};
use sealblock_integrity::{Field, GuardKind, PiFormat, ProtectionType, Sealed, Tags, guard};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::{Config, DeviceChecks, Reactor};
use sealblock_units::{BlockSize, Extent};

use super::device::{TaggedDevice, TaggedIo};
use super::profile::{TagProfile, WhyNoTags};
use crate::node::KernelLimits;

const BLOCKS: u64 = 3000;
const SIZE: BlockSize = BlockSize::B512;

/// How a kernel or a device misbehaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Habit {
    /// The kernel does not support tags, and reads and writes as if there were none.
    IgnoresTags,
    /// It accepts them and fills in none, always or after the device was opened.
    FillsNothing,
    StopsFilling,
    /// There is no io_uring.
    NoUring,
    /// The first read after the opening fails.
    FailsOnce,
    /// A discard zeroes blocks and leaves their tags.
    DiscardLeavesTags,
    /// Transfers end early.
    MovesHalf,
    /// Writes fail with this error.
    FailsWrites(i32),
}

struct Disk {
    habits: Vec<Habit>,
    stride: usize,
    data: RefCell<Vec<u8>>,
    metadata: RefCell<Vec<u8>>,
    /// Blocks that cannot be read, and the error.
    bad: RefCell<BTreeMap<u64, i32>>,
    reads: Cell<u32>,
    checks: Cell<DeviceChecks>,
    flushes: Cell<u32>,
}

#[derive(Clone)]
struct Shared(Rc<Disk>);

impl Disk {
    fn has(&self, habit: Habit) -> bool {
        self.habits.contains(&habit)
    }

    /// The blocks of a transfer, and where they and their metadata are.
    fn places(&self, offset_bytes: u64, bytes: usize) -> (std::ops::Range<u64>, usize, usize) {
        assert!(offset_bytes.is_multiple_of(512) && bytes.is_multiple_of(512), "direct I/O of whole blocks");
        let first = offset_bytes / 512;
        (first..first + bytes as u64 / 512, offset_bytes as usize, first as usize * self.stride)
    }

    fn moved(&self, bytes: usize) -> usize {
        if self.has(Habit::MovesHalf) { bytes / 2 } else { bytes }
    }
}

impl TaggedIo for Shared {
    async fn read(
        &self,
        mut data: Buffer,
        mut metadata: Buffer,
        offset_bytes: u64,
        seed: u64,
    ) -> (io::Result<usize>, Buffer, Buffer) {
        let disk = &self.0;
        let (blocks, at, tags_at) = disk.places(offset_bytes, data.len());
        assert_eq!((seed, metadata.len()), (blocks.start, data.len() / 512 * disk.stride), "room for its tags");
        disk.reads.set(disk.reads.get() + 1);
        if disk.has(Habit::FailsOnce) && disk.reads.get() == 3 {
            return (Err(io::Error::from_raw_os_error(libc::EIO)), data, metadata);
        }
        if let Some((_, errno)) = disk.bad.borrow().range(blocks).next() {
            return (Err(io::Error::from_raw_os_error(*errno)), data, metadata);
        }
        let len = data.len();
        data.copy_from_slice(&disk.data.borrow()[at..at + len]);
        let has_stopped = disk.has(Habit::StopsFilling) && disk.reads.get() > 2;
        let is_silent = disk.has(Habit::IgnoresTags) || disk.has(Habit::FillsNothing) || has_stopped;
        if !is_silent {
            let len = metadata.len();
            metadata.copy_from_slice(&disk.metadata.borrow()[tags_at..tags_at + len]);
        }
        (Ok(disk.moved(len)), data, metadata)
    }

    async fn write(
        &self,
        data: Slice,
        mut metadata: Buffer,
        offset_bytes: u64,
        seed: u64,
        checks: DeviceChecks,
    ) -> io::Result<usize> {
        let disk = &self.0;
        let (blocks, at, tags_at) = disk.places(offset_bytes, data.len());
        assert_eq!((seed, metadata.len()), (blocks.start, data.len() / 512 * disk.stride));
        if let Some(Habit::FailsWrites(errno)) = disk.habits.first() {
            return Err(io::Error::from_raw_os_error(*errno));
        }
        assert!(data.as_ptr().addr().is_multiple_of(512), "direct I/O from an aligned address");
        disk.data.borrow_mut()[at..at + data.len()].copy_from_slice(&data);
        disk.metadata.borrow_mut()[tags_at..tags_at + metadata.len()].copy_from_slice(&metadata);
        disk.bad.borrow_mut().retain(|lba, _| !blocks.contains(lba));
        disk.checks.set(checks);
        // Like a kernel that converts reference tags.
        metadata.fill(0xEE);
        Ok(disk.moved(data.len()))
    }

    async fn knows_tags(&self, _: Buffer, _: Buffer) -> io::Result<bool> {
        match self.0.has(Habit::NoUring) {
            true => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
            false => Ok(!self.0.has(Habit::IgnoresTags)),
        }
    }
}

/// The kernel's block I/O to the same blocks without tags.
struct Ordinary(Rc<Disk>, Geometry);

impl Device for Ordinary {
    fn geometry(&self) -> &Geometry {
        &self.1
    }

    fn abilities(&self) -> Abilities {
        Abilities { unmap_zeroes: true, ..Abilities::BASIC }
            .with([RequestKind::Discard, RequestKind::WriteZeroes], Ability::Native)
    }

    async fn execute(&self, request: Request) -> Outcome {
        let disk = &self.0;
        match request.operation {
            Operation::Flush => disk.flushes.set(disk.flushes.get() + 1),
            Operation::Discard => {
                for lba in request.extents.iter().flat_map(|extent| extent.iter()) {
                    let (at, tags_at) = (lba.get() as usize * 512, lba.get() as usize * disk.stride);
                    disk.data.borrow_mut()[at..at + 512].fill(0);
                    if !disk.has(Habit::DiscardLeavesTags) {
                        disk.metadata.borrow_mut()[tags_at..tags_at + disk.stride].fill(0xFF);
                    }
                }
            }
            other => panic!("no other request goes without tags: {other:?}"),
        }
        Ok(Response::Done)
    }
}

fn profile(guard: GuardKind, protection: ProtectionType, before: usize, behind: usize) -> TagProfile {
    let format = PiFormat::with_default_storage_tag(guard, protection);
    let metadata_bytes = before + format.tuple_bytes() + behind;
    TagProfile { name: "a profile".to_owned(), format, metadata_bytes, tuple_at: before, keeps_app_tags: true }
}

fn plain() -> TagProfile {
    profile(GuardKind::Crc16, ProtectionType::Type1, 0, 0)
}

/// A disk whose blocks all have good tags.
fn disk(profile: &TagProfile, habits: &[Habit]) -> Rc<Disk> {
    let data: Vec<u8> = (0..BLOCKS as usize * 512).map(|at| (at / 512 * 7 + at + 1) as u8).collect();
    let mut metadata = vec![0; BLOCKS as usize * profile.metadata_bytes];
    for (lba, (block, to)) in data.chunks(512).zip(metadata.chunks_mut(profile.metadata_bytes)).enumerate() {
        let tags = Tags { initial_ref_tag: lba as u64, ..Tags::default() };
        let sealed = Sealed::seal(Slice::copy_from(block), SIZE, Some(profile.format), &tags);
        to[profile.tuple_at..][..profile.format.tuple_bytes()].copy_from_slice(&sealed.joined_tags());
        if profile.tuple_at > 0 {
            let kind = profile.format.guard();
            let whole = guard::append(kind, guard::compute(kind, block), &vec![0; profile.tuple_at]);
            let bytes = kind.bits() as usize / 8;
            to[profile.tuple_at..][..bytes].copy_from_slice(&whole.to_be_bytes()[8 - bytes..]);
        }
    }
    Rc::new(Disk {
        habits: habits.to_vec(),
        stride: profile.metadata_bytes,
        data: RefCell::new(data),
        metadata: RefCell::new(metadata),
        bad: RefCell::default(),
        reads: Cell::new(0),
        checks: Cell::default(),
        flushes: Cell::new(0),
    })
}

type Opened = Result<TaggedDevice<Ordinary, Shared>, WhyNoTags>;

async fn opened(profile: TagProfile, disk: &Rc<Disk>) -> Opened {
    let limits = Limits::new(SIZE, 1 << 20, 1 << 20);
    let geometry = Geometry { block_size: SIZE, capacity_blocks: BLOCKS, protection: None, limits };
    let kernel = KernelLimits { transfer_bytes: Some(256 << 10), ..KernelLimits::default() };
    let ordinary = Ordinary(Rc::clone(disk), geometry);
    TaggedDevice::with(Shared(Rc::clone(disk)), profile, &kernel, ordinary).await.map_err(|(why, _)| why)
}

fn run<T>(test: impl AsyncFnOnce() -> T) -> T {
    Reactor::new(Config::default()).expect("a reactor starts").block_on(test())
}

fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

/// The bad blocks that a read or verify reports.
fn bad_of(outcome: Outcome) -> Vec<(u64, BadBlockCause)> {
    match outcome {
        Ok(_) => Vec::new(),
        Err(error) => {
            let bad_blocks = error.bad_blocks().unwrap_or_else(|| panic!("{error}"));
            bad_blocks.as_slice().iter().map(|bad| (bad.lba.get(), bad.cause)).collect()
        }
    }
}

#[test]
fn blocks_go_down_with_their_tags_and_come_back_checked() {
    run(async || {
        let disk = disk(&plain(), &[]);
        let device = opened(plain(), &disk).await.unwrap();
        assert_eq!(device.geometry().protection, Some(plain().format));
        assert!(device.abilities().seals && !device.abilities().offloads);
        let Ok(Response::Data(read)) = device.execute(Request::read(extent(5, 400), Expectations::NONE)).await else {
            panic!("good blocks are read");
        };
        assert_eq!(read.joined_data()[..], disk.data.borrow()[5 * 512..405 * 512]);
        let tags = Tags { app_tag: 0x1234, initial_ref_tag: 100, ..Tags::default() };
        let written = Sealed::seal(Slice::copy_from(&[9; 1024]), SIZE, Some(plain().format), &tags);
        let request = Request::write(extent(100, 2), written.clone(), Durability::ForceUnitAccess);
        device.execute(request).await.unwrap();
        assert_eq!(disk.metadata.borrow()[100 * 8..102 * 8], written.joined_tags()[..]);
        assert_eq!((disk.checks.get(), disk.flushes.get()), (DeviceChecks { guard: true, ref_tag: true }, 1));
        let Ok(Response::Data(back)) = device.execute(Request::read(extent(100, 2), Expectations::NONE)).await else {
            panic!("what was written is read");
        };
        assert_eq!(back.first_difference(&written, true), None, "with its application tag");
    });
}

#[test]
fn data_at_any_address_are_written_and_type_3_has_no_reference_tags_to_check() {
    run(async || {
        let profile = profile(GuardKind::Crc16, ProtectionType::Type3, 0, 0);
        let disk = disk(&profile, &[]);
        let device = opened(profile.clone(), &disk).await.unwrap();
        let data = Slice::copy_from(&[7; 2048]).slice(3..515);
        let sealed = Sealed::seal(data, SIZE, Some(profile.format), &Tags::default());
        device.execute(Request::write(extent(1, 1), sealed, Durability::Volatile)).await.unwrap();
        assert_eq!(disk.data.borrow()[512..1024], [7; 512]);
        assert_eq!((disk.checks.get(), disk.flushes.get()), (DeviceChecks { guard: true, ref_tag: false }, 0));
    });
}

#[test]
fn each_field_that_does_not_match_is_named_with_its_values() {
    run(async || {
        let disk = disk(&plain(), &[]);
        let device = Gate::new("a disk", opened(plain(), &disk).await.unwrap());
        let whole = Request::verify(extent(0, BLOCKS), Expectations::NONE);
        let Ok(Response::Verified(stats)) = device.execute(whole.clone()).await else { panic!("all blocks are good") };
        assert_eq!((stats.bytes_transferred, stats.coverage), (BLOCKS * 512, Coverage::of(true)));
        disk.data.borrow_mut()[7 * 512 + 100] ^= 1;
        disk.metadata.borrow_mut()[900 * 8] ^= 0x80;
        disk.metadata.borrow_mut()[2999 * 8 + 7] ^= 1;
        let error = device.execute(whole.clone()).await.unwrap_err();
        assert!(
            error.bad_blocks().unwrap().as_slice().iter().all(|bad| bad.expected.is_some() && bad.actual.is_some())
        );
        let guard = BadBlockCause::Tag(Field::Guard);
        let wanted = [(7, guard), (900, guard), (2999, BadBlockCause::Tag(Field::RefTag))];
        assert_eq!(bad_of(Err(error)), wanted);
        // Blocks that cannot be read, next to others that do not match.
        disk.bad.borrow_mut().extend([(8, libc::EIO), (1500, libc::EILSEQ), (1501, libc::ENODATA)]);
        let media = BadBlockCause::Media;
        let wanted = [(7, guard), (8, media), (900, guard), (1500, media), (1501, media), wanted[2]];
        assert_eq!(bad_of(device.execute(whole).await), wanted);
    });
}

#[test]
fn a_failure_that_passes_is_none_of_the_blocks() {
    run(async || {
        let disk = disk(&plain(), &[Habit::FailsOnce]);
        let device = opened(plain(), &disk).await.unwrap();
        assert_eq!(bad_of(device.execute(Request::read(extent(3, 100), Expectations::NONE)).await), []);
    });
    run(async || {
        let disk = disk(&plain(), &[]);
        let device = opened(plain(), &disk).await.unwrap();
        disk.bad.borrow_mut().insert(4, libc::ENODEV);
        let gone = device.execute(Request::read(extent(3, 100), Expectations::NONE)).await.unwrap_err();
        assert!(matches!(gone.kind(), ErrorKind::Unreachable { .. }), "{gone}");
    });
}

#[test]
fn a_write_that_fails_says_why_and_writes_nothing() {
    run(async || {
        let failed = async |errno| {
            let disk = disk(&plain(), &[Habit::FailsWrites(errno)]);
            let (device, before) = (opened(plain(), &disk).await.unwrap(), disk.data.borrow().clone());
            let tags = Tags { initial_ref_tag: 100, ..Tags::default() };
            let blocks = Sealed::seal(Slice::copy_from(&[9; 512]), SIZE, Some(plain().format), &tags);
            let error = device.execute(Request::write(extent(100, 1), blocks, Durability::Volatile)).await.unwrap_err();
            assert_eq!(*disk.data.borrow(), before);
            error
        };
        let torn = failed(libc::EILSEQ).await;
        assert!(matches!(torn.kind(), ErrorKind::Media { .. }) && torn.to_string().contains("its tags"), "{torn}");
        let full = failed(libc::ENOSPC).await;
        assert!(matches!(full.kind(), ErrorKind::NoSpace { .. }), "{full}");
        let broken = failed(libc::EIO).await;
        assert!(matches!(broken.kind(), ErrorKind::Media { .. }) && broken.to_string().contains("write with tags"));
    });
}

#[test]
fn a_kernel_that_carries_no_tags_is_found_out_at_the_opening() {
    run(async || {
        for (habit, why) in [
            (Habit::IgnoresTags, "ignores tags"),
            (Habit::FillsNothing, "does not fill in"),
            (Habit::NoUring, "only io_uring"),
            (Habit::MovesHalf, "cannot be read with tags"),
        ] {
            let said = opened(plain(), &disk(&plain(), &[habit])).await.err().expect("it is refused").to_string();
            assert!(said.contains(why), "{said}");
        }
        // A first block that cannot be read does not prevent opening.
        let disk = disk(&plain(), &[]);
        disk.bad.borrow_mut().insert(0, libc::EILSEQ);
        assert!(opened(plain(), &disk).await.is_ok());
        disk.bad.borrow_mut().insert(0, libc::EINVAL);
        assert!(matches!(opened(plain(), &disk).await, Err(WhyNoTags::Probe(_))));
    });
}

#[test]
fn tags_that_the_kernel_leaves_out_are_no_good_ones() {
    run(async || {
        let disk = disk(&plain(), &[Habit::StopsFilling]);
        let device = opened(plain(), &disk).await.unwrap();
        let found = bad_of(device.execute(Request::read(extent(0, 300), Expectations::NONE)).await);
        assert_eq!((found.len(), found[0]), (300, (0, BadBlockCause::Tag(Field::Guard))));
    });
}

#[test]
fn zeroes_have_tags_that_match_and_so_has_what_a_discard_leaves() {
    run(async || {
        for habits in [&[][..], &[Habit::DiscardLeavesTags]] {
            let disk = disk(&plain(), habits);
            let device = Gate::new("a disk", opened(plain(), &disk).await.unwrap());
            let zeroes = Request::write_zeroes(extent(10, 1000), true, Durability::Volatile);
            device.execute(zeroes).await.unwrap();
            assert!(disk.data.borrow()[10 * 512..1010 * 512].iter().all(|byte| *byte == 0));
            device.execute(Request::discard([extent(1500, 3), extent(2000, 900)])).await.unwrap();
            let whole = Request::verify(extent(0, BLOCKS), Expectations::NONE);
            assert_eq!(bad_of(device.execute(whole).await), [], "{habits:?}");
            assert_ne!(disk.data.borrow()[1499 * 512], 0, "no other block changes");
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// In every layout, blocks are read as they were written, bytes besides tuples are zeroes, and a flipped bit of
    /// block or tuple is found.
    #[test]
    fn layouts_keep_tags(
        guard in prop::sample::select(vec![GuardKind::Crc16, GuardKind::IpChecksum, GuardKind::Crc64]),
        type_1 in any::<bool>(),
        before in prop::sample::select(vec![0_usize, 0, 8, 48]),
        behind in prop::sample::select(vec![0_usize, 0, 8, 56]),
        start in 0..BLOCKS - 8,
        blocks in 1..8_u64,
        app_tag in 0..0xFFFF_u16,
        at in any::<prop::sample::Index>(),
    ) {
        // The kernel has no such profile: IP checksums do not cover metadata.
        prop_assume!(guard != GuardKind::IpChecksum || before == 0);
        let protection = if type_1 { ProtectionType::Type1 } else { ProtectionType::Type3 };
        let profile = profile(guard, protection, before, behind);
        run(async || {
            let disk = disk(&profile, &[]);
            let device = opened(profile.clone(), &disk).await.unwrap();
            let bytes: Vec<u8> = (0..blocks as usize * 512).map(|i| (i * 3 + i / 512) as u8).collect();
            let tags = Tags { app_tag, storage_tag: 0, initial_ref_tag: start };
            let sealed = Sealed::seal(Slice::copy_from(&bytes), SIZE, Some(profile.format), &tags);
            let request = Request::write(extent(start, blocks), sealed.clone(), Durability::Volatile);
            device.execute(request).await.unwrap();
            let (tuple, stride) = (profile.format.tuple_bytes(), profile.metadata_bytes);
            for metadata in disk.metadata.borrow().chunks(stride).skip(start as usize).take(blocks as usize) {
                assert!(metadata[..before].iter().chain(&metadata[before + tuple..]).all(|byte| *byte == 0));
            }
            let read = Request::read(extent(start, blocks), Expectations::NONE);
            let Ok(Response::Data(back)) = device.execute(read.clone()).await else { panic!("good blocks are good") };
            assert_eq!(back.first_difference(&sealed, true), None);
            let bit = at.index(blocks as usize * 512 * 8);
            disk.data.borrow_mut()[start as usize * 512 + bit / 8] ^= 1 << (bit % 8);
            let lba = start + (bit / 8 / 512) as u64;
            assert_eq!(bad_of(device.execute(read).await), [(lba, BadBlockCause::Tag(Field::Guard))]);
        });
    }
}
