//! The data of files under random operations, compared with a model, our own check, `btrfs check` and the kernel.

use futures_executor::block_on;
use sealblock_btrfs_engine::data::FilePlace;
use sealblock_btrfs_engine::engine::{Engine, EngineOptions};
use sealblock_proofs_btrfs_images::programs::{Mount, run};
use sealblock_runtime_memory::Slice;

use crate::disks::Disks;
use crate::files::{Kind, ROOT, assert_content, assert_same, create, is_full, read_all, read_committed, write};
use crate::{assert_scrubbed, share};

const KINDS: [Kind; 9] = [
    Kind::Plain,
    Kind::Compressed("zlib"),
    Kind::NoCow,
    Kind::Compressed("lzo"),
    Kind::NoSum,
    Kind::Compressed("zstd"),
    Kind::Plain,
    Kind::Compress,
    Kind::NoCow,
];
/// The longest file.
const MOST: u64 = 5 << 20;

struct Model {
    random: fastrand::Rng,
    files: Vec<ModelFile>,
    /// What the last commit has, if that is known.
    committed: Option<Vec<Vec<u8>>>,
    generation: u64,
    /// What the files of each snapshot have.
    snapshots: Vec<Vec<Vec<u8>>>,
}

struct ModelFile {
    name: String,
    ino: u64,
    kind: Kind,
    content: Vec<u8>,
}

/// A number of bytes of any magnitude.
fn length(random: &mut fastrand::Rng, most: u64) -> u64 {
    let bits = random.u32(0..22);
    random.u64(1..=(1_u64 << bits).max(2)).min(most)
}

fn noise(random: &mut fastrand::Rng, bytes: u64) -> Vec<u8> {
    let mut data = vec![random.u8(..); bytes as usize];
    match random.u8(..3) {
        0 => random.fill(&mut data),
        1 => {
            // Some of it can be compressed.
            let half = data.len() / 2;
            random.fill(&mut data[half..]);
        }
        _ => {}
    }
    data
}

impl Model {
    fn new(engine: &Engine, seed: u64) -> Model {
        let file = |(index, kind): (usize, &Kind)| {
            let name = format!("file{index}");
            ModelFile { ino: create(engine, &name, *kind), name, kind: *kind, content: Vec::new() }
        };
        let files = KINDS.iter().enumerate().map(file).collect();
        Model { random: fastrand::Rng::with_seed(seed), files, committed: None, generation: 0, snapshots: Vec::new() }
    }

    /// All files are committed as they are now.
    fn committed(&mut self, engine: &Engine) {
        self.generation = engine.durable_generation();
        self.committed = Some(self.files.iter().map(|file| file.content.clone()).collect());
    }

    /// A crash now would leave what the last commit has. Data that are written in place may be newer.
    fn assert_committed(&mut self, engine: &Engine, disks: &Disks) {
        if engine.durable_generation() != self.generation {
            self.committed = None;
        }
        for (file, content) in self.files.iter().zip(self.committed.iter().flatten()) {
            if file.kind != Kind::NoCow {
                let found = read_committed(disks, file.ino);
                assert_eq!(found.len(), content.len(), "{:?}", file.kind);
                assert_same(&found, content);
            }
        }
    }

    /// One random operation.
    fn step(&mut self, engine: &Engine) {
        let index = self.random.usize(..self.files.len());
        let random = &mut self.random;
        let file = &mut self.files[index];
        let (ino, size) = (file.ino, file.content.len() as u64);
        let aligned = random.bool();
        let align = |at: u64| if aligned { at / 4096 * 4096 } else { at };
        // Mostly within the file, often at its end.
        let offset = match random.u8(..8) {
            0 => size,
            1 => align(random.u64(..MOST)),
            _ => align(random.u64(..=size)),
        };
        let bytes = length(random, MOST - offset.min(MOST - 1));
        let end = offset + bytes;
        match random.u8(..22) {
            0..=8 => {
                let data = noise(random, bytes);
                write(engine, ino, offset, &data);
                grow(&mut file.content, end);
                file.content[offset as usize..end as usize].copy_from_slice(&data);
            }
            9 | 10 => {
                let size = if random.bool() { offset } else { random.u64(..=(size + 1)) };
                block_on(engine.truncate(ROOT, ino, size)).unwrap();
                file.content.resize(size as usize, 0);
            }
            11 => {
                block_on(engine.punch(ROOT, ino, offset, bytes)).unwrap();
                zero(&mut file.content, offset, end);
            }
            12 => {
                let keeps_size = random.bool();
                block_on(engine.zero_range(ROOT, ino, (offset, bytes), keeps_size)).unwrap();
                zero(&mut file.content, offset, end);
                grow(&mut file.content, if keeps_size { 0 } else { end });
            }
            13 | 14 => {
                let keeps_size = random.bool();
                block_on(engine.allocate_range(ROOT, ino, (offset, bytes), keeps_size)).unwrap();
                grow(&mut file.content, if keeps_size { 0 } else { end });
            }
            15 | 16 => self.clone_some(engine, index),
            17 => {
                block_on(engine.fsync(ROOT, ino)).unwrap();
                self.committed(engine);
            }
            18 => block_on(engine.sync_data(ROOT, ino)).unwrap(),
            19 | 20 if file.kind == Kind::NoCow => {
                block_on(engine.write_zeroes(ROOT, ino, offset, bytes)).unwrap();
                zero(&mut file.content, offset, end);
                grow(&mut file.content, end);
            }
            _ => {
                let found = block_on(engine.read(ROOT, ino, offset, bytes)).unwrap();
                let (from, to) = (offset.min(size) as usize, end.min(size) as usize);
                assert_eq!(found.len(), to - from);
                assert_same(&found, &file.content[from..to]);
            }
        }
    }

