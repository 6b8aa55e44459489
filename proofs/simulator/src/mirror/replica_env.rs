//! The environment of a replica in one machine: its disk, the volume on it, and its link, which can break.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::pin::pin;
use std::rc::Rc;

use futures_util::future::{Either, LocalBoxFuture, select};
use sealblock_block::{
    Abilities, Ability, Condition, Device, DynDevice, ErrorKind, Gate, Geometry, Outcome, Request, RequestKind,
};
use sealblock_units::Extent;

use super::harness::Harness;
use crate::disk::{Behaviour, Image, SimDisk, Survival};
use crate::executor::Executor;
use crate::random::{Random, Trace};
use crate::system::{BoxedWork, System, VolumeProfile, Volumes};

/// The state of the link to a replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReplicaLink {
    /// Requests get through.
    Up,
    /// Reads get through, changes fail.
    Full,
    /// Requests get no response and no error.
    Hung,
    /// Every request fails at once, also those in flight.
    Gone,
}

/// A replica in one machine.
pub(super) struct ReplicaEnv {
    pub name: String,
    pub number: usize,
    pub profile: VolumeProfile,
    pub has_no_label: bool,
    pub executor: Executor,
    pub random: Random,
    pub trace: Trace,
    pub harness: Rc<Harness>,
    pub disk: RefCell<Option<SimDisk>>,
    pub image: RefCell<Option<Image>>,
    /// How its first disk behaves in this machine.
    pub behaviour: RefCell<Behaviour>,
    pub link: Cell<ReplicaLink>,
    /// It cannot be opened again yet.
    pub held: Cell<bool>,
    pub is_opening: Cell<bool>,
    /// True while it is open to be made a replica.
    pub is_lent: Cell<bool>,
    /// Counts openings and breaks of the line.
    pub epoch: Cell<u64>,
    /// Counts whatever happened to the line.
    pub breaks: Cell<u64>,
    pub changed: Condition,
    /// The volume itself, behind its own gate.
    pub volume: RefCell<Option<DynDevice>>,
    pub close: RefCell<Option<BoxedWork<()>>>,
    /// Regions that the mirror may write to on it.
    pub allowed: RefCell<BTreeSet<u64>>,
    /// It is not a replica and can be made one.
    pub is_spare: Cell<bool>,
    pub is_member: Cell<bool>,
    pub is_removed: Cell<bool>,
    /// It is being taken out.
    pub is_leaving: Cell<bool>,
    /// The replica in whose place it is being put.
    pub replaces: Cell<Option<usize>>,
}

impl ReplicaEnv {
    /// Opens the volume, on its first disk or, after a break, on what a kill or a power cut has left of it.
    pub fn open(self: &Rc<Self>) -> LocalBoxFuture<'static, Result<DynDevice, String>> {
        let env = Rc::clone(self);
        Box::pin(async move {
            if env.held.get() {
                return Err("it is away".to_owned());
            }
            // One opening after the other: the disk of one that is in flight cannot be taken.
            env.changed.wait_until(|| !env.is_opening.get()).await;
            let _opening = IsOpening::of(&env);
            env.break_link(ReplicaLink::Gone);
            let disk = env.fresh_disk();
            let epoch = env.epoch.get() + 1;
            env.epoch.set(epoch);
            let session = Volumes::default().open(disk, env.executor.clone(), env.profile, false).await;
            let session = session.map_err(|error| {
                if !env.harness.is_damaged.get() {
                    env.harness.find(format!("replica {} cannot be opened: {error}", env.number));
                }
                error
            })?;
            if env.epoch.get() != epoch || env.held.get() {
                return Err("it went away again".to_owned());
            }
            *env.volume.borrow_mut() = Some(session.stack.clone());
            *env.close.borrow_mut() = Some(session.close);
            env.link.set(ReplicaLink::Up);
            let plug = LinkedDevice {
                geometry: session.stack.geometry().clone(),
                inner: session.stack,
                epoch,
                env: env.clone(),
            };
            Ok(DynDevice::new(Gate::new("replica", plug)))
        })
    }

    /// Takes what a stop leaves of the disk that was in use, and makes a new disk of it.
    fn fresh_disk(&self) -> SimDisk {
        let used = self.disk.borrow_mut().take();
        if let Some(used) = used {
            let survival = Survival::draw(&self.random);
            self.harness.say(format!("replica {} is opened anew after {survival}", self.number));
            self.harness.restarted(self);
            *self.image.borrow_mut() = Some(used.power_off(survival, &self.random.fork("survival")));
        }
        let image = self.image.borrow_mut().take().expect("a replica has an image or a disk");
        let behaviour = Behaviour { fuse: self.harness.fuse.borrow().clone(), ..self.behaviour.take() };
        let disk = SimDisk::new(image, behaviour, &self.executor, self.random.fork("disk"), self.trace.clone());
        *self.disk.borrow_mut() = Some(disk.clone());
        disk
    }

    /// Changes the state of the link, also for requests in flight.
    pub fn break_link(&self, line: ReplicaLink) {
        // Whether it is current can be told until the mirror learns of this.
        self.harness.clear_in_sync();
        self.link.set(line);
        self.breaks.set(self.breaks.get() + 1);
        if line == ReplicaLink::Gone {
            self.epoch.set(self.epoch.get() + 1);
        }
        self.changed.notify();
    }

    /// What the machine leaves on the disk.
    pub fn take_image(&self, survival: Survival) -> Image {
        match self.disk.borrow_mut().take() {
            Some(disk) => disk.power_off(survival, &self.random.fork("survival")),
            None => self.image.borrow_mut().take().expect("a replica has an image or a disk"),
        }
    }
}

