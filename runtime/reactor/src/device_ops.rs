//! Commands that are passed to a device unchanged, by `ioctl`: NVMe passthrough. To add another kind, copy [`Nvme`];
//! SCSI is in `scsi_ops.rs`.
//!
//! A command blocks a thread of a separate set for as long as the device takes, at most about its own timeout; the
//! kernel then aborts it and may reset the controller.
//!
//! Layouts and numbers are those of the kernel's `linux/nvme_ioctl.h`. The kernel checks every address in a structure,
//! reads or writes only as many bytes as it states, and does not use them after the call returns.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use io_uring::squeue;
use sealblock_runtime_memory::{Buffer, Slice};

use crate::descriptor::{Descriptor, Tables};
use crate::file::File;
use crate::operation::IoOp;

/// `NVME_IOCTL_ID`: `_IO('N', 0x40)`.
const NVME_ID: libc::c_ulong = 0x4E40;
/// `NVME_IOCTL_ADMIN64_CMD`: `_IOWR('N', 0x47, struct nvme_passthru_cmd64)`.
const NVME_ADMIN: libc::c_ulong = 0xC050_4E47;
/// `NVME_IOCTL_IO64_CMD`: `_IOWR('N', 0x48, struct nvme_passthru_cmd64)`.
const NVME_IO: libc::c_ulong = 0xC050_4E48;

/// Memory for the data of a command.
#[derive(Debug, Default)]
pub enum Transfer {
    /// Nothing.
    #[default]
    None,
    /// The device fills this buffer.
    In(Buffer),
    /// The device reads these bytes.
    Out(Slice),
}

impl Transfer {
    /// Address and length for the kernel. Memory to be read also has a mutable address, because the structure has no
    /// other.
    pub(crate) fn parts(&mut self) -> io::Result<(u64, u32)> {
        let (address, len) = match self {
            Transfer::None => return Ok((0, 0)),
            Transfer::In(buffer) => (buffer.as_mut_ptr().addr(), buffer.len()),
            Transfer::Out(slice) => (slice.as_ptr().addr(), slice.len()),
        };
        let len = u32::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        Ok((address as u64, len))
    }

    /// Exposes the addresses of the memory to the kernel.
    pub(crate) fn expose(&mut self) {
        match self {
            Transfer::None => {}
            Transfer::In(buffer) => _ = buffer.as_mut_ptr().expose_provenance(),
            Transfer::Out(slice) => _ = slice.as_ptr().expose_provenance(),
        }
    }
}

/// The queue of a passthrough command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NvmeQueue {
    /// The controller's admin queue.
    Admin,
    /// An I/O queue; the namespace must be that of the device.
    Io,
}

/// The dwords of a passthrough command that do not depend on how its data are transferred. The kernel sets the
/// identifier and the pointers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NvmeCommand {
    /// OPC.
    pub opcode: u8,
    /// NSID.
    pub nsid: u32,
    /// Command dwords 2 and 3.
    pub cdw2_3: [u32; 2],
    /// Command dwords 10 to 15.
    pub cdw10_15: [u32; 6],
    /// How long the kernel waits for the completion before it aborts the command, in milliseconds.
    pub timeout_ms: u32,
}

/// `struct nvme_passthru_cmd64`.
#[repr(C)]
#[derive(Debug, Default)]
struct PassthruCmd64 {
    opcode: u8,
    flags: u8,
    rsvd1: u16,
    nsid: u32,
    cdw2_3: [u32; 2],
    metadata: u64,
    addr: u64,
    metadata_len: u32,
    data_len: u32,
    cdw10_15: [u32; 6],
    timeout_ms: u32,
    rsvd2: u32,
    result: u64,
}

const _: () = assert!(size_of::<PassthruCmd64>() == 0x50, "the size that is part of the number of the call");

/// One passthrough command.
struct Nvme {
    descriptor: Arc<Descriptor>,
    queue: NvmeQueue,
    command: NvmeCommand,
    data: Transfer,
    metadata: Transfer,
    /// What the completion returns besides its status.
    result: u64,
    is_change: bool,
}

// SAFETY: it has no entry.
unsafe impl IoOp for Nvme {
    /// The status field of the completion, without phase tag, and its result.
    type Output = (io::Result<(u16, u64)>, Transfer, Transfer);

    fn entry(&mut self, _: &Tables) -> Option<squeue::Entry> {
        None
    }

    fn blocks(&self) -> bool {
        true
    }

