//! A filesystem of paths, which the engine and the kernel change in turns: what each path has.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use crate::files::Kind;

/// The longest file.
const MOST: u64 = 400_000;
/// The most paths.
const PATHS: usize = 70;
const SUBVOLUMES: usize = 5;

/// What a path leads to.
#[derive(Clone, PartialEq, Eq)]
pub enum Item {
    /// Also what is left of a subvolume in a snapshot of the one that it is in.
    Directory,
    Subvolume {
        is_read_only: bool,
    },
    File(Rc<Vec<u8>>),
    Symlink(String),
}

impl Item {
    /// What is seen of it.
    fn seen(&self) -> Item {
        match self {
            Item::Subvolume { .. } => Item::Directory,
            other => other.clone(),
        }
    }
}

impl std::fmt::Debug for Item {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Item::Directory => f.write_str("a directory"),
            Item::Subvolume { .. } => f.write_str("a subvolume"),
            Item::File(content) => write!(f, "a file of {} bytes", content.len()),
            Item::Symlink(target) => write!(f, "a link to {target}"),
        }
    }
}

pub type Paths = BTreeMap<String, Item>;

/// There is no space.
#[derive(Debug)]
pub struct Full;

/// Whoever changes the filesystem.
pub trait Side {
    fn create(&mut self, path: &str, kind: Kind) -> Result<(), Full>;
    fn mkdir(&mut self, path: &str) -> Result<(), Full>;
    fn symlink(&mut self, path: &str, target: &str) -> Result<(), Full>;
    fn rename(&mut self, from: &str, to: &str) -> Result<(), Full>;
    fn unlink(&mut self, path: &str);
    fn write(&mut self, path: &str, at: u64, data: &[u8]) -> Result<(), Full>;
    fn truncate(&mut self, path: &str, size: u64) -> Result<(), Full>;
    fn punch(&mut self, path: &str, range: (u64, u64)) -> Result<(), Full>;
    /// The size stays.
    fn allocate(&mut self, path: &str, range: (u64, u64)) -> Result<(), Full>;
    /// All of a file, to a new one.
    fn clone(&mut self, from: &str, to: &str, kind: Kind) -> Result<(), Full>;
    fn snapshot(&mut self, source: &str, name: &str, is_read_only: bool) -> Result<(), Full>;
    fn delete_subvolume(&mut self, name: &str);
    fn content(&mut self, path: &str) -> Vec<u8>;
    /// True if a change without space may leave a file as it is only in memory, or as it was before earlier changes. When
    /// Linux has no space to truncate, it forgets what was written to the file and not yet to the devices.
    fn is_doubtful_when_full(&self) -> bool;
    /// All paths, without what only the model knows.
    fn paths(&mut self) -> Paths;
}

/// What is known.
pub struct Model {
    pub random: fastrand::Rng,
    paths: Paths,
    kinds: BTreeMap<String, Kind>,
    /// Files of which nobody knows what the devices have.
    doubtful: BTreeSet<String>,
    next: u64,
    /// What was done in the last turns.
    log: Vec<String>,
    /// The number of changes for which there was no space.
    pub refused: u64,
    /// The number of files that had something else when they were read from the devices, after a change without space.
    pub forgotten: u64,
}

fn subvolume_of(path: &str) -> &str {
    match path.split_once('/') {
        Some((first, _)) if first.starts_with("sub") => first,
        _ => "",
    }
}

fn join(folder: &str, name: &str) -> String {
    if folder.is_empty() { name.into() } else { format!("{folder}/{name}") }
}

impl Model {
    pub fn new(seed: u64) -> Model {
        let random = fastrand::Rng::with_seed(seed);
        let (paths, kinds, doubtful, log) = (Paths::new(), BTreeMap::new(), BTreeSet::new(), Vec::new());
        Model { random, paths, kinds, doubtful, next: 0, log, refused: 0, forgotten: 0 }
    }

    /// Notes what is done, for the message of a failure.
    pub fn note(&mut self, what: impl Into<String>) {
        self.log.push(what.into());
    }

    fn name(&mut self, prefix: &str) -> String {
        self.next += 1;
        format!("{prefix}{}", self.next)
    }

    fn choose<T: Clone>(&mut self, all: &[T]) -> Option<T> {
        (!all.is_empty()).then(|| all[self.random.usize(..all.len())].clone())
    }

