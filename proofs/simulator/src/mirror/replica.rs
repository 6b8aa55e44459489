//! The replicas of a trial between machines.

use std::collections::BTreeSet;
use std::rc::Rc;

use sealblock_block::{Device, Request, ReservedArea, Response};
use sealblock_layers_mirror::label::{Label, ReplicaState};

use super::harness::Harness;
use super::replica_env::{ReplicaEnv, ReplicaLink};
use crate::disk::{Behaviour, Image, SimDisk, Survival};
use crate::executor::{Executor, RunLimits};
use crate::random::{Random, Trace};
use crate::system::{System, VolumeProfile, Volumes};

const LIMITS: RunLimits = RunLimits { steps: 100_000, seconds: 3600 };

/// A replica between machines.
pub(super) struct Replica {
    pub profile: VolumeProfile,
    /// True if it has no label.
    pub has_no_label: bool,
    pub image: Option<Image>,
    /// Its state when it was made.
    blank: Image,
    /// Its state at an earlier stop.
    pub older: Option<Image>,
    /// The number of changes that had completed by then.
    pub older_at: u64,
    pub is_member: bool,
    pub is_removed: bool,
    pub is_spare: bool,
    /// True if it has every completed write.
    pub is_current: bool,
    /// True if writes completed without it, and the other labels list it as out of sync.
    pub missed_writes: bool,
    /// True if it was rolled back to an older image.
    pub is_old: bool,
    pub allowed: BTreeSet<u64>,
}

/// A replica's state before an isolated run.
pub(super) struct ReplicaSnapshot {
    flags: [bool; 6],
    allowed: BTreeSet<u64>,
    image: Option<Image>,
    older: (Option<Image>, u64),
}

impl Replica {
    /// A new volume on a disk of its own.
    pub fn create(profile: VolumeProfile, random: &Random, trace: &Trace) -> Result<Replica, String> {
        let image = Image::blank(profile.sector_bytes, Volumes::default().disk_bytes(&profile));
        let executor = Executor::new(random.fork("creation"), trace.clone());
        let disk = SimDisk::new(image, Behaviour::default(), &executor, random.fork("disk"), trace.clone());
        let ended = executor.run(LIMITS, Volumes::default().create(disk.clone(), profile));
        match ended {
            crate::executor::RunEnd::Finished(done) => done?,
            other => return Err(format!("a volume could not be made: {other:?}")),
        }
        let image = disk.power_off(Survival::Nothing, random);
        Ok(Replica {
            profile,
            has_no_label: false,
            blank: image.clone(),
            image: Some(image),
            older: None,
            older_at: 0,
            is_member: true,
            is_removed: false,
            is_spare: false,
            is_current: true,
            missed_writes: false,
            is_old: false,
            allowed: BTreeSet::new(),
        })
    }

    /// The state that an isolated run must restore.
    pub fn snapshot(&self) -> ReplicaSnapshot {
        let flags = [self.is_member, self.is_removed, self.is_spare, self.is_current, self.missed_writes, self.is_old];
        let older = (self.older.clone(), self.older_at);
        ReplicaSnapshot { flags, allowed: self.allowed.clone(), image: self.image.clone(), older }
    }

    /// Restores the state from before an isolated run.
    pub fn restore(&mut self, kept: ReplicaSnapshot) {
        [self.is_member, self.is_removed, self.is_spare, self.is_current, self.missed_writes, self.is_old] = kept.flags;
        (self.allowed, self.image) = (kept.allowed, kept.image);
        (self.older, self.older_at) = kept.older;
    }

    /// Allows writes to every region.
    pub fn allow_all(&mut self) {
        // At least as many as there are regions.
        self.allowed = (0..self.profile.capacity_blocks.min(1 << 15)).collect();
    }

    /// Its state when it was made.
    pub fn blank(&self) -> &Image {
        &self.blank
    }

    /// Makes it a blank spare device.
    pub fn make_spare(&mut self) {
        self.image = Some(self.blank.clone());
        (self.is_spare, self.is_member, self.is_current) = (true, false, false);
    }

    pub fn is_in_use(&self) -> bool {
        self.is_member && !self.is_removed
    }

