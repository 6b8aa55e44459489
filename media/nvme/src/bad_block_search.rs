//! Finds the bad blocks of a command that failed: the search of `sealblock_block`, with commands of a namespace and the
//! hints that NVM controllers have. A status names a field and no block, but Get LBA Status lists blocks that the
//! controller knows to be bad, and the error log names the first block of a command.

use sealblock_block::{BadBlock, BadBlockCause, BlockProbe, Error, RequestKind, find_bad_blocks};
use sealblock_protocols_nvme::admin::GetLogPage;
use sealblock_protocols_nvme::logs::{ErrorEntry, ErrorLog, LogPage};
use sealblock_protocols_nvme::nvm::{BlockCommand, GetLbaStatus, IoCommand, LbaStatusAction, LbaStatusList};
use sealblock_units::{Extent, Lba};

use crate::status::bad_block_cause;
use crate::{CompletedCommand, Namespace};

/// Bytes of one Get LBA Status page: 4095 runs.
const STATUS_BYTES: usize = 64 << 10;
/// The most blocks of one page used as hints; the search finds the others without.
const MAX_HINTS: usize = 4096;

/// The command that probes blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Probe {
    /// Verify, which moves no data.
    Verify,
    /// Read, for controllers without Verify.
    Read,
}

/// A search for bad blocks: those that the namespace's own check finds.
pub struct BadBlockSearch<'a, N> {
    namespace: &'a N,
    probe: Probe,
}

impl<'a, N: Namespace> BadBlockSearch<'a, N> {
    /// A search with this command.
    pub fn new(namespace: &'a N, probe: Probe) -> BadBlockSearch<'a, N> {
        BadBlockSearch { namespace, probe }
    }

    /// The bad blocks of `extent`, for which a command failed; none if every block is good by now.
    ///
    /// # Errors
    /// Statuses that are not about blocks, and a controller that fails a run but none of its blocks.
    pub async fn of(self, extent: Extent, completed: &N::Completed) -> Result<Vec<BadBlock>, Error> {
        let mut bad_blocks = find_bad_blocks(&self, extent, completed).await?;
        self.namespace.add_values(completed, &mut bad_blocks).await;
        Ok(bad_blocks)
    }

    /// Blocks that Get LBA Status lists.
    async fn listed_blocks(&self, extent: Extent, completed: &N::Completed, action: LbaStatusAction) -> Vec<Lba> {
        let profile = self.namespace.profile();
        if !profile.get_lba_status {
            return Vec::new();
        }
        // The command cannot express a range of 2^16 blocks: request all to the end, and shorten the list here.
        let range_blocks = u16::try_from(extent.len()).unwrap_or(0);
        let request = GetLbaStatus { start: extent.start(), max_bytes: STATUS_BYTES as u64, action, range_blocks };
        let page = self.namespace.read_page(completed, request.encode(profile.nsid), STATUS_BYTES).await;
        let list = page.and_then(|page| LbaStatusList::decode(&page).ok());
        let runs = list.map(|list| list.descriptors).unwrap_or_default();
        let blocks = runs.iter().flat_map(|run| run.extent.iter().take(MAX_HINTS));
        blocks.take(MAX_HINTS).filter(|lba| extent.contains(*lba)).collect()
    }
}

impl<N: Namespace> BlockProbe for BadBlockSearch<'_, N> {
    type Failed = N::Completed;

    async fn probe(&self, run: Extent) -> Result<Option<N::Completed>, Error> {
        let profile = self.namespace.profile();
        let checks = profile.own_checks(run.start());
        let (completed, kind) = match self.probe {
            Probe::Verify => {
                let (protection, _) = profile.read_checks(run, &checks, true);
                let command = IoCommand::Verify(BlockCommand { protection, ..BlockCommand::new(run) });
                (self.namespace.execute_once(command).await?, RequestKind::Verify)
            }
            Probe::Read => {
                let (protection, _) = profile.read_checks(run, &checks, false);
                (self.namespace.read_once(run, protection).await?, RequestKind::Read)
            }
        };
        let status = completed.status();
        match (status.is_success(), bad_block_cause(status)) {
            (true, _) => Ok(None),
            (false, Some(_)) => Ok(Some(completed)),
            (false, None) => Err(self.namespace.failed(kind, Some(run), &completed)),
        }
    }

    fn cause(&self, failed: &N::Completed) -> BadBlockCause {
        bad_block_cause(failed.status()).expect("only statuses about blocks are searched")
    }

    async fn hints(&self, extent: Extent, completed: &N::Completed) -> Vec<Lba> {
        for action in [LbaStatusAction::Tracked, LbaStatusAction::ScanUntracked] {
            let listed = self.listed_blocks(extent, completed, action).await;
            if !listed.is_empty() {
                return listed;
            }
        }
        Vec::from_iter(logged_block(self.namespace, completed, extent).await)
    }

    async fn named(&self, run: Extent, failed: &N::Completed) -> Option<Lba> {
        logged_block(self.namespace, failed, run).await
    }

    fn describe(&self, failed: &N::Completed) -> String {
        failed.status().to_string()
    }
}

/// Maximum entries of the error log that are read.
const MAX_ENTRIES: u64 = 64;

/// The block that the error log names for this command, if it is one of `extent`.
pub async fn logged_block<N: Namespace>(namespace: &N, completed: &N::Completed, extent: Extent) -> Option<Lba> {
    let profile = namespace.profile();
    let entries = u64::from(profile.error_entries).clamp(1, MAX_ENTRIES);
    let length = entries * ErrorEntry::BYTES as u64;
    let request = GetLogPage { retain_event: true, ..GetLogPage::new(LogPage::ErrorInformation.code(), length) };
    let page = namespace.read_page(completed, request.encode(), length as usize).await?;
    // Newest first: identifiers are reused, so an older entry with the same one belongs to another command.
    let entry = ErrorLog::decode(&page).find(|entry| namespace.is_logged_as(completed, entry))?;
    let is_this = entry.status().code() == completed.status().code() && entry.nsid == profile.nsid;
    let lba = Lba::new(entry.lba);
    (is_this && extent.contains(lba)).then_some(lba)
}
