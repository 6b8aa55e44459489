//! Why a command is refused, and the status that says so.

use sealblock_units::{Extent, RangeError};

use crate::sgl::SglError;
use crate::status::{Status, StatusCode};
use crate::wire::TooShort;

/// Where in a command a wrong field starts (Base, "Error Information", Parameter Error Location).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FieldLocation {
    /// Byte of the submission queue entry, 0 to 63.
    pub byte: u8,
    /// Bit of that byte, 0 to 7.
    pub bit: u8,
}

impl FieldLocation {
    /// Bit `bit` of command dword `dword` (0 to 15).
    pub const fn dword(dword: u8, bit: u8) -> FieldLocation {
        FieldLocation { byte: (dword & 15) * 4 + (bit & 31) / 8, bit: bit & 7 }
    }

    /// The value of the Parameter Error Location field: byte in bits 7:0, bit in bits 10:8.
    pub const fn bits(self) -> u16 {
        self.byte as u16 | (self.bit as u16 & 7) << 8
    }
}

/// Why a command cannot be carried out as it is. Each reason has one status code; see [`Invalid::status`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Invalid {
    /// The opcode is not known, or not supported on this queue.
    #[error("opcode {0:#04x} is not supported")]
    Opcode(u8),
    /// A field has a value that is reserved or not supported.
    #[error("field {field} of the command has a value that is not valid")]
    Field {
        /// The specification's mnemonic.
        field: &'static str,
        /// Where it starts.
        at: FieldLocation,
    },
    /// The range of blocks cannot be.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The range goes past the end of the namespace.
    #[error("{extent} go past the end of a namespace of {capacity_blocks} blocks")]
    PastEnd {
        /// Requested blocks.
        extent: Extent,
        /// Blocks there are.
        capacity_blocks: u64,
    },
    /// More blocks than a command can name, or than the controller allows in one command.
    #[error("{blocks} blocks are more than the {max} that one command may name")]
    TooManyBlocks {
        /// Requested blocks.
        blocks: u64,
        /// The largest number.
        max: u64,
    },
    /// A list has no entry, or more than a command or the controller allows.
    #[error("a list of {entries} entries is outside 1 to {max}")]
    Entries {
        /// Requested entries.
        entries: usize,
        /// The largest number.
        max: usize,
    },
    /// Type 1 wants the reference tag of a command to be the low bits of its address.
    #[error("the reference tag {given:#x} is not the low bits of the address, {expected:#x}")]
    ReferenceTag {
        /// What it has to be.
        expected: u64,
        /// What the command says.
        given: u64,
    },
    /// Type 3 has no reference tag that could be checked.
    #[error("the reference tag of Type 3 cannot be checked")]
    ReferenceCheckInType3,
    /// The format of the command's list does not go with the format of the namespace.
    #[error("the descriptor format does not go with the namespace's protection information")]
    DescriptorFormat,
    /// The data is shorter or longer than the command needs.
    #[error("the command needs {needed_bytes} bytes of data and has {got_bytes}")]
    DataLength {
        /// Bytes the command needs.
        needed_bytes: u64,
        /// Bytes it has.
        got_bytes: u64,
    },
    /// The data pointer is not one.
    #[error(transparent)]
    Sgl(#[from] SglError),
    /// The feature identifier is not supported.
    #[error("feature {0:#04x} is not supported")]
    Feature(u8),
    /// The log page is not supported.
    #[error("log page {0:#04x} is not supported")]
    LogPage(u8),
}

impl Invalid {
    /// The field `field` at bit `bit` of command dword `dword`.
    pub const fn field(field: &'static str, dword: u8, bit: u8) -> Invalid {
        Invalid::Field { field, at: FieldLocation::dword(dword, bit) }
    }

    /// The status code that says so.
    pub const fn status_code(self) -> StatusCode {
        match self {
            Invalid::Opcode(_) => StatusCode::INVALID_OPCODE,
            Invalid::Field { .. } | Invalid::Feature(_) => StatusCode::INVALID_FIELD,
            Invalid::Range(_) | Invalid::PastEnd { .. } => StatusCode::LBA_OUT_OF_RANGE,
            Invalid::TooManyBlocks { .. } | Invalid::Entries { .. } => StatusCode::COMMAND_SIZE_LIMIT_EXCEEDED,
            Invalid::ReferenceTag { .. } | Invalid::ReferenceCheckInType3 => StatusCode::INVALID_PROTECTION_INFORMATION,
            Invalid::DescriptorFormat => StatusCode::INVALID_NAMESPACE,
            Invalid::DataLength { .. } => StatusCode::DATA_SGL_LENGTH_INVALID,
            Invalid::Sgl(error) => error.status_code(),
            Invalid::LogPage(_) => StatusCode::INVALID_LOG_PAGE,
        }
    }

    /// The status that answers the command. What is malformed stays so: Do Not Retry is always set.
    pub const fn status(self) -> Status {
        self.status_code().status().with_dnr(true)
    }

    /// Where the fault is, for the Error Information log, if it is in one field.
    pub const fn location(self) -> Option<FieldLocation> {
        match self {
            Invalid::Opcode(_) => Some(FieldLocation::dword(0, 0)),
            Invalid::Field { at, .. } => Some(at),
            Invalid::Feature(_) | Invalid::LogPage(_) => Some(FieldLocation::dword(10, 0)),
            Invalid::Range(_) | Invalid::PastEnd { .. } => Some(FieldLocation::dword(10, 0)),
            Invalid::ReferenceTag { .. } => Some(FieldLocation::dword(14, 0)),
            Invalid::ReferenceCheckInType3 => Some(FieldLocation::dword(12, 26)),
            _ => None,
        }
    }
}

impl From<TooShort> for Invalid {
    fn from(short: TooShort) -> Invalid {
        Invalid::DataLength { needed_bytes: short.needed as u64, got_bytes: short.got as u64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_is_byte_and_bit() {
        assert_eq!(FieldLocation::dword(12, 29), FieldLocation { byte: 51, bit: 5 });
        assert_eq!(FieldLocation::dword(12, 29).bits(), 0x0533);
        assert_eq!(Invalid::field("NLB", 12, 0).location(), Some(FieldLocation { byte: 48, bit: 0 }));
    }

    #[test]
    fn what_is_malformed_says_do_not_retry_even_where_the_number_is_shared() {
        let status = Invalid::ReferenceCheckInType3.status();
        assert_eq!(status.code(), StatusCode::INVALID_PROTECTION_INFORMATION);
        assert!(status.do_not_retry());
        assert!(!StatusCode::CONNECT_CONTROLLER_BUSY.status().do_not_retry());
    }
}
