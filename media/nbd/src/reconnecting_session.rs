//! The way to the export: a session while there is one, a new one when it is lost, and an end to trying.
//!
//! Invariants: a request waits for a session, or learns that there will be none; a session that replaces another leads to an
//! export of the same shape; every attempt, pause and repetition is bounded by [`crate::Options`].

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::task::{Poll, Waker};
use std::time::Duration;

use sealblock_block::{Error, ErrorKind, FlushEpochs};
use sealblock_protocols_nbd::client::{Answer, ClientRequest, ServerError};
use sealblock_runtime_reactor::{now, sleep, spawn, timeout};

use crate::error::{Lost, NoAnswer};
use crate::facts::{Counters, Counting, add};
use crate::session::{Session, SessionConfig};
use crate::shape::Shape;
use crate::status::is_shutdown;

/// What leads to the export now.
enum State {
    Up(Rc<Session>),
    /// A new session is being set up.
    Down,
    /// There will be none.
    Dead(Rc<str>),
}

/// The way to one export.
pub(crate) struct ReconnectingSession {
    pub(crate) plan: SessionConfig,
    /// The export as it was first met, and has to stay.
    pub(crate) shape: Shape,
    pub(crate) counting: Counting,
    pub(crate) ledger: FlushEpochs,
    state: RefCell<State>,
    waiting: RefCell<Vec<Waker>>,
}

/// A request that was answered.
pub(crate) struct Answered {
    /// [`Ledger::epoch`] of the session that it went through.
    pub(crate) epoch: u64,
    pub(crate) outcome: Result<Answer, Vec<ServerError>>,
}

impl ReconnectingSession {
    /// The way that begins with this session.
    pub(crate) fn new(plan: SessionConfig, session: Session) -> Rc<ReconnectingSession> {
        Rc::new(ReconnectingSession {
            plan,
            shape: session.shape.clone(),
            counting: Counting::default(),
            ledger: FlushEpochs::default(),
            state: RefCell::new(State::Up(Rc::new(session))),
            waiting: RefCell::default(),
        })
    }

    /// The session, as soon as there is one.
    async fn session(&self) -> Result<Rc<Session>, Error> {
        std::future::poll_fn(|cx| match &*self.state.borrow() {
            State::Up(session) => Poll::Ready(Ok(Rc::clone(session))),
            State::Dead(reason) => Poll::Ready(Err(ErrorKind::Unreachable { reason: reason.to_string() }.into())),
            State::Down => {
                self.waiting.borrow_mut().push(cx.waker().clone());
                Poll::Pending
            }
        })
        .await
    }

    /// The session of this moment, if there is one.
    pub(crate) fn session_now(&self) -> Option<Rc<Session>> {
        match &*self.state.borrow() {
            State::Up(session) => Some(Rc::clone(session)),
            State::Down | State::Dead(_) => None,
        }
    }

    /// Carries a request out, over a new session when the connection is lost or the server goes away: all of them may be
    /// repeated. What comes back is final, success or not.
    pub(crate) async fn run(
        self: &Rc<Self>,
        build: impl Fn() -> Result<ClientRequest, Error>,
    ) -> Result<Answered, Error> {
        let mut losses = 0;
        loop {
            let session = self.session().await?;
            let epoch = self.ledger.epoch();
            let ask = build()?;
            let connection = Rc::clone(session.pick());
            let lost = match connection.call(ask).await {
                Ok(Err(troubles)) if is_shutdown(&troubles) => Lost("the server is shutting down".into()),
                Ok(outcome) => return Ok(Answered { epoch, outcome }),
                Err(NoAnswer::NotSent(error)) => {
                    return Err(
                        ErrorKind::Media { reason: format!("the server takes no such request: {error}") }.into()
                    );
                }
                Err(NoAnswer::Lost(lost)) => lost,
            };
            self.lost(&session, &lost);
            losses += 1;
            if losses >= self.plan.options.max_connection_losses.max(1) {
                let reason = format!("{losses} connections were lost with this request; the last one: {lost}");
                return Err(ErrorKind::Unreachable { reason }.into());
            }
        }
    }

