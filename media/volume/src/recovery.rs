//! What a crash left in the log.
//!
//! Sectors before the newest durable mark must all be there, and their records count. Behind it, any subset of sectors
//! may be there, and any of their data may not: such a record counts only if the data in its slot have its checksum.
//! Of the records of one block that count, the newest wins; where none counts, the block is as the tables have it. No
//! record is ever made up, so nothing that went wrong on the medium is ever sealed anew.

use std::collections::BTreeMap;

use sealblock_block::Medium;

use crate::error::VolumeError;
use crate::format::{Kind, LogSector, Record, Superblock};
use crate::lookup::data_match;
use crate::open::{Mutation, OpenOptions};
use crate::overlay::Records;

/// Bytes of the log read at once.
const CHUNK_BYTES: u64 = 1 << 20;
/// How often a slot is read before it counts as unreadable.
const READ_ATTEMPTS: u32 = 3;

/// What recovery found.
pub(crate) struct Recovered {
    /// The records to be taken over, by block.
    pub records: Records,
    /// Records that were not taken over because their data are not there.
    pub discarded: u64,
    /// The sequence number that follows every sector found, whether it counted or not.
    pub next: u64,
}

/// The log as read: records by sequence number of their sector.
struct Scan {
    sectors: BTreeMap<u64, Vec<Record>>,
    durable: u64,
    next: u64,
}

/// Reads the log of a volume and decides which records count.
pub(crate) async fn scan<M: Medium>(
    medium: &M,
    superblock: &Superblock,
    options: &OpenOptions,
) -> Result<Recovered, VolumeError> {
    let scan = read_log(medium, superblock).await?;
    for sequence in superblock.log_tail..scan.durable {
        if !scan.sectors.contains_key(&sequence) {
            return Err(VolumeError::LogDamaged { sequence });
        }
    }
    let mut recovered = Recovered { records: Records::default(), discarded: 0, next: scan.next };
    // Newest first: the first record of a block that counts is the one.
    for (&sequence, records) in scan.sectors.iter().rev() {
        for record in records {
            if recovered.records.get(record.lba).is_some() {
                continue;
            }
            let counts = sequence < scan.durable
                || options.mutation == Mutation::TrustLog
                || arrived(medium, superblock, record, options).await?;
            if counts {
                recovered.records.insert(*record);
            } else {
                recovered.discarded += 1;
            }
        }
    }
    Ok(recovered)
}

async fn read_log<M: Medium>(medium: &M, superblock: &Superblock) -> Result<Scan, VolumeError> {
    let layout = &superblock.layout;
    let sector_bytes = layout.sector_bytes() as usize;
    let mut scan = Scan { sectors: BTreeMap::new(), durable: superblock.log_tail, next: superblock.log_tail };
    let mut at = 0;
    while at < layout.log_bytes() {
        let length = CHUNK_BYTES.min(layout.log_bytes() - at);
        let (read, bytes) = medium.read(layout.log_offset() + at, medium.buffer(length as usize)).await;
        read?;
        let first = at / sector_bytes as u64;
        for (position, sector) in (first..).zip(bytes.chunks_exact(sector_bytes)) {
            take_sector(&mut scan, superblock, position, sector)?;
        }
        at += length;
    }
    Ok(scan)
}

/// Takes in one sector of the log, if it is one and lies where it should.
fn take_sector(scan: &mut Scan, superblock: &Superblock, position: u64, bytes: &[u8]) -> Result<(), VolumeError> {
    let Ok(sector) = LogSector::decode(bytes, superblock.seed()) else { return Ok(()) };
    let sequence = sector.header.sequence;
    if sequence % superblock.layout.log_sectors() != position {
        return Ok(());
    }
    scan.next = scan.next.max(sequence + 1);
    if sequence < superblock.log_tail {
        return Ok(());
    }
    scan.durable = scan.durable.max(sector.header.durable);
    let records: Option<Vec<Record>> = sector
        .records()
        .map(|raw| Record::decode(raw, superblock.seed()).ok().filter(|r| fits(superblock, r)))
        .collect();
    // The sector's checksum is right, so a record that is not was made so: by another program, or on purpose.
    scan.sectors.insert(sequence, records.ok_or(VolumeError::LogDamaged { sequence })?);
    Ok(())
}

fn fits(superblock: &Superblock, record: &Record) -> bool {
    let layout = &superblock.layout;
    let zone = (record.lba.get() < layout.capacity_blocks()).then(|| layout.zone(layout.zone_of(record.lba))).flatten();
    zone.is_some_and(|zone| record.kind != Kind::Stored || record.slot < zone.slots)
}

/// Whether the data of a record are on the medium.
///
/// A slot that cannot be read says neither yes nor no. To take the old block would lose a write that may have been flushed,
/// for good; so a volume opened for writing is not opened, and one opened read-only has the block as one that cannot be read.
async fn arrived<M: Medium>(
    medium: &M,
    superblock: &Superblock,
    record: &Record,
    options: &OpenOptions,
) -> Result<bool, VolumeError> {
    if record.kind != Kind::Stored || record.loose {
        return Ok(true);
    }
    let layout = &superblock.layout;
    let zone = layout.zone(layout.zone_of(record.lba)).expect("the record was found to fit the volume");
    let offset = zone.slots_offset + (u64::from(record.slot) << layout.block_size().shift());
    for attempt in 1..=READ_ATTEMPTS {
        let (read, data) = medium.read(offset, medium.buffer(layout.block_size().bytes())).await;
        match read {
            Ok(()) => return Ok(data_match(record, superblock.protection, &data)),
            Err(error) if attempt == READ_ATTEMPTS && !options.read_only => return Err(error.into()),
            Err(_) => {}
        }
    }
    Ok(true)
}
