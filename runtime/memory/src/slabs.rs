//! Zeroed chunks of memory on huge pages, made before they are needed.
//!
//! Invariants:
//! - Each chunk of a slab is in one place: handed out, in one of the slab's three sets of free chunks, or with the
//!   thread. What is in a set or with the thread has no handle, so its bytes may be written.
//! - A chunk is zeroed when it is handed out.
//! - A slab is unmapped only when all its chunks are in its sets. The state keeps the slabs, and each chunk that is
//!   handed out keeps the state.
//! - No memory is mapped, zeroed or unmapped under the lock.
//!
//! Shape: the kernel takes tens of microseconds to provide 128 KiB page by page, and little longer for a huge page of
//! 2 MiB. A device that asks for memory in the middle of a write would make its client wait for that. So a thread
//! makes slabs ahead: as much as was taken so far, up to a limit, so that a process that stores little makes little.
//! It starts with the second slab, sleeps while enough is ready, and ends with the last handle. It also zeroes the
//! chunks that come back, or returns their pages to the system while many are free.

use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;

use crate::Buffer;

mod mapping;

use mapping::Mapping;

/// Bytes of a chunk.
pub const SLAB_CHUNK_BYTES: usize = 128 << 10;
/// Chunks of a slab.
const SLAB_CHUNKS: u32 = (mapping::SLAB_BYTES / SLAB_CHUNK_BYTES) as u32;
/// The most chunks that are made ahead: 32 MiB.
const MAX_AHEAD: usize = 256;
/// The most free chunks that keep their pages: 64 MiB.
const MAX_RESIDENT: usize = 512;
/// The most slabs of which nothing is used that stay mapped: 64 MiB.
const MAX_WHOLE: usize = 32;
/// The thread is woken for this many chunks that have to be zeroed.
const MANY_DIRTY: usize = 16;

/// The slabs of the process, and the thread that makes them. Clones share both.
#[derive(Clone)]
pub struct Slabs(Arc<Handle>);

/// Ends the thread.
struct Handle {
    shared: Arc<Shared>,
    /// Started when the first slab is used up; `None` if the system has no thread for it.
    thread: OnceLock<Option<thread::JoinHandle<()>>>,
}

struct Shared {
    state: Mutex<State>,
    /// For the thread: there is work.
    work: Condvar,
}

/// The sets of free chunks of a slab.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Set {
    /// Zeroed, and in memory.
    Ready,
    /// With old bytes.
    Dirty,
    /// Without pages: the first access to each page makes it, with zeroes.
    Cold,
}

const SETS: [Set; 3] = [Set::Ready, Set::Dirty, Set::Cold];

/// A chunk without a handle, outside of the sets.
#[derive(Clone, Copy)]
struct FreeChunk {
    slot: u32,
    place: u32,
    base: NonNull<u8>,
}

// SAFETY: an address of memory that whoever has the free chunk may use, on any thread.
unsafe impl Send for FreeChunk {}

/// The place of a slab in the state.
#[derive(Default)]
struct Slot {
    slab: Option<Mapping>,
    /// The chunks in each set, as bits.
    free: [u16; 3],
    /// True if the slot is in the list of slots of this set. It stays there until it is found to have none.
    is_listed: [bool; 3],
}

#[derive(Default)]
struct State {
    slots: Vec<Slot>,
    /// Slots without a slab.
    vacant: Vec<u32>,
    /// Slots that may have chunks in each set.
    listed: [Vec<u32>; 3],
    /// Chunks in each set.
    counts: [usize; 3],
    /// Slabs of which every chunk is in a set.
    whole: usize,
    /// Slabs for the thread to unmap.
    leaving: Vec<Mapping>,
    /// Chunks handed out so far, up to [`MAX_AHEAD`].
    taken: usize,
    /// The thread waits for work.
    is_asleep: bool,
    /// The system had no memory. The thread makes no more until a caller got some.
    is_short: bool,
    /// The last handle is gone.
    is_stopping: bool,
}

/// A chunk that is handed out, as the lender of a buffer.
struct Lent {
    chunk: FreeChunk,
    shared: Arc<Shared>,
}

