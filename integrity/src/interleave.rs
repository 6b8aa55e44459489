//! Buffers in which each block's data is followed by its metadata, and the tuple is part of that metadata.

use sealblock_units::BlockSize;

use crate::seal::seal_blocks;
use crate::verify::verify_blocks;
use crate::{Checks, FormatError, Mismatch, PiFormat, Tags};

/// Where in a block's metadata the tuple stands (NVM Command Set specification, field DPS.PIP).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PiPosition {
    /// The first bytes of the metadata. The guard covers the data only.
    First,
    /// The last bytes of the metadata. The guard covers the data and the metadata before the tuple.
    Last,
}

/// The stride of an interleaved buffer: a block's data, then its metadata, then the next block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Interleave {
    format: PiFormat,
    size: BlockSize,
    metadata_bytes: usize,
    position: PiPosition,
}

impl Interleave {
    /// The layout with `metadata_bytes` of metadata for each block; fails if the tuple does not fit into it.
    pub const fn new(
        format: PiFormat,
        size: BlockSize,
        metadata_bytes: usize,
        position: PiPosition,
    ) -> Result<Interleave, FormatError> {
        let tuple_bytes = format.tuple_bytes();
        if metadata_bytes < tuple_bytes {
            return Err(FormatError::MetadataTooSmall { metadata_bytes, tuple_bytes });
        }
        Ok(Interleave { format, size, metadata_bytes, position })
    }

    /// The layout whose metadata is the tuple and nothing else.
    pub const fn tuple_only(format: PiFormat, size: BlockSize) -> Interleave {
        Interleave { format, size, metadata_bytes: format.tuple_bytes(), position: PiPosition::Last }
    }

    /// The format of the tuples.
    pub const fn format(self) -> PiFormat {
        self.format
    }

    /// Bytes from one block's data to the next one's.
    pub const fn stride_bytes(self) -> usize {
        self.size.bytes() + self.metadata_bytes
    }

    /// Where in a stride the tuple starts. In both positions the guard covers everything before it, and nothing
    /// behind.
    const fn tuple_at(self) -> usize {
        match self.position {
            PiPosition::First => self.size.bytes(),
            PiPosition::Last => self.stride_bytes() - self.format.tuple_bytes(),
        }
    }

    fn assert_whole(self, buffer_bytes: usize) {
        let stride = self.stride_bytes();
        assert!(buffer_bytes.is_multiple_of(stride), "{buffer_bytes} bytes are no whole strides of {stride} bytes");
    }
}

/// Writes the tuple of each block into its metadata; other metadata is left as it is, and covered by the guard if the
/// tuple stands last.
///
/// Panics if `buffer` is no whole number of strides.
pub fn seal_interleaved(layout: Interleave, buffer: &mut [u8], with: &Tags) {
    layout.assert_whole(buffer.len());
    let (at, tuple_bytes) = (layout.tuple_at(), layout.format.tuple_bytes());
    let blocks = buffer.chunks_exact_mut(layout.stride_bytes()).map(|stride| {
        let (guarded, rest) = stride.split_at_mut(at);
        (&*guarded, &mut rest[..tuple_bytes])
    });
    seal_blocks(layout.format, blocks, with);
}

/// Checks each block as [`crate::verify`] does; returns the number of bad blocks.
///
/// Panics if `buffer` is no whole number of strides.
pub fn verify_interleaved(
    layout: Interleave,
    buffer: &[u8],
    checks: &Checks,
    on_mismatch: &mut dyn FnMut(Mismatch),
) -> usize {
    layout.assert_whole(buffer.len());
    let (at, tuple_bytes) = (layout.tuple_at(), layout.format.tuple_bytes());
    let blocks = buffer.chunks_exact(layout.stride_bytes()).map(|stride| {
        let (guarded, rest) = stride.split_at(at);
        (guarded, &rest[..tuple_bytes])
    });
    verify_blocks(layout.format, blocks, checks, on_mismatch)
}
