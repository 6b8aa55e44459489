//! What files, names and snapshots were at each time of a workload, and whether what a power cut left is one of these.
//!
//! Time is a clock that ticks when a change begins and when it is answered. A value *may* be that of a commit if it
//! was not replaced before the commit began, and had begun when the commit was answered. Of a file whose data are
//! written in place, each piece may be newer than the commit, but not older than the last sync.

use std::collections::BTreeMap;
use std::rc::Rc;

use sealblock_recorder::CrashState;

use crate::files::Kind;

/// The smallest unit of a write that a device tears.
const SECTOR: usize = 512;

/// The content of a file.
pub type Content = Rc<Vec<u8>>;

/// What the top directory of a filesystem has.
pub struct Found {
    pub generation: u64,
    pub names: BTreeMap<String, FoundEntry>,
}

/// What a name leads to there.
pub enum FoundEntry {
    File(Vec<u8>),
    /// The files at its top.
    Subvolume(BTreeMap<String, Vec<u8>>),
}

/// A value from when its change begins; before that, the one before.
struct Version<T> {
    begun: u64,
    /// When it was answered; `u64::MAX` if it was not, or with an error.
    done: u64,
    /// True if its change is made in steps, each of which may be committed.
    in_steps: bool,
    value: T,
}

/// The values of something.
pub struct History<T>(Vec<Version<T>>);

impl<T> History<T> {
    fn new(now: u64, value: T) -> History<T> {
        History(vec![Version { begun: now, done: now, in_steps: false, value }])
    }

    fn begin(&mut self, begun: u64, value: T) {
        self.0.push(Version { begun, done: u64::MAX, in_steps: false, value });
    }

    fn done(&mut self, now: u64) {
        self.0.last_mut().expect("it has a first version").done = now;
    }

    /// The first and the last version that may be there if all that was answered before `from` is, and nothing that had
    /// not begun at `to`.
    fn possible(&self, (from, to): (u64, u64)) -> (usize, usize) {
        let first = self.0.iter().rposition(|version| version.done <= from).unwrap_or(0);
        let last = self.0.iter().rposition(|version| version.begun < to).unwrap_or(0);
        (first, last.max(first))
    }

    pub fn last(&self) -> &T {
        &self.0.last().expect("it has a first version").value
    }
}

/// What a name leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    File(usize),
    Snapshot(usize),
}

pub type Names = BTreeMap<String, Entry>;

/// A file.
pub struct ModelFile {
    pub ino: u64,
    pub kind: Kind,
    pub data: History<Content>,
}

/// A snapshot: what each file in it may have.
pub struct ModelSnapshot {
    pub id: u64,
    files: BTreeMap<String, Vec<Content>>,
}

/// What was promised before a power cut.
pub struct Moment {
    clock: u64,
    generation: u64,
    synced: BTreeMap<usize, usize>,
}

impl Moment {
    /// That of a state, from its marks.
    pub fn of(state: &CrashState<'_>) -> Moment {
        let mut moment = Moment { clock: 0, generation: 0, synced: BTreeMap::new() };
        for mark in state.marks() {
            let mut words = mark.split(' ');
            let kind = words.next();
            let mut number = || words.next().and_then(|word| word.parse::<u64>().ok()).expect("a mark has numbers");
            match kind {
                Some("at") => moment.clock = number(),
                Some("commit") => moment.generation = number(),
                _ => drop(moment.synced.insert(number() as usize, number() as usize)),
            }
        }
        moment
    }

    /// That of devices on which no power was cut.
    pub fn now(histories: &Histories) -> Moment {
        Moment { clock: histories.clock, generation: histories.promised, synced: histories.synced.clone() }
    }
}

/// All that is known of a workload.
pub struct Histories {
    pub clock: u64,
    pub files: Vec<ModelFile>,
    pub names: History<Names>,
    pub snapshots: Vec<ModelSnapshot>,
    /// For each transaction, when its commit began at the earliest, and when it was answered at the latest.
    commits: BTreeMap<u64, (u64, u64)>,
    /// The last transaction that was known to be durable, and when that was found out.
    noted: (u64, u64),
    promised: u64,
    synced: BTreeMap<usize, usize>,
}

