//! Reads a logical range from the first copy that passes its check.
//!
//! Each piece of a range has *mirrors*: its copies, and with parity the ways to restore it from the rest of its row.
//! They are tried until one passes the caller's check, those on devices with the newest transaction first. Mirrors that
//! failed are returned with the data, so that a report can name them.
//!
//! Invariants:
//! - Returned data passed the check. Without a checksum ([`Check::None`]), and where tags prove nothing ([`Check::Tags`]),
//!   any data that the device returns pass, but copies on a stale device are not used, because they may be older than the
//!   last write.
//! - A piece that is restored from parity is checked like any other, because a damaged source gives a wrong piece.

use std::rc::Rc;

use sealblock_btrfs_format::checksum::{Checksum, ChecksumMismatch, ChecksumType};
use sealblock_btrfs_format::node::Header;
use sealblock_btrfs_format::superblock::Geometry;
use sealblock_runtime_memory::{Buffer, Slice};
use zerocopy::FromBytes;

use crate::chunk_map::{ChunkMap, Located, Place, Row};
use crate::devices::{Device, DeviceSet};
use crate::error::{BadCopy, CopyFault, FsError, Lost};
use crate::parity::{self, Role};
use crate::tags::{TagMismatch, TagState, WrittenIn};

/// The maximum bytes of one request to a device.
pub const MAX_READ_BYTES: u64 = 1 << 20;

/// Devices, and the map of logical addresses. Whoever changes the chunks makes a new one, with the same devices.
#[derive(Clone)]
pub struct Storage {
    /// The devices.
    pub devices: Rc<DeviceSet>,
    /// The places of logical addresses.
    pub map: Rc<ChunkMap>,
}

/// The check of data.
#[derive(Clone, Copy)]
pub enum Check<'a> {
    /// One checksum for each sector, in order, of the filesystem's type.
    Sums(&'a [u8]),
    /// No checksums: the tags of the blocks are checked, as far as they prove anything.
    Tags(WrittenIn),
    /// No check.
    None,
}

/// The transaction of a node, by whose tag its blocks are told from others in a filesystem without checksums.
#[derive(Clone, Copy, Debug)]
pub enum NodeWritten {
    /// What refers to the node has it.
    In(u64),
    /// Nothing refers to the node, which was searched for: it has it in its header.
    AsItSays,
}

/// Data, and the copies that failed before it was found.
pub struct Verified {
    /// The data.
    pub data: Slice,
    /// The copies that failed.
    pub bad: Vec<BadCopy>,
    /// True if all of it has proven to be what was written: by checksums, or by tags.
    pub is_attested: bool,
}

impl Storage {
    /// These devices and chunks.
    pub fn new(devices: Rc<DeviceSet>, map: ChunkMap) -> Storage {
        Storage { devices, map: Rc::new(map) }
    }

    /// The node size, sector size and checksum type.
    pub fn geometry(&self) -> &Geometry {
        self.devices.geometry()
    }

    /// The number of mirrors of a piece.
    pub fn mirrors(located: &Located) -> usize {
        match &located.row {
            None => located.copies.len(),
            // The piece itself; the piece restored with P, and with Q; and with both, once for each other piece that is
            // left out.
            Some(row) => match parities(row) {
                1 => 2,
                _ => 3 + data_pieces(row) - 1,
            },
        }
    }

    /// Reads a piece from one of its mirrors, counted from 0, unchecked.
    ///
    /// # Errors
    /// If it cannot be read; the error has the reason.
    pub async fn read_mirror(&self, located: &Located, mirror: usize) -> Result<Slice, CopyFault> {
        match (&located.row, mirror) {
            (Some(row), 1..) => self.restore(row, located.bytes, mirror).await,
            _ => self.devices.read(located.copies[mirror], located.bytes).await,
        }
    }

