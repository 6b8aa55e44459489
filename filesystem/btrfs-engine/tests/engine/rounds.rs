//! The engine and the kernel change a filesystem in turns: names, data, snapshots, files that share extents, a full
//! filesystem; and the kernel balances it, replaces devices and scrubs. A model knows every file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::rc::Rc;

use futures_executor::block_on;
use sealblock_btrfs_engine::data::FilePlace;
use sealblock_btrfs_engine::engine::{Engine, EngineError, EngineOptions};
use sealblock_btrfs_engine::inode::Ownership;
use sealblock_btrfs_engine::names::{NewFile, Place, RenameMode};
use sealblock_btrfs_engine::operations::{NewSnapshot, Resolved, SubvolumePlace};
use sealblock_btrfs_engine::xattrs::XattrMode;
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::items::chunk::Profile;
use sealblock_btrfs_format::items::directory::FileType;
use sealblock_btrfs_format::items::inode::InodeFlags;
use sealblock_proofs_btrfs_images::programs::{Loops, Mount, run, sparse};
use sealblock_runtime_memory::Slice;

use crate::disks::Disks;
use crate::files::{Kind, ROOT};
use crate::recovered::drop_all;
use crate::rounds_model::{Full, Item, Model, Paths, Side};
use crate::workload::time;
use crate::{assert_scrubbed, share};

const STEPS: usize = 45;
const OWNER: Ownership = Ownership { uid: 0, gid: 0, permissions: 0o755 };

/// The engine.
struct Ours<'a>(&'a Engine);

fn full<T>(result: Result<T, EngineError>) -> Result<T, Full> {
    result.map_err(|error| {
        assert_eq!(error.errno(), libc::ENOSPC, "{error}");
        Full
    })
}

impl Ours<'_> {
    /// The subvolume and the inode of a path.
    fn at(&self, path: &str) -> (u64, u64) {
        let (mut root, mut ino) = (ROOT, 256);
        for name in path.split('/').filter(|name| !name.is_empty()) {
            let place = Place { directory: ino, name: name.as_bytes() };
            let found = block_on(self.0.lookup(root, place)).unwrap().unwrap_or_else(|| panic!("{path} is missing"));
            (root, ino) = match found.target {
                Resolved::Inode(ino) => (root, ino),
                Resolved::Subvolume(id) => (id, 256),
                Resolved::Elsewhere(id) => panic!("{path}: subvolume {id} is elsewhere"),
            };
        }
        (root, ino)
    }

    fn place<'p>(&self, path: &'p str) -> (u64, Place<'p>) {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        let (root, directory) = self.at(folder);
        (root, Place { directory, name: name.as_bytes() })
    }

    fn add(&self, path: &str, file: NewFile<'_>) -> Result<u64, Full> {
        let (root, place) = self.place(path);
        full(block_on(self.0.create(root, place, file, &OWNER, time())))
    }

    fn add_paths(&self, folder: &str, (root, ino): (u64, u64), paths: &mut Paths) {
        let until = block_on(self.0.last_index(root, ino)).unwrap();
        let mut after = 0;
        loop {
            let some = block_on(self.0.read_directory(root, ino, (after, until), 20)).unwrap();
            let Some(last) = some.last() else { return };
            after = last.index;
            for entry in some {
                let name = String::from_utf8(entry.name.clone()).unwrap();
                let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
                let place = Place { directory: ino, name: &entry.name };
                let found = block_on(self.0.lookup(root, place)).unwrap().unwrap();
                let item = match (found.target, found.kind) {
                    (Resolved::Inode(ino), FileType::Regular) => Item::File(Rc::new(self.read(root, ino))),
                    (Resolved::Inode(ino), FileType::Symlink) => {
                        Item::Symlink(String::from_utf8(block_on(self.0.read_link(root, ino)).unwrap()).unwrap())
                    }
                    (Resolved::Inode(ino), _) => {
                        self.add_paths(&path, (root, ino), paths);
                        Item::Directory
                    }
                    (Resolved::Subvolume(id), _) => {
                        self.add_paths(&path, (id, 256), paths);
                        Item::Directory
                    }
                    (Resolved::Elsewhere(_), _) => Item::Directory,
                };
                paths.insert(path, item);
            }
        }
    }

    fn read(&self, root: u64, ino: u64) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let data = block_on(self.0.read(root, ino, all.len() as u64, 4 << 20)).unwrap();
            if data.is_empty() {
                return all;
            }
            all.extend_from_slice(&data);
        }
    }
}