impl AsMut<[u8]> for Lent {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: the chunk is in no set, so this is the only way to its initialised bytes, and the state, which
        // `shared` keeps, keeps its slab mapped.
        unsafe { std::slice::from_raw_parts_mut(self.chunk.base.as_ptr(), SLAB_CHUNK_BYTES) }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.shared.give_back(self.chunk);
    }
}

impl State {
    /// Puts a chunk into a set. If nothing of its slab is used any more and too many slabs are like that, the slab
    /// leaves.
    fn put(&mut self, chunk: FreeChunk, set: Set) {
        let slot = &mut self.slots[chunk.slot as usize];
        slot.free[set as usize] |= 1 << chunk.place;
        self.counts[set as usize] += 1;
        if !std::mem::replace(&mut slot.is_listed[set as usize], true) {
            self.listed[set as usize].push(chunk.slot);
        }
        if slot.is_whole() {
            self.whole += 1;
            if self.whole > MAX_WHOLE || self.is_stopping {
                self.vacate(chunk.slot);
            }
        }
    }

    /// Takes a chunk out of a set.
    fn pop(&mut self, set: Set) -> Option<FreeChunk> {
        while let Some(&number) = self.listed[set as usize].last() {
            let slot = &mut self.slots[number as usize];
            let (is_whole, free) = (slot.is_whole(), &mut slot.free[set as usize]);
            if let (Some(slab), true) = (&slot.slab, *free != 0) {
                let place = free.trailing_zeros();
                *free &= *free - 1;
                self.counts[set as usize] -= 1;
                self.whole -= usize::from(is_whole);
                return Some(FreeChunk { slot: number, place, base: slab.at(place as usize * SLAB_CHUNK_BYTES) });
            }
            slot.is_listed[set as usize] = false;
            self.listed[set as usize].pop();
        }
        None
    }

    /// Adds a slab. Its chunks are with the caller.
    fn add(&mut self, slab: Mapping) -> impl Iterator<Item = FreeChunk> + use<> {
        let number = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            u32::try_from(self.slots.len() - 1).expect("2^32 slabs are more than the address space has")
        });
        let base = slab.at(0);
        self.slots[number as usize].slab = Some(slab);
        (0..SLAB_CHUNKS).map(move |place| FreeChunk {
            slot: number,
            place,
            // SAFETY: the slab is `SLAB_CHUNKS` chunks long.
            base: unsafe { base.add(place as usize * SLAB_CHUNK_BYTES) },
        })
    }

    /// Removes a slab all of whose chunks are in its sets.
    fn vacate(&mut self, number: u32) {
        let slot = &mut self.slots[number as usize];
        for set in SETS {
            self.counts[set as usize] -= std::mem::take(&mut slot.free[set as usize]).count_ones() as usize;
        }
        self.leaving.extend(slot.slab.take());
        self.vacant.push(number);
        self.whole -= 1;
    }

    /// How many chunks should be ready.
    fn ahead(&self) -> usize {
        self.taken.min(MAX_AHEAD)
    }

    /// True if the thread is asleep and should not be.
    fn needs_thread(&self) -> bool {
        let lacks_ready = self.counts[Set::Ready as usize] < self.ahead() / 2 && !self.is_short;
        self.is_asleep && (lacks_ready || self.counts[Set::Dirty as usize] >= MANY_DIRTY || !self.leaving.is_empty())
    }
}

impl Slot {
    fn is_whole(&self) -> bool {
        self.free.iter().fold(0, |all, set| all | set) == u16::MAX
    }
}

/// What the thread does next.
enum Work {
    Unmap(Vec<Mapping>),
    /// Zero these in place, or take their pages from them.
    Clean(Vec<FreeChunk>, Set),
    /// Provide these with pages.
    Warm(Vec<FreeChunk>),
    /// Make a slab.
    Fill,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code under the lock leaves the state inconsistent, so a panic elsewhere does not corrupt it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back(&self, chunk: FreeChunk) {
        let mut state = self.lock();
        state.put(chunk, Set::Dirty);
        let leaving = if state.is_stopping { std::mem::take(&mut state.leaving) } else { Vec::new() };
        let needs_thread = state.needs_thread();
        drop(state);
        // Without a thread, who gives back the last chunk of a slab unmaps it.
        drop(leaving);
        if needs_thread {
            self.work.notify_one();
        }
    }

