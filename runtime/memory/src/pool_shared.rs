//! What a pool and its buffers share: the arena, which of its slots are free, and the blocks on the heap.
//!
//! Invariants: only the pool's thread knows which slots are free. A slot that another thread gives back counts as used
//! until the pool's thread takes it from the list. The slots in use hold one count on the pool together, which whoever
//! frees the pool drops: the pool itself when it ends without a slot in use, or whoever gives back the last one.
//!
//! Shape: a core takes from its own pool, and most buffers are dropped there, so neither needs a lock or a locked
//! instruction.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::arena::{ArenaId, Region, Registration};
use crate::classes::{LARGEST_BYTES, SizeClasses, UNIT_BYTES, bytes_of};
use crate::heap::{HeapBlock, SpareBlocks};
use crate::returned::ReturnedSlots;
use crate::thread_owned::ThreadOwned;

/// Counters of a pool. All bytes count whole slots, not the requested lengths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes of the arena, free or not.
    pub arena_bytes: usize,
    /// Bytes of the arena that buffers use now.
    pub in_use_bytes: usize,
    /// Bytes on the heap that buffers of this pool use now.
    pub heap_bytes: usize,
    /// Spare bytes on the heap, which no buffer uses; they do not count towards the limit.
    pub spare_bytes: usize,
    /// Buffers handed out so far, from either place.
    pub taken: u64,
    /// The number of these that the arena could not serve.
    pub fallbacks: u64,
}

/// The limit of a pool leaves no room for the requested bytes until other buffers are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverLimit {
    /// The requested bytes.
    pub requested_bytes: usize,
    /// The bytes that buffers of the pool hold.
    pub held_bytes: usize,
    /// The limit.
    pub limit_bytes: usize,
}

impl std::fmt::Display for OverLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let OverLimit { requested_bytes, held_bytes, limit_bytes } = self;
        write!(f, "{requested_bytes} bytes requested from a pool that holds {held_bytes} of at most {limit_bytes}")
    }
}

impl std::error::Error for OverLimit {}

/// The value for "not registered"; ring indices have 16 bits.
const UNREGISTERED: u32 = u32::MAX;

/// Slots that other threads gave back are taken at least once in this many takes, so that few others are used
/// meanwhile, which stay in the cache.
const TAKES_UNTIL_LOOK: u64 = 32;

pub(crate) struct PoolShared {
    pub(crate) region: Region,
    pub(crate) limit_bytes: usize,
    /// The io_uring buffer index of the arena, or [`UNREGISTERED`].
    index: AtomicU32,
    /// Handles per slot, at the slot's first unit. Without a handle, the link of a slot that was given back.
    handles: Box<[AtomicU32]>,
    slots: ThreadOwned<Slots>,
    returned: ReturnedSlots,
    /// Bytes of buffers on the heap.
    heap_bytes: AtomicUsize,
    spare: Mutex<SpareBlocks>,
}

/// The slots of the arena, as the pool's thread knows them.
struct Slots {
    classes: SizeClasses,
    in_use: usize,
    in_use_bytes: usize,
    taken: u64,
    fallbacks: u64,
    /// The pool has ended, so slots are only counted.
    has_ended: bool,
}

impl Slots {
    fn give_back(&mut self, unit: u32) {
        let order = self.classes.give_back(unit);
        self.in_use -= 1;
        self.in_use_bytes -= bytes_of(order);
    }
}

impl PoolShared {
    /// A pool of this thread with an arena of `arena_bytes`, rounded up to whole MiB. [`PoolShared::end`] must be
    /// called.
    pub(crate) fn new(arena_bytes: usize, limit_bytes: usize) -> Arc<PoolShared> {
        let blocks = arena_bytes.div_ceil(LARGEST_BYTES);
        let len = blocks * LARGEST_BYTES;
        let classes = SizeClasses::new(u32::try_from(blocks).expect("an arena is shorter than 2 TiB"));
        let slots = Slots { classes, in_use: 0, in_use_bytes: 0, taken: 0, fallbacks: 0, has_ended: false };
        let pool = Arc::new(PoolShared {
            region: Region::zeroed(len),
            limit_bytes,
            index: AtomicU32::new(UNREGISTERED),
            handles: std::iter::repeat_with(|| AtomicU32::new(0)).take(len / UNIT_BYTES).collect(),
            slots: ThreadOwned::new(slots),
            returned: ReturnedSlots::new(),
            heap_bytes: AtomicUsize::new(0),
            spare: Mutex::default(),
        });
        // The count of the slots in use; `end` or `give_back` drops it.
        let _ = Arc::into_raw(Arc::clone(&pool));
        pool
    }

