//! Dataset Management: up to 256 ranges, each with advice (NVM, "Dataset Management command").

use sealblock_units::{Extent, RangeError};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::command::Command;
use crate::error::Invalid;
use crate::opcodes::IoOpcode;
use crate::wire::{Count8, flags};

flags! {
    /// What the ranges are to be used for (NVM, Dataset Management, command dword 11).
    pub struct DsmAttributes(u32) {
        /// AD: the ranges may be deallocated.
        DEALLOCATE = 2,
    }
}

/// A Dataset Management command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DatasetManagement {
    /// NR: how many ranges the data has.
    pub ranges: Count8,
    /// What they are for.
    pub attributes: DsmAttributes,
}

/// One range of the list (NVM, "Range Definition").
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DsmRange {
    /// Bytes 3:0: context attributes, advice on access.
    pub context_attributes: U32,
    /// Bytes 7:4: length in blocks, not 0's based; 0 is a range without blocks.
    pub length_blocks: U32,
    /// Bytes 15:8: first block.
    pub slba: U64,
}

impl DsmRange {
    /// Bytes of a range.
    pub const BYTES: usize = 16;

    /// The range of these blocks, without advice.
    pub fn new(extent: Extent) -> DsmRange {
        let (length_blocks, slba) = (U32::new(extent.blocks().get()), U64::new(extent.start().get()));
        DsmRange { context_attributes: U32::ZERO, length_blocks, slba }
    }

    /// The blocks, or `None` for a range without any.
    pub fn extent(&self) -> Result<Option<Extent>, RangeError> {
        match u64::from(self.length_blocks.get()) {
            0 => Ok(None),
            blocks => Extent::from_raw(self.slba.get(), blocks).map(Some),
        }
    }
}

impl DatasetManagement {
    /// The largest number of ranges in one command.
    pub const MAX_RANGES: usize = 256;

    /// The deallocation of this many ranges; fails unless there are 1 to 256.
    pub fn deallocate(ranges: usize) -> Result<DatasetManagement, Invalid> {
        let count = u16::try_from(ranges).ok().and_then(Count8::new);
        let ranges = count.ok_or(Invalid::Entries { entries: ranges, max: Self::MAX_RANGES })?;
        Ok(DatasetManagement { ranges, attributes: DsmAttributes::DEALLOCATE })
    }

    /// Bytes of the list: what a target needs, and what a host sends at least. Linux always sends 4096.
    pub fn data_bytes(&self) -> usize {
        usize::from(self.ranges.get()) * DsmRange::BYTES
    }

    /// The ranges of the list. Data behind them is not looked at; too little is refused.
    pub fn parse<'a>(&self, data: &'a [u8]) -> Result<&'a [DsmRange], Invalid> {
        let (needed_bytes, got_bytes) = (self.data_bytes() as u64, data.len() as u64);
        let ranges = <[DsmRange]>::ref_from_prefix_with_elems(data, usize::from(self.ranges.get()));
        ranges.map(|(ranges, _)| ranges).map_err(|_| Invalid::DataLength { needed_bytes, got_bytes })
    }

    pub(super) fn decode(command: &Command) -> DatasetManagement {
        let ranges = Count8::saturating((command.cdw10.get() as u16 & 0xFF) + 1);
        DatasetManagement { ranges, attributes: DsmAttributes::from_bits_retain(command.cdw11.get()) }
    }

    pub(super) fn encode(&self, nsid: u32) -> Result<Command, Invalid> {
        let mut command = Command::new(IoOpcode::DatasetManagement.code(), nsid);
        command.cdw10 = U32::new(u32::from(self.ranges.get() - 1));
        command.cdw11 = U32::new(self.attributes.bits());
        Ok(command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_has_these_bytes() {
        let range = DsmRange::new(Extent::from_raw(0x0102_0304_0506_0708, 0x1112_1314).unwrap());
        assert_eq!(range.as_bytes(), [0, 0, 0, 0, 0x14, 0x13, 0x12, 0x11, 8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(range.extent().unwrap(), Some(Extent::from_raw(0x0102_0304_0506_0708, 0x1112_1314).unwrap()));
    }

    #[test]
    fn a_range_may_be_empty_but_not_wrap() {
        assert_eq!(DsmRange::default().extent(), Ok(None));
        let wraps = DsmRange { length_blocks: U32::new(2), slba: U64::new(u64::MAX), ..DsmRange::default() };
        assert!(matches!(wraps.extent(), Err(RangeError::Wraps { .. })));
    }

    #[test]
    fn a_list_may_be_longer_than_its_ranges_but_not_shorter() {
        let dsm = DatasetManagement::deallocate(3).unwrap();
        assert_eq!(dsm.parse(&[0; 4096]).unwrap().len(), 3);
        assert_eq!(dsm.parse(&[0; 48]).unwrap().len(), 3);
        assert_eq!(dsm.parse(&[0; 47]), Err(Invalid::DataLength { needed_bytes: 48, got_bytes: 47 }));
        assert_eq!(dsm.parse(&[]).unwrap_err().status_code(), crate::StatusCode::DATA_SGL_LENGTH_INVALID);
    }

    #[test]
    fn one_to_256_ranges() {
        assert!(DatasetManagement::deallocate(256).is_ok());
        for ranges in [0, 257, 65_536 + 1] {
            assert_eq!(DatasetManagement::deallocate(ranges), Err(Invalid::Entries { entries: ranges, max: 256 }));
        }
        let command = DatasetManagement::deallocate(256).unwrap().encode(1).unwrap();
        assert_eq!((command.cdw10.get(), command.cdw11.get()), (255, 4));
    }
}
