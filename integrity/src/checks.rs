//! Checks of tuples, and the mismatches that they report.

use std::fmt;

use sealblock_units::Lba;

use crate::tuple;
use crate::{PiFormat, ProtectionType};

/// A value that is compared under a mask: only the bits that are set in `mask` are compared.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Masked<T> {
    /// The required value.
    pub expected: T,
    /// The bits that are compared.
    pub mask: T,
}

/// What is checked in a run of blocks. The default checks nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Checks {
    /// True if the guard must match the data.
    pub guard: bool,
    /// The required application tag of every block; not checked if `None`.
    pub app_tag: Option<Masked<u16>>,
    /// The required storage tag of every block; not checked if `None`.
    pub storage_tag: Option<Masked<u64>>,
    /// The required reference tag of the first block; that of each further block must be one more. Truncated to the
    /// bits of the format. Not checked if `None`, nor in Type 3, where the reference tag belongs to the application.
    pub initial_ref_tag: Option<u64>,
    /// True if blocks whose tuples disable checks are checked as well. Deallocated blocks have such tuples, so with a
    /// required application tag other than FFFFh a block fails that was never written.
    pub checks_escapes: bool,
}

impl Checks {
    /// Checks nothing.
    pub const NONE: Checks =
        Checks { guard: false, app_tag: None, storage_tag: None, initial_ref_tag: None, checks_escapes: false };

    /// The checks that every stored block must pass, whichever host wrote it, for a run that starts at `start`: the
    /// guard and, in Type 1, that reference tags are the low bits of the address. In Types 2 and 3 the writer chooses
    /// the reference tags.
    pub fn full(format: PiFormat, start: Lba) -> Checks {
        let is_address = format.protection() == ProtectionType::Type1;
        let initial_ref_tag = is_address.then(|| format.reference_tag(start.get(), 0));
        Checks { guard: true, initial_ref_tag, ..Checks::NONE }
    }

    /// The same checks for the run that starts `blocks` blocks later.
    pub fn advance(&self, blocks: u64, format: PiFormat) -> Checks {
        Checks { initial_ref_tag: self.initial_ref_tag.map(|first| format.reference_tag(first, blocks)), ..*self }
    }
}

/// A field of a tuple.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Field {
    /// The checksum of the data.
    Guard,
    /// The application tag.
    AppTag,
    /// The reference tag.
    RefTag,
    /// The storage tag.
    StorageTag,
}

impl Field {
    /// The name in reports: `guard`, `app_tag`, `ref_tag` or `storage_tag`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Field::Guard => "guard",
            Field::AppTag => "app_tag",
            Field::RefTag => "ref_tag",
            Field::StorageTag => "storage_tag",
        }
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A block whose tuple does not match.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Mismatch {
    /// Which block of the run, counted from 0.
    pub block: usize,
    /// The first field that failed, in the order guard, application tag, reference tag, storage tag.
    pub field: Field,
    /// The required value: computed from the data, or given by the check. Bits that a mask excludes are as in the
    /// tuple, so that expected and actual value differ only in the wrong bits.
    pub expected: u64,
    /// The value in the tuple.
    pub actual: u64,
}

/// [`Checks`] compiled for one format: the required tuple, and the mask under which tuples are compared.
pub(crate) struct CompiledChecks {
    format: PiFormat,
    /// True if the guard is computed.
    pub(crate) guard: bool,
    /// The bits of a tuple that are compared, guard included.
    mask: u128,
    /// The required application and storage tags, only the bits that are compared.
    fixed: u128,
    initial_ref_tag: u64,
    /// The bits of the reference tag that are compared.
    ref_mask: u64,
    escape: u128,
    checks_escapes: bool,
}

impl CompiledChecks {
    pub(crate) fn new(format: PiFormat, checks: &Checks) -> CompiledChecks {
        let space = u32::from(format.guard().space_bits());
        let mut compiled = CompiledChecks {
            format,
            guard: checks.guard,
            mask: 0,
            fixed: 0,
            initial_ref_tag: 0,
            ref_mask: 0,
            escape: tuple::escape_mask(format),
            checks_escapes: checks.checks_escapes,
        };
        if checks.guard {
            compiled.mask |= u128::from(u64::MAX >> (64 - format.guard().bits())) << (space + 16);
        }
        if let Some(app) = checks.app_tag {
            compiled.mask |= u128::from(app.mask) << space;
            compiled.fixed |= u128::from(app.expected & app.mask) << space;
        }
        if let Some(storage) = checks.storage_tag {
            let mask = storage.mask & format.storage_tag_mask();
            compiled.mask |= u128::from(mask) << format.reference_tag_bits();
            compiled.fixed |= u128::from(storage.expected & mask) << format.reference_tag_bits();
        }
        if let (Some(first), true) = (checks.initial_ref_tag, format.protection().increments_ref_tag()) {
            compiled.initial_ref_tag = first;
            compiled.ref_mask = format.reference_tag_mask();
            compiled.mask |= u128::from(compiled.ref_mask);
        }
        compiled
    }

    /// True if nothing is checked.
    pub(crate) fn is_empty(&self) -> bool {
        self.mask == 0
    }

    /// True if the tuple disables the check of its block, and may.
    #[inline(always)]
    pub(crate) fn is_escaped(&self, found: u128) -> bool {
        found & self.escape == self.escape && !self.checks_escapes
    }

    /// The required tuple of a block, correct in the bits of the mask. `guard` must already be shifted to its position.
    #[inline(always)]
    pub(crate) fn tuple(&self, block: usize, guard: u128) -> u128 {
        guard | self.fixed | u128::from(self.initial_ref_tag.wrapping_add(block as u64) & self.ref_mask)
    }

    /// True if a tuple is as required.
    #[inline(always)]
    pub(crate) fn matches(&self, found: u128, required: u128) -> bool {
        (found ^ required) & self.mask == 0
    }

    /// The first field that is not as required. The tuple must not match.
    #[cold]
    pub(crate) fn mismatch(&self, block: usize, found: u128, required: u128) -> Mismatch {
        let should = tuple::unpack(self.format, (required & self.mask) | (found & !self.mask));
        let is = tuple::unpack(self.format, found);
        let (field, expected, actual) = if should.guard != is.guard {
            (Field::Guard, should.guard, is.guard)
        } else if should.app_tag != is.app_tag {
            (Field::AppTag, u64::from(should.app_tag), u64::from(is.app_tag))
        } else if should.ref_tag != is.ref_tag {
            (Field::RefTag, should.ref_tag, is.ref_tag)
        } else {
            (Field::StorageTag, should.storage_tag, is.storage_tag)
        };
        Mismatch { block, field, expected, actual }
    }
}
