//! Digests: a verify that sums the data it has read.

use futures_util::stream::{self, StreamExt};
use sealblock_block::{Checksum, Clock, Error, Medium, Outcome, Response};
use sealblock_integrity::{Checks, combine, guard};
use sealblock_units::Extent;

use crate::lookup::BlockLocation;
use crate::read::VERIFY_PIECES;
use crate::volume::Volume;

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Checks blocks and sums their data. A bad block does not hide another.
    pub(crate) async fn digest(&self, extent: Extent, checks: &Checks) -> Outcome {
        let pieces = self.verify_pieces(extent, checks);
        let pieces = pieces.map(|(piece, checks)| async move { (piece, self.digest_piece(piece, &checks).await) });
        let mut outcomes = stream::iter(pieces).buffered(VERIFY_PIECES);
        let (mut whole, mut tally) = (Checksum::default(), self.tally(extent, checks));
        while let Some((piece, outcome)) = outcomes.next().await {
            match outcome {
                Ok(part) => {
                    whole.crc64 = combine::crc64(whole.crc64, part.crc64, piece.bytes(self.geometry.block_size));
                    whole.bytes_transferred += part.bytes_transferred;
                }
                Err(error) => tally.take(error)?,
            }
        }
        whole.coverage = tally.finish()?;
        Ok(Response::Checksum(whole))
    }

    async fn digest_piece(&self, extent: Extent, checks: &Checks) -> Result<Checksum, Error> {
        let bytes_transferred = extent.bytes(self.geometry.block_size);
        let zeroes = || Checksum { crc64: crc64_of_zeroes(bytes_transferred), ..Checksum::default() };
        if self.is_unwritten(extent) {
            return Ok(zeroes());
        }
        self.retry_map_pages(extent);
        let (located, _reading) = self.locate(extent).await?;
        if located.iter().all(|block| matches!(block, BlockLocation::Zeroes)) {
            return Ok(zeroes());
        }
        let read = self.fetch_located(extent, &located, checks).await?;
        Ok(Checksum { crc64: guard::crc64(read.data()), bytes_transferred, ..Checksum::default() })
    }
}

/// The CRC-64/NVME of so many zero bytes, in a time that grows with the logarithm of their number.
fn crc64_of_zeroes(bytes: u64) -> u64 {
    let (mut whole, mut part, mut part_bytes) = (guard::crc64(&[]), guard::crc64(&[0]), 1);
    let mut left = bytes;
    while left > 0 {
        if left & 1 == 1 {
            whole = combine::crc64(whole, part, part_bytes);
        }
        left >>= 1;
        if left > 0 {
            part = combine::crc64(part, part, part_bytes);
            part_bytes <<= 1;
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroes_are_summed_without_being_there() {
        for bytes in [0, 1, 2, 3, 511, 512, 4096, 262_144, 1_000_003] {
            assert_eq!(crc64_of_zeroes(bytes), guard::crc64(&vec![0; bytes as usize]), "{bytes}");
        }
    }
}
