//! Admin commands that wait: Asynchronous Event Request, Get LBA Status, and those of the reserved area.

use std::rc::Rc;
use std::sync::Arc;

use sealblock_protocols_nvme::admin::AdminCommand;
use sealblock_protocols_nvme::{AdminOpcode, Command, StatusCode};
use sealblock_protocols_nvme_tcp::target::Token;
use sealblock_runtime_reactor::{now, sleep_until, spawn};

use crate::async_events::{AsyncEvents, EventPoll};
use crate::command_error::CommandError;
use crate::commands::{annex, lba_status};
use crate::connection::{Connection, Reply, Role};
use crate::controller::Controller;
use crate::member::NamespaceHandle;

/// Starts a command that does not complete at once, if its controller is ready; `false` for any other command.
pub(crate) fn try_start(
    connection: &Rc<Connection>,
    token: Token,
    command: &Command,
    data: &[u8],
    host_buffer_bytes: usize,
) -> bool {
    let Role::Admin(controller) = connection.role.borrow().clone() else { return false };
    let opcode = AdminOpcode::from_code(command.opcode);
    let is_later = matches!(opcode, Some(AdminOpcode::AsynchronousEventRequest | AdminOpcode::GetLbaStatus));
    if !(is_later || annex::is_reserved_access(&controller, command)) || !controller.is_ready() {
        return false;
    }
    controller.mark_alive();
    match begin(connection, &controller, token, command, data, host_buffer_bytes) {
        Ok(()) => {}
        Err(error) => connection.complete(token, command, Err(error)),
    }
    true
}

fn begin(
    connection: &Rc<Connection>,
    controller: &Arc<Controller>,
    token: Token,
    command: &Command,
    data: &[u8],
    host_buffer_bytes: usize,
) -> Result<(), CommandError> {
    match AdminCommand::decode(command)? {
        AdminCommand::AsynchronousEventRequest => {
            controller.async_events.request(command.cid.get())?;
            connection.core.borrow_mut().allow_unanswered(token);
            spawn(wait_for_event(Rc::downgrade(connection), Arc::clone(&controller.async_events), token, *command));
        }
        AdminCommand::GetLbaStatus(args) => {
            let namespace = NamespaceHandle::new(&controller.namespace(command.nsid.get())?, controller);
            let (connection, command) = (Rc::downgrade(connection), *command);
            spawn(async move {
                let outcome =
                    lba_status::get(&namespace, &args, host_buffer_bytes, &|| connection.strong_count() == 0).await;
                if let Some(connection) = connection.upgrade() {
                    connection.complete(token, &command, outcome);
                }
            });
        }
        AdminCommand::GetFeatures(_) | AdminCommand::SetFeatures(_) => {
            let work = annex::begin_reserved(controller, command, data, host_buffer_bytes)?;
            let (connection, command) = (Rc::downgrade(connection), *command);
            spawn(async move {
                let outcome = work.execute().await;
                if let Some(connection) = connection.upgrade() {
                    connection.complete(token, &command, outcome);
                }
            });
        }
        _ => return Err(StatusCode::INVALID_OPCODE.into()),
    }
    Ok(())
}

/// Waits without keeping the connection alive, which may end before an event occurs.
async fn wait_for_event(
    connection: std::rc::Weak<Connection>,
    events: Arc<AsyncEvents>,
    token: Token,
    command: Command,
) {
    let outcome = loop {
        match std::future::poll_fn(|cx| events.poll(command.cid.get(), now(), cx)).await {
            EventPoll::Event(event) => break Ok(Reply::Done(u64::from(event.dword0()))),
            EventPoll::Aborted => break Err(StatusCode::ABORT_REQUESTED.into()),
            EventPoll::NotBefore(due) => sleep_until(due).await,
        }
    };
    if let Some(connection) = connection.upgrade() {
        connection.complete(token, &command, outcome);
    }
}
