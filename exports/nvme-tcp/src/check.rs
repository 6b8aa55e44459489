//! Checks of I/O commands before their data is fetched.

use sealblock_block::Ability;
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_protocols_nvme::{Command, Invalid};

use crate::command_error::CommandError;
use crate::identify::WRITE_ZEROES_BYTES;
use crate::io::TransferLengths;
use crate::limits::Limits;
use crate::namespace::Namespace;

/// The maximum length of a list of ranges, in bytes: 256 of the longest ranges.
const LIST_BYTES: u64 = 256 * 40;

/// Fails a command that cannot be executed. Verify and other commands without data may have any length.
pub(crate) fn check(
    namespace: &Namespace,
    limits: &Limits,
    io: &IoCommand,
    command: &Command,
    lengths: TransferLengths,
) -> Result<(), CommandError> {
    io.validate(namespace.device.geometry().capacity_blocks, namespace.format())?;
    has_operation(namespace, io, command)?;
    let is_too_long = |extent, max_bytes| namespace.data_bytes(extent) > max_bytes;
    let too_long = Invalid::field("NLB", 12, 0);
    match io {
        IoCommand::Read(blocks) | IoCommand::Write(blocks) | IoCommand::Compare(blocks) => {
            if is_too_long(blocks.extent, u64::from(limits.transfer_bytes)) {
                return Err(too_long.into());
            }
            let got_bytes =
                if matches!(io, IoCommand::Read(_)) { lengths.to_host_bytes } else { lengths.from_host_bytes };
            same(namespace.wire_bytes(blocks), got_bytes)
        }
        IoCommand::WriteZeroes(zeroes) if zeroes.whole_namespace => Err(Invalid::field("NSZ", 12, 23).into()),
        IoCommand::WriteZeroes(zeroes) if is_too_long(zeroes.blocks.extent, WRITE_ZEROES_BYTES) => Err(too_long.into()),
        IoCommand::DatasetManagement(dsm) => match lengths.from_host_bytes {
            got_bytes if got_bytes < dsm.data_bytes() as u64 || got_bytes > 4096 => {
                same(dsm.data_bytes() as u64, got_bytes)
            }
            _ => Ok(()),
        },
        IoCommand::Copy(copy) => match lengths.from_host_bytes {
            got_bytes if got_bytes < copy.data_bytes() as u64 || got_bytes > LIST_BYTES => {
                same(copy.data_bytes() as u64, got_bytes)
            }
            _ => Ok(()),
        },
        IoCommand::Flush
        | IoCommand::Verify(_)
        | IoCommand::Checksum(_)
        | IoCommand::WriteZeroes(_)
        | IoCommand::WriteUncorrectable(_) => Ok(()),
    }
}

/// Fails commands that the device does not support.
fn has_operation(namespace: &Namespace, io: &IoCommand, command: &Command) -> Result<(), CommandError> {
    let ability = match io {
        IoCommand::WriteUncorrectable(_) => namespace.device.abilities().write_uncorrectable,
        IoCommand::Checksum(_) => namespace.device.abilities().checksum,
        _ => return Ok(()),
    };
    if ability == Ability::Absent { Err(Invalid::Opcode(command.opcode).into()) } else { Ok(()) }
}

fn same(needed_bytes: u64, got_bytes: u64) -> Result<(), CommandError> {
    if needed_bytes == got_bytes { Ok(()) } else { Err(Invalid::DataLength { needed_bytes, got_bytes }.into()) }
}
