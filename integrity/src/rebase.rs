//! Rebasing: changes guard kind and tags where data pass from one format to another, and checks the old tuples at the
//! same time.
//!
//! The data are read once: a block's old guard is checked and its new one computed while the block is in the nearest
//! cache. If both formats have the same guard kind, the guard is copied and not computed again. So a guard that is not
//! checked here still protects the data for the next device, and data that are not checked are not read.

use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::BlockSize;

use crate::checks::CompiledChecks;
use crate::seal::assert_lengths;
use crate::sealed::{Sealed, Unverified};
use crate::tuple::{self, ESCAPE, GuardFormat, for_kind};
use crate::{Checks, Mismatch, PiFormat, Tuple};

/// How a tag changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Keep<T> {
    /// Each block keeps its value, truncated to the bits of the new format.
    #[default]
    Keep,
    /// Blocks get this value, truncated to the bits of the new format.
    Replace(T),
}

/// How the tags change. The default keeps all of them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct RebaseTags {
    /// The application tag of every block.
    pub app_tag: Keep<u16>,
    /// The storage tag of every block.
    pub storage_tag: Keep<u64>,
    /// The reference tag of the first block; a replacement grows by one with each block if the new format is of
    /// Type 1 or 2, and stays in Type 3.
    pub initial_ref_tag: Keep<u64>,
}

/// Checks each tuple of `tags_in` and writes the corresponding new one to `tags_out`; returns the number of bad blocks.
/// Each of them is reported as in [`crate::verify`].
///
/// - A bad block gets a new tuple whose guard is the inverse of the right one, so that every later check detects it
///   too.
/// - An escaped block stays escaped: it gets an application tag of FFFFh whatever `output` says, in Type 3 also a
///   reference tag of all ones. Its guard is copied, or all ones if the guard kind changes.
/// - With a new guard kind, a block whose old guard is not checked gets a guard that matches its present data, which
///   hides corruption. So check the guard, unless the caller has already checked it.
/// - A checked Type 3 block that keeps an application tag of FFFFh becomes an escaped block of Type 1 or 2: in those
///   types this tag always means an escape.
///
/// Panics if `data` is not a whole number of blocks, or either `tags` is not exactly one tuple for each of them.
#[expect(clippy::too_many_arguments, reason = "two formats and two tag buffers stand side by side here only")]
pub fn rebase(
    from: PiFormat,
    to: PiFormat,
    size: BlockSize,
    data: &[u8],
    tags_in: &[u8],
    tags_out: &mut [u8],
    checks_on_input: &Checks,
    output: &RebaseTags,
    on_mismatch: &mut dyn FnMut(Mismatch),
) -> usize {
    assert_lengths(from, size, data.len(), tags_in.len());
    assert_lengths(to, size, data.len(), tags_out.len());
    let context = RebaseContext { from, to, checks: CompiledChecks::new(from, checks_on_input), output: *output };
    let tuples = tags_in.chunks_exact(from.tuple_bytes()).zip(tags_out.chunks_exact_mut(to.tuple_bytes()));
    let blocks = data.chunks_exact(size.bytes()).zip(tuples);
    for_kind!(from.guard(), rebase_from(&context, blocks, on_mismatch))
}

impl Unverified {
    /// Checks the tags like [`Unverified::verify`], and creates those of another format in the same pass, or none if
    /// `to` is `None`.
    ///
    /// # Errors
    /// Every block that does not match, with its first field that is wrong.
    ///
    /// # Panics
    /// If the blocks have no tags: a bug of the caller, which no input causes.
    pub fn rebase(self, to: Option<PiFormat>, checks: &Checks, output: &RebaseTags) -> Result<Sealed, Vec<Mismatch>> {
        let from = self.format().expect("a caller that changes tags has some");
        let (data, tags, size) = (self.data().clone(), self.tags().clone(), self.size());
        let Some(to) = to else {
            self.verify(checks)?;
            return Ok(Sealed::from_verified(data, Slice::empty(), size, None, true));
        };
        let mut mismatches = Vec::new();
        let mut made = Buffer::zeroed((data.len() >> size.shift()) * to.tuple_bytes());
        rebase(from, to, size, &data, &tags, &mut made, checks, output, &mut |mismatch| mismatches.push(mismatch));
        if !mismatches.is_empty() {
            return Err(mismatches);
        }
        let is_verified = checks.guard && !self.has_escapes();
        Ok(Sealed::from_verified(data, made.freeze(), size, Some(to), is_verified))
    }
}

