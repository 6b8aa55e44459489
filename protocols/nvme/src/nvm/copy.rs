//! Copy: source ranges from the host, one destination (NVM, "Copy command").
//!
//! Descriptor formats 0 (16-bit guard or none) and 1 (32- and 64-bit guards) are known; formats 2 and 3, which copy
//! from other namespaces, are refused.

use sealblock_integrity::{GuardKind, PiFormat};
use sealblock_units::{Extent, Lba};
use zerocopy::little_endian::U32;

use super::blocks::{fits, nlb};
use super::protection::{ProtectionInfo, TagSpace};
use crate::command::Command;
use crate::error::Invalid;
use crate::opcodes::IoOpcode;
use crate::wire::{Count8, Field, bit, bits, codes, layout};

codes! {
    /// The form of the source ranges (NVM, Copy, field CDFS and DESFMT).
    pub enum CopyDescriptorFormat: u8 {
        /// 32 bytes each, tags of the 16-bit guard.
        Format0 = 0,
        /// 40 bytes each, tags of the 32- and 64-bit guards.
        Format1 = 1,
    }
}

/// A Copy command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopyCommand {
    /// SDLBA: where the first source range goes; the others follow.
    pub destination: Lba,
    /// NR: how many source ranges the data has.
    pub ranges: Count8,
    /// DESFMT: their form.
    pub format: CopyDescriptorFormat,
    /// PRINFOR and STCR for reading; the tags are those of each source range.
    pub read: ProtectionInfo,
    /// PRINFOW, STCW and the tags for writing.
    pub write: ProtectionInfo,
    /// FUA: the copy is on non-volatile media before the command completes.
    pub force_unit_access: bool,
    /// LR: the controller should limit its retries.
    pub limited_retry: bool,
}

/// A source range: blocks, and the tags they are expected to have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopyRange {
    /// SLBA and NLB; host side at most [`super::MAX_BLOCKS`].
    pub extent: Extent,
    /// Storage, reference and application tag, with PRCHK and STC of the command.
    pub protection: ProtectionInfo,
}

/// What a namespace allows in one command (NVM, Identify Namespace: MSSRL, MCL, MSRC).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopyLimits {
    /// MSSRL: blocks in one source range.
    pub range_blocks: u16,
    /// MCL: blocks in all of them.
    pub total_blocks: u32,
    /// MSRC: source ranges.
    pub ranges: Count8,
}

layout! {
    /// Source range entry, descriptor format 0.
    pub struct RangeFormat0[32] {
        /// First block.
        8 => slba: u64,
        /// Number of blocks, 0's based.
        16 => nlb: u16,
        /// Expected storage and reference tag.
        24 => elbt: u32,
        /// Expected application tag.
        28 => elbat: u16,
        /// Its mask.
        30 => elbatm: u16,
    }
}

layout! {
    /// Source range entry, descriptor format 1.
    pub struct RangeFormat1[40] {
        /// First block.
        8 => slba: u64,
        /// Number of blocks, 0's based.
        16 => nlb: u16,
        /// Expected storage and reference tag, most significant byte first, right-aligned.
        26 => elbt: [u8; 10],
        /// Expected application tag.
        36 => elbat: u16,
        /// Its mask.
        38 => elbatm: u16,
    }
}

impl CopyDescriptorFormat {
    /// The format that a namespace with this protection information takes, 0h where it has none.
    pub const fn of(format: Option<PiFormat>) -> CopyDescriptorFormat {
        match format {
            Some(format) => match format.guard() {
                GuardKind::Crc16 | GuardKind::IpChecksum => CopyDescriptorFormat::Format0,
                GuardKind::Crc32c | GuardKind::Crc64 => CopyDescriptorFormat::Format1,
            },
            None => CopyDescriptorFormat::Format0,
        }
    }

    /// Bytes of one source range.
    pub const fn entry_bytes(self) -> usize {
        match self {
            CopyDescriptorFormat::Format0 => RangeFormat0::BYTES,
            CopyDescriptorFormat::Format1 => RangeFormat1::BYTES,
        }
    }
}

impl CopyCommand {
    /// Bytes of the list of source ranges.
    pub fn data_bytes(&self) -> usize {
        usize::from(self.ranges.get()) * self.format.entry_bytes()
    }

    /// Whether the descriptor format goes with the namespace's; without protection information either does.
    pub(super) fn validate(&self, format: Option<PiFormat>) -> Result<(), Invalid> {
        let fits = format.is_none() || self.format == CopyDescriptorFormat::of(format);
        if fits { Ok(()) } else { Err(Invalid::DescriptorFormat) }
    }

