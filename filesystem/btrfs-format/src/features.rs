//! The features of a filesystem: three words of feature bits, and the effect of unknown or unsupported bits.
//!
//! Unknown bits survive decoding and encoding. An unknown `compat` bit has no effect, an unknown `compat_ro` bit
//! forbids writing, an unknown `incompat` bit forbids reading.

use std::fmt;

bitflags::bitflags! {
    /// Features that a program which does not know them may ignore. None is defined.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Compat: u64 {
        const _ = !0;
    }
}

bitflags::bitflags! {
    /// Features that a program must know before it writes.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct CompatRo: u64 {
        /// There is a tree of free space.
        const FREE_SPACE_TREE = 1;
        /// That tree is up to date.
        const FREE_SPACE_TREE_VALID = 1 << 1;
        /// Files may have fs-verity.
        const VERITY = 1 << 2;
        /// Block groups have a tree of their own.
        const BLOCK_GROUP_TREE = 1 << 3;
    }
}

bitflags::bitflags! {
    /// Features that a program must know before it reads.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Incompat: u64 {
        /// References to extents in the format since the first release.
        const MIXED_BACKREF = 1;
        /// The default subvolume is not the first one.
        const DEFAULT_SUBVOL = 1 << 1;
        /// Data and metadata share block groups.
        const MIXED_GROUPS = 1 << 2;
        /// LZO is used.
        const COMPRESS_LZO = 1 << 3;
        /// Zstandard is used.
        const COMPRESS_ZSTD = 1 << 4;
        /// Nodes may be larger than a page of the machine that created them.
        const BIG_METADATA = 1 << 5;
        /// Long back references of inodes.
        const EXTENDED_IREF = 1 << 6;
        /// Block groups with parity.
        const RAID56 = 1 << 7;
        /// References to nodes without their first key and their size.
        const SKINNY_METADATA = 1 << 8;
        /// Holes of files need no item.
        const NO_HOLES = 1 << 9;
        /// Nodes have another UUID than the filesystem's public one.
        const METADATA_UUID = 1 << 10;
        /// Block groups with three or four copies.
        const RAID1C34 = 1 << 11;
        /// For zoned devices.
        const ZONED = 1 << 12;
        /// Experimental: another extent tree.
        const EXTENT_TREE_V2 = 1 << 13;
        /// Experimental: a tree of stripes.
        const RAID_STRIPE_TREE = 1 << 14;
        /// Quota groups that count the creators of extents.
        const SIMPLE_QUOTA = 1 << 16;
        /// Experimental: a tree of remapped block groups.
        const REMAP_TREE = 1 << 17;
        /// No checksums at all, not even of nodes. The bit is this project's own; to other programs it is unknown, so they
        /// refuse the filesystem.
        const NO_CHECKSUMS = 1 << 63;
    }
}

/// The features that this crate can read. Not included: experimental layouts, and zoned devices, which have the
/// superblock in another place.
pub const READABLE: Incompat = Incompat::from_bits_retain(0x1_0fff).union(Incompat::NO_CHECKSUMS);
/// The features that this crate can write.
pub const WRITABLE: Incompat =
    READABLE.difference(Incompat::RAID56).difference(Incompat::ZONED).difference(Incompat::SIMPLE_QUOTA);

/// The three words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Features {
    /// May be ignored.
    pub compat: Compat,
    /// Needed for writing.
    pub compat_ro: CompatRo,
    /// Needed for reading.
    pub incompat: Incompat,
}

/// Why a filesystem cannot be read or written, because of its features.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unsupported {
    /// Unsupported bits that a program must know to read.
    #[error("it uses what this program cannot read: {}", Bits(.0.bits(), name_of_incompat))]
    Reading(Incompat),
    /// Unsupported bits that allow only reading.
    #[error("it uses what this program can read and not write: {}", Bits(.0.bits(), name_of_incompat))]
    Writing(Incompat),
    /// Unsupported bits that a program must know before it writes.
    #[error("it uses what this program can read and not write: {}", Bits(.0.bits(), name_of_compat_ro))]
    WritingRo(CompatRo),
    /// Features that only occur together with others.
    #[error("a tree of block groups without NO_HOLES and a valid tree of free space")]
    BlockGroupTree,
}

