//! Walks pass, and mirrors with defects are detected. The binary makes longer runs.

use std::ops::RangeInclusive;

use sealblock_layers_mirror::Mutation;

use super::run;
use crate::trial::{Report, TrialConfig};
use crate::workload::Workload;

fn config(seed: u64, workload: Workload) -> TrialConfig {
    TrialConfig { seed, workload, crash_at: None }
}

fn assert_caught(mutation: Mutation, workload: Workload, seeds: u64) {
    assert_caught_in(mutation, workload, 1..=seeds);
}

fn assert_caught_in(mutation: Mutation, workload: Workload, mut seeds: RangeInclusive<u64>) {
    let finding = seeds.find_map(|seed| run(mutation, config(seed, workload)).err());
    assert!(finding.is_some(), "{mutation:?} passes walks");
}

#[test]
fn walks_pass() {
    let mut total = Report::default();
    for workload in super::LOADS {
        for seed in 1..=20 {
            total += run(Mutation::None, config(seed, workload)).unwrap_or_else(|failure| panic!("{failure}"));
        }
    }
    assert!(total.crashes > 100 && total.completed > 200 && total.blocks_checked > 20_000, "{total:?}");
}

#[test]
fn unmarked_changes_and_early_reads_are_noticed() {
    assert_caught(Mutation::SkipMark, Workload::Mixed, 5);
    assert_caught(Mutation::ReadResyncing, Workload::Mixed, 5);
}

#[test]
fn marks_that_are_cleared_early_and_changes_out_of_order_are_noticed() {
    assert_caught_in(Mutation::ClearUnflushed, Workload::Spoil, 81..=120);
    assert_caught(Mutation::EvictUnflushed, Workload::Mixed, 40);
    assert_caught(Mutation::Unordered, Workload::Mixed, 40);
}

#[test]
fn a_last_copy_that_is_spoilt_is_noticed() {
    assert_caught(Mutation::PoisonLastCopy, Workload::Spoil, 20);
}

#[test]
fn histories_that_are_not_told_apart_are_noticed() {
    assert_caught(Mutation::SkipLineage, Workload::Mixed, 60);
}

#[test]
fn a_replica_that_is_taken_out_and_not_told_is_noticed() {
    assert_caught(Mutation::SkipRemovedLabel, Workload::Mixed, 60);
}

#[test]
fn changes_of_a_replica_that_is_not_told_what_it_lacks_are_noticed() {
    assert_caught(Mutation::SkipOwnLabel, Workload::Mixed, 100);
}

#[test]
fn what_a_replica_has_missed_and_is_forgotten_is_noticed() {
    assert_caught(Mutation::ForgetOutOfSync, Workload::Mixed, 60);
}

#[test]
fn an_older_copy_that_is_taken_for_the_current_one_is_noticed() {
    assert_caught(Mutation::ForgetStale, Workload::Spoil, 100);
}

#[test]
fn sessions_that_are_forgotten_where_a_replica_is_written_by_itself_are_noticed() {
    assert_caught(Mutation::ForgetSessions, Workload::Mixed, 150);
}

#[test]
fn a_replica_that_is_taken_back_unasked_or_taken_to_be_told_is_noticed() {
    assert_caught(Mutation::ReattachDiverged, Workload::Spoil, 60);
    assert_caught(Mutation::LateLabel, Workload::Mixed, 150);
}

#[test]
fn labels_that_are_counted_on_from_one_opening_to_the_next_are_noticed() {
    assert_caught(Mutation::CountOn, Workload::Spoil, 150);
}

#[test]
fn what_becomes_suspect_beside_a_flush_and_is_forgotten_is_noticed() {
    assert_caught(Mutation::ForgetFlushing, Workload::Mixed, 40);
}

#[test]
fn a_walk_is_what_its_seed_says() {
    let one = run(Mutation::None, config(11, Workload::Mixed));
    assert_eq!(one, run(Mutation::None, config(11, Workload::Mixed)));
    let other = run(Mutation::None, config(12, Workload::Mixed));
    assert_ne!(one.map(|report| report.trace), other.map(|report| report.trace));
}

#[test]
fn answers_that_come_before_it_is_noted_who_is_missing_are_noticed() {
    // Rare: the label must be in flight when the machine stops.
    assert_caught_in(Mutation::CompleteEarly, Workload::Mixed, 701..=900);
}
