//! One device whose blocks go round several others, chunk by chunk.
//!
//! Invariants: each block lies on one leg; a request asks each leg at most once (a Digest, and a write of large chunks, once
//! for each chunk), all legs side by side, and is answered when all have; every address that comes back, in faults,
//! miscompares and reference tags, is one of this device's own.
//!
//! Reference tags move with the addresses, so that the stripe and each of its legs verify as whole devices, each by its own
//! addresses. It is plain arithmetic on each tuple, so a wrong tag stays exactly as wrong as it was. It is done for Type 2
//! as well, whose tags are the command's choice: what is written with any tag is read with the same one. Type 3 never counts
//! and stays. Demands on the way down need one number for a leg, because both the demand and the leg's addresses count on
//! by one across chunks that are neighbours there.
//!
//! Its legs in another order, or chunks of another size, are another device, which reads wrong data and verifies clean. So the
//! legs have labels (`label`), and `members` checks them against what was asked for before anything is read or written.

pub mod label;
mod members;
mod merge;
mod stripe_map;
mod tags;

use std::cell::RefCell;

use futures_util::future::join_all;
use futures_util::stream::{self, StreamExt};
use sealblock_block::{
    Abilities, Device, Durability, Error, Geometry, Limits, Outcome, Request, ReservedArea, Response,
};
use sealblock_integrity::{Checks, PiFormat, Sealed};
use sealblock_runtime_memory::{Pool, Slice};
use sealblock_units::{BlockCount, BlockSize, ByteCount, Extent};

use label::Label;
use members::Assembly;
pub use members::Refusal;
use merge::{Merger, answered_wrongly};
use stripe_map::{ChunkRun, MemberPart, StripeMap};
use tags::gather;

/// The size of chunks unless told: 64 KiB.
pub const CHUNK: ByteCount = ByteCount::new(64 << 10);

/// Chunks of one Digest that are summed at once. Enough to keep legs busy.
const DIGESTS_IN_FLIGHT: usize = 16;

/// From this size of chunks on, writes go chunk by chunk: a further request costs a leg less than copying that many bytes.
const WRITTEN_ALONE: ByteCount = ByteCount::new(32 << 10);

/// Why devices cannot be striped.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StripeError {
    /// There is none.
    #[error("a stripe has at least one leg")]
    NoLeg,
    /// Blocks of different sizes.
    #[error("leg {leg} has blocks of {actual} bytes, the first leg has blocks of {first}")]
    BlockSize {
        /// Which leg, from 0.
        leg: usize,
        /// Its block size.
        actual: BlockSize,
        /// That of the first leg.
        first: BlockSize,
    },
    /// Protection information of different formats.
    #[error("leg {leg} and the first leg have protection information of different formats")]
    Protection {
        /// Which leg, from 0.
        leg: usize,
    },
    /// Chunks that are no power of two of blocks.
    #[error("chunks of {} bytes are no power of two of blocks of {size} bytes", chunk.get())]
    Chunk {
        /// The size of a chunk.
        chunk: ByteCount,
        /// The size of a block.
        size: BlockSize,
    },
    /// A leg without room for a chunk.
    #[error("leg {leg} is smaller than a chunk")]
    Small {
        /// Which leg, from 0.
        leg: usize,
    },
    /// More blocks than have addresses.
    #[error("the legs together have more blocks than can be addressed")]
    Large,
}

/// The legs as one device. See the crate's header.
pub struct StripeLayer<D> {
    legs: Vec<D>,
    join: Merger,
    geometry: Geometry,
    /// The first leg's label, where the legs have labels.
    label: Option<RefCell<Label>>,
}

