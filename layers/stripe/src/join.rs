//! One outcome out of those of the legs.

use sealblock_block::{
    Answer, Coverage, Digested, Error, Failure, Fault, FaultField, Faults, Outcome, Run as SpaceRun, RunState,
    Unchecked, Verified,
};
use sealblock_integrity::{Field, PiFormat, Sealed, combine};
use sealblock_runtime_memory::Pool;
use sealblock_units::{BlockCount, BlockSize, Extent, Lba};

use crate::plan::{Part, Plan, Run};
use crate::tags::{lift, scatter};

/// What came of a request, of which all that is known is the plan.
pub(crate) struct Join {
    pub(crate) plan: Plan,
    pub(crate) size: BlockSize,
    pub(crate) format: Option<PiFormat>,
    /// Where what spans several chunks is copied together.
    pub(crate) pool: Pool,
}

impl Join {
    /// The first failure that is not about blocks, in the order of the legs' numbers on the way; then all damaged blocks of
    /// all legs, because a damaged block is damage and not a difference; then the first block that differs.
    pub(crate) fn failed(&self, errors: Vec<(usize, Error)>) -> Option<Error> {
        let (mut faults, mut coverage, mut differs) = (Vec::new(), Coverage::default(), None::<Lba>);
        for (leg, error) in errors {
            match error.failure() {
                Failure::Integrity(found) => {
                    faults.extend(found.as_slice().iter().map(|fault| self.fault_up(leg, fault)));
                    coverage.merge(self.coverage_up(leg, found.coverage().clone()));
                }
                Failure::Miscompare { lba } => {
                    let lba = self.plan.up(leg, *lba);
                    differs = Some(differs.map_or(lba, |first| first.min(lba)));
                }
                Failure::Media { .. }
                | Failure::NoSpace { .. }
                | Failure::ReadOnly
                | Failure::Range { .. }
                | Failure::Limit { .. }
                | Failure::Absent(_)
                | Failure::Unreachable { .. } => return Some(error),
            }
        }
        let damaged = Faults::new(faults).map(|faults| faults.covering(coverage).into());
        damaged.or_else(|| differs.map(|lba| Failure::Miscompare { lba }.into()))
    }

    fn fault_up(&self, leg: usize, fault: &Fault) -> Fault {
        let lba = self.plan.up(leg, fault.lba);
        let gain = lba.get().wrapping_sub(fault.lba.get());
        let tag_up = |tag: Option<u64>| match self.format {
            Some(format) if fault.field == FaultField::Tag(Field::RefTag) => {
                tag.map(|tag| format.reference_tag(tag, gain))
            }
            _ => tag,
        };
        let (expected, actual) = (tag_up(fault.expected), tag_up(fault.actual));
        Fault { lba, expected, actual, leg: fault.leg.within(leg), ..*fault }
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
    pub(crate) fn answer(&self, run: &Run, answer: Answer) -> Outcome {
        match answer {
            Answer::Data(data) if self.is_of(&data, run.below) => Ok(Answer::Data(lift(data, run))),
            Answer::Data(_) | Answer::Digest(_) | Answer::Annex(_) => Err(answered_wrongly()),
            Answer::Allocation(space) => Ok(Answer::Allocation(self.space(vec![(run.leg, space)], &[*run])?)),
            Answer::Verified(one) => {
                let coverage = self.coverage_up(run.leg, one.coverage);
                Ok(Answer::Verified(Verified { coverage, ..one }))
            }
            Answer::Done => Ok(answer),
        }
    }

    /// Whether this can be the data of a leg's blocks.
    fn is_of(&self, data: &Sealed, below: Extent) -> bool {
        data.blocks() as u64 == below.len() && data.format() == self.format
    }

    /// The answer of a request for these blocks out of those of its parts, none of which failed.
    pub(crate) fn answers(&self, extent: Extent, answers: Vec<(Part, Answer)>) -> Outcome {
        let (mut data, mut verified, mut space) = (Vec::new(), None::<Verified>, Vec::new());
        for (part, answer) in answers {
            match answer {
                Answer::Done => {}
                Answer::Data(sealed) => data.push((part, sealed)),
                Answer::Verified(one) => {
                    let whole = verified.get_or_insert_default();
                    whole.bytes_transferred += one.bytes_transferred;
                    whole.coverage.merge(self.coverage_up(part.leg, one.coverage));
                }
                Answer::Allocation(runs) => space.push((part.leg, runs)),
                Answer::Digest(_) | Answer::Annex(_) => return Err(answered_wrongly()),
            }
        }
        let runs = || self.plan.runs(extent).collect::<Vec<Run>>();
        Ok(match (data.is_empty(), verified, space.is_empty()) {
            (false, ..) => Answer::Data(self.data(data, &runs())?),
            (_, Some(verified), _) => Answer::Verified(verified),
            (.., false) => Answer::Allocation(self.space(space, &runs())?),
            _ => Answer::Done,
        })
    }

    fn data(&self, parts: Vec<(Part, Sealed)>, runs: &[Run]) -> Result<Sealed, Error> {
        if parts.iter().any(|(part, data)| !self.is_of(data, part.below)) {
            return Err(answered_wrongly());
        }
        Ok(scatter(parts, runs, &self.pool))
    }

    /// Which blocks take space: the legs' runs dealt out chunk by chunk, and equal neighbours joined.
    fn space(&self, legs: Vec<(usize, Vec<SpaceRun>)>, runs: &[Run]) -> Result<Vec<SpaceRun>, Error> {
        let mut legs: Vec<_> = legs.into_iter().map(|(leg, runs)| (leg, Deal::new(runs))).collect();
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
    pub(crate) fn digests(&self, digests: Vec<(Run, Digested)>) -> Digested {
        digests.into_iter().fold(Digested::default(), |mut whole, (run, one)| {
            whole.crc64 = combine::crc64(whole.crc64, one.crc64, run.below.bytes(self.size));
            whole.bytes_transferred += one.bytes_transferred;
            whole.coverage.merge(self.coverage_up(run.leg, one.coverage));
            whole
        })
    }
}

/// A leg's runs, of which blocks are taken from the front.
struct Deal(std::vec::IntoIter<SpaceRun>, Option<(u64, RunState)>);

impl Deal {
    fn new(runs: Vec<SpaceRun>) -> Deal {
        Deal(runs.into_iter(), None)
    }

    /// At most `most` blocks that are alike; nothing when none are left.
    fn take(&mut self, most: u64) -> Option<(u64, RunState)> {
        let (blocks, state) = match self.1.take() {
            Some(rest) => rest,
            None => self.0.next().map(|run| (u64::from(run.blocks.get()), run.state))?,
        };
        let taken = blocks.min(most);
        self.1 = (blocks > taken).then_some((blocks - taken, state));
        Some((taken, state))
    }
}

fn append(whole: &mut Vec<SpaceRun>, blocks: u64, state: RunState) {
    let before = whole.last().filter(|last| last.state == state).map_or(0, |last| u64::from(last.blocks.get()));
    if before > 0 {
        whole.pop();
    }
    let blocks = u32::try_from(before + blocks).ok().and_then(BlockCount::new);
    whole.push(SpaceRun { blocks: blocks.expect("no more blocks than the request has"), state });
}

#[cold]
pub(crate) fn answered_wrongly() -> Error {
    Failure::Media { reason: "a leg's answer does not belong to what it was asked".to_owned() }.into()
}
