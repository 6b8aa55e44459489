//! Files that a file system must keep: a writer that records what `fsync` acknowledged, and a check of exactly that.
//!
//! The writer works in batches. In each batch it changes pages in place, adds a file and removes one, waits a moment,
//! and then calls `fsync` for each file. Half of the pages are written with direct I/O, so that the device has
//! acknowledged them but not flushed them. Invariant: between two batches, `fsync` has acknowledged everything that is
//! recorded, and nothing else was written. So every page must have the recorded content, no file may be missing, and no
//! removed file may exist.
//!
//! The record is in memory, and is also written to a file outside the file system under test.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::fs::OFlags;

use super::blocks::Pages;

const PAGE_BYTES: usize = 4096;
/// The number of files that are changed in place, and the pages of each.
const IN_PLACE: usize = 8;
const IN_PLACE_PAGES: usize = 32;
/// The number of added files that exist at a time, and the maximum number of pages of each.
const ADDED: usize = 24;
const ADDED_PAGES: usize = 8;
/// The number of removed files that must stay absent.
const REMOVED: usize = 64;
/// The maximum time in a guest that pages stay unflushed.
const LONGEST_PAUSE_MS: u64 = 250;
/// The maximum number of wrong pages in a report.
const MOST_NAMED: usize = 20;

/// The content that the file system has acknowledged.
#[derive(Debug, Default, PartialEq, Eq)]
struct Promised {
    /// The version of each page of each file.
    files: BTreeMap<String, Vec<u64>>,
    /// Files that must not exist.
    removed: BTreeSet<String>,
}

/// A page's content: its version, and bytes that are unique for the page and the version.
fn page(name: &str, index: usize, version: u64) -> Vec<u8> {
    let name_sum = name
        .bytes()
        .fold(0xCBF2_9CE4_8422_2325, |sum: u64, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3));
    let mut bytes = vec![0; PAGE_BYTES];
    fastrand::Rng::with_seed(name_sum ^ (index as u64) << 48 ^ version.rotate_left(20)).fill(&mut bytes);
    bytes[..8].copy_from_slice(&version.to_le_bytes());
    bytes
}

impl Promised {
    fn to_text(&self) -> String {
        let line = |(name, versions): (&String, &Vec<u64>)| {
            let versions: Vec<String> = versions.iter().map(u64::to_string).collect();
            format!("{name} {}\n", versions.join(" "))
        };
        let removed = self.removed.iter().map(|name| format!("-{name}\n"));
        self.files.iter().map(line).chain(removed).collect()
    }

    fn parse(text: &str) -> Result<Promised> {
        let mut promised = Promised::default();
        for line in text.lines() {
            if let Some(name) = line.strip_prefix('-') {
                promised.removed.insert(name.to_owned());
                continue;
            }
            let (name, versions) = line.split_once(' ').context("a file without pages")?;
            let versions = versions.split(' ').map(|word| word.parse().context("reading a version"));
            promised.files.insert(name.to_owned(), versions.collect::<Result<_>>()?);
        }
        Ok(promised)
    }

    /// Checks every page with direct I/O. Returns the faults, one per line.
    fn wrong(&self, folder: &Path) -> Result<Vec<String>> {
        let mut wrong = Vec::new();
        for (name, versions) in &self.files {
            let path = folder.join(name);
            let file = match open(&path, Access::DirectRead) {
                Ok(file) => file,
                Err(error) => {
                    wrong.push(format!("{name} is missing: {error:#}"));
                    continue;
                }
            };
            let bytes = file.metadata().with_context(|| format!("asking for the length of {name}"))?.len();
            if bytes != (versions.len() * PAGE_BYTES) as u64 {
                wrong.push(format!("{name} has {bytes} bytes, not {}", versions.len() * PAGE_BYTES));
                continue;
            }
            let mut content = Pages::new(versions.len() * PAGE_BYTES);
            file.read_exact_at(content.bytes(), 0).with_context(|| format!("reading {name}"))?;
            for (index, (got, version)) in content.bytes().chunks(PAGE_BYTES).zip(versions).enumerate() {
                if got != page(name, index, *version) {
                    let found = u64::from_le_bytes(got[..8].try_into().unwrap_or_default());
                    let is_old = found < *version && got == page(name, index, found);
                    let what = if is_old { format!("version {found}") } else { "something else".to_owned() };
                    wrong.push(format!("page {index} of {name} is {what}, not version {version}"));
                }
            }
        }
        let back = self.removed.iter().filter(|name| folder.join(name).exists());
        wrong.extend(back.map(|name| format!("{name} was removed and is there")));
        Ok(wrong)
    }

