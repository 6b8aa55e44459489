//! Gives data without checksums the tags that they lack, because the user says that they are what they should be: data
//! that Linux wrote, or on a device that was copied without its tags.
//!
//! Each block gets the tag of the transaction in the item of its file, at its place and with its data. When all have it,
//! all transactions up to now count as the engine's ([`sealblock_btrfs_format::own_windows`]), so that their tags are
//! demanded from then on. No item changes.
//!
//! Invariants:
//! - The record changes only when every copy of all data without checksums has its tag, all these are durable, and the
//!   devices have verified, after they were written, that they are there.
//! - What is known to be damaged gets no tag: a copy that cannot be read, one without the tag that is demanded of it, and
//!   copies that differ from each other. If one of them has a demanded tag, the others are written anew from it, but not
//!   in a file that is written in place: there a copy without a tag may be newer. Where nothing is demanded, another tag
//!   means nothing: Linux gives items that it joins its own transaction.
//! - Nothing else changes the filesystem meanwhile.

use std::cell::Cell;

use futures_util::stream::{self, StreamExt};
use sealblock_btrfs::chunk_map::{Located, Place};
use sealblock_btrfs::tags::{TagState, WrittenIn};
use sealblock_btrfs::verify::{Progress, Unsummed, Watch};
use sealblock_btrfs::{CopyFault, FsError};
use sealblock_runtime_memory::Slice;

use crate::engine::{Engine, EngineError};

/// Pieces that are read and written at once.
const PIECES_IN_FLIGHT: usize = 8;
/// The maximum number of reasons that are listed.
pub const MAX_LISTED: usize = 1000;

/// What became of data without tags.
#[derive(Clone, Default, Debug)]
pub struct Resealed {
    /// Bytes that got a tag, counting each copy.
    pub bytes: u64,
    /// Bytes of all data without checksums that were looked at, counting each copy.
    pub looked_at: u64,
    /// Logical addresses of sectors that got none, and why: the first [`MAX_LISTED`].
    pub refused: Vec<(u64, String)>,
    /// The number of all these.
    pub refused_count: u64,
    /// True if all was looked at.
    pub is_whole: bool,
}

impl Resealed {
    fn refuse(&mut self, logical: u64, why: String) {
        self.refused_count += 1;
        if self.refused.len() < MAX_LISTED {
            self.refused.push((logical, why));
        }
    }

    fn add(&mut self, one: Resealed) {
        self.bytes += one.bytes;
        self.looked_at += one.looked_at;
        one.refused.into_iter().for_each(|(logical, why)| self.refuse(logical, why));
    }
}

/// Why a piece does not get tags as it is.
enum Not {
    /// Some of it is not as it should be.
    Refused(String),
    /// A device failed.
    Failed(EngineError),
}

impl Engine {
    /// Gives these data, which must be all without checksums, the tags that they lack, and commits. Tags are demanded of
    /// all of them from then on, if none was refused and the observer did not stop it.
    ///
    /// # Errors
    /// If a device cannot keep tags, or cannot be written, and those of a commit.
    pub async fn reseal(&self, data: &Unsummed, watch: &dyn Watch) -> Result<Resealed, EngineError> {
        if let Some(device) = self.devices_without_sums().first() {
            let why = format!("{device} has no protection information, or does not keep application tags");
            return Err(EngineError::Read(FsError::NotWritable(why)));
        }
        let storage = self.storage();
        let sector = u64::from(storage.geometry().sector_bytes);
        let copies = |start, end: u64| -> u64 {
            storage.map.locate(start, end - start).map_or(0, |located| located.copies.len() as u64)
        };
        let expected_bytes = data.iter().map(|(_, start, end)| (end - start) * copies(*start, *end)).sum();
        let mut all = Resealed { is_whole: true, ..Resealed::default() };
        let is_stopped = Cell::new(false);
        let pieces = data.iter().take_while(|_| !is_stopped.get()).flat_map(|(written, start, end)| {
            let pieces = storage.pieces(*start, end - start);
            let of_range = pieces.map_or_else(|error| vec![Err(error)], |pieces| pieces.into_iter().map(Ok).collect());
            of_range.into_iter().map(|piece| (*written, piece))
        });
        let pieces = pieces.take_while(|_| !is_stopped.get());
        let reseal = |(written, piece): (WrittenIn, Result<(u64, Located), FsError>)| async move {
            let (at, located) = piece?;
            self.reseal_piece(sector, written, at, &located).await
        };
        let mut results = stream::iter(pieces).map(reseal).buffer_unordered(PIECES_IN_FLIGHT);
        while let Some(one) = results.next().await {
            all.add(one?);
            let progress = Progress { bytes: all.looked_at, expected_bytes, damage_count: all.refused_count };
            // Pieces that were begun end before the devices are flushed.
            if all.is_whole && !watch.go_on(progress).await {
                all.is_whole = false;
                is_stopped.set(true);
            }
        }
        drop(results);
        if all.is_whole && all.refused_count == 0 && self.failed_devices().is_empty() {
            // The tags are durable before they are looked for, and before a record says that they are there.
            self.flush().await?;
            self.check_tags(data, sector, watch, &mut all).await?;
        }
        if all.is_whole && all.refused_count == 0 && self.failed_devices().is_empty() {
            self.tagging().cover_all(self.devices());
        }
        self.commit().await?;
        Ok(all)
    }

