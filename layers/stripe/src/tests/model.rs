//! A stripe against one device of the same size, with random requests, for every guard and type.

use proptest::prelude::*;

use super::*;

/// One request. Positions and lengths are brought into the device.
#[derive(Clone, Debug)]
enum Step {
    Write { at: u64, blocks: u64, seed: u8, first_ref: u64 },
    Read { at: u64, blocks: u64, first_ref: u64 },
    Verify { at: u64, blocks: u64 },
    Digest { at: u64, blocks: u64 },
    Compare { at: u64, blocks: u64, seed: u8, spoiled: Option<u64> },
    Zero { at: u64, blocks: u64, may_unmap: bool },
    Discard { at: [(u64, u64); 3] },
    Spoil { at: u64, blocks: u64 },
    Damage { at: u64, tag: bool },
    Allocation { at: u64, blocks: u64 },
    Flush,
}

fn step() -> impl Strategy<Value = Step> {
    let (at, blocks, seed) = (any::<u64>(), 1u64..80, 0u8..3);
    // Near the end of the tag's range, so that shifts wrap.
    let tag = prop_oneof![Just(None), any::<u8>().prop_map(|low| Some(u64::from(u32::MAX) - u64::from(low)))];
    let tag = tag.prop_map(|tag| tag.unwrap_or(u64::MAX));
    prop_oneof![
        4 => (at, blocks.clone(), seed.clone(), tag.clone())
            .prop_map(|(at, blocks, seed, first_ref)| Step::Write { at, blocks, seed, first_ref }),
        4 => (at, blocks.clone(), tag).prop_map(|(at, blocks, first_ref)| Step::Read { at, blocks, first_ref }),
        2 => (at, blocks.clone()).prop_map(|(at, blocks)| Step::Verify { at, blocks }),
        1 => (at, blocks.clone()).prop_map(|(at, blocks)| Step::Digest { at, blocks }),
        2 => (at, blocks.clone(), seed, proptest::option::of(any::<u64>()))
            .prop_map(|(at, blocks, seed, spoiled)| Step::Compare { at, blocks, seed, spoiled }),
        1 => (at, blocks.clone(), any::<bool>()).prop_map(|(at, blocks, may_unmap)| Step::Zero { at, blocks, may_unmap }),
        1 => [(at, 1u64..20), (at, 1u64..20), (at, 1u64..20)].prop_map(|at| Step::Discard { at }),
        1 => (at, 1u64..4).prop_map(|(at, blocks)| Step::Spoil { at, blocks }),
        1 => (at, any::<bool>()).prop_map(|(at, tag)| Step::Damage { at, tag }),
        1 => (at, blocks).prop_map(|(at, blocks)| Step::Allocation { at, blocks }),
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

/// The stripe, its legs, and the one device.
struct Pair {
    stripe: Gate<StripeLayer<Below>>,
    legs: Vec<Below>,
    flat: Below,
    chunk: u64,
}

impl Pair {
    fn new(legs: usize, chunk_shift: u32, format: Option<PiFormat>) -> Pair {
        let (stripe, legs) = stripe(legs, 1 << chunk_shift, format);
        let flat = leg(stripe.geometry().capacity_blocks, format);
        Pair { stripe, legs, flat, chunk: 1 << chunk_shift }
    }

    fn extent(&self, at: u64, blocks: u64) -> Extent {
        let at = at % self.flat.geometry().capacity_blocks;
        extent(at, blocks.min(self.flat.geometry().capacity_blocks - at))
    }

    /// The tag of the first block: the address, but where the type lets the command choose.
    fn tag(&self, at: Extent, chosen: u64) -> u64 {
        let may_choose = self.flat.geometry().protection.is_some_and(|f| f.protection() != ProtectionType::Type1);
        if may_choose && chosen != u64::MAX { chosen } else { at.start().get() }
    }

    fn operation(&self, step: &Step) -> Option<Request> {
        Some(match *step {
            Step::Write { at, blocks, seed, first_ref } => {
                let extent = self.extent(at, blocks);
                let format = self.flat.geometry().protection;
                let data = sealed(format, extent, seed, self.tag(extent, first_ref));
                Request::Write { extent, data, durability: Durability::Volatile }
            }
            Step::Read { at, blocks, first_ref } => {
                let extent = self.extent(at, blocks);
                let first_ref = Some(self.tag(extent, first_ref));
                Request::Read { extent, checks: Checks { guard: true, initial_ref_tag: first_ref, ..Checks::NONE } }
            }
            Step::Verify { at, blocks } => {
                let extent = self.extent(at, blocks);
                Request::Verify { extent, checks: full(&self.flat, extent) }
            }
            Step::Digest { at, blocks } => {
                let extent = self.extent(at, blocks);
                Request::Checksum { extent, checks: full(&self.flat, extent) }
            }
            Step::Compare { at, blocks, seed, spoiled } => self.compare(self.extent(at, blocks), seed, spoiled),
            Step::Zero { at, blocks, may_unmap } => self.zero(self.extent(at, blocks), may_unmap),
            Step::Discard { at } => {
                Request::Discard { extents: at.iter().map(|(at, blocks)| self.extent(*at, *blocks)).collect() }
            }
            Step::Spoil { at, blocks } => {
                Request::WriteUncorrectable { extent: self.extent(at, blocks), durability: Durability::Volatile }
            }
            Step::Allocation { at, blocks } => Request::BlockStatus { extent: self.extent(at, blocks) },
            Step::Flush => Request::Flush,
            Step::Damage { at, tag } => {
                self.damage(Lba::new(at % self.flat.geometry().capacity_blocks), tag);
                return None;
            }
        })
    }

    fn zero(&self, extent: Extent, may_unmap: bool) -> Request {
        // In Type 3 a device chooses the tags of zeroes that it writes, and the legs have addresses of their own.
        let format = self.flat.geometry().protection;
        let may_unmap = may_unmap || format.is_some_and(|format| format.protection() == ProtectionType::Type3);
        Request::WriteZeroes { extent, may_unmap, durability: Durability::Volatile }
    }

    fn compare(&self, extent: Extent, seed: u8, spoiled: Option<u64>) -> Request {
        let data = sealed(self.flat.geometry().protection, extent, seed, extent.start().get());
        let Some(spoiled) = spoiled else { return Request::Compare { extent, data } };
        let mut bytes = data.data().to_vec();
        let at = spoiled as usize % bytes.len();
        bytes[at] ^= 1;
        let data = Sealed::seal(Slice::copy_from(&bytes), BlockSize::B512, None, &Tags::default());
        Request::Compare { extent, data }
    }

    fn place(&self, lba: Lba) -> (usize, Lba) {
        let (chunk, legs) = (lba.get() / self.chunk, self.legs.len() as u64);
        ((chunk % legs) as usize, Lba::new(chunk / legs * self.chunk + lba.get() % self.chunk))
    }

    /// Damages the same block on both, in a part that has no address.
    fn damage(&self, lba: Lba, tag: bool) {
        let what = if tag { Corruption::Tag { at: 0, mask: 1 } } else { Corruption::Data { at: 7, mask: 4 } };
        let (leg, below) = self.place(lba);
        // A device in RAM cannot damage what it has never stored, and both store in pieces of their own.
        let both = sealed(self.flat.geometry().protection, Extent::one(lba), 1, lba.get());
        let write =
            || Request::Write { extent: Extent::one(lba), data: both.clone(), durability: Durability::Volatile };
        assert!(run(&self.flat, write()).is_ok() && run(&self.stripe, write()).is_ok());
        assert_eq!(self.flat.device().damage(lba, what), self.legs[leg].device().damage(below, what));
    }

    /// Both must answer alike; faults of the stripe name the right leg besides.
    fn check(&self, operation: Request) {
        let asked = format!("{} of {:?}", operation.kind().name(), operation.extent());
        let (stripe, flat) = (run(&self.stripe, operation.clone()), run(&self.flat, operation));
        match (stripe, flat) {
            (Ok(Response::Data(a)), Ok(Response::Data(b))) => {
                assert!(a.data()[..] == b.data()[..], "data of {asked}");
                assert!(a.tags()[..] == b.tags()[..], "tags of {asked}");
            }
            (Ok(Response::Checksum(a)), Ok(Response::Checksum(b))) => assert_eq!(a.crc64, b.crc64, "{asked}"),
            (Ok(Response::BlockStatus(a)), Ok(Response::BlockStatus(b))) => {
                let blocks = |runs: &[sealblock_block::StatusRun]| {
                    runs.iter().map(|run| u64::from(run.blocks.get())).sum::<u64>()
                };
                assert_eq!(blocks(&a), blocks(&b), "{asked}");
            }
            (Ok(a), Ok(b)) => assert_eq!(format!("{a:?}"), format!("{b:?}"), "{asked}"),
            (Err(a), Err(b)) => self.check_failures(a.into_kind(), b.into_kind(), &asked),
            (a, b) => panic!("{asked}: {a:?} and {b:?}"),
        }
    }

    fn check_failures(&self, stripe: ErrorKind, flat: ErrorKind, asked: &str) {
        let (ErrorKind::Integrity(a), ErrorKind::Integrity(b)) = (&stripe, &flat) else {
            return assert_eq!(stripe, flat, "{asked}");
        };
        let without = |fault: &BadBlock| BadBlock { member: MemberPath::NONE, ..*fault };
        let faults: Vec<BadBlock> = a.as_slice().iter().map(without).collect();
        assert_eq!(faults, b.as_slice(), "{asked}");
        for fault in a.as_slice() {
            assert_eq!(fault.member.outermost(), Some((self.place(fault.lba).0, MemberPath::NONE)), "{asked}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn a_stripe_is_like_one_device(
        legs in 1usize..7, chunk_shift in 0u32..5, format in formats(), steps in proptest::collection::vec(step(), 1..40),
    ) {
        let pair = Pair::new(legs, chunk_shift, format);
        for step in &steps {
            if let Some(operation) = pair.operation(step) {
                pair.check(operation);
            }
        }
        let whole = pair.extent(0, u64::from(u32::MAX));
        pair.check(Request::Read { extent: whole, checks: Checks { guard: true, ..Checks::NONE } });
    }
}
