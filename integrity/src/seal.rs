//! Sealing and verifying: with tuples separate from the data, or interleaved with it.

use sealblock_units::BlockSize;

use crate::checks::CompiledChecks;
use crate::tuple::{self, GuardFormat, for_kind};
use crate::{Checks, FormatError, Mismatch, PiFormat, Tags, Tuple};

/// Writes the tuple of each block of `data` into `tags`.
///
/// Panics if `data` is not a whole number of blocks, or `tags` is not exactly one tuple for each of them.
pub fn seal(format: PiFormat, size: BlockSize, data: &[u8], tags: &mut [u8], with: &Tags) {
    assert_lengths(format, size, data.len(), tags.len());
    let pairs = data.chunks_exact(size.bytes()).zip(tags.chunks_exact_mut(format.tuple_bytes()));
    seal_blocks(format, pairs, with);
}

/// Seals blocks, each given as the bytes that the guard covers and the bytes of the tuple.
pub(crate) fn seal_blocks<'a>(format: PiFormat, blocks: impl Iterator<Item = (&'a [u8], &'a mut [u8])>, with: &Tags) {
    for_kind!(format.guard(), seal_kind(format, blocks, with));
}

fn seal_kind<'a, W: GuardFormat>(
    format: PiFormat,
    blocks: impl Iterator<Item = (&'a [u8], &'a mut [u8])>,
    with: &Tags,
) {
    let fixed = Tuple { guard: 0, app_tag: with.app_tag, storage_tag: with.storage_tag, ref_tag: 0 };
    let fixed = tuple::pack(format, &fixed);
    for (block, (guarded, bytes)) in blocks.enumerate() {
        let guard = u128::from(W::compute(guarded)) << W::GUARD_SHIFT;
        let reference = u128::from(format.reference_tag(with.initial_ref_tag, block as u64));
        tuple::store(W::TUPLE_BYTES, guard | fixed | reference, bytes);
    }
}

/// Panics unless the data is a whole number of blocks with one tuple each.
pub(crate) fn assert_lengths(format: PiFormat, size: BlockSize, data_bytes: usize, tags_bytes: usize) {
    assert!(data_bytes.is_multiple_of(size.bytes()), "{data_bytes} bytes of data are no whole blocks of {size} bytes");
    let required = data_bytes / size.bytes() * format.tuple_bytes();
    assert_eq!(
        tags_bytes, required,
        "{data_bytes} bytes of data in blocks of {size} bytes need {required} bytes of tags"
    );
}

/// Checks each block of `data` and its tuple in `tags`; returns the number of bad blocks.
///
/// A bad block is reported once, with its first wrong field in the order guard, application tag, reference tag, storage
/// tag. All blocks are checked, so one bad block hides no other. A tuple that escapes ([`crate::Tuple::is_escaped`]) is
/// not checked at all. The data are read only if the guard is checked.
///
/// Panics if `data` is not a whole number of blocks, or `tags` is not exactly one tuple for each of them.
pub fn verify(
    format: PiFormat,
    size: BlockSize,
    data: &[u8],
    tags: &[u8],
    checks: &Checks,
    on_mismatch: &mut dyn FnMut(Mismatch),
) -> usize {
    assert_lengths(format, size, data.len(), tags.len());
    let pairs = data.chunks_exact(size.bytes()).zip(tags.chunks_exact(format.tuple_bytes()));
    verify_blocks(format, pairs, checks, on_mismatch)
}

/// Checks blocks, each given as the bytes that the guard covers and the bytes of the tuple.
pub(crate) fn verify_blocks<'a>(
    format: PiFormat,
    blocks: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    checks: &Checks,
    on_mismatch: &mut dyn FnMut(Mismatch),
) -> usize {
    let compiled = CompiledChecks::new(format, checks);
    if compiled.is_empty() {
        return 0;
    }
    for_kind!(format.guard(), verify_kind(&compiled, blocks, on_mismatch))
}

fn verify_kind<'a, W: GuardFormat>(
    compiled: &CompiledChecks,
    blocks: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    on_mismatch: &mut dyn FnMut(Mismatch),
) -> usize {
    let mut bad = 0;
    for (block, (guarded, bytes)) in blocks.enumerate() {
        let found = tuple::load(W::TUPLE_BYTES, bytes);
        if compiled.is_escaped(found) {
            continue;
        }
        let guard = if compiled.guard { u128::from(W::compute(guarded)) << W::GUARD_SHIFT } else { 0 };
        let required = compiled.tuple(block, guard);
        if !compiled.matches(found, required) {
            bad += 1;
            on_mismatch(compiled.mismatch(block, found, required));
        }
    }
    bad
}

/// The position of the tuple in a block's metadata (NVM Command Set specification, field DPS.PIP).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PiPosition {
    /// The first bytes of the metadata. The guard covers the data only.
    First,
    /// The last bytes of the metadata. The guard covers the data and the metadata before the tuple.
    Last,
}

/// The layout of an interleaved buffer: a block's data, then its metadata, then the next block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Interleave {
    format: PiFormat,
    size: BlockSize,
    metadata_bytes: usize,
    position: PiPosition,
}

impl Interleave {
    /// The layout with `metadata_bytes` bytes of metadata for each block; fails if the tuple does not fit into them.
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

    /// The layout whose metadata is only the tuple.
    pub const fn tuple_only(format: PiFormat, size: BlockSize) -> Interleave {
        Interleave { format, size, metadata_bytes: format.tuple_bytes(), position: PiPosition::Last }
    }

    /// The format of the tuples.
    pub const fn format(self) -> PiFormat {
        self.format
    }

    /// Bytes from the start of one block's data to the start of the next one's.
    pub const fn stride_bytes(self) -> usize {
        self.size.bytes() + self.metadata_bytes
    }

    /// The offset of the tuple in a stride. In both positions the guard covers everything before the tuple and nothing
    /// after it.
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

/// Writes the tuple of each block into its metadata. Other metadata is not changed; the guard covers it if the tuple
/// comes last.
///
/// Panics if `buffer` is not a whole number of strides.
pub fn seal_interleaved(layout: Interleave, buffer: &mut [u8], with: &Tags) {
    layout.assert_whole(buffer.len());
    let (at, tuple_bytes) = (layout.tuple_at(), layout.format.tuple_bytes());
    let blocks = buffer.chunks_exact_mut(layout.stride_bytes()).map(|stride| {
        let (guarded, rest) = stride.split_at_mut(at);
        (&*guarded, &mut rest[..tuple_bytes])
    });
    seal_blocks(layout.format, blocks, with);
}

/// Checks each block like [`crate::verify`]; returns the number of bad blocks.
///
/// Panics if `buffer` is not a whole number of strides.
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
