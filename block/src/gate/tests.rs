//! What a gate passes on, rejects, splits and emulates.

mod fake_device;
mod reserved_area;
mod sealing;

use std::rc::Rc;

use sealblock_integrity::{Checks, Field, GuardKind, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Lba};

use super::Gate;
use crate::RequestKind::{Read, Verify, Write};
use crate::{
    Abilities, Ability, BadBlockCause, Device, Durability, DynDevice, Error, ErrorKind, Expectations, Geometry,
    Outcome, Request, RequestKind, Response,
};
use fake_device::{CAPACITY, FakeDevice, TYPE1, extent, full, numbered, run, write};

fn done(outcome: Outcome) {
    assert!(matches!(outcome, Ok(Response::Done)), "{outcome:?}");
}

fn data(outcome: Outcome) -> Sealed {
    match outcome {
        Ok(Response::Data(data)) => data,
        other => panic!("no data but {other:?}"),
    }
}

fn failure(outcome: Outcome) -> ErrorKind {
    outcome.expect_err("a refusal").into_kind()
}

fn read(start: u64, blocks: u64) -> Request {
    Request::read(extent(start, blocks), full(start))
}

fn verify(start: u64, blocks: u64) -> Request {
    Request::verify(extent(start, blocks), full(start))
}

fn zero(start: u64, blocks: u64) -> Request {
    Request::write_zeroes(extent(start, blocks), true, Durability::Volatile)
}

fn compare(start: u64, data: Sealed) -> Request {
    Request::compare(extent(start, data.blocks() as u64), data)
}

fn damaged(error: &Error) -> Vec<u64> {
    error.bad_blocks().expect("an integrity error").as_slice().iter().map(|bad_block| bad_block.lba.get()).collect()
}

#[test]
fn the_last_block_is_in_range_and_the_one_behind_it_is_not() {
    let gate = FakeDevice::new(Some(TYPE1)).gate();
    done(run(gate.execute(write(CAPACITY - 1, 1, Some(TYPE1)))));
    gate.device().take_seen();
    let rejected = failure(run(gate.execute(write(CAPACITY - 1, 2, Some(TYPE1)))));
    let last = Lba::new(CAPACITY - 1);
    assert_eq!(rejected, ErrorKind::Range { extent: extent(CAPACITY - 1, 2), last });
    let extents = vec![extent(0, 1), extent(CAPACITY, 1)];
    let rejected = failure(run(gate.execute(Request::discard(extents))));
    assert_eq!(rejected, ErrorKind::Range { extent: extent(CAPACITY, 1), last });
    assert_eq!(gate.device().take_seen(), [], "a rejected request does not reach the device");
}

#[test]
fn data_must_be_as_long_as_the_extent() {
    let gate = FakeDevice::new(None).gate();
    let of = |blocks, data| Request::write(extent(0, blocks), data, Durability::Volatile);
    done(run(gate.execute(of(2, numbered(0, 2, None)))));
    let rejected = failure(run(gate.execute(of(3, numbered(0, 2, None)))));
    assert_eq!(rejected, ErrorKind::Limit { what: "blocks of data", limit: 3, actual: 2 });
    let large = Sealed::seal(Slice::copy_from(&[0; 4096]), BlockSize::B4096, None, &Tags::default());
    let rejected = failure(run(gate.execute(of(1, large.clone()))));
    assert_eq!(rejected, ErrorKind::Limit { what: "block size of the data", limit: 512, actual: 4096 });
    assert!(matches!(failure(run(gate.execute(compare(0, large)))), ErrorKind::Limit { .. }));
}

#[test]
fn written_tags_must_have_the_devices_format() {
    let gate = FakeDevice::new(Some(TYPE1)).gate();
    done(run(gate.execute(write(0, 1, Some(TYPE1)))));
    let type3 = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type3);
    for other in [None, Some(type3)] {
        let rejected = failure(run(gate.execute(write(0, 1, other))));
        assert!(matches!(rejected, ErrorKind::Limit { what: "protection information of another format", .. }));
    }
    // Compared data is not stored, so it needs no tags.
    done(run(gate.execute(compare(0, numbered(0, 1, None)))));
}

#[test]
fn requests_within_the_limits_are_not_split() {
    let gate = FakeDevice::limited(Some(TYPE1), 8).gate();
    data(run(gate.execute(read(3, 8))));
    assert_eq!(gate.device().take_seen(), [(Read, 3, 8, Some(3))]);
}

