//! A simulated drive: it reads commands as a device server does, keeps blocks in memory, and misbehaves as configured.

mod compare_and_write;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::rc::Rc;

use sealblock_block::{
    Abilities, Ability, BadBlock, BadBlockCause, BadBlocks, Device, ErrorKind, Expectations, Geometry, Limits,
    Operation, Outcome, Request, RequestKind, Response,
};
use sealblock_integrity::{Checks, Field, Masked, ProtectionType, Sealed, Tags};
use sealblock_protocols_scsi::{
    AdditionalSense, BlockCommand, BlockLimits, ByteCheck, CachingPage, Cdb, Command, ControlPage, Designator,
    ExtendedInquiry, Inquiry, ModeSense, Page, Provisioning, ReadCapacity16, Sense, SenseKey, Status,
};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{Config, Reactor, Transfer};
use sealblock_units::{BlockSize, Extent, Lba};

use super::device::ScsiDevice;
use super::open::{KernelView, TagMaker};
use super::transport::{Answer, OpenError, Transport};
use crate::node::KernelLimits;

const BLOCKS: u64 = 1000;
const SIZE: BlockSize = BlockSize::B512;

/// How a drive misbehaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Habit {
    /// Every VERIFY without data is GOOD, whatever the blocks contain.
    VerifyReadsNothing,
    /// BYTCHK is ignored.
    IgnoresData,
    /// BYTCHK 11b is refused.
    NoOneBlock,
    /// It does not support the VERIFY of 16 and 32 bytes.
    OnlyShort,
    /// It does not support VERIFY.
    NoVerify,
    /// It does not support VERIFY (32), or no process may send it.
    NoLong,
    LongNeedsPrivilege,
    /// Sense data name no block, or a wrong one.
    NamesNothing,
    NamesAnother,
    /// Every fourth command first gets a unit attention.
    Attentions,
    /// Half of the data of a VERIFY are not transferred.
    TakesHalf,
    /// Commands over more than one block fail if one is bad, and those over one succeed.
    OnlyRuns,
    /// DPICZ.
    NoCheckByItself,
    /// COMPARE AND WRITE is refused, needs a privilege, or succeeds for blocks that do not exist.
    NoSwap,
    SwapNeedsPrivilege,
    SwapsAnything,
    /// COMPARE AND WRITE is executed, and then reported as aborted, or gets no reply: because of the host adapter or of
    /// the kernel.
    AbortsSwap,
    LosesSwap,
    LosesCall,
    /// The first three times COMPARE AND WRITE is not executed, and the drive replies that it is busy.
    IsBusy,
}

struct Drive {
    habits: Vec<Habit>,
    protection: Option<ProtectionType>,
    vendor: &'static str,
    data: RefCell<Vec<u8>>,
    bad: RefCell<BTreeMap<u64, AdditionalSense>>,
    sent: RefCell<Vec<Command>>,
    count: Cell<u32>,
    reads: Cell<u32>,
    /// MAXIMUM COMPARE AND WRITE LENGTH.
    swap_blocks: u8,
    /// Start and end of the bytes that the kernel was told to drop from its cache.
    forgotten: RefCell<Vec<(u64, u64)>>,
}

#[derive(Clone)]
struct Shared(Rc<Drive>);

impl Drive {
    fn has(&self, habit: Habit) -> bool {
        self.habits.contains(&habit)
    }

    fn sense(&self, sense: Sense) -> Answer {
        Answer { status: Status::CHECK_CONDITION, sense: Some(sense), host_status: 0, moved_bytes: 0 }
    }

    fn refuse(&self, code: AdditionalSense) -> Answer {
        self.sense(Sense::new(SenseKey::ILLEGAL_REQUEST, code))
    }

    fn bad_block(&self, blocks: &BlockCommand) -> Option<Answer> {
        let bad = self.bad.borrow();
        let end = blocks.lba.get() + u64::from(blocks.blocks);
        let (lba, code) = bad.range(blocks.lba.get()..end).next()?;
        if self.has(Habit::OnlyRuns) && blocks.blocks == 1 {
            return None;
        }
        let key =
            if *code == AdditionalSense::UNRECOVERED_READ { SenseKey::MEDIUM_ERROR } else { SenseKey::ABORTED_COMMAND };
        let information = match () {
            () if self.has(Habit::NamesNothing) => None,
            () if self.has(Habit::NamesAnother) => Some((lba + 77) % BLOCKS),
            () => Some(*lba),
        };
        Some(self.sense(Sense { information, ..Sense::new(key, *code) }))
    }

