//! Changing the size of a volume that is not open.
//!
//! Blocks stay in place. A volume that grows gets more block groups after its last one, or unused blocks that an
//! earlier shrinking left in it. A volume that shrinks drops the block groups that are wholly after its new end, in
//! which no block may have data. The room after the last block group, with the third superblock and copies of the
//! reserved area, moves to the new end.

use std::pin::pin;

use futures_util::future::{Either, select};
use sealblock_block::{BlockState, Clock, Error, Medium, MediumError, MediumErrorKind, ReservedArea, Response};
use sealblock_units::Extent;

use crate::format::{
    HighWaterMark, Layout, LayoutError, RESERVED_HEAD_BYTES, ReservedCopy, Superblock, TAIL_BYTES, WhyLost,
};
use crate::life::{OpenVolume, open};
use crate::map::block_groups::BlockGroups;
use crate::medium::{high_water, superblocks};
use crate::options::{Mutation, OpenOptions, VolumeError};
use crate::volume::Volume;

/// Bytes at the end of the tail after the reserved area copies: the third superblock, and unused space.
const RESERVED_FREE_BYTES: u64 = 8 << 10;
/// The number of blocks whose status is read at once.
const STATUS_BLOCKS: u64 = 1 << 20;

/// The requested size of a volume.
#[derive(Clone, Copy, Debug)]
pub struct ResizeOptions {
    /// The new size, in blocks.
    pub capacity_blocks: u64,
    /// Returns why a label in the group label area, which is never empty here, prevents a resize of this volume alone;
    /// `None` if it does not, like the label of a member that was removed from its mirror.
    pub bars: fn(&[u8]) -> Option<String>,
    /// An injected fault, to show that tests notice it.
    pub mutation: Mutation,
}

/// A volume that was resized.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Resized {
    /// Its former size in blocks.
    pub before_blocks: u64,
    /// Its size in blocks.
    pub capacity_blocks: u64,
    /// The bytes of the medium that it used before.
    pub before_medium_bytes: u64,
    /// The bytes of the medium that it uses.
    pub medium_bytes: u64,
    /// Why completed changes may be lost, if that was not reported yet.
    pub may_be_lost: Option<WhyLost>,
}

/// Why a volume was not resized. It is unchanged.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// It does not open for writing, or the medium failed.
    #[error("{0}")]
    Volume(#[from] VolumeError),
    /// It is a member of a group, and the other members would keep their size.
    #[error("resizing members is not supported: {0}")]
    Member(String),
    /// Blocks beyond the new end have data, or it is unknown whether they do.
    #[error("{blocks} blocks beyond the new end hold data, the first of them block {first}")]
    InUse {
        /// The number of these blocks.
        blocks: u64,
        /// The first of them.
        first: u64,
    },
    /// The medium is too short.
    #[error("the medium has {medium_bytes} bytes and the larger volume needs {needed_bytes}: {reason}")]
    Room {
        /// The length of the medium.
        medium_bytes: u64,
        /// The length that the volume needs.
        needed_bytes: u64,
        /// Why the medium cannot be extended.
        reason: String,
    },
    /// The superblock or the group map has no room to describe the new blocks.
    #[error("{0}; copy it to a new volume of that size")]
    Limit(String),
}

impl From<MediumError> for ResizeError {
    fn from(error: MediumError) -> ResizeError {
        ResizeError::Volume(error.into())
    }
}

