//! Drives of this machine as devices that do integrity work themselves.
//!
//! [`NvmeNamespace`] is a namespace of an NVMe drive, used through the kernel's passthrough; [`NvmeDevice`] is the
//! block device. It reads and writes by the kernel's ordinary block I/O if that can transfer everything, and sends
//! Verify, Compare and Write Zeroes to the drive itself. [`ScsiDevice`] is a SCSI drive, to which Verify, Compare and
//! CompareAndWrite are sent. [`TaggedDevice`] is any block device whose tags are transferred with the kernel's ordinary
//! reads and writes.
//!
//! Invariants:
//! - Nothing is written through a node that was opened for reading, whatever the process is permitted to do.
//! - Whatever the drive, sysfs or the kernel reports is checked before use, and an error names the request and who
//!   failed it.
//! - A device that reports native Verify has executed a Verify since it was opened.
//! - For a device whose tags are transferred with ordinary reads, each opening tests that the kernel fills them in.
//! - Blocks are checked against their tags on arrival, whatever the drive checked before.
//! - After a change through passthrough the kernel's page cache has no older copy of the blocks.

mod block_codec;
mod node;
mod nvme {
    //! NVMe drives through `NVME_IOCTL_IO64_CMD`, `NVME_IOCTL_ADMIN64_CMD` and `NVME_IOCTL_ID`.

    mod commands;
    mod device;
    mod error;
    mod open;

    pub use device::NvmeDevice;
    pub use error::OpenError;
    pub use open::{NvmeInfo, NvmeNamespace, Options};
}

mod scsi {
    //! SCSI drives through `SG_IO`.

    mod answer;
    mod compare_and_write;
    mod device;
    mod open;
    #[cfg(test)]
    mod tests;
    mod transport;
    mod unit;
    mod verify;

    pub use device::ScsiDevice;
    pub use open::{ScsiInfo, TagMaker};
    pub use transport::{Answer, OpenError, SgIo, Transport};
}

mod tagged {
    //! Block devices whose kernel integrity profile has tags, by reads and writes that carry these.

    mod device;
    mod profile;
    #[cfg(test)]
    mod tests;

    pub use device::{TaggedDevice, TaggedIo};
    pub use profile::{TagProfile, WhyNoTags};
}

pub use node::{NodeKind, block_node, linked_drive};
pub use nvme::{NvmeDevice, NvmeInfo, NvmeNamespace, OpenError, Options};
/// Why a SCSI drive does no integrity work.
pub use scsi::OpenError as ScsiOpenError;
pub use scsi::{Answer, ScsiDevice, ScsiInfo, SgIo, TagMaker, Transport};
/// Who makes the tags of blocks.
pub use sealblock_media_nvme::PiSource;
pub use tagged::{TagProfile, TaggedDevice, TaggedIo, WhyNoTags};
