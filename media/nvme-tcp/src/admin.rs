//! Admin commands, with errors that name the command; the Identify and log pages of a namespace.

use std::rc::Rc;

use sealblock_media_nvme::{Admin as _, IdentifyPages, identify_controller, is_not_supported};
use sealblock_protocols_nvme::admin::{Cns, GetLogPage, Identify};
use sealblock_protocols_nvme::extensions::ExtensionsLog;
use sealblock_protocols_nvme::identify::{Controller, Lpa, parse_namespace_list};
use sealblock_protocols_nvme::logs::{LogPage, lists_log_page};
use sealblock_protocols_nvme::registers::Capabilities;
use sealblock_protocols_nvme::{Command, NSID_ALL};
use sealblock_protocols_nvme_tcp::host::HostData;
use sealblock_runtime_memory::Buffer;
use sealblock_transport::RequestError;

use crate::queue::{CommandResult, Queue};
use crate::{ConnectError, HostPort};

/// An admin queue, for commands that are executed one after the other.
pub(crate) struct Admin {
    queue: Rc<Queue>,
    address: HostPort,
}

impl Admin {
    pub(crate) fn new(queue: Rc<Queue>, address: HostPort) -> Admin {
        Admin { queue, address }
    }

    /// The connection.
    pub(crate) fn queue(&self) -> &Rc<Queue> {
        &self.queue
    }

    /// Executes a command; returns its completion, whatever the status.
    pub(crate) async fn try_execute(&self, command: Command, data: HostData) -> Result<CommandResult, ConnectError> {
        let lost = |lost: RequestError| ConnectError::Lost { address: self.address.clone(), reason: lost.to_string() };
        self.queue.execute((command, data)).await.map_err(lost)
    }

    /// Executes a command that must succeed.
    pub(crate) async fn execute(
        &self,
        what: &'static str,
        command: Command,
        data: HostData,
    ) -> Result<CommandResult, ConnectError> {
        let finished = self.try_execute(command, data).await?;
        match finished.completion.status() {
            status if status.is_success() => Ok(finished),
            status => Err(ConnectError::Refused { what, status, detail: String::new() }),
        }
    }

    /// Executes a command that must succeed and return exactly `len_bytes` bytes.
    async fn read(&self, what: &'static str, command: Command, len_bytes: usize) -> Result<Buffer, ConnectError> {
        let data = HostData::Read { buffer: Buffer::zeroed(len_bytes), layout: None };
        let finished = self.execute(what, command, data).await?;
        match finished.data {
            Some(data) if data.buffer.len() == len_bytes => Ok(data.buffer),
            data => {
                let got = data.map_or(0, |data| data.buffer.len());
                Err(ConnectError::Unexpected { what, why: format!("{got} of {len_bytes} bytes") })
            }
        }
    }

    /// Part of a log page, of the requested length.
    pub(crate) async fn log(&self, what: &'static str, request: GetLogPage) -> Result<Buffer, ConnectError> {
        self.read(what, request.encode(), request.length_bytes as usize).await
    }

