//! The rare cases of a gate: requests that the device does not execute itself, and those that exceed its limits.
//!
//! The device is behind a pointer here and its futures are boxed, so that all of this is compiled once, not for each
//! device.
//!
//! Pieces of a split request run concurrently, at most [`PIECES_IN_FLIGHT`] at a time. All of them are executed and
//! their bad blocks are joined into one error, so that a bad block in one piece does not hide one in another.

use std::pin::pin;

use futures_util::future::LocalBoxFuture;
use futures_util::stream::{self, StreamExt};
use sealblock_integrity::{ChecksumKind, Sealed, Tags};
use sealblock_runtime_memory::Buffer;
use sealblock_units::{BlockCount, Extent};

use super::checks::{check, named, piece_limit};
use super::counters::Counters;
use crate::{
    Abilities, Ability, BadBlock, BlockState, Checksum, Coverage, Device, Durability, Error, ErrorKind, Expectations,
    Geometry, Operation, Outcome, Request, RequestKind, Response, Salvaged, StatusRun, StatusRuns, Tally, Unchecked,
    VerifyStats, WhyUnchecked,
};

/// A device without its type.
trait Below {
    fn execute_boxed(&self, request: Request) -> LocalBoxFuture<'_, Outcome>;
}

impl<D: Device> Below for D {
    fn execute_boxed(&self, request: Request) -> LocalBoxFuture<'_, Outcome> {
        Box::pin(self.execute(request))
    }
}

/// Executes a request that the device does not execute as it is.
pub(super) struct Rare<'a> {
    device: &'a dyn Below,
    geometry: &'a Geometry,
    abilities: Abilities,
}

impl<'a> Rare<'a> {
    pub(super) fn new(device: &'a impl Device) -> Rare<'a> {
        Rare { device, geometry: device.geometry(), abilities: device.abilities() }
    }

    /// Executes a request: in pieces, or by requests of other kinds.
    pub(super) fn execute(self, request: Request) -> LocalBoxFuture<'a, Outcome> {
        Box::pin(async move { self.route(request).await })
    }

    async fn route(&self, request: Request) -> Outcome {
        let (kind, writable) = (request.kind(), self.abilities.writable);
        if self.abilities.of_request(&request) == Ability::Native {
            return match piece_limit(&self.geometry.limits, &request) {
                Some(max_blocks) => self.in_pieces(request, max_blocks).await,
                None => self.device.execute_boxed(request).await,
            };
        }
        let Request { operation, extents, durability } = request;
        match operation {
            Operation::Verify(expectations) => self.verify_by_read(extents.one(), expectations).await,
            Operation::Checksum(kind, expectations) => self.checksum_by_read(extents.one(), kind, expectations).await,
            Operation::BlockStatus => Ok(all_allocated(extents.one())),
            Operation::Compare(data) => self.compare_by_read(extents.one(), data).await,
            Operation::WriteZeroes { .. } if writable => self.zeroes_by_write(extents.one(), durability).await,
            Operation::Repair => Err(ErrorKind::Absent(kind).into()),
            _ if !writable && (kind.changes_blocks() || kind == RequestKind::WriteReserved) => {
                Err(ErrorKind::ReadOnly.into())
            }
            _ => Err(ErrorKind::Absent(kind).into()),
        }
    }

