//! Changes that reach the medium in part, by whole sectors.

use std::ops::Range;

use crate::image::Piece;

/// The maximum number of times that a torn change alternates between kept and lost sectors.
const MAX_CUTS: usize = 32;

/// True if the change has at least two sectors, so that a part of it can be lost.
pub(crate) fn can_tear(pieces: &[Piece], sector_bytes: u64) -> bool {
    sectors(pieces, sector_bytes) > 1
}

/// Some sectors of a change, but not all: a start, an end, all but one, one, or alternating runs. A change that cannot
/// be torn stays whole. All offsets and lengths are multiples of `sector_bytes`.
pub(crate) fn torn(pieces: &[Piece], sector_bytes: u64, rng: &mut fastrand::Rng) -> Vec<Piece> {
    if !can_tear(pieces, sector_bytes) {
        return pieces.to_vec();
    }
    let kept = kept_runs(sectors(pieces, sector_bytes), rng);
    let (mut first, mut parts) = (0, Vec::new());
    for piece in pieces {
        let of_piece = first..first + piece.len / sector_bytes;
        for run in &kept {
            let (start, end) = (run.start.max(of_piece.start), run.end.min(of_piece.end));
            if start < end {
                parts.push(piece.part((start - first) * sector_bytes..(end - first) * sector_bytes));
            }
        }
        first = of_piece.end;
    }
    parts
}

fn sectors(pieces: &[Piece], sector_bytes: u64) -> u64 {
    pieces.iter().map(|piece| piece.len / sector_bytes).sum()
}

/// Runs of `sectors` sectors that survive: at least one sector, and not all.
fn kept_runs(sectors: u64, rng: &mut fastrand::Rng) -> Vec<Range<u64>> {
    let (cut, one) = (rng.u64(1..sectors), rng.u64(..sectors));
    // The starts and ends of runs, in turn.
    let edges = match rng.u8(..5) {
        0 => vec![0, cut],
        1 => vec![cut, sectors],
        2 => vec![0, one, one + 1, sectors],
        3 => vec![one, one + 1],
        _ => {
            let mut cuts: Vec<u64> = (0..rng.usize(1..=MAX_CUTS)).map(|_| rng.u64(1..sectors)).collect();
            cuts.sort_unstable();
            cuts.dedup();
            [0].into_iter().chain(cuts).chain([sectors]).skip(rng.usize(..2)).collect()
        }
    };
    edges.chunks_exact(2).map(|edges| edges[0]..edges[1]).filter(|run| !run.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::Content;
    use sealblock_runtime_memory::Slice;

    #[test]
    fn a_torn_change_keeps_some_of_its_sectors_where_they_belong() {
        let bytes: Vec<u8> = (0..8u8).flat_map(|sector| [sector; 512]).collect();
        let pieces = [
            Piece { offset: 4096, len: 4096, content: Content::Bytes(Slice::copy_from(&bytes)) },
            Piece { offset: 0, len: 1024, content: Content::Zeroes },
        ];
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..500 {
            let mut kept = Vec::new();
            for part in torn(&pieces, 512, &mut fastrand::Rng::with_seed(seed)) {
                for at in (0..part.len).step_by(512) {
                    if let Content::Bytes(bytes) = &part.content {
                        assert_eq!(u64::from(bytes[at as usize]), (part.offset + at - 4096) / 512);
                    }
                    kept.push((part.offset + at) / 512);
                }
            }
            assert!(kept.iter().all(|sector| [0..2, 8..16].iter().any(|range| range.contains(sector))));
            let count = kept.len();
            kept.sort_unstable();
            kept.dedup();
            assert!(count == kept.len() && (1..10).contains(&count), "{kept:?}");
            seen.insert(kept);
        }
        assert!(seen.len() > 50, "{} different tears", seen.len());
    }

    #[test]
    fn one_sector_is_whole_or_not_there() {
        let pieces = [Piece { offset: 0, len: 512, content: Content::Garbage }];
        assert!(!can_tear(&pieces, 512) && !can_tear(&[], 512));
        assert_eq!(torn(&pieces, 512, &mut fastrand::Rng::with_seed(1))[0].range(), 0..512);
    }
}
