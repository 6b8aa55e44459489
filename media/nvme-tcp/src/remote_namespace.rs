//! An open namespace, whose session is replaced when it is lost; and the background tasks of a session: keep alive,
//! timeouts, events of the controller.

use std::cell::Cell;
use std::rc::{Rc, Weak};
use std::time::Duration;

use sealblock_block::{Error, ErrorKind, Freshness};
use sealblock_media_nvme::NamespaceProfile;
use sealblock_protocols_nvme::admin::GetLogPage;
use sealblock_protocols_nvme::features::AsynchronousEvent;
use sealblock_protocols_nvme::logs::LogPage;
use sealblock_protocols_nvme::{AdminOpcode, Command};
use sealblock_protocols_nvme_tcp::host::HostData;
use sealblock_runtime_memory::Buffer;
use sealblock_runtime_reactor::{sleep, spawn};
use sealblock_transport::{
    ConnectionLost, Endpoint, Lineage, ListedIdentities, ReconnectLimits, Reconnecting, end_late_requests, watch_end,
};

use crate::admin;
use crate::options::{CounterCells, Counters};
use crate::queue::Queue;
use crate::session::{Session, SessionConfig};
use crate::{ConnectError, HostPort};

/// An open namespace.
pub(crate) struct RemoteNamespace {
    pub(crate) config: SessionConfig,
    /// The namespace when it was opened; a new session must find the same.
    pub(crate) profile: NamespaceProfile,
    pub(crate) counters: CounterCells,
    /// What the target last listed.
    identities: ListedIdentities,
    is_writable: Cell<bool>,
    freshness: Cell<Freshness>,
    /// Counters of sessions that ended.
    past_counters: Cell<Counters>,
}

/// An open namespace, and the session to it.
pub(crate) type ReconnectingSession = Reconnecting<RemoteNamespace>;

impl Endpoint for RemoteNamespace {
    type Session = Session;
    type Address = HostPort;
    type OpenError = ConnectError;

    fn address(&self) -> &HostPort {
        &self.config.address
    }

    fn lineage(&self) -> &Lineage {
        &self.config.lineage
    }

    fn limits(&self) -> ReconnectLimits {
        let options = &self.config.options;
        let quiesce = options.quiesce();
        ReconnectLimits {
            reconnect: options.reconnect,
            max_losses: options.max_connection_losses,
            quiesce,
            late_wait: options.request_timeout + quiesce,
        }
    }

    fn is_volatile(&self) -> bool {
        self.profile.volatile_write_cache
    }

    async fn reopen(&self, _number: u64) -> Result<Session, ConnectError> {
        let session = self.config.open().await?;
        session.profile.check_unchanged(&self.profile)?;
        self.identities.set(session.pages.identities.clone());
        Ok(session)
    }

    /// A target that is starting may refuse what it accepts later.
    fn is_final(error: &ConnectError) -> bool {
        !error.is_transient() && !matches!(error, ConnectError::Refused { .. } | ConnectError::Unexpected { .. })
    }

    fn lost(session: &Session) -> Option<ConnectionLost> {
        session.queues().find_map(|queue| queue.lost())
    }

    fn is_fenced(session: &Session) -> bool {
        session.is_fenced
    }

    fn session_started(reconnecting: &Rc<ReconnectingSession>, session: &Rc<Session>) {
        reconnecting.follow(&session.profile);
        start_tasks(reconnecting, session);
    }

    fn end_session(&self, session: &Session, reason: &str) {
        self.past_counters.set(add_session(self.past_counters.get(), session));
        session.end(reason);
        self.config.lineage.add_ended(session.controller.id);
    }
}

impl RemoteNamespace {
    /// The namespace that this session has opened.
    pub(crate) fn new(mut config: SessionConfig, session: &Session, identities: ListedIdentities) -> RemoteNamespace {
        // Later sessions must open the same namespace, even if others have appeared.
        config.namespace = Some(session.profile.nsid);
        RemoteNamespace {
            config,
            profile: session.profile.clone(),
            counters: CounterCells::default(),
            identities,
            is_writable: Cell::new(session.profile.abilities.writable),
            freshness: Cell::new(session.profile.abilities.freshness),
            past_counters: Cell::default(),
        }
    }

    /// Updates what the namespace reports about itself.
    fn follow(&self, profile: &NamespaceProfile) {
        self.is_writable.set(profile.abilities.writable);
        self.freshness.set(profile.abilities.freshness);
    }

    /// True if the namespace accepts writes now.
    pub(crate) fn is_writable(&self) -> bool {
        self.is_writable.get()
    }

    /// Whether it has the last data written to it, as its target now reports.
    pub(crate) fn freshness(&self) -> Freshness {
        self.freshness.get()
    }

    /// Fails if blocks may be older by now, and were not when it was opened: its readers have not been told.
    pub(crate) fn check_fresh(&self) -> Result<(), Error> {
        match self.freshness.get() {
            Freshness::MayBeOlder(why) if self.profile.abilities.freshness.is_current() => {
                Err(ErrorKind::MayBeOlder(why).into())
            }
            _ => Ok(()),
        }
    }
}

