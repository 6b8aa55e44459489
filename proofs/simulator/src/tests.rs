//! Tests of the proof itself: correct devices pass, defective ones are detected, and a seed repeats a run.
//!
//! The binary makes longer runs; these are short enough for every build.

use clap::ValueEnum;
use sealblock_media_volume::Mutation;

use crate::reference_device::ReferenceSystem;
use crate::shards::{ShardMutation, ShardedVolumes};
use crate::system::{System, Volumes};
use crate::trial::{FailureReport, Report, TrialConfig, run};
use crate::workload::Workload;

/// Runs seeds of one load up to the first finding.
fn run_seeds(system: &impl System, workload: Workload, seeds: u64) -> Result<Report, Box<FailureReport>> {
    let mut total = Report::default();
    for seed in 1..=seeds {
        total += run(system, TrialConfig { seed, workload, crash_at: None })?;
    }
    Ok(total)
}

/// The first finding among seeds of several loads.
fn first_finding(system: &impl System, loads: &[Workload], seeds: u64) -> Option<String> {
    loads.iter().find_map(|load| run_seeds(system, *load, seeds).err()).map(|failure| failure.finding)
}

/// The finding about a defect must name the block, or say that the volume cannot be opened.
fn assert_caught(system: &impl System, loads: &[Workload], seeds: u64) {
    let finding = first_finding(system, loads, seeds).expect("the fault is noticed");
    // A disk that was truncated too early is detected at the next open, or at the next resize.
    let reasons = ["block", "open failed", "resize failed: the medium has", "no host was told"];
    assert!(reasons.iter().any(|reason| finding.contains(reason)), "{finding}");
}

#[test]
fn a_right_device_passes() {
    for workload in [Workload::Mixed, Workload::Hot, Workload::Trim] {
        let report = run_seeds(&ReferenceSystem::default(), workload, 6).unwrap_or_else(|failure| panic!("{failure}"));
        assert!(report.crashes > 5 && report.blocks_checked > 1000, "{report:?}");
    }
}

#[test]
fn a_device_that_does_not_sync_is_detected() {
    assert_caught(&ReferenceSystem { skip_sync: true, ..ReferenceSystem::default() }, &[Workload::Mixed], 20);
}

#[test]
fn a_device_that_trusts_its_log_is_detected() {
    assert_caught(&ReferenceSystem { trust: true, ..ReferenceSystem::default() }, &[Workload::Mixed], 20);
}

#[test]
fn a_disk_that_lies_about_syncs_is_caught() {
    assert_caught(&ReferenceSystem { lie_percent: 60, ..ReferenceSystem::default() }, &[Workload::Mixed], 20);
}

#[test]
fn a_device_that_hangs_is_a_finding() {
    let finding = first_finding(&ReferenceSystem { hang: true, ..ReferenceSystem::default() }, &[Workload::Forced], 20);
    // If a reader continues at the same time, the run does not end.
    let is_hang = |finding: &str| finding.starts_with("deadlock: main") || finding.starts_with("no end");
    assert!(finding.as_deref().is_some_and(is_hang), "{finding:?}");
}

#[test]
fn volumes_pass_under_every_load() {
    let mut total = Report::default();
    for &workload in Workload::value_variants() {
        total += run_seeds(&Volumes::default(), workload, 30).unwrap_or_else(|failure| panic!("{failure}"));
    }
    assert!(total.crashes > 400 && total.recovery_crashes > 100 && total.damages_found > 100, "{total:?}");
    assert!(total.corrupted > 100 && total.resizings > 200, "{total:?}");
    assert!(total.failed > 0, "planned faults reached a host");
}

#[test]
fn volumes_in_shards_pass_under_every_load() {
    let mut total = Report::default();
    for &workload in Workload::value_variants() {
        total += run_seeds(&ShardedVolumes::default(), workload, 20).unwrap_or_else(|failure| panic!("{failure}"));
    }
    assert!(total.crashes > 400 && total.recovery_crashes > 100 && total.damages_found > 80, "{total:?}");
    assert!(total.corrupted > 80 && total.failed > 0, "{total:?}");
}

#[test]
fn a_flush_of_one_shard_is_caught() {
    assert_caught(&ShardedVolumes { mutation: ShardMutation::FlushOne }, &[Workload::Mixed], 40);
}

#[test]
fn blocks_that_are_dealt_in_other_units_are_caught() {
    assert_caught(&ShardedVolumes { mutation: ShardMutation::OtherUnits }, &[Workload::Mixed], 20);
}

#[test]
fn every_boundary_of_a_short_load_passes() {
    let workload = Workload::Forced;
    for crash_at in 1.. {
        let report = run(&Volumes::default(), TrialConfig { seed: 3, workload, crash_at: Some(crash_at) });
        let report = report.unwrap_or_else(|failure| panic!("{failure}"));
        if !report.first_crashed {
            assert!(crash_at > 100, "the load has only {crash_at} boundaries");
            return;
        }
    }
}

#[test]
fn a_volume_that_skips_syncs_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::SkipSync }, &[Workload::Mixed], 20);
}

#[test]
fn a_volume_that_answers_before_the_tags_are_durable_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::LateTags }, &[Workload::Mixed, Workload::Hot], 40);
}

#[test]
fn a_volume_that_reuses_physical_blocks_early_is_caught() {
    let finding = first_finding(&Volumes { mutation: Mutation::ReuseEarly }, &[Workload::Hot, Workload::Idle], 40);
    let finding = finding.expect("the fault is noticed");
    // If physical blocks are in use twice, the volume may also wait forever for a free one.
    assert!(finding.contains("block") || finding.contains("no end after"), "{finding}");
}

