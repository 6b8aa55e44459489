//! One connection: requests in, replies out.
//!
//! Two tasks move bytes, one each way; a request is an entry in a table. Requests that are submitted in the same turn of the
//! reactor leave in one gather send, and one receive may complete many of them.
//!
//! Invariants: a request completes once, with its reply or with [`ConnectionLost`]; requests that find the connection full
//! are sent in the order in which they came; dropping a future discards the reply to its request; no borrow is held while a
//! task is woken.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::net::Shutdown;
use std::rc::Rc;
use std::time::Duration;

use sealblock_protocols_nbd::client::{
    Client, ClientRequest, Closed, CompletedRequest, Config, Event, Reply, ServerError, SubmitError,
};
use sealblock_runtime_reactor::net::{Keepalive, Stream};
use sealblock_runtime_reactor::{Notify, spawn, timeout};

use crate::address::ResolvedAddress;
use crate::error::{ConnectionLost, RequestError};

/// Time limit for sending the last bytes of a connection that ended.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// NBD has no keep alive, so TCP detects a server that crashed while no request was in flight.
const KEEPALIVE: Keepalive = Keepalive { idle_s: 30, interval_s: 10, probes: 3 };

/// The reply to a request, or the server's errors.
pub(crate) type ReplyResult = Result<Reply, Vec<ServerError>>;

/// A request in flight.
struct PendingRequest {
    notify: Notify,
    result: Cell<Option<ReplyResult>>,
    /// Tick at which the request was sent.
    sent_tick: u32,
}

/// A connection.
pub(crate) struct Connection {
    stream: Stream,
    core: RefCell<Client>,
    /// Requests in flight, by their index in the client.
    pending: RefCell<Vec<Option<Rc<PendingRequest>>>>,
    waiters: FifoWaiters,
    /// Why the connection ended; `None` while it is open.
    end_reason: RefCell<Option<Rc<str>>>,
    /// Wakes the sender: bytes are to be sent, or the connection ended.
    output_notify: Notify,
    /// The result of the negotiation, and its notification.
    negotiation_event: RefCell<Option<Event>>,
    negotiated_notify: Notify,
    is_sending: Cell<bool>,
    tick: Cell<u32>,
    completed_count: Cell<u64>,
}

impl Connection {
    /// Connects and starts the negotiation.
    pub(crate) async fn open(resolved: &ResolvedAddress, config: Config) -> std::io::Result<Rc<Connection>> {
        let stream = resolved.connect().await?;
        if resolved.is_tcp() {
            stream.set_nodelay(true)?;
            stream.set_keepalive(Some(KEEPALIVE))?;
        }
        let connection = Rc::new(Connection {
            stream,
            core: RefCell::new(Client::new(config)),
            pending: RefCell::default(),
            waiters: FifoWaiters::default(),
            end_reason: RefCell::default(),
            output_notify: Notify::default(),
            negotiation_event: RefCell::default(),
            negotiated_notify: Notify::default(),
            is_sending: Cell::new(false),
            tick: Cell::new(0),
            completed_count: Cell::new(0),
        });
        spawn(receive(Rc::clone(&connection)));
        spawn(send(Rc::clone(&connection)));
        Ok(connection)
    }

    /// Waits for the result of the negotiation.
    pub(crate) async fn negotiated(&self) -> Result<Event, Closed> {
        loop {
            if let Some(event) = self.negotiation_event.take() {
                return Ok(event);
            }
            if self.end_reason.borrow().is_some() {
                return Err(self.core.borrow().closed().cloned().unwrap_or(Closed::Here));
            }
            self.negotiated_notify.wait().await;
        }
    }

