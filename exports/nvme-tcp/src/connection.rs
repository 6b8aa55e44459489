//! A connection: one task receives, one sends, one (`control.rs`) watches the clock and listens to other cores.
//!
//! It ends when the peer goes, violates the protocol or is silent too long, when its controller goes, or when the target
//! stops. Commands that are being carried out then go on, and unless the target stops their answers are dropped.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::net::Shutdown;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sealblock_protocols_nvme_tcp::target::{Event, Target as Core, Token};
use sealblock_protocols_nvme_tcp::{Payload, TargetConfig, TransmitLimit};
use sealblock_runtime_memory::Buffer;
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::{now, pool, spawn, timeout};

use crate::bell::Bell;
use crate::commands::fused::Pairs;
use crate::controller::Controller;
use crate::limits::IN_CAPSULE_BYTES;
use crate::line::Line;
use crate::member::Member;
use crate::queue::{Task, Waiting};
use crate::registry::{Permit, Shared};

/// How long a peer may take to close after it was told that nothing more comes.
const LINGER: Duration = Duration::from_secs(1);

/// What a connection is.
#[derive(Clone)]
pub(crate) enum Role {
    /// Nothing yet: Connect is to come.
    New,
    /// The admin queue of a controller.
    Admin(Arc<Controller>),
    /// An I/O queue of a controller, and its identifier.
    Io(Rc<Member>, u16),
}

/// How a command ends if it does not fail.
pub(crate) enum Reply {
    /// With this result.
    Done(u64),
    /// With data for the host, and this result.
    Data(Payload, u64),
}

pub(crate) struct Connection {
    pub(crate) target: Arc<Shared>,
    /// What other cores tell this connection.
    pub(crate) line: Arc<Line>,
    pub(crate) core: RefCell<Core>,
    pub(crate) stream: Stream,
    pub(crate) role: RefCell<Role>,
    /// Something is to be sent, or sending is to end.
    pub(crate) output: Bell,
    /// Commands whose data is being fetched.
    pub(crate) fetching: RefCell<HashMap<Token, Task>>,
    /// Fused pairs that are not whole yet.
    pub(crate) pairs: Pairs,
    /// Commands that wait for room.
    pub(crate) waiting: RefCell<VecDeque<Waiting>>,
    /// Bytes of reads that were started, failed ones taken off again.
    pub(crate) read_bytes: Cell<u64>,
    /// I/O commands being carried out.
    pub(crate) running: Cell<usize>,
    /// Rung when none is left.
    pub(crate) idle: Bell,
    /// Submission queue head and entries; `None` with flow control off or before Connect.
    pub(crate) head: Cell<Option<(u32, u32)>>,
    finishing: Cell<bool>,
    /// Set when the connection is to end: until when commands in flight may go on.
    pub(crate) drain_until: Cell<Option<Instant>>,
    /// Nothing more is received.
    pub(crate) deaf: Cell<bool>,
    /// The connection was cut off, and the clock is watched no more.
    pub(crate) killed: Cell<bool>,
    pub(crate) accepted: Instant,
    permit: Permit,
}

impl Connection {
    pub(crate) fn new(target: &Arc<Shared>, stream: Stream, line: Arc<Line>, permit: Permit) -> Rc<Connection> {
        let mut config = TargetConfig::new(pool());
        config.max_commands = target.limits.commands.try_into().unwrap_or(config.max_commands);
        config.max_bytes_in_flight = target.limits.bytes_in_flight;
        config.max_in_capsule_bytes = IN_CAPSULE_BYTES;
        Rc::new(Connection {
            target: Arc::clone(target),
            line,
            core: RefCell::new(Core::new(config)),
            stream,
            role: RefCell::new(Role::New),
            output: Bell::default(),
            fetching: RefCell::default(),
            pairs: Pairs::default(),
            waiting: RefCell::default(),
            read_bytes: Cell::new(0),
            running: Cell::new(0),
            idle: Bell::default(),
            head: Cell::new(None),
            finishing: Cell::new(false),
            drain_until: Cell::new(None),
            deaf: Cell::new(false),
            killed: Cell::new(false),
            accepted: now(),
            permit,
        })
    }

