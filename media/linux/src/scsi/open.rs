//! Opens a SCSI drive: reads its pages, and finds out with commands for one block what it supports.

use std::fs;
use std::path::Path;

use sealblock_block::{Abilities, Ability, Device, Geometry, RequestKind};
use sealblock_integrity::PiFormat;
use sealblock_protocols_scsi::{Inquiry, PiProfile};
use sealblock_units::{BlockCount, BlockSize};

use super::transport::{OpenError, Transport};
use super::unit::{Pages, Unit};
use super::verify::{Compares, VerifyForm};
use crate::node::KernelLimits;

/// Bytes of one VERIFY, to limit how long it takes: disks read more in a second.
const VERIFY_BYTES: u64 = 64 << 20;

/// Who makes the tags of what is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TagMaker {
    /// This program, with ordinary reads and writes through which the tags get to the drive (DIX).
    Host,
    /// The kernel, which transfers them with the data to the drive (DIX).
    Kernel,
    /// The host adapter (DIF).
    Adapter,
    /// The drive.
    Drive,
}

/// The information of a SCSI drive about itself. Texts contain only printable characters.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ScsiInfo {
    /// T10 VENDOR IDENTIFICATION.
    pub vendor: String,
    /// PRODUCT IDENTIFICATION.
    pub product: String,
    /// PRODUCT REVISION LEVEL.
    pub revision: String,
    /// PRODUCT SERIAL NUMBER.
    pub serial: String,
    /// Its NAA or EUI-64 name.
    pub name: Option<String>,
    /// The protection information of its blocks, and the exponent of the protection intervals in each.
    pub protection: Option<(PiFormat, u8)>,
    /// Who makes its tags, if it has any.
    pub tags_made_by: Option<TagMaker>,
    /// The drive checks guards, application tags and reference tags.
    pub checks: (bool, bool, bool),
    /// The command by which it verifies.
    pub verify: Option<&'static str>,
    /// Bytes of one such command.
    pub max_verify_bytes: Option<u64>,
    /// It compares blocks with as many blocks of data.
    pub compares_blocks: bool,
    /// It compares blocks with one block of data.
    pub compares_one_block: bool,
    /// Blocks of one COMPARE AND WRITE; 0 if there is none.
    pub max_compare_and_write_blocks: u32,
    /// Writes are volatile until a Flush (WCE), if it reports this.
    pub volatile_write_cache: Option<bool>,
    /// Blocks can be unmapped (LBPME).
    pub unmap: bool,
    /// Unmapped blocks read as zeroes (LBPRZ).
    pub unmapped_reads_zeroes: bool,
    /// MEDIUM ROTATION RATE: 0 if not reported, 1 for a medium that does not rotate.
    pub rotation_rate: u16,
    /// What the drive does not support, and why.
    pub refused: Vec<String>,
}

/// The kernel's information about the drive.
#[derive(Clone, Debug, Default)]
pub(crate) struct KernelView {
    pub(crate) limits: KernelLimits,
    /// `protection_mode`: `none`, or `dif` or `dix` with a type.
    pub(crate) protection_mode: String,
}

impl KernelView {
    /// That of the block device with this node.
    pub(crate) fn of(block: &Path) -> KernelView {
        let mode = || {
            let folder = Path::new("/sys/class/block").join(block.file_name()?).join("device/scsi_disk");
            let disk = fs::read_dir(folder).ok()?.next()?.ok()?.path();
            fs::read_to_string(disk.join("protection_mode")).ok()
        };
        let protection_mode = mode().unwrap_or_default().trim().to_owned();
        KernelView { limits: KernelLimits::of(block), protection_mode }
    }

    fn tag_maker(&self) -> TagMaker {
        match self.protection_mode.as_str() {
            mode if mode.starts_with("dix") => TagMaker::Kernel,
            mode if mode.starts_with("dif") => TagMaker::Adapter,
            _ => TagMaker::Drive,
        }
    }
}

/// A drive whose pages were read and whose commands were tried.
pub(crate) struct OpenDrive<T> {
    pub(crate) unit: Unit<T>,
    pub(crate) geometry: Geometry,
    pub(crate) abilities: Abilities,
    pub(crate) form: Option<VerifyForm>,
    pub(crate) compares: Compares,
    pub(crate) info: ScsiInfo,
}

impl<T: Transport> OpenDrive<T> {
    pub(crate) async fn open<D: Device>(
        transport: T,
        ordinary: &D,
        kernel: &KernelView,
    ) -> Result<OpenDrive<T>, OpenError> {
        let unit = Unit { transport };
        let pages = unit.pages().await?;
        let profile = suitable(&pages, ordinary.geometry())?;
        let mut refused = Vec::new();
        let form = unit.find_verify(&pages, profile, &mut refused).await?;
        let compares = unit.find_compares(VerifyForm::comparing(form), ordinary, &mut refused).await?;
        let geometry = geometry(ordinary.geometry(), &pages, form, kernel);
        let (size, most) = (geometry.block_size, u64::from(geometry.limits.max_transfer_blocks.get()));
        let compare_and_write_blocks = unit.find_compare_and_write(&pages, size, most, &mut refused).await?;
        let abilities = abilities(ordinary.abilities(), &pages, (form, compares), profile, kernel);
        let abilities = Abilities { compare_and_write_blocks, ..abilities };
        let max_verify = form.map(|_| geometry.limits.max_verify_blocks.bytes(geometry.block_size));
        let maker = match ordinary.geometry().protection {
            Some(_) => TagMaker::Host,
            None => kernel.tag_maker(),
        };
        let maker = profile.map(|_| maker);
        let info = ScsiInfo {
            max_compare_and_write_blocks: compare_and_write_blocks,
            ..info(pages, (profile, maker), (form, compares), max_verify, refused)
        };
        Ok(OpenDrive { unit, geometry, abilities, form, compares, info })
    }
}

