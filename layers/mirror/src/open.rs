//! Putting a mirror together from its replicas.

use std::collections::BTreeMap;
use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_block::{
    Abilities, Clock, Device, DynDevice, Error, ErrorKind, Geometry, Limits, Request, ReservedArea, Response, is_blank,
};
use sealblock_integrity::PiFormat;
use sealblock_runtime_memory::Slice;
use sealblock_units::BlockSize;

use crate::assemble::{AssembleError, Assembly, ExistingMirror, ReplicaProbe, assemble, mark_out_of_sync, replica_id};
use crate::label::{Label, LabelError, MAX_REPLICAS, ReplicaRecord, ReplicaState};
use crate::lineage::Lineage;
use crate::mirror::{Mirror, MirrorParts, abilities};
use crate::regions::{MAX_BLOCKS, MAX_REGIONS, MAX_REGIONS_IN_LABEL, RegionMap, Regions};
use crate::replica::{Replica, ReplicaSource, has_reserved_area};
use crate::resync::Worker;
use crate::sets::{MAX_SETS, PageId, Pages, pages_of_set};
use crate::test_hooks::{Mutation, TestHooks};
use crate::write_intent::{PriorState, WriteIntent};

/// How a mirror is opened.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Nothing is changed: no healing, no labels, no bringing replicas up to date.
    pub is_read_only: bool,
    /// Drawn at random by the caller, anew for each opening: the identity of the mirror, should it be a new one, and what
    /// tells its labels from those that are written elsewhere.
    pub random: [u8; 16],
}

/// A mirror and the worker that must run beside it.
pub struct OpenMirror<C> {
    /// The mirror.
    pub mirror: Rc<Mirror<C>>,
    /// Its background work; spawn [`Worker::run`].
    pub worker: Worker<C>,
}

/// Why replicas cannot be opened as a mirror.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MirrorError {
    /// Too few or too many of them.
    #[error("a mirror has 2 to {MAX_REPLICAS} replicas, not {0}")]
    ReplicaCount(usize),
    /// They do not belong together; the names of the replicas in question.
    #[error("{error} ({})", .replicas.join(", "))]
    Assemble {
        /// Why.
        error: AssembleError,
        /// What the replicas that it names are called.
        replicas: Vec<String>,
    },
    /// The label of a replica cannot be used.
    #[error("{replica}: {error}")]
    Label {
        /// The replica.
        replica: String,
        /// Why.
        error: LabelError,
    },
    /// A replica could not be asked for its label.
    #[error("{replica}: {error}")]
    Replica {
        /// The replica.
        replica: String,
        /// Why.
        error: Error,
    },
    /// A new mirror could not be noted on its replicas.
    #[error("the replicas could not be labelled: {0}")]
    WriteLabels(Error),
    /// A replica has another block size than the mirror.
    #[error("{replica} has blocks of {actual} bytes, the mirror of {expected}")]
    BlockSize {
        /// The replica.
        replica: String,
        /// Of the mirror.
        expected: BlockSize,
        /// Of the replica.
        actual: BlockSize,
    },
    /// There are more blocks than can be tracked.
    #[error(
        "a mirror of {blocks} blocks cannot be tracked; its members have room for fewer, and none has more than {MAX_BLOCKS}"
    )]
    Capacity {
        /// Blocks of the mirror.
        blocks: u64,
    },
    /// A replica has no room for the bitmap pages of the mirror.
    #[error("{replica} has room for {actual} bitmap pages beside its blocks, the mirror needs {expected}")]
    Pages {
        /// The replica.
        replica: String,
        /// Pages that the mirror's regions may take.
        expected: u32,
        /// Pages of the replica.
        actual: u32,
    },
    /// A replica is smaller than the mirror, or of another size than the replicas of a new one.
    #[error("{replica} has {actual} blocks, the mirror {expected}")]
    Size {
        /// The replica.
        replica: String,
        /// Of the mirror.
        expected: u64,
        /// Of the replica.
        actual: u64,
    },
    /// A replica has other protection information than the mirror. What comes from a replica without seals could be sealed unchecked.
    #[error("{replica} has protection information {}, the mirror {}", pi_to_text(*.actual), pi_to_text(*.expected))]
    Protection {
        /// The replica.
        replica: String,
        /// Of the mirror.
        expected: Option<PiFormat>,
        /// Of the replica.
        actual: Option<PiFormat>,
    },
}

/// A format of protection information in words.
fn pi_to_text(format: Option<PiFormat>) -> String {
    format.map_or("none".to_owned(), |format| {
        let (guard, kind, bits) = (format.guard(), format.protection() as u8 + 1, format.storage_tag_bits());
        format!("{guard} Type {kind} with {bits} bits of storage tag")
    })
}

/// Opens a mirror of these replicas: what their labels call one mirror, or, where no label is on any of them, blank devices,
/// which are labelled. Replicas that cannot be opened are gone without if the others know of the mirror, and so are devices
/// without a label in the place of a replica that should have one.
///
/// # Errors
/// See [`MirrorError`]. Nothing is changed then.
pub async fn open<C: Clock>(
    sources: Vec<ReplicaSource>,
    clock: C,
    options: OpenOptions,
) -> Result<OpenMirror<C>, MirrorError> {
    open_with_hooks(sources, clock, options, TestHooks::default()).await
}

