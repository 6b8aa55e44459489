//! The I/O commands of the NVM command set, decoded by a target and encoded by a host.
//!
//! [`IoCommand::decode`] needs nothing but the 64 bytes: it gives an [`Extent`] for the 0's based NLB, and keeps the
//! protection fields in the raw form of the wire, because what they mean depends on the namespace's format.
//! [`ProtectionInfo`] tells it once the format is known. Directives and access frequency hints are advice and are
//! neither decoded nor sent.

mod copy;
mod dsm;
mod lba_status;
mod protection;

pub use copy::{CopyCommand, CopyDescriptorFormat, CopyLimits, CopyRange};
pub use dsm::{DatasetManagement, DsmAttributes, DsmRange};
pub use lba_status::{GetLbaStatus, LbaStatusAction, LbaStatusDescriptor, LbaStatusFlags, LbaStatusList};
pub use protection::{Prchk, ProtectionInfo, TagSpace};

use sealblock_integrity::PiFormat;
use sealblock_units::{BlockCount, Extent, Lba};
use zerocopy::little_endian::U32;

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

/// An I/O command of the NVM command set, decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IoCommand {
    /// Flush: what was completed before goes to non-volatile media.
    Flush,
    /// Write: data from the host.
    Write(BlockCommand),
    /// Read: data to the host.
    Read(BlockCommand),
    /// Write Uncorrectable: these blocks read as errors until they are written.
    WriteUncorrectable(Extent),
    /// Compare: data from the host must equal the blocks.
    Compare(BlockCommand),
    /// Write Zeroes: no data.
    WriteZeroes(WriteZeroes),
    /// Dataset Management: a list of ranges from the host.
    DatasetManagement(DatasetManagement),
    /// Verify: as Read, without moving data.
    Verify(BlockCommand),
    /// Copy: a list of source ranges from the host.
    Copy(CopyCommand),
    /// Checksum: as Verify, and the completion has the CRC-64/NVME of the blocks' data. See [`crate::extensions`].
    Checksum(BlockCommand),
}

impl BlockCommand {
    /// The command for these blocks, without checks and options.
    pub const fn new(extent: Extent) -> BlockCommand {
        let protection = ProtectionInfo::NONE;
        BlockCommand { extent, protection, force_unit_access: false, limited_retry: false }
    }

    fn decode(command: &Command) -> Result<BlockCommand, Invalid> {
        let cdw12 = command.cdw12.get();
        Ok(BlockCommand {
            extent: extent(command)?,
            protection: ProtectionInfo::decode(command),
            force_unit_access: bit(cdw12, 30),
            limited_retry: bit(cdw12, 31),
        })
    }

