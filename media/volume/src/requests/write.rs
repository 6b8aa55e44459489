//! Write, Discard, WriteZeroes and WriteUncorrectable.

use std::pin::pin;
use std::task::Poll;

use futures_util::future::join_all;
use futures_util::poll;
use sealblock_block::{Clock, Durability, Error, Medium, MediumError, Outcome, Response, WriteData};
use sealblock_integrity::{PiFormat, Sealed, Tags, Tuple, Unsealed, guard};
use sealblock_runtime_memory::Buffer;
use sealblock_units::Extent;

use crate::format::{MapEntry, MapEntryKind, MapEntryRun};
use crate::log::notes::Pending;
use crate::map::map_page::{MapLookup, MapPage};
use crate::options::Mutation;
use crate::requests::lookup::has_data_crc;
use crate::space::Allocation;
use crate::space::free_map::Run;
use crate::volume::{Volume, VolumeState};

/// The maximum number of commits for which a long write waits, to get contiguous physical blocks.
const MAX_WAITS: u32 = 4;
/// Blocks that are deallocated before other requests run. A long request consists of pieces, some of which run
/// concurrently, and each may deallocate this many.
const BLOCKS_PER_TURN: u64 = 1 << 11;

/// Written blocks with their tags. Also the other fields of their map entries, if these were computed while the data
/// were in flight.
struct WrittenBlocks {
    data: Sealed,
    /// One for each block, or empty.
    extras: Vec<EntryExtras>,
}

/// The fields of a block's map entry besides its tuple.
#[derive(Clone, Copy)]
struct EntryExtras {
    /// The CRC-32C of the data, if the tuple has no checksum as strong.
    data_crc: Option<u32>,
    guard_unverified: bool,
}

impl<M: Medium, C: Clock> Volume<M, C> {
    pub(crate) async fn write(&self, extent: Extent, data: &WriteData, durability: Durability) -> Outcome {
        self.store(extent, data).await?;
        self.written(durability).await
    }

    /// Completes a change that is in the memtable, once it has the requested durability.
    async fn written(&self, durability: Durability) -> Outcome {
        match durability {
            Durability::Volatile if !self.notes.answers_durable() => Ok(Response::Done),
            Durability::Volatile | Durability::ForceUnitAccess => self.flush().await,
        }
    }

    /// Writes blocks to free physical blocks and puts their map entries into the memtable.
    pub(crate) async fn store(&self, extent: Extent, data: &WriteData) -> Result<(), Error> {
        let _change = self.begin_block_change().await?;
        let mut from = 0;
        for (group, piece) in self.layout.group_pieces(extent) {
            if piece == extent {
                return self.store_in_group(group, extent, data).await;
            }
            let blocks = piece.len() as usize;
            Box::pin(self.store_in_group(group, piece, &data.slice(from, blocks))).await?;
            from += blocks;
        }
        Ok(())
    }

    async fn store_in_group(&self, group: u64, extent: Extent, data: &WriteData) -> Result<(), Error> {
        let taken = self.allocate(group, extent).await?;
        if self.mutation.is(Mutation::NoteEarly) {
            // An injected fault: blocks are noted and in the memtable before their data have arrived.
            let sealed = WrittenBlocks { data: data.clone().into_sealed(), extras: Vec::new() };
            self.enter(self.entries(group, extent, &sealed, taken.runs())).noted().await?;
            let written = self.write_runs(group, taken.runs(), data).await;
            taken.commit();
            return written.map_err(Error::from);
        }
        let is_long = extent.bytes(self.geometry.block_size) >= self.seal_in_flight_bytes;
        let written = if is_long && self.takes_a_pass(data) {
            Box::pin(self.seal_in_flight(group, taken.runs(), data)).await
        } else {
            let sealed = data.clone().into_sealed();
            let written = self.write_runs(group, taken.runs(), data).await;
            written.map(|()| WrittenBlocks { data: sealed, extras: Vec::new() })
        };
        match written {
            Ok(written) => {
                let entering = self.enter(self.entries(group, extent, &written, taken.runs()));
                taken.commit();
                entering.noted().await
            }
            Err(error) => {
                // Every write has ended, and no map entry names the physical blocks.
                taken.release();
                Err(error.into())
            }
        }
    }

    /// True if anything must be computed from the data.
    fn takes_a_pass(&self, data: &WriteData) -> bool {
        match data {
            WriteData::Unsealed(_) => true,
            WriteData::Sealed(data) => has_data_crc(self.geometry.protection) || !data.has_verified_guards(),
        }
    }