impl<D: Device> StripeLayer<D> {
    /// The legs, in this order, as a device of chunks of this size. Legs are behind their gates. Each gives as many whole chunks as
    /// the smallest has.
    ///
    /// # Errors
    /// When the legs do not go together, or chunks of this size do not go with them.
    pub fn new(legs: Vec<D>, chunk: ByteCount) -> Result<StripeLayer<D>, StripeError> {
        let first = legs.first().ok_or(StripeError::NoLeg)?.geometry();
        let (size, format) = (first.block_size, first.protection);
        for (leg, device) in legs.iter().enumerate() {
            let geometry = device.geometry();
            if geometry.block_size != size {
                return Err(StripeError::BlockSize { leg, actual: geometry.block_size, first: size });
            }
            if geometry.protection != format {
                return Err(StripeError::Protection { leg });
            }
        }
        let blocks = chunk.get() >> size.shift();
        let is_whole = blocks << size.shift() == chunk.get();
        if !is_whole || !blocks.is_power_of_two() || u32::try_from(blocks).is_err() {
            return Err(StripeError::Chunk { chunk, size });
        }
        let plan = StripeMap::new(legs.len(), blocks.trailing_zeros());
        let geometry = geometry(&legs, plan, size, format)?;
        // Only what a pool keeps of the heap is wanted; how much is in use is bounded by the requests under way.
        let pool = Pool::new(0, usize::MAX);
        Ok(StripeLayer { legs, join: Merger { plan, size, format, pool }, geometry, label: None })
    }

    /// The same device, once its legs' labels say that they are one stripe in this order, in chunks of this size. Those of a
    /// new stripe, on which nothing is yet, are labelled with the identity `uuid` if they may be written.
    ///
    /// # Errors
    /// Why they are none; nothing was written then.
    pub async fn labelled(mut self, uuid: [u8; 16], writable: bool) -> Result<StripeLayer<D>, Refusal> {
        let chunk = ByteCount::new(self.join.plan.chunk() << self.join.size.shift());
        let assembly = Assembly { chunk, capacity_blocks: self.geometry.capacity_blocks, uuid, writable };
        self.label = members::assemble(&self.legs, &assembly).await?.map(RefCell::new);
        Ok(self)
    }

    /// What a group that this stripe is a member of notes on it. It is kept in the first leg's label, where there is one.
    async fn group_notes(&self, operation: Request) -> Outcome {
        let Some(label) = &self.label else { return self.legs[0].execute(operation).await };
        match operation {
            Request::WriteReserved { bytes, .. } => {
                let new = Label { above: bytes.to_vec(), ..label.borrow().clone() };
                members::write(&self.legs[0], &new).await?;
                label.replace(new);
                Ok(Response::Done)
            }
            _ => Ok(Response::Reserved(Slice::copy_from(&label.borrow().above))),
        }
    }

    /// The legs, in order.
    pub fn legs(&self) -> &[D] {
        &self.legs
    }

    /// Blocks of a chunk.
    pub fn chunk_blocks(&self) -> u64 {
        self.join.plan.chunk()
    }

    /// What is to be checked in blocks that begin `above`, for the run that begins `below`.
    fn checks_down(&self, checks: Checks, above: u64, below: u64) -> Checks {
        match self.join.format {
            Some(format) if format.protection().increments_ref_tag() => {
                let gain = below.wrapping_sub(above);
                Checks { initial_ref_tag: checks.initial_ref_tag.map(|tag| format.reference_tag(tag, gain)), ..checks }
            }
            _ => checks,
        }
    }

    /// What the leg is asked of a request for `whole`. A demand that counts on from the request's first block is, at the
    /// leg's first, the same demand less the request's address plus the leg's.
    fn part_down(&self, operation: &Request, whole: Extent, runs: &[ChunkRun], part: MemberPart) -> Request {
        let extent = part.below;
        let down = |checks: &Checks| self.checks_down(*checks, whole.start().get(), extent.start().get());
        match operation {
            Request::Read { checks, .. } => Request::Read { extent, checks: down(checks) },
            Request::Verify { checks, .. } => Request::Verify { extent, checks: down(checks) },
            Request::Repair { checks, .. } => Request::Repair { extent, checks: down(checks) },
            Request::Checksum { checks, .. } => Request::Checksum { extent, checks: down(checks) },
            Request::BlockStatus { .. } => Request::BlockStatus { extent },
            Request::Write { data, durability, .. } => Request::Write {
                extent,
                data: gather(data, runs, part.leg, self.join.format, &self.join.pool),
                durability: *durability,
            },
            Request::Compare { data, .. } => {
                Request::Compare { extent, data: gather(data, runs, part.leg, self.join.format, &self.join.pool) }
            }
            Request::WriteZeroes { may_unmap, durability, .. } => {
                Request::WriteZeroes { extent, may_unmap: *may_unmap, durability: *durability }
            }
            Request::WriteUncorrectable { durability, .. } => {
                Request::WriteUncorrectable { extent, durability: *durability }
            }
            Request::Flush | Request::Discard { .. } | Request::ReadReserved { .. } | Request::WriteReserved { .. } => {
                operation.clone()
            }
        }
    }