    /// Waits for work. `None`: the thread ends.
    fn next_work(&self) -> Option<Work> {
        let mut state = self.lock();
        loop {
            if state.is_stopping {
                return None;
            }
            if let Some(work) = state.next_work() {
                return Some(work);
            }
            state.is_asleep = true;
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.is_asleep = false;
        }
    }

    /// The thread.
    fn run(&self) {
        while let Some(work) = self.next_work() {
            match work {
                Work::Unmap(slabs) => drop(slabs),
                Work::Clean(chunks, set) => {
                    for chunk in &chunks {
                        chunk.clean(set);
                    }
                    self.put_all(chunks, set);
                }
                Work::Warm(chunks) => {
                    // Without memory they stay as they are, and are made when they are written.
                    let is_short = chunks.iter().any(|chunk| chunk.populate().is_err());
                    self.put_all(chunks, if is_short { Set::Cold } else { Set::Ready });
                    self.lock().is_short |= is_short;
                }
                Work::Fill => match Mapping::populated() {
                    Ok(slab) => {
                        let mut state = self.lock();
                        state.add(slab).for_each(|chunk| state.put(chunk, Set::Ready));
                    }
                    Err(_no_memory) => self.lock().is_short = true,
                },
            }
        }
    }

    fn put_all(&self, chunks: Vec<FreeChunk>, set: Set) {
        let mut state = self.lock();
        chunks.into_iter().for_each(|chunk| state.put(chunk, set));
    }

    fn lend(self: &Arc<Shared>, chunk: FreeChunk) -> Buffer {
        Buffer::lent(Lent { chunk, shared: Arc::clone(self) })
    }
}

impl State {
    fn next_work(&mut self) -> Option<Work> {
        if !self.leaving.is_empty() {
            return Some(Work::Unmap(std::mem::take(&mut self.leaving)));
        }
        let some = |state: &mut State, set| std::iter::from_fn(|| state.pop(set)).take(MANY_DIRTY).collect();
        let resident = self.counts[Set::Ready as usize] + self.counts[Set::Dirty as usize];
        if self.counts[Set::Dirty as usize] > 0 {
            let set = if resident > MAX_RESIDENT { Set::Cold } else { Set::Ready };
            return Some(Work::Clean(some(self, Set::Dirty), set));
        }
        if self.counts[Set::Ready as usize] >= self.ahead() || self.is_short {
            return None;
        }
        match self.counts[Set::Cold as usize] {
            0 => Some(Work::Fill),
            _ => Some(Work::Warm(some(self, Set::Cold))),
        }
    }
}

impl FreeChunk {
    /// Makes the bytes zeroes: in place for [`Set::Ready`], and by taking the pages from them for [`Set::Cold`].
    fn clean(self, set: Set) {
        // SAFETY: the caller has this chunk, so there is no handle on its bytes, and its slab cannot leave.
        unsafe {
            if set != Set::Cold || mapping::discard(self.base, SLAB_CHUNK_BYTES).is_err() {
                self.base.write_bytes(0, SLAB_CHUNK_BYTES);
            }
        }
    }

    /// Provides a clean chunk with its pages.
    fn populate(self) -> io::Result<()> {
        // SAFETY: as in `clean`.
        unsafe { mapping::populate(self.base, SLAB_CHUNK_BYTES) }
    }
}

impl Slabs {
    /// The slabs of the process: those that others have open, or new ones. Takes no memory and starts nothing.
    pub fn open() -> Slabs {
        static CURRENT: Mutex<Weak<Handle>> = Mutex::new(Weak::new());
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        Slabs(current.upgrade().unwrap_or_else(|| {
            let handle = Slabs::apart();
            *current = Arc::downgrade(&handle);
            handle
        }))
    }

    fn apart() -> Arc<Handle> {
        let shared = Shared { state: Mutex::default(), work: Condvar::new() };
        Arc::new(Handle { shared: Arc::new(shared), thread: OnceLock::new() })
    }

