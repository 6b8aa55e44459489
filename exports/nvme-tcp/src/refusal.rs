//! Why a command fails, as the status that answers it: the one place where failures become NVMe status codes.

use sealblock_block::{Error, Failure, FaultField, OperationKind};
use sealblock_integrity::Field;
use sealblock_protocols_nvme::fabrics::ConnectError;
use sealblock_protocols_nvme::{FieldLocation, Invalid, Status, StatusCode};
use sealblock_units::Lba;

/// A command that fails: its status, and what the Error Information log says about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Refusal {
    pub(crate) status: Status,
    pub(crate) result: u64,
    pub(crate) lba: Option<Lba>,
    pub(crate) location: Option<FieldLocation>,
}

impl Refusal {
    /// The answer to a request of this kind that a device failed.
    pub(crate) fn of_error(error: &Error, kind: OperationKind) -> Refusal {
        let failure = error.failure();
        let lba = match failure {
            Failure::Integrity(faults) => Some(faults.first().lba),
            Failure::Miscompare { lba } => Some(*lba),
            Failure::Range { extent, .. } => Some(extent.start()),
            _ => None,
        };
        let result = match failure {
            Failure::Integrity(faults) if kind == OperationKind::Verify => faults.coverage().bits().into(),
            _ => 0,
        };
        Refusal { lba, result, ..Refusal::from(to_status(failure, kind)) }
    }

    /// Whether it is about damaged blocks: checks that failed, and media errors, but not differences.
    pub(crate) fn is_damage(&self) -> bool {
        matches!(self.status.code().get(), 0x280..=0x284 | 0x288)
    }

    /// The same, said to be about this block unless a block is known already.
    pub(crate) fn or_at(mut self, lba: Lba) -> Refusal {
        self.lba.get_or_insert(lba);
        self
    }
}

/// The status of a failed request. Do Not Retry follows the table of `protocols/nvme`, except where a number is shared.
pub(crate) fn to_status(failure: &Failure, kind: OperationKind) -> Status {
    match failure {
        Failure::Integrity(faults) => of_field(faults.first().field).status(),
        Failure::Miscompare { .. } => StatusCode::COMPARE_FAILURE.status(),
        Failure::Media { .. } => of_medium(kind).status(),
        Failure::NoSpace { .. } => StatusCode::CAPACITY_EXCEEDED.status(),
        Failure::ReadOnly => StatusCode::NAMESPACE_WRITE_PROTECTED.status(),
        Failure::Range { .. } => StatusCode::LBA_OUT_OF_RANGE.status(),
        Failure::Limit { .. } => StatusCode::COMMAND_SIZE_LIMIT_EXCEEDED.status().with_dnr(true),
        Failure::Absent(_) => StatusCode::INVALID_OPCODE.status(),
        // The device may come back, so the host is to try again.
        Failure::Unreachable { .. } => StatusCode::NAMESPACE_NOT_READY.status(),
    }
}

const fn of_field(field: FaultField) -> StatusCode {
    match field {
        FaultField::Tag(Field::Guard) => StatusCode::GUARD_CHECK_ERROR,
        FaultField::Tag(Field::AppTag) => StatusCode::APPLICATION_TAG_CHECK_ERROR,
        FaultField::Tag(Field::RefTag) => StatusCode::REFERENCE_TAG_CHECK_ERROR,
        FaultField::Tag(Field::StorageTag) => StatusCode::STORAGE_TAG_CHECK_ERROR,
        FaultField::Media | FaultField::Conflict | FaultField::Stale => StatusCode::UNRECOVERED_READ_ERROR,
    }
}

const fn of_medium(kind: OperationKind) -> StatusCode {
    match kind {
        OperationKind::Read
        | OperationKind::Verify
        | OperationKind::Digest
        | OperationKind::Repair
        | OperationKind::Allocation
        | OperationKind::ReadAnnex
        | OperationKind::Compare => StatusCode::UNRECOVERED_READ_ERROR,
        OperationKind::Write
        | OperationKind::Flush
        | OperationKind::Discard
        | OperationKind::WriteZeroes
        | OperationKind::WriteAnnex
        | OperationKind::WriteUncorrectable => StatusCode::WRITE_FAULT,
    }
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Refusal {
        Refusal { status, result: 0, lba: None, location: None }
    }
}

impl From<StatusCode> for Refusal {
    fn from(code: StatusCode) -> Refusal {
        code.status().into()
    }
}

impl From<Invalid> for Refusal {
    fn from(invalid: Invalid) -> Refusal {
        let lba = match invalid {
            Invalid::PastEnd { extent, .. } => Some(extent.start()),
            _ => None,
        };
        Refusal { lba, location: invalid.location(), ..Refusal::from(invalid.status()) }
    }
}

impl From<ConnectError> for Refusal {
    fn from(error: ConnectError) -> Refusal {
        let completion = error.completion(0);
        Refusal { result: completion.result.get(), ..Refusal::from(completion.status()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_block::{Fault, Faults};

    fn code(failure: Failure, kind: OperationKind) -> u16 {
        to_status(&failure, kind).code().get()
    }

    #[test]
    fn each_field_has_its_status_and_its_block() {
        for (field, status) in [
            (FaultField::Tag(Field::Guard), 0x282),
            (FaultField::Tag(Field::AppTag), 0x283),
            (FaultField::Tag(Field::RefTag), 0x284),
            (FaultField::Tag(Field::StorageTag), 0x288),
            (FaultField::Media, 0x281),
        ] {
            let fault = Fault::new(Lba::new(7), field, None, None);
            let error = Error::from(Faults::new(vec![fault]).unwrap());
            let refusal = Refusal::of_error(&error, OperationKind::Read);
            assert_eq!((refusal.status.code().get(), refusal.lba), (status, Some(Lba::new(7))));
            assert!(refusal.status.do_not_retry());
        }
    }

    #[test]
    fn other_failures_have_theirs() {
        let reason = || String::new();
        assert_eq!(code(Failure::Media { reason: reason() }, OperationKind::Read), 0x281);
        assert_eq!(code(Failure::Media { reason: reason() }, OperationKind::Write), 0x280);
        assert_eq!(code(Failure::Miscompare { lba: Lba::ZERO }, OperationKind::Compare), 0x285);
        assert_eq!(code(Failure::NoSpace { reason: reason() }, OperationKind::Write), 0x081);
        assert_eq!(code(Failure::ReadOnly, OperationKind::Write), 0x020);
        assert_eq!(code(Failure::Absent(OperationKind::Discard), OperationKind::Discard), 0x001);
        let unreachable = to_status(&Failure::Unreachable { reason: reason() }, OperationKind::Read);
        assert!(!unreachable.do_not_retry());
    }
}