impl Side for Ours<'_> {
    fn create(&mut self, path: &str, kind: Kind) -> Result<(), Full> {
        let ino = self.add(path, NewFile::Regular)?;
        let root = self.place(path).0;
        let changed = match kind {
            Kind::NoCow => block_on(self.0.set_flags(root, ino, InodeFlags::NODATACOW, time())).map(drop),
            Kind::Compressed(value) => {
                let attribute = (&b"btrfs.compression"[..], value.as_bytes());
                block_on(self.0.set_xattr(root, ino, attribute, XattrMode::Set, time()))
            }
            _ => Ok(()),
        };
        full(changed).inspect_err(|_| self.unlink(path))
    }

    fn mkdir(&mut self, path: &str) -> Result<(), Full> {
        self.add(path, NewFile::Directory).map(drop)
    }

    fn symlink(&mut self, path: &str, target: &str) -> Result<(), Full> {
        self.add(path, NewFile::Symlink(target.as_bytes())).map(drop)
    }

    fn rename(&mut self, from: &str, to: &str) -> Result<(), Full> {
        full(block_on(self.0.rename(self.place(from), self.place(to), RenameMode::NoReplace, time()))).map(drop)
    }

    fn unlink(&mut self, path: &str) {
        let (root, place) = self.place(path);
        let unlinked = block_on(self.0.unlink(root, place, time())).unwrap();
        assert!(block_on(self.0.release(root, unlinked.ino)).unwrap());
    }

    fn write(&mut self, path: &str, at: u64, data: &[u8]) -> Result<(), Full> {
        let (root, ino) = self.at(path);
        let written = full(block_on(self.0.write(root, ino, at, Slice::copy_from(data))))?;
        if written == data.len() as u64 { Ok(()) } else { Err(Full) }
    }

    fn truncate(&mut self, path: &str, size: u64) -> Result<(), Full> {
        let (root, ino) = self.at(path);
        full(block_on(self.0.truncate(root, ino, size)))
    }

    fn punch(&mut self, path: &str, (at, bytes): (u64, u64)) -> Result<(), Full> {
        let (root, ino) = self.at(path);
        full(block_on(self.0.punch(root, ino, at, bytes)))
    }

    fn allocate(&mut self, path: &str, range: (u64, u64)) -> Result<(), Full> {
        let (root, ino) = self.at(path);
        full(block_on(self.0.allocate_range(root, ino, range, true)))
    }

    fn clone(&mut self, from: &str, to: &str, kind: Kind) -> Result<(), Full> {
        self.create(to, kind)?;
        let [from, place] = [from, to].map(|path| self.at(path)).map(|(root, ino)| FilePlace { root, ino, offset: 0 });
        full(block_on(self.0.clone_range(from, place, 0))).inspect_err(|_| self.unlink(to))
    }

    fn snapshot(&mut self, source: &str, name: &str, is_read_only: bool) -> Result<(), Full> {
        let uuid = (u128::from(fastrand::u64(1..)) << 64).to_le_bytes();
        let new = NewSnapshot { source: self.at(source).0, uuid, is_read_only };
        let (root, place) = self.place(name);
        full(block_on(self.0.create_snapshot(new, SubvolumePlace { root, place }, time()))).map(drop)
    }

    fn delete_subvolume(&mut self, name: &str) {
        let (root, place) = self.place(name);
        let id = block_on(self.0.delete_subvolume(SubvolumePlace { root, place }, time())).unwrap();
        // The kernel drops some of them.
        if id.is_multiple_of(2) {
            drop_all(self.0, id);
        }
    }

    fn content(&mut self, path: &str) -> Vec<u8> {
        let (root, ino) = self.at(path);
        self.read(root, ino)
    }

    fn is_doubtful_when_full(&self) -> bool {
        false
    }

    fn paths(&mut self) -> Paths {
        let mut paths = Paths::new();
        self.add_paths("", (ROOT, 256), &mut paths);
        paths
    }
}

