//! Copy, Write Uncorrectable, fused pairs and what hosts can ask about damaged blocks, over loopback sockets.

mod common;

use std::rc::Rc;

use common::*;
use sealblock_block::{Gate, Stack};
use sealblock_exports_nvme_tcp::{KNOWN_BLOCKS, Namespace, Shows, Subsystem};
use sealblock_integrity::{Field, GuardKind, PiFormat, ProtectionType};
use sealblock_media_memory::{Damage, MemoryDevice};
use sealblock_media_null::NullDevice;
use sealblock_protocols_nvme::admin::{Abort, Cns, GetLogPage, SetFeatures};
use sealblock_protocols_nvme::features::AsynchronousEvent;
use sealblock_protocols_nvme::identify::{
    Controller, Fuses, Namespace as NamespacePage, NvmNamespace, Oacs, Ofcs, Oncs, Pic,
};
use sealblock_protocols_nvme::logs::{DamageLog, EffectsLog, LbaStatusLog, LbaStatusRanges};
use sealblock_protocols_nvme::nvm::{
    BlockCommand, CopyCommand, CopyDescriptorFormat, CopyRange, DatasetManagement, DsmRange, GetLbaStatus, IoCommand,
    LbaStatusAction, LbaStatusFlags, LbaStatusList, Prchk, ProtectionInfo, WriteZeroes,
};
use sealblock_protocols_nvme::{AdminOpcode, Command, Count8, FabricsType, Fuse};
use sealblock_units::{BlockSize, Extent, Lba};
use zerocopy::IntoBytes;

fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

/// A Copy of these source ranges and its list; `protection` is that of both sides.
fn copy(to: u64, from: &[(u64, u64)], protection: ProtectionInfo) -> (IoCommand, Data) {
    let copy = CopyCommand {
        destination: Lba::new(to),
        ranges: Count8::new(from.len() as u16).unwrap(),
        format: CopyDescriptorFormat::Format0,
        read: protection,
        write: protection.with_tags(format(), 0, to),
        force_unit_access: false,
        limited_retry: false,
    };
    let range = |(start, blocks): &(u64, u64)| CopyRange {
        extent: extent(*start, *blocks),
        protection: protection.with_tags(format(), 0, *start),
    };
    let ranges: Vec<_> = from.iter().map(range).collect();
    (IoCommand::Copy(copy), Data::Write(copy.encode_ranges(&ranges).unwrap()))
}

fn checked(pract: bool) -> ProtectionInfo {
    ProtectionInfo { pract, prchk: Prchk::GUARD | Prchk::REFERENCE_TAG, ..ProtectionInfo::NONE }
}

fn with_checks(mut blocks: BlockCommand) -> BlockCommand {
    blocks.protection = checked(true).with_tags(format(), 0, blocks.extent.start().get());
    blocks
}

async fn write(io: &mut Queue, nsid: u32, start: u64, count: u64, seed: u8) -> Vec<u8> {
    let size = if nsid == BARE { 512 } else { 4096 };
    let range = if nsid == PROTECTED { with_checks(blocks(start, count)) } else { blocks(start, count) };
    let data = pattern(count as usize * size, seed);
    io.io(nsid, IoCommand::Write(range), Data::Write(data.clone())).await.ok();
    data
}

async fn read(io: &mut Queue, nsid: u32, start: u64, count: u64) -> Done {
    let size = if nsid == BARE { 512 } else { 4096 };
    let range = if nsid == PROTECTED { with_checks(blocks(start, count)) } else { blocks(start, count) };
    io.io(nsid, IoCommand::Read(range), Data::Read(count as usize * size)).await
}

#[test]
fn copies_are_resealed_for_their_place() {
    run(|| async {
        let served = serve(short());
        let (_admin, mut io) = Queue::pair(served.address, true).await;
        for nsid in [PLAIN, PROTECTED, BARE] {
            for pract in [false, true] {
                let (a, b) = (write(&mut io, nsid, 0, 3, 1).await, write(&mut io, nsid, 100, 250, 2).await);
                let (command, list) = copy(1000, &[(0, 3), (100, 250)], checked(pract));
                io.io(nsid, command, list).await.ok();
                let copied = read(&mut io, nsid, 1000, 200).await.ok().data;
                assert!(copied[..a.len()] == a && copied[a.len()..] == b[..copied.len() - a.len()]);
                io.io(nsid, IoCommand::Verify(blocks(1000, 253)), Data::None).await.ok();
            }
        }
        // Tags travel along, all but the reference tag.
        let mut tagged = with_checks(blocks(50, 1));
        tagged.protection.lbat = 0x1234;
        io.io(PROTECTED, IoCommand::Write(tagged), Data::Write(pattern(4096, 3))).await.ok();
        let (command, list) = copy(60, &[(50, 1)], checked(false));
        io.io(PROTECTED, command, list).await.ok();
        let mut raw = with_checks(blocks(60, 1));
        raw.protection.pract = false;
        let stored = io.io(PROTECTED, IoCommand::Read(raw), Data::Read(4104)).await.ok().data;
        assert_eq!(stored[4098..], [0x12, 0x34, 0, 0, 0, 60]);
    });
}

