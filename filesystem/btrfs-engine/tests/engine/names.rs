//! Random operations on names and inodes, compared with a model and with what the kernel shows.

use std::collections::{BTreeMap, HashMap};

use futures_executor::block_on;
use sealblock_btrfs_engine::engine::{Engine, EngineError, EngineOptions};
use sealblock_btrfs_engine::inode::{AttributeChanges, Ownership};
use sealblock_btrfs_engine::names::{NewFile, Place, RenameMode, Renamed, Unlinked};
use sealblock_btrfs_engine::plan::PlanError;
use sealblock_btrfs_engine::transaction::ChangeError;
use sealblock_btrfs_engine::xattrs::XattrMode;
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_btrfs_format::key::objectid;
use sealblock_proofs_btrfs_images::manifest::Manifest;
use sealblock_proofs_btrfs_images::programs::Mount;

use crate::disks::Disks;
use crate::scan::{TOP, assert_same, scan};
use crate::{assert_scrubbed, share};

const ROOT: u64 = objectid::FS_TREE;
const OWNER: Ownership = Ownership { uid: 1000, gid: 100, permissions: 0o640 };

fn time(seconds: i64) -> Timespec {
    Timespec { seconds: (1_700_000_000 + seconds).into(), nanoseconds: 5.into() }
}

/// What an inode must be.
#[derive(Default)]
struct File {
    is_directory: bool,
    nlink: u32,
    permissions: u32,
    size: u64,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// A subvolume that is changed at random, and what must be in it.
struct Load {
    random: fastrand::Rng,
    engine: Engine,
    files: HashMap<u64, File>,
    directories: Vec<u64>,
    /// Directory, name and inode of all names.
    names: Vec<(u64, Vec<u8>, u64)>,
    /// Inodes without names that are in use.
    open: Vec<u64>,
    now: i64,
}

impl Load {
    fn new(disks: &Disks, seed: u64) -> Load {
        let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
        let top = File { is_directory: true, nlink: 1, permissions: 0o755, ..File::default() };
        Load {
            random: fastrand::Rng::with_seed(seed),
            engine,
            files: HashMap::from([(TOP, top)]),
            directories: vec![TOP],
            names: Vec::new(),
            open: Vec::new(),
            now: 0,
        }
    }

    fn time(&mut self) -> Timespec {
        self.now += 1;
        time(self.now)
    }

    fn new_name(&mut self) -> (u64, Vec<u8>) {
        let directory = self.directories[self.random.usize(..self.directories.len())];
        let length = if self.random.u8(..20) == 0 { self.random.usize(1..200) } else { 1 };
        (directory, format!("{}-{}", self.random.u32(..), "n".repeat(length)).into_bytes())
    }

    fn added(&mut self, directory: u64, name: &[u8], ino: u64) {
        self.names.push((directory, name.to_vec(), ino));
        self.files.get_mut(&directory).unwrap().size += 2 * name.len() as u64;
    }

    fn removed(&mut self, index: usize) -> u64 {
        let (directory, name, ino) = self.names.swap_remove(index);
        self.files.get_mut(&directory).unwrap().size -= 2 * name.len() as u64;
        ino
    }

    fn lost(&mut self, unlinked: Unlinked) {
        let file = self.files.get_mut(&unlinked.ino).unwrap();
        file.nlink -= 1;
        assert_eq!(file.nlink == 0, unlinked.is_orphan);
        if file.nlink == 0 {
            self.files.remove(&unlinked.ino);
            self.directories.retain(|directory| *directory != unlinked.ino);
            self.open.push(unlinked.ino);
            if self.random.u8(..5) > 0 {
                self.release();
            }
        }
    }

    fn release(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let ino = self.open.swap_remove(self.random.usize(..self.open.len()));
        assert!(block_on(self.engine.release(ROOT, ino)).unwrap());
    }