    /// A connection of the session is over, so all of it is. Sets up a new one, unless that is being done already.
    fn lost(self: &Rc<Self>, session: &Rc<Session>, lost: &Lost) {
        {
            let mut state = self.state.borrow_mut();
            match &*state {
                State::Up(current) if Rc::ptr_eq(current, session) => *state = State::Down,
                State::Up(_) | State::Down | State::Dead(_) => return,
            }
        }
        tracing::warn!(server = %self.plan.address, %lost, "connection lost");
        self.retire(session);
        session.end(&lost.0);
        spawn(reconnect(Rc::downgrade(self), lost.clone()));
    }

    /// Counts what went through a session that is over, and what of it is in doubt.
    fn retire(&self, session: &Session) {
        add(&self.counting.past_requests, session.answered());
        self.ledger.session_lost(self.shape.flush);
    }

    /// There is a session again.
    fn up(&self, session: Session) {
        add(&self.counting.reconnects, 1);
        let before = self.state.replace(State::Up(Rc::new(session)));
        drop(before);
        self.wake();
    }

    /// There will be no session any more.
    pub(crate) fn fail(&self, reason: &str) {
        let before = {
            let mut state = self.state.borrow_mut();
            match &*state {
                State::Dead(_) => return,
                State::Up(_) | State::Down => std::mem::replace(&mut *state, State::Dead(reason.into())),
            }
        };
        if let State::Up(session) = &before {
            self.retire(session);
            session.end(reason);
        }
        drop(before);
        self.wake();
    }

    /// The limits of reconnecting are reached.
    fn give_up(&self, lost: &Lost, attempts: u32, time: Duration, last: &str) {
        let address = &self.plan.address;
        self.fail(&format!(
            "the connection to {address} was lost ({lost}), and {attempts} attempts within {time:?} to set it up again \
             failed; the last one: {last}"
        ));
    }

    fn is_down(&self) -> bool {
        matches!(&*self.state.borrow(), State::Down)
    }

    fn wake(&self) {
        let waiting = self.waiting.take();
        waiting.into_iter().for_each(Waker::wake);
    }

    /// What went through so far.
    pub(crate) fn counters(&self) -> Counters {
        let counting = &self.counting;
        let now = self.session_now().map_or(0, |session| session.answered());
        Counters {
            requests: counting.past_requests.get() + now,
            received_bytes: counting.received_bytes.get(),
            sent_bytes: counting.sent_bytes.get(),
            reconnects: counting.reconnects.get(),
        }
    }
}

/// Sets up a new session: at once, then with growing pauses, until it is there or the limits are reached.
async fn reconnect(link: Weak<ReconnectingSession>, lost: Lost) {
    let Some(limits) = link.upgrade().map(|link| link.plan.options.reconnect) else { return };
    let begin = now();
    let (mut delay, mut attempts) = (limits.first_delay, 0);
    let mut last = String::from("no attempt was allowed");
    while attempts < limits.attempts {
        if attempts > 0 {
            sleep(delay.min(limits.total.saturating_sub(begin.elapsed()))).await;
            delay = (delay * 2).min(limits.max_delay);
        }
        let Some(link) = link.upgrade().filter(|link| link.is_down()) else { return };
        let left = limits.total.saturating_sub(begin.elapsed());
        if left.is_zero() {
            break;
        }
        attempts += 1;
        let Ok(opened) = timeout(left, link.plan.open()).await else { break };
        match opened.and_then(|session| session.shape.same_as(&link.shape).map(|()| session)) {
            // Closed in the meantime.
            Ok(_) if !link.is_down() => return,
            Ok(session) => return link.up(session),
            Err(error) if !error.is_transient() => {
                return link.fail(&format!("after a lost connection ({lost}): {error}"));
            }
            Err(error) => last = error.to_string(),
        }
    }
    if let Some(link) = link.upgrade() {
        link.give_up(&lost, attempts, begin.elapsed(), &last);
    }
}
