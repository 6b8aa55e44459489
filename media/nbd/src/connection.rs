//! A connection to a server, over the sans-IO client of `protocols/nbd`.

use std::rc::Rc;

use sealblock_protocols_nbd::client::{
    Client, ClientRequest, Closed, CompletedRequest, Config, Event, Reply, ServerError, SubmitError as CoreError,
};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::Keepalive;
use sealblock_transport::{ClientCore, ClientEvent, SubmitError};

use crate::address::ResolvedAddress;

/// NBD has no keep alive, so TCP detects a server that crashed while no request was in flight.
const KEEPALIVE: Keepalive = Keepalive { idle_s: 30, interval_s: 10, probes: 3 };

/// A connection to a server.
pub(crate) type Connection = sealblock_transport::Connection<ConnectionCore>;

/// The reply to a request, or the server's errors.
pub(crate) type ReplyResult = Result<Reply, Vec<ServerError>>;

/// The client's side of a connection.
pub(crate) struct ConnectionCore {
    client: Client,
    /// The result of the negotiation, until it is taken.
    negotiated: Option<Event>,
    pub(crate) completed_count: u64,
}

/// Connects and starts the negotiation.
pub(crate) async fn open(resolved: &ResolvedAddress, config: Config) -> std::io::Result<Rc<Connection>> {
    let stream = resolved.connect().await?;
    if resolved.is_tcp() {
        stream.set_nodelay(true)?;
        stream.set_keepalive(Some(KEEPALIVE))?;
    }
    let core = ConnectionCore { client: Client::new(config), negotiated: None, completed_count: 0 };
    Ok(Connection::start(stream, core))
}

impl ConnectionCore {
    /// Removes the result of the negotiation, once it is there.
    pub(crate) fn take_negotiated(&mut self) -> Option<Event> {
        self.negotiated.take()
    }

    /// The reason why the connection ended, if the protocol reports one.
    pub(crate) fn closed(&self) -> Option<Closed> {
        self.client.closed().cloned()
    }

    /// Sends NBD_CMD_DISC. Later replies are not read.
    pub(crate) fn disconnect(&mut self) {
        self.client.disconnect();
    }
}

impl ClientCore for ConnectionCore {
    type Request = ClientRequest;
    type Reply = ReplyResult;

    const PEER: &'static str = "server";

    fn receive_buffer(&mut self) -> Option<Buffer> {
        self.client.receive_buffer()
    }

    fn received(&mut self, buffer: Buffer, len: usize) {
        self.client.received(buffer, len);
    }

    fn next_event(&mut self) -> Option<ClientEvent<ReplyResult>> {
        Some(match self.client.next_event()? {
            Event::Completed(CompletedRequest { place, outcome }) => {
                self.completed_count += 1;
                ClientEvent::Completed { place, reply: outcome }
            }
            Event::Closed(_) => ClientEvent::Progress,
            event @ (Event::Listed(_) | Event::Described(_) | Event::Ready(_)) => {
                self.negotiated = Some(event);
                ClientEvent::Progress
            }
        })
    }

    fn transmit(&mut self, out: &mut Vec<Slice>) -> usize {
        self.client.transmit(out)
    }

    fn has_output(&self) -> bool {
        self.client.has_output()
    }

    fn can_submit(&self) -> bool {
        self.client.can_submit()
    }

    fn submit(&mut self, request: ClientRequest) -> Result<usize, SubmitError> {
        self.client.submit(request).map_err(|error| match error {
            CoreError::NotReady => SubmitError::Closed,
            error => SubmitError::Refused(format!("the server takes no such request: {error}")),
        })
    }

    fn in_flight(&self) -> usize {
        self.client.in_flight()
    }

    fn close(&mut self) {
        self.client.close();
    }

    fn closed_reason(&self) -> String {
        self.closed().unwrap_or(Closed::Here).to_string()
    }

    fn request_name(&self) -> String {
        "a request".to_owned()
    }
}
