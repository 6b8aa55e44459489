//! A connection: one task receives, carries out and sends, another (`control.rs`) watches the clock and listens to other cores.
//!
//! It ends when the peer goes, violates the protocol or is silent too long, when its controller goes, or when the target
//! stops. Commands that are being carried out then go on, and unless the target stops their answers are dropped.
//!
//! Shape: a turn of the task carries out what was received together, and only then asks for more, so that answers leave
//! first. It answers in parts, each sent at once: if a deep queue were answered with one send, target and host would take turns
//! rather than work at the same time. Smaller parts cost more system calls than they gain.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::net::Shutdown;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use sealblock_protocols_nvme_tcp::target::{Event, Target as Core, Token};
use sealblock_protocols_nvme_tcp::{Payload, TargetConfig, TransmitLimit};
use sealblock_runtime_memory::{Buffer, Pool};
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::{Notify, Share, now, pool, spawn, timeout};

use crate::commands::fused::FusedPairs;
use crate::connect::host_name;
use crate::controller::Controller;
use crate::dispatch::{PreparedCommand, WaitingCommand};
use crate::limits::IN_CAPSULE_BYTES;
use crate::member::QueueContext;
use crate::parts;
use crate::registry::{Permit, TargetState};
use crate::signal::ControlSignal;
use crate::slots::CommandSlots;
use crate::subsystem::Subsystem;
use crate::sums::layout_lookup;

/// How long a peer may take to close after it was told that nothing more comes.
const LINGERING_CLOSE: Duration = Duration::from_secs(1);
/// What is thrown away at once meanwhile.
const LINGERING_CLOSE_BYTES: usize = 4096;
/// What is received at once: the commands of a deep queue, with data in their capsules.
const STAGING_BYTES: usize = 256 << 10;

/// What a connection is.
#[derive(Clone)]
pub(crate) enum Role {
    /// Nothing yet: Connect is to come.
    New,
    /// The admin queue of a controller.
    Admin(Arc<Controller>),
    /// An I/O queue of a controller, and its identifier.
    Io(Rc<QueueContext>, u16),
}

/// How a command ends if it does not fail.
pub(crate) enum Reply {
    /// With this result.
    Done(u64),
    /// With data for the host, and this result.
    Data(Payload, u64),
}