    fn create(&mut self) {
        let (directory, name) = self.new_name();
        let now = self.time();
        let (file, size) = match self.random.u8(..40) {
            0..3 if self.directories.len() < 300 => (NewFile::Directory, 0),
            3 => (NewFile::Fifo, 0),
            4 => (NewFile::Socket, 0),
            5 => (NewFile::CharacterDevice(7 << 20 | 3), 0),
            6 => (NewFile::Symlink(b"a/target"), 8),
            _ => (NewFile::Regular, 0),
        };
        let place = Place { directory, name: &name };
        let ino = block_on(self.engine.create(ROOT, place, file, &OWNER, now)).unwrap();
        let is_directory = file == NewFile::Directory;
        if is_directory {
            self.directories.push(ino);
        }
        let new = File { is_directory, nlink: 1, permissions: OWNER.permissions, size, ..File::default() };
        assert!(self.files.insert(ino, new).is_none(), "an inode number is used again");
        self.added(directory, &name, ino);
        let again = block_on(self.engine.create(ROOT, place, file, &OWNER, now));
        assert_eq!(again.unwrap_err().errno(), libc::EEXIST);
    }

    fn link(&mut self, index: usize) {
        let ((directory, name), now) = (self.new_name(), self.time());
        let ino = self.names[index].2;
        let linked = block_on(self.engine.link(ROOT, ino, Place { directory, name: &name }, now));
        if self.files[&ino].is_directory {
            assert_eq!(linked.unwrap_err().errno(), libc::EPERM);
            return;
        }
        linked.unwrap();
        self.files.get_mut(&ino).unwrap().nlink += 1;
        self.added(directory, &name, ino);
    }

    fn remove(&mut self, index: usize) {
        let ((directory, name, ino), now) = (self.names[index].clone(), self.time());
        let place = Place { directory, name: &name };
        let is_directory = self.files[&ino].is_directory;
        let unlinked = match is_directory {
            true => block_on(self.engine.rmdir(ROOT, place, now)).map(|unlinked| unlinked.expect("no subvolume")),
            false => block_on(self.engine.unlink(ROOT, place, now)),
        };
        if is_directory && self.files[&ino].size > 0 {
            assert_eq!(unlinked.unwrap_err().errno(), libc::ENOTEMPTY);
            return;
        }
        self.removed(index);
        self.lost(unlinked.unwrap());
    }

