//! Putting a mirror together from its legs.

use std::collections::BTreeMap;
use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_block::{
    Abilities, AnnexSlot, Answer, Clock, Device, Error, Failure, Geometry, Limits, Operation, Stack,
};
use sealblock_integrity::PiFormat;
use sealblock_runtime_memory::Slice;
use sealblock_units::BlockSize;

use crate::drill::Drill;
use crate::judge::{Found, Known, Refusal, Verdict, judge, leave_behind, leg_id};
use crate::label::{Label, LabelError, MOST_LEGS, Member, Standing};
use crate::leg::{Leg, LegSource, has_annex};
use crate::lineage::Lineage;
use crate::mirror::{Mirror, Parts, abilities};
use crate::notes::Notes;
use crate::regions::{MOST_BLOCKS, MOST_REGIONS, MOST_REGIONS_IN_LABEL, RegionMap, Regions};
use crate::sets::{MOST_SETS, PageId, Pages, pages_of_set};
use crate::worker::Worker;

/// How far the generations of one opening are from those of the one before, at least. How much farther is drawn, so that two
/// openings that do not know of each other do not write labels of the same generation.
const LABELS_APART: u64 = 16;

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
        refusal: Refusal,
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
    /// A leg is smaller than the mirror.
    #[error("{leg} has {actual} blocks, the mirror {expected}")]
    Size {
        /// The leg.
        leg: String,
        /// Of the mirror.
        expected: u64,
        /// Of the leg.
        actual: u64,
    },
}

/// Opens a mirror of these legs. Legs that cannot be opened are gone without if the others know of the mirror.
///
/// # Errors
/// See [`MirrorError`]. Nothing is changed then.
pub async fn open<C: Clock>(sources: Vec<LegSource>, clock: C, options: OpenOptions) -> Result<Opened<C>, MirrorError> {
    open_drill(sources, clock, options, Drill::default()).await
}

/// Opens a mirror that is not as those that people use; see [`Drill`].
///
/// # Errors
/// As [`open`].
pub async fn open_drill<C: Clock>(
    sources: Vec<LegSource>,
    clock: C,
    options: OpenOptions,
    drill: Drill,
) -> Result<Opened<C>, MirrorError> {
    if !(2..=MOST_LEGS).contains(&sources.len()) {
        return Err(MirrorError::Legs(sources.len()));
    }
    let found = join_all(sources.iter().map(look)).await.into_iter().collect::<Result<Vec<_>, _>>()?;
    let verdict = judge(&found).map_err(|refusal| refused(refusal, &sources))?;
    let devices: Vec<Stack> = sources.iter().filter_map(|source| source.device.as_ref().ok().cloned()).collect();
    let is_new = verdict == Verdict::New;
    let is_uneven = matches!(&verdict, Verdict::Known(known) if known.is_uneven);
    let parts = match verdict {
        Verdict::New => assemble_new(sources, &found, &devices, &options, &drill)?,
        Verdict::Known(known) => assemble_known(sources, &devices, known, &options.random, &drill)?,
    };
    let of: Vec<Abilities> = devices.iter().map(Device::abilities).collect();
    let abilities = abilities(&of, options.read_only);
    let mirror = Rc::new(Mirror::new(clock, parts, abilities, options.read_only));
    if is_new {
        // From now on the legs belong together, and no other device can take the place of one.
        mirror.note().await.map_err(MirrorError::Note)?;
    }
    if is_uneven && let Err(error) = mirror.note().await {
        // It helps to know old images of legs by; without it whatever needs a label fails for itself.
        tracing::debug!(%error, "the labels stay uneven");
    }
    Ok(Opened { worker: Worker::new(mirror.clone()), mirror })
}

/// What is where a leg should be.
async fn look(source: &LegSource) -> Result<Found, MirrorError> {
    let Ok(device) = &source.device else { return Ok(Found::Absent) };
    found_on(device).await.map_err(|trouble| match trouble {
        Trouble::Label(why) => MirrorError::Label { leg: source.name.clone(), why },
        Trouble::Device(why) => MirrorError::Leg { leg: source.name.clone(), why },
    })
}

pub(crate) enum Trouble {
    Label(LabelError),
    Device(Error),
}

