//! The types that all devices share: requests, responses, errors, and the traits of devices and media.
//!
//! A [`Request`] goes down a stack of [`Device`]s and completes with one [`Outcome`]. Every device is put into a stack
//! behind a [`Gate`], which checks, splits, emulates and counts, so that devices stay small. Below the last device lies
//! a [`Medium`]: bytes at offsets, without blocks.
//!
//! A request completes exactly once by construction: [`Device::execute`] takes it by value, and its future returns one
//! outcome. Futures belong to one core and are not `Send`; the runtime carries requests between cores.

mod bad_block;
mod bad_block_search;
mod claims;
mod coverage;
mod damage_record;
mod device;
mod dyn_device;
mod error;
mod expectations;
mod flush_epochs;
mod flush_errors;
mod freshness;
mod gate;
mod late_writes;
mod latency;
mod medium;
mod request;
mod response;
mod reused_future;
mod sync;
mod sync_group;
mod unwritten;
mod write_data;

/// The primitives of `claims.rs` and `sync_group.rs`; `tests/claims` and `tests/sync_group.rs` replace them with those of
/// a model checker, and with fewer places.
mod primitives {
    pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
    pub(crate) use std::sync::{Mutex, MutexGuard};

    /// Changes of one core in flight that are claimed with their blocks. More are only counted.
    pub(crate) const LANE_PLACES: usize = 256;
    /// Ranges that exclusions announce with their blocks; with their count, they fill one cache line.
    pub(crate) const EXCLUSION_PLACES: usize = 7;
}

pub use bad_block::{BadBlock, BadBlockCause, MemberPath};
pub use bad_block_search::{BlockProbe, find_bad_blocks};
pub use claims::{Claim, Claims, Exclusion, Lane};
pub use coverage::{Coverage, Unchecked, WhyUnchecked};
pub use damage_record::{
    DamageCount, DamageRecord, DamageRun, DamageSource, MAX_DAMAGE_RUNS, WatchedRequest, coarsen, has_block,
    merge_runs, merged,
};
pub use device::{Abilities, Ability, Device, Geometry, KindAbilities, Limits};
pub use dyn_device::{DeviceOpener, DeviceSource, DynDevice};
pub use error::{BadBlocks, Error, ErrorKind, Tally};
pub use expectations::Expectations;
pub use flush_epochs::{FlushEpochs, WritesLost};
pub use flush_errors::{FlushCursor, FlushErrors, FlushGroup, FlushTicket};
pub use freshness::{Freshness, WhyOlder};
pub use gate::{Counters, Gate};
pub use late_writes::{LateWrites, WriteSet};
pub use latency::{Histogram, Latency, LatencyCounters};
pub use medium::{Medium, MediumError, MediumErrorKind, NOTE_PAGE_BYTES, NoteKeeping};
pub use request::{CompareAndWrite, Durability, Extents, Operation, Request, RequestKind, ReservedArea};
pub use response::{BlockState, Checksum, Outcome, Response, Salvaged, StatusRun, StatusRuns, VerifyStats};
pub use reused_future::ReusedFuture;
pub use sync::{AsyncMutex, AsyncMutexGuard, Clock, Condition, RangeGuard, RangeLock, yield_once};
pub use sync_group::SyncGroup;
pub use unwritten::is_unwritten;
pub use write_data::WriteData;
