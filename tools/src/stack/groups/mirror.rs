//! Opens mirrors, without replicas that are offline, and reopens these when they are back.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Mutex;

use futures_util::future::{LocalBoxFuture, join_all};
use sealblock_block::{Ability, Device, DynDevice, Error, Request, ReservedArea, Response};
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_layers_mirror::{
    CreateOptions, Mirror, MirrorError, MirrorInfo, MirrorState, OpenOptions, Reopen, ReplicaError, ReplicaSource,
};

use super::super::{Access, CloseHandle, OpenTarget, ReactorClock, TargetInfo, Usage, close_all, received_bytes};
use super::multipath::is_remote;
use super::with_short_timeouts;
use crate::commands::create::new_uuid;
use crate::control::protocol::ControlCommand;
use crate::exit::{Cause, CliError};
use crate::report::note;
use crate::target::{TargetLabel, TargetName};

const SHOWN: &str = "devices of one kind; a replica on another host is served with `--protection shown`";
const CHANGING: &str = "changing the mirror";

/// An open mirror and its replicas.
pub struct OpenMirror {
    mirror: Rc<Mirror<ReactorClock>>,
    replicas: RefCell<Vec<Rc<OpenReplica>>>,
    /// Its name: the target it was opened by, until a command changes the replicas.
    target: TargetLabel,
}

/// A replica, which is reopened after each loss.
struct OpenReplica {
    /// Its name.
    name: String,
    target: TargetName,
    access: Access,
    held: RefCell<Vec<CloseHandle>>,
    /// Bytes received before the last open.
    received_bytes: Cell<u64>,
    /// True while another device replaces it: it must not be reopened.
    is_retired: Cell<bool>,
}

impl OpenMirror {
    /// Its state now.
    pub fn describe(&self) -> MirrorInfo {
        self.mirror.describe()
    }

    /// Executes a command for its replicas.
    ///
    /// # Errors
    /// Why the command failed.
    pub async fn execute(&self, command: &ControlCommand) -> Result<(), CliError> {
        let target =
            |replica: &str| replica.parse::<TargetName>().map_err(|error| CliError::new(Cause::Usage, CHANGING, error));
        match command {
            ControlCommand::MirrorAdd { replica, force } => self.add(&target(replica)?, *force).await,
            ControlCommand::MirrorReplace { old, new, force } => {
                self.replace(&target(old)?, &target(new)?, *force).await
            }
            ControlCommand::MirrorRemove { replica, force } => self.remove(&target(replica)?, *force).await,
            ControlCommand::MirrorAcceptStale { replica } => self.accept_stale(&target(replica)?).await,
            ControlCommand::Status
            | ControlCommand::Log { .. }
            | ControlCommand::MirrorStatus
            | ControlCommand::ScrubStatus
            | ControlCommand::ScrubStart { .. }
            | ControlCommand::ScrubPause
            | ControlCommand::ScrubStop
            | ControlCommand::Resize { .. } => Ok(()),
        }
    }

    /// The access that replicas are opened for.
    fn access(&self) -> Access {
        self.replicas.borrow().first().map_or(Access::Write, |replica| replica.access)
    }

    /// Adds a replica, which resyncs in the background.
    async fn add(&self, target: &TargetName, force: bool) -> Result<(), CliError> {
        let replica = OpenReplica::new(target, self.access());
        let (stack, _) = replica.open().await?;
        let added = self.mirror.add(replica.source(Ok(stack)), force).await;
        self.take_in(replica, added).await
    }