    /// Writes data to runs of physical blocks. When this ends, every write has.
    async fn write_runs(&self, group: u64, runs: &[Run], data: &WriteData) -> Result<(), MediumError> {
        if let [(pbn, _)] = runs {
            return self.medium.write_blocks(self.pbn_offset(group, *pbn), data).await;
        }
        let mut end = 0;
        let writes = runs.iter().map(|&(pbn, blocks)| {
            let part = data.slice(end, blocks as usize);
            end += blocks as usize;
            async move { self.medium.write_blocks(self.pbn_offset(group, pbn), &part).await }
        });
        Box::pin(join_all(writes)).await.into_iter().collect()
    }

    /// Writes data as [`Volume::write_runs`] does, and meanwhile computes their tags and the other fields of map
    /// entries. The data are immutable, so these match the written bytes. They are used only after the writes have
    /// succeeded.
    async fn seal_in_flight(&self, group: u64, runs: &[Run], data: &WriteData) -> Result<WrittenBlocks, MediumError> {
        let mut writing = pin!(self.write_runs(group, runs, data));
        let mut ended = poll!(writing.as_mut());
        if ended.is_pending() {
            self.medium.submitted().await;
        } else if let Poll::Ready(Err(error)) = ended {
            return Err(error);
        }
        let sealed = data.clone().into_sealed();
        let is_verified = sealed.has_verified_guards();
        let extras = match has_data_crc(self.geometry.protection) || !is_verified {
            true => sealed.iter().map(|block| self.extras(block, is_verified)).collect(),
            false => Vec::new(),
        };
        if ended.is_pending() && !self.mutation.is(Mutation::EntryInFlight) {
            ended = Poll::Ready(writing.await);
        }
        match ended {
            Poll::Ready(Err(error)) => Err(error),
            _ => Ok(WrittenBlocks { data: sealed, extras }),
        }
    }

