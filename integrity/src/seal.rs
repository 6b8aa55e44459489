//! Making tuples from data.

use sealblock_units::BlockSize;

use crate::wire::{self, GuardFormat, for_kind};
use crate::{PiFormat, Tags, Tuple};

/// Writes the tuple of each block of `data` into `tags`.
///
/// Panics if `data` is no whole number of blocks, or `tags` is not exactly one tuple for each of them.
pub fn seal(format: PiFormat, size: BlockSize, data: &[u8], tags: &mut [u8], with: &Tags) {
    assert_lengths(format, size, data.len(), tags.len());
    let pairs = data.chunks_exact(size.bytes()).zip(tags.chunks_exact_mut(format.tuple_bytes()));
    seal_blocks(format, pairs, with);
}

/// Seals each pair of the bytes that the guard covers and the bytes of the tuple.
pub(crate) fn seal_blocks<'a>(format: PiFormat, blocks: impl Iterator<Item = (&'a [u8], &'a mut [u8])>, with: &Tags) {
    for_kind!(format.guard(), seal_kind(format, blocks, with));
}

fn seal_kind<'a, W: GuardFormat>(
    format: PiFormat,
    blocks: impl Iterator<Item = (&'a [u8], &'a mut [u8])>,
    with: &Tags,
) {
    let fixed = Tuple { guard: 0, app_tag: with.app_tag, storage_tag: with.storage_tag, ref_tag: 0 };
    let fixed = wire::pack(format, &fixed);
    for (block, (guarded, tuple)) in blocks.enumerate() {
        let guard = u128::from(W::compute(guarded)) << W::GUARD_SHIFT;
        let reference = u128::from(format.reference_tag(with.initial_ref_tag, block as u64));
        wire::store(W::TUPLE_BYTES, guard | fixed | reference, tuple);
    }
}

/// Panics unless the data is a whole number of blocks with one tuple each.
pub(crate) fn assert_lengths(format: PiFormat, size: BlockSize, data_bytes: usize, tags_bytes: usize) {
    assert!(data_bytes.is_multiple_of(size.bytes()), "{data_bytes} bytes of data are no whole blocks of {size} bytes");
    let due = data_bytes / size.bytes() * format.tuple_bytes();
    assert_eq!(tags_bytes, due, "{data_bytes} bytes of data in blocks of {size} bytes need {due} bytes of tags");
}
