//! Fabrics commands and those of the admin queue.

use std::rc::Rc;

use sealblock_protocols_nvme::admin::{AdminCommand, Identify};
use sealblock_protocols_nvme::fabrics::FabricsCommand;
use sealblock_protocols_nvme::logs::LogPage;
use sealblock_protocols_nvme::{Command, FABRICS_OPCODE, FabricsType, StatusCode};
use sealblock_protocols_nvme_tcp::Payload;
use sealblock_runtime_memory::{Buffer, Slice};

use crate::command_error::CommandError;
use crate::commands::abort;
use crate::connection::{Connection, Reply, Role};
use crate::{connect, features, identify, logs, properties};

/// The maximum length of a reply, in bytes.
const MAX_REPLY_BYTES: usize = 1 << 20;

/// Executes a Fabrics or admin command that completes at once.
pub(crate) fn run(
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
            let page = logs::page(connection, &controller, &args)?;
            let reply = cut(args.slice(&page)?, host_buffer_bytes, args.length_bytes)?;
            if !args.retain_event
                && let Some(page) = LogPage::from_code(args.lid)
            {
                controller.async_events.page_was_read(page, shown);
            }
            Ok(reply)
        }
        AdminCommand::GetFeatures(args) => features::get(&controller, &args, host_buffer_bytes),
        AdminCommand::SetFeatures(args) => features::set(connection, &controller, &args, data).map(Reply::Done),
        AdminCommand::Abort(args) => Ok(Reply::Done(abort::abort(&controller, &args))),
        AdminCommand::KeepAlive => Ok(Reply::Done(0)),
        // [`try_start`] has started these.
        AdminCommand::AsynchronousEventRequest | AdminCommand::GetLbaStatus(_) => {
            Err(StatusCode::INTERNAL_ERROR.into())
        }
    }
}

fn fabrics(connection: &Rc<Connection>, role: &Role, command: &Command, data: &[u8]) -> Result<u64, CommandError> {
    match (role, FabricsCommand::kind(command)) {
        (Role::New, Some(FabricsType::Connect)) => return connect::connect(connection, command, data),
        (Role::New, _) | (_, Some(FabricsType::Connect)) => return Err(StatusCode::COMMAND_SEQUENCE_ERROR.into()),
        _ => {}
    }
    let Role::Admin(controller) = role else {
        // Disconnect is the only Fabrics command of a connected I/O queue. Its commands in flight complete first.
        let FabricsCommand::Disconnect = FabricsCommand::decode(command)? else {
            return Err(StatusCode::INVALID_OPCODE.into());
        };
        connection.begin_drain();
        // An I/O queue had no timer until now; a host that sends no more of its data must not delay the end.
        connection.rearm_timer();
        return Ok(0);
    };
    controller.mark_alive();
    match FabricsCommand::decode(command)? {
        FabricsCommand::PropertyGet(get) => Ok(properties::get(controller, &connection.target.limits, &get)?),
        FabricsCommand::PropertySet(set) => Ok(properties::set(controller, &set)?),
        FabricsCommand::Connect(_) | FabricsCommand::Disconnect => Err(StatusCode::INVALID_OPCODE.into()),
    }
}

/// Returns `requested` bytes for the host: `page`, and zeroes behind its end.
pub(crate) fn cut(page: &[u8], host_buffer_bytes: usize, requested: u64) -> Result<Reply, CommandError> {
    let requested = usize::try_from(requested)
        .ok()
        .filter(|&requested| requested <= host_buffer_bytes && requested <= MAX_REPLY_BYTES);
    let requested = requested.ok_or(StatusCode::DATA_SGL_LENGTH_INVALID)?;
    let page = &page[..page.len().min(requested)];
    let mut slices = vec![Slice::copy_from(page)];
    ZEROES.with(|zeroes| {
        let mut left = requested - page.len();
        while left > 0 {
            let len = left.min(zeroes.len());
            slices.push(zeroes.slice(..len));
            left -= len;
        }
    });
    Ok(Reply::Data(Payload::new(slices), 0))
}

thread_local! {
    /// The zeroes behind the ends of pages. All replies share it: a host that requests long pages and receives none of
    /// them must not make the target hold them.
    static ZEROES: Slice = Buffer::zeroed(32 << 10).freeze();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(page: &[u8], host_buffer_bytes: usize, requested: u64) -> Option<Payload> {
        match cut(page, host_buffer_bytes, requested) {
            Ok(Reply::Data(data, 0)) => Some(data),
            Ok(_) => panic!("a page is data"),
            Err(_) => None,
        }
    }

    #[test]
    fn a_page_is_cut_or_followed_by_zeroes_that_all_answers_share() {
        let bytes = |data: &Payload| data.slices().iter().flat_map(|slice| slice.to_vec()).collect::<Vec<u8>>();
        assert_eq!(bytes(&answer(&[7; 12], 64, 8).unwrap()), [7; 8]);
        let long = answer(&[7; 12], 1 << 20, 100_000).unwrap();
        assert_eq!(bytes(&long), [vec![7; 12], vec![0; 99_988]].concat());
        let other = answer(&[8; 4], 1 << 20, 64).unwrap();
        assert_eq!(long.slices()[1].as_ptr(), other.slices()[1].as_ptr());
        assert!(answer(&[7; 12], 4, 8).is_none(), "more than the host has room for");
        assert!(answer(&[7; 12], usize::MAX, (1 << 20) + 4).is_none(), "more than is ever sent");
    }
}