    /// Appends up to `count` zeroed chunks of [`SLAB_CHUNK_BYTES`], at least one: as many as are ready, otherwise some
    /// that the caller makes now, which takes as long as the system needs to provide a huge page. The process aborts
    /// when the system has no address space left, as for every other allocation.
    pub fn take(&self, count: usize, into: &mut Vec<Buffer>) {
        let shared = &self.0.shared;
        let mut state = shared.lock();
        let (mut chunks, mut unfit) = ([const { None }; 4], None);
        let count = count.clamp(1, chunks.len());
        for chunk in &mut chunks[..count] {
            *chunk = state.pop(Set::Ready);
        }
        if chunks[0].is_none() {
            unfit = state.pop(Set::Dirty).map(|chunk| (chunk, Set::Dirty));
            unfit = unfit.or_else(|| state.pop(Set::Cold).map(|chunk| (chunk, Set::Cold)));
        }
        state.taken = (state.taken + count).min(MAX_AHEAD);
        let (wants_thread, needs_thread) = (state.ahead() >= SLAB_CHUNKS as usize, state.needs_thread());
        drop(state);
        if wants_thread {
            self.start();
        }
        if needs_thread {
            shared.work.notify_one();
        }
        match unfit {
            Some((chunk, Set::Dirty)) => {
                chunk.clean(Set::Ready);
                chunks[0] = Some(chunk);
            }
            Some((chunk, _)) => {
                // If this fails, the pages are made when they are written.
                drop(chunk.populate());
                chunks[0] = Some(chunk);
            }
            None if chunks[0].is_none() => self.make(&mut chunks[..count]),
            None => {}
        }
        into.extend(chunks.into_iter().flatten().map(|chunk| shared.lend(chunk)));
    }

    /// Makes a slab for these chunks; the rest of it is ready for others.
    fn make(&self, chunks: &mut [Option<FreeChunk>]) {
        // Without memory for all of it, its pages are made when they are written.
        let slab = Mapping::populated().or_else(|_| Mapping::new());
        let slab = slab.unwrap_or_else(|_| std::alloc::handle_alloc_error(mapping::LAYOUT));
        let mut state = self.0.shared.lock();
        state.is_short = false;
        let mut made = state.add(slab);
        chunks.iter_mut().zip(&mut made).for_each(|(chunk, made)| *chunk = Some(made));
        made.for_each(|chunk| state.put(chunk, Set::Ready));
    }

    /// The chunks of a new slab, in memory.
    ///
    /// # Errors
    /// The system's, if it has no memory for it. It may have none and say so only when the memory is used, by ending
    /// the process; so ask it before how much there is.
    pub fn take_slab(&self) -> io::Result<Vec<Buffer>> {
        let slab = Mapping::populated()?;
        let chunks = self.0.shared.lock().add(slab);
        Ok(chunks.map(|chunk| self.0.shared.lend(chunk)).collect())
    }

    /// Starts the thread. Without one, callers make what they need.
    fn start(&self) {
        self.0.thread.get_or_init(|| {
            let shared = Arc::clone(&self.0.shared);
            thread::Builder::new().name("slabs".to_owned()).spawn(move || shared.run()).ok()
        });
    }

    /// Bytes of all slabs, used or not.
    pub fn mapped_bytes(&self) -> usize {
        let state = self.0.shared.lock();
        (state.slots.len() - state.vacant.len() + state.leaving.len()) * mapping::SLAB_BYTES
    }

    /// Bytes that are ready to be taken.
    pub fn ready_bytes(&self) -> usize {
        self.0.shared.lock().counts[Set::Ready as usize] * SLAB_CHUNK_BYTES
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.lock().is_stopping = true;
        self.shared.work.notify_one();
        if let Some(thread) = self.thread.take().flatten() {
            // It ends after the step that it is in; a panic there was reported by the thread.
            drop(thread.join());
        }
        let mut state = self.shared.lock();
        for number in 0..state.slots.len() {
            if state.slots[number].is_whole() {
                state.vacate(number as u32);
            }
        }
        let leaving = std::mem::take(&mut state.leaving);
        drop(state);
        drop(leaving);
    }
}

#[cfg(test)]
mod tests;
