//! What is left after a power cut: opened, checked, read, and opened for writing. The kernel does the same with some.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use futures_executor::block_on;
use sealblock_btrfs::Filesystem;
use sealblock_btrfs::extents::Content;
use sealblock_btrfs::inode::Inode;
use sealblock_btrfs_engine::drop::Dropped;
use sealblock_btrfs_engine::engine::{Engine, EngineOptions};
use sealblock_btrfs_format::items::directory::Target;
use sealblock_proofs_btrfs_images::programs::{Mount, run};
use sealblock_recorder::{CrashStates, Footprint, Image, Watched};

use crate::disks::Disks;
use crate::files::{ROOT, assert_same, read_all};
use crate::history::{Found, FoundEntry, Histories, Moment};
use crate::{assert_scrubbed, findings, open_devices};

/// The number of states that are remembered, so that those with the same content are not read again.
const REMEMBERED: usize = 64;

/// The numbers of states.
#[derive(Clone, Copy, Default)]
pub struct Tally {
    pub states: usize,
    /// Those that have something else where it is read.
    pub distinct: usize,
    /// Those that the kernel mounted.
    pub mounted: usize,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.states += other.states;
        self.distinct += other.distinct;
        self.mounted += other.mounted;
    }
}

/// A state that was read.
struct Examined {
    footprints: Vec<Footprint>,
    found: Rc<Found>,
    /// True if Linux, which reads the first superblock alone, can read those of all devices.
    has_first_superblocks: bool,
}

/// What must be right besides the content.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub enum Expects {
    /// All: no device missed anything but a superblock.
    #[default]
    Cuts,
    /// A device that failed may be behind, which cannot be written then, and copies may be bad whose others are good.
    Faults,
}

/// Judges states.
#[derive(Default)]
pub struct Examiner {
    remembered: VecDeque<Examined>,
    expects: Expects,
    pub tally: Tally,
}

impl Examiner {
    pub fn expecting(expects: Expects) -> Examiner {
        Examiner { expects, ..Examiner::default() }
    }

    /// Judges all states. The kernel mounts one of so many, on the images of the disks.
    pub fn judge_all(&mut self, states: &CrashStates, histories: &Histories, kernel: Option<(&Disks, usize)>) {
        let mut is_due = false;
        for state in states.iter() {
            let judge = |found: &Found| {
                let judged = histories.judge(found, &Moment::of(&state));
                judged.unwrap_or_else(|why| panic!("{state}: transaction {}: {why}", found.generation));
            };
            let (found, has_first_superblocks) = self.examine(&state.images, &state);
            judge(&found);
            self.tally.states += 1;
            let Some((disks, every)) = kernel else { continue };
            is_due |= state.index % every == every / 2;
            if is_due && has_first_superblocks {
                is_due = false;
                self.tally.mounted += 1;
                judge(&Found { generation: found.generation, ..mounted(disks, &state.images) });
            }
        }
    }

    /// Reads a state, unless one with the same content was read lately.
    pub fn examine(&mut self, images: &[Image], what: &dyn std::fmt::Display) -> (Rc<Found>, bool) {
        let is_same =
            |one: &Examined| one.footprints.iter().zip(images).all(|(footprint, of)| footprint.is_same_in(of));
        let examined = match self.remembered.iter().position(is_same) {
            Some(index) => self.remembered.remove(index).expect("it was found"),
            None => {
                self.tally.distinct += 1;
                examine(images, self.expects, what)
            }
        };
        let result = (Rc::clone(&examined.found), examined.has_first_superblocks);
        self.remembered.push_front(examined);
        self.remembered.truncate(REMEMBERED);
        result
    }
}

fn examine(images: &[Image], expects: Expects, what: &dyn std::fmt::Display) -> Examined {
    let watched: Vec<_> = images.iter().map(|image| image.watched_device("after a power cut")).collect();
    let (devices, watched): (Vec<_>, Vec<Watched>) = watched.into_iter().unzip();
    let filesystem = open_devices(devices.clone()).unwrap_or_else(|error| panic!("{what}: {error}"));
    let is_stale = filesystem.storage().devices.iter().any(|(_, device)| device.is_stale);
    assert!(!is_stale || expects == Expects::Faults, "{what}: a device missed more than a superblock");
    let lost_first = filesystem.storage().devices.bad_superblocks().iter().any(|copy| {
        use sealblock_btrfs::CopyFault;
        copy.mirror == 1 && !matches!(copy.fault, CopyFault::Old { .. } | CopyFault::Differs(_))
    });
    let mut found = findings(&filesystem);
    let is_copy = |finding: &str| expects == Expects::Faults && finding.contains("copy ");
    found.retain(|finding| !finding.starts_with("superblock: ") && !is_copy(finding));
    assert!(found.is_empty(), "{what}: {found:#?}");
    let found = read(&filesystem).unwrap_or_else(|error| panic!("{what}: {error}"));
    if !is_stale {
        go_on(&filesystem, &found, expects, what);
        let after = open_devices(devices).unwrap();
        let (mut findings, again) = (findings(&after), read(&after).unwrap());
        findings.retain(|finding| !is_copy(finding));
        assert!(findings.is_empty(), "{what}, after the opening transaction: {findings:#?}");
        assert!(again.generation > found.generation);
    }
    let footprints = watched.iter().map(Watched::footprint).collect();
    Examined { footprints, found: Rc::new(found), has_first_superblocks: !lost_first }
}