    /// A request for blocks of one chunk: all that is asked and answered is in one piece.
    async fn one_run(&self, operation: Request, whole: Extent, run: ChunkRun) -> Outcome {
        let below = self.part_down(&operation, whole, &[run], MemberPart { leg: run.leg, below: run.below });
        drop(operation);
        match self.legs[run.leg].execute(below).await {
            Ok(answer) => self.join.answer(&run, answer),
            Err(error) => Err(self.failed(vec![(run.leg, error)])),
        }
    }

    /// A request for blocks of several chunks.
    async fn blocks(&self, operation: Request, whole: Extent) -> Outcome {
        let plan = self.join.plan;
        let needs_runs = matches!(operation, Request::Write { .. } | Request::Compare { .. });
        let runs: Vec<ChunkRun> = if needs_runs { plan.runs(whole).collect() } else { Vec::new() };
        let asked: Vec<(MemberPart, Request)> =
            plan.parts(whole).map(|part| (part, self.part_down(&operation, whole, &runs, part))).collect();
        drop(operation);
        let outcomes = self.ask(asked.into_iter().map(|(part, operation)| (part, part.leg, operation))).await;
        let answers = self.succeeded(outcomes, |part| part.leg)?;
        self.join.answers(whole, answers)
    }

    /// A write of several chunks, each of which is handed through as it is.
    async fn write_chunks(&self, whole: Extent, data: &Sealed, durability: Durability) -> Outcome {
        let asked = self.join.plan.runs(whole).map(|run| {
            let data = gather(data, &[run], run.leg, self.join.format, &self.join.pool);
            (run.leg, run.leg, Request::Write { extent: run.below, data, durability })
        });
        self.succeeded(self.ask(asked).await, |leg| *leg).map(|_| Response::Done)
    }

    fn writes_chunks(&self) -> bool {
        self.join.plan.chunk() << self.join.size.shift() >= WRITTEN_ALONE.get()
    }

    /// Asks legs, side by side.
    async fn ask<T>(&self, asked: impl Iterator<Item = (T, usize, Request)>) -> Vec<(T, Outcome)> {
        join_all(asked.map(|(of, leg, operation)| async move { (of, self.legs[leg].execute(operation).await) })).await
    }

    /// All answers, or the one error that says most.
    fn succeeded<T>(
        &self,
        outcomes: Vec<(T, Outcome)>,
        leg: impl Fn(&T) -> usize,
    ) -> Result<Vec<(T, Response)>, Error> {
        let (mut answers, mut errors) = (Vec::new(), Vec::new());
        for (of, outcome) in outcomes {
            match outcome {
                Ok(answer) => answers.push((of, answer)),
                Err(error) => errors.push((leg(&of), error)),
            }
        }
        if errors.is_empty() { Ok(answers) } else { Err(self.failed(errors)) }
    }

    #[cold]
    fn failed(&self, errors: Vec<(usize, Error)>) -> Error {
        self.join.failed(errors).expect("there is an error")
    }

    /// Sums are of bytes in order, so each chunk is summed by itself.
    async fn digest(&self, whole: Extent, checks: Checks) -> Outcome {
        let asked = self.join.plan.runs(whole).map(|run| {
            let checks = self.checks_down(checks, whole.start().get(), run.below.start().get());
            (run, Request::Checksum { extent: run.below, checks })
        });
        let outcomes: Vec<(ChunkRun, Outcome)> = stream::iter(asked)
            .map(|(run, operation)| async move { (run, self.legs[run.leg].execute(operation).await) })
            .buffered(DIGESTS_IN_FLIGHT)
            .collect()
            .await;
        let answers = self.succeeded(outcomes, |run| run.leg)?;
        let digest = |(run, answer)| match answer {
            Response::Checksum(digest) => Ok((run, digest)),
            _ => Err(answered_wrongly()),
        };
        let digests = answers.into_iter().map(digest).collect::<Result<Vec<_>, Error>>()?;
        Ok(Response::Checksum(self.join.digests(digests)))
    }

