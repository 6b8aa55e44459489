//! `sealblock fs mkdir`, `mv`, `ln`, `chmod` and `chown`: names and attributes.

use sealblock_btrfs_engine::datasum::Datasum;
use sealblock_btrfs_engine::engine::EngineError;
use sealblock_btrfs_engine::inode::{AttributeChanges, Ownership, PERMISSION_MASK};
use sealblock_btrfs_engine::names::{NewFile, RenameMode, Renamed};
use sealblock_btrfs_engine::operations::Resolved;
use sealblock_btrfs_format::items::directory::FileType;
use sealblock_btrfs_format::items::inode::InodeItem;
use sealblock_stack::filesystem::FilesystemName;
use sealblock_stack::{Cause, StackError};
use serde::Serialize;
use std::os::unix::ffi::OsStrExt;

use super::paths::{Entry, Node, own_name};
use super::remove::release;
use super::write::{Done, Order, Writer, change, engine_error, now};
use crate::cli::{FsChmod, FsChown, FsLn, FsMkdir, FsMv, Owner};
use crate::exit::Exit;

const SET_USER_ID: u32 = 0o4000;
const SET_GROUP_ID: u32 = 0o2000;
const GROUP_EXECUTE: u32 = 0o010;
/// Permissions of a new directory, before the umask.
const DIRECTORY_PERMISSIONS: u32 = 0o777;

/// Files that were made or changed, in JSON.
#[derive(Default, Serialize)]
struct Changed {
    files: Vec<ChangedFile>,
}

#[derive(Serialize)]
struct ChangedFile {
    name: String,
    subvolume: u64,
    ino: u64,
}

impl Done for Changed {}

impl Changed {
    fn add(&mut self, name: impl ToString, root: u64, ino: u64) {
        self.files.push(ChangedFile { name: name.to_string(), subvolume: root, ino });
    }
}

/// A rename, in JSON.
#[derive(Serialize)]
struct Moved {
    from: String,
    to: String,
    /// Whether the new name was that of another file, which lost it.
    replaced: bool,
}

impl Done for Moved {}

/// Who owns a new directory, and its permissions: as given, or else as any program of this user would make it.
pub(super) fn ownership(owner: Option<Owner>, mode: Option<u32>) -> Ownership {
    let Owner { uid, gid } = owner.unwrap_or(Owner { uid: None, gid: None });
    Ownership {
        uid: uid.unwrap_or_else(|| rustix::process::geteuid().as_raw()),
        gid: gid.unwrap_or_else(|| rustix::process::getegid().as_raw()),
        permissions: mode.unwrap_or_else(|| DIRECTORY_PERMISSIONS & !umask()),
    }
}

/// The umask can only be read by setting it.
fn umask() -> u32 {
    let mask = rustix::process::umask(rustix::fs::Mode::empty());
    rustix::process::umask(mask);
    mask.as_raw_mode()
}

/// The owner of a new directory, and where the checksums of data in it are kept, if that is not inherited.
type NewDirectory<'a> = (&'a Ownership, Option<Datasum>);

/// Makes directories.
pub fn mkdir(arguments: &FsMkdir) -> Result<Exit, StackError> {
    let names: Vec<&FilesystemName> = arguments.names.iter().collect();
    let order = Order { names: &names, json: arguments.json, needs_subvolumes: false };
    let owner = ownership(arguments.owner, arguments.mode);
    // Directories on the way must be accessible to their owner, or nothing could be made in them.
    let on_the_way = Ownership { permissions: ownership(None, None).permissions | 0o300, ..owner };
    change(&order, async |writer| {
        let datasum = arguments.datasum;
        writer.check_datasum(datasum)?;
        let mut made = Changed::default();
        for name in &arguments.names {
            if arguments.parents {
                make_path(writer, name, [(&on_the_way, None), (&owner, datasum)], &mut made).await?;
            } else {
                make(writer, &writer.entry(name).await?, (&owner, datasum), &mut made).await?;
            }
        }
        Ok(made)
    })
}

