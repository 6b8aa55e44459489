//! Operations that a device lacks, made of others.

use sealblock_integrity::{Checks, Sealed, Tags, guard};
use sealblock_runtime_memory::Buffer;
use sealblock_units::Extent;

use super::Gate;
use crate::{
    BlockState, Checksum, Coverage, Device, Durability, Error, ErrorKind, Outcome, Request, Response, StatusRun, Tally,
    Unchecked, VerifyStats, WhyUnchecked,
};

impl<D: Device> Gate<D> {
    /// Verify by Read: the device checks on read, and the data stay here.
    pub(super) async fn verify_by_read(&self, extent: Extent, checks: Checks) -> Outcome {
        let (bytes_transferred, coverage) = self.read_all(extent, checks, |_| ()).await?;
        Ok(Response::Verified(VerifyStats { bytes_transferred, coverage }))
    }

    /// Digest by Read.
    pub(super) async fn digest_by_read(&self, extent: Extent, checks: Checks) -> Outcome {
        let mut crc64 = guard::crc64(&[]);
        let (bytes_transferred, coverage) =
            self.read_all(extent, checks, |part| crc64 = guard::crc64_append(crc64, part.data())).await?;
        Ok(Response::Checksum(Checksum { crc64, bytes_transferred, coverage }))
    }

    /// Reads blocks piece by piece, in order; says how many bytes that took, and how far it went. Every piece is read, whatever is
    /// wrong with others.
    async fn read_all(
        &self,
        extent: Extent,
        checks: Checks,
        mut each: impl FnMut(&Sealed),
    ) -> Result<(u64, Coverage), Error> {
        let geometry = self.device.geometry();
        let (mut bytes, mut tally) = (0, Tally { coverage: self.reach_of_reads(extent, &checks), ..Tally::default() });
        // One piece at a time bounds the memory of a Verify, whose extent has no payload to bound it.
        for piece in extent.split_aligned(geometry.limits.max_transfer_blocks) {
            let checks = match geometry.protection {
                Some(format) => checks.advance(piece.start().get() - extent.start().get(), format),
                None => checks,
            };
            match self.device.execute(Request::Read { extent: piece, checks }).await {
                Ok(Response::Data(part)) => each(&part),
                Ok(_) => return Err(answered_wrongly()),
                Err(error) => tally.take(error)?,
            }
            bytes += piece.bytes(geometry.block_size);
        }
        tally.finish().map(|coverage| (bytes, coverage))
    }

    /// How far a check by reading goes.
    fn reach_of_reads(&self, extent: Extent, checks: &Checks) -> Coverage {
        let (abilities, format) = (self.device.abilities(), self.device.geometry().protection);
        let mut reach = Coverage::of(abilities.seals && (format.is_none() || checks.guard));
        if abilities.copies {
            reach.add(Unchecked::new(extent, WhyUnchecked::OneCopy));
        }
        reach
    }

    /// Compare by Read.
    pub(super) async fn compare_by_read(&self, extent: Extent, data: Sealed) -> Outcome {
        let geometry = self.device.geometry();
        for piece in extent.split_aligned(geometry.limits.max_transfer_blocks) {
            let first = (piece.start().get() - extent.start().get()) as usize;
            let checks = geometry.protection.map_or(Checks::NONE, |format| Checks::full(format, piece.start()));
            let answer = self.device.execute(Request::Read { extent: piece, checks }).await?;
            let Response::Data(stored) = answer else { return Err(answered_wrongly()) };
            let wanted = data.slice(first, piece.len() as usize);
            if stored.data()[..] != wanted.data()[..] {
                let size = geometry.block_size.bytes();
                let pairs = stored.data().chunks(size).zip(wanted.data().chunks(size));
                let differs = piece.iter().zip(pairs).find(|(_, (a, b))| a != b);
                let lba = differs.map_or(piece.start(), |(lba, _)| lba);
                return Err(ErrorKind::Miscompare { lba }.into());
            }
        }
        Ok(Response::Done)
    }

    /// WriteZeroes by Write. The same sealed zeroes serve every piece only without reference tags, so each is sealed.
    pub(super) async fn zeroes_by_write(&self, extent: Extent, durability: Durability) -> Outcome {
        let geometry = self.device.geometry();
        let longest =
            extent.bytes(geometry.block_size).min(geometry.limits.max_transfer_blocks.bytes(geometry.block_size));
        let zeroes = Buffer::zeroed(longest as usize).freeze();
        for piece in extent.split_aligned(geometry.limits.max_transfer_blocks) {
            let data = zeroes.slice(..piece.bytes(geometry.block_size) as usize);
            let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: piece.start().get() };
            let data = Sealed::seal(data, geometry.block_size, geometry.protection, &tags);
            self.device.execute(Request::Write { extent: piece, data, durability }).await?;
        }
        Ok(Response::Done)
    }
}

/// What a device says that cannot tell which blocks take space: that all may.
pub(super) fn all_data(extent: Extent) -> Response {
    Response::BlockStatus(vec![StatusRun { blocks: extent.blocks(), state: BlockState::Data }])
}

#[cold]
pub(super) fn answered_wrongly() -> Error {
    ErrorKind::Media { reason: "the device answered with something else than it was asked for".to_owned() }.into()
}