    fn may_change(&self, path: &str) -> bool {
        let subvolume = subvolume_of(path);
        subvolume.is_empty() || self.paths.get(subvolume) == Some(&Item::Subvolume { is_read_only: false })
    }

    /// A file that may be changed.
    fn file(&mut self) -> Option<String> {
        let is_file = |(path, item): &(&String, &Item)| matches!(item, Item::File(_)) && self.may_change(path);
        let files: Vec<String> = self.paths.iter().filter(is_file).map(|(path, _)| path.clone()).collect();
        self.choose(&files)
    }

    /// A folder that may be changed.
    fn folder(&mut self) -> String {
        let folders = self.paths.iter().filter(|(path, item)| match item {
            // What is left of subvolumes in snapshots has no entries.
            Item::Directory => !path.rsplit('/').next().unwrap_or("").starts_with("sub") && self.may_change(path),
            Item::Subvolume { is_read_only } => !is_read_only,
            _ => false,
        });
        let folders: Vec<String> = folders.map(|(path, _)| path.clone()).chain([String::new()]).collect();
        self.choose(&folders).unwrap_or_default()
    }

    fn content(&self, path: &str) -> Rc<Vec<u8>> {
        match &self.paths[path] {
            Item::File(content) => Rc::clone(content),
            other => panic!("{path} is {other:?}"),
        }
    }

    /// Changes a file as it should be; after an error its pieces must be old or new, unless nobody knows.
    fn change(
        &mut self,
        side: &mut dyn Side,
        path: &str,
        (what, change): (String, impl FnOnce(&mut Vec<u8>)),
        run: impl FnOnce(&mut dyn Side) -> Result<(), Full>,
    ) {
        let old = self.content(path);
        let mut new = old.to_vec();
        change(&mut new);
        let done = run(side);
        self.note(format!("{path}: {what} {done:?}"));
        if let Err(Full) = done {
            self.refused += 1;
            let found = side.content(path);
            match side.is_doubtful_when_full() {
                true => _ = self.doubtful.insert(path.into()),
                false => self.assert_old_or_new(path, (&old, &new), &found),
            }
            new = found;
        }
        self.paths.insert(path.into(), Item::File(Rc::new(new)));
    }

    /// Each piece of a file is as one of two versions have it.
    fn assert_old_or_new(&self, path: &str, versions: (&[u8], &[u8]), found: &[u8]) {
        for (at, chunk) in (0..).step_by(512).zip(found.chunks(512)) {
            let there = [versions.0, versions.1].map(|version| version.get(at..).unwrap_or(&[]));
            let is_one = |version: &&[u8]| {
                let bytes = version.len().min(chunk.len());
                version[..bytes] == chunk[..bytes] && chunk[bytes..].iter().all(|byte| *byte == 0)
            };
            let log = || self.log.join("\n");
            assert!(there.iter().any(is_one), "{path} has at {at} what nobody wrote\n{}", log());
        }
    }

    fn insert(&mut self, path: &str, item: Item, done: Result<(), Full>) -> bool {
        self.note(format!("{path}: new, {item:?} {done:?}"));
        match done {
            Ok(()) => drop(self.paths.insert(path.into(), item)),
            Err(Full) => self.refused += 1,
        }
        self.paths.contains_key(path)
    }

    pub fn step(&mut self, side: &mut dyn Side) {
        let file = self.file();
        match (self.random.u8(..24), file) {
            (0..=2, _) | (_, None) if self.paths.len() < PATHS => self.create(side),
            (3 | 4, _) if self.paths.len() < PATHS => self.make_other(side),
            (5, Some(file)) if self.paths.len() < PATHS => self.clone_file(side, &file),
            (6 | 7, Some(file)) => self.truncate(side, &file),
            (8 | 9, Some(file)) => self.punch_or_allocate(side, &file),
            (10, Some(file)) => {
                self.note(format!("{file}: unlink"));
                side.unlink(&file);
                self.remove(&file);
            }
            (11, Some(file)) => self.rename(side, &file),
            (12 | 13, _) => self.snapshot(side),
            (_, Some(file)) => self.write(side, &file),
            (_, None) => {}
        }
    }

    fn create(&mut self, side: &mut dyn Side) {
        let kinds = [Kind::Plain, Kind::Plain, Kind::NoCow, Kind::Compressed("zstd"), Kind::Compressed("lzo")];
        let kind = kinds[self.random.usize(..kinds.len())];
        let path = join(&self.folder(), &self.name("file"));
        let created = side.create(&path, kind);
        if self.insert(&path, Item::File(Rc::default()), created) {
            self.kinds.insert(path.clone(), kind);
            self.write(side, &path);
        }
    }

