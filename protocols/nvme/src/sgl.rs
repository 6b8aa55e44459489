//! The data pointer of a command over Fabrics: one scatter-gather list descriptor.
//!
//! Of the many descriptor types only two mean something without memory keys: data in the capsule at an offset (01h),
//! and data that the transport moves (5Ah). A command without data carries either of them with length 0, or nothing
//! but zeroes; hosts do all three, so a length of 0 is [`DataPointer::None`] whatever the address says.

use std::fmt;

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::StatusCode;

/// An SGL descriptor (Base, "Scatter Gather List").
#[derive(Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SglDescriptor {
    /// Bytes 7:0: an address, or an offset in the capsule, or reserved, by type.
    pub address: U64,
    /// Bytes 11:8: length in bytes.
    pub length_bytes: U32,
    /// Bytes 14:12: reserved.
    pub reserved: [u8; 3],
    /// Byte 15: type in the high four bits, sub type in the low four.
    pub identifier: u8,
}

/// Where the data of a command over Fabrics is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DataPointer {
    /// The command moves no data.
    None,
    /// Data in the capsule (descriptor 01h), `offset_bytes` behind the start of the in-capsule data area.
    InCapsule {
        /// Bytes from the start of the area to the data.
        offset_bytes: u64,
        /// Bytes of data, not 0.
        length_bytes: u32,
    },
    /// Data that the transport moves in its own messages (descriptor 5Ah), in the direction of the opcode.
    Transport {
        /// Bytes of data, not 0.
        length_bytes: u32,
    },
}

/// Why a data pointer is refused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum SglError {
    /// The command does not use an SGL (field PSDT), which Fabrics demand.
    #[error("the data pointer is no SGL")]
    NotSgl,
    /// The descriptor has a type or sub type that this transport does not have.
    #[error("SGL descriptor type {identifier:#04x} is not one of this transport")]
    Type {
        /// The descriptor's identifier byte.
        identifier: u8,
    },
}

impl SglError {
    /// The status that a command with such a data pointer completes with.
    pub const fn status_code(self) -> StatusCode {
        match self {
            SglError::NotSgl => StatusCode::INVALID_FIELD,
            SglError::Type { .. } => StatusCode::SGL_DESCRIPTOR_TYPE_INVALID,
        }
    }
}

impl SglDescriptor {
    /// Identifier of a data block at an offset in the capsule: type 0h, sub type 1h.
    pub const IN_CAPSULE: u8 = 0x01;
    /// Identifier of a data block that the transport moves: type 5h, sub type Ah.
    pub const TRANSPORT: u8 = 0x5A;

    /// What the descriptor says. A length of 0 is no data for every type, which hosts send for commands without data.
    pub fn data_pointer(&self) -> Result<DataPointer, SglError> {
        let length_bytes = self.length_bytes.get();
        match self.identifier {
            _ if length_bytes == 0 => Ok(DataPointer::None),
            SglDescriptor::IN_CAPSULE => Ok(DataPointer::InCapsule { offset_bytes: self.address.get(), length_bytes }),
            SglDescriptor::TRANSPORT => Ok(DataPointer::Transport { length_bytes }),
            identifier => Err(SglError::Type { identifier }),
        }
    }
}

impl DataPointer {
    /// The descriptor that says so. No data is a transport descriptor of length 0, as Linux sends it.
    pub fn descriptor(self) -> SglDescriptor {
        let (address, length_bytes, identifier) = match self {
            DataPointer::None => (0, 0, SglDescriptor::TRANSPORT),
            DataPointer::InCapsule { offset_bytes, length_bytes } => {
                (offset_bytes, length_bytes, SglDescriptor::IN_CAPSULE)
            }
            DataPointer::Transport { length_bytes } => (0, length_bytes, SglDescriptor::TRANSPORT),
        };
        let (address, length_bytes) = (U64::new(address), U32::new(length_bytes));
        SglDescriptor { address, length_bytes, reserved: [0; 3], identifier }
    }

    /// Bytes of data, 0 for none.
    pub const fn length_bytes(self) -> u32 {
        match self {
            DataPointer::None => 0,
            DataPointer::InCapsule { length_bytes, .. } | DataPointer::Transport { length_bytes } => length_bytes,
        }
    }
}

impl fmt::Debug for SglDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (address, length, kind) = (self.address.get(), self.length_bytes.get(), self.identifier);
        write!(f, "Sgl {{ type: {kind:#04x}, address: {address:#x}, length: {length} }}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_descriptors_have_these_bytes() {
        let capsule = DataPointer::InCapsule { offset_bytes: 0x10, length_bytes: 0x1000 }.descriptor();
        assert_eq!(capsule.as_bytes(), [0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0x01]);
        let transport = DataPointer::Transport { length_bytes: 0x0102_0304 }.descriptor();
        assert_eq!(transport.as_bytes(), [0, 0, 0, 0, 0, 0, 0, 0, 4, 3, 2, 1, 0, 0, 0, 0x5A]);
    }

    #[test]
    fn pointers_round_trip() {
        for pointer in [
            DataPointer::None,
            DataPointer::InCapsule { offset_bytes: u64::MAX, length_bytes: u32::MAX },
            DataPointer::Transport { length_bytes: 1 },
        ] {
            assert_eq!(pointer.descriptor().data_pointer(), Ok(pointer));
        }
    }

    #[test]
    fn every_other_type_is_refused_unless_it_is_empty() {
        for identifier in 0..=255_u8 {
            let mut descriptor = SglDescriptor { identifier, ..SglDescriptor::default() };
            assert_eq!(descriptor.data_pointer(), Ok(DataPointer::None));
            descriptor.length_bytes = U32::new(1);
            if ![SglDescriptor::IN_CAPSULE, SglDescriptor::TRANSPORT].contains(&identifier) {
                let error = descriptor.data_pointer().unwrap_err();
                assert_eq!(error, SglError::Type { identifier });
                assert_eq!(error.status_code(), StatusCode::SGL_DESCRIPTOR_TYPE_INVALID);
            }
        }
    }
}
