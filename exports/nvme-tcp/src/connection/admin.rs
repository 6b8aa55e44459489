//! Fabrics and admin commands: completes them at once, or starts those that must wait.

use std::rc::Rc;
use std::sync::Arc;

use sealblock_protocols_nvme::admin::{Abort, AdminCommand, Identify};
use sealblock_protocols_nvme::fabrics::{
    AuthenticationRequired, CNTLID_DYNAMIC, Connect, ConnectAttributes, ConnectData, ConnectError, FabricsCommand,
    InvalidParameter,
};
use sealblock_protocols_nvme::features::FeatureId;
use sealblock_protocols_nvme::logs::LogPage;
use sealblock_protocols_nvme::{AdminOpcode, Command, FABRICS_OPCODE, FabricsType, StatusCode};
use sealblock_protocols_nvme_tcp::target::Token;
use sealblock_transport::poll_until;

use crate::command::queue_context::{NamespaceHandle, QueueContext};
use crate::command::reply::{Reply, cut};
use crate::command::{features, identify, lba_status, logs, properties, reserved};
use crate::connection::task::{Connection, ReplyBytes, Role, host_name};
use crate::model::command_error::CommandError;
use crate::model::controller::Controller;
use crate::model::handover::Successor;
use crate::model::registry::TargetState;

/// Executes a Fabrics or admin command, or starts one that does not complete at once.
pub(crate) fn execute(connection: &Rc<Connection>, token: Token, command: &Command, data: &[u8], reply: ReplyBytes) {
    if try_disconnect(connection, token, command) || try_start(connection, token, command, data, reply) {
        return;
    }
    let outcome = run(connection, command, data, reply.host_buffer as usize);
    connection.settle_reply(reply.counted, &outcome);
    connection.complete(token, command, outcome);
}

/// Begins a Disconnect of an I/O queue; `false` for any other command. It completes after the commands in flight, or when
/// these can no longer be executed after newer commands of other hosts.
fn try_disconnect(connection: &Rc<Connection>, token: Token, command: &Command) -> bool {
    let is_disconnect = command.opcode == FABRICS_OPCODE
        && matches!(*connection.role.borrow(), Role::Io(..))
        && matches!(FabricsCommand::decode(command), Ok(FabricsCommand::Disconnect));
    if is_disconnect {
        connection.disconnect.set(Some((token, *command)));
        connection.begin_drain();
        // An I/O queue had no timer so far, but a host that stops sending data must not delay the end.
        connection.rearm_timer();
    }
    is_disconnect
}

/// Executes a command that completes at once.
fn run(
    connection: &Rc<Connection>,
    command: &Command,
    data: &[u8],
    host_buffer_bytes: usize,
) -> Result<Reply, CommandError> {
    let role = connection.role.borrow().clone();
    if command.opcode == FABRICS_OPCODE {
        return fabrics(connection, &role, command, data).map(Reply::Done);
    }
    let Role::Admin(controller) = role else { return Err(StatusCode::COMMAND_SEQUENCE_ERROR.into()) };
    controller.mark_alive();
    if !controller.is_ready() {
        return Err(StatusCode::COMMAND_SEQUENCE_ERROR.into());
    }
    match AdminCommand::decode(command)? {
        AdminCommand::Identify(args) => cut(
            &identify::page(&controller, &connection.target.limits, &args)?,
            host_buffer_bytes,
            Identify::DATA_BYTES as u64,
        ),
        AdminCommand::GetLogPage(args) => {
            let shown = controller.async_events.counts();
            let page = logs::page(&connection.target, || connection.stream.local_addr(), &controller, &args)?;
            let reply = cut(args.slice(page.bytes())?, host_buffer_bytes, args.length_bytes)?;
            if !args.retain_event
                && let Some(page) = LogPage::from_code(args.lid)
            {
                controller.async_events.page_was_read(page, shown);
            }
            Ok(reply)
        }
        AdminCommand::GetFeatures(args) => features::get(&controller, &args, host_buffer_bytes),
        AdminCommand::SetFeatures(args) => {
            features::set(&connection.target.limits, &controller, &args, data).map(Reply::Done)
        }
        AdminCommand::Abort(args) => Ok(Reply::Done(abort(connection, &args))),
        AdminCommand::KeepAlive => Ok(Reply::Done(0)),
        // [`try_start`] has started these.
        AdminCommand::AsynchronousEventRequest | AdminCommand::GetLbaStatus(_) => {
            Err(StatusCode::INTERNAL_ERROR.into())
        }
    }
}

