//! A client's session, which is opened again when one of its connections is lost. The limits of reconnecting are for the
//! requests that wait: once they are reached, requests fail. The device reconnects all the same, until its peer is back
//! or cannot be used any more.
//!
//! Invariants: a request waits for a session, or fails once the limits are reached, until there is a session. A new
//! session is to the same device as the first. A change is not sent while a lost session may still deliver another
//! change to its blocks ([`Changes`]). The limits of the [`Endpoint`] bound every attempt and pause, and how long and how
//! often a request is repeated. A Flush on a later session does not make writes of a lost session durable
//! ([`FlushEpochs`]).

use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::Deref;
use std::rc::{Rc, Weak};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use sealblock_block::{Error, ErrorKind, FlushEpochs, WriteSet};
use sealblock_runtime_reactor::net::Reconnect;
use sealblock_runtime_reactor::{Notify, now, sleep, spawn, timeout};

use crate::changes::{AwaitedChange, Changes, SentChange};
use crate::connection::{ClientCore, Connection, ConnectionLost, RequestError};
use crate::lineage::Lineage;
use crate::monitor::ConnectionMonitor;

/// The peer of a client: opens sessions, and keeps the state that outlives them.
pub trait Endpoint: Sized + 'static {
    /// A set of connections that accept requests.
    type Session: 'static;
    /// The address of the peer.
    type Address: fmt::Display;
    /// Why a session cannot be opened.
    type OpenError: fmt::Display;

    /// The peer's name in errors and log lines.
    fn address(&self) -> &Self::Address;
    /// The state that outlives the device.
    fn lineage(&self) -> &Lineage;
    /// The limits of reconnecting.
    fn limits(&self) -> ReconnectLimits;
    /// True if a write is volatile until a Flush.
    fn is_volatile(&self) -> bool;
    /// Opens another session with this number ([`Lineage::next_session`]), and checks that it is to the same device as
    /// the first.
    fn reopen(&self, number: u64) -> impl Future<Output = Result<Self::Session, Self::OpenError>>;
    /// True if no later attempt can succeed.
    fn is_final(error: &Self::OpenError) -> bool;
    /// Why a connection of the session has ended; `None` while all are open.
    fn lost(session: &Self::Session) -> Option<ConnectionLost>;
    /// True if the peer guarantees that it executes nothing of earlier sessions after the requests of this one.
    fn is_fenced(_session: &Self::Session) -> bool {
        false
    }
    /// Called when a session accepts requests.
    fn session_started(_: &Rc<Reconnecting<Self>>, _: &Rc<Self::Session>) {}
    /// Ends a session: its connections and tasks. Its counters are read for the last time.
    fn end_session(&self, session: &Self::Session, reason: &str);
}

/// How long and how often a client retries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReconnectLimits {
    /// Limits of reconnecting after one loss, while a request waits for the session.
    pub reconnect: Reconnect,
    /// The number of connections that one request may lose before it fails: a request that crashes its peer must not be
    /// sent forever.
    pub max_losses: u8,
    /// The time after which a lost session can deliver nothing more, if the peer does not fence sessions.
    pub quiesce: Duration,
    /// The maximum time that a request waits for changes to its blocks that a lost session may still deliver.
    pub late_wait: Duration,
}

/// The time in which changes of a lost session are cleared once they can no longer be executed.
const CLEARING: Duration = Duration::from_secs(1);

/// The current session.
enum SessionState<S> {
    Connected(Rc<S>, u64),
    /// A new session is being opened, and requests wait for it.
    Reconnecting,
    /// The limits of reconnecting were reached: requests fail. A new session is being opened all the same.
    Refusing(Rc<str>),
    /// The device was closed, does not reconnect, or would find another device. Final.
    Failed(Rc<str>),
}

