//! Fabrics Connect: a connection becomes the admin queue of a new controller, or an I/O queue of one that is there.

use std::rc::Rc;
use std::sync::Arc;

use sealblock_protocols_nvme::fabrics::{
    AuthenticationRequired, CNTLID_DYNAMIC, Connect, ConnectAttributes, ConnectData, ConnectError, InvalidParameter,
};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_protocols_nvme::{Command, StatusCode};

use crate::command_error::CommandError;
use crate::connection::{Connection, Role};
use crate::controller::Controller;
use crate::member::QueueContext;

pub(crate) fn connect(connection: &Rc<Connection>, command: &Command, data: &[u8]) -> Result<u64, CommandError> {
    let args = Connect::decode(command)?;
    let data = ConnectData::parse(data)?;
    let outcome = join(connection, &args, &data);
    log_outcome(connection, &args, &data, &outcome);
    outcome
}

/// Logs the connected hosts, and the refused hosts that an operator may have meant to allow.
fn log_outcome(connection: &Connection, args: &Connect, data: &ConnectData, outcome: &Result<u64, CommandError>) {
    let (subsystem, host) = (data.subnqn.as_str(), host_name(data.hostnqn.as_ref()));
    let from = connection.peer_address();
    match outcome {
        Ok(_) if args.queue == 0 => tracing::info!(subsystem, host, from, "a host has connected"),
        Ok(_) => tracing::debug!(subsystem, host, from, queue = args.queue, "an I/O queue is connected"),
        Err(error) if error.status.code() == StatusCode::CONNECT_INVALID_HOST => {
            tracing::warn!(subsystem, host, from, "a host was refused: the subsystem is not for it");
        }
        Err(error) if *error == missing(InvalidParameter::SUBNQN) => {
            tracing::warn!(subsystem, host, from, "a host was refused: there is no such subsystem");
        }
        Err(error) => {
            let (queue, status) = (args.queue, error.status);
            tracing::debug!(subsystem, host, from, queue, ?status, "a Connect was refused");
        }
    }
}

/// The name of a host in log lines.
pub(crate) fn host_name(host: Option<&Nqn>) -> &str {
    host.map_or("(without a name)", Nqn::as_str)
}

fn join(connection: &Rc<Connection>, args: &Connect, data: &ConnectData) -> Result<u64, CommandError> {
    if args.entries > u32::from(connection.target.limits.commands) {
        return Err(parameter(InvalidParameter::SQSIZE));
    }
    let (controller, role) = match args.queue {
        0 => {
            let controller = admin(connection, args, data)?;
            (Arc::clone(&controller), Role::Admin(controller))
        }
        queue => {
            let context = io(connection, queue, data)?;
            (Arc::clone(context.controller()), Role::Io(context, queue))
        }
    };
    connection.set_role(role, args.entries, args.attributes.contains(ConnectAttributes::DISABLE_SQ_FLOW_CONTROL));
    Ok(Connect::result(controller.id, AuthenticationRequired::NONE))
}

fn parameter(parameter: InvalidParameter) -> CommandError {
    ConnectError::from(parameter).into()
}

/// The error for a subsystem or controller that does not exist but may exist soon: a subsystem is added again, or the
/// host makes a new controller. Without Do Not Retry, hosts that had it keep trying for as long as they are configured
/// to.
fn missing(what: InvalidParameter) -> CommandError {
    let error = parameter(what);
    CommandError { status: error.status.with_dnr(false), ..error }
}

fn admin(connection: &Connection, args: &Connect, data: &ConnectData) -> Result<Arc<Controller>, CommandError> {
    let target = &connection.target;
    let subsystem = target.subsystem(&data.subnqn).ok_or(missing(InvalidParameter::SUBNQN))?;
    if !subsystem.allows(data.hostnqn.as_ref()) {
        return Err(StatusCode::CONNECT_INVALID_HOST.into());
    }
    if data.cntlid != CNTLID_DYNAMIC {
        return Err(parameter(InvalidParameter::CNTLID));
    }
    let admin = (&connection.signal, connection.peer_address());
    let make = |id| Controller::new(id, Arc::clone(&subsystem), data, args.keep_alive_ms, admin);
    let controller = target.new_controller(make).ok_or(StatusCode::CONNECT_CONTROLLER_BUSY)?;
    // A concurrent removal may have ended the subsystem's controllers before this one was registered.
    let is_gone = subsystem.is_removed.get();
    if is_gone || !subsystem.allows(data.hostnqn.as_ref()) {
        target.remove_controller(controller.id);
        return Err(if is_gone { missing(InvalidParameter::SUBNQN) } else { StatusCode::CONNECT_INVALID_HOST.into() });
    }
    controller.subscribe_to_namespaces();
    Ok(controller)
}

fn io(connection: &Rc<Connection>, queue: u16, data: &ConnectData) -> Result<Rc<QueueContext>, CommandError> {
    let controller = connection.target.controller(data.cntlid).ok_or(missing(InvalidParameter::CNTLID))?;
    if controller.subsystem.nqn != data.subnqn {
        return Err(parameter(InvalidParameter::SUBNQN));
    }
    if controller.host != data.hostnqn {
        return Err(parameter(InvalidParameter::HOSTNQN));
    }
    if controller.hostid != data.hostid {
        return Err(parameter(InvalidParameter::HOSTID));
    }
    if controller.is_discovery || !controller.has_entry_sizes() || u32::from(queue) > controller.queues_granted.get() {
        return Err(parameter(InvalidParameter::QID));
    }
    if !controller.add_io_queue(queue, &connection.signal) {
        return Err(StatusCode::COMMAND_SEQUENCE_ERROR.into());
    }
    Ok(QueueContext::new(controller))
}