impl Histories {
    /// A filesystem whose last transaction is this one, and has these files in its top directory.
    pub fn new(generation: u64, files: Vec<(String, ModelFile)>, snapshots: Vec<(String, ModelSnapshot)>) -> Histories {
        let mut names = Names::new();
        let mut all = Vec::new();
        for (name, file) in files {
            names.insert(name, Entry::File(all.len()));
            all.push(file);
        }
        let mut all_snapshots = Vec::new();
        for (name, snapshot) in snapshots {
            names.insert(name, Entry::Snapshot(all_snapshots.len()));
            all_snapshots.push(snapshot);
        }
        Histories {
            clock: 0,
            files: all,
            names: History::new(0, names),
            snapshots: all_snapshots,
            commits: BTreeMap::from([(generation, (0, 0))]),
            noted: (generation, 0),
            promised: generation,
            synced: BTreeMap::new(),
        }
    }

    /// A new file, without a name.
    pub fn add_file(&mut self, ino: u64, kind: Kind) -> usize {
        self.files.push(ModelFile::new(ino, kind, Vec::new(), self.clock));
        self.files.len() - 1
    }

    pub fn begin_data(&mut self, file: usize, content: Vec<u8>, in_steps: bool) {
        let history = &mut self.files[file].data;
        history.begin(self.clock, Rc::new(content));
        history.0.last_mut().expect("it was added").in_steps = in_steps;
    }

    pub fn end_data(&mut self, file: usize) {
        self.files[file].data.done(self.clock);
    }

    pub fn begin_names(&mut self, change: impl FnOnce(&mut Names)) {
        let mut names = self.names.last().clone();
        change(&mut names);
        self.names.begin(self.clock, names);
    }

    pub fn end_names(&mut self) {
        self.names.done(self.clock);
    }

    /// A snapshot was made between two times. It is not named yet.
    pub fn add_snapshot(&mut self, id: u64, begun: u64) -> usize {
        let mut files = BTreeMap::new();
        for (name, entry) in self.names.last() {
            if let Entry::File(file) = entry {
                let data = &self.files[*file].data;
                let (first, last) = data.possible((begun, self.clock + 1));
                files.insert(name.clone(), data.0[first..=last].iter().map(|version| version.value.clone()).collect());
            }
        }
        self.snapshots.push(ModelSnapshot { id, files });
        self.snapshots.len() - 1
    }

    /// The names before and after a change that was answered with an error.
    pub fn unfinished_names(&self) -> Option<(Names, Names)> {
        let [.., old, new] = &self.names.0[..] else { return None };
        (new.done == u64::MAX).then(|| (old.value.clone(), new.value.clone()))
    }

    /// The files whose last change was answered with an error.
    pub fn unfinished_files(&self) -> Vec<usize> {
        let files = self.files.iter().enumerate();
        files
            .filter(|(_, file)| file.data.0.last().is_some_and(|last| last.done == u64::MAX))
            .map(|(at, _)| at)
            .collect()
    }

    /// The last version of a file, which was found after an error, has nothing but pieces of the two before it.
    pub fn assert_like_before(&self, file: usize) {
        let [.., old, new, now] = &self.files[file].data.0[..] else { panic!("three versions") };
        let (least, most) = (old.value.len().min(new.value.len()), old.value.len().max(new.value.len()));
        assert!((least..=most).contains(&now.value.len()), "{} bytes, and not {least} to {most}", now.value.len());
        for (index, chunk) in now.value.chunks(SECTOR).enumerate() {
            let at = index * SECTOR;
            assert!(has_chunk(&old.value, at, chunk) || has_chunk(&new.value, at, chunk), "byte {at} is neither");
        }
    }

    /// The engine has this transaction durable now.
    pub fn note_durable(&mut self, generation: u64) {
        for one in self.noted.0 + 1..=generation {
            self.commits.insert(one, (self.noted.1, self.clock));
        }
        self.noted = (generation, self.clock);
    }

