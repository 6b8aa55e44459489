//! A filesystem that is open for writing: runs changes on the open transaction, and commits it.
//!
//! All of it belongs to one core. A change is a function of the open transaction that does not wait
//! ([`Engine::change`]); nodes that it lacks are read, and it is called again.
//!
//! Invariants:
//! - The trees of the last durable transaction stay whole until the next one is durable: their space is pinned, and the
//!   superblock is written last, when all nodes and data are durable.
//! - Opening commits an empty transaction whose number is 3 above the last durable one, before anything else is written.
//!   A transaction that was lost in a crash may have had the next two numbers, and left nodes and data with them. So no
//!   number is used twice, and nothing of a lost transaction can be taken for a part of a later one.
//! - After a failure from which the transaction cannot recover ([`EngineError::Stopped`]) nothing is written any more.
//!   What was durable stays so. What is there can still be read, unless a change failed half-way.
//! - A device on which a write failed gets no superblock any more, so that it stays behind the others, and what it
//!   missed is not taken for current. Until another transaction is durable, its superblock is as new as those of the
//!   others, so nothing that it missed counts as durable before.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use futures_util::future::LocalBoxFuture;
use futures_util::stream::{self, StreamExt};
use sealblock_block::{Condition, DynDevice, yield_once};
use sealblock_btrfs::devices::{DeviceSet, why_unprotected};
use sealblock_btrfs::replicas::{NodeWritten, Storage};
use sealblock_btrfs::{BadCopy, CopyFault, Filesystem, FsError};
use sealblock_btrfs_format::checker::{Expected, check_node};
use sealblock_btrfs_format::commit_record::MAX_DEVICES as MAX_TAGGED_DEVICES;
use sealblock_btrfs_format::items::device::DevItem;
use sealblock_btrfs_format::items::root::RootNode;
use sealblock_btrfs_format::key::objectid;
use sealblock_btrfs_format::node::{Header, flags};
use sealblock_btrfs_format::refusal::Refusal;
use sealblock_btrfs_format::superblock::{Geometry, Superblock};
use sealblock_btrfs_format::superblock_edit::{Commit, TreeRoots};
use sealblock_runtime_memory::Slice;
use zerocopy::FromBytes;

use crate::chunks::Chunks;
use crate::data::state::DataState;
use crate::gate::Gate;
use crate::numbers::Numbers;
use crate::open;
use crate::repair::DamagedNodes;
use crate::space::{SpaceError, Use};
use crate::tagging::Tagging;
use crate::transaction::{ChangeError, Transaction};

/// The bytes of neighbouring nodes that are written by one request.
const NODE_WRITE_BYTES: usize = 512 << 10;
/// The number of these requests at once.
const NODE_WRITES_IN_FLIGHT: usize = 16;
/// The maximum number of damaged copies that are remembered.
const MAX_BAD_COPIES: usize = 10_000;

/// Why the filesystem cannot be changed or committed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EngineError {
    /// A change was refused, and nothing was changed.
    #[error(transparent)]
    Change(ChangeError),
    /// Something cannot be read.
    #[error(transparent)]
    Read(#[from] FsError),
    /// Nothing can be written any more. The filesystem is as the last commit left it.
    #[error("nothing is written any more: {0}")]
    Stopped(Arc<str>),
}

/// Waits until the requests that were begun are with the devices.
pub type Submitted = fn() -> LocalBoxFuture<'static, ()>;

/// Options for opening.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// The memory for nodes that were read, in bytes.
    pub cache_bytes: usize,
    /// True if the devices are told what becomes free, so that they can use the space. A commit then takes until they have
    /// done it.
    pub discards: bool,
    /// The memory for changed nodes, in bytes, after which a write of data commits. [default: 64 MiB]
    pub max_dirty_bytes: usize,
    /// True if the checksums of data are computed before the data are written, and not meanwhile. [default: false]
    pub sync_csum: bool,
    /// An executor may send requests only when no task computes: then nothing is in flight while a checksum is computed,
    /// unless this is waited for first. [default: other tasks run once]
    pub submitted: Option<Submitted>,
}

