//! `sealblock fs format`: a new Btrfs filesystem.
//!
//! [`sealblock_btrfs_engine::format`] decides what is written, and `format_write` writes it. Here the options are put
//! together, the targets opened, and the result is printed.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use sealblock_block::Device;
use sealblock_btrfs::devices::{newest_transaction, uuid, why_unprotected};
use sealblock_btrfs::space::{kind_name, profile_name};
use sealblock_btrfs_engine::datasum::Datasum;
use sealblock_btrfs_engine::format::{
    DEFAULT_INCOMPAT, FormatError, FormatOptions, FormattedImage, MAX_FIRST_TRANSACTION, NewDevice, SECTOR_BYTES,
    default_node_bytes, default_profiles, format,
};
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::features::Incompat;
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_stack::identity::new_uuid;
use sealblock_stack::target::TargetName;
use sealblock_stack::{Cause, OpenTarget, Overwriting, StackError, TargetIdentity, on_reactor, overwrite_blocks};
use sealblock_units::ByteCount;
use serde::Serialize;

use super::format_write::write;
use super::info::{checksum_name, features};
use super::place::printable;
use crate::cli::{DatasumChoice, Feature, FsFormat};
use crate::exit::{Exit, note_lacking};
use crate::report::{Lines, note_lost_answers, print_report};

const ACTION: &str = "format";

#[derive(Serialize)]
struct Report {
    label: String,
    uuid: String,
    checksum: &'static str,
    sector_bytes: u32,
    node_bytes: u32,
    total_bytes: u64,
    used_bytes: u64,
    features: Vec<String>,
    devices: Vec<DeviceReport>,
    block_groups: Vec<GroupReport>,
    elapsed_s: f64,
}

#[derive(Serialize)]
struct DeviceReport {
    id: u64,
    target: String,
    uuid: String,
    total_bytes: u64,
    /// In block groups.
    used_bytes: u64,
    discarded_bytes: u64,
}

#[derive(Serialize)]
struct GroupReport {
    kind: &'static str,
    profile: &'static str,
    total_bytes: u64,
    device_bytes: u64,
}

