//! A device's own check, which no PRCHK disables, and what a host expects of tags, which is not damage.

use std::rc::Rc;

use sealblock_block::DynDevice;
use sealblock_exports_nvme_tcp::{Namespace, NamespaceState, PiVisibility};
use sealblock_integrity::{Field, GuardKind, PiFormat, ProtectionType};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::{Corruption, MemoryDevice};
use sealblock_protocols_nvme::admin::SetFeatures;
use sealblock_protocols_nvme::logs::Health;
use sealblock_protocols_nvme::nvm::{BlockCommand, GetLbaStatus, IoCommand, LbaStatusAction, LbaStatusList};
use sealblock_protocols_nvme::nvm::{Prchk, ProtectionInfo};
use sealblock_protocols_nvme::{AdminOpcode, Command};
use sealblock_units::{BlockSize, Lba};

use crate::common::requests::*;
use crate::common::*;

const OWN: u32 = 9;
const COUNT: u64 = 8;

struct Shown {
    served: Served,
    device: Rc<MemoryDevice>,
    state: std::sync::Arc<NamespaceState>,
}

/// A target with one more namespace, with visible tags.
fn serve_shown(format: PiFormat) -> Shown {
    let device = Rc::new(MemoryDevice::new(BlockSize::B4096, BLOCKS, Some(format)));
    let published = SharedDevice::publish(DynDevice::new("own", Rc::clone(&device)));
    let namespace = Namespace::new(published, [9; 16]).with_visibility(PiVisibility::Protected).unwrap();
    let state = namespace.state();
    let served = serve_with(short(), |subsystem| subsystem.with_namespace(OWN, namespace).unwrap());
    Shown { served, device, state }
}

fn command(format: PiFormat, prchk: Prchk, app_tag: u16, first_ref: u64) -> BlockCommand {
    let protection = ProtectionInfo { pract: true, prchk, lbat: app_tag, lbatm: u16::MAX, ..ProtectionInfo::NONE };
    BlockCommand { protection: protection.with_tags(format, 0, first_ref), ..blocks(0, COUNT) }
}

/// The statuses of a Read, a Verify and a Checksum.
async fn statuses(io: &mut Queue, asked: BlockCommand) -> [u16; 3] {
    let read = io.io(OWN, IoCommand::Read(asked), Data::Read(COUNT as usize * 4096)).await.status();
    let verify = io.io(OWN, IoCommand::Verify(asked), Data::None).await.status();
    [read, verify, io.io(OWN, checksum(asked), Data::None).await.status()]
}

async fn media_errors(admin: &mut Queue) -> u128 {
    Health::decode(&admin.log(2, 512).await.ok().data).unwrap().media_errors
}

async fn listed(admin: &mut Queue) -> Vec<(u64, Option<Field>)> {
    damage_log(admin, OWN).await.entries.iter().map(|entry| (entry.lba.get(), entry.field)).collect()
}

#[test]
fn rot_is_found_with_prchk_0_whatever_the_guard() {
    run(|| async {
        for guard in [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64] {
            let format = PiFormat::with_default_storage_tag(guard, ProtectionType::Type1);
            let Shown { served, device, .. } = serve_shown(format);
            let (mut admin, mut io) = Queue::pair(served.address, false).await;
            let none = command(format, Prchk::NONE, 0, 0);
            let data = pattern(COUNT as usize * 4096, 1);
            io.io(OWN, IoCommand::Write(none), Data::Write(data)).await.ok();
            assert_eq!(statuses(&mut io, none).await, [0; 3], "{guard:?}");
            assert!(device.damage(Lba::new(5), Corruption::Data { at: 77, mask: 4 }));
            assert_eq!(statuses(&mut io, none).await, [0x282; 3], "{guard:?}");
            assert_eq!(listed(&mut admin).await, [(5, Some(Field::Guard))], "{guard:?}");
            assert_eq!(media_errors(&mut admin).await, 3);
        }
    });
}

