//! A connection: one task receives, executes the requests for which the device need not wait, and sends.
//!
//! It ends when the client closes it or violates the protocol, when negotiation takes too long, when its export is
//! removed, when the client's next session names it, or when the server stops. Then requests in flight get some time to
//! complete, and their replies are sent as long as the client receives. They keep their blocks locked against later
//! changes by anyone, because the client may send them again.
//!
//! Once its export is chosen, it goes to the core that executes the requests of the export's device, if only one does
//! (`placement.rs`).
//!
//! Shape: each poll of the task ([`SendScheduler`]) checks again what may have changed: replies that were sent,
//! requests that completed, bytes in flight that other connections released.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::net::Shutdown;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use sealblock_layers_cross_core::{ClientSession, SharedDevice};
use sealblock_protocols_nbd::{
    Closed, Command, ErrorCode, Event, Export as Told, Request, Server as Core, ServerConfig, Ticket,
};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::{Share, now, pool, shutdown_requested, sleep, sleep_until, spawn, timeout};
use sealblock_transport::{
    Arrival, HeldBytes, Registration, ReplyBatch, STAGING_BYTES, SendScheduler, Sender, Signals, WatchedEnd, WorkQueue,
    configure_socket, lingering_close, next_poll,
};

use crate::shared::{ChosenExport, ServerState};
use crate::translate::{FailedRequest, OpenExport, RemainingWork, Reply};

/// Bytes of a request header.
const REQUEST_BYTES: usize = 28;
/// Bytes that are sent at once; how much of a long reply the client has received is known only in such steps.
const SEND_BYTES: usize = 1 << 20;
/// If others wait for the memory of a client, it must receive or send this many bytes in this time, or its connection
/// ends.
const LEAST_BYTES: u64 = 256 << 10;
const LEAST_BYTES_IN: Duration = Duration::from_secs(2);

pub(crate) struct Connection {
    pub(crate) server: Arc<ServerState>,
    pub(crate) core: RefCell<Core>,
    pub(crate) stream: Stream,
    peer: String,
    /// What the client may choose, and until when.
    pub(crate) offer: Offer,
    /// Whether it is known on which core the connection belongs.
    pub(crate) arrival: Arrival,
    /// The export that the client has chosen, until it is opened.
    pub(crate) choice: RefCell<Option<ChosenExport>>,
    chosen: RefCell<Option<ChosenExport>>,
    /// The device of the chosen export.
    open_export: RefCell<Option<Rc<OpenExport>>>,
    session: Rc<ClientSession>,
    /// Set until the requests in flight are fenced.
    watched_end: RefCell<Option<Rc<WatchedEnd<SharedDevice>>>>,
    /// This connection's share of the bytes in flight over all connections.
    share: Share,
    /// Long requests that have not started.
    work: WorkQueue<(Rc<OpenExport>, (Ticket, Instant), RemainingWork)>,
    scheduler: SendScheduler,
    /// Bytes that were received and sent.
    moved_bytes: Cell<u64>,
    /// When the current batch was received, at which its requests count as arrived.
    batch_arrived: Cell<Instant>,
    /// True while a reply is being sent.
    is_sending: Cell<bool>,
    /// True if a task checks whether the client makes progress.
    is_watched: Cell<bool>,
    /// True if replies were sent since a request had to wait for bytes in flight.
    has_room: Cell<bool>,
    /// True if no reply can be sent any more.
    pub(crate) is_gone: Cell<bool>,
    /// How the connection ended, if its client ended it without having disconnected.
    lost: Cell<Option<io::ErrorKind>>,
    /// Dropped last: a connection that is not counted any more has no choice in the list of clients.
    pub(crate) registration: Registration,
}

/// What a client may choose.
#[derive(Clone)]
pub(crate) struct Offer {
    exports: Arc<[Told]>,
    /// The index of the one that has no name.
    default: Option<usize>,
    deadline: Instant,
}

/// Why a connection is served no more.
#[derive(PartialEq, Eq)]
enum Served {
    /// It has ended.
    All,
    /// It goes on on another core.
    Leaving,
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
    /// A connection that was just accepted.
    pub(crate) fn new(stream: Stream, server: Arc<ServerState>, registration: Registration) -> Rc<Connection> {
        let exports = server.advertised();
        let default = server.default_of(&exports);
        let offer = Offer { exports, default, deadline: now() + server.limits.negotiation };
        Connection::with_offer(stream, server, registration, offer)
    }

