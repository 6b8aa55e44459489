//! Opens a mirror: assembles the labels of its devices, and makes the mirror and its worker.

pub(crate) mod create;
pub(crate) mod members;

use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_block::{
    Abilities, Clock, Device, DynDevice, ErrorKind, Freshness, Geometry, Limits, WhyOlder, is_unwritten,
};
use sealblock_units::{BlockSize, Extent, Lba};

use crate::background::Worker;
use crate::error::MirrorError;
use crate::label::assemble::{
    Answered, AssembleError, Assembly, ExistingMirror, ReplicaProbe, assemble_beside, mark_out_of_sync, replica_id,
};
use crate::label::lineage::Lineage;
use crate::label::name::MirrorName;
use crate::label::regions::{MAX_REGIONS, MAX_REGIONS_IN_LABEL, RegionMap, Regions};
use crate::label::{Label, LabelError, MAX_REPLICAS, ReplicaRecord, ReplicaState};
use crate::mirror::probe::{
    ProbeError, check_fit, check_pages, check_same_geometry, default_name, probe_device, why_older, why_unfit,
};
use crate::mirror::replica::{Replica, ReplicaSource, has_reserved_area};
use crate::mirror::samples::{Known, are_of_another, differences, other_content, sample_blocks};
use crate::mirror::write_intent::{PriorState, WriteIntent};
use crate::mirror::{Mirror, MirrorParts, Mutation, TestHooks, abilities};

/// How to open a mirror.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Changes nothing: no repair, no labels, no resync.
    pub is_read_only: bool,
    /// What the others have counts although a replica has lost its label. Otherwise such a mirror may be older than what was written,
    /// and takes no writes.
    pub accepts_lost_label: bool,
    /// Random, drawn by the caller for each opening: the identity of a new mirror, and what tells its labels from
    /// those of other openings.
    pub random: [u8; 16],
}

/// A mirror and the worker that must run beside it.
pub struct OpenMirror<C> {
    /// The mirror.
    pub mirror: Rc<Mirror<C>>,
    /// Its background work; spawn [`Worker::run`].
    pub worker: Worker<C>,
}

/// Opens a mirror of these devices: the mirror that their labels record, or a new one if no device has a label and
/// all are blank. Offline replicas are out of sync if other labels know the mirror; so are devices without a label
/// under the name of a replica that should have one.
///
/// # Errors
/// See [`MirrorError`]. Then nothing was changed.
pub async fn open<C: Clock>(
    sources: Vec<ReplicaSource>,
    clock: C,
    options: OpenOptions,
) -> Result<OpenMirror<C>, MirrorError> {
    open_with_hooks(sources, clock, options, TestHooks::default()).await
}

/// The same, for devices that may lack completed but unflushed changes, as `answered` tells for each: the content of an
/// in-sync one that lacks none is used. If there is none, the mirror may lack them as well ([`Mirror::may_be_lost`]).
///
/// # Errors
/// As [`open`].
pub async fn open_beside_lost<C: Clock>(
    sources: Vec<ReplicaSource>,
    answered: &[Answered],
    clock: C,
    options: OpenOptions,
) -> Result<OpenMirror<C>, MirrorError> {
    open_all(sources, answered, clock, options, TestHooks::default()).await
}

/// Opens a mirror with hooks for tests; see [`TestHooks`].
///
/// # Errors
/// As [`open`].
pub async fn open_with_hooks<C: Clock>(
    sources: Vec<ReplicaSource>,
    clock: C,
    options: OpenOptions,
    hooks: TestHooks,
) -> Result<OpenMirror<C>, MirrorError> {
    open_all(sources, &[], clock, options, hooks).await
}

