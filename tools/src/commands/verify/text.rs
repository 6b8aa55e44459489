//! The lines of `verify` for bad blocks.

use std::sync::Arc;

use sealblock_block::{BadBlock, BadBlockCause, Unchecked};
use sealblock_integrity::{Field as TagField, PiFormat};
use sealblock_stack::MemberNames;
use sealblock_stack::range::Run;

use crate::findings::Finding;
use crate::report::{BlockError, Hex, NotChecked, cause_text};

/// A run of bad blocks.
#[derive(Clone, Debug)]
pub(super) struct Damage {
    field: BadBlockCause,
    member: Option<String>,
    repaired: bool,
    /// The expected and the actual value, of the first block.
    values: Option<(Hex, Hex)>,
    /// What the line begins with.
    prefix: Arc<str>,
}

impl Damage {
    pub(super) fn of(error: &BlockError, prefix: &Arc<str>) -> Damage {
        let BlockError { field, member, repaired, expected, actual, .. } = error;
        let values = expected.zip(*actual);
        Damage { field: *field, member: member.clone(), repaired: *repaired, values, prefix: Arc::clone(prefix) }
    }
}

impl PartialEq for Damage {
    /// Equal but for the values, which differ from block to block.
    fn eq(&self, other: &Damage) -> bool {
        (self.field, &self.member, self.repaired) == (other.field, &other.member, other.repaired)
    }
}

impl Finding for Damage {
    fn line(run: &Run<Damage>) -> String {
        let Damage { field, member, repaired, values, prefix } = &run.what;
        let what = match (field, values, run.blocks) {
            (_, Some((expected, actual)), 1) => format!("expected {expected}, found {actual}"),
            (BadBlockCause::Media, ..) => "cannot be read".to_owned(),
            (BadBlockCause::Conflict, ..) => "good copies differ".to_owned(),
            (BadBlockCause::Stale, ..) => "an older copy is kept here; --accept-stale accepts it".to_owned(),
            (BadBlockCause::Unsettled, ..) => {
                "bad where a crash left replicas different, and another one has it".to_owned()
            }
            // A remote device names the field, but not always its value.
            _ => "does not match".to_owned(),
        };
        let member = member.as_ref().map_or(String::new(), |member| format!(" on {member}"));
        let repaired = if *repaired { ", repaired" } else { "" };
        format!("{prefix}{}{member}: {}: {what}{repaired}", run.place(), cause_text(*field))
    }
}

/// A bad block as an entry of the report.
pub(super) fn block_error(fault: &BadBlock, format: Option<PiFormat>, members: &MemberNames) -> BlockError {
    let bits = match (fault.cause, format) {
        (BadBlockCause::Tag(TagField::Guard), Some(format)) => format.guard().bits(),
        (BadBlockCause::Tag(TagField::RefTag), Some(format)) => u32::from(format.reference_tag_bits()),
        (BadBlockCause::Tag(TagField::Guard | TagField::RefTag), None) => fault.fitting_bits(),
        _ => 16,
    };
    let hex = |value: Option<u64>| value.map(|value| Hex::new(u128::from(value), bits));
    BlockError {
        lba: fault.lba.get(),
        field: fault.cause,
        expected: hex(fault.expected),
        actual: hex(fault.actual),
        member: members.of(fault.member),
        repaired: fault.repaired,
        files: None,
    }
}

/// A run of unchecked blocks as an entry of the report.
pub(super) fn not_checked(run: &Unchecked, members: &MemberNames) -> NotChecked {
    let member = members.of(run.member);
    NotChecked { member, first: run.first.get(), last: run.last.get(), why: run.why.to_text().into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::findings::Finding;

    #[test]
    fn one_block_is_told_with_its_values_and_several_without() {
        let of = |error: &BlockError| Damage::of(error, &"".into());
        let hex = |value| Some(Hex::new(value, 16));
        let error = BlockError {
            lba: 7,
            field: BadBlockCause::Tag(TagField::Guard),
            expected: hex(1),
            actual: hex(2),
            member: None,
            repaired: false,
            files: None,
        };
        let run =
            |blocks, error: &BlockError| Damage::line(&Run::new(error.lba, blocks, Damage::of(error, &"".into())));
        assert_eq!(run(1, &error), "block 7: guard: expected 0x0001, found 0x0002");
        assert_eq!(run(3, &error), "blocks 7..9: guard: does not match");
        let away = BlockError { expected: None, actual: None, ..error.clone() };
        assert_eq!(run(1, &away), "block 7: guard: does not match");
        let media = BlockError { field: BadBlockCause::Media, member: Some("b".to_owned()), repaired: true, ..away };
        assert_eq!(run(2, &media), "blocks 7..8 on b: medium: cannot be read, repaired");
        assert_ne!(of(&media), of(&BlockError { repaired: false, ..media.clone() }));
        assert_eq!(of(&error), of(&BlockError { actual: hex(9), ..error.clone() }));
    }
}
