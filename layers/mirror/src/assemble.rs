//! Which legs may be trusted with what, told from their labels alone.
//!
//! A leg is *current* when nobody who went on without it has noted so. Of legs that think of themselves as current the one
//! with the latest label tells about the others. Two that were each written without the other cannot both be right, and
//! nothing can tell which one is: a split brain, which is refused. What was written without what is told by the lineages of
//! their labels alone; generations tell which regions a leg lacks, and which of two images of a leg is the older one.

use crate::label::{Label, ReplicaRecord, ReplicaState};
use crate::regions::Regions;

/// What was found where a leg should be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReplicaProbe {
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

impl ReplicaProbe {
    /// Whether there is room for a label.
    pub fn has_room(&self) -> bool {
        matches!(self, ReplicaProbe::Labelled(_) | ReplicaProbe::Unlabelled { has_room: true })
    }
}

/// Why these legs do not make a mirror. Legs are numbered as they were given.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AssembleError {
    /// No leg is there.
    #[error("none of its legs can be reached")]
    NoReplica,
    /// A new mirror needs all of its legs.
    #[error("leg {leg} cannot be reached, and nothing tells yet that the legs belong together")]
    NewWithoutReplica {
        /// The leg that is not there.
        leg: usize,
    },
    /// Legs of two mirrors.
    #[error("leg {leg} belongs to another mirror")]
    OtherMirror {
        /// The leg that belongs elsewhere.
        leg: usize,
    },
    /// A device that never was a leg.
    #[error("leg {leg} never was a leg of this mirror")]
    NotAReplica {
        /// The device.
        leg: usize,
    },
    /// A device that was taken out.
    #[error("leg {leg} was taken out of this mirror")]
    TakenOut {
        /// The device.
        leg: usize,
    },
    /// Devices that nobody has made a mirror of.
    #[error("nothing says that these are legs of one mirror: no label is on them, and leg {leg} may hold data")]
    NotMade {
        /// The first that may hold data.
        leg: usize,
    },
    /// No device has room for a label.
    #[error("no leg has room for a label, so nothing could tell that they belong together")]
    NoRoom,
    /// One leg twice.
    #[error("legs {first} and {second} have the label of the same leg: one is a copy of the other's medium")]
    Duplicate {
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
    #[error("no in-sync replica is available")]
    NoneInSync,
}

/// What the legs make.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Assembly {
    /// A mirror that was never noted anywhere. If all legs are blank they are alike.
    New,
    /// A mirror with a past.
    Known(Box<ExistingMirror>),
}

/// A mirror with a past.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExistingMirror {
    /// The label that tells, with what other labels add: members' standings, missed and dirty regions as they count now,
    /// and the highest generation of all.
    pub label: Label,
    /// For each leg that was given, which member it is.
    pub places: Vec<usize>,
    /// Of those, the devices that are not used: without a label where one should be, or taken out by a removal that a crash
    /// cut short.
    pub unused: Vec<usize>,
    /// Not all labels are of the same writing: one was cut short, or a leg is an image from before the last one.
    pub labels_differ: bool,
}

