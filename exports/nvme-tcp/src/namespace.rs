//! A namespace: a device, its visibility to hosts, and the wire format of its blocks.

use std::sync::Arc;

use sealblock_block::{BadBlock, BadBlocks, RequestKind};
use sealblock_integrity::{
    Checks, GuardKind, PiFormat, PiPosition, ProtectionType, Sealed, ShapeError, Tags, Unverified,
};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_protocols_nvme::StatusCode;
use sealblock_protocols_nvme::identify::NamespaceFormat;
use sealblock_protocols_nvme::nvm::{BlockCommand, ProtectionInfo};
use sealblock_protocols_nvme_tcp::{BlockCrcs, Payload};
use sealblock_runtime_memory::Buffer;
use sealblock_units::{Extent, Lba};

use crate::command_error::CommandError;
use crate::state::NamespaceState;
use crate::subsystem::SetupError;
use crate::sums::BlockLayouts;

/// What hosts see of a device's protection information.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PiVisibility {
    /// Blocks without metadata. The target makes tags on writes and checks them on reads.
    #[default]
    Plain,
    /// Extended logical blocks in the device's format. PRACT of each command says whether the host or the target makes
    /// the tags.
    Protected,
}

/// A namespace of a [`crate::Subsystem`], the same on all cores. Each queue attaches to its device on its own core.
pub struct Namespace {
    pub(crate) device: SharedDevice,
    pub(crate) uuid: [u8; 16],
    pub(crate) state: Arc<NamespaceState>,
    visibility: PiVisibility,
    /// Set where guards and data digests use the same CRC.
    pub(crate) layouts: Option<BlockLayouts>,
}

impl Namespace {
    /// Returns the namespace of `device`, plain, with a state of its own. `uuid` is the identity by which hosts
    /// recognise it.
    pub fn new(device: SharedDevice, uuid: [u8; 16]) -> Namespace {
        let layouts = BlockLayouts::of(device.geometry());
        Namespace { device, uuid, state: Arc::default(), visibility: PiVisibility::Plain, layouts: layouts }
    }

    /// Returns the same namespace with this state. All namespaces of one device, at the same time or one after the
    /// other, must have one state: it holds the damage list.
    pub fn with_state(mut self, state: Arc<NamespaceState>) -> Namespace {
        self.state = state;
        self
    }

    /// Returns the same namespace with the new size of its device.
    pub(crate) fn resized(&self, device: SharedDevice) -> Namespace {
        let layouts = BlockLayouts::of(device.geometry());
        Namespace {
            device,
            uuid: self.uuid,
            state: Arc::clone(&self.state),
            visibility: self.visibility,
            layouts: layouts,
        }
    }

    /// The state that a scrub, a repair or another export reports to.
    pub fn state(&self) -> Arc<NamespaceState> {
        Arc::clone(&self.state)
    }

    /// Returns the same namespace with this visibility.
    ///
    /// # Errors
    /// [`SetupError::NotProtected`] if hosts are to see protection information and the device has none in an NVMe
    /// format.
    pub fn with_visibility(mut self, visibility: PiVisibility) -> Result<Namespace, SetupError> {
        let format = self.device.geometry().protection.filter(|format| format.guard() != GuardKind::IpChecksum);
        if visibility == PiVisibility::Protected && format.is_none() {
            return Err(SetupError::NotProtected);
        }
        self.visibility = visibility;
        Ok(self)
    }

    /// The protection information that commands carry; `None` on a plain namespace.
    pub(crate) fn format(&self) -> Option<PiFormat> {
        match self.visibility {
            PiVisibility::Plain => None,
            PiVisibility::Protected => self.device.geometry().protection,
        }
    }

    /// The format of its blocks, for Identify.
    pub(crate) fn wire_format(&self) -> NamespaceFormat {
        let format = self.format();
        NamespaceFormat {
            block_size: self.device.geometry().block_size,
            metadata_bytes: format.map_or(0, PiFormat::tuple_bytes),
            extended: format.is_some(),
            protection: format.map(|format| (format, PiPosition::Last)),
            storage_tag_mask: format.map_or(0, PiFormat::storage_tag_mask),
        }
    }

