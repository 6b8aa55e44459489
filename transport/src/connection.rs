//! A client's connection: sends requests and receives replies.
//!
//! Two tasks move bytes, one in each direction; the protocol's [`ClientCore`] encodes and decodes them. A request needs
//! a table entry and a waker, but no task and no box. Requests that are submitted in the same turn of the reactor are
//! sent with one gather send, and one receive may complete many of them.
//!
//! Invariants: a request completes once, with its reply or with [`ConnectionLost`]; requests that find the connection
//! full are submitted in the order in which they came; dropping a future discards the reply to its request; no borrow
//! is held while a waker is called; a reset discards the unsent bytes of lost requests; the connection ends when its
//! last owner drops it.

use std::cell::{Cell, RefCell, RefMut};
use std::convert::Infallible;
use std::net::Shutdown;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::{Notify, sleep, spawn, timeout};

use crate::changes::SentChange;
use crate::in_flight::{FifoWaiters, InFlight, RequestProgress};

/// Time limit for sending the last bytes of a connection that ended.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// The number of timeout checks within one request timeout.
const TICKS: u32 = 8;

/// The client's side of a protocol on one connection: no socket, no clock.
pub trait ClientCore: 'static {
    /// A request, with its data.
    type Request: Unpin;
    /// The outcome of a request.
    type Reply;

    /// The name of the other side in errors: `server` or `target`.
    const PEER: &'static str;

    /// A buffer to receive into; `None` once the connection is closed.
    fn receive_buffer(&mut self) -> Option<Buffer>;
    /// Returns that buffer with `len` received bytes, and processes them.
    fn received(&mut self, buffer: Buffer, len: usize);
    /// The next event, in order.
    fn next_event(&mut self) -> Option<ClientEvent<Self::Reply>>;
    /// Appends the next output to `out`; returns its number of bytes.
    fn transmit(&mut self, out: &mut Vec<Slice>) -> usize;
    /// True if [`ClientCore::transmit`] has output.
    fn has_output(&self) -> bool;
    /// True if one more request may be submitted now.
    fn can_submit(&self) -> bool;
    /// Submits a request; returns its place: a number that is unique among the requests in flight, and less than their
    /// maximum.
    ///
    /// # Errors
    /// [`SubmitError::Closed`] before the negotiation is complete and after the connection has ended;
    /// [`SubmitError::Refused`] for this request only.
    fn submit(&mut self, request: Self::Request) -> Result<usize, SubmitError>;
    /// The number of requests in flight.
    fn in_flight(&self) -> usize;
    /// True if a request in flight may change blocks.
    fn may_change_blocks(&self) -> bool {
        self.in_flight() > 0
    }
    /// Closes the connection; drops requests.
    fn close(&mut self);
    /// Why the core ended the connection.
    fn closed_reason(&self) -> String;
    /// What a request of this protocol is called in errors.
    fn request_name(&self) -> String;
}

/// An event of a core.
pub enum ClientEvent<R> {
    /// The request at this place has ended.
    Completed {
        /// See [`ClientCore::submit`].
        place: usize,
        /// The outcome of the request.
        reply: R,
    },
    /// The negotiation has made progress, or the connection was closed.
    Progress,
}

/// Why a core did not accept a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SubmitError {
    /// The connection is not open for requests.
    Closed,
    /// The peer does not support this request, for this reason.
    Refused(String),
}

/// A connection that ended. The peer may or may not have executed the requests in flight.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConnectionLost(pub Rc<str>);

/// Why a request got no reply.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RequestError {
    /// Its connection ended.
    #[error(transparent)]
    Lost(#[from] ConnectionLost),
    /// The request was not sent, for this reason.
    #[error("{0}")]
    NotSent(String),
}

/// For callers that close the connection afterwards.
impl From<RequestError> for ConnectionLost {
    fn from(error: RequestError) -> ConnectionLost {
        match error {
            RequestError::Lost(lost) => lost,
            RequestError::NotSent(why) => ConnectionLost(why.into()),
        }
    }
}

/// An owner's handle to a connection. The connection ends when the last one is dropped.
pub struct Connection<C: ClientCore>(Rc<Link<C>>);