/// Namespaces with other guards and types, their tags shown.
#[test]
fn copies_keep_their_guard_in_every_format() {
    for (guard, bits, descriptors) in [
        (GuardKind::Crc16, 8, CopyDescriptorFormat::Format0),
        (GuardKind::Crc32c, 16, CopyDescriptorFormat::Format1),
        (GuardKind::Crc64, 8, CopyDescriptorFormat::Format1),
    ] {
        for kind in ProtectionType::ALL {
            let format = PiFormat::new(guard, kind, bits).unwrap();
            run(|| copy_within(format, descriptors));
        }
    }
}

async fn copy_within(format: PiFormat, descriptors: CopyDescriptorFormat) {
    let device = Rc::new(MemoryDevice::new(BlockSize::B4096, 64, Some(format)));
    let stack = Stack::new(Rc::clone(&device));
    let served = serve_with(short(), |_| {
        let namespace = Namespace::new(Rc::new(Gate::new("mem", stack)), [7; 16]).showing(Shows::Protected).unwrap();
        Subsystem::new(SUBNQN.parse().unwrap(), "SN1").with_namespace(1, namespace).unwrap()
    });
    let (mut admin, mut io) = Queue::pair(served.address, false).await;
    let nvm = NvmNamespace::decode(&admin.identify(Cns::CommandSetNamespace, 1).await.ok().data).unwrap();
    assert!(nvm.pic.contains(Pic::STORAGE_TAG_CHECK_READ));
    let counts = kind_counts(format);
    // Type 1 counts from the address, Type 2 from where the command says.
    let first = |start: u64| if format.protection() == ProtectionType::Type2 { start + 1000 } else { start };
    let protection = |start: u64, storage: u64, pract: bool| ProtectionInfo {
        pract,
        stc: true,
        prchk: if counts { Prchk::GUARD | Prchk::REFERENCE_TAG } else { Prchk::GUARD },
        ..ProtectionInfo::NONE.with_tags(format, storage, first(start))
    };
    let at = |start, count, protection| BlockCommand { protection, ..blocks(start, count) };
    let data = pattern(3 * 4096, 7);
    let write = IoCommand::Write(at(4, 3, protection(4, 9, true)));
    io.io(1, write, Data::Write(data.clone())).await.ok();
    let range = |storage| CopyRange { extent: extent(4, 3), protection: protection(4, storage, false) };
    let ask = |pract, storage| CopyCommand {
        destination: Lba::new(40),
        ranges: Count8::new(1).unwrap(),
        format: descriptors,
        read: ProtectionInfo { pract, ..protection(4, 9, false) },
        write: protection(40, storage, pract),
        force_unit_access: true,
        limited_retry: false,
    };
    for (pract, storage) in [(false, 9), (true, 5)] {
        let list = ask(pract, storage).encode_ranges(&[range(9)]).unwrap();
        io.io(1, IoCommand::Copy(ask(pract, storage)), Data::Write(list)).await.ok();
        let read = io.io(1, IoCommand::Read(at(40, 3, protection(40, storage, true))), Data::Read(3 * 4096)).await.ok();
        assert!(read.data == data, "{format:?}");
    }
    let list = ask(false, 9).encode_ranges(&[range(8)]).unwrap();
    assert_eq!(
        io.io(1, IoCommand::Copy(ask(false, 9)), Data::Write(list)).await.status(),
        0x288,
        "another storage tag"
    );
    assert_eq!(damage_log(&mut admin, 1).await.entries[0].field, Some(Field::StorageTag));
    // A wrong guard that nobody asked to check stays wrong.
    assert!(device.damage(Lba::new(5), Damage::Data { at: 3, mask: 4 }));
    let blind = CopyCommand { read: ProtectionInfo::NONE, write: ProtectionInfo::NONE, ..ask(false, 9) };
    let unchecked = CopyRange { protection: ProtectionInfo::NONE, ..range(9) };
    let list = blind.encode_ranges(&[unchecked]).unwrap();
    io.io(1, IoCommand::Copy(blind), Data::Write(list)).await.ok();
    let verify = ProtectionInfo { prchk: Prchk::GUARD, ..ProtectionInfo::NONE };
    assert_eq!(io.io(1, IoCommand::Verify(at(40, 3, verify)), Data::None).await.status(), 0x282);
    assert_eq!(admin.newest_error().await.lba, 41);
}

