//! Both sides of a comparison, and what differs between them: by reading them, or by checksums, which are computed where the
//! blocks are; only blocks with different ones are read then.
//!
//! A region with different checksums is halved down to single blocks. Where both halves differ, digests would soon
//! cost more than the data, so short regions of that kind are read.

use std::cell::Cell;

use futures_util::future::join;
use sealblock_block::{Device, Expectations, Request, RequestKind, Response};
use sealblock_integrity::ChecksumKind;
use sealblock_runtime_memory::Slice;
use sealblock_stack::range::{Run, join_run};
use sealblock_stack::{ByteView, Cause, OpenTarget, StackError, damage, device_error};
use sealblock_units::{BlockSize, Extent};

use super::report::{Unreadable, What};

/// Bytes of the largest region that is summed at once.
pub(super) const REGION_BYTES: u64 = 4 << 20;
/// A region of at most so many bytes is read if both of its halves differ.
const READ_BYTES: u64 = 1 << 20;
/// A region with so many bad blocks is read: halving it would find them again at each step.
const MANY_BAD_BLOCKS: usize = 8;

/// Bytes read from each side at once.
pub(super) const CHUNK_BYTES: u64 = 1 << 20;

/// What is compared with what, in blocks of which size.
pub(super) struct Sides<'a> {
    /// The one side.
    pub a: &'a ByteView,
    /// The other one; zeroes without it.
    pub b: Option<&'a ByteView>,
    /// The larger block size of both.
    pub block: BlockSize,
    /// The first byte that was read and differs.
    pub first: Cell<Option<u64>>,
    /// Bytes that were read of both.
    pub read_bytes: Cell<u64>,
}

/// A side's bytes, and which of its blocks could not be read.
type Read = (Slice, Vec<Run<What>>);

