//! The verdicts of this project and of the kernel about a filesystem, in the same form: which sectors of files can be
//! read and have the right content, and what is damaged on which device.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{Advice, fadvise};
use sealblock_btrfs::inode::Inode;
use sealblock_btrfs::verify::{Report, Unwatched, VerifyOptions, verify};
use sealblock_btrfs::{Filesystem, FsError, OpenOptions, Place};
use sealblock_btrfs_format::key::objectid;
use sealblock_proofs_btrfs_images::programs::Mount;
use sealblock_proofs_btrfs_images::scrub::{KernelLog, Scrub, place_of, scrub};
use sealblock_stack::on_reactor;

use crate::subject::{SECTOR, Subject};

/// Bytes of one of our reads.
const READ_BYTES: usize = 256 << 10;

/// The result of reading a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Its path cannot be resolved.
    Unreachable(String),
    /// It was read.
    Read {
        /// The offsets of sectors whose read failed.
        failed: BTreeSet<u64>,
        /// The offsets of sectors that were read with wrong content.
        wrong: BTreeSet<u64>,
    },
}

/// Files by path.
pub type Files = BTreeMap<Vec<u8>, Outcome>;

/// Adds the offsets of sectors that were read with wrong content.
fn compare(content: &[u8], at: u64, read: &[u8], wrong: &mut BTreeSet<u64>) {
    for (index, sector) in read.chunks(SECTOR as usize).enumerate() {
        let at = at + index as u64 * SECTOR;
        let expected = content.get(at as usize..at as usize + sector.len());
        if expected != Some(sector) {
            wrong.insert(at);
        }
    }
}

/// This project's verdict.
pub struct Ours {
    /// The report of the verification, or why the filesystem could not be opened.
    pub report: Result<Report, String>,
    pub files: Files,
}

/// Opens, verifies and reads a filesystem.
pub fn ours(subject: &Subject) -> Ours {
    let result = on_reactor(async {
        let open = subject.name.open(OpenOptions::default()).await?;
        open.close_after(async |open| {
            let report = verify(&open.filesystem, VerifyOptions::default(), &Unwatched).await;
            let files = read_files(&open.filesystem, subject).await;
            Ok((report, files))
        })
        .await
    });
    match result {
        Ok((report, files)) => Ours { report: report.map_err(|error| error.to_string()), files },
        Err(error) => Ours { report: Err(error.to_string()), files: Files::new() },
    }
}

async fn read_files(fs: &Filesystem, subject: &Subject) -> Files {
    let mut files = Files::new();
    for (path, content) in &subject.contents {
        let outcome = match find(fs, path).await {
            Ok(inode) => read_file(fs, &inode, content).await,
            Err(error) => Outcome::Unreachable(error.to_string()),
        };
        files.insert(path.clone(), outcome);
    }
    files
}

async fn find(fs: &Filesystem, path: &[u8]) -> Result<Inode, FsError> {
    let first = fs.subvolume(objectid::FS_TREE).await?;
    fs.resolve(fs.top(&first).await?, path, false).await
}

async fn read_file(fs: &Filesystem, inode: &Inode, content: &[u8]) -> Outcome {
    let (mut failed, mut wrong) = (BTreeSet::new(), BTreeSet::new());
    assert_eq!(inode.size(), content.len() as u64, "a node that passed says so");
    for at in (0..inode.size()).step_by(READ_BYTES) {
        match fs.read(inode, at, READ_BYTES).await {
            Ok(read) => compare(content, at, &read, &mut wrong),
            Err(_) => {
                let end = inode.size().min(at + READ_BYTES as u64);
                for at in (at..end).step_by(SECTOR as usize) {
                    match fs.read(inode, at, SECTOR as usize).await {
                        Ok(read) => compare(content, at, &read, &mut wrong),
                        Err(_) => drop(failed.insert(at)),
                    }
                }
            }
        }
    }
    Outcome::Read { failed, wrong }
}

/// The kernel's information about a filesystem that it mounts.
pub struct Seen {
    pub scrub: Scrub,
    pub files: Files,
    /// Stripes of 64 KiB with errors in the log, by device number. The kernel omits messages when there are too many.
    pub stripes: Vec<Place>,
}

/// Mounts, scrubs and reads a filesystem, without writing. The inner error is the kernel's reason for not mounting it.
///
/// # Errors
/// Any other failure is the outer error.
pub fn kernel(subject: &Subject, log: &mut KernelLog) -> Result<Result<Seen, String>, String> {
    log.messages()?;
    let mount = match Mount::on(&subject.loops, &subject.point, "ro,subvolid=5") {
        Ok(mount) => mount,
        Err(why) => return Ok(Err(why)),
    };
    let scrub = scrub(&subject.point)?;
    let devices = subject.loops.devices();
    let place = |message: &String| {
        let (device, offset) = place_of(message)?;
        let index = devices.iter().position(|one| one == device)?;
        Some(Place { devid: index as u64 + 1, offset })
    };
    let stripes = log.messages()?.iter().filter_map(place).collect();
    let of = |(path, content): (&Vec<u8>, &Vec<u8>)| (path.clone(), read_mounted(&subject.point, path, content));
    let files = subject.contents.iter().map(of).collect();
    mount.unmount()?;
    Ok(Ok(Seen { scrub, files, stripes }))
}

fn read_mounted(point: &Path, path: &[u8], content: &[u8]) -> Outcome {
    let file = match File::open(point.join(std::ffi::OsStr::from_bytes(path))) {
        Ok(file) => file,
        Err(error) => return Outcome::Unreachable(error.to_string()),
    };
    // Reads sector by sector, without readahead. If a read covers several stripes, and several of them have sectors
    // without a good copy, Linux 6.18 may return zeroes for these instead of an error.
    if let Err(error) = fadvise(&file, 0, None, Advice::Random) {
        return Outcome::Unreachable(error.to_string());
    }
    let (mut failed, mut wrong, mut at) = (BTreeSet::new(), BTreeSet::new(), 0);
    let mut buffer = [0; SECTOR as usize];
    while at < content.len() as u64 {
        match file.read_at(&mut buffer, at) {
            Ok(0) => {
                wrong.insert(at);
                break;
            }
            Ok(length) => {
                compare(content, at, &buffer[..length], &mut wrong);
                at += length as u64;
            }
            Err(_) => {
                failed.insert(at);
                at = (at + 1).next_multiple_of(SECTOR);
            }
        }
    }
    Outcome::Read { failed, wrong }
}
