//! The replicas of an open mirror: commands that change them, and the reopening of those that were lost.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures_util::future::{LocalBoxFuture, join_all};
use sealblock_block::{Device, DynDevice, Error, Request, RequestKind, ReservedArea, Response, WhyOlder};
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_layers_mirror::{
    Answered, Loss, LossMonitor, Mirror, MirrorInfo, MirrorState, Reopen, ReplicaError, ReplicaInfo, ReplicaSource,
};
use sealblock_media_file::Backing;
use sealblock_media_nbd::QUIESCE;
use sealblock_runtime_reactor::now;

use super::mirror_errors::{CHANGING, replica_error};
use crate::error::{Cause, StackError, shell_word};
use crate::failures::device_error;
use crate::opened::closing::CloseLimit;
use crate::opened::connections::{LostRemote, RemoteConnection, all_lost, loss};
use crate::opened::damage_view::DamageView;
use crate::opened::held::{Access, CloseHandle, Members, close_all, forget_lost, lost_answers, received_bytes};
use crate::opened::lost_metadata::LostMetadata;
use crate::opened::same_remote::{RemoteDevices, ReplicaDevices};
use crate::opened::target_identity::{TargetIdentity, TargetLabel, member_of};
use crate::program::{ReactorClock, note};
use crate::quantity::count;
use crate::remote::{is_remote, with_short_timeouts};
use crate::target::{GroupKind, TargetName};

/// How long a command for the replicas waits for what a replica that it lets go may still execute; it is told then.
const LETTING_GO: Duration = Duration::from_secs(5);

/// An open mirror and its replicas.
pub struct OpenMirror {
    mirror: Rc<Mirror<ReactorClock>>,
    replicas: RefCell<Vec<Rc<OpenReplica>>>,
    /// Its name: the target it was opened by, until a command changes the replicas.
    target: TargetLabel,
    opener: ReplicaOpener,
    /// The bad blocks of the replicas as they are now.
    damage: DamageView,
    /// The devices at other servers that they lie on now.
    remote: ReplicaDevices,
}

/// Opens the device of a replica.
pub(super) type ReplicaOpener =
    Rc<dyn Fn(TargetName, Access) -> LocalBoxFuture<'static, Result<OpenedReplica, StackError>>>;

/// The device of a replica.
pub(super) struct OpenedReplica {
    pub device: DynDevice,
    /// What it is.
    pub identity: TargetIdentity,
    /// The files that it lies in, as long as they are open.
    pub files: Vec<Weak<Backing>>,
    /// Its connections to other hosts.
    pub connections: Vec<RemoteConnection>,
    /// The devices at other servers that it lies on.
    pub remote: RemoteDevices,
    /// What is known of its bad blocks.
    pub damage: DamageView,
    /// Copies of its metadata that are lost.
    pub lost_metadata: LostMetadata,
    /// What is to close behind it.
    pub held: Vec<CloseHandle>,
}

/// A replica, which is reopened after each loss.
pub(super) struct OpenReplica {
    /// Its name.
    pub name: String,
    /// What is opened.
    pub target: TargetName,
    /// What it is opened for.
    pub access: Access,
    opener: ReplicaOpener,
    held: RefCell<Vec<CloseHandle>>,
    /// What it was when it was opened last, or what its name was before.
    identity: RefCell<TargetIdentity>,
    /// The files that it lies in, as long as they are open.
    files: RefCell<Vec<Weak<Backing>>>,
    /// The connections of the device that was opened last.
    connections: RefCell<Vec<RemoteConnection>>,
    /// The devices at other servers that it lies on.
    remote: RefCell<RemoteDevices>,
    /// Copies of its metadata that are lost.
    lost_metadata: RefCell<LostMetadata>,
    /// Its bad blocks, once it was open; what is known of a device that is away stays known.
    damage: RefCell<Option<DamageView>>,
    /// The mirror that it is of: who else is to know of its bad blocks and remote devices.
    reports_to: RefCell<Option<(DamageView, ReplicaDevices)>>,
    /// Bytes received before the last open.
    received_bytes: Cell<u64>,
    /// True while another device replaces it: it must not be reopened.
    is_retired: Cell<bool>,
    /// Why its device was not closed well, and until when that counts: a change that was sent to it may still be executed.
    unsettled: RefCell<Option<(Error, Instant)>>,
}

