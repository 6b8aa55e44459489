//! The tags of a block device: what sysfs and `FS_IOC_GETLBMD_CAP` report about its integrity profile, and the reasons
//! why they cannot be used.
//!
//! No single source is trusted: the profile's name, its fields and the size of blocks have to agree.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::{fs, io};

use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_runtime_ioctl::block_metadata::{self, BlockMetadata, Checksum};
use sealblock_units::BlockSize;

use crate::node::KernelLimits;

/// The kernel's profiles with tags that this crate supports, by their names in sysfs.
const PROFILES: [(&str, GuardKind, ProtectionType); 6] = [
    ("T10-DIF-TYPE1-CRC", GuardKind::Crc16, ProtectionType::Type1),
    ("T10-DIF-TYPE3-CRC", GuardKind::Crc16, ProtectionType::Type3),
    ("T10-DIF-TYPE1-IP", GuardKind::IpChecksum, ProtectionType::Type1),
    ("T10-DIF-TYPE3-IP", GuardKind::IpChecksum, ProtectionType::Type3),
    ("EXT-DIF-TYPE1-CRC64", GuardKind::Crc64, ProtectionType::Type1),
    ("EXT-DIF-TYPE3-CRC64", GuardKind::Crc64, ProtectionType::Type3),
];
/// Bytes of an application tag.
const APP_TAG_BYTES: u8 = 2;

/// The reason why tags cannot be transferred with the ordinary reads and writes of a block device.
#[derive(Debug, thiserror::Error)]
pub enum WhyNoTags {
    /// The device has no integrity profile.
    #[error("the device has no tags")]
    NoProfile,
    /// It is a partition.
    #[error("it is a partition, whose reference tags the kernel converts to those of its disk; open the disk for them")]
    Partition,
    /// It is made of other devices.
    #[error(
        "it is made of other block devices, to whose reference tags the kernel converts its own; open these for them"
    )]
    MadeOfOthers,
    /// Requests go through the page cache.
    #[error("the kernel does not let its page cache be bypassed, which carries no tags")]
    Cached,
    /// The device makes them during transfers and stores none.
    #[error("the device stores no tags: its host adapter makes them on the way")]
    NotStored,
    /// The kernel does not report what the device carries.
    #[error("the kernel does not say what the device carries ({0}); Linux 6.17 and later do")]
    KernelDoesNotTell(io::Error),
    /// The kernel ignores tags that come with a read.
    #[error(
        "the kernel ignores tags of ordinary reads and writes; Linux 6.14 and later do not, and 6.17 and later say what they are"
    )]
    KernelIgnores,
    /// The kernel accepts them and does not fill them in.
    #[error("the kernel does not fill in the tags of what it reads")]
    NotFilledIn,
    /// There is no io_uring, the only interface for them.
    #[error("only io_uring carries them, which is not available here")]
    NoUring,
    /// The profile is not supported.
    #[error("its integrity profile {0:?} is not supported")]
    Profile(String),
    /// The host adapter cannot be told which guards a program uses.
    #[error("its guards are IP checksums, and the kernel does not tell the host adapter that those of a program are")]
    AdapterTakesCrc,
    /// What the kernel reports contradicts itself, or makes no sense here.
    #[error("its integrity profile is not usable: {0}")]
    Contradiction(String),
    /// A read of its first block failed.
    #[error("its first block cannot be read with tags: {0}")]
    Probe(io::Error),
}

/// The tags of a block device, and where they are in its metadata.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TagProfile {
    /// The kernel's name.
    pub name: String,
    /// The format of a tuple.
    pub format: PiFormat,
    /// Bytes of metadata of each block; those outside the tuple are written as zeroes.
    pub metadata_bytes: usize,
    /// Where the tuple begins in them.
    pub tuple_at: usize,
    /// The device keeps application tags as they are written, and never changes any.
    pub keeps_app_tags: bool,
}

/// The sysfs attributes of a block device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct SysfsView {
    /// The profile's name; empty without one.
    name: String,
    /// The device stores tags.
    is_capable: bool,
    /// Bytes of each tuple that belong to the application.
    app_bytes: u64,
    is_partition: bool,
    is_made_of_others: bool,
    is_scsi: bool,
}

impl SysfsView {
    /// Reads the folder of a block device. A partition has the profile of its disk.
    fn read(folder: &Path) -> SysfsView {
        let is_partition = folder.join("partition").exists();
        let text = |name: &str| fs::read_to_string(folder.join("integrity").join(name)).ok();
        // The folder of a partition is in that of its disk.
        let of_disk = || fs::read_to_string(folder.join("../integrity/format")).ok().filter(|_| is_partition);
        let name = text("format").or_else(of_disk).unwrap_or_default().trim().to_owned();
        let has_members = fs::read_dir(folder.join("slaves")).is_ok_and(|mut entries| entries.next().is_some());
        SysfsView {
            name: if name == "none" { String::new() } else { name },
            is_capable: text("device_is_integrity_capable").is_some_and(|text| text.trim() == "1"),
            app_bytes: text("tag_size").and_then(|text| text.trim().parse().ok()).unwrap_or(0),
            is_partition,
            is_made_of_others: has_members || folder.join("dm").exists() || folder.join("md").exists(),
            is_scsi: folder.join("device/scsi_disk").exists(),
        }
    }
}

