//! A medium in RAM on a shared snapshot: only changed parts are copied, so a trial costs only its changes.
//!
//! Sectors can be made unreadable. As on a disk with spare sectors, a write makes a sector readable again.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use rustc_hash::{FxHashMap, FxHashSet};
use sealblock_block::{Medium, MediumError, MediumErrorKind};
use sealblock_runtime_memory::{Buffer, Slice};

/// The unit of copying, in bytes.
const PAGE_BYTES: usize = 4096;
/// The unit of reads, writes and unreadable places.
const UNIT_BYTES: u64 = 512;

/// A snapshot with changes. Clones are the same medium.
#[derive(Clone)]
pub struct Overlay(Rc<State>);

struct State {
    base: Rc<Vec<u8>>,
    pages: RefCell<FxHashMap<usize, Box<[u8; PAGE_BYTES]>>>,
    unreadable: RefCell<FxHashSet<u64>>,
    sector_bytes: u32,
    read_only: bool,
    changes: Cell<u64>,
}

impl Overlay {
    /// A medium over this snapshot with sectors of this size, read-only or writable.
    pub fn new(base: &Rc<Vec<u8>>, sector_bytes: u32, read_only: bool) -> Overlay {
        Overlay(Rc::new(State {
            base: Rc::clone(base),
            pages: RefCell::default(),
            unreadable: RefCell::default(),
            sector_bytes,
            read_only,
            changes: Cell::new(0),
        }))
    }

    /// A copy with the same bytes, changes and unreadable places, which can be changed independently.
    pub fn fork(&self, read_only: bool) -> Overlay {
        Overlay(Rc::new(State {
            base: Rc::clone(&self.0.base),
            pages: RefCell::new(self.0.pages.borrow().clone()),
            unreadable: RefCell::new(self.0.unreadable.borrow().clone()),
            sector_bytes: self.0.sector_bytes,
            read_only,
            changes: Cell::new(0),
        }))
    }

    /// The number of writes, zeroings and punches, including refused ones.
    pub fn changes(&self) -> u64 {
        self.0.changes.get()
    }

    /// Makes these bytes unreadable, in whole sectors of 512 bytes.
    pub fn spoil(&self, start: u64, end: u64) {
        self.0.unreadable.borrow_mut().extend(start / UNIT_BYTES..end.div_ceil(UNIT_BYTES));
    }

    /// All current bytes.
    pub fn flatten(&self) -> Vec<u8> {
        let mut bytes = self.0.base.to_vec();
        for (page, changed) in self.0.pages.borrow().iter() {
            let start = page * PAGE_BYTES;
            let end = (start + PAGE_BYTES).min(bytes.len());
            bytes[start..end].copy_from_slice(&changed[..end - start]);
        }
        bytes
    }

    /// Copies bytes out, even unreadable ones.
    pub fn peek(&self, offset: u64, into: &mut [u8]) {
        let (pages, base) = (self.0.pages.borrow(), &self.0.base);
        each_page(offset as usize, into.len(), |page, within, range| {
            let there = match pages.get(&page) {
                Some(changed) => &changed[within..],
                None => &base[(page * PAGE_BYTES + within).min(base.len())..],
            };
            let length = range.len().min(there.len());
            into[range][..length].copy_from_slice(&there[..length]);
        });
    }

    /// Changes bytes, even on a read-only medium.
    pub fn poke(&self, offset: u64, from: &[u8]) {
        self.change(offset as usize, from.len(), |range, into| into.copy_from_slice(&from[range]));
    }

    fn change(&self, offset: usize, length: usize, mut put: impl FnMut(std::ops::Range<usize>, &mut [u8])) {
        let (mut pages, base) = (self.0.pages.borrow_mut(), &self.0.base);
        each_page(offset, length, |page, within, range| {
            let changed = pages.entry(page).or_insert_with(|| {
                let mut copy = Box::new([0; PAGE_BYTES]);
                let there = &base[(page * PAGE_BYTES).min(base.len())..];
                let length = there.len().min(PAGE_BYTES);
                copy[..length].copy_from_slice(&there[..length]);
                copy
            });
            let length = range.len();
            put(range, &mut changed[within..within + length]);
        });
    }

    fn check(&self, doing: &'static str, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        let refuse = |kind, reason: &str| Err(MediumError { kind, doing, offset_bytes, reason: reason.to_owned() });
        let sector = u64::from(self.0.sector_bytes);
        if !offset_bytes.is_multiple_of(sector) || !length_bytes.is_multiple_of(sector) {
            return refuse(MediumErrorKind::Failed, "offset or length is not a multiple of the sector size");
        }
        if offset_bytes.checked_add(length_bytes).is_none_or(|end| end > self.len_bytes()) {
            return refuse(MediumErrorKind::PastEnd, "past the end of the medium");
        }
        Ok(())
    }