    fn rename(&mut self, index: usize) {
        let ((directory, name, ino), now) = (self.names[index].clone(), self.time());
        let (other, mode) = match self.random.u8(..6) {
            0 => (Some(self.random.usize(..self.names.len())), RenameMode::Replace),
            1 => (Some(self.random.usize(..self.names.len())), RenameMode::Exchange),
            2 => (None, RenameMode::NoReplace),
            _ => (None, RenameMode::Replace),
        };
        let (to, new_name) = match other {
            Some(other) => (self.names[other].0, self.names[other].1.clone()),
            None => self.new_name(),
        };
        let (from, place) = (Place { directory, name: &name }, Place { directory: to, name: &new_name });
        match block_on(self.engine.rename((ROOT, from), (ROOT, place), mode, now)) {
            Ok(Renamed::Same) => assert_eq!(other.map(|other| self.names[other].2), Some(ino)),
            Ok(Renamed::Exchanged) => {
                let other = other.unwrap();
                let second = std::mem::replace(&mut self.names[other].2, ino);
                self.names[index].2 = second;
            }
            Ok(Renamed::Moved(unlinked)) => {
                let mut gone = vec![index];
                gone.extend(other);
                gone.sort_unstable();
                gone.into_iter().rev().for_each(|index| _ = self.removed(index));
                self.added(to, &new_name, ino);
                unlinked.into_iter().for_each(|unlinked| self.lost(unlinked));
            }
            Err(EngineError::Change(ChangeError::Plan(error))) => {
                let is_refusal = matches!(
                    error,
                    PlanError::NotADirectory | PlanError::IsADirectory | PlanError::NotEmpty | PlanError::BelowItself
                );
                assert!(is_refusal && self.files[&ino].is_directory | other.is_some(), "{error}");
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn change_inode(&mut self, index: usize) {
        let (ino, now) = (self.names[index].2, self.time());
        let name = format!("trusted.{}", self.random.u8(..4)).into_bytes();
        match self.random.u8(..4) {
            0 => {
                let permissions = self.random.u32(..0o1000);
                let changes = AttributeChanges { permissions: Some(permissions), ..AttributeChanges::default() };
                block_on(self.engine.set_attributes(ROOT, ino, &changes, now)).unwrap();
                self.files.get_mut(&ino).unwrap().permissions = permissions;
            }
            1 => {
                let removed = block_on(self.engine.remove_xattr(ROOT, ino, &name, now));
                let expected = self.files.get_mut(&ino).unwrap().xattrs.remove(&name);
                assert_eq!(removed.map_err(|error| error.errno()), expected.map(drop).ok_or(libc::ENODATA));
            }
            _ => {
                let value = vec![self.random.u8(..); self.random.usize(..300)];
                let attribute = (&name[..], &value[..]);
                block_on(self.engine.set_xattr(ROOT, ino, attribute, XattrMode::Set, now)).unwrap();
                self.files.get_mut(&ino).unwrap().xattrs.insert(name, value);
            }
        }
    }

    fn step(&mut self, grows: bool) {
        let index = if self.names.is_empty() { None } else { Some(self.random.usize(..self.names.len())) };
        let create = if grows { 55 } else { 25 };
        match (self.random.u8(..100), index) {
            (number, Some(index)) if number >= create => match self.random.u8(..20) {
                0..11 => self.remove(index),
                11..13 => self.link(index),
                13..16 => self.rename(index),
                16..19 => self.change_inode(index),
                _ => self.release(),
            },
            _ => self.create(),
        }
    }

    /// What the engine reads is what the model has.
    fn assert_model(&self) {
        let found = scan(&self.engine, ROOT);
        let mut paths: HashMap<u64, Vec<Vec<u8>>> = HashMap::from([(TOP, vec![Vec::new()])]);
        let mut by_directory: HashMap<u64, Vec<(&[u8], u64)>> = HashMap::new();
        for (directory, name, ino) in &self.names {
            by_directory.entry(*directory).or_default().push((name, *ino));
        }
        let mut pending = vec![(Vec::new(), TOP)];
        while let Some((path, directory)) = pending.pop() {
            for (name, ino) in by_directory.remove(&directory).unwrap_or_default() {
                let path = if path.is_empty() { name.to_vec() } else { [&path[..], b"/", name].concat() };
                paths.entry(ino).or_default().push(path.clone());
                pending.push((path, ino));
            }
        }
        assert_eq!(found.entries.len(), self.names.len() + 1);
        for (ino, file) in &self.files {
            for path in &paths[ino] {
                let entry = &found.entries[path];
                assert_eq!(entry.nlink, u64::from(file.nlink), "{}", path.escape_ascii());
                assert_eq!((entry.mode, entry.size), (file.permissions, file.size), "{}", path.escape_ascii());
                assert_eq!(entry.xattrs, file.xattrs, "{}", path.escape_ascii());
            }
        }
    }

    fn run(&mut self, disks: &Disks, steps: usize, checks: usize) {
        let (mut done, mut commits) = (0, 0);
        while done < steps {
            let some = self.random.usize(1..steps / 12).min(steps - done);
            let grows = done % (steps / 3 + 1) < steps / 5;
            (0..some).for_each(|_| self.step(grows));
            done += some;
            block_on(self.engine.commit()).unwrap();
            commits += 1;
            if commits % checks == 0 {
                disks.assert_consistent();
            }
        }
        disks.assert_consistent();
        self.assert_model();
    }
}

/// The kernel shows what the engine reads, and finds no error.
fn assert_kernel_agrees(disks: &Disks, engine: &Engine) {
    disks.assert_checked_by_program();
    let mount = Mount::new(&disks.images, "noatime").unwrap();
    assert_same(Manifest::scan(&mount.path("")).unwrap(), scan(engine, ROOT));
    assert_scrubbed(&mount);
    mount.unmount().unwrap();
}

#[test]
fn random_names_are_those_of_a_model_and_of_the_kernel() {
    for (devices, options, steps, checks) in [
        (1, &["-m", "single"][..], 100_000, 5),
        (1, &["-m", "dup", "-n", "4096"], 20_000, 1),
        (2, &["-m", "raid1"], 10_000, 2),
        (1, &["--mixed", "-n", "4096"], 10_000, 2),
        // Older programs do not know it.
        (1, &["-m", "single", "-O", "block-group-tree"], 10_000, 2),
    ] {
        let Some(disks) = Disks::make(devices, 256, options) else { continue };
        let begun = std::time::Instant::now();
        let mut load = Load::new(&disks, 1);
        load.run(&disks, share(steps), checks);
        eprintln!("{options:?}: {steps} operations in {:?}", begun.elapsed());
        assert_kernel_agrees(&disks, &load.engine);
        kernel_changes(&disks, &mut load);
        load.engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
        load.assert_model();
        load.run(&disks, share(steps) / 10, checks);
        assert_kernel_agrees(&disks, &load.engine);
        eprintln!("{options:?}: all in {:?}", begun.elapsed());
    }
}

/// The kernel changes the filesystem, and orphans of the last mount are deleted by it.
fn kernel_changes(disks: &Disks, load: &mut Load) {
    let mount = Mount::new(&disks.images, "noatime").unwrap();
    load.open.clear();
    for index in (0..load.names.len()).rev() {
        let (directory, name, ino) = load.names[index].clone();
        if directory == TOP && !load.files[&ino].is_directory && load.random.bool() {
            std::fs::remove_file(mount.path(std::str::from_utf8(&name).unwrap())).unwrap();
            load.removed(index);
            let file = load.files.get_mut(&ino).unwrap();
            file.nlink -= 1;
            if file.nlink == 0 {
                load.files.remove(&ino);
            }
        }
    }
    mount.unmount().unwrap();
    disks.load();
}

#[test]
fn a_full_filesystem_can_be_emptied_again_and_again() {
    for (mebibytes, options, sizes) in [
        (64, &["-m", "single"][..], [7000, 15_000]),
        (110, &["-m", "dup"], [7000, 15_000]),
        (24, &["--mixed", "-n", "4096"], [2500, 3700]),
    ] {
        let Some(disks) = Disks::make(1, mebibytes, options) else { continue };
        let begun = std::time::Instant::now();
        let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
        let mut random = fastrand::Rng::with_seed(7);
        let mut counts = Vec::new();
        for round in 0..share(20) {
            let mut names: Vec<(Vec<u8>, u64)> = Vec::new();
            let value = vec![7; sizes[round % 2]];
            loop {
                let name = format!("{}-{}", names.len(), "x".repeat(random.usize(..120))).into_bytes();
                let place = Place { directory: TOP, name: &name };
                let created = block_on(engine.create(ROOT, place, NewFile::Regular, &OWNER, time(1)));
                let full = |error: &EngineError| assert_eq!(error.errno(), libc::ENOSPC, "{error}");
                let Ok(ino) = created.inspect_err(full) else { break };
                names.push((name, ino));
                let attribute = (&b"user.a"[..], &value[..]);
                let set = block_on(engine.set_xattr(ROOT, ino, attribute, XattrMode::Create, time(2)));
                if set.inspect_err(full).is_err() {
                    break;
                }
            }
            counts.push(names.len());
            block_on(engine.commit()).unwrap();
            disks.assert_consistent();
            random.shuffle(&mut names);
            for (index, (name, ino)) in names.iter().enumerate() {
                let place = Place { directory: TOP, name };
                assert!(block_on(engine.unlink(ROOT, place, time(3))).unwrap().is_orphan);
                block_on(engine.release(ROOT, *ino)).unwrap();
                if index % (names.len() / 2 + 1) == 7 {
                    block_on(engine.commit()).unwrap();
                    disks.assert_consistent();
                }
            }
            block_on(engine.commit()).unwrap();
            disks.assert_consistent();
        }
        eprintln!("{options:?}: {counts:?} files in {:?}", begun.elapsed());
        disks.assert_checked_by_program();
    }
}
