//! A device that refuses writes.

use sealblock_block::{Abilities, Device, ErrorKind, Geometry, Outcome, Request};

/// `D`, read-only.
pub struct ReadOnly<D>(D);

impl<D> ReadOnly<D> {
    /// The same blocks. `below` is behind its gate.
    pub fn new(below: D) -> ReadOnly<D> {
        ReadOnly(below)
    }
}

impl<D: Device> Device for ReadOnly<D> {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        Abilities { writable: false, ..self.0.abilities() }
    }

    async fn execute(&self, operation: Request) -> Outcome {
        match operation {
            Request::Write { .. }
            | Request::WriteZeroes { .. }
            | Request::Discard { .. }
            | Request::WriteUncorrectable { .. }
            | Request::Repair { .. }
            | Request::WriteReserved { .. } => Err(ErrorKind::ReadOnly.into()),
            Request::Read { .. }
            | Request::Verify { .. }
            | Request::Checksum { .. }
            | Request::BlockStatus { .. }
            | Request::Compare { .. }
            | Request::ReadReserved { .. }
            | Request::Flush => self.0.execute(operation).await,
        }
    }
}
