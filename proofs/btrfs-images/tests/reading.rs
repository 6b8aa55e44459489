//! This project reads a filesystem exactly as the kernel shows it: every path with all its attributes, and every byte.
//! Filesystems with copies or parity are also read with as many devices missing as the profile allows, in all
//! combinations. No byte of an image changes.
//!
//! Needs root, loop devices, `btrfs-progs` and the filesystem. Without these the tests print what is missing and are
//! skipped.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use sealblock_btrfs::inode::{FileKind, Inode};
use sealblock_btrfs::verify::{Unwatched, VerifyOptions, WhyUnchecked, verify};
use sealblock_btrfs::walk::{Met, Walk};
use sealblock_btrfs::{Filesystem, OpenOptions};
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_btrfs_format::key::objectid;
use sealblock_proofs_btrfs_images::changes::{grow, make_seed};
use sealblock_proofs_btrfs_images::content::ContentDigest;
use sealblock_proofs_btrfs_images::manifest::{Entry, Kind, Manifest, Time};
use sealblock_proofs_btrfs_images::programs::{Mount, mkfs, run};
use sealblock_proofs_btrfs_images::sets::{self, PROFILES};
use sealblock_proofs_btrfs_images::{has_mounts, skip};
use sealblock_stack::filesystem::{FilesystemName, Start};
use sealblock_stack::target::TargetName;
use sealblock_stack::{StackError, on_reactor};

/// Bytes of one read.
const STEP_BYTES: u64 = 1 << 20;

fn name(images: &[PathBuf]) -> FilesystemName {
    let targets = images.iter().map(|image| TargetName::File(image.clone())).collect();
    FilesystemName { targets, start: Start::Default, path: Vec::new(), has_place: false }
}

fn time(time: Timespec) -> Time {
    Time { seconds: time.seconds.get(), nanoseconds: time.nanoseconds.get() }
}

fn kind(kind: FileKind) -> Kind {
    match kind {
        FileKind::Regular => Kind::Regular,
        FileKind::Directory => Kind::Directory,
        FileKind::Symlink => Kind::Symlink,
        FileKind::CharDevice => Kind::CharDevice,
        FileKind::BlockDevice => Kind::BlockDevice,
        FileKind::Fifo => Kind::Fifo,
        FileKind::Socket => Kind::Socket,
    }
}

/// The folder that the kernel shows in place of a subvolume that is elsewhere.
fn empty_directory(uid: u32, gid: u32) -> Entry {
    Entry {
        kind: Kind::Directory,
        mode: 0o755,
        uid,
        gid,
        nlink: 1,
        size: 0,
        atime: Time::default(),
        mtime: Time::default(),
        ctime: Time::default(),
        device: (0, 0),
        target: None,
        content: None,
        xattrs: BTreeMap::new(),
        same_as: None,
    }
}

async fn digest(filesystem: &Filesystem, inode: &Inode) -> [u8; 32] {
    let (size, mut at) = (inode.size(), 0);
    let mut digest = ContentDigest::new(size);
    while at < size {
        let run = filesystem.next_data(inode, at, 64 << 20).await.unwrap();
        let (data, end) = run.map_or((size, size), |(data, end)| (data.min(size), end.min(size)));
        digest.zeroes(data - at);
        at = data;
        while at < end {
            let read = filesystem.read(inode, at, STEP_BYTES.min(end - at) as usize).await.unwrap();
            assert!(!read.is_empty(), "{at} of {size}");
            digest.bytes(&read);
            at += read.len() as u64;
        }
    }
    digest.finish().unwrap()
}

async fn entry(filesystem: &Filesystem, inode: &Inode) -> Entry {
    let item = &inode.item;
    let is_device = matches!(inode.kind, FileKind::CharDevice | FileKind::BlockDevice);
    // The kernel's own encoding: the minor number in the lower 20 bits, the major number above.
    let rdev = if is_device { item.rdev.get() } else { 0 };
    Entry {
        kind: kind(inode.kind),
        mode: item.mode.get() & 0o7777,
        uid: item.uid.get(),
        gid: item.gid.get(),
        nlink: item.nlink.get().into(),
        size: inode.size(),
        atime: time(item.atime),
        mtime: time(item.mtime),
        ctime: time(item.ctime),
        device: ((rdev >> 20) as u32, (rdev & 0xf_ffff) as u32),
        target: if inode.kind == FileKind::Symlink { Some(filesystem.read_link(inode).await.unwrap()) } else { None },
        content: if inode.kind == FileKind::Regular { Some(digest(filesystem, inode).await) } else { None },
        xattrs: filesystem.xattrs(inode).await.unwrap().into_iter().map(|one| (one.name, one.value)).collect(),
        same_as: None,
    }
}

