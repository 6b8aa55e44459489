//! The faults that are injected into a block, chosen from a seed, and which guards miss them.
//!
//! A block is random. A fault is chosen together with those bits of the block that it reads or changes; no other bit
//! matters (see [`crate::detection::residues`]). Faults of a few bits are chosen anew for each trial. Faults of whole
//! sectors and blocks change contents in which one word of 64 random bits is renewed for each trial. The residue of
//! such a word is random in as many bits as a CRC has, whatever is added to it. So the residues of two trials are
//! independent, as if the whole contents were new. A fault that would change nothing is chosen again.

use fastrand::Rng;
use sealblock_integrity::GuardKind;

use super::residues::{BitResidues, Change, ONES, Residues, Shifts};

/// Bytes of a sector.
pub const SECTOR_BYTES: usize = 512;
/// The longest run of words that change from zeroes to ones.
pub const ONES_WORDS: usize = 8;
/// Bits in a short lost run.
pub const LOST_BITS: usize = 128;
const WORD_BITS: usize = 16;

/// A kind of fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// This number of bits, anywhere in the block, are wrong.
    Flips(usize),
    /// At least one bit is wrong, and all wrong bits are within this many bits.
    Burst(usize),
    /// Two different words of 16 bits have changed places.
    SwappedWords,
    /// 16 bytes at an even offset read as zeroes.
    LostBytes,
    /// One to eight words of zeroes read as FFFFh, or the other way round.
    ZeroesAsOnes,
    /// A sector of 512 bytes reads as zeroes.
    LostSector,
    /// Two sectors of the block have changed places.
    SwappedSectors,
    /// The data are those of another block or of an older version, under this block's tag.
    OtherData,
}

impl Fault {
    /// All faults for blocks of this size.
    pub fn all(block_bytes: usize) -> Vec<Fault> {
        let mut all: Vec<Fault> = [1, 2, 3].map(Fault::Flips).to_vec();
        all.extend([16, 32, 64, 65].map(Fault::Burst));
        all.extend([Fault::SwappedWords, Fault::LostBytes, Fault::ZeroesAsOnes, Fault::LostSector]);
        if block_bytes > SECTOR_BYTES {
            all.push(Fault::SwappedSectors);
        }
        all.push(Fault::OtherData);
        all
    }

    /// The changes of a fault of a few bits in a block of this many bits, and how many there are; `None` for a fault of
    /// whole sectors or blocks.
    fn changes(self, bits: usize, rng: &mut Rng) -> Option<([Change; 3], usize)> {
        let mut changes = [Change::default(); 3];
        let run = |start: usize, width: usize, before: u128, after: u128| Change { start, width, before, after };
        match self {
            Fault::Flips(count) => {
                for index in 0..count {
                    let is_taken = |at: usize| changes[..index].iter().any(|change: &Change| change.start == at);
                    let at = drawn(|| Some(rng.usize(..bits)).filter(|at| !is_taken(*at)));
                    let before = u128::from(rng.bool());
                    changes[index] = run(at, 1, before, before ^ 1);
                }
                return Some((changes, count));
            }
            Fault::Burst(width) => {
                let mask = u128::MAX >> (128 - width);
                let pattern = drawn(|| Some(rng.u128(..) & mask).filter(|pattern| *pattern != 0));
                let before = rng.u128(..) & mask;
                changes[0] = run(rng.usize(..=bits - width), width, before, before ^ pattern);
            }
            Fault::SwappedWords => {
                let (one, other) = two_of(bits / WORD_BITS, rng);
                let mut word = || u128::from(rng.u16(..));
                let (a, b) = drawn(|| Some((word(), word())).filter(|(a, b)| a != b));
                changes[0] = run(one * WORD_BITS, WORD_BITS, a, b);
                changes[1] = run(other * WORD_BITS, WORD_BITS, b, a);
                return Some((changes, 2));
            }
            Fault::LostBytes => {
                let before = drawn(|| Some(rng.u128(..)).filter(|before| *before != 0));
                let start = rng.usize(..=(bits - LOST_BITS) / WORD_BITS) * WORD_BITS;
                changes[0] = run(start, LOST_BITS, before, 0);
            }
            Fault::ZeroesAsOnes => {
                let width = rng.usize(1..=ONES_WORDS) * WORD_BITS;
                let ones = u128::MAX >> (128 - width);
                let (before, after) = if rng.bool() { (0, ones) } else { (ones, 0) };
                let start = rng.usize(..=(bits - width) / WORD_BITS) * WORD_BITS;
                changes[0] = run(start, width, before, after);
            }
            Fault::LostSector | Fault::SwappedSectors | Fault::OtherData => return None,
        }
        Some((changes, 1))
    }

