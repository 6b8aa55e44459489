//! `sealblock info`: what a target is.

mod below;
mod drive;

use std::collections::BTreeMap;

use sealblock_block::{Abilities, Ability, Device, Limits, RequestKind, WhyOlder};
use sealblock_integrity::ChecksumKind;
use sealblock_layers_multipath::{PathMonitor, PathStatus};
use sealblock_media_file::punches_beside;
use sealblock_media_nbd::ConnectionInfo as NbdConnectionInfo;
use sealblock_media_nvme_tcp::{ConnectionInfo as NvmeConnectionInfo, PiSource};
use sealblock_media_volume::format::{Container, Layout, MAX_SEGMENTS, Segment};
use sealblock_media_volume::{AnsweredChanges, Standing, SuperblockCopy, VolumeInfo as VolumeDescription};
use sealblock_stack::identity::uuid_text;
use sealblock_stack::quantity::count;
use sealblock_stack::target::TargetName;
use sealblock_stack::{Access, OpenTarget, RAW_FILE, StackError, TargetInfo, on_reactor, open, protection_text};
use sealblock_units::{BlockCount, ByteCount};
use serde_json::{Value, json};

use super::create::protection_json;
use super::mirror::put as mirror_text;
use crate::cli::Info;
use crate::exit::Exit;
use crate::report::{Lines, print_report};
use sealblock_server::status::damage::DamageStatus;
use sealblock_server::status::health::Health;
use sealblock_server::status::mirror::MirrorStatus;

/// Prints what the target is.
pub fn run(arguments: &Info) -> Result<Exit, StackError> {
    on_reactor(async {
        let opened = open(&arguments.target, Access::ReadOlder).await?;
        opened.learn_damage().await;
        let json = as_json(&arguments.target, &opened);
        print_report(arguments.json, &json, || as_text(&arguments.target, &opened))?;
        let exit = known(&opened).unless_older(opened.why_older().is_some());
        opened.close(Ok(exit)).await
    })
}

/// How well a target is by what is known of it: nothing is read for that.
fn known(opened: &OpenTarget) -> Exit {
    // Of mirrors below a part or a group, too: reads of those blocks have as few copies.
    let mirrors = opened.info.all().into_iter().filter_map(|info| info.mirror.as_ref());
    let mirror = mirrors.map(|mirror| MirrorStatus::of(mirror).health()).max().unwrap_or(Health::Healthy);
    let copies = opened.info.lost_metadata().unwritten();
    let metadata = if copies.is_empty() { Health::Healthy } else { Health::Incomplete };
    DamageStatus::of(&opened.info.damage).health().max(mirror).max(metadata).into()
}

/// How operations are carried out, in the order of the text.
const WAYS: [&str; 4] = ["native", "emulated", "absent", "unknown"];

/// The operations of a device. (The reserved area has two, of which it can do both or none.)
const OPERATIONS: [(RequestKind, &str); 13] = [
    (RequestKind::Read, "read"),
    (RequestKind::Write, "write"),
    (RequestKind::Flush, "flush"),
    (RequestKind::Verify, "verify"),
    (RequestKind::Compare, "compare"),
    (RequestKind::CompareAndWrite, "compare_and_write"),
    (RequestKind::WriteZeroes, "write_zeroes"),
    (RequestKind::Discard, "discard"),
    (RequestKind::Copy, "copy"),
    (RequestKind::WriteUncorrectable, "write_uncorrectable"),
    (RequestKind::Repair, "repair"),
    (RequestKind::BlockStatus, "block_status"),
    (RequestKind::ReadReserved, "reserved_area"),
];

/// What the device does with each operation, also with those that change blocks: it is open for reading here. Checksums of each kind
/// are listed apart.
fn abilities(opened: &OpenTarget) -> impl Iterator<Item = (&'static str, &'static str)> {
    let of = Abilities { writable: true, ..opened.device.abilities() };
    let is_unknown = of.get(RequestKind::Discard) == Ability::Absent && hides_discard(&opened.info);
    let way = move |kind, ability| match kind {
        RequestKind::Discard if is_unknown => "unknown",
        _ => way_text(ability),
    };
    let checksums =
        ChecksumKind::ALL.into_iter().map(move |kind| (checksum_name(kind), way_text(of.of_checksum(kind))));
    OPERATIONS.into_iter().map(move |(kind, name)| (name, way(kind, of.of(kind)))).chain(checksums)
}

