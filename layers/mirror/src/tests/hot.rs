//! Groups that stay in the labels: how many labels large mirrors cost, what makes room, and what a crash or a failed replica leaves.

use std::pin::Pin;

use futures_util::FutureExt;
use sealblock_block::{Device, Request, RequestKind};

use super::*;
use crate::label::regions::{MAX_REGIONS, RegionMap};
use crate::mirror::hot_groups::HotGroups;

/// Blocks of a group of the usual test replicas, which have eight.
const GROUP: u64 = 256;

/// A disk with a volatile cache, which stops with all others of its machine.
struct Disk {
    memory: Gate<MemoryDevice>,
    /// It keeps labels only.
    drops_data: bool,
    label_writes: Cell<u64>,
    /// How often the future of a write, and of a label or a flush, is polled before it is done.
    polls: Cell<[u32; 2]>,
    /// What blocks held before they were written, since the last flush.
    unflushed: RefCell<Vec<(Extent, Option<Sealed>)>>,
    /// Requests until the machine stops.
    requests_left: Rc<Cell<u64>>,
}

impl Disk {
    fn new(blocks: u64, requests_left: &Rc<Cell<u64>>) -> Rc<Disk> {
        Rc::new(Disk {
            memory: Gate::new("disk", MemoryDevice::new(BlockSize::B4096, blocks, None)),
            drops_data: false,
            label_writes: Cell::default(),
            polls: Cell::default(),
            unflushed: RefCell::default(),
            requests_left: requests_left.clone(),
        })
    }

    /// What was not flushed is lost in a power cut.
    fn lose(&self) {
        for (at, before) in self.unflushed.take().into_iter().rev() {
            let request = match before {
                Some(before) => Request::write(at, before, Durability::Volatile),
                None => Request::write_zeroes(at, true, Durability::Volatile),
            };
            run(&self.memory, request).unwrap();
        }
    }

    fn keep(&self, at: Extent) {
        let before = match run(&self.memory, Request::read(at, Expectations::NONE)) {
            Ok(Response::Data(data)) => Some(data),
            _ => None,
        };
        self.unflushed.borrow_mut().push((at, before));
    }
}

struct Shared(Rc<Disk>);

