//! The I/O commands of the NVM command set, decoded by a target and encoded by a host.
//!
//! [`IoCommand::decode`] needs nothing but the 64 bytes: it gives an [`Extent`] for the 0's based NLB, and keeps the
//! protection fields in the raw form of the wire, because what they mean depends on the namespace's format.
//! [`ProtectionInfo`] tells it once the format is known. Directives and access frequency hints are advice and are
//! neither decoded nor sent.

mod blocks;
mod copy;
mod dsm;
mod lba_status;
mod protection;

pub use blocks::{BlockCommand, Checksum, MAX_BLOCKS, WriteZeroes};
pub use copy::{CopyCommand, CopyDescriptorFormat, CopyLimits, CopyRange};
pub use dsm::{DatasetManagement, DsmAttributes, DsmRange};
pub use lba_status::{GetLbaStatus, LbaStatusAction, LbaStatusDescriptor, LbaStatusFlags, LbaStatusList};
pub use protection::{Prchk, ProtectionInfo, TagSpace};

use sealblock_integrity::PiFormat;
use sealblock_units::Extent;

use crate::command::Command;
use crate::error::Invalid;
use crate::opcodes::IoOpcode;
use blocks::{extent, fits};

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
    /// Checksum: as Verify, and the completion has a checksum of the blocks' data. See [`crate::extensions`].
    Checksum(Checksum),
}

impl IoCommand {
    /// The command, or why its 64 bytes are none. Reserved fields are not looked at, as the specification allows.
    pub fn decode(command: &Command) -> Result<IoCommand, Invalid> {
        match IoOpcode::from_code(command.opcode).ok_or(Invalid::Opcode(command.opcode))? {
            IoOpcode::Flush => Ok(IoCommand::Flush),
            IoOpcode::Write => BlockCommand::decode(command).map(IoCommand::Write),
            IoOpcode::Read => BlockCommand::decode(command).map(IoCommand::Read),
            IoOpcode::WriteUncorrectable => extent(command).map(IoCommand::WriteUncorrectable),
            IoOpcode::Compare => BlockCommand::decode(command).map(IoCommand::Compare),
            IoOpcode::WriteZeroes => WriteZeroes::decode(command).map(IoCommand::WriteZeroes),
            IoOpcode::DatasetManagement => Ok(IoCommand::DatasetManagement(DatasetManagement::decode(command))),
            IoOpcode::Verify => BlockCommand::decode(command).map(IoCommand::Verify),
            IoOpcode::Copy => CopyCommand::decode(command).map(IoCommand::Copy),
            IoOpcode::Checksum => Checksum::decode(command).map(IoCommand::Checksum),
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
            IoCommand::Checksum(checksum) => checksum.encode(nsid),
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
            | IoCommand::Checksum(Checksum { blocks, .. }) => blocks.validate(capacity_blocks, format),
            IoCommand::WriteZeroes(zeroes) if zeroes.whole_namespace => Ok(()),
            IoCommand::WriteZeroes(zeroes) => zeroes.blocks.validate(capacity_blocks, format),
            IoCommand::WriteUncorrectable(extent) => fits(*extent, capacity_blocks),
            IoCommand::Copy(copy) => copy.validate(format),
        }
    }
}

#[cfg(test)]
mod tests;