fn kind_counts(format: PiFormat) -> bool {
    format.protection() != ProtectionType::Type3
}

#[test]
fn a_copy_of_damage_or_beyond_its_limits_is_refused() {
    run(|| async {
        let served = serve(short());
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        let page = NamespacePage::decode(&admin.identify(Cns::Namespace, PLAIN).await.ok().data).unwrap();
        assert_eq!((page.mssrl, page.mcl, page.msrc.get()), (16_384, 16_384, 128));
        write(&mut io, PLAIN, 0, 8, 1).await;
        write(&mut io, PLAIN, 200, 8, 9).await;
        served.plain.damage(Lba::new(5), Damage::Data { at: 0, mask: 1 });
        let (command, list) = copy(200, &[(0, 4), (4, 4)], ProtectionInfo::NONE);
        let done = io.io(PLAIN, command, list).await;
        assert_eq!((done.status(), done.completion.dword0()), (0x282, 1), "the second source range");
        assert_eq!(admin.newest_error().await.lba, 5);
        assert!(
            read(&mut io, PLAIN, 204, 4).await.ok().data == pattern(32768, 9)[16384..],
            "nothing of it was written"
        );
        for (to, from, status) in [
            (2, [(0, 4)].as_slice(), 0x187),
            (BLOCKS - 1, &[(0, 4)], 0x080),
            (100, &[(BLOCKS - 1, 2)], 0x080),
            (100, &[(0, 1); 129], 0x183),
        ] {
            let (command, list) = copy(to, from, ProtectionInfo::NONE);
            assert_eq!(io.io(PLAIN, command, list).await.status(), status, "to {to}");
        }
        let (command, _) = copy(100, &[(0, 1), (1, 1)], ProtectionInfo::NONE);
        assert_eq!(io.io(PLAIN, command, Data::Write(vec![0; 32])).await.status(), 0x00F);
        // A source of which the command says another reference tag than its address.
        write(&mut io, PROTECTED, 0, 1, 1).await;
        let IoCommand::Copy(mut ask) = copy(100, &[(0, 1)], checked(true)).0 else { unreachable!() };
        let range = CopyRange { extent: extent(0, 1), protection: checked(true).with_tags(format(), 0, 7) };
        let list = ask.encode_ranges(&[range]).unwrap();
        assert_eq!(io.io(PROTECTED, IoCommand::Copy(ask), Data::Write(list)).await.status(), 0x181);
        ask.format = CopyDescriptorFormat::Format1;
        let list = ask.encode_ranges(&[range]).unwrap();
        assert_eq!(io.io(PROTECTED, IoCommand::Copy(ask), Data::Write(list)).await.status(), 0x00B);
    });
}

async fn status(admin: &mut Queue, nsid: u32, action: LbaStatusAction, start: u64, blocks: u16, bytes: u64) -> Done {
    let ask = GetLbaStatus { start: Lba::new(start), max_bytes: bytes, action, range_blocks: blocks };
    admin.call(ask.encode(nsid), Data::Read(bytes as usize)).await
}

fn runs(done: Done) -> (Vec<(u64, u64)>, bool) {
    let list = LbaStatusList::decode(&done.ok().data).unwrap();
    let run = |run: &sealblock_protocols_nvme::nvm::LbaStatusDescriptor| (run.extent.start().get(), run.extent.len());
    (list.descriptors.iter().map(run).collect(), list.complete)
}

async fn damage_log(admin: &mut Queue, nsid: u32) -> DamageLog {
    let ask = GetLogPage { nsid, ..GetLogPage::new(0xC0, 4096) };
    DamageLog::decode(&admin.call(ask.encode(), Data::Read(4096)).await.ok().data).unwrap()
}