/// The state that the two tasks of a connection share.
struct Link<C: ClientCore> {
    stream: Stream,
    core: RefCell<C>,
    in_flight: RefCell<InFlight<C::Reply>>,
    waiters: RefCell<FifoWaiters>,
    /// Why the connection ended; `None` while it is open.
    end_reason: RefCell<Option<Rc<str>>>,
    /// True while bytes are being sent.
    is_sending: Cell<bool>,
    /// Wakes the sender: there is something to send, or the connection ended.
    output: Notify,
    /// Wakes the task that waits for the negotiation.
    progress: Notify,
}

impl<C: ClientCore> Connection<C> {
    /// Starts a connection on a connected stream, and its negotiation.
    pub fn start(stream: Stream, core: C) -> Rc<Connection<C>> {
        let link = Rc::new(Link {
            stream,
            core: RefCell::new(core),
            in_flight: RefCell::new(InFlight::new()),
            waiters: RefCell::default(),
            end_reason: RefCell::default(),
            is_sending: Cell::new(false),
            output: Notify::default(),
            progress: Notify::default(),
        });
        spawn(receive(Rc::clone(&link)));
        spawn(send(Rc::clone(&link)));
        Rc::new(Connection(link))
    }

    /// Waits until `negotiated` returns a result from the core. Only one task may wait at a time.
    ///
    /// # Errors
    /// The reason if the connection ends.
    pub async fn negotiated<T>(&self, negotiated: impl Fn(&mut C) -> Option<T>) -> Result<T, ConnectionLost> {
        loop {
            if let Some(result) = negotiated(&mut self.core()) {
                return Ok(result);
            }
            if let Some(lost) = self.lost() {
                return Err(lost);
            }
            self.0.progress.wait().await;
        }
    }

    /// Waits for the end of the connection, after the negotiation. Only one task may wait at a time.
    pub async fn ended(&self) -> ConnectionLost {
        match self.negotiated(|_| None::<Infallible>).await {
            Err(lost) => lost,
            Ok(never) => match never {},
        }
    }

    /// Executes a request once the connection has room for it.
    pub fn execute(&self, request: C::Request) -> RequestFuture<'_, C> {
        self.execute_change(request, None)
    }

    /// Like [`Connection::execute`], for a request that changes blocks. The change is listed until its reply arrives.
    pub fn execute_change(&self, request: C::Request, change: Option<SentChange>) -> RequestFuture<'_, C> {
        RequestFuture { link: &self.0, stage: RequestStage::New(request), has_no_timeout: false, change }
    }

    /// Like [`Connection::execute`], without a timeout.
    pub fn execute_without_timeout(&self, request: C::Request) -> RequestFuture<'_, C> {
        RequestFuture { link: &self.0, stage: RequestStage::New(request), has_no_timeout: true, change: None }
    }

    /// The number of requests in flight and waiting.
    pub fn load(&self) -> usize {
        self.0.core.borrow().in_flight() + self.0.waiters.borrow().len()
    }

    /// Why the connection ended, if it did.
    pub fn lost(&self) -> Option<ConnectionLost> {
        self.0.lost()
    }

    /// Ends the connection: all its requests fail with [`ConnectionLost`].
    pub fn end(&self, reason: &str) {
        self.0.end(reason);
    }

    /// The protocol's state. The caller must release it before it waits for anything.
    pub fn core(&self) -> RefMut<'_, C> {
        self.0.core.borrow_mut()
    }
}

impl<C: ClientCore> Drop for Connection<C> {
    fn drop(&mut self) {
        self.end("closed by this host");
    }
}

/// Ends each connection on which a request has been in flight for longer than `limit`; detects it at most an eighth of
/// the limit late. The owner runs it in a task, and aborts that task together with the connections.
pub async fn end_late_requests<C: ClientCore>(connections: Vec<Rc<Connection<C>>>, limit: Duration) {
    loop {
        sleep((limit / TICKS).max(Duration::from_millis(1))).await;
        for connection in &connections {
            if connection.0.in_flight.borrow_mut().advance_tick(TICKS) {
                let name = connection.core().request_name();
                connection.end(&format!("{name} was not answered within {limit:?}"));
            }
        }
    }
}

