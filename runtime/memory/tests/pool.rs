//! Pools from the outside: alignment, fallback, limit, recycling, threads.

use sealblock_runtime_memory::{ALIGNMENT, Buffer, OverLimit, Pool, Registration, Slice};

const MIB: usize = 1 << 20;

#[test]
fn buffers_start_aligned() {
    let pool = Pool::new(4 * MIB, usize::MAX);
    for len in [4096, 4097, 65536, MIB, MIB + 1] {
        assert_eq!(pool.take(len).as_ptr() as usize % ALIGNMENT, 0, "pool, {len} bytes");
        assert_eq!(Buffer::zeroed(len).as_ptr() as usize % ALIGNMENT, 0, "heap, {len} bytes");
    }
    let small: Vec<Buffer> = (0..5).map(|_| pool.take(512)).collect();
    assert!(small.iter().all(|buffer| (buffer.as_ptr() as usize).is_multiple_of(512)));
}

#[test]
fn empty_buffers_hold_nothing() {
    let pool = Pool::new(MIB, 0);
    let empty = pool.try_take(0).expect("nothing is within any limit");
    assert!(empty.is_empty() && Buffer::zeroed(0).is_empty() && Slice::empty().is_empty());
    assert_eq!(empty.as_ptr() as usize % ALIGNMENT, 0);
    assert_eq!(pool.counters().taken, 0);
    assert!(Slice::empty().try_unfreeze().is_ok());
}

#[test]
fn a_full_arena_falls_back_to_the_heap_and_recovers() {
    let pool = Pool::new(MIB, usize::MAX);
    let inside = pool.take(MIB);
    assert!(inside.arena_id().is_some());
    assert_eq!((pool.counters().in_use_bytes, pool.counters().fallbacks), (MIB, 0));
    let outside = pool.take(4096);
    assert_eq!(outside.arena_id(), None);
    assert_eq!((pool.counters().heap_bytes, pool.counters().fallbacks), (4096, 1));
    drop((inside, outside));
    assert_eq!((pool.counters().in_use_bytes, pool.counters().heap_bytes), (0, 0));
    assert_eq!(pool.take(4096).arena_id(), Some(pool.arena().id));
}

#[test]
fn heap_memory_is_kept_for_the_next_request_of_its_length() {
    let pool = Pool::new(0, usize::MAX);
    let mut first = pool.take(65536);
    first.fill(7);
    let address = first.as_ptr();
    drop(first);
    assert_eq!((pool.counters().heap_bytes, pool.counters().spare_bytes), (0, 65536));
    let again = pool.take(40000);
    assert_eq!((again.as_ptr(), again.len(), again[0]), (address, 40000, 7));
    assert_eq!((pool.counters().heap_bytes, pool.counters().spare_bytes), (65536, 0));
    drop(pool);
    assert!(again.iter().all(|&byte| byte == 7), "it outlives its pool");
}

#[test]
fn what_nobody_needed_for_a_while_is_given_back_and_the_rest_is_kept() {
    let pool = Pool::new(0, usize::MAX);
    drop((0..4).map(|_| pool.take(65536)).collect::<Vec<Buffer>>());
    pool.watch_spare();
    drop((pool.take(65536), pool.take(65536), pool.take(65536)));
    assert_eq!(pool.give_back_unneeded(), 65536);
    assert_eq!(pool.counters().spare_bytes, 3 * 65536);
    assert_eq!(pool.give_back_unneeded(), 0, "nobody watched since");
    pool.watch_spare();
    let used = pool.take(65536);
    assert_eq!(pool.give_back_unneeded(), 2 * 65536);
    drop(used);
    assert_eq!(pool.counters().spare_bytes, 65536, "what came back later is not old");
}

#[test]
fn heap_memory_is_kept_up_to_a_bound_and_makes_room_for_other_lengths() {
    let pool = Pool::new(0, usize::MAX);
    let (many, kept) = if cfg!(miri) { (2, 2) } else { (66, 64) };
    drop((0..many).map(|_| pool.take(MIB)).collect::<Vec<Buffer>>());
    assert_eq!(pool.counters().spare_bytes, kept * MIB);
    let other = pool.take(65536);
    assert_eq!(pool.counters().spare_bytes, (kept - 1) * MIB, "one is given back for one of another length");
    drop(other);
    assert_eq!(pool.counters().spare_bytes, (kept - 1) * MIB + 65536);
    drop((pool.take(512), pool.take(MIB + 1)));
    assert_eq!(pool.counters().heap_bytes, 0);
    assert!(pool.counters().spare_bytes <= kept * MIB, "neither short nor longer ones are kept");
}

