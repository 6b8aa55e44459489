//! The session to a namespace, opened again when its connection is lost, until the limits of reconnecting are reached; and
//! its background tasks: keep alive, timeouts, events of the controller.
//!
//! Invariants: a request waits for a session, or fails once reconnecting has failed; a new session finds the same
//! namespace; [`crate::Options`] bounds every attempt, pause and repetition.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::task::{Poll, Waker};
use std::time::Duration;

use sealblock_block::{Error, ErrorKind, FlushEpochs};
use sealblock_protocols_nvme::admin::GetLogPage;
use sealblock_protocols_nvme::features::AsynchronousEvent;
use sealblock_protocols_nvme::logs::LogPage;
use sealblock_protocols_nvme::{AdminOpcode, Command, Status, StatusCode};
use sealblock_protocols_nvme_tcp::host::HostData;
use sealblock_runtime_memory::Buffer;
use sealblock_runtime_reactor::{now, sleep, spawn, timeout};

use crate::ConnectError;
use crate::admin;
use crate::error::ConnectionLost;
use crate::in_flight::CommandResult;
use crate::namespace_profile::NamespaceProfile;
use crate::options::{CounterCells, Counters, add};
use crate::queue::Queue;
use crate::session::{Session, SessionConfig};
use crate::status::may_be_sent_again;

/// Pause before a retry if the status does not request one by CRD.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// The session of this moment.
enum SessionState {
    Connected(Rc<Session>),
    /// A new session is being opened.
    Reconnecting,
    /// The device was closed, or reconnecting failed. Final.
    Failed(Rc<str>),
}

/// A session that is replaced when its connection is lost.
pub(crate) struct ReconnectingSession {
    pub(crate) config: SessionConfig,
    /// The namespace when it was opened; a new session must find the same.
    pub(crate) profile: NamespaceProfile,
    pub(crate) counters: CounterCells,
    pub(crate) flush_epochs: FlushEpochs,
    is_writable: Cell<bool>,
    state: RefCell<SessionState>,
    wakers: RefCell<Vec<Waker>>,
    /// Counters of sessions that ended.
    past_counters: Cell<Counters>,
}

/// A command with a final completion, and the session and queue that executed it.
pub(crate) struct CompletedCommand {
    pub(crate) session: Rc<Session>,
    /// [`FlushEpochs::epoch`] of that session.
    pub(crate) epoch: u64,
    pub(crate) queue: u16,
    pub(crate) result: CommandResult,
}

impl CompletedCommand {
    pub(crate) fn status(&self) -> Status {
        self.result.completion.status()
    }
}

impl ReconnectingSession {
    /// Starts with this open session.
    pub(crate) fn new(mut config: SessionConfig, session: Session) -> Rc<ReconnectingSession> {
        // Later sessions must open the same namespace, even if others have appeared.
        config.namespace = Some(session.profile.nsid);
        let session = Rc::new(session);
        let reconnecting = Rc::new(ReconnectingSession {
            config,
            profile: session.profile.clone(),
            counters: CounterCells::default(),
            flush_epochs: FlushEpochs::default(),
            is_writable: Cell::new(session.profile.abilities.writable),
            state: RefCell::new(SessionState::Connected(Rc::clone(&session))),
            wakers: RefCell::default(),
            past_counters: Cell::default(),
        });
        start_tasks(&reconnecting, &session);
        reconnecting
    }

    /// True if the namespace accepts writes now.
    pub(crate) fn is_writable(&self) -> bool {
        self.is_writable.get()
    }

    /// Sets whether the namespace accepts writes.
    pub(crate) fn set_writable(&self, writable: bool) {
        self.is_writable.set(writable);
    }

    /// Waits for a connected session.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] once reconnecting has failed.
    pub(crate) async fn session(&self) -> Result<Rc<Session>, Error> {
        std::future::poll_fn(|cx| match &*self.state.borrow() {
            SessionState::Connected(session) => Poll::Ready(Ok(Rc::clone(session))),
            SessionState::Failed(reason) => {
                Poll::Ready(Err(ErrorKind::Unreachable { reason: reason.to_string() }.into()))
            }
            SessionState::Reconnecting => {
                self.wakers.borrow_mut().push(cx.waker().clone());
                Poll::Pending
            }
        })
        .await
    }

