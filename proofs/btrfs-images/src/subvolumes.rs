//! Subvolumes: nested ones, snapshots of them and of snapshots, read-only and received ones, a default one, a half
//! deleted one.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use rustix::fs::{Gid, Uid};

use crate::content::{noise, text};
use crate::inodes;
use crate::programs::{Mount, run};

/// The number of files in the deleted subvolume. Their inline data fill thousands of nodes.
const DROPPED_FILES: usize = 12_000;

fn plain<T>(result: std::io::Result<T>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}

/// Runs `btrfs subvolume` with these arguments.
fn subvolume(arguments: &[&str], paths: &[PathBuf]) -> Result<(), String> {
    let paths = paths.iter().map(|path| path.as_os_str());
    run("btrfs", ["subvolume"].iter().chain(arguments).map(OsStr::new).chain(paths)).map(drop)
}

/// Makes subvolumes and snapshots in a folder of a mounted filesystem.
///
/// # Errors
/// If a program fails.
pub fn fill(folder: &Path) -> Result<(), String> {
    plain(fs::create_dir_all(folder))?;
    let path = |name: &str| folder.join(name);
    subvolume(&["create"], &[path("outer")])?;
    subvolume(&["create"], &[path("outer/inner")])?;
    plain(fs::create_dir(path("outer/inner/dir")))?;
    subvolume(&["create"], &[path("outer/inner/dir/innermost")])?;
    for (name, content) in
        [("outer/file", text(70_000)), ("outer/inner/file", text(100)), ("outer/shared", noise(50_000, 1))]
    {
        plain(fs::write(path(name), content))?;
    }
    plain(fs::write(path("outer/inner/dir/innermost/file"), b"innermost"))?;
    plain(fs::hard_link(path("outer/file"), path("outer/linked")))?;
    // In the snapshot, an empty directory is in place of `inner`, with the owner of its parent.
    plain(rustix::fs::chown(path("outer"), Some(Uid::from_raw(1234)), Some(Gid::from_raw(5678))).map_err(Into::into))?;
    subvolume(&["snapshot"], &[path("outer"), path("snapshot")])?;
    subvolume(&["snapshot", "-r"], &[path("outer"), path("read-only")])?;
    subvolume(&["snapshot"], &[path("snapshot"), path("snapshot-of-snapshot")])?;
    change(&path("outer"))?;
    subvolume(&["snapshot", "-r"], &[path("outer"), path("read-only-later")])?;
    plain(fs::write(path("snapshot/only-here"), b"in the snapshot"))?;
    plain(fs::remove_file(path("snapshot-of-snapshot/shared")))?;
    // A snapshot inside its source, and one whose source is deleted.
    subvolume(&["snapshot"], &[path("outer"), path("outer/within")])?;
    subvolume(&["create"], &[path("source")])?;
    plain(fs::write(path("source/file"), text(30_000)))?;
    subvolume(&["snapshot"], &[path("source"), path("orphaned")])?;
    subvolume(&["delete"], &[path("source")])?;
    // A subvolume can be moved and renamed like a directory.
    subvolume(&["create"], &[path("before")])?;
    plain(fs::create_dir(path("elsewhere")))?;
    plain(fs::rename(path("before"), path("elsewhere/after")))?;
    plain(fs::write(path("elsewhere/after/file"), b"moved"))
}

/// Changes files of a subvolume after a snapshot of it was taken.
fn change(folder: &Path) -> Result<(), String> {
    let mut file = plain(OpenOptions::new().write(true).open(folder.join("file")))?;
    plain(file.write_all_at(&noise(5000, 2), 20_000))?;
    plain(file.write_all(b"front"))?;
    plain(fs::remove_file(folder.join("linked")))?;
    plain(fs::write(folder.join("later"), text(10)))
}

/// Sends a read-only snapshot and receives it in another folder; the copy records the UUID of the one that was sent.
///
/// # Errors
/// If a program fails.
pub fn send(from: &Path, into: &Path) -> Result<(), String> {
    let script = "btrfs send -q \"$1\" | btrfs receive -q \"$2\"";
    run("sh", ["-c".as_ref(), script.as_ref(), "sh".as_ref(), from.as_os_str(), into.as_os_str()]).map(drop)
}

/// Makes a subvolume other than the top one the default.
///
/// # Errors
/// If the program fails.
pub fn make_default(mount: &Mount, name: &str) -> Result<(), String> {
    let path = mount.path(name);
    let id = run("btrfs", ["inspect-internal".as_ref(), "rootid".as_ref(), path.as_os_str()])?;
    run("btrfs", ["subvolume".as_ref(), "set-default".as_ref(), id.as_ref(), mount.path("").as_os_str()]).map(drop)
}

/// Deletes a subvolume of an unmounted image, and unmounts while the kernel is still dropping its nodes.
///
/// The kernel does this in the background, as fast as it can, so it is tried several times with different waits, each
/// time with a new subvolume. Returns false if the kernel had always finished or not yet begun.
///
/// # Errors
/// If a program fails.
pub fn half_drop(images: &[PathBuf], tries: u32) -> Result<bool, String> {
    let name = |number: u32| format!("dropped-{number}");
    for number in 0..tries {
        let mount = Mount::new(images, "commit=300")?;
        subvolume(&["create"], &[mount.path(&name(number))])?;
        plain(inodes::many(&mount.path(&name(number)), DROPPED_FILES))?;
        mount.unmount()?;
        let mount = Mount::new(images, "commit=300")?;
        subvolume(&["delete", "--commit-after"], &[mount.path(&name(number))])?;
        // Syncing wakes the task that drops subvolumes, which saves its progress when it is interrupted.
        run("btrfs", ["filesystem".as_ref(), "sync".as_ref(), mount.path("").as_os_str()])?;
        sleep(Duration::from_millis(u64::from(number) * 3));
        mount.unmount()?;
        if is_half_dropped(&images[0])? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// True if the root of a deleted subvolume has the key at which the kernel continues to drop it.
///
/// # Errors
/// If the program fails.
pub fn is_half_dropped(image: &Path) -> Result<bool, String> {
    let command = ["inspect-internal", "dump-tree", "-t", "root"].map(OsStr::new);
    let roots = run("btrfs", command.into_iter().chain([image.as_os_str()]))?;
    Ok(roots.lines().any(|line| {
        let key = line.trim().strip_prefix("drop_progress key (");
        key.is_some_and(|key| !key.starts_with("0 "))
    }))
}