/// Opens a mirror that is not as those that people use; see [`TestHooks`].
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
        // From now on the replicas belong together, and no other device can take the place of one.
        opened.mirror.write_labels().await.map_err(MirrorError::WriteLabels)?;
    }
    if labels_differ && let Err(error) = opened.mirror.write_labels().await {
        // It helps to know old images of replicas by; without it whatever needs a label fails for itself.
        tracing::debug!(%error, "the labels stay uneven");
    }
    Ok(opened)
}

/// A mirror of these parts, and its worker.
pub(crate) fn start<C: Clock>(clock: C, parts: MirrorParts, read_only: bool) -> OpenMirror<C> {
    let of: Vec<Abilities> = devices(&parts.replicas).iter().map(Device::abilities).collect();
    let mirror = Rc::new(Mirror::new(clock, parts, abilities(&of, read_only), read_only));
    OpenMirror { worker: Worker::new(mirror.clone()), mirror }
}

fn devices(replicas: &[Rc<Replica>]) -> Vec<DynDevice> {
    replicas.iter().filter_map(|replica| replica.device()).collect()
}

/// The first device that may hold something.
async fn first_not_blank(sources: &[ReplicaSource]) -> Result<Option<usize>, MirrorError> {
    for (at, source) in sources.iter().enumerate() {
        let Ok(device) = &source.device else { continue };
        let is_blank = is_blank(device).await;
        if !is_blank.map_err(|reason| MirrorError::Replica { replica: source.name.clone(), error: reason })? {
            return Ok(Some(at));
        }
    }
    Ok(None)
}

/// Takes from a label what it says of sessions.
fn forget_lineage(found: &mut ReplicaProbe) {
    if let ReplicaProbe::Labelled(label) = found {
        label.lineage = Lineage::default();
    }
}

/// What is where a replica should be.
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

/// What a device says of itself.
pub(crate) async fn probe_device(device: &DynDevice, mutation: Mutation) -> Result<ReplicaProbe, ProbeError> {
    if !has_reserved_area(device) {
        return Ok(ReplicaProbe::Unlabelled { has_room: false });
    }
    match device.execute(Request::ReadReserved { slot: ReservedArea::GroupLabel }).await {
        Ok(Response::Reserved(bytes)) => match decode_label(device, &bytes, mutation).await {
            Ok(Some(label)) => Ok(ReplicaProbe::Labelled(Box::new(label))),
            Ok(None) => Ok(ReplicaProbe::Unlabelled { has_room: true }),
            Err(reason) => Err(ProbeError::Label(reason)),
        },
        // A mirror keeps this slot for itself, and so is a replica without room for the label of another.
        Err(error) if matches!(error.kind(), ErrorKind::Absent(_)) => Ok(ReplicaProbe::Unlabelled { has_room: false }),
        Ok(_) => Err(ProbeError::Device(crate::replica::unexpected_response())),
        Err(error) => Err(ProbeError::Device(error)),
    }
}

/// Reads a label and the bitmap pages that it refers to. A page that cannot be read counts as all of its regions.
async fn decode_label(device: &DynDevice, bytes: &[u8], mutation: Mutation) -> Result<Option<Label>, LabelError> {
    let mut wanted = WantedPages::default();
    let label = Label::decode_with(bytes, &mut wanted)?;
    let Some(regions) = label.as_ref().map(|label| label.map.count()).filter(|_| !wanted.0.is_empty()) else {
        return Ok(label);
    };
    let mut pages = LoadedPages { pages: BTreeMap::new(), are_trusted: mutation == Mutation::TrustPages };
    for id in wanted.0 {
        if let Ok(Response::Reserved(page)) = device.execute(Request::ReadReserved { slot: id.area(regions) }).await {
            pages.pages.insert(id, page);
        }
    }
    Label::decode_with(bytes, &mut pages)
}

/// The pages that a label asks for.
#[derive(Default)]
struct WantedPages(Vec<PageId>);

impl Pages for WantedPages {
    fn page(&mut self, id: PageId) -> Option<&[u8]> {
        self.0.push(id);
        None
    }
}

/// The pages that were read for it.
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

/// The parts of a mirror that is noted nowhere yet: of devices that are all alike, or of one whose content counts and others
/// that are to get everything from it.
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
    let past = PriorState { events: 0, lineage: Lineage::default(), changed: 0, is_tentative: false, dirty };
    let write_intent = WriteIntent::new(past, random);
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

/// The finest regions that the labels of all these devices have room for, or those that a drill wants.
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