    fn encode(&self, opcode: IoOpcode, nsid: u32) -> Result<Command, Invalid> {
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

impl IoCommand {
    /// The command, or why its 64 bytes are none. Reserved fields are not looked at, as the specification allows.
    pub fn decode(command: &Command) -> Result<IoCommand, Invalid> {
        let refused = Invalid::Opcode(command.opcode);
        match IoOpcode::from_code(command.opcode).ok_or(refused)? {
            IoOpcode::Flush => Ok(IoCommand::Flush),
            IoOpcode::Write => BlockCommand::decode(command).map(IoCommand::Write),
            IoOpcode::Read => BlockCommand::decode(command).map(IoCommand::Read),
            IoOpcode::WriteUncorrectable => extent(command).map(IoCommand::WriteUncorrectable),
            IoOpcode::Compare => BlockCommand::decode(command).map(IoCommand::Compare),
            IoOpcode::WriteZeroes => WriteZeroes::decode(command).map(IoCommand::WriteZeroes),
            IoOpcode::DatasetManagement => Ok(IoCommand::DatasetManagement(DatasetManagement::decode(command))),
            IoOpcode::Verify => BlockCommand::decode(command).map(IoCommand::Verify),
            IoOpcode::Copy => CopyCommand::decode(command).map(IoCommand::Copy),
            IoOpcode::Checksum => BlockCommand::decode(command).map(IoCommand::Checksum),
            IoOpcode::ReservationRegister
            | IoOpcode::ReservationReport
            | IoOpcode::ReservationAcquire
            | IoOpcode::ReservationRelease
            | IoOpcode::Fabrics => Err(refused),
        }
    }

    /// The submission queue entry for namespace `nsid`, without identifier and data pointer. Fails if there are more
    /// blocks or ranges than its fields can say.
    pub fn encode(&self, nsid: u32) -> Result<Command, Invalid> {
        match self {
            IoCommand::Flush => Ok(Command::new(IoOpcode::Flush.code(), nsid)),
            IoCommand::Write(blocks) => blocks.encode(IoOpcode::Write, nsid),
            IoCommand::Read(blocks) => blocks.encode(IoOpcode::Read, nsid),
            IoCommand::WriteUncorrectable(extent) => {
                BlockCommand::new(*extent).encode(IoOpcode::WriteUncorrectable, nsid)
            }
            IoCommand::Compare(blocks) => blocks.encode(IoOpcode::Compare, nsid),
            IoCommand::WriteZeroes(zeroes) => zeroes.encode(nsid),
            IoCommand::DatasetManagement(dsm) => dsm.encode(nsid),
            IoCommand::Verify(blocks) => blocks.encode(IoOpcode::Verify, nsid),
            IoCommand::Copy(copy) => copy.encode(nsid),
            IoCommand::Checksum(blocks) => blocks.encode(IoOpcode::Checksum, nsid),
        }
    }

    /// Whether a namespace of this size and format takes the command, as far as its 64 bytes tell; lists of ranges
    /// are looked at when they are there.
    pub fn validate(&self, capacity_blocks: u64, format: Option<PiFormat>) -> Result<(), Invalid> {
        match self {
            IoCommand::Flush | IoCommand::DatasetManagement(_) => Ok(()),
            // PRACT of Compare, Verify and Checksum inserts and strips nothing; hosts that always set it send data without tags.
            IoCommand::Read(blocks)
            | IoCommand::Write(blocks)
            | IoCommand::Compare(blocks)
            | IoCommand::Verify(blocks)
            | IoCommand::Checksum(blocks) => blocks.validate(capacity_blocks, format),
            IoCommand::WriteZeroes(zeroes) if zeroes.whole_namespace => Ok(()),
            IoCommand::WriteZeroes(zeroes) => zeroes.blocks.validate(capacity_blocks, format),
            IoCommand::WriteUncorrectable(extent) => fits(*extent, capacity_blocks),
            IoCommand::Copy(copy) => copy.validate(format),
        }
    }
}

impl WriteZeroes {
    /// DEAC in command dword 12.
    const DEAC: u32 = 1 << 25;
    /// NSZ in command dword 12.
    const NSZ: u32 = 1 << 23;

    fn decode(command: &Command) -> Result<WriteZeroes, Invalid> {
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

    fn encode(&self, nsid: u32) -> Result<Command, Invalid> {
        let mut command = self.blocks.encode(IoOpcode::WriteZeroes, nsid)?;
        let flag = |set, bits| if set { bits } else { 0 };
        command.cdw12 |= U32::new(flag(self.deallocate, Self::DEAC) | flag(self.whole_namespace, Self::NSZ));
        Ok(command)
    }
}

/// The blocks that SLBA (dwords 10 and 11) and NLB (dword 12 bits 15:0, 0's based) name.
fn extent(command: &Command) -> Result<Extent, Invalid> {
    let blocks = (command.cdw12.get() & 0xFFFF) + 1;
    let blocks = BlockCount::new(blocks).expect("a 16-bit number and one is not 0");
    Ok(Extent::new(Lba::new(command.cdw10_11()), blocks)?)
}

/// The 0's based NLB of an extent.
fn nlb(extent: Extent) -> Result<u32, Invalid> {
    match extent.blocks().get() {
        blocks if blocks > MAX_BLOCKS => {
            Err(Invalid::TooManyBlocks { blocks: extent.len(), max: u64::from(MAX_BLOCKS) })
        }
        blocks => Ok(blocks - 1),
    }
}

/// Refuses an extent that goes past the end of a namespace.
fn fits(extent: Extent, capacity_blocks: u64) -> Result<(), Invalid> {
    if extent.fits(capacity_blocks) { Ok(()) } else { Err(Invalid::PastEnd { extent, capacity_blocks }) }
}

#[cfg(test)]
mod tests;
