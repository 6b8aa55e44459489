//! The devices of a filesystem: which targets belong together, which devices are missing or stale.
//!
//! Invariants:
//! - All devices of a set have the same UUID, and each number occurs once. A device that is given twice, or together
//!   with an older copy of it, is refused, because no rule could decide which one is right.
//! - The set uses its newest intact superblock. A device with an older superblock missed at least one transaction: its
//!   data are used only if a checksum proves them ([`Device::is_stale`]). A device that took part in all transactions, and
//!   missed only superblocks, is not such a device.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sealblock_block::{BadBlock, BadBlockCause, Device as _, DynDevice, Request, RequestKind, Response};
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::commit_record::CommitRecord;
use sealblock_btrfs_format::items::device::DevItem;
use sealblock_btrfs_format::superblock::{COPY_OFFSETS, Geometry, SUPERBLOCK_BYTES, Superblock, flags};
use sealblock_integrity::{ProtectionType, Sealed};
use sealblock_runtime_memory::Slice;

use crate::chunk_map::Place;
use crate::error::{BadCopy, CopyFault, FsError};
pub use crate::superblocks::uuid;
use crate::superblocks::{Copies, IntactCopy, Used, extent_of, read_blocks, read_bytes, read_expecting};
use crate::tags::{DataTags, Demand, TagState, WrittenIn, has_tag_of};

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
    /// True if another device has a later transaction, and this one may lack some of it.
    pub is_stale: bool,
    /// True if the engine wrote its superblock with a tag that it does not have: its bytes were copied without tags.
    pub has_lost_tags: bool,
    /// True if it checks what it stores, and its superblock shows that the engine wrote it with tags, and has its own: so its
    /// blocks have theirs.
    pub has_proven_tags: bool,
    /// True if a write to it failed since it was opened.
    is_behind: Cell<bool>,
}

impl Device {
    /// True if it may lack something that another device has: it is stale, or a write to it failed.
    pub fn may_lack(&self) -> bool {
        self.is_stale || self.is_behind.get()
    }

    /// True if it makes blocks zeroes itself. Otherwise zeroes are written to it like other data.
    pub fn has_native_zeroes(&self) -> bool {
        self.device.abilities().is_native(RequestKind::WriteZeroes)
    }

    /// True if it keeps tags with its blocks, which are seen here.
    pub fn has_tags(&self) -> bool {
        self.device.geometry().protection.is_some()
    }

    /// Why the nodes of a filesystem without checksums are without proof on it; `None` if its tags prove them.
    pub fn why_unproven(&self) -> Option<&'static str> {
        let why = if self.has_lost_tags {
            "it has lost the tags of its blocks"
        } else {
            "its superblock has no valid record of tags"
        };
        (!self.has_proven_tags).then(|| why_unprotected(&self.device).unwrap_or(why))
    }

    /// True if it checks its blocks against protection information that it stores itself.
    pub fn has_seals(&self) -> bool {
        self.has_tags() || self.device.abilities().seals
    }
}

/// The devices of a filesystem.
pub struct DeviceSet {
    devices: BTreeMap<u64, Device>,
    superblock: Box<Superblock>,
    geometry: Geometry,
    bad_superblocks: Vec<BadCopy>,
    /// What the tags of data can prove.
    tags: RefCell<DataTags>,
    /// True if the guards of data with tags are made here, and not by the devices. Whoever reads guards checks them.
    is_host_sealed: Cell<bool>,
    transferred_bytes: Cell<u64>,
    /// Requests that devices have executed. Another thread may look at it.
    executed: Arc<AtomicU64>,
}

/// The newest transaction that a superblock of a device has, of whatever filesystem; `None` if it has no intact one.
pub async fn newest_transaction(device: &DynDevice) -> Option<u64> {
    let copies = Copies::read(String::new(), device.clone()).await.ok()?;
    copies.newest_transaction()
}

/// Reads the superblocks of targets.
///
/// # Errors
/// If there are too many or too few targets, or if one has no superblock.
pub(crate) async fn read_superblocks(candidates: Vec<Candidate>) -> Result<Vec<Copies>, FsError> {
    if candidates.is_empty() || candidates.len() > MAX_DEVICES {
        let count = candidates.len();
        return Err(FsError::Devices(format!("a filesystem of {count} devices: from 1 to {MAX_DEVICES} are opened")));
    }
    let mut all = Vec::new();
    for Candidate { name, device } in candidates {
        all.push(Copies::read(name, device).await?);
    }
    Ok(all)
}