/// Counters over all sessions.
pub(crate) fn counters(reconnecting: &ReconnectingSession) -> Counters {
    let past = reconnecting.past_counters.get();
    let passed = reconnecting.current_session().map_or(past, |session| add_session(past, &session));
    Counters {
        guard_bytes_checksummed: reconnecting.counters.guard_bytes_checksummed.get(),
        retries: reconnecting.counters.retries.get(),
        reconnects: reconnecting.reconnects(),
        ..passed
    }
}

/// Adds the counters of the session's I/O queues.
fn add_session(mut all: Counters, session: &Session) -> Counters {
    session.io.iter().for_each(|queue| queue.core().add_to(&mut all));
    all
}

/// Pause between two events: a controller that reports events without end must not keep this core busy.
const EVENT_PAUSE: Duration = Duration::from_millis(100);
/// Bytes read of an event's log page: enough to clear any event, and for all of Changed Namespace List.
const EVENT_PAGE_BYTES: u64 = 4096;

/// Starts the background tasks of a session; they end with it.
fn start_tasks(reconnecting: &Rc<ReconnectingSession>, session: &Rc<Session>) {
    let options = &reconnecting.config.options;
    let queues: Vec<Rc<Queue>> = session.queues().cloned().collect();
    let mut tasks = session.tasks.borrow_mut();
    tasks.push(spawn(end_late_requests(queues, options.request_timeout)));
    if !options.keep_alive.is_zero() {
        let admin = Rc::clone(session.controller.admin.queue());
        tasks.push(spawn(keep_alive(admin, options.keep_alive / 2)));
    }
    tasks.push(spawn(handle_events(Rc::downgrade(reconnecting), Rc::downgrade(session))));
    for queue in &session.io {
        tasks.push(spawn(watch_end(Rc::downgrade(reconnecting), Rc::downgrade(session), Rc::clone(queue))));
    }
}

/// Sends Keep Alive. Any completion, whatever its status, proves that the controller is alive.
async fn keep_alive(admin: Rc<Queue>, period: Duration) {
    loop {
        sleep(period).await;
        let command = Command::new(AdminOpcode::KeepAlive.code(), 0);
        if admin.execute((command, HostData::None)).await.is_err() {
            return;
        }
    }
}

/// Handles events, and detects the end of the connection even when no request is in flight.
async fn handle_events(reconnecting: Weak<ReconnectingSession>, session: Weak<Session>) {
    let Err(lost) = watch_events(&reconnecting, &session).await else { return };
    if let (Some(reconnecting), Some(session)) = (reconnecting.upgrade(), session.upgrade()) {
        reconnecting.session_lost(&session, &lost);
    }
}

async fn watch_events(reconnecting: &Weak<ReconnectingSession>, session: &Weak<Session>) -> Result<(), ConnectionLost> {
    let Some(admin) = session.upgrade().map(|session| Rc::clone(session.controller.admin.queue())) else {
        return Ok(());
    };
    if let Some(session) = session.upgrade() {
        session.enable_events().await?;
    }
    loop {
        let command = Command::new(AdminOpcode::AsynchronousEventRequest.code(), 0);
        let finished = admin.execute_without_timeout((command, HostData::None)).await?;
        if !finished.completion.status().is_success() {
            // The controller reports no events; still detect the end of the connection.
            return Err(admin.ended().await);
        }
        let event = AsynchronousEvent::from_dword0(finished.completion.dword0());
        clear_event(&admin, event).await?;
        if event == AsynchronousEvent::NAMESPACE_CHANGED {
            check_namespace(reconnecting, session).await;
        }
        sleep(EVENT_PAUSE).await;
    }
}

/// Reads the event's log page, which allows the controller to report the next event.
async fn clear_event(admin: &Queue, event: AsynchronousEvent) -> Result<(), ConnectionLost> {
    let length = if event.log_page == LogPage::Health.code() { 512 } else { EVENT_PAGE_BYTES };
    let data = HostData::Read { buffer: Buffer::zeroed(length as usize), layout: None };
    admin.execute((GetLogPage::new(event.log_page, length).encode(), data)).await?;
    Ok(())
}

/// Reads the namespace's pages again; fails the device if the namespace changed or no longer exists.
async fn check_namespace(reconnecting: &Weak<ReconnectingSession>, session: &Weak<Session>) {
    let (Some(reconnecting), Some(session)) = (reconnecting.upgrade(), session.upgrade()) else { return };
    let (controller, nsid) = (&session.controller, reconnecting.profile.nsid);
    let pages =
        admin::namespace_pages(&controller.admin, controller.capabilities, session.pages.controller, nsid).await;
    let profile = pages.and_then(|pages| {
        let profile = NamespaceProfile::of(nsid, &pages, &reconnecting.config.options.profile())?;
        profile.check_unchanged(&reconnecting.profile)?;
        Ok(profile)
    });
    match profile {
        Ok(profile) => reconnecting.follow(&profile),
        // The loss of the connection is handled where it ended.
        Err(error) if error.is_transient() => {}
        Err(error) => reconnecting.fail(&format!("namespace {nsid} changed: {error}")),
    }
}