/// The protection information of a drive that can be used; otherwise an error with the reason.
fn suitable(pages: &Pages, ordinary: &Geometry) -> Result<Option<PiProfile>, OpenError> {
    let unsuitable = |why: String| Err(OpenError::Unsuitable(why));
    let (inquiry, capacity) = (&pages.inquiry, &pages.capacity);
    if inquiry.qualifier != 0 || inquiry.device_type != Inquiry::DISK {
        let Inquiry { qualifier, device_type, .. } = inquiry;
        return unsuitable(format!(
            "it is a SCSI device of type {device_type:02x}h, qualifier {qualifier}, not a disk"
        ));
    }
    let Some(size) = BlockSize::from_bytes(u64::from(capacity.block_bytes)) else {
        return unsuitable(format!("the drive has blocks of {} bytes, not of 512 or 4096", capacity.block_bytes));
    };
    let said = (size, capacity.last_lba.checked_add(1));
    if said != (ordinary.block_size, Some(ordinary.capacity_blocks)) || ordinary.capacity_blocks == 0 {
        return unsuitable(format!(
            "the drive says that its last block is {} of {size} bytes each, and the kernel has {} blocks of {} bytes",
            capacity.last_lba, ordinary.capacity_blocks, ordinary.block_size
        ));
    }
    match capacity.protection() {
        Err(reserved) => unsuitable(format!("the drive has a type of protection that is reserved ({reserved})")),
        Ok(Some(profile)) if profile.interval_bytes(capacity.block_bytes).is_none() => {
            let exponent = profile.interval_exponent;
            unsuitable(format!("the drive parts blocks into 2^{exponent} protection intervals"))
        }
        Ok(profile) => Ok(profile),
    }
}

fn geometry(ordinary: &Geometry, pages: &Pages, form: Option<VerifyForm>, kernel: &KernelView) -> Geometry {
    let mut geometry = ordinary.clone();
    let size = geometry.block_size;
    let count = |blocks: u64| BlockCount::new(u32::try_from(blocks).unwrap_or(u32::MAX)).unwrap_or(BlockCount::ONE);
    // MAXIMUM TRANSFER LENGTH is that of a VERIFY too (SBC-4, "Block Limits VPD page").
    let said = match pages.limits.max_transfer_blocks {
        0 => u64::from(u32::MAX),
        blocks => u64::from(blocks),
    };
    let limits = &mut geometry.limits;
    let by_kernel = kernel.limits.transfer_bytes.map_or(u64::MAX, |bytes| bytes >> size.shift());
    limits.max_transfer_blocks = limits.max_transfer_blocks.min(count(by_kernel.min(said)));
    if let Some(form) = form {
        let most = said.min(VERIFY_BYTES >> size.shift()).min(u64::from(form.max_blocks()));
        limits.max_verify_blocks = count(most);
    }
    geometry
}

/// The abilities of the kernel's block I/O, and those of the drive.
fn abilities(
    ordinary: Abilities,
    pages: &Pages,
    (form, compares): (Option<VerifyForm>, Compares),
    profile: Option<PiProfile>,
    kernel: &KernelView,
) -> Abilities {
    // Reads are checked by the drive too: the kernel requests it (RDPROTECT 001b) if the host adapter can transfer
    // tags, and otherwise the drive does so on its own unless DPICZ is set (SBC-4, "RDPROTECT field").
    let is_asked = kernel.tag_maker() != TagMaker::Drive;
    let reads_check =
        profile.is_some() && pages.extended.checks_guard && (is_asked || !pages.control.no_check_without_protect);
    let reads_check = reads_check || ordinary.seals;
    Abilities { seals: reads_check && form.is_none_or(|form| form.is_sealed), offloads: form.is_some(), ..ordinary }
        .with([RequestKind::Verify], Ability::native_if(form.is_some()))
        .with([RequestKind::Compare], Ability::native_if(compares.blocks))
}

fn info(
    pages: Pages,
    (profile, tags_made_by): (Option<PiProfile>, Option<TagMaker>),
    (form, compares): (Option<VerifyForm>, Compares),
    max_verify_bytes: Option<u64>,
    refused: Vec<String>,
) -> ScsiInfo {
    let Inquiry { vendor, product, revision, .. } = pages.inquiry;
    let extended = pages.extended;
    ScsiInfo {
        vendor,
        product,
        revision,
        serial: pages.serial,
        name: pages.name,
        protection: profile.map(|profile| (profile.format(), profile.interval_exponent)),
        tags_made_by,
        checks: (extended.checks_guard, extended.checks_app_tag, extended.checks_ref_tag),
        verify: form.map(VerifyForm::name),
        max_verify_bytes,
        compares_blocks: compares.blocks,
        compares_one_block: compares.one_block,
        max_compare_and_write_blocks: 0,
        volatile_write_cache: pages.caching.map(|caching| caching.write_cache),
        unmap: pages.capacity.provisioning,
        unmapped_reads_zeroes: pages.capacity.reads_zeroes || pages.provisioning.read_zeroes & 1 == 1,
        rotation_rate: pages.characteristics.rotation_rate,
        refused,
    }
}