    /// Connect succeeded.
    pub(crate) fn joined(self: &Rc<Self>, role: Role, entries: u32, no_flow_control: bool) {
        // The Connect command itself has left the queue.
        self.head.set((!no_flow_control).then_some((1 % entries, entries)));
        self.core.borrow_mut().set_success_flag(no_flow_control);
        if matches!(role, Role::Admin(_)) {
            self.permit.lighten();
        }
        *self.role.borrow_mut() = role;
        self.watch();
    }

    /// Serves the connection until it is over.
    pub(crate) async fn run(self: Rc<Self>) {
        let sender = spawn(Rc::clone(&self).send());
        let control = spawn(Rc::clone(&self).control());
        self.receive().await;
        if self.is_draining() {
            self.drain().await;
        } else if self.core.borrow().closed().is_none() {
            self.core.borrow_mut().close();
        }
        self.finishing.set(true);
        self.output.ring();
        let mut sender = sender;
        if timeout(self.target.limits.drain, &mut sender).await.is_err() {
            sender.abort();
        }
        self.leave();
        self.linger().await;
        control.abort();
    }

    async fn receive(self: &Rc<Self>) {
        loop {
            let lent = self.core.borrow_mut().receive_buffer();
            let Some(buffer) = lent else { return };
            let (result, buffer) = self.stream.recv(buffer).await;
            let len = match result {
                Ok(0) | Err(_) => return,
                Ok(len) => len,
            };
            self.core.borrow_mut().received(buffer, len);
            while let Some(event) = self.next_event() {
                self.on_event(event);
            }
            self.output.ring();
            self.settle();
        }
    }

    /// Apart, so that the core is not borrowed while the event is handled.
    fn next_event(&self) -> Option<Event> {
        self.core.borrow_mut().next_event()
    }

    fn on_event(self: &Rc<Self>, event: Event) {
        match event {
            Event::Established(_) => {}
            // Not answered: the host asks again where it connects next, while a refusal would reach its users.
            Event::Command { .. } if self.is_draining() => {}
            Event::Command { token, command, data } => self.on_command(token, command, data),
            Event::DataReady { token, data } => self.on_data(token, data),
            Event::Closed(reason) => tracing::debug!(%reason, "connection closed"),
        }
    }

    async fn send(self: Rc<Self>) {
        let mut slices = Vec::new();
        loop {
            let bytes = self.core.borrow_mut().transmit(&mut slices, TransmitLimit::default());
            if bytes == 0 {
                if self.finishing.get() {
                    return;
                }
                self.output.wait().await;
                continue;
            }
            if self.stream.send_all(slices.drain(..)).await.is_err() {
                self.kill();
                return;
            }
            self.admit_waiting();
            self.settle();
        }
    }

    /// Ends the connection at once.
    pub(crate) fn kill(&self) {
        self.killed.set(true);
        self.core.borrow_mut().close();
        // The peer may be gone already, and then there is nothing to shut down.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Takes the connection off its controller; the admin queue takes its controller along.
    fn leave(&self) {
        self.waiting.borrow_mut().clear();
        self.fetching.borrow_mut().clear();
        self.pairs.clear();
        let role = self.role.replace(Role::New);
        match role {
            Role::New => {}
            Role::Io(member, queue) => member.leave(queue, &self.line),
            Role::Admin(controller) => {
                controller.notices.reset();
                self.target.remove_controller(controller.id);
                controller.end();
            }
        }
    }

    /// Waits for the peer to close, so that it can read the last bytes: a socket closed with unread bytes resets.
    async fn linger(&self) {
        if self.stream.shutdown(Shutdown::Write).is_err() || self.is_draining() {
            return;
        }
        let drained = async {
            let mut buffer = Buffer::zeroed(4096);
            for _ in 0..256 {
                let result;
                (result, buffer) = self.stream.recv(buffer).await;
                if !matches!(result, Ok(1..)) {
                    break;
                }
            }
        };
        // A peer that does not close in time is reset.
        let _ = timeout(LINGER, drained).await;
    }
}