/// An endpoint, and a session to it that is replaced when it is lost. Dereferences to the endpoint.
pub struct Reconnecting<E: Endpoint> {
    endpoint: E,
    /// Which writes a Flush makes durable.
    pub flush_epochs: FlushEpochs,
    state: RefCell<SessionState<E::Session>>,
    wakers: RefCell<Vec<Waker>>,
    /// Requests that wait for a session.
    waiting: Cell<usize>,
    /// Ends a pause of reconnecting: a first request waits for the session.
    awaited: Rc<Notify>,
    reconnects: Cell<u64>,
    /// When the current or last session was opened.
    opened: Cell<Instant>,
    monitor: ConnectionMonitor,
}

/// A request that waits for a session.
struct WaitingRequest<'a, E: Endpoint>(&'a Reconnecting<E>);

/// The arguments of an attempt besides its session.
pub struct Sending {
    /// The session's [`FlushEpochs::epoch`].
    pub epoch: u64,
    /// The request's change, for [`Connection::execute_change`](crate::Connection::execute_change).
    pub change: Option<SentChange>,
}

/// The outcome of sending a request once.
pub enum Attempt<T> {
    /// Final: success or failure.
    Done(T),
    /// Send the request again after this pause.
    Again(Duration),
}

/// Why a request has no outcome.
pub enum AttemptError {
    /// The session was lost; the request is sent again on the next one.
    Lost(ConnectionLost),
    /// The request fails.
    Failed(Error),
}

impl From<RequestError> for AttemptError {
    fn from(error: RequestError) -> AttemptError {
        match error {
            RequestError::Lost(lost) => AttemptError::Lost(lost),
            RequestError::NotSent(reason) => AttemptError::Failed(ErrorKind::Media { reason }.into()),
        }
    }
}

impl From<Error> for AttemptError {
    fn from(error: Error) -> AttemptError {
        AttemptError::Failed(error)
    }
}

impl<E: Endpoint> Deref for Reconnecting<E> {
    type Target = E;

    fn deref(&self) -> &E {
        &self.endpoint
    }
}

impl<E: Endpoint> Reconnecting<E> {
    /// Starts with this open session and its number.
    pub fn new(endpoint: E, session: E::Session, number: u64) -> Rc<Reconnecting<E>> {
        let session = Rc::new(session);
        let reconnecting = Rc::new(Reconnecting {
            endpoint,
            flush_epochs: FlushEpochs::default(),
            state: RefCell::new(SessionState::Connected(Rc::clone(&session), number)),
            wakers: RefCell::default(),
            waiting: Cell::new(0),
            awaited: Rc::default(),
            reconnects: Cell::new(0),
            opened: Cell::new(now()),
            monitor: ConnectionMonitor::default(),
        });
        reconnecting.lineage().session_started();
        if E::is_fenced(&session) {
            reconnecting.lineage().fenced_at(number);
        }
        E::session_started(&reconnecting, &session);
        reconnecting
    }

    fn changes(&self) -> &Rc<Changes> {
        &self.lineage().changes
    }

    /// Waits for a connected session.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] once reconnecting has failed.
    async fn session(&self) -> Result<(Rc<E::Session>, u64), Error> {
        let mut waiting = None;
        std::future::poll_fn(|cx| match &*self.state.borrow() {
            SessionState::Connected(session, number) => Poll::Ready(Ok((Rc::clone(session), *number))),
            SessionState::Refusing(reason) | SessionState::Failed(reason) => {
                Poll::Ready(Err(ErrorKind::Unreachable { reason: reason.to_string() }.into()))
            }
            SessionState::Reconnecting => {
                waiting.get_or_insert_with(|| WaitingRequest::of(self));
                let mut wakers = self.wakers.borrow_mut();
                if !wakers.iter().any(|other| other.will_wake(cx.waker())) {
                    wakers.push(cx.waker().clone());
                }
                Poll::Pending
            }
        })
        .await
    }

    /// The connected session, if there is one.
    pub fn current_session(&self) -> Option<Rc<E::Session>> {
        match &*self.state.borrow() {
            SessionState::Connected(session, _) => Some(Rc::clone(session)),
            SessionState::Reconnecting | SessionState::Refusing(_) | SessionState::Failed(_) => None,
        }
    }

    /// Reports whether the session is lost.
    pub fn monitor(&self) -> ConnectionMonitor {
        self.monitor.clone()
    }

