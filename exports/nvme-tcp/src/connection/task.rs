//! A connection: one task receives, executes and sends; another (`shutdown.rs`) handles its timer and the signals of
//! other cores.
//!
//! It ends when the peer closes it, violates the protocol or is silent too long, when its controller ends, or when the
//! target stops. Commands in flight complete, and their completions are dropped unless the target drains.
//!
//! Shape: one poll of the task executes what was received together before it receives more, so that completions leave
//! first. It sends them in batches: with one send for a deep queue, target and host would take turns instead of working
//! at the same time. Smaller batches cost more system calls than they save.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::net::Shutdown;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use sealblock_protocols_nvme::Command;
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_protocols_nvme_tcp::config::LayoutOf;
use sealblock_protocols_nvme_tcp::target::{Event, Target as Core, Token};
use sealblock_protocols_nvme_tcp::{TargetConfig, TransmitLimit};
use sealblock_runtime_memory::{Buffer, Pool};
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::{Notify, Share, now, pool, spawn, timeout};

use crate::command::fused::FusedPairs;
use crate::command::io::IoRequest;
use crate::command::queue_context::QueueContext;
use crate::command::slots::CommandSlots;
use crate::model::controller::Controller;
use crate::model::limits::{IN_CAPSULE_BYTES, Limits};
use crate::model::registry::{Permit, TargetState};
use crate::model::subsystem::Subsystem;
use crate::model::sync::ControlSignal;

/// How long a peer may take to close after the target has sent its last bytes.
const LINGERING_CLOSE: Duration = Duration::from_secs(1);
/// Bytes that are received and discarded at once meanwhile.
const LINGERING_CLOSE_BYTES: usize = 4096;
/// Bytes that are received at once: the commands of a deep queue, with data in their capsules.
const STAGING_BYTES: usize = 256 << 10;

/// What a connection is.
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
}

/// A command that waits for bytes in flight.
pub(crate) enum WaitingCommand {
    /// Its data is to be fetched.
    Fetch(Token, PreparedCommand, usize),
    /// It reads.
    Read(Token, PreparedCommand),
}

impl WaitingCommand {
    pub(crate) fn token(&self) -> Token {
        match self {
            WaitingCommand::Fetch(token, ..) | WaitingCommand::Read(token, _) => *token,
        }
    }
}

pub(crate) struct Connection {
    pub(crate) target: Arc<TargetState>,
    /// The signal from other cores.
    pub(crate) signal: Arc<ControlSignal>,
    pub(crate) core: RefCell<Core>,
    /// The subsystem of an I/O queue, for the lookup that divides in-capsule data into blocks.
    subsystem: Arc<OnceLock<Arc<Subsystem>>>,
    pub(crate) stream: Stream,
    pub(crate) role: RefCell<Role>,
    /// Notified when there is something to send, or sending must end.
    pub(crate) output: Notify,
    /// Commands whose data is being fetched, by the index of their token.
    pub(crate) fetching: RefCell<Vec<Option<(Token, PreparedCommand)>>>,
    /// Fused pairs that are not complete yet.
    pub(crate) pairs: FusedPairs,
    /// Commands that wait for their share of bytes in flight.
    pub(crate) waiting: RefCell<VecDeque<WaitingCommand>>,
    /// Bytes of all reads that were started, without failed ones.
    pub(crate) read_bytes: Cell<u64>,
    /// Bytes of reads in the current send, which the socket has not taken completely.
    pub(crate) sending_bytes: Cell<u64>,
    /// This connection's share of the bytes in flight over all connections.
    pub(crate) share: Share,
    /// I/O commands in flight.
    pub(crate) slots: CommandSlots,
    /// Fused pairs in flight.
    pub(crate) running_pairs: Cell<usize>,
    pub(crate) pool: Pool,
    /// Submission queue head and entries; `None` with flow control off or before Connect.
    pub(crate) sq_head: Cell<Option<(u32, u32)>>,
    is_finishing: Cell<bool>,
    /// Set when the connection drains: the time limit of commands in flight.
    pub(crate) drain_deadline: Cell<Option<Instant>>,
    /// Nothing more is received.
    pub(crate) is_receive_stopped: Cell<bool>,
    /// The connection was aborted, and has no timer.
    pub(crate) is_aborted: Cell<bool>,
    pub(crate) accepted: Instant,
    /// True while the connection's task is polled, so that it need not be woken.
    is_polling: Cell<bool>,
    /// Completions are sent before more is received.
    pub(crate) sends_first: Cell<bool>,
    permit: Permit,
}

