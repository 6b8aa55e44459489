//! Devices: the trait, their geometry, limits and abilities.

use std::rc::Rc;

use sealblock_integrity::{ChecksumKind, PiFormat};
use sealblock_units::{BlockCount, BlockSize, Extent, Lba};

use crate::{Error, ErrorKind, Freshness, Operation, Outcome, Request, RequestKind, WriteData};

/// Something that stores blocks.
///
/// A device may rely on the gate in front of it: requests are in range, within its limits, fit its geometry, and are of
/// a kind that it lists as native.
pub trait Device {
    /// The geometry; it does not change while the device is open.
    fn geometry(&self) -> &Geometry;

    /// What the device executes itself.
    fn abilities(&self) -> Abilities;

    /// Executes one request. Several may be in flight at once, in any order; a Flush covers the writes that completed
    /// before it started.
    ///
    /// Dropping the future gives up the outcome, and not the request: a change may then be executed wholly, in part or not at all, also
    /// later, after other changes of its blocks. So exports and sessions wait for the changes that they have begun. A device may promise
    /// more in its own documentation: a volume does not execute later what it has not executed by then.
    fn execute(&self, request: Request) -> impl Future<Output = Outcome>;

    /// True if [`Device::try_execute`] may return an outcome. Where it is false, nobody tries.
    fn executes_in_place(&self) -> bool {
        false
    }

    /// Executes a request in place if the device need not wait for anything; `None` if the request was not started and has to go
    /// through [`Device::execute`]. This saves a future per small request.
    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        let _ = request;
        None
    }
}

impl<D: Device> Device for Rc<D> {
    fn geometry(&self) -> &Geometry {
        Device::geometry(&**self)
    }

    fn abilities(&self) -> Abilities {
        Device::abilities(&**self)
    }

    fn execute(&self, request: Request) -> impl Future<Output = Outcome> {
        Device::execute(&**self, request)
    }

    fn executes_in_place(&self) -> bool {
        Device::executes_in_place(&**self)
    }

    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        Device::try_execute(&**self, request)
    }
}

/// The maximum sizes of one request. The gate splits larger ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Blocks of a Read, Salvage, Write or Compare.
    pub max_transfer_blocks: BlockCount,
    /// Blocks of a Verify, Checksum, Repair or BlockStatus, which move no payload and can be larger.
    pub max_verify_blocks: BlockCount,
    /// Blocks of a WriteZeroes, a WriteUncorrectable, or one extent of a Discard.
    pub max_zero_blocks: BlockCount,
}

impl Limits {
    /// Limits of `transfer_bytes` of payload for transfers and `zero_blocks` for writes without payload.
    pub fn new(size: BlockSize, transfer_bytes: usize, zero_blocks: u32) -> Limits {
        let transfer = (transfer_bytes >> size.shift()).clamp(1, u32::MAX as usize) as u32;
        let count = |blocks| BlockCount::new(blocks).unwrap_or(BlockCount::ONE);
        Limits {
            max_transfer_blocks: count(transfer),
            max_verify_blocks: count(transfer),
            max_zero_blocks: count(zero_blocks),
        }
    }
}

/// The geometry of a device; it does not change while the device is open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Bytes of data in one block.
    pub block_size: BlockSize,
    /// Number of blocks.
    pub capacity_blocks: u64,
    /// Format of the protection information that every block carries, if any.
    pub protection: Option<PiFormat>,
    /// The maximum sizes of one request.
    pub limits: Limits,
}

impl Geometry {
    /// Bytes of data on the whole device.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_blocks << self.block_size.shift()
    }

    /// All blocks of the device, in extents of at most `piece` blocks; empty for a device without blocks.
    pub fn whole(&self, piece: BlockCount) -> impl Iterator<Item = Extent> + use<> {
        let (capacity, step) = (self.capacity_blocks, u64::from(piece.get()));
        (0..capacity.div_ceil(step)).filter_map(move |i| Extent::from_raw(i * step, step.min(capacity - i * step)).ok())
    }

    /// Rejects an extent that goes past the end of the device.
    pub fn check(&self, extent: Extent) -> Result<(), Error> {
        if extent.fits(self.capacity_blocks) {
            return Ok(());
        }
        let last = Lba::new(self.capacity_blocks.saturating_sub(1));
        Err(ErrorKind::Range { extent, last }.into())
    }
}

/// How a request kind is executed on a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ability {
    /// The device executes it.
    Native,
    /// The gate executes it by requests of other kinds.
    Emulated,
    /// Neither executes it: the request fails.
    Absent,
}

