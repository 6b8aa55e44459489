//! Looks for what would be lost where the target to be overwritten is no plain path: through the open target, and at each file and device
//! that it is made of.
//!
//! Both are needed. A layer may hide what lies below it (a stripe has the starts of its members in the middle, a fault makes blocks
//! unreadable), and a device on another host can only be looked at through its protocol. The parts are opened for reading before the
//! target is opened for writing, because that writes labels.
//!
//! Each part of which any byte is written is looked at as a whole: a superblock or a partition table is about the bytes behind it, so what
//! it belongs to is damaged by a write anywhere in it. A part of which nothing is written is free.

use futures_util::future::{LocalBoxFuture, join_all};
use sealblock_block::Device;
use sealblock_layers_stripe::CHUNK;
use sealblock_units::Extent;

use crate::error::StackError;
use crate::opened::held::{Access, Usage};
use crate::opened::{OpenTarget, Opener, data_of};
use crate::path::seen::Seen;
use crate::path::signature::{file_format, file_start, find, occupied, places};
use crate::range::BlockRange;
use crate::target::{GroupKind, TargetName};

/// How the blocks of a layer lie on the device below it.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A slice of it.
    Slice(BlockRange),
    /// Chunks of this many bytes, taken by the members in turn; the device is the member of this number.
    Chunks { bytes: u64, members: u64, member: u64 },
}

/// A file or device that a target is made of, or a layer between them.
struct Part<'a> {
    target: &'a TargetName,
    /// From the target down.
    steps: Vec<Step>,
}

/// Refuses a target of which a part that would be written holds something known, or is a plain file of another format than `like`.
///
/// # Errors
/// Names the part, and what is there. A part that does not open is none: opening the target tells why.
pub(crate) async fn check_parts(target: &TargetName, like: Option<&str>, open: Opener) -> Result<(), StackError> {
    let mut parts = Vec::new();
    if !target.inner().is_empty() {
        add_below(target, &[], &mut parts);
    }
    let looked_at = join_all(parts.iter().map(|part| part.check(like, open))).await;
    looked_at.into_iter().collect()
}

/// Refuses an open target that holds something known.
///
/// # Errors
/// Names what is there.
pub(crate) async fn check_opened(opened: &OpenTarget) -> Result<(), StackError> {
    if opened.target().is_fleeting() {
        return Ok(());
    }
    known_content(opened).await.map_or(Ok(()), |there| Err(occupied(opened.target(), &there)))
}

/// What an open target holds, if that is known.
pub fn known_content(opened: &OpenTarget) -> LocalBoxFuture<'_, Option<String>> {
    Box::pin(async move {
        let geometry = opened.device.geometry();
        let block_bytes = geometry.block_size.bytes() as u64;
        let read = async |offset_bytes: u64, length_bytes: u64| {
            let extent = Extent::from_raw(offset_bytes / block_bytes, length_bytes / block_bytes).ok()?;
            opened.read(extent).await.ok().map(|answer| data_of(answer).to_vec())
        };
        let len_bytes = geometry.capacity_bytes();
        let seen = Seen::read((len_bytes, block_bytes), places(len_bytes), read).await;
        find(&seen).map(|found| found.to_string())
    })
}

/// A part, and all parts that it is made of. A layer is looked at as a whole, too: the range of a slice need not begin where what it belongs to
/// does, and what lies below a group may have nothing by itself.
fn add_part<'a>(target: &'a TargetName, steps: Vec<Step>, parts: &mut Vec<Part<'a>>) {
    if !target.is_fleeting() {
        add_below(target, &steps, parts);
        parts.push(Part { target, steps });
    }
}

/// The parts that a target is made of.
fn add_below<'a>(target: &'a TargetName, above: &[Step], parts: &mut Vec<Part<'a>>) {
    let mut below = |inner, step: Option<Step>| add_part(inner, above.iter().copied().chain(step).collect(), parts);
    match target {
        TargetName::Offset { range, target } => below(target, Some(Step::Slice(*range))),
        TargetName::Fault { target, .. } => below(target, None),
        TargetName::Group { kind: GroupKind::Stripe { chunk, .. }, members } => {
            let bytes = chunk.unwrap_or(CHUNK).get();
            let all = members.len() as u64;
            for (member, inner) in (0..).zip(members) {
                below(inner, Some(Step::Chunks { bytes, members: all, member }));
            }
        }
        TargetName::Group { kind: GroupKind::Mirror | GroupKind::Multipath, members } => {
            // The group shows what they hold; connecting twice to one that is away takes twice the time.
            let is_remote =
                |member: &&TargetName| matches!(member, TargetName::NvmeTcp { .. } | TargetName::Nbd { .. });
            members.iter().filter(|member| !is_remote(member)).for_each(|inner| below(inner, None));
        }
        TargetName::File(_)
        | TargetName::Raw(_)
        | TargetName::Linux { .. }
        | TargetName::Memory { .. }
        | TargetName::Null(_)
        | TargetName::NvmeTcp { .. }
        | TargetName::Nbd { .. } => {}
    }
}

