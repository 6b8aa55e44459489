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
use crate::tags::{Demand, WrittenIn};

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
                    Answer::Good(_) => session.unattested(strip, from, to),
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
    let good = |from, to, is_attested| match is_attested {
        true => session.verified(to - from),
        false => session.unattested(strip, from, to),
    };
    if let Ok((_, is_attested)) = devices.read_tagged(strip.place_of(from), to - from, written).await {
        // Of blocks that may lack a tag, only those that do are unattested.
        if is_attested || to - from <= sector {
            return good(from, to, is_attested);
        }
    }
    for (at, logical) in strip.sectors(from, to, sector) {
        match devices.read_tagged(strip.place_of(at), sector, written).await {
            Ok((_, is_attested)) => good(at, at + sector, is_attested),
            // Linux repairs a copy that it could not read from another one, and gives it no tag.
            Err(CopyFault::Tag(bad))
                if bad.is_untagged() && equals_attested(session, strip, at, logical, written).await =>
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

/// True if another copy of a sector is attested, and this one is the same.
async fn equals_attested(session: &Session<'_>, strip: &Strip, at: u64, logical: u64, written: WrittenIn) -> bool {
    let (storage, sector) = (session.fs.storage(), u64::from(session.fs.storage().geometry().sector_bytes));
    let Ok(located) = storage.map.locate(logical, sector) else { return false };
    let other = storage.attested_other(&located, strip.mirror, Check::Tags(written)).await;
    match (other, storage.devices.read(strip.place_of(at), sector).await) {
        (Other::Attested(found), Ok(own)) => found[..] == own[..],
        _ => false,
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
            true => session.unattested(strip, 0, strip.bytes),
            false => session.unchecked(WhyUnchecked::NoChecksum, strip.bytes),
        },
        Some(Ok(_)) => unreachable!("gates answer a Verify with what it covered"),
        Some(Err(error)) => match error.into_kind() {
            ErrorKind::Integrity(bad) => {
                let (blocks, coverage) = bad.into_parts();
                take_bad_blocks(session, device, strip, &blocks, written);
                if !coverage.is_complete() {
                    session.unchecked(WhyUnchecked::CopiesBelow, 0);
                }
            }
            kind => whole(CopyFault::Unreadable(kind.into())),
        },
    }
}

/// Reports bad blocks of a strip: sectors that contain some are damaged, and the others are intact.
fn take_bad_blocks(
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
        session.unattested(strip, intact, at);
        intact = at + sector;
    }
    session.unattested(strip, intact, strip.bytes);
}