    fn verify(&self, blocks: &BlockCommand, check: ByteCheck, data: &Transfer) -> Answer {
        let good = Answer { status: Status::GOOD, sense: None, host_status: 0, moved_bytes: 0 };
        if self.has(Habit::NoVerify) {
            return self.refuse(AdditionalSense::INVALID_OPCODE);
        }
        if check == ByteCheck::Medium && self.has(Habit::VerifyReadsNothing) {
            return good;
        }
        if check == ByteCheck::OneBlock && self.has(Habit::NoOneBlock) {
            return self.refuse(AdditionalSense::INVALID_FIELD_IN_CDB);
        }
        let is_type_2 = self.protection == Some(ProtectionType::Type2);
        if blocks.protect.has_tuples() && is_type_2 != blocks.expected.is_some() {
            return self.refuse(AdditionalSense::INVALID_OPCODE);
        }
        if blocks.extent().unwrap().is_some_and(|extent| !extent.fits(BLOCKS)) {
            return self.refuse(AdditionalSense::LBA_OUT_OF_RANGE);
        }
        if let Some(bad) = self.bad_block(blocks) {
            return bad;
        }
        let size = SIZE.bytes();
        let (at, count) = (blocks.lba.get() as usize * size, blocks.blocks as usize);
        let stored = self.data.borrow()[at..at + count * size].to_vec();
        let Transfer::Out(data) = data else {
            assert_eq!(check, ByteCheck::Medium, "data are compared with nothing");
            return good;
        };
        let is_equal = match check {
            ByteCheck::Medium => panic!("data of a VERIFY that compares none"),
            ByteCheck::Blocks => stored == data[..],
            ByteCheck::OneBlock => stored.chunks_exact(size).all(|block| block == &data[..]),
        };
        let moved_bytes = if self.has(Habit::TakesHalf) && count > 1 { data.len() / 2 } else { data.len() };
        match is_equal || self.has(Habit::IgnoresData) {
            true => Answer { moved_bytes, ..good },
            false => self.sense(Sense::new(SenseKey::MISCOMPARE, AdditionalSense::MISCOMPARE)),
        }
    }

    fn page(&self, page: Option<u8>) -> Vec<u8> {
        let name = Designator { association: 0, kind: 3, code_set: 1, bytes: &[0x50, 1, 2, 3, 4, 5, 6, 7] };
        let mut ids = vec![name.code_set, name.kind, 0, name.bytes.len() as u8];
        ids.extend(name.bytes);
        let limits = BlockLimits {
            max_transfer_blocks: 600,
            compare_and_write_blocks: self.swap_blocks,
            ..BlockLimits::default()
        };
        let body = match page {
            None => {
                let (vendor, product, revision) = (self.vendor.to_owned(), "model".to_owned(), "1".to_owned());
                let protect = self.protection.is_some();
                let inquiry = Inquiry { qualifier: 0, device_type: 0, version: 7, protect, vendor, product, revision };
                return inquiry.encode().to_vec();
            }
            Some(Page::SUPPORTED) => vec![0x00, 0x80, 0x83, 0x86, 0xB0, 0xB2],
            Some(Page::SERIAL) => b"  serial".to_vec(),
            Some(Page::IDENTIFICATION) => ids,
            Some(Page::EXTENDED_INQUIRY) => {
                ExtendedInquiry { supported_types: 7, checks_guard: true, checks_app_tag: false, checks_ref_tag: true }
                    .encode()
                    .to_vec()
            }
            Some(Page::BLOCK_LIMITS) => limits.encode().to_vec(),
            Some(Page::PROVISIONING) => Provisioning { read_zeroes: 1, ..Provisioning::default() }.encode().to_vec(),
            Some(other) => panic!("page {other:x}h was not listed"),
        };
        Page { code: page.unwrap_or_default(), body: &body }.encode()
    }

    fn mode(&self, page: u8) -> Vec<u8> {
        let no_check_without_protect = self.has(Habit::NoCheckByItself);
        let pages = match page {
            CachingPage::CODE => CachingPage { write_cache: true, no_read_cache: false }.encode().to_vec(),
            _ => ControlPage { no_check_without_protect, ..ControlPage::default() }.encode().to_vec(),
        };
        ModeSense { write_protected: false, dpo_fua: true, pages: &pages }.encode()
    }

