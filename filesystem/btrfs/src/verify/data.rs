//! Checks every copy of data against checksums or protection information.
//!
//! A run of sectors is cut into strips, several of which are checked at once. A device that can compute CRC-32C is
//! asked for the checksum of a whole strip, which is compared with the combined checksums of the sectors. A strip that
//! differs is halved repeatedly down to [`DIRECT_BYTES`], and only that part is read. Any other strip is read, and its
//! sectors are checked one by one.
//!
//! Data without checksums are verified by the device if it has protection information ([`seals`]). Otherwise they are
//! read and their copies are compared, and they count as unchecked.

use std::rc::Rc;

use futures_util::StreamExt;
use futures_util::future::LocalBoxFuture;
use futures_util::stream::FuturesUnordered;
use sealblock_block::{Checksum, Device as _, Expectations, Request, Response};
use sealblock_btrfs_format::key::ItemType;
use sealblock_integrity::ChecksumKind;

use super::copies::{comparable, compare};
use super::report::{BadData, DataFault, Finding, Uses, WhyUnchecked};
use super::seals;
use super::session::{Session, Stopped, copy_of_data, is_unreachable, why_unchecked};
use super::strips::{DIRECT_BYTES, Strip, strips};
use crate::chunk_map::Located;
use crate::cursor::{Cursor, TreeRoot};
use crate::devices::Device;
use crate::error::{CopyFault, FsError};
use crate::replicas::{MAX_READ_BYTES, mismatch};
use crate::superblocks::extent_of;
use crate::tags::WrittenIn;

/// The maximum number of strips in flight.
const STRIPS_IN_FLIGHT: usize = 16;
/// The maximum length of a strip that a device checks, and of a run.
const MAX_OFFLOAD_BYTES: u64 = 64 << 20;

/// Consecutive sectors, and their checksums.
pub(super) struct Run {
    /// The logical address of the first.
    pub logical: u64,
    /// The number of bytes.
    pub bytes: u64,
    /// What they are checked against.
    pub proof: Proof,
}

/// What data are checked against.
pub(super) enum Proof {
    /// The checksums of sectors, in order.
    Sums(Vec<u8>),
    /// The tags that data without checksums have, if any can be demanded.
    Tags(Option<WrittenIn>),
}

impl Run {
    /// When data without checksums were written, if tags can show it.
    fn written(&self) -> Option<WrittenIn> {
        match self.proof {
            Proof::Sums(_) => None,
            Proof::Tags(written) => written,
        }
    }
}

/// Strips in flight.
pub(super) struct Pipeline<'s, 'a> {
    session: &'s Session<'a>,
    in_flight: FuturesUnordered<LocalBoxFuture<'s, ()>>,
    most_bytes: u64,
}

impl<'s, 'a> Pipeline<'s, 'a> {
    pub fn new(session: &'s Session<'a>) -> Pipeline<'s, 'a> {
        let mut devices = session.fs.storage().devices.iter();
        let is_long = devices.any(|(_, device)| session.offloads(device) || device.has_seals());
        let most_bytes = if is_long { MAX_OFFLOAD_BYTES } else { MAX_READ_BYTES };
        Pipeline { session, in_flight: FuturesUnordered::new(), most_bytes }
    }

    /// Starts to check a run, once there is room.
    pub async fn push(&mut self, run: Run) -> Result<(), Stopped> {
        let session = self.session;
        let (strips, unmapped) = strips(&session.fs.storage().map, run.logical, run.bytes, self.most_bytes);
        for (logical, bytes, why) in unmapped {
            let fault = DataFault::Unmapped(why);
            session.found(Finding::Data(Box::new(BadData { logical, bytes, fault, uses: Uses::default() })));
        }
        let run = Rc::new(run);
        for strip in strips {
            self.make_room().await?;
            let run = Rc::clone(&run);
            self.in_flight.push(Box::pin(async move { check_strip(session, &run, &strip).await }));
        }
        Ok(())
    }

    /// Starts to check a piece of data without checksums whose copies can only be compared.
    async fn push_compared(
        &mut self,
        logical: u64,
        located: Located,
        mirrors: Rc<[usize]>,
        written: Option<WrittenIn>,
    ) -> Result<(), Stopped> {
        let session = self.session;
        let others = strips(&session.fs.storage().map, logical, located.bytes, self.most_bytes).0;
        let run = Rc::new(Run { logical, bytes: located.bytes, proof: Proof::Tags(written) });
        for strip in others.into_iter().filter(|strip| !mirrors.contains(&strip.mirror)) {
            self.make_room().await?;
            let run = Rc::clone(&run);
            self.in_flight.push(Box::pin(async move { check_strip(session, &run, &strip).await }));
        }
        for at in (0..located.bytes).step_by(MAX_READ_BYTES as usize) {
            self.make_room().await?;
            let part = located.part(at, MAX_READ_BYTES.min(located.bytes - at));
            let mirrors = Rc::clone(&mirrors);
            self.in_flight
                .push(Box::pin(async move { compare(session, logical + at, &part, &mirrors, written).await }));
        }
        Ok(())
    }