/// How each optional request kind is executed. Read, Write and Flush are not listed: every device has them.
///
/// A device lists `Native` for what it executes itself and `Absent` for the rest. The gate turns `Absent` into
/// `Emulated` if it can emulate the kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abilities {
    /// True if the device accepts writes.
    pub writable: bool,
    /// Accept write data without tags and make the tags ([`crate::WriteData`]). For other devices the gate seals the
    /// data.
    pub seals_writes: Ability,
    /// Return what is left of blocks that may be bad. A gate cannot emulate it: a Read returns nothing for a bad block.
    pub salvage: Ability,
    /// Read and check without returning the data.
    pub verify: Ability,
    /// Compare stored data with the data of the request.
    pub compare: Ability,
    /// Deallocate blocks; their content is undefined afterwards.
    pub discard: Ability,
    /// Make blocks read as zeroes.
    pub write_zeroes: Ability,
    /// Copy blocks within the device, with their tags. A gate does not emulate it: the caller reads and writes instead.
    /// If reference tags depend on the address (Types 1 and 2), tags cannot stay unchanged, so such a device does not
    /// support it.
    pub copy: Ability,
    /// The maximum number of blocks of a CompareAndWrite, which is atomic with respect to every initiator of the
    /// device; 0 if unsupported. A gate does not emulate it: a Compare and a Write under a lock of this process are
    /// atomic only for those who share the lock. A caller for whom such a lock is enough uses these two.
    pub compare_and_write_blocks: u32,
    /// Make blocks unreadable. A gate cannot emulate it.
    pub write_uncorrectable: Ability,
    /// Check stored data and return its CRC-64/NVME.
    pub checksum: Ability,
    /// Check stored data and return its CRC-32C.
    pub checksum_crc32c: Ability,
    /// Rewrite bad blocks from another copy. Only a device with copies can.
    pub repair: Ability,
    /// Return which blocks are allocated.
    pub block_status: Ability,
    /// The reserved area, see [`crate::ReservedArea`]. A gate cannot emulate it.
    pub reserved: Ability,
    /// Number of bitmap pages of the reserved area, see [`crate::ReservedArea::Bitmap`].
    pub bitmap_pages: u32,
    /// True if `WriteZeroes { may_unmap: true }` deallocates blocks and they still read as zeroes.
    pub unmap_zeroes: bool,
    /// True if kinds that the device executes itself move no payload to this host: it is remote, or a drive.
    pub offloads: bool,
    /// True if every block has a seal, which every Read and Verify checks, on this host or on the remote one.
    pub seals: bool,
    /// True if the device has copies. A Read checks one of them and a Verify all.
    pub copies: bool,
    /// Whether the blocks have their newest content. This is no ability, but a layer that passes on or combines
    /// abilities cannot forget it here. It may change while the device is open.
    pub freshness: Freshness,
}

impl Abilities {
    /// A device that can only read, write and flush.
    pub const BASIC: Abilities = Abilities {
        writable: true,
        seals_writes: Ability::Absent,
        salvage: Ability::Absent,
        verify: Ability::Absent,
        compare: Ability::Absent,
        discard: Ability::Absent,
        write_zeroes: Ability::Absent,
        copy: Ability::Absent,
        compare_and_write_blocks: 0,
        write_uncorrectable: Ability::Absent,
        checksum: Ability::Absent,
        checksum_crc32c: Ability::Absent,
        repair: Ability::Absent,
        block_status: Ability::Absent,
        reserved: Ability::Absent,
        bitmap_pages: 0,
        unmap_zeroes: false,
        offloads: false,
        seals: false,
        copies: false,
        freshness: Freshness::Current,
    };

    /// A device in this process that executes everything itself and seals what it writes, except Copy, CompareAndWrite
    /// and what needs copies, holes or a reserved area.
    pub const COMPLETE: Abilities = Abilities {
        writable: true,
        seals_writes: Ability::Native,
        salvage: Ability::Absent,
        verify: Ability::Native,
        compare: Ability::Native,
        discard: Ability::Native,
        write_zeroes: Ability::Native,
        copy: Ability::Absent,
        compare_and_write_blocks: 0,
        write_uncorrectable: Ability::Native,
        checksum: Ability::Native,
        checksum_crc32c: Ability::Native,
        repair: Ability::Absent,
        block_status: Ability::Absent,
        reserved: Ability::Absent,
        bitmap_pages: 0,
        unmap_zeroes: true,
        offloads: false,
        seals: false,
        copies: false,
        freshness: Freshness::Current,
    };

