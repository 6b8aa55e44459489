//! Creating a mirror on purpose, and marking a device as written without its mirror.

use futures_util::future::join_all;
use sealblock_block::{Clock, Device, DynDevice, Error, ErrorKind, Request, ReservedArea, Response};

use crate::error::{MirrorError, ReplicaError};
use crate::label::assemble::{Assembly, ReplicaProbe, assemble, assemble_beside};
use crate::label::lineage::Lineage;
use crate::label::name::MirrorName;
use crate::label::regions::Regions;
use crate::label::{Label, MAX_REPLICAS, ReplicaState};
use crate::life::{OpenMirror, OpenOptions, assemble_error, new_parts, older, open_with_hooks, start};
use crate::mirror::probe::{Candidate, check_same_geometry, inspect, label_text, uuid_to_text, why_older, write_label};
use crate::mirror::replica::{ReplicaSource, has_reserved_area, unexpected_response};
use crate::mirror::{Mutation, TestHooks};

/// Distance of the event count of a label for a replica that is written alone from the label before.
const WRITTEN_ALONE_GAP: u64 = 1 << 33;

/// How to create a mirror.
#[derive(Clone, Copy, Debug)]
pub struct CreateOptions {
    /// Random, drawn by the caller: the identity of the mirror, and what tells its first session from others.
    pub random: [u8; 16],
    /// Name of the mirror. One whose creation was interrupted keeps the name that it has.
    pub name: Option<MirrorName>,
    /// Index of the device whose content counts; needed if several hold data.
    pub from: Option<usize>,
    /// Accepts devices that hold data or a label, and replaces their content.
    pub force: bool,
}

/// Creates a mirror of devices of equal size and format. Labels the device whose content counts, then the others,
/// which the worker resyncs; no reads go to them before. Blank devices count as identical from the start. A mirror of these devices
/// whose creation was interrupted is finished: its labels tell whose content counts.
///
/// # Errors
/// When the devices do not fit, one holds data without `force`, they are replicas of a mirror, or labels cannot be written. Nothing
/// but labels was changed then; if only some were written, the mirror opens without the other devices.
pub async fn create<C: Clock>(
    sources: Vec<ReplicaSource>,
    clock: C,
    options: CreateOptions,
) -> Result<OpenMirror<C>, ReplicaError> {
    create_with_hooks(sources, clock, options, TestHooks::default()).await
}

/// Creates a mirror with hooks for tests; see [`TestHooks`].
///
/// # Errors
/// As [`create`].
pub async fn create_with_hooks<C: Clock>(
    sources: Vec<ReplicaSource>,
    clock: C,
    options: CreateOptions,
    hooks: TestHooks,
) -> Result<OpenMirror<C>, ReplicaError> {
    if !(2..=MAX_REPLICAS).contains(&sources.len()) {
        return Err(MirrorError::ReplicaCount(sources.len()).into());
    }
    let candidates = join_all(sources.iter().map(inspect)).await.into_iter().collect::<Result<Vec<_>, _>>()?;
    check_same_geometry(&sources)?;
    if is_unfinished(&candidates, options.from) {
        return finish(sources, &candidates, clock, options, hooks).await;
    }
    let from = choose_source(&sources, &candidates, &options)?;
    let authority = from.unwrap_or(0);
    if !candidates[authority].probe.has_room() {
        return Err(ReplicaError::NoRoom(sources[authority].name.clone()));
    }
    for (at, candidate) in candidates.iter().enumerate().filter(|(at, _)| *at != authority) {
        candidate.clear_label(&sources[at]).await?;
    }
    let found: Vec<ReplicaProbe> = candidates.into_iter().map(|candidate| candidate.probe).collect();
    let parts = new_parts(sources, &found, from, (&options.random, options.name), &hooks)?;
    let opened = start(clock, parts, false);
    let mirror = &opened.mirror;
    // First the label of the replica whose content counts: the labels of the others alone would make no mirror.
    mirror.write_labels().await.map_err(ReplicaError::WriteLabels)?;
    if from.is_some() {
        let replicas = mirror.replicas.borrow().clone();
        replicas
            .iter()
            .filter(|replica| replica.state.get() == ReplicaState::OutOfSync)
            .for_each(|replica| mirror.start_resync(replica));
        mirror.write_labels().await.map_err(ReplicaError::WriteLabels)?;
    }
    Ok(opened)
}

