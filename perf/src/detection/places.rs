//! Whole blocks in the wrong place or from the wrong time: their guard is right, so only the reference tag can reveal
//! them.
//!
//! Unlike for faults within a block, tags are actually made and verified here, twice: once with a check of the guard
//! alone, and once of guard and reference tag, as for a read of Type 1. Addresses are random 32-bit numbers, the size
//! of the reference tag beside a 16-bit guard; no such tag reveals a block that is misdirected by a multiple of 2^32
//! blocks.

use fastrand::Rng;
use sealblock_integrity::{Checks, GuardKind, PiFormat, ProtectionType, Tags, seal, verify};
use sealblock_units::{BlockSize, Lba};

use super::count::Count;

/// A kind of fault of whole blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Displaced {
    /// Two blocks have changed places, with their tags.
    Swapped,
    /// A write for another block was stored here, with its tag.
    Misdirected,
    /// The last write was lost, so the previous version is there, with its own tag.
    Stale,
}

impl Displaced {
    /// All of them.
    pub const ALL: [Displaced; 3] = [Displaced::Swapped, Displaced::Misdirected, Displaced::Stale];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Displaced::Swapped => "two blocks swapped, with their tags",
            Displaced::Misdirected => "a misdirected block, with its tag",
            Displaced::Stale => "a stale block, with its tag",
        }
    }

    /// The fraction that theory says stays undetected, with the guard alone and with the reference tag.
    pub fn theory(self) -> (f64, f64) {
        match self {
            Displaced::Swapped | Displaced::Misdirected => (1.0, 0.0),
            Displaced::Stale => (1.0, 1.0),
        }
    }
}

/// The counts for one guard.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Seen {
    /// With a check of the guard alone.
    pub guard: Count,
    /// With a check of the reference tag as well.
    pub with_ref_tag: Count,
}

/// Injects this number of faults into blocks with tags of this guard.
pub fn inject(displaced: Displaced, kind: GuardKind, size: BlockSize, trials: u64, seed: u64) -> Seen {
    let format = PiFormat::with_default_storage_tag(kind, ProtectionType::Type1);
    let mut rng = Rng::with_seed(seed);
    let mut written = [Written::new(format, size), Written::new(format, size)];
    let mut seen = Seen::default();
    for _ in 0..trials {
        let here = u64::from(rng.u32(..));
        let elsewhere = u64::from((here as u32).wrapping_add(rng.u32(1..)));
        let [first, second] = &mut written;
        // What is read at each address.
        let reads: [(&Written, u64); 2] = match displaced {
            Displaced::Swapped => {
                first.write(here, &mut rng);
                second.write(elsewhere, &mut rng);
                [(&*second, here), (&*first, elsewhere)]
            }
            Displaced::Misdirected => {
                first.write(elsewhere, &mut rng);
                [(&*first, here); 2]
            }
            Displaced::Stale => {
                first.write(here, &mut rng);
                [(&*first, here); 2]
            }
        };
        let undetected = |with_ref_tag: bool| reads.iter().all(|(written, at)| written.verifies(*at, with_ref_tag));
        seen.guard.add(Count { trials: 1, undetected: undetected(false).into() });
        seen.with_ref_tag.add(Count { trials: 1, undetected: undetected(true).into() });
    }
    seen
}

/// A block with its tag, as stored on a medium.
struct Written {
    format: PiFormat,
    size: BlockSize,
    data: Vec<u8>,
    tag: Vec<u8>,
}

impl Written {
    fn new(format: PiFormat, size: BlockSize) -> Written {
        Written { format, size, data: vec![0; size.bytes()], tag: vec![0; format.tuple_bytes()] }
    }

    /// Writes random data for an address.
    fn write(&mut self, lba: u64, rng: &mut Rng) {
        rng.fill(&mut self.data);
        let tags = Tags { initial_ref_tag: lba, ..Tags::default() };
        seal(self.format, self.size, &self.data, &mut self.tag, &tags);
    }

    /// True if a read of this address accepts the block.
    fn verifies(&self, lba: u64, with_ref_tag: bool) -> bool {
        let all = Checks::full(self.format, Lba::new(lba));
        let checks = if with_ref_tag { all } else { Checks { initial_ref_tag: None, ..all } };
        verify(self.format, self.size, &self.data, &self.tag, &checks, &mut |_| ()) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guards_alone_see_no_block_in_the_wrong_place_and_reference_tags_do() {
        for kind in GuardKind::ALL {
            for size in [BlockSize::B512, BlockSize::B4096] {
                for displaced in Displaced::ALL {
                    let seen = inject(displaced, kind, size, 200, 1);
                    let (alone, with_ref_tag) = displaced.theory();
                    assert_eq!((seen.guard.trials, seen.guard.rate()), (200, alone), "{kind} {displaced:?}");
                    assert_eq!(
                        (seen.with_ref_tag.trials, seen.with_ref_tag.rate()),
                        (200, with_ref_tag),
                        "{kind} {displaced:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn what_is_where_it_belongs_verifies_and_what_is_damaged_does_not() {
        let format = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);
        let mut written = Written::new(format, BlockSize::B512);
        written.write(5, &mut Rng::with_seed(2));
        assert!(written.verifies(5, true) && written.verifies(6, false) && !written.verifies(6, true));
        // The reference tag of this guard has 32 bits.
        assert!(written.verifies(5 + (1 << 32), true));
        written.data[100] ^= 1;
        assert!(!written.verifies(5, false));
    }
}