    async fn discard(&self, extents: Vec<Extent>) -> Outcome {
        let mut by_leg: Vec<Vec<Extent>> = vec![Vec::new(); self.legs.len()];
        for part in extents.into_iter().flat_map(|extent| self.join.plan.parts(extent)) {
            by_leg[part.leg].push(part.below);
        }
        let asked = by_leg.into_iter().enumerate().filter(|(_, extents)| !extents.is_empty());
        self.done(asked.map(|(leg, extents)| (leg, Request::Discard { extents }))).await
    }

    /// What all legs are asked and only answer that they did.
    async fn done(&self, asked: impl Iterator<Item = (usize, Request)>) -> Outcome {
        let outcomes = self.ask(asked.map(|(leg, operation)| (leg, leg, operation))).await;
        self.succeeded(outcomes, |leg| *leg).map(|_| Response::Done)
    }
}

/// What the stripe of these legs is.
fn geometry<D: Device>(
    legs: &[D],
    plan: StripeMap,
    block_size: BlockSize,
    protection: Option<PiFormat>,
) -> Result<Geometry, StripeError> {
    let rows = |device: &D| device.geometry().capacity_blocks / plan.chunk();
    let (leg, smallest) = legs.iter().map(rows).enumerate().min_by_key(|(_, rows)| *rows).expect("a stripe has a leg");
    if smallest == 0 {
        return Err(StripeError::Small { leg });
    }
    let blocks = smallest.checked_mul(legs.len() as u64).and_then(|chunks| chunks.checked_mul(plan.chunk()));
    let capacity_blocks =
        blocks.filter(|blocks| *blocks <= u64::MAX >> block_size.shift()).ok_or(StripeError::Large)?;
    // A request of this size gives each leg one of the largest requests it takes in whole chunks, wherever it begins.
    let limit = |of: fn(&Limits) -> BlockCount| {
        let least = legs.iter().map(|device| u64::from(of(&device.geometry().limits).get())).min();
        let whole = (least.expect("a stripe has a leg") / plan.chunk()).max(1) * plan.chunk();
        let all = whole.saturating_mul(legs.len() as u64).min(u64::from(u32::MAX));
        BlockCount::new(all as u32).expect("at least one block")
    };
    let limits = Limits {
        max_transfer_blocks: limit(|of| of.max_transfer_blocks),
        max_verify_blocks: limit(|of| of.max_verify_blocks),
        max_zero_blocks: limit(|of| of.max_zero_blocks),
    };
    Ok(Geometry { block_size, capacity_blocks, protection, limits })
}

impl<D: Device> Device for StripeLayer<D> {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        let each = self.legs.iter().map(Device::abilities);
        let all = each.reduce(|a, b| a.intersect(&b)).expect("a stripe has a leg");
        // One leg's room is enough, and only one write of it is all or nothing.
        Abilities { reserved: self.legs[0].abilities().reserved, ..all }
    }

    async fn execute(&self, operation: Request) -> Outcome {
        match operation {
            Request::Flush => self.done((0..self.legs.len()).map(|leg| (leg, Request::Flush))).await,
            Request::Discard { extents } => self.discard(extents).await,
            Request::Checksum { extent, checks } => self.digest(extent, checks).await,
            Request::ReadReserved { slot } | Request::WriteReserved { slot, .. }
                if slot == ReservedArea::GroupLabel =>
            {
                self.group_notes(operation).await
            }
            Request::ReadReserved { .. } | Request::WriteReserved { .. } => self.legs[0].execute(operation).await,
            Request::Read { extent, .. }
            | Request::Write { extent, .. }
            | Request::Verify { extent, .. }
            | Request::Repair { extent, .. }
            | Request::BlockStatus { extent }
            | Request::Compare { extent, .. }
            | Request::WriteZeroes { extent, .. }
            | Request::WriteUncorrectable { extent, .. } => match (self.join.plan.only_run(extent), operation) {
                (Some(run), operation) => self.one_run(operation, extent, run).await,
                (None, Request::Write { data, durability, .. }) if self.writes_chunks() => {
                    self.write_chunks(extent, &data, durability).await
                }
                (None, operation) => self.blocks(operation, extent).await,
            },
        }
    }
}

#[cfg(test)]
mod tests;