    /// How this request is executed: see [`Abilities::of`], but a Checksum depends on its kind, and a Write without
    /// tags on how they are made.
    pub fn of_request(&self, request: &Request) -> Ability {
        match request.operation {
            Operation::Checksum(kind, _) => self.of_checksum(kind),
            Operation::Write(WriteData::Unsealed(_)) if self.writable => self.seals_writes,
            _ => self.of(request.kind()),
        }
    }

    /// How checksums of this kind are computed.
    pub fn of_checksum(&self, kind: ChecksumKind) -> Ability {
        match kind {
            ChecksumKind::Crc64Nvme => self.checksum,
            ChecksumKind::Crc32c => self.checksum_crc32c,
        }
    }

    /// How requests of this kind are executed. For a Checksum, the default kind counts; see [`Abilities::of_request`].
    pub fn of(&self, kind: RequestKind) -> Ability {
        let when_writable = |ability| if self.writable { ability } else { Ability::Absent };
        match kind {
            RequestKind::Read | RequestKind::Flush => Ability::Native,
            RequestKind::Write => when_writable(Ability::Native),
            RequestKind::Discard => when_writable(self.discard),
            RequestKind::WriteZeroes => when_writable(self.write_zeroes),
            RequestKind::Copy => when_writable(self.copy),
            RequestKind::CompareAndWrite if self.compare_and_write_blocks == 0 => Ability::Absent,
            RequestKind::CompareAndWrite => when_writable(Ability::Native),
            RequestKind::WriteUncorrectable => when_writable(self.write_uncorrectable),
            RequestKind::Salvage => self.salvage,
            RequestKind::Verify => self.verify,
            RequestKind::Compare => self.compare,
            RequestKind::Checksum => self.checksum,
            RequestKind::Repair => when_writable(self.repair),
            RequestKind::BlockStatus => self.block_status,
            RequestKind::ReadReserved => self.reserved,
            RequestKind::WriteReserved => when_writable(self.reserved),
        }
    }

    /// The abilities of a group in which each request may need this device and `other`: native if both are native,
    /// absent if one of them is absent.
    pub fn intersect(&self, other: &Abilities) -> Abilities {
        let both = |a, b| match (a, b) {
            (Ability::Absent, _) | (_, Ability::Absent) => Ability::Absent,
            (Ability::Native, Ability::Native) => Ability::Native,
            (Ability::Emulated, _) | (_, Ability::Emulated) => Ability::Emulated,
        };
        Abilities {
            writable: self.writable && other.writable,
            seals_writes: both(self.seals_writes, other.seals_writes),
            salvage: both(self.salvage, other.salvage),
            verify: both(self.verify, other.verify),
            compare: both(self.compare, other.compare),
            discard: both(self.discard, other.discard),
            write_zeroes: both(self.write_zeroes, other.write_zeroes),
            copy: both(self.copy, other.copy),
            compare_and_write_blocks: self.compare_and_write_blocks.min(other.compare_and_write_blocks),
            write_uncorrectable: both(self.write_uncorrectable, other.write_uncorrectable),
            checksum: both(self.checksum, other.checksum),
            checksum_crc32c: both(self.checksum_crc32c, other.checksum_crc32c),
            repair: both(self.repair, other.repair),
            block_status: both(self.block_status, other.block_status),
            reserved: both(self.reserved, other.reserved),
            bitmap_pages: self.bitmap_pages.min(other.bitmap_pages),
            unmap_zeroes: self.unmap_zeroes && other.unmap_zeroes,
            offloads: self.offloads && other.offloads,
            seals: self.seals && other.seals,
            copies: self.copies || other.copies,
            freshness: self.freshness.and(other.freshness),
        }
    }

    /// The abilities that a gate offers: it emulates what the device lacks.
    pub(crate) fn with_emulation(mut self) -> Abilities {
        let emulated = |ability| if ability == Ability::Absent { Ability::Emulated } else { ability };
        self.seals_writes = emulated(self.seals_writes);
        self.verify = emulated(self.verify);
        self.compare = emulated(self.compare);
        self.write_zeroes = emulated(self.write_zeroes);
        self.checksum = emulated(self.checksum);
        self.checksum_crc32c = emulated(self.checksum_crc32c);
        self.block_status = emulated(self.block_status);
        self
    }
}
