//! Moves an I/O queue to the core where its namespaces are, before its Connect is executed.
//!
//! Until then, nobody knows which devices a connection will use. The host waits for the reply to Connect, so nothing
//! else is in flight, and the connection here has no state but what its host has sent: the other core gets the socket
//! and these bytes, receives them again, and executes the Connect.
//!
//! Invariants: only the first command of a connection can move it, so no command is executed twice. Everything that was
//! sent in reply to the bytes before it (ICResp) is sent by the old core, and discarded by the new one. A connection
//! that has moved does not move again. One that drains or ends stays.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use sealblock_protocols_nvme::FABRICS_OPCODE;
use sealblock_protocols_nvme::fabrics::{Connect, ConnectData, FabricsCommand};
use sealblock_protocols_nvme::{Command, FabricsType};
use sealblock_protocols_nvme_tcp::TransmitLimit;
use sealblock_protocols_nvme_tcp::target::{CommandData, Event};
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::spawn;
use sealblock_transport::{Registration, hand_to_core, next_part};

use crate::connection::admin;
use crate::connection::task::{Connection, Role};
use crate::model::registry::TargetState;

impl Connection {
    /// True if the connection leaves this core, where the event is not handled. The first command decides.
    pub(crate) fn leaves_before(&self, event: &Event) -> bool {
        let Event::Command { command, data, .. } = event else { return false };
        match self.moves_by(command, data) {
            true => self.arrival.leave(),
            false => self.arrival.settle(),
        }
        self.arrival.is_leaving()
    }

    /// Chooses the core of an I/O queue; true if that is another one.
    fn moves_by(&self, command: &Command, data: &CommandData) -> bool {
        // Data outside of the capsule would have to be requested first.
        let CommandData::InCapsule(data) = data else { return false };
        if !self.can_leave() || command.opcode != FABRICS_OPCODE {
            return false;
        }
        if FabricsCommand::kind(command) != Some(FabricsType::Connect) {
            return false;
        }
        let (Ok(args), Ok(data)) = (Connect::decode(command), ConnectData::parse(&data.buffer)) else { return false };
        // A Connect that fails needs no other core.
        let Ok(controller) = admin::find_controller(&self.target, args.queue, &data) else { return false };
        args.queue != 0 && self.registration.choose_core(&controller.subsystem.homes(), args.queue.into())
    }

    /// True if the connection is open and has not joined a controller.
    pub(crate) fn can_leave(&self) -> bool {
        let is_over = self.is_draining() || self.is_aborted.get() || self.core.borrow().closed().is_some();
        !is_over && matches!(*self.role.borrow(), Role::New)
    }

    /// Hands the connection over; its task on this core ends.
    pub(crate) fn leave(self: Rc<Self>) {
        // Its tasks have ended, so nobody else has it.
        let Some(connection) = Rc::into_inner(self) else { return };
        let Connection { target, stream, registration, accepted, arrival, .. } = connection;
        let received = arrival.into_bytes();
        hand_to_core(stream, registration, move |stream, registration| {
            spawn(Connection::arrived(&target, stream, registration, (accepted, &received)).run());
        });
    }

    /// A connection that has received this on another core since it was accepted.
    fn arrived(
        target: &Arc<TargetState>,
        stream: Stream,
        registration: Registration,
        (accepted, received): (Instant, &[u8]),
    ) -> Rc<Connection> {
        let connection = Connection::new(target, stream, registration, accepted);
        connection.arrival.settle();
        let mut core = connection.core.borrow_mut();
        let mut left = received;
        while let Some((buffer, length)) = next_part(&mut left, || core.receive_buffer()) {
            core.received(buffer, length);
        }
        if !left.is_empty() {
            // Not reached, since one buffer has room for all of it.
            core.close();
        }
        core.transmit(&mut Vec::new(), TransmitLimit::default());
        drop(core);
        connection
    }
}
