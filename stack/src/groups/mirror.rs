//! Opens mirrors, without replicas that are offline, and creates them.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Mutex;

use futures_util::future::join_all;
use sealblock_block::{Device, DynDevice, ErrorKind, WhyOlder};
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_layers_mirror::label::name::MirrorName;
use sealblock_layers_mirror::{
    Answered, CreateOptions, Mirror, MirrorInfo, OpenOptions, ReplicaSource, open_beside_lost,
};

use super::mirror_errors::{mirror_error, replica_error};
use super::replicas::{OpenMirror, OpenReplica, OpenedReplica, ReplicaOpener};
use crate::error::{Cause, StackError, shell_word};
use crate::failures::device_error;
use crate::identity::new_uuid;
use crate::opened::held::{Access, CloseHandle, Usage};
use crate::opened::info::TargetInfo;
use crate::opened::own_label::doubt_by_label;
use crate::opened::same_remote::refuse_shared;
use crate::opened::target_identity::opening_order;
use crate::opened::{OpenTarget, Opener};
use crate::program::{ReactorClock, note};
use crate::target::TargetName;

/// Opens the replicas concurrently. The mirror runs without unreachable ones, as far as the labels of the others permit.
pub(crate) async fn open(
    target: &TargetName,
    replicas: &[TargetName],
    access: Access,
    opener: Opener,
) -> Result<OpenTarget, StackError> {
    let replicas = not_open(replicas, access, opener);
    let opened = join_all(replicas.iter().map(|replica| open_first(replica, opener))).await;
    match put_together(target, &replicas, opened, access, opener).await {
        Ok(opened) => Ok(opened),
        Err(failure) => {
            // A failure to close the replicas would hide the first failure.
            join_all(replicas.iter().map(|replica| replica.close())).await;
            Err(failure)
        }
    }
}

/// The replicas of these targets.
fn not_open(replicas: &[TargetName], access: Access, opener: Opener) -> Vec<Rc<OpenReplica>> {
    let opener = by(opener);
    replicas.iter().map(|replica| OpenReplica::new(replica, access, &opener)).collect()
}

/// Opens replicas by what opens targets.
fn by(opener: Opener) -> ReplicaOpener {
    Rc::new(move |target, access| {
        Box::pin(async move { Ok(of_replica(opener(&target, access, Usage::Member).await?, &target).0) })
    })
}

/// An open target as the device of a replica, and what it is made of.
fn of_replica(opened: OpenTarget, target: &TargetName) -> (OpenedReplica, TargetInfo) {
    let OpenTarget { device, info, held, .. } = opened;
    let (identity, files, damage) = (info.identity(target), info.open_files(), info.damage.clone());
    let (lost_metadata, connections) = (info.lost_metadata(), info.connections());
    let remote = info.remote_devices(target);
    (OpenedReplica { device, identity, files, connections, remote, damage, lost_metadata, held }, info)
}

/// Opens a replica for the first time, and returns its parts.
async fn open_first(replica: &OpenReplica, opener: Opener) -> Result<(DynDevice, TargetInfo), StackError> {
    let opened = opener(&replica.target, replica.access, Usage::Member).await?;
    let (opened, info) = of_replica(opened, &replica.target);
    Ok((replica.hold(opened), info))
}