    /// Replaces a replica, or adds the new one beside it while the old one is in sync.
    async fn replace(&self, old: &TargetName, new: &TargetName, force: bool) -> Result<(), CliError> {
        let name = old.to_string();
        if force {
            self.mirror.trust_names();
        }
        let replicas = self.describe().replicas;
        let is_current = replicas
            .iter()
            .any(|replica| replica.name == name && replica.is_online && replica.state == ReplicaState::InSync);
        if is_current && old == new {
            return Err(CliError::new(Cause::Refused, CHANGING, format!("{name} is current")).on(&self.target));
        }
        let retired: Vec<Rc<OpenReplica>> =
            self.replicas.borrow().iter().filter(|replica| replica.name == name && !is_current).cloned().collect();
        for replica in &retired {
            // It has the file or connection open that the new device may need.
            replica.is_retired.set(true);
            let _ = replica.close().await;
        }
        let replica = OpenReplica::new(new, self.access());
        let replaced = match replica.open().await {
            Ok((stack, _)) => {
                let replaced = self.mirror.replace(&name, replica.source(Ok(stack)), force).await;
                self.take_in(replica, replaced).await
            }
            Err(failure) => Err(failure),
        };
        match &replaced {
            Ok(()) => self.replicas.borrow_mut().retain(|replica| !replica.is_retired.get()),
            Err(_) => retired.iter().for_each(|replica| replica.is_retired.set(false)),
        }
        replaced
    }

    /// Keeps a replica that the mirror has added, and closes one that it has refused.
    async fn take_in(&self, replica: Rc<OpenReplica>, taken: Result<(), ReplicaError>) -> Result<(), CliError> {
        match taken {
            Ok(()) => {
                self.replicas.borrow_mut().push(replica);
                Ok(())
            }
            Err(error) => {
                let _ = replica.close().await;
                Err(of_member(&error).on(&self.target))
            }
        }
    }

    /// Accepts the older copies on a replica.
    async fn accept_stale(&self, target: &TargetName) -> Result<(), CliError> {
        let taken = self.mirror.accept_stale(&target.to_string()).await;
        let blocks = taken.map_err(|error| of_member(&error).on(&self.target))?;
        tracing::info!(replica = %target, blocks, "older copies were taken for the content of their blocks");
        Ok(())
    }

    /// Removes a replica.
    async fn remove(&self, target: &TargetName, force: bool) -> Result<(), CliError> {
        let name = target.to_string();
        if force {
            self.mirror.trust_names();
        }
        self.mirror.remove(&name).await.map_err(|error| of_member(&error).on(&self.target))?;
        let gone: Vec<Rc<OpenReplica>> =
            self.replicas.borrow_mut().extract_if(.., |replica| replica.name == name).collect();
        for replica in gone {
            let _ = replica.close().await;
        }
        Ok(())
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
    pub async fn settled(&self) -> bool {
        self.mirror.resync_ended().await
    }

    /// Writes the labels, then closes the replicas.
    pub(in super::super) async fn close(&self) -> Result<(), Error> {
        let noted = self.mirror.close().await;
        let replicas = self.replicas.take();
        let closed = join_all(replicas.iter().map(|replica| replica.close())).await;
        closed.into_iter().fold(noted, Result::and)
    }

    /// Bytes of payload received from remote replicas until now; `None` if none is remote.
    pub(in super::super) fn received_bytes(&self) -> Option<u64> {
        let replicas = self.replicas.borrow();
        let each = replicas
            .iter()
            .map(|replica| received_bytes(&replica.held.borrow()).map(|now| now + replica.received_bytes.get()));
        each.flatten().reduce(u64::saturating_add)
    }
}

impl OpenReplica {
    fn new(target: &TargetName, access: Access) -> Rc<OpenReplica> {
        let (name, target) = (target.to_string(), with_short_timeouts(target));
        Rc::new(OpenReplica {
            name,
            target,
            access,
            held: RefCell::default(),
            received_bytes: Cell::new(0),
            is_retired: Cell::new(false),
        })
    }

    /// The source of this replica for the mirror.
    fn source(self: &Rc<Self>, device: Result<DynDevice, String>) -> ReplicaSource {
        ReplicaSource { name: self.name.clone(), device, reopen: Some(self.reopen()) }
    }

