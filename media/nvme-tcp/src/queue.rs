//! A queue: one connection to a controller, over the sans-IO host of `protocols/nvme-tcp`.

use std::net::SocketAddr;
use std::rc::Rc;

use sealblock_protocols_nvme::{Command, Completion};
use sealblock_protocols_nvme_tcp::host::{Event, HostData, ReadData, SubmitError as HostError};
use sealblock_protocols_nvme_tcp::{Closed, Host, HostConfig, Negotiated, TransmitLimit, target};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::Stream;
use sealblock_transport::{ClientCore, ClientEvent, Connection, SubmitError};

use crate::Counters;

/// A connection to a controller.
pub(crate) type Queue = Connection<QueueCore>;

/// The end of a command.
#[derive(Debug)]
pub(crate) struct CommandResult {
    /// Command identifier, which the error log repeats.
    pub(crate) cid: u16,
    pub(crate) completion: Completion,
    /// The data of a command that reads.
    pub(crate) data: Option<ReadData>,
}

/// The host's side of a queue.
pub(crate) struct QueueCore {
    /// QID, 0 for the admin queue.
    pub(crate) id: u16,
    host: Host,
    completed: u64,
    /// Counters at the moment when the queue became ready for I/O.
    base: (u64, target::Counters),
}

/// Connects and starts to negotiate digests.
pub(crate) async fn open(address: SocketAddr, id: u16, config: HostConfig) -> std::io::Result<Rc<Queue>> {
    let stream = Stream::connect(address).await?;
    stream.set_nodelay(true)?;
    let host = Host::new(config);
    Ok(Connection::start(stream, QueueCore { id, host, completed: 0, base: Default::default() }))
}

impl QueueCore {
    /// The result of the negotiation, once there is one.
    pub(crate) fn negotiated(&self) -> Option<Negotiated> {
        self.host.negotiated()
    }

    /// Starts to count: Connect and earlier traffic do not count.
    pub(crate) fn start_counting(&mut self) {
        self.base = (self.completed, self.host.counters());
    }

    /// Adds what was transferred since [`QueueCore::start_counting`].
    pub(crate) fn add_to(&self, all: &mut Counters) {
        let ((completed, base), now) = (self.base, self.host.counters());
        all.commands += self.completed - completed;
        all.received_bytes += now.received.payload_bytes - base.received.payload_bytes;
        all.received_bytes_checksummed +=
            now.received.payload_bytes_checksummed - base.received.payload_bytes_checksummed;
        all.sent_bytes += now.payload_bytes_sent - base.payload_bytes_sent;
        all.sent_bytes_checksummed += now.payload_bytes_sent_checksummed - base.payload_bytes_sent_checksummed;
    }
}

impl ClientCore for QueueCore {
    type Request = (Command, HostData);
    type Reply = CommandResult;

    const PEER: &'static str = "target";

    fn receive_buffer(&mut self) -> Option<Buffer> {
        self.host.receive_buffer()
    }

    fn received(&mut self, buffer: Buffer, len: usize) {
        self.host.received(buffer, len);
    }

    fn next_event(&mut self) -> Option<ClientEvent<CommandResult>> {
        Some(match self.host.next_event()? {
            Event::Established(_) | Event::Closed(_) => ClientEvent::Progress,
            Event::Completed { cid, completion, data } => {
                self.completed += 1;
                let reply = CommandResult { cid: cid.0, completion, data };
                ClientEvent::Completed { place: self.host.place(cid), reply }
            }
        })
    }

    fn transmit(&mut self, out: &mut Vec<Slice>) -> usize {
        self.host.transmit(out, TransmitLimit::default())
    }

    fn has_output(&self) -> bool {
        self.host.has_output()
    }

    fn can_submit(&self) -> bool {
        self.host.can_submit()
    }

    fn submit(&mut self, (command, data): (Command, HostData)) -> Result<usize, SubmitError> {
        match self.host.submit(command, data) {
            Ok(cid) => Ok(self.host.place(cid)),
            Err(HostError::NotEstablished) => Err(SubmitError::Closed),
            Err(error @ (HostError::Full | HostError::Length(_))) => {
                Err(SubmitError::Refused(format!("the target takes no such command: {error}")))
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.host.commands_in_flight()
    }

    fn may_change_blocks(&self) -> bool {
        // An admin queue always has something in flight.
        self.id != 0 && self.in_flight() > 0
    }

    fn close(&mut self) {
        self.host.close();
    }

    fn closed_reason(&self) -> String {
        match self.host.closed() {
            Some(Closed::Violated(violation)) => format!("the target broke the protocol: {violation}"),
            Some(Closed::Terminated { fes, fei }) => {
                format!("the target ended the connection for an error of this host (FES {fes:#x}, FEI {fei:#x})")
            }
            Some(Closed::MalformedTermination) => "the target ended the connection without a valid reason".to_owned(),
            Some(Closed::Local) | None => "closed by this host".to_owned(),
        }
    }

    fn request_name(&self) -> String {
        format!("a command on queue {}", self.id)
    }
}
