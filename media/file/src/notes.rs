//! Notes: bytes in the page cache of the file, which remain there when this process dies.
//!
//! A file that is used with direct I/O gets a second descriptor without it. A note writes whole pages, so nothing has
//! to be read first, and its range is already allocated, so the file system does not have to find space. If a direct
//! write or read touches such pages, the kernel writes them back first. The caller keeps other writes away from the
//! range of its notes.

use std::cell::{Cell, OnceCell, RefCell};
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use sealblock_block::NoteKeeping;

/// The identity of this boot: a UUID that the kernel draws when it starts.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The notes of one owner lie within this many bytes.
const LONGEST_BYTES: u64 = 2 << 20;

/// If the kernel does not report pages, or takes longer than this, it is not asked for the next syncs.
const LONGEST_QUESTION: Duration = Duration::from_micros(200);
const SKIPPED_QUESTIONS: u32 = 10_000;

/// How notes get to the page cache.
#[derive(Debug)]
enum Way {
    /// Through the descriptor of all other requests.
    Same,
    /// Through a descriptor of their own, which is opened for the first note.
    Second(OnceCell<File>),
    /// Not at all.
    None,
}

/// The descriptor through which notes of a file are written.
#[derive(Debug)]
pub(crate) struct NoteFile {
    way: Way,
    boot: Option<[u8; 16]>,
    /// Syncs before which the kernel is not asked for cached pages.
    skips: Cell<u32>,
    /// From the first byte that was noted to the last.
    noted: RefCell<Option<Range<u64>>>,
}

impl NoteFile {
    /// For a file that is open, which bypasses the page cache if `direct`.
    pub(crate) fn beside(direct: bool, writes: bool) -> NoteFile {
        let way = match (writes, direct) {
            (false, _) => Way::None,
            (true, false) => Way::Same,
            (true, true) => Way::Second(OnceCell::new()),
        };
        NoteFile { way, boot: boot_identity(), skips: Cell::default(), noted: RefCell::default() }
    }

    /// The range of notes, which holds nothing else, if they have a descriptor of their own.
    pub(crate) fn noted(&self) -> Option<Range<u64>> {
        self.noted.borrow().clone()
    }

    /// True if no byte from this one on is in the page cache and still to be written, as far as that is known.
    ///
    /// Usually only notes are. But some file systems put direct writes through the page cache, such as XFS for parts of
    /// blocks that another file shares, or ext4 for all of a file that was set to journal its data.
    pub(crate) fn has_none_behind(&self, file: &sealblock_runtime_reactor::File, from_bytes: u64) -> bool {
        if let Some(left) = self.skips.get().checked_sub(1) {
            self.skips.set(left);
            return false;
        }
        let begun = Instant::now();
        let has_pages = file.has_pages_to_write(from_bytes);
        if has_pages.is_err() || begun.elapsed() > LONGEST_QUESTION {
            // In a large file that others read through the page cache the kernel has to look through many pages, each
            // time.
            self.skips.set(SKIPPED_QUESTIONS);
        }
        has_pages.is_ok_and(|has_pages| !has_pages)
    }

    /// How long notes are kept. A file that is open for reading has the notes of its last writer.
    pub(crate) fn keeping(&self) -> NoteKeeping {
        self.boot.map_or(NoteKeeping::None, NoteKeeping::UntilReboot)
    }

    /// Writes whole pages. An ordinary call, since the page cache accepts them immediately.
    pub(crate) fn write(&self, same: &impl AsFd, offset_bytes: u64, bytes: &[u8]) -> io::Result<()> {
        let descriptor = match &self.way {
            Way::Same => same.as_fd(),
            Way::Second(file) => match file.get() {
                Some(file) => file.as_fd(),
                None => {
                    let opened = reopen(same)?;
                    file.get_or_init(|| opened).as_fd()
                }
            },
            Way::None => return Err(io::ErrorKind::Unsupported.into()),
        };
        if let Way::Second(_) = self.way {
            let now = offset_bytes..offset_bytes + bytes.len() as u64;
            let mut noted = self.noted.borrow_mut();
            let all = noted.as_ref().map_or(now.clone(), |all| all.start.min(now.start)..all.end.max(now.end));
            // Notes in another place belong to another owner; the old range is ordinary data again.
            *noted = Some(if all.end - all.start <= LONGEST_BYTES { all } else { now });
        }
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::pwrite(descriptor, &bytes[done..], offset_bytes + done as u64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => done += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Opens the same file again, through the page cache: by its descriptor, since another file may be at its path by now.
fn reopen(file: &impl AsFd) -> io::Result<File> {
    OpenOptions::new().write(true).open(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()))
}

/// The identity of this boot of the machine.
fn boot_identity() -> Option<[u8; 16]> {
    static BOOT: OnceLock<Option<[u8; 16]>> = OnceLock::new();
    *BOOT.get_or_init(|| std::fs::read_to_string(BOOT_ID).ok().and_then(|text| parse_uuid(text.trim())))
}

fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> =
        text.chars().filter(|c| *c != '-').map(|c| Some(c.to_digit(16)? as u8)).collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
    bytes.try_into().ok().filter(|bytes| *bytes != [0; 16])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_has_an_identity_and_nothing_else_is_one() {
        let identity = parse_uuid("0a1b2c3d-4e5f-4a6b-8c7d-0123456789ab");
        assert_eq!(identity.map(|bytes| (bytes[0], bytes[15])), Some((0x0a, 0xab)));
        for text in ["", "0a1b", "0a1b2c3d-4e5f-4a6b-8c7d-0123456789zz", "00000000-0000-0000-0000-000000000000"] {
            assert_eq!(parse_uuid(text), None, "{text:?}");
        }
        assert!(boot_identity().is_some() && boot_identity() == boot_identity());
    }

    #[test]
    fn what_is_noted_is_read_by_others_and_a_reader_notes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, vec![0; 16384]).unwrap();
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        for direct in [false, true] {
            let notes = NoteFile::beside(direct, true);
            assert!(matches!(notes.keeping(), NoteKeeping::UntilReboot(_)));
            let page = vec![7 + u8::from(direct); 4096];
            notes.write(&file, 8192, &page).unwrap();
            assert_eq!(std::fs::read(&path).unwrap()[8192..12288], page);
        }
        let notes = NoteFile::beside(true, true);
        assert_eq!(notes.noted(), None);
        [8192, 4096].iter().for_each(|at| notes.write(&file, *at, &[1; 4096]).unwrap());
        assert_eq!(notes.noted(), Some(4096..12288));
        assert_eq!(NoteFile::beside(false, true).noted(), None, "no descriptor of their own");
        let reader = NoteFile::beside(true, false);
        assert_eq!(reader.write(&file, 0, &[1; 4096]).unwrap_err().kind(), io::ErrorKind::Unsupported);
        assert_eq!(std::fs::read(&path).unwrap()[..4096], [0; 4096]);
    }
}
