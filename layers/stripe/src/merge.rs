//! Merges the outcomes of the members to one; splits and joins data and reference tags.
//!
//! Data are never copied: those of several chunks become a list of segments. Reference tags are shifted with the
//! addresses, by a different amount in each run.

use sealblock_block::{
    BadBlock, BadBlockCause, BadBlocks, BlockState, Checksum, Coverage, Error, ErrorKind, MemberPath, Outcome,
    Response, StatusRun, Unchecked, VerifyStats, WriteData,
};
use sealblock_integrity::{ChecksumKind, Field, PiFormat, Sealed};
use sealblock_units::{BlockCount, BlockSize, Extent, Lba};
use smallvec::SmallVec;

use crate::stripe_map::{ChunkRun, MemberPart, StripeMap};

/// What members return for their parts of a request.
pub(crate) type MemberResponses<T> = SmallVec<[(MemberPart, T); 4]>;

/// Merges outcomes by the stripe map alone, without the request.
pub(crate) struct Merger {
    pub(crate) stripe_map: StripeMap,
    pub(crate) size: BlockSize,
    pub(crate) format: Option<PiFormat>,
    /// Bad blocks and unchecked runs have the members that they are on.
    pub(crate) names_members: bool,
}

impl Merger {
    /// Fails with the first error that is not about blocks, in the order of the members; then with all bad blocks of
    /// all members, because a bad block is damage and not a difference; then with the first block that is not as
    /// expected, or that differs.
    pub(crate) fn merge_errors(&self, errors: impl Iterator<Item = (usize, Error)>) -> Result<(), Error> {
        let (mut bad_blocks, mut coverage) = (Vec::new(), Coverage::default());
        let mut differs: Option<(Lba, ErrorKind)> = None;
        for (member, error) in errors {
            match error.kind() {
                ErrorKind::Integrity(found) => {
                    bad_blocks.extend(found.as_slice().iter().map(|bad_block| self.bad_block_up(member, bad_block)));
                    coverage.merge(self.coverage_up(member, found.coverage().clone()));
                }
                kind @ (ErrorKind::Expectation { lba, .. } | ErrorKind::Miscompare { lba }) => {
                    let lba = self.stripe_map.up(member, *lba);
                    if differs.as_ref().is_none_or(|(first, _)| lba < *first) {
                        differs = Some((lba, kind.clone()));
                    }
                }
                ErrorKind::Media { .. }
                | ErrorKind::NoSpace { .. }
                | ErrorKind::ReadOnly
                | ErrorKind::Range { .. }
                | ErrorKind::Limit { .. }
                | ErrorKind::Absent(_)
                | ErrorKind::MayBeOlder(_)
                | ErrorKind::Unreachable { .. } => return Err(error),
            }
        }
        match (BadBlocks::new(bad_blocks), differs) {
            (Some(bad_blocks), _) => Err(bad_blocks.with_coverage(coverage).into()),
            (None, Some((lba, ErrorKind::Miscompare { .. }))) => Err(ErrorKind::Miscompare { lba }.into()),
            (None, Some((lba, unexpected))) => Err(unexpected.expectation_at(lba, self.format).into()),
            (None, None) => Ok(()),
        }
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
        BadBlock { lba, expected, actual, member: self.member_path(bad_block.member, member), ..*bad_block }
    }

    fn member_path(&self, below: MemberPath, member: usize) -> MemberPath {
        if self.names_members { below.within(member) } else { below }
    }

    /// Converts a member's coverage. An unchecked run extends from the address of its first block to that of its last;
    /// of the blocks in between, it means only those on this member.
    fn coverage_up(&self, member: usize, coverage: Coverage) -> Coverage {
        coverage.map(|run| Unchecked {
            first: self.stripe_map.up(member, run.first),
            last: self.stripe_map.up(member, run.last),
            member: self.member_path(run.member, member),
            ..run
        })
    }

    /// Converts the member's outcome of a request of one run.
    pub(crate) fn outcome(&self, run: &ChunkRun, outcome: Outcome) -> Outcome {
        match outcome {
            Ok(Response::Done) => outcome,
            Ok(Response::Data(data)) if self.is_of(&data, run.below) => {
                let deltas = std::iter::repeat(run.ref_tag_delta().wrapping_neg());
                Ok(Response::Data(data.with_ref_tags_shifted(deltas)))
            }
            Ok(Response::Data(_) | Response::Salvaged(_) | Response::Checksum(_) | Response::Reserved(_)) => {
                Err(unexpected_response())
            }
            Ok(Response::BlockStatus(status)) => {
                let extent = Extent::new(run.stripe_lba, run.below.blocks()).expect("the run is of the stripe");
                Ok(Response::BlockStatus(self.status(vec![(run.member, status)], extent)?))
            }
            Ok(Response::Verified(one)) => {
                let coverage = self.coverage_up(run.member, one.coverage);
                Ok(Response::Verified(VerifyStats { coverage, ..one }))
            }
            Err(error) => self.merge_errors(std::iter::once((run.member, error))).map(|()| Response::Done),
        }
    }

