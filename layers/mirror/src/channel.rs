//! A mirror as another core than its home core uses it: replicas of its own, on which it executes reads by itself, and
//! changes for which it got a permit; all else goes to the home core. See `mirror/delegation.rs`.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use futures_channel::{mpsc, oneshot};
use futures_util::future::{Either, select};
use futures_util::stream::StreamExt;
use sealblock_block::{
    Abilities, Clock, Condition, Device, DeviceSource, DynDevice, Error, ErrorKind, Geometry, Operation, Outcome,
    Request, Response,
};
use sealblock_units::Extent;
use smallvec::SmallVec;

use crate::mirror::delegation::{Call, ChangeOutcomes, Delegation, Recall};
use crate::mirror::replica::{Replica, side_by_side};
use crate::mirror::{Mirror, Mutation};
use crate::requests::expected::is_strict;

/// Opens a mirror on other cores; see [`Mirror::elsewhere`].
#[derive(Clone)]
pub struct Elsewhere {
    delegation: Arc<Delegation>,
    geometry: Geometry,
    abilities: Abilities,
    mutation: Mutation,
}

impl<C: Clock> Mirror<C> {
    /// What opens the mirror on other cores; `None` if only its home core can use it: it is read-only, or a replica stays
    /// on that core.
    pub fn elsewhere(&self) -> Option<Elsewhere> {
        let stays = |replica: &Rc<Replica>| replica.device().is_some_and(|device| device.source().is_none());
        let is_home_only = self.is_read_only || self.replicas.borrow().iter().any(stays);
        (!is_home_only).then(|| Elsewhere {
            delegation: Arc::clone(&self.delegation),
            geometry: self.geometry.clone(),
            abilities: self.abilities,
            mutation: self.mutation,
        })
    }
}

impl Elsewhere {
    /// The mirror on the calling core, and a future that must run there beside it: it closes the core's replicas when
    /// the home core wants that, and ends with the device.
    pub fn open(&self) -> (Rc<MirrorChannel>, impl Future<Output = ()> + use<>) {
        let recalls = self.delegation.add_channel();
        let (alive, gone) = oneshot::channel();
        let channel = Rc::new(MirrorChannel {
            parts: self.clone(),
            replicas: RefCell::default(),
            in_use: RefCell::default(),
            unused: Condition::default(),
            next_read: Cell::default(),
            _alive: alive,
        });
        let recalled = answer_recalls(Rc::downgrade(&channel), recalls, gone);
        (channel, recalled)
    }
}

/// The replicas that a core has opened for itself.
struct OpenReplicas {
    generation: u64,
    sources: Vec<Arc<dyn DeviceSource>>,
    devices: SmallVec<[DynDevice; 2]>,
}

/// A mirror on another core than its home core.
pub struct MirrorChannel {
    parts: Elsewhere,
    replicas: RefCell<Option<Rc<OpenReplicas>>>,
    /// Requests that use replicas, by their generation.
    in_use: RefCell<SmallVec<[(u64, usize); 2]>>,
    unused: Condition,
    /// Counts reads, for turns.
    next_read: Cell<usize>,
    /// Dropped with this, which ends the future beside it.
    _alive: oneshot::Sender<()>,
}

impl MirrorChannel {
    /// The replicas, opened for this generation; `None` while the mirror does not delegate, or if one cannot be opened.
    fn replicas(&self) -> Option<Rc<OpenReplicas>> {
        let generation = self.parts.delegation.generation()?;
        let before = self.replicas.borrow().clone();
        if let Some(open) = before.as_ref().filter(|open| open.generation == generation) {
            return Some(Rc::clone(open));
        }
        let terms = self.parts.delegation.terms(generation)?;
        let is_same = |open: &&Rc<OpenReplicas>| {
            open.sources.len() == terms.sources.len()
                && open.sources.iter().zip(&terms.sources).all(|(one, other)| Arc::ptr_eq(one, other))
        };
        let devices = match before.as_ref().filter(is_same) {
            Some(open) => open.devices.clone(),
            None => {
                let opened: Result<_, Error> = terms.sources.iter().map(|source| source.open_here()).collect();
                let opened = opened.inspect_err(|error| {
                    tracing::debug!(%error, "a replica cannot be opened on this core; its home core executes requests");
                });
                opened.ok()?
            }
        };
        let open = Rc::new(OpenReplicas { generation, sources: terms.sources.clone(), devices });
        self.replicas.replace(Some(Rc::clone(&open)));
        Some(open)
    }

    fn is_valid(&self, generation: u64) -> bool {
        self.parts.mutation.is(Mutation::TrustOldTerms) || self.parts.delegation.is_valid(generation)
    }

    /// The replicas for a read that may be executed here, and which one is next.
    fn to_read(&self, request: &Request) -> Option<(Rc<OpenReplicas>, usize)> {
        // The generation comes first: blocks that are unlocked now may have been locked before it began.
        let open = self.replicas()?;
        let is_unlocked = self.parts.delegation.is_unlocked(request.extent()?);
        if !(is_unlocked || self.parts.mutation.is(Mutation::ReadLocked)) || is_strict(&request.expectations()) {
            return None;
        }
        let turn = self.next_read.replace(self.next_read.get().wrapping_add(1));
        let at = turn % open.devices.len();
        Some((open, at))
    }

    /// The outcome of a read, unless the home core must execute it: to repair what was bad, or since the replica may
    /// have failed meanwhile.
    fn of_read(&self, open: &OpenReplicas, outcome: Outcome) -> Option<Outcome> {
        Some(outcome).filter(|outcome| outcome.is_ok() && self.is_valid(open.generation))
    }

