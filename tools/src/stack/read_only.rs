//! A device that takes no changes, whatever the one below would take.

use sealblock_block::{Abilities, Device, Failure, Geometry, Operation, Outcome};

/// `D`, for reading.
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

    async fn execute(&self, operation: Operation) -> Outcome {
        match operation {
            Operation::Write { .. }
            | Operation::WriteZeroes { .. }
            | Operation::Discard { .. }
            | Operation::WriteUncorrectable { .. }
            | Operation::Repair { .. }
            | Operation::WriteAnnex { .. } => Err(Failure::ReadOnly.into()),
            Operation::Read { .. }
            | Operation::Verify { .. }
            | Operation::Digest { .. }
            | Operation::Allocation { .. }
            | Operation::Compare { .. }
            | Operation::ReadAnnex { .. }
            | Operation::Flush => self.0.execute(operation).await,
        }
    }
}
