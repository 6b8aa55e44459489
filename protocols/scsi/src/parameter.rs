//! Parameter data: READ CAPACITY (16) with the protection information that it names, mode pages, the list of UNMAP, and that of GET LBA
//! STATUS (SBC-4, SPC-5).

use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_units::{Extent, Lba};

use crate::cdb::{BlockCommand, ExpectedTags, Protect};
use crate::wire::{TooShort, bit, flag, head, put_u16, put_u32, put_u64, u16_at, u32_at, u64_at};

/// The protection information of a logical unit: tuples of eight bytes with a CRC-16 as their guard (SBC-4, "Protection information model").
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PiProfile {
    /// P_TYPE.
    pub protection: ProtectionType,
    /// P_I_EXPONENT: a block has two to this power tuples, each about as many of its bytes.
    pub interval_exponent: u8,
}

impl PiProfile {
    /// The format of its tuples.
    pub const fn format(self) -> PiFormat {
        match PiFormat::new(GuardKind::Crc16, self.protection, 0) {
            Ok(format) => format,
            Err(_) => panic!("a CRC-16 goes without a storage tag"),
        }
    }

    /// Bytes of data that a tuple is about, in blocks of this many bytes; `None` if they cannot be parted so.
    pub fn interval_bytes(self, block_bytes: u32) -> Option<u32> {
        let intervals = 1_u32.checked_shl(u32::from(self.interval_exponent))?;
        (block_bytes.is_multiple_of(intervals) && block_bytes > intervals).then_some(block_bytes / intervals)
    }

    /// The reference tag of a block's first tuple, as Linux and Type 1 have it: the low 32 bits of its address. Tuples of Type 3 have
    /// none that is checked.
    pub const fn initial_ref_tag(self, lba: Lba) -> u32 {
        lba.low32()
    }

    /// The command with this protection field. Type 2 takes it in commands of 32 bytes only, which say what the first reference
    /// tag is (SBC-4, "Type 2 protection").
    pub fn protect(self, command: BlockCommand, protect: Protect) -> BlockCommand {
        let expected = match self.protection {
            ProtectionType::Type2 if protect.has_tuples() => {
                Some(ExpectedTags { initial_ref_tag: self.initial_ref_tag(command.lba), app_tag: 0, app_tag_mask: 0 })
            }
            ProtectionType::Type1 | ProtectionType::Type2 | ProtectionType::Type3 => None,
        };
        BlockCommand { protect, expected, ..command }
    }
}

/// READ CAPACITY (16) parameter data (SBC-4).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReadCapacity16 {
    /// RETURNED LOGICAL BLOCK ADDRESS: the last block.
    pub last_lba: u64,
    /// LOGICAL BLOCK LENGTH IN BYTES, without protection information.
    pub block_bytes: u32,
    /// PROT_EN: blocks have protection information.
    pub protection_enabled: bool,
    /// P_TYPE: one less than the type of protection. It has three bits, of which only 0, 1 and 2 mean something.
    pub protection_type: u8,
    /// P_I_EXPONENT.
    pub interval_exponent: u8,
    /// LOGICAL BLOCKS PER PHYSICAL BLOCK EXPONENT.
    pub physical_exponent: u8,
    /// LBPME: blocks can be unmapped.
    pub provisioning: bool,
    /// LBPRZ: unmapped blocks read as zeroes.
    pub reads_zeroes: bool,
    /// LOWEST ALIGNED LOGICAL BLOCK ADDRESS, of 14 bits.
    pub lowest_aligned_lba: u16,
}

impl ReadCapacity16 {
    /// Bytes of the data.
    pub const BYTES: usize = 32;

    /// Reads the data.
    ///
    /// # Errors
    /// Fewer bytes than the data have.
    pub fn decode(bytes: &[u8]) -> Result<ReadCapacity16, TooShort> {
        let bytes: &[u8; ReadCapacity16::BYTES] = head("READ CAPACITY (16) data", bytes)?;
        let provisioning = u16_at(bytes, 14);
        Ok(ReadCapacity16 {
            last_lba: u64_at(bytes, 0),
            block_bytes: u32_at(bytes, 8),
            protection_enabled: bit(bytes[12], 0),
            protection_type: bytes[12] >> 1 & 7,
            interval_exponent: bytes[13] >> 4,
            physical_exponent: bytes[13] & 0xF,
            provisioning: provisioning >> 15 == 1,
            reads_zeroes: provisioning >> 14 & 1 == 1,
            lowest_aligned_lba: provisioning & 0x3FFF,
        })
    }

