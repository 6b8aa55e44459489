//! Tests of the checker: permitted contents pass, others are reported.

use sealblock_units::{BlockSize, Extent};

use super::*;

fn checker() -> Checker {
    Checker::new(Patterns::new(1, BlockSize::B512, None))
}

fn extent() -> Extent {
    Extent::from_raw(7, 1).unwrap()
}

fn write(checker: &mut Checker, version: u64, force_unit_access: bool) {
    let change = checker.begin_change(vec![extent()], Content::Version(version), false, force_unit_access);
    checker.end_change(change, true);
}

fn flush(checker: &mut Checker) {
    let flush = checker.begin_flush();
    checker.end_flush(flush, true);
}

fn bytes(checker: &Checker, content: Content) -> Sealed {
    match content {
        Content::Version(version) => checker.patterns().sealed(extent(), version),
        Content::Zero | Content::Unreadable => {
            let zeroes = sealblock_runtime_memory::Buffer::zeroed(512).freeze();
            Sealed::seal(zeroes, BlockSize::B512, None, &Default::default())
        }
    }
}

/// True if a crash now may leave `content`.
fn survives(checker: &mut Checker, content: Content, is_durable: bool) -> bool {
    checker.crash();
    let found = bytes(checker, content);
    checker.audit(extent(), &found, is_durable).is_ok()
}

fn reads(checker: &mut Checker, content: Content) -> bool {
    let read = checker.begin_read(extent());
    let found = bytes(checker, content);
    checker.end_read(read, &found).is_ok()
}

const V1: Content = Content::Version(1);
const V2: Content = Content::Version(2);
const V3: Content = Content::Version(3);

/// A checker after version 1 was flushed and version 2 completed without a flush.
fn two_versions() -> Checker {
    let mut checker = checker();
    write(&mut checker, 1, false);
    flush(&mut checker);
    write(&mut checker, 2, false);
    checker
}

#[test]
fn an_unflushed_write_may_be_lost_and_a_flushed_one_may_not() {
    assert!(survives(&mut two_versions(), V2, true));
    assert!(survives(&mut two_versions(), V1, true));
    assert!(!survives(&mut two_versions(), Content::Zero, true));
    let mut flushed = two_versions();
    flush(&mut flushed);
    assert!(!survives(&mut flushed, V1, true));
    let mut forced = checker();
    write(&mut forced, 1, false);
    write(&mut forced, 2, true);
    assert!(!survives(&mut forced, V1, true));
}

#[test]
fn a_flush_covers_only_what_was_answered_before_it_was_issued() {
    let mut checker = checker();
    let early = checker.begin_flush();
    write(&mut checker, 1, false);
    checker.end_flush(early, true);
    assert!(survives(&mut checker, Content::Zero, true));
    let mut failed = self::checker();
    write(&mut failed, 1, false);
    let flush = failed.begin_flush();
    failed.end_flush(flush, false);
    assert!(survives(&mut failed, Content::Zero, true));
}

#[test]
fn a_read_returns_the_last_write_and_nothing_older() {
    let mut checker = two_versions();
    assert!(reads(&mut checker, V2));
    assert!(!reads(&mut checker, V1));
}

#[test]
fn a_read_may_return_a_concurrent_write() {
    let mut checker = two_versions();
    let read = checker.begin_read(extent());
    let change = checker.begin_change(vec![extent()], V3, false, true);
    checker.end_change(change, true);
    let (old, new) = (bytes(&checker, V2), bytes(&checker, V3));
    assert!(checker.end_read(read, &new).is_ok());
    // The same with the older content: it is overtaken only for later reads.
    let mut checker = two_versions();
    let read = checker.begin_read(extent());
    write(&mut checker, 3, true);
    assert!(checker.end_read(read, &old).is_ok());
    assert!(!reads(&mut checker, V2));
}

#[test]
fn writes_that_overlap_may_end_in_any_order_until_one_has_been_seen() {
    let mut checker = checker();
    let one = checker.begin_change(vec![extent()], V1, false, false);
    let two = checker.begin_change(vec![extent()], V2, false, false);
    checker.end_change(two, true);
    checker.end_change(one, true);
    flush(&mut checker);
    assert!(reads(&mut checker, V2));
    assert!(!reads(&mut checker, V1));
    assert!(!survives(&mut checker, V1, true));
}

#[test]
fn a_write_that_failed_may_be_there_until_it_is_overwritten() {
    let mut checker = two_versions();
    let change = checker.begin_change(vec![extent()], V3, false, false);
    checker.end_change(change, false);
    assert!(reads(&mut checker, V2));
    assert!(reads(&mut checker, V3));
    write(&mut checker, 4, false);
    assert!(!reads(&mut checker, V3));
}

#[test]
fn a_discard_permits_both_and_zeroes_are_a_write() {
    let discarded = || {
        let mut checker = two_versions();
        let change = checker.begin_change(vec![extent()], Content::Zero, true, false);
        checker.end_change(change, true);
        flush(&mut checker);
        checker
    };
    assert!(reads(&mut discarded(), V2) && survives(&mut discarded(), V2, true));
    assert!(reads(&mut discarded(), Content::Zero) && survives(&mut discarded(), Content::Zero, true));
    assert!(!survives(&mut discarded(), V1, true));
    let mut checker = two_versions();
    let change = checker.begin_change(vec![extent()], Content::Zero, false, true);
    checker.end_change(change, true);
    assert!(!reads(&mut checker, V2));
    assert!(!survives(&mut checker, V2, true));
}

#[test]
fn content_after_a_power_cut_is_durable_and_content_after_a_kill_is_not() {
    let mut cut = two_versions();
    assert!(survives(&mut cut, V2, true));
    assert!(!survives(&mut cut, V1, true));
    let mut killed = two_versions();
    assert!(survives(&mut killed, V2, false));
    assert!(!reads(&mut killed, V1));
    assert!(survives(&mut killed, V1, true));
    let mut lost = two_versions();
    assert!(survives(&mut lost, V1, false));
    assert!(!survives(&mut lost, V2, true));
}

#[test]
fn a_block_never_written_reads_as_zeroes() {
    let mut checker = checker();
    assert!(survives(&mut checker, Content::Zero, true));
    assert!(!survives(&mut checker, V1, true));
}

#[test]
fn a_read_in_flight_may_return_content_that_a_loss_restores_and_a_later_read_may_not() {
    let mut checker = two_versions();
    let under_way = checker.begin_read(extent());
    checker.lose();
    write(&mut checker, 3, true);
    let found = bytes(&checker, V1);
    assert_eq!(checker.end_read(under_way, &found), Ok(()));
    assert!(!reads(&mut checker, V1) && reads(&mut checker, V3));
}
