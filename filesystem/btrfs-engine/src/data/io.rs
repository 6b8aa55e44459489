//! Space for data that has no extent yet, and writes in flight.
//!
//! Invariants:
//! - Space that was allocated is given back if nothing was sent to it, pinned if something was, and kept if an extent
//!   has it. Nothing is lost when a request ends early.
//! - A write that was begun is never given up: if its request ends, the engine keeps the write until the devices have
//!   answered, and only then is its space pinned. Otherwise it could land where other data are then.
//! - A device that missed a write that others have is left behind. If none has it, nothing refers to it, and no device
//!   is behind. This holds for writes over old data also if their request is gone.

use std::future::poll_fn;
use std::ops::Range;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::stream::{self, StreamExt};
use sealblock_btrfs::replicas::Storage;
use sealblock_btrfs::{FsError, Lost, Place};
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_runtime_memory::Slice;

use super::state::{AbandonedWrite, WriteFuture, WriteOutcome};
use crate::engine::{Engine, EngineError};
use crate::reserve::TreeCost;
use crate::transaction::ChangeError;

/// The number of extents that are written at once.
const EXTENTS_IN_FLIGHT: usize = 16;
/// Bytes whose checksums are computed before the clock is looked at. For a write of no more it is not worth while to
/// wait until it is in flight.
const SUM_STEP_BYTES: usize = 64 << 10;
/// The time for which checksums are computed before the writes in flight are looked at.
const SUM_STEP: Duration = Duration::from_micros(50);
/// The longest extent, as in Linux.
pub(super) const MAX_EXTENT_BYTES: u64 = 128 << 20;

/// What is written: bytes, or a number of zeroes that devices make themselves.
#[derive(Clone, Debug)]
pub(super) enum Content {
    Bytes(Slice),
    Zeroes(u64),
}

impl Content {
    pub fn bytes(&self) -> u64 {
        match self {
            Content::Bytes(data) => data.len() as u64,
            Content::Zeroes(bytes) => *bytes,
        }
    }

    /// A part of it, which must lie within.
    pub fn part(&self, range: Range<u64>) -> Content {
        match self {
            Content::Bytes(data) => Content::Bytes(data.slice(range.start as usize..range.end as usize)),
            Content::Zeroes(_) => Content::Zeroes(range.end - range.start),
        }
    }
}

impl From<Slice> for Content {
    fn from(data: Slice) -> Content {
        Content::Bytes(data)
    }
}

/// Space that was allocated and has no extent, and the write to it.
pub(super) struct Reserved<'e> {
    engine: &'e Engine,
    space: Vec<Range<u64>>,
    is_sent: bool,
    /// True if some of it overwrites what a file has.
    is_in_place: bool,
    write: Option<WriteFuture>,
}