impl Device for Shared {
    fn geometry(&self) -> &Geometry {
        self.0.memory.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0.memory.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        let (disk, kind) = (&*self.0, request.kind());
        if disk.requests_left.get() == 0 {
            return pending().await;
        }
        disk.requests_left.set(disk.requests_left.get() - 1);
        let mut polls = disk.polls.get()[usize::from(kind != RequestKind::Write)];
        poll_fn(|_| {
            let is_done = polls == 0;
            polls = polls.saturating_sub(1);
            if is_done { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        match kind {
            RequestKind::WriteReserved => disk.label_writes.set(disk.label_writes.get() + 1),
            RequestKind::Write if disk.drops_data => return Ok(Response::Done),
            RequestKind::Write => disk.keep(request.extent().expect("a write has blocks")),
            RequestKind::Flush => disk.unflushed.borrow_mut().clear(),
            _ => {}
        }
        disk.memory.execute(request).await
    }
}

/// A mirror of these disks, which all answer at once.
fn mirror_of(disks: &[Rc<Disk>; 2], hooks: TestHooks) -> TestMirror {
    let source = |disk: &Rc<Disk>| ReplicaSource::new("disk", Ok(DynDevice::new("disk", Shared(disk.clone()))), None);
    let options = OpenOptions { is_read_only: false, accepts_lost_label: false, random: random() };
    let opened = open_with_hooks(disks.iter().map(source).collect(), StoppedClock, options, hooks).now_or_never();
    opened.expect("nothing stops or waits").unwrap().mirror
}

/// Writes single blocks, so many at a time, all over a mirror of 64 GiB; `after` is called with the number of writes that completed.
fn write_everywhere(mirror: &TestMirror, writes: u64, depth: usize, mut after: impl FnMut(u64)) {
    let mut state = 1_u64;
    let data = write_of(mirror, extent(0, 1), 1);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut request = data.clone();
        request.extents = extent((state >> 33) % (64 << 18), 1).into();
        mirror.execute(request)
    };
    let mut flying: Vec<Pin<Box<_>>> = (0..depth).map(|_| Box::pin(next())).collect();
    let mut done = 0;
    while done < writes {
        for place in &mut flying {
            if let Some(outcome) = place.as_mut().now_or_never() {
                outcome.unwrap();
                done += 1;
                after(done);
                *place = Box::pin(next());
            }
        }
    }
}

#[test]
fn a_large_mirror_that_is_written_everywhere_soon_writes_no_more_labels() {
    const WRITES: u64 = 100_000;
    // A label takes as long as ten writes.
    for (depth, most) in [(16, 100), (1, 300)] {
        let disks = [0, 1].map(|_| {
            let mut disk = Disk::new(64 << 18, &Rc::new(Cell::new(u64::MAX)));
            Rc::get_mut(&mut disk).unwrap().drops_data = true;
            disk
        });
        let mirror = mirror_of(&disks, TestHooks::default());
        disks.iter().for_each(|disk| disk.polls.set([1, 10]));
        let (labels, mut at_half) = (disks[0].label_writes.get(), 0);
        write_everywhere(&mirror, WRITES, depth, |done| {
            if done == WRITES / 2 {
                at_half = disks[0].label_writes.get() - labels;
            }
        });
        let all = disks[0].label_writes.get() - labels;
        assert!(all <= most, "{all} labels at QD {depth}");
        assert_eq!(all, at_half, "in the second half at QD {depth}");
        assert_eq!(mirror.describe().dirty_bytes, 64 << 30);
    }
}

#[test]
fn what_a_crash_leaves_to_compare_is_bounded_and_grows_with_the_device() {
    let of = |bytes: u64| {
        let map = RegionMap::new(BlockSize::B4096, bytes >> 12, MAX_REGIONS).unwrap();
        let limit = HotGroups::new(&map, BlockSize::B4096, None).limit();
        (map.group_blocks() << 12, u64::from(limit) * (map.group_blocks() << 12))
    };
    let (mib, gib) = (1 << 20, 1 << 30);
    assert_eq!(of(64 * mib), (mib, 64 * mib));
    assert_eq!(of(8 * gib), (8 * mib, 8 * gib));
    assert_eq!(of(64 * gib), (64 * mib, 64 * gib));
    assert_eq!(of(10 << 40), (64 * mib, 64 * gib));
    let coarse = RegionMap::new(BlockSize::B4096, (10 << 40) >> 12, 8192).unwrap();
    assert_eq!(coarse.group_blocks() << 12, 2 * gib, "a region");
    assert_eq!(HotGroups::new(&coarse, BlockSize::B4096, None).limit(), 64);
}

/// A pair of usual replicas whose labels have room for four of eight groups.
fn crowded_pair() -> (TestReplica, TestReplica, TestMirror) {
    let (a, b) = (TestReplica::new("a", None), TestReplica::new("b", None));
    let hooks = TestHooks { hot_groups: Some(4), ..TestHooks::default() };
    let mirror = opened_with_hooks(&[&a, &b], hooks);
    (a, b, mirror)
}

#[test]
fn groups_make_room_for_others_from_the_one_that_was_changed_the_longest_ago() {
    let (_, _, mirror) = crowded_pair();
    let is_marked =
        |group: u64| mirror.write_intent.is_recorded(&mirror.map.groups(&mirror.map.of(extent(group * GROUP, 1))));
    assert_eq!(mirror.describe().max_dirty_bytes, 4 << 20);
    for (group, marked) in [(0, vec![0]), (1, vec![0, 1]), (2, vec![0, 1, 2]), (3, vec![0, 1, 2, 3])] {
        write(&mirror, extent(group * GROUP, 1), 1).unwrap();
        assert_eq!((0..8).filter(|group| is_marked(*group)).collect::<Vec<_>>(), marked);
    }
    write(&mirror, extent(0, 1), 2).unwrap();
    write(&mirror, extent(4 * GROUP, 1), 2).unwrap();
    assert_eq!((0..8).filter(|group| is_marked(*group)).collect::<Vec<_>>(), [0, 2, 3, 4]);
    for block in (0..8 * GROUP).step_by(100) {
        write(&mirror, extent(block, 1), 3).unwrap();
        assert!(mirror.describe().dirty_bytes <= 4 << 20);
    }
    // A change of several groups at once has them all.
    write(&mirror, extent(0, 8 * GROUP), 4).unwrap();
    assert!((0..8).all(is_marked));
    sweep(&mirror);
    assert_eq!(mirror.describe().dirty_bytes, 0);
}

#[test]
fn a_write_where_labels_say_so_already_waits_for_no_label_and_no_room() {
    let (a, b, mirror) = crowded_pair();
    (0..4).for_each(|group| write(&mirror, extent(group * GROUP, 1), 1).unwrap());
    for is_flush in [false, true] {
        // The oldest group is flushed before it goes, if it was not since it was changed.
        [3, 1, 2].into_iter().for_each(|group| write(&mirror, extent(group * GROUP, 1), 1).unwrap());
        let stall = |stalls: bool| {
            for replica in [&a, &b] {
                replica.holds_labels.set(stalls && !is_flush);
                replica.holds_flushes.set(stalls && is_flush);
            }
        };
        stall(true);
        let mut elsewhere =
            Box::pin(mirror.execute(write_of(&mirror, extent((4 + u64::from(is_flush)) * GROUP, 1), 2)));
        assert!(elsewhere.as_mut().now_or_never().is_none(), "another group has to go, and a label to be written");
        write(&mirror, extent(2 * GROUP + 7, 1), 3).unwrap();
        stall(false);
        elsewhere.now_or_never().expect("nothing is held").unwrap();
    }
}

#[test]
fn a_write_where_labels_say_so_already_waits_for_no_label_of_another() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 1), 1).unwrap();
    [&a, &b].into_iter().for_each(|replica| replica.holds_labels.set(true));
    let mut elsewhere = Box::pin(mirror.execute(write_of(&mirror, extent(3 * GROUP, 1), 2)));
    assert!(elsewhere.as_mut().now_or_never().is_none());
    write(&mirror, extent(GROUP - 1, 1), 3).unwrap();
    assert_reads(&mirror, extent(GROUP - 1, 1), 3);
    // Neither does a flush, nor what comes later and shares the next label.
    run(&mirror, Request::flush()).unwrap();
    let mut later = Box::pin(mirror.execute(write_of(&mirror, extent(5 * GROUP, 1), 2)));
    assert!(later.as_mut().now_or_never().is_none());
    write(&mirror, extent(0, 2), 4).unwrap();
    [&a, &b].into_iter().for_each(|replica| replica.holds_labels.set(false));
    elsewhere.now_or_never().expect("nothing is held").unwrap();
    later.now_or_never().expect("nothing is held").unwrap();
}