/// True if it lies in a plain file of which nobody can find out whether it gives space back, without opening it for writing.
fn hides_discard(info: &TargetInfo) -> bool {
    let files = info.all().into_iter().filter(|info| info.kind == RAW_FILE).filter_map(|info| info.file.as_ref());
    files.map(|file| punches_beside(&file.path)).any(|known| known.is_none())
}

const fn checksum_name(kind: ChecksumKind) -> &'static str {
    match kind {
        ChecksumKind::Crc64Nvme => "checksum",
        ChecksumKind::Crc32c => "checksum_crc32c",
    }
}

const fn way_text(ability: Ability) -> &'static str {
    match ability {
        Ability::Native => "native",
        Ability::Emulated => "emulated",
        Ability::Absent => "absent",
    }
}

fn as_json(target: &TargetName, opened: &OpenTarget) -> Value {
    let geometry = opened.device.geometry();
    let of = opened.device.abilities();
    let protection = geometry.protection.map(protection_json);
    let mut object = json!({
        "target": target.to_string(),
        "block_size": geometry.block_size.bytes(),
        "blocks": geometry.capacity_blocks,
        "bytes": geometry.capacity_bytes(),
        "protection": protection,
        "limits": {
            "transfer_blocks": geometry.limits.max_transfer_blocks.get(),
            "verify_blocks": geometry.limits.max_verify_blocks.get(),
            "zero_blocks": geometry.limits.max_zero_blocks.get(),
        },
        "abilities": abilities(opened).collect::<BTreeMap<_, _>>(),
        "damage": DamageStatus::of(&opened.info.damage),
        "unmap_zeroes": of.unmap_zeroes,
        "offloads": of.offloads,
        "may_be_older": of.freshness.why_older().map(WhyOlder::as_str),
        "unflushed_lost": opened.lost_answers(),
        "runtime": sealblock_runtime_reactor::backend().to_string(),
    });
    if let (Value::Object(object), Value::Object(info)) = (&mut object, info_json(&opened.info)) {
        object.extend(info);
    }
    object
}

fn info_json(info: &TargetInfo) -> Value {
    json!({
        "kind": info.kind,
        "volume": info.volume.as_ref().map(|volume| json!({
            "uuid": uuid_text(&volume.uuid),
            "clean": volume.is_clean,
            "recovered_records": volume.recovered,
            "discarded_records": volume.dropped,
            "unreadable_blocks": volume.unreadable.iter().map(|lba| lba.get()).collect::<Vec<_>>(),
            "lost_log_sectors": volume.log_lost,
            "sector_bytes": volume.layout.sector_bytes(),
            "log_bytes": volume.layout.log_bytes() * shards(volume),
            "block_groups": volume.layout.block_groups() * shards(volume),
            "created_bytes": created_bytes(volume),
            "segments": volume.container.is_none().then(|| segments_json(&volume.layout)),
            "medium_bytes": volume.container.map_or(volume.layout.medium_bytes(), |all| all.medium_bytes()),
            "shards": volume.container.as_ref().map(shards_json),
            "unflushed_lost": unflushed_lost(volume),
            "lost_metadata_copies": volume.lost_copies.count(),
            "maybe_cut_off_metadata_copies": volume.lost_copies.maybe_cut_off(),
            "foreign_records": foreign_json(volume),
            "identity": volume.standing.as_str(),
            "superblock_copies": superblocks_json(&volume.superblocks),
        })),
        "file": info.file.as_ref().map(|file| json!({
            "path": file.path.to_string_lossy(),
            "block_device": file.is_block_device,
            "direct": file.is_direct,
            "locked": file.is_locked,
            "sector_bytes": file.sector_bytes,
            "bytes": file.length_bytes,
            "allocated_bytes": file.allocated_bytes,
            "file_system": file.file_system,
            "lies_on": below::as_json(&file.path),
        })),
        "drive": info.drive.as_ref().map(drive::drive_json),
        "ordinary_tags": info.tags.as_ref().map(drive::tags_json),
        "remote": info.remote.as_ref().map(remote_json),
        "export": info.export.as_ref().map(export_json),
        "paths": info.paths.as_ref().map(|paths| paths.paths().iter().map(path_json).collect::<Vec<_>>()),
        "mirror": info.mirror.as_ref().map(|mirror| MirrorStatus::of(mirror)),
        "inner": info.inner.first().filter(|_| !info.is_group()).map(info_json),
        "members": info.is_group().then(|| info.inner.iter().map(info_json).collect::<Vec<_>>()),
    })
}

