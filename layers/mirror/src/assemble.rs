//! Which replicas may be trusted with what, told from their labels alone.
//!
//! A replica is *current* when nobody who went on without it has noted so. Of replicas that think of themselves as current the one
//! with the latest label tells about the others. Two that were each written without the other cannot both be right, and
//! nothing can tell which one is: a split brain, which is refused. What was written without what is told by the lineages of
//! their labels alone; generations tell which regions a replica lacks, and which of two images of a replica is the older one.

use crate::label::{Label, ReplicaRecord, ReplicaState};
use crate::regions::Regions;

/// What was found where a replica should be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReplicaProbe {
    /// Nothing: the replica cannot be reached.
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

/// Why these replicas do not make a mirror. Replicas are numbered as they were given.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AssembleError {
    /// No replica is there.
    #[error("none of its replicas can be reached")]
    NoReplica,
    /// A new mirror needs all of its replicas.
    #[error("replica {replica} cannot be reached, and nothing tells yet that the replicas belong together")]
    NewWithoutReplica {
        /// The replica that is not there.
        replica: usize,
    },
    /// Replicas of two mirrors.
    #[error("replica {replica} belongs to another mirror")]
    OtherMirror {
        /// The replica that belongs elsewhere.
        replica: usize,
    },
    /// A device that never was a replica.
    #[error("replica {replica} never was a replica of this mirror")]
    NotAReplica {
        /// The device.
        replica: usize,
    },
    /// A device that was taken out.
    #[error("replica {replica} was taken out of this mirror")]
    Removed {
        /// The device.
        replica: usize,
    },
    /// Devices that nobody has made a mirror of.
    #[error(
        "nothing says that these are replicas of one mirror: no label is on them, and replica {replica} may hold data"
    )]
    NotCreated {
        /// The first that may hold data.
        replica: usize,
    },
    /// No device has room for a label.
    #[error("no replica has room for a label, so nothing could tell that they belong together")]
    NoRoom,
    /// One replica twice.
    #[error("replicas {first} and {second} have the label of the same replica: one is a copy of the other's medium")]
    Duplicate {
        /// One of them.
        first: usize,
        /// The other.
        second: usize,
    },
    /// Two replicas were each written without the other.
    #[error("split brain: replicas {first} and {second} were each written without the other")]
    SplitBrain {
        /// One of them.
        first: usize,
        /// The other.
        second: usize,
    },
    /// All replicas that are there were left behind.
    #[error("no in-sync replica is available")]
    NoneInSync,
}

/// What the replicas make.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Assembly {
    /// A mirror that was never noted anywhere. If all replicas are blank they are alike.
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
    /// For each replica that was given, which member it is.
    pub indices: Vec<usize>,
    /// Of those, the devices that are not used: without a label where one should be, or taken out by a removal that a crash
    /// cut short.
    pub unused: Vec<usize>,
    /// Not all labels are of the same writing: one was cut short, or a replica is an image from before the last one.
    pub labels_differ: bool,
}

/// Judges replicas by what was found.
///
/// # Errors
/// When they do not make a mirror that can be trusted.
pub fn assemble(found: &[ReplicaProbe]) -> Result<Assembly, AssembleError> {
    let labels: Vec<(usize, &Label)> = found
        .iter()
        .enumerate()
        .filter_map(|(at, found)| if let ReplicaProbe::Labelled(label) = found { Some((at, &**label)) } else { None })
        .collect();
    let Some(&(_, any)) = labels.first() else { return assemble_unlabelled(found) };
    if let Some((replica, _)) = labels.iter().find(|(_, label)| label.uuid != any.uuid) {
        return Err(AssembleError::OtherMirror { replica: *replica });
    }
    check_split_brain(&labels)?;
    // A replica that does not think of itself as current was left behind knowingly. One that others know a later label of has
    // forgotten what came after, and one that others left behind cannot know, whether these have everything or not.
    let is_old = |label: &Label| labels.iter().any(|(_, other)| is_rolled_back(other, label));
    let is_left =
        |label: &Label| labels.iter().any(|(_, other)| marks_out_of_sync(other, label) || is_ahead(other, label));
    let is_current = |label: &Label| is_own_in_sync(label) && !is_old(label) && !is_left(label);
    let current = labels.iter().filter(|(_, label)| is_current(label));
    let best = current.min_by_key(|(_, label)| std::cmp::Reverse(label.events));
    let Some(&(first, best)) = best else { return Err(AssembleError::NoneInSync) };
    // Also a replica that is not up to date: it may be all that is left of what was written on the other side.
    if let Some(&(second, _)) = labels.iter().find(|(_, label)| !includes_changes_of(best, label)) {
        return Err(AssembleError::SplitBrain { first, second });
    }
    let mut label = best.clone();
    for (_, other) in &labels {
        merge(&mut label, other, is_old(other) || needs_full_resync(best, other));
    }
    label.is_tentative = best.is_tentative && !is_last_change_everywhere(&label, &labels);
    let (places, unused) = match_replicas(found, best, &label, &labels)?;
    let labels_differ = labels.iter().any(|(_, other)| other.events != label.events);
    // What comes next is later than anything there is.
    label.events = labels.iter().map(|(_, other)| other.events).max().unwrap_or(0);
    Ok(Assembly::Known(Box::new(ExistingMirror { label, indices: places, unused, labels_differ })))
}