    /// Writes the data.
    pub fn encode(&self) -> [u8; ReadCapacity16::BYTES] {
        let mut bytes = [0; ReadCapacity16::BYTES];
        put_u64(&mut bytes, 0, self.last_lba);
        put_u32(&mut bytes, 8, self.block_bytes);
        bytes[12] = flag(self.protection_enabled, 0) | (self.protection_type & 7) << 1;
        bytes[13] = self.interval_exponent << 4 | self.physical_exponent & 0xF;
        let zeroes = u16::from(self.provisioning) << 15 | u16::from(self.reads_zeroes) << 14;
        put_u16(&mut bytes, 14, zeroes | self.lowest_aligned_lba & 0x3FFF);
        bytes
    }

    /// The protection information of the blocks, if they have any; an error is a type that is reserved.
    ///
    /// # Errors
    /// The value of P_TYPE.
    pub fn protection(&self) -> Result<Option<PiProfile>, u8> {
        let protection = match (self.protection_enabled, self.protection_type) {
            (false, _) => return Ok(None),
            (true, 0) => ProtectionType::Type1,
            (true, 1) => ProtectionType::Type2,
            (true, 2) => ProtectionType::Type3,
            (true, reserved) => return Err(reserved),
        };
        Ok(Some(PiProfile { protection, interval_exponent: self.interval_exponent }))
    }
}

/// MODE SENSE (10) parameter data (SPC-5, "Mode parameters").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ModeSense<'a> {
    /// WP: the medium is write protected.
    pub write_protected: bool,
    /// DPOFUA: commands may have the bits DPO and FUA.
    pub dpo_fua: bool,
    /// The mode pages, one behind another.
    pub pages: &'a [u8],
}

impl<'a> ModeSense<'a> {
    /// Bytes of the mode parameter header.
    const HEAD_BYTES: usize = 8;

    /// Reads the data: as much as MODE DATA LENGTH says and is there, without block descriptors.
    ///
    /// # Errors
    /// Fewer bytes than a header has, and block descriptors that go past the end.
    pub fn decode(bytes: &'a [u8]) -> Result<ModeSense<'a>, TooShort> {
        let structure = "mode parameter data";
        let head: &[u8; ModeSense::HEAD_BYTES] = head(structure, bytes)?;
        // MODE DATA LENGTH counts the bytes behind itself.
        let end = bytes.len().min(2 + usize::from(u16_at(head, 0)));
        let needed = ModeSense::HEAD_BYTES + usize::from(u16_at(head, 6));
        let pages = bytes.get(needed..end.max(needed)).ok_or(TooShort { structure, needed, got: bytes.len() })?;
        Ok(ModeSense { write_protected: bit(head[3], 7), dpo_fua: bit(head[3], 4), pages })
    }

    /// Writes the data, without block descriptors.
    pub fn encode(&self) -> Vec<u8> {
        let most = usize::from(u16::MAX) + 2 - ModeSense::HEAD_BYTES;
        let pages = &self.pages[..self.pages.len().min(most)];
        let mut bytes = vec![0; ModeSense::HEAD_BYTES];
        put_u16(&mut bytes, 0, (ModeSense::HEAD_BYTES - 2 + pages.len()) as u16);
        bytes[3] = flag(self.write_protected, 7) | flag(self.dpo_fua, 4);
        bytes.extend(pages);
        bytes
    }

    /// The page of this code without a subpage, with its head of two bytes, as much as is there.
    pub fn page(&self, code: u8) -> Option<&'a [u8]> {
        let mut rest = self.pages;
        loop {
            let &[first, second, ..] = rest else { return None };
            // SPF: a subpage format, whose length has two bytes.
            let length = match bit(first, 6) {
                true => 4 + usize::from(u16::from_be_bytes([*rest.get(2)?, *rest.get(3)?])),
                false => 2 + usize::from(second),
            };
            let (page, after) = rest.split_at(rest.len().min(length));
            if first & 0x3F == code && !bit(first, 6) {
                return Some(page);
            }
            rest = after;
        }
    }
}

