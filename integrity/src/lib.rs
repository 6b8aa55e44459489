//! Guards and protection information: seal, verify, rebase, combine.
//!
//! Pure functions over byte slices. A *guard* is a checksum over one block; a *tuple* is the guard together with the
//! application, storage and reference tags, in the layout of the NVM Command Set specification. [`seal`] makes tuples
//! from data, [`verify`] checks them, [`rebase`] checks one format while it makes another, and [`combine`] joins the
//! guards of parts into the CRC of the whole.
//!
//! Invariants: nothing here does I/O, allocates on the path of a block, or trusts a byte of its input; a length that
//! does not fit the format is a bug of the caller and panics, a tuple that does not fit its data is a
//! [`Mismatch`]. One loop serves every format: a tuple is loaded as one big-endian integer and compared under one
//! mask, so the clean path costs the checksum and a few instructions.

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