    /// Restores the requested piece of a row. Mirror 1 uses P, mirror 2 uses Q, and each later one uses both and leaves
    /// out one other piece.
    async fn restore(&self, row: &Row, bytes: u64, mirror: usize) -> Result<Slice, CopyFault> {
        let other = |index: usize| if index < row.wanted { index } else { index + 1 };
        let without = mirror.checked_sub(3).map(other);
        let (mut data, mut p, mut q) = (vec![None; data_pieces(row)], None, None);
        for (role, place) in &row.pieces {
            let is_used = match role {
                Role::Data(index) => *index != row.wanted && Some(*index) != without,
                Role::P => mirror != 2,
                Role::Q => mirror != 1,
            };
            // A missing piece may not be needed; the end of this function checks whether there are enough.
            let piece = if is_used { self.devices.read(*place, bytes).await.ok() } else { None };
            match role {
                Role::Data(index) => data[*index] = piece,
                Role::P => p = piece,
                Role::Q => q = piece,
            }
        }
        let data: Vec<Option<&[u8]>> = data.iter().map(Option::as_deref).collect();
        let restored = parity::restore(row.wanted, &data, p.as_deref(), q.as_deref()).map_err(CopyFault::Parity)?;
        Ok(Slice::copy_from(&restored))
    }

