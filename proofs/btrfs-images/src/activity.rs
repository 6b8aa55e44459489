//! Random activity on a mounted filesystem, the same for the same seed: files and directories are created, written at
//! random places, cut, punched, allocated, renamed, linked, removed, shared; attributes are set and removed; snapshots
//! taken and deleted.
//!
//! Operations depend on the seed and on earlier operations, never on time, so a failure repeats with its seed. If the
//! filesystem refuses an operation, such as sharing extents between files with and without checksums, this is not a
//! failure.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use fastrand::Rng;
use rustix::fs::{FallocateFlags, IFlags, XattrFlags, copy_file_range, fallocate, ioctl_getflags, ioctl_setflags};

use crate::content::{noise, text};
use crate::programs::run;

/// The maximum offset of a write.
const MAX_OFFSET: u64 = 2 << 20;
/// The maximum bytes of a write.
const MAX_WRITE: usize = 200_000;
/// The maximum number of snapshots.
const MAX_SNAPSHOTS: usize = 4;

/// The weight of each operation.
const OPERATIONS: [(u32, Operation); 15] = [
    (12, Activity::create),
    (30, Activity::write),
    (8, Activity::truncate),
    (8, Activity::punch),
    (8, Activity::allocate),
    (8, Activity::rename),
    (6, Activity::link),
    (8, Activity::unlink),
    (8, Activity::share),
    (8, Activity::xattr),
    (3, Activity::directory),
    (3, Activity::symlink),
    (3, Activity::mode),
    (1, Activity::snapshot),
    (2, Activity::sync),
];

type Operation = fn(&mut Activity) -> io::Result<()>;

/// The existing files, and the random state.
struct Activity {
    rng: Rng,
    root: PathBuf,
    /// Paths of regular files.
    files: Vec<PathBuf>,
    directories: Vec<PathBuf>,
    snapshots: Vec<PathBuf>,
    /// A counter for names, which are reused only by renaming.
    next_name: u64,
}

/// Runs this number of operations in a new subvolume of the folder. Returns the number of operations that the
/// filesystem refused.
///
/// # Errors
/// If the subvolume cannot be made.
pub fn run_activity(folder: &Path, seed: u64, operations: u32) -> Result<u32, String> {
    println!("activity of {operations} operations with seed {seed}");
    let root = folder.join("active");
    run("btrfs", ["subvolume".as_ref(), "create".as_ref(), root.as_os_str()])?;
    let rng = Rng::with_seed(seed);
    let directories = vec![root.clone()];
    let mut activity = Activity { rng, root, files: Vec::new(), directories, snapshots: Vec::new(), next_name: 0 };
    let all: u32 = OPERATIONS.iter().map(|(weight, _)| weight).sum();
    let mut refused = 0;
    for _ in 0..operations {
        let mut number = activity.rng.u32(..all);
        let chosen = OPERATIONS.iter().find(|(weight, _)| {
            let is_here = number < *weight;
            number = number.saturating_sub(*weight);
            is_here
        });
        if let Some((_, operation)) = chosen {
            refused += u32::from(operation(&mut activity).is_err());
        }
    }
    Ok(refused)
}

/// Rounds of the stress program, each followed by a snapshot.
const ROUNDS: u64 = 3;
/// Operations of each of the program's two processes in a round.
const STRESS_OPERATIONS: &str = "400";

