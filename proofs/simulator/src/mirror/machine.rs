//! One machine with a mirror: its legs' disks, the mirror, and what its hosts do until they end or it stops.

use std::rc::Rc;

use sealblock_block::{DynDevice, Gate};
use sealblock_layers_mirror::{
    CreateOptions, MirrorError, Mutation, OpenMirror, OpenOptions, ReplicaError, ReplicaSource, TestHooks,
    create_with_hooks, open_with_hooks,
};

use super::clock::Hurried;
use super::events::source;
use super::site::ReplicaEnv;
use super::world::{Harness, Watch};
use crate::client::Client;
use crate::executor::Executor;
use crate::random::Random;

/// A mirror that is up.
#[derive(Clone)]
pub(super) struct Up {
    pub world: Rc<Harness>,
    pub client: Client,
    pub executor: Executor,
    pub random: Rc<Random>,
    /// How much faster the mirror's clock is.
    pub factor: u32,
}

impl Up {
    /// The legs that are meant to be in use.
    pub fn in_use(&self) -> Vec<Rc<ReplicaEnv>> {
        self.world.members()
    }

    /// Every leg has everything now.
    pub fn report_rest(&self) {
        self.world.went_without.borrow_mut().iter_mut().for_each(|went| *went = false);
        self.world.sites.borrow().iter().for_each(|site| site.allowed.borrow_mut().clear());
        self.world.rests.set(self.world.rests.get() + 1);
    }

    /// Closes the mirror and then its legs.
    pub async fn close(&self) {
        let Some(mirror) = self.world.mirror.borrow().clone() else { return };
        let closed = mirror.close().await;
        let mut is_well = closed.is_ok();
        // Those that the mirror does not use may be opened anew at any time, and are just left.
        let is_here = |site: &Rc<ReplicaEnv>| self.world.standing(site).is_some_and(|(_, is_here)| is_here);
        for site in self.in_use().into_iter().filter(is_here) {
            let close = site.close.borrow_mut().take();
            if let Some(close) = close {
                is_well &= close.await.is_ok();
            }
        }
        match closed {
            Ok(()) if is_well => self.client.ledger().checker.borrow_mut().closed(),
            Ok(()) => self.world.find("a leg could not be closed".to_owned()),
            Err(_) if self.world.losses.get() > 0 => {}
            Err(error) => self.world.find(format!("the mirror could not be closed: {error}")),
        }
    }
}

/// How a mirror is opened.
#[derive(Clone, Copy)]
pub(super) struct Opening {
    pub mutation: Mutation,
    pub region_shift: u32,
    pub random: [u8; 16],
    pub factor: u32,
}

impl Opening {
    fn drill(&self) -> TestHooks {
        TestHooks { mutation: self.mutation, region_shift: Some(self.region_shift) }
    }
}

/// A machine that is to have a mirror.
pub(super) struct Stage {
    pub world: Rc<Harness>,
    pub executor: Executor,
    pub random: Random,
    pub opening: Opening,
}

impl Stage {
    /// Opens the mirror of the legs that are meant to be in use, those that are held being absent.
    pub async fn open(self) -> Result<Up, MirrorError> {
        let options = OpenOptions { is_read_only: false, random: self.opening.random };
        let opened = open_with_hooks(
            self.sources(self.world.is_any_order.get()).await,
            self.clock(),
            options,
            self.opening.drill(),
        )
        .await?;
        Ok(self.up(opened))
    }

    /// Makes a mirror of the legs that are meant to be in use, whatever is on them. That of the given one counts.
    pub async fn make(self, from: Option<usize>) -> Result<Up, ReplicaError> {
        let options = CreateOptions { random: self.opening.random, from, force: true };
        let opened = create_with_hooks(self.sources(false).await, self.clock(), options, self.opening.drill()).await?;
        Ok(self.up(opened))
    }

    /// The legs, in the order of their numbers or in any.
    async fn sources(&self, is_any_order: bool) -> Vec<ReplicaSource> {
        let mut sources = Vec::new();
        for site in self.world.members() {
            sources.push(source(&site).await);
        }
        // Whose content counts in a new mirror is told by its place.
        if is_any_order {
            for at in (1..sources.len()).rev() {
                sources.swap(at, self.random.below(at as u64 + 1) as usize);
            }
        }
        sources
    }

    fn clock(&self) -> Hurried {
        Hurried { executor: self.executor.clone(), factor: self.opening.factor }
    }

    fn up(self, opened: OpenMirror<Hurried>) -> Up {
        let Stage { world, executor, random, opening } = self;
        *world.mirror.borrow_mut() = Some(opened.mirror.clone());
        drop(executor.spawn("mirror's worker", opened.worker.run()));
        let watch = Watch { world: world.clone(), mirror: opened.mirror };
        let client = Client::new(DynDevice::new(Gate::new("mirror", watch)), world.ledger.clone());
        Up { world, client, executor, random: Rc::new(random), factor: opening.factor }
    }
}
