//! The copies of the superblock of one target, and which of them count.
//!
//! Intact copies may belong to different filesystems or devices ([`Identity`]): one was written to the wrong place, or
//! a smaller filesystem was made over a larger one, whose last copy it does not reach. Which identity belongs to the
//! target is decided elsewhere (`witnesses`); this module reads the copies, and chooses among those of one identity.
//!
//! Invariants:
//! - Of one identity the newest copy is used, and the first one if several are equally new.
//! - Each copy that the filesystem has on the target and that is not used is either equal to the used one or reported.
//!   Places at or beyond the end that the filesystem records have no copy, so what is there is not reported.

use sealblock_block::{Device as _, DynDevice, Expectations, Request, Response};
use sealblock_btrfs_format::superblock::{Geometry, SUPERBLOCK_BYTES, Superblock, copy_offsets};
use sealblock_integrity::Sealed;
use sealblock_runtime_memory::Slice;
use sealblock_units::Extent;

use crate::error::{CopyFault, FsError};
use crate::tags::has_tag_of;

/// The filesystem and the device that a superblock is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Identity {
    /// The UUID in nodes of the filesystem.
    pub node_uuid: [u8; 16],
    /// The number of the device.
    pub devid: u64,
    /// The UUID of the device.
    pub device_uuid: [u8; 16],
}

impl Identity {
    pub fn of(superblock: &Superblock) -> Identity {
        let item = &superblock.dev_item;
        Identity { node_uuid: superblock.node_uuid(), devid: item.devid.get(), device_uuid: item.uuid }
    }
}

/// An intact copy.
#[derive(Clone)]
pub(crate) struct IntactCopy {
    /// Its byte offset on the target.
    pub offset: u64,
    /// Its number, from 1.
    pub mirror: usize,
    pub superblock: Box<Superblock>,
    pub geometry: Geometry,
    /// True if its blocks have the tag of its transaction.
    pub has_tag: bool,
}

impl IntactCopy {
    pub fn identity(&self) -> Identity {
        Identity::of(&self.superblock)
    }
}

/// All copies of a target: at least one is intact.
pub(crate) struct Copies {
    /// The name of the target in errors.
    pub name: String,
    pub device: DynDevice,
    intact: Vec<IntactCopy>,
    bad: Vec<(u64, usize, CopyFault)>,
}

/// The superblock of a target that is used, and the faults of the others.
pub(crate) struct Used {
    /// The name of the target in errors.
    pub name: String,
    pub device: DynDevice,
    pub superblock: Box<Superblock>,
    pub geometry: Geometry,
    /// True if its blocks have the tag of its transaction.
    pub has_tag: bool,
    /// Offset, number and fault of each copy that is lost or contradicts the used one.
    pub bad: Vec<(u64, usize, CopyFault)>,
}

impl Copies {
    /// Reads all copies of a target.
    ///
    /// # Errors
    /// If none is intact.
    pub async fn read(name: String, device: DynDevice) -> Result<Copies, FsError> {
        let (mut intact, mut bad) = (Vec::new(), Vec::new());
        for (index, offset) in copy_offsets(device.geometry().capacity_bytes()).enumerate() {
            match superblock_at(&device, offset).await {
                Ok((superblock, geometry, has_tag)) => {
                    intact.push(IntactCopy { offset, mirror: index + 1, superblock, geometry, has_tag })
                }
                Err(fault) => bad.push((offset, index + 1, fault)),
            }
        }
        if intact.is_empty() {
            let why = bad.into_iter().next().map_or(CopyFault::NoBlock, |(_, _, fault)| fault);
            return Err(FsError::NoSuperblock { name, why });
        }
        Ok(Copies { name, device, intact, bad })
    }

    /// The newest transaction of all copies.
    pub fn newest_transaction(&self) -> Option<u64> {
        self.intact.iter().map(|copy| copy.geometry.generation).max()
    }

    /// The newest copy of each identity, in the order of their first copies.
    pub fn newest(&self) -> Vec<&IntactCopy> {
        let mut all: Vec<&IntactCopy> = Vec::new();
        for copy in &self.intact {
            match all.iter_mut().find(|other| other.identity() == copy.identity()) {
                None => all.push(copy),
                Some(other) if other.geometry.generation < copy.geometry.generation => *other = copy,
                Some(_) => {}
            }
        }
        all
    }