/// The manifest of everything below a directory, as this project reads it.
async fn scan(filesystem: &Filesystem, top: Inode) -> Manifest {
    let (mut entries, mut names) = (BTreeMap::new(), HashMap::<_, Vec<Vec<u8>>>::new());
    let mut walk = Walk::new(filesystem, top, true);
    while let Some(visit) = walk.next().await {
        let shown = String::from_utf8_lossy(&visit.path).into_owned();
        let entry = match visit.met {
            Met::Inode(inode) => {
                if inode.kind != FileKind::Directory {
                    names.entry((inode.tree.id, inode.ino)).or_default().push(visit.path.clone());
                }
                entry(filesystem, &inode).await
            }
            Met::EmptyDirectory { uid, gid } => empty_directory(uid, gid),
            Met::Lost(error) => panic!("{shown}: {error}"),
            Met::BadName(error) => panic!("{shown}: {error}"),
        };
        entries.insert(visit.path, entry);
    }
    for names in names.values_mut() {
        names.sort_unstable();
        for name in &names[1..] {
            entries.get_mut(name).unwrap().same_as = Some(names[0].clone());
        }
    }
    Manifest { entries }
}

/// Reads a filesystem from its first subvolume, and from the default subvolume if that is another one.
fn read(images: &[PathBuf]) -> (Manifest, Manifest) {
    let scanned = on_reactor(async {
        name(images)
            .open(OpenOptions::default())
            .await?
            .close_after(async |open| {
                let filesystem = &open.filesystem;
                let first = filesystem.subvolume(objectid::FS_TREE).await.unwrap();
                let whole = scan(filesystem, filesystem.top(&first).await.unwrap()).await;
                let id = filesystem.default_subvolume().await.unwrap();
                let default = match id {
                    objectid::FS_TREE => whole.clone(),
                    id => {
                        let subvolume = filesystem.subvolume(id).await.unwrap();
                        scan(filesystem, filesystem.top(&subvolume).await.unwrap()).await
                    }
                };
                Ok::<_, StackError>((whole, default))
            })
            .await
    });
    scanned.unwrap_or_else(|error| panic!("{images:?}: {error}"))
}

/// Requires a report without damage, in which only data without checksums, a log tree and the trees of a balance are
/// unchecked.
fn assert_not_damaged(recipe: &str, images: &[PathBuf]) {
    let verified = on_reactor(async {
        let open = name(images).open(OpenOptions::default()).await?;
        open.close_after(async |open| Ok(verify(&open.filesystem, VerifyOptions::default(), &Unwatched).await.unwrap()))
            .await
    });
    let report = verified.unwrap_or_else(|error| panic!("{recipe}: {error}"));
    assert_eq!(report.damage_count, 0, "{recipe}: {}", report.findings[0]);
    let is_known =
        |why: &WhyUnchecked| matches!(why, WhyUnchecked::NoChecksum | WhyUnchecked::LogTree | WhyUnchecked::Relocation);
    assert!(report.unchecked.keys().all(is_known), "{recipe}: {:?}", report.unchecked);
}

/// A value that changes with any byte of an image.
fn fingerprint(image: &Path) -> u64 {
    let mut file = File::open(image).unwrap();
    let (mut buffer, mut all) = (vec![0; 1 << 20], 0_u64);
    loop {
        let length = file.read(&mut buffer).unwrap();
        if length == 0 {
            return all;
        }
        let sum = u64::from(sealblock_btrfs_format::checksum::raw_crc32c(!0, &buffer[..length]));
        all = all.rotate_left(7).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ sum;
    }
}

