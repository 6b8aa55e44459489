//! Twin tests of the device in RAM, through its gate as in a stack.

use std::pin::pin;

use futures_util::FutureExt;
use sealblock_block::{
    BadBlockCause, BlockState, Device, Durability, ErrorKind, Expectations, Gate, Outcome, Request, Response,
};
use sealblock_integrity::{Checks, ChecksumKind, Field, GuardKind, Masked, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_runtime_memory::{Pool, Slice};
use sealblock_units::{BlockSize, Extent, Lba};

use super::{Corruption, MemoryDevice};

const SIZES: [BlockSize; 2] = [BlockSize::B512, BlockSize::B4096];

fn formats() -> impl Iterator<Item = PiFormat> {
    [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64].into_iter().flat_map(|guard| {
        ProtectionType::ALL.into_iter().map(move |kind| PiFormat::with_default_storage_tag(guard, kind))
    })
}

const TYPE1: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);

fn gate(size: BlockSize, format: Option<PiFormat>) -> Gate<MemoryDevice> {
    Gate::new("mem", MemoryDevice::new(size, 4096, format))
}

/// Executes a request. RAM never waits, except to let other tasks run.
fn run(gate: &Gate<MemoryDevice>, operation: Request) -> Outcome {
    let mut execution = pin!(gate.execute(operation));
    loop {
        if let Some(outcome) = execution.as_mut().now_or_never() {
            return outcome;
        }
    }
}

fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

/// Blocks filled with `byte`, with tags for their address.
fn blocks(gate: &Gate<MemoryDevice>, at: Extent, byte: u8) -> Sealed {
    let geometry = gate.geometry();
    let bytes = vec![byte; at.bytes(geometry.block_size) as usize];
    let tags = Tags { app_tag: 0x0A0B, storage_tag: 0, initial_ref_tag: at.start().get() };
    Sealed::seal(Slice::copy_from(&bytes), geometry.block_size, geometry.protection, &tags)
}

fn write(gate: &Gate<MemoryDevice>, at: Extent, byte: u8) {
    let data = blocks(gate, at, byte);
    let outcome = run(gate, Request::write(at, data, Durability::Volatile));
    assert!(matches!(outcome, Ok(Response::Done)));
}

fn read(gate: &Gate<MemoryDevice>, at: Extent) -> Outcome {
    run(gate, Request::read(at, Expectations::NONE))
}

fn verify(gate: &Gate<MemoryDevice>, at: Extent) -> Outcome {
    run(gate, Request::verify(at, Expectations::NONE))
}

fn assert_reads(gate: &Gate<MemoryDevice>, at: Extent, byte: u8) {
    let Ok(Response::Data(data)) = read(gate, at) else { panic!("{at} cannot be read") };
    assert!(data.joined_data().iter().all(|&found| found == byte), "{at} is not all {byte}");
}

fn zero(gate: &Gate<MemoryDevice>, extent: Extent, may_unmap: bool) {
    let outcome = run(gate, Request::write_zeroes(extent, may_unmap, Durability::Volatile));
    assert!(matches!(outcome, Ok(Response::Done)));
}

fn faults(outcome: Outcome) -> Vec<(u64, BadBlockCause)> {
    let error = outcome.expect_err("damage");
    error
        .bad_blocks()
        .expect("an integrity error")
        .as_slice()
        .iter()
        .map(|fault| (fault.lba.get(), fault.cause))
        .collect()
}

#[test]
fn what_is_written_is_read_back_with_its_tags() {
    for size in SIZES {
        for format in formats().map(Some).chain([None]) {
            let gate = gate(size, format);
            let at = extent(125, 300);
            write(&gate, at, 0x5A);
            let Ok(Response::Data(data)) = read(&gate, at) else { panic!("clean blocks read") };
            let wanted = blocks(&gate, at, 0x5A);
            assert_eq!(
                (&data.joined_data()[..], &data.joined_tags()[..]),
                (&wanted.joined_data()[..], &wanted.joined_tags()[..])
            );
            assert!(matches!(verify(&gate, at), Ok(Response::Verified(cost)) if cost.bytes_transferred == 0));
        }
    }
}