async fn open_all<C: Clock>(
    mut sources: Vec<ReplicaSource>,
    answered: &[Answered],
    clock: C,
    options: OpenOptions,
    hooks: TestHooks,
) -> Result<OpenMirror<C>, MirrorError> {
    if !(2..=MAX_REPLICAS).contains(&sources.len()) {
        return Err(MirrorError::ReplicaCount(sources.len()));
    }
    let probed = join_all(sources.iter().map(|source| probe(source, hooks.mutation))).await;
    let (mut found, lost_labels) = usable(&mut sources, probed)?;
    if hooks.mutation.is(Mutation::SkipLineage) {
        found.iter_mut().for_each(forget_lineage);
    }
    let older = older(&sources);
    let assembly = assemble_beside(&found, &older, answered).map_err(|refusal| assemble_error(refusal, &sources))?;
    if let Assembly::Known(known) = &assembly {
        leave_out_others(&mut sources, &found, known, &options.random).await;
    }
    let doubts = matches!(&assembly, Assembly::Known(known) if !older.is_empty() && !known.may_be_older);
    let is_found_lost = matches!(&assembly, Assembly::Known(known) if known.label.unreported_loss && answered.contains(&Answered::MayBeLost));
    let labels_differ = matches!(&assembly, Assembly::Known(known) if known.labels_differ);
    let is_new = assembly == Assembly::New;
    let is_word_lost = matches!(&assembly, Assembly::Known(known) if lost_labels > 0 && is_word_missing(known, &found));
    let mut parts = match assembly {
        Assembly::New => {
            check_same_geometry(&sources)?;
            if let Some(replica) = first_not_blank(&sources).await? {
                return Err(assemble_error(AssembleError::NotCreated { replica }, &sources));
            }
            new_parts(sources, &found, None, (&options.random, None), &hooks)?
        }
        Assembly::Known(known) => existing_parts(sources, *known, &older, &options, &hooks)?,
    };
    if is_word_lost && !options.accepts_lost_label {
        parts.freshness = parts.freshness.and(Freshness::MayBeOlder(WhyOlder::LabelLost));
    }
    let opened = start(clock, parts, options.is_read_only);
    if is_new {
        // From here on the replicas belong together, and no other device can take the place of one.
        opened.mirror.write_labels().await.map_err(MirrorError::WriteLabels)?;
    }
    if doubts || is_found_lost {
        // Replicas that get their content from one that lacks something do not know of the loss themselves. A device
        // that may lack something shows it until its first change, so the labels of the others record it from now on.
        opened.mirror.write_labels().await.map_err(MirrorError::WriteLabels)?;
    } else if labels_differ && let Err(error) = opened.mirror.write_equal_labels().await {
        // Equal labels help to recognise older images. If they cannot be written, a request that needs them fails by
        // itself.
        tracing::debug!(%error, "cannot make the labels equal");
    }
    Ok(opened)
}

/// Which of these devices may lack their last writes.
pub(crate) fn older(sources: &[ReplicaSource]) -> Vec<usize> {
    let is_older = |source: &ReplicaSource| source.device.as_ref().is_ok_and(|device| why_older(device).is_some());
    (0..sources.len()).filter(|at| is_older(&sources[*at])).collect()
}

/// Builds a mirror and its worker. Its writes are disabled while its content may be outdated.
pub(crate) fn start<C: Clock>(clock: C, parts: MirrorParts, read_only: bool) -> OpenMirror<C> {
    let read_only = read_only || !parts.freshness.is_current();
    let of: Vec<Abilities> = devices(&parts.replicas).iter().map(Device::abilities).collect();
    let mirror = Rc::new(Mirror::new(clock, parts, abilities(&of, read_only), read_only));
    OpenMirror { worker: Worker::new(mirror.clone()), mirror }
}

fn devices(replicas: &[Rc<Replica>]) -> Vec<DynDevice> {
    replicas.iter().filter_map(|replica| replica.device()).collect()
}

/// The first device that may hold data.
async fn first_not_blank(sources: &[ReplicaSource]) -> Result<Option<usize>, MirrorError> {
    for (at, source) in sources.iter().enumerate() {
        let Ok(device) = &source.device else { continue };
        // A device that may lack its last writes is not known to be blank.
        let is_blank = if why_older(device).is_some() { Ok(false) } else { is_unwritten(device).await };
        if !is_blank.map_err(|reason| MirrorError::Replica { replica: source.name.clone(), error: reason })? {
            return Ok(Some(at));
        }
    }
    Ok(None)
}

