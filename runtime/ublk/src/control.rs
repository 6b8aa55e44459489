//! The control device: creates, starts, recovers, stops and deletes block devices.
//!
//! Each command waits for its end, some of them for as long as a server takes, so call them where waiting does no harm.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use io_uring::{IoUring, cqueue, opcode, squeue, types};

use crate::abi::{
    ControlCommand, DEVICE_INFO_BYTES, DeviceInfo, Features, OLD_PARAMS_BYTES, PARAMS_BYTES, Params, control_payload,
};

/// The control device's node.
pub const CONTROL_PATH: &str = "/dev/ublk-control";

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The control device cannot be opened.
    #[error("{CONTROL_PATH}: {0}")]
    Open(io::Error),
    /// There is no ring for its commands.
    #[error("io_uring with submissions of 128 bytes: {0}")]
    Ring(io::Error),
    /// The driver refuses a command.
    #[error("{what}: {error}")]
    Command {
        /// What was attempted.
        what: &'static str,
        /// The driver's error.
        error: io::Error,
    },
    /// The driver reports something impossible about a device.
    #[error("{0}: the driver's answer cannot be understood")]
    Answer(&'static str),
}

impl ControlError {
    /// The error number, if the system refused.
    pub fn errno(&self) -> Option<i32> {
        match self {
            ControlError::Open(error) | ControlError::Ring(error) | ControlError::Command { error, .. } => {
                error.raw_os_error()
            }
            ControlError::Answer(_) => None,
        }
    }
}

/// The node of a block device.
pub fn block_path(number: u32) -> PathBuf {
    format!("/dev/ublkb{number}").into()
}

/// The open control device.
pub struct Control {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    file: OwnedFd,
}

impl Control {
    /// Opens the control device.
    ///
    /// # Errors
    /// Without the driver, the privilege, or io_uring with large submissions.
    pub fn open() -> Result<Control, ControlError> {
        let file = OpenOptions::new().read(true).write(true).open(CONTROL_PATH).map_err(ControlError::Open)?;
        let ring = IoUring::builder().dontfork().build(4).map_err(ControlError::Ring)?;
        Ok(Control { ring, file: file.into() })
    }

