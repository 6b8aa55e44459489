//! How a connection is ended from without: by the clock, by another core, by its own core when that stops.
//!
//! A graceful end: no further command is taken; Writes whose data the host was asked for get their data, commands that
//! were taken are carried out and answered, for [`crate::Limits::drain`] at most. The admin queue waits for the I/O queues
//! of its controller, which would otherwise be cut off with it.

use std::future::{Future, poll_fn};
use std::net::Shutdown;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, Instant};

use sealblock_runtime_reactor::{now, sleep_until, stopping, timeout};

use crate::connection::{Connection, Role};
use crate::signal::Signals;

/// Why the task that controls a connection runs.
enum ControlEvent {
    Signals(Signals),
    Timer,
    CoreStopping,
}

impl Connection {
    /// Obeys the clock and other cores until it is aborted.
    pub(crate) async fn control(self: Rc<Self>) {
        let mut stopping = pin!(stopping());
        loop {
            let mut timer = self.deadline().map(sleep_until);
            let event = poll_fn(|cx| {
                if let Poll::Ready(signals) = self.signal.poll(cx) {
                    return Poll::Ready(ControlEvent::Signals(signals));
                }
                if !self.is_draining() && stopping.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(ControlEvent::CoreStopping);
                }
                match &mut timer {
                    Some(timer) => Pin::new(timer).poll(cx).map(|()| ControlEvent::Timer),
                    None => Poll::Pending,
                }
            });
            match event.await {
                ControlEvent::Signals(signals) => self.handle_signals(signals),
                ControlEvent::CoreStopping => self.begin_drain(),
                ControlEvent::Timer => self.on_timer(),
            }
        }
    }

    fn handle_signals(self: &Rc<Self>, signals: Signals) {
        if signals.has(Signals::ABORT) {
            return self.abort();
        }
        if signals.has(Signals::NAMESPACES)
            && let Role::Io(context, _) = &*self.role.borrow()
        {
            // Looking at what is there now lets go what is not.
            drop(context.namespaces());
        }
        if signals.has(Signals::DRAIN) {
            self.begin_drain();
        }
    }

    /// When to look at the clock next.
    fn deadline(&self) -> Option<Instant> {
        if self.is_aborted.get() {
            return None;
        }
        if self.is_draining() {
            return self.drain_deadline.get().filter(|_| !self.is_receive_stopped.get());
        }
        match &*self.role.borrow() {
            Role::New => Some(self.accepted + self.target.limits.connect),
            Role::Admin(controller) => Some(controller.deadline(self.target.limits.idle)),
            Role::Io(..) => None,
        }
    }

    fn on_timer(&self) {
        if self.is_draining() {
            return self.stop_receiving();
        }
        let is_silent = match &*self.role.borrow() {
            Role::New => true,
            Role::Admin(controller) => controller.is_silent(self.target.limits.idle),
            Role::Io(..) => false,
        };
        if is_silent {
            tracing::debug!("the peer was silent too long");
            self.abort();
        }
    }

    /// What the clock is watched for has changed.
    pub(crate) fn rearm_timer(&self) {
        self.signal.send(Signals::TIMER);
    }

    /// Whether the connection is to end gracefully.
    pub(crate) fn is_draining(&self) -> bool {
        self.drain_deadline.get().is_some()
    }

    /// Takes no more commands, answers those in flight, then ends the connection.
    pub(crate) fn begin_drain(&self) {
        if !self.is_draining() {
            self.drain_deadline.set(Some(now() + self.target.limits.drain));
            self.stop_receiving_if_drained();
        }
    }

    /// Stops receiving once a connection that is to end expects no more data.
    pub(crate) fn stop_receiving_if_drained(&self) {
        let fetches = || self.fetching.borrow().iter().any(Option::is_some);
        if self.is_draining() && !fetches() && self.waiting.borrow().is_empty() {
            self.stop_receiving();
        }
    }

    fn stop_receiving(&self) {
        if !self.is_receive_stopped.replace(true) {
            // A peer that has gone already is as good.
            let _ = self.stream.shutdown(Shutdown::Read);
        }
    }

    /// Lets the commands in flight come to their ends, for a while.
    pub(crate) async fn drain(&self) {
        let remaining =
            |until: Option<Instant>| until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now()));
        let done = poll_fn(|_| if self.busy() == 0 { Poll::Ready(()) } else { Poll::Pending });
        if timeout(remaining(self.drain_deadline.get()), done).await.is_err() {
            tracing::warn!(commands = self.busy(), "commands were not done when the target stopped");
        }
        let role = self.role.borrow().clone();
        if let Role::Admin(controller) = role {
            // Time is up for the I/O queues as well, so it does not matter how this ends.
            let _ = timeout(remaining(self.drain_deadline.get()), poll_fn(|cx| controller.poll_drained(cx))).await;
        }
    }
}
