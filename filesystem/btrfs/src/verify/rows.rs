//! Checks the parity of the RAID5 and RAID6 rows that are in use.
//!
//! Parity covers the sectors of a row that have the same offset. It is checked if at least one of these sectors is in
//! use and all of them can be read, including free ones: sectors that a write does not replace remain part of the
//! parity. If a piece of the row is known to be damaged, the parity cannot be checked and counts as unchecked.

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream;
use sealblock_btrfs_format::items::chunk::STRIPE_BYTES;
use sealblock_runtime_memory::Slice;

use super::leaves::Leaves;
use super::ranges::RangeList;
use super::report::{Finding, WhyUnchecked};
use super::session::{Session, Stopped, why_unchecked};
use super::walk::Seen;
use crate::chunk_map::{Place, Row};
use crate::error::CopyFault;
use crate::parity::{Role, p, q};

/// Rows that are read at once.
const ROWS_IN_FLIGHT: usize = 4;

/// Logical ranges of chunks with parity, and the number of data pieces in a row.
fn chunks(session: &Session<'_>) -> Vec<(u64, u64, u64)> {
    let map = &session.fs.storage().map;
    let data_pieces = |row: &Row| row.pieces.iter().filter(|(role, _)| matches!(role, Role::Data(_))).count() as u64;
    let rows = map.ranges().filter_map(|(start, bytes)| {
        let row = map.locate(start, STRIPE_BYTES).ok()?.row?;
        Some((start, start + bytes, data_pieces(&row)))
    });
    rows.collect()
}

/// Checks the parity of all rows that are in use.
pub(super) async fn check_parity(session: &Session<'_>, seen: &Seen, leaves: &Leaves) -> Result<(), Stopped> {
    let chunks = chunks(session);
    if chunks.is_empty() {
        return Ok(());
    }
    let (Some(bad), false) = (session.bad_ranges(), leaves.is_cut()) else {
        session.unchecked(WhyUnchecked::Parity, 0);
        return Ok(());
    };
    let most = session.options.most_ranges;
    let (mut used, mut damaged) = (RangeList::new(most), RangeList::new(most));
    bad.into_iter().for_each(|(start, end)| damaged.add(start, end));
    let node = u64::from(session.fs.storage().geometry().node_bytes);
    seen.addresses().for_each(|start| used.add(start, start.saturating_add(node)));
    leaves.summed.iter().chain(leaves.unsummed.iter()).for_each(|(start, end)| used.add(start, end));
    used.sort_and_merge();
    damaged.sort_and_merge();
    if used.is_cut() {
        session.unchecked(WhyUnchecked::Parity, 0);
    }
    let (used, damaged) = (&used, &damaged);
    let rows = chunks.into_iter().flat_map(|(start, end, data)| {
        let row_bytes = data * STRIPE_BYTES;
        let starts = (start..end).step_by(row_bytes as usize);
        // Chunks end with whole rows, unless another program made them.
        starts.map(move |at| (at, end.min(at.saturating_add(row_bytes))))
    });
    let in_use = rows.filter(|(start, end)| used.within(*start, *end).next().is_some());
    let check = |(start, end)| check_row(session, start, end, used, damaged);
    let mut checks = stream::iter(in_use).map(check).buffer_unordered(ROWS_IN_FLIGHT);
    while checks.next().await.is_some() {
        session.step().await?;
    }
    Ok(())
}

/// Checks the parity of a row.
async fn check_row(session: &Session<'_>, start: u64, end: u64, used: &RangeList, damaged: &RangeList) {
    let storage = session.fs.storage();
    let Some(row) = storage.map.locate(start, STRIPE_BYTES).ok().and_then(|located| located.row) else { return };
    let read = row.pieces.iter().map(|(_, place)| storage.devices.read(*place, STRIPE_BYTES));
    let (mut data, mut parities) = (Vec::new(), Vec::new());
    for ((role, place), read) in row.pieces.iter().zip(join_all(read).await) {
        match (role, read) {
            (Role::Data(_), Ok(bytes)) => data.push(bytes),
            (Role::P | Role::Q, read) => parities.push((*role, *place, read)),
            // A bad or missing piece was reported when that piece was checked.
            (Role::Data(_), Err(_)) => return session.unchecked(WhyUnchecked::Parity, STRIPE_BYTES),
        }
    }
    let pieces: Vec<&[u8]> = data.iter().map(|piece| &piece[..]).collect();
    for (role, place, read) in parities {
        let stored = match read {
            Ok(stored) => stored,
            Err(fault) => {
                match why_unchecked(&fault) {
                    Some(why) => session.unchecked(why, STRIPE_BYTES),
                    None => report(session, start, role, place, STRIPE_BYTES, Some(fault)),
                }
                continue;
            }
        };
        let computed = if role == Role::P { p(&pieces) } else { q(&pieces) };
        compare(session, (start, end), (role, place), (&stored, &computed), |from, to| {
            Sectors::of(used, damaged, from, to)
        });
    }
}

/// The sectors at one offset of a row, as far as known.
#[derive(Clone, Copy, Default)]
struct Sectors {
    is_used: bool,
    is_damaged: bool,
}

impl Sectors {
    fn of(used: &RangeList, damaged: &RangeList, from: u64, to: u64) -> Sectors {
        Sectors {
            is_used: used.within(from, to).next().is_some(),
            is_damaged: damaged.within(from, to).next().is_some(),
        }
    }
}

/// Compares parity sector by sector.
fn compare(
    session: &Session<'_>,
    (start, end): (u64, u64),
    (role, place): (Role, Place),
    (stored, computed): (&Slice, &[u8]),
    of: impl Fn(u64, u64) -> Sectors,
) {
    let sector = u64::from(session.fs.storage().geometry().sector_bytes);
    for at in (0..STRIPE_BYTES).step_by(sector as usize) {
        let mut all = Sectors::default();
        for piece in (start..end).step_by(STRIPE_BYTES as usize) {
            let one = of(piece + at, piece + at + sector);
            all = Sectors { is_used: all.is_used | one.is_used, is_damaged: all.is_damaged | one.is_damaged };
        }
        let range = at as usize..(at + sector) as usize;
        if !all.is_used {
            continue;
        }
        if all.is_damaged {
            session.unchecked(WhyUnchecked::Parity, sector);
        } else {
            session.verified(sector);
            if stored.get(range.clone()) != computed.get(range) {
                let place = Place { offset: place.offset + at, ..place };
                report(session, start, role, place, sector, None);
            }
        }
    }
}

fn report(session: &Session<'_>, logical: u64, role: Role, place: Place, bytes: u64, fault: Option<CopyFault>) {
    session.found(Finding::Parity { logical, role, place, bytes, fault });
}