/// What a device says of itself.
pub(crate) async fn found_on(device: &Stack) -> Result<Found, Trouble> {
    if !has_annex(device) {
        return Ok(Found::Unlabelled { has_room: false });
    }
    match device.execute(Operation::ReadAnnex { slot: AnnexSlot::Group }).await {
        Ok(Answer::Annex(bytes)) => match with_pages(device, &bytes).await {
            Ok(Some(label)) => Ok(Found::Labelled(Box::new(label))),
            Ok(None) => Ok(Found::Unlabelled { has_room: true }),
            Err(why) => Err(Trouble::Label(why)),
        },
        // A mirror keeps this slot for itself, and so is a leg without room for the label of another.
        Err(error) if matches!(error.failure(), Failure::Absent(_)) => Ok(Found::Unlabelled { has_room: false }),
        Ok(_) => Err(Trouble::Device(crate::leg::answered_wrongly())),
        Err(error) => Err(Trouble::Device(error)),
    }
}

/// Reads a label and the bitmap pages that it refers to. A page that cannot be read counts as all of its regions.
async fn with_pages(device: &Stack, bytes: &[u8]) -> Result<Option<Label>, LabelError> {
    let mut wanted = Wanted::default();
    let label = Label::decode_with(bytes, &mut wanted)?;
    let Some(regions) = label.as_ref().map(|label| label.map.count()).filter(|_| !wanted.0.is_empty()) else {
        return Ok(label);
    };
    let mut pages = Read::default();
    for id in wanted.0 {
        if let Ok(Answer::Annex(page)) = device.execute(Operation::ReadAnnex { slot: id.slot(regions) }).await {
            pages.0.insert(id, page);
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
#[derive(Default)]
struct Read(BTreeMap<PageId, Slice>);

impl Pages for Read {
    fn page(&mut self, id: PageId) -> Option<&[u8]> {
        self.0.get(&id).map(|page| &page[..])
    }
}

fn refused(refusal: Refusal, sources: &[LegSource]) -> MirrorError {
    let names: &[usize] = match &refusal {
        Refusal::NoLeg | Refusal::OnlyStale => &[],
        Refusal::NewWithoutLeg { leg } | Refusal::Foreign { leg } | Refusal::Stranger { leg } => &[*leg],
        Refusal::Twice { first, second } | Refusal::SplitBrain { first, second } => &[*first, *second],
    };
    let whole = |source: &LegSource| match &source.device {
        Ok(_) => source.name.clone(),
        Err(why) => format!("{}: {why}", source.name),
    };
    let legs = match names {
        [] => sources.iter().map(whole).collect(),
        names => names.iter().filter_map(|at| sources.get(*at)).map(whole).collect(),
    };
    MirrorError::Refused { refusal, legs }
}

fn assemble_new(
    sources: Vec<LegSource>,
    found: &[Found],
    devices: &[Stack],
    options: &OpenOptions,
    drill: &Drill,
) -> Result<Parts, MirrorError> {
    let block_size = devices[0].geometry().block_size;
    let capacity_blocks = devices.iter().map(|device| device.geometry().capacity_blocks).min().unwrap_or(0);
    let protection = common(devices);
    let map = map_for(block_size, capacity_blocks, devices, drill)?;
    let mut legs = Vec::with_capacity(sources.len());
    for (number, source) in sources.into_iter().enumerate() {
        fits(&source, block_size, capacity_blocks)?;
        let id = leg_id(&options.random, 0, number);
        let (has_room, missed) = (found[number].has_room(), Regions::none(map.count()));
        let member = Member {
            id,
            standing: Standing::Current,
            has_room,
            is_new: false,
            missed,
            stale: Vec::new(),
            seen: 0,
            sent: 0,
        };
        legs.push(Rc::new(Leg::new(source, number, &member)));
    }
    let geometry = Geometry { block_size, capacity_blocks, protection, limits: limits(devices) };
    let notes = Notes::new(0, 0, Lineage::default(), Regions::none(map.count()));
    Ok(Parts { geometry, map, uuid: options.random, legs, teller: 0, notes, mutation: drill.mutation })
}

/// The finest regions that the labels of all these devices have room for, or those that a drill wants.
fn map_for(
    block_size: BlockSize,
    capacity_blocks: u64,
    devices: &[Stack],
    drill: &Drill,
) -> Result<RegionMap, MirrorError> {
    if let Some(shift) = drill.region_shift {
        let drilled = RegionMap::with_shift(block_size, capacity_blocks, shift);
        return drilled.ok_or(MirrorError::Capacity { blocks: capacity_blocks });
    }
    let fine = RegionMap::new(block_size, capacity_blocks, MOST_REGIONS);
    let has_pages = |map: &RegionMap| {
        devices.iter().filter(|device| has_annex(device)).all(|device| check_pages("", device, map).is_ok())
    };
    let map = fine.filter(has_pages).or_else(|| RegionMap::new(block_size, capacity_blocks, MOST_REGIONS_IN_LABEL));
    map.ok_or(MirrorError::Capacity { blocks: capacity_blocks })
}

/// Refuses a device whose annex lacks pages that the sets of such a map may need.
pub(crate) fn check_pages(name: &str, device: &Stack, map: &RegionMap) -> Result<(), MirrorError> {
    let (expected, actual) = (MOST_SETS as u32 * pages_of_set(map.count()), device.abilities().annex_pages);
    match actual >= expected {
        true => Ok(()),
        false => Err(MirrorError::Pages { leg: name.to_owned(), expected, actual }),
    }
}

fn assemble_known(
    sources: Vec<LegSource>,
    devices: &[Stack],
    known: Known,
    random: &[u8; 16],
    drill: &Drill,
) -> Result<Parts, MirrorError> {
    let Known { mut label, places, .. } = known;
    let dirty = label.dirty.clone();
    let mut given: Vec<Option<(usize, LegSource)>> = label.members.iter().map(|_| None).collect();
    let mut next_number = sources.len();
    for (number, (place, source)) in places.into_iter().zip(sources).enumerate() {
        fits(&source, label.block_size, label.capacity_blocks)?;
        given[place] = Some((number, source));
    }
    let mut legs = Vec::with_capacity(given.len());
    for (place, given) in given.into_iter().enumerate() {
        let (number, source) = given.unwrap_or_else(|| {
            next_number += 1;
            (next_number - 1, nameless(place))
        });
        let member = &mut label.members[place];
        begin(member, source.device.is_ok(), &dirty);
        legs.push(Rc::new(Leg::new(source, number, member)));
    }
    let Label { map, capacity_blocks, block_size, protection, uuid, generation, changed, lineage, own: teller, .. } =
        label;
    // A leg that is not here is taken to be as it was when the labels were written.
    let is_whole = legs.iter().all(|leg| leg.is_here() || leg.standing.get() == Standing::Removed);
    let protection = common(devices).filter(|format| is_whole || protection == Some(*format));
    let geometry = Geometry { block_size, capacity_blocks, protection, limits: limits(devices) };
    // Labels that legs write apart must not look like one that was under way when they were parted.
    let drawn = u64::from(u16::from_le_bytes([random[0], random[1]]));
    let notes = Notes::new(generation + LABELS_APART + drawn, changed, lineage, dirty);
    if legs.iter().any(|leg| leg.standing.get() == Standing::Missing) {
        // Before anybody sees what only the others may have; not at once, for perhaps nobody changes anything.
        notes.want_left();
    }
    Ok(Parts { geometry, map, uuid, legs, teller, notes, mutation: drill.mutation })
}

/// What a member is to begin with.
fn begin(member: &mut Member, is_here: bool, dirty: &Regions) {
    match (member.standing, is_here) {
        (Standing::Removed | Standing::Missing, _) | (Standing::Current, true) => {}
        // Whoever is not here now lacks what comes next; and what may differ at the moment is in doubt on it.
        (Standing::Current | Standing::Rebuilding, false) => leave_behind(member, dirty),
        (Standing::Rebuilding, true) => member.standing = Standing::Missing,
    }
    if member.standing == Standing::Missing {
        member.missed.add(dirty);
    }
}

/// A member that was not named.
fn nameless(place: usize) -> LegSource {
    LegSource { name: format!("leg {place}"), device: Err("it was not named".to_owned()), reopen: None }
}

/// Refuses a leg that cannot hold the mirror's blocks.
pub(crate) fn fits(source: &LegSource, block_size: BlockSize, capacity_blocks: u64) -> Result<(), MirrorError> {
    let Ok(device) = &source.device else { return Ok(()) };
    let geometry = device.geometry();
    if geometry.block_size != block_size {
        let (expected, actual) = (block_size, geometry.block_size);
        return Err(MirrorError::BlockSize { leg: source.name.clone(), expected, actual });
    }
    if geometry.capacity_blocks < capacity_blocks {
        let (expected, actual) = (capacity_blocks, geometry.capacity_blocks);
        return Err(MirrorError::Size { leg: source.name.clone(), expected, actual });
    }
    Ok(())
}

/// The protection information that all legs have alike. Tags that one of them cannot keep cannot be the mirror's.
fn common(devices: &[Stack]) -> Option<PiFormat> {
    let mut formats = devices.iter().map(|device| device.geometry().protection);
    let first = formats.next().flatten();
    first.filter(|first| formats.all(|format| format == Some(*first)))
}

/// What every leg takes.
fn limits(devices: &[Stack]) -> Limits {
    let all = devices.iter().map(|device| device.geometry().limits);
    all.reduce(|a, b| Limits {
        transfer: a.transfer.min(b.transfer),
        verify: a.verify.min(b.verify),
        zero: a.zero.min(b.zero),
    })
    .expect("a mirror is opened with a leg that is there")
}
