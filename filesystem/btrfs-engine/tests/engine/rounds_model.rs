//! A filesystem of paths, which the engine and the kernel change in turns: what each path has.

use std::collections::BTreeMap;
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
    /// All paths, without what only the model knows.
    fn paths(&mut self) -> Paths;
}

/// What is known.
pub struct Model {
    pub random: fastrand::Rng,
    paths: Paths,
    kinds: BTreeMap<String, Kind>,
    next: u64,
    /// The number of changes for which there was no space.
    pub refused: u64,
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
        Model { random, paths: Paths::new(), kinds: BTreeMap::new(), next: 0, refused: 0 }
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

    /// Changes a file as it should be; after an error its pieces must be old or new.
    fn change(
        &mut self,
        side: &mut dyn Side,
        path: &str,
        change: impl FnOnce(&mut Vec<u8>),
        run: impl FnOnce(&mut dyn Side) -> Result<(), Full>,
    ) {
        let old = self.content(path);
        let mut new = old.to_vec();
        change(&mut new);
        if let Err(Full) = run(side) {
            self.refused += 1;
            let found = side.content(path);
            let is_one = |at: usize, chunk: &[u8]| {
                [&old[..], &new].iter().any(|version| {
                    let there = version.get(at..).unwrap_or(&[]);
                    let bytes = there.len().min(chunk.len());
                    there[..bytes] == chunk[..bytes] && chunk[bytes..].iter().all(|byte| *byte == 0)
                })
            };
            let mut chunks = found.chunks(512).enumerate();
            assert!(chunks.all(|(index, chunk)| is_one(512 * index, chunk)), "{path} has what nobody wrote");
            new = found;
        }
        self.paths.insert(path.into(), Item::File(Rc::new(new)));
    }

    fn insert(&mut self, path: &str, item: Item, done: Result<(), Full>) -> bool {
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
                side.unlink(&file);
                self.paths.remove(&file);
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
        self.change(side, path, put, |side| side.write(path, at, &data));
    }

    fn truncate(&mut self, side: &mut dyn Side, path: &str) {
        let size = self.content(path).len() as u64;
        let to = if self.random.u8(..3) == 0 { self.random.u64(..MOST) } else { self.random.u64(..=size) };
        self.change(side, path, |content| content.resize(to as usize, 0), |side| side.truncate(path, to));
    }

    fn punch_or_allocate(&mut self, side: &mut dyn Side, path: &str) {
        let size = self.content(path).len();
        let range = (self.random.u64(..=size as u64), self.random.u64(1..100_000));
        if self.random.bool() {
            self.change(side, path, |_| (), |side| side.allocate(path, range));
            return;
        }
        let zero = |content: &mut Vec<u8>| content[range.0 as usize..size.min((range.0 + range.1) as usize)].fill(0);
        self.change(side, path, zero, |side| side.punch(path, range));
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
        match side.rename(from, &to) {
            Ok(()) => {
                let item = self.paths.remove(from).expect("it was chosen");
                self.paths.insert(to.clone(), item);
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
            side.delete_subvolume(&name);
            let below = format!("{name}/");
            self.paths.retain(|path, _| *path != name && !path.starts_with(&below));
            return;
        }
        let sources: Vec<String> = subvolumes.into_iter().chain([String::new(), String::new()]).collect();
        let source = self.choose(&sources).expect("there is the top");
        let (name, is_read_only) = (self.name("sub"), self.random.bool());
        let done = side.snapshot(&source, &name, is_read_only);
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

    pub fn empty(&mut self, side: &mut dyn Side) {
        if self.paths.remove("full").is_some() {
            side.unlink("full");
        }
    }

    /// A side sees what is known.
    pub fn assert_seen(&self, side: &mut dyn Side, what: &str) {
        let seen = side.paths();
        assert!(self.paths.keys().eq(seen.keys()), "{what}: {:#?}, and not {:#?}", seen, self.paths);
        for ((path, item), seen) in self.paths.iter().zip(seen.values()) {
            assert!(item.seen() == *seen, "{what}: {path} is {seen:?}, and not {item:?}, or has other bytes");
        }
    }
}
