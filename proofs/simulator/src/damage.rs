//! Damage: to the data of one block, which must be found exactly, and to any sector, which must never be returned as
//! content.

use std::ops::Range;

use sealblock_runtime_memory::Slice;
use sealblock_units::Lba;

use crate::checker::{Checker, Content};
use crate::disk::Image;
use crate::random::Random;

/// The maximum extent of one fault, in bytes.
const RUN_BYTES: u64 = 64 << 10;

/// One damaged sector, and its earlier content.
#[derive(Debug)]
pub struct Damage {
    /// The block whose data were damaged.
    pub lba: Lba,
    sector: u64,
    good: Vec<u8>,
}

impl Damage {
    /// Changes one byte of a random block among `candidates`, if its content is certain and is on the disk exactly
    /// once.
    pub fn inflict(image: &mut Image, checker: &Checker, candidates: &[Lba], random: &Random) -> Option<Damage> {
        let stored: Vec<_> = candidates
            .iter()
            .filter_map(|lba| match checker.certain(*lba) {
                Some(Content::Version(version)) => Some((*lba, version)),
                _ => None,
            })
            .collect();
        if stored.is_empty() {
            return None;
        }
        let (lba, version) = *random.pick(&stored);
        let bytes = checker.patterns().block(lba, Content::Version(version));
        let sector_bytes = image.sector_bytes() as usize;
        let part = random.below((bytes.len() / sector_bytes) as u64) as usize;
        let good = bytes[part * sector_bytes..(part + 1) * sector_bytes].to_vec();
        let mut places = image.visible().filter(|(_, content)| content[..] == good[..]).map(|(sector, _)| sector);
        // A second copy is an abandoned physical block, and it is not visible here which of the two is in use.
        let (Some(sector), None) = (places.next(), places.next()) else { return None };
        drop(places);
        let mut bad = good.clone();
        let at = random.below(bad.len() as u64) as usize;
        // Every guard detects one changed byte. (The IP checksum only misses a word that changes from 0 to FFFFh or
        // back, and one byte is never a whole word.)
        bad[at] ^= random.between(1, 255) as u8;
        image.damage_sector(sector, &bad);
        Some(Damage { lba, sector, good })
    }

    /// Corrupts any sector with content, metadata or data: bit rot. Returns a description.
    ///
    /// `earlier` is an earlier state of the disk: a sector from there is like a lost write.
    pub fn bit_rot(image: &mut Image, earlier: &[(u64, Slice)], random: &Random) -> Option<String> {
        let sectors: Vec<u64> = image.visible().map(|(sector, _)| sector).collect();
        let sector = *sectors.get(random.below(sectors.len() as u64) as usize)?;
        let mut bytes = vec![0; image.sector_bytes() as usize];
        image.read_sector(sector, &mut bytes);
        let before = bytes.clone();
        let old = earlier.binary_search_by_key(&sector, |(sector, _)| *sector).ok().map(|found| &earlier[found].1);
        let how = match (random.below(4), old) {
            (0, _) => {
                bytes.fill(0);
                "zeroed"
            }
            (1, _) => {
                bytes.iter_mut().for_each(|byte| *byte = random.word() as u8);
                "overwritten"
            }
            (2, Some(old)) => {
                bytes.copy_from_slice(old);
                "put back to what it held earlier"
            }
            _ => {
                bytes[random.below(before.len() as u64) as usize] ^= 1 << random.below(8);
                "changed by one bit"
            }
        };
        if bytes == before {
            return None;
        }
        image.damage_sector(sector, &bytes);
        Some(format!("sector {sector} {how}"))
    }

    /// Corrupts one sector of one of these runs, or all of the run up to `RUN_BYTES`, but no sector that is `exposed`.
    /// Returns a description.
    ///
    /// `earlier` is an earlier state of the disk.
    pub fn corrupt(
        image: &mut Image,
        runs: &[Range<u64>],
        single_copy: &[u64],
        earlier: &[(u64, Slice)],
        random: &Random,
    ) -> Option<String> {
        let sectors = image.visible().map(|(sector, _)| sector);
        let of = |at: u64| runs.iter().find(|run| run.contains(&at)).map(|run| (at, run.clone()));
        let written: Vec<(u64, Range<u64>)> = sectors.filter_map(of).collect();
        if written.is_empty() {
            return None;
        }
        let (at, whole) = random.pick(&written).clone();
        let most = (RUN_BYTES / u64::from(image.sector_bytes())).min(whole.end - whole.start);
        let length = if random.chance(50) { 1 } else { most };
        let first = at.saturating_sub(random.below(length)).clamp(whole.start, whole.end - length);
        let run = first..first + length;
        if single_copy.iter().any(|sector| run.contains(sector)) {
            return None;
        }
        let how = random.below(3);
        for sector in run.clone() {
            let mut bytes = vec![0; image.sector_bytes() as usize];
            let old = earlier.binary_search_by_key(&sector, |(sector, _)| *sector).ok().map(|found| &earlier[found].1);
            match (how, old) {
                (0, Some(old)) => bytes.copy_from_slice(old),
                (0 | 1, _) => {}
                _ => bytes.iter_mut().for_each(|byte| *byte = random.word() as u8),
            }
            image.damage_sector(sector, &bytes);
        }
        let words = ["put back to what they held earlier", "zeroed", "overwritten"][how as usize];
        Some(format!("sectors {} to {} of metadata {words}", run.start, run.end - 1))
    }

    /// Replaces these runs of sectors by those of another disk, or by earlier ones of this disk; by zeroes where that
    /// one has none.
    pub fn transplant(image: &mut Image, runs: &[Range<u64>], from: &Image) {
        for sector in runs.iter().flat_map(Range::clone) {
            let mut bytes = vec![0; image.sector_bytes() as usize];
            from.read_sector(sector, &mut bytes);
            image.damage_sector(sector, &bytes);
        }
    }

    /// Restores the sector.
    pub fn repair(self, image: &mut Image) {
        image.damage_sector(self.sector, &self.good);
    }
}
