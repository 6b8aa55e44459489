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
fn nothing_that_was_flushed_is_lost_in_200_kills() {
    let folder = tempfile::tempdir().unwrap();
    let seen = run(&plan(folder.path(), 200, Mutation::None)).unwrap_or_else(|error| {
        panic!("{error:?}\nthe volume is kept in {}", folder.keep().display());
    });
    println!("{seen:?}");
    // A loop that kills before anything happens shows nothing.
    assert!(seen.changes > 2000 && seen.settled > 500, "{seen:?}");
    assert!(seen.changes > seen.settled, "some changes were under way when the worker was killed: {seen:?}");
}

/// The twin: a volume that answers flushes before the tags are durable is caught.
#[test]
fn flushes_that_are_answered_too_early_are_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let error = run(&plan(folder.path(), 100, Mutation::LateTags)).expect_err("the fault shows within 100 rounds");
    assert!(format!("{error:?}").contains("and may hold"), "{error:?}");
}
