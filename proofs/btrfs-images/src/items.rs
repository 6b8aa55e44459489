//! Filesystems with every type of item: the kernel creates them through a mount, and `mkfs.btrfs --rootdir` creates a
//! part of them from a folder. Compressed files begin with [`text`], so that a proof knows the content of an extent.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;

use rustix::fs::{FallocateFlags, XattrFlags, fallocate, ioctl_ficlone, setxattr};

use crate::content::text;
use crate::inodes::colliding;
use crate::programs::{Mount, run};
use crate::subvolumes::send;

/// Fills a folder with content for any filesystem: small and large files, holes, links, attributes, special names.
///
/// # Errors
/// If something cannot be made.
pub fn fill_folder(folder: &Path) -> io::Result<()> {
    for bytes in [0, 1, 100, 2048, 2049, 4096, 70_000, 1 << 20] {
        fs::write(folder.join(format!("file-{bytes}")), text(bytes))?;
    }
    fs::create_dir_all(folder.join("deep/er/still"))?;
    fs::write(folder.join("deep/er/still/file"), b"deep")?;
    fs::write(folder.join("n".repeat(255)), b"long name")?;
    symlink("deep/er", folder.join("link"))?;
    fs::hard_link(folder.join("file-100"), folder.join("deep/file-100"))?;
    let mut sparse = File::create(folder.join("sparse"))?;
    sparse.seek(SeekFrom::Start(1 << 20))?;
    sparse.write_all(b"behind a hole")?;
    for (name, value) in [("user.small", &b"value"[..]), ("user.large", &[b'v'; 3000])] {
        // The filesystem of the temporary folder may not support attributes.
        let _ = setxattr(folder.join("file-100"), name, value, XattrFlags::empty());
    }
    Ok(())
}

/// Fills a mount with content that creates all other items. An inode without a name exists while the returned file is
/// open, and the last writes are in a log tree.
///
/// # Errors
/// If something cannot be made.
pub fn fill_mount(mount: &Mount) -> Result<File, String> {
    let plain = |result: io::Result<()>| result.map_err(|error| error.to_string());
    plain(fill_folder(&mount.path("")))?;
    plain(files(mount))?;
    mount.sync()?;
    plain((0..400).step_by(2).try_for_each(|number| fs::remove_file(mount.path(&format!("pieces/{number}")))))?;
    subvolumes(mount)?;
    reflinks(mount)?;
    send(&mount.path("readonly"), &mount.path("deep"))?;
    plain(collisions(mount))?;
    let nameless = nameless(mount).map_err(|error| error.to_string())?;
    mount.sync()?;
    plain(synced(mount))?;
    Ok(nameless)
}

fn files(mount: &Mount) -> io::Result<()> {
    for compression in ["zlib", "lzo", "zstd"] {
        let folder = mount.path(&format!("by-{compression}"));
        fs::create_dir(&folder)?;
        setxattr(&folder, "btrfs.compression", compression.as_bytes(), XattrFlags::empty())?;
        // The first is small enough to be stored inline and compressed.
        for bytes in [3000, 50_000, 400_001] {
            fs::write(folder.join(format!("file-{bytes}")), text(bytes))?;
        }
    }
    let prealloc = File::create(mount.path("prealloc"))?;
    fallocate(&prealloc, FallocateFlags::empty(), 0, 1 << 20)?;
    prealloc.write_all_at(&text(8192), 64 << 10)?;

    fs::write(mount.path("linked"), text(5000))?;
    for number in 0..300 {
        fs::hard_link(mount.path("linked"), mount.path(&format!("{number:0>200}")))?;
    }
    // Large enough for a block group that has a space cache of version 1.
    fs::write(mount.path("large"), vec![7; 12 << 20])?;
    // Every second one of many small extents is removed, so that free space is fragmented.
    fs::create_dir(mount.path("pieces"))?;
    (0..400).try_for_each(|number| fs::write(mount.path(&format!("pieces/{number}")), text(4096)))
}

fn subvolumes(mount: &Mount) -> Result<(), String> {
    let btrfs = |arguments: &[&str], names: &[&str]| {
        let names = names.iter().map(|name| mount.path(name).into_os_string());
        run("btrfs", ["subvolume"].iter().chain(arguments).map(Into::into).chain(names)).map(drop)
    };
    btrfs(&["create"], &["sub"])?;
    let filled = fill_folder(&mount.path("sub"));
    filled.map_err(|error| error.to_string())?;
    btrfs(&["snapshot"], &["sub", "snapshot"])?;
    btrfs(&["snapshot", "-r"], &["sub", "readonly"])?;
    let changed = fs::write(mount.path("sub/file-2049"), b"another content than the snapshots have")
        .and_then(|()| OpenOptions::new().write(true).open(mount.path("sub/file-1048576")))
        .and_then(|file| file.write_all_at(b"in the middle", 500_000));
    changed.map_err(|error| error.to_string())?;
    (0..30).try_for_each(|number| btrfs(&["snapshot"], &["sub", &format!("snapshot-{number}")]))?;
    btrfs(&["delete", "--commit-after"], &["snapshot-7"])
}

/// One extent with more references than fit in its item.
fn reflinks(mount: &Mount) -> Result<(), String> {
    let copy = || {
        fs::write(mount.path("source"), text(16_384))?;
        let source = File::open(mount.path("source"))?;
        (0..150).try_for_each(|number| {
            let copy = File::create(mount.path(&format!("copy-{number}")))?;
            Ok(ioctl_ficlone(copy, &source)?)
        })
    };
    copy().map_err(|error: io::Error| error.to_string())?;
    let (all, copy) = (mount.path(""), mount.path("all"));
    run("btrfs", ["subvolume".as_ref(), "snapshot".as_ref(), all.as_os_str(), copy.as_os_str()]).map(drop)
}

fn collisions(mount: &Mount) -> io::Result<()> {
    for name in colliding("") {
        fs::write(mount.path(&name), name.as_bytes())?;
    }
    for name in colliding("user.") {
        setxattr(mount.path("linked"), name, b"value", XattrFlags::empty())?;
    }
    Ok(())
}

fn nameless(mount: &Mount) -> io::Result<File> {
    let path = mount.path("nameless");
    fs::write(&path, text(10_000))?;
    let nameless = File::open(&path)?;
    fs::remove_file(&path)?;
    Ok(nameless)
}

/// A file and its directory that are only in the log.
fn synced(mount: &Mount) -> io::Result<()> {
    fs::write(mount.path("synced"), text(9000))?;
    File::open(mount.path("synced"))?.sync_all()?;
    File::open(mount.path(""))?.sync_all()
}