/// The default of [`EngineOptions::max_dirty_bytes`].
const DEFAULT_DIRTY_BYTES: usize = 64 << 20;

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        let cache_bytes = sealblock_btrfs::nodes::DEFAULT_CACHE_BYTES;
        let max_dirty_bytes = DEFAULT_DIRTY_BYTES;
        EngineOptions { cache_bytes, discards: false, max_dirty_bytes, sync_csum: false, submitted: None }
    }
}

/// A filesystem that is open for writing.
pub struct Engine {
    options: EngineOptions,
    devices: Rc<DeviceSet>,
    transaction: RefCell<Transaction>,
    /// Devices on which a write failed.
    failed: RefCell<BTreeSet<u64>>,
    /// How many of them the last durable transaction has left behind.
    left_behind: Cell<usize>,
    gate: Gate,
    is_committing: Cell<bool>,
    committed: Condition,
    durable: Cell<u64>,
    /// [`Transaction::changes`] when the open transaction began.
    changes_before: Cell<u64>,
    /// The superblocks of the devices without failures, by their transactions.
    supers: RefCell<BTreeMap<u64, u64>>,
    /// What records of commits say of tags.
    tagging: Tagging,
    stopped: RefCell<Option<Arc<str>>>,
    /// True if a change failed half-way, so that the open transaction contradicts itself.
    is_torn: Cell<bool>,
    bad_copies: RefCell<Vec<BadCopy>>,
    damaged_nodes: DamagedNodes,
    pub(crate) numbers: RefCell<Numbers>,
    data: DataState,
}

impl Engine {
    /// Opens a filesystem for writing, and commits the first transaction.
    ///
    /// # Errors
    /// If it has a property with which it is not written, or cannot be read or written.
    pub async fn open(filesystem: &Filesystem, options: EngineOptions) -> Result<Engine, EngineError> {
        let opened = open::check(filesystem).await?;
        let storage = filesystem.storage().clone();
        let superblock = *filesystem.superblock();
        let durable = superblock.generation.get();
        let generation = durable
            .checked_add(3)
            .ok_or_else(|| FsError::NotWritable(format!("its transaction {durable} is the last that there can be")))?;
        let geometry = Geometry { generation, ..*storage.geometry() };
        let uuid = opened.chunk_tree_uuid;
        let chunks = Chunks::new(Rc::clone(&storage.map), &opened.devices, uuid, geometry.sector_bytes);
        let mut transaction = Transaction::new(&superblock, geometry, chunks, uuid, options.cache_bytes);
        opened.add_groups(&mut transaction, &storage);
        let tagging = Tagging::begin(&superblock, &storage.devices, opened.replacement, generation);
        let engine = Engine {
            tagging,
            options,
            devices: Rc::clone(&storage.devices),
            transaction: RefCell::new(transaction),
            failed: RefCell::default(),
            left_behind: Cell::default(),
            gate: Gate::default(),
            is_committing: Cell::default(),
            committed: Condition::default(),
            durable: Cell::new(durable),
            changes_before: Cell::default(),
            supers: RefCell::new(storage.devices.iter().map(|(devid, device)| (devid, device.generation)).collect()),
            stopped: RefCell::default(),
            is_torn: Cell::default(),
            bad_copies: RefCell::default(),
            damaged_nodes: DamagedNodes::default(),
            numbers: RefCell::default(),
            data: DataState::default(),
        };
        for id in opened.trees {
            engine.change(|transaction| transaction.open_tree(id)).await?;
        }
        engine.devices.restore_copies().await;
        let first = engine.commit().await?;
        if let Some(devid) = engine.tagging.confirm(&engine.devices, first).await
            && engine.devices.nodes_need_tags()
        {
            return Err(engine.stop(format!("device {devid} does not keep application tags, which nodes need")));
        }
        engine.transaction.borrow_mut().has_device_sums = engine.devices_without_sums().is_empty();
        Ok(engine)
    }

    /// The last durable transaction.
    pub fn durable_generation(&self) -> u64 {
        self.durable.get()
    }

    /// The options with which it was opened.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Its devices.
    pub fn devices(&self) -> &DeviceSet {
        &self.devices
    }

    /// Waits until the requests that were begun are with the devices, and learns which have completed.
    pub(crate) async fn submitted(&self) {
        match self.options.submitted {
            Some(submitted) => submitted().await,
            None => yield_once().await,
        }
    }

