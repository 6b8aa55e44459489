//! The path of a command: it is checked, its data fetched, executed and completed.
//!
//! Commands whose data exceeds the bytes in flight wait in order, and start when others have completed.

use std::rc::Rc;

use sealblock_protocols_nvme::{Command, Completion, Direction, FABRICS_OPCODE, Fuse, Invalid, Status, StatusCode};
use sealblock_protocols_nvme_tcp::BlockCrcs;
use sealblock_protocols_nvme_tcp::target::{CommandData, DataError, Received, Token};
use sealblock_runtime_memory::Buffer;
use sealblock_units::Lba;

use crate::command::io::{IoRequest, RemainingWork, TransferLengths};
use crate::command::reply::{MAX_REPLY_BYTES, Reply};
use crate::command::reserved;
use crate::command::slots::{CommandResult, NoSlot};
use crate::connection::admin;
use crate::connection::task::{Connection, PreparedCommand, ReplyBytes, Role, WaitingCommand, WaitingWork};
use crate::model::command_error::CommandError;

/// The maximum data of a Fabrics or admin command, in bytes.
const MAX_ADMIN_DATA_BYTES: u64 = 8192;

impl Connection {
    pub(crate) fn on_command(self: &Rc<Self>, token: Token, command: Command, data: CommandData) {
        self.advance_head();
        if !self.event_requests.is_empty() {
            // If a host reuses the identifier of an event request, as some do when they disconnect, it has given up
            // that request.
            let _ = self.event_requests.take(command.cid.get());
        }
        if !self.fuse(token, &command) {
            return;
        }
        let is_to_controller = direction(&command) == Direction::ToController;
        let (lengths, crcs, received) = match command_data(data, is_to_controller) {
            Ok(brought) => brought,
            Err(error) => return self.fail(token, &command, error.status_code().into()),
        };
        let mut request = match self.prepare(&command, lengths) {
            Ok(request) => request,
            Err(error) => return self.fail(token, &command, error),
        };
        if let (Some(request), Some(crcs)) = (&mut request, crcs) {
            request.set_crcs(crcs);
        }
        if is_to_controller && received.is_none() && lengths.from_host_bytes > 0 {
            return self.start_or_queue(WaitingCommand::Fetch(
                token,
                self.prepared(command, request),
                lengths.from_host_bytes as usize,
            ));
        }
        let reply = self.reply_bytes(&command, &request, lengths.to_host_bytes);
        match reply.counted {
            0 => self.execute(token, &command, request, received, reply),
            bytes if self.waiting.borrow().is_empty() && self.may_read(bytes) => {
                self.start_read(token, &command, request, reply);
            }
            _ => {
                let waiting = WaitingCommand::Read(token, self.prepared(command, request), reply);
                self.waiting.borrow_mut().push_back(waiting);
            }
        }
    }

    fn prepared(&self, command: Command, request: Option<IoRequest>) -> PreparedCommand {
        PreparedCommand { command, request, resets: self.resets.get() }
    }

    /// What the reply to a command may occupy until the host has received it.
    fn reply_bytes(&self, command: &Command, request: &Option<IoRequest>, host_buffer: u64) -> ReplyBytes {
        let counted = match request {
            Some(request) => request.read_bytes(),
            None if direction(command) == Direction::ToHost && command.opcode != FABRICS_OPCODE => {
                host_buffer.min(MAX_REPLY_BYTES as u64)
            }
            None => 0,
        };
        ReplyBytes { counted, host_buffer }
    }

    pub(crate) fn on_data(self: &Rc<Self>, token: Token, data: Result<Received, DataError>) {
        let Some(PreparedCommand { command, mut request, resets }) = self.take_fetching(token) else { return };
        if resets != self.resets.get() {
            return self.core.borrow_mut().forget(token);
        }
        match data {
            Ok(Received { buffer, crcs }) => {
                if let (Some(request), Some(crcs)) = (&mut request, crcs) {
                    request.set_crcs(crcs);
                }
                self.execute(token, &command, request, Some(buffer), ReplyBytes::default());
            }
            Err(error) => self.fail(token, &command, error.status_code().into()),
        }
    }

    /// Checks a command before its data is fetched.
    fn prepare(&self, command: &Command, lengths: TransferLengths) -> Result<Option<IoRequest>, CommandError> {
        match &*self.role.borrow() {
            // Only I/O commands form fused pairs.
            Role::New | Role::Admin(_) if command.fuse() != Fuse::Normal => Err(Invalid::field("FUSE", 0, 8).into()),
            Role::Io(controller, _) if command.opcode != FABRICS_OPCODE => {
                if !controller.is_ready() {
                    return Err(StatusCode::COMMAND_SEQUENCE_ERROR.into());
                }
                self.registration.signal.note_traffic();
                IoRequest::prepare((controller, self.batch_arrived.get()), &self.target.limits, command, lengths)
                    .map(Some)
            }
            Role::Admin(controller)
                if reserved::write_bytes(controller, command).is_some_and(|bytes| bytes == lengths.from_host_bytes) =>
            {
                Ok(None)
            }
            _ if lengths.from_host_bytes > MAX_ADMIN_DATA_BYTES || !lengths.from_host_bytes.is_multiple_of(4) => {
                Err(StatusCode::DATA_SGL_LENGTH_INVALID.into())
            }
            _ => Ok(None),
        }
    }