impl OpenMirror {
    /// An open mirror of these replicas.
    pub(super) fn new(
        target: &TargetName,
        mirror: Rc<Mirror<ReactorClock>>,
        replicas: Vec<Rc<OpenReplica>>,
        opener: ReplicaOpener,
    ) -> OpenMirror {
        let members = replicas.iter().map(|replica| replica.identity.borrow().clone()).collect();
        let identity = TargetIdentity::Group { kind: GroupKind::Mirror.name().to_owned(), members };
        let target = TargetLabel::new(target, identity);
        let (damage, remote) = (DamageView::mirror(), ReplicaDevices::default());
        replicas.iter().for_each(|replica| replica.report_to(&damage, &remote));
        let open = OpenMirror { mirror, replicas: RefCell::new(replicas), target, opener, damage, remote };
        open.name_members();
        open
    }

    /// The bad blocks of its replicas, on every core.
    pub fn damage(&self) -> DamageView {
        self.damage.clone()
    }

    /// The devices at other servers that its replicas lie on, on every core.
    pub(crate) fn remote_devices(&self) -> ReplicaDevices {
        self.remote.clone()
    }

    /// What it is: its replicas.
    pub fn identity(&self) -> TargetIdentity {
        let members = self.members().into_iter().map(|(_, identity)| identity).collect();
        TargetIdentity::Group { kind: GroupKind::Mirror.name().to_owned(), members }
    }

    /// Its replicas by the names that it has for them, each with what it is.
    pub fn members(&self) -> Vec<(String, TargetIdentity)> {
        let replicas = self.replicas.borrow();
        replicas.iter().map(|replica| (replica.name.clone(), replica.identity.borrow().clone())).collect()
    }

    /// Has commands find it by its present replicas, too.
    fn name_members(&self) {
        self.target.set_members(GroupKind::Mirror, self.members());
    }

    /// Why blocks may be older than what was written, if so.
    pub fn why_older(&self) -> Option<WhyOlder> {
        self.mirror.abilities().freshness.why_older()
    }

    /// Its state now.
    pub fn describe(&self) -> MirrorInfo {
        self.mirror.describe()
    }

    /// The access that replicas are opened for.
    fn access(&self) -> Access {
        self.replicas.borrow().first().map_or(Access::Write, |replica| replica.access)
    }

    /// Adds a replica, which resyncs in the background.
    ///
    /// # Errors
    /// Why it was not added.
    pub fn add<'a>(&'a self, target: &'a TargetName, force: bool) -> LocalBoxFuture<'a, Result<(), StackError>> {
        Box::pin(async move {
            let replica = OpenReplica::new(target, self.access(), &self.opener);
            let device = self.open_new(&replica, None).await?;
            let added = self.mirror.add(replica.source(Ok(device)), force).await;
            self.take_in(replica, added).await
        })
    }

    /// Opens what is to become a replica, in place of one if that is `replaced`. What another replica lies on is none, nor is the mirror
    /// itself, as a server has it: it would wait for its own writes.
    async fn open_new(&self, replica: &OpenReplica, replaced: Option<&str>) -> Result<DynDevice, StackError> {
        let device = replica.open().await?;
        let remote = replica.remote_devices();
        let refused = match self.describe().uuid.is_some_and(|uuid| remote.has_uuid(uuid)) {
            true => {
                let why = format!("{} is this mirror itself, as it is served", replica.name);
                Err(StackError::new(Cause::Refused, CHANGING, why))
            }
            false => self.remote.refuse_shared(CHANGING, (&replica.name, &remote), replaced),
        };
        if let Err(refused) = refused {
            let _ = replica.close().await;
            return Err(refused.on(&self.target));
        }
        Ok(device)
    }

