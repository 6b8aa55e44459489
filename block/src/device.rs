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

/// How a request kind is executed on a device. Of two devices that a request needs, the bits that both have count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Ability {
    /// The device executes it.
    Native = 0b11,
    /// The gate executes it by requests of other kinds.
    Emulated = 0b01,
    /// Neither executes it: the request fails.
    Absent = 0b00,
}

impl Ability {
    /// Of a device that executes a kind itself, or not at all.
    pub const fn native_if(is_native: bool) -> Ability {
        if is_native { Ability::Native } else { Ability::Absent }
    }
}

/// How each request kind is executed. Every device has Read, Flush and, if it is writable, Write of data with tags.
///
/// A device lists `Native` for what it executes itself and `Absent` for the rest. The gate turns `Absent` into
/// `Emulated` if it can emulate the kind. It cannot emulate
///
/// - a Salvage: a Read returns nothing for a bad block;
/// - a Copy: the caller reads and writes instead. If reference tags depend on the address (Types 1 and 2), tags cannot
///   stay unchanged, so no such device lists it;
/// - a CompareAndWrite: a Compare and a Write under a lock of this process are atomic only for those who share the lock.
///   A caller for whom such a lock is enough uses these two;
/// - a Repair, which only a device with copies can execute, a Discard, a WriteUncorrectable and the reserved area.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abilities {
    /// What is listed for each kind: see [`Abilities::get`] and [`Abilities::with`].
    pub kinds: KindAbilities,
    /// True if the device accepts writes.
    pub writable: bool,
    /// The maximum number of blocks of a CompareAndWrite, which is atomic with respect to every initiator of the
    /// device; 0 if unsupported.
    pub compare_and_write_blocks: u32,
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

/// The [`Ability`] of each request kind, in two bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KindAbilities(u64);

/// The first bit of a kind. Both kinds of the reserved area have the same.
const fn slot(kind: RequestKind) -> usize {
    2 * match kind {
        RequestKind::WriteReserved => RequestKind::ReadReserved.index(),
        kind => kind.index(),
    }
}

/// The first bit of a kind of Checksum.
const fn checksum_slot(kind: ChecksumKind) -> usize {
    match kind {
        ChecksumKind::Crc64Nvme => slot(RequestKind::Checksum),
        ChecksumKind::Crc32c => 2 * RequestKind::ALL.len(),
    }
}

impl Abilities {
    /// A device that can only read, write and flush.
    pub const BASIC: Abilities = Abilities {
        kinds: KindAbilities(0b11 << slot(RequestKind::Read) | 0b11 << slot(RequestKind::Flush)),
        writable: true,
        compare_and_write_blocks: 0,
        bitmap_pages: 0,
        unmap_zeroes: false,
        offloads: false,
        seals: false,
        copies: false,
        freshness: Freshness::Current,
    };

    /// A device in this process that executes everything itself and seals what it writes, except Copy, CompareAndWrite
    /// and what needs copies, holes or a reserved area.
    pub const COMPLETE: Abilities = Abilities { unmap_zeroes: true, ..Abilities::BASIC }
        .with([RequestKind::Write, RequestKind::Verify, RequestKind::Compare, RequestKind::Discard], Ability::Native)
        .with([RequestKind::WriteZeroes, RequestKind::WriteUncorrectable], Ability::Native)
        .with_checksums(Ability::Native);

    /// What a gate emulates.
    const EMULATED: Abilities = Abilities::BASIC
        .with([RequestKind::Write, RequestKind::Verify, RequestKind::Compare], Ability::Emulated)
        .with([RequestKind::WriteZeroes, RequestKind::BlockStatus], Ability::Emulated)
        .with_checksums(Ability::Emulated);

    /// What is listed for this kind, whether or not the device is writable; see [`Abilities::of`]. For a Write: whether
    /// the device accepts data without tags and makes the tags ([`WriteData`]); for other devices the gate seals the
    /// data. A CompareAndWrite is listed by its number of blocks, and not here.
    pub const fn get(&self, kind: RequestKind) -> Ability {
        self.at(slot(kind))
    }

    /// True if the device lists this kind as native, whether or not it is writable.
    pub fn is_native(&self, kind: RequestKind) -> bool {
        self.get(kind) == Ability::Native
    }

    /// Lists this kind; for a Checksum, the default kind of it.
    pub const fn set(&mut self, kind: RequestKind, ability: Ability) {
        self.set_at(slot(kind), ability);
    }

    /// Lists this kind of Checksum.
    pub const fn set_checksum(&mut self, kind: ChecksumKind, ability: Ability) {
        self.set_at(checksum_slot(kind), ability);
    }

    /// The same abilities, but for these kinds.
    #[must_use]
    pub const fn with<const N: usize>(mut self, kinds: [RequestKind; N], ability: Ability) -> Abilities {
        let mut at = 0;
        while at < N {
            self.set(kinds[at], ability);
            at += 1;
        }
        self
    }

    /// The same abilities, but for both kinds of Checksum.
    #[must_use]
    pub const fn with_checksums(mut self, ability: Ability) -> Abilities {
        self.set_checksum(ChecksumKind::Crc64Nvme, ability);
        self.set_checksum(ChecksumKind::Crc32c, ability);
        self
    }

    const fn at(&self, slot: usize) -> Ability {
        match self.kinds.0 >> slot & 0b11 {
            0b00 => Ability::Absent,
            0b01 => Ability::Emulated,
            _ => Ability::Native,
        }
    }

