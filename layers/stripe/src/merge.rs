//! Merges the outcomes of the members to one; splits and joins data and reference tags.
//!
//! Data is never copied: that of several chunks becomes a list of segments. Reference tags are shifted with the addresses, by
//! another delta in each run.

use sealblock_block::{
    BadBlock, BadBlockCause, BadBlocks, BlockState, Checksum, Coverage, Error, ErrorKind, Outcome, Response, StatusRun,
    Unchecked, VerifyStats,
};
use sealblock_integrity::{Field, PiFormat, Sealed, combine};
use sealblock_units::{BlockCount, BlockSize, Extent, Lba};

use crate::stripe_map::{ChunkRun, MemberPart, StripeMap};

/// Merges outcomes by the stripe map alone, without the request.
pub(crate) struct Merger {
    pub(crate) stripe_map: StripeMap,
    pub(crate) size: BlockSize,
    pub(crate) format: Option<PiFormat>,
}

impl Merger {
    /// Returns the first error that does not concern blocks, in the order of the members; then all bad blocks of all members, because
    /// a bad block is damage and not a difference; then the first block that differs.
    pub(crate) fn merged_error(&self, errors: Vec<(usize, Error)>) -> Option<Error> {
        let (mut bad_blocks, mut coverage, mut differs) = (Vec::new(), Coverage::default(), None::<Lba>);
        for (member, error) in errors {
            match error.kind() {
                ErrorKind::Integrity(found) => {
                    bad_blocks.extend(found.as_slice().iter().map(|bad_block| self.bad_block_up(member, bad_block)));
                    coverage.merge(self.coverage_up(member, found.coverage().clone()));
                }
                ErrorKind::Miscompare { lba } => {
                    let lba = self.stripe_map.up(member, *lba);
                    differs = Some(differs.map_or(lba, |first| first.min(lba)));
                }
                ErrorKind::Media { .. }
                | ErrorKind::NoSpace { .. }
                | ErrorKind::ReadOnly
                | ErrorKind::Range { .. }
                | ErrorKind::Limit { .. }
                | ErrorKind::Absent(_)
                | ErrorKind::Unreachable { .. } => return Some(error),
            }
        }
        let damaged = BadBlocks::new(bad_blocks).map(|bad_blocks| bad_blocks.with_coverage(coverage).into());
        damaged.or_else(|| differs.map(|lba| ErrorKind::Miscompare { lba }.into()))
    }

    fn bad_block_up(&self, member: usize, bad_block: &BadBlock) -> BadBlock {
        let lba = self.stripe_map.up(member, bad_block.lba);
        let delta = lba.get().wrapping_sub(bad_block.lba.get());
        let tag_up = |tag: Option<u64>| match self.format {
            Some(format) if bad_block.cause == BadBlockCause::Tag(Field::RefTag) => {
                tag.map(|tag| format.reference_tag(tag, delta))
            }
            _ => tag,
        };
        let (expected, actual) = (tag_up(bad_block.expected), tag_up(bad_block.actual));
        BadBlock { lba, expected, actual, member: bad_block.member.within(member), ..*bad_block }
    }

    /// Converts a member's coverage. An unchecked run goes from the address of its first block to that of its last; of the blocks
    /// between, it means only those on this member.
    fn coverage_up(&self, member: usize, coverage: Coverage) -> Coverage {
        coverage.map(|run| Unchecked {
            first: self.stripe_map.up(member, run.first),
            last: self.stripe_map.up(member, run.last),
            member: run.member.within(member),
            ..run
        })
    }

    /// Converts the member's response to a request of one run.
    pub(crate) fn response(&self, run: &ChunkRun, response: Response) -> Outcome {
        match response {
            Response::Data(data) if self.is_of(&data, run.below) => Ok(Response::Data(to_stripe_tags(data, run))),
            Response::Data(_) | Response::Checksum(_) | Response::Reserved(_) => Err(unexpected_response()),
            Response::BlockStatus(status) => {
                Ok(Response::BlockStatus(self.status(vec![(run.member, status)], &[*run])?))
            }
            Response::Verified(one) => {
                let coverage = self.coverage_up(run.member, one.coverage);
                Ok(Response::Verified(VerifyStats { coverage, ..one }))
            }
            Response::Done => Ok(response),
        }
    }

    /// True if this can be the data of a member's blocks.
    fn is_of(&self, data: &Sealed, below: Extent) -> bool {
        data.blocks() as u64 == below.len() && data.format() == self.format
    }

    /// Merges the responses of all parts of a request for these blocks, none of which failed.
    pub(crate) fn responses(&self, extent: Extent, responses: Vec<(MemberPart, Response)>) -> Outcome {
        let (mut data, mut verified, mut status) = (Vec::new(), None::<VerifyStats>, Vec::new());
        for (part, response) in responses {
            match response {
                Response::Done => {}
                Response::Data(sealed) => data.push((part, sealed)),
                Response::Verified(one) => {
                    let whole = verified.get_or_insert_default();
                    whole.bytes_transferred += one.bytes_transferred;
                    whole.coverage.merge(self.coverage_up(part.member, one.coverage));
                }
                Response::BlockStatus(runs) => status.push((part.member, runs)),
                Response::Checksum(_) | Response::Reserved(_) => return Err(unexpected_response()),
            }
        }
        let runs = || self.stripe_map.runs(extent).collect::<Vec<ChunkRun>>();
        Ok(match (data.is_empty(), verified, status.is_empty()) {
            (false, ..) => Response::Data(self.data(data, &runs())?),
            (_, Some(verified), _) => Response::Verified(verified),
            (.., false) => Response::BlockStatus(self.status(status, &runs())?),
            _ => Response::Done,
        })
    }

