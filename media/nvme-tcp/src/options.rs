//! How a namespace is used, the target's information about it, and what was transferred.

use std::cell::Cell;
use std::time::Duration;

use sealblock_integrity::PiFormat;
use sealblock_media_nvme::{MetadataSupport, PiSource, ProfileOptions};
use sealblock_protocols_nvme::extensions::ExtensionsLog;
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_runtime_reactor::net::Reconnect;
use sealblock_transport::{ListedIdentities, QUIESCE, random_id};

/// How a namespace is used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// HOSTNQN: the name of this host, by which targets grant it access.
    pub host_nqn: Nqn,
    /// HOSTID: the identifier of this host, the same for all its connections.
    pub host_id: [u8; 16],
    /// I/O queues, one connection each, all on this reactor; at least 1. The target may grant fewer.
    pub queues: u16,
    /// Commands in flight on one queue; at least 1. Further ones wait in order. Limited to what CAP.MQES and MAXCMD
    /// allow.
    pub queue_depth: u16,
    /// True if PDU headers must have digests; a target that does not agree is refused.
    pub header_digest: bool,
    /// True if data must have digests; a target that does not agree is refused.
    pub data_digest: bool,
    /// Who makes tags.
    pub protection: PiSource,
    /// Maximum bytes of data in one transfer, limited to the target's MDTS; at least one block.
    pub transfer_bytes: u32,
    /// Time limit of one attempt: name resolution, connections and everything up to the first I/O.
    pub connect_timeout: Duration,
    /// Time limit of one command; the connection is then reset. Detected up to an eighth of it late.
    pub request_timeout: Duration,
    /// KATO: the target drops this host after this long without a command. Keep Alive is sent twice as often. Zero for
    /// none.
    pub keep_alive: Duration,
    /// Time that [`crate::NvmeTcpDevice::close`] allows for the target to shut the controller down.
    pub shutdown_timeout: Duration,
    /// How often one request is sent again after a status that allows it, without counting lost connections.
    pub retries: u8,
    /// Connections that one request may lose before it fails: a request that crashes its target must not be sent
    /// forever.
    pub max_connection_losses: u8,
    /// Limits of reconnecting after a lost connection.
    pub reconnect: Reconnect,
    /// Time after which a target executes no more commands of a controller whose connections this host has closed; it
    /// is at least [`Options::keep_alive`]. Until then, changes that overlap unanswered ones of that controller wait,
    /// unless the target offers to end it (`docs/formats/vendor-extensions.md`).
    pub quiesce: Duration,
}

impl Options {
    /// Time after which a target executes no more commands of an ended controller.
    pub(crate) fn quiesce(&self) -> Duration {
        self.quiesce.max(self.keep_alive)
    }

    /// The options that the profile of a namespace depends on.
    pub(crate) fn profile(&self) -> ProfileOptions {
        let (source, transfer_bytes) = (self.protection, self.transfer_bytes);
        ProfileOptions { source, metadata: MetadataSupport::Interleaved, transfer_bytes }
    }
}

impl Default for Options {
    /// One queue of 128 commands, no digests, tags made here where the namespace has any, transfers of 1 MiB, 10 s to
    /// connect, 30 s for a request, 30 s keep alive, 5 s to shut down, 3 retries, 4 losses, 30 s for a target to end a
    /// controller. The host's name and identifier are random, and the same for the whole process; a host that targets
    /// must recognise sets its own.
    fn default() -> Options {
        let host_id = process_id();
        Options {
            host_nqn: Nqn::from_uuid(host_id),
            host_id,
            queues: 1,
            queue_depth: 128,
            header_digest: false,
            data_digest: false,
            protection: PiSource::Auto,
            transfer_bytes: 1 << 20,
            connect_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(30),
            keep_alive: Duration::from_secs(30),
            shutdown_timeout: Duration::from_secs(5),
            retries: 3,
            max_connection_losses: 4,
            reconnect: Reconnect::default(),
            quiesce: QUIESCE,
        }
    }
}

/// A version 4 UUID that is the same for the whole process.
fn process_id() -> [u8; 16] {
    static ID: std::sync::OnceLock<[u8; 16]> = std::sync::OnceLock::new();
    *ID.get_or_init(|| {
        let mut id = random_id();
        id[6] = id[6] & 0x0F | 0x40;
        id[8] = id[8] & 0x3F | 0x80;
        id
    })
}

/// A namespace whose target lists more identities cannot be opened.
pub const MAX_IDENTITIES: u32 = ExtensionsLog::MAX_IDENTITIES;

/// The target's information about itself and the namespace. Texts are the target's, without unprintable characters.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnectionInfo {
    /// The requested subsystem's name.
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
    /// The identity of the namespace at another target that it is, where its target says so.
    pub origin: Option<[u8; 16]>,
    /// The identities of its device, as long as its target has it open, and of all at other targets that this lies on; none if the
    /// target lists none.
    pub identities: ListedIdentities,
    /// A number that is another one if something else is in the place of what it lies on, where its target says it.
    pub content: Option<u64>,
    /// The namespace's own protection information, whether host or target generates it.
    pub protection: Option<PiFormat>,
    /// Generator of the tags: [`PiSource::Host`] or [`PiSource::Target`]; `Auto` without tags.
    pub tags: PiSource,
    /// I/O queues in use.
    pub queues: u16,
    /// Commands in flight on one queue.
    pub queue_depth: u16,
    /// PDU headers have digests.
    pub header_digest: bool,
    /// Data have digests.
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
    /// The target supports Get LBA Status, which lists bad blocks.
    pub get_lba_status: bool,
    /// The namespace may be in use by other controllers (NMIC).
    pub shared: bool,
}

/// What a device transferred since it was opened, over all its connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Commands completed on I/O queues.
    pub commands: u64,
    /// Payload bytes of I/O commands that were received: data, and tags transferred with them.
    pub received_bytes: u64,
    /// Payload bytes of I/O commands that were sent.
    pub sent_bytes: u64,
    /// Received bytes over which a data digest was computed; the same pass yields the block guards.
    pub received_bytes_checksummed: u64,
    /// Sent bytes over which a data digest was computed; without those whose guards were known.
    pub sent_bytes_checksummed: u64,
    /// Bytes of data whose guards were computed separately from data digests.
    pub guard_bytes_checksummed: u64,
    /// Commands sent again after a status that allows it.
    pub retries: u64,
    /// How often the connections were lost and set up again.
    pub reconnects: u64,
}

impl Counters {
    /// Bytes over which this device computed any CRC, for [`Counters::received_bytes`] and [`Counters::sent_bytes`].
    /// The creator of a Write computes its guards, so they are not counted here.
    pub fn bytes_checksummed(&self) -> u64 {
        self.received_bytes_checksummed + self.sent_bytes_checksummed + self.guard_bytes_checksummed
    }
}

/// Cells behind [`Counters`] that the device itself counts.
#[derive(Default)]
pub(crate) struct CounterCells {
    pub(crate) guard_bytes_checksummed: Cell<u64>,
    pub(crate) retries: Cell<u64>,
}

pub(crate) fn add(cell: &Cell<u64>, more: u64) {
    cell.set(cell.get() + more);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_one_host_with_a_valid_name() {
        let options = Options::default();
        assert_eq!(options, Options::default());
        assert_eq!(options.host_nqn.as_str().parse::<Nqn>().unwrap(), options.host_nqn);
    }
}
