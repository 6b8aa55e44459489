//! Assembly of a mirror from the labels of its replicas alone: which replicas count, and what each lacks.
//!
//! A replica is in sync unless a writer that continued without it marked it out of sync. Of the replicas whose own
//! labels call them in sync, the one with the newest label is the authority on the others. Two replicas that were
//! each written without the other cannot both be right, and nothing tells which one is: a split brain, which is
//! refused. The lineages of the labels alone tell which replica was written without which; event counts tell which
//! regions a replica lacks, and which of two images of a replica is older.

use crate::label::regions::Regions;
use crate::label::{Label, ReplicaRecord, ReplicaState};

/// The device under the name of a replica.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReplicaProbe {
    /// The device cannot be opened.
    Absent,
    /// A device without a label.
    Unlabelled {
        /// It has room for a label.
        has_room: bool,
    },
    /// A device with a label.
    Labelled(Box<Label>),
    /// A device that is smaller than its label says. The label counts as evidence of what the replicas have; nothing of the device is
    /// used.
    Unfit(Box<Label>),
}

impl ReplicaProbe {
    /// True if the device has room for a label.
    pub fn has_room(&self) -> bool {
        matches!(self, ReplicaProbe::Unlabelled { has_room: true }) || self.label().is_some()
    }

    /// Its label.
    pub fn label(&self) -> Option<&Label> {
        match self {
            ReplicaProbe::Labelled(label) | ReplicaProbe::Unfit(label) => Some(label),
            ReplicaProbe::Absent | ReplicaProbe::Unlabelled { .. } => None,
        }
    }
}

/// Why these replicas do not make a mirror. Numbers count the names on the command line from 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AssembleError {
    /// No replica is online.
    #[error("no replica of the mirror is online")]
    NoReplica,
    /// A new mirror needs all of its replicas online.
    #[error("replica {replica} is offline, and no label makes these devices a mirror")]
    NewWithoutReplica {
        /// The offline replica.
        replica: usize,
    },
    /// Replicas of two mirrors.
    #[error("replica {replica} belongs to another mirror")]
    OtherMirror {
        /// The replica of the other mirror.
        replica: usize,
    },
    /// A device that never was a replica of this mirror.
    #[error("replica {replica} never was a replica of this mirror")]
    NotAReplica {
        /// The device.
        replica: usize,
    },
    /// A replica that was removed.
    #[error("replica {replica} was removed from this mirror")]
    Removed {
        /// The device.
        replica: usize,
    },
    /// Devices without labels that may hold data: a mirror of them must be created on purpose.
    #[error("no label makes these devices a mirror, and replica {replica} may hold data")]
    NotCreated {
        /// The first that may hold data.
        replica: usize,
    },
    /// No device has room for a label.
    #[error("no replica has room for a mirror label")]
    NoRoom,
    /// Two devices have the label of one replica.
    #[error("replicas {first} and {second} have the label of the same replica: one is a copy of the other")]
    Duplicate {
        /// One of them.
        first: usize,
        /// The other one.
        second: usize,
    },
    /// Two replicas were each written without the other, or labels do not exclude it.
    #[error("split brain: by their labels replicas {first} and {second} may each have been written without the other")]
    SplitBrain {
        /// One of them.
        first: usize,
        /// The other one.
        second: usize,
    },
    /// All online replicas are out of sync.
    #[error("no in-sync replica is available")]
    NoneInSync,
    /// By all labels together no other online replica is in sync than one whose device does not fit its label.
    #[error("by the labels only replica {replica} is in sync, and its device cannot be used")]
    OnlyUnfit {
        /// The replica with the content.
        replica: usize,
    },
}

/// The result of an assembly.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Assembly {
    /// A new mirror: no device has a label. Its replicas are identical if all are blank.
    New,
    /// A mirror that labels record.
    Known(Box<ExistingMirror>),
}

/// A mirror that labels record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExistingMirror {
    /// The newest label merged with the others: the current states, out-of-sync and dirty regions, and the highest
    /// event count of all.
    pub label: Label,
    /// For each given replica, the index of its record.
    pub indices: Vec<usize>,
    /// Given devices that are not used: they have no label although their replica should, or a crash interrupted their
    /// removal.
    pub unused: Vec<usize>,
    /// Given devices that do not fit their labels, so that nothing but the label is used.
    pub unfit: Vec<usize>,
    /// True if the labels are not all from the same write: a crash interrupted it, or a replica is an older image.
    pub labels_differ: bool,
    /// The content of the replica with the authoritative label may be older than the last writes, and so may that of
    /// all replicas that could replace it.
    pub may_be_older: bool,
}

