//! A mirror as a device: which function executes a request; and how it is closed.

pub(crate) mod change;
pub(crate) mod delegated;
pub(crate) mod expected;
pub(crate) mod read;
pub(crate) mod reconcile;
pub(crate) mod stale;
pub(crate) mod verify;

use std::future::pending;
use std::pin::pin;

use futures_util::future::{Either, select};
use sealblock_block::{
    Abilities, Clock, Device, Error, ErrorKind, Geometry, Operation, Outcome, Request, RequestKind, ReservedArea,
    Response,
};
use sealblock_integrity::guard::crc32c;
use sealblock_runtime_memory::Slice;

use crate::mirror::Mirror;
use crate::requests::change::{execute_on, writes_lost};

impl<C: Clock> Mirror<C> {
    /// Flushes, takes clean regions out of the labels, and ends the worker. The caller closes the replicas
    /// afterwards. Waits for changes in flight.
    ///
    /// Changes that completed before this opening and whose regions are still dirty become durable on the online
    /// replicas only; a flush makes them durable without the offline ones.
    ///
    /// # Errors
    /// When no replica can be flushed, or when writes may be lost and no flush has reported it. Changes that were
    /// flushed before are safe.
    pub async fn close(&self) -> Result<(), Error> {
        self.close_without(pending()).await
    }

    /// The same, but waits for changes in flight only until `overdue` completes. The regions of those that are in flight
    /// even then stay in the labels, as after a crash: the next opening compares the replicas there.
    ///
    /// If the future is dropped, the labels keep what they had, and replicas are compared there.
    ///
    /// # Errors
    /// As [`Mirror::close`], and when changes are still in flight.
    pub async fn close_without(&self, overdue: impl Future<Output = ()>) -> Result<(), Error> {
        self.revoke();
        let was_closing = self.is_closing.replace(true);
        self.work.notify();
        if was_closing || self.is_read_only {
            return Ok(());
        }
        let mut is_overdue = false;
        if !self.write_intent.dirty.borrow().is_empty() || self.write_intent.has_unwritten() {
            // A resync that copies a region now ends with it. Until then the groups around it are not at rest, and would
            // stay in the labels as if there had been a crash.
            let at_rest = pin!(self.range_lock.wait_unlocked(0..=u64::MAX));
            is_overdue = matches!(select(at_rest, pin!(overdue)).await, Either::Right(_));
            self.clear_clean_regions().await?;
            if !self.write_intent.dirty.borrow().is_empty() {
                // Regions in which replicas may still differ stay in the labels. Completed changes there become
                // durable all the same.
                self.flush_internally().await?;
            }
        }
        if !is_overdue {
            self.recall().await;
        }
        match self.writes_lost.get() {
            true => Err(writes_lost()),
            false if is_overdue => Err(changes_in_flight()),
            false => Ok(()),
        }
    }

    /// Reads the newest scrub state on in-sync replicas: a replica that was offline has an older one.
    async fn read_reserved(&self, slot: ReservedArea) -> Outcome {
        let mut newest: Option<Slice> = None;
        for replica in
            self.in_sync().into_iter().filter(|replica| replica.has_reserved_area() && slot == ReservedArea::ScrubState)
        {
            if let Ok(Response::Reserved(bytes)) = replica.execute(Request::read_reserved(slot)).await
                && newest.as_ref().is_none_or(|newest| scrub_saves(newest) < scrub_saves(&bytes))
            {
                newest = Some(bytes);
            }
        }
        newest.map(Response::Reserved).ok_or_else(|| ErrorKind::Absent(RequestKind::ReadReserved).into())
    }

    /// Writes to a reserved area on every replica. The group label belongs to the mirror; the scrub state belongs to
    /// the level above.
    async fn write_reserved(&self, slot: ReservedArea, bytes: Slice) -> Outcome {
        let request = Request::write_reserved(slot, bytes);
        let mut replicas = self.write_targets();
        replicas.retain(|replica| replica.has_reserved_area() && slot == ReservedArea::ScrubState);
        if replicas.is_empty() {
            return Err(ErrorKind::Absent(request.kind()).into());
        }
        let asked = execute_on(replicas, &request).await;
        self.complete_write(asked, None).await.map(|()| Response::Done)
    }
}

#[cold]
fn changes_in_flight() -> Error {
    let reason = "changes were still in flight; the next opening compares the replicas there".to_owned();
    ErrorKind::Unreachable { reason }.into()
}

/// How often a scrub state was saved, as `docs/formats/scrub-state.md` draws it from version 3 on; 0 for an earlier one. `None` for
/// bytes that are none.
fn scrub_saves(bytes: &[u8]) -> Option<u64> {
    let (checksum, checked) = (bytes.get(4..8)?, bytes.get(8..)?);
    let version = u16::from_le_bytes(*checked.first_chunk()?);
    let is_whole = bytes.starts_with(b"SCRB") && *checksum == crc32c(checked).to_le_bytes();
    let saves = || Some(u64::from_le_bytes(*bytes.get(128..)?.first_chunk()?));
    is_whole.then(|| if version < 3 { Some(0) } else { saves() })?
}

impl<C: Clock> Device for Mirror<C> {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        // Each request asks for this, so a mirror that serves many keeps what its background work has found.
        let found = if self.is_read_only { self.read_freshness() } else { self.found_freshness.get() };
        Abilities { freshness: self.abilities.freshness.and(found), ..self.abilities }
    }

    async fn execute(&self, request: Request) -> Outcome {
        let extents = &request.extents;
        match request.operation {
            Operation::Read(expectations) => self.read(extents.one(), &expectations).await.map(Response::Data),
            Operation::Flush => self.flush().await.map(|()| Response::Done),
            Operation::Write(_) | Operation::WriteZeroes { .. } | Operation::WriteUncorrectable { .. } => {
                self.change(extents.one(), request).await
            }
            Operation::Discard => self.discard(extents).await,
            Operation::Verify(expectations) => self.verify(extents.one(), expectations).await,
            Operation::Checksum(kind, expectations) => self.checksum(extents.one(), kind, expectations).await,
            Operation::Repair => self.repair(extents.one()).await,
            Operation::Compare(data) => self.compare(extents.one(), data).await,
            Operation::ReadReserved(area) => self.read_reserved(area).await,
            Operation::WriteReserved(area, bytes) => self.write_reserved(area, bytes).await,
            Operation::Salvage | Operation::Copy { .. } | Operation::CompareAndWrite(_) | Operation::BlockStatus => {
                Err(ErrorKind::Absent(request.kind()).into())
            }
        }
    }

    fn executes_in_place(&self) -> bool {
        self.replicas.borrow().iter().any(|replica| replica.executes_in_place())
    }

    /// Executes only reads, on a replica that executes them in place. A change waits for labels and for overlapping changes.
    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        match request.operation {
            Operation::Read(_) => self.try_read(request),
            _ => None,
        }
    }
}
