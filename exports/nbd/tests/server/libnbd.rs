//! libnbd itself, through its Python module: each option, command and flag. Without the module it prints that it is
//! skipped.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::common::*;
use sealblock_exports_nbd::Limits;

/// A Python that has the module: the first one found, or the system's.
fn python() -> Option<&'static str> {
    let has_module = |python: &&str| {
        let mut command = Command::new(python);
        let status = command.args(["-c", "import nbd"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    let found = ["python3", "/usr/bin/python3"].into_iter().find(has_module);
    if found.is_none() {
        // Bypasses the capture of test output, so that this is visible without `--nocapture`.
        let _ = writeln!(std::io::stderr(), "skipped: there is no Python with the module nbd (python3-libnbd) here");
    }
    found
}

fn play(python: &str, served: &Served, damaged: &str) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/server/libnbd.py");
    let address = served.address;
    let words = [script, &address.ip().to_string(), &address.port().to_string(), damaged];
    let output = Command::new(python).args(words).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn every_option_command_and_flag_does_what_the_library_expects() {
    let Some(python) = python() else { return };
    let served = serve(Limits::default());
    play(python, &served, "-");
    served.wait_for_connections(0);
}

#[test]
fn a_damaged_block_is_an_error_for_itself_alone() {
    let Some(python) = python() else { return };
    let served = serve(Limits::default());
    Client::open(served.address, "protected", false).write(0, &pattern(64 * BLOCK, 3));
    served.damage(9);
    play(python, &served, "9");
}
