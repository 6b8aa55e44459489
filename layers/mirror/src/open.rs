//! Putting a mirror together from its legs.

use std::collections::BTreeMap;
use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_block::{
    Abilities, Clock, Device, DynDevice, Error, ErrorKind, Geometry, Limits, Request, ReservedArea, Response, is_blank,
};
use sealblock_integrity::PiFormat;
use sealblock_runtime_memory::Slice;
use sealblock_units::BlockSize;

use crate::assemble::{AssembleError, Assembly, ExistingMirror, ReplicaProbe, assemble, leave_behind, leg_id};
use crate::label::{Label, LabelError, MOST_LEGS, ReplicaRecord, ReplicaState};
use crate::lineage::Lineage;
use crate::mirror::{Mirror, Parts, abilities};
use crate::regions::{MOST_BLOCKS, MOST_REGIONS, MOST_REGIONS_IN_LABEL, RegionMap, Regions};
use crate::replica::{Replica, ReplicaSource, has_annex};
use crate::sets::{MOST_SETS, PageId, Pages, pages_of_set};
use crate::test_hooks::{Mutation, TestHooks};
use crate::worker::Worker;
use crate::write_intent::{Past, WriteIntent};

/// How a mirror is opened.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Nothing is changed: no healing, no labels, no bringing legs up to date.
    pub read_only: bool,
    /// Drawn at random by the caller, anew for each opening: the identity of the mirror, should it be a new one, and what
    /// tells its labels from those that are written elsewhere.
    pub random: [u8; 16],
}

/// A mirror and the worker that must run beside it.
pub struct Opened<C> {
    /// The mirror.
    pub mirror: Rc<Mirror<C>>,
    /// Its background work; spawn [`Worker::run`].
    pub worker: Worker<C>,
}

/// Why legs cannot be opened as a mirror.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MirrorError {
    /// Too few or too many of them.
    #[error("a mirror has 2 to {MOST_LEGS} legs, not {0}")]
    Legs(usize),
    /// They do not belong together; the names of the legs in question.
    #[error("{refusal} ({})", .legs.join(", "))]
    Refused {
        /// Why.
        refusal: AssembleError,
        /// What the legs that it names are called.
        legs: Vec<String>,
    },
    /// The label of a leg cannot be used.
    #[error("{leg}: {why}")]
    Label {
        /// The leg.
        leg: String,
        /// Why.
        why: LabelError,
    },
    /// A leg could not be asked for its label.
    #[error("{leg}: {why}")]
    Leg {
        /// The leg.
        leg: String,
        /// Why.
        why: Error,
    },
    /// A new mirror could not be noted on its legs.
    #[error("the legs could not be labelled: {0}")]
    Note(Error),
    /// A leg has another block size than the mirror.
    #[error("{leg} has blocks of {actual} bytes, the mirror of {expected}")]
    BlockSize {
        /// The leg.
        leg: String,
        /// Of the mirror.
        expected: BlockSize,
        /// Of the leg.
        actual: BlockSize,
    },
    /// There are more blocks than can be tracked.
    #[error(
        "a mirror of {blocks} blocks cannot be tracked; its members have room for fewer, and none has more than {MOST_BLOCKS}"
    )]
    Capacity {
        /// Blocks of the mirror.
        blocks: u64,
    },
    /// A leg has no room for the bitmap pages of the mirror.
    #[error("{leg} has room for {actual} bitmap pages beside its blocks, the mirror needs {expected}")]
    Pages {
        /// The leg.
        leg: String,
        /// Pages that the mirror's regions may take.
        expected: u32,
        /// Pages of the leg.
        actual: u32,
    },
    /// A leg is smaller than the mirror, or of another size than the legs of a new one.
    #[error("{leg} has {actual} blocks, the mirror {expected}")]
    Size {
        /// The leg.
        leg: String,
        /// Of the mirror.
        expected: u64,
        /// Of the leg.
        actual: u64,
    },
    /// A leg has other protection information than the mirror. What comes from a leg without seals could be sealed unchecked.
    #[error("{leg} has protection information {}, the mirror {}", pi_words(*.actual), pi_words(*.expected))]
    Protection {
        /// The leg.
        leg: String,
        /// Of the mirror.
        expected: Option<PiFormat>,
        /// Of the leg.
        actual: Option<PiFormat>,
    },
}

