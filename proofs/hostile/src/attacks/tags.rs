//! Hosts that send wrong tags: each write fails with the status of the first wrong field, and nothing is written (NVM
//! Command Set, "Protection Information" and "Control of Protection Information Checking").

use anyhow::{Context, Result, bail, ensure};
use sealblock_integrity::{ProtectionType, Tuple};
use sealblock_protocols_nvme::nvm::{BlockCommand, Prchk};
use sealblock_protocols_nvme::{AdminOpcode, Command};
use sealblock_units::Extent;

use super::context::TestContext;
use crate::formats::{self, FORMATS_NQN, FormattedNamespace, TagMaker};
use crate::wire::{Data, Peer, connect, transport};
use crate::writes::{WriteMode, read, verify};

const INVALID_PROTECTION_INFORMATION: u16 = 0x181;
const GUARD: u16 = 0x282;
const APPLICATION_TAG: u16 = 0x283;
const REFERENCE_TAG: u16 = 0x284;
const STORAGE_TAG: u16 = 0x288;
const START: u64 = 20;

/// The wrong field in one block of a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WrongField {
    Data,
    Guard,
    ApplicationTag,
    ReferenceTag,
    StorageTag,
}

impl WrongField {
    const ALL: [WrongField; 5] = [
        WrongField::Data,
        WrongField::Guard,
        WrongField::ApplicationTag,
        WrongField::ReferenceTag,
        WrongField::StorageTag,
    ];

    /// The status of a write with this error; `None` if the format has no such field, or does not check it.
    fn status(self, kind: &FormattedNamespace) -> Option<u16> {
        let format = kind.format;
        let counts = format.protection().increments_ref_tag() && format.reference_tag_bits() > 0;
        match self {
            WrongField::Data | WrongField::Guard => Some(GUARD),
            WrongField::ApplicationTag => Some(APPLICATION_TAG),
            WrongField::ReferenceTag => counts.then_some(REFERENCE_TAG),
            WrongField::StorageTag => (format.storage_tag_bits() > 0).then_some(STORAGE_TAG),
        }
    }

    /// Corrupts a block, in the lowest or highest bit of the field.
    fn corrupt(self, kind: &FormattedNamespace, unit: &mut [u8], high: bool) {
        let (data, tags) = unit.split_at_mut(kind.size.bytes());
        let mut tuple = Tuple::read(kind.format, tags);
        let bit = |bits: u32| if high { 1_u64 << (bits - 1) } else { 1 };
        match self {
            WrongField::Data => data[if high { data.len() - 1 } else { 0 }] ^= 0x10,
            WrongField::Guard => tuple.guard ^= bit(kind.format.guard().bits()),
            WrongField::ApplicationTag => tuple.app_tag ^= bit(15) as u16,
            WrongField::ReferenceTag => tuple.ref_tag ^= bit(u32::from(kind.format.reference_tag_bits())),
            WrongField::StorageTag => tuple.storage_tag ^= bit(u32::from(kind.format.storage_tag_bits())),
        }
        tuple.write(kind.format, tags);
    }

    /// Returns the same command without this check.
    fn unchecked(self, mut blocks: BlockCommand) -> BlockCommand {
        let prchk = &mut blocks.protection.prchk;
        match self {
            WrongField::Data | WrongField::Guard => {
                *prchk = Prchk::from_bits_retain(prchk.bits() & !Prchk::GUARD.bits())
            }
            WrongField::ApplicationTag => {
                *prchk = Prchk::from_bits_retain(prchk.bits() & !Prchk::APPLICATION_TAG.bits())
            }
            WrongField::ReferenceTag => *prchk = Prchk::from_bits_retain(prchk.bits() & !Prchk::REFERENCE_TAG.bits()),
            WrongField::StorageTag => blocks.protection.stc = false,
        }
        blocks
    }
}

pub(super) fn wrong_tags(context: &TestContext) -> Result<()> {
    let mut namespaces = 0;
    for &digests in context.digests() {
        let (mut admin, cntlid) = Peer::admin(context.address, FORMATS_NQN, 0)?;
        let (mut io, answer) = Peer::connecting(context.address, digests, connect(FORMATS_NQN, 1, 32, cntlid, 0))?;
        ensure!(answer.status == 0, "Connect: {answer:?}");
        let active = active(&mut admin)?;
        for kind in formats::all().into_iter().filter(|kind| active.contains(&kind.nsid)) {
            for mode in WriteMode::all(kind).into_iter().filter(|mode| mode.maker == TagMaker::Host) {
                let mut place = TagTest { mode, extent: mode.extent(START, 3), io: &mut io };
                place.run().with_context(|| format!("{mode:?}, digests {digests}"))?;
            }
            verify(&mut io, &kind)?;
            namespaces += 1;
        }
    }
    ensure!(namespaces >= 18 * context.digests().len(), "only {namespaces} namespaces were there");
    Ok(())
}

/// The active namespaces (Identify, CNS 02h).
fn active(admin: &mut Peer) -> Result<Vec<u32>> {
    let mut identify = Command::new(AdminOpcode::Identify.code(), 0);
    identify.cdw10 = 2.into();
    let answer = admin.call(transport(identify, 4096), Data::Read(4096))?;
    ensure!(answer.status == 0, "Identify: {:#x}", answer.status);
    let numbers = answer.data.chunks_exact(4).map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
    Ok(numbers.take_while(|nsid| *nsid > 0).collect())
}

/// The tested blocks, and the write mode.
struct TagTest<'a> {
    mode: WriteMode,
    extent: Extent,
    io: &'a mut Peer,
}

