//! Our host device against a broken target: a few sessions with fixed seeds. The binary makes longer runs.

use std::path::Path;

use sealblock_hostile::host::{peak_mib, session, sessions};
use sealblock_hostile::process::Process;

/// Far above what its queues need, and far below what an unchecked length would allocate.
const MOST_MIB: u64 = 512;

#[test]
fn every_call_ends_whatever_is_answered() {
    let target = Process::start_patient(Path::new(env!("CARGO_BIN_EXE_sealblock-hostile"))).unwrap();
    let summary = sessions(target.address, 1, 24).unwrap();
    assert!(summary.corrupted > 24 && summary.failed + summary.refused > 0, "{summary:?}");
    assert!(summary.opened > 0 && summary.succeeded > 0, "{summary:?}");
    assert!(peak_mib().unwrap() < MOST_MIB);
    target.stop().unwrap();
}

#[test]
fn behind_a_proxy_that_corrupts_nothing_all_calls_succeed() {
    let target = Process::start_patient(Path::new(env!("CARGO_BIN_EXE_sealblock-hostile"))).unwrap();
    for seed in 0..4 {
        let summary = session(target.address, seed, 0).unwrap();
        assert_eq!((summary.opened, summary.failed, summary.succeeded, summary.corrupted), (1, 0, 24, 0));
    }
}
