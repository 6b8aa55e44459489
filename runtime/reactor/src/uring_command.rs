//! Commands that a ring passes unchanged to the driver of a character device (`IORING_OP_URING_CMD`), as ublk uses
//! them.
//!
//! Such a command waits for as long as its driver takes, so it counts as one that waits for a peer and not against the
//! limit of disk operations. Linux cancels it only when the driver ends it or the process ends, so a reactor does not
//! end before that, even if the command's future was dropped. The driver may require that all commands come from one
//! thread; those of a reactor do.

use std::io;
use std::sync::Arc;

use io_uring::{opcode, squeue};

use crate::descriptor::{Descriptor, Tables};
use crate::file::File;
use crate::operation::{Direction, Interest, IoOp, entry_for};

/// The driver's own bytes in a command, in a submission of the usual size.
pub const COMMAND_BYTES: usize = 16;

struct UringCommand {
    descriptor: Arc<Descriptor>,
    operation: u32,
    payload: [u8; COMMAND_BYTES],
}

// SAFETY: the entry names no memory except what its author promised to keep; the descriptor is owned.
unsafe impl IoOp for UringCommand {
    type Output = io::Result<u32>;

    fn entry(&mut self, tables: &Tables) -> Option<squeue::Entry> {
        let (operation, payload) = (self.operation, self.payload);
        entry_for!(tables.target(&self.descriptor), |fd| opcode::UringCmd16::new(fd, operation).cmd(payload).build())
    }

    /// No system call passes such a command.
    fn call(&mut self) -> io::Result<u32> {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }

    fn finish(self, result: io::Result<u32>) -> Self::Output {
        result
    }

    fn waits(&self) -> Option<Interest> {
        Some(Interest { fd: self.descriptor.raw(), direction: Direction::Readable })
    }
}

impl File {
    /// Passes one command to the driver of this character device; returns the driver's result.
    ///
    /// # Safety
    /// The payload names no memory, or memory that stays valid until the driver has completed the command, also if the
    /// future is dropped; and the command changes no memory that anything else uses.
    ///
    /// # Errors
    /// The driver's; `EOPNOTSUPP` on a reactor without io_uring.
    pub async unsafe fn uring_command(&self, operation: u32, payload: [u8; COMMAND_BYTES]) -> io::Result<u32> {
        let descriptor = Arc::clone(self.descriptor());
        self.operation(UringCommand { descriptor, operation, payload }).await
    }
}
