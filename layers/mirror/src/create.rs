//! Making a mirror on purpose, and what a device must be for that.

use futures_util::future::join_all;
use sealblock_block::{AnnexSlot, Answer, Clock, Device, Error, Operation, Stack, is_blank};
use sealblock_runtime_memory::Slice;

use crate::drill::{Drill, Mutation};
use crate::judge::Found;
use crate::label::{Label, LabelError, MOST_LEGS, Standing};
use crate::leg::{LegSource, has_annex};
use crate::lineage::Lineage;
use crate::members::MemberError;
use crate::open::{MirrorError, Opened, Trouble, are_alike, assemble_new, found_on, start};
use crate::regions::Regions;

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
    sources: Vec<LegSource>,
    clock: C,
    options: CreateOptions,
) -> Result<Opened<C>, MemberError> {
    create_drill(sources, clock, options, Drill::default()).await
}

/// Makes a mirror that is not as those that people use; see [`Drill`].
///
/// # Errors
/// As [`create`].
pub async fn create_drill<C: Clock>(
    sources: Vec<LegSource>,
    clock: C,
    options: CreateOptions,
    drill: Drill,
) -> Result<Opened<C>, MemberError> {
    if !(2..=MOST_LEGS).contains(&sources.len()) {
        return Err(MirrorError::Legs(sources.len()).into());
    }
    let candidates = join_all(sources.iter().map(look)).await.into_iter().collect::<Result<Vec<_>, _>>()?;
    are_alike(&sources)?;
    let from = choose(&sources, &candidates, &options)?;
    let teller = from.unwrap_or(0);
    if !candidates[teller].found.has_room() {
        return Err(MemberError::NoRoom(sources[teller].name.clone()));
    }
    for (at, candidate) in candidates.iter().enumerate().filter(|(at, _)| *at != teller) {
        candidate.forget(&sources[at]).await?;
    }
    let found: Vec<Found> = candidates.into_iter().map(|candidate| candidate.found).collect();
    let parts = assemble_new(sources, &found, from, &options.random, &drill)?;
    let opened = start(clock, parts, false);
    let mirror = &opened.mirror;
    // First that of the leg that has everything: the others' labels alone would make nothing.
    mirror.note().await.map_err(MemberError::Note)?;
    if from.is_some() {
        let legs = mirror.legs.borrow().clone();
        legs.iter().filter(|leg| leg.standing.get() == Standing::Missing).for_each(|leg| mirror.begin_rebuild(leg));
        mirror.note().await.map_err(MemberError::Note)?;
    }
    Ok(opened)
}

/// The leg whose content counts; none where all are blank.
fn choose(
    sources: &[LegSource],
    candidates: &[Candidate],
    options: &CreateOptions,
) -> Result<Option<usize>, MemberError> {
    let written: Vec<usize> = (0..candidates.len()).filter(|at| candidates[*at].is_written).collect();
    let names = |legs: &[usize]| legs.iter().map(|at| sources[*at].name.clone()).collect::<Vec<_>>();
    let from = match (options.from, &written[..]) {
        (Some(from), _) if from >= sources.len() => return Err(MemberError::Unknown(format!("number {from}"))),
        (_, []) => None,
        (Some(from), _) => Some(from),
        (None, [only]) => Some(*only),
        (None, several) => return Err(MemberError::Undecided { legs: names(several).join(", ") }),
    };
    for (at, candidate) in candidates.iter().enumerate() {
        candidate.refuse(&sources[at].name, options.force, from != Some(at))?;
    }
    Ok(from)
}

/// A device that is to become a leg, and what is on it.
pub(crate) struct Candidate {
    pub found: Found,
    /// What its label is, where that is no label of a mirror that can be used.
    other: Option<LabelError>,
    is_written: bool,
}