    /// True if a power cut would change nothing.
    pub fn has_only_durable(&self) -> bool {
        self.image.as_ref().is_some_and(|image| image.dirty_sectors() == 0)
    }

    /// The environment of this replica in a machine.
    pub fn env(
        &mut self,
        number: usize,
        harness: &Rc<Harness>,
        executor: &Executor,
        random: &Random,
    ) -> Rc<ReplicaEnv> {
        Rc::new(ReplicaEnv {
            name: format!("replica-{number}"),
            number,
            profile: self.profile,
            has_no_label: self.has_no_label,
            executor: executor.clone(),
            random: random.fork("site"),
            trace: harness.trace.clone(),
            disk: Default::default(),
            image: self.image.take().into(),
            behaviour: Default::default(),
            link: ReplicaLink::Gone.into(),
            held: false.into(),
            is_opening: false.into(),
            is_lent: false.into(),
            replaced_count: 0.into(),
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

    /// Takes over the state at the end of a machine.
    pub fn take_over(&mut self, harness: &Harness, env: &ReplicaEnv, survival: Survival) {
        self.image = Some(env.take_image(survival));
        self.allowed = env.allowed.take();
        self.is_member = env.is_member.get();
        self.is_removed = env.is_removed.get();
        self.is_spare = env.is_spare.get();
        if !self.is_member && env.replaces.get().is_none() {
            // It was never a replica, or its creation was interrupted; it is made anew.
            self.make_spare();
        }
        if let Some((state, _)) = harness.state(env) {
            self.is_current = self.is_in_use() && state == ReplicaState::InSync;
            // A replica that could not be added is also listed as removed.
            self.is_removed |= self.is_member && state == ReplicaState::Removed;
        } else if !self.is_in_use() {
            self.is_current = false;
        }
        if harness.quiesced_count.get() > 0 {
            self.is_old = false;
        }
        harness.clear_in_sync();
        self.missed_writes = harness.missed_writes.borrow()[env.number];
    }

    /// The label in an image.
    pub fn label(&self, image: &Image, random: &Random) -> Option<Label> {
        let trace = Trace::default();
        let executor = Executor::new(random.fork("label"), trace.clone());
        let disk = SimDisk::new(image.clone(), Behaviour::default(), &executor, random.fork("disk"), trace);
        let opening = Volumes::default().open(disk, executor.clone(), self.profile, true);
        let ended = executor.run(LIMITS, async move {
            let session = opening.await.ok()?;
            match session.stack.execute(Request::read_reserved(ReservedArea::GroupLabel)).await {
                Ok(Response::Reserved(bytes)) => Label::decode(&bytes).ok().flatten(),
                _ => None,
            }
        });
        if let crate::executor::RunEnd::Finished(label) = ended { label } else { None }
    }

    /// Its current label.
    pub fn own_label(&self) -> Option<Label> {
        self.image.as_ref().and_then(|image| self.label(image, &Random::new(0)))
    }

    /// True if another replica that claims to be current lists it in a state for which `what` is true. The mirror's
    /// last update may be missing from that label.
    pub fn is_recorded_as(&self, replicas: &[Replica], what: impl Fn(ReplicaState) -> bool) -> bool {
        let Some(own) = self.own_label() else { return false };
        let id = own.replicas[own.own_index].id;
        let records = |label: Label| {
            label.replicas[label.own_index].state == ReplicaState::InSync
                && label.replicas.iter().any(|member| member.id == id && what(member.state))
        };
        replicas.iter().filter(|other| other.is_in_use()).filter_map(Replica::own_label).any(records)
    }

    /// Its state in its own label.
    pub fn own_state(&self) -> Option<ReplicaState> {
        self.own_label().map(|label| label.replicas[label.own_index].state)
    }

    /// True if its own label lists it as in sync.
    pub fn calls_itself_current(&self) -> bool {
        self.own_state() == Some(ReplicaState::InSync)
    }

    /// True if it has every completed write and its own label shows that; a replica that was just resynced may not have
    /// that label yet.
    pub fn knows_in_sync(&self) -> bool {
        self.is_current && !self.has_no_label && self.calls_itself_current()
    }
}
