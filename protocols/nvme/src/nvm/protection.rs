//! The protection fields of an I/O command: PRINFO, STC and the expected or initial tags.
//!
//! Storage tag and reference tag share one space whose width and division the namespace's format tells: 32 bits for
//! the 16-bit guard (dword 14), 80 for the 32-bit guard (dword 2 bits 15:0, dword 3, dword 14), 48 for the 64-bit guard
//! (dword 3 bits 15:0, dword 14). The storage tag is the more significant part. The space is kept as it came, as one
//! 80-bit number, and divided when the format is known (NVM, "End-to-end Data Protection").
//!
//! One bit is not of the specification: CEB, see [`ProtectionInfo::checks_escapes`].

use sealblock_integrity::{Checks, Masked, PiFormat, ProtectionType, Tags};
use sealblock_units::Lba;
use zerocopy::little_endian::U32;

use crate::command::Command;
use crate::error::Invalid;
use crate::opcodes::IoOpcode;
use crate::wire::{bit, flags};

flags! {
    /// What the controller checks (NVM, field PRCHK: bits 2:0 of PRINFO).
    pub struct Prchk(u8) {
        /// The reference tag.
        REFERENCE_TAG = 0,
        /// The application tag.
        APPLICATION_TAG = 1,
        /// The guard.
        GUARD = 2,
    }
}

/// Storage tag and reference tag in one number of 80 bits, undivided: the storage tag is the more significant part.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TagSpace(u128);

impl TagSpace {
    /// The low 80 bits of `bits`.
    pub const fn from_bits(bits: u128) -> TagSpace {
        TagSpace(bits & ((1 << 80) - 1))
    }

    /// The 80 bits.
    pub const fn bits(self) -> u128 {
        self.0
    }
}

/// The protection fields of a command, as they stand on the wire (NVM, "Protection Information Field").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProtectionInfo {
    /// PRACT: the controller inserts protection information on the way in and strips it on the way out.
    pub pract: bool,
    /// PRCHK: what is checked.
    pub prchk: Prchk,
    /// STC: whether the storage tag is checked.
    pub stc: bool,
    /// Storage tag and reference tag in one.
    pub space: TagSpace,
    /// LBAT or ELBAT: the application tag.
    pub lbat: u16,
    /// LBATM or ELBATM: the bits of the application tag that count.
    pub lbatm: u16,
    /// CEB: blocks whose tuples disable checks are checked, too. Only of Read, Verify and Checksum, and sealblock's own: see
    /// [`crate::extensions::Extensions::ESCAPES`].
    pub checks_escapes: bool,
}

impl ProtectionInfo {
    /// Nothing inserted, nothing checked.
    pub const NONE: ProtectionInfo = ProtectionInfo {
        pract: false,
        prchk: Prchk::NONE,
        stc: false,
        space: TagSpace(0),
        lbat: 0,
        lbatm: 0,
        checks_escapes: false,
    };

    /// The same with these tags, each cut to the bits that the format gives it.
    pub const fn with_tags(mut self, format: PiFormat, storage_tag: u64, reference_tag: u64) -> ProtectionInfo {
        let storage = (storage_tag & format.storage_tag_mask()) as u128;
        let reference = (reference_tag & format.reference_tag_mask()) as u128;
        self.space = TagSpace::from_bits(storage << format.reference_tag_bits() | reference);
        self
    }

    /// LBST or ELBST: the storage tag that this format cuts out of the space; 0 if it has none.
    pub const fn storage_tag(&self, format: PiFormat) -> u64 {
        (self.space.0 >> format.reference_tag_bits()) as u64 & format.storage_tag_mask()
    }

    /// ILBRT or EILBRT: the reference tag of the first block that this format cuts out of the space.
    pub const fn reference_tag(&self, format: PiFormat) -> u64 {
        self.space.0 as u64 & format.reference_tag_mask()
    }

    /// What has to hold for the blocks of the command. `storage_tag_mask` is LBSTM of Identify CNS 05h.
    pub fn checks(&self, format: PiFormat, storage_tag_mask: u64) -> Checks {
        let has_storage_tag = format.storage_tag_bits() > 0;
        let (expected, mask) = (self.storage_tag(format), storage_tag_mask & format.storage_tag_mask());
        Checks {
            guard: self.prchk.contains(Prchk::GUARD),
            app_tag: self
                .prchk
                .contains(Prchk::APPLICATION_TAG)
                .then_some(Masked { expected: self.lbat, mask: self.lbatm }),
            storage_tag: (self.stc && has_storage_tag).then_some(Masked { expected, mask }),
            initial_ref_tag: self.prchk.contains(Prchk::REFERENCE_TAG).then(|| self.reference_tag(format)),
            checks_escapes: self.checks_escapes,
        }
    }

    /// What is put beside the guard when PRACT inserts protection information.
    pub fn tags(&self, format: PiFormat) -> Tags {
        Tags { app_tag: self.lbat, storage_tag: self.storage_tag(format), initial_ref_tag: self.reference_tag(format) }
    }

