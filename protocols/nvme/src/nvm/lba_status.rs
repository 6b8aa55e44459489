//! Get LBA Status: which blocks of a range are damaged, or allocated (NVM, "Get LBA Status command").

use sealblock_units::{Extent, Lba};
use zerocopy::little_endian::U32;

use super::blocks::fits;
use crate::command::Command;
use crate::error::Invalid;
use crate::opcodes::AdminOpcode;
use crate::wire::{Field, codes, flags, layout};

codes! {
    /// The requested blocks (NVM, Get LBA Status, field ATYPE).
    pub enum LbaStatusAction: u8 {
        /// Allocated blocks.
        Allocated = 0x02,
        /// Blocks that may be unreadable, after a scan of the range.
        ScanUntracked = 0x10,
        /// Blocks that are known to be unreadable.
        Tracked = 0x11,
    }
}

flags! {
    /// What is known about the blocks of a descriptor (NVM, LBA Status Descriptor Entry, byte 13).
    pub struct LbaStatusFlags(u8) {
        /// Reading any of them may end with Unrecovered Read Error.
        UNRECOVERED_READ = 0,
        /// They were written with Write Uncorrectable.
        WRITE_UNCORRECTABLE = 1,
    }
}

/// A Get LBA Status command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GetLbaStatus {
    /// SLBA: first block of the range.
    pub start: Lba,
    /// MNDW: most bytes to return, a multiple of 4 and at least 4.
    pub max_bytes: u64,
    /// ATYPE: the requested blocks.
    pub action: LbaStatusAction,
    /// RL: blocks of the range; 0 means all to the end of the namespace.
    pub range_blocks: u16,
}

/// One run of blocks in the answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LbaStatusDescriptor {
    /// DSLBA and NLB: the blocks.
    pub extent: Extent,
    /// What is known about them.
    pub flags: LbaStatusFlags,
}

/// The answer: LBA Status Descriptor List.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LbaStatusList {
    /// The runs, ascending.
    pub descriptors: Vec<LbaStatusDescriptor>,
    /// CMPC: whether these are all, as far as the controller says.
    pub complete: bool,
}

layout! {
    /// Head of an LBA Status Descriptor List.
    pub struct ListHead[8] {
        /// NLSD: how many entries follow.
        0 => nlsd: u32,
        /// CMPC: 1h cut short, 2h complete.
        4 => cmpc: u8,
    }
}

layout! {
    /// LBA Status Descriptor Entry.
    pub struct ListEntry[16] {
        /// First block.
        0 => dslba: u64,
        /// Number of blocks, 0's based.
        8 => nlb: u32,
        /// What is known.
        13 => status: LbaStatusFlags,
    }
}

/// CMPC: more entries are there than had room.
const CUT_SHORT: u8 = 1;
/// CMPC: all entries are there.
const COMPLETE: u8 = 2;

impl GetLbaStatus {
    /// The command, or why it is none.
    pub fn decode(command: &Command) -> Result<GetLbaStatus, Invalid> {
        let cdw13 = command.cdw13.get();
        let action = LbaStatusAction::from_code((cdw13 >> 24) as u8);
        Ok(GetLbaStatus {
            start: Lba::new(command.cdw10_11()),
            max_bytes: (u64::from(command.cdw12.get()) + 1) * 4,
            action: action.ok_or(Invalid::field("ATYPE", 13, 24))?,
            range_blocks: cdw13 as u16,
        })
    }

    /// The submission queue entry. `max_bytes` is brought to the nearest legal value below.
    pub fn encode(&self, nsid: u32) -> Command {
        let mut command = Command::new(AdminOpcode::GetLbaStatus.code(), nsid);
        command.set_cdw10_11(self.start.get());
        let dwords = (self.max_bytes / 4).clamp(1, 1 << 32) - 1;
        command.cdw12 = U32::new(dwords as u32);
        command.cdw13 = U32::new(u32::from(self.action.code()) << 24 | u32::from(self.range_blocks));
        command
    }

    /// The requested blocks in a namespace of this size. A range that goes past the end is cut there; one
    /// that starts there is refused.
    pub fn extent(&self, capacity_blocks: u64) -> Result<Extent, Invalid> {
        fits(Extent::one(self.start), capacity_blocks)?;
        let rest = capacity_blocks - self.start.get();
        let blocks = if self.range_blocks == 0 { rest } else { rest.min(u64::from(self.range_blocks)) };
        // An extent has at most 2^32 - 1 blocks; a longer request gets the first part, and the host sends another.
        Ok(Extent::from_raw(self.start.get(), blocks.min(u64::from(u32::MAX)))?)
    }

    /// Bytes of the longest answer: the host's limit, and never more than `most`.
    pub fn answer_bytes(&self, max: usize) -> usize {
        usize::try_from(self.max_bytes).unwrap_or(usize::MAX).min(max)
    }
}

