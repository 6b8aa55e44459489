//! Whether devices are the members of one stripe, in their order; and labels for those of a new one.
//!
//! A stripe is labelled when it is opened for the first time, while nothing is on it: all its members are blank then, also
//! when a crash ended the labelling half-way. A device without a label among others that hold something is no half-labelled
//! member but another device in its place, and is refused.

use sealblock_block::{Ability, Device, Error, ErrorKind, Request, ReservedArea, Response, is_blank};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, ByteCount};

use crate::label::{Label, LabelError, MOST_MEMBERS};
use crate::merge::answered_wrongly;

/// Why devices are not put together as a stripe. Members are counted from 0.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// More devices than a label can count.
    #[error("a labelled stripe has at most {MOST_MEMBERS} members")]
    Many,
    /// A device without room for a label.
    #[error(
        "member {0} has no room for the label of a stripe, which keeps the order of the members and the size of chunks"
    )]
    NoRoom(usize),
    /// A device whose label is damaged.
    #[error("member {member}: {why}")]
    Label {
        /// Which one.
        member: usize,
        /// What is wrong with it.
        why: LabelError,
    },
    /// A device with the label of something else: of a mirror, or of a kind that is not known.
    #[error("member {0} has the label of another group: it is a member of a mirror")]
    OtherGroup(usize),
    /// A member of another stripe than the first labelled one.
    #[error("member {member} belongs to another stripe than member {first}")]
    Foreign {
        /// Which one.
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
    /// The members in another order. One that is there twice is also one in the place of another.
    #[error("the members are in another order: those given are numbers {} of the stripe", numbers(.0))]
    Order(Vec<usize>),
    /// Chunks of another size.
    #[error("the stripe has chunks of {there}, not of {asked}")]
    Chunk {
        /// Bytes of its chunks.
        there: ByteCount,
        /// Bytes asked for.
        asked: ByteCount,
    },
    /// Together they are not as large as the stripe, or have blocks of another size.
    #[error("the stripe has {there} blocks, and these devices make one of {made}")]
    Shape {
        /// Blocks of the stripe.
        there: u64,
        /// Blocks that these devices have together.
        made: u64,
    },
    /// Devices without a label, some of which hold something.
    #[error("no label says in which order members {} were striped, and they hold data", numbers(.0))]
    Unlabelled(Vec<usize>),
    /// A device without a label in the place of a member.
    #[error("member {0} has no label and the others do: it is another device than the one that was there")]
    Stranger(usize),
    /// A device that failed.
    #[error("member {member}: {why}")]
    Device {
        /// Which one.
        member: usize,
        /// Why.
        why: Error,
    },
}

fn numbers(members: &[usize]) -> String {
    members.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// How members are put together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Assembly {
    /// Bytes of a chunk.
    pub chunk: ByteCount,
    /// Blocks of the stripe that the members make.
    pub capacity_blocks: u64,
    /// The identity of the stripe, should it be a new one.
    pub uuid: [u8; 16],
    /// Whether labels may be written.
    pub writable: bool,
}

/// Checks that these devices are the members of one stripe in their order, and labels those of a new one. Those of an old
/// one that is opened for writing get their labels once more, unchanged: that is how the host of a member that is served
/// learns that its stripe has come for it.
///
/// Answers with the first member's label, if it has one now.
///
/// # Errors
/// Why they are not; nothing was written then, unless a device failed.
pub(crate) async fn assemble<D: Device>(members: &[D], assembly: &Assembly) -> Result<Option<Label>, Refusal> {
    if members.len() > MOST_MEMBERS {
        return Err(Refusal::Many);
    }
    let mut found = Vec::with_capacity(members.len());
    for (member, device) in members.iter().enumerate() {
        found.push(read(member, device).await?);
    }
    let first = found.iter().position(Option::is_some);
    if let Some(first) = first {
        judge(&found, first, assembly, members[0].geometry().block_size)?;
    }
    if found.iter().any(Option::is_none) {
        check_blank(members, &found).await?;
    }
    if !assembly.writable {
        return Ok(found.swap_remove(0));
    }
    let uuid = first.and_then(|first| found[first].as_ref()).map_or(assembly.uuid, |label| label.uuid);
    let (chunk, capacity_blocks) = (assembly.chunk, assembly.capacity_blocks);
    let mut of_first = None;
    for (own, (device, found)) in members.iter().zip(found).enumerate() {
        let (block_size, above) = (device.geometry().block_size, Vec::new());
        let new = Label { uuid, members: members.len(), own, chunk, capacity_blocks, block_size, above };
        let label = found.unwrap_or(new);
        write(device, &label).await.map_err(|why| Refusal::Device { member: own, why })?;
        of_first = of_first.or(Some(label));
    }
    Ok(of_first)
}

