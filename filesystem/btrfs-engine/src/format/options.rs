//! How a new filesystem is made, and what is refused.

use std::collections::BTreeSet;

use sealblock_btrfs::chunk_map::MapError;
use sealblock_btrfs::devices::MAX_DEVICES;
use sealblock_btrfs::space::profile_name;
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::commit_record::MAX_DEVICES as MAX_TAGGED_DEVICES;
use sealblock_btrfs_format::error::TooLong;
use sealblock_btrfs_format::features::{CompatRo, Features, Incompat};
use sealblock_btrfs_format::free_space::FreeSpaceError;
use sealblock_btrfs_format::items::chunk::Profile;
use sealblock_btrfs_format::items::extent_buf::ExtentRefError;
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_btrfs_format::refusal::Refusal;
use sealblock_btrfs_format::superblock::{MAX_NODE_BYTES, SuperblockError};
use sealblock_btrfs_format::superblock_edit::SysChunkError;

use crate::datasum::Datasum;

/// The largest number of the transaction that writes a new filesystem: so that enough numbers are left.
pub const MAX_FIRST_TRANSACTION: u64 = 1 << 48;
/// The only size of sectors that is written.
pub const SECTOR_BYTES: u32 = 4096;

/// The features that can be chosen. The others follow from these, or from sizes and profiles.
pub const CHOSEN_INCOMPAT: Incompat =
    Incompat::MIXED_GROUPS.union(Incompat::EXTENDED_IREF).union(Incompat::SKINNY_METADATA).union(Incompat::NO_HOLES);
/// The features with which a filesystem is made if nothing else is chosen.
pub const DEFAULT_INCOMPAT: Incompat = CHOSEN_INCOMPAT.difference(Incompat::MIXED_GROUPS);

/// How a filesystem is made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FormatOptions {
    /// A name of at most 255 bytes; empty for none.
    pub label: Vec<u8>,
    /// The UUID of the filesystem.
    pub fsid: [u8; 16],
    /// The UUID of its chunk tree.
    pub chunk_tree_uuid: [u8; 16],
    /// The UUID of the first subvolume.
    pub subvolume_uuid: [u8; 16],
    /// The time of its creation.
    pub time: Timespec,
    /// Bytes of a sector: [`SECTOR_BYTES`].
    pub sector_bytes: u32,
    /// Bytes of a node: a power of two from a sector to 64 KiB.
    pub node_bytes: u32,
    /// How nodes and data are checked. Without checksums, devices with protection information check them, and what is written
    /// must have the tags that it asks for ([`super::DeviceWrite::tag`]).
    pub checksum: ChecksumType,
    /// How data are placed on devices.
    pub data: Profile,
    /// How nodes are placed on devices.
    pub metadata: Profile,
    /// Some of [`CHOSEN_INCOMPAT`].
    pub incompat: Incompat,
    /// True if block groups have a tree of their own, which large filesystems open faster with. Linux knows it since
    /// 6.1.
    pub block_group_tree: bool,
    /// Where the checksums of the data of new files are kept.
    pub datasum: Datasum,
    /// The number of the transaction that writes everything, from 1 to [`MAX_FIRST_TRANSACTION`]. On devices that keep
    /// tags, blocks of an earlier filesystem must not have the tag of a transaction of this one.
    pub first_transaction: u64,
    /// True if the guards of data whose checksums the devices keep are made by who writes, and not by the devices.
    pub is_host_sealed: bool,
}

/// A device of the new filesystem. Devices are numbered from 1, in their order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NewDevice {
    /// Its bytes. Those behind the last whole sector are not used.
    pub bytes: u64,
    /// Its UUID.
    pub uuid: [u8; 16],
}