#[test]
fn the_second_label_of_an_opening_after_a_crash_is_that_of_its_first_change() {
    for is_changed in [true, false] {
        let (a, b, mirror) = pair(None);
        write(&mirror, extent(0, 1), 1).unwrap();
        // The last labels reached one replica only, and what they were written for none, or one.
        b.is_hung.set(true);
        assert!(mirror.execute(write_of(&mirror, extent(GROUP, 1), 2)).now_or_never().is_none());
        b.is_hung.set(false);
        drop(mirror);
        let labels = a.label_writes.get();
        let again = opened(&[&a, &b]);
        assert_eq!(a.label_writes.get(), labels + 1, "labels that are equal");
        if is_changed {
            write(&again, extent(0, 1), 3).unwrap();
            assert_eq!(a.label_writes.get(), labels + 3, "a session is announced and confirmed");
        } else {
            // Replicas that differ are made equal only under labels that record the first ones.
            write(&*b.memory, extent(0, 1), 4).unwrap();
            a.holds_labels.set(true);
            let mut reading = Box::pin(again.execute(Request::read(extent(0, 1), Expectations::NONE)));
            assert!(reading.as_mut().now_or_never().is_none());
            assert_reads(&*b.memory, extent(0, 1), 4);
            a.holds_labels.set(false);
            reading.now_or_never().expect("nothing is held").unwrap();
            assert_reads(&*b.memory, extent(0, 1), 1);
            assert!(a.label_writes.get() > labels + 1);
        }
    }
}