    fn call(&mut self) -> io::Result<u32> {
        let NvmeCommand { opcode, nsid, cdw2_3, cdw10_15, timeout_ms } = self.command;
        let (addr, data_len) = self.data.parts()?;
        let (metadata, metadata_len) = self.metadata.parts()?;
        let mut passed = PassthruCmd64 {
            opcode,
            nsid,
            cdw2_3,
            metadata,
            addr,
            metadata_len,
            data_len,
            cdw10_15,
            timeout_ms,
            ..PassthruCmd64::default()
        };
        let number = match self.queue {
            NvmeQueue::Admin => NVME_ADMIN,
            NvmeQueue::Io => NVME_IO,
        };
        self.data.expose();
        self.metadata.expose();
        // SAFETY: the number says that the argument is this structure. The memory that it names is owned by this
        // operation for the length that it states, and exclusively if the device fills it; a buffer whose bytes are
        // read is not written. The kernel takes the direction of the data only from the low bits of the opcode, and
        // `Transfer` matches these: see `check_direction`.
        let status = unsafe { libc::ioctl(self.descriptor.as_fd().as_raw_fd(), number, &raw mut passed) };
        self.result = passed.result;
        // A positive result is the status of the completion.
        u32::try_from(status).map_err(|_| match io::Error::last_os_error() {
            // The kernel cancelled the command, because it took too long or the controller was reset. Sending it again
            // at once, as after other interruptions, would wait as long again.
            error if error.raw_os_error() == Some(libc::EINTR) => io::Error::from_raw_os_error(libc::ETIMEDOUT),
            error => error,
        })
    }

    fn finish(self, result: io::Result<u32>) -> Self::Output {
        let returned = self.result;
        (result.map(|status| (status as u16, returned)), self.data, self.metadata)
    }

    fn discard(self, _: io::Result<u32>) {
        if self.is_change {
            self.descriptor.late().ended();
        }
    }
}

/// Refuses a command whose opcode moves data in another direction than its memory: bits 1:0 of an opcode are 01b if
/// data go to the controller, 10b if they come from it, 11b for both (NVM Express Base, "Opcode").
fn check_direction(command: &NvmeCommand, transfers: [&Transfer; 2]) -> io::Result<()> {
    let fits = |transfer: &Transfer| match transfer {
        Transfer::None => true,
        Transfer::In(_) => command.opcode & 3 == 2,
        Transfer::Out(_) => command.opcode & 3 == 1,
    };
    if transfers.into_iter().all(fits) { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EINVAL)) }
}

/// The namespace identifier of an NVMe device node.
fn nvme_id(fd: BorrowedFd<'_>) -> io::Result<u32> {
    // SAFETY: the call takes no argument.
    let nsid = unsafe { libc::ioctl(fd.as_raw_fd(), NVME_ID) };
    u32::try_from(nsid).map_err(|_| io::Error::last_os_error())
}

impl File {
    /// Sends one command to the device of this node (`/dev/nvmeXnY` or `/dev/ngXnY`). Returns the status of its
    /// completion (bits 15:1 of the field, 0 for success), its result, and its memory. `is_change` is true for a
    /// command that changes blocks: then [`File::drain`] also waits for it.
    ///
    /// # Errors
    /// Those of `NVME_IOCTL_IO64_CMD` and `NVME_IOCTL_ADMIN64_CMD`, which do not show whether the command was executed:
    /// `EACCES` or `EPERM` without the privilege, `ENOTTY` for other files, `ENODEV` and others when the device is
    /// gone, `ETIMEDOUT` if the kernel cancelled it, `EINVAL` for more memory than the kernel maps at once, or for a
    /// direction that does not match the opcode.
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

    /// The namespace identifier of the device of this node. A short call.
    ///
    /// # Errors
    /// `ENOTTY` if it is not an NVMe device.
    pub fn nvme_id(&self) -> io::Result<u32> {
        nvme_id(self.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structure_is_the_kernels() {
        let offsets = [
            (std::mem::offset_of!(PassthruCmd64, nsid), 4),
            (std::mem::offset_of!(PassthruCmd64, cdw2_3), 8),
            (std::mem::offset_of!(PassthruCmd64, metadata), 16),
            (std::mem::offset_of!(PassthruCmd64, addr), 24),
            (std::mem::offset_of!(PassthruCmd64, metadata_len), 32),
            (std::mem::offset_of!(PassthruCmd64, data_len), 36),
            (std::mem::offset_of!(PassthruCmd64, cdw10_15), 40),
            (std::mem::offset_of!(PassthruCmd64, timeout_ms), 64),
            (std::mem::offset_of!(PassthruCmd64, result), 72),
        ];
        assert!(offsets.iter().all(|(here, there)| here == there), "{offsets:?}");
        // Direction, size, type and number of an `_IOWR`.
        let encoded =
            |number: libc::c_ulong| 3 << 30 | (size_of::<PassthruCmd64>() as libc::c_ulong) << 16 | 0x4E << 8 | number;
        assert_eq!((NVME_ADMIN, NVME_IO), (encoded(0x47), encoded(0x48)));
    }

    #[test]
    fn memory_goes_the_way_that_the_opcode_says() {
        let command = |opcode| NvmeCommand { opcode, ..NvmeCommand::default() };
        let (into, from) = (Transfer::In(Buffer::zeroed(4)), Transfer::Out(Slice::copy_from(&[1])));
        for (opcode, good, bad) in [(2, &into, &from), (1, &from, &into)] {
            assert!(check_direction(&command(opcode), [good, &Transfer::None]).is_ok());
            assert!(check_direction(&command(opcode), [good, bad]).is_err());
            assert!(check_direction(&command(opcode), [bad, &Transfer::None]).is_err());
        }
        for opcode in [0, 3] {
            assert!(check_direction(&command(opcode), [&into, &Transfer::None]).is_err());
            assert!(check_direction(&command(opcode), [&Transfer::None, &Transfer::None]).is_ok());
        }
    }
}
