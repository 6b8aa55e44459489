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
enum Turn {
    Orders(Signals),
    Clock,
    CoreStops,
}

impl Connection {
    /// Obeys the clock and other cores until it is aborted.
    pub(crate) async fn control(self: Rc<Self>) {
        let mut stopping = pin!(stopping());
        loop {
            let mut clock = self.deadline().map(sleep_until);
            let turn = poll_fn(|cx| {
                if let Poll::Ready(orders) = self.line.poll_orders(cx) {
                    return Poll::Ready(Turn::Orders(orders));
                }
                if !self.is_draining() && stopping.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Turn::CoreStops);
                }
                match &mut clock {
                    Some(clock) => Pin::new(clock).poll(cx).map(|()| Turn::Clock),
                    None => Poll::Pending,
                }
            });
            match turn.await {
                Turn::Orders(orders) => self.obey(orders),
                Turn::CoreStops => self.stop(),
                Turn::Clock => self.time_is_up(),
            }
        }
    }

    fn obey(self: &Rc<Self>, orders: Signals) {
        if orders.has(Signals::KILL) {
            return self.kill();
        }
        if orders.has(Signals::NAMESPACES)
            && let Role::Io(member, _) = &*self.role.borrow()
        {
            // Looking at what is there now lets go what is not.
            drop(member.namespaces());
        }
        if orders.has(Signals::STOP) {
            self.stop();
        }
    }

    /// When to look at the clock next.
    fn deadline(&self) -> Option<Instant> {
        if self.aborted.get() {
            return None;
        }
        if self.is_draining() {
            return self.drain_until.get().filter(|_| !self.receive_stopped.get());
        }
        match &*self.role.borrow() {
            Role::New => Some(self.accepted + self.target.limits.connect),
            Role::Admin(controller) => Some(controller.deadline(self.target.limits.idle)),
            Role::Io(..) => None,
        }
    }

    fn time_is_up(&self) {
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
            self.kill();
        }
    }

    /// What the clock is watched for has changed.
    pub(crate) fn watch(&self) {
        self.line.order(Signals::CLOCK);
    }

    /// Whether the connection is to end gracefully.
    pub(crate) fn is_draining(&self) -> bool {
        self.drain_until.get().is_some()
    }

    /// Takes no more commands, answers those in flight, then ends the connection.
    pub(crate) fn stop(&self) {
        if !self.is_draining() {
            self.drain_until.set(Some(now() + self.target.limits.drain));
            self.settle();
        }
    }

    /// Stops receiving once a connection that is to end expects no more data.
    pub(crate) fn settle(&self) {
        let fetches = || self.fetching.borrow().iter().any(Option::is_some);
        if self.is_draining() && !fetches() && self.waiting.borrow().is_empty() {
            self.stop_receiving();
        }
    }

    fn stop_receiving(&self) {
        if !self.receive_stopped.replace(true) {
            // A peer that has gone already is as good.
            let _ = self.stream.shutdown(Shutdown::Read);
        }
    }

    /// Lets the commands in flight come to their ends, for a while.
    pub(crate) async fn drain(&self) {
        let left =
            |until: Option<Instant>| until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now()));
        let done = poll_fn(|_| if self.busy() == 0 { Poll::Ready(()) } else { Poll::Pending });
        if timeout(left(self.drain_until.get()), done).await.is_err() {
            tracing::warn!(commands = self.busy(), "commands were not done when the target stopped");
        }
        let role = self.role.borrow().clone();
        if let Role::Admin(controller) = role {
            // Time is up for the I/O queues as well, so it does not matter how this ends.
            let _ = timeout(left(self.drain_until.get()), poll_fn(|cx| controller.poll_emptied(cx))).await;
        }
    }
}
