//! Making a mirror on purpose, and what a device must be for that.

use futures_util::future::join_all;
use sealblock_block::{Clock, Device, DynDevice, Error, Request, ReservedArea, Response, is_blank};
use sealblock_runtime_memory::Slice;

use crate::assemble::ReplicaProbe;
use crate::label::{Label, LabelError, MOST_LEGS, ReplicaState};
use crate::lineage::Lineage;
use crate::members::ReplicaError;
use crate::open::{MirrorError, Opened, Trouble, are_identical, assemble_new, found_on, start};
use crate::regions::Regions;
use crate::replica::{ReplicaSource, has_annex};
use crate::test_hooks::{Mutation, TestHooks};

/// How far the generation of a label that gives a leg up is from the one before.
const ALONE_APART: u64 = 1 << 33;

/// How a mirror is made.
#[derive(Clone, Copy, Debug)]
pub struct CreateOptions {
    /// Drawn at random by the caller: the identity of the mirror, and what tells its first session from others.
    pub random: [u8; 16],
    /// The device whose content counts, by its place among those given; needed where several hold data.
    pub from: Option<usize>,
    /// Devices that hold data or a label are taken, too: what is on them is replaced.
    pub force: bool,
}

/// Makes a mirror of devices of one shape: labels the one whose content counts, then the others, which get everything from
/// it while the worker runs and are not read before. Blank devices are alike from the start.
///
/// # Errors
/// When the devices cannot be legs of one mirror, hold what nobody has allowed to be replaced, or could not be labelled.
/// Nothing but labels is changed then; where only some could be written, the mirror opens without the others.
pub async fn create<C: Clock>(
    sources: Vec<ReplicaSource>,
    clock: C,
    options: CreateOptions,
) -> Result<Opened<C>, ReplicaError> {
    create_drill(sources, clock, options, TestHooks::default()).await
}

/// Makes a mirror that is not as those that people use; see [`TestHooks`].
///
/// # Errors
/// As [`create`].
pub async fn create_drill<C: Clock>(
    sources: Vec<ReplicaSource>,
    clock: C,
    options: CreateOptions,
    drill: TestHooks,
) -> Result<Opened<C>, ReplicaError> {
    if !(2..=MOST_LEGS).contains(&sources.len()) {
        return Err(MirrorError::Legs(sources.len()).into());
    }
    let candidates = join_all(sources.iter().map(look)).await.into_iter().collect::<Result<Vec<_>, _>>()?;
    are_identical(&sources)?;
    let from = choose(&sources, &candidates, &options)?;
    let teller = from.unwrap_or(0);
    if !candidates[teller].found.has_room() {
        return Err(ReplicaError::NoRoom(sources[teller].name.clone()));
    }
    for (at, candidate) in candidates.iter().enumerate().filter(|(at, _)| *at != teller) {
        candidate.forget(&sources[at]).await?;
    }
    let found: Vec<ReplicaProbe> = candidates.into_iter().map(|candidate| candidate.found).collect();
    let parts = assemble_new(sources, &found, from, &options.random, &drill)?;
    let opened = start(clock, parts, false);
    let mirror = &opened.mirror;
    // First that of the leg that has everything: the others' labels alone would make nothing.
    mirror.write_labels().await.map_err(ReplicaError::Note)?;
    if from.is_some() {
        let legs = mirror.legs.borrow().clone();
        legs.iter()
            .filter(|leg| leg.standing.get() == ReplicaState::OutOfSync)
            .for_each(|leg| mirror.start_resync(leg));
        mirror.write_labels().await.map_err(ReplicaError::Note)?;
    }
    Ok(opened)
}

/// The leg whose content counts; none where all are blank.
fn choose(
    sources: &[ReplicaSource],
    candidates: &[Candidate],
    options: &CreateOptions,
) -> Result<Option<usize>, ReplicaError> {
    let written: Vec<usize> = (0..candidates.len()).filter(|at| candidates[*at].is_written).collect();
    let names = |legs: &[usize]| legs.iter().map(|at| sources[*at].name.clone()).collect::<Vec<_>>();
    let from = match (options.from, &written[..]) {
        (Some(from), _) if from >= sources.len() => return Err(ReplicaError::Unknown(format!("number {from}"))),
        (_, []) => None,
        (Some(from), _) => Some(from),
        (None, [only]) => Some(*only),
        (None, several) => return Err(ReplicaError::Undecided { legs: names(several).join(", ") }),
    };
    for (at, candidate) in candidates.iter().enumerate() {
        candidate.refuse(&sources[at].name, options.force, from != Some(at))?;
    }
    Ok(from)
}

