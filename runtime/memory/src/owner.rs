//! The owners of allocations, and where an allocation returns to when its last handle is dropped: a slot to the arena
//! of its pool; heap memory to the thread's spare allocations, to the pool that it is charged to, or to the system;
//! lent memory to its lender.
//!
//! Invariants: an [`Owner`] other than `Nothing` holds one count on its allocation, and the allocation outlives it. The
//! slots in use together, and each block of heap memory that a pool fell back to, hold one count on the pool, so the
//! arena outlives its last buffer. Spare allocations have no handle.
//!
//! Shape: the owner is an enum of raw pointers and not an `Arc<dyn ..>`, because a pool slot must cost no heap
//! allocation. A thread keeps a few small allocations for reuse, because tags of single blocks are allocated with every
//! request.

use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::arena::{ArenaId, Registration};
use crate::heap::HeapBlock;
use crate::pool_shared::PoolShared;

/// More handles than this on one allocation are a leak. Stopping is better than a wrapped count and a use after free.
const MAX_HANDLES: u32 = u32::MAX / 2;

pub(crate) enum Owner {
    /// Nothing is owned: the range is empty.
    Nothing,
    Heap(NonNull<Heap>),
    Slot {
        pool: NonNull<PoolShared>,
        unit: u32,
    },
    Lent(NonNull<Lent>),
}

impl Owner {
    pub(crate) fn is_same(&self, other: &Owner) -> bool {
        match (self, other) {
            (Owner::Heap(a), Owner::Heap(b)) => a == b,
            (Owner::Slot { pool: a, unit: i }, Owner::Slot { pool: b, unit: j }) => a == b && i == j,
            (Owner::Lent(a), Owner::Lent(b)) => a == b,
            _ => false,
        }
    }

    /// True if this is the only handle. Accesses through handles dropped before are then visible to the caller.
    pub(crate) fn is_only(&self) -> bool {
        self.count().is_none_or(|count| count.load(Ordering::Acquire) == 1)
    }

    pub(crate) fn registration(&self) -> Option<Registration> {
        match self {
            // SAFETY: the slot is in use, so the pool is alive, by the invariant of this module.
            Owner::Slot { pool, .. } => unsafe { pool.as_ref() }.registration(),
            _ => None,
        }
    }

    pub(crate) fn arena_id(&self) -> Option<ArenaId> {
        match self {
            // SAFETY: the slot is in use, so the pool is alive, by the invariant of this module.
            Owner::Slot { pool, .. } => Some(unsafe { pool.as_ref() }.arena_id()),
            _ => None,
        }
    }

    fn count(&self) -> Option<&AtomicU32> {
        match self {
            Owner::Nothing => None,
            // SAFETY: this handle holds a count, so the allocation's header is alive and never moved.
            Owner::Heap(heap) => Some(unsafe { &heap.as_ref().handles }),
            // SAFETY: as above; the pool is kept alive by its slots in use, and the slot by this handle.
            Owner::Slot { pool, unit } => Some(unsafe { pool.as_ref() }.handles(*unit)),
            // SAFETY: as for the heap.
            Owner::Lent(lent) => Some(unsafe { &lent.as_ref().handles }),
        }
    }
}

impl Clone for Owner {
    fn clone(&self) -> Owner {
        if let Some(count) = self.count()
            && count.fetch_add(1, Ordering::Relaxed) > MAX_HANDLES
        {
            std::process::abort();
        }
        match self {
            Owner::Nothing => Owner::Nothing,
            Owner::Heap(heap) => Owner::Heap(*heap),
            Owner::Slot { pool, unit } => Owner::Slot { pool: *pool, unit: *unit },
            Owner::Lent(lent) => Owner::Lent(*lent),
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let Some(count) = self.count() else { return };
        // The only handle stays the only one, because none can be cloned from it any more. Most handles are the only
        // one and save the locked subtraction. Pairs with the release below in every other handle: their last accesses
        // come before the memory is reused.
        if count.load(Ordering::Acquire) != 1 {
            if count.fetch_sub(1, Ordering::Release) != 1 {
                return;
            }
            fence(Ordering::Acquire);
        }
        match self {
            Owner::Nothing => {}
            // SAFETY: the count fell to zero, so no handle is left that could reach the allocation.
            Owner::Heap(heap) => unsafe { Heap::free(*heap) },
            // SAFETY: as above, and the slot is not given back twice, because only the last handle does so.
            Owner::Slot { pool, unit } => unsafe { PoolShared::give_back(*pool, *unit) },
            // SAFETY: `Lent::own` leaked this very box, and as above no other handle could reach it.
            Owner::Lent(lent) => drop(unsafe { Box::from_raw(lent.as_ptr()) }),
        }
    }
}

/// Memory that belongs to another part of the program, and a handle of that part that keeps it alive.
pub(crate) struct Lent {
    handles: AtomicU32,
    /// From a `Box`. A raw pointer, since moving a `Box` ends all access to what is in it by other pointers.
    lender: NonNull<dyn Send>,
}

impl Lent {
    /// The bytes of a lender, and the owner that keeps them alive.
    pub(crate) fn own<T: AsMut<[u8]> + Send + 'static>(lender: T) -> (NonNull<[u8]>, Owner) {
        let mut lender = NonNull::from(Box::leak(Box::new(lender)));
        // SAFETY: the box was leaked just now, so this is the only access.
        let bytes = NonNull::from(unsafe { lender.as_mut() }.as_mut());
        let header = Box::new(Lent { handles: AtomicU32::new(1), lender });
        (bytes, Owner::Lent(NonNull::from(Box::leak(header))))
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // SAFETY: `own` leaked this very box, and the last handle on its bytes is gone.
        drop(unsafe { Box::from_raw(self.lender.as_ptr()) });
    }
}

