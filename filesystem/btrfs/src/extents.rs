//! The data of a file: its extents from any byte on, and the checksums of stored data.

use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::file_extent::{Compression, ExtentLocation, FileExtent, FileExtentHead};
use sealblock_btrfs_format::key::{ItemType, Key, objectid};

use crate::cursor::Cursor;
use crate::error::FsError;
use crate::filesystem::Filesystem;
use crate::inode::Inode;

/// The content of a part of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Content {
    /// A hole; reads as zeroes.
    Hole,
    /// Allocated space that was never written; reads as zeroes.
    Prealloc(Stored),
    /// Bytes within the item, as stored.
    Inline {
        /// How they are compressed.
        compression: Compression,
        /// The bytes.
        data: Vec<u8>,
    },
    /// An extent, or a part of one.
    Stored(Stored),
}

/// A part of an extent outside the item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stored {
    /// The logical address of the whole extent.
    pub logical: u64,
    /// Bytes of the whole extent, as stored.
    pub stored_bytes: u64,
    /// Bytes of the whole extent, uncompressed.
    pub plain_bytes: u64,
    /// The first byte of the part, in the uncompressed extent.
    pub offset: u64,
    /// How it is compressed.
    pub compression: Compression,
}

/// A part of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    /// The first byte of the file that it covers.
    pub start: u64,
    /// The number of bytes.
    pub bytes: u64,
    /// The transaction that was open when they were written.
    pub generation: u64,
    /// The content.
    pub content: Content,
}

impl Part {
    /// The first byte of the file after it. The checker ensured that it does not overflow.
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes)
    }
}

/// Checksums of a run of sectors, one after the other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sums {
    /// The logical address of the first sector.
    pub logical: u64,
    /// The checksums.
    pub bytes: Vec<u8>,
}

/// The part that an item of the file describes.
fn part_of(start: u64, extent: &FileExtent) -> Result<Part, FsError> {
    let head = extent.head();
    // The checker refuses unknown compressions.
    let compression = Compression::from_number(head.compression).unwrap_or(Compression::None);
    let content = match extent {
        FileExtent::Inline(_, data) => Content::Inline { compression, data: data.to_vec() },
        FileExtent::Regular(_, location) if location.is_hole() => Content::Hole,
        FileExtent::Regular(head, location) => Content::Stored(stored(head, location, compression)),
        FileExtent::Prealloc(head, location) => Content::Prealloc(stored(head, location, compression)),
    };
    Ok(Part { start, bytes: extent.file_bytes(), generation: head.generation.get(), content })
}

fn stored(head: &FileExtentHead, location: &ExtentLocation, compression: Compression) -> Stored {
    Stored {
        logical: location.disk_bytenr.get(),
        stored_bytes: location.disk_num_bytes.get(),
        plain_bytes: head.ram_bytes.get(),
        offset: location.offset.get(),
        compression,
    }
}

impl Filesystem {
    /// The parts of a file that overlap the bytes from `from` up to `to`, in order. Gaps between them are holes.
    ///
    /// # Errors
    /// If a leaf is lost, or parts overlap.
    pub async fn parts(&self, inode: &Inode, from: u64, to: u64) -> Result<Vec<Part>, FsError> {
        let key = |offset| Key::new(inode.ino, ItemType::EXTENT_DATA, offset);
        let mut parts: Vec<Part> = Vec::new();
        if from >= to {
            return Ok(parts);
        }
        let mut cursor = Cursor::from_floor(self.nodes(), inode.tree, key(from)..=key(to - 1));
        while let Some((found, data)) = cursor.next().await? {
            if (found.objectid, found.item_type) != (inode.ino, ItemType::EXTENT_DATA) {
                continue;
            }
            let Ok(Item::FileExtent(extent)) = Item::decode(found, data) else { continue };
            let part = part_of(found.offset, &extent)?;
            if let Some(before) = parts.last().filter(|before| before.end() > part.start) {
                let why = format!("its bytes {} and {} are in two extents", before.start, part.start);
                return Err(FsError::Contradiction { what: self.name_of(inode), why });
            }
            if part.end() > from {
                parts.push(part);
            }
        }
        Ok(parts)
    }

