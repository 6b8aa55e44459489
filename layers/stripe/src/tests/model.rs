//! A stripe against one device of the same size, with random requests, for every guard and type.

use proptest::prelude::*;
use sealblock_integrity::Checks;

use super::*;

/// One request. Positions and lengths are reduced to fit the device.
#[derive(Clone, Debug)]
enum Step {
    Write { at: u64, blocks: u64, seed: u8, initial_ref_tag: u64 },
    Read { at: u64, blocks: u64, initial_ref_tag: u64 },
    Verify { at: u64, blocks: u64 },
    Checksum { at: u64, blocks: u64, kind: ChecksumKind },
    Compare { at: u64, blocks: u64, seed: u8, poisoned: Option<u64> },
    Zero { at: u64, blocks: u64, may_unmap: bool },
    Discard { at: [(u64, u64); 3] },
    WriteUncorrectable { at: u64, blocks: u64 },
    Damage { at: u64, tag: bool },
    BlockStatus { at: u64, blocks: u64 },
    Flush,
}

fn step() -> impl Strategy<Value = Step> {
    let (at, blocks, seed) = (any::<u64>(), 1u64..80, 0u8..3);
    // Near the end of the tag's range, so that shifts wrap.
    let tag = prop_oneof![Just(None), any::<u8>().prop_map(|low| Some(u64::from(u32::MAX) - u64::from(low)))];
    let tag = tag.prop_map(|tag| tag.unwrap_or(u64::MAX));
    prop_oneof![
        4 => (at, blocks.clone(), seed.clone(), tag.clone())
            .prop_map(|(at, blocks, seed, initial_ref_tag)| Step::Write { at, blocks, seed, initial_ref_tag }),
        4 => (at, blocks.clone(), tag).prop_map(|(at, blocks, initial_ref_tag)| Step::Read { at, blocks, initial_ref_tag }),
        2 => (at, blocks.clone()).prop_map(|(at, blocks)| Step::Verify { at, blocks }),
        1 => (at, blocks.clone(), proptest::sample::select(&ChecksumKind::ALL[..]))
            .prop_map(|(at, blocks, kind)| Step::Checksum { at, blocks, kind }),
        2 => (at, blocks.clone(), seed, proptest::option::of(any::<u64>()))
            .prop_map(|(at, blocks, seed, poisoned)| Step::Compare { at, blocks, seed, poisoned }),
        1 => (at, blocks.clone(), any::<bool>()).prop_map(|(at, blocks, may_unmap)| Step::Zero { at, blocks, may_unmap }),
        1 => [(at, 1u64..20), (at, 1u64..20), (at, 1u64..20)].prop_map(|at| Step::Discard { at }),
        1 => (at, 1u64..4).prop_map(|(at, blocks)| Step::WriteUncorrectable { at, blocks }),
        1 => (at, any::<bool>()).prop_map(|(at, tag)| Step::Damage { at, tag }),
        1 => (at, blocks).prop_map(|(at, blocks)| Step::BlockStatus { at, blocks }),
        1 => Just(Step::Flush),
    ]
}

fn formats() -> impl Strategy<Value = Option<PiFormat>> {
    let of = |guard| ProtectionType::ALL.map(|kind| PiFormat::with_default_storage_tag(guard, kind));
    let all: Vec<_> = [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64].into_iter().flat_map(of).collect();
    let odd = PiFormat::new(GuardKind::Crc16, ProtectionType::Type1, 20).unwrap();
    let formats = all.into_iter().chain([odd]).map(Some).chain([None]);
    proptest::sample::select(formats.collect::<Vec<_>>())
}

/// The stripe, its members, and the one device.
struct Pair {
    stripe: Gate<StripeLayer<Member>>,
    members: Vec<Member>,
    flat: Member,
    chunk: u64,
}

impl Pair {
    fn new(members: usize, chunk_shift: u32, format: Option<PiFormat>) -> Pair {
        let (stripe, members) = stripe(members, 1 << chunk_shift, format);
        let flat = member(stripe.geometry().capacity_blocks, format);
        Pair { stripe, members, flat, chunk: 1 << chunk_shift }
    }

    fn extent(&self, at: u64, blocks: u64) -> Extent {
        let at = at % self.flat.geometry().capacity_blocks;
        extent(at, blocks.min(self.flat.geometry().capacity_blocks - at))
    }

    /// The tag of the first block: the address, unless the type lets the command choose.
    fn tag(&self, at: Extent, chosen: u64) -> u64 {
        let may_choose = self.flat.geometry().protection.is_some_and(|f| f.protection() != ProtectionType::Type1);
        if may_choose && chosen != u64::MAX { chosen } else { at.start().get() }
    }

