//! Stripes of devices in RAM.

mod labels;
mod model;

use std::cell::Cell;
use std::rc::Rc;
use std::task::Poll;

use futures_util::FutureExt;
use sealblock_block::{
    Abilities, Ability, BadBlock, BadBlockCause, BadBlocks, Device, Durability, Error, ErrorKind, Expectations, Gate,
    Geometry, Limits, MemberPath, Outcome, Request, RequestKind, Response,
};
use sealblock_integrity::{Checks, ChecksumKind, Field, GuardKind, Masked, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_media_memory::{Corruption, MemoryDevice};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockCount, BlockSize, ByteCount, Extent, Lba};

use super::{StripeError, StripeLayer};

const TYPE1: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);

type Member = Rc<Gate<MemoryDevice>>;

fn member(blocks: u64, format: Option<PiFormat>) -> Member {
    Rc::new(Gate::new("member", MemoryDevice::new(BlockSize::B512, blocks, format)))
}

/// A stripe of members of 64 blocks each, in chunks of this many blocks.
fn stripe(members: usize, chunk_blocks: u64, format: Option<PiFormat>) -> (Gate<StripeLayer<Member>>, Vec<Member>) {
    let members: Vec<Member> = (0..members).map(|_| member(64, format)).collect();
    let layer = StripeLayer::new(members.clone(), ByteCount::new(chunk_blocks * 512)).unwrap();
    (Gate::new("stripe", layer), members)
}

fn run(device: &impl Device, request: Request) -> Outcome {
    device.execute(request).now_or_never().expect("RAM never waits")
}

fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

/// Blocks that each hold a byte of their own.
fn sealed(format: Option<PiFormat>, at: Extent, seed: u8, initial_ref_tag: u64) -> Sealed {
    let data: Vec<u8> = at.iter().flat_map(|lba| [seed.wrapping_add((lba.get() as u8).wrapping_mul(3)); 512]).collect();
    let tags = Tags { app_tag: 3, storage_tag: 0, initial_ref_tag };
    Sealed::seal(Slice::copy_from(&data), BlockSize::B512, format, &tags)
}

fn write(device: &impl Device, at: Extent, seed: u8) {
    let data = sealed(device.geometry().protection, at, seed, at.start().get());
    let outcome = run(device, Request::write(at, data, Durability::Volatile));
    assert!(matches!(outcome, Ok(Response::Done)), "{outcome:?}");
}

fn read(device: &impl Device, at: Extent) -> Outcome {
    run(device, Request::read(at, Expectations::NONE))
}

#[test]
fn members_must_fit_each_other() {
    let plain = |blocks| member(blocks, None);
    let of = |members: Vec<Member>, chunk| StripeLayer::new(members, ByteCount::new(chunk)).err();
    assert_eq!(of(vec![plain(64), plain(64)], 4096), None);
    assert_eq!(of(vec![plain(64)], 512), None);
    assert_eq!(of(vec![], 4096), Some(StripeError::NoMember));
    let large = Rc::new(Gate::new("member", MemoryDevice::new(BlockSize::B4096, 64, None)));
    let sizes = StripeError::BlockSize { member: 1, actual: BlockSize::B4096, first: BlockSize::B512 };
    assert_eq!(of(vec![plain(64), large], 4096), Some(sizes));
    assert_eq!(
        of(vec![plain(64), plain(64), member(64, Some(TYPE1))], 4096),
        Some(StripeError::Protection { member: 2 })
    );
    for chunk in [0, 100, 513, 1536] {
        let chunk = ByteCount::new(chunk);
        assert_eq!(
            of(vec![plain(64), plain(64)], chunk.get()),
            Some(StripeError::Chunk { chunk, size: BlockSize::B512 })
        );
    }
    assert_eq!(of(vec![plain(64), plain(7)], 4096), Some(StripeError::Small { member: 1 }));
    assert_eq!(of(vec![plain(u64::MAX >> 9), plain(u64::MAX >> 9)], 4096), Some(StripeError::Large));
}

