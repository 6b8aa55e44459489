//! The gate: the only way a device is put into a stack.
//!
//! It rejects requests that are out of range or do not fit the geometry, splits those above the device's limits, emulates
//! request kinds that the device lacks, seals data for a device that does not itself, counts, and names the device on errors. A request that needs none of this costs a
//! few comparisons and goes straight to the device.
//!
//! Pieces of a split request run side by side, at most [`PIECES_IN_FLIGHT`] at a time. All of them are executed and their bad
//! blocks are joined into one error, so that a bad block in one piece hides none in another.

use std::cell::Cell;
use std::pin::pin;

use futures_util::stream::{self, StreamExt};
use sealblock_integrity::{ChecksumKind, PiFormat, Sealed, Tags};
use sealblock_runtime_memory::Buffer;
use sealblock_units::{BlockCount, BlockSize, Extent};

use crate::{
    Abilities, Ability, BadBlock, BlockState, Checksum, Coverage, Device, Durability, Error, ErrorKind, Expectations,
    Geometry, Limits, Operation, Outcome, Request, RequestKind, Response, Salvaged, StatusRun, StatusRuns, Tally,
    Unchecked, VerifyStats, WhyUnchecked, WriteData,
};

/// A device behind its gate. See the module's header.
pub struct Gate<D> {
    device: D,
    name: Box<str>,
    counters: Counters,
}

impl<D: Device> Gate<D> {
    /// Puts a gate in front of `device`; `name` is what errors call it, usually its target name.
    pub fn new(name: impl Into<Box<str>>, device: D) -> Gate<D> {
        Gate { device, name: name.into(), counters: Counters::default() }
    }

    /// What errors call the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Counters of the requests that went through so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The device behind the gate, for calls that are no requests, such as its description.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Rejects a request that does not fit the device's geometry.
    fn check(&self, request: &Request) -> Result<(), Error> {
        let geometry = self.device.geometry();
        request.extents.iter().try_for_each(|extent| geometry.check(*extent))?;
        match &request.operation {
            Operation::Write(data) => {
                check_written(geometry, request.extents.one(), (data.size(), data.blocks(), data.format()))
            }
            Operation::CompareAndWrite(data) => {
                let (extent, limit) = (request.extents.one(), self.device.abilities().compare_and_write_blocks);
                let (expected, new) = (&data.expected, &data.new);
                check_shape(geometry, extent, expected.size(), expected.blocks())?;
                check_written(geometry, extent, (new.size(), new.blocks(), new.format()))?;
                // Pieces would be atomic one by one, so it is not split. Where the device has none, that is the error.
                match limit {
                    1.. if extent.len() > u64::from(limit) => {
                        Err(shape("blocks of a Compare and Write", u64::from(limit), extent.len()))
                    }
                    _ => Ok(()),
                }
            }
            Operation::Compare(data) => check_shape(geometry, request.extents.one(), data.size(), data.blocks()),
            Operation::Copy { source, .. } => check_copy(geometry, *source, request.extents.one()),
            // The client's own Flush makes these durable: only it learns of other clients' flushes that failed in between.
            Operation::Discard | Operation::Repair if request.durability == Durability::ForceUnitAccess => {
                Err(shape("a Discard or Repair with FUA; flush behind it", 0, 1))
            }
            Operation::WriteReserved(area, bytes) if bytes.len() > area.max_bytes() => {
                Err(shape("bytes for the reserved area", area.max_bytes() as u64, bytes.len() as u64))
            }
            Operation::ReadReserved(area) | Operation::WriteReserved(area, _) => {
                let (pages, wanted) = (self.device.abilities().bitmap_pages, area.pages());
                if wanted > pages {
                    Err(shape("bitmap pages of the reserved area", u64::from(pages), u64::from(wanted)))
                } else {
                    Ok(())
                }
            }
            _ => Ok(()),
        }
    }