    pub(crate) fn with_offer(
        stream: Stream,
        server: Arc<ServerState>,
        registration: Registration,
        offer: Offer,
    ) -> Rc<Connection> {
        let mut config = ServerConfig::new(pool(), []);
        config.exports = Arc::clone(&offer.exports);
        config.default_export = offer.default;
        config.limits = server.limits.connection.clone();
        config.staging_bytes = STAGING_BYTES;
        config.fences_sessions = true;
        let mut core = Core::new(config);
        // Starts without a share of the budget and grows it on demand.
        core.grant(0);
        configure_socket(&stream, server.limits.receive);
        let from = origin(&stream);
        Rc::new(Connection {
            peer: from,
            share: Share::new(&server.budget),
            work: WorkQueue::new(&server.work_budget, server.limits.connection.bytes_in_flight),
            server,
            arrival: Arrival::new(&registration),
            registration,
            core: RefCell::new(core),
            stream,
            offer,
            choice: RefCell::default(),
            chosen: RefCell::default(),
            open_export: RefCell::default(),
            session: ClientSession::begin(),
            watched_end: RefCell::default(),
            scheduler: SendScheduler::default(),
            moved_bytes: Cell::default(),
            batch_arrived: Cell::new(now()),
            is_sending: Cell::new(false),
            is_watched: Cell::new(false),
            has_room: Cell::new(false),
            is_gone: Cell::new(false),
            lost: Cell::default(),
        })
    }

    /// Serves the connection until it has ended, or until it leaves this core.
    pub(crate) async fn run(self: Rc<Self>) {
        let signal = Arc::clone(&self.registration.signal);
        let watch = spawn(async move {
            shutdown_requested().await;
            signal.send(Signals::DRAIN);
        });
        let served = self.serve().await;
        if served == Served::Leaving {
            watch.abort();
            return self.leave();
        }
        if self.lost.get().is_none()
            && let Some(chosen) = &*self.chosen.borrow()
        {
            tracing::info!(export = chosen.export.name(), from = self.from(), "NBD client disconnected");
        }
        self.close();
        self.registration.set_answered();
        watch.abort();
    }

    async fn serve(self: &Rc<Self>) -> Served {
        let drain = self.server.limits.drain;
        let sending = pin!(self.send());
        let mut sender = Sender::new(sending);
        self.scheduler.run(&mut sender, self.with_work(self.until(Signals::DRAIN, self.receive()))).await;
        if self.arrival.is_leaving() {
            // The client has its answer first; what it then sends waits in the socket.
            self.until(Signals::DRAIN, self.scheduler.finish(&mut sender)).await;
            if self.can_leave() {
                return Served::Leaving;
            }
            drop(self.choice.take());
        }
        match self.is_lost() {
            true => {
                let in_flight = self.core.borrow().requests_in_flight();
                self.fence().await;
                self.report_lost(in_flight);
            }
            // Everything was received, and none of it will be sent again. But the client may be back with newer changes
            // before those in flight have completed.
            false if self.is_disconnected() => self.fence().await,
            false => drop(self.watched_end.take()),
        }
        // Requests that were received fail with ESHUTDOWN, and requests in flight complete.
        self.core.borrow_mut().stop();
        for (_, (ticket, _), _) in self.work.take_waiting() {
            self.complete(ticket, Err(ErrorCode::Shutdown.into()));
        }
        self.scheduler.run(&mut sender, self.until(Signals::ABORT, timeout(drain, self.process_batch(0)))).await;
        self.core.borrow_mut().close();
        self.scheduler.run(&mut sender, self.until(Signals::ABORT, timeout(drain, self.wait_idle()))).await;
        self.fence().await;
        self.until(Signals::ABORT, timeout(drain, self.scheduler.finish(&mut sender))).await;
        if !self.is_gone.get() {
            self.until(Signals::ABORT, lingering_close(&self.stream)).await;
        }
        Served::All
    }

    /// True if the client is gone without having disconnected. While the connection drains, it waits for its replies,
    /// and what is in flight after NBD_CMD_DISC is completed.
    fn is_lost(&self) -> bool {
        let signal = &self.registration.signal;
        let is_drained = signal.has(Signals::DRAIN) && !signal.has(Signals::ABORT);
        !is_drained && !self.is_disconnected()
    }

