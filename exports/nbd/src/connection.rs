//! A connection: one task that receives, executes requests whose device need not wait, and sends.
//!
//! It ends when the client closes it or violates the protocol, when negotiation takes too long, when its export is
//! removed, or when the server stops. Requests in flight then get some time, and their replies are sent as far as the
//! client still receives.
//!
//! Shape: each poll of the task checks again what may have changed: replies were sent, requests completed, or other
//! connections released bytes in flight.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::net::Shutdown;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use sealblock_protocols_nbd::{Closed, Command, Event, Export as Told, Request, Server as Core, ServerConfig, Ticket};
use sealblock_runtime_memory::Buffer;
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::{Notify, Share, now, pool, shutdown_requested, sleep_until, spawn, timeout};

use crate::shared::{ControlOrder, Registration};
use crate::translate::{FailedRequest, OpenExport, RemainingWork, Reply};

/// How long a client may take to close after the server has sent its last bytes.
const LINGERING_CLOSE: Duration = Duration::from_secs(1);
/// Bytes that are received and discarded at once meanwhile.
const LINGERING_CLOSE_BYTES: usize = 4096;
/// Bytes that are received at once: many requests, or the data of a medium-sized write.
const STAGING_BYTES: usize = 256 << 10;
/// Socket buffer size each way, in bytes: the data of a deep queue of reads, so that a send does not stop half way and
/// wait for the client. Automatic tuning grows socket buffers only after they were too small.
const SOCKET_BYTES: usize = 2 << 20;

pub(crate) struct Connection {
    pub(crate) registration: Registration,
    pub(crate) core: RefCell<Core>,
    pub(crate) stream: Stream,
    peer: String,
    /// The exports that the client may choose.
    pub(crate) advertised: Arc<[Told]>,
    /// The device of the chosen export.
    pub(crate) open_export: RefCell<Option<Rc<OpenExport>>>,
    /// This connection's share of the bytes in flight over all connections.
    pub(crate) share: Share,
    /// The connection's task.
    pub(crate) task: RefCell<Waker>,
    /// Notified when there is something to send, or sending must end.
    output: Notify,
    /// True while the connection's task is polled, so that it need not be woken.
    is_polling: Cell<bool>,
    /// Replies are sent, or requests checked again, before more is received.
    pub(crate) sends_first: Cell<bool>,
    /// Replies were sent since a request had to wait for bytes in flight.
    has_room: Cell<bool>,
    /// The remaining replies are the last ones.
    is_finishing: Cell<bool>,
    is_finished: Cell<bool>,
    /// No reply can be sent any more.
    pub(crate) is_gone: Cell<bool>,
}

/// The peer for log lines: its address, or its process on a Unix socket.
fn origin(stream: &Stream) -> String {
    match (stream.peer_addr(), stream.peer_process()) {
        (Ok(address), _) => address.to_string(),
        (Err(_), Ok((0, uid))) => format!("a process of user {uid}"),
        (Err(_), Ok((pid, uid))) => format!("process {pid} of user {uid}"),
        (Err(_), Err(_)) => "(gone)".to_owned(),
    }
}

impl Connection {
    pub(crate) fn new(stream: Stream, place: Registration) -> Rc<Connection> {
        let advertised = place.server.advertised();
        let mut config = ServerConfig::new(pool(), []);
        config.exports = Arc::clone(&advertised);
        config.default_export = place.server.default_of(&advertised);
        config.limits = place.server.limits.connection.clone();
        config.staging_bytes = STAGING_BYTES;
        let mut core = Core::new(config);
        // Starts without a share of the budget and grows it on demand.
        core.grant(0);
        // Where the system refuses, its default buffers apply, at the cost of more system calls.
        let _ = stream.set_send_buffer_bytes(SOCKET_BYTES);
        let _ = stream.set_recv_buffer_bytes(SOCKET_BYTES);
        // Unix sockets have no such limit.
        let _ = stream.set_user_timeout(place.server.limits.receive);
        stream.set_prompt(true);
        let from = origin(&stream);
        Rc::new(Connection {
            peer: from,
            share: Share::new(&place.server.budget),
            registration: place,
            core: RefCell::new(core),
            stream,
            advertised,
            open_export: RefCell::default(),
            task: RefCell::new(Waker::noop().clone()),
            output: Notify::default(),
            is_polling: Cell::new(false),
            sends_first: Cell::new(false),
            has_room: Cell::new(false),
            is_finishing: Cell::new(false),
            is_finished: Cell::new(false),
            is_gone: Cell::new(false),
        })
    }

    /// Serves the connection until it has ended.
    pub(crate) async fn run(self: Rc<Self>) {
        let signal = Arc::clone(&self.registration.signal);
        let watch = spawn(async move {
            shutdown_requested().await;
            signal.send(ControlOrder::Drain);
        });
        self.serve().await;
        if self.open_export.borrow().is_some() {
            tracing::info!(from = self.from(), "NBD client disconnected");
        }
        self.close();
        watch.abort();
    }

