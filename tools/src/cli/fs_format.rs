//! The command line of `fs format`: the targets of a new filesystem, and how it is made.

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use sealblock_btrfs_engine::datasum::Datasum;
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::features::Incompat;
use sealblock_btrfs_format::items::chunk::Profile;
use sealblock_stack::target::TargetName;
use sealblock_units::ByteCount;

use super::values::{self, Labels, Members, one_of};

const CHECKSUMS: &values::Names<ChecksumType> = &[
    ("crc32c", "32 bits, computed by the processor", ChecksumType::Crc32c),
    ("xxhash64", "64 bits", ChecksumType::XxHash64),
    ("sha256", "256 bits, cryptographic", ChecksumType::Sha256),
    ("blake2b", "256 bits, cryptographic and faster than sha256", ChecksumType::Blake2b),
    (
        "none",
        "None: devices with protection information check all blocks. Only this program reads the filesystem",
        ChecksumType::None,
    ),
];

/// Where checksums of data are kept, and who makes those that devices keep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DatasumChoice {
    /// Where they are kept.
    pub datasum: Datasum,
    /// True if whoever writes makes them, false if the devices do; `None` leaves it as it is. It holds for the whole
    /// filesystem.
    pub is_host_sealed: Option<bool>,
}

/// The choices for a filesystem.
pub(super) const DATASUM_CHOICES: &values::Names<DatasumChoice> = &[
    ("csum", "in the tree of checksums", choice(Datasum::Csum, None)),
    ("device", "with the blocks, by devices with protection information", choice(Datasum::Device, None)),
    (
        "device,host-sealed",
        "the same, made by this host for all such data of the filesystem, and so checked all the way",
        choice(Datasum::Device, Some(true)),
    ),
    ("device,device-sealed", "the same, made by the devices again", choice(Datasum::Device, Some(false))),
];

const fn choice(datasum: Datasum, is_host_sealed: Option<bool>) -> DatasumChoice {
    DatasumChoice { datasum, is_host_sealed }
}

/// Where checksums of data can be kept.
pub(super) const DATASUMS: &values::Names<Datasum> = &[
    ("csum", "in the tree of checksums", Datasum::Csum),
    ("device", "with the blocks, by devices with protection information", Datasum::Device),
];

const PROFILES: [(&str, &str, Profile); 9] = [
    ("single", "One copy", Profile::Single),
    ("dup", "Two copies on one device", Profile::Dup),
    ("raid0", "Striped over all devices", Profile::Raid0),
    ("raid1", "Two copies, on two devices", Profile::Raid1),
    ("raid1c3", "Three copies, on three devices", Profile::Raid1C3),
    ("raid1c4", "Four copies, on four devices", Profile::Raid1C4),
    ("raid10", "Striped over pairs of devices", Profile::Raid10),
    ("raid5", "Refused", Profile::Raid5),
    ("raid6", "Refused", Profile::Raid6),
];

/// Reads a profile. Those with parity are read too, so that they are refused with the reason.
fn profile() -> impl TypedValueParser<Value = Profile> {
    let values = PROFILES.iter().map(|(name, help, profile)| {
        let is_refused = matches!(profile, Profile::Raid5 | Profile::Raid6);
        PossibleValue::new(*name).help(*help).hide(is_refused)
    });
    let find = |name: String| PROFILES.iter().find(|(known, ..)| name.eq_ignore_ascii_case(known));
    PossibleValuesParser::new(values).map(move |name| find(name).expect("the parser lets only these names through").2)
}

/// A feature to be turned on or off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Feature {
    /// A bit that programs must know to read.
    Incompat(Incompat),
    /// Block groups in a tree of their own.
    BlockGroupTree,
    /// The free space tree, which is always made.
    FreeSpaceTree,
}

/// A change of the features: `NAME` turns one on, `^NAME` off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FeatureChange {
    /// Which.
    pub feature: Feature,
    /// On, or off.
    pub is_on: bool,
}

