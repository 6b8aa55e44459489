//! What went wrong, where, and at which hop.

use std::fmt;

use sealblock_integrity::{Field, Mismatch};
use sealblock_units::{Extent, Lba};

use crate::{Coverage, OperationKind};

/// The part of a block that failed its check.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FaultField {
    /// A tag of the protection information.
    Tag(Field),
    /// The block, or the record that holds its tags, could not be read at all.
    Media,
    /// Copies of the block differ, each of them is good by itself, and nothing tells which one is right.
    Conflict,
    /// An older copy is kept here, and withheld: every copy that was up to date is lost.
    Stale,
}

impl FaultField {
    /// The name used in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            FaultField::Tag(field) => field.as_str(),
            FaultField::Media => "media",
            FaultField::Conflict => "conflict",
            FaultField::Stale => "stale",
        }
    }
}

impl fmt::Display for FaultField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One damaged block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// The block.
    pub lba: Lba,
    /// What failed.
    pub field: FaultField,
    /// What the check computed or demanded; nothing for a medium's error.
    pub expected: Option<u64>,
    /// What was stored; nothing for a medium's error.
    pub actual: Option<u64>,
    /// Which leg of a group it is bad on.
    pub leg: Leg,
    /// Whether it was written anew from another copy.
    pub repaired: bool,
}

impl Fault {
    /// The fault of a mismatch found `mismatch.block` blocks behind `start`.
    pub fn of_mismatch(start: Lba, mismatch: &Mismatch) -> Fault {
        let lba = Lba::new(start.get().saturating_add(mismatch.block as u64));
        Fault::new(lba, FaultField::Tag(mismatch.field), Some(mismatch.expected), Some(mismatch.actual))
    }

    /// The width of the field as far as its values tell, for whoever does not know the format: the least of those there are that
    /// holds both.
    pub fn fitting_bits(&self) -> u32 {
        let used = u64::BITS - (self.expected.unwrap_or(0) | self.actual.unwrap_or(0)).leading_zeros();
        let least = if self.field == FaultField::Tag(Field::RefTag) { 32 } else { 16 };
        [16, 32, 48].into_iter().find(|bits| *bits >= used.max(least)).unwrap_or(64)
    }

    /// A fault of a device that is no group.
    pub const fn new(lba: Lba, field: FaultField, expected: Option<u64>, actual: Option<u64>) -> Fault {
        Fault { lba, field, expected, actual, leg: Leg::NONE, repaired: false }
    }

    /// A block that the medium does not give.
    pub const fn media(lba: Lba) -> Fault {
        Fault::new(lba, FaultField::Media, None, None)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}: {}", self.lba, self.field)?;
        match (self.expected, self.actual) {
            (Some(expected), Some(actual)) => {
                let width = 2 + self.fitting_bits() as usize / 4;
                write!(f, " expected {expected:#0width$x}, found {actual:#0width$x}")?;
            }
            _ if self.field == FaultField::Conflict => write!(f, " between good copies")?,
            _ if self.field == FaultField::Stale => write!(f, ": an older copy is kept here")?,
            _ => write!(f, " unreadable")?,
        }
        if self.repaired { f.write_str(", repaired") } else { Ok(()) }
    }
}

/// Which leg of a group, and of groups within it: the numbers of the legs on the way down, from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Leg(u64);

impl Leg {
    /// No group on the way.
    pub const NONE: Leg = Leg(0);
    /// Legs of one group that can be told apart.
    pub const MOST_LEGS: usize = 127;
    const BITS: u32 = 7;

    /// The same place seen from a group of which it is leg `number`, or within it. What is deeper than nine groups, or
    /// beyond [`Leg::MOST_LEGS`], is left out.
    #[must_use]
    pub const fn within(self, number: usize) -> Leg {
        if number >= Leg::MOST_LEGS { Leg::NONE } else { Leg((self.0 << Leg::BITS) | (number as u64 + 1)) }
    }

    /// The number of the leg of the outermost group, and the place within that leg; nothing without a group.
    pub const fn outermost(self) -> Option<(usize, Leg)> {
        match (self.0 & ((1 << Leg::BITS) - 1)) as usize {
            0 => None,
            number => Some((number - 1, Leg(self.0 >> Leg::BITS))),
        }
    }
}

/// The damaged blocks that one request met: at least one, in rising order, each once for a leg that it is bad on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Faults {
    list: Vec<Fault>,
    coverage: Coverage,
}

