//! A regular file as the open transaction has it, and what all changes of its data share.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

use sealblock_btrfs_format::items::inode::{InodeFlags, InodeItem, Timespec};

use crate::error::ChangeError;
use crate::file_map::{File, FileMapError};

/// The most items of a file that one change drops.
pub(crate) const ITEMS_OF_A_STEP: NonZeroUsize = NonZeroUsize::new(256).expect("it is not 0");

/// A regular file as the open transaction has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileInfo {
    pub file: File,
    pub inode: InodeItem,
}

impl FileInfo {
    pub fn stored_size(&self) -> u64 {
        self.inode.size.get()
    }

    pub fn has(&self, flags: InodeFlags) -> bool {
        self.inode.flags().intersects(flags)
    }

    pub fn sector(&self) -> u64 {
        u64::from(self.file.sector_bytes)
    }

    /// The first byte of the sector of a byte.
    pub fn sector_start(&self, at: u64) -> u64 {
        at / self.sector() * self.sector()
    }

    /// The sectors that have bytes of a range.
    pub fn sectors(&self, range: &Range<u64>) -> Range<u64> {
        self.sector_start(range.start)..self.file.sectors_end(range.end)
    }

    /// The bytes of a request.
    pub fn range(&self, offset: u64, bytes: u64) -> Result<Range<u64>, ChangeError> {
        let end = offset.checked_add(bytes).filter(|end| *end <= self.file.max_bytes());
        let too_large = FileMapError::TooLarge { ino: self.file.ino, end: offset.saturating_add(bytes) };
        Ok(offset..end.ok_or(ChangeError::File(too_large))?)
    }
}

/// The time now, as inodes have it: seconds since 1970 and nanoseconds. A clock that is set before 1970 gives 1970.
///
/// It is the time of the machine, which may be set back. Nothing relies on its order.
pub fn now() -> Timespec {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    Timespec { seconds: seconds.into(), nanoseconds: since.subsec_nanos().into() }
}
