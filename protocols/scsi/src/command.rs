//! The commands, from and to their bytes.

use sealblock_units::{Extent, Lba};

use crate::cdb::{BlockCommand, ByteCheck, Cdb, Invalid, WriteSame, action, extent_of, opcode, whole};
use crate::wire::{bit, flag, put_u16, put_u32, put_u64, u16_at, u32_at, u64_at};

/// A command. Each is written in the shortest form here that has room for it, but VERIFY: see [`Command::encode`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Command {
    /// TEST UNIT READY (SPC-5).
    TestUnitReady,
    /// INQUIRY (SPC-5): a page of vital product data, or the standard data.
    Inquiry {
        /// PAGE CODE, with EVPD.
        page: Option<u8>,
        /// ALLOCATION LENGTH.
        allocation_bytes: u16,
    },
    /// MODE SENSE (10) of current values (SPC-5).
    ModeSense {
        /// PAGE CODE.
        page: u8,
        /// SUBPAGE CODE.
        subpage: u8,
        /// DBD: without block descriptors.
        disable_block_descriptors: bool,
        /// ALLOCATION LENGTH.
        allocation_bytes: u16,
    },
    /// READ CAPACITY (16) (SBC-4).
    ReadCapacity16 {
        /// ALLOCATION LENGTH.
        allocation_bytes: u32,
    },
    /// GET LBA STATUS (16) (SBC-4).
    GetLbaStatus {
        /// STARTING LOGICAL BLOCK ADDRESS.
        lba: Lba,
        /// ALLOCATION LENGTH.
        allocation_bytes: u32,
    },
    /// READ (16) and READ (32) (SBC-4).
    Read(BlockCommand),
    /// WRITE (16) and WRITE (32) (SBC-4).
    Write(BlockCommand),
    /// VERIFY (16) and VERIFY (32) (SBC-4).
    Verify(BlockCommand, ByteCheck),
    /// VERIFY (10) (SBC-4), of blocks that fit into it. [`BlockCommand::expected`] is `None`.
    Verify10(BlockCommand, ByteCheck),
    /// COMPARE AND WRITE (SBC-4). [`BlockCommand::expected`] is `None`, and at most 255 blocks fit.
    CompareAndWrite(BlockCommand),
    /// WRITE SAME (16) and WRITE SAME (32) (SBC-4).
    WriteSame(WriteSame),
    /// UNMAP (SBC-4), with [`crate::UnmapList`] as its parameter list.
    Unmap {
        /// ANCHOR.
        anchor: bool,
        /// PARAMETER LIST LENGTH.
        list_bytes: u16,
    },
    /// SYNCHRONIZE CACHE (16) (SBC-4).
    SynchronizeCache {
        /// LOGICAL BLOCK ADDRESS.
        lba: Lba,
        /// NUMBER OF LOGICAL BLOCKS: 0 for all from there.
        blocks: u32,
        /// IMMED: the command completes before the blocks are on the medium.
        immediate: bool,
    },
}

impl Command {
    /// A VERIFY of these blocks that moves no data.
    pub const fn verify(extent: Extent) -> Command {
        Command::Verify(BlockCommand::new(extent), ByteCheck::Medium)
    }