/// Probes the devices. Beside a replica with a label, a device counts as offline if its label is damaged, cannot be
/// read, or says that the device is larger: it is neither read nor written, and `sealblock mirror replace` makes it a
/// replica again. What the label of a smaller device says of the replicas counts nevertheless. Also returns how many
/// labels are lost.
///
/// # Errors
/// What is wrong with a device, when no other has a label, or when its label is valid and not a mirror's that is known here.
fn usable(
    sources: &mut [ReplicaSource],
    probed: Vec<Result<ReplicaProbe, MirrorError>>,
) -> Result<(Vec<ReplicaProbe>, usize), MirrorError> {
    let is_labelled = probed.iter().any(|found| found.as_ref().is_ok_and(|found| found.label().is_some()));
    let lost_with_device = sources.iter().filter(|source| source.device.is_err() && source.has_lost_label).count();
    let (mut usable, mut lost_labels) =
        (Vec::with_capacity(probed.len()), if is_labelled { lost_with_device } else { 0 });
    for (source, found) in sources.iter_mut().zip(probed) {
        let reason = match found {
            Ok(ReplicaProbe::Labelled(label)) if let Some(unfit) = why_unfit(source, &label) => {
                source.device = Err(unfit);
                usable.push(ReplicaProbe::Unfit(label));
                continue;
            }
            Ok(found) => {
                usable.push(found);
                continue;
            }
            Err(MirrorError::Label { error: error @ LabelError::Damaged, .. }) if is_labelled => {
                lost_labels += 1;
                error.to_string()
            }
            Err(MirrorError::Replica { error, .. }) if is_labelled => {
                lost_labels += usize::from(matches!(error.kind(), ErrorKind::Media { .. }));
                error.to_string()
            }
            Err(other) => return Err(other),
        };
        source.device = Err(format!("its label cannot be used: {reason}"));
        usable.push(ReplicaProbe::Absent);
    }
    Ok((usable, lost_labels))
}

/// True if a label that is lost may have said that the replicas with labels are out of sync: theirs call another one in sync, which may
/// have been written without them since. A replica that is away may have such a label too, but its content is not here to be preferred.
fn is_word_missing(known: &ExistingMirror, found: &[ReplicaProbe]) -> bool {
    let is_labelled = |at: usize| {
        let mut given = known.indices.iter().zip(found);
        given.any(|(index, found)| *index == at && found.label().is_some())
    };
    let mut records = known.label.replicas.iter().enumerate();
    records.any(|(at, record)| record.state == ReplicaState::InSync && !is_labelled(at))
}

/// Leaves out the devices without room for a label that cannot be the replicas whose names they have.
async fn leave_out_others(
    sources: &mut [ReplicaSource],
    found: &[ReplicaProbe],
    known: &ExistingMirror,
    random: &[u8; 16],
) {
    let label = &known.label;
    let record = |at: usize| &label.replicas[known.indices[at]];
    let is_sure = |at: &usize| record(*at).state == ReplicaState::InSync && found[*at].label().is_some();
    let sure = (0..sources.len()).find(|at| is_sure(at) && sources[*at].device.is_ok());
    let Some((sure, Ok(replica))) = sure.map(|at| (at, sources[at].device.clone())) else { return };
    let mut blocks = sample_blocks(label.capacity_blocks, u64::from_le_bytes(*random.first_chunk().expect("16 bytes")));
    let stale = |lba: Lba| label.replicas.iter().any(|record| record.stale.contains(&lba.get()));
    blocks.retain(|lba| !stale(*lba));
    let within = |regions: &Regions, lba: &Lba| regions.contains_any(label.map.of(Extent::one(*lba)));
    for at in (0..sources.len()).filter(|at| found[*at] == ReplicaProbe::Unlabelled { has_room: false }) {
        let Ok(device) = &sources[at].device else { continue };
        let known = |lba: &Lba| match (within(&record(at).out_of_sync, lba), within(&label.dirty, lba)) {
            (true, _) if record(at).is_new => Known::Nothing,
            (true, _) => Known::Lacks,
            (false, true) => Known::Marked,
            (false, false) => Known::Same,
        };
        let differs = differences(&replica, device, &blocks).await;
        let differs: Vec<_> = blocks.iter().map(known).zip(differs).collect();
        if are_of_another(&differs) {
            sources[at].device = Err(other_content(&sources[sure].name));
        }
    }
}