    const fn set_at(&mut self, slot: usize, ability: Ability) {
        self.kinds.0 = self.kinds.0 & !(0b11 << slot) | (ability as u64) << slot;
    }

    /// How this request is executed: see [`Abilities::of`], but a Checksum depends on its kind, and a Write without
    /// tags on how they are made.
    pub fn of_request(&self, request: &Request) -> Ability {
        match request.operation {
            Operation::Checksum(kind, _) => self.of_checksum(kind),
            Operation::Write(WriteData::Unsealed(_)) if self.writable => self.get(RequestKind::Write),
            _ => self.of(request.kind()),
        }
    }

    /// How checksums of this kind are computed.
    pub const fn of_checksum(&self, kind: ChecksumKind) -> Ability {
        self.at(checksum_slot(kind))
    }

    /// How requests of this kind are executed. For a Checksum, the default kind counts; see [`Abilities::of_request`].
    pub fn of(&self, kind: RequestKind) -> Ability {
        match kind {
            _ if !self.writable && (kind.changes_blocks() || kind == RequestKind::WriteReserved) => Ability::Absent,
            RequestKind::Write => Ability::Native,
            RequestKind::CompareAndWrite if self.compare_and_write_blocks > 0 => Ability::Native,
            RequestKind::CompareAndWrite => Ability::Absent,
            _ => self.get(kind),
        }
    }

    /// The abilities of a group in which each request may need this device and `other`: native if both are native,
    /// absent if one of them is absent.
    pub fn intersect(&self, other: &Abilities) -> Abilities {
        Abilities {
            kinds: KindAbilities(self.kinds.0 & other.kinds.0),
            writable: self.writable && other.writable,
            compare_and_write_blocks: self.compare_and_write_blocks.min(other.compare_and_write_blocks),
            bitmap_pages: self.bitmap_pages.min(other.bitmap_pages),
            unmap_zeroes: self.unmap_zeroes && other.unmap_zeroes,
            offloads: self.offloads && other.offloads,
            seals: self.seals && other.seals,
            copies: self.copies || other.copies,
            freshness: self.freshness.and(other.freshness),
        }
    }

    /// The abilities that a gate offers: it emulates what the device lacks.
    pub(crate) fn with_emulation(self) -> Abilities {
        Abilities { kinds: KindAbilities(self.kinds.0 | Abilities::EMULATED.kinds.0), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Ability; 3] = [Ability::Absent, Ability::Emulated, Ability::Native];

    #[test]
    fn each_kind_is_listed_by_itself_but_for_both_of_the_reserved_area() {
        for (kind, ability) in RequestKind::ALL.into_iter().flat_map(|kind| ALL.map(|ability| (kind, ability))) {
            let before = Abilities::COMPLETE;
            let now = before.with([kind], ability);
            assert_eq!((now.get(kind), now.is_native(kind)), (ability, ability == Ability::Native));
            let is_reserved = |kind| matches!(kind, RequestKind::ReadReserved | RequestKind::WriteReserved);
            for other in RequestKind::ALL.into_iter().filter(|other| *other != kind) {
                let is_same = is_reserved(kind) && is_reserved(other);
                assert_eq!(now.get(other), if is_same { ability } else { before.get(other) }, "{kind:?}, {other:?}");
            }
            assert_eq!(now.of_checksum(ChecksumKind::Crc32c), Ability::Native, "{kind:?}");
            assert_eq!(now.of_checksum(ChecksumKind::Crc64Nvme), now.get(RequestKind::Checksum));
        }
        let mut crc32c = Abilities::BASIC;
        crc32c.set_checksum(ChecksumKind::Crc32c, Ability::Native);
        assert!(RequestKind::ALL.iter().all(|kind| crc32c.get(*kind) == Abilities::BASIC.get(*kind)));
    }

    #[test]
    fn a_group_has_what_all_have_and_a_gate_adds_what_it_can_emulate() {
        for (a, b) in ALL.into_iter().flat_map(|a| ALL.map(|b| (a, b))) {
            let of = |ability| Abilities::BASIC.with([RequestKind::Verify, RequestKind::Salvage], ability);
            let both = of(a).intersect(&of(b)).get(RequestKind::Verify);
            assert_eq!(both == Ability::Native, a == Ability::Native && b == Ability::Native, "{a:?}, {b:?}");
            assert_eq!(both == Ability::Absent, a == Ability::Absent || b == Ability::Absent, "{a:?}, {b:?}");
            let gate = of(a).with_emulation();
            assert_eq!(gate.get(RequestKind::Verify), if a == Ability::Absent { Ability::Emulated } else { a });
            assert_eq!(gate.get(RequestKind::Salvage), a, "no gate emulates it");
        }
    }

    #[test]
    fn a_device_that_takes_no_writes_changes_nothing() {
        let every = RequestKind::ALL.iter().fold(Abilities::COMPLETE, |all, kind| all.with([*kind], Ability::Native));
        let writable = Abilities { compare_and_write_blocks: 1, ..every };
        let read_only = Abilities { writable: false, ..writable };
        for kind in RequestKind::ALL {
            let is_change = kind.changes_blocks() || kind == RequestKind::WriteReserved;
            assert_eq!(writable.of(kind), Ability::Native, "{kind:?}");
            assert_eq!(read_only.of(kind), Ability::native_if(!is_change), "{kind:?}");
        }
    }

    /// They are copied for each request.
    #[test]
    fn abilities_are_three_words() {
        assert!(size_of::<Abilities>() <= 24, "{} bytes", size_of::<Abilities>());
    }
}