impl<'e> Reserved<'e> {
    pub fn new(engine: &'e Engine) -> Reserved<'e> {
        Reserved { engine, space: Vec::new(), is_sent: false, is_in_place: false, write: None }
    }

    pub fn push(&mut self, range: Range<u64>) {
        self.space.push(range);
    }

    /// Extents have it.
    pub fn keep(mut self) {
        self.space.clear();
    }

    /// Begins a write: it runs when it is polled. Some of it may overwrite what a file has.
    pub fn send(&mut self, write: WriteFuture, is_in_place: bool) {
        (self.is_sent, self.is_in_place, self.write) = (true, is_in_place, Some(write));
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<WriteOutcome> {
        let Some(write) = &mut self.write else { return Poll::Ready(Ok(Vec::new())) };
        let outcome = std::task::ready!(write.poll_unpin(context));
        self.write = None;
        Poll::Ready(outcome)
    }

    /// Lets the write go on. Returns its outcome if it has completed.
    pub async fn step(&mut self) -> Option<WriteOutcome> {
        poll_fn(|context| match self.poll(context) {
            Poll::Ready(outcome) => Poll::Ready(Some(outcome)),
            Poll::Pending => Poll::Ready(None),
        })
        .await
    }

    /// Waits until the write has completed.
    pub async fn completed(&mut self) -> WriteOutcome {
        poll_fn(|context| self.poll(context)).await
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        let space = std::mem::take(&mut self.space);
        match self.write.take() {
            Some(write) => {
                self.engine.data().abandon(AbandonedWrite { write, space, is_in_place: self.is_in_place });
            }
            None => self.engine.release_space(space, self.is_sent),
        }
    }
}

/// An extent that is written.
#[derive(Clone, Debug)]
pub(super) struct Sent {
    pub logical: u64,
    pub content: Content,
    /// The transaction whose tag the data get; `None` if they have checksums.
    pub generation: Option<u64>,
}

/// Writes extents to all their copies.
pub(super) fn write_all(storage: Storage, extents: Vec<Sent>, held: impl Sized + 'static) -> WriteFuture {
    Box::pin(async move {
        let storage = &storage;
        let write = |Sent { logical, content, generation }: Sent| async move {
            match content {
                Content::Bytes(data) => storage.write(logical, &data, generation).await,
                Content::Zeroes(bytes) => storage.write_zeroes(logical, bytes).await,
            }
        };
        if let [only] = &extents[..] {
            let outcome = write(only.clone()).await;
            drop(held);
            return outcome;
        }
        let mut writes = stream::iter(extents).map(write).buffer_unordered(EXTENTS_IN_FLIGHT);
        let mut outcome = Ok(Vec::new());
        // All of them are waited for, whatever becomes of one.
        while let Some(written) = writes.next().await {
            match (&mut outcome, written) {
                (Ok(bad), Ok(more)) => bad.extend(more),
                (Ok(_), Err(error)) => outcome = Err(error),
                (Err(_), _) => {}
            }
        }
        drop(held);
        outcome
    })
}

/// Computes the checksums of extents of bytes while they are being written. Returns them with the outcome of the write.
pub(super) async fn sums_in_flight(
    reserved: &mut Reserved<'_>,
    extents: &[Sent],
    (checksum, sector_bytes): (ChecksumType, usize),
) -> (Vec<(u64, Vec<u8>)>, WriteOutcome) {
    let (engine, mut all) = (reserved.engine, Vec::with_capacity(extents.len()));
    let is_synchronous = engine.options().sync_csum;
    let is_long = extents.iter().map(|sent| sent.content.bytes()).sum::<u64>() > SUM_STEP_BYTES as u64;
    let mut outcome = if is_synchronous { None } else { reserved.step().await };
    let is_in_flight = !is_synchronous && is_long && outcome.is_none();
    if is_in_flight {
        engine.submitted().await;
    }
    let mut clock = SumClock { begun: Instant::now(), is_in_flight };
    for Sent { logical, content, .. } in extents {
        // Zeroes are only written to files without checksums.
        let Content::Bytes(data) = content else { continue };
        let mut sums = Vec::with_capacity(data.len() / sector_bytes * checksum.bytes());
        for part in data.chunks(SUM_STEP_BYTES) {
            for sector in part.chunks(sector_bytes) {
                sums.extend_from_slice(checksum.compute(sector).as_bytes());
            }
            if clock.is_in_flight && clock.begun.elapsed() >= SUM_STEP {
                outcome = clock.look(reserved).await;
            }
        }
        all.push((*logical, sums));
    }
    let outcome = match clock.look(reserved).await.or(outcome) {
        Some(outcome) => outcome,
        None => reserved.completed().await,
    };
    (all, outcome)
}

/// Counts the time for checksums.
struct SumClock {
    begun: Instant,
    /// True if the write had not completed when it was looked at last.
    is_in_flight: bool,
}

impl SumClock {
    /// Counts the time since the last look: it is hidden if the write was in flight, and still is. Returns the outcome
    /// of the write if it has completed since.
    async fn look(&mut self, reserved: &mut Reserved<'_>) -> Option<WriteOutcome> {
        let (engine, time) = (reserved.engine, self.begun.elapsed());
        let mut outcome = None;
        if self.is_in_flight {
            engine.submitted().await;
            outcome = reserved.step().await;
            self.is_in_flight = outcome.is_none();
        }
        engine.data().counters.add_sum_time(time, self.is_in_flight);
        self.begun = Instant::now();
        outcome
    }
}

impl Engine {
    /// Allocates space for data, at most these bytes and the longest extent, if there is space for the change of items
    /// that it is for as well.
    pub(super) async fn allocate(&self, bytes: u64, cost: TreeCost) -> Result<Range<u64>, EngineError> {
        let bytes = bytes.min(MAX_EXTENT_BYTES);
        let is_waiting = self.poll_abandoned_once().await;
        let allocate = || {
            self.change(|transaction| {
                let range = transaction.allocate_data(bytes)?;
                // Data and metadata may share block groups.
                if let Err(error) = transaction.admit(&[cost], 1, false) {
                    transaction.space.give_back(range)?;
                    return Err(error);
                }
                Ok(range)
            })
        };
        match allocate().await {
            Err(EngineError::Change(ChangeError::Space(_))) if is_waiting => {
                self.finish_writes().await;
                self.commit().await?;
                allocate().await
            }
            result => result,
        }
    }

    /// Gives space back that has no extent. If something was sent to it, it is free after the next commit.
    fn release_space(&self, space: Vec<Range<u64>>, is_sent: bool) {
        if space.is_empty() {
            return;
        }
        let Ok(mut transaction) = self.transaction().try_borrow_mut() else {
            debug_assert!(false, "space is released while the transaction is used");
            return;
        };
        for range in space {
            if is_sent {
                transaction.space.pin(range);
            } else if let Err(error) = transaction.space.give_back(range) {
                tracing::error!(%error, "space that was allocated cannot be given back");
            }
        }
    }

    /// Lets writes go on whose requests are gone. Returns true if there are any left.
    pub(crate) fn poll_abandoned(&self, context: &mut Context<'_>) -> bool {
        let mut writes = self.data().take_abandoned();
        writes.retain_mut(|abandoned| match abandoned.write.poll_unpin(context) {
            Poll::Pending => true,
            Poll::Ready(outcome) => {
                if abandoned.is_in_place {
                    self.judge_abandoned(outcome);
                }
                self.release_space(std::mem::take(&mut abandoned.space), true);
                false
            }
        });
        self.data().put_abandoned(writes)
    }

    /// What a file has was overwritten, and nobody waits for it: a device that missed it is left behind, as others have it.
    fn judge_abandoned(&self, outcome: WriteOutcome) {
        if let Err(error) = self.judge_write(&self.storage(), outcome, false) {
            tracing::error!(%error, "a write over old data failed when its request was gone");
        }
    }

    pub(crate) async fn poll_abandoned_once(&self) -> bool {
        poll_fn(|context| Poll::Ready(self.poll_abandoned(context))).await
    }

    /// Waits for writes whose requests were given up. To be called before the devices are closed.
    pub async fn finish_writes(&self) {
        poll_fn(|context| if self.poll_abandoned(context) { Poll::Pending } else { Poll::Ready(()) }).await;
    }

    /// Judges a write: each sector that some device missed must be on another one that is not left behind. Then those
    /// that missed it are left behind. If a device has two copies and missed one, a checksum tells which, so `has_sums`
    /// decides whether that is enough.
    ///
    /// # Errors
    /// If no such copy of a piece was written.
    pub(crate) fn judge_write(
        &self,
        storage: &Storage,
        outcome: WriteOutcome,
        has_sums: bool,
    ) -> Result<(), EngineError> {
        let bad = outcome?;
        let (mut behind, mut damaged) = (Vec::new(), Vec::new());
        for one in &bad {
            let logical = one.logical.unwrap_or(0);
            let places = storage.map.locate(logical, 1).map_err(FsError::from)?.copies;
            let same_piece = || bad.iter().filter(|other| other.logical == one.logical);
            let is_good =
                |place: &&Place| !self.has_failed(place.devid) && same_piece().all(|other| other.place != **place);
            let good: Vec<&Place> = places.iter().filter(is_good).collect();
            let is_enough = match good.iter().any(|place| place.devid == one.place.devid) {
                true => has_sums,
                false => !good.is_empty(),
            };
            if !is_enough {
                let (copies, bytes) = (same_piece().cloned().collect(), storage.geometry().sector_bytes.into());
                return Err(FsError::WriteFailed(Box::new(Lost { logical, bytes, copies })).into());
            }
            match good.iter().any(|place| place.devid == one.place.devid) {
                true => damaged.push(one.clone()),
                false => behind.push(one),
            }
        }
        behind.iter().for_each(|bad| self.device_failed(bad.place.devid, &bad.fault));
        self.remember_bad(damaged);
        Ok(())
    }
}