    pub(crate) fn data(&self) -> &DataState {
        &self.data
    }

    /// The open transaction. It is never borrowed across an await.
    pub(crate) fn transaction(&self) -> &RefCell<Transaction> {
        &self.transaction
    }

    /// The devices, and the places of logical addresses now.
    pub(crate) fn storage(&self) -> Storage {
        let map = Rc::clone(self.transaction.borrow().chunks.map());
        Storage { devices: Rc::clone(&self.devices), map }
    }

    pub(crate) fn tagging(&self) -> &Tagging {
        &self.tagging
    }

    /// True if data without checksums get tags on some device.
    pub(crate) fn gives_tags(&self) -> bool {
        self.tagging.is_any()
    }

    /// The names of the devices that cannot keep the checksums of data: they have no protection information that is
    /// visible, do not check it, or do not keep application tags; or there are more than a record lists.
    pub fn devices_without_sums(&self) -> Vec<String> {
        let are_too_many = self.devices.iter().count() > MAX_TAGGED_DEVICES;
        let is_without =
            |devid, device: &DynDevice| are_too_many || !self.tagging.has(devid) || why_unprotected(device).is_some();
        let without = self.devices.iter().filter(|(devid, device)| is_without(*devid, &device.device));
        without.map(|(_, device)| device.name.clone()).collect()
    }

    /// The devices on which a write failed: they lack changes.
    pub fn failed_devices(&self) -> Vec<u64> {
        self.failed.borrow().iter().copied().collect()
    }

    /// Damaged copies of nodes and data that were read since the last call, whose other copies were good.
    pub fn take_bad_copies(&self) -> Vec<BadCopy> {
        self.bad_copies.take()
    }

    /// Reads or changes the open transaction. `change` is called until it lacks no node and there is space for it; only
    /// the last call may change anything. If there is no space, a chunk is made for it; if the devices have no room, the
    /// transaction is committed, after which what it freed is free; and if that does not help, the change is refused.
    ///
    /// # Errors
    /// That of the change, or if a node cannot be read. If the change failed after it began to change something, nothing
    /// is written any more.
    pub async fn change<T>(
        &self,
        mut change: impl FnMut(&mut Transaction) -> Result<T, ChangeError>,
    ) -> Result<T, EngineError> {
        let mut done = None;
        self.change_with(&mut keeping(&mut done, &mut change)).await?;
        Ok(done.expect("the last call succeeded"))
    }

    /// As [`Engine::change`].
    async fn change_with(&self, change: &mut Step<'_>) -> Result<(), EngineError> {
        let mut is_committed = false;
        loop {
            let error = match self.run(change, Way::Change).await {
                Err(EngineError::Change(ChangeError::Space(SpaceError::Full(what)))) => what,
                Err(EngineError::Change(ChangeError::NewSnapshot(_))) => {
                    self.commit().await?;
                    continue;
                }
                result => return result,
            };
            if self.grow(error, Way::Change).await? {
                continue;
            }
            if is_committed {
                return Err(EngineError::Change(ChangeError::Space(SpaceError::Full(error))));
            }
            self.commit().await?;
            is_committed = true;
        }
    }

    /// Reads in the open transaction, also while it is being brought into the state that is committed: that changes no
    /// subvolume; and when nothing is written any more. `read` is called until it lacks no node, and changes nothing.
    ///
    /// # Errors
    /// Those of `read`, if a node cannot be read, or if a change failed half-way.
    pub async fn inspect<T>(
        &self,
        mut read: impl FnMut(&mut Transaction) -> Result<T, ChangeError>,
    ) -> Result<T, EngineError> {
        let mut done = None;
        self.run(&mut keeping(&mut done, &mut read), Way::Read).await?;
        Ok(done.expect("the last call succeeded"))
    }

