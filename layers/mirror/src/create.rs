//! Creating a mirror on purpose, and marking a device as written without its mirror.

use futures_util::future::join_all;
use sealblock_block::{Clock, Device, DynDevice, Error, ErrorKind, Request, ReservedArea, Response};

use crate::assemble::ReplicaProbe;
use crate::error::{MirrorError, ReplicaError};
use crate::label::{Label, MAX_REPLICAS, ReplicaState};
use crate::lineage::Lineage;
use crate::mirror::{Mutation, TestHooks};
use crate::open::{OpenMirror, new_parts, start};
use crate::probe::{Candidate, check_same_geometry, inspect, why_older, write_label};
use crate::regions::Regions;
use crate::replica::{ReplicaSource, has_reserved_area, unexpected_response};

/// Distance of the event count of a label for a replica that is written alone from the label before.
const WRITTEN_ALONE_GAP: u64 = 1 << 33;

/// How to create a mirror.
#[derive(Clone, Copy, Debug)]
pub struct CreateOptions {
    /// Random, drawn by the caller: the identity of the mirror, and what tells its first session from others.
    pub random: [u8; 16],
    /// Index of the device whose content counts; needed if several hold data.
    pub from: Option<usize>,
    /// Accepts devices that hold data or a label, and replaces their content.
    pub force: bool,
}

/// Creates a mirror of devices of equal size and format. Labels the device whose content counts, then the others,
/// which the worker resyncs; no reads go to them before. Blank devices count as identical from the start.
///
/// # Errors
/// When the devices do not fit, one holds data without `force`, or labels cannot be written. Nothing but labels was
/// changed then; if only some were written, the mirror opens without the other devices.
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
    let from = choose_source(&sources, &candidates, &options)?;
    let authority = from.unwrap_or(0);
    if !candidates[authority].probe.has_room() {
        return Err(ReplicaError::NoRoom(sources[authority].name.clone()));
    }
    for (at, candidate) in candidates.iter().enumerate().filter(|(at, _)| *at != authority) {
        candidate.clear_label(&sources[at]).await?;
    }
    let found: Vec<ReplicaProbe> = candidates.into_iter().map(|candidate| candidate.probe).collect();
    let parts = new_parts(sources, &found, from, &options.random, &hooks)?;
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
    let from = match (options.from, &written[..]) {
        (Some(from), _) if from >= sources.len() => return Err(ReplicaError::Unknown(format!("number {from}"))),
        (_, []) => None,
        (Some(from), _) => Some(from),
        (None, [only]) => Some(*only),
        (None, several) => return Err(ReplicaError::AmbiguousSource { replicas: names(several).join(", ") }),
    };
    let source = from.map(|from| &sources[from]);
    if let Some((source, why)) = source.and_then(|source| Some((source, why_older(source.device.as_ref().ok()?)?))) {
        let (replica, reason) = (source.name.clone(), ErrorKind::MayBeOlder(why).to_string());
        return Err(ReplicaError::Unusable { replica, reason });
    }
    for (at, candidate) in candidates.iter().enumerate() {
        candidate.check(&sources[at].name, options.force, from != Some(at))?;
    }
    Ok(from)
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
    if hooks.mutation == Mutation::ForgetSessions {
        label.lineage = Lineage::default();
    }
    label.events = events;
    write_label(device, &label.encode_alone()).await
}
