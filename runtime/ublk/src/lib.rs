//! Block devices whose server is a process (ublk, Linux 6.0 and later; protection information since 7.0).
//!
//! [`Control`] creates and starts a device, and takes over one whose server is gone. Each of its [`Queue`]s hands out
//! requests to one reactor: one command answers a request and waits for the next. Data and tags are copied by reads and
//! writes of the character device (`UBLK_F_USER_COPY`), so that the kernel never has an address of this process.
//!
//! Everything here is the kernel's interface; `exports/ublk` defines what requests mean for a device.

#![allow(unsafe_code)]

mod abi;
mod control;
mod queue;

pub use abi::{
    Attributes, Descriptor, DeviceInfo, DeviceState, Features, IntegrityChecksum, MAX_DEPTH, Params, RequestOperation,
    SECTOR_BYTES,
};
pub use control::{CONTROL_PATH, Control, ControlError, block_path};
pub use queue::{CharacterDevice, Queue};