    fn start_or_queue(self: &Rc<Self>, waiting: WaitingCommand) {
        if self.waiting.borrow().is_empty() && self.has_room(&waiting) {
            return self.start(waiting);
        }
        self.waiting.borrow_mut().push_back(waiting);
    }

    /// Starts waiting commands, in order, up to the limit of bytes in flight.
    pub(crate) fn start_waiting(self: &Rc<Self>) {
        loop {
            let next = self.waiting.borrow().front().is_some_and(|waiting| self.has_room(waiting));
            let next = if next { self.waiting.borrow_mut().pop_front() } else { None };
            match next {
                None => return,
                Some(waiting) => self.start(waiting),
            }
        }
    }

    fn start(self: &Rc<Self>, waiting: WaitingCommand) {
        match waiting {
            WaitingCommand::Fetch(token, prepared, len) => self.fetch(token, prepared, len),
            WaitingCommand::Read(token, PreparedCommand { command, request, .. }, reply) => {
                self.start_read(token, &command, request, reply);
            }
        }
    }

    fn start_read(self: &Rc<Self>, token: Token, command: &Command, request: Option<IoRequest>, reply: ReplyBytes) {
        self.read_bytes.set(self.read_bytes.get() + reply.counted);
        self.execute(token, command, request, None, reply);
    }

    fn has_room(&self, waiting: &WaitingCommand) -> bool {
        match waiting {
            WaitingCommand::Fetch(_, _, len) => self.may_fetch(*len),
            WaitingCommand::Read(_, _, reply) => self.may_read(reply.counted),
        }
    }

    fn may_fetch(&self, more: usize) -> bool {
        let (write_bytes, read_bytes) = self.bytes_in_flight();
        self.may_grow(write_bytes, write_bytes + read_bytes, more)
    }

    fn may_read(&self, more: u64) -> bool {
        let (write_bytes, read_bytes) = self.bytes_in_flight();
        self.may_grow(read_bytes, write_bytes + read_bytes, more as usize)
    }

    fn may_grow(&self, same_way: usize, all: usize, more: usize) -> bool {
        same_way + more <= self.target.limits.bytes_in_flight && self.share.grow(all, more, self.slots.task())
    }

    /// Bytes of write data that were received or are being fetched, and bytes of read data that are not sent yet.
    fn bytes_in_flight(&self) -> (usize, usize) {
        let core = self.core.borrow();
        let sent = core.payload_bytes_sent() - self.sending_bytes.get();
        let unsent = self.read_bytes.get().saturating_sub(sent);
        (core.bytes_in_flight(), unsent as usize)
    }

    /// Updates this connection's share of the bytes in flight over all connections.
    pub(crate) fn update_share(&self) {
        let (write_bytes, read_bytes) = self.bytes_in_flight();
        self.share.set_in_flight(write_bytes + read_bytes);
    }

    fn fetch(self: &Rc<Self>, token: Token, prepared: PreparedCommand, len: usize) {
        let shape = prepared.request.as_ref().and_then(IoRequest::block_layout);
        let accepted = self.core.borrow_mut().fetch_data(token, self.pool.take(len), shape);
        if accepted.is_err() {
            return self.fail(token, &prepared.command, StatusCode::DATA_SGL_LENGTH_INVALID.into());
        }
        let mut fetching = self.fetching.borrow_mut();
        if fetching.len() <= token.place() {
            fetching.resize_with(token.place() + 1, || None);
        }
        fetching[token.place()] = Some((token, prepared));
        drop(fetching);
        self.scheduler.wake();
    }

    pub(crate) fn take_fetching(&self, token: Token) -> Option<PreparedCommand> {
        let mut fetching = self.fetching.borrow_mut();
        let entry = fetching.get_mut(token.place())?;
        entry.take_if(|(of, _)| *of == token).map(|(_, prepared)| prepared)
    }

    fn execute(
        self: &Rc<Self>,
        token: Token,
        command: &Command,
        request: Option<IoRequest>,
        data: Option<Buffer>,
        reply: ReplyBytes,
    ) {
        let Some(request) = request else {
            return admin::execute(self, token, command, &data.unwrap_or_default(), reply);
        };
        if self.is_half(command) {
            return self.half_ready(token, request, data.unwrap_or_default());
        }
        let work = match request.try_execute(data.unwrap_or_default()) {
            Ok(outcome) => return self.complete_io(token, command, request.read_bytes(), outcome),
            Err(work) => work,
        };
        match request.work_bytes(&work) {
            0 => self.start_in_slot(token, command, request, work),
            bytes => {
                self.work.add(WaitingWork { token, command: *command, request, work }, bytes as usize);
                self.start_work();
            }
        }
    }

