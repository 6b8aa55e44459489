//! Mirrors pass, and mirrors with defects are detected. The binary makes longer runs.

use sealblock_layers_mirror::Mutation;

use super::{LOADS, run};
use crate::trial::{Report, TrialConfig};
use crate::workload::Workload;

fn config(seed: u64, workload: Workload) -> TrialConfig {
    TrialConfig { seed, workload, crash_at: None }
}

fn assert_caught(mutation: Mutation, workload: Workload, seeds: u64) {
    let finding = (1..=seeds).find_map(|seed| run(mutation, config(seed, workload)).err());
    assert!(finding.is_some(), "{mutation:?} passes {seeds} seeds");
}

#[test]
fn mirrors_pass_under_every_load() {
    let mut total = Report::default();
    for workload in LOADS {
        for seed in 1..=8 {
            total += run(Mutation::None, config(seed, workload)).unwrap_or_else(|failure| panic!("{failure}"));
        }
    }
    assert!(total.crashes > 10 && total.damages_found > 5 && total.blocks_checked > 50_000, "{total:?}");
}

#[test]
fn a_mirror_that_does_not_mark_dirty_regions_is_caught() {
    assert_caught(Mutation::SkipMark, Workload::Mixed, 20);
}

#[test]
fn a_mirror_that_reads_resyncing_replicas_is_caught() {
    assert_caught(Mutation::ReadResyncing, Workload::Mixed, 20);
}

// Walks detect marks that are evicted before their flush; here flushes come before groups are evicted.

#[test]
fn a_mirror_that_lets_overlapping_changes_race_is_caught() {
    assert_caught(Mutation::Unordered, Workload::Hot, 20);
}

#[test]
fn a_mirror_that_is_closed_as_if_no_change_were_in_flight_is_caught() {
    assert_caught(Mutation::CloseInFlight, Workload::Mixed, 60);
}

#[test]
fn a_mirror_that_destroys_the_last_copy_beside_a_resync_is_caught() {
    assert_caught(Mutation::PoisonLastCopy, Workload::Trim, 40);
}

#[test]
fn a_mirror_that_uses_an_older_copy_as_current_is_caught() {
    assert_caught(Mutation::ForgetStale, Workload::Trim, 40);
}

#[test]
fn first_labellings_and_replacements_are_cut_at_every_point() {
    for (seed, workload) in [(1, Workload::Mixed), (2, Workload::Hot)] {
        for cut in 1.. {
            let report = run(Mutation::None, TrialConfig { crash_at: Some(cut), ..config(seed, workload) });
            if !report.unwrap_or_else(|failure| panic!("{failure}")).first_crashed {
                assert!(cut > 60, "there are only {cut} points");
                break;
            }
        }
    }
}

#[test]
fn a_mirror_that_accepts_an_older_image_used_alone_is_caught() {
    assert_caught(Mutation::SkipLineage, Workload::Forced, 20);
}

#[test]
fn a_mirror_that_identifies_replicas_by_the_order_of_names_is_caught() {
    assert_caught(Mutation::TrustOrder, Workload::Trim, 100);
}

#[test]
fn a_mirror_whose_other_cores_go_on_when_a_replica_fails_is_caught() {
    assert_caught(Mutation::KeepDelegating, Workload::Mixed, 20);
}

// That other cores read what is locked, or trust what a failed replica said, are tests of the mirror: hosts here do not
// compare what two of them see at once.

#[test]
fn a_seed_is_a_run() {
    let one = run(Mutation::None, config(11, Workload::Hot));
    assert_eq!(one, run(Mutation::None, config(11, Workload::Hot)));
    let other = run(Mutation::None, config(12, Workload::Hot));
    assert_ne!(one.map(|report| report.trace), other.map(|report| report.trace));
}
