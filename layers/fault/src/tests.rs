//! Twin tests of faults on a device in RAM.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use futures_util::FutureExt;
use sealblock_block::{
    Abilities, Ability, BadBlockCause, Clock, Device, Durability, ErrorKind, Expectations, Gate, Geometry, Operation,
    Outcome, Request, RequestKind, Response,
};
use sealblock_integrity::{Field, GuardKind, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent, Lba};

use super::{Fault, FaultLayer, Rules};

/// A clock whose delays end at once. It records them.
#[derive(Clone, Default)]
struct Slept(Rc<RefCell<Vec<Duration>>>);

impl Clock for Slept {
    async fn sleep(&self, delay: Duration) {
        self.0.borrow_mut().push(delay);
    }
}

type Inner = Rc<Gate<MemoryDevice>>;
type Faulty = Gate<FaultLayer<Inner, Slept>>;

const TYPE1: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);
const BLOCKS: u64 = 64;

fn faulty_on(inner: &Inner, rules: &str) -> Faulty {
    let rules: Rules = rules.parse().unwrap();
    Gate::new("fault", FaultLayer::new(Rc::clone(inner), rules, Slept::default()))
}

fn faulty(format: Option<PiFormat>, rules: &str) -> (Faulty, Inner) {
    let inner = Rc::new(Gate::new("mem", MemoryDevice::new(BlockSize::B512, BLOCKS, format)));
    (faulty_on(&inner, rules), inner)
}

fn run(device: &impl Device, request: Request) -> Outcome {
    device.execute(request).now_or_never().expect("RAM and this clock never wait")
}

fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

fn write_request(device: &impl Device, at: Extent, byte: u8) -> Request {
    let data = Slice::copy_from(&vec![byte; at.bytes(BlockSize::B512) as usize]);
    let tags = Tags { initial_ref_tag: at.start().get(), ..Tags::default() };
    let data = Sealed::seal(data, BlockSize::B512, device.geometry().protection, &tags);
    Request::write(at, data, Durability::Volatile)
}

fn write(device: &impl Device, at: Extent, byte: u8) -> Outcome {
    let request = write_request(device, at, byte);
    run(device, request)
}

fn assert_done(outcome: Outcome) {
    assert!(matches!(outcome, Ok(Response::Done)), "{outcome:?}");
}

fn read(device: &impl Device, at: Extent) -> Outcome {
    run(device, Request::read(at, Expectations::NONE))
}

fn verify(device: &impl Device, at: Extent) -> Outcome {
    run(device, Request::verify(at, Expectations::NONE))
}

/// The first byte of every block, good or not.
fn bytes(device: &impl Device) -> Vec<u8> {
    match run(device, Request::salvage(extent(0, BLOCKS))) {
        Ok(Response::Salvaged(left)) => left.blocks.joined_data().chunks(512).map(|block| block[0]).collect(),
        other => panic!("no data but {other:?}"),
    }
}

fn bad_blocks(outcome: Outcome) -> Vec<(u64, BadBlockCause)> {
    let error = outcome.expect_err("damage");
    error
        .bad_blocks()
        .expect("an integrity error")
        .as_slice()
        .iter()
        .map(|bad_block| (bad_block.lba.get(), bad_block.cause))
        .collect()
}

const GUARD: BadBlockCause = BadBlockCause::Tag(Field::Guard);
const REF_TAG: BadBlockCause = BadBlockCause::Tag(Field::RefTag);

#[test]
fn without_rules_for_it_a_request_goes_through() {
    let (gate, inner) = faulty(Some(TYPE1), "seed=1;read-error@60;lost-write@61");
    assert_done(write(&gate, extent(0, 60), 7));
    assert!(read(&gate, extent(0, 60)).is_ok() && verify(&gate, extent(0, 60)).is_ok());
    assert!(read(&inner, extent(0, 60)).is_ok());
    assert!(gate.device().counts().iter().all(|(_, count)| count == 0));
}