impl Features {
    /// Checks that the filesystem can be read.
    ///
    /// # Errors
    /// The bits that prevent it, as an error.
    pub fn check_reading(&self) -> Result<(), Unsupported> {
        let unread = self.incompat.difference(READABLE).difference(Incompat::empty());
        if !unread.is_empty() {
            return Err(Unsupported::Reading(unread));
        }
        let is_whole = self.incompat.contains(Incompat::NO_HOLES)
            && self.compat_ro.contains(CompatRo::FREE_SPACE_TREE | CompatRo::FREE_SPACE_TREE_VALID);
        if self.compat_ro.contains(CompatRo::BLOCK_GROUP_TREE) && !is_whole {
            return Err(Unsupported::BlockGroupTree);
        }
        Ok(())
    }

    /// Checks that the filesystem can be written.
    ///
    /// # Errors
    /// The bits that prevent it, as an error.
    pub fn check_writing(&self) -> Result<(), Unsupported> {
        self.check_reading()?;
        let unwritten = self.incompat.difference(WRITABLE);
        if !unwritten.is_empty() {
            return Err(Unsupported::Writing(unwritten));
        }
        let unknown = CompatRo::from_bits_retain(self.compat_ro.bits() & !CompatRo::all().bits());
        if unknown.is_empty() { Ok(()) } else { Err(Unsupported::WritingRo(unknown)) }
    }
}

/// The bits of a word by name, and by number where they have no name.
struct Bits(u64, fn(u64) -> Option<&'static str>);

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let set = (0..64).filter(|bit| self.0 >> bit & 1 == 1);
        for (index, bit) in set.enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            match (self.1)(1 << bit) {
                Some(name) => write!(f, "{separator}{name}")?,
                None => write!(f, "{separator}bit {bit}")?,
            }
        }
        Ok(())
    }
}

fn name_of_incompat(bit: u64) -> Option<&'static str> {
    Incompat::from_bits_retain(bit).iter_names().next().map(|(name, _)| name)
}

fn name_of_compat_ro(bit: u64) -> Option<&'static str> {
    CompatRo::from_bits_retain(bit).iter_names().next().map(|(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn features(compat_ro: u64, incompat: u64) -> Features {
        Features {
            compat: Compat::from_bits_retain(u64::MAX),
            compat_ro: CompatRo::from_bits_retain(compat_ro),
            incompat: Incompat::from_bits_retain(incompat),
        }
    }

    #[test]
    fn known_features_are_read_and_written_with_any_compat_bits() {
        let usual = features(0b1011, 0x371);
        assert_eq!((usual.check_reading(), usual.check_writing()), (Ok(()), Ok(())));
    }

    #[test]
    fn each_incompat_bit_is_written_or_read_or_refused() {
        for bit in 0..64 {
            let one = features(0, 1 << bit);
            let is_read = matches!(bit, 0..=11 | 16 | 63);
            assert_eq!(one.check_reading().is_ok(), is_read, "{bit}");
            assert_eq!(one.check_writing().is_ok(), is_read && bit != 7 && bit != 16, "{bit}");
        }
    }

    #[test]
    fn unknown_compat_ro_bits_forbid_only_writing() {
        for bit in 4..64 {
            let one = features(1 << bit, 0);
            assert_eq!(one.check_reading(), Ok(()));
            assert_eq!(one.check_writing(), Err(Unsupported::WritingRo(CompatRo::from_bits_retain(1 << bit))));
        }
    }

    #[test]
    fn a_block_group_tree_needs_its_companions() {
        assert_eq!(features(0b1011, 0x200).check_reading(), Ok(()));
        for (compat_ro, incompat) in [(0b1011, 0), (0b1001, 0x200), (0b1010, 0x200)] {
            assert_eq!(features(compat_ro, incompat).check_reading(), Err(Unsupported::BlockGroupTree));
        }
    }

    #[test]
    fn errors_name_bits() {
        let error = features(0, 1 << 13 | 1 << 40).check_reading().unwrap_err();
        assert!(error.to_string().ends_with("EXTENT_TREE_V2, bit 40"), "{error}");
        let error = features(0, 1 << 7).check_writing().unwrap_err();
        assert!(error.to_string().ends_with("RAID56"), "{error}");
        let error = features(1 << 9, 0).check_writing().unwrap_err();
        assert!(error.to_string().ends_with("bit 9"), "{error}");
    }
}
