//! Checksums and the reserved area: over sealblock's target, over targets without them, and over targets whose pages
//! are invalid.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use crate::common::fake::{self, Asked, Fake, Reply, good};
use crate::common::*;
use sealblock_block::{
    Ability, Device, Error, ErrorKind, Expectations, Gate, Request, RequestKind, ReservedArea, Response,
};
use sealblock_exports_nvme_tcp::PiVisibility;
use sealblock_integrity::{ChecksumKind, guard};
use sealblock_media_memory::Corruption;
use sealblock_media_nvme_tcp::{NvmeTcpDevice, Options, PiSource};
use sealblock_protocols_nvme::StatusCode;
use sealblock_protocols_nvme::admin::AdminCommand;
use sealblock_protocols_nvme::extensions::{Extensions, ExtensionsLog, ReservedArea as Frame};
use sealblock_protocols_nvme::features::FeatureId;
use sealblock_protocols_nvme::identify::Lpa;
use sealblock_protocols_nvme::logs::{LogPage, supported_log_pages};
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent, Lba};

const BOTH: Extensions = Extensions::CHECKSUM.union(Extensions::RESERVED);

async fn digest(device: &impl Device, extent: Extent) -> Result<(u64, u64), Error> {
    digest_of(device, ChecksumKind::Crc64Nvme, extent).await
}

async fn digest_of(device: &impl Device, kind: ChecksumKind, extent: Extent) -> Result<(u64, u64), Error> {
    match device.execute(Request::checksum(extent, kind, Expectations::NONE)).await? {
        Response::Checksum(digested) => {
            assert_eq!(digested.kind, kind);
            Ok((digested.value, digested.bytes_transferred))
        }
        other => panic!("a digest is answered with one, not {other:?}"),
    }
}

async fn read_slot(device: &impl Device, slot: ReservedArea) -> Result<Vec<u8>, Error> {
    match device.execute(Request::read_reserved(slot)).await? {
        Response::Reserved(bytes) => Ok(bytes.to_vec()),
        other => panic!("a slot is answered with bytes, not {other:?}"),
    }
}

async fn write_slot(device: &impl Device, slot: ReservedArea, bytes: &[u8]) -> Result<(), Error> {
    let bytes = Slice::copy_from(bytes);
    device.execute(Request::write_reserved(slot, bytes)).await.map(drop)
}

async fn connect(fake: &Fake) -> Gate<NvmeTcpDevice> {
    let options = Options { request_timeout: Duration::from_millis(500), max_connection_losses: 2, ..options() };
    let device = NvmeTcpDevice::connect(fake.address.into(), SUBNQN.parse().unwrap(), None, options).await;
    Gate::new("fake", device.unwrap())
}

/// A fake that lists its log pages, of which C1h is `page`, and replies to other commands as `script` specifies.
fn serve_page(page: Vec<u8>, script: impl Fn(&Asked) -> Option<Reply> + 'static) -> Fake {
    let mut pages = good();
    pages.controller.lpa = Lpa::SUPPORTED_LOG_PAGES;
    fake::serve(pages, move |asked| match asked {
        Asked::Admin(AdminCommand::GetLogPage(ask)) => match LogPage::from_code(ask.lid) {
            Some(LogPage::SupportedLogPages) => Some(Reply::Data(supported_log_pages(&[LogPage::Extensions]).to_vec())),
            Some(LogPage::Extensions) => Some(Reply::Data(page.clone())),
            _ => script(asked),
        },
        other => script(other),
    })
}

fn page(extensions: Extensions) -> Vec<u8> {
    ExtensionsLog::new(1, extensions, 0).encode().to_vec()
}

#[test]
fn a_digest_is_that_of_the_data_and_moves_none() {
    run(|| async {
        let devices = [
            (BlockSize::B4096, None, PiVisibility::Plain),
            (BlockSize::B512, Some(crc16()), PiVisibility::Plain),
            (BlockSize::B4096, Some(crc16()), PiVisibility::Protected),
            (BlockSize::B4096, Some(crc32c()), PiVisibility::Protected),
        ];
        let devices = devices.map(|(size, format, shows)| (memory(size, format), shows));
        let served = serve(&devices);
        let all = [(1, PiSource::Auto), (2, PiSource::Auto), (3, PiSource::Auto), (4, PiSource::Auto)];
        for (nsid, protection) in all.into_iter().chain([(3, PiSource::Target)]) {
            for data_digest in [false, true] {
                let device = open(&served, nsid, Options { data_digest, protection, ..options() }).await;
                write(&device, extent(3, 500), nsid as u8).await.unwrap();
                let small = open(&served, nsid, Options { protection, ..options() }).await;
                let data = read(&device, extent(3, 500)).await.unwrap().joined_data();
                for kind in ChecksumKind::ALL {
                    assert_eq!(device.device().abilities().of_checksum(kind), Ability::Native);
                    let before = device.device().counters().received_bytes;
                    let sum = digest_of(&device, kind, extent(3, 500)).await.unwrap();
                    assert_eq!(device.device().counters().received_bytes, before, "nothing moves");
                    assert_eq!(sum, (kind.compute(&data), 0));
                    // As one command, or as several: it makes no difference.
                    assert_eq!(digest_of(&small, kind, extent(3, 500)).await.unwrap(), sum);
                }
            }
        }
        served.target.stop();
    });
}

