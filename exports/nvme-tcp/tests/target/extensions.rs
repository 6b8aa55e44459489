//! Vendor extensions of sealblock, over loopback sockets: the command Digest, the reserved area, and their log page.

use crate::common::fixed::Fixed;
use crate::common::requests::*;
use crate::common::*;
use sealblock_block::{Ability, Device, DynDevice, RequestKind};
use sealblock_exports_nvme_tcp::Namespace;
use sealblock_integrity::{ChecksumKind, Field, guard};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::Corruption;
use sealblock_media_null::NullDevice;
use sealblock_protocols_nvme::Command;
use sealblock_protocols_nvme::admin::{FeatureSelect, GetFeatures, GetLogPage, SetFeatures};
use sealblock_protocols_nvme::extensions::{Extensions, ExtensionsLog, ReservedArea};
use sealblock_protocols_nvme::features::FeatureCapabilities;
use sealblock_protocols_nvme::logs::{EffectsLog, lists_log_page};
use sealblock_protocols_nvme::nvm::{BlockCommand, Checksum, IoCommand};
use sealblock_units::{BlockSize, Lba};

/// A namespace whose device has no reserved area and computes checksums by reading.
const SMALL: u32 = 6;
/// A read-only one.
const FIXED: u32 = 7;

fn published(device: impl Device + 'static) -> SharedDevice {
    SharedDevice::publish(DynDevice::new("device", device))
}

fn serve_all() -> Served {
    serve_with(short(), |subsystem| {
        let small = NullDevice::new(BlockSize::B4096, 64, None);
        assert_eq!(
            (small.abilities().get(RequestKind::Checksum), small.abilities().get(RequestKind::ReadReserved)),
            (Ability::Absent, Ability::Absent)
        );
        let fixed = Fixed::new();
        subsystem
            .with_namespace(SMALL, Namespace::new(published(small), [6; 16]))
            .and_then(|all| all.with_namespace(FIXED, Namespace::new(published(fixed), [7; 16])))
            .unwrap()
    })
}

async fn digest(io: &mut Queue, nsid: u32, blocks: BlockCommand) -> Done {
    io.io(nsid, checksum(blocks), Data::None).await
}

fn get(slot: ReservedArea, nsid: u32, select: FeatureSelect) -> Command {
    GetFeatures { fid: slot.feature().code(), select, nsid, cdw11: 0 }.encode()
}

async fn read_slot(admin: &mut Queue, slot: ReservedArea, nsid: u32) -> Vec<u8> {
    let done = admin.call(get(slot, nsid, FeatureSelect::Current), Data::Read(slot.frame_bytes())).await.ok();
    slot.decode(&done.data).unwrap().to_vec()
}

async fn write_frame(admin: &mut Queue, slot: ReservedArea, nsid: u32, frame: Vec<u8>) -> u16 {
    let set = SetFeatures { fid: slot.feature().code(), save: false, nsid, cdw11: 0 };
    admin.call(set.encode(), Data::Write(frame)).await.status()
}

#[test]
fn a_checksum_is_the_crc_of_the_data_on_every_kind_of_namespace() {
    for digests in [false, true] {
        run(|| async move {
            let served = serve_all();
            let (_admin, mut io) = Queue::pair(served.address, digests).await;
            for nsid in [PLAIN, PROTECTED, BARE] {
                let data = write(&mut io, nsid, 3, 64, nsid as u8).await;
                let range = if nsid == PROTECTED { with_checks(blocks(3, 64)) } else { blocks(3, 64) };
                let done = digest(&mut io, nsid, range).await.ok();
                assert_eq!(done.completion.result.get(), guard::crc64(&data), "namespace {nsid}");
                assert!(done.data.is_empty());
                let asked = Checksum { blocks: range, kind: ChecksumKind::Crc32c };
                let done = io.io(nsid, IoCommand::Checksum(asked), Data::None).await.ok();
                let crc32c = u64::from(guard::crc32c(&data));
                assert_eq!(done.completion.result.get(), 1 << 32 | crc32c, "namespace {nsid}");
            }
            // The gate emulates it for a device without it.
            let total = digest(&mut io, SMALL, blocks(0, 64)).await.ok().completion.result.get();
            assert_eq!(total, guard::crc64(&vec![0; 64 << 12]));
            let asked = Checksum { blocks: blocks(0, 64), kind: ChecksumKind::Crc32c };
            let total = io.io(SMALL, IoCommand::Checksum(asked), Data::None).await.ok().completion.result.get();
            assert_eq!(asked.checksum(total), Some(ChecksumKind::Crc32c.of_zeroes(64 << 12)));
        });
    }
}

