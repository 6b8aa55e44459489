//! The session to an export, opened again when its connection is lost, until the limits of reconnecting are reached.
//!
//! Invariants: a request waits for a session, or fails once reconnecting has failed; a new session has the same
//! [`ExportProfile`] as the first; [`crate::Options`] bounds every attempt, pause and repetition.

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::task::{Poll, Waker};
use std::time::Duration;

use sealblock_block::{Error, ErrorKind, FlushEpochs};
use sealblock_protocols_nbd::client::{ClientRequest, Reply, ServerError};
use sealblock_runtime_reactor::{now, sleep, spawn, timeout};

use crate::error::{ConnectionLost, RequestError};
use crate::export_profile::ExportProfile;
use crate::options::{CounterCells, Counters, add};
use crate::session::{Session, SessionConfig};
use crate::status::is_shutdown;

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
    /// The export when it was opened; a new session must have the same.
    pub(crate) profile: ExportProfile,
    pub(crate) counters: CounterCells,
    pub(crate) flush_epochs: FlushEpochs,
    state: RefCell<SessionState>,
    wakers: RefCell<Vec<Waker>>,
}

/// A request with a final reply.
pub(crate) struct CompletedRequest {
    /// [`FlushEpochs::epoch`] of the session that executed it.
    pub(crate) epoch: u64,
    pub(crate) result: Result<Reply, Vec<ServerError>>,
}

impl ReconnectingSession {
    /// Starts with this open session.
    pub(crate) fn new(config: SessionConfig, session: Session) -> Rc<ReconnectingSession> {
        Rc::new(ReconnectingSession {
            config,
            profile: session.profile.clone(),
            counters: CounterCells::default(),
            flush_epochs: FlushEpochs::default(),
            state: RefCell::new(SessionState::Connected(Rc::new(session))),
            wakers: RefCell::default(),
        })
    }

    /// Waits for a connected session.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] once reconnecting has failed.
    async fn session(&self) -> Result<Rc<Session>, Error> {
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

    /// Executes a request, again on a new session when the connection is lost or the server shuts down: every request is
    /// idempotent. The returned result is final, success or not.
    pub(crate) async fn execute(
        self: &Rc<Self>,
        build: impl Fn() -> Result<ClientRequest, Error>,
    ) -> Result<CompletedRequest, Error> {
        let mut losses = 0;
        loop {
            let session = self.session().await?;
            let epoch = self.flush_epochs.epoch();
            let request = build()?;
            let connection = Rc::clone(session.pick());
            let lost = match connection.execute(request).await {
                Ok(Err(errors)) if is_shutdown(&errors) => ConnectionLost("the server is shutting down".into()),
                Ok(outcome) => return Ok(CompletedRequest { epoch, result: outcome }),
                Err(RequestError::NotSent(error)) => {
                    return Err(
                        ErrorKind::Media { reason: format!("the server takes no such request: {error}") }.into()
                    );
                }
                Err(RequestError::Lost(lost)) => lost,
            };
            self.session_lost(&session, &lost);
            losses += 1;
            if losses >= self.config.options.max_connection_losses.max(1) {
                let reason = format!("{losses} connections were lost with this request; the last one: {lost}");
                return Err(ErrorKind::Unreachable { reason }.into());
            }
        }
    }

    /// Ends the session after the loss of one of its connections, and starts to reconnect unless that is in progress.
    fn session_lost(self: &Rc<Self>, session: &Rc<Session>, lost: &ConnectionLost) {
        {
            let mut state = self.state.borrow_mut();
            match &*state {
                SessionState::Connected(current) if Rc::ptr_eq(current, session) => *state = SessionState::Reconnecting,
                SessionState::Connected(_) | SessionState::Reconnecting | SessionState::Failed(_) => return,
            }
        }
        tracing::warn!(server = %self.config.address, %lost, "connection lost");
        self.retire_session(session);
        session.end(&lost.0);
        spawn(reconnect(Rc::downgrade(self), lost.clone()));
    }

    /// Adds up the counters of a session that ended, and records that its unflushed writes may be lost.
    fn retire_session(&self, session: &Session) {
        add(&self.counters.past_requests, session.completed_count());
        self.flush_epochs.session_lost(self.profile.flush);
    }

    /// Resumes waiting requests on a new session.
    fn set_connected(&self, session: Session) {
        add(&self.counters.reconnects, 1);
        let before = self.state.replace(SessionState::Connected(Rc::new(session)));
        drop(before);
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
        self.fail(&format!(
            "the connection to {address} was lost ({lost}), and {attempts} attempts within {time:?} to set it up again \
             failed; the last one: {last}"
        ));
    }

    fn is_reconnecting(&self) -> bool {
        matches!(&*self.state.borrow(), SessionState::Reconnecting)
    }

    fn wake(&self) {
        let waiting = self.wakers.take();
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Counters over all sessions.
    pub(crate) fn counters(&self) -> Counters {
        let counting = &self.counters;
        let now = self.current_session().map_or(0, |session| session.completed_count());
        Counters {
            requests: counting.past_requests.get() + now,
            received_bytes: counting.received_bytes.get(),
            sent_bytes: counting.sent_bytes.get(),
            reconnects: counting.reconnects.get(),
        }
    }
}

/// Opens a new session: at once, then with growing pauses, until an attempt succeeds or the limits are reached.
async fn reconnect(reconnecting: Weak<ReconnectingSession>, lost: ConnectionLost) {
    let Some(limits) = reconnecting.upgrade().map(|reconnecting| reconnecting.config.options.reconnect) else { return };
    let begin = now();
    let (mut delay, mut attempts) = (limits.first_delay, 0);
    let mut last = String::from("no attempt was allowed");
    while attempts < limits.attempts {
        if attempts > 0 {
            sleep(delay.min(limits.total.saturating_sub(begin.elapsed()))).await;
            delay = (delay * 2).min(limits.max_delay);
        }
        let Some(reconnecting) = reconnecting.upgrade().filter(|reconnecting| reconnecting.is_reconnecting()) else {
            return;
        };
        let left = limits.total.saturating_sub(begin.elapsed());
        if left.is_zero() {
            break;
        }
        attempts += 1;
        let Ok(result) = timeout(left, reconnecting.config.open()).await else { break };
        match result.and_then(|session| session.profile.check_unchanged(&reconnecting.profile).map(|()| session)) {
            // The device was closed in the meantime.
            Ok(_) if !reconnecting.is_reconnecting() => return,
            Ok(session) => return reconnecting.set_connected(session),
            Err(error) if !error.is_transient() => {
                return reconnecting.fail(&format!("after a lost connection ({lost}): {error}"));
            }
            Err(error) => last = error.to_string(),
        }
    }
    if let Some(reconnecting) = reconnecting.upgrade() {
        reconnecting.fail_after_attempts(&lost, attempts, begin.elapsed(), &last);
    }
}