impl Sides<'_> {
    /// The first byte that differs, if it was read: checksums may have named a block before the first one that was.
    pub fn first_byte(&self, first_lba: Option<u64>) -> Option<u64> {
        let block = first_lba? << self.block.shift();
        self.first.get().filter(|byte| (block..block + self.block.bytes() as u64).contains(byte))
    }

    /// The blocks that differ or cannot be read, found by reading both sides.
    pub async fn read_runs(&self, offset: u64, length: u64) -> Result<Vec<Run<What>>, StackError> {
        let mut runs = Vec::new();
        for from in (0..length).step_by(CHUNK_BYTES as usize) {
            let (at, length) = (offset + from, CHUNK_BYTES.min(length - from));
            let other = async {
                match self.b {
                    Some(b) => self.read(b, at, length).await.map(Some),
                    None => Ok(None),
                }
            };
            let (a, b) = join(self.read(self.a, at, length), other).await;
            let ((a, mut lost), b) = (a?, b?);
            let (b, lost_b) = b.unzip();
            lost.extend(lost_b.into_iter().flatten());
            let is_lost = |lba: u64| lost.iter().any(|run| (run.lba..run.end()).contains(&lba));
            let mut found = self.differences(at, &a, b.as_deref(), is_lost);
            found.extend(lost);
            found.sort_by_key(|run| run.lba);
            found.into_iter().for_each(|run| join_run(&mut runs, run));
        }
        Ok(runs)
    }

    /// Reads of one side; what cannot be read is named, in blocks of the comparison.
    async fn read(&self, side: &ByteView, offset: u64, length: u64) -> Result<Read, StackError> {
        let read = side.read_past_damage("compare", offset, length).await?;
        self.read_bytes.set(self.read_bytes.get() + read.data.len() as u64);
        let (mut lost, target) = (Vec::new(), side.opened.target());
        let shift = side.opened.device.geometry().block_size.shift();
        for run in read.lost {
            let (first, last) =
                (run.lba << shift >> self.block.shift(), (run.end() - 1) << shift >> self.block.shift());
            let what = What::Unreadable(Unreadable { target: target.to_string(), why: run.what.why });
            // Two blocks of a side may lie in one of the comparison.
            let first = lost.last().map_or(first, |before: &Run<What>| first.max(before.end()));
            if first <= last {
                join_run(&mut lost, Run::new(first, last + 1 - first, what));
            }
        }
        Ok((read.data, lost))
    }

    /// The blocks of a chunk that differ, but for those that are lost; one comparison finds equal chunks.
    fn differences(&self, offset: u64, a: &[u8], b: Option<&[u8]>, is_lost: impl Fn(u64) -> bool) -> Vec<Run<What>> {
        let mut runs = Vec::new();
        if is_equal(a, b) {
            return runs;
        }
        for (index, a) in a.chunks(self.block.bytes()).enumerate() {
            let at = index * self.block.bytes();
            let b = b.map(|b| &b[at..at + a.len()]);
            let lba = (offset >> self.block.shift()) + index as u64;
            if is_equal(a, b) || is_lost(lba) {
                continue;
            }
            let differs = |at: &usize| a[*at] != b.map_or(0, |b| b[*at]);
            let first = (0..a.len()).find(differs).map(|byte| offset + (at + byte) as u64);
            self.first.set([self.first.get(), first].into_iter().flatten().min());
            join_run(&mut runs, Run::new(lba, 1, What::Differ));
        }
        runs
    }

    /// True if checksums save traffic: a side is remote, and each remote side computes them itself.
    pub fn have_digests(&self) -> bool {
        let remote = || {
            let sides = [Some(self.a), self.b].into_iter().flatten();
            sides.filter(|side| side.opened.received_bytes().is_some()).map(|side| side.opened.device.abilities())
        };
        remote().next().is_some() && remote().all(|side| side.is_native(RequestKind::Checksum))
    }

    /// The blocks of a region that differ or cannot be read.
    pub async fn search(&self, offset: u64, length: u64) -> Result<Vec<Run<What>>, StackError> {
        let mut runs = Vec::new();
        let mut different = Vec::new();
        // Checksums cover whole blocks; a partial block is read.
        let rest = length % self.block.bytes() as u64;
        let length = length - rest;
        if length > 0 {
            different.push((offset, length, self.checksums(offset, length).await?));
        }
        different.retain(|region| region.2 != Checksums::Same);
        while let Some((offset, length, sums)) = different.pop() {
            let blocks = length >> self.block.shift();
            if blocks == 1 {
                match sums {
                    Checksums::Different => {
                        join_run(&mut runs, Run::new(offset >> self.block.shift(), 1, What::Differ))
                    }
                    _ => self.read_into(&mut runs, offset, length).await?,
                }
                continue;
            }
            if matches!(sums, Checksums::Unknown { bad_blocks } if bad_blocks >= MANY_BAD_BLOCKS) {
                // Each half of it would be searched for the same bad blocks again.
                self.read_into(&mut runs, offset, length).await?;
                continue;
            }
            let half = (blocks / 2) << self.block.shift();
            let (first, second) = ((offset, half), (offset + half, length - half));
            let sums = join(self.checksums(first.0, first.1), self.checksums(second.0, second.1)).await;
            match (sums.0?, sums.1?) {
                // A concurrent write, or a wrong checksum: the data that is read decides.
                (Checksums::Same, Checksums::Same) => self.read_into(&mut runs, offset, length).await?,
                (one, other)
                    if one != Checksums::Same && other != Checksums::Same && blocks > 2 && length <= READ_BYTES =>
                {
                    self.read_into(&mut runs, offset, length).await?
                }
                (one, other) => {
                    // Last in, first out: the runs are to be in order.
                    different.extend((other != Checksums::Same).then_some((second.0, second.1, other)));
                    different.extend((one != Checksums::Same).then_some((first.0, first.1, one)));
                }
            }
        }
        if rest > 0 {
            self.read_into(&mut runs, offset + length, rest).await?;
        }
        Ok(runs)
    }

    async fn read_into(&self, runs: &mut Vec<Run<What>>, offset: u64, length: u64) -> Result<(), StackError> {
        self.read_runs(offset, length).await?.into_iter().for_each(|run| join_run(runs, run));
        Ok(())
    }

    /// Compares the checksums of both sides.
    async fn checksums(&self, offset: u64, length: u64) -> Result<Checksums, StackError> {
        let other = async {
            match self.b {
                Some(b) => digest(&b.opened, offset, length).await,
                None => Ok(Ok(SUMMED.of_zeroes(length))),
            }
        };
        let (a, b) = join(digest(&self.a.opened, offset, length), other).await;
        Ok(match (a?, b?) {
            (Ok(a), Ok(b)) if a == b => Checksums::Same,
            (Ok(_), Ok(_)) => Checksums::Different,
            (a, b) => Checksums::Unknown { bad_blocks: a.err().unwrap_or(0).max(b.err().unwrap_or(0)) },
        })
    }
}

/// Whether bytes are the same, or zeroes where there is nothing to compare them with.
fn is_equal(a: &[u8], b: Option<&[u8]>) -> bool {
    match b {
        Some(b) => a == b,
        None => a.iter().fold(0, |seen, byte| seen | byte) == 0,
    }
}

/// The checksums of a region.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Checksums {
    Same,
    Different,
    /// So many blocks of a side cannot be read, so that nothing can be summed.
    Unknown {
        bad_blocks: usize,
    },
}

/// What sides are compared by: of both kinds the one that is least often the same for other data.
const SUMMED: ChecksumKind = ChecksumKind::Crc64Nvme;

/// The checksum of bytes of a target, whose tags are checked on the way; or the number of its blocks that are damaged, if one is.
async fn digest(opened: &OpenTarget, offset: u64, length: u64) -> Result<Result<u64, usize>, StackError> {
    let shift = opened.device.geometry().block_size.shift();
    let extent = Extent::from_raw(offset >> shift, length >> shift)
        .map_err(|error| StackError::new(Cause::Usage, "compare", error))?;
    match opened.device.execute(Request::checksum(extent, SUMMED, Expectations::NONE)).await {
        Ok(Response::Checksum(digested)) => Ok(Ok(digested.value)),
        Ok(_) => unreachable!("a checksum request returns a checksum"),
        Err(error) if damage(&error).is_some() => Ok(Err(error.bad_blocks().map_or(1, |bad| bad.as_slice().len()))),
        Err(error) => Err(device_error("compare", &error)),
    }
}