/// Changes the size of a volume that is not open.
///
/// `medium` must be a pointer to its medium, opened for writing, which locks out other processes. After any
/// interruption, such as a crash, the volume has its old size or the new one, and all of its data. After a crash,
/// resizing again finishes it, even to the size that the volume already has.
///
/// # Errors
/// See [`ResizeError`]. When the medium fails half-way, the volume has the old size or the new one.
pub async fn resize<M: Medium + Clone, C: Clock>(
    medium: &M,
    clock: C,
    options: &ResizeOptions,
) -> Result<Resized, ResizeError> {
    // An impossible size is refused before anything is written.
    layout_for(&superblocks::read(medium).await?.superblock, options)?;
    let superblock = close_in_order(medium, clock, options).await?;
    let layout = layout_for(&superblock, options)?;
    let step = ResizeStep { medium, old: superblock, layout, mutation: options.mutation };
    step.run().await?;
    Ok(Resized {
        before_blocks: superblock.layout.capacity_blocks(),
        capacity_blocks: layout.capacity_blocks(),
        before_medium_bytes: superblock.layout.medium_bytes(),
        medium_bytes: layout.medium_bytes(),
        may_be_lost: superblock.unreported_loss,
    })
}

fn layout_for(superblock: &Superblock, options: &ResizeOptions) -> Result<Layout, ResizeError> {
    superblock.layout.with_capacity(options.capacity_blocks).map_err(|error| match error {
        LayoutError::Segments | LayoutError::BlockGroups { .. } => ResizeError::Limit(error.to_string()),
        other => VolumeError::Layout(other).into(),
    })
}

/// Completes recovery after a crash, checks whether the volume may be resized, and closes it: its log is empty then,
/// according to all superblocks.
async fn close_in_order<M: Medium + Clone, C: Clock>(
    medium: &M,
    clock: C,
    options: &ResizeOptions,
) -> Result<Superblock, ResizeError> {
    let opening = OpenOptions { relocate: false, mutation: options.mutation, ..OpenOptions::default() };
    let OpenVolume { volume, worker, .. } = open(medium.clone(), clock, &opening).await?;
    let checking = async {
        let allowed = may_resize(&volume, options).await;
        let closed = volume.close().await.map_err(|error| VolumeError::Recovery(error.to_string()));
        allowed.and(closed.map_err(ResizeError::from))
    };
    match select(pin!(worker.run()), pin!(checking)).await {
        Either::Left(((), checking)) => checking.await?,
        Either::Right((checked, _)) => checked?,
    }
    Ok(volume.superblock())
}

/// Refuses members of groups, and a new end before blocks that have data.
async fn may_resize<M: Medium, C: Clock>(volume: &Volume<M, C>, options: &ResizeOptions) -> Result<(), ResizeError> {
    let failed = |error: Error| ResizeError::Volume(VolumeError::Recovery(error.to_string()));
    let label = volume.reserved.read(&volume.medium, ReservedArea::GroupLabel).await.map_err(failed)?;
    let bar = if label.is_empty() { None } else { (options.bars)(&label) };
    if let Some(why) = bar {
        return Err(ResizeError::Member(why));
    }
    if options.mutation.is(Mutation::CutMapped) {
        return Ok(());
    }
    let (mut blocks, mut first) = (0, None);
    let (mut at, end) = (options.capacity_blocks, volume.layout.capacity_blocks());
    while at < end {
        let extent = Extent::from_raw(at, (end - at).min(STATUS_BLOCKS)).expect("blocks of the volume");
        let Response::BlockStatus(runs) = volume.allocation(extent).await.map_err(failed)? else { break };
        for run in runs {
            if run.state == BlockState::Allocated {
                first.get_or_insert(at);
                blocks += u64::from(run.blocks.get());
            }
            at += u64::from(run.blocks.get());
        }
    }
    if volume.block_map.has_newer_pages() {
        // The close records it.
        return Err(VolumeError::NewerPages.into());
    }
    first.map_or(Ok(()), |first| Err(ResizeError::InUse { blocks, first }))
}

/// A change of the layout of a closed volume.
///
/// The parts that the new layout needs are durable before the first superblock with it; parts that only the old layout
/// needs are overwritten after that. In between only the copies at the start exist.
struct ResizeStep<'a, M> {
    medium: &'a M,
    old: Superblock,
    layout: Layout,
    mutation: Mutation,
}