#[test]
fn unreadable_blocks_stay_so_until_they_are_written_zeroed_or_discarded() {
    run(|| async {
        let served = serve(short());
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        for nsid in [PLAIN, PROTECTED, BARE] {
            write(&mut io, nsid, 0, 8, 1).await;
            io.io(nsid, IoCommand::WriteUncorrectable(extent(2, 4)), Data::None).await.ok();
            assert_eq!(read(&mut io, nsid, 0, 8).await.status(), 0x281);
            assert_eq!(admin.newest_error().await.lba, 2);
            assert_eq!(io.io(nsid, IoCommand::Verify(blocks(0, 8)), Data::None).await.status(), 0x281);
            read(&mut io, nsid, 0, 2).await.ok();
            let list = status(&mut admin, nsid, LbaStatusAction::Tracked, 0, 0, 4096).await.ok();
            let list = LbaStatusList::decode(&list.data).unwrap();
            assert_eq!(
                list.descriptors[0].flags,
                LbaStatusFlags::UNRECOVERED_READ | LbaStatusFlags::WRITE_UNCORRECTABLE
            );
            assert_eq!((list.descriptors[0].extent, list.descriptors.len(), list.complete), (extent(2, 4), 1, true));
            write(&mut io, nsid, 2, 1, 1).await;
            let zeroes = WriteZeroes { blocks: blocks(3, 1), deallocate: false, whole_namespace: false };
            io.io(nsid, IoCommand::WriteZeroes(zeroes), Data::None).await.ok();
            let dsm = IoCommand::DatasetManagement(DatasetManagement::deallocate(1).unwrap());
            io.io(nsid, dsm, Data::Write(DsmRange::new(extent(4, 1)).as_bytes().to_vec())).await.ok();
            read(&mut io, nsid, 0, 5).await.ok();
            assert_eq!(
                runs(status(&mut admin, nsid, LbaStatusAction::Tracked, 0, 0, 4096).await),
                (vec![(5, 1)], true)
            );
        }
    });
}

#[test]
fn without_the_ability_write_uncorrectable_is_no_command() {
    run(|| async {
        let null = NullDevice::new(BlockSize::B4096, 64, None);
        let served = serve_with(short(), |_| {
            let namespace = Namespace::new(Rc::new(Gate::new("null", Stack::new(null))), [7; 16]);
            Subsystem::new(SUBNQN.parse().unwrap(), "SN1").with_namespace(1, namespace).unwrap()
        });
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        assert_eq!(io.io(1, IoCommand::WriteUncorrectable(extent(0, 1)), Data::None).await.status(), 0x001);
        let page = Controller::decode(&admin.identify(Cns::Controller, 0).await.ok().data).unwrap();
        assert!(!page.oncs.contains(Oncs::WRITE_UNCORRECTABLE) && page.oncs.contains(Oncs::COPY | Oncs::VERIFY));
        let effects = EffectsLog::decode(&admin.log(5, 4096).await.ok().data).unwrap();
        assert_eq!((effects.io(0x04).bits(), effects.io(0x19).bits()), (0, 0x10_0003));
    });
}

#[test]
fn one_verify_names_all_bad_blocks_in_the_logs() {
    run(|| async {
        let served = serve(short());
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        write(&mut io, PLAIN, 0, 64, 1).await;
        for (lba, damage) in [
            (3, Damage::Data { at: 9, mask: 1 }),
            (4, Damage::Tag { at: 7, mask: 1 }),
            (40, Damage::Tag { at: 0, mask: 1 }),
        ] {
            assert!(served.plain.damage(Lba::new(lba), damage));
        }
        assert_eq!(runs(status(&mut admin, PLAIN, LbaStatusAction::Tracked, 0, 0, 4096).await), (vec![], true));
        assert_eq!(io.io(PLAIN, IoCommand::Verify(blocks(0, 64)), Data::None).await.status(), 0x282);
        let entry = admin.newest_error().await;
        assert_eq!((entry.lba, entry.vendor_information), (3, 0xC0), "the first, and where the others are");
        let log = damage_log(&mut admin, PLAIN).await;
        let fields: Vec<_> = log.entries.iter().map(|entry| (entry.lba.get(), entry.field)).collect();
        assert_eq!(fields, [(3, Some(Field::Guard)), (4, Some(Field::RefTag)), (40, Some(Field::Guard))]);
        assert_eq!((log.nsid, log.overflowed, log.entries[1].values), (PLAIN, false, Some((4, 5))));
        assert!(log.entries[0].values.is_some_and(|(expected, actual)| expected != actual));
        assert!(damage_log(&mut admin, BARE).await.entries.is_empty());
        for (nsid, status) in [(3, 0x00B), (u32::MAX, 0x00B), (0, 0x00B)] {
            let ask = GetLogPage { nsid, ..GetLogPage::new(0xC0, 64) };
            assert_eq!(admin.call(ask.encode(), Data::Read(64)).await.status(), status);
        }
        let page = LbaStatusLog::decode(&admin.log(0x0E, 4096).await.ok().data).unwrap();
        assert_eq!((page.estimate_blocks, page.generation, page.elements.len()), (Some(3), 1, 1));
        assert_eq!(page.elements[0].ranges, LbaStatusRanges::Ranges(vec![extent(3, 2), extent(40, 1)]));
        // Another controller knows them too, and a write heals.
        let (mut other, mut other_io) = Queue::pair(served.address, true).await;
        write(&mut other_io, PLAIN, 4, 1, 5).await;
        assert_eq!(
            runs(status(&mut other, PLAIN, LbaStatusAction::Tracked, 0, 0, 4096).await),
            (vec![(3, 1), (40, 1)], true)
        );
        assert_eq!(runs(status(&mut other, PLAIN, LbaStatusAction::Tracked, 0, 40, 4096).await), (vec![(3, 1)], true));
        assert_eq!(runs(status(&mut other, PLAIN, LbaStatusAction::Tracked, 0, 0, 24).await), (vec![(3, 1)], false));
        // A compare of a good range says no more, and no more is an entry of other failures.
        assert_eq!(io.io(PLAIN, IoCommand::Read(blocks(BLOCKS, 1)), Data::Read(4096)).await.status(), 0x080);
        assert_eq!(admin.newest_error().await.vendor_information, 0);
    });
}