    /// The same, after dropping the kernel's caches.
    ///
    /// # Errors
    /// If a page or a file is wrong.
    fn check(&self, folder: &Path) -> Result<()> {
        fs::write("/proc/sys/vm/drop_caches", "3").context("dropping caches")?;
        let wrong = self.wrong(folder)?;
        if wrong.is_empty() {
            return Ok(());
        }
        wrong.iter().take(MOST_NAMED).for_each(|line| println!("{line}"));
        bail!("{} of {} files' pages or names are wrong in {}", wrong.len(), self.files.len(), folder.display());
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Write,
    DirectWrite,
    DirectRead,
}

fn open(path: &Path, access: Access) -> Result<File> {
    let flags = if access == Access::Write { 0 } else { OFlags::DIRECT.bits() as i32 };
    let writes = access != Access::DirectRead;
    let file =
        OpenOptions::new().read(true).write(writes).create(access == Access::Write).custom_flags(flags).open(path);
    file.with_context(|| format!("opening {}", path.display()))
}

/// The writer of one file system.
struct Writer {
    folder: PathBuf,
    promised: Promised,
    random: fastrand::Rng,
    /// The newest version of any page, which also numbers files.
    version: u64,
    /// The number of successful calls of `fsync`.
    acknowledged: u64,
    /// The maximum time that pages stay unflushed.
    longest_pause_ms: u64,
}

impl Writer {
    fn new(folder: &Path, seed: u64, longest_pause_ms: u64) -> Writer {
        let (folder, random) = (folder.to_owned(), fastrand::Rng::with_seed(seed));
        Writer { folder, promised: Promised::default(), random, version: 0, acknowledged: 0, longest_pause_ms }
    }

    /// Calls `fsync`. After an error it is not called again: the kernel may have dropped the data that it could not
    /// write.
    fn sync(&mut self, file: &File, name: &str) -> Result<()> {
        file.sync_all().with_context(|| format!("fsync of {name}"))?;
        self.acknowledged += 1;
        Ok(())
    }

    /// Writes pages of a file and records their versions.
    fn put(&mut self, name: &str, first: usize, pages: usize, access: Access) -> Result<File> {
        self.version += 1;
        let mut memory = Pages::new(pages * PAGE_BYTES);
        let mut versions = self.promised.files.remove(name).unwrap_or_default();
        versions.resize(versions.len().max(first + pages), 0);
        for (index, chunk) in (first..).zip(memory.bytes().chunks_exact_mut(PAGE_BYTES)) {
            chunk.copy_from_slice(&page(name, index, self.version));
            versions[index] = self.version;
        }
        self.promised.files.insert(name.to_owned(), versions);
        let file = open(&self.folder.join(name), access)?;
        file.write_all_at(memory.bytes(), (first * PAGE_BYTES) as u64).with_context(|| format!("writing {name}"))?;
        Ok(file)
    }

    /// Creates the files that are changed in place.
    fn lay_out(&mut self) -> Result<()> {
        for number in 0..IN_PLACE {
            let name = format!("in-place-{number}");
            let file = self.put(&name, 0, IN_PLACE_PAGES, Access::Write)?;
            self.sync(&file, &name)?;
        }
        self.sync_folder()
    }

    fn sync_folder(&mut self) -> Result<()> {
        let folder = File::open(&self.folder).context("opening the folder")?;
        self.sync(&folder, "the folder")
    }

    /// Makes changes, waits, and calls `fsync` for all of them.
    fn batch(&mut self) -> Result<()> {
        let mut written = Vec::new();
        for _ in 0..self.random.usize(1..=4) {
            let name = format!("in-place-{}", self.random.usize(0..IN_PLACE));
            let first = self.random.usize(0..IN_PLACE_PAGES);
            let pages = self.random.usize(1..=(IN_PLACE_PAGES - first).min(8));
            let access = if self.random.bool() { Access::DirectWrite } else { Access::Write };
            written.push((self.put(&name, first, pages, access)?, name));
        }
        let name = format!("added-{}", self.version + 1);
        let pages = self.random.usize(1..=ADDED_PAGES);
        written.push((self.put(&name, 0, pages, Access::Write)?, name));
        self.remove_one()?;
        thread::sleep(Duration::from_millis(self.random.u64(0..=self.longest_pause_ms)));
        for (file, name) in written {
            self.sync(&file, &name)?;
        }
        self.sync_folder()
    }

