//! Reading on behind blocks that cannot be read: what `rescue`, `copy --salvage` and `compare` do.
//!
//! Unreadable data is never passed on: zeroes take its place, and the blocks are named; the caller decides what to do.

use std::collections::BTreeMap;

use sealblock_block::{BadBlock, Device, Error, ErrorKind as BlockFailure};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::Extent;
use serde::Serialize;

use crate::error::StackError;
use crate::failures::{device_error, is_unsettled};
use crate::opened::{OpenTarget, data_of};
use crate::range::{Run, join_run};
use crate::whole::ByteView;

/// Why a block cannot be read: the field of `verify` that is wrong, or what the medium said.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Lost {
    /// A short text.
    pub why: String,
}

/// What could be read: zeroes where it could not, and where that is, in blocks of the device.
pub struct Salvaged {
    /// The data.
    pub data: Slice,
    /// Blocks that could not be read, in order.
    pub lost: Vec<Run<Lost>>,
}

impl OpenTarget {
    /// Reads blocks. Where that fails, the blocks that the error names are lost, and those between them are read; where it names
    /// none, each is read by itself.
    ///
    /// # Errors
    /// What keeps any block from being read, and is not its own damage.
    pub async fn read_past_damage(&self, doing: &str, extent: Extent) -> Result<Salvaged, StackError> {
        let size = self.device.geometry().block_size;
        let (mut lost, mut left): (BTreeMap<u64, String>, Vec<Extent>) = (BTreeMap::new(), vec![extent]);
        let mut data: Option<Buffer> = None;
        while let Some(run) = left.pop() {
            let error = match self.read(run).await {
                Ok(answer) if run == extent => return Ok(Salvaged { data: data_of(answer), lost: Vec::new() }),
                Ok(answer) => {
                    let from = ((run.start().get() - extent.start().get()) as usize) << size.shift();
                    let data = data.get_or_insert_with(|| Buffer::zeroed(extent.bytes(size) as usize));
                    let read = data_of(answer);
                    data[from..from + read.len()].copy_from_slice(&read);
                    continue;
                }
                Err(error) => error,
            };
            if is_unsettled(&error) {
                return Err(device_error(doing, &error));
            }
            let named = named_blocks(&error, run);
            match (named.is_empty(), run.len()) {
                (true, 1) => {
                    let why = damage(&error).ok_or_else(|| device_error(doing, &error))?;
                    lost.insert(run.start().get(), why);
                }
                (true, _) => left.extend(run.iter().map(Extent::one)),
                (false, _) => {
                    left.extend(runs_between(run, &named));
                    lost.extend(named);
                }
            }
        }
        let mut runs = Vec::new();
        lost.into_iter().for_each(|(lba, why)| join_run(&mut runs, Run::new(lba, 1, Lost { why })));
        let data = data.unwrap_or_else(|| Buffer::zeroed(extent.bytes(size) as usize));
        Ok(Salvaged { data: data.freeze(), lost: runs })
    }
}

/// The bad blocks of `run` that an error names, each with what is wrong with it.
fn named_blocks(error: &Error, run: Extent) -> BTreeMap<u64, String> {
    let named = error.bad_blocks().map_or(&[][..], |bad_blocks| bad_blocks.as_slice()).iter();
    let first_cause = |bad: &BadBlock| (bad.lba.get(), bad.cause.as_str().to_owned());
    // Of several entries for one block the first counts.
    named.rev().filter(|bad| run.contains(bad.lba)).map(first_cause).collect()
}

/// The blocks of `run` between those that are lost, as few runs.
fn runs_between(run: Extent, lost: &BTreeMap<u64, String>) -> Vec<Extent> {
    let (mut runs, mut from) = (Vec::new(), run.start().get());
    for stop in lost.keys().copied().chain([run.last().get() + 1]) {
        runs.extend(Extent::from_raw(from, stop.saturating_sub(from)).ok());
        from = stop + 1;
    }
    runs
}

impl ByteView {
    /// As [`ByteView::read`], with zeroes where blocks cannot be read, and where that is.
    ///
    /// # Errors
    /// As [`OpenTarget::read_past_damage`].
    pub async fn read_past_damage(&self, doing: &str, offset: u64, length: u64) -> Result<Salvaged, StackError> {
        let mut lost = Vec::new();
        let data = self
            .assemble(offset, length, async |blocks: Extent| {
                let salvaged = self.opened.read_past_damage(doing, blocks).await?;
                lost = salvaged.lost;
                Ok(salvaged.data)
            })
            .await?;
        Ok(Salvaged { data, lost })
    }
}

/// What is wrong with blocks that were read, if the error is theirs.
pub fn damage(error: &Error) -> Option<String> {
    match error.kind() {
        BlockFailure::Integrity(faults) => {
            Some(faults.as_slice().first().map_or("media", |fault| fault.cause.as_str()).to_owned())
        }
        BlockFailure::Media { reason } => Some(reason.clone()),
        _ => None,
    }
}