    /// Executes the request on the device, or emulates it.
    async fn route(&self, request: Request) -> Outcome {
        let (kind, abilities) = (request.kind(), self.device.abilities());
        if abilities.of_request(&request) == Ability::Native {
            return self.native(request).await;
        }
        let Request { operation, extents, durability } = request;
        match operation {
            Operation::Write(WriteData::Unsealed(data)) if abilities.writable => {
                let data = WriteData::Sealed(data.seal());
                self.native(Request { operation: Operation::Write(data), extents, durability }).await
            }
            Operation::Verify(expectations) => self.verify_by_read(extents.one(), expectations).await,
            Operation::Checksum(kind, expectations) => self.checksum_by_read(extents.one(), kind, expectations).await,
            Operation::BlockStatus => Ok(all_allocated(extents.one())),
            Operation::Compare(data) => self.compare_by_read(extents.one(), data).await,
            Operation::WriteZeroes { .. } if abilities.writable => {
                self.zeroes_by_write(extents.one(), durability).await
            }
            Operation::Repair => Err(ErrorKind::Absent(kind).into()),
            _ if !abilities.writable && (kind.changes_blocks() || kind == RequestKind::WriteReserved) => {
                Err(ErrorKind::ReadOnly.into())
            }
            _ => Err(ErrorKind::Absent(kind).into()),
        }
    }

    /// Executes a request on the device: whole, or in pieces if it exceeds the device's limits.
    async fn native(&self, request: Request) -> Outcome {
        match piece_limit(&self.device.geometry().limits, &request) {
            Some(max_blocks) => self.in_pieces(request, max_blocks).await,
            None => self.device.execute(request).await,
        }
    }
}

impl<D: Device> Device for Gate<D> {
    fn geometry(&self) -> &Geometry {
        self.device.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.device.abilities().with_emulation()
    }

    async fn execute(&self, request: Request) -> Outcome {
        let _in_flight = self.counters.request_started();
        let (kind, blocks) = (request.kind(), request.blocks());
        let outcome = match self.check(&request) {
            Ok(()) => self.route(request).await,
            Err(rejected) => Err(rejected),
        };
        self.counters.record(kind, blocks << self.geometry().block_size.shift(), &outcome);
        outcome.map_err(|error| self.named(kind, error))
    }

    /// Executes only requests that need no splitting and no emulation. Data without tags for a device that makes none are not sealed
    /// here: if the device then had to wait, they would be sealed again.
    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        let (kind, geometry) = (request.kind(), self.device.geometry());
        let is_native = matches!(self.device.abilities().of_request(request), Ability::Native);
        if !is_native || piece_limit(&geometry.limits, request).is_some() || self.check(request).is_err() {
            return None;
        }
        let outcome = self.device.try_execute(request)?;
        self.counters.record(kind, request.blocks() << geometry.block_size.shift(), &outcome);
        Some(outcome.map_err(|error| self.named(kind, error)))
    }
}

impl<D: Device> Gate<D> {
    /// Verifies by Read requests even if the device has a native Verify: for callers that want the data to cross the connection.
    ///
    /// # Errors
    /// Those of a Verify.
    pub async fn verify_by_reading(&self, extent: Extent, expectations: Expectations) -> Outcome {
        let _in_flight = self.counters.request_started();
        let outcome = match self.check(&Request::verify(extent, expectations)) {
            Ok(()) => self.verify_by_read(extent, expectations).await,
            Err(rejected) => Err(rejected),
        };
        self.counters.record(RequestKind::Verify, extent.bytes(self.geometry().block_size), &outcome);
        outcome.map_err(|error| self.named(RequestKind::Verify, error))
    }

    /// Names the device on an error and traces it; requests without errors pay for neither.
    #[cold]
    fn named(&self, kind: RequestKind, error: Error) -> Error {
        let error = error.with_device(&self.name);
        tracing::debug!(device = %self.name, request = kind.name(), %error, "request failed");
        error
    }
}

/// Rejects data that are not as long as the extent.
fn check_shape(geometry: &Geometry, extent: Extent, size: BlockSize, blocks: usize) -> Result<(), Error> {
    if size != geometry.block_size {
        return Err(shape("block size of the data", geometry.block_size.bytes() as u64, size.bytes() as u64));
    }
    if blocks as u64 != extent.len() {
        return Err(shape("blocks of data", extent.len(), blocks as u64));
    }
    Ok(())
}

/// The same for data that are written. Later reads return the stored tags, so they must be of the device's own format.
fn check_written(
    geometry: &Geometry,
    extent: Extent,
    (size, blocks, format): (BlockSize, usize, Option<PiFormat>),
) -> Result<(), Error> {
    check_shape(geometry, extent, size, blocks)?;
    match format == geometry.protection {
        true => Ok(()),
        false => Err(shape("protection information of another format", 1, 0)),
    }
}

