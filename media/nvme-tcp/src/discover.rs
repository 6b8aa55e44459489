//! The discovery log of a discovery controller.

use sealblock_protocols_nvme::admin::GetLogPage;
use sealblock_protocols_nvme::logs::{DiscoveryEntry, DiscoveryHeader, DiscoveryLog, LogPage};
use sealblock_protocols_nvme::nqn::Nqn;

use crate::admin::Admin;
use crate::session::SessionConfig;
use crate::{ConnectError, HostPort, Options};

/// Bytes read with one command.
const PART_BYTES: u64 = 4096;
/// Entries that are read at most; a page that announces more is refused.
const MAX_ENTRIES: u64 = 4096;
/// Times that the page is read again because it changed while it was read.
const ATTEMPTS: usize = 4;

/// What a discovery controller names: subsystems, and other discovery controllers (see `SubsystemType`). Of the options
/// those about queues, tags and reconnecting mean nothing here.
///
/// # Errors
/// As [`ConnectError`] says.
///
/// # Panics
/// Outside a reactor.
pub async fn discover(address: HostPort, options: Options) -> Result<Vec<DiscoveryEntry>, ConnectError> {
    let plan = SessionConfig { address, subsystem: Nqn::discovery(), namespace: None, options };
    let read = async {
        let controller = plan.open_controller().await?;
        let mut last = Err(ConnectError::Unexpected { what: WHAT, why: "another page each time".to_owned() });
        for _ in 0..ATTEMPTS {
            match page(&controller.admin).await? {
                Some(entries) => {
                    last = Ok(entries);
                    break;
                }
                None => continue,
            }
        }
        last
    };
    plan.in_time(read).await
}

const WHAT: &str = "Get Log Page, Discovery";

/// The page, or `None` if it changed meanwhile.
async fn page(admin: &Admin) -> Result<Option<Vec<DiscoveryEntry>>, ConnectError> {
    let unexpected = |why: String| ConnectError::Unexpected { what: WHAT, why };
    let head = part(admin, 0, DiscoveryHeader::BYTES as u64).await?;
    let header = DiscoveryHeader::decode(&head).map_err(|short| unexpected(short.to_string()))?;
    if header.numrec > MAX_ENTRIES {
        return Err(unexpected(format!("{} entries; {MAX_ENTRIES} are the most that are read", header.numrec)));
    }
    let length = DiscoveryLog::length_bytes(&header).unwrap_or(u64::MAX);
    let mut bytes = head;
    while (bytes.len() as u64) < length {
        let at = bytes.len() as u64;
        bytes.extend(part(admin, at, PART_BYTES.min(length - at)).await?);
    }
    let again = part(admin, 0, DiscoveryHeader::BYTES as u64).await?;
    let now = DiscoveryHeader::decode(&again).map_err(|short| unexpected(short.to_string()))?;
    if now.genctr != header.genctr {
        return Ok(None);
    }
    let log = DiscoveryLog::decode(&bytes).map_err(|invalid| unexpected(invalid.to_string()))?;
    Ok(Some(log.entries))
}

async fn part(admin: &Admin, offset: u64, length_bytes: u64) -> Result<Vec<u8>, ConnectError> {
    let lid = LogPage::Discovery.code();
    let ask = GetLogPage { nsid: 0, offset, ..GetLogPage::new(lid, length_bytes) };
    Ok(admin.log(WHAT, ask).await?.to_vec())
}
