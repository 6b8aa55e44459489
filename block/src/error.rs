//! Errors: what failed, on which blocks, and on which device.

use std::fmt;

use sealblock_integrity::{Field, Mismatch};
use sealblock_units::{Extent, Lba};

use crate::{Coverage, RequestKind};

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
}

impl BadBlockCause {
    /// The name used in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            BadBlockCause::Tag(field) => field.as_str(),
            BadBlockCause::Media => "media",
            BadBlockCause::Conflict => "conflict",
            BadBlockCause::Stale => "stale",
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

    /// The width of the field in bits, for callers that do not know the format: the smallest legal width that holds both values.
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
            _ => write!(f, " unreadable")?,
        }
        if self.repaired { f.write_str(", repaired") } else { Ok(()) }
    }
}

/// Names a member of a group, of a group within that member, and so on: the member numbers from the outermost group inwards, from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct MemberPath(u64);

impl MemberPath {
    /// The device is no member of a group.
    pub const NONE: MemberPath = MemberPath(0);
    /// Members of one group that a path can name.
    pub const MAX_MEMBERS: usize = 127;
    const BITS: u32 = 7;

    /// The path as seen from a group whose member `number` contains it. Drops what is deeper than nine groups, and all of it for a
    /// number of [`MemberPath::MAX_MEMBERS`] or above.
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

/// The bad blocks of one request: at least one, in ascending order, each once per member that holds a bad copy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BadBlocks {
    list: Vec<BadBlock>,
    coverage: Coverage,
}

impl BadBlocks {
    /// Sorts the bad blocks and drops duplicates; none if there are no bad blocks.
    pub fn new(mut bad_blocks: Vec<BadBlock>) -> Option<BadBlocks> {
        bad_blocks.sort_by_key(|bad_block| (bad_block.lba, bad_block.member));
        bad_blocks.dedup_by_key(|bad_block| (bad_block.lba, bad_block.member));
        if bad_blocks.is_empty() { None } else { Some(BadBlocks { list: bad_blocks, coverage: Coverage::default() }) }
    }

    /// Fails with these bad blocks, if there are any.
    ///
    /// # Errors
    /// The bad blocks.
    pub fn fail_if_any(bad_blocks: Vec<BadBlock>) -> Result<(), Error> {
        BadBlocks::new(bad_blocks).map_or(Ok(()), |bad_blocks| Err(bad_blocks.into()))
    }

    /// The same bad blocks, with the coverage of the check that found them.
    #[must_use]
    pub fn with_coverage(self, coverage: Coverage) -> BadBlocks {
        BadBlocks { coverage, ..self }
    }

    /// The coverage of the check that found them; complete for reads.
    pub fn coverage(&self) -> &Coverage {
        &self.coverage
    }

    /// The first bad block.
    pub fn first(&self) -> &BadBlock {
        &self.list[0]
    }

    /// All bad blocks.
    pub fn as_slice(&self) -> &[BadBlock] {
        &self.list
    }

    /// All bad blocks, and the coverage of the check that found them.
    pub fn into_parts(self) -> (Vec<BadBlock>, Coverage) {
        (self.list, self.coverage)
    }
}

impl fmt::Display for BadBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.first())?;
        match self.list.len() {
            1 => Ok(()),
            n => write!(f, " (and {} more damaged blocks)", n - 1),
        }
    }
}

/// The kind of an error.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ErrorKind {
    /// Blocks do not match their tags, or are unreadable.
    #[error("integrity error: {0}")]
    Integrity(BadBlocks),
    /// Compared data differ.
    #[error("block {lba} differs from the data it was compared with")]
    Miscompare {
        /// The first block that differs.
        lba: Lba,
    },
    /// The medium failed.
    #[error("the medium failed: {reason}")]
    Media {
        /// The error of the medium.
        reason: String,
    },
    /// The medium is full.
    #[error("no space left on the medium: {reason}")]
    NoSpace {
        /// What was written.
        reason: String,
    },
    /// The device takes no writes.
    #[error("the device is open for reading only")]
    ReadOnly,
    /// Blocks past the end of the device.
    #[error("{extent} go past the last block, {last}")]
    Range {
        /// The requested blocks.
        extent: Extent,
        /// The last block of the device.
        last: Lba,
    },
    /// The request exceeds a limit or does not fit the device's geometry.
    #[error("{what}: {actual}, the device takes {limit}")]
    Limit {
        /// The quantity.
        what: &'static str,
        /// The device's value.
        limit: u64,
        /// The request's value.
        actual: u64,
    },
    /// The device does not support requests of this kind.
    #[error("the device does not support {}", .0.name())]
    Absent(RequestKind),
    /// The device is unreachable.
    #[error("the device cannot be reached: {reason}")]
    Unreachable {
        /// The reason.
        reason: String,
    },
}

/// An error, and the device that it happened on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    kind: Box<ErrorKind>,
    device_name: Option<Box<str>>,
}

impl Error {
    /// The kind of the error.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    /// The kind of the error, owned.
    pub fn into_kind(self) -> ErrorKind {
        *self.kind
    }

    /// The name of the device that failed, once its gate has added it.
    pub fn device_name(&self) -> Option<&str> {
        self.device_name.as_deref()
    }

    /// Names the device that failed, unless a device further down is named already.
    pub fn with_device(mut self, name: &str) -> Error {
        self.device_name.get_or_insert_with(|| name.into());
        self
    }

    /// The bad blocks, if the kind is [`ErrorKind::Integrity`].
    pub fn bad_blocks(&self) -> Option<&BadBlocks> {
        match &*self.kind {
            ErrorKind::Integrity(bad_blocks) => Some(bad_blocks),
            _ => None,
        }
    }

    /// The bad blocks, owned.
    ///
    /// # Errors
    /// An error of another kind.
    pub fn into_bad_blocks(self) -> Result<Vec<BadBlock>, Error> {
        self.into_damage().map(|(bad_blocks, _)| bad_blocks)
    }

    /// The bad blocks, and the coverage of the check that found them.
    ///
    /// # Errors
    /// An error of another kind.
    pub fn into_damage(self) -> Result<(Vec<BadBlock>, Coverage), Error> {
        match *self.kind {
            ErrorKind::Integrity(bad_blocks) => Ok(bad_blocks.into_parts()),
            kind => Err(Error { kind: Box::new(kind), device_name: self.device_name }),
        }
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Error {
        Error { kind: Box::new(kind), device_name: None }
    }
}

impl From<BadBlocks> for Error {
    fn from(bad_blocks: BadBlocks) -> Error {
        ErrorKind::Integrity(bad_blocks).into()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.device_name {
            Some(name) => write!(f, "{name}: {}", self.kind),
            None => write!(f, "{}", self.kind),
        }
    }
}

impl std::error::Error for Error {}

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