#[test]
fn every_damaged_block_is_named_by_a_digest() {
    run(|| async {
        let devices = [PiVisibility::Plain, PiVisibility::Protected]
            .map(|shows| (memory(BlockSize::B4096, Some(crc16())), shows));
        let served = serve(&devices);
        for (nsid, (memory, _)) in (1..).zip(&devices) {
            let device = open(&served, nsid, options()).await;
            write(&device, extent(0, 2000), 5).await.unwrap();
            let good = digest(&device, extent(0, 2000)).await.unwrap();
            let bad = [0, 7, 8, 999, 1999];
            bad.iter().for_each(|lba| assert!(memory.damage(Lba::new(*lba), Corruption::Data { at: 1, mask: 0x10 })));
            let error = digest(&device, extent(0, 2000)).await.unwrap_err();
            let bad_blocks: Vec<_> = error.bad_blocks().unwrap().as_slice().to_vec();
            assert_eq!(bad_blocks.iter().map(|bad_block| bad_block.lba.get()).collect::<Vec<_>>(), bad);
            assert!(
                bad_blocks
                    .iter()
                    .all(|bad_block| bad_block.expected.is_some() && bad_block.expected != bad_block.actual)
            );
            let between = digest(&device, extent(9, 990)).await.unwrap();
            assert_eq!(between.0, guard::crc64(&read(&device, extent(9, 990)).await.unwrap().joined_data()));
            bad.iter().for_each(|lba| assert!(memory.damage(Lba::new(*lba), Corruption::Data { at: 1, mask: 0x10 })));
            assert_eq!(digest(&device, extent(0, 2000)).await.unwrap(), good);
        }
        served.target.stop();
    });
}

#[test]
fn slots_are_kept_by_the_device_that_is_away() {
    run(|| async {
        let devices = [
            (memory(BlockSize::B4096, None), PiVisibility::Plain),
            (memory(BlockSize::B512, None), PiVisibility::Plain),
        ];
        let served = serve(&devices);
        let (one, two) = (open(&served, 1, options()).await, open(&served, 2, options()).await);
        assert_eq!(one.device().abilities().get(RequestKind::ReadReserved), Ability::Native);
        for slot in ReservedArea::ALL {
            assert!(read_slot(&one, slot).await.unwrap().is_empty());
            for len in [1, slot.max_bytes(), 0, 100] {
                let bytes = pattern(len, len as u8);
                write_slot(&one, slot, &bytes).await.unwrap();
                assert!(read_slot(&one, slot).await.unwrap() == bytes[..]);
                assert!(read_slot(&devices[0].0, slot).await.unwrap() == bytes[..], "as it is there");
            }
            assert!(read_slot(&two, slot).await.unwrap().is_empty());
            let error = write_slot(&one, slot, &vec![0; slot.max_bytes() + 1]).await.unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Limit { .. }), "{error}");
        }
        served.target.stop();
    });
}

#[test]
fn both_are_repeated_when_the_connection_is_lost() {
    run(|| async {
        let losses = Rc::new(Cell::new(0));
        let lost = Rc::clone(&losses);
        let fake = serve_page(page(BOTH), move |asked| {
            let kind = match asked {
                Asked::Io(IoCommand::Checksum(_)) => Reply::Done(77),
                Asked::Admin(AdminCommand::SetFeatures(ask)) if ask.fid >= 0xC0 => Reply::Done(0),
                Asked::Admin(AdminCommand::GetFeatures(ask)) if ask.fid >= 0xC0 => {
                    Reply::Data(Frame::Scrub.encode(b"state").unwrap())
                }
                _ => return None,
            };
            lost.set(lost.get() + 1);
            Some(if lost.get() % 2 == 1 { Reply::Close } else { kind })
        });
        let device = connect(&fake).await;
        assert_eq!(digest(&device, extent(0, 9)).await.unwrap(), (77, 0));
        write_slot(&device, ReservedArea::ScrubState, b"state").await.unwrap();
        assert_eq!(read_slot(&device, ReservedArea::ScrubState).await.unwrap(), b"state");
        assert_eq!((losses.get(), device.device().counters().reconnects), (6, 3));
    });
}

