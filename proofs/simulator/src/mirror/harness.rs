//! What a machine with a mirror knows from outside: which replicas are in sync and online, what hosts changed, and what
//! may fail.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{Abilities, Clock, Device, Error, ErrorKind, Geometry, Outcome, Request, RequestKind};
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_layers_mirror::{Mirror, MirrorChannel, MirrorInfo, ReplicaInfo};
use sealblock_units::Extent;

use super::replica_env::{ReplicaEnv, ReplicaLink};
use crate::client::RunContext;
use crate::executor::Executor;
use crate::random::{Random, Trace};

/// A clock that shortens every pause by a factor, so that the mirror's pauses of seconds overlap with requests of
/// microseconds.
#[derive(Clone)]
pub(super) struct FasterClock {
    pub executor: Executor,
    pub factor: u32,
}

impl Clock for FasterClock {
    fn sleep(&self, delay: Duration) -> impl Future<Output = ()> {
        self.executor.delay(delay / self.factor)
    }
}

/// The mirror of one machine.
pub(super) type MirrorHandle = Rc<Mirror<FasterClock>>;

/// The state that the parts of one machine share.
pub(super) struct Harness {
    pub context: Rc<RunContext>,
    pub envs: RefCell<Vec<Rc<ReplicaEnv>>>,
    pub mirror: RefCell<Option<MirrorHandle>>,
    pub region_shift: u32,
    pub trace: Trace,
    pub log_lines: RefCell<Vec<String>>,
    /// True if a disk was damaged on purpose.
    pub is_damaged: Cell<bool>,
    /// How often the only replica with all data was reopened, each of which may lose unflushed writes.
    pub losses: Cell<u64>,
    /// For each replica, whether it was out of sync from before some change was sent until that change completed.
    pub missed_writes: RefCell<Vec<bool>>,
    pub completed_changes: Cell<u64>,
    /// A request of a replica ends when its future is dropped, as that of a volume in this process does; otherwise it goes on, as
    /// that of a replica at a server does.
    pub drops_requests: Cell<bool>,
    /// The number of comparisons of quiesced replicas.
    pub quiesced_count: Cell<u64>,
    /// True if the replicas are named in random order, so that an offline one is identified only once it is online.
    pub is_any_order: Cell<bool>,
    /// True if a replica may be refused because its last label write may have been in flight.
    pub is_in_doubt: Cell<bool>,
    /// Starts and ends of I/Os of all replicas until the machine stops.
    pub fuse: RefCell<Option<Rc<Cell<u64>>>>,
}

impl Harness {
    /// A machine for this number of replicas, which are added later.
    pub fn new(context: Rc<RunContext>, region_shift: u32, replicas: usize, trace: Trace) -> Harness {
        Harness {
            context,
            region_shift,
            trace,
            envs: RefCell::default(),
            mirror: RefCell::default(),
            log_lines: RefCell::default(),
            is_damaged: Cell::default(),
            losses: Cell::default(),
            missed_writes: vec![false; replicas].into(),
            completed_changes: Cell::default(),
            drops_requests: Cell::default(),
            quiesced_count: Cell::default(),
            is_any_order: Cell::default(),
            is_in_doubt: Cell::default(),
            fuse: RefCell::default(),
        }
    }

    pub fn find(&self, finding: String) {
        self.context.find(finding);
    }

    pub fn log(&self, line: String) {
        self.log_lines.borrow_mut().push(line);
    }

    /// The replicas that should be in use.
    pub fn members(&self) -> Vec<Rc<ReplicaEnv>> {
        let is_member = |env: &&Rc<ReplicaEnv>| env.is_member.get() && !env.is_removed.get();
        self.envs.borrow().iter().filter(is_member).cloned().collect()
    }

    pub fn has_unlabelled_replica(&self) -> bool {
        self.envs.borrow().iter().any(|env| env.has_no_label)
    }

    pub fn regions(&self, extent: Extent) -> std::ops::RangeInclusive<u64> {
        extent.start().get() >> self.region_shift..=extent.last().get() >> self.region_shift
    }

    pub fn describe(&self) -> Option<MirrorInfo> {
        self.mirror.borrow().as_ref().map(|mirror| mirror.describe())
    }

    /// The state of this replica, and whether it is online, as the mirror reports it.
    pub fn state(&self, env: &ReplicaEnv) -> Option<(ReplicaState, bool)> {
        let description = self.describe()?;
        // A replica that could not be added leaves an entry with its name that is marked as removed.
        let named = description.replicas.iter().filter(|replica| replica.name == env.name);
        named
            .min_by_key(|replica| replica.state == ReplicaState::Removed)
            .map(|replica| (replica.state, replica.is_online))
    }

    /// A replica's disk lost unsynced writes. If no other replica is in sync, the mirror has lost them too.
    pub fn restarted(&self, env: &ReplicaEnv) {
        let Some(description) = self.describe() else { return };
        let is_current = |name: &str| {
            description.replicas.iter().any(|replica| replica.name == name && replica.state == ReplicaState::InSync)
        };
        let others = description
            .replicas
            .iter()
            .any(|replica| replica.state == ReplicaState::InSync && replica.name != env.name);
        if is_current(&env.name) && !others {
            self.losses.set(self.losses.get() + 1);
            self.context.checker.borrow_mut().lose();
        }
    }

