//! Hosts that make wrong tags: refused with the status of the first field that is wrong, and nothing is written
//! (NVM Command Set, "Protection Information" and "Control of Protection Information Checking").

use anyhow::{Context, Result, ensure};
use sealblock_integrity::{ProtectionType, Tuple};
use sealblock_protocols_nvme::nvm::{BlockCommand, Prchk};
use sealblock_protocols_nvme::{AdminOpcode, Command};
use sealblock_units::Extent;

use super::TestContext;
use crate::formats::{self, FORMATS_NQN, Kind, Maker};
use crate::wire::{Data, Peer, connect, transport};
use crate::writes::{Way, read, verify};

const INVALID_PROTECTION_INFORMATION: u16 = 0x181;
const GUARD: u16 = 0x282;
const APPLICATION_TAG: u16 = 0x283;
const REFERENCE_TAG: u16 = 0x284;
const STORAGE_TAG: u16 = 0x288;
const START: u64 = 20;

/// What is wrong in one block of a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wrong {
    Data,
    Guard,
    ApplicationTag,
    ReferenceTag,
    StorageTag,
}

impl Wrong {
    const ALL: [Wrong; 5] = [Wrong::Data, Wrong::Guard, Wrong::ApplicationTag, Wrong::ReferenceTag, Wrong::StorageTag];

    /// The status that refuses it, in a format that can have it wrong and has it checked.
    fn status(self, kind: &Kind) -> Option<u16> {
        let format = kind.format;
        let counts = format.protection().increments_ref_tag() && format.reference_tag_bits() > 0;
        match self {
            Wrong::Data | Wrong::Guard => Some(GUARD),
            Wrong::ApplicationTag => Some(APPLICATION_TAG),
            Wrong::ReferenceTag => counts.then_some(REFERENCE_TAG),
            Wrong::StorageTag => (format.storage_tag_bits() > 0).then_some(STORAGE_TAG),
        }
    }

    /// Makes a block wrong, in the lowest and highest bits of the field in turns.
    fn spoil(self, kind: &Kind, unit: &mut [u8], high: bool) {
        let (data, tags) = unit.split_at_mut(kind.size.bytes());
        let mut tuple = Tuple::read(kind.format, tags);
        let bit = |bits: u32| if high { 1_u64 << (bits - 1) } else { 1 };
        match self {
            Wrong::Data => data[if high { data.len() - 1 } else { 0 }] ^= 0x10,
            Wrong::Guard => tuple.guard ^= bit(kind.format.guard().bits()),
            Wrong::ApplicationTag => tuple.app_tag ^= bit(15) as u16,
            Wrong::ReferenceTag => tuple.ref_tag ^= bit(u32::from(kind.format.reference_tag_bits())),
            Wrong::StorageTag => tuple.storage_tag ^= bit(u32::from(kind.format.storage_tag_bits())),
        }
        tuple.write(kind.format, tags);
    }

    /// The same command with this check left out.
    fn unchecked(self, mut blocks: BlockCommand) -> BlockCommand {
        let prchk = &mut blocks.protection.prchk;
        match self {
            Wrong::Data | Wrong::Guard => *prchk = Prchk::from_bits(prchk.bits() & !Prchk::GUARD.bits()),
            Wrong::ApplicationTag => *prchk = Prchk::from_bits(prchk.bits() & !Prchk::APPLICATION_TAG.bits()),
            Wrong::ReferenceTag => *prchk = Prchk::from_bits(prchk.bits() & !Prchk::REFERENCE_TAG.bits()),
            Wrong::StorageTag => blocks.protection.stc = false,
        }
        blocks
    }
}

pub(super) fn wrong_tags(scene: &TestContext) -> Result<()> {
    let mut namespaces = 0;
    for &digests in scene.digests() {
        let (mut admin, cntlid) = Peer::admin(scene.address, FORMATS_NQN, 0)?;
        let (mut io, answer) = Peer::connecting(scene.address, digests, connect(FORMATS_NQN, 1, 32, cntlid, 0))?;
        ensure!(answer.status == 0, "Connect: {answer:?}");
        let active = active(&mut admin)?;
        for kind in formats::all().into_iter().filter(|kind| active.contains(&kind.nsid)) {
            for way in Way::all(kind).into_iter().filter(|way| way.maker == Maker::Host) {
                let mut place = Place { way, extent: way.extent(START, 3), io: &mut io };
                place.exercise().with_context(|| format!("{way:?}, digests {digests}"))?;
            }
            verify(&mut io, &kind)?;
            namespaces += 1;
        }
    }
    ensure!(namespaces >= 18 * scene.digests().len(), "only {namespaces} namespaces were there");
    Ok(())
}

