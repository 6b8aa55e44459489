//! The path of a request: taken from what was received, executed, replied to.

use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use sealblock_protocols_nbd::{Closed, Command, Event, Request, Ticket};
use sealblock_runtime_reactor::spawn;

use crate::connection::Connection;
use crate::translate::{FailedRequest, OpenExport, RemainingWork, Reply};

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
        self.stream.set_lingering(events == 1);
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
