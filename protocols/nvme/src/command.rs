//! The submission queue entry: 64 bytes, one command.
//!
//! The layout is that of clause "Submission Queue Entry" of the NVM Express Base specification. Every bit pattern is a
//! [`Command`]; the typed views here and in the modules `nvm` and `fabrics` interpret it, and refuse illegal values with a
//! status code. The dwords stay public, because a target
//! has to echo and log commands it does not know.

use std::fmt;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::sgl::{DataPointer, SglDescriptor, SglError};

/// The namespace identifier that means all namespaces.
pub const NSID_ALL: u32 = 0xFFFF_FFFF;

/// A submission queue entry, as it stands in memory and in a capsule (Base, "Submission Queue Entry").
#[derive(Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Command {
    /// Byte 0: opcode (OPC). Its meaning depends on the kind of queue; 7Fh is a Fabrics command on every queue.
    pub opcode: u8,
    /// Byte 1: FUSE in bits 1:0, PSDT in bits 7:6, the rest reserved.
    pub flags: u8,
    /// Bytes 3:2: command identifier (CID), unique among the commands outstanding on a queue.
    pub cid: U16,
    /// Bytes 7:4: namespace identifier (NSID).
    pub nsid: U32,
    /// Bytes 11:8: command dword 2.
    pub cdw2: U32,
    /// Bytes 15:12: command dword 3.
    pub cdw3: U32,
    /// Bytes 23:16: metadata pointer (MPTR); not used over NVMe/TCP.
    pub mptr: U64,
    /// Bytes 39:24: data pointer (DPTR), always one SGL descriptor over Fabrics.
    pub dptr: SglDescriptor,
    /// Bytes 43:40: command dword 10.
    pub cdw10: U32,
    /// Bytes 47:44: command dword 11.
    pub cdw11: U32,
    /// Bytes 51:48: command dword 12.
    pub cdw12: U32,
    /// Bytes 55:52: command dword 13.
    pub cdw13: U32,
    /// Bytes 59:56: command dword 14.
    pub cdw14: U32,
    /// Bytes 63:60: command dword 15.
    pub cdw15: U32,
}

/// Whether a command is half of a fused pair (Base, field CDW0.FUSE).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Fuse {
    /// 00b: a command by itself.
    Normal,
    /// 01b: the first of the pair.
    First,
    /// 10b: the second of the pair; it follows the first at once on the same queue.
    Second,
    /// 11b: reserved.
    Reserved,
}

impl Command {
    /// Bytes of a submission queue entry.
    pub const BYTES: usize = 64;

    /// A command with this opcode for this namespace; its data are found by SGL (PSDT 01b, the form of every command
    /// over Fabrics), and everything else is zero.
    pub fn new(opcode: u8, nsid: u32) -> Command {
        Command { opcode, flags: 0x40, nsid: U32::new(nsid), ..Command::default() }
    }

    /// The command in these bytes; `None` unless there are at least [`Command::BYTES`]. Bytes behind it are left alone.
    pub fn from_prefix(bytes: &[u8]) -> Option<Command> {
        Command::read_from_prefix(bytes).ok().map(|(command, _)| command)
    }

    /// Whether the command is half of a fused pair.
    pub fn fuse(&self) -> Fuse {
        match self.flags & 3 {
            0 => Fuse::Normal,
            1 => Fuse::First,
            2 => Fuse::Second,
            _ => Fuse::Reserved,
        }
    }

    /// The same command as this part of a fused pair.
    pub fn with_fuse(mut self, fuse: Fuse) -> Command {
        self.flags = (self.flags & !3) | fuse as u8;
        self
    }

    /// The same command with this command identifier.
    pub fn with_cid(mut self, cid: u16) -> Command {
        self.cid = U16::new(cid);
        self
    }

    /// The same command with this data pointer.
    pub fn with_data(mut self, data: DataPointer) -> Command {
        self.dptr = data.descriptor();
        self
    }

    /// Where the data of the command is, for a command received over Fabrics: refuses PRPs and descriptor types that
    /// Fabrics without keys do not have (Base, "Scatter Gather List"; status as of [`SglError::status_code`]).
    pub fn data(&self) -> Result<DataPointer, SglError> {
        match self.flags >> 6 {
            1 | 2 => self.dptr.data_pointer(),
            _ => Err(SglError::NotSgl),
        }
    }

