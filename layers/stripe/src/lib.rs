//! One device whose blocks are striped over several members, chunk by chunk.
//!
//! Invariants: each block is on one member; a request becomes at most one request per member (a Checksum, and a write
//! of large chunks, one per chunk); all members execute concurrently; every address in a response, in bad blocks,
//! miscompares and reference tags, is an address of the stripe.
//!
//! Reference tags are shifted with the addresses, so that the stripe and each member verify as whole devices, each by
//! its own addresses. The shift is plain arithmetic on each tuple, so a wrong tag stays exactly as wrong as it was. It
//! also applies to Type 2, whose tags the command chooses: blocks that were written with any tag are read with the same
//! one. Type 3 tags do not increment and stay. The checks of a request need one shift per member, because both the
//! checked tag and the member's addresses increment by one across chunks that are adjacent on that member.
//!
//! With the members in another order, or with another chunk size, the stripe is another device, which reads wrong data
//! and verifies clean. So the members have labels (`label`), and `members` checks them before anything is read or
//! written.

pub mod label;
mod members;
mod merge;
mod shards;
mod stripe_map;

use std::cell::RefCell;

use futures_util::future::join_all;
use futures_util::stream::{self, StreamExt};
use sealblock_block::{
    Abilities, Ability, AsyncMutex, Device, Durability, Error, ErrorKind, Expectations, Freshness, Geometry, Limits,
    Operation, Outcome, Request, RequestKind, ReservedArea, Response, WhyOlder, WriteData,
};
use sealblock_integrity::{ChecksumKind, PiFormat};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockCount, BlockSize, ByteCount, Extent};

use label::Label;
pub use members::AssembleError;
use members::Assembly;
use merge::{MemberResponses, Merger, unexpected_response};
pub use shards::ShardLayer;
use stripe_map::{ChunkRun, StripeMap};

/// The default chunk size: 64 KiB.
pub const CHUNK: ByteCount = ByteCount::new(64 << 10);

/// The maximum number of chunks of one Checksum request in flight: enough to keep the members busy.
const CHECKSUMS_IN_FLIGHT: usize = 16;

/// From this chunk size on, writes are sent chunk by chunk: another request costs less than copying that many bytes.
const WRITE_BY_CHUNK_MIN: ByteCount = ByteCount::new(32 << 10);

/// Why devices cannot form a stripe.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StripeError {
    /// There are no members.
    #[error("a stripe has at least one member")]
    NoMember,
    /// The members have different block sizes.
    #[error("member {member} has blocks of {actual} bytes, the first member has blocks of {first}")]
    BlockSize {
        /// Index of the member, from 0.
        member: usize,
        /// Its block size.
        actual: BlockSize,
        /// The block size of the first member.
        first: BlockSize,
    },
    /// The members have different formats of protection information.
    #[error("member {member} and the first member have protection information of different formats")]
    Protection {
        /// Index of the member, from 0.
        member: usize,
    },
    /// A chunk is not a power of two of blocks.
    #[error("chunks of {} bytes are not a power of two of blocks of {size} bytes", chunk.get())]
    Chunk {
        /// The size of a chunk.
        chunk: ByteCount,
        /// The size of a block.
        size: BlockSize,
    },
    /// A member has no room for a chunk.
    #[error("member {member} is smaller than a chunk")]
    Small {
        /// Index of the member, from 0.
        member: usize,
    },
    /// The shards together are smaller than the device that they are to be.
    #[error("the shards have {actual} blocks together, and {due} are needed")]
    Short {
        /// The blocks of all shards.
        actual: u64,
        /// The blocks of the device.
        due: u64,
    },
    /// There are more blocks than addresses.
    #[error("the members together have more blocks than can be addressed")]
    Large,
}

/// The members as one device. See the crate's header.
pub struct StripeLayer<D> {
    members: Vec<D>,
    merger: Merger,
    geometry: Geometry,
    /// The members' labels, if they have any.
    labels: Option<RefCell<Vec<Label>>>,
    /// Held while a label of an outer group is written.
    label_turns: AsyncMutex,
    /// A member was restored from an earlier state.
    is_any_behind: bool,
}

