//! Which legs may be trusted with what, told from their labels alone.
//!
//! A leg is *current* when nobody who went on without it has noted so. Of legs that think of themselves as current the one
//! with the latest label tells about the others. Two that were each written without the other cannot both be right, and
//! nothing can tell which one is: a split brain, which is refused.

use crate::label::{Label, Member, Standing};
use crate::regions::Regions;

/// What was found where a leg should be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Found {
    /// Nothing: the leg cannot be reached.
    Absent,
    /// A device without a label. Whether it could have one.
    Unlabelled {
        /// It has room for a label.
        has_room: bool,
    },
    /// A device with a label.
    Labelled(Box<Label>),
}

impl Found {
    /// Whether there is room for a label.
    pub fn has_room(&self) -> bool {
        matches!(self, Found::Labelled(_) | Found::Unlabelled { has_room: true })
    }
}

/// Why these legs do not make a mirror. Legs are numbered as they were given.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// No leg is there.
    #[error("none of its legs can be reached")]
    NoLeg,
    /// A new mirror needs all of its legs.
    #[error("leg {leg} cannot be reached, and nothing tells yet that the legs belong together")]
    NewWithoutLeg {
        /// The leg that is not there.
        leg: usize,
    },
    /// Legs of two mirrors.
    #[error("leg {leg} belongs to another mirror")]
    Foreign {
        /// The leg that belongs elsewhere.
        leg: usize,
    },
    /// A device that never was a leg.
    #[error("leg {leg} never was a leg of this mirror")]
    Stranger {
        /// The device.
        leg: usize,
    },
    /// One leg twice.
    #[error("legs {first} and {second} have the label of the same leg: one is a copy of the other's medium")]
    Twice {
        /// One of them.
        first: usize,
        /// The other.
        second: usize,
    },
    /// Two legs were each written without the other.
    #[error("split brain: legs {first} and {second} were each written without the other")]
    SplitBrain {
        /// One of them.
        first: usize,
        /// The other.
        second: usize,
    },
    /// All legs that are there were left behind.
    #[error("the legs that are there were left behind; the leg that has everything is not among them")]
    OnlyStale,
}

/// What the legs make.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// A mirror that was never noted anywhere. All legs are taken as alike.
    New,
    /// A mirror with a past.
    Known(Known),
}

/// A mirror with a past.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Known {
    /// The label that tells, with what other labels add: members' standings, missed and dirty regions as they count now,
    /// and the highest generation of all.
    pub label: Label,
    /// For each leg that was given, which member it is.
    pub places: Vec<usize>,
    /// Not all labels are of the same writing: one was cut short, or a leg is an image from before the last one.
    pub is_uneven: bool,
}

/// Judges legs by what was found.
///
/// # Errors
/// When they do not make a mirror that can be trusted.
pub fn judge(found: &[Found]) -> Result<Verdict, Refusal> {
    let labels: Vec<(usize, &Label)> = found
        .iter()
        .enumerate()
        .filter_map(|(at, found)| if let Found::Labelled(label) = found { Some((at, &**label)) } else { None })
        .collect();
    let Some(&(_, any)) = labels.first() else { return judge_new(found) };
    if let Some((leg, _)) = labels.iter().find(|(_, label)| label.uuid != any.uuid) {
        return Err(Refusal::Foreign { leg: *leg });
    }
    refuse_split(&labels)?;
    // A leg that does not think of itself as current was left behind knowingly. One that others know a later label of has
    // forgotten what came after, and one that others left behind cannot know, whether these have everything or not.
    let is_old = |label: &Label| labels.iter().any(|(_, other)| knows_later(other, label));
    let is_left = |label: &Label| labels.iter().any(|(_, other)| left_behind(other, label));
    let is_current =
        |label: &Label| label.members[label.own].standing == Standing::Current && !is_old(label) && !is_left(label);
    let current = labels.iter().filter(|(_, label)| is_current(label));
    let best = current.min_by_key(|(_, label)| std::cmp::Reverse(label.generation));
    let Some((_, best)) = best else { return Err(Refusal::OnlyStale) };
    refuse_apart(best, &labels)?;
    let mut label = (*best).clone();
    for (_, other) in &labels {
        merge(&mut label, other, is_old(other) || lacks_everything(best, other));
    }
    let places = place(found, &label, &labels)?;
    let is_uneven = labels.iter().any(|(_, other)| other.generation != label.generation);
    // What comes next is later than anything there is.
    label.generation = labels.iter().map(|(_, other)| other.generation).max().unwrap_or(0);
    Ok(Verdict::Known(Known { label, places, is_uneven }))
}

