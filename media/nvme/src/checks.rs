//! The protection fields of commands: which checks a command requests of the controller, and which tags it contains.

use sealblock_block::BadBlock;
use sealblock_integrity::{Checks, Mismatch, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_protocols_nvme::nvm::{Prchk, ProtectionInfo};
use sealblock_units::{Extent, Lba};

use crate::profile::{NamespaceProfile, PiMode};

/// The application tag that disables checking of a block.
const UNCHECKED_APP_TAG: u16 = 0xFFFF;

impl NamespaceProfile {
    /// The checks that every block of the namespace must pass, as far as its tags are visible here: no command leaves
    /// them out.
    pub fn own_checks(&self, start: Lba) -> Checks {
        self.pi_mode.shown().map_or(Checks::NONE, |format| Checks::full(format, start))
    }

    /// The fields of a Read or Verify that request these checks, and true if they express all of them.
    pub fn read_checks(&self, extent: Extent, checks: &Checks, is_verify: bool) -> (ProtectionInfo, bool) {
        match self.pi_mode {
            PiMode::None => (ProtectionInfo::NONE, true),
            // This host does not receive the tags, so the controller checks all it can.
            PiMode::Target(format) => {
                let info =
                    read_checks(format, extent.start(), &Checks::full(format, extent.start()), self.storage_tag_mask).0;
                (ProtectionInfo { pract: !is_verify, ..info }, true)
            }
            PiMode::Host(format) => {
                let (info, says_rest) = read_checks(format, extent.start(), checks, self.storage_tag_mask);
                let has_ceb = is_verify && self.checks_escapes;
                let info = ProtectionInfo { checks_escapes: checks.checks_escapes && has_ceb, ..info };
                (info, says_rest && (has_ceb || !checks.checks_escapes))
            }
        }
    }

    /// True if a Verify or Read compares the guard of every block.
    pub fn checks_seals(&self) -> bool {
        self.pi_mode != PiMode::None
    }

    /// The fields of a Write of this data. The controller always checks guards and reference tags; it checks
    /// application and storage tags if all blocks have the same. So a tag that changes in transfer is detected.
    pub fn write_checks(&self, extent: Extent, data: &Sealed) -> ProtectionInfo {
        match self.pi_mode {
            PiMode::None => ProtectionInfo::NONE,
            PiMode::Target(_) => ProtectionInfo { prchk: Prchk::GUARD, ..self.new_tags(extent) },
            PiMode::Host(format) => offer_tags(format, extent, data),
        }
    }

    /// The fields of Write Zeroes, and of other writes whose tags the controller generates.
    pub fn new_tags(&self, extent: Extent) -> ProtectionInfo {
        let Some(format) = self.pi_mode.kept() else { return ProtectionInfo::NONE };
        let initial_ref_tag = if format.protection().increments_ref_tag() { extent.start().get() } else { 0 };
        ProtectionInfo { pract: true, ..ProtectionInfo::NONE }.with_tags(format, 0, initial_ref_tag)
    }

    /// Data of a Compare, with the tags that the namespace stores: the controller compares tags too, so data without
    /// tags get those that the controller would make.
    pub fn comparand(&self, extent: Extent, data: &Sealed) -> Sealed {
        let size = self.geometry.block_size;
        let Some(format) = self.pi_mode.kept() else { return data.clone() };
        if data.format() == Some(format) {
            return data.clone();
        }
        let initial_ref_tag = if format.protection().increments_ref_tag() { extent.start().get() } else { 0 };
        let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag };
        Sealed::seal(data.joined_data(), size, Some(format), &tags)
    }
}

/// The fields of a Write of data with tags of this format.
fn offer_tags(format: PiFormat, extent: Extent, data: &Sealed) -> ProtectionInfo {
    let mut tuples = data.tuples();
    let Some(first) = tuples.next() else { return ProtectionInfo::NONE };
    let (mut same_app, mut same_storage) = (first.app_tag != UNCHECKED_APP_TAG, format.storage_tag_bits() > 0);
    for tuple in tuples {
        same_app &= tuple.app_tag == first.app_tag;
        same_storage &= tuple.storage_tag == first.storage_tag;
    }
    let reference = match format.protection() {
        ProtectionType::Type1 => extent.start().get(),
        ProtectionType::Type2 | ProtectionType::Type3 => first.ref_tag,
    };
    let mut prchk = Prchk::GUARD;
    if format.protection().increments_ref_tag() && format.reference_tag_bits() > 0 {
        prchk |= Prchk::REFERENCE_TAG;
    }
    let mut info = ProtectionInfo { prchk, stc: same_storage, ..ProtectionInfo::NONE };
    if same_app {
        info = ProtectionInfo { prchk: prchk | Prchk::APPLICATION_TAG, lbat: first.app_tag, lbatm: u16::MAX, ..info };
    }
    info.with_tags(format, first.storage_tag, reference)
}

/// The bad blocks of mismatches in blocks from `start`.
pub fn bad_blocks(start: Lba, mismatches: &[Mismatch]) -> Vec<BadBlock> {
    mismatches.iter().map(|mismatch| BadBlock::of_mismatch(start, mismatch)).collect()
}

/// Checks as fields of a command, and true if the fields express all of them but `checks_escapes`, which the specification
/// has no field for. They cannot express every mask of a storage tag, and with Type 1 no reference tag other than the LBA
/// (NVM, "Protection Information").
fn read_checks(format: PiFormat, start: Lba, checks: &Checks, storage_tag_mask: u64) -> (ProtectionInfo, bool) {
    let mut info = ProtectionInfo::NONE;
    let mut is_all = true;
    if checks.guard {
        info.prchk |= Prchk::GUARD;
    }
    if let Some(app) = checks.app_tag {
        info.prchk |= Prchk::APPLICATION_TAG;
        (info.lbat, info.lbatm) = (app.expected, app.mask);
    }
    let mut storage_tag = 0;
    if let Some(storage) = checks.storage_tag.filter(|storage| storage.mask & format.storage_tag_mask() != 0) {
        let mask = format.storage_tag_mask();
        if storage.mask & mask == storage_tag_mask & mask {
            info.stc = true;
            storage_tag = storage.expected;
        } else {
            is_all = false;
        }
    }
    let mut reference = if format.protection().increments_ref_tag() { start.get() } else { 0 };
    if let Some(first) =
        checks.initial_ref_tag.filter(|_| format.protection().increments_ref_tag() && format.reference_tag_bits() > 0)
    {
        let is_address = (first ^ start.get()) & format.reference_tag_mask() == 0;
        if format.protection() == ProtectionType::Type1 && !is_address {
            is_all = false;
        } else {
            info.prchk |= Prchk::REFERENCE_TAG;
            reference = first;
        }
    }
    (info.with_tags(format, storage_tag, reference), is_all)
}

#[cfg(test)]
mod tests;
