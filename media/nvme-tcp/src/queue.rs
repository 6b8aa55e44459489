//! One connection, which is one queue: commands in, completions out.
//!
//! Two tasks move bytes, one each way. A command is a place in a table and a waker: no task and no box for each. Commands
//! that are submitted in the same turn of the reactor leave in one gather send, and one receive may end many of them.
//!
//! Invariants: a command ends once, with its completion or with [`Lost`]; commands that find the queue full are submitted
//! in the order in which they came; a future that is dropped leaves its command to the target, whose answer is thrown
//! away; no borrow is held while a waker is called; what the system has not sent yet of commands that are lost is never sent.

use std::cell::{Cell, RefCell};
use std::net::{Shutdown, SocketAddr};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use sealblock_protocols_nvme::Command;
use sealblock_protocols_nvme_tcp::host::{Event, HostData};
use sealblock_protocols_nvme_tcp::{Closed, Host, HostConfig, Negotiated, TransmitLimit, target};
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::{spawn, timeout};

use crate::Counters;
use crate::error::ConnectionLost;
use crate::in_flight::{CommandProgress, CommandResult, FifoWaiters, InFlightCommands};

/// How long the last bytes of a connection that is over may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// A connection.
pub(crate) struct Queue {
    /// QID, 0 for the admin queue.
    pub(crate) id: u16,
    stream: Stream,
    host: RefCell<Host>,
    in_flight: RefCell<InFlightCommands>,
    waiters: RefCell<FifoWaiters>,
    /// Why the connection is over.
    end_reason: RefCell<Option<Rc<str>>>,
    /// Whether bytes are being sent at this moment.
    is_sending: Cell<bool>,
    /// The sender, while it has nothing to do.
    idle_sender: RefCell<Option<Waker>>,
    /// Who waits for the connection to be set up.
    opener: RefCell<Option<Waker>>,
    completed: Cell<u64>,
    /// What had gone through when the queue was ready for requests.
    base: Cell<(u64, target::Counters)>,
}

impl Queue {
    /// Connects and agrees on digests; gives the queue and what was agreed.
    pub(crate) async fn open(address: SocketAddr, id: u16, config: HostConfig) -> std::io::Result<Rc<Queue>> {
        let stream = Stream::connect(address).await?;
        stream.set_nodelay(true)?;
        let places = usize::from(config.max_commands.get());
        let queue = Rc::new(Queue {
            id,
            stream,
            host: RefCell::new(Host::new(config)),
            in_flight: RefCell::new(InFlightCommands::new(places)),
            waiters: RefCell::default(),
            end_reason: RefCell::default(),
            is_sending: Cell::new(false),
            idle_sender: RefCell::default(),
            opener: RefCell::default(),
            completed: Cell::new(0),
            base: Cell::default(),
        });
        spawn(receive(Rc::clone(&queue)));
        spawn(send(Rc::clone(&queue)));
        Ok(queue)
    }

    /// What was agreed on, as soon as it was.
    pub(crate) async fn established(&self) -> Result<Negotiated, ConnectionLost> {
        std::future::poll_fn(|cx| {
            if let Some(negotiated) = self.host.borrow().negotiated() {
                return Poll::Ready(Ok(negotiated));
            }
            if let Some(lost) = self.lost() {
                return Poll::Ready(Err(lost));
            }
            let previous = self.opener.replace(Some(cx.waker().clone()));
            drop(previous);
            Poll::Pending
        })
        .await
    }

