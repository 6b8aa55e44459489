//! What is known of files while they are used: locks of their bytes, writes in flight, and sizes that are ahead of the
//! inodes' items.
//!
//! Invariants:
//! - Reads lock bytes shared; whatever changes bytes locks them exclusively. Locks that overlap are granted in the
//!   order of the requests, so none starves. A lock of several ranges is one lock with one place in the order.
//! - A lock belongs to whoever holds it, not to the request: data that are being written in place keep theirs until the
//!   device has answered, even if the request is gone.
//! - The size in an inode's item never has bytes that are still being written. A write that completes behind one that
//!   has not raises the size of the file ([`FileState::size`]), and that of the item when the other one has completed.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use sealblock_block::Condition;

/// A file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct FileId {
    /// The subvolume.
    pub root: u64,
    /// The inode.
    pub ino: u64,
}

/// Bytes of a file to be locked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct LockRange {
    pub bytes: Range<u64>,
    pub is_exclusive: bool,
}

impl LockRange {
    pub fn shared(bytes: Range<u64>) -> LockRange {
        LockRange { bytes, is_exclusive: false }
    }

    pub fn exclusive(bytes: Range<u64>) -> LockRange {
        LockRange { bytes, is_exclusive: true }
    }

    fn conflicts(&self, other: &LockRange) -> bool {
        let overlaps = self.bytes.start < other.bytes.end && other.bytes.start < self.bytes.end;
        overlaps && (self.is_exclusive || other.is_exclusive)
    }
}

struct Listed {
    id: u64,
    ranges: Vec<LockRange>,
}

/// A write that is not yet in the tree.
struct Ordered {
    id: u64,
    bytes: Range<u64>,
}

/// A file that is used, or that has something that is not durable.
#[derive(Default)]
pub(crate) struct FileState {
    next: Cell<u64>,
    locks: RefCell<Vec<Listed>>,
    ordered: RefCell<Vec<Ordered>>,
    changed: Condition,
    /// The size, if it is not that of the inode's item.
    size: Cell<Option<u64>>,
    /// True if bytes behind the end of the file are known to be zeroes or no extent.
    is_tail_clean: Cell<bool>,
    /// The transaction in which anything but the times changed last; 0 if it is durable for long.
    changed_in: Cell<u64>,
    /// The transaction that was open when data were written in place last.
    written_in: Cell<u64>,
    /// Counts writes in place.
    writes_in_place: Cell<u64>,
}

/// All files that are used.
#[derive(Default)]
pub(crate) struct Files {
    states: RefCell<HashMap<FileId, Rc<FileState>>>,
    durable: Cell<u64>,
}

/// A lock, held or waited for. It ends when it is dropped.
pub(crate) struct FileLock {
    files: Rc<Files>,
    file: FileId,
    state: Rc<FileState>,
    id: u64,
}

/// A write in flight. It ends when it is dropped.
pub(crate) struct OrderedWrite {
    state: Rc<FileState>,
    id: u64,
}

impl Files {
    /// What is known of a file, if it is used or has something that is not durable.
    pub fn get(&self, file: FileId) -> Option<Rc<FileState>> {
        self.states.borrow().get(&file).cloned()
    }

    /// Requests a lock. [`FileLock::granted`] waits for it.
    pub fn request(self: &Rc<Files>, file: FileId, ranges: Vec<LockRange>) -> FileLock {
        let state = Rc::clone(self.states.borrow_mut().entry(file).or_default());
        let id = state.take_id();
        state.locks.borrow_mut().push(Listed { id, ranges });
        FileLock { files: Rc::clone(self), file, state, id }
    }

    /// The files of a subvolume whose items do not have their sizes.
    pub fn ahead(&self, root: u64) -> Vec<FileId> {
        self.all_ahead().into_iter().filter(|id| id.root == root).collect()
    }

    /// The files whose items do not have their sizes.
    pub fn all_ahead(&self) -> Vec<FileId> {
        let states = self.states.borrow();
        states.iter().filter(|(_, state)| state.is_size_ahead()).map(|(id, _)| *id).collect()
    }

    /// True if a file of a subvolume has writes in flight, or a size that its item does not have.
    pub fn has_unfinished(&self, root: u64) -> bool {
        let is_unfinished = |state: &FileState| state.is_size_ahead() || !state.ordered.borrow().is_empty();
        self.states.borrow().iter().any(|(id, state)| id.root == root && is_unfinished(state))
    }

    /// A transaction is durable.
    pub fn committed(&self, durable: u64) {
        self.durable.set(durable);
        self.states.borrow_mut().retain(|_, state| !state.is_idle(durable));
    }

    fn forget_idle(&self, file: FileId) {
        let mut states = self.states.borrow_mut();
        if states.get(&file).is_some_and(|state| state.is_idle(self.durable.get())) {
            states.remove(&file);
        }
    }
}

impl FileState {
    fn take_id(&self) -> u64 {
        let id = self.next.get();
        self.next.set(id + 1);
        id
    }