    async fn open(&self) -> Result<(DynDevice, TargetInfo), CliError> {
        // The last open may still have the file or connection.
        let _ = self.close().await;
        let OpenTarget { gate, info, held, .. } =
            super::super::open_for(&self.target, self.access, Usage::Member).await?;
        self.held.replace(held);
        Ok((DynDevice::new(gate), info))
    }

    /// Rewrites the unchanged label of a remote replica. A server of `--as-member` accepts writes only after its label was written;
    /// repairs write no other label and would be refused.
    async fn claim(&self, stack: &DynDevice) -> Result<(), Error> {
        let of = stack.abilities();
        if !self.access.writes() || !is_remote(&self.target) || !of.writable || of.reserved != Ability::Native {
            return Ok(());
        }
        let slot = ReservedArea::GroupLabel;
        match stack.execute(Request::ReadReserved { area: slot }).await? {
            Response::Reserved(bytes) if !bytes.is_empty() => {
                stack.execute(Request::WriteReserved { area: slot, bytes }).await.map(drop)
            }
            _ => Ok(()),
        }
    }

    async fn close(&self) -> Result<(), Error> {
        let held = self.held.take();
        let received = received_bytes(&held).unwrap_or(0);
        self.received_bytes.set(self.received_bytes.get() + received);
        close_all(&held).await
    }

    fn reopen(self: &Rc<Self>) -> Reopen {
        let replica = Rc::clone(self);
        Box::new(move || -> LocalBoxFuture<'static, Result<DynDevice, String>> {
            let replica = Rc::clone(&replica);
            Box::pin(async move {
                if replica.is_retired.get() {
                    return Err("another device is taking its place".to_owned());
                }
                let (stack, _) = replica.open().await.map_err(|failure| failure.in_short())?;
                if replica.access.writes() && !stack.abilities().writable {
                    let _ = replica.close().await;
                    return Err("it is read only".to_owned());
                }
                replica.claim(&stack).await.map_err(|error| error.to_string())?;
                Ok(stack)
            })
        })
    }
}

/// Opens the replicas concurrently. The mirror runs without unreachable ones, as far as the labels of the others permit.
pub(super) async fn open(target: &TargetName, replicas: &[TargetName], access: Access) -> Result<OpenTarget, CliError> {
    let replicas: Vec<Rc<OpenReplica>> = replicas.iter().map(|replica| OpenReplica::new(replica, access)).collect();
    let opened = join_all(replicas.iter().map(|replica| replica.open())).await;
    match put_together(target, &replicas, opened, access).await {
        Ok(opened) => Ok(opened),
        Err(failure) => {
            // A failure to close the replicas would hide the first failure.
            join_all(replicas.iter().map(|replica| replica.close())).await;
            Err(failure)
        }
    }
}

async fn put_together(
    target: &TargetName,
    replicas: &[Rc<OpenReplica>],
    opened: Vec<Result<(DynDevice, TargetInfo), CliError>>,
    access: Access,
) -> Result<OpenTarget, CliError> {
    let (mut sources, mut info, mut here) = (Vec::new(), Vec::new(), Vec::new());
    for (replica, opened) in replicas.iter().zip(opened) {
        let device = match opened {
            Ok((stack, of)) => {
                info.push(of);
                here.push((replica, stack.clone()));
                Ok(stack)
            }
            Err(failure) if is_gone(&failure) => Err(failure.in_short()),
            // An invalid target, or a file in use by another process, is an error and not an offline replica.
            Err(failure) => return Err(failure),
        };
        sources.push(replica.source(device));
    }
    let options = OpenOptions { is_read_only: access == Access::Read, random: new_uuid()? };
    let opened = sealblock_layers_mirror::open(sources, ReactorClock, options).await;
    let opened = opened.map_err(|error| of_mirror(&error).on(target))?;
    let described = opened.mirror.describe();
    report_offline(target, &described);
    for (replica, stack) in here {
        // A replica that fails now goes out of sync with the first write that fails on it.
        if let Err(error) = replica.claim(&stack).await {
            tracing::warn!(replica = replica.name, %error, "the label could not be written");
        }
    }
    for replica in replicas
        .iter()
        .filter(|replica| described.replicas.iter().any(|other| other.name == replica.name && !other.is_online))
    {
        // It must be closed so that `mirror replace` can open it.
        let _ = replica.close().await;
    }
    Ok(held(target, replicas, info, opened))
}

