//! Pages of vital product data (SPC-5 and SBC-4, "Vital product data parameters").

use std::fmt::Write;

use crate::inquiry::text;
use crate::wire::{TooShort, bit, flag, head, put_u16, put_u32, put_u64, u16_at, u32_at, u64_at};

/// Bytes in front of what a page holds.
const HEAD_BYTES: usize = 4;

/// A page of vital product data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Page<'a> {
    /// PAGE CODE.
    pub code: u8,
    /// What follows the head: as much as PAGE LENGTH says and is there.
    pub body: &'a [u8],
}

impl<'a> Page<'a> {
    /// Supported VPD Pages.
    pub const SUPPORTED: u8 = 0x00;
    /// Unit Serial Number.
    pub const SERIAL: u8 = 0x80;
    /// Device Identification.
    pub const IDENTIFICATION: u8 = 0x83;
    /// Extended INQUIRY Data.
    pub const EXTENDED_INQUIRY: u8 = 0x86;
    /// Block Limits.
    pub const BLOCK_LIMITS: u8 = 0xB0;
    /// Block Device Characteristics.
    pub const BLOCK_CHARACTERISTICS: u8 = 0xB1;
    /// Logical Block Provisioning.
    pub const PROVISIONING: u8 = 0xB2;

    /// Reads a page of this code. A device that answers with another page, as old ones do, has no such page.
    ///
    /// # Errors
    /// Fewer bytes than a head has.
    pub fn decode(code: u8, bytes: &'a [u8]) -> Result<Option<Page<'a>>, TooShort> {
        let head: &[u8; HEAD_BYTES] = head("a page of vital product data", bytes)?;
        let end = bytes.len().min(HEAD_BYTES + usize::from(u16_at(head, 2)));
        Ok((head[1] == code).then_some(Page { code, body: &bytes[HEAD_BYTES..end] }))
    }

    /// Writes the page, of a direct access block device.
    pub fn encode(&self) -> Vec<u8> {
        let length = self.body.len().min(usize::from(u16::MAX));
        let mut bytes = vec![0, self.code, 0, 0];
        put_u16(&mut bytes, 2, length as u16);
        bytes.extend(&self.body[..length]);
        bytes
    }
}

/// A designation descriptor of a Device Identification page (SPC-5, "Designation descriptor").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Designator<'a> {
    /// ASSOCIATION: 0 for the logical unit.
    pub association: u8,
    /// DESIGNATOR TYPE: 1 for T10 vendor ID based, 2 for EUI-64, 3 for NAA, 8 for a SCSI name.
    pub kind: u8,
    /// CODE SET: 1 for binary, 2 for ASCII, 3 for UTF-8.
    pub code_set: u8,
    /// DESIGNATOR.
    pub bytes: &'a [u8],
}

impl Designator<'_> {
    /// It as text: hexadecimal digits behind the name of its type, or the text that it is.
    pub fn name(&self) -> String {
        if self.code_set != 1 {
            return text(self.bytes);
        }
        let kind = match self.kind {
            2 => "eui.",
            3 => "naa.",
            _ => "",
        };
        self.bytes.iter().fold(kind.to_owned(), |mut name, byte| {
            // Writing to a string does not fail.
            let _ = write!(name, "{byte:02x}");
            name
        })
    }
}

/// The designators of a Device Identification page, in order. One that is cut ends the list.
pub fn designators(body: &[u8]) -> impl Iterator<Item = Designator<'_>> {
    let mut rest = body;
    std::iter::from_fn(move || {
        let (head, after) = rest.split_first_chunk::<4>()?;
        let (bytes, after) = after.split_at_checked(usize::from(head[3]))?;
        rest = after;
        let (association, kind, code_set) = (head[1] >> 4 & 3, head[1] & 0xF, head[0] & 0xF);
        Some(Designator { association, kind, code_set, bytes })
    })
}

/// Extended INQUIRY Data (SPC-5).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ExtendedInquiry {
    /// SPT: which types of protection information there can be. Other values are of other types of devices.
    pub supported_types: u8,
    /// GRD_CHK: guards are checked.
    pub checks_guard: bool,
    /// APP_CHK: application tags are checked.
    pub checks_app_tag: bool,
    /// REF_CHK: reference tags are checked.
    pub checks_ref_tag: bool,
}

impl ExtendedInquiry {
    /// Reads the page's body. What is not there is zero.
    pub fn decode(body: &[u8]) -> ExtendedInquiry {
        let byte = body.first().copied().unwrap_or(0);
        ExtendedInquiry {
            supported_types: byte >> 3 & 7,
            checks_guard: bit(byte, 2),
            checks_app_tag: bit(byte, 1),
            checks_ref_tag: bit(byte, 0),
        }
    }

    /// Writes the page's body.
    pub fn encode(&self) -> [u8; 60] {
        let mut body = [0; 60];
        body[0] = (self.supported_types & 7) << 3
            | flag(self.checks_guard, 2)
            | flag(self.checks_app_tag, 1)
            | flag(self.checks_ref_tag, 0);
        body
    }
}