/// The namespaces that there are (Identify, CNS 02h).
fn active(admin: &mut Peer) -> Result<Vec<u32>> {
    let mut identify = Command::new(AdminOpcode::Identify.code(), 0);
    identify.cdw10 = 2.into();
    let answer = admin.call(transport(identify, 4096), Data::Read(4096))?;
    ensure!(answer.status == 0, "Identify: {:#x}", answer.status);
    let numbers = answer.data.chunks_exact(4).map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
    Ok(numbers.take_while(|nsid| *nsid > 0).collect())
}

/// Some blocks, and a way to them.
struct Place<'a> {
    way: Way,
    extent: Extent,
    io: &'a mut Peer,
}

impl Place<'_> {
    fn right(&self, version: u64) -> (BlockCommand, Vec<u8>) {
        let kind = self.way.kind;
        (kind.command(version, self.extent, Maker::Host), kind.sent(version, self.extent, Maker::Host))
    }

    fn write(&mut self, (blocks, data): &(BlockCommand, Vec<u8>), wanted: u16, what: &str) -> Result<()> {
        let status = self.way.write(self.io, *blocks, data)?;
        ensure!(status == wanted, "{what}: {status:#x}, not {wanted:#x}");
        Ok(())
    }

    /// The blocks and their tuples are exactly these.
    fn holds(&mut self, data: &[u8], what: &str) -> Result<()> {
        let found = read(self.io, &self.way.kind, self.extent)?;
        ensure!(found == data, "{what}: something else is stored");
        Ok(())
    }

    fn exercise(&mut self) -> Result<()> {
        let (old, new) = (self.right(1), self.right(2));
        self.write(&old, 0, "right tags")?;
        for wrong in Wrong::ALL {
            let Some(status) = wrong.status(&self.way.kind) else { continue };
            for index in [0, self.extent.len() as usize - 1] {
                let mut spoilt = new.clone();
                self.spoil(&mut spoilt.1, index, wrong, index > 0);
                let what = format!("wrong {wrong:?} in block {index}");
                self.write(&spoilt, status, &what)?;
                self.holds(&old.1, &what)?;
                // The twin: not asked for, it is not checked, and what came is what is stored.
                spoilt.0 = wrong.unchecked(spoilt.0);
                self.write(&spoilt, 0, &format!("{what}, unchecked"))?;
                self.holds(&spoilt.1, &what)?;
                self.write(&old, 0, "right tags over wrong ones")?;
            }
        }
        self.write(&new, 0, "right tags again")?;
        self.holds(&new.1, "right tags again")?;
        self.command_of_another_place(new.clone())?;
        self.escaped(new)
    }

    fn spoil(&self, data: &mut [u8], index: usize, wrong: Wrong, high: bool) {
        let kind = self.way.kind;
        let unit = &mut data[index * kind.unit_bytes()..][..kind.unit_bytes()];
        wrong.spoil(&kind, unit, high);
    }

    /// The command itself may not fit the type: Type 1 wants the address, and Type 3 has no reference tag checked, so a
    /// wrong one is stored.
    fn command_of_another_place(&mut self, right: (BlockCommand, Vec<u8>)) -> Result<()> {
        let (kind, mut bad) = (self.way.kind, right.clone());
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
                *prchk = Prchk::from_bits(prchk.bits() | Prchk::REFERENCE_TAG.bits());
                self.write(&bad, INVALID_PROTECTION_INFORMATION, "Type 3 and a check of reference tags")?;
                if kind.format.reference_tag_bits() > 0 {
                    let mut other = right.clone();
                    self.spoil(&mut other.1, 0, Wrong::ReferenceTag, true);
                    self.write(&other, 0, "Type 3 and any reference tag")?;
                    self.holds(&other.1, "Type 3 and any reference tag")?;
                    self.write(&right, 0, "the first reference tag again")?;
                }
            }
        }
        self.holds(&right.1, "a command that does not fit the type")
    }

    /// Tags that switch the checks of their block off, and only of theirs.
    fn escaped(&mut self, right: (BlockCommand, Vec<u8>)) -> Result<()> {
        let kind = self.way.kind;
        let mut escaped = right.clone();
        let unit = &mut escaped.1[..kind.unit_bytes()];
        Wrong::Guard.spoil(&kind, unit, false);
        let mut tuple = Tuple::read(kind.format, &unit[kind.size.bytes()..]);
        tuple.app_tag = 0xFFFF;
        if kind.format.protection() == ProtectionType::Type3 {
            tuple.ref_tag = kind.format.reference_tag_mask();
        }
        tuple.write(kind.format, &mut unit[kind.size.bytes()..]);
        self.write(&escaped, 0, "a block that is not to be checked")?;
        self.holds(&escaped.1, "a block that is not to be checked")?;
        let last = self.extent.len() as usize - 1;
        if last > 0 {
            self.spoil(&mut escaped.1, last, Wrong::Guard, false);
            self.write(&escaped, GUARD, "a wrong guard behind a block that is not to be checked")?;
        }
        self.write(&right, 0, "right tags in the end")
    }
}