    /// Command dwords 10 and 11 as one 64-bit value, such as a starting LBA.
    pub fn cdw10_11(&self) -> u64 {
        u64::from(self.cdw10.get()) | u64::from(self.cdw11.get()) << 32
    }

    /// Sets command dwords 10 and 11 from one 64-bit value.
    pub fn set_cdw10_11(&mut self, value: u64) {
        self.cdw10 = U32::new(value as u32);
        self.cdw11 = U32::new((value >> 32) as u32);
    }
}

impl fmt::Debug for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Command {{ opcode: {:#04x}, flags: {:#04x}, ", self.opcode, self.flags)?;
        write!(f, "cid: {:#06x}, nsid: {:#x}, ", self.cid.get(), self.nsid.get())?;
        write!(f, "cdw2: {:#x}, cdw3: {:#x}, ", self.cdw2.get(), self.cdw3.get())?;
        write!(f, "mptr: {:#x}, dptr: {:?}, cdw10..15:", self.mptr.get(), self.dptr)?;
        for dword in [self.cdw10, self.cdw11, self.cdw12, self.cdw13, self.cdw14, self.cdw15] {
            write!(f, " {:08x}", dword.get())?;
        }
        f.write_str(" }")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StatusCode;

    fn counting() -> Command {
        let bytes: [u8; 64] = std::array::from_fn(|i| i as u8);
        Command::from_prefix(&bytes).unwrap()
    }

    #[test]
    fn every_field_stands_where_the_specification_draws_it() {
        let command = counting();
        assert_eq!(size_of::<Command>(), 64);
        assert_eq!((command.opcode, command.flags), (0, 1));
        assert_eq!(command.cid.get(), 0x0302);
        assert_eq!(command.nsid.get(), 0x0706_0504);
        assert_eq!(command.cdw2.get(), 0x0B0A_0908);
        assert_eq!(command.cdw3.get(), 0x0F0E_0D0C);
        assert_eq!(command.mptr.get(), 0x1716_1514_1312_1110);
        assert_eq!(command.dptr.as_bytes(), &std::array::from_fn::<u8, 16, _>(|i| 24 + i as u8));
        assert_eq!(command.cdw10_11(), 0x2F2E_2D2C_2B2A_2928);
        assert_eq!(command.cdw12.get(), 0x3332_3130);
        assert_eq!(command.cdw13.get(), 0x3736_3534);
        assert_eq!(command.cdw14.get(), 0x3B3A_3938);
        assert_eq!(command.cdw15.get(), 0x3F3E_3D3C);
    }

    #[test]
    fn sixty_four_bytes_are_a_command_and_fewer_are_none() {
        assert!(Command::from_prefix(&[0; 64]).is_some());
        assert!(Command::from_prefix(&[0; 100]).is_some());
        assert!(Command::from_prefix(&[0; 63]).is_none());
        assert!(Command::from_prefix(&[]).is_none());
    }

    #[test]
    fn the_flags_tell_fuse_and_psdt() {
        let mut command = counting();
        for flags in 0..=255_u8 {
            command.flags = flags;
            let fuse = [Fuse::Normal, Fuse::First, Fuse::Second, Fuse::Reserved][usize::from(flags & 3)];
            assert_eq!(command.fuse(), fuse);
            assert_eq!(command.with_fuse(fuse), command);
        }
        assert_eq!(Command::new(1, 1).flags, 0x40);
    }

    #[test]
    fn data_must_come_by_sgl() {
        let mut command = Command::new(2, 1).with_data(DataPointer::Transport { length_bytes: 512 });
        assert_eq!(command.data(), Ok(DataPointer::Transport { length_bytes: 512 }));
        for flags in [0x00, 0xC0] {
            command.flags = flags;
            assert_eq!(command.data(), Err(SglError::NotSgl));
            assert_eq!(SglError::NotSgl.status_code(), StatusCode::INVALID_FIELD);
        }
    }

    #[test]
    fn the_64_bit_view_of_two_dwords_round_trips() {
        let mut command = counting();
        command.set_cdw10_11(0x0123_4567_89AB_CDEF);
        assert_eq!(command.cdw10.get(), 0x89AB_CDEF);
        assert_eq!(command.cdw10_11(), 0x0123_4567_89AB_CDEF);
    }
}