    /// Replaces a replica, or adds the new one beside it while the old one is in sync.
    ///
    /// # Errors
    /// Why it was not replaced.
    pub fn replace<'a>(
        &'a self,
        old: &'a TargetName,
        new: &'a TargetName,
        force: bool,
    ) -> LocalBoxFuture<'a, Result<(), StackError>> {
        Box::pin(async move {
            let name = old.to_string();
            if force {
                self.mirror.trust_names();
            }
            let replicas = self.describe().replicas;
            let is_current = replicas
                .iter()
                .any(|replica| replica.name == name && replica.is_online && replica.state == ReplicaState::InSync);
            if is_current && old == new {
                return Err(StackError::new(Cause::Refused, CHANGING, format!("{name} is current")).on(&self.target));
            }
            if !is_current && !force {
                self.check_not_needed(&name)?;
            }
            let retired: Vec<Rc<OpenReplica>> =
                self.replicas.borrow().iter().filter(|replica| replica.name == name && !is_current).cloned().collect();
            for replica in &retired {
                // It has the file or connection open that the new device may need.
                replica.is_retired.set(true);
                let _ = replica.close().await;
            }
            let replica = OpenReplica::new(new, self.access(), &self.opener);
            let replaced = async {
                let replaced = (!is_current).then_some(&*name);
                let device =
                    self.open_new(&replica, replaced).await.map_err(|failure| self.advise_blank(new, failure))?;
                let replaced = self.mirror.replace(&name, replica.source(Ok(device)), force).await;
                self.take_in(replica, replaced).await
            };
            let replaced = replaced.await;
            match &replaced {
                Ok(()) => {
                    let is_gone = |replica: &mut Rc<OpenReplica>| replica.is_retired.get();
                    let gone: Vec<_> = self.replicas.borrow_mut().extract_if(.., is_gone).collect();
                    gone.iter().for_each(|replica| self.forget(replica));
                    self.name_members();
                    join_all(gone.iter().map(|replica| replica.let_go())).await.into_iter().collect()
                }
                Err(_) => {
                    retired.iter().for_each(|replica| replica.is_retired.set(false));
                    replaced
                }
            }
        })
    }

    /// Where what is left of a volume cannot be opened at a path, the command that makes a blank one of this mirror's format there.
    fn advise_blank(&self, new: &TargetName, failure: StackError) -> StackError {
        let TargetName::File(path) = new else { return failure };
        if failure.cause() != Cause::Unsuitable || !path.exists() {
            return failure;
        }
        let geometry = self.mirror.geometry();
        let (size, block) = (geometry.capacity_bytes(), geometry.block_size.bytes());
        let format = geometry.protection.map_or("--guard none".to_owned(), |format| {
            format!("--guard {} --type {}", format.guard(), format.protection() as u8 + 1)
        });
        let new = shell_word(new);
        failure.advise(format!(
            "`sealblock create {new} --size {size} --block-size {block} {format} --force` makes it a blank volume that fits; then repeat \
             the command"
        ))
    }

    /// Keeps a replica that the mirror has added, and closes one that it has refused.
    async fn take_in(&self, replica: Rc<OpenReplica>, taken: Result<(), ReplicaError>) -> Result<(), StackError> {
        match taken {
            Ok(()) => {
                replica.report_to(&self.damage, &self.remote);
                self.replicas.borrow_mut().push(replica);
                self.name_members();
                Ok(())
            }
            Err(error) => {
                let _ = replica.close().await;
                Err(replica_error(&error).on(&self.target))
            }
        }
    }

    /// Accepts the older copies on a replica.
    ///
    /// # Errors
    /// Why they stay older copies.
    pub fn accept_stale<'a>(&'a self, target: &'a TargetName) -> LocalBoxFuture<'a, Result<(), StackError>> {
        Box::pin(async move {
            let members = self.members();
            let name = member_of(&members, target).map_or_else(|| target.to_string(), str::to_owned);
            let taken = self.mirror.accept_stale(&name).await;
            let blocks = taken.map_err(|error| replica_error(&error).on(&self.target))?;
            tracing::info!(replica = %target, blocks, "older copies were accepted as the content of their blocks");
            Ok(())
        })
    }

    /// Removes a replica. One that may have the only copy of a block goes only with `force`.
    ///
    /// # Errors
    /// Why it was not removed.
    pub fn remove<'a>(&'a self, target: &'a TargetName, force: bool) -> LocalBoxFuture<'a, Result<(), StackError>> {
        Box::pin(async move {
            let name = target.to_string();
            if force {
                self.mirror.trust_names();
            } else {
                self.check_not_needed(&name)?;
            }
            let unknown = self.not_compared(&name);
            self.mirror.remove(&name).await.map_err(|error| replica_error(&error).on(&self.target))?;
            unknown.into_iter().for_each(note);
            let gone: Vec<Rc<OpenReplica>> =
                self.replicas.borrow_mut().extract_if(.., |replica| replica.name == name).collect();
            self.name_members();
            gone.iter().for_each(|replica| self.forget(replica));
            join_all(gone.iter().map(|replica| replica.let_go())).await.into_iter().collect()
        })
    }

    /// What is not known any more once this replica is gone, where it has blocks without seals or another one does: which of two copies that
    /// differ is right. A check of seals finds nothing of that on what is left.
    fn not_compared(&self, name: &str) -> Option<String> {
        let replicas = self.describe().replicas;
        let is_counted = |replica: &&ReplicaInfo| replica.is_online && replica.state == ReplicaState::InSync;
        let going = replicas.iter().filter(is_counted).rfind(|replica| replica.name == name)?;
        let staying: Vec<&str> =
            replicas.iter().filter(is_counted).filter(|other| other.id != going.id).map(|other| &*other.name).collect();
        (!self.mirror.abilities().seals && !staying.is_empty()).then(|| {
            format!(
                "{name} was not compared with {} before it was removed: not all of them have seals, and where they differed it is not known \
                 which was right",
                staying.join(", ")
            )
        })
    }

    /// Refuses to drop an online replica that may have the only copy of blocks.
    fn check_not_needed(&self, name: &str) -> Result<(), StackError> {
        self.only_copies(name).map_or(Ok(()), |(why, advice)| {
            let advice = format!("{advice}; --force drops these copies");
            Err(StackError::new(Cause::Refused, CHANGING, why).on(&self.target).advise(advice))
        })
    }

    /// Blocks that, as far as is known, only this replica has: older copies of lost blocks, or blocks that are bad on all remaining replicas.
    /// And what to do about it. Of a replica that is away nothing can be saved; the last in-sync one is never removed.
    fn only_copies(&self, name: &str) -> Option<(String, String)> {
        let replicas = self.describe().replicas;
        let is_here = |replica: &&ReplicaInfo| replica.is_online && replica.state != ReplicaState::Removed;
        let going = replicas.iter().filter(is_here).rfind(|replica| replica.name == name)?;
        let is_staying = |other: &&ReplicaInfo| other.id != going.id && other.state == ReplicaState::InSync;
        let staying: Vec<&str> = replicas.iter().filter(is_here).filter(is_staying).map(|other| &*other.name).collect();
        if staying.is_empty() {
            return None;
        }
        let left = staying.join(", ");
        if going.stale_blocks > 0 {
            let blocks = count(going.stale_blocks, "block");
            let why = format!(
                "{name} has the only, older copies of {blocks}, which are lost on the remaining replicas, {left}"
            );
            return Some((
                why,
                format!("`sealblock mirror accept-stale TARGET {}`, or rewrite them", shell_word(name)),
            ));
        }
        let known = self.damage.replicas();
        let view_of = |name: &str| known.iter().find(|(known, _)| known == name).map(|(_, view)| view.clone());
        let others: Vec<DamageView> = staying.iter().filter_map(|other| view_of(other)).collect();
        let runs = view_of(name).filter(|_| others.len() == staying.len())?.only_good_here(&others);
        let blocks = runs.iter().map(|(first, last)| last - first + 1).sum();
        if blocks == 0 {
            return None;
        }
        let (blocks, places) = (count(blocks, "block"), places_text(&runs));
        let why = format!(
            "{name} may have the only good copies of {blocks} ({places}), which are bad on the remaining replicas, {left}"
        );
        Some((why, "`sealblock verify TARGET --repair`, or `sealblock scrub start` where it is served".to_owned()))
    }

    async fn forget_of_replicas(&self) -> Result<(), Error> {
        let held: Vec<CloseHandle> =
            self.replicas.borrow().iter().flat_map(|replica| replica.held.borrow().clone()).collect();
        forget_lost(&held).await
    }

    /// Forgets what is known of a replica that is none any more, unless another one has its name.
    fn forget(&self, gone: &OpenReplica) {
        if !self.replicas.borrow().iter().any(|replica| replica.name == gone.name) {
            self.damage.set_replica(&gone.name, None);
            self.remote.set(&gone.name, None);
        }
    }

    /// The files that each of its replicas lies in, by the name of the replica: those that are open now.
    pub fn files(&self) -> Vec<(String, Vec<Arc<Backing>>)> {
        let replicas = self.replicas.borrow();
        let of = |replica: &Rc<OpenReplica>| replica.files.borrow().iter().filter_map(Weak::upgrade).collect();
        replicas.iter().map(|replica| (replica.name.clone(), of(replica))).collect()
    }

    /// The lost connections of each of its replicas, by the name of the replica. Those of an offline replica are of the
    /// device that was detached.
    pub fn lost_connections(&self) -> Vec<(String, Vec<LostRemote>)> {
        let replicas = self.replicas.borrow();
        let of = |replica: &Rc<OpenReplica>| {
            let mut lost = all_lost(&replica.connections.borrow());
            // The mirror opens the replica again, if its device does not reconnect.
            lost.iter_mut().for_each(|lost| lost.is_reconnecting |= replica.access.writes());
            lost
        };
        replicas.iter().map(|replica| (replica.name.clone(), of(replica))).collect()
    }

    /// Copies of metadata of each of its replicas that are lost, as text, by the name of the replica.
    pub fn lost_metadata(&self) -> Vec<(String, Vec<String>)> {
        let replicas = self.replicas.borrow();
        replicas.iter().map(|replica| (replica.name.clone(), replica.lost_metadata.borrow().unwritten())).collect()
    }

    /// Its name.
    pub fn target(&self) -> &TargetLabel {
        &self.target
    }

    /// Waits for a state other than `known`; `None` after the close.
    pub async fn other_state(&self, known: MirrorState) -> Option<MirrorState> {
        let state = self.mirror.state_changed(known).await;
        (!self.mirror.is_closed()).then_some(state)
    }

    /// Waits until no resync runs; true if all have finished.
    pub async fn wait_resync_ended(&self) -> bool {
        self.mirror.resync_ended().await
    }
}

