//! A namespace: a device, what hosts see of it, and the wire format of its blocks; and the state of the device that all
//! its namespaces share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use sealblock_block::{BadBlock, DamageSource, ErrorKind, Expectations, Geometry, Outcome, RequestKind, WriteData};
use sealblock_integrity::{
    Checks, GuardKind, PiFormat, PiPosition, ProtectionType, Sealed, ShapeError, Tags, Unsealed, Unverified,
};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_protocols_nvme::identify::NamespaceFormat;
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_protocols_nvme::nvm::{BlockCommand, IoCommand, ProtectionInfo};
use sealblock_protocols_nvme::{Command, StatusCode};
use sealblock_protocols_nvme_tcp::{BlockCrcs, BlockLayout, Payload};
use sealblock_runtime_memory::Buffer;
use sealblock_units::Extent;

use crate::model::async_events::AsyncEvents;
use crate::model::checksums::BlockLayouts;
use crate::model::command_error::CommandError;
use crate::model::damage::DamageHandle;
use crate::model::damage_list::{DamageList, RequestSummary};

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

/// Lists the identity of a device, as long as it is open, and those of the devices at other targets that it lies on now.
pub type DeviceIdentities = Arc<dyn Fn() -> Vec<[u8; 16]> + Send + Sync>;

/// A namespace of a [`crate::Subsystem`], the same on all cores. Each queue attaches to its device on its own core.
pub struct Namespace {
    pub(crate) device: SharedDevice,
    pub(crate) uuid: [u8; 16],
    /// The identity of the namespace at another target that this one is.
    pub(crate) origin: Option<[u8; 16]>,
    /// What sealblock hosts compare it by with other namespaces.
    pub(crate) identities: DeviceIdentities,
    /// A number that is another one if something else is in the place of what it lies on.
    pub(crate) content: Option<u64>,
    pub(crate) state: Arc<NamespaceState>,
    visibility: PiVisibility,
    /// Set if guards and data digests use the same CRC.
    pub(crate) layouts: Option<BlockLayouts>,
}

impl Namespace {
    /// Returns a plain namespace of `device`, with its own state. `uuid` is the identity by which hosts recognise it.
    pub fn new(device: SharedDevice, uuid: [u8; 16]) -> Namespace {
        let layouts = BlockLayouts::of(device.geometry());
        let identities: DeviceIdentities = Arc::new(Vec::new);
        Namespace {
            device,
            uuid,
            origin: None,
            identities,
            content: None,
            state: Arc::default(),
            visibility: PiVisibility::Plain,
            layouts,
        }
    }

    /// Returns the same namespace with this state. All namespaces of one device, at the same time or one after the
    /// other, must share one state, which contains the damage list.
    pub fn with_state(mut self, state: Arc<NamespaceState>) -> Namespace {
        self.state = state;
        self
    }

    /// Returns the same namespace with these identities: sealblock hosts take two namespaces for one device if they share one.
    /// The `origin` is that of the namespace at another target that this one is, block for block, if it is one.
    pub fn with_identities(self, origin: Option<[u8; 16]>, identities: DeviceIdentities) -> Namespace {
        Namespace { origin, identities, ..self }
    }

    /// Returns the same namespace with this number, which is another one if something else is in the place of what it lies
    /// on. Sealblock hosts that reconnect do not use one with another number.
    pub fn with_content(self, content: Option<u64>) -> Namespace {
        Namespace { content, ..self }
    }

    /// Returns the same namespace with the new size of its device.
    pub(crate) fn resized(&self, device: SharedDevice) -> Namespace {
        Namespace {
            layouts: BlockLayouts::of(device.geometry()),
            device,
            identities: Arc::clone(&self.identities),
            state: Arc::clone(&self.state),
            uuid: self.uuid,
            origin: self.origin,
            content: self.content,
            visibility: self.visibility,
        }
    }

    /// The state to which a scrub, a repair or another export reports.
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

