//! Digests, allocation status, repair and the annex.

use sealblock_integrity::{Checks, guard};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockCount, Lba};

use super::tiny::{CAPACITY, TYPE1, Tiny, extent, full, numbered, run, write};
use crate::{
    Ability, AnnexSlot, Answer, Device, Digested, Error, Failure, Fault, Faults, Gate, Leg, Operation, OperationKind,
    RunState,
};

fn digest(start: u64, blocks: u64) -> Operation {
    Operation::Digest { extent: extent(start, blocks), checks: full(start) }
}

fn digested(gate: &Gate<Tiny>, start: u64, blocks: u64) -> Result<Digested, Error> {
    match run(gate.execute(digest(start, blocks)))? {
        Answer::Digest(digested) => Ok(digested),
        other => panic!("no digest but {other:?}"),
    }
}

/// A gate over a device with or without digests of its own, which takes `most` blocks at once.
fn gate(native: bool, most: u32) -> Gate<Tiny> {
    let mut tiny = Tiny::new(Some(TYPE1));
    tiny.abilities.digest = if native { Ability::Native } else { Ability::Absent };
    let most = BlockCount::new(most).unwrap();
    (tiny.geometry.limits.transfer, tiny.geometry.limits.verify) = (most, most);
    tiny.gate()
}

#[test]
fn a_digest_is_the_crc_of_the_data_whoever_makes_it_and_in_however_many_pieces() {
    for (native, most) in [(true, 64), (true, 5), (false, 64), (false, 5)] {
        let gate = gate(native, most);
        run(gate.execute(write(3, 20, Some(TYPE1)))).unwrap();
        let found = digested(&gate, 3, 20).unwrap();
        assert_eq!(found.crc64, guard::crc64(numbered(3, 20, None).data()), "native {native}, {most} blocks at once");
        assert_eq!(found.bytes_transferred, if native { 0 } else { 20 * 512 });
        assert_ne!(digested(&gate, 4, 19).unwrap().crc64, found.crc64);
    }
}

#[test]
fn every_bad_block_fails_a_digest() {
    for native in [true, false] {
        let mut tiny = Tiny::new(Some(TYPE1));
        tiny.abilities.digest = if native { Ability::Native } else { Ability::Absent };
        tiny.geometry.limits.verify = BlockCount::new(4).unwrap();
        tiny.geometry.limits.transfer = tiny.geometry.limits.verify;
        tiny.broken = vec![5, 17];
        let error = digested(&tiny.gate(), 0, 20).unwrap_err();
        let faults: Vec<u64> = error.faults().unwrap().as_slice().iter().map(|fault| fault.lba.get()).collect();
        assert_eq!(faults, [5, 17], "native {native}");
    }
}

#[test]
fn a_device_that_cannot_tell_holes_is_all_data() {
    for (ability, state) in [(Ability::Absent, RunState::Data), (Ability::Native, RunState::Hole)] {
        let mut tiny = Tiny::new(None);
        tiny.abilities.allocation = ability;
        let answer = run(tiny.gate().execute(Operation::Allocation { extent: extent(2, 9) })).unwrap();
        let Answer::Allocation(runs) = answer else { panic!("no runs but {answer:?}") };
        assert_eq!(runs.iter().map(|run| u64::from(run.blocks.get())).sum::<u64>(), 9);
        assert!(runs.iter().all(|run| run.state == state), "{runs:?}");
    }
}

#[test]
fn nothing_stands_in_for_a_repair_or_an_annex() {
    let gate = Tiny::new(Some(TYPE1)).gate();
    let repair = Operation::Repair { extent: extent(0, CAPACITY), checks: Checks::NONE };
    let read = Operation::ReadAnnex { slot: AnnexSlot::Group };
    for operation in [repair, read, annex(AnnexSlot::Group, 1)] {
        let kind = operation.kind();
        assert_eq!(run(gate.execute(operation)).unwrap_err().into_failure(), Failure::Absent(kind));
    }
}

fn annex(slot: AnnexSlot, bytes: usize) -> Operation {
    Operation::WriteAnnex { slot, bytes: Slice::copy_from(&vec![7; bytes]) }
}

#[test]
fn an_annex_takes_what_fits_a_slot_and_no_more() {
    let mut tiny = Tiny::new(None);
    tiny.abilities.annex = Ability::Native;
    let gate = tiny.gate();
    for slot in AnnexSlot::ALL {
        let most = slot.most_bytes();
        assert!(matches!(run(gate.execute(annex(slot, most))), Ok(Answer::Done)));
        let refused = run(gate.execute(annex(slot, most + 1))).unwrap_err().into_failure();
        assert!(matches!(refused, Failure::Limit { limit, actual, .. } if limit + 1 == actual), "{refused:?}");
    }
    let mut reader = Tiny::new(None);
    (reader.abilities.annex, reader.abilities.writable) = (Ability::Native, false);
    let reader = reader.gate();
    let refused = run(reader.execute(annex(AnnexSlot::Scrub, 1))).unwrap_err().into_failure();
    assert_eq!(refused, Failure::ReadOnly);
    assert!(matches!(run(reader.execute(Operation::ReadAnnex { slot: AnnexSlot::Scrub })), Ok(Answer::Annex(_))));
    assert_eq!(reader.counters().requests(OperationKind::ReadAnnex), 1);
}

#[test]
fn legs_are_named_from_the_outermost_group_inwards() {
    assert_eq!(Leg::NONE.outermost(), None);
    let nested = Leg::NONE.within(3).within(0).within(126);
    let (first, rest) = nested.outermost().unwrap();
    let (second, rest) = rest.outermost().unwrap();
    assert_eq!((first, second, rest.outermost()), (126, 0, Some((3, Leg::NONE))));
    assert_eq!(Leg::NONE.within(Leg::MOST_LEGS), Leg::NONE);
}

#[test]
fn a_block_that_is_bad_on_two_legs_has_two_faults() {
    let fault = |number| Fault { leg: Leg::NONE.within(number), ..Fault::media(Lba::new(7)) };
    let faults = Faults::new(vec![fault(1), fault(0), fault(1)]).unwrap();
    assert_eq!(faults.as_slice(), [fault(0), fault(1)]);
}