impl<M: Medium> ResizeStep<'_, M> {
    async fn run(&self) -> Result<(), ResizeError> {
        let (from, to) = (self.old.layout, self.layout);
        if to == from {
            // A crash may have interrupted an earlier resize.
            self.copy_reserved(&self.layout).await?;
            self.medium.sync().await?;
            return self.cut().await;
        }
        let groups = BlockGroups::read(self.medium, &self.old).await?;
        let (write_seq, initialized_groups) = (self.old.write_seq + 1, groups.initialized_below(to.block_groups()));
        let resized = Superblock { write_seq, layout: to, initialized_groups, ..self.old };
        match self.mutation.injected() {
            Mutation::NameEarly => self.write_first_superblock(&resized).await?,
            Mutation::TailEarlier if !self.grows() => self.copy_reserved(&self.layout).await?,
            _ => {}
        }
        let medium_bytes = self.medium.len_bytes();
        let prepared = self.prepare(&groups).await;
        if prepared.is_err() && medium_bytes < self.medium.len_bytes() {
            // If that fails, too, the medium is longer than the volume, which does no harm.
            let _ = self.medium.set_len(medium_bytes).await;
        }
        prepared?;
        if self.mutation.is(Mutation::CutEarly) {
            self.cut().await?;
        }
        self.write_first_superblock(&resized).await?;
        self.finish(&resized).await
    }

    /// True if the new end of the volume is after the old one.
    fn grows(&self) -> bool {
        self.layout.medium_bytes() > self.old.layout.medium_bytes()
    }

    /// Writes the parts that only the new layout has. The volume keeps its old size.
    async fn prepare(&self, groups: &BlockGroups) -> Result<(), ResizeError> {
        let (from, to) = (self.old.layout, self.layout);
        let there = self.medium.len_bytes();
        if self.grows() {
            self.make_room().await?;
            self.copy_reserved(&self.layout).await?;
        }
        if !self.mutation.is(Mutation::KeepBits) {
            groups.rewrite_for(self.medium, to, from.is_resized() || to.is_resized()).await?;
        }
        if self.grows() {
            self.clear_block_map(there).await?;
        }
        if from.third_offset() != to.third_offset() {
            superblocks::wipe_third(self.medium, &from).await?;
        }
        Ok(self.medium.sync().await?)
    }

    /// Finishes the resize once a superblock has the new size.
    async fn finish(&self, resized: &Superblock) -> Result<(), ResizeError> {
        if !self.grows() {
            self.copy_reserved(&self.layout).await?;
        }
        let superblock = Superblock { write_seq: resized.write_seq + 1, ..*resized };
        superblocks::write(self.medium, &superblock).await?;
        self.medium.sync().await?;
        let superblocks = superblock.write_seq;
        let mark = HighWaterMark { superblocks, ..high_water::read(self.medium, &superblock).await };
        high_water::write(self.medium, &superblock.layout, superblock.seed(), &mark).await;
        if self.old.layout.is_resized() && !resized.layout.is_resized() {
            BlockGroups::read(self.medium, resized).await?.rewrite_for(self.medium, resized.layout, false).await?;
        }
        if self.grows() { Ok(()) } else { self.cut().await }
    }

    /// Writes the first superblock with the new layout. From here on the volume has its new size.
    async fn write_first_superblock(&self, resized: &Superblock) -> Result<(), ResizeError> {
        superblocks::write_at_start(self.medium, resized).await?;
        Ok(self.medium.sync().await?)
    }

    /// Clears map entries and generations in the places of added block groups: those of a block group that an earlier
    /// shrinking dropped name the same blocks of the same volume. Their map entries would look newer than the
    /// generations, and their generations would look like an initialized block group. `there` is the former length of
    /// the medium, after which there are zeroes. The old tail, where the first of these block groups begins, keeps its
    /// reserved area, which is written again in case a crash interrupted its first write.
    async fn clear_block_map(&self, there: u64) -> Result<(), ResizeError> {
        let (from, to) = (&self.old.layout, &self.layout);
        self.copy_reserved(from).await?;
        for group in (from.block_groups()..to.block_groups()).map_while(|group| to.block_group(group)) {
            let start = group.pages_offset.max(from.medium_bytes() - RESERVED_FREE_BYTES);
            let end = group.data_offset.min(there);
            if start < end && !self.medium.is_hole(start, end - start) {
                self.medium.zero(start, end - start).await?;
            }
        }
        Ok(())
    }

    /// Extends the medium, and allocates the space that must not be missing later.
    async fn make_room(&self) -> Result<(), ResizeError> {
        let (medium_bytes, needed_bytes) = (self.medium.len_bytes(), self.layout.medium_bytes());
        let no_room = |error: MediumError| match error.kind {
            MediumErrorKind::NoSpace => ResizeError::Room { medium_bytes, needed_bytes, reason: error.reason },
            _ => error.into(),
        };
        if medium_bytes < needed_bytes {
            self.medium.set_len(needed_bytes).await.map_err(no_room)?;
        }
        let from = self.old.layout.medium_bytes();
        let (from, length) =
            if self.old.keeps_space { (from, needed_bytes - from) } else { (self.layout.tail_offset(), TAIL_BYTES) };
        match self.medium.reserve(from, length).await {
            Err(error) if error.kind == MediumErrorKind::Unsupported && !self.old.keeps_space => Ok(()),
            taken => taken.map_err(no_room),
        }
    }

    /// Writes the copies of the reserved area in the tail. Each gets the newer content of the two copies at the start
    /// and in the old tail.
    async fn copy_reserved(&self, to: &Layout) -> Result<(), ResizeError> {
        let seed = self.old.seed();
        for area in ReservedArea::ALL {
            let length = RESERVED_HEAD_BYTES + area.max_bytes();
            for turn in [0, 1] {
                let [start, tail] = self.old.layout.reserved_offsets(area, turn);
                let mut newest: Option<ReservedCopy> = None;
                for offset in [start, tail] {
                    let (read, bytes) = self.medium.read(offset, self.medium.buffer(length)).await;
                    let copy = read.ok().and_then(|()| ReservedCopy::decode(&bytes, area, seed));
                    let copy = copy.filter(|copy| copy.write_seq % 2 == turn);
                    if copy.as_ref().map(|copy| copy.write_seq) > newest.as_ref().map(|newest| newest.write_seq) {
                        newest = copy;
                    }
                }
                // Zeroes if neither copy has valid content: an earlier size may have left something.
                let mut buffer = self.medium.buffer(length);
                buffer.fill(0);
                if let Some(newest) = newest {
                    let encoded = newest.encode(area, seed);
                    buffer[..encoded.len()].copy_from_slice(&encoded);
                }
                let place = to.reserved_offsets(area, turn)[1];
                let (read, there) = self.medium.read(place, self.medium.buffer(length)).await;
                // Copies that a volume of the new size does not have yet are always written, which allocates their
                // space. Copies that the volume has already are not put at risk.
                let is_there = *to == self.old.layout && *to != self.layout && read.is_ok() && *there == *buffer;
                if !is_there {
                    self.medium.write(place, buffer.freeze()).await?;
                }
            }
        }
        Ok(())
    }

    /// Truncates the medium after the new end. If the medium keeps its length, the space there is deallocated. The
    /// volume has its new size either way.
    async fn cut(&self) -> Result<(), ResizeError> {
        let (end, there) = (self.layout.medium_bytes(), self.medium.len_bytes());
        if there > end {
            let cut = async {
                self.medium.set_len(end).await?;
                let old_end = self.old.layout.medium_bytes().min(self.medium.len_bytes());
                if old_end > end {
                    self.medium.punch(end, old_end - end).await?;
                }
                self.medium.sync().await
            };
            if let Err(error) = cut.await {
                tracing::warn!(%error, "cannot free the space behind the volume's new end");
            }
        }
        Ok(())
    }
}