pub(crate) struct Connection {
    pub(crate) target: Arc<TargetState>,
    /// What other cores tell this connection.
    pub(crate) signal: Arc<ControlSignal>,
    pub(crate) core: RefCell<Core>,
    /// What an I/O queue belongs to, for whoever cuts data in capsules into blocks.
    subsystem: Arc<OnceLock<Arc<Subsystem>>>,
    pub(crate) stream: Stream,
    pub(crate) role: RefCell<Role>,
    /// Something is to be sent, or sending is to end.
    pub(crate) output: Notify,
    /// Commands whose data is being fetched, by the place of their token.
    pub(crate) fetching: RefCell<Vec<Option<(Token, PreparedCommand)>>>,
    /// Fused pairs that are not whole yet.
    pub(crate) pairs: FusedPairs,
    /// Commands that wait for room.
    pub(crate) waiting: RefCell<VecDeque<WaitingCommand>>,
    /// Bytes of reads that were started, failed ones taken off again.
    pub(crate) read_bytes: Cell<u64>,
    /// Bytes of reads that the socket is being given, and holds on to until it has taken them all.
    pub(crate) sending_bytes: Cell<u64>,
    /// What this connection holds of the bytes that all may have in flight.
    pub(crate) share: Share,
    /// I/O commands being carried out.
    pub(crate) slots: CommandSlots,
    /// Fused pairs being carried out.
    pub(crate) running_pairs: Cell<usize>,
    pub(crate) pool: Pool,
    /// Submission queue head and entries; `None` with flow control off or before Connect.
    pub(crate) sq_head: Cell<Option<(u32, u32)>>,
    is_finishing: Cell<bool>,
    /// Set when the connection is to end: until when commands in flight may go on.
    pub(crate) drain_deadline: Cell<Option<Instant>>,
    /// Nothing more is received.
    pub(crate) is_receive_stopped: Cell<bool>,
    /// The connection was cut off, and the clock is watched no more.
    pub(crate) is_aborted: Cell<bool>,
    pub(crate) accepted: Instant,
    /// The connection's own task is running, so it need not be woken.
    is_polling: Cell<bool>,
    /// What was received is to be answered before more is.
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
        parts::configure_socket(&stream, &target.limits);
        let max_commands = usize::from(config.max_commands.get());
        Rc::new(Connection {
            target: Arc::clone(target),
            signal: signal,
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

    /// Connect succeeded.
    pub(crate) fn set_role(self: &Rc<Self>, role: Role, entries: u32, no_flow_control: bool) {
        // The Connect command itself has left the queue.
        self.sq_head.set((!no_flow_control).then_some((1 % entries, entries)));
        self.core.borrow_mut().set_success_flag(no_flow_control);
        if matches!(role, Role::Admin(_)) {
            self.permit.exclude_from_load();
        }
        if let Role::Io(context, _) = &role {
            // A connection is an I/O queue once.
            let _ = self.subsystem.set(Arc::clone(&context.subsystem));
        }
        *self.role.borrow_mut() = role;
        self.rearm_timer();
    }

    /// Serves the connection until it is over and what its devices had begun has ended.
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

    /// I/O commands being carried out; a pair counts once. Each end of one is a turn of the connection's task.
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

    /// There is something to send, or to look at.
    pub(crate) fn wake(&self) {
        match self.is_polling.get() {
            true => self.output.note(),
            false => self.output.ring(),
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

    /// A buffer to receive into, once there may be more data in capsules; `None` when the connection is closed.
    async fn receive_buffer(&self) -> Option<Buffer> {
        poll_fn(|_| {
            let mut core = self.core.borrow_mut();
            if self.share.is_over() && core.may_pause() {
                return Poll::Pending;
            }
            match core.receive_buffer() {
                // Room comes when an answer is sent, that is, in a turn of this task.
                None if core.closed().is_none() => Poll::Pending,
                buffer => Poll::Ready(buffer),
            }
        })
        .await
    }

    /// Apart, so that the core is not borrowed while the event is handled.
    pub(crate) fn next_event(&self) -> Option<Event> {
        self.core.borrow_mut().next_event()
    }

    pub(crate) fn on_event(self: &Rc<Self>, event: Event) {
        match event {
            Event::Established(_) => {}
            // Not answered: the host asks again where it connects next, while a refusal would reach its users.
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

    /// Tells others what was summed so far.
    fn update_checksum_stats(&self) {
        if let Role::Io(context, _) = &*self.role.borrow() {
            context.traffic.checksums.update(&self.core.borrow().counters());
        }
    }

    /// Where the peer is, for a line for the operator.
    pub(crate) fn peer_address(&self) -> String {
        self.stream.peer_addr().map_or_else(|_| "(gone)".to_owned(), |address| address.to_string())
    }

    /// Ends the connection at once.
    pub(crate) fn abort(&self) {
        self.is_aborted.set(true);
        self.core.borrow_mut().close();
        // The peer may be gone already, and then there is nothing to shut down.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.wake();
    }

    /// Takes the connection off its controller; the admin queue takes its controller along.
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
                tracing::info!(subsystem, host, "a host has left");
                controller.async_events.reset();
                self.target.remove_controller(controller.id);
                controller.end();
            }
        }
    }

    /// Waits for the peer to close, so that it can read the last bytes: a socket closed with unread bytes resets.
    async fn linger_close(&self) {
        if self.is_draining() {
            // The peer may be gone already, and then there is nothing to end.
            let _ = self.stream.shutdown(Shutdown::Write);
            return;
        }
        // A peer that does not close in time is reset.
        let _ = self.stream.busy_poll(LINGERING_CLOSE, LINGERING_CLOSE_BYTES).await;
    }
}

/// The sending half of a connection's flow.
struct Sender<'a, F> {
    future: Pin<&'a mut F>,
    is_over: bool,
}

impl<F: Future<Output = ()>> Sender<'_, F> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.is_over = self.is_over || self.future.as_mut().poll(cx).is_ready();
        if self.is_over { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Goes on sending until `other` is over.
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
