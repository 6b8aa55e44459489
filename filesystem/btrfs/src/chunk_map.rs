//! Where logical addresses are on devices, for every profile.
//!
//! A chunk is a range of logical addresses on some stripes, ranges of devices. Profiles with stripes cut the chunk into pieces of 64 KiB
//! and lay them in rows, one piece on each stripe or pair of stripes. A look-up answers for one piece at most, so what it says is
//! contiguous on each device.
//!
//! The map is a value: it grows while the chunk tree is read, and its users share one that does not change.

use std::collections::BTreeMap;
use std::ops::Bound;

use sealblock_btrfs_format::items::chunk::{Chunk, Profile, STRIPE_BYTES};
use smallvec::SmallVec;

use crate::parity::Role;

/// A place on a device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Place {
    /// The device's number.
    pub devid: u64,
    /// The byte on it.
    pub offset: u64,
}

/// Where the bytes from a logical address on are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Located {
    /// So many bytes are there, one after the other: at most as many as were asked for, and never more than there are up to the end of the
    /// piece, or of the chunk.
    pub bytes: u64,
    /// Every copy. With parity the only one.
    pub copies: SmallVec<[Place; 4]>,
    /// With parity the whole row: where each piece of it has the bytes that belong together, and which piece is the one that was asked for.
    pub row: Option<Row>,
}

impl Located {
    /// Where a part of the bytes is: `bytes` of them, which have to be there, from `offset` on.
    pub(crate) fn part(&self, offset: u64, bytes: u64) -> Located {
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
    /// Which of the data pieces was asked for.
    pub wanted: usize,
    /// The data pieces in their order, then P, then Q where there is one.
    pub pieces: SmallVec<[(Role, Place); 6]>,
}

/// Why there is no place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MapError {
    /// No chunk has the address.
    #[error("no chunk has the logical address {0}")]
    Unmapped(u64),
    /// A chunk lies over another one.
    #[error("the chunk at {logical} lies over the one at {other}")]
    Overlap {
        /// The new chunk.
        logical: u64,
        /// The one that is there.
        other: u64,
    },
    /// A chunk has flags, sizes or stripes that no chunk can have; a checked one never.
    #[error("the chunk at {0} is none: its flags, size or stripes contradict each other")]
    Impossible(u64),
}

/// A chunk, as much of it as places follow from.
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
    /// Adds the chunk at a logical address. The same one again, as the superblock and the chunk tree have those of the chunk tree,
    /// changes nothing.
    ///
    /// # Errors
    /// When it lies over another one, or is none.
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
        // The last one that begins before this one ends is the only one that can lie over it.
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

    /// Where the first of `bytes` bytes from a logical address on are. Asking again for the rest gives the rest.
    ///
    /// # Errors
    /// When no chunk has the address.
    pub fn locate(&self, logical: u64, bytes: u64) -> Result<Located, MapError> {
        let before = self.chunks.range(..=logical).next_back();
        let (start, chunk) = before.ok_or(MapError::Unmapped(logical))?;
        let offset = logical - start;
        if offset >= chunk.bytes {
            return Err(MapError::Unmapped(logical));
        }
        Ok(chunk.locate(offset, bytes.min(chunk.bytes - offset)))
    }

    /// The first address behind this one at which a chunk begins.
    pub fn next_chunk(&self, logical: u64) -> Option<u64> {
        self.chunks.range((Bound::Excluded(logical), Bound::Unbounded)).next().map(|(start, _)| *start)
    }

    /// Logical ranges that have a place, as first addresses and bytes.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.chunks.iter().map(|(logical, chunk)| (*logical, chunk.bytes))
    }

    /// Chunks.
    pub fn len(&self) -> usize {
        self.chunks.len()
    }

    /// Whether there is no chunk.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }
}

impl Mapped {
    /// Where bytes are that lie in this chunk.
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

    /// With parity each row begins one stripe further than the one before, and P and Q follow its data.
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

    /// A byte of a stripe; that it ends before the numbers do was seen when the chunk was added.
    fn at(&self, index: usize, offset: u64) -> Place {
        let stripe = self.stripes[index];
        Place { offset: stripe.offset + offset, ..stripe }
    }
}

/// Quotient and remainder by a number of stripes, which is never 0.
fn divide(piece: u64, by: usize) -> (u64, usize) {
    // A remainder is below a number of stripes, which has 16 bits.
    (piece / by as u64, (piece % by as u64) as usize)
}

#[cfg(test)]
mod tests;