fn fabrics(connection: &Rc<Connection>, role: &Role, command: &Command, data: &[u8]) -> Result<u64, CommandError> {
    match (role, FabricsCommand::kind(command)) {
        (Role::New, Some(FabricsType::Connect)) => return connect(connection, command, data),
        (Role::New, _) | (_, Some(FabricsType::Connect)) => return Err(StatusCode::COMMAND_SEQUENCE_ERROR.into()),
        _ => {}
    }
    let Role::Admin(controller) = role else {
        // Disconnect is the only Fabrics command of a connected I/O queue.
        return Err(StatusCode::INVALID_OPCODE.into());
    };
    controller.mark_alive();
    match FabricsCommand::decode(command)? {
        FabricsCommand::PropertyGet(get) => Ok(properties::get(controller, &connection.target.limits, &get)?),
        FabricsCommand::PropertySet(set) => {
            let resets = controller.resets();
            let done = properties::set(controller, &set)?;
            if controller.resets() != resets {
                connection.forget_commands();
            }
            Ok(done)
        }
        FabricsCommand::Connect(_) | FabricsCommand::Disconnect => Err(StatusCode::INVALID_OPCODE.into()),
    }
}

/// Starts a command that does not complete at once, if its controller is ready; `false` for any other command.
fn try_start(connection: &Rc<Connection>, token: Token, command: &Command, data: &[u8], reply: ReplyBytes) -> bool {
    let Role::Admin(controller) = connection.role.borrow().clone() else { return false };
    let opcode = AdminOpcode::from_code(command.opcode);
    let is_later = matches!(opcode, Some(AdminOpcode::AsynchronousEventRequest | AdminOpcode::GetLbaStatus));
    let is_end = ended_controller(command).is_some() && !controller.is_discovery;
    if !(is_later || is_end || reserved::is_access(&controller, command)) || !controller.is_ready() {
        return false;
    }
    controller.mark_alive();
    if let Err(error) = start(connection, &controller, token, command, data, reply) {
        let outcome = Err(error);
        connection.settle_reply(reply.counted, &outcome);
        connection.complete(token, command, outcome);
    }
    true
}

fn start(
    connection: &Rc<Connection>,
    controller: &Arc<Controller>,
    token: Token,
    command: &Command,
    data: &[u8],
    ReplyBytes { counted, host_buffer }: ReplyBytes,
) -> Result<(), CommandError> {
    match AdminCommand::decode(command)? {
        AdminCommand::AsynchronousEventRequest => {
            connection.request_event(controller, token, command)?;
        }
        AdminCommand::GetLbaStatus(args) => {
            let namespace = NamespaceHandle::new(&controller.namespace(command.nsid.get())?, controller);
            let here = Rc::clone(connection);
            connection.complete_later(token, command, counted, async move |is_over| {
                // If the connection drains, what has been found so far is a valid answer too.
                let is_over = || is_over() || here.is_draining();
                lba_status::get(&namespace, &args, host_buffer as usize, &is_over).await
            });
        }
        AdminCommand::SetFeatures(args) if args.fid == FeatureId::EndController.code() => {
            if args.save {
                return Err(StatusCode::FEATURE_NOT_SAVEABLE.into());
            }
            let other = ended_controller(command).and_then(|id| connection.target.controller(id));
            let other = other.filter(|other| other.is_of_host(controller) && !Arc::ptr_eq(other, controller));
            connection.complete_later(token, command, counted, async move |is_over| {
                if let Some(other) = other {
                    end_controller(&other, is_over).await;
                }
                Ok(Reply::Done(0))
            });
        }
        AdminCommand::GetFeatures(_) | AdminCommand::SetFeatures(_) => {
            let work = reserved::begin(controller, command, data, host_buffer as usize)?;
            connection.complete_later(token, command, counted, async move |_| work.execute().await);
        }
        _ => return Err(StatusCode::INVALID_OPCODE.into()),
    }
    Ok(())
}

/// The controller that a command ends by the feature End Controller.
fn ended_controller(command: &Command) -> Option<u16> {
    match AdminCommand::decode(command) {
        Ok(AdminCommand::SetFeatures(args)) if args.fid == FeatureId::EndController.code() => Some(args.cdw11 as u16),
        _ => None,
    }
}

/// Ends a controller that its host has lost, and waits until none of its commands is executed any more, or until nobody
/// waits for the result.
async fn end_controller(controller: &Arc<Controller>, is_gone: &dyn Fn() -> bool) {
    tracing::info!(
        controller = controller.id,
        host = host_name(controller.host.as_ref()),
        "controller ended by its host"
    );
    controller.end_for_host();
    poll_until(|| !controller.has_queue_refs() || is_gone()).await;
}

