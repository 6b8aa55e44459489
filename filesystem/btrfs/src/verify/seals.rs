//! Lets devices with protection information verify data without checksums.
//!
//! A device finds by itself that blocks are intact and lie where they were written. Whether they are those that were
//! written last is shown by their tags, where these can be demanded ([`crate::tags`]): the device is asked for blocks with
//! the tag, so that no data are transferred. A strip with others is halved down to [`DIRECT_BYTES`], and only that part is
//! read.
//!
//! Invariant: what is not shown counts as unattested, and never as damage.

use sealblock_block::{
    BadBlock, BadBlocks, Coverage, Device as _, Error, ErrorKind, Expectations, Outcome, Request, Response, VerifyStats,
};

use super::report::WhyUnchecked;
use super::session::{Mode, Session, copy_of_data, is_unreachable};
use super::strips::{DIRECT_BYTES, Strip};
use crate::devices::Device;
use crate::error::CopyFault;
use crate::replicas::{Check, MAX_READ_BYTES, Other};
use crate::superblocks::extent_of;
use crate::tags::{Demand, TagMismatch, WrittenIn};

/// Checks a strip on a device with protection information.
pub(super) async fn check(session: &Session<'_>, device: &Device, strip: &Strip, written: Option<WrittenIn>) {
    let demand = written.and_then(|written| session.fs.storage().devices.demand(strip.place.devid, written));
    match written.zip(demand) {
        Some((written, demand)) => check_tags(session, device, strip, (written, demand)).await,
        None => check_intact(session, device, strip, written).await,
    }
}

/// What a device says of blocks.
enum Answer {
    /// They are intact and as expected.
    Good(Coverage),
    /// Some are not.
    Bad,
    /// They cannot be checked.
    Fault(CopyFault),
}

/// Lets a device verify a part of a strip.
async fn ask(
    session: &Session<'_>,
    device: &Device,
    strip: &Strip,
    part: (u64, u64),
    expected: Expectations,
) -> Answer {
    match verify(session, device, strip, part, expected).await {
        None => Answer::Fault(CopyFault::NoBlock),
        Some(Ok(Response::Verified(stats))) => Answer::Good(count(session, stats)),
        Some(Ok(_)) => unreachable!("gates answer a Verify with what it covered"),
        Some(Err(error)) if is_unreachable(&error) => Answer::Fault(CopyFault::Unreadable(error)),
        // Whatever else it cannot say, reading shows.
        Some(Err(_)) => Answer::Bad,
    }
}

async fn verify(
    session: &Session<'_>,
    device: &Device,
    strip: &Strip,
    (from, to): (u64, u64),
    expected: Expectations,
) -> Option<Outcome> {
    let extent = extent_of(&device.device, strip.place_of(from).offset, to - from)?;
    let outcome = match session.options.mode {
        Mode::Emulate => device.device.verify_by_reading(extent, expected).await,
        Mode::Auto | Mode::Offload => device.device.execute(Request::verify(extent, expected)).await,
    };
    session.fs.storage().devices.count_executed();
    Some(outcome)
}

/// Counts what a Verify transferred. Returns what it covered.
fn count(session: &Session<'_>, VerifyStats { bytes_transferred, coverage }: VerifyStats) -> Coverage {
    session.fs.storage().devices.add_transferred(bytes_transferred);
    if !coverage.is_complete() {
        session.unchecked(WhyUnchecked::CopiesBelow, 0);
    }
    coverage
}

/// The logical address of a byte of a strip.
fn address(strip: &Strip, at: u64) -> u64 {
    strip.sectors(at, at + 1, 1).next().map_or(0, |(_, logical)| logical)
}