    fn clone_some(&mut self, engine: &Engine, target: usize) {
        let random = &mut self.random;
        let source = random.usize(..self.files.len());
        let (from, to) = (&self.files[source], &self.files[target]);
        let size = from.content.len() as u64;
        let start = random.u64(..=size) / 4096 * 4096;
        let at = random.u64(..MOST) / 4096 * 4096;
        let mut bytes = length(random, size - start).div_ceil(4096) * 4096;
        if start + bytes > size {
            bytes = size - start;
        }
        let place = |file: &ModelFile, offset| FilePlace { root: ROOT, ino: file.ino, offset };
        let cloned = block_on(engine.clone_range(place(from, start), place(to, at), bytes));
        let is_empty = bytes == 0;
        let ends_inside = !bytes.is_multiple_of(4096) && at + bytes < to.content.len() as u64;
        let overlaps =
            source == target && start < at + bytes.next_multiple_of(4096) && at < start + bytes.next_multiple_of(4096);
        let is_inline = block_on(engine.read(ROOT, from.ino, 0, 1)).is_ok() && size <= 4096;
        // The devices have tags, which zeroes that are written in place lack.
        let lacks_tags = from.kind == Kind::NoCow && to.kind != Kind::NoCow;
        let may = !ends_inside && !overlaps && from.kind.has_sums() == to.kind.has_sums() && !lacks_tags;
        match cloned {
            Ok(()) => {
                assert!(may || is_empty || is_inline, "{bytes} bytes from {start} of {size} to {at}");
                let data = from.content[start as usize..(start + bytes) as usize].to_vec();
                let content = &mut self.files[target].content;
                if !is_empty {
                    grow(content, at + bytes);
                    content[at as usize..(at + bytes) as usize].copy_from_slice(&data);
                }
            }
            Err(error) => assert!(!may || is_empty, "{bytes} bytes from {start} of {size} to {at}: {error}"),
        }
    }

    fn assert_same(&self, engine: &Engine) {
        self.files.iter().for_each(|file| assert_content(engine, file.ino, &file.content));
    }

    /// The kernel finds the same, takes a snapshot, and changes some.
    fn take_to_kernel(&mut self, disks: &Disks) {
        let mount = Mount::new(&disks.images, "noatime").unwrap();
        for file in &self.files {
            let found = std::fs::read(mount.path(&file.name)).unwrap();
            assert_eq!(found.len(), file.content.len(), "{} {:?}", file.name, file.kind);
            assert_same(&found, &file.content);
        }
        assert_scrubbed(&mount);
        for (number, contents) in self.snapshots.iter().enumerate() {
            for (file, content) in self.files.iter().zip(contents) {
                assert_same(&std::fs::read(mount.path(&format!("s{number}/{}", file.name))).unwrap(), content);
            }
        }
        let snapshot = mount.path(&format!("s{}", self.snapshots.len()));
        let [top, snapshot] = [mount.path(""), snapshot].map(|path| path.to_str().unwrap().to_owned());
        run("btrfs", ["subvolume", "snapshot", &top, &snapshot]).unwrap();
        self.snapshots.push(self.files.iter().map(|file| file.content.clone()).collect());
        for file in &mut self.files {
            let (at, bytes) = (self.random.u64(..MOST), length(&mut self.random, 300_000));
            let data = noise(&mut self.random, bytes);
            let opened = std::fs::File::options().write(true).open(mount.path(&file.name)).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&opened, &data, at).unwrap();
            grow(&mut file.content, at + bytes);
            file.content[at as usize..(at + bytes) as usize].copy_from_slice(&data);
        }
        mount.unmount().unwrap();
        disks.load();
    }
}

fn grow(content: &mut Vec<u8>, end: u64) {
    content.resize(content.len().max(end as usize), 0);
}