    /// The connected session, if there is one.
    pub(crate) fn current_session(&self) -> Option<Rc<Session>> {
        match &*self.state.borrow() {
            SessionState::Connected(session) => Some(Rc::clone(session)),
            SessionState::Reconnecting | SessionState::Failed(_) => None,
        }
    }

    /// Executes an idempotent I/O command: again on a new session when the connection is lost, and again when its status
    /// allows it. The returned completion is final, success or not.
    pub(crate) async fn execute(
        self: &Rc<Self>,
        build: impl Fn(&Session) -> Result<(Command, HostData), Error>,
    ) -> Result<CompletedCommand, Error> {
        self.execute_on(Session::pick, build).await
    }

    /// The same with an admin command.
    pub(crate) async fn execute_admin(
        self: &Rc<Self>,
        build: impl Fn(&Session) -> Result<(Command, HostData), Error>,
    ) -> Result<CompletedCommand, Error> {
        self.execute_on(|session| session.controller.admin.queue(), build).await
    }

    async fn execute_on(
        self: &Rc<Self>,
        pick: fn(&Session) -> &Rc<Queue>,
        build: impl Fn(&Session) -> Result<(Command, HostData), Error>,
    ) -> Result<CompletedCommand, Error> {
        let (mut losses, mut retries) = (0, 0);
        loop {
            let session = self.session().await?;
            let epoch = self.flush_epochs.epoch();
            let (command, data) = build(&session)?;
            let queue = Rc::clone(pick(&session));
            match queue.execute(command, data).await {
                Ok(finished) => {
                    let status = finished.completion.status();
                    if status.is_success() || !may_be_sent_again(status) || retries >= self.config.options.retries {
                        return Ok(CompletedCommand { session, epoch, queue: queue.id, result: finished });
                    }
                    retries += 1;
                    add(&self.counters.retries, 1);
                    sleep(retry_pause(&session, status)).await;
                }
                Err(lost) => {
                    self.session_lost(&session, &lost);
                    losses += 1;
                    if losses >= self.config.options.max_connection_losses.max(1) {
                        let reason = format!("{losses} connections were lost with this request; the last one: {lost}");
                        return Err(ErrorKind::Unreachable { reason }.into());
                    }
                }
            }
        }
    }

    /// Ends the session after the loss of one of its connections, and starts to reconnect unless that is in progress.
    pub(crate) fn session_lost(self: &Rc<Self>, session: &Rc<Session>, lost: &ConnectionLost) {
        {
            let mut state = self.state.borrow_mut();
            match &*state {
                SessionState::Connected(current) if Rc::ptr_eq(current, session) => *state = SessionState::Reconnecting,
                SessionState::Connected(_) | SessionState::Reconnecting | SessionState::Failed(_) => return,
            }
        }
        tracing::warn!(target = %self.config.address, %lost, "connection lost");
        self.retire_session(session);
        session.end(&lost.0);
        spawn(reconnect(Rc::downgrade(self), lost.clone()));
    }

    /// Adds up the counters of a session that ended, and records that its unflushed writes may be lost.
    fn retire_session(&self, session: &Session) {
        self.past_counters.set(add_session(self.past_counters.get(), session));
        self.flush_epochs.session_lost(self.profile.volatile_write_cache);
    }

    /// Resumes waiting requests on a new session.
    fn set_connected(self: &Rc<Self>, session: Session) {
        let session = Rc::new(session);
        add(&self.counters.reconnects, 1);
        self.is_writable.set(session.profile.abilities.writable);
        let before = self.state.replace(SessionState::Connected(Rc::clone(&session)));
        drop(before);
        start_tasks(self, &session);
        self.wake();
    }

    /// Fails waiting and later requests; no session follows.
    pub(crate) fn fail(&self, reason: &str) {
        let before = {
            let mut state = self.state.borrow_mut();
            match &*state {
                SessionState::Failed(_) => return,
                SessionState::Connected(_) | SessionState::Reconnecting => {
                    std::mem::replace(&mut *state, SessionState::Failed(reason.into()))
                }
            }
        };
        if let SessionState::Connected(session) = &before {
            self.retire_session(session);
            session.end(reason);
        }
        drop(before);
        self.wake();
    }

