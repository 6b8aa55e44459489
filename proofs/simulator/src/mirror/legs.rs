//! The legs of a trial between machines.

use std::collections::BTreeSet;
use std::rc::Rc;

use sealblock_block::{Device, Request, ReservedArea, Response};
use sealblock_layers_mirror::label::{Label, ReplicaState};

use super::site::{ReplicaEnv, ReplicaLink};
use super::world::Harness;
use crate::disk::{Behaviour, Image, SimDisk, Survival};
use crate::executor::{Executor, RunLimits};
use crate::random::Random;
use crate::system::{Shape, System, Volumes};
use crate::trace::Trace;

const LIMITS: RunLimits = RunLimits { steps: 100_000, seconds: 3600 };

/// A leg between machines.
pub(super) struct Leg {
    pub shape: Shape,
    /// It keeps no label.
    pub bare: bool,
    pub image: Option<Image>,
    /// As it was when it was made.
    blank: Image,
    /// As it was at some stop before.
    pub older: Option<Image>,
    /// How many changes the mirror had answered by then.
    pub older_at: u64,
    pub is_member: bool,
    pub is_removed: bool,
    pub is_spare: bool,
    /// It has everything that was answered.
    pub is_current: bool,
    /// Something was answered while it was not in use, and the others have noted so.
    pub went_without: bool,
    /// An older image of it was put in its place, which it may not know.
    pub is_old: bool,
    pub allowed: BTreeSet<u64>,
}

/// A leg before an excursion.
pub(super) struct Kept {
    flags: [bool; 6],
    allowed: BTreeSet<u64>,
    image: Option<Image>,
    older: (Option<Image>, u64),
}

impl Leg {
    /// A new volume on a disk of its own.
    pub fn create(shape: Shape, random: &Random, trace: &Trace) -> Result<Leg, String> {
        let image = Image::blank(shape.sector_bytes, Volumes::default().disk_bytes(&shape));
        let executor = Executor::new(random.fork("creation"), trace.clone());
        let disk = SimDisk::new(image, Behaviour::default(), &executor, random.fork("disk"), trace.clone());
        let ended = executor.run(LIMITS, Volumes::default().create(disk.clone(), shape));
        match ended {
            crate::executor::Ended::Finished(done) => done?,
            other => return Err(format!("a volume could not be made: {other:?}")),
        }
        let image = disk.power_off(Survival::Nothing, random);
        Ok(Leg {
            shape,
            bare: false,
            blank: image.clone(),
            image: Some(image),
            older: None,
            older_at: 0,
            is_member: true,
            is_removed: false,
            is_spare: false,
            is_current: true,
            went_without: false,
            is_old: false,
            allowed: BTreeSet::new(),
        })
    }

    /// What a stop changes and an excursion must not.
    pub fn keep(&self) -> Kept {
        let flags = [self.is_member, self.is_removed, self.is_spare, self.is_current, self.went_without, self.is_old];
        let older = (self.older.clone(), self.older_at);
        Kept { flags, allowed: self.allowed.clone(), image: self.image.clone(), older }
    }

    /// As it was before an excursion.
    pub fn restore(&mut self, kept: Kept) {
        [self.is_member, self.is_removed, self.is_spare, self.is_current, self.went_without, self.is_old] = kept.flags;
        (self.allowed, self.image) = (kept.allowed, kept.image);
        (self.older, self.older_at) = kept.older;
    }

    /// It may be written to anywhere.
    pub fn allow_all(&mut self) {
        // At least so many regions.
        self.allowed = (0..self.shape.capacity_blocks.min(1 << 15)).collect();
    }

    /// Nothing was ever done with it.
    pub fn make_spare(&mut self) {
        self.image = Some(self.blank.clone());
        (self.is_spare, self.is_member, self.is_current) = (true, false, false);
    }

    pub fn is_in_use(&self) -> bool {
        self.is_member && !self.is_removed
    }

    /// Whether a power cut would change nothing.
    pub fn is_settled(&self) -> bool {
        self.image.as_ref().is_some_and(|image| image.dirty_sectors() == 0)
    }