impl<D: Device> StripeLayer<D> {
    /// Stripes `members`, in this order, with this chunk size. Members are behind their gates. The stripe uses as many
    /// whole chunks of each member as the smallest one has.
    ///
    /// # Errors
    /// When the members do not fit each other, or the chunk size does not fit them.
    pub fn new(members: Vec<D>, chunk: ByteCount) -> Result<StripeLayer<D>, StripeError> {
        let first = members.first().ok_or(StripeError::NoMember)?.geometry();
        let (size, format) = (first.block_size, first.protection);
        for (member, device) in members.iter().enumerate() {
            let geometry = device.geometry();
            if geometry.block_size != size {
                return Err(StripeError::BlockSize { member, actual: geometry.block_size, first: size });
            }
            if geometry.protection != format {
                return Err(StripeError::Protection { member });
            }
        }
        let blocks = chunk.get() >> size.shift();
        let is_whole = blocks << size.shift() == chunk.get();
        if !is_whole || !blocks.is_power_of_two() || u32::try_from(blocks).is_err() {
            return Err(StripeError::Chunk { chunk, size });
        }
        let stripe_map = StripeMap::new(members.len(), blocks.trailing_zeros());
        let geometry = geometry(&members, stripe_map, size, format)?;
        let merger = Merger { stripe_map, size, format, names_members: true };
        let label_turns = AsyncMutex::default();
        Ok(StripeLayer { members, merger, geometry, labels: None, label_turns, is_any_behind: false })
    }

    /// Checks by the members' labels that they are one stripe, in this order and with this chunk size. Members of a new
    /// stripe, which are blank, get labels with the identity `uuid` if they may be written.
    ///
    /// # Errors
    /// When the labels do not match. Nothing was written then.
    pub async fn labelled(mut self, uuid: [u8; 16], may_write: bool) -> Result<StripeLayer<D>, AssembleError> {
        let chunk = ByteCount::new(self.merger.stripe_map.chunk() << self.merger.size.shift());
        let assembly = Assembly { chunk, capacity_blocks: self.geometry.capacity_blocks, uuid, may_write };
        let labels = members::assemble(&self.members, &assembly).await?;
        self.is_any_behind = labels.as_ref().is_some_and(|labels| members::is_any_behind(labels));
        self.labels = labels.map(RefCell::new);
        Ok(self)
    }

    /// What makes the same stripe of the same members, opened on another core. It has no labels: requests for the group
    /// label are executed on the core of this one.
    pub fn elsewhere(&self) -> impl Fn(Vec<D>) -> Result<StripeLayer<D>, StripeError> + Send + Sync + use<D> {
        let chunk = ByteCount::new(self.merger.stripe_map.chunk() << self.merger.size.shift());
        let is_any_behind = self.is_any_behind;
        move |members| Ok(StripeLayer { is_any_behind, ..StripeLayer::new(members, chunk)? })
    }

    /// The contradiction between the members' labels and this stripe, if any: another number, order, chunk size or
    /// shape, or another stripe. Members without labels, or with unreadable ones, do not contradict.
    pub async fn contradiction(&self) -> Option<AssembleError> {
        let chunk = ByteCount::new(self.merger.stripe_map.chunk() << self.merger.size.shift());
        let (capacity_blocks, uuid) = (self.geometry.capacity_blocks, [0; 16]);
        let assembly = Assembly { chunk, capacity_blocks, uuid, may_write: false };
        use AssembleError::{Chunk, Count, Foreign, Order, Shape};
        let refusal = members::assemble(&self.members, &assembly).await.err()?;
        matches!(refusal, Foreign { .. } | Count { .. } | Order(_) | Chunk { .. } | Shape { .. }).then_some(refusal)
    }

    /// The contradiction between labels of the devices below the members and this stripe, if any, where layers hide labels: another
    /// number, order or chunk size, or another stripe. A member may be a part of its device, so shapes are not compared.
    pub fn contradiction_below(&self, labels: &[Option<label::Label>]) -> Option<AssembleError> {
        let chunk = ByteCount::new(self.merger.stripe_map.chunk() << self.merger.size.shift());
        members::check_arrangement(labels, chunk).err()
    }

    /// Reads or writes the label of a group that this stripe is a member of. It is stored with the first member's
    /// label, if that has one, and the other members count its writes.
    async fn group_label_request(&self, request: Request) -> Outcome {
        let Some(labels) = &self.labels else { return self.members[0].execute(request).await };
        match request.operation {
            Operation::WriteReserved(_, bytes) => {
                let _alone = self.label_turns.lock().await;
                let before = labels.borrow().clone();
                let new = members::write_group_label(&self.members, &before, &bytes).await?;
                labels.replace(new);
                Ok(Response::Done)
            }
            _ => Ok(Response::Reserved(Slice::copy_from(&labels.borrow()[0].group_label))),
        }
    }

    /// The members, in order.
    pub fn members(&self) -> &[D] {
        &self.members
    }

    /// Blocks of a chunk.
    pub fn chunk_blocks(&self) -> u64 {
        self.merger.stripe_map.chunk()
    }

    /// Converts the expectations for blocks from `stripe_lba` on to those for the run from `member_lba` on.
    fn expectations_down(&self, expectations: Expectations, stripe_lba: u64, member_lba: u64) -> Expectations {
        expectations.advance(member_lba.wrapping_sub(stripe_lba), self.merger.format)
    }

