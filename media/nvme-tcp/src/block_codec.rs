//! Converts blocks between memory, where data and tags are separate, and the wire, where they are interleaved.

use std::cell::Cell;

use sealblock_integrity::{Checks, GuardKind, Mismatch, PiFormat, Sealed, Unverified};
use sealblock_media_nvme::{NamespaceProfile, PiMode, shares_crcs};
use sealblock_protocols_nvme_tcp::host::ReadData;
use sealblock_protocols_nvme_tcp::{BlockCrcs, BlockLayout, Payload};
use sealblock_runtime_memory::{Buffer, Pool, Slice};
use sealblock_units::{BlockSize, Extent};

use crate::options::add;

/// Blocks of at least this many bytes are sent without a copy, with their tags between them; smaller ones are copied
/// together, because their gather list would cost more than the copy.
const GATHER_BYTES: usize = 4096;

/// The wire format of a namespace's blocks.
#[derive(Clone, Debug)]
pub(crate) struct BlockCodec {
    pub(crate) size: BlockSize,
    pub(crate) pi_mode: PiMode,
    /// Set if one CRC serves data digests and guards.
    pub(crate) crc_layout: Option<BlockLayout>,
}

impl BlockCodec {
    pub(crate) fn new(profile: &NamespaceProfile, data_digest: bool) -> BlockCodec {
        let (size, pi_mode) = (profile.geometry.block_size, profile.pi_mode);
        let shares_crcs = data_digest && shares_crcs(pi_mode);
        let tuple_bytes = pi_mode.shown().map_or(0, PiFormat::tuple_bytes);
        let crcs = if shares_crcs { BlockLayout::new(size.bytes(), tuple_bytes) } else { None };
        BlockCodec { size, pi_mode, crc_layout: crcs }
    }

    /// Bytes that a Read of these blocks transfers.
    pub(crate) fn read_bytes(&self, extent: Extent) -> usize {
        extent.len() as usize * (self.size.bytes() + self.pi_mode.shown().map_or(0, PiFormat::tuple_bytes))
    }

    /// Data of a Write in wire format.
    pub(crate) fn payload(&self, data: &Sealed, pool: &Pool) -> Payload {
        match self.pi_mode.shown() {
            Some(format) => self.with_tags(format, data, pool),
            None => Payload::from(data),
        }
    }

    /// Data of a Compare in wire format, with the tags of the namespace if it stores any.
    pub(crate) fn comparand(&self, data: &Sealed, pool: &Pool) -> Payload {
        match data.format() {
            Some(format) => self.with_tags(format, data, pool),
            None => Payload::from(data),
        }
    }

    fn with_tags(&self, format: PiFormat, data: &Sealed, pool: &Pool) -> Payload {
        let (size, tuple) = (self.size.bytes(), format.tuple_bytes());
        let payload = if size >= GATHER_BYTES {
            Payload::new(data.interleaved())
        } else {
            let mut whole = pool.take(data.blocks() * (size + tuple));
            for (block, (data, tags)) in whole.chunks_exact_mut(size + tuple).zip(data.iter()) {
                block[..size].copy_from_slice(data);
                block[size..].copy_from_slice(tags);
            }
            Payload::from(whole.freeze())
        };
        match (&self.crc_layout, data.block_crcs()) {
            (Some(profile), Some(guards)) => {
                payload.with_crcs(BlockCrcs { layout: profile.clone(), guards: guards.collect() })
            }
            // Unverified guards must not yield a digest: it would hide their mismatch with the data.
            _ => payload,
        }
    }

    /// Verifies received blocks. `read` has whole blocks.
    pub(crate) fn check_read(
        &self,
        read: ReadData,
        checks: &Checks,
        pool: &Pool,
        guard_bytes_checksummed: &Cell<u64>,
    ) -> Result<Sealed, Vec<Mismatch>> {
        let Some(format) = self.pi_mode.shown() else {
            let plain = Unverified::new(read.buffer.freeze(), Slice::empty(), self.size, None);
            return plain.expect("the length was checked").verify(&Checks::NONE);
        };
        let (data, tags) = self.split_tags(format, read.buffer, pool);
        let len = data.len() as u64;
        let blocks = Unverified::new(data, tags, self.size, Some(format)).expect("one tuple was taken from each block");
        // Block CRCs are present only if a data digest over these bytes matched.
        if let Some(crcs) = read.crcs.filter(|_| format.guard() == GuardKind::Crc32c) {
            return blocks.verify_with_crcs(checks, &crcs.guards);
        }
        if checks.guard {
            add(guard_bytes_checksummed, len);
        }
        blocks.verify(checks)
    }

    /// Separates data and tags in place; a single block is not moved.
    fn split_tags(&self, format: PiFormat, mut buffer: Buffer, pool: &Pool) -> (Slice, Slice) {
        let (size, tuple) = (self.size.bytes(), format.tuple_bytes());
        let (stride, blocks) = (size + tuple, buffer.len() / (size + tuple));
        if blocks == 1 {
            let both = buffer.freeze();
            return (both.slice(..size), both.slice(size..));
        }
        let mut tags = pool.take(blocks * tuple);
        for (i, tag) in tags.chunks_exact_mut(tuple).enumerate() {
            tag.copy_from_slice(&buffer[i * stride + size..(i + 1) * stride]);
            buffer.copy_within(i * stride..i * stride + size, i * size);
        }
        buffer.truncate(blocks * size);
        (buffer.freeze(), tags.freeze())
    }
}

#[cfg(test)]
mod tests;