fn assemble_unlabelled(found: &[ReplicaProbe]) -> Result<Assembly, AssembleError> {
    if found.iter().all(|found| *found == ReplicaProbe::Absent) {
        return Err(AssembleError::NoReplica);
    }
    match found.iter().position(|found| *found == ReplicaProbe::Absent) {
        Some(replica) => Err(AssembleError::NewWithoutReplica { replica }),
        None if !found.iter().any(ReplicaProbe::has_room) => Err(AssembleError::NoRoom),
        None => Ok(Assembly::New),
    }
}

fn check_split_brain(labels: &[(usize, &Label)]) -> Result<(), AssembleError> {
    for (index, &(first, a)) in labels.iter().enumerate() {
        for &(second, b) in &labels[index + 1..] {
            let same = a.replicas[a.own_index].id == b.replicas[b.own_index].id;
            if same && a.own_index == b.own_index {
                return Err(AssembleError::Duplicate { first, second });
            }
            let both_current = is_own_in_sync(a) && is_own_in_sync(b);
            if both_current && !includes_changes_of(a, b) && !includes_changes_of(b, a) {
                return Err(AssembleError::SplitBrain { first, second });
            }
        }
    }
    Ok(())
}

fn is_own_in_sync(label: &Label) -> bool {
    label.replicas[label.own_index].state == ReplicaState::InSync
}

/// Whether those who wrote `a` had everything that was changed before `b` was written.
pub(crate) fn includes_changes_of(a: &Label, b: &Label) -> bool {
    let Some(newest) = b.lineage.newest() else { return true };
    let place = index_of(a, b).map(|at| &a.replicas[at]);
    if place.is_some_and(|replica| replica.acked_events == b.events) {
        // They have written this very label, or found it, and would not have gone on beside it had they lacked something.
        return true;
    }
    let Some(known) = a.lineage.find(newest.id) else {
        // Where older sessions may have been forgotten, only the very label that was last sent there is none of a fork.
        return a.lineage.is_full() && place.is_some_and(|replica| replica.sent_events == b.events);
    };
    // Had the last label before a change been all that came to this replica, the one that it calls current, too, lacks nothing.
    // One that was being brought up to date got it after all that were current. Only a replica that was written by itself calls
    // itself missing: its label goes on saying of the others what the one before said.
    let is_own = |state| b.replicas[b.own_index].state == state;
    let is_with = (is_own(ReplicaState::InSync) || is_own(ReplicaState::OutOfSync))
        && index_of(b, a).is_some_and(|at| b.replicas[at].state == ReplicaState::InSync);
    known.until >= if b.is_tentative && is_with { b.changed } else { newest.until }
}

/// Whether all replicas that are in sync are there and know the last label before a change. Nobody needs to be excused any more
/// for not knowing it, and nobody who is brought up to date from now on may be.
fn is_last_change_everywhere(label: &Label, labels: &[(usize, &Label)]) -> bool {
    let Some(newest) = label.lineage.newest() else { return true };
    let knows = |own: &Label| own.lineage.find(newest.id).is_some_and(|known| known.until >= newest.until);
    let mut current = label.replicas.iter().filter(|of| of.state == ReplicaState::InSync && of.has_room);
    current.all(|of| labels.iter().any(|(_, own)| own.replicas[own.own_index].id == of.id && knows(own)))
}