/// Makes a directory and those on the way to it, as far as they are missing. Paths may have thousands of parts, so no more
/// than a few of their beginnings are followed from the top.
async fn make_path(
    writer: &Writer,
    name: &FilesystemName,
    [on_the_way, named]: [NewDirectory<'_>; 2],
    made: &mut Changed,
) -> Result<(), StackError> {
    let mut all = prefixes(name);
    if name.path.ends_with(b"/") {
        all.pop();
    }
    all.push(name.clone());
    let (mut there, mut missing) = (0, all.len());
    while there < missing {
        let middle = there.midpoint(missing);
        match writer.find(&all[middle], true).await {
            Ok(Some(_)) => there = middle + 1,
            Ok(None) => missing = middle,
            Err(error) if error.cause() == Cause::Absent => missing = middle,
            Err(error) => return Err(error),
        }
    }
    if let Some(last) = there.checked_sub(1)
        && writer.existing(&all[last]).await?.kind != FileType::Directory
    {
        return Err(StackError::new(Cause::Unsuitable, "create", "it exists, and is not a directory").on(&all[last]));
    }
    let mut above: Option<Node> = None;
    for (index, name) in all.iter().enumerate().skip(there) {
        let new = if index + 1 == all.len() { named } else { on_the_way };
        let entry = match (above, own_name(name)) {
            (Some(directory), Some(own)) => writer.entry_in(directory, own, name.to_string()).await?,
            // `..` leads to what is there by now.
            (_, None) if writer.find(name, true).await?.is_some() => {
                above = None;
                continue;
            }
            _ => writer.entry(name).await?,
        };
        let ino = make(writer, &entry, new, made).await?;
        above = Some(Node { root: entry.directory.root, ino, kind: FileType::Directory });
    }
    Ok(())
}

async fn make(
    writer: &Writer,
    entry: &Entry,
    (owner, datasum): NewDirectory<'_>,
    made: &mut Changed,
) -> Result<u64, StackError> {
    let root = entry.directory.root;
    let ino = writer.engine.create(root, entry.place(), NewFile::Directory, owner, now()).await;
    let ino = ino.map_err(entry.failed("create"))?;
    let node = Node { root, ino, kind: FileType::Directory };
    writer.set_datasum(node, datasum, &entry.shown).await?;
    made.add(&entry.shown, root, ino);
    Ok(ino)
}

/// The names of the directories on the path of a name.
fn prefixes(name: &FilesystemName) -> Vec<FilesystemName> {
    let is_end = |at: &usize| name.path[*at] == b'/' && *at > 0 && name.path[at - 1] != b'/';
    let ends = (0..name.path.len()).filter(is_end);
    ends.map(|end| FilesystemName { path: name.path[..end].to_vec(), ..name.clone() }).collect()
}

/// Renames or moves.
pub fn mv(arguments: &FsMv) -> Result<Exit, StackError> {
    let order = Order { names: &[&arguments.from, &arguments.to], json: arguments.json, needs_subvolumes: false };
    let mode = match (arguments.no_clobber, arguments.exchange) {
        (true, _) => RenameMode::NoReplace,
        (false, true) => RenameMode::Exchange,
        (false, false) => RenameMode::Replace,
    };
    change(&order, async |writer| {
        let from = writer.entry(&arguments.from).await?;
        if from.found.is_none() {
            return Err(from.refused(Cause::Absent, "move", "it does not exist"));
        }
        let to = match mode {
            RenameMode::Exchange => writer.entry(&arguments.to).await?,
            _ => writer.destination(&arguments.to, own_name(&arguments.from)).await?,
        };
        let (source, target) = (from.directory.root, to.directory.root);
        let renamed = writer.engine.rename((source, from.place()), (target, to.place()), mode, now()).await;
        let doing = format!("move '{}' to", from.shown);
        let renamed = renamed.map_err(to.failed(&doing))?;
        let mut replaced = false;
        if let Renamed::Moved(Some(unlinked)) = renamed {
            release(writer, target, unlinked).await.map_err(to.failed(&doing))?;
            replaced = true;
        }
        Ok(Moved { from: from.shown, to: to.shown, replaced })
    })
}

/// Makes a link.
pub fn ln(arguments: &FsLn) -> Result<Exit, StackError> {
    let existing = match arguments.symbolic {
        true => None,
        false => Some(FilesystemName::parse(&arguments.to).map_err(|why| {
            StackError::new(Cause::Usage, "link to", why)
                .on(arguments.to.display())
                .advise("give a file in the filesystem, or -s")
        })?),
    };
    let names: Vec<&FilesystemName> = [&arguments.name].into_iter().chain(&existing).collect();
    let order = Order { names: &names, json: arguments.json, needs_subvolumes: false };
    change(&order, async |writer| {
        let mut made = Changed::default();
        match &existing {
            None => {
                let entry = writer.entry(&arguments.name).await?;
                let target = NewFile::Symlink(arguments.to.as_bytes());
                let owner = Ownership { permissions: DIRECTORY_PERMISSIONS, ..ownership(None, None) };
                let root = entry.directory.root;
                let ino = writer.engine.create(root, entry.place(), target, &owner, now()).await;
                made.add(&entry.shown, root, ino.map_err(entry.failed("create"))?);
            }
            Some(existing) => hard_link(writer, existing, &arguments.name, &mut made).await?,
        }
        Ok(made)
    })
}

async fn hard_link(
    writer: &Writer,
    existing: &FilesystemName,
    name: &FilesystemName,
    made: &mut Changed,
) -> Result<(), StackError> {
    let source = writer.entry(existing).await?;
    let entry = writer.destination(name, own_name(existing)).await?;
    let root = source.directory.root;
    let ino = match source.found.map(|found| found.target) {
        None => return Err(source.refused(Cause::Absent, "link to", "it does not exist")),
        Some(Resolved::Inode(ino)) if root == entry.directory.root => ino,
        Some(Resolved::Inode(_)) => {
            let why = format!("{} is in another subvolume", source.shown);
            return Err(entry.refused(Cause::Unsuitable, "create", &why).advise("use a symbolic link (-s)"));
        }
        Some(_) => return Err(source.refused(Cause::Unsuitable, "link to", "it is a subvolume")),
    };
    writer.engine.link(root, ino, entry.place(), now()).await.map_err(entry.failed("create"))?;
    made.add(&entry.shown, root, ino);
    Ok(())
}

/// Sets permissions.
pub fn chmod(arguments: &FsChmod) -> Result<Exit, StackError> {
    set(&arguments.names, arguments.json, |_, _| AttributeChanges {
        permissions: Some(arguments.mode),
        ..AttributeChanges::default()
    })
}

/// Sets owners.
pub fn chown(arguments: &FsChown) -> Result<Exit, StackError> {
    let Owner { uid, gid } = arguments.owner;
    set(&arguments.names, arguments.json, |node, inode| {
        let permissions = (node.kind != FileType::Directory).then(|| without_set_id(inode.mode.get()));
        AttributeChanges { uid, gid, permissions, ..AttributeChanges::default() }
    })
}

/// The permissions of a file that gets another owner.
fn without_set_id(mode: u32) -> u32 {
    let of_group = if mode & GROUP_EXECUTE != 0 { SET_GROUP_ID } else { 0 };
    mode & PERMISSION_MASK & !(SET_USER_ID | of_group)
}

fn set(
    names: &[FilesystemName],
    json: bool,
    changes: impl Fn(Node, &InodeItem) -> AttributeChanges,
) -> Result<Exit, StackError> {
    let all: Vec<&FilesystemName> = names.iter().collect();
    let order = Order { names: &all, json, needs_subvolumes: false };
    change(&order, async |writer| {
        let mut changed = Changed::default();
        for name in names {
            let failed = |error: EngineError| engine_error("change", &error).on(name);
            let node = writer.existing(name).await?;
            let inode = writer.engine.stat(node.root, node.ino).await.map_err(failed)?;
            let changes = changes(node, &inode);
            writer.engine.set_attributes(node.root, node.ino, &changes, now()).await.map_err(failed)?;
            changed.add(name, node.root, node.ino);
        }
        Ok(changed)
    })
}

#[cfg(test)]
mod tests {
    use sealblock_stack::filesystem::Start;

    use super::*;

    #[test]
    fn directories_on_the_way_are_made_from_the_top() {
        let of = |path: &str| {
            let name =
                FilesystemName { targets: Vec::new(), start: Start::Default, path: path.into(), has_place: true };
            let paths = prefixes(&name).into_iter().map(|name| String::from_utf8(name.path).unwrap());
            paths.collect::<Vec<_>>()
        };
        assert_eq!(of("a/b//c"), ["a", "a/b"]);
        assert_eq!(of("/a/b"), ["/a"]);
        assert_eq!(of("a"), [""; 0]);
        assert_eq!(of(""), [""; 0]);
    }

    #[test]
    fn another_owner_does_not_get_set_id_bits() {
        assert_eq!(without_set_id(0o104_755), 0o755);
        assert_eq!(without_set_id(0o106_755), 0o755);
        // Without the right to execute, that bit means mandatory locking.
        assert_eq!(without_set_id(0o102_644), 0o2644);
    }
}
