//! Ends a connection: because of a timer, of a signal from another core, or because its own core stops.
//!
//! While a connection drains, it accepts no more commands. Writes whose data was already requested get their data, and
//! commands in flight complete, for at most [`crate::Limits::drain`]. The admin queue waits for the I/O queues of its
//! controller, which would otherwise be aborted together with it.

use std::future::{Future, poll_fn};
use std::net::Shutdown;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, Instant};

use sealblock_runtime_reactor::{now, shutdown_requested, sleep_until, timeout};
use sealblock_transport::Signals;

use crate::connection::task::{Connection, Role};

/// Why the control task of a connection runs.
enum ControlEvent {
    Signals(Signals),
    Timer,
    CoreStopping,
}

impl Connection {
    /// Handles the timer and the signals of other cores until the task is aborted.
    pub(crate) async fn control(self: Rc<Self>) {
        let mut stopping = pin!(shutdown_requested());
        loop {
            let mut timer = self.deadline().map(sleep_until);
            let event = poll_fn(|cx| {
                if let Poll::Ready(signals) = self.registration.signal.poll(cx) {
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
        if signals.has(Signals::CHANGED)
            && let Role::Io(context, _) = &*self.role.borrow()
        {
            // Resolving the namespaces releases the removed ones.
            drop(context.namespaces());
        }
        if signals.has(Signals::DRAIN) {
            self.begin_drain();
        }
    }

    /// The next time at which the timer fires.
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
            tracing::debug!("connection closed: timeout");
            self.abort();
        }
    }

    /// Makes the control task reset its timer.
    pub(crate) fn rearm_timer(&self) {
        self.registration.signal.send(Signals::TIMER);
    }

    /// True if the connection drains.
    pub(crate) fn is_draining(&self) -> bool {
        self.drain_deadline.get().is_some()
    }

    /// Accepts no more commands, completes those in flight, then ends the connection.
    pub(crate) fn begin_drain(&self) {
        if !self.is_draining() {
            self.drain_deadline.set(Some(now() + self.target.limits.drain));
            self.stop_receiving_if_drained();
        }
    }

    /// Stops receiving once a draining connection expects no more data.
    pub(crate) fn stop_receiving_if_drained(&self) {
        let fetches = || self.fetching.borrow().iter().any(Option::is_some);
        if self.is_draining() && !fetches() && self.waiting.borrow().is_empty() {
            self.stop_receiving();
        }
    }

    fn stop_receiving(&self) {
        if !self.is_receive_stopped.replace(true) {
            // Fails only if the peer has already closed.
            let _ = self.stream.shutdown(Shutdown::Read);
        }
    }

    /// Waits until the commands in flight have completed, or the drain time has passed.
    pub(crate) async fn drain(&self) {
        let remaining =
            |until: Option<Instant>| until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now()));
        let done = poll_fn(|_| if self.busy() == 0 { Poll::Ready(()) } else { Poll::Pending });
        if timeout(remaining(self.drain_deadline.get()), done).await.is_err() {
            tracing::warn!(commands = self.busy(), "commands still in flight after the drain time");
        }
        let role = self.role.borrow().clone();
        if let Role::Admin(controller) = role {
            // The I/O queues have the same time to drain, so the result does not matter.
            let _ = timeout(remaining(self.drain_deadline.get()), poll_fn(|cx| controller.poll_drained(cx))).await;
        }
    }
}