    fn request(&self, step: &Step) -> Option<Request> {
        Some(match *step {
            Step::Write { at, blocks, seed, initial_ref_tag } => {
                let extent = self.extent(at, blocks);
                let format = self.flat.geometry().protection;
                let data = sealed(format, extent, seed, self.tag(extent, initial_ref_tag));
                Request::write(extent, data, Durability::Volatile)
            }
            Step::Read { at, blocks, initial_ref_tag } => {
                let extent = self.extent(at, blocks);
                let initial_ref_tag = Some(self.tag(extent, initial_ref_tag));
                Request::read(extent, Expectations::new(Checks { guard: true, initial_ref_tag, ..Checks::NONE }))
            }
            Step::Verify { at, blocks } => {
                let extent = self.extent(at, blocks);
                Request::verify(extent, Expectations::NONE)
            }
            Step::Checksum { at, blocks, kind } => {
                let extent = self.extent(at, blocks);
                Request::checksum(extent, kind, Expectations::NONE)
            }
            Step::Compare { at, blocks, seed, poisoned } => self.compare(self.extent(at, blocks), seed, poisoned),
            Step::Zero { at, blocks, may_unmap } => self.zero(self.extent(at, blocks), may_unmap),
            Step::Discard { at } => Request::discard(at.iter().map(|(at, blocks)| self.extent(*at, *blocks))),
            Step::WriteUncorrectable { at, blocks } => {
                Request::write_uncorrectable(self.extent(at, blocks), Durability::Volatile)
            }
            Step::BlockStatus { at, blocks } => Request::block_status(self.extent(at, blocks)),
            Step::Flush => Request::flush(),
            Step::Damage { at, tag } => {
                self.damage(Lba::new(at % self.flat.geometry().capacity_blocks), tag);
                return None;
            }
        })
    }

    fn zero(&self, extent: Extent, may_unmap: bool) -> Request {
        // In Type 3 a device chooses the tags of zeroes that it writes, and the members have other addresses.
        let format = self.flat.geometry().protection;
        let may_unmap = may_unmap || format.is_some_and(|format| format.protection() == ProtectionType::Type3);
        Request::write_zeroes(extent, may_unmap, Durability::Volatile)
    }

    fn compare(&self, extent: Extent, seed: u8, poisoned: Option<u64>) -> Request {
        let data = sealed(self.flat.geometry().protection, extent, seed, extent.start().get());
        let Some(poisoned) = poisoned else { return Request::compare(extent, data) };
        let mut bytes = data.joined_data().to_vec();
        let at = poisoned as usize % bytes.len();
        bytes[at] ^= 1;
        let data = Sealed::seal(Slice::copy_from(&bytes), BlockSize::B512, None, &Tags::default());
        Request::compare(extent, data)
    }

    fn place(&self, lba: Lba) -> (usize, Lba) {
        let (chunk, members) = (lba.get() / self.chunk, self.members.len() as u64);
        ((chunk % members) as usize, Lba::new(chunk / members * self.chunk + lba.get() % self.chunk))
    }

    /// Damages the same block on both, in a part that has no address.
    fn damage(&self, lba: Lba, tag: bool) {
        let what = if tag { Corruption::Tag { at: 0, mask: 1 } } else { Corruption::Data { at: 7, mask: 4 } };
        let (member, below) = self.place(lba);
        // A device in RAM cannot damage what it has never stored, and stripe and device store in different pieces.
        let both = sealed(self.flat.geometry().protection, Extent::one(lba), 1, lba.get());
        let write = || Request::write(Extent::one(lba), both.clone(), Durability::Volatile);
        assert!(run(&self.flat, write()).is_ok() && run(&self.stripe, write()).is_ok());
        assert_eq!(self.flat.device().damage(lba, what), self.members[member].device().damage(below, what));
    }

    /// Checks that both outcomes are equal, and that bad blocks of the stripe name the right member.
    fn check(&self, request: Request) {
        let requested = format!("{} of {:?}", request.kind().name(), request.extent());
        let (stripe, flat) = (run(&self.stripe, request.clone()), run(&self.flat, request));
        match (stripe, flat) {
            (Ok(Response::Data(a)), Ok(Response::Data(b))) => {
                assert!(a.joined_data()[..] == b.joined_data()[..], "data of {requested}");
                assert!(a.joined_tags()[..] == b.joined_tags()[..], "tags of {requested}");
            }
            (Ok(Response::Checksum(a)), Ok(Response::Checksum(b))) => {
                assert_eq!((a.kind, a.value), (b.kind, b.value), "{requested}");
            }
            (Ok(Response::BlockStatus(a)), Ok(Response::BlockStatus(b))) => {
                let blocks = |runs: &[sealblock_block::StatusRun]| {
                    runs.iter().map(|run| u64::from(run.blocks.get())).sum::<u64>()
                };
                assert_eq!(blocks(&a), blocks(&b), "{requested}");
            }
            (Ok(a), Ok(b)) => assert_eq!(format!("{a:?}"), format!("{b:?}"), "{requested}"),
            (Err(a), Err(b)) => self.check_failures(a.into_kind(), b.into_kind(), &requested),
            (a, b) => panic!("{requested}: {a:?} and {b:?}"),
        }
    }

    fn check_failures(&self, stripe: ErrorKind, flat: ErrorKind, requested: &str) {
        let (ErrorKind::Integrity(a), ErrorKind::Integrity(b)) = (&stripe, &flat) else {
            return assert_eq!(stripe, flat, "{requested}");
        };
        let without = |bad_block: &BadBlock| BadBlock { member: MemberPath::NONE, ..*bad_block };
        let bad_blocks: Vec<BadBlock> = a.as_slice().iter().map(without).collect();
        assert_eq!(bad_blocks, b.as_slice(), "{requested}");
        for bad_block in a.as_slice() {
            assert_eq!(
                bad_block.member.outermost(),
                Some((self.place(bad_block.lba).0, MemberPath::NONE)),
                "{requested}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn a_stripe_is_like_one_device(
        members in 1usize..7, chunk_shift in 0u32..5, format in formats(), steps in proptest::collection::vec(step(), 1..40),
    ) {
        let pair = Pair::new(members, chunk_shift, format);
        for step in &steps {
            if let Some(request) = pair.request(step) {
                pair.check(request);
            }
        }
        let whole = pair.extent(0, u64::from(u32::MAX));
        pair.check(Request::read(whole, Expectations::NONE));
    }
}