#[test]
fn unknown_kinds_of_checksums_are_invalid_fields_and_name_theirs() {
    run(|| async {
        let served = serve_all();
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        for nsid in [PLAIN, PROTECTED, BARE, SMALL, FIXED] {
            for (kind, status) in [
                (0, 0),
                (1, 0),
                (2, 2),
                (3, 2),
                (0x10, 2),
                (0x80, 2),
                (0x100, 2),
                (0x0101, 2),
                (1 << 31, 2),
                (u32::MAX, 2),
            ] {
                let mut command = checksum(blocks(0, 1)).encode(nsid).unwrap();
                command.cdw13.set(kind);
                assert_eq!(io.call(command, Data::None).await.status(), status, "namespace {nsid}, kind {kind:#x}");
                if status != 0 {
                    assert_eq!(admin.newest_error().await.parameter_error_location & 0xFF, 52);
                }
            }
        }
    });
}

#[test]
fn a_checksum_of_bad_blocks_fails_as_a_verify_does() {
    run(|| async {
        let served = serve_all();
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        for (nsid, device) in [(PLAIN, &served.plain), (PROTECTED, &served.protected)] {
            write(&mut io, nsid, 0, 8, 1).await;
            let range = |start, count| match nsid {
                PROTECTED => with_checks(blocks(start, count)),
                _ => blocks(start, count),
            };
            let harm = [
                (Corruption::Data { at: 9, mask: 1 }, 0x282, Field::Guard),
                (Corruption::Tag { at: 7, mask: 1 }, 0x284, Field::RefTag),
            ];
            for (damage, status, field) in harm {
                assert!(device.damage(Lba::new(5), damage));
                for make in [IoCommand::Verify, checksum] {
                    let done = io.io(nsid, make(range(0, 8)), Data::None).await;
                    assert_eq!((done.status(), done.completion.result.get()), (status, 0));
                    let entry = admin.newest_error().await;
                    assert_eq!((entry.lba, entry.nsid, entry.sqid, entry.vendor_information), (5, nsid, 1, 0xC0));
                    let known = damage_log(&mut admin, nsid).await.entries;
                    assert_eq!((known.len(), known[0].lba.get(), known[0].field), (1, 5, Some(field)));
                }
                digest(&mut io, nsid, range(0, 5)).await.ok();
                assert_eq!(damage_log(&mut admin, nsid).await.entries.len(), 1, "not looked at");
                assert!(device.damage(Lba::new(5), damage), "the same again undoes it");
                digest(&mut io, nsid, range(0, 8)).await.ok();
                assert!(damage_log(&mut admin, nsid).await.entries.is_empty(), "found good");
            }
        }
        assert_eq!(digest(&mut io, PLAIN, blocks(BLOCKS - 1, 1)).await.status(), 0);
        assert_eq!(digest(&mut io, PLAIN, blocks(BLOCKS - 1, 2)).await.status(), 0x080);
        assert_eq!(digest(&mut io, 3, blocks(0, 1)).await.status(), 0x002);
        // A data length that has no effect, as with Verify.
        io.io(PLAIN, checksum(blocks(0, 1)), Data::Read(4096)).await.ok();
    });
}

#[test]
fn the_extensions_page_describes_each_namespace_and_the_effects_list_the_command() {
    run(|| async {
        let served = serve_all();
        let mut admin = Queue::admin(served.address, SUBNQN, false).await;
        let small = Extensions::CHECKSUM | Extensions::CHECKSUM_CRC32C | Extensions::COVERAGE | Extensions::FENCE;
        let bare = small | Extensions::RESERVED;
        let sealed = bare | Extensions::SEALS;
        let shown = sealed | Extensions::ESCAPES;
        for (nsid, has) in [(PLAIN, sealed), (PROTECTED, shown), (BARE, bare), (SMALL, small), (FIXED, bare)] {
            let ask = GetLogPage { nsid, ..GetLogPage::new(0xC1, 64) };
            let page = admin.call(ask.encode(), Data::Read(64)).await.ok().data;
            assert_eq!(ExtensionsLog::read(&page, nsid), has, "namespace {nsid}");
        }
        for (nsid, status) in [(0, 0x00B), (3, 0x002), (u32::MAX, 0x00B)] {
            let ask = GetLogPage { nsid, ..GetLogPage::new(0xC1, 64) };
            assert_eq!(admin.call(ask.encode(), Data::Read(64)).await.status(), status);
        }
        assert!(lists_log_page(&admin.log(0, 1024).await.ok().data, 0xC1));
        let effects = EffectsLog::decode(&admin.log(5, 4096).await.ok().data).unwrap();
        assert_eq!(effects.io(0xC0).bits(), 1, "supported, changes nothing");
        let features = admin.log(0x12, 1024).await.ok().data;
        for slot in ReservedArea::ALL {
            let at = usize::from(slot.feature().code()) * 4;
            assert_eq!(features[at..at + 4], [1, 0, 0x10, 0]);
            let can = admin.call(get(slot, PLAIN, FeatureSelect::Capabilities), Data::None).await.ok();
            let wanted = FeatureCapabilities::NAMESPACE_SPECIFIC | FeatureCapabilities::CHANGEABLE;
            assert_eq!(can.completion.dword0(), wanted.bits());
        }
        let mut discovery = Queue::admin(served.address, "nqn.2014-08.org.nvmexpress.discovery", false).await;
        assert_eq!(discovery.log(0xC1, 64).await.status(), 0x109);
        let ask = get(ReservedArea::Scrub, PLAIN, FeatureSelect::Current);
        assert_eq!(discovery.call(ask, Data::Read(8192)).await.status(), 0x002);
    });
}