    /// Executes a request once fewer than the maximum are in flight.
    pub(crate) async fn execute(&self, request: ClientRequest) -> Result<ReplyResult, RequestError> {
        let pending = if self.waiters.len() == 0 && self.core.borrow().can_submit() {
            self.submit(request)?
        } else {
            let place = self.waiters.join();
            loop {
                if let Some(lost) = self.lost() {
                    return Err(lost.into());
                }
                if place.is_first() && self.core.borrow().can_submit() {
                    break;
                }
                place.wait().await;
            }
            self.submit(request)?
        };
        pending.notify.wait().await;
        pending
            .result
            .take()
            .ok_or_else(|| self.lost().unwrap_or_else(|| ConnectionLost("the connection ended".into())).into())
    }

    fn submit(&self, request: ClientRequest) -> Result<Rc<PendingRequest>, RequestError> {
        let submitted = self.core.borrow_mut().submit(request);
        let place = match submitted {
            Ok(place) => place,
            Err(SubmitError::NotReady) => {
                return Err(self.lost().unwrap_or_else(|| ConnectionLost("not open".into())).into());
            }
            Err(error) => return Err(error.into()),
        };
        let pending =
            Rc::new(PendingRequest { notify: Notify::default(), result: Cell::new(None), sent_tick: self.tick.get() });
        let mut table = self.pending.borrow_mut();
        if table.len() <= place {
            table.resize(place + 1, None);
        }
        table[place] = Some(Rc::clone(&pending));
        drop(table);
        self.output_notify.notify();
        Ok(pending)
    }

    /// Requests in flight and waiting.
    pub(crate) fn load(&self) -> usize {
        self.core.borrow().in_flight() + self.waiters.len()
    }

    /// Requests that completed.
    pub(crate) fn completed_count(&self) -> u64 {
        self.completed_count.get()
    }

    /// Why the connection ended, if it did.
    pub(crate) fn lost(&self) -> Option<ConnectionLost> {
        self.end_reason.borrow().clone().map(ConnectionLost)
    }

    /// Sends NBD_CMD_DISC. Later replies are not read.
    pub(crate) fn disconnect(&self) {
        self.core.borrow_mut().disconnect();
    }

    /// Ends the connection: all its requests fail with [`ConnectionLost`].
    pub(crate) fn end(&self, reason: &str) {
        {
            let mut ended = self.end_reason.borrow_mut();
            if ended.is_some() {
                return;
            }
            *ended = Some(reason.into());
        }
        if self.core.borrow().in_flight() > 0 {
            // The requests are sent again on another connection. Without a reset the kernel could deliver these copies minutes
            // later, over newer writes. If the reset fails, dropping the socket resets it.
            let _ = self.stream.reset();
        }
        self.core.borrow_mut().close();
        let pending = self.pending.take();
        pending.iter().flatten().for_each(|pending| pending.notify.notify());
        self.waiters.notify_all();
        self.negotiated_notify.notify();
        if self.is_sending.get() {
            // A peer that does not read would block the sender forever.
            let _ = self.stream.shutdown(Shutdown::Both);
        }
        self.output_notify.notify();
    }

    /// Advances the tick. True if a request has been in flight for more than `max_ticks` ticks.
    pub(crate) fn advance_tick(&self, max_ticks: u32) -> bool {
        let tick = self.tick.get().wrapping_add(1);
        self.tick.set(tick);
        self.pending.borrow().iter().flatten().any(|pending| tick.wrapping_sub(pending.sent_tick) > max_ticks)
    }

    /// Completes the requests whose replies arrived.
    fn dispatch(&self) {
        loop {
            let event = self.core.borrow_mut().next_event();
            match event {
                None => break,
                Some(Event::Completed(CompletedRequest { place, outcome })) => {
                    self.completed_count.set(self.completed_count.get() + 1);
                    let pending = self.pending.borrow_mut().get_mut(place).and_then(Option::take);
                    if let Some(pending) = pending {
                        pending.result.set(Some(outcome));
                        pending.notify.notify();
                    }
                    self.waiters.notify_first();
                }
                // The receiver finds no buffer to receive into, and ends the connection with the reason.
                Some(Event::Closed(_)) => {}
                Some(event @ (Event::Listed(_) | Event::Described(_) | Event::Ready(_))) => {
                    self.negotiation_event.replace(Some(event));
                    self.negotiated_notify.notify();
                }
            }
        }
        self.output_notify.notify();
    }
}