/// Refuses a device whose annex lacks pages that the sets of such a map may need.
pub(crate) fn check_pages(name: &str, device: &DynDevice, map: &RegionMap) -> Result<(), MirrorError> {
    let (expected, actual) = (MAX_SETS as u32 * pages_of_set(map.count()), device.abilities().annex_pages);
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
    let ExistingMirror { mut label, indices: places, unused, .. } = known;
    for replica in unused.iter().copied() {
        let is_removed = label.replicas[places[replica]].state == ReplicaState::Removed;
        let reason = if is_removed { "it was taken out of the mirror" } else { NO_LABEL };
        sources[replica].device = Err(reason.to_owned());
        sources[replica].reopen = None;
    }
    for source in &sources {
        check_fit(source, label.block_size, label.capacity_blocks, label.protection)?;
    }
    let limits = common_geometry(&sources).limits;
    let dirty = label.dirty.clone();
    let replicas = existing_replicas(sources, &places, &mut label);
    mark_assumed_names(&replicas, &unused);
    let Label { map, capacity_blocks, block_size, protection, uuid, own_index: authority, .. } = label;
    let geometry = Geometry { block_size, capacity_blocks, protection, limits };
    let past = PriorState {
        events: label.events,
        lineage: label.lineage,
        changed: label.changed,
        is_tentative: label.is_tentative,
        dirty,
    };
    let write_intent = WriteIntent::new(past, random);
    // Labels that replicas write apart must not look like one that was under way when they were parted.
    if hooks.mutation != Mutation::CountOn {
        write_intent.skip_events_past(label.events);
    }
    Ok(MirrorParts { geometry, map, uuid, replicas, authority, write_intent, mutation: hooks.mutation })
}

/// The replicas by their places: those that were given, and those that were not named.
fn existing_replicas(sources: Vec<ReplicaSource>, places: &[usize], label: &mut Label) -> Vec<Rc<Replica>> {
    let mut given: Vec<Option<(usize, ReplicaSource)>> = label.replicas.iter().map(|_| None).collect();
    let mut next_number = sources.len();
    for (number, (place, source)) in places.iter().zip(sources).enumerate() {
        given[*place] = Some((number, source));
    }
    let (dirty, mut replicas) = (&label.dirty, Vec::with_capacity(given.len()));
    for (place, (given, record)) in given.into_iter().zip(&mut label.replicas).enumerate() {
        let (number, source) = given.unwrap_or_else(|| {
            next_number += 1;
            let device = Err("it was not named".to_owned());
            (next_number - 1, ReplicaSource { name: default_name(place), device, reopen: None })
        });
        let was_current = record.state == ReplicaState::InSync;
        set_initial_state(record, source.device.is_ok(), dirty);
        let replica = Replica::new(source, number, record);
        replica.is_listed_in_sync.set(was_current && record.state != ReplicaState::InSync);
        replicas.push(Rc::new(replica));
    }
    replicas
}

/// Of members that are away only labels could tell which is which. One by itself is who is left.
fn mark_assumed_names(replicas: &[Rc<Replica>], unused: &[usize]) {
    let away =
        || replicas.iter().filter(|replica| !replica.is_online() && replica.state.get() != ReplicaState::Removed);
    let is_guessed = away().count() > 1;
    for replica in away() {
        replica.is_name_assumed.set(is_guessed);
        replica.is_unlabelled.set(unused.contains(&replica.number.get()));
    }
}

/// Why a device is not used in whose place a replica with a label is expected.
const NO_LABEL: &str = "no label of the mirror is on it; `sealblock mirror replace` makes it a replica";

/// What a member is to begin with.
fn set_initial_state(record: &mut ReplicaRecord, is_here: bool, dirty: &Regions) {
    match (record.state, is_here) {
        (ReplicaState::Removed | ReplicaState::OutOfSync, _) | (ReplicaState::InSync, true) => {}
        // Whoever is not here now lacks what comes next; and what may differ at the moment is in doubt on it.
        (ReplicaState::InSync | ReplicaState::Resyncing, false) => mark_out_of_sync(record, dirty),
        (ReplicaState::Resyncing, true) => record.state = ReplicaState::OutOfSync,
    }
    if record.state == ReplicaState::OutOfSync {
        record.out_of_sync.add(dirty);
    }
}

/// What a member is called that was not named.
pub(crate) fn default_name(place: usize) -> String {
    format!("replica {place}")
}

/// Refuses a replica that cannot hold the mirror's blocks, or not with the mirror's tags.
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

/// Refuses devices for a new mirror that are not of one shape: what the first one is counts.
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

/// The shape of the first of these, and what every one takes.
fn common_geometry(sources: &[ReplicaSource]) -> Geometry {
    let mut all = sources.iter().filter_map(|source| source.device.as_ref().ok()).map(|device| device.geometry());
    let first = all.next().expect("a mirror is opened with a replica that is there").clone();
    let limits = all.fold(first.limits, |least, Geometry { limits, .. }| Limits {
        max_transfer_blocks: least.max_transfer_blocks.min(limits.max_transfer_blocks),
        max_verify_blocks: least.max_verify_blocks.min(limits.max_verify_blocks),
        max_zero_blocks: least.max_zero_blocks.min(limits.max_zero_blocks),
    });
    Geometry { limits, ..first }
}