/// A site that is being opened, however that ends.
struct IsOpening(Rc<ReplicaEnv>);

impl IsOpening {
    fn of(env: &Rc<ReplicaEnv>) -> IsOpening {
        env.is_opening.set(true);
        IsOpening(env.clone())
    }
}

impl Drop for IsOpening {
    fn drop(&mut self) {
        self.0.is_opening.set(false);
        self.0.changed.notify();
    }
}

/// The link to a replica's volume, as of one open.
struct LinkedDevice {
    geometry: Geometry,
    inner: DynDevice,
    epoch: u64,
    env: Rc<ReplicaEnv>,
}

impl LinkedDevice {
    fn is_lost(&self) -> bool {
        self.env.epoch.get() != self.epoch
    }

    /// Waits while the link hangs; false if it broke meanwhile.
    async fn is_answered(&self) -> bool {
        self.env.changed.wait_until(|| self.is_lost() || self.env.link.get() != ReplicaLink::Hung).await;
        !self.is_lost()
    }

    fn refuses(&self, request: &Request) -> bool {
        self.env.link.get() == ReplicaLink::Full
            && (request.kind().changes_blocks() || request.kind() == RequestKind::WriteReserved)
    }

    /// Checks that a write to a replica concerns regions that hosts have changed and it may lack.
    fn check(&self, extent: Extent) {
        let allowed = self.env.allowed.borrow();
        for region in self.env.harness.regions(extent) {
            if !allowed.contains(&region) {
                let number = self.env.number;
                self.env.harness.find(format!("replica {number} is written to at {extent}, which it does not lack"));
            }
        }
    }
}

fn unreachable() -> Outcome {
    Err(ErrorKind::Unreachable { reason: "the line broke".to_owned() }.into())
}

impl Device for LinkedDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        let of = self.inner.abilities();
        let reserved = if self.env.has_no_label { Ability::Absent } else { of.reserved };
        Abilities { reserved, ..of }
    }

    async fn execute(&self, request: Request) -> Outcome {
        if !self.is_answered().await {
            return unreachable();
        }
        if self.refuses(&request) {
            return Err(ErrorKind::NoSpace { reason: "the replica is full".to_owned() }.into());
        }
        if matches!(request.kind(), RequestKind::Write | RequestKind::WriteZeroes) {
            self.check(request.extents.one());
        }
        let inner = self.inner.clone();
        // A task of its own: a request continues when its future is dropped.
        let task = self.env.executor.spawn("replica", async move { inner.execute(request).await });
        let lost = self.env.changed.wait_until(|| self.is_lost());
        let outcome = match select(pin!(task), pin!(lost)).await {
            Either::Left((outcome, _)) => outcome,
            Either::Right(_) => return unreachable(),
        };
        if self.is_answered().await { outcome } else { unreachable() }
    }
}
