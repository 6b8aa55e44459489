//! Commands for one range of blocks, with or without protection information: Read, Write, Compare, Verify, Checksum, Write
//! Zeroes (NVM, "I/O Commands").

use sealblock_integrity::{ChecksumKind, PiFormat};
use sealblock_units::{BlockCount, Extent, Lba};
use zerocopy::little_endian::U32;

use super::protection::ProtectionInfo;
use crate::command::Command;
use crate::error::Invalid;
use crate::opcodes::IoOpcode;
use crate::wire::bit;

/// The largest number of blocks that the 16-bit 0's based field NLB can name.
pub const MAX_BLOCKS: u32 = 1 << 16;

/// The fields that Read, Write, Compare, Verify, Checksum and Write Zeroes share (NVM, "I/O Commands").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockCommand {
    /// SLBA and NLB: the blocks. Host side: at most [`MAX_BLOCKS`] of them.
    pub extent: Extent,
    /// PRINFO, STC and the tags.
    pub protection: ProtectionInfo,
    /// FUA: the data is on non-volatile media before the command completes; reads come from there.
    pub force_unit_access: bool,
    /// LR: the controller should limit its retries.
    pub limited_retry: bool,
}

/// A Write Zeroes command (NVM, "Write Zeroes command").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WriteZeroes {
    /// The blocks and the protection information they get.
    pub blocks: BlockCommand,
    /// DEAC: the controller should deallocate the blocks.
    pub deallocate: bool,
    /// NSZ: all blocks of the namespace are meant. The extent means nothing, and decodes as block 0.
    pub whole_namespace: bool,
}

/// A Checksum command, see [`crate::extensions`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Checksum {
    /// The blocks and the checks, as in Verify.
    pub blocks: BlockCommand,
    /// CSK: the checksum that is computed.
    pub kind: ChecksumKind,
}

impl BlockCommand {
    /// The command for these blocks, without checks and options.
    pub const fn new(extent: Extent) -> BlockCommand {
        let protection = ProtectionInfo::NONE;
        BlockCommand { extent, protection, force_unit_access: false, limited_retry: false }
    }

    pub(super) fn decode(command: &Command) -> Result<BlockCommand, Invalid> {
        let cdw12 = command.cdw12.get();
        Ok(BlockCommand {
            extent: extent(command)?,
            protection: ProtectionInfo::decode(command),
            force_unit_access: bit(cdw12, 30),
            limited_retry: bit(cdw12, 31),
        })
    }

    pub(super) fn encode(&self, opcode: IoOpcode, nsid: u32) -> Result<Command, Invalid> {
        let mut command = Command::new(opcode.code(), nsid);
        command.set_cdw10_11(self.extent.start().get());
        let flags = u32::from(self.force_unit_access) << 30 | u32::from(self.limited_retry) << 31;
        command.cdw12 = U32::new(nlb(self.extent)? | flags);
        self.protection.encode(&mut command);
        Ok(command)
    }

    /// Whether a namespace of this size and format takes the command: the range lies in it, and the protection fields
    /// fit the format (see [`ProtectionInfo::validate`]).
    pub fn validate(&self, capacity_blocks: u64, format: Option<PiFormat>) -> Result<(), Invalid> {
        fits(self.extent, capacity_blocks)?;
        self.protection.validate(format, self.extent.start())
    }
}

impl WriteZeroes {
    /// DEAC in command dword 12.
    const DEAC: u32 = 1 << 25;
    /// NSZ in command dword 12.
    const NSZ: u32 = 1 << 23;

    pub(super) fn decode(command: &Command) -> Result<WriteZeroes, Invalid> {
        let cdw12 = command.cdw12.get();
        let (deallocate, whole_namespace) = (cdw12 & Self::DEAC != 0, cdw12 & Self::NSZ != 0);
        let mut command = *command;
        if whole_namespace {
            // SLBA and NLB mean nothing then, so they must not make the command fail either.
            command.set_cdw10_11(0);
            command.cdw12 &= U32::new(0xFFFF_0000);
        }
        Ok(WriteZeroes { blocks: BlockCommand::decode(&command)?, deallocate, whole_namespace })
    }

    pub(super) fn encode(&self, nsid: u32) -> Result<Command, Invalid> {
        let mut command = self.blocks.encode(IoOpcode::WriteZeroes, nsid)?;
        let flag = |set, bits| if set { bits } else { 0 };
        command.cdw12 |= U32::new(flag(self.deallocate, Self::DEAC) | flag(self.whole_namespace, Self::NSZ));
        Ok(command)
    }
}

impl Checksum {
    /// CSK of a kind, in command dword 13.
    const fn code(kind: ChecksumKind) -> u32 {
        match kind {
            ChecksumKind::Crc64Nvme => 0,
            ChecksumKind::Crc32c => 1,
        }
    }

    pub(super) fn decode(command: &Command) -> Result<Checksum, Invalid> {
        let code = command.cdw13.get();
        let kind = ChecksumKind::ALL.into_iter().find(|kind| Checksum::code(*kind) == code).ok_or(Checksum::UNKNOWN)?;
        Ok(Checksum { blocks: BlockCommand::decode(command)?, kind })
    }

    pub(super) fn encode(&self, nsid: u32) -> Result<Command, Invalid> {
        let mut command = self.blocks.encode(IoOpcode::Checksum, nsid)?;
        command.cdw13 = U32::new(Checksum::code(self.kind));
        Ok(command)
    }

    /// Why a kind that is unknown, or that a namespace does not have, is refused.
    pub const UNKNOWN: Invalid = Invalid::field("CSK", 13, 0);

    /// Dwords 0 and 1 of the completion for this checksum of the data.
    pub const fn result(&self, checksum: u64) -> u64 {
        match self.kind {
            ChecksumKind::Crc64Nvme => checksum,
            ChecksumKind::Crc32c => checksum & 0xFFFF_FFFF | (Checksum::code(self.kind) as u64) << 32,
        }
    }

    /// The checksum in dwords 0 and 1 of a completion with success; `None` if it is of another kind, as a target that does not know
    /// the kind returns it.
    pub fn checksum(&self, result: u64) -> Option<u64> {
        let checksum = match self.kind {
            ChecksumKind::Crc64Nvme => result,
            ChecksumKind::Crc32c => result & 0xFFFF_FFFF,
        };
        (self.result(checksum) == result).then_some(checksum)
    }
}

/// The blocks that SLBA (dwords 10 and 11) and NLB (dword 12 bits 15:0, 0's based) name.
pub(super) fn extent(command: &Command) -> Result<Extent, Invalid> {
    let blocks = (command.cdw12.get() & 0xFFFF) + 1;
    let blocks = BlockCount::new(blocks).expect("a 16-bit number and one is not 0");
    Ok(Extent::new(Lba::new(command.cdw10_11()), blocks)?)
}

/// The 0's based NLB of an extent.
pub(super) fn nlb(extent: Extent) -> Result<u32, Invalid> {
    match extent.blocks().get() {
        blocks if blocks > MAX_BLOCKS => {
            Err(Invalid::TooManyBlocks { blocks: extent.len(), max: u64::from(MAX_BLOCKS) })
        }
        blocks => Ok(blocks - 1),
    }
}

/// Refuses an extent that goes past the end of a namespace.
pub(super) fn fits(extent: Extent, capacity_blocks: u64) -> Result<(), Invalid> {
    if extent.fits(capacity_blocks) { Ok(()) } else { Err(Invalid::PastEnd { extent, capacity_blocks }) }
}