    /// True if the client has sent NBD_CMD_DISC.
    fn is_disconnected(&self) -> bool {
        self.core.borrow().closed() == Some(Closed::Disconnected)
    }

    /// The one line about a client that is gone without having disconnected, and that had this many requests in flight.
    fn report_lost(&self, in_flight: usize) {
        let (Some(chosen), Some(how)) = (&*self.chosen.borrow(), self.lost.get()) else { return };
        let (export, from) = (chosen.export.name(), self.from());
        if in_flight == 0 {
            tracing::info!(export, from, %how, "NBD client closed its connection without disconnecting; no request was in flight");
            return;
        }
        tracing::warn!(
            export,
            from,
            %how,
            in_flight,
            "NBD client lost: it did not disconnect, and none of its requests in flight is executed after newer changes"
        );
    }

    /// Ends the session: what it has in flight is not executed after newer changes.
    async fn fence(&self) {
        self.session.end().await;
        if let Some(chosen) = &*self.chosen.borrow() {
            chosen.set_fenced();
        }
        drop(self.watched_end.take());
    }

    /// Waits until older connections of the device's clients that have ended are read completely, so that no unread
    /// request there is executed after those received here. A client would send such a request again, and then newer
    /// changes.
    async fn wait_for_ended(&self) {
        let Some(watched) = self.watched_end.borrow().clone() else { return };
        watched.wait_for_others(SharedDevice::is_same).await;
    }

    /// Polls `receiving`; before each poll, starts long requests that waited for others to end, here or on other
    /// connections.
    async fn with_work(self: &Rc<Self>, receiving: impl Future) {
        let mut receiving = pin!(receiving);
        poll_fn(|cx| {
            if self.work.waiting() > 0 {
                self.start_work();
            }
            receiving.as_mut().poll(cx).map(drop)
        })
        .await
    }

    /// Polls `work` until it completes or the connection gets this signal.
    async fn until(&self, order: Signals, work: impl Future) {
        let (mut work, mut is_listening) = (pin!(work), false);
        poll_fn(|cx| {
            if !std::mem::replace(&mut is_listening, true) {
                // The waker of a task stays the same.
                self.registration.signal.listen(cx.waker());
            }
            match self.registration.signal.has(order) {
                true => Poll::Ready(()),
                false => work.as_mut().poll(cx).map(drop),
            }
        })
        .await
    }

    /// The client, for log lines.
    pub(crate) fn from(&self) -> &str {
        &self.peer
    }