/// Whether the device of a replica has every completed change, as far as known. The variants are in the order of
/// preference.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub enum Answered {
    /// It has all.
    #[default]
    AllThere,
    /// Unknown: another server has the device, and reports it only with the first flush.
    Unknown,
    /// It may lack some.
    MayBeLost,
}

/// Assembles a mirror from what was found under the names of its replicas.
///
/// # Errors
/// When they make no mirror, or none that can be trusted.
pub fn assemble(found: &[ReplicaProbe]) -> Result<Assembly, AssembleError> {
    assemble_beside(found, &[], &[])
}

/// The same, for devices that may lack their last writes. The content of such a replica counts only if there is no
/// other in-sync one; otherwise it is out of sync in all regions. `answered` tells, for each replica, whether its
/// device may lack completed but unflushed changes. Of replicas with equal labels, one that lacks none is preferred:
/// where they differ, which is where something was not flushed, the others get its content. An older label never wins
/// over a newer one: it may belong to an older image.
///
/// # Errors
/// As [`assemble`].
pub fn assemble_beside(
    found: &[ReplicaProbe],
    older: &[usize],
    answered: &[Answered],
) -> Result<Assembly, AssembleError> {
    let answered_on = |at: usize| answered.get(at).copied().unwrap_or_default();
    let labels: Vec<(usize, &Label)> =
        found.iter().enumerate().filter_map(|(at, found)| Some((at, found.label()?))).collect();
    let is_unfit = |at: usize| matches!(found[at], ReplicaProbe::Unfit(_));
    if labels.is_empty() {
        return assemble_unlabelled(found);
    }
    check_one_mirror(&labels)?;
    check_split_brain(&labels)?;
    // A replica does not count if its own label calls it out of sync, if another replica acknowledged a newer label
    // on it (it is an old image), or if another replica marks it out of sync (it cannot know that).
    let is_old = |label: &Label| labels.iter().any(|(_, other)| is_rolled_back(other, label));
    let is_marked =
        |label: &Label| labels.iter().any(|(_, other)| marks_out_of_sync(other, label) || is_ahead(other, label));
    let is_current = |label: &Label| is_own_in_sync(label) && !is_old(label) && !is_marked(label);
    let current = labels.iter().filter(|(_, label)| is_current(label));
    // A device that cannot be used comes last: where another one is current by all labels, that one lacks nothing.
    let authority = current.min_by_key(|(at, label)| {
        (is_unfit(*at), older.contains(at), std::cmp::Reverse(label.events), answered_on(*at))
    });
    let Some(&(first, authority)) = authority else { return Err(AssembleError::NoneInSync) };
    // Also of a replica that is not in sync: it may have the only copy of the writes on the other side.
    if let Some(&(second, _)) = labels.iter().find(|(_, label)| !includes_changes_of(authority, label)) {
        return Err(AssembleError::SplitBrain { first, second });
    }
    if is_unfit(first) {
        return Err(AssembleError::OnlyUnfit { replica: first });
    }
    let mut label = authority.clone();
    let may_be_older = older.contains(&first);
    // Unknown does not count as complete if another replica shows that something was lost.
    label.unreported_loss |= match answered_on(first) {
        Answered::AllThere => false,
        Answered::Unknown => answered.contains(&Answered::MayBeLost),
        Answered::MayBeLost => true,
    };
    for (at, other) in &labels {
        let is_doubted = older.contains(at) && !may_be_older;
        merge(&mut label, other, is_doubted || is_old(other) || needs_full_resync(authority, other));
    }
    label.is_tentative = authority.is_tentative && !is_last_change_everywhere(&label, &labels);
    let (indices, unused) = match_replicas(found, authority, &label, &labels)?;
    let labels_differ = labels.iter().any(|(_, other)| other.events != label.events);
    let unfit = (0..found.len()).filter(|at| is_unfit(*at)).collect();
    // The next label must have a higher event count than any label there is.
    label.events = labels.iter().map(|(_, other)| other.events).max().unwrap_or(0);
    Ok(Assembly::Known(Box::new(ExistingMirror { label, indices, unused, unfit, labels_differ, may_be_older })))
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

/// Refuses replicas of two mirrors; names one that does not belong to the mirror of the majority.
fn check_one_mirror(labels: &[(usize, &Label)]) -> Result<(), AssembleError> {
    let sharing = |uuid: [u8; 16]| labels.iter().filter(|(_, label)| label.uuid == uuid).count();
    // Of equally many the first in the order of the names.
    let most = labels.iter().rev().max_by_key(|(_, label)| sharing(label.uuid)).map(|(_, label)| label.uuid);
    match labels.iter().find(|(_, label)| Some(label.uuid) != most) {
        Some((replica, _)) => Err(AssembleError::OtherMirror { replica: *replica }),
        None => Ok(()),
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

/// True if the content of a replica is elsewhere, or does not count: its own label lists it as out of sync, or one of
/// the `others` is in sync according to all their labels together. What its label says of replicas that are not given
/// does not count: they may be gone, or restored to an earlier state.
pub(crate) fn is_held_elsewhere(own: &Label, others: &[Label]) -> bool {
    let is_in_sync = |record: &ReplicaRecord| record.state == ReplicaState::InSync;
    if !is_own_in_sync(own) {
        return true;
    }
    let others: Vec<&Label> = others.iter().filter(|other| other.uuid == own.uuid).collect();
    let labels = others.iter().copied().chain([own]);
    let found: Vec<ReplicaProbe> = labels.map(|label| ReplicaProbe::Labelled(Box::new(label.clone()))).collect();
    let Ok(Assembly::Known(known)) = assemble(&found) else { return false };
    known.indices[..others.len()].iter().any(|at| is_in_sync(&known.label.replicas[*at]))
}

fn is_own_in_sync(label: &Label) -> bool {
    label.replicas[label.own_index].state == ReplicaState::InSync
}

/// True if the writer of `a` had all changes that were made before `b` was written.
pub(crate) fn includes_changes_of(a: &Label, b: &Label) -> bool {
    let Some(newest) = b.lineage.newest() else { return true };
    let index = index_of(a, b).map(|at| &a.replicas[at]);
    if index.is_some_and(|replica| replica.acked_events == b.events) {
        // It wrote this very label, or read it, and would not have continued with it if it lacked something.
        return true;
    }
    let Some(known) = a.lineage.find(newest.id) else {
        // The lineage of `a` may have dropped older sessions. Then only the very label that `a`'s writer last sent
        // there proves that nothing diverged.
        return a.lineage.is_full() && index.is_some_and(|replica| replica.sent_events == b.events);
    };
    // If only the last label before a change reached this replica, a replica that it lists as in sync lacks nothing
    // either.
    let is_enough = b.is_tentative && index.is_some_and(|replica| descends_from_in_sync(a, b, replica));
    known.until >= if is_enough { b.changed } else { newest.until }
}

/// True if the replica of `a` is one that `b` lists as in sync, and that had every change which was completed when `b` was
/// written. A replica that `b` does not list was added since: its content comes from one of those that `b` lists, and it is not
/// known from which. `of_b` is the record that `a` has for the replica of `b`.
fn descends_from_in_sync(a: &Label, b: &Label, of_b: &ReplicaRecord) -> bool {
    let own_b = &b.replicas[b.own_index];
    let lacks_nothing = |listed: &ReplicaRecord| {
        // Every label of an in-sync replica was sent to both, so one that acknowledged it knows that it was sent to the other.
        // An image from before does not, and lacks what was changed since.
        let knows_its_own = of_b.sent_events >= listed.acked_events;
        // Only a replica that was written alone lists itself as out of sync: its label's states of the others are older.
        // A resyncing replica got a label after all in-sync ones, unless it was not sent to this one: then it is from an
        // open without this replica that changed nothing and reconciled nothing.
        let is_excused = match own_b.state {
            ReplicaState::InSync | ReplicaState::OutOfSync => knows_its_own,
            ReplicaState::Resyncing => listed.sent_events < b.events,
            ReplicaState::Removed => false,
        };
        listed.state == ReplicaState::InSync && is_excused
    };
    if let Some(at) = index_of(b, a) {
        return lacks_nothing(&b.replicas[at]);
    }
    // The content of a mirror never comes from a replica without a label.
    let is_source =
        |listed: &&ReplicaRecord| listed.id != own_b.id && listed.has_room && listed.state != ReplicaState::Removed;
    let mut sources = b.replicas.iter().filter(is_source);
    sources.clone().next().is_some() && sources.all(lacks_nothing)
}

/// True if all in-sync replicas are online and have the last label before a change. From then on a replica without it
/// is never accepted.
fn is_last_change_everywhere(label: &Label, labels: &[(usize, &Label)]) -> bool {
    let Some(newest) = label.lineage.newest() else { return true };
    let knows = |own: &Label| own.lineage.find(newest.id).is_some_and(|known| known.until >= newest.until);
    let mut current = label.replicas.iter().filter(|of| of.state == ReplicaState::InSync && of.has_room);
    current.all(|of| labels.iter().any(|(_, own)| own.replicas[own.own_index].id == of.id && knows(own)))
}

/// True if the replica of `a` is in sync and has changes that the replica of `b` lacks.
fn is_ahead(a: &Label, b: &Label) -> bool {
    is_own_in_sync(a) && includes_changes_of(a, b) && !includes_changes_of(b, a)
}

/// True if `a` marks the replica of `b` out of sync, in a label that the writer of `b` did not know.
fn marks_out_of_sync(a: &Label, b: &Label) -> bool {
    // A resyncing replica lacks something, whether its own label says so yet or not.
    let is_marked = index_of(a, b).is_some_and(|at| a.replicas[at].state != ReplicaState::InSync);
    // An older image that was opened alone has marks from the time it was taken. They do not apply to a replica that
    // has all of its changes and later ones.
    is_marked && !has_acknowledged(b, a) && !is_mark_obsolete(a, b) && !is_ahead(b, a)
}

/// True if `b`'s writer acknowledged a newer label than `a`'s on a third replica that `a` lists as in sync: `a`'s
/// out-of-sync mark on `b` is obsolete.
fn is_mark_obsolete(a: &Label, b: &Label) -> bool {
    let others = a.replicas.iter().enumerate().filter(|(at, _)| *at != a.own_index).map(|(_, record)| record);
    let mut witnesses = others.filter(|record| record.state == ReplicaState::InSync && record.has_room);
    witnesses.any(|witness| {
        b.replicas.iter().any(|record| record.id == witness.id && record.acked_events > witness.acked_events)
    })
}

/// True if the writer of `a` wrote `b` or read it. The last label that it sent may be unacknowledged; a label between
/// that one and the last acknowledged one is from another writer.
fn has_acknowledged(a: &Label, b: &Label) -> bool {
    index_of(a, b).is_some_and(|at| knows_of(&a.replicas[at], b.events))
}

fn knows_of(replica: &ReplicaRecord, events: u64) -> bool {
    events <= replica.acked_events || events == replica.sent_events
}

/// True if the writer of `a` does not know two or more labels of the replica of `b`, or one on an older image of it.
/// A single one can have been in flight at a crash, and no request completed for it.
fn has_diverged(a: &Label, b: &Label) -> bool {
    let before = b.replicas[b.own_index].acked_events;
    let is_next = |replica: &ReplicaRecord| before >= replica.acked_events && knows_of(replica, before);
    index_of(a, b).is_some_and(|at| !knows_of(&a.replicas[at], b.events) && !is_next(&a.replicas[at]))
}

/// True if the out-of-sync regions that `known` records for the replica of `own` do not apply to it: it is an older
/// image, or was written elsewhere.
pub(crate) fn needs_full_resync(known: &Label, own: &Label) -> bool {
    let is_called_current = index_of(known, own).is_some_and(|at| known.replicas[at].state == ReplicaState::InSync);
    is_rolled_back(known, own)
        || has_diverged(known, own)
        || !includes_changes_of(known, own)
        || (is_called_current && (!includes_changes_of(own, known) || is_demoted(known, own)))
}

/// True if another writer than `a`'s marked the replica of `b` out of sync: its out-of-sync regions count from that
/// writer's content.
fn is_demoted(a: &Label, b: &Label) -> bool {
    !is_own_in_sync(b) && !has_acknowledged(a, b)
}

/// True if `a` acknowledged a newer label on the replica of `b`, which is an older image then.
fn is_rolled_back(a: &Label, b: &Label) -> bool {
    index_of(a, b).is_some_and(|at| b.events < a.replicas[at].acked_events)
}

/// Index of the record that `a` has for the replica of `b`.
fn index_of(a: &Label, b: &Label) -> Option<usize> {
    let id = b.replicas[b.own_index].id;
    a.replicas.iter().position(|record| record.id == id)
}

/// Merges another label: regions that may differ by either may differ.
fn merge(label: &mut Label, other: &Label, lacks_everything: bool) {
    if other.dirty.capacity() != label.dirty.capacity() {
        return;
    }
    let Some(at) = index_of(label, other) else { return };
    let ReplicaRecord { state, is_new, out_of_sync, acked_events, sent_events: sent, .. } = &mut label.replicas[at];
    *sent = (*sent).max(other.events);
    *acked_events = (*acked_events).max(other.events);
    if other.replicas[other.own_index].state == ReplicaState::Removed {
        // A crash cut the removal short before the labels of the others recorded it.
        *state = ReplicaState::Removed;
    }
    if lacks_everything && *state != ReplicaState::Removed {
        *state = ReplicaState::OutOfSync;
    }
    *is_new = is_still_new(*is_new, other, lacks_everything) && *state != ReplicaState::InSync;
    match state {
        ReplicaState::InSync => label.dirty.add(&other.dirty),
        ReplicaState::OutOfSync | ReplicaState::Resyncing => add_missed(out_of_sync, other, lacks_everything, false),
        ReplicaState::Removed => {}
    }
}

/// True if the content of a replica never was the mirror's. Its own label must say so, and the newest label too
/// unless the replica needs a full resync: an older image can predate the time when it was in sync, and an older
/// record can call a replica new that was in sync since.
pub(crate) fn is_still_new(is_called_new: bool, own: &Label, lacks_everything: bool) -> bool {
    own.replicas[own.own_index].is_new && (is_called_new || lacks_everything)
}

/// Adds the regions that an out-of-sync replica lacks by its own label, of which its changes since are known if it `is_followed`.
pub(crate) fn add_missed(out_of_sync: &mut Regions, own: &Label, lacks_everything: bool, is_followed: bool) {
    if lacks_everything {
        // The out-of-sync regions in the record apply to another image of the replica.
        *out_of_sync = Regions::all(out_of_sync.capacity());
    }
    if !is_followed {
        // It may have changes that were in flight when it failed, or not.
        out_of_sync.add(&own.dirty);
    }
    // The others may not know all that it lacks: it can have been reattached as an older image while they were
    // offline.
    out_of_sync.add(&own.replicas[own.own_index].out_of_sync);
}

/// Finds the record of each replica: by its label, and without a label in the order of the free records. Also returns
/// the devices that are not used.
fn match_replicas(
    found: &[ReplicaProbe],
    authority: &Label,
    label: &Label,
    labels: &[(usize, &Label)],
) -> Result<(Vec<usize>, Vec<usize>), AssembleError> {
    let mut indices: Vec<Option<usize>> = vec![None; found.len()];
    let mut unused = Vec::new();
    for &(replica, own) in labels {
        let at = index_of(label, own).ok_or(AssembleError::NotAReplica { replica })?;
        if authority.replicas[at].state == ReplicaState::Removed {
            return Err(AssembleError::Removed { replica });
        }
        indices[replica] = Some(at);
        if label.replicas[at].state == ReplicaState::Removed {
            unused.push(replica);
        }
    }
    let mut free: Vec<usize> = (0..label.replicas.len())
        .filter(|at| !indices.contains(&Some(*at)) && label.replicas[*at].state != ReplicaState::Removed)
        .collect();
    for (replica, found) in found.iter().enumerate().filter(|(_, found)| found.label().is_none()) {
        // A device that has room and no label never was this replica, and one without room is none that had a label:
        // it is another device under that name.
        let is_replica =
            |at: &usize| *found == ReplicaProbe::Absent || (!found.has_room() && !label.replicas[*at].has_room);
        let fit = free.iter().position(is_replica);
        if fit.is_none() {
            unused.push(replica);
        }
        let at = fit.or((!free.is_empty()).then_some(0)).ok_or(AssembleError::NotAReplica { replica })?;
        indices[replica] = Some(free.remove(at));
    }
    let is_there = |replica: usize| !matches!(found[replica], ReplicaProbe::Absent | ReplicaProbe::Unfit(_));
    let is_used = |replica: usize| is_there(replica) && !unused.contains(&replica);
    let is_current = |(replica, at): (usize, &Option<usize>)| {
        is_used(replica) && at.is_some_and(|at| label.replicas[at].state == ReplicaState::InSync)
    };
    if !indices.iter().enumerate().any(is_current) {
        return Err(AssembleError::NoneInSync);
    }
    Ok((indices.into_iter().flatten().collect(), unused))
}

/// The identity of a new replica, which no other replica of the mirror ever gets.
pub fn replica_id(uuid: &[u8; 16], events: u64, index: usize) -> [u8; 16] {
    let mut id = *uuid;
    let salt = (events << 8 | index as u64).to_le_bytes();
    id[8..].iter_mut().zip(salt).for_each(|(byte, salt)| *byte ^= salt);
    id
}

/// Marks a replica out of sync in all dirty regions.
pub fn mark_out_of_sync(record: &mut ReplicaRecord, dirty: &Regions) {
    record.state = ReplicaState::OutOfSync;
    record.out_of_sync.add(dirty);
}
