//! One connection, which is one queue: commands in, completions out.
//!
//! Two tasks move bytes, one each way. A command is a table entry and a waker: no task and no box for each. Commands that
//! are submitted in the same turn of the reactor leave in one gather send, and one receive may complete many of them.
//!
//! Invariants: a command completes once, with its completion or with [`ConnectionLost`]; commands that find the queue full
//! are submitted in the order in which they came; dropping a future discards the completion of its command; no borrow is
//! held while a waker is called; a reset discards the unsent bytes of lost commands.

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

/// Time limit for sending the last bytes of a connection that ended.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// A connection.
pub(crate) struct Queue {
    /// QID, 0 for the admin queue.
    pub(crate) id: u16,
    stream: Stream,
    host: RefCell<Host>,
    in_flight: RefCell<InFlightCommands>,
    waiters: RefCell<FifoWaiters>,
    /// Why the connection ended; `None` while it is open.
    end_reason: RefCell<Option<Rc<str>>>,
    /// True while bytes are being sent.
    is_sending: Cell<bool>,
    /// Waker of the sender while there is nothing to send.
    idle_sender: RefCell<Option<Waker>>,
    /// Waker of the task that waits for the connection.
    opener: RefCell<Option<Waker>>,
    completed: Cell<u64>,
    /// Counters at the moment when the queue became ready for I/O.
    base: Cell<(u64, target::Counters)>,
}

impl Queue {
    /// Connects and starts to negotiate digests.
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

    /// Waits for ICResp; returns what was negotiated.
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

    /// Executes a command once the queue has room for it.
    pub(crate) fn execute(&self, command: Command, data: HostData) -> CommandFuture<'_> {
        CommandFuture::new(self, command, data, false)
    }

    /// The same without a timeout, as Asynchronous Event Request needs.
    pub(crate) fn execute_without_timeout(&self, command: Command, data: HostData) -> CommandFuture<'_> {
        CommandFuture::new(self, command, data, true)
    }

    /// Commands in flight and waiting.
    pub(crate) fn load(&self) -> usize {
        self.host.borrow().commands_in_flight() + self.waiters.borrow().len()
    }

    /// Why the connection ended, if it did.
    pub(crate) fn lost(&self) -> Option<ConnectionLost> {
        self.end_reason.borrow().clone().map(ConnectionLost)
    }

    /// Ends the connection: all its commands fail with [`ConnectionLost`].
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
            // The commands are sent again on another connection. Without a reset the kernel could deliver these copies
            // minutes later, over newer writes. If the reset fails, dropping the socket resets it.
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
            // A peer that does not read would block the sender forever.
            let _ = self.stream.shutdown(Shutdown::Both);
        }
        self.wake_sender();
    }

    /// Advances the tick. True if a command has been in flight for more than `max_ticks` ticks.
    pub(crate) fn advance_tick(&self, max_ticks: u32) -> bool {
        self.in_flight.borrow_mut().advance_tick(max_ticks)
    }

    /// Starts to count: Connect and earlier traffic do not count.
    pub(crate) fn start_counting(&self) {
        self.base.set((self.completed.get(), self.host.borrow().counters()));
    }

    /// Adds what was transferred since [`Queue::start_counting`].
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

    /// Submits the command; returns its entry in the table.
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

    /// True if one more command may be submitted now.
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

    /// Wakes the first waiting command if there is room for it.
    pub(crate) fn wake_next(&self) {
        if self.has_room() {
            let waker = self.waiters.borrow().first_waker();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    /// Completes the commands whose completions arrived.
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
                // The receiver finds no buffer to receive into, and ends the connection with the reason.
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

/// Receives until the connection ends.
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
        // Send the next commands before receiving more, so that both sides stay busy.
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

/// Sends until the connection has ended and its last bytes are out.
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
    /// Waits until there is something to send, or the connection ends.
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

/// The future of one command. Dropping it does not abort a command in flight; its completion is discarded.
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

    /// Submits the command when it is its turn. True if it is in flight.
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
