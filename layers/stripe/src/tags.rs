//! Data and tags on their way to the legs and back.
//!
//! Only what spans several chunks is copied, once: a leg takes and gives its blocks in one piece, and they are not in one
//! piece above. Reference tags move with the addresses, by another amount in each run.

use sealblock_integrity::{PiFormat, Sealed, Tuple, Unverified};
use sealblock_runtime_memory::Buffer;

use sealblock_integrity::Checks;

use crate::plan::{Part, Run};

/// The data of one leg's part out of those of the request, with tags as the leg has them. `runs` are all of the request.
pub(crate) fn gather(data: &Sealed, runs: &[Run], leg: usize, format: Option<PiFormat>) -> Sealed {
    let own = || runs.iter().filter(|run| run.leg == leg);
    let pieces: Vec<Sealed> = own().map(|run| data.slice(run.first, run.below.len() as usize)).collect();
    // Compared data may have tags of no or another format, which nobody compares.
    let format = format.filter(|format| data.format() == Some(*format));
    shifted(Sealed::join(&pieces), own().map(|run| (run.below.len(), run.gain())), format)
}

/// The data of a request out of those of its parts, with tags as they are above.
pub(crate) fn scatter(parts: Vec<(Part, Sealed)>, runs: &[Run], format: Option<PiFormat>) -> Sealed {
    let piece = |run: &Run| {
        let (part, data) = parts.iter().find(|(part, _)| part.leg == run.leg).expect("each run is of a part");
        let first = run.below.start().get() - part.below.start().get();
        data.slice(first as usize, run.below.len() as usize)
    };
    let pieces: Vec<Sealed> = runs.iter().map(piece).collect();
    drop(parts);
    shifted(Sealed::join(&pieces), runs.iter().map(|run| (run.below.len(), run.gain().wrapping_neg())), format)
}

/// The same blocks with, run by run, something added to each reference tag, modulo its width. Tuples that switch checking
/// off stay. `runs` are lengths and what to add.
fn shifted(data: Sealed, runs: impl Iterator<Item = (u64, u64)>, format: Option<PiFormat>) -> Sealed {
    let Some(format) = format.filter(|format| format.protection().counts_blocks()) else { return data };
    let runs: Vec<(u64, u64)> = runs.collect();
    if runs.iter().all(|(_, by)| *by == 0) {
        return data;
    }
    let mut tags = Buffer::copy_from(data.tags());
    let gains = runs.iter().flat_map(|(blocks, by)| std::iter::repeat_n(*by, *blocks as usize));
    for (bytes, by) in tags.chunks_exact_mut(format.tuple_bytes()).zip(gains) {
        let tuple = Tuple::read(format, bytes);
        if !tuple.is_escaped(format) {
            Tuple { ref_tag: format.reference_tag(tuple.ref_tag, by), ..tuple }.write(format, bytes);
        }
    }
    let (data, size) = (data.data().clone(), data.size());
    let whole = Unverified::new(data, tags.freeze(), size, Some(format)).expect("as many tuples as before");
    // What was checked of them is as true as before.
    whole.verify(&Checks::NONE).expect("nothing is asked to be checked")
}
