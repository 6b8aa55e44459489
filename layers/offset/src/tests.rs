//! Twin tests of a run on a device in RAM.

use std::cell::Cell;
use std::rc::Rc;

use futures_util::FutureExt;
use sealblock_block::{
    Abilities, Ability, BadBlock, BadBlockCause, BadBlocks, Device, Durability, ErrorKind, Expectations, Gate,
    Geometry, Outcome, Request, RequestKind, Response,
};
use sealblock_integrity::{Checks, Field, GuardKind, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_media_memory::{Corruption, MemoryDevice};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent, Lba};

use super::{OffsetError, OffsetLayer};

const FIRST: u64 = 100;
const BLOCKS: u64 = 50;

type Inner = Rc<Gate<MemoryDevice>>;

/// A run in the middle of a device, and the device.
fn run_of(format: Option<PiFormat>) -> (Gate<OffsetLayer<Inner>>, Inner) {
    let inner = Rc::new(Gate::new("mem", MemoryDevice::new(BlockSize::B512, 200, format)));
    let layer = OffsetLayer::new(Rc::clone(&inner), Lba::new(FIRST), BLOCKS).unwrap();
    (Gate::new("run", layer), inner)
}

fn formats() -> impl Iterator<Item = PiFormat> {
    [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64].into_iter().flat_map(|guard| {
        ProtectionType::ALL.into_iter().map(move |kind| PiFormat::with_default_storage_tag(guard, kind))
    })
}

const TYPE1: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);

fn run(device: &impl Device, request: Request) -> Outcome {
    device.execute(request).now_or_never().expect("RAM never waits")
}

fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

fn sealed(format: Option<PiFormat>, at: Extent, byte: u8, first_ref: u64) -> Sealed {
    let data = Slice::copy_from(&vec![byte; at.bytes(BlockSize::B512) as usize]);
    Sealed::seal(data, BlockSize::B512, format, &Tags { app_tag: 3, storage_tag: 0, initial_ref_tag: first_ref })
}

fn write(device: &impl Device, at: Extent, byte: u8) {
    let data = sealed(device.geometry().protection, at, byte, at.start().get());
    let outcome = run(device, Request::write(at, data, Durability::Volatile));
    assert!(matches!(outcome, Ok(Response::Done)), "{outcome:?}");
}

fn read(device: &impl Device, at: Extent) -> Outcome {
    run(device, Request::read(at, Expectations::NONE))
}

fn assert_reads(device: &impl Device, at: Extent, byte: u8) {
    let Ok(Response::Data(data)) = read(device, at) else { panic!("{at} cannot be read") };
    assert!(data.joined_data().iter().all(|&found| found == byte), "{at} is not all {byte}");
}

#[test]
fn a_run_must_lie_on_its_device() {
    let inner = || MemoryDevice::new(BlockSize::B512, 200, None);
    assert!(OffsetLayer::new(inner(), Lba::new(0), 200).is_ok());
    assert!(OffsetLayer::new(inner(), Lba::new(199), 1).is_ok());
    let empty = OffsetLayer::new(inner(), Lba::new(5), 0).err();
    assert_eq!(empty, Some(OffsetError::Empty { first: Lba::new(5) }));
    for (first, blocks) in [(199, 2), (200, 1), (u64::MAX, 2), (1, u64::MAX)] {
        let refused = OffsetLayer::new(inner(), Lba::new(first), blocks).err();
        assert!(matches!(refused, Some(OffsetError::PastEnd { .. })), "{first} {blocks}");
    }
}