impl Members for OpenMirror {
    /// Writes the labels, then closes the replicas. Replicas are closed even if the labels are not written in time: then the labels say that
    /// the replicas may differ.
    fn close(&self, limit: CloseLimit) -> LocalBoxFuture<'_, Result<(), Error>> {
        Box::pin(async move {
            let closing = async {
                let labelled = self.mirror.close_without(limit.requests_overdue()).await;
                if labelled.is_ok() && !self.mirror.may_be_lost() && self.describe().nosync_bytes == 0 {
                    // Where they had differed they have what a replica has that lacked nothing.
                    let _ = self.forget_of_replicas().await;
                }
                labelled
            };
            let labelled = limit.close(closing).await.flatten();
            let replicas = self.replicas.take();
            let closed = join_all(replicas.iter().map(|replica| replica.close_by(limit))).await;
            closed.into_iter().fold(labelled, Result::and)
        })
    }

    fn received_bytes(&self) -> Option<u64> {
        let replicas = self.replicas.borrow();
        let each = replicas
            .iter()
            .map(|replica| received_bytes(&replica.held.borrow()).map(|now| now + replica.received_bytes.get()));
        each.flatten().reduce(u64::saturating_add)
    }

    fn lost_answers(&self) -> Vec<String> {
        if !self.mirror.may_be_lost() {
            return Vec::new();
        }
        let replicas = self.replicas.borrow();
        let of_volumes: Vec<String> = replicas.iter().flat_map(|replica| replica.lost_answers()).collect();
        if of_volumes.is_empty() { vec![format!("{}: its labels say so", self.target)] } else { of_volumes }
    }

    fn forget_lost(&self) -> LocalBoxFuture<'_, Result<(), Error>> {
        Box::pin(async {
            self.mirror.forget_lost().await?;
            self.forget_of_replicas().await
        })
    }
}

