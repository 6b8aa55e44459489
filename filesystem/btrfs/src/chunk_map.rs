//! Maps logical addresses to places on devices, for every profile.
//!
//! A chunk maps a range of logical addresses to stripes, which are ranges of devices. Profiles with stripes divide the
//! chunk into pieces of 64 KiB and arrange them in rows, one piece on each stripe or pair of stripes. A look-up returns
//! one piece at most, so its result is contiguous on each device.
//!
//! The map grows while the chunk tree is read. Readers share one that does not change; a writer that adds or removes a
//! chunk makes a new one.

use std::collections::BTreeMap;
use std::ops::Bound;

use sealblock_btrfs_format::items::chunk::{Chunk, Profile, STRIPE_BYTES};
use sealblock_btrfs_format::superblock::{COPY_OFFSETS, SUPERBLOCK_BYTES};
use smallvec::SmallVec;

use crate::parity::Role;

/// A place on a device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Place {
    /// The device's number.
    pub devid: u64,
    /// The byte offset on the device.
    pub offset: u64,
}

/// The places of the bytes from a logical address on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Located {
    /// The number of contiguous bytes: at most the number requested, and at most up to the end of the piece or of the
    /// chunk.
    pub bytes: u64,
    /// All copies. With parity there is only one.
    pub copies: SmallVec<[Place; 4]>,
    /// With parity, the whole row: the places of the bytes at the same offset in each piece, and the index of the
    /// requested piece.
    pub row: Option<Row>,
}

impl Located {
    /// The place of `bytes` bytes from `offset` on, which must lie within this.
    pub fn part(&self, offset: u64, bytes: u64) -> Located {
        debug_assert!(offset + bytes <= self.bytes);
        let at = |place: &Place| Place { offset: place.offset + offset, ..*place };
        let row = self.row.as_ref().map(|row| Row {
            wanted: row.wanted,
            pieces: row.pieces.iter().map(|(role, place)| (*role, at(place))).collect(),
        });
        Located { bytes, copies: self.copies.iter().map(at).collect(), row }
    }
}

/// The pieces of a row with parity.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Row {
    /// The index of the requested data piece.
    pub wanted: usize,
    /// The data pieces in order, then P, then Q if there is one.
    pub pieces: SmallVec<[(Role, Place); 6]>,
}

/// Why an address has no place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MapError {
    /// No chunk has the address.
    #[error("no chunk has the logical address {0}")]
    Unmapped(u64),
    /// Two chunks overlap.
    #[error("the chunk at {logical} lies over the one at {other}")]
    Overlap {
        /// The new chunk.
        logical: u64,
        /// The existing chunk.
        other: u64,
    },
    /// A chunk has invalid flags, sizes or stripes; this never happens with a checked chunk.
    #[error("the chunk at {0} is none: its flags, size or stripes contradict each other")]
    Impossible(u64),
}

/// The parts of a chunk from which places follow.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Mapped {
    bytes: u64,
    profile: Profile,
    stripes: SmallVec<[Place; 4]>,
}

/// All chunks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ChunkMap {
    chunks: BTreeMap<u64, Mapped>,
}

impl ChunkMap {
    /// Adds the chunk at a logical address. Adding the same chunk again changes nothing; system chunks are both in the
    /// superblock and in the chunk tree.
    ///
    /// # Errors
    /// If it overlaps another chunk, or is invalid.
    pub fn add(&mut self, logical: u64, chunk: &Chunk) -> Result<(), MapError> {
        let bytes = chunk.head.length.get();
        let impossible = MapError::Impossible(logical);
        let profile = chunk.flags().profile().ok_or(impossible)?;
        let count = u16::try_from(chunk.stripes.len()).map_err(|_| impossible)?;
        let end =
            logical.checked_add(bytes).filter(|_| bytes > 0 && profile.allows_stripes(count)).ok_or(impossible)?;
        let on_device = bytes.div_ceil(u64::from(profile.data_stripes(count))).checked_next_multiple_of(STRIPE_BYTES);
        let place = |stripe: &sealblock_btrfs_format::items::chunk::Stripe| {
            let offset = stripe.offset.get();
            offset.checked_add(on_device?).map(|_| Place { devid: stripe.devid.get(), offset })
        };
        let stripes = chunk.stripes.iter().map(place).collect::<Option<_>>().ok_or(impossible)?;
        let mapped = Mapped { bytes, profile, stripes };
        // Only the last chunk that begins before the end of this one can overlap it.
        if let Some((other, there)) = self.chunks.range(..end).next_back() {
            if (*other, there) == (logical, &mapped) {
                return Ok(());
            }
            if other + there.bytes > logical {
                return Err(MapError::Overlap { logical, other: *other });
            }
        }
        self.chunks.insert(logical, mapped);
        Ok(())
    }

