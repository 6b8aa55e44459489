//! How an export is used, the server's information about it, and what was transferred.

use std::cell::Cell;
use std::time::Duration;

use sealblock_protocols_nbd::client::{BlockSizes, ExportInfo, ReplyStyle};
use sealblock_protocols_nbd::wire::transmission;
use sealblock_runtime_reactor::net::Reconnect;
use sealblock_transport::{ListedIdentities, QUIESCE};

/// How an export is used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// Connections, all on this reactor; at least 1. More than one is used only if the server reports that several see
    /// each other's writes and flushes (CAN_MULTI_CONN).
    pub connections: u16,
    /// Requests in flight on one connection; at least 1. Further ones wait in order.
    pub queue_depth: u16,
    /// Maximum bytes of data in one request, limited to the server's largest block; at least one block, at most 32 MiB.
    pub transfer_bytes: u32,
    /// The smallest blocks that the server supports: a block that is lost then takes no others with it. Otherwise
    /// blocks of 4096 bytes, if the export's size is a multiple of that.
    pub small_blocks: bool,
    /// Maximum bytes that one request zeroes or deallocates: a longer one could exceed [`Options::request_timeout`].
    pub zero_bytes: u32,
    /// Time limit of one attempt: name resolution, connections and negotiation.
    pub connect_timeout: Duration,
    /// Time limit of one request; the connection is then reset. Detected up to an eighth of it late.
    pub request_timeout: Duration,
    /// Connections that one request may lose before it fails: a request that crashes its server must not be sent
    /// forever.
    pub max_connection_losses: u8,
    /// Limits of reconnecting after a lost connection.
    pub reconnect: Reconnect,
    /// Connects again only if the server identifies the export: otherwise another one may be there, and whoever opens
    /// it anew compares it.
    pub needs_identity: bool,
    /// Time after which a server executes no more requests of a connection that this client has closed. Until then,
    /// changes that overlap unanswered ones of that connection wait, unless the server fences them
    /// ([`ConnectionInfo::is_fenced`]).
    pub quiesce: Duration,
}

impl Default for Options {
    /// One connection of 64 requests, 1 MiB of data and 256 MiB of zeroes in one, 10 s to connect, 30 s for a request,
    /// 4 losses, 40 s for a server to end a connection.
    fn default() -> Options {
        Options {
            connections: 1,
            queue_depth: 64,
            transfer_bytes: 1 << 20,
            small_blocks: false,
            zero_bytes: 256 << 20,
            connect_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(30),
            max_connection_losses: 4,
            reconnect: Reconnect::default(),
            needs_identity: false,
            quiesce: QUIESCE,
        }
    }
}

/// The information of a server about an export. Texts are the server's, without unprintable characters.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnectionInfo {
    /// The export's name as the server reports it, otherwise the requested name.
    pub export: String,
    /// Description for people, possibly empty.
    pub description: String,
    /// Block size constraints of the server, in bytes.
    pub sizes: BlockSizes,
    /// Form of the replies.
    pub style: ReplyStyle,
    /// The server supports FLUSH; without it, a write is durable once its reply arrives.
    pub flush: bool,
    /// The server supports FUA; without it, a durable write is followed by a flush.
    pub fua: bool,
    /// The server supports FAST_ZERO.
    pub fast_zero: bool,
    /// Several connections see each other's writes and flushes.
    pub can_multi_conn: bool,
    /// The server reports holes (`base:allocation`).
    pub allocation: bool,
    /// The server executes no request of a lost connection any more once this client has another one.
    pub is_fenced: bool,
    /// The identity of its content, if the server says it.
    pub uuid: Option<[u8; 16]>,
    /// What the server lists of its device; nothing if it does not know that.
    pub identities: ListedIdentities,
    /// Connections in use.
    pub connections: usize,
    /// Maximum requests in flight on one connection.
    pub queue_depth: u16,
}

impl ConnectionInfo {
    pub(crate) fn of(
        requested_name: &str,
        described: &ExportInfo,
        connections: usize,
        queue_depth: u16,
    ) -> ConnectionInfo {
        let has = |flag| described.has(flag);
        let name = described.name.as_deref().unwrap_or(requested_name);
        ConnectionInfo {
            export: name.chars().filter(|c| !c.is_control()).collect(),
            description: described.description.clone(),
            sizes: described.sizes,
            style: described.style,
            flush: has(transmission::SEND_FLUSH),
            fua: has(transmission::SEND_FUA),
            fast_zero: has(transmission::SEND_FAST_ZERO),
            can_multi_conn: has(transmission::CAN_MULTI_CONN),
            allocation: described.context.is_some(),
            is_fenced: described.is_fenced,
            uuid: described.identity.uuid,
            identities: ListedIdentities::new(described.identity.devices.clone()),
            connections,
            queue_depth,
        }
    }
}

/// What a device transferred since it was opened, over all its connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Requests that completed.
    pub requests: u64,
    /// Bytes of data that were read.
    pub received_bytes: u64,
    /// Bytes of data that were written.
    pub sent_bytes: u64,
    /// How often the connections were lost and set up again.
    pub reconnects: u64,
}

/// Cells behind [`Counters`].
#[derive(Default)]
pub(crate) struct CounterCells {
    /// Requests of sessions that are over.
    pub(crate) past_requests: Cell<u64>,
    pub(crate) received_bytes: Cell<u64>,
    pub(crate) sent_bytes: Cell<u64>,
}

pub(crate) fn add(cell: &Cell<u64>, more: u64) {
    cell.set(cell.get() + more);
}