    /// Waits until another strip may start.
    async fn make_room(&mut self) -> Result<(), Stopped> {
        while self.in_flight.len() >= STRIPS_IN_FLIGHT {
            self.in_flight.next().await;
            self.session.step().await?;
        }
        Ok(())
    }

    /// Waits for the strips in flight.
    pub async fn drain(&mut self) -> Result<(), Stopped> {
        while self.in_flight.next().await.is_some() {
            self.session.step().await?;
        }
        Ok(())
    }
}

/// Checks all data with checksums, in the order of the checksum tree.
pub(super) async fn check_sums(session: &Session<'_>, tree: TreeRoot) -> Result<(), Stopped> {
    let geometry = session.fs.storage().geometry();
    let (sector, sum) = (u64::from(geometry.sector_bytes), geometry.checksum.bytes());
    let mut pipeline = Pipeline::new(session);
    let mut cursor = Cursor::all(session.fs.nodes(), tree);
    let (mut run, mut of_run) = ((0, 0), Vec::new());
    loop {
        let (key, sums) = match cursor.next().await {
            Ok(None) => break,
            Ok(Some((key, sums))) if key.item_type == ItemType::EXTENT_CSUM => (key, sums),
            // Lost nodes were reported when the nodes were checked.
            Ok(Some(_)) | Err(_) => continue,
        };
        let (logical, bytes) = (key.offset, (sums.len() / sum) as u64 * sector);
        let (start, run_bytes) = run;
        let end = start + run_bytes;
        if run_bytes > 0 && logical < end {
            session.found(Finding::Tree { tree: tree.id, error: overlap(logical, end) });
        }
        if run_bytes == 0 || logical != end || run_bytes + bytes > MAX_OFFLOAD_BYTES {
            let proof = Proof::Sums(std::mem::replace(&mut of_run, sums.to_vec()));
            run = (logical, bytes);
            pipeline.push(Run { logical: start, bytes: run_bytes, proof }).await?;
        } else {
            of_run.extend_from_slice(sums);
            run.1 += bytes;
        }
    }
    let (logical, bytes) = run;
    pipeline.push(Run { logical, bytes, proof: Proof::Sums(of_run) }).await?;
    pipeline.drain().await
}

fn overlap(logical: u64, end: u64) -> FsError {
    let why = format!("checksums begin at the address {logical}, and those before them end at {end}");
    FsError::Contradiction { what: "the tree of checksums".into(), why }
}

/// Checks data that have no checksums, with what their tags must show.
pub(super) async fn check_unsummed(
    session: &Session<'_>,
    ranges: impl Iterator<Item = (Option<WrittenIn>, u64, u64)>,
) -> Result<(), Stopped> {
    let map = &session.fs.storage().map;
    let mut pipeline = Pipeline::new(session);
    for (written, start, end) in ranges {
        let run = |from, to| Run { logical: from, bytes: to - from, proof: Proof::Tags(written) };
        // The data from `from` up to `at` have not been started.
        let (mut from, mut at) = (start, start);
        while at < end {
            let most = (end - at).min(MAX_OFFLOAD_BYTES);
            let located = map.locate(at, most).ok();
            let mirrors = located.as_ref().map_or_else(Vec::new, |located| comparable(session, located));
            let bytes = match &located {
                Some(located) => located.bytes,
                None => map.next_chunk(at).map_or(most, |next| most.min(next - at)),
            };
            if (!mirrors.is_empty() || at + bytes - from > MAX_OFFLOAD_BYTES) && from < at {
                pipeline.push(run(from, at)).await?;
                from = at;
            }
            at += bytes;
            if let Some(located) = located.filter(|_| !mirrors.is_empty()) {
                pipeline.push_compared(at - bytes, located, mirrors.into(), written).await?;
                from = at;
            }
        }
        if from < end {
            pipeline.push(run(from, end)).await?;
        }
    }
    pipeline.drain().await
}

async fn check_strip(session: &Session<'_>, run: &Run, strip: &Strip) {
    let Some(device) = session.fs.storage().devices.get(strip.place.devid) else {
        session.unchecked(WhyUnchecked::MissingDevice, strip.bytes);
        return;
    };
    match run.proof {
        Proof::Sums(_) if session.offloads(device) => check_by_device(session, device, run, strip).await,
        Proof::Sums(_) => check_by_reading(session, run, strip, 0, strip.bytes).await,
        Proof::Tags(_) if device.is_stale => session.unchecked(WhyUnchecked::StaleDevice, strip.bytes),
        Proof::Tags(written) if device.has_seals() => seals::check(session, device, strip, written).await,
        Proof::Tags(_) => check_by_reading(session, run, strip, 0, strip.bytes).await,
    }
}

