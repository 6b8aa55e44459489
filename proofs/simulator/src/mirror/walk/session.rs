//! One open of the mirror: its hosts, and the events of its replicas.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{Device, Durability, DynDevice, Error, ErrorKind, Expectations, Outcome, Request, Response};
use sealblock_integrity::Sealed;
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_layers_mirror::{
    CreateOptions, OpenMirror, OpenOptions, Reopen, ReplicaSource, TestHooks, create_with_hooks,
    mark_written_alone_with_hooks, open_with_hooks,
};
use sealblock_runtime_memory::Slice;
use sealblock_units::{Extent, Lba};

use super::harness::{Harness, MirrorHandle};
use super::linked::LinkedReplica;
use super::model::{ImageInfo, Stamp};
use super::replica::{BLOCKS, Image, Replica, ReplicaLink, SIZE, content, stamp_of, tags};
use super::rules::{GoodCopies, adopt, check_in_sync, check_refusal};
use crate::executor::Executor;

/// The plan of an open.
#[derive(Clone, Debug)]
pub struct SessionPlan {
    /// The named replicas, in this order.
    pub named: Vec<usize>,
    /// Which of them are present.
    pub present: Vec<usize>,
    pub read_only: bool,
    /// True if the mirror is made, from the content of the first replica.
    pub creates: bool,
    pub hooks: TestHooks,
    /// The number of steps.
    pub steps: u64,
    /// True if it is closed at the end, not just dropped.
    pub closes: bool,
    /// The percentage of steps with damage.
    pub damage_percent: u64,
}

/// An open mirror.
pub struct Host {
    pub harness: Rc<Harness>,
    pub executor: Executor,
    pub stack: DynDevice,
    pub mirror: MirrorHandle,
    pub plan: SessionPlan,
    /// Blocks that were changed or damaged in this step.
    touched: std::cell::RefCell<BTreeSet<usize>>,
    /// Earlier images of replicas.
    pub older: Vec<(usize, Image)>,
}

/// The result of a session.
#[derive(Default)]
pub struct SessionResult {
    pub opened: bool,
    /// Replicas that were added and removed.
    pub added: Vec<usize>,
    pub removed: Vec<usize>,
}

fn reopen(harness: &Rc<Harness>, replica: &Rc<Replica>, executor: &Executor) -> Reopen {
    let (harness, replica, executor) = (harness.clone(), replica.clone(), executor.clone());
    Box::new(move || {
        let found = if replica.link.get() == ReplicaLink::Gone {
            Err("it is offline".to_owned())
        } else {
            Ok(linked(&harness, &replica, &executor))
        };
        Box::pin(std::future::ready(found))
    })
}

fn linked(harness: &Rc<Harness>, replica: &Rc<Replica>, executor: &Executor) -> DynDevice {
    DynDevice::new(replica.name.as_str(), LinkedReplica::new(replica, harness, executor))
}

fn source(harness: &Rc<Harness>, replica: &Rc<Replica>, executor: &Executor) -> ReplicaSource {
    let again = reopen(harness, replica, executor);
    let device = if replica.link.get() == ReplicaLink::Gone {
        Err("it is offline".to_owned())
    } else {
        Ok(linked(harness, replica, executor))
    };
    ReplicaSource::new(&*replica.name, device, Some(again))
}

/// Opens the mirror as planned and uses it. Results are stored in `came` as soon as they exist, because the machine may
/// stop.
pub async fn run(
    harness: Rc<Harness>,
    executor: Executor,
    plan: SessionPlan,
    older: Vec<(usize, Image)>,
    result: Rc<std::cell::RefCell<SessionResult>>,
) {
    // Releases the requests that a stopped session held, also on replicas that were added later.
    harness.replicas.iter().for_each(|replica| replica.held.set(None));
    for replica in plan.named.iter().map(|number| &harness.replicas[*number]) {
        replica.is_swapped.set(false);
        replica.link.set(if plan.present.contains(&replica.number) { ReplicaLink::Up } else { ReplicaLink::Gone });
    }
    let Some(opened) = open(&harness, &executor, &plan).await else { return };
    result.borrow_mut().opened = true;
    adopt(&harness, opened.mirror.clone(), &plan.named, &plan.present);
    drop(executor.spawn("the mirror's worker", opened.worker.run()));
    let stack = DynDevice::new("mirror", SharedMirror(opened.mirror.clone()));
    let host = Host { harness, executor, stack, mirror: opened.mirror, plan, touched: Default::default(), older };
    host.log_states();
    check_in_sync(&host.harness);
    host.steps(&result).await;
    host.end().await;
}