/// Judges legs by what was found.
///
/// # Errors
/// When they do not make a mirror that can be trusted.
pub fn assemble(found: &[ReplicaProbe]) -> Result<Assembly, AssembleError> {
    let labels: Vec<(usize, &Label)> = found
        .iter()
        .enumerate()
        .filter_map(|(at, found)| if let ReplicaProbe::Labelled(label) = found { Some((at, &**label)) } else { None })
        .collect();
    let Some(&(_, any)) = labels.first() else { return judge_new(found) };
    if let Some((leg, _)) = labels.iter().find(|(_, label)| label.uuid != any.uuid) {
        return Err(AssembleError::OtherMirror { leg: *leg });
    }
    refuse_split(&labels)?;
    // A leg that does not think of itself as current was left behind knowingly. One that others know a later label of has
    // forgotten what came after, and one that others left behind cannot know, whether these have everything or not.
    let is_old = |label: &Label| labels.iter().any(|(_, other)| is_rolled_back(other, label));
    let is_left =
        |label: &Label| labels.iter().any(|(_, other)| marks_out_of_sync(other, label) || is_ahead(other, label));
    let is_current = |label: &Label| is_own_current(label) && !is_old(label) && !is_left(label);
    let current = labels.iter().filter(|(_, label)| is_current(label));
    let best = current.min_by_key(|(_, label)| std::cmp::Reverse(label.events));
    let Some(&(first, best)) = best else { return Err(AssembleError::NoneInSync) };
    // Also a leg that is not up to date: it may be all that is left of what was written on the other side.
    if let Some(&(second, _)) = labels.iter().find(|(_, label)| !has_all_of(best, label)) {
        return Err(AssembleError::SplitBrain { first, second });
    }
    let mut label = best.clone();
    for (_, other) in &labels {
        merge(&mut label, other, is_old(other) || needs_full_resync(best, other));
    }
    label.is_tentative = best.is_tentative && !all_know_last_change(&label, &labels);
    let (places, unused) = match_replicas(found, best, &label, &labels)?;
    let is_uneven = labels.iter().any(|(_, other)| other.events != label.events);
    // What comes next is later than anything there is.
    label.events = labels.iter().map(|(_, other)| other.events).max().unwrap_or(0);
    Ok(Assembly::Known(Box::new(ExistingMirror { label, places, unused, labels_differ: is_uneven })))
}

fn judge_new(found: &[ReplicaProbe]) -> Result<Assembly, AssembleError> {
    if found.iter().all(|found| *found == ReplicaProbe::Absent) {
        return Err(AssembleError::NoReplica);
    }
    match found.iter().position(|found| *found == ReplicaProbe::Absent) {
        Some(leg) => Err(AssembleError::NewWithoutReplica { leg }),
        None if !found.iter().any(ReplicaProbe::has_room) => Err(AssembleError::NoRoom),
        None => Ok(Assembly::New),
    }
}

fn refuse_split(labels: &[(usize, &Label)]) -> Result<(), AssembleError> {
    for (index, &(first, a)) in labels.iter().enumerate() {
        for &(second, b) in &labels[index + 1..] {
            let same = a.members[a.own_index].id == b.members[b.own_index].id;
            if same && a.own_index == b.own_index {
                return Err(AssembleError::Duplicate { first, second });
            }
            let both_current = is_own_current(a) && is_own_current(b);
            if both_current && !has_all_of(a, b) && !has_all_of(b, a) {
                return Err(AssembleError::SplitBrain { first, second });
            }
        }
    }
    Ok(())
}

fn is_own_current(label: &Label) -> bool {
    label.members[label.own_index].standing == ReplicaState::InSync
}

/// Whether those who wrote `a` had everything that was changed before `b` was written.
pub(crate) fn has_all_of(a: &Label, b: &Label) -> bool {
    let Some(newest) = b.lineage.newest() else { return true };
    let place = member_of(a, b).map(|at| &a.members[at]);
    if place.is_some_and(|leg| leg.acked_events == b.events) {
        // They have written this very label, or found it, and would not have gone on beside it had they lacked something.
        return true;
    }
    let Some(known) = a.lineage.find(newest.id) else {
        // Where older sessions may have been forgotten, only the very label that was last sent there is none of a fork.
        return a.lineage.is_full() && place.is_some_and(|leg| leg.sent_events == b.events);
    };
    // Had the last label before a change been all that came to this leg, the one that it calls current, too, lacks nothing.
    // One that was being brought up to date got it after all that were current. Only a leg that was written by itself calls
    // itself missing: its label goes on saying of the others what the one before said.
    let is_own = |standing| b.members[b.own_index].standing == standing;
    let is_with = (is_own(ReplicaState::InSync) || is_own(ReplicaState::OutOfSync))
        && member_of(b, a).is_some_and(|at| b.members[at].standing == ReplicaState::InSync);
    known.until >= if b.is_tentative && is_with { b.changed } else { newest.until }
}

