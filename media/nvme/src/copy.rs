//! Copy within a namespace: the command of one part of a request, and why it is used only where it is ([`CopyPlan::of`]).
//!
//! Copies keep their tags, as if they were read and written (`sealblock_block::Operation::Copy`). With PRACT of PRINFOR and PRINFOW
//! cleared a controller stores the tuples as it has read them. These are right where tuples do not depend on the address: without
//! protection information, and in Type 3. In Types 1 and 2 the reference tags would be those of the source. With PRACT set in both the
//! controller makes new tuples, one application and storage tag for all blocks, and a valid guard for a block that was exempt from
//! checks. That is what a Read and a Write do anyway where the controller makes all tags ([`PiMode::Target`]), and nowhere else. PRACT set in
//! only one of them is an error (NVM, "Copy command").

use sealblock_block::Durability;
use sealblock_integrity::Checks;
use sealblock_protocols_nvme::Count8;
use sealblock_protocols_nvme::nvm::{CopyCommand, CopyRange, Prchk, ProtectionInfo};
use sealblock_units::Extent;

use crate::profile::{CopyPlan, NamespaceProfile, PiMode};

impl NamespaceProfile {
    /// The command that copies `source`, at most [`CopyPlan::command_blocks`], with its source ranges; `None` if no command says these checks.
    pub fn copy_command(
        &self,
        plan: &CopyPlan,
        source: Extent,
        destination: Extent,
        checks: &Checks,
        durability: Durability,
    ) -> Option<(CopyCommand, Vec<CopyRange>)> {
        let mut ranges = Vec::new();
        for extent in source.split_aligned(plan.range_blocks) {
            let onward = extent.start().get() - source.start().get();
            let checks = self.pi_mode.shown().map_or(*checks, |format| checks.advance(onward, format));
            let (protection, says_all) = self.read_checks(extent, &checks, false);
            if !says_all {
                return None;
            }
            ranges.push(CopyRange { extent, protection });
        }
        let read = ranges.first()?.protection;
        let write = match self.pi_mode {
            PiMode::None => ProtectionInfo::NONE,
            PiMode::Target(_) => self.new_tags(destination),
            PiMode::Host(_) => ProtectionInfo { prchk: read.prchk & Prchk::GUARD, ..ProtectionInfo::NONE },
        };
        let command = CopyCommand {
            destination: destination.start(),
            ranges: Count8::saturating(u16::try_from(ranges.len()).ok()?),
            format: plan.format,
            read,
            write,
            force_unit_access: durability == Durability::ForceUnitAccess,
            limited_retry: false,
        };
        Some((command, ranges))
    }
}