    /// Fails because the limits of reconnecting are reached.
    fn fail_after_attempts(&self, lost: &ConnectionLost, attempts: u32, time: Duration, last: &str) {
        let address = &self.config.address;
        let tried = match attempts {
            0 => String::new(),
            _ => format!(", and {attempts} attempts within {time:?} to set it up again failed; the last one: {last}"),
        };
        self.fail(&format!("the connection to {address} was lost ({lost}){tried}"));
    }

    fn wake(&self) {
        let waiting = self.wakers.take();
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Counters over all sessions.
    pub(crate) fn counters(&self) -> Counters {
        let passed = match &*self.state.borrow() {
            SessionState::Connected(session) => add_session(self.past_counters.get(), session),
            SessionState::Reconnecting | SessionState::Failed(_) => self.past_counters.get(),
        };
        Counters {
            guard_bytes_checksummed: self.counters.guard_bytes_checksummed.get(),
            retries: self.counters.retries.get(),
            reconnects: self.counters.reconnects.get(),
            ..passed
        }
    }
}

/// Adds the counters of the session's I/O queues.
fn add_session(mut all: Counters, session: &Session) -> Counters {
    session.io.iter().for_each(|queue| queue.add_to(&mut all));
    all
}

/// Pause before a retry: the time that the controller requests by CRD, if it does.
fn retry_pause(session: &Session, status: Status) -> Duration {
    let controller = &session.pages.controller;
    let delay_100ms = match status.retry_delay() {
        1 => controller.crdt1,
        2 => controller.crdt2,
        3 => controller.crdt3,
        _ if status.code() == StatusCode::TRANSIENT_TRANSPORT_ERROR => return Duration::ZERO,
        _ => return RETRY_PAUSE,
    };
    // Bounded: a controller must not delay a request for minutes.
    Duration::from_millis(u64::from(delay_100ms) * 100).min(Duration::from_secs(5))
}

/// Opens a new session: at once, then with growing pauses, until an attempt succeeds or the limits are reached.
async fn reconnect(reconnecting: Weak<ReconnectingSession>, lost: ConnectionLost) {
    let Some(limits) = reconnecting.upgrade().map(|reconnecting| reconnecting.config.options.reconnect) else { return };
    let begin = now();
    let mut delay = limits.first_delay;
    let mut last = String::from("none has ended in time");
    let mut attempts = 0;
    while attempts < limits.attempts {
        if attempts > 0 {
            sleep(delay.min(limits.total.saturating_sub(begin.elapsed()))).await;
            delay = (delay * 2).min(limits.max_delay);
        }
        let Some(reconnecting) = reconnecting.upgrade() else { return };
        if !matches!(&*reconnecting.state.borrow(), SessionState::Reconnecting) {
            return;
        }
        let left = limits.total.saturating_sub(begin.elapsed());
        if left.is_zero() {
            break;
        }
        attempts += 1;
        let result = match timeout(left, reconnecting.config.open()).await {
            Ok(result) => {
                result.and_then(|session| session.profile.check_unchanged(&reconnecting.profile).map(|()| session))
            }
            Err(_elapsed) => break,
        };
        match result {
            // The device was closed in the meantime.
            Ok(_) if !matches!(&*reconnecting.state.borrow(), SessionState::Reconnecting) => return,
            Ok(session) => return reconnecting.set_connected(session),
            Err(error) if is_final(&error) => {
                return reconnecting.fail(&format!("after a lost connection ({lost}): {error}"));
            }
            Err(error) => last = error.to_string(),
        }
    }
    if let Some(reconnecting) = reconnecting.upgrade() {
        reconnecting.fail_after_attempts(&lost, attempts, begin.elapsed(), &last);
    }
}

/// True if no later attempt can succeed. A target that is starting may refuse what it accepts later.
fn is_final(error: &ConnectError) -> bool {
    !error.is_transient() && !matches!(error, ConnectError::Refused { .. } | ConnectError::Unexpected { .. })
}

/// Timeout checks within one request timeout.
const TICKS: u32 = 8;
/// Pause between two events: a controller that reports events without end must not keep this core busy.
const EVENT_PAUSE: Duration = Duration::from_millis(100);
/// Bytes read of an event's log page: enough to clear any event, and for all of Changed Namespace List.
const EVENT_PAGE_BYTES: u64 = 4096;

/// Starts the background tasks of a session; they end with it.
fn start_tasks(reconnecting: &Rc<ReconnectingSession>, session: &Rc<Session>) {
    let options = &reconnecting.config.options;
    let queues: Vec<Rc<Queue>> = session.queues().cloned().collect();
    let mut tasks = session.tasks.borrow_mut();
    tasks.push(spawn(end_late_commands(queues, options.request_timeout)));
    if !options.keep_alive.is_zero() {
        let admin = Rc::clone(session.controller.admin.queue());
        tasks.push(spawn(keep_alive(admin, options.keep_alive / 2)));
    }
    tasks.push(spawn(handle_events(Rc::downgrade(reconnecting), Rc::downgrade(session))));
}

/// Ends each connection on which a command exceeds `limit`. The reconnecting session then ends the others.
async fn end_late_commands(queues: Vec<Rc<Queue>>, limit: Duration) {
    loop {
        sleep((limit / TICKS).max(Duration::from_millis(1))).await;
        for queue in &queues {
            if queue.advance_tick(TICKS) {
                queue.end(&format!("a command on queue {} was not answered within {limit:?}", queue.id));
            }
        }
    }
}

/// Sends Keep Alive. Any completion, whatever its status, proves that the controller is alive.
async fn keep_alive(admin: Rc<Queue>, period: Duration) {
    loop {
        sleep(period).await;
        let command = Command::new(AdminOpcode::KeepAlive.code(), 0);
        if admin.execute(command, HostData::None).await.is_err() {
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
        let finished = admin.execute_without_timeout(command, HostData::None).await?;
        if !finished.completion.status().is_success() {
            // The controller reports no events; still detect the end of the connection.
            return Err(connection_end(&admin).await);
        }
        let event = AsynchronousEvent::from_dword0(finished.completion.dword0());
        clear_event(&admin, event).await?;
        if event == AsynchronousEvent::NAMESPACE_CHANGED {
            check_namespace(reconnecting, session).await;
        }
        sleep(EVENT_PAUSE).await;
    }
}

/// Waits for the end of the connection of a controller that reports no events.
async fn connection_end(queue: &Queue) -> ConnectionLost {
    loop {
        if let Some(lost) = queue.lost() {
            return lost;
        }
        sleep(EVENT_PAUSE).await;
    }
}

/// Reads the event's log page, which allows the controller to report the next event.
async fn clear_event(admin: &Queue, event: AsynchronousEvent) -> Result<(), ConnectionLost> {
    let length = if event.log_page == LogPage::Health.code() { 512 } else { EVENT_PAGE_BYTES };
    let data = HostData::Read { buffer: Buffer::zeroed(length as usize), layout: None };
    admin.execute(GetLogPage::new(event.log_page, length).encode(), data).await.map(drop)
}

/// Reads the namespace's pages again; fails the device if the namespace changed or no longer exists.
async fn check_namespace(reconnecting: &Weak<ReconnectingSession>, session: &Weak<Session>) {
    let (Some(reconnecting), Some(session)) = (reconnecting.upgrade(), session.upgrade()) else { return };
    let (controller, nsid) = (&session.controller, reconnecting.profile.nsid);
    let pages =
        admin::namespace_pages(&controller.admin, controller.capabilities, session.pages.controller, nsid).await;
    let shape = pages.and_then(|pages| NamespaceProfile::of(nsid, &pages, &reconnecting.config.options));
    match shape.and_then(|shape| shape.check_unchanged(&reconnecting.profile).map(|()| shape)) {
        Ok(shape) => reconnecting.set_writable(shape.abilities.writable),
        // The loss of the connection is handled where it ended.
        Err(error) if error.is_transient() => {}
        Err(error) => reconnecting.fail(&format!("namespace {nsid} changed: {error}")),
    }
}
