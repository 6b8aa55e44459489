//! A namespace: a device, how hosts see it, and what its blocks are on the wire.

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
    /// Extended logical blocks in the device's format. Hosts say per command (PRACT) who makes the tags.
    Protected,
}

/// A namespace of a [`crate::Subsystem`], the same on all cores. Queues reach its device through an attachment of their own
/// core.
pub struct Namespace {
    pub(crate) device: SharedDevice,
    pub(crate) uuid: [u8; 16],
    pub(crate) state: Arc<NamespaceState>,
    visibility: PiVisibility,
    /// Where guards and data digests share their sums.
    pub(crate) layouts: Option<BlockLayouts>,
}

impl Namespace {
    /// The namespace of `device`, plain, with a state of its own. `uuid` is its identity, which hosts use to recognise it.
    pub fn new(device: SharedDevice, uuid: [u8; 16]) -> Namespace {
        let layouts = BlockLayouts::of(device.geometry());
        Namespace { device, uuid, state: Arc::default(), visibility: PiVisibility::Plain, layouts: layouts }
    }

    /// The same namespace with this state. Namespaces of one device, at the same time or one after the other, are to have
    /// one state: it is where their damage is known.
    pub fn with_state(mut self, state: Arc<NamespaceState>) -> Namespace {
        self.state = state;
        self
    }

    /// The same namespace, whose device has another size now.
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

    /// What is shared of the namespace, for those who find or repair damage by other ways than its commands.
    pub fn state(&self) -> Arc<NamespaceState> {
        Arc::clone(&self.state)
    }

    /// The same namespace, shown so.
    ///
    /// # Errors
    /// [`SetupError::NotProtected`] if its protection information is to be shown and it has none that NVMe knows.
    pub fn with_visibility(mut self, visibility: PiVisibility) -> Result<Namespace, SetupError> {
        let format = self.device.geometry().protection.filter(|format| format.guard() != GuardKind::IpChecksum);
        if visibility == PiVisibility::Protected && format.is_none() {
            return Err(SetupError::NotProtected);
        }
        self.visibility = visibility;
        Ok(self)
    }

    /// The protection information that commands are about: none on a plain namespace.
    pub(crate) fn format(&self) -> Option<PiFormat> {
        match self.visibility {
            PiVisibility::Plain => None,
            PiVisibility::Protected => self.device.geometry().protection,
        }
    }

    /// What Identify says of its blocks.
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

    /// Bytes on the wire of the blocks of a command that moves them.
    pub(crate) fn wire_bytes(&self, blocks: &BlockCommand) -> u64 {
        let metadata = match self.format() {
            Some(format) if !blocks.protection.pract => format.tuple_bytes() as u64,
            _ => 0,
        };
        blocks.extent.bytes(self.device.geometry().block_size) + blocks.extent.len() * metadata
    }

    /// What is checked where the blocks are stored.
    pub(crate) fn checks(&self, blocks: &BlockCommand) -> Checks {
        self.checks_of(&blocks.protection, blocks.extent.start())
    }

    /// What is checked of the blocks from `start` on.
    pub(crate) fn checks_of(&self, protection: &ProtectionInfo, start: Lba) -> Checks {
        match (self.format(), self.device.geometry().protection) {
            (Some(format), _) => protection.checks(format, format.storage_tag_mask()),
            (None, Some(format)) => Checks::full(format, start),
            (None, None) => Checks::NONE,
        }
    }

    /// The blocks of a Write as the device wants them: sealed here, or checked here.
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
            // Type 1 is defined by this reference tag, and hosts that leave the check out also leave the field empty.
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

    /// Extended blocks from the wire, taken apart and checked.
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

    /// Blocks that were read, as they go to the host: the device's slices, with their tags between them if the host asked.
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

    /// Bytes of data of these blocks, metadata not counted.
    pub(crate) fn data_bytes(&self, extent: Extent) -> u64 {
        extent.bytes(self.device.geometry().block_size)
    }
}

pub(crate) const NO_TAGS: Tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: 0 };