    /// Makes a chunk for this use, and before it one for another use that it needs. Returns false if there is no room.
    async fn grow(&self, what: Use, way: Way) -> Result<bool, EngineError> {
        let mut wanted = vec![what];
        while let Some(what) = wanted.last().copied() {
            match self.run(&mut |transaction| transaction.allocate_chunk(what), way).await {
                Ok(()) => drop(wanted.pop()),
                Err(EngineError::Change(ChangeError::Space(SpaceError::Full(other)))) if !wanted.contains(&other) => {
                    wanted.push(other);
                }
                Err(EngineError::Change(ChangeError::Space(SpaceError::Full(_)))) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    async fn run(&self, change: &mut Step<'_>, way: Way) -> Result<(), EngineError> {
        let mut pins = Pins { engine: self, bytenrs: Vec::new() };
        loop {
            if way == Way::Change {
                self.gate.passed().await;
            }
            if way != Way::Read || self.is_torn.get() {
                self.check_stopped()?;
            }
            let Some(expected) = self.attempt(change)? else { return Ok(()) };
            let durable = self.durable.get();
            let bytes = match self.read_node(&expected, durable).await {
                Ok(bytes) => bytes,
                // Meanwhile the node may have been replaced, and its place used again.
                Err(_) if self.durable.get() != durable => continue,
                Err(error) => return Err(error),
            };
            self.transaction.borrow_mut().nodes.pin(expected.bytenr, bytes);
            pins.bytenrs.push(expected.bytenr);
        }
    }

    /// Calls a change once. Returns the node that it lacks, if it does.
    fn attempt(&self, change: &mut Step<'_>) -> Result<Option<Expected>, EngineError> {
        let transaction = &mut *self.transaction.borrow_mut();
        let before = transaction.changes();
        match change(transaction) {
            Ok(()) => Ok(None),
            Err(error) if transaction.changes() != before => {
                self.is_torn.set(true);
                Err(self.stop(format!("a change failed half-way: {error}")))
            }
            Err(ChangeError::Need(expected)) => Ok(Some(expected)),
            Err(error) => Err(EngineError::Change(error)),
        }
    }

    /// Reads a node, while this transaction is the last durable one.
    async fn read_node(&self, expected: &Expected, durable: u64) -> Result<Slice, EngineError> {
        let (storage, geometry) = (self.storage(), *self.transaction.borrow().geometry());
        let check = |bytes: &[u8]| check_node(bytes, &geometry, expected).map(drop).map_err(CopyFault::Node);
        let read = storage.read_whole((expected.bytenr, NodeWritten::In(expected.generation)), check).await?;
        self.damaged_nodes.add(expected.bytenr, &read, durable);
        self.remember_bad(read.bad);
        Ok(read.data)
    }

    pub(crate) fn remember_bad(&self, bad: Vec<BadCopy>) {
        let mut all = self.bad_copies.borrow_mut();
        for one in bad {
            // The same copy of a superblock may fail at each commit.
            if all.len() < MAX_BAD_COPIES && all.iter().all(|other| other.place != one.place) {
                all.push(one);
            }
        }
    }

    pub(crate) fn check_stopped(&self) -> Result<(), EngineError> {
        match &*self.stopped.borrow() {
            Some(why) => Err(EngineError::Stopped(why.clone())),
            None => Ok(()),
        }
    }

    /// Nothing is written any more. The first reason counts.
    pub(crate) fn stop(&self, why: String) -> EngineError {
        let mut stopped = self.stopped.borrow_mut();
        let why = stopped.get_or_insert_with(|| {
            tracing::error!(%why, "the filesystem is not written any more");
            why.into()
        });
        EngineError::Stopped(why.clone())
    }

    /// Makes all changes so far durable. Returns the number of the transaction.
    ///
    /// # Errors
    /// If they cannot be written. Nothing is written any more then.
    pub async fn commit(&self) -> Result<u64, EngineError> {
        let generation = self.transaction.borrow().generation();
        self.commit_through(generation).await
    }

    /// The transaction with the last change: the open one, or that before it if nothing has changed since. A damaged copy
    /// of a node that is to be written anew counts as a change.
    pub fn last_changed(&self) -> u64 {
        let transaction = self.transaction.borrow();
        let is_changed = transaction.changes() != self.changes_before.get() || self.damaged_nodes.is_any();
        transaction.generation() - u64::from(!is_changed)
    }

    /// True if there are changes that are not durable.
    pub fn is_dirty(&self) -> bool {
        self.last_changed() > self.durable.get()
    }

    /// Makes all changes so far durable. Without any, nothing is written.
    ///
    /// # Errors
    /// As for [`Engine::commit`].
    pub async fn sync(&self) -> Result<u64, EngineError> {
        self.check_stopped()?;
        self.commit_through(self.last_changed()).await
    }

    /// Makes the changes of a transaction durable, with all that came since, if they are not. Whoever comes while a
    /// commit is written shares the next one.
    ///
    /// # Errors
    /// As for [`Engine::commit`].
    pub async fn commit_through(&self, generation: u64) -> Result<u64, EngineError> {
        let is_durable = || self.durable.get() >= generation;
        self.committed.wait_until(|| !self.is_committing.get() || is_durable()).await;
        if is_durable() {
            return Ok(self.durable.get());
        }
        self.is_committing.set(true);
        let _committing = Committing(self);
        self.commit_alone().await
    }

    /// True if a transaction is being committed.
    pub(crate) fn is_committing(&self) -> bool {
        self.is_committing.get()
    }

    async fn commit_alone(&self) -> Result<u64, EngineError> {
        self.check_stopped()?;
        self.poll_abandoned_once().await;
        let frozen = {
            let _closed = self.gate.close();
            match self.settle().await {
                Ok(()) => {}
                Err(error) => return Err(self.stop(format!("a transaction cannot be completed: {error}"))),
            }
            self.freeze()?
        };
        let unfinished = Unfinished(self);
        let written = self.write_frozen(frozen).await;
        std::mem::forget(unfinished);
        written
    }

    /// Brings the open transaction into the state that is committed.
    async fn settle(&self) -> Result<(), EngineError> {
        while self.step(|transaction| transaction.remove_empty_chunk()).await? {}
        self.step(|transaction| {
            transaction.touch_root(objectid::ROOT_TREE)?;
            transaction.prepare_nodes(objectid::ROOT_TREE, 1)?;
            transaction.edit(objectid::ROOT_TREE, |tree, editor| Ok::<_, ChangeError>(tree.copy_root(editor)?))
        })
        .await?;
        while self.step(Transaction::settle).await? {}
        Ok(())
    }

    /// One step of that, before which a chunk is made if there is no space for it.
    async fn step<T>(
        &self,
        mut step: impl FnMut(&mut Transaction) -> Result<T, ChangeError>,
    ) -> Result<T, EngineError> {
        loop {
            let mut done = None;
            let result = self.run(&mut keeping(&mut done, &mut step), Way::Settle).await;
            match result {
                Err(EngineError::Change(ChangeError::Space(SpaceError::Full(what))))
                    if self.grow(what, Way::Settle).await? => {}
                result => return result.map(|()| done.expect("the last call succeeded")),
            }
        }
    }

    /// Makes the nodes of the transaction unchangeable, and opens the next transaction.
    fn freeze(&self) -> Result<Frozen, EngineError> {
        let transaction = &mut *self.transaction.borrow_mut();
        let (geometry, generation) = (*transaction.geometry(), transaction.generation());
        let finish = |bytenr: u64, bytes: &mut [u8]| finish_node(bytenr, bytes, &geometry);
        let nodes = transaction.nodes.freeze(finish);
        let nodes = nodes.map_err(|refusal| self.stop(format!("a node that breaks a rule was made: {refusal}")))?;
        let mut superblock = transaction.superblock;
        let none = RootNode { bytenr: 0, level: 0, generation: 0 };
        let root = |id| transaction.root(id).unwrap_or(none);
        superblock.set_commit(&Commit {
            generation,
            roots: TreeRoots {
                tree: root(objectid::ROOT_TREE),
                chunk: root(objectid::CHUNK_TREE),
                extent: root(objectid::EXTENT_TREE),
                fs: root(objectid::FS_TREE),
                dev: root(objectid::DEV_TREE),
                csum: root(objectid::CSUM_TREE),
            },
            total_bytes: superblock.total_bytes.get(),
            bytes_used: transaction.space.used_bytes(),
            num_devices: superblock.num_devices.get(),
        });
        let devices: Vec<DevItem> = transaction.chunks.devices().copied().collect();
        transaction.superblock = superblock;
        let (pinned, removed) = (transaction.space.take_pinned(), transaction.chunks.take_removed());
        transaction.open_next();
        self.changes_before.set(transaction.changes());
        let storage = Storage { devices: Rc::clone(&self.devices), map: Rc::clone(transaction.chunks.map()) };
        Ok(Frozen { nodes, superblock, pinned, removed, storage, devices })
    }

    /// Writes a frozen transaction, and makes it durable.
    async fn write_frozen(&self, frozen: Frozen) -> Result<u64, EngineError> {
        let Frozen { nodes, mut superblock, pinned, removed, storage, devices } = frozen;
        let storage = &storage;
        // All of them are of the transaction.
        let tag = nodes.first().and_then(|(_, node)| storage.node_tag(node));
        let writes = neighbours(&nodes).map(|run| async move { storage.write(run[0].0, &joined(run), tag).await });
        let mut writes = stream::iter(writes).buffer_unordered(NODE_WRITES_IN_FLIGHT);
        while let Some(written) = writes.next().await {
            let judged = self.judge_write(storage, written, true);
            judged.map_err(|error| self.stop(format!("a node cannot be written: {error}")))?;
        }
        drop(writes);
        self.flush_devices(&devices, Some(storage)).await?;
        let (sound, left_behind) = (self.sound(&devices), self.failed.borrow().len());
        let items: Vec<DevItem> = devices.into_iter().filter(|item| sound.contains(&item.devid.get())).collect();
        // All of the transaction is durable on these.
        let oldest = self.supers.borrow().values().copied().min().unwrap_or(self.durable.get());
        let is_host_sealed = self.devices.is_host_sealed();
        self.tagging.record(oldest, &items, superblock.generation.get(), is_host_sealed).write(&mut superblock);
        let (failed, bad) = storage.devices.write_supers(&superblock, &items).await;
        self.remember_bad(bad);
        failed.iter().for_each(|(devid, fault)| self.device_failed(*devid, fault));
        if failed.len() >= items.len() {
            return Err(self.stop("no superblock can be written".into()));
        }
        let generation = superblock.generation.get();
        self.damaged_nodes.write(storage, self.durable.get(), |devid| self.has_failed(devid)).await;
        let is_written = |item: &&DevItem| failed.iter().all(|(devid, _)| *devid != item.devid.get());
        *self.supers.borrow_mut() =
            items.iter().filter(is_written).map(|item| (item.devid.get(), generation)).collect();
        self.durable.set(generation);
        self.left_behind.set(left_behind);
        if self.options.discards {
            // A device runs requests in any order. So what is discarded is free only when that is done, or the discard
            // would take what was written there next.
            storage.discard(&pinned).await;
        }
        let transaction = &mut *self.transaction.borrow_mut();
        transaction.nodes.thaw();
        transaction.released.thaw();
        transaction.chunks.settle_removed(&removed);
        transaction.space.unpin(pinned).map_err(|error| self.stop(error.to_string()))?;
        self.data.files.committed(generation);
        Ok(generation)
    }

    /// The devices on which no write failed.
    fn sound(&self, devices: &[DevItem]) -> Vec<u64> {
        let failed = self.failed.borrow();
        devices.iter().map(|item| item.devid.get()).filter(|devid| !failed.contains(devid)).collect()
    }

    pub(crate) fn has_failed(&self, devid: u64) -> bool {
        self.failed.borrow().contains(&devid)
    }

    /// True if a device that missed a write would be taken for current after a power cut.
    pub(crate) fn has_new_failure(&self) -> bool {
        self.failed.borrow().len() != self.left_behind.get()
    }

    /// Flushes all devices that are not left behind, as far as others do not have all that they have.
    ///
    /// # Errors
    /// If one cannot be flushed that has something alone. Nothing is written any more then.
    pub(crate) async fn flush(&self) -> Result<(), EngineError> {
        let devices: Vec<DevItem> = self.transaction.borrow().chunks.devices().copied().collect();
        self.flush_devices(&devices, None).await
    }

    /// Flushes those of these devices that are not left behind, for a commit with the chunks that it has. A device that
    /// cannot be flushed may lack any write since its last flush. It is left behind if other devices have all chunks, also
    /// those of the open transaction, to which data may have been written already.
    async fn flush_devices(&self, devices: &[DevItem], committed: Option<&Storage>) -> Result<(), EngineError> {
        let failed = self.devices.flush(&self.sound(devices)).await;
        let Some((devid, fault)) = failed.first() else { return Ok(()) };
        let is_lost = |id: u64| self.has_failed(id) || failed.iter().any(|(failed, _)| *failed == id);
        let survives = self.storage().map.survives_without(is_lost)
            && committed.is_none_or(|storage| storage.map.survives_without(is_lost));
        if !survives {
            return Err(self.stop(format!("what was written to device {devid} may not be durable: {fault}")));
        }
        failed.iter().for_each(|(devid, fault)| self.device_failed(*devid, fault));
        Ok(())
    }

    pub(crate) fn device_failed(&self, devid: u64, fault: &CopyFault) {
        if self.failed.borrow_mut().insert(devid) {
            self.devices.leave_behind(devid);
            tracing::error!(devid, %fault, "a device cannot be written, and is left behind");
        }
    }
}

/// What is called until it lacks no node. There are many of them, so what calls them is compiled once for all.
type Step<'s> = dyn FnMut(&mut Transaction) -> Result<(), ChangeError> + 's;

/// A step that keeps the result of a call that succeeded.
fn keeping<'s, T>(
    done: &'s mut Option<T>,
    call: &'s mut impl FnMut(&mut Transaction) -> Result<T, ChangeError>,
) -> impl FnMut(&mut Transaction) -> Result<(), ChangeError> + 's {
    |transaction| {
        *done = Some(call(transaction)?);
        Ok(())
    }
}

/// For what a function of the transaction is called.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// To change it: before it is brought into the state that is committed, or after.
    Change,
    /// To bring it there.
    Settle,
    /// To read it.
    Read,
}

