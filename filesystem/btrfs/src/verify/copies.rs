//! Compares copies of data without checksums. Nothing shows which of them is right, but copies that differ are damage.
//!
//! A copy on a device with protection information is checked against that, and a copy that cannot be read is reported
//! as unreadable. Only the other copies are compared. They still count as unchecked, because equal copies prove
//! nothing.

use futures_util::future::join_all;
use sealblock_runtime_memory::Slice;

use super::report::{BadData, DataFault, Finding, Uses, WhyUnchecked};
use super::session::{Session, copy_of_data, is_unreachable};
use crate::chunk_map::{Located, Place};
use crate::error::CopyFault;
use crate::tags::WrittenIn;

/// The indices of the comparable copies of a piece; empty if there are fewer than two. With parity a piece has one
/// copy.
pub(super) fn comparable(session: &Session<'_>, located: &Located) -> Vec<usize> {
    let devices = &session.fs.storage().devices;
    let is_plain =
        |place: &Place| devices.get(place.devid).is_some_and(|device| !device.is_stale && !device.has_seals());
    let plain = located.copies.iter().enumerate().filter(|(_, place)| is_plain(place)).map(|(mirror, _)| mirror);
    let plain: Vec<usize> = plain.collect();
    if plain.len() > 1 { plain } else { Vec::new() }
}

/// Reads these copies of a part of a piece, which fits in one request, and compares them sector by sector.
pub(super) async fn compare(
    session: &Session<'_>,
    logical: u64,
    part: &Located,
    mirrors: &[usize],
    written: Option<WrittenIn>,
) {
    let sector = u64::from(session.fs.storage().geometry().sector_bytes);
    let read = |mirror: &usize| {
        let mirror = *mirror;
        async move { (mirror, read_sectors(session, logical, part, mirror, written).await) }
    };
    let copies: Vec<(usize, Vec<Option<Slice>>)> = join_all(mirrors.iter().map(read)).await;
    // The start of the differing sectors that are not yet reported, and their copies.
    let mut run: Option<(u64, u64, Vec<usize>)> = None;
    for (index, at) in (0..part.bytes).step_by(sector as usize).enumerate() {
        let there: Vec<(usize, &Slice)> =
            copies.iter().filter_map(|(mirror, sectors)| Some((*mirror, sectors[index].as_ref()?))).collect();
        let Some((_, first)) = there.first() else { continue };
        if there.iter().all(|(_, data)| data[..] == first[..]) {
            session.unchecked(WhyUnchecked::NoChecksum, there.len() as u64 * sector);
            continue;
        }
        session.verified(there.len() as u64 * sector);
        let differing: Vec<usize> = there.iter().map(|(mirror, _)| *mirror).collect();
        match &mut run {
            Some((start, bytes, of)) if *start + *bytes == at && *of == differing => *bytes += sector,
            _ => {
                let before = run.replace((at, sector, differing));
                before.into_iter().for_each(|before| tell(session, logical, part, before));
            }
        }
    }
    run.into_iter().for_each(|run| tell(session, logical, part, run));
}

/// Reports sectors whose copies differ.
fn tell(session: &Session<'_>, logical: u64, part: &Located, (at, bytes, mirrors): (u64, u64, Vec<usize>)) {
    let place = |mirror: usize| {
        let Place { devid, offset } = part.copies[mirror];
        (mirror + 1, Place { devid, offset: offset + at })
    };
    let fault = DataFault::CopiesDiffer(mirrors.into_iter().map(place).collect());
    let data = BadData { logical: logical + at, bytes, fault, uses: Uses::default() };
    session.found(Finding::Data(Box::new(data)));
}

/// The sectors of a copy, without the unreadable ones.
async fn read_sectors(
    session: &Session<'_>,
    logical: u64,
    part: &Located,
    mirror: usize,
    written: Option<WrittenIn>,
) -> Vec<Option<Slice>> {
    let (devices, place) = (&session.fs.storage().devices, part.copies[mirror]);
    let sector = u64::from(session.fs.storage().geometry().sector_bytes);
    let offsets = || (0..part.bytes).step_by(sector as usize);
    let fault = match devices.read(place, part.bytes).await {
        Ok(data) => return offsets().map(|at| Some(data.slice(at as usize..(at + sector) as usize))).collect(),
        Err(fault) => fault,
    };
    if !matches!(&fault, CopyFault::Unreadable(error) if !is_unreachable(error)) {
        session.bad_data(copy_of_data(logical, place, mirror, fault), part.bytes, written);
        return offsets().map(|_| None).collect();
    }
    let mut sectors = Vec::new();
    for at in offsets() {
        let place = Place { offset: place.offset + at, ..place };
        let read = devices.read(place, sector).await;
        let is_bad = |fault| session.bad_data(copy_of_data(logical + at, place, mirror, fault), sector, written);
        sectors.push(read.map_err(is_bad).ok());
    }
    sectors
}
