//! Commands that are answered at once: Fabrics commands and those of the admin queue.

use std::rc::Rc;

use sealblock_protocols_nvme::admin::{AdminCommand, Identify};
use sealblock_protocols_nvme::fabrics::FabricsCommand;
use sealblock_protocols_nvme::logs::LogPage;
use sealblock_protocols_nvme::{Command, FABRICS_OPCODE, FabricsType, StatusCode};
use sealblock_runtime_memory::Slice;

use crate::commands::abort;
use crate::connection::{Connection, Reply, Role};
use crate::refusal::Refusal;
use crate::{connect, features, identify, logs, properties};

/// The admin data that a host may want or bring at once: Identify and the data of features.
const MOST_DATA_BYTES: usize = 1 << 20;

/// Carries out a command that is no I/O command. `room` is the length of the host's buffer.
pub(crate) fn run(connection: &Rc<Connection>, command: &Command, data: &[u8], room: usize) -> Result<Reply, Refusal> {
    let role = connection.role.borrow().clone();
    if command.opcode == FABRICS_OPCODE {
        return fabrics(connection, &role, command, data).map(Reply::Done);
    }
    let Role::Admin(controller) = role else { return Err(StatusCode::COMMAND_SEQUENCE_ERROR.into()) };
    controller.heard();
    if !controller.is_ready() {
        return Err(StatusCode::COMMAND_SEQUENCE_ERROR.into());
    }
    match AdminCommand::decode(command)? {
        AdminCommand::Identify(ask) => {
            cut(&identify::page(&controller, &connection.target.limits, &ask)?, room, Identify::DATA_BYTES as u64)
        }
        AdminCommand::GetLogPage(ask) => {
            let page = logs::page(connection, &controller, &ask)?;
            let reply = cut(ask.slice(&page)?, room, ask.length_bytes)?;
            if !ask.retain_event
                && let Some(page) = LogPage::from_code(ask.lid)
            {
                controller.notices.page_was_read(page);
            }
            Ok(reply)
        }
        AdminCommand::GetFeatures(ask) => features::get(&controller, &ask, room),
        AdminCommand::SetFeatures(ask) => features::set(connection, &controller, &ask, data).map(Reply::Done),
        AdminCommand::Abort(ask) => Ok(Reply::Done(abort::abort(&controller, &ask))),
        AdminCommand::KeepAlive => Ok(Reply::Done(0)),
        // These are taken by `commands/later.rs`.
        AdminCommand::AsynchronousEventRequest | AdminCommand::GetLbaStatus(_) => {
            Err(StatusCode::INTERNAL_ERROR.into())
        }
    }
}

fn fabrics(connection: &Rc<Connection>, role: &Role, command: &Command, data: &[u8]) -> Result<u64, Refusal> {
    match (role, FabricsCommand::kind(command)) {
        (Role::New, Some(FabricsType::Connect)) => return connect::connect(connection, command, data),
        (Role::New, _) | (_, Some(FabricsType::Connect)) => return Err(StatusCode::COMMAND_SEQUENCE_ERROR.into()),
        _ => {}
    }
    let Role::Admin(controller) = role else {
        // The only Fabrics command of an I/O queue that is connected. What is under way is answered before the queue ends.
        let FabricsCommand::Disconnect = FabricsCommand::decode(command)? else {
            return Err(StatusCode::INVALID_OPCODE.into());
        };
        connection.stop();
        return Ok(0);
    };
    controller.heard();
    match FabricsCommand::decode(command)? {
        FabricsCommand::PropertyGet(get) => Ok(properties::get(controller, &connection.target.limits, &get)?),
        FabricsCommand::PropertySet(set) => Ok(properties::set(controller, &set)?),
        FabricsCommand::Connect(_) | FabricsCommand::Disconnect => Err(StatusCode::INVALID_OPCODE.into()),
    }
}

/// `asked` bytes for the host: `page`, and zeroes behind its end.
pub(crate) fn cut(page: &[u8], room: usize, asked: u64) -> Result<Reply, Refusal> {
    let asked = usize::try_from(asked).ok().filter(|&asked| asked <= room && asked <= MOST_DATA_BYTES);
    let asked = asked.ok_or(StatusCode::DATA_SGL_LENGTH_INVALID)?;
    let mut data = page[..page.len().min(asked)].to_vec();
    data.resize(asked, 0);
    Ok(Reply::Data(Slice::copy_from(&data).into(), 0))
}
