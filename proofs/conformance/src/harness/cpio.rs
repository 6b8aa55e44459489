//! Archives in the "newc" format, which the kernel unpacks into its initial file system.
//!
//! The kernel accepts several archives in sequence, so parts that seldom change are made once and concatenated at each
//! boot. Every entry belongs to root, and folders are added when they are first used.

use std::collections::BTreeSet;
use std::io::{self, Write};

/// Type and permissions of a regular file, a folder, a symbolic link and a character device.
const FILE: u32 = 0o100_000;
const FOLDER: u32 = 0o040_755;
const LINK: u32 = 0o120_777;
const CHARACTER: u32 = 0o020_600;

/// An archive that is being written.
pub struct Archive<W> {
    out: W,
    entries: u32,
    written_bytes: u64,
    names: BTreeSet<String>,
}

impl<W: Write> Archive<W> {
    /// An archive without entries.
    pub fn new(out: W) -> Archive<W> {
        Archive { out, entries: 0, written_bytes: 0, names: BTreeSet::new() }
    }

    /// Adds a folder and its parents. Does nothing if the folder exists.
    ///
    /// # Errors
    /// The writer's errors.
    pub fn folder(&mut self, name: &str) -> io::Result<()> {
        let mut end = 0;
        while end < name.len() {
            end = name[end + 1..].find('/').map_or(name.len(), |at| end + 1 + at);
            if self.names.insert(name[..end].to_owned()) {
                self.entry(&name[..end], FOLDER, (0, 0), &[])?;
            }
        }
        Ok(())
    }

    /// Adds a file with these permissions. If the name exists, the first file stays.
    ///
    /// # Errors
    /// The writer's errors.
    pub fn file(&mut self, name: &str, permissions: u32, content: &[u8]) -> io::Result<()> {
        self.once(name, FILE | permissions, (0, 0), content)
    }

    /// Adds a symbolic link.
    ///
    /// # Errors
    /// The writer's errors.
    pub fn link(&mut self, name: &str, to: &str) -> io::Result<()> {
        self.once(name, LINK, (0, 0), to.as_bytes())
    }

    /// Adds a character device.
    ///
    /// # Errors
    /// The writer's errors.
    pub fn character_device(&mut self, name: &str, major: u32, minor: u32) -> io::Result<()> {
        self.once(name, CHARACTER, (major, minor), &[])
    }

    fn once(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) -> io::Result<()> {
        if let Some((parent, _)) = name.rsplit_once('/') {
            self.folder(parent)?;
        }
        if self.names.insert(name.to_owned()) {
            self.entry(name, mode, device, content)?;
        }
        Ok(())
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) -> io::Result<()> {
        self.entries += 1;
        let size = u32::try_from(content.len()).map_err(|_| io::Error::other(format!("{name} is 4 GiB or longer")))?;
        // Inode, mode, user, group, links, time, size, device that contains the file (2), device number of a device
        // file (2), length of the name, no checksum.
        let name_bytes = name.len() as u32 + 1;
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name_bytes, 0];
        let mut header = b"070701".to_vec();
        for field in fields {
            write!(header, "{field:08X}")?;
        }
        header.extend_from_slice(name.as_bytes());
        header.push(0);
        self.padded(&header, 4)?;
        self.padded(content, 4)
    }

    fn padded(&mut self, bytes: &[u8], unit: u64) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.written_bytes += bytes.len() as u64;
        let gap = self.written_bytes.next_multiple_of(unit) - self.written_bytes;
        self.written_bytes += gap;
        self.out.write_all(&[0; 512][..gap as usize])
    }

    /// Ends the archive; another one may follow in the same file.
    ///
    /// # Errors
    /// The writer's errors.
    pub fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        self.padded(&[], 512)?;
        self.out.flush()?;
        Ok(self.out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned_and_folders_come_before_what_is_in_them() {
        let mut archive = Archive::new(Vec::new());
        archive.file("a/b/c", 0o644, b"hello").unwrap();
        archive.file("a/b/c", 0o644, b"a second one").unwrap();
        archive.link("a/d", "b/c").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % 512, 0);
        let heads: Vec<usize> =
            bytes.windows(6).enumerate().filter(|(_, w)| *w == b"070701").map(|(at, _)| at).collect();
        assert!(heads.iter().all(|at| at % 4 == 0));
        let name = |at: &usize| bytes[at + 110..].split(|byte| *byte == 0).next().unwrap().to_vec();
        let names: Vec<Vec<u8>> = heads.iter().map(name).collect();
        assert_eq!(names, [b"a".to_vec(), b"a/b".to_vec(), b"a/b/c".to_vec(), b"a/d".to_vec(), b"TRAILER!!!".to_vec()]);
        assert!(bytes.windows(5).any(|w| w == b"hello") && !bytes.windows(6).any(|w| w == b"second"));
    }

    #[test]
    fn the_header_says_type_size_and_device() {
        let mut archive = Archive::new(Vec::new());
        archive.character_device("console", 5, 1).unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(&bytes[14..22], b"00002180");
        assert_eq!(&bytes[54..62], b"00000000");
        assert_eq!(&bytes[78..94], b"0000000500000001");
    }
}
