//! Admin commands that complete later: Asynchronous Event Requests, and commands that wait for a device or for another
//! controller.
//!
//! Invariants: one task waits for all event requests of a queue. A request is removed completely and at once when an
//! event occurs, when it is aborted, when its identifier is reused, and when the controller is reset. A command that
//! waits for a device keeps its connection, which counts against the limit of connections until the command has ended.
//! Commands from before a reset get no completions.

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use sealblock_protocols_nvme::{Command, StatusCode};
use sealblock_protocols_nvme_tcp::target::Token;
use sealblock_runtime_reactor::{Sleep, now, sleep_until, spawn};

use crate::command::reply::Reply;
use crate::connection::task::{Connection, Role};
use crate::model::async_events::AsyncEvents;
use crate::model::command_error::CommandError;
use crate::model::controller::Controller;

impl Connection {
    /// Adds a request.
    ///
    /// # Errors
    /// Asynchronous Event Request Limit Exceeded.
    pub(crate) fn request_event(
        self: &Rc<Self>,
        controller: &Arc<Controller>,
        token: Token,
        command: &Command,
    ) -> Result<(), StatusCode> {
        let is_first = self.event_requests.add(token, command)?;
        self.core.borrow_mut().allow_unanswered(token);
        if is_first {
            spawn(complete_requests(Rc::downgrade(self), Arc::clone(&controller.async_events)));
        }
        controller.async_events.wake();
        Ok(())
    }

    /// Aborts a request, which completes at once; true if it was outstanding.
    pub(crate) fn abort_event_request(&self, cid: u16) -> bool {
        let Some((token, command)) = self.event_requests.take(cid) else { return false };
        self.complete(token, &command, Err(StatusCode::ABORT_REQUESTED.into()));
        true
    }

    /// Drops all admin commands in flight without completions, because the controller was reset. Those whose data is in
    /// transfer, or that wait for a device, are dropped when that has ended.
    pub(crate) fn forget_commands(&self) {
        self.resets.set(self.resets.get() + 1);
        let waiting = self.waiting.take().into_iter().map(|waiting| waiting.token());
        let forgotten: Vec<Token> = self.event_requests.take_all().chain(waiting).collect();
        let mut core = self.core.borrow_mut();
        forgotten.into_iter().for_each(|token| core.forget(token));
    }

    /// Completes an admin command, unless the controller was reset since it was received.
    pub(crate) fn complete_unless_reset(
        &self,
        token: Token,
        command: &Command,
        resets: u64,
        outcome: Result<Reply, CommandError>,
    ) {
        match self.resets.get() == resets {
            true => self.complete(token, command, outcome),
            false => self.core.borrow_mut().forget(token),
        }
    }

    /// Completes a command with the result of `work`, which is informed when nobody waits for it any more.
    /// `reply_bytes` is what was counted for its data.
    pub(crate) fn complete_later(
        self: &Rc<Self>,
        token: Token,
        command: &Command,
        reply_bytes: u64,
        work: impl AsyncFnOnce(&dyn Fn() -> bool) -> Result<Reply, CommandError> + 'static,
    ) {
        let (connection, command, resets) = (Rc::clone(self), *command, self.resets.get());
        self.command_started();
        spawn(async move {
            let is_over = || connection.core.borrow().closed().is_some() || connection.resets.get() != resets;
            let outcome = work(&is_over).await;
            let outcome = if connection.resets.get() == resets { outcome } else { Ok(Reply::Done(0)) };
            connection.settle_reply(reply_bytes, &outcome);
            connection.complete_unless_reset(token, &command, resets, outcome);
            connection.command_ended();
        });
    }

    /// A command begins that occupies no slot.
    pub(crate) fn command_started(&self) {
        self.running.set(self.running.get() + 1);
    }

    /// A command has ended that occupied no slot.
    pub(crate) fn command_ended(&self) {
        self.running.set(self.running.get() - 1);
        self.scheduler.wake();
    }

    /// Completes the oldest request with an event, if there are both. Otherwise returns when the next event is due that
    /// waits for its interval.
    fn report_event(&self, events: &AsyncEvents) -> Result<(), Option<Instant>> {
        if self.event_requests.is_empty() {
            return Err(None);
        }
        let event = events.take(now())?;
        if let Some((token, command)) = self.event_requests.take_oldest() {
            self.complete(token, &command, Ok(Reply::Done(u64::from(event.dword0()))));
        }
        Ok(())
    }
}

/// Completes requests until the connection is no longer an admin queue. Does not keep the connection alive.
async fn complete_requests(connection: Weak<Connection>, events: Arc<AsyncEvents>) {
    let mut timer: Option<Sleep> = None;
    poll_fn(|cx| {
        // Registers before it checks, so that no event is missed.
        events.listen(cx);
        let Some(connection) = connection.upgrade() else { return Poll::Ready(()) };
        if !matches!(&*connection.role.borrow(), Role::Admin(_)) {
            return Poll::Ready(());
        }
        let due = loop {
            match connection.report_event(&events) {
                Ok(()) => {}
                Err(due) => break due,
            }
        };
        timer = due.map(sleep_until);
        match timer.as_mut().map(|timer| Pin::new(timer).poll(cx)) {
            Some(Poll::Ready(())) => cx.waker().wake_by_ref(),
            Some(Poll::Pending) | None => {}
        }
        Poll::Pending
    })
    .await
}