/// Whether the replica of `a` is current and has more than that of `b`.
fn is_ahead(a: &Label, b: &Label) -> bool {
    is_own_in_sync(a) && includes_changes_of(a, b) && !includes_changes_of(b, a)
}

/// Whether `a` notes that the replica of `b` was left behind, in a label that those who wrote `b` did not know of.
fn marks_out_of_sync(a: &Label, b: &Label) -> bool {
    // One that is being brought up to date lacks something, whether its own label says so yet or not.
    let is_noted = index_of(a, b).is_some_and(|at| a.replicas[at].state != ReplicaState::InSync);
    // An older image that was opened alone says of the others what was so when it was taken: nothing of one that has all of
    // its changes, and later ones.
    is_noted && !has_acknowledged(b, a) && !is_mark_obsolete(a, b) && !is_ahead(b, a)
}

/// Whether those who wrote `b` saw a later label than those who wrote `a` on a replica that these had left behind as little as
/// their own. From there on they knew what the replica of `b` lacked.
fn is_mark_obsolete(a: &Label, b: &Label) -> bool {
    let others = a.replicas.iter().enumerate().filter(|(at, _)| *at != a.own_index).map(|(_, record)| record);
    let mut witnesses = others.filter(|record| record.state == ReplicaState::InSync && record.has_room);
    witnesses.any(|witness| {
        b.replicas.iter().any(|record| record.id == witness.id && record.acked_events > witness.acked_events)
    })
}

/// Whether those who wrote `a` wrote `b`, too, or saw it. They may not have heard of the last label that they sent; one
/// between that and the last one they know of is somebody else's.
fn has_acknowledged(a: &Label, b: &Label) -> bool {
    index_of(a, b).is_some_and(|at| knows_of(&a.replicas[at], b.events))
}

fn knows_of(replica: &ReplicaRecord, events: u64) -> bool {
    events <= replica.acked_events || events == replica.sent_events
}

/// Whether more than one label was written to the replica of `b` that those who wrote `a` do not know of, or one on an older image
/// of it. One alone can have been under way when all stopped, and nothing was answered for it then.
fn has_diverged(a: &Label, b: &Label) -> bool {
    let before = b.replicas[b.own_index].acked_events;
    let is_next = |replica: &ReplicaRecord| before >= replica.acked_events && knows_of(replica, before);
    index_of(a, b).is_some_and(|at| !knows_of(&a.replicas[at], b.events) && !is_next(&a.replicas[at]))
}

/// Whether what those who wrote `known` have noted of the replica of `own` does not hold for what is there: an old image, or
/// something that was written elsewhere.
pub(crate) fn needs_full_resync(known: &Label, own: &Label) -> bool {
    let is_called_current = index_of(known, own).is_some_and(|at| known.replicas[at].state == ReplicaState::InSync);
    is_rolled_back(known, own)
        || has_diverged(known, own)
        || !includes_changes_of(known, own)
        || (is_called_current && (!includes_changes_of(own, known) || is_demoted(known, own)))
}

/// Whether the replica of `b` was taken for one that lacks something by others than those who wrote `a`. What it lacks they noted
/// for what they had.
fn is_demoted(a: &Label, b: &Label) -> bool {
    !is_own_in_sync(b) && !has_acknowledged(a, b)
}

/// Whether `a` knows of a later label on the replica of `b`, which is an old image of itself then.
fn is_rolled_back(a: &Label, b: &Label) -> bool {
    index_of(a, b).is_some_and(|at| b.events < a.replicas[at].acked_events)
}

/// The place that `a` has for the replica of `b`.
fn index_of(a: &Label, b: &Label) -> Option<usize> {
    let id = b.replicas[b.own_index].id;
    a.replicas.iter().position(|record| record.id == id)
}

