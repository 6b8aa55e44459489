//! Two hundred kills.

use std::path::{Path, PathBuf};

use sealblock_crash::rounds::{Plan, run};
use sealblock_media_volume::Mutation;

fn plan(folder: &Path, rounds: u64, mutation: Mutation) -> Plan {
    let seed = match std::env::var("SEALBLOCK_CRASH_SEED") {
        Ok(seed) => seed.parse().expect("the seed is a number"),
        Err(_) => u64::from(std::process::id()),
    };
    println!("SEALBLOCK_CRASH_SEED={seed}");
    let program = PathBuf::from(env!("CARGO_BIN_EXE_sealblock-crash"));
    Plan { program, folder: folder.to_owned(), rounds, seed, mutation }
}

#[test]
fn no_flushed_change_is_lost_in_200_kills() {
    let folder = tempfile::tempdir().unwrap();
    let totals = run(&plan(folder.path(), 200, Mutation::None)).unwrap_or_else(|error| {
        panic!("{error:?}\nthe volume is kept in {}", folder.keep().display());
    });
    println!("{totals:?}");
    // A loop that kills before anything happens shows nothing.
    assert!(totals.changes > 2000 && totals.durable > 500, "{totals:?}");
    assert!(totals.changes > totals.durable, "some changes were in flight when the worker was killed: {totals:?}");
}

/// The twin: a volume that completes flushes before the tags are durable is detected.
#[test]
fn flushes_that_complete_too_early_are_detected() {
    let folder = tempfile::tempdir().unwrap();
    let error = run(&plan(folder.path(), 100, Mutation::LateTags)).expect_err("the fault shows within 100 rounds");
    assert!(format!("{error:?}").contains("and may hold"), "{error:?}");
}
