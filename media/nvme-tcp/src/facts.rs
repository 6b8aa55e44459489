//! What is known about a namespace and its controller, and what went through.

use std::cell::Cell;

use sealblock_integrity::PiFormat;
use sealblock_protocols_nvme::nqn::Nqn;

use crate::PiSource;

/// What the target says of itself and of the namespace. Texts are as the target sent them, without what is not printable.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnectionInfo {
    /// The subsystem's name, as asked for.
    pub subsystem: Nqn,
    /// MN: model.
    pub model: String,
    /// SN: serial number.
    pub serial: String,
    /// FR: firmware revision.
    pub firmware: String,
    /// VS: major, minor and tertiary version of the base specification.
    pub version: (u16, u8, u8),
    /// CNTLID: the controller; changes when the device reconnects.
    pub controller_id: u16,
    /// NSID: the namespace.
    pub namespace: u32,
    /// The namespace's UUID, if it has one.
    pub uuid: Option<[u8; 16]>,
    /// NGUID, if it has one.
    pub nguid: Option<[u8; 16]>,
    /// EUI64, if it has one.
    pub eui64: Option<[u8; 8]>,
    /// The namespace's own protection information, whoever makes it.
    pub protection: Option<PiFormat>,
    /// Who makes the tags: [`PiSource::Host`] or [`PiSource::Target`]. `Auto` where there are none.
    pub tags: PiSource,
    /// I/O queues in use.
    pub queues: u16,
    /// Commands in flight on one queue.
    pub queue_depth: u16,
    /// PDU headers carry digests.
    pub header_digest: bool,
    /// Data carries digests.
    pub data_digest: bool,
    /// MDTS in bytes; `None` for no limit.
    pub max_transfer_bytes: Option<u64>,
    /// VSL in bytes; `None` for no limit or no such page.
    pub max_verify_bytes: Option<u64>,
    /// WZSL in bytes; `None` for no limit or no such page.
    pub max_write_zeroes_bytes: Option<u64>,
    /// In-capsule data in bytes.
    pub in_capsule_bytes: u32,
    /// Writes are volatile until a Flush (VWC, VWCNP).
    pub volatile_write_cache: bool,
    /// The target tells damaged blocks by Get LBA Status.
    pub get_lba_status: bool,
    /// The namespace may be in use by other controllers (NMIC).
    pub shared: bool,
}

/// What went through a device since it was opened, over all its connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Commands completed on I/O queues.
    pub commands: u64,
    /// Payload bytes of I/O commands that came: data, and tags that travel with it.
    pub received_bytes: u64,
    /// Payload bytes of I/O commands that were sent.
    pub sent_bytes: u64,
    /// Of the bytes that came, those that were summed for data digests; block guards come from the same pass.
    pub received_bytes_checksummed: u64,
    /// Of the bytes that were sent, those that were summed for data digests; not those whose guards were known.
    pub sent_bytes_checksummed: u64,
    /// Bytes of data whose guards were computed here apart from data digests.
    pub guard_bytes_checksummed: u64,
    /// Commands sent again after a status that allows it.
    pub retries: u64,
    /// Times that the connections were lost and set up again.
    pub reconnects: u64,
}

impl Counters {
    /// Bytes that this device summed, for whatever purpose, to move [`Counters::received_bytes`] and
    /// [`Counters::sent_bytes`]. Guards of data that is written are made before it gets here, and count there.
    pub fn bytes_checksummed(&self) -> u64 {
        self.received_bytes_checksummed + self.sent_bytes_checksummed + self.guard_bytes_checksummed
    }
}

/// Cells behind [`Counters`] that the device itself counts.
#[derive(Default)]
pub(crate) struct CounterCells {
    pub(crate) guard_bytes_checksummed: Cell<u64>,
    pub(crate) retries: Cell<u64>,
    pub(crate) reconnects: Cell<u64>,
}

pub(crate) fn add(cell: &Cell<u64>, more: u64) {
    cell.set(cell.get() + more);
}