    /// Verifies by Read, even if the device has a native Verify, for a gate of this name and with these counters.
    pub(super) fn verify_by_reading(
        self,
        (name, counters): (&'a str, &'a Counters),
        extent: Extent,
        expectations: Expectations,
    ) -> LocalBoxFuture<'a, Outcome> {
        Box::pin(async move {
            let _in_flight = counters.request_started();
            let outcome = match check(self.geometry, &self.abilities, &Request::verify(extent, expectations)) {
                Ok(()) => self.verify_by_read(extent, expectations).await,
                Err(rejected) => Err(rejected),
            };
            counters.record(RequestKind::Verify, extent.bytes(self.geometry.block_size), &outcome);
            outcome.map_err(|error| named(name, RequestKind::Verify, error))
        })
    }

    /// Emulates Verify by Read: the device checks while it reads, and the data are dropped.
    async fn verify_by_read(&self, extent: Extent, expectations: Expectations) -> Outcome {
        let (bytes_transferred, coverage) = self.read_all(extent, expectations, &mut |_| ()).await?;
        Ok(Response::Verified(VerifyStats { bytes_transferred, coverage }))
    }

    /// Emulates Checksum by Read.
    async fn checksum_by_read(&self, extent: Extent, kind: ChecksumKind, expectations: Expectations) -> Outcome {
        let mut value = 0;
        let (bytes_transferred, coverage) =
            self.read_all(extent, expectations, &mut |part| value = part.checksum_append(kind, value)).await?;
        Ok(Response::Checksum(Checksum { kind, value, bytes_transferred, coverage }))
    }

    /// Reads blocks piece by piece, in order; returns the bytes transferred and the coverage. It reads every piece even
    /// if an earlier one has bad blocks.
    async fn read_all(
        &self,
        extent: Extent,
        expectations: Expectations,
        each: &mut dyn FnMut(&Sealed),
    ) -> Result<(u64, Coverage), Error> {
        let geometry = self.geometry;
        let (mut bytes, mut tally) = (0, Tally { coverage: self.read_coverage(extent), ..Tally::default() });
        // One piece at a time: a Verify has no payload whose limit would bound the memory.
        for piece in extent.split_aligned(geometry.limits.max_transfer_blocks) {
            let expected = expectations.advance(piece.start().get() - extent.start().get(), geometry.protection);
            match self.device.execute_boxed(Request::read(piece, expected)).await {
                Ok(Response::Data(part)) => each(&part),
                Ok(_) => return Err(unexpected_response()),
                Err(error) => tally.take(error)?,
            }
            bytes += piece.bytes(geometry.block_size);
        }
        tally.finish().map(|coverage| (bytes, coverage))
    }

    /// The coverage of a check by Read.
    fn read_coverage(&self, extent: Extent) -> Coverage {
        let abilities = &self.abilities;
        let mut coverage = Coverage::of(abilities.seals);
        if abilities.copies {
            coverage.add(Unchecked::new(extent, WhyUnchecked::OneCopy));
        }
        if let Some(why) = abilities.freshness.why_older() {
            coverage.add(Unchecked::new(extent, why.why_unchecked()));
        }
        coverage
    }

    /// Emulates Compare by Read.
    async fn compare_by_read(&self, extent: Extent, data: Sealed) -> Outcome {
        let geometry = self.geometry;
        for piece in extent.split_aligned(geometry.limits.max_transfer_blocks) {
            let first = (piece.start().get() - extent.start().get()) as usize;
            let response = self.device.execute_boxed(Request::read(piece, Expectations::NONE)).await?;
            let Response::Data(stored) = response else { return Err(unexpected_response()) };
            let wanted = data.slice(first, piece.len() as usize);
            if let Some(lba) = stored.first_difference(&wanted, false).and_then(|index| piece.iter().nth(index)) {
                return Err(ErrorKind::Miscompare { lba }.into());
            }
        }
        Ok(Response::Done)
    }

    /// Emulates WriteZeroes by Write. Each piece is sealed again, because its reference tags depend on its address.
    async fn zeroes_by_write(&self, extent: Extent, durability: Durability) -> Outcome {
        let geometry = self.geometry;
        let longest =
            extent.bytes(geometry.block_size).min(geometry.limits.max_transfer_blocks.bytes(geometry.block_size));
        let zeroes = Buffer::zeroed(longest as usize).freeze();
        for piece in extent.split_aligned(geometry.limits.max_transfer_blocks) {
            let data = zeroes.slice(..piece.bytes(geometry.block_size) as usize);
            let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: piece.start().get() };
            let data = Sealed::seal(data, geometry.block_size, geometry.protection, &tags);
            self.device.execute_boxed(Request::write(piece, data, durability)).await?;
        }
        Ok(Response::Done)
    }

    /// Executes a request in pieces of at most `max_blocks` blocks.
    async fn in_pieces(&self, request: Request, max_blocks: BlockCount) -> Outcome {
        let extents = request.extents.clone();
        let geometry = self.geometry;
        let pieces = extents.iter().flat_map(|whole| whole.split_aligned(max_blocks).map(|piece| (*whole, piece)));
        let pieces = pieces.map(|(whole, piece)| request.part(whole, piece, geometry.protection));
        let mut outcomes =
            pin!(stream::iter(pieces).map(|piece| self.device.execute_boxed(piece)).buffered(PIECES_IN_FLIGHT));
        let mut joined = Joined::default();
        match &request.operation {
            &Operation::Checksum(kind, _) => {
                let (mut whole, size) = (Checksum { kind, ..Checksum::default() }, geometry.block_size);
                for extent in extents.one().split_aligned(max_blocks) {
                    match outcomes.next().await {
                        Some(Ok(Response::Checksum(part))) if part.kind == kind => {
                            whole.value = kind.combine(whole.value, part.value, extent.bytes(size));
                            whole.bytes_transferred += part.bytes_transferred;
                            whole.coverage.merge(part.coverage.clone());
                            joined.add(Ok(Response::Checksum(part)));
                        }
                        Some(Err(error)) => joined.add(Err(error)),
                        // A checksum of another kind than requested is an error.
                        _ => joined.add(Err(unexpected_response())),
                    }
                }
                joined.finish(false).map(|_| Response::Checksum(whole))
            }
            operation => {
                while let Some(outcome) = outcomes.next().await {
                    joined.add(outcome);
                }
                joined.finish(matches!(operation, Operation::Read(_)))
            }
        }
    }
}