/// Opens or makes the mirror. If the open is refused, the refusal must be correct.
async fn open(harness: &Rc<Harness>, executor: &Executor, plan: &SessionPlan) -> Option<OpenMirror<Executor>> {
    let named = plan.named.iter().map(|number| &harness.replicas[*number]);
    let sources = named.map(|replica| source(harness, replica, executor)).collect();
    let mut random = [0; 16];
    random[..8].copy_from_slice(&harness.random.word().to_le_bytes());
    random[8..].copy_from_slice(&harness.random.word().to_le_bytes());
    if plan.creates {
        let options = CreateOptions { random, name: None, from: Some(0), force: true };
        let made = create_with_hooks(sources, executor.clone(), options, plan.hooks).await;
        return made.map_err(|why| harness.find(format!("a mirror cannot be made: {why}"))).ok();
    }
    let options = OpenOptions { is_read_only: plan.read_only, accepts_lost_label: false, random };
    let opened = open_with_hooks(sources, executor.clone(), options, plan.hooks).await;
    opened.map_err(|why| check_refusal(harness, &plan.named, &plan.present, &why)).ok()
}

/// Marks a replica's label as written alone; `done` is set once that has completed.
pub async fn mark_alone(
    harness: Rc<Harness>,
    executor: Executor,
    (number, hooks): (usize, TestHooks),
    done: Rc<std::cell::Cell<bool>>,
) {
    let device = linked(&harness, &harness.replicas[number], &executor);
    match mark_written_alone_with_hooks(&device, hooks).await {
        Ok(()) => done.set(true),
        Err(why) => harness.find(format!("a replica cannot be marked as written alone: {why}")),
    }
}

/// The mirror as a device, shared by its host and the walk.
struct SharedMirror(MirrorHandle);

impl Device for SharedMirror {
    fn geometry(&self) -> &sealblock_block::Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> sealblock_block::Abilities {
        self.0.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        self.0.execute(request).await
    }
}

impl Host {
    pub fn log(&self, link: String) {
        self.harness.log(format!("    {link}"));
    }

    fn log_states(&self) {
        let description = self.mirror.describe();
        let replicas: Vec<String> = description
            .replicas
            .iter()
            .map(|replica| {
                format!("{} {}{}", replica.name, replica.state.as_str(), if replica.is_online { "" } else { " (away)" })
            })
            .collect();
        self.log(format!("{}; unsettled {} bytes", replicas.join(", "), description.dirty_bytes));
    }

    async fn steps(&self, result: &Rc<std::cell::RefCell<SessionResult>>) {
        for _ in 0..self.plan.steps {
            if self.harness.found().is_some() {
                return;
            }
            self.touched.borrow_mut().clear();
            let before = GoodCopies::there(&self.harness);
            self.step(result).await;
            self.harness.record_run();
            before.are_kept(&self.harness, &self.touched.borrow());
            check_in_sync(&self.harness);
        }
    }

    async fn step(&self, result: &Rc<std::cell::RefCell<SessionResult>>) {
        let random = &self.harness.random;
        if random.chance(self.plan.damage_percent) {
            return self.damage();
        }
        let read_only = self.plan.read_only;
        match random.below(100) {
            0..28 if !read_only => self.write(self.extent()).await,
            28..32 if !read_only => self.zero().await,
            32..42 if !read_only => drop(self.flush().await),
            42..44 if !read_only => self.write_behind().await,
            44..46 if !read_only => self.fail_beside_flush().await,
            42..62 => self.time().await,
            62..70 => self.disconnect(&self.named()),
            70..78 => self.reconnect(&self.named()),
            78..81 if !read_only => self.fill(),
            81..84 => self.verify().await,
            84..88 if !read_only => self.repair().await,
            88..90 if !read_only => self.add(result).await,
            90..92 if !read_only => self.replace(result).await,
            92..95 if !read_only => self.remove(result).await,
            95..97 if !read_only => self.accept().await,
            _ => self.read(self.extent()).await,
        }
    }

