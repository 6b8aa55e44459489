//! The content of one device: pages that clones share until one of them is written.
//!
//! Invariants: a missing page reads as zeroes; bytes of a page never change while another image or a log shares it.
//! A clone costs one pointer for each MiB that was ever written.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::rc::Rc;

use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::BlockSize;

/// Bytes of a page.
pub(crate) const PAGE_BYTES: usize = 4096;
/// Pages of a leaf, which clones share as a whole.
const LEAF_PAGES: usize = 256;
/// Every byte of [`Content::Garbage`].
const GARBAGE: u8 = 0xA5;

/// The content of one device.
#[derive(Clone)]
pub struct Image {
    block_size: BlockSize,
    blocks: u64,
    leaves: BTreeMap<u64, Rc<Vec<Option<Slice>>>>,
}

/// New content of a run of bytes.
#[derive(Clone, Debug)]
pub enum Content {
    /// These bytes, as many as the run has.
    Bytes(Slice),
    /// Zeroes.
    Zeroes,
    /// A pattern that nobody wrote, as a discarded block may have.
    Garbage,
}

/// A change of a run of bytes.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The first byte on the device.
    pub offset: u64,
    /// The length in bytes.
    pub len: u64,
    /// What the bytes become.
    pub content: Content,
}

impl Piece {
    /// The part at `range`, counted from the start of the piece and within it.
    pub(crate) fn part(&self, range: Range<u64>) -> Piece {
        let content = match &self.content {
            Content::Bytes(bytes) => Content::Bytes(bytes.slice(range.start as usize..range.end as usize)),
            content => content.clone(),
        };
        Piece { offset: self.offset + range.start, len: range.end - range.start, content }
    }

    /// The bytes of the device that the piece changes.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }
}

impl Image {
    /// A device of `blocks` blocks of zeroes. No memory is taken yet.
    pub fn blank(block_size: BlockSize, blocks: u64) -> Image {
        Image { block_size, blocks, leaves: BTreeMap::new() }
    }

    /// The content of a file; bytes after its last whole block are ignored. Pages of zeroes take no memory.
    ///
    /// # Errors
    /// Those of opening and reading the file.
    pub fn load(path: &Path, block_size: BlockSize) -> io::Result<Image> {
        let mut file = File::open(path)?;
        let mut image = Image::blank(block_size, file.metadata()?.len() >> block_size.shift());
        let mut chunk = vec![0; PAGE_BYTES * LEAF_PAGES];
        let mut offset = 0;
        while offset < image.len_bytes() {
            let len = (image.len_bytes() - offset).min(chunk.len() as u64) as usize;
            file.read_exact(&mut chunk[..len])?;
            for (page, at) in chunk[..len].chunks(PAGE_BYTES).zip((offset..).step_by(PAGE_BYTES)) {
                if page.iter().any(|byte| *byte != 0) {
                    image.write(at, page);
                }
            }
            offset += len as u64;
        }
        Ok(image)
    }

    /// Writes the content to a sparse file, which is created or replaced.
    ///
    /// # Errors
    /// Those of creating and writing the file.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let file = File::create(path)?;
        file.set_len(self.len_bytes())?;
        for (offset, page) in self.pages() {
            let len = (self.len_bytes() - offset).min(PAGE_BYTES as u64) as usize;
            file.write_all_at(&page[..len], offset)?;
        }
        Ok(())
    }

    /// Bytes of a block.
    pub fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// The number of blocks.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.blocks << self.block_size.shift()
    }

    /// Copies the bytes at `offset`.
    ///
    /// # Panics
    /// If they are not all within the image.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        self.check(offset, into.len() as u64);
        for (page, within, part) in parts(offset, into.len() as u64) {
            match self.page(page) {
                Some(bytes) => into[part.start as usize..part.end as usize].copy_from_slice(&bytes[within]),
                None => into[part.start as usize..part.end as usize].fill(0),
            }
        }
    }

    /// Writes these bytes at `offset`.
    ///
    /// # Panics
    /// If they do not fit into the image.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        let content = Content::Bytes(Slice::copy_from(bytes));
        self.apply(&Piece { offset, len: bytes.len() as u64, content });
    }

    /// Makes the change. Whole pages of its bytes are shared with it.
    ///
    /// # Panics
    /// If it does not fit into the image.
    pub fn apply(&mut self, piece: &Piece) {
        self.check(piece.offset, piece.len);
        let garbage = matches!(piece.content, Content::Garbage).then(|| Slice::copy_from(&[GARBAGE; PAGE_BYTES]));
        for (page, within, part) in parts(piece.offset, piece.len) {
            let is_whole = within.len() == PAGE_BYTES;
            let new = match (&piece.content, &garbage) {
                (Content::Bytes(bytes), _) => Some(bytes.slice(part.start as usize..part.end as usize)),
                (_, garbage) => garbage.as_ref().map(|garbage| garbage.slice(within.clone())),
            };
            if !is_whole && new.is_none() && self.page(page).is_none() {
                continue;
            }
            let new = if is_whole { new } else { Some(self.merged(page, within, new.as_deref())) };
            self.set_page(page, new);
        }
    }

    /// True if both images have the same content.
    pub fn has_same_content(&self, other: &Image) -> bool {
        let is_same = |one: &Image, other: &Image| {
            one.pages().all(|(offset, page)| match other.page(offset / PAGE_BYTES as u64) {
                Some(bytes) => bytes[..] == page[..],
                None => page.iter().all(|byte| *byte == 0),
            })
        };
        self.len_bytes() == other.len_bytes() && is_same(self, other) && is_same(other, self)
    }

    /// The stored pages, with their offset in bytes.
    fn pages(&self) -> impl Iterator<Item = (u64, &Slice)> {
        self.leaves.iter().flat_map(|(leaf, pages)| {
            let first = leaf * LEAF_PAGES as u64;
            let stored = pages.iter().enumerate().filter_map(|(i, page)| Some((i as u64, page.as_ref()?)));
            stored.map(move |(i, page)| ((first + i) * PAGE_BYTES as u64, page))
        })
    }

    pub(crate) fn page(&self, page: u64) -> Option<&Slice> {
        self.leaves.get(&(page / LEAF_PAGES as u64))?[(page % LEAF_PAGES as u64) as usize].as_ref()
    }

    fn set_page(&mut self, page: u64, new: Option<Slice>) {
        let leaf = page / LEAF_PAGES as u64;
        if new.is_none() && !self.leaves.contains_key(&leaf) {
            return;
        }
        let pages = self.leaves.entry(leaf).or_insert_with(|| Rc::new(vec![None; LEAF_PAGES]));
        Rc::make_mut(pages)[(page % LEAF_PAGES as u64) as usize] = new;
    }

    /// A copy of a page with other bytes at `within`; zeroes if there are none.
    fn merged(&self, page: u64, within: Range<usize>, new: Option<&[u8]>) -> Slice {
        let mut bytes = match self.page(page) {
            Some(old) => Buffer::copy_from(old),
            None => Buffer::zeroed(PAGE_BYTES),
        };
        match new {
            Some(new) => bytes[within].copy_from_slice(new),
            None => bytes[within].fill(0),
        }
        bytes.freeze()
    }

    fn check(&self, offset: u64, len: u64) {
        let is_within = offset.checked_add(len).is_some_and(|end| end <= self.len_bytes());
        assert!(is_within, "{len} bytes at {offset} are not within an image of {} bytes", self.len_bytes());
    }
}

