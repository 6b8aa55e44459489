//! Wakers that cost nothing to make, clone or drop.
//!
//! A waker is one word: which core, which task slot, which generation of it. Nothing is counted or allocated; a waker
//! that outlives its task, or its reactor, finds another generation or no task and does nothing, or wakes a task without need,
//! which every future must tolerate anyway. So a generation that wraps around is harmless.
//!
//! Shape: a waker must be `Send`, although tasks are not. On the core's own thread it reaches the ready queue directly;
//! from other threads it goes through the directory of cores to the core's inbox.

use std::sync::{Arc, PoisonError, RwLock};
use std::task::{RawWaker, RawWakerVTable, Waker};

use crate::cross_core::ReactorShared;
use crate::executor;

const _: () = assert!(usize::BITS == 64, "a waker packs three numbers into one 64-bit word");

/// Bits of a slot index, and of its generation.
const FIELD_BITS: u32 = 24;
/// The largest value of either.
pub(crate) const FIELD_MASK: u32 = (1 << FIELD_BITS) - 1;

/// A core's index in the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CoreId(u16);

/// A task slot and its generation, 24 bits each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TaskId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// The future given to `block_on`, which lives in no slot.
pub(crate) const ROOT: TaskId = TaskId { index: FIELD_MASK, generation: 0 };

/// The reactors of this process, so that a waker can find its own from another thread.
static DIRECTORY: RwLock<Vec<Option<Arc<ReactorShared>>>> = RwLock::new(Vec::new());

pub(crate) fn register(shared: &Arc<ReactorShared>) -> CoreId {
    let mut cores = DIRECTORY.write().unwrap_or_else(PoisonError::into_inner);
    let place = cores.iter().position(Option::is_none).unwrap_or(cores.len());
    let id = u16::try_from(place).expect("a process has fewer than 65536 reactors");
    if place == cores.len() {
        cores.push(None);
    }
    cores[place] = Some(Arc::clone(shared));
    CoreId(id)
}

pub(crate) fn unregister(id: CoreId) {
    DIRECTORY.write().unwrap_or_else(PoisonError::into_inner)[id.0 as usize] = None;
}

pub(crate) fn waker(core: CoreId, task: TaskId) -> Waker {
    let word = (core.0 as usize) << (2 * FIELD_BITS) | (task.generation as usize) << FIELD_BITS | task.index as usize;
    // SAFETY: the functions of the table never follow the pointer; they take it for the number it is.
    unsafe { Waker::from_raw(raw(std::ptr::without_provenance(word))) }
}

fn raw(word: *const ()) -> RawWaker {
    static TABLE: RawWakerVTable = RawWakerVTable::new(raw, wake, wake, |_| {});
    RawWaker::new(word, &TABLE)
}

fn wake(word: *const ()) {
    let word = word.addr();
    let task = TaskId { index: word as u32 & FIELD_MASK, generation: (word >> FIELD_BITS) as u32 & FIELD_MASK };
    let core = CoreId((word >> (2 * FIELD_BITS)) as u16);
    if executor::wake_here(core, task) {
        return;
    }
    let cores = DIRECTORY.read().unwrap_or_else(PoisonError::into_inner);
    if let Some(shared) = cores.get(core.0 as usize).and_then(Option::as_ref) {
        shared.wake_task(task);
    }
}
