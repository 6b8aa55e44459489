//! The reference-counted owner behind every buffer and slice.
//!
//! Invariant: an `Owner` other than `Nothing` holds one count on its allocation, and the allocation outlives it.
//! Shape: an enum of raw pointers rather than an `Arc<dyn ..>`, because a pool slot must cost no heap allocation.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::arena::ArenaId;
use crate::buffer::Registration;
use crate::heap::Heap;
use crate::pool::Shared;

/// More handles than this on one allocation are a leak; stopping beats a wrapped count and a use after free.
const MAX_HANDLES: u32 = u32::MAX / 2;

pub(crate) enum Owner {
    /// Nothing is owned: the range is empty.
    Nothing,
    Heap(NonNull<Heap>),
    Slot {
        pool: NonNull<Shared>,
        unit: u32,
    },
}

impl Owner {
    pub(crate) fn is_same(&self, other: &Owner) -> bool {
        match (self, other) {
            (Owner::Heap(a), Owner::Heap(b)) => a == b,
            (Owner::Slot { pool: a, unit: i }, Owner::Slot { pool: b, unit: j }) => a == b && i == j,
            _ => false,
        }
    }

    /// Whether this is the only handle. What other handles did before they were dropped is then visible to the caller.
    pub(crate) fn is_only(&self) -> bool {
        self.count().is_none_or(|count| count.load(Ordering::Acquire) == 1)
    }

    pub(crate) fn registration(&self) -> Option<Registration> {
        match self {
            // SAFETY: the slot's handle keeps the pool alive, by the invariant of this module.
            Owner::Slot { pool, .. } => unsafe { pool.as_ref() }.registration(),
            _ => None,
        }
    }

    pub(crate) fn arena_id(&self) -> Option<ArenaId> {
        match self {
            // SAFETY: the slot's handle keeps the pool alive, by the invariant of this module.
            Owner::Slot { pool, .. } => Some(unsafe { pool.as_ref() }.arena_id()),
            _ => None,
        }
    }

    fn count(&self) -> Option<&AtomicU32> {
        match self {
            Owner::Nothing => None,
            // SAFETY: this handle holds a count, so the allocation's header is alive and never moved.
            Owner::Heap(heap) => Some(unsafe { &heap.as_ref().handles }),
            // SAFETY: as above; the pool is kept alive by the slot, and the slot by this handle.
            Owner::Slot { pool, unit } => Some(unsafe { pool.as_ref() }.handles(*unit)),
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
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let Some(count) = self.count() else { return };
        // The only handle stays the only one, as none can be cloned from it any more: most are, and save the locked subtraction.
        // Pairs with the release below in every other handle: their last accesses come before the memory is reused.
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
            // SAFETY: as above, and this handle was the one that kept the slot's hold on the pool.
            Owner::Slot { pool, unit } => unsafe { Shared::give_back(*pool, *unit) },
        }
    }
}