    fn extent(&self) -> Extent {
        let random = &self.harness.random;
        let blocks = *random.pick(&[1, 1, 2, 5]);
        let first = random.below(BLOCKS - blocks + 1);
        Extent::from_raw(first, blocks).expect("a few of the replica's blocks are an extent")
    }

    /// Checks whether a request may fail with this error. `before` are the replicas that were intact when it was sent.
    fn check_failure(&self, what: &str, error: &Error, before: &[(usize, u64)]) {
        self.harness.failed.set(self.harness.failed.get() + 1);
        let now = self.harness.well();
        if let Some((number, _)) = before.iter().find(|replica| now.contains(replica)) {
            let name = &self.harness.replicas[*number].name;
            self.harness.find(format!("{what} fails although {name} was well all the time: {error}"));
        }
    }

    async fn change(&self, what: &str, extent: Extent, stamp: Stamp, request: Request) {
        let blocks: Vec<(usize, Stamp)> = extent.iter().map(|lba| (lba.get() as usize, stamp)).collect();
        self.touched.borrow_mut().extend(blocks.iter().map(|(block, _)| *block));
        let before = self.harness.well();
        self.harness.advance(|model, node, state| model.begin(node, state, &blocks));
        match self.stack.execute(request).await {
            Ok(_) => {
                self.log(format!("{what} {stamp} to {extent}"));
                self.harness.completed.set(self.harness.completed.get() + 1);
                self.harness.advance(|model, node, state| model.acknowledge(node, state, &blocks));
            }
            Err(error) => {
                self.log(format!("{what} {stamp} to {extent} fails: {error}"));
                self.check_failure(what, &error, &before);
            }
        }
    }

    pub async fn write(&self, extent: Extent) {
        let stamp = self.harness.fresh();
        let bytes: Vec<u8> = extent.iter().flat_map(|lba| content(lba, stamp)).collect();
        let data = Sealed::seal(Slice::copy_from(&bytes), SIZE, self.harness.format, &tags(extent));
        let write = Request::write(extent, data, Durability::Volatile);
        self.change("write", extent, stamp, write).await;
    }

    async fn zero(&self) {
        let (extent, may_unmap) = (self.extent(), self.harness.random.chance(50));
        let zero = Request::write_zeroes(extent, may_unmap, Durability::Volatile);
        self.change("zero", extent, 0, zero).await;
    }

    /// Returns true if it was acknowledged.
    async fn flush(&self) -> bool {
        let before = self.harness.well();
        match self.stack.execute(Request::flush()).await {
            Ok(_) => {
                self.log("flush".to_owned());
                self.harness.advance(|model, node, state| model.flush(node, state));
                true
            }
            Err(error) => {
                self.log(format!("flush fails: {error}"));
                // The possible loss of unflushed writes is reported once.
                if !matches!(error.kind(), ErrorKind::Media { .. }) {
                    self.check_failure("flush", &error, &before);
                }
                false
            }
        }
    }

    pub async fn read(&self, extent: Extent) {
        let (mut before, mut had) = (self.harness.well(), self.good_copies());
        match self.stack.execute(Request::read(extent, Expectations::NONE)).await {
            Ok(Response::Data(data)) => extent.iter().enumerate().for_each(|(index, lba)| {
                self.see(lba, &data.slice(index, 1).joined_data());
            }),
            Ok(other) => self.harness.find(format!("a read was answered with {other:?}")),
            Err(error) => {
                if self.plan.read_only && self.mirror.describe().dirty_bytes > 0 {
                    // The contents of the members differ there, and the one that was read may be gone or damaged since.
                    before.clear();
                    had.clear();
                }
                match error.bad_blocks() {
                    Some(bad_blocks) => {
                        bad_blocks.as_slice().iter().for_each(|bad_block| self.check_loss(bad_block.lba, &had))
                    }
                    None => self.check_failure("read", &error, &before),
                }
            }
        }
    }

