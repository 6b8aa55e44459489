//! A namespace over NVMe/TCP as a block device.

mod device;
mod error;
mod facts;
mod options;

pub use device::{NvmeTcpDevice, discover};
pub use error::ConnectError;
pub use facts::{Counters, Facts};
pub use options::{Address, Options, Protection, Reconnect};
