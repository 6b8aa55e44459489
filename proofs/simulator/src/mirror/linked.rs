//! The link to a replica's volume, which can break: it opens the volume, and carries every request to it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;

use futures_util::future::{Either, LocalBoxFuture, select};
use sealblock_block::{
    Abilities, Ability, Device, DeviceSource, DynDevice, Error, ErrorKind, Geometry, Outcome, Request, RequestKind,
};
use sealblock_layers_mirror::{Reopen, ReplicaSource};
use sealblock_units::Extent;

use super::harness::Harness;
use super::replica_env::{ReplicaEnv, ReplicaLink};
use crate::disk::{Behaviour, SimDisk, Survival};
use crate::system::{System, Volumes};

impl Harness {
    /// Opens a replica and describes it for the mirror.
    pub async fn source(self: &Rc<Self>, env: &Rc<ReplicaEnv>) -> ReplicaSource {
        let device = self.open(env).await;
        let (harness, again) = (self.clone(), env.clone());
        let reopen: Reopen = Box::new(move || match again.is_lent.get() {
            true => Box::pin(std::future::ready(Err("it is in use".to_owned()))),
            false => harness.open(&again),
        });
        ReplicaSource::new(&*env.name, device, Some(reopen))
    }

    /// Opens the volume on its first disk, or, after a break, on what survived a kill or a power cut.
    pub fn open(self: &Rc<Self>, env: &Rc<ReplicaEnv>) -> LocalBoxFuture<'static, Result<DynDevice, String>> {
        let (harness, env) = (self.clone(), env.clone());
        Box::pin(async move {
            if env.held.get() {
                return Err("it is offline".to_owned());
            }
            // Opens run one after the other, because the disk of an open in progress cannot be taken.
            env.changed.wait_until(|| !env.is_opening.get()).await;
            let _opening = IsOpening::of(&env);
            harness.break_link(&env, ReplicaLink::Gone);
            let disk = harness.fresh_disk(&env);
            let epoch = env.epoch.get() + 1;
            env.epoch.set(epoch);
            let session = Volumes::default().open(disk, env.executor.clone(), env.profile, false).await;
            let session = session.map_err(|error| {
                if !harness.is_damaged.get() {
                    harness.find(format!("replica {} cannot be opened: {error}", env.number));
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
                harness: harness.clone(),
            };
            Ok(DynDevice::new("replica", plug.clone()).on_every_core(LinkSource::of(plug)))
        })
    }

    /// Takes what survives of the disk in use, and makes a new disk from it.
    fn fresh_disk(&self, env: &ReplicaEnv) -> SimDisk {
        let used = env.disk.borrow_mut().take();
        if let Some(used) = used {
            let survival = Survival::draw(&env.random);
            self.log(format!("replica {} is opened anew after {survival}", env.number));
            self.restarted(env);
            *env.image.borrow_mut() = Some(used.power_off(survival, &env.random.fork("survival")));
        }
        let image = env.image.borrow_mut().take().expect("a replica has an image or a disk");
        let behaviour = Behaviour { fuse: self.fuse.borrow().clone(), ..env.behaviour.take() };
        let disk = SimDisk::new(image, behaviour, &env.executor, env.random.fork("disk"), env.trace.clone());
        *env.disk.borrow_mut() = Some(disk.clone());
        disk
    }
}

/// Marks a replica as being opened until this is dropped.
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

thread_local! {
    /// The links that other cores can open, by number.
    static LINKS: RefCell<BTreeMap<u64, LinkedDevice>> = const { RefCell::new(BTreeMap::new()) };
    static NEXT_LINK: Cell<u64> = const { Cell::new(0) };
}

/// Opens a link on the simulated cores, which are all on this thread.
struct LinkSource(u64);

impl LinkSource {
    fn of(link: LinkedDevice) -> LinkSource {
        let number = NEXT_LINK.replace(NEXT_LINK.get() + 1);
        LINKS.with_borrow_mut(|links| links.insert(number, link));
        LinkSource(number)
    }
}

impl DeviceSource for LinkSource {
    fn open_here(&self) -> Result<DynDevice, Error> {
        let link = LINKS.with_borrow(|links| links.get(&self.0).cloned());
        let gone = || Error::from(ErrorKind::Unreachable { reason: "another thread has the link".to_owned() });
        link.map(|link| DynDevice::new("replica", link)).ok_or_else(gone)
    }
}

impl Drop for LinkSource {
    fn drop(&mut self) {
        // Dropped outside: a link may hold the last handle of another one.
        let link = LINKS.with_borrow_mut(|links| links.remove(&self.0));
        drop(link);
    }
}

/// The link to a replica's volume, for one open.
#[derive(Clone)]
struct LinkedDevice {
    geometry: Geometry,
    inner: DynDevice,
    epoch: u64,
    env: Rc<ReplicaEnv>,
    harness: Rc<Harness>,
}

impl LinkedDevice {
    fn is_lost(&self) -> bool {
        self.env.epoch.get() != self.epoch
    }

    /// Waits while the link hangs for such a request; false if it broke meanwhile.
    async fn is_answered(&self, kind: RequestKind) -> bool {
        let hangs = || match self.env.link.get() {
            ReplicaLink::Hung => true,
            ReplicaLink::Stuck => kind.changes_blocks(),
            ReplicaLink::Up | ReplicaLink::Full | ReplicaLink::Gone => false,
        };
        self.env.changed.wait_until(|| self.is_lost() || !hangs()).await;
        !self.is_lost()
    }

    fn refuses(&self, request: &Request) -> bool {
        self.env.link.get() == ReplicaLink::Full
            && (request.kind().changes_blocks() || request.kind() == RequestKind::WriteReserved)
    }

    /// Checks that a write to a replica is in regions that hosts have changed and that the replica may lack.
    fn check(&self, extent: Extent) {
        let allowed = self.env.allowed.borrow();
        for region in self.harness.regions(extent) {
            if !allowed.contains(&region) {
                let number = self.env.number;
                self.harness.find(format!("replica {number} is written to at {extent}, which it does not lack"));
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
        let mut abilities = self.inner.abilities();
        if self.env.has_no_label {
            abilities.set(RequestKind::ReadReserved, Ability::Absent);
        }
        abilities
    }

    async fn execute(&self, request: Request) -> Outcome {
        let kind = request.kind();
        if !self.is_answered(kind).await {
            return unreachable();
        }
        if self.refuses(&request) {
            return Err(ErrorKind::NoSpace { reason: "the replica is full".to_owned() }.into());
        }
        if matches!(request.kind(), RequestKind::Write | RequestKind::WriteZeroes) {
            self.check(request.extents.one());
        }
        let inner = self.inner.clone();
        let executed: LocalBoxFuture<'static, Outcome> = match self.harness.drops_requests.get() {
            true => Box::pin(async move { inner.execute(request).await }),
            // A separate task, because a request continues when its future is dropped.
            false => Box::pin(self.env.executor.spawn("replica", async move { inner.execute(request).await })),
        };
        let lost = self.env.changed.wait_until(|| self.is_lost());
        let outcome = match select(executed, pin!(lost)).await {
            Either::Left((outcome, _)) => outcome,
            Either::Right(_) => return unreachable(),
        };
        if self.is_answered(kind).await { outcome } else { unreachable() }
    }
}
