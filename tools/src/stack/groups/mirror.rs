//! Mirrors: legs that are gone without, and opened again when they are back.

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

const SHOWN: &str = "devices of one kind; a leg on another host is served with `--protection shown`";
const CHANGING: &str = "changing the legs";

/// A mirror that is open, and its legs.
pub struct OpenMirror {
    mirror: Rc<Mirror<ReactorClock>>,
    replicas: RefCell<Vec<Rc<OpenReplica>>>,
    /// What it is called: what it was opened by, until somebody names the legs that it has.
    target: TargetLabel,
}

/// A leg that is opened as often as it is lost.
struct OpenReplica {
    /// What it is called.
    name: String,
    target: TargetName,
    access: Access,
    held: RefCell<Vec<CloseHandle>>,
    /// Bytes that came before it was opened the last time.
    received_bytes: Cell<u64>,
    /// Another device is taking its place: it is not to be opened anew.
    is_retired: Cell<bool>,
}

impl OpenMirror {
    /// What it is made of now.
    pub fn describe(&self) -> MirrorInfo {
        self.mirror.describe()
    }

    /// Carries out what somebody has ordered of its legs.
    ///
    /// # Errors
    /// Why it was not done.
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

    /// What legs are opened to do.
    fn access(&self) -> Access {
        self.replicas.borrow().first().map_or(Access::Write, |replica| replica.access)
    }

    /// Adds a leg, whose content is replaced in the background.
    async fn add(&self, target: &TargetName, force: bool) -> Result<(), CliError> {
        let replica = OpenReplica::new(target, self.access());
        let (stack, _) = replica.open().await?;
        let added = self.mirror.add(replica.source(Ok(stack)), force).await;
        self.take_in(replica, added).await
    }

    /// Puts another device in the place of a leg, or beside it as long as it is current.
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
            // It holds the file, or the connection, that the new device may be under.
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

    /// Keeps a leg that the mirror has taken, and closes one that it has not.
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

    /// Takes the older copies that a leg keeps for the blocks' content.
    async fn accept_stale(&self, target: &TargetName) -> Result<(), CliError> {
        let taken = self.mirror.accept_stale(&target.to_string()).await;
        let blocks = taken.map_err(|error| of_member(&error).on(&self.target))?;
        tracing::info!(replica = %target, blocks, "older copies were taken for the content of their blocks");
        Ok(())
    }

    /// Takes a leg out for good.
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

    /// What it is called.
    pub fn target(&self) -> &TargetLabel {
        &self.target
    }

    /// How it is once that is something else than `known`; nothing when it was closed.
    pub async fn other_state(&self, known: MirrorState) -> Option<MirrorState> {
        let state = self.mirror.state_changed(known).await;
        (!self.mirror.is_closed()).then_some(state)
    }

    /// Waits until no leg is being brought up to date; whether all that were are.
    pub async fn settled(&self) -> bool {
        self.mirror.resync_ended().await
    }

    /// Notes what is settled, then closes the legs.
    pub(in super::super) async fn close(&self) -> Result<(), Error> {
        let noted = self.mirror.close().await;
        let replicas = self.replicas.take();
        let closed = join_all(replicas.iter().map(|replica| replica.close())).await;
        closed.into_iter().fold(noted, Result::and)
    }

    /// Bytes of payload that came from legs on other hosts until now; nothing where none is away.
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

    /// The leg for the mirror.
    fn source(self: &Rc<Self>, device: Result<DynDevice, String>) -> ReplicaSource {
        ReplicaSource { name: self.name.clone(), device, reopen: Some(self.reopen()) }
    }

    async fn open(&self) -> Result<(DynDevice, TargetInfo), CliError> {
        // What is left of the last time holds the file, or the connection.
        let _ = self.close().await;
        let OpenTarget { gate, info: info, held, .. } =
            super::super::open_for(&self.target, self.access, Usage::Member).await?;
        self.held.replace(held);
        Ok((DynDevice::new(gate), info))
    }

