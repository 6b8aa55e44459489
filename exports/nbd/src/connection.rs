//! A connection: one task receives, another sends, and each request in flight has its own.
//!
//! It ends when the client goes or breaks the protocol, when it is too slow to choose an export, or when the server stops.
//! Requests in flight get some time then, and their answers are sent as far as the client still reads.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::net::Shutdown;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use sealblock_protocols_nbd::{Closed, Event, Request, Server as Core, ServerConfig};
use sealblock_runtime_memory::Buffer;
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::{Bell, now, pool, sleep_until, spawn, stopping, timeout};

use crate::carry::{Mounted, Reply};
use crate::shared::{Order, Place};

/// How long a client may take to close after it was told that nothing more comes.
const LINGER: Duration = Duration::from_secs(1);
/// What is thrown away at once meanwhile.
const LINGER_BYTES: usize = 4096;
/// What is received at once: many requests, or the data of a middling write.
const STAGING_BYTES: usize = 256 << 10;

pub(crate) struct Connection {
    place: Place,
    core: RefCell<Core>,
    stream: Stream,
    /// The device of the export that was chosen.
    mounted: RefCell<Option<Rc<Mounted>>>,
    /// Something is to be sent, or sending is to end.
    output: Bell,
    /// A request ended, or answers were sent.
    room: Bell,
    /// What is left to be sent is the last.
    is_finishing: Cell<bool>,
    /// Nobody reads answers any more.
    is_gone: Cell<bool>,
}

impl Connection {
    pub(crate) fn new(stream: Stream, place: Place) -> Rc<Connection> {
        let mut config = ServerConfig::new(pool(), []);
        config.exports = Arc::clone(&place.shared.told);
        config.limits = place.shared.limits.connection.clone();
        config.staging_bytes = STAGING_BYTES;
        Rc::new(Connection {
            place,
            core: RefCell::new(Core::new(config)),
            stream,
            mounted: RefCell::default(),
            output: Bell::default(),
            room: Bell::default(),
            is_finishing: Cell::new(false),
            is_gone: Cell::new(false),
        })
    }

    /// Serves the connection until it is over.
    pub(crate) async fn run(self: Rc<Self>) {
        let drain = self.place.shared.limits.drain;
        let sender = spawn(Rc::clone(&self).send());
        self.until_told(Order::Stop, self.receive()).await;
        // What was received already is refused, and what was begun is answered.
        self.core.borrow_mut().stop();
        self.take_events();
        self.core.borrow_mut().close();
        self.until_told(Order::Kill, timeout(drain, self.quiet())).await;
        self.is_finishing.set(true);
        self.output.ring();
        let mut sender = pin!(timeout(drain, sender));
        self.until_told(Order::Kill, sender.as_mut()).await;
        self.linger().await;
        self.leave();
    }

    /// Runs `work` to its end, or until the server is told so, or the core to stop.
    async fn until_told(&self, order: Order, work: impl Future) {
        let (mut work, mut stopping) = (pin!(work), stopping());
        poll_fn(|cx| {
            let is_stopping = order == Order::Stop && pin!(&mut stopping).poll(cx).is_ready();
            if is_stopping || self.place.poll_order(order, cx).is_ready() {
                return Poll::Ready(());
            }
            work.as_mut().poll(cx).map(drop)
        })
        .await
    }

    async fn receive(self: &Rc<Self>) {
        let negotiated = self.receive_while(|| self.mounted.borrow().is_none());
        let deadline = now() + self.place.shared.limits.negotiation;
        let (mut negotiated, mut late) = (pin!(negotiated), sleep_until(deadline));
        let is_in_time = poll_fn(|cx| match negotiated.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(true),
            Poll::Pending => pin!(&mut late).poll(cx).map(|()| false),
        });
        if is_in_time.await {
            self.receive_while(|| true).await;
        }
    }

    /// Receives while `wanted` and the connection is open.
    async fn receive_while(self: &Rc<Self>, wanted: impl Fn() -> bool) {
        while wanted() {
            let Some(buffer) = self.receive_buffer().await else { return };
            let (result, buffer) = self.stream.recv(buffer).await;
            let len = match result {
                Ok(0) | Err(_) => return self.core.borrow_mut().close(),
                Ok(len) => len,
            };
            self.core.borrow_mut().received(buffer, len);
            self.take_events();
        }
    }

    /// A buffer to receive into, once there is room for requests; `None` when the connection is over.
    async fn receive_buffer(self: &Rc<Self>) -> Option<Buffer> {
        loop {
            let (lent, is_over) = {
                let mut core = self.core.borrow_mut();
                (core.receive_buffer(), core.closed().is_some())
            };
            if lent.is_some() || is_over {
                return lent;
            }
            self.room.wait().await;
            self.take_events();
        }
    }

    fn take_events(self: &Rc<Self>) {
        loop {
            // Apart, so that the core is not borrowed while the event is handled.
            let event = self.core.borrow_mut().next_event();
            match event {
                None => break,
                Some(Event::Chosen(index)) => self.mount(index),
                Some(Event::Request(request)) => drop(spawn(Rc::clone(self).carry_out(request))),
                Some(Event::Closed(Closed::Violation(violation))) => {
                    tracing::debug!(%violation, "connection closed");
                }
                Some(Event::Closed(_)) => {}
            }
        }
        self.output.ring();
    }

    fn mount(&self, index: usize) {
        let Some(export) = self.place.shared.exports.get(index) else { return };
        let gives_parts = self.core.borrow().has_chunks();
        *self.mounted.borrow_mut() = Some(Rc::new(Mounted { device: export.device.attach(), gives_parts }));
    }

    async fn carry_out(self: Rc<Self>, request: Request) {
        let Request { ticket, command } = request;
        let mounted = self.mounted.borrow().clone();
        let Some(mounted) = mounted else { return };
        let outcome = mounted.carry_out(command, &self.is_gone).await;
        let mut core = self.core.borrow_mut();
        match outcome {
            Ok(Reply::Done) => core.done(ticket),
            Ok(Reply::Data(data)) => core.data(ticket, vec![data]),
            Ok(Reply::Status(runs)) => core.status(ticket, &runs),
            Err(trouble) => core.fail(ticket, Vec::from_iter(trouble.before), &trouble.failed),
        }
        drop(core);
        self.output.ring();
        self.room.ring();
    }

    async fn send(self: Rc<Self>) {
        let mut slices = Vec::new();
        loop {
            let bytes = self.core.borrow_mut().transmit(&mut slices);
            if bytes == 0 {
                if self.is_finishing.get() {
                    return;
                }
                self.output.wait().await;
                continue;
            }
            if self.stream.send_all(slices.drain(..)).await.is_err() {
                return self.leave();
            }
            self.room.ring();
        }
    }

    /// Waits until no request is in flight.
    async fn quiet(self: &Rc<Self>) {
        while self.core.borrow().requests_in_flight() > 0 && !self.is_gone.get() {
            self.room.wait().await;
        }
    }

    /// Nothing is received, sent or begun any more.
    fn leave(&self) {
        self.is_gone.set(true);
        self.core.borrow_mut().close();
        // The client may be gone already, and then there is nothing to shut down.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.room.ring();
    }

    /// Waits for the client to close, so that it can read the last bytes: a socket closed with unread bytes resets.
    async fn linger(&self) {
        if !self.is_gone.get() {
            self.until_told(Order::Kill, self.stream.linger(LINGER, LINGER_BYTES)).await;
        }
    }
}
