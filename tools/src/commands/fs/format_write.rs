//! Writes a new filesystem to its devices, stage by stage: what a stage writes is durable on all devices before the next
//! one begins.
//!
//! Between the first two stages, when no superblock of an older filesystem is left, everything else is discarded, and
//! what other filesystems and volume managers would be recognised by is zeroed. The places of superblocks are not
//! discarded: the content of discarded blocks is undefined, and an old superblock must not come back.

use std::ops::Range;

use futures_util::future::try_join_all;
use futures_util::stream::{self, TryStreamExt};
use sealblock_block::{Ability, Device, Durability, Expectations, Request, RequestKind, Response};
use sealblock_btrfs::tags::{has_tag_of, tags_of};
use sealblock_btrfs_engine::format::{DeviceRange, DeviceWrite, FormattedImage, Stage};
use sealblock_integrity::Unsealed;
use sealblock_runtime_memory::Slice;
use sealblock_stack::{Cause, OpenTarget, StackError, device_error, note, signature_places};
use sealblock_units::Extent;

/// Requests in flight at once.
const IN_FLIGHT: usize = 32;
/// Bytes of a discard.
const DISCARD_BYTES: u64 = 1 << 30;

/// Writes everything. Returns the bytes that were discarded on each device.
///
/// # Errors
/// The first failure. The new filesystem is then not complete, and is not found.
pub(super) async fn write(
    image: &FormattedImage,
    opened: &[OpenTarget],
    discards: bool,
) -> Result<Vec<u64>, StackError> {
    let mut discarded = vec![0; opened.len()];
    for (index, stage) in image.stages().enumerate() {
        match stage {
            Stage::Erase(ranges) => {
                each(ranges, |range| erase(opened, range)).await?;
            }
            Stage::Write(writes) => {
                each(writes, |one| write_one(opened, one)).await?;
            }
        }
        flush(opened).await?;
        if index == 0 {
            let clear = async |(devid, one): (u64, &OpenTarget)| {
                let here = image.superblock_places.iter().filter(|range| range.devid == devid);
                let kept: Vec<Range<u64>> = here.map(|range| range.offset..range.offset + range.bytes).collect();
                clear(one, &kept, discards).await
            };
            discarded = try_join_all((1..).zip(opened).map(clear)).await?;
        }
    }
    try_join_all(image.superblocks.iter().map(|one| check_tag(opened, one))).await?;
    Ok(discarded)
}

/// Checks that a superblock has the tag with which it was written: some drives may change application tags.
async fn check_tag(opened: &[OpenTarget], write: &DeviceWrite) -> Result<(), StackError> {
    let Some(tag) = write.tag else { return Ok(()) };
    let one = device(opened, write.devid)?;
    let extent = extent(one, &(write.offset..write.offset + write.bytes.len() as u64))?;
    let read = one.device.execute(Request::read(extent, Expectations::NONE)).await;
    match read.map_err(|error| device_error("read", &error).on(one.target()))? {
        Response::Data(blocks) if has_tag_of(&blocks, tag) => Ok(()),
        _ => {
            let why = "it does not keep application tags, which --csum none needs; the new filesystem cannot be used";
            Err(StackError::new(Cause::Unsuitable, "format", why).on(one.target()))
        }
    }
}

/// Does something with everything, some of it at a time.
async fn each<'a, T, F>(all: &'a [T], work: impl Fn(&'a T) -> F) -> Result<(), StackError>
where
    F: Future<Output = Result<(), StackError>>,
{
    stream::iter(all.iter().map(Ok)).try_for_each_concurrent(IN_FLIGHT, work).await
}

async fn flush(opened: &[OpenTarget]) -> Result<(), StackError> {
    let flush = async |one: &OpenTarget| one.flush().await.map_err(|error| error.on(one.target()));
    try_join_all(opened.iter().map(flush)).await.map(drop)
}

/// The device of a number, which counts from 1.
fn device(opened: &[OpenTarget], devid: u64) -> Result<&OpenTarget, StackError> {
    let index = usize::try_from(devid).ok().and_then(|devid| devid.checked_sub(1));
    index
        .and_then(|index| opened.get(index))
        .ok_or_else(|| StackError::new(Cause::Usage, "format", format!("there is no device {devid}")))
}

async fn erase(opened: &[OpenTarget], range: &DeviceRange) -> Result<(), StackError> {
    zero(device(opened, range.devid)?, range.offset..range.offset + range.bytes).await
}

async fn zero(one: &OpenTarget, range: Range<u64>) -> Result<(), StackError> {
    let request = Request::write_zeroes(extent(one, &range)?, true, Durability::Volatile);
    let written = one.device.execute(request).await;
    written.map(drop).map_err(|error| device_error("write", &error).on(one.target()))
}

async fn write_one(opened: &[OpenTarget], write: &DeviceWrite) -> Result<(), StackError> {
    let one = device(opened, write.devid)?;
    let extent = extent(one, &(write.offset..write.offset + write.bytes.len() as u64))?;
    let geometry = one.device.geometry();
    let tags = tags_of(write.tag, extent.start().get());
    let data = Unsealed::new(Slice::copy_from(&write.bytes), geometry.block_size, geometry.protection, tags);
    let written = one.device.execute(Request::write(extent, data, Durability::Volatile)).await;
    written.map(drop).map_err(|error| device_error("write", &error).on(one.target()))
}

/// The blocks of a range, which begins and ends with a block.
fn extent(one: &OpenTarget, range: &Range<u64>) -> Result<Extent, StackError> {
    let shift = one.device.geometry().block_size.shift();
    let extent = Extent::from_raw(range.start >> shift, (range.end - range.start) >> shift);
    extent.map_err(|error| StackError::new(Cause::Usage, "write", error).on(one.target()))
}

/// Removes what other formats are recognised by, and discards everything but the places of superblocks, if the device
/// can do that itself. Returns the bytes that were discarded.
async fn clear(one: &OpenTarget, kept: &[Range<u64>], discards: bool) -> Result<u64, StackError> {
    let capacity = one.device.geometry().capacity_bytes();
    let can_discard = one.device.abilities().get(RequestKind::Discard) == Ability::Native;
    let discarded = if discards && can_discard { discard(one, kept, capacity).await? } else { 0 };
    // Those of superblocks are zeroed once more, which does no harm.
    let places = signature_places(capacity);
    each(&places, |place| zero(one, place.clone())).await?;
    Ok(discarded)
}

/// Discards what is between these ranges, which rise. A device that fails to do so keeps its old content, which does no
/// harm.
async fn discard(one: &OpenTarget, kept: &[Range<u64>], capacity: u64) -> Result<u64, StackError> {
    let starts = [0].into_iter().chain(kept.iter().map(|range| range.end));
    let ends = kept.iter().map(|range| range.start).chain([capacity]);
    let mut discarded = 0;
    for (start, end) in starts.zip(ends) {
        for at in (start..end).step_by(DISCARD_BYTES as usize) {
            let piece = at..end.min(at + DISCARD_BYTES);
            if let Err(error) = one.device.execute(Request::discard([extent(one, &piece)?])).await {
                note(device_error("discard", &error).on(one.target()));
                return Ok(discarded);
            }
            discarded += piece.end - piece.start;
        }
    }
    Ok(discarded)
}
