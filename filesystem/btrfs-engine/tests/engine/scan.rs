//! The content of subvolumes as the engine reads it, to be compared with what the kernel shows.

use std::collections::BTreeMap;

use futures_executor::block_on;
use sealblock_btrfs_engine::engine::Engine;
use sealblock_btrfs_engine::names::Place;
use sealblock_btrfs_engine::operations::Resolved;
use sealblock_btrfs_format::items::directory::FileType;
use sealblock_btrfs_format::items::inode::{InodeItem, Timespec};
use sealblock_proofs_btrfs_images::manifest::{Entry, Kind, Manifest, Time};

/// The top directory of a subvolume.
pub const TOP: u64 = 256;

/// An inode of a subvolume.
type At = (u64, u64);

/// All that is below the top of a subvolume, also in others. Files have no content.
pub fn scan(engine: &Engine, root: u64) -> Manifest {
    scan_some(engine, root, true)
}

/// All that is in a subvolume, without the entries of others.
pub fn scan_alone(engine: &Engine, root: u64) -> Manifest {
    scan_some(engine, root, false)
}

fn scan_some(engine: &Engine, root: u64, with_others: bool) -> Manifest {
    let (mut found, mut first_names) = (Manifest::default(), BTreeMap::new());
    let mut pending = vec![(Vec::new(), Some((root, TOP)))];
    while let Some((path, at)) = pending.pop() {
        let Some((root, ino)) = at else {
            found.entries.insert(path, left_over());
            continue;
        };
        let inode = block_on(engine.stat(root, ino)).unwrap();
        let entry = entry(engine, (root, ino), &inode);
        if entry.kind == Kind::Directory {
            let prefix = if path.is_empty() { Vec::new() } else { [&path[..], b"/"].concat() };
            let is_wanted = |at: &Option<At>| with_others || at.is_some_and(|(of, _)| of == root);
            for (name, at) in entries(engine, root, ino).into_iter().filter(|(_, at)| is_wanted(at)) {
                pending.push(([&prefix[..], &name].concat(), at));
            }
        } else {
            first_names.entry((root, ino)).or_insert_with(Vec::new).push(path.clone());
        }
        found.entries.insert(path, entry);
    }
    for paths in first_names.values_mut() {
        paths.sort();
        let first = paths[0].clone();
        for path in &paths[1..] {
            found.entries.get_mut(path).unwrap().same_as = Some(first.clone());
        }
    }
    found
}

fn entries(engine: &Engine, root: u64, directory: u64) -> Vec<(Vec<u8>, Option<At>)> {
    let (mut all, mut after) = (Vec::new(), 0);
    let until = block_on(engine.last_index(root, directory)).unwrap();
    loop {
        let some = block_on(engine.read_directory(root, directory, (after, until), 7)).unwrap();
        let Some(last) = some.last() else { return all };
        after = last.index;
        for item in some {
            let place = Place { directory, name: &item.name };
            let found = block_on(engine.lookup(root, place)).unwrap().expect("a name that the directory has");
            let at = match found.target {
                Resolved::Inode(ino) => Some((root, ino)),
                Resolved::Subvolume(id) => Some((id, TOP)),
                Resolved::Elsewhere(_) => None,
            };
            all.push((item.name, at));
        }
    }
}

fn time(time: Timespec) -> Time {
    Time { seconds: time.seconds.get(), nanoseconds: time.nanoseconds.get() }
}

fn entry(engine: &Engine, (root, ino): (u64, u64), inode: &InodeItem) -> Entry {
    let mode = inode.mode.get();
    let kind = match FileType::of_mode(mode).unwrap() {
        FileType::Directory => Kind::Directory,
        FileType::CharacterDevice => Kind::CharDevice,
        FileType::BlockDevice => Kind::BlockDevice,
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
        FileType::Symlink => Kind::Symlink,
        _ => Kind::Regular,
    };
    let names = block_on(engine.xattr_names(root, ino)).unwrap();
    let value = |name: &Vec<u8>| block_on(engine.xattr(root, ino, name)).unwrap().unwrap();
    let rdev = inode.rdev.get();
    Entry {
        kind,
        mode: mode & 0o7777,
        uid: inode.uid.get(),
        gid: inode.gid.get(),
        nlink: inode.nlink.get().into(),
        size: inode.size.get(),
        atime: time(inode.atime),
        mtime: time(inode.mtime),
        ctime: time(inode.ctime),
        device: ((rdev >> 20) as u32, (rdev & 0xf_ffff) as u32),
        target: (kind == Kind::Symlink).then(|| block_on(engine.read_link(root, ino)).unwrap()),
        content: None,
        xattrs: names.iter().map(|name| (name.clone(), value(name))).collect(),
        same_as: None,
    }
}

/// What the kernel shows in place of a subvolume that is elsewhere.
fn left_over() -> Entry {
    let none = Time::default();
    Entry {
        kind: Kind::Directory,
        mode: 0o755,
        uid: 0,
        gid: 0,
        nlink: 1,
        size: 0,
        atime: none,
        mtime: none,
        ctime: none,
        device: (0, 0),
        target: None,
        content: None,
        xattrs: BTreeMap::new(),
        same_as: None,
    }
}

/// Without the content of files, and without what reading changes.
pub fn without_content(mut manifest: Manifest) -> Manifest {
    for entry in manifest.entries.values_mut() {
        (entry.content, entry.atime) = (None, Time::default());
    }
    manifest
}

/// Two manifests are equal but for the content of files.
pub fn assert_same(kernel: Manifest, ours: Manifest) {
    let (kernel, ours) = (without_content(kernel), without_content(ours));
    let difference = kernel.difference(&ours);
    assert!(difference.is_empty(), "{} differences: {:#?}", difference.len(), &difference[..difference.len().min(20)]);
}