    /// The bytes of the command; `None` if its form has no room for its blocks.
    pub fn encode(&self) -> Option<Cdb> {
        Some(match *self {
            Command::TestUnitReady => Cdb::new(opcode::TEST_UNIT_READY, 6),
            Command::Inquiry { page, allocation_bytes } => {
                let mut cdb = Cdb::new(opcode::INQUIRY, 6);
                let bytes = cdb.bytes_mut();
                (bytes[1], bytes[2]) = (flag(page.is_some(), 0), page.unwrap_or(0));
                put_u16(bytes, 3, allocation_bytes);
                cdb
            }
            Command::ModeSense { page, subpage, disable_block_descriptors, allocation_bytes } => {
                let mut cdb = Cdb::new(opcode::MODE_SENSE_10, 10);
                let bytes = cdb.bytes_mut();
                (bytes[1], bytes[2], bytes[3]) = (flag(disable_block_descriptors, 3), page & 0x3F, subpage);
                put_u16(bytes, 7, allocation_bytes);
                cdb
            }
            Command::ReadCapacity16 { allocation_bytes } => {
                service_action_in(action::READ_CAPACITY_16, Lba::ZERO, allocation_bytes)
            }
            Command::GetLbaStatus { lba, allocation_bytes } => {
                service_action_in(action::GET_LBA_STATUS, lba, allocation_bytes)
            }
            Command::Read(blocks) => blocks.encode(opcode::READ_16, action::READ_32, 0),
            Command::Write(blocks) => blocks.encode(opcode::WRITE_16, action::WRITE_32, 0),
            Command::Verify(blocks, check) => blocks.encode_verify(check),
            Command::Verify10(blocks, check) => blocks.encode_verify_10(check)?,
            Command::CompareAndWrite(blocks) => compare_and_write(&blocks)?,
            Command::WriteSame(write) => write.encode(),
            Command::Unmap { anchor, list_bytes } => {
                let mut cdb = Cdb::new(opcode::UNMAP, 10);
                cdb.bytes_mut()[1] = flag(anchor, 0);
                put_u16(cdb.bytes_mut(), 7, list_bytes);
                cdb
            }
            Command::SynchronizeCache { lba, blocks, immediate } => {
                let mut cdb = Cdb::new(opcode::SYNCHRONIZE_CACHE_16, 16);
                let bytes = cdb.bytes_mut();
                bytes[1] = flag(immediate, 1);
                put_u64(bytes, 2, lba.get());
                put_u32(bytes, 10, blocks);
                cdb
            }
        })
    }

    /// The command of these bytes; bytes behind its end are ignored.
    ///
    /// # Errors
    /// Commands that are not known, end early, or have reserved values; [`Invalid::sense`] is what a device server says of them.
    pub fn decode(bytes: &[u8]) -> Result<Command, Invalid> {
        let opcode = bytes.first().copied().ok_or(Invalid::Short { opcode: 0, needed: 6, got: 0 })?;
        match opcode {
            opcode::TEST_UNIT_READY => whole::<6>(bytes).map(|_| Command::TestUnitReady),
            opcode::INQUIRY => inquiry(whole(bytes)?),
            opcode::MODE_SENSE_10 => mode_sense(whole(bytes)?),
            opcode::SERVICE_ACTION_IN_16 => from_service_action_in(whole(bytes)?),
            opcode::READ_16 => BlockCommand::decode_16(bytes).map(|(blocks, _)| Command::Read(blocks)),
            opcode::WRITE_16 => BlockCommand::decode_16(bytes).map(|(blocks, _)| Command::Write(blocks)),
            opcode::VERIFY_16 => {
                let (blocks, flags) = BlockCommand::decode_16(bytes)?;
                blocks.verify(flags, 1).map(|(blocks, check)| Command::Verify(blocks, check))
            }
            opcode::VERIFY_10 => {
                BlockCommand::decode_verify_10(bytes).map(|(blocks, check)| Command::Verify10(blocks, check))
            }
            opcode::COMPARE_AND_WRITE => {
                let cdb = whole::<16>(bytes)?;
                let lba = Lba::new(u64_at(cdb, 2));
                Ok(Command::CompareAndWrite(BlockCommand::with(lba, u32::from(cdb[13]), cdb[1], None)))
            }
            opcode::WRITE_SAME_16 => WriteSame::decode_16(bytes).map(Command::WriteSame),
            opcode::UNMAP => {
                let cdb = whole::<10>(bytes)?;
                Ok(Command::Unmap { anchor: bit(cdb[1], 0), list_bytes: u16_at(cdb, 7) })
            }
            opcode::SYNCHRONIZE_CACHE_16 => {
                let cdb = whole::<16>(bytes)?;
                let (lba, blocks) = (Lba::new(u64_at(cdb, 2)), u32_at(cdb, 10));
                Ok(Command::SynchronizeCache { lba, blocks, immediate: bit(cdb[1], 1) })
            }
            opcode::VARIABLE_LENGTH => variable(bytes),
            opcode => Err(Invalid::Opcode(opcode)),
        }
    }