    /// The source ranges, once they are known to keep to the limits and to be in a namespace of this size, together
    /// with the blocks they go to.
    pub fn parse(
        &self,
        data: &[u8],
        capacity_blocks: u64,
        limits: &CopyLimits,
    ) -> Result<(Extent, Vec<CopyRange>), Invalid> {
        let entries = usize::from(self.ranges.get());
        if self.ranges > limits.ranges {
            return Err(Invalid::Entries { entries, max: usize::from(limits.ranges.get()) });
        }
        let short = Invalid::DataLength { needed_bytes: self.data_bytes() as u64, got_bytes: data.len() as u64 };
        let list = data.get(..self.data_bytes()).ok_or(short)?;
        let mut ranges = Vec::with_capacity(entries);
        let mut total_blocks = 0;
        for entry in list.chunks_exact(self.format.entry_bytes()) {
            let range = CopyRange::decode(self.format, entry, &self.read)?;
            fits(range.extent, capacity_blocks)?;
            at_most(range.extent.len(), u64::from(limits.range_blocks))?;
            total_blocks += range.extent.len();
            ranges.push(range);
        }
        at_most(total_blocks, u64::from(limits.total_blocks))?;
        let destination = Extent::from_raw(self.destination.get(), total_blocks)?;
        fits(destination, capacity_blocks)?;
        Ok((destination, ranges))
    }

    /// The data of the command: its source ranges. Fails if their number is not that of the command.
    pub fn encode_ranges(&self, ranges: &[CopyRange]) -> Result<Vec<u8>, Invalid> {
        let max = usize::from(self.ranges.get());
        if ranges.len() != max {
            return Err(Invalid::Entries { entries: ranges.len(), max });
        }
        let mut data = Vec::with_capacity(self.data_bytes());
        for range in ranges {
            range.encode(self.format, &mut data)?;
        }
        Ok(data)
    }

    pub(super) fn decode(command: &Command) -> Result<CopyCommand, Invalid> {
        let cdw12 = command.cdw12.get();
        let format = CopyDescriptorFormat::from_code(bits(cdw12, 8, 4) as u8);
        let read = ProtectionInfo { stc: bit(cdw12, 25), ..ProtectionInfo::NONE.with_prinfo(cdw12 >> 12) };
        Ok(CopyCommand {
            destination: Lba::new(command.cdw10_11()),
            ranges: Count8::saturating((cdw12 as u16 & 0xFF) + 1),
            format: format.ok_or(Invalid::field("DESFMT", 12, 8))?,
            read,
            write: ProtectionInfo::decode(command),
            force_unit_access: bit(cdw12, 30),
            limited_retry: bit(cdw12, 31),
        })
    }

    pub(super) fn encode(&self, nsid: u32) -> Result<Command, Invalid> {
        let mut command = Command::new(IoOpcode::Copy.code(), nsid);
        command.set_cdw10_11(self.destination.get());
        let format = u32::from(self.format.code());
        let flags = u32::from(self.force_unit_access) << 30 | u32::from(self.limited_retry) << 31;
        let read = self.read.prinfo() << 12 | u32::from(self.read.stc) << 25;
        command.cdw12 = U32::new(u32::from(self.ranges.get() - 1) | format << 8 | read | flags);
        self.write.encode(&mut command);
        Ok(command)
    }
}

impl CopyRange {
    fn decode(format: CopyDescriptorFormat, entry: &[u8], read: &ProtectionInfo) -> Result<CopyRange, Invalid> {
        let (slba, nlb, space, lbat, lbatm) = match format {
            CopyDescriptorFormat::Format0 => {
                let range = RangeFormat0::decode(entry)?;
                (range.slba, range.nlb, u128::from(range.elbt), range.elbat, range.elbatm)
            }
            CopyDescriptorFormat::Format1 => {
                let range = RangeFormat1::decode(entry)?;
                let space = range.elbt.iter().fold(0, |space, &byte| space << 8 | u128::from(byte));
                (range.slba, range.nlb, space, range.elbat, range.elbatm)
            }
        };
        let protection = ProtectionInfo { space: TagSpace::from_bits(space), lbat, lbatm, ..*read };
        Ok(CopyRange { extent: Extent::from_raw(slba, u64::from(nlb) + 1)?, protection })
    }

    fn encode(&self, format: CopyDescriptorFormat, data: &mut Vec<u8>) -> Result<(), Invalid> {
        let (slba, nlb) = (self.extent.start().get(), nlb(self.extent)? as u16);
        let (elbat, elbatm) = (self.protection.lbat, self.protection.lbatm);
        let space = self.protection.space.bits();
        match format {
            CopyDescriptorFormat::Format0 => {
                data.extend(RangeFormat0 { slba, nlb, elbt: space as u32, elbat, elbatm }.encode());
            }
            CopyDescriptorFormat::Format1 => {
                let elbt = <[u8; 10]>::get(&space.to_be_bytes()[6..]);
                data.extend(RangeFormat1 { slba, nlb, elbt, elbat, elbatm }.encode());
            }
        }
        Ok(())
    }
}

fn at_most(blocks: u64, max: u64) -> Result<(), Invalid> {
    if blocks > max { Err(Invalid::TooManyBlocks { blocks, max }) } else { Ok(()) }
}