#[test]
fn both_devices_verify_what_either_wrote() {
    for format in formats().map(Some).chain([None]) {
        let (gate, inner) = run_of(format);
        assert_eq!(gate.geometry().capacity_blocks, BLOCKS);
        write(&gate, extent(0, BLOCKS), 7);
        assert_reads(&gate, extent(10, 5), 7);
        assert_reads(&inner, extent(FIRST, BLOCKS), 7);
        assert_reads(&inner, extent(FIRST - 1, 1), 0);
        assert_reads(&inner, extent(FIRST + BLOCKS, 1), 0);
        write(&inner, extent(FIRST + 3, 2), 9);
        assert_reads(&gate, extent(3, 2), 9);
        assert!(run(&gate, Request::verify(extent(0, BLOCKS), Expectations::NONE)).is_ok());
        assert!(run(&inner, Request::verify(extent(0, 200), Expectations::NONE)).is_ok());
    }
}

#[test]
fn what_is_read_can_be_checked_again_above() {
    for format in formats() {
        let (gate, _) = run_of(Some(format));
        let at = extent(20, 4);
        let wanted = sealed(Some(format), at, 5, 20);
        write(&gate, at, 5);
        let Ok(Response::Data(data)) = read(&gate, at) else { panic!("clean blocks read") };
        assert_eq!(data.joined_tags()[..], wanted.joined_tags()[..], "the very tags that were written");
        // Blocks that were never written keep the tuple that says so.
        let Ok(Response::Data(data)) = read(&gate, extent(30, 4)) else { panic!("unwritten blocks read") };
        assert!(data.joined_tags().iter().all(|&byte| byte == 0xFF));
    }
}

#[test]
fn tags_of_the_commands_choice_come_back_as_chosen() {
    let type2 = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type2);
    let (gate, _) = run_of(Some(type2));
    // Near the end of the tag's range, so that the shift wraps.
    let (at, first) = (extent(0, 4), u64::from(u32::MAX) - 20);
    let data = sealed(Some(type2), at, 1, first);
    let write = Request::write(at, data, Durability::Volatile);
    assert!(matches!(run(&gate, write), Ok(Response::Done)));
    let with = |first| Expectations::new(Checks { initial_ref_tag: Some(first), ..Checks::full(type2, Lba::new(0)) });
    assert!(run(&gate, Request::read(at, with(first))).is_ok());
    let unexpected = run(&gate, Request::read(at, with(first + 1))).unwrap_err();
    let expected = ErrorKind::Expectation { lba: Lba::ZERO, field: Field::RefTag, expected: first + 1, actual: first };
    assert_eq!(*unexpected.kind(), expected, "with the addresses and tags of this device");
}

#[test]
fn errors_name_this_devices_blocks_and_tags() {
    let (gate, inner) = run_of(Some(TYPE1));
    write(&gate, extent(0, BLOCKS), 7);
    assert!(inner.device().damage(Lba::new(FIRST + 8), Corruption::Data { at: 0, mask: 1 }));
    assert!(inner.device().damage(Lba::new(FIRST + 9), Corruption::Tag { at: 7, mask: 0x80 }));
    let error = read(&gate, extent(0, BLOCKS)).unwrap_err();
    assert_eq!(error.device_name(), Some("run"), "the device whose blocks it names");
    let bad_blocks = error.bad_blocks().unwrap().as_slice();
    assert_eq!(
        (bad_blocks.len(), bad_blocks[0].lba, bad_blocks[0].cause),
        (2, Lba::new(8), BadBlockCause::Tag(Field::Guard))
    );
    assert_eq!((bad_blocks[1].lba, bad_blocks[1].cause), (Lba::new(9), BadBlockCause::Tag(Field::RefTag)));
    let stored = ((FIRST + 9) ^ 0x80).wrapping_sub(FIRST) & 0xFFFF_FFFF;
    assert_eq!((bad_blocks[1].expected, bad_blocks[1].actual), (Some(9), Some(stored)));
    let past = read(&gate, extent(BLOCKS - 1, 2)).unwrap_err().into_kind();
    assert_eq!(past, ErrorKind::Range { extent: extent(BLOCKS - 1, 2), last: Lba::new(BLOCKS - 1) });
}

