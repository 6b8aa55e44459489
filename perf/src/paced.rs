//! A device that takes its time for every byte, one request after the other, as a disk of its own does.
//!
//! Two files share a disk here, so that two of them are not faster than one. Two of these are.

use std::cell::Cell;
use std::time::{Duration, Instant};

use sealblock_block::{Abilities, Device, Geometry, Outcome, Request};
use sealblock_runtime_reactor::{now, sleep_until};

/// See the module's header.
pub struct Paced<D> {
    below: D,
    bytes_per_second: u64,
    /// When what was asked so far is done.
    free: Cell<Instant>,
}

impl<D: Device> Paced<D> {
    /// `below` at this speed. Belongs to the current reactor, whose clock it goes by.
    pub fn new(below: D, bytes_per_second: u64) -> Paced<D> {
        Paced { below, bytes_per_second, free: Cell::new(now()) }
    }
}

impl<D: Device> Device for Paced<D> {
    fn geometry(&self) -> &Geometry {
        self.below.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.below.abilities()
    }

    async fn execute(&self, operation: Request) -> Outcome {
        let bytes = operation.extent().map_or(0, |extent| extent.bytes(self.geometry().block_size));
        let takes = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        let done = self.free.get().max(now()) + takes;
        self.free.set(done);
        let outcome = self.below.execute(operation).await;
        sleep_until(done).await;
        outcome
    }
}