#[test]
fn a_request_above_the_largest_slot_comes_from_the_heap() {
    let pool = Pool::new(2 * MIB, usize::MAX);
    assert!(pool.take(MIB).arena_id().is_some());
    assert_eq!(pool.take(MIB + 1).arena_id(), None);
}

#[test]
fn the_limit_admits_what_fits_and_refuses_what_does_not() {
    let pool = Pool::new(MIB, 8192);
    let first = pool.try_take(4096).expect("half the limit");
    let second = pool.try_take(4096).expect("exactly the limit");
    let refused = pool.try_take(1).expect_err("one byte above the limit");
    assert_eq!(refused, OverLimit { requested_bytes: 1, held_bytes: 8192, limit_bytes: 8192 });
    drop(first);
    assert!(pool.try_take(4096).is_ok());
    drop(second);
    assert!(pool.try_take(8193).is_err());
}

#[test]
fn new_memory_is_zeroed_and_recycled_memory_keeps_its_bytes() {
    let pool = Pool::new(MIB, usize::MAX);
    let mut buffer = pool.take(4096);
    assert!(buffer.iter().all(|&byte| byte == 0));
    buffer.fill(7);
    let address = buffer.as_ptr();
    drop(buffer);
    let again = pool.take(4096);
    assert_eq!(again.as_ptr(), address);
    assert!(again.iter().all(|&byte| byte == 7));
}

#[test]
fn registration_is_seen_by_arena_buffers_only() {
    let pool = Pool::new(MIB, usize::MAX);
    let inside = pool.take(512);
    assert_eq!(inside.registration(), None);
    pool.set_registration(Some(3));
    let expected = Some(Registration { arena: pool.arena().id, index: 3 });
    assert_eq!(inside.registration(), expected);
    assert_eq!(inside.freeze().slice(1..2).registration(), expected);
    assert_eq!(Buffer::zeroed(512).registration(), None);
    pool.set_registration(None);
    assert_eq!(pool.take(512).registration(), None);
}

#[test]
fn arena_buffers_lie_in_the_arena() {
    let pool = Pool::new(MIB + 1, usize::MAX);
    let arena = pool.arena();
    assert_eq!(arena.len_bytes, 2 * MIB);
    let bounds = arena.base as usize..arena.base as usize + arena.len_bytes;
    let buffers: Vec<Buffer> = (0..16).map(|_| pool.take(100_000)).collect();
    let inside = buffers.iter().filter(|buffer| buffer.arena_id().is_some());
    assert!(
        inside.clone().all(|b| bounds.contains(&(b.as_ptr() as usize)) && b.as_ptr() as usize + b.len() <= bounds.end)
    );
    assert_eq!(inside.count(), 16);
}

#[test]
fn buffers_outlive_their_pool() {
    let pool = Pool::new(MIB, usize::MAX);
    let mut inside = pool.take(4096);
    let mut outside = pool.take(2 * MIB);
    drop(pool);
    inside.fill(1);
    outside.fill(2);
    assert_eq!((inside[4095], outside[2 * MIB - 1]), (1, 2));
}

#[test]
fn a_share_keeps_the_bytes_until_the_last_handle_goes() {
    let pool = Pool::new(MIB, usize::MAX);
    let mut buffer = pool.take(4096);
    buffer.fill(9);
    let whole = buffer.freeze();
    let part = whole.slice(10..=19);
    let whole = whole.try_unfreeze().expect_err("the part shares the allocation");
    drop(whole);
    assert_eq!(&part[..], &[9; 10]);
    assert_eq!(pool.counters().in_use_bytes, 4096);
    let part = part.try_unfreeze().expect("the part is alone now");
    assert_eq!(part.len(), 10);
    drop(part);
    assert_eq!(pool.counters().in_use_bytes, 0);
}

#[test]
fn neighbours_join_and_strangers_do_not() {
    let pool = Pool::new(MIB, usize::MAX);
    let mut a = pool.take(512);
    let b = a.split_off(100);
    let (b, a) = b.try_join(a).expect_err("the wrong order");
    assert_eq!(a.try_join(b).expect("neighbours").len(), 512);
    // Two adjacent slots are neighbours in memory, but not one allocation.
    let slots: Vec<Buffer> = (0..2).map(|_| pool.take(512)).collect();
    let [x, y] = <[Buffer; 2]>::try_from(slots).expect("two");
    let (x, y) = if x.as_ptr() < y.as_ptr() { (x, y) } else { (y, x) };
    assert_eq!(x.as_ptr() as usize + 512, y.as_ptr() as usize, "the premise of this test");
    assert!(x.try_join(y).is_err());
}