/// Checks a strip whose tags show when it was written.
async fn check_tags(session: &Session<'_>, device: &Device, strip: &Strip, (written, demand): (WrittenIn, Demand)) {
    let Some(format) = device.device.geometry().protection else {
        return check_intact(session, device, strip, Some(written)).await;
    };
    // This host compares tags as soon as it has them.
    let mut direct = if session.options.mode == Mode::Emulate { MAX_READ_BYTES } else { DIRECT_BYTES };
    direct = direct.max(u64::from(session.fs.storage().geometry().sector_bytes));
    let mut pending = vec![(0, strip.bytes)];
    'parts: while let Some(part) = pending.pop() {
        let (from, to) = part;
        let bytes = to - from;
        if session.options.mode != Mode::Emulate {
            // Either all have the tag, or none has one.
            for (index, expected) in [demand.strict(format)].into_iter().chain(demand.untagged()).enumerate() {
                match ask(session, device, strip, part, expected).await {
                    Answer::Good(coverage) if !coverage.is_sealed() => {
                        session.unchecked(WhyUnchecked::NoChecksum, bytes)
                    }
                    Answer::Good(_) if index == 0 => session.verified(bytes),
                    Answer::Good(_) => tell_unproven(session, strip, part, Some(written)).await,
                    Answer::Fault(fault) => {
                        let copy = copy_of_data(address(strip, from), strip.place_of(from), strip.mirror, fault);
                        session.bad_data(copy, bytes, Some(written));
                    }
                    Answer::Bad => continue,
                }
                continue 'parts;
            }
        }
        if bytes <= direct {
            check_by_reading(session, strip, part, written).await;
        } else {
            let half = from + (bytes / 2).next_multiple_of(direct);
            pending.extend([(half, to), (from, half)]);
        }
    }
}

/// Reads a part of a strip, and checks its tags. If they are not as demanded, or it cannot be read as a whole, it is read
/// sector by sector.
async fn check_by_reading(session: &Session<'_>, strip: &Strip, (from, to): (u64, u64), written: WrittenIn) {
    let (devices, sector) = (&session.fs.storage().devices, u64::from(session.fs.storage().geometry().sector_bytes));
    match devices.read_tagged(strip.place_of(from), to - from, written).await {
        Ok((_, true)) => return session.verified(to - from),
        Ok((_, false)) if to - from <= sector => return tell_unproven(session, strip, (from, to), Some(written)).await,
        // Of blocks that may lack a tag, only those that do are unattested.
        Ok((_, false)) | Err(_) => {}
    }
    for (at, logical) in strip.sectors(from, to, sector) {
        match devices.read_tagged(strip.place_of(at), sector, written).await {
            Ok((_, true)) => session.verified(sector),
            Ok((_, false)) => tell_unproven(session, strip, (at, at + sector), Some(written)).await,
            // Linux repairs a copy that it could not read from another one, and gives it no tag.
            Err(CopyFault::Tag(bad))
                if bad.is_untagged()
                    && compare(session, strip, (at, sector), logical, written).await == Some(Compared::Same) =>
            {
                session.unattested(strip, at, at + sector);
            }
            Err(fault) => {
                let copy = copy_of_data(logical, strip.place_of(at), strip.mirror, fault);
                session.bad_data(copy, sector, Some(written));
            }
        }
    }
}

/// Counts a part of a strip of which no tag shows that it was written last: as unattested, but for sectors that are not
/// those of another copy, whose tags show it. Readers take that copy.
async fn tell_unproven(session: &Session<'_>, strip: &Strip, (from, to): (u64, u64), written: Option<WrittenIn>) {
    let storage = session.fs.storage();
    let Some(written) = written.filter(|written| !written.is_in_place) else {
        return session.unattested(strip, from, to);
    };
    let sector = u64::from(storage.geometry().sector_bytes);
    let mut at = from;
    while at < to {
        let logical = address(strip, at);
        let located = storage.map.locate(logical, (to - at).min(DIRECT_BYTES));
        let bytes = match located {
            Ok(located) if located.copies.len() > 1 => located.bytes,
            _ => return session.unattested(strip, at, to),
        };
        match compare(session, strip, (at, bytes), logical, written).await {
            None | Some(Compared::Same) => session.unattested(strip, at, at + bytes),
            Some(Compared::Other) if bytes <= sector => {
                let fault = CopyFault::Tag(TagMismatch::untagged(written.generation));
                session.bad_data(copy_of_data(logical, strip.place_of(at), strip.mirror, fault), sector, Some(written));
            }
            Some(Compared::Other) => {
                for (at, _) in strip.sectors(at, at + bytes, sector) {
                    Box::pin(tell_unproven(session, strip, (at, at + sector), Some(written))).await;
                }
            }
        }
        at += bytes;
    }
}