/// Looks at a device that is to become a leg.
///
/// # Errors
/// When it cannot be reached or written to.
pub(crate) async fn look(source: &LegSource) -> Result<Candidate, MemberError> {
    let absent = |why: String| MemberError::Absent { leg: source.name.clone(), why };
    let device = source.device.as_ref().map_err(|why| absent(why.clone()))?;
    if !device.abilities().writable {
        return Err(absent("it is read only".to_owned()));
    }
    let (found, other) = match found_on(device, Mutation::None).await {
        Ok(found) => (found, None),
        Err(Trouble::Label(why)) => (Found::Unlabelled { has_room: true }, Some(why)),
        Err(Trouble::Device(why)) => return Err(absent(why.to_string())),
    };
    let is_written = !is_blank(device).await.map_err(|why| absent(why.to_string()))?;
    Ok(Candidate { found, other, is_written })
}

impl Candidate {
    /// Refuses a device whose label, or whose data where they would be replaced, somebody may still want.
    pub fn refuse(&self, name: &str, force: bool, is_replaced: bool) -> Result<(), MemberError> {
        let leg = name.to_owned();
        let what = match (&self.found, self.other) {
            (Found::Labelled(label), _) => {
                let standing = label.members[label.own].standing.as_str();
                format!("of leg {} ({standing}) of mirror {}", label.own, words(&label.uuid))
            }
            (_, Some(why)) => format!("that is not one of a mirror that is known here: {why}"),
            (..) if self.is_written && is_replaced && !force => return Err(MemberError::Holds { leg }),
            _ => return Ok(()),
        };
        if force { Ok(()) } else { Err(MemberError::Labelled { leg, what }) }
    }

    /// Takes away the label that a device has, so that it is not what it was before it is what it is to be.
    ///
    /// # Errors
    /// When the device fails.
    pub async fn forget(&self, source: &LegSource) -> Result<(), MemberError> {
        let Ok(device) = &source.device else { return Ok(()) };
        if matches!(self.found, Found::Unlabelled { .. }) && self.other.is_none() {
            return Ok(());
        }
        put_label(device, &[]).await.map_err(MemberError::Note)
    }
}

/// An identity in hexadecimal digits.
fn words(uuid: &[u8; 16]) -> String {
    uuid.iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn put_label(device: &Stack, bytes: &[u8]) -> Result<(), Error> {
    device.execute(Operation::WriteAnnex { slot: AnnexSlot::Group, bytes: Slice::copy_from(bytes) }).await.map(drop)
}

/// Has a device's own label say, durably, that it was written by itself: for the others of its mirror it is out of sync in
/// everything from now on. For whoever is about to write to it without them. A device without the label of a mirror, or that
/// was taken out of it, stays as it is.
///
/// # Errors
/// When the device fails.
pub async fn mark_written_alone(device: &Stack) -> Result<(), Error> {
    mark_written_alone_drill(device, Drill::default()).await
}

/// The same for a mirror that is not as those that people use; see [`Drill`].
///
/// # Errors
/// As [`mark_written_alone`].
pub async fn mark_written_alone_drill(device: &Stack, drill: Drill) -> Result<(), Error> {
    if !has_annex(device) {
        return Ok(());
    }
    let Answer::Annex(bytes) = device.execute(Operation::ReadAnnex { slot: AnnexSlot::Group }).await? else {
        return Err(crate::leg::answered_wrongly());
    };
    let Ok(Some(mut label)) = Label::decode(&bytes) else { return Ok(()) };
    // Farther off than anything that the others can have sent it: they know neither this label nor the one before.
    let generation = label.generation + ALONE_APART;
    let own = label.own;
    let member = &mut label.members[own];
    if member.standing == Standing::Removed {
        return Ok(());
    }
    // One that was being brought up to date got each label after all that were in sync: none is excused for not knowing it.
    label.is_tentative &= member.standing != Standing::Rebuilding;
    member.standing = Standing::Missing;
    member.missed = Regions::all(member.missed.most());
    (member.seen, member.sent) = (generation, generation);
    // The sessions stay: what was changed in them may be here alone, and is not to be overwritten by others that lack it.
    if drill.mutation == Mutation::ForgetSessions {
        label.lineage = Lineage::default();
    }
    label.generation = generation;
    put_label(device, &label.encode_alone()).await
}
