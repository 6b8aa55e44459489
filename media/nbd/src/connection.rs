//! One connection: requests in, answers out.
//!
//! Two tasks move bytes, one each way; a request is an entry in a table. Requests that are submitted in the same turn of the
//! reactor leave in one gather send, and one receive may end many of them.
//!
//! Invariants: a request ends once, with its answer or with [`Lost`]; requests that find the connection full are sent in the
//! order in which they came; a future that is dropped leaves its request to the server, whose answer is thrown away; no
//! borrow is held while a task is woken.

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

/// How long the last bytes of a connection that is over may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// NBD has no keep alive of its own, so TCP finds out a server that has died while nothing was asked.
const KEEPALIVE: Keepalive = Keepalive { idle_s: 30, interval_s: 10, probes: 3 };

/// How a request was answered.
pub(crate) type ReplyResult = Result<Reply, Vec<ServerError>>;

/// Who waits for an answer.
struct PendingRequest {
    notify: Notify,
    result: Cell<Option<ReplyResult>>,
    /// The tick at which the request was sent.
    sent_tick: u32,
}

/// A connection.
pub(crate) struct Connection {
    stream: Stream,
    core: RefCell<Client>,
    /// Requests in flight by their place.
    pending: RefCell<Vec<Option<Rc<PendingRequest>>>>,
    waiters: FifoWaiters,
    /// Why the connection is over.
    end_reason: RefCell<Option<Rc<str>>>,
    /// Something is to be sent, or the connection is over.
    output_notify: Notify,
    /// What the negotiation came to, and the bell for it.
    negotiation_event: RefCell<Option<Event>>,
    negotiated_notify: Notify,
    is_sending: Cell<bool>,
    tick: Cell<u32>,
    completed_count: Cell<u64>,
}

impl Connection {
    /// Connects, and begins what the connection is for.
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

    /// What the negotiation comes to.
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

    /// Asks, as soon as there is room for it.
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
        self.output_notify.ring();
        Ok(pending)
    }

    /// Requests in flight and in line.
    pub(crate) fn load(&self) -> usize {
        self.core.borrow().in_flight() + self.waiters.len()
    }

    /// Requests that were answered.
    pub(crate) fn completed_count(&self) -> u64 {
        self.completed_count.get()
    }

    /// Why the connection is over, if it is.
    pub(crate) fn lost(&self) -> Option<ConnectionLost> {
        self.end_reason.borrow().clone().map(ConnectionLost)
    }

    /// Says goodbye. Answers are not read any more.
    pub(crate) fn disconnect(&self) {
        self.core.borrow_mut().disconnect();
    }

    /// Ends the connection: all requests are lost.
    pub(crate) fn end(&self, reason: &str) {
        {
            let mut ended = self.end_reason.borrow_mut();
            if ended.is_some() {
                return;
            }
            *ended = Some(reason.into());
        }
        if self.core.borrow().in_flight() > 0 {
            // They are repeated elsewhere. Left to itself the system would deliver them minutes later, over newer ones. Where
            // the connection cannot be reset at once it is as soon as its tasks let go.
            let _ = self.stream.reset();
        }
        self.core.borrow_mut().close();
        let pending = self.pending.take();
        pending.iter().flatten().for_each(|pending| pending.notify.ring());
        self.waiters.notify_all();
        self.negotiated_notify.ring();
        if self.is_sending.get() {
            // A peer that does not read would hold the sender for ever.
            let _ = self.stream.shutdown(Shutdown::Both);
        }
        self.output_notify.ring();
    }

    /// Counts a tick, and tells whether a request has been in flight for more than `most` of them.
    pub(crate) fn advance_tick(&self, max_ticks: u32) -> bool {
        let tick = self.tick.get().wrapping_add(1);
        self.tick.set(tick);
        self.pending.borrow().iter().flatten().any(|pending| tick.wrapping_sub(pending.sent_tick) > max_ticks)
    }

    /// Hands out what has happened.
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
                        pending.notify.ring();
                    }
                    self.waiters.notify_first();
                }
                // The reason is told by the receiver, which finds no buffer to receive into.
                Some(Event::Closed(_)) => {}
                Some(event @ (Event::Listed(_) | Event::Described(_) | Event::Ready(_))) => {
                    self.negotiation_event.replace(Some(event));
                    self.negotiated_notify.ring();
                }
            }
        }
        self.output_notify.ring();
    }
}

/// Receives until the connection is over.
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

/// Sends until the connection is over and its last words are out.
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

/// Those who wait, the first in front.
#[derive(Default)]
pub(crate) struct FifoWaiters(RefCell<VecDeque<Rc<Notify>>>);

/// A place in the line, given up when it is dropped.
pub(crate) struct FifoPlace<'a> {
    waiters: &'a FifoWaiters,
    notify: Rc<Notify>,
}

impl FifoWaiters {
    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.0.borrow().len()
    }

    /// Joins at the end.
    pub(crate) fn join(&self) -> FifoPlace<'_> {
        let notify = Rc::new(Notify::default());
        self.0.borrow_mut().push_back(Rc::clone(&notify));
        FifoPlace { waiters: self, notify }
    }

    /// Calls the first.
    pub(crate) fn notify_first(&self) {
        let first = self.0.borrow().front().cloned();
        if let Some(first) = first {
            first.ring();
        }
    }

    /// Calls everybody.
    pub(crate) fn notify_all(&self) {
        let all: Vec<Rc<Notify>> = self.0.borrow().iter().cloned().collect();
        all.iter().for_each(|notify| notify.ring());
    }
}

impl FifoPlace<'_> {
    /// Whether it is the first.
    pub(crate) fn is_first(&self) -> bool {
        self.waiters.0.borrow().front().is_some_and(|first| Rc::ptr_eq(first, &self.notify))
    }

    /// Waits to be called.
    pub(crate) async fn wait(&self) {
        self.notify.wait().await;
    }
}

impl Drop for FifoPlace<'_> {
    fn drop(&mut self) {
        let was_first = self.is_first();
        self.waiters.0.borrow_mut().retain(|notify| !Rc::ptr_eq(notify, &self.notify));
        if was_first {
            // Whoever is first now finds out by itself whether there is room.
            self.waiters.notify_first();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_to_come_is_the_first_and_who_leaves_makes_room() {
        let waiters = FifoWaiters::default();
        let (a, b, c) = (waiters.join(), waiters.join(), waiters.join());
        assert!(a.is_first() && !b.is_first());
        drop(b);
        drop(a);
        assert!(c.is_first());
        assert_eq!(waiters.len(), 1);
    }
}
