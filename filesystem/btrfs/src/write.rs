//! Writes to the devices of a filesystem: to every copy of a logical range, and the superblocks.
//!
//! Invariants:
//! - A write goes to every copy. [`Storage::write`] and [`Storage::write_zeroes`] return which copies failed, and do not
//!   decide whether the others are enough.
//! - A Flush covers the writes that completed before it started, so [`DeviceSet::flush`] is called when all writes of a
//!   transaction have completed.
//! - Of the superblocks, the first copies are written to all devices before any other copy ([`DeviceSet::write_supers`]).
//!   Linux mounts by the first copy alone.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use futures_util::future::join_all;
use futures_util::stream::{self, StreamExt};
use sealblock_block::{Device as _, Durability, Request, WriteData};
use sealblock_btrfs_format::items::device::DevItem;
use sealblock_btrfs_format::node::Header;
use sealblock_btrfs_format::superblock::{SUPERBLOCK_BYTES, Superblock, copy_offsets};
use sealblock_integrity::{Sealed, Unsealed};
use sealblock_runtime_memory::Slice;
use zerocopy::{FromBytes, IntoBytes};

use crate::chunk_map::{Located, Place};
use crate::devices::DeviceSet;
use crate::error::{BadCopy, CopyFault, FsError};
use crate::replicas::{MAX_READ_BYTES, Storage};
use crate::superblocks::extent_of;
use crate::tags::tags_of;

/// The number of requests that are in flight for one write.
const IN_FLIGHT: usize = 64;
/// The most bytes of one WriteZeroes, so that a device which writes the zeroes itself does not take long.
const MAX_ZERO_BYTES: u64 = 64 << 20;
/// The number of extents of one Discard.
const DISCARDED_AT_ONCE: usize = 64;

impl Storage {
    /// The transaction whose tag the blocks of a node get, and of all nodes that are written with it: its own, in a
    /// filesystem without checksums.
    pub fn node_tag(&self, node: &[u8]) -> Option<u64> {
        let (header, _) = Header::ref_from_prefix(node).ok().filter(|_| self.devices.nodes_need_tags())?;
        Some(header.generation.get())
    }

    /// Writes whole sectors to every copy of a logical range. Data and nodes without checksums get the tags of a transaction.
    /// Returns the copies that failed.
    ///
    /// # Errors
    /// If the range has no place, or is in a profile with parity, which is not written.
    pub async fn write(&self, logical: u64, data: &Slice, generation: Option<u64>) -> Result<Vec<BadCopy>, FsError> {
        let mut writes = Vec::new();
        for (at, located) in self.pieces(logical, data.len() as u64)? {
            if located.row.is_some() {
                return Err(FsError::NotWritable(format!("the chunk of the address {at} has parity")));
            }
            let start = (at - logical) as usize;
            let piece = data.slice(start..start + located.bytes as usize);
            writes.extend((0..located.copies.len()).map(|mirror| (at, located.clone(), mirror, piece.clone())));
        }
        let write = |(at, located, mirror, piece): (u64, Located, usize, Slice)| async move {
            let written = self.devices.write_tagged(located.copies[mirror], piece, generation).await;
            written.err().map(|fault| self.bad_copy(at, &located, mirror, fault))
        };
        // Most writes are one request.
        let writes = match <[_; 1]>::try_from(writes) {
            Ok([only]) => return Ok(write(only).await.into_iter().collect()),
            Err(writes) => writes,
        };
        let failed = stream::iter(writes).map(write).buffer_unordered(IN_FLIGHT);
        Ok(failed.filter_map(|bad| async { bad }).collect().await)
    }
}

/// Bytes of a device that become zeroes in one request, and the pieces of a logical range that they are.
struct ZeroRun {
    place: Place,
    bytes: u64,
    pieces: Vec<(u64, Located, usize)>,
}

impl Storage {
    /// Makes whole sectors of a logical range zeroes in every copy; the devices may deallocate their blocks. Returns the
    /// copies that failed.
    ///
    /// # Errors
    /// If the range has no place, or is in a profile with parity, which is not written.
    pub async fn write_zeroes(&self, logical: u64, bytes: u64) -> Result<Vec<BadCopy>, FsError> {
        let zero = |run: ZeroRun| async move {
            let Err(fault) = self.devices.write_zeroes(run.place, run.bytes).await else { return Vec::new() };
            let bad =
                |(at, located, mirror): &(u64, Located, usize)| self.bad_copy(*at, located, *mirror, fault.clone());
            run.pieces.iter().map(bad).collect()
        };
        let failed = stream::iter(self.zero_runs(logical, bytes)?).map(zero).buffer_unordered(IN_FLIGHT);
        Ok(failed.concat().await)
    }

