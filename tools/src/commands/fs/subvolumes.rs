//! `sealblock fs snapshot` and `sealblock fs subvolume`.
//!
//! A deleted subvolume is gone with the commit that removes its entry. Its space is freed after that (`dead`).

use std::fmt::Write as _;

use sealblock_btrfs::devices::uuid;
use sealblock_btrfs_engine::engine::EngineError;
use sealblock_btrfs_engine::names::Place;
use sealblock_btrfs_engine::operations::{NewSnapshot, Resolved, SubvolumePlace};
use sealblock_stack::filesystem::{FilesystemName, Start, filesystem_error};
use sealblock_stack::identity::new_uuid;
use sealblock_stack::{Cause, StackError};
use serde::Serialize;

use super::dead::{Dead, drop_dead};
use super::info::{SubvolumeReport, subvolume_reports, subvolume_text};
use super::names::ownership;
use super::paths::{Entry, Node, own_name};
use super::place::{printable, with_filesystem};
use super::remove::{Removed, check_deletable, delete_below, delete_entry};
use super::write::{Done, Order, Writer, change, engine_error, now};
use crate::cli::{FsSnapshot, FsSubvolume, FsSubvolumeCommand, FsSubvolumeCreate, FsSubvolumeDelete, FsSubvolumeList};
use crate::exit::Exit;
use crate::progress::Show;
use crate::report::{Lines, note, print_report};

/// A subvolume that was made, in JSON.
#[derive(Serialize)]
struct Made {
    name: String,
    id: u64,
    uuid: String,
}

/// A snapshot, in JSON.
#[derive(Serialize)]
struct Snapshot {
    #[serde(flatten)]
    made: Made,
    source: u64,
    read_only: bool,
}

impl Done for Snapshot {
    fn text(&self) -> String {
        format!("{}: subvolume {}, a snapshot of {}", printable(self.made.name.as_bytes()), self.made.id, self.source)
    }
}

/// Subvolumes that were made, in JSON.
#[derive(Serialize)]
struct Created {
    subvolumes: Vec<Made>,
}

impl Done for Created {
    fn text(&self) -> String {
        let lines: Vec<String> = self
            .subvolumes
            .iter()
            .map(|made| format!("{}: subvolume {}", printable(made.name.as_bytes()), made.id))
            .collect();
        lines.join("\n")
    }
}

/// Makes a snapshot.
pub fn snapshot(arguments: &FsSnapshot) -> Result<Exit, StackError> {
    let order = Order { names: &[&arguments.source, &arguments.to], json: arguments.json, needs_subvolumes: false };
    let (id, read_only) = (new_uuid()?, arguments.read_only);
    change(&order, async |writer| {
        let source = writer.existing(&arguments.source).await?;
        if !source.is_top() {
            let why = "it is not a subvolume";
            return Err(StackError::new(Cause::Unsuitable, "make a snapshot of", why).on(&arguments.source));
        }
        let entry = writer.destination(&arguments.to, own_name(&arguments.source)).await?;
        let to = SubvolumePlace { root: entry.directory.root, place: entry.place() };
        let new = NewSnapshot { source: source.root, uuid: id, is_read_only: read_only };
        let made = writer.engine.create_snapshot(new, to, now()).await.map_err(entry.failed("create"))?;
        let made = Made { name: entry.shown, id: made, uuid: uuid(&id) };
        Ok(Snapshot { made, source: source.root, read_only })
    })
}

/// Creates, deletes or lists.
pub fn run(arguments: &FsSubvolume) -> Result<Exit, StackError> {
    match &arguments.command {
        FsSubvolumeCommand::Create(arguments) => create(arguments),
        FsSubvolumeCommand::Delete(arguments) => delete(arguments),
        FsSubvolumeCommand::List(arguments) => list(arguments),
    }
}

fn create(arguments: &FsSubvolumeCreate) -> Result<Exit, StackError> {
    let names: Vec<&FilesystemName> = arguments.names.iter().collect();
    let order = Order { names: &names, json: arguments.json, needs_subvolumes: false };
    let owner = ownership(arguments.owner, arguments.mode);
    change(&order, async |writer| {
        writer.check_datasum(arguments.datasum)?;
        let mut subvolumes = Vec::new();
        for name in &arguments.names {
            let entry = writer.entry(name).await?;
            let to = SubvolumePlace { root: entry.directory.root, place: entry.place() };
            let id = new_uuid()?;
            let made = writer.engine.create_subvolume(to, id, &owner, now()).await.map_err(entry.failed("create"))?;
            writer.set_datasum(Node::top(made), arguments.datasum, &entry.shown).await?;
            subvolumes.push(Made { name: entry.shown, id: made, uuid: uuid(&id) });
        }
        Ok(Created { subvolumes })
    })
}