    /// Starts commands that wait for memory, in order, as far as memory is available.
    pub(crate) fn start_work(&self) {
        while let Some((waiting, held)) = self.work.next(self.slots.task()) {
            let WaitingWork { token, command, mut request, work } = waiting;
            request.set_held(held);
            self.start_in_slot(token, &command, request, work);
        }
    }

    fn start_in_slot(&self, token: Token, command: &Command, request: IoRequest, work: RemainingWork) {
        match self.slots.start((token, *command), request, work) {
            Ok(None) => {}
            Ok(Some(result)) => self.on_result(result),
            // There are as many slots as commands in flight. Only after a close the core has dropped older commands,
            // and then no completion is sent.
            Err(NoSlot) => self.complete(token, command, Err(StatusCode::INTERNAL_ERROR.into())),
        }
    }

    pub(crate) fn on_result(&self, result: CommandResult) {
        self.complete_io(result.token, &result.command, result.read_bytes, result.outcome);
    }

    fn complete_io(&self, token: Token, command: &Command, read_bytes: u64, outcome: Result<Reply, CommandError>) {
        self.settle_reply(read_bytes, &outcome);
        // A host also counts completions as traffic for Keep Alive, so the target must do the same.
        self.registration.signal.note_traffic();
        self.complete(token, command, outcome);
    }

    /// Counts what a reply transfers, instead of the estimate from before its length was known.
    pub(crate) fn settle_reply(&self, counted: u64, outcome: &Result<Reply, CommandError>) {
        let bytes = match outcome {
            Ok(Reply::Data(data, _)) => data.len_bytes() as u64,
            Ok(Reply::Done(_)) | Err(_) => 0,
        };
        if bytes != counted {
            self.read_bytes.set((self.read_bytes.get() + bytes).saturating_sub(counted));
        }
    }

    /// Fails a command that is not executed; half of a fused pair completes together with its other half.
    fn fail(self: &Rc<Self>, token: Token, command: &Command, error: CommandError) {
        match self.is_half(command) {
            true => self.fail_half(token, error),
            false => self.complete(token, command, Err(error)),
        }
    }

    /// Completes a command. After the end of the connection the completion is dropped.
    pub(crate) fn complete(&self, token: Token, command: &Command, outcome: Result<Reply, CommandError>) {
        let cid = command.cid.get();
        let complete = |status, result| Completion::new(cid, status, result).with_sqhd(self.sqhd());
        let sent = match outcome {
            Ok(Reply::Done(result)) => self.core.borrow_mut().respond(token, complete(Status::SUCCESS, result)),
            Ok(Reply::Data(data, result)) => {
                let completion = complete(Status::SUCCESS, result);
                self.core.borrow_mut().send_data(token, data, Some(completion))
            }
            Err(error) => {
                let status = self.log_error(command, &error);
                let (opcode, nsid) = (command.opcode, command.nsid.get());
                tracing::debug!(opcode, nsid, lba = error.lba.map(Lba::get), ?status, "command failed");
                self.core.borrow_mut().respond(token, complete(status, error.result))
            }
        };
        if let Err(error) = sent {
            tracing::debug!(%error, "completion dropped: connection closed");
        }
        self.scheduler.wake();
    }

    fn log_error(&self, command: &Command, error: &CommandError) -> Status {
        match &*self.role.borrow() {
            Role::New => error.status,
            Role::Admin(controller) => controller.log_error(0, command, error),
            Role::Io(controller, queue) => controller.log_error(*queue, command, error),
        }
    }

    fn advance_head(&self) {
        if let Some((head, entries)) = self.sq_head.get() {
            self.sq_head.set(Some(((head + 1) % entries, entries)));
        }
    }

    /// SQHD; FFFFh if flow control is disabled.
    fn sqhd(&self) -> u16 {
        self.sq_head.get().map_or(0xFFFF, |(head, _)| head as u16)
    }
}

/// Returns the lengths of a command's data by direction, and in-capsule data with its CRCs.
fn command_data(
    data: CommandData,
    is_to_controller: bool,
) -> Result<(TransferLengths, Option<BlockCrcs>, Option<Buffer>), DataError> {
    Ok(match data {
        CommandData::Unusable(error) => return Err(error),
        CommandData::None => (TransferLengths { from_host_bytes: 0, to_host_bytes: 0 }, None, None),
        CommandData::InCapsule(Received { buffer, crcs }) => {
            (TransferLengths { from_host_bytes: buffer.len() as u64, to_host_bytes: 0 }, crcs, Some(buffer))
        }
        CommandData::Transport { len_bytes } if is_to_controller => {
            (TransferLengths { from_host_bytes: len_bytes.into(), to_host_bytes: 0 }, None, None)
        }
        CommandData::Transport { len_bytes } => {
            (TransferLengths { from_host_bytes: 0, to_host_bytes: len_bytes.into() }, None, None)
        }
    })
}

/// The direction of a command's data.
fn direction(command: &Command) -> Direction {
    match command.opcode {
        FABRICS_OPCODE => Direction::of(command.nsid.get() as u8),
        opcode => Direction::of(opcode),
    }
}
