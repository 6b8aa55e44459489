//! Looks for what would be lost where the target to be overwritten is no plain path: through the open target, and at each file and device
//! that it is made of.
//!
//! Both are needed. A layer may hide what lies below it (a stripe has the starts of its members in the middle, a fault makes blocks
//! unreadable), and a device on another host can only be looked at through its protocol. The parts are opened for reading before the
//! target is opened for writing, because that writes labels. Only the bytes that can be written count: a part of a device beside a signature
//! is free.

use std::ops::Range;

use futures_util::future::join_all;
use sealblock_block::Device;
use sealblock_layers_stripe::CHUNK;
use sealblock_units::Extent;

use crate::error::StackError;
use crate::opened::held::{Access, Usage};
use crate::opened::{OpenTarget, Opener, data_of};
use crate::path::signature::{END_BYTES, START_BYTES, file_format, file_start, find, occupied};
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

/// A file or device that a target is made of.
struct Part<'a> {
    target: &'a TargetName,
    /// From the target down.
    steps: Vec<Step>,
}

/// Refuses a target of which a part holds something known where it would be written, or is a plain file of another format than `like`.
///
/// # Errors
/// Names the part, and what is there. A part that does not open is none: opening the target tells why.
pub(crate) async fn check_parts(target: &TargetName, like: Option<&str>, open: Opener) -> Result<(), StackError> {
    let mut parts = Vec::new();
    if !target.inner().is_empty() {
        add_parts(target, &[], &mut parts);
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
    let found = signature_in(opened, 0..u64::MAX).await;
    found.map_or(Ok(()), |there| Err(occupied(opened.target(), &there)))
}

fn add_parts<'a>(target: &'a TargetName, above: &[Step], parts: &mut Vec<Part<'a>>) {
    let mut below = |inner, step: Option<Step>| {
        let steps: Vec<Step> = above.iter().copied().chain(step).collect();
        add_parts(inner, &steps, parts);
    };
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
        leaf if leaf.is_fleeting() => {}
        leaf => parts.push(Part { target: leaf, steps: above.to_vec() }),
    }
}