async fn put_together(
    target: &TargetName,
    replicas: &[Rc<OpenReplica>],
    opened: Vec<Result<(DynDevice, TargetInfo), StackError>>,
    access: Access,
    opener: Opener,
) -> Result<OpenTarget, StackError> {
    let (mut sources, mut info, mut here) = (Vec::new(), Vec::new(), Vec::new());
    for (replica, opened) in replicas.iter().zip(opened) {
        let has_lost_label = opened.as_ref().is_err_and(StackError::is_of_known_volume);
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
        sources.push(ReplicaSource { has_lost_label, ..replica.source(device) });
    }
    refuse_shared_replicas("open", target, here.iter().map(|(replica, _)| *replica))?;
    let accepts_lost_label = access == Access::WriteWithoutLabel;
    let options = OpenOptions { is_read_only: !access.writes(), accepts_lost_label, random: new_uuid()? };
    let answered = answered_on(replicas);
    let opened = open_beside_lost(sources, &answered, ReactorClock, options).await;
    let opened = opened.map_err(|error| mirror_error(&error).on(target))?;
    let described = opened.mirror.describe();
    report_offline(target, &described);
    let why_older = opened.mirror.abilities().freshness.why_older();
    if why_older == Some(WhyOlder::LabelLost) && !access.accepts_older() {
        return Err(label_lost(target, &described));
    }
    let is_used = |name: &str| described.replicas.iter().any(|other| other.name == name && other.is_online);
    for (replica, stack) in here.into_iter().filter(|(replica, _)| is_used(&replica.name)) {
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
    Ok(held(target, replicas, info, opened, opener))
}

/// Whether each of these has every change that was answered.
fn answered_on(replicas: &[Rc<OpenReplica>]) -> Vec<Answered> {
    replicas.iter().map(|replica| replica.answered()).collect()
}

/// How a mirror is created.
#[derive(Clone, Copy, Debug, Default)]
pub struct MirrorOptions {
    /// Its name.
    pub name: Option<MirrorName>,
    /// The device whose content counts, by its number.
    pub from: Option<usize>,
    /// What devices hold may be replaced.
    pub force: bool,
}

/// Creates a mirror of these devices; see [`sealblock_layers_mirror::create`].
///
/// # Errors
/// Why they cannot become one.
pub(crate) async fn create(
    target: &TargetName,
    replicas: &[TargetName],
    options: &MirrorOptions,
    opener: Opener,
) -> Result<OpenTarget, StackError> {
    let replicas = not_open(replicas, Access::Write, opener);
    let created = create_of(target, &replicas, options, opener).await;
    if created.is_err() {
        join_all(replicas.iter().map(|replica| replica.close())).await;
    }
    created
}

async fn create_of(
    target: &TargetName,
    replicas: &[Rc<OpenReplica>],
    options: &MirrorOptions,
    opener: Opener,
) -> Result<OpenTarget, StackError> {
    let (mut sources, mut info, mut opened) = (Vec::new(), Vec::new(), BTreeMap::new());
    for number in opening_order(replicas.iter().map(|replica| &replica.target)) {
        opened.insert(number, open_first(&replicas[number], opener).await?);
    }
    let mut doubts = Vec::new();
    for (number, (stack, of)) in opened {
        doubts.extend(doubt_by_label(&stack).await.map(|doubt| (replicas[number].name.clone(), doubt)));
        info.push(of);
        sources.push(replicas[number].source(Ok(stack)));
    }
    refuse_shared_replicas("create", target, replicas)?;
    let MirrorOptions { name, from, force } = *options;
    let options = CreateOptions { random: new_uuid()?, name, from, force };
    let opened = sealblock_layers_mirror::create(sources, ReactorClock, options).await;
    let opened = opened.map_err(|error| replica_error(&error).on(target))?;
    doubts.retain(|(name, _)| from.is_none_or(|from| replicas[from].name == *name));
    note_doubts(&opened.mirror.describe(), &doubts);
    if answered_on(replicas)[from.unwrap_or(0)] == Answered::MayBeLost {
        let said = opened.mirror.say_lost().await;
        said.map_err(|error| device_error("record lost writes", &error).on(target))?;
    }
    Ok(held(target, replicas, info, opened, opener))
}

/// Reports that the content of a new mirror may be older than what was written, by the label that its source had.
fn note_doubts(mirror: &MirrorInfo, doubts: &[(String, String)]) {
    let is_source = |name: &str| {
        mirror.replicas.iter().any(|replica| replica.name == name && replica.state == ReplicaState::InSync)
    };
    for (name, doubt) in doubts.iter().filter(|(name, _)| is_source(name)) {
        note(format_args!(
            "{name} may be older than what was written: {doubt}; from now on its content is that of the mirror, and counts as current"
        ));
    }
}

/// See [`refuse_shared`].
fn refuse_shared_replicas<'a>(
    doing: &str,
    target: &TargetName,
    replicas: impl IntoIterator<Item = &'a Rc<OpenReplica>>,
) -> Result<(), StackError> {
    let members = replicas.into_iter().map(|replica| (replica.name.clone(), replica.remote_devices()));
    refuse_shared(doing, target, &members.collect::<Vec<_>>())
}

/// An open mirror with its worker spawned.
fn held(
    target: &TargetName,
    replicas: &[Rc<OpenReplica>],
    info: Vec<TargetInfo>,
    opened: sealblock_layers_mirror::OpenMirror<ReactorClock>,
    opener: Opener,
) -> OpenTarget {
    drop(sealblock_runtime_reactor::spawn(opened.worker.run()));
    let open = Rc::new(OpenMirror::new(target, opened.mirror.clone(), replicas.to_vec(), by(opener)));
    let damage = open.damage();
    let info = TargetInfo { mirror: Some(open.clone()), damage, ..TargetInfo::over("mirror", info) };
    OpenTarget::of(target, on_cores(target.to_string(), opened.mirror), info, vec![CloseHandle::Members(open)])
}

/// The mirror behind its gate, on every core if it can be.
fn on_cores(name: String, mirror: Rc<Mirror<ReactorClock>>) -> DynDevice {
    let elsewhere = mirror.elsewhere();
    let device = DynDevice::new(&*name, mirror);
    match elsewhere {
        None => device,
        Some(elsewhere) => device.on_every_core(move || {
            let (channel, recalls) = elsewhere.open();
            drop(sealblock_runtime_reactor::spawn(recalls));
            Ok(DynDevice::new(&*name, channel))
        }),
    }
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

/// Why a mirror is not written of which a replica has lost its label.
fn label_lost(target: &TargetName, mirror: &MirrorInfo) -> StackError {
    let away = mirror.replicas.iter().filter(|replica| !replica.is_online && replica.state != ReplicaState::Removed);
    let away: Vec<&str> = away.map(|replica| &*replica.name).collect();
    let names = away.join(", ");
    let why = format!(
        "{}: that of {names} may have marked the others as out of sync",
        ErrorKind::MayBeOlder(WhyOlder::LabelLost)
    );
    StackError::new(Cause::Older, "open", why).on(target).lasting().advise(format!(
        "compare what each has (`sealblock copy`); `sealblock mirror replace {} {} --force` goes on with the others",
        shell_word(target),
        shell_word(away.first().unwrap_or(&"REPLICA"))
    ))
}

/// True if a replica that could not be opened may come back.
fn is_gone(failure: &StackError) -> bool {
    matches!(failure.cause(), Cause::Unreachable | Cause::Io | Cause::Damaged | Cause::Unsuitable)
}
