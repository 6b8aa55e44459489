//! Moves a connection to the core where the device of its export is, when its client has chosen the export.
//!
//! The other core gets the socket and the bytes that were received since the connection began, and receives them again
//! up to the choice. Requests among them are executed there only.
//!
//! Invariants: what was sent in reply to the negotiation is sent by the old core, and discarded by the new one. A
//! client is served what it was shown, so both cores negotiate with the same exports. A connection moves at most once,
//! and one that drains or ends stays.

use std::rc::Rc;
use std::sync::Arc;

use sealblock_protocols_nbd::Event;
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::spawn;
use sealblock_transport::{Registration, Signals, hand_to_core, next_part};

use crate::connection::{Connection, Offer};
use crate::shared::{ChosenExport, ServerState};

impl Connection {
    /// Chooses the core of a connection whose client has just chosen its export; true if it leaves this one.
    pub(crate) fn leaves(&self) -> bool {
        if !self.arrival.is_open() {
            return false;
        }
        let home = self.choice.borrow().as_ref().map(|choice| choice.export.device.only_core());
        let moves = home.is_some_and(|home| {
            self.can_leave() && self.registration.choose_core(home.as_slice(), self.registration.number)
        });
        match moves {
            true => self.arrival.leave(),
            false => self.arrival.settle(),
        }
        moves
    }

    /// True if the connection is open.
    pub(crate) fn can_leave(&self) -> bool {
        let is_over = self.is_gone.get() || self.core.borrow().closed().is_some();
        !is_over && !self.registration.signal.has(Signals::DRAIN)
    }

    /// Hands the connection over; its task on this core ends.
    pub(crate) fn leave(self: Rc<Self>) {
        // A request in flight or a watched client would have it too, and there is none before an export is open.
        let Some(connection) = Rc::into_inner(self) else { return };
        let Connection { server, stream, registration, offer, arrival, choice, .. } = connection;
        let Some(choice) = choice.into_inner() else { return };
        let received = arrival.into_bytes();
        hand_to_core(stream, registration, move |stream, registration| {
            spawn(Connection::arrived(stream, server, registration, offer, (choice, &received)).run());
        });
    }

    /// A connection that has received this on another core, where its client chose an export.
    fn arrived(
        stream: Stream,
        server: Arc<ServerState>,
        registration: Registration,
        offer: Offer,
        (choice, received): (ChosenExport, &[u8]),
    ) -> Rc<Connection> {
        let connection = Connection::with_offer(stream, server, registration, offer);
        connection.arrival.settle();
        *connection.choice.borrow_mut() = Some(choice);
        let mut core = connection.core.borrow_mut();
        let (mut left, mut is_chosen) = (received, false);
        while let Some((buffer, length)) = next_part(&mut left, || core.receive_buffer()) {
            core.received(buffer, length);
            // The old core has handled what comes before the choice.
            is_chosen =
                is_chosen || std::iter::from_fn(|| core.next_event()).any(|event| matches!(event, Event::Chosen(_)));
        }
        if !is_chosen || !left.is_empty() {
            // Not reached, since the same bytes have the same effect, and one buffer has room for them.
            core.close();
        }
        core.transmit(&mut Vec::new());
        core.sent();
        drop(core);
        connection
    }

    /// Opens the export of a connection that came from another core, and executes what was received there.
    pub(crate) async fn open_choice(self: &Rc<Self>) {
        if self.choice.borrow().is_some() {
            self.open().await;
            self.process_batch(0).await;
        }
    }
}
