//! NVMe structures from untrusted peers: commands as a target decodes them, pages as a host decodes them from a hostile
//! target.
//!
//! A decoded structure must encode to bytes that decode to the same. The values that readers derive from a page (names,
//! addresses, ranges, formats) are computed as well.

use sealblock_protocols_nvme::admin::AdminCommand;
use sealblock_protocols_nvme::extensions::{Extensions, ExtensionsLog, ReservedArea, ReservedHeader};
use sealblock_protocols_nvme::fabrics::{Connect, ConnectData, FabricsCommand};
use sealblock_protocols_nvme::features::{
    AsynchronousEvent, HostBehavior, LbaStatusInterval, NumberOfQueues, TemperatureThreshold, Timestamp,
};
use sealblock_protocols_nvme::identify::{
    Controller, IndependentNamespace, Namespace, NamespaceFormat, NamespaceId, NvmController, NvmNamespace,
    limit_bytes, namespace_ids, namespace_list, parse_namespace_list,
};
use sealblock_protocols_nvme::logs::{
    DiscoveryEntry, DiscoveryHeader, DiscoveryLog, EffectsLog, ErrorEntry, ErrorLog, FirmwareSlots, Health,
    LbaStatusLog, lists_log_page, parse_changed_namespaces,
};
use sealblock_protocols_nvme::nqn::{FIELD_BYTES, Nqn, PaddedText};
use sealblock_protocols_nvme::nvm::{Checksum, CopyCommand, CopyLimits, GetLbaStatus, IoCommand, LbaStatusList};
use sealblock_protocols_nvme::registers::{Capabilities, Configuration, ControllerStatus, Property};
use sealblock_protocols_nvme::{Command, Completion, Count8, StatusCode};

use crate::{Pieces, format};

/// A structure of fixed layout: refused only if it is too short; otherwise it encodes and decodes to itself.
macro_rules! fixed {
    ($bytes:expr; $($kind:ident),*) => {$(
        match $kind::decode($bytes) {
            Ok(read) => assert_eq!($kind::decode(&read.encode()), Ok(read)),
            Err(short) => assert!($bytes.len() < $kind::BYTES, "{short}"),
        }
    )*};
}

/// Decodes the input as commands or as pages; its first byte selects which.
pub fn try_structures(input: &[u8]) {
    let mut pieces = Pieces::new(input);
    match pieces.byte() {
        choice if choice < 0x60 => commands(&mut pieces),
        choice if choice < 0xA0 => identify(pieces.rest()),
        choice if choice < 0xE0 => logs(pieces.rest()),
        _ => small(&mut pieces),
    }
}

fn commands(pieces: &mut Pieces) {
    let mut bytes = [0; 64];
    let given = pieces.bytes(64);
    bytes[..given.len()].copy_from_slice(given);
    let command = Command::from_prefix(&bytes).expect("64 bytes are a command");
    if let Ok(pointer) = command.data() {
        assert_eq!(command.with_data(pointer).data(), Ok(pointer));
    }
    admin(&command, pieces);
    if let Ok(connect) = Connect::decode(&command) {
        assert_eq!(Connect::decode(&connect.encode()), Ok(connect));
    }
    if let Ok(fabrics) = FabricsCommand::decode(&command) {
        assert_eq!(FabricsCommand::decode(&fabrics.encode()), Ok(fabrics));
    }
    if let Ok(io) = IoCommand::decode(&command) {
        let again = io.encode(command.nsid.get()).expect("what was read can be said");
        assert_eq!(IoCommand::decode(&again), Ok(io));
        validate(&io, pieces);
    }
}

fn admin(command: &Command, pieces: &mut Pieces) {
    let Ok(admin) = AdminCommand::decode(command) else { return };
    let again = match admin {
        AdminCommand::Identify(ask) => ask.encode(),
        AdminCommand::GetLogPage(ask) => {
            let page = pieces.bytes(200);
            assert!(ask.slice(page).map_or(0, <[u8]>::len) <= page.len());
            ask.encode()
        }
        AdminCommand::GetFeatures(ask) => ask.encode(),
        AdminCommand::SetFeatures(ask) => ask.encode(),
        AdminCommand::Abort(ask) => ask.encode(),
        AdminCommand::GetLbaStatus(ask) => {
            lba_status(&ask, pieces.word());
            ask.encode(command.nsid.get())
        }
        AdminCommand::AsynchronousEventRequest | AdminCommand::KeepAlive => return,
    };
    assert_eq!(AdminCommand::decode(&again), Ok(admin));
}