/// Makes it.
pub fn run(arguments: &FsFormat) -> Result<Exit, StackError> {
    check_apart(&arguments.targets)?;
    let options = options(arguments)?;
    let (report, lacks) = on_reactor(async {
        let mut opened = Vec::new();
        let mut result = Ok(());
        for target in &arguments.targets {
            match open(arguments, target).await {
                Ok(one) => opened.push(one),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        let mut result = match result {
            Ok(()) => make(arguments, options, &opened).await,
            Err(error) => Err(error),
        };
        for one in opened {
            result = one.close(result).await;
        }
        result
    })?;
    print_report(arguments.json, &report, || text(&report))?;
    Ok(Exit::Clean.unless_lacking(lacks))
}

/// Refuses targets that have some of the same bytes.
fn check_apart(targets: &[TargetName]) -> Result<(), StackError> {
    let identities: Vec<TargetIdentity> = targets.iter().map(TargetIdentity::of).collect();
    for (at, target) in targets.iter().enumerate() {
        let before = targets[..at].iter().zip(&identities);
        let same =
            before.filter(|(_, other)| identities[at].shared_with(other).is_some()).map(|(other, _)| other).next();
        if let Some(other) = same {
            let why = format!("{target} and {other} are the same device or file, or parts of it");
            return Err(StackError::new(Cause::Usage, ACTION, why).on(target).advise("give different targets"));
        }
    }
    Ok(())
}

async fn open(arguments: &FsFormat, target: &TargetName) -> Result<OpenTarget, StackError> {
    let overwriting = if arguments.force { Overwriting::Anything } else { Overwriting::Free { format: None } };
    let opened = overwrite_blocks(target, overwriting, arguments.members.usage()).await?;
    let refused = |why: String| StackError::new(Cause::Unsuitable, ACTION, why).on(target);
    let block_bytes = opened.device.geometry().block_size.bytes();
    let needs_protection = match (arguments.csum, arguments.datasum) {
        (ChecksumType::None, _) => Some("--csum none"),
        (_, Some(DatasumChoice { datasum: Datasum::Device, .. })) => Some("--datasum device"),
        _ => None,
    };
    let unprotected = needs_protection.and_then(|option| Some((option, why_unprotected(&opened.device)?)));
    let checked = match opened.device.abilities().writable {
        false => Err(refused("it is read-only".to_owned())),
        true if let Some((option, why)) = unprotected => {
            let why = format!("{why}, which {option} needs");
            Err(refused(why).advise("make a protected volume of it: sealblock create"))
        }
        true if block_bytes > SECTOR_BYTES as usize => Err(refused(format!(
            "its blocks have {block_bytes} bytes, more than a sector of the filesystem, {SECTOR_BYTES}"
        ))),
        true => Ok(()),
    };
    match checked {
        Ok(()) => Ok(opened),
        Err(error) => opened.close(Err(error)).await,
    }
}

/// The options of the command line, with defaults and new UUIDs.
fn options(arguments: &FsFormat) -> Result<FormatOptions, StackError> {
    let choice = arguments.datasum;
    let datasum = choice.map(|choice| choice.datasum);
    if (arguments.csum, datasum) == (ChecksumType::None, Some(Datasum::Csum)) {
        let why = "with --csum none there is no tree of checksums for --datasum csum";
        return Err(StackError::new(Cause::Usage, ACTION, why));
    }
    let (default_data, default_metadata) = default_profiles(arguments.targets.len(), arguments.mixed);
    let (data, metadata) = match arguments.mixed {
        true => {
            let given = arguments.data.or(arguments.metadata).unwrap_or(default_data);
            (given, arguments.metadata.unwrap_or(given))
        }
        false => (arguments.data.unwrap_or(default_data), arguments.metadata.unwrap_or(default_metadata)),
    };
    let (mut incompat, mut block_group_tree) = (DEFAULT_INCOMPAT, false);
    incompat.set(Incompat::MIXED_GROUPS, arguments.mixed);
    for change in &arguments.features {
        match change.feature {
            Feature::Incompat(bit) => incompat.set(bit, change.is_on),
            Feature::BlockGroupTree => block_group_tree = change.is_on,
            Feature::FreeSpaceTree => {}
        }
    }
    // A size that is too large for the field is wrong anyway.
    let bytes = |size: ByteCount| u32::try_from(size.get()).unwrap_or(u32::MAX);
    let node_bytes = arguments.node_size.map_or_else(|| default_node_bytes(arguments.mixed), bytes);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(FormatOptions {
        label: arguments.label.clone().into_bytes(),
        fsid: arguments.uuid.map_or_else(new_uuid, Ok)?,
        chunk_tree_uuid: new_uuid()?,
        subvolume_uuid: new_uuid()?,
        time: Timespec { seconds: (now.as_secs() as i64).into(), nanoseconds: now.subsec_nanos().into() },
        sector_bytes: bytes(arguments.sector_size),
        node_bytes,
        checksum: arguments.csum,
        data,
        metadata,
        incompat,
        block_group_tree,
        datasum: datasum.unwrap_or_default(),
        first_transaction: 1,
        is_host_sealed: choice.and_then(|choice| choice.is_host_sealed).unwrap_or(false),
    })
}

/// The number of the first transaction. On devices that keep tags, a block of an earlier filesystem may be left where a write
/// of the new one is lost; its tag must not be that of a transaction of the new one. So the numbers go on where those of
/// the filesystems on the devices end. Of ones that are not there any more nothing is known: then chance decides, so that
/// few of their tags are met again.
async fn first_transaction(opened: &[OpenTarget]) -> Result<u64, StackError> {
    if !opened.iter().any(|one| why_unprotected(&one.device).is_none()) {
        return Ok(1);
    }
    let mut newest = None;
    for one in opened {
        newest = newest.max(newest_transaction(&one.device).await);
    }
    let next = newest.and_then(|newest| newest.checked_add(1)).filter(|next| *next <= MAX_FIRST_TRANSACTION);
    next.map_or_else(drawn_transaction, Ok)
}

fn drawn_transaction() -> Result<u64, StackError> {
    let [a, b, c, d, ..] = new_uuid()?;
    Ok((1 << 16) + u64::from(u32::from_le_bytes([a, b, c, d])))
}

/// Lays it out and writes it. Nothing is written before everything is known to be possible.
async fn make(
    arguments: &FsFormat,
    options: FormatOptions,
    opened: &[OpenTarget],
) -> Result<(Report, bool), StackError> {
    let started = Instant::now();
    let options = &FormatOptions { first_transaction: first_transaction(opened).await?, ..options };
    let mut devices = Vec::new();
    for one in opened {
        devices.push(NewDevice { bytes: one.device.geometry().capacity_bytes(), uuid: new_uuid()? });
    }
    let image = format(options, &devices).map_err(|error| format_error(&error, opened))?;
    opened.iter().for_each(note_lost_answers);
    let discarded = write(&image, opened, !arguments.no_discard).await?;
    let lacks = opened.iter().map(note_lacking).fold(false, |any, lacks| any | lacks);
    let elapsed_s = started.elapsed().as_secs_f64();
    Ok((report(options, &devices, opened, &image, &discarded, elapsed_s), lacks))
}

/// What cannot be made is bad usage, apart from targets that are unsuitable.
fn format_error(error: &FormatError, opened: &[OpenTarget]) -> StackError {
    match error {
        FormatError::DeviceTooSmall { devid, bytes, minimum } => {
            let why = format!("it has {}, and needs at least {}", ByteCount::new(*bytes), ByteCount::new(*minimum));
            let failure = StackError::new(Cause::Unsuitable, ACTION, why);
            let target = opened.get((*devid - 1) as usize).map(OpenTarget::target);
            target.map_or(failure.clone(), |target| failure.on(target)).advise("use a larger target, or --mixed")
        }
        error => StackError::new(Cause::Usage, ACTION, error),
    }
}

fn report(
    options: &FormatOptions,
    devices: &[NewDevice],
    opened: &[OpenTarget],
    image: &FormattedImage,
    discarded: &[u64],
    elapsed_s: f64,
) -> Report {
    let used = |devid: u64| -> u64 {
        let stripes = image.groups.iter().flat_map(|group| group.stripes.iter().map(move |stripe| (group, stripe.0)));
        stripes.filter(|(_, on)| *on == devid).map(|(group, _)| group.stripe_bytes).sum()
    };
    let all = (1..).zip(devices).zip(opened).zip(discarded);
    let devices = all.map(|(((id, device), one), discarded_bytes)| DeviceReport {
        id,
        target: one.target().to_string(),
        uuid: uuid(&device.uuid),
        total_bytes: device.bytes / u64::from(SECTOR_BYTES) * u64::from(SECTOR_BYTES),
        used_bytes: used(id),
        discarded_bytes: *discarded_bytes,
    });
    let groups = image.groups.iter().map(|group| GroupReport {
        kind: kind_name(group.flags),
        profile: group.flags.profile().map_or("unknown", profile_name),
        total_bytes: group.bytes,
        device_bytes: group.stripe_bytes * group.stripes.len() as u64,
    });
    let made = options.features();
    Report {
        label: printable(&options.label),
        uuid: uuid(&options.fsid),
        checksum: checksum_name(options.checksum),
        sector_bytes: options.sector_bytes,
        node_bytes: options.node_bytes,
        total_bytes: image.total_bytes,
        used_bytes: image.bytes_used,
        features: features(made.incompat, made.compat_ro),
        devices: devices.collect(),
        block_groups: groups.collect(),
        elapsed_s,
    }
}

fn text(report: &Report) -> String {
    let mut lines = Lines::new(16);
    let bytes = ByteCount::new;
    lines.put("filesystem", format_args!("Btrfs {:?}, {}", report.label, bytes(report.total_bytes)));
    lines.put("uuid", &report.uuid);
    lines.put("checksums", report.checksum);
    lines.put("sectors, nodes", format_args!("{} and {} bytes", report.sector_bytes, report.node_bytes));
    lines.put("features", report.features.join(" "));
    for device in &report.devices {
        let discarded = match device.discarded_bytes {
            0 => String::new(),
            discarded => format!(", {} discarded", bytes(discarded)),
        };
        let total = bytes(device.total_bytes);
        lines.put(&format!("device {}", device.id), format_args!("{}, {total}{discarded}", device.target));
    }
    for group in &report.block_groups {
        let (total, on) = (bytes(group.total_bytes), bytes(group.device_bytes));
        lines.put("space", format_args!("{} {}: {total}, {on} on devices", group.kind, group.profile));
    }
    lines.into_text()
}