/// What the label of a device says; nothing where it has none.
async fn read<D: Device>(member: usize, device: &D) -> Result<Option<Label>, Refusal> {
    if device.abilities().reserved != Ability::Native {
        return Err(Refusal::NoRoom(member));
    }
    let bytes = match read_slot(device).await {
        Ok(bytes) => bytes,
        // A mirror keeps the slot for itself.
        Err(error) if matches!(error.kind(), ErrorKind::Absent(_)) => return Err(Refusal::NoRoom(member)),
        Err(why) => return Err(Refusal::Device { member, why }),
    };
    match Label::decode(&bytes) {
        Ok(None) if bytes.is_empty() => Ok(None),
        Ok(None) => Err(Refusal::OtherGroup(member)),
        Ok(label) => Ok(label),
        Err(why) => Err(Refusal::Label { member, why }),
    }
}

/// What the slot of the label holds.
pub(crate) async fn read_slot<D: Device>(device: &D) -> Result<Slice, Error> {
    match device.execute(Request::ReadReserved { slot: ReservedArea::GroupLabel }).await? {
        Response::Reserved(bytes) => Ok(bytes),
        _ => Err(answered_wrongly()),
    }
}

/// Writes a label; durable in the end.
pub(crate) async fn write<D: Device>(device: &D, label: &Label) -> Result<(), Error> {
    let bytes = Slice::copy_from(&label.encode());
    device.execute(Request::WriteReserved { slot: ReservedArea::GroupLabel, bytes }).await.map(drop)
}

/// Whether the labels that are there fit each other, their places, and what is asked for.
fn judge(found: &[Option<Label>], first: usize, assembly: &Assembly, block_size: BlockSize) -> Result<(), Refusal> {
    let Some(known) = &found[first] else { return Ok(()) };
    let labels = || found.iter().enumerate().filter_map(|(member, label)| Some((member, label.as_ref()?)));
    if let Some((member, _)) = labels().find(|(_, label)| !label.agrees(known)) {
        return Err(Refusal::Foreign { member, first });
    }
    if known.members != found.len() {
        return Err(Refusal::Count { members: known.members, given: found.len() });
    }
    if labels().any(|(member, label)| label.own != member) {
        return Err(Refusal::Order(labels().map(|(_, label)| label.own).collect()));
    }
    if known.chunk != assembly.chunk {
        return Err(Refusal::Chunk { there: known.chunk, asked: assembly.chunk });
    }
    if known.capacity_blocks != assembly.capacity_blocks || known.block_size != block_size {
        return Err(Refusal::Shape { there: known.capacity_blocks, made: assembly.capacity_blocks });
    }
    Ok(())
}

/// Refuses devices without a label unless nothing is on any of them: then it is a new stripe, or one whose labelling a crash
/// cut short.
async fn check_blank<D: Device>(members: &[D], found: &[Option<Label>]) -> Result<(), Refusal> {
    let unlabelled: Vec<usize> = (0..found.len()).filter(|member| found[*member].is_none()).collect();
    for (member, device) in members.iter().enumerate() {
        let is_blank = is_blank(device).await.map_err(|why| Refusal::Device { member, why })?;
        match unlabelled.first() {
            Some(stranger) if !is_blank && unlabelled.len() < found.len() => return Err(Refusal::Stranger(*stranger)),
            _ if !is_blank => return Err(Refusal::Unlabelled(unlabelled)),
            _ => {}
        }
    }
    Ok(())
}
