//! A connection: one task receives, executes and sends; another (`shutdown.rs`) handles its timer and the signals of
//! other cores.
//!
//! It ends when the peer closes it, violates the protocol or is silent for too long, when its controller ends, or when
//! the target stops. Commands in flight complete, and their completions are dropped unless the target drains.
//!
//! Shape: one poll of the task ([`SendScheduler`]) executes what was received together before it receives more, so that
//! completions leave first, in batches.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::net::Shutdown;
use std::pin::pin;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::Instant;

use sealblock_protocols_nvme::Command;
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_protocols_nvme_tcp::config::LayoutOf;
use sealblock_protocols_nvme_tcp::target::{Event, Target as Core, Token};
use sealblock_protocols_nvme_tcp::{TargetConfig, TransmitLimit};
use sealblock_runtime_memory::{Buffer, Pool};
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::{Share, now, pool, spawn, timeout};
use sealblock_transport::{
    Arrival, Registration, ReplyBatch, STAGING_BYTES, SendScheduler, Sender, WatchedEnd, WorkQueue, configure_socket,
    lingering_close,
};

use crate::command::fused::FusedPairs;
use crate::command::io::{IoRequest, RemainingWork};
use crate::command::queue_context::QueueContext;
use crate::command::reply::Reply;
use crate::command::slots::CommandSlots;
use crate::model::async_events::EventRequests;
use crate::model::controller::Controller;
use crate::model::limits::IN_CAPSULE_BYTES;
use crate::model::registry::TargetState;
use crate::model::subsystem::Subsystem;

/// Bytes of a received command without data.
const CAPSULE_BYTES: usize = 72;

/// The role of a connection.
#[derive(Clone)]
pub(crate) enum Role {
    /// No queue yet: Connect has not completed.
    New,
    /// The admin queue of a controller.
    Admin(Arc<Controller>),
    /// An I/O queue of a controller, and its identifier.
    Io(Rc<QueueContext>, u16),
}

/// A command that was checked.
pub(crate) struct PreparedCommand {
    pub(crate) command: Command,
    /// `None` for Fabrics and admin commands.
    pub(crate) request: Option<IoRequest>,
    /// The number of resets of the controller before it, for a command on an admin queue.
    pub(crate) resets: u64,
}

/// A command that waits for bytes in flight.
pub(crate) enum WaitingCommand {
    /// Its data is to be fetched.
    Fetch(Token, PreparedCommand, usize),
    /// It reads at most this many bytes.
    Read(Token, PreparedCommand, ReplyBytes),
}

/// A command that waits for memory in addition to its data.
pub(crate) struct WaitingWork {
    pub(crate) token: Token,
    pub(crate) command: Command,
    pub(crate) request: IoRequest,
    pub(crate) work: RemainingWork,
}

/// Bytes of a reply.
#[derive(Clone, Copy, Default)]
pub(crate) struct ReplyBytes {
    /// What counts as in flight until the length of the reply is known.
    pub(crate) counted: u64,
    /// The host's buffer.
    pub(crate) host_buffer: u64,
}

impl WaitingCommand {
    pub(crate) fn token(&self) -> Token {
        match self {
            WaitingCommand::Fetch(token, ..) | WaitingCommand::Read(token, ..) => *token,
        }
    }
}

/// Why a connection transfers no more.
#[derive(PartialEq, Eq)]
enum Transferred {
    /// It has ended.
    All,
    /// It goes on on another core.
    Leaving,
}