    /// A commit of the next transaction failed, which began at this time at the earliest. It may be there nevertheless.
    pub fn note_failed_commit(&mut self, begun: u64) {
        self.commits.insert(self.noted.0 + 1, (begun, self.clock + 1));
    }

    pub fn promise(&mut self, generation: u64) -> String {
        self.promised = generation;
        format!("commit {generation}")
    }

    /// The number of transactions, and of files that were made durable without one.
    pub fn promises(&self) -> (usize, usize) {
        (self.commits.len(), self.synced.len())
    }

    /// The data of a file are durable as they are now.
    pub fn promise_data(&mut self, file: usize) -> String {
        let version = self.files[file].data.0.len() - 1;
        self.synced.insert(file, version);
        format!("synced {file} {version}")
    }

    /// Whether a state is right: of a transaction that is not older than promised, and with all that this has.
    pub fn judge(&self, found: &Found, at: &Moment) -> Result<(), String> {
        let generation = found.generation;
        if generation < at.generation {
            return Err(format!("transaction {generation} is there, and {} was promised", at.generation));
        }
        let commit = *self.commits.get(&generation).ok_or(format!("transaction {generation} never was"))?;
        let (first, last) = self.names.possible(commit);
        let mut result = Err(String::new());
        for version in (first..=last).rev() {
            result = self.judge_names(&self.names.0[version].value, found, (commit, at));
            if result.is_ok() {
                return Ok(());
            }
        }
        result
    }

    fn judge_names(&self, names: &Names, found: &Found, when: ((u64, u64), &Moment)) -> Result<(), String> {
        if !names.keys().eq(found.names.keys()) {
            return Err(format!("the names {:?}, and not {:?}", found.names.keys(), names.keys()));
        }
        for ((name, entry), found) in names.iter().zip(found.names.values()) {
            match (entry, found) {
                (Entry::File(file), FoundEntry::File(content)) => self.judge_file(*file, content, when),
                (Entry::Snapshot(snapshot), FoundEntry::Subvolume(files)) => self.judge_snapshot(*snapshot, files),
                _ => Err("something else".into()),
            }
            .map_err(|why| format!("{name}: {why}"))?;
        }
        Ok(())
    }

    fn judge_file(&self, file: usize, found: &[u8], (commit, at): ((u64, u64), &Moment)) -> Result<(), String> {
        let ModelFile { data, kind, .. } = &self.files[file];
        let (first, last) = data.possible(commit);
        let possible = &data.0[first..=last];
        if possible.iter().any(|version| version.value[..] == *found) && *kind != Kind::NoCow {
            return Ok(());
        }
        let lengths: Vec<usize> = possible.iter().map(|version| version.value.len()).collect();
        let in_steps = possible.iter().any(|version| version.in_steps);
        let is_right_length = match in_steps {
            true => lengths.iter().min() <= Some(&found.len()) && Some(&found.len()) <= lengths.iter().max(),
            false => lengths.contains(&found.len()),
        };
        if !is_right_length || !in_steps && *kind != Kind::NoCow {
            return Err(format!("{} bytes of version {first} to {last} ({lengths:?} bytes)", found.len()));
        }
        let (first, last) = match kind {
            Kind::NoCow => {
                let newest = data.possible((0, at.clock + 1)).1;
                (first.max(at.synced.get(&file).copied().unwrap_or(0)), newest.max(last))
            }
            _ => (first, last),
        };
        let versions = &data.0[first..=last];
        for (index, chunk) in found.chunks(SECTOR).enumerate() {
            if !versions.iter().any(|version| has_chunk(&version.value, index * SECTOR, chunk)) {
                return Err(format!("the bytes from {} are not of version {first} to {last}", index * SECTOR));
            }
        }
        Ok(())
    }