    /// Has the devices verify that every copy has its tags: a write may have been lost, or have gone to the place of other
    /// data. A sector that lacks its tag counts as refused.
    async fn check_tags(
        &self,
        data: &Unsummed,
        sector: u64,
        watch: &dyn Watch,
        all: &mut Resealed,
    ) -> Result<(), EngineError> {
        let storage = self.storage();
        for (written, start, end) in data.iter() {
            for (logical, located) in storage.pieces(*start, end - start)? {
                for place in &located.copies {
                    if self.devices().verify_tagged(*place, located.bytes, written.generation).await.is_ok() {
                        continue;
                    }
                    for at in (0..located.bytes).step_by(sector as usize) {
                        let place = Place { offset: place.offset + at, ..*place };
                        if let Err(fault) = self.devices().verify_tagged(place, sector, written.generation).await {
                            let why = format!("device {} does not have what was written to it: {fault}", place.devid);
                            all.refuse(logical + at, why);
                        }
                    }
                }
                let progress =
                    Progress { bytes: all.looked_at, expected_bytes: all.looked_at, damage_count: all.refused_count };
                if !watch.go_on(progress).await {
                    all.is_whole = false;
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// From now on no tags are demanded of data that are there: they may have lost them.
    ///
    /// # Errors
    /// Those of a commit.
    pub async fn forget_tags(&self) -> Result<(), EngineError> {
        let open = self.transaction().borrow().generation();
        self.tagging().forget(self.devices(), open);
        self.commit().await.map(drop)
    }

    /// Reseals a piece, or its sectors one by one.
    async fn reseal_piece(
        &self,
        sector: u64,
        written: WrittenIn,
        logical: u64,
        located: &Located,
    ) -> Result<Resealed, EngineError> {
        let mut done = Resealed { looked_at: located.bytes * located.copies.len() as u64, ..Resealed::default() };
        match self.try_reseal(written, located).await {
            Ok(bytes) => done.bytes = bytes,
            Err(Not::Failed(error)) => return Err(error),
            Err(Not::Refused(why)) if located.bytes <= sector => done.refuse(logical, why),
            Err(Not::Refused(_)) => {
                for at in (0..located.bytes).step_by(sector as usize) {
                    match self.try_reseal(written, &located.part(at, sector)).await {
                        Ok(bytes) => done.bytes += bytes,
                        Err(Not::Failed(error)) => return Err(error),
                        Err(Not::Refused(why)) => done.refuse(logical + at, why),
                    }
                }
            }
        }
        Ok(done)
    }

    async fn try_reseal(&self, written: WrittenIn, located: &Located) -> Result<u64, Not> {
        let (mut copies, mut bad) = (Vec::new(), Vec::new());
        for place in &located.copies {
            match self.devices().read_with_tags(*place, located.bytes, written).await {
                Ok((data, is_attested, state)) => copies.push(Copy { place: *place, data, state, is_attested }),
                Err(fault) => bad.push((*place, fault)),
            }
        }
        let right = copies.iter().find(|copy| copy.is_attested).or(copies.first());
        // What is attested is right, unless a copy without a tag may be newer, as in place. Otherwise all copies must agree.
        let agree = |right: &Copy| copies.iter().all(|copy| copy.data[..] == right.data[..]);
        let right = match (right, bad.first()) {
            (Some(right), _) if right.is_attested && (!written.is_in_place || agree(right)) => right,
            (Some(right), None) if agree(right) => right,
            (Some(_), None) => return Err(Not::Refused("its copies differ".into())),
            (_, Some((place, fault))) => return Err(Not::Refused(format!("device {}: {fault}", place.devid))),
            (None, None) => return Ok(0),
        };
        let lacks = |copy: &&Copy| copy.state != TagState::Own || copy.data[..] != right.data[..];
        let lacking = copies.iter().filter(lacks).map(|copy| copy.place);
        let damaged = bad.iter().filter(|(_, fault)| matches!(fault, CopyFault::Tag(_) | CopyFault::Unreadable(_)));
        let mut bytes = 0;
        for place in lacking.chain(damaged.map(|(place, _)| *place)) {
            let tagged = self.devices().write_tagged(place, right.data.clone(), Some(written.generation)).await;
            if let Err(fault) = tagged {
                self.device_failed(place.devid, &fault);
                let why = format!("device {} cannot be written: {fault}", place.devid);
                return Err(Not::Failed(FsError::NotWritable(why).into()));
            }
            bytes += located.bytes;
        }
        // What is on a device that is not there, or missed transactions, stays as it is.
        match bad.iter().find(|(_, fault)| !matches!(fault, CopyFault::Tag(_) | CopyFault::Unreadable(_))) {
            Some((place, fault)) => Err(Not::Refused(format!("device {}: {fault}", place.devid))),
            None => Ok(bytes),
        }
    }
}

/// A copy that was read.
struct Copy {
    place: Place,
    data: Slice,
    state: TagState,
    /// True if its tags were demanded, and it has them.
    is_attested: bool,
}