#[test]
fn larger_requests_are_split_and_reference_tags_continue() {
    let gate = FakeDevice::limited(Some(TYPE1), 8).gate();
    done(run(gate.execute(write(5, 20, Some(TYPE1)))));
    let pieces = [(Write, 5, 3, None), (Write, 8, 8, None), (Write, 16, 8, None), (Write, 24, 1, None)];
    assert_eq!(gate.device().take_seen(), pieces);
    let whole = data(run(gate.execute(read(5, 20))));
    let pieces = [(Read, 5, 3, Some(5)), (Read, 8, 8, Some(8)), (Read, 16, 8, Some(16)), (Read, 24, 1, Some(24))];
    assert_eq!(gate.device().take_seen(), pieces);
    let wanted = numbered(5, 20, Some(TYPE1));
    assert_eq!(
        (&whole.joined_data()[..], &whole.joined_tags()[..]),
        (&wanted.joined_data()[..], &wanted.joined_tags()[..])
    );
}

#[test]
fn a_first_reference_tag_that_is_not_expected_is_told_of_its_first_block_and_is_no_damage() {
    let gate = FakeDevice::limited(Some(TYPE1), 8).gate();
    done(run(gate.execute(write(0, 16, Some(TYPE1)))));
    let expectations = Expectations::new(Checks { initial_ref_tag: Some(1), ..*full(0).checks() });
    let read = Request::read(extent(0, 16), expectations);
    let error = run(gate.execute(read.clone())).unwrap_err();
    let expected = ErrorKind::Expectation { lba: Lba::ZERO, field: Field::RefTag, expected: 1, actual: 0 };
    assert_eq!((error.kind(), gate.counters().bad_blocks()), (&expected, 0));
    // Bad blocks take precedence, in whichever piece they are.
    gate.device().corrupt(9);
    assert_eq!(damaged(&run(gate.execute(read)).unwrap_err()), [9]);
}

#[test]
fn what_is_left_of_blocks_comes_in_one_piece_with_a_verdict_on_each() {
    let mut device = FakeDevice::limited(Some(TYPE1), 4);
    device.broken = vec![9];
    let gate = device.gate();
    done(run(gate.execute(write(0, 16, Some(TYPE1)))));
    let salvage = || Request::salvage(extent(3, 12));
    assert_eq!(failure(run(gate.execute(salvage()))), ErrorKind::Absent(RequestKind::Salvage), "nobody emulates it");
    let mut device = gate.device;
    device.abilities.set(RequestKind::Salvage, Ability::Native);
    let gate = device.gate();
    gate.device().corrupt(4);
    let Ok(Response::Salvaged(left)) = run(gate.execute(salvage())) else { panic!("it never fails because of damage") };
    let bad: Vec<_> = left.bad_blocks.iter().map(|bad| (bad.lba.get(), bad.cause)).collect();
    assert_eq!(bad, [(4, BadBlockCause::Tag(Field::Guard)), (9, BadBlockCause::Media)]);
    assert_eq!((left.blocks.blocks(), gate.counters().bad_blocks()), (12, 0), "a verdict that was asked for");
}

#[test]
fn one_bad_block_never_hides_another() {
    let mut device = FakeDevice::limited(Some(TYPE1), 4);
    device.broken = vec![9];
    for native in [false, true] {
        device.abilities.set(RequestKind::Verify, if native { Ability::Native } else { Ability::Absent });
        let gate = device.gate();
        done(run(gate.execute(write(0, 16, Some(TYPE1)))));
        assert!(run(gate.execute(verify(0, 8))).is_ok(), "undamaged blocks verify");
        gate.device().corrupt(2);
        gate.device().corrupt(15);
        for request in [read(0, 16), verify(0, 16)] {
            let error = run(gate.execute(request)).unwrap_err();
            assert_eq!(damaged(&error), [2, 9, 15]);
            assert_eq!(error.bad_blocks().unwrap().as_slice()[1].cause, BadBlockCause::Media);
        }
        device = gate.device;
        device.broken = vec![9];
    }
}

#[test]
fn an_error_of_the_request_outranks_damaged_blocks() {
    let mut device = FakeDevice::limited(Some(TYPE1), 4);
    device.broken = vec![2, 13];
    let gate = device.gate();
    assert!(matches!(failure(run(gate.execute(read(0, 16)))), ErrorKind::Integrity(_)));
    let mut device = gate.device;
    device.lost_from = Some(8);
    let gate = device.gate();
    assert!(matches!(failure(run(gate.execute(read(0, 16)))), ErrorKind::Unreachable { .. }));
}