/// Nodes by rising addresses, in groups without gaps.
fn neighbours(nodes: &[(u64, Slice)]) -> impl Iterator<Item = &[(u64, Slice)]> {
    let touch = |(one, bytes): &(u64, Slice), (other, _): &(u64, Slice)| one + bytes.len() as u64 == *other;
    let most = nodes.first().map_or(1, |(_, bytes)| (NODE_WRITE_BYTES / bytes.len().max(1)).max(1));
    nodes.chunk_by(touch).flat_map(move |run| run.chunks(most))
}

/// The bytes of neighbouring nodes.
fn joined(nodes: &[(u64, Slice)]) -> Slice {
    match nodes {
        [(_, bytes)] => bytes.clone(),
        _ => {
            let parts: Vec<&[u8]> = nodes.iter().map(|(_, bytes)| &bytes[..]).collect();
            Slice::copy_from(&parts.concat())
        }
    }
}

/// A transaction that is being written.
struct Frozen {
    nodes: Vec<(u64, Slice)>,
    superblock: Superblock,
    /// What becomes free when it is durable.
    pinned: Vec<Range<u64>>,
    /// The chunks that are gone when it is durable.
    removed: Vec<u64>,
    storage: Storage,
    devices: Vec<DevItem>,
}

/// A commit. When it ends, others may begin one.
struct Committing<'a>(&'a Engine);

