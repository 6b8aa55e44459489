//! Sets that are too scattered for a label, and what a crash leaves of them.

use futures_util::FutureExt;
use sealblock_block::{Request, ReservedArea, Response};
use sealblock_runtime_memory::Slice;

use super::*;
use crate::Mutation;
use crate::label::ReplicaState;
use crate::label::regions::Regions;

/// 4 GiB: 65,536 regions of 64 KiB, more than a label has bits for.
const LARGE_BLOCKS: u64 = 1 << 20;
/// Blocks of a region.
const REGION: u64 = 16;

fn large_pair() -> (TestReplica, TestReplica, TestMirror) {
    let [a, b] = ["a", "b"].map(|name| TestReplica::sized(name, None, LARGE_BLOCKS));
    let mirror = opened(&[&a, &b]);
    assert_eq!(mirror.describe().region_bytes, 64 << 10);
    (a, b, mirror)
}

/// Writes a block of every `step`th region in a part of the device; returns the regions.
fn scatter(mirror: &TestMirror, from: u64, to: u64, step: usize) -> Vec<u32> {
    let regions = (from..to).step_by(step);
    regions.clone().for_each(|region| write(mirror, extent(region * REGION, 1), 7).unwrap());
    regions.map(|region| region as u32).collect()
}

fn out_of_sync(mirror: &TestMirror, replica: usize) -> Regions {
    mirror.replicas.borrow()[replica].out_of_sync.borrow().clone()
}

#[test]
fn out_of_sync_regions_are_exact_also_when_no_label_has_room_for_them() {
    let (a, b, mirror) = large_pair();
    write(&mirror, extent(0, 1), 1).unwrap();
    close(&mirror);
    drop(mirror);
    b.is_offline.set(true);
    let mirror = opened(&[&a, &b]);
    let lacking = scatter(&mirror, 0, 65_536, 20);
    sweep(&mirror);
    assert!(a.page_writes_count.get() > 0, "runs of it do not fit");
    assert_eq!(out_of_sync(&mirror, 1).count() as usize, lacking.len());
    close(&mirror);
    drop(mirror);
    b.is_offline.set(false);
    let again = opened(&[&a, &b]);
    assert!(out_of_sync(&again, 1).iter().eq(lacking.iter().copied()), "64 KiB each, and nothing besides");
    resync(&again);
    assert_eq!(states(&again), [ReplicaState::InSync; 2]);
    assert!(b.written_blocks.get() <= 1 + lacking.len() as u64 * REGION, "{}", b.written_blocks.get());
    close(&again);
    drop(again);
    assert_eq!(out_of_sync(&opened(&[&a, &b]), 1).count(), 0);
}

/// Replica `b` lacks scattered regions, for which the label of `a` has no room, and their page is corrupt.
fn with_a_damaged_page() -> (TestReplica, TestReplica, Vec<u32>) {
    let (a, b, mirror) = large_pair();
    b.is_offline.set(true);
    let lacking = scatter(&mirror, 0, 30_000, 10);
    sweep(&mirror);
    close(&mirror);
    drop(mirror);
    b.is_offline.set(false);
    // What `b` lacks is the second set, whose first page is the fourth of all.
    let slot = ReservedArea::Bitmap { page: 2 * 3 };
    let Ok(Response::Reserved(page)) = run(&*a.memory, Request::read_reserved(slot)) else {
        panic!("there is no page")
    };
    // A sector of an older write, as a torn write leaves it.
    let mut torn = page.to_vec();
    torn[1024..1536].fill(0);
    run(&*a.memory, Request::write_reserved(slot, Slice::copy_from(&torn))).unwrap();
    (a, b, lacking)
}

#[test]
fn a_damaged_page_makes_more_be_compared_and_nothing_be_missed() {
    let (a, b, lacking) = with_a_damaged_page();
    let again = opened(&[&a, &b]);
    let lacking_regions = out_of_sync(&again, 1);
    assert!(lacking_regions.contains_all(0..=32_255), "all of the page");
    assert_eq!(lacking_regions.count(), 32_256);
    resync(&again);
    for region in lacking {
        assert_reads(&*b.memory, extent(u64::from(region) * REGION, 1), 7);
    }
}

#[test]
fn a_torn_page_that_is_believed_makes_a_member_be_called_in_sync_that_is_not() {
    let (a, b, lacking) = with_a_damaged_page();
    let again = opened_with(&[&a, &b], Mutation::TrustPages);
    resync(&again);
    assert_eq!(states(&again), [ReplicaState::InSync; 2]);
    let is_there = |region: &u32| {
        let one = extent(u64::from(*region) * REGION, 1);
        read(&*b.memory, one).is_ok_and(|found| found == content(one, 7))
    };
    assert!(!lacking.iter().all(is_there), "the broken rule is not noticed");
}