/// The Caching mode page (SBC-4).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CachingPage {
    /// WCE: writes are volatile until a SYNCHRONIZE CACHE, or with FUA.
    pub write_cache: bool,
    /// RCD: reads are not answered from the cache.
    pub no_read_cache: bool,
}

impl CachingPage {
    /// PAGE CODE.
    pub const CODE: u8 = 0x08;

    /// Reads the page; `None` if it is too short.
    pub fn decode(page: &[u8]) -> Option<CachingPage> {
        let byte = *page.get(2)?;
        Some(CachingPage { write_cache: bit(byte, 2), no_read_cache: bit(byte, 0) })
    }

    /// Writes the page.
    pub fn encode(&self) -> [u8; 20] {
        let mut page = [0; 20];
        (page[0], page[1]) = (CachingPage::CODE, 18);
        page[2] = flag(self.write_cache, 2) | flag(self.no_read_cache, 0);
        page
    }
}

/// The Control mode page (SPC-5).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ControlPage {
    /// D_SENSE: sense data have descriptors.
    pub descriptor_sense: bool,
    /// DPICZ: protection information is not checked by commands whose protection field is 000b.
    pub no_check_without_protect: bool,
    /// SWP: write protected by software.
    pub write_protected: bool,
    /// ATO: the application tags are the application client's, and the device server does not change them.
    pub app_tag_owned: bool,
}

impl ControlPage {
    /// PAGE CODE.
    pub const CODE: u8 = 0x0A;

    /// Reads the page; `None` if it is too short.
    pub fn decode(page: &[u8]) -> Option<ControlPage> {
        let &[_, _, two, _, four, five, ..] = page else { return None };
        Some(ControlPage {
            descriptor_sense: bit(two, 2),
            no_check_without_protect: bit(two, 3),
            write_protected: bit(four, 3),
            app_tag_owned: bit(five, 7),
        })
    }

    /// Writes the page.
    pub fn encode(&self) -> [u8; 12] {
        let mut page = [0; 12];
        (page[0], page[1]) = (ControlPage::CODE, 10);
        page[2] = flag(self.descriptor_sense, 2) | flag(self.no_check_without_protect, 3);
        page[4] = flag(self.write_protected, 3);
        page[5] = flag(self.app_tag_owned, 7);
        page
    }
}

/// The parameter list of UNMAP (SBC-4).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct UnmapList {
    /// The UNMAP block descriptors that have blocks.
    pub extents: Vec<Extent>,
}

impl UnmapList {
    const HEAD_BYTES: usize = 8;
    const DESCRIPTOR_BYTES: usize = 16;
    /// Descriptors whose bytes a list can count.
    pub const MAX_DESCRIPTORS: usize = (u16::MAX as usize - UnmapList::HEAD_BYTES) / UnmapList::DESCRIPTOR_BYTES;

    /// Reads a list. A descriptor that is cut is not one of it (SBC-4, "UNMAP parameter list").
    ///
    /// # Errors
    /// Fewer bytes than a head has; `None` in place of a list for blocks past the last address.
    pub fn decode(bytes: &[u8]) -> Result<Option<UnmapList>, TooShort> {
        let head: &[u8; UnmapList::HEAD_BYTES] = head("an UNMAP parameter list", bytes)?;
        let end = bytes.len().min(UnmapList::HEAD_BYTES + usize::from(u16_at(head, 2)));
        let descriptors = bytes[UnmapList::HEAD_BYTES..end].chunks_exact(UnmapList::DESCRIPTOR_BYTES);
        let blocks = descriptors.map(|one| (u64_at(one, 0), u32_at(one, 8))).filter(|(_, blocks)| *blocks > 0);
        let extents: Result<_, _> = blocks.map(|(lba, blocks)| Extent::from_raw(lba, u64::from(blocks))).collect();
        Ok(extents.ok().map(|extents| UnmapList { extents }))
    }

