//! Devices for contenders: one that lacks abilities, and one that makes no tags.

use sealblock_block::{Abilities, Ability, Device, Geometry, Outcome, Request};

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
