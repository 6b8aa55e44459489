//! What went wrong, where, and at which hop.

use std::fmt;

use sealblock_integrity::{Field, Mismatch};
use sealblock_units::{Extent, Lba};

use crate::{Coverage, RequestKind};

/// The part of a block that failed its check.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BadBlockCause {
    /// A tag of the protection information.
    Tag(Field),
    /// The block, or the record that holds its tags, could not be read at all.
    Media,
    /// Copies of the block differ, each of them is good by itself, and nothing tells which one is right.
    Conflict,
    /// An older copy is kept here, and withheld: every copy that was up to date is lost.
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

/// One damaged block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BadBlock {
    /// The block.
    pub lba: Lba,
    /// What failed.
    pub cause: BadBlockCause,
    /// What the check computed or demanded; nothing for a medium's error.
    pub expected: Option<u64>,
    /// What was stored; nothing for a medium's error.
    pub actual: Option<u64>,
    /// Which leg of a group it is bad on.
    pub member: MemberPath,
    /// Whether it was written anew from another copy.
    pub repaired: bool,
}

impl BadBlock {
    /// The fault of a mismatch found `mismatch.block` blocks behind `start`.
    pub fn of_mismatch(start: Lba, mismatch: &Mismatch) -> BadBlock {
        let lba = Lba::new(start.get().saturating_add(mismatch.block as u64));
        BadBlock::new(lba, BadBlockCause::Tag(mismatch.field), Some(mismatch.expected), Some(mismatch.actual))
    }

    /// The width of the field as far as its values tell, for whoever does not know the format: the least of those there are that
    /// holds both.
    pub fn fitting_bits(&self) -> u32 {
        let used = u64::BITS - (self.expected.unwrap_or(0) | self.actual.unwrap_or(0)).leading_zeros();
        let least = if self.cause == BadBlockCause::Tag(Field::RefTag) { 32 } else { 16 };
        [16, 32, 48].into_iter().find(|bits| *bits >= used.max(least)).unwrap_or(64)
    }

    /// A fault of a device that is no group.
    pub const fn new(lba: Lba, field: BadBlockCause, expected: Option<u64>, actual: Option<u64>) -> BadBlock {
        BadBlock { lba, cause: field, expected, actual, member: MemberPath::NONE, repaired: false }
    }

    /// A block that the medium does not give.
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

/// Which leg of a group, and of groups within it: the numbers of the legs on the way down, from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct MemberPath(u64);

impl MemberPath {
    /// No group on the way.
    pub const NONE: MemberPath = MemberPath(0);
    /// Legs of one group that can be told apart.
    pub const MAX_MEMBERS: usize = 127;
    const BITS: u32 = 7;

    /// The same place seen from a group of which it is leg `number`, or within it. What is deeper than nine groups, or
    /// beyond [`MemberPath::MAX_MEMBERS`], is left out.
    #[must_use]
    pub const fn within(self, number: usize) -> MemberPath {
        if number >= MemberPath::MAX_MEMBERS {
            MemberPath::NONE
        } else {
            MemberPath((self.0 << MemberPath::BITS) | (number as u64 + 1))
        }
    }

    /// The number of the leg of the outermost group, and the place within that leg; nothing without a group.
    pub const fn outermost(self) -> Option<(usize, MemberPath)> {
        match (self.0 & ((1 << MemberPath::BITS) - 1)) as usize {
            0 => None,
            number => Some((number - 1, MemberPath(self.0 >> MemberPath::BITS))),
        }
    }
}

/// The damaged blocks that one request met: at least one, in rising order, each once for a leg that it is bad on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BadBlocks {
    list: Vec<BadBlock>,
    coverage: Coverage,
}

impl BadBlocks {
    /// The faults in order of their blocks, or nothing when there are none.
    pub fn new(mut faults: Vec<BadBlock>) -> Option<BadBlocks> {
        faults.sort_by_key(|fault| (fault.lba, fault.member));
        faults.dedup_by_key(|fault| (fault.lba, fault.member));
        if faults.is_empty() { None } else { Some(BadBlocks { list: faults, coverage: Coverage::default() }) }
    }

    /// Fails with these faults, if there are any.
    ///
    /// # Errors
    /// The faults, as an error.
    pub fn refuse(faults: Vec<BadBlock>) -> Result<(), Error> {
        BadBlocks::new(faults).map_or(Ok(()), |faults| Err(faults.into()))
    }

