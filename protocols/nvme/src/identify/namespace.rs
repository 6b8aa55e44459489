//! Identify Namespace of the NVM command set (CNS 00h) and the part independent of command sets (CNS 08h).

use sealblock_integrity::{PiPosition, ProtectionType};

use crate::wire::{Count8, Count16, Field, flags, layout};

flags! {
    /// Metadata Capabilities (MC).
    pub struct Mc(u8) {
        /// MTELBAS: metadata behind each block.
        EXTENDED = 0,
    }
}

flags! {
    /// End-to-end Data Protection Capabilities (DPC).
    pub struct Dpc(u8) {
        /// Type 1.
        TYPE_1 = 0,
        /// Type 2.
        TYPE_2 = 1,
        /// Type 3.
        TYPE_3 = 2,
        /// Tuple first in the metadata.
        FIRST = 3,
        /// Tuple last in the metadata.
        LAST = 4,
    }
}

flags! {
    /// Namespace sharing (NMIC).
    pub struct Nmic(u8) {
        /// More than one controller may have the namespace.
        SHARED = 0,
    }
}

flags! {
    /// Namespace Status (NSTAT of CNS 08h).
    pub struct Nstat(u8) {
        /// NRDY: the namespace is ready.
        READY = 0,
    }
}

flags! {
    /// Deallocate Logical Block Features (DLFEAT); bits 2:0 tell what a deallocated block reads as.
    pub struct Dlfeat(u8) {
        /// DRB 001b: as zeroes.
        READS_ZEROES = 0,
        /// DRB 010b: as FFh.
        READS_ONES = 1,
        /// WZDS: Write Zeroes has DEAC.
        WRITE_ZEROES_DEALLOCATE = 3,
    }
}

impl Dlfeat {
    /// Whether deallocated blocks read as zeroes, and nothing else is said about them.
    pub const fn reads_zeroes(self) -> bool {
        self.bits() & 7 == 1
    }
}

/// The formatted LBA size (FLBAS): which format, and where metadata is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Flbas {
    /// FIDXU and FIDXL: index of the format, 0 to 63. Hosts ignore the upper two bits with 16 formats or fewer.
    pub index: u8,
    /// MTELBA: metadata follows each block in one buffer.
    pub extended: bool,
}

impl Field for Flbas {
    const BYTES: usize = 1;
    const ZERO: Self = Flbas { index: 0, extended: false };
    fn put(&self, to: &mut [u8]) {
        (self.index & 0xF | u8::from(self.extended) << 4 | (self.index >> 4 & 3) << 5).put(to);
    }
    fn get(from: &[u8]) -> Self {
        let bits = u8::get(from);
        Flbas { index: bits & 0xF | (bits >> 5 & 3) << 4, extended: bits & 0x10 != 0 }
    }
}

/// Data protection settings (DPS): type of protection and position of the tuple.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Dps(u8);

impl Dps {
    /// No protection information.
    pub const NONE: Dps = Dps(0);

    /// Protection of this type with the tuple there.
    pub const fn new(protection: ProtectionType, position: PiPosition) -> Dps {
        let kind = match protection {
            ProtectionType::Type1 => 1,
            ProtectionType::Type2 => 2,
            ProtectionType::Type3 => 3,
        };
        match position {
            PiPosition::First => Dps(kind | 8),
            PiPosition::Last => Dps(kind),
        }
    }

    /// The bits.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// PIT: the type, `None` without protection; the reserved values 4 to 7 are an error with their number.
    pub const fn protection(self) -> Result<Option<ProtectionType>, u8> {
        match self.0 & 7 {
            0 => Ok(None),
            1 => Ok(Some(ProtectionType::Type1)),
            2 => Ok(Some(ProtectionType::Type2)),
            3 => Ok(Some(ProtectionType::Type3)),
            reserved => Err(reserved),
        }
    }

    /// PIP: where the tuple stands in the metadata.
    pub const fn position(self) -> PiPosition {
        if self.0 & 8 != 0 { PiPosition::First } else { PiPosition::Last }
    }
}

impl Field for Dps {
    const BYTES: usize = 1;
    const ZERO: Self = Dps(0);
    fn put(&self, to: &mut [u8]) {
        self.0.put(to);
    }
    fn get(from: &[u8]) -> Self {
        Dps(u8::get(from))
    }
}

layout! {
    /// LBA Format (NVM, "LBA Format data structure").
    pub struct LbaFormat[4] {
        /// MS: bytes of metadata for each block.
        0 => ms: u16,
        /// LBADS: a block is `2 ^ lbads` bytes; 0 for a format that is not there.
        2 => lbads: u8,
        /// RP: relative performance, 0 best to 3 degraded.
        3 => rp: u8,
    }
}