/// The folder of an open block device in sysfs, whatever the name of its node.
fn folder_of(device: BorrowedFd<'_>) -> io::Result<PathBuf> {
    let number = rustix::fs::fstat(device)?.st_rdev;
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    Ok(PathBuf::from(format!("/sys/dev/block/{major}:{minor}")))
}

impl TagProfile {
    /// The tags of an open block device with blocks of this size, and the kernel's limits.
    pub(super) fn of_device(
        device: &impl AsFd,
        is_direct: bool,
        size: BlockSize,
    ) -> Result<(TagProfile, KernelLimits), WhyNoTags> {
        let folder = folder_of(device.as_fd()).map_err(WhyNoTags::Probe)?;
        let seen = SysfsView::read(&folder);
        TagProfile::of_sysfs(&seen, is_direct)?;
        let metadata = block_metadata::of(device.as_fd()).map_err(WhyNoTags::KernelDoesNotTell)?;
        let profile = TagProfile::new(&seen, metadata.as_ref(), size)?;
        Ok((profile, KernelLimits::read(&folder.join("queue"))))
    }

    /// The reason why a device has none, as far as sysfs shows it.
    fn of_sysfs(seen: &SysfsView, is_direct: bool) -> Result<(), WhyNoTags> {
        match seen {
            SysfsView { name, .. } if name.is_empty() => Err(WhyNoTags::NoProfile),
            SysfsView { is_partition: true, .. } => Err(WhyNoTags::Partition),
            SysfsView { is_made_of_others: true, .. } => Err(WhyNoTags::MadeOfOthers),
            _ if !is_direct => Err(WhyNoTags::Cached),
            SysfsView { is_capable: false, .. } => Err(WhyNoTags::NotStored),
            _ => Ok(()),
        }
    }

