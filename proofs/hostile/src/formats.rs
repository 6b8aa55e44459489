//! Namespaces with visible protection information, one for each guard, protection type and block size, and their blocks
//! as a host sends them that makes its own tags.

use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, Tuple, guard};
use sealblock_protocols_nvme::nvm::{BlockCommand, Prchk, ProtectionInfo};
use sealblock_units::{BlockSize, Extent};

use fastrand::Rng;

/// The subsystem of these namespaces.
pub const FORMATS_NQN: &str = "nqn.2026-11.org.example:formats";
/// The number of blocks of each.
pub const BLOCKS: u64 = 64;
const GUARDS: [GuardKind; 3] = [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64];

/// One of these namespaces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FormattedNamespace {
    /// Its identifier in the subsystem.
    pub nsid: u32,
    /// The size of its blocks.
    pub size: BlockSize,
    /// The format of its tuples.
    pub format: PiFormat,
    /// True if `sealblock create` can make it; its volumes have the smallest storage tag.
    pub is_for_volumes: bool,
}

/// All of them, by number.
pub fn all() -> Vec<FormattedNamespace> {
    let mut formats = Vec::new();
    for guard in GUARDS {
        for protection in ProtectionType::ALL {
            formats.push((PiFormat::with_default_storage_tag(guard, protection), true));
        }
    }
    for (guard, protection, bits) in [
        (GuardKind::Crc16, ProtectionType::Type1, 8),
        (GuardKind::Crc64, ProtectionType::Type2, 16),
        (GuardKind::Crc64, ProtectionType::Type3, 48),
    ] {
        formats.push((PiFormat::new(guard, protection, bits).expect("a size that the guard allows"), false));
    }
    let sizes = [BlockSize::B4096, BlockSize::B512];
    let kinds = sizes.into_iter().flat_map(|size| formats.iter().map(move |(format, made)| (size, *format, *made)));
    (1..)
        .zip(kinds)
        .map(|(nsid, (size, format, is_for_volumes))| FormattedNamespace { nsid, size, format, is_for_volumes })
        .collect()
}

/// Returns the one with this guard, type and block size, and the smallest storage tag.
pub fn of(guard: GuardKind, protection: ProtectionType, size: BlockSize) -> FormattedNamespace {
    let format = PiFormat::with_default_storage_tag(guard, protection);
    let found = all().into_iter().find(|kind| kind.format == format && kind.size == size);
    found.expect("all guards, types and sizes are there")
}

/// The maker of a write's tags.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TagMaker {
    /// The host: tags are sent with the data (PRACT = 0).
    Host,
    /// The target, from the fields of the command (PRACT = 1).
    Target,
}

impl FormattedNamespace {
    /// Bytes of a block with its tuple.
    pub fn unit_bytes(&self) -> usize {
        self.size.bytes() + self.format.tuple_bytes()
    }

    /// Bytes on the wire of one block of a write.
    pub fn sent_bytes(&self, maker: TagMaker) -> usize {
        match maker {
            TagMaker::Host => self.unit_bytes(),
            TagMaker::Target => self.size.bytes(),
        }
    }

    /// Returns the tags of block `index` of a write of this version from `start` on. Every field depends on the
    /// version, so that a mix of tags from one write and data from another is detected even without a guard check.
    pub fn tags(&self, version: u64, start: u64, index: u64) -> Tuple {
        let first = if self.format.protection() == ProtectionType::Type1 { start } else { 1000 + version };
        let ref_tag = if self.format.protection().increments_ref_tag() { first + index } else { first };
        Tuple {
            guard: 0,
            app_tag: (version % 0xFFF0) as u16,
            storage_tag: version & self.format.storage_tag_mask(),
            ref_tag: ref_tag & self.format.reference_tag_mask(),
        }
    }

    /// Block `index` of a write of this version from `start` on, followed by its tuple.
    pub fn unit(&self, version: u64, start: u64, index: u64) -> Vec<u8> {
        let mut random = Rng::with_seed(version << 20 ^ (start + index));
        let words = self.size.bytes() / 8;
        let mut unit: Vec<u8> = (0..words).flat_map(|_| random.u64(..).to_le_bytes()).collect();
        let tuple = Tuple { guard: guard::compute(self.format.guard(), &unit), ..self.tags(version, start, index) };
        unit.resize(self.unit_bytes(), 0);
        tuple.write(self.format, &mut unit[self.size.bytes()..]);
        unit
    }

    /// Returns the data of a write as it is sent.
    pub fn sent(&self, version: u64, extent: Extent, maker: TagMaker) -> Vec<u8> {
        let start = extent.start().get();
        let unit = |index| {
            let mut unit = self.unit(version, start, index);
            unit.truncate(self.sent_bytes(maker));
            unit
        };
        (0..extent.len()).flat_map(unit).collect()
    }

    /// Returns a command for these blocks with all checks of its protection type.
    pub fn command(&self, version: u64, extent: Extent, maker: TagMaker) -> BlockCommand {
        let first = self.tags(version, extent.start().get(), 0);
        let protection = ProtectionInfo {
            pract: maker == TagMaker::Target,
            prchk: self.checks() | Prchk::APPLICATION_TAG,
            stc: self.format.storage_tag_bits() > 0,
            lbat: first.app_tag,
            lbatm: 0xFFFF,
            ..ProtectionInfo::NONE
        };
        let protection = protection.with_tags(self.format, first.storage_tag, first.ref_tag);
        BlockCommand { protection, ..BlockCommand::new(extent) }
    }

    /// Returns the checks of guard and reference tag; Type 3 commands must not check the reference tag.
    pub fn checks(&self) -> Prchk {
        if self.format.protection().increments_ref_tag() { Prchk::GUARD | Prchk::REFERENCE_TAG } else { Prchk::GUARD }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_namespace_has_a_number_and_a_format_of_its_own() {
        let kinds = all();
        assert_eq!(kinds.len(), 24);
        for (index, kind) in kinds.iter().enumerate() {
            assert_eq!(kind.nsid as usize, index + 1);
            let same = |other: &&FormattedNamespace| (other.size, other.format) == (kind.size, kind.format);
            assert_eq!(kinds.iter().filter(same).count(), 1, "{kind:?}");
        }
    }

    #[test]
    fn versions_differ_in_data_and_in_tags() {
        for kind in all() {
            let (one, other) = (kind.unit(1, 8, 2), kind.unit(2, 8, 2));
            let (data, tags) = one.split_at(kind.size.bytes());
            assert!(data != &other[..data.len()] && tags != &other[data.len()..], "{kind:?}");
            let tuple = Tuple::read(kind.format, tags);
            assert_eq!(tuple.guard, guard::compute(kind.format.guard(), data));
        }
    }
}
