//! Two hundred kills.

use std::path::PathBuf;

use sealblock_kill::rounds::{Plan, run};

#[test]
fn nothing_that_was_flushed_is_lost_in_200_kills() {
    let seed = match std::env::var("SEALBLOCK_KILL_SEED") {
        Ok(seed) => seed.parse().expect("the seed is a number"),
        Err(_) => u64::from(std::process::id()),
    };
    println!("SEALBLOCK_KILL_SEED={seed}");
    let folder = tempfile::tempdir().unwrap();
    let program = PathBuf::from(env!("CARGO_BIN_EXE_sealblock-kill"));
    let plan = Plan { program, folder: folder.path().to_owned(), rounds: 200, seed };
    let seen = run(&plan).unwrap_or_else(|error| {
        panic!("{error:?}\nthe volume is kept in {}", folder.keep().display());
    });
    println!("{seen:?}");
    // A loop that kills before anything happens shows nothing.
    assert!(seen.changes > 2000 && seen.settled > 500, "{seen:?}");
    assert!(seen.changes > seen.settled, "some changes were under way when the worker was killed: {seen:?}");
}