    /// Removes the chunk at a logical address, after which nothing there has a place. Returns false if there is none.
    pub fn remove(&mut self, logical: u64) -> bool {
        self.chunks.remove(&logical).is_some()
    }

    /// The stripes of the chunk at a logical address, in their order: where each begins, and its bytes.
    pub fn stripes(&self, logical: u64) -> Vec<(Place, u64)> {
        let Some(chunk) = self.chunks.get(&logical) else { return Vec::new() };
        // A chunk that was added has stripes, and as many as its profile allows.
        let data = chunk.profile.data_stripes(chunk.stripes.len() as u16).max(1);
        let bytes = chunk.bytes.div_ceil(data.into()).next_multiple_of(STRIPE_BYTES);
        chunk.stripes.iter().map(|place| (*place, bytes)).collect()
    }

    /// The places of the first of `bytes` bytes from a logical address on. The caller calls it again for the rest.
    ///
    /// # Errors
    /// If no chunk has the address.
    pub fn locate(&self, logical: u64, bytes: u64) -> Result<Located, MapError> {
        let before = self.chunks.range(..=logical).next_back();
        let (start, chunk) = before.ok_or(MapError::Unmapped(logical))?;
        let offset = logical - start;
        if offset >= chunk.bytes {
            return Err(MapError::Unmapped(logical));
        }
        Ok(chunk.locate(offset, bytes.min(chunk.bytes - offset)))
    }

    /// The start of the next chunk after this address.
    pub fn next_chunk(&self, logical: u64) -> Option<u64> {
        self.chunks.range((Bound::Excluded(logical), Bound::Unbounded)).next().map(|(start, _)| *start)
    }

    /// The logical ranges of all chunks, as first addresses and bytes.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.chunks.iter().map(|(logical, chunk)| (*logical, chunk.bytes))
    }

    /// The stripe-sized ranges of a chunk, as first addresses and bytes, in which copies of superblocks lie on its
    /// devices. Nothing else may be there. A chunk with parity has none here, as its ranges are not written.
    pub fn superblock_ranges(&self, logical: u64) -> Vec<(u64, u64)> {
        let Some(chunk) = self.chunks.get(&logical) else { return Vec::new() };
        let mut ranges: Vec<(u64, u64)> = (0..chunk.stripes.len())
            .flat_map(|stripe| COPY_OFFSETS.iter().map(move |offset| (stripe, *offset)))
            // A device may begin its stripe anywhere, so the copy may lie across two pieces.
            .flat_map(|(stripe, offset)| [(stripe, offset), (stripe, offset + SUPERBLOCK_BYTES as u64 - 1)])
            .filter_map(|(stripe, offset)| chunk.offset_of(stripe, offset))
            .map(|offset| (logical + offset, STRIPE_BYTES.min(chunk.bytes - offset)))
            .collect();
        ranges.sort_unstable();
        ranges.dedup();
        ranges
    }

    /// The flags' profile of the chunk at a logical address, if one begins there.
    pub fn profile(&self, logical: u64) -> Option<Profile> {
        self.chunks.get(&logical).map(|chunk| chunk.profile)
    }

    /// True if each piece of each chunk has a copy on a device that is not lost.
    pub fn survives_without(&self, is_lost: impl Fn(u64) -> bool) -> bool {
        let survives = |chunk: &Mapped| {
            let copies = match chunk.profile {
                Profile::Single | Profile::Dup | Profile::Raid1 | Profile::Raid1C3 | Profile::Raid1C4 => {
                    chunk.stripes.len()
                }
                Profile::Raid10 => 2,
                // Parity is not counted on here, as it is not written.
                Profile::Raid0 | Profile::Raid5 | Profile::Raid6 => 1,
            };
            chunk.stripes.chunks(copies.max(1)).all(|copies| copies.iter().any(|place| !is_lost(place.devid)))
        };
        self.chunks.values().all(survives)
    }

    /// Chunks.
    pub fn len(&self) -> usize {
        self.chunks.len()
    }

    /// True if there is no chunk.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }
}