/// The kernel.
struct Kernel<'a>(&'a Mount);

fn full_io<T>(result: std::io::Result<T>) -> Result<T, Full> {
    result.map_err(|error| {
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{error}");
        Full
    })
}

fn full_program(result: Result<String, String>) -> Result<(), Full> {
    result.map(drop).map_err(|error| {
        assert!(error.contains("No space left"), "{error}");
        Full
    })
}

impl Kernel<'_> {
    fn path(&self, path: &str) -> String {
        self.0.path(path).to_str().unwrap().to_owned()
    }

    fn add_paths(&self, folder: &str, paths: &mut Paths) {
        for entry in std::fs::read_dir(self.0.path(folder)).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
            let kind = entry.file_type().unwrap();
            let item = if kind.is_dir() {
                self.add_paths(&path, paths);
                Item::Directory
            } else if kind.is_symlink() {
                Item::Symlink(std::fs::read_link(entry.path()).unwrap().to_str().unwrap().to_owned())
            } else {
                Item::File(Rc::new(std::fs::read(entry.path()).unwrap()))
            };
            paths.insert(path, item);
        }
    }

    fn fallocate(&self, options: &[&str], path: &str, (at, bytes): (u64, u64)) -> Result<(), Full> {
        let (at, bytes, path) = (at.to_string(), bytes.to_string(), self.path(path));
        full_program(run("fallocate", options.iter().copied().chain(["-n", "-o", &at, "-l", &bytes, &path])))
    }
}

impl Side for Kernel<'_> {
    fn create(&mut self, path: &str, kind: Kind) -> Result<(), Full> {
        full_io(File::create_new(self.0.path(path)))?;
        match kind {
            Kind::NoCow => full_program(run("chattr", ["+C", &self.path(path)])),
            Kind::Compressed(value) => {
                full_program(run("btrfs", ["property", "set", &self.path(path), "compression", value]))
            }
            _ => Ok(()),
        }
        .inspect_err(|_| self.unlink(path))
    }

    fn mkdir(&mut self, path: &str) -> Result<(), Full> {
        full_io(std::fs::create_dir(self.0.path(path)))
    }

    fn symlink(&mut self, path: &str, target: &str) -> Result<(), Full> {
        full_io(std::os::unix::fs::symlink(target, self.0.path(path)))
    }

    fn rename(&mut self, from: &str, to: &str) -> Result<(), Full> {
        full_io(std::fs::rename(self.0.path(from), self.0.path(to)))
    }

    fn unlink(&mut self, path: &str) {
        std::fs::remove_file(self.0.path(path)).unwrap();
    }

    fn write(&mut self, path: &str, at: u64, data: &[u8]) -> Result<(), Full> {
        let file = File::options().write(true).open(self.0.path(path)).unwrap();
        full_io(file.write_all_at(data, at))
    }

    fn truncate(&mut self, path: &str, size: u64) -> Result<(), Full> {
        let file = File::options().write(true).open(self.0.path(path)).unwrap();
        full_io(file.set_len(size))
    }

    fn punch(&mut self, path: &str, range: (u64, u64)) -> Result<(), Full> {
        self.fallocate(&["-p"], path, range)
    }

    fn allocate(&mut self, path: &str, range: (u64, u64)) -> Result<(), Full> {
        self.fallocate(&[], path, range)
    }

    fn clone(&mut self, from: &str, to: &str, kind: Kind) -> Result<(), Full> {
        self.create(to, kind)?;
        let cloned = run("cp", ["--reflink=always", &self.path(from), &self.path(to)]);
        full_program(cloned).inspect_err(|_| self.unlink(to))
    }

    fn snapshot(&mut self, source: &str, name: &str, is_read_only: bool) -> Result<(), Full> {
        let (source, name) = (self.path(source), self.path(name));
        let options = ["subvolume", "snapshot"].into_iter().chain(is_read_only.then_some("-r"));
        full_program(run("btrfs", options.chain([source.as_str(), name.as_str()])))
    }

    fn delete_subvolume(&mut self, name: &str) {
        run("btrfs", ["subvolume", "delete", &self.path(name)]).unwrap();
    }

    fn content(&mut self, path: &str) -> Vec<u8> {
        std::fs::read(self.0.path(path)).unwrap()
    }

    fn is_doubtful_when_full(&self) -> bool {
        true
    }

    fn paths(&mut self) -> Paths {
        let mut paths = Paths::new();
        self.add_paths("", &mut paths);
        paths
    }
}

