//! Checks the consistency of a filesystem: whether its trees agree with each other, as `btrfs check` does.
//!
//! `verify` reads every copy of everything and compares it with checksums; here one good copy of each node is read, and
//! its content is compared with that of other nodes. No data are read.
//!
//! The order: the extent tree with all references that it records; then the nodes of all trees, subvolumes last, each
//! once, which make references; then what is left over on either side, block groups, devices, checksums, and the names
//! of subvolumes. What is compared in each file:
//!
//! - `references`, `extents`: what refers to nodes and data, against the extent tree;
//! - `groups`, `devices`, `free_space`: chunks, block groups, device extents, free space;
//! - `data`: checksums against the file extents that need them;
//! - `inodes`, `names`, `summary`: inodes, directories and links of each subvolume;
//! - `roots`: the positions of subvolumes, and those that are being deleted.
//!
//! Invariants:
//! - Nothing is written, and what is read is not trusted: a node is visited once, and all memory is limited
//!   ([`CheckOptions`]).
//! - The verdict is "clean" only if everything was checked. What a lost node could explain is not called a finding.

mod data;
mod descent;
mod devices;
mod extents;
mod free_space;
mod groups;
mod inodes;
mod names;
mod references;
mod report;
mod roots;
mod session;
mod summary;
mod walk;

pub use report::{Finding, Place, Report, Rule, Verdict, WhyNotChecked};
pub use session::{CheckOptions, MAX_EXTENTS, MAX_LISTED, MAX_NAMES, MAX_RANGES, MAX_SHARED};

use futures_util::future::LocalBoxFuture;
use sealblock_btrfs_format::features::CompatRo;
use sealblock_btrfs_format::key::{Key, objectid};
use sealblock_btrfs_format::superblock::flags;

use crate::error::{BadCopy, CopyFault};
use crate::filesystem::Filesystem;
use crate::verify::Watch;
use descent::Tree;
use session::{Session, Stopped, expected_bytes};
use walk::Walk;

/// By how much the number of a transaction exceeds that of the one before it, at most: of ours, when a filesystem is
/// opened for writing.
const OPENING_COMMIT: u64 = 3;
/// The number of findings whose inodes get paths.
const MAX_PATHS: usize = 100;

/// Checks a filesystem.
pub fn check<'a>(fs: &'a Filesystem, options: CheckOptions, watch: &'a dyn Watch) -> LocalBoxFuture<'a, Report> {
    Box::pin(async move {
        let session = Session::new(fs, options, watch, expected_bytes(fs).await);
        // Those of opening and of the estimate.
        let bad_before = fs.take_bad_copies();
        note_devices(&session);
        if let Err(Stopped) = scan(&session).await {
            session.not_checked(WhyNotChecked::Stopped);
        }
        for copy in bad_before.into_iter().chain(fs.take_bad_copies()) {
            if crate::verify::why_unchecked(&copy.fault).is_none() {
                let place = Place { logical: copy.logical, ..Place::default() };
                session.found(Rule::NodeCopy, place, format!("{copy}; another copy is good"));
            }
        }
        add_paths(&session).await;
        session.finish()
    })
}

/// Reports what was found while opening, and what is not checked.
fn note_devices(session: &Session<'_>) {
    let fs = session.fs;
    // Images of metadata have only the first superblock.
    let is_image = fs.storage().devices.is_metadata_image();
    for copy in fs.storage().devices.bad_superblocks().iter().filter(|_| !is_image) {
        if was_interrupted(copy) {
            session.note(format!("superblock: {copy}: a commit ended between the two; the next one writes both"));
        } else {
            session.found(Rule::Superblock, Place::default(), format!("superblock: {copy}"));
        }
    }
    let unknown = fs.superblock().flags.get() & !flags::ALL;
    if unknown != 0 {
        let why = format!("the superblock has the unknown flags {unknown:#x}, with which Linux refuses it");
        session.found(Rule::Superblock, Place::default(), why);
    }
    for error in fs.size_contradictions() {
        session.found(Rule::Superblock, Place::default(), error.to_string());
    }
    for device in fs.short_devices() {
        session.found(Rule::Superblock, Place::default(), device.to_string());
    }
    if fs.known_devices().values().any(|device| device.is_missing) {
        session.not_checked(WhyNotChecked::MissingDevice);
    }
    if fs.storage().devices.iter().any(|(_, device)| device.is_stale) {
        session.not_checked(WhyNotChecked::StaleDevice);
    }
    if fs.storage().devices.unproven().next().is_some() {
        session.not_checked(WhyNotChecked::NodeTags);
    }
    if fs.has_log() {
        session.not_checked(WhyNotChecked::LogTree);
    }
}

/// True for a further superblock that is one commit older than the first one. A commit writes the first one before the
/// others, so that is what a power cut or the end of the process leaves. Linux and we only read it if the first one is
/// lost.
fn was_interrupted(copy: &BadCopy) -> bool {
    let is_last = |found: u64, newest: u64| newest.checked_sub(found).is_some_and(|commits| commits <= OPENING_COMMIT);
    copy.mirror > 1 && matches!(copy.fault, CopyFault::Old { found, newest } if is_last(found, newest))
}

