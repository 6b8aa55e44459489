//! All connections to an export, opened one after the other, and the timeout of their requests.

use std::cell::RefCell;
use std::rc::Rc;

use sealblock_protocols_nbd::SessionName;
use sealblock_protocols_nbd::client::{Closed, Config, Event, ExportInfo, Goal, Limits};
use sealblock_runtime_reactor::{JoinHandle, pool, spawn, timeout};
use sealblock_transport::{Lineage, end_late_requests};

use crate::connection::{self, Connection, ConnectionCore};
use crate::export_profile::ExportProfile;
use crate::{Address, ConnectError, Options};

/// Minimum payload limit: one block can always be read and written.
const LARGEST_BLOCK_BYTES: u32 = 4096;
/// Longest name of an export in bytes (`doc/proto.md`, "Values").
const MAX_NAME_BYTES: usize = 4096;

/// Server, export and options of a session; opens it again after a loss.
pub(crate) struct SessionConfig {
    pub(crate) address: Address,
    pub(crate) export: String,
    pub(crate) options: Options,
    pub(crate) lineage: Lineage,
}

/// Connections that accept requests.
pub(crate) struct Session {
    pub(crate) connections: Vec<Rc<Connection>>,
    pub(crate) info: ExportInfo,
    pub(crate) profile: ExportProfile,
    /// True if the server has fenced this client's older sessions.
    pub(crate) is_fenced: bool,
    /// They end connections whose requests time out, and report the end of connections; aborted when the session ends.
    pub(crate) tasks: RefCell<Vec<JoinHandle<()>>>,
}

impl SessionConfig {
    pub(crate) fn new(address: Address, export: &str, options: Options) -> SessionConfig {
        let lineage = Lineage::of(format!("nbd {address} {export}"), options.quiesce);
        SessionConfig { address, export: export.to_owned(), options, lineage }
    }

    /// Opens all connections of the session of this number, within [`Options::connect_timeout`].
    pub(crate) async fn open(&self, number: u64) -> Result<Session, ConnectError> {
        if self.export.len() > MAX_NAME_BYTES {
            return Err(ConnectError::Name);
        }
        self.in_time(self.open_all(number)).await
    }

    pub(crate) async fn in_time<T>(
        &self,
        work: impl Future<Output = Result<T, ConnectError>>,
    ) -> Result<T, ConnectError> {
        let limit = self.options.connect_timeout;
        let timed_out = |_| ConnectError::Timeout { address: self.address.clone(), limit };
        timeout(limit, work).await.map_err(timed_out)?
    }

    async fn open_all(&self, number: u64) -> Result<Session, ConnectError> {
        let (first, info) = self.open_one(number).await?;
        let profile = ExportProfile::of(&info, &self.options)?;
        let is_fenced = self.lineage.is_at_same_server(&info.identity.devices) && info.is_fenced;
        let mut session = Session { connections: vec![first], info, profile, is_fenced, tasks: RefCell::default() };
        let wanted = if session.profile.can_multi_conn { self.options.connections.max(1) } else { 1 };
        while session.connections.len() < usize::from(wanted) {
            let (next, info) = self.open_one(number).await?;
            session.connections.push(next);
            session.is_fenced &= info.is_fenced;
            ExportProfile::of(&info, &self.options)?.check_unchanged(&session.profile)?;
        }
        let timeout_task = spawn(end_late_requests(session.connections.clone(), self.options.request_timeout));
        session.tasks.borrow_mut().push(timeout_task);
        Ok(session)
    }

    async fn open_one(&self, number: u64) -> Result<(Rc<Connection>, ExportInfo), ConnectError> {
        let name = SessionName { client: self.lineage.client(), number };
        match self.negotiate(Goal::Go(self.export.clone()), Some(name)).await? {
            (connection, Event::Ready(info)) => Ok((connection, info)),
            _ => Err(self.lost("the negotiation came to something else")),
        }
    }

    /// Connects and negotiates; returns the connection and the result of the negotiation.
    pub(crate) async fn negotiate(
        &self,
        goal: Goal,
        name: Option<SessionName>,
    ) -> Result<(Rc<Connection>, Event), ConnectError> {
        let connection = self.connect(goal, name).await?;
        let lost = match connection.negotiated(ConnectionCore::take_negotiated).await {
            Ok(event) => return Ok((connection, event)),
            Err(lost) => lost,
        };
        Err(match connection.core().closed() {
            Some(Closed::Refused(refused)) => ConnectError::Refused(refused),
            Some(Closed::Violation(violation)) => ConnectError::Violation(violation),
            Some(Closed::Here | Closed::Ended) | None => self.lost(&lost.0),
        })
    }

    pub(crate) fn lost(&self, reason: &str) -> ConnectError {
        ConnectError::Lost { address: self.address.clone(), reason: reason.to_owned() }
    }

    async fn connect(&self, goal: Goal, name: Option<SessionName>) -> Result<Rc<Connection>, ConnectError> {
        let mut last = None;
        let unknown = |source| ConnectError::Resolve { host: self.address.host(), source };
        for resolved in self.address.resolve().await.map_err(unknown)? {
            let mut config = Config::new(pool(), goal.clone());
            config.session = name;
            config.limits = Limits {
                commands: usize::from(self.options.queue_depth.max(1)),
                payload_bytes: self.options.transfer_bytes.max(LARGEST_BLOCK_BYTES),
                ..Limits::default()
            };
            match connection::open(&resolved, config).await {
                Ok(connection) => return Ok(connection),
                Err(source) => last = Some(source),
            }
        }
        let source = last.unwrap_or_else(|| std::io::ErrorKind::NotFound.into());
        Err(ConnectError::Connect { address: self.address.clone(), source })
    }
}

impl Session {
    /// The connection with the fewest requests.
    pub(crate) fn pick(&self) -> &Rc<Connection> {
        self.connections.iter().min_by_key(|connection| connection.load()).expect("a session has a connection")
    }

    /// Sends NBD_CMD_DISC on every connection.
    pub(crate) fn disconnect(&self) {
        self.connections.iter().for_each(|connection| connection.core().disconnect());
    }

    /// Ends every connection.
    pub(crate) fn end(&self, reason: &str) {
        self.connections.iter().for_each(|connection| connection.end(reason));
        let tasks = self.tasks.take();
        tasks.iter().for_each(JoinHandle::abort);
    }

    /// Requests that completed.
    pub(crate) fn completed_count(&self) -> u64 {
        self.connections.iter().map(|connection| connection.core().completed_count).sum()
    }
}

impl Drop for Session {
    /// Ends the tasks, which would keep the connections open.
    fn drop(&mut self) {
        self.end("the session was dropped");
    }
}