#[test]
fn unreadable_blocks_are_named_and_their_neighbours_read() {
    let (gate, inner) = faulty(Some(TYPE1), "read-error@3;read-error@10..11");
    assert_done(write(&gate, extent(0, BLOCKS), 7));
    let media = BadBlockCause::Media;
    for outcome in [read(&gate, extent(0, BLOCKS)), verify(&gate, extent(0, BLOCKS))] {
        assert_eq!(bad_blocks(outcome), [(3, media), (10, media), (11, media)]);
    }
    assert!(read(&gate, extent(4, 6)).is_ok());
    assert!(read(&inner, extent(0, BLOCKS)).is_ok(), "nothing is wrong below");
    assert_eq!(gate.device().counts().of(Fault::ReadError), 6);
}

#[test]
fn a_flipped_block_fails_its_guard_or_slips_through_unguarded() {
    let (gate, _) = faulty(Some(TYPE1), "flip@5");
    assert_done(write(&gate, extent(0, BLOCKS), 0));
    assert_eq!(bad_blocks(read(&gate, extent(0, 8))), [(5, GUARD)]);
    assert_eq!(bad_blocks(verify(&gate, extent(0, 8))), [(5, GUARD)]);
    assert!(read(&gate, extent(0, 5)).is_ok());
    let data = write_request(&gate, extent(5, 1), 0);
    let Operation::Write(data) = data.operation else { unreachable!() };
    assert_eq!(bad_blocks(run(&gate, Request::compare(extent(5, 1), data.into_sealed()))), [(5, GUARD)]);

    let (gate, _) = faulty(None, "flip@5");
    assert_done(write(&gate, extent(0, BLOCKS), 0));
    let Ok(Response::Data(data)) = read(&gate, extent(4, 3)) else { panic!("without tags nothing is noticed") };
    let ones: Vec<u32> = data.joined_data().chunks(512).map(|b| b.iter().map(|byte| byte.count_ones()).sum()).collect();
    assert_eq!(ones, [0, 1, 0]);
}

#[test]
fn one_bad_block_never_hides_another() {
    let inner = Rc::new(Gate::new("mem", MemoryDevice::new(BlockSize::B512, BLOCKS, Some(TYPE1))));
    assert_done(write(&inner, extent(0, BLOCKS), 7));
    assert!(inner.device().damage(Lba::new(2), sealblock_media_memory::Corruption::Data { at: 0, mask: 1 }));
    let gate = faulty_on(&inner, "flip@2..4;read-error@9");
    let found = bad_blocks(read(&gate, extent(0, 16)));
    assert_eq!(found, [(2, GUARD), (3, GUARD), (4, GUARD), (9, BadBlockCause::Media)]);
}

#[test]
fn flipped_writes_are_found_below() {
    let (gate, inner) = faulty(Some(TYPE1), "flip-write@5");
    assert_done(write(&gate, extent(0, 16), 7));
    assert_eq!(bad_blocks(read(&inner, extent(0, 16))), [(5, GUARD)]);
    assert_eq!(bad_blocks(read(&gate, extent(0, 16))), [(5, GUARD)]);
    assert_eq!(gate.device().counts().of(Fault::FlipWrite), 1);
}

#[test]
fn lost_writes_leave_old_blocks_that_verify() {
    let (gate, inner) = faulty(Some(TYPE1), "lost-write@5..6;lost-write@9");
    assert_done(write(&inner, extent(0, 16), 1));
    assert_done(write(&gate, extent(0, 16), 2));
    assert!(verify(&inner, extent(0, 16)).is_ok());
    assert_eq!(bytes(&inner)[..16], [2, 2, 2, 2, 2, 1, 1, 2, 2, 1, 2, 2, 2, 2, 2, 2]);
    let zero = Request::write_zeroes(extent(4, 4), true, Durability::Volatile);
    assert_done(run(&gate, zero));
    assert_eq!(bytes(&inner)[3..9], [2, 0, 1, 1, 0, 2]);
    assert_eq!(gate.device().counts().of(Fault::LostWrite), 3 + 2);
}

