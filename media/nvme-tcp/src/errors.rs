//! What a controller's logs say of commands that failed, as far as it fits what was asked.

use sealblock_block::{BadBlock, BadBlockCause};
use sealblock_protocols_nvme::admin::GetLogPage;
use sealblock_protocols_nvme::logs::{DamageHeader, DamageLog, ErrorEntry, ErrorLog, LogPage};
use sealblock_units::{Extent, Lba};

use crate::reconnecting_session::CompletedCommand;
use crate::session::Session;

/// Entries of the error log that are read at most.
const MAX_ENTRIES: u64 = 64;
/// Bytes of the damage page that are read at most, and with one command.
const DAMAGE_BYTES: u64 = 1 << 20;
const PART_BYTES: u64 = 64 << 10;

/// The block that the error log names for this command, if it is one of `extent`.
pub(crate) async fn logged_block(answered: &CompletedCommand, extent: Extent) -> Option<Lba> {
    let session = &answered.session;
    let entries = u64::from(session.profile.error_entries).clamp(1, MAX_ENTRIES);
    let length = entries * ErrorEntry::BYTES as u64;
    let ask = GetLogPage { retain_event: true, ..GetLogPage::new(LogPage::ErrorInformation.code(), length) };
    let page = session.controller.admin.log("Get Log Page, Error Information", ask).await.ok()?;
    // Newest first: an identifier is used again, so older entries of the same one are of other commands.
    let same_command = |entry: &ErrorEntry| entry.sqid == answered.queue && entry.cid == answered.result.cid;
    let entry = ErrorLog::decode(&page).find(same_command)?;
    let is_this = entry.status().code() == answered.status().code() && entry.nsid == session.profile.nsid;
    let lba = Lba::new(entry.lba);
    (is_this && contains(extent, lba)).then_some(lba)
}

pub(crate) fn contains(extent: Extent, lba: Lba) -> bool {
    lba.get().checked_sub(extent.start().get()).is_some_and(|at| at < extent.len())
}

/// Fills in what was expected and what was found, where the target has the page that tells. Other targets have another
/// page there, or none; then the values stay unknown.
pub(crate) async fn add_values(session: &Session, faults: &mut [BadBlock]) {
    if faults.iter().all(|fault| fault.cause == BadBlockCause::Media || fault.expected.is_some()) {
        return;
    }
    let Some(log) = damage(session).await else { return };
    for entry in &log.entries {
        let Some((expected, actual)) = entry.values else { continue };
        let field = entry.field.map_or(BadBlockCause::Media, BadBlockCause::Tag);
        let same = |fault: &&mut BadBlock| fault.lba == entry.lba && fault.cause == field;
        if let Some(fault) = faults.iter_mut().find(same) {
            (fault.expected, fault.actual) = (Some(expected), Some(actual));
        }
    }
}

/// The damage page of the session's namespace, whole and of one generation.
async fn damage(session: &Session) -> Option<DamageLog> {
    let nsid = session.profile.nsid;
    let admin = &session.controller.admin;
    let part = async |offset, length_bytes| {
        let ask =
            GetLogPage { nsid, offset, retain_event: true, ..GetLogPage::new(LogPage::Damage.code(), length_bytes) };
        admin.log("Get Log Page, Damage", ask).await.ok()
    };
    let mut page = part(0, DamageHeader::BYTES as u64).await?.to_vec();
    let head = DamageHeader::read(&page).ok().filter(|head| head.nsid == nsid)?;
    let length = head.length_bytes();
    if length > DAMAGE_BYTES {
        return None;
    }
    while (page.len() as u64) < length {
        let at = page.len() as u64;
        page.extend_from_slice(&part(at, PART_BYTES.min(length - at)).await?);
    }
    let again = part(0, DamageHeader::BYTES as u64).await?;
    let is_same = DamageHeader::read(&again).is_ok_and(|again| again.generation == head.generation);
    if is_same { DamageLog::decode(&page).ok() } else { None }
}
