//! SCSI commands that are passed to a device unchanged, by `SG_IO`; on the threads of `device_ops.rs`.
//!
//! Layouts and numbers are those of the kernel's `scsi/sg.h`. The kernel checks every address in the structure, reads
//! or writes only as many bytes as it states, and does not use them after the call returns.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::squeue;

use crate::descriptor::{Descriptor, Tables};
use crate::device_ops::Transfer;
use crate::file::File;
use crate::operation::IoOp;

/// `SG_IO`.
const SG_IO: libc::c_ulong = 0x2285;
/// `interface_id` of this structure.
const INTERFACE: libc::c_int = b'S' as libc::c_int;
/// `SG_DXFER_NONE`, `SG_DXFER_TO_DEV`, `SG_DXFER_FROM_DEV`.
const NONE: libc::c_int = -1;
const TO_DEVICE: libc::c_int = -2;
const FROM_DEVICE: libc::c_int = -3;
/// The maximum number of bytes of a command, and of the sense data that the kernel keeps.
const MAX_COMMAND_BYTES: usize = 32;
const SENSE_BYTES: usize = 96;

/// A SCSI command, without its data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScsiCommand {
    bytes: [u8; MAX_COMMAND_BYTES],
    length: u8,
    timeout_ms: u32,
}

impl ScsiCommand {
    /// A command of these bytes, and how long the kernel waits for its completion before it aborts it; `None` if there
    /// are no bytes or too many.
    pub fn new(cdb: &[u8], timeout_ms: u32) -> Option<ScsiCommand> {
        let mut bytes = [0; MAX_COMMAND_BYTES];
        bytes.get_mut(..cdb.len())?.copy_from_slice(cdb);
        (!cdb.is_empty()).then_some(ScsiCommand { bytes, length: cdb.len() as u8, timeout_ms })
    }
}

/// Sense data as the kernel has kept them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SenseBuffer {
    bytes: [u8; SENSE_BYTES],
    length: u8,
}

impl SenseBuffer {
    /// The bytes that the device has sent.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length).min(SENSE_BYTES)]
    }
}

/// How a command ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScsiReply {
    /// The status byte of the device.
    pub status: u8,
    /// The status from the host adapter's driver, 0 if the device has responded: `DID_*` of the kernel's
    /// `scsi/scsi_status.h`.
    pub host_status: u16,
    /// The status that the kernel adds; its low four bits are 0 or, with sense data, 8.
    pub driver_status: u16,
    /// The number of transferred bytes, at most the length of the data.
    pub moved_bytes: usize,
    /// The sense data.
    pub sense: SenseBuffer,
}

/// `struct sg_io_hdr`.
#[repr(C)]
#[derive(Debug, Default)]
struct SgIoHdr {
    interface_id: libc::c_int,
    dxfer_direction: libc::c_int,
    cmd_len: u8,
    mx_sb_len: u8,
    iovec_count: u16,
    dxfer_len: u32,
    dxferp: usize,
    cmdp: usize,
    sbp: usize,
    timeout: u32,
    flags: u32,
    pack_id: libc::c_int,
    usr_ptr: usize,
    status: u8,
    masked_status: u8,
    msg_status: u8,
    sb_len_wr: u8,
    host_status: u16,
    driver_status: u16,
    resid: libc::c_int,
    duration: u32,
    info: u32,
}

/// One command.
struct Scsi {
    descriptor: Arc<Descriptor>,
    command: ScsiCommand,
    data: Transfer,
    reply: ScsiReply,
}

// SAFETY: it has no entry.
unsafe impl IoOp for Scsi {
    type Output = (io::Result<ScsiReply>, Transfer);

    fn entry(&mut self, _: &Tables) -> Option<squeue::Entry> {
        None
    }

    fn blocks(&self) -> bool {
        true
    }