/// Receives until the connection ends.
async fn receive(connection: Rc<Connection>) {
    let reason = loop {
        let buffer = connection.core.borrow_mut().receive_buffer();
        let Some(buffer) = buffer else {
            let closed = connection.core.borrow().closed().cloned();
            break closed.unwrap_or(Closed::Here).to_string();
        };
        let (result, buffer) = connection.stream.recv(buffer).await;
        match result {
            Ok(0) => break "the server closed the connection".to_owned(),
            Ok(len) => connection.core.borrow_mut().received(buffer, len),
            Err(error) => break format!("receiving failed: {error}"),
        }
        connection.dispatch();
    };
    connection.end(&reason);
}

/// Sends until the connection has ended and its last bytes are out.
async fn send(connection: Rc<Connection>) {
    let mut out = Vec::new();
    loop {
        let bytes = connection.core.borrow_mut().transmit(&mut out);
        let is_over = connection.end_reason.borrow().is_some();
        if bytes == 0 && is_over {
            break;
        }
        if bytes == 0 {
            connection.output_notify.wait().await;
            continue;
        }
        let sent = if is_over {
            timeout(CLOSE_TIMEOUT, connection.stream.send_all(out.drain(..))).await.unwrap_or(Ok(()))
        } else {
            connection.is_sending.set(true);
            let sent = connection.stream.send_all(out.drain(..)).await;
            connection.is_sending.set(false);
            sent
        };
        if let Err(error) = sent {
            connection.end(&format!("sending failed: {error}"));
            break;
        }
    }
    let _ = connection.stream.shutdown(Shutdown::Both);
}

/// Requests that wait for room on a connection, in order of arrival.
#[derive(Default)]
pub(crate) struct FifoWaiters(RefCell<VecDeque<Rc<Notify>>>);

/// A waiting request; dropping it leaves the queue.
pub(crate) struct FifoPlace<'a> {
    waiters: &'a FifoWaiters,
    notify: Rc<Notify>,
}

impl FifoWaiters {
    /// Waiting requests.
    pub(crate) fn len(&self) -> usize {
        self.0.borrow().len()
    }

    /// Joins the end of the queue.
    pub(crate) fn join(&self) -> FifoPlace<'_> {
        let notify = Rc::new(Notify::default());
        self.0.borrow_mut().push_back(Rc::clone(&notify));
        FifoPlace { waiters: self, notify }
    }

    /// Wakes the first request.
    pub(crate) fn notify_first(&self) {
        let first = self.0.borrow().front().cloned();
        if let Some(first) = first {
            first.notify();
        }
    }

    /// Wakes all requests.
    pub(crate) fn notify_all(&self) {
        let all: Vec<Rc<Notify>> = self.0.borrow().iter().cloned().collect();
        all.iter().for_each(|notify| notify.notify());
    }
}

impl FifoPlace<'_> {
    /// True if the request is the first in the queue.
    pub(crate) fn is_first(&self) -> bool {
        self.waiters.0.borrow().front().is_some_and(|first| Rc::ptr_eq(first, &self.notify))
    }

    /// Waits until the queue wakes the request.
    pub(crate) async fn wait(&self) {
        self.notify.wait().await;
    }
}

impl Drop for FifoPlace<'_> {
    fn drop(&mut self) {
        let was_first = self.is_first();
        self.waiters.0.borrow_mut().retain(|notify| !Rc::ptr_eq(notify, &self.notify));
        if was_first {
            // The new first request checks for room itself.
            self.waiters.notify_first();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_keep_their_order_and_dropped_ones_leave_the_queue() {
        let waiters = FifoWaiters::default();
        let (a, b, c) = (waiters.join(), waiters.join(), waiters.join());
        assert!(a.is_first() && !b.is_first());
        drop(b);
        drop(a);
        assert!(c.is_first());
        assert_eq!(waiters.len(), 1);
    }
}