#[test]
fn compare_zero_and_discard_stay_within_the_run() {
    for format in [None, Some(TYPE1)] {
        let (gate, inner) = run_of(format);
        write(&inner, extent(0, 200), 7);
        let compare = |byte| {
            let data = sealed(format, extent(5, 10), byte, 5);
            run(&gate, Request::compare(extent(5, 10), data))
        };
        assert!(matches!(compare(7), Ok(Response::Done)));
        write(&gate, extent(6, 1), 8);
        assert_eq!(compare(7).unwrap_err().into_kind(), ErrorKind::Miscompare { lba: Lba::new(6) });
        for may_unmap in [false, true] {
            let at = extent(0, 20);
            let zero = Request::write_zeroes(at, may_unmap, Durability::Volatile);
            assert!(matches!(run(&gate, zero), Ok(Response::Done)));
            assert_reads(&gate, at, 0);
        }
        let discard = Request::discard([extent(20, 1), extent(BLOCKS - 1, 1)]);
        assert!(matches!(run(&gate, discard), Ok(Response::Done)));
        assert!(matches!(run(&gate, Request::flush()), Ok(Response::Done)));
        assert_reads(&inner, extent(0, FIRST), 7);
        assert_reads(&inner, extent(FIRST + 21, BLOCKS - 22), 7);
        assert_reads(&inner, extent(FIRST + BLOCKS, 50), 7);
    }
}

#[test]
fn blocks_made_unreadable_are_those_of_the_run() {
    let (gate, inner) = run_of(Some(TYPE1));
    write(&inner, extent(0, 200), 7);
    let spoil = Request::write_uncorrectable(extent(3, 2), Durability::Volatile);
    assert!(matches!(run(&gate, spoil), Ok(Response::Done)));
    let lbas = |device: &dyn Fn() -> Outcome| -> Vec<u64> {
        let error = device().unwrap_err();
        error.bad_blocks().unwrap().as_slice().iter().map(|bad_block| bad_block.lba.get()).collect()
    };
    assert_eq!(lbas(&|| read(&gate, extent(0, 10))), [3, 4]);
    assert_eq!(lbas(&|| read(&inner, extent(0, 200))), [FIRST + 3, FIRST + 4]);
}

/// A device that supports Copy. It records the source and destination of the last one.
struct Copies(MemoryDevice, Cell<Option<(Extent, Extent)>>);

impl Device for Copies {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0.abilities().with([RequestKind::Copy], Ability::Native)
    }

    async fn execute(&self, request: Request) -> Outcome {
        self.1.set(request.source().zip(request.extent()));
        Err(BadBlocks::new(vec![BadBlock::media(request.source().unwrap().last())]).unwrap().into())
    }
}

#[test]
fn source_and_destination_of_a_copy_are_shifted_and_its_bad_blocks_back() {
    let below = Rc::new(Gate::new("below", Copies(MemoryDevice::new(BlockSize::B512, 200, None), Cell::default())));
    let gate = Gate::new("run", OffsetLayer::new(Rc::clone(&below), Lba::new(FIRST), BLOCKS).unwrap());
    assert_eq!(gate.abilities().get(RequestKind::Copy), Ability::Native);
    let copy = |source, to| Request::copy(source, to, Expectations::NONE, Durability::Volatile);
    let error = run(&gate, copy(extent(3, 5), extent(20, 5))).unwrap_err();
    assert_eq!(below.device().1.take(), Some((extent(FIRST + 3, 5), extent(FIRST + 20, 5))));
    assert_eq!(error.bad_blocks().unwrap().first().lba, Lba::new(7));
    let past = run(&gate, copy(extent(BLOCKS - 4, 5), extent(0, 5))).unwrap_err();
    assert!(matches!(past.kind(), ErrorKind::Range { .. }), "blocks of the device below are none of the run: {past}");
    assert_eq!(below.device().1.take(), None);
}