#[test]
fn a_scan_finds_what_nobody_has_read() {
    run(|| async {
        let served = serve(short());
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        write(&mut io, PROTECTED, 0, 64, 1).await;
        write(&mut io, PROTECTED, 3000, 64, 1).await;
        for lba in [7, 9, 3001] {
            assert!(served.protected.damage(Lba::new(lba), Damage::Data { at: 1, mask: 1 }));
        }
        let scan = LbaStatusAction::ScanUntracked;
        assert_eq!(runs(status(&mut admin, PROTECTED, scan, 8, 8, 4096).await), (vec![(9, 1)], true));
        assert_eq!(
            runs(status(&mut admin, PROTECTED, scan, 0, 0, 24).await),
            (vec![(7, 1)], false),
            "no room for more"
        );
        assert_eq!(
            runs(status(&mut admin, PROTECTED, scan, 0, 0, 4096).await),
            (vec![(7, 1), (9, 1), (3001, 1)], true)
        );
        // Undone behind its back, and looked at again.
        served.protected.damage(Lba::new(9), Damage::Data { at: 1, mask: 1 });
        assert_eq!(runs(status(&mut admin, PROTECTED, scan, 0, 0, 4096).await), (vec![(7, 1), (3001, 1)], true));
        assert_eq!(status(&mut admin, PROTECTED, scan, BLOCKS, 1, 64).await.status(), 0x080);
        assert_eq!(status(&mut admin, 3, scan, 0, 1, 64).await.status(), 0x00B);
        assert_eq!(status(&mut admin, PROTECTED, LbaStatusAction::Allocated, 0, 1, 64).await.status(), 0x002);
        assert_eq!(admin.newest_error().await.parameter_error_location, 55, "ATYPE");
    });
}

#[test]
fn more_bad_blocks_than_are_kept_are_confessed() {
    run(|| async {
        let big = Rc::new(MemoryDevice::new(BlockSize::B512, 40_000, None));
        let served = serve_with(short(), |_| {
            let namespace = Namespace::new(Rc::new(Gate::new("mem", Stack::new(Rc::clone(&big)))), [7; 16]);
            Subsystem::new(SUBNQN.parse().unwrap(), "SN1").with_namespace(1, namespace).unwrap()
        });
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        io.io(1, IoCommand::WriteUncorrectable(extent(0, KNOWN_BLOCKS as u64 + 1)), Data::None).await.ok();
        let page = LbaStatusLog::decode(&admin.log(0x0E, 4096).await.ok().data).unwrap();
        assert_eq!((page.estimate_blocks, &page.elements[0].ranges), (None, &LbaStatusRanges::WholeNamespace));
        assert_eq!(page.elements[0].action, LbaStatusAction::ScanUntracked);
        let (found, complete) = runs(status(&mut admin, 1, LbaStatusAction::Tracked, 0, 0, 64).await);
        assert_eq!((found, complete), (vec![(0, KNOWN_BLOCKS as u64)], false));
        // The page is larger than a host reads at once.
        let bytes = 32 + 32 * KNOWN_BLOCKS;
        let mut whole = Vec::new();
        while whole.len() < bytes {
            let length = (bytes - whole.len()).min(100_000);
            let ask = GetLogPage { nsid: 1, offset: whole.len() as u64, ..GetLogPage::new(0xC0, length as u64) };
            whole.extend(admin.call(ask.encode(), Data::Read(length)).await.ok().data);
        }
        let log = DamageLog::decode(&whole).unwrap();
        assert!(log.overflowed && log.entries.len() == KNOWN_BLOCKS && log.entries[9].write_uncorrectable);
    });
}

fn fused(command: IoCommand, nsid: u32, fuse: Fuse) -> Command {
    command.encode(nsid).unwrap().with_fuse(fuse)
}

