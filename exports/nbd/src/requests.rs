//! The way of a request: taken from what was received, carried out, answered.

use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use sealblock_protocols_nbd::{Closed, Command, Event, Request, Ticket};
use sealblock_runtime_reactor::spawn;

use crate::connection::Connection;
use crate::translate::{FailedRequest, OpenExport, RemainingWork, Reply};

/// How many requests are carried out at least, and how many bytes they read at most, before what there is of answers is sent:
/// if a deep queue were answered with one send, client and server would take turns rather than work at the same time.
/// Smaller parts cost more system calls than they gain.
const BATCH_REQUESTS: usize = 16;
const BATCH_BYTES: u64 = 256 << 10;
/// What a request without data takes of what is received.
const REQUEST_BYTES: usize = 28;

impl Connection {
    /// Carries out what was received, and answers it part by part.
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
        // A client that waits for each answer asks again soon, and then waits for this one.
        self.stream.set_lingering(events == 1);
        self.send_first().await;
    }

    /// Lets the sender go first.
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

    /// The next event. A request that needs more of the bytes that all connections share waits until they are there.
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
                tracing::warn!(export, from = self.from(), "an NBD client was refused: there is no such export");
            }
            Event::Request(request) => self.begin(request),
            Event::Closed(Closed::Violation(violation)) => {
                tracing::debug!(%violation, from = self.from(), "an NBD connection was closed");
            }
            Event::Closed(_) => {}
        }
    }

    fn open(&self, index: usize) {
        let Some(advertised) = self.advertised.get(index) else { return };
        let Some(export) = self.registration.choose(advertised, self.from()) else {
            tracing::debug!(export = advertised.name, "a client chose an export that was just taken away");
            return self.core.borrow_mut().close();
        };
        tracing::info!(export = export.name(), from = self.from(), "an NBD client has connected");
        let gives_parts = self.core.borrow().has_chunks();
        // Which connections are one client's is not known, and a flush on any of those covers what was written on all
        // (CAN_MULTI_CONN): so all connections of an export are.
        let flush_cursor = Arc::new(export.device.asker(&format!("nbd {}", export.name())));
        *self.open_export.borrow_mut() = Some(Rc::new(OpenExport {
            device: export.device.attach_as(&flush_cursor),
            can_return_partial: gives_parts,
        }));
    }

    fn begin(self: &Rc<Self>, Request { ticket, command }: Request) {
        let open_export = self.open_export.borrow().clone();
        // There are no requests before an export was chosen.
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
                tracing::debug!(error = ?error.reply, "an NBD request failed");
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