fn judge_new(found: &[Found]) -> Result<Verdict, Refusal> {
    if found.iter().all(|found| *found == Found::Absent) {
        return Err(Refusal::NoLeg);
    }
    match found.iter().position(|found| *found == Found::Absent) {
        Some(leg) => Err(Refusal::NewWithoutLeg { leg }),
        None => Ok(Verdict::New),
    }
}

fn refuse_split(labels: &[(usize, &Label)]) -> Result<(), Refusal> {
    for (index, &(first, a)) in labels.iter().enumerate() {
        for &(second, b) in &labels[index + 1..] {
            let same = a.members[a.own].id == b.members[b.own].id;
            if same && a.own == b.own {
                return Err(Refusal::Twice { first, second });
            }
            if went_on_without(a, b) && went_on_without(b, a) {
                return Err(Refusal::SplitBrain { first, second });
            }
        }
    }
    Ok(())
}

/// Refuses legs that think of themselves as current and were written by others than those who wrote `best`, whether they have
/// noted anything of its leg or not: that may be an old image, gone on alone.
fn refuse_apart(best: &Label, labels: &[(usize, &Label)]) -> Result<(), Refusal> {
    let own_leg = |label: &Label| label.members[label.own].id;
    let Some(&(first, _)) = labels.iter().find(|(_, label)| own_leg(label) == own_leg(best)) else { return Ok(()) };
    let is_other =
        |label: &Label| label.members[label.own].standing == Standing::Current && was_written_apart(best, label);
    match labels.iter().find(|(_, label)| is_other(label)) {
        Some(&(second, _)) => Err(Refusal::SplitBrain { first, second }),
        None => Ok(()),
    }
}

/// Whether `a` notes that the leg of `b` was left behind, in a label that those who wrote `b` did not know of.
fn left_behind(a: &Label, b: &Label) -> bool {
    // One that is being brought up to date lacks something, whether its own label says so yet or not.
    member_of(a, b).is_some_and(|at| a.members[at].standing != Standing::Current) && !knows(b, a) && !is_absolved(a, b)
}

/// The same, where the leg of `a` has what was changed since.
fn went_on_without(a: &Label, b: &Label) -> bool {
    a.members[a.own].standing == Standing::Current && left_behind(a, b)
}

/// Whether those who wrote `b` saw a later label than those who wrote `a` on a leg that these had left behind as little as
/// their own. From there on they knew what the leg of `b` lacked.
fn is_absolved(a: &Label, b: &Label) -> bool {
    let others = a.members.iter().enumerate().filter(|(at, _)| *at != a.own).map(|(_, member)| member);
    let mut witnesses = others.filter(|member| member.standing == Standing::Current && member.has_room);
    witnesses.any(|witness| b.members.iter().any(|member| member.id == witness.id && member.seen > witness.seen))
}

/// Whether those who wrote `a` wrote `b`, too, or saw it. They may not have heard of the last label that they sent; one
/// between that and the last one they know of is somebody else's.
fn knows(a: &Label, b: &Label) -> bool {
    member_of(a, b).is_some_and(|at| knows_of(&a.members[at], b.generation))
}

fn knows_of(leg: &Member, generation: u64) -> bool {
    generation <= leg.seen || generation == leg.sent
}

/// Whether more than one label was written to the leg of `b` that those who wrote `a` do not know of. One alone can have been
/// under way when all stopped, and nothing was answered for it then.
fn was_written_apart(a: &Label, b: &Label) -> bool {
    let before = b.members[b.own].seen;
    member_of(a, b).is_some_and(|at| !knows_of(&a.members[at], b.generation) && !knows_of(&a.members[at], before))
}

