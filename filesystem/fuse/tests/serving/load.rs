//! Many threads that change a mount at random, and a folder of this machine in the same way; both must be the same.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use sealblock_fuse::{Ended, Options};
use sealblock_proofs_btrfs_images::content::noise;

use crate::can_mount;
use crate::disk::{ServedDisk, writable, write_through};

const THREADS: u64 = 8;
const STEPS: u64 = 400;

/// A change at a place that may or may not be there.
#[derive(Debug)]
enum Step {
    Write(String, u64, usize, u64),
    Truncate(String, u64),
    Allocate(String, u64, u64),
    Copy(String, String),
    Rename(String, String),
    Link(String, String),
    Symlink(String),
    Unlink(String),
    Mkdir(String),
    Rmdir(String),
    List(String),
    Read(String),
}

impl Step {
    fn random(random: &mut fastrand::Rng) -> Step {
        fn name(random: &mut fastrand::Rng) -> String {
            let file = random.u8(..6);
            if random.bool() { format!("{file}") } else { format!("d{}/{file}", random.u8(..3)) }
        }
        fn directory(random: &mut fastrand::Rng) -> String {
            format!("d{}", random.u8(..3))
        }
        let (offset, bytes) = (random.u64(..200_000), random.usize(1..50_000));
        match random.u8(..20) {
            0..=5 => Step::Write(name(random), offset, bytes, random.u64(..)),
            6 => Step::Truncate(name(random), offset),
            7 => Step::Allocate(name(random), offset, bytes as u64),
            8 => Step::Copy(name(random), name(random)),
            9 | 10 => Step::Rename(name(random), name(random)),
            11 => Step::Link(name(random), name(random)),
            12 => Step::Symlink(name(random)),
            13 | 14 => Step::Unlink(name(random)),
            15 => Step::Mkdir(directory(random)),
            16 => Step::Rmdir(directory(random)),
            17 => Step::List(directory(random)),
            _ => Step::Read(name(random)),
        }
    }

    /// What comes of it below a folder.
    fn apply(&self, folder: &Path) -> io::Result<Vec<u8>> {
        let at = |name: &String| folder.join(name);
        let open = |name: &String| OpenOptions::new().read(true).write(true).open(at(name));
        match self {
            Step::Write(name, offset, bytes, seed) => {
                let file = OpenOptions::new().write(true).create(true).truncate(false).open(at(name))?;
                file.write_all_at(&noise(*bytes, *seed), *offset)?;
            }
            Step::Truncate(name, bytes) => open(name)?.set_len(*bytes)?,
            Step::Allocate(name, offset, bytes) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(open(name)?, flags, *offset, *bytes)?;
            }
            Step::Copy(from, to) if from != to => {
                let (from, to) = (File::open(at(from))?, open(to)?);
                let is_same = from.metadata()?.ino() == to.metadata()?.ino();
                let bytes = if is_same { 0 } else { from.metadata()?.len() as usize };
                rustix::fs::copy_file_range(&from, Some(&mut 0), &to, Some(&mut 0), bytes)?;
            }
            Step::Copy(..) => {}
            Step::Rename(from, to) => fs::rename(at(from), at(to))?,
            Step::Link(from, to) => fs::hard_link(at(from), at(to))?,
            Step::Symlink(name) => symlink("0", at(name))?,
            Step::Unlink(name) => fs::remove_file(at(name))?,
            Step::Mkdir(name) => fs::create_dir(at(name))?,
            Step::Rmdir(name) => fs::remove_dir(at(name))?,
            Step::List(name) => {
                let mut names: Vec<_> = fs::read_dir(at(name))?.map(|entry| entry.unwrap().file_name()).collect();
                names.sort();
                return Ok(names.join("/".as_ref()).into_encoded_bytes());
            }
            Step::Read(name) => return fs::read(at(name)),
        }
        Ok(Vec::new())
    }
}

/// The content of everything below a folder.
fn tree(folder: &Path) -> BTreeMap<PathBuf, (u64, Vec<u8>)> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        let content = match () {
            () if kind.is_dir() => Vec::new(),
            () if kind.is_symlink() => fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes(),
            () => fs::read(&path).unwrap(),
        };
        if kind.is_dir() {
            found
                .extend(tree(&path).into_iter().map(|(below, what)| (Path::new(&entry.file_name()).join(below), what)));
        }
        let links = if kind.is_file() { entry.metadata().unwrap().nlink() } else { 0 };
        found.insert(entry.file_name().into(), (links, content));
    }
    found
}

fn change(folder: &Path, reference: &Path, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    for number in 0..STEPS {
        let step = Step::random(&mut random);
        let errno = |error: io::Error| Errno::from_io_error(&error).unwrap();
        let (found, expected) = (step.apply(folder).map_err(errno), step.apply(reference).map_err(errno));
        let is_same = match (&found, &expected) {
            // Which comes first if a directory is neither empty nor a directory's equal depends on the filesystem.
            (Err(_), Err(_)) => true,
            _ => found == expected,
        };
        assert!(is_same, "seed {seed}, step {number}: {step:?}: {:?} {:?}", found.map(|_| ()), expected.map(|_| ()));
    }
}

fn run(options: Options, seed: u64) {
    let mut served = ServedDisk::start(options);
    let reference = Arc::new(tempfile::tempdir().unwrap());
    let threads: Vec<_> = (0..THREADS)
        .map(|number| {
            let (mine, its) = (served.path(&number.to_string()), reference.path().join(number.to_string()));
            [&mine, &its].into_iter().for_each(|folder| fs::create_dir(folder).unwrap());
            thread::spawn(move || change(&mine, &its, seed * 1000 + number))
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(tree(&served.point) == tree(reference.path()));
    let forgotten = served.asked.forgotten.lock().unwrap().len();
    assert!(forgotten > 0);
    assert_eq!(served.stop(), Ended::Stopped);
    // What has names is there with its content; everything else was deleted.
    for (path, (_, content)) in tree(reference.path()) {
        let found = served.at_end(&format!("/{}", path.display()));
        assert!(found == Some(content), "{}", path.display());
    }
    assert_eq!(served.asked.open_files.load(std::sync::atomic::Ordering::SeqCst), 0);
    assert_eq!(served.asked.without_names.load(std::sync::atomic::Ordering::SeqCst), 0);
}

#[test]
fn many_threads_see_what_they_would_see_elsewhere() {
    if !can_mount() {
        return;
    }
    run(writable(), 1);
    run(Options { calls: 3, ..writable() }, 2);
    run(write_through(), 3);
}
