//! Copy: source ranges to one destination within a namespace. The device copies if it can and if tags stay unchanged;
//! otherwise this code reads and writes pieces of limited size.
//!
//! Reads are checked as always, and must also match PRINFOR. Unless PRACT of PRINFOW requests new tags, a block keeps
//! its guard and its application and storage tags; only the reference tag becomes that of the destination. No guard is
//! computed from data that were read, so a guard that its host wrote wrong stays wrong.

use sealblock_block::{Device, Durability, ErrorKind, Expectations, Request, RequestKind, Response};
use sealblock_integrity::{Checks, Keep, PiFormat, ProtectionType, RebaseTags, Sealed, Tags, Unverified, rebase};
use sealblock_protocols_nvme::nvm::{CopyCommand, CopyLimits, CopyRange};
use sealblock_protocols_nvme::{Count8, StatusCode};
use sealblock_runtime_memory::Buffer;
use sealblock_runtime_reactor::submitted;
use sealblock_units::{BlockCount, BlockSize, Extent, Lba};

use crate::command::queue_context::{NamespaceHandle, QueueContext, execute, record};
use crate::command::reply::Reply;
use crate::model::command_error::CommandError;
use crate::model::damage_list::RequestSummary;

/// The maximum data of one Copy, in bytes.
const COPY_BYTES: u64 = 64 << 20;
/// Bytes of data that it reads at a time; it needs as much memory again while it makes the tags of the destination.
const PIECE_BYTES: u64 = 512 << 10;
/// MSRC: source ranges of one Copy.
const RANGES: u16 = 128;

/// The limits of one Copy on a namespace with this block size.
pub(crate) fn limits(size: BlockSize) -> CopyLimits {
    let total = COPY_BYTES >> size.shift();
    CopyLimits {
        range_blocks: total.min(u64::from(u16::MAX)) as u16,
        total_blocks: total as u32,
        ranges: Count8::saturating(RANGES),
    }
}

/// Memory in bytes that a Copy with this list needs at a time; none if it cannot be executed.
pub(crate) fn held_bytes(namespace: &NamespaceHandle, args: &CopyCommand, list: &[u8]) -> u64 {
    let geometry = namespace.device.geometry();
    let parsed = args.parse(list, geometry.capacity_blocks, &limits(geometry.block_size));
    parsed.map_or(0, |(destination, _)| 2 * destination.bytes(geometry.block_size).min(PIECE_BYTES))
}

/// Executes Copy. If its queue has ended, no further piece is copied. If it fails, the result is the first source range
/// that was not copied.
pub(crate) async fn copy(
    namespace: &NamespaceHandle,
    queue: &QueueContext,
    args: &CopyCommand,
    list: &[u8],
    durability: Durability,
) -> Result<Reply, CommandError> {
    let geometry = namespace.device.geometry();
    let (destination, ranges) = args.parse(list, geometry.capacity_blocks, &limits(geometry.block_size))?;
    args.write.validate(namespace.format(), destination.start())?;
    for range in &ranges {
        range.protection.validate(namespace.format(), range.extent.start())?;
        if range.extent.overlaps(destination) {
            return Err(StatusCode::OVERLAPPING_IO_RANGE.status().with_dnr(true).into());
        }
    }
    let mut to = destination.start().get();
    for (i, range) in ranges.iter().enumerate() {
        let failed = |error: CommandError| CommandError { result: i as u64, ..error };
        copy_range((namespace, queue), args, range, to, to - destination.start().get(), durability)
            .await
            .map_err(failed)?;
        to += range.extent.len();
    }
    Ok(Reply::Done(0))
}

/// Copies one source range to the blocks from `to` on, `done` blocks after the start of the destination.
async fn copy_range(
    (namespace, queue): (&NamespaceHandle, &QueueContext),
    args: &CopyCommand,
    range: &CopyRange,
    to: u64,
    done: u64,
    durability: Durability,
) -> Result<(), CommandError> {
    let geometry = namespace.device.geometry();
    let piece_blocks = BlockCount::new((PIECE_BYTES >> geometry.block_size.shift()) as u32).unwrap_or(BlockCount::ONE);
    let source = range.extent;
    let expectations = namespace.expectations(&range.protection);
    if stays_as_it_is(namespace, args, expectations.checks())
        && by_device(namespace, source, to, expectations, durability).await?
    {
        return Ok(());
    }
    for piece in source.split_aligned(piece_blocks) {
        queue.check_goes_on()?;
        let first = piece.start().get() - source.start().get();
        let expected = expectations.advance(first, geometry.protection);
        let Response::Data(read) = execute(namespace, Request::read(piece, expected)).await? else {
            return Err(StatusCode::INTERNAL_ERROR.into());
        };
        let at = Extent::from_raw(to + first, piece.len()).map_err(|_| StatusCode::LBA_OUT_OF_RANGE)?;
        let data = resealed(namespace, args, &read, at, done + first)?;
        execute(namespace, Request::write(at, data, durability)).await?;
        // A device may complete at once; without this yield no other task would run.
        submitted().await;
    }
    Ok(())
}