    /// Carries a command out, as soon as the queue has room for it.
    pub(crate) fn execute(&self, command: Command, data: HostData) -> CommandFuture<'_> {
        CommandFuture::new(self, command, data, false)
    }

    /// The same for a command that may take for ever, as Asynchronous Event Request does.
    pub(crate) fn execute_without_timeout(&self, command: Command, data: HostData) -> CommandFuture<'_> {
        CommandFuture::new(self, command, data, true)
    }

    /// Commands in flight and in line.
    pub(crate) fn load(&self) -> usize {
        self.host.borrow().commands_in_flight() + self.waiters.borrow().len()
    }

    /// Why the connection is over, if it is.
    pub(crate) fn lost(&self) -> Option<ConnectionLost> {
        self.end_reason.borrow().clone().map(ConnectionLost)
    }

    /// Ends the connection: all commands are lost.
    pub(crate) fn end(&self, reason: &str) {
        {
            let mut ended = self.end_reason.borrow_mut();
            if ended.is_some() {
                return;
            }
            *ended = Some(reason.into());
        }
        // An admin queue always has something in flight, which changes no block.
        if self.id != 0 && self.host.borrow().commands_in_flight() > 0 {
            // They are repeated elsewhere. Left to itself the system would deliver them minutes later, over newer ones.
            // Where it cannot be reset at once it is as soon as its tasks let go.
            let _ = self.stream.reset();
        }
        self.host.borrow_mut().close();
        let wakers = self.in_flight.borrow_mut().lose_all();
        wakers.into_iter().for_each(Waker::wake);
        let wakers = self.waiters.borrow_mut().wakers();
        wakers.into_iter().for_each(Waker::wake);
        if let Some(waker) = self.opener.take() {
            waker.wake();
        }
        if self.is_sending.get() {
            // A peer that does not read would hold the sender for ever.
            let _ = self.stream.shutdown(Shutdown::Both);
        }
        self.wake_sender();
    }

    /// Counts a tick, and tells whether a command has been in flight for more than `most` of them.
    pub(crate) fn advance_tick(&self, max_ticks: u32) -> bool {
        self.in_flight.borrow_mut().advance_tick(max_ticks)
    }

    /// From here on what goes through is counted.
    pub(crate) fn start_counting(&self) {
        self.base.set((self.completed.get(), self.host.borrow().counters()));
    }

    /// Adds what went through since then.
    pub(crate) fn add_to(&self, all: &mut Counters) {
        let ((completed, base), now) = (self.base.get(), self.host.borrow().counters());
        all.commands += self.completed.get() - completed;
        all.received_bytes += now.received.payload_bytes - base.received.payload_bytes;
        all.received_bytes_checksummed +=
            now.received.payload_bytes_checksummed - base.received.payload_bytes_checksummed;
        all.sent_bytes += now.payload_bytes_sent - base.payload_bytes_sent;
        all.sent_bytes_checksummed += now.payload_bytes_sent_checksummed - base.payload_bytes_sent_checksummed;
    }

    /// Wakes the sender.
    fn wake_sender(&self) {
        let sender = self.idle_sender.take();
        if let Some(sender) = sender {
            sender.wake();
        }
    }

    /// Submits the command if it is its turn: the table's entry, or the command back.
    pub(crate) fn try_submit(
        &self,
        command: Command,
        data: HostData,
        has_no_timeout: bool,
    ) -> Result<usize, ConnectionLost> {
        let place = {
            let mut host = self.host.borrow_mut();
            match host.submit(command, data) {
                Ok(cid) => host.place(cid),
                Err(error) => return Err(self.lost().unwrap_or_else(|| ConnectionLost(error.to_string().into()))),
            }
        };
        let entry = self.in_flight.borrow_mut().insert(place, has_no_timeout);
        self.wake_sender();
        Ok(entry)
    }

    /// Whether one more command may be submitted now.
    pub(crate) fn has_room(&self) -> bool {
        self.host.borrow().can_submit()
    }

    /// Commands that wait for room.
    pub(crate) fn waiters(&self) -> &RefCell<FifoWaiters> {
        &self.waiters
    }

    /// Commands in flight.
    pub(crate) fn in_flight(&self) -> &RefCell<InFlightCommands> {
        &self.in_flight
    }

    /// Calls the first in line if there is room for it.
    pub(crate) fn wake_next(&self) {
        if self.has_room() {
            let waker = self.waiters.borrow().first_waker();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    /// Hands out what has happened.
    fn dispatch(&self) {
        loop {
            let event = self.host.borrow_mut().next_event();
            match event {
                None => return,
                Some(Event::Established(_)) => {
                    if let Some(waker) = self.opener.take() {
                        waker.wake();
                    }
                }
                Some(Event::Completed { cid, completion, data }) => {
                    self.completed.set(self.completed.get() + 1);
                    let place = self.host.borrow().place(cid);
                    let waker =
                        self.in_flight.borrow_mut().finish(place, CommandResult { cid: cid.0, completion, data });
                    if let Some(waker) = waker {
                        waker.wake();
                    }
                    self.wake_next();
                }
                // The reason is told by the receiver, which finds no buffer to receive into.
                Some(Event::Closed(_)) => self.wake_sender(),
            }
        }
    }

    /// Why the core ended the connection.
    fn reason(&self) -> String {
        match self.host.borrow().closed() {
            Some(Closed::Violated(violation)) => format!("the target broke the protocol: {violation}"),
            Some(Closed::Terminated { fes, fei }) => {
                format!("the target ended the connection for an error of this host (FES {fes:#x}, FEI {fei:#x})")
            }
            Some(Closed::MalformedTermination) => "the target ended the connection without a valid reason".to_owned(),
            Some(Closed::Local) | None => "closed by this host".to_owned(),
        }
    }
}

/// Receives until the connection is over.
async fn receive(queue: Rc<Queue>) {
    let reason = loop {
        let buffer = queue.host.borrow_mut().receive_buffer();
        let Some(buffer) = buffer else { break queue.reason() };
        let (result, buffer) = queue.stream.recv(buffer).await;
        match result {
            Ok(0) => break "the target closed the connection".to_owned(),
            Ok(len) => queue.host.borrow_mut().received(buffer, len),
            Err(error) => break format!("receiving failed: {error}"),
        }
        queue.dispatch();
        // What was completed is to be asked for again before more is received, so that both sides stay busy.
        queue.wake_sender_if_output();
    };
    queue.end(&reason);
}

impl Queue {
    fn wake_sender_if_output(&self) {
        if self.host.borrow().has_output() {
            self.wake_sender();
        }
    }
}

/// Sends until the connection is over and its last words are out.
async fn send(queue: Rc<Queue>) {
    let mut out = Vec::new();
    loop {
        let bytes = queue.host.borrow_mut().transmit(&mut out, TransmitLimit::default());
        let is_over = queue.end_reason.borrow().is_some();
        if bytes == 0 && is_over {
            break;
        }
        if bytes == 0 {
            queue.wait_for_output().await;
            continue;
        }
        let sent = if is_over {
            timeout(CLOSE_TIMEOUT, queue.stream.send_all(out.drain(..))).await.unwrap_or(Ok(()))
        } else {
            queue.is_sending.set(true);
            let sent = queue.stream.send_all(out.drain(..)).await;
            queue.is_sending.set(false);
            sent
        };
        if let Err(error) = sent {
            queue.end(&format!("sending failed: {error}"));
            break;
        }
    }
    let _ = queue.stream.shutdown(Shutdown::Both);
}

impl Queue {
    /// Waits until there is something to send, or the connection is over.
    async fn wait_for_output(&self) {
        std::future::poll_fn(|cx: &mut Context<'_>| {
            if self.host.borrow().has_output() || self.end_reason.borrow().is_some() {
                return Poll::Ready(());
            }
            let previous = self.idle_sender.replace(Some(cx.waker().clone()));
            drop(previous);
            Poll::Pending
        })
        .await
    }
}