impl TagTest<'_> {
    fn correct_write(&self, version: u64) -> (BlockCommand, Vec<u8>) {
        let kind = self.mode.kind;
        (kind.command(version, self.extent, TagMaker::Host), kind.sent(version, self.extent, TagMaker::Host))
    }

    fn write(&mut self, (blocks, data): &(BlockCommand, Vec<u8>), wanted: u16, what: &str) -> Result<()> {
        let status = self.mode.write(self.io, *blocks, data)?;
        ensure!(status == wanted, "{what}: {status:#x}, not {wanted:#x}");
        Ok(())
    }

    /// Checks that exactly these blocks and tuples are stored.
    fn check_stored(&mut self, data: &[u8], what: &str) -> Result<()> {
        let found = read(self.io, &self.mode.kind, self.extent)?;
        ensure!(found == data, "{what}: something else is stored");
        Ok(())
    }

    /// Checks that the blocks cannot be read: in Type 1 the reference tag is the address, whatever tag was written.
    fn check_misdirected(&mut self, what: &str) -> Result<()> {
        let Err(error) = read(self.io, &self.mode.kind, self.extent) else { bail!("{what}: it is read") };
        let wanted = format!("{REFERENCE_TAG:#x}");
        ensure!(error.to_string().ends_with(&wanted), "{what}: {error:#}, not {wanted}");
        Ok(())
    }

    fn run(&mut self) -> Result<()> {
        let (old, new) = (self.correct_write(1), self.correct_write(2));
        self.write(&old, 0, "right tags")?;
        for field in WrongField::ALL {
            let Some(status) = field.status(&self.mode.kind) else { continue };
            for index in [0, self.extent.len() as usize - 1] {
                let mut corrupted = new.clone();
                self.corrupt(&mut corrupted.1, index, field, index > 0);
                let what = format!("wrong {field:?} in block {index}");
                self.write(&corrupted, status, &what)?;
                self.check_stored(&old.1, &what)?;
                // The counterpart: without the check the write succeeds, and stores what was sent.
                corrupted.0 = field.unchecked(corrupted.0);
                self.write(&corrupted, 0, &format!("{what}, unchecked"))?;
                if field == WrongField::ReferenceTag && self.mode.kind.format.protection() == ProtectionType::Type1 {
                    self.check_misdirected(&what)?;
                } else {
                    self.check_stored(&corrupted.1, &what)?;
                }
                self.write(&old, 0, "right tags over wrong ones")?;
            }
        }
        self.write(&new, 0, "right tags again")?;
        self.check_stored(&new.1, "right tags again")?;
        self.test_mismatched_command(new.clone())?;
        self.test_escaped(new)
    }

    fn corrupt(&self, data: &mut [u8], index: usize, field: WrongField, high: bool) {
        let kind = self.mode.kind;
        let unit = &mut data[index * kind.unit_bytes()..][..kind.unit_bytes()];
        field.corrupt(&kind, unit, high);
    }

    /// The command itself may contradict the type: Type 1 requires the address, and Type 3 does not check reference
    /// tags, so a wrong one is stored.
    fn test_mismatched_command(&mut self, right: (BlockCommand, Vec<u8>)) -> Result<()> {
        let (kind, mut bad) = (self.mode.kind, right.clone());
        let (storage, reference) =
            (bad.0.protection.storage_tag(kind.format), bad.0.protection.reference_tag(kind.format));
        match kind.format.protection() {
            ProtectionType::Type1 => {
                bad.0.protection = bad.0.protection.with_tags(kind.format, storage, reference + 1);
                self.write(&bad, INVALID_PROTECTION_INFORMATION, "Type 1 and another address")?;
            }
            ProtectionType::Type2 => {
                bad.0.protection = bad.0.protection.with_tags(kind.format, storage, reference + 1);
                self.write(&bad, REFERENCE_TAG, "Type 2 and another first reference tag")?;
            }
            ProtectionType::Type3 => {
                let prchk = &mut bad.0.protection.prchk;
                *prchk = Prchk::from_bits_retain(prchk.bits() | Prchk::REFERENCE_TAG.bits());
                self.write(&bad, INVALID_PROTECTION_INFORMATION, "Type 3 and a check of reference tags")?;
                if kind.format.reference_tag_bits() > 0 {
                    let mut other = right.clone();
                    self.corrupt(&mut other.1, 0, WrongField::ReferenceTag, true);
                    self.write(&other, 0, "Type 3 and any reference tag")?;
                    self.check_stored(&other.1, "Type 3 and any reference tag")?;
                    self.write(&right, 0, "the first reference tag again")?;
                }
            }
        }
        self.check_stored(&right.1, "a command that does not match the type")
    }

    /// Tags that disable the checks of their own block, and of no other.
    fn test_escaped(&mut self, right: (BlockCommand, Vec<u8>)) -> Result<()> {
        let kind = self.mode.kind;
        let mut escaped = right.clone();
        let unit = &mut escaped.1[..kind.unit_bytes()];
        WrongField::Guard.corrupt(&kind, unit, false);
        let mut tuple = Tuple::read(kind.format, &unit[kind.size.bytes()..]);
        tuple.app_tag = 0xFFFF;
        if kind.format.protection() == ProtectionType::Type3 {
            tuple.ref_tag = kind.format.reference_tag_mask();
        }
        tuple.write(kind.format, &mut unit[kind.size.bytes()..]);
        self.write(&escaped, 0, "a block that is not to be checked")?;
        self.check_stored(&escaped.1, "a block that is not to be checked")?;
        let last = self.extent.len() as usize - 1;
        if last > 0 {
            self.corrupt(&mut escaped.1, last, WrongField::Guard, false);
            self.write(&escaped, GUARD, "a wrong guard behind a block that is not to be checked")?;
        }
        self.write(&right, 0, "right tags in the end")
    }
}