async fn scan(session: &Session<'_>) -> Result<(), Stopped> {
    let fs = session.fs;
    let features = session.geometry().features.compat_ro;
    let has_group_tree = features.contains(CompatRo::BLOCK_GROUP_TREE);
    let group_tree = if has_group_tree { objectid::BLOCK_GROUP_TREE } else { objectid::EXTENT_TREE };
    let mut walk = Walk::new(session, group_tree);
    let root_tree = Tree::of_storage(fs.root_tree());
    walk.read(root_tree, |walk, leaf| match leaf {
        Ok(leaf) => walk.roots.take(leaf),
        Err(_) => walk.roots.has_lost = true,
    })
    .await?;
    match walk.roots.tree(objectid::EXTENT_TREE) {
        Some(root) => {
            walk.read(Tree::of_storage(root), |walk, leaf| match leaf {
                Ok(leaf) => walk.extents.take(walk.session, leaf),
                Err((from, before)) => walk.extents.lost(from, before),
            })
            .await?;
        }
        None => walk.extents.lost(None, None),
    }
    walk.extents.sort(session);
    walk_storage(&mut walk, root_tree).await?;
    let names = walk_subvolumes(&mut walk).await?;
    finish(walk, names).await
}

/// Walks the trees without files; those whose content others are compared with come first.
async fn walk_storage(walk: &mut Walk<'_, '_>, root_tree: Tree) -> Result<(), Stopped> {
    let session = walk.session;
    let first = [objectid::EXTENT_TREE, objectid::BLOCK_GROUP_TREE, objectid::CSUM_TREE];
    let has_tree = |walk: &Walk<'_, '_>, id| walk.roots.tree(id).is_some();
    walk.groups.has_lost_groups |= !has_tree(walk, walk.group_tree);
    walk.devices.has_lost |= !has_tree(walk, objectid::DEV_TREE);
    if !has_tree(walk, objectid::CSUM_TREE) {
        walk.sums.lost(None, None);
    }
    walk.walk(Tree::of_storage(session.fs.chunk_root())).await?;
    let trees: Vec<Tree> = walk.roots.trees().to_vec();
    for id in first {
        if let Some(tree) = trees.iter().rev().find(|tree| tree.root.id == id) {
            walk.walk(*tree).await?;
        }
    }
    walk.sums.sort();
    walk.walk(root_tree).await?;
    let has_valid_space =
        session.geometry().features.compat_ro.contains(CompatRo::FREE_SPACE_TREE | CompatRo::FREE_SPACE_TREE_VALID);
    for tree in trees.iter().filter(|tree| !first.contains(&tree.root.id) && !is_of_files(tree)) {
        walk.walk(*tree).await?;
    }
    if !has_valid_space {
        session.note("there is no valid free space tree; caches of free space are not checked".to_owned());
    } else if !has_tree(walk, objectid::FREE_SPACE_TREE) && !walk.roots.has_lost {
        session.found(Rule::NoTree, Place::tree(objectid::FREE_SPACE_TREE), "the root tree has no such tree");
    } else {
        let free_space = std::mem::replace(&mut walk.free_space, free_space::FreeSpace::new(0));
        free_space.finish(session, &walk.groups, &walk.extents);
    }
    if has_tree(walk, objectid::QUOTA_TREE) {
        session.note("the numbers of quota groups are not checked".to_owned());
    }
    Ok(())
}

fn is_of_files(tree: &Tree) -> bool {
    objectid::is_subvolume(tree.root.id) || tree.root.id == objectid::TREE_RELOC
}

/// Walks the subvolumes. Returns those whose names must be compared one by one.
async fn walk_subvolumes(walk: &mut Walk<'_, '_>) -> Result<Vec<Tree>, Stopped> {
    let trees: Vec<Tree> = walk.roots.trees().iter().filter(|tree| is_of_files(tree)).copied().collect();
    // Those in use come first, because what they share with others must be summarized for them.
    let (in_use, others): (Vec<Tree>, Vec<Tree>) = trees.into_iter().partition(|tree| tree.has_files);
    let mut names = Vec::new();
    for tree in in_use {
        if walk.walk(tree).await? {
            names.push(tree);
        }
    }
    for tree in others {
        if tree.from != Key::MIN {
            let note = format!("subvolume {} is half deleted, and is checked from {} on", tree.root.id, tree.from);
            walk.session.note(note);
        }
        walk.walk(tree).await?;
    }
    Ok(names)
}

/// Compares what was collected.
async fn finish(mut walk: Walk<'_, '_>, names: Vec<Tree>) -> Result<(), Stopped> {
    let session = walk.session;
    for tree in names {
        walk.compare_names(tree).await?;
    }
    let has_lost = walk.has_lost || walk.roots.has_lost;
    walk.groups.finish(session, &walk.extents);
    walk.roots.check(session).await;
    walk.devices.finish(session, &walk.groups);
    walk.sums.finish(session, &walk.extents);
    walk.extents.references.finish(session, has_lost);
    Ok(())
}

/// Adds paths to the findings about inodes.
async fn add_paths(session: &Session<'_>) {
    let mut findings = session.take_findings();
    let fs = session.fs;
    let mut last: Option<(u64, u64, Vec<Vec<u8>>)> = None;
    let with_inode = findings.iter_mut().filter(|finding| finding.place.ino.is_some()).take(MAX_PATHS);
    for finding in with_inode {
        let (Some(id), Some(ino)) = (finding.place.tree, finding.place.ino) else { continue };
        if !objectid::is_subvolume(id) {
            continue;
        }
        if last.as_ref().is_none_or(|(tree, last, _)| (*tree, *last) != (id, ino)) {
            let paths = match fs.tree(id).await {
                Ok(Some(tree)) => fs.paths(tree, ino).await.unwrap_or_default(),
                _ => Vec::new(),
            };
            last = Some((id, ino, paths));
        }
        finding.paths = last.as_ref().map_or_else(Vec::new, |(_, _, paths)| paths.clone());
    }
    session.put_findings(findings);
}