#[test]
fn reserved_areas_keep_the_last_write() {
    for digests in [false, true] {
        run(|| async move {
            let served = serve_all();
            let (mut admin, _io) = Queue::pair(served.address, digests).await;
            for slot in ReservedArea::ALL {
                assert!(read_slot(&mut admin, slot, PLAIN).await.is_empty());
                for len in [1, slot.max_bytes(), 0, 100] {
                    let bytes = pattern(len, slot.feature().code());
                    let frame = slot.encode(&bytes).unwrap();
                    assert_eq!(write_frame(&mut admin, slot, PLAIN, frame).await, 0);
                    assert!(read_slot(&mut admin, slot, PLAIN).await == bytes);
                }
                let value = get(slot, PLAIN, FeatureSelect::Default);
                let done = admin.call(value, Data::Read(slot.frame_bytes())).await.ok();
                assert_eq!(slot.decode(&done.data), Ok([].as_slice()), "a new namespace has nothing");
            }
            for slot in ReservedArea::ALL {
                let bytes = pattern(100, slot.feature().code());
                assert!(read_slot(&mut admin, slot, PLAIN).await == bytes, "each slot has its own");
                assert!(read_slot(&mut admin, slot, BARE).await.is_empty(), "and each namespace");
            }
            let mut other = Queue::admin(served.address, SUBNQN, digests).await;
            assert!(read_slot(&mut other, ReservedArea::Scrub, PLAIN).await == pattern(100, 0xC1));
        });
    }
}

#[test]
fn invalid_frames_and_areas_fail_and_change_nothing() {
    run(|| async {
        let served = serve_all();
        let mut admin = Queue::admin(served.address, SUBNQN, false).await;
        for slot in ReservedArea::ALL {
            let good = slot.encode(b"kept").unwrap();
            assert_eq!(write_frame(&mut admin, slot, PLAIN, good.clone()).await, 0);
            for at in [0, 8, 10, 12, 15, 16, 64] {
                let mut bad = good.clone();
                bad[at] ^= 0xFF;
                assert_eq!(write_frame(&mut admin, slot, PLAIN, bad).await, 0x002, "byte {at}");
            }
            for len in [4, 64, good.len() - 4, good.len() + 4, 256 << 10] {
                assert_eq!(write_frame(&mut admin, slot, PLAIN, vec![0; len]).await, 0x00F, "{len} bytes");
            }
            for (nsid, status) in [(SMALL, 0x002), (FIXED, 0x020), (0, 0x00B), (3, 0x002), (u32::MAX, 0x00B)] {
                assert_eq!(write_frame(&mut admin, slot, nsid, good.clone()).await, status, "namespace {nsid}");
            }
            let save = SetFeatures { fid: slot.feature().code(), save: true, nsid: PLAIN, cdw11: 0 }.encode();
            assert_eq!(admin.call(save, Data::Write(good.clone())).await.status(), 0x10D);
            for (nsid, status) in [(SMALL, 0x002), (0, 0x00B), (3, 0x002)] {
                for select in [FeatureSelect::Current, FeatureSelect::Default] {
                    let done = admin.call(get(slot, nsid, select), Data::Read(good.len())).await;
                    assert_eq!(done.status(), status, "namespace {nsid}");
                }
            }
            let short = admin.call(get(slot, PLAIN, FeatureSelect::Current), Data::Read(4096)).await;
            assert_eq!(short.status(), 0x00F);
            assert!(read_slot(&mut admin, slot, FIXED).await.is_empty());
            assert_eq!(read_slot(&mut admin, slot, PLAIN).await, b"kept");
        }
    });
}