    fn make_other(&mut self, side: &mut dyn Side) {
        let folder = self.folder();
        if self.random.bool() {
            let path = join(&folder, &self.name("directory"));
            let made = side.mkdir(&path);
            self.insert(&path, Item::Directory, made);
        } else {
            let (path, target) = (join(&folder, &self.name("link")), "t".repeat(self.random.usize(1..200)));
            let made = side.symlink(&path, &target);
            self.insert(&path, Item::Symlink(target), made);
        }
    }

    fn write(&mut self, side: &mut dyn Side, path: &str) {
        let size = self.content(path).len() as u64;
        let at = match self.random.u8(..4) {
            0 => size,
            1 => self.random.u64(..MOST),
            _ => self.random.u64(..=size),
        };
        let at = if self.random.bool() { at / 4096 * 4096 } else { at }.min(MOST);
        let most = [800, 9000, 150_000][self.random.usize(..3)];
        let bytes = 1 + self.random.usize(..most);
        let mut data = vec![self.random.u8(..); bytes];
        if self.random.bool() {
            self.random.fill(&mut data);
        }
        let end = at as usize + bytes;
        let put = |content: &mut Vec<u8>| {
            content.resize(content.len().max(end), 0);
            content[at as usize..end].copy_from_slice(&data);
        };
        let what = format!("write {at} to {end}");
        self.change(side, path, (what, put), |side| side.write(path, at, &data));
    }

    fn truncate(&mut self, side: &mut dyn Side, path: &str) {
        let size = self.content(path).len() as u64;
        let to = if self.random.u8(..3) == 0 { self.random.u64(..MOST) } else { self.random.u64(..=size) };
        let resize = |content: &mut Vec<u8>| content.resize(to as usize, 0);
        self.change(side, path, (format!("truncate to {to}"), resize), |side| side.truncate(path, to));
    }

    fn punch_or_allocate(&mut self, side: &mut dyn Side, path: &str) {
        let size = self.content(path).len();
        let range = (self.random.u64(..=size as u64), self.random.u64(1..100_000));
        if self.random.bool() {
            let nothing = |_: &mut Vec<u8>| ();
            self.change(side, path, (format!("allocate {range:?}"), nothing), |side| side.allocate(path, range));
            return;
        }
        let zero = |content: &mut Vec<u8>| content[range.0 as usize..size.min((range.0 + range.1) as usize)].fill(0);
        self.change(side, path, (format!("punch {range:?}"), zero), |side| side.punch(path, range));
    }

    fn clone_file(&mut self, side: &mut dyn Side, from: &str) {
        let to = join(&self.folder(), &self.name("clone"));
        let kind = self.kinds.get(from).copied().unwrap_or(Kind::Plain);
        let content = self.content(from);
        let cloned = side.clone(from, &to, kind);
        if self.insert(&to, Item::File(content), cloned) {
            self.kinds.insert(to, kind);
        }
    }

    fn rename(&mut self, side: &mut dyn Side, from: &str) {
        let folder = self.folder();
        if subvolume_of(&join(&folder, "x")) != subvolume_of(from) {
            return;
        }
        let to = join(&folder, &self.name("renamed"));
        let done = side.rename(from, &to);
        self.note(format!("{from}: rename to {to} {done:?}"));
        match done {
            Ok(()) => {
                let item = self.paths.remove(from).expect("it was chosen");
                self.paths.insert(to.clone(), item);
                if self.doubtful.remove(from) {
                    self.doubtful.insert(to.clone());
                }
                if let Some(kind) = self.kinds.remove(from) {
                    self.kinds.insert(to, kind);
                }
            }
            Err(Full) => self.refused += 1,
        }
    }

