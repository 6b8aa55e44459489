//! Writes damaged copies of nodes and data anew, from copies that are good.
//!
//! Invariants:
//! - Nothing else changes the filesystem meanwhile, so a copy is where it was found.
//! - What is written was checked as every reader checks it, just before, and the damaged copy was found damaged again.
//! - Tags are written only where the good copy has proven that they are right. They are never made for data of which
//!   nothing shows when they were written.

use std::collections::BTreeSet;

use sealblock_block::Device as _;
use sealblock_btrfs_format::checker::Expected;

use super::report::{BadData, DataFault, Finding, Report};
use super::session::check_of;
use crate::chunk_map::{Located, Place};
use crate::error::{BadCopy, CopyFault, FsError};
use crate::filesystem::Filesystem;
use crate::replicas::{Check, Other};
use crate::tags::WrittenIn;

/// What became of the damaged copies of a report.
#[derive(Clone, Default, Debug)]
pub struct Repaired {
    /// Copies of nodes that were written anew.
    pub nodes: u64,
    /// Bytes of data that were written anew.
    pub data_bytes: u64,
    /// Copies that could not be written, with the reason.
    pub failed: Vec<BadCopy>,
}

/// Writes the damaged copies that a verification has listed anew, where another copy is good, and makes them durable.
/// Superblocks and parity stay as they are, and so does a device that missed transactions.
///
/// # Errors
/// If what was written may not be durable.
pub async fn repair(fs: &Filesystem, report: &Report) -> Result<Repaired, FsError> {
    let (mut done, mut written) = (Repaired::default(), BTreeSet::new());
    for finding in &report.findings {
        let restored = match finding {
            Finding::Node { copy, expected: Some(expected), .. } => {
                let restored = restore_node(fs, copy, expected).await;
                done.nodes += u64::from(matches!(restored, Ok(true)));
                restored
            }
            Finding::Data(data) => match &**data {
                BadData { logical, bytes, fault: DataFault::Copy { copy, is_lost: false, written }, .. } => {
                    let restored = restore_data(fs, copy, *logical..logical + bytes, *written).await;
                    done.data_bytes += restored.as_ref().copied().unwrap_or_default();
                    restored.map(|bytes| bytes > 0)
                }
                _ => continue,
            },
            _ => continue,
        };
        match (restored, copy_of(finding)) {
            (Ok(true), Some(copy)) => drop(written.insert(copy.place.devid)),
            (Err(fault), Some(copy)) => done.failed.push(BadCopy { fault, ..copy.clone() }),
            _ => {}
        }
    }
    let devids: Vec<u64> = written.into_iter().collect();
    match fs.storage().devices.flush(&devids).await.first() {
        None => Ok(done),
        Some((devid, fault)) => {
            let why = format!("what was written to device {devid} may not be durable: {fault}");
            Err(FsError::NotWritable(why))
        }
    }
}

fn copy_of(finding: &Finding) -> Option<&BadCopy> {
    match finding {
        Finding::Node { copy, .. } => Some(copy),
        Finding::Data(data) => match &data.fault {
            DataFault::Copy { copy, .. } => Some(copy),
            _ => None,
        },
        _ => None,
    }
}

/// True if a copy was written; false if it is not damaged any more, or cannot be restored.
async fn restore_node(fs: &Filesystem, copy: &BadCopy, expected: &Expected) -> Result<bool, CopyFault> {
    let storage = fs.storage();
    let Ok(copies) = fs.nodes().read_copies(expected).await else { return Ok(false) };
    let Some(node) = copies.node.filter(|_| copies.unproven == 0 && can_write(fs, copy)) else { return Ok(false) };
    let is_bad = copies.bad.iter().any(|bad| bad.place == copy.place);
    let Ok(located) = storage.map.locate(expected.bytenr, node.bytes().len() as u64) else { return Ok(false) };
    // A node in several pieces has more places than are known of its copies.
    if !is_bad || located.bytes != node.bytes().len() as u64 || !located.copies.contains(&copy.place) {
        return Ok(false);
    }
    let generation = storage.devices.nodes_need_tags().then_some(expected.generation);
    storage.devices.write_tagged(copy.place, node.bytes().clone(), generation).await.map(|()| true)
}

/// Returns the bytes that were written.
async fn restore_data(
    fs: &Filesystem,
    copy: &BadCopy,
    range: std::ops::Range<u64>,
    written: Option<WrittenIn>,
) -> Result<u64, CopyFault> {
    let storage = fs.storage();
    let sector = u64::from(storage.geometry().sector_bytes);
    let mut restored = 0;
    for logical in range.clone().step_by(sector as usize).filter(|_| can_write(fs, copy)) {
        let place = Place { offset: copy.place.offset + (logical - range.start), ..copy.place };
        let Ok(located) = storage.map.locate(logical, sector) else { continue };
        let Some(mirror) = located.copies.iter().position(|copy| *copy == place) else { continue };
        let sums = fs.sums(logical, sector).await.unwrap_or_default();
        let check = check_of(&sums, logical, written);
        let is_whole = located.row.is_none() && located.bytes == sector;
        if !is_whole || is_good(fs, &located, mirror, check).await {
            continue;
        }
        let Ok(good) = storage.read_data(logical, sector, check).await else { continue };
        let generation = match check {
            Check::Tags(written) if good.is_attested => Some(written.generation),
            _ => None,
        };
        storage.devices.write_tagged(place, good.data, generation).await?;
        restored += sector;
    }
    Ok(restored)
}

/// True if a mirror of a sector passes, and is not another than one whose tags show that it is what was written.
async fn is_good(fs: &Filesystem, located: &Located, mirror: usize, check: Check<'_>) -> bool {
    let (storage, place, sector) = (fs.storage(), located.copies[mirror], located.bytes);
    let Check::Tags(written) = check else {
        let read = storage.devices.read(place, sector).await;
        return read.is_ok_and(|data| check.first_bad(&data, storage.geometry()).is_none());
    };
    match storage.devices.read_tagged(place, sector, written).await {
        Ok((_, true)) => true,
        Ok((data, false)) => match storage.attested_other(located, mirror, check).await {
            Other::Attested(proven) => proven[..] == data[..],
            Other::None | Other::InPart => true,
        },
        Err(_) => false,
    }
}

/// A device that missed transactions lacks more than what was found.
fn can_write(fs: &Filesystem, copy: &BadCopy) -> bool {
    let device = fs.storage().devices.get(copy.place.devid);
    device.is_some_and(|device| !device.may_lack() && device.device.abilities().writable)
}