async fn compare_and_write(io: &mut Queue, start: u64, count: u64, old: Vec<u8>, new: Vec<u8>) -> (u16, u16) {
    let (compare, write) = (IoCommand::Compare(blocks(start, count)), IoCommand::Write(blocks(start, count)));
    let first = io.submit(fused(compare, PLAIN, Fuse::First), Data::Write(old)).await;
    let second = io.submit(fused(write, PLAIN, Fuse::Second), Data::Write(new)).await;
    (io.done(first).await.status(), io.done(second).await.status())
}

#[test]
fn a_fused_write_is_done_only_if_the_compare_finds_its_blocks() {
    run(|| async {
        let served = serve(short());
        let (mut admin, mut io) = Queue::pair(served.address, true).await;
        let page = Controller::decode(&admin.identify(Cns::Controller, 0).await.ok().data).unwrap();
        assert_eq!((page.fuses, page.acwu, page.awun, page.awupf), (Fuses::COMPARE_AND_WRITE, 0, 0, 0));
        let (old, new) = (write(&mut io, PLAIN, 3, 1, 1).await, pattern(4096, 2));
        assert_eq!(compare_and_write(&mut io, 3, 1, new.clone(), new.clone()).await, (0x285, 0x009));
        assert!(read(&mut io, PLAIN, 3, 1).await.ok().data == old, "nothing was written");
        assert_eq!(compare_and_write(&mut io, 3, 1, old.clone(), new.clone()).await, (0, 0));
        assert!(read(&mut io, PLAIN, 3, 1).await.ok().data == new);
        let two = pattern(8192, 2);
        assert_eq!(compare_and_write(&mut io, 3, 2, two.clone(), two).await, (0x014, 0x014), "more than ACWU");
        assert_eq!(compare_and_write(&mut io, BLOCKS, 1, old.clone(), new.clone()).await, (0x080, 0x080));
        // A first half that fails takes the second along, and the other way round.
        served.plain.damage(Lba::new(3), Damage::Data { at: 0, mask: 1 });
        assert_eq!(compare_and_write(&mut io, 3, 1, new.clone(), old.clone()).await, (0x282, 0x009));
        let compare = fused(IoCommand::Compare(blocks(4, 1)), PLAIN, Fuse::First);
        let first = io.submit(compare, Data::Write(old.clone())).await;
        let beyond = fused(IoCommand::Write(blocks(BLOCKS, 1)), PLAIN, Fuse::Second);
        let second = io.submit(beyond, Data::Write(old.clone())).await;
        assert_eq!((io.done(first).await.status(), io.done(second).await.status()), (0x009, 0x080));
        let first = io.submit(compare, Data::Write(old.clone())).await;
        let elsewhere = fused(IoCommand::Write(blocks(5, 1)), PLAIN, Fuse::Second);
        let second = io.submit(elsewhere, Data::Write(old.clone())).await;
        assert_eq!((io.done(first).await.status(), io.done(second).await.status()), (0x002, 0x002));
    });
}

#[test]
fn half_a_pair_is_aborted() {
    run(|| async {
        let served = serve(short());
        let (_admin, mut io) = Queue::pair(served.address, false).await;
        let data = vec![0; 4096];
        let compare = fused(IoCommand::Compare(blocks(0, 1)), PLAIN, Fuse::First);
        let write = fused(IoCommand::Write(blocks(0, 1)), PLAIN, Fuse::Second);
        assert_eq!(io.call(write, Data::Write(data.clone())).await.status(), 0x00A, "no first");
        let first = io.submit(compare, Data::Write(data.clone())).await;
        io.io(PLAIN, IoCommand::Flush, Data::None).await.ok();
        assert_eq!(io.done(first).await.status(), 0x00A, "another command came in between");
        let first = io.submit(compare, Data::Write(data.clone())).await;
        let again = io.submit(compare, Data::Write(data.clone())).await;
        let second = io.submit(write, Data::Write(data.clone())).await;
        assert_eq!(io.done(first).await.status(), 0x00A);
        assert_eq!((io.done(again).await.status(), io.done(second).await.status()), (0, 0));
        let large = fused(IoCommand::Compare(blocks(0, 64)), PLAIN, Fuse::First);
        let first = io.submit(large, Data::Write(vec![0; 64 * 4096])).await;
        io.io(PLAIN, IoCommand::Flush, Data::None).await.ok();
        assert_eq!(io.done(first).await.status(), 0x00A, "while its data was fetched");
        for (command, fuse) in
            [(IoCommand::Write(blocks(0, 1)), Fuse::First), (IoCommand::Compare(blocks(0, 1)), Fuse::Reserved)]
        {
            let first = io.submit(fused(command, PLAIN, fuse), Data::Write(data.clone())).await;
            io.io(PLAIN, IoCommand::Flush, Data::None).await.ok();
            let expected = if fuse == Fuse::First { 0x00A } else { 0x002 };
            assert_eq!(io.done(first).await.status(), expected);
        }
        write_and_read_as_ever(&mut io).await;
    });
}