impl DeviceSet {
    /// Targets as the devices of one filesystem.
    ///
    /// # Errors
    /// If the targets do not belong together, or if the filesystem is not supported.
    pub(crate) fn new(targets: Vec<Used>) -> Result<DeviceSet, FsError> {
        let mut devices: BTreeMap<u64, Device> = BTreeMap::new();
        let mut newest: Option<(Box<Superblock>, Geometry, String)> = None;
        let mut bad_superblocks = Vec::new();
        for Used { name, device, superblock, geometry, has_tag, bad } in targets {
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
            let was_tagged = was_tagged(&superblock);
            let is_protected = why_unprotected(&device).is_none();
            let found = Device {
                name: name.clone(),
                device,
                item,
                generation: geometry.generation,
                is_stale: false,
                has_lost_tags: was_tagged && !has_tag,
                has_proven_tags: was_tagged && has_tag && is_protected,
                is_behind: Cell::default(),
            };
            devices.insert(devid, found);
            if newest.as_ref().is_none_or(|(_, newest, _)| newest.generation < geometry.generation) {
                newest = Some((superblock, geometry, name));
            }
        }
        let (superblock, geometry, _) = newest.expect("there is at least one target");
        check_readable(&superblock, &geometry)?;
        let record = CommitRecord::read(&superblock).filter(|record| record.is_of(&superblock));
        for device in devices.values_mut() {
            // In a power cut a device may miss a superblock alone.
            let is_current =
                |record: &CommitRecord| record.missed_only_superblocks(device.item.uuid, device.generation);
            device.is_stale = device.generation < geometry.generation && !record.as_ref().is_some_and(is_current);
        }
        let protected = devices.iter().filter(|(_, device)| device.has_tags() && !device.has_lost_tags);
        let tags = DataTags::new(&superblock, protected.map(|(devid, device)| (*devid, device.item.uuid)));
        let is_host_sealed = CommitRecord::read(&superblock).is_some_and(|record| record.is_host_sealed);
        let (tags, is_host_sealed) = (RefCell::new(tags), Cell::new(is_host_sealed));
        let (transferred_bytes, executed) = (Cell::new(0), Arc::default());
        Ok(DeviceSet {
            devices,
            superblock,
            geometry,
            bad_superblocks,
            tags,
            is_host_sealed,
            transferred_bytes,
            executed,
        })
    }

