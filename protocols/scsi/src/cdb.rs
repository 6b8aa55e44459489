//! Command descriptor blocks of commands about blocks, in their forms of 10, 16 and 32 bytes (SBC-4, "Commands for direct access
//! block devices"; SPC-5, "Variable length CDB formats").

use sealblock_units::{Extent, Lba, RangeError};

use crate::sense::{AdditionalSense, Sense, SenseKey};
use crate::wire::{bit, flag, put_u16, put_u32, put_u64, u16_at, u32_at, u64_at};

/// Operation codes.
pub(crate) mod opcode {
    pub(crate) const TEST_UNIT_READY: u8 = 0x00;
    pub(crate) const INQUIRY: u8 = 0x12;
    pub(crate) const VERIFY_10: u8 = 0x2F;
    pub(crate) const UNMAP: u8 = 0x42;
    pub(crate) const MODE_SENSE_10: u8 = 0x5A;
    pub(crate) const VARIABLE_LENGTH: u8 = 0x7F;
    pub(crate) const READ_16: u8 = 0x88;
    pub(crate) const COMPARE_AND_WRITE: u8 = 0x89;
    pub(crate) const WRITE_16: u8 = 0x8A;
    pub(crate) const VERIFY_16: u8 = 0x8F;
    pub(crate) const SYNCHRONIZE_CACHE_16: u8 = 0x91;
    pub(crate) const WRITE_SAME_16: u8 = 0x93;
    pub(crate) const SERVICE_ACTION_IN_16: u8 = 0x9E;
}

/// Service actions of [`opcode::VARIABLE_LENGTH`] and [`opcode::SERVICE_ACTION_IN_16`].
pub(crate) mod action {
    pub(crate) const READ_32: u16 = 0x0009;
    pub(crate) const VERIFY_32: u16 = 0x000A;
    pub(crate) const WRITE_32: u16 = 0x000B;
    pub(crate) const WRITE_SAME_32: u16 = 0x000D;
    pub(crate) const READ_CAPACITY_16: u8 = 0x10;
    pub(crate) const GET_LBA_STATUS: u8 = 0x12;
}

/// ADDITIONAL CDB LENGTH of a CDB of 32 bytes.
const ADDITIONAL_LENGTH: u8 = 0x18;
/// NACA in the CONTROL byte (SAM-5, "CONTROL byte"): auto contingent allegiance, which no one here has.
const NACA: u8 = 1 << 2;

/// A command that cannot be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Invalid {
    /// The command ends before its fields do.
    #[error("a command with operation code {opcode:02x}h has {needed} bytes, and {got} are there")]
    Short {
        /// Its operation code.
        opcode: u8,
        /// Bytes of it.
        needed: usize,
        /// Bytes there are.
        got: usize,
    },
    /// No command that is known.
    #[error("operation code {0:02x}h is not known")]
    Opcode(u8),
    /// No service action that is known.
    #[error("service action {action:x}h of operation code {opcode:02x}h is not known")]
    ServiceAction {
        /// The operation code.
        opcode: u8,
        /// The service action.
        action: u16,
    },
    /// A field with a value that is reserved.
    #[error("field {field} of the command at byte {byte} has a reserved value")]
    Field {
        /// Its name.
        field: &'static str,
        /// Where it begins.
        byte: u16,
    },
    /// Blocks past the last address that there can be.
    #[error(transparent)]
    Range(#[from] RangeError),
}

impl Invalid {
    /// The information of a device server about it (SPC-5, "Sense key and additional sense code definitions").
    pub const fn sense(self) -> Sense {
        let code = match self {
            Invalid::Opcode(_) | Invalid::ServiceAction { .. } => AdditionalSense::INVALID_OPCODE,
            Invalid::Short { .. } | Invalid::Field { .. } => AdditionalSense::INVALID_FIELD_IN_CDB,
            Invalid::Range(_) => AdditionalSense::LBA_OUT_OF_RANGE,
        };
        Sense { key: SenseKey::ILLEGAL_REQUEST, code, information: None, is_deferred: false }
    }
}

/// The bytes of a command.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Cdb {
    bytes: [u8; Cdb::MAX_BYTES],
    length: u8,
}

impl Cdb {
    /// Bytes of the longest command here.
    pub const MAX_BYTES: usize = 32;

