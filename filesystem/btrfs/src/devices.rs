//! The devices of a filesystem: which targets belong together, which superblock is used, which devices are missing or
//! stale.
//!
//! Invariants:
//! - All devices of a set have the same UUID, and each number occurs once. A device that is given twice, or together
//!   with an older copy of it, is refused, because no rule could decide which one is right.
//! - The set uses its newest intact superblock. A device with an older superblock missed at least one transaction: its
//!   data are used only if a checksum proves them ([`Device::is_stale`]).

use std::cell::Cell;
use std::collections::BTreeMap;

use sealblock_block::{Device as _, DynDevice, Expectations, Request, Response};
use sealblock_btrfs_format::items::device::DevItem;
use sealblock_btrfs_format::superblock::{Geometry, SUPERBLOCK_BYTES, Superblock, copy_offsets, flags};
use sealblock_runtime_memory::Slice;
use sealblock_units::Extent;

use crate::chunk_map::Place;
use crate::error::{BadCopy, CopyFault, FsError};

/// The maximum number of devices of one filesystem.
pub const MAX_DEVICES: usize = 256;

/// A target that may be a device of a filesystem.
#[derive(Clone)]
pub struct Candidate {
    /// Its name in errors.
    pub name: String,
    /// Its blocks.
    pub device: DynDevice,
}

/// A device of a filesystem.
pub struct Device {
    /// Its name in errors.
    pub name: String,
    /// Its blocks.
    pub device: DynDevice,
    /// Its item in its own superblock.
    pub item: DevItem,
    /// The transaction of its newest superblock.
    pub generation: u64,
    /// True if another device has a later transaction.
    pub is_stale: bool,
}

impl Device {
    /// True if it checks its blocks against protection information that it stores itself.
    pub fn has_seals(&self) -> bool {
        self.device.geometry().protection.is_some() || self.device.abilities().seals
    }
}

/// The devices of a filesystem.
pub struct DeviceSet {
    devices: BTreeMap<u64, Device>,
    superblock: Box<Superblock>,
    geometry: Geometry,
    bad_superblocks: Vec<BadCopy>,
    transferred_bytes: Cell<u64>,
}

/// The newest intact superblock of a target, and the faults of the others.
struct Found {
    superblock: Box<Superblock>,
    geometry: Geometry,
    bad: Vec<(u64, usize, CopyFault)>,
}

impl DeviceSet {
    /// Opens targets as the devices of one filesystem.
    ///
    /// # Errors
    /// If a target is not a device of a filesystem, if the targets do not belong together, or if the filesystem is not
    /// supported.
    pub async fn open(candidates: Vec<Candidate>) -> Result<DeviceSet, FsError> {
        if candidates.is_empty() || candidates.len() > MAX_DEVICES {
            let count = candidates.len();
            return Err(FsError::Devices(format!(
                "a filesystem of {count} devices: from 1 to {MAX_DEVICES} are opened"
            )));
        }
        let mut devices: BTreeMap<u64, Device> = BTreeMap::new();
        let mut newest: Option<(Box<Superblock>, Geometry, String)> = None;
        let mut bad_superblocks = Vec::new();
        for Candidate { name, device } in candidates {
            let Found { superblock, geometry, bad } = find_superblock(&name, &device).await?;
            if let Some((first, of_first, other)) = &newest {
                check_belongs((first, of_first, other), (&superblock, &geometry, &name))?;
            }
            let item = superblock.dev_item;
            let devid = item.devid.get();
            if let Some(other) = devices.get(&devid) {
                let other = &other.name;
                return Err(FsError::Devices(format!("{other} and {name} are both device {devid} of the filesystem")));
            }
            let place = |offset| Place { devid, offset };
            bad_superblocks.extend(bad.into_iter().map(|(offset, mirror, fault)| BadCopy {
                logical: None,
                place: place(offset),
                mirror,
                fault,
            }));
            let generation = geometry.generation;
            devices.insert(devid, Device { name: name.clone(), device, item, generation, is_stale: false });
            if newest.as_ref().is_none_or(|(_, newest, _)| newest.generation < generation) {
                newest = Some((superblock, geometry, name));
            }
        }
        let (superblock, geometry, _) = newest.expect("there is at least one candidate");
        check_readable(&superblock, &geometry)?;
        devices.values_mut().for_each(|device| device.is_stale = device.generation < geometry.generation);
        Ok(DeviceSet { devices, superblock, geometry, bad_superblocks, transferred_bytes: Cell::new(0) })
    }