    /// The checks of the host's tuples that a command requests.
    fn wire_checks(&self, blocks: &BlockCommand) -> Checks {
        self.format().map_or(Checks::NONE, |format| blocks.protection.checks(format, format.storage_tag_mask()))
    }

    /// What a command expects of stored blocks, in the fields that PRCHK selects. On a plain namespace, nothing.
    pub(crate) fn expectations(&self, protection: &ProtectionInfo) -> Expectations {
        let checks = |format: PiFormat| protection.checks(format, format.storage_tag_mask());
        self.format().map_or(Expectations::NONE, |format| Expectations::new(checks(format)))
    }

    /// Returns the blocks of a Write: with tags from the host, which are checked here, or with tags that are to be
    /// made. The device makes these when it is best for it, unless the CRCs of the data digest provide them without
    /// another pass over the data.
    pub(crate) fn seal(
        &self,
        blocks: &BlockCommand,
        data: Buffer,
        crcs: Option<&BlockCrcs>,
    ) -> Result<WriteData, CommandError> {
        let geometry = self.device.geometry();
        let initial_ref_tag = blocks.extent.start().get();
        let tags = match self.format() {
            None => Tags { app_tag: 0, storage_tag: 0, initial_ref_tag },
            Some(_) if !blocks.protection.pract => {
                return self.verify_wire(blocks, &data, crcs).map(WriteData::from);
            }
            // Type 1 requires this reference tag, even if the command requests no check of it, and then hosts leave the
            // field empty.
            Some(format) if format.protection() == ProtectionType::Type1 => {
                Tags { initial_ref_tag, ..blocks.protection.tags(format) }
            }
            Some(format) => blocks.protection.tags(format),
        };
        let (data, size) = (data.freeze(), geometry.block_size);
        Ok(match (geometry.protection, self.guards(crcs)) {
            (Some(format), Some(guards)) => Sealed::seal_with_crcs(data, size, format, &tags, guards).into(),
            (protection, _) => Unsealed::new(data, size, protection, tags).into(),
        })
    }

    /// Separates data and tuples of extended blocks from the wire, and checks them as the command requests. A mismatch
    /// concerns what the host has sent, and is not damage.
    pub(crate) fn verify_wire(
        &self,
        blocks: &BlockCommand,
        data: &[u8],
        crcs: Option<&BlockCrcs>,
    ) -> Result<Sealed, CommandError> {
        let (size, checks) = (self.device.geometry().block_size, self.wire_checks(blocks));
        let wrong_length = |_: ShapeError| CommandError::from(StatusCode::DATA_SGL_LENGTH_INVALID);
        let unverified = match self.format() {
            Some(format) => Unverified::from_interleaved(data, size, format).map_err(wrong_length)?,
            None => return Ok(Sealed::seal(Buffer::copy_from(data).freeze(), size, None, &NO_TAGS)),
        };
        let checked = match self.guards(crcs) {
            Some(guards) => unverified.verify_with_crcs(&checks, guards),
            None => unverified.verify(&checks),
        };
        checked.map_err(|bad| {
            let first = bad.first().expect("a failed check names a block");
            CommandError::of_error(&ErrorKind::unexpected(blocks.extent.start(), first).into(), RequestKind::Write)
        })
    }

