//! Checksums, block status, repair and the reserved area.

use sealblock_integrity::ChecksumKind;
use sealblock_runtime_memory::Slice;
use sealblock_units::Lba;

use super::fake_device::{CAPACITY, FakeDevice, TYPE1, extent, full, numbered, run, write};
use crate::{
    Ability, BadBlock, BadBlocks, BlockState, Checksum, Device, Error, ErrorKind, Gate, MemberPath, Request,
    RequestKind, ReservedArea, Response,
};

fn checksum_of(gate: &Gate<FakeDevice>, kind: ChecksumKind, start: u64, blocks: u64) -> Result<Checksum, Error> {
    match run(gate.execute(Request::checksum(extent(start, blocks), kind, full(start))))? {
        Response::Checksum(checksum) => Ok(checksum),
        other => panic!("no checksum but {other:?}"),
    }
}

/// A device with or without native checksums of each kind, which accepts `max_blocks` blocks at once.
fn device(native: [bool; 2], max_blocks: u32) -> FakeDevice {
    let mut device = FakeDevice::limited(Some(TYPE1), max_blocks);
    for (kind, native) in ChecksumKind::ALL.into_iter().zip(native) {
        device.abilities.set_checksum(kind, Ability::native_if(native));
    }
    device
}

const WAYS: [[bool; 2]; 4] = [[true, true], [true, false], [false, true], [false, false]];

#[test]
fn a_checksum_is_the_crc_of_the_data_native_or_emulated_whole_or_in_pieces() {
    for (ways, max_blocks) in WAYS.into_iter().flat_map(|ways| [(ways, 64), (ways, 5)]) {
        let gate = device(ways, max_blocks).gate();
        run(gate.execute(write(3, 20, Some(TYPE1)))).unwrap();
        for (kind, native) in ChecksumKind::ALL.into_iter().zip(ways) {
            let found = checksum_of(&gate, kind, 3, 20).unwrap();
            let wanted = kind.compute(&numbered(3, 20, None).joined_data());
            assert_eq!((found.kind, found.value), (kind, wanted), "native {native}, {max_blocks} blocks at once");
            assert_eq!(found.bytes_transferred, if native { 0 } else { 20 * 512 });
            assert_ne!(checksum_of(&gate, kind, 4, 19).unwrap().value, found.value);
            let how = if native { Ability::Native } else { Ability::Emulated };
            assert_eq!(gate.abilities().of_checksum(kind), how, "and it is said");
        }
    }
}

#[test]
fn pieces_of_another_kind_are_not_joined() {
    for (answered, fits) in [(None, true), (Some(ChecksumKind::Crc32c), true), (Some(ChecksumKind::Crc64Nvme), false)] {
        let mut device = device([true, true], 5);
        device.checksum_kind = answered;
        let outcome = checksum_of(&device.gate(), ChecksumKind::Crc32c, 3, 20);
        assert_eq!(outcome.is_ok(), fits, "{outcome:?}");
    }
}

#[test]
fn a_group_has_natively_what_all_of_its_members_have() {
    let of = |ways| device(ways, 5).gate().abilities();
    for (a, b) in WAYS.into_iter().flat_map(|a| WAYS.map(|b| (a, b))) {
        let both = of(a).intersect(&of(b));
        for (at, kind) in ChecksumKind::ALL.into_iter().enumerate() {
            let how = if a[at] && b[at] { Ability::Native } else { Ability::Emulated };
            assert_eq!(both.of_checksum(kind), how, "{a:?} and {b:?}");
        }
    }
}

#[test]
fn every_bad_block_fails_a_checksum() {
    for (kind, native) in ChecksumKind::ALL.into_iter().flat_map(|kind| [(kind, true), (kind, false)]) {
        let mut device = device([native, native], 4);
        device.broken = vec![5, 17];
        let error = checksum_of(&device.gate(), kind, 0, 20).unwrap_err();
        let bad_blocks: Vec<u64> =
            error.bad_blocks().unwrap().as_slice().iter().map(|bad_block| bad_block.lba.get()).collect();
        assert_eq!(bad_blocks, [5, 17], "native {native}");
    }
}