impl<C: ClientCore> Link<C> {
    fn lost(&self) -> Option<ConnectionLost> {
        self.end_reason.borrow().clone().map(ConnectionLost)
    }

    fn end(&self, reason: &str) {
        {
            let mut ended = self.end_reason.borrow_mut();
            if ended.is_some() {
                return;
            }
            *ended = Some(reason.into());
        }
        if self.core.borrow().may_change_blocks() {
            // The requests are sent again on another connection. Without a reset the kernel could deliver these copies
            // minutes later, and they would overwrite newer writes. If the reset fails, dropping the socket resets it.
            let _ = self.stream.reset();
        }
        self.core.borrow_mut().close();
        let (wakers, changes) = self.in_flight.borrow_mut().lose_all();
        wakers.into_iter().for_each(Waker::wake);
        if let Some(changes) = changes {
            changes.notify();
        }
        let wakers = self.waiters.borrow_mut().wakers();
        wakers.into_iter().for_each(Waker::wake);
        self.progress.notify();
        if self.is_sending.get() {
            // A peer that does not read would block the sender forever.
            let _ = self.stream.shutdown(Shutdown::Both);
        }
        self.output.notify();
    }

    /// Submits the request; returns the index of its entry in the table.
    fn submit(
        &self,
        request: C::Request,
        has_no_timeout: bool,
        change: Option<SentChange>,
    ) -> Result<usize, RequestError> {
        let submitted = self.core.borrow_mut().submit(request);
        let place = match submitted {
            Ok(place) => place,
            Err(SubmitError::Refused(why)) => return Err(RequestError::NotSent(why)),
            Err(SubmitError::Closed) => {
                let lost = || ConnectionLost("the connection is not open for requests".into());
                return Err(self.lost().unwrap_or_else(lost).into());
            }
        };
        let entry = self.in_flight.borrow_mut().insert(place, has_no_timeout, change);
        self.output.notify();
        Ok(entry)
    }

    fn has_room(&self) -> bool {
        self.core.borrow().can_submit()
    }

    /// Wakes the first waiting request if there is room for it.
    fn wake_next(&self) {
        if self.has_room() {
            let waker = self.waiters.borrow().first_waker();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    /// Completes the requests whose replies arrived.
    fn dispatch(&self) {
        loop {
            let event = self.core.borrow_mut().next_event();
            match event {
                None => break,
                Some(ClientEvent::Completed { place, reply }) => {
                    let (waker, change) = self.in_flight.borrow_mut().finish(place, reply);
                    drop(change);
                    if let Some(waker) = waker {
                        waker.wake();
                    }
                    self.wake_next();
                }
                // After a close the core returns no buffer to the receiver, which then ends the connection with the
                // reason.
                Some(ClientEvent::Progress) => self.progress.notify(),
            }
        }
        // Send the next requests before receiving more, so that both sides stay busy.
        if self.core.borrow().has_output() {
            self.output.notify();
        }
    }
}

/// Receives until the connection ends.
async fn receive<C: ClientCore>(link: Rc<Link<C>>) {
    let reason = loop {
        let buffer = link.core.borrow_mut().receive_buffer();
        let Some(buffer) = buffer else { break link.core.borrow().closed_reason() };
        let (result, buffer) = link.stream.recv(buffer).await;
        match result {
            Ok(0) => break format!("the {} closed the connection", C::PEER),
            Ok(len) => link.core.borrow_mut().received(buffer, len),
            Err(error) => break format!("receiving failed: {error}"),
        }
        link.dispatch();
    };
    link.end(&reason);
}

/// Sends until the connection has ended and its last bytes are sent.
async fn send<C: ClientCore>(link: Rc<Link<C>>) {
    let mut out = Vec::new();
    loop {
        let bytes = link.core.borrow_mut().transmit(&mut out);
        let is_over = link.end_reason.borrow().is_some();
        if bytes == 0 && is_over {
            break;
        }
        if bytes == 0 {
            link.output.wait().await;
            continue;
        }
        let sent = if is_over {
            timeout(CLOSE_TIMEOUT, link.stream.send_all(out.drain(..))).await.unwrap_or(Ok(()))
        } else {
            link.is_sending.set(true);
            let sent = link.stream.send_all(out.drain(..)).await;
            link.is_sending.set(false);
            sent
        };
        if let Err(error) = sent {
            link.end(&format!("sending failed: {error}"));
            break;
        }
    }
    let _ = link.stream.shutdown(Shutdown::Both);
}

enum RequestStage<T> {
    New(T),
    Waiting(u64, T),
    InFlight(usize),
    Ended,
}

/// The future of one request. Dropping it does not abort a request in flight; its reply is discarded.
pub struct RequestFuture<'a, C: ClientCore> {
    link: &'a Link<C>,
    stage: RequestStage<C::Request>,
    has_no_timeout: bool,
    /// The blocks that it changes; moves to the connection when the request is submitted.
    change: Option<SentChange>,
}

impl<C: ClientCore> RequestFuture<'_, C> {
    fn submit(&mut self, request: C::Request) -> Result<(), RequestError> {
        let entry = self.link.submit(request, self.has_no_timeout, self.change.take())?;
        self.stage = RequestStage::InFlight(entry);
        Ok(())
    }

