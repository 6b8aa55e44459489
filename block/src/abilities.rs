//! What a device can do by itself.

use crate::RequestKind;

/// How an operation is carried out on a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ability {
    /// The device does it itself.
    Native,
    /// The gate in front does it with other operations.
    Emulated,
    /// It cannot be had.
    Absent,
}

/// How each optional operation is carried out. Read, Write and Flush are not listed: every device has them.
///
/// A device lists what it does itself (`Native`) and `Absent` for the rest; the gate turns `Absent` into `Emulated` where
/// other operations can stand in, so that what is read behind a gate is what a request will meet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abilities {
    /// Whether data may be written at all.
    pub writable: bool,
    /// Read and check without handing the data on.
    pub verify: Ability,
    /// Compare stored data with the data of the request.
    pub compare: Ability,
    /// Give up blocks; what they read as afterwards is not promised.
    pub discard: Ability,
    /// Make blocks read as zeroes.
    pub write_zeroes: Ability,
    /// Make blocks unreadable. Nothing can stand in for it.
    pub write_uncorrectable: Ability,
    /// Check and sum stored data.
    pub checksum: Ability,
    /// Write damaged blocks anew from another copy. Only a device that holds copies can.
    pub repair: Ability,
    /// Tell which blocks take space.
    pub allocation: Ability,
    /// Room beside the blocks, see [`crate::ReservedArea`]. Nothing can stand in for it.
    pub reserved: Ability,
    /// Bitmap pages of that room, see [`crate::ReservedArea::Bitmap`].
    pub annex_pages: u32,
    /// `WriteZeroes { may_unmap: true }` gives the space back and the blocks still read as zeroes.
    pub unmap_zeroes: bool,
    /// The device is away from this host: operations it does itself move no payload here.
    pub offloads: bool,
    /// Every block has a seal, and a Read or Verify that asks for the guard checks it, here or where the blocks are.
    pub seals: bool,
    /// It holds copies, of which a Read looks at one and a Verify at all.
    pub copies: bool,
}

impl Abilities {
    /// A device that can only read, write and flush.
    pub const BASIC: Abilities = Abilities {
        writable: true,
        verify: Ability::Absent,
        compare: Ability::Absent,
        discard: Ability::Absent,
        write_zeroes: Ability::Absent,
        write_uncorrectable: Ability::Absent,
        checksum: Ability::Absent,
        repair: Ability::Absent,
        allocation: Ability::Absent,
        reserved: Ability::Absent,
        annex_pages: 0,
        unmap_zeroes: false,
        offloads: false,
        seals: false,
        copies: false,
    };

    /// A device in this process that does everything itself but what takes copies, holes and an annex.
    pub const COMPLETE: Abilities = Abilities {
        writable: true,
        verify: Ability::Native,
        compare: Ability::Native,
        discard: Ability::Native,
        write_zeroes: Ability::Native,
        write_uncorrectable: Ability::Native,
        checksum: Ability::Native,
        repair: Ability::Absent,
        allocation: Ability::Absent,
        reserved: Ability::Absent,
        annex_pages: 0,
        unmap_zeroes: true,
        offloads: false,
        seals: false,
        copies: false,
    };

    /// How this kind of operation is carried out.
    pub fn of(&self, kind: RequestKind) -> Ability {
        let when_writable = |ability| if self.writable { ability } else { Ability::Absent };
        match kind {
            RequestKind::Read | RequestKind::Flush => Ability::Native,
            RequestKind::Write => when_writable(Ability::Native),
            RequestKind::Discard => when_writable(self.discard),
            RequestKind::WriteZeroes => when_writable(self.write_zeroes),
            RequestKind::WriteUncorrectable => when_writable(self.write_uncorrectable),
            RequestKind::Verify => self.verify,
            RequestKind::Compare => self.compare,
            RequestKind::Checksum => self.checksum,
            RequestKind::Repair => when_writable(self.repair),
            RequestKind::BlockStatus => self.allocation,
            RequestKind::ReadReserved => self.reserved,
            RequestKind::WriteReserved => when_writable(self.reserved),
        }
    }

    /// What this device and `other` can do where each request may need both: natively what both do natively, and only what
    /// both can.
    pub fn intersect(&self, other: &Abilities) -> Abilities {
        let both = |a, b| match (a, b) {
            (Ability::Absent, _) | (_, Ability::Absent) => Ability::Absent,
            (Ability::Native, Ability::Native) => Ability::Native,
            (Ability::Emulated, _) | (_, Ability::Emulated) => Ability::Emulated,
        };
        Abilities {
            writable: self.writable && other.writable,
            verify: both(self.verify, other.verify),
            compare: both(self.compare, other.compare),
            discard: both(self.discard, other.discard),
            write_zeroes: both(self.write_zeroes, other.write_zeroes),
            write_uncorrectable: both(self.write_uncorrectable, other.write_uncorrectable),
            checksum: both(self.checksum, other.checksum),
            repair: both(self.repair, other.repair),
            allocation: both(self.allocation, other.allocation),
            reserved: both(self.reserved, other.reserved),
            annex_pages: self.annex_pages.min(other.annex_pages),
            unmap_zeroes: self.unmap_zeroes && other.unmap_zeroes,
            offloads: self.offloads && other.offloads,
            seals: self.seals && other.seals,
            copies: self.copies || other.copies,
        }
    }

    /// The abilities as seen in front of a gate, which stands in for what the device lacks.
    pub(crate) fn with_emulation(mut self) -> Abilities {
        let emulated = |ability| if ability == Ability::Absent { Ability::Emulated } else { ability };
        self.verify = emulated(self.verify);
        self.compare = emulated(self.compare);
        self.write_zeroes = emulated(self.write_zeroes);
        self.checksum = emulated(self.checksum);
        self.allocation = emulated(self.allocation);
        self
    }
}