impl OpenReplica {
    /// A replica that is not open yet.
    pub fn new(target: &TargetName, access: Access, opener: &ReplicaOpener) -> Rc<OpenReplica> {
        let identity = RefCell::new(TargetIdentity::of(target));
        let (name, target) = (target.to_string(), with_short_timeouts(target));
        Rc::new(OpenReplica {
            name,
            target,
            access: access.of_replica(),
            opener: Rc::clone(opener),
            held: RefCell::default(),
            identity,
            files: RefCell::default(),
            connections: RefCell::default(),
            remote: RefCell::default(),
            lost_metadata: RefCell::default(),
            damage: RefCell::default(),
            reports_to: RefCell::default(),
            received_bytes: Cell::new(0),
            is_retired: Cell::new(false),
            unsettled: RefCell::default(),
        })
    }

    /// Whether it has every change that was answered, as far as can be seen from here.
    pub fn answered(&self) -> Answered {
        let held = self.held.borrow();
        match (lost_answers(&held).is_empty(), received_bytes(&held)) {
            (false, _) => Answered::MayBeLost,
            (true, Some(_)) => Answered::Unknown,
            (true, None) => Answered::AllThere,
        }
    }

    /// Why changes of its volumes that were answered and not flushed may be lost.
    pub fn lost_answers(&self) -> Vec<String> {
        lost_answers(&self.held.borrow())
    }