impl Part<'_> {
    async fn check(&self, like: Option<&str>, open: Opener) -> Result<(), StackError> {
        let Ok(opened) = open(self.target, Access::ReadOlder, Usage::AsMember).await else { return Ok(()) };
        let written = self.written_blocks(opened.device.geometry().block_size.bytes() as u64);
        let there = match (written, self.format(like)) {
            (None, _) => None,
            (Some(_), Some(format)) => Some(format.to_owned()),
            (Some(_), None) => known_content(&opened).await,
        };
        let refused = there.map_or(Ok(()), |there| Err(occupied(self.target, &there)));
        opened.close(refused).await
    }

    /// The format of a plain file, if it is known and another one than `like`.
    fn format(&self, like: Option<&str>) -> Option<&'static str> {
        let path = self.target.path().filter(|path| path.is_file())?;
        file_format(&file_start(path).ok()?).filter(|format| Some(*format) != like)
    }

    /// The first and the last block of it that may be written with the target; `None` if none is.
    fn written_blocks(&self, block_bytes: u64) -> Option<(u64, u64)> {
        let all = Some((0, u64::MAX));
        self.steps.iter().fold(all, |blocks, step| step.below(blocks?, block_bytes))
    }
}

impl Step {
    /// The blocks of the device below that have these, from a first to a last one.
    fn below(self, (first, last): (u64, u64), block_bytes: u64) -> Option<(u64, u64)> {
        match self {
            Step::Slice(range) => {
                let start = range.first().get();
                let end = range.last().map_or(u64::MAX, |last| last.get());
                let (first, last) = (start.saturating_add(first), start.saturating_add(last).min(end));
                (first <= last).then_some((first, last))
            }
            Step::Chunks { bytes, members, member } => {
                let chunk = (bytes / block_bytes).max(1);
                let (first_chunk, last_chunk) = (first / chunk, last / chunk);
                let own_first = first_chunk.checked_add((member + members - first_chunk % members) % members)?;
                let own_last = last_chunk.checked_sub((last_chunk % members + members - member) % members)?;
                let start = own_first / members * chunk + if own_first == first_chunk { first % chunk } else { 0 };
                let within = if own_last == last_chunk { last % chunk } else { chunk - 1 };
                (own_first <= own_last).then_some((start, own_last / members * chunk + within))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The blocks of each part that are written with a target of blocks of 512 bytes.
    fn written(target: &str) -> Vec<(String, Option<(u64, u64)>)> {
        let target: TargetName = target.parse().unwrap();
        let mut parts = Vec::new();
        add_below(&target, &[], &mut parts);
        parts.iter().map(|part| (part.target.to_string(), part.written_blocks(512))).collect()
    }

    fn part(name: &str, blocks: Option<(u64, u64)>) -> (String, Option<(u64, u64)>) {
        (name.to_owned(), blocks)
    }

    #[test]
    fn a_slice_is_written_where_it_lies_on_what_is_below_all_layers() {
        assert_eq!(written("offset:3..5,raw:a"), [part("raw:a", Some((3, 5)))]);
        let slices = written("offset:1..1,offset:3..,fault:[read-error%0],raw:a");
        let faults = "fault:[read-error%0],raw:a";
        let whole = format!("offset:3..,{faults}");
        assert_eq!(slices, [part("raw:a", Some((4, 4))), part(faults, Some((4, 4))), part(&whole, Some((1, 1)))]);
        assert_eq!(written("offset:9..,offset:3..5,raw:a")[0], part("raw:a", None));
        let mirror = written("offset:2..,mirror:raw:a,raw:b");
        let both = [part("raw:a", Some((2, u64::MAX))), part("raw:b", Some((2, u64::MAX)))];
        assert_eq!((&mirror[..2], mirror.len()), (&both[..], 3), "and the mirror");
        assert_eq!(written("mirror:raw:a,nbd://host/b,mem:1MiB"), [part("raw:a", Some((0, u64::MAX)))]);
        // What the group does not show by itself, it does as a whole.
        let remote = written("offset:2..,mirror:nbd://host/a,nbd://host/b");
        assert_eq!(remote, [part("mirror:nbd://host/a,nbd://host/b", Some((2, u64::MAX)))]);
    }

    #[test]
    fn members_of_a_stripe_are_written_where_their_chunks_are() {
        let of = |range: &str| -> Vec<_> {
            let parts = written(&format!("offset:{range},stripe-4KiB-nolabel:raw:a,raw:b,raw:c"));
            parts[..3].iter().map(|(_, blocks)| *blocks).collect()
        };
        assert_eq!(of("0..7"), [Some((0, 7)), None, None]);
        assert_eq!(of("9..25"), [Some((8, 9)), Some((1, 7)), Some((0, 7))]);
        assert_eq!(of("24..47"), [Some((8, 15)), Some((8, 15)), Some((8, 15))]);
        assert_eq!(of("42..42"), [None, None, Some((10, 10))]);
    }
}