/// Adds what another label knows. What may differ there may differ.
fn merge(label: &mut Label, other: &Label, lacks_everything: bool) {
    if other.dirty.capacity() != label.dirty.capacity() {
        return;
    }
    let Some(at) = index_of(label, other) else { return };
    let ReplicaRecord { state, is_new, out_of_sync, acked_events, sent_events: sent, .. } = &mut label.replicas[at];
    *sent = (*sent).max(other.events);
    *acked_events = (*acked_events).max(other.events);
    if other.replicas[other.own_index].state == ReplicaState::Removed {
        // It was taken out, and the others were not told any more.
        *state = ReplicaState::Removed;
    }
    if lacks_everything && *state != ReplicaState::Removed {
        *state = ReplicaState::OutOfSync;
    }
    *is_new = is_still_new(*is_new, other, lacks_everything) && *state != ReplicaState::InSync;
    match state {
        ReplicaState::InSync => label.dirty.add(&other.dirty),
        ReplicaState::OutOfSync | ReplicaState::Resyncing => add_missed(out_of_sync, other, lacks_everything),
        ReplicaState::Removed => {}
    }
}

/// Whether what lies on a replica never was the mirror's. Its own label tells: an older image of one that is in sync since may be
/// from before it was, and one that others, older themselves, call new may have been in sync since.
pub(crate) fn is_still_new(is_called_new: bool, own: &Label, lacks_everything: bool) -> bool {
    own.replicas[own.own_index].is_new && (is_called_new || lacks_everything)
}

/// Adds what a replica that was left behind lacks by its own label.
pub(crate) fn add_missed(out_of_sync: &mut Regions, own: &Label, lacks_everything: bool) {
    if lacks_everything {
        // What it has missed since was noted for what it was then.
        *out_of_sync = Regions::all(out_of_sync.capacity());
    }
    // What was under way to it when it was left behind may be there or not.
    out_of_sync.add(&own.dirty);
    // The others may not have heard of all that it lacks: it can have been taken back as an old image while they were out
    // of reach.
    out_of_sync.add(&own.replicas[own.own_index].out_of_sync);
}

/// Finds the member that each replica is: by its label, and those without one by what is left, in order. Also which devices are
/// not used.
fn match_replicas(
    found: &[ReplicaProbe],
    best: &Label,
    label: &Label,
    labels: &[(usize, &Label)],
) -> Result<(Vec<usize>, Vec<usize>), AssembleError> {
    let mut places: Vec<Option<usize>> = vec![None; found.len()];
    let mut unused = Vec::new();
    for &(replica, own) in labels {
        let at = index_of(label, own).ok_or(AssembleError::NotAReplica { replica })?;
        if best.replicas[at].state == ReplicaState::Removed {
            return Err(AssembleError::Removed { replica });
        }
        places[replica] = Some(at);
        if label.replicas[at].state == ReplicaState::Removed {
            unused.push(replica);
        }
    }
    let mut free: Vec<usize> = (0..label.replicas.len())
        .filter(|at| !places.contains(&Some(*at)) && label.replicas[*at].state != ReplicaState::Removed)
        .collect();
    for (replica, found) in found.iter().enumerate().filter(|(_, found)| !matches!(found, ReplicaProbe::Labelled(_))) {
        // What has room and no label never was a replica, and what has none is none that had: another device in its place.
        let is_replica =
            |at: &usize| *found == ReplicaProbe::Absent || (!found.has_room() && !label.replicas[*at].has_room);
        let fit = free.iter().position(is_replica);
        if fit.is_none() {
            unused.push(replica);
        }
        let at = fit.or((!free.is_empty()).then_some(0)).ok_or(AssembleError::NotAReplica { replica })?;
        places[replica] = Some(free.remove(at));
    }
    let is_used = |replica: usize| found[replica] != ReplicaProbe::Absent && !unused.contains(&replica);
    let is_current = |(replica, at): (usize, &Option<usize>)| {
        is_used(replica) && at.is_some_and(|at| label.replicas[at].state == ReplicaState::InSync)
    };
    if !places.iter().enumerate().any(is_current) {
        return Err(AssembleError::NoneInSync);
    }
    Ok((places.into_iter().flatten().collect(), unused))
}

/// The identity of a new replica: no other replica of the mirror ever has it.
pub fn replica_id(uuid: &[u8; 16], events: u64, place: usize) -> [u8; 16] {
    let mut id = *uuid;
    let salt = (events << 8 | place as u64).to_le_bytes();
    id[8..].iter_mut().zip(salt).for_each(|(byte, salt)| *byte ^= salt);
    id
}

/// Marks a member as left behind: it lacks whatever may differ now.
pub fn mark_out_of_sync(record: &mut ReplicaRecord, dirty: &Regions) {
    record.state = ReplicaState::OutOfSync;
    record.out_of_sync.add(dirty);
}