/// A format of protection information in words.
fn pi_words(format: Option<PiFormat>) -> String {
    format.map_or("none".to_owned(), |format| {
        let (guard, kind, bits) = (format.guard(), format.protection() as u8 + 1, format.storage_tag_bits());
        format!("{guard} Type {kind} with {bits} bits of storage tag")
    })
}

/// Opens a mirror of these legs: what their labels call one mirror, or, where no label is on any of them, blank devices,
/// which are labelled. Legs that cannot be opened are gone without if the others know of the mirror, and so are devices
/// without a label in the place of a leg that should have one.
///
/// # Errors
/// See [`MirrorError`]. Nothing is changed then.
pub async fn open<C: Clock>(
    sources: Vec<ReplicaSource>,
    clock: C,
    options: OpenOptions,
) -> Result<Opened<C>, MirrorError> {
    open_drill(sources, clock, options, TestHooks::default()).await
}

/// Opens a mirror that is not as those that people use; see [`TestHooks`].
///
/// # Errors
/// As [`open`].
pub async fn open_drill<C: Clock>(
    sources: Vec<ReplicaSource>,
    clock: C,
    options: OpenOptions,
    drill: TestHooks,
) -> Result<Opened<C>, MirrorError> {
    if !(2..=MOST_LEGS).contains(&sources.len()) {
        return Err(MirrorError::Legs(sources.len()));
    }
    let mut found = join_all(sources.iter().map(|source| look(source, drill.mutation)))
        .await
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?;
    if drill.mutation == Mutation::SkipLineage {
        found.iter_mut().for_each(forget_lineage);
    }
    let verdict = assemble(&found).map_err(|refusal| refused(refusal, &sources))?;
    let is_uneven = matches!(&verdict, Assembly::Known(known) if known.labels_differ);
    let is_new = verdict == Assembly::New;
    let parts = match verdict {
        Assembly::New => {
            are_identical(&sources)?;
            if let Some(leg) = first_written(&sources).await? {
                return Err(refused(AssembleError::NotMade { leg }, &sources));
            }
            assemble_new(sources, &found, None, &options.random, &drill)?
        }
        Assembly::Known(known) => assemble_known(sources, *known, &options.random, &drill)?,
    };
    let opened = start(clock, parts, options.read_only);
    if is_new {
        // From now on the legs belong together, and no other device can take the place of one.
        opened.mirror.write_labels().await.map_err(MirrorError::Note)?;
    }
    if is_uneven && let Err(error) = opened.mirror.write_labels().await {
        // It helps to know old images of legs by; without it whatever needs a label fails for itself.
        tracing::debug!(%error, "the labels stay uneven");
    }
    Ok(opened)
}

/// A mirror of these parts, and its worker.
pub(crate) fn start<C: Clock>(clock: C, parts: Parts, read_only: bool) -> Opened<C> {
    let of: Vec<Abilities> = devices(&parts.legs).iter().map(Device::abilities).collect();
    let mirror = Rc::new(Mirror::new(clock, parts, abilities(&of, read_only), read_only));
    Opened { worker: Worker::new(mirror.clone()), mirror }
}

fn devices(legs: &[Rc<Replica>]) -> Vec<DynDevice> {
    legs.iter().filter_map(|leg| leg.device()).collect()
}

