//! Expectations of tags, checked by Verify at the target: with blocks that were never written, on targets that offer to
//! check them and on others.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::common::fake::{self, Asked, Reply, good};
use crate::common::*;
use sealblock_block::{
    Abilities, Checksum, Device, Durability, DynDevice, Error, ErrorKind, Expectations, Geometry, Outcome, Request,
    Response, VerifyStats,
};
use sealblock_exports_nvme_tcp::{Namespace, PiVisibility, Subsystem, Target};
use sealblock_integrity::{
    Checks, ChecksumKind, Field, GuardKind, Masked, PiFormat, PiPosition, ProtectionType, Sealed, Tags,
};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::{Corruption, MemoryDevice};
use sealblock_media_nvme_tcp::NvmeTcpDevice;
use sealblock_protocols_nvme::StatusCode;
use sealblock_protocols_nvme::admin::AdminCommand;
use sealblock_protocols_nvme::extensions::{Extensions, ExtensionsLog};
use sealblock_protocols_nvme::identify::{Lpa, NamespaceFormat};
use sealblock_protocols_nvme::logs::{LogPage, supported_log_pages};
use sealblock_protocols_nvme::nvm::{IoCommand, Prchk};
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::spawn;
use sealblock_units::{BlockSize, Extent, Lba};

/// What a filesystem demands of blocks that it has written with this tag.
fn tag(app_tag: u16, storage_tag: u64) -> Expectations {
    Expectations::new(Checks {
        app_tag: Some(Masked { expected: app_tag, mask: u16::MAX }),
        storage_tag: Some(Masked { expected: storage_tag, mask: u64::MAX }),
        checks_escapes: true,
        ..Checks::NONE
    })
}

/// The same, but blocks that were never written pass.
fn lenient(app_tag: u16) -> Expectations {
    Expectations::new(Checks { checks_escapes: false, storage_tag: None, ..*tag(app_tag, 0).checks() })
}

async fn write_tagged(device: &impl Device, extent: Extent, app_tag: u16, storage_tag: u64) {
    let geometry = device.geometry();
    let tags = Tags { app_tag, storage_tag, initial_ref_tag: extent.start().get() };
    let data = pattern(extent.bytes(geometry.block_size) as usize, 3);
    let data = Sealed::seal(data, geometry.block_size, geometry.protection, &tags);
    device.execute(Request::write(extent, data, Durability::Volatile)).await.unwrap();
}

/// The bytes that were transferred for a Verify, and for a Checksum.
async fn verify_both(device: &impl Device, extent: Extent, expected: Expectations) -> Result<[u64; 2], Error> {
    let checksum = device.execute(Request::checksum(extent, ChecksumKind::Crc64Nvme, expected)).await;
    match (device.execute(Request::verify(extent, expected)).await, checksum) {
        (
            Ok(Response::Verified(VerifyStats { bytes_transferred, .. })),
            Ok(Response::Checksum(Checksum { bytes_transferred: of_checksum, .. })),
        ) => Ok([bytes_transferred, of_checksum]),
        (Err(error), Err(same)) => {
            assert_eq!(error, same);
            Err(error)
        }
        other => panic!("a Verify and a Checksum find the same: {other:?}"),
    }
}

fn unexpected(lba: u64, field: Field, expected: u64, actual: u64) -> ErrorKind {
    ErrorKind::Expectation { lba: Lba::new(lba), field, expected, actual }
}

#[test]
fn blocks_that_were_never_written_are_found_without_moving_data() {
    run(|| async {
        for guard in [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64] {
            for kind in ProtectionType::ALL {
                let format = PiFormat::new(guard, kind, if guard == GuardKind::Crc16 { 0 } else { 16 });
                let format = format.unwrap();
                let memory = memory(BlockSize::B4096, Some(format));
                let served = serve(&[(Rc::clone(&memory), PiVisibility::Protected)]);
                let device = open(&served, 1, options()).await;
                write_tagged(&device, extent(0, 1000), 7, 9).await;
                write_tagged(&device, extent(1001, 999), 7, 9).await;
                let received = || device.device().counters().received_bytes;
                let before = received();
                for (good, expected) in
                    [(extent(0, 1000), tag(7, 9)), (extent(1001, 999), tag(7, 9)), (extent(0, 2000), lenient(7))]
                {
                    assert_eq!(verify_both(&device, good, expected).await.unwrap(), [0, 0], "{format:?}");
                }
                assert_eq!(received(), before, "nothing moves");
                // Block 1000 was never written. Only it is read, once for each command.
                let error = verify_both(&device, extent(0, 2000), tag(7, 9)).await.unwrap_err();
                assert_eq!(*error.kind(), unexpected(1000, Field::AppTag, 7, 0xFFFF), "{format:?}");
                assert_eq!(received() - before, 2 * (4096 + format.tuple_bytes() as u64), "{format:?}");
                // Damage comes first, wherever it is.
                assert!(memory.damage(Lba::new(1500), Corruption::Data { at: 9, mask: 1 }));
                let error = verify_both(&device, extent(0, 2000), tag(7, 9)).await.unwrap_err();
                assert_eq!(error.bad_blocks().unwrap().first().lba, Lba::new(1500), "{format:?}");
                served.target.stop();
            }
        }
    });
}