#[test]
fn an_emulated_verify_reads_and_counts_its_transfers() {
    let mut device = FakeDevice::limited(Some(TYPE1), 8);
    device.abilities.set(RequestKind::Verify, Ability::Absent);
    let gate = device.gate();
    assert_eq!(gate.abilities().get(RequestKind::Verify), Ability::Emulated);
    done(run(gate.execute(write(0, 12, Some(TYPE1)))));
    gate.device().take_seen();
    let Ok(Response::Verified(cost)) = run(gate.execute(verify(0, 12))) else { panic!("clean blocks verify") };
    assert_eq!(cost.bytes_transferred, 12 * 512);
    assert_eq!(gate.device().take_seen(), [(Read, 0, 8, Some(0)), (Read, 8, 4, Some(8))]);
}

#[test]
fn a_native_verify_moves_nothing() {
    let mut device = FakeDevice::limited(Some(TYPE1), 8);
    device.abilities.set(RequestKind::Verify, Ability::Native);
    let gate = device.gate();
    done(run(gate.execute(write(0, 12, Some(TYPE1)))));
    gate.device().take_seen();
    let Ok(Response::Verified(cost)) = run(gate.execute(verify(0, 12))) else { panic!("clean blocks verify") };
    assert_eq!(cost.bytes_transferred, 0);
    assert_eq!(gate.device().take_seen(), [(Verify, 0, 8, Some(0)), (Verify, 8, 4, Some(8))]);
}

#[test]
fn an_emulated_compare_names_the_first_block_that_differs() {
    let gate = FakeDevice::limited(Some(TYPE1), 8).gate();
    done(run(gate.execute(write(4, 20, Some(TYPE1)))));
    done(run(gate.execute(compare(4, numbered(4, 20, None)))));
    let mut bytes = numbered(4, 20, None).joined_data().to_vec();
    bytes[13 * 512 + 511] ^= 1;
    bytes[15 * 512] ^= 1;
    let other = Sealed::seal(Slice::copy_from(&bytes), BlockSize::B512, None, &Tags::default());
    let differs = failure(run(gate.execute(compare(4, other))));
    assert_eq!(differs, ErrorKind::Miscompare { lba: Lba::new(17) });
}

#[test]
fn an_emulated_compare_checks_what_it_reads() {
    let gate = FakeDevice::limited(Some(TYPE1), 8).gate();
    done(run(gate.execute(write(0, 8, Some(TYPE1)))));
    gate.device().corrupt(3);
    let error = run(gate.execute(compare(0, numbered(0, 8, None)))).unwrap_err();
    assert_eq!(damaged(&error), [3], "a damaged block is damage, not a difference");
}

#[test]
fn emulated_zeroes_read_as_zeroes_with_tags_of_their_own_address() {
    let gate = FakeDevice::limited(Some(TYPE1), 8).gate();
    assert_eq!(gate.abilities().get(RequestKind::WriteZeroes), Ability::Emulated);
    done(run(gate.execute(write(0, 24, Some(TYPE1)))));
    gate.device().take_seen();
    done(run(gate.execute(zero(3, 14))));
    let pieces = [(Write, 3, 5, None), (Write, 8, 8, None), (Write, 16, 1, None)];
    assert_eq!(gate.device().take_seen(), pieces);
    let zeroes = data(run(gate.execute(read(3, 14))));
    assert!(zeroes.joined_data().iter().all(|&byte| byte == 0));
    assert_eq!((gate.device().block(2), gate.device().block(17)), (vec![3; 512], vec![18; 512]), "neighbours stay");
    assert_eq!(gate.device().durable.get(), 0);
    let durable = Request::write_zeroes(extent(0, 9), false, Durability::ForceUnitAccess);
    done(run(gate.execute(durable)));
    assert_eq!(gate.device().durable.get(), 2, "both pieces wait for the medium");
}

#[test]
fn a_read_only_device_rejects_every_change_and_still_reads() {
    let mut device = FakeDevice::new(None);
    device.abilities.writable = false;
    let gate = device.gate();
    let discard = Request::discard([extent(0, 1)]);
    for change in [write(0, 1, None), zero(0, 1), discard] {
        let kind = change.kind();
        assert_eq!(gate.abilities().of(kind), Ability::Absent);
        assert_eq!(failure(run(gate.execute(change))), ErrorKind::ReadOnly, "{}", kind.name());
    }
    assert_eq!(gate.device().take_seen(), []);
    done(run(gate.execute(Request::flush())));
    data(run(gate.execute(Request::read(extent(0, 1), Expectations::NONE))));
}