layout! {
    /// Identify Namespace of the NVM command set (NVM, "Identify Namespace data structure").
    pub struct Namespace[4096] {
        /// NSZE: size in blocks.
        0 => nsze: u64,
        /// NCAP: capacity in blocks.
        8 => ncap: u64,
        /// NUSE: blocks in use.
        16 => nuse: u64,
        /// NSFEAT: features.
        24 => nsfeat: u8,
        /// NLBAF: number of LBA formats.
        25 => nlbaf: Count8,
        /// FLBAS: format in use.
        26 => flbas: Flbas,
        /// MC: where metadata may be.
        27 => mc: Mc,
        /// DPC: protection it could have.
        28 => dpc: Dpc,
        /// DPS: protection it has.
        29 => dps: Dps,
        /// NMIC: sharing.
        30 => nmic: Nmic,
        /// RESCAP: reservations.
        31 => rescap: u8,
        /// FPI: format progress.
        32 => fpi: u8,
        /// DLFEAT: deallocated blocks.
        33 => dlfeat: Dlfeat,
        /// NAWUN: atomic write unit in blocks, 0's based, 0 for the controller's.
        34 => nawun: u16,
        /// NAWUPF: atomic write unit at power failure in blocks, 0's based, 0 for the controller's.
        36 => nawupf: u16,
        /// NACWU: atomic Compare and Write unit in blocks, 0's based, 0 for the controller's.
        38 => nacwu: u16,
        /// NABSN: atomic boundary in blocks, 0's based, 0 for none.
        40 => nabsn: u16,
        /// NABO: offset of atomic boundaries in blocks.
        42 => nabo: u16,
        /// NABSPF: atomic boundary at power failure in blocks, 0's based, 0 for none.
        44 => nabspf: u16,
        /// NOIOB: optimal I/O boundary in blocks, 0 for none.
        46 => noiob: u16,
        /// NVMCAP: size in bytes.
        48 => nvmcap: u128,
        /// NPWG: preferred write granularity in blocks.
        64 => npwg: Count16,
        /// NPWA: preferred write alignment in blocks.
        66 => npwa: Count16,
        /// NPDG: preferred deallocate granularity in blocks.
        68 => npdg: Count16,
        /// NPDA: preferred deallocate alignment in blocks.
        70 => npda: Count16,
        /// NOWS: optimal write size in blocks.
        72 => nows: Count16,
        /// MSSRL: blocks in one source range of Copy.
        74 => mssrl: u16,
        /// MCL: blocks in one Copy.
        76 => mcl: u32,
        /// MSRC: source ranges in one Copy.
        80 => msrc: Count8,
        /// KPIOS: key per I/O.
        81 => kpios: u8,
        /// NULBAF: LBA formats with attributes of their own, behind the first NLBAF.
        82 => nulbaf: u8,
        /// ANAGRPID: ANA group.
        92 => anagrpid: u32,
        /// NSATTR: bit 0 write protected.
        99 => nsattr: u8,
        /// NVMSETID: NVM set.
        100 => nvmsetid: u16,
        /// ENDGID: endurance group.
        102 => endgid: u16,
        /// NGUID: globally unique identifier.
        104 => nguid: [u8; 16],
        /// EUI64: IEEE extended unique identifier.
        120 => eui64: [u8; 8],
        /// LBAF0 to LBAF63: the formats.
        128 => lbaf: [LbaFormat; 64],
    }
}

impl Namespace {
    /// The index of the format in use: hosts look at FLBAS bits 6:5 only if there are more than 16 formats.
    pub const fn format_index(&self) -> usize {
        let formats = self.nlbaf.get() + self.nulbaf as u16;
        if formats > 16 { self.flbas.index as usize & 63 } else { self.flbas.index as usize & 15 }
    }

    /// The format in use.
    pub const fn format(&self) -> LbaFormat {
        self.lbaf[self.format_index()]
    }
}

layout! {
    /// Identify Namespace independent of command sets (Base, "I/O Command Set Independent Identify Namespace data
    /// structure").
    pub struct IndependentNamespace[4096] {
        /// NSFEAT: features; bit 3 UIDREUSE, bit 4 RMEDIA (rotational), bit 5 VWCNP (no volatile write cache).
        0 => nsfeat: u8,
        /// NMIC: sharing.
        1 => nmic: Nmic,
        /// RESCAP: reservations.
        2 => rescap: u8,
        /// FPI: format progress.
        3 => fpi: u8,
        /// ANAGRPID: ANA group.
        4 => anagrpid: u32,
        /// NSATTR: bit 0 write protected.
        8 => nsattr: u8,
        /// NVMSETID: NVM set.
        10 => nvmsetid: u16,
        /// ENDGID: endurance group.
        12 => endgid: u16,
        /// NSTAT: status.
        14 => nstat: Nstat,
        /// KPIOS: key per I/O.
        15 => kpios: u8,
        /// MAXKT: largest key tag.
        16 => maxkt: u16,
        /// RGRPID: reachability group.
        20 => rgrpid: u32,
    }
}
