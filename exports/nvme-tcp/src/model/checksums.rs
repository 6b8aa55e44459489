//! CRCs that serve both as guards and in data digests, and the counters of bytes whose CRC was computed.
//!
//! On a device with the 32-bit guard, the CRC-32C of each block is its guard; combined with the CRCs of other blocks
//! and of the tuples between them, it is the data digest. CRCs that were computed for a digest make or check the guards
//! of a Write; guards that the device compared with the data make the digest of a Read.
//!
//! Invariant: a CRC is reused only if it was computed from these data: on receipt, in the pass that checked the digest,
//! or by the device that compared every guard ([`Sealed::block_crcs`](sealblock_integrity::Sealed::block_crcs)). Any
//! other CRC is recomputed.

use sealblock_block::Geometry;
use sealblock_integrity::GuardKind;
use sealblock_protocols_nvme_tcp::BlockLayout;
use sealblock_protocols_nvme_tcp::target::Counters;

use crate::model::sync::Counter;

/// The layouts of a namespace's blocks on the wire, if guard and digest use the same CRC.
pub(crate) struct BlockLayouts {
    /// Data only.
    pub(crate) data_only: BlockLayout,
    /// Each block's data, then its tuple.
    pub(crate) tagged: BlockLayout,
}

impl BlockLayouts {
    /// Returns `None` if there is no guard, or if it is not the CRC of the digest.
    pub(crate) fn of(geometry: &Geometry) -> Option<BlockLayouts> {
        let format = geometry.protection.filter(|format| format.guard() == GuardKind::Crc32c)?;
        let data_bytes = geometry.block_size.bytes();
        let tagged = BlockLayout::new(data_bytes, format.tuple_bytes())?;
        Some(BlockLayouts { data_only: BlockLayout::new(data_bytes, 0)?, tagged })
    }
}

/// Bytes that the I/O queues of a subsystem moved, and bytes whose CRC was computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ChecksumStats {
    /// Payload bytes that were received: data, and tags if they are transferred.
    pub received_bytes: u64,
    /// Of those, bytes whose CRC was computed for data digests; guards may come from the same pass.
    pub received_bytes_summed: u64,
    /// Payload bytes that were sent.
    pub sent_bytes: u64,
    /// Of those, bytes whose CRC was computed for data digests, not counting blocks whose guards were known.
    pub sent_bytes_summed: u64,
    /// Bytes of data whose guards were computed for Writes, separately from data digests.
    pub guard_bytes_summed: u64,
    /// Bytes of data whose guards devices compared for Reads, which takes another pass.
    pub stored_bytes_checked: u64,
}

impl ChecksumStats {
    /// Bytes whose CRC was computed for any purpose, at the target and by its devices for Reads.
    pub fn bytes_summed(&self) -> u64 {
        self.received_bytes_summed + self.sent_bytes_summed + self.guard_bytes_summed + self.stored_bytes_checked
    }
}

/// The counters of one queue for [`ChecksumStats`].
#[derive(Default)]
pub(crate) struct ChecksumCounters {
    received_bytes: Counter,
    received_bytes_summed: Counter,
    sent_bytes: Counter,
    sent_bytes_summed: Counter,
    pub(crate) guard_bytes_summed: Counter,
    pub(crate) stored_bytes_checked: Counter,
}

impl ChecksumCounters {
    /// Copies the counters of the connection.
    pub(crate) fn update(&self, counters: &Counters) {
        self.received_bytes.set(counters.received.payload_bytes);
        self.received_bytes_summed.set(counters.received.payload_bytes_checksummed);
        self.sent_bytes.set(counters.payload_bytes_sent);
        self.sent_bytes_summed.set(counters.payload_bytes_sent_checksummed);
    }

    /// Adds these counters to earlier totals.
    pub(crate) fn add_to(&self, before: ChecksumStats) -> ChecksumStats {
        ChecksumStats {
            received_bytes: before.received_bytes + self.received_bytes.get(),
            received_bytes_summed: before.received_bytes_summed + self.received_bytes_summed.get(),
            sent_bytes: before.sent_bytes + self.sent_bytes.get(),
            sent_bytes_summed: before.sent_bytes_summed + self.sent_bytes_summed.get(),
            guard_bytes_summed: before.guard_bytes_summed + self.guard_bytes_summed.get(),
            stored_bytes_checked: before.stored_bytes_checked + self.stored_bytes_checked.get(),
        }
    }
}