    fn call(&mut self) -> io::Result<u32> {
        let (address, length) = self.data.parts()?;
        // A structure of 32-bit programs has 32-bit addresses, and all memory of such a program has one.
        let dxferp = usize::try_from(address).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        let mut passed = SgIoHdr {
            interface_id: INTERFACE,
            dxfer_direction: match &self.data {
                Transfer::None => NONE,
                Transfer::In(_) => FROM_DEVICE,
                Transfer::Out(_) => TO_DEVICE,
            },
            cmd_len: self.command.length,
            mx_sb_len: SENSE_BYTES as u8,
            dxfer_len: length,
            dxferp,
            cmdp: self.command.bytes.as_mut_ptr().expose_provenance(),
            sbp: self.reply.sense.bytes.as_mut_ptr().expose_provenance(),
            timeout: self.command.timeout_ms,
            ..SgIoHdr::default()
        };
        self.data.expose();
        // SAFETY: the number says that the argument is this structure. The memory that it names is owned by this
        // operation for the length that it states: command and sense data are arrays of it, and the data are written
        // only if the direction says that they come from the device, in which case they are a buffer without another
        // handle. The device cannot move data in another direction, because the kernel maps them for this one.
        let status = unsafe { libc::ioctl(self.descriptor.as_fd().as_raw_fd(), SG_IO, &raw mut passed) };
        if status < 0 {
            return Err(io::Error::last_os_error());
        }
        let rest = usize::try_from(passed.resid).unwrap_or(0);
        self.reply = ScsiReply {
            status: passed.status,
            host_status: passed.host_status,
            driver_status: passed.driver_status,
            moved_bytes: (length as usize).saturating_sub(rest),
            sense: SenseBuffer { length: passed.sb_len_wr, ..self.reply.sense },
        };
        Ok(0)
    }

    fn finish(self, result: io::Result<u32>) -> Self::Output {
        (result.map(|_| self.reply), self.data)
    }
}

impl File {
    /// Sends one command to the SCSI device of this node (`/dev/sdX` or `/dev/sgX`). Returns how it ended, and its
    /// data. Commands that change blocks go through the kernel's usual path, so [`File::drain`] does not wait for them.
    ///
    /// # Errors
    /// Those of `SG_IO`, which do not tell whether the command was executed: `EPERM` for a command that needs a
    /// privilege, `ENOTTY` or `EINVAL` for other files, `ENODEV` when the device is gone, `EINVAL` or `ENOMEM` for more
    /// data than the kernel maps at once.
    pub async fn scsi(&self, command: ScsiCommand, data: Transfer) -> (io::Result<ScsiReply>, Transfer) {
        let descriptor = Arc::clone(self.descriptor());
        let sense = SenseBuffer { bytes: [0; SENSE_BYTES], length: 0 };
        let reply = ScsiReply { status: 0, host_status: 0, driver_status: 0, moved_bytes: 0, sense };
        self.operation(Scsi { descriptor, command, data, reply }).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_pointer_width = "64")]
    #[test]
    fn the_structure_is_the_kernels() {
        let offsets = [
            (std::mem::offset_of!(SgIoHdr, cmd_len), 8),
            (std::mem::offset_of!(SgIoHdr, iovec_count), 10),
            (std::mem::offset_of!(SgIoHdr, dxfer_len), 12),
            (std::mem::offset_of!(SgIoHdr, dxferp), 16),
            (std::mem::offset_of!(SgIoHdr, sbp), 32),
            (std::mem::offset_of!(SgIoHdr, timeout), 40),
            (std::mem::offset_of!(SgIoHdr, usr_ptr), 56),
            (std::mem::offset_of!(SgIoHdr, status), 64),
            (std::mem::offset_of!(SgIoHdr, host_status), 68),
            (std::mem::offset_of!(SgIoHdr, resid), 72),
            (std::mem::offset_of!(SgIoHdr, info), 80),
        ];
        assert!(offsets.iter().all(|(here, there)| here == there), "{offsets:?}");
        assert_eq!(size_of::<SgIoHdr>(), 88);
    }

    #[test]
    fn a_command_has_one_to_32_bytes() {
        assert!(ScsiCommand::new(&[0; 6], 1).is_some() && ScsiCommand::new(&[0; 32], 1).is_some());
        assert!(ScsiCommand::new(&[], 1).is_none() && ScsiCommand::new(&[0; 33], 1).is_none());
    }
}
