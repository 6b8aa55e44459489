//! Opening a mirror: probing its devices, and building the mirror from what assembly found.

use std::collections::BTreeMap;
use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_block::{
    Abilities, Clock, Device, DynDevice, Error, ErrorKind, Geometry, Limits, Request, ReservedArea, Response,
    is_unwritten,
};
use sealblock_integrity::PiFormat;
use sealblock_runtime_memory::Slice;
use sealblock_units::BlockSize;

use crate::assemble::{AssembleError, Assembly, ExistingMirror, ReplicaProbe, assemble, mark_out_of_sync, replica_id};
use crate::label::{Label, LabelError, MAX_REPLICAS, MAX_SETS, ReplicaRecord, ReplicaState};
use crate::lineage::Lineage;
use crate::mirror::{Mirror, MirrorParts, abilities};
use crate::regions::{MAX_BLOCKS, MAX_REGIONS, MAX_REGIONS_IN_LABEL, RegionMap, Regions};
use crate::replica::{Replica, ReplicaSource, has_reserved_area};
use crate::resync::Worker;
use crate::sets::{PageId, Pages, pages_of_set};
use crate::test_hooks::{Mutation, TestHooks};
use crate::write_intent::{PriorState, WriteIntent};

/// How to open a mirror.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Changes nothing: no repair, no labels, no resync.
    pub is_read_only: bool,
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

/// Why devices cannot be opened as a mirror.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MirrorError {
    /// There are too few or too many of them.
    #[error("a mirror has 2 to {MAX_REPLICAS} replicas, not {0}")]
    ReplicaCount(usize),
    /// They do not make a mirror.
    #[error("{error} ({})", .replicas.join(", "))]
    Assemble {
        /// Why.
        error: AssembleError,
        /// Names of the replicas in question.
        replicas: Vec<String>,
    },
    /// The label of a replica is invalid.
    #[error("{replica}: {error}")]
    Label {
        /// Name of the replica.
        replica: String,
        /// Why.
        error: LabelError,
    },
    /// A replica failed a request while it was probed.
    #[error("{replica}: {error}")]
    Replica {
        /// Name of the replica.
        replica: String,
        /// Why.
        error: Error,
    },
    /// The labels of a new mirror cannot be written.
    #[error("cannot write mirror labels: {0}")]
    WriteLabels(Error),
    /// A replica has another block size than the mirror.
    #[error("{replica} has blocks of {actual} bytes, the mirror of {expected}")]
    BlockSize {
        /// Name of the replica.
        replica: String,
        /// Block size of the mirror.
        expected: BlockSize,
        /// Block size of the replica.
        actual: BlockSize,
    },
    /// There are more blocks than regions can track.
    #[error(
        "a mirror cannot have {blocks} blocks: its replicas have room to track fewer, and the maximum is {MAX_BLOCKS}"
    )]
    Capacity {
        /// Blocks of the mirror.
        blocks: u64,
    },
    /// The reserved area of a replica has too few bitmap pages for the mirror.
    #[error("{replica} has room for {actual} bitmap pages, the mirror needs {expected}")]
    Pages {
        /// Name of the replica.
        replica: String,
        /// Pages that the mirror needs.
        expected: u32,
        /// Pages of the replica.
        actual: u32,
    },
    /// A replica is smaller than the mirror, or of another size than the other replicas of a new one.
    #[error("{replica} has {actual} blocks, the mirror {expected}")]
    Size {
        /// Name of the replica.
        replica: String,
        /// Blocks of the mirror.
        expected: u64,
        /// Blocks of the replica.
        actual: u64,
    },
    /// A replica has another format of protection information than the mirror. Otherwise data without tags could be
    /// sealed unchecked.
    #[error("{replica} has protection information {}, the mirror {}", pi_to_text(*.actual), pi_to_text(*.expected))]
    Protection {
        /// Name of the replica.
        replica: String,
        /// Format of the mirror.
        expected: Option<PiFormat>,
        /// Format of the replica.
        actual: Option<PiFormat>,
    },
}

