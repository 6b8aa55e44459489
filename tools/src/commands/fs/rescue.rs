//! `sealblock fs rescue`: what is good of a damaged filesystem, and a list of the rest.
//!
//! First all that directories lead to. Then subvolumes that nothing leads to any more, each in a directory of its own, and last inodes that no name
//! leads to, by their numbers: their directory is lost, or the entry in it.

use sealblock_btrfs::inode::FileKind;
use sealblock_btrfs::{OpenOptions, RootsFrom, TreeRoot};
use sealblock_btrfs_extract::{Extraction, Losses};
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_stack::StackError;
use sealblock_stack::filesystem::{FilesystemName, OpenFilesystem, Start};

use super::extract::{Shown, empty_directory, exit, note_unset, report, write_error};
use super::place::{older_roots, printable, resolve, with_options};
use crate::cli::FsRescue;
use crate::exit::Exit;
use crate::interrupt;
use crate::progress::{Progress, Show};
use crate::report::{note, print_json, say};

/// Where inodes without a name go.
const LOST_AND_FOUND: &str = "lost+found";

/// Copies what is good.
pub fn run(arguments: &FsRescue) -> Result<Exit, StackError> {
    let place = &arguments.place;
    empty_directory(&arguments.to)?;
    interrupt::watch();
    let roots = arguments.backup_root.map_or(RootsFrom::Best, |index| RootsFrom::Backup(index.into()));
    let options = OpenOptions { roots, ..OpenOptions::default() };
    with_options(place, options, async |open| {
        let show = if arguments.json { Show::Never } else { Show::OnTerminal };
        let progress = Shown(Progress::new("rescuing", None, show));
        let mut extraction = Extraction::new(&open.filesystem, arguments.to.clone(), Losses::Keep, &progress);
        for lost in open.filesystem.lost_chunks() {
            extraction.lose(Vec::new(), None, lost.to_string());
        }
        if arguments.backup_root.is_none() {
            older_roots(&open.filesystem).into_iter().for_each(|why| extraction.lose(Vec::new(), None, why));
        }
        let nameless = if is_part(place) {
            let start = resolve(open, place, false).await?;
            extraction.copy(start, &name_in(place, start.kind)).await.map_err(write_error)?;
            0
        } else {
            all(open, &mut extraction).await?
        };
        extraction.finish();
        if arguments.json {
            print_json(&report(&extraction, (place, open), &arguments.to, Some(nameless)))?;
        } else {
            for lost in &extraction.lost {
                let range = lost.range.map_or(String::new(), |(at, bytes)| format!(" bytes {at}..{}", at + bytes - 1));
                say(&format!("/{}{range}: {}", printable(&lost.path), lost.why))?;
            }
            for (path, at, bytes) in &extraction.unverified.listed {
                let (path, last) = (printable(path), at + bytes - 1);
                say(&format!("/{path} bytes {at}..{last}: kept unverified: no checksums, or lost checksums"))?;
            }
            note(&format_args!(
                "{} files, {nameless} of them without a name, {} lost parts{}",
                extraction.files,
                extraction.lost_count,
                match extraction.unverified.bytes {
                    0 => String::new(),
                    bytes => format!(", {bytes} bytes unverified"),
                }
            ));
            note_unset(&extraction);
        }
        Ok(exit(&extraction))
    })
}

/// True if less than the whole filesystem is meant: all of it lies below the first subvolume, so a colon alone leaves nothing out.
fn is_part(place: &FilesystemName) -> bool {
    place.has_place && !(place.start == Start::TopLevel && place.path.is_empty())
}

/// What a single file is called; a directory is the one that is copied into.
fn name_in(place: &FilesystemName, kind: FileKind) -> Vec<u8> {
    let name = place.path.split(|byte| *byte == b'/').rfind(|part| !part.is_empty());
    name.filter(|_| kind != FileKind::Directory).unwrap_or_default().to_vec()
}

/// Everything that can be reached in any way. Returns how many inodes had no name.
async fn all(open: &OpenFilesystem, extraction: &mut Extraction<'_>) -> Result<u64, StackError> {
    let filesystem = &open.filesystem;
    let top = FilesystemName { targets: Vec::new(), start: Start::TopLevel, path: Vec::new(), has_place: true };
    match resolve(open, &top, false).await {
        Ok(start) => extraction.copy(start, b"").await.map_err(write_error)?,
        Err(error) => extraction.lose(Vec::new(), None, error.to_string()),
    }
    let (subvolumes, lost) = filesystem.subvolumes().await;
    lost.iter().for_each(|lost| extraction.lose(Vec::new(), None, lost.to_string()));
    let mut nameless = 0;
    for (id, subvolume) in subvolumes.iter().filter(|(_, one)| !one.is_dead) {
        if interrupt::came() {
            break;
        }
        if *id != objectid::FS_TREE && !extraction.reached.contains(&(*id, subvolume.root_dirid)) {
            let name = format!("subvolume-{id}").into_bytes();
            match filesystem.top(subvolume).await {
                Ok(start) => extraction.copy(start, &name).await.map_err(write_error)?,
                Err(error) => extraction.lose(name, None, error.to_string()),
            }
        }
        nameless += copy_nameless(open, extraction, subvolume.root).await?;
    }
    Ok(nameless)
}

/// Copies inodes of a subvolume that no name led to.
async fn copy_nameless(
    open: &OpenFilesystem,
    extraction: &mut Extraction<'_>,
    tree: TreeRoot,
) -> Result<u64, StackError> {
    let filesystem = &open.filesystem;
    let (first, last) =
        (Key::new(objectid::FIRST_FREE, ItemType(0), 0), Key::new(objectid::LAST_FREE, ItemType(u8::MAX), u64::MAX));
    let (mut cursor, mut inos) = (filesystem.cursor(tree, first..=last), Vec::new());
    loop {
        match cursor.next().await {
            Ok(None) => break,
            Ok(Some((key, data))) => {
                // An inode without links is one that was deleted while it was open.
                if let Ok(Item::Inode(item)) = Item::decode(key, data)
                    && item.nlink > 0
                    && !extraction.reached.contains(&(tree.id, key.objectid))
                {
                    inos.push(key.objectid);
                }
            }
            Err(error) => extraction.lose(format!("subvolume {}", tree.id).into_bytes(), None, error.to_string()),
        }
    }
    let mut copied = 0;
    for ino in inos {
        if extraction.reached.contains(&(tree.id, ino)) {
            continue;
        }
        let folder =
            extraction.folder(&[LOST_AND_FOUND.to_owned(), format!("subvolume-{}", tree.id)]).map_err(write_error)?;
        let path = [&folder[..], format!("/inode-{ino}").as_bytes()].concat();
        match filesystem.inode(tree, ino).await {
            Ok(inode) => {
                extraction.copy(inode, &path).await.map_err(write_error)?;
                copied += 1;
            }
            Err(error) => extraction.lose(path, None, error.to_string()),
        }
    }
    Ok(copied)
}
