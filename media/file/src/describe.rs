//! What a file medium says about itself.

use std::io;
use std::path::PathBuf;

use sealblock_block::Medium;

use crate::kernel;
use crate::medium::FileMedium;

/// A file or block device as people want to see it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Description {
    /// The path it was opened by.
    pub path: PathBuf,
    /// What carries out its operations, such as "io_uring (...)".
    pub backend: String,
    /// Whether it bypasses the page cache.
    pub direct: bool,
    /// Whether it is a block device.
    pub block_device: bool,
    /// Whether it takes no writes.
    pub read_only: bool,
    /// Whether other processes are locked out; false where the file system has no locks.
    pub locked: bool,
    /// Whether unmapping gives space back. Known only of a medium open for writing.
    pub punches: bool,
    /// Unit of reads and writes, in bytes.
    pub sector_bytes: u32,
    /// Length in bytes, in whole sectors.
    pub length_bytes: u64,
    /// Space taken in bytes; nothing is known of a block device.
    pub allocated_bytes: Option<u64>,
    /// The type of the file system it is on; a block device is on none.
    pub file_system: Option<String>,
}

impl FileMedium {
    /// Describes the medium as it is now, with ordinary blocking calls.
    ///
    /// # Errors
    /// What `statx` and `fstatfs` say.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn describe(&self) -> io::Result<Description> {
        let known = kernel::statx(&self.file)?;
        let file_system = if self.block_device { None } else { Some(kernel::file_system(&self.file)?) };
        Ok(Description {
            path: self.path().to_owned(),
            backend: sealblock_runtime_reactor::backend().to_string(),
            direct: self.direct(),
            block_device: self.block_device,
            read_only: self.is_read_only(),
            locked: self.locked,
            punches: self.can_punch(),
            sector_bytes: self.sector_bytes(),
            length_bytes: self.len_bytes(),
            // `st_blocks` counts 512 bytes on every file system.
            allocated_bytes: (!self.block_device).then_some(known.stx_blocks * 512),
            file_system,
        })
    }
}
