//! `sealblock fs info`: what a filesystem is.

use std::collections::BTreeMap;

use sealblock_btrfs::devices::uuid;
use sealblock_btrfs::space::{kind_name, profile_name};
use sealblock_btrfs::subvolumes::Subvolume;
use sealblock_btrfs::verify::why_unchecked;
use sealblock_btrfs::{BadCopy, Filesystem, FsError, OpenOptions, RootSource, RootsFrom};
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::features::{CompatRo, Incompat};
use sealblock_btrfs_format::items::chunk::BlockGroupFlags;
use sealblock_btrfs_format::key::objectid;
use sealblock_server::dates::moment;
use sealblock_stack::StackError;
use sealblock_stack::filesystem::FilesystemName;
use sealblock_units::ByteCount;
use serde::Serialize;

use super::place::{RootReport, older_roots, printable, why_older, with_options};
use crate::cli::FsInfo;
use crate::exit::Exit;
use crate::report::{Lines, note, print_report};

/// A device makes zeroes itself.
const NATIVE: &str = "native";
/// Zeroes are written to a device like other data.
const EMULATED: &str = "emulated";

#[derive(Serialize)]
struct Report {
    target: String,
    label: String,
    uuid: String,
    generation: u64,
    checksum: &'static str,
    sector_bytes: u32,
    node_bytes: u32,
    total_bytes: u64,
    used_bytes: u64,
    features: Vec<String>,
    has_log: bool,
    devices: Vec<DeviceReport>,
    space: Vec<SpaceReport>,
    roots: Vec<RootState>,
    default_subvolume: Option<u64>,
    subvolumes: Vec<SubvolumeReport>,
    /// What is damaged of what was read for this.
    damage: Vec<String>,
    may_be_older: Option<&'static str>,
    /// What could not be read for this, since no device with it is there.
    unread: Vec<String>,
}

#[derive(Serialize)]
struct DeviceReport {
    id: u64,
    uuid: String,
    target: Option<String>,
    total_bytes: u64,
    used_bytes: u64,
    missing: bool,
    stale: bool,
    /// How zeroes get there: made by the device, or transferred. Unknown of a missing device.
    write_zeroes: Option<&'static str>,
}

/// A root that the superblock has, or that was found.
#[derive(Serialize)]
struct RootState {
    tree: &'static str,
    #[serde(flatten)]
    root: RootReport,
    used: bool,
    /// Why it cannot be read; null if it can.
    lost: Option<String>,
}

#[derive(Serialize)]
struct SpaceReport {
    kind: &'static str,
    profile: &'static str,
    total_bytes: u64,
    used_bytes: u64,
    device_bytes: u64,
}

/// A subvolume in JSON.
#[derive(Serialize)]
pub(super) struct SubvolumeReport {
    pub(super) id: u64,
    path: Option<String>,
    uuid: Option<String>,
    snapshot_of: Option<String>,
    received_from: Option<String>,
    read_only: bool,
    being_deleted: bool,
    generation: u64,
    created_s: Option<i64>,
}

/// Says it.
pub fn run(arguments: &FsInfo) -> Result<Exit, StackError> {
    let name = &arguments.filesystem;
    if name.has_place {
        note(&"`fs info` takes a whole filesystem, not a path in it");
    }
    let options = OpenOptions { roots: RootsFrom::Best, ..OpenOptions::default() };
    with_options(name, options, async |open| {
        let may_be_older = why_older(open).map(|older| older.name);
        let report = Report { may_be_older, ..report(name, &open.filesystem).await };
        print_report(arguments.json, &report, || text(&report))?;
        let is_partial =
            report.devices.iter().any(|device| device.missing || device.stale) || !report.unread.is_empty();
        Ok(match (report.damage.is_empty(), is_partial) {
            (false, _) => Exit::DamageFound,
            (true, true) => Exit::Incomplete,
            (true, false) => Exit::Clean,
        })
    })
}

/// What went wrong while a filesystem was read.
#[derive(Default)]
struct Troubles {
    damage: Vec<String>,
    unread: Vec<String>,
}

impl Troubles {
    /// What was wrong when the filesystem was opened.
    fn of_opening(filesystem: &Filesystem) -> Troubles {
        let mut troubles = Troubles::default();
        troubles.damage.extend(older_roots(filesystem));
        filesystem.lost_chunks().iter().for_each(|error| troubles.take(error));
        let superblocks = filesystem.storage().devices.bad_superblocks().iter();
        troubles.damage.extend(superblocks.map(|copy| format!("superblock: {copy}")));
        troubles.damage.extend(filesystem.short_devices().iter().map(ToString::to_string));
        troubles.damage.extend(filesystem.size_contradictions().iter().map(ToString::to_string));
        troubles
    }

