//! Pools: one arena whose slots are handed out and return when their last handle is dropped.

use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use crate::arena::Arena;
use crate::buffer::Buffer;
use crate::classes::{UNIT_BYTES, bytes_of, order_for};
use crate::heap::return_free_pages;
use crate::owner::{Heap, Owner};
use crate::pool_shared::{Counters, OverLimit, PoolShared};

/// An arena with slots of 512 bytes to 1 MiB (powers of two), backed by the heap when it runs out. Clones share it.
///
/// A pool stays on the thread that made it, so that taking a buffer and dropping it there need no lock. Its buffers may
/// go anywhere and outlive it; one that another thread drops is in use until the pool looks for such buffers, which is
/// when it runs out, or after some takes.
#[derive(Clone)]
pub struct Pool(Rc<PoolEnd>);

/// Ends the pool when dropped.
struct PoolEnd(Arc<PoolShared>);

impl Drop for PoolEnd {
    fn drop(&mut self) {
        PoolShared::end(&self.0);
    }
}

impl Pool {
    /// A pool with an arena of `arena_bytes`, rounded up to whole MiB (with zero, everything comes from the heap). Its
    /// buffers, in the arena and on the heap together, have at most `limit_bytes` when they are taken with
    /// [`Pool::try_take`].
    pub fn new(arena_bytes: usize, limit_bytes: usize) -> Pool {
        Pool(Rc::new(PoolEnd(PoolShared::new(arena_bytes, limit_bytes))))
    }

    /// `len` bytes from the arena, or from the heap if the arena has no room or `len` is above 1 MiB.
    ///
    /// The start is aligned to [`crate::ALIGNMENT`], or, for less than that many bytes, to `len` rounded up to a power
    /// of two of at least 512. The bytes may be those of a former use. The limit does not apply: callers whose requests
    /// are not bounded elsewhere must use [`Pool::try_take`].
    pub fn take(&self, len: usize) -> Buffer {
        self.take_within(len, usize::MAX).expect("a take without a limit does not exceed it")
    }

    /// As [`Pool::take`], but fails if the pool's buffers would then hold more than its limit.
    pub fn try_take(&self, len: usize) -> Result<Buffer, OverLimit> {
        self.take_within(len, self.limit_bytes())
    }

    fn take_within(&self, len: usize, limit_bytes: usize) -> Result<Buffer, OverLimit> {
        if len == 0 {
            return Ok(Buffer::default());
        }
        let order = order_for(len);
        let slot_bytes = order.map_or(len, bytes_of);
        let shared = &self.0.0;
        let taken = shared.take(order, slot_bytes, limit_bytes);
        if let Some(unit) = taken.map_err(|refused| OverLimit { requested_bytes: len, ..refused })? {
            let start = shared.region.at(unit as usize * UNIT_BYTES);
            let pool = NonNull::new(Arc::as_ptr(shared).cast_mut()).expect("an Arc never points at address zero");
            let owner = Owner::Slot { pool, unit };
            // SAFETY: the slot is at least `len` bytes long and has no other handle, and arena memory is initialised.
            return Ok(unsafe { Buffer::from_parts(start, len, owner) });
        }
        let found = order.map(|order| shared.spare().take(order));
        // A block of another length, which makes room, is freed without the lock.
        let spare = found.and_then(Result::ok);
        let (start, owner) = Heap::charged(slot_bytes, spare, Arc::clone(shared));
        // SAFETY: the allocation is at least `len` bytes long, initialised, and this is its only handle.
        Ok(unsafe { Buffer::from_parts(start, len, owner) })
    }

    /// The arena, for a reactor that registers it with its ring.
    pub fn arena(&self) -> Arena {
        self.0.0.region.describe()
    }

    /// Sets the io_uring buffer index under which the arena is registered; `None` if it is not registered any more.
    ///
    /// An index is valid for one ring only, and a wrong one makes the kernel refuse the operation with `EFAULT`. So a
    /// pool belongs to one reactor; buffers that travel to another are recognised there by their [`crate::ArenaId`].
    pub fn set_registration(&self, index: Option<u16>) {
        self.0.0.set_registration(index);
    }

    /// The counters so far.
    pub fn counters(&self) -> Counters {
        self.0.0.counters()
    }

    /// Begins to find out how many of the spare blocks on the heap are needed.
    pub fn watch_spare(&self) {
        self.0.0.spare().watch();
    }

    /// Gives the spare blocks that were not needed since [`Pool::watch_spare`] back to the system; returns their bytes.
    /// That may take milliseconds.
    pub fn give_back_unneeded(&self) -> usize {
        let unneeded = self.0.0.spare().take_unneeded();
        let bytes = unneeded.iter().map(|block| block.len_bytes()).sum();
        if bytes > 0 {
            drop(unneeded);
            return_free_pages();
        }
        bytes
    }

    /// The limit, in bytes, that [`Pool::try_take`] enforces.
    pub fn limit_bytes(&self) -> usize {
        self.0.0.limit_bytes
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("arena", &self.0.0.region.id).field("counters", &self.counters()).finish()
    }
}