    /// A command of this many bytes, all zeroes but the operation code.
    pub(crate) fn new(opcode: u8, length: u8) -> Cdb {
        let mut bytes = [0; Cdb::MAX_BYTES];
        bytes[0] = opcode;
        Cdb { bytes, length }
    }

    /// The same with this service action in the form of 32 bytes.
    pub(crate) fn variable(action: u16) -> Cdb {
        let mut cdb = Cdb::new(opcode::VARIABLE_LENGTH, 32);
        cdb.bytes[7] = ADDITIONAL_LENGTH;
        put_u16(&mut cdb.bytes, 8, action);
        cdb
    }

    /// The bytes that are sent.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8; Cdb::MAX_BYTES] {
        &mut self.bytes
    }
}

/// A whole command of `N` bytes whose CONTROL byte is where its form has it.
pub(crate) fn whole<const N: usize>(bytes: &[u8]) -> Result<&[u8; N], Invalid> {
    let opcode = bytes.first().copied().unwrap_or(0);
    let cdb: &[u8; N] = bytes.first_chunk().ok_or(Invalid::Short { opcode, needed: N, got: bytes.len() })?;
    let control = if opcode == opcode::VARIABLE_LENGTH { 1 } else { N - 1 };
    if cdb[control] & NACA != 0 {
        return Err(Invalid::Field { field: "NACA", byte: control as u16 });
    }
    if opcode == opcode::VARIABLE_LENGTH && cdb[7] != ADDITIONAL_LENGTH {
        return Err(Invalid::Field { field: "ADDITIONAL CDB LENGTH", byte: 7 });
    }
    Ok(cdb)
}

/// RDPROTECT, WRPROTECT or VRPROTECT: what a device server checks, and whether tuples are in the data (SBC-4, "RDPROTECT field",
/// "WRPROTECT field", "VRPROTECT field").
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Protect(u8);

impl Protect {
    /// 000b: no tuples in the data. The device server checks those that it has by the bits of [`crate::ExtendedInquiry`].
    pub const NONE: Protect = Protect(0);
    /// 001b: guard, application tag and reference tag.
    pub const ALL: Protect = Protect(1);
    /// 010b: all but the guard.
    pub const TAGS: Protect = Protect(2);
    /// 011b: nothing, and tuples are in the data.
    pub const NOTHING: Protect = Protect(3);
    /// 100b: the guard only.
    pub const GUARD: Protect = Protect(4);

    /// The low three bits.
    pub const fn from_bits(bits: u8) -> Protect {
        Protect(bits & 7)
    }

    /// The three bits.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// True if the data of the command have tuples, where data move.
    pub const fn has_tuples(self) -> bool {
        self.0 != 0
    }
}

/// What is expected of the tags of a command of 32 bytes, as Type 2 protection requires it (SBC-4, "READ (32) command").
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ExpectedTags {
    /// EXPECTED INITIAL LOGICAL BLOCK REFERENCE TAG.
    pub initial_ref_tag: u32,
    /// EXPECTED LOGICAL BLOCK APPLICATION TAG.
    pub app_tag: u16,
    /// LOGICAL BLOCK APPLICATION TAG MASK: bits that are compared.
    pub app_tag_mask: u16,
}

/// What is compared with the blocks of a VERIFY (SBC-4, "VERIFY (10) command").
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum ByteCheck {
    /// 00b: nothing. The blocks are read, checked, and no data move.
    #[default]
    Medium,
    /// 01b: each block with its own in the Data-Out Buffer.
    Blocks,
    /// 11b: each block with the one that is in the Data-Out Buffer.
    OneBlock,
}

impl ByteCheck {
    const fn bits(self) -> u8 {
        match self {
            ByteCheck::Medium => 0,
            ByteCheck::Blocks => 1,
            ByteCheck::OneBlock => 3,
        }
    }

    fn from_bits(bits: u8, byte: u16) -> Result<ByteCheck, Invalid> {
        match bits & 3 {
            0 => Ok(ByteCheck::Medium),
            1 => Ok(ByteCheck::Blocks),
            3 => Ok(ByteCheck::OneBlock),
            _ => Err(Invalid::Field { field: "BYTCHK", byte }),
        }
    }