/// Rejects a Copy of blocks that do not exist, that are not as many as their destination, or that it would overwrite itself: devices
/// copy in any order, so there is no right result.
fn check_copy(geometry: &Geometry, source: Extent, destination: Extent) -> Result<(), Error> {
    geometry.check(source)?;
    if source.len() != destination.len() {
        return Err(shape("blocks of the source", destination.len(), source.len()));
    }
    let both = destination.len().saturating_sub(source.start().get().abs_diff(destination.start().get()));
    if both > 0 { Err(shape("blocks in both source and destination", 0, both)) } else { Ok(()) }
}

fn shape(what: &'static str, limit: u64, actual: u64) -> Error {
    ErrorKind::Limit { what, limit, actual }.into()
}

impl<D: Device> Gate<D> {
    /// Emulates Verify by Read: the device checks while it reads, and the data is dropped.
    async fn verify_by_read(&self, extent: Extent, expectations: Expectations) -> Outcome {
        let (bytes_transferred, coverage) = self.read_all(extent, expectations, |_| ()).await?;
        Ok(Response::Verified(VerifyStats { bytes_transferred, coverage }))
    }

    /// Emulates Checksum by Read.
    async fn checksum_by_read(&self, extent: Extent, kind: ChecksumKind, expectations: Expectations) -> Outcome {
        let mut value = 0;
        let (bytes_transferred, coverage) =
            self.read_all(extent, expectations, |part| value = part.checksum_append(kind, value)).await?;
        Ok(Response::Checksum(Checksum { kind, value, bytes_transferred, coverage }))
    }