impl Part<'_> {
    async fn check(&self, like: Option<&str>, open: Opener) -> Result<(), StackError> {
        let Ok(opened) = open(self.target, Access::ReadOlder, Usage::AsMember).await else { return Ok(()) };
        let there = match self.written_bytes(opened.device.geometry().block_size.bytes() as u64) {
            None => None,
            Some(written) => match self.format(like).filter(|_| written.start == 0) {
                Some(format) => Some(format.to_owned()),
                None => signature_in(&opened, written).await,
            },
        };
        let refused = there.map_or(Ok(()), |there| Err(occupied(self.target, &there)));
        opened.close(refused).await
    }

    /// The format of a plain file, if it is known and another one than `like`.
    fn format(&self, like: Option<&str>) -> Option<&'static str> {
        let path = self.target.path().filter(|path| path.is_file())?;
        file_format(&file_start(path).ok()?).filter(|format| Some(*format) != like)
    }

    /// The bytes of it that are written with the target; `None` if none are.
    fn written_bytes(&self, block_bytes: u64) -> Option<Range<u64>> {
        let all = Some((0, u64::MAX));
        let (first, last) = self.steps.iter().fold(all, |blocks, step| step.below(blocks?, block_bytes))?;
        Some(first.saturating_mul(block_bytes)..last.saturating_add(1).saturating_mul(block_bytes))
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

/// The first signature of a device in these bytes of it.
async fn signature_in(opened: &OpenTarget, written: Range<u64>) -> Option<String> {
    let geometry = opened.device.geometry();
    let (block_bytes, blocks) = (geometry.block_size.bytes() as u64, geometry.capacity_blocks);
    let behind_start = (START_BYTES / block_bytes).min(blocks);
    let first_of_end = blocks.saturating_sub(END_BYTES / block_bytes);
    let mut start = read(opened, 0..behind_start).await;
    let mut end = read(opened, first_of_end..blocks).await;
    keep(&mut start, 0, &written);
    keep(&mut end, first_of_end * block_bytes, &written);
    find(&start, &end, geometry.capacity_bytes()).map(|found| found.to_string())
}

/// Zeroes bytes, the first of which is at `offset`, that do not lie in the range.
fn keep(bytes: &mut [u8], offset: u64, range: &Range<u64>) {
    let within = |at: u64| at.saturating_sub(offset).min(bytes.len() as u64) as usize;
    let (from, to) = (within(range.start), within(range.end));
    bytes[..from].fill(0);
    bytes[to..].fill(0);
}

/// Blocks of a device; zeroes where it cannot be read.
async fn read(opened: &OpenTarget, blocks: Range<u64>) -> Vec<u8> {
    let size = opened.device.geometry().block_size.bytes();
    let read = async |first: u64, blocks: u64| {
        let answer = opened.read(Extent::from_raw(first, blocks).ok()?).await;
        answer.map(|answer| data_of(answer).to_vec()).ok()
    };
    if let Some(bytes) = read(blocks.start, blocks.end - blocks.start).await {
        return bytes;
    }
    // One bad block must not hide what lies beside it.
    let mut bytes = Vec::new();
    for block in blocks {
        bytes.extend(read(block, 1).await.unwrap_or_else(|| vec![0; size]));
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes of each part that are written with a target of blocks of 512 bytes.
    fn written(target: &str) -> Vec<(String, Option<Range<u64>>)> {
        let target: TargetName = target.parse().unwrap();
        let mut parts = Vec::new();
        add_parts(&target, &[], &mut parts);
        parts.iter().map(|part| (part.target.to_string(), part.written_bytes(512))).collect()
    }

    fn part(name: &str, blocks: Option<Range<u64>>) -> (String, Option<Range<u64>>) {
        (name.to_owned(), blocks.map(|blocks| blocks.start * 512..blocks.end.saturating_mul(512)))
    }

    #[test]
    fn a_slice_is_written_where_it_lies_on_what_is_below_all_layers() {
        assert_eq!(written("offset:3..5,raw:a"), [part("raw:a", Some(3..6))]);
        assert_eq!(written("offset:1..1,offset:3..,fault:[read-error%0],raw:a"), [part("raw:a", Some(4..5))]);
        assert_eq!(written("offset:9..,offset:3..5,raw:a"), [part("raw:a", None)]);
        assert_eq!(written("offset:2..,mirror:raw:a,raw:b").len(), 2);
        assert_eq!(written("mirror:raw:a,nbd://host/b,mem:1MiB"), [part("raw:a", Some(0..u64::MAX))]);
    }

    #[test]
    fn members_of_a_stripe_are_written_where_their_chunks_are() {
        let of = |range: &str| {
            let parts = written(&format!("offset:{range},stripe-4KiB-nolabel:raw:a,raw:b,raw:c"));
            parts
                .into_iter()
                .map(|(_, bytes)| bytes.map(|bytes| bytes.start / 512..bytes.end / 512))
                .collect::<Vec<_>>()
        };
        assert_eq!(of("0..7"), [Some(0..8), None, None]);
        assert_eq!(of("9..25"), [Some(8..10), Some(1..8), Some(0..8)]);
        assert_eq!(of("24..47"), [Some(8..16), Some(8..16), Some(8..16)]);
        assert_eq!(of("42..42"), [None, None, Some(10..11)]);
    }

    #[test]
    fn bytes_beside_the_range_are_not_looked_at() {
        let kept = |offset, range| {
            let mut bytes = [1; 4];
            keep(&mut bytes, offset, &range);
            bytes
        };
        assert_eq!(kept(0, 0..u64::MAX), [1; 4]);
        assert_eq!(kept(10, 11..13), [0, 1, 1, 0]);
        assert_eq!(kept(10, 0..10), [0; 4]);
        assert_eq!(kept(10, 14..20), [0; 4]);
    }
}