    fn is_idle(&self, durable: u64) -> bool {
        let is_unused = self.locks.borrow().is_empty() && self.ordered.borrow().is_empty();
        is_unused && self.size.get().is_none() && self.changed_in.get().max(self.written_in.get()) <= durable
    }

    fn is_grantable(&self, id: u64) -> bool {
        let locks = self.locks.borrow();
        let Some(own) = locks.iter().find(|lock| lock.id == id) else { return true };
        let earlier = locks.iter().take_while(|lock| lock.id < id);
        earlier.flat_map(|lock| &lock.ranges).all(|range| own.ranges.iter().all(|own| !own.conflicts(range)))
    }

    /// The size of the file, whose item has `stored`.
    pub fn size(&self, stored: u64) -> u64 {
        self.size.get().unwrap_or(stored)
    }

    /// True if the item of the inode does not have the size.
    pub fn is_size_ahead(&self) -> bool {
        self.size.get().is_some()
    }

    /// The size of the file with all writes in flight.
    pub fn planned_size(&self, stored: u64) -> u64 {
        let ordered = self.ordered.borrow();
        ordered.iter().map(|write| write.bytes.end).fold(self.size(stored), u64::max)
    }

    /// The size that the item may have if the file has `size`: not behind the first byte that is being written, and not
    /// less than the item has. Of `own`, the bytes up to `done` are written.
    pub fn storable_size(&self, stored: u64, size: u64, own: Option<(&OrderedWrite, u64)>) -> u64 {
        let ordered = self.ordered.borrow();
        let left = ordered.iter().map(|write| match own {
            Some((own, done)) if own.id == write.id => write.bytes.start.max(done)..write.bytes.end,
            _ => write.bytes.clone(),
        });
        let ahead = left.filter(|bytes| !bytes.is_empty() && bytes.end > stored).map(|bytes| bytes.start.max(stored));
        ahead.fold(size, u64::min).max(stored)
    }

    /// The file has this size, and the item of its inode `stored`.
    pub fn set_size(&self, size: u64, stored: u64) {
        self.size.set(Some(size).filter(|size| *size != stored));
    }

    /// Waits until no write is in flight of those that are now.
    pub async fn ordered_done(&self) {
        let next = self.next.get();
        self.changed.wait_until(|| self.ordered.borrow().iter().all(|write| write.id >= next)).await;
    }

    /// True if bytes behind the end of the file need not be looked at before it grows.
    pub fn is_tail_clean(&self) -> bool {
        self.is_tail_clean.get()
    }

    pub fn set_tail_clean(&self, is_clean: bool) {
        self.is_tail_clean.set(is_clean);
    }

    /// Something but the times changed in this transaction.
    pub fn set_changed_in(&self, generation: u64) {
        self.changed_in.set(generation);
    }

    pub fn changed_in(&self) -> u64 {
        self.changed_in.get()
    }

    /// Data were written in place while this transaction was open.
    pub fn set_written_in(&self, generation: u64) {
        self.written_in.set(generation);
        self.writes_in_place.set(self.writes_in_place.get() + 1);
    }

    pub fn written_in(&self) -> u64 {
        self.written_in.get()
    }

    /// The number of writes in place so far.
    pub fn writes_in_place(&self) -> u64 {
        self.writes_in_place.get()
    }

    /// What had been written in place is durable, if there were only so many writes since.
    pub fn flushed(&self, writes: u64) {
        if self.writes_in_place.get() == writes {
            self.written_in.set(0);
        }
    }
}

impl FileLock {
    /// Waits until it is held.
    pub async fn granted(&self) {
        self.state.changed.wait_until(|| self.state.is_grantable(self.id)).await;
    }

    pub fn file(&self) -> FileId {
        self.file
    }

    pub fn state(&self) -> &Rc<FileState> {
        &self.state
    }

    /// A write of bytes that are locked begins.
    pub fn begin_write(&self, bytes: Range<u64>) -> OrderedWrite {
        let id = self.state.take_id();
        self.state.ordered.borrow_mut().push(Ordered { id, bytes });
        OrderedWrite { state: Rc::clone(&self.state), id }
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        self.state.locks.borrow_mut().retain(|lock| lock.id != self.id);
        self.state.changed.notify();
        self.files.forget_idle(self.file);
    }
}

impl Drop for OrderedWrite {
    fn drop(&mut self) {
        self.state.ordered.borrow_mut().retain(|write| write.id != self.id);
        self.state.changed.notify();
    }
}

/// Writes in place, by subvolume. A snapshot must not have one halfway.
#[derive(Default)]
pub(crate) struct InPlaceWrites {
    roots: RefCell<HashMap<u64, RootWrites>>,
    changed: Condition,
}

#[derive(Clone, Copy, Default)]
struct RootWrites {
    writes: u64,
    holds: u64,
}

/// A write in place that may be in flight until this is dropped.
pub(crate) struct InPlaceWrite {
    all: Rc<InPlaceWrites>,
    root: u64,
}

/// While it is there, no data of a subvolume are written in place.
pub struct InPlaceHold {
    all: Rc<InPlaceWrites>,
    root: u64,
}

