//! Files of ext2, ext3, ext4 and xfs, by the extents of every file: the tree is walked once.
//!
//! Memory is bounded: one open folder for each level, [`MAX_DEPTH`] at most, and the extents of one file, some at a time. Symbolic links
//! are not followed, and other file systems not entered.

use std::fs::{self, File, OpenOptions, ReadDir};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use sealblock_runtime_ioctl::fiemap::extents;

use super::found::{Owners, Wanted};

/// Max. levels of folders.
const MAX_DEPTH: usize = 256;

/// Looks into all files of the file system that is mounted at `point`.
pub(super) fn walk(point: &Path, wanted: &Wanted, owners: &mut Owners, stop: &dyn Fn() -> bool) -> io::Result<()> {
    let device = fs::metadata(point)?.dev();
    let mut folders: Vec<ReadDir> = vec![fs::read_dir(point)?];
    let mut unread = 0_u64;
    while let Some(folder) = folders.last_mut() {
        if stop() {
            return Err(io::Error::other("the search was interrupted"));
        }
        let entry = match folder.next() {
            None => {
                folders.pop();
                continue;
            }
            Some(Ok(entry)) => entry,
            Some(Err(_)) => {
                unread += 1;
                continue;
            }
        };
        let path = entry.path();
        let Ok(about) = fs::symlink_metadata(&path) else {
            // Deleted meanwhile, or not to be looked at.
            unread += 1;
            continue;
        };
        if about.dev() != device {
            continue;
        }
        if about.is_dir() {
            match fs::read_dir(&path) {
                Ok(inner) if folders.len() < MAX_DEPTH => folders.push(inner),
                Ok(_) | Err(_) => unread += 1,
            }
        } else if about.is_file() && about.blocks() > 0 && look_into(&path, device, wanted, owners).is_err() {
            unread += 1;
        }
    }
    match unread {
        0 => Ok(()),
        _ => Err(io::Error::other(format!("{unread} files or directories could not be read"))),
    }
}

fn look_into(path: &Path, device: u64, wanted: &Wanted, owners: &mut Owners) -> io::Result<()> {
    let file = open(path)?;
    let about = file.metadata()?;
    if !about.is_file() || about.dev() != device {
        // A folder of the path became a link: extents of another file system would be those of other blocks.
        return Err(io::Error::other("it was replaced"));
    }
    let mut next = 0;
    loop {
        let found = extents(file.as_fd(), next)?;
        let Some(last) = found.last() else { return Ok(()) };
        next = last.offset_bytes + last.length_bytes;
        let is_last = last.is_last;
        for extent in found {
            let Some(place) = extent.place_bytes else { continue };
            for (at, block) in wanted.within(place, extent.length_bytes) {
                owners.add(block, path, extent.offset_bytes + (at - place));
            }
        }
        if is_last {
            return Ok(());
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    // What was a file may have become a FIFO, whose opening waits, or a link.
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(wanted: &[(u64, u64, usize)], folder: &Path, stop: bool) -> (Owners, io::Result<()>) {
        let mut owners = Owners { of_blocks: vec![Vec::new(); 4], ..Owners::default() };
        let walked = walk(folder, &Wanted::new(wanted.to_vec()), &mut owners, &|| stop);
        (owners, walked)
    }

    #[test]
    fn every_file_is_looked_into_and_no_link_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("a/b")).unwrap();
        let path = folder.path().join("a/b/file");
        fs::write(&path, vec![7; 64 << 10]).unwrap();
        std::os::unix::fs::symlink("/", folder.path().join("root")).unwrap();
        let file = open(&path).unwrap();
        let Some(extent) = extents(file.as_fd(), 0).ok().and_then(|found| found.first().copied()) else {
            return eprintln!("skipped: this file system does not tell");
        };
        let Some(place) = extent.place_bytes else { return eprintln!("skipped: the file has no place of its own") };
        let (owners, walked) = found(&[(place + 512, 512, 1), (u64::MAX - 512, 512, 2)], folder.path(), false);
        walked.unwrap();
        assert_eq!(
            (owners.of_blocks[1][0].path.as_path(), owners.of_blocks[1][0].offset_bytes),
            (path.as_path(), extent.offset_bytes + 512)
        );
        assert_eq!((owners.of_blocks[1].len(), owners.of_blocks[2].len()), (1, 0));
        let mut owners = Owners { of_blocks: vec![Vec::new()], ..Owners::default() };
        let wanted = Wanted::new(vec![(place, 512, 0)]);
        let device = fs::metadata(&path).unwrap().dev();
        assert!(look_into(&path, device + 1, &wanted, &mut owners).is_err() && owners.of_blocks[0].is_empty());
        look_into(&path, device, &wanted, &mut owners).unwrap();
        assert_eq!(owners.of_blocks[0].len(), 1);
        let stopped = found(&[], folder.path(), true).1.unwrap_err();
        assert!(stopped.to_string().contains("interrupted"));
        assert!(found(&[], &folder.path().join("away"), false).1.is_err());
    }
}
