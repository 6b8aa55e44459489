//! Where the data of a file are, and where its holes.

use std::ops::Range;

use super::{FileId, ITEMS_OF_A_STEP};
use crate::engine::{Engine, EngineError};
use crate::file_map::{FileMap, Mapping};
use crate::transaction::{ChangeError, Transaction};

/// The data in a part of a file.
struct Found {
    /// The first run of data that ends behind where the part begins.
    data: Option<Range<u64>>,
    /// The end of the part.
    end: u64,
}

impl Engine {
    /// The first data of a file that end behind a byte: the bytes up to the next hole, or to the end of the file, from
    /// this byte on. Space that was allocated and never written is a hole. `None` if there are no more.
    ///
    /// # Errors
    /// If it is not a regular file, its items are damaged, or cannot be read.
    pub async fn next_data(&self, root: u64, ino: u64, from: u64) -> Result<Option<Range<u64>>, EngineError> {
        let id = FileId { root, ino };
        let info = self.inspect(|transaction| transaction.file_info(id)).await?;
        let size = self.size_ahead(root, ino).unwrap_or(info.stored_size());
        let (mut at, mut data) = (from, None::<Range<u64>>);
        while at < size {
            let found = self.inspect(|transaction| data_of_part(transaction, id, at..size)).await?;
            data = match (data, found.data) {
                (None, None) => None,
                (None, Some(run)) => Some(run.start.max(from)..run.end),
                (Some(run), Some(next)) if next.start <= run.end => Some(run.start..next.end),
                (Some(run), _) => return Ok(Some(run)),
            };
            // Data that go up to the end of the part may go on.
            match data {
                Some(run) if run.end < found.end => return Ok(Some(run.start..run.end.min(size))),
                run => data = run,
            }
            at = found.end;
        }
        Ok(data.map(|run| run.start..run.end.min(size)))
    }
}

/// The first data in some items of a range.
fn data_of_part(transaction: &mut Transaction, id: FileId, range: Range<u64>) -> Result<Found, ChangeError> {
    let info = transaction.file_info(id)?;
    let view = transaction.view(id.root)?;
    let parts = FileMap::new(info.file, &view).parts(info.sectors(&range), ITEMS_OF_A_STEP)?;
    let mut data = None::<Range<u64>>;
    for part in parts.parts() {
        let has_data = match part {
            Mapping::Hole(_) => false,
            Mapping::Inline(_) => true,
            Mapping::Extent(part) => !part.is_prealloc,
        };
        let bytes = part.range(info.file.sector_bytes);
        match &mut data {
            None if has_data => data = Some(bytes),
            Some(run) if has_data && run.end == bytes.start => run.end = bytes.end,
            None => {}
            Some(_) => break,
        }
    }
    Ok(Found { data, end: parts.range().end.max(range.start + 1) })
}