/// Reads a change of the features.
fn feature(text: &str) -> Result<FeatureChange, String> {
    let (name, is_on) = text.strip_prefix('^').map_or((text, true), |name| (name, false));
    let feature = match name {
        "no-holes" => Feature::Incompat(Incompat::NO_HOLES),
        "skinny-metadata" => Feature::Incompat(Incompat::SKINNY_METADATA),
        "extref" => Feature::Incompat(Incompat::EXTENDED_IREF),
        "block-group-tree" => Feature::BlockGroupTree,
        "free-space-tree" if is_on => Feature::FreeSpaceTree,
        "free-space-tree" => return Err("the free space tree is always made: Linux is replacing the cache".to_owned()),
        "big-metadata" => return Err("big-metadata follows from --node-size".to_owned()),
        "mixed-bg" => return Err("use --mixed".to_owned()),
        "raid1c34" => return Err("raid1c34 follows from --data and --metadata".to_owned()),
        _ => {
            let known = "no-holes, skinny-metadata, extref, block-group-tree, free-space-tree";
            return Err(format!("unknown or not supported; possible features: {known}, with ^ to turn one off"));
        }
    };
    Ok(FeatureChange { feature, is_on })
}

/// Arguments of `fs format`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  sealblock fs format disk.img --label backup\n  \
    sealblock fs format /dev/sdb /dev/sdc --data raid1 --csum blake2b\n\n\
    The filesystem is the one that `mkfs.btrfs` makes, and Linux mounts it, except with `--csum none`. Everything on the targets is lost. A target that has a filesystem, a \
    partition table, a volume manager's label or the remains of any of these is refused without --force.\n\n\
    If the command is interrupted, the targets have the old filesystem, none, or the whole new one.")]
pub struct FsFormat {
    /// The devices of the filesystem: block devices, plain files, or any other targets.
    #[arg(value_name = "TARGET", required = true)]
    pub targets: Vec<TargetName>,
    /// A name for the filesystem, of at most 255 bytes.
    #[arg(long, short = 'L', default_value = "", hide_default_value = true)]
    pub label: String,
    /// The UUID of the filesystem. [default: a random one]
    #[arg(long, value_parser = values::uuid)]
    pub uuid: Option<[u8; 16]>,
    /// The checksum of data and metadata.
    #[arg(long, value_name = "TYPE", default_value = "crc32c", value_parser = one_of(CHECKSUMS))]
    pub csum: ChecksumType,
    /// Where the checksums of the data of new files are kept: in the tree of checksums, or by the devices, which must have
    /// protection information. Files can have their own choice (`fs datasum`). [default: csum]
    #[arg(long, value_name = "WHERE", value_parser = one_of(DATASUM_CHOICES))]
    pub datasum: Option<DatasumChoice>,
    /// The size of metadata nodes: 4KiB, 8KiB, 16KiB, 32KiB or 64KiB. [default: 16KiB; 4KiB with --mixed]
    #[arg(long, value_name = "SIZE")]
    pub node_size: Option<ByteCount>,
    /// The size of sectors. Only 4096 is supported, with which every machine can mount the filesystem.
    #[arg(long, value_name = "SIZE", default_value = "4096")]
    pub sector_size: ByteCount,
    /// How data are placed on the devices. [default: single]
    #[arg(long, value_name = "PROFILE", value_parser = profile())]
    pub data: Option<Profile>,
    /// How metadata are placed on the devices. [default: dup on one device, raid1 on several; with --mixed, as --data]
    #[arg(long, value_name = "PROFILE", value_parser = profile())]
    pub metadata: Option<Profile>,
    /// Keep data and metadata in the same block groups: for devices of less than about 1 GiB.
    #[arg(long)]
    pub mixed: bool,
    /// Features to turn on, or off with ^, separated by commas: no-holes, skinny-metadata, extref and free-space-tree are on;
    /// block-group-tree, for large filesystems and Linux 6.1 or later, is off.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = feature)]
    pub features: Vec<FeatureChange>,
    /// Do not discard the devices first.
    #[arg(long)]
    pub no_discard: bool,
    /// Overwrite what the targets have.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// How labels are used.
    #[command(flatten)]
    pub labels: Labels,
    /// Whether a single member may be written.
    #[command(flatten)]
    pub members: Members,
}