/// Index of the device whose content counts; `None` if all are blank.
fn choose_source(
    sources: &[ReplicaSource],
    candidates: &[Candidate],
    options: &CreateOptions,
) -> Result<Option<usize>, ReplicaError> {
    let written: Vec<usize> = (0..candidates.len()).filter(|at| candidates[*at].is_written).collect();
    let names = |replicas: &[usize]| replicas.iter().map(|at| sources[*at].name.clone()).collect::<Vec<_>>();
    let labelled = replicas_error(sources, candidates);
    if let (Some(error), false) = (&labelled, options.force) {
        return Err(error.clone());
    }
    let from = match (options.from, &written[..]) {
        (Some(from), _) if from >= sources.len() => return Err(ReplicaError::Unknown(format!("number {from}"))),
        (_, []) => None,
        (Some(from), _) => Some(from),
        (None, [only]) => Some(*only),
        (None, several) => {
            return Err(labelled.unwrap_or(ReplicaError::AmbiguousSource { replicas: names(several).join(", ") }));
        }
    };
    let source = from.map(|from| &sources[from]);
    if let Some((source, why)) = source.and_then(|source| Some((source, why_older(source.device.as_ref().ok()?)?))) {
        let (replica, reason) = (source.name.clone(), ErrorKind::MayBeOlder(why).to_string());
        return Err(ReplicaError::Unusable { replica, reason });
    }
    // Of blank devices none has content that counts, but the one that was asked for is not replaced either.
    let kept = from.or(options.from);
    for (at, candidate) in candidates.iter().enumerate() {
        let others = labels(candidates).filter(|(other, _)| *other != at).map(|(_, label)| label.clone());
        let others: Vec<Label> = others.collect();
        candidate.check(&sources[at].name, options.force, kept != Some(at), &others)?;
    }
    Ok(from)
}

/// The labels of these devices, but of removed replicas, which are none.
fn labels(candidates: &[Candidate]) -> impl Iterator<Item = (usize, &Label)> {
    candidates.iter().enumerate().filter_map(|(at, candidate)| match &candidate.probe {
        ReplicaProbe::Labelled(label) if label.replicas[label.own_index].state != ReplicaState::Removed => {
            Some((at, &**label))
        }
        _ => None,
    })
}

/// The refusal if some devices are replicas, from all their labels together; `None` if no device is one.
fn replicas_error(sources: &[ReplicaSource], candidates: &[Candidate]) -> Option<ReplicaError> {
    let (_, first) = labels(candidates).next()?;
    let of_one = labels(candidates).all(|(_, label)| label.uuid == first.uuid);
    if !of_one || labels(candidates).count() < sources.len() {
        let each = labels(candidates).map(|(at, label)| format!("{} is {}", sources[at].name, label_text(label)));
        return Some(ReplicaError::Replicas { what: each.collect::<Vec<_>>().join(", ") });
    }
    // The state of each is decided by all labels together: its own label does not list what it missed.
    let found: Vec<ReplicaProbe> = candidates.iter().map(|candidate| candidate.probe.clone()).collect();
    let known = match assemble_beside(&found, &older(sources), &[]) {
        Ok(Assembly::Known(known)) => known,
        Ok(Assembly::New) => return None,
        // With the names from the command line.
        Err(refusal) => return Some(assemble_error(refusal, sources).into()),
    };
    let state = |at: usize| known.label.replicas[known.indices[at]].state.as_str().replace('_', " ");
    let each = (0..sources.len()).map(|at| format!("{}: {}", sources[at].name, state(at)));
    let each = each.collect::<Vec<_>>().join(", ");
    let count = first.replicas.iter().filter(|record| record.state != ReplicaState::Removed).count();
    let rest = if count > sources.len() { format!(", which has {count} replicas") } else { String::new() };
    let what = format!("they are replicas of mirror {} already{rest} ({each})", uuid_to_text(&first.uuid));
    Some(ReplicaError::Replicas { what })
}