    /// Its place in a machine.
    pub fn site(&mut self, number: usize, world: &Rc<Harness>, executor: &Executor, random: &Random) -> Rc<ReplicaEnv> {
        Rc::new(ReplicaEnv {
            name: format!("leg-{number}"),
            number,
            shape: self.shape,
            bare: self.bare,
            executor: executor.clone(),
            random: random.fork("site"),
            trace: world.trace.clone(),
            world: world.clone(),
            disk: Default::default(),
            image: self.image.take().into(),
            behaviour: Default::default(),
            line: ReplicaLink::Gone.into(),
            held: false.into(),
            is_opening: false.into(),
            is_lent: false.into(),
            epoch: 0.into(),
            breaks: 0.into(),
            changed: Default::default(),
            volume: Default::default(),
            close: Default::default(),
            allowed: std::mem::take(&mut self.allowed).into(),
            is_spare: self.is_spare.into(),
            is_member: self.is_member.into(),
            is_removed: self.is_removed.into(),
            is_leaving: false.into(),
            replaces: None.into(),
        })
    }

    /// Takes over what a machine has left.
    pub fn take_over(&mut self, site: &ReplicaEnv, survival: Survival) {
        self.image = Some(site.take_image(survival));
        self.allowed = site.allowed.take();
        self.is_member = site.is_member.get();
        self.is_removed = site.is_removed.get();
        self.is_spare = site.is_spare.get();
        if !self.is_member && site.replaces.get().is_none() {
            // Never a leg, or stopped half-way to be one: it is made anew.
            self.make_spare();
        }
        if let Some((standing, _)) = site.world.standing(site) {
            self.is_current = self.is_in_use() && standing == ReplicaState::InSync;
            // One that could not be added is called removed, too.
            self.is_removed |= self.is_member && standing == ReplicaState::Removed;
        } else if !self.is_in_use() {
            self.is_current = false;
        }
        if site.world.rests.get() > 0 {
            self.is_old = false;
        }
        site.world.forgive_current();
        self.went_without = site.world.went_without.borrow()[site.number];
    }

    /// The label of an image.
    pub fn label(&self, image: &Image, random: &Random) -> Option<Label> {
        let trace = Trace::default();
        let executor = Executor::new(random.fork("label"), trace.clone());
        let disk = SimDisk::new(image.clone(), Behaviour::default(), &executor, random.fork("disk"), trace);
        let opening = Volumes::default().open(disk, executor.clone(), self.shape, true);
        let ended = executor.run(LIMITS, async move {
            let session = opening.await.ok()?;
            match session.stack.execute(Request::ReadReserved { area: ReservedArea::GroupLabel }).await {
                Ok(Response::Reserved(bytes)) => Label::decode(&bytes).ok().flatten(),
                _ => None,
            }
        });
        if let crate::executor::Ended::Finished(label) = ended { label } else { None }
    }

    /// The label that it has now.
    pub fn own_label(&self) -> Option<Label> {
        self.image.as_ref().and_then(|image| self.label(image, &Random::new(0)))
    }

    /// Whether the label of another leg, which calls itself current, says this of it. What the mirror did last may not have
    /// got there.
    pub fn is_noted_as(&self, legs: &[Leg], what: impl Fn(ReplicaState) -> bool) -> bool {
        let Some(own) = self.own_label() else { return false };
        let id = own.replicas[own.own_index].id;
        let notes = |label: Label| {
            label.replicas[label.own_index].state == ReplicaState::InSync
                && label.replicas.iter().any(|member| member.id == id && what(member.state))
        };
        legs.iter().filter(|other| other.is_in_use()).filter_map(Leg::own_label).any(notes)
    }

    /// What it is by its own label.
    pub fn own_standing(&self) -> Option<ReplicaState> {
        self.own_label().map(|label| label.replicas[label.own_index].state)
    }

    /// Whether its own label says that it has everything.
    pub fn calls_itself_current(&self) -> bool {
        self.own_standing() == Some(ReplicaState::InSync)
    }
    /// Whether it has everything and can say so: one that was just brought up to date may not have been told.
    pub fn speaks(&self) -> bool {
        self.is_current && !self.bare && self.calls_itself_current()
    }
}