    /// Returns the payload of a Read: the device's slices, with tuples between them if the host requests them.
    pub(crate) fn payload(&self, blocks: &BlockCommand, read: Sealed) -> Payload {
        let crcs = self.verified_crcs(blocks, &read);
        let payload = match self.format() {
            Some(_) if !blocks.protection.pract => Payload::new(read.interleaved()),
            _ => Payload::from(&read),
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

/// The highest namespace identifier (NN), and the maximum number of namespaces (MNAN). It is the same for every
/// subsystem at all times, because hosts read it once and must find namespaces that are added later.
pub const MAX_NSID: u32 = 1024;

/// The status of a command for an identifier without a namespace: a valid identifier is inactive, which is an invalid
/// field; others are invalid (Base 2.x, "NSID and Namespace Usage"). No command except Flush accepts the broadcast
/// value.
pub(crate) const fn inactive(nsid: u32) -> StatusCode {
    match nsid {
        1..=MAX_NSID => StatusCode::INVALID_FIELD,
        _ => StatusCode::INVALID_NAMESPACE,
    }
}

/// Why a subsystem or namespace is invalid.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SetupError {
    /// The identifier is 0, or above [`MAX_NSID`].
    #[error("invalid namespace identifier {0}: not from 1 to {MAX_NSID}")]
    Nsid(u32),
    /// The identifier is in use.
    #[error("duplicate namespace {0}")]
    DuplicateNsid(u32),
    /// The device has no protection information in an NVMe format.
    #[error("the device has no protection information in an NVMe format")]
    NotProtected,
    /// The name is that of the discovery subsystem, which every target has.
    #[error("reserved name {0}: it is the discovery subsystem")]
    Reserved(Nqn),
    /// The name is in use.
    #[error("duplicate subsystem {0}")]
    DuplicateNqn(Nqn),
    /// There is no subsystem of this name.
    #[error("no subsystem {0}")]
    UnknownNqn(Nqn),
    /// There is no namespace of this identifier.
    #[error("no namespace {0}")]
    UnknownNsid(u32),
}

impl Namespace {
    /// Returns how the data of a command is divided into blocks, if the CRCs of blocks are useful.
    pub(crate) fn block_layout(&self, blocks: &BlockCommand) -> Option<BlockLayout> {
        let layouts = self.layouts.as_ref()?;
        let has_tags = self.format().is_some() && !blocks.protection.pract;
        Some(if has_tags { layouts.tagged.clone() } else { layouts.data_only.clone() })
    }

    /// The same for a command of any kind.
    pub(crate) fn block_layout_of(&self, command: &Command) -> Option<BlockLayout> {
        self.layouts.as_ref()?;
        match IoCommand::decode(command) {
            Ok(IoCommand::Write(blocks) | IoCommand::Compare(blocks)) => self.block_layout(&blocks),
            _ => None,
        }
    }

    /// Returns the CRCs of the blocks that were read, if their guards are CRCs that the device compared with the data.
    pub(crate) fn verified_crcs(&self, blocks: &BlockCommand, read: &Sealed) -> Option<BlockCrcs> {
        Some(BlockCrcs { layout: self.block_layout(blocks)?, guards: read.block_crcs()?.collect() })
    }

    /// Returns these CRCs as guards, if this namespace's guards are such CRCs.
    pub(crate) fn guards<'a>(&self, crcs: Option<&'a BlockCrcs>) -> Option<&'a [u32]> {
        self.layouts.as_ref()?;
        crcs.map(|crcs| &*crcs.guards)
    }

    /// Bytes of data of a Write whose guards are computed here, in addition to the digest.
    pub(crate) fn guard_bytes(&self, blocks: &BlockCommand, crcs: Option<&BlockCrcs>) -> u64 {
        let is_made = self.format().is_none() || blocks.protection.pract;
        let is_asked = self.device.geometry().protection.is_some() && (is_made || self.wire_checks(blocks).guard);
        if is_asked && self.guards(crcs).is_none() { self.data_bytes(blocks.extent) } else { 0 }
    }

    /// Bytes of data of a Read whose guards the device compares: all of them, whatever the host requests.
    pub(crate) fn checked_bytes(&self, blocks: &BlockCommand) -> u64 {
        if self.device.geometry().protection.is_some() { self.data_bytes(blocks.extent) } else { 0 }
    }
}

/// The shared state of all [`crate::Namespace`]s of one device. A scrub, a repair or another export reports here what
/// it finds out about the device.
#[derive(Default)]
pub struct NamespaceState {
    pub(crate) damage_list: Arc<DamageList>,
    is_degraded: AtomicBool,
    subscribers: Mutex<Vec<(u32, Weak<AsyncEvents>)>>,
}

