//! Errors of opening a namespace for passthrough, and of passthrough calls.

use std::io;

use sealblock_media_nvme::NamespaceError;
use sealblock_protocols_nvme::Status;

/// Why commands cannot be passed to a drive.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The node is not an NVMe namespace, or the kernel has no passthrough.
    #[error("the kernel passes no NVMe commands through this node ({0})")]
    NoPassthrough(io::Error),
    /// The process is not permitted to do that.
    #[error("this process may not send {what} to the drive ({source}); it needs CAP_SYS_ADMIN")]
    Privilege {
        /// The command.
        what: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The kernel could not execute a command.
    #[error("cannot send {what} to the drive: {source}")]
    System {
        /// The command.
        what: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The drive refused a command.
    #[error("the drive refused {what}: {status}")]
    Refused {
        /// The command.
        what: &'static str,
        /// Its status.
        status: Status,
    },
    /// The drive's information about itself and the namespace is inconsistent or not supported.
    #[error("the drive cannot be used: {0}")]
    Namespace(#[from] NamespaceError),
}

impl OpenError {
    /// The error of a call for this command.
    pub(crate) fn call_error(what: &'static str, source: io::Error) -> OpenError {
        match source.raw_os_error() {
            Some(libc::EACCES | libc::EPERM) => OpenError::Privilege { what, source },
            Some(libc::ENOTTY | libc::ENOSYS | libc::EOPNOTSUPP) => OpenError::NoPassthrough(source),
            _ => OpenError::System { what, source },
        }
    }

    /// True if the drive may be all right, and only the passthrough is missing or refused: then the kernel's ordinary
    /// block I/O may be used.
    pub fn is_only_the_way(&self) -> bool {
        matches!(self, OpenError::NoPassthrough(_) | OpenError::Privilege { .. } | OpenError::Refused { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_protocols_nvme::StatusCode;

    fn errno(number: i32) -> io::Error {
        io::Error::from_raw_os_error(number)
    }

    #[test]
    fn only_a_missing_way_leaves_the_ordinary_one() {
        for (number, is_only_the_way) in [
            (libc::EACCES, true),
            (libc::EPERM, true),
            (libc::ENOTTY, true),
            (libc::ENODEV, false),
            (libc::EIO, false),
            (libc::EINVAL, false),
        ] {
            assert_eq!(OpenError::call_error("Identify", errno(number)).is_only_the_way(), is_only_the_way, "{number}");
        }
        let refused = OpenError::Refused { what: "Read", status: StatusCode::INTERNAL_ERROR.into() };
        assert!(refused.is_only_the_way(), "the kernel may read it all the same");
        let text = OpenError::call_error("Identify Controller", errno(libc::EACCES)).to_string();
        assert!(text.contains("Identify Controller") && text.contains("CAP_SYS_ADMIN"), "{text}");
    }
}