#[test]
fn this_project_reads_what_the_kernel_shows() {
    if let Err(why) = has_mounts() {
        return skip(&why);
    }
    let (mut made_count, mut paths) = (0, 0);
    for recipe in sets::chosen() {
        let folder = tempfile::tempdir().unwrap();
        let made = match recipe.make(folder.path()) {
            Ok(made) => made,
            Err(why) => {
                skip(&why);
                continue;
            }
        };
        made_count += 1;
        let before: Vec<u64> = made.images.iter().map(|image| fingerprint(image)).collect();
        let (whole, default) = read(&made.images);
        let differences = made.manifest.difference(&whole);
        assert!(differences.is_empty(), "{}: {differences:#?}", recipe.name);
        let differences = made.manifest.below(&made.default_path).difference(&default);
        assert!(differences.is_empty(), "{}: the default subvolume: {differences:#?}", recipe.name);
        assert_eq!(made.images.iter().map(|image| fingerprint(image)).collect::<Vec<_>>(), before, "{}", recipe.name);
        paths += whole.entries.len();
        assert_not_damaged(&recipe.name, &made.images);
        println!("{}: {} paths", recipe.name, whole.entries.len());
        if let Some((.., away)) = PROFILES.iter().find(|(data, ..)| *data == recipe.name) {
            read_without(&made.images, *away, &made.manifest);
        }
    }
    println!("{made_count} filesystems, {paths} paths");
    assert!(made_count > 0, "this machine mounts filesystems, and none was made");
}

/// Reads a filesystem with this number of devices missing, in all combinations.
fn read_without(images: &[PathBuf], away: usize, manifest: &Manifest) {
    for chosen in 0..1_usize << images.len() {
        if away == 0 || chosen.count_ones() as usize != images.len() - away {
            continue;
        }
        let left: Vec<PathBuf> = images
            .iter()
            .enumerate()
            .filter(|(number, _)| chosen >> number & 1 == 1)
            .map(|(_, image)| image.clone())
            .collect();
        let differences = manifest.difference(&read(&left).0);
        assert!(differences.is_empty(), "{left:?}: {differences:#?}");
    }
}

/// Two mirrored devices are mounted degraded and written, each alone, up to the same transaction. Each can be opened
/// alone, and both together are refused.
#[test]
fn devices_that_were_written_apart_are_refused_together() {
    if let Err(why) = has_mounts() {
        return skip(&why);
    }
    let folder = tempfile::tempdir().unwrap();
    let images = ["one", "two"].map(|name| folder.path().join(name));
    mkfs(&images, 256, &["-m", "raid1", "-d", "raid1"]).unwrap();
    let whole = Mount::new(&images, "noatime").unwrap();
    fs::write(whole.path("both"), b"of both").unwrap();
    whole.unmount().unwrap();
    assert_eq!(read(&images).0.entries.len(), 2);
    for image in &images {
        let alone = Mount::new(std::slice::from_ref(image), "degraded,noatime").unwrap();
        fs::write(alone.path("alone"), image.to_str().unwrap()).unwrap();
        alone.unmount().unwrap();
    }
    let generation = |image: &PathBuf| {
        let alone = name(std::slice::from_ref(image));
        let generation = on_reactor(async {
            let open = alone.open(OpenOptions::default()).await?;
            open.close_after(async |open| Ok(open.filesystem.superblock().generation.get())).await
        });
        generation.unwrap()
    };
    if generation(&images[0]) != generation(&images[1]) {
        return skip("the kernel made another number of transactions of each device");
    }
    for image in &images {
        assert_eq!(read(std::slice::from_ref(image)).0.entries.len(), 3);
    }
    let refused = on_reactor(async { name(&images).open(OpenOptions::default()).await.map(drop) }).unwrap_err();
    assert!(refused.to_string().contains("written apart from each other"), "{refused}");
}

/// A seed device can be read, and so can the device of another filesystem that was grown from it; both together are
/// refused, with the reason.
#[test]
fn a_seed_and_what_grew_from_it_are_refused_together() {
    if let Err(why) = has_mounts() {
        return skip(&why);
    }
    let folder = tempfile::tempdir().unwrap();
    let images = ["seed", "added"].map(|name| folder.path().join(name));
    mkfs(&images[..1], 256, &[]).unwrap();
    let mount = Mount::new(&images[..1], "noatime").unwrap();
    fs::write(mount.path("seed"), b"of the seed").unwrap();
    mount.unmount().unwrap();
    make_seed(&images[0]).unwrap();
    grow(&images[0], &images[1], 256).unwrap();
    assert_eq!(read(&images[..1]).0.entries.len(), 2);
    assert_eq!(read(&images[1..]).0.entries.len(), 3);
    let refused = on_reactor(async { name(&images).open(OpenOptions::default()).await.map(drop) }).unwrap_err();
    assert!(refused.to_string().contains("a seed and what grew from it are not read together"), "{refused}");
}