    /// Submits the request if the connection has room and no earlier request waits. True if the request is in flight.
    fn advance(&mut self, cx: &mut Context<'_>) -> Result<bool, RequestError> {
        match std::mem::replace(&mut self.stage, RequestStage::Ended) {
            RequestStage::New(request) => {
                if let Some(lost) = self.link.lost() {
                    return Err(lost.into());
                }
                if self.link.waiters.borrow().len() == 0 && self.link.has_room() {
                    self.submit(request)?;
                    return Ok(true);
                }
                let ticket = self.link.waiters.borrow_mut().join(cx.waker().clone());
                self.stage = RequestStage::Waiting(ticket, request);
                Ok(false)
            }
            RequestStage::Waiting(ticket, request) => {
                let lost = self.link.lost();
                let is_turn = self.link.waiters.borrow().is_first(ticket) && self.link.has_room();
                if lost.is_none() && !is_turn {
                    let before = self.link.waiters.borrow_mut().keep_waker(ticket, cx.waker());
                    drop(before);
                    self.stage = RequestStage::Waiting(ticket, request);
                    return Ok(false);
                }
                let waker = self.link.waiters.borrow_mut().leave(ticket);
                drop(waker);
                if let Some(lost) = lost {
                    return Err(lost.into());
                }
                let submitted = self.submit(request);
                self.link.wake_next();
                submitted.map(|()| true)
            }
            stage @ (RequestStage::InFlight(_) | RequestStage::Ended) => {
                self.stage = stage;
                Ok(true)
            }
        }
    }
}

impl<C: ClientCore> Future for RequestFuture<'_, C> {
    type Output = Result<C::Reply, RequestError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        match this.advance(cx) {
            Err(lost) => return Poll::Ready(Err(lost)),
            Ok(false) => return Poll::Pending,
            Ok(true) => {}
        }
        let RequestStage::InFlight(entry) = this.stage else { return Poll::Pending };
        let fetched = this.link.in_flight.borrow_mut().poll(entry, cx.waker());
        match fetched {
            RequestProgress::InFlight => Poll::Pending,
            RequestProgress::Done(reply) => {
                this.stage = RequestStage::Ended;
                Poll::Ready(Ok(reply))
            }
            RequestProgress::Lost => {
                this.stage = RequestStage::Ended;
                let lost = this.link.lost().unwrap_or_else(|| ConnectionLost("the connection ended".into()));
                Poll::Ready(Err(lost.into()))
            }
        }
    }
}

impl<C: ClientCore> Drop for RequestFuture<'_, C> {
    fn drop(&mut self) {
        match self.stage {
            RequestStage::Waiting(ticket, ..) => {
                let waker = self.link.waiters.borrow_mut().leave(ticket);
                drop(waker);
                self.link.wake_next();
            }
            RequestStage::InFlight(entry) => {
                let was = self.link.in_flight.borrow_mut().abandon(entry);
                drop(was);
            }
            RequestStage::New(..) | RequestStage::Ended => {}
        }
    }
}
