//! Get Log Page, and the content of the log pages.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use sealblock_block::{Ability, RequestKind};
use sealblock_integrity::ChecksumKind;
use sealblock_protocols_nvme::admin::GetLogPage;
use sealblock_protocols_nvme::extensions::{Extensions, ExtensionsLog};
use sealblock_protocols_nvme::logs::{
    CommandEffects, CriticalWarning, DiscoveryEntry, DiscoveryLog, EffectsLog, FirmwareSlots, Health, LbaStatusElement,
    LbaStatusLog, LbaStatusRanges, LogPage, SubsystemType, supported_log_pages,
};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_protocols_nvme::nvm::LbaStatusAction;
use sealblock_protocols_nvme::{AdminOpcode, Ascii, Invalid, IoOpcode, NSID_ALL, StatusCode};
use sealblock_runtime_reactor::now;

use crate::command::features;
use crate::model::command_error::CommandError;
use crate::model::controller::Controller;
use crate::model::damage_pages::DamagePage;
use crate::model::namespace::Namespace;
use crate::model::registry::TargetState;

const NVM_PAGES: [LogPage; 11] = [
    LogPage::SupportedLogPages,
    LogPage::ErrorInformation,
    LogPage::Health,
    LogPage::FirmwareSlot,
    LogPage::ChangedNamespaces,
    LogPage::CommandEffects,
    LogPage::LbaStatus,
    LogPage::FeatureEffects,
    LogPage::ManagementEffects,
    LogPage::Damage,
    LogPage::Extensions,
];
const DISCOVERY_PAGES: [LogPage; 3] = [LogPage::SupportedLogPages, LogPage::ErrorInformation, LogPage::Discovery];

/// A whole log page.
pub(crate) enum Page {
    /// Made for this command.
    Own(Vec<u8>),
    /// That of a device's damage, which commands share.
    Damage(Arc<DamagePage>),
}

impl Page {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Page::Own(bytes) => bytes,
            Page::Damage(page) => page.bytes(),
        }
    }
}

/// Returns the whole page; the caller cuts it. `local_address` is the target's side of the connection.
pub(crate) fn page(
    target: &TargetState,
    local_address: impl FnOnce() -> io::Result<SocketAddr>,
    controller: &Controller,
    args: &GetLogPage,
) -> Result<Page, CommandError> {
    if !controller.is_discovery && args.lid == LogPage::Damage.code() {
        return damage(controller, args).map(Page::Damage);
    }
    own_page(target, local_address, controller, args).map(Page::Own)
}

/// The damage log: as it is now where a read begins, and as it was then where it goes on.
fn damage(controller: &Controller, args: &GetLogPage) -> Result<Arc<DamagePage>, CommandError> {
    let namespace = controller.namespace(args.nsid)?;
    let list = &namespace.state.damage_list;
    let begun = controller.damage_page.lock().clone();
    if args.offset > 0
        && let Some(page) = list.go_on_page(args.nsid, &begun, now())
    {
        return Ok(page);
    }
    let page = list.begin_page(args.nsid, now());
    controller.damage_page.set(Arc::downgrade(&page));
    Ok(page)
}

fn own_page(
    target: &TargetState,
    local_address: impl FnOnce() -> io::Result<SocketAddr>,
    controller: &Controller,
    args: &GetLogPage,
) -> Result<Vec<u8>, CommandError> {
    let pages: &[LogPage] = if controller.is_discovery { &DISCOVERY_PAGES } else { &NVM_PAGES };
    let known = LogPage::from_code(args.lid).filter(|page| pages.contains(page));
    match known.ok_or(Invalid::LogPage(args.lid))? {
        LogPage::SupportedLogPages => Ok(supported_log_pages(pages).to_vec()),
        LogPage::ErrorInformation => Ok(controller.errors.lock().encode()),
        // According to LPA, namespaces have no page of their own.
        LogPage::Health if args.nsid != 0 && args.nsid != NSID_ALL => Err(Invalid::field("NSID", 1, 0).into()),
        LogPage::Health => Ok(health(controller).encode().to_vec()),
        LogPage::FirmwareSlot => {
            let mut slots = FirmwareSlots { afi: 1, ..FirmwareSlots::default() };
            slots.frs[0] = Ascii::new(env!("CARGO_PKG_VERSION"));
            Ok(slots.encode().to_vec())
        }
        LogPage::ChangedNamespaces => Ok(controller.async_events.take_changed().to_vec()),
        LogPage::CommandEffects => Ok(effects(controller).encode().to_vec()),
        LogPage::LbaStatus => Ok(lba_status(controller).encode()),
        LogPage::FeatureEffects => Ok(features::effects().to_vec()),
        // No NVMe-MI command is supported, but LPA bit 5 requires this page along with the other effects pages.
        LogPage::ManagementEffects => Ok(vec![0; 4096]),
        LogPage::Extensions => {
            let namespace = controller.namespace(args.nsid)?;
            let pages = namespace.device.abilities().bitmap_pages;
            let page = ExtensionsLog::new(args.nsid, extensions(&namespace), pages);
            Ok(page
                .with_origin(namespace.origin)
                .with_content(namespace.content)
                .encode_with(&(namespace.identities)()))
        }
        LogPage::Discovery => {
            let at = local_address().map_err(|_| StatusCode::INTERNAL_ERROR)?;
            Ok(discovery(target, controller.host.as_ref(), target.advertised(at)))
        }
        _ => Err(Invalid::LogPage(args.lid).into()),
    }
}