    fn returns(&self, command: &Command) -> Vec<u8> {
        match *command {
            Command::Inquiry { page, .. } => self.page(page),
            Command::ModeSense { page, .. } => self.mode(page),
            Command::ReadCapacity16 { .. } => {
                let protection_type = self.protection.map_or(0, |protection| protection as u8);
                let protection_enabled = self.protection.is_some();
                let (last_lba, block_bytes) = (BLOCKS - 1, SIZE.bytes() as u32);
                let capacity = ReadCapacity16 {
                    last_lba,
                    block_bytes,
                    protection_enabled,
                    protection_type,
                    ..ReadCapacity16::default()
                };
                capacity.encode().to_vec()
            }
            _ => panic!("no command of this device changes blocks: {command:?}"),
        }
    }
}

impl Transport for Shared {
    async fn send(&self, cdb: &Cdb, mut data: Transfer) -> (io::Result<Answer>, Transfer) {
        let drive = &self.0;
        drive.count.set(drive.count.get() + 1);
        if drive.has(Habit::Attentions) && drive.count.get().is_multiple_of(4) {
            return (Ok(drive.sense(Sense::new(SenseKey::UNIT_ATTENTION, AdditionalSense(0x29, 0)))), data);
        }
        let command = Command::decode(cdb.as_bytes()).expect("a command that a device server can read");
        drive.sent.borrow_mut().push(command);
        let (is_short, is_long) = (matches!(command, Command::Verify10(..)), cdb.as_bytes().len() == 32);
        let answer = match command {
            Command::Verify(..) if is_long && drive.has(Habit::LongNeedsPrivilege) => {
                return (Err(io::Error::from_raw_os_error(libc::EPERM)), data);
            }
            Command::Verify(..) if !is_short && drive.has(Habit::OnlyShort) || is_long && drive.has(Habit::NoLong) => {
                drive.refuse(AdditionalSense::INVALID_OPCODE)
            }
            Command::Verify(blocks, check) | Command::Verify10(blocks, check) => drive.verify(&blocks, check, &data),
            Command::CompareAndWrite(_) if drive.has(Habit::SwapNeedsPrivilege) => {
                return (Err(io::Error::from_raw_os_error(libc::EPERM)), data);
            }
            Command::CompareAndWrite(blocks) => match drive.compare_and_write(&blocks, &data) {
                Some(answer) => answer,
                None => return (Err(io::Error::from_raw_os_error(libc::EIO)), data),
            },
            _ => {
                let Transfer::In(room) = &mut data else { panic!("{command:?} returns data") };
                let returned = drive.returns(&command);
                let moved_bytes = returned.len().min(room.len());
                room[..moved_bytes].copy_from_slice(&returned[..moved_bytes]);
                Answer { status: Status::GOOD, sense: None, host_status: 0, moved_bytes }
            }
        };
        (Ok(answer), data)
    }

    fn forget_cached(&self, start_bytes: u64, length_bytes: u64) {
        self.0.forgotten.borrow_mut().push((start_bytes, start_bytes + length_bytes));
    }
}

/// The kernel's block I/O to the same blocks.
struct Ordinary(Rc<Drive>, Geometry);

impl Device for Ordinary {
    fn geometry(&self) -> &Geometry {
        &self.1
    }

    fn abilities(&self) -> Abilities {
        Abilities::BASIC
    }

    async fn execute(&self, request: Request) -> Outcome {
        let (drive, extent) = (&self.0, request.extents.one());
        let at = extent.start().get() as usize * SIZE.bytes();
        let bytes = at..at + extent.bytes(SIZE) as usize;
        match request.operation {
            Operation::Read(_) => {
                drive.reads.set(drive.reads.get() + 1);
                let bad = drive.bad.borrow();
                let bad: Vec<BadBlock> =
                    extent.iter().filter(|lba| bad.contains_key(&lba.get())).map(BadBlock::media).collect();
                BadBlocks::fail_if_any(bad)?;
                let data = Slice::copy_from(&drive.data.borrow()[bytes]);
                Ok(Response::Data(Sealed::seal(data, SIZE, None, &Tags::default())))
            }
            Operation::Write(data) => {
                drive.data.borrow_mut()[bytes].copy_from_slice(&data.into_sealed().joined_data());
                Ok(Response::Done)
            }
            other => panic!("no other request: {other:?}"),
        }
    }
}