    /// Uses the newest copy of this identity, which at least one copy must have.
    pub fn used(self, identity: Identity) -> Used {
        let Copies { name, device, intact, mut bad } = self;
        let of_it = |copy: &&IntactCopy| copy.identity() == identity;
        let newest = intact.iter().filter(of_it).map(|copy| copy.geometry.generation).max().unwrap_or_default();
        let counts = intact.iter().filter(of_it).find(|copy| copy.geometry.generation == newest);
        let counts = counts.expect("a copy has this identity").clone();
        for copy in &intact {
            let found = copy.geometry.generation;
            let fault = if !of_it(&copy) {
                foreign(&counts.superblock, &copy.superblock)
            } else if found < newest {
                CopyFault::Old { found, newest }
            } else if !counts.superblock.says_the_same_as(&copy.superblock) {
                // All copies are written in one transaction. If they differ, one was changed, and nothing shows which
                // one.
                CopyFault::Differs(counts.mirror)
            } else {
                continue;
            };
            bad.push((copy.offset, copy.mirror, fault));
        }
        let end = counts.superblock.dev_item.total_bytes.get();
        // A copy of the same transaction that records another end contradicts the used one wherever it lies, and every
        // filesystem has a first copy.
        bad.retain(|(offset, mirror, fault)| {
            let is_within = offset.saturating_add(SUPERBLOCK_BYTES as u64) < end;
            is_within || *mirror == 1 || matches!(fault, CopyFault::Differs(_))
        });
        bad.sort_by_key(|(_, mirror, _)| *mirror);
        let IntactCopy { superblock, geometry, has_tag, .. } = counts;
        Used { name, device, superblock, geometry, has_tag, bad }
    }
}

/// The fault of a copy that has another identity than the used one.
fn foreign(used: &Superblock, found: &Superblock) -> CopyFault {
    let device = |superblock: &Superblock| {
        let item = &superblock.dev_item;
        format!("{} with the UUID {}", item.devid.get(), uuid(&item.uuid))
    };
    match used.node_uuid() == found.node_uuid() {
        true => CopyFault::OtherDevice { found: device(found), used: device(used) },
        false => CopyFault::OtherFilesystem { found: uuid(&found.fsid), used: uuid(&used.fsid) },
    }
}

async fn superblock_at(device: &DynDevice, offset: u64) -> Result<(Box<Superblock>, Geometry, bool), CopyFault> {
    let blocks = read_blocks(device, offset, SUPERBLOCK_BYTES as u64).await?;
    let bytes = blocks.joined_data();
    let superblock = Superblock::decode(&bytes).map_err(|error| CopyFault::Superblock(error.into()))?;
    let geometry = superblock.check(offset).map_err(CopyFault::Superblock)?;
    Ok((Box::new(*superblock), geometry, has_tag_of(&blocks, geometry.generation)))
}

/// The extent of blocks that contains some bytes of a device.
pub(crate) fn extent_of(device: &DynDevice, offset: u64, bytes: u64) -> Option<Extent> {
    let size = device.geometry().block_size;
    let is_whole = (offset | bytes).is_multiple_of(size.bytes() as u64);
    is_whole.then(|| Extent::from_raw(offset >> size.shift(), bytes >> size.shift()).ok()).flatten()
}

/// Bytes of a device, which checks them if it can.
pub(crate) async fn read_bytes(device: &DynDevice, offset: u64, bytes: u64) -> Result<Slice, CopyFault> {
    read_blocks(device, offset, bytes).await.map(|blocks| blocks.joined_data())
}

/// Blocks of a device with their tags.
pub(crate) async fn read_blocks(device: &DynDevice, offset: u64, bytes: u64) -> Result<Sealed, CopyFault> {
    read_expecting(device, offset, bytes, Expectations::NONE).await
}

/// Blocks of a device whose tags are as expected.
pub(crate) async fn read_expecting(
    device: &DynDevice,
    offset: u64,
    bytes: u64,
    expectations: Expectations,
) -> Result<Sealed, CopyFault> {
    let extent = extent_of(device, offset, bytes).ok_or(CopyFault::NoBlock)?;
    match device.execute(Request::read(extent, expectations)).await {
        Ok(Response::Data(sealed)) => Ok(sealed),
        Ok(_) => unreachable!("gates answer reads with data"),
        Err(error) => Err(CopyFault::Unreadable(error)),
    }
}

/// A UUID as text.
pub fn uuid(bytes: &[u8; 16]) -> String {
    let hex = |range: std::ops::Range<usize>| bytes[range].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("{}-{}-{}-{}-{}", hex(0..4), hex(4..6), hex(6..8), hex(8..10), hex(10..16))
}