    async fn receive(self: &Rc<Self>) {
        let negotiated = async {
            self.open_choice().await;
            self.receive_while(|| self.open_export.borrow().is_none() && !self.arrival.is_leaving()).await;
        };
        let (mut negotiated, mut late) = (pin!(negotiated), sleep_until(self.offer.deadline));
        let is_in_time = poll_fn(|cx| match negotiated.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(true),
            Poll::Pending => pin!(&mut late).poll(cx).map(|()| false),
        });
        if is_in_time.await && !self.arrival.is_leaving() {
            self.receive_while(|| true).await;
        }
    }

    /// Receives while `wanted` and the connection is open.
    async fn receive_while(self: &Rc<Self>, wanted: impl Fn() -> bool) {
        while wanted() {
            let Some(buffer) = self.receive_buffer().await else { return };
            let (result, buffer) = self.stream.recv(buffer).await;
            let len = match result {
                Ok(0) => return self.lose(io::ErrorKind::UnexpectedEof),
                Err(error) => return self.lose(error.kind()),
                Ok(len) => len,
            };
            self.add_moved(len);
            self.arrival.add(&buffer[..len]);
            self.core.borrow_mut().received(buffer, len);
            self.wait_for_ended().await;
            self.process_batch(len).await;
        }
    }

    /// Nothing more can be received.
    fn lose(&self, how: io::ErrorKind) {
        // Otherwise this side has closed the connection.
        if !self.is_gone.get() {
            self.lost.set(Some(how));
        }
        self.core.borrow_mut().close();
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
            // Returns at once if bytes were released while the last replies were sent.
            if !self.has_room.take() {
                next_poll().await;
            }
            self.process_batch(0).await;
        }
    }

    async fn send(self: &Rc<Self>) {
        let mut slices = Vec::new();
        loop {
            let bytes = self.core.borrow_mut().transmit(&mut slices);
            if bytes == 0 {
                if !self.scheduler.output().await {
                    return;
                }
                continue;
            }
            self.is_sending.set(true);
            let sent = self.send_slices(&mut slices, bytes).await;
            self.is_sending.set(false);
            if let Err(error) = sent {
                self.lose(error.kind());
                return self.close();
            }
            self.core.borrow_mut().sent();
            self.update_in_flight();
        }
    }

    async fn send_slices(&self, slices: &mut Vec<Slice>, bytes: usize) -> io::Result<()> {
        if bytes <= SEND_BYTES {
            self.stream.send_all(slices.drain(..)).await?;
            self.add_moved(bytes);
            return Ok(());
        }
        for mut slice in slices.drain(..) {
            while !slice.is_empty() {
                let count = slice.len().min(SEND_BYTES);
                self.stream.send_all([slice.slice(..count)]).await?;
                self.add_moved(count);
                slice = slice.slice(count..);
            }
        }
        Ok(())
    }

    fn add_moved(&self, bytes: usize) {
        self.moved_bytes.set(self.moved_bytes.get() + bytes as u64);
    }

    /// Ends the connection if other clients wait for memory and its client neither sends the rest of a write nor
    /// receives a reply. The task ends when the connection holds no more than its reserve.
    fn watch_client(self: &Rc<Self>) {
        if self.is_watched.replace(true) {
            return;
        }
        let connection = Rc::downgrade(self);
        let waits_for_client = |it: &Self| it.is_sending.get() || it.core.borrow().is_receiving_data();
        drop(spawn(async move {
            while let Some((before, was_waiting)) =
                connection.upgrade().map(|it| (it.moved_bytes.get(), waits_for_client(&it)))
            {
                sleep(LEAST_BYTES_IN).await;
                let Some(it) = connection.upgrade().filter(|it| !it.is_gone.get()) else { return };
                if it.share.held_bytes() <= it.server.limits.aside_bytes() {
                    return it.is_watched.set(false);
                }
                let is_slow = it.moved_bytes.get() - before < LEAST_BYTES;
                if is_slow && was_waiting && waits_for_client(&it) && it.share.others_wait(&it.scheduler.task()) {
                    tracing::info!(
                        from = it.from(),
                        "NBD connection closed: others wait for the memory of a request that its client does not go on with"
                    );
                    return it.close();
                }
            }
        }));
    }

    /// Releases the bytes of sent replies, and lets waiting requests start.
    fn update_in_flight(&self) {
        let mut core = self.core.borrow_mut();
        self.share.set_in_flight(core.bytes_in_flight());
        core.grant(self.share.held_bytes());
        if core.is_full() {
            self.has_room.set(true);
            self.scheduler.run_again();
        }
    }

    /// Waits until no request is in flight.
    async fn wait_idle(self: &Rc<Self>) {
        while self.core.borrow().requests_in_flight() > 0 && !self.is_gone.get() {
            next_poll().await;
        }
    }

    /// From now on receives, sends and starts nothing.
    pub(crate) fn close(&self) {
        self.is_gone.set(true);
        self.core.borrow_mut().close();
        // Fails only if the client has already closed.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.scheduler.run_again();
    }

    /// Executes what was received, and sends replies in batches.
    pub(crate) async fn process_batch(self: &Rc<Self>, received_bytes: usize) {
        // Once for the batch: reading the clock for each request would be noticeable on a device that executes in place.
        self.batch_arrived.set(now());
        let mut batch = ReplyBatch::new(received_bytes, REQUEST_BYTES);
        while let Some(event) = self.next_event() {
            let read_bytes = read_bytes_of(&event);
            if let Event::Chosen(index) = event {
                self.choose(index);
                if self.leaves() {
                    return;
                }
                self.open().await;
                continue;
            }
            self.on_event(event);
            if batch.add(read_bytes) {
                self.scheduler.send_first().await;
            }
        }
        self.stream.set_busy_poll(batch.was_single());
        self.scheduler.send_first().await;
    }

    /// Returns the next event. A request that exceeds this connection's share waits until its share can grow.
    fn next_event(self: &Rc<Self>) -> Option<Event> {
        let mut core = self.core.borrow_mut();
        loop {
            if let Some(event) = core.next_event() {
                return Some(event);
            }
            let (need, now) = (core.wanted_bytes()?, core.bytes_in_flight());
            if !self.share.grow(now, need.saturating_sub(now), &self.scheduler.task()) {
                return None;
            }
            core.grant(self.share.held_bytes());
            if self.share.held_bytes() > self.server.limits.aside_bytes() {
                self.watch_client();
            }
        }
    }

    fn on_event(self: &Rc<Self>, event: Event) {
        match event {
            Event::Unknown(export) => {
                tracing::warn!(export, from = self.from(), "NBD client refused: no such export");
            }
            Event::Request(request) => self.begin(request),
            Event::Closed(Closed::Violation(violation)) => {
                tracing::debug!(%violation, from = self.from(), "NBD connection closed: protocol violation");
            }
            Event::Chosen(_) | Event::Closed(_) => {}
        }
    }

    /// Records the client's choice, or closes the connection if that export was removed.
    fn choose(&self, index: usize) {
        let Some(advertised) = self.offer.exports.get(index) else { return };
        let (session, names_none) = (self.core.borrow().client_session(), self.core.borrow().names_none());
        let choice = self.server.choose(&self.registration, (advertised, names_none), self.from(), session);
        if choice.is_none() {
            tracing::debug!(export = advertised.name, "NBD connection closed: the chosen export was removed");
            self.core.borrow_mut().close();
        }
        *self.choice.borrow_mut() = choice;
    }

    /// Opens the chosen export, if it is not open. Requests received after the choice wait until the client's older
    /// sessions are fenced.
    pub(crate) async fn open(&self) {
        let Some(chosen) = self.choice.take() else { return };
        let export = Arc::clone(&chosen.export);
        chosen.end_older_sessions().await;
        *self.chosen.borrow_mut() = Some(chosen);
        self.registration.set_introduced();
        let number = self.registration.number;
        match self.server.ends.watch(&self.stream, &self.registration, number, export.device.clone()) {
            Ok(watched) => *self.watched_end.borrow_mut() = Some(Rc::new(watched)),
            Err(error) => {
                tracing::warn!(%error, from = self.from(), "NBD connection closed: it cannot be watched for its end");
                return self.core.borrow_mut().close();
            }
        }
        self.wait_for_ended().await;
        tracing::info!(export = export.name(), from = self.from(), "NBD client connected");
        let gives_parts = self.core.borrow().has_chunks();
        // The server does not know which connections belong to one client, and a Flush on any of them covers writes on
        // all (CAN_MULTI_CONN). So all connections of an export share one flush cursor name.
        let flush_cursor = Arc::new(export.device.flush_cursor(&format!("nbd {}", export.name())));
        *self.open_export.borrow_mut() = Some(Rc::new(OpenExport {
            device: export.device.attach_in(&flush_cursor, &self.session),
            can_return_partial: gives_parts,
        }));
    }

    fn begin(self: &Rc<Self>, Request { ticket, command }: Request) {
        let (open_export, arrived) = (self.open_export.borrow().clone(), self.batch_arrived.get());
        // No request comes before an export is chosen.
        let Some(open_export) = open_export else { return };
        let work = match open_export.try_execute(command, arrived) {
            Ok(outcome) => return self.complete(ticket, outcome),
            Err(work) => work,
        };
        match work.work_bytes() {
            0 => drop(spawn(Rc::clone(self).execute(open_export, (ticket, arrived), work, None))),
            bytes => {
                self.work.add((open_export, (ticket, arrived), work), bytes);
                self.start_work();
            }
        }
    }

    /// Starts waiting long requests, as far as there is memory for them.
    fn start_work(self: &Rc<Self>) {
        while let Some(((open_export, ticket, work), held)) = self.work.next(&self.scheduler.task()) {
            drop(spawn(Rc::clone(self).execute(open_export, ticket, work, Some(held))));
        }
    }

    async fn execute(
        self: Rc<Self>,
        open_export: Rc<OpenExport>,
        (ticket, arrived): (Ticket, Instant),
        work: RemainingWork,
        held: Option<HeldBytes>,
    ) {
        let outcome = open_export.execute(work, arrived, &self.is_gone).await;
        drop(held);
        // Also returns to others what this connection no longer needs.
        self.start_work();
        self.complete(ticket, outcome);
        self.scheduler.wake();
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