    /// Targets with their superblocks, as devices from which nodes are read to find out whether `copy`, the superblock
    /// of the first one, belongs there.
    pub(crate) fn of_witnesses<'a>(
        targets: impl Iterator<Item = (&'a Copies, &'a IntactCopy)>,
        copy: &IntactCopy,
    ) -> DeviceSet {
        let mut devices = BTreeMap::new();
        for (target, IntactCopy { superblock, geometry, has_tag, .. }) in targets {
            let was_tagged = was_tagged(superblock);
            let device = Device {
                name: target.name.clone(),
                device: target.device.clone(),
                item: superblock.dev_item,
                generation: geometry.generation,
                is_stale: false,
                has_lost_tags: was_tagged && !has_tag,
                has_proven_tags: was_tagged && *has_tag && why_unprotected(&target.device).is_none(),
                is_behind: Cell::default(),
            };
            devices.entry(superblock.dev_item.devid.get()).or_insert(device);
        }
        let (superblock, geometry, bad_superblocks) = (copy.superblock.clone(), copy.geometry, Vec::new());
        let (tags, is_host_sealed, transferred_bytes, executed) = Default::default();
        DeviceSet { devices, superblock, geometry, bad_superblocks, tags, is_host_sealed, transferred_bytes, executed }
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

    /// A write to a device failed: other copies are read first, and without a checksum only these.
    pub fn leave_behind(&self, devid: u64) {
        if let Some(device) = self.get(devid) {
            device.is_behind.set(true);
        }
    }

    /// All present devices, by number.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Device)> {
        self.devices.iter().map(|(devid, device)| (*devid, device))
    }

    /// Copies of superblocks that are damaged, that are older than another one of the device, that differ from the used
    /// one, or that are of another filesystem or device.
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
        self.count_executed();
        Ok(data)
    }

    /// Reads data without checksums, and checks their tags as far as these can prove anything. Returns also true if they
    /// prove that the data are those that were written.
    ///
    /// # Errors
    /// If they cannot be read, or are others; the error has the reason.
    pub async fn read_tagged(&self, place: Place, bytes: u64, written: WrittenIn) -> Result<(Slice, bool), CopyFault> {
        let (blocks, is_attested) = self.read_demanded(place, bytes, self.demand(place.devid, written)).await?;
        Ok((blocks.joined_data(), is_attested))
    }

    /// As [`DeviceSet::read_tagged`], with what the tags are, also where nothing is demanded.
    ///
    /// # Errors
    /// If they cannot be read, or are others; the error has the reason.
    pub async fn read_with_tags(
        &self,
        place: Place,
        bytes: u64,
        written: WrittenIn,
    ) -> Result<(Slice, bool, TagState), CopyFault> {
        let (blocks, is_attested) = self.read_demanded(place, bytes, self.demand(place.devid, written)).await?;
        let state = TagState::of(&blocks, written.generation);
        Ok((blocks.joined_data(), is_attested, state))
    }

    /// Reads blocks of a device, and checks their tags. Returns also true if these are as demanded.
    ///
    /// # Errors
    /// If they cannot be read, or their tags are not as demanded; the error has the reason.
    pub(crate) async fn read_demanded(
        &self,
        place: Place,
        bytes: u64,
        demand: Option<Demand>,
    ) -> Result<(Sealed, bool), CopyFault> {
        let device = self.get(place.devid).ok_or(CopyFault::Missing)?;
        let blocks = read_blocks(&device.device, place.offset, bytes).await;
        self.count_read(&blocks, bytes);
        let Some(demand) = demand else { return Ok((blocks?, false)) };
        let fault = match blocks {
            Ok(blocks) => match demand.check(&blocks) {
                Ok(is_attested) => return Ok((blocks, is_attested)),
                Err(mismatch) => CopyFault::Tag(mismatch),
            },
            Err(fault) => fault,
        };
        self.read_other_copy(place, bytes, demand, &fault).await.ok_or(fault)
    }

    /// Reads blocks with the demanded tag from a device that holds several copies of its blocks, where one copy has another
    /// tag, or where the copies are known to differ. The device rewrites that one.
    async fn read_other_copy(
        &self,
        place: Place,
        bytes: u64,
        demand: Demand,
        fault: &CopyFault,
    ) -> Option<(Sealed, bool)> {
        let is_told = match fault {
            CopyFault::Tag(_) => true,
            CopyFault::Unreadable(error) => {
                let differs = |bad: &BadBlock| bad.cause == BadBlockCause::Conflict;
                error.bad_blocks().is_some_and(|bad_blocks| bad_blocks.as_slice().iter().all(differs))
            }
            _ => false,
        };
        let device = &self.get(place.devid)?.device;
        if !is_told || !device.abilities().copies {
            return None;
        }
        let expectations = demand.strict(device.geometry().protection?);
        let blocks = read_expecting(device, place.offset, bytes, expectations).await;
        self.count_read(&blocks, bytes);
        let blocks = blocks.ok()?;
        demand.check(&blocks).ok().map(|is_attested| (blocks, is_attested))
    }

    /// What is demanded of the tags of data on a device.
    pub(crate) fn demand(&self, devid: u64, written: WrittenIn) -> Option<Demand> {
        self.tags.borrow().demand(devid, written)
    }

    /// When data were written, if the tags of some device can show it.
    pub(crate) fn provable(&self, written: WrittenIn) -> Option<WrittenIn> {
        self.tags.borrow().demand_anywhere(written).map(|_| written)
    }

    /// True if tags alone show whether nodes are those that were written.
    pub fn nodes_need_tags(&self) -> bool {
        self.geometry.checksum == ChecksumType::None
    }

    /// True if a device shows whether a node is the one that was written: always if nodes have checksums.
    pub(crate) fn proves_nodes(&self, devid: u64) -> bool {
        !self.nodes_need_tags() || self.get(devid).is_some_and(|device| device.has_proven_tags)
    }

    /// The present devices whose nodes are without proof, with the reason: their tags are lost, or were never there.
    pub fn unproven(&self) -> impl Iterator<Item = (u64, &Device, &'static str)> {
        let devices = self.iter().filter(|_| self.nodes_need_tags());
        devices.filter_map(|(devid, device)| Some((devid, device, device.why_unproven()?)))
    }

    /// What blocks of a node must have on a device; `None` if nothing of it is proven there.
    pub(crate) fn node_demand(&self, devid: u64, generation: u64) -> Option<Demand> {
        self.proves_nodes(devid).then(|| Demand::of_node(generation))
    }

    /// Has a device verify that blocks are intact and have the tags of a transaction. No data are transferred by a device
    /// that verifies by itself.
    ///
    /// # Errors
    /// If they are not, or cannot be verified; the error has the reason.
    pub async fn verify_tagged(&self, place: Place, bytes: u64, generation: u64) -> Result<(), CopyFault> {
        let device = &self.get(place.devid).ok_or(CopyFault::Missing)?.device;
        let format = device.geometry().protection.ok_or(CopyFault::NoBlock)?;
        let extent = extent_of(device, place.offset, bytes).ok_or(CopyFault::NoBlock)?;
        let demand = Demand::of_node(generation);
        match device.execute(Request::verify(extent, demand.strict(format))).await {
            Ok(Response::Verified(stats)) => {
                self.add_transferred(stats.bytes_transferred);
                Ok(())
            }
            Ok(_) => unreachable!("gates answer a Verify with what it covered"),
            Err(error) => Err(CopyFault::Unreadable(error)),
        }
    }

    /// True if the first superblock of a device has the tag of the transaction in which it was written, and the device so
    /// keeps tags as they are. Some drives may change application tags.
    pub async fn keeps_tags(&self, devid: u64, generation: u64) -> bool {
        let Some(device) = self.get(devid) else { return false };
        let read = read_blocks(&device.device, COPY_OFFSETS[0], SUPERBLOCK_BYTES as u64).await;
        read.is_ok_and(|blocks| has_tag_of(&blocks, generation))
    }

    /// From now on, these are the tags: the filesystem is written.
    pub fn set_tags(&self, tags: DataTags) {
        *self.tags.borrow_mut() = tags;
    }

    /// True if the guards of data with tags are made here when they are written.
    pub fn is_host_sealed(&self) -> bool {
        self.is_host_sealed.get()
    }

    /// Sets whether the guards of data with tags are made here when they are written.
    pub fn set_host_sealed(&self, is_host_sealed: bool) {
        self.is_host_sealed.set(is_host_sealed);
    }

    /// The number of requests that devices have executed, which grows as long as work goes on.
    pub fn executed(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.executed)
    }

    /// A device has executed a request.
    pub(crate) fn count_executed(&self) {
        // Only this core counts.
        self.executed.store(self.executed.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Bytes of data transferred from the devices to this host since the set was opened, not counting superblocks.
    pub fn transferred_bytes(&self) -> u64 {
        self.transferred_bytes.get()
    }

    fn count_read(&self, read: &Result<Sealed, CopyFault>, bytes: u64) {
        if read.is_ok() {
            self.add_transferred(bytes);
            self.count_executed();
        }
    }

    /// Counts bytes that a request without data transferred.
    pub(crate) fn add_transferred(&self, bytes: u64) {
        self.transferred_bytes.set(self.transferred_bytes.get() + bytes);
    }
}

/// Why the blocks of a device cannot have tags that show anything; `None` if they can.
pub fn why_unprotected(device: &DynDevice) -> Option<&'static str> {
    match device.geometry().protection {
        None => Some("it shows no protection information"),
        // Otherwise a block of the same transaction could have been written to the wrong place.
        Some(format) if format.protection() != ProtectionType::Type1 => {
            Some("its protection information is not of Type 1, which alone shows the address of a block")
        }
        Some(_) => (!device.abilities().seals).then_some("it does not check its protection information"),
    }
}

/// True if the engine wrote a superblock, and everything that gets tags, with them.
fn was_tagged(superblock: &Superblock) -> bool {
    let is_tagged = |record: CommitRecord| record.is_of(superblock) && record.is_tagged(superblock.dev_item.uuid);
    CommitRecord::read(superblock).is_some_and(is_tagged)
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
