//! Random changes of data, names and snapshots, with their histories and promises.

use futures_executor::block_on;
use futures_util::future::{LocalBoxFuture, join};
use sealblock_btrfs_engine::change::Change;
use sealblock_btrfs_engine::data::FilePlace;
use sealblock_btrfs_engine::engine::{Engine, EngineError};
use sealblock_btrfs_engine::inode::Ownership;
use sealblock_btrfs_engine::names::{NewFile, Place, RenameMode, Renamed};
use sealblock_btrfs_engine::operations::{NewSnapshot, Resolved, SubvolumePlace};
use sealblock_btrfs_engine::plan::Plan;
use sealblock_btrfs_engine::transaction::{ChangeError, Transaction};
use sealblock_btrfs_engine::xattrs::XattrMode;
use sealblock_btrfs_format::items::inode::{InodeFlags, Timespec};
use sealblock_recorder::Recorder;
use sealblock_runtime_memory::Slice;

use crate::files::{Kind, ROOT};
use crate::history::{Entry, Histories, ModelFile, Names};

/// The longest file.
const MOST: u64 = 120_000;
/// The files that are there from the beginning.
const KINDS: [Kind; 8] = [
    Kind::NoCow,
    Kind::Plain,
    Kind::NoSum,
    Kind::Compressed("zstd"),
    Kind::NoCow,
    Kind::Plain,
    Kind::Compressed("lzo"),
    Kind::Compressed("zlib"),
];

type Done = Result<(), EngineError>;

/// A workload on an engine.
pub struct Work<'a> {
    pub engine: &'a Engine,
    pub recorder: &'a Recorder,
    pub random: fastrand::Rng,
    pub histories: Histories,
    /// Unlinked inodes that are not released yet.
    orphans: Vec<u64>,
    /// Deleted subvolumes with nodes that are not dropped yet.
    dying: Vec<u64>,
    /// The most snapshots at once.
    pub most_snapshots: usize,
}

pub fn place(name: &str) -> Place<'_> {
    Place { directory: 256, name: name.as_bytes() }
}

pub fn time() -> Timespec {
    Timespec { seconds: 1_700_000_000.into(), nanoseconds: 0.into() }
}

/// Bytes that nobody else writes.
fn noise(random: &mut fastrand::Rng, bytes: u64) -> Vec<u8> {
    let mut data = vec![random.u8(..); bytes as usize];
    match random.u8(..3) {
        0 => {}
        // Each piece of it is another one, and can be compressed.
        1 => data.chunks_mut(256).for_each(|piece| {
            let (byte, rest) = (random.u8(..), random.usize(..piece.len()));
            piece[rest..].fill(byte);
        }),
        _ => random.fill(&mut data),
    }
    data
}

fn insert(names: &mut Names, name: &str, entry: Entry) {
    names.insert(name.into(), entry);
}

fn remove(names: &mut Names, name: &str) {
    names.remove(name);
}

/// The data of a new file get no checksums, and are not written in place.
fn set_unsummed(transaction: &mut Transaction, ino: u64) -> Result<(), ChangeError> {
    let (geometry, view) = (*transaction.geometry(), transaction.view(ROOT)?);
    let mut plan = Plan::new(&view, transaction.plan_context(&geometry, time()));
    plan.edit_inode(ino, |inode| {
        inode.flags = InodeFlags::NODATASUM.bits().into();
        Ok(())
    })?;
    let changes = plan.into_changes();
    transaction.apply_change(&Change::of(ROOT, changes))
}

fn with(content: &[u8], at: u64, data: &[u8]) -> Vec<u8> {
    let (mut new, end) = (content.to_vec(), at as usize + data.len());
    new.resize(new.len().max(end), 0);
    new[at as usize..end].copy_from_slice(data);
    new
}