    /// Converts a request for the blocks of one chunk to a request to the member. An expected tag that increments from
    /// the request's first block becomes, at the member's first block, the same tag minus the request's address plus
    /// the member's.
    fn run_down(&self, request: Request, run: &ChunkRun) -> Request {
        let (stripe_lba, member_lba) = (run.stripe_lba.get(), run.below.start().get());
        Request { extents: run.below.into(), ..request }
            .map_expectations(|expected| self.expectations_down(expected, stripe_lba, member_lba))
            .map_data(|data| self.merger.to_member_tags(data, run))
    }

    /// Executes a request for blocks of one chunk, which needs no splitting.
    async fn one_run(&self, request: Request, run: ChunkRun) -> Outcome {
        let (member, request) = (&self.members[run.member], self.run_down(request, &run));
        let outcome = match member.try_execute(&request) {
            Some(outcome) => outcome,
            None => member.execute(request).await,
        };
        self.merger.outcome(&run, outcome)
    }

    /// Executes a request for blocks of several chunks.
    async fn blocks(&self, request: Request, whole: Extent) -> Outcome {
        let stripe_map = self.merger.stripe_map;
        let first = whole.start().get();
        // Sealed once for all members, because a member's part is not a run of the data.
        let request = request.sealed();
        let requests = stripe_map.parts(whole).map(|part| {
            let part_request = Request {
                operation: request.operation.clone(),
                extents: part.below.into(),
                durability: request.durability,
            };
            let part_request = part_request
                .map_expectations(|expected| self.expectations_down(expected, first, part.below.start().get()))
                .map_data(|data| self.merger.gather(&data.into_sealed(), whole, part.member).into());
            (part, part.member, part_request)
        });
        let mut responses = MemberResponses::new();
        self.execute_all(requests, |part, response| responses.push((part, response))).await?;
        self.merger.responses(whole, responses)
    }

    /// Writes several chunks, one request each, without copying.
    async fn write_chunks(&self, whole: Extent, data: &WriteData, durability: Durability) -> Outcome {
        let requests = self.merger.stripe_map.runs(whole).map(|run| {
            let part = data.slice(run.first, run.below.len() as usize);
            ((), run.member, Request::write(run.below, self.merger.to_member_tags(part, &run), durability))
        });
        self.execute_all(requests, |(), _| ()).await.map(|()| Response::Done)
    }

    fn writes_chunks(&self) -> bool {
        self.merger.stripe_map.chunk() << self.merger.size.shift() >= WRITE_BY_CHUNK_MIN.get()
    }

    /// Executes requests on members, all concurrently, and in place on members that need not wait. `take` gets each
    /// response. Fails with the single most significant error.
    async fn execute_all<T>(
        &self,
        requests: impl Iterator<Item = (T, usize, Request)>,
        mut take: impl FnMut(T, Response),
    ) -> Result<(), Error> {
        let (mut waiting, mut errors) = (Vec::new(), Vec::new());
        for (at, (of, member, request)) in requests.enumerate() {
            match self.members[member].try_execute(&request) {
                Some(Ok(response)) => take(of, response),
                Some(Err(error)) => errors.push((at, member, error)),
                None => waiting.push(async move { (at, of, member, self.members[member].execute(request).await) }),
            }
        }
        for (at, of, member, outcome) in join_all(waiting).await {
            match outcome {
                Ok(response) => take(of, response),
                Err(error) => errors.push((at, member, error)),
            }
        }
        errors.sort_by_key(|(at, ..)| *at);
        self.merger.merge_errors(errors.into_iter().map(|(_, member, error)| (member, error)))
    }

    /// Computes a checksum chunk by chunk, since a CRC covers bytes in order.
    async fn checksum(&self, whole: Extent, kind: ChecksumKind, expectations: Expectations) -> Outcome {
        let requests = self.merger.stripe_map.runs(whole).map(|run| {
            let expected = self.expectations_down(expectations, whole.start().get(), run.below.start().get());
            (run, Request::checksum(run.below, kind, expected))
        });
        let outcomes: Vec<(ChunkRun, Outcome)> = stream::iter(requests)
            .map(|(run, request)| async move { (run, self.members[run.member].execute(request).await) })
            .buffered(CHECKSUMS_IN_FLIGHT)
            .collect()
            .await;
        let (mut checksums, mut errors) = (Vec::with_capacity(outcomes.len()), Vec::new());
        for (run, outcome) in outcomes {
            match outcome {
                Ok(Response::Checksum(checksum)) if checksum.kind == kind => checksums.push((run, checksum)),
                Ok(_) => return Err(unexpected_response()),
                Err(error) => errors.push((run.member, error)),
            }
        }
        self.merger.merge_errors(errors.into_iter())?;
        Ok(Response::Checksum(self.merger.checksums(kind, checksums)))
    }

