//! `sealblock fs put`: files and directory trees of this machine into a filesystem.
//!
//! `copier` makes the files, `local` reads those of this machine, and `copied` is what the command tells at its end.

mod copied;
mod copier;
mod local;

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use sealblock_btrfs_format::items::directory::FileType;
use sealblock_stack::{Cause, StackError};
use sealblock_units::ByteCount;

use self::copier::Copier;
use super::paths::Entry;
use super::write::{Order, Writer, change};
use crate::cli::FsPut;
use crate::exit::Exit;
use crate::interrupt;
use crate::progress::{Progress, Show};
use crate::report::note;

/// Copies.
pub fn run(arguments: &FsPut) -> Result<Exit, StackError> {
    let order = Order { names: &[&arguments.to], json: arguments.json, needs_subvolumes: false };
    for local in &arguments.locals {
        check_local(local, arguments.recursive)?;
    }
    let show = if arguments.json { Show::Never } else { Show::OnTerminal };
    change(&order, async |writer| {
        writer.set_commit_interval(arguments.commit_interval.0);
        let progress = Progress::new("copying", known_bytes(&arguments.locals), show);
        writer.check_datasum(arguments.datasum)?;
        let mut copier = Copier::new(writer, &progress, &arguments.to, arguments.datasum);
        copier.copied.to = arguments.to.to_string();
        for local in &arguments.locals {
            let entry = destination(writer, arguments, local).await?;
            copier.copy(local, &entry).await?;
            if writer.stops() {
                let (files, bytes) = (copier.copied.files, copier.copied.bytes);
                interrupt::report(
                    "copying",
                    format_args!("after {files} files, {bytes} bytes"),
                    "the same command copies all again",
                );
                break;
            }
        }
        let copied = copier.copied;
        if !arguments.json {
            copied.lost.iter().for_each(|lost| note(&format_args!("{}: skipped: {}", lost.path, lost.why)));
            if copied.not_set > 0 {
                note(&format_args!("{} extended attributes could not be copied", copied.not_set));
            }
        }
        Ok(copied)
    })
}

/// The bytes of all files, if there is no directory, whose files nobody has counted.
fn known_bytes(locals: &[PathBuf]) -> Option<ByteCount> {
    let bytes = locals.iter().map(|local| {
        let about = local.symlink_metadata().ok()?;
        (!about.is_dir()).then(|| if about.is_file() { about.len() } else { 0 })
    });
    bytes.sum::<Option<u64>>().map(ByteCount::new)
}

/// Refuses what cannot be copied before anything is opened.
fn check_local(local: &Path, is_recursive: bool) -> Result<(), StackError> {
    let about = local.symlink_metadata().map_err(|error| StackError::at_path("read", &error, local))?;
    match about.is_dir() && !is_recursive {
        true => Err(StackError::new(Cause::Usage, "copy", "it is a directory").on(local.display()).advise("use -r")),
        false => Ok(()),
    }
}

/// The entry that a local file gets.
async fn destination(writer: &Writer, arguments: &FsPut, local: &Path) -> Result<Entry, StackError> {
    let to = &arguments.to;
    let is_directory = writer.find(to, true).await?.is_some_and(|node| node.kind == FileType::Directory);
    let must_be = arguments.locals.len() > 1 || to.path.ends_with(b"/") && !local.is_dir();
    if must_be && !is_directory {
        let refused = StackError::new(Cause::Usage, "copy to", "it is not a directory").on(to);
        return Err(refused.advise("make it with `sealblock fs mkdir`"));
    }
    let own = own_name(local).map(OsString::into_vec);
    writer.destination(to, own.as_deref()).await
}

/// The name that a local file keeps. That of `.` or `..` is the name of the directory that it is.
fn own_name(local: &Path) -> Option<OsString> {
    let whole = match local.file_name() {
        Some(name) => return Some(name.to_owned()),
        None => local.canonicalize().ok()?,
    };
    whole.file_name().map(ToOwned::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_local_directory_has_its_name_by_any_path() {
        assert_eq!(own_name(Path::new("/usr/bin/")), Some("bin".into()));
        assert_eq!(own_name(Path::new("/usr/bin/..")), Some("usr".into()));
        assert_eq!(own_name(Path::new("/")), None);
        assert!(own_name(Path::new(".")).is_some());
    }

    #[test]
    fn the_bytes_of_files_are_known_and_those_of_directories_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let (file, other) = (folder.path().join("file"), folder.path().join("other"));
        std::fs::write(&file, [1; 100]).unwrap();
        std::os::unix::fs::symlink("file", &other).unwrap();
        assert_eq!(known_bytes(&[file.clone(), other.clone(), file.clone()]), Some(ByteCount::new(200)));
        assert_eq!(known_bytes(&[file, folder.path().to_owned()]), None);
    }

    #[test]
    fn what_is_read_before_is_refused() {
        assert_eq!(check_local(Path::new("/usr"), false).unwrap_err().cause(), Cause::Usage);
        check_local(Path::new("/usr"), true).unwrap();
        check_local(Path::new("/nowhere"), true).unwrap_err();
    }
}
