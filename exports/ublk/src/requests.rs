//! Translates the kernel's requests to requests of a device, and errors to error numbers, all in one place.

use sealblock_block::{Abilities, Ability, BadBlockCause, Durability, Error, ErrorKind, Geometry, RequestKind};
use sealblock_runtime_ublk::{Attributes, Descriptor, Params, RequestOperation, SECTOR_BYTES};
use sealblock_units::Extent;

use crate::tags::HostGuard;

/// The maximum bytes of a read or write.
pub(crate) const MAX_TRANSFER_BYTES: u32 = 512 << 10;
/// The maximum bytes that are discarded or zeroed at once.
const MAX_UNMAP_BYTES: u64 = 256 << 20;
/// The kernel supports no blocks larger than its pages.
const MAX_BLOCK_SHIFT: u32 = 12;

/// The device parameters for the kernel; `None` if the blocks are larger than the kernel supports.
pub(crate) fn params(
    geometry: &Geometry,
    abilities: &Abilities,
    (is_read_only, is_write_through): (bool, bool),
    guard: Option<HostGuard>,
) -> Option<Params> {
    let shift = geometry.block_size.shift();
    if shift > MAX_BLOCK_SHIFT {
        return None;
    }
    let is_there = |kind| abilities.of(kind) != Ability::Absent;
    let is_read_only = is_read_only || !abilities.writable;
    let unmap_sectors =
        |kind| if is_there(kind) && !is_read_only { (MAX_UNMAP_BYTES / SECTOR_BYTES) as u32 } else { 0 };
    let mut attributes = Attributes::empty();
    attributes.set(Attributes::VOLATILE_CACHE | Attributes::FUA, !is_write_through);
    attributes.set(Attributes::READ_ONLY, is_read_only);
    Some(Params {
        attributes,
        block_shift: shift as u8,
        capacity_sectors: geometry.capacity_bytes() / SECTOR_BYTES,
        max_transfer_sectors: MAX_TRANSFER_BYTES / SECTOR_BYTES as u32,
        max_discard_sectors: unmap_sectors(RequestKind::Discard),
        max_zero_sectors: unmap_sectors(RequestKind::WriteZeroes),
        integrity: guard.map(HostGuard::checksum),
    })
}

/// What the kernel requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Command {
    Read(Extent),
    Write(Extent, Durability),
    Flush,
    Discard(Extent),
    WriteZeroes { extent: Extent, may_unmap: bool, durability: Durability },
}

/// Translates a request; changes get at least this durability. `None` if the device does not support the request.
pub(crate) fn translate(descriptor: &Descriptor, geometry: &Geometry, least: Durability) -> Option<Command> {
    let extent = || {
        let per_block = geometry.block_size.bytes() as u64 / SECTOR_BYTES;
        let (first, sectors) = (descriptor.first_sector, u64::from(descriptor.sectors));
        let is_whole = first.is_multiple_of(per_block) && sectors.is_multiple_of(per_block);
        let extent = Extent::from_raw(first / per_block, sectors / per_block).ok().filter(|_| is_whole)?;
        geometry.check(extent).ok().map(|()| extent)
    };
    let transfer = || extent().filter(|_| u64::from(descriptor.sectors) * SECTOR_BYTES <= MAX_TRANSFER_BYTES.into());
    let durability = |fua| if fua { Durability::ForceUnitAccess } else { least };
    Some(match descriptor.operation {
        RequestOperation::Read => Command::Read(transfer()?),
        RequestOperation::Write { fua } => Command::Write(transfer()?, durability(fua)),
        RequestOperation::Flush => Command::Flush,
        RequestOperation::Discard => Command::Discard(extent()?),
        RequestOperation::WriteZeroes { may_unmap, fua } => {
            Command::WriteZeroes { extent: extent()?, may_unmap, durability: durability(fua) }
        }
    })
}

/// The error number of a failed request. The kernel treats EILSEQ as a protection error and knows ENOSPC and
/// EOPNOTSUPP; others are I/O errors to it.
pub(crate) fn errno(kind: &ErrorKind) -> i32 {
    match kind {
        ErrorKind::Integrity(bad_blocks) => match bad_blocks.first().cause {
            BadBlockCause::Tag(_) => libc::EILSEQ,
            _ => libc::EIO,
        },
        ErrorKind::Expectation { .. } => libc::EILSEQ,
        ErrorKind::Miscompare { .. }
        | ErrorKind::Media { .. }
        | ErrorKind::MayBeOlder(_)
        | ErrorKind::Unreachable { .. }
        | ErrorKind::ReadOnly => libc::EIO,
        ErrorKind::NoSpace { .. } => libc::ENOSPC,
        ErrorKind::Range { .. } | ErrorKind::Limit { .. } => libc::EINVAL,
        ErrorKind::Absent(_) => libc::EOPNOTSUPP,
    }
}