/// The range split at the edges of pages: the page, the range within it, and the range within the whole.
fn parts(offset: u64, len: u64) -> impl Iterator<Item = (u64, Range<usize>, Range<u64>)> {
    let page_bytes = PAGE_BYTES as u64;
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == len {
            return None;
        }
        let (page, within) = ((offset + done) / page_bytes, (offset + done) % page_bytes);
        let step = (page_bytes - within).min(len - done);
        done += step;
        Some((page, within as usize..(within + step) as usize, done - step..done))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(image: &Image, range: Range<u64>) -> Vec<u8> {
        let mut bytes = vec![1; (range.end - range.start) as usize];
        image.read(range.start, &mut bytes);
        bytes
    }

    /// Random changes of images, and of clones of them, against plain vectors.
    #[test]
    fn images_and_their_clones_have_what_was_written_to_each() {
        let mut rng = fastrand::Rng::with_seed(1);
        let len = 3 * LEAF_PAGES * PAGE_BYTES / 64;
        let blank = Image::blank(BlockSize::B512, len as u64 / 512);
        let mut all = vec![(blank, vec![0; len])];
        for _ in 0..600 {
            let chosen = rng.usize(..all.len());
            if all.len() < 8 && rng.u8(..10) == 0 {
                let clone = all[chosen].clone();
                all.push(clone);
            }
            let (image, model) = &mut all[chosen];
            let start = rng.usize(..len);
            let end = (start + rng.usize(1..3 * PAGE_BYTES)).min(len);
            let (content, expected) = match rng.u8(..3) {
                0 => (Content::Zeroes, vec![0; end - start]),
                1 => (Content::Garbage, vec![GARBAGE; end - start]),
                _ => {
                    let bytes: Vec<u8> = (start..end).map(|_| rng.u8(..)).collect();
                    (Content::Bytes(Slice::copy_from(&bytes)), bytes)
                }
            };
            image.apply(&Piece { offset: start as u64, len: (end - start) as u64, content });
            model[start..end].copy_from_slice(&expected);
        }
        assert_eq!(all.len(), 8);
        for (image, model) in &all {
            assert!(bytes_of(image, 0..len as u64) == *model);
            for (other, content) in &all {
                assert_eq!(image.has_same_content(other), model == content);
            }
        }
    }

    #[test]
    fn a_saved_image_is_loaded_again_and_its_holes_stay_holes() {
        use std::os::unix::fs::MetadataExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let mut image = Image::blank(BlockSize::B512, (64 << 20) / 512 + 1);
        image.write(5, b"first");
        image.write(64 << 20, &[7; 512]);
        image.save(&path).unwrap();
        let metadata = path.metadata().unwrap();
        assert_eq!(metadata.len(), (64 << 20) + 512);
        assert!(metadata.blocks() * 512 < 1 << 20);
        let loaded = Image::load(&path, BlockSize::B512).unwrap();
        assert!(loaded.has_same_content(&image) && loaded.pages().count() == 2);
        image.write(4096, &[1]);
        assert!(!loaded.has_same_content(&image) && !image.has_same_content(&loaded));
        // A replaced file has nothing of the old one.
        Image::blank(BlockSize::B512, 8).save(&path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), vec![0; 4096]);
    }

    #[test]
    #[should_panic(expected = "not within an image")]
    fn bytes_past_the_end_are_refused() {
        Image::blank(BlockSize::B512, 1).write(511, &[0; 2]);
    }
}
