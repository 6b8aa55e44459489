//! Why a command fails, as its completion status: the one place where errors become NVMe status codes.

use sealblock_block::{BadBlockCause, Error, ErrorKind, RequestKind};
use sealblock_integrity::Field;
use sealblock_protocols_nvme::fabrics::ConnectError;
use sealblock_protocols_nvme::{FieldLocation, Invalid, Status, StatusCode};
use sealblock_units::Lba;

/// A failed command: its status, and what the Error Information log says about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CommandError {
    pub(crate) status: Status,
    pub(crate) result: u64,
    pub(crate) lba: Option<Lba>,
    pub(crate) location: Option<FieldLocation>,
    /// True if it reports bad blocks: failed checks and media errors, but no miscompares, and no tags that only the
    /// host did not expect.
    pub(crate) is_damage: bool,
}

impl CommandError {
    /// Returns the error of a command whose device failed a request of this kind.
    pub(crate) fn of_error(error: &Error, kind: RequestKind) -> CommandError {
        let error_kind = error.kind();
        let lba = match error_kind {
            ErrorKind::Integrity(bad_blocks) => Some(bad_blocks.first().lba),
            ErrorKind::Expectation { lba, .. } | ErrorKind::Miscompare { lba } => Some(*lba),
            ErrorKind::Range { extent, .. } => Some(extent.start()),
            _ => None,
        };
        let result = match error_kind {
            ErrorKind::Integrity(bad_blocks) if kind == RequestKind::Verify => bad_blocks.coverage().bits().into(),
            _ => 0,
        };
        let is_damage = matches!(error_kind, ErrorKind::Integrity(_) | ErrorKind::Media { .. });
        CommandError { lba, result, is_damage, ..CommandError::from(to_status(error_kind, kind)) }
    }

    /// Returns the same error with this block, unless it already names a block.
    pub(crate) fn or_at(mut self, lba: Lba) -> CommandError {
        self.lba.get_or_insert(lba);
        self
    }
}

/// Returns the status of a failed request. Do Not Retry follows the table of `protocols/nvme`, except where two errors
/// share a status code.
pub(crate) fn to_status(error_kind: &ErrorKind, kind: RequestKind) -> Status {
    match error_kind {
        ErrorKind::Integrity(bad_blocks) => of_field(bad_blocks.first().cause).status(),
        ErrorKind::Expectation { field, .. } => of_field(BadBlockCause::Tag(*field)).status(),
        ErrorKind::Miscompare { .. } => StatusCode::COMPARE_FAILURE.status(),
        ErrorKind::Media { .. } => of_medium(kind).status(),
        ErrorKind::NoSpace { .. } => StatusCode::CAPACITY_EXCEEDED.status(),
        ErrorKind::ReadOnly => StatusCode::NAMESPACE_WRITE_PROTECTED.status(),
        ErrorKind::Range { .. } => StatusCode::LBA_OUT_OF_RANGE.status(),
        ErrorKind::Limit { .. } => StatusCode::COMMAND_SIZE_LIMIT_EXCEEDED.status().with_dnr(true),
        ErrorKind::Absent(_) => StatusCode::INVALID_OPCODE.status(),
        // The blocks are readable, and another attempt gives the same result.
        ErrorKind::MayBeOlder(_) => StatusCode::INTERNAL_ERROR.status().with_dnr(true),
        // It may have been executed, so the host must not send it again as if it had not.
        ErrorKind::Unreachable { .. } if kind == RequestKind::CompareAndWrite => {
            StatusCode::INTERNAL_ERROR.status().with_dnr(true)
        }
        // The device may come back, so the host must retry.
        ErrorKind::Unreachable { .. } => StatusCode::NAMESPACE_NOT_READY.status(),
    }
}