    /// The blocks that the command is about; `None` for a command without blocks, and for those whose 0 means all the rest.
    ///
    /// # Errors
    /// If they go past the last address.
    pub fn extent(&self) -> Result<Option<Extent>, Invalid> {
        match self {
            Command::Read(blocks)
            | Command::Write(blocks)
            | Command::Verify(blocks, _)
            | Command::Verify10(blocks, _)
            | Command::CompareAndWrite(blocks) => blocks.extent(),
            Command::WriteSame(WriteSame { lba, blocks, .. }) | Command::SynchronizeCache { lba, blocks, .. } => {
                extent_of(*lba, u64::from(*blocks))
            }
            Command::TestUnitReady
            | Command::Inquiry { .. }
            | Command::ModeSense { .. }
            | Command::ReadCapacity16 { .. }
            | Command::GetLbaStatus { .. }
            | Command::Unmap { .. } => Ok(None),
        }
    }
}

fn service_action_in(action: u8, lba: Lba, allocation_bytes: u32) -> Cdb {
    let mut cdb = Cdb::new(opcode::SERVICE_ACTION_IN_16, 16);
    let bytes = cdb.bytes_mut();
    bytes[1] = action;
    put_u64(bytes, 2, lba.get());
    put_u32(bytes, 10, allocation_bytes);
    cdb
}

fn from_service_action_in(cdb: &[u8; 16]) -> Result<Command, Invalid> {
    let allocation_bytes = u32_at(cdb, 10);
    match cdb[1] & 0x1F {
        action::READ_CAPACITY_16 => Ok(Command::ReadCapacity16 { allocation_bytes }),
        action::GET_LBA_STATUS => Ok(Command::GetLbaStatus { lba: Lba::new(u64_at(cdb, 2)), allocation_bytes }),
        action => Err(Invalid::ServiceAction { opcode: cdb[0], action: u16::from(action) }),
    }
}

fn inquiry(cdb: &[u8; 6]) -> Result<Command, Invalid> {
    let page = bit(cdb[1], 0).then_some(cdb[2]);
    // SPC-5, "INQUIRY command": a page code without EVPD is an invalid field.
    if page.is_none() && cdb[2] != 0 {
        return Err(Invalid::Field { field: "PAGE CODE", byte: 2 });
    }
    Ok(Command::Inquiry { page, allocation_bytes: u16_at(cdb, 3) })
}

fn mode_sense(cdb: &[u8; 10]) -> Result<Command, Invalid> {
    // PC: only current values are here.
    if cdb[2] >> 6 != 0 {
        return Err(Invalid::Field { field: "PC", byte: 2 });
    }
    let (page, subpage, disable_block_descriptors) = (cdb[2] & 0x3F, cdb[3], bit(cdb[1], 3));
    Ok(Command::ModeSense { page, subpage, disable_block_descriptors, allocation_bytes: u16_at(cdb, 7) })
}

fn variable(bytes: &[u8]) -> Result<Command, Invalid> {
    let cdb = whole::<32>(bytes)?;
    match u16_at(cdb, 8) {
        action::READ_32 => BlockCommand::decode_32(cdb).map(|(blocks, _)| Command::Read(blocks)),
        action::WRITE_32 => BlockCommand::decode_32(cdb).map(|(blocks, _)| Command::Write(blocks)),
        action::VERIFY_32 => {
            let (blocks, flags) = BlockCommand::decode_32(cdb)?;
            blocks.verify(flags, 10).map(|(blocks, check)| Command::Verify(blocks, check))
        }
        action::WRITE_SAME_32 => WriteSame::decode_32(cdb).map(Command::WriteSame),
        action => Err(Invalid::ServiceAction { opcode: cdb[0], action }),
    }
}

fn compare_and_write(blocks: &BlockCommand) -> Option<Cdb> {
    let count = u8::try_from(blocks.blocks).ok()?;
    let mut cdb = BlockCommand { blocks: 0, expected: None, ..*blocks }.encode(opcode::COMPARE_AND_WRITE, 0, 0);
    cdb.bytes_mut()[13] = count;
    blocks.expected.is_none().then_some(cdb)
}
