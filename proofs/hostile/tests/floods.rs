//! Every command as a flood, on a small server: what it can make the server hold, and that it stops.

use std::path::Path;
use std::time::Duration;

use sealblock_hostile::floods::{self, AREA_BYTES, Effort, FLOODS, Kind};
use sealblock_hostile::process;
use sealblock_hostile::served::Program;

/// Measures the growth of memory, one command after the other on one server. The program of this crate measures more, and times.
fn floods_of(kind: Kind) {
    let program = Program::hostile(Path::new(env!("CARGO_BIN_EXE_sealblock-hostile")));
    let folder = tempfile::tempdir().unwrap();
    let limits = process::patient_limits();
    let effort = Effort { limits: limits.clone(), outstanding: 56, time: Duration::from_millis(300) };
    let mut process = floods::serve(&program, folder.path(), &limits).unwrap();
    let allowed = floods::allowed_bytes(&limits, 2 * floods::QUEUES);
    for flood in FLOODS.iter().filter(|flood| flood.runs_on(kind)) {
        let (queues, measured) = floods::flood(&mut process, flood, kind, &effort).unwrap();
        queues.cut();
        // What a device in memory stores is its own.
        let stored = if kind == Kind::Memory { AREA_BYTES + AREA_BYTES / 8 } else { 0 };
        let (name, grown) = (flood.name, measured.grown_bytes);
        assert!(grown <= allowed + stored, "{name}: memory grew by {grown} bytes, and {allowed} are allowed");
        floods::ready_again(process.address).unwrap_or_else(|error| panic!("{name}: {error:#}"));
    }
    process.stop().unwrap();
}

#[test]
fn no_command_makes_a_server_of_volumes_hold_more_than_its_limits_allow() {
    floods_of(Kind::Volume);
}

#[test]
fn no_command_makes_a_server_of_memory_hold_more_than_its_limits_allow() {
    floods_of(Kind::Memory);
}

#[test]
fn no_command_makes_a_server_of_raw_files_hold_more_than_its_limits_allow() {
    floods_of(Kind::Raw);
}