const fn of_field(field: BadBlockCause) -> StatusCode {
    match field {
        BadBlockCause::Tag(Field::Guard) => StatusCode::GUARD_CHECK_ERROR,
        BadBlockCause::Tag(Field::AppTag) => StatusCode::APPLICATION_TAG_CHECK_ERROR,
        BadBlockCause::Tag(Field::RefTag) => StatusCode::REFERENCE_TAG_CHECK_ERROR,
        BadBlockCause::Tag(Field::StorageTag) => StatusCode::STORAGE_TAG_CHECK_ERROR,
        BadBlockCause::Media | BadBlockCause::Conflict | BadBlockCause::Stale | BadBlockCause::Unsettled => {
            StatusCode::UNRECOVERED_READ_ERROR
        }
    }
}

const fn of_medium(kind: RequestKind) -> StatusCode {
    match kind {
        RequestKind::Read
        | RequestKind::Salvage
        | RequestKind::Verify
        | RequestKind::Checksum
        | RequestKind::Repair
        | RequestKind::BlockStatus
        | RequestKind::ReadReserved
        | RequestKind::Compare => StatusCode::UNRECOVERED_READ_ERROR,
        RequestKind::Write
        | RequestKind::Copy
        | RequestKind::CompareAndWrite
        | RequestKind::Flush
        | RequestKind::Discard
        | RequestKind::WriteZeroes
        | RequestKind::WriteReserved
        | RequestKind::WriteUncorrectable => StatusCode::WRITE_FAULT,
    }
}

impl From<Status> for CommandError {
    fn from(status: Status) -> CommandError {
        CommandError { status, result: 0, lba: None, location: None, is_damage: false }
    }
}

impl From<StatusCode> for CommandError {
    fn from(code: StatusCode) -> CommandError {
        code.status().into()
    }
}

impl From<Invalid> for CommandError {
    fn from(invalid: Invalid) -> CommandError {
        let lba = match invalid {
            Invalid::PastEnd { extent, .. } => Some(extent.start()),
            _ => None,
        };
        CommandError { lba, location: invalid.location(), ..CommandError::from(invalid.status()) }
    }
}

impl From<ConnectError> for CommandError {
    fn from(error: ConnectError) -> CommandError {
        let completion = error.completion(0);
        CommandError { result: completion.result.get(), ..CommandError::from(completion.status()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_block::{BadBlock, BadBlocks};

    fn code(error_kind: ErrorKind, kind: RequestKind) -> u16 {
        to_status(&error_kind, kind).code().get()
    }

    #[test]
    fn each_field_has_its_status_and_its_block() {
        for (field, status) in [
            (BadBlockCause::Tag(Field::Guard), 0x282),
            (BadBlockCause::Tag(Field::AppTag), 0x283),
            (BadBlockCause::Tag(Field::RefTag), 0x284),
            (BadBlockCause::Tag(Field::StorageTag), 0x288),
            (BadBlockCause::Media, 0x281),
        ] {
            let bad_block = BadBlock::new(Lba::new(7), field, None, None);
            let error = Error::from(BadBlocks::new(vec![bad_block]).unwrap());
            let command_error = CommandError::of_error(&error, RequestKind::Read);
            assert_eq!((command_error.status.code().get(), command_error.lba), (status, Some(Lba::new(7))));
            assert!(command_error.status.do_not_retry());
        }
    }

    #[test]
    fn other_failures_have_theirs() {
        let reason = || String::new();
        assert_eq!(code(ErrorKind::Media { reason: reason() }, RequestKind::Read), 0x281);
        assert_eq!(code(ErrorKind::Media { reason: reason() }, RequestKind::Write), 0x280);
        assert_eq!(code(ErrorKind::Miscompare { lba: Lba::ZERO }, RequestKind::Compare), 0x285);
        assert_eq!(code(ErrorKind::NoSpace { reason: reason() }, RequestKind::Write), 0x081);
        assert_eq!(code(ErrorKind::ReadOnly, RequestKind::Write), 0x020);
        assert_eq!(code(ErrorKind::Absent(RequestKind::Discard), RequestKind::Discard), 0x001);
        let unreachable = to_status(&ErrorKind::Unreachable { reason: reason() }, RequestKind::Read);
        assert!(!unreachable.do_not_retry());
        let unknown = to_status(&ErrorKind::Unreachable { reason: reason() }, RequestKind::CompareAndWrite);
        assert_eq!((unknown.code().get(), unknown.do_not_retry()), (0x006, true));
    }
}