/// A device that is to become a leg, and what is on it.
pub(crate) struct Candidate {
    pub found: ReplicaProbe,
    /// What its label is, where that is no label of a mirror that can be used.
    other: Option<LabelError>,
    is_written: bool,
}

/// Looks at a device that is to become a leg.
///
/// # Errors
/// When it cannot be reached or written to.
pub(crate) async fn look(source: &ReplicaSource) -> Result<Candidate, ReplicaError> {
    let absent = |why: String| ReplicaError::Absent { leg: source.name.clone(), why };
    let device = source.device.as_ref().map_err(|why| absent(why.clone()))?;
    if !device.abilities().writable {
        return Err(absent("it is read only".to_owned()));
    }
    let (found, other) = match found_on(device, Mutation::None).await {
        Ok(found) => (found, None),
        Err(Trouble::Label(why)) => (ReplicaProbe::Unlabelled { has_room: true }, Some(why)),
        Err(Trouble::Device(why)) => return Err(absent(why.to_string())),
    };
    let is_written = !is_blank(device).await.map_err(|why| absent(why.to_string()))?;
    Ok(Candidate { found, other, is_written })
}

impl Candidate {
    /// Refuses a device whose label, or whose data where they would be replaced, somebody may still want.
    pub fn refuse(&self, name: &str, force: bool, is_replaced: bool) -> Result<(), ReplicaError> {
        let leg = name.to_owned();
        let what = match (&self.found, self.other) {
            (ReplicaProbe::Labelled(label), _) => {
                let standing = label.members[label.own_index].standing.as_str();
                format!("of leg {} ({standing}) of mirror {}", label.own_index, words(&label.uuid))
            }
            (_, Some(why)) => format!("that is not one of a mirror that is known here: {why}"),
            (..) if self.is_written && is_replaced && !force => return Err(ReplicaError::Holds { leg }),
            _ => return Ok(()),
        };
        if force { Ok(()) } else { Err(ReplicaError::Labelled { leg, what }) }
    }

    /// Takes away the label that a device has, so that it is not what it was before it is what it is to be.
    ///
    /// # Errors
    /// When the device fails.
    pub async fn forget(&self, source: &ReplicaSource) -> Result<(), ReplicaError> {
        let Ok(device) = &source.device else { return Ok(()) };
        if matches!(self.found, ReplicaProbe::Unlabelled { .. }) && self.other.is_none() {
            return Ok(());
        }
        put_label(device, &[]).await.map_err(ReplicaError::Note)
    }
}

/// An identity in hexadecimal digits.
fn words(uuid: &[u8; 16]) -> String {
    uuid.iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn put_label(device: &DynDevice, bytes: &[u8]) -> Result<(), Error> {
    device
        .execute(Request::WriteReserved { slot: ReservedArea::GroupLabel, bytes: Slice::copy_from(bytes) })
        .await
        .map(drop)
}

/// Has a device's own label say, durably, that it was written by itself: for the others of its mirror it is out of sync in
/// everything from now on. For whoever is about to write to it without them. A device without the label of a mirror, or that
/// was taken out of it, stays as it is.
///
/// # Errors
/// When the device fails.
pub async fn mark_written_alone(device: &DynDevice) -> Result<(), Error> {
    mark_written_alone_drill(device, TestHooks::default()).await
}

/// The same for a mirror that is not as those that people use; see [`TestHooks`].
///
/// # Errors
/// As [`mark_written_alone`].
pub async fn mark_written_alone_drill(device: &DynDevice, drill: TestHooks) -> Result<(), Error> {
    if !has_annex(device) {
        return Ok(());
    }
    let Response::Reserved(bytes) = device.execute(Request::ReadReserved { slot: ReservedArea::GroupLabel }).await?
    else {
        return Err(crate::replica::answered_wrongly());
    };
    let Ok(Some(mut label)) = Label::decode(&bytes) else { return Ok(()) };
    // Farther off than anything that the others can have sent it: they know neither this label nor the one before.
    let generation = label.events + ALONE_APART;
    let own = label.own_index;
    let member = &mut label.members[own];
    if member.standing == ReplicaState::Removed {
        return Ok(());
    }
    // One that was being brought up to date got each label after all that were in sync: none is excused for not knowing it.
    label.is_tentative &= member.standing != ReplicaState::Resyncing;
    member.standing = ReplicaState::OutOfSync;
    member.out_of_sync = Regions::all(member.out_of_sync.most());
    (member.acked_events, member.sent_events) = (generation, generation);
    // The sessions stay: what was changed in them may be here alone, and is not to be overwritten by others that lack it.
    if drill.mutation == Mutation::ForgetSessions {
        label.lineage = Lineage::default();
    }
    label.events = generation;
    put_label(device, &label.encode_alone()).await
}