/// Clears the lineage of a label.
fn forget_lineage(found: &mut ReplicaProbe) {
    if let ReplicaProbe::Labelled(label) | ReplicaProbe::Unfit(label) = found {
        label.lineage = Lineage::default();
    }
}

/// Probes the device under the name of a replica.
async fn probe(source: &ReplicaSource, mutation: Mutation) -> Result<ReplicaProbe, MirrorError> {
    let Ok(device) = &source.device else { return Ok(ReplicaProbe::Absent) };
    probe_device(device, mutation).await.map_err(|error| match error {
        ProbeError::Label(reason) => MirrorError::Label { replica: source.name.clone(), error: reason },
        ProbeError::Device(reason) => MirrorError::Replica { replica: source.name.clone(), error: reason },
    })
}

pub(crate) fn assemble_error(refusal: AssembleError, sources: &[ReplicaSource]) -> MirrorError {
    let names: &[usize] = match &refusal {
        AssembleError::NoReplica | AssembleError::NoneInSync | AssembleError::NoRoom => &[],
        AssembleError::NewWithoutReplica { replica }
        | AssembleError::OtherMirror { replica }
        | AssembleError::NotAReplica { replica }
        | AssembleError::Removed { replica }
        | AssembleError::NotCreated { replica }
        | AssembleError::OnlyUnfit { replica } => &[*replica],
        AssembleError::Duplicate { first, second } | AssembleError::SplitBrain { first, second } => &[*first, *second],
    };
    let whole = |source: &ReplicaSource| match &source.device {
        Ok(_) => source.name.clone(),
        Err(reason) => format!("{}: {reason}", source.name),
    };
    let replicas = match names {
        [] => sources.iter().map(whole).collect(),
        names => names.iter().filter_map(|at| sources.get(*at)).map(whole).collect(),
    };
    MirrorError::Assemble { error: refusal, replicas }
}

/// Builds the parts of a new mirror: of identical devices, or of one whose content counts and others that resync from
/// it.
pub(crate) fn new_parts(
    sources: Vec<ReplicaSource>,
    found: &[ReplicaProbe],
    from: Option<usize>,
    (random, name): (&[u8; 16], Option<MirrorName>),
    hooks: &TestHooks,
) -> Result<MirrorParts, MirrorError> {
    let geometry = common_geometry(&sources);
    let (block_size, capacity_blocks) = (geometry.block_size, geometry.capacity_blocks);
    let map = choose_map(block_size, capacity_blocks, &sources, hooks)?;
    let mut replicas = Vec::with_capacity(sources.len());
    for (number, source) in sources.into_iter().enumerate() {
        let id = replica_id(random, 0, number);
        let is_new = from.is_some_and(|from| from != number);
        let (state, out_of_sync) = match is_new {
            true => (ReplicaState::OutOfSync, Regions::all(map.count())),
            false => (ReplicaState::InSync, Regions::none(map.count())),
        };
        let has_room = found[number].has_room();
        let record = ReplicaRecord {
            id,
            state,
            has_room,
            is_new,
            out_of_sync,
            stale: Vec::new(),
            acked_events: 0,
            sent_events: 0,
        };
        replicas.push(Rc::new(Replica::new(source, number, &record)));
    }
    let dirty = Regions::none(map.count());
    let prior = PriorState { events: 0, lineage: Lineage::default(), changed: 0, is_tentative: false, dirty };
    let write_intent = WriteIntent::new(prior, random);
    Ok(MirrorParts {
        geometry,
        map,
        uuid: *random,
        name,
        replicas,
        authority: from.unwrap_or(0),
        write_intent,
        freshness: Freshness::Current,
        unreported_loss: false,
        is_labelled: false,
        hooks: *hooks,
    })
}