impl LbaStatusList {
    /// The bytes of the list, cut at the last entry that fits in `max_bytes`; then, or if this list is not complete
    /// itself, it says so. Empty if not even the head fits.
    pub fn encode(&self, max_bytes: usize) -> Vec<u8> {
        let Some(room) = max_bytes.checked_sub(ListHead::BYTES) else { return vec![0; max_bytes] };
        let count = self.descriptors.len().min(room / ListEntry::BYTES);
        let complete = self.complete && count == self.descriptors.len();
        let head = ListHead { nlsd: count as u32, cmpc: if complete { COMPLETE } else { CUT_SHORT } };
        let mut bytes = head.encode().to_vec();
        for descriptor in &self.descriptors[..count] {
            let (dslba, nlb) = (descriptor.extent.start().get(), descriptor.extent.blocks().get() - 1);
            bytes.extend(ListEntry { dslba, nlb, status: descriptor.flags }.encode());
        }
        bytes
    }

    /// The list in these bytes. Entries that are announced but not there, or that wrap past the last address, make
    /// it not complete; a head that is not there is refused.
    pub fn decode(bytes: &[u8]) -> Result<LbaStatusList, Invalid> {
        let head = ListHead::decode(bytes)?;
        let announced = usize::try_from(head.nlsd).unwrap_or(usize::MAX);
        let entries = bytes[ListHead::BYTES..].chunks_exact(ListEntry::BYTES).take(announced);
        let descriptors: Vec<_> = entries
            .map(ListEntry::get)
            .filter_map(|entry| {
                let extent = Extent::from_raw(entry.dslba, u64::from(entry.nlb) + 1).ok()?;
                Some(LbaStatusDescriptor { extent, flags: entry.status })
            })
            .collect();
        let complete = head.cmpc == COMPLETE && descriptors.len() == announced;
        Ok(LbaStatusList { descriptors, complete })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(count: u64, complete: bool) -> LbaStatusList {
        let flags = LbaStatusFlags::UNRECOVERED_READ;
        let run = |i| LbaStatusDescriptor { extent: Extent::from_raw(i * 10, i + 1).unwrap(), flags };
        LbaStatusList { descriptors: (0..count).map(run).collect(), complete }
    }

    #[test]
    fn a_list_has_these_bytes() {
        let bytes = list(2, true).encode(4096);
        assert_eq!(bytes.len(), 40);
        assert_eq!(bytes[..8], [2, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(bytes[24..], [10, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0]);
        assert_eq!(LbaStatusList::decode(&bytes), Ok(list(2, true)));
    }

    #[test]
    fn what_does_not_fit_is_cut_and_said() {
        let bytes = list(3, true).encode(8 + 2 * 16 + 15);
        assert_eq!((bytes.len(), bytes[0], bytes[4]), (40, 2, CUT_SHORT));
        assert_eq!(LbaStatusList::decode(&bytes), Ok(list(2, false)));
        assert_eq!(list(0, true).encode(8)[4], COMPLETE);
        assert_eq!(list(1, true).encode(7), [0; 7]);
    }

    #[test]
    fn a_list_that_lies_about_its_length_is_not_complete() {
        let mut bytes = list(2, true).encode(4096);
        bytes[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        let read = LbaStatusList::decode(&bytes).unwrap();
        assert_eq!((read.descriptors.len(), read.complete), (2, false));
        assert!(LbaStatusList::decode(&bytes[..7]).is_err());
        assert!(!LbaStatusList::decode(&bytes[..8]).unwrap().complete);
    }

    #[test]
    fn the_range_is_cut_at_the_end_and_refused_behind_it() {
        let action = LbaStatusAction::ScanUntracked;
        let ask = |start, range_blocks| GetLbaStatus { start: Lba::new(start), max_bytes: 4096, action, range_blocks };
        assert_eq!(ask(10, 0).extent(100).unwrap().len(), 90);
        assert_eq!(ask(10, 5).extent(100).unwrap().len(), 5);
        assert_eq!(ask(98, 5).extent(100).unwrap().len(), 2);
        assert!(matches!(ask(100, 1).extent(100), Err(Invalid::PastEnd { .. })));
        assert_eq!(ask(0, 0).extent(u64::MAX).unwrap().len(), u64::from(u32::MAX));
    }

    #[test]
    fn the_command_round_trips_and_refuses_other_actions() {
        let action = LbaStatusAction::Tracked;
        let ask = GetLbaStatus { start: Lba::new(7), max_bytes: 4096, action, range_blocks: 9 };
        let mut command = ask.encode(1);
        assert_eq!((command.cdw12.get(), command.cdw13.get()), (1023, 0x1100_0009));
        assert_eq!(GetLbaStatus::decode(&command), Ok(ask));
        command.cdw13 = U32::new(0x1200_0000);
        assert_eq!(GetLbaStatus::decode(&command), Err(Invalid::field("ATYPE", 13, 24)));
        command = Command::default();
        command.cdw13 = U32::new(0x1000_0000);
        command.cdw12 = U32::new(u32::MAX);
        assert_eq!(GetLbaStatus::decode(&command).unwrap().max_bytes, 1 << 34);
    }
}