    pub(super) fn new(
        seen: &SysfsView,
        metadata: Option<&BlockMetadata>,
        size: BlockSize,
    ) -> Result<TagProfile, WhyNoTags> {
        let contradiction = |why: String| Err(WhyNoTags::Contradiction(why));
        let Some(metadata) = metadata.filter(|metadata| metadata.has_integrity) else {
            return contradiction("the kernel says that the device carries none".to_owned());
        };
        let Some((_, guard, protection)) = PROFILES.into_iter().find(|(name, ..)| *name == seen.name) else {
            return Err(WhyNoTags::Profile(seen.name.clone()));
        };
        let checksum = match guard {
            GuardKind::IpChecksum => Checksum::Ip,
            GuardKind::Crc16 => Checksum::Crc16,
            GuardKind::Crc64 | GuardKind::Crc32c => Checksum::Crc64,
        };
        let counts = protection.increments_ref_tag();
        if metadata.checksum != checksum || metadata.has_reference_tags != counts {
            return contradiction(format!("{} with {:?} guards", seen.name, metadata.checksum));
        }
        if guard == GuardKind::IpChecksum && seen.is_scsi {
            return Err(WhyNoTags::AdapterTakesCrc);
        }
        if usize::from(metadata.interval_bytes) != size.bytes() {
            return contradiction(format!("a tag for every {} bytes of blocks of {size}", metadata.interval_bytes));
        }
        let format = PiFormat::with_default_storage_tag(guard, protection);
        let (all, tuple, at) = (metadata.metadata_bytes, metadata.tuple_bytes, metadata.tuple_at);
        if usize::from(tuple) != format.tuple_bytes() || u16::from(at) + u16::from(tuple) > u16::from(all) {
            return contradiction(format!("a tuple of {tuple} bytes at byte {at} of {all}"));
        }
        let ref_tag_bytes = if counts { format.reference_tag_bits() / 8 } else { metadata.ref_tag_bytes };
        let fields = (metadata.app_tag_bytes, metadata.ref_tag_bytes, metadata.storage_tag_bytes);
        if fields != (APP_TAG_BYTES, ref_tag_bytes, 0) {
            let (app, reference, storage) = fields;
            return contradiction(format!(
                "application, reference and storage tags of {app}, {reference}, {storage} bytes"
            ));
        }
        Ok(TagProfile {
            name: seen.name.clone(),
            format,
            metadata_bytes: usize::from(all),
            tuple_at: usize::from(at),
            keeps_app_tags: seen.app_bytes >= u64::from(APP_TAG_BYTES),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CRC16: BlockMetadata = BlockMetadata {
        has_integrity: true,
        has_reference_tags: true,
        interval_bytes: 512,
        metadata_bytes: 8,
        tuple_bytes: 8,
        tuple_at: 0,
        checksum: Checksum::Crc16,
        app_tag_bytes: 2,
        ref_tag_bytes: 4,
        storage_tag_bytes: 0,
    };
    const CRC64: BlockMetadata = BlockMetadata {
        metadata_bytes: 64,
        tuple_bytes: 16,
        tuple_at: 48,
        checksum: Checksum::Crc64,
        ref_tag_bytes: 6,
        ..CRC16
    };

    fn seen(name: &str) -> SysfsView {
        SysfsView { name: name.to_owned(), is_capable: true, app_bytes: 2, ..SysfsView::default() }
    }

    fn of(name: &str, metadata: BlockMetadata) -> Result<TagProfile, WhyNoTags> {
        TagProfile::new(&seen(name), Some(&metadata), BlockSize::B512)
    }

    #[test]
    fn each_profile_of_the_kernel_is_a_format() {
        for (name, guard, protection) in PROFILES {
            let counts = protection.increments_ref_tag();
            let metadata = match guard {
                GuardKind::Crc64 => CRC64,
                GuardKind::IpChecksum => BlockMetadata { checksum: Checksum::Ip, ..CRC16 },
                _ => CRC16,
            };
            let ref_tag_bytes = if counts { metadata.ref_tag_bytes } else { 0 };
            let metadata = BlockMetadata { has_reference_tags: counts, ref_tag_bytes, ..metadata };
            let profile = of(name, metadata).unwrap();
            assert_eq!((profile.format.guard(), profile.format.protection()), (guard, protection));
            assert_eq!(profile.metadata_bytes, usize::from(metadata.metadata_bytes));
            assert_eq!((profile.tuple_at, profile.keeps_app_tags), (usize::from(metadata.tuple_at), true));
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let name = "T10-DIF-TYPE1-CRC";
        assert!(of(name, CRC16).is_ok());
        for metadata in [
            CRC64,
            BlockMetadata { has_integrity: false, ..CRC16 },
            BlockMetadata { has_reference_tags: false, ..CRC16 },
            BlockMetadata { interval_bytes: 4096, ..CRC16 },
            BlockMetadata { tuple_at: 1, ..CRC16 },
            BlockMetadata { tuple_bytes: 16, metadata_bytes: 16, ..CRC16 },
            BlockMetadata { tuple_at: 255, metadata_bytes: 255, ..CRC16 },
            BlockMetadata { checksum: Checksum::Other(3), ..CRC16 },
            BlockMetadata { app_tag_bytes: 0, ..CRC16 },
            BlockMetadata { ref_tag_bytes: 6, ..CRC16 },
            BlockMetadata { storage_tag_bytes: 1, ..CRC16 },
        ] {
            assert!(matches!(of(name, metadata), Err(WhyNoTags::Contradiction(_))), "{metadata:?}");
        }
        assert!(matches!(of("nop", CRC16), Err(WhyNoTags::Profile(_))));
        let ip = BlockMetadata { checksum: Checksum::Ip, ..CRC16 };
        assert!(of("T10-DIF-TYPE1-IP", ip).is_ok());
        let adapter = SysfsView { is_scsi: true, ..seen("T10-DIF-TYPE1-IP") };
        let refused = TagProfile::new(&adapter, Some(&ip), BlockSize::B512);
        assert!(matches!(refused, Err(WhyNoTags::AdapterTakesCrc)));
    }

    #[test]
    fn sysfs_tells_whether_a_device_is_a_whole_one_and_stores_tags() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("sda");
        let view = |folder: &Path| TagProfile::of_sysfs(&SysfsView::read(folder), true);
        let put = |path: &str, text: &str| {
            let path = disk.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert!(matches!(view(&disk), Err(WhyNoTags::NoProfile)));
        put("integrity/format", "none\n");
        assert!(matches!(view(&disk), Err(WhyNoTags::NoProfile)));
        put("integrity/format", "T10-DIF-TYPE1-CRC\n");
        put("integrity/tag_size", "2\n");
        put("sda1/partition", "1\n");
        assert!(matches!(view(&disk), Err(WhyNoTags::NotStored)));
        put("integrity/device_is_integrity_capable", "1\n");
        assert!(view(&disk).is_ok());
        assert_eq!(SysfsView::read(&disk), seen("T10-DIF-TYPE1-CRC"));
        assert!(matches!(TagProfile::of_sysfs(&SysfsView::read(&disk), false), Err(WhyNoTags::Cached)));
        assert!(matches!(view(&disk.join("sda1")), Err(WhyNoTags::Partition)));
        put("slaves/sdb", "");
        assert!(matches!(view(&disk), Err(WhyNoTags::MadeOfOthers)));
    }
}
