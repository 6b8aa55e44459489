//! What is looked for, and what was found.

use std::path::{Path, PathBuf};

/// Max. files of a block: copies that share it (reflinks, snapshots), and names of one file.
pub const MAX_FILES: usize = 16;
/// A place in a file.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct FilePlace {
    /// The file.
    pub path: PathBuf,
    /// Offset in it.
    pub offset_bytes: u64,
}

/// Files of blocks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Owners {
    /// Of each block, in the order in which they were asked for.
    pub of_blocks: Vec<Vec<FilePlace>>,
    /// Why some may be missing, in words.
    pub notes: Vec<String>,
    /// True if a file system on the device was asked.
    pub was_asked: bool,
}

/// Blocks that are looked for, on the device that a file system knows.
pub(super) struct Wanted {
    /// First byte, length, and number of the block; sorted.
    pub(super) places: Vec<(u64, u64, usize)>,
    longest: u64,
}

impl Owners {
    /// Adds a file of a block.
    pub(super) fn add(&mut self, block: usize, path: &Path, offset_bytes: u64) {
        let files = &mut self.of_blocks[block];
        let place = FilePlace { path: path.to_owned(), offset_bytes };
        if files.len() < MAX_FILES {
            if !files.contains(&place) {
                files.push(place);
            }
        } else {
            self.note(format!("a block used by more than {MAX_FILES} files has only some of them listed"));
        }
    }

    pub(super) fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }
}

impl Wanted {
    pub(super) fn new(mut places: Vec<(u64, u64, usize)>) -> Wanted {
        places.sort_unstable();
        Wanted { longest: places.iter().map(|(_, length, _)| *length).max().unwrap_or(0), places }
    }

    /// Blocks that have some of these bytes: the first byte that both have, and the block.
    pub(super) fn within(&self, start: u64, length: u64) -> impl Iterator<Item = (u64, usize)> + '_ {
        let end = start.saturating_add(length);
        let first = self.places.partition_point(|(at, ..)| at.saturating_add(self.longest) <= start);
        let near = self.places[first..].iter().take_while(move |(at, ..)| *at < end);
        near.filter(move |(at, length, _)| at + length > start).map(move |(at, _, block)| (start.max(*at), *block))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_where_they_meet_an_extent() {
        let wanted = Wanted::new(vec![(8192, 4096, 1), (0, 4096, 0), (12288, 512, 2), (12288, 512, 3)]);
        let within = |start, length| wanted.within(start, length).collect::<Vec<_>>();
        assert_eq!(within(0, 4096), [(0, 0)]);
        assert_eq!(within(4095, 2), [(4095, 0)]);
        assert_eq!(within(4096, 4096), []);
        assert_eq!(within(0, u64::MAX), [(0, 0), (8192, 1), (12288, 2), (12288, 3)]);
        assert_eq!(within(12000, 1000), [(12000, 1), (12288, 2), (12288, 3)]);
        assert_eq!(within(12800, 1 << 40), []);
    }

    #[test]
    fn what_is_kept_of_a_block_is_bounded_and_said() {
        let mut owners = Owners { of_blocks: vec![Vec::new()], ..Owners::default() };
        for number in 0..MAX_FILES as u64 + 3 {
            owners.add(0, Path::new("f"), number);
            owners.add(0, Path::new("f"), 0);
        }
        assert_eq!((owners.of_blocks[0].len(), owners.notes.len()), (MAX_FILES, 1));
    }
}