/// Executes Abort; bit 0 of the result is 0 if a command was aborted. I/O queues may be on other cores, and by the time
/// that an abort could reach these, the command has usually completed.
fn abort(connection: &Connection, args: &Abort) -> u64 {
    u64::from(args.queue != 0 || !connection.abort_event_request(args.cid))
}

fn connect(connection: &Rc<Connection>, command: &Command, data: &[u8]) -> Result<u64, CommandError> {
    let args = Connect::decode(command)?;
    let data = ConnectData::parse(data)?;
    let outcome = join_queue(connection, &args, &data);
    log_outcome(connection, &args, &data, &outcome);
    outcome
}

/// Logs connected hosts, and refused hosts that an operator may have intended to allow.
fn log_outcome(connection: &Connection, args: &Connect, data: &ConnectData, outcome: &Result<u64, CommandError>) {
    let (subsystem, host) = (data.subnqn.as_str(), host_name(data.hostnqn.as_ref()));
    let from = connection.peer_address();
    match outcome {
        Ok(_) if args.queue == 0 => tracing::info!(subsystem, host, from, "host connected"),
        Ok(_) => tracing::debug!(subsystem, host, from, queue = args.queue, "I/O queue connected"),
        Err(error) if error.status.code() == StatusCode::CONNECT_INVALID_HOST => {
            tracing::warn!(subsystem, host, from, "host refused: not allowed to connect to this subsystem");
        }
        Err(error) if *error == missing(InvalidParameter::SUBNQN) => {
            tracing::warn!(subsystem, host, from, "host refused: no such subsystem");
        }
        Err(error) => {
            let (queue, status) = (args.queue, error.status);
            tracing::debug!(subsystem, host, from, queue, ?status, "Connect refused");
        }
    }
}

fn join_queue(connection: &Rc<Connection>, args: &Connect, data: &ConnectData) -> Result<u64, CommandError> {
    if args.entries > u32::from(connection.target.limits.commands) {
        return Err(parameter(InvalidParameter::SQSIZE));
    }
    let (controller, role) = match args.queue {
        0 => {
            let controller = make_controller(connection, args, data)?;
            (Arc::clone(&controller), Role::Admin(controller))
        }
        queue => {
            let context = join_controller(connection, queue, data)?;
            (Arc::clone(context.controller()), Role::Io(context, queue))
        }
    };
    connection.set_role(role, args.entries, args.attributes.contains(ConnectAttributes::DISABLE_SQ_FLOW_CONTROL));
    Ok(Connect::result(controller.id, AuthenticationRequired::NONE))
}

fn parameter(parameter: InvalidParameter) -> CommandError {
    ConnectError::from(parameter).into()
}

/// The error for a subsystem or controller that does not exist but may exist soon: a subsystem may be added again, and
/// the host may make a new controller. Without Do Not Retry, hosts that were connected keep trying as long as they are
/// configured to.
fn missing(what: InvalidParameter) -> CommandError {
    let error = parameter(what);
    CommandError { status: error.status.with_dnr(false), ..error }
}

fn make_controller(
    connection: &Connection,
    args: &Connect,
    data: &ConnectData,
) -> Result<Arc<Controller>, CommandError> {
    let target = &connection.target;
    let subsystem = target.subsystem(&data.subnqn).ok_or(missing(InvalidParameter::SUBNQN))?;
    if !subsystem.allows(data.hostnqn.as_ref()) {
        return Err(StatusCode::CONNECT_INVALID_HOST.into());
    }
    if data.cntlid != CNTLID_DYNAMIC {
        return Err(parameter(InvalidParameter::CNTLID));
    }
    let admin = (&connection.registration.signal, connection.peer_address());
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

/// The controller that an I/O queue may join, unless that has changed until it does.
pub(crate) fn find_controller(
    target: &TargetState,
    queue: u16,
    data: &ConnectData,
) -> Result<Arc<Controller>, CommandError> {
    let controller = target.controller(data.cntlid).ok_or(missing(InvalidParameter::CNTLID))?;
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
    Ok(controller)
}

fn join_controller(
    connection: &Rc<Connection>,
    queue: u16,
    data: &ConnectData,
) -> Result<Rc<QueueContext>, CommandError> {
    let controller = find_controller(&connection.target, queue, data)?;
    if !controller.add_io_queue(queue, &connection.registration.signal) {
        return Err(StatusCode::COMMAND_SEQUENCE_ERROR.into());
    }
    Ok(QueueContext::new(controller))
}
