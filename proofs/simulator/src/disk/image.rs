//! The content of a disk, and the contents that are possible after a power cut.
//!
//! An [`Image`] keeps, for each sector ever written, its durable content and every later version that is not known to
//! be durable, in the order in which the disk accepted them. A read returns the last version. A sync makes those
//! versions durable whose writes had returned before it, and drops the versions that they cover.
//!
//! Sectors share the memory of their write; bytes are copied only when they are read.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use sealblock_runtime_memory::Slice;

/// The bytes of one sector; `None` for zeroes.
pub(crate) type Content = Option<Slice>;

/// The write has not returned, so no sync covers it.
const NEVER: u64 = u64::MAX;

/// One write, shared by its versions.
#[derive(Clone, Debug)]
pub(crate) struct WriteMark(Rc<Mark>);

#[derive(Debug)]
struct Mark {
    /// The number of the write on its disk.
    number: u64,
    /// When it returned, as the number of returns that the disk had counted.
    returned: Cell<u64>,
}

impl WriteMark {
    pub(crate) fn new(number: u64) -> WriteMark {
        WriteMark(Rc::new(Mark { number, returned: Cell::new(NEVER) }))
    }

    pub(crate) fn number(&self) -> u64 {
        self.0.number
    }

    pub(crate) fn set_returned(&self, at: u64) {
        self.0.returned.set(at);
    }
}

/// A version of one sector that is not known to be durable.
#[derive(Clone, Debug)]
pub(crate) struct Version {
    pub(crate) content: Content,
    pub(crate) write: WriteMark,
    /// Its position in the order in which the disk accepted sectors.
    pub(crate) taken: u64,
}

/// One sector.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sector {
    pub(crate) durable: Content,
    pub(crate) versions: Vec<Version>,
}

impl Sector {
    fn visible(&self) -> &Content {
        self.versions.last().map_or(&self.durable, |version| &version.content)
    }
}

/// The state of one disk. Outlives the machines that use it.
#[derive(Clone, Debug)]
pub struct Image {
    sector_bytes: u32,
    len_bytes: u64,
    /// Its length after a power cut that undoes unsynced changes of the length.
    durable_len_bytes: u64,
    sectors: BTreeMap<u64, Sector>,
    dirty: BTreeSet<u64>,
    taken: u64,
    writes: u64,
    returns: u64,
    /// The number of its machine's boot; notes from another boot are invalid.
    boot: u64,
}

impl Image {
    /// A disk of zeroes.
    pub fn blank(sector_bytes: u32, len_bytes: u64) -> Image {
        Image {
            sector_bytes,
            len_bytes,
            durable_len_bytes: len_bytes,
            sectors: BTreeMap::new(),
            dirty: BTreeSet::new(),
            taken: 0,
            writes: 0,
            returns: 0,
            boot: 1,
        }
    }

    /// Bytes of a sector.
    pub fn sector_bytes(&self) -> u32 {
        self.sector_bytes
    }

    /// Bytes of the disk.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// The number of its machine's boot.
    pub fn boot(&self) -> u64 {
        self.boot
    }

    /// The machine was booted again.
    pub(crate) fn reboot(&mut self) {
        self.boot += 1;
    }

    /// Sectors whose visible content is not known to be durable.
    pub fn dirty_sectors(&self) -> usize {
        self.dirty.len()
    }

    /// Copies the visible content of a sector.
    pub fn read_sector(&self, sector: u64, into: &mut [u8]) {
        match self.sectors.get(&sector).and_then(|sector| sector.visible().as_ref()) {
            Some(bytes) => into.copy_from_slice(bytes),
            None => into.fill(0),
        }
    }

    /// Every sector that was ever written, with its visible content.
    pub fn visible(&self) -> impl Iterator<Item = (u64, &Slice)> {
        self.sectors.iter().filter_map(|(number, sector)| Some((*number, sector.visible().as_ref()?)))
    }