#[test]
fn without_a_block_status_all_blocks_are_allocated() {
    for (ability, state) in [(Ability::Absent, BlockState::Allocated), (Ability::Native, BlockState::Hole)] {
        let mut device = FakeDevice::new(None);
        device.abilities.set(RequestKind::BlockStatus, ability);
        let response = run(device.gate().execute(Request::block_status(extent(2, 9)))).unwrap();
        let Response::BlockStatus(runs) = response else { panic!("no runs but {response:?}") };
        assert_eq!(runs.iter().map(|run| u64::from(run.blocks.get())).sum::<u64>(), 9);
        assert!(runs.iter().all(|run| run.state == state), "{runs:?}");
    }
}

#[test]
fn repair_and_the_reserved_area_are_not_emulated() {
    let gate = FakeDevice::new(Some(TYPE1)).gate();
    let repair = Request::repair(extent(0, CAPACITY));
    let read = Request::read_reserved(ReservedArea::GroupLabel);
    for request in [repair, read, reserved(ReservedArea::GroupLabel, 1)] {
        let kind = request.kind();
        assert_eq!(run(gate.execute(request)).unwrap_err().into_kind(), ErrorKind::Absent(kind));
    }
}

fn reserved(area: ReservedArea, bytes: usize) -> Request {
    Request::write_reserved(area, Slice::copy_from(&vec![7; bytes]))
}

#[test]
fn a_reserved_area_takes_at_most_the_maximum_length_of_each_part() {
    let mut device = FakeDevice::new(None);
    device.abilities.set(RequestKind::ReadReserved, Ability::Native);
    let gate = device.gate();
    for area in ReservedArea::ALL {
        let max_bytes = area.max_bytes();
        assert!(matches!(run(gate.execute(reserved(area, max_bytes))), Ok(Response::Done)));
        let rejected = run(gate.execute(reserved(area, max_bytes + 1))).unwrap_err().into_kind();
        assert!(matches!(rejected, ErrorKind::Limit { limit, actual, .. } if limit + 1 == actual), "{rejected:?}");
    }
    let mut reader = FakeDevice::new(None);
    reader.abilities.set(RequestKind::ReadReserved, Ability::Native);
    reader.abilities.writable = false;
    let reader = reader.gate();
    let rejected = run(reader.execute(reserved(ReservedArea::ScrubState, 1))).unwrap_err().into_kind();
    assert_eq!(rejected, ErrorKind::ReadOnly);
    assert!(matches!(run(reader.execute(Request::read_reserved(ReservedArea::ScrubState))), Ok(Response::Reserved(_))));
    assert_eq!(reader.counters().requests(RequestKind::ReadReserved), 1);
}

#[test]
fn member_paths_go_from_the_outermost_group_inwards() {
    assert_eq!(MemberPath::NONE.outermost(), None);
    let nested = MemberPath::NONE.within(3).within(0).within(126);
    let (first, rest) = nested.outermost().unwrap();
    let (second, rest) = rest.outermost().unwrap();
    assert_eq!((first, second, rest.outermost()), (126, 0, Some((3, MemberPath::NONE))));
    assert_eq!(MemberPath::NONE.within(MemberPath::MAX_MEMBERS), MemberPath::NONE);
}

#[test]
fn a_block_that_is_bad_on_two_members_is_listed_twice() {
    let bad_block = |number| BadBlock { member: MemberPath::NONE.within(number), ..BadBlock::media(Lba::new(7)) };
    let bad_blocks = BadBlocks::new(vec![bad_block(1), bad_block(0), bad_block(1)]).unwrap();
    assert_eq!(bad_blocks.as_slice(), [bad_block(0), bad_block(1)]);
}