#[test]
#[should_panic(expected = "split at 5 of a buffer of 4 bytes")]
fn a_split_behind_the_end_is_refused() {
    Buffer::zeroed(4).split_off(5);
}

#[test]
#[should_panic(expected = "range 2..5 of a slice of 4 bytes")]
fn a_range_behind_the_end_is_refused() {
    Slice::copy_from(&[0; 4]).slice(2..5);
}

#[test]
fn memory_returns_from_any_thread() {
    let rounds = if cfg!(miri) { 20 } else { 5000 };
    let pool = Pool::new(MIB, usize::MAX);
    let (send, receive) = std::sync::mpsc::sync_channel::<Slice>(16);
    let receive = &std::sync::Mutex::new(receive);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(move || {
                loop {
                    let Ok(slice) = receive.lock().expect("no receiver panics").recv() else { return };
                    let first = slice[0];
                    assert!(slice.iter().all(|&byte| byte == first));
                }
            });
        }
        for round in 0..rounds {
            let mut buffer = pool.take(512 << (round % 4));
            buffer.fill(round as u8);
            let tail = buffer.split_off(256);
            send.send(buffer.freeze()).expect("the receivers live");
            send.send(tail.freeze()).expect("the receivers live");
        }
        drop(send);
    });
    assert_eq!(pool.counters().in_use_bytes, 0);
    assert_eq!(pool.counters().taken, rounds as u64);
}

#[test]
fn slots_that_another_thread_gave_back_are_found_when_a_class_or_the_limit_runs_out() {
    let pool = Pool::new(MIB, MIB);
    let all: Vec<Buffer> = (0..256).map(|_| pool.try_take(4096).expect("it is within the limit")).collect();
    assert!(pool.try_take(4096).is_err());
    let mut addresses: Vec<usize> = all.iter().map(|buffer| buffer.as_ptr() as usize).collect();
    std::thread::spawn(move || drop(all)).join().expect("it does not panic");
    let mut again: Vec<Buffer> = (0..256).map(|_| pool.try_take(4096).expect("they came back")).collect();
    assert!(again.iter().all(|buffer| buffer.arena_id().is_some()) && pool.try_take(4096).is_err());
    let mut later: Vec<usize> = again.iter().map(|buffer| buffer.as_ptr() as usize).collect();
    addresses.sort_unstable();
    later.sort_unstable();
    assert_eq!(addresses, later, "each of them once");
    let half = again.split_off(128);
    std::thread::spawn(move || drop(half)).join().expect("it does not panic");
    assert!(pool.try_take(MIB / 2).is_ok(), "another class finds their bytes within the limit, on the heap");
    drop(again);
    assert_eq!(pool.counters().in_use_bytes, 0);
    assert!(pool.take(MIB).arena_id().is_some(), "and the chunk is whole");
}

#[test]
fn a_few_slots_are_enough_for_buffers_that_another_thread_drops() {
    let pool = Pool::new(MIB, usize::MAX);
    let mut addresses = std::collections::BTreeSet::new();
    let rounds = if cfg!(miri) { 70 } else { 1000 };
    let (send, receive) = std::sync::mpsc::sync_channel::<Buffer>(0);
    let (dropped, is_dropped) = std::sync::mpsc::channel();
    let other = std::thread::spawn(move || {
        for buffer in receive {
            drop(buffer);
            dropped.send(()).expect("the test waits");
        }
    });
    for _ in 0..rounds {
        let buffer = pool.take(4096);
        addresses.insert(buffer.as_ptr() as usize);
        send.send(buffer).expect("the thread lives");
        is_dropped.recv().expect("the thread lives");
    }
    drop(send);
    other.join().expect("it does not panic");
    assert!(addresses.len() <= 33, "{} slots", addresses.len());
}

#[test]
fn the_arena_stays_until_the_last_slot_is_dropped_on_any_thread() {
    for last_here in [false, true] {
        let pool = Pool::new(MIB, usize::MAX);
        let mut there: Vec<Buffer> = (0..4).map(|_| pool.take(4096)).collect();
        let mut here = vec![pool.take(512), pool.take(MIB / 4)];
        // One is in the list when the pool ends, one comes back on its thread.
        let early = there.pop();
        std::thread::spawn(move || drop(early)).join().expect("it does not panic");
        drop(pool);
        drop(here.pop());
        here.iter_mut().chain(&mut there).for_each(|buffer| buffer.fill(7));
        if !last_here {
            here.clear();
        }
        let other = std::thread::spawn(move || {
            assert!(there.iter().all(|buffer| buffer.iter().all(|&byte| byte == 7)));
            drop(there);
        });
        other.join().expect("it does not panic");
        assert!(here.iter().all(|buffer| buffer.iter().all(|&byte| byte == 7)));
    }
}