/// The block status of a device that does not know its holes: all blocks may take space.
fn all_allocated(extent: Extent) -> Response {
    Response::BlockStatus(vec![StatusRun { blocks: extent.blocks(), state: BlockState::Allocated }])
}

#[cold]
fn unexpected_response() -> Error {
    ErrorKind::Media { reason: "the device returned a response of another kind than the request".to_owned() }.into()
}

/// Pieces of one request in flight at once: enough to keep a device busy, few enough to bound the buffers.
const PIECES_IN_FLIGHT: usize = 8;

/// The outcomes of the pieces so far, in order. Nothing is kept for a piece without a result of its own, so the number
/// of pieces does not change the memory.
///
/// The result is the first error that is not about blocks, because it affects more than those; without one, all bad
/// blocks of all pieces; without these, the first block that is not as expected, or for Compare the first that differs.
#[derive(Default)]
struct Joined {
    parts: Vec<Sealed>,
    tally: Tally,
    verified: Option<u64>,
    runs: StatusRuns,
    salvaged: Option<Vec<BadBlock>>,
    other: Option<Error>,
}

impl Joined {
    fn add(&mut self, outcome: Outcome) {
        match outcome {
            // Checksums are joined by their lengths; requests to the reserved area are never split.
            Ok(Response::Done | Response::Reserved(_)) => {}
            Ok(Response::Checksum(part)) => self.tally.coverage.merge(part.coverage),
            Ok(Response::BlockStatus(part)) => part.into_iter().for_each(|run| self.runs.push(run.blocks, run.state)),
            Ok(Response::Data(part)) => self.parts.push(part),
            Ok(Response::Salvaged(part)) => {
                self.parts.push(part.blocks);
                self.salvaged.get_or_insert_default().extend(part.bad_blocks);
            }
            Ok(Response::Verified(part)) => {
                self.verified = Some(self.verified.unwrap_or(0) + part.bytes_transferred);
                self.tally.coverage.merge(part.coverage);
            }
            Err(error) => {
                if let Err(error) = self.tally.take(error) {
                    self.other.get_or_insert(error);
                }
            }
        }
    }

    fn finish(self, is_read: bool) -> Outcome {
        let Joined { parts, tally, verified, runs, salvaged, other } = self;
        let runs = runs.into_vec();
        if let Some(error) = other {
            return Err(error);
        }
        let coverage = tally.finish()?;
        if let Some(bad_blocks) = salvaged {
            return Ok(Response::Salvaged(Salvaged { blocks: Sealed::join(parts), bad_blocks }));
        }
        match (is_read, verified) {
            (true, _) => Ok(Response::Data(Sealed::join(parts))),
            (false, None) if !runs.is_empty() => Ok(Response::BlockStatus(runs)),
            (false, Some(bytes_transferred)) => Ok(Response::Verified(VerifyStats { bytes_transferred, coverage })),
            (false, None) => Ok(Response::Done),
        }
    }
}