/// The parameters that all blocks of a call share.
struct RebaseContext {
    from: PiFormat,
    to: PiFormat,
    checks: CompiledChecks,
    output: RebaseTags,
}

impl RebaseContext {
    /// The new tuple of a block, without its guard.
    #[inline(always)]
    fn tags(&self, block: usize, old: &Tuple) -> Tuple {
        let kept = |keep, old| if let Keep::Replace(new) = keep { new } else { old };
        Tuple {
            guard: 0,
            app_tag: if let Keep::Replace(new) = self.output.app_tag { new } else { old.app_tag },
            storage_tag: kept(self.output.storage_tag, old.storage_tag),
            ref_tag: match self.output.initial_ref_tag {
                Keep::Keep => old.ref_tag,
                Keep::Replace(first) => self.to.reference_tag(first, block as u64),
            },
        }
    }

    /// The new tuple of an escaped block.
    fn escaped(&self, block: usize, old: &Tuple) -> Tuple {
        let tags = self.tags(block, old);
        Tuple {
            guard: if self.from.guard() == self.to.guard() { old.guard } else { u64::MAX },
            app_tag: ESCAPE,
            ref_tag: if self.to.protection().increments_ref_tag() { tags.ref_tag } else { u64::MAX },
            ..tags
        }
    }
}

fn rebase_from<'a, A: GuardFormat>(
    context: &RebaseContext,
    blocks: impl Iterator<Item = (&'a [u8], (&'a [u8], &'a mut [u8]))>,
    on_mismatch: &mut dyn FnMut(Mismatch),
) -> usize {
    // The type of the new guard comes first in the list that the macro completes.
    for_kind!(context.to.guard(), rebase_kinds::<A, _>(context, blocks, on_mismatch))
}

fn rebase_kinds<'a, B: GuardFormat, A: GuardFormat, I: Iterator<Item = (&'a [u8], (&'a [u8], &'a mut [u8]))>>(
    context: &RebaseContext,
    blocks: I,
    on_mismatch: &mut dyn FnMut(Mismatch),
) -> usize {
    let mut bad = 0;
    for (block, (data, (old_bytes, new_bytes))) in blocks.enumerate() {
        let found = tuple::load(A::TUPLE_BYTES, old_bytes);
        let old = tuple::unpack(context.from, found);
        let mut new = if context.checks.is_escaped(found) {
            context.escaped(block, &old)
        } else {
            let guard = if context.checks.guard { u128::from(A::compute(data)) << A::GUARD_SHIFT } else { 0 };
            let required = context.checks.tuple(block, guard);
            let mut new = context.tags(block, &old);
            if context.checks.matches(found, required) {
                new.guard = if A::KIND == B::KIND { old.guard } else { B::compute(data) };
            } else {
                bad += 1;
                on_mismatch(context.checks.mismatch(block, found, required));
                new = poisoned(context.to, new, B::compute(data));
            }
            new
        };
        new.guard &= B::GUARD_MASK;
        tuple::store(B::TUPLE_BYTES, tuple::pack(context.to, &new), new_bytes);
    }
    bad
}

/// A tuple that fails every check of the guard: its guard is wrong, and it is not escaped.
#[cold]
fn poisoned(format: PiFormat, tags: Tuple, right_guard: u64) -> Tuple {
    let poisoned = Tuple { guard: !right_guard, ..tags };
    if poisoned.is_escaped(format) { Tuple { app_tag: 0, ..poisoned } } else { poisoned }
}