    /// The order in which the mirrors of a piece are tried: those on devices with the newest transaction first.
    fn order(&self, located: &Located) -> impl Iterator<Item = usize> + use<'_> {
        let is_stale = |mirror: &usize| {
            let place = located.copies.get(*mirror);
            place.and_then(|place| self.devices.get(place.devid)).is_some_and(Device::may_lack)
        };
        let (stale, fresh): (Vec<usize>, Vec<usize>) = (0..Storage::mirrors(located)).partition(is_stale);
        fresh.into_iter().chain(stale)
    }

    /// True if a mirror needs a device that missed transactions, or one that missed a write while another copy did not.
    fn is_stale(&self, located: &Located, mirror: usize) -> bool {
        let may_lack = |devid: u64| self.devices.get(devid).is_some_and(Device::may_lack);
        let has_other = located.copies.iter().any(|place| !may_lack(place.devid));
        let stale = |devid: u64| {
            let device = self.devices.get(devid);
            device.is_some_and(|device| device.is_stale || has_other && device.may_lack())
        };
        match (&located.row, mirror) {
            (Some(row), 1..) => row.pieces.iter().any(|(_, place)| stale(place.devid)),
            _ => located.copies.get(mirror).is_some_and(|place| stale(place.devid)),
        }
    }

    pub(crate) fn bad_copy(&self, logical: u64, located: &Located, mirror: usize, fault: CopyFault) -> BadCopy {
        let place = located.copies.get(mirror).or(located.copies.first()).copied();
        let place = place.expect("a piece that was located has a place");
        BadCopy { logical: Some(logical), place, mirror: mirror + 1, fault }
    }

    /// Reads a node from the first mirror that passes the check, and whose blocks are of its transaction as far as tags are
    /// to show that. Mirrors without proof come last. For a node over several pieces, all pieces come from the same mirror.
    ///
    /// # Errors
    /// If no mirror passes, or the range has no place.
    pub async fn read_whole(
        &self,
        (logical, written): (u64, NodeWritten),
        check: impl Fn(&[u8]) -> Result<(), CopyFault>,
    ) -> Result<Verified, FsError> {
        let bytes = u64::from(self.geometry().node_bytes);
        let pieces = self.pieces(logical, bytes)?;
        let (_, first) = &pieces[0];
        let proves = |mirror: &usize| first.copies.get(*mirror).is_some_and(|at| self.devices.proves_nodes(at.devid));
        let mut order: Vec<usize> = self.order(first).collect();
        if self.devices.nodes_need_tags() {
            order.sort_by_key(|mirror| !proves(mirror));
        }
        let mut bad = Vec::new();
        for mirror in order {
            match self.read_node(&pieces, mirror, written).await.and_then(|read| check(&read.0).map(|()| read)) {
                Ok((data, is_attested)) => return Ok(Verified { data, bad, is_attested }),
                Err(fault) => bad.push(self.bad_copy(logical, first, mirror, fault)),
            }
        }
        Err(FsError::Lost(Box::new(Lost { logical, bytes, copies: bad })))
    }

    /// The pieces of a range, none longer than one request.
    ///
    /// # Errors
    /// If a part of it has no place.
    pub fn pieces(&self, logical: u64, bytes: u64) -> Result<Vec<(u64, Located)>, FsError> {
        let (mut pieces, mut at, mut left) = (Vec::new(), logical, bytes);
        while left > 0 {
            let located = self.map.locate(at, left.min(MAX_READ_BYTES))?;
            let length = located.bytes;
            pieces.push((at, located));
            // A place that was found lies below the highest address.
            (at, left) = (at + length, left - length);
        }
        Ok(pieces)
    }

    /// Reads a copy of a node. Returns also true if it is shown to be the one that was written, once it has passed the
    /// caller's check: by its checksum, or by the tags of its blocks, which are checked here.
    pub(crate) async fn read_node(
        &self,
        pieces: &[(u64, Located)],
        mirror: usize,
        written: NodeWritten,
    ) -> Result<(Slice, bool), CopyFault> {
        if !self.devices.nodes_need_tags() {
            return Ok((self.read_pieces(pieces, mirror).await?, true));
        }
        let (mut read, mut parts) = (Vec::with_capacity(pieces.len()), Vec::with_capacity(pieces.len()));
        for (_, piece) in pieces {
            // Chunks with parity are refused in such a filesystem, so a mirror is a copy.
            let place = *piece.copies.get(mirror % piece.copies.len().max(1)).ok_or(CopyFault::NoBlock)?;
            let demand = match written {
                NodeWritten::In(generation) => self.devices.node_demand(place.devid, generation),
                NodeWritten::AsItSays => None,
            };
            let (blocks, _) = self.devices.read_demanded(place, piece.bytes, demand).await?;
            parts.push(blocks.joined_data());
            read.push((place.devid, blocks));
        }
        let data = match <[Slice; 1]>::try_from(parts) {
            Ok([only]) => only,
            Err(parts) => Slice::copy_from(&parts.iter().map(|part| &part[..]).collect::<Vec<_>>().concat()),
        };
        let generation = match written {
            NodeWritten::In(generation) => generation,
            NodeWritten::AsItSays => match Header::ref_from_prefix(&data) {
                Ok((header, _)) => header.generation.get(),
                Err(_) => return Err(CopyFault::NoBlock),
            },
        };
        let mut is_attested = true;
        for (devid, blocks) in read {
            is_attested &= match self.devices.node_demand(devid, generation) {
                Some(demand) => demand.check(&blocks).map_err(CopyFault::Tag)?,
                None => false,
            };
        }
        Ok((data, is_attested))
    }

    async fn read_pieces(&self, pieces: &[(u64, Located)], mirror: usize) -> Result<Slice, CopyFault> {
        if let [(_, piece)] = pieces {
            return self.read_mirror(piece, mirror).await;
        }
        let mut data = Vec::new();
        for (_, piece) in pieces {
            data.extend_from_slice(&self.read_mirror(piece, mirror % Storage::mirrors(piece)).await?);
        }
        Ok(Slice::copy_from(&data))
    }

    /// Reads data of whole sectors. Each sector comes from a mirror in which it passes.
    ///
    /// # Errors
    /// If a sector passes in no mirror (the first such), or the range has no place.
    pub async fn read_data(&self, logical: u64, bytes: u64, check: Check<'_>) -> Result<Verified, FsError> {
        let pieces = self.pieces(logical, bytes)?;
        let mut all = Verified { data: Slice::empty(), bad: Vec::new(), is_attested: true };
        let mut joined = if pieces.len() > 1 { Some(Buffer::zeroed(bytes as usize)) } else { None };
        for (at, located) in &pieces {
            let offset = (at - logical) as usize;
            let check = check.part(offset, located.bytes as usize, self.geometry());
            let read = self.read_piece(*at, located, check).await?;
            all.bad.extend(read.bad);
            all.is_attested &= read.is_attested;
            match &mut joined {
                Some(joined) => joined[offset..][..read.data.len()].copy_from_slice(&read.data),
                None => all.data = read.data,
            }
        }
        if let Some(joined) = joined {
            all.data = joined.freeze();
        }
        Ok(all)
    }

    async fn read_piece(&self, logical: u64, located: &Located, check: Check<'_>) -> Result<Verified, FsError> {
        let lost = |copies| FsError::Lost(Box::new(Lost { logical, bytes: located.bytes, copies }));
        let mut bad = Vec::new();
        for mirror in self.order(located) {
            let fault = match self.read_checkable(located, mirror, check).await {
                Ok((data, is_attested)) => match check.first_bad(&data, self.geometry()) {
                    None if is_attested => return Ok(Verified { data, bad, is_attested }),
                    None => match self.attested_other(located, mirror, check).await {
                        Other::Attested(found) if found[..] == data[..] => {
                            return Ok(Verified { data: found, bad, is_attested: true });
                        }
                        Other::None => return Ok(Verified { data, bad, is_attested }),
                        Other::Attested(_) | Other::InPart => {
                            return self.read_sectors(logical, located, check, bad).await;
                        }
                    },
                    Some(_) => return self.read_sectors(logical, located, check, bad).await,
                },
                // If a device cannot read a whole piece, it may still be able to read most of its sectors.
                Err(CopyFault::Unreadable(_) | CopyFault::Tag(_))
                    if located.bytes > u64::from(self.geometry().sector_bytes) =>
                {
                    return self.read_sectors(logical, located, check, bad).await;
                }
                Err(fault) => fault,
            };
            bad.push(self.bad_copy(logical, located, mirror, fault));
        }
        Err(lost(bad))
    }

    /// Reads a copy of data. Returns also true if the check shows, once it is passed, that they are what was written.
    async fn read_checkable(
        &self,
        located: &Located,
        mirror: usize,
        check: Check<'_>,
    ) -> Result<(Slice, bool), CopyFault> {
        if matches!(check, Check::None | Check::Tags(_)) && self.is_stale(located, mirror) {
            return Err(CopyFault::Stale);
        }
        match (check, &located.row) {
            // What is restored from other pieces has no tags.
            (Check::Tags(written), None) => {
                self.devices.read_tagged(located.copies[mirror], located.bytes, written).await
            }
            _ => Ok((self.read_mirror(located, mirror).await?, matches!(check, Check::Sums(_)))),
        }
    }

    /// Another mirror than this one, which passed without proof, whose tags prove that it is what was written. Data that
    /// are written in place may be newer in a copy without tags, so no copy of them counts more than another.
    pub(crate) async fn attested_other(&self, located: &Located, mirror: usize, check: Check<'_>) -> Other {
        let Check::Tags(written) = check else { return Other::None };
        if written.is_in_place || located.row.is_some() {
            return Other::None;
        }
        let mut is_in_part = false;
        let is_demanded = |place: &Place| self.devices.demand(place.devid, written).is_some();
        for other in self.order(located).filter(|other| *other != mirror && is_demanded(&located.copies[*other])) {
            if self.is_stale(located, other) {
                continue;
            }
            match self.devices.read_with_tags(located.copies[other], located.bytes, written).await {
                Ok((data, true, _)) => return Other::Attested(data),
                Ok((_, false, TagState::Untagged)) => {}
                // Some of its sectors may be attested.
                Ok(_) | Err(_) => is_in_part = located.bytes > u64::from(self.geometry().sector_bytes),
            }
        }
        if is_in_part { Other::InPart } else { Other::None }
    }

    /// Reads a piece sector by sector, each from the first mirror in which it passes.
    async fn read_sectors(
        &self,
        logical: u64,
        located: &Located,
        check: Check<'_>,
        mut bad: Vec<BadCopy>,
    ) -> Result<Verified, FsError> {
        let sector = self.geometry().sector_bytes as usize;
        let (mut data, mut is_attested) = (Buffer::zeroed(located.bytes as usize), true);
        for (index, out) in data.chunks_mut(sector).enumerate() {
            let at = index * sector;
            let part = located.part(at as u64, out.len() as u64);
            let check = check.part(at, out.len(), self.geometry());
            let (logical, mut copies) = (logical + at as u64, Vec::new());
            let mut is_good = false;
            for mirror in self.order(&part) {
                let fault = match self.read_checkable(&part, mirror, check).await {
                    Ok((read, is_shown)) => match check.first_bad(&read, self.geometry()) {
                        None => {
                            let other = match is_shown {
                                true => Other::None,
                                false => self.attested_other(&part, mirror, check).await,
                            };
                            is_good = true;
                            let Other::Attested(found) = other else {
                                out.copy_from_slice(&read);
                                is_attested &= is_shown;
                                break;
                            };
                            out.copy_from_slice(&found);
                            if let (Check::Tags(written), false) = (check, found[..] == read[..]) {
                                let fault = CopyFault::Tag(TagMismatch::untagged(written.generation));
                                copies.push(self.bad_copy(logical, &part, mirror, fault));
                            }
                            break;
                        }
                        Some(mismatch) => CopyFault::Checksum(mismatch),
                    },
                    Err(fault) => fault,
                };
                copies.push(self.bad_copy(logical, &part, mirror, fault));
            }
            if !is_good {
                return Err(FsError::Lost(Box::new(Lost { logical, bytes: out.len() as u64, copies })));
            }
            bad.extend(copies);
        }
        Ok(Verified { data: data.freeze(), bad, is_attested })
    }
}

