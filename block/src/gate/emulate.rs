//! Operations that a device lacks, made of others.

use sealblock_integrity::{Checks, Sealed, Tags};
use sealblock_runtime_memory::Buffer;
use sealblock_units::Extent;

use super::Gate;
use crate::{Answer, Device, Durability, Error, Failure, Faults, Operation, Outcome, Verified};

impl<D: Device> Gate<D> {
    /// Verify by Read: the device checks on read, and the data stay here.
    pub(super) async fn verify_by_read(&self, extent: Extent, checks: Checks) -> Outcome {
        let geometry = self.device.geometry();
        let mut cost = Verified::default();
        let mut faults = Vec::new();
        // One piece at a time bounds the memory of a Verify, whose extent has no payload to bound it.
        for piece in extent.split_aligned(geometry.limits.transfer) {
            let checks = match geometry.protection {
                Some(format) => checks.advance(piece.start().get() - extent.start().get(), format),
                None => checks,
            };
            match self.device.execute(Operation::Read { extent: piece, checks }).await {
                Ok(_) => cost.bytes_transferred += piece.bytes(geometry.block_size),
                Err(error) => {
                    faults.extend(faults_of(error)?);
                    cost.bytes_transferred += piece.bytes(geometry.block_size);
                }
            }
        }
        match Faults::new(faults) {
            Some(faults) => Err(faults.into()),
            None => Ok(Answer::Verified(cost)),
        }
    }

    /// Compare by Read.
    pub(super) async fn compare_by_read(&self, extent: Extent, data: Sealed) -> Outcome {
        let geometry = self.device.geometry();
        for piece in extent.split_aligned(geometry.limits.transfer) {
            let first = (piece.start().get() - extent.start().get()) as usize;
            let checks = geometry.protection.map_or(Checks::NONE, |format| Checks::full(format, piece.start()));
            let answer = self.device.execute(Operation::Read { extent: piece, checks }).await?;
            let Answer::Data(stored) = answer else { return Err(answered_wrongly()) };
            let wanted = data.slice(first, piece.len() as usize);
            if stored.data()[..] != wanted.data()[..] {
                let size = geometry.block_size.bytes();
                let pairs = stored.data().chunks(size).zip(wanted.data().chunks(size));
                let differs = piece.iter().zip(pairs).find(|(_, (a, b))| a != b);
                let lba = differs.map_or(piece.start(), |(lba, _)| lba);
                return Err(Failure::Miscompare { lba }.into());
            }
        }
        Ok(Answer::Done)
    }

    /// WriteZeroes by Write. The same sealed zeroes serve every piece only without reference tags, so each is sealed.
    pub(super) async fn zeroes_by_write(&self, extent: Extent, durability: Durability) -> Outcome {
        let geometry = self.device.geometry();
        let longest = extent.bytes(geometry.block_size).min(geometry.limits.transfer.bytes(geometry.block_size));
        let zeroes = Buffer::zeroed(longest as usize).freeze();
        for piece in extent.split_aligned(geometry.limits.transfer) {
            let data = zeroes.slice(..piece.bytes(geometry.block_size) as usize);
            let tags = Tags { app_tag: 0, storage_tag: 0, first_ref: piece.start().get() };
            let data = Sealed::seal(data, geometry.block_size, geometry.protection, &tags);
            self.device.execute(Operation::Write { extent: piece, data, durability }).await?;
        }
        Ok(Answer::Done)
    }
}

/// The faults of an integrity error; every other error stays one.
fn faults_of(error: Error) -> Result<Vec<crate::Fault>, Error> {
    match error.failure() {
        Failure::Integrity(faults) => Ok(faults.as_slice().to_vec()),
        _ => Err(error),
    }
}

#[cold]
fn answered_wrongly() -> Error {
    Failure::Media { reason: "the device answered a read without data".to_owned() }.into()
}