/// True if labels make these devices, and no others, a mirror whose creation was interrupted: some of them never were in sync, or
/// have no label where they never were known to have one. The content of `from`, if given, must be that mirror's.
fn is_unfinished(candidates: &[Candidate], from: Option<usize>) -> bool {
    let found: Vec<ReplicaProbe> = candidates.iter().map(|candidate| candidate.probe.clone()).collect();
    let has_other_label = candidates.iter().any(Candidate::has_other_label);
    let Ok(Assembly::Known(known)) = assemble(&found) else { return false };
    let record = |at: usize| &known.label.replicas[known.indices[at]];
    let is_whole = known.label.replicas.iter().all(|record| record.state != ReplicaState::Removed)
        && known.label.replicas.len() == found.len()
        && !has_other_label;
    let is_labelled = |at: usize| matches!(found[at], ReplicaProbe::Labelled(_));
    // A device without a label in the place of a replica that had one is another device.
    let fits = |at: usize| is_labelled(at) || record(at).is_new || record(at).acked_events == 0;
    let is_source = |from: usize| known.indices.get(from).is_some() && record(from).state == ReplicaState::InSync;
    is_whole
        && from.is_none_or(is_source)
        && (0..found.len()).all(fits)
        && (0..found.len()).any(|at| !is_labelled(at) || record(at).is_new)
}

/// Finishes the creation of a mirror: opens it, and makes the devices without a label replicas of it.
async fn finish<C: Clock>(
    mut sources: Vec<ReplicaSource>,
    candidates: &[Candidate],
    clock: C,
    options: CreateOptions,
    hooks: TestHooks,
) -> Result<OpenMirror<C>, ReplicaError> {
    let mut unlabelled = Vec::new();
    for (at, source) in sources.iter_mut().enumerate() {
        if !matches!(candidates[at].probe, ReplicaProbe::Labelled(_)) {
            candidates[at].check(&source.name, options.force, true, &[])?;
            unlabelled.push(ReplicaSource::new(&*source.name, source.device.clone(), source.reopen.take()));
        }
    }
    let opened = open_with_hooks(
        sources,
        clock,
        OpenOptions { is_read_only: false, accepts_lost_label: false, random: options.random },
        hooks,
    );
    let opened = opened.await?;
    for source in unlabelled {
        let name = source.name.clone();
        opened.mirror.replace(&name, source, options.force).await?;
    }
    Ok(opened)
}

/// Marks a device in its own label, durably, as written alone: the other replicas of its mirror take it for out of
/// sync in all regions from then on. For callers that are about to write to it without them. Does nothing for a
/// device without a mirror's label, or one that was removed.
///
/// # Errors
/// When the device fails.
pub async fn mark_written_alone(device: &DynDevice) -> Result<(), Error> {
    mark_written_alone_with_hooks(device, TestHooks::default()).await
}

/// Marks a device as written alone with hooks for tests; see [`TestHooks`].
///
/// # Errors
/// As [`mark_written_alone`].
pub async fn mark_written_alone_with_hooks(device: &DynDevice, hooks: TestHooks) -> Result<(), Error> {
    if !has_reserved_area(device) {
        return Ok(());
    }
    let Response::Reserved(bytes) = device.execute(Request::read_reserved(ReservedArea::GroupLabel)).await? else {
        return Err(unexpected_response());
    };
    let Ok(Some(mut label)) = Label::decode(&bytes) else { return Ok(()) };
    // Beyond any label that the others can have sent it: they know neither this label nor the one before.
    let events = label.events + WRITTEN_ALONE_GAP;
    let own = label.own_index;
    let record = &mut label.replicas[own];
    if record.state == ReplicaState::Removed {
        return Ok(());
    }
    // A resyncing replica got each label after all in-sync ones: no in-sync replica is excused for not knowing it.
    label.is_tentative &= record.state != ReplicaState::Resyncing;
    record.state = ReplicaState::OutOfSync;
    record.out_of_sync = Regions::all(record.out_of_sync.capacity());
    (record.acked_events, record.sent_events) = (events, events);
    // The sessions stay: their changes may be on this replica alone, and others that lack them must not overwrite
    // them.
    if hooks.mutation.is(Mutation::ForgetSessions) {
        label.lineage = Lineage::default();
    }
    label.events = events;
    write_label(device, &label.encode_alone()).await
}