/// A format of protection information for people.
fn pi_to_text(format: Option<PiFormat>) -> String {
    format.map_or("none".to_owned(), |format| {
        let (guard, kind, bits) = (format.guard(), format.protection() as u8 + 1, format.storage_tag_bits());
        format!("{guard} Type {kind} with {bits} bits of storage tag")
    })
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
    if !(2..=MAX_REPLICAS).contains(&sources.len()) {
        return Err(MirrorError::ReplicaCount(sources.len()));
    }
    let mut found = join_all(sources.iter().map(|source| probe(source, hooks.mutation)))
        .await
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?;
    if hooks.mutation == Mutation::SkipLineage {
        found.iter_mut().for_each(forget_lineage);
    }
    let assembly = assemble(&found).map_err(|refusal| assemble_error(refusal, &sources))?;
    let labels_differ = matches!(&assembly, Assembly::Known(known) if known.labels_differ);
    let is_new = assembly == Assembly::New;
    let parts = match assembly {
        Assembly::New => {
            check_same_geometry(&sources)?;
            if let Some(replica) = first_not_blank(&sources).await? {
                return Err(assemble_error(AssembleError::NotCreated { replica }, &sources));
            }
            new_parts(sources, &found, None, &options.random, &hooks)?
        }
        Assembly::Known(known) => existing_parts(sources, *known, &options.random, &hooks)?,
    };
    let opened = start(clock, parts, options.is_read_only);
    if is_new {
        // From here on the replicas belong together, and no other device can take the place of one.
        opened.mirror.write_labels().await.map_err(MirrorError::WriteLabels)?;
    }
    if labels_differ && let Err(error) = opened.mirror.write_labels().await {
        // Equal labels help to recognise older images. If they cannot be written, a request that needs them fails by
        // itself.
        tracing::debug!(%error, "cannot make the labels equal");
    }
    Ok(opened)
}

/// Builds a mirror and its worker.
pub(crate) fn start<C: Clock>(clock: C, parts: MirrorParts, read_only: bool) -> OpenMirror<C> {
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
        let is_blank = is_unwritten(device).await;
        if !is_blank.map_err(|reason| MirrorError::Replica { replica: source.name.clone(), error: reason })? {
            return Ok(Some(at));
        }
    }
    Ok(None)
}