    /// Blocks in the Data-Out Buffer of a VERIFY of so many blocks.
    pub const fn data_blocks(self, blocks: u32) -> u32 {
        match self {
            ByteCheck::Medium => 0,
            ByteCheck::Blocks => blocks,
            // A VERIFY of no blocks compares nothing.
            ByteCheck::OneBlock => {
                if blocks == 0 {
                    0
                } else {
                    1
                }
            }
        }
    }
}

/// The fields that READ, WRITE and VERIFY share. With expected tags it has 32 bytes, and 16 without.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockCommand {
    /// LOGICAL BLOCK ADDRESS.
    pub lba: Lba,
    /// TRANSFER LENGTH, VERIFICATION LENGTH: 0 for no blocks, which is no error.
    pub blocks: u32,
    /// RDPROTECT, WRPROTECT, VRPROTECT.
    pub protect: Protect,
    /// DPO: the blocks are not soon read again.
    pub disable_page_out: bool,
    /// FUA: the blocks are on the medium when the command completes. A VERIFY has no such bit.
    pub force_unit_access: bool,
    /// What is expected of tags.
    pub expected: Option<ExpectedTags>,
}

impl BlockCommand {
    /// The command for these blocks without options.
    pub const fn new(extent: Extent) -> BlockCommand {
        BlockCommand {
            lba: extent.start(),
            blocks: extent.blocks().get(),
            protect: Protect::NONE,
            disable_page_out: false,
            force_unit_access: false,
            expected: None,
        }
    }

    /// The blocks; `None` for none.
    ///
    /// # Errors
    /// If they go past the last address.
    pub fn extent(&self) -> Result<Option<Extent>, Invalid> {
        extent_of(self.lba, u64::from(self.blocks))
    }

    /// The form of 16 or 32 bytes. `low` are the bits 2:0 of the byte that has the protection field.
    pub(crate) fn encode(&self, opcode: u8, action: u16, low: u8) -> Cdb {
        let flags = self.protect.bits() << 5 | flag(self.disable_page_out, 4) | flag(self.force_unit_access, 3) | low;
        long_form(opcode, action, (self.lba, self.blocks), flags, self.expected)
    }

    pub(crate) fn decode_16(bytes: &[u8]) -> Result<(BlockCommand, u8), Invalid> {
        let cdb = whole::<16>(bytes)?;
        Ok((BlockCommand::with(Lba::new(u64_at(cdb, 2)), u32_at(cdb, 10), cdb[1], None), cdb[1]))
    }

    pub(crate) fn decode_32(bytes: &[u8]) -> Result<(BlockCommand, u8), Invalid> {
        let cdb = whole::<32>(bytes)?;
        let expected = expected_of(cdb);
        Ok((BlockCommand::with(Lba::new(u64_at(cdb, 12)), u32_at(cdb, 28), cdb[10], Some(expected)), cdb[10]))
    }

    pub(crate) fn with(lba: Lba, blocks: u32, flags: u8, expected: Option<ExpectedTags>) -> BlockCommand {
        let (disable_page_out, force_unit_access) = (bit(flags, 4), bit(flags, 3));
        BlockCommand {
            lba,
            blocks,
            protect: Protect::from_bits(flags >> 5),
            disable_page_out,
            force_unit_access,
            expected,
        }
    }

    /// The same with what is compared, from and to bits 2:1 of the flags. Bit 3 is reserved.
    pub(crate) fn verify(self, flags: u8, byte: u16) -> Result<(BlockCommand, ByteCheck), Invalid> {
        let check = ByteCheck::from_bits(flags >> 1, byte)?;
        Ok((BlockCommand { force_unit_access: false, ..self }, check))
    }

    pub(crate) fn encode_verify(&self, check: ByteCheck) -> Cdb {
        let plain = BlockCommand { force_unit_access: false, ..*self };
        plain.encode(opcode::VERIFY_16, action::VERIFY_32, check.bits() << 1)
    }

    /// The form of 10 bytes, if the blocks have room in it and nothing is expected of tags.
    pub(crate) fn encode_verify_10(&self, check: ByteCheck) -> Option<Cdb> {
        let lba = u32::try_from(self.lba.get()).ok()?;
        let blocks = u16::try_from(self.blocks).ok()?;
        if self.expected.is_some() {
            return None;
        }
        let mut cdb = Cdb::new(opcode::VERIFY_10, 10);
        let bytes = cdb.bytes_mut();
        bytes[1] = self.protect.bits() << 5 | flag(self.disable_page_out, 4) | check.bits() << 1;
        put_u32(bytes, 2, lba);
        put_u16(bytes, 7, blocks);
        Some(cdb)
    }

