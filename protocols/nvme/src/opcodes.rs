//! The opcodes of admin commands, I/O commands and Fabrics commands.

use crate::wire::codes;

/// The opcode of every Fabrics command, on admin and I/O queues alike (Base, "Fabrics Command Set").
pub const FABRICS_OPCODE: u8 = 0x7F;

codes! {
    /// Opcodes of the admin queue (Base, "Admin Command Set"; NVM, "Admin Commands").
    pub enum AdminOpcode: u8 {
        /// Get Log Page.
        GetLogPage = 0x02,
        /// Identify.
        Identify = 0x06,
        /// Abort.
        Abort = 0x08,
        /// Set Features.
        SetFeatures = 0x09,
        /// Get Features.
        GetFeatures = 0x0A,
        /// Asynchronous Event Request.
        AsynchronousEventRequest = 0x0C,
        /// Keep Alive.
        KeepAlive = 0x18,
        /// Get LBA Status.
        GetLbaStatus = 0x86,
    }
}

codes! {
    /// Opcodes of I/O queues for the NVM command set (NVM, "I/O Commands").
    pub enum IoOpcode: u8 {
        /// Flush.
        Flush = 0x00,
        /// Write.
        Write = 0x01,
        /// Read.
        Read = 0x02,
        /// Write Uncorrectable.
        WriteUncorrectable = 0x04,
        /// Compare.
        Compare = 0x05,
        /// Write Zeroes.
        WriteZeroes = 0x08,
        /// Dataset Management.
        DatasetManagement = 0x09,
        /// Verify.
        Verify = 0x0C,
        /// Copy.
        Copy = 0x19,
        /// Checksum: a vendor specific command of sealblock, see [`crate::extensions`].
        Checksum = 0xC0,
    }
}

codes! {
    /// Types of Fabrics commands, in field FCTYPE (Base, "Fabrics Command Set").
    pub enum FabricsType: u8 {
        /// Property Set, on the admin queue.
        PropertySet = 0x00,
        /// Connect, the first command of every queue.
        Connect = 0x01,
        /// Property Get, on the admin queue.
        PropertyGet = 0x04,
        /// Disconnect, on I/O queues.
        Disconnect = 0x08,
    }
}

/// Which way the data of a command goes, as bits 1:0 of its opcode say (Base, field CDW0.OPC).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// 00b: none.
    None,
    /// 01b: host to controller.
    ToController,
    /// 10b: controller to host.
    ToHost,
    /// 11b: both.
    Both,
}

impl Direction {
    /// The direction of an opcode, or of a Fabrics command type, which follows the same rule.
    pub const fn of(opcode: u8) -> Direction {
        match opcode & 3 {
            0 => Direction::None,
            1 => Direction::ToController,
            2 => Direction::ToHost,
            _ => Direction::Both,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip_and_others_are_unknown() {
        for code in 0..=255 {
            assert!(AdminOpcode::from_code(code).is_none_or(|opcode| opcode.code() == code));
            assert!(IoOpcode::from_code(code).is_none_or(|opcode| opcode.code() == code));
        }
        assert_eq!(IoOpcode::from_code(0x0C), Some(IoOpcode::Verify));
        assert_eq!(IoOpcode::from_code(0x03), None);
        assert_eq!(AdminOpcode::ALL.len(), 8);
    }

    #[test]
    fn the_low_bits_of_an_opcode_are_its_direction() {
        let direction = |opcode: IoOpcode| Direction::of(opcode.code());
        assert_eq!(direction(IoOpcode::Flush), Direction::None);
        assert_eq!(direction(IoOpcode::Verify), Direction::None);
        assert_eq!(direction(IoOpcode::WriteZeroes), Direction::None);
        assert_eq!(direction(IoOpcode::Checksum), Direction::None);
        assert_eq!(direction(IoOpcode::Read), Direction::ToHost);
        for opcode in [IoOpcode::Write, IoOpcode::Compare, IoOpcode::DatasetManagement, IoOpcode::Copy] {
            assert_eq!(direction(opcode), Direction::ToController);
        }
        assert_eq!(Direction::of(FabricsType::Connect.code()), Direction::ToController);
        assert_eq!(Direction::of(FabricsType::PropertyGet.code()), Direction::None);
    }
}