    /// The source of this replica for the mirror.
    pub fn source(self: &Rc<Self>, device: Result<DynDevice, String>) -> ReplicaSource {
        let replica = Rc::clone(self);
        let monitor: LossMonitor = Box::new(move || {
            let lost = loss(&replica.connections.borrow()).map(|reason| Loss { reason, lacks_everything: false });
            lost.or_else(|| replica.cut_off().map(|reason| Loss { reason, lacks_everything: true }))
        });
        let loss_monitor = Some(monitor);
        ReplicaSource { loss_monitor, ..ReplicaSource::new(&*self.name, device, Some(self.reopen())) }
    }

    /// What is lost of its files, if one was truncated while it was in use.
    fn cut_off(&self) -> Option<String> {
        let files = self.files.borrow();
        let mut cut = files.iter().filter_map(Weak::upgrade).filter(|file| file.cut_off().is_some());
        cut.next().map(|file| format!("{} was truncated while it was in use", file.path().display()))
    }

    async fn open(&self) -> Result<DynDevice, StackError> {
        // The last open may still have the file or connection.
        let _ = self.close().await;
        let opened = (self.opener)(self.target.clone(), self.access).await?;
        Ok(self.hold(opened))
    }

    /// Keeps what belongs to the open device, and gives the device.
    pub fn hold(&self, opened: OpenedReplica) -> DynDevice {
        let OpenedReplica { device, identity, files, connections, remote, damage, lost_metadata, held } = opened;
        self.remote.replace(remote);
        self.identity.replace(identity);
        self.files.replace(files);
        self.connections.replace(connections);
        // As users know it, without the timeouts of a replica.
        let target = self.target.to_string();
        self.connections.borrow_mut().iter_mut().for_each(|connection| connection.rename(&target, &self.name));
        self.lost_metadata.replace(lost_metadata);
        self.damage.replace(Some(damage));
        self.held.replace(held);
        self.report();
        device
    }

    /// The devices at other servers that it lay on when it was opened last.
    pub fn remote_devices(&self) -> RemoteDevices {
        self.remote.borrow().clone()
    }

    /// Has a mirror know of its bad blocks and remote devices, as they are now and after each opening.
    fn report_to(&self, damage: &DamageView, remote: &ReplicaDevices) {
        self.reports_to.replace(Some((damage.clone(), remote.clone())));
        self.report();
    }

    fn report(&self) {
        if let Some((mirror, remote)) = &*self.reports_to.borrow() {
            remote.set(&self.name, Some(self.remote_devices()));
            if let Some(damage) = &*self.damage.borrow() {
                mirror.set_replica(&self.name, Some(damage.clone()));
            }
        }
    }

