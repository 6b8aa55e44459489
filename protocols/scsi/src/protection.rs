//! Protection information of SCSI devices: tuples of eight bytes with a CRC-16 as their guard (SBC-4, "Protection information
//! model").

use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_units::Lba;

use crate::cdb::{BlockCommand, ExpectedTags, Protect};

/// The protection information of a logical unit.
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