    /// Takes an error. What lies only on devices that cannot be looked at is not called damaged.
    fn take(&mut self, error: &FsError) {
        let is_unread = match error {
            FsError::Lost(lost) => lost.copies.iter().all(|copy| why_unchecked(&copy.fault).is_some()),
            _ => false,
        };
        if is_unread { &mut self.unread } else { &mut self.damage }.push(error.to_string());
    }

    /// Takes copies in place of which another one was read. That a device is missing is said of the device.
    fn take_copies(&mut self, copies: &[BadCopy]) {
        let bad = copies.iter().filter(|copy| why_unchecked(&copy.fault).is_none());
        self.damage.extend(bad.map(ToString::to_string));
    }
}

async fn report(name: &FilesystemName, filesystem: &Filesystem) -> Report {
    let (superblock, geometry) = (filesystem.superblock(), filesystem.storage().geometry());
    let mut troubles = Troubles::of_opening(filesystem);
    let (subvolumes, lost) = filesystem.subvolumes().await;
    lost.iter().for_each(|error| troubles.take(error));
    let space = filesystem.space().await.unwrap_or_else(|error| {
        troubles.take(&error);
        Default::default()
    });
    let default_subvolume = match filesystem.default_subvolume().await {
        Ok(id) => Some(id),
        Err(error) => {
            troubles.take(&error);
            None
        }
    };
    let told = subvolume_reports(filesystem, &subvolumes).await;
    troubles.take_copies(&filesystem.take_bad_copies());
    // Older roots may be gone, which is no damage.
    let roots = roots(filesystem).await;
    Report {
        target: name.devices(),
        label: printable(superblock.label()),
        uuid: uuid(&superblock.fsid),
        generation: geometry.generation,
        checksum: checksum_name(geometry.checksum),
        sector_bytes: geometry.sector_bytes,
        node_bytes: geometry.node_bytes,
        total_bytes: superblock.total_bytes.get(),
        used_bytes: superblock.bytes_used.get(),
        features: features(geometry.features.incompat, geometry.features.compat_ro),
        has_log: filesystem.has_log(),
        devices: devices(filesystem),
        space: space
            .into_iter()
            .map(|(bits, space)| {
                let flags = BlockGroupFlags::from_bits_retain(bits);
                SpaceReport {
                    kind: kind_name(flags),
                    profile: flags.profile().map_or("unknown", profile_name),
                    total_bytes: space.total_bytes,
                    used_bytes: space.used_bytes,
                    device_bytes: space.device_bytes,
                }
            })
            .collect(),
        roots,
        default_subvolume,
        subvolumes: told,
        damage: troubles.damage,
        may_be_older: None,
        unread: troubles.unread,
    }
}

pub(super) async fn subvolume_reports(
    filesystem: &Filesystem,
    subvolumes: &BTreeMap<u64, Subvolume>,
) -> Vec<SubvolumeReport> {
    let some = |bytes: &[u8; 16]| Some(uuid(bytes)).filter(|_| bytes != &[0; 16]);
    let mut told = Vec::new();
    for (id, one) in subvolumes {
        let path = match one.is_dead {
            true => None,
            false => filesystem.path_of_subvolume(*id).await.ok(),
        };
        told.push(SubvolumeReport {
            id: *id,
            path: path.map(|path| if path.is_empty() { "/".to_owned() } else { printable(&path) }),
            uuid: some(&one.uuid),
            snapshot_of: some(&one.parent_uuid),
            received_from: some(&one.received_uuid),
            read_only: one.is_read_only,
            being_deleted: one.is_dead,
            generation: one.root.generation,
            created_s: one.created.map(|time| time.seconds.get()),
        });
    }
    told
}

pub(super) fn checksum_name(kind: ChecksumType) -> &'static str {
    match kind {
        ChecksumType::Crc32c => "crc32c",
        ChecksumType::XxHash64 => "xxhash64",
        ChecksumType::Sha256 => "sha256",
        ChecksumType::Blake2b => "blake2b",
        ChecksumType::None => "none",
    }
}

pub(super) fn features(incompat: Incompat, compat_ro: CompatRo) -> Vec<String> {
    let names = incompat.iter_names().map(|(name, _)| name).chain(compat_ro.iter_names().map(|(name, _)| name));
    names.map(str::to_lowercase).collect()
}