#[test]
fn misdirected_writes_overwrite_another_block_and_not_their_own() {
    let (gate, inner) = faulty(Some(TYPE1), "seed=4;misdirected-write@5");
    assert_done(write(&inner, extent(0, BLOCKS), 1));
    assert_done(write(&gate, extent(5, 1), 2));
    let after = bytes(&inner);
    assert_eq!(after[5], 1, "the block itself stays old");
    let hit = after.iter().position(|&byte| byte == 2).expect("written somewhere") as u64;
    assert_eq!(bad_blocks(verify(&inner, extent(0, BLOCKS))), [(hit, REF_TAG)], "the reference tag shows it");
}

#[test]
fn a_torn_write_ends_before_its_block() {
    let (gate, inner) = faulty(Some(TYPE1), "torn-write@5;torn-write@3;lost-write@1;lost-write@4");
    assert_done(write(&inner, extent(0, 8), 1));
    assert_done(write(&gate, extent(0, 8), 2));
    assert_eq!(bytes(&inner)[..8], [2, 1, 2, 1, 1, 1, 1, 1]);
    assert!(verify(&inner, extent(0, 8)).is_ok());
    let counts = gate.device().counts();
    assert_eq!((counts.of(Fault::TornWrite), counts.of(Fault::LostWrite)), (1, 1));
    assert_done(write(&gate, extent(6, 2), 2));
    assert_eq!(bytes(&inner)[6..8], [2, 2]);
}

#[test]
fn failed_writes_change_nothing() {
    let (gate, inner) = faulty(None, "write-error@5;no-space@20");
    let failure = |outcome: Outcome| outcome.expect_err("a failure").into_kind();
    assert!(matches!(failure(write(&gate, extent(0, 8), 2)), ErrorKind::Media { .. }));
    assert!(matches!(failure(write(&gate, extent(20, 1), 2)), ErrorKind::NoSpace { .. }));
    let zero = Request::write_zeroes(extent(5, 1), true, Durability::Volatile);
    assert!(matches!(failure(run(&gate, zero)), ErrorKind::Media { .. }));
    assert!(bytes(&inner).iter().all(|&byte| byte == 0));
    assert_done(write(&gate, extent(6, 14), 2));
}

#[test]
fn flushes_fail_or_get_lost() {
    let flush = |rules| {
        let (gate, inner) = faulty(None, rules);
        let outcome = run(&gate, Request::flush());
        (outcome.is_ok(), inner.counters().requests(sealblock_block::RequestKind::Flush))
    };
    assert_eq!(flush("flip@3"), (true, 1));
    assert_eq!(flush("flush-error"), (false, 0));
    assert_eq!(flush("lost-flush"), (true, 0));
}

#[test]
fn requests_wait_as_long_as_the_rules_say() {
    let clock = Slept::default();
    let inner = MemoryDevice::new(BlockSize::B512, BLOCKS, None);
    let rules = "delay=10ms@0..9;delay=1ms@9..10".parse().unwrap();
    let gate = Gate::new("fault", FaultLayer::new(inner, rules, clock.clone()));
    for at in [extent(0, 1), extent(9, 1), extent(10, 1), extent(11, 1)] {
        assert!(read(&gate, at).is_ok());
    }
    assert_done(run(&gate, Request::flush()));
    assert_eq!(*clock.0.borrow(), [10, 11, 1].map(Duration::from_millis));
}

