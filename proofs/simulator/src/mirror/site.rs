//! Where a leg lives during one machine: a disk, the volume on it, and the line to it, which can break.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::pin::pin;
use std::rc::Rc;

use futures_util::future::{Either, LocalBoxFuture, select};
use sealblock_block::{Abilities, Ability, Condition, Device, DynDevice, ErrorKind, Gate, Geometry, Outcome, Request};
use sealblock_units::Extent;

use super::world::Harness;
use crate::disk::{Behaviour, Image, SimDisk, Survival};
use crate::executor::Executor;
use crate::random::Random;
use crate::system::{Promise, Shape, System, Volumes};
use crate::trace::Trace;

/// What the line to a leg does with requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReplicaLink {
    /// It carries them.
    Up,
    /// Reads get through, changes fail.
    Full,
    /// Nothing is answered any more, and no error says so.
    Hung,
    /// Every request fails at once, those under way too.
    Gone,
}

/// A leg's place in one machine.
pub(super) struct ReplicaEnv {
    pub name: String,
    pub number: usize,
    pub shape: Shape,
    pub bare: bool,
    pub executor: Executor,
    pub random: Random,
    pub trace: Trace,
    pub world: Rc<Harness>,
    pub disk: RefCell<Option<SimDisk>>,
    pub image: RefCell<Option<Image>>,
    /// How its first disk behaves in this machine.
    pub behaviour: RefCell<Behaviour>,
    pub line: Cell<ReplicaLink>,
    /// It cannot be opened anew yet.
    pub held: Cell<bool>,
    pub is_opening: Cell<bool>,
    /// Somebody else has it open, to make it a leg.
    pub is_lent: Cell<bool>,
    /// Counts openings and breaks of the line.
    pub epoch: Cell<u64>,
    /// Counts whatever happened to the line.
    pub breaks: Cell<u64>,
    pub changed: Condition,
    /// The volume itself, behind its own gate.
    pub volume: RefCell<Option<DynDevice>>,
    pub close: RefCell<Option<Promise<()>>>,
    /// Regions that the mirror may write to on it.
    pub allowed: RefCell<BTreeSet<u64>>,
    /// It is not a leg and can be made one.
    pub is_spare: Cell<bool>,
    pub is_member: Cell<bool>,
    pub is_removed: Cell<bool>,
    /// It is being taken out.
    pub is_leaving: Cell<bool>,
    /// The leg in whose place it is being put.
    pub replaces: Cell<Option<usize>>,
}

impl ReplicaEnv {
    /// Opens the volume, on its first disk or, after a break, on what a kill or a power cut has left of it.
    pub fn open(self: &Rc<Self>) -> LocalBoxFuture<'static, Result<DynDevice, String>> {
        let site = Rc::clone(self);
        Box::pin(async move {
            if site.held.get() {
                return Err("it is away".to_owned());
            }
            // One opening after the other: the disk of one that is under way cannot be taken.
            site.changed.wait_until(|| !site.is_opening.get()).await;
            let _opening = IsOpening::of(&site);
            site.break_line(ReplicaLink::Gone);
            let disk = site.fresh_disk();
            let epoch = site.epoch.get() + 1;
            site.epoch.set(epoch);
            let session = Volumes::default().open(disk, site.executor.clone(), site.shape, false).await;
            let session = session.map_err(|error| {
                if !site.world.is_damaged.get() {
                    site.world.find(format!("leg {} cannot be opened: {error}", site.number));
                }
                error
            })?;
            if site.epoch.get() != epoch || site.held.get() {
                return Err("it went away again".to_owned());
            }
            *site.volume.borrow_mut() = Some(session.stack.clone());
            *site.close.borrow_mut() = Some(session.close);
            site.line.set(ReplicaLink::Up);
            let plug =
                Plug { geometry: session.stack.geometry().clone(), inner: session.stack, epoch, site: site.clone() };
            Ok(DynDevice::new(Gate::new("leg", plug)))
        })
    }

    /// Takes what a stop leaves of the disk that was in use, and makes a new disk of it.
    fn fresh_disk(&self) -> SimDisk {
        let used = self.disk.borrow_mut().take();
        if let Some(used) = used {
            let survival = Survival::draw(&self.random);
            self.world.say(format!("leg {} is opened anew after {survival}", self.number));
            self.world.restarted(self);
            *self.image.borrow_mut() = Some(used.power_off(survival, &self.random.fork("survival")));
        }
        let image = self.image.borrow_mut().take().expect("a leg has an image or a disk");
        let behaviour = Behaviour { fuse: self.world.fuse.borrow().clone(), ..self.behaviour.take() };
        let disk = SimDisk::new(image, behaviour, &self.executor, self.random.fork("disk"), self.trace.clone());
        *self.disk.borrow_mut() = Some(disk.clone());
        disk
    }

    /// Changes what the line does. Requests under way notice.
    pub fn break_line(&self, line: ReplicaLink) {
        // Whether it is current can be told until the mirror learns of this.
        self.world.forgive_current();
        self.line.set(line);
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
            None => self.image.borrow_mut().take().expect("a leg has an image or a disk"),
        }
    }
}