    async fn serve(self: &Rc<Self>) {
        let drain = self.registration.server.limits.drain;
        let mut sender = Sender { future: pin!(self.send_all()), is_over: false };
        self.run_with_sender(&mut sender, ControlOrder::Drain, self.receive()).await;
        // Requests that were received fail with ESHUTDOWN, and requests in flight complete.
        self.core.borrow_mut().stop();
        self.run_with_sender(&mut sender, ControlOrder::Abort, timeout(drain, self.process_batch(0))).await;
        self.core.borrow_mut().close();
        self.run_with_sender(&mut sender, ControlOrder::Abort, timeout(drain, self.wait_idle())).await;
        self.is_finishing.set(true);
        self.wake();
        self.run_with_sender(&mut sender, ControlOrder::Abort, timeout(drain, self.wait_sent())).await;
        if !self.is_gone.get() {
            // A client that does not close in time is reset.
            let linger = self.stream.lingering_close(LINGERING_CLOSE, LINGERING_CLOSE_BYTES);
            self.run_with_sender(&mut sender, ControlOrder::Abort, linger).await;
        }
    }

    /// Polls `work` to its end and sends meanwhile, until the connection gets this order.
    async fn run_with_sender<F: Future<Output = ()>>(
        &self,
        sender: &mut Sender<'_, F>,
        order: ControlOrder,
        work: impl Future,
    ) {
        let mut work = pin!(work);
        let mut is_known = false;
        poll_fn(|cx| {
            if !std::mem::replace(&mut is_known, true) {
                // A task's waker stays the same.
                *self.task.borrow_mut() = cx.waker().clone();
                self.registration.signal.listen(cx.waker());
            }
            if self.registration.signal.has(order) {
                return Poll::Ready(());
            }
            self.is_polling.set(true);
            let polled = loop {
                let polled = work.as_mut().poll(cx).map(drop);
                sender.poll(cx);
                if polled.is_ready() || !self.sends_first.take() {
                    break polled;
                }
            };
            self.is_polling.set(false);
            polled
        })
        .await
    }

    /// The client, for log lines.
    pub(crate) fn from(&self) -> &str {
        &self.peer
    }

    /// Has the connection's task send, or check its state.
    pub(crate) fn wake(&self) {
        self.output.notify_self();
        if !self.is_polling.get() {
            self.task.borrow().wake_by_ref();
        }
    }

    async fn receive(self: &Rc<Self>) {
        let negotiated = self.receive_while(|| self.open_export.borrow().is_none());
        let deadline = now() + self.registration.server.limits.negotiation;
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
            self.process_batch(len).await;
        }
    }

    /// Returns a buffer to receive into, once the budget permits more requests; `None` when the connection has ended.
    async fn receive_buffer(self: &Rc<Self>) -> Option<Buffer> {
        loop {
            let (buffer, is_over) = {
                let mut core = self.core.borrow_mut();
                (core.receive_buffer(), core.closed().is_some())
            };
            if buffer.is_some() || is_over {
                return buffer;
            }
            // Does not wait for bytes that were released while the last replies were sent.
            if !self.has_room.take() {
                next_turn().await;
            }
            self.process_batch(0).await;
        }
    }

    async fn send_all(self: &Rc<Self>) {
        self.send().await;
        self.is_finished.set(true);
        self.sends_first.set(true);
    }

    async fn send(self: &Rc<Self>) {
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
                return self.close();
            }
            self.core.borrow_mut().sent();
            self.settle();
        }
    }

    /// Releases the bytes of sent replies, and lets waiting requests start.
    fn settle(&self) {
        let mut core = self.core.borrow_mut();
        self.share.set_in_flight(core.bytes_in_flight());
        core.grant(self.share.held_bytes());
        if core.is_full() {
            self.has_room.set(true);
            self.sends_first.set(true);
        }
    }

    /// Waits until no request is in flight.
    async fn wait_idle(self: &Rc<Self>) {
        while self.core.borrow().requests_in_flight() > 0 && !self.is_gone.get() {
            next_turn().await;
        }
    }

    /// Waits until all replies are sent.
    async fn wait_sent(self: &Rc<Self>) {
        while !self.is_finished.get() {
            next_turn().await;
        }
    }

    /// Receives, sends and starts nothing any more.
    pub(crate) fn close(&self) {
        self.is_gone.set(true);
        self.core.borrow_mut().close();
        // Fails only if the client has already closed.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.sends_first.set(true);
    }
}

/// Completes at the next poll of the task.
async fn next_turn() {
    let mut has_waited = false;
    poll_fn(|_| if std::mem::replace(&mut has_waited, true) { Poll::Ready(()) } else { Poll::Pending }).await
}

/// The sending half of a connection.
struct Sender<'a, F> {
    future: Pin<&'a mut F>,
    is_over: bool,
}

impl<F: Future<Output = ()>> Sender<'_, F> {
    fn poll(&mut self, cx: &mut Context<'_>) {
        self.is_over = self.is_over || self.future.as_mut().poll(cx).is_ready();
    }
}