    pub(crate) fn decode_verify_10(bytes: &[u8]) -> Result<(BlockCommand, ByteCheck), Invalid> {
        let cdb = whole::<10>(bytes)?;
        let lba = Lba::new(u64::from(u32_at(cdb, 2)));
        BlockCommand::with(lba, u32::from(u16_at(cdb, 7)), cdb[1], None).verify(cdb[1], 1)
    }
}

/// A WRITE SAME, of 16 bytes or, with expected tags, of 32 (SBC-4, "WRITE SAME (16) command").
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct WriteSame {
    /// LOGICAL BLOCK ADDRESS.
    pub lba: Lba,
    /// NUMBER OF LOGICAL BLOCKS: 0 for all from there, unless the device forbids it ([`crate::BlockLimits::write_same_non_zero`]).
    pub blocks: u32,
    /// WRPROTECT.
    pub protect: Protect,
    /// ANCHOR: unmapped blocks are anchored.
    pub anchor: bool,
    /// UNMAP: the blocks may be unmapped, if they then read as the block that would be written.
    pub unmap: bool,
    /// NDOB: there is no Data-Out Buffer, and zeroes are written.
    pub no_data_out: bool,
    /// What is expected of tags.
    pub expected: Option<ExpectedTags>,
}

impl WriteSame {
    pub(crate) fn encode(&self) -> Cdb {
        let flags = self.protect.bits() << 5 | flag(self.anchor, 4) | flag(self.unmap, 3) | flag(self.no_data_out, 0);
        long_form(opcode::WRITE_SAME_16, action::WRITE_SAME_32, (self.lba, self.blocks), flags, self.expected)
    }

    pub(crate) fn decode_16(bytes: &[u8]) -> Result<WriteSame, Invalid> {
        let cdb = whole::<16>(bytes)?;
        Ok(WriteSame::with(Lba::new(u64_at(cdb, 2)), u32_at(cdb, 10), cdb[1], None))
    }

    pub(crate) fn decode_32(bytes: &[u8]) -> Result<WriteSame, Invalid> {
        let cdb = whole::<32>(bytes)?;
        Ok(WriteSame::with(Lba::new(u64_at(cdb, 12)), u32_at(cdb, 28), cdb[10], Some(expected_of(cdb))))
    }

    fn with(lba: Lba, blocks: u32, flags: u8, expected: Option<ExpectedTags>) -> WriteSame {
        let (anchor, unmap, no_data_out) = (bit(flags, 4), bit(flags, 3), bit(flags, 0));
        WriteSame { lba, blocks, protect: Protect::from_bits(flags >> 5), anchor, unmap, no_data_out, expected }
    }
}

/// The blocks that a field names; `None` for none.
pub(crate) fn extent_of(lba: Lba, blocks: u64) -> Result<Option<Extent>, Invalid> {
    match blocks {
        0 => Ok(None),
        blocks => Ok(Some(Extent::from_raw(lba.get(), blocks)?)),
    }
}

/// The forms of 16 and of 32 bytes, which have the same fields but for the expected tags.
fn long_form(opcode: u8, action: u16, (lba, blocks): (Lba, u32), flags: u8, tags: Option<ExpectedTags>) -> Cdb {
    let Some(tags) = tags else {
        let mut cdb = Cdb::new(opcode, 16);
        let bytes = cdb.bytes_mut();
        bytes[1] = flags;
        put_u64(bytes, 2, lba.get());
        put_u32(bytes, 10, blocks);
        return cdb;
    };
    let mut cdb = Cdb::variable(action);
    let bytes = cdb.bytes_mut();
    bytes[10] = flags;
    put_u64(bytes, 12, lba.get());
    put_u32(bytes, 20, tags.initial_ref_tag);
    put_u16(bytes, 24, tags.app_tag);
    put_u16(bytes, 26, tags.app_tag_mask);
    put_u32(bytes, 28, blocks);
    cdb
}

fn expected_of(cdb: &[u8; 32]) -> ExpectedTags {
    ExpectedTags { initial_ref_tag: u32_at(cdb, 20), app_tag: u16_at(cdb, 24), app_tag_mask: u16_at(cdb, 26) }
}