    /// Checks a change, and makes its sectors readable again.
    fn begin_change(&self, doing: &'static str, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.0.changes.set(self.0.changes.get() + 1);
        if self.0.read_only {
            let reason = "opened for reading only".to_owned();
            return Err(MediumError { kind: MediumErrorKind::ReadOnly, doing, offset_bytes, reason });
        }
        self.check(doing, offset_bytes, length_bytes)?;
        let mut unreadable = self.0.unreadable.borrow_mut();
        if !unreadable.is_empty() {
            let (first, end) = (offset_bytes / UNIT_BYTES, (offset_bytes + length_bytes) / UNIT_BYTES);
            unreadable.retain(|unit| !(first..end).contains(unit));
        }
        Ok(())
    }
}

/// Calls `part` for each page of a range, with the page's number, the offset of the range in the page, and the part of
/// the range that lies in it.
fn each_page(offset: usize, length: usize, mut part: impl FnMut(usize, usize, std::ops::Range<usize>)) {
    let mut done = 0;
    while done < length {
        let (page, within) = ((offset + done) / PAGE_BYTES, (offset + done) % PAGE_BYTES);
        let there = (PAGE_BYTES - within).min(length - done);
        part(page, within, done..done + there);
        done += there;
    }
}

impl Medium for Overlay {
    fn len_bytes(&self) -> u64 {
        self.0.base.len() as u64
    }

    fn sector_bytes(&self) -> u32 {
        self.0.sector_bytes
    }

    fn is_read_only(&self) -> bool {
        self.0.read_only
    }

    fn can_punch(&self) -> bool {
        true
    }

    async fn read(&self, offset_bytes: u64, mut into: Buffer) -> (Result<(), MediumError>, Buffer) {
        if let Err(error) = self.check("read", offset_bytes, into.len() as u64) {
            return (Err(error), into);
        }
        let unreadable = self.0.unreadable.borrow();
        let units = offset_bytes / UNIT_BYTES..(offset_bytes + into.len() as u64) / UNIT_BYTES;
        if !unreadable.is_empty() && unreadable.iter().any(|unit| units.contains(unit)) {
            let reason = "unrecovered read error".to_owned();
            let error = MediumError { kind: MediumErrorKind::Failed, doing: "read", offset_bytes, reason };
            // After a failed read the buffer has no valid data.
            into.fill(0xa5);
            return (Err(error), into);
        }
        self.peek(offset_bytes, &mut into);
        (Ok(()), into)
    }

    async fn write(&self, offset_bytes: u64, from: Slice) -> Result<(), MediumError> {
        self.begin_change("write", offset_bytes, from.len() as u64)?;
        self.poke(offset_bytes, &from);
        Ok(())
    }

    async fn sync(&self) -> Result<(), MediumError> {
        Ok(())
    }

    /// A write completes before its future can be dropped.
    async fn drain(&self) {}

    async fn punch(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.zero(offset_bytes, length_bytes).await
    }

    async fn zero(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.begin_change("zero", offset_bytes, length_bytes)?;
        self.change(offset_bytes as usize, length_bytes as usize, |_, into| into.fill(0));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_simulator::executor::{Executor, RunEnd, RunLimits};
    use sealblock_simulator::random::Random;
    use sealblock_simulator::random::Trace;

    fn now<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
        let limits = RunLimits { steps: 100, seconds: 1 };
        match Executor::new(Random::new(1), Trace::default()).run(limits, future) {
            RunEnd::Finished(value) => value,
            other => panic!("{:?}", matches!(other, RunEnd::Halted)),
        }
    }

    fn read(overlay: &Overlay, offset: u64, length: usize) -> Option<Vec<u8>> {
        let overlay = overlay.clone();
        now(async move {
            let (result, bytes) = overlay.read(offset, Buffer::zeroed(length)).await;
            result.is_ok().then(|| bytes.to_vec())
        })
    }

    #[test]
    fn changes_are_its_own_and_the_snapshot_stays() {
        let base = Rc::new((0..16384_u32).map(|byte| byte as u8).collect::<Vec<u8>>());
        let overlay = Overlay::new(&base, 512, false);
        let twin = overlay.clone();
        now(async move { twin.write(3584, Slice::copy_from(&[7; 1024])).await }).unwrap();
        let fork = overlay.fork(true);
        overlay.poke(3584, &[9]);
        assert_eq!(read(&overlay, 3584, 1024).unwrap(), [vec![9], vec![7; 1023]].concat());
        assert_eq!(read(&fork, 3584, 1024).unwrap(), vec![7; 1024]);
        assert_eq!(read(&fork, 3072, 512).unwrap(), base[3072..3584]);
        assert_eq!((fork.changes(), overlay.changes()), (0, 1));
        let twin = fork.clone();
        assert!(now(async move { twin.write(0, Slice::copy_from(&[7; 512])).await }).is_err());
        assert_eq!(fork.changes(), 1);
    }

    #[test]
    fn a_spoilt_sector_fails_until_it_is_written() {
        let overlay = Overlay::new(&Rc::new(vec![1; 8192]), 512, false);
        overlay.spoil(1024, 1536);
        assert!(read(&overlay, 0, 8192).is_none() && read(&overlay, 1024, 512).is_none());
        assert!(read(&overlay, 0, 1024).is_some() && read(&overlay, 1536, 512).is_some());
        let twin = overlay.clone();
        now(async move { twin.zero(1024, 512).await }).unwrap();
        assert_eq!(read(&overlay, 1024, 512), Some(vec![0; 512]));
    }
}