    /// Its name in tables.
    pub fn name(self) -> String {
        match self {
            Fault::Flips(1) => "1 bit flipped".to_owned(),
            Fault::Flips(bits) => format!("{bits} bits flipped"),
            Fault::Burst(bits) => format!("burst of up to {bits} bits"),
            Fault::SwappedWords => "two 16-bit words swapped".to_owned(),
            Fault::LostBytes => "16 bytes zeroed".to_owned(),
            Fault::ZeroesAsOnes => "zero words read as FFFFh, or back".to_owned(),
            Fault::LostSector => "a sector of 512 bytes zeroed".to_owned(),
            Fault::SwappedSectors => "two sectors of 512 bytes swapped".to_owned(),
            Fault::OtherData => "other data under this block's tag".to_owned(),
        }
    }

    /// Its short label in a picture.
    pub fn short_name(self) -> String {
        match self {
            Fault::Flips(1) => "1 flip".to_owned(),
            Fault::Flips(bits) => format!("{bits} flips"),
            Fault::Burst(bits) => format!("burst {bits}"),
            Fault::SwappedWords => "words".to_owned(),
            Fault::LostBytes => "16 bytes".to_owned(),
            Fault::ZeroesAsOnes => "0 as FFFFh".to_owned(),
            Fault::LostSector => "sector".to_owned(),
            Fault::SwappedSectors => "sectors".to_owned(),
            Fault::OtherData => "other data".to_owned(),
        }
    }
}

/// For each guard, in the order of [`GuardKind::ALL`], whether it missed a fault.
pub type Unseen = [bool; GuardKind::ALL.len()];

/// Which guards miss this difference of the CRCs and of the sums of words, for data that are not all zeroes.
fn unseen(residues: Residues, growth: u64) -> Unseen {
    GuardKind::ALL.map(|kind| residues.of(kind).map_or(growth.is_multiple_of(ONES), |difference| difference == 0))
}

/// Injects faults of one kind into blocks of one size.
pub struct Injector<'a> {
    fault: Fault,
    tables: &'a Tables,
    rng: Rng,
    /// The contents of faults with two parts: the swapped sectors, or the present and the right data.
    contents: [Contents; 2],
}

/// The shared state of all injectors for blocks of one size.
pub struct Tables {
    block: BitResidues,
    sector: BitResidues,
    sectors: Shifts,
}

impl Tables {
    /// For blocks of this size, a whole number of sectors.
    pub fn new(block_bytes: usize) -> Tables {
        Tables {
            block: BitResidues::new(block_bytes),
            sector: BitResidues::new(SECTOR_BYTES),
            sectors: Shifts::new(SECTOR_BYTES, block_bytes / SECTOR_BYTES),
        }
    }
}