    /// The same; `None` where the controller refuses it or sends less.
    pub(crate) async fn log_if_known(
        &self,
        what: &'static str,
        request: GetLogPage,
    ) -> Result<Option<Buffer>, ConnectError> {
        match self.log(what, request).await {
            Ok(page) => Ok(Some(page)),
            Err(ConnectError::Refused { .. } | ConnectError::Unexpected { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl sealblock_media_nvme::Admin for Admin {
    type Error = ConnectError;

    async fn identify(&self, cns: Cns, nsid: u32) -> Result<Buffer, ConnectError> {
        let what = match cns {
            Cns::Controller => "Identify Controller",
            Cns::Namespace => "Identify Namespace",
            Cns::ActiveNamespaces => "Identify, active namespaces",
            Cns::NamespaceDescriptors => "Identify, namespace identification descriptors",
            Cns::CommandSetNamespace => "Identify CNS 05h",
            Cns::CommandSetController => "Identify CNS 06h",
            Cns::IndependentNamespace => "Identify CNS 08h",
            _ => "Identify",
        };
        let request = Identify { cns, nsid, cntid: 0, csi: 0 };
        self.read(what, request.encode(), Identify::DATA_BYTES).await
    }

    async fn identify_if_known(&self, cns: Cns, nsid: u32) -> Result<Option<Buffer>, ConnectError> {
        match self.identify(cns, nsid).await {
            Ok(page) => Ok(Some(page)),
            Err(ConnectError::Refused { status, .. }) if is_not_supported(status) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Maximum lists of namespaces that are read, each of up to 1024.
const MAX_LISTS: usize = 16;
/// Namespaces that one list has room for.
const LIST_ENTRIES: usize = 1024;
/// How often a list that changes while it is read is read again.
const LIST_READS: usize = 4;
/// Bytes of the page Supported Log Pages.
const LOG_PAGES_BYTES: u64 = 1024;

/// The pages of the `wanted` namespace, or of the only one that exists.
pub(crate) async fn find_namespace(
    admin: &Admin,
    capabilities: Capabilities,
    wanted: Option<u32>,
) -> Result<(u32, IdentifyPages), ConnectError> {
    let controller = identify_controller(admin).await?;
    let active_namespaces = active_namespaces(admin).await?;
    let nsid = match (wanted, active_namespaces.as_slice()) {
        (Some(wanted), active_namespaces) if active_namespaces.contains(&wanted) => wanted,
        (Some(wanted), _) => return Err(ConnectError::NoNamespace { wanted, active: active_namespaces }),
        (None, [only]) => *only,
        (None, _) => return Err(ConnectError::WhichNamespace { active: active_namespaces }),
    };
    let pages = namespace_pages(admin, capabilities, controller, nsid).await?;
    Ok((nsid, pages))
}

/// The pages of namespace `nsid`, read again.
pub(crate) async fn namespace_pages(
    admin: &Admin,
    capabilities: Capabilities,
    controller: Controller,
    nsid: u32,
) -> Result<IdentifyPages, ConnectError> {
    let pages = sealblock_media_nvme::namespace_pages(admin, capabilities, Some(controller), nsid).await?;
    let Some(page) = extensions_page(admin, &pages.controller, nsid).await? else { return Ok(pages) };
    let (extensions, bitmap_pages) = (ExtensionsLog::read(&page, nsid), ExtensionsLog::bitmap_pages(&page, nsid));
    let (origin, identities) = (ExtensionsLog::origin(&page, nsid), ExtensionsLog::identities(&page, nsid));
    let content = ExtensionsLog::content(&page, nsid);
    Ok(IdentifyPages { extensions, bitmap_pages, origin, identities, content, ..pages })
}

/// Sealblock's extensions that the namespace supports, and the bitmap pages of its reserved area. The page is read only
/// if the controller lists it: another vendor's controller would log an error.
async fn extensions_page(admin: &Admin, controller: &Controller, nsid: u32) -> Result<Option<Buffer>, ConnectError> {
    if !controller.lpa.contains(Lpa::SUPPORTED_LOG_PAGES) {
        return Ok(None);
    }
    let request = |page: LogPage, nsid, length_bytes| GetLogPage {
        nsid,
        retain_event: true,
        ..GetLogPage::new(page.code(), length_bytes)
    };
    let all = admin
        .log_if_known("Supported Log Pages", request(LogPage::SupportedLogPages, NSID_ALL, LOG_PAGES_BYTES))
        .await?;
    if !all.is_some_and(|all| lists_log_page(&all, LogPage::Extensions.code())) {
        return Ok(None);
    }
    let what = "Get Log Page, Extensions";
    let page = admin.log_if_known(what, request(LogPage::Extensions, nsid, ExtensionsLog::bytes_with(0))).await?;
    let Some(mut page) = page else { return Ok(None) };
    // The list changes with the replicas of a mirror there. A part of it would hide that two namespaces are one device.
    let mut listed = 0;
    for _ in 0..LIST_READS {
        match ExtensionsLog::identity_count(&page, nsid) {
            count if count == listed => return Ok(Some(page)),
            count if count > ExtensionsLog::MAX_IDENTITIES => {
                let why = format!("{count} identities; {} are the most that are read", ExtensionsLog::MAX_IDENTITIES);
                return Err(ConnectError::Unexpected { what, why });
            }
            count => listed = count,
        }
        page = admin.log(what, request(LogPage::Extensions, nsid, ExtensionsLog::bytes_with(listed))).await?;
    }
    Err(ConnectError::Unexpected { what, why: "another list each time".to_owned() })
}

/// All active namespaces.
async fn active_namespaces(admin: &Admin) -> Result<Vec<u32>, ConnectError> {
    let mut all: Vec<u32> = Vec::new();
    for _ in 0..MAX_LISTS {
        let after = all.last().copied().unwrap_or(0);
        if after >= 0xFFFF_FFFE {
            break;
        }
        let page = admin.identify(Cns::ActiveNamespaces, after).await?;
        let before = all.len();
        // A list that does not continue after the last NSID would be read forever.
        all.extend(parse_namespace_list(&page).filter(|&nsid| nsid > after));
        if all.len() - before < LIST_ENTRIES {
            break;
        }
    }
    Ok(all)
}