/// The finest regions for which all these devices have room, or those that a test wants.
fn choose_map(
    block_size: BlockSize,
    capacity_blocks: u64,
    sources: &[ReplicaSource],
    hooks: &TestHooks,
) -> Result<RegionMap, MirrorError> {
    if let Some(shift) = hooks.region_shift {
        let map = RegionMap::with_shift(block_size, capacity_blocks, shift);
        return map.ok_or(MirrorError::Capacity { blocks: capacity_blocks });
    }
    let fine = RegionMap::new(block_size, capacity_blocks, MAX_REGIONS);
    let has_pages = |map: &RegionMap| {
        let devices = sources.iter().filter_map(|source| source.device.as_ref().ok());
        devices.filter(|device| has_reserved_area(device)).all(|device| check_pages("", device, map).is_ok())
    };
    let map = fine.filter(has_pages).or_else(|| RegionMap::new(block_size, capacity_blocks, MAX_REGIONS_IN_LABEL));
    map.ok_or(MirrorError::Capacity { blocks: capacity_blocks })
}

fn existing_parts(
    mut sources: Vec<ReplicaSource>,
    known: ExistingMirror,
    older: &[usize],
    options: &OpenOptions,
    hooks: &TestHooks,
) -> Result<MirrorParts, MirrorError> {
    let ExistingMirror { mut label, indices, unused, unfit, may_be_older, .. } = known;
    for replica in unused.iter().copied() {
        let is_removed = label.replicas[indices[replica]].state == ReplicaState::Removed;
        let reason = if is_removed { "it was removed from the mirror" } else { NO_LABEL };
        sources[replica].device = Err(reason.to_owned());
        sources[replica].reopen = None;
    }
    for source in &sources {
        check_fit(source, label.block_size, label.capacity_blocks, label.protection)?;
    }
    let limits = common_geometry(&sources).limits;
    let freshness = match may_be_older {
        true => older.iter().fold(Freshness::Current, |all, at| all.and(freshness_of(&sources[*at]))),
        false => Freshness::Current,
    };
    let doubted: Vec<(usize, String)> = match may_be_older {
        true => Vec::new(),
        false => older.iter().filter_map(|at| Some((indices[*at], doubt(&mut sources[*at], options)?))).collect(),
    };
    let dirty = label.dirty.clone();
    let replicas = existing_replicas(sources, &indices, &mut label);
    mark_assumed_names(&replicas, &unused, &unfit);
    doubted.into_iter().for_each(|(index, why)| drop(replicas[index].last_error.replace(why)));
    let Label {
        map, capacity_blocks, block_size, protection, uuid, name, unreported_loss, own_index: authority, ..
    } = label;
    let geometry = Geometry { block_size, capacity_blocks, protection, limits };
    let prior = PriorState {
        events: label.events,
        lineage: label.lineage,
        changed: label.changed,
        is_tentative: label.is_tentative,
        dirty,
    };
    let write_intent = WriteIntent::new(prior, &options.random);
    // Labels that replicas write apart must differ from a label that was in flight when they parted.
    if !hooks.mutation.is(Mutation::CountOn) {
        write_intent.skip_events_past(label.events);
    }
    let (is_labelled, hooks) = (true, *hooks);
    Ok(MirrorParts {
        geometry,
        map,
        uuid,
        name,
        replicas,
        authority,
        write_intent,
        freshness,
        unreported_loss,
        is_labelled,
        hooks,
    })
}

