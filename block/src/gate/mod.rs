//! The gate: the only way a device is put into a stack.
//!
//! It refuses what is out of range or has the wrong shape, splits what is larger than the device takes, stands in for
//! operations the device lacks, counts, and names the hop on errors. A request that needs none of this costs a few
//! comparisons and goes straight to the device.

mod counters;
mod emulate;
mod split;

pub use counters::Counters;

use sealblock_integrity::{Checks, Sealed};
use sealblock_units::Extent;

use emulate::all_data;

use crate::{Abilities, Ability, Device, Error, ErrorKind, Geometry, Outcome, Request, RequestKind};

/// A device with its gate. See the module's header.
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

    /// What has gone through so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The device behind the gate, for what is no request, such as its description.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Refuses a request that the device's shape rules out.
    fn check(&self, operation: &Request) -> Result<(), Error> {
        let geometry = self.device.geometry();
        if let Some(extent) = operation.extent() {
            geometry.check(extent)?;
        }
        match operation {
            Request::Write { extent, data, .. } => {
                check_shape(geometry, *extent, data)?;
                // Stored tags are served to others later, so they must be of the device's own format.
                if data.format() != geometry.protection {
                    return Err(shape("protection information of another format", 1, 0));
                }
                Ok(())
            }
            Request::Compare { extent, data } => check_shape(geometry, *extent, data),
            Request::Discard { extents } => extents.iter().try_for_each(|extent| geometry.check(*extent)),
            Request::WriteReserved { slot, bytes } if bytes.len() > slot.max_bytes() => {
                Err(shape("bytes for the annex", slot.max_bytes() as u64, bytes.len() as u64))
            }
            Request::ReadReserved { slot } | Request::WriteReserved { slot, .. } => {
                let (pages, wanted) = (self.device.abilities().annex_pages, slot.pages());
                if wanted > pages {
                    Err(shape("pages of the annex", u64::from(pages), u64::from(wanted)))
                } else {
                    Ok(())
                }
            }
            Request::Read { .. }
            | Request::Verify { .. }
            | Request::Checksum { .. }
            | Request::Repair { .. }
            | Request::BlockStatus { .. }
            | Request::Flush
            | Request::WriteZeroes { .. }
            | Request::WriteUncorrectable { .. } => Ok(()),
        }
    }

    /// Finds who carries the request out.
    async fn route(&self, operation: Request) -> Outcome {
        let kind = operation.kind();
        match self.device.abilities().of(kind) {
            Ability::Native => self.native(operation).await,
            Ability::Emulated | Ability::Absent => match operation {
                Request::Verify { extent, checks } => self.verify_by_read(extent, checks).await,
                Request::Checksum { extent, checks } => self.digest_by_read(extent, checks).await,
                Request::BlockStatus { extent } => Ok(all_data(extent)),
                Request::Compare { extent, data } => self.compare_by_read(extent, data).await,
                Request::WriteZeroes { extent, durability, .. } if self.device.abilities().writable => {
                    self.zeroes_by_write(extent, durability).await
                }
                Request::Write { .. }
                | Request::WriteZeroes { .. }
                | Request::Discard { .. }
                | Request::WriteUncorrectable { .. }
                | Request::WriteReserved { .. }
                    if !self.device.abilities().writable =>
                {
                    Err(ErrorKind::ReadOnly.into())
                }
                _ => Err(ErrorKind::Absent(kind).into()),
            },
        }
    }

    /// Hands a request on, whole where it fits the device's limits.
    async fn native(&self, operation: Request) -> Outcome {
        match split::limit(&self.device.geometry().limits, &operation) {
            Some(most) => self.in_pieces(operation, most).await,
            None => self.device.execute(operation).await,
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

    async fn execute(&self, operation: Request) -> Outcome {
        let _flight = self.counters.begin();
        let (kind, blocks) = (operation.kind(), operation.blocks());
        let outcome = match self.check(&operation) {
            Ok(()) => self.route(operation).await,
            Err(refused) => Err(refused),
        };
        self.counters.count(kind, blocks << self.geometry().block_size.shift(), &outcome);
        outcome.map_err(|error| self.named(kind, error))
    }

    /// Only for what needs none of the gate's help.
    fn try_execute(&self, operation: &Request) -> Option<Outcome> {
        let (kind, geometry) = (operation.kind(), self.device.geometry());
        let is_native = matches!(self.device.abilities().of(kind), Ability::Native);
        if !is_native || split::limit(&geometry.limits, operation).is_some() || self.check(operation).is_err() {
            return None;
        }
        let outcome = self.device.try_execute(operation)?;
        self.counters.count(kind, operation.blocks() << geometry.block_size.shift(), &outcome);
        Some(outcome.map_err(|error| self.named(kind, error)))
    }
}

impl<D: Device> Gate<D> {
    /// Verifies by reads, also where the device would do it itself: for who wants to see the data come.
    ///
    /// # Errors
    /// As a Verify.
    pub async fn verify_by_reading(&self, extent: Extent, checks: Checks) -> Outcome {
        let _flight = self.counters.begin();
        let outcome = match self.check(&Request::Verify { extent, checks }) {
            Ok(()) => self.verify_by_read(extent, checks).await,
            Err(refused) => Err(refused),
        };
        self.counters.count(RequestKind::Verify, extent.bytes(self.geometry().block_size), &outcome);
        outcome.map_err(|error| self.named(RequestKind::Verify, error))
    }

    /// Puts the hop's name on an error and traces it; the path without errors does neither.
    #[cold]
    fn named(&self, kind: RequestKind, error: Error) -> Error {
        let error = error.with_device(&self.name);
        tracing::debug!(hop = %self.name, operation = kind.name(), %error, "request failed");
        error
    }
}

/// Refuses data that are not as long as the extent says.
fn check_shape(geometry: &Geometry, extent: Extent, data: &Sealed) -> Result<(), Error> {
    if data.size() != geometry.block_size {
        return Err(shape("block size of the data", geometry.block_size.bytes() as u64, data.size().bytes() as u64));
    }
    if data.blocks() as u64 != extent.len() {
        return Err(shape("blocks of data", extent.len(), data.blocks() as u64));
    }
    Ok(())
}

fn shape(what: &'static str, limit: u64, actual: u64) -> Error {
    ErrorKind::Limit { what, limit, actual }.into()
}

#[cfg(test)]
mod tests;
