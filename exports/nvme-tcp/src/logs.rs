//! Get Log Page.

use std::rc::Rc;

use sealblock_protocols_nvme::admin::GetLogPage;
use sealblock_protocols_nvme::logs::{CommandEffects, EffectsLog, FirmwareSlots, Health, LogPage, supported_log_pages};
use sealblock_protocols_nvme::{AdminOpcode, Ascii, Invalid, IoOpcode, NSID_ALL, StatusCode};

use crate::connection::Connection;
use crate::controller::Controller;
use crate::discovery;
use crate::refusal::Refusal;

const NVM_PAGES: [LogPage; 5] = [
    LogPage::SupportedLogPages,
    LogPage::ErrorInformation,
    LogPage::Health,
    LogPage::FirmwareSlot,
    LogPage::CommandEffects,
];
const DISCOVERY_PAGES: [LogPage; 3] = [LogPage::SupportedLogPages, LogPage::ErrorInformation, LogPage::Discovery];

/// The whole page; the caller cuts it.
pub(crate) fn page(connection: &Rc<Connection>, controller: &Controller, ask: &GetLogPage) -> Result<Vec<u8>, Refusal> {
    let pages: &[LogPage] = if controller.is_discovery { &DISCOVERY_PAGES } else { &NVM_PAGES };
    let known = LogPage::from_code(ask.lid).filter(|page| pages.contains(page));
    match known.ok_or(Invalid::LogPage(ask.lid))? {
        LogPage::SupportedLogPages => Ok(supported_log_pages(pages).to_vec()),
        LogPage::ErrorInformation => Ok(controller.errors.lock().encode()),
        // LPA says that namespaces have no page of their own.
        LogPage::Health if ask.nsid != 0 && ask.nsid != NSID_ALL => Err(Invalid::field("NSID", 1, 0).into()),
        LogPage::Health => Ok(health(controller).encode().to_vec()),
        LogPage::FirmwareSlot => {
            let mut slots = FirmwareSlots { afi: 1, ..FirmwareSlots::default() };
            slots.frs[0] = Ascii::new(env!("CARGO_PKG_VERSION"));
            Ok(slots.encode().to_vec())
        }
        LogPage::CommandEffects => Ok(effects().encode().to_vec()),
        LogPage::Discovery => {
            let at = connection.stream.local_addr().map_err(|_| StatusCode::INTERNAL_ERROR)?;
            Ok(discovery::log(&connection.target, &controller.host, at))
        }
        _ => Err(Invalid::LogPage(ask.lid).into()),
    }
}

/// Counters of the subsystem since the target started. There is no sensor and no spare; fields without a source are 0.
fn health(controller: &Controller) -> Health {
    let traffic = controller.subsystem.traffic();
    Health {
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

fn effects() -> EffectsLog {
    let admin = [
        AdminOpcode::GetLogPage,
        AdminOpcode::Identify,
        AdminOpcode::Abort,
        AdminOpcode::SetFeatures,
        AdminOpcode::GetFeatures,
        AdminOpcode::AsynchronousEventRequest,
        AdminOpcode::KeepAlive,
    ];
    let io = [
        IoOpcode::Flush,
        IoOpcode::Write,
        IoOpcode::Read,
        IoOpcode::Compare,
        IoOpcode::WriteZeroes,
        IoOpcode::DatasetManagement,
        IoOpcode::Verify,
    ];
    let log = admin.into_iter().fold(EffectsLog::none(), |log, opcode| log.with_admin(opcode, CommandEffects::NONE));
    io.into_iter().fold(log, EffectsLog::with_io)
}
