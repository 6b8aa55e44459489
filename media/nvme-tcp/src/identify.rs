//! Which namespace, and its Identify pages.

use sealblock_protocols_nvme::NSID_ALL;
use sealblock_protocols_nvme::admin::{Cns, GetLogPage};
use sealblock_protocols_nvme::extensions::{Extensions, ExtensionsLog};
use sealblock_protocols_nvme::identify::{
    Controller, ControllerType, IndependentNamespace, Lpa, Namespace, NvmController, NvmNamespace, namespace_ids,
    parse_namespace_list,
};
use sealblock_protocols_nvme::logs::{LogPage, lists_log_page};
use sealblock_protocols_nvme::registers::Capabilities;

use crate::ConnectError;
use crate::admin::Admin;
use crate::namespace_profile::IdentifyPages;

/// Lists of namespaces that are read at most, each of up to 1024.
const MAX_LISTS: usize = 16;
/// Namespaces that one list has room for.
const LIST_ENTRIES: usize = 1024;
/// Bytes of the page Supported Log Pages.
const LOG_PAGES_BYTES: u64 = 1024;

/// The pages of the namespace asked for, or of the only one there is.
pub(crate) async fn pages(
    admin: &Admin,
    capabilities: Capabilities,
    wanted: Option<u32>,
) -> Result<(u32, IdentifyPages), ConnectError> {
    let controller = controller(admin).await?;
    if !matches!(ControllerType::from_code(controller.cntrltype), Some(ControllerType::Io)) && controller.cntrltype != 0
    {
        let why = format!("a controller of type {}, which has no namespaces", controller.cntrltype);
        return Err(ConnectError::Unexpected { what: "Identify Controller", why });
    }
    let active = active(admin).await?;
    let nsid = match (wanted, active.as_slice()) {
        (Some(wanted), active) if active.contains(&wanted) => wanted,
        (Some(wanted), _) => return Err(ConnectError::NoNamespace { wanted, active }),
        (None, [only]) => *only,
        (None, _) => return Err(ConnectError::WhichNamespace { active }),
    };
    let pages = of_namespace(admin, capabilities, controller, nsid).await?;
    Ok((nsid, pages))
}

/// Identify Controller, checked as far as everything depends on it.
async fn controller(admin: &Admin) -> Result<Controller, ConnectError> {
    let page = admin.identify(Cns::Controller, 0).await?;
    let controller = decode(Controller::decode(&page), "Identify Controller")?;
    let is_io = controller.cntrltype == ControllerType::Io.code();
    // Entries of 64 and 16 bytes are what this host has.
    if is_io && (controller.sqes & 0xF > 6 || controller.sqes >> 4 < 6 || controller.cqes & 0xF > 4) {
        let why = format!("queue entries that no host has (SQES {:#x}, CQES {:#x})", controller.sqes, controller.cqes);
        return Err(ConnectError::Unexpected { what: "Identify Controller", why });
    }
    Ok(controller)
}

/// The pages of namespace `nsid`, read anew.
pub(crate) async fn of_namespace(
    admin: &Admin,
    capabilities: Capabilities,
    controller: Controller,
    nsid: u32,
) -> Result<IdentifyPages, ConnectError> {
    let namespace = decode(Namespace::decode(&admin.identify(Cns::Namespace, nsid).await?), "Identify Namespace")?;
    let ids = admin.identify_if_known(Cns::NamespaceDescriptors, nsid).await?;
    let nvm_namespace = match admin.identify_if_known(Cns::CommandSetNamespace, nsid).await? {
        Some(page) => Some(decode(NvmNamespace::decode(&page), "Identify CNS 05h")?),
        None => None,
    };
    let nvm_controller = match admin.identify_if_known(Cns::CommandSetController, 0).await? {
        Some(page) => Some(decode(NvmController::decode(&page), "Identify CNS 06h")?),
        None => None,
    };
    let independent = match admin.identify_if_known(Cns::IndependentNamespace, nsid).await? {
        Some(page) => Some(decode(IndependentNamespace::decode(&page), "Identify CNS 08h")?),
        None => None,
    };
    let ids = ids.map(|page| namespace_ids(&page)).unwrap_or_default();
    let (extensions, annex_pages) = extensions(admin, &controller, nsid).await?;
    Ok(IdentifyPages {
        capabilities,
        controller,
        nvm_controller,
        namespace,
        nvm_namespace,
        independent,
        ids,
        extensions,
        bitmap_pages: annex_pages,
    })
}

/// What the namespace has besides the specification, and the bitmap pages of its annex. The page that tells is asked for only where the controller lists it, so
/// that others need not refuse it and log that.
async fn extensions(admin: &Admin, controller: &Controller, nsid: u32) -> Result<(Extensions, u32), ConnectError> {
    if !controller.lpa.contains(Lpa::SUPPORTED_LOG_PAGES) {
        return Ok((Extensions::NONE, 0));
    }
    let ask = |page: LogPage, nsid, length_bytes| GetLogPage {
        nsid,
        retain_event: true,
        ..GetLogPage::new(page.code(), length_bytes)
    };
    let all =
        admin.log_if_known("Supported Log Pages", ask(LogPage::SupportedLogPages, NSID_ALL, LOG_PAGES_BYTES)).await?;
    if !all.is_some_and(|all| lists_log_page(&all, LogPage::Extensions.code())) {
        return Ok((Extensions::NONE, 0));
    }
    let page = ask(LogPage::Extensions, nsid, ExtensionsLog::BYTES as u64);
    let page = admin.log_if_known("Get Log Page, Extensions", page).await?;
    let read = |page: sealblock_runtime_memory::Buffer| {
        (ExtensionsLog::read(&page, nsid), ExtensionsLog::bitmap_pages(&page, nsid))
    };
    Ok(page.map_or((Extensions::NONE, 0), read))
}

fn decode<T>(page: Result<T, sealblock_protocols_nvme::TooShort>, what: &'static str) -> Result<T, ConnectError> {
    page.map_err(|short| ConnectError::Unexpected { what, why: short.to_string() })
}

/// All active namespaces.
async fn active(admin: &Admin) -> Result<Vec<u32>, ConnectError> {
    let mut all: Vec<u32> = Vec::new();
    for _ in 0..MAX_LISTS {
        let after = all.last().copied().unwrap_or(0);
        if after >= 0xFFFF_FFFE {
            break;
        }
        let page = admin.identify(Cns::ActiveNamespaces, after).await?;
        let before = all.len();
        // A list that does not go on behind the last one would be read for ever.
        all.extend(parse_namespace_list(&page).filter(|&nsid| nsid > after));
        if all.len() - before < LIST_ENTRIES {
            break;
        }
    }
    Ok(all)
}