impl Drop for Committing<'_> {
    fn drop(&mut self) {
        self.0.is_committing.set(false);
        self.0.committed.notify();
    }
}

/// A transaction that is being written. If that is given up, nobody knows what of it is there.
struct Unfinished<'a>(&'a Engine);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.0.stop("the writing of a transaction was given up".into());
    }
}

/// The nodes that a change holds in memory.
struct Pins<'a> {
    engine: &'a Engine,
    bytenrs: Vec<u64>,
}

impl Drop for Pins<'_> {
    fn drop(&mut self) {
        self.engine.transaction.borrow_mut().nodes.unpin(&self.bytenrs);
    }
}

/// Completes a node, and checks it as it will be checked when it is read.
fn finish_node(bytenr: u64, bytes: &mut [u8], geometry: &Geometry) -> Result<(), Box<Refusal>> {
    if let Ok((header, _)) = Header::mut_from_prefix(bytes) {
        header.flags = (header.flags.get() | flags::WRITTEN).into();
    }
    geometry.checksum.seal(bytes);
    let (owner, level) = match Header::ref_from_prefix(bytes) {
        Ok((header, _)) => (header.owner.get(), header.level),
        Err(_) => (0, 0),
    };
    let expected = Expected { bytenr, owner, level, generation: geometry.generation, first_key: None };
    check_node(bytes, geometry, &expected).map(drop)
}