pub(crate) struct Connection {
    pub(crate) target: Arc<TargetState>,
    pub(crate) registration: Registration,
    pub(crate) core: RefCell<Core>,
    /// The subsystem of an I/O queue, for the lookup of how in-capsule data is divided into blocks.
    subsystem: Arc<OnceLock<Arc<Subsystem>>>,
    pub(crate) stream: Stream,
    pub(crate) role: RefCell<Role>,
    /// For an I/O queue, set until what is in flight is fenced.
    watched_end: RefCell<Option<Rc<WatchedEnd<Arc<Controller>>>>>,
    pub(crate) scheduler: SendScheduler,
    /// Commands whose data is being fetched, by the index of their token.
    pub(crate) fetching: RefCell<Vec<Option<(Token, PreparedCommand)>>>,
    /// Fused pairs that are not complete yet.
    pub(crate) pairs: FusedPairs,
    /// Commands that wait for their share of bytes in flight.
    pub(crate) waiting: RefCell<VecDeque<WaitingCommand>>,
    /// Bytes of all reads that were started, except failed ones.
    pub(crate) read_bytes: Cell<u64>,
    /// Bytes of reads in the current send that the socket has not yet accepted.
    pub(crate) sending_bytes: Cell<u64>,
    /// This connection's share of the bytes in flight over all connections.
    pub(crate) share: Share,
    /// I/O commands in flight.
    pub(crate) slots: CommandSlots,
    /// Fused pairs in flight, and admin commands that wait for a device or for another controller.
    pub(crate) running: Cell<usize>,
    /// Commands that wait for memory in addition to their data, or have it.
    pub(crate) work: WorkQueue<WaitingWork>,
    /// The number of resets of the controller that this admin queue has seen.
    pub(crate) resets: Cell<u64>,
    /// Asynchronous Event Requests that wait for an event.
    pub(crate) event_requests: EventRequests,
    pub(crate) pool: Pool,
    /// Submission queue head and number of entries; `None` if flow control is off, and before Connect.
    pub(crate) sq_head: Cell<Option<(u32, u32)>>,
    /// Set when the connection drains: the time limit of commands in flight.
    pub(crate) drain_deadline: Cell<Option<Instant>>,
    /// The Disconnect of an I/O queue, which completes when everything before it is fenced.
    pub(crate) disconnect: Cell<Option<(Token, Command)>>,
    /// True if nothing more is received.
    pub(crate) is_receive_stopped: Cell<bool>,
    /// True if nothing is received until a response is sent, or other connections release memory.
    is_paused: Cell<bool>,
    /// True if the connection was aborted, and so has no timer.
    pub(crate) is_aborted: Cell<bool>,
    pub(crate) accepted: Instant,
    /// Whether it is known on which core the connection belongs.
    pub(crate) arrival: Arrival,
    /// When the bytes of the current batch were received, at which its commands count as arrived.
    pub(crate) batch_arrived: Cell<Instant>,
}

impl Connection {
    /// A connection that was accepted at this time.
    pub(crate) fn new(
        target: &Arc<TargetState>,
        stream: Stream,
        registration: Registration,
        accepted: Instant,
    ) -> Rc<Connection> {
        let pool = pool();
        let mut config = TargetConfig::new(pool.clone());
        config.staging_bytes = STAGING_BYTES;
        config.max_commands = target.limits.commands.try_into().unwrap_or(config.max_commands);
        config.max_bytes_in_flight = target.limits.bytes_in_flight;
        config.max_in_capsule_bytes = IN_CAPSULE_BYTES;
        config.max_c2h_data_bytes = target.limits.read_pdu_bytes();
        let subsystem = Arc::new(OnceLock::<Arc<Subsystem>>::new());
        config.layout_of = Some(layout_lookup(&subsystem));
        configure_socket(&stream, target.limits.receive);
        let max_commands = usize::from(config.max_commands.get());
        Rc::new(Connection {
            target: Arc::clone(target),
            arrival: Arrival::new(&registration),
            registration,
            core: RefCell::new(Core::new(config)),
            subsystem,
            stream,
            role: RefCell::new(Role::New),
            watched_end: RefCell::default(),
            scheduler: SendScheduler::default(),
            fetching: RefCell::default(),
            pairs: FusedPairs::default(),
            waiting: RefCell::default(),
            read_bytes: Cell::new(0),
            sending_bytes: Cell::new(0),
            share: Share::new(&target.budget),
            slots: CommandSlots::new(max_commands),
            running: Cell::new(0),
            work: WorkQueue::new(&target.work_budget, target.limits.bytes_in_flight),
            resets: Cell::new(0),
            event_requests: EventRequests::default(),
            pool,
            sq_head: Cell::new(None),
            drain_deadline: Cell::new(None),
            disconnect: Cell::new(None),
            is_receive_stopped: Cell::new(false),
            is_paused: Cell::new(false),
            is_aborted: Cell::new(false),
            accepted,
            batch_arrived: Cell::new(now()),
        })
    }