    /// The pieces of a range in all copies, joined where they touch each other on a device.
    fn zero_runs(&self, logical: u64, bytes: u64) -> Result<Vec<ZeroRun>, FsError> {
        let (mut runs, mut at, mut left) = (Vec::<ZeroRun>::new(), logical, bytes);
        // Where runs end, and which they are.
        let mut ends: HashMap<(u64, u64), usize> = HashMap::new();
        while left > 0 {
            let located = self.map.locate(at, left.min(MAX_ZERO_BYTES))?;
            if located.row.is_some() {
                return Err(FsError::NotWritable(format!("the chunk of the address {at} has parity")));
            }
            let length = located.bytes;
            for (mirror, place) in located.copies.iter().enumerate() {
                let before = ends.remove(&(place.devid, place.offset));
                let index = before.filter(|index| runs[*index].bytes + length <= MAX_ZERO_BYTES).unwrap_or_else(|| {
                    runs.push(ZeroRun { place: *place, bytes: 0, pieces: Vec::new() });
                    runs.len() - 1
                });
                runs[index].bytes += length;
                runs[index].pieces.push((at, located.clone(), mirror));
                ends.insert((place.devid, place.offset + length), index);
            }
            (at, left) = (at + length, left - length);
        }
        Ok(runs)
    }

    /// Discards logical ranges of which nothing is used any more, in all their copies. What a device cannot discard stays.
    /// Returns when nothing of it is in flight any more.
    pub async fn discard(&self, ranges: &[Range<u64>]) {
        let mut places: BTreeMap<u64, Vec<(u64, u64)>> = BTreeMap::new();
        for range in ranges {
            let mut at = range.start;
            while at < range.end {
                let Ok(located) = self.map.locate(at, range.end - at) else { break };
                for place in located.copies.iter().filter(|_| located.row.is_none()) {
                    places.entry(place.devid).or_default().push((place.offset, located.bytes));
                }
                at += located.bytes;
            }
        }
        let requests = places.into_iter().flat_map(|(devid, mut places)| {
            places.sort_unstable();
            let joined = join_ranges(places);
            joined.chunks(DISCARDED_AT_ONCE).map(|some| (devid, some.to_vec())).collect::<Vec<_>>()
        });
        stream::iter(requests).for_each_concurrent(IN_FLIGHT, |(devid, places)| self.discard_on(devid, places)).await;
    }

    async fn discard_on(&self, devid: u64, places: Vec<(u64, u64)>) {
        let Some(device) = self.devices.get(devid) else { return };
        let extents = places.iter().filter_map(|(offset, bytes)| extent_of(&device.device, *offset, *bytes));
        match device.device.execute(Request::discard(extents)).await {
            Ok(_) => self.devices.count_executed(),
            Err(error) => tracing::debug!(devid, %error, "a device does not discard"),
        }
    }
}

/// Joins sorted ranges that touch each other.
fn join_ranges(ranges: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (offset, bytes) in ranges {
        match joined.last_mut() {
            Some((start, length)) if *start + *length == offset => *length += bytes,
            _ => joined.push((offset, bytes)),
        }
    }
    joined
}

impl DeviceSet {
    /// Writes bytes to a device. Data and nodes without checksums get the tags of a transaction, on a device with protection
    /// information.
    ///
    /// # Errors
    /// If they cannot be written; the error has the reason.
    pub async fn write_tagged(&self, place: Place, data: Slice, generation: Option<u64>) -> Result<(), CopyFault> {
        self.write_as(place, data, Durability::Volatile, generation).await
    }

    /// Writes a copy of a superblock, with the tag of its transaction.
    async fn write_super(&self, place: Place, copy: &Superblock, durability: Durability) -> Result<(), CopyFault> {
        self.write_as(place, Slice::copy_from(copy.as_bytes()), durability, Some(copy.generation.get())).await
    }

    /// Writes whole blocks, with the tags of a transaction, or those of data that have none.
    async fn write_as(
        &self,
        place: Place,
        data: Slice,
        durability: Durability,
        generation: Option<u64>,
    ) -> Result<(), CopyFault> {
        debug_assert!(data.len() as u64 <= MAX_READ_BYTES);
        let device = &self.get(place.devid).ok_or(CopyFault::Missing)?.device;
        let extent = extent_of(device, place.offset, data.len() as u64).ok_or(CopyFault::NoBlock)?;
        let geometry = device.geometry();
        let tags = tags_of(generation, extent.start().get());
        let data: WriteData = match generation.is_some() && self.is_host_sealed() {
            true => Sealed::seal(data, geometry.block_size, geometry.protection, &tags).into(),
            false => Unsealed::new(data, geometry.block_size, geometry.protection, tags).into(),
        };
        let request = Request::write(extent, data, durability);
        device.execute(request).await.map_err(CopyFault::Unreadable)?;
        self.count_executed();
        Ok(())
    }