#[test]
fn blocks_never_written_are_zeroes_that_verify_and_cost_nothing() {
    for format in formats().map(Some).chain([None]) {
        let gate = gate(BlockSize::B4096, format);
        let all = extent(0, 4096);
        assert_reads(&gate, all, 0);
        assert!(verify(&gate, all).is_ok());
        assert_eq!(gate.device().allocated_bytes(), 0);
        let Ok(Response::Data(data)) = read(&gate, extent(7, 2)) else { panic!("unwritten blocks read") };
        assert!(data.joined_tags().iter().all(|&byte| byte == 0xFF), "a deallocated block's tuple is all ones");
        // A neighbour in the same chunk does not change this.
        write(&gate, extent(8, 1), 1);
        assert_reads(&gate, extent(7, 1), 0);
        assert!(verify(&gate, all).is_ok());
    }
}

#[test]
fn damage_is_found_by_read_and_verify_wherever_it_is() {
    for size in SIZES {
        for format in formats() {
            let gate = gate(size, Some(format));
            let at = extent(0, 400);
            write(&gate, at, 9);
            assert!(gate.device().damage(Lba::new(3), Corruption::Data { at: 100, mask: 1 }));
            assert!(gate.device().damage(Lba::new(399), Corruption::Tag { at: 0, mask: 0x80 }));
            let guard = BadBlockCause::Tag(Field::Guard);
            assert_eq!(faults(read(&gate, at)), [(3, guard), (399, guard)]);
            assert_eq!(faults(verify(&gate, at)), [(3, guard), (399, guard)]);
            assert!(read(&gate, extent(4, 395)).is_ok(), "the blocks between are good");
            let demanding = Expectations::new(Checks::full(format, at.start()));
            assert_eq!(faults(run(&gate, Request::read(at, demanding))), [(3, guard), (399, guard)]);
        }
    }
}

#[test]
fn checksums_are_those_of_the_data_whatever_the_guard_and_fail_where_it_is_damaged() {
    for (size, format) in SIZES.into_iter().flat_map(|size| formats().map(Some).chain([None]).map(move |f| (size, f))) {
        let gate = gate(size, format);
        write(&gate, extent(7, 300), 9);
        write(&gate, extent(100, 30), 8);
        // Blocks without tags next to some with them, and blocks without memory.
        zero(&gate, extent(50, 3), true);
        for (kind, at) in
            ChecksumKind::ALL.into_iter().flat_map(|kind| [(kind, extent(0, 4096)), (kind, extent(8, 40))])
        {
            let checksum = || run(&gate, Request::checksum(at, kind, Expectations::NONE));
            let Ok(Response::Data(data)) = read(&gate, at) else { panic!("reads") };
            let wanted = kind.compute(&data.joined_data());
            let Ok(Response::Checksum(found)) = checksum() else { panic!("a checksum") };
            assert_eq!((found.kind, found.value), (kind, wanted), "{format:?}, {at}");
            // A guard is proof of its data only after it was compared with them.
            let damage = Corruption::Data { at: 100, mask: 1 };
            assert!(gate.device().damage(Lba::new(9), damage));
            match checksum() {
                Ok(Response::Checksum(found)) if format.is_none() => {
                    assert_ne!(found.value, wanted, "nothing tells that they are not what was written");
                }
                outcome => assert_eq!(faults(outcome), [(9, BadBlockCause::Tag(Field::Guard))]),
            }
            assert!(gate.device().damage(Lba::new(9), damage));
        }
    }
}

