//! Identify Namespace specific to the NVM command set (CNS 05h): guards, storage tags; and what a namespace's format
//! is, with this page and CNS 00h taken together.

use sealblock_integrity::{FormatError, GuardKind, Interleave, PiFormat, PiPosition, ProtectionType};
use sealblock_units::BlockSize;

use crate::wire::{Field, flags, layout};

use super::Namespace;

flags! {
    /// Protection Information Capabilities (PIC).
    pub struct Pic(u8) {
        /// 16BPISTS: storage tags with the 16-bit guard.
        STORAGE_TAG_16 = 0,
        /// 16BPISTM: with the 16-bit guard, LBSTM is all ones or all zeroes.
        STORAGE_TAG_MASK_16 = 1,
        /// STCRS: Copy can check storage tags while it reads.
        STORAGE_TAG_CHECK_READ = 2,
    }
}

/// Extended LBA Format (NVM, "Extended LBA Format data structure").
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct ElbaFormat {
    /// STS: bits of the storage tag, 0 to 64.
    pub sts: u8,
    /// PIF: 0 16-bit guard, 1 32-bit guard, 2 64-bit guard, 3 as QPIF says.
    pub pif: u8,
    /// QPIF: qualified format.
    pub qpif: u8,
}

impl ElbaFormat {
    /// The format with this guard and storage tag.
    pub const fn of(format: PiFormat) -> ElbaFormat {
        let pif = match format.guard() {
            GuardKind::Crc16 | GuardKind::IpChecksum => 0,
            GuardKind::Crc32c => 1,
            GuardKind::Crc64 => 2,
        };
        ElbaFormat { sts: format.storage_tag_bits(), pif, qpif: 0 }
    }

    /// The guard, if it is one of the three.
    pub const fn guard(self) -> Option<GuardKind> {
        match (self.pif, self.qpif) {
            (0, _) | (3, 0) => Some(GuardKind::Crc16),
            (1, _) | (3, 1) => Some(GuardKind::Crc32c),
            (2, _) | (3, 2) => Some(GuardKind::Crc64),
            _ => None,
        }
    }
}

impl Field for ElbaFormat {
    const BYTES: usize = 4;
    const ZERO: Self = ElbaFormat { sts: 0, pif: 0, qpif: 0 };
    fn put(&self, to: &mut [u8]) {
        (u32::from(self.sts & 0x7F) | u32::from(self.pif & 3) << 7 | u32::from(self.qpif & 0xF) << 9).put(to);
    }
    fn get(from: &[u8]) -> Self {
        let bits = u32::get(from);
        ElbaFormat { sts: bits as u8 & 0x7F, pif: (bits >> 7) as u8 & 3, qpif: (bits >> 9) as u8 & 0xF }
    }
}

layout! {
    /// Identify Namespace for the NVM command set (NVM, "I/O Command Set specific Identify Namespace data structure").
    pub struct NvmNamespace[4096] {
        /// LBSTM: bits of the storage tag that may be checked.
        0 => lbstm: u64,
        /// PIC: what protection information can do.
        8 => pic: Pic,
        /// PIFA: attributes of protection information.
        9 => pifa: u8,
        /// ELBAF0 to ELBAF63: what the formats of CNS 00h say no more about.
        12 => elbaf: [ElbaFormat; 64],
        /// NPDGL: preferred deallocate granularity in blocks, large.
        268 => npdgl: u32,
        /// NPRG: preferred read granularity in blocks, 0's based.
        272 => nprg: u32,
        /// NPRA: preferred read alignment in blocks, 0's based.
        276 => npra: u32,
        /// NORS: optimal read size in blocks, 0's based.
        280 => nors: u32,
        /// NPDAL: preferred deallocate alignment in blocks, large.
        284 => npdal: u32,
        /// LBAPSS: physical sector size in blocks.
        288 => lbapss: u32,
        /// TLBAAG: tracked allocation granularity in blocks.
        292 => tlbaag: u32,
    }
}

/// What a namespace's blocks are, in terms of the house.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NamespaceFormat {
    /// Bytes of data in a block.
    pub block_size: BlockSize,
    /// Bytes of metadata for each block, possibly none.
    pub metadata_bytes: usize,
    /// Whether metadata follows each block in one buffer, as it must over TCP.
    pub extended: bool,
    /// The format of the tuples, and where in the metadata they stand; `None` without protection information.
    pub protection: Option<(PiFormat, PiPosition)>,
    /// LBSTM: bits of the storage tag that may be checked.
    pub storage_tag_mask: u64,
}