fn lba_status(ask: &GetLbaStatus, capacity: u64) {
    if let Ok(extent) = ask.extent(capacity) {
        assert!(extent.fits(capacity) && extent.start() == ask.start);
    }
    assert!(ask.answer_bytes(4096) <= 4096);
}

/// The checks of a target before it executes an I/O command.
fn validate(io: &IoCommand, pieces: &mut Pieces) {
    let (capacity, format) = (pieces.word(), format(pieces));
    if io.validate(capacity, format).is_err() {
        return;
    }
    match io {
        IoCommand::Read(blocks)
        | IoCommand::Write(blocks)
        | IoCommand::Compare(blocks)
        | IoCommand::Verify(blocks)
        | IoCommand::Checksum(Checksum { blocks, .. }) => {
            assert!(blocks.extent.fits(capacity));
            if let Some(format) = format {
                let checks = blocks.protection.checks(format, u64::MAX);
                assert!(checks.initial_ref_tag.is_none_or(|tag| tag & !format.reference_tag_mask() == 0));
                blocks.protection.tags(format);
            }
        }
        IoCommand::DatasetManagement(dsm) => {
            let data = pieces.bytes(4096);
            match dsm.parse(data) {
                Ok(ranges) => {
                    assert_eq!(ranges.len(), usize::from(dsm.ranges.get()));
                    for range in ranges {
                        let blocks = range.extent().ok().flatten().map_or(0, |extent| extent.len());
                        assert!(blocks == 0 || blocks == u64::from(range.length_blocks.get()));
                    }
                }
                Err(_) => assert!(data.len() < dsm.data_bytes()),
            }
        }
        IoCommand::Copy(command) => copy(command, capacity, pieces),
        IoCommand::WriteUncorrectable(extent) => assert!(extent.fits(capacity)),
        IoCommand::Flush | IoCommand::WriteZeroes(_) => {}
    }
}

fn copy(copy: &CopyCommand, capacity: u64, pieces: &mut Pieces) {
    let limits = CopyLimits { range_blocks: pieces.short(), total_blocks: 1 << 20, ranges: Count8::saturating(128) };
    let Ok((destination, ranges)) = copy.parse(pieces.bytes(256 * 40), capacity, &limits) else { return };
    let total: u64 = ranges.iter().map(|range| range.extent.len()).sum();
    assert!(destination.len() == total && destination.fits(capacity));
    assert!(ranges.iter().all(|range| range.extent.fits(capacity)));
    let again = copy.encode_ranges(&ranges).expect("what was read can be said");
    assert_eq!(copy.parse(&again, capacity, &limits), Ok((destination, ranges)));
}

fn identify(page: &[u8]) {
    fixed!(page; Controller, NvmController, Namespace, NvmNamespace, IndependentNamespace);
    if let Ok(controller) = Controller::decode(page) {
        for exponent in [12, 16, u8::MAX] {
            controller.max_transfer_bytes(1_u64.checked_shl(u32::from(exponent)).unwrap_or(u64::MAX));
        }
        controller.in_capsule_bytes();
        (controller.sn.text(), controller.mn.text(), controller.subnqn.text());
        limit_bytes(controller.mdts, 4096);
    }
    if let Ok(namespace) = Namespace::decode(page) {
        let nvm = NvmNamespace::decode(page.get(4096..).unwrap_or(&[])).ok();
        for nvm in [None, nvm.as_ref()] {
            let Ok(found) = NamespaceFormat::resolve(&namespace, nvm) else { continue };
            let (mut again, mut more) = (Namespace::default(), NvmNamespace::default());
            found.describe(&mut again, &mut more);
            assert_eq!(NamespaceFormat::resolve(&again, Some(&more)), Ok(found));
        }
    }
    let list: Vec<u32> = parse_namespace_list(page).collect();
    assert!(list.is_sorted() && list.len() <= 1024);
    let again = namespace_list(list.iter().copied(), 0).expect("0 is no last namespace");
    assert!(parse_namespace_list(&again).eq(list.iter().copied()));
    let ids = namespace_ids(page);
    assert_eq!(namespace_ids(&NamespaceId::list(&ids)), ids);
}