/// Runs a program (`fsstress`) in a new subvolume of the folder, and takes a snapshot after each round. One of the
/// first snapshots is deleted later.
///
/// # Errors
/// The program cannot be started or fails, or a snapshot cannot be taken.
pub fn run_stress(program: &Path, folder: &Path, seed: u64) -> Result<(), String> {
    println!("{} with seed {seed}", program.display());
    let root = folder.join("stressed");
    let btrfs = |arguments: &[&OsStr]| run("btrfs", [OsStr::new("subvolume")].iter().chain(arguments)).map(drop);
    btrfs(&["create".as_ref(), root.as_os_str()])?;
    let program = program.to_str().ok_or("the path of the program is not UTF-8")?;
    for round in 0..ROUNDS {
        let seed = (seed * ROUNDS + round).to_string();
        let words = ["-n", STRESS_OPERATIONS, "-p", "2", "-s", &seed, "-d"].map(OsStr::new);
        run(program, words.into_iter().chain([root.as_os_str()]))?;
        let snapshot = folder.join(format!("snapshot-{round}"));
        btrfs(&["snapshot".as_ref(), root.as_os_str(), snapshot.as_os_str()])?;
    }
    btrfs(&["delete".as_ref(), folder.join("snapshot-0").as_os_str()])
}

impl Activity {
    fn new_path(&mut self) -> PathBuf {
        self.next_name += 1;
        let number = self.rng.usize(..self.directories.len());
        let padding = if self.rng.u32(..10) == 0 { self.rng.usize(..200) } else { 0 };
        self.directories[number].join(format!("{}{}", self.next_name, "-".repeat(padding)))
    }

    /// A random file; an error if there are none.
    fn any_file(&mut self) -> io::Result<PathBuf> {
        if self.files.is_empty() {
            return Err(io::Error::other("no file yet"));
        }
        let number = self.rng.usize(..self.files.len());
        Ok(self.files[number].clone())
    }