#[test]
fn tags_are_judged_as_expected_once_the_blocks_are_good() {
    let gate = gate(BlockSize::B512, Some(TYPE1));
    let at = extent(10, 200);
    write(&gate, at, 1);
    let requests = |checks| {
        let expectations = Expectations::new(checks);
        let kind = ChecksumKind::Crc32c;
        [Request::read(at, expectations), Request::verify(at, expectations), Request::checksum(at, kind, expectations)]
    };
    let app = |expected| Checks { app_tag: Some(Masked { expected, mask: 0xFFFF }), ..Checks::NONE };
    for request in requests(app(0x0A0B)) {
        assert!(run(&gate, request).is_ok());
    }
    // Every block is one after the expected one.
    let unexpected = |field, expected, actual| ErrorKind::Expectation { lba: Lba::new(10), field, expected, actual };
    let shifted = Checks { guard: false, ..Checks::full(TYPE1, Lba::new(11)) };
    for (checks, wanted) in
        [(app(0x0A0C), unexpected(Field::AppTag, 0x0A0C, 0x0A0B)), (shifted, unexpected(Field::RefTag, 11, 10))]
    {
        for request in requests(checks) {
            assert_eq!(*run(&gate, request).unwrap_err().kind(), wanted);
        }
    }
    // What has no tags is as expected only if that may be.
    run(&gate, Request::discard([extent(20, 1)])).unwrap();
    for request in requests(app(0x0A0B)) {
        assert!(run(&gate, request).is_ok());
    }
    let unwritten =
        ErrorKind::Expectation { lba: Lba::new(20), field: Field::AppTag, expected: 0x0A0B, actual: 0xFFFF };
    for request in requests(Checks { checks_escapes: true, ..app(0x0A0B) }) {
        assert_eq!(*run(&gate, request).unwrap_err().kind(), unwritten);
    }
    assert!(gate.device().damage(Lba::new(150), Corruption::Tag { at: 7, mask: 1 }));
    for request in requests(app(0x0A0C)).into_iter().chain(requests(Checks::NONE)) {
        assert_eq!(faults(run(&gate, request)), [(150, BadBlockCause::Tag(Field::RefTag))], "damage comes first");
    }
}

#[test]
fn unmapping_gives_memory_back_and_reads_as_zeroes() {
    for format in [None, Some(TYPE1)] {
        let gate = gate(BlockSize::B4096, format);
        write(&gate, extent(0, 1024), 3);
        let taken = gate.device().allocated_bytes();
        assert!(taken >= 4 << 20);
        zero(&gate, extent(5, 1000), true);
        assert!(gate.device().allocated_bytes() < taken / 8);
        assert_reads(&gate, extent(5, 1000), 0);
        assert_reads(&gate, extent(4, 1), 3);
        assert_reads(&gate, extent(1005, 19), 3);
        let outcome = run(&gate, Request::discard([extent(0, 5), extent(1005, 19)]));
        assert!(matches!(outcome, Ok(Response::Done)));
        assert_eq!(gate.device().allocated_bytes(), 0);
        assert!(verify(&gate, extent(0, 4096)).is_ok());
    }
}

#[test]
fn written_zeroes_have_tags_that_are_checked() {
    let gate = gate(BlockSize::B512, Some(TYPE1));
    zero(&gate, extent(100, 300), false);
    assert_reads(&gate, extent(100, 300), 0);
    assert!(gate.device().damage(Lba::new(222), Corruption::Data { at: 0, mask: 1 }));
    assert_eq!(faults(verify(&gate, extent(0, 4096))), [(222, BadBlockCause::Tag(Field::Guard))]);
    zero(&gate, extent(222, 1), true);
    assert_reads(&gate, extent(0, 4096), 0);
}

