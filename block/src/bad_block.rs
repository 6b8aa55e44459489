//! Bad blocks: which, why, and on which member of a group.

use std::fmt;

use sealblock_integrity::{Field, Mismatch};
use sealblock_units::Lba;

/// Why a block is bad.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BadBlockCause {
    /// This field of its protection information does not match.
    Tag(Field),
    /// The block, or the metadata that holds its tags, is unreadable.
    Media,
    /// Copies of the block differ, and each of them matches its own tags, so the right one is unknown.
    Conflict,
    /// Every in-sync copy is lost. An older copy remains and is not returned.
    Stale,
    /// A copy is bad where a crash left copies different, and another one has the block: it can be read once the copies are compared.
    Unsettled,
}

impl BadBlockCause {
    /// The name used in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            BadBlockCause::Tag(field) => field.as_str(),
            BadBlockCause::Media => "media",
            BadBlockCause::Conflict => "conflict",
            BadBlockCause::Stale => "stale",
            BadBlockCause::Unsettled => "unsettled",
        }
    }
}

impl fmt::Display for BadBlockCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One bad block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BadBlock {
    /// The block.
    pub lba: Lba,
    /// Why it is bad.
    pub cause: BadBlockCause,
    /// The value that the check computed or requires; none for an unreadable block.
    pub expected: Option<u64>,
    /// The stored value; none for an unreadable block.
    pub actual: Option<u64>,
    /// The member of a group that holds the bad copy.
    pub member: MemberPath,
    /// True if the block was rewritten from another copy.
    pub repaired: bool,
}

impl BadBlock {
    /// The bad block of a mismatch in a run of blocks that begins at `start`.
    pub fn of_mismatch(start: Lba, mismatch: &Mismatch) -> BadBlock {
        let lba = Lba::new(start.get().saturating_add(mismatch.block as u64));
        BadBlock::new(lba, BadBlockCause::Tag(mismatch.field), Some(mismatch.expected), Some(mismatch.actual))
    }

    /// The width of the field in bits, for callers that do not know the format: the smallest legal width that holds
    /// both values.
    pub fn fitting_bits(&self) -> u32 {
        let used = u64::BITS - (self.expected.unwrap_or(0) | self.actual.unwrap_or(0)).leading_zeros();
        let min = if self.cause == BadBlockCause::Tag(Field::RefTag) { 32 } else { 16 };
        [16, 32, 48].into_iter().find(|bits| *bits >= used.max(min)).unwrap_or(64)
    }

    /// A bad block of a device that is no group.
    pub const fn new(lba: Lba, cause: BadBlockCause, expected: Option<u64>, actual: Option<u64>) -> BadBlock {
        BadBlock { lba, cause, expected, actual, member: MemberPath::NONE, repaired: false }
    }

    /// An unreadable block.
    pub const fn media(lba: Lba) -> BadBlock {
        BadBlock::new(lba, BadBlockCause::Media, None, None)
    }
}

impl fmt::Display for BadBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}: {}", self.lba, self.cause)?;
        match (self.expected, self.actual) {
            (Some(expected), Some(actual)) => {
                let width = 2 + self.fitting_bits() as usize / 4;
                write!(f, " expected {expected:#0width$x}, found {actual:#0width$x}")?;
            }
            _ if self.cause == BadBlockCause::Conflict => write!(f, " between good copies")?,
            _ if self.cause == BadBlockCause::Stale => write!(f, ": an older copy is kept here")?,
            _ if self.cause == BadBlockCause::Unsettled => write!(
                f,
                ": bad where a crash left replicas different, and another one has it: open the mirror for writing"
            )?,
            _ => write!(f, " unreadable")?,
        }
        if self.repaired { f.write_str(", repaired") } else { Ok(()) }
    }
}

/// The path to a member of a group, of a group within that member, and so on: the member numbers from the outermost
/// group inwards, from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct MemberPath(u64);

impl MemberPath {
    /// The device is no member of a group.
    pub const NONE: MemberPath = MemberPath(0);
    /// The number of members of a group that a path can name.
    pub const MAX_MEMBERS: usize = 127;
    const BITS: u32 = 7;

    /// The path as seen from a group whose member `number` contains it. Levels beyond nine are dropped, and the whole
    /// path if the number is [`MemberPath::MAX_MEMBERS`] or above.
    #[must_use]
    pub const fn within(self, number: usize) -> MemberPath {
        if number >= MemberPath::MAX_MEMBERS {
            MemberPath::NONE
        } else {
            MemberPath((self.0 << MemberPath::BITS) | (number as u64 + 1))
        }
    }

    /// The member number in the outermost group, and the path within that member; none without a group.
    pub const fn outermost(self) -> Option<(usize, MemberPath)> {
        match (self.0 & ((1 << MemberPath::BITS) - 1)) as usize {
            0 => None,
            number => Some((number - 1, MemberPath(self.0 >> MemberPath::BITS))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_an_unknown_format_have_one_width_that_fits_both() {
        let bad_block = |cause, expected, actual| BadBlock::new(Lba::ZERO, cause, Some(expected), Some(actual));
        let of = |cause, expected, actual| bad_block(cause, expected, actual).fitting_bits();
        let (guard, tag) = (BadBlockCause::Tag(Field::Guard), BadBlockCause::Tag(Field::RefTag));
        assert_eq!((of(guard, 1, 0xffff), of(guard, 0x1_0000, 2), of(guard, 1 << 48, 2)), (16, 32, 64));
        assert_eq!((of(tag, 1, 2), of(tag, 1 << 32, 2), of(guard, 0, 0)), (32, 48, 16));
        let text = bad_block(guard, 0xabcde, 1).to_string();
        assert_eq!(text, "block 0: guard expected 0x000abcde, found 0x00000001");
    }
}