/// Creates a mirror of these devices; see [`sealblock_layers_mirror::create`].
///
/// # Errors
/// Why they cannot become one.
pub async fn create(
    target: &TargetName,
    replicas: &[TargetName],
    from: Option<usize>,
    force: bool,
) -> Result<OpenTarget, CliError> {
    let replicas: Vec<Rc<OpenReplica>> =
        replicas.iter().map(|replica| OpenReplica::new(replica, Access::Write)).collect();
    let created = create_of(target, &replicas, from, force).await;
    if created.is_err() {
        join_all(replicas.iter().map(|replica| replica.close())).await;
    }
    created
}

async fn create_of(
    target: &TargetName,
    replicas: &[Rc<OpenReplica>],
    from: Option<usize>,
    force: bool,
) -> Result<OpenTarget, CliError> {
    let (mut sources, mut info) = (Vec::new(), Vec::new());
    for replica in replicas {
        let (stack, of) = replica.open().await?;
        info.push(of);
        sources.push(replica.source(Ok(stack)));
    }
    let options = CreateOptions { random: new_uuid()?, from, force };
    let opened = sealblock_layers_mirror::create(sources, ReactorClock, options).await;
    let opened = opened.map_err(|error| of_member(&error).on(target))?;
    Ok(held(target, replicas, info, opened))
}

/// An open mirror with its worker spawned.
fn held(
    target: &TargetName,
    replicas: &[Rc<OpenReplica>],
    info: Vec<TargetInfo>,
    opened: sealblock_layers_mirror::OpenMirror<ReactorClock>,
) -> OpenTarget {
    drop(sealblock_runtime_reactor::spawn(opened.worker.run()));
    let replicas = RefCell::new(replicas.to_vec());
    let open = Rc::new(OpenMirror { mirror: opened.mirror.clone(), replicas, target: TargetLabel::new(target) });
    let info = TargetInfo { mirror: Some(open.clone()), ..TargetInfo::over("mirror", info) };
    OpenTarget::new(target, opened.mirror, info, vec![CloseHandle::Mirror(open)])
}

/// Reports offline replicas: once for each mirror of this process, however many cores open it.
fn report_offline(target: &TargetName, mirror: &MirrorInfo) {
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    for replica in mirror.replicas.iter().filter(|replica| !replica.is_online && replica.state != ReplicaState::Removed)
    {
        let what = format!("{target} runs without {}: {}", replica.name, replica.last_error);
        let mut told = TOLD.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if told.insert(what.clone()) {
            note(what);
        }
    }
}

/// True if a replica that could not be opened may come back.
fn is_gone(failure: &CliError) -> bool {
    matches!(failure.cause(), Cause::Unreachable | Cause::Io | Cause::Damaged | Cause::Unsuitable)
}

fn of_mirror(error: &MirrorError) -> CliError {
    let (cause, advice) = match error {
        MirrorError::ReplicaCount(_) => (Cause::Usage, None),
        MirrorError::Assemble { error: refusal, .. } => advice(refusal),
        MirrorError::Label { .. } => {
            (Cause::Damaged, Some("leaving out-of-sync replicas out, or `sealblock create --force`"))
        }
        MirrorError::Replica { .. } | MirrorError::WriteLabels(_) => (Cause::Io, None),
        MirrorError::BlockSize { .. }
        | MirrorError::Size { .. }
        | MirrorError::Capacity { .. }
        | MirrorError::Pages { .. } => (Cause::Unsuitable, None),
        MirrorError::Protection { .. } => (Cause::Unsuitable, Some(SHOWN)),
    };
    let failure = CliError::new(cause, "opening", error);
    // What labels forbid needs a command that changes replicas or labels.
    let failure = if cause == Cause::Refused { failure.lasting() } else { failure };
    match advice {
        Some(advice) => failure.advise(advice),
        None => failure,
    }
}