impl<'a> Injector<'a> {
    /// Injects `fault`; all randomness comes from the seed.
    pub fn new(fault: Fault, tables: &'a Tables, seed: u64) -> Injector<'a> {
        let mut rng = Rng::with_seed(seed);
        let table = if fault == Fault::OtherData { &tables.block } else { &tables.sector };
        let contents = [Contents::new(table, &mut rng), Contents::new(table, &mut rng)];
        Injector { fault, tables, rng, contents }
    }

    /// Injects one fault; returns which guards miss it.
    pub fn inject(&mut self) -> Unseen {
        if let Some((changes, count)) = self.fault.changes(self.tables.block.bits(), &mut self.rng) {
            let changes = &changes[..count];
            let residues =
                changes.iter().fold(Residues::default(), |sum, change| sum.and(self.tables.block.of(change)));
            return unseen(residues, changes.iter().map(Change::growth).sum());
        }
        match self.fault {
            Fault::SwappedSectors => self.swapped_sectors(),
            Fault::LostSector => self.lost_sector(),
            _ => self.other_data(),
        }
    }

    fn renew(&mut self, table: impl Fn(&Tables) -> &BitResidues) {
        for contents in &mut self.contents {
            contents.renew(table(self.tables), &mut self.rng);
        }
    }

    fn other_data(&mut self) -> Unseen {
        self.renew(|tables| &tables.block);
        let [here, there] = &self.contents;
        unseen(here.residues.and(there.residues), here.sum + ONES - there.sum)
    }

    fn lost_sector(&mut self) -> Unseen {
        self.renew(|tables| &tables.sector);
        let (lost, shifts) = (&self.contents[0], &self.tables.sectors);
        let part = self.rng.usize(..shifts.parts());
        let mut unseen = unseen(shifts.to_part(part, lost.residues), lost.sum);
        if shifts.parts() == 1 {
            // Only zeroes remain, whose sum is 0 and not a multiple of FFFFh.
            let is_seen = |kind: GuardKind| kind == GuardKind::IpChecksum;
            GuardKind::ALL.iter().zip(&mut unseen).for_each(|(kind, unseen)| *unseen &= !is_seen(*kind));
        }
        unseen
    }

    fn swapped_sectors(&mut self) -> Unseen {
        self.renew(|tables| &tables.sector);
        let ([one, other], shifts) = (&self.contents, &self.tables.sectors);
        let (first, second) = two_of(shifts.parts(), &mut self.rng);
        let differ = one.residues.and(other.residues);
        // The sum gains in one place what it loses in the other.
        unseen(shifts.to_part(first, differ).and(shifts.to_part(second, differ)), 0)
    }
}

/// Random bytes, renewed bit by bit.
struct Contents {
    words: Vec<u64>,
    residues: Residues,
    /// The sum of their 16-bit words modulo FFFFh.
    sum: u64,
    next: usize,
}

impl Contents {
    fn new(table: &BitResidues, rng: &mut Rng) -> Contents {
        let words = vec![0; table.bits() / 64];
        let mut contents = Contents { words, residues: Residues::default(), sum: 0, next: 0 };
        (0..contents.words.len()).for_each(|_| contents.renew(table, rng));
        contents
    }