/// What the other mirrors of data show whose own tags show nothing.
pub(crate) enum Other {
    /// These are the data that were written.
    Attested(Slice),
    /// Some sectors may be shown.
    InPart,
    /// Nothing.
    None,
}

impl Check<'_> {
    /// The part of the check that applies to a part of the data.
    pub(crate) fn part(self, offset: usize, bytes: usize, geometry: &Geometry) -> Self {
        match self {
            Check::None | Check::Tags(_) => self,
            Check::Sums(sums) => {
                let (sector, sum) = (geometry.sector_bytes as usize, geometry.checksum.bytes());
                Check::Sums(&sums[offset / sector * sum..(offset + bytes).div_ceil(sector) * sum])
            }
        }
    }

    /// The fault of the first sector that fails.
    pub(crate) fn first_bad(self, data: &[u8], geometry: &Geometry) -> Option<ChecksumMismatch> {
        match self {
            Check::None | Check::Tags(_) => None,
            Check::Sums(sums) => {
                let sectors = data.chunks(geometry.sector_bytes as usize);
                sectors
                    .zip(sums.chunks(geometry.checksum.bytes()))
                    .find_map(|(data, sum)| mismatch(geometry.checksum, data, sum))
            }
        }
    }
}

/// The stored and the computed checksum of a sector, if they differ.
pub(crate) fn mismatch(kind: ChecksumType, data: &[u8], stored: &[u8]) -> Option<ChecksumMismatch> {
    let computed = kind.compute(data);
    (computed.as_bytes() != stored).then(|| ChecksumMismatch { stored: Checksum::stored(stored), computed })
}

fn parities(row: &Row) -> usize {
    row.pieces.len() - data_pieces(row)
}

fn data_pieces(row: &Row) -> usize {
    row.pieces.iter().filter(|(role, _)| matches!(role, Role::Data(_))).count()
}