    /// The newest superblock.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// The properties that are needed to read its nodes.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// True if it is an image that has only metadata.
    pub fn is_metadata_image(&self) -> bool {
        self.superblock.flags.get() & flags::METADUMP_V2 != 0
    }

    /// The device with this number, if it is present.
    pub fn get(&self, devid: u64) -> Option<&Device> {
        self.devices.get(&devid)
    }

    /// All present devices, by number.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Device)> {
        self.devices.iter().map(|(devid, device)| (*devid, device))
    }

    /// Copies of superblocks that are damaged, that are older than another one of the device, or that differ from the
    /// used one.
    pub fn bad_superblocks(&self) -> &[BadCopy] {
        &self.bad_superblocks
    }

    /// True if a newer transaction than that of the used superblock may have been lost with a superblock. The first one of a device is in every
    /// transaction, so one that can be read and is not older shows that there is none.
    pub fn may_be_older(&self) -> bool {
        let is_lost = |copy: &BadCopy| !matches!(copy.fault, CopyFault::Old { .. } | CopyFault::Differs(_));
        let lost_first = |devid| {
            let first = |copy: &&BadCopy| copy.place.devid == devid && copy.mirror == 1;
            self.bad_superblocks.iter().find(first).is_some_and(is_lost)
        };
        self.iter().filter(|(_, device)| !device.is_stale).all(|(devid, _)| lost_first(devid))
    }

    /// Reads bytes of a device, which checks them if it can.
    ///
    /// # Errors
    /// If they cannot be read; the error has the reason.
    pub async fn read(&self, place: Place, bytes: u64) -> Result<Slice, CopyFault> {
        let device = self.get(place.devid).ok_or(CopyFault::Missing)?;
        let data = read_bytes(&device.device, place.offset, bytes).await?;
        self.add_transferred(data.len() as u64);
        Ok(data)
    }

    /// Bytes of data transferred from the devices to this host since the set was opened, not counting superblocks.
    pub fn transferred_bytes(&self) -> u64 {
        self.transferred_bytes.get()
    }

    /// Counts bytes that a request without data transferred.
    pub(crate) fn add_transferred(&self, bytes: u64) {
        self.transferred_bytes.set(self.transferred_bytes.get() + bytes);
    }
}

/// Refuses a device of another filesystem than the first device, or of another history of the same filesystem.
fn check_belongs(
    (before, of_before, other): (&Superblock, &Geometry, &str),
    (superblock, geometry, name): (&Superblock, &Geometry, &str),
) -> Result<(), FsError> {
    if before.node_uuid() != superblock.node_uuid() {
        let is_seed = |one: &Superblock| one.flags.get() & flags::SEEDING != 0;
        let hint = match is_seed(before) || is_seed(superblock) {
            true => {
                ": a seed and what grew from it are not read together; name the seed alone, or the others for what they have"
            }
            false => "",
        };
        let (this, before) = (uuid(&superblock.fsid), uuid(&before.fsid));
        return Err(FsError::Devices(format!("{name} is of the filesystem {this}, and {other} of {before}{hint}")));
    }
    let generation = geometry.generation;
    if of_before.generation == generation && trees_of(before) != trees_of(superblock) {
        return Err(FsError::Devices(format!(
            "{name} and {other} are both of transaction {generation}, and their trees are not the same: they were written apart from each other; name those of one history"
        )));
    }
    Ok(())
}

/// The fields in which all superblocks of one transaction agree. A log is written between transactions, and a crash may
/// leave it on some devices only.
fn trees_of(superblock: &Superblock) -> [u64; 5] {
    let Superblock { root, chunk_root, chunk_root_generation, bytes_used, num_devices, .. } = superblock;
    [root, chunk_root, chunk_root_generation, bytes_used, num_devices].map(|field| field.get())
}