/// The first device that may hold something.
async fn first_written(sources: &[ReplicaSource]) -> Result<Option<usize>, MirrorError> {
    for (at, source) in sources.iter().enumerate() {
        let Ok(device) = &source.device else { continue };
        let is_blank = is_blank(device).await;
        if !is_blank.map_err(|why| MirrorError::Leg { leg: source.name.clone(), why })? {
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

/// What is where a leg should be.
async fn look(source: &ReplicaSource, mutation: Mutation) -> Result<ReplicaProbe, MirrorError> {
    let Ok(device) = &source.device else { return Ok(ReplicaProbe::Absent) };
    found_on(device, mutation).await.map_err(|trouble| match trouble {
        Trouble::Label(why) => MirrorError::Label { leg: source.name.clone(), why },
        Trouble::Device(why) => MirrorError::Leg { leg: source.name.clone(), why },
    })
}

pub(crate) enum Trouble {
    Label(LabelError),
    Device(Error),
}

/// What a device says of itself.
pub(crate) async fn found_on(device: &DynDevice, mutation: Mutation) -> Result<ReplicaProbe, Trouble> {
    if !has_annex(device) {
        return Ok(ReplicaProbe::Unlabelled { has_room: false });
    }
    match device.execute(Request::ReadReserved { slot: ReservedArea::GroupLabel }).await {
        Ok(Response::Reserved(bytes)) => match with_pages(device, &bytes, mutation).await {
            Ok(Some(label)) => Ok(ReplicaProbe::Labelled(Box::new(label))),
            Ok(None) => Ok(ReplicaProbe::Unlabelled { has_room: true }),
            Err(why) => Err(Trouble::Label(why)),
        },
        // A mirror keeps this slot for itself, and so is a leg without room for the label of another.
        Err(error) if matches!(error.kind(), ErrorKind::Absent(_)) => Ok(ReplicaProbe::Unlabelled { has_room: false }),
        Ok(_) => Err(Trouble::Device(crate::replica::answered_wrongly())),
        Err(error) => Err(Trouble::Device(error)),
    }
}

/// Reads a label and the bitmap pages that it refers to. A page that cannot be read counts as all of its regions.
async fn with_pages(device: &DynDevice, bytes: &[u8], mutation: Mutation) -> Result<Option<Label>, LabelError> {
    let mut wanted = Wanted::default();
    let label = Label::decode_with(bytes, &mut wanted)?;
    let Some(regions) = label.as_ref().map(|label| label.map.count()).filter(|_| !wanted.0.is_empty()) else {
        return Ok(label);
    };
    let mut pages = Read { pages: BTreeMap::new(), are_believed: mutation == Mutation::BelievePages };
    for id in wanted.0 {
        if let Ok(Response::Reserved(page)) = device.execute(Request::ReadReserved { slot: id.slot(regions) }).await {
            pages.pages.insert(id, page);
        }
    }
    Label::decode_with(bytes, &mut pages)
}

/// The pages that a label asks for.
#[derive(Default)]
struct Wanted(Vec<PageId>);

impl Pages for Wanted {
    fn page(&mut self, id: PageId) -> Option<&[u8]> {
        self.0.push(id);
        None
    }
}

/// The pages that were read for it.
struct Read {
    pages: BTreeMap<PageId, Slice>,
    are_believed: bool,
}

impl Pages for Read {
    fn page(&mut self, id: PageId) -> Option<&[u8]> {
        self.pages.get(&id).map(|page| &page[..])
    }

    fn are_believed(&self) -> bool {
        self.are_believed
    }
}

pub(crate) fn refused(refusal: AssembleError, sources: &[ReplicaSource]) -> MirrorError {
    let names: &[usize] = match &refusal {
        AssembleError::NoReplica | AssembleError::NoneInSync | AssembleError::NoRoom => &[],
        AssembleError::NewWithoutReplica { leg }
        | AssembleError::OtherMirror { leg }
        | AssembleError::NotAReplica { leg }
        | AssembleError::TakenOut { leg }
        | AssembleError::NotMade { leg } => &[*leg],
        AssembleError::Duplicate { first, second } | AssembleError::SplitBrain { first, second } => &[*first, *second],
    };
    let whole = |source: &ReplicaSource| match &source.device {
        Ok(_) => source.name.clone(),
        Err(why) => format!("{}: {why}", source.name),
    };
    let legs = match names {
        [] => sources.iter().map(whole).collect(),
        names => names.iter().filter_map(|at| sources.get(*at)).map(whole).collect(),
    };
    MirrorError::Refused { refusal, legs }
}

/// The parts of a mirror that is noted nowhere yet: of devices that are all alike, or of one whose content counts and others
/// that are to get everything from it.
pub(crate) fn assemble_new(
    sources: Vec<ReplicaSource>,
    found: &[ReplicaProbe],
    from: Option<usize>,
    random: &[u8; 16],
    drill: &TestHooks,
) -> Result<Parts, MirrorError> {
    let geometry = shape(&sources);
    let (block_size, capacity_blocks) = (geometry.block_size, geometry.capacity_blocks);
    let map = map_for(block_size, capacity_blocks, &sources, drill)?;
    let mut legs = Vec::with_capacity(sources.len());
    for (number, source) in sources.into_iter().enumerate() {
        let id = leg_id(random, 0, number);
        let is_new = from.is_some_and(|from| from != number);
        let (standing, missed) = match is_new {
            true => (ReplicaState::OutOfSync, Regions::all(map.count())),
            false => (ReplicaState::InSync, Regions::none(map.count())),
        };
        let has_room = found[number].has_room();
        let member = ReplicaRecord {
            id,
            standing,
            has_room,
            is_new,
            out_of_sync: missed,
            stale: Vec::new(),
            acked_events: 0,
            sent_events: 0,
        };
        legs.push(Rc::new(Replica::new(source, number, &member)));
    }
    let dirty = Regions::none(map.count());
    let past = Past { events: 0, lineage: Lineage::default(), changed: 0, is_tentative: false, dirty };
    let notes = WriteIntent::new(past, random);
    Ok(Parts {
        geometry,
        map,
        uuid: *random,
        legs,
        authority: from.unwrap_or(0),
        write_intent: notes,
        mutation: drill.mutation,
    })
}

/// The finest regions that the labels of all these devices have room for, or those that a drill wants.
fn map_for(
    block_size: BlockSize,
    capacity_blocks: u64,
    sources: &[ReplicaSource],
    drill: &TestHooks,
) -> Result<RegionMap, MirrorError> {
    if let Some(shift) = drill.region_shift {
        let drilled = RegionMap::with_shift(block_size, capacity_blocks, shift);
        return drilled.ok_or(MirrorError::Capacity { blocks: capacity_blocks });
    }
    let fine = RegionMap::new(block_size, capacity_blocks, MOST_REGIONS);
    let has_pages = |map: &RegionMap| {
        let devices = sources.iter().filter_map(|source| source.device.as_ref().ok());
        devices.filter(|device| has_annex(device)).all(|device| check_pages("", device, map).is_ok())
    };
    let map = fine.filter(has_pages).or_else(|| RegionMap::new(block_size, capacity_blocks, MOST_REGIONS_IN_LABEL));
    map.ok_or(MirrorError::Capacity { blocks: capacity_blocks })
}

/// Refuses a device whose annex lacks pages that the sets of such a map may need.
pub(crate) fn check_pages(name: &str, device: &DynDevice, map: &RegionMap) -> Result<(), MirrorError> {
    let (expected, actual) = (MOST_SETS as u32 * pages_of_set(map.count()), device.abilities().annex_pages);
    match actual >= expected {
        true => Ok(()),
        false => Err(MirrorError::Pages { leg: name.to_owned(), expected, actual }),
    }
}

fn assemble_known(
    mut sources: Vec<ReplicaSource>,
    known: ExistingMirror,
    random: &[u8; 16],
    drill: &TestHooks,
) -> Result<Parts, MirrorError> {
    let ExistingMirror { mut label, places, unused, .. } = known;
    for leg in unused.iter().copied() {
        let is_removed = label.members[places[leg]].standing == ReplicaState::Removed;
        let why = if is_removed { "it was taken out of the mirror" } else { WITHOUT_LABEL };
        sources[leg].device = Err(why.to_owned());
        sources[leg].reopen = None;
    }
    for source in &sources {
        fits(source, label.block_size, label.capacity_blocks, label.protection)?;
    }
    let limits = shape(&sources).limits;
    let dirty = label.dirty.clone();
    let legs = known_legs(sources, &places, &mut label);
    mark_guessed(&legs, &unused);
    let Label { map, capacity_blocks, block_size, protection, uuid, own_index: teller, .. } = label;
    let geometry = Geometry { block_size, capacity_blocks, protection, limits };
    let past = Past {
        events: label.events,
        lineage: label.lineage,
        changed: label.changed,
        is_tentative: label.is_tentative,
        dirty,
    };
    let notes = WriteIntent::new(past, random);
    // Labels that legs write apart must not look like one that was under way when they were parted.
    if drill.mutation != Mutation::CountOn {
        notes.go_beyond(label.events);
    }
    Ok(Parts { geometry, map, uuid, legs, authority: teller, write_intent: notes, mutation: drill.mutation })
}

/// The legs by their places: those that were given, and those that were not named.
fn known_legs(sources: Vec<ReplicaSource>, places: &[usize], label: &mut Label) -> Vec<Rc<Replica>> {
    let mut given: Vec<Option<(usize, ReplicaSource)>> = label.members.iter().map(|_| None).collect();
    let mut next_number = sources.len();
    for (number, (place, source)) in places.iter().zip(sources).enumerate() {
        given[*place] = Some((number, source));
    }
    let (dirty, mut legs) = (&label.dirty, Vec::with_capacity(given.len()));
    for (place, (given, member)) in given.into_iter().zip(&mut label.members).enumerate() {
        let (number, source) = given.unwrap_or_else(|| {
            next_number += 1;
            let device = Err("it was not named".to_owned());
            (next_number - 1, ReplicaSource { name: nameless(place), device, reopen: None })
        });
        let was_current = member.standing == ReplicaState::InSync;
        begin(member, source.device.is_ok(), dirty);
        let leg = Replica::new(source, number, member);
        leg.is_unmissed.set(was_current && member.standing != ReplicaState::InSync);
        legs.push(Rc::new(leg));
    }
    legs
}

/// Of members that are away only labels could tell which is which. One by itself is who is left.
fn mark_guessed(legs: &[Rc<Replica>], unused: &[usize]) {
    let away = || legs.iter().filter(|leg| !leg.is_here() && leg.standing.get() != ReplicaState::Removed);
    let is_guessed = away().count() > 1;
    for leg in away() {
        leg.is_guessed.set(is_guessed);
        leg.is_unlabelled.set(unused.contains(&leg.number.get()));
    }
}

/// Why a device is not used in whose place a leg with a label is expected.
const WITHOUT_LABEL: &str = "no label of the mirror is on it; `sealblock mirror replace` makes it a leg";

/// What a member is to begin with.
fn begin(member: &mut ReplicaRecord, is_here: bool, dirty: &Regions) {
    match (member.standing, is_here) {
        (ReplicaState::Removed | ReplicaState::OutOfSync, _) | (ReplicaState::InSync, true) => {}
        // Whoever is not here now lacks what comes next; and what may differ at the moment is in doubt on it.
        (ReplicaState::InSync | ReplicaState::Resyncing, false) => leave_behind(member, dirty),
        (ReplicaState::Resyncing, true) => member.standing = ReplicaState::OutOfSync,
    }
    if member.standing == ReplicaState::OutOfSync {
        member.out_of_sync.add(dirty);
    }
}

/// What a member is called that was not named.
pub(crate) fn nameless(place: usize) -> String {
    format!("leg {place}")
}

/// Refuses a leg that cannot hold the mirror's blocks, or not with the mirror's tags.
pub(crate) fn fits(
    source: &ReplicaSource,
    block_size: BlockSize,
    capacity_blocks: u64,
    protection: Option<PiFormat>,
) -> Result<(), MirrorError> {
    let Ok(device) = &source.device else { return Ok(()) };
    let geometry = device.geometry();
    let leg = source.name.clone();
    if geometry.block_size != block_size {
        return Err(MirrorError::BlockSize { leg, expected: block_size, actual: geometry.block_size });
    }
    if geometry.protection != protection {
        return Err(MirrorError::Protection { leg, expected: protection, actual: geometry.protection });
    }
    if geometry.capacity_blocks < capacity_blocks {
        return Err(MirrorError::Size { leg, expected: capacity_blocks, actual: geometry.capacity_blocks });
    }
    Ok(())
}

/// Refuses devices for a new mirror that are not of one shape: what the first one is counts.
pub(crate) fn are_identical(sources: &[ReplicaSource]) -> Result<(), MirrorError> {
    let Some(first) = sources.iter().find_map(|source| source.device.as_ref().ok()) else { return Ok(()) };
    let Geometry { block_size, capacity_blocks, protection, .. } = first.geometry().clone();
    for source in sources {
        fits(source, block_size, capacity_blocks, protection)?;
        let Ok(device) = &source.device else { continue };
        let actual = device.geometry().capacity_blocks;
        if actual != capacity_blocks {
            return Err(MirrorError::Size { leg: source.name.clone(), expected: capacity_blocks, actual });
        }
    }
    Ok(())
}

/// The shape of the first of these, and what every one takes.
fn shape(sources: &[ReplicaSource]) -> Geometry {
    let mut all = sources.iter().filter_map(|source| source.device.as_ref().ok()).map(|device| device.geometry());
    let first = all.next().expect("a mirror is opened with a leg that is there").clone();
    let limits = all.fold(first.limits, |least, Geometry { limits, .. }| Limits {
        max_transfer_blocks: least.max_transfer_blocks.min(limits.max_transfer_blocks),
        max_verify_blocks: least.max_verify_blocks.min(limits.max_verify_blocks),
        max_zero_blocks: least.max_zero_blocks.min(limits.max_zero_blocks),
    });
    Geometry { limits, ..first }
}