/// Whether all legs that are in sync are there and know the last label before a change. Nobody needs to be excused any more
/// for not knowing it, and nobody who is brought up to date from now on may be.
fn all_know_last_change(label: &Label, labels: &[(usize, &Label)]) -> bool {
    let Some(newest) = label.lineage.newest() else { return true };
    let knows = |own: &Label| own.lineage.find(newest.id).is_some_and(|known| known.until >= newest.until);
    let mut current = label.members.iter().filter(|of| of.standing == ReplicaState::InSync && of.has_room);
    current.all(|of| labels.iter().any(|(_, own)| own.members[own.own_index].id == of.id && knows(own)))
}

/// Whether the leg of `a` is current and has more than that of `b`.
fn is_ahead(a: &Label, b: &Label) -> bool {
    is_own_current(a) && has_all_of(a, b) && !has_all_of(b, a)
}

/// Whether `a` notes that the leg of `b` was left behind, in a label that those who wrote `b` did not know of.
fn marks_out_of_sync(a: &Label, b: &Label) -> bool {
    // One that is being brought up to date lacks something, whether its own label says so yet or not.
    let is_noted = member_of(a, b).is_some_and(|at| a.members[at].standing != ReplicaState::InSync);
    // An older image that was opened alone says of the others what was so when it was taken: nothing of one that has all of
    // its changes, and later ones.
    is_noted && !has_acknowledged(b, a) && !is_mark_obsolete(a, b) && !is_ahead(b, a)
}

/// Whether those who wrote `b` saw a later label than those who wrote `a` on a leg that these had left behind as little as
/// their own. From there on they knew what the leg of `b` lacked.
fn is_mark_obsolete(a: &Label, b: &Label) -> bool {
    let others = a.members.iter().enumerate().filter(|(at, _)| *at != a.own_index).map(|(_, member)| member);
    let mut witnesses = others.filter(|member| member.standing == ReplicaState::InSync && member.has_room);
    witnesses.any(|witness| {
        b.members.iter().any(|member| member.id == witness.id && member.acked_events > witness.acked_events)
    })
}

/// Whether those who wrote `a` wrote `b`, too, or saw it. They may not have heard of the last label that they sent; one
/// between that and the last one they know of is somebody else's.
fn has_acknowledged(a: &Label, b: &Label) -> bool {
    member_of(a, b).is_some_and(|at| knows_of(&a.members[at], b.events))
}

fn knows_of(leg: &ReplicaRecord, generation: u64) -> bool {
    generation <= leg.acked_events || generation == leg.sent_events
}

/// Whether more than one label was written to the leg of `b` that those who wrote `a` do not know of, or one on an older image
/// of it. One alone can have been under way when all stopped, and nothing was answered for it then.
fn has_diverged(a: &Label, b: &Label) -> bool {
    let before = b.members[b.own_index].acked_events;
    let is_next = |leg: &ReplicaRecord| before >= leg.acked_events && knows_of(leg, before);
    member_of(a, b).is_some_and(|at| !knows_of(&a.members[at], b.events) && !is_next(&a.members[at]))
}

/// Whether what those who wrote `known` have noted of the leg of `own` does not hold for what is there: an old image, or
/// something that was written elsewhere.
pub(crate) fn needs_full_resync(known: &Label, own: &Label) -> bool {
    let is_called_current = member_of(known, own).is_some_and(|at| known.members[at].standing == ReplicaState::InSync);
    is_rolled_back(known, own)
        || has_diverged(known, own)
        || !has_all_of(known, own)
        || (is_called_current && (!has_all_of(own, known) || is_demoted(known, own)))
}

/// Whether the leg of `b` was taken for one that lacks something by others than those who wrote `a`. What it lacks they noted
/// for what they had.
fn is_demoted(a: &Label, b: &Label) -> bool {
    !is_own_current(b) && !has_acknowledged(a, b)
}

/// Whether `a` knows of a later label on the leg of `b`, which is an old image of itself then.
fn is_rolled_back(a: &Label, b: &Label) -> bool {
    member_of(a, b).is_some_and(|at| b.events < a.members[at].acked_events)
}

/// The place that `a` has for the leg of `b`.
fn member_of(a: &Label, b: &Label) -> Option<usize> {
    let id = b.members[b.own_index].id;
    a.members.iter().position(|member| member.id == id)
}

