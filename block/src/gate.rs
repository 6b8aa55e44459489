//! The gate: the only way a device is put into a stack.
//!
//! It rejects requests that are out of range or do not fit the geometry, splits those above the device's limits, emulates
//! request kinds that the device lacks, seals data for a device that does not itself, counts, and names the device on errors. A request that needs none of this costs a
//! few comparisons and goes straight to the device. What needs more is in `rare`: compiled once for all devices, while everything here is
//! compiled for each.

mod rare;

use std::cell::Cell;

use futures_util::future::LocalBoxFuture;
use sealblock_integrity::PiFormat;
use sealblock_units::{BlockCount, BlockSize, Extent};

use crate::{
    Abilities, Ability, Device, Durability, Error, ErrorKind, Expectations, Geometry, Limits, Operation, Outcome,
    Request, RequestKind, WriteData,
};

use rare::Rare;

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
        let (geometry, abilities) = (self.device.geometry(), self.device.abilities());
        let outcome = match check(geometry, &abilities, &request) {
            Err(rejected) => Err(rejected),
            Ok(()) => {
                let request = if lacks_seals(&abilities, &request) { sealed(request) } else { request };
                match is_plain(geometry, &abilities, &request) {
                    // The only place with the device's own future; what is rare boxes it.
                    true => self.device.execute(request).await,
                    false => Rare::new(&self.device).execute(request).await,
                }
            }
        };
        self.counters.record(kind, blocks << geometry.block_size.shift(), &outcome);
        outcome.map_err(|error| named(&self.name, kind, error))
    }

    /// Executes only requests that need no splitting and no emulation. Data without tags for a device that makes none are not sealed
    /// here: if the device then had to wait, they would be sealed again.
    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        let (kind, geometry, abilities) = (request.kind(), self.device.geometry(), self.device.abilities());
        if !is_plain(geometry, &abilities, request) || check(geometry, &abilities, request).is_err() {
            return None;
        }
        let outcome = self.device.try_execute(request)?;
        self.counters.record(kind, request.blocks() << geometry.block_size.shift(), &outcome);
        Some(outcome.map_err(|error| named(&self.name, kind, error)))
    }
}

impl<D: Device> Gate<D> {
    /// Verifies by Read requests even if the device has a native Verify: for callers that want the data to cross the connection.
    ///
    /// # Errors
    /// Those of a Verify.
    pub fn verify_by_reading(&self, extent: Extent, expectations: Expectations) -> LocalBoxFuture<'_, Outcome> {
        Rare::new(&self.device).verify_by_reading((&self.name, &self.counters), extent, expectations)
    }
}

/// Names the device on an error and traces it; requests without errors pay for neither.
#[cold]
fn named(name: &str, kind: RequestKind, error: Error) -> Error {
    let error = error.with_device(name);
    tracing::debug!(device = %name, request = kind.name(), %error, "request failed");
    error
}

/// True for data without tags that the device does not make.
fn lacks_seals(abilities: &Abilities, request: &Request) -> bool {
    let is_unsealed = matches!(request.operation, Operation::Write(WriteData::Unsealed(_)));
    is_unsealed && abilities.writable && abilities.seals_writes != Ability::Native
}

/// The same Write with tags.
fn sealed(request: Request) -> Request {
    match request.operation {
        Operation::Write(data) => {
            Request { operation: Operation::Write(WriteData::Sealed(data.into_sealed())), ..request }
        }
        operation => Request { operation, ..request },
    }
}

/// True if the device executes the request itself and in one piece.
fn is_plain(geometry: &Geometry, abilities: &Abilities, request: &Request) -> bool {
    abilities.of_request(request) == Ability::Native && piece_limit(&geometry.limits, request).is_none()
}

/// Rejects a request that does not fit the device's geometry.
fn check(geometry: &Geometry, abilities: &Abilities, request: &Request) -> Result<(), Error> {
    request.extents.iter().try_for_each(|extent| geometry.check(*extent))?;
    match &request.operation {
        Operation::Write(data) => {
            check_written(geometry, request.extents.one(), (data.size(), data.blocks(), data.format()))
        }
        Operation::CompareAndWrite(data) => {
            let (extent, limit) = (request.extents.one(), abilities.compare_and_write_blocks);
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
            let (pages, wanted) = (abilities.bitmap_pages, area.pages());
            if wanted > pages {
                Err(shape("bitmap pages of the reserved area", u64::from(pages), u64::from(wanted)))
            } else {
                Ok(())
            }
        }
        _ => Ok(()),
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