/// Clears the lineage of a label.
fn forget_lineage(found: &mut ReplicaProbe) {
    if let ReplicaProbe::Labelled(label) = found {
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

pub(crate) enum ProbeError {
    Label(LabelError),
    Device(Error),
}

/// Probes a device for a label.
pub(crate) async fn probe_device(device: &DynDevice, mutation: Mutation) -> Result<ReplicaProbe, ProbeError> {
    if !has_reserved_area(device) {
        return Ok(ReplicaProbe::Unlabelled { has_room: false });
    }
    match device.execute(Request::read_reserved(ReservedArea::GroupLabel)).await {
        Ok(Response::Reserved(bytes)) => match decode_label(device, &bytes, mutation).await {
            Ok(Some(label)) => Ok(ReplicaProbe::Labelled(Box::new(label))),
            Ok(None) => Ok(ReplicaProbe::Unlabelled { has_room: true }),
            Err(reason) => Err(ProbeError::Label(reason)),
        },
        // A mirror keeps this area for itself, so as a replica it has no room for a label.
        Err(error) if matches!(error.kind(), ErrorKind::Absent(_)) => Ok(ReplicaProbe::Unlabelled { has_room: false }),
        Ok(_) => Err(ProbeError::Device(crate::replica::unexpected_response())),
        Err(error) => Err(ProbeError::Device(error)),
    }
}

/// Decodes a label with the bitmap pages that it refers to. An unreadable page counts as all of its regions.
async fn decode_label(device: &DynDevice, bytes: &[u8], mutation: Mutation) -> Result<Option<Label>, LabelError> {
    let mut wanted = WantedPages::default();
    let label = Label::decode_with(bytes, &mut wanted)?;
    let Some(regions) = label.as_ref().map(|label| label.map.count()).filter(|_| !wanted.0.is_empty()) else {
        return Ok(label);
    };
    let mut pages = LoadedPages { pages: BTreeMap::new(), are_trusted: mutation == Mutation::TrustPages };
    for id in wanted.0 {
        if let Ok(Response::Reserved(page)) = device.execute(Request::read_reserved(id.area(regions))).await {
            pages.pages.insert(id, page);
        }
    }
    Label::decode_with(bytes, &mut pages)
}

/// The pages that a label refers to.
#[derive(Default)]
struct WantedPages(Vec<PageId>);

impl Pages for WantedPages {
    fn page(&mut self, id: PageId) -> Option<&[u8]> {
        self.0.push(id);
        None
    }
}

/// The pages that were read for a label.
struct LoadedPages {
    pages: BTreeMap<PageId, Slice>,
    are_trusted: bool,
}

impl Pages for LoadedPages {
    fn page(&mut self, id: PageId) -> Option<&[u8]> {
        self.pages.get(&id).map(|page| &page[..])
    }

    fn are_trusted(&self) -> bool {
        self.are_trusted
    }
}

pub(crate) fn assemble_error(refusal: AssembleError, sources: &[ReplicaSource]) -> MirrorError {
    let names: &[usize] = match &refusal {
        AssembleError::NoReplica | AssembleError::NoneInSync | AssembleError::NoRoom => &[],
        AssembleError::NewWithoutReplica { replica }
        | AssembleError::OtherMirror { replica }
        | AssembleError::NotAReplica { replica }
        | AssembleError::Removed { replica }
        | AssembleError::NotCreated { replica } => &[*replica],
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
    random: &[u8; 16],
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
        replicas,
        authority: from.unwrap_or(0),
        write_intent,
        mutation: hooks.mutation,
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

/// Refuses a device whose reserved area has too few bitmap pages for the sets of such a map.
pub(crate) fn check_pages(name: &str, device: &DynDevice, map: &RegionMap) -> Result<(), MirrorError> {
    let (expected, actual) = (MAX_SETS as u32 * pages_of_set(map.count()), device.abilities().bitmap_pages);
    match actual >= expected {
        true => Ok(()),
        false => Err(MirrorError::Pages { replica: name.to_owned(), expected, actual }),
    }
}

fn existing_parts(
    mut sources: Vec<ReplicaSource>,
    known: ExistingMirror,
    random: &[u8; 16],
    hooks: &TestHooks,
) -> Result<MirrorParts, MirrorError> {
    let ExistingMirror { mut label, indices, unused, .. } = known;
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
    let dirty = label.dirty.clone();
    let replicas = existing_replicas(sources, &indices, &mut label);
    mark_assumed_names(&replicas, &unused);
    let Label { map, capacity_blocks, block_size, protection, uuid, own_index: authority, .. } = label;
    let geometry = Geometry { block_size, capacity_blocks, protection, limits };
    let prior = PriorState {
        events: label.events,
        lineage: label.lineage,
        changed: label.changed,
        is_tentative: label.is_tentative,
        dirty,
    };
    let write_intent = WriteIntent::new(prior, random);
    // Labels that replicas write apart must differ from a label that was in flight when they parted.
    if hooks.mutation != Mutation::CountOn {
        write_intent.skip_events_past(label.events);
    }
    Ok(MirrorParts { geometry, map, uuid, replicas, authority, write_intent, mutation: hooks.mutation })
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
            (next_number - 1, ReplicaSource { name: default_name(index), device, reopen: None })
        });
        let was_current = record.state == ReplicaState::InSync;
        set_initial_state(record, source.device.is_ok(), dirty);
        let replica = Replica::new(source, number, record);
        replica.is_listed_in_sync.set(was_current && record.state != ReplicaState::InSync);
        replicas.push(Rc::new(replica));
    }
    replicas
}

/// Marks offline replicas whose names are assumed: only labels could tell which is which, unless there is a single
/// one.
fn mark_assumed_names(replicas: &[Rc<Replica>], unused: &[usize]) {
    let away =
        || replicas.iter().filter(|replica| !replica.is_online() && replica.state.get() != ReplicaState::Removed);
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

/// Name of a replica that was not given.
pub(crate) fn default_name(index: usize) -> String {
    format!("replica {index}")
}

/// Refuses a replica that is smaller than the mirror, or has another block size or format.
pub(crate) fn check_fit(
    source: &ReplicaSource,
    block_size: BlockSize,
    capacity_blocks: u64,
    protection: Option<PiFormat>,
) -> Result<(), MirrorError> {
    let Ok(device) = &source.device else { return Ok(()) };
    let geometry = device.geometry();
    let replica = source.name.clone();
    if geometry.block_size != block_size {
        return Err(MirrorError::BlockSize { replica, expected: block_size, actual: geometry.block_size });
    }
    if geometry.protection != protection {
        return Err(MirrorError::Protection { replica, expected: protection, actual: geometry.protection });
    }
    if geometry.capacity_blocks < capacity_blocks {
        return Err(MirrorError::Size { replica, expected: capacity_blocks, actual: geometry.capacity_blocks });
    }
    Ok(())
}

/// Refuses devices for a new mirror that differ from the first one in size or format.
pub(crate) fn check_same_geometry(sources: &[ReplicaSource]) -> Result<(), MirrorError> {
    let Some(first) = sources.iter().find_map(|source| source.device.as_ref().ok()) else { return Ok(()) };
    let Geometry { block_size, capacity_blocks, protection, .. } = first.geometry().clone();
    for source in sources {
        check_fit(source, block_size, capacity_blocks, protection)?;
        let Ok(device) = &source.device else { continue };
        let actual = device.geometry().capacity_blocks;
        if actual != capacity_blocks {
            return Err(MirrorError::Size { replica: source.name.clone(), expected: capacity_blocks, actual });
        }
    }
    Ok(())
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