/// The roots that there are to begin from, the newest first.
async fn roots(filesystem: &Filesystem) -> Vec<RootState> {
    let (mut states, used) = (Vec::new(), filesystem.roots());
    let trees = [("chunk tree", objectid::CHUNK_TREE, used.chunks), ("root tree", objectid::ROOT_TREE, used.trees)];
    for (tree, id, used) in trees {
        for (chosen, lost) in filesystem.root_candidates(id).await {
            let lost = lost.map(|error| error.to_string());
            states.push(RootState { tree, root: chosen.into(), used: chosen == used, lost });
        }
        if used.source == RootSource::Search {
            states.push(RootState { tree, root: used.into(), used: true, lost: None });
        }
    }
    states
}

fn devices(filesystem: &Filesystem) -> Vec<DeviceReport> {
    let known = filesystem.known_devices().iter();
    known
        .map(|(devid, known)| {
            let here = filesystem.storage().devices.get(*devid);
            DeviceReport {
                id: *devid,
                uuid: uuid(&known.item.uuid),
                target: here.map(|device| device.name.clone()),
                total_bytes: known.item.total_bytes.get(),
                used_bytes: known.item.bytes_used.get(),
                missing: known.is_missing,
                stale: here.is_some_and(|device| device.is_stale),
                write_zeroes: here.map(|device| if device.has_native_zeroes() { NATIVE } else { EMULATED }),
            }
        })
        .collect()
}

fn text(report: &Report) -> String {
    let mut lines = Lines::new(16);
    let bytes = |bytes: u64| ByteCount::new(bytes);
    lines.put("filesystem", format_args!("Btrfs {:?}", report.label));
    lines.put("uuid", &report.uuid);
    lines.put("generation", report.generation);
    lines.put("checksums", report.checksum);
    lines.put("sectors, nodes", format_args!("{} and {} bytes", report.sector_bytes, report.node_bytes));
    lines.put("size, used", format_args!("{}, {}", bytes(report.total_bytes), bytes(report.used_bytes)));
    lines.put("features", report.features.join(" "));
    if report.has_log {
        lines.put("log", "not replayed");
    }
    for RootState { tree, root, used, lost } in &report.roots {
        let state = match (used, lost) {
            (true, None) => ", used",
            (_, Some(_)) => ", lost",
            (false, None) => "",
        };
        lines.put("root", format_args!("of the {tree}: {}, transaction {}{state}", root.source, root.generation));
    }
    for device in &report.devices {
        let state = match (device.missing, device.stale) {
            (true, _) => ", MISSING",
            (_, true) => ", of an older transaction",
            _ => "",
        };
        let target = device.target.as_deref().unwrap_or("-");
        let (total, used) = (bytes(device.total_bytes), bytes(device.used_bytes));
        lines.put(&format!("device {}", device.id), format_args!("{target}, {total}, {used} in block groups{state}"));
    }
    lines.put("zeroes", zeroes_text(&report.devices));
    for space in &report.space {
        let (total, used, on) = (bytes(space.total_bytes), bytes(space.used_bytes), bytes(space.device_bytes));
        lines.put("space", format_args!("{} {}: {used} of {total} used, {on} on devices", space.kind, space.profile));
    }
    for one in &report.subvolumes {
        lines.put(&format!("subvolume {}", one.id), subvolume_text(one, report.default_subvolume));
    }
    report.damage.iter().for_each(|damage| lines.put("damage", damage));
    report.unread.iter().for_each(|unread| lines.put("not read", unread));
    lines.into_text()
}

/// How `fs fallocate --write-zeroes` gets zeroes to the devices.
fn zeroes_text(devices: &[DeviceReport]) -> String {
    let slow = devices.iter().filter(|device| device.write_zeroes == Some(EMULATED));
    let slow: Vec<String> = slow.map(|device| device.id.to_string()).collect();
    match slow.is_empty() {
        true => "made by the devices".to_owned(),
        false => format!("transferred to device {}", slow.join(", ")),
    }
}

pub(super) fn subvolume_text(one: &SubvolumeReport, default_subvolume: Option<u64>) -> String {
    let mut words = vec![one.path.clone().unwrap_or_else(|| "-".to_owned())];
    words.extend((Some(one.id) == default_subvolume).then(|| "default".to_owned()));
    words.extend(one.read_only.then(|| "read-only".to_owned()));
    words.extend(one.being_deleted.then(|| "being deleted".to_owned()));
    words.extend(one.snapshot_of.as_ref().map(|uuid| format!("snapshot of {uuid}")));
    words.extend(one.created_s.map(|seconds| format!("made {}", moment(seconds))));
    words.join(", ")
}