fn zero(content: &mut [u8], from: u64, to: u64) {
    let end = (to as usize).min(content.len());
    content[(from as usize).min(end)..end].fill(0);
}

fn random_operations(disks: &Disks, seed: u64, steps: usize) {
    let max_dirty_bytes = if seed.is_multiple_of(2) { 4 << 20 } else { 64 << 20 };
    let options = EngineOptions { max_dirty_bytes, ..EngineOptions::default() };
    let mut engine = block_on(Engine::open(&disks.open(), options)).unwrap();
    let mut model = Model::new(&engine, seed);
    let steps = share(steps);
    for round in 0..3 {
        for step in 0..steps {
            model.step(&engine);
            if step % 20 == 19 {
                model.assert_committed(&engine, disks);
            }
            if step % (steps / 4) == 0 {
                block_on(engine.commit()).unwrap();
                model.committed(&engine);
                disks.assert_consistent();
            }
        }
        model.assert_same(&engine);
        block_on(engine.commit()).unwrap();
        drop(engine);
        disks.assert_consistent();
        disks.assert_checked_by_program();
        model.take_to_kernel(disks);
        engine = block_on(Engine::open(&disks.open(), options)).unwrap();
        model.assert_same(&engine);
        assert!(engine.take_bad_copies().is_empty(), "round {round}");
    }
}

fn random_on(devices: usize, options: &[&str], (seed, steps): (u64, usize)) {
    let Some(disks) = Disks::make(devices, 512, options) else { return };
    random_operations(&disks, seed, steps);
}

#[test]
fn random_operations_on_one_device() {
    random_on(1, &["-m", "single"], (1, 500));
    random_on(1, &["-m", "dup", "-n", "4096"], (2, 400));
}

#[test]
fn random_operations_on_mirrors_and_stripes() {
    random_on(2, &["-m", "raid1", "-d", "raid1", "--csum", "xxhash"], (3, 250));
    random_on(4, &["-m", "raid10", "-d", "raid10", "--csum", "sha256"], (4, 200));
    random_on(2, &["-m", "raid1", "-d", "raid0", "--csum", "blake2"], (5, 200));
}

#[test]
fn random_operations_with_data_and_metadata_in_one_group_and_with_items_for_holes() {
    random_on(1, &["--mixed", "-n", "4096"], (6, 300));
    random_on(1, &["-m", "single", "-O", "^no-holes"], (7, 300));
}

#[test]
fn a_thousand_random_writes_in_one_transaction() {
    let Some(disks) = Disks::make(1, 384, &["-m", "dup"]) else { return };
    let options = EngineOptions { max_dirty_bytes: 1 << 30, ..EngineOptions::default() };
    let engine = block_on(Engine::open(&disks.open(), options)).unwrap();
    let ino = create(&engine, "file", Kind::Plain);
    let mut random = fastrand::Rng::with_seed(1);
    let mut content = noise(&mut random, 16 << 20);
    write(&engine, ino, 0, &content);
    let before = block_on(engine.commit()).unwrap();
    for _ in 0..1000 {
        let at = random.u64(..4096) * 4096;
        let data = noise(&mut random, 4096);
        write(&engine, ino, at, &data);
        content[at as usize..][..4096].copy_from_slice(&data);
    }
    assert_eq!(engine.durable_generation(), before, "all of it is one transaction");
    assert_eq!(block_on(engine.fsync(ROOT, ino)).unwrap(), before + 1);
    assert_content(&engine, ino, &content);
    disks.assert_consistent();
    disks.assert_checked_by_program();
    let mount = Mount::new(&disks.images, "noatime").unwrap();
    assert_same(&std::fs::read(mount.path("file")).unwrap(), &content);
    mount.unmount().unwrap();
}

/// Fills all space with files, and truncates them, again and again.
fn fill_and_empty(options: &[&str], piece: usize) {
    let Some(disks) = Disks::make(1, 256, options) else { return };
    let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
    let files: Vec<u64> = (0..4).map(|index| create(&engine, &format!("f{index}"), Kind::Plain)).collect();
    let mut random = fastrand::Rng::with_seed(3);
    let mut first = 0;
    for round in 0..share(20) {
        let data = noise(&mut random, piece as u64);
        let (mut total, mut sizes) = (0, [0_u64; 4]);
        loop {
            let index = random.usize(..4);
            match block_on(engine.write(ROOT, files[index], sizes[index], Slice::copy_from(&data))) {
                Ok(bytes) => {
                    total += bytes;
                    sizes[index] += bytes;
                }
                Err(error) => {
                    assert!(is_full(&error), "{error}");
                    break;
                }
            }
        }
        first = if round == 0 { total } else { first };
        assert!(total > first - first / 8, "round {round}: {total} bytes fit, and {first} at first");
        for (ino, size) in files.iter().zip(sizes) {
            let some = block_on(engine.read(ROOT, *ino, size.saturating_sub(4096), 4096)).unwrap();
            assert_eq!(some.len() as u64, size.min(4096));
            block_on(engine.truncate(ROOT, *ino, 0)).unwrap();
        }
        if round % 5 == 4 {
            block_on(engine.commit()).unwrap();
            disks.assert_consistent();
        }
    }
    disks.assert_checked_by_program();
}