#[test]
fn targets_that_do_not_say_that_they_have_them_are_not_asked() {
    run(|| async {
        let none = (Ability::Absent, Ability::Absent);
        let mut pages = vec![page(Extensions::NONE), page(BOTH)[..60].to_vec(), vec![0; 64], vec![0xFF; 64]];
        for (at, byte) in [(0, b'X'), (8, 2), (12, 2)] {
            pages.push(page(BOTH));
            pages.last_mut().unwrap()[at] = byte;
        }
        for (i, lie) in pages.into_iter().enumerate() {
            let device = connect(&serve_page(lie, |_| None)).await;
            let abilities = device.device().abilities();
            assert_eq!(
                (abilities.get(RequestKind::Checksum), abilities.get(RequestKind::ReadReserved)),
                none,
                "page {i}"
            );
        }
        let mut large = page(BOTH);
        large[23] = 0x7F;
        let abilities = connect(&serve_page(large, |_| None)).await.device().abilities();
        assert_eq!(
            (abilities.get(RequestKind::Checksum), abilities.get(RequestKind::ReadReserved)),
            (Ability::Native, Ability::Absent),
            "a reserved area of 2 GB"
        );
    });
}

/// A server that does not support the kind yet has a CRC-64; a CRC-32C is computed by reading the blocks.
#[test]
fn a_target_without_the_kind_is_not_asked_for_it_and_its_blocks_are_read() {
    run(|| async {
        let asked = Rc::new(RefCell::new(Vec::new()));
        let seen = Rc::clone(&asked);
        let fake = serve_page(page(Extensions::CHECKSUM), move |command| match command {
            Asked::Io(IoCommand::Checksum(asked)) => {
                seen.borrow_mut().push(asked.kind);
                Some(Reply::Done(guard::crc64(&[0; 16384])))
            }
            _ => None,
        });
        let device = connect(&fake).await;
        let how = ChecksumKind::ALL.map(|kind| device.abilities().of_checksum(kind));
        assert_eq!(how, [Ability::Native, Ability::Emulated]);
        for kind in ChecksumKind::ALL {
            let moved = if kind == ChecksumKind::Crc64Nvme { 0 } else { 16384 };
            let found = digest_of(&device, kind, extent(0, 4)).await.unwrap();
            assert_eq!(found, (kind.compute(&[0; 16384]), moved), "{kind}");
        }
        assert_eq!(*asked.borrow(), [ChecksumKind::Crc64Nvme]);
    });
}

#[test]
fn an_answer_of_another_kind_is_no_checksum() {
    run(|| async {
        let offered = Extensions::CHECKSUM | Extensions::CHECKSUM_CRC32C;
        for (answer, fits) in [(0x1_E306_9283, true), (0xE306_9283, false), (0xAE8B_1486_0A79_9888, false)] {
            let fake = serve_page(page(offered), move |command| match command {
                Asked::Io(IoCommand::Checksum(_)) => Some(Reply::Done(answer)),
                _ => None,
            });
            match digest_of(&connect(&fake).await, ChecksumKind::Crc32c, extent(0, 4)).await {
                Ok(found) => assert!(fits && found == (0xE306_9283, 0), "{found:?}"),
                Err(error) => assert!(!fits && error.to_string().contains("of another kind"), "{error}"),
            }
        }
    });
}

#[test]
fn nothing_of_ours_goes_to_targets_that_do_not_list_the_page() {
    run(|| async {
        // Without the list of pages, or if the page is not in it; digests are computed by reading.
        for lists in [false, true] {
            let asked = Rc::new(Cell::new(false));
            let seen = Rc::clone(&asked);
            let mut pages = good();
            pages.controller.lpa = if lists { Lpa::SUPPORTED_LOG_PAGES } else { Lpa::NONE };
            let fake = fake::serve(pages, move |command| {
                let is_ours = match command {
                    Asked::Admin(AdminCommand::GetLogPage(ask)) => ask.lid >= 0xC0,
                    Asked::Admin(AdminCommand::GetFeatures(ask)) => ask.fid >= 0xC0,
                    Asked::Admin(AdminCommand::SetFeatures(ask)) => ask.fid >= 0xC0,
                    Asked::Io(IoCommand::Checksum(_)) => true,
                    _ => false,
                };
                seen.set(seen.get() || is_ours);
                None
            });
            let device = connect(&fake).await;
            assert_eq!(
                (device.device().abilities().get(RequestKind::Checksum), device.abilities().get(RequestKind::Checksum)),
                (Ability::Absent, Ability::Emulated)
            );
            assert_eq!(digest(&device, extent(0, 4)).await.unwrap(), (guard::crc64(&[0; 16384]), 16384));
            let error = read_slot(&device, ReservedArea::GroupLabel).await.unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Absent(_)), "{error}");
            assert!(!asked.get());
        }
    });
}

