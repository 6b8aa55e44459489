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
    assert_caught(Mutation::EvictUnflushed, Workload::Mixed, 300);
    assert_caught(Mutation::Unordered, Workload::Mixed, 40);
}

#[test]
fn a_last_copy_that_is_spoilt_is_noticed() {
    assert_caught(Mutation::PoisonLastCopy, Workload::Spoil, 20);
}

#[test]
fn a_mirror_that_does_not_distinguish_histories_is_detected() {
    assert_caught(Mutation::SkipLineage, Workload::Mixed, 60);
}

#[test]
fn a_removed_replica_without_a_removed_label_is_detected() {
    assert_caught(Mutation::SkipRemovedLabel, Workload::Mixed, 400);
}

#[test]
fn skipping_the_label_of_an_out_of_sync_replica_is_detected() {
    assert_caught(Mutation::SkipOwnLabel, Workload::Mixed, 100);
}

#[test]
fn a_mirror_that_forgets_missed_writes_of_a_replica_is_detected() {
    assert_caught(Mutation::ForgetOutOfSync, Workload::Mixed, 60);
}

#[test]
fn a_mirror_that_forgets_older_copies_is_detected() {
    assert_caught(Mutation::ForgetStale, Workload::Spoil, 100);
}

#[test]
fn a_mirror_that_forgets_sessions_of_replicas_written_alone_is_detected() {
    assert_caught(Mutation::ForgetSessions, Workload::Mixed, 150);
}

#[test]
fn reattaching_a_diverged_replica_and_late_labels_are_detected() {
    assert_caught(Mutation::ReattachDiverged, Workload::Spoil, 60);
    assert_caught(Mutation::LateLabel, Workload::Mixed, 150);
}

#[test]
fn a_mirror_that_counts_labels_on_from_the_last_open_is_detected() {
    assert_caught(Mutation::CountOn, Workload::Spoil, 400);
}

#[test]
fn a_mirror_that_forgets_regions_dirtied_during_a_flush_is_detected() {
    assert_caught(Mutation::ForgetFlushing, Workload::Mixed, 40);
}

#[test]
fn a_seed_decides_a_walk() {
    let one = run(Mutation::None, config(11, Workload::Mixed));
    assert_eq!(one, run(Mutation::None, config(11, Workload::Mixed)));
    let other = run(Mutation::None, config(12, Workload::Mixed));
    assert_ne!(one.map(|report| report.trace), other.map(|report| report.trace));
}

#[test]
fn completing_writes_before_labels_list_absent_replicas_is_detected() {
    // Rare, because the label must be in flight when the machine stops.
    assert_caught_in(Mutation::CompleteEarly, Workload::Mixed, 701..=900);
}
