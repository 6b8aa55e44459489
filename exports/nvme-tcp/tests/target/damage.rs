//! Write Uncorrectable, and the commands and logs that report bad blocks, over loopback sockets.

use crate::common::requests::*;
use crate::common::*;
use sealblock_block::DynDevice;
use sealblock_exports_nvme_tcp::{MAX_BAD_BLOCKS, Namespace, Subsystem};
use sealblock_integrity::Field;
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::{Corruption, MemoryDevice};
use sealblock_media_null::NullDevice;
use sealblock_protocols_nvme::admin::{Cns, GetLogPage};
use sealblock_protocols_nvme::identify::{Controller, Oncs};
use sealblock_protocols_nvme::logs::{DamageLog, EffectsLog, LbaStatusLog, LbaStatusRanges};
use sealblock_protocols_nvme::nvm::{
    BlockCommand, DatasetManagement, DsmRange, GetLbaStatus, IoCommand, LbaStatusAction, LbaStatusFlags, LbaStatusList,
    Prchk, ProtectionInfo, WriteZeroes,
};
use sealblock_units::{BlockSize, Lba};
use std::rc::Rc;
use zerocopy::IntoBytes;

async fn status(admin: &mut Queue, nsid: u32, action: LbaStatusAction, start: u64, blocks: u16, bytes: u64) -> Done {
    let ask = GetLbaStatus { start: Lba::new(start), max_bytes: bytes, action, range_blocks: blocks };
    admin.call(ask.encode(nsid), Data::Read(bytes as usize)).await
}