    fn data(&self, parts: Vec<(MemberPart, Sealed)>, runs: &[ChunkRun]) -> Result<Sealed, Error> {
        if parts.iter().any(|(part, data)| !self.is_of(data, part.below)) {
            return Err(unexpected_response());
        }
        Ok(scatter(parts, runs))
    }

    /// Merges the members' status runs chunk by chunk, and joins equal neighbours.
    fn status(&self, members: Vec<(usize, Vec<StatusRun>)>, runs: &[ChunkRun]) -> Result<Vec<StatusRun>, Error> {
        let mut members: Vec<_> = members.into_iter().map(|(member, runs)| (member, RunCursor::new(runs))).collect();
        let mut whole: Vec<StatusRun> = Vec::new();
        for run in runs {
            let cursor = members.iter_mut().find(|(member, _)| *member == run.member);
            let (_, cursor) = cursor.ok_or_else(unexpected_response)?;
            let mut left = run.below.len();
            while left > 0 {
                let (blocks, state) = cursor.take(left).ok_or_else(unexpected_response)?;
                left -= blocks;
                append(&mut whole, blocks, state);
            }
        }
        Ok(whole)
    }

    /// Combines the checksums of the runs, in order, to one.
    pub(crate) fn checksums(&self, checksums: Vec<(ChunkRun, Checksum)>) -> Checksum {
        checksums.into_iter().fold(Checksum::default(), |mut whole, (run, one)| {
            whole.crc64 = combine::crc64(whole.crc64, one.crc64, run.below.bytes(self.size));
            whole.bytes_transferred += one.bytes_transferred;
            whole.coverage.merge(self.coverage_up(run.member, one.coverage));
            whole
        })
    }
}

/// A cursor over a member's status runs.
struct RunCursor(std::vec::IntoIter<StatusRun>, Option<(u64, BlockState)>);

impl RunCursor {
    fn new(runs: Vec<StatusRun>) -> RunCursor {
        RunCursor(runs.into_iter(), None)
    }

    /// Takes up to `max_blocks` blocks of equal state; `None` when none are left.
    fn take(&mut self, max_blocks: u64) -> Option<(u64, BlockState)> {
        let (blocks, state) = match self.1.take() {
            Some(rest) => rest,
            None => self.0.next().map(|run| (u64::from(run.blocks.get()), run.state))?,
        };
        let taken = blocks.min(max_blocks);
        self.1 = (blocks > taken).then_some((blocks - taken, state));
        Some((taken, state))
    }
}

fn append(whole: &mut Vec<StatusRun>, blocks: u64, state: BlockState) {
    let before = whole.last().filter(|last| last.state == state).map_or(0, |last| u64::from(last.blocks.get()));
    if before > 0 {
        whole.pop();
    }
    let blocks = u32::try_from(before + blocks).ok().and_then(BlockCount::new);
    whole.push(StatusRun { blocks: blocks.expect("no more blocks than the request has"), state });
}

#[cold]
pub(crate) fn unexpected_response() -> Error {
    ErrorKind::Media { reason: "a member's response does not belong to its request".to_owned() }.into()
}

/// Returns the data of one member's part of a request, with the member's reference tags. `runs` are all runs of the request.
pub(crate) fn gather(data: &Sealed, runs: &[ChunkRun], member: usize, format: Option<PiFormat>) -> Sealed {
    let own_runs = || runs.iter().filter(|run| run.member == member);
    let piece = |run: &ChunkRun| data.slice(run.first, run.below.len() as usize);
    let pieces = match runs {
        [run] => piece(run),
        _ => Sealed::join(own_runs().map(piece)),
    };
    // Data to compare may have tags of no or another format; a Compare ignores tags.
    if data.format() != format {
        pieces
    } else {
        pieces.with_ref_tags_shifted(each(own_runs().map(|run| (run.below.len(), run.ref_tag_delta()))))
    }
}

/// Joins the data of all parts of a request, with the stripe's reference tags.
pub(crate) fn scatter(parts: Vec<(MemberPart, Sealed)>, runs: &[ChunkRun]) -> Sealed {
    let piece = |run: &ChunkRun| {
        let (part, data) = parts.iter().find(|(part, _)| part.member == run.member).expect("each run is of a part");
        let first = run.below.start().get() - part.below.start().get();
        data.slice(first as usize, run.below.len() as usize)
    };
    Sealed::join(runs.iter().map(piece))
        .with_ref_tags_shifted(each(runs.iter().map(|run| (run.below.len(), run.ref_tag_delta().wrapping_neg()))))
}

/// Returns the data of a run with the stripe's reference tags.
pub(crate) fn to_stripe_tags(data: Sealed, run: &ChunkRun) -> Sealed {
    data.with_ref_tags_shifted(std::iter::repeat_n(run.ref_tag_delta().wrapping_neg(), run.below.len() as usize))
}

/// Returns the reference tag delta of each block, from the length and delta of each run.
fn each(runs: impl Iterator<Item = (u64, u64)> + Clone) -> impl Iterator<Item = u64> + Clone {
    runs.flat_map(|(blocks, delta)| std::iter::repeat_n(delta, blocks as usize))
}