impl Connection {
    pub(crate) fn new(
        target: &Arc<TargetState>,
        stream: Stream,
        signal: Arc<ControlSignal>,
        permit: Permit,
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
        configure_socket(&stream, &target.limits);
        let max_commands = usize::from(config.max_commands.get());
        Rc::new(Connection {
            target: Arc::clone(target),
            signal,
            core: RefCell::new(Core::new(config)),
            subsystem,
            stream,
            role: RefCell::new(Role::New),
            output: Notify::default(),
            fetching: RefCell::default(),
            pairs: FusedPairs::default(),
            waiting: RefCell::default(),
            read_bytes: Cell::new(0),
            sending_bytes: Cell::new(0),
            share: Share::new(&target.budget),
            slots: CommandSlots::new(max_commands),
            running_pairs: Cell::new(0),
            pool,
            sq_head: Cell::new(None),
            is_finishing: Cell::new(false),
            drain_deadline: Cell::new(None),
            is_receive_stopped: Cell::new(false),
            is_aborted: Cell::new(false),
            accepted: now(),
            is_polling: Cell::new(false),
            sends_first: Cell::new(false),
            permit,
        })
    }

    /// Sets the role of the connection after a successful Connect.
    pub(crate) fn set_role(self: &Rc<Self>, role: Role, entries: u32, no_flow_control: bool) {
        // The Connect command itself has left the queue.
        self.sq_head.set((!no_flow_control).then_some((1 % entries, entries)));
        self.core.borrow_mut().set_success_flag(no_flow_control);
        if matches!(role, Role::Admin(_)) {
            self.permit.exclude_from_load();
        }
        if let Role::Io(context, _) = &role {
            // A connection gets a role once.
            let _ = self.subsystem.set(Arc::clone(&context.subsystem));
        }
        *self.role.borrow_mut() = role;
        self.rearm_timer();
    }