/// Shorter allocations get exactly this length, so that a thread can reuse them.
const SMALL_BYTES: usize = 512;
/// The longest tuple, which is what most of them contain: clearing a constant length needs no call.
const TUPLE_BYTES: usize = 16;
/// Maximum spare allocations of a thread.
const SPARE_LIMIT: usize = 256;

thread_local! {
    static SPARE: RefCell<SpareList> = const { RefCell::new(SpareList(Vec::new())) };
}

/// Small allocations without a handle.
struct SpareList(Vec<NonNull<Heap>>);

impl Drop for SpareList {
    fn drop(&mut self) {
        for heap in self.0.drain(..) {
            // SAFETY: no handle is left on a spare allocation.
            unsafe { Heap::release(heap) };
        }
    }
}

pub(crate) struct Heap {
    handles: AtomicU32,
    block: HeapBlock,
    charged_to: Option<Arc<PoolShared>>,
}

impl Heap {
    /// `len` zeroed bytes aligned to [`crate::ALIGNMENT`], and their owner. `len` is not zero.
    pub(crate) fn zeroed(len: usize) -> (NonNull<u8>, Owner) {
        assert!(len > 0, "an empty buffer owns nothing");
        let is_small = len <= SMALL_BYTES;
        if is_small && let Some(spare) = Heap::take_spare(len) {
            return spare;
        }
        Heap::own(HeapBlock::zeroed(if is_small { SMALL_BYTES } else { len }), None)
    }

    /// `len` bytes for a pool: from its spare block, or zeroed if there is none. `len` is not zero.
    pub(crate) fn charged(len: usize, spare: Option<HeapBlock>, pool: Arc<PoolShared>) -> (NonNull<u8>, Owner) {
        let block = spare.unwrap_or_else(|| HeapBlock::zeroed(len));
        assert_eq!(block.len_bytes(), len, "a spare block has the requested length");
        Heap::own(block, Some(pool))
    }

    fn own(block: HeapBlock, charged_to: Option<Arc<PoolShared>>) -> (NonNull<u8>, Owner) {
        let base = block.base;
        let header = Box::new(Heap { handles: AtomicU32::new(1), block, charged_to });
        (base, Owner::Heap(NonNull::from(Box::leak(header))))
    }

    /// A spare allocation with `len` zeroed bytes, if this thread has one.
    fn take_spare(len: usize) -> Option<(NonNull<u8>, Owner)> {
        // A thread that is about to end has no list.
        let heap = SPARE.try_with(|spare| spare.borrow_mut().0.pop()).ok().flatten()?;
        // SAFETY: a spare allocation is alive and has no handle, so this is the only access.
        let header = unsafe { heap.as_ref() };
        header.handles.store(1, Ordering::Relaxed);
        if len <= TUPLE_BYTES {
            // SAFETY: spare allocations are `SMALL_BYTES` long, which is more.
            unsafe { header.block.base.write_bytes(0, TUPLE_BYTES) };
        } else {
            // SAFETY: spare allocations are `SMALL_BYTES` long, which is at least `len`.
            unsafe { header.block.base.write_bytes(0, len) };
        }
        Some((header.block.base, Owner::Heap(heap)))
    }

    /// Returns the memory: to this thread's spare list if it is small, to the pool that it is charged to, or to the
    /// system.
    ///
    /// # Safety
    /// `heap` came from [`Heap::zeroed`] or [`Heap::charged`] and no handle on it is left.
    unsafe fn free(heap: NonNull<Heap>) {
        // SAFETY: the caller promises that the allocation is alive.
        let header = unsafe { heap.as_ref() };
        let is_small = header.block.len_bytes() == SMALL_BYTES && header.charged_to.is_none();
        let is_kept = is_small
            && SPARE.try_with(|spare| {
                let spare = &mut spare.borrow_mut().0;
                let has_room = spare.len() < SPARE_LIMIT;
                spare.extend(has_room.then_some(heap));
                has_room
            }) == Ok(true);
        if !is_kept {
            // SAFETY: the caller's promise.
            unsafe { Heap::release(heap) };
        }
    }

    /// Returns the memory to the pool it is charged to, or to the system.
    ///
    /// # Safety
    /// `heap` came from [`Heap::zeroed`] or [`Heap::charged`] and no handle on it is left.
    unsafe fn release(heap: NonNull<Heap>) {
        // SAFETY: `own` leaked this very box, and the caller holds the last pointer to it.
        let header = unsafe { Box::from_raw(heap.as_ptr()) };
        let Heap { block, charged_to, .. } = *header;
        if let Some(pool) = charged_to {
            pool.refund_heap(block);
        }
    }
}