    /// The number of times that a session was replaced.
    pub fn reconnects(&self) -> u64 {
        self.reconnects.get()
    }

    /// Executes an idempotent request that changes `write_set`: `attempt` sends it on the current session, and again on
    /// the next one if that session is lost.
    ///
    /// # Errors
    /// Those of `attempt`; [`ErrorKind::Unreachable`] once the limits are reached.
    pub async fn execute<T>(
        self: &Rc<Self>,
        write_set: WriteSet,
        mut attempt: impl AsyncFnMut(Rc<E::Session>, Sending) -> Result<Attempt<T>, AttemptError>,
    ) -> Result<T, Error> {
        let request_id = if write_set.is_empty() { 0 } else { self.changes().next_request() };
        let mut losses = 0;
        loop {
            let (session, number) = self.session().await?;
            if !self.changes().permits(request_id, &write_set) {
                self.wait_for_late(&session, request_id, &write_set).await?;
                continue;
            }
            let change = self.changes().start(number, request_id, &write_set);
            let awaited = AwaitedChange(change.clone());
            let outcome = attempt(Rc::clone(&session), Sending { epoch: self.flush_epochs.epoch(), change }).await;
            awaited.end();
            match outcome {
                Ok(Attempt::Done(outcome)) => return Ok(outcome),
                Ok(Attempt::Again(pause)) => sleep(pause).await,
                Err(AttemptError::Failed(error)) => return Err(error),
                Err(AttemptError::Lost(lost)) => {
                    self.session_lost(&session, &lost);
                    losses += 1;
                    if losses >= self.limits().max_losses.max(1) {
                        let reason = format!("{losses} connections were lost with this request; the last one: {lost}");
                        return Err(ErrorKind::Unreachable { reason }.into());
                    }
                }
            }
        }
    }

    /// Waits until no late change of another request overlaps. Also stops waiting if this session is lost, and reports
    /// the loss, because there may be no other task that notices it.
    #[cold]
    async fn wait_for_late(
        self: &Rc<Self>,
        session: &Rc<E::Session>,
        request_id: u64,
        write_set: &WriteSet,
    ) -> Result<(), Error> {
        let limit = self.limits().late_wait;
        let is_current = || self.current_session().is_some_and(|current| Rc::ptr_eq(&current, session));
        let ready = || {
            let is_lost = || is_current() && E::lost(session).is_some();
            self.changes().permits(request_id, write_set) || self.has_failed() || is_lost()
        };
        if timeout(limit, self.changes().wait_until(ready)).await.is_err() {
            let reason = format!("for {limit:?} a lost connection could still have changed these blocks");
            return Err(ErrorKind::Unreachable { reason }.into());
        }
        if let Some(lost) = E::lost(session) {
            self.session_lost(session, &lost);
        }
        Ok(())
    }

    /// Ends the session after the loss of one of its connections, and starts to reconnect unless that is in progress.
    pub fn session_lost(self: &Rc<Self>, session: &Rc<E::Session>, lost: &ConnectionLost) {
        let number = {
            let mut state = self.state.borrow_mut();
            match &*state {
                SessionState::Connected(current, number) if Rc::ptr_eq(current, session) => {
                    let number = *number;
                    *state = SessionState::Reconnecting;
                    number
                }
                SessionState::Connected(..)
                | SessionState::Reconnecting
                | SessionState::Refusing(_)
                | SessionState::Failed(_) => return,
            }
        };
        tracing::warn!(address = %self.address(), %lost, "connection lost");
        self.monitor.set_lost(&lost.0);
        self.retire(session, &lost.0);
        if self.changes().has_late(number) {
            spawn(clear_later(Rc::downgrade(self.changes()), number, self.limits().quiesce));
        }
        spawn(reconnect(Rc::downgrade(self), lost.clone()));
    }

    /// Ends a session, and records that its unflushed writes may be lost.
    fn retire(&self, session: &E::Session, reason: &str) {
        self.flush_epochs.session_lost(self.is_volatile());
        self.end_session(session, reason);
    }