fn logs(page: &[u8]) {
    fixed!(page; Health, FirmwareSlots, ErrorEntry, DiscoveryEntry, DiscoveryHeader, HostBehavior, Timestamp, ExtensionsLog, ReservedHeader);
    extensions(page);
    for entry in ErrorLog::decode(page) {
        entry.status();
    }
    if let Ok(log) = DiscoveryLog::decode(page) {
        assert!(log.entries.len() * DiscoveryEntry::BYTES <= page.len());
        assert_eq!(DiscoveryLog::decode(&log.encode()).as_ref(), Ok(&log));
        for entry in &log.entries {
            (entry.nqn(), entry.tcp_address());
        }
    }
    if let Ok(log) = EffectsLog::decode(page) {
        assert_eq!(EffectsLog::decode(&log.encode()), Ok(log));
    }
    if let Ok(log) = LbaStatusLog::decode(page) {
        assert_eq!(LbaStatusLog::decode(&log.encode()), Ok(log));
    }
    if let Ok(list) = LbaStatusList::decode(page) {
        let again = LbaStatusList::decode(&list.encode(page.len())).expect("what was written can be read");
        assert_eq!(again.descriptors, list.descriptors);
    }
    parse_changed_namespaces(page);
    lists_log_page(page, page.first().copied().unwrap_or(0));
}

/// Checks that only bits that the page has are reported, and that the content of an area encodes to itself.
fn extensions(page: &[u8]) {
    let log = ExtensionsLog::decode(page);
    let (nsid, has) = log.map_or((1, Extensions::NONE), |log| (log.nsid, log.extensions));
    assert_eq!(ExtensionsLog::read(page, nsid).bits() & !has.bits(), 0);
    for area in ReservedArea::ALL {
        let mut frame = page.to_vec();
        frame.resize(area.frame_bytes(), 0);
        if let Ok(bytes) = area.decode(&frame) {
            let again = area.encode(bytes).expect("the content of an area fits into it");
            assert_eq!(area.decode(&again), Ok(bytes));
        }
        let held = &page[..page.len().min(area.max_bytes())];
        assert_eq!(area.decode(&area.encode(held).expect("there is room")), Ok(held));
    }
}

fn small(pieces: &mut Pieces) {
    let (word, dword) = (pieces.word(), pieces.word() as u32);
    let event = AsynchronousEvent::from_dword0(dword);
    assert_eq!(AsynchronousEvent::from_dword0(event.dword0()), event);
    if let Ok(queues) = NumberOfQueues::from_bits(dword) {
        assert_eq!(NumberOfQueues::from_bits(queues.bits()), Ok(queues));
    }
    if let Ok(threshold) = TemperatureThreshold::from_bits(dword) {
        assert_eq!(TemperatureThreshold::from_bits(threshold.bits()), Ok(threshold));
    }
    let interval = LbaStatusInterval::from_bits(dword);
    assert_eq!(LbaStatusInterval::from_bits(interval.bits()), interval);
    Property::from_code(dword);
    Configuration::from_bits(dword);
    ControllerStatus::from_bits(dword);
    Capabilities::from_bits(word);
    if let Some(completion) = Completion::from_prefix(pieces.bytes(16)) {
        let (status, code) = (completion.status(), completion.status().code());
        (status.is_success(), status.do_not_retry(), code == StatusCode::INVALID_OPCODE);
        assert!(!format!("{completion:?} {status:?} {code:?}").is_empty());
    }
    if let Ok(data) = ConnectData::parse(pieces.bytes(1024)) {
        assert_eq!(ConnectData::parse(&data.encode()), Ok(data));
    }
}

/// A qualified name, as text and as the 256 bytes of the wire.
pub fn try_name(input: &[u8]) {
    let mut field = [0; FIELD_BYTES];
    let len = input.len().min(FIELD_BYTES);
    field[..len].copy_from_slice(&input[..len]);
    PaddedText::<FIELD_BYTES>::new(&String::from_utf8_lossy(input)).text();
    let from_field = Nqn::from_field(&field);
    if let Ok(name) = &from_field {
        assert_eq!(Nqn::from_field(PaddedText::new(name.as_str()).bytes()).as_ref(), Ok(name));
        in_uri(name);
    }
    let Some(name) = std::str::from_utf8(input).ok().and_then(|text| text.parse::<Nqn>().ok()) else { return };
    assert_eq!(name.to_string().parse::<Nqn>().as_ref(), Ok(&name));
    assert_eq!(Nqn::from_field(PaddedText::new(name.as_str()).bytes()), Ok(name.clone()));
    in_uri(&name);
}

/// A valid name can be written into a URI, which parses to the same name.
fn in_uri(name: &Nqn) {
    let escaped: String = name.as_str().bytes().map(|byte| format!("%{byte:02X}")).collect();
    match format!("nvme+tcp://[::1]:4420/{escaped}/7").parse() {
        Ok(sealblock_stack::target::TargetName::NvmeTcp { nqn, nsid, .. }) => {
            assert_eq!(nqn.to_string(), name.to_string());
            assert_eq!(nsid.map(std::num::NonZeroU32::get), Some(7));
        }
        other => panic!("{name:?} gives {other:?}"),
    }
}