/// Adds what another label knows. What may differ there may differ.
fn merge(label: &mut Label, other: &Label, lacks_everything: bool) {
    if other.dirty.most() != label.dirty.most() {
        return;
    }
    let Some(at) = member_of(label, other) else { return };
    let ReplicaRecord { standing, is_new, out_of_sync: missed, acked_events: seen, sent_events: sent, .. } =
        &mut label.members[at];
    *sent = (*sent).max(other.events);
    *seen = (*seen).max(other.events);
    if other.members[other.own_index].standing == ReplicaState::Removed {
        // It was taken out, and the others were not told any more.
        *standing = ReplicaState::Removed;
    }
    if lacks_everything && *standing != ReplicaState::Removed {
        *standing = ReplicaState::OutOfSync;
    }
    *is_new = is_still_new(*is_new, other, lacks_everything) && *standing != ReplicaState::InSync;
    match standing {
        ReplicaState::InSync => label.dirty.add(&other.dirty),
        ReplicaState::OutOfSync | ReplicaState::Resyncing => add_lacking(missed, other, lacks_everything),
        ReplicaState::Removed => {}
    }
}

/// Whether what lies on a leg never was the mirror's. Its own label tells: an older image of one that is in sync since may be
/// from before it was, and one that others, older themselves, call new may have been in sync since.
pub(crate) fn is_still_new(is_called_new: bool, own: &Label, lacks_everything: bool) -> bool {
    own.members[own.own_index].is_new && (is_called_new || lacks_everything)
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
    missed.add(&own.members[own.own_index].out_of_sync);
}

/// Finds the member that each leg is: by its label, and those without one by what is left, in order. Also which devices are
/// not used.
fn match_replicas(
    found: &[ReplicaProbe],
    best: &Label,
    label: &Label,
    labels: &[(usize, &Label)],
) -> Result<(Vec<usize>, Vec<usize>), AssembleError> {
    let mut places: Vec<Option<usize>> = vec![None; found.len()];
    let mut unused = Vec::new();
    for &(leg, own) in labels {
        let at = member_of(label, own).ok_or(AssembleError::NotAReplica { leg })?;
        if best.members[at].standing == ReplicaState::Removed {
            return Err(AssembleError::TakenOut { leg });
        }
        places[leg] = Some(at);
        if label.members[at].standing == ReplicaState::Removed {
            unused.push(leg);
        }
    }
    let mut free: Vec<usize> = (0..label.members.len())
        .filter(|at| !places.contains(&Some(*at)) && label.members[*at].standing != ReplicaState::Removed)
        .collect();
    for (leg, found) in found.iter().enumerate().filter(|(_, found)| !matches!(found, ReplicaProbe::Labelled(_))) {
        // What has room and no label never was a leg, and what has none is none that had: another device in its place.
        let is_leg = |at: &usize| *found == ReplicaProbe::Absent || (!found.has_room() && !label.members[*at].has_room);
        let fit = free.iter().position(is_leg);
        if fit.is_none() {
            unused.push(leg);
        }
        let at = fit.or((!free.is_empty()).then_some(0)).ok_or(AssembleError::NotAReplica { leg })?;
        places[leg] = Some(free.remove(at));
    }
    let is_used = |leg: usize| found[leg] != ReplicaProbe::Absent && !unused.contains(&leg);
    let is_current = |(leg, at): (usize, &Option<usize>)| {
        is_used(leg) && at.is_some_and(|at| label.members[at].standing == ReplicaState::InSync)
    };
    if !places.iter().enumerate().any(is_current) {
        return Err(AssembleError::NoneInSync);
    }
    Ok((places.into_iter().flatten().collect(), unused))
}

/// The identity of a new leg: no other leg of the mirror ever has it.
pub fn leg_id(uuid: &[u8; 16], generation: u64, place: usize) -> [u8; 16] {
    let mut id = *uuid;
    let salt = (generation << 8 | place as u64).to_le_bytes();
    id[8..].iter_mut().zip(salt).for_each(|(byte, salt)| *byte ^= salt);
    id
}

/// Marks a member as left behind: it lacks whatever may differ now.
pub fn leave_behind(member: &mut ReplicaRecord, dirty: &Regions) {
    member.standing = ReplicaState::OutOfSync;
    member.out_of_sync.add(dirty);
}
