//! Errors that servers answer, as failures. One table.

use sealblock_block::{Error, ErrorKind, RequestKind};
use sealblock_protocols_nbd::ErrorCode;
use sealblock_protocols_nbd::client::ServerError;
use sealblock_units::Extent;

/// Whether these errors say nothing but that blocks are bad, so that it is worth finding out which.
pub(crate) fn is_about_blocks(troubles: &[ServerError]) -> bool {
    troubles.iter().all(|trouble| trouble.code == ErrorCode::Io)
}

/// Whether the server is going away, so that the request is one for whatever comes after it.
pub(crate) fn is_shutdown(troubles: &[ServerError]) -> bool {
    troubles.iter().any(|trouble| trouble.code == ErrorCode::Shutdown)
}

/// The failure that errors mean: that of the first which is not EIO, because it says more.
pub(crate) fn failure(kind: RequestKind, extent: Option<Extent>, troubles: &[ServerError]) -> Error {
    let telling = troubles.iter().find(|trouble| trouble.code != ErrorCode::Io).or(troubles.first());
    let blocks = extent.map(|extent| format!(" of {extent}")).unwrap_or_default();
    let said = telling.map(ToString::to_string).unwrap_or_default();
    let reason = format!("the server answered {}{blocks} with {said}", kind.name());
    let writes = matches!(kind, RequestKind::Write | RequestKind::WriteZeroes | RequestKind::Discard);
    match telling.map(|trouble| trouble.code) {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn trouble(code: ErrorCode) -> ServerError {
        ServerError { code, offset: Some(8192), message: "why".into() }
    }

    #[test]
    fn errors_are_the_failures_of_their_kind() {
        let of = |code, kind| failure(kind, None, &[trouble(ErrorCode::Io), trouble(code)]).into_kind();
        assert_eq!(of(ErrorCode::NotPermitted, RequestKind::Write), ErrorKind::ReadOnly);
        assert!(matches!(of(ErrorCode::NotPermitted, RequestKind::Read), ErrorKind::Media { .. }));
        assert!(matches!(of(ErrorCode::NoSpace, RequestKind::Write), ErrorKind::NoSpace { .. }));
        assert!(matches!(of(ErrorCode::Shutdown, RequestKind::Write), ErrorKind::Unreachable { .. }));
        let absent = ErrorKind::Absent(RequestKind::WriteZeroes);
        assert_eq!(of(ErrorCode::NotSupported, RequestKind::WriteZeroes), absent);
        let ErrorKind::Media { reason } = of(ErrorCode::Invalid, RequestKind::Write) else { panic!("not a refusal") };
        assert_eq!(reason, "the server answered write with EINVAL at byte 8192: why, which refuses the request");
        assert!(is_about_blocks(&[trouble(ErrorCode::Io)]));
        assert!(!is_about_blocks(&[trouble(ErrorCode::Io), trouble(ErrorCode::NoSpace)]));
    }
}