    /// Executes a command, whose buffer the driver reads or fills, and waits for its end.
    fn execute(
        &mut self,
        what: &'static str,
        command: ControlCommand,
        device: u32,
        buffer: &mut [u8],
        data: u64,
    ) -> Result<(), ControlError> {
        let refused = |error| ControlError::Command { what, error };
        let (address, len) = (buffer.as_mut_ptr().expose_provenance() as u64, buffer.len() as u16);
        let payload = control_payload(device, if len > 0 { address } else { 0 }, len, data);
        let entry = opcode::UringCmd80::new(types::Fd(self.file.as_raw_fd()), command.number()).cmd(payload).build();
        // SAFETY: the entry names the buffer, which is borrowed for this call alone and outlives the command: its
        // completion is awaited below whatever happens. The driver writes no more than the length that is passed to it.
        unsafe { self.ring.submission().push(&entry) }.expect("one command at a time has room");
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The kernel may still have the entry and the buffer, and nothing shows when it has finished with them.
                Err(error) => panic!("a ring that was set up does not wait: {error}"),
            }
            if let Some(completion) = self.ring.completion().next() {
                let result = completion.result();
                return if result < 0 { Err(refused(io::Error::from_raw_os_error(-result))) } else { Ok(()) };
            }
        }
    }

    fn simple(
        &mut self,
        what: &'static str,
        command: ControlCommand,
        device: u32,
        data: u64,
    ) -> Result<(), ControlError> {
        self.execute(what, command, device, &mut [], data)
    }

    /// The features of this kernel's driver.
    ///
    /// # Errors
    /// On kernels before 6.5, which do not report them.
    pub fn features(&mut self) -> Result<Features, ControlError> {
        let mut buffer = [0; 8];
        self.execute("asking for the driver's features", ControlCommand::GetFeatures, u32::MAX, &mut buffer, 0)?;
        Ok(Features::from_bits_retain(u64::from_ne_bytes(buffer)))
    }

    /// Creates a device that is not started. Returns its properties.
    ///
    /// # Errors
    /// The driver's: `EEXIST` if there is one with this number, `EINVAL` for unsupported features, `ENOSPC` for too
    /// many devices.
    pub fn add(&mut self, info: DeviceInfo) -> Result<DeviceInfo, ControlError> {
        const WHAT: &str = "making the device";
        let mut buffer = info.to_bytes();
        self.execute(WHAT, ControlCommand::AddDevice, info.number, &mut buffer, 0)?;
        DeviceInfo::from_bytes(&buffer).ok_or(ControlError::Answer(WHAT))
    }

    /// The driver's information about a device.
    ///
    /// # Errors
    /// `ENODEV` if there is none.
    pub fn info(&mut self, number: u32) -> Result<DeviceInfo, ControlError> {
        const WHAT: &str = "asking for the device";
        let mut buffer = [0; DEVICE_INFO_BYTES];
        self.execute(WHAT, ControlCommand::GetDeviceInfo, number, &mut buffer, 0)?;
        DeviceInfo::from_bytes(&buffer).ok_or(ControlError::Answer(WHAT))
    }

    /// Sets the parameters of a device that is not started. A driver that does not know a part of them ignores that
    /// part without an error, so query its features first.
    ///
    /// # Errors
    /// `EINVAL` for parameters that the driver refuses.
    pub fn set_params(&mut self, number: u32, params: Params) -> Result<(), ControlError> {
        let mut buffer = params.to_bytes();
        self.execute("describing the device", ControlCommand::SetParams, number, &mut buffer, 0)
    }

    /// The parameters of a device.
    ///
    /// # Errors
    /// The driver's, or when [`Control::set_params`] cannot describe such a device.
    pub fn params(&mut self, number: u32) -> Result<Params, ControlError> {
        const WHAT: &str = "asking what the device is";
        let mut buffer = [0; PARAMS_BYTES];
        buffer[..4].copy_from_slice(&(PARAMS_BYTES as u32).to_ne_bytes());
        self.execute(WHAT, ControlCommand::GetParams, number, &mut buffer, 0)?;
        let len = u32::from_ne_bytes(*buffer.first_chunk().expect("there are 152 bytes")) as usize;
        let there = buffer.get(..len.max(OLD_PARAMS_BYTES)).unwrap_or(&buffer);
        Params::from_bytes(there).ok_or(ControlError::Answer(WHAT))
    }

    /// Starts a device whose queues fetch requests. Returns when all queues do and the block device exists.
    ///
    /// # Errors
    /// The driver's.
    pub fn start(&mut self, number: u32) -> Result<(), ControlError> {
        self.simple("starting the device", ControlCommand::StartDevice, number, std::process::id().into())
    }

    /// Begins to serve a quiesced device again.
    ///
    /// # Errors
    /// `EBUSY` while its last server still exists, or if it is not quiesced.
    pub fn start_recovery(&mut self, number: u32) -> Result<(), ControlError> {
        self.simple("taking the device over", ControlCommand::StartRecovery, number, 0)
    }

    /// Directs requests to this process, whose queues fetch. Returns when all queues do.
    ///
    /// # Errors
    /// The driver's.
    pub fn end_recovery(&mut self, number: u32) -> Result<(), ControlError> {
        self.simple("taking the device over", ControlCommand::EndRecovery, number, std::process::id().into())
    }

    /// Changes the size of the block device to this number of sectors; its users are notified.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for a device without [`Features::UPDATE_SIZE`](crate::Features::UPDATE_SIZE).
    pub fn update_size(&mut self, number: u32, sectors: u64) -> Result<(), ControlError> {
        self.simple("changing the size of the device", ControlCommand::UpdateSize, number, sectors)
    }

    /// Removes the block device. Returns when its requests have completed.
    ///
    /// # Errors
    /// The driver's.
    pub fn stop(&mut self, number: u32) -> Result<(), ControlError> {
        self.simple("stopping the device", ControlCommand::StopDevice, number, 0)
    }

    /// Deletes a stopped device; returns when its server has closed it.
    ///
    /// # Errors
    /// `ENODEV` if there is none.
    pub fn delete(&mut self, number: u32) -> Result<(), ControlError> {
        self.simple("deleting the device", ControlCommand::DeleteDevice, number, 0)
    }

    /// Deletes a stopped device as soon as its server has closed it (Linux 6.9).
    ///
    /// # Errors
    /// `ENODEV` if there is none.
    pub fn delete_later(&mut self, number: u32) -> Result<(), ControlError> {
        self.simple("deleting the device", ControlCommand::DeleteDeviceLater, number, 0)
    }
}