    fn snapshot(&mut self, side: &mut dyn Side) {
        let subvolumes = self.paths.iter().filter(|(_, item)| matches!(item, Item::Subvolume { .. }));
        let subvolumes: Vec<String> = subvolumes.map(|(path, _)| path.clone()).collect();
        if subvolumes.len() >= SUBVOLUMES {
            let name = self.choose(&subvolumes).expect("there are some");
            self.delete(side, &name);
            return;
        }
        let sources: Vec<String> = subvolumes.into_iter().chain([String::new(), String::new()]).collect();
        let source = self.choose(&sources).expect("there is the top");
        let (name, is_read_only) = (self.name("sub"), self.random.bool());
        let done = side.snapshot(&source, &name, is_read_only);
        self.note(format!("{name}: snapshot of {source:?} {done:?}"));
        let copies: Vec<(String, String, Item)> = self
            .paths
            .iter()
            .filter(|(path, _)| subvolume_of(path) == source && **path != source)
            .map(|(path, item)| {
                let inner = if source.is_empty() { path } else { &path[source.len() + 1..] };
                (path.clone(), join(&name, inner), item.seen())
            })
            .collect();
        if self.insert(&name, Item::Subvolume { is_read_only }, done) {
            for (old, new, item) in copies {
                if self.doubtful.contains(&old) {
                    self.doubtful.insert(new.clone());
                }
                if let Some(kind) = self.kinds.get(&old).copied() {
                    self.kinds.insert(new.clone(), kind);
                }
                self.paths.insert(new, item);
            }
        }
    }

    /// Fills the filesystem with a file of zeroes.
    pub fn fill(&mut self, side: &mut dyn Side) {
        if side.create("full", Kind::Plain).is_err() {
            return;
        }
        let (mut size, mut bytes) = (0, 4 << 20);
        while bytes >= 4096 {
            match side.write("full", size, &vec![0; bytes as usize]) {
                Ok(()) => size += bytes,
                Err(Full) => {
                    size = side.content("full").len() as u64;
                    bytes /= 4;
                }
            }
        }
        self.paths.insert("full".into(), Item::File(Rc::new(vec![0; size as usize])));
    }

    pub fn is_full(&self) -> bool {
        self.paths.contains_key("full")
    }

    /// Makes space again: the file of zeroes goes, in all subvolumes.
    pub fn empty(&mut self, side: &mut dyn Side) {
        let is_one = |path: &&String| path.rsplit('/').next() == Some("full");
        let all: Vec<String> = self.paths.keys().filter(is_one).cloned().collect();
        for path in all {
            let subvolume = subvolume_of(&path).to_owned();
            if self.may_change(&path) {
                self.note(format!("{path}: unlink"));
                side.unlink(&path);
                self.remove(&path);
            } else if self.paths.contains_key(&subvolume) {
                self.delete(side, &subvolume);
            }
        }
    }

    fn remove(&mut self, path: &str) {
        self.paths.remove(path);
        self.doubtful.remove(path);
    }

    fn delete(&mut self, side: &mut dyn Side, subvolume: &str) {
        self.note(format!("{subvolume}: delete"));
        side.delete_subvolume(subvolume);
        let below = format!("{subvolume}/");
        let stays = |path: &String| path != subvolume && !path.starts_with(&below);
        self.paths.retain(|path, _| stays(path));
        self.doubtful.retain(stays);
    }

    /// Takes what a side has in files in which a change had no space. From the devices it is certain.
    pub fn learn(&mut self, side: &mut dyn Side, is_from_devices: bool) {
        for path in self.doubtful.clone() {
            let content = side.content(&path);
            if *self.content(&path) != content {
                self.forgotten += 1;
                self.paths.insert(path, Item::File(Rc::new(content)));
            }
        }
        if is_from_devices {
            self.doubtful.clear();
        }
    }

    /// A side sees what is known.
    pub fn assert_seen(&self, side: &mut dyn Side, what: &str) {
        let seen = side.paths();
        assert!(self.paths.keys().eq(seen.keys()), "{what}: {:#?}, and not {:#?}", seen, self.paths);
        for ((path, item), seen) in self.paths.iter().zip(seen.values()) {
            let how = difference(item, seen);
            let log = || self.log.join("\n");
            assert!(item.seen() == *seen, "{what}: {path} is {seen:?}, and not {item:?}{how}\n{}", log());
        }
    }
}

/// The first and the last byte that differ in two files of the same size, and what is there.
fn difference(known: &Item, seen: &Item) -> String {
    let (Item::File(known), Item::File(seen)) = (known, seen) else { return String::new() };
    let differs = |at: &usize| known.get(*at) != seen.get(*at);
    let Some(first) = (0..known.len().min(seen.len())).find(differs) else { return String::new() };
    let last = (0..known.len().min(seen.len())).rfind(differs).unwrap_or(first);
    let some = |file: &[u8]| file[first..].iter().take(16).copied().collect::<Vec<u8>>();
    format!("; they differ from byte {first} to {last}: {:x?}, and not {:x?}", some(seen), some(known))
}