#[test]
fn compare_finds_the_first_difference_and_tells_damage_from_it() {
    for format in [None, Some(TYPE1)] {
        let gate = gate(BlockSize::B512, format);
        let at = extent(100, 200);
        write(&gate, at, 7);
        let compare = |byte| run(&gate, Request::compare(at, blocks(&gate, at, byte)));
        assert!(matches!(compare(7), Ok(Response::Done)));
        assert!(gate.device().damage(Lba::new(170), Corruption::Data { at: 511, mask: 0x80 }));
        match format {
            None => {
                let differs = compare(7).unwrap_err().into_kind();
                assert_eq!(differs, ErrorKind::Miscompare { lba: Lba::new(170) });
            }
            Some(_) => assert_eq!(faults(compare(7)), [(170, BadBlockCause::Tag(Field::Guard))]),
        }
        write(&gate, extent(170, 1), 8);
        assert_eq!(compare(7).unwrap_err().into_kind(), ErrorKind::Miscompare { lba: Lba::new(170) });
    }
}

#[test]
fn there_is_nothing_to_damage_where_nothing_is_stored() {
    let gate = gate(BlockSize::B512, None);
    assert!(!gate.device().damage(Lba::new(0), Corruption::Data { at: 0, mask: 1 }));
    write(&gate, extent(0, 1), 1);
    assert!(gate.device().damage(Lba::new(0), Corruption::Data { at: 0, mask: 1 }));
    assert!(!gate.device().damage(Lba::new(0), Corruption::Tag { at: 0, mask: 1 }), "no protection, no tags");
    assert!(!gate.device().damage(Lba::new(4096), Corruption::Data { at: 0, mask: 1 }), "past the end");
}

#[test]
fn what_must_be_copied_is_copied_into_a_pool_if_there_is_one() {
    let pool = Pool::new(1 << 20, 1 << 20);
    let device = MemoryDevice::new(BlockSize::B4096, 64, Some(TYPE1)).with_pool(pool);
    let gate = Gate::new("mem", device);
    // A pool's buffers contain old bytes, so an unwritten block after a written one shows whether it is filled.
    write(&gate, extent(31, 1), 0xEE);
    for _ in 0..4 {
        let Ok(Response::Data(data)) = read(&gate, extent(31, 2)) else { panic!("clean blocks read") };
        assert!(data.joined_data().arena_id().is_some(), "two chunks");
        assert!(
            data.joined_data()[..4096].iter().all(|&byte| byte == 0xEE)
                && data.joined_data()[4096..].iter().all(|&byte| byte == 0)
        );
    }
    let Ok(Response::Data(data)) = read(&gate, extent(31, 1)) else { panic!("clean blocks read") };
    assert!(data.joined_data().arena_id().is_none(), "the stored bytes themselves");
}

#[test]
fn answers_keep_their_bytes_and_tags_whatever_is_changed_later() {
    for size in SIZES {
        for format in formats().map(Some).chain([None]) {
            let gate = gate(size, format);
            let at = extent(0, (128 << 10) >> size.shift());
            let first = extent(0, 1);
            let uncorrectable = Request::write_uncorrectable(at, Durability::Volatile);
            let changes: [&dyn Fn(); 6] = [
                &|| write(&gate, first, 2),
                &|| write(&gate, at, 3),
                &|| zero(&gate, first, true),
                &|| zero(&gate, at, false),
                &|| drop(run(&gate, Request::discard([at]))),
                &|| assert!(run(&gate, uncorrectable.clone()).is_ok()),
            ];
            for change in changes {
                write(&gate, at, 1);
                let wanted = blocks(&gate, at, 1);
                let Ok(Response::Data(answer)) = read(&gate, at) else { panic!("clean blocks read") };
                change();
                assert_eq!(
                    (&answer.joined_data()[..], &answer.joined_tags()[..]),
                    (&wanted.joined_data()[..], &wanted.joined_tags()[..])
                );
                drop(answer);
            }
            drop(run(&gate, Request::discard([at])));
            drop(read(&gate, at));
            drop(read(&gate, at));
            assert_eq!(gate.device().allocated_bytes(), 0, "memory comes back");
        }
    }
}