/// What a part of a copy is beside another copy whose tags show that it was written last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Compared {
    Same,
    /// Not the same, or only in part.
    Other,
}

/// Compares a part of a strip, from an offset on and of a number of bytes that lie together at a logical address, with
/// another copy whose tags show that it was written last; `None` if there is no such copy.
async fn compare(
    session: &Session<'_>,
    strip: &Strip,
    (at, bytes): (u64, u64),
    logical: u64,
    written: WrittenIn,
) -> Option<Compared> {
    let storage = session.fs.storage();
    let located = storage.map.locate(logical, bytes).ok()?;
    match storage.attested_other(&located, strip.mirror, Check::Tags(written)).await {
        Other::None => None,
        Other::InPart => Some(Compared::Other),
        Other::Attested(found) => match storage.devices.read(strip.place_of(at), bytes).await {
            Ok(own) if own[..] == found[..] => Some(Compared::Same),
            _ => Some(Compared::Other),
        },
    }
}

/// Lets a device verify a strip against its own protection information, which does not show when it was written.
async fn check_intact(session: &Session<'_>, device: &Device, strip: &Strip, written: Option<WrittenIn>) {
    let whole = |fault| {
        let copy = copy_of_data(address(strip, 0), strip.place, strip.mirror, fault);
        session.bad_data(copy, strip.bytes, written);
    };
    match verify(session, device, strip, (0, strip.bytes), Expectations::NONE).await {
        None => whole(CopyFault::NoBlock),
        Some(Ok(Response::Verified(stats))) => match count(session, stats).is_sealed() {
            true => tell_unproven(session, strip, (0, strip.bytes), written).await,
            false => session.unchecked(WhyUnchecked::NoChecksum, strip.bytes),
        },
        Some(Ok(_)) => unreachable!("gates answer a Verify with what it covered"),
        Some(Err(error)) => match error.into_kind() {
            ErrorKind::Integrity(bad) => {
                let (blocks, coverage) = bad.into_parts();
                take_bad_blocks(session, device, strip, &blocks, written).await;
                if !coverage.is_complete() {
                    session.unchecked(WhyUnchecked::CopiesBelow, 0);
                }
            }
            kind => whole(CopyFault::Unreadable(kind.into())),
        },
    }
}

/// Reports bad blocks of a strip: sectors that contain some are damaged, and the others are intact.
async fn take_bad_blocks(
    session: &Session<'_>,
    device: &Device,
    strip: &Strip,
    blocks: &[BadBlock],
    written: Option<WrittenIn>,
) {
    let sector = u64::from(session.fs.storage().geometry().sector_bytes);
    let shift = device.device.geometry().block_size.shift();
    // What is behind the last damaged sector.
    let mut intact = 0;
    for (at, logical) in strip.sectors(0, strip.bytes, sector) {
        let place = strip.place_of(at);
        let lbas = (place.offset >> shift)..((place.offset + sector) >> shift);
        let Some(bad) = blocks.iter().find(|bad| lbas.contains(&bad.lba.get())) else { continue };
        let error = BadBlocks::new(vec![*bad]).map(Error::from);
        let fault = error.map_or(CopyFault::NoBlock, CopyFault::Unreadable);
        session.bad_data(copy_of_data(logical, place, strip.mirror, fault), sector, written);
        tell_unproven(session, strip, (intact, at), written).await;
        intact = at + sector;
    }
    tell_unproven(session, strip, (intact, strip.bytes), written).await;
}
