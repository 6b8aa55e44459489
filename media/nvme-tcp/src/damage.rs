//! The target's known bad blocks, without a new search: from the damage log of sealblock's target, which also has
//! expected and actual values, or by Get LBA Status from other targets.

use sealblock_block::{BadBlock, BadBlockCause, DamageRun};
use sealblock_protocols_nvme::admin::GetLogPage;
use sealblock_protocols_nvme::logs::{DamageEntry, DamageHeader, DamageLog, DamageRunEntry, LogPage};
use sealblock_protocols_nvme::nvm::{
    GetLbaStatus, LbaStatusAction, LbaStatusDescriptor, LbaStatusFlags, LbaStatusList,
};
use sealblock_protocols_nvme_tcp::host::HostData;
use sealblock_runtime_memory::Buffer;
use sealblock_units::Lba;

use crate::session::Session;

/// Maximum bytes of the damage log that are read, and bytes read with one command.
const DAMAGE_BYTES: u64 = 1 << 20;
const PART_BYTES: u64 = 64 << 10;
/// How often the damage log is read again if it has changed meanwhile.
const TRIES: usize = 3;
/// Bytes of one reply to Get LBA Status, and the most replies that are read.
const STATUS_BYTES: usize = 4096;
const MAX_ANSWERS: usize = 256;

/// The bad blocks of a namespace that a target knows.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KnownDamage {
    /// The blocks as runs; single blocks are first. Where runs overlap, the first one is exact.
    pub runs: Vec<DamageRun>,
    /// True if these are all that it knows.
    pub is_complete: bool,
    /// True if its list was lost, so that it may have known of more.
    pub is_list_lost: bool,
}

/// The target's known bad blocks; `None` if it has no list that this host can read.
pub(crate) async fn known_damage(session: &Session) -> Option<KnownDamage> {
    for _ in 0..TRIES {
        let Some(log) = damage_log(session).await else { continue };
        if !log.overflowed || log.runs.is_some() {
            let runs = log.runs.iter().flatten().map(run_of_blocks);
            let runs = log.entries.iter().map(run_of_entry).chain(runs).collect();
            return Some(KnownDamage { runs, is_complete: true, is_list_lost: log.is_list_lost });
        }
        break;
    }
    if session.profile.get_lba_status { listed(session).await } else { None }
}

fn run_of_entry(entry: &DamageEntry) -> DamageRun {
    let (lba, cause) = (entry.lba.get(), entry.field.map_or(BadBlockCause::Media, BadBlockCause::Tag));
    DamageRun { is_made: entry.write_uncorrectable, values: entry.values, ..DamageRun::exact(lba, lba, cause) }
}

fn run_of_blocks(run: &DamageRunEntry) -> DamageRun {
    let cause = run.field.map_or(BadBlockCause::Media, BadBlockCause::Tag);
    let is_made = run.write_uncorrectable;
    DamageRun { bad_blocks: run.bad_blocks, is_made, ..DamageRun::exact(run.first, run.last, cause) }
}

/// The runs that Get LBA Status lists. A run may also contain good blocks: a target with many bad blocks lists
/// neighbours as one run.
async fn listed(session: &Session) -> Option<KnownDamage> {
    let mut known = KnownDamage::default();
    let mut start = Lba::ZERO;
    for _ in 0..MAX_ANSWERS {
        let ask =
            GetLbaStatus { start, max_bytes: STATUS_BYTES as u64, action: LbaStatusAction::Tracked, range_blocks: 0 };
        let data = HostData::Read { buffer: Buffer::zeroed(STATUS_BYTES), layout: None };
        let answered = session.controller.admin.try_execute(ask.encode(session.profile.nsid), data).await.ok()?;
        let page = answered.data.filter(|_| answered.completion.status().is_success())?;
        let list = LbaStatusList::decode(&page.buffer).ok()?;
        let behind = list.descriptors.iter().map(|run| run.extent.last().get()).max();
        known.runs.extend(list.descriptors.iter().map(run_of_descriptor));
        known.is_complete = list.complete;
        match behind.and_then(|last| last.checked_add(1)) {
            // A list that does not advance would be read forever.
            Some(next) if !list.complete && next > start.get() => start = Lba::new(next),
            _ => break,
        }
    }
    Some(known)
}

fn run_of_descriptor(run: &LbaStatusDescriptor) -> DamageRun {
    let (first, last) = (run.extent.start().get(), run.extent.last().get());
    let is_made = run.flags.contains(LbaStatusFlags::WRITE_UNCORRECTABLE);
    let run = DamageRun { is_made, ..DamageRun::exact(first, last, BadBlockCause::Media) };
    DamageRun { bad_blocks: 1, ..run }
}

/// Fills in expected and actual values from the target's damage log. Other targets have another page there, or none;
/// the values then stay unknown.
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