impl<'a> Work<'a> {
    pub fn new(engine: &'a Engine, recorder: &'a Recorder, seed: u64, mut histories: Histories) -> Work<'a> {
        histories.note_durable(engine.durable_generation());
        let random = fastrand::Rng::with_seed(seed);
        let (orphans, dying) = (Vec::new(), Vec::new());
        let mut work = Work { engine, recorder, random, histories, orphans, dying, most_snapshots: 4 };
        let mark = work.histories.promise(engine.durable_generation());
        recorder.mark(mark);
        work
    }

    /// The first files, empty.
    pub fn create_files(&mut self) -> Done {
        for (index, kind) in KINDS.into_iter().enumerate() {
            self.create(&format!("file{index}"), kind)?;
        }
        Ok(())
    }

    pub fn tick(&mut self) {
        self.histories.clock += 1;
        self.recorder.mark(format!("at {}", self.histories.clock));
        self.histories.note_durable(self.engine.durable_generation());
    }

    pub fn create(&mut self, name: &str, kind: Kind) -> Result<usize, EngineError> {
        // In a filesystem without checksums all files are like that.
        let kind = if self.needs_tags() && kind.has_sums() { Kind::NoSum } else { kind };
        self.tick();
        let file = self.histories.add_file(0, kind);
        self.histories.begin_names(|names| insert(names, name, Entry::File(file)));
        self.histories.files[file].ino = self.create_file(name, kind)?;
        self.tick();
        self.histories.end_names();
        Ok(file)
    }

    /// The kind is changed afterwards, when the file is still empty.
    fn create_file(&self, name: &str, kind: Kind) -> Result<u64, EngineError> {
        let (engine, owner) = (self.engine, Ownership { uid: 0, gid: 0, permissions: 0o644 });
        let ino = block_on(engine.create(ROOT, place(name), NewFile::Regular, &owner, time()))?;
        match kind {
            Kind::Plain => {}
            Kind::Compressed(value) => {
                let attribute = (&b"btrfs.compression"[..], value.as_bytes());
                block_on(engine.set_xattr(ROOT, ino, attribute, XattrMode::Set, time()))?;
            }
            Kind::Compress => drop(block_on(engine.set_flags(ROOT, ino, InodeFlags::COMPRESS, time()))?),
            Kind::NoCow => drop(block_on(engine.set_flags(ROOT, ino, InodeFlags::NODATACOW, time()))?),
            Kind::NoSum => block_on(engine.change(|transaction| set_unsummed(transaction, ino)))?,
        }
        Ok(ino)
    }

    /// Changes the content of a file, and meanwhile something else.
    fn change_with(
        &mut self,
        file: usize,
        new: Vec<u8>,
        (change, other): (LocalBoxFuture<'_, Done>, Meanwhile<'_>),
    ) -> Done {
        self.tick();
        self.histories.begin_data(file, new, false);
        let (changed, other) = block_on(join(change, other));
        self.tick();
        changed?;
        self.histories.end_data(file);
        if let Some(generation) = other? {
            let mark = self.histories.promise(generation);
            self.recorder.mark(mark);
        }
        Ok(())
    }

    fn change(&mut self, file: usize, new: Vec<u8>, change: LocalBoxFuture<'_, Done>) -> Done {
        self.change_with(file, new, (change, Box::pin(async { Ok(None) })))
    }

    /// A change of many items, which is made in steps.
    pub fn change_in_steps(&mut self, file: usize, new: Vec<u8>, change: LocalBoxFuture<'_, Done>) -> Done {
        self.tick();
        self.histories.begin_data(file, new, true);
        let changed = block_on(change);
        self.tick();
        changed?;
        self.histories.end_data(file);
        Ok(())
    }

    fn write_to(&self, ino: u64, at: u64, data: &[u8]) -> LocalBoxFuture<'a, Done> {
        let (engine, data, bytes) = (self.engine, Slice::copy_from(data), data.len() as u64);
        Box::pin(async move {
            let written = engine.write(ROOT, ino, at, data).await?;
            assert_eq!(written, bytes, "it was not written wholly, and there is space");
            Ok(())
        })
    }

    pub fn write(&mut self, file: usize, at: u64, data: &[u8]) -> Done {
        let ModelFile { ino, data: history, .. } = &self.histories.files[file];
        let (new, change) = (with(history.last(), at, data), self.write_to(*ino, at, data));
        self.change(file, new, change)
    }

    /// A random write, and meanwhile a commit, an fsync, or nothing.
    fn random_write(&mut self, file: usize, meanwhile: u8) -> Done {
        let (ino, size) = self.file(file);
        let at = match self.random.u8(..6) {
            0 => size,
            1 => self.random.u64(..MOST),
            _ => self.random.u64(..=size),
        };
        let at = if self.random.bool() { at / 4096 * 4096 } else { at }.min(MOST);
        let most = [600, 5000, 40_000][self.random.usize(..3)];
        let data = noise(&mut self.random, 1 + fastrand::Rng::with_seed(self.histories.clock).u64(..most));
        let new = with(self.histories.files[file].data.last(), at, &data);
        let (engine, other) = (self.engine, self.random_file());
        let other = self.histories.files[other].ino;
        let meanwhile: Meanwhile<'a> = match meanwhile {
            0 => Box::pin(async { Ok(None) }),
            1 => Box::pin(async move { engine.commit().await.map(Some) }),
            _ => Box::pin(async move { engine.fsync(ROOT, other).await.map(Some) }),
        };
        let change = self.write_to(ino, at, &data);
        self.change_with(file, new, (change, meanwhile))
    }

    fn file(&self, file: usize) -> (u64, u64) {
        let ModelFile { ino, data, .. } = &self.histories.files[file];
        (*ino, data.last().len() as u64)
    }

    /// A file with a name.
    fn random_file(&mut self) -> usize {
        self.random_named().1
    }

    fn random_named(&mut self) -> (String, usize) {
        let files = self.histories.names.last().iter().filter_map(|(name, entry)| match entry {
            Entry::File(file) => Some((name.clone(), *file)),
            Entry::Snapshot(_) => None,
        });
        let files: Vec<_> = files.collect();
        files[self.random.usize(..files.len())].clone()
    }

    /// One random step.
    pub fn step(&mut self) -> Done {
        let file = self.random_file();
        match self.random.u8(..34) {
            0..=8 => self.random_write(file, 0),
            9 | 10 => self.random_write(file, 1),
            11 => self.random_write(file, 2),
            12 | 13 => self.resize(file),
            14..=16 => self.free_or_allocate(file),
            17 | 18 => self.clone_some(file),
            19..=21 => self.sync(file),
            22 | 23 => self.sync_data(file),
            24 => self.overwrite(),
            25 | 26 => self.replace(),
            27 => self.unlink(),
            28 => self.release(),
            29 | 30 => self.snapshot(file),
            31 => self.delete_snapshot(),
            32 => self.drop_some(),
            _ => self.commit(),
        }
    }

    fn resize(&mut self, file: usize) -> Done {
        let (ino, size) = self.file(file);
        let to = if self.random.u8(..4) == 0 { self.random.u64(..MOST) } else { self.random.u64(..=size) };
        let mut new = self.histories.files[file].data.last().to_vec();
        new.resize(to as usize, 0);
        let engine = self.engine;
        self.change(file, new, Box::pin(async move { engine.truncate(ROOT, ino, to).await }))
    }

    fn free_or_allocate(&mut self, file: usize) -> Done {
        let (ino, size) = self.file(file);
        let (at, bytes) = (self.random.u64(..=size.min(MOST - 1)), self.random.u64(1..30_000));
        let (kind, keeps_size) = (self.random.u8(..3), self.random.bool());
        let mut new = self.histories.files[file].data.last().to_vec();
        let end = (at + bytes) as usize;
        if kind < 2 {
            let (from, to) = ((at as usize).min(new.len()), end.min(new.len()));
            new[from..to].fill(0);
        }
        if kind > 0 && !keeps_size {
            new.resize(new.len().max(end), 0);
        }
        let (engine, range) = (self.engine, (at, bytes));
        let change: LocalBoxFuture<'a, Done> = match kind {
            0 => Box::pin(async move { engine.punch(ROOT, ino, at, bytes).await }),
            1 => Box::pin(async move { engine.zero_range(ROOT, ino, range, keeps_size).await }),
            _ => Box::pin(async move { engine.allocate_range(ROOT, ino, range, keeps_size).await }),
        };
        self.change(file, new, change)
    }

    /// True in a filesystem without checksums, all of whose devices get tags.
    fn needs_tags(&self) -> bool {
        self.engine.devices().nodes_need_tags()
    }

    /// Files with checksums share with others that have some, and the others with each other. With tags, what may lack them
    /// is not shared with what must have them.
    fn clone_some(&mut self, target: usize) -> Done {
        let source = self.random_file();
        let of = |file: usize| &self.histories.files[file];
        let size = of(source).data.last().len() as u64;
        let is_possible =
            source != target && of(source).kind.has_sums() == of(target).kind.has_sums() && size >= 12_288;
        let is_possible = is_possible && (!self.needs_tags() || of(source).kind == of(target).kind);
        if !is_possible {
            return Ok(());
        }
        let sectors = size / 4096;
        let (from, count) = (self.random.u64(..sectors), self.random.u64(1..8));
        let (from, bytes) = (from * 4096, count.min(sectors - from) * 4096);
        let to = self.random.u64(..MOST / 4096) * 4096;
        let data = self.histories.files[source].data.last()[from as usize..(from + bytes) as usize].to_vec();
        let new = with(self.histories.files[target].data.last(), to, &data);
        let file = |file: usize, offset| FilePlace { root: ROOT, ino: self.histories.files[file].ino, offset };
        let (engine, from, to) = (self.engine, file(source, from), file(target, to));
        self.change(target, new, Box::pin(async move { engine.clone_range(from, to, bytes).await }))
    }

    fn promise(&mut self, generation: u64) {
        self.tick();
        let mark = self.histories.promise(generation);
        self.recorder.mark(mark);
    }

    pub fn sync(&mut self, file: usize) -> Done {
        self.tick();
        let generation = block_on(self.engine.fsync(ROOT, self.histories.files[file].ino))?;
        self.promise(generation);
        Ok(())
    }

    pub fn sync_data(&mut self, file: usize) -> Done {
        self.tick();
        let (before, ino) = (self.engine.durable_generation(), self.histories.files[file].ino);
        block_on(self.engine.sync_data(ROOT, ino))?;
        let generation = self.engine.durable_generation();
        if generation == before && self.histories.files[file].kind == Kind::NoCow {
            let mark = self.histories.promise_data(file);
            self.tick();
            self.recorder.mark(mark);
        } else {
            // Data that are not in place need a commit, if they changed since the last one.
            self.promise(generation);
        }
        Ok(())
    }

    /// Data in place are written and made durable again and again.
    fn overwrite(&mut self) -> Done {
        let files = self.histories.names.last().values().filter_map(|entry| match entry {
            Entry::File(file) => Some(*file),
            Entry::Snapshot(_) => None,
        });
        let is_in_place = |file: &usize| self.histories.files[*file].kind == Kind::NoCow && self.file(*file).1 > 8192;
        let files: Vec<usize> = files.filter(is_in_place).collect();
        if files.is_empty() {
            return Ok(());
        }
        let file = files[self.random.usize(..files.len())];
        let size = self.file(file).1;
        self.sync(file)?;
        for _ in 0..3 {
            let at = self.random.u64(..size - 4096);
            let bytes = self.random.u64(1..=size - at);
            let data = noise(&mut self.random, bytes);
            self.write(file, at, &data)?;
            self.sync_data(file)?;
        }
        Ok(())
    }

    pub fn commit(&mut self) -> Done {
        self.tick();
        let generation = block_on(self.engine.commit())?;
        self.promise(generation);
        Ok(())
    }

    /// A new file is written, made durable or not, and gets the name of another one.
    fn replace(&mut self) -> Done {
        let (name, old) = self.random_named();
        let kind = self.histories.files[old].kind;
        let temporary = format!("temporary{}", self.random.u64(..));
        let new = self.create(&temporary, kind)?;
        let bytes = 1 + self.random.u64(..60_000);
        let data = noise(&mut self.random, bytes);
        self.write(new, 0, &data)?;
        if self.random.bool() {
            self.sync(new)?;
        }
        self.tick();
        self.histories.begin_names(|names| {
            names.remove(&temporary);
            names.insert(name.clone(), Entry::File(new));
        });
        let (from, to) = ((ROOT, place(&temporary)), (ROOT, place(&name)));
        let renamed = block_on(self.engine.rename(from, to, RenameMode::Replace, time()))?;
        self.tick();
        self.histories.end_names();
        if let Renamed::Moved(Some(replaced)) = renamed {
            self.orphans.push(replaced.ino);
        }
        if self.random.bool() {
            return self.release();
        }
        Ok(())
    }

    /// A name goes, and another file comes.
    fn unlink(&mut self) -> Done {
        let (name, old) = self.random_named();
        let kind = self.histories.files[old].kind;
        self.unlink_name(&name)?;
        self.create(&name, kind).map(drop)
    }

    fn unlink_name(&mut self, name: &str) -> Done {
        self.tick();
        self.histories.begin_names(|names| remove(names, name));
        let unlinked = block_on(self.engine.unlink(ROOT, place(name), time()))?;
        self.tick();
        self.histories.end_names();
        self.orphans.push(unlinked.ino);
        Ok(())
    }

    /// A file goes with its name.
    pub fn unlink_file(&mut self, name: &str) -> Done {
        self.unlink_name(name)?;
        self.release()
    }

    fn release(&mut self) -> Done {
        let Some(ino) = self.orphans.pop() else { return Ok(()) };
        assert!(block_on(self.engine.release(ROOT, ino))?);
        Ok(())
    }

    /// A snapshot is made, while something is written.
    fn snapshot(&mut self, file: usize) -> Done {
        let is_snapshot = |entry: &&Entry| matches!(entry, Entry::Snapshot(_));
        if self.histories.names.last().values().filter(is_snapshot).count() >= self.most_snapshots {
            return self.delete_snapshot();
        }
        self.tick();
        let (begun, ino, size) = (self.histories.clock, self.histories.files[file].ino, self.file(file).1);
        let at = self.random.u64(..=size.min(MOST)) / 4096 * 4096;
        let bytes = self.random.u64(1..20_000);
        let data = noise(&mut self.random, bytes);
        self.histories.begin_data(file, with(self.histories.files[file].data.last(), at, &data), false);
        let name = format!("snapshot{}", self.random.u64(..));
        let uuid = self.random.u128(1..).to_le_bytes();
        let new = NewSnapshot { source: ROOT, uuid, is_read_only: self.random.bool() };
        let to = SubvolumePlace { root: ROOT, place: place(&name) };
        let (written, made) =
            block_on(join(self.write_to(ino, at, &data), self.engine.create_snapshot(new, to, time())));
        // What failed may have come after it was made.
        let id = match &made {
            Ok(id) => Some(*id),
            Err(_) => self.subvolume_at(&name),
        };
        if let Some(id) = id {
            let snapshot = self.histories.add_snapshot(id, begun);
            self.histories.begin_names(|names| insert(names, &name, Entry::Snapshot(snapshot)));
        }
        made?;
        self.tick();
        self.histories.end_names();
        written?;
        self.histories.end_data(file);
        Ok(())
    }

    fn subvolume_at(&self, name: &str) -> Option<u64> {
        match block_on(self.engine.lookup(ROOT, place(name))).ok()??.target {
            Resolved::Subvolume(id) => Some(id),
            _ => None,
        }
    }

    fn delete_snapshot(&mut self) -> Done {
        let snapshots = self.histories.names.last().iter().filter_map(|(name, entry)| match entry {
            Entry::Snapshot(snapshot) => Some((name.clone(), *snapshot)),
            Entry::File(_) => None,
        });
        let snapshots: Vec<_> = snapshots.collect();
        if snapshots.is_empty() {
            return Ok(());
        }
        let (name, snapshot) = snapshots[self.random.usize(..snapshots.len())].clone();
        self.tick();
        self.histories.begin_names(|names| remove(names, &name));
        let at = SubvolumePlace { root: ROOT, place: place(&name) };
        let id = block_on(self.engine.delete_subvolume(at, time()))?;
        assert_eq!(id, self.histories.snapshots[snapshot].id);
        self.tick();
        self.histories.end_names();
        self.dying.push(id);
        Ok(())
    }

    /// A step of the deletion of a snapshot.
    fn drop_some(&mut self) -> Done {
        use sealblock_btrfs_engine::drop::Dropped;
        let Some(id) = self.dying.last().copied() else { return self.delete_snapshot() };
        if block_on(self.engine.change(|transaction| transaction.drop_step(id)))? == Dropped::All {
            self.dying.pop();
        }
        Ok(())
    }

    /// After an error: each name leads to what it did or should have led to, and each piece of a file is what it was or
    /// should have become. From then on that is what is known.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn look_again(&mut self) -> Done {
        self.tick();
        if let Some((old, new)) = self.histories.unfinished_names() {
            let mut names = old.clone();
            for name in new.keys().chain(old.keys()) {
                names.remove(name);
                if let Some(entry) = self.entry_now(name, [old.get(name), new.get(name)])? {
                    names.insert(name.clone(), entry);
                }
            }
            assert!(names == old || names == new, "a name is neither what it was nor what it should have become");
            self.histories.begin_names(|all| *all = names);
            self.tick();
            self.histories.end_names();
        }
        for file in self.histories.unfinished_files() {
            let content = read_file(self.engine, self.histories.files[file].ino)?;
            self.tick();
            self.histories.begin_data(file, content, false);
            self.tick();
            self.histories.end_data(file);
            self.histories.assert_like_before(file);
        }
        Ok(())
    }

    /// What a name leads to.
    fn entry_now(&mut self, name: &str, known: [Option<&Entry>; 2]) -> Result<Option<Entry>, EngineError> {
        let Some(found) = block_on(self.engine.lookup(ROOT, place(name)))? else { return Ok(None) };
        let known: Vec<Entry> = known.into_iter().flatten().copied().collect();
        for entry in &known {
            match (*entry, found.target) {
                (Entry::File(file), Resolved::Inode(ino)) if self.histories.files[file].ino == ino => {
                    return Ok(Some(*entry));
                }
                (Entry::Snapshot(snapshot), Resolved::Subvolume(id)) if self.histories.snapshots[snapshot].id == id => {
                    return Ok(Some(*entry));
                }
                // It was created, and the answer was an error of what came after that.
                (Entry::File(file), Resolved::Inode(ino)) if self.histories.files[file].ino == 0 => {
                    self.histories.files[file].ino = ino;
                    return Ok(Some(*entry));
                }
                _ => {}
            }
        }
        panic!("{name} leads to {:?}, and not to one of {known:?}", found.target);
    }
}

fn read_file(engine: &Engine, ino: u64) -> Result<Vec<u8>, EngineError> {
    let mut all = Vec::new();
    loop {
        let data = block_on(engine.read(ROOT, ino, all.len() as u64, 1 << 20))?;
        if data.is_empty() {
            return Ok(all);
        }
        all.extend_from_slice(&data);
    }
}

/// What happens meanwhile; with the transaction that is durable then.
type Meanwhile<'a> = LocalBoxFuture<'a, Result<Option<u64>, EngineError>>;