/// Number of shards, 1 for a volume that is not in shards.
fn shards(volume: &VolumeDescription) -> u64 {
    volume.container.map_or(1, |all| u64::from(all.shards()))
}

fn created_bytes(volume: &VolumeDescription) -> u64 {
    let blocks = volume.container.map_or(volume.layout.created_blocks(), |all| all.capacity_blocks());
    blocks << volume.layout.block_size().shift()
}

/// The shards of a volume, and how blocks are dealt to them.
fn shards_json(container: &Container) -> Value {
    let windows = (0..container.shards()).map(|shard| container.window(shard));
    json!({
        "count": container.shards(),
        "unit_blocks": container.unit_blocks(),
        "blocks": container.shard_layout().capacity_blocks(),
        "windows": windows.map(|at| json!({ "offset": at.offset, "bytes": at.length })).collect::<Vec<_>>(),
    })
}

/// Where the blocks lie: one part for a volume that lies as a new one does.
fn segments_json(layout: &Layout) -> Value {
    let blocks = |segment: &Segment| segment.blocks.min(layout.capacity_blocks() - segment.first);
    let each = layout.segments().iter().map(|segment| {
        json!({
            "first_block": segment.first,
            "blocks": blocks(segment),
            "room_blocks": segment.blocks,
            "offset": segment.offset,
            "block_groups": segment.groups(),
        })
    });
    each.collect()
}

/// Where records of other volumes lie, and how many.
fn foreign_json(volume: &VolumeDescription) -> Value {
    let places = volume.lost_copies.foreign().into_iter();
    places.map(|(place, records)| json!({ "place": place, "records": records })).collect()
}

/// The copies of a superblock: where each is, and why one is lost.
pub(super) fn superblocks_json(copies: &[SuperblockCopy]) -> Value {
    let state = |copy: &SuperblockCopy| match (copy.is_foreign, &copy.lost) {
        (true, _) => "foreign",
        (false, Some(_)) => "lost",
        (false, None) => "good",
    };
    let each = copies.iter().map(|copy| json!({ "offset": copy.offset_bytes, "state": state(copy), "why": copy.lost }));
    each.collect()
}

fn path_json(path: &PathStatus) -> Value {
    json!({
        "path": path.name,
        "live": path.is_live,
        "requests": path.requests,
        "failures": path.failures,
        "error": path.last_error,
    })
}

fn remote_json(remote: &NvmeConnectionInfo) -> Value {
    let (major, minor, tertiary) = remote.version;
    json!({
        "subsystem": remote.subsystem.as_str(),
        "nsid": remote.namespace,
        "uuid": remote.uuid.as_ref().map(uuid_text),
        "model": remote.model,
        "serial": remote.serial,
        "firmware": remote.firmware,
        "version": format!("{major}.{minor}.{tertiary}"),
        "controller_id": remote.controller_id,
        "queues": remote.queues,
        "queue_depth": remote.queue_depth,
        "header_digest": remote.header_digest,
        "data_digest": remote.data_digest,
        "tags_made_by": tag_maker(remote),
        "max_transfer_bytes": remote.max_transfer_bytes,
        "max_verify_bytes": remote.max_verify_bytes,
        "max_write_zeroes_bytes": remote.max_write_zeroes_bytes,
    })
}

fn export_json(export: &NbdConnectionInfo) -> Value {
    json!({
        "name": export.export,
        "description": export.description,
        "block_bytes": { "smallest": export.sizes.smallest, "best": export.sizes.best, "largest": export.sizes.largest },
        "connections": export.connections,
        "queue_depth": export.queue_depth,
        "flush": export.flush,
        "fua": export.fua,
        "holes": export.allocation,
    })
}

fn tag_maker(remote: &NvmeConnectionInfo) -> Option<&'static str> {
    match remote.tags {
        PiSource::Auto => None,
        PiSource::Host => Some("host"),
        PiSource::Target => Some("target"),
    }
}

fn digests(remote: &NvmeConnectionInfo) -> &'static str {
    match (remote.header_digest, remote.data_digest) {
        (false, false) => "no digests",
        (true, false) => "header digests",
        (false, true) => "data digests",
        (true, true) => "header and data digests",
    }
}