/// A site that is being opened, however that ends.
struct IsOpening(Rc<ReplicaEnv>);

impl IsOpening {
    fn of(site: &Rc<ReplicaEnv>) -> IsOpening {
        site.is_opening.set(true);
        IsOpening(site.clone())
    }
}

impl Drop for IsOpening {
    fn drop(&mut self) {
        self.0.is_opening.set(false);
        self.0.changed.notify();
    }
}

/// The line to a leg's volume, as of one opening.
struct Plug {
    geometry: Geometry,
    inner: DynDevice,
    epoch: u64,
    site: Rc<ReplicaEnv>,
}

impl Plug {
    fn is_lost(&self) -> bool {
        self.site.epoch.get() != self.epoch
    }

    /// Waits while the line hangs; whether it is still there then.
    async fn is_answered(&self) -> bool {
        self.site.changed.wait_until(|| self.is_lost() || self.site.line.get() != ReplicaLink::Hung).await;
        !self.is_lost()
    }

    fn refuses(&self, operation: &Request) -> bool {
        self.site.line.get() == ReplicaLink::Full
            && !matches!(
                operation,
                Request::Read { .. }
                    | Request::Verify { .. }
                    | Request::Checksum { .. }
                    | Request::Compare { .. }
                    | Request::ReadReserved { .. }
                    | Request::Flush
            )
    }

    /// A leg is only written to where hosts have changed something that it may lack.
    fn check(&self, extent: Extent) {
        let allowed = self.site.allowed.borrow();
        for region in self.site.world.regions(extent) {
            if !allowed.contains(&region) {
                let number = self.site.number;
                self.site.world.find(format!("leg {number} is written to at {extent}, which it does not lack"));
            }
        }
    }
}

fn unreachable() -> Outcome {
    Err(ErrorKind::Unreachable { reason: "the line broke".to_owned() }.into())
}

impl Device for Plug {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        let of = self.inner.abilities();
        let annex = if self.site.bare { Ability::Absent } else { of.reserved };
        Abilities { reserved: annex, ..of }
    }

    async fn execute(&self, operation: Request) -> Outcome {
        if !self.is_answered().await {
            return unreachable();
        }
        if self.refuses(&operation) {
            return Err(ErrorKind::NoSpace { reason: "the leg is full".to_owned() }.into());
        }
        if let Request::Write { extent, .. } | Request::WriteZeroes { extent, .. } = &operation {
            self.check(*extent);
        }
        let inner = self.inner.clone();
        // A task of its own: what was asked goes on when nobody waits for the answer any more.
        let task = self.site.executor.spawn("leg", async move { inner.execute(operation).await });
        let lost = self.site.changed.wait_until(|| self.is_lost());
        let outcome = match select(pin!(task), pin!(lost)).await {
            Either::Left((outcome, _)) => outcome,
            Either::Right(_) => return unreachable(),
        };
        if self.is_answered().await { outcome } else { unreachable() }
    }
}