#[test]
fn a_tag_that_a_host_does_not_expect_leaves_no_trace_of_damage() {
    run(|| async {
        let format = PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type2);
        let Shown { served, state, .. } = serve_shown(format);
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        let config = SetFeatures { fid: 0x0B, save: false, nsid: 0, cdw11: 0x2100 };
        admin.call(config.encode(), Data::None).await.ok();
        let ask = Command::new(AdminOpcode::AsynchronousEventRequest.code(), 0);
        let waiting = admin.submit(ask, Data::None).await;
        let write = IoCommand::Write(command(format, Prchk::NONE, 7, 100));
        io.io(OWN, write, Data::Write(pattern(COUNT as usize * 4096, 1))).await.ok();

        let all = Prchk::GUARD | Prchk::APPLICATION_TAG | Prchk::REFERENCE_TAG;
        assert_eq!(statuses(&mut io, command(format, all, 7, 100)).await, [0; 3]);
        assert_eq!(statuses(&mut io, command(format, all, 8, 100)).await, [0x283; 3], "LBAT");
        assert_eq!(admin.newest_error().await.lba, 0, "the host learns where its expectation failed");
        assert_eq!(statuses(&mut io, command(format, all, 7, 101)).await, [0x284; 3], "ILBRT");
        // A Write whose tags do not match its data is refused, and this is not damage either.
        let sealed = BlockCommand {
            protection: ProtectionInfo { pract: false, ..command(format, Prchk::GUARD, 7, 100).protection },
            ..blocks(0, COUNT)
        };
        let extended = vec![1; COUNT as usize * (4096 + format.tuple_bytes())];
        assert_eq!(io.io(OWN, IoCommand::Write(sealed), Data::Write(extended)).await.status(), 0x282);

        assert_eq!((listed(&mut admin).await, media_errors(&mut admin).await), (Vec::new(), 0));
        let tracked =
            GetLbaStatus { start: Lba::ZERO, max_bytes: 4096, action: LbaStatusAction::Tracked, range_blocks: 0 };
        let tracked = admin.call(tracked.encode(OWN), Data::Read(4096)).await.ok().data;
        assert!(LbaStatusList::decode(&tracked).unwrap().descriptors.is_empty());
        assert_eq!(state.damage().runs().len(), 0);
        assert!(!admin.is_done(waiting), "no event");
        // The counterpart: a block that is bad does cause the event.
        state.report_damage(&[sealblock_block::BadBlock::media(Lba::new(3))]);
        admin.done(waiting).await.ok();
        assert_eq!(listed(&mut admin).await, [(3, None)]);
    });
}

/// Blocks 0 to 7 have tags, 8 to 15 were never written.
#[test]
fn blocks_that_disable_checks_fail_only_where_the_command_says_so() {
    run(|| async {
        let format = PiFormat::new(GuardKind::Crc64, ProtectionType::Type1, 16).unwrap();
        let Shown { served, .. } = serve_shown(format);
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        let app = Prchk::APPLICATION_TAG;
        let check = |storage, app_tag, checks_escapes, blocks| {
            let protection =
                ProtectionInfo { stc: true, checks_escapes, ..command(format, app, app_tag, 0).protection };
            BlockCommand { protection: protection.with_tags(format, storage, 0), ..blocks }
        };
        let write = IoCommand::Write(check(9, 7, false, blocks(0, COUNT)));
        io.io(OWN, write, Data::Write(pattern(COUNT as usize * 4096, 1))).await.ok();
        for (storage, app_tag, escapes, range, status, lba) in [
            (9, 7, true, (0, 8), 0, 0),
            (9, 7, false, (0, 16), 0, 0),
            (9, 7, true, (0, 16), 0x283, 8),
            (9, 7, true, (12, 1), 0x283, 12),
            (9, 8, true, (3, 2), 0x283, 3),
            (8, 7, true, (2, 9), 0x288, 2),
        ] {
            let asked = check(storage, app_tag, escapes, blocks(range.0, range.1));
            for asked in [IoCommand::Verify(asked), checksum(asked)] {
                let found = io.io(OWN, asked, Data::None).await.status();
                assert_eq!(found, status, "{app_tag} {storage} {escapes} {range:?}");
                assert!(status == 0 || admin.newest_error().await.lba == lba, "{range:?}");
            }
        }
        // A Read makes the same checks.
        for (escapes, status) in [(false, 0), (true, 0x283)] {
            let read = IoCommand::Read(check(9, 7, escapes, blocks(0, 16)));
            assert_eq!(io.io(OWN, read, Data::Read(16 * 4096)).await.status(), status);
        }
        // In Compare the bit is reserved.
        let mut compare = IoCommand::Compare(check(9, 7, false, blocks(8, 1))).encode(OWN).unwrap();
        compare.cdw12 |= zerocopy::little_endian::U32::new(1 << 25);
        assert_eq!(io.call(compare, Data::Write(vec![0; 4096])).await.status(), 0);
        assert_eq!((listed(&mut admin).await, media_errors(&mut admin).await), (Vec::new(), 0), "no damage");
    });
}

#[test]
fn a_namespace_without_visible_tags_refuses_the_check_of_blocks_that_disable_checks() {
    run(|| async {
        let served = serve_with(short(), |subsystem| subsystem);
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        for nsid in [PLAIN, BARE, PROTECTED] {
            let protection = ProtectionInfo { checks_escapes: true, ..ProtectionInfo::NONE };
            let asked = BlockCommand { protection, ..blocks(0, 4) };
            for asked in [IoCommand::Verify(asked), checksum(asked)] {
                let status = io.io(nsid, asked, Data::None).await.status();
                assert_eq!(status, if nsid == PROTECTED { 0 } else { 0x002 }, "namespace {nsid}");
                if nsid != PROTECTED {
                    // Bit 1 of byte 51: bit 25 of dword 12.
                    assert_eq!(admin.newest_error().await.parameter_error_location, 51 | 1 << 8);
                }
            }
            assert_eq!(io.io(nsid, IoCommand::Verify(blocks(0, 4)), Data::None).await.status(), 0);
        }
    });
}