    async fn discard(&self, extents: &[Extent]) -> Outcome {
        let mut by_member: Vec<Vec<Extent>> = vec![Vec::new(); self.members.len()];
        for part in extents.iter().flat_map(|extent| self.merger.stripe_map.parts(*extent)) {
            by_member[part.member].push(part.below);
        }
        let requests = by_member.into_iter().enumerate().filter(|(_, extents)| !extents.is_empty());
        let requests = requests.map(|(member, extents)| ((), member, Request::discard(extents)));
        self.execute_all(requests, |(), _| ()).await.map(|()| Response::Done)
    }

    async fn flush(&self) -> Outcome {
        let requests = (0..self.members.len()).map(|member| ((), member, Request::flush()));
        self.execute_all(requests, |(), _| ()).await.map(|()| Response::Done)
    }
}

/// Returns the geometry of a stripe of these members.
fn geometry<D: Device>(
    members: &[D],
    stripe_map: StripeMap,
    block_size: BlockSize,
    protection: Option<PiFormat>,
) -> Result<Geometry, StripeError> {
    let rows = |device: &D| device.geometry().capacity_blocks / stripe_map.chunk();
    let (member, smallest) =
        members.iter().map(rows).enumerate().min_by_key(|(_, rows)| *rows).expect("a stripe has a member");
    if smallest == 0 {
        return Err(StripeError::Small { member });
    }
    let blocks = smallest.checked_mul(members.len() as u64).and_then(|chunks| chunks.checked_mul(stripe_map.chunk()));
    let capacity_blocks =
        blocks.filter(|blocks| *blocks <= u64::MAX >> block_size.shift()).ok_or(StripeError::Large)?;
    // A request of this size gives each member the largest request of whole chunks that it accepts, wherever it begins.
    let limit = |of: fn(&Limits) -> BlockCount| {
        let smallest_limit = members.iter().map(|device| u64::from(of(&device.geometry().limits).get())).min();
        let whole = (smallest_limit.expect("a stripe has a member") / stripe_map.chunk()).max(1) * stripe_map.chunk();
        let all = whole.saturating_mul(members.len() as u64).min(u64::from(u32::MAX));
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
        let each = self.members.iter().map(Device::abilities);
        let all = each.reduce(|a, b| a.intersect(&b)).expect("a stripe has a member");
        // The reserved area of one member is enough, and only a write to one device is atomic.
        // Source and destination may be on different members, and so may blocks that must change atomically.
        let reserved = self.members[0].abilities().get(RequestKind::ReadReserved);
        let behind = if self.is_any_behind { Freshness::MayBeOlder(WhyOlder::RolledBack) } else { Freshness::Current };
        let freshness = all.freshness.and(behind);
        Abilities { compare_and_write_blocks: 0, freshness, ..all }
            .with([RequestKind::ReadReserved], reserved)
            .with([RequestKind::Copy, RequestKind::Salvage], Ability::Absent)
    }

    async fn execute(&self, request: Request) -> Outcome {
        match request.operation {
            Operation::Flush => self.flush().await,
            Operation::Discard => self.discard(&request.extents).await,
            Operation::Checksum(kind, expectations) => self.checksum(request.extents.one(), kind, expectations).await,
            Operation::ReadReserved(ReservedArea::GroupLabel)
            | Operation::WriteReserved(ReservedArea::GroupLabel, _) => self.group_label_request(request).await,
            Operation::ReadReserved(_) | Operation::WriteReserved(..) => self.members[0].execute(request).await,
            Operation::Salvage | Operation::Copy { .. } | Operation::CompareAndWrite(_) => {
                Err(ErrorKind::Absent(request.kind()).into())
            }
            Operation::Read(_)
            | Operation::Write(_)
            | Operation::Verify(_)
            | Operation::Repair
            | Operation::BlockStatus
            | Operation::Compare(_)
            | Operation::WriteZeroes { .. }
            | Operation::WriteUncorrectable { .. } => {
                let extent = request.extents.one();
                match (self.merger.stripe_map.only_run(extent), &request.operation) {
                    (Some(run), _) => self.one_run(request, run).await,
                    (None, Operation::Write(data)) if self.writes_chunks() => {
                        self.write_chunks(extent, data, request.durability).await
                    }
                    (None, _) => self.blocks(request, extent).await,
                }
            }
        }
    }

    fn executes_in_place(&self) -> bool {
        self.members.iter().any(Device::executes_in_place)
    }

    /// Executes only reads and writes of blocks of one chunk, on a member that executes them in place.
    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        if !matches!(request.kind(), RequestKind::Read | RequestKind::Write) {
            return None;
        }
        let run = self.merger.stripe_map.only_run(request.extents.one())?;
        let outcome = self.members[run.member].try_execute(&self.run_down(request.clone(), &run))?;
        Some(self.merger.outcome(&run, outcome))
    }
}

#[cfg(test)]
mod tests;
