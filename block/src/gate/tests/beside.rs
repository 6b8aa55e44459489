//! Digests, allocation status, repair and the annex.

use sealblock_integrity::{Checks, guard};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockCount, Lba};

use super::tiny::{CAPACITY, TYPE1, Tiny, extent, full, numbered, run, write};
use crate::{
    Ability, BadBlock, BadBlocks, BlockState, Checksum, Device, Error, ErrorKind, Gate, MemberPath, Request,
    RequestKind, ReservedArea, Response,
};

fn digest(start: u64, blocks: u64) -> Request {
    Request::Checksum { extent: extent(start, blocks), checks: full(start) }
}

fn digested(gate: &Gate<Tiny>, start: u64, blocks: u64) -> Result<Checksum, Error> {
    match run(gate.execute(digest(start, blocks)))? {
        Response::Checksum(digested) => Ok(digested),
        other => panic!("no digest but {other:?}"),
    }
}

/// A gate over a device with or without digests of its own, which takes `most` blocks at once.
fn gate(native: bool, most: u32) -> Gate<Tiny> {
    let mut tiny = Tiny::new(Some(TYPE1));
    tiny.abilities.checksum = if native { Ability::Native } else { Ability::Absent };
    let most = BlockCount::new(most).unwrap();
    (tiny.geometry.limits.max_transfer_blocks, tiny.geometry.limits.max_verify_blocks) = (most, most);
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
        tiny.abilities.checksum = if native { Ability::Native } else { Ability::Absent };
        tiny.geometry.limits.max_verify_blocks = BlockCount::new(4).unwrap();
        tiny.geometry.limits.max_transfer_blocks = tiny.geometry.limits.max_verify_blocks;
        tiny.broken = vec![5, 17];
        let error = digested(&tiny.gate(), 0, 20).unwrap_err();
        let faults: Vec<u64> = error.bad_blocks().unwrap().as_slice().iter().map(|fault| fault.lba.get()).collect();
        assert_eq!(faults, [5, 17], "native {native}");
    }
}

#[test]
fn a_device_that_cannot_tell_holes_is_all_data() {
    for (ability, state) in [(Ability::Absent, BlockState::Data), (Ability::Native, BlockState::Hole)] {
        let mut tiny = Tiny::new(None);
        tiny.abilities.allocation = ability;
        let answer = run(tiny.gate().execute(Request::BlockStatus { extent: extent(2, 9) })).unwrap();
        let Response::BlockStatus(runs) = answer else { panic!("no runs but {answer:?}") };
        assert_eq!(runs.iter().map(|run| u64::from(run.blocks.get())).sum::<u64>(), 9);
        assert!(runs.iter().all(|run| run.state == state), "{runs:?}");
    }
}

#[test]
fn nothing_stands_in_for_a_repair_or_an_annex() {
    let gate = Tiny::new(Some(TYPE1)).gate();
    let repair = Request::Repair { extent: extent(0, CAPACITY), checks: Checks::NONE };
    let read = Request::ReadReserved { slot: ReservedArea::GroupLabel };
    for operation in [repair, read, reserved(ReservedArea::GroupLabel, 1)] {
        let kind = operation.kind();
        assert_eq!(run(gate.execute(operation)).unwrap_err().into_kind(), ErrorKind::Absent(kind));
    }
}

fn reserved(slot: ReservedArea, bytes: usize) -> Request {
    Request::WriteReserved { slot, bytes: Slice::copy_from(&vec![7; bytes]) }
}

#[test]
fn an_annex_takes_what_fits_a_slot_and_no_more() {
    let mut tiny = Tiny::new(None);
    tiny.abilities.reserved = Ability::Native;
    let gate = tiny.gate();
    for slot in ReservedArea::ALL {
        let most = slot.max_bytes();
        assert!(matches!(run(gate.execute(reserved(slot, most))), Ok(Response::Done)));
        let refused = run(gate.execute(reserved(slot, most + 1))).unwrap_err().into_kind();
        assert!(matches!(refused, ErrorKind::Limit { limit, actual, .. } if limit + 1 == actual), "{refused:?}");
    }
    let mut reader = Tiny::new(None);
    (reader.abilities.reserved, reader.abilities.writable) = (Ability::Native, false);
    let reader = reader.gate();
    let refused = run(reader.execute(reserved(ReservedArea::ScrubState, 1))).unwrap_err().into_kind();
    assert_eq!(refused, ErrorKind::ReadOnly);
    assert!(matches!(
        run(reader.execute(Request::ReadReserved { slot: ReservedArea::ScrubState })),
        Ok(Response::Reserved(_))
    ));
    assert_eq!(reader.counters().requests(RequestKind::ReadReserved), 1);
}

#[test]
fn legs_are_named_from_the_outermost_group_inwards() {
    assert_eq!(MemberPath::NONE.outermost(), None);
    let nested = MemberPath::NONE.within(3).within(0).within(126);
    let (first, rest) = nested.outermost().unwrap();
    let (second, rest) = rest.outermost().unwrap();
    assert_eq!((first, second, rest.outermost()), (126, 0, Some((3, MemberPath::NONE))));
    assert_eq!(MemberPath::NONE.within(MemberPath::MAX_MEMBERS), MemberPath::NONE);
}

#[test]
fn a_block_that_is_bad_on_two_legs_has_two_faults() {
    let fault = |number| BadBlock { member: MemberPath::NONE.within(number), ..BadBlock::media(Lba::new(7)) };
    let faults = BadBlocks::new(vec![fault(1), fault(0), fault(1)]).unwrap();
    assert_eq!(faults.as_slice(), [fault(0), fault(1)]);
}