#[test]
fn the_same_seed_meets_the_same_faults() {
    let history = |rules: &str| {
        let (gate, inner) = faulty(None, rules);
        for round in 1..=20 {
            assert_done(write(&gate, extent(0, BLOCKS), round));
        }
        let unreadable = read(&gate, extent(0, BLOCKS)).err().map_or(0, |e| e.bad_blocks().unwrap().as_slice().len());
        (bytes(&inner), unreadable, gate.device().counts().iter().collect::<Vec<_>>())
    };
    let rules = |seed| format!("seed={seed};lost-write%20;misdirected-write%5;torn-write%0.5;read-error%30");
    assert_eq!(history(&rules(1)), history(&rules(1)));
    assert_ne!(history(&rules(1)), history(&rules(2)));
}

#[test]
fn blocks_are_made_unreadable_or_the_write_of_it_is_lost_or_refused() {
    let spoil = |device: &Faulty| {
        let extent = extent(2, 4);
        run(device, Request::write_uncorrectable(extent, Durability::Volatile))
    };
    let media = |lba| (lba, BadBlockCause::Media);
    let (device, inner) = faulty(Some(TYPE1), "lost-write@3");
    assert_done(write(&inner, extent(0, 8), 1));
    assert_done(spoil(&device));
    assert_eq!(bad_blocks(verify(&device, extent(0, 8))), [media(2), media(4), media(5)]);
    let (device, inner) = faulty(Some(TYPE1), "write-error@3");
    assert_done(write(&inner, extent(0, 8), 1));
    assert!(matches!(spoil(&device).unwrap_err().into_kind(), ErrorKind::Media { .. }));
    assert!(verify(&device, extent(0, 8)).is_ok(), "nothing was changed");
}

/// A device that supports Copy and CompareAndWrite.
struct Copies(MemoryDevice);

impl Device for Copies {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        Abilities { compare_and_write_blocks: 4, ..self.0.abilities() }.with([RequestKind::Copy], Ability::Native)
    }

    async fn execute(&self, request: Request) -> Outcome {
        match request.operation {
            // The tests only check whether they arrive here.
            Operation::Copy { .. } | Operation::CompareAndWrite(_) => Ok(Response::Done),
            _ => self.0.execute(request).await,
        }
    }
}

#[test]
fn no_copy_goes_past_the_faults() {
    let inner = || Gate::new("copies", Copies(MemoryDevice::new(BlockSize::B512, BLOCKS, None)));
    assert_eq!(inner().abilities().get(RequestKind::Copy), Ability::Native);
    for rules in ["read-error@3", "lost-write", "delay=1ms"] {
        let faulty = Gate::new("fault", FaultLayer::new(inner(), rules.parse().unwrap(), Slept::default()));
        let copy = Request::copy(extent(0, 8), extent(20, 8), Expectations::NONE, Durability::Volatile);
        assert_eq!(*run(&faulty, copy).unwrap_err().kind(), ErrorKind::Absent(RequestKind::Copy), "{rules}");
    }
}

/// Requests of each kind that can be aborted, over these blocks, in the order of the rules' names.
fn abortable(device: &impl Device, at: Extent) -> Vec<Request> {
    let data = || match write_request(device, at, 1).operation {
        Operation::Write(data) => data.into_sealed(),
        other => panic!("{other:?}"),
    };
    let volatile = Durability::Volatile;
    vec![
        Request::verify(at, Expectations::NONE),
        Request::compare(at, data()),
        Request::compare_and_write(at, data(), data(), volatile),
        Request::write_zeroes(at, true, volatile),
        Request::discard([at]),
        Request::copy(extent(40, at.len()), at, Expectations::NONE, volatile),
    ]
}

