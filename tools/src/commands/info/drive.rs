//! How a local drive is accessed, what it reports, and whether tags travel with its ordinary reads and writes.

use sealblock_integrity::PiPosition;
use sealblock_media_linux::{NvmeInfo, PiSource, ScsiInfo, TagMaker, TagProfile};
use sealblock_stack::quantity::count;
use sealblock_stack::{DriveInfo, OrdinaryTags};
use sealblock_units::ByteCount;
use serde_json::{Value, json};

use crate::report::Lines;

pub(super) fn drive_json(drive: &DriveInfo) -> Value {
    let (nvme, is_ordinary) = match drive {
        DriveInfo::Ordinary { why } => return json!({ "passthrough": false, "why": why }),
        DriveInfo::Mapped { drives } => return json!({ "passthrough": true, "drives": drives }),
        DriveInfo::Scsi(info) => return scsi_json(info),
        DriveInfo::Nvme { info, ordinary } => (info, *ordinary),
    };
    let (major, minor, tertiary) = nvme.version;
    json!({
        "passthrough": true,
        "reads_and_writes": if is_ordinary { "block device" } else { "passthrough" },
        "model": nvme.model,
        "serial": nvme.serial,
        "firmware": nvme.firmware,
        "version": format!("{major}.{minor}.{tertiary}"),
        "nsid": nvme.namespace,
        "metadata_bytes": nvme.metadata_bytes,
        "metadata_interleaved": nvme.metadata_interleaved,
        "pi_position": nvme.protection.map(|(_, position)| position_text(position)),
        "tags_made_by": tag_maker(nvme),
        "max_transfer_bytes": nvme.max_transfer_bytes,
        "max_verify_bytes": nvme.max_verify_bytes,
        "max_write_zeroes_bytes": nvme.max_write_zeroes_bytes,
        "kernel_transfer_bytes": nvme.kernel_transfer_bytes,
        "volatile_write_cache": nvme.volatile_write_cache,
        "get_lba_status": nvme.get_lba_status,
        "refused": nvme.refused,
    })
}

pub(super) fn drive_text(lines: &mut Lines, drive: &DriveInfo) {
    let (nvme, is_ordinary) = match drive {
        DriveInfo::Ordinary { why } => return lines.put("not offloaded", why),
        DriveInfo::Mapped { drives } => return lines.put("verified by", drives.join(", ")),
        DriveInfo::Scsi(info) => return scsi_text(lines, info),
        DriveInfo::Nvme { info, ordinary } => (info, *ordinary),
    };
    let (major, minor, tertiary) = nvme.version;
    let NvmeInfo { model, serial, firmware, namespace, .. } = nvme;
    lines.put("drive", format!("{model} {serial} {firmware}, NVMe {major}.{minor}.{tertiary}, namespace {namespace}"));
    let data = if is_ordinary { "; reads and writes like any block device" } else { "" };
    lines.put("reached by", format!("NVMe passthrough{data}"));
    if nvme.metadata_bytes > 0 {
        let place = if nvme.metadata_interleaved { "behind each block" } else { "in a buffer of their own" };
        let tuple = nvme.protection.map_or("", |(_, position)| match position {
            PiPosition::First => ", tags first",
            PiPosition::Last => ", tags last",
        });
        lines.put("metadata", format!("{} {place}{tuple}", count(nvme.metadata_bytes as u64, "byte")));
    }
    if let Some((format, _)) = nvme.protection.filter(|_| nvme.tags == PiSource::Target) {
        lines.put("on the drive", sealblock_stack::protection_text(Some(format)));
    }
    if let Some(maker) = tag_maker(nvme) {
        lines.put("tags made by", format!("the {maker}"));
    }
    let limit = |bytes: Option<u64>| bytes.map_or("any".to_owned(), |bytes| ByteCount::new(bytes).to_string());
    let (transfer, kernel) = (limit(nvme.max_transfer_bytes), nvme.kernel_transfer_bytes);
    let kernel = kernel.map_or(String::new(), |bytes| format!(" (by the kernel {})", ByteCount::new(bytes)));
    let (verify, zeroes) = (limit(nvme.max_verify_bytes), limit(nvme.max_write_zeroes_bytes));
    lines.put("largest", format!("transfer {transfer}{kernel}, verify {verify}, write zeroes {zeroes}"));
    lines.put("write cache", if nvme.volatile_write_cache { "volatile until a flush" } else { "none" });
    for refused in &nvme.refused {
        lines.put("not offloaded", refused);
    }
}