#[test]
fn an_absent_discard_is_rejected_and_a_native_one_is_split() {
    let discard = || Request::discard([extent(0, 2), extent(4, 12)]);
    let gate = FakeDevice::limited(None, 8).gate();
    assert_eq!(failure(run(gate.execute(discard()))), ErrorKind::Absent(RequestKind::Discard));
    let mut device = FakeDevice::limited(None, 8);
    device.abilities.set(RequestKind::Discard, Ability::Native);
    let gate = device.gate();
    done(run(gate.execute(discard())));
    let starts: Vec<_> = gate.device().take_seen().iter().map(|seen| (seen.1, seen.2)).collect();
    assert_eq!(starts, [(0, 2), (4, 4), (8, 8)]);
    assert_eq!(gate.counters().bytes(RequestKind::Discard), 14 * 512);
}

#[test]
fn a_discard_is_volatile_and_one_with_fua_is_rejected() {
    let mut device = FakeDevice::limited(None, 8);
    device.abilities.set(RequestKind::Discard, Ability::Native);
    let gate = device.gate();
    let volatile = Request::discard([extent(4, 4)]);
    assert!(volatile.is_volatile() && !volatile.is_durable());
    let durable = Request { durability: Durability::ForceUnitAccess, ..volatile.clone() };
    done(run(gate.execute(volatile)));
    gate.device().take_seen();
    assert!(gate.try_execute(&durable).is_none());
    assert!(matches!(failure(run(gate.execute(durable))), ErrorKind::Limit { .. }));
    assert_eq!(gate.device().take_seen(), [], "a durability that no device gives is not ignored");
}

#[test]
fn requests_in_flight_are_counted_until_they_complete_or_are_cancelled() {
    let gate = Gate::new("endless", Endless(FakeDevice::new(Some(TYPE1))));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let mut requests = [Box::pin(gate.execute(read(0, 1))), Box::pin(gate.execute(read(1, 1)))];
    assert_eq!(gate.counters().in_flight(), 0, "a request that was never polled has not started");
    for (number, request) in requests.iter_mut().enumerate() {
        assert!(request.as_mut().poll(&mut context).is_pending());
        assert_eq!(gate.counters().in_flight(), number as u64 + 1);
    }
    drop(requests);
    assert_eq!((gate.counters().in_flight(), gate.counters().completed()), (0, 0));
    assert!(run(gate.execute(read(CAPACITY, 1))).is_err());
    assert_eq!((gate.counters().in_flight(), gate.counters().completed()), (0, 1));
}

/// A device that never completes a request.
struct Endless(FakeDevice);

impl Device for Endless {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }

    async fn execute(&self, _: Request) -> Outcome {
        std::future::pending().await
    }
}

#[test]
fn requests_bytes_errors_and_bad_blocks_are_counted_apart() {
    let gate = FakeDevice::limited(Some(TYPE1), 4).gate();
    done(run(gate.execute(write(0, 16, Some(TYPE1)))));
    gate.device().corrupt(1);
    gate.device().corrupt(14);
    assert!(run(gate.execute(read(0, 16))).is_err());
    data(run(gate.execute(read(2, 6))));
    assert!(run(gate.execute(read(CAPACITY, 1))).is_err());
    done(run(gate.execute(Request::flush())));
    let counters = gate.counters();
    assert_eq!((counters.requests(Write), counters.bytes(Write), counters.errors(Write)), (1, 16 * 512, 0));
    assert_eq!((counters.requests(Read), counters.bytes(Read), counters.errors(Read)), (3, 6 * 512, 2));
    assert_eq!((counters.requests(RequestKind::Flush), counters.bytes(RequestKind::Flush)), (1, 0));
    assert_eq!(counters.bad_blocks(), 2);
}

#[test]
fn errors_keep_the_name_of_the_deepest_device() {
    let inner = FakeDevice::new(None).gate();
    assert_eq!(run(inner.execute(read(CAPACITY, 1))).unwrap_err().device_name(), Some("tiny"));
    let mut device = FakeDevice::new(None);
    device.write_error = Some(ErrorKind::Media { reason: "gone".to_owned() });
    let outer = DynDevice::new("outer", Rc::new(device.gate()));
    let error = run(outer.execute(write(0, 1, None))).unwrap_err();
    assert_eq!(error.device_name(), Some("tiny"));
    assert_eq!(error.to_string(), "tiny: the medium failed: gone");
}