    /// Makes bytes of a device zeroes, which may deallocate their blocks.
    ///
    /// # Errors
    /// If the device cannot do it; the error has the reason.
    pub async fn write_zeroes(&self, place: Place, bytes: u64) -> Result<(), CopyFault> {
        let device = self.get(place.devid).ok_or(CopyFault::Missing)?;
        let extent = extent_of(&device.device, place.offset, bytes).ok_or(CopyFault::NoBlock)?;
        let request = Request::write_zeroes(extent, true, Durability::Volatile);
        device.device.execute(request).await.map_err(CopyFault::Unreadable)?;
        self.count_executed();
        Ok(())
    }

    /// Makes all completed writes of these devices durable. Returns those whose Flush failed, with the reason.
    pub async fn flush(&self, devids: &[u64]) -> Vec<(u64, CopyFault)> {
        let flush = |devid: u64| async move {
            let device = self.get(devid).ok_or(CopyFault::Missing);
            let flushed = match device {
                Ok(device) => device.device.execute(Request::flush()).await.map_err(CopyFault::Unreadable),
                Err(fault) => Err(fault),
            };
            match flushed {
                Ok(_) => self.count_executed(),
                Err(fault) => return Some((devid, fault)),
            }
            None
        };
        join_all(devids.iter().map(|devid| flush(*devid))).await.into_iter().flatten().collect()
    }

    /// Writes the copies of the superblock behind the first one anew where one of them is damaged or old, and makes them
    /// durable. To be done before the first one is written: a power cut may damage that, and then there must be another.
    /// Where the first one is damaged itself, another copy is what counts, and all stay as they are.
    pub async fn restore_copies(&self) {
        let is_bad = |devid, is_first| {
            let bad = self.bad_superblocks().iter();
            bad.filter(|copy| copy.place.devid == devid).any(|copy| (copy.mirror == 1) == is_first)
        };
        let devices =
            self.iter().filter(|(devid, device)| !device.is_stale && is_bad(*devid, false) && !is_bad(*devid, true));
        let mut restored = Vec::new();
        for (devid, device) in devices {
            let bytes = device.device.geometry().capacity_bytes();
            let end = device.item.total_bytes.get();
            let inside = |offset: &u64| offset + (SUPERBLOCK_BYTES as u64) < end;
            for offset in copy_offsets(bytes).skip(1).filter(inside) {
                let copy = self.superblock().copy_for(&device.item, offset);
                if let Err(fault) = self.write_super(Place { devid, offset }, &copy, Durability::Volatile).await {
                    tracing::warn!(devid, %fault, "a copy of the superblock cannot be written");
                }
            }
            restored.push(devid);
        }
        for (devid, fault) in self.flush(&restored).await {
            tracing::warn!(devid, %fault, "copies of the superblock may not be durable");
        }
    }

    /// Writes a superblock to these devices: first the first copy of each, durable when written, and when those of all
    /// are written the other copies. Each device has its own item. Returns the devices on which the first copy failed, which
    /// is what counts, and the other copies that failed.
    pub async fn write_supers(
        &self,
        superblock: &Superblock,
        items: &[DevItem],
    ) -> (Vec<(u64, CopyFault)>, Vec<BadCopy>) {
        let offsets = |devid| {
            let bytes = self.get(devid).map_or(0, |device| device.device.geometry().capacity_bytes());
            copy_offsets(bytes)
        };
        let write = |item: DevItem, offset: u64, durability| async move {
            let devid = item.devid.get();
            let copy = superblock.copy_for(&item, offset);
            let place = Place { devid, offset };
            let written = self.write_super(place, &copy, durability).await;
            written.err().map(|fault| (place, fault))
        };
        let first = items.iter().filter_map(|item| Some((*item, offsets(item.devid.get()).next()?)));
        let first = first.map(|(item, offset)| write(item, offset, Durability::ForceUnitAccess));
        let failed = join_all(first).await.into_iter().flatten().map(|(place, fault)| (place.devid, fault));
        let failed: Vec<_> = failed.collect();
        let others = items.iter().filter(|item| failed.iter().all(|(devid, _)| *devid != item.devid.get()));
        let others = others.flat_map(|item| {
            let end = item.total_bytes.get();
            let inside = move |offset: &u64| offset + (SUPERBLOCK_BYTES as u64) < end;
            let copies = (1..).zip(offsets(item.devid.get()));
            copies.skip(1).filter(move |(_, offset)| inside(offset)).map(|(mirror, offset)| (*item, mirror, offset))
        });
        let write = &write;
        let others = others.map(|(item, mirror, offset)| async move {
            // The next commit may damage the first copy, and then this one counts: an older one would lead to nodes that are
            // gone. So it is tried again.
            let failed = match write(item, offset, Durability::Volatile).await {
                Some(_) => write(item, offset, Durability::Volatile).await,
                None => None,
            };
            failed.map(|(place, fault)| BadCopy { logical: None, place, mirror, fault })
        });
        let bad = join_all(others).await.into_iter().flatten().collect();
        (failed, bad)
    }
}