/// Why a filesystem is not made.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FormatError {
    /// Another size of sectors.
    #[error("sectors of {0} bytes are not supported: only sectors of 4096 bytes can be mounted by every machine")]
    SectorBytes(u32),
    /// A size of nodes that does not exist.
    #[error("nodes of {0} bytes: the size must be a power of two from 4096 to 65536")]
    NodeBytes(u32),
    /// Nodes that mixed block groups cannot have.
    #[error("nodes of {0} bytes in mixed block groups: there, a node has the size of a sector, 4096 bytes")]
    MixedNodeBytes(u32),
    /// A profile that is not written.
    #[error("the profile {} is not supported: an interrupted write can destroy older data in the same stripe", profile_name(*.0))]
    Parity(Profile),
    /// Two profiles for the same block groups.
    #[error(
        "mixed block groups have one profile, not {} for data and {} for metadata",
        profile_name(*.data),
        profile_name(*.metadata)
    )]
    MixedProfiles {
        /// That of data.
        data: Profile,
        /// That of metadata.
        metadata: Profile,
    },
    /// Fewer devices than the profile needs.
    #[error("the profile {} needs at least {needed} devices, not {given}", profile_name(*.profile))]
    TooFewDevices {
        /// The profile.
        profile: Profile,
        /// How many it needs.
        needed: usize,
        /// How many there are.
        given: usize,
    },
    /// More devices than are opened.
    #[error("{0} devices: from 1 to {MAX_DEVICES} are possible")]
    DeviceCount(usize),
    /// More devices than a record of tags has room for.
    #[error(
        "{0} devices that keep the checksums: from 1 to {MAX_TAGGED_DEVICES} are possible, as the superblock lists them"
    )]
    TooManyTagged(usize),
    /// A first transaction that would leave too few numbers, or none.
    #[error("{0} is no number for the first transaction: from 1 to {MAX_FIRST_TRANSACTION} are possible")]
    FirstTransaction(u64),
    /// A device is too small.
    #[error("device {devid} has {bytes} bytes, and needs at least {minimum}")]
    DeviceTooSmall {
        /// Its number.
        devid: u64,
        /// Its bytes.
        bytes: u64,
        /// The bytes that it needs with these profiles.
        minimum: u64,
    },
    /// All devices together are larger than addresses can be.
    #[error("the devices have more than 2^63 bytes together")]
    TooLarge,
    /// Features that cannot be chosen.
    #[error("features that cannot be made: {}", names(*.0))]
    Incompat(Incompat),
    /// A block group tree without what belongs to it.
    #[error("a block group tree needs the feature NO_HOLES")]
    BlockGroupTree,
    /// A label with a zero byte, which ends it.
    #[error("the label has a zero byte")]
    LabelZero,
    /// Something is too long: the label.
    #[error(transparent)]
    TooLong(#[from] TooLong),
    /// A UUID is all zero, which means that there is none.
    #[error("the UUID of the {0} is all zero")]
    NoUuid(&'static str),
    /// Two devices have the same UUID.
    #[error("two devices have the same UUID")]
    SameUuid,
    /// The nodes do not fit into their block group. It is large enough for all devices that are accepted.
    #[error("the first nodes need more room than there is")]
    NoRoom,
    /// A node breaks a rule, which is a fault of this program.
    #[error("{0}")]
    Node(Box<Refusal>),
    /// A superblock breaks a rule, which is a fault of this program.
    #[error(transparent)]
    Superblock(#[from] SuperblockError),
    /// The system chunks do not fit into the superblock.
    #[error(transparent)]
    SysChunk(#[from] SysChunkError),
    /// An extent cannot be counted, which is a fault of this program.
    #[error(transparent)]
    Extent(ExtentRefError),
    /// The free space contradicts itself, which is a fault of this program.
    #[error(transparent)]
    FreeSpace(#[from] FreeSpaceError),
    /// Chunks contradict each other, which is a fault of this program.
    #[error(transparent)]
    Map(#[from] MapError),
}

fn names(incompat: Incompat) -> String {
    let named: Vec<&str> = incompat.iter_names().map(|(name, _)| name).collect();
    if named.is_empty() { format!("bits {:#x}", incompat.bits()) } else { named.join(", ") }
}

/// The profiles of data and metadata that `mkfs.btrfs` chooses: data once; metadata twice, on two devices if there are
/// several. In mixed block groups everything is there once.
pub fn default_profiles(devices: usize, is_mixed: bool) -> (Profile, Profile) {
    let metadata = match (is_mixed, devices) {
        (true, _) => Profile::Single,
        (false, ..2) => Profile::Dup,
        (false, _) => Profile::Raid1,
    };
    (Profile::Single, metadata)
}

/// The size of nodes that `mkfs.btrfs` chooses.
pub fn default_node_bytes(is_mixed: bool) -> u32 {
    if is_mixed { SECTOR_BYTES } else { 16 << 10 }
}

impl FormatOptions {
    /// True if data and metadata share block groups.
    pub fn is_mixed(&self) -> bool {
        self.incompat.contains(Incompat::MIXED_GROUPS)
    }

    /// All features, also those that are not chosen but follow.
    pub fn features(&self) -> Features {
        let mut incompat = self.incompat | Incompat::MIXED_BACKREF;
        incompat.set(Incompat::BIG_METADATA, self.node_bytes > SECTOR_BYTES);
        let has_many = |profile| matches!(profile, Profile::Raid1C3 | Profile::Raid1C4);
        incompat.set(Incompat::NO_CHECKSUMS, self.checksum == ChecksumType::None);
        incompat.set(Incompat::RAID1C34, has_many(self.data) || has_many(self.metadata));
        let mut compat_ro = CompatRo::FREE_SPACE_TREE | CompatRo::FREE_SPACE_TREE_VALID;
        compat_ro.set(CompatRo::BLOCK_GROUP_TREE, self.block_group_tree);
        Features { compat: sealblock_btrfs_format::features::Compat::empty(), compat_ro, incompat }
    }
}

/// Checks everything that does not depend on the sizes of devices.
///
/// # Errors
/// What cannot be made.
pub(super) fn check(options: &FormatOptions, devices: &[NewDevice]) -> Result<(), FormatError> {
    check_options(options)?;
    check_uuids(options, devices)?;
    if devices.is_empty() || devices.len() > MAX_DEVICES {
        return Err(FormatError::DeviceCount(devices.len()));
    }
    let has_tags = options.checksum == ChecksumType::None || options.datasum == Datasum::Device;
    if has_tags && devices.len() > MAX_TAGGED_DEVICES {
        return Err(FormatError::TooManyTagged(devices.len()));
    }
    if !(1..=MAX_FIRST_TRANSACTION).contains(&options.first_transaction) {
        return Err(FormatError::FirstTransaction(options.first_transaction));
    }
    Ok(())
}

fn check_options(options: &FormatOptions) -> Result<(), FormatError> {
    let FormatOptions { sector_bytes, node_bytes, data, metadata, .. } = *options;
    if sector_bytes != SECTOR_BYTES {
        return Err(FormatError::SectorBytes(sector_bytes));
    }
    if !node_bytes.is_power_of_two() || !(SECTOR_BYTES..=MAX_NODE_BYTES).contains(&node_bytes) {
        return Err(FormatError::NodeBytes(node_bytes));
    }
    let unmade = options.incompat.difference(CHOSEN_INCOMPAT);
    if !unmade.is_empty() {
        return Err(FormatError::Incompat(unmade));
    }
    if options.is_mixed() {
        if node_bytes != sector_bytes {
            return Err(FormatError::MixedNodeBytes(node_bytes));
        }
        if data != metadata {
            return Err(FormatError::MixedProfiles { data, metadata });
        }
    }
    if options.block_group_tree && !options.incompat.contains(Incompat::NO_HOLES) {
        return Err(FormatError::BlockGroupTree);
    }
    if options.label.contains(&0) {
        return Err(FormatError::LabelZero);
    }
    match [data, metadata].into_iter().find(|profile| matches!(profile, Profile::Raid5 | Profile::Raid6)) {
        Some(parity) => Err(FormatError::Parity(parity)),
        None => Ok(()),
    }
}

fn check_uuids(options: &FormatOptions, devices: &[NewDevice]) -> Result<(), FormatError> {
    let of_all = [
        ("filesystem", options.fsid),
        ("chunk tree", options.chunk_tree_uuid),
        ("first subvolume", options.subvolume_uuid),
    ];
    let of_devices = devices.iter().map(|device| ("device", device.uuid));
    if let Some((what, _)) = of_all.into_iter().chain(of_devices).find(|(_, uuid)| *uuid == [0; 16]) {
        return Err(FormatError::NoUuid(what));
    }
    let different: BTreeSet<_> = devices.iter().map(|device| device.uuid).collect();
    if different.len() == devices.len() { Ok(()) } else { Err(FormatError::SameUuid) }
}
