//! An open export, whose session is replaced when it is lost; executes requests on it.

use std::rc::Rc;

use sealblock_block::{Error, WriteSet};
use sealblock_protocols_nbd::client::ClientRequest;
use sealblock_runtime_reactor::spawn;
use sealblock_transport::{
    Attempt, AttemptError, ConnectionLost, Endpoint, Lineage, ListedIdentities, ReconnectLimits, Reconnecting, Sending,
    watch_end,
};

use crate::connection::{Connection, ReplyResult};
use crate::export_profile::ExportProfile;
use crate::options::{CounterCells, Counters, add};
use crate::session::{Session, SessionConfig};
use crate::status::is_shutdown;
use crate::{Address, ConnectError};

/// An open export.
pub(crate) struct RemoteExport {
    pub(crate) config: SessionConfig,
    /// The export when it was opened; a new session must have the same.
    pub(crate) profile: ExportProfile,
    pub(crate) counters: CounterCells,
    /// What the server last listed.
    identities: ListedIdentities,
}

/// An open export, and the session to it.
pub(crate) type ReconnectingSession = Reconnecting<RemoteExport>;

/// A request with a final reply.
pub(crate) struct CompletedRequest {
    /// [`FlushEpochs::epoch`](sealblock_block::FlushEpochs::epoch) of the session that executed it.
    pub(crate) epoch: u64,
    pub(crate) result: ReplyResult,
}

impl Endpoint for RemoteExport {
    type Session = Session;
    type Address = Address;
    type OpenError = ConnectError;

    fn address(&self) -> &Address {
        &self.config.address
    }

    fn lineage(&self) -> &Lineage {
        &self.config.lineage
    }

    fn limits(&self) -> ReconnectLimits {
        let options = &self.config.options;
        ReconnectLimits {
            reconnect: options.reconnect,
            max_losses: options.max_connection_losses,
            quiesce: options.quiesce,
            late_wait: options.request_timeout + options.quiesce,
        }
    }

    fn is_volatile(&self) -> bool {
        self.profile.flush
    }

    async fn reopen(&self, number: u64) -> Result<Session, ConnectError> {
        if self.config.options.needs_identity && self.profile.uuid.is_none() {
            return Err(ConnectError::Unidentified);
        }
        let session = self.config.open(number).await?;
        session.profile.check_unchanged(&self.profile)?;
        self.identities.set(session.info.identity.devices.clone());
        Ok(session)
    }

    fn is_final(error: &ConnectError) -> bool {
        !error.is_transient()
    }

    fn lost(session: &Session) -> Option<ConnectionLost> {
        session.connections.iter().find_map(|connection| connection.lost())
    }

    fn is_fenced(session: &Session) -> bool {
        session.is_fenced
    }

    /// NBD has no keep alive: only the end of a connection shows that an idle server is gone.
    fn session_started(reconnecting: &Rc<ReconnectingSession>, session: &Rc<Session>) {
        let watch = |connection: &Rc<Connection>| {
            let (reconnecting, session) = (Rc::downgrade(reconnecting), Rc::downgrade(session));
            spawn(watch_end(reconnecting, session, Rc::clone(connection)))
        };
        session.tasks.borrow_mut().extend(session.connections.iter().map(watch));
    }

    fn end_session(&self, session: &Session, reason: &str) {
        add(&self.counters.past_requests, session.completed_count());
        session.end(reason);
    }
}

/// Starts with this open session, of this number, and keeps what the server lists in `identities`.
pub(crate) fn start(
    config: SessionConfig,
    session: Session,
    number: u64,
    identities: ListedIdentities,
) -> Rc<ReconnectingSession> {
    let (profile, counters) = (session.profile.clone(), CounterCells::default());
    Reconnecting::new(RemoteExport { config, profile, counters, identities }, session, number)
}

/// Executes a request that changes `write_set`, again on a new session when the connection is lost or the server shuts
/// down: every request is idempotent. The returned result is final, success or not.
pub(crate) async fn execute(
    reconnecting: &Rc<ReconnectingSession>,
    write_set: WriteSet,
    build: impl Fn() -> Result<ClientRequest, Error>,
) -> Result<CompletedRequest, Error> {
    let attempt = async |session: Rc<Session>, Sending { epoch, change }| match session
        .pick()
        .execute_change(build()?, change)
        .await?
    {
        Err(errors) if is_shutdown(&errors) => {
            Err(AttemptError::Lost(ConnectionLost("the server is shutting down".into())))
        }
        result => Ok(Attempt::Done(CompletedRequest { epoch, result })),
    };
    reconnecting.execute(write_set, attempt).await
}

/// Counters over all sessions.
pub(crate) fn counters(reconnecting: &ReconnectingSession) -> Counters {
    let counting = &reconnecting.counters;
    let now = reconnecting.current_session().map_or(0, |session| session.completed_count());
    Counters {
        requests: counting.past_requests.get() + now,
        received_bytes: counting.received_bytes.get(),
        sent_bytes: counting.sent_bytes.get(),
        reconnects: reconnecting.reconnects(),
    }
}