async fn write_and_read_as_ever(io: &mut Queue) {
    let data = write(io, PLAIN, 9, 4, 7).await;
    assert!(read(io, PLAIN, 9, 4).await.ok().data == data);
}

/// Two hosts count in one block with Compare and Write, as clusters do; no step may be lost.
#[test]
fn counting_with_compare_and_write_loses_nothing() {
    run(|| async {
        let served = serve(short());
        let count = |mut io: Queue| async move {
            let mut done = 0;
            while done < 40 {
                let old = read(&mut io, PLAIN, 0, 1).await.ok().data;
                let mut new = old.clone();
                let value = u64::from_le_bytes(old[..8].try_into().unwrap()) + 1;
                new[..8].copy_from_slice(&value.to_le_bytes());
                match compare_and_write(&mut io, 0, 1, old, new).await {
                    (0, 0) => done += 1,
                    (0x285, 0x009) => {}
                    other => panic!("{other:x?}"),
                }
            }
        };
        let (_a, one) = Queue::pair(served.address, false).await;
        let (_b, two) = Queue::pair(served.address, false).await;
        let (one, two) = (sealblock_runtime_reactor::spawn(count(one)), sealblock_runtime_reactor::spawn(count(two)));
        one.await.unwrap();
        two.await.unwrap();
        let (_c, mut io) = Queue::pair(served.address, false).await;
        assert_eq!(read(&mut io, PLAIN, 0, 1).await.ok().data[..8], 80_u64.to_le_bytes());
    });
}

