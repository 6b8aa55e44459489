//! Why commands cannot be passed to a SCSI device. Its blocks may then still be read and written as those of any block device.

use std::io;

/// Why a SCSI device does no integrity work.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The node is no SCSI device, or the kernel has no passthrough for it.
    #[error("the kernel passes no SCSI commands through this node ({0})")]
    NoPassthrough(io::Error),
    /// The process may not do that.
    #[error("this process may not send {what} to the drive ({source}); it needs CAP_SYS_RAWIO")]
    Privilege {
        /// The command.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel could not execute a command.
    #[error("cannot send {what} to the drive: {source}")]
    System {
        /// The command.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// What the drive says of itself is inconsistent or not supported.
    #[error("{0}")]
    Unsuitable(String),
}

impl OpenError {
    /// The error of a call for this command.
    pub(crate) fn of_call(what: &'static str, source: io::Error) -> OpenError {
        match source.raw_os_error() {
            Some(libc::EACCES | libc::EPERM) => OpenError::Privilege { what, source },
            Some(libc::ENOTTY | libc::ENOSYS | libc::EOPNOTSUPP | libc::EINVAL) => OpenError::NoPassthrough(source),
            _ => OpenError::System { what, source },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_what_is_missing() {
        let of = |number| OpenError::of_call("VERIFY (32)", io::Error::from_raw_os_error(number)).to_string();
        assert!(of(libc::EPERM).contains("VERIFY (32)") && of(libc::EPERM).contains("CAP_SYS_RAWIO"));
        assert!(of(libc::ENOTTY).contains("no SCSI commands") && of(libc::ENODEV).contains("cannot send"));
    }
}