    /// Whether the fields fit the format: Type 1 wants a checked reference tag to be the low bits of the address, and
    /// Type 3 wants none checked. A namespace without protection information takes anything, for there the fields
    /// mean nothing (NVM, "Protection Information Types"). Only CEB is refused there: its blocks have nothing to check.
    pub fn validate(&self, format: Option<PiFormat>, start: Lba) -> Result<(), Invalid> {
        let Some(format) = format else {
            return if self.checks_escapes { Err(Invalid::field("CEB", 12, CEB_BIT)) } else { Ok(()) };
        };
        if !self.prchk.contains(Prchk::REFERENCE_TAG) {
            return Ok(());
        }
        let (expected, given) = (start.get() & format.reference_tag_mask(), self.reference_tag(format));
        match format.protection() {
            ProtectionType::Type1 if expected != given => Err(Invalid::ReferenceTag { expected, given }),
            ProtectionType::Type1 | ProtectionType::Type2 => Ok(()),
            ProtectionType::Type3 => Err(Invalid::ReferenceCheckInType3),
        }
    }

    /// PRINFO as its four bits: PRACT in bit 3, PRCHK in bits 2:0.
    pub(crate) fn prinfo(&self) -> u32 {
        u32::from(self.pract) << 3 | u32::from(self.prchk.bits() & 7)
    }

    /// PRACT and PRCHK from the four bits of PRINFO.
    pub(crate) fn with_prinfo(mut self, prinfo: u32) -> ProtectionInfo {
        self.pract = bit(prinfo, 3);
        self.prchk = Prchk::from_bits_retain(prinfo as u8 & 7);
        self
    }

    /// The fields of dwords 2, 3, 12, 14 and 15.
    pub(crate) fn decode(command: &Command) -> ProtectionInfo {
        let (cdw12, cdw15) = (command.cdw12.get(), command.cdw15.get());
        let space = u128::from(command.cdw2.get()) << 64
            | u128::from(command.cdw3.get()) << 32
            | u128::from(command.cdw14.get());
        let tags = ProtectionInfo {
            stc: bit(cdw12, 24),
            space: TagSpace::from_bits(space),
            lbat: cdw15 as u16,
            lbatm: (cdw15 >> 16) as u16,
            checks_escapes: bit(cdw12, u32::from(CEB_BIT)) && has_ceb(command.opcode),
            ..ProtectionInfo::NONE
        };
        tags.with_prinfo(cdw12 >> 26)
    }

    /// Puts the fields into dwords 2, 3, 12, 14 and 15.
    pub(crate) fn encode(&self, command: &mut Command) {
        command.cdw2 = U32::new((self.space.0 >> 64) as u32 & 0xFFFF);
        command.cdw3 = U32::new((self.space.0 >> 32) as u32);
        let ceb = self.checks_escapes && has_ceb(command.opcode);
        command.cdw12 |= U32::new(self.prinfo() << 26 | u32::from(ceb) << CEB_BIT | u32::from(self.stc) << 24);
        command.cdw14 = U32::new(self.space.0 as u32);
        command.cdw15 = U32::new(u32::from(self.lbatm) << 16 | u32::from(self.lbat));
    }
}

/// CEB in command dword 12: reserved in Read and Verify, and free in Checksum. In Write Zeroes the same bit is DEAC, which
/// deallocates blocks, so no other command ever gets it from here.
const CEB_BIT: u8 = 25;