#[test]
fn full_disks_are_emptied_again() {
    fill_and_empty(&["-m", "single"], 1_000_000);
    fill_and_empty(&["--mixed", "-n", "4096"], 300_000);
}

#[test]
fn arguments_that_are_impossible_are_refused_and_change_nothing() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
    let ino = create(&engine, "file", Kind::Plain);
    write(&engine, ino, 0, &[1; 5000]);
    let data = || Slice::copy_from(&[2; 10]);
    assert!(block_on(engine.write(ROOT, ino, u64::MAX - 5, data())).is_err());
    assert!(block_on(engine.write(ROOT, ino, i64::MAX as u64 - 5, data())).is_err());
    assert!(block_on(engine.write(ROOT, 256, 0, data())).is_err(), "a directory");
    assert!(block_on(engine.write(ROOT, 9999, 0, data())).is_err(), "no inode");
    assert!(block_on(engine.write(7, ino, 0, data())).is_err(), "no subvolume");
    assert!(block_on(engine.truncate(ROOT, ino, u64::MAX)).is_err());
    assert!(block_on(engine.allocate_range(ROOT, ino, (u64::MAX, 5), true)).is_err());
    assert!(block_on(engine.punch(ROOT, ino, u64::MAX, 5)).is_err());
    assert!(block_on(engine.punch(ROOT, ino, 0, 0)).is_err());
    assert!(block_on(engine.allocate_range(ROOT, ino, (9000, 0), false)).is_err());
    let place = |offset| FilePlace { root: ROOT, ino, offset };
    for (from, to, bytes) in [(0, 4096, 8192), (1, 8192, 4096), (0, 1, 4096), (0, 0, 4096), (0, u64::MAX, 4096)] {
        assert!(block_on(engine.clone_range(place(from), place(to), bytes)).is_err(), "{from} {to} {bytes}");
    }
    assert_eq!(block_on(engine.write(ROOT, ino, 0, Slice::empty())).unwrap(), 0);
    assert_eq!(block_on(engine.read(ROOT, ino, u64::MAX, 5)).unwrap().len(), 0);
    assert_eq!(read_all(&engine, ino, 6000), [1; 5000]);
    block_on(engine.commit()).unwrap();
    disks.assert_consistent();
}

#[test]
fn the_kernel_sees_extents_that_are_compressed_preallocated_and_overwritten_in_place() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
    let text = b"compressible ".repeat(40_000);
    for value in ["zlib", "lzo", "zstd"] {
        let ino = create(&engine, value, Kind::Compressed(value));
        write(&engine, ino, 0, &text);
        write(&engine, create(&engine, &format!("small {value}"), Kind::Compressed(value)), 0, &text[..4096]);
    }
    let preallocated = create(&engine, "preallocated", Kind::Plain);
    block_on(engine.allocate_range(ROOT, preallocated, (0, 1 << 20), false)).unwrap();
    write(&engine, preallocated, 100_000, &text[..50_000]);
    let in_place = create(&engine, "in place", Kind::NoCow);
    write(&engine, in_place, 0, &text);
    block_on(engine.commit()).unwrap();
    let extents = |name: &str| {
        disks.save();
        let mount = Mount::new(&disks.images, "noatime,ro").unwrap();
        let listed = run("filefrag", ["-v", mount.path(name).to_str().unwrap()]).unwrap();
        let content = std::fs::read(mount.path(name)).unwrap();
        mount.unmount().unwrap();
        (listed, content)
    };
    for value in ["zlib", "lzo", "zstd"] {
        let (listed, content) = extents(value);
        assert_eq!(listed.matches("encoded").count(), text.len().div_ceil(128 << 10), "{value}: {listed}");
        assert_same(&content, &text);
        let (listed, content) = extents(&format!("small {value}"));
        assert!(listed.contains("inline"), "{listed}");
        assert_same(&content, &text[..4096]);
    }
    let (listed, content) = extents("preallocated");
    assert_eq!(listed.matches("unwritten").count(), 2, "{listed}");
    assert_same(&content[100_000..150_000], &text[..50_000]);
    let before = extents("in place").0;
    write(&engine, in_place, 5000, &[9; 70_000]);
    block_on(engine.commit()).unwrap();
    let (after, content) = extents("in place");
    assert_eq!(before, after, "nothing moved");
    assert_same(&content[5000..75_000], &[9; 70_000]);
    drop(engine);
    disks.assert_checked_by_program();
}
