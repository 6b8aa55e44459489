//! One machine with a mirror: its legs' disks, the mirror, and what its hosts do until they end or it stops.

use std::rc::Rc;

use sealblock_block::{Gate, Stack};
use sealblock_layers_mirror::{Drill, LegSource, MirrorError, Mutation, OpenOptions, open_drill};

use super::clock::Hurried;
use super::events::reopen;
use super::site::Site;
use super::world::{Watch, World};
use crate::client::Client;
use crate::executor::Executor;
use crate::random::Random;

/// A mirror that is up.
#[derive(Clone)]
pub(super) struct Up {
    pub world: Rc<World>,
    pub client: Client,
    pub executor: Executor,
    pub random: Rc<Random>,
    /// How much faster the mirror's clock is.
    pub factor: u32,
}

impl Up {
    /// The legs that are meant to be in use.
    pub fn in_use(&self) -> Vec<Rc<Site>> {
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
        for site in self.in_use() {
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

/// Opens the mirror of the legs that are meant to be in use, those that are held being absent.
pub(super) async fn open(
    world: &Rc<World>,
    executor: &Executor,
    random: Random,
    opening: Opening,
) -> Result<Up, MirrorError> {
    let mut sources = Vec::new();
    for site in world.members() {
        let device = site.open().await;
        sources.push(LegSource { name: site.name.clone(), device, reopen: Some(reopen(&site)) });
    }
    let options = OpenOptions { read_only: false, random: opening.random };
    let clock = Hurried { executor: executor.clone(), factor: opening.factor };
    let drill = Drill { mutation: opening.mutation, region_shift: Some(opening.region_shift) };
    let opened = open_drill(sources, clock, options, drill).await?;
    *world.mirror.borrow_mut() = Some(opened.mirror.clone());
    drop(executor.spawn("mirror's worker", opened.worker.run()));
    let watch = Watch { world: world.clone(), mirror: opened.mirror };
    let client = Client::new(Stack::new(Gate::new("mirror", watch)), world.ledger.clone());
    Ok(Up { world: world.clone(), client, executor: executor.clone(), random: Rc::new(random), factor: opening.factor })
}