#[test]
fn the_first_unexpected_block_is_named_with_its_field_and_values() {
    run(|| async {
        let format = PiFormat::new(GuardKind::Crc64, ProtectionType::Type1, 16).unwrap();
        let served = serve(&[(memory(BlockSize::B4096, Some(format)), PiVisibility::Protected)]);
        let device = open(&served, 1, options()).await;
        write_tagged(&device, extent(0, 600), 7, 9).await;
        for (lba, first) in [(599, 599), (77, 77), (300, 77), (0, 0)] {
            write_tagged(&device, extent(lba, 1), 6, 9).await;
            let error = verify_both(&device, extent(0, 600), tag(7, 9)).await.unwrap_err();
            assert_eq!(*error.kind(), unexpected(first, Field::AppTag, 7, 6));
        }
        write_tagged(&device, extent(0, 600), 7, 9).await;
        write_tagged(&device, extent(50, 2), 7, 8).await;
        let error = verify_both(&device, extent(3, 400), tag(7, 9)).await.unwrap_err();
        assert_eq!(*error.kind(), unexpected(50, Field::StorageTag, 9, 8));
        let error = verify_both(&device, extent(3, 400), tag(8, 9)).await.unwrap_err();
        assert_eq!(*error.kind(), unexpected(3, Field::AppTag, 8, 7), "all of them");
        served.target.stop();
    });
}

/// The pages of a target whose blocks have tags.
fn tagged_pages() -> (fake::Pages, PiFormat) {
    let format = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);
    let mut pages = good();
    let wire = NamespaceFormat {
        block_size: BlockSize::B4096,
        metadata_bytes: format.tuple_bytes(),
        extended: true,
        protection: Some((format, PiPosition::Last)),
        storage_tag_mask: 0,
    };
    wire.describe(&mut pages.namespace, &mut pages.nvm_namespace);
    pages.controller.lpa = Lpa::SUPPORTED_LOG_PAGES;
    (pages, format)
}

/// Each Verify of a target that offers these extensions, in turn of its connections: the blocks, and CEB. A target whose
/// blocks were never written: it finds all of them good, but with CEB.
async fn connect_to(offers: Vec<Extensions>, closes_once: bool) -> (NvmeTcpDevice, Rc<RefCell<Vec<bool>>>) {
    let (pages, _) = tagged_pages();
    let (asked, connections) = (Rc::new(RefCell::new(Vec::new())), Rc::new(Cell::new(0)));
    let (seen, is_first) = (Rc::clone(&asked), Cell::new(closes_once));
    let fake = fake::serve(pages, move |command| match command {
        Asked::Admin(AdminCommand::GetLogPage(ask)) if ask.lid == 0 => {
            Some(Reply::Data(supported_log_pages(&[LogPage::Extensions]).to_vec()))
        }
        Asked::Admin(AdminCommand::GetLogPage(ask)) if ask.lid == 0xC1 => {
            let offered = offers[connections.replace(connections.get() + 1).min(offers.len() - 1)];
            Some(Reply::Data(ExtensionsLog::new(1, offered, 0).encode().to_vec()))
        }
        Asked::Io(IoCommand::Verify(blocks)) => {
            let protection = blocks.protection;
            seen.borrow_mut().push(protection.checks_escapes);
            if is_first.replace(false) {
                return Some(Reply::Close);
            }
            let asks = protection.checks_escapes && protection.prchk.contains(Prchk::APPLICATION_TAG);
            asks.then(|| Reply::Status(StatusCode::APPLICATION_TAG_CHECK_ERROR.status()))
        }
        // Blocks that were never written: every fake block is zeroes with a tuple of ones.
        Asked::Io(IoCommand::Read(blocks)) => {
            Some(Reply::Data([vec![0; 4096], vec![0xFF; 8]].concat().repeat(blocks.extent.len() as usize)))
        }
        _ => None,
    });
    let device = NvmeTcpDevice::connect(fake.address.into(), SUBNQN.parse().unwrap(), None, options()).await.unwrap();
    (device, asked)
}