    /// Bytes that a command moves over the wire.
    pub(crate) fn wire_bytes(&self, blocks: &BlockCommand) -> u64 {
        let metadata = match self.format() {
            Some(format) if !blocks.protection.pract => format.tuple_bytes() as u64,
            _ => 0,
        };
        blocks.extent.bytes(self.device.geometry().block_size) + blocks.extent.len() * metadata
    }

    /// The checks of stored blocks that a command asks for.
    pub(crate) fn checks(&self, blocks: &BlockCommand) -> Checks {
        self.checks_of(&blocks.protection, blocks.extent.start())
    }

    /// The checks of stored blocks from `start` on.
    pub(crate) fn checks_of(&self, protection: &ProtectionInfo, start: Lba) -> Checks {
        match (self.format(), self.device.geometry().protection) {
            (Some(format), _) => protection.checks(format, format.storage_tag_mask()),
            (None, Some(format)) => Checks::full(format, start),
            (None, None) => Checks::NONE,
        }
    }

    /// Returns the sealed blocks of a Write: sealed here, or made by the host and checked here.
    pub(crate) fn seal(
        &self,
        blocks: &BlockCommand,
        data: Buffer,
        crcs: Option<&BlockCrcs>,
    ) -> Result<Sealed, CommandError> {
        let geometry = self.device.geometry();
        let initial_ref_tag = blocks.extent.start().get();
        let tags = match self.format() {
            None => Tags { app_tag: 0, storage_tag: 0, initial_ref_tag },
            Some(_) if !blocks.protection.pract => return self.verify_wire(blocks, &data, crcs, &self.checks(blocks)),
            // Type 1 requires this reference tag, and hosts that ask for no check also leave the field empty.
            Some(format) if format.protection() == ProtectionType::Type1 => {
                Tags { initial_ref_tag, ..blocks.protection.tags(format) }
            }
            Some(format) => blocks.protection.tags(format),
        };
        let (data, size) = (data.freeze(), geometry.block_size);
        Ok(match (geometry.protection, self.guards(crcs)) {
            (Some(format), Some(guards)) => Sealed::seal_with_crcs(data, size, format, &tags, guards),
            (protection, _) => Sealed::seal(data, size, protection, &tags),
        })
    }

    /// Separates the data and tuples of extended blocks from the wire, and checks them.
    pub(crate) fn verify_wire(
        &self,
        blocks: &BlockCommand,
        data: &[u8],
        crcs: Option<&BlockCrcs>,
        checks: &Checks,
    ) -> Result<Sealed, CommandError> {
        let size = self.device.geometry().block_size;
        let wrong_length = |_: ShapeError| CommandError::from(StatusCode::DATA_SGL_LENGTH_INVALID);
        let unverified = match self.format() {
            Some(format) => Unverified::from_interleaved(data, size, format).map_err(wrong_length)?,
            None => return Ok(Sealed::seal(Buffer::copy_from(data).freeze(), size, None, &NO_TAGS)),
        };
        let checked = match self.guards(crcs) {
            Some(guards) => unverified.verify_with_crcs(checks, guards),
            None => unverified.verify(checks),
        };
        checked.map_err(|bad| {
            let bad_blocks = bad.iter().map(|bad| BadBlock::of_mismatch(blocks.extent.start(), bad)).collect();
            let bad_blocks = BadBlocks::new(bad_blocks).expect("a failed check names a block");
            CommandError::of_error(&bad_blocks.into(), RequestKind::Write)
        })
    }

    /// Returns the payload of a Read: the device's slices, with tuples between them if the host asked for them.
    pub(crate) fn payload(&self, blocks: &BlockCommand, read: Sealed) -> Payload {
        let crcs = self.verified_crcs(blocks, &read);
        let payload = match self.format() {
            Some(format) if !blocks.protection.pract => {
                let (size, tuple) = (read.size().bytes(), format.tuple_bytes());
                Payload::new((0..read.blocks()).flat_map(|i| {
                    [read.data().slice(i * size..(i + 1) * size), read.tags().slice(i * tuple..(i + 1) * tuple)]
                }))
            }
            _ => Payload::from(read.into_parts().0),
        };
        match crcs {
            Some(crcs) => payload.with_crcs(crcs),
            None => payload,
        }
    }

    /// Bytes of data of these blocks, without metadata.
    pub(crate) fn data_bytes(&self, extent: Extent) -> u64 {
        extent.bytes(self.device.geometry().block_size)
    }
}

pub(crate) const NO_TAGS: Tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: 0 };