    /// Resumes waiting requests on a new session.
    fn set_connected(self: &Rc<Self>, session: E::Session, number: u64) {
        let session = Rc::new(session);
        self.reconnects.set(self.reconnects.get() + 1);
        self.opened.set(now());
        self.monitor.set_connected();
        tracing::info!(address = %self.address(), "connection restored");
        let before = self.state.replace(SessionState::Connected(Rc::clone(&session), number));
        drop(before);
        if E::is_fenced(&session) {
            self.lineage().fenced_at(number);
        }
        E::session_started(self, &session);
        self.wake();
    }

    /// Fails waiting requests, and later ones until there is a session.
    fn refuse(&self, reason: &str) {
        {
            let mut state = self.state.borrow_mut();
            if !matches!(&*state, SessionState::Reconnecting) {
                return;
            }
            *state = SessionState::Refusing(reason.into());
        }
        self.changes().notify();
        self.wake();
    }

    /// Fails waiting and later requests; no further session is opened.
    pub fn fail(&self, reason: &str) {
        let before = {
            let mut state = self.state.borrow_mut();
            match &*state {
                SessionState::Failed(_) => return,
                SessionState::Connected(..) | SessionState::Reconnecting | SessionState::Refusing(_) => {
                    std::mem::replace(&mut *state, SessionState::Failed(reason.into()))
                }
            }
        };
        if let SessionState::Connected(session, _) = &before {
            self.retire(session, reason);
        }
        drop(before);
        self.monitor.set_failed(reason);
        self.changes().notify();
        self.wake();
    }

    /// Waits until the peer can execute no change any more that nobody waits for, while there is a session to it: who uses
    /// the same blocks after this device knows nothing of them. Changes of lost sessions end in the time that this waits;
    /// a change that hangs at the peer need not. True if there are none.
    pub async fn settled(&self) -> bool {
        if !self.is_settled() && self.current_session().is_some() {
            let address = self.address();
            tracing::warn!(%address, "waiting until earlier changes can be executed no more");
            let wait = self.changes().wait_until(|| self.is_settled() || self.current_session().is_none());
            // What is left then is the answer.
            let _ = timeout(self.limits().quiesce + CLEARING, wait).await;
        }
        self.is_settled()
    }

    /// True if the peer can execute no change any more that nobody waits for. Closing the device makes those of them that
    /// are in flight.
    pub fn is_settled(&self) -> bool {
        !self.changes().has_any_late()
    }

    /// Closes the device: waiting and later requests fail. This is no loss of the connection.
    pub fn close(&self) {
        self.fail("the device was closed");
        self.monitor.set_connected();
    }

    /// True if requests fail.
    fn has_failed(&self) -> bool {
        matches!(&*self.state.borrow(), SessionState::Refusing(_) | SessionState::Failed(_))
    }

    fn is_reconnecting(&self) -> bool {
        matches!(&*self.state.borrow(), SessionState::Reconnecting | SessionState::Refusing(_))
    }

    /// True if a request waits for the session.
    fn is_awaited(&self) -> bool {
        self.waiting.get() > 0 && !self.has_failed()
    }

