//! Checking tuples against data and against what is demanded of them.

use sealblock_units::BlockSize;

use crate::checks::CompiledChecks;
use crate::seal::assert_lengths;
use crate::wire::{self, GuardFormat, for_kind};
use crate::{Checks, Mismatch, PiFormat};

/// Checks each block of `data` and its tuple in `tags`; returns the number of bad blocks.
///
/// A bad block is reported once, with its first failing field in the order guard, application tag, reference tag,
/// storage tag; all blocks are looked at, so one bad block hides no other. A tuple that escapes
/// ([`crate::Tuple::is_escaped`]) is not checked at all. Data is read only if the guard is checked.
///
/// Panics if `data` is no whole number of blocks, or `tags` is not exactly one tuple for each of them.
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

/// Checks each pair of the bytes that the guard covers and the bytes of the tuple.
pub(crate) fn verify_blocks<'a>(
    format: PiFormat,
    blocks: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    checks: &Checks,
    on_mismatch: &mut dyn FnMut(Mismatch),
) -> usize {
    let demand = CompiledChecks::new(format, checks);
    if demand.is_nothing() {
        return 0;
    }
    for_kind!(format.guard(), verify_kind(&demand, blocks, on_mismatch))
}

fn verify_kind<'a, W: GuardFormat>(
    demand: &CompiledChecks,
    blocks: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    on_mismatch: &mut dyn FnMut(Mismatch),
) -> usize {
    let mut bad = 0;
    for (block, (guarded, tuple)) in blocks.enumerate() {
        let found = wire::load(W::TUPLE_BYTES, tuple);
        if demand.is_escaped(found) {
            continue;
        }
        let guard = if demand.guard { u128::from(W::compute(guarded)) << W::GUARD_SHIFT } else { 0 };
        let demanded = demand.tuple(block, guard);
        if !demand.holds(found, demanded) {
            bad += 1;
            on_mismatch(demand.mismatch(block, found, demanded));
        }
    }
    bad
}
