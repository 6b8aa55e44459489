//! Every attack once, with the seed 1 and the least effort. Longer runs are made with the binary.

use std::path::Path;
use std::time::Duration;

use sealblock_hostile::attacks::{ATTACKS, Scene};
use sealblock_hostile::process::{Process, Sight};
use sealblock_hostile::suite;
use sealblock_hostile::wire::HANG;

fn target() -> Process {
    Process::start(Path::new(env!("CARGO_BIN_EXE_sealblock-hostile"))).unwrap()
}

#[test]
fn no_attack_succeeds() {
    let mut target = target();
    let scene = Scene { address: target.address, seed: 1, effort: 1, time: HANG };
    for attack in ATTACKS {
        let report = suite::run(&mut target, attack, &scene, Duration::from_millis(50), 1);
        println!("{}", report.unwrap_or_else(|error| panic!("{}: {error:#}", attack.name)));
    }
    suite::kept(&target).unwrap();
    target.stop().unwrap();
}

#[test]
fn what_is_measured_is_seen() {
    let target = target();
    let before: Sight = target.look().unwrap();
    assert!(before.descriptors > 3 && before.resident_bytes > 1 << 20 && before.peak_bytes >= before.resident_bytes);
    let held: Vec<_> = (0..8).map(|_| sealblock_hostile::wire::Peer::ready(target.address, 0).unwrap()).collect();
    assert_eq!(target.look().unwrap().descriptors, before.descriptors + held.len());
}