fn scsi_json(scsi: &ScsiInfo) -> Value {
    let (guard, app_tag, ref_tag) = scsi.checks;
    json!({
        "passthrough": true,
        "reads_and_writes": "block device",
        "vendor": scsi.vendor,
        "model": scsi.product,
        "firmware": scsi.revision,
        "serial": scsi.serial,
        "name": scsi.name,
        "pi_type": scsi.protection.map(|(format, _)| format.protection() as u8 + 1),
        "pi_intervals": scsi.protection.map(|(_, exponent)| 1_u32 << exponent),
        "checks": { "guard": guard, "app_tag": app_tag, "ref_tag": ref_tag },
        "tags_made_by": scsi.tags_made_by.map(scsi_tag_maker),
        "verify_command": scsi.verify,
        "max_verify_bytes": scsi.max_verify_bytes,
        "compares_blocks": scsi.compares_blocks,
        "compares_one_block": scsi.compares_one_block,
        "max_compare_and_write_blocks": scsi.max_compare_and_write_blocks,
        "volatile_write_cache": scsi.volatile_write_cache,
        "unmap": scsi.unmap,
        "unmapped_reads_zeroes": scsi.unmapped_reads_zeroes,
        "rotation_rate": scsi.rotation_rate,
        "refused": scsi.refused,
    })
}

fn scsi_text(lines: &mut Lines, scsi: &ScsiInfo) {
    let ScsiInfo { vendor, product, serial, revision, .. } = scsi;
    lines.put("drive", format!("{vendor} {product} {serial} {revision}, SCSI"));
    if let Some(name) = &scsi.name {
        lines.put("name", name);
    }
    if let Some((format, exponent)) = scsi.protection {
        let more = if exponent > 0 { format!(", {} times a block", 1_u32 << exponent) } else { String::new() };
        lines.put("on the drive", format!("{}{more}", sealblock_stack::protection_text(Some(format))));
    }
    if let Some(maker) = scsi.tags_made_by {
        lines.put("tags made by", format!("the {}", scsi_tag_maker(maker)));
    }
    let most = scsi.max_verify_bytes.map_or(String::new(), |bytes| format!(", {} each", ByteCount::new(bytes)));
    lines.put("verified by", scsi.verify.map_or("reading".to_owned(), |command| format!("{command}{most}")));
    lines.put(
        "compared by",
        match (scsi.compares_blocks, scsi.compares_one_block) {
            (true, true) => "the drive, equal blocks with one of them",
            (true, false) => "the drive",
            (false, _) => "reading",
        },
    );
    if scsi.max_compare_and_write_blocks > 0 {
        let blocks = count(u64::from(scsi.max_compare_and_write_blocks), "block");
        lines.put("compared and written", format!("by the drive, {blocks} at once"));
    }
    lines.put(
        "write cache",
        match scsi.volatile_write_cache {
            Some(true) => "volatile until a flush",
            Some(false) => "none",
            None => "not told",
        },
    );
    lines.put(
        "unmapped blocks",
        match (scsi.unmap, scsi.unmapped_reads_zeroes) {
            (false, _) => "none",
            (true, true) => "read as zeroes",
            (true, false) => "read as anything",
        },
    );
    for refused in &scsi.refused {
        lines.put("not offloaded", refused);
    }
}

/// Whether tags of this host travel with ordinary reads and writes.
pub(super) fn tags_json(tags: &OrdinaryTags) -> Value {
    match tags {
        OrdinaryTags::Stay { why } => json!({ "travel": false, "why": why }),
        OrdinaryTags::Travel(TagProfile { name, format: _, metadata_bytes, tuple_at, keeps_app_tags }) => json!({
            "travel": true,
            "profile": name,
            "metadata_bytes": metadata_bytes,
            "tuple_at": tuple_at,
            "keeps_app_tags": keeps_app_tags,
        }),
    }
}

pub(super) fn tags_text(lines: &mut Lines, tags: &OrdinaryTags) {
    match tags {
        OrdinaryTags::Stay { why } => lines.put("tags", format!("not on this host: {why}")),
        OrdinaryTags::Travel(profile) => {
            lines.put("tags", format!("on this host, with ordinary reads and writes ({})", profile.name));
            let (bytes, tuple_at) = (profile.metadata_bytes, profile.tuple_at);
            if bytes > profile.format.tuple_bytes() {
                lines.put("metadata", format!("{}, tags at byte {tuple_at}", count(bytes as u64, "byte")));
            }
            if !profile.keeps_app_tags {
                lines.put("application tags", "the device may change them");
            }
        }
    }
}

const fn scsi_tag_maker(maker: TagMaker) -> &'static str {
    match maker {
        TagMaker::Host => "host",
        TagMaker::Kernel => "kernel",
        TagMaker::Adapter => "host adapter",
        TagMaker::Drive => "drive",
    }
}

fn tag_maker(nvme: &NvmeInfo) -> Option<&'static str> {
    match nvme.tags {
        PiSource::Auto => None,
        PiSource::Host => Some("host"),
        PiSource::Target => Some("drive"),
    }
}

const fn position_text(position: PiPosition) -> &'static str {
    match position {
        PiPosition::First => "first",
        PiPosition::Last => "last",
    }
}