    /// Reads blocks piece by piece, in order; returns the bytes transferred and the coverage. Reads every piece even if an earlier
    /// one has bad blocks.
    async fn read_all(
        &self,
        extent: Extent,
        expectations: Expectations,
        mut each: impl FnMut(&Sealed),
    ) -> Result<(u64, Coverage), Error> {
        let geometry = self.device.geometry();
        let (mut bytes, mut tally) = (0, Tally { coverage: self.read_coverage(extent), ..Tally::default() });
        // One piece at a time: the extent of a Verify has no payload that would bound the memory.
        for piece in extent.split_aligned(geometry.limits.max_transfer_blocks) {
            let expected = expectations.advance(piece.start().get() - extent.start().get(), geometry.protection);
            match self.device.execute(Request::read(piece, expected)).await {
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
        let abilities = self.device.abilities();
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
        let geometry = self.device.geometry();
        for piece in extent.split_aligned(geometry.limits.max_transfer_blocks) {
            let first = (piece.start().get() - extent.start().get()) as usize;
            let response = self.device.execute(Request::read(piece, Expectations::NONE)).await?;
            let Response::Data(stored) = response else { return Err(unexpected_response()) };
            let wanted = data.slice(first, piece.len() as usize);
            if let Some(lba) = stored.first_difference(&wanted, false).and_then(|index| piece.iter().nth(index)) {
                return Err(ErrorKind::Miscompare { lba }.into());
            }
        }
        Ok(Response::Done)
    }

    /// Emulates WriteZeroes by Write. Each piece is sealed anew, because its reference tags depend on its address.
    async fn zeroes_by_write(&self, extent: Extent, durability: Durability) -> Outcome {
        let geometry = self.device.geometry();
        let longest =
            extent.bytes(geometry.block_size).min(geometry.limits.max_transfer_blocks.bytes(geometry.block_size));
        let zeroes = Buffer::zeroed(longest as usize).freeze();
        for piece in extent.split_aligned(geometry.limits.max_transfer_blocks) {
            let data = zeroes.slice(..piece.bytes(geometry.block_size) as usize);
            let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: piece.start().get() };
            let data = Sealed::seal(data, geometry.block_size, geometry.protection, &tags);
            self.device.execute(Request::write(piece, data, durability)).await?;
        }
        Ok(Response::Done)
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

/// The maximum blocks of a piece, if the request exceeds it.
fn piece_limit(limits: &Limits, request: &Request) -> Option<BlockCount> {
    let max_blocks = match request.kind() {
        RequestKind::Read | RequestKind::Salvage | RequestKind::Write | RequestKind::Compare => {
            limits.max_transfer_blocks
        }
        RequestKind::Verify | RequestKind::Checksum | RequestKind::Repair | RequestKind::BlockStatus => {
            limits.max_verify_blocks
        }
        RequestKind::WriteZeroes | RequestKind::WriteUncorrectable | RequestKind::Discard => limits.max_zero_blocks,
        // A device with Copy has limits of its own, also for the number of ranges in one command.
        RequestKind::Copy => return None,
        // The gate has refused one that is too long, which in pieces would not be atomic.
        RequestKind::CompareAndWrite => return None,
        RequestKind::Flush | RequestKind::ReadReserved | RequestKind::WriteReserved => return None,
    };
    request.extents.iter().any(|extent| extent.blocks() > max_blocks).then_some(max_blocks)
}

impl<D: Device> Gate<D> {
    /// Executes a request in pieces of at most `max_blocks` blocks.
    async fn in_pieces(&self, request: Request, max_blocks: BlockCount) -> Outcome {
        let extents = request.extents.clone();
        let geometry = self.device.geometry();
        let pieces = extents.iter().flat_map(|whole| whole.split_aligned(max_blocks).map(|piece| (*whole, piece)));
        let pieces = pieces.map(|(whole, piece)| request.part(whole, piece, geometry.protection));
        let mut outcomes =
            pin!(stream::iter(pieces).map(|piece| self.device.execute(piece)).buffered(PIECES_IN_FLIGHT));
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
                        // A checksum of another kind than was asked for is no part of the answer.
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

/// The outcomes of the pieces so far, which come in order. Of a piece without a result of its own nothing is kept, so a request of many
/// pieces takes no more memory than one of a few.
///
/// The first error that is not of blocks wins, because it affects more than those; then all bad blocks of all pieces; then the first
/// block that is not as expected, or, for Compare, that differs.
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

/// Counters of one request kind.
#[derive(Default)]
struct KindCounters {
    requests: Cell<u64>,
    bytes: Cell<u64>,
    errors: Cell<u64>,
}

/// Requests, bytes and errors by request kind. Belongs to one core, so plain cells do.
#[derive(Default)]
pub struct Counters {
    by_kind: [KindCounters; RequestKind::ALL.len()],
    bad_blocks: Cell<u64>,
    in_flight: Cell<u64>,
}

/// Counts a request as in flight until it is dropped: completed or cancelled.
struct InFlightGuard<'a>(&'a Counters);

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.0.in_flight.set(self.0.in_flight.get() - 1);
    }
}

impl Counters {
    /// Counts a request as in flight until the guard is dropped.
    fn request_started(&self) -> InFlightGuard<'_> {
        self.in_flight.set(self.in_flight.get() + 1);
        InFlightGuard(self)
    }

    fn record(&self, kind: RequestKind, bytes: u64, outcome: &Outcome) {
        let count = &self.by_kind[kind.index()];
        count.requests.set(count.requests.get() + 1);
        match outcome {
            Ok(_) => count.bytes.set(count.bytes.get() + bytes),
            Err(error) => {
                count.errors.set(count.errors.get() + 1);
                if let ErrorKind::Integrity(bad_blocks) = error.kind() {
                    self.bad_blocks.set(self.bad_blocks.get() + bad_blocks.as_slice().len() as u64);
                }
            }
        }
    }

    /// Requests in flight: started, and neither completed nor cancelled. Requests executed in place do not count.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.get()
    }

    /// Requests of all kinds completed so far, failed ones included.
    pub fn completed(&self) -> u64 {
        self.by_kind.iter().map(|count| count.requests.get()).sum()
    }

    /// Requests of this kind completed so far, failed ones included.
    pub fn requests(&self, kind: RequestKind) -> u64 {
        self.by_kind[kind.index()].requests.get()
    }

    /// Bytes of data that successful requests of this kind covered.
    pub fn bytes(&self, kind: RequestKind) -> u64 {
        self.by_kind[kind.index()].bytes.get()
    }

    /// Requests of this kind that failed.
    pub fn errors(&self, kind: RequestKind) -> u64 {
        self.by_kind[kind.index()].errors.get()
    }

    /// Bad blocks reported so far; a block counts each time it is reported.
    pub fn bad_blocks(&self) -> u64 {
        self.bad_blocks.get()
    }
}

#[cfg(test)]
mod tests;