    /// Sets the role of the connection after a successful Connect.
    pub(crate) fn set_role(self: &Rc<Self>, role: Role, entries: u32, no_flow_control: bool) {
        // The Connect command itself has already left the queue.
        self.sq_head.set((!no_flow_control).then_some((1 % entries, entries)));
        self.core.borrow_mut().set_success_flag(no_flow_control);
        if matches!(role, Role::Admin(_)) {
            self.registration.exclude_from_load();
        }
        if let Role::Io(context, _) = &role {
            // A connection gets a role once.
            let _ = self.subsystem.set(Arc::clone(&context.subsystem));
            self.watch_end(context.controller());
        }
        *self.role.borrow_mut() = role;
        self.registration.set_introduced();
        self.rearm_timer();
    }

    /// Serves the connection until it has ended and its commands at devices have completed, or until it leaves this
    /// core.
    pub(crate) async fn run(self: Rc<Self>) {
        let control = spawn(Rc::clone(&self).control());
        if self.transfer().await == Transferred::Leaving {
            // From here on, signals wait for the task on the other core.
            control.abort();
            return self.leave();
        }
        self.registration.set_answered();
        self.with_slots(poll_fn(|_| if self.busy() == 0 { Poll::Ready(()) } else { Poll::Pending })).await;
        control.abort();
    }