#[test]
fn the_smallest_member_counts_in_whole_chunks() {
    let layer =
        StripeLayer::new(vec![member(64, None), member(47, None), member(100, None)], ByteCount::new(4096)).unwrap();
    assert_eq!(layer.geometry().capacity_blocks, 3 * 40);
    let gate = Gate::new("stripe", layer);
    let past = read(&gate, extent(119, 2)).unwrap_err().into_kind();
    assert_eq!(past, ErrorKind::Range { extent: extent(119, 2), last: Lba::new(119) });
}

#[test]
fn each_member_verifies_by_itself() {
    for format in [None, Some(TYPE1)] {
        let (gate, members) = stripe(3, 4, format);
        write(&gate, extent(0, 192), 1);
        for member in &members {
            assert!(read(member, extent(0, 64)).is_ok());
            assert!(run(member, Request::verify(extent(5, 50), Expectations::NONE)).is_ok());
        }
        write(&members[1], extent(4, 4), 9);
        assert!(read(&gate, extent(0, 192)).is_ok(), "blocks written to a member verify on the stripe");
    }
}

#[test]
fn writes_of_large_chunks_go_chunk_by_chunk_and_are_like_others() {
    let members: Vec<Member> = (0..2).map(|_| member(256, Some(TYPE1))).collect();
    let large = Gate::new("stripe", StripeLayer::new(members.clone(), ByteCount::new(32 << 10)).unwrap());
    write(&large, extent(10, 400), 5);
    let Ok(Response::Data(data)) = read(&large, extent(10, 400)) else { panic!("what was written is good") };
    let wanted = sealed(Some(TYPE1), extent(10, 400), 5, 10);
    assert!(data.joined_data()[..] == wanted.joined_data()[..] && data.joined_tags()[..] == wanted.joined_tags()[..]);
    let requests: u64 =
        members.iter().map(|member| member.counters().requests(sealblock_block::RequestKind::Write)).sum();
    assert_eq!(requests, 7, "blocks 10 to 409 lie in seven chunks of 64");
    assert!(members.iter().all(|member| read(member, extent(0, 256)).is_ok()));
}

#[test]
fn bad_blocks_of_all_members_are_reported_in_order_with_their_members() {
    let (gate, members) = stripe(2, 4, Some(TYPE1));
    write(&gate, extent(0, 128), 7);
    assert!(members[1].device().damage(Lba::new(1), Corruption::Data { at: 0, mask: 1 }));
    assert!(members[0].device().damage(Lba::new(6), Corruption::Tag { at: 7, mask: 0x80 }));
    assert!(members[0].device().damage(Lba::new(0), Corruption::Data { at: 3, mask: 1 }));
    let at = extent(0, 128);
    for request in [Request::read(at, Expectations::NONE), Request::verify(at, Expectations::NONE)] {
        let error = run(&gate, request).unwrap_err();
        assert_eq!(error.device_name(), Some("stripe"), "the device whose blocks it names");
        let bad_blocks = error.bad_blocks().unwrap().as_slice();
        let found: Vec<_> =
            bad_blocks.iter().map(|bad_block| (bad_block.lba.get(), bad_block.cause, bad_block.member)).collect();
        let (guard, tag) = (BadBlockCause::Tag(Field::Guard), BadBlockCause::Tag(Field::RefTag));
        let on = |member| MemberPath::NONE.within(member);
        assert_eq!(found, [(0, guard, on(0)), (5, guard, on(1)), (10, tag, on(0))]);
        // Block 6 of the member is block 10 of the stripe, and its tag is as wrong as before.
        assert_eq!((bad_blocks[2].expected, bad_blocks[2].actual), (Some(10), Some((6 ^ 0x80) + 4)));
    }
}

#[test]
fn a_compare_names_the_first_block_that_differs() {
    let (gate, members) = stripe(3, 2, Some(TYPE1));
    write(&gate, extent(0, 192), 7);
    let compare = || {
        let data = sealed(Some(TYPE1), extent(0, 192), 7, 0);
        run(&gate, Request::compare(extent(0, 192), data))
    };
    assert!(matches!(compare(), Ok(Response::Done)));
    write(&gate, extent(100, 1), 8);
    write(&gate, extent(52, 1), 8);
    write(&gate, extent(151, 1), 8);
    assert_eq!(compare().unwrap_err().into_kind(), ErrorKind::Miscompare { lba: Lba::new(52) });
    assert!(members[1].device().damage(Lba::new(30), Corruption::Data { at: 0, mask: 1 }));
    assert!(matches!(compare().unwrap_err().into_kind(), ErrorKind::Integrity(_)), "damage is no difference");
}