    /// The same faults, found by a check that went so far.
    #[must_use]
    pub fn covering(self, coverage: Coverage) -> BadBlocks {
        BadBlocks { coverage, ..self }
    }

    /// How far the check went that found them; of reads nothing is told.
    pub fn coverage(&self) -> &Coverage {
        &self.coverage
    }

    /// The first damaged block.
    pub fn first(&self) -> &BadBlock {
        &self.list[0]
    }

    /// Every damaged block.
    pub fn as_slice(&self) -> &[BadBlock] {
        &self.list
    }

    /// Every damaged block, and how far the check went.
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

/// What went wrong.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ErrorKind {
    /// Blocks do not match their tags, or could not be read.
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
        /// What the medium said.
        reason: String,
    },
    /// The medium is full.
    #[error("no space left on the medium: {reason}")]
    NoSpace {
        /// What was being written.
        reason: String,
    },
    /// The device takes no writes.
    #[error("the device is open for reading only")]
    ReadOnly,
    /// Blocks past the end of the device.
    #[error("{extent} go past the last block, {last}")]
    Range {
        /// What was asked.
        extent: Extent,
        /// The last block of the device.
        last: Lba,
    },
    /// The request breaks a limit or does not have the device's shape.
    #[error("{what}: {actual}, the device takes {limit}")]
    Limit {
        /// Which limit.
        what: &'static str,
        /// The device's value.
        limit: u64,
        /// The request's value.
        actual: u64,
    },
    /// The operation is not there.
    #[error("the device does not support {}", .0.name())]
    Absent(RequestKind),
    /// The device cannot be reached any more.
    #[error("the device cannot be reached: {reason}")]
    Unreachable {
        /// Why.
        reason: String,
    },
}

/// A failure and the hop it happened at.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    kind: Box<ErrorKind>,
    device_name: Option<Box<str>>,
}

impl Error {
    /// What went wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    /// What went wrong, owned.
    pub fn into_kind(self) -> ErrorKind {
        *self.kind
    }

    /// The name of the device at which it went wrong, once a gate has seen it.
    pub fn device_name(&self) -> Option<&str> {
        self.device_name.as_deref()
    }

    /// The same error, said to come from `hop` unless a deeper hop has claimed it.
    pub fn with_device(mut self, hop: &str) -> Error {
        self.device_name.get_or_insert_with(|| hop.into());
        self
    }

    /// The damaged blocks, if that is what the error is about.
    pub fn bad_blocks(&self) -> Option<&BadBlocks> {
        match &*self.kind {
            ErrorKind::Integrity(faults) => Some(faults),
            _ => None,
        }
    }

    /// The damaged blocks, owned, if that is what the error is about; every other error stays one.
    ///
    /// # Errors
    /// The error itself.
    pub fn into_bad_blocks(self) -> Result<Vec<BadBlock>, Error> {
        self.into_damage().map(|(faults, _)| faults)
    }

    /// The damaged blocks and how far the check went that found them; every other error stays one.
    ///
    /// # Errors
    /// The error itself.
    pub fn into_damage(self) -> Result<(Vec<BadBlock>, Coverage), Error> {
        match *self.kind {
            ErrorKind::Integrity(faults) => Ok(faults.into_parts()),
            failure => Err(Error { kind: Box::new(failure), device_name: self.device_name }),
        }
    }
}

impl From<ErrorKind> for Error {
    fn from(failure: ErrorKind) -> Error {
        Error { kind: Box::new(failure), device_name: None }
    }
}

impl From<BadBlocks> for Error {
    fn from(faults: BadBlocks) -> Error {
        ErrorKind::Integrity(faults).into()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.device_name {
            Some(hop) => write!(f, "{hop}: {}", self.kind),
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
        let fault = |field, expected, actual| BadBlock::new(Lba::ZERO, field, Some(expected), Some(actual));
        let of = |field, expected, actual| fault(field, expected, actual).fitting_bits();
        let (guard, tag) = (BadBlockCause::Tag(Field::Guard), BadBlockCause::Tag(Field::RefTag));
        assert_eq!((of(guard, 1, 0xffff), of(guard, 0x1_0000, 2), of(guard, 1 << 48, 2)), (16, 32, 64));
        assert_eq!((of(tag, 1, 2), of(tag, 1 << 32, 2), of(guard, 0, 0)), (32, 48, 16));
        let words = fault(guard, 0xabcde, 1).to_string();
        assert_eq!(words, "block 0: guard expected 0x000abcde, found 0x00000001");
    }
}
