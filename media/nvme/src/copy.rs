//! Copy within a namespace: the command of one part of a request, and the reasons for the conditions on it
//! ([`CopyPlan::of`]).
//!
//! Copies keep their tags, as if they were read and written (`sealblock_block::Operation::Copy`). With PRACT of PRINFOR
//! and PRINFOW cleared a controller stores the tuples as it has read them. These are correct if tuples do not depend on
//! the address: without protection information, and in Type 3. In Types 1 and 2 the reference tags would be those of
//! the source. With PRACT set in both the controller makes new tuples, one application and storage tag for all blocks,
//! and a valid guard for a block that was exempt from checks. A Read and a Write do the same anyway if the controller
//! makes all tags ([`PiMode::Target`]), and only then. PRACT set in only one of them is an error (NVM, "Copy command").

use sealblock_block::Durability;
use sealblock_integrity::Checks;
use sealblock_protocols_nvme::Count8;
use sealblock_protocols_nvme::nvm::{CopyCommand, CopyRange, Prchk, ProtectionInfo};
use sealblock_units::Extent;

use crate::profile::{CopyPlan, NamespaceProfile, PiMode};

impl NamespaceProfile {
    /// The command that copies `source`, at most [`CopyPlan::command_blocks`], with its source ranges; `None` if no
    /// command can express these checks.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::PiSource;
    use crate::profile::tests::copying;
    use sealblock_integrity::{GuardKind, Masked, PiFormat, ProtectionType};

    fn extent(start: u64, blocks: u64) -> Extent {
        Extent::from_raw(start, blocks).unwrap()
    }

    fn command(
        (format, source): (Option<PiFormat>, PiSource),
        from: Extent,
        to: u64,
        checks: Checks,
    ) -> Option<(CopyCommand, Vec<CopyRange>)> {
        let profile = copying(format, source, |_| ());
        let plan = profile.copy.expect("tags stay as they are");
        profile.copy_command(&plan, from, extent(to, from.len()), &checks, Durability::ForceUnitAccess)
    }

    #[test]
    fn parts_have_no_more_ranges_than_a_command_takes() {
        let profile = copying(None, PiSource::Auto, |_| ());
        let plan = profile.copy.unwrap();
        for source in [extent(0, 400), extent(39, 300), extent(79, 2), extent(81, 240)] {
            let mut next = source.start().get();
            for part in source.split_aligned(plan.command_blocks) {
                let to = extent(500, part.len());
                let made = profile.copy_command(&plan, part, to, &Checks::NONE, Durability::Volatile);
                let (command, ranges) = made.unwrap();
                assert!(ranges.len() <= 3 && usize::from(command.ranges.get()) == ranges.len());
                for range in ranges {
                    assert_eq!(range.extent.start().get(), next);
                    assert!(range.extent.len() <= 40);
                    next += range.extent.len();
                }
            }
            assert_eq!(next, source.last().get() + 1);
        }
    }

    #[test]
    fn both_sides_have_pract_where_the_controller_makes_tags_and_neither_elsewhere() {
        let of = |kind| PiFormat::with_default_storage_tag(GuardKind::Crc16, kind);
        let (type1, type3) = (of(ProtectionType::Type1), of(ProtectionType::Type3));
        let (made, ranges) = command((Some(type1), PiSource::Target), extent(30, 20), 100, Checks::NONE).unwrap();
        assert!(made.read.pract && made.write.pract && made.force_unit_access);
        assert_eq!(made.write.reference_tag(type1), 100);
        // The drive checks all it can, each range from its own first block.
        let all = Prchk::GUARD | Prchk::REFERENCE_TAG;
        let sides: Vec<_> =
            ranges.iter().map(|range| (range.protection.prchk, range.protection.reference_tag(type1))).collect();
        assert_eq!(sides, [(all, 30), (all, 40)]);
        let checks = Checks {
            guard: true,
            app_tag: Some(Masked { expected: 7, mask: 0xFF }),
            initial_ref_tag: Some(9),
            ..Checks::NONE
        };
        let (kept, ranges) = command((Some(type3), PiSource::Host), extent(0, 8), 100, checks).unwrap();
        assert!(!kept.read.pract && !kept.write.pract);
        assert_eq!(kept.write, ProtectionInfo { prchk: Prchk::GUARD, ..ProtectionInfo::NONE });
        let read = ranges[0].protection;
        assert_eq!((read.prchk, read.lbat, read.lbatm), (Prchk::GUARD | Prchk::APPLICATION_TAG, 7, 0xFF));
        let (blind, _) = command((Some(type3), PiSource::Host), extent(0, 8), 100, Checks::NONE).unwrap();
        assert_eq!((blind.read.prchk, blind.write.prchk), (Prchk::NONE, Prchk::NONE));
        assert!(
            command((None, PiSource::Auto), extent(0, 8), 100, Checks::NONE).unwrap().0.write == ProtectionInfo::NONE
        );
    }
}