    /// Writes the list, of at most [`UnmapList::MAX_DESCRIPTORS`] extents; `None` for more.
    pub fn encode(&self) -> Option<Vec<u8>> {
        if self.extents.len() > UnmapList::MAX_DESCRIPTORS {
            return None;
        }
        let descriptors = self.extents.len() * UnmapList::DESCRIPTOR_BYTES;
        let mut bytes = vec![0; UnmapList::HEAD_BYTES + descriptors];
        put_u16(&mut bytes, 0, (descriptors + UnmapList::HEAD_BYTES - 2) as u16);
        put_u16(&mut bytes, 2, descriptors as u16);
        for (one, extent) in
            bytes[UnmapList::HEAD_BYTES..].chunks_exact_mut(UnmapList::DESCRIPTOR_BYTES).zip(&self.extents)
        {
            put_u64(one, 0, extent.start().get());
            put_u32(one, 8, extent.blocks().get());
        }
        Some(bytes)
    }
}

/// PROVISIONING STATUS of a run of blocks (SBC-4, "LBA status descriptor").
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ProvisioningStatus {
    /// 0h: mapped, or not known.
    Mapped,
    /// 1h: deallocated.
    Deallocated,
    /// 2h: anchored.
    Anchored,
    /// A value that is reserved or about something else.
    Other(u8),
}

impl ProvisioningStatus {
    const fn bits(self) -> u8 {
        match self {
            ProvisioningStatus::Mapped => 0,
            ProvisioningStatus::Deallocated => 1,
            ProvisioningStatus::Anchored => 2,
            ProvisioningStatus::Other(bits) => bits & 0xF,
        }
    }

    const fn from_bits(bits: u8) -> ProvisioningStatus {
        match bits & 0xF {
            0 => ProvisioningStatus::Mapped,
            1 => ProvisioningStatus::Deallocated,
            2 => ProvisioningStatus::Anchored,
            other => ProvisioningStatus::Other(other),
        }
    }
}

/// A run of blocks in the same state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LbaStatus {
    /// The first block.
    pub lba: Lba,
    /// NUMBER OF LOGICAL BLOCKS.
    pub blocks: u32,
    /// PROVISIONING STATUS.
    pub status: ProvisioningStatus,
}

/// The parameter data of GET LBA STATUS (SBC-4).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LbaStatusList {
    /// The LBA status descriptors.
    pub runs: Vec<LbaStatus>,
}

impl LbaStatusList {
    const HEAD_BYTES: usize = 8;
    const DESCRIPTOR_BYTES: usize = 16;

    /// Reads the data: the descriptors that are whole.
    ///
    /// # Errors
    /// Fewer bytes than a head has.
    pub fn decode(bytes: &[u8]) -> Result<LbaStatusList, TooShort> {
        let head: &[u8; LbaStatusList::HEAD_BYTES] = head("GET LBA STATUS data", bytes)?;
        // PARAMETER DATA LENGTH counts the bytes behind itself.
        let said = usize::try_from(u32_at(head, 0)).unwrap_or(usize::MAX).saturating_add(4);
        let end = bytes.len().min(said).max(LbaStatusList::HEAD_BYTES);
        let descriptors = bytes[LbaStatusList::HEAD_BYTES..end].chunks_exact(LbaStatusList::DESCRIPTOR_BYTES);
        let runs = descriptors.map(|one| LbaStatus {
            lba: Lba::new(u64_at(one, 0)),
            blocks: u32_at(one, 8),
            status: ProvisioningStatus::from_bits(one[12]),
        });
        Ok(LbaStatusList { runs: runs.collect() })
    }

    /// Writes the data.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; LbaStatusList::HEAD_BYTES + self.runs.len() * LbaStatusList::DESCRIPTOR_BYTES];
        let length = u32::try_from(bytes.len() - 4).unwrap_or(u32::MAX);
        put_u32(&mut bytes, 0, length);
        for (one, run) in
            bytes[LbaStatusList::HEAD_BYTES..].chunks_exact_mut(LbaStatusList::DESCRIPTOR_BYTES).zip(&self.runs)
        {
            put_u64(one, 0, run.lba.get());
            put_u32(one, 8, run.blocks);
            one[12] = run.status.bits();
        }
        bytes
    }
}
