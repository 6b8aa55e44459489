//! Maps the errors of an NBD server to [`ErrorKind`]s. One table.

use sealblock_block::{Error, ErrorKind, RequestKind};
use sealblock_protocols_nbd::ErrorCode;
use sealblock_protocols_nbd::client::ServerError;
use sealblock_units::Extent;

/// True if all errors are EIO, so a search for the bad blocks can help.
pub(crate) fn is_about_blocks(errors: &[ServerError]) -> bool {
    errors.iter().all(|error| error.code == ErrorCode::Io)
}

/// True if the server shuts down, so the request must be sent again after a reconnect.
pub(crate) fn is_shutdown(errors: &[ServerError]) -> bool {
    errors.iter().any(|error| error.code == ErrorCode::Shutdown)
}

/// The error of the request, by the first error that is not EIO: it is more specific.
pub(crate) fn failure(kind: RequestKind, extent: Option<Extent>, errors: &[ServerError]) -> Error {
    let main_error = main_error(errors);
    let blocks = extent.map(|extent| format!(" of {extent}")).unwrap_or_default();
    let reason = format!("the server answered {}{blocks} with {}", kind.name(), text(errors));
    let writes = matches!(kind, RequestKind::Write | RequestKind::WriteZeroes | RequestKind::Discard);
    match main_error.map(|error| error.code) {
        Some(ErrorCode::NotPermitted) if writes => ErrorKind::ReadOnly,
        Some(ErrorCode::NoSpace) => ErrorKind::NoSpace { reason },
        Some(ErrorCode::NotSupported) => ErrorKind::Absent(kind),
        Some(ErrorCode::Shutdown) => ErrorKind::Unreachable { reason },
        Some(ErrorCode::Invalid | ErrorCode::Overflow) => {
            ErrorKind::Media { reason: format!("{reason}, which refuses the request") }
        }
        Some(ErrorCode::Io | ErrorCode::NoMemory | ErrorCode::NotPermitted) | None => ErrorKind::Media { reason },
    }
    .into()
}

/// The server's errors as text.
pub(crate) fn text(errors: &[ServerError]) -> String {
    main_error(errors).map(ToString::to_string).unwrap_or_default()
}

/// The first error that is not EIO, or otherwise the first one.
fn main_error(errors: &[ServerError]) -> Option<&ServerError> {
    errors.iter().find(|error| error.code != ErrorCode::Io).or(errors.first())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: ErrorCode) -> ServerError {
        ServerError { code, offset: Some(8192), message: "why".into() }
    }

    #[test]
    fn errors_are_the_failures_of_their_kind() {
        let of = |code, kind| failure(kind, None, &[error(ErrorCode::Io), error(code)]).into_kind();
        assert_eq!(of(ErrorCode::NotPermitted, RequestKind::Write), ErrorKind::ReadOnly);
        assert!(matches!(of(ErrorCode::NotPermitted, RequestKind::Read), ErrorKind::Media { .. }));
        assert!(matches!(of(ErrorCode::NoSpace, RequestKind::Write), ErrorKind::NoSpace { .. }));
        assert!(matches!(of(ErrorCode::Shutdown, RequestKind::Write), ErrorKind::Unreachable { .. }));
        let absent = ErrorKind::Absent(RequestKind::WriteZeroes);
        assert_eq!(of(ErrorCode::NotSupported, RequestKind::WriteZeroes), absent);
        let ErrorKind::Media { reason } = of(ErrorCode::Invalid, RequestKind::Write) else { panic!("not a refusal") };
        assert_eq!(reason, "the server answered write with EINVAL at byte 8192: why, which refuses the request");
        assert!(is_about_blocks(&[error(ErrorCode::Io)]));
        assert!(!is_about_blocks(&[error(ErrorCode::Io), error(ErrorCode::NoSpace)]));
    }
}