/// True if the device copies, the copy has the same tags as its source, and what PRINFOW requires of them is included
/// in the checks of the source. No device copies if reference tags depend on the address.
fn stays_as_it_is(namespace: &NamespaceHandle, args: &CopyCommand, expected: &Checks) -> bool {
    if !namespace.device.abilities().is_native(RequestKind::Copy) {
        return false;
    }
    match (namespace.device.geometry().protection, namespace.format()) {
        (None, _) => true,
        (Some(stored), _) if stored.protection().increments_ref_tag() => false,
        (Some(_), None) => true,
        (Some(_), Some(format)) => {
            !args.write.pract && {
                let demanded = args.write.checks(format, format.storage_tag_mask());
                (expected.guard || !demanded.guard)
                    && (demanded.app_tag.is_none() || demanded.app_tag == expected.app_tag)
                    && (demanded.storage_tag.is_none() || demanded.storage_tag == expected.storage_tag)
            }
        }
    }
}

/// Lets the device copy one source range; false if it cannot do so in this form, and then nothing, or only a part, was
/// copied.
async fn by_device(
    namespace: &NamespaceHandle,
    source: Extent,
    to: u64,
    expectations: Expectations,
    durability: Durability,
) -> Result<bool, CommandError> {
    let to = Extent::from_raw(to, source.len()).map_err(|_| StatusCode::LBA_OUT_OF_RANGE)?;
    let copy = Request::copy(source, to, expectations, durability);
    let written = RequestSummary::of(&copy, namespace.device.geometry());
    match namespace.device.execute(copy).await {
        Err(error) if *error.kind() == ErrorKind::Absent(RequestKind::Copy) => Ok(false),
        // Its block addresses are those of the source.
        Err(error) if error.bad_blocks().is_some() => {
            let read = RequestSummary::of(&Request::read(source, expectations), namespace.device.geometry());
            record(namespace, &read, Err(error)).map(|_| true)
        }
        outcome => record(namespace, &written, outcome).map(|_| true),
    }
}

/// Returns the blocks as they will be written, `offset` blocks after the start of the destination.
fn resealed(
    namespace: &NamespaceHandle,
    args: &CopyCommand,
    read: &Sealed,
    at: Extent,
    offset: u64,
) -> Result<Sealed, CommandError> {
    let Some(stored) = namespace.device.geometry().protection else { return Ok(read.clone()) };
    let shown = namespace.format();
    let initial_ref_tag = destination_ref(stored, shown.is_some().then_some(args), at.start(), offset);
    if let Some(format) = shown.filter(|_| args.write.pract) {
        let tags = args.write.tags(format);
        let initial_ref_tag = initial_ref_tag.unwrap_or(tags.initial_ref_tag);
        return Ok(Sealed::seal(read.joined_data(), read.size(), Some(stored), &Tags { initial_ref_tag, ..tags }));
    }
    let tags =
        RebaseTags { initial_ref_tag: initial_ref_tag.map_or(Keep::Keep, Keep::Replace), ..RebaseTags::default() };
    let (data, tags_read) = (read.joined_data(), read.joined_tags());
    let mut moved = Buffer::zeroed(tags_read.len());
    rebase(stored, stored, read.size(), &data, &tags_read, &mut moved, &Checks::NONE, &tags, &mut |_| {});
    let moved =
        Unverified::new(data, moved.freeze(), read.size(), Some(stored)).map_err(|_| StatusCode::INTERNAL_ERROR)?;
    let checks = match shown {
        Some(format) => args.write.checks(format, format.storage_tag_mask()).advance(offset, format),
        None => Checks::NONE,
    };
    // A guard that was wrong when its host wrote it is copied as it is.
    moved.verify(&Checks { guard: checks.guard || read.has_verified_guards(), ..checks }).map_err(|bad| {
        let first = bad.first().expect("a failed check names a block");
        CommandError::of_error(&ErrorKind::unexpected(at.start(), first).into(), RequestKind::Write)
    })
}

/// Returns the reference tag of the first block of a piece: its address in Type 1 and on plain namespaces, the value of
/// the command in Type 2, and that of the source (`None`) in Type 3.
fn destination_ref(stored: PiFormat, args: Option<&CopyCommand>, at: Lba, offset: u64) -> Option<u64> {
    match (stored.protection(), args) {
        (ProtectionType::Type3, _) => None,
        (ProtectionType::Type2, Some(args)) => Some(stored.reference_tag(args.write.reference_tag(stored), offset)),
        (ProtectionType::Type1 | ProtectionType::Type2, _) => Some(stored.reference_tag(at.get(), 0)),
    }
}