    /// Changes the state of the link, which also affects requests in flight.
    pub fn break_link(&self, env: &ReplicaEnv, line: ReplicaLink) {
        // The replica may be in sync until the mirror notices the change.
        self.clear_in_sync();
        env.link.set(line);
        env.breaks.set(env.breaks.get() + 1);
        if line == ReplicaLink::Gone {
            env.epoch.set(env.epoch.get() + 1);
        }
        env.changed.notify();
    }

    /// Replicas that can execute every request now, each with the number of events of its link so far. Replicas without
    /// a label do not count, because they cannot store one.
    fn well(&self) -> Vec<(usize, u64)> {
        let Some(description) = self.describe() else { return Vec::new() };
        let is_well = |env: &&Rc<ReplicaEnv>| {
            let is_it = |replica: &ReplicaInfo| {
                replica.name == env.name && replica.is_online && replica.state == ReplicaState::InSync
            };
            env.link.get() == ReplicaLink::Up && !env.has_no_label && description.replicas.iter().any(is_it)
        };
        self.envs.borrow().iter().filter(is_well).map(|env| (env.number, env.breaks.get())).collect()
    }

    /// Hosts are about to change blocks.
    fn begin_change(&self, extents: &[Extent]) {
        for env in self.envs.borrow().iter() {
            env.allowed.borrow_mut().extend(extents.iter().flat_map(|extent| self.regions(*extent)));
        }
    }

    /// The change succeeded or failed. `left` are the replicas that were out of sync before the change.
    fn end_change(&self, is_done: bool, left: &[usize]) {
        if !is_done {
            return;
        }
        self.completed_changes.set(self.completed_changes.get() + 1);
        let now = self.out_of_sync();
        // A replica that failed during the change may have executed it, and the other labels may not list it as out of
        // sync yet.
        left.iter()
            .filter(|replica| now.contains(replica))
            .for_each(|replica| self.missed_writes.borrow_mut()[*replica] = true);
        self.clear_in_sync();
    }

    /// A replica that is in sync again has every write that it had missed, by a resync.
    pub fn clear_in_sync(&self) {
        for env in self.envs.borrow().iter() {
            if matches!(self.state(env), Some((ReplicaState::InSync, _))) {
                self.missed_writes.borrow_mut()[env.number] = false;
            }
        }
    }

    /// Replicas that are out of sync now, or not members.
    fn out_of_sync(&self) -> Vec<usize> {
        let is_left = |env: &&Rc<ReplicaEnv>| {
            !matches!(self.state(env), Some((ReplicaState::InSync | ReplicaState::Resyncing, _)))
        };
        self.envs.borrow().iter().filter(is_left).map(|env| env.number).collect()
    }

    /// Reports a failed request as a finding if a replica was in sync and online from its start to its end.
    fn check_failure(&self, kind: RequestKind, error: &Error, before: &[(usize, u64)], losses: u64) {
        let is_planned = match error.kind() {
            // The client itself knows which blocks may be unreadable or different.
            ErrorKind::Integrity(_) | ErrorKind::Miscompare { .. } => return,
            ErrorKind::Media { .. } if kind == RequestKind::Flush => losses > 0,
            _ => false,
        };
        let now = self.well();
        if let Some((replica, _)) = before.iter().find(|replica| !is_planned && now.contains(replica)) {
            self.find(format!("{} failed although replica {replica} was well all the time: {error}", kind.name()));
        }
    }
}

/// The mirror as hosts see it, with every request checked.
pub(super) struct WatchedMirror {
    pub harness: Rc<Harness>,
    pub mirror: MirrorHandle,
    /// The mirror on other cores than its home core.
    pub channels: Vec<Rc<MirrorChannel>>,
    /// Which core each request comes from.
    pub random: Random,
}

impl Device for WatchedMirror {
    fn geometry(&self) -> &Geometry {
        self.mirror.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.mirror.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        let (kind, before) = (request.kind(), self.harness.well());
        let extents = match kind {
            RequestKind::Repair => Vec::new(),
            _ => request.changed_extents().to_vec(),
        };
        if extents.is_empty() {
            return self.execute_watched(request, kind, &before).await;
        }
        let left = self.harness.out_of_sync();
        self.harness.begin_change(&extents);
        let outcome = self.execute_watched(request, kind, &before).await;
        self.harness.end_change(outcome.is_ok(), &left);
        outcome
    }
}

impl WatchedMirror {
    /// Executes a request, and checks whether it may fail in the way that it does.
    async fn execute_watched(&self, request: Request, kind: RequestKind, before: &[(usize, u64)]) -> Outcome {
        let outcome = match self.channels.get(self.random.below(self.channels.len() as u64 + 1) as usize) {
            Some(channel) => channel.execute(request).await,
            None => self.mirror.execute(request).await,
        };
        if let Err(error) = &outcome {
            self.harness.check_failure(kind, error, before, self.harness.losses.get());
        }
        outcome
    }
}
