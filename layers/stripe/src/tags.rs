//! Data and tags on their way to the legs and back.
//!
//! Only what spans several chunks is copied, once: a leg takes and gives its blocks in one piece, and they are not in one
//! piece above. It is copied into memory that was used for that before, because fresh pages cost several times the copy.
//! Reference tags move with the addresses, by another amount in each run.

use sealblock_integrity::{PiFormat, Sealed};
use sealblock_runtime_memory::Pool;

use crate::stripe_map::{ChunkRun, MemberPart};

/// The data of one leg's part out of those of the request, with tags as the leg has them. `runs` are all of the request.
pub(crate) fn gather(data: &Sealed, runs: &[ChunkRun], leg: usize, format: Option<PiFormat>, pool: &Pool) -> Sealed {
    let own = || runs.iter().filter(|run| run.leg == leg);
    let piece = |run: &ChunkRun| data.slice(run.first, run.below.len() as usize);
    let pieces = match runs {
        [run] => piece(run),
        _ => Sealed::join_in(&own().map(piece).collect::<Vec<_>>(), |len| pool.take(len)),
    };
    // Compared data may have tags of no or another format, which nobody compares.
    if data.format() != format {
        pieces
    } else {
        pieces.with_ref_tags_shifted(each(own().map(|run| (run.below.len(), run.ref_tag_delta()))))
    }
}

/// The data of a request out of those of its parts, with tags as they are above.
pub(crate) fn scatter(parts: Vec<(MemberPart, Sealed)>, runs: &[ChunkRun], pool: &Pool) -> Sealed {
    let piece = |run: &ChunkRun| {
        let (part, data) = parts.iter().find(|(part, _)| part.leg == run.leg).expect("each run is of a part");
        let first = run.below.start().get() - part.below.start().get();
        data.slice(first as usize, run.below.len() as usize)
    };
    let pieces: Vec<Sealed> = runs.iter().map(piece).collect();
    drop(parts);
    Sealed::join_in(&pieces, |len| pool.take(len))
        .with_ref_tags_shifted(each(runs.iter().map(|run| (run.below.len(), run.ref_tag_delta().wrapping_neg()))))
}

/// The data of a run, with tags as they are above.
pub(crate) fn to_stripe_tags(data: Sealed, run: &ChunkRun) -> Sealed {
    data.with_ref_tags_shifted(std::iter::repeat_n(run.ref_tag_delta().wrapping_neg(), run.below.len() as usize))
}

/// What each block's reference tag gains, out of the lengths of runs and what it gains in them.
fn each(runs: impl Iterator<Item = (u64, u64)> + Clone) -> impl Iterator<Item = u64> + Clone {
    runs.flat_map(|(blocks, gain)| std::iter::repeat_n(gain, blocks as usize))
}