    /// The next run of stored bytes of a file from `from` on, as its first byte and the byte after it. Holes and space
    /// that was never written separate runs. A run is cut off after `most` bytes, and may extend beyond the end of the
    /// file.
    ///
    /// # Errors
    /// If a leaf is lost, or parts overlap.
    pub async fn next_data(&self, inode: &Inode, from: u64, most: u64) -> Result<Option<(u64, u64)>, FsError> {
        let key = |offset| Key::new(inode.ino, ItemType::EXTENT_DATA, offset);
        let mut cursor = Cursor::from_floor(self.nodes(), inode.tree, key(from)..=key(u64::MAX));
        let mut run: Option<(u64, u64)> = None;
        while let Some((found, data)) = cursor.next().await? {
            if (found.objectid, found.item_type) != (inode.ino, ItemType::EXTENT_DATA) {
                continue;
            }
            let Ok(Item::FileExtent(extent)) = Item::decode(found, data) else { continue };
            let part = part_of(found.offset, &extent)?;
            let is_data = matches!(part.content, Content::Stored(_) | Content::Inline { .. });
            match run {
                Some((start, end)) if !is_data || part.start != end || end - start >= most => break,
                Some((start, _)) => run = Some((start, part.end())),
                None if is_data && part.end() > from => run = Some((part.start.max(from), part.end())),
                None => {}
            }
        }
        Ok(run.map(|(start, end)| (start, end.min(start.saturating_add(most)))))
    }

    /// The name of an inode in errors.
    pub(crate) fn name_of(&self, inode: &Inode) -> String {
        format!("inode {} in subvolume {}", inode.ino, inode.tree.id)
    }

    /// The checksums of stored sectors, in runs without gaps. Sectors without checksums are in no run.
    ///
    /// # Errors
    /// If a leaf of the checksum tree is lost, or there is no checksum tree.
    pub async fn sums(&self, logical: u64, bytes: u64) -> Result<Vec<Sums>, FsError> {
        match self.sums_left(logical, bytes).await {
            (runs, None) => Ok(runs),
            (_, Some(error)) => Err(error),
        }
    }

    /// The same, but returns all readable checksums, and the first error for the others.
    pub(crate) async fn sums_left(&self, logical: u64, bytes: u64) -> (Vec<Sums>, Option<FsError>) {
        let tree = match self.csum_tree().await {
            Ok(tree) => tree,
            Err(error) => return (Vec::new(), Some(error)),
        };
        let key = |offset| Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, offset);
        let geometry = self.storage().geometry();
        let (sector, sum) = (u64::from(geometry.sector_bytes), geometry.checksum.bytes());
        let end = logical.saturating_add(bytes);
        let (mut runs, mut lost, mut expected) = (Vec::<Sums>::new(), None, logical);
        let mut cursor = Cursor::from_floor(self.nodes(), tree, key(logical)..=key(end.saturating_sub(1)));
        loop {
            let (found, data) = match cursor.next().await {
                Ok(None) => return (runs, lost),
                Ok(Some(item)) if item.0.item_type == ItemType::EXTENT_CSUM => item,
                Ok(Some(_)) => continue,
                Err(error) => {
                    lost.get_or_insert(error);
                    continue;
                }
            };
            // The checker has ensured that a run ends below the highest address.
            let found_end = found.offset + (data.len() / sum) as u64 * sector;
            let (from, to) = (found.offset.max(expected), found_end.min(end));
            if from >= to {
                continue;
            }
            let index = |at: u64| ((at - found.offset) / sector) as usize * sum;
            let bytes = &data[index(from)..index(to)];
            match runs.last_mut().filter(|_| from == expected && from > logical) {
                Some(run) => run.bytes.extend_from_slice(bytes),
                None => runs.push(Sums { logical: from, bytes: bytes.to_vec() }),
            }
            expected = to;
        }
    }
}