/// The same runs as whole groups of `group` blocks, as far as `end`: what is lost where blocks can only be lost together. Groups
/// that follow one another are one run, for the reason of its first block.
pub fn in_groups(lost: Vec<Run<Lost>>, group: u64, end: u64) -> Vec<Run<Lost>> {
    let mut wide: Vec<Run<Lost>> = Vec::new();
    for run in lost {
        let (first, behind) = (run.lba / group * group, run.end().next_multiple_of(group).min(end));
        match wide.last_mut() {
            Some(last) if first < last.end() => last.blocks = last.blocks.max(behind - last.lba),
            _ => join_run(&mut wide, Run::new(first, behind - first, run.what)),
        }
    }
    wide
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;
    use crate::opened::info::TargetInfo;
    use futures_util::FutureExt;
    use sealblock_block::{Abilities, Durability, Gate, Geometry, Outcome, Request, RequestKind};
    use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, Sealed, Tags};
    use sealblock_media_memory::{Corruption, MemoryDevice};
    use sealblock_units::{BlockSize, Lba};

    /// Memory that counts reads, and names no bad blocks if it is mute.
    struct Counted {
        memory: Gate<MemoryDevice>,
        reads: Rc<Cell<u64>>,
        is_mute: bool,
    }

    impl Device for Counted {
        fn geometry(&self) -> &Geometry {
            self.memory.geometry()
        }

        fn abilities(&self) -> Abilities {
            self.memory.abilities()
        }

        async fn execute(&self, request: Request) -> Outcome {
            self.reads.set(self.reads.get() + u64::from(request.kind() == RequestKind::Read));
            let outcome = self.memory.execute(request).await;
            outcome.map_err(|error| match self.is_mute {
                true => BlockFailure::Media { reason: "a block".to_owned() }.into(),
                false => error,
            })
        }
    }

    /// 64 blocks, each with its number in all bytes, of which these are bad; read past the damage, and by how many reads.
    fn read_with(bad: &[u64], is_mute: bool) -> (Salvaged, u64) {
        let format = PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type1);
        let memory = Gate::new("memory", MemoryDevice::new(BlockSize::B4096, 64, Some(format)));
        let extent = Extent::from_raw(0, 64).unwrap();
        let data: Vec<u8> = (0..64).flat_map(|lba| [lba + 1; 4096]).collect();
        let data = Sealed::seal(Slice::copy_from(&data), BlockSize::B4096, Some(format), &Tags::default());
        memory.execute(Request::write(extent, data, Durability::Volatile)).now_or_never().unwrap().unwrap();
        for lba in bad {
            assert!(memory.device().damage(Lba::new(*lba), Corruption::Data { at: 9, mask: 1 }));
        }
        let reads = Rc::new(Cell::new(0));
        let device = Counted { memory, reads: reads.clone(), is_mute };
        let target = "mem:256KiB".parse().unwrap();
        let opened = OpenTarget::new(&target, device, TargetInfo::plain("memory"), Vec::new());
        let read = opened.read_past_damage("read", extent).now_or_never().unwrap().unwrap();
        (read, reads.get())
    }

    #[test]
    fn blocks_that_are_named_bad_are_read_once_and_those_between_them_together() {
        let every_second: Vec<u64> = (0..64).step_by(2).collect();
        for (bad, is_mute, most) in [
            (&[][..], false, 1),
            (&[7], false, 3),
            (&[0, 1, 2, 30, 63], false, 3),
            (&every_second, false, 33),
            // One that names none is read block by block.
            (&[7, 30], true, 65),
        ] {
            let (Salvaged { data, lost }, reads) = read_with(bad, is_mute);
            assert_eq!(reads, most, "{bad:?}");
            for (lba, block) in (0..64).zip(data.chunks(4096)) {
                let expected = if bad.contains(&lba) { 0 } else { lba as u8 + 1 };
                assert!(block.iter().all(|byte| *byte == expected), "block {lba}");
            }
            let lost: Vec<u64> = lost.iter().flat_map(|run| run.lba..run.end()).collect();
            assert_eq!(lost, bad);
        }
    }

    #[test]
    fn blocks_that_can_only_be_lost_together_are() {
        let run = |lba, blocks, why: &str| Run::new(lba, blocks, Lost { why: why.to_owned() });
        let lost = vec![run(9, 2, "guard"), run(13, 1, "media"), run(17, 1, "guard"), run(35, 1, "media")];
        let wide = in_groups(lost.clone(), 8, 38);
        assert_eq!(wide, [run(8, 16, "guard"), run(32, 6, "media")]);
        assert_eq!(in_groups(lost.clone(), 1, 38), lost);
    }
}