fn of_member(error: &ReplicaError) -> CliError {
    let failure = |cause| CliError::new(cause, CHANGING, error);
    match error {
        ReplicaError::Full | ReplicaError::LastInSync(_) => failure(Cause::Refused),
        ReplicaError::ReadOnly => failure(Cause::Refused).advise("a mirror that is open for writing"),
        ReplicaError::Offline { .. } => failure(Cause::Unreachable),
        ReplicaError::Labelled { .. } | ReplicaError::NotBlank { .. } => {
            failure(Cause::Refused).advise("another device, or --force to replace what is on it")
        }
        ReplicaError::InUse { .. } => failure(Cause::Refused),
        ReplicaError::AmbiguousSource { .. } => {
            failure(Cause::Refused).advise("--from DEVICE, whose content counts, and --force")
        }
        ReplicaError::NoRoom(_) => failure(Cause::Unsuitable)
            .advise("a protected volume (`sealblock create`) or a namespace of sealblock as the first replica"),
        ReplicaError::Unfit(MirrorError::ReplicaCount(_)) => failure(Cause::Usage),
        ReplicaError::Unfit(MirrorError::Protection { .. }) => failure(Cause::Unsuitable).advise(SHOWN),
        ReplicaError::Unfit(_) => failure(Cause::Unsuitable)
            .advise("devices of the same block size, protection information and size; one that is added may be larger"),
        ReplicaError::Unknown(_) => failure(Cause::Usage).advise("`sealblock mirror status` names the replicas"),
        ReplicaError::Ambiguous { .. } => failure(Cause::Refused).advise(
            "again when one of them is back, or --force to go by the order of the names: a replica that is taken for another is out, and \
             loses nothing",
        ),
        ReplicaError::WriteLabels(_) | ReplicaError::WriteBlocks(_) => failure(Cause::Io),
    }
}

fn advice(refusal: &sealblock_layers_mirror::assemble::AssembleError) -> (Cause, Option<&'static str>) {
    use sealblock_layers_mirror::assemble::AssembleError;
    match refusal {
        AssembleError::NoReplica | AssembleError::NewWithoutReplica { .. } | AssembleError::NoneInSync => {
            (Cause::Unreachable, Some("again when the replicas are online"))
        }
        AssembleError::NotAReplica { .. } => {
            (Cause::Refused, Some("`sealblock mirror add TARGET REPLICA` adds and resyncs a new replica"))
        }
        AssembleError::Removed { .. } => (
            Cause::Refused,
            Some("the mirror without it; `sealblock mirror add TARGET REPLICA --force` makes it a replica again"),
        ),
        AssembleError::NotCreated { .. } => (
            Cause::Refused,
            Some("`sealblock mirror create A B .. --from A` to make a mirror that has the content of A"),
        ),
        AssembleError::NoRoom => (Cause::Refused, Some("a protected volume (`sealblock create`) among the replicas")),
        AssembleError::OtherMirror { .. } | AssembleError::Duplicate { .. } => {
            (Cause::Refused, Some("the replicas of one mirror"))
        }
        AssembleError::SplitBrain { .. } => (
            Cause::Refused,
            Some(
                "look at each replica by itself, move the one to discard away, then `sealblock mirror replace TARGET OLD NEW`",
            ),
        ),
    }
}

impl std::fmt::Debug for OpenMirror {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.mirror.fmt(f)
    }
}