    /// A host reads a block.
    fn see(&self, lba: Lba, data: &[u8]) {
        let block = lba.get() as usize;
        let Some(stamp) = stamp_of(lba, data) else {
            return self.harness.find(format!("block {lba} reads as content that was never written there"));
        };
        if let Some(session) = self.harness.session.borrow_mut().as_mut() {
            self.harness.checked.set(self.harness.checked.get() + 1);
            if !session.state.may_hold(block).contains(&stamp) {
                let may = session.state.may_hold(block);
                self.harness.find(format!("block {block} reads as {stamp}, not {may:?}"));
            }
            session.state.pin(block, stamp);
        }
    }

    /// The good blocks of intact replicas, each replica with the epoch of its open.
    fn good_copies(&self) -> Vec<((usize, u64), usize)> {
        let of = |replica: (usize, u64)| {
            let copies = self.harness.copies(&self.harness.replicas[replica.0]).into_iter().enumerate();
            copies.filter(|(_, copy)| copy.is_some()).map(move |(block, _)| (replica, block))
        };
        self.harness.well().into_iter().flat_map(of).collect()
    }

    /// A block is reported as lost, so no replica that was intact all the time may have had it.
    fn check_loss(&self, lba: Lba, had: &[((usize, u64), usize)]) {
        let now = self.harness.well();
        let is_it = |(replica, block): &&((usize, u64), usize)| *block == lba.get() as usize && now.contains(replica);
        if let Some(((number, _), _)) = had.iter().find(is_it) {
            let name = &self.harness.replicas[*number].name;
            self.harness.find(format!("block {lba} does not read although {name} has it"));
        }
    }

    /// Lets the mirror's background work run.
    async fn time(&self) {
        self.wait(*self.harness.random.pick(&[1, 3, 6, 20])).await;
    }

    pub async fn wait(&self, seconds: u64) {
        self.executor.delay(Duration::from_secs(seconds)).await;
        self.log(format!("{seconds} s later:"));
        self.log_states();
    }

    pub fn named(&self) -> Rc<Replica> {
        self.harness.replicas[*self.harness.random.pick(&self.plan.named)].clone()
    }

    pub fn disconnect(&self, replica: &Replica) {
        if replica.link.get() == ReplicaLink::Gone {
            return;
        }
        self.log(format!("{} goes away", replica.name));
        replica.break_link(ReplicaLink::Gone);
    }

    pub fn reconnect(&self, replica: &Replica) {
        if replica.link.get() == ReplicaLink::Up {
            return;
        }
        let random = &self.harness.random;
        let images: Vec<&Image> =
            self.older.iter().filter(|(number, _)| *number == replica.number).map(|(_, image)| image).collect();
        if replica.link.get() == ReplicaLink::Gone && !images.is_empty() && random.chance(20) {
            self.log(format!("{} is put back to an older image", replica.name));
            self.touched.borrow_mut().extend(0..BLOCKS as usize);
            self.harness.put(replica.number, (*random.pick(&images)).clone());
        }
        self.log(format!("{} is there again", replica.name));
        replica.link.set(ReplicaLink::Up);
    }

    fn fill(&self) {
        let replica = self.named();
        if replica.link.get() == ReplicaLink::Up {
            self.log(format!("{} fails changes", replica.name));
            replica.break_link(ReplicaLink::Full);
        }
    }

    /// Damages blocks of one replica, or of all replicas in sync.
    fn damage(&self) {
        let extent = self.extent();
        let replicas = if self.harness.random.chance(40) { self.harness.in_sync() } else { vec![self.named()] };
        for (replica, lba) in replicas.iter().flat_map(|replica| extent.iter().map(move |lba| (replica, lba))) {
            if replica.image.borrow_mut().damage(lba, &self.harness.random) {
                self.touched.borrow_mut().insert(lba.get() as usize);
                self.log(format!("block {lba} of {} is damaged", replica.name));
            }
        }
    }