    /// Changes a sector without the machine's knowledge: bit rot, or a fuzzer's input.
    ///
    /// # Panics
    /// If `bytes` are not exactly one sector.
    pub fn damage_sector(&mut self, sector: u64, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.sector_bytes as usize, "damage comes by the sector");
        self.dirty.remove(&sector);
        self.sectors.insert(sector, Sector { durable: Some(Slice::copy_from(bytes)), versions: Vec::new() });
    }

    /// Changes the length. Content after the new end is gone at once, whichever length a power cut leaves.
    pub(crate) fn set_len(&mut self, len_bytes: u64) {
        self.len_bytes = len_bytes;
        let end = len_bytes / u64::from(self.sector_bytes);
        self.sectors.split_off(&end);
        self.dirty.split_off(&end);
    }

    /// True if a power cut may leave another length.
    pub(crate) fn is_len_open(&self) -> bool {
        self.len_bytes != self.durable_len_bytes
    }

    /// Decides the length: the new one, or the one before.
    pub(crate) fn resolve_len(&mut self, is_kept: bool) {
        if !is_kept {
            self.set_len(self.durable_len_bytes);
        }
        self.durable_len_bytes = self.len_bytes;
    }

    pub(crate) fn next_write(&mut self) -> WriteMark {
        self.writes += 1;
        WriteMark::new(self.writes)
    }

    pub(crate) fn next_return(&mut self) -> u64 {
        self.returns += 1;
        self.returns
    }

    /// The number of returns so far: a sync that starts now covers all writes counted in it.
    pub(crate) fn returns(&self) -> u64 {
        self.returns
    }

    /// Accepts one sector of a write.
    pub(crate) fn take(&mut self, sector: u64, content: Content, write: &WriteMark) {
        self.taken += 1;
        let version = Version { content, write: write.clone(), taken: self.taken };
        self.sectors.entry(sector).or_default().versions.push(version);
        self.dirty.insert(sector);
    }

    /// The sectors of a range that have content; zeroing changes no others.
    pub(crate) fn occupied(&self, first: u64, end: u64) -> Vec<u64> {
        self.sectors.range(first..end).map(|(number, _)| *number).collect()
    }

    /// Makes durable the versions whose writes are among the first `mark` returns.
    pub(crate) fn sync(&mut self, mark: u64) {
        self.durable_len_bytes = self.len_bytes;
        let sectors = &mut self.sectors;
        self.dirty.retain(|number| {
            let Some(sector) = sectors.get_mut(number) else { return false };
            let covered = sector.versions.iter().rposition(|version| version.write.0.returned.get() <= mark);
            if let Some(last) = covered {
                sector.durable = sector.versions.drain(..=last).next_back().and_then(|version| version.content);
            }
            !sector.versions.is_empty()
        });
    }

    /// Forgets that writes have returned: no later sync covers them, as after a failed fsync that dropped the dirty
    /// pages.
    pub(crate) fn lose_track(&mut self, mark: u64) {
        for number in &self.dirty {
            for version in self.sectors.get(number).into_iter().flat_map(|sector| &sector.versions) {
                if version.write.0.returned.get() <= mark {
                    version.write.set_returned(NEVER);
                }
            }
        }
    }

    /// Numbers of the dirty sectors.
    pub(crate) fn dirty(&self) -> Vec<u64> {
        self.dirty.iter().copied().collect()
    }

    pub(crate) fn sector(&self, number: u64) -> Option<&Sector> {
        self.sectors.get(&number)
    }

    /// Decides the content of a sector.
    pub(crate) fn resolve_sector(&mut self, number: u64, content: Content) {
        self.sectors.insert(number, Sector { durable: content, versions: Vec::new() });
        self.dirty.remove(&number);
    }

    /// Counts every write as returned: a process that opens the file after its writer was killed sees all of them.
    pub(crate) fn adopt_all(&mut self) {
        let returned = self.next_return();
        for number in &self.dirty {
            for version in self.sectors.get(number).into_iter().flat_map(|sector| &sector.versions) {
                version.write.set_returned(returned);
            }
        }
    }
}

/// The content of a write: bytes, or zeroes for a range.
#[derive(Clone)]
pub(super) enum Payload {
    Bytes(Slice),
    Zeroes,
}

/// A write that has not returned, and how much of it the disk has accepted.
pub(super) struct InFlight {
    pub(super) mark: WriteMark,
    pub(super) first: u64,
    pub(super) end: u64,
    pub(super) sector_bytes: usize,
    pub(super) payload: Payload,
    pub(super) taken: Vec<u64>,
}

impl InFlight {
    /// The sectors that the disk has not accepted yet.
    pub(super) fn left(&self, image: &Image) -> Vec<u64> {
        let all = match self.payload {
            Payload::Bytes(_) => (self.first..self.end).collect(),
            Payload::Zeroes => image.occupied(self.first, self.end),
        };
        all.into_iter().filter(|sector| !self.taken.contains(sector)).collect()
    }

    pub(super) fn content(&self, sector: u64) -> Content {
        let Payload::Bytes(bytes) = &self.payload else { return None };
        let at = (sector - self.first) as usize * self.sector_bytes;
        Some(bytes.slice(at..at + self.sector_bytes))
    }
}