    /// Writes the label of a leg that is away once more, as it is. A host that serves it as a member takes that for the sign
    /// that its mirror has come; repairs, which need no other label, would be refused without.
    async fn claim(&self, stack: &DynDevice) -> Result<(), Error> {
        let of = stack.abilities();
        if !self.access.writes() || !is_remote(&self.target) || !of.writable || of.reserved != Ability::Native {
            return Ok(());
        }
        let slot = ReservedArea::GroupLabel;
        match stack.execute(Request::ReadReserved { slot }).await? {
            Response::Reserved(bytes) if !bytes.is_empty() => {
                stack.execute(Request::WriteReserved { slot, bytes }).await.map(drop)
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

/// Opens the legs, all at once. Those that cannot be reached are gone without, as far as the others allow.
pub(super) async fn open(target: &TargetName, replicas: &[TargetName], access: Access) -> Result<OpenTarget, CliError> {
    let replicas: Vec<Rc<OpenReplica>> = replicas.iter().map(|replica| OpenReplica::new(replica, access)).collect();
    let opened = join_all(replicas.iter().map(|replica| replica.open())).await;
    match put_together(target, &replicas, opened, access).await {
        Ok(opened) => Ok(opened),
        Err(failure) => {
            // What is wrong with the legs is to be said, not what is wrong with closing them.
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
            // What cannot be meant, or is in use by somebody else, is no leg that is merely missing.
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
        // A leg that fails now is left behind by the first change that it does not take.
        if let Err(error) = replica.claim(&stack).await {
            tracing::warn!(replica = replica.name, %error, "the label could not be written");
        }
    }
    for replica in replicas
        .iter()
        .filter(|replica| described.replicas.iter().any(|other| other.name == replica.name && !other.is_online))
    {
        // Whoever makes it a leg must be able to open it.
        let _ = replica.close().await;
    }
    Ok(held(target, replicas, info, opened))
}

/// Makes a mirror of these devices; see [`sealblock_layers_mirror::create`].
///
/// # Errors
/// Why they cannot be one.
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

/// A mirror as one that is open, its worker running.
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

/// Says which legs are not there: once for each mirror of this process, however many cores open it.
fn report_offline(target: &TargetName, mirror: &MirrorInfo) {
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    for replica in mirror.replicas.iter().filter(|replica| !replica.is_online && replica.state != ReplicaState::Removed) {
        let what = format!("{target} goes without {}: {}", replica.name, replica.last_error);
        let mut told = TOLD.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if told.insert(what.clone()) {
            note(what);
        }
    }
}

/// Whether a leg that could not be opened is one that may come back.
fn is_gone(failure: &CliError) -> bool {
    matches!(failure.cause(), Cause::Unreachable | Cause::Io | Cause::Damaged | Cause::Unsuitable)
}

fn of_mirror(error: &MirrorError) -> CliError {
    let (cause, advice) = match error {
        MirrorError::ReplicaCount(_) => (Cause::Usage, None),
        MirrorError::Assemble { error: refusal, .. } => advice(refusal),
        MirrorError::Label { .. } => (Cause::Damaged, Some("naming `missing` legs out, or `sealblock create --force`")),
        MirrorError::Replica { .. } | MirrorError::WriteLabels(_) => (Cause::Io, None),
        MirrorError::BlockSize { .. }
        | MirrorError::Size { .. }
        | MirrorError::Capacity { .. }
        | MirrorError::Pages { .. } => (Cause::Unsuitable, None),
        MirrorError::Protection { .. } => (Cause::Unsuitable, Some(SHOWN)),
    };
    let failure = CliError::new(cause, "opening", error);
    // What labels forbid, only somebody who changes legs or their labels allows.
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
            .advise("a protected volume (`sealblock create`) or a namespace of sealblock as the first leg"),
        ReplicaError::Unfit(MirrorError::ReplicaCount(_)) => failure(Cause::Usage),
        ReplicaError::Unfit(MirrorError::Protection { .. }) => failure(Cause::Unsuitable).advise(SHOWN),
        ReplicaError::Unfit(_) => failure(Cause::Unsuitable)
            .advise("devices of the same block size, protection information and size; one that is added may be larger"),
        ReplicaError::Unknown(_) => failure(Cause::Usage).advise("`sealblock mirror status` names the legs"),
        ReplicaError::Ambiguous { .. } => failure(Cause::Refused).advise(
            "again when one of them is back, or --force to go by the order of the names: a leg that is taken for another is out, and \
             loses nothing",
        ),
        ReplicaError::WriteLabels(_) | ReplicaError::WriteBlocks(_) => failure(Cause::Io),
    }
}

fn advice(refusal: &sealblock_layers_mirror::assemble::AssembleError) -> (Cause, Option<&'static str>) {
    use sealblock_layers_mirror::assemble::AssembleError;
    match refusal {
        AssembleError::NoReplica | AssembleError::NewWithoutReplica { .. } | AssembleError::NoneInSync => {
            (Cause::Unreachable, Some("again when the legs are there"))
        }
        AssembleError::NotAReplica { .. } => {
            (Cause::Refused, Some("`sealblock mirror add TARGET LEG` brings a new leg up to date"))
        }
        AssembleError::Removed { .. } => (
            Cause::Refused,
            Some("the mirror without it; `sealblock mirror add TARGET LEG --force` makes it a leg again"),
        ),
        AssembleError::NotCreated { .. } => (
            Cause::Refused,
            Some("`sealblock mirror create A B .. --from A` to make a mirror that has the content of A"),
        ),
        AssembleError::NoRoom => (Cause::Refused, Some("a protected volume (`sealblock create`) among the legs")),
        AssembleError::OtherMirror { .. } | AssembleError::Duplicate { .. } => {
            (Cause::Refused, Some("the legs of one mirror"))
        }
        AssembleError::SplitBrain { .. } => (
            Cause::Refused,
            Some(
                "look at each leg by itself, move the one to be given up away, then `sealblock mirror replace TARGET OLD NEW`",
            ),
        ),
    }
}

impl std::fmt::Debug for OpenMirror {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.mirror.fmt(f)
    }
}