    /// Replaces the oldest word by a new random one.
    fn renew(&mut self, table: &BitResidues, rng: &mut Rng) {
        let new = rng.u64(..);
        let old = std::mem::replace(&mut self.words[self.next], new);
        let change = Change { start: self.next * 64, width: 64, before: old.into(), after: new.into() };
        self.residues = self.residues.and(table.of(&change));
        self.sum = (self.sum + change.growth()) % ONES;
        self.next = (self.next + 1) % self.words.len();
    }
}

/// Draws random values until one is usable.
fn drawn<T>(mut draw: impl FnMut() -> Option<T>) -> T {
    loop {
        if let Some(drawn) = draw() {
            return drawn;
        }
    }
}

/// Two different numbers below `count`, which is at least 2.
fn two_of(count: usize, rng: &mut Rng) -> (usize, usize) {
    let one = rng.usize(..count);
    (one, (one + rng.usize(1..count)) % count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detection::residues::BitOrder;
    use sealblock_integrity::guard;

    /// The bytes of contents whose bits have the order of a guard.
    fn bytes(words: &[u64], kind: GuardKind) -> Vec<u8> {
        let bytes = words.iter().flat_map(|word| word.to_be_bytes());
        match BitOrder::of(kind) {
            BitOrder::MostFirst => bytes.collect(),
            BitOrder::LeastFirst => bytes.map(u8::reverse_bits).collect(),
        }
    }

    /// True if a guard is the same before and after changes of a block of random bytes.
    fn is_unseen(kind: GuardKind, changes: &[Change], block_bytes: usize, rng: &mut Rng) -> bool {
        let mut block: Vec<u8> = (0..block_bytes).map(|_| rng.u8(..)).collect();
        changes.iter().for_each(|change| change.prepare(BitOrder::of(kind), &mut block));
        let (before, whole) = (guard::compute(kind, &block), block.clone());
        changes.iter().for_each(|change| change.apply(BitOrder::of(kind), &mut block));
        assert_ne!(block, whole, "{changes:?} change nothing");
        before == guard::compute(kind, &block)
    }

    #[test]
    fn what_is_seen_and_unseen_is_what_plain_guards_see() {
        let tables = Tables::new(512);
        let mut rng = Rng::with_seed(7);
        for fault in Fault::all(512) {
            let mut checked = [[0_u32; 2]; 4];
            for trial in 0..300_000_u32 {
                let Some((changes, count)) = fault.changes(4096, &mut rng) else { break };
                let changes = &changes[..count];
                let residues = changes.iter().fold(Residues::default(), |sum, change| sum.and(tables.block.of(change)));
                let unseen = unseen(residues, changes.iter().map(Change::growth).sum());
                for (index, kind) in GuardKind::ALL.into_iter().enumerate() {
                    let checks = &mut checked[index][usize::from(unseen[index])];
                    // Computing plain guards is slow, so only some of each kind are tested.
                    if *checks < 20 {
                        *checks += 1;
                        let plain = is_unseen(kind, changes, 512, &mut rng);
                        assert_eq!(unseen[index], plain, "{kind}, trial {trial}, {changes:?}");
                    }
                }
            }
            if fault == Fault::Flips(3) {
                let of = |kind| GuardKind::ALL.iter().position(|other| *other == kind).unwrap();
                assert!(checked[of(GuardKind::Crc16)][1] > 0, "a CRC of 16 bits misses some: {checked:?}");
                assert!(checked[of(GuardKind::IpChecksum)][1] > 0, "{checked:?}");
            }
        }
    }

    #[test]
    fn contents_have_the_residues_and_the_sum_of_their_bytes() {
        let table = BitResidues::new(SECTOR_BYTES);
        let mut rng = Rng::with_seed(8);
        let mut contents = Contents::new(&table, &mut rng);
        for _ in 0..100 {
            contents.renew(&table, &mut rng);
            for kind in GuardKind::ALL {
                let plain = guard::compute(kind, &bytes(&contents.words, kind));
                match contents.residues.of(kind) {
                    Some(residue) => assert_eq!(residue, plain ^ guard::compute(kind, &[0; SECTOR_BYTES]), "{kind}"),
                    None => assert_eq!(contents.sum, (ONES - plain) % ONES, "{kind}"),
                }
            }
        }
    }

    #[test]
    fn sectors_that_change_places_make_the_difference_that_is_said() {
        let tables = Tables::new(4096);
        let mut injector = Injector::new(Fault::SwappedSectors, &tables, 9);
        for (first, second) in [(0, 1), (0, 7), (3, 5), (6, 2)] {
            injector.renew(|tables| &tables.sector);
            let [one, other] = &injector.contents;
            let differ = one.residues.and(other.residues);
            let said = tables.sectors.to_part(first, differ).and(tables.sectors.to_part(second, differ));
            for kind in GuardKind::ALL {
                let place = |at: usize| at * SECTOR_BYTES..(at + 1) * SECTOR_BYTES;
                let mut block: Vec<u8> = (0..4096).map(|_| injector.rng.u8(..)).collect();
                let (a, b) = (bytes(&one.words, kind), bytes(&other.words, kind));
                block[place(first)].copy_from_slice(&a);
                block[place(second)].copy_from_slice(&b);
                let before = guard::compute(kind, &block);
                block[place(first)].copy_from_slice(&b);
                block[place(second)].copy_from_slice(&a);
                let difference = before ^ guard::compute(kind, &block);
                assert_eq!(said.of(kind).unwrap_or(0), difference, "{kind}, {first} and {second}");
            }
        }
    }

    #[test]
    fn a_block_of_zeroes_has_the_other_zero() {
        // A sum of FFFFh never comes from zeroes, so the Internet checksum detects a whole lost block, but not a lost
        // sector of a larger one.
        let mut block = [0; 512];
        block[..4].copy_from_slice(&[0x12, 0x34, 0xED, 0xCB]);
        assert_ne!(guard::ip_checksum(&block), guard::ip_checksum(&[0; 512]));
        let (small, large) = (Tables::new(512), Tables::new(4096));
        let unseen = |tables: &Tables| {
            let mut injector = Injector::new(Fault::LostSector, tables, 10);
            (0..400_000).filter(|_| injector.inject()[3]).count()
        };
        assert_eq!(GuardKind::ALL[3], GuardKind::IpChecksum);
        assert!(unseen(&small) == 0 && unseen(&large) > 0);
    }

    #[test]
    fn faults_come_out_the_same_for_the_same_seed_only() {
        let tables = Tables::new(512);
        let drawn = |seed| {
            let mut injector = Injector::new(Fault::Flips(2), &tables, seed);
            (0..2000).filter(|_| injector.inject().contains(&true)).count()
        };
        assert_eq!(drawn(1), drawn(1));
        assert!((2..20).any(|seed| drawn(seed) != drawn(1)));
        assert!(Fault::all(512).iter().all(|fault| *fault != Fault::SwappedSectors));
        assert!(Fault::all(4096).contains(&Fault::SwappedSectors));
    }
}