fn drive(habits: &[Habit], protection: Option<ProtectionType>) -> Drive {
    let data = (0..BLOCKS * SIZE.bytes() as u64).map(|at| (at / 512 * 7 + at) as u8).collect();
    Drive {
        habits: habits.to_vec(),
        protection,
        vendor: "maker",
        data: RefCell::new(data),
        bad: RefCell::default(),
        sent: RefCell::default(),
        count: Cell::new(0),
        reads: Cell::new(0),
        swap_blocks: 0,
        forgotten: RefCell::default(),
    }
}

type OpenDrive = Result<ScsiDevice<Ordinary, Shared>, OpenError>;

async fn opened(drive: Drive) -> OpenDrive {
    let drive = Rc::new(drive);
    let limits = Limits::new(SIZE, 1 << 20, 1 << 20);
    let geometry = Geometry { block_size: SIZE, capacity_blocks: BLOCKS, protection: None, limits };
    let limits = KernelLimits { transfer_bytes: Some(64 << 10), ..KernelLimits::default() };
    let kernel = KernelView { limits, protection_mode: String::new() };
    let ordinary = Ordinary(Rc::clone(&drive), geometry);
    ScsiDevice::with(Shared(drive), ordinary, &kernel).await.map_err(|(error, _)| error)
}

fn with<F: Future<Output = ()>>(
    habits: &[Habit],
    protection: Option<ProtectionType>,
    test: impl FnOnce(OpenDrive) -> F,
) {
    let reactor = Reactor::new(Config::default()).expect("a reactor starts");
    reactor.block_on(async { test(opened(drive(habits, protection)).await).await });
}

fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

async fn bad_of(device: &ScsiDevice<Ordinary, Shared>, extent: Extent) -> Vec<(u64, BadBlockCause)> {
    match device.execute(Request::verify(extent, Expectations::NONE)).await {
        Ok(Response::Verified(stats)) => {
            assert_eq!(stats.bytes_transferred, 0);
            Vec::new()
        }
        Ok(other) => panic!("{other:?}"),
        Err(error) => {
            let bad = error.into_bad_blocks().expect("bad blocks").into_iter();
            bad.map(|bad| (bad.lba.get(), bad.cause)).collect()
        }
    }
}

fn harm(device: &ScsiDevice<Ordinary, Shared>, bad: &[(u64, AdditionalSense)]) {
    *device.transport().0.bad.borrow_mut() = bad.iter().copied().collect();
}

const MEDIA: (AdditionalSense, BadBlockCause) = (AdditionalSense::UNRECOVERED_READ, BadBlockCause::Media);
const GUARD: (AdditionalSense, BadBlockCause) = (AdditionalSense::GUARD_CHECK, BadBlockCause::Tag(Field::Guard));

#[test]
fn exactly_the_bad_blocks_are_named_whatever_the_sense_data_say() {
    let causes = [MEDIA, GUARD];
    for habits in [&[][..], &[Habit::NamesNothing], &[Habit::NamesAnother], &[Habit::Attentions], &[Habit::OnlyShort]] {
        with(habits, None, |device| async move {
            let device = device.unwrap();
            assert_eq!(device.abilities().get(RequestKind::Verify), Ability::Native, "{habits:?}");
            for places in
                [&[0][..], &[999], &[0, 1, 2], &[5, 300, 301, 555], &(0..40).map(|n| n * 13).collect::<Vec<_>>()]
            {
                let bad: Vec<_> = places.iter().map(|lba| (*lba, causes[*lba as usize % 2])).collect();
                harm(&device, &bad.iter().map(|(lba, (code, _))| (*lba, *code)).collect::<Vec<_>>());
                let expected: Vec<_> = bad.iter().map(|(lba, (_, cause))| (*lba, *cause)).collect();
                assert_eq!(bad_of(&device, extent(0, BLOCKS)).await, expected, "{habits:?}");
                assert_eq!(bad_of(&device, extent(700, 299)).await, [], "{habits:?}");
            }
        });
    }
}

