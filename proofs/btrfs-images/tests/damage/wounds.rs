//! The damage that a seed determines for a filesystem; dropping it undoes the damage.
//!
//! Places are chosen among the copies of data, nodes and superblocks, and at random among all sectors that are not
//! zero, in use or not.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::FileExt;

use fastrand::Rng;
use sealblock_btrfs::Place;
use sealblock_btrfs_format::checksum::FIELD_BYTES;
use sealblock_btrfs_format::key::objectid;
use sealblock_btrfs_format::superblock::COPY_OFFSETS;
use sealblock_proofs_btrfs_images::content::noise;

use crate::subject::{NodePlaces, SECTOR, Subject};

/// Bytes of a run of sectors that are lost together.
const BURST: u64 = 64 << 10;
/// The offset of the generation in a node's header.
const GENERATION: usize = 80;

/// A change of a range of bytes.
#[derive(Clone, Copy, Debug)]
enum Wound {
    /// One bit is flipped in this byte of the range.
    Flip(u64),
    /// All bytes become zero.
    Zero,
    /// All bytes become noise from this seed.
    Noise(u64),
    /// The bytes are replaced by those of another place, as after a misdirected write.
    Misplaced(Place),
    /// The node is replaced by one from an earlier transaction, with a valid checksum, as after a lost write.
    Stale,
}

/// A range of a device, and its change.
#[derive(Clone, Copy, Debug)]
struct Target {
    devid: u64,
    offset: u64,
    bytes: u64,
    wound: Wound,
    /// Its content.
    what: What,
}

/// The content of a range of bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    /// A copy of data in use.
    Data,
    /// A copy of a node or a superblock, which begins with a field for its checksum.
    Sealed,
    /// Anything, in use or not.
    Any,
}

/// The content before the damage.
struct Patch {
    devid: u64,
    offset: u64,
    before: Vec<u8>,
}

/// A filesystem that stays damaged until this is dropped.
pub struct Damage<'a> {
    subject: &'a Subject,
    patches: Vec<Patch>,
    /// A description of the damage, to analyse a failure.
    pub text: String,
    /// Copies that were damaged on purpose, by device and byte: sectors of data, nodes and superblocks.
    pub expected: BTreeSet<(u64, u64)>,
}

impl Damage<'_> {
    /// Damages a filesystem as the seed determines.
    ///
    /// # Errors
    /// If its images cannot be read or written.
    pub fn new(subject: &Subject, seed: u64) -> io::Result<Damage<'_>> {
        let mut rng = Rng::with_seed(seed);
        let mut targets = Vec::new();
        for _ in 0..1 + rng.usize(..3) {
            choose(subject, &mut rng, &mut targets);
        }
        let mut damage =
            Damage { subject, patches: Vec::new(), text: format!("{targets:?}"), expected: BTreeSet::new() };
        let range = |target: &Target| read(subject, target.devid, target.offset, target.bytes);
        let before = targets.iter().map(range).collect::<io::Result<Vec<_>>>()?;
        targets.iter().try_for_each(|target| damage.hurt(target))?;
        for (target, before) in targets.iter().zip(before) {
            // If the content does not change, as when zeroes are set to zero, nothing is damaged.
            let after = range(target)?;
            let is_damaged = match target.what {
                What::Data => after != before,
                What::Sealed => {
                    covered(&after, subject.checksum.bytes()).ne(covered(&before, subject.checksum.bytes()))
                }
                What::Any => false,
            };
            if is_damaged {
                damage.expected.insert((target.devid, target.offset));
            }
        }
        Ok(damage)
    }

    fn hurt(&mut self, target: &Target) -> io::Result<()> {
        let Target { devid, offset, bytes, wound, .. } = *target;
        let before = read(self.subject, devid, offset, bytes)?;
        let mut after = before.clone();
        match wound {
            Wound::Flip(byte) => after[byte as usize] ^= 0x10,
            Wound::Zero => after.fill(0),
            Wound::Noise(seed) => after = noise(bytes as usize, seed),
            Wound::Misplaced(from) => after = read(self.subject, from.devid, from.offset, bytes)?,
            Wound::Stale => {
                let field = &mut after[GENERATION..GENERATION + 8];
                let generation = u64::from_le_bytes(field.try_into().expect("eight bytes"));
                field.copy_from_slice(&generation.wrapping_sub(1).to_le_bytes());
                self.subject.checksum.seal(&mut after);
            }
        }
        self.patches.push(Patch { devid, offset, before });
        self.subject.images[devid as usize - 1].write_all_at(&after, offset)
    }
}

impl Drop for Damage<'_> {
    fn drop(&mut self) {
        for Patch { devid, offset, before } in self.patches.drain(..).rev() {
            let restored = self.subject.images[devid as usize - 1].write_all_at(&before, offset);
            restored.expect("an image that was written is written again");
        }
    }
}

