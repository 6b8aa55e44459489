//! The vocabulary that all hops of a request share.
//!
//! A [`Request`](Operation) goes down a stack of [`Device`]s and comes back as one [`Outcome`]. Every device is put into a
//! stack behind a [`Gate`], which checks, splits, emulates and counts, so that devices stay small. Below the last device
//! lies a [`Medium`]: bytes at offsets, with no notion of blocks.
//!
//! A request is answered exactly once by construction: [`Device::execute`] takes the operation by value and its future
//! yields one outcome. Futures belong to one core and are not `Send`; crossing cores is the runtime's work.

mod abilities;
mod allocation;
mod annex;
mod blank;
mod clock;
mod coverage;
mod device;
mod error;
mod event;
mod flush_errors;
mod gate;
mod geometry;
mod ledger;
mod medium;
mod operation;
mod range_lock;
mod source;

pub use abilities::{Abilities, Ability};
pub use allocation::{Run, RunState, Runs};
pub use annex::AnnexSlot;
pub use blank::is_blank;
pub use clock::Clock;
pub use coverage::{Coverage, Tally, Unchecked, WhyUnchecked};
pub use device::{Device, Stack};
pub use error::{Error, Failure, Fault, FaultField, Faults, Leg};
pub use event::Event;
pub use flush_errors::{FlushCursor, FlushErrors, FlushGroup, FlushTicket};
pub use gate::{Counters, Gate};
pub use geometry::{Geometry, Limits};
pub use ledger::{InDoubt, Ledger};
pub use medium::{Medium, MediumError, MediumErrorKind};
pub use operation::{Answer, Digested, Durability, Operation, OperationKind, Outcome, Verified};
pub use range_lock::{RangeGuard, RangeLock};
pub use source::Source;