/// The vendor extensions that the namespace's device supports.
fn extensions(namespace: &Namespace) -> Extensions {
    let abilities = namespace.device.abilities();
    let when = |ability, extension| if ability == Ability::Absent { Extensions::NONE } else { extension };
    let if_so = |is_so, extension| if is_so { extension } else { Extensions::NONE };
    let known = when(abilities.get(RequestKind::Checksum), Extensions::CHECKSUM)
        | when(abilities.of_checksum(ChecksumKind::Crc32c), Extensions::CHECKSUM_CRC32C)
        | when(abilities.get(RequestKind::ReadReserved), Extensions::RESERVED)
        | Extensions::COVERAGE
        | Extensions::FENCE
        | if_so(abilities.seals, Extensions::SEALS)
        | if_so(abilities.copies, Extensions::COPIES)
        | if_so(namespace.format().is_some(), Extensions::ESCAPES);
    known.with_older(abilities.freshness.bits())
}

/// Returns the subsystem's counters since the target started. There is no sensor and no spare; fields without a source
/// are 0. The composite temperature is one of them: any other value would look like a measurement, and hosts compare it
/// with thresholds.
fn health(controller: &Controller) -> Health {
    let traffic = controller.subsystem.traffic();
    let is_degraded = controller.subsystem.namespaces().values().any(|namespace| namespace.state.is_degraded());
    Health {
        critical_warning: if is_degraded { CriticalWarning::RELIABILITY } else { CriticalWarning::NONE },
        available_spare_percent: 100,
        data_units_read: Health::data_units(traffic.read_bytes.into()),
        data_units_written: Health::data_units(traffic.written_bytes.into()),
        host_reads: traffic.reads.into(),
        host_writes: traffic.writes.into(),
        media_errors: traffic.media_errors.into(),
        error_log_entries: controller.errors.lock().count().into(),
        ..Health::default()
    }
}

/// Returns, for each namespace, where a host should send Get LBA Status. After an overflow, bad blocks may be anywhere.
fn lba_status(controller: &Controller) -> LbaStatusLog {
    let (mut elements, mut blocks, mut generation, mut overflowed) = (Vec::new(), 0_usize, 0_u16, false);
    for (nsid, namespace) in controller.subsystem.namespaces().iter() {
        let known = namespace.state.damage_list.summary();
        blocks += known.blocks;
        generation = generation.wrapping_add(known.additions);
        overflowed |= known.overflowed;
        let (action, ranges) = match (known.overflowed, known.blocks) {
            (true, _) => (LbaStatusAction::ScanUntracked, LbaStatusRanges::WholeNamespace),
            (false, 0) => continue,
            (false, _) => {
                let runs = known.runs.iter().map(|run| run.extent).collect();
                (LbaStatusAction::Tracked, LbaStatusRanges::Ranges(runs))
            }
        };
        elements.push(LbaStatusElement { nsid: *nsid, action, ranges });
    }
    let estimate_blocks = (!overflowed).then(|| u32::try_from(blocks).unwrap_or(u32::MAX - 1));
    LbaStatusLog { estimate_blocks, generation, elements }
}

const ADMIN: [AdminOpcode; 8] = [
    AdminOpcode::GetLogPage,
    AdminOpcode::Identify,
    AdminOpcode::Abort,
    AdminOpcode::SetFeatures,
    AdminOpcode::GetFeatures,
    AdminOpcode::AsynchronousEventRequest,
    AdminOpcode::KeepAlive,
    AdminOpcode::GetLbaStatus,
];

const IO: [IoOpcode; 9] = [
    IoOpcode::Flush,
    IoOpcode::Write,
    IoOpcode::Read,
    IoOpcode::Compare,
    IoOpcode::WriteZeroes,
    IoOpcode::DatasetManagement,
    IoOpcode::Verify,
    IoOpcode::Copy,
    IoOpcode::Checksum,
];

fn effects(controller: &Controller) -> EffectsLog {
    let write_uncorrectable = controller.subsystem.can_write_uncorrectable().then_some(IoOpcode::WriteUncorrectable);
    let log = ADMIN.into_iter().fold(EffectsLog::none(), |log, opcode| {
        let scope = match opcode {
            AdminOpcode::GetLbaStatus => CommandEffects::NAMESPACE_SCOPE,
            _ => CommandEffects::CONTROLLER_SCOPE,
        };
        log.with_admin(opcode, scope)
    });
    IO.into_iter().chain(write_uncorrectable).fold(log, EffectsLog::with_io)
}

/// Returns the discovery log page for this host. Its generation counts changes of the subsystems and of their allowed
/// hosts.
fn discovery(target: &TargetState, host: Option<&Nqn>, at: SocketAddr) -> Vec<u8> {
    let entry = |kind, nqn: &Nqn| DiscoveryEntry::tcp(kind, 1, at.ip(), at.port(), nqn);
    let mut entries = vec![entry(SubsystemType::CurrentDiscovery, &Nqn::discovery())];
    let (generation, subsystems) = target.subsystems();
    let allowed = subsystems.iter().filter(|subsystem| subsystem.allows(host));
    entries.extend(allowed.map(|subsystem| entry(SubsystemType::Nvm, &subsystem.nqn)));
    DiscoveryLog { generation, entries }.encode()
}
