//! Carries commands to a logical unit, and brings back what the device or the kernel says of them.

use std::io;
use std::time::Duration;

use sealblock_protocols_scsi::{Cdb, Sense, Status};
use sealblock_runtime_reactor::{File, ScsiCommand, Transfer};

/// What the device or the kernel says of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Answer {
    /// The status of the device.
    pub status: Status,
    /// The sense data, if there are any that can be read.
    pub sense: Option<Sense>,
    /// What the host adapter's driver says, 0 if the device has answered.
    pub host_status: u16,
    /// Bytes of the data that were moved.
    pub moved_bytes: usize,
}

/// A way to a logical unit.
pub trait Transport {
    /// Sends one command, once; returns its answer and its data.
    fn send(&self, cdb: &Cdb, data: Transfer) -> impl Future<Output = (io::Result<Answer>, Transfer)>;
}

/// The kernel's passthrough.
#[derive(Clone)]
pub struct SgIo {
    file: File,
    timeout_ms: u32,
}

impl SgIo {
    /// Commands to the device whose node this is, for which the kernel waits so long.
    pub fn new(file: File, timeout: Duration) -> SgIo {
        SgIo { file, timeout_ms: u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX) }
    }
}

impl Transport for SgIo {
    async fn send(&self, cdb: &Cdb, data: Transfer) -> (io::Result<Answer>, Transfer) {
        let command = ScsiCommand::new(cdb.as_bytes(), self.timeout_ms).expect("a command has 6 to 32 bytes");
        // Commands that change blocks go the kernel's ordinary way.
        let (result, data) = self.file.scsi(command, data, false).await;
        let answer = result.map(|reply| Answer {
            status: Status(reply.status),
            sense: Sense::decode(reply.sense.as_bytes()).ok(),
            host_status: reply.host_status,
            moved_bytes: reply.moved_bytes,
        });
        (answer, data)
    }
}
