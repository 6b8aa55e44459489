//! Slots that threads give back to a pool, under random interleavings of their atomic operations: none is lost or found
//! twice, and a pool that ends is freed once, after its last slot.

use std::sync::Arc;

use shuttle::sync::Mutex;
use shuttle::{check_random, thread};

/// The model checker's atomics replace the standard ones, for the file that is included below.
mod primitives {
    pub use shuttle::sync::atomic::{AtomicIsize, AtomicU32, Ordering};
}

#[path = "../src/returned.rs"]
mod returned;

use primitives::{AtomicU32, Ordering};
use returned::ReturnedSlots;

const INTERLEAVINGS: usize = 20_000;
const SLOTS: u32 = 3;
const ROUNDS: u32 = 2;

trait List: Send + Sync + 'static {
    fn new() -> Self;
    fn push(&self, slot: u32, links: &[AtomicU32]);
    fn take(&self, links: &[AtomicU32], each: &mut dyn FnMut(u32));
}

impl List for ReturnedSlots {
    fn new() -> ReturnedSlots {
        ReturnedSlots::new()
    }

    fn push(&self, slot: u32, links: &[AtomicU32]) {
        assert!(!ReturnedSlots::push(self, slot, &links[slot as usize]), "the pool has not ended");
    }

    fn take(&self, links: &[AtomicU32], each: &mut dyn FnMut(u32)) {
        ReturnedSlots::take(self, |slot| &links[slot as usize], each);
    }
}

fn links() -> Arc<Vec<AtomicU32>> {
    Arc::new((0..SLOTS).map(|_| AtomicU32::new(0)).collect())
}

/// A pool's thread takes slots that other threads have given back, and hands them out again.
fn run<L: List>() {
    let (list, links) = (Arc::new(L::new()), links());
    let mut found = vec![0; SLOTS as usize];
    let mut free: Vec<u32> = (0..SLOTS).collect();
    let mut threads = Vec::new();
    for _ in 0..ROUNDS {
        for slot in free.drain(..) {
            let (list, links) = (Arc::clone(&list), Arc::clone(&links));
            links[slot as usize].store(1, Ordering::Relaxed);
            threads.push(thread::spawn(move || list.push(slot, &links)));
        }
        thread::yield_now();
        list.take(&links, &mut |slot| {
            found[slot as usize] += 1;
            // It is used again at once.
            links[slot as usize].store(1, Ordering::Relaxed);
            free.push(slot);
            assert!(free.len() <= SLOTS as usize, "a slot is found twice: {free:?}");
        });
    }
    let given = threads.len();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    list.take(&links, &mut |slot| {
        found[slot as usize] += 1;
        // The links of a broken list may be a ring, which has no end.
        assert!(found.iter().sum::<usize>() <= given, "a slot is found twice: {found:?}");
    });
    assert_eq!(found.iter().sum::<usize>(), given, "a slot is lost or found twice: {found:?}");
}

#[test]
fn each_slot_that_is_given_back_is_found_once() {
    check_random(run::<ReturnedSlots>, INTERLEAVINGS);
}

/// Publishes a slot before its link.
struct LinksLate(AtomicU32);

impl List for LinksLate {
    fn new() -> LinksLate {
        LinksLate(AtomicU32::new(0))
    }

    fn push(&self, slot: u32, links: &[AtomicU32]) {
        let before = self.0.swap(slot + 1, Ordering::AcqRel);
        links[slot as usize].store(before, Ordering::Relaxed);
    }

    fn take(&self, links: &[AtomicU32], each: &mut dyn FnMut(u32)) {
        take_by(self.0.swap(0, Ordering::AcqRel), links, each);
    }
}

/// Empties the list by a store after it has looked.
struct TakesInTwoSteps(AtomicU32);

impl List for TakesInTwoSteps {
    fn new() -> TakesInTwoSteps {
        TakesInTwoSteps(AtomicU32::new(0))
    }

    fn push(&self, slot: u32, links: &[AtomicU32]) {
        let mut head = self.0.load(Ordering::Relaxed);
        loop {
            links[slot as usize].store(head, Ordering::Relaxed);
            match self.0.compare_exchange(head, slot + 1, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    fn take(&self, links: &[AtomicU32], each: &mut dyn FnMut(u32)) {
        let head = self.0.load(Ordering::Acquire);
        self.0.store(0, Ordering::Release);
        take_by(head, links, each);
    }
}

fn take_by(mut head: u32, links: &[AtomicU32], each: &mut dyn FnMut(u32)) {
    while head != 0 {
        let slot = head - 1;
        head = links[slot as usize].load(Ordering::Relaxed);
        each(slot);
    }
}

#[test]
#[should_panic(expected = "found twice")]
fn a_slot_that_is_published_before_its_link_is_caught() {
    check_random(run::<LinksLate>, INTERLEAVINGS);
}

#[test]
#[should_panic(expected = "a slot is lost")]
fn a_list_that_is_emptied_in_two_steps_is_caught() {
    check_random(run::<TakesInTwoSteps>, INTERLEAVINGS);
}

/// What became of a pool: slots that came back, and how often it was freed.
#[derive(Default)]
struct End {
    dropped: u32,
    freed: u32,
}

/// A pool ends while other threads give back its slots. `end` does what its thread does then, and returns whether it is
/// to be freed.
fn run_end(end: fn(&ReturnedSlots, &[AtomicU32]) -> bool) {
    let (list, links, state) = (Arc::new(ReturnedSlots::new()), links(), Arc::new(Mutex::new(End::default())));
    let free = |state: &Mutex<End>| {
        let mut state = state.lock().unwrap();
        state.freed += 1;
        assert_eq!(state.dropped, SLOTS, "it is freed before its last slot");
    };
    let threads: Vec<_> = (0..SLOTS)
        .map(|slot| {
            let (list, links, state) = (Arc::clone(&list), Arc::clone(&links), Arc::clone(&state));
            thread::spawn(move || {
                state.lock().unwrap().dropped += 1;
                if list.push(slot, &links[slot as usize]) {
                    free(&state);
                }
            })
        })
        .collect();
    if end(&list, &links) {
        free(&state);
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(state.lock().unwrap().freed, 1, "it is freed once");
}

#[test]
fn a_pool_that_ends_is_freed_once_after_its_last_slot() {
    let end = |list: &ReturnedSlots, links: &[AtomicU32]| {
        let mut in_use = SLOTS as usize;
        list.close(|slot| &links[slot as usize], |_| in_use -= 1);
        list.count_left(in_use)
    };
    check_random(move || run_end(end), INTERLEAVINGS);
}

#[test]
#[should_panic(expected = "it is freed once")]
fn a_pool_that_counts_its_slots_before_it_closes_the_list_is_caught() {
    let end = |list: &ReturnedSlots, links: &[AtomicU32]| {
        let mut in_use = SLOTS as usize;
        list.take(|slot| &links[slot as usize], |_| in_use -= 1);
        list.close(|slot| &links[slot as usize], |_| ());
        list.count_left(in_use)
    };
    check_random(move || run_end(end), INTERLEAVINGS);
}

#[test]
#[should_panic(expected = "it is freed")]
fn a_pool_that_is_freed_when_it_ends_is_caught() {
    let end = |list: &ReturnedSlots, links: &[AtomicU32]| {
        list.close(|slot| &links[slot as usize], |_| ());
        true
    };
    check_random(move || run_end(end), INTERLEAVINGS);
}