/// Block Limits (SBC-4). Zero means that there is no limit that is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BlockLimits {
    /// WSNZ: a WRITE SAME of 0 blocks is refused, and not one of all the rest.
    pub write_same_non_zero: bool,
    /// MAXIMUM COMPARE AND WRITE LENGTH; 0 if there is no such command.
    pub compare_and_write_blocks: u8,
    /// OPTIMAL TRANSFER LENGTH GRANULARITY.
    pub transfer_granularity_blocks: u16,
    /// MAXIMUM TRANSFER LENGTH.
    pub max_transfer_blocks: u32,
    /// OPTIMAL TRANSFER LENGTH.
    pub optimal_transfer_blocks: u32,
    /// MAXIMUM UNMAP LBA COUNT; 0 if there is no UNMAP, all ones for no limit.
    pub max_unmap_blocks: u32,
    /// MAXIMUM UNMAP BLOCK DESCRIPTOR COUNT; 0 if there is no UNMAP, all ones for no limit.
    pub max_unmap_descriptors: u32,
    /// OPTIMAL UNMAP GRANULARITY.
    pub unmap_granularity_blocks: u32,
    /// UNMAP GRANULARITY ALIGNMENT, if it is valid (UGAVALID). It has 31 bits.
    pub unmap_alignment_blocks: Option<u32>,
    /// MAXIMUM WRITE SAME LENGTH.
    pub max_write_same_blocks: u64,
}

impl BlockLimits {
    /// Bytes of the page's body.
    pub const BYTES: usize = 60;

    /// Reads the page's body. What an older, shorter page does not have is zero.
    pub fn decode(body: &[u8]) -> BlockLimits {
        let page: [u8; BlockLimits::BYTES] = padded(body);
        let alignment = u32_at(&page, 28);
        BlockLimits {
            write_same_non_zero: bit(page[0], 0),
            compare_and_write_blocks: page[1],
            transfer_granularity_blocks: u16_at(&page, 2),
            max_transfer_blocks: u32_at(&page, 4),
            optimal_transfer_blocks: u32_at(&page, 8),
            max_unmap_blocks: u32_at(&page, 16),
            max_unmap_descriptors: u32_at(&page, 20),
            unmap_granularity_blocks: u32_at(&page, 24),
            unmap_alignment_blocks: (alignment >> 31 == 1).then_some(alignment & !(1 << 31)),
            max_write_same_blocks: u64_at(&page, 32),
        }
    }

    /// Writes the page's body.
    pub fn encode(&self) -> [u8; BlockLimits::BYTES] {
        let mut page = [0; BlockLimits::BYTES];
        (page[0], page[1]) = (flag(self.write_same_non_zero, 0), self.compare_and_write_blocks);
        put_u16(&mut page, 2, self.transfer_granularity_blocks);
        put_u32(&mut page, 4, self.max_transfer_blocks);
        put_u32(&mut page, 8, self.optimal_transfer_blocks);
        put_u32(&mut page, 16, self.max_unmap_blocks);
        put_u32(&mut page, 20, self.max_unmap_descriptors);
        put_u32(&mut page, 24, self.unmap_granularity_blocks);
        let alignment = self.unmap_alignment_blocks.map_or(0, |blocks| 1 << 31 | blocks & !(1 << 31));
        put_u32(&mut page, 28, alignment);
        put_u64(&mut page, 32, self.max_write_same_blocks);
        page
    }
}

/// Block Device Characteristics (SBC-4).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BlockCharacteristics {
    /// MEDIUM ROTATION RATE: 0 if it is not told, 1 for a medium that does not rotate, or rounds a minute.
    pub rotation_rate: u16,
    /// ZONED: 1 for a host aware zoned device, 2 for one that is managed by itself.
    pub zoned: u8,
}

impl BlockCharacteristics {
    /// Reads the page's body. What is not there is zero.
    pub fn decode(body: &[u8]) -> BlockCharacteristics {
        let page: [u8; 60] = padded(body);
        BlockCharacteristics { rotation_rate: u16_at(&page, 0), zoned: page[4] >> 4 & 3 }
    }

    /// Writes the page's body.
    pub fn encode(&self) -> [u8; 60] {
        let mut page = [0; 60];
        put_u16(&mut page, 0, self.rotation_rate);
        page[4] = (self.zoned & 3) << 4;
        page
    }
}

/// Logical Block Provisioning (SBC-4).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Provisioning {
    /// LBPU: there is UNMAP.
    pub unmap: bool,
    /// LBPWS: WRITE SAME (16) unmaps.
    pub write_same_16: bool,
    /// LBPWS10: WRITE SAME (10) unmaps.
    pub write_same_10: bool,
    /// LBPRZ: 0 if what unmapped blocks read as is not told, 1 (in its low bit) for zeroes, 2 for the provisioning initialization
    /// pattern.
    pub read_zeroes: u8,
    /// ANC_SUP: blocks can be anchored.
    pub anchors: bool,
    /// PROVISIONING TYPE: 1 for resource, 2 for thin provisioned.
    pub kind: u8,
}

impl Provisioning {
    /// Reads the page's body. What is not there is zero.
    pub fn decode(body: &[u8]) -> Provisioning {
        let page: [u8; 4] = padded(body);
        Provisioning {
            unmap: bit(page[1], 7),
            write_same_16: bit(page[1], 6),
            write_same_10: bit(page[1], 5),
            read_zeroes: page[1] >> 2 & 7,
            anchors: bit(page[1], 1),
            kind: page[2] & 7,
        }
    }

    /// Writes the page's body.
    pub fn encode(&self) -> [u8; 4] {
        let bits = flag(self.unmap, 7)
            | flag(self.write_same_16, 6)
            | flag(self.write_same_10, 5)
            | (self.read_zeroes & 7) << 2
            | flag(self.anchors, 1);
        [0, bits, self.kind & 7, 0]
    }
}

/// The first `N` bytes of a body, with zeroes for those that are not there.
fn padded<const N: usize>(body: &[u8]) -> [u8; N] {
    let mut page = [0; N];
    let bytes = body.len().min(N);
    page[..bytes].copy_from_slice(&body[..bytes]);
    page
}
