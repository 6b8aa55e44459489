//! The way to the namespace: a session while there is one, a new one when it is lost, and an end to trying.
//!
//! Invariants: a request waits for a session, or learns that there will be none; a session that replaces another leads to
//! the same namespace; every attempt, pause and repetition is bounded by [`crate::Options`].

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

/// The pause before a command is sent again whose status asks for none of the target's own.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// What leads to the namespace now.
enum SessionState {
    Connected(Rc<Session>),
    /// A new session is being set up.
    Reconnecting,
    /// There will be none.
    Failed(Rc<str>),
}

/// The way to one namespace.
pub(crate) struct ReconnectingSession {
    pub(crate) config: SessionConfig,
    /// The namespace as it was first met, and has to stay.
    pub(crate) profile: NamespaceProfile,
    pub(crate) counters: CounterCells,
    pub(crate) flush_epochs: FlushEpochs,
    is_writable: Cell<bool>,
    state: RefCell<SessionState>,
    wakers: RefCell<Vec<Waker>>,
    /// What went through sessions that are over.
    past_counters: Cell<Counters>,
}

/// A command that was answered, and by whom.
pub(crate) struct CompletedCommand {
    pub(crate) session: Rc<Session>,
    /// [`Ledger::epoch`] of that session.
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
    /// The way that begins with this session.
    pub(crate) fn new(mut config: SessionConfig, session: Session) -> Rc<ReconnectingSession> {
        // Whatever else appears there later, this namespace is meant.
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

    /// Whether the namespace takes writes now.
    pub(crate) fn is_writable(&self) -> bool {
        self.is_writable.get()
    }

    /// The namespace takes writes, or does not any more.
    pub(crate) fn set_writable(&self, writable: bool) {
        self.is_writable.set(writable);
    }

    /// The session, as soon as there is one.
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

    /// The session of this moment, if there is one.
    pub(crate) fn current_session(&self) -> Option<Rc<Session>> {
        match &*self.state.borrow() {
            SessionState::Connected(session) => Some(Rc::clone(session)),
            SessionState::Reconnecting | SessionState::Failed(_) => None,
        }
    }

    /// Carries an I/O command out that may be repeated: over a new session when the connection is lost, and again when
    /// its status allows it. What comes back is final, success or not.
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

    /// A connection of the session is over, so all of it is. Sets up a new one, unless that is being done already.
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

    /// Counts what went through a session that is over, and what of it is in doubt.
    fn retire_session(&self, session: &Session) {
        self.past_counters.set(add_session(self.past_counters.get(), session));
        self.flush_epochs.session_lost(self.profile.volatile_write_cache);
    }

    /// There is a session again.
    fn set_connected(self: &Rc<Self>, session: Session) {
        let session = Rc::new(session);
        add(&self.counters.reconnects, 1);
        self.is_writable.set(session.profile.abilities.writable);
        let before = self.state.replace(SessionState::Connected(Rc::clone(&session)));
        drop(before);
        start_tasks(self, &session);
        self.wake();
    }

    /// There will be no session any more.
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

    /// The limits of reconnecting are reached.
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

    /// What went through so far.
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

/// What went through before, and through the I/O queues of this session.
fn add_session(mut all: Counters, session: &Session) -> Counters {
    session.io.iter().for_each(|queue| queue.add_to(&mut all));
    all
}

/// How long to wait before a command with this status is sent again: what the controller asks for by CRD, if it does.
fn retry_pause(session: &Session, status: Status) -> Duration {
    let controller = &session.pages.controller;
    let delay_100ms = match status.retry_delay() {
        1 => controller.crdt1,
        2 => controller.crdt2,
        3 => controller.crdt3,
        _ if status.code() == StatusCode::TRANSIENT_TRANSPORT_ERROR => return Duration::ZERO,
        _ => return RETRY_PAUSE,
    };
    // However long a controller asks for, a request does not wait longer than for an answer.
    Duration::from_millis(u64::from(delay_100ms) * 100).min(Duration::from_secs(5))
}

/// Sets up a new session: at once, then with growing pauses, until it is there or the limits are reached.
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
            // Closed in the meantime.
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

/// Whether a target that starts again will not get over this. What it refuses while it starts, it may not refuse later.
fn is_final(error: &ConnectError) -> bool {
    !error.is_transient() && !matches!(error, ConnectError::Refused { .. } | ConnectError::Unexpected { .. })
}

/// Looks at commands in flight in one request timeout.
const TICKS: u32 = 8;
/// The pause between two events, so that a controller which tells events without end keeps nobody busy.
const EVENT_PAUSE: Duration = Duration::from_millis(100);
/// Bytes of an event's log page that are read: enough for every page to be cleared, and for all of Changed Namespaces.
const EVENT_PAGE_BYTES: u64 = 4096;

/// Starts what a session needs; it ends with the session.
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

/// Ends the connection of a command that is not answered in time. The others follow when their users find out.
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

/// Signs of life. A status is not looked at: whatever it is, it is an answer.
async fn keep_alive(admin: Rc<Queue>, period: Duration) {
    loop {
        sleep(period).await;
        let command = Command::new(AdminOpcode::KeepAlive.code(), 0);
        if admin.execute(command, HostData::None).await.is_err() {
            return;
        }
    }
}

/// Waits for events, and notices the end of the connection even when nobody asks for anything.
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
            // No events, then; the connection is still to be watched.
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

/// Waits for the end of a connection that tells no events.
async fn connection_end(queue: &Queue) -> ConnectionLost {
    loop {
        if let Some(lost) = queue.lost() {
            return lost;
        }
        sleep(EVENT_PAUSE).await;
    }
}

/// Reads the event's log page, which lets the controller tell the next one.
async fn clear_event(admin: &Queue, event: AsynchronousEvent) -> Result<(), ConnectionLost> {
    let length = if event.log_page == LogPage::Health.code() { 512 } else { EVENT_PAGE_BYTES };
    let data = HostData::Read { buffer: Buffer::zeroed(length as usize), layout: None };
    admin.execute(GetLogPage::new(event.log_page, length).encode(), data).await.map(drop)
}

/// Looks at the namespace again. One that is another now, or gone, is not used any more.
async fn check_namespace(reconnecting: &Weak<ReconnectingSession>, session: &Weak<Session>) {
    let (Some(reconnecting), Some(session)) = (reconnecting.upgrade(), session.upgrade()) else { return };
    let (controller, nsid) = (&session.controller, reconnecting.profile.nsid);
    let pages =
        admin::namespace_pages(&controller.admin, controller.capabilities, session.pages.controller, nsid).await;
    let shape = pages.and_then(|pages| NamespaceProfile::of(nsid, &pages, &reconnecting.config.options));
    match shape.and_then(|shape| shape.check_unchanged(&reconnecting.profile).map(|()| shape)) {
        Ok(shape) => reconnecting.set_writable(shape.abilities.writable),
        // Whatever ended the connection is dealt with there.
        Err(error) if error.is_transient() => {}
        Err(error) => reconnecting.fail(&format!("namespace {nsid} changed: {error}")),
    }
}
