//! COMPARE AND WRITE: whether a drive supports it, and how a request is sent.
//!
//! It is not idempotent: sent again after it was executed, it would miscompare with its own data. So it is sent again
//! only after a reply which says that it was not executed; any other failure without an outcome is reported unchanged,
//! since it may have been.
//!
//! Invariant: after one that may have been executed the kernel's page cache has no older copy of the blocks.

use sealblock_block::{
    CompareAndWrite, Device, Durability, Error, ErrorKind, Expectations, Outcome, Request, RequestKind, Response,
};
use sealblock_protocols_scsi::{AdditionalSense, BlockCommand, Command, SenseKey};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::Transfer;
use sealblock_units::{BlockSize, Extent, Lba};

use super::answer::{AnswerClass, AnswerText, failure, is_unexecuted};
use super::transport::{Answer, OpenError, Transport};
use super::unit::{Pages, Unit};
use crate::node::call_error;

/// The name of the command.
const NAME: &str = "COMPARE AND WRITE";

/// The command for these blocks; its Data-Out Buffer has the expected data, then the data to write (SBC-4, "COMPARE AND
/// WRITE command"). WRPROTECT is 000b: the drive has no tags.
fn command(extent: Extent, durability: Durability) -> Command {
    let force_unit_access = durability == Durability::ForceUnitAccess;
    Command::CompareAndWrite(BlockCommand { force_unit_access, ..BlockCommand::new(extent) })
}

impl<T: Transport> Unit<T> {
    /// Blocks of one COMPARE AND WRITE; 0 if the drive has none that can be used, with the reason.
    ///
    /// MAXIMUM COMPARE AND WRITE LENGTH is trusted only after the drive has refused the command for a block that does
    /// not exist, and for that reason. It cannot be tried on an existing block, which it would change.
    pub(crate) async fn find_compare_and_write(
        &self,
        pages: &Pages,
        size: BlockSize,
        max_transfer_blocks: u64,
        refused: &mut Vec<String>,
    ) -> Result<u32, OpenError> {
        let said = pages.limits.compare_and_write_blocks;
        // Half of the transferred data is compared, the other half written.
        let blocks = u64::from(said).min(max_transfer_blocks / 2) as u32;
        if blocks == 0 {
            return Ok(0);
        }
        if pages.capacity.protection().is_ok_and(|profile| profile.is_some()) {
            let why = "tags of this host cannot travel with it, and those that the drive makes may exempt a block from all checks";
            refused.push(format!("compare and write: {why}"));
            return Ok(0);
        }
        let behind = Extent::one(Lba::new(pages.capacity.last_lba + 1));
        let data = Transfer::Out(Buffer::zeroed(2 * size.bytes()).freeze());
        let answer = match self.try_command(NAME, &command(behind, Durability::Volatile), data).await {
            Ok((answer, _)) => answer,
            Err(error @ OpenError::Privilege { .. }) => {
                refused.push(format!("compare and write: {error}"));
                return Ok(0);
            }
            Err(error) => return Err(error),
        };
        let is_out_of_range = answer.sense.is_some_and(|sense| {
            sense.key == SenseKey::ILLEGAL_REQUEST && sense.code == AdditionalSense::LBA_OUT_OF_RANGE
        });
        if is_out_of_range && AnswerClass::of(&answer) == AnswerClass::Refused {
            return Ok(blocks);
        }
        refused.push(format!(
            "compare and write: the drive answered {NAME} of a block behind the last one with {}",
            AnswerText(&answer)
        ));
        Ok(0)
    }

    /// Executes one. `ordinary` reads the blocks if the drive does not report which of them differ, or are bad.
    pub(crate) async fn compare_and_write<D: Device>(
        &self,
        extent: Extent,
        data: &CompareAndWrite,
        durability: Durability,
        ordinary: &D,
    ) -> Outcome {
        const KIND: RequestKind = RequestKind::CompareAndWrite;
        let size = ordinary.geometry().block_size;
        let sent = both(data);
        let sent_bytes = sent.len();
        let answer = self.execute_once(&command(extent, durability), Transfer::Out(sent)).await;
        let is_unchanged =
            |answer: &Answer| is_unexecuted(answer) || matches!(AnswerClass::of(answer), AnswerClass::Miscompare);
        if !answer.as_ref().is_ok_and(is_unchanged) {
            self.transport.forget_cached(extent.start().get() << size.shift(), extent.bytes(size));
        }
        let answer = answer.map_err(|error| after_call(call_error(NAME, &error)))?;
        match AnswerClass::of(&answer) {
            AnswerClass::Good if answer.moved_bytes == sent_bytes => Ok(Response::Done),
            AnswerClass::Good => {
                let moved = answer.moved_bytes;
                let reason = format!("the drive took {moved} of the {sent_bytes} bytes of {NAME} of {extent}");
                Err(ErrorKind::Media { reason }.into())
            }
            AnswerClass::Miscompare => Err(miscompare(extent, data, &answer, ordinary).await),
            AnswerClass::Bad(_) => match ordinary.execute(Request::read(extent, Expectations::NONE)).await {
                Err(error) if error.bad_blocks().is_some() => Err(error),
                _ => Err(failure(KIND, extent, &answer)),
            },
            AnswerClass::Refused | AnswerClass::Unsupported => Err(failure(KIND, extent, &answer)),
            AnswerClass::Failed | AnswerClass::Again | AnswerClass::Unreachable => match is_unexecuted(&answer) {
                true => Err(failure(KIND, extent, &answer)),
                false => Err(unknown(failure(KIND, extent, &answer))),
            },
        }
    }
}

/// The Data-Out Buffer: the command needs one, and the data are in two.
fn both(data: &CompareAndWrite) -> Slice {
    let (expected, new) = (data.expected.joined_data(), data.new.joined_data());
    let mut buffer = Buffer::zeroed(expected.len() + new.len());
    let (front, back) = buffer.split_at_mut(expected.len());
    front.copy_from_slice(&expected);
    back.copy_from_slice(&new);
    buffer.freeze()
}

/// The first block that differs. INFORMATION is the offset in the Data-Out Buffer of the first byte that differs
/// (SBC-4, "COMPARE AND WRITE command"); some drives leave it out.
async fn miscompare<D: Device>(extent: Extent, data: &CompareAndWrite, answer: &Answer, ordinary: &D) -> Error {
    let size = ordinary.geometry().block_size;
    let offset = answer.sense.and_then(|sense| sense.information).filter(|offset| *offset < extent.bytes(size));
    let named = offset.map(|offset| Lba::new(extent.start().get() + (offset >> size.shift())));
    let lba = match named {
        Some(lba) => lba,
        None if extent.len() == 1 => extent.start(),
        None => match ordinary.execute(Request::read(extent, Expectations::NONE)).await {
            Ok(Response::Data(stored)) => {
                let differs = stored.first_difference(&data.expected, false);
                // The blocks may have become equal since; the outcome is still a difference.
                differs.and_then(|index| extent.iter().nth(index)).unwrap_or(extent.start())
            }
            _ => extent.start(),
        },
    };
    ErrorKind::Miscompare { lba }.into()
}

/// The error of a call without a reply: if the command never reached the drive, it is reported unchanged.
fn after_call(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Unreachable { .. } => unknown(error),
        _ => error,
    }
}

/// The same error, saying that the command may have been executed.
fn unknown(error: Error) -> Error {
    let reason = match error.kind() {
        ErrorKind::Unreachable { reason } | ErrorKind::Media { reason } => reason.clone(),
        other => other.to_string(),
    };
    ErrorKind::Unreachable { reason: format!("{reason}; it may have been executed") }.into()
}