#[test]
fn exactly_the_kind_that_a_rule_names_is_aborted_where_it_says() {
    let rules = ["verify", "compare", "compare-and-write", "write-zeroes", "discard", "copy"];
    for (aborted, rule) in rules.into_iter().enumerate() {
        let inner = Rc::new(Gate::new("copies", Copies(MemoryDevice::new(BlockSize::B512, BLOCKS, None))));
        let rules = format!("abort-{rule}@5..6");
        let faulty = Gate::new("fault", FaultLayer::new(Rc::clone(&inner), rules.parse().unwrap(), Slept::default()));
        for (kind, request) in abortable(&faulty, extent(4, 2)).into_iter().enumerate() {
            let (name, through) = (request.kind(), inner.counters().completed());
            assert_done(write(&inner, extent(4, 2), 1));
            let outcome = run(&faulty, request);
            match kind == aborted {
                true => {
                    let error = outcome.unwrap_err();
                    assert_eq!(*error.kind(), ErrorKind::Absent(name), "{rule}");
                    assert_eq!(inner.counters().completed(), through + 1, "{rule}: nothing but the write came through");
                    assert_eq!(faulty.abilities().of(name), Ability::Native, "{rule}: the device says that it has it");
                }
                false => assert!(outcome.is_ok(), "{rule}: {outcome:?}"),
            }
        }
        for request in abortable(&faulty, extent(7, 2)) {
            assert_done(write(&inner, extent(7, 2), 1));
            let name = request.kind();
            assert!(run(&faulty, request).is_ok(), "{rule}: {name:?} of other blocks");
        }
        assert_done(write(&faulty, extent(4, 2), 2));
        assert!(read(&faulty, extent(4, 2)).is_ok());
        let counts = faulty.device().counts();
        assert_eq!(counts.iter().filter(|(_, count)| *count > 0).count(), 1, "{rule}: one, of one kind");
    }
}

/// Otherwise a gate would read instead, and the rule would have no effect.
#[test]
fn what_the_inner_device_does_not_do_itself_is_aborted_too() {
    struct Basic(MemoryDevice);

    impl Device for Basic {
        fn geometry(&self) -> &Geometry {
            self.0.geometry()
        }

        fn abilities(&self) -> Abilities {
            Abilities::BASIC
        }

        async fn execute(&self, request: Request) -> Outcome {
            self.0.execute(request).await
        }
    }

    let inner = Rc::new(Gate::new("basic", Basic(MemoryDevice::new(BlockSize::B512, BLOCKS, None))));
    let faulty =
        |rules: &str| Gate::new("fault", FaultLayer::new(Rc::clone(&inner), rules.parse().unwrap(), Slept::default()));
    let plain = faulty("delay=1ms");
    assert_eq!(plain.abilities().get(RequestKind::Verify), Ability::Emulated);
    assert!(verify(&plain, extent(0, 8)).is_ok());
    let aborting = faulty("abort-verify@5;abort-discard");
    assert_eq!(*verify(&aborting, extent(0, 8)).unwrap_err().kind(), ErrorKind::Absent(RequestKind::Verify));
    assert!(verify(&aborting, extent(6, 8)).is_ok(), "the inner gate reads them");
    assert_eq!(aborting.abilities().get(RequestKind::Discard), Ability::Absent, "nobody claims what nobody can do");
    // With faults of reads, blocks are read, so there is no Verify to abort.
    let unreadable = faulty("abort-verify;read-error@3");
    assert_eq!(bad_blocks(verify(&unreadable, extent(0, 8))), [(3, BadBlockCause::Media)]);
}

#[test]
fn no_compare_and_write_goes_past_faults_of_what_is_stored() {
    let inner = || Gate::new("copies", Copies(MemoryDevice::new(BlockSize::B512, BLOCKS, None)));
    for (rules, passes) in [
        ("delay=1ms", true),
        ("flush-error", true),
        ("write-error@3", false),
        ("lost-write", false),
        ("flip@60", false),
    ] {
        let faulty = Gate::new("fault", FaultLayer::new(inner(), rules.parse().unwrap(), Slept::default()));
        let swap = abortable(&faulty, extent(3, 1)).swap_remove(2);
        match run(&faulty, swap) {
            Ok(_) => assert!(passes, "{rules}"),
            Err(error) => {
                assert!(!passes && *error.kind() == ErrorKind::Absent(RequestKind::CompareAndWrite), "{rules}")
            }
        }
    }
}
