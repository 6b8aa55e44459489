//! Checks that devices are the members of one stripe, in order; labels the members of a new one.
//!
//! The first open of a stripe labels it, if all its members are blank. They still are if a crash interrupts the
//! labelling. So a device without a label among others that have data is not a half-labelled member but a wrong device,
//! and is refused.

use futures_util::future::join_all;
use sealblock_block::{Device, Error, ErrorKind, Request, RequestKind, ReservedArea, Response, is_unwritten};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, ByteCount};

use crate::label::{Label, LabelError, MAX_MEMBERS};
use crate::merge::unexpected_response;

/// Why devices are not assembled into a stripe. Members are counted from 0.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AssembleError {
    /// More devices than a label can count.
    #[error("a labelled stripe has at most {MAX_MEMBERS} members")]
    Many,
    /// A device without a reserved area for a label.
    #[error(
        "member {0} has no room for the label of a stripe, which keeps the order of the members and the size of chunks"
    )]
    NoRoom(usize),
    /// A device whose label is damaged.
    #[error("member {member}: {why}")]
    Label {
        /// Index of the member.
        member: usize,
        /// What is wrong with its label.
        why: LabelError,
    },
    /// A device with the label of another kind of group, such as a mirror.
    #[error("member {0} has the label of another group: it is a member of a mirror")]
    OtherGroup(usize),
    /// A member of another stripe than the first labelled member.
    #[error("member {member} belongs to another stripe than member {first}")]
    Foreign {
        /// Index of the member.
        member: usize,
        /// The first one that is labelled.
        first: usize,
    },
    /// More or fewer devices than the stripe has members.
    #[error("the stripe has {members} members, and {given} are given")]
    Count {
        /// Members of the stripe.
        members: usize,
        /// Devices given.
        given: usize,
    },
    /// The members in another order. A member that is given twice is also in the place of another one.
    #[error("the members are in another order: those given are numbers {} of the stripe", numbers(.0))]
    Order(Vec<usize>),
    /// Chunks of another size.
    #[error("the stripe has chunks of {actual}, not of {expected}")]
    Chunk {
        /// Bytes of its chunks.
        actual: ByteCount,
        /// Bytes that the caller expects.
        expected: ByteCount,
    },
    /// Devices whose total capacity or whose block size differs from the stripe's.
    #[error("the stripe has {actual} blocks, and these devices make one of {made}")]
    Shape {
        /// Blocks of the stripe.
        actual: u64,
        /// Blocks that these devices have together.
        made: u64,
    },
    /// Devices without a label, some of which hold data.
    #[error("members {} have no label to tell their order, and hold data", numbers(.0))]
    Unlabelled(Vec<usize>),
    /// A device without a label in the place of a member.
    #[error("member {0} has no label and the others do: it is another device in the place of a member")]
    NoLabel(usize),
    /// A device that failed.
    #[error("member {member}: {why}")]
    Device {
        /// Index of the member.
        member: usize,
        /// Why.
        why: Error,
    },
}

fn numbers(members: &[usize]) -> String {
    members.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// What the labels must match.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Assembly {
    /// Bytes of a chunk.
    pub chunk: ByteCount,
    /// Blocks of the stripe that the members form.
    pub capacity_blocks: u64,
    /// The identity that a new stripe gets.
    pub uuid: [u8; 16],
    /// True if labels may be written.
    pub may_write: bool,
}

/// Checks that these devices are the members of one stripe in order, and labels the members of a new one. The labels of
/// an existing stripe that is opened for writing are rewritten unchanged: this write shows the server of a member that
/// its stripe is open.
///
/// Returns the members' labels, if the first member has one now. Each keeps its count, so a member that was restored
/// from an earlier state stays behind the first.
///
/// # Errors
/// When they do not match. Nothing was written then, unless a device failed.
pub(crate) async fn assemble<D: Device>(
    members: &[D],
    assembly: &Assembly,
) -> Result<Option<Vec<Label>>, AssembleError> {
    if members.len() > MAX_MEMBERS {
        return Err(AssembleError::Many);
    }
    let mut labels = Vec::with_capacity(members.len());
    for (member, device) in members.iter().enumerate() {
        labels.push(read(member, device).await?);
    }
    let first = labels.iter().position(Option::is_some);
    if let Some(first) = first {
        check_labels(&labels, first, assembly, members[0].geometry().block_size)?;
    }
    if labels.iter().any(Option::is_none) {
        check_blank(members, &labels).await?;
    }
    if !assembly.may_write {
        return Ok(labels.into_iter().collect());
    }
    let uuid = first.and_then(|first| labels[first].as_ref()).map_or(assembly.uuid, |label| label.uuid);
    let (chunk, capacity_blocks) = (assembly.chunk, assembly.capacity_blocks);
    let mut written = Vec::with_capacity(members.len());
    for (own_index, (device, label)) in members.iter().zip(labels).enumerate() {
        let (block_size, members, group_label, group_seq) =
            (device.geometry().block_size, members.len(), Vec::new(), 0);
        let new = Label { uuid, members, own_index, chunk, capacity_blocks, block_size, group_label, group_seq };
        let label = label.unwrap_or(new);
        write(device, &label).await.map_err(|why| AssembleError::Device { member: own_index, why })?;
        written.push(label);
    }
    Ok(Some(written))
}