#[test]
fn requests_of_the_limit_give_each_member_its_own_limit() {
    let limits = |transfer| Limits {
        max_transfer_blocks: BlockCount::new(transfer).unwrap(),
        max_verify_blocks: BlockCount::new(1000).unwrap(),
        max_zero_blocks: BlockCount::MAX,
    };
    let members = vec![Scripted::new(limits(100)), Scripted::new(limits(64))];
    let layer = StripeLayer::new(members, ByteCount::new(16 * 512)).unwrap();
    let of = layer.geometry().limits;
    assert_eq!(
        (of.max_transfer_blocks.get(), of.max_verify_blocks.get(), of.max_zero_blocks),
        (128, 2 * 992, BlockCount::MAX)
    );
    let small = vec![Scripted::new(limits(5)), Scripted::new(limits(64))];
    let layer = StripeLayer::new(small, ByteCount::new(16 * 512)).unwrap();
    assert_eq!(layer.geometry().limits.max_transfer_blocks.get(), 32, "a chunk of each member, which its gate splits");
}

/// A device whose requests complete only when all others have one, with a preset result.
#[derive(Clone)]
struct Scripted {
    geometry: Geometry,
    abilities: Abilities,
    requested: Rc<Cell<usize>>,
    wanted: usize,
    fails: Option<ErrorKind>,
}

impl Scripted {
    fn new(limits: Limits) -> Scripted {
        let geometry = Geometry { block_size: BlockSize::B512, capacity_blocks: 1024, protection: None, limits };
        Scripted { geometry, abilities: Abilities::COMPLETE, requested: Rc::default(), wanted: 0, fails: None }
    }

    fn with(requested: &Rc<Cell<usize>>, wanted: usize, fails: Option<ErrorKind>) -> Scripted {
        let limits = Limits::new(BlockSize::B512, 1 << 20, 2048);
        Scripted { requested: Rc::clone(requested), wanted, fails, ..Scripted::new(limits) }
    }
}