#[test]
fn hosts_are_told_of_damage_and_changes_once_they_ask_for_it() {
    run(|| async {
        let mut states = Vec::new();
        let served = serve_with(short(), |_| {
            let device = Rc::new(MemoryDevice::new(BlockSize::B4096, BLOCKS, Some(format())));
            let namespace = Namespace::new(Rc::new(Gate::new("mem", Stack::new(device))), [1; 16]);
            states.push(namespace.state());
            Subsystem::new(SUBNQN.parse().unwrap(), "SN1").with_namespace(PLAIN, namespace).unwrap()
        });
        let state = states.remove(0);
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        let ask = Command::new(AdminOpcode::AsynchronousEventRequest.code(), 0);
        let waiting = admin.submit(ask, Data::None).await;
        state.report_damage(&[sealblock_block::Fault::media(Lba::new(9))]);
        let page = Controller::decode(&admin.identify(Cns::Controller, 0).await.ok().data).unwrap();
        assert_eq!(page.oaes.bits(), 0x2100);
        let config = SetFeatures { fid: 0x0B, save: false, nsid: 0, cdw11: 0x2100 };
        admin.call(config.encode(), Data::None).await.ok();
        let event = admin.done(waiting).await.ok().completion.dword0();
        assert_eq!(AsynchronousEvent::from_dword0(event), AsynchronousEvent::LBA_STATUS);
        let waiting = admin.submit(ask, Data::None).await;
        state.report_changed();
        let event = admin.done(waiting).await.ok().completion.dword0();
        assert_eq!(AsynchronousEvent::from_dword0(event), AsynchronousEvent::NAMESPACE_CHANGED);
        assert_eq!(admin.log(4, 4096).await.ok().data[..8], [PLAIN as u8, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(admin.log(4, 4096).await.ok().data[..4], [0; 4], "read once");
        // Damage that a command meets is reported once the page was read.
        let waiting = admin.submit(ask, Data::None).await;
        admin.log(0x0E, 64).await.ok();
        state.report_repaired(extent(9, 1));
        io.io(PLAIN, IoCommand::WriteUncorrectable(extent(20, 1)), Data::None).await.ok();
        state.report_damage(&[sealblock_block::Fault::media(Lba::new(30))]);
        let event = admin.done(waiting).await.ok().completion.dword0();
        assert_eq!(AsynchronousEvent::from_dword0(event), AsynchronousEvent::LBA_STATUS);
        let waiting = admin.submit(ask, Data::None).await;
        let abort = admin.call(Abort { queue: 0, cid: waiting }.encode(), Data::None).await.ok();
        assert_eq!((abort.completion.dword0(), admin.done(waiting).await.status()), (0, 0x007));
    });
}

#[test]
fn an_io_queue_can_be_disconnected_and_connected_again() {
    run(|| async {
        let served = serve(short());
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        let page = Controller::decode(&admin.identify(Cns::Controller, 0).await.ok().data).unwrap();
        assert_eq!((page.ofcs, page.oacs), (Ofcs::DISCONNECT, Oacs::GET_LBA_STATUS));
        let mut disconnect = Command::new(0x7F, u32::from(FabricsType::Disconnect.code()));
        io.call(disconnect, Data::None).await.ok();
        let mut again = Queue::open(served.address, false).await;
        while again.connect(SUBNQN, 1, admin.cntlid, 0).await.status() == 0x00C {
            sealblock_runtime_reactor::sleep(std::time::Duration::from_millis(1)).await;
        }
        write_and_read_as_ever(&mut again).await;
        disconnect.nsid = u32::from(FabricsType::PropertySet.code()).into();
        assert_eq!(again.call(disconnect, Data::None).await.status(), 0x001, "not on this queue");
        disconnect.nsid = u32::from(FabricsType::Disconnect.code()).into();
        assert_ne!(admin.call(disconnect, Data::None).await.status(), 0, "not on that one");
    });
}

#[test]
fn commands_that_wait_can_be_aborted() {
    run(|| async {
        let limits = sealblock_exports_nvme_tcp::Limits { transfer_bytes: 8192, bytes_in_flight: 0, ..short() };
        let served = serve(limits);
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        let write = |at| IoCommand::Write(blocks(at, 2)).encode(PLAIN).unwrap();
        let mut cids = Vec::new();
        for at in 0..20 {
            cids.push(io.submit(write(2 * at), Data::Write(pattern(8192, 1))).await);
        }
        let last = cids[19];
        let aborted = admin.call(Abort { queue: 1, cid: last }.encode(), Data::None).await.ok().completion.dword0();
        let status = io.done(last).await.status();
        assert_eq!(status, if aborted == 0 { 0x007 } else { 0 }, "what is said is what happens");
        for cid in &cids[..19] {
            io.done(*cid).await.ok();
        }
        assert_eq!(admin.call(Abort { queue: 1, cid: last }.encode(), Data::None).await.ok().completion.dword0(), 1);
    });
}

#[test]
fn features_that_mean_nothing_answer_so() {
    use sealblock_protocols_nvme::admin::{FeatureSelect, GetFeatures};
    run(|| async {
        let served = serve(short());
        let mut admin = Queue::admin(served.address, SUBNQN, false).await;
        let select = |fid, select, cdw11| GetFeatures { fid, select, nsid: 0, cdw11 }.encode();
        let set = |fid, cdw11, save| SetFeatures { fid, save, nsid: 0, cdw11 }.encode();
        let current = FeatureSelect::Current;
        for (fid, cdw11, value) in
            [(1, 0, 7), (2, 0, 0), (4, 0, 0xFFFF), (4, 1 << 20, 0), (5, 0, 0), (10, 0, 0), (21, 0, 0)]
        {
            assert_eq!(
                admin.call(select(fid, current, cdw11), Data::None).await.ok().completion.dword0(),
                value,
                "{fid}"
            );
            assert_eq!(admin.call(set(fid, 0, true), Data::None).await.status(), 0x10D, "{fid} is not saved");
        }
        for (fid, good, bad, status) in
            [(1, 7, 0, 0x10E), (2, 0, 1, 0x002), (5, 0, 1 << 16, 0x002), (4, 300, 3 << 16, 0x002)]
        {
            admin.call(set(fid, good, false), Data::None).await.ok();
            assert_eq!(admin.call(set(fid, bad, false), Data::None).await.status(), status, "{fid}");
        }
        assert_eq!(admin.call(select(4, current, 0), Data::None).await.ok().completion.dword0(), 300);
        assert_eq!(admin.call(select(4, FeatureSelect::Default, 0), Data::None).await.ok().completion.dword0(), 0xFFFF);
        for (fid, value) in [(21, 0x0000_0005), (10, 1)] {
            admin.call(set(fid, 0x0007_0005, false), Data::None).await.ok();
            assert_eq!(admin.call(select(fid, current, 0), Data::None).await.ok().completion.dword0(), value);
        }
        for (fid, value) in [(1, 0), (5, 2), (6, 4), (21, 4)] {
            let done = admin.call(select(fid, FeatureSelect::Capabilities, 0), Data::None).await.ok();
            assert_eq!(done.completion.dword0(), value, "{fid}");
        }
        assert_eq!(admin.call(select(0x10, current, 0), Data::None).await.status(), 0x002, "no thermal management");
        let page = admin.log(0x12, 1024).await.ok().data;
        assert_eq!((page[4], page[0x15 * 4], page[0x10 * 4], page[5 * 4 + 2]), (1, 1, 0, 0x10));
        let pages = admin.log(0, 1024).await.ok().data;
        let listed: Vec<u8> = (0..=255_u8).filter(|lid| pages[usize::from(*lid) * 4] != 0).collect();
        assert_eq!(listed, [0, 1, 2, 3, 4, 5, 0x0E, 0x12, 0xC0]);
    });
}