    /// Polls `work`, and before it the commands whose devices can continue.
    async fn with_slots<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        poll_fn(|cx| {
            self.slots.set_task(cx.waker());
            self.slots.begin_pass();
            while let Some(result) = self.slots.next() {
                result.into_iter().for_each(|result| self.on_result(result));
            }
            if self.work.waiting() > 0 {
                // Another connection may have released memory.
                self.start_work();
            }
            work.as_mut().poll(cx)
        })
        .await
    }

    /// The number of commands in flight except event requests; a pair counts once. The connection's task polls each
    /// completion.
    pub(crate) fn busy(&self) -> usize {
        self.slots.busy() + self.running.get() + self.work.waiting()
    }

    async fn transfer(self: &Rc<Self>) -> Transferred {
        let sending = pin!(self.send());
        let mut sender = Sender::new(sending);
        self.scheduler.run(&mut sender, self.with_slots(self.receive())).await;
        if self.arrival.is_leaving() {
            let sent = timeout(self.target.limits.drain, self.scheduler.finish(&mut sender)).await;
            if sent.is_ok() && self.can_leave() {
                return Transferred::Leaving;
            }
        }
        if self.is_draining() {
            if self.is_left_by_host() {
                // The host may be back with newer changes, or leave the device to another one, before those in flight have
                // completed.
                self.fence().await;
            }
            self.scheduler.run(&mut sender, self.with_slots(self.drain())).await;
        } else if self.core.borrow().closed().is_none() {
            self.core.borrow_mut().close();
            self.report_lost();
        }
        self.fence().await;
        if let Some((token, command)) = self.disconnect.take() {
            self.complete(token, &command, Ok(Reply::Done(0)));
        }
        let sent = self.with_slots(timeout(self.target.limits.drain, self.scheduler.finish(&mut sender))).await;
        self.detach();
        if sent.is_ok() {
            self.with_slots(self.linger_close()).await;
        }
        Transferred::All
    }

    async fn receive(self: &Rc<Self>) {
        if self.core.borrow().negotiated().is_some() {
            // It came from another core, with what was received there.
            self.process_batch(0).await;
        }
        while let Some(buffer) = self.receive_buffer().await {
            let (result, buffer) = self.stream.recv(buffer).await;
            let len = match result {
                Ok(0) | Err(_) => return,
                Ok(len) => len,
            };
            self.arrival.add(&buffer[..len]);
            self.core.borrow_mut().received(buffer, len);
            self.wait_for_ended().await;
            self.process_batch(len).await;
            if self.arrival.is_leaving() {
                return;
            }
        }
    }

    /// Returns a buffer to receive into, once the budget permits more in-capsule data; `None` if the connection is
    /// closed.
    async fn receive_buffer(&self) -> Option<Buffer> {
        poll_fn(|_| {
            let mut core = self.core.borrow_mut();
            let buffer = match core.may_pause() && self.share.is_over(self.slots.task()) {
                true => None,
                false => core.receive_buffer(),
            };
            // A response that is sent frees in-capsule data, after this was polled, and wakes nothing.
            let is_paused = buffer.is_none() && core.closed().is_none();
            self.is_paused.set(is_paused);
            if is_paused { Poll::Pending } else { Poll::Ready(buffer) }
        })
        .await
    }

    /// A separate function, so that the core is not borrowed while the event is handled.
    pub(crate) fn next_event(&self) -> Option<Event> {
        self.core.borrow_mut().next_event()
    }

    pub(crate) fn on_event(self: &Rc<Self>, event: Event) {
        match event {
            Event::Established(_) => {}
            // The command is not completed, so that the host repeats it on its next connection; an error would be
            // passed on to its users.
            Event::Command { .. } if self.is_draining() => {}
            Event::Command { token, command, data } => self.on_command(token, command, data),
            Event::DataReady { token, data } => self.on_data(token, data),
            Event::Closed(reason) => tracing::debug!(%reason, "connection closed"),
        }
    }

    async fn send(self: &Rc<Self>) {
        let mut slices = Vec::new();
        loop {
            let bytes = {
                let mut core = self.core.borrow_mut();
                let before = core.payload_bytes_sent();
                let bytes = core.transmit(&mut slices, TransmitLimit::default());
                self.sending_bytes.set(core.payload_bytes_sent() - before);
                bytes
            };
            self.update_checksum_stats();
            self.update_share();
            self.start_waiting();
            self.start_work();
            self.stop_receiving_if_drained();
            if bytes == 0 {
                if !self.scheduler.output().await {
                    return;
                }
                continue;
            }
            if self.is_paused.get() {
                self.scheduler.run_again();
            }
            if self.stream.send_all(slices.drain(..)).await.is_err() {
                self.abort();
                return;
            }
        }
    }

    /// Publishes the checksum counters.
    fn update_checksum_stats(&self) {
        if let Role::Io(context, _) = &*self.role.borrow() {
            context.traffic.checksums.update(&self.core.borrow().counters());
        }
    }

    /// The address of the peer, for log lines.
    pub(crate) fn peer_address(&self) -> String {
        self.stream.peer_addr().map_or_else(|_| "(gone)".to_owned(), |address| address.to_string())
    }

    /// Ends the connection at once.
    pub(crate) fn abort(&self) {
        self.is_aborted.set(true);
        self.core.borrow_mut().close();
        // Fails only if the peer has already closed.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.scheduler.wake();
    }

    /// Logs that a host has closed an I/O queue with commands in flight.
    fn report_lost(&self) {
        if let (Role::Io(context, queue), commands @ 1..) = (&*self.role.borrow(), self.busy()) {
            let controller = context.controller();
            let (subsystem, host) = (controller.subsystem.nqn.as_str(), host_name(controller.host.as_ref()));
            tracing::warn!(
                subsystem,
                host,
                from = self.peer_address(),
                queue,
                in_flight = commands,
                "I/O queue lost: its host closed it, and none of its commands in flight is executed after newer changes"
            );
        }
    }

    /// True if this is an I/O queue that its host ends: by Disconnect, or with its controller.
    fn is_left_by_host(&self) -> bool {
        match &*self.role.borrow() {
            Role::Io(context, _) => self.disconnect.get().is_some() || context.controller().is_shut_down(),
            Role::New | Role::Admin(_) => false,
        }
    }

    /// Makes newer changes wait for the commands of an I/O queue that are in flight when it ends, because its host may
    /// send them again.
    async fn fence(&self) {
        let role = self.role.borrow().clone();
        if let Role::Io(context, _) = role {
            context.fence().await;
        }
        drop(self.watched_end.take());
    }

    fn watch_end(&self, controller: &Arc<Controller>) {
        let owner = u64::from(controller.id);
        match self.target.ends.watch(&self.stream, &self.registration, owner, Arc::clone(controller)) {
            Ok(watched) => *self.watched_end.borrow_mut() = Some(Rc::new(watched)),
            Err(error) => {
                tracing::warn!(%error, from = self.peer_address(), "I/O queue closed: it cannot be watched for its end");
                self.abort();
            }
        }
    }

    /// Waits until queues of the host's other controllers that have ended are read completely, so that no unread
    /// command there is executed after those received here. The host would send such a command again, and then newer
    /// changes.
    async fn wait_for_ended(&self) {
        let Some(watched) = self.watched_end.borrow().clone() else { return };
        watched.wait_for_others(|own, other| own.is_of_host(other)).await;
    }

    /// Detaches the connection from its controller; the end of the admin queue ends the controller.
    fn detach(&self) {
        self.waiting.borrow_mut().clear();
        drop(self.work.take_waiting());
        self.fetching.borrow_mut().clear();
        self.pairs.clear();
        let role = self.role.replace(Role::New);
        match role {
            Role::New => {}
            Role::Io(context, queue) => context.remove_io_queue(queue, &self.registration.signal),
            Role::Admin(controller) => {
                let (subsystem, host) = (controller.subsystem.nqn.as_str(), host_name(controller.host.as_ref()));
                match controller.is_shut_down() {
                    true => tracing::info!(subsystem, host, "host disconnected"),
                    false => tracing::info!(subsystem, host, "host disconnected without shutting down its controller"),
                }
                controller.async_events.reset();
                self.target.remove_controller(controller.id);
                controller.end();
            }
        }
    }

    /// Waits for the peer to close, unless the connection drains.
    async fn linger_close(&self) {
        if self.is_draining() {
            // Fails only if the peer has already closed.
            let _ = self.stream.shutdown(Shutdown::Write);
            return;
        }
        lingering_close(&self.stream).await;
    }

    /// Executes what was received, and sends completions in batches, for reads in at least two. Completions without
    /// data are short, so those of writes, whose commands are longer, are sent together.
    pub(crate) async fn process_batch(self: &Rc<Self>, received_bytes: usize) {
        // Once for the batch: reading the clock for each command would be noticeable on a device that executes in place.
        self.batch_arrived.set(now());
        let mut batch = ReplyBatch::new(received_bytes, CAPSULE_BYTES);
        while let Some(event) = self.next_event() {
            if self.arrival.is_open() && self.leaves_before(&event) {
                return;
            }
            let before = self.read_bytes.get();
            self.on_event(event);
            if batch.add(self.read_bytes.get().saturating_sub(before)) {
                self.send_first().await;
            }
        }
        self.stream.set_busy_poll(batch.was_single());
        self.send_first().await;
    }

    /// Lets the sender run first.
    async fn send_first(self: &Rc<Self>) {
        self.stop_receiving_if_drained();
        self.scheduler.send_first().await;
    }
}

/// Returns the function that looks up how in-capsule data is divided into blocks, once the subsystem of the queue is
/// known.
fn layout_lookup(subsystem: &Arc<OnceLock<Arc<Subsystem>>>) -> LayoutOf {
    let subsystem = Arc::clone(subsystem);
    LayoutOf::new(move |command| subsystem.get()?.namespaces().get(&command.nsid.get())?.block_layout_of(command))
}

/// The name of a host in log lines.
pub(crate) fn host_name(host: Option<&Nqn>) -> &str {
    host.map_or("(without a name)", Nqn::as_str)
}