/// The nodes and items of all trees are those in the dump of the Btrfs program.
#[test]
fn trees_are_those_that_dump_tree_shows() {
    if let Err(why) = has_mounts() {
        return skip(&why);
    }
    for recipe in sets::standard().into_iter().filter(|recipe| recipe.devices == 1) {
        let folder = tempfile::tempdir().unwrap();
        let made = match recipe.make(folder.path()) {
            Ok(made) => made,
            Err(why) => {
                skip(&why);
                continue;
            }
        };
        let image = &made.images[0];
        let arguments = ["inspect-internal".as_ref(), "dump-tree".as_ref(), image.as_os_str()];
        let dumped = run("btrfs", arguments).unwrap();
        // The root tree does not have a log or the trees of a relocation.
        let theirs = heads_of_dump(&dumped);
        let ours = on_reactor(async {
            name(&made.images)
                .open(OpenOptions::default())
                .await?
                .close_after(async |open| Ok(heads(&open.filesystem).await))
                .await
        });
        let ours = ours.unwrap();
        assert!(ours.len() > 20, "{}", recipe.name);
        let missing: Vec<_> =
            theirs.iter().filter(|(head, count)| ours.get(*head).is_none_or(|ours| ours < count)).take(5).collect();
        let added: Vec<_> =
            ours.iter().filter(|(head, count)| theirs.get(*head).is_none_or(|theirs| theirs < count)).take(5).collect();
        assert!(
            missing.is_empty() && added.is_empty(),
            "{}: not read: {missing:?}; read alone: {added:?}",
            recipe.name
        );
    }
}

/// The address, count and size of each leaf and item, and how often it is visited, because trees share nodes.
type Heads = BTreeMap<String, usize>;

async fn heads(filesystem: &Filesystem) -> Heads {
    let mut heads = Heads::new();
    let mut put = |head: String| *heads.entry(head).or_default() += 1;
    let (trees, lost) = filesystem.trees().await;
    assert!(lost.is_empty(), "{lost:?}");
    for tree in trees {
        let mut pending = vec![tree.expected()];
        while let Some(expected) = pending.pop() {
            let node = filesystem.nodes().load(&expected).await.unwrap();
            let view = node.view();
            let header = view.header();
            let (bytenr, generation, level) = (header.bytenr, header.generation, header.level);
            if level > 0 {
                put(format!("node {bytenr} level {level} items {} generation {generation}", view.pointers().len()));
                pending.extend((0..view.pointers().len()).filter_map(|slot| node.child(slot, tree.id)));
                continue;
            }
            put(format!("leaf {bytenr} items {} generation {generation}", view.items().len()));
            for (slot, item) in view.items().iter().enumerate() {
                put(format!("{bytenr} item {slot} itemoff {} itemsize {}", item.offset, item.size));
            }
        }
    }
    heads
}

fn heads_of_dump(dump: &str) -> Heads {
    let (mut heads, mut leaf, mut is_log) = (Heads::new(), String::new(), false);
    let mut put = |head: String| *heads.entry(head).or_default() += 1;
    for line in dump.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            // The dump of a tree begins with its name.
            _ if !line.starts_with(['\t', ' ']) && words.contains(&"tree") => is_log = words[0] == "log",
            _ if is_log => {}
            ["leaf", bytenr, "items", items, "free", "space", _, "generation", generation, ..] => {
                leaf = bytenr.to_owned();
                put(format!("leaf {bytenr} items {items} generation {generation}"));
            }
            ["node", bytenr, "level", level, "items", items, "free", "space", _, "generation", generation, ..] => {
                put(format!("node {bytenr} level {level} items {items} generation {generation}"));
            }
            ["item", slot, "key", .., "itemoff", offset, "itemsize", size] => {
                put(format!("{leaf} item {slot} itemoff {offset} itemsize {size}"));
            }
            _ => {}
        }
    }
    heads
}