    /// Refuses what was opened again if it is now another device: what another replica lies on, what cannot be written, or, without a label,
    /// what its server says is other content than `before`.
    fn check_reopened(&self, stack: &DynDevice, before: &RemoteDevices) -> Result<(), String> {
        let (now, of) = (self.remote_devices(), stack.abilities());
        if self.access.writes() && !of.writable {
            return Err("it is read-only".to_owned());
        }
        if !of.is_native(RequestKind::ReadReserved) && now.is_other_than(before) {
            return Err("its server now has another device under the name".to_owned());
        }
        let siblings = self.reports_to.borrow().as_ref().map(|(_, remote)| remote.clone());
        let checked = siblings.map_or(Ok(()), |of| of.refuse_shared("open", (&self.name, &now), None));
        checked.map_err(|refused| refused.in_short())
    }

    /// Rewrites the unchanged label of a remote replica. A server of `--as-member` accepts writes only after its label was written;
    /// repairs write no other label and would be refused.
    pub async fn claim(&self, stack: &DynDevice) -> Result<(), Error> {
        let of = stack.abilities();
        if !self.access.writes() || !is_remote(&self.target) || !of.writable || !of.is_native(RequestKind::ReadReserved)
        {
            return Ok(());
        }
        let slot = ReservedArea::GroupLabel;
        match stack.execute(Request::read_reserved(slot)).await? {
            Response::Reserved(bytes) if !bytes.is_empty() => {
                stack.execute(Request::write_reserved(slot, bytes)).await.map(drop)
            }
            _ => Ok(()),
        }
    }

    /// Closes its device, if it is open.
    pub async fn close(&self) -> Result<(), Error> {
        self.close_by(CloseLimit::OF_PROGRAM).await
    }

    async fn close_by(&self, limit: CloseLimit) -> Result<(), Error> {
        let held = self.held.take();
        let received = received_bytes(&held).unwrap_or(0);
        self.received_bytes.set(self.received_bytes.get() + received);
        let closed = close_all(&held, limit).await;
        if let Err(error) = &closed {
            self.unsettled.replace(Some((error.clone(), now() + QUIESCE)));
        }
        closed
    }

    /// Closes it for good.
    ///
    /// # Errors
    /// If a change that was sent to it may still be executed, now or since it failed: whoever writes to it next must know that.
    async fn let_go(&self) -> Result<(), StackError> {
        let _ = self.close_by(CloseLimit::after(now() + LETTING_GO)).await;
        match self.unsettled.take().filter(|(_, until)| *until > now()) {
            Some((error, _)) => {
                Err(device_error(format!("let go of {}, which is no replica any more", self.name), &error))
            }
            None => Ok(()),
        }
    }

    fn reopen(self: &Rc<Self>) -> Reopen {
        let replica = Rc::clone(self);
        Box::new(move || -> LocalBoxFuture<'static, Result<DynDevice, String>> {
            let replica = Rc::clone(&replica);
            Box::pin(async move {
                if replica.is_retired.get() {
                    return Err("it is being replaced by another device".to_owned());
                }
                let before = replica.remote_devices();
                let stack = replica.open().await.map_err(|failure| failure.in_short())?;
                if let Err(why) = replica.check_reopened(&stack, &before) {
                    replica.remote.replace(before);
                    let _ = replica.close().await;
                    return Err(why);
                }
                replica.claim(&stack).await.map_err(|error| error.to_string())?;
                Ok(stack)
            })
        })
    }
}

/// The first of these runs of blocks.
fn places_text(runs: &[(u64, u64)]) -> String {
    const MOST: usize = 4;
    let text = |(first, last): &(u64, u64)| if first == last { first.to_string() } else { format!("{first}..{last}") };
    let named = runs.iter().take(MOST).map(text);
    named.chain((runs.len() > MOST).then(|| "and more".to_owned())).collect::<Vec<_>>().join(", ")
}

impl std::fmt::Debug for OpenMirror {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.mirror.fmt(f)
    }
}