/// Why a device may lack its last writes, if another replica has them. A read-only one cannot be resynced, and is not
/// used.
fn doubt(source: &mut ReplicaSource, options: &OpenOptions) -> Option<String> {
    let device = source.device.as_ref().ok()?;
    let why = ErrorKind::MayBeOlder(why_older(device)?).to_string();
    if !options.is_read_only && !device.abilities().writable {
        source.device = Err(format!("{why}; and it takes no writes, so that it cannot be resynchronised"));
    }
    Some(why)
}

fn freshness_of(source: &ReplicaSource) -> Freshness {
    source.device.as_ref().map_or(Freshness::Current, |device| device.abilities().freshness)
}

/// The replicas in the order of their records: given ones, and those that were not given.
fn existing_replicas(sources: Vec<ReplicaSource>, indices: &[usize], label: &mut Label) -> Vec<Rc<Replica>> {
    let mut given: Vec<Option<(usize, ReplicaSource)>> = label.replicas.iter().map(|_| None).collect();
    let mut next_number = sources.len();
    for (number, (index, source)) in indices.iter().zip(sources).enumerate() {
        given[*index] = Some((number, source));
    }
    let (dirty, mut replicas) = (&label.dirty, Vec::with_capacity(given.len()));
    for (index, (given, record)) in given.into_iter().zip(&mut label.replicas).enumerate() {
        let (number, source) = given.unwrap_or_else(|| {
            next_number += 1;
            let device = Err("it was not given".to_owned());
            (next_number - 1, ReplicaSource::new(default_name(index), device, None))
        });
        let was_current = record.state == ReplicaState::InSync;
        set_initial_state(record, source.device.is_ok(), dirty);
        let replica = Replica::new(source, number, record);
        replica.is_listed_in_sync.set(was_current && record.state != ReplicaState::InSync);
        replicas.push(Rc::new(replica));
    }
    replicas
}

/// Marks offline replicas whose names are assumed: only labels could distinguish them, unless there is a single one. Those of `unfit`
/// devices are known by their labels.
fn mark_assumed_names(replicas: &[Rc<Replica>], unused: &[usize], unfit: &[usize]) {
    let is_away = |replica: &&Rc<Replica>| !replica.is_online() && replica.state.get() != ReplicaState::Removed;
    let away = || replicas.iter().filter(is_away).filter(|replica| !unfit.contains(&replica.number.get()));
    let is_guessed = away().count() > 1;
    for replica in away() {
        replica.is_name_assumed.set(is_guessed);
        replica.is_unlabelled.set(unused.contains(&replica.number.get()));
    }
}

/// Why a device without a label is not used. A replica with a label is expected under its name.
const NO_LABEL: &str = "no label of the mirror is on the device; `sealblock mirror replace` makes it a replica";

/// Sets the state that a record starts with.
fn set_initial_state(record: &mut ReplicaRecord, is_online: bool, dirty: &Regions) {
    match (record.state, is_online) {
        (ReplicaState::Removed | ReplicaState::OutOfSync, _) | (ReplicaState::InSync, true) => {}
        // An offline replica lacks changes from here on, and its dirty regions are in doubt.
        (ReplicaState::InSync | ReplicaState::Resyncing, false) => mark_out_of_sync(record, dirty),
        (ReplicaState::Resyncing, true) => record.state = ReplicaState::OutOfSync,
    }
    if record.state == ReplicaState::OutOfSync {
        record.out_of_sync.add(dirty);
    }
}

/// Geometry of the first device with the lowest limits of all.
fn common_geometry(sources: &[ReplicaSource]) -> Geometry {
    let mut all = sources.iter().filter_map(|source| source.device.as_ref().ok()).map(|device| device.geometry());
    let first = all.next().expect("a mirror is opened with a replica that is there").clone();
    let limits = all.fold(first.limits, |lowest, Geometry { limits, .. }| Limits {
        max_transfer_blocks: lowest.max_transfer_blocks.min(limits.max_transfer_blocks),
        max_verify_blocks: lowest.max_verify_blocks.min(limits.max_verify_blocks),
        max_zero_blocks: lowest.max_zero_blocks.min(limits.max_zero_blocks),
    });
    Geometry { limits, ..first }
}