#[test]
fn write_uncorrectable_is_not_emulated_and_a_native_one_is_split() {
    let request = || Request::write_uncorrectable(extent(4, 12), Durability::Volatile);
    let gate = FakeDevice::limited(None, 8).gate();
    assert_eq!(gate.abilities().get(RequestKind::WriteUncorrectable), Ability::Absent);
    assert_eq!(failure(run(gate.execute(request()))), ErrorKind::Absent(RequestKind::WriteUncorrectable));
    let mut device = FakeDevice::limited(None, 8);
    device.abilities.set(RequestKind::WriteUncorrectable, Ability::Native);
    let gate = device.gate();
    done(run(gate.execute(request())));
    let starts: Vec<_> = gate.device().take_seen().iter().map(|seen| (seen.1, seen.2)).collect();
    assert_eq!(starts, [(4, 4), (8, 8)]);
    let past = Request::write_uncorrectable(extent(CAPACITY, 1), Durability::Volatile);
    assert!(matches!(failure(run(gate.execute(past))), ErrorKind::Range { .. }));
}

#[test]
fn a_copy_is_passed_on_whole_and_not_emulated() {
    let copy =
        |source, destination| Request::copy(source, destination, Expectations::NONE, Durability::ForceUnitAccess);
    let request = || copy(extent(40, 20), extent(4, 20));
    let gate = FakeDevice::limited(None, 8).gate();
    assert_eq!(gate.abilities().get(RequestKind::Copy), Ability::Absent);
    assert_eq!(failure(run(gate.execute(request()))), ErrorKind::Absent(RequestKind::Copy));
    let mut device = FakeDevice::limited(None, 8);
    device.abilities.set(RequestKind::Copy, Ability::Native);
    device.abilities.writable = false;
    assert_eq!(failure(run(device.gate().execute(request()))), ErrorKind::ReadOnly);
    let mut device = FakeDevice::limited(None, 8);
    device.abilities.set(RequestKind::Copy, Ability::Native);
    let gate = device.gate();
    for lba in 40..60 {
        done(run(gate.execute(write(lba, 1, None))));
    }
    gate.device().take_seen();
    done(run(gate.execute(request())));
    assert_eq!(gate.device().take_seen(), [(RequestKind::Copy, 4, 20, None)]);
    for lba in 0..20 {
        assert_eq!(
            data(run(gate.execute(Request::read(extent(4 + lba, 1), Expectations::NONE)))).joined_data()[..],
            numbered(40 + lba, 1, None).joined_data()[..]
        );
    }
    gate.device().take_seen();
    // Adjacent ranges are allowed on both sides; a common block is not.
    done(run(gate.execute(copy(extent(8, 4), extent(4, 4)))));
    done(run(gate.execute(copy(extent(8, 4), extent(12, 4)))));
    for (source, destination) in [(8, 8), (8, 11), (8, 5)] {
        let refused = failure(run(gate.execute(copy(extent(source, 4), extent(destination, 4)))));
        assert!(matches!(refused, ErrorKind::Limit { .. }), "{source} to {destination}: {refused}");
    }
    assert!(matches!(failure(run(gate.execute(copy(extent(8, 4), extent(20, 5))))), ErrorKind::Limit { .. }));
    for (source, destination) in [(CAPACITY - 3, 0), (0, CAPACITY - 3)] {
        let refused = failure(run(gate.execute(copy(extent(source, 4), extent(destination, 4)))));
        assert!(matches!(refused, ErrorKind::Range { .. }), "{source} to {destination}: {refused}");
    }
    assert_eq!(gate.device().take_seen().len(), 2, "what is refused does not reach the device");
}

