//! Sends commands to a logical unit, and returns the reply of the device or the kernel; and the errors of opening it.
//! If that fails, its blocks may still be read and written as those of any block device.

use std::io;
use std::time::Duration;

use sealblock_protocols_scsi::{Cdb, Sense, Status};
use sealblock_runtime_reactor::{File, ScsiCommand, Transfer};

use crate::node::forget_cached;

/// The reply of the device or the kernel to a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Answer {
    /// The status of the device.
    pub status: Status,
    /// The sense data, if they can be decoded.
    pub sense: Option<Sense>,
    /// The status of the host adapter's driver; 0 if the device has replied.
    pub host_status: u16,
    /// Bytes of data that were transferred.
    pub moved_bytes: usize,
}

/// Sends commands to a logical unit.
pub trait Transport {
    /// Sends one command, once; returns its reply and its data.
    fn send(&self, cdb: &Cdb, data: Transfer) -> impl Future<Output = (io::Result<Answer>, Transfer)>;

    /// Makes the kernel drop its cached pages of these bytes, which a command has changed without the kernel's
    /// knowledge.
    fn forget_cached(&self, start_bytes: u64, length_bytes: u64);
}

/// The kernel's passthrough.
#[derive(Clone)]
pub struct SgIo {
    file: File,
    timeout_ms: u32,
}

impl SgIo {
    /// Commands to the device whose node this is; the kernel waits this long for each.
    pub fn new(file: File, timeout: Duration) -> SgIo {
        SgIo { file, timeout_ms: u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX) }
    }
}

impl Transport for SgIo {
    async fn send(&self, cdb: &Cdb, data: Transfer) -> (io::Result<Answer>, Transfer) {
        let command = ScsiCommand::new(cdb.as_bytes(), self.timeout_ms).expect("a command has 6 to 32 bytes");
        let (result, data) = self.file.scsi(command, data).await;
        let answer = result.map(|reply| Answer {
            status: Status(reply.status),
            sense: Sense::decode(reply.sense.as_bytes()).ok(),
            host_status: reply.host_status,
            moved_bytes: reply.moved_bytes,
        });
        (answer, data)
    }

    fn forget_cached(&self, start_bytes: u64, length_bytes: u64) {
        forget_cached(&self.file, start_bytes, length_bytes);
    }
}

/// The reasons why a SCSI device does no integrity work.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The node is not a SCSI device, or the kernel has no passthrough for it.
    #[error("the kernel passes no SCSI commands through this node ({0})")]
    NoPassthrough(io::Error),
    /// The process is not permitted to do that.
    #[error("this process may not send {what} to the drive ({source}); it needs CAP_SYS_RAWIO")]
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
    /// The drive's information about itself is inconsistent or not supported.
    #[error("{0}")]
    Unsuitable(String),
}

impl OpenError {
    /// The error of a call for this command.
    pub(crate) fn call_error(what: &'static str, source: io::Error) -> OpenError {
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
        let of = |number| OpenError::call_error("VERIFY (32)", io::Error::from_raw_os_error(number)).to_string();
        assert!(of(libc::EPERM).contains("VERIFY (32)") && of(libc::EPERM).contains("CAP_SYS_RAWIO"));
        assert!(of(libc::ENOTTY).contains("no SCSI commands") && of(libc::ENODEV).contains("cannot send"));
    }
}
