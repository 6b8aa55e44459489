//! One machine with a mirror: the disks of its replicas, the mirror, and its hosts, until they end or the machine
//! stops.

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{join_all, select};
use sealblock_block::DynDevice;
use sealblock_layers_mirror::{
    CreateOptions, MirrorError, Mutation, OpenMirror, OpenOptions, ReplicaError, ReplicaSource, TestHooks,
    create_with_hooks, open_with_hooks,
};

use super::harness::{FasterClock, Harness, WatchedMirror};
use super::replica_env::{ReplicaEnv, ReplicaLink};
use crate::client::Client;
use crate::executor::Executor;
use crate::random::Random;

/// An open mirror.
#[derive(Clone)]
pub(super) struct RunningMirror {
    pub harness: Rc<Harness>,
    pub client: Client,
    pub executor: Executor,
    pub random: Rc<Random>,
    /// The factor of the mirror's clock.
    pub factor: u32,
}

impl RunningMirror {
    /// The replicas that should be in use.
    pub fn in_use(&self) -> Vec<Rc<ReplicaEnv>> {
        self.harness.members()
    }

    /// Records that now every replica has every write.
    pub fn report_quiesced(&self) {
        self.harness.missed_writes.borrow_mut().iter_mut().for_each(|missed| *missed = false);
        self.harness.envs.borrow().iter().for_each(|env| env.allowed.borrow_mut().clear());
        self.harness.quiesced_count.set(self.harness.quiesced_count.get() + 1);
    }

    /// Closes the mirror and then its replicas.
    pub async fn close(&self) {
        let Some(mirror) = self.harness.mirror.borrow().clone() else { return };
        let closed = mirror.close().await;
        let mut is_well = closed.is_ok();
        // Replicas that the mirror does not use may be reopened at any time, and are dropped.
        let is_here = |env: &Rc<ReplicaEnv>| self.harness.state(env).is_some_and(|(_, is_here)| is_here);
        for env in self.in_use().into_iter().filter(is_here) {
            let close = env.close.borrow_mut().take();
            if let Some(close) = close {
                is_well &= close.await.is_ok();
            }
        }
        match closed {
            Ok(()) if is_well => self.client.context().checker.borrow_mut().closed(),
            Ok(()) => self.harness.find("a replica could not be closed".to_owned()),
            Err(_) if self.harness.losses.get() > 0 => {}
            Err(error) => self.harness.find(format!("the mirror could not be closed: {error}")),
        }
    }

    /// Closes the mirror as a server does whose time is up: it leaves changes in flight behind, whatever becomes of
    /// them, and so it does with replicas that do not close in time. Nothing runs afterwards.
    pub async fn close_in_time(&self, random: &Random) {
        const CLOSING: Duration = Duration::from_millis(200);
        let Some(mirror) = self.harness.mirror.borrow().clone() else { return };
        let online: Vec<_> = self.in_use().into_iter().filter(|env| env.link.get() == ReplicaLink::Up).collect();
        if let Some(env) = online.get(random.below(2 * online.len() as u64) as usize) {
            self.harness.break_link(env, ReplicaLink::Stuck);
            self.executor.delay(Duration::from_micros(random.between(0, 200_000))).await;
        }
        let time_left = Duration::from_micros(random.between(0, 20_000));
        let closed = self.executor.delay(CLOSING);
        let closing = async {
            // Whatever went wrong, the labels must be right.
            let _ = mirror.close_without(self.executor.delay(time_left)).await;
            let closes = self.in_use().into_iter().filter_map(|env| env.close.borrow_mut().take());
            join_all(closes.collect::<Vec<_>>()).await;
        };
        select(pin!(closing), pin!(closed)).await;
        self.executor.halt();
    }
}

/// The options of an open mirror.
#[derive(Clone, Copy)]
pub(super) struct OpenConfig {
    pub mutation: Mutation,
    pub region_shift: u32,
    pub hot_groups: u32,
    pub random: [u8; 16],
    pub factor: u32,
}

impl OpenConfig {
    fn hooks(&self) -> TestHooks {
        TestHooks { mutation: self.mutation, region_shift: Some(self.region_shift), hot_groups: Some(self.hot_groups) }
    }
}

/// A machine before its mirror is open.
pub(super) struct MachineSetup {
    pub harness: Rc<Harness>,
    pub executor: Executor,
    pub random: Random,
    pub open_config: OpenConfig,
}

impl MachineSetup {
    /// Opens the mirror of the replicas that should be in use; those that are held count as offline.
    pub async fn open(self) -> Result<RunningMirror, MirrorError> {
        let options = OpenOptions { is_read_only: false, accepts_lost_label: false, random: self.open_config.random };
        let opened = open_with_hooks(
            self.sources(self.harness.is_any_order.get()).await,
            self.clock(),
            options,
            self.open_config.hooks(),
        )
        .await?;
        Ok(self.start(opened))
    }

    /// Makes a mirror of the replicas that should be in use, whatever is on them. The mirror gets the content of the
    /// replica `from`.
    pub async fn make(self, from: Option<usize>) -> Result<RunningMirror, ReplicaError> {
        let options = CreateOptions { random: self.open_config.random, name: None, from, force: true };
        let opened =
            create_with_hooks(self.sources(false).await, self.clock(), options, self.open_config.hooks()).await?;
        Ok(self.start(opened))
    }

    /// The replicas, in the order of their numbers or in random order.
    async fn sources(&self, is_any_order: bool) -> Vec<ReplicaSource> {
        let mut sources = Vec::new();
        for env in self.harness.members() {
            sources.push(self.harness.source(&env).await);
        }
        // In a new mirror, the position decides which replica's content is used.
        if is_any_order {
            for at in (1..sources.len()).rev() {
                sources.swap(at, self.random.below(at as u64 + 1) as usize);
            }
        }
        sources
    }

    fn clock(&self) -> FasterClock {
        FasterClock { executor: self.executor.clone(), factor: self.open_config.factor }
    }

    fn start(self, opened: OpenMirror<FasterClock>) -> RunningMirror {
        let MachineSetup { harness, executor, random, open_config } = self;
        *harness.mirror.borrow_mut() = Some(opened.mirror.clone());
        drop(executor.spawn("mirror's worker", opened.worker.run()));
        // A separate generator, so that the rest of a seed does not depend on cores.
        let cores = Random::new(harness.trace.hash() ^ (1 << 42));
        let others = opened.mirror.elsewhere().map_or(0, |_| cores.below(4));
        let channels = opened.mirror.elsewhere().into_iter().cycle().take(others as usize).map(|elsewhere| {
            let (channel, recalls) = elsewhere.open();
            drop(executor.spawn("another core", recalls));
            channel
        });
        let channels = channels.collect();
        let watch = WatchedMirror { harness: harness.clone(), mirror: opened.mirror, channels, random: cores };
        let client = Client::new(DynDevice::new("mirror", watch), harness.context.clone());
        RunningMirror { harness, client, executor, random: Rc::new(random), factor: open_config.factor }
    }
}