    fn whole(&self) -> Extent {
        Extent::from_raw(0, BLOCKS).expect("the replica's blocks are an extent")
    }

    async fn verify(&self) {
        let (extent, before) = (self.whole(), self.harness.well());
        match self.stack.execute(Request::verify(extent, Expectations::NONE)).await {
            Ok(_) => {
                self.log("verify: clean".to_owned());
                for (number, _) in self.harness.well() {
                    let replica = &self.harness.replicas[number];
                    let bad = (0..BLOCKS as usize).find(|block| self.harness.copy(replica, *block).is_none());
                    if let Some(block) = bad.filter(|_| before.contains(&(number, replica.epoch.get()))) {
                        self.harness.find(format!("verify is clean and block {block} of {} is bad", replica.name));
                    }
                }
            }
            Err(error) => {
                self.log(format!("verify: {error}"));
                if error.bad_blocks().is_none() {
                    self.check_failure("verify", &error, &before);
                }
            }
        }
    }

    async fn repair(&self) {
        let (extent, before) = (self.whole(), self.harness.well());
        let good = self.good_copies();
        let had: Vec<bool> = (0..BLOCKS as usize).map(|block| good.iter().any(|(_, other)| *other == block)).collect();
        let outcome = self.stack.execute(Request::repair(extent)).await;
        self.log(format!("repair: {:?}", outcome.as_ref().map(|_| "clean").map_err(ToString::to_string)));
        if let Err(error) = &outcome
            && error.bad_blocks().is_none()
        {
            return self.check_failure("repair", error, &before);
        }
        let now = self.harness.well();
        for (number, _) in
            now.iter().filter(|replica| before.contains(replica) && before.iter().all(|was| now.contains(was)))
        {
            let replica = &self.harness.replicas[*number];
            let is_bad = |block: &usize| had[*block] && self.harness.copy(replica, *block).is_none();
            if let Some(block) = (0..BLOCKS as usize).find(is_bad) {
                self.harness.find(format!("block {block} of {} is not repaired", replica.name));
            }
        }
    }

    /// A device that is not a member: blank, or with obsolete data.
    fn newcomer(&self, result: &Rc<std::cell::RefCell<SessionResult>>) -> Option<Rc<Replica>> {
        let is_free = |replica: &&Rc<Replica>| {
            !self.plan.named.contains(&replica.number) && !result.borrow().added.contains(&replica.number)
        };
        let replica = self.harness.replicas.iter().find(is_free).cloned()?;
        self.prepare(&replica, result);
        Some(replica)
    }

    fn prepare(&self, replica: &Rc<Replica>, result: &Rc<std::cell::RefCell<SessionResult>>) {
        let mut image = Image::blank(ImageInfo { is_new: true, ..ImageInfo::default() });
        if self.harness.random.chance(40) {
            image.fill(&self.harness.random, self.harness.format, self.harness.fresh());
        }
        replica.link.set(ReplicaLink::Up);
        self.harness.put(replica.number, image);
        result.borrow_mut().added.push(replica.number);
    }

    async fn add(&self, result: &Rc<std::cell::RefCell<SessionResult>>) {
        let Some(replica) = self.newcomer(result) else { return };
        self.log(format!("{} is being added", replica.name));
        let added = self.mirror.add(source(&self.harness, &replica, &self.executor), true).await;
        self.log(format!("{} is added: {:?}", replica.name, added.map_err(|error| error.to_string())));
    }

    /// Replaces a replica by another device, or by its own device after it was wiped.
    async fn replace(&self, result: &Rc<std::cell::RefCell<SessionResult>>) {
        let old = self.named();
        let is_wiped = old.link.get() != ReplicaLink::Gone && self.harness.labelled(old.number).is_none();
        let new = if is_wiped { Some(old.clone()) } else { self.newcomer(result) };
        let Some(new) = new.filter(|_| !result.borrow().removed.contains(&old.number)) else { return };
        if is_wiped {
            self.prepare(&new, result);
        }
        let was_current = matches!(self.harness.replica_state(&old), Some((ReplicaState::InSync, true)));
        self.log(format!("{} is being replaced by {}", old.name, new.name));
        let done = self.mirror.replace(&old.name, source(&self.harness, &new, &self.executor), true).await;
        self.log(format!("{} is replaced: {:?}", old.name, done.as_ref().map_err(ToString::to_string)));
        if done.is_ok() && !was_current && !is_wiped {
            result.borrow_mut().removed.push(old.number);
        }
    }

