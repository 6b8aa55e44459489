//! The vocabulary that all hops of a request share.
//!
//! A [`Request`] goes down a stack of [`Device`]s and comes back as one [`Outcome`]. Every device is put into a
//! stack behind a [`Gate`], which checks, splits, emulates and counts, so that devices stay small. Below the last device
//! lies a [`Medium`]: bytes at offsets, with no notion of blocks.
//!
//! A request is answered exactly once by construction: [`Device::execute`] takes the operation by value and its future
//! yields one outcome. Futures belong to one core and are not `Send`; crossing cores is the runtime's work.

mod abilities;
mod allocation;
mod blank;
mod clock;
mod condition;
mod coverage;
mod device;
mod error;
mod flush_epochs;
mod flush_errors;
mod gate;
mod geometry;
mod medium;
mod opener;
mod range_lock;
mod request;
mod reserved;

pub use abilities::{Abilities, Ability};
pub use allocation::{BlockState, StatusRun, StatusRuns};
pub use blank::is_blank;
pub use clock::Clock;
pub use condition::Condition;
pub use coverage::{Coverage, Tally, Unchecked, WhyUnchecked};
pub use device::{Device, DynDevice};
pub use error::{BadBlock, BadBlockCause, BadBlocks, Error, ErrorKind, MemberPath};
pub use flush_epochs::{FlushEpochs, WritesLost};
pub use flush_errors::{FlushCursor, FlushErrors, FlushGroup, FlushTicket};
pub use gate::{Counters, Gate};
pub use geometry::{Geometry, Limits};
pub use medium::{Medium, MediumError, MediumErrorKind};
pub use opener::DeviceOpener;
pub use range_lock::{RangeGuard, RangeLock};
pub use request::{Checksum, Durability, Outcome, Request, RequestKind, Response, VerifyStats};
pub use reserved::ReservedArea;