/// The blocks of a failed read that are before its first bad block.
pub(crate) fn good_before(extent: Extent, error: &Error) -> Option<Extent> {
    let first = error.bad_blocks()?.first().lba.get();
    let blocks = first.checked_sub(extent.start().get()).filter(|blocks| (1..extent.len()).contains(blocks))?;
    Extent::from_raw(extent.start().get(), blocks).ok()
}

#[cfg(test)]
mod tests {
    use sealblock_block::{BadBlock, BadBlocks, Limits};
    use sealblock_integrity::Field;
    use sealblock_units::{BlockSize, Lba};

    use super::*;

    fn geometry() -> Geometry {
        let size = BlockSize::B4096;
        let limits = Limits::new(size, 1 << 20, 1 << 10);
        Geometry { block_size: size, capacity_blocks: 1000, protection: None, limits }
    }

    fn descriptor(operation: RequestOperation, first_sector: u64, sectors: u32) -> Descriptor {
        Descriptor { operation, has_tags: false, first_sector, sectors }
    }

    #[test]
    fn whole_blocks_within_the_device_are_translated_and_nothing_else() {
        let read = |first, sectors| {
            translate(&descriptor(RequestOperation::Read, first, sectors), &geometry(), Durability::Volatile)
        };
        let extent = |start, blocks| Extent::from_raw(start, blocks).unwrap();
        assert_eq!(read(16, 24), Some(Command::Read(extent(2, 3))));
        for (first, sectors) in [(1, 8), (0, 7), (0, 0), (7992, 16), (8000, 8), (u64::MAX - 7, 8), (0, 1032)] {
            assert_eq!(read(first, sectors), None, "{first} {sectors}");
        }
        let discard = descriptor(RequestOperation::Discard, 0, 8000);
        assert_eq!(
            translate(&discard, &geometry(), Durability::Volatile),
            Some(Command::Discard(extent(0, 1000))),
            "no data, no limit"
        );
        let flush = descriptor(RequestOperation::Flush, 0, 0);
        assert_eq!(translate(&flush, &geometry(), Durability::Volatile), Some(Command::Flush));
        let write = |fua| descriptor(RequestOperation::Write { fua }, 8, 8);
        let translated = |fua, least| translate(&write(fua), &geometry(), least);
        let (durable, volatile) = (Durability::ForceUnitAccess, Durability::Volatile);
        let as_durable = |durability| Some(Command::Write(extent(1, 1), durability));
        assert_eq!(
            (translated(true, volatile), translated(false, volatile)),
            (as_durable(durable), as_durable(volatile))
        );
        assert_eq!(translated(false, durable), as_durable(durable), "write-through");
    }

    #[test]
    fn a_read_only_device_takes_neither_discards_nor_zeroes() {
        let params = |how| params(&geometry(), &Abilities::COMPLETE, how, Some(HostGuard::Ip)).unwrap();
        let (free, only, through) = (params((false, false)), params((true, false)), params((false, true)));
        assert!(free.attributes.contains(Attributes::VOLATILE_CACHE | Attributes::FUA));
        assert!(!through.attributes.intersects(Attributes::VOLATILE_CACHE | Attributes::FUA));
        assert!(!free.attributes.contains(Attributes::READ_ONLY) && only.attributes.contains(Attributes::READ_ONLY));
        assert_eq!((free.max_discard_sectors, free.max_zero_sectors), (512 << 10, 512 << 10));
        assert_eq!((only.max_discard_sectors, only.max_zero_sectors), (0, 0));
        assert_eq!((free.block_shift, free.capacity_sectors), (12, 8000));
    }

    #[test]
    fn damage_has_the_kernels_error_and_leaves_the_blocks_before_it() {
        let bad =
            |lba, cause| Error::from(BadBlocks::new(vec![BadBlock::new(Lba::new(lba), cause, None, None)]).unwrap());
        let guard = bad(7, BadBlockCause::Tag(Field::Guard));
        assert_eq!(errno(guard.kind()), libc::EILSEQ);
        assert_eq!(errno(bad(7, BadBlockCause::Media).kind()), libc::EIO);
        let extent = |start, blocks| Extent::from_raw(start, blocks).unwrap();
        assert_eq!(good_before(extent(4, 8), &guard), Some(extent(4, 3)));
        assert_eq!((good_before(extent(7, 8), &guard), good_before(extent(8, 8), &guard)), (None, None));
        let unreachable = ErrorKind::Unreachable { reason: String::new() }.into();
        assert_eq!(good_before(extent(4, 8), &unreachable), None);
    }
}