/// Writes the label of a group that the stripe is a member of. The other members count the write, durably, before it is
/// written to the first one. So they have counted whatever the first one has, unless they were restored from an earlier
/// state.
pub(crate) async fn write_group_label<D: Device>(
    members: &[D],
    labels: &[Label],
    group_label: &[u8],
) -> Result<Vec<Label>, Error> {
    let group_seq = labels.iter().map(|label| label.group_seq).max().unwrap_or(0).saturating_add(1);
    let mut new: Vec<Label> = labels.iter().map(|label| Label { group_seq, ..label.clone() }).collect();
    new[0].group_label = group_label.to_vec();
    let others = members.iter().zip(&new).skip(1).map(|(member, label)| write(member, label));
    join_all(others).await.into_iter().collect::<Result<(), Error>>()?;
    write(&members[0], &new[0]).await?;
    Ok(new)
}

/// True if a member has counted fewer writes than the first one: it was restored, with its blocks, from a state before
/// the outer group last wrote its label.
pub(crate) fn is_any_behind(labels: &[Label]) -> bool {
    labels.iter().any(|label| label.group_seq < labels[0].group_seq)
}

/// Reads the label of a device; `None` if it has none.
async fn read<D: Device>(member: usize, device: &D) -> Result<Option<Label>, AssembleError> {
    if !device.abilities().is_native(RequestKind::ReadReserved) {
        return Err(AssembleError::NoRoom(member));
    }
    let bytes = match read_label_bytes(device).await {
        Ok(bytes) => bytes,
        // A mirror uses the group label itself.
        Err(error) if matches!(error.kind(), ErrorKind::Absent(_)) => return Err(AssembleError::NoRoom(member)),
        Err(why) => return Err(AssembleError::Device { member, why }),
    };
    match Label::decode(&bytes) {
        Ok(None) if bytes.is_empty() => Ok(None),
        Ok(None) => Err(AssembleError::OtherGroup(member)),
        Ok(label) => Ok(label),
        Err(why) => Err(AssembleError::Label { member, why }),
    }
}

/// Reads the bytes of the group label.
pub(crate) async fn read_label_bytes<D: Device>(device: &D) -> Result<Slice, Error> {
    match device.execute(Request::read_reserved(ReservedArea::GroupLabel)).await? {
        Response::Reserved(bytes) => Ok(bytes),
        _ => Err(unexpected_response()),
    }
}

/// Writes a label, durable once this returns.
pub(crate) async fn write<D: Device>(device: &D, label: &Label) -> Result<(), Error> {
    let bytes = Slice::copy_from(&label.encode());
    device.execute(Request::write_reserved(ReservedArea::GroupLabel, bytes)).await.map(drop)
}

/// Checks the labels against each other, the order of the devices, and `assembly`.
fn check_labels(
    labels: &[Option<Label>],
    first: usize,
    assembly: &Assembly,
    block_size: BlockSize,
) -> Result<(), AssembleError> {
    check_arrangement(labels, assembly.chunk)?;
    let Some(first_label) = &labels[most_agreed(labels).unwrap_or(first)] else { return Ok(()) };
    if first_label.capacity_blocks != assembly.capacity_blocks || first_label.block_size != block_size {
        return Err(AssembleError::Shape { actual: first_label.capacity_blocks, made: assembly.capacity_blocks });
    }
    Ok(())
}

/// Checks the labels against each other, the order of the devices, and the chunk size.
pub(crate) fn check_arrangement(labels: &[Option<Label>], chunk: ByteCount) -> Result<(), AssembleError> {
    let Some((first, first_label)) = most_agreed(labels).and_then(|first| Some((first, labels[first].as_ref()?)))
    else {
        return Ok(());
    };
    let labelled = || labels.iter().enumerate().filter_map(|(member, label)| Some((member, label.as_ref()?)));
    if let Some((member, _)) = labelled().find(|(_, label)| !label.agrees(first_label)) {
        return Err(AssembleError::Foreign { member, first });
    }
    if first_label.members != labels.len() {
        return Err(AssembleError::Count { members: first_label.members, given: labels.len() });
    }
    if labelled().any(|(member, label)| label.own_index != member) {
        return Err(AssembleError::Order(labelled().map(|(_, label)| label.own_index).collect()));
    }
    if first_label.chunk != chunk {
        return Err(AssembleError::Chunk { actual: first_label.chunk, expected: chunk });
    }
    Ok(())
}

/// The first member of the stripe that most members belong to, so that the refused member is the one that does not
/// belong there.
fn most_agreed(labels: &[Option<Label>]) -> Option<usize> {
    let agreeing = |label: &Label| labels.iter().flatten().filter(|other| other.agrees(label)).count();
    let labelled = (0..labels.len()).filter(|member| labels[*member].is_some());
    labelled.rev().max_by_key(|member| labels[*member].as_ref().map_or(0, agreeing))
}

/// Refuses devices without a label unless all devices are blank: then it is a new stripe, or one whose labelling a
/// crash interrupted.
async fn check_blank<D: Device>(members: &[D], labels: &[Option<Label>]) -> Result<(), AssembleError> {
    let unlabelled: Vec<usize> = (0..labels.len()).filter(|member| labels[*member].is_none()).collect();
    for (member, device) in members.iter().enumerate() {
        let is_blank = is_unwritten(device).await.map_err(|why| AssembleError::Device { member, why })?;
        match unlabelled.first() {
            Some(first) if !is_blank && unlabelled.len() < labels.len() => return Err(AssembleError::NoLabel(*first)),
            _ if !is_blank => return Err(AssembleError::Unlabelled(unlabelled)),
            _ => {}
        }
    }
    Ok(())
}
