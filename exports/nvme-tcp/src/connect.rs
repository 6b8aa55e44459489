//! Fabrics Connect: a connection becomes the admin queue of a new controller, or an I/O queue of one that is there.

use std::rc::Rc;
use std::sync::Arc;

use sealblock_protocols_nvme::fabrics::{
    AuthenticationRequired, CNTLID_DYNAMIC, Connect, ConnectAttributes, ConnectData, ConnectError, InvalidParameter,
};
use sealblock_protocols_nvme::{Command, StatusCode};

use crate::connection::{Connection, Role};
use crate::controller::Controller;
use crate::member::Member;
use crate::refusal::Refusal;

pub(crate) fn connect(connection: &Rc<Connection>, command: &Command, data: &[u8]) -> Result<u64, Refusal> {
    let ask = Connect::decode(command)?;
    let data = ConnectData::parse(data)?;
    if ask.entries > u32::from(connection.target.limits.commands) {
        return Err(parameter(InvalidParameter::SQSIZE));
    }
    let (controller, role) = match ask.queue {
        0 => {
            let controller = admin(connection, &ask, &data)?;
            (Arc::clone(&controller), Role::Admin(controller))
        }
        queue => {
            let member = io(connection, queue, &data)?;
            (Arc::clone(member.controller()), Role::Io(member, queue))
        }
    };
    connection.joined(role, ask.entries, ask.attributes.contains(ConnectAttributes::DISABLE_SQ_FLOW_CONTROL));
    Ok(Connect::result(controller.id, AuthenticationRequired::NONE))
}

fn parameter(parameter: InvalidParameter) -> Refusal {
    ConnectError::from(parameter).into()
}

fn admin(connection: &Connection, ask: &Connect, data: &ConnectData) -> Result<Arc<Controller>, Refusal> {
    let target = &connection.target;
    let subsystem = target.subsystem(&data.subnqn).ok_or(parameter(InvalidParameter::SUBNQN))?;
    if !subsystem.allows(&data.hostnqn) {
        return Err(StatusCode::CONNECT_INVALID_HOST.into());
    }
    if data.cntlid != CNTLID_DYNAMIC {
        return Err(parameter(InvalidParameter::CNTLID));
    }
    let make = |id| Controller::new(id, Arc::clone(&subsystem), data, ask.keep_alive_ms, &connection.line);
    let controller = target.new_controller(make).ok_or(StatusCode::CONNECT_CONTROLLER_BUSY)?;
    // Whoever took this away meanwhile may have ended the subsystem's controllers before this one was there.
    if subsystem.removed.get() || !subsystem.allows(&data.hostnqn) {
        target.remove_controller(controller.id);
        return Err(StatusCode::CONNECT_INVALID_HOST.into());
    }
    controller.watch_namespaces();
    Ok(controller)
}

fn io(connection: &Rc<Connection>, queue: u16, data: &ConnectData) -> Result<Rc<Member>, Refusal> {
    let controller = connection.target.controller(data.cntlid).ok_or(parameter(InvalidParameter::CNTLID))?;
    if controller.subsystem.nqn != data.subnqn {
        return Err(parameter(InvalidParameter::SUBNQN));
    }
    if controller.host != data.hostnqn {
        return Err(parameter(InvalidParameter::HOSTNQN));
    }
    if controller.hostid != data.hostid {
        return Err(parameter(InvalidParameter::HOSTID));
    }
    if controller.is_discovery || u32::from(queue) > controller.queues_granted.get() {
        return Err(parameter(InvalidParameter::QID));
    }
    if !controller.enter(queue, &connection.line) {
        return Err(StatusCode::COMMAND_SEQUENCE_ERROR.into());
    }
    Ok(Member::new(controller))
}
