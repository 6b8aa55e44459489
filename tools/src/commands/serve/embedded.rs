//! The default volume of a server without targets: created once, never over an existing file.

use std::fs;
use std::path::Path;

use sealblock_stack::target::TargetName;
use sealblock_stack::{Cause, FileKind, StackError, inspect, of_open, of_remains, on_reactor, open_medium};
use sealblock_units::ByteCount;

use crate::commands::create;

/// The folder, in the working directory; shared with the demonstration.
const FOLDER: &str = "sealblock-data";
/// The volume in it.
const NAME: &str = "default.volume";
/// Bytes of data it holds. The file is sparse: it takes space as it is written to.
const SIZE: ByteCount = ByteCount::new(1 << 30);

/// The volume; made if nothing has its name.
///
/// # Errors
/// When it cannot be made, or something else is there.
pub fn volume() -> Result<TargetName, StackError> {
    let path = Path::new(FOLDER).join(NAME);
    // A link that leads nowhere is something, too.
    if path.symlink_metadata().is_err() {
        make(&path)?;
    } else {
        check(&path)?;
    }
    Ok(TargetName::File(path))
}

/// Makes it under another name first, so that a half-made volume never has this one.
fn make(path: &Path) -> Result<(), StackError> {
    let failed = |error: &std::io::Error| StackError::io("making the default volume", error).on(path.display());
    fs::create_dir_all(FOLDER).map_err(|error| failed(&error))?;
    let draft = path.with_extension(format!("volume.{}", std::process::id()));
    create::make(&draft, &create::default_options(SIZE)?, false)?;
    // Unlike a rename, a link replaces no file.
    let placed = fs::hard_link(&draft, path);
    // It has its own name now, or is not wanted; a draft that cannot be removed is harmless.
    fs::remove_file(&draft).ok();
    placed.map_err(|error| failed(&error))
}

fn check(path: &Path) -> Result<(), StackError> {
    on_reactor(async {
        let medium = open_medium(path, sealblock_media_file::Options::READ)
            .await
            .map_err(|error| of_open("opening the default volume", &error))?;
        match inspect(&medium).await? {
            FileKind::Volume => Ok(()),
            FileKind::Remains(parts) => Err(of_remains("opening the default volume", path, &parts)),
            FileKind::Raw => Err(StackError::new(Cause::Unsuitable, "opening the default volume", "it is no volume")
                .on(path.display())
                .advise("moving it away, or naming the targets to serve")),
        }
    })
}