    fn open_any(&mut self) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).open(self.any_file()?)
    }

    /// Bytes that compress well, or not at all.
    fn content(&mut self) -> Vec<u8> {
        let bytes = if self.rng.bool() { self.rng.usize(..MAX_WRITE) } else { self.rng.usize(..5000) };
        if self.rng.bool() { text(bytes) } else { noise(bytes, self.rng.u64(..)) }
    }

    fn offset(&mut self) -> u64 {
        let offset = self.rng.u64(..MAX_OFFSET);
        if self.rng.bool() { offset / 4096 * 4096 } else { offset }
    }

    fn create(&mut self) -> io::Result<()> {
        let path = self.new_path();
        let file = File::create_new(&path)?;
        self.files.push(path);
        if self.rng.u32(..10) == 0 {
            ioctl_setflags(&file, ioctl_getflags(&file)? | IFlags::NOCOW)?;
        }
        if self.rng.bool() {
            let content = self.content();
            file.write_all_at(&content, 0)?;
        }
        Ok(())
    }

    fn write(&mut self) -> io::Result<()> {
        let file = self.open_any()?;
        let (content, offset) = (self.content(), self.offset());
        file.write_all_at(&content, offset)?;
        if self.rng.u32(..4) == 0 { file.sync_data() } else { Ok(()) }
    }

    fn truncate(&mut self) -> io::Result<()> {
        let size = self.offset();
        self.open_any()?.set_len(size)
    }

    fn punch(&mut self) -> io::Result<()> {
        let flags = [FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, FallocateFlags::ZERO_RANGE];
        let (file, offset, bytes) = (self.open_any()?, self.offset(), self.offset().max(1));
        Ok(fallocate(file, flags[usize::from(self.rng.bool())], offset, bytes)?)
    }

    fn allocate(&mut self) -> io::Result<()> {
        let flags = [FallocateFlags::empty(), FallocateFlags::KEEP_SIZE];
        let (file, offset, bytes) = (self.open_any()?, self.offset(), self.offset().max(1));
        Ok(fallocate(file, flags[usize::from(self.rng.bool())], offset, bytes)?)
    }

    fn rename(&mut self) -> io::Result<()> {
        let from = self.any_file()?;
        // Renames over an existing file or to a new name.
        let to = if self.rng.u32(..4) == 0 { self.any_file()? } else { self.new_path() };
        fs::rename(&from, &to)?;
        // If both names are of one inode, the rename does nothing, and both stay.
        self.files.retain(|file| *file != to && (*file != from || from.exists()));
        self.files.push(to);
        Ok(())
    }

    fn link(&mut self) -> io::Result<()> {
        let (file, path) = (self.any_file()?, self.new_path());
        fs::hard_link(file, &path)?;
        self.files.push(path);
        Ok(())
    }

    fn unlink(&mut self) -> io::Result<()> {
        let file = self.any_file()?;
        fs::remove_file(&file)?;
        self.files.retain(|one| *one != file);
        Ok(())
    }

    fn share(&mut self) -> io::Result<()> {
        let (from, to) = (self.open_any()?, self.open_any()?);
        let (mut from_offset, mut to_offset) = (self.offset() / 4096 * 4096, self.offset() / 4096 * 4096);
        let bytes = (1 + self.rng.usize(..60)) * 4096;
        copy_file_range(&from, Some(&mut from_offset), &to, Some(&mut to_offset), bytes)?;
        Ok(())
    }

    fn xattr(&mut self) -> io::Result<()> {
        let file = self.any_file()?;
        let name = format!("user.{}", self.rng.u32(..8));
        if self.rng.u32(..4) == 0 {
            return Ok(rustix::fs::removexattr(file, name)?);
        }
        let value = noise(self.rng.usize(..1500), self.rng.u64(..));
        Ok(rustix::fs::setxattr(file, name, &value, XattrFlags::empty())?)
    }

    fn directory(&mut self) -> io::Result<()> {
        let path = self.new_path();
        // Keeps paths below the system's limit.
        if path.as_os_str().len() > 1500 {
            return Ok(());
        }
        fs::create_dir(&path)?;
        self.directories.push(path);
        Ok(())
    }

    fn symlink(&mut self) -> io::Result<()> {
        let target = "t".repeat(1 + self.rng.usize(..300));
        symlink(target, self.new_path())
    }

    fn mode(&mut self) -> io::Result<()> {
        let (file, mode) = (self.any_file()?, self.rng.u32(..0o10000));
        fs::set_permissions(file, fs::Permissions::from_mode(mode))
    }

    fn snapshot(&mut self) -> io::Result<()> {
        let subvolume = |arguments: &[&OsStr]| {
            let arguments = [OsStr::new("subvolume")].into_iter().chain(arguments.iter().copied());
            run("btrfs", arguments).map_err(io::Error::other)
        };
        if self.snapshots.len() == MAX_SNAPSHOTS {
            let oldest = self.snapshots.remove(self.rng.usize(..MAX_SNAPSHOTS));
            return subvolume(&["delete".as_ref(), oldest.as_os_str()]).map(drop);
        }
        self.next_name += 1;
        let path = self.root.with_file_name(format!("snapshot-{}", self.next_name));
        subvolume(&["snapshot".as_ref(), self.root.as_os_str(), path.as_os_str()])?;
        self.snapshots.push(path);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        if self.rng.bool() {
            return self.open_any()?.sync_all();
        }
        run("sync", ["-f".as_ref(), self.root.as_os_str()]).map(drop).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the operations twice on a filesystem without sharing and snapshots, which it refuses; both runs give the
    /// same paths.
    fn paths(seed: u64) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_owned();
        let (rng, directories) = (Rng::with_seed(seed), vec![root.clone()]);
        let mut activity = Activity { rng, root, files: Vec::new(), directories, snapshots: Vec::new(), next_name: 0 };
        let plain = [Activity::create, Activity::write, Activity::rename, Activity::link, Activity::directory];
        for step in 0..100 {
            let _ = plain[step % plain.len()](&mut activity);
        }
        activity.files.sort();
        let names = activity.files.iter().map(|path| path.strip_prefix(folder.path()).unwrap().display().to_string());
        names.collect()
    }

    #[test]
    fn a_seed_decides_everything() {
        assert_eq!(paths(1), paths(1));
        assert_ne!(paths(1), paths(2));
        assert!(paths(1).len() > 10);
    }
}
