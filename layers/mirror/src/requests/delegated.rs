//! The home core's part of requests that other cores execute by themselves; see `mirror/delegation.rs`.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_channel::mpsc::UnboundedReceiver;
use futures_channel::oneshot;
use futures_util::future::{Either, LocalBoxFuture, join_all, select};
use futures_util::stream::{FuturesUnordered, StreamExt};
use sealblock_block::{Clock, DeviceSource, Freshness, Response};
use sealblock_units::Extent;

use crate::label::ReplicaState;
use crate::mirror::delegation::{Call, Permit};
use crate::mirror::{Mirror, MirrorState, Mutation};
use crate::requests::change::{NosyncOnDrop, ReplicaResult, ReplicaResults};

/// How long the home core waits for others to close their replicas: a request may hang there, and a replica that is in
/// use is opened later.
const RECALL_LIMIT: Duration = Duration::from_secs(5);

impl<C: Clock> Mirror<C> {
    /// From now on the home core executes all requests. To be called before anything ends for which others rely on the
    /// mirror's state: a replica that is in sync and online, equal copies, or that there are no labels to write.
    pub(crate) fn revoke(&self) {
        if !self.mutation.is(Mutation::KeepDelegating) {
            self.delegation.revoke();
        }
    }

    /// Has the other cores close their replicas, so that the devices can be closed or opened again.
    pub(crate) async fn recall(&self) {
        self.delegation.revoke();
        let answers = self.delegation.recall();
        if !answers.is_empty() {
            select(join_all(answers), pin!(self.clock.sleep(RECALL_LIMIT))).await;
        }
    }

    /// Publishes what was found of the freshness of the mirror.
    pub(crate) fn set_found_freshness(&self, found: Freshness) {
        if !found.is_current() {
            self.revoke();
        }
        self.found_freshness.set(found);
        self.delegation.set_freshness(found);
    }

    /// What other cores open the replicas with; `None` if not every one can be opened elsewhere.
    pub(crate) fn replica_sources(&self) -> Option<Vec<Arc<dyn DeviceSource>>> {
        let replicas = self.replicas.borrow();
        let members = replicas.iter().filter(|replica| replica.state.get() != ReplicaState::Removed);
        members.map(|replica| replica.device()?.source()).collect()
    }

    /// True if another core may execute requests without knowing more of the mirror.
    fn may_delegate(&self) -> bool {
        let is_whole = !self.is_read_only && !self.is_closing.get() && self.state() == MirrorState::Optimal;
        let has_work = self.write_intent.has_unrecorded_failure() || self.has_rewritten();
        is_whole && !has_work && self.conflicts.borrow().is_empty() && self.read_freshness().is_current()
    }

    fn delegate_if_possible(&self) {
        if self.delegation.generation().is_some() {
            let is_right = self.may_delegate() || self.mutation.is(Mutation::KeepDelegating);
            debug_assert!(is_right, "the mirror still delegates as {self:?}");
            return;
        }
        if self.may_delegate()
            && let Some(sources) = self.replica_sources()
        {
            self.delegation.delegate(sources);
        }
    }

    /// Lets another core change blocks on all replicas, and completes the change with what they said. If the mirror
    /// does not delegate any more once the blocks are locked, the permit is refused, and the core sends the change here.
    async fn change_elsewhere(&self, extent: Extent, generation: u64, answer: oneshot::Sender<Permit>) {
        let _guard = self.lock_blocks(extent).await;
        if self.prepare_change(extent).await.is_err() || !self.delegation.is_valid(generation) {
            return;
        }
        let mut unfinished = NosyncOnDrop::new(self, extent);
        let targets = self.write_targets();
        let attached: Vec<u64> = targets.iter().map(|replica| replica.attach_count()).collect();
        let (outcomes, said) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        if answer.send(Permit { outcomes, ended }).is_err() {
            // Nobody has executed anything.
            unfinished.extent = None;
            return;
        }
        // Otherwise the core, or the request there, has ended half-way.
        let Ok(said) = said.await else { return };
        let said = targets.into_iter().zip(attached).zip(said);
        let results: ReplicaResults = said
            .map(|((replica, attach_count), outcome)| ReplicaResult { replica, attach_count, outcome: Some(outcome) })
            .collect();
        let completed = self.complete_write(results, Some(&mut unfinished.extent)).await;
        if completed.is_ok() {
            unfinished.extent = None;
        }
        // A core to which every replica said yes does not wait for this.
        let _ = end.send(completed.map(|()| Response::Done));
    }

    async fn answer(&self, call: Call) {
        match call {
            Call::Execute { request, answer } => {
                let outcome = sealblock_block::Device::execute(self, request).await;
                // Whoever called may have given up.
                let _ = answer.send(outcome);
            }
            Call::Change { extent, generation, answer } => self.change_elsewhere(extent, generation, answer).await,
            // The loop around this looks whether there are others.
            Call::Gone => {}
        }
    }
}

/// Answers the calls of other cores until the mirror is closed and no other core uses it. Until then they find it as the
/// home core does.
pub(crate) async fn answer_calls<C: Clock>(mirror: &Mirror<C>, mut calls: UnboundedReceiver<Call>) {
    let mut running: FuturesUnordered<LocalBoxFuture<'_, ()>> = FuturesUnordered::new();
    let has_ended = || mirror.is_closing.get() && !mirror.delegation.has_channels();
    loop {
        let call = {
            let ended = async {
                match running.is_empty() {
                    true => mirror.work.wait_until(has_ended).await,
                    false => drop(running.next().await),
                }
            };
            match select(calls.next(), pin!(ended)).await {
                Either::Left((Some(call), _)) => Some(call),
                Either::Left((None, _)) => return,
                Either::Right(_) => None,
            }
        };
        if let Some(call) = call {
            mirror.delegate_if_possible();
            running.push(Box::pin(mirror.answer(call)));
        } else if has_ended() && running.is_empty() {
            return;
        }
    }
}