impl NamespaceState {
    /// The device's known bad blocks, as a handle that keeps nothing else alive.
    pub fn damage(&self) -> DamageHandle {
        DamageHandle::of(&self.damage_list)
    }

    /// Makes the known bad blocks of the devices at the bottom of its stack, as they are at any time, those of this
    /// device.
    pub fn set_damage_source(&self, source: Arc<dyn DamageSource>) {
        self.damage_list.set_source(source);
    }

    /// Adds blocks that were found bad, for example by a scrub, to the damage list, and reports them to hosts.
    pub fn report_damage(&self, bad_blocks: &[BadBlock]) {
        if self.damage_list.record(bad_blocks) {
            self.notify(|_, events| events.damage_found());
        }
    }

    /// Records the result of a check of all copies of `extent` on a device with this geometry: the blocks that it found
    /// good are removed from the damage list. `bad_blocks` are in the order of their LBAs.
    pub fn report_check(&self, geometry: &Geometry, extent: Extent, bad_blocks: &[BadBlock], is_complete: bool) {
        let summary = RequestSummary::of_check(extent, geometry);
        if self.damage_list.record_check(extent, &summary, bad_blocks) {
            self.notify(|_, events| events.damage_found());
        }
        if is_complete {
            self.damage_list.mark_checked(extent, &summary);
        }
    }

    /// Sets whether copies of the device are offline or out of sync. Hosts see it in SMART / Health Information.
    pub fn report_degraded(&self, is_degraded: bool) {
        let was = self.is_degraded.swap(is_degraded, Ordering::Relaxed);
        if is_degraded && !was {
            self.notify(|_, events| events.reliability_degraded());
        }
    }

    /// True if copies of the device are offline or out of sync.
    pub(crate) fn is_degraded(&self) -> bool {
        self.is_degraded.load(Ordering::Relaxed)
    }

    /// Drops bad blocks beyond the device's new end. [`crate::Target::resize_namespace`] reports the new size to hosts.
    pub fn report_resized(&self, capacity_blocks: u64) {
        self.damage_list.resize(capacity_blocks);
    }

    /// Reports to hosts that the namespace's Identify data changed.
    pub fn report_changed(&self) {
        self.notify(|nsid, events| events.namespace_changed(nsid));
    }

    /// Updates the damage list with the outcome of a request, and reports new damage to hosts.
    pub(crate) fn record(&self, summary: &RequestSummary, outcome: &Outcome) {
        if self.damage_list.update(summary, outcome) {
            self.notify(|_, events| events.damage_found());
        }
    }

    /// Subscribes a controller to events; `nsid` is its identifier for the namespace.
    pub(crate) fn subscribe(&self, nsid: u32, events: &Arc<AsyncEvents>) {
        let mut watchers = self.subscribers.lock().unwrap_or_else(PoisonError::into_inner);
        // The same controller subscribes again when namespaces have changed.
        watchers.retain(|(id, other)| other.strong_count() > 0 && !(*id == nsid && is_of(other, events)));
        watchers.push((nsid, Arc::downgrade(events)));
    }

    /// Cancels the subscription of a controller under this identifier.
    pub(crate) fn unsubscribe(&self, nsid: u32, events: &Arc<AsyncEvents>) {
        let mut watchers = self.subscribers.lock().unwrap_or_else(PoisonError::into_inner);
        watchers.retain(|(id, other)| other.strong_count() > 0 && !(*id == nsid && is_of(other, events)));
    }

    fn notify(&self, report: impl Fn(u32, &AsyncEvents)) {
        let watchers = self.subscribers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (nsid, events) in watchers.iter().filter_map(|(nsid, events)| Some((*nsid, events.upgrade()?))) {
            report(nsid, &events);
        }
    }
}

fn is_of(watcher: &Weak<AsyncEvents>, events: &Arc<AsyncEvents>) -> bool {
    std::ptr::eq(watcher.as_ptr(), Arc::as_ptr(events))
}