impl Device for Scripted {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        self.abilities
    }

    async fn execute(&self, _operation: Request) -> Outcome {
        self.requested.set(self.requested.get() + 1);
        std::future::poll_fn(|cx| {
            cx.waker().wake_by_ref();
            if self.requested.get() >= self.wanted { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        self.fails.clone().map_or(Ok(Response::Done), |failure| Err(Error::from(failure)))
    }
}

#[test]
fn all_members_get_their_request_before_any_responds() {
    for request in [
        Request::flush(),
        Request::write_zeroes(extent(3, 40), true, Durability::Volatile),
        Request::discard([extent(0, 1), extent(8, 1), extent(16, 1), extent(24, 1)]),
    ] {
        let requested = Rc::new(Cell::new(0));
        let members = (0..4).map(|_| Scripted::with(&requested, 4, None)).collect();
        let layer = StripeLayer::new(members, ByteCount::new(8 * 512)).unwrap();
        let mut future = std::pin::pin!(layer.execute(request));
        let outcome = (0..4).find_map(|_| future.as_mut().now_or_never());
        assert!(matches!(outcome, Some(Ok(Response::Done))), "{outcome:?}");
        assert_eq!(requested.get(), 4, "each member once");
    }
}

#[test]
fn errors_of_a_device_outweigh_bad_blocks() {
    let requested = Rc::new(Cell::new(0));
    let damaged = ErrorKind::Integrity(BadBlocks::new(vec![BadBlock::media(Lba::new(2))]).unwrap());
    let gone = ErrorKind::Unreachable { reason: "cut".to_owned() };
    let of = |first: Option<ErrorKind>, second: Option<ErrorKind>| {
        let members = vec![Scripted::with(&requested, 0, first), Scripted::with(&requested, 0, second)];
        let layer = StripeLayer::new(members, ByteCount::new(8 * 512)).unwrap();
        let verify = Request::verify(extent(0, 100), Expectations::NONE);
        run(&layer, verify).map(drop).map_err(Error::into_kind)
    };
    assert_eq!(of(None, None), Ok(()));
    assert_eq!(of(Some(damaged.clone()), Some(gone.clone())), Err(gone));
    let at = |lba, member| BadBlock { member: MemberPath::NONE.within(member), ..BadBlock::media(Lba::new(lba)) };
    let both = ErrorKind::Integrity(BadBlocks::new(vec![at(2, 0), at(10, 1)]).unwrap());
    assert_eq!(of(Some(damaged.clone()), Some(damaged)), Err(both));
}

#[test]
fn a_stripe_has_the_abilities_that_all_members_have() {
    let requested = Rc::default();
    let of = |change: fn(&mut Abilities)| {
        let mut members = vec![Scripted::with(&requested, 0, None), Scripted::with(&requested, 0, None)];
        members[0].abilities.set(RequestKind::Copy, Ability::Native);
        change(&mut members[1].abilities);
        StripeLayer::new(members, ByteCount::new(4096)).unwrap().abilities()
    };
    assert_eq!(of(|_| ()), Abilities::COMPLETE);
    let without = of(|member| {
        member.set(RequestKind::Verify, Ability::Emulated);
        member.set(RequestKind::Discard, Ability::Absent);
        member.writable = false;
        member.unmap_zeroes = false;
    });
    assert_eq!(
        (without.get(RequestKind::Verify), without.get(RequestKind::Discard), without.get(RequestKind::Compare)),
        (Ability::Emulated, Ability::Absent, Ability::Native)
    );
    assert!(!without.writable && !without.unmap_zeroes);
    // Source and destination may be on different members.
    assert_eq!(of(|member| member.set(RequestKind::Copy, Ability::Native)).get(RequestKind::Copy), Ability::Absent);
}

/// A change of a response.
type ResponseChange = fn(Response) -> Response;

/// A member whose responses do not match its requests.
struct UnexpectedResponses {
    member: Member,
    respond: ResponseChange,
}

impl Device for UnexpectedResponses {
    fn geometry(&self) -> &Geometry {
        self.member.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.member.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        self.member.execute(request).await.map(self.respond)
    }
}

#[test]
fn unexpected_responses_are_refused() {
    // The change of the response, and whether the result still is a response to a Read, and to a BlockStatus.
    let cases: [(ResponseChange, [bool; 2]); 5] = [
        (|response| response, [true, true]),
        (
            |response| match response {
                Response::Data(data) => Response::Data(data.slice(0, data.blocks() - 1)),
                other => other,
            },
            [false, true],
        ),
        (|_| Response::Data(sealed(None, extent(0, 2), 0, 0)), [false, false]),
        (|_| Response::Checksum(sealblock_block::Checksum::default()), [false, false]),
        (|_| Response::BlockStatus(Vec::new()), [false, false]),
    ];
    for (respond, is_true) in cases {
        let members = (0..2).map(|_| UnexpectedResponses { member: member(64, Some(TYPE1)), respond }).collect();
        let stripe = StripeLayer::new(members, ByteCount::new(4 * 512)).unwrap();
        // Within a chunk, and across two.
        for extent in [extent(1, 2), extent(0, 8)] {
            let requested = [Request::read(extent, Expectations::NONE), Request::block_status(extent)];
            for (request, is_true) in requested.into_iter().zip(is_true) {
                let outcome = run(&stripe, request);
                assert_eq!(outcome.is_ok(), is_true, "{extent}: {outcome:?}");
                if let Err(error) = outcome {
                    assert!(error.to_string().contains("does not belong"), "{error}");
                }
            }
        }
    }
}

#[test]
fn unchecked_blocks_are_reported_with_their_member_and_the_stripes_addresses() {
    use sealblock_block::{Checksum, MemberPath, Unchecked, VerifyStats, WhyUnchecked};
    // The second block of the member is the second of its first chunk.
    const BELOW: Unchecked =
        Unchecked { first: Lba::new(1), last: Lba::new(4), member: MemberPath::NONE, why: WhyUnchecked::Absent };
    let respond: ResponseChange = |mut response| {
        if let Response::Verified(VerifyStats { coverage, .. }) | Response::Checksum(Checksum { coverage, .. }) =
            &mut response
        {
            coverage.add(BELOW);
        }
        response
    };
    let members = vec![
        UnexpectedResponses { member: member(64, Some(TYPE1)), respond: |response| response },
        UnexpectedResponses { member: member(64, Some(TYPE1)), respond },
    ];
    let stripe = StripeLayer::new(members, ByteCount::new(4 * 512)).unwrap();
    let told = |request| match run(&stripe, request) {
        Ok(Response::Verified(VerifyStats { coverage, .. }) | Response::Checksum(Checksum { coverage, .. })) => {
            coverage
        }
        other => panic!("no check but {other:?}"),
    };
    // Chunks of four blocks: blocks 1 to 4 of the second member are blocks 5 to 7 and 12.
    let due = Unchecked { first: Lba::new(5), last: Lba::new(12), member: MemberPath::NONE.within(1), ..BELOW };
    for at in [extent(0, 32), extent(4, 4)] {
        assert_eq!(told(Request::verify(at, Expectations::NONE)).unchecked(), [due], "{at}");
        let kind = ChecksumKind::default();
        assert_eq!(told(Request::checksum(at, kind, Expectations::NONE)).unchecked(), [due], "{at}");
    }
    let within = extent(0, 4);
    assert!(told(Request::verify(within, Expectations::NONE)).is_complete(), "the first member checked every block");
}

#[test]
fn members_compare_the_tags_that_are_expected_and_failures_have_the_addresses_of_the_stripe() {
    let (gate, members) = stripe(3, 4, Some(TYPE1));
    write(&gate, extent(0, 100), 1);
    let expect = |expected, checks_escapes| {
        let app_tag = Some(Masked { expected, mask: u16::MAX });
        Expectations::new(Checks { app_tag, checks_escapes, ..Checks::full(TYPE1, Lba::new(0)) })
    };
    let unexpected = |lba, expected, actual| {
        Some(ErrorKind::Expectation { lba: Lba::new(lba), field: Field::AppTag, expected, actual })
    };
    let both = |at, expectations, failure: Option<ErrorKind>| {
        for request in [Request::read(at, expectations), Request::verify(at, expectations)] {
            assert_eq!(run(&gate, request).err().map(Error::into_kind), failure, "{at}");
        }
    };
    both(extent(0, 100), expect(3, true), None);
    both(extent(0, 192), expect(3, false), None);
    both(extent(0, 100), expect(4, true), unexpected(0, 4, 3));
    // Blocks 4 to 7 are the first ones of the second member, 16 to 19 its next ones.
    let other = |lba, app_tag| {
        let tags = Tags { app_tag, storage_tag: 0, initial_ref_tag: lba };
        let data = Sealed::seal(Slice::copy_from(&[9; 512]), BlockSize::B512, Some(TYPE1), &tags);
        run(&members[1], Request::write(extent(lba, 1), data, Durability::Volatile)).unwrap();
    };
    other(5, 7);
    both(extent(0, 100), expect(3, true), unexpected(17, 3, 7));
    other(2, 8);
    both(extent(0, 100), expect(3, true), unexpected(6, 3, 8));
    // A block that was never written: its tuple is all ones, also the guard, which is compared no earlier than asked for.
    let app_tag = Some(Masked { expected: 3, mask: u16::MAX });
    let only_app = Expectations::new(Checks { app_tag, checks_escapes: true, ..Checks::NONE });
    both(extent(90, 20), only_app, unexpected(100, 3, 0xFFFF));
    both(extent(90, 20), Expectations::new(Checks { checks_escapes: false, ..*only_app.checks() }), None);
    // The reference tags that a requester expects begin with its own address.
    let shifted = Expectations::new(Checks { initial_ref_tag: Some(21), ..Checks::NONE });
    let failure = ErrorKind::Expectation { lba: Lba::new(20), field: Field::RefTag, expected: 21, actual: 20 };
    both(extent(20, 8), shifted, Some(failure));
}
