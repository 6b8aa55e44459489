//! The number of a block device, by which the kernel knows it whatever its name is.

pub mod below;
pub(crate) mod claims;
pub(crate) mod holder;
pub mod leaves;
pub mod mounts;
pub mod owners;

use std::fmt;
use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Major and minor number of a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct DeviceNumber {
    /// Which driver.
    pub major: u32,
    /// Which of its devices.
    pub minor: u32,
}

impl DeviceNumber {
    /// Of the `dev_t` of the C library.
    pub fn from_raw(raw: u64) -> DeviceNumber {
        DeviceNumber { major: libc::major(raw), minor: libc::minor(raw) }
    }

    /// The device itself, or the one that a file's file system is on.
    pub fn of(about: &Metadata) -> DeviceNumber {
        DeviceNumber::from_raw(if about.file_type().is_block_device() { about.rdev() } else { about.dev() })
    }

    /// False for the numbers of file systems that lie on no single device, such as btrfs, tmpfs and NFS.
    pub fn is_device(self) -> bool {
        self.major != 0
    }
}

impl fmt::Display for DeviceNumber {
    /// `MAJOR:MINOR`, as in sysfs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

/// A text is no device number.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("no device number")]
pub struct NumberError;

impl FromStr for DeviceNumber {
    type Err = NumberError;

    fn from_str(text: &str) -> Result<DeviceNumber, NumberError> {
        let (major, minor) = text.split_once(':').ok_or(NumberError)?;
        let number = |text: &str| {
            // `parse` takes a sign.
            let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| text.parse().ok()).flatten().ok_or(NumberError)
        };
        Ok(DeviceNumber { major: number(major)?, minor: number(minor)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_and_print() {
        let number = DeviceNumber { major: 259, minor: 3 };
        assert_eq!(("259:3".parse(), number.to_string().as_str()), (Ok(number), "259:3"));
        for text in ["", ":", "8", "8:", ":8", "+8:1", "8:-1", "8:1:2", "4294967296:0", " 8:1"] {
            assert_eq!(text.parse::<DeviceNumber>(), Err(NumberError), "{text}");
        }
        assert_eq!(DeviceNumber::from_raw(libc::makedev(8, 300)), DeviceNumber { major: 8, minor: 300 });
        assert!(number.is_device() && !DeviceNumber { major: 0, minor: 39 }.is_device());
    }
}