/// Whether what those who wrote `known` have noted of the leg of `own` does not hold for what is there: an old image, or
/// something that was written elsewhere.
pub(crate) fn lacks_everything(known: &Label, own: &Label) -> bool {
    knows_later(known, own) || was_written_apart(known, own)
}

/// Whether `a` knows of a later label on the leg of `b`, which is an old image of itself then.
fn knows_later(a: &Label, b: &Label) -> bool {
    member_of(a, b).is_some_and(|at| b.generation < a.members[at].seen)
}

/// The place that `a` has for the leg of `b`.
fn member_of(a: &Label, b: &Label) -> Option<usize> {
    let id = b.members[b.own].id;
    a.members.iter().position(|member| member.id == id)
}

/// Adds what another label knows. What may differ there may differ.
fn merge(label: &mut Label, other: &Label, lacks_everything: bool) {
    if other.dirty.most() != label.dirty.most() {
        return;
    }
    let Some(at) = member_of(label, other) else { return };
    let Member { standing, missed, seen, .. } = &mut label.members[at];
    *seen = (*seen).max(other.generation);
    if lacks_everything && *standing != Standing::Removed {
        *standing = Standing::Missing;
    }
    match standing {
        Standing::Current => label.dirty.add(&other.dirty),
        Standing::Missing | Standing::Rebuilding => add_lacking(missed, other, lacks_everything),
        Standing::Removed => {}
    }
}

/// Adds what a leg that was left behind lacks by its own label.
pub(crate) fn add_lacking(missed: &mut Regions, own: &Label, lacks_everything: bool) {
    if lacks_everything {
        // What it has missed since was noted for what it was then.
        *missed = Regions::all(missed.most());
    }
    // What was under way to it when it was left behind may be there or not.
    missed.add(&own.dirty);
    // The others may not have heard of all that it lacks: it can have been taken back as an old image while they were out
    // of reach.
    missed.add(&own.members[own.own].missed);
}

/// Finds the member that each leg is: by its label, and those without room for one by what is left, in order.
fn place(found: &[Found], label: &Label, labels: &[(usize, &Label)]) -> Result<Vec<usize>, Refusal> {
    let mut places: Vec<Option<usize>> = vec![None; found.len()];
    for &(leg, own) in labels {
        let at = member_of(label, own).filter(|at| label.members[*at].standing != Standing::Removed);
        places[leg] = Some(at.ok_or(Refusal::Stranger { leg })?);
    }
    let mut free: Vec<usize> = (0..label.members.len())
        .filter(|at| !places.contains(&Some(*at)) && label.members[*at].standing != Standing::Removed)
        .collect();
    for (leg, found) in found.iter().enumerate() {
        match found {
            Found::Labelled(_) => {}
            // Something without a label where one would fit was never written as a leg.
            Found::Unlabelled { has_room: true } => return Err(Refusal::Stranger { leg }),
            Found::Unlabelled { has_room: false } | Found::Absent => {
                // What has no room cannot be a leg that had, such as what is left of a volume without its superblocks.
                let fits = |at: &usize| *found == Found::Absent || !label.members[*at].has_room;
                let at = free.iter().position(fits).ok_or(Refusal::Stranger { leg })?;
                places[leg] = Some(free.remove(at));
            }
        }
    }
    let is_current = |(found, at): (&Found, &Option<usize>)| {
        *found != Found::Absent && at.is_some_and(|at| label.members[at].standing == Standing::Current)
    };
    if !found.iter().zip(&places).any(is_current) {
        return Err(Refusal::OnlyStale);
    }
    Ok(places.into_iter().flatten().collect())
}

/// The identity of a new leg: no other leg of the mirror ever has it.
pub fn leg_id(uuid: &[u8; 16], generation: u64, place: usize) -> [u8; 16] {
    let mut id = *uuid;
    let salt = (generation << 8 | place as u64).to_le_bytes();
    id[8..].iter_mut().zip(salt).for_each(|(byte, salt)| *byte ^= salt);
    id
}

/// Marks a member as left behind: it lacks whatever may differ now.
pub fn leave_behind(member: &mut Member, dirty: &Regions) {
    member.standing = Standing::Missing;
    member.missed.add(dirty);
}
