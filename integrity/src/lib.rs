//! Guards and protection information: seal, verify, rebase and combine.
//!
//! Pure functions over byte slices. A *guard* is a checksum over one block; a *tuple* is the guard together with the
//! application, storage and reference tags, in the layout of the NVM Command Set specification. [`seal`] computes
//! tuples from data, [`verify`] checks them, [`rebase`] checks tuples of one format and creates those of another, and
//! [`combine`] computes the CRC of a whole from the guards of its parts.
//!
//! Invariants: nothing here does I/O, allocates on the path of a block, or trusts any byte of its input. A length that
//! does not fit the format is a bug of the caller and panics; a tuple that does not match its data is a [`Mismatch`].
//! One loop serves all formats: a tuple is loaded as one big-endian integer and compared under one mask, so blocks
//! without mismatch cost the checksum and a few instructions.

pub mod combine;
pub mod guard;

mod checks;
mod checksum;
mod crc32c;
mod field;
mod format;
mod rebase;
mod seal;
mod sealed;
mod tuple;
mod unsealed;

pub use checks::{Checks, Field, Masked, Mismatch};
pub use checksum::ChecksumKind;
pub use format::{FormatError, GuardKind, PiFormat, ProtectionType};
pub use rebase::{Keep, RebaseTags, rebase};
pub use seal::{Interleave, PiPosition, seal, seal_interleaved, verify, verify_interleaved};
pub use sealed::{Sealed, ShapeError, Unverified};
pub use tuple::{Tags, Tuple};
pub use unsealed::Unsealed;

#[cfg(test)]
mod tests;