impl Faults {
    /// The faults in order of their blocks, or nothing when there are none.
    pub fn new(mut faults: Vec<Fault>) -> Option<Faults> {
        faults.sort_by_key(|fault| (fault.lba, fault.leg));
        faults.dedup_by_key(|fault| (fault.lba, fault.leg));
        if faults.is_empty() { None } else { Some(Faults { list: faults, coverage: Coverage::default() }) }
    }

    /// Fails with these faults, if there are any.
    ///
    /// # Errors
    /// The faults, as an error.
    pub fn refuse(faults: Vec<Fault>) -> Result<(), Error> {
        Faults::new(faults).map_or(Ok(()), |faults| Err(faults.into()))
    }

    /// The same faults, found by a check that went so far.
    #[must_use]
    pub fn covering(self, coverage: Coverage) -> Faults {
        Faults { coverage, ..self }
    }

    /// How far the check went that found them; of reads nothing is told.
    pub fn coverage(&self) -> &Coverage {
        &self.coverage
    }

    /// The first damaged block.
    pub fn first(&self) -> &Fault {
        &self.list[0]
    }

    /// Every damaged block.
    pub fn as_slice(&self) -> &[Fault] {
        &self.list
    }

    /// Every damaged block, and how far the check went.
    pub fn into_parts(self) -> (Vec<Fault>, Coverage) {
        (self.list, self.coverage)
    }
}

impl fmt::Display for Faults {
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
pub enum Failure {
    /// Blocks do not match their tags, or could not be read.
    #[error("integrity error: {0}")]
    Integrity(Faults),
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
    #[error("the device has no {}", .0.name())]
    Absent(OperationKind),
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
    failure: Box<Failure>,
    hop: Option<Box<str>>,
}

impl Error {
    /// What went wrong.
    pub fn failure(&self) -> &Failure {
        &self.failure
    }

    /// What went wrong, owned.
    pub fn into_failure(self) -> Failure {
        *self.failure
    }

    /// The name of the device at which it went wrong, once a gate has seen it.
    pub fn hop(&self) -> Option<&str> {
        self.hop.as_deref()
    }

    /// The same error, said to come from `hop` unless a deeper hop has claimed it.
    pub fn at(mut self, hop: &str) -> Error {
        self.hop.get_or_insert_with(|| hop.into());
        self
    }

    /// The damaged blocks, if that is what the error is about.
    pub fn faults(&self) -> Option<&Faults> {
        match &*self.failure {
            Failure::Integrity(faults) => Some(faults),
            _ => None,
        }
    }

    /// The damaged blocks, owned, if that is what the error is about; every other error stays one.
    ///
    /// # Errors
    /// The error itself.
    pub fn into_faults(self) -> Result<Vec<Fault>, Error> {
        self.into_damage().map(|(faults, _)| faults)
    }

    /// The damaged blocks and how far the check went that found them; every other error stays one.
    ///
    /// # Errors
    /// The error itself.
    pub fn into_damage(self) -> Result<(Vec<Fault>, Coverage), Error> {
        match *self.failure {
            Failure::Integrity(faults) => Ok(faults.into_parts()),
            failure => Err(Error { failure: Box::new(failure), hop: self.hop }),
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        Error { failure: Box::new(failure), hop: None }
    }
}

impl From<Faults> for Error {
    fn from(faults: Faults) -> Error {
        Failure::Integrity(faults).into()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.hop {
            Some(hop) => write!(f, "{hop}: {}", self.failure),
            None => write!(f, "{}", self.failure),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_an_unknown_format_have_one_width_that_fits_both() {
        let fault = |field, expected, actual| Fault::new(Lba::ZERO, field, Some(expected), Some(actual));
        let of = |field, expected, actual| fault(field, expected, actual).fitting_bits();
        let (guard, tag) = (FaultField::Tag(Field::Guard), FaultField::Tag(Field::RefTag));
        assert_eq!((of(guard, 1, 0xffff), of(guard, 0x1_0000, 2), of(guard, 1 << 48, 2)), (16, 32, 64));
        assert_eq!((of(tag, 1, 2), of(tag, 1 << 32, 2), of(guard, 0, 0)), (32, 48, 16));
        let words = fault(guard, 0xabcde, 1).to_string();
        assert_eq!(words, "block 0: guard expected 0x000abcde, found 0x00000001");
    }
}