#[test]
fn a_target_that_takes_the_place_of_another_is_not_sent_what_it_has_not_offered() {
    run(|| async {
        const KINDS: Extensions = Extensions::CHECKSUM.union(Extensions::CHECKSUM_CRC32C);
        for (kind, offered, then) in [
            (ChecksumKind::Crc64Nvme, BOTH, Extensions::NONE),
            // It would reply with a CRC-64, since it ignores the kind.
            (ChecksumKind::Crc32c, KINDS, Extensions::CHECKSUM),
        ] {
            let (asked, first) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(true)));
            let (count, is_first) = (Rc::clone(&asked), Rc::clone(&first));
            let mut pages = good();
            pages.controller.lpa = Lpa::SUPPORTED_LOG_PAGES;
            let fake = fake::serve(pages, move |command| match command {
                Asked::Admin(AdminCommand::GetLogPage(ask)) if ask.lid == 0 => {
                    Some(Reply::Data(supported_log_pages(&[LogPage::Extensions]).to_vec()))
                }
                Asked::Admin(AdminCommand::GetLogPage(ask)) if ask.lid == 0xC1 => {
                    Some(Reply::Data(page(if is_first.replace(false) { offered } else { then })))
                }
                Asked::Io(IoCommand::Checksum(_)) => {
                    count.set(count.get() + 1);
                    Some(Reply::Close)
                }
                _ => None,
            });
            let device = connect(&fake).await;
            let error = digest_of(&device, kind, extent(0, 1)).await.unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Absent(_)), "{error}");
            assert_eq!(asked.get(), 1, "the second target got none");
        }
    });
}

#[test]
fn invalid_reserved_areas_and_statuses_are_errors() {
    run(|| async {
        let good = Frame::Group.encode(b"label").unwrap();
        let mut lies = vec![vec![], good[..64].to_vec(), good[..20_000].to_vec(), vec![0; 20_480], vec![0xFF; 20_480]];
        for (at, byte) in [(0, b'X'), (8, 2), (10, 0xC1), (12, 6), (15, 0x7F), (64, b'L')] {
            lies.push(good.clone());
            lies.last_mut().unwrap()[at] = byte;
        }
        for (i, lie) in lies.into_iter().enumerate() {
            let fake = serve_page(page(BOTH), move |asked| match asked {
                Asked::Admin(AdminCommand::GetFeatures(ask)) if ask.fid == FeatureId::ReservedGroupLabel.code() => {
                    Some(Reply::Data(lie.clone()))
                }
                _ => None,
            });
            let error = read_slot(&connect(&fake).await, ReservedArea::GroupLabel).await.unwrap_err();
            let said = matches!(error.kind(), ErrorKind::Media { reason } if reason.contains("is invalid"));
            assert!(said, "lie {i}: {error}");
        }
        for (code, wanted) in [
            (StatusCode::NAMESPACE_WRITE_PROTECTED, ErrorKind::ReadOnly.to_string()),
            (StatusCode::INVALID_FIELD, "refuses".to_owned()),
            (StatusCode::WRITE_FAULT, "write reserved area".to_owned()),
            (StatusCode::INVALID_OPCODE, "does not support".to_owned()),
        ] {
            let fake = serve_page(page(BOTH), move |asked| match asked {
                Asked::Admin(AdminCommand::SetFeatures(ask)) if ask.fid >= 0xC0 => Some(Reply::Status(code.status())),
                Asked::Io(IoCommand::Checksum(_)) => Some(Reply::Status(code.status())),
                _ => None,
            });
            let device = connect(&fake).await;
            let error = write_slot(&device, ReservedArea::ScrubState, b"state").await.unwrap_err().to_string();
            assert!(error.contains(&wanted), "{error}");
            digest(&device, extent(0, 4)).await.unwrap_err();
        }
    });
}

#[test]
fn a_digest_that_fails_over_good_blocks_is_asked_again_once() {
    run(|| async {
        for (failures, works) in [(1, true), (2, false)] {
            let (asked, count) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
            let seen = Rc::clone(&asked);
            let fake = serve_page(page(BOTH), move |command| match command {
                Asked::Io(IoCommand::Checksum(_)) => {
                    seen.set(seen.get() + 1);
                    count.set(count.get() + 1);
                    let failed = Reply::Status(StatusCode::GUARD_CHECK_ERROR.status());
                    Some(if count.get() <= failures { failed } else { Reply::Done(5) })
                }
                _ => None,
            });
            let outcome = digest(&connect(&fake).await, extent(0, 64)).await;
            assert_eq!((outcome.is_ok(), asked.get()), (works, 2));
        }
    });
}
