//! What is known of an export, and what went through.

use std::cell::Cell;

use sealblock_protocols_nbd::client::{BlockSizes, ExportInfo, ReplyStyle};
use sealblock_protocols_nbd::wire::transmission;

/// What a server says of an export. Texts are as it sent them, without what is not printable.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnectionInfo {
    /// The export's name, as the server has it or else as asked for.
    pub export: String,
    /// Text for people, possibly none.
    pub description: String,
    /// Block sizes in bytes that the server takes.
    pub sizes: BlockSizes,
    /// How replies look.
    pub style: ReplyStyle,
    /// FLUSH is there; without it writes count as durable when they are answered.
    pub flush: bool,
    /// FUA is there; without it a durable write is followed by a flush.
    pub fua: bool,
    /// FAST_ZERO is there.
    pub fast_zero: bool,
    /// Several connections see each other's writes and flushes.
    pub can_multi_conn: bool,
    /// The server tells holes (`base:allocation`).
    pub allocation: bool,
    /// Connections in use.
    pub connections: usize,
    /// Requests in flight on one of them.
    pub queue_depth: u16,
}

impl ConnectionInfo {
    pub(crate) fn of(asked: &str, described: &ExportInfo, connections: usize, queue_depth: u16) -> ConnectionInfo {
        let has = |flag| described.has(flag);
        let name = described.name.as_deref().unwrap_or(asked);
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
            connections,
            queue_depth,
        }
    }
}

/// What went through a device since it was opened, over all its connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Requests that were answered.
    pub requests: u64,
    /// Bytes of data that were read.
    pub received_bytes: u64,
    /// Bytes of data that were written.
    pub sent_bytes: u64,
    /// Times that the connections were lost and set up again.
    pub reconnects: u64,
}

/// Cells behind [`Counters`].
#[derive(Default)]
pub(crate) struct CounterCells {
    /// Requests of sessions that are over.
    pub(crate) past_requests: Cell<u64>,
    pub(crate) received_bytes: Cell<u64>,
    pub(crate) sent_bytes: Cell<u64>,
    pub(crate) reconnects: Cell<u64>,
}

pub(crate) fn add(cell: &Cell<u64>, more: u64) {
    cell.set(cell.get() + more);
}