    /// Serves the connection until it has ended and its commands at devices have completed.
    pub(crate) async fn run(self: Rc<Self>) {
        let control = spawn(Rc::clone(&self).control());
        let mut flow = pin!(self.transfer());
        let mut is_over = false;
        poll_fn(|cx| {
            self.slots.set_task(cx.waker());
            self.is_polling.set(true);
            while let Some(result) = self.slots.next() {
                result.into_iter().for_each(|result| self.on_result(result));
            }
            is_over = is_over || flow.as_mut().poll(cx).is_ready();
            self.is_polling.set(false);
            if is_over && self.busy() == 0 { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        control.abort();
    }

    /// Number of I/O commands in flight; a pair counts once. The connection's task polls each completion.
    pub(crate) fn busy(&self) -> usize {
        self.slots.busy() + self.running_pairs.get()
    }

    async fn transfer(self: &Rc<Self>) {
        let mut sender = Sender { future: pin!(self.send()), is_over: false };
        let mut receiver = pin!(self.receive());
        poll_fn(|cx| {
            loop {
                let received = receiver.as_mut().poll(cx);
                let _ = sender.poll(cx);
                if received.is_ready() || !self.sends_first.take() {
                    return received;
                }
            }
        })
        .await;
        if self.is_draining() {
            sender.run_with(self.drain()).await;
        } else if self.core.borrow().closed().is_none() {
            self.core.borrow_mut().close();
        }
        self.is_finishing.set(true);
        self.wake();
        let sent = timeout(self.target.limits.drain, poll_fn(|cx| sender.poll(cx))).await;
        self.detach();
        if sent.is_ok() {
            self.linger_close().await;
        }
    }

    /// Has the connection's task send, or check its state.
    pub(crate) fn wake(&self) {
        match self.is_polling.get() {
            true => self.output.notify_self(),
            false => self.output.notify(),
        }
    }

    async fn receive(self: &Rc<Self>) {
        while let Some(buffer) = self.receive_buffer().await {
            let (result, buffer) = self.stream.recv(buffer).await;
            let len = match result {
                Ok(0) | Err(_) => return,
                Ok(len) => len,
            };
            self.core.borrow_mut().received(buffer, len);
            self.process_batch(len).await;
        }
    }

    /// Returns a buffer to receive into, once the budget permits more in-capsule data; `None` when the connection is
    /// closed.
    async fn receive_buffer(&self) -> Option<Buffer> {
        poll_fn(|_| {
            let mut core = self.core.borrow_mut();
            if self.share.is_over() && core.may_pause() {
                return Poll::Pending;
            }
            match core.receive_buffer() {
                // A completion frees a buffer, and this task sends it.
                None if core.closed().is_none() => Poll::Pending,
                buffer => Poll::Ready(buffer),
            }
        })
        .await
    }

    /// A function of its own, so that the core is not borrowed while the event is handled.
    pub(crate) fn next_event(&self) -> Option<Event> {
        self.core.borrow_mut().next_event()
    }

    pub(crate) fn on_event(self: &Rc<Self>, event: Event) {
        match event {
            Event::Established(_) => {}
            // Not completed: the host repeats it on its next connection, while an error would reach its users.
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
            self.stop_receiving_if_drained();
            if bytes == 0 {
                if self.is_finishing.get() {
                    return;
                }
                self.output.wait().await;
                continue;
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
        self.wake();
    }

    /// Detaches the connection from its controller; the end of the admin queue ends the controller.
    fn detach(&self) {
        self.waiting.borrow_mut().clear();
        self.fetching.borrow_mut().clear();
        self.pairs.clear();
        let role = self.role.replace(Role::New);
        match role {
            Role::New => {}
            Role::Io(context, queue) => context.remove_io_queue(queue, &self.signal),
            Role::Admin(controller) => {
                let (subsystem, host) = (controller.subsystem.nqn.as_str(), host_name(controller.host.as_ref()));
                tracing::info!(subsystem, host, "host disconnected");
                controller.async_events.reset();
                self.target.remove_controller(controller.id);
                controller.end();
            }
        }
    }

    /// Waits for the peer to close, so that it can read the last bytes: a socket that is closed with unread bytes sends
    /// RST, which discards them.
    async fn linger_close(&self) {
        if self.is_draining() {
            // Fails only if the peer has already closed.
            let _ = self.stream.shutdown(Shutdown::Write);
            return;
        }
        // A peer that does not close in time is reset.
        let _ = self.stream.lingering_close(LINGERING_CLOSE, LINGERING_CLOSE_BYTES).await;
    }
}

/// The sending half of a connection.
struct Sender<'a, F> {
    future: Pin<&'a mut F>,
    is_over: bool,
}

impl<F: Future<Output = ()>> Sender<'_, F> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.is_over = self.is_over || self.future.as_mut().poll(cx).is_ready();
        if self.is_over { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Sends until `other` completes.
    async fn run_with(&mut self, other: impl Future<Output = ()>) {
        let mut other = pin!(other);
        poll_fn(|cx| {
            let polled = other.as_mut().poll(cx);
            let _ = self.poll(cx);
            polled
        })
        .await
    }
}

/// The minimum number of commands, and the maximum of bytes that they read, before their completions are sent.
const BATCH_COMMANDS: usize = 16;
const BATCH_BYTES: u64 = 256 << 10;
/// Bytes of a received command without data.
const CAPSULE_BYTES: usize = 72;

/// Socket buffer size each way, in bytes: the data of a deep queue of reads, so that a send does not stop half way and
/// wait for the peer. Automatic tuning grows socket buffers only after they were too small.
const SOCKET_BYTES: usize = 2 << 20;

/// Configures a socket for sends in batches, and for a host that receives nothing.
fn configure_socket(stream: &Stream, limits: &Limits) {
    // Where the system refuses, its default buffers and timeouts apply, at the cost of more system calls.
    let _ = stream.set_user_timeout(limits.receive);
    let _ = stream.set_send_buffer_bytes(SOCKET_BYTES);
    let _ = stream.set_recv_buffer_bytes(SOCKET_BYTES);
    stream.set_prompt(true);
}

impl Connection {
    /// Executes what was received, and sends completions in batches, at least two for reads. Completions without data
    /// are short, so that those of writes, whose commands are longer, are sent together.
    pub(crate) async fn process_batch(self: &Rc<Self>, received_bytes: usize) {
        let part = (received_bytes / CAPSULE_BYTES / 2).max(BATCH_COMMANDS);
        let (mut commands, mut from_bytes) = (0, self.read_bytes.get());
        let mut events = 0;
        while let Some(event) = self.next_event() {
            self.on_event(event);
            commands += 1;
            events += 1;
            if commands >= part || self.read_bytes.get().saturating_sub(from_bytes) >= BATCH_BYTES {
                self.send_first().await;
                (commands, from_bytes) = (0, self.read_bytes.get());
            }
        }
        // A host with queue depth 1 sends its next command as soon as it has this completion.
        self.stream.set_busy_poll(events == 1);
        self.send_first().await;
    }

    /// Lets the sender run first.
    async fn send_first(self: &Rc<Self>) {
        self.output.notify_self();
        self.stop_receiving_if_drained();
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
}

/// Returns the function that looks up how in-capsule data divides into blocks, once the subsystem of the queue is set.
fn layout_lookup(subsystem: &Arc<OnceLock<Arc<Subsystem>>>) -> LayoutOf {
    let subsystem = Arc::clone(subsystem);
    LayoutOf::new(move |command| subsystem.get()?.namespaces().get(&command.nsid.get())?.block_layout_of(command))
}

/// The name of a host in log lines.
pub(crate) fn host_name(host: Option<&Nqn>) -> &str {
    host.map_or("(without a name)", Nqn::as_str)
}