    /// Accepts a replica's older copies of lost blocks as their content.
    async fn accept(&self) {
        let replica = self.named();
        // No label lists yet the older copies that it just made.
        let kept = self.mirror.stale_blocks(&replica.name);
        let copy = |block: &Lba| Some((block.get() as usize, self.harness.copy(&replica, block.get() as usize)?));
        let taken: Vec<(usize, Stamp)> = kept.iter().filter_map(copy).collect();
        self.touched.borrow_mut().extend(taken.iter().map(|(block, _)| *block));
        self.harness.advance(|model, node, state| model.begin(node, state, &taken));
        let done = self.mirror.accept_stale(&replica.name).await;
        if !kept.is_empty() || done.as_ref().is_ok_and(|blocks| *blocks > 0) {
            let done = done.as_ref().map_err(ToString::to_string);
            self.log(format!("older copies of {kept:?} on {} are taken: {done:?}", replica.name));
        }
        if done.is_ok_and(|blocks| blocks == taken.len() as u64 && blocks > 0) {
            self.harness.advance(|model, node, state| model.acknowledge(node, state, &taken));
        }
    }

    async fn remove(&self, result: &Rc<std::cell::RefCell<SessionResult>>) {
        let members =
            self.mirror.describe().replicas.iter().filter(|replica| replica.state != ReplicaState::Removed).count();
        let replica = self.named();
        if members < 3 || result.borrow().removed.contains(&replica.number) {
            return;
        }
        self.log(format!("{} is being removed", replica.name));
        let replica_state = self.harness.replica_state(&replica);
        let is_told = replica.link.get() == ReplicaLink::Up
            && replica.is_reached()
            && matches!(replica_state, Some((ReplicaState::InSync | ReplicaState::Resyncing, true)));
        let removed = self.mirror.remove(&replica.name).await;
        self.log(format!("{} is removed: {:?}", replica.name, removed.as_ref().map_err(ToString::to_string)));
        if removed.is_ok() {
            replica.image.borrow_mut().known.is_removed |= is_told;
            result.borrow_mut().removed.push(replica.number);
        }
    }

    /// True if labels list only replicas as in sync that really are. One that is not has unflushed writes from before
    /// this open.
    fn has_gone_on(&self) -> bool {
        let in_sync: Vec<usize> = self.harness.in_sync().iter().map(|replica| replica.number).collect();
        let id = |number: usize| self.harness.labelled(number).map(|(_, label)| label.replicas[label.own_index].id);
        let ids: Vec<_> = in_sync.iter().filter_map(|number| id(*number)).collect();
        let labels = in_sync.iter().filter_map(|number| self.harness.labelled(*number));
        let called = labels.flat_map(|(_, label)| label.replicas);
        called.filter(|member| member.state == ReplicaState::InSync).all(|member| ids.contains(&member.id))
    }

    /// Leaves the mirror, closed or not.
    async fn end(&self) {
        if self.harness.random.chance(if self.plan.damage_percent > 5 { 60 } else { 30 }) {
            for piece in self.whole().split_aligned(self.mirror.geometry().limits.max_transfer_blocks) {
                self.read(piece).await;
            }
        }
        if !self.plan.closes {
            self.log("it is left as it is".to_owned());
            return self.executor.halt();
        }
        match self.mirror.close().await {
            Ok(()) => {
                self.log("it is closed".to_owned());
                if !self.plan.read_only && self.has_gone_on() {
                    self.harness.advance(|model, node, state| model.flush(node, state));
                }
            }
            Err(error) => self.log(format!("it does not close: {error}")),
        }
    }
}