/// Replicas `a` and `b`, and a replica that lacks what a page of both says; in that page of `a`, the bits of the first regions are
/// cleared by a page of `b` from before these regions were written.
fn with_a_page_of_another_replica(mutation: Mutation) -> (TestMirror, Vec<u32>) {
    let [a, b, c] = ["a", "b", "c"].map(|name| TestReplica::sized(name, None, LARGE_BLOCKS));
    let mirror = opened_with(&[&a, &b, &c], mutation);
    c.is_offline.set(true);
    scatter(&mirror, 10_000, 30_000, 10);
    sweep(&mirror);
    // What `c` lacks is the fourth set, whose first page is the tenth of all.
    let slot = ReservedArea::Bitmap { page: 3 * 3 };
    let Ok(Response::Reserved(earlier)) = run(&*b.memory, Request::read_reserved(slot)) else {
        panic!("there is no page")
    };
    let lacking = scatter(&mirror, 0, 5_000, 10);
    sweep(&mirror);
    close(&mirror);
    drop(mirror);
    run(&*a.memory, Request::write_reserved(slot, earlier)).unwrap();
    b.is_offline.set(true);
    c.is_offline.set(false);
    (opened_with(&[&a, &b, &c], mutation), lacking)
}

#[test]
fn a_page_of_another_replica_of_the_same_mirror_clears_nothing() {
    let (again, lacking) = with_a_page_of_another_replica(Mutation::None);
    assert!(out_of_sync(&again, 2).contains_all(0..=32_255), "all of the page");
    assert!(lacking.iter().all(|region| out_of_sync(&again, 2).contains(*region)));
    let (again, lacking) = with_a_page_of_another_replica(Mutation::SharedEpoch);
    assert!(!lacking.iter().all(|region| out_of_sync(&again, 2).contains(*region)), "the broken rule is not noticed");
}

/// Writes until a label or page is torn by a power cut, and checks what a new opening finds. Returns the numbers of
/// the reserved-area writes that were pages.
fn cut_after(fuse: u64) -> Vec<u64> {
    let (a, b, mirror) = large_pair();
    scatter(&mirror, 0, 256, 16);
    b.is_offline.set(true);
    let mut lacking = scatter(&mirror, 0, 16, 1);
    let before = a.label_writes.get() + a.page_writes_count.get();
    a.reserved_writes_left.set(fuse);
    let mut work = Box::pin(async {
        // First more regions than fit a label, then as many in other places, twice.
        for (part, step) in [(304..65_000_u64, 32), (20..65_000, 33), (30..65_000, 34)] {
            for region in part.step_by(step) {
                let at = extent(region * REGION, 1);
                sealblock_block::Device::execute(&*mirror, write_of(&mirror, at, 7)).await.unwrap();
                lacking.push(region as u32);
            }
            mirror.clear_clean_regions().await.unwrap();
        }
    });
    let is_cut = work.as_mut().now_or_never().is_none();
    drop(work);
    assert_eq!(is_cut, fuse < u64::MAX);
    drop(mirror);
    let at = a.page_writes.take();
    a.is_hung.set(false);
    a.reserved_writes_left.set(u64::MAX);
    b.is_offline.set(false);
    let again = opened(&[&a, &b]);
    assert_eq!(states(&again), [ReplicaState::InSync, ReplicaState::OutOfSync], "cut after {fuse}");
    let lacking_regions = out_of_sync(&again, 1);
    for region in lacking {
        assert!(lacking_regions.contains(region), "cut after {fuse}: region {region} was answered for");
    }
    at.iter().map(|at| at.saturating_sub(before)).collect()
}

#[test]
fn a_crash_between_any_two_labels_and_pages_forgets_nothing() {
    let at = cut_after(u64::MAX);
    assert!(at.len() > 6, "pages were written, and rewritten: {at:?}");
    // In each page and after each, for the first and the last pages.
    let few = at.iter().take(3).chain(at.iter().rev().take(3));
    let cuts: std::collections::BTreeSet<u64> = few.flat_map(|at| [*at, at + 1]).chain([0, 2]).collect();
    for fuse in cuts {
        cut_after(fuse);
    }
}

#[test]
fn a_member_that_is_away_costs_no_more_labels() {
    for is_degraded in [false, true] {
        let (a, b, mirror) = pair(None);
        write(&mirror, extent(0, 1), 1).unwrap();
        b.is_offline.set(is_degraded);
        write(&mirror, extent(1, 1), 1).unwrap();
        let before = a.label_writes.get();
        // The whole group, region by region, twice.
        for block in (0..256).chain(0..256) {
            write(&mirror, extent(block, 1), 2).unwrap();
        }
        assert_eq!(a.label_writes.get(), before, "degraded: {is_degraded}");
        write(&mirror, extent(256, 256), 2).unwrap();
        assert_eq!(a.label_writes.get(), before + 1, "a group is marked at once");
    }
}