/// What the kernel did besides changing files.
#[derive(Default)]
struct Maintained {
    balanced: usize,
    replaced: usize,
    /// There was no space for it.
    refused: usize,
}

impl Maintained {
    /// Balances, or replaces the first device; then returns the new one.
    fn maintain(&mut self, disks: &Disks, mount: &Mount, (round, is_full): (usize, bool)) -> Option<(PathBuf, Loops)> {
        let top = mount.path("").to_str().unwrap().to_owned();
        let options = match round % 4 {
            0 => &["--full-balance"][..],
            2 => &["-dusage=60", "-musage=60"],
            1 => return self.replace(disks, &top, round),
            _ => return None,
        };
        if !is_full {
            let arguments = ["balance", "start"].iter().chain(options).copied().chain([top.as_str()]);
            match full_program(run("btrfs", arguments)) {
                Ok(()) => self.balanced += 1,
                Err(Full) => self.refused += 1,
            }
        }
        None
    }

    fn replace(&mut self, disks: &Disks, top: &str, round: usize) -> Option<(PathBuf, Loops)> {
        let spare = disks.images[0].with_file_name(format!("spare{round}"));
        sparse(&spare, disks.images[0].metadata().unwrap().len().div_ceil(1 << 20)).unwrap();
        let loops = Loops::attach(std::slice::from_ref(&spare), false).unwrap();
        match full_program(run("btrfs", ["replace", "start", "-B", "-f", "1", &loops.devices()[0], top])) {
            Ok(()) => {
                self.replaced += 1;
                Some((spare, loops))
            }
            Err(Full) => {
                // Linux may leave it begun, and then mounts no more without the new device.
                let _is_over = run("btrfs", ["replace", "cancel", top]);
                self.refused += 1;
                None
            }
        }
    }
}

/// Changes, at first on a filesystem that may be full.
fn turn(model: &mut Model, side: &mut dyn Side) {
    if model.is_full() {
        (0..STEPS / 3).for_each(|_| model.step(side));
        model.empty(side);
    }
    (0..STEPS).for_each(|_| model.step(side));
}

/// Whether `SEALBLOCK_ROUNDS`, if it is set, is a part of a name: to run one of them.
fn is_wanted(what: &str) -> bool {
    std::env::var("SEALBLOCK_ROUNDS").map_or(true, |wanted| what.contains(&wanted))
}