    /// Takes a slot of this order, with one handle; `None` if a buffer of `slot_bytes` must come from the heap. Only on
    /// the pool's thread.
    pub(crate) fn take(&self, order: Option<u8>, slot_bytes: usize, limit: usize) -> Result<Option<u32>, OverLimit> {
        let on_thread = self.slots.with(|slots| {
            let is_empty = order.is_some_and(|order| !slots.classes.has_open(order));
            if is_empty || slots.taken.is_multiple_of(TAKES_UNTIL_LOOK) {
                self.take_returned(slots);
            }
            if self.held_bytes(slots).saturating_add(slot_bytes) > limit {
                self.take_returned(slots);
                let held_bytes = self.held_bytes(slots);
                if held_bytes.saturating_add(slot_bytes) > limit {
                    return Err(OverLimit { requested_bytes: slot_bytes, held_bytes, limit_bytes: limit });
                }
            }
            slots.taken += 1;
            let Some(unit) = order.and_then(|order| slots.classes.take(order)) else {
                slots.fallbacks += 1;
                self.heap_bytes.fetch_add(slot_bytes, Ordering::Relaxed);
                return Ok(None);
            };
            slots.in_use += 1;
            slots.in_use_bytes += slot_bytes;
            self.handles(unit).store(1, Ordering::Relaxed);
            Ok(Some(unit))
        });
        on_thread.expect("a pool is used on its own thread")
    }

    fn held_bytes(&self, slots: &Slots) -> usize {
        slots.in_use_bytes + self.heap_bytes.load(Ordering::Relaxed)
    }

    fn take_returned(&self, slots: &mut Slots) {
        self.returned.take(|unit| self.handles(unit), |unit| slots.give_back(unit));
    }

    /// The counters so far. Only on the pool's thread.
    pub(crate) fn counters(&self) -> Counters {
        let counters = self.slots.with(|slots| {
            self.take_returned(slots);
            Counters {
                arena_bytes: self.handles.len() * UNIT_BYTES,
                in_use_bytes: slots.in_use_bytes,
                heap_bytes: self.heap_bytes.load(Ordering::Relaxed),
                spare_bytes: self.spare().spare_bytes(),
                taken: slots.taken,
                fallbacks: slots.fallbacks,
            }
        });
        counters.expect("a pool is used on its own thread")
    }

    pub(crate) fn spare(&self) -> MutexGuard<'_, SpareBlocks> {
        // No code under the lock leaves the list inconsistent, so a panic elsewhere does not corrupt it.
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of handles of a slot.
    pub(crate) fn handles(&self, unit: u32) -> &AtomicU32 {
        &self.handles[unit as usize]
    }

    pub(crate) fn arena_id(&self) -> ArenaId {
        self.region.id
    }

    pub(crate) fn set_registration(&self, index: Option<u16>) {
        self.index.store(index.map_or(UNREGISTERED, u32::from), Ordering::Relaxed);
    }

    pub(crate) fn registration(&self) -> Option<Registration> {
        let index = u16::try_from(self.index.load(Ordering::Relaxed)).ok()?;
        Some(Registration { arena: self.region.id, index })
    }

    /// Takes back a block that was charged to the pool.
    pub(crate) fn refund_heap(&self, block: HeapBlock) {
        self.heap_bytes.fetch_sub(block.len_bytes(), Ordering::Relaxed);
        let result = self.spare().keep(block);
        // A block that is not kept is freed without the lock.
        drop(result);
    }

    /// Returns a slot.
    ///
    /// # Safety
    /// The slot is in use, came from this pool, and no handle on it is left.
    pub(crate) unsafe fn give_back(pool: NonNull<PoolShared>, unit: u32) {
        // SAFETY: the slot is in use until it is given back below, so the count of the slots in use is held.
        let shared = unsafe { pool.as_ref() };
        let is_kept = shared.slots.with(|slots| {
            if !slots.has_ended {
                slots.give_back(unit);
            }
            !slots.has_ended
        });
        if is_kept != Some(true) && shared.returned.push(unit, shared.handles(unit)) {
            // SAFETY: `new` left this count to the slots in use, and `push` is true for the last of them only.
            drop(unsafe { Arc::from_raw(pool.as_ptr().cast_const()) });
        }
    }

    /// Ends the pool, of which nothing is taken any more. Once, on its thread.
    pub(crate) fn end(pool: &Arc<PoolShared>) {
        let in_use = pool.slots.with(|slots| {
            slots.has_ended = true;
            pool.returned.close(|unit| pool.handles(unit), |unit| slots.give_back(unit));
            slots.in_use
        });
        // On another thread it would stay in memory; a pool does not leave its thread.
        if in_use.is_some_and(|in_use| pool.returned.count_left(in_use)) {
            // SAFETY: as in `give_back`: no slot is in use, and `count_left` is true only for the last caller.
            drop(unsafe { Arc::from_raw(Arc::as_ptr(pool)) });
        }
    }
}