fn read(subject: &Subject, devid: u64, offset: u64, bytes: u64) -> io::Result<Vec<u8>> {
    let mut range = vec![0; bytes as usize];
    subject.images[devid as usize - 1].read_exact_at(&mut range, offset)?;
    Ok(range)
}

/// The significant bytes of a node or superblock: all but the part of the checksum field that a short checksum does not
/// use, which no checksum covers.
fn covered(block: &[u8], checksum_bytes: usize) -> impl Iterator<Item = &u8> {
    block[..checksum_bytes].iter().chain(&block[FIELD_BYTES..])
}

/// A random element.
fn any<'a, T>(rng: &mut Rng, all: &'a [T]) -> &'a T {
    &all[rng.usize(..all.len())]
}

/// A random copy of a random element.
fn copy_of<'a>(rng: &mut Rng, all: impl ExactSizeIterator<Item = &'a [Place]>) -> Place {
    let mut all = all;
    let number = rng.usize(..all.len());
    let copies = all.nth(number).expect("there are more");
    *any(rng, copies)
}

/// Adds one random damage.
fn choose(subject: &Subject, rng: &mut Rng, targets: &mut Vec<Target>) {
    match rng.u32(..100) {
        0..35 => {
            let sector = any(rng, &subject.data);
            let wound = match rng.u32(..8) {
                0 => Wound::Misplaced(copy_of(rng, subject.data.iter().map(|sector| &sector.copies[..]))),
                _ => plain_wound(rng, SECTOR),
            };
            targets.extend(some_of(rng, &sector.copies, SECTOR, wound, What::Data));
        }
        35..55 => choose_node(subject, rng, targets, |_| true),
        55..65 => choose_node(subject, rng, targets, |node| node.tree == objectid::CSUM_TREE),
        65..75 => choose_node(subject, rng, targets, |node| objectid::is_subvolume(node.tree)),
        75..80 => {
            // Without the first copy the kernel cannot mount, so that case is made rarer.
            let offset = COPY_OFFSETS[usize::from(rng.u32(..5) > 0)];
            let devid = 1 + rng.u64(..subject.images.len() as u64);
            targets.push(Target { devid, offset, bytes: SECTOR, wound: plain_wound(rng, SECTOR), what: What::Sealed });
        }
        80..90 => {
            let Place { devid, offset } = *any(rng, &subject.written);
            targets.push(Target { devid, offset, bytes: SECTOR, wound: plain_wound(rng, SECTOR), what: What::Any });
        }
        90..95 => {
            let Place { devid, offset } = copy_of(rng, subject.data.iter().map(|sector| &sector.copies[..]));
            let wound = if rng.bool() { Wound::Zero } else { Wound::Noise(rng.u64(..)) };
            targets.push(Target { devid, offset: offset / BURST * BURST, bytes: BURST, wound, what: What::Any });
        }
        _ => {
            let sector = any(rng, &subject.data);
            let wound = plain_wound(rng, SECTOR);
            let parity = sector.parity.iter().map(|place| target(place, SECTOR, wound, What::Any));
            targets.extend(parity);
            targets.extend(some_of(rng, &sector.copies, SECTOR, wound, What::Data));
        }
    }
}

fn choose_node(subject: &Subject, rng: &mut Rng, targets: &mut Vec<Target>, is_wanted: impl Fn(&NodePlaces) -> bool) {
    let wanted: Vec<&NodePlaces> = subject.nodes.iter().filter(|node| is_wanted(node)).collect();
    let wound = match rng.u32(..6) {
        0 => Wound::Stale,
        1 => Wound::Misplaced(copy_of(rng, subject.nodes.iter().map(|node| &node.copies[..]))),
        _ => plain_wound(rng, subject.node_bytes),
    };
    let node = *any(rng, &wanted);
    targets.extend(some_of(rng, &node.copies, subject.node_bytes, wound, What::Sealed));
}

fn plain_wound(rng: &mut Rng, bytes: u64) -> Wound {
    match rng.u32(..4) {
        0 => Wound::Zero,
        1 => Wound::Noise(rng.u64(..)),
        _ => Wound::Flip(rng.u64(..bytes)),
    }
}

fn target(place: &Place, bytes: u64, wound: Wound, what: What) -> Target {
    Target { devid: place.devid, offset: place.offset, bytes, wound, what }
}

/// One copy, all but one, or all of them.
fn some_of(rng: &mut Rng, copies: &[Place], bytes: u64, wound: Wound, what: What) -> Vec<Target> {
    let one = rng.usize(..copies.len());
    let chosen: Vec<&Place> = match rng.u32(..3) {
        0 => vec![&copies[one]],
        1 if copies.len() > 1 => {
            copies.iter().enumerate().filter(|(index, _)| *index != one).map(|(_, copy)| copy).collect()
        }
        _ => copies.iter().collect(),
    };
    chosen.into_iter().map(|place| target(place, bytes, wound, what)).collect()
}
