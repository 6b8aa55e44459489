//! Expected and actual values of bad blocks, from the damage log of sealblock's target.

use sealblock_block::{BadBlock, BadBlockCause};
use sealblock_protocols_nvme::admin::GetLogPage;
use sealblock_protocols_nvme::logs::{DamageHeader, DamageLog, LogPage};

use crate::session::Session;

/// Maximum bytes of the damage log that are read, and bytes read with one command.
const DAMAGE_BYTES: u64 = 1 << 20;
const PART_BYTES: u64 = 64 << 10;

/// Fills in expected and actual values from the target's damage log. Other targets have another page there, or none; the
/// values then stay unknown.
pub(crate) async fn add_values(session: &Session, bad_blocks: &mut [BadBlock]) {
    if bad_blocks.iter().all(|bad_block| bad_block.cause == BadBlockCause::Media || bad_block.expected.is_some()) {
        return;
    }
    let Some(log) = damage_log(session).await else { return };
    for entry in &log.entries {
        let Some((expected, actual)) = entry.values else { continue };
        let field = entry.field.map_or(BadBlockCause::Media, BadBlockCause::Tag);
        let same = |bad_block: &&mut BadBlock| bad_block.lba == entry.lba && bad_block.cause == field;
        if let Some(bad_block) = bad_blocks.iter_mut().find(same) {
            (bad_block.expected, bad_block.actual) = (Some(expected), Some(actual));
        }
    }
}

/// The damage log of the session's namespace, read without a change in between.
async fn damage_log(session: &Session) -> Option<DamageLog> {
    let nsid = session.profile.nsid;
    let admin = &session.controller.admin;
    let part = async |offset, length_bytes| {
        let request =
            GetLogPage { nsid, offset, retain_event: true, ..GetLogPage::new(LogPage::Damage.code(), length_bytes) };
        admin.log("Get Log Page, Damage", request).await.ok()
    };
    let mut page = part(0, DamageHeader::BYTES as u64).await?.to_vec();
    let header = DamageHeader::read(&page).ok().filter(|header| header.nsid == nsid)?;
    let length = header.length_bytes();
    if length > DAMAGE_BYTES {
        return None;
    }
    while (page.len() as u64) < length {
        let at = page.len() as u64;
        page.extend_from_slice(&part(at, PART_BYTES.min(length - at)).await?);
    }
    let again = part(0, DamageHeader::BYTES as u64).await?;
    let is_same = DamageHeader::read(&again).is_ok_and(|again| again.generation == header.generation);
    if is_same { DamageLog::decode(&page).ok() } else { None }
}