    /// True if this can be the data of these blocks of a member.
    fn is_of(&self, data: &Sealed, below: Extent) -> bool {
        data.blocks() as u64 == below.len() && data.format() == self.format
    }

    /// Merges the responses of all parts of a request for these blocks. None of them failed.
    pub(crate) fn responses(&self, extent: Extent, responses: MemberResponses<Response>) -> Outcome {
        let (mut data, mut verified, mut status) = (MemberResponses::new(), None::<VerifyStats>, Vec::new());
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
                Response::Salvaged(_) | Response::Checksum(_) | Response::Reserved(_) => {
                    return Err(unexpected_response());
                }
            }
        }
        Ok(match (data.is_empty(), verified, status.is_empty()) {
            (false, ..) => Response::Data(self.scatter(data, extent)?),
            (_, Some(verified), _) => Response::Verified(verified),
            (.., false) => Response::BlockStatus(self.status(status, extent)?),
            _ => Response::Done,
        })
    }

    /// Data of a run, with the member's reference tags. Data to compare may have tags of another format or none; a
    /// Compare ignores tags.
    pub(crate) fn to_member_tags(&self, data: WriteData, run: &ChunkRun) -> WriteData {
        if data.format() == self.format { data.with_ref_tags_shifted(run.ref_tag_delta()) } else { data }
    }

    /// Returns one member's part of a request's data, with the member's reference tags.
    pub(crate) fn gather(&self, data: &Sealed, extent: Extent, member: usize) -> Sealed {
        let own_runs = self.stripe_map.runs(extent).filter(|run| run.member == member);
        let joined = Sealed::join(own_runs.clone().map(|run| data.slice(run.first, run.below.len() as usize)));
        if data.format() == self.format {
            joined.with_ref_tags_shifted(each(own_runs.map(|run| (run.below.len(), run.ref_tag_delta()))))
        } else {
            joined
        }
    }

    /// Joins the data of all parts of a request, with the stripe's reference tags.
    fn scatter(&self, parts: MemberResponses<Sealed>, extent: Extent) -> Result<Sealed, Error> {
        if parts.iter().any(|(part, data)| !self.is_of(data, part.below)) {
            return Err(unexpected_response());
        }
        let runs = self.stripe_map.runs(extent);
        let piece = |run: ChunkRun| {
            let (part, data) = parts.iter().find(|(part, _)| part.member == run.member)?;
            let first = run.below.start().get() - part.below.start().get();
            Some(data.slice(first as usize, run.below.len() as usize))
        };
        let pieces: Option<SmallVec<[Sealed; 16]>> = runs.clone().map(piece).collect();
        Ok(Sealed::join(pieces.ok_or_else(unexpected_response)?)
            .with_ref_tags_shifted(each(runs.map(|run| (run.below.len(), run.ref_tag_delta().wrapping_neg())))))
    }

    /// Merges the members' status runs chunk by chunk, and joins equal neighbours.
    fn status(&self, members: Vec<(usize, Vec<StatusRun>)>, extent: Extent) -> Result<Vec<StatusRun>, Error> {
        let mut members: Vec<_> = members.into_iter().map(|(member, runs)| (member, RunCursor::new(runs))).collect();
        let mut whole: Vec<StatusRun> = Vec::new();
        for run in self.stripe_map.runs(extent) {
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

    /// Combines the checksums of the runs, in order.
    pub(crate) fn checksums(&self, kind: ChecksumKind, checksums: Vec<(ChunkRun, Checksum)>) -> Checksum {
        let empty = Checksum { kind, ..Checksum::default() };
        checksums.into_iter().fold(empty, |mut whole, (run, one)| {
            whole.value = kind.combine(whole.value, one.value, run.below.bytes(self.size));
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

    /// Takes up to `max_blocks` blocks of equal state; `None` if there are none left.
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

/// Returns the reference tag delta of each block, from the length and delta of each run.
fn each(runs: impl Iterator<Item = (u64, u64)> + Clone) -> impl Iterator<Item = u64> + Clone {
    runs.flat_map(|(blocks, delta)| std::iter::repeat_n(delta, blocks as usize))
}
