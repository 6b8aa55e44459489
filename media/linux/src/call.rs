//! Errors of passthrough calls.

use std::io;

use sealblock_block::{Error, ErrorKind};

/// The error of a call that did not bring a command to its completion.
pub(crate) fn of_call(doing: &str, error: &io::Error) -> Error {
    match error.raw_os_error() {
        // The kernel says that of devices that were removed, reset, or did not answer in time.
        Some(libc::ENODEV | libc::ENXIO | libc::EIO | libc::ESHUTDOWN | libc::ETIMEDOUT | libc::ECANCELED) => {
            ErrorKind::Unreachable { reason: format!("the drive did not complete {doing}: {error}") }
        }
        _ => ErrorKind::Media { reason: format!("the kernel did not pass {doing} to the drive: {error}") },
    }
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errno(number: i32) -> io::Error {
        io::Error::from_raw_os_error(number)
    }

    #[test]
    fn a_drive_that_is_gone_or_late_cannot_be_reached_and_a_refused_call_is_something_else() {
        for number in [libc::ENODEV, libc::ENXIO, libc::EIO, libc::ETIMEDOUT] {
            assert!(matches!(of_call("verify", &errno(number)).kind(), ErrorKind::Unreachable { .. }), "{number}");
        }
        for number in [libc::EINVAL, libc::ENOMEM, libc::EACCES] {
            assert!(matches!(of_call("verify", &errno(number)).kind(), ErrorKind::Media { .. }), "{number}");
        }
    }
}