/// Lets a device compare a strip with its checksums.
async fn check_by_device(session: &Session<'_>, device: &Device, run: &Run, strip: &Strip) {
    let sector = u64::from(session.fs.storage().geometry().sector_bytes);
    let mut pending = vec![(0, strip.bytes)];
    while let Some((from, to)) = pending.pop() {
        let sums = strip.sectors(from, to, sector).map(|(_, logical)| sum_of(run, logical, sector));
        let sums = sums.map(|sum| sum.first_chunk().map_or(0, |sum| u32::from_le_bytes(*sum)));
        let expected = u64::from(session.combiner().join_all(sums));
        match checksum_of(session, device, strip, from, to).await {
            Ok(checksum) if checksum.value == expected => {
                session.verified_by_device(to - from);
                if !checksum.coverage.is_complete() {
                    session.unchecked(WhyUnchecked::CopiesBelow, 0);
                }
                continue;
            }
            Err(fault) if why_unchecked(&fault).is_some() || matches!(fault, CopyFault::NoBlock) => {
                let logical = strip.sectors(from, to, sector).next().map_or(0, |(_, logical)| logical);
                session.bad_data(copy_of_data(logical, strip.place_of(from), strip.mirror, fault), to - from, None);
                continue;
            }
            Ok(_) | Err(_) => {}
        }
        if to - from <= DIRECT_BYTES {
            check_by_reading(session, run, strip, from, to).await;
        } else {
            let half = from + ((to - from) / 2).next_multiple_of(DIRECT_BYTES);
            pending.extend([(half, to), (from, half)]);
        }
    }
}

async fn checksum_of(
    session: &Session<'_>,
    device: &Device,
    strip: &Strip,
    from: u64,
    to: u64,
) -> Result<Checksum, CopyFault> {
    let extent = extent_of(&device.device, strip.place.offset + from, to - from).ok_or(CopyFault::NoBlock)?;
    let request = Request::checksum(extent, ChecksumKind::Crc32c, Expectations::NONE);
    match device.device.execute(request).await {
        Ok(Response::Checksum(checksum)) => {
            session.fs.storage().devices.add_transferred(checksum.bytes_transferred);
            Ok(checksum)
        }
        Ok(_) => unreachable!("gates answer a Checksum with one"),
        Err(error) => Err(CopyFault::Unreadable(error)),
    }
}

/// The checksum of a sector of a run.
fn sum_of(run: &Run, logical: u64, sector: u64) -> &[u8] {
    let Proof::Sums(sums) = &run.proof else { return &[] };
    let bytes = sums.len() / ((run.bytes / sector) as usize).max(1);
    let at = ((logical - run.logical) / sector) as usize * bytes;
    sums.get(at..at + bytes).unwrap_or_default()
}

/// Reads a part of a strip and checks its sectors.
async fn check_by_reading(session: &Session<'_>, run: &Run, strip: &Strip, from: u64, to: u64) {
    let mut at = from;
    while at < to {
        let end = to.min(at + MAX_READ_BYTES);
        match session.fs.storage().devices.read(strip.place_of(at), end - at).await {
            Ok(data) => check_read(session, run, strip, at, &data),
            Err(CopyFault::Unreadable(error)) if !is_unreachable(&error) => {
                read_sectors(session, run, strip, at, end).await;
            }
            Err(fault) => {
                let sector = u64::from(session.fs.storage().geometry().sector_bytes);
                let logical = strip.sectors(at, end, sector).next().map_or(0, |(_, logical)| logical);
                session.bad_data(
                    copy_of_data(logical, strip.place_of(at), strip.mirror, fault),
                    end - at,
                    run.written(),
                );
            }
        }
        at = end;
    }
}

/// Reads a part of a strip sector by sector, because it cannot be read as a whole.
async fn read_sectors(session: &Session<'_>, run: &Run, strip: &Strip, from: u64, to: u64) {
    let sector = u64::from(session.fs.storage().geometry().sector_bytes);
    for (at, logical) in strip.sectors(from, to, sector) {
        match session.fs.storage().devices.read(strip.place_of(at), sector).await {
            Ok(data) => check_read(session, run, strip, at, &data),
            Err(fault) => {
                session.bad_data(copy_of_data(logical, strip.place_of(at), strip.mirror, fault), sector, run.written())
            }
        }
    }
}

/// Checks sectors that were read, from a byte offset of a strip on.
fn check_read(session: &Session<'_>, run: &Run, strip: &Strip, from: u64, data: &[u8]) {
    if matches!(run.proof, Proof::Tags(_)) {
        session.unchecked(WhyUnchecked::NoChecksum, data.len() as u64);
        return;
    }
    let geometry = session.fs.storage().geometry();
    let sector = u64::from(geometry.sector_bytes);
    let sectors = strip.sectors(from, from + data.len() as u64, sector).zip(data.chunks(sector as usize));
    for ((at, logical), data) in sectors {
        match mismatch(geometry.checksum, data, sum_of(run, logical, sector)) {
            None => session.verified(sector),
            Some(mismatch) => {
                let fault = CopyFault::Checksum(mismatch);
                session.bad_data(copy_of_data(logical, strip.place_of(at), strip.mirror, fault), sector, None);
            }
        }
    }
}
