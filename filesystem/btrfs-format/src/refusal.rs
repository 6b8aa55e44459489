//! Why a node is refused: the broken rule, and the field, item and node that break it.
//!
//! There are few rules but many fields, so the field is a parameter of the rule.

use crate::checksum::ChecksumMismatch;
use crate::error::DecodeError;
use crate::key::Key;

/// A broken rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Rule {
    /// It does not have the shape of its type.
    #[error(transparent)]
    Shape(#[from] DecodeError),
    /// The checksum is wrong.
    #[error(transparent)]
    Checksum(#[from] ChecksumMismatch),
    /// The node belongs to another filesystem.
    #[error("it is of another filesystem")]
    ForeignNode,
    /// A field does not have the required value.
    #[error("{field} is {found} instead of {expected}")]
    Other {
        /// The field.
        field: &'static str,
        /// What it must be.
        expected: u64,
        /// What it is.
        found: u64,
    },
    /// A key is not the expected one.
    #[error("{field} is {found} instead of {expected}")]
    OtherKey {
        /// Which key.
        field: &'static str,
        /// What it must be.
        expected: Key,
        /// What it is.
        found: Key,
    },
    /// A field is out of its range.
    #[error("{field} is {found}: from {least} to {most} it can be")]
    Range {
        /// The field.
        field: &'static str,
        /// The minimum.
        least: u64,
        /// The maximum.
        most: u64,
        /// What it is.
        found: u64,
    },
    /// A field is not a multiple of its unit.
    #[error("{field} is {found}, not a multiple of {unit}")]
    Alignment {
        /// The field.
        field: &'static str,
        /// Bytes of the unit.
        unit: u64,
        /// What it is.
        found: u64,
    },
    /// A field has undefined bits, or an undefined number.
    #[error("{field} is {found:#x}, which means nothing known")]
    Unknown {
        /// The field.
        field: &'static str,
        /// What it is.
        found: u64,
    },
    /// Fields contradict each other, or a sum exceeds 64 bits.
    #[error("{0}")]
    Contradiction(&'static str),
    /// Something overlaps what comes before it.
    #[error("{what} begins at {start}, and the one before ends at {end}")]
    Overlap {
        /// What overlaps.
        what: &'static str,
        /// Where the previous one ends.
        end: u64,
        /// Where this one begins.
        start: u64,
    },
    /// Keys are not in ascending order.
    #[error("it follows {0}, which does not come before it")]
    KeyOrder(Key),
    /// It belongs to an inode, but follows an item of another object.
    #[error("it follows {0}, which is nothing of its inode")]
    Detached(Key),
    /// The references after an extent are not sorted.
    #[error("references are not in their order")]
    ReferenceOrder,
    /// It uses a feature that the filesystem does not have.
    #[error("the filesystem has not the feature {0}")]
    Feature(&'static str),
}

/// A broken rule, and where.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("node {bytenr} of tree {owner}{}: {rule}", Place(*slot, *key))]
pub struct Refusal {
    /// The logical address of the node.
    pub bytenr: u64,
    /// The tree.
    pub owner: u64,
    /// The index of the item or pointer, from 0, if the rule is about one.
    pub slot: Option<usize>,
    /// Its key.
    pub key: Option<Key>,
    /// The rule.
    pub rule: Rule,
}

struct Place(Option<usize>, Option<Key>);

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.map_or(Ok(()), |slot| write!(f, ", slot {slot}"))?;
        self.1.map_or(Ok(()), |key| write!(f, ", {key}"))
    }
}

pub(crate) fn same(field: &'static str, found: impl Into<u64>, expected: impl Into<u64>) -> Result<(), Rule> {
    let (expected, found) = (expected.into(), found.into());
    if expected == found { Ok(()) } else { Err(Rule::Other { field, expected, found }) }
}

pub(crate) fn within(field: &'static str, found: impl Into<u64>, least: u64, most: u64) -> Result<(), Rule> {
    let found = found.into();
    if (least..=most).contains(&found) { Ok(()) } else { Err(Rule::Range { field, least, most, found }) }
}

/// Checks a multiple of the unit, which is a power of two.
pub(crate) fn aligned(field: &'static str, found: u64, unit: u32) -> Result<(), Rule> {
    let unit = u64::from(unit);
    if found.is_multiple_of(unit) { Ok(()) } else { Err(Rule::Alignment { field, unit, found }) }
}

pub(crate) fn known(field: &'static str, found: u64, bits: u64) -> Result<(), Rule> {
    if found & !bits == 0 { Ok(()) } else { Err(Rule::Unknown { field, found }) }
}

pub(crate) fn consistent(holds: bool, contradiction: &'static str) -> Result<(), Rule> {
    if holds { Ok(()) } else { Err(Rule::Contradiction(contradiction)) }
}

/// The end of a range, if it does not exceed 64 bits.
pub(crate) fn end(start: u64, length: u64, contradiction: &'static str) -> Result<u64, Rule> {
    start.checked_add(length).ok_or(Rule::Contradiction(contradiction))
}

/// Checks that something begins at or after the end of what comes before it.
pub(crate) fn behind(what: &'static str, start: u64, end: u64) -> Result<(), Rule> {
    if start >= end { Ok(()) } else { Err(Rule::Overlap { what, end, start }) }
}