#[test]
fn a_verify_whose_checks_no_command_has_reads_the_blocks() {
    with(&[], Some(ProtectionType::Type1), |device| async move {
        let device = device.unwrap();
        assert_eq!(device.info().tags_made_by, Some(TagMaker::Drive), "the way to it carries none");
        let (sent, reads) = (device.transport().0.sent.borrow().len(), device.transport().0.reads.get());
        let app_tag = Some(Masked { expected: 7, mask: 0xFF });
        let request = Request::verify(extent(0, BLOCKS), Expectations::new(Checks { app_tag, ..Checks::NONE }));
        let Ok(Response::Verified(stats)) = device.execute(request.clone()).await else {
            panic!("all blocks are good")
        };
        assert_eq!(stats.bytes_transferred, BLOCKS * SIZE.bytes() as u64);
        assert!(!stats.coverage.is_sealed(), "the way to it carries no tags, so none was checked");
        assert_eq!(device.transport().0.sent.borrow().len(), sent, "no command goes to the drive");
        assert!(device.transport().0.reads.get() > reads);
        harm(&device, &[(3, MEDIA.0), (999, GUARD.0)]);
        let bad = device.execute(request).await.unwrap_err().into_bad_blocks().expect("bad blocks");
        assert_eq!(bad.into_iter().map(|bad| bad.lba.get()).collect::<Vec<_>>(), [3, 999]);
    });
}

#[test]
fn a_drive_that_fails_a_run_and_none_of_its_blocks_is_not_called_whole() {
    with(&[Habit::OnlyRuns, Habit::NamesNothing], None, |device| async move {
        let device = device.unwrap();
        harm(&device, &[(50, MEDIA.0)]);
        let error = device.execute(Request::verify(extent(0, 100), Expectations::NONE)).await.unwrap_err();
        assert!(error.to_string().contains("nothing wrong with any of these blocks alone"), "{error}");
    });
}

#[test]
fn a_drive_whose_verify_looks_at_nothing_is_not_believed() {
    with(&[Habit::VerifyReadsNothing], None, |device| async move {
        let device = device.unwrap();
        let abilities = device.abilities();
        assert_eq!(
            (abilities.get(RequestKind::Verify), abilities.get(RequestKind::Compare), abilities.offloads),
            (Ability::Absent, Ability::Native, false),
            "it tells equal data from different data all the same"
        );
        let refused = device.info().refused.join("; ");
        assert!(refused.contains("does not look at blocks") && refused.contains("GOOD"), "{refused}");
        assert_eq!(device.info().verify, None);
    });
    let reactor = Reactor::new(Config::default()).expect("a reactor starts");
    reactor.block_on(async {
        let device = opened(Drive { vendor: "LIO-ORG", ..drive(&[], None) }).await.unwrap();
        assert_eq!(device.abilities().get(RequestKind::Verify), Ability::Absent);
        assert!(device.info().refused[0].contains("reads nothing"));
    });
}

#[test]
fn a_drive_without_verify_is_read_and_one_that_ignores_data_compares_nothing() {
    with(&[Habit::NoVerify], None, |device| async move {
        let device = device.unwrap();
        assert_eq!((device.abilities().get(RequestKind::Verify), device.info().verify), (Ability::Absent, None));
        let refused = &device.info().refused;
        assert!(refused.len() == 4 && refused.iter().all(|line| line.contains("20h/00h")), "{refused:?}");
    });
    with(&[Habit::IgnoresData], None, |device| async move {
        let device = device.unwrap();
        assert_eq!(
            (device.abilities().get(RequestKind::Verify), device.abilities().get(RequestKind::Compare)),
            (Ability::Native, Ability::Absent)
        );
        assert!(device.info().refused.iter().any(|line| line.contains("BYTCHK 01b")), "{:?}", device.info().refused);
    });
}

#[test]
fn tags_are_checked_in_the_form_that_their_type_has() {
    for (protection, length) in [(ProtectionType::Type1, 16), (ProtectionType::Type2, 32), (ProtectionType::Type3, 16)]
    {
        with(&[Habit::NoCheckByItself], Some(protection), |device| async move {
            let device = device.unwrap();
            let expected = if length == 32 { "VERIFY (32)" } else { "VERIFY (16)" };
            assert_eq!(device.info().verify, Some(expected));
            let response = device.execute(Request::verify(extent(3, 5), Expectations::NONE)).await.unwrap();
            let Response::Verified(stats) = response else { panic!("{response:?}") };
            assert!(stats.coverage.is_sealed());
            let Some(Command::Verify(blocks, ByteCheck::Medium)) = device.transport().0.sent.borrow().last().copied()
            else {
                panic!("the last command is a VERIFY");
            };
            assert_eq!(
                (blocks.protect.bits(), blocks.expected.map(|tags| tags.initial_ref_tag)),
                (1, (length == 32).then_some(3))
            );
        });
    }
    for habit in [Habit::NoLong, Habit::LongNeedsPrivilege] {
        // Without the form of 32 bytes the drive checks on its own, but not with DPICZ.
        for (habits, is_sealed) in [(&[habit][..], true), (&[habit, Habit::NoCheckByItself], false)] {
            with(habits, Some(ProtectionType::Type2), |device| async move {
                let device = device.unwrap();
                let response = device.execute(Request::verify(extent(3, 5), Expectations::NONE)).await.unwrap();
                let Response::Verified(stats) = response else { panic!("{response:?}") };
                assert_eq!(
                    (stats.coverage.is_sealed(), device.abilities().seals),
                    (is_sealed, is_sealed),
                    "{habits:?}"
                );
                assert!(device.info().refused[0].contains("VERIFY (32)"));
            });
        }
    }
    with(&[], None, |device| async move { assert!(!device.unwrap().abilities().seals) });
}