/// What a plain file has behind its last whole block.
fn rest_bytes(opened: &OpenTarget) -> Option<u64> {
    let path = opened.target().path().filter(|_| opened.info.kind == RAW_FILE)?;
    let length = std::fs::metadata(path).ok()?.len();
    length.checked_sub(opened.device.geometry().capacity_bytes()).filter(|rest| *rest > 0)
}

fn as_text(target: &TargetName, opened: &OpenTarget) -> String {
    let geometry = opened.device.geometry();
    let of = opened.device.abilities();
    let mut lines = Lines::new(16);
    lines.put("target", target);
    info_text(&mut lines, &opened.info);
    let blocks = format!("{} of {} bytes", count(geometry.capacity_blocks, "block"), geometry.block_size);
    lines.put("size", format!("{} ({blocks})", ByteCount::new(geometry.capacity_bytes())));
    if let Some(rest) = rest_bytes(opened) {
        lines
            .put("behind them", format!("{}, less than a block: only copy and compare accept it", count(rest, "byte")));
    }
    lines.put("protection", protection_text(geometry.protection));
    if let Some(why) = opened.why_older() {
        lines.put("content", format!("may be older than what was written: {why}"));
    }
    if opened.info.volume.is_none() {
        for reason in opened.lost_answers() {
            lines.put("unflushed", unflushed_text(&reason));
        }
    }
    let damage = DamageStatus::of(&opened.info.damage);
    if damage.has_any() {
        lines.put("damage", damage.to_text());
    }
    if let Some(made) = damage.made_text() {
        lines.put("unreadable", made);
    }
    for device in &damage.not_asked {
        lines.put("damage unknown", device);
    }
    for way in WAYS {
        let names: Vec<String> =
            abilities(opened).filter(|(_, how)| *how == way).map(|(name, _)| name.replace('_', " ")).collect();
        if !names.is_empty() {
            lines.put(way, names.join(", "));
        }
    }
    if of.offloads {
        lines.put("offloaded", "native requests transfer no blocks to this host");
    }
    let Limits { max_transfer_blocks, max_verify_blocks, max_zero_blocks } = geometry.limits;
    let bytes = |blocks: BlockCount| ByteCount::new(blocks.bytes(geometry.block_size));
    let (transfer, verify, zero) = (bytes(max_transfer_blocks), bytes(max_verify_blocks), bytes(max_zero_blocks));
    lines.put("one request", format!("moves up to {transfer}, verifies {verify}, zeroes {zero}"));
    lines.put("unmapped reads", if of.unmap_zeroes { "zeroes" } else { "not promised" });
    lines.put("runtime", sealblock_runtime_reactor::backend());
    lines.into_text()
}

/// Why changes that were answered and not flushed may be lost, if so.
fn unflushed_lost(volume: &VolumeDescription) -> Option<&'static str> {
    match volume.answered {
        AnsweredChanges::MayBeLost(why) => Some(why.as_str()),
        AnsweredChanges::AllDurable | AnsweredChanges::Noted(_) => None,
    }
}

fn unflushed_text(why: &str) -> String {
    format!("completed writes may be lost: {why}; a server tells its hosts")
}

fn volume_text(lines: &mut Lines, volume: &VolumeDescription) {
    lines.put("uuid", uuid_text(&volume.uuid));
    lines.put(
        "state",
        match (volume.is_clean, volume.recovered, volume.dropped) {
            (true, ..) => "closed".to_owned(),
            (false, taken, left) => {
                format!("not closed; {taken} log records, {left} of incomplete writes")
            }
        },
    );
    if let Some(why) = unflushed_lost(volume) {
        lines.put("unflushed", unflushed_text(why));
    }
    losses_text(lines, volume);
    if let Some(container) = &volume.container {
        let (block, layout) = (volume.layout.block_size(), container.shard_layout());
        let bytes = |blocks: u64| ByteCount::new(blocks << block.shift());
        let (each, unit) = (bytes(layout.capacity_blocks()), bytes(container.unit_blocks()));
        lines.put("shards", format!("{} of {each}, in units of {unit}", container.shards()));
    }
    if volume.layout.is_resized() {
        let created = ByteCount::new(volume.layout.created_blocks() << volume.layout.block_size().shift());
        let parts = match volume.layout.segments().len() {
            1 => "one part".to_owned(),
            parts => format!("{parts} of at most {MAX_SEGMENTS} parts"),
        };
        lines.put("resized", format!("created with {created}; in {parts}"));
    }
    let lost: Vec<&SuperblockCopy> = volume.superblocks.iter().filter(|copy| copy.lost.is_some()).collect();
    let all = volume.superblocks.len();
    lines.put("superblocks", format!("{} of {all} good", all - lost.len()));
    for copy in lost {
        let why = copy.lost.as_deref().unwrap_or_default();
        lines.put("", format!("lost at byte {}: {why}; the next open for writing rewrites it", copy.offset_bytes));
    }
}