impl InPlaceWrites {
    fn of(&self, root: u64) -> RootWrites {
        self.roots.borrow().get(&root).copied().unwrap_or_default()
    }

    fn change(&self, root: u64, change: impl FnOnce(&mut RootWrites)) {
        let mut roots = self.roots.borrow_mut();
        let writes = roots.entry(root).or_default();
        change(writes);
        if writes.writes == 0 && writes.holds == 0 {
            roots.remove(&root);
        }
        drop(roots);
        self.changed.notify();
    }

    /// Waits until nobody forbids it, and begins a write in place.
    pub async fn begin(self: &Rc<InPlaceWrites>, root: u64) -> InPlaceWrite {
        self.changed.wait_until(|| self.of(root).holds == 0).await;
        self.change(root, |writes| writes.writes += 1);
        InPlaceWrite { all: Rc::clone(self), root }
    }

    /// Forbids writes in place. [`InPlaceHold::granted`] waits until none is in flight.
    pub fn hold(self: &Rc<InPlaceWrites>, root: u64) -> InPlaceHold {
        self.change(root, |writes| writes.holds += 1);
        InPlaceHold { all: Rc::clone(self), root }
    }
}

impl InPlaceHold {
    pub(crate) async fn granted(&self) {
        self.all.changed.wait_until(|| self.all.of(self.root).writes == 0).await;
    }
}

impl Drop for InPlaceWrite {
    fn drop(&mut self) {
        self.all.change(self.root, |writes| writes.writes -= 1);
    }
}

impl Drop for InPlaceHold {
    fn drop(&mut self) {
        self.all.change(self.root, |writes| writes.holds -= 1);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    const FILE: FileId = FileId { root: 5, ino: 257 };

    fn is_granted(lock: &FileLock) -> bool {
        lock.granted().now_or_never().is_some()
    }

    #[test]
    fn locks_that_overlap_are_granted_in_their_order_and_reads_share() {
        let files = Rc::new(Files::default());
        let shared = |bytes| files.request(FILE, vec![LockRange::shared(bytes)]);
        let exclusive = |bytes| files.request(FILE, vec![LockRange::exclusive(bytes)]);
        let (first, second) = (shared(0..10), shared(5..15));
        let (write, other, late) = (exclusive(8..9), exclusive(20..30), shared(0..10));
        assert_eq!([&first, &second, &write, &other, &late].map(is_granted), [true, true, false, true, false]);
        drop(first);
        assert!(!is_granted(&write));
        drop(second);
        assert_eq!((is_granted(&write), is_granted(&late)), (true, false));
        drop(write);
        assert!(is_granted(&late));
        let both = files.request(FILE, vec![LockRange::shared(9..10), LockRange::exclusive(25..26)]);
        assert!(!is_granted(&both));
        drop(other);
        assert!(is_granted(&both));
        drop((both, late));
        assert!(files.get(FILE).is_none(), "nothing is remembered of a file that is not used");
    }

    #[test]
    fn a_size_does_not_have_bytes_that_are_being_written() {
        let files = Rc::new(Files::default());
        let lock = files.request(FILE, vec![LockRange::exclusive(0..100)]);
        let state = lock.state();
        let (first, second) = (lock.begin_write(10..20), lock.begin_write(20..30));
        assert_eq!((state.planned_size(12), state.size(12)), (30, 12));
        assert_eq!(state.storable_size(12, 30, Some((&second, 30))), 12, "not less than is stored");
        assert_eq!(state.storable_size(5, 30, Some((&second, 30))), 10);
        assert_eq!(state.storable_size(20, 30, Some((&second, 30))), 30, "overwriting does not count");
        assert_eq!(state.storable_size(20, 30, Some((&second, 25))), 25, "the rest of it is still written");
        state.set_size(30, 12);
        drop(second);
        assert!(state.ordered_done().now_or_never().is_none());
        assert_eq!((state.storable_size(12, 30, Some((&first, 20))), state.size(12)), (30, 30));
        drop(first);
        assert_eq!((state.ordered_done().now_or_never(), state.storable_size(12, 30, None)), (Some(()), 30));
        state.set_size(30, 30);
        state.set_changed_in(9);
        drop(lock);
        files.committed(8);
        assert!(files.get(FILE).is_some());
        files.committed(9);
        assert!(files.get(FILE).is_none());
    }

    #[test]
    fn a_snapshot_waits_for_writes_in_place_and_new_ones_wait_for_it() {
        let all = Rc::new(InPlaceWrites::default());
        let write = all.begin(5).now_or_never().unwrap();
        let hold = all.hold(5);
        assert!(hold.granted().now_or_never().is_none() && all.begin(5).now_or_never().is_none());
        assert!(all.begin(256).now_or_never().is_some(), "another subvolume");
        drop(write);
        assert!(hold.granted().now_or_never().is_some() && all.begin(5).now_or_never().is_none());
        drop(hold);
        assert!(all.begin(5).now_or_never().is_some() && all.roots.borrow().is_empty());
    }
}
