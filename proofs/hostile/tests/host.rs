//! Our host device against a target that answers wrongly: a few sessions of fixed seeds. Longer runs are made with the binary.

use std::path::Path;

use sealblock_hostile::host::{peak_mib, session, sessions};
use sealblock_hostile::process::Process;

/// Far above what its queues need, and far below what a length that is believed would cost.
const MOST_MIB: u64 = 512;

#[test]
fn every_call_ends_whatever_is_answered() {
    let target = Process::start_patient(Path::new(env!("CARGO_BIN_EXE_sealblock-hostile"))).unwrap();
    let summary = sessions(target.address, 1, 24).unwrap();
    assert!(summary.spoilt > 24 && summary.failed + summary.refused > 0, "{summary:?}");
    assert!(summary.opened > 0 && summary.succeeded > 0, "{summary:?}");
    assert!(peak_mib().unwrap() < MOST_MIB);
    target.stop().unwrap();
}

#[test]
fn behind_a_proxy_that_spoils_nothing_all_goes_well() {
    let target = Process::start_patient(Path::new(env!("CARGO_BIN_EXE_sealblock-hostile"))).unwrap();
    for seed in 0..4 {
        let summary = session(target.address, seed, 0).unwrap();
        assert_eq!((summary.opened, summary.failed, summary.succeeded, summary.spoilt), (1, 0, 24, 0));
    }
}
