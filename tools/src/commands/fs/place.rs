//! Opening the filesystem that a command is about, and finding the place in it.

use sealblock_btrfs::inode::Inode;
use sealblock_btrfs::roots::Chosen;
use sealblock_btrfs::{Filesystem, OpenOptions, RootSource, Roots, TreeRoot};
use sealblock_btrfs_format::key::objectid;
use sealblock_stack::filesystem::{FilesystemName, OpenFilesystem, Start, filesystem_error};
use sealblock_stack::{OpenTarget, StackError, on_reactor};
use serde::Serialize;

use crate::exit::Exit;
use crate::report::{note, note_older};

/// Opens a filesystem, works with it, and closes its targets. Unusual states are reported on standard error. The exit status is that
/// of the work, unless the data that it read may be older than what was written.
pub(super) fn with_filesystem(
    name: &FilesystemName,
    work: impl AsyncFnOnce(&OpenFilesystem) -> Result<Exit, StackError>,
) -> Result<Exit, StackError> {
    with_options(name, OpenOptions::default(), work)
}

/// The same, opened in a certain way.
pub(super) fn with_options(
    name: &FilesystemName,
    options: OpenOptions,
    work: impl AsyncFnOnce(&OpenFilesystem) -> Result<Exit, StackError>,
) -> Result<Exit, StackError> {
    on_reactor(async {
        let open = name.open(options).await?;
        say_state(name, &open.filesystem);
        let older = open.targets().iter().filter(|target| note_older(target)).count();
        let is_older = older > 0 || superblock_text(&open.filesystem).is_some();
        Ok(open.close_after(work).await?.unless_older(is_older))
    })
}

/// Why what is read may be older than what was written.
pub(super) struct WhyFilesOlder {
    /// The name in JSON.
    pub name: &'static str,
    /// As text for people.
    pub text: String,
}

/// Why what is read may be older than what was written, if it may.
pub(super) fn why_older(open: &OpenFilesystem) -> Option<WhyFilesOlder> {
    let of_target =
        |target: &OpenTarget| Some(WhyFilesOlder { name: target.why_older()?.as_str(), text: target.older_text()? });
    let of_filesystem = || {
        let text = superblock_text(&open.filesystem)?;
        Some(WhyFilesOlder { name: "superblock_lost", text })
    };
    open.targets().iter().find_map(of_target).or_else(of_filesystem)
}

/// That a newer superblock may be lost, if so.
fn superblock_text(filesystem: &Filesystem) -> Option<String> {
    let devices = &filesystem.storage().devices;
    let generation = devices.geometry().generation;
    devices.may_be_older().then(|| format!(
        "files may be older than what was written: the first superblock is lost, and a copy of it, of transaction {generation}, is used"
    ))
}

/// Reports the missing, old or unused parts of the filesystem.
pub(super) fn say_state(name: &FilesystemName, filesystem: &Filesystem) {
    let name = name.devices();
    for (devid, device) in filesystem.known_devices() {
        if device.is_missing {
            note(&format_args!("{name}: device {devid} is missing; data that only it holds cannot be read"));
        }
    }
    for (devid, device) in filesystem.storage().devices.iter().filter(|(_, device)| device.is_stale) {
        let (target, generation) = (&device.name, device.generation);
        note(&format_args!(
            "{target}: device {devid} is at transaction {generation}, older than other devices; only data with checksums are read from it"
        ));
    }
    for (devid, device, why) in filesystem.storage().devices.unproven() {
        let target = &device.name;
        note(&format_args!(
            "WARNING: {target}: device {devid} cannot show whether what is read from it is good, as the filesystem has no checksums: {why}"
        ));
    }
    say_superblocks(&name, filesystem);
    older_roots(filesystem).iter().for_each(|why| note(&format_args!("{name}: {why}")));
    for lost in filesystem.lost_chunks() {
        note(&format_args!("{name}: part of the chunk tree is lost: {lost}"));
    }
    for copy in filesystem.differing_roots() {
        note(&format_args!("{name}: the root tree is read from its first good copy: {copy}"));
    }
    if filesystem.storage().devices.is_metadata_image() {
        note(&format_args!("{name}: a metadata image, without file data"));
    }
    if filesystem.has_log() {
        note(&format_args!(
            "{name}: changes synced after the last transaction are in a log that is not replayed: some files have older content"
        ));
    }
}

/// Reports superblocks that are lost or contradict the one that is used, and what that means for the content.
fn say_superblocks(name: &str, filesystem: &Filesystem) {
    let devices = &filesystem.storage().devices;
    devices.bad_superblocks().iter().for_each(|copy| note(&format_args!("{name}: superblock: {copy}")));
    superblock_text(filesystem).iter().for_each(|text| note(&format_args!("{name}: {text}")));
}

/// What is to be said of roots that are not the newest ones: that these are lost, and what is begun from instead.
pub(super) fn older_roots(filesystem: &Filesystem) -> Vec<String> {
    let (roots, newest) = (filesystem.roots(), filesystem.superblock().generation.get());
    let mut said = Vec::new();
    for (what, chosen) in [("chunk tree", roots.chunks), ("root tree", roots.trees)] {
        if chosen.source != RootSource::Superblock {
            let (source, generation) = (chosen.source, chosen.root.generation);
            said.push(format!(
                "the newest root of the {what} is not used: reading starts at {source}, of transaction {generation}; the filesystem is at transaction {newest}"
            ));
        }
    }
    if roots.chunks_of_devices > 0 {
        said.push(format!("{} chunks are known only from the device tree", roots.chunks_of_devices));
    }
    said
}

/// The roots in JSON.
#[derive(Serialize)]
pub(super) struct RootsReport {
    chunk_tree: RootReport,
    tree_of_trees: RootReport,
    chunks_of_devices: usize,
}

/// A root in JSON.
#[derive(Serialize)]
pub(super) struct RootReport {
    pub(super) source: String,
    pub(super) generation: u64,
    pub(super) logical: u64,
}

impl From<Chosen> for RootReport {
    fn from(chosen: Chosen) -> RootReport {
        let TreeRoot { generation, bytenr: logical, .. } = chosen.root;
        RootReport { source: chosen.source.to_string(), generation, logical }
    }
}

impl From<&Roots> for RootsReport {
    fn from(roots: &Roots) -> RootsReport {
        let Roots { chunks, trees, chunks_of_devices } = *roots;
        RootsReport { chunk_tree: chunks.into(), tree_of_trees: trees.into(), chunks_of_devices }
    }
}

/// The inode at a place.
pub(super) async fn resolve(
    open: &OpenFilesystem,
    place: &FilesystemName,
    follow_last: bool,
) -> Result<Inode, StackError> {
    let filesystem = &open.filesystem;
    let fail = |error| filesystem_error("find", &error).on(place);
    let id = match place.start {
        Start::Default => filesystem.default_subvolume().await.map_err(fail)?,
        Start::TopLevel => objectid::FS_TREE,
        Start::Subvolume(id) => id,
    };
    let subvolume = filesystem.subvolume(id).await.map_err(fail)?;
    let top = filesystem.top(&subvolume).await.map_err(fail)?;
    filesystem.resolve(top, &place.path, follow_last).await.map_err(fail)
}

/// A name as a person may see it: no byte of it does something to a terminal.
pub(super) fn printable(name: &[u8]) -> String {
    sealblock_stack::printable(&String::from_utf8_lossy(name)).into_owned()
}
