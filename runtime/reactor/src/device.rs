//! Commands to NVMe devices through their nodes: the methods of [`File`] for them.
//!
//! A command blocks a thread of the reactor's own sort for as long as the device takes, at most about its own timeout; the kernel then
//! aborts it and may reset the controller.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use crate::device_ops::{Nvme, check_direction, nvme_id};
pub use crate::device_ops::{NvmeCommand, NvmeQueue, Transfer};
use crate::file::File;

impl File {
    /// Sends one command to the device that this is the node of (`/dev/nvmeXnY` or `/dev/ngXnY`); returns the status of its completion
    /// (bits 15:1 of the field, 0 for success), what it returns beside, and its memory. `is_change` is true for a command that
    /// changes blocks: then [`File::drain`] waits for it too.
    ///
    /// # Errors
    /// Those of `NVME_IOCTL_IO64_CMD` and `NVME_IOCTL_ADMIN64_CMD`, which say nothing of the command's execution: `EACCES` or `EPERM`
    /// without the privilege, `ENOTTY` for other files, `ENODEV` and others when the device is gone, `EINVAL` for more memory than the
    /// kernel maps at once, or memory that goes another way than the opcode says.
    pub async fn nvme(
        &self,
        queue: NvmeQueue,
        command: NvmeCommand,
        data: Transfer,
        metadata: Transfer,
        is_change: bool,
    ) -> (io::Result<(u16, u64)>, Transfer, Transfer) {
        if let Err(error) = check_direction(&command, [&data, &metadata]) {
            return (Err(error), data, metadata);
        }
        let descriptor = Arc::clone(self.descriptor());
        let nvme = Nvme { descriptor, queue, command, data, metadata, result: 0, is_change };
        match is_change {
            true => self.change(nvme).await,
            false => self.operation(nvme).await,
        }
    }

    /// The namespace identifier of the device that this is the node of. A short call.
    ///
    /// # Errors
    /// `ENOTTY` where it is no NVMe device.
    pub fn nvme_id(&self) -> io::Result<u32> {
        nvme_id(self.as_fd())
    }
}