/// Opens it for writing, and deletes what is to be deleted.
fn go_on(filesystem: &Filesystem, found: &Found, expects: Expects, what: &dyn std::fmt::Display) {
    let engine = block_on(Engine::open(filesystem, EngineOptions::default()));
    let engine = engine.unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(engine.durable_generation(), found.generation + 3);
    block_on(engine.recover_orphans(ROOT)).unwrap();
    while let Some(id) = block_on(engine.change(|transaction| transaction.next_dead(0))).unwrap() {
        drop_all(&engine, id);
    }
    block_on(engine.commit()).unwrap();
    for (name, entry) in &found.names {
        let place = sealblock_btrfs_engine::names::Place { directory: 256, name: name.as_bytes() };
        let entry_now = block_on(engine.lookup(ROOT, place)).unwrap().expect("a name that was there");
        if let (FoundEntry::File(content), sealblock_btrfs_engine::operations::Resolved::Inode(ino)) =
            (entry, entry_now.target)
        {
            let now = read_all(&engine, ino, content.len() + 1);
            assert_eq!(now.len(), content.len(), "{what}: {name}");
            assert_same(&now, content);
        }
    }
    let bad = engine.take_bad_copies();
    assert!(bad.is_empty() || expects == Expects::Faults, "{what}: a bad copy was read");
}

/// Drops the nodes of a deleted subvolume.
pub fn drop_all(engine: &Engine, id: u64) {
    loop {
        let step = block_on(engine.change(|transaction| {
            transaction.open_tree(id)?;
            transaction.drop_step(id)
        }));
        match step.unwrap() {
            Dropped::Some => {}
            Dropped::All => return,
            Dropped::LeftToLinux => panic!("Linux never began"),
        }
    }
}

/// Reads all.
pub fn read(filesystem: &Filesystem) -> Result<Found, String> {
    block_on(async {
        let fail = |error: sealblock_btrfs::FsError| error.to_string();
        let top = filesystem.top(&filesystem.subvolume(ROOT).await.map_err(fail)?).await.map_err(fail)?;
        let mut names = BTreeMap::new();
        for (name, target, inode) in entries(filesystem, &top).await? {
            let entry = match (target, inode) {
                (Target::Inode(_), Some(inode)) => FoundEntry::File(content(filesystem, &inode).await?),
                (Target::Subvolume(_), Some(top)) => {
                    let mut files = BTreeMap::new();
                    for (name, _, inode) in entries(filesystem, &top).await? {
                        // What is left of other snapshots leads nowhere.
                        if let Some(inode) = inode {
                            files.insert(name, content(filesystem, &inode).await?);
                        }
                    }
                    FoundEntry::Subvolume(files)
                }
                _ => return Err(format!("{name} leads nowhere")),
            };
            names.insert(name, entry);
        }
        Ok(Found { generation: filesystem.superblock().generation.get(), names })
    })
}

async fn entries(filesystem: &Filesystem, top: &Inode) -> Result<Vec<(String, Target, Option<Inode>)>, String> {
    let fail = |error: sealblock_btrfs::FsError| error.to_string();
    let (found, lost) = filesystem.reachable_entries(top).await.map_err(fail)?;
    if let Some(error) = lost.into_iter().next() {
        return Err(fail(error));
    }
    let mut all = Vec::new();
    for entry in found {
        let inode = filesystem.follow(top, &entry).await.map_err(fail)?;
        all.push((String::from_utf8_lossy(&entry.name).into_owned(), entry.target, inode));
    }
    Ok(all)
}

/// The bytes of a file, which has no data behind its end.
async fn content(filesystem: &Filesystem, inode: &Inode) -> Result<Vec<u8>, String> {
    let fail = |error: sealblock_btrfs::FsError| error.to_string();
    let mut all = Vec::with_capacity(inode.size() as usize);
    while (all.len() as u64) < inode.size() {
        all.extend_from_slice(&filesystem.read(inode, all.len() as u64, 1 << 20).await.map_err(fail)?);
    }
    let end = inode.size().next_multiple_of(4096);
    let behind = filesystem.parts(inode, end, i64::MAX as u64).await.map_err(fail)?;
    match behind.iter().find(|part| !matches!(part.content, Content::Hole | Content::Prealloc(_))) {
        Some(part) => Err(format!("inode {} of {} bytes has data at {}", inode.ino, inode.size(), part.start)),
        None => Ok(all),
    }
}

/// The kernel mounts images, reads all, writes something, and scrubs.
fn mounted(disks: &Disks, images: &[Image]) -> Found {
    for (image, path) in images.iter().zip(&disks.images) {
        image.save(path).unwrap();
    }
    let mount = Mount::new(&disks.images, "noatime").unwrap();
    let read_files = |path: std::path::PathBuf| {
        let entries = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap());
        let files = entries.filter(|entry| entry.file_type().unwrap().is_file());
        let name = |entry: &std::fs::DirEntry| entry.file_name().into_string().unwrap();
        files.map(|entry| (name(&entry), std::fs::read(entry.path()).unwrap())).collect::<BTreeMap<_, _>>()
    };
    let files = read_files(mount.path(""));
    let mut names: BTreeMap<String, FoundEntry> =
        files.into_iter().map(|(name, content)| (name, FoundEntry::File(content))).collect();
    for entry in std::fs::read_dir(mount.path("")).unwrap().map(|entry| entry.unwrap()) {
        if entry.file_type().unwrap().is_dir() {
            let name = entry.file_name().into_string().unwrap();
            names.insert(name, FoundEntry::Subvolume(read_files(entry.path())));
        }
    }
    std::fs::write(mount.path("of the kernel"), vec![1; 100_000]).unwrap();
    mount.sync().unwrap();
    run("btrfs", ["subvolume", "sync", mount.path("").to_str().unwrap()]).unwrap();
    assert_scrubbed(&mount);
    mount.unmount().unwrap();
    Found { generation: 0, names }
}
