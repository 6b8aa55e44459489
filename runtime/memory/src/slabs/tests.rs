//! Tests of the slabs, each with slabs of its own.

use std::time::{Duration, Instant};

use super::*;

fn apart() -> Slabs {
    Slabs(Slabs::apart())
}

fn take(slabs: &Slabs, count: usize) -> Vec<Buffer> {
    let mut chunks = Vec::new();
    while chunks.len() < count {
        slabs.take((count - chunks.len()).min(4), &mut chunks);
    }
    chunks
}

fn is_zeroed(chunk: &[u8]) -> bool {
    chunk.len() == SLAB_CHUNK_BYTES && chunk.iter().all(|&byte| byte == 0)
}

/// Waits for the thread.
fn until(slabs: &Slabs, is_so: impl Fn(&State) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so(&slabs.0.shared.lock()) {
        assert!(Instant::now() < deadline, "the thread did not do it");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Compares the counts with the sets.
fn assert_consistent(state: &State) {
    for set in SETS {
        let counted: u32 = state.slots.iter().map(|slot| slot.free[set as usize].count_ones()).sum();
        assert_eq!(state.counts[set as usize], counted as usize, "{set:?}");
        let is_found = |number: usize| state.listed[set as usize].contains(&(number as u32));
        assert!(state.slots.iter().enumerate().all(|(n, slot)| slot.is_listed[set as usize] == is_found(n)));
        assert!(state.slots.iter().all(|slot| slot.free[set as usize] == 0 || slot.is_listed[set as usize]));
    }
    assert_eq!(state.whole, state.slots.iter().filter(|slot| slot.is_whole()).count());
    assert_eq!(state.vacant.len(), state.slots.iter().filter(|slot| slot.slab.is_none()).count());
}

#[test]
fn nothing_is_taken_before_a_chunk_is_and_no_thread_starts_for_a_few() {
    let slabs = apart();
    assert_eq!(slabs.mapped_bytes(), 0);
    let chunks = take(&slabs, 12);
    assert_eq!(slabs.mapped_bytes(), mapping::SLAB_BYTES);
    assert!(slabs.0.thread.get().is_none(), "one slab is enough");
    assert!(chunks.iter().all(|chunk| is_zeroed(chunk) && chunk.as_ptr().align_offset(crate::ALIGNMENT) == 0));
    drop(chunks);
    assert_consistent(&slabs.0.shared.lock());
}

#[test]
fn chunks_never_show_what_was_in_them_before() {
    let slabs = apart();
    for _ in 0..3 {
        let mut chunks = take(&slabs, 40);
        for chunk in &mut chunks {
            assert!(is_zeroed(chunk));
            chunk.fill(0xEE);
        }
        // A slice keeps its chunk.
        let slice = chunks.pop().expect("forty").freeze().slice(5..9);
        drop(chunks);
        assert!(take(&slabs, 40).iter().all(|chunk| is_zeroed(chunk)));
        assert_eq!(&slice[..], [0xEE; 4]);
    }
    assert_consistent(&slabs.0.shared.lock());
}

#[test]
#[cfg(not(miri))]
fn the_thread_makes_as_much_ahead_as_was_taken_up_to_a_limit() {
    let slabs = apart();
    let mut chunks = take(&slabs, 32);
    until(&slabs, |state| state.counts[Set::Ready as usize] >= 16);
    assert!(slabs.ready_bytes() <= 48 * SLAB_CHUNK_BYTES, "no more than was taken, to whole slabs");
    chunks.extend(take(&slabs, 600));
    until(&slabs, |state| state.is_asleep && state.counts[Set::Ready as usize] >= MAX_AHEAD / 2);
    assert!(slabs.ready_bytes() <= (MAX_AHEAD + 16) * SLAB_CHUNK_BYTES);
    let before = slabs.mapped_bytes();
    chunks.extend(take(&slabs, 100));
    assert!(slabs.mapped_bytes() <= before + (mapping::SLAB_BYTES * 16), "these were ready");
    assert!(chunks.iter().all(|chunk| is_zeroed(chunk)));
    assert_consistent(&slabs.0.shared.lock());
}

#[test]
#[cfg(not(miri))]
fn slabs_that_nothing_uses_go_back_to_the_system() {
    let slabs = apart();
    let (mut chunks, one) = (take(&slabs, 1100), take(&slabs, 1));
    chunks.iter_mut().for_each(|chunk| chunk.fill(1));
    let before = slabs.mapped_bytes();
    drop(chunks);
    until(&slabs, |state| state.is_asleep && state.leaving.is_empty());
    assert!(before > 130 << 20 && slabs.mapped_bytes() <= (MAX_WHOLE + 2) * mapping::SLAB_BYTES);
    assert!(take(&slabs, 700).iter().all(|chunk| is_zeroed(chunk)));
    assert!(is_zeroed(&one[0]));
    assert_consistent(&slabs.0.shared.lock());
}

#[test]
#[cfg(not(miri))]
fn free_chunks_beside_used_ones_keep_their_pages_only_up_to_a_limit() {
    let slabs = apart();
    let mut chunks = take(&slabs, 1600);
    chunks.iter_mut().for_each(|chunk| chunk.fill(1));
    // Every second one comes back, so no slab is free.
    let kept: Vec<Buffer> = chunks.into_iter().step_by(2).collect();
    until(&slabs, |state| state.is_asleep && state.counts[Set::Dirty as usize] < MANY_DIRTY);
    {
        let state = slabs.0.shared.lock();
        let resident = state.counts[Set::Ready as usize] + state.counts[Set::Dirty as usize];
        assert!(resident <= MAX_RESIDENT + MAX_AHEAD && state.counts[Set::Cold as usize] > 100);
    }
    let again = take(&slabs, 700);
    assert!(again.iter().all(|chunk| is_zeroed(chunk)));
    assert!(kept.iter().all(|chunk| chunk.iter().all(|&byte| byte == 1)));
    assert_consistent(&slabs.0.shared.lock());
}

#[test]
fn the_thread_ends_with_the_last_handle_and_the_memory_with_the_last_chunk() {
    let slabs = apart();
    let shared = Arc::clone(&slabs.0.shared);
    let mut chunks = take(&slabs, 40);
    assert!(slabs.0.thread.get().is_some());
    let other = slabs.clone();
    drop(slabs);
    assert!(take(&other, 1).iter().all(|chunk| is_zeroed(chunk)));
    let count = Arc::strong_count(&shared);
    drop(other);
    assert_eq!(Arc::strong_count(&shared), count - 2, "the handle and the thread are gone");
    let last = chunks.split_off(39);
    drop(chunks);
    assert_eq!(shared.lock().slots.iter().filter(|slot| slot.slab.is_some()).count(), 1);
    assert!(is_zeroed(&last[0]));
    drop(last);
    assert!(shared.lock().slots.iter().all(|slot| slot.slab.is_none()));
    assert_consistent(&shared.lock());
}

#[test]
fn the_process_has_one_set_of_slabs_while_somebody_has_them_open() {
    let (first, second) = (Slabs::open(), Slabs::open());
    assert!(Arc::ptr_eq(&first.0, &second.0));
    let whole = first.take_slab().expect("there is memory for a slab");
    assert!(whole.len() == 16 && whole.iter().all(|chunk| is_zeroed(chunk)));
}

#[test]
fn threads_take_and_drop_chunks_that_nobody_else_has() {
    let (slabs, rounds) = (apart(), if cfg!(miri) { 5 } else { 400 });
    thread::scope(|scope| {
        for id in 1..=3_u8 {
            let slabs = &slabs;
            scope.spawn(move || {
                let mut held: Vec<Buffer> = Vec::new();
                for round in 0..rounds {
                    let before = held.len();
                    slabs.take(1 + round % 4, &mut held);
                    for chunk in &mut held[before..] {
                        assert!(is_zeroed(chunk));
                        chunk.fill(id);
                    }
                    if held.len() > 30 {
                        // In another order than they were taken.
                        let gone = held.split_off(10 + usize::from(id));
                        assert!(gone.iter().all(|chunk| chunk.iter().all(|&byte| byte == id)));
                    }
                }
            });
        }
    });
    assert_consistent(&slabs.0.shared.lock());
}