    /// Removes a random added file, if there are enough.
    fn remove_one(&mut self) -> Result<()> {
        let added: Vec<String> =
            self.promised.files.keys().filter(|name| name.starts_with("added-")).cloned().collect();
        if added.len() <= ADDED {
            return Ok(());
        }
        let name = &added[self.random.usize(0..added.len())];
        fs::remove_file(self.folder.join(name)).with_context(|| format!("removing {name}"))?;
        self.promised.files.remove(name);
        self.promised.removed.insert(name.clone());
        if self.promised.removed.len() > REMOVED {
            self.promised.removed.pop_first();
        }
        Ok(())
    }
}

/// The path of a control file of a writer: `CONTROL.ask`, `CONTROL.answer` or `CONTROL.list`.
fn beside(control: &Path, what: &str) -> PathBuf {
    control.with_extension(what)
}

/// Writes files until `CONTROL.ask` contains `end`, and leaves the record in `CONTROL.list`. Any other request is
/// answered once the current batch is durable and every page was checked. The answer has the request, the number of
/// acknowledged calls of `fsync`, and the number of files.
///
/// # Errors
/// If an operation fails that must succeed on a working device, or if a page is wrong.
pub fn write(folder: &Path, control: &Path, seed: u64) -> Result<()> {
    let mut writer = Writer::new(folder, seed, LONGEST_PAUSE_MS);
    writer.lay_out()?;
    let mut answered = String::new();
    loop {
        writer.batch()?;
        let asked = fs::read_to_string(beside(control, "ask")).unwrap_or_default().trim().to_owned();
        if asked == answered {
            continue;
        }
        if asked == "end" {
            let list = writer.promised.to_text();
            return fs::write(beside(control, "list"), list).context("writing what was promised");
        }
        writer.promised.check(folder)?;
        let answer = format!("{asked} {} {}\n", writer.acknowledged, writer.promised.files.len());
        let partial = beside(control, "partial");
        fs::write(&partial, answer).context("answering")?;
        fs::rename(partial, beside(control, "answer")).context("answering")?;
        answered = asked;
    }
}

/// Checks files against a recorded list.
///
/// # Errors
/// If a page is wrong, a file is missing, or a removed file exists.
pub fn check(folder: &Path, list: &Path) -> Result<()> {
    let text = fs::read_to_string(list).with_context(|| format!("reading {}", list.display()))?;
    Promised::parse(&text)?.check(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A writer that has run some batches in an existing folder.
    fn written(folder: &Path) -> Writer {
        let mut writer = Writer::new(folder, 7, 0);
        writer.lay_out().unwrap();
        (0..2 * ADDED).for_each(|_| writer.batch().unwrap());
        writer
    }

    #[test]
    fn acknowledged_files_are_there_and_every_kind_of_loss_is_reported() {
        // The folder is in the build folder, because on older kernels file systems in memory have no direct I/O.
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let writer = written(folder.path());
        let promised = Promised::parse(&writer.promised.to_text()).unwrap();
        assert_eq!(promised, writer.promised);
        assert_eq!(promised.wrong(folder.path()).unwrap(), Vec::<String>::new());
        assert_eq!(promised.files.len(), IN_PLACE + ADDED);
        assert!(!promised.removed.is_empty() && writer.acknowledged > 100);
        let version = promised.files["in-place-3"][5];
        let file = open(&folder.path().join("in-place-3"), Access::Write).unwrap();
        let expect = |bytes: Vec<u8>, what: &str| {
            file.write_all_at(&bytes, 5 * PAGE_BYTES as u64).unwrap();
            assert_eq!(
                promised.wrong(folder.path()).unwrap(),
                [format!("page 5 of in-place-3 is {what}, not version {version}")]
            );
        };
        expect(page("in-place-3", 5, version - 1), &format!("version {}", version - 1));
        expect(page("in-place-3", 6, version), "something else");
        expect(vec![0; PAGE_BYTES], "something else");
        file.write_all_at(&page("in-place-3", 5, version), 5 * PAGE_BYTES as u64).unwrap();
        let removed = promised.removed.first().unwrap();
        fs::write(folder.path().join(removed), "").unwrap();
        assert_eq!(promised.wrong(folder.path()).unwrap(), [format!("{removed} was removed and is there")]);
        fs::remove_file(folder.path().join(removed)).unwrap();
        file.set_len(PAGE_BYTES as u64).unwrap();
        fs::remove_file(folder.path().join("in-place-1")).unwrap();
        let wrong = promised.wrong(folder.path()).unwrap();
        assert!(wrong[0].starts_with("in-place-1 is missing") && wrong[1].starts_with("in-place-3 has 4096 bytes"));
        assert_eq!(wrong.len(), 2);
    }

    #[test]
    fn lists_that_are_none_are_refused() {
        for text in ["a", "a 1 x", "a "] {
            assert!(Promised::parse(text).is_err(), "{text:?}");
        }
    }
}