    async fn read_here(&self, request: &Request) -> Option<Outcome> {
        let (open, at) = self.to_read(request)?;
        let _use = self.use_replicas(open.generation);
        let device = &open.devices[at];
        let outcome = match device.try_execute(request) {
            Some(outcome) => outcome,
            None => device.execute(request.clone()).await,
        };
        self.of_read(&open, outcome)
    }

    /// Executes a change on all replicas, with a permit of the home core; `None` if it gives none.
    async fn change_here(&self, extent: Extent, request: &Request) -> Option<Outcome> {
        let open = self.replicas()?;
        // From here on: the permit may be on its way when the home core wants the replicas back.
        let _use = self.use_replicas(open.generation);
        let (answer, permit) = oneshot::channel();
        if !self.parts.delegation.call(Call::Change { extent, generation: open.generation, answer }) {
            return None;
        }
        let permit = permit.await.ok()?;
        let outcomes = execute_on(&open.devices, request).await;
        let is_done = outcomes.iter().all(Result::is_ok) && self.is_valid(open.generation);
        // The home core may have ended, which has ended the mirror.
        let _ = permit.outcomes.send(outcomes);
        if is_done {
            return Some(Ok(Response::Done));
        }
        Some(permit.ended.await.unwrap_or_else(|_ended| Err(closed())))
    }

    async fn execute_at_home(&self, request: Request) -> Outcome {
        let (answer, outcome) = oneshot::channel();
        match self.parts.delegation.call(Call::Execute { request, answer }) {
            true => outcome.await.unwrap_or_else(|_ended| Err(closed())),
            false => Err(closed()),
        }
    }

    fn use_replicas(&self, generation: u64) -> ReplicasInUse<'_> {
        let mut in_use = self.in_use.borrow_mut();
        match in_use.iter_mut().find(|(of, _)| *of == generation) {
            Some((_, requests)) => *requests += 1,
            None => in_use.push((generation, 1)),
        }
        ReplicasInUse { channel: self, generation }
    }

    fn uses_replicas_before(&self, generation: u64) -> bool {
        self.in_use.borrow().iter().any(|(of, _)| *of < generation)
    }
}

/// A request that uses the replicas of its core, until it is dropped.
struct ReplicasInUse<'a> {
    channel: &'a MirrorChannel,
    generation: u64,
}

impl Drop for ReplicasInUse<'_> {
    fn drop(&mut self) {
        let mut in_use = self.channel.in_use.borrow_mut();
        let is_last = |(of, requests): &mut (u64, usize)| {
            *requests -= usize::from(*of == self.generation);
            *requests > 0
        };
        let before = in_use.len();
        in_use.retain(is_last);
        if in_use.len() < before {
            self.channel.unused.notify();
        }
    }
}

impl Drop for MirrorChannel {
    fn drop(&mut self) {
        self.parts.delegation.channel_gone();
    }
}

impl Device for MirrorChannel {
    fn geometry(&self) -> &Geometry {
        &self.parts.geometry
    }

    fn abilities(&self) -> Abilities {
        let Elsewhere { abilities, delegation, .. } = &self.parts;
        Abilities { freshness: abilities.freshness.and(delegation.freshness()), ..*abilities }
    }

    async fn execute(&self, request: Request) -> Outcome {
        let here = match request.operation {
            Operation::Read(_) => self.read_here(&request).await,
            Operation::Write(_) | Operation::WriteZeroes { .. } | Operation::WriteUncorrectable { .. } => {
                self.change_here(request.extents.one(), &request).await
            }
            _ => None,
        };
        match here {
            Some(outcome) => outcome,
            None => self.execute_at_home(request).await,
        }
    }

    fn executes_in_place(&self) -> bool {
        self.replicas().is_some_and(|open| open.devices.iter().any(Device::executes_in_place))
    }

    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        if !matches!(request.operation, Operation::Read(_)) {
            return None;
        }
        let (open, at) = self.to_read(request)?;
        let outcome = open.devices[at].try_execute(request)?;
        self.of_read(&open, outcome)
    }
}

/// Executes a change on all devices at once.
async fn execute_on(devices: &[DynDevice], request: &Request) -> ChangeOutcomes {
    let attempt = |device: &DynDevice| device.try_execute(request).map(|outcome| outcome.map(drop));
    let mut outcomes: SmallVec<[Option<Result<(), Error>>; 2]> = devices.iter().map(attempt).collect();
    let waiting = outcomes.iter_mut().zip(devices).filter(|(outcome, _)| outcome.is_none());
    side_by_side(waiting.map(|(outcome, device)| async {
        *outcome = Some(device.execute(request.clone()).await.map(drop));
    }))
    .await;
    outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(|| Err(closed()))).collect()
}

/// Closes the replicas of a core when the home core wants that, until the channel is gone.
async fn answer_recalls(
    channel: Weak<MirrorChannel>,
    mut recalls: mpsc::UnboundedReceiver<Recall>,
    mut gone: oneshot::Receiver<()>,
) {
    while let Either::Left((Some(Recall { before, answer }), _)) = select(recalls.next(), &mut gone).await {
        let Some(channel) = channel.upgrade() else { return };
        channel.replicas.borrow_mut().take_if(|open| open.generation < before);
        channel.unused.wait_until(|| !channel.uses_replicas_before(before)).await;
        // The home core does not wait for ever.
        let _ = answer.send(());
    }
}

#[cold]
fn closed() -> Error {
    ErrorKind::Unreachable { reason: "the mirror is closed".to_owned() }.into()
}
