//! Maps the status of an I/O command to an [`ErrorKind`]. One table; an unknown status keeps its number.

use sealblock_block::{BadBlockCause, Error, ErrorKind, RequestKind};
use sealblock_integrity::Field;
use sealblock_protocols_nvme::{Status, StatusCode, StatusCodeType};
use sealblock_units::Extent;

/// The cause of bad blocks that a status reports; `None` if the status is not about blocks.
pub fn bad_block_cause(status: Status) -> Option<BadBlockCause> {
    Some(match status.code() {
        StatusCode::GUARD_CHECK_ERROR => BadBlockCause::Tag(Field::Guard),
        StatusCode::APPLICATION_TAG_CHECK_ERROR => BadBlockCause::Tag(Field::AppTag),
        StatusCode::REFERENCE_TAG_CHECK_ERROR => BadBlockCause::Tag(Field::RefTag),
        StatusCode::STORAGE_TAG_CHECK_ERROR => BadBlockCause::Tag(Field::StorageTag),
        StatusCode::UNRECOVERED_READ_ERROR | StatusCode::DEALLOCATED_OR_UNWRITTEN => BadBlockCause::Media,
        _ => return None,
    })
}

/// True if the same command may be retried after a short pause.
pub fn may_be_sent_again(status: Status) -> bool {
    let is_about_blocks = status.code().code_type() == StatusCodeType::Media;
    !status.is_success() && !status.do_not_retry() && !is_about_blocks
}

/// True if the status says that the controller does not support a command, or not in this form.
pub fn is_not_supported(status: Status) -> bool {
    matches!(status.code(), StatusCode::INVALID_OPCODE | StatusCode::INVALID_FIELD)
}

/// True if the status of a Copy says that the controller does not execute it in this form, so that it has copied
/// nothing.
pub fn is_copy_refused(status: Status) -> bool {
    let code = status.code();
    is_not_supported(status) || matches!(code, StatusCode::INVALID_FORMAT | StatusCode::COMMAND_SIZE_LIMIT_EXCEEDED)
}

/// The command that failed, for the error's text.
#[derive(Clone, Copy, Debug)]
pub struct CommandContext {
    /// Who replied: "target" or "drive".
    pub responder: &'static str,
    /// The kind of the request.
    pub kind: RequestKind,
    /// Its blocks, if it has any.
    pub extent: Option<Extent>,
    /// QID of the queue used by the command, if known.
    pub queue: Option<u16>,
    /// The namespace.
    pub nsid: u32,
}

/// Class of an error status.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FailureClass {
    ReadOnly,
    NoSpace,
    Absent,
    /// The target rejects the command.
    Refused,
    /// The target executed the command, and it failed.
    Medium,
    /// A later attempt, or another path, may succeed.
    Path,
}

/// The class of a status code. Codes without a line of their own are classified by their type.
fn class(code: StatusCode) -> FailureClass {
    match code {
        StatusCode::NAMESPACE_WRITE_PROTECTED | StatusCode::WRITE_TO_READ_ONLY_RANGE => FailureClass::ReadOnly,
        StatusCode::CAPACITY_EXCEEDED | StatusCode::INSUFFICIENT_RESOURCES => FailureClass::NoSpace,
        StatusCode::INVALID_OPCODE => FailureClass::Absent,
        // The retries are used up.
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
        | StatusCode::KEEP_ALIVE_EXPIRED => FailureClass::Path,
        StatusCode::INTERNAL_ERROR => FailureClass::Medium,
        // Access control denies this host what another may do.
        StatusCode::ACCESS_DENIED => FailureClass::Refused,
        code => match code.code_type() {
            StatusCodeType::Path => FailureClass::Path,
            StatusCodeType::Media | StatusCodeType::Reserved | StatusCodeType::Vendor => FailureClass::Medium,
            // Malformed commands, limits, reservations, and ranges, although the gate has checked ranges.
            StatusCodeType::Generic | StatusCodeType::CommandSpecific => FailureClass::Refused,
        },
    }
}

/// The error that a status means for this command.
pub fn failure(status: Status, context: CommandContext) -> Error {
    let blocks = context.extent.map(|extent| format!(" of {extent}")).unwrap_or_default();
    let name = status.code().io_name().unwrap_or("an unknown status");
    let queue = context.queue.map(|queue| format!(" on queue {queue}")).unwrap_or_default();
    let reason = format!(
        "the {} answered {}{blocks} of namespace {}{queue} with {name} ({status})",
        context.responder,
        context.kind.name(),
        context.nsid,
    );
    match class(status.code()) {
        FailureClass::ReadOnly => ErrorKind::ReadOnly,
        FailureClass::NoSpace => ErrorKind::NoSpace { reason },
        FailureClass::Absent => ErrorKind::Absent(context.kind),
        FailureClass::Refused => ErrorKind::Media { reason: format!("{reason}, which refuses the command") },
        FailureClass::Medium => ErrorKind::Media { reason },
        FailureClass::Path => ErrorKind::Unreachable { reason },
    }
    .into()
}