/// What was found lost beside superblocks.
fn losses_text(lines: &mut Lines, volume: &VolumeDescription) {
    if let Some(first) = volume.unreadable.first() {
        let blocks = volume.unreadable.len();
        lines.put(
            "",
            format!(
                "{} written last are unreadable, the first is block {first}; verify lists them",
                count(blocks as u64, "block")
            ),
        );
    }
    if volume.log_lost > 0 {
        let (sectors, most) = (volume.log_lost, volume.log_lost * volume.layout.log_sector_entries());
        lines.put(
            "log",
            format!("{} lost: up to {most} blocks may have older content; opens read-only", count(sectors, "sector")),
        );
    }
    lost_copies_text(lines, volume);
}

/// Lost copies of metadata, and what repairs them.
fn lost_copies_text(lines: &mut Lines, volume: &VolumeDescription) {
    if volume.standing != Standing::Certain {
        lines.put("identity", "not proven: known only from a superblock; opens read-only");
    }
    for (place, records) in volume.lost_copies.foreign() {
        lines.put("foreign", format!("{} of another volume in {place}", count(records, "record")));
    }
    if volume.lost_copies.count() > 0 {
        let copies = volume.lost_copies.to_text();
        lines.put(
            "metadata",
            format!(
                "lost copies: {copies}; the other copies are used, and a write to the volume repairs the lost ones"
            ),
        );
    }
}

fn remote_text(lines: &mut Lines, remote: &NvmeConnectionInfo) {
    let (major, minor, tertiary) = remote.version;
    lines.put("subsystem", format!("{} namespace {}", remote.subsystem, remote.namespace));
    lines.put(
        "controller",
        format!("{} {} {}, NVMe {major}.{minor}.{tertiary}", remote.model, remote.serial, remote.firmware),
    );
    lines.put(
        "connections",
        format!("{} of {}, {}", remote.queues, count(remote.queue_depth.into(), "command"), digests(remote)),
    );
    if let Some(maker) = tag_maker(remote) {
        lines.put("tags made by", format!("the {maker}"));
    }
}

fn export_text(lines: &mut Lines, export: &NbdConnectionInfo) {
    lines.put("export", format!("{:?} {}", export.export, export.description).trim_end());
    let sizes = export.sizes;
    lines.put("server's blocks", format!("{} to {} bytes, best {}", sizes.smallest, sizes.largest, sizes.best));
    lines.put("connections", format!("{} of {} requests", export.connections, export.queue_depth));
}

fn info_text(lines: &mut Lines, info: &TargetInfo) {
    lines.put("kind", info.kind);
    if let Some(volume) = &info.volume {
        volume_text(lines, volume);
    }
    if let Some(file) = &info.file {
        let way = if file.is_direct { "direct" } else { "through the page cache" };
        let system = file.file_system.as_deref().unwrap_or("block device");
        lines.put("file", format!("{} ({system}, {way}, sectors of {} bytes)", file.path.display(), file.sector_bytes));
        if let Some(bytes) = file.allocated_bytes {
            lines.put("space taken", ByteCount::new(bytes));
        }
        below::as_text(lines, &file.path);
    }
    if let Some(drive) = &info.drive {
        drive::drive_text(lines, drive);
    }
    if let Some(tags) = &info.tags {
        drive::tags_text(lines, tags);
    }
    if let Some(remote) = &info.remote {
        remote_text(lines, remote);
    }
    if let Some(export) = &info.export {
        export_text(lines, export);
    }
    if let Some(mirror) = &info.mirror {
        mirror_text(lines, &MirrorStatus::of(mirror));
    }
    for path in info.paths.iter().flat_map(PathMonitor::paths) {
        let state = match &path.last_error {
            _ if path.is_live => "live".to_owned(),
            Some(error) => format!("not live: {error}"),
            None => "not live".to_owned(),
        };
        lines.put("path", format!("{}: {state}, {} requests, {} failures", path.name, path.requests, path.failures));
    }
    for below in &info.inner {
        lines.put("over", "");
        info_text(lines, below);
    }
}
