//! One outcome out of those of the legs.

use sealblock_block::{
    BadBlock, BadBlockCause, BadBlocks, BlockState, Checksum, Coverage, Error, ErrorKind, Outcome, Response,
    StatusRun as SpaceRun, Unchecked, VerifyStats,
};
use sealblock_integrity::{Field, PiFormat, Sealed, combine};
use sealblock_runtime_memory::Pool;
use sealblock_units::{BlockCount, BlockSize, Extent, Lba};

use crate::stripe_map::{ChunkRun, MemberPart, StripeMap};
use crate::tags::{scatter, to_stripe_tags};

/// What came of a request, of which all that is known is the plan.
pub(crate) struct Merger {
    pub(crate) plan: StripeMap,
    pub(crate) size: BlockSize,
    pub(crate) format: Option<PiFormat>,
    /// Where what spans several chunks is copied together.
    pub(crate) pool: Pool,
}

impl Merger {
    /// The first failure that is not about blocks, in the order of the legs' numbers on the way; then all damaged blocks of
    /// all legs, because a damaged block is damage and not a difference; then the first block that differs.
    pub(crate) fn failed(&self, errors: Vec<(usize, Error)>) -> Option<Error> {
        let (mut faults, mut coverage, mut differs) = (Vec::new(), Coverage::default(), None::<Lba>);
        for (leg, error) in errors {
            match error.kind() {
                ErrorKind::Integrity(found) => {
                    faults.extend(found.as_slice().iter().map(|fault| self.fault_up(leg, fault)));
                    coverage.merge(self.coverage_up(leg, found.coverage().clone()));
                }
                ErrorKind::Miscompare { lba } => {
                    let lba = self.plan.up(leg, *lba);
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
        let damaged = BadBlocks::new(faults).map(|faults| faults.covering(coverage).into());
        damaged.or_else(|| differs.map(|lba| ErrorKind::Miscompare { lba }.into()))
    }

    fn fault_up(&self, leg: usize, fault: &BadBlock) -> BadBlock {
        let lba = self.plan.up(leg, fault.lba);
        let gain = lba.get().wrapping_sub(fault.lba.get());
        let tag_up = |tag: Option<u64>| match self.format {
            Some(format) if fault.cause == BadBlockCause::Tag(Field::RefTag) => {
                tag.map(|tag| format.reference_tag(tag, gain))
            }
            _ => tag,
        };
        let (expected, actual) = (tag_up(fault.expected), tag_up(fault.actual));
        BadBlock { lba, expected, actual, member: fault.member.within(leg), ..*fault }
    }

    /// How far a leg's check went. A run there is told from its first block's address to its last one's; of what lies between,
    /// only what is on this leg is meant.
    fn coverage_up(&self, leg: usize, coverage: Coverage) -> Coverage {
        coverage.map(|run| Unchecked {
            first: self.plan.up(leg, run.first),
            last: self.plan.up(leg, run.last),
            leg: run.leg.within(leg),
            ..run
        })
    }

    /// The answer of a request that was one run, out of the leg's.
    pub(crate) fn answer(&self, run: &ChunkRun, answer: Response) -> Outcome {
        match answer {
            Response::Data(data) if self.is_of(&data, run.below) => Ok(Response::Data(to_stripe_tags(data, run))),
            Response::Data(_) | Response::Checksum(_) | Response::Reserved(_) => Err(answered_wrongly()),
            Response::BlockStatus(space) => Ok(Response::BlockStatus(self.space(vec![(run.leg, space)], &[*run])?)),
            Response::Verified(one) => {
                let coverage = self.coverage_up(run.leg, one.coverage);
                Ok(Response::Verified(VerifyStats { coverage, ..one }))
            }
            Response::Done => Ok(answer),
        }
    }

    /// Whether this can be the data of a leg's blocks.
    fn is_of(&self, data: &Sealed, below: Extent) -> bool {
        data.blocks() as u64 == below.len() && data.format() == self.format
    }

    /// The answer of a request for these blocks out of those of its parts, none of which failed.
    pub(crate) fn answers(&self, extent: Extent, answers: Vec<(MemberPart, Response)>) -> Outcome {
        let (mut data, mut verified, mut space) = (Vec::new(), None::<VerifyStats>, Vec::new());
        for (part, answer) in answers {
            match answer {
                Response::Done => {}
                Response::Data(sealed) => data.push((part, sealed)),
                Response::Verified(one) => {
                    let whole = verified.get_or_insert_default();
                    whole.bytes_transferred += one.bytes_transferred;
                    whole.coverage.merge(self.coverage_up(part.leg, one.coverage));
                }
                Response::BlockStatus(runs) => space.push((part.leg, runs)),
                Response::Checksum(_) | Response::Reserved(_) => return Err(answered_wrongly()),
            }
        }
        let runs = || self.plan.runs(extent).collect::<Vec<ChunkRun>>();
        Ok(match (data.is_empty(), verified, space.is_empty()) {
            (false, ..) => Response::Data(self.data(data, &runs())?),
            (_, Some(verified), _) => Response::Verified(verified),
            (.., false) => Response::BlockStatus(self.space(space, &runs())?),
            _ => Response::Done,
        })
    }

    fn data(&self, parts: Vec<(MemberPart, Sealed)>, runs: &[ChunkRun]) -> Result<Sealed, Error> {
        if parts.iter().any(|(part, data)| !self.is_of(data, part.below)) {
            return Err(answered_wrongly());
        }
        Ok(scatter(parts, runs, &self.pool))
    }

    /// Which blocks take space: the legs' runs dealt out chunk by chunk, and equal neighbours joined.
    fn space(&self, legs: Vec<(usize, Vec<SpaceRun>)>, runs: &[ChunkRun]) -> Result<Vec<SpaceRun>, Error> {
        let mut legs: Vec<_> = legs.into_iter().map(|(leg, runs)| (leg, RunCursor::new(runs))).collect();
        let mut whole: Vec<SpaceRun> = Vec::new();
        for run in runs {
            let deal = legs.iter_mut().find(|(leg, _)| *leg == run.leg);
            let (_, deal) = deal.ok_or_else(answered_wrongly)?;
            let mut left = run.below.len();
            while left > 0 {
                let (blocks, state) = deal.take(left).ok_or_else(answered_wrongly)?;
                left -= blocks;
                append(&mut whole, blocks, state);
            }
        }
        Ok(whole)
    }

    /// One digest out of those of the runs, in order.
    pub(crate) fn digests(&self, digests: Vec<(ChunkRun, Checksum)>) -> Checksum {
        digests.into_iter().fold(Checksum::default(), |mut whole, (run, one)| {
            whole.crc64 = combine::crc64(whole.crc64, one.crc64, run.below.bytes(self.size));
            whole.bytes_transferred += one.bytes_transferred;
            whole.coverage.merge(self.coverage_up(run.leg, one.coverage));
            whole
        })
    }
}

/// A leg's runs, of which blocks are taken from the front.
struct RunCursor(std::vec::IntoIter<SpaceRun>, Option<(u64, BlockState)>);

impl RunCursor {
    fn new(runs: Vec<SpaceRun>) -> RunCursor {
        RunCursor(runs.into_iter(), None)
    }

    /// At most `most` blocks that are alike; nothing when none are left.
    fn take(&mut self, most: u64) -> Option<(u64, BlockState)> {
        let (blocks, state) = match self.1.take() {
            Some(rest) => rest,
            None => self.0.next().map(|run| (u64::from(run.blocks.get()), run.state))?,
        };
        let taken = blocks.min(most);
        self.1 = (blocks > taken).then_some((blocks - taken, state));
        Some((taken, state))
    }
}

fn append(whole: &mut Vec<SpaceRun>, blocks: u64, state: BlockState) {
    let before = whole.last().filter(|last| last.state == state).map_or(0, |last| u64::from(last.blocks.get()));
    if before > 0 {
        whole.pop();
    }
    let blocks = u32::try_from(before + blocks).ok().and_then(BlockCount::new);
    whole.push(SpaceRun { blocks: blocks.expect("no more blocks than the request has"), state });
}

#[cold]
pub(crate) fn answered_wrongly() -> Error {
    ErrorKind::Media { reason: "a leg's answer does not belong to what it was asked".to_owned() }.into()
}