/// Why a namespace cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NamespaceFormatError {
    /// Blocks have another size than 512 or 4096 bytes.
    #[error("blocks of 2^{lbads} bytes are not supported")]
    BlockSize {
        /// The format's LBADS.
        lbads: u8,
    },
    /// The type of protection is reserved.
    #[error("protection information type {pit} is not known")]
    ProtectionType {
        /// The namespace's PIT.
        pit: u8,
    },
    /// The guard is not one of the three.
    #[error("protection information format {pif} (qualified {qpif}) is not known")]
    Guard {
        /// The format's PIF.
        pif: u8,
        /// The format's QPIF.
        qpif: u8,
    },
    /// Storage tag or metadata do not go with the guard.
    #[error(transparent)]
    Format(#[from] FormatError),
}

impl NamespaceFormat {
    /// What the two pages say together. Without CNS 05h, which controllers without command sets do not have, the guard
    /// is the 16-bit one and there is no storage tag.
    pub fn resolve(namespace: &Namespace, nvm: Option<&NvmNamespace>) -> Result<NamespaceFormat, NamespaceFormatError> {
        let format = namespace.format();
        let size = 1_u64.checked_shl(u32::from(format.lbads)).and_then(BlockSize::from_bytes);
        let block_size = size.ok_or(NamespaceFormatError::BlockSize { lbads: format.lbads })?;
        let metadata_bytes = usize::from(format.ms);
        let protection = match namespace.dps.protection() {
            Err(pit) => return Err(NamespaceFormatError::ProtectionType { pit }),
            Ok(None) => None,
            Ok(Some(protection)) => {
                let elbaf = nvm.map_or(ElbaFormat::ZERO, |nvm| nvm.elbaf[namespace.format_index()]);
                let format = pi_format(elbaf, protection)?;
                let position = namespace.dps.position();
                Interleave::new(format, block_size, metadata_bytes, position)?;
                Some((format, position))
            }
        };
        let storage_tag_mask = nvm.map_or(0, |nvm| nvm.lbstm);
        Ok(NamespaceFormat {
            block_size,
            metadata_bytes,
            extended: namespace.flbas.extended && metadata_bytes > 0,
            protection,
            storage_tag_mask,
        })
    }

    /// Writes this format into both pages as their format 0, the only one.
    pub fn describe(&self, namespace: &mut Namespace, nvm: &mut NvmNamespace) {
        let (ms, lbads) = (self.metadata_bytes as u16, self.block_size.shift() as u8);
        namespace.nlbaf = crate::wire::Count8::ZERO;
        namespace.nulbaf = 0;
        namespace.flbas = super::Flbas { index: 0, extended: self.extended };
        namespace.mc = if self.metadata_bytes == 0 { super::Mc::NONE } else { super::Mc::EXTENDED };
        namespace.lbaf[0] = super::LbaFormat { ms, lbads, rp: 0 };
        (namespace.dps, namespace.dpc) = (super::Dps::NONE, super::Dpc::NONE);
        (nvm.elbaf[0], nvm.lbstm) = (ElbaFormat::ZERO, self.storage_tag_mask);
        if let Some((format, position)) = self.protection {
            namespace.dps = super::Dps::new(format.protection(), position);
            let kind = match format.protection() {
                ProtectionType::Type1 => super::Dpc::TYPE_1,
                ProtectionType::Type2 => super::Dpc::TYPE_2,
                ProtectionType::Type3 => super::Dpc::TYPE_3,
            };
            namespace.dpc = match position {
                PiPosition::First => kind | super::Dpc::FIRST,
                PiPosition::Last => kind | super::Dpc::LAST,
            };
            nvm.elbaf[0] = ElbaFormat::of(format);
        }
    }
}

/// The format of tuples that an extended LBA format says.
fn pi_format(elbaf: ElbaFormat, protection: ProtectionType) -> Result<PiFormat, NamespaceFormatError> {
    let unknown = NamespaceFormatError::Guard { pif: elbaf.pif, qpif: elbaf.qpif };
    Ok(PiFormat::new(elbaf.guard().ok_or(unknown)?, protection, elbaf.sts)?)
}
