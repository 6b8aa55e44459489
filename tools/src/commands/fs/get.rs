//! `sealblock fs get`: a file or a directory, out of a filesystem.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use sealblock_btrfs::inode::FileKind;
use sealblock_stack::{Cause, StackError};

use super::extract::{Extraction, Losses, empty_directory};
use super::place::{printable, resolve, with_filesystem};
use crate::cli::FsGet;
use crate::exit::Exit;
use crate::interrupt;
use crate::progress::{Progress, Show};
use crate::report::{note, print_json};

/// Copies.
pub fn run(arguments: &FsGet) -> Result<Exit, StackError> {
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
        let progress = Progress::new("copying", None, if arguments.json { Show::Never } else { Show::OnTerminal });
        let (folder, path) = match inode.kind {
            FileKind::Directory => {
                empty_directory(&to)?;
                (to.clone(), Vec::new())
            }
            _ => {
                let usage = |why: &str| StackError::new(Cause::Usage, "preparing the copy", why).on(to.display());
                let name = to.file_name().ok_or_else(|| usage("it has no name of its own"))?;
                (to.parent().unwrap_or(std::path::Path::new("")).to_owned(), name.as_bytes().to_vec())
            }
        };
        let mut extraction = Extraction::new(&open.filesystem, folder, Losses::LeaveOut, &progress);
        extraction.copy(inode, &path).await?;
        extraction.finish();
        if arguments.json {
            print_json(&extraction.report(place, &to, None))?;
        } else {
            for lost in &extraction.lost {
                note(&format_args!("{}: left out: {}", printable(&lost.path), lost.why));
            }
            extraction.note_unset();
        }
        Ok(extraction.exit())
    })
}