#[test]
fn unreadable_blocks_fail_until_they_are_written_zeroed_or_discarded() {
    for format in formats().map(Some).chain([None]) {
        let gate = gate(BlockSize::B4096, format);
        let all = extent(10, 8);
        write(&gate, all, 5);
        let spoil = || Request::write_uncorrectable(extent(12, 3), Durability::Volatile);
        let media = |outcome: Outcome| -> Vec<u64> {
            let error = outcome.expect_err("the blocks are unreadable");
            let faults = error.bad_blocks().expect("damage is named").as_slice();
            assert!(faults.iter().all(|fault| fault.cause == BadBlockCause::Media && fault.expected.is_none()));
            faults.iter().map(|fault| fault.lba.get()).collect()
        };
        let zero = |at, may_unmap| Request::write_zeroes(at, may_unmap, Durability::Volatile);
        assert!(matches!(run(&gate, spoil()), Ok(Response::Done)));
        assert_eq!(media(read(&gate, all)), [12, 13, 14]);
        assert_eq!(media(verify(&gate, all)), [12, 13, 14]);
        let compare = Request::compare(all, blocks(&gate, all, 5));
        assert_eq!(media(run(&gate, compare)), [12, 13, 14]);
        assert_reads(&gate, extent(10, 2), 5);
        assert_reads(&gate, extent(15, 3), 5);
        write(&gate, extent(12, 1), 6);
        assert!(matches!(run(&gate, zero(extent(13, 1), false)), Ok(Response::Done)));
        assert_eq!(media(verify(&gate, all)), [14]);
        assert!(matches!(run(&gate, Request::discard([extent(14, 1)])), Ok(Response::Done)));
        assert!(matches!(verify(&gate, all), Ok(Response::Verified(_))));
        assert_reads(&gate, extent(12, 1), 6);
        assert!(matches!(run(&gate, spoil()), Ok(Response::Done)));
        assert!(matches!(run(&gate, zero(all, true)), Ok(Response::Done)));
        assert_reads(&gate, all, 0);
    }
}

fn runs(gate: &Gate<MemoryDevice>, at: Extent) -> Vec<(u32, BlockState)> {
    let Ok(Response::BlockStatus(runs)) = run(gate, Request::block_status(at)) else { panic!("no runs") };
    runs.iter().map(|run| (run.blocks.get(), run.state)).collect()
}

#[test]
fn what_memory_is_not_there_for_is_a_hole_unless_it_is_unreadable() {
    use BlockState::{Allocated, Hole};
    for format in [Some(TYPE1), None] {
        // Memory comes in chunks of 32 such blocks.
        let gate = gate(BlockSize::B4096, format);
        assert_eq!(runs(&gate, extent(0, 4096)), [(4096, Hole)]);
        write(&gate, extent(40, 1), 7);
        assert_eq!(runs(&gate, extent(0, 128)), [(32, Hole), (32, Allocated), (64, Hole)]);
        let durability = Durability::Volatile;
        let unreadable = Request::write_uncorrectable(extent(100, 1), durability);
        assert!(run(&gate, unreadable).is_ok());
        assert_eq!(runs(&gate, extent(64, 64)), [(32, Hole), (32, Allocated)]);
    }
}

#[test]
fn only_short_requests_without_data_are_executed_in_place() {
    let gate = gate(BlockSize::B4096, Some(TYPE1));
    for (blocks, is_in_place) in [(16, true), (17, false)] {
        let at = extent(0, blocks);
        for request in [
            Request::verify(at, Expectations::NONE),
            Request::write_zeroes(at, true, Durability::Volatile),
            Request::write_uncorrectable(at, Durability::Volatile),
            Request::discard([at]),
        ] {
            assert_eq!(gate.try_execute(&request).is_some(), is_in_place, "{:?}", request.kind());
        }
    }
    let at = extent(0, 256);
    let write = Request::write(at, blocks(&gate, at, 7), Durability::Volatile);
    assert!(gate.try_execute(&write).is_some(), "its data are in flight, which is bounded");
}