fn rounds(mut disks: Disks, seed: u64, count: usize, what: &str) {
    let (mut model, mut maintained) = (Model::new(seed), Maintained::default());
    for round in 0..count {
        let what = format!("{what}, round {round}");
        model.note(&what);
        let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
        let mut ours = Ours(&engine);
        model.assert_seen(&mut ours, &what);
        turn(&mut model, &mut ours);
        if round % 4 == 2 {
            model.fill(&mut ours);
        }
        model.assert_seen(&mut ours, &what);
        block_on(engine.commit()).unwrap();
        assert!(engine.take_bad_copies().is_empty(), "{what}");
        drop(engine);
        disks.assert_consistent();
        disks.assert_undamaged();
        disks.save();
        if round % 4 == 3 {
            disks.assert_checked_by_program();
        }
        let mount = Mount::new(&disks.images, "noatime").unwrap();
        let mut kernel = Kernel(&mount);
        let top = File::open(mount.path("")).unwrap();
        model.assert_seen(&mut kernel, &format!("{what}, the kernel"));
        assert_scrubbed(&mount);
        let spare = maintained.maintain(&disks, &mount, (round, model.is_full()));
        model.note("the kernel");
        turn(&mut model, &mut kernel);
        if round % 4 == 0 {
            model.fill(&mut kernel);
        }
        model.learn(&mut kernel, false);
        model.assert_seen(&mut kernel, &format!("{what}, the kernel again"));
        // Until here the kernel may have had it only in memory. An error of writing it shows up here.
        let written = rustix::fs::syncfs(&top);
        written.unwrap_or_else(|error| panic!("{what}: the kernel could not write what it had accepted: {error}"));
        drop(top);
        mount.unmount().unwrap();
        if let Some((image, loops)) = spare {
            drop(loops);
            disks.images[0] = image;
        }
        let mount = Mount::new(&disks.images, "ro,noatime").unwrap();
        let mut kernel = Kernel(&mount);
        model.learn(&mut kernel, true);
        model.assert_seen(&mut kernel, &format!("{what}, the kernel from its devices"));
        mount.unmount().unwrap();
        disks.load();
        disks.assert_consistent();
        disks.assert_undamaged();
    }
    let Maintained { balanced, replaced, refused } = maintained;
    println!(
        "{what}: {count} rounds, {balanced} balances, {replaced} replaced devices, {refused} of these and {} changes \
         without space, {} files as they were before a change without space when Linux read them again",
        model.refused, model.forgotten
    );
}

fn rounds_on((devices, options): (usize, &[&str]), seed: u64, mebibytes: u64) {
    let what = format!("{devices} devices {options:?}, seed {seed}");
    if !is_wanted(&what) {
        return;
    }
    let Some(disks) = Disks::make(devices, mebibytes, options) else { return };
    rounds(disks, seed, share(8), &what);
}

/// All of them, or two.
fn chosen<T>(all: Vec<T>) -> Vec<T> {
    let most = share(8);
    all.into_iter().take(most.max(2)).take(if most == 8 { usize::MAX } else { 1 }).collect()
}

#[test]
fn the_kernel_and_ours_in_turns_on_one_device() {
    let all = vec![
        (&["-m", "single"][..], 160),
        (&["-m", "dup", "-n", "4096", "--csum", "xxhash"], 200),
        (&["-m", "dup", "-d", "dup", "--csum", "sha256"], 300),
        (&["--mixed", "-n", "4096"], 160),
        (&["-m", "single", "-O", "^no-holes"], 160),
    ];
    for (seed, (options, mebibytes)) in (51..).zip(chosen(all)) {
        rounds_on((1, options), seed, mebibytes);
    }
}

#[test]
fn the_kernel_and_ours_in_turns_on_several_devices() {
    let all = vec![
        (2, 160, &["-m", "raid1", "-d", "raid1", "--csum", "blake2"][..]),
        (2, 160, &["-m", "raid0", "-d", "raid0"]),
        (3, 320, &["-m", "raid1c3", "-d", "raid1c3", "--csum", "xxhash"]),
        (4, 480, &["-m", "raid1c4", "-d", "raid1c4"]),
        (4, 240, &["-m", "raid10", "-d", "raid10", "--csum", "sha256", "-n", "4096"]),
    ];
    for (seed, (devices, mebibytes, options)) in (61..).zip(chosen(all)) {
        rounds_on((devices, options), seed, mebibytes);
    }
}

#[test]
fn the_kernel_and_ours_in_turns_with_a_tree_of_block_groups() {
    let all = vec![
        (1, Profile::Dup, Profile::Single, ChecksumType::Crc32c),
        (2, Profile::Raid1, Profile::Raid0, ChecksumType::Blake2b),
        (3, Profile::Raid1C3, Profile::Raid1, ChecksumType::XxHash64),
    ];
    for (seed, (devices, metadata, data, checksum)) in (71..).zip(chosen(all)) {
        let Some(disks) = Disks::format(devices, 200, (metadata, data), checksum) else { return };
        rounds(disks, seed, share(8), &format!("made here, {metadata:?} {data:?} {checksum:?}"));
    }
}
