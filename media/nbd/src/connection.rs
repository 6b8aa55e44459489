//! One connection: requests in, answers out.
//!
//! Two tasks move bytes, one each way; a request is an entry in a table. Requests that are submitted in the same turn of the
//! reactor leave in one gather send, and one receive may end many of them.
//!
//! Invariants: a request ends once, with its answer or with [`Lost`]; requests that find the connection full are sent in the
//! order in which they came; a future that is dropped leaves its request to the server, whose answer is thrown away; no
//! borrow is held while a task is woken.

use std::cell::{Cell, RefCell};
use std::net::Shutdown;
use std::rc::Rc;
use std::time::Duration;

use sealblock_protocols_nbd::client::{
    Answer, Answered, AskError, Client, ClientRequest, Closed, Config, Event, ServerError,
};
use sealblock_runtime_reactor::net::{Keepalive, Stream};
use sealblock_runtime_reactor::{Notify, spawn, timeout};

use crate::address::Way;
use crate::error::{Lost, NoAnswer};
use crate::fifo::FifoWaiters;

/// How long the last bytes of a connection that is over may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// NBD has no keep alive of its own, so TCP finds out a server that has died while nothing was asked.
const KEEPALIVE: Keepalive = Keepalive { idle_s: 30, interval_s: 10, probes: 3 };

/// How a request was answered.
pub(crate) type Outcome = Result<Answer, Vec<ServerError>>;

/// Who waits for an answer.
struct Wait {
    bell: Notify,
    outcome: Cell<Option<Outcome>>,
    /// The tick at which the request was sent.
    since: u32,
}

/// A connection.
pub(crate) struct Connection {
    stream: Stream,
    core: RefCell<Client>,
    /// Requests in flight by their place.
    waits: RefCell<Vec<Option<Rc<Wait>>>>,
    line: FifoWaiters,
    /// Why the connection is over.
    ended: RefCell<Option<Rc<str>>>,
    /// Something is to be sent, or the connection is over.
    output: Notify,
    /// What the negotiation came to, and the bell for it.
    first: RefCell<Option<Event>>,
    opened: Notify,
    is_sending: Cell<bool>,
    now: Cell<u32>,
    answered: Cell<u64>,
}

impl Connection {
    /// Connects, and begins what the connection is for.
    pub(crate) async fn open(way: &Way, config: Config) -> std::io::Result<Rc<Connection>> {
        let stream = way.connect().await?;
        if way.is_tcp() {
            stream.set_nodelay(true)?;
            stream.set_keepalive(Some(KEEPALIVE))?;
        }
        let connection = Rc::new(Connection {
            stream,
            core: RefCell::new(Client::new(config)),
            waits: RefCell::default(),
            line: FifoWaiters::default(),
            ended: RefCell::default(),
            output: Notify::default(),
            first: RefCell::default(),
            opened: Notify::default(),
            is_sending: Cell::new(false),
            now: Cell::new(0),
            answered: Cell::new(0),
        });
        spawn(receive(Rc::clone(&connection)));
        spawn(send(Rc::clone(&connection)));
        Ok(connection)
    }

    /// What the negotiation comes to.
    pub(crate) async fn negotiated(&self) -> Result<Event, Closed> {
        loop {
            if let Some(event) = self.first.take() {
                return Ok(event);
            }
            if self.ended.borrow().is_some() {
                return Err(self.core.borrow().closed().cloned().unwrap_or(Closed::Here));
            }
            self.opened.wait().await;
        }
    }

    /// Asks, as soon as there is room for it.
    pub(crate) async fn call(&self, ask: ClientRequest) -> Result<Outcome, NoAnswer> {
        let wait = if self.line.len() == 0 && self.core.borrow().can_submit() {
            self.submit(ask)?
        } else {
            let place = self.line.join();
            loop {
                if let Some(lost) = self.lost() {
                    return Err(lost.into());
                }
                if place.is_first() && self.core.borrow().can_submit() {
                    break;
                }
                place.called().await;
            }
            self.submit(ask)?
        };
        wait.bell.wait().await;
        wait.outcome.take().ok_or_else(|| self.lost().unwrap_or_else(|| Lost("the connection ended".into())).into())
    }

    fn submit(&self, ask: ClientRequest) -> Result<Rc<Wait>, NoAnswer> {
        let submitted = self.core.borrow_mut().submit(ask);
        let place = match submitted {
            Ok(place) => place,
            Err(AskError::NotReady) => return Err(self.lost().unwrap_or_else(|| Lost("not open".into())).into()),
            Err(error) => return Err(error.into()),
        };
        let wait = Rc::new(Wait { bell: Notify::default(), outcome: Cell::new(None), since: self.now.get() });
        let mut waits = self.waits.borrow_mut();
        if waits.len() <= place {
            waits.resize(place + 1, None);
        }
        waits[place] = Some(Rc::clone(&wait));
        drop(waits);
        self.output.ring();
        Ok(wait)
    }

    /// Requests in flight and in line.
    pub(crate) fn load(&self) -> usize {
        self.core.borrow().in_flight() + self.line.len()
    }

    /// Requests that were answered.
    pub(crate) fn answered(&self) -> u64 {
        self.answered.get()
    }

    /// Why the connection is over, if it is.
    pub(crate) fn lost(&self) -> Option<Lost> {
        self.ended.borrow().clone().map(Lost)
    }

    /// Says goodbye. Answers are not read any more.
    pub(crate) fn disconnect(&self) {
        self.core.borrow_mut().disconnect();
    }

    /// Ends the connection: all requests are lost.
    pub(crate) fn end(&self, reason: &str) {
        {
            let mut ended = self.ended.borrow_mut();
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
        let waits = self.waits.take();
        waits.iter().flatten().for_each(|wait| wait.bell.ring());
        self.line.call_all();
        self.opened.ring();
        if self.is_sending.get() {
            // A peer that does not read would hold the sender for ever.
            let _ = self.stream.shutdown(Shutdown::Both);
        }
        self.output.ring();
    }

    /// Counts a tick, and tells whether a request has been in flight for more than `most` of them.
    pub(crate) fn tick(&self, most: u32) -> bool {
        let now = self.now.get().wrapping_add(1);
        self.now.set(now);
        self.waits.borrow().iter().flatten().any(|wait| now.wrapping_sub(wait.since) > most)
    }

    /// Hands out what has happened.
    fn dispatch(&self) {
        loop {
            let event = self.core.borrow_mut().next_event();
            match event {
                None => break,
                Some(Event::Answered(Answered { place, outcome })) => {
                    self.answered.set(self.answered.get() + 1);
                    let wait = self.waits.borrow_mut().get_mut(place).and_then(Option::take);
                    if let Some(wait) = wait {
                        wait.outcome.set(Some(outcome));
                        wait.bell.ring();
                    }
                    self.line.call_first();
                }
                // The reason is told by the receiver, which finds no buffer to receive into.
                Some(Event::Closed(_)) => {}
                Some(event @ (Event::Listed(_) | Event::Described(_) | Event::Ready(_))) => {
                    self.first.replace(Some(event));
                    self.opened.ring();
                }
            }
        }
        self.output.ring();
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
        let is_over = connection.ended.borrow().is_some();
        if bytes == 0 && is_over {
            break;
        }
        if bytes == 0 {
            connection.output.wait().await;
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