/// Refuses filesystems that this crate would read wrongly.
fn check_readable(superblock: &Superblock, geometry: &Geometry) -> Result<(), FsError> {
    geometry.features.check_reading()?;
    let set = superblock.flags.get();
    if set & flags::METADUMP != 0 {
        return Err(FsError::NotReadable(
            "it is an image of metadata whose chunks lie elsewhere than they say; a newer `btrfs-image` restores it",
        ));
    }
    if set & flags::CHANGING_FSID != 0 {
        return Err(FsError::NotReadable("a change of its UUID was interrupted; `btrfstune` ends it"));
    }
    Ok(())
}

/// The extent of blocks that contains some bytes of a device.
pub(crate) fn extent_of(device: &DynDevice, offset: u64, bytes: u64) -> Option<Extent> {
    let size = device.geometry().block_size;
    let is_whole = (offset | bytes).is_multiple_of(size.bytes() as u64);
    is_whole.then(|| Extent::from_raw(offset >> size.shift(), bytes >> size.shift()).ok()).flatten()
}

async fn read_bytes(device: &DynDevice, offset: u64, bytes: u64) -> Result<Slice, CopyFault> {
    let extent = extent_of(device, offset, bytes).ok_or(CopyFault::NoBlock)?;
    match device.execute(Request::read(extent, Expectations::NONE)).await {
        Ok(Response::Data(sealed)) => Ok(sealed.joined_data()),
        Ok(_) => unreachable!("gates answer reads with data"),
        Err(error) => Err(CopyFault::Unreadable(error)),
    }
}

async fn superblock_at(device: &DynDevice, offset: u64) -> Result<(Box<Superblock>, Geometry), CopyFault> {
    let bytes = read_bytes(device, offset, SUPERBLOCK_BYTES as u64).await?;
    let superblock = Superblock::decode(&bytes).map_err(|error| CopyFault::Superblock(error.into()))?;
    let geometry = superblock.check(offset).map_err(CopyFault::Superblock)?;
    Ok((Box::new(*superblock), geometry))
}

/// The newest intact superblock of a device; if several are equally new, the first one. A copy of an older filesystem,
/// which the current one did not overwrite, is ignored.
async fn find_superblock(name: &str, device: &DynDevice) -> Result<Found, FsError> {
    let (mut intact, mut bad) = (Vec::new(), Vec::new());
    for (index, offset) in copy_offsets(device.geometry().capacity_bytes()).enumerate() {
        match superblock_at(device, offset).await {
            Ok((superblock, geometry)) => intact.push((offset, index + 1, superblock, geometry)),
            Err(fault) => bad.push((offset, index + 1, fault)),
        }
    }
    let none = |bad: Vec<(u64, usize, CopyFault)>| FsError::NoSuperblock {
        name: name.to_owned(),
        why: bad.into_iter().next().map_or(CopyFault::NoBlock, |(_, _, fault)| fault),
    };
    // The first copy, if intact, decides which filesystem it is.
    let first =
        intact.iter().find(|(_, mirror, ..)| *mirror == 1).or_else(|| intact.iter().max_by_key(|one| one.3.generation));
    let Some(fsid) = first.map(|(_, _, superblock, _)| superblock.fsid) else { return Err(none(bad)) };
    intact.retain(|(_, _, superblock, _)| superblock.fsid == fsid);
    let newest = intact.iter().map(|one| one.3.generation).max().unwrap_or_default();
    let mut found = None;
    for (offset, mirror, superblock, geometry) in intact {
        if geometry.generation < newest {
            bad.push((offset, mirror, CopyFault::Old { found: geometry.generation, newest }));
            continue;
        }
        // All copies are written in one transaction. If they differ, one was changed, and nothing shows which one.
        match &found {
            None => found = Some((mirror, superblock, geometry)),
            Some((first, counts, _)) if !counts.says_the_same_as(&superblock) => {
                bad.push((offset, mirror, CopyFault::Differs(*first)));
            }
            Some(_) => {}
        }
    }
    match found {
        Some((_, superblock, geometry)) => Ok(Found { superblock, geometry, bad }),
        None => Err(none(bad)),
    }
}

/// A UUID as text.
pub fn uuid(bytes: &[u8; 16]) -> String {
    let hex = |range: std::ops::Range<usize>| bytes[range].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("{}-{}-{}-{}-{}", hex(0..4), hex(4..6), hex(6..8), hex(8..10), hex(10..16))
}