    fn judge_snapshot(&self, snapshot: usize, found: &BTreeMap<String, Vec<u8>>) -> Result<(), String> {
        let files = &self.snapshots[snapshot].files;
        if !files.keys().eq(found.keys()) {
            return Err(format!("the names {:?}, and not {:?}", found.keys(), files.keys()));
        }
        for ((name, possible), content) in files.iter().zip(found.values()) {
            if possible.iter().all(|one| **one != *content) {
                return Err(format!("{name}: {} bytes that it did not have", content.len()));
            }
        }
        Ok(())
    }

    /// What a state has, as the beginning of another workload. Inode numbers are the same.
    pub fn adopt(&self, found: &Found) -> Histories {
        let commit = self.commits[&found.generation];
        let (first, last) = self.names.possible(commit);
        let is_like = |names: &&Version<Names>| names.value.keys().eq(found.names.keys());
        let names = self.names.0[first..=last].iter().rev().find(is_like).expect("it was judged");
        let (mut files, mut snapshots) = (Vec::new(), Vec::new());
        for ((name, entry), content) in names.value.iter().zip(found.names.values()) {
            match (entry, content) {
                (Entry::File(file), FoundEntry::File(content)) => {
                    let ModelFile { ino, kind, .. } = self.files[*file];
                    files.push((name.clone(), ModelFile::new(ino, kind, content.clone(), 0)));
                }
                (Entry::Snapshot(snapshot), FoundEntry::Subvolume(content)) => {
                    let content = content.iter().map(|(name, content)| (name.clone(), vec![Rc::new(content.clone())]));
                    let id = self.snapshots[*snapshot].id;
                    snapshots.push((name.clone(), ModelSnapshot { id, files: content.collect() }));
                }
                _ => panic!("it was judged"),
            }
        }
        Histories::new(found.generation, files, snapshots)
    }
}

impl ModelFile {
    pub fn new(ino: u64, kind: Kind, content: Vec<u8>, now: u64) -> ModelFile {
        ModelFile { ino, kind, data: History::new(now, Rc::new(content)) }
    }
}

/// What is found is right, and is not right any more with any of these faults.
pub fn assert_judged(histories: &Histories, mut found: Found, at: &Moment) {
    let is_refused = |found: &Found, why: &str| {
        let error = histories.judge(found, at).expect_err(why);
        assert!(error.contains(why), "{error}");
    };
    for kind in [Kind::Plain, Kind::NoCow] {
        let is_of_kind = |entry: &Entry| match entry {
            Entry::File(file) => {
                let file = &histories.files[*file];
                (file.kind == kind && file.data.last().len() > 5000).then_some(())
            }
            Entry::Snapshot(_) => None,
        };
        let names = histories.names.last();
        let name = names.iter().find_map(|(name, entry)| is_of_kind(entry).map(|()| name.clone()));
        let name = name.expect("a file of each kind is left");
        let mut change = |change: &mut dyn FnMut(&mut Vec<u8>), why: &str| {
            let Some(FoundEntry::File(content)) = found.names.get_mut(&name) else { panic!("{name} is a file") };
            let before = content.clone();
            change(content);
            is_refused(&found, why);
            found.names.insert(name.clone(), FoundEntry::File(before));
        };
        change(&mut |content| content[700] ^= 0x55, "of version");
        change(&mut |content| content.truncate(4999), "4999 bytes of version");
    }
    let (name, entry) = found.names.pop_first().expect("it has names");
    is_refused(&found, "the names");
    found.names.insert("another name".into(), entry);
    is_refused(&found, "another name");
    let entry = found.names.remove("another name").expect("it was added");
    found.names.insert(name, entry);
    found.generation += 1;
    is_refused(&found, "never was");
    found.generation -= 2;
    is_refused(&found, "was promised");
}

/// Behind its end, a file has zeroes.
fn has_chunk(content: &[u8], at: usize, chunk: &[u8]) -> bool {
    let there = content.get(at..).unwrap_or(&[]);
    let bytes = there.len().min(chunk.len());
    there[..bytes] == chunk[..bytes] && chunk[bytes..].iter().all(|byte| *byte == 0)
}
