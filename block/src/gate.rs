//! The gate: every device in a stack is behind one.
//!
//! It rejects requests that are out of range or do not fit the geometry, splits those above the device's limits,
//! emulates request kinds that the device lacks, seals data for a device that does not seal, counts requests, and adds
//! the device's name to errors. A request that needs none of this costs a few comparisons and goes straight to the
//! device. Everything else is in `rare`, which is compiled once for all devices; this file is compiled for each of
//! them.

mod checks;
mod counters;
mod rare;

use std::sync::Arc;

use futures_util::future::LocalBoxFuture;
use sealblock_units::Extent;

use crate::{Abilities, Device, Expectations, Geometry, Outcome, Request};

use checks::{check, is_plain, lacks_seals, named, sealed};
pub use counters::Counters;
use rare::Rare;

/// A device behind its gate. See the module's header.
pub struct Gate<D> {
    device: D,
    name: Box<str>,
    counters: Arc<Counters>,
}

impl<D: Device> Gate<D> {
    /// Puts a gate in front of `device`; `name` is what errors call it, usually its target name.
    pub fn new(name: impl Into<Box<str>>, device: D) -> Gate<D> {
        Gate { device, name: name.into(), counters: Arc::default() }
    }

    /// What errors call the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Counters of the requests that went through so far, which every core may read.
    pub fn counters(&self) -> &Arc<Counters> {
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
                    // The only place with the device's own future; `rare` boxes it.
                    true => self.device.execute(request).await,
                    false => Rare::new(&self.device).execute(request).await,
                }
            }
        };
        self.counters.record(kind, blocks << geometry.block_size.shift(), &outcome);
        outcome.map_err(|error| named(&self.name, kind, error))
    }

    fn executes_in_place(&self) -> bool {
        self.device.executes_in_place()
    }

    /// Executes only requests that need no splitting and no emulation. Data without tags for a device that makes none are not sealed
    /// here: if the device then had to wait, they would be sealed again.
    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        if !self.device.executes_in_place() {
            return None;
        }
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
    /// Verifies by Read requests even if the device has a native Verify: for callers that want the data to cross the
    /// connection.
    ///
    /// # Errors
    /// Those of a Verify.
    pub fn verify_by_reading(&self, extent: Extent, expectations: Expectations) -> LocalBoxFuture<'_, Outcome> {
        Rare::new(&self.device).verify_by_reading((&self.name, &self.counters), extent, expectations)
    }
}

#[cfg(test)]
mod tests;
