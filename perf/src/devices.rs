//! Devices for contenders: one whose reads touch the data, one that makes no tags, and one with a known speed.

use std::cell::Cell;
use std::hint::black_box;
use std::time::{Duration, Instant};

use sealblock_block::{Abilities, Ability, Device, Geometry, Outcome, Request, Response};
use sealblock_runtime_reactor::{now, sleep_until};

/// A device whose reads touch every byte of the data.
///
/// A raw file as a baseline would return data that no core ever loads, which no user of data does. The cost of loading the
/// data, before any checksum, shows against this.
pub struct Touched<D>(pub D);

impl<D: Device> Device for Touched<D> {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        let response = self.0.execute(request).await?;
        if let Response::Data(data) = &response {
            let words = data.segments().iter().flat_map(|segment| segment.data.as_chunks::<8>().0);
            black_box(words.fold(0, |seen, word| seen ^ u64::from_le_bytes(*word)));
        }
        Ok(response)
    }
}

/// A device without some of its abilities, so that the gate in front of it has to emulate them.
pub struct Lacking<D> {
    /// The device.
    pub inner: D,
    /// What is left of its abilities.
    pub left: fn(Abilities) -> Abilities,
}

impl<D: Device> Device for Lacking<D> {
    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn abilities(&self) -> Abilities {
        (self.left)(self.inner.abilities())
    }

    async fn execute(&self, request: Request) -> Outcome {
        self.inner.execute(request).await
    }
}

/// A device that makes no tags, so that its gate makes them before it gets a write.
pub struct SealedBefore<D>(pub D);

impl<D: Device> Device for SealedBefore<D> {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        Abilities { seals_writes: Ability::Absent, ..self.0.abilities() }
    }

    async fn execute(&self, request: Request) -> Outcome {
        self.0.execute(request).await
    }
}

/// A device that takes time for every byte, one request after the other, as a disk of its own does.
///
/// Two files on one disk are not faster than one file. Two of these are.
pub struct Paced<D> {
    inner: D,
    bytes_per_second: u64,
    /// When all requests until now complete.
    free: Cell<Instant>,
}

impl<D: Device> Paced<D> {
    /// `inner` at this speed, by the clock of the current reactor.
    pub fn new(inner: D, bytes_per_second: u64) -> Paced<D> {
        Paced { inner, bytes_per_second, free: Cell::new(now()) }
    }
}

impl<D: Device> Device for Paced<D> {
    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.inner.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        let bytes = request.extent().map_or(0, |extent| extent.bytes(self.geometry().block_size));
        let takes = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        let done = self.free.get().max(now()) + takes;
        self.free.set(done);
        let outcome = self.inner.execute(request).await;
        sleep_until(done).await;
        outcome
    }
}