/// Writes to more groups than labels have room for until the machine stops after so many requests, and has power again, when the disk
/// of that number has lost what was not flushed. True if it stopped; the replicas must be the same then.
fn power_cut_after(requests: u64, loses: usize, mutation: Mutation) -> Result<bool, String> {
    let requests_left = Rc::new(Cell::new(u64::MAX));
    let disks = [0, 1].map(|_| Disk::new(BLOCKS, &requests_left));
    let hooks = TestHooks { mutation, hot_groups: Some(3), ..TestHooks::default() };
    let mirror = mirror_of(&disks, hooks);
    requests_left.set(requests);
    let is_cut = {
        let work = async {
            for step in 0..20 {
                let at = extent(step * 3 % 8 * GROUP + step, 1);
                mirror.execute(write_of(&mirror, at, step as u8 + 1)).await.unwrap();
                if step == 11 {
                    mirror.execute(Request::flush()).await.unwrap();
                }
                if step % 7 == 6 {
                    mirror.sweep().await.unwrap();
                }
            }
        };
        work.now_or_never().is_none()
    };
    drop(mirror);
    disks[loses].lose();
    disks[1 - loses].unflushed.take();
    requests_left.set(u64::MAX);
    let again = mirror_of(&disks, TestHooks::default());
    resync(&again);
    verify(&again).map_err(|error| format!("cut after {requests} requests: {error}"))?;
    Ok(is_cut)
}

#[test]
fn a_power_cut_while_groups_make_room_leaves_no_difference_that_no_label_knows() {
    for loses in [0, 1] {
        let cuts = (0..).take_while(|requests| power_cut_after(*requests, loses, Mutation::None).unwrap()).count();
        assert!(cuts > 100, "{cuts}");
    }
}

#[test]
fn groups_that_make_room_without_a_flush_are_noticed() {
    let is_caught = |requests| power_cut_after(requests, 1, Mutation::EvictUnflushed).is_err();
    assert!((0..200).any(is_caught));
}

#[test]
fn a_replica_that_fails_lacks_what_was_not_flushed_and_not_all_that_labels_mark() {
    let (_, b, mirror) = pair(None);
    for block in (0..BLOCKS).step_by(16) {
        write(&mirror, extent(block, 1), 1).unwrap();
    }
    run(&mirror, Request::flush()).unwrap();
    write(&mirror, extent(0, 1), 2).unwrap();
    b.is_offline.set(true);
    write(&mirror, extent(GROUP, 1), 2).unwrap();
    assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::OutOfSync]);
    assert_eq!(mirror.describe().dirty_bytes, BLOCKS << 12, "the labels go on marking all of it");
    assert_eq!(mirror.describe().replicas[1].out_of_sync_bytes, 2 << 16);
    // It may have lost what it had not flushed.
    write(&*b.memory, extent(0, 1), 1).unwrap();
    b.is_offline.set(false);
    reattach(&mirror, &b).unwrap();
    assert_eq!(mirror.describe().replicas[1].out_of_sync_bytes, 2 << 16);
    resync(&mirror);
    assert_reads(&*b.memory, extent(0, 1), 2);
    assert_reads(&*b.memory, extent(GROUP, 1), 2);
}

