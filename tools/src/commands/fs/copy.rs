//! `sealblock fs cat` and `sealblock fs get`: files out of a filesystem, to standard output and into a directory.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::pin::pin;

use futures_util::StreamExt;
use sealblock_btrfs::inode::{FileKind, Inode};
use sealblock_btrfs::{Filesystem, FsError};
use sealblock_btrfs_extract::{Extraction, Losses};
use sealblock_runtime_memory::Slice;
use sealblock_stack::filesystem::filesystem_error;
use sealblock_stack::{Cause, StackError};

use super::extract::{Shown, empty_directory, exit, note_unset, report, write_error};
use super::place::{printable, resolve, with_filesystem};
use crate::cli::{FsCat, FsGet};
use crate::exit::Exit;
use crate::interrupt;
use crate::progress::{Progress, Show};
use crate::report::{check_output_open, note, output_error, print_json};

/// Writes them one after the other.
pub fn cat(arguments: &FsCat) -> Result<Exit, StackError> {
    check_output_open()?;
    let mut exit = Exit::Clean;
    for file in &arguments.files {
        let read = with_filesystem(file, async |open| {
            let inode = resolve(open, file, true).await?;
            let output = io::stdout();
            let write = |data: Slice| match output.lock().write_all(&data) {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                    Err(StackError::new(Cause::Unread, "write", "the reader is gone"))
                }
                written => written.map_err(|error| output_error(&error)),
            };
            let doing = |error: FsError| filesystem_error("read", &error).on(file);
            read_all(&open.filesystem, &inode, doing, write).await.map(|()| Exit::Clean)
        })?;
        exit = exit.unless_older(read == Exit::Incomplete);
    }
    io::stdout().flush().map_err(|error| output_error(&error))?;
    Ok(exit)
}

/// Copies a file or a directory tree.
pub fn get(arguments: &FsGet) -> Result<Exit, StackError> {
    let place = &arguments.place;
    interrupt::watch();
    with_filesystem(place, async |open| {
        let inode = resolve(open, place, false).await?;
        let name =
            place.path.split(|byte| *byte == b'/').rfind(|part| !part.is_empty() && !matches!(*part, b"." | b".."));
        let to = match name {
            Some(name) if arguments.to.is_dir() => arguments.to.join(OsStr::from_bytes(name)),
            _ => arguments.to.clone(),
        };
        let show = if arguments.json { Show::Never } else { Show::OnTerminal };
        let progress = Shown(Progress::new("copying", None, show));
        let (folder, path) = match inode.kind {
            FileKind::Directory => {
                empty_directory(&to)?;
                (to.clone(), Vec::new())
            }
            _ => {
                let usage = |why: &str| StackError::new(Cause::Usage, "copy to", why).on(to.display());
                let name = to.file_name().ok_or_else(|| usage("it has no name"))?;
                (to.parent().unwrap_or(Path::new("")).to_owned(), name.as_bytes().to_vec())
            }
        };
        let mut extraction = Extraction::new(&open.filesystem, folder, Losses::LeaveOut, &progress);
        extraction.copy(inode, &path).await.map_err(write_error)?;
        extraction.finish();
        if arguments.json {
            print_json(&report(&extraction, (place, open), &to, None))?;
        } else {
            for lost in &extraction.lost {
                note(&format_args!("{}: skipped: {}", printable(&lost.path), lost.why));
            }
            note_unset(&extraction);
        }
        Ok(exit(&extraction))
    })
}

/// Reads a file from its beginning to its end, several steps at once, and hands over each step in order.
async fn read_all(
    filesystem: &Filesystem,
    inode: &Inode,
    fail: impl Fn(FsError) -> StackError,
    mut write: impl FnMut(Slice) -> Result<(), StackError>,
) -> Result<(), StackError> {
    // A node that is not a file is reported even if it is empty.
    if inode.size() == 0 {
        filesystem.read(inode, 0, 1).await.map_err(&fail)?;
    }
    let mut steps = pin!(filesystem.read_in_order(inode, 0..inode.size()));
    while let Some((at, data)) = steps.next().await {
        match data {
            Ok(data) => write(data)?,
            Err(error) => {
                write_until_damage(filesystem, inode, at, &mut write).await?;
                return Err(fail(error));
            }
        }
    }
    Ok(())
}

/// Hands over what can be read from an offset on, before the first sector that cannot.
async fn write_until_damage(
    filesystem: &Filesystem,
    inode: &Inode,
    mut at: u64,
    write: &mut impl FnMut(Slice) -> Result<(), StackError>,
) -> Result<(), StackError> {
    let sector = u64::from(filesystem.storage().geometry().sector_bytes);
    while at < inode.size() {
        let Ok(data) = filesystem.read(inode, at, sector.min(inode.size() - at) as usize).await else { break };
        write(data)?;
        at += sector;
    }
    Ok(())
}