#[test]
fn compared_blocks_are_equal_only_if_all_are_and_the_first_difference_is_named() {
    for habits in [&[][..], &[Habit::NoOneBlock], &[Habit::Attentions]] {
        with(habits, None, |device| async move {
            let device = device.unwrap();
            assert_eq!(device.abilities().get(RequestKind::Compare), Ability::Native);
            let stored = |extent: Extent| {
                let at = extent.start().get() as usize * 512;
                device.transport().0.data.borrow()[at..at + extent.bytes(SIZE) as usize].to_vec()
            };
            let sealed = |bytes: &[u8]| Sealed::seal(Slice::copy_from(bytes), SIZE, None, &Tags::default());
            let run = extent(10, 20);
            let reads = device.transport().0.reads.get();
            device.execute(Request::compare(run, sealed(&stored(run)))).await.unwrap();
            for block in [0, 7, 19] {
                let mut other = stored(run);
                other[block * 512 + 511] ^= 1;
                let error = device.execute(Request::compare(run, sealed(&other))).await.unwrap_err();
                assert_eq!(*error.kind(), ErrorKind::Miscompare { lba: Lba::new(10 + block as u64) });
            }
            assert_eq!(device.transport().0.reads.get(), reads + 3, "only differences are read");
            // For a run of equal blocks one of them is sent, if the drive supports it.
            let zeroes = vec![0; 20 * 512];
            device.execute(Request::write(run, sealed(&zeroes), Default::default())).await.unwrap();
            device.execute(Request::compare(run, sealed(&zeroes))).await.unwrap();
            let Some(Command::Verify(_, check)) = device.transport().0.sent.borrow().last().copied() else { panic!() };
            let expected = if habits.contains(&Habit::NoOneBlock) { ByteCheck::Blocks } else { ByteCheck::OneBlock };
            assert_eq!(check, expected);
            device.transport().0.data.borrow_mut()[29 * 512] = 1;
            let error = device.execute(Request::compare(run, sealed(&zeroes))).await.unwrap_err();
            assert_eq!(*error.kind(), ErrorKind::Miscompare { lba: Lba::new(29) });
        });
    }
    with(&[Habit::TakesHalf], None, |device| async move {
        let device = device.unwrap();
        let same = device.transport().0.data.borrow()[..1024].to_vec();
        let data = Sealed::seal(Slice::copy_from(&same), SIZE, None, &Tags::default());
        let error = device.execute(Request::compare(extent(0, 2), data)).await.unwrap_err();
        assert!(error.to_string().contains("512 of 1024 bytes"), "{error}");
    });
}

#[test]
fn limits_are_the_smallest_and_what_the_drive_says_of_itself_is_shown() {
    with(&[], Some(ProtectionType::Type1), |device| async move {
        let device = device.unwrap();
        let limits = device.geometry().limits;
        assert_eq!((limits.max_transfer_blocks.get(), limits.max_verify_blocks.get()), (128, 600));
        let info = device.info();
        assert_eq!((info.vendor.as_str(), info.serial.as_str()), ("maker", "serial"));
        assert_eq!(info.name.as_deref(), Some("naa.5001020304050607"));
        assert_eq!((info.volatile_write_cache, info.unmapped_reads_zeroes), (Some(true), true));
        assert_eq!((info.checks, info.protection.is_some()), ((true, false, true), true));
        let sent: BTreeSet<_> = device
            .transport()
            .0
            .sent
            .borrow()
            .iter()
            .map(std::mem::discriminant)
            .map(|one| format!("{one:?}"))
            .collect();
        assert_eq!(sent.len(), 4, "INQUIRY, READ CAPACITY, MODE SENSE and VERIFY");
    });
}