fn runs(done: Done) -> (Vec<(u64, u64)>, bool) {
    let list = LbaStatusList::decode(&done.ok().data).unwrap();
    let run = |run: &sealblock_protocols_nvme::nvm::LbaStatusDescriptor| (run.extent.start().get(), run.extent.len());
    (list.descriptors.iter().map(run).collect(), list.complete)
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

/// A command over eight blocks that expects these tags.
fn expecting(app_tag: u16, first_ref: u64) -> BlockCommand {
    let prchk = Prchk::GUARD | Prchk::APPLICATION_TAG | Prchk::REFERENCE_TAG;
    let protection = ProtectionInfo { pract: true, prchk, lbat: app_tag, lbatm: u16::MAX, ..ProtectionInfo::NONE };
    BlockCommand { protection: protection.with_tags(format(), 0, first_ref), ..blocks(0, 8) }
}

#[test]
fn only_a_failure_of_the_devices_own_check_is_damage() {
    run(|| async {
        let served = serve(short());
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        write(&mut io, PROTECTED, 0, 8, 1).await;
        io.io(PROTECTED, IoCommand::Read(expecting(0, 0)), Data::Read(8 * 4096)).await.ok();
        for make in [IoCommand::Verify, checksum, IoCommand::Read] {
            let data =
                || if matches!(make(blocks(0, 8)), IoCommand::Read(_)) { Data::Read(8 * 4096) } else { Data::None };
            assert_eq!(io.io(PROTECTED, make(expecting(7, 0)), data()).await.status(), 0x283);
            assert_eq!(admin.newest_error().await.lba, 0, "the host learns where its expectation failed");
            assert!(damage_log(&mut admin, PROTECTED).await.entries.is_empty());
            let tracked = status(&mut admin, PROTECTED, LbaStatusAction::Tracked, 0, 0, 4096).await;
            assert_eq!(runs(tracked), (vec![], true));
        }
        // The same expectation together with real damage, which is reported first: a guard, and a reference tag of Type
        // 1, which is the address.
        let tuple = format().tuple_bytes();
        assert!(served.protected.damage(Lba::new(3), Corruption::Data { at: 7, mask: 1 }));
        assert!(served.protected.damage(Lba::new(5), Corruption::Tag { at: tuple - 1, mask: 1 }));
        assert_eq!(io.io(PROTECTED, IoCommand::Verify(expecting(7, 0)), Data::None).await.status(), 0x282);
        let found: Vec<_> =
            damage_log(&mut admin, PROTECTED).await.entries.iter().map(|of| (of.lba.get(), of.field)).collect();
        assert_eq!(found, [(3, Some(Field::Guard)), (5, Some(Field::RefTag))]);
    });
}

#[test]
fn write_uncorrectable_is_invalid_without_the_ability() {
    run(|| async {
        let null = NullDevice::new(BlockSize::B4096, 64, None);
        let served = serve_with(short(), |_| {
            let namespace = Namespace::new(SharedDevice::publish(DynDevice::new("null", null)), [7; 16]);
            Subsystem::new(SUBNQN.parse().unwrap(), "SN1").with_namespace(1, namespace).unwrap()
        });
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        assert_eq!(io.io(1, IoCommand::WriteUncorrectable(extent(0, 1)), Data::None).await.status(), 0x001);
        let page = Controller::decode(&admin.identify(Cns::Controller, 0).await.ok().data).unwrap();
        assert!(!page.oncs.contains(Oncs::WRITE_UNCORRECTABLE) && page.oncs.contains(Oncs::COPY | Oncs::VERIFY));
        let effects = EffectsLog::decode(&admin.log(5, 4096).await.ok().data).unwrap();
        assert_eq!((effects.io(0x04).bits(), effects.io(0x19).bits()), (0, 3));
    });
}

/// A part of the damage log.
async fn part(admin: &mut Queue, nsid: u32, offset: u64, bytes: usize) -> Vec<u8> {
    let ask = GetLogPage { nsid, offset, ..GetLogPage::new(0xC0, bytes as u64) };
    admin.call(ask.encode(), Data::Read(bytes)).await.ok().data.to_vec()
}

#[test]
fn parts_of_one_read_are_of_one_state_and_a_new_read_has_the_new_one() {
    run(|| async {
        let served = serve(short());
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        let (mut other, _other_io) = Queue::pair(served.address, false).await;
        let bad = |page: &[u8]| -> Vec<u64> {
            DamageLog::decode(page).unwrap().entries.iter().map(|entry| entry.lba.get()).collect()
        };
        io.io(PLAIN, IoCommand::WriteUncorrectable(extent(8, 4)), Data::None).await.ok();
        let mut page = part(&mut admin, PLAIN, 0, 32).await;
        page.extend(part(&mut admin, PLAIN, 32, 32).await);
        // One in front of those that are not read yet, and one leaves.
        io.io(PLAIN, IoCommand::WriteUncorrectable(extent(2, 1)), Data::None).await.ok();
        write(&mut io, PLAIN, 9, 1, 1).await;
        let now = part(&mut other, PLAIN, 0, 160).await;
        assert_eq!(bad(&now), [2, 8, 10, 11], "a read of another host begins now");
        page.extend(part(&mut admin, PLAIN, 64, 32).await);
        page.extend(part(&mut admin, PLAIN, 96, 64).await);
        assert_eq!(bad(&page), [8, 9, 10, 11]);
        assert_eq!(bad(&part(&mut admin, PLAIN, 0, 160).await), [2, 8, 10, 11]);
        assert_eq!(part(&mut admin, PLAIN, 24, 8).await, now[24..32], "the generation is the new one, too");
        // Between parts of it another list is read: what follows is of now, as the generation shows.
        let head = part(&mut admin, PLAIN, 0, 32).await;
        part(&mut admin, BARE, 0, 32).await;
        write(&mut io, PLAIN, 10, 1, 1).await;
        assert!(part(&mut admin, PLAIN, 24, 8).await != head[24..]);
        assert_eq!(bad(&part(&mut admin, PLAIN, 0, 128).await), [2, 8, 11]);
    });
}

#[test]
fn one_verify_names_all_bad_blocks_in_the_logs() {
    run(|| async {
        let served = serve(short());
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        write(&mut io, PLAIN, 0, 64, 1).await;
        for (lba, damage) in [
            (3, Corruption::Data { at: 9, mask: 1 }),
            (4, Corruption::Tag { at: 7, mask: 1 }),
            (40, Corruption::Tag { at: 0, mask: 1 }),
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
        for (nsid, status) in [(3, 0x002), (u32::MAX, 0x00B), (0, 0x00B)] {
            let ask = GetLogPage { nsid, ..GetLogPage::new(0xC0, 64) };
            assert_eq!(admin.call(ask.encode(), Data::Read(64)).await.status(), status);
        }
        let page = LbaStatusLog::decode(&admin.log(0x0E, 4096).await.ok().data).unwrap();
        assert_eq!((page.estimate_blocks, page.generation, page.elements.len()), (Some(3), 1, 1));
        assert_eq!(page.elements[0].ranges, LbaStatusRanges::Ranges(vec![extent(3, 2), extent(40, 1)]));
        // An error of another kind has no entry in the damage log.
        assert_eq!(io.io(PLAIN, IoCommand::Read(blocks(BLOCKS, 1)), Data::Read(4096)).await.status(), 0x080);
        assert_eq!(admin.newest_error().await.vendor_information, 0);
    });
}

#[test]
fn damage_found_by_one_controller_is_known_to_all() {
    run(|| async {
        let served = serve(short());
        let (_admin, mut io) = Queue::pair(served.address, false).await;
        write(&mut io, PLAIN, 0, 64, 1).await;
        for lba in [3, 4, 40] {
            assert!(served.plain.damage(Lba::new(lba), Corruption::Data { at: 9, mask: 1 }));
        }
        assert_eq!(io.io(PLAIN, IoCommand::Verify(blocks(0, 64)), Data::None).await.status(), 0x282);
        let (mut other, mut other_io) = Queue::pair(served.address, true).await;
        write(&mut other_io, PLAIN, 4, 1, 5).await;
        assert_eq!(
            runs(status(&mut other, PLAIN, LbaStatusAction::Tracked, 0, 0, 4096).await),
            (vec![(3, 1), (40, 1)], true)
        );
        assert_eq!(runs(status(&mut other, PLAIN, LbaStatusAction::Tracked, 0, 40, 4096).await), (vec![(3, 1)], true));
        assert_eq!(runs(status(&mut other, PLAIN, LbaStatusAction::Tracked, 0, 0, 24).await), (vec![(3, 1)], false));
    });
}

#[test]
fn a_scan_finds_damage_in_blocks_that_were_never_read() {
    run(|| async {
        let served = serve(short());
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        write(&mut io, PROTECTED, 0, 64, 1).await;
        write(&mut io, PROTECTED, 3000, 64, 1).await;
        for lba in [7, 9, 3001] {
            assert!(served.protected.damage(Lba::new(lba), Corruption::Data { at: 1, mask: 1 }));
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
        // Repairs the block below the target, and verifies it again.
        served.protected.damage(Lba::new(9), Corruption::Data { at: 1, mask: 1 });
        assert_eq!(runs(status(&mut admin, PROTECTED, scan, 0, 0, 4096).await), (vec![(7, 1), (3001, 1)], true));
        assert_eq!(status(&mut admin, PROTECTED, scan, BLOCKS, 1, 64).await.status(), 0x080);
        assert_eq!(status(&mut admin, 3, scan, 0, 1, 64).await.status(), 0x002);
        assert_eq!(status(&mut admin, PROTECTED, LbaStatusAction::Allocated, 0, 1, 64).await.status(), 0x002);
        assert_eq!(admin.newest_error().await.parameter_error_location, 55, "ATYPE");
    });
}

#[test]
fn more_bad_blocks_than_fit_are_reported_as_an_overflow() {
    run(|| async {
        let big = Rc::new(MemoryDevice::new(BlockSize::B512, 40_000, None));
        let served = serve_with(short(), |_| {
            let namespace = Namespace::new(SharedDevice::publish(DynDevice::new("mem", Rc::clone(&big))), [7; 16]);
            Subsystem::new(SUBNQN.parse().unwrap(), "SN1").with_namespace(1, namespace).unwrap()
        });
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        io.io(1, IoCommand::WriteUncorrectable(extent(0, MAX_BAD_BLOCKS as u64 + 1)), Data::None).await.ok();
        let page = LbaStatusLog::decode(&admin.log(0x0E, 4096).await.ok().data).unwrap();
        assert_eq!((page.estimate_blocks, &page.elements[0].ranges), (None, &LbaStatusRanges::WholeNamespace));
        assert_eq!(page.elements[0].action, LbaStatusAction::ScanUntracked);
        let (found, complete) = runs(status(&mut admin, 1, LbaStatusAction::Tracked, 0, 0, 64).await);
        assert_eq!((found, complete), (vec![(0, MAX_BAD_BLOCKS as u64)], false));
        // The page is larger than what a host reads at once.
        let bytes = 32 + 32 * MAX_BAD_BLOCKS;
        let mut whole = Vec::new();
        while whole.len() < bytes {
            let length = (bytes - whole.len()).min(100_000);
            let ask = GetLogPage { nsid: 1, offset: whole.len() as u64, ..GetLogPage::new(0xC0, length as u64) };
            whole.extend(admin.call(ask.encode(), Data::Read(length)).await.ok().data);
        }
        let log = DamageLog::decode(&whole).unwrap();
        assert!(log.overflowed && log.entries.len() == MAX_BAD_BLOCKS && log.entries[9].write_uncorrectable);
    });
}