impl Mapped {
    /// The places of bytes of this chunk.
    fn locate(&self, offset: u64, bytes: u64) -> Located {
        let count = self.stripes.len();
        let (piece, within) = (offset / STRIPE_BYTES, offset % STRIPE_BYTES);
        let of_piece = bytes.min(STRIPE_BYTES - within);
        let plain = |bytes, copies| Located { bytes, copies, row: None };
        match self.profile {
            Profile::Single | Profile::Dup | Profile::Raid1 | Profile::Raid1C3 | Profile::Raid1C4 => {
                plain(bytes, (0..count).map(|index| self.at(index, offset)).collect())
            }
            Profile::Raid0 => {
                let (row, index) = divide(piece, count);
                plain(of_piece, SmallVec::from_iter([self.at(index, row * STRIPE_BYTES + within)]))
            }
            Profile::Raid10 => {
                let (row, pair) = divide(piece, count / 2);
                let pair = [2 * pair, 2 * pair + 1];
                plain(of_piece, pair.into_iter().map(|index| self.at(index, row * STRIPE_BYTES + within)).collect())
            }
            Profile::Raid5 => self.locate_in_row(piece, within, of_piece, 1),
            Profile::Raid6 => self.locate_in_row(piece, within, of_piece, 2),
        }
    }

    /// The offset in the chunk of the piece that has a byte of a device in this stripe; `None` with parity, or if the
    /// byte is not in it.
    fn offset_of(&self, stripe: usize, device_offset: u64) -> Option<u64> {
        let count = self.stripes.len() as u64;
        let (index, data) = match self.profile {
            Profile::Single | Profile::Dup | Profile::Raid1 | Profile::Raid1C3 | Profile::Raid1C4 => (0, 1),
            Profile::Raid0 => (stripe as u64, count),
            Profile::Raid10 => (stripe as u64 / 2, count / 2),
            Profile::Raid5 | Profile::Raid6 => return None,
        };
        let row = device_offset.checked_sub(self.stripes[stripe].offset)? / STRIPE_BYTES;
        let offset = row.checked_mul(data)?.checked_add(index)?.checked_mul(STRIPE_BYTES)?;
        (offset < self.bytes).then_some(offset)
    }

    /// With parity, each row begins one stripe later than the previous row, and P and Q follow the data.
    fn locate_in_row(&self, piece: u64, within: u64, bytes: u64, parities: usize) -> Located {
        let (count, data) = (self.stripes.len(), self.stripes.len() - parities);
        let (row, wanted) = divide(piece, data);
        let first = divide(row, count).1;
        let pieces = (0..count).map(|position| {
            let role = match position.checked_sub(data) {
                None => Role::Data(position),
                Some(0) => Role::P,
                Some(_) => Role::Q,
            };
            (role, self.at((first + position) % count, row * STRIPE_BYTES + within))
        });
        let pieces: SmallVec<[(Role, Place); 6]> = pieces.collect();
        Located { bytes, copies: SmallVec::from_iter([pieces[wanted].1]), row: Some(Row { wanted, pieces }) }
    }

    /// The offset of a byte of a stripe; it cannot overflow, as was checked when the chunk was added.
    fn at(&self, index: usize, offset: u64) -> Place {
        let stripe = self.stripes[index];
        Place { offset: stripe.offset + offset, ..stripe }
    }
}

/// Quotient and remainder by a number of stripes, which is never 0.
fn divide(piece: u64, by: usize) -> (u64, usize) {
    // A remainder is smaller than the number of stripes, which has 16 bits.
    (piece / by as u64, (piece % by as u64) as usize)
}

#[cfg(test)]
mod tests;