#[test]
fn the_field_goes_only_to_a_target_that_offers_it_now() {
    run(|| async {
        const OFFER: Extensions = Extensions::ESCAPES;
        for (offers, closes, asked_first) in [
            (vec![OFFER], false, Some(true)),
            (vec![Extensions::COVERAGE], false, None),
            // Another target has taken its place.
            (vec![OFFER, Extensions::NONE], true, Some(true)),
            // It was not there when the device was opened.
            (vec![Extensions::NONE, OFFER], false, None),
        ] {
            let (device, asked) = connect_to(offers.clone(), closes).await;
            let error = device.execute(Request::verify(extent(5, 4), tag(7, 0))).await.unwrap_err();
            assert_eq!(*error.kind(), unexpected(5, Field::AppTag, 7, 0xFFFF), "{offers:?}");
            let received = device.counters().received_bytes;
            let is_offered = offers == [OFFER];
            assert_eq!(received, if is_offered { 1 } else { 4 } * 4104, "{offers:?}");
            assert_eq!(asked.borrow().first().copied(), asked_first, "{offers:?}");
            let with_field = asked.borrow().iter().filter(|field| **field).count();
            assert!(is_offered || with_field <= 1, "{offers:?}: {with_field}");
            // Nothing is expected of blocks that disable checks: a Verify says that as ever.
            asked.borrow_mut().clear();
            let verified = device.execute(Request::verify(extent(5, 4), lenient(7))).await;
            assert!(matches!(verified, Ok(Response::Verified(VerifyStats { bytes_transferred: 0, .. }))), "{offers:?}");
            assert_eq!(*asked.borrow(), [false], "{offers:?}");
        }
    });
}

/// A device with two copies, of which the first one is read unless it is not as expected.
struct TwoCopies([Rc<MemoryDevice>; 2]);

impl Device for TwoCopies {
    fn geometry(&self) -> &Geometry {
        self.0[0].geometry()
    }

    fn abilities(&self) -> Abilities {
        Abilities { copies: true, ..self.0[0].abilities() }
    }

    async fn execute(&self, request: Request) -> Outcome {
        match self.0[0].execute(request.clone()).await {
            Err(error) if matches!(error.kind(), ErrorKind::Expectation { .. }) => self.0[1].execute(request).await,
            outcome => outcome,
        }
    }
}

#[test]
fn a_target_with_several_copies_is_told_what_is_expected_of_them_if_one_is_not() {
    run(|| async {
        let format = PiFormat::new(GuardKind::Crc64, ProtectionType::Type1, 16).unwrap();
        let copies = [0, 1].map(|_| memory(BlockSize::B4096, Some(format)));
        let gate = DynDevice::new("copies", TwoCopies(copies.clone()));
        let namespace = Namespace::new(SharedDevice::publish(gate), [1; 16]);
        let namespace = namespace.with_visibility(PiVisibility::Protected).unwrap();
        let subsystem = Subsystem::new(SUBNQN.parse().unwrap(), "SN1").with_namespace(1, namespace).unwrap();
        let target = Target::new([subsystem], limits()).unwrap();
        let listener = Listener::bind((std::net::Ipv4Addr::LOCALHOST, 0).into(), 16).unwrap();
        let (address, server) = (listener.local_addr().unwrap(), target.clone());
        let served = Served { target, address, serving: spawn(async move { server.serve(listener).await }) };
        let device = open(&served, 1, options()).await;
        let gates = copies.clone().map(|copy| sealblock_block::Gate::new("copy", copy));
        for gate in &gates {
            write_tagged(gate, extent(0, 8), 7, 9).await;
        }
        let read = async |expected| device.execute(Request::read(extent(0, 8), expected)).await.map(drop);
        let commands = || device.device().counters().commands;
        let before = commands();
        read(tag(7, 9)).await.unwrap();
        assert_eq!(commands() - before, 1, "as expected at first");
        // The first copy has lost a write, and another one altogether.
        write_tagged(&gates[0], extent(3, 1), 6, 9).await;
        read(tag(7, 9)).await.unwrap();
        write_tagged(&gates[0], extent(3, 1), 7, 9).await;
        gates[0].execute(Request::discard([extent(5, 1)])).await.unwrap();
        read(tag(7, 9)).await.unwrap();
        read(lenient(7)).await.unwrap();
        assert_eq!(commands() - before, 1 + 2 + 2 + 1);
        // Both have.
        gates[1].execute(Request::discard([extent(5, 1)])).await.unwrap();
        assert_eq!(*read(tag(7, 9)).await.unwrap_err().kind(), unexpected(5, Field::AppTag, 7, 0xFFFF));
        served.target.stop();
    });
}