/// What was deleted, in JSON.
#[derive(Serialize)]
struct Deleted {
    /// Numbers of the subvolumes that were deleted.
    subvolumes: Vec<u64>,
    /// What became of these, and of those that were deleted earlier.
    #[serde(flatten)]
    dead: Dead,
}

impl Done for Deleted {
    fn text(&self) -> String {
        let numbers = |ids: &[u64]| ids.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        let mut text = String::new();
        if !self.subvolumes.is_empty() {
            let _ = write!(text, "deleted: {}", numbers(&self.subvolumes));
        }
        let earlier: Vec<u64> = self.dead.dropped.iter().copied().filter(|id| !self.subvolumes.contains(id)).collect();
        if !earlier.is_empty() {
            let separator = if text.is_empty() { "" } else { "\n" };
            let _ = write!(text, "{separator}freed, deleted earlier: {}", numbers(&earlier));
        }
        text
    }
}

fn delete(arguments: &FsSubvolumeDelete) -> Result<Exit, StackError> {
    let names: Vec<&FilesystemName> = arguments.names.iter().collect();
    let order = Order { names: &names, json: arguments.json, needs_subvolumes: arguments.recursive };
    let show = if arguments.json { Show::Never } else { Show::OnTerminal };
    change(&order, async |writer| {
        let mut removed = Removed::default();
        for name in arguments.names.iter().filter(|name| name.has_place) {
            let entry = subvolume_entry(writer, name).await?;
            if arguments.recursive
                && let Some(Resolved::Subvolume(id)) = entry.found.map(|found| found.target)
            {
                let below = writer.nested.below_subvolume(id);
                check_deletable(writer, &entry, &below, Some(id)).await?;
                delete_below(writer, &below, &mut removed).await?;
            }
            let id = delete_entry(writer, &entry).await?;
            removed.subvolumes.push(id);
        }
        let failed = |error| engine_error("write to", &error).on(arguments.names[0].devices());
        let dead = drop_dead(writer, show).await.map_err(failed)?;
        Ok(Deleted { subvolumes: removed.subvolumes, dead })
    })
}

/// The entry of a subvolume, by its path or its number.
async fn subvolume_entry(writer: &Writer, name: &FilesystemName) -> Result<Entry, StackError> {
    let id = match name.start {
        _ if own_name(name).is_some() => return writer.entry(name).await,
        Start::Subvolume(id) if name.path.is_empty() => id,
        _ => {
            let why = "the top-level subvolume and the default one cannot be deleted, and the path names no other one";
            return Err(StackError::new(Cause::Refused, "delete", why).on(name));
        }
    };
    let failed = |error: EngineError| engine_error("find", &error).on(name);
    let (parent, directory, _, own) =
        writer.engine.inspect(|transaction| transaction.place_of(id)).await.map_err(failed)?;
    let found = writer.engine.lookup(parent, Place { directory, name: &own }).await.map_err(failed)?;
    let directory = Node { ino: directory, ..Node::top(parent) };
    Ok(Entry { directory, name: own, found, shown: name.to_string() })
}

/// The subvolumes, in JSON.
#[derive(Serialize)]
struct Listing {
    target: String,
    default_subvolume: u64,
    subvolumes: Vec<SubvolumeReport>,
}

fn list(arguments: &FsSubvolumeList) -> Result<Exit, StackError> {
    let name = &arguments.filesystem;
    with_filesystem(name, async |open| {
        let filesystem = &open.filesystem;
        let failed = |error| filesystem_error("read the subvolumes of", &error).on(name.devices());
        let (all, lost) = filesystem.subvolumes().await;
        let default_subvolume = filesystem.default_subvolume().await.map_err(failed)?;
        let subvolumes = subvolume_reports(filesystem, &all).await;
        let listing = Listing { target: name.devices(), default_subvolume, subvolumes };
        print_report(arguments.json, &listing, || {
            let mut lines = Lines::new(8);
            for one in &listing.subvolumes {
                lines.put(&one.id.to_string(), subvolume_text(one, Some(default_subvolume)));
            }
            lines.into_text()
        })?;
        lost.iter().for_each(|error| {
            note(&format_args!("{}: lost: {}", name.devices(), printable(error.to_string().as_bytes())))
        });
        Ok(if lost.is_empty() { Exit::Clean } else { Exit::DamageFound })
    })
}