enum CommandStage {
    New(Command, HostData),
    Waiting(u64, Command, HostData),
    InFlight(usize),
    Ended,
}

/// A command on its way through a queue. Dropping it leaves a command in flight to the target.
pub(crate) struct CommandFuture<'q> {
    queue: &'q Queue,
    stage: CommandStage,
    has_no_timeout: bool,
}

impl<'q> CommandFuture<'q> {
    pub(crate) fn new(queue: &'q Queue, command: Command, data: HostData, has_no_timeout: bool) -> CommandFuture<'q> {
        CommandFuture { queue, stage: CommandStage::New(command, data), has_no_timeout }
    }

    fn submit(&mut self, command: Command, data: HostData) -> Result<(), ConnectionLost> {
        self.stage = CommandStage::Ended;
        let entry = self.queue.try_submit(command, data, self.has_no_timeout)?;
        self.stage = CommandStage::InFlight(entry);
        Ok(())
    }

    /// Submits as soon as it is this command's turn; answers whether it is in flight.
    fn advance(&mut self, cx: &mut Context<'_>) -> Result<bool, ConnectionLost> {
        match std::mem::replace(&mut self.stage, CommandStage::Ended) {
            CommandStage::New(command, data) => {
                if let Some(lost) = self.queue.lost() {
                    return Err(lost);
                }
                if self.queue.waiters().borrow().len() == 0 && self.queue.has_room() {
                    self.submit(command, data)?;
                    return Ok(true);
                }
                let ticket = self.queue.waiters().borrow_mut().join(cx.waker().clone());
                self.stage = CommandStage::Waiting(ticket, command, data);
                Ok(false)
            }
            CommandStage::Waiting(ticket, command, data) => {
                let lost = self.queue.lost();
                let is_turn = self.queue.waiters().borrow().is_first(ticket) && self.queue.has_room();
                if lost.is_none() && !is_turn {
                    let before = self.queue.waiters().borrow_mut().keep_waker(ticket, cx.waker());
                    drop(before);
                    self.stage = CommandStage::Waiting(ticket, command, data);
                    return Ok(false);
                }
                let waker = self.queue.waiters().borrow_mut().leave(ticket);
                drop(waker);
                if let Some(lost) = lost {
                    return Err(lost);
                }
                self.submit(command, data)?;
                self.queue.wake_next();
                Ok(true)
            }
            stage @ (CommandStage::InFlight(_) | CommandStage::Ended) => {
                self.stage = stage;
                Ok(true)
            }
        }
    }
}

impl Future for CommandFuture<'_> {
    type Output = Result<CommandResult, ConnectionLost>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        match this.advance(cx) {
            Err(lost) => return Poll::Ready(Err(lost)),
            Ok(false) => return Poll::Pending,
            Ok(true) => {}
        }
        let CommandStage::InFlight(entry) = this.stage else { return Poll::Pending };
        let fetched = this.queue.in_flight().borrow_mut().poll(entry, cx.waker());
        match fetched {
            CommandProgress::InFlight => Poll::Pending,
            CommandProgress::Done(finished) => {
                this.stage = CommandStage::Ended;
                Poll::Ready(Ok(finished))
            }
            CommandProgress::Lost => {
                this.stage = CommandStage::Ended;
                Poll::Ready(Err(this.queue.lost().unwrap_or_else(|| ConnectionLost("the connection ended".into()))))
            }
        }
    }
}

impl Drop for CommandFuture<'_> {
    fn drop(&mut self) {
        match self.stage {
            CommandStage::Waiting(ticket, ..) => {
                let waker = self.queue.waiters().borrow_mut().leave(ticket);
                drop(waker);
                self.queue.wake_next();
            }
            CommandStage::InFlight(entry) => {
                let was = self.queue.in_flight().borrow_mut().abandon(entry);
                drop(was);
            }
            CommandStage::New(..) | CommandStage::Ended => {}
        }
    }
}