    fn wake(&self) {
        let waiting = self.wakers.take();
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// Clears the changes of a lost session once they can no longer be executed, if the peer does not fence sessions.
async fn clear_later(changes: Weak<Changes>, number: u64, quiesce: Duration) {
    sleep(quiesce).await;
    if let Some(changes) = changes.upgrade() {
        changes.clear(number);
    }
}

impl<E: Endpoint> Drop for Reconnecting<E> {
    fn drop(&mut self) {
        let state = std::mem::replace(self.state.get_mut(), SessionState::Failed("it was dropped".into()));
        if let SessionState::Connected(session, _) = &state {
            // The requests in flight become late.
            self.endpoint.end_session(session, "closed by this host");
        }
        drop(state);
    }
}

impl<'a, E: Endpoint> WaitingRequest<'a, E> {
    fn of(reconnecting: &'a Reconnecting<E>) -> WaitingRequest<'a, E> {
        let before = reconnecting.waiting.get();
        reconnecting.waiting.set(before + 1);
        if before == 0 {
            reconnecting.awaited.notify();
        }
        WaitingRequest(reconnecting)
    }
}

impl<E: Endpoint> Drop for WaitingRequest<'_, E> {
    fn drop(&mut self) {
        self.0.waiting.set(self.0.waiting.get() - 1);
    }
}

/// Reports the loss of a session when this connection of it ends, also while no request is in flight. The session
/// aborts this task when it ends.
pub async fn watch_end<E: Endpoint, C: ClientCore>(
    reconnecting: Weak<Reconnecting<E>>,
    session: Weak<E::Session>,
    connection: Rc<Connection<C>>,
) {
    let lost = connection.ended().await;
    if let (Some(reconnecting), Some(session)) = (reconnecting.upgrade(), session.upgrade()) {
        reconnecting.session_lost(&session, &lost);
    }
}

/// Opens a new session: at once, then with growing pauses, until an attempt succeeds or none can. The limits count from
/// the moment when a request waits for the session; once they are reached, requests fail.
async fn reconnect<E: Endpoint>(reconnecting: Weak<Reconnecting<E>>, lost: ConnectionLost) {
    let Some((limits, lasted)) = reconnecting
        .upgrade()
        .map(|reconnecting| (reconnecting.limits().reconnect, reconnecting.opened.get().elapsed()))
    else {
        return;
    };
    // A peer that ends each session soon must not keep this core busy. A request that waits ends the pause.
    let mut pause = if lasted < limits.max_delay { limits.max_delay } else { Duration::ZERO };
    let (mut delay, mut attempts) = (limits.first_delay, 0);
    // Since when requests have been waiting.
    let mut begin = None;
    let mut last = String::from("none has ended in time");
    loop {
        let open = || reconnecting.upgrade().filter(|reconnecting| reconnecting.is_reconnecting());
        let Some((awaited, is_awaited)) =
            open().map(|reconnecting| (Rc::clone(&reconnecting.awaited), reconnecting.is_awaited()))
        else {
            return;
        };
        let has_limits = limits.attempts > 0 && !limits.total.is_zero();
        if has_limits && !pause.is_zero() && (attempts > 0 || !is_awaited) {
            // The device may be dropped during the pause.
            let _ = timeout(pause, awaited.wait()).await;
        }
        let Some(reconnecting) = open() else { return };
        let why = format!("the connection to {} was lost ({lost})", reconnecting.address());
        if !has_limits {
            return reconnecting.fail(&why);
        }
        begin = match (reconnecting.is_awaited(), begin) {
            (true, None) => {
                (delay, attempts) = (limits.first_delay, 0);
                Some(now())
            }
            (true, begin) => begin,
            (false, _) => None,
        };
        let left = || begin.map_or(limits.total, |begin| limits.total.saturating_sub(begin.elapsed()));
        let refuse = |begin: Instant, attempts: u32, last: &str| {
            let time = begin.elapsed().as_secs_f64();
            reconnecting.refuse(&format!(
                "{why}, and {attempts} attempts within {time:.1} s to set it up again failed; the last one: {last}"
            ));
        };
        if let Some(begin) = begin.filter(|_| left().is_zero()) {
            refuse(begin, attempts, &last);
        }
        attempts = u32::saturating_add(attempts, 1);
        let number = reconnecting.lineage().next_session();
        let limit = if left().is_zero() { limits.total } else { left() };
        match timeout(limit, reconnecting.reopen(number)).await {
            // The device was closed in the meantime.
            Ok(Ok(_)) if !reconnecting.is_reconnecting() => return,
            Ok(Ok(session)) => return reconnecting.set_connected(session, number),
            Ok(Err(error)) if E::is_final(&error) => {
                return reconnecting.fail(&format!("after a lost connection ({lost}): {error}"));
            }
            Ok(Err(error)) => last = error.to_string(),
            Err(_) => {}
        }
        if let Some(begin) = begin.filter(|_| attempts >= limits.attempts || left().is_zero()) {
            refuse(begin, attempts, &last);
        }
        pause = if reconnecting.is_awaited() { delay.min(left()) } else { delay };
        delay = (delay * 2).min(limits.max_delay);
    }
}