#[test]
fn a_volume_that_enters_blocks_whose_data_are_in_flight_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::EntryInFlight }, &[Workload::Mixed, Workload::Hot], 40);
}

#[test]
fn a_volume_that_answers_before_it_notes_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::NoteLate }, &[Workload::Mixed, Workload::Hot], 60);
}

#[test]
fn a_volume_that_notes_what_was_dropped_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::NoteDropped }, &[Workload::Abandon], 600);
}

#[test]
fn a_volume_that_notes_blocks_whose_data_are_in_flight_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::NoteEarly }, &[Workload::Hot, Workload::Mixed, Workload::Crowd], 60);
}

#[test]
fn a_volume_whose_notes_are_a_commit_behind_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::BaseBehind }, &[Workload::Mixed, Workload::Hot], 60);
}

#[test]
fn a_volume_that_writes_over_the_notes_of_a_commit_in_flight_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::HalfEarly }, &[Workload::Mixed, Workload::Hot], 60);
}

#[test]
fn a_volume_that_trusts_its_notes_after_the_loss_of_its_disk_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::TrustNotes }, &[Workload::Mixed, Workload::Hot, Workload::Trim], 60);
}

#[test]
fn a_volume_that_reports_a_possible_loss_only_once_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::ForgetLost }, &[Workload::Mixed, Workload::Hot], 60);
}

#[test]
fn a_volume_that_trusts_its_log_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::TrustLog }, &[Workload::Mixed, Workload::Forced], 40);
}

#[test]
fn a_volume_that_repeats_nothing_in_its_log_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::RepeatNothing }, &[Workload::Forced, Workload::Hot], 400);
}

#[test]
fn a_volume_that_takes_repeated_map_entries_for_new_ones_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::RepeatAsNew }, &[Workload::Forced, Workload::Hot], 60);
}

#[test]
fn a_volume_that_reads_one_region_of_its_log_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::OneRegion }, &[Workload::Mixed, Workload::Forced], 40);
}

#[test]
fn a_volume_that_leaves_its_last_commit_in_one_place_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::SkipSecondCopy }, &[Workload::Hot, Workload::Idle], 400);
}

#[test]
fn a_volume_that_marks_an_empty_log_as_in_use_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::NoAnchor }, &[Workload::Mixed, Workload::Forced], 60);
}

#[test]
fn a_volume_that_uses_its_log_before_its_superblock_says_so_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::KeepClean }, &[Workload::Mixed, Workload::Forced], 60);
}

#[test]
fn a_volume_that_loses_the_end_of_runs_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::ShortRun }, &[Workload::Trim, Workload::Spoil], 40);
}

#[test]
fn a_volume_that_lets_runs_win_over_later_writes_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::RunsFirst }, &[Workload::Trim, Workload::Spoil], 60);
}

#[test]
fn a_volume_that_frees_log_space_before_its_block_map_has_the_entries_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::TailEarly }, Workload::value_variants(), 60);
}

#[test]
fn a_volume_whose_moves_undo_writes_is_caught() {
    assert_caught(
        &Volumes { mutation: Mutation::MoveOverNewer },
        &[Workload::Mixed, Workload::Trim, Workload::Idle],
        60,
    );
}

#[test]
fn a_volume_that_punches_physical_blocks_in_use_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::PunchBeyond }, &[Workload::Trim, Workload::Idle], 40);
}

/// Under every load, some seeds have resizes.
const RESIZING: [Workload; 4] = [Workload::Mixed, Workload::Trim, Workload::Forced, Workload::Hot];

#[test]
fn a_volume_that_names_its_new_size_early_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::NameEarly }, &RESIZING, 60);
}

#[test]
fn a_volume_that_is_cut_early_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::CutEarly }, &[Workload::Forced], 700);
}

#[test]
fn a_volume_that_overwrites_block_groups_of_its_old_size_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::TailEarlier }, &RESIZING, 200);
}

/// Loads with consecutive small commits.
const JOINING: [Workload; 3] = [Workload::Forced, Workload::Hot, Workload::Mixed];

#[test]
fn a_volume_that_joins_a_sector_of_a_checkpoint_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::JoinTaken }, &JOINING, 200);
}

#[test]
fn a_volume_that_joins_sectors_in_place_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::JoinInPlace }, &JOINING, 200);
}

#[test]
fn a_volume_that_takes_the_shorter_copy_of_a_sector_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::ShorterCopy }, &JOINING, 60);
}

#[test]
fn a_volume_that_cuts_off_blocks_in_use_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::CutMapped }, &RESIZING, 60);
}

#[test]
fn a_volume_that_keeps_bits_of_dropped_block_groups_is_caught() {
    assert_caught(&Volumes { mutation: Mutation::KeepBits }, &RESIZING, 200);
}

#[test]
fn a_seed_is_a_run() {
    for &workload in Workload::value_variants() {
        let config = TrialConfig { seed: 11, workload, crash_at: None };
        let (one, two) = (run(&Volumes::default(), config), run(&Volumes::default(), config));
        assert_eq!(one, two, "{}", workload.name());
        let other = run(&Volumes::default(), TrialConfig { seed: 12, ..config });
        assert_ne!(one.map(|report| report.trace), other.map(|report| report.trace));
    }
}
