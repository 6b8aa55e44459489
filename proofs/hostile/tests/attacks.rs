//! Runs every attack once, with seed 1 and the least effort, every command as a flood, and our host device against a
//! broken target. The binary makes longer runs.

use std::path::Path;
use std::time::Duration;

use sealblock_hostile::attacks::cut::{BLOCKS, BlockChecker, START};
use sealblock_hostile::attacks::{ATTACKS, TestContext};
use sealblock_hostile::floods::nbd::{self, NBD_FLOODS};
use sealblock_hostile::floods::{self, Effort, FLOODS, Kind, nvme};
use sealblock_hostile::formats::{self, FORMATS_NQN, TagMaker};
use sealblock_hostile::host::{peak_mib, session, sessions};
use sealblock_hostile::process::{self, Process, ProcessUsage};
use sealblock_hostile::served::Program;
use sealblock_hostile::suite;
use sealblock_hostile::wire::{HANG_TIMEOUT, Peer};
use sealblock_hostile::writes::WriteMode;
use sealblock_integrity::{GuardKind, ProtectionType, guard};
use sealblock_protocols_nvme::nvm::BlockCommand;
use sealblock_units::BlockSize;

fn target() -> Process {
    Process::start(Path::new(env!("CARGO_BIN_EXE_sealblock-hostile"))).unwrap()
}

#[test]
fn no_attack_succeeds() {
    let mut target = target();
    let context = TestContext { address: target.address, seed: 1, effort: 1, time: HANG_TIMEOUT };
    for attack in ATTACKS {
        let report = suite::run(&mut target, attack, &context, Duration::from_millis(50), 1);
        println!("{}", report.unwrap_or_else(|error| panic!("{}: {error:#}", attack.name)));
    }
    suite::check_memory(&target).unwrap();
    target.stop().unwrap();
}

#[test]
fn usage_counts_memory_and_descriptors() {
    let target = target();
    let before: ProcessUsage = target.usage().unwrap();
    assert!(before.descriptors > 3 && before.resident_bytes > 1 << 20 && before.peak_bytes >= before.resident_bytes);
    let held: Vec<_> = (0..8).map(|_| sealblock_hostile::wire::Peer::ready(target.address, 0).unwrap()).collect();
    assert_eq!(target.usage().unwrap().descriptors, before.descriptors + held.len());
}

/// The counterpart of the attack `cut`: checks that half-written blocks are detected in every form.
#[test]
fn half_written_blocks_are_detected() {
    let target = target();
    let context = TestContext { address: target.address, seed: 1, effort: 1, time: HANG_TIMEOUT };
    let kind = formats::of(GuardKind::Crc16, ProtectionType::Type1, BlockSize::B4096);
    let mode = WriteMode::all(kind)[1];
    let (_admin, cntlid) = Peer::admin(context.address, FORMATS_NQN, 0).unwrap();
    let mut io = Peer::io(context.address, FORMATS_NQN, 1, cntlid).unwrap();
    let whole = mode.extent(START, BLOCKS);
    let unchecked = |blocks| BlockCommand::new(mode.extent(START, blocks));
    let mut write = |data: &[u8], blocks| assert_eq!(mode.write(&mut io, unchecked(blocks), data).unwrap(), 0);

    let mut checker = BlockChecker::new(&context, kind).unwrap();
    let (old, new) = (kind.sent(1, whole, TagMaker::Host), kind.sent(2, whole, TagMaker::Host));
    let unit = kind.unit_bytes();
    // A partial write where nothing may be stored, or everything must be.
    write(&new[..2 * unit], 2);
    let error = checker.check_old().unwrap_err();
    assert!(error.to_string().contains("neither"), "{error:#}");
    let error = checker.check_new(whole, 2).unwrap_err();
    assert!(error.to_string().contains("is missing"), "{error:#}");
    checker.check_whole(whole, 2).unwrap();
    // New data under old tags.
    let torn = [&new[2 * unit..3 * unit - 8], &old[3 * unit - 8..3 * unit]].concat();
    write(&[&new[..2 * unit], &torn].concat(), 3);
    let error = checker.check_whole(whole, 2).unwrap_err();
    assert!(error.to_string().contains("0x282"), "{error:#}");
    // A half new block, with matching tags.
    let mut data = [&new[..2048], &old[2048..4096]].concat();
    let guard = guard::crc16(&data);
    data.extend(guard.to_be_bytes());
    data.extend(&new[4098..unit]);
    write(&[&data, &new[unit..3 * unit]].concat(), 3);
    let error = checker.check_whole(whole, 2).unwrap_err();
    assert!(error.to_string().contains("neither"), "{error:#}");
}

/// Far more than its queues need, and far less than an unchecked length would allocate.
const MOST_MIB: u64 = 512;

#[test]
fn every_call_ends_whatever_the_target_replies() {
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

/// Measures the growth of memory for one command after the other on one server. The program of this crate measures
/// more, including times.
fn floods_of(kind: Kind) {
    let program = Program::hostile(Path::new(env!("CARGO_BIN_EXE_sealblock-hostile")));
    let folder = tempfile::tempdir().unwrap();
    let limits = process::patient_limits();
    let effort = Effort { limits: limits.clone(), outstanding: 56, time: Duration::from_millis(300) };
    let mut process = floods::serve(&program, folder.path(), &limits).unwrap();
    let allowed = floods::allowed_bytes(&limits, 2 * floods::QUEUES);
    let socket = floods::nbd_socket(folder.path());
    let check = |name: &str, allowed: u64, grown: u64| {
        let allowed = allowed + kind.stored_bytes();
        assert!(grown <= allowed, "{name}: memory grew by {grown} bytes, and {allowed} are allowed");
    };
    for flood in FLOODS.iter().filter(|flood| flood.runs_on(kind)) {
        let start = |address| nvme::start(address, flood, kind, &effort);
        let (queues, measured) = floods::flood(&mut process, effort.time, start).unwrap();
        queues.cut();
        check(flood.name, allowed, measured.grown_bytes);
        nvme::ready_again(process.address).unwrap_or_else(|error| panic!("{}: {error:#}", flood.name));
    }
    for flood in NBD_FLOODS {
        let start = |_| nbd::start(&socket, flood, kind, &effort);
        let (queues, measured) = floods::flood(&mut process, effort.time, start).unwrap();
        queues.cut();
        check(flood.name, nbd::allowed_bytes(&limits), measured.grown_bytes);
        nbd::ready_again(&socket, kind).unwrap_or_else(|error| panic!("{}: {error:#}", flood.name));
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