/// The minimum number of requests, and the maximum of bytes that they read, before their replies are sent. With one
/// send for a deep queue, client and server would take turns instead of working at the same time. Smaller batches cost
/// more system calls than they save.
const BATCH_REQUESTS: usize = 16;
const BATCH_BYTES: u64 = 256 << 10;
/// Bytes of a received request without data.
const REQUEST_BYTES: usize = 28;

impl Connection {
    /// Executes what was received, and sends replies in batches.
    pub(crate) async fn process_batch(self: &Rc<Self>, received_bytes: usize) {
        let part = (received_bytes / REQUEST_BYTES / 2).max(BATCH_REQUESTS);
        let (mut events, mut in_part, mut read_bytes) = (0, 0, 0);
        while let Some(event) = self.next_event() {
            read_bytes += read_bytes_of(&event);
            self.on_event(event);
            (events, in_part) = (events + 1, in_part + 1);
            if in_part >= part || read_bytes >= BATCH_BYTES {
                self.send_first().await;
                (in_part, read_bytes) = (0, 0);
            }
        }
        // A client with queue depth 1 sends its next request as soon as it has this reply.
        self.stream.set_busy_poll(events == 1);
        self.send_first().await;
    }

    /// Lets the sender run first.
    async fn send_first(self: &Rc<Self>) {
        self.wake();
        let mut has_waited = false;
        poll_fn(|_| {
            if std::mem::replace(&mut has_waited, true) {
                return Poll::Ready(());
            }
            self.sends_first.set(true);
            Poll::Pending
        })
        .await
    }

    /// Returns the next event. A request that exceeds this connection's share waits until its share can grow.
    fn next_event(&self) -> Option<Event> {
        let mut core = self.core.borrow_mut();
        loop {
            if let Some(event) = core.next_event() {
                return Some(event);
            }
            let (need, now) = (core.wanted_bytes()?, core.bytes_in_flight());
            if !self.share.grow(now, need.saturating_sub(now), &self.task.borrow()) {
                return None;
            }
            core.grant(self.share.held_bytes());
        }
    }

    fn on_event(self: &Rc<Self>, event: Event) {
        match event {
            Event::Chosen(index) => self.open(index),
            Event::Unknown(export) => {
                tracing::warn!(export, from = self.from(), "NBD client refused: no such export");
            }
            Event::Request(request) => self.begin(request),
            Event::Closed(Closed::Violation(violation)) => {
                tracing::debug!(%violation, from = self.from(), "NBD connection closed: protocol violation");
            }
            Event::Closed(_) => {}
        }
    }

    fn open(&self, index: usize) {
        let Some(advertised) = self.advertised.get(index) else { return };
        let Some(export) = self.registration.choose(advertised, self.from()) else {
            tracing::debug!(export = advertised.name, "NBD connection closed: the chosen export was removed");
            return self.core.borrow_mut().close();
        };
        tracing::info!(export = export.name(), from = self.from(), "NBD client connected");
        let gives_parts = self.core.borrow().has_chunks();
        // The server does not know which connections belong to one client, and a Flush on any of them covers writes on
        // all (CAN_MULTI_CONN). So all connections of an export share one flush cursor name.
        let flush_cursor = Arc::new(export.device.flush_cursor(&format!("nbd {}", export.name())));
        *self.open_export.borrow_mut() = Some(Rc::new(OpenExport {
            device: export.device.attach_as(&flush_cursor),
            can_return_partial: gives_parts,
        }));
    }

    fn begin(self: &Rc<Self>, Request { ticket, command }: Request) {
        let open_export = self.open_export.borrow().clone();
        // No request comes before an export is chosen.
        let Some(open_export) = open_export else { return };
        match open_export.try_execute(command) {
            Ok(outcome) => self.complete(ticket, outcome),
            Err(work) => drop(spawn(Rc::clone(self).execute(open_export, ticket, work))),
        }
    }

    async fn execute(self: Rc<Self>, open_export: Rc<OpenExport>, ticket: Ticket, work: RemainingWork) {
        let outcome = open_export.execute(work, &self.is_gone).await;
        self.complete(ticket, outcome);
        self.wake();
    }

    fn complete(&self, ticket: Ticket, outcome: Result<Reply, FailedRequest>) {
        let mut core = self.core.borrow_mut();
        match outcome {
            Ok(Reply::Done) => core.done(ticket),
            Ok(Reply::Data(data)) => core.data(ticket, [data]),
            Ok(Reply::Status(runs)) => core.status(ticket, &runs),
            Err(error) => {
                tracing::debug!(error = ?error.reply, "NBD request failed");
                core.fail(ticket, Vec::from_iter(error.data_before), &error.reply);
            }
        }
    }
}

fn read_bytes_of(event: &Event) -> u64 {
    match event {
        Event::Request(Request { command: Command::Read { length, .. }, .. }) => u64::from(*length),
        _ => 0,
    }
}