    /// Takes physical blocks for an extent of a block group; waits for commits to free some when there are too few.
    async fn allocate(&self, group: u64, extent: Extent) -> Result<Allocation<'_>, Error> {
        if !self.allocator.is_loaded(group) {
            Box::pin(self.load_group(group)).await?;
            self.refuse_if_put_back().await?;
        }
        if self.notes.are_open() {
            Box::pin(self.prepare_notes(group)).await?;
        }
        let (first, count) = (self.index_in_group(extent.start()), extent.len() as u32);
        // Without a queue, large writes would take all physical blocks that become free before a small one is woken.
        let mut place = (!self.allocator.queue.is_empty(group)).then(|| self.allocator.queue.join(group));
        if let Some(place) = &place {
            place.first().await;
        }
        let mut waits = 0;
        loop {
            self.check_writable()?;
            // A long write waits for a commit that may make room for it in one piece.
            let lacks_free_cluster = || {
                waits < MAX_WAITS
                    && self.allocator.with(group, |map| map.lacks_free_cluster(count, self.memtable.len()))
                        == Some(true)
            };
            if !lacks_free_cluster()
                && self.memtable.active_weight() < self.commits.max_uncommitted
                && let Some(taken) = self.allocator.take(group, first, count)
            {
                self.request_early_commit(group);
                return Ok(taken);
            }
            let _place = place.get_or_insert_with(|| self.allocator.queue.join(group));
            let since = self.commits.completed.get();
            let _space_waiter = self.commits.register_space_waiter(self.memtable.active_len() > 0);
            // Checked again each time: the commit that frees physical blocks may have been in flight already.
            let room = || {
                !lacks_free_cluster()
                    && self.allocator.free(group) >= count
                    && self.memtable.active_weight() < self.commits.max_uncommitted
            };
            self.allocator.freed.wait_until(|| room() || self.has_ended_since(since)).await;
            waits += 1;
            if let Some(error) = self.commits.error_since(since) {
                return Err(error);
            }
        }
    }

    /// Requests a commit early, before free physical blocks or room for map entries run out and writers must wait for
    /// one, and before homes of extents run out of spare physical blocks. But only if a commit would free a good part
    /// of the spare physical blocks: some may stay in use because damaged map entries name them, or because they have
    /// notes.
    pub(crate) fn request_early_commit(&self, group: u64) {
        let open = self.memtable.active_len();
        let spare = self.layout.spare_blocks(group) as u32;
        let enough = (spare / 4 * 3).saturating_sub(self.notes.blocks_taken(group));
        let are_blocks_low = self.allocator.free(group) < enough && open >= spare as usize / 8;
        if are_blocks_low || self.memtable.active_weight() * 2 >= self.commits.max_uncommitted {
            self.commits.request_space();
        }
    }

    /// The map entries of written blocks.
    fn entries(
        &self,
        group: u64,
        extent: Extent,
        written: &WrittenBlocks,
        runs: &[Run],
    ) -> impl Iterator<Item = Pending> {
        let WrittenBlocks { data, extras } = written;
        let pbns = runs.iter().flat_map(|&(start, len)| start..start + len);
        let blocks = extent.iter().zip(data.iter()).zip(pbns).enumerate();
        blocks.map(move |(at, ((lba, block), pbn))| {
            let mut entry = MapEntry { kind: MapEntryKind::Stored, pbn, ..MapEntry::deallocated(lba) };
            let extras = extras.get(at).copied().unwrap_or_else(|| self.extras(block, data.has_verified_guards()));
            extras.fill(&mut entry, block.1);
            // If the guard does not match, it cannot show whether the data arrived.
            let data_crc = if entry.guard_unverified { guard::crc32c(block.0) } else { 0 };
            Pending::new(group, entry.into(), data_crc)
        })
    }

    /// Fills in the tuple of a map entry from a block and its tuple. The guard is known to match if `is_verified`.
    pub(crate) fn fill_tuple(&self, entry: &mut MapEntry, block: (&[u8], &[u8]), is_verified: bool) {
        self.extras(block, is_verified).fill(entry, block.1);
    }

    /// The other fields of the map entry of a block with this tuple. The guard is known to match if `is_verified`.
    fn extras(&self, (block, tuple): (&[u8], &[u8]), is_verified: bool) -> EntryExtras {
        let protection = self.geometry.protection;
        EntryExtras {
            data_crc: has_data_crc(protection).then(|| guard::crc32c(block)),
            guard_unverified: protection.is_some_and(|format| !is_verified && has_wrong_guard(format, tuple, block)),
        }
    }

    /// Puts the map entry of a block with data into the memtable. If it replaces another one there, the physical block
    /// of that one is freed at once, because that map entry was never durable.
    pub(crate) fn replace(&self, group: u64, entry: MapEntry) {
        if self.mutation.is(Mutation::ReuseEarly) {
            self.free_durable_early(group, &entry);
        }
        if let Some(old) = self.memtable.put(entry).filter(|old| old.kind == MapEntryKind::Stored) {
            self.allocator.defer_free(group, (old.pbn, 1), false);
        }
    }

    /// The same for a run of blocks without data. The physical blocks that become free are deallocated on the medium.
    pub(crate) fn replace_run(&self, group: u64, run: MapEntryRun) {
        if self.mutation.is(Mutation::ReuseEarly) {
            run.entries().for_each(|entry| self.free_durable_early(group, &entry));
        }
        let mut frees = self.allocator.frees(group);
        let replaced = self.memtable.put_run(run).into_iter().filter(|old| old.kind == MapEntryKind::Stored);
        replaced.for_each(|old| frees.add(old.pbn, true));
    }

    /// An injected fault: the physical block of the durable map entry is freed before the new map entry is durable.
    fn free_durable_early(&self, group: u64, entry: &MapEntry) {
        if self.memtable.get(entry.lba).is_none()
            && let Some(MapLookup::Mapped(old)) = self.lookup_cached(entry.lba)
            && old.kind == MapEntryKind::Stored
        {
            self.allocator.defer_free(group, (old.pbn, 1), false);
        }
    }

    /// Deallocates blocks. They read as zeroes afterwards; their space is freed once the deallocation is durable.
    pub(crate) async fn discard(&self, extents: &[Extent]) -> Outcome {
        for extent in extents {
            self.mark(*extent, MapEntryKind::Deallocated).await?;
        }
        self.written(Durability::Volatile).await
    }

    pub(crate) async fn write_zeroes(&self, extent: Extent, may_unmap: bool, durability: Durability) -> Outcome {
        if may_unmap {
            self.mark(extent, MapEntryKind::Deallocated).await?;
        } else {
            self.store_zeroes(extent).await?;
        }
        self.written(durability).await
    }

    /// Zeroes that keep their space are stored like any other blocks.
    async fn store_zeroes(&self, extent: Extent) -> Result<(), Error> {
        let (size, max) = (self.geometry.block_size, self.geometry.limits.max_transfer_blocks);
        let zeroes = Buffer::zeroed(extent.bytes(size).min(max.bytes(size)) as usize).freeze();
        for piece in extent.split_aligned(max) {
            let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: piece.start().get() };
            let data = zeroes.slice(..piece.bytes(size) as usize);
            self.store(piece, &Unsealed::new(data, size, self.geometry.protection, tags).into()).await?;
        }
        Ok(())
    }

    /// Makes blocks unreadable. Their old data are deallocated.
    pub(crate) async fn write_uncorrectable(&self, extent: Extent, durability: Durability) -> Outcome {
        self.commits.uncorrectable.set(true);
        self.mark(extent, MapEntryKind::Uncorrectable).await?;
        self.written(durability).await
    }

    /// Gives every block of an extent a map entry of this kind without data, unless it has one.
    ///
    /// Blocks that already are of this kind cost nothing: no map pages, no notes, no commit. So a request that
    /// deallocates an unwritten block group does not change it.
    ///
    /// It works page by page, so that a long extent does not keep many pages in memory or occupy the core for long.
    async fn mark(&self, extent: Extent, kind: MapEntryKind) -> Result<(), Error> {
        let _change = self.begin_block_change().await?;
        for (group, in_group) in self.layout.group_pieces(extent) {
            if kind == MapEntryKind::Deallocated && self.is_group_unwritten(group, in_group) {
                self.leave_turn(1).await;
                continue;
            }
            for (number, piece) in self.layout.page_pieces(in_group) {
                self.leave_turn(piece.len()).await;
                self.mark_in_page(group, number, piece, kind).await?;
            }
        }
        Ok(())
    }

    /// The same for an extent within one page.
    async fn mark_in_page(&self, group: u64, number: u64, piece: Extent, kind: MapEntryKind) -> Result<(), Error> {
        let unlike = async || {
            let page = self.block_map.page(&self.medium, number).await?;
            Ok::<_, Error>(self.runs_unlike(number, &page, piece, kind))
        };
        let is_unlike = !unlike().await?.is_empty();
        if is_unlike {
            self.load_group(group).await?;
        }
        self.refuse_if_put_back().await?;
        if !is_unlike {
            return Ok(());
        }
        self.prepare_notes(group).await?;
        self.wait_for_room().await?;
        // Blocks may have changed meanwhile.
        let runs = unlike().await?;
        Box::pin(self.enter(runs.into_iter().map(|run| Pending::new(group, run, 0))).noted()).await
    }

    /// Lets other requests run, after a number of blocks.
    async fn leave_turn(&self, blocks: u64) {
        let marked = self.marked.replace(self.marked.get() + blocks);
        if marked + blocks > BLOCKS_PER_TURN {
            self.marked.set(0);
            self.medium.submitted().await;
        }
    }

    /// True if these blocks of a block group are known, without reading the medium, to be unwritten.
    fn is_group_unwritten(&self, group: u64, extent: Extent) -> bool {
        !self.block_map.groups.is_initialized(group)
            && !self.memtable.meets(extent)
            && !self.block_map.patches.has_any_of(self.layout.pages_of_group(group))
    }

    /// The runs of blocks of an extent in one page that are not known to be of this kind without data, as map entries
    /// of this kind.
    fn runs_unlike(&self, number: u64, page: &MapPage, piece: Extent, kind: MapEntryKind) -> Vec<MapEntryRun> {
        let mut runs: Vec<MapEntryRun> = Vec::new();
        let has_newer = self.memtable.meets(piece);
        self.lookup_each(number, page, piece, |lba, lookup| {
            let newer = if has_newer { self.memtable.get(lba) } else { None };
            let known = match (newer, lookup) {
                (Some(entry), _) | (None, MapLookup::Mapped(entry)) => entry.kind == kind,
                (None, MapLookup::Unwritten) => kind == MapEntryKind::Deallocated,
                (None, MapLookup::Stale { .. } | MapLookup::Damaged(_) | MapLookup::Unreadable) => false,
            };
            match runs.last_mut().filter(|last| last.end() == lba.get()) {
                _ if known => {}
                Some(last) => last.blocks += 1,
                None => runs.push(MapEntry { kind, ..MapEntry::deallocated(lba) }.into()),
            }
        });
        runs
    }

    /// Waits until the memtable accepts more map entries.
    async fn wait_for_room(&self) -> Result<(), Error> {
        loop {
            self.check_writable()?;
            if self.memtable.active_weight() < self.commits.max_uncommitted {
                return Ok(());
            }
            self.wait_for_commit().await?;
        }
    }

    /// Requests a commit and waits until one has ended, or the volume accepts no more changes.
    pub(crate) async fn wait_for_commit(&self) -> Result<(), Error> {
        let since = self.commits.completed.get();
        self.commits.request_space();
        self.allocator.freed.wait_until(|| self.has_ended_since(since)).await;
        self.commits.error_since(since).map_or(Ok(()), Err)
    }

    /// True if a commit has ended since the count was `since`, or the volume accepts no more changes.
    fn has_ended_since(&self, since: u64) -> bool {
        self.commits.completed.get() != since || self.state.get() != VolumeState::Open
    }
}

impl EntryExtras {
    /// Fills in the tuple of a map entry; it is empty on a volume without protection information.
    fn fill(self, entry: &mut MapEntry, tuple: &[u8]) {
        entry.tuple[..tuple.len()].copy_from_slice(tuple);
        entry.guard_unverified = self.guard_unverified;
        if let Some(crc) = self.data_crc {
            entry.set_data_crc(crc);
        }
    }
}

/// True if a host's guard does not match the data, which is allowed if it disabled checks.
fn has_wrong_guard(format: PiFormat, tags: &[u8], data: &[u8]) -> bool {
    Tuple::read(format, tags).guard != guard::compute(format.guard(), data)
}