/// True if commands with this opcode have the field CEB.
fn has_ceb(opcode: u8) -> bool {
    [IoOpcode::Read, IoOpcode::Verify, IoOpcode::Checksum].iter().any(|with| with.code() == opcode)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_integrity::GuardKind;

    fn format(guard: GuardKind, protection: ProtectionType, bits: u8) -> PiFormat {
        PiFormat::new(guard, protection, bits).unwrap()
    }

    fn dwords(info: ProtectionInfo) -> [u32; 5] {
        let mut command = Command::default();
        info.encode(&mut command);
        assert_eq!(ProtectionInfo::decode(&command), info);
        [command.cdw2, command.cdw3, command.cdw12, command.cdw14, command.cdw15].map(U32::get)
    }

    /// The rows are what libnvme's `nvme_set_var_size_tags` makes of the same tags.
    #[test]
    fn tags_stand_in_the_dwords_that_their_format_gives_them() {
        let (storage, reference) = (0x1122_3344_5566_7788, 0x99AA_BBCC_DDEE_FF00);
        for (guard, bits, expected) in [
            (GuardKind::Crc16, 0, [0, 0, 0xDDEE_FF00]),
            (GuardKind::Crc16, 8, [0, 0, 0x88EE_FF00]),
            (GuardKind::Crc16, 32, [0, 0, 0x5566_7788]),
            (GuardKind::Crc32c, 16, [0x7788, 0x99AA_BBCC, 0xDDEE_FF00]),
            (GuardKind::Crc32c, 32, [0x5566, 0x7788_BBCC, 0xDDEE_FF00]),
            (GuardKind::Crc32c, 64, [0x1122, 0x3344_5566, 0x7788_FF00]),
            (GuardKind::Crc64, 0, [0, 0xBBCC, 0xDDEE_FF00]),
            (GuardKind::Crc64, 8, [0, 0x88CC, 0xDDEE_FF00]),
            (GuardKind::Crc64, 48, [0, 0x3344, 0x5566_7788]),
        ] {
            let format = format(guard, ProtectionType::Type2, bits);
            let info = ProtectionInfo::NONE.with_tags(format, storage, reference);
            let [cdw2, cdw3, _, cdw14, _] = dwords(info);
            assert_eq!([cdw2, cdw3, cdw14], expected, "{guard} {bits}");
            assert_eq!(info.storage_tag(format), storage & format.storage_tag_mask());
            assert_eq!(info.reference_tag(format), reference & format.reference_tag_mask());
        }
    }

    #[test]
    fn prinfo_stands_in_dword_12_and_application_tag_and_mask_in_dword_15() {
        let info = ProtectionInfo {
            pract: true,
            prchk: Prchk::GUARD,
            stc: true,
            lbat: 0x1234,
            lbatm: 0xABCD,
            ..ProtectionInfo::NONE
        };
        assert_eq!(dwords(info), [0, 0, 0x3100_0000, 0, 0xABCD_1234]);
        let info = ProtectionInfo { prchk: Prchk::APPLICATION_TAG | Prchk::REFERENCE_TAG, ..ProtectionInfo::NONE };
        assert_eq!(dwords(info), [0, 0, 0x0C00_0000, 0, 0]);
    }

    #[test]
    fn ceb_stands_in_dword_12_of_commands_that_check_and_nowhere_else() {
        let info = ProtectionInfo { checks_escapes: true, ..ProtectionInfo::NONE };
        for opcode in 0..=255 {
            let mut command = Command::new(opcode, 1);
            info.encode(&mut command);
            let has = [0x02, 0x0C, 0xC0].contains(&opcode);
            assert_eq!(command.cdw12.get(), if has { 0x0200_0000 } else { 0 }, "opcode {opcode:#04x}");
            // DEAC of Write Zeroes, and reserved in the others.
            command.cdw12 = U32::new(0x0200_0000);
            assert_eq!(ProtectionInfo::decode(&command).checks_escapes, has, "opcode {opcode:#04x}");
        }
        let format = format(GuardKind::Crc32c, ProtectionType::Type1, 16);
        assert!(info.checks(format, u64::MAX).checks_escapes);
        assert_eq!(info.validate(Some(format), Lba::ZERO), Ok(()));
        assert_eq!(info.validate(None, Lba::ZERO), Err(Invalid::field("CEB", 12, 25)));
        assert_eq!(ProtectionInfo::NONE.validate(None, Lba::ZERO), Ok(()));
    }

    #[test]
    fn checks_are_what_the_command_asks_for() {
        let format = format(GuardKind::Crc32c, ProtectionType::Type1, 16);
        assert_eq!(ProtectionInfo::NONE.with_tags(format, 9, 9).checks(format, u64::MAX), Checks::NONE);
        let info = ProtectionInfo {
            prchk: Prchk::from_bits_retain(7),
            stc: true,
            lbat: 5,
            lbatm: 0xFF,
            ..ProtectionInfo::NONE.with_tags(format, 7, 11)
        };
        assert_eq!(
            info.checks(format, 0xFF0F),
            Checks {
                guard: true,
                app_tag: Some(Masked { expected: 5, mask: 0xFF }),
                storage_tag: Some(Masked { expected: 7, mask: 0xFF0F }),
                initial_ref_tag: Some(11),
                ..Checks::NONE
            }
        );
        assert_eq!(info.tags(format), Tags { app_tag: 5, storage_tag: 7, initial_ref_tag: 11 });
    }

    #[test]
    fn a_checked_reference_tag_is_the_address_in_type_1_anything_in_type_2_and_refused_in_type_3() {
        let start = Lba::new(0x1_2345_6789);
        let asked = ProtectionInfo { prchk: Prchk::REFERENCE_TAG, ..ProtectionInfo::NONE };
        for (protection, tag, answer) in [
            (ProtectionType::Type1, 0x2345_6789, Ok(())),
            (ProtectionType::Type1, 1, Err(Invalid::ReferenceTag { expected: 0x2345_6789, given: 1 })),
            (ProtectionType::Type2, 1, Ok(())),
            (ProtectionType::Type3, 0x2345_6789, Err(Invalid::ReferenceCheckInType3)),
        ] {
            let format = format(GuardKind::Crc16, protection, 0);
            assert_eq!(asked.with_tags(format, 0, tag).validate(Some(format), start), answer);
            assert_eq!(ProtectionInfo::NONE.with_tags(format, 0, tag).validate(Some(format), start), Ok(()));
            assert_eq!(asked.with_tags(format, 0, tag).validate(None, start), Ok(()));
        }
    }
}