#[test]
fn a_change_that_is_in_flight_when_a_flush_begins_is_not_flushed() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 1), 1).unwrap();
    write(&mirror, extent(GROUP, 1), 1).unwrap();
    a.holds_requests.set(true);
    let mut slow = Box::pin(mirror.execute(write_of(&mirror, extent(0, 1), 2)));
    assert!(slow.as_mut().now_or_never().is_none());
    b.holds_flushes.set(true);
    let mut flush = Box::pin(mirror.execute(Request::flush()));
    assert!(flush.as_mut().now_or_never().is_none());
    a.holds_requests.set(false);
    slow.now_or_never().expect("nothing is held").unwrap();
    b.holds_flushes.set(false);
    flush.now_or_never().expect("nothing is held").unwrap();
    b.is_offline.set(true);
    write(&mirror, extent(5 * GROUP, 1), 1).unwrap();
    assert_eq!(mirror.describe().replicas[1].out_of_sync_bytes, 2 << 16, "the first group, and the last");
}

#[test]
fn what_was_flushed_before_the_last_replica_went_is_not_said_to_be_lost() {
    let (a, b, mirror) = pair(None);
    b.is_offline.set(true);
    write(&mirror, extent(0, 1), 1).unwrap();
    run(&mirror, Request::flush()).unwrap();
    a.is_offline.set(true);
    read(&mirror, extent(0, 1)).unwrap_err();
    a.is_offline.set(false);
    reattach(&mirror, &a).unwrap();
    run(&mirror, Request::flush()).unwrap();
    assert_reads(&mirror, extent(0, 1), 1);
}

#[test]
fn groups_leave_when_they_were_not_changed_for_minutes_or_nothing_was_for_seconds() {
    let (a, _, mirror) = pair(None);
    let tick = || mirror.sweep().now_or_never().expect("RAM never waits").unwrap();
    write(&mirror, extent(GROUP, 1), 1).unwrap();
    let labels = a.label_writes.get();
    for sweep in 0..72 {
        assert_eq!(mirror.describe().dirty_bytes, if sweep == 0 { 1 << 20 } else { 2 << 20 });
        write(&mirror, extent(0, 1), 1).unwrap();
        tick();
    }
    assert_eq!(mirror.describe().dirty_bytes, 1 << 20, "it was not changed for five minutes");
    let labels = a.label_writes.get() - labels;
    assert!(labels <= 2 + 72 / 2, "{labels}: one for the first group, one in all that time, and one in ten seconds");
    tick();
    assert_eq!(mirror.describe().dirty_bytes, 1 << 20);
    tick();
    assert_eq!(mirror.describe().dirty_bytes, 0, "nothing was changed for ten seconds");
}

#[test]
fn an_image_from_before_two_renewals_of_the_labels_is_known_to_be_older() {
    for which in 0..2 {
        let (a, b, mirror) = pair(None);
        let tick = || mirror.sweep().now_or_never().expect("RAM never waits").unwrap();
        let change = |seed| {
            write(&mirror, extent(0, 1), seed).unwrap();
            run(&*mirror, Request::flush()).unwrap();
            tick();
        };
        change(1);
        let old = if which == 0 { a.image() } else { b.image() };
        // Always the same group, which the labels have already.
        (2..=6).for_each(change);
        drop(mirror);
        let replicas = if which == 0 { [&old, &b] } else { [&a, &old] };
        let mirror = opened(&replicas);
        for _ in 0..4 {
            assert_reads(&mirror, extent(0, 1), 6);
        }
        let states: Vec<_> = mirror.describe().replicas.iter().map(|replica| replica.state).collect();
        assert!(states[which] != ReplicaState::InSync && states[1 - which] == ReplicaState::InSync, "{states:?}");
    }
}
