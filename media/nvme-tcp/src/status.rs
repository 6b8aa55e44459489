//! Statuses of I/O commands as failures. One table; what it does not know keeps its number.

use sealblock_block::{Error, Failure, FaultField, OperationKind};
use sealblock_integrity::Field;
use sealblock_protocols_nvme::{Status, StatusCode, StatusCodeType};
use sealblock_units::Extent;

/// The field of a block that a status says is wrong: a status about blocks, which are then to be found.
pub(crate) fn field(status: Status) -> Option<FaultField> {
    Some(match status.code() {
        StatusCode::GUARD_CHECK_ERROR => FaultField::Tag(Field::Guard),
        StatusCode::APPLICATION_TAG_CHECK_ERROR => FaultField::Tag(Field::AppTag),
        StatusCode::REFERENCE_TAG_CHECK_ERROR => FaultField::Tag(Field::RefTag),
        StatusCode::STORAGE_TAG_CHECK_ERROR => FaultField::Tag(Field::StorageTag),
        StatusCode::UNRECOVERED_READ_ERROR | StatusCode::DEALLOCATED_OR_UNWRITTEN => FaultField::Media,
        _ => return None,
    })
}

/// Whether the same command may be sent again at once or soon.
pub(crate) fn may_be_sent_again(status: Status) -> bool {
    let is_about_blocks = status.code().code_type() == StatusCodeType::Media;
    !status.is_success() && !status.do_not_retry() && !is_about_blocks
}

/// What was asked, for the text of an error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) kind: OperationKind,
    pub(crate) extent: Option<Extent>,
    /// QID of the queue that the command went through.
    pub(crate) queue: u16,
    pub(crate) nsid: u32,
}

/// The failure that a status means.
pub(crate) fn failure(status: Status, asked: Asked) -> Error {
    let blocks = asked.extent.map(|extent| format!(" of {extent}")).unwrap_or_default();
    let name = status.code().io_name().unwrap_or("an unknown status");
    let answer = format!(
        "the target answered {}{blocks} of namespace {} on queue {} with {name} ({status})",
        asked.kind.name(),
        asked.nsid,
        asked.queue,
    );
    let refused = || Failure::Media { reason: format!("{answer}, which refuses the command") };
    let medium = || Failure::Media { reason: answer.clone() };
    let path = || Failure::Unreachable { reason: answer.clone() };
    match status.code() {
        StatusCode::NAMESPACE_WRITE_PROTECTED | StatusCode::WRITE_TO_READ_ONLY_RANGE => Failure::ReadOnly,
        StatusCode::CAPACITY_EXCEEDED | StatusCode::INSUFFICIENT_RESOURCES => Failure::NoSpace { reason: answer },
        StatusCode::INVALID_OPCODE => Failure::Absent(asked.kind),
        // The gate has checked the range, so the namespace is not any more what it was.
        StatusCode::LBA_OUT_OF_RANGE => refused(),
        // Time, or another path, may cure these; the command was sent again as often as it may be.
        StatusCode::INVALID_NAMESPACE
        | StatusCode::NAMESPACE_NOT_READY
        | StatusCode::FORMAT_IN_PROGRESS
        | StatusCode::SANITIZE_IN_PROGRESS
        | StatusCode::SANITIZE_FAILED
        | StatusCode::ADMIN_MEDIA_NOT_READY
        | StatusCode::POWER_LOSS_ABORT
        | StatusCode::ABORT_REQUESTED
        | StatusCode::ABORTED_SQ_DELETION
        | StatusCode::ABORTED_PREEMPT
        | StatusCode::COMMAND_INTERRUPTED
        | StatusCode::TRANSIENT_TRANSPORT_ERROR
        | StatusCode::DATA_TRANSFER_ERROR
        | StatusCode::KEEP_ALIVE_EXPIRED => path(),
        // Reservations and access control deny what another host may do.
        StatusCode::RESERVATION_CONFLICT | StatusCode::ACCESS_DENIED | StatusCode::OPERATION_DENIED => refused(),
        StatusCode::WRITE_FAULT
        | StatusCode::INTERNAL_ERROR
        | StatusCode::UNRECOVERED_READ_ERROR
        | StatusCode::DEALLOCATED_OR_UNWRITTEN
        | StatusCode::GUARD_CHECK_ERROR
        | StatusCode::APPLICATION_TAG_CHECK_ERROR
        | StatusCode::REFERENCE_TAG_CHECK_ERROR
        | StatusCode::STORAGE_TAG_CHECK_ERROR
        | StatusCode::COMPARE_FAILURE => medium(),
        code => match code.code_type() {
            StatusCodeType::Path => path(),
            StatusCodeType::Media => medium(),
            // Malformed commands and limits: this host and the target do not understand each other, and the text says how.
            StatusCodeType::Generic | StatusCodeType::CommandSpecific => refused(),
            StatusCodeType::Reserved | StatusCodeType::Vendor => medium(),
        },
    }
    .into()
}