#[test]
fn a_compare_and_write_is_passed_on_whole_or_refused_and_not_emulated() {
    let swap = |start, blocks, expected, new| {
        let request = Request::compare_and_write(extent(start, blocks), expected, new, Durability::Volatile);
        move |gate: &Gate<FakeDevice>| run(gate.execute(request))
    };
    let blocks = |first, count| numbered(first, count, None);
    let gate = FakeDevice::limited(None, 8).gate();
    let absent = gate.abilities().of(RequestKind::CompareAndWrite);
    assert_eq!(absent, Ability::Absent, "two requests of a gate are atomic for nobody");
    let error = failure(swap(4, 1, blocks(4, 1), blocks(0, 1))(&gate));
    assert_eq!(error, ErrorKind::Absent(RequestKind::CompareAndWrite));
    let able = |protection, writable| {
        let mut device = FakeDevice::limited(protection, 8);
        device.abilities.compare_and_write_blocks = 12;
        device.abilities.writable = writable;
        device.gate()
    };
    assert_eq!(failure(swap(4, 1, blocks(4, 1), blocks(0, 1))(&able(None, false))), ErrorKind::ReadOnly);
    let gate = able(None, true);
    assert_eq!(gate.abilities().of(RequestKind::CompareAndWrite), Ability::Native);
    done(run(gate.execute(write(4, 8, None))));
    done(run(gate.execute(write(12, 4, None))));
    gate.device().take_seen();
    // More blocks than other requests may have in one piece, and still one request.
    done(swap(4, 12, blocks(4, 12), blocks(20, 12))(&gate));
    assert_eq!(gate.device().take_seen(), [(RequestKind::CompareAndWrite, 4, 12, None)]);
    let differs = failure(swap(4, 2, Sealed::join(vec![blocks(20, 1), blocks(5, 1)]), blocks(0, 2))(&gate));
    assert_eq!(differs, ErrorKind::Miscompare { lba: Lba::new(5) });
    let after = data(run(gate.execute(Request::read(extent(4, 2), Expectations::NONE))));
    assert_eq!(after.joined_data()[..], blocks(20, 2).joined_data()[..], "nothing of it was written");
    gate.device().take_seen();
    let refused = [
        swap(4, 13, blocks(4, 13), blocks(4, 13))(&gate),
        swap(4, 2, blocks(4, 1), blocks(4, 2))(&gate),
        swap(4, 2, blocks(4, 2), blocks(4, 3))(&gate),
        swap(4, 2, blocks(4, 2), numbered(4, 2, Some(TYPE1)))(&gate),
    ];
    for outcome in refused {
        assert!(matches!(failure(outcome), ErrorKind::Limit { .. }));
    }
    let past = failure(swap(CAPACITY, 1, blocks(4, 1), blocks(4, 1))(&gate));
    assert!(matches!(past, ErrorKind::Range { .. }));
    assert_eq!(gate.device().take_seen(), [], "what is refused does not reach the device");
    // Tags of the expected data do not count, those of the new data do.
    let gate = able(Some(TYPE1), true);
    done(run(gate.execute(write(4, 1, Some(TYPE1)))));
    done(swap(4, 1, blocks(4, 1), numbered(4, 1, Some(TYPE1)))(&gate));
    assert!(matches!(failure(swap(4, 1, blocks(4, 1), blocks(4, 1))(&gate)), ErrorKind::Limit { .. }));
}

/// A device that executes in place, accepts four blocks at a time, and has no Compare and no WriteZeroes.
fn instant() -> Gate<FakeDevice> {
    let mut device = FakeDevice::limited(Some(TYPE1), 4);
    device.instant = true;
    device.gate()
}

#[test]
fn requests_that_need_no_emulation_are_executed_in_place_and_counted() {
    let gate = instant();
    done(gate.try_execute(&write(8, 4, Some(TYPE1))).expect("in place"));
    assert_eq!(
        data(gate.try_execute(&read(8, 4)).expect("in place")).joined_data()[..],
        numbered(8, 4, Some(TYPE1)).joined_data()[..]
    );
    assert_eq!((gate.counters().requests(Write), gate.counters().bytes(Read)), (1, 4 * 512));
    gate.device().corrupt(9);
    let error = gate.try_execute(&read(8, 4)).expect("in place").unwrap_err();
    assert_eq!((damaged(&error), gate.counters().errors(Read)), (vec![9], 1));
    assert!(error.to_string().contains("tiny"), "{error}");
    let stack = DynDevice::new("outer", instant());
    done(stack.try_execute(&write(0, 1, Some(TYPE1))).expect("through every gate"));
}

#[test]
fn requests_that_need_splitting_or_emulation_are_not_started_in_place() {
    let gate = instant();
    let too_long = read(0, 5);
    let out_of_range = read(CAPACITY, 1);
    let emulated = verify(0, 1);
    for request in [too_long, out_of_range, emulated, write(0, 1, None), zero(0, 1)] {
        assert!(gate.try_execute(&request).is_none(), "{request:?}");
    }
    assert!(FakeDevice::new(Some(TYPE1)).gate().try_execute(&read(0, 1)).is_none(), "a device that waits");
    assert_eq!(gate.device().take_seen(), []);
    assert!(RequestKind::ALL.iter().all(|&kind| gate.counters().requests(kind) == 0));
}
