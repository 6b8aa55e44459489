//! The way of a command: checked, its data fetched, carried out, answered.
//!
//! Commands whose data exceeds the bytes allowed in flight wait in order, and go on when others have left.

use std::rc::Rc;

use sealblock_protocols_nvme::{Command, Completion, Direction, FABRICS_OPCODE, Fuse, Invalid, Status, StatusCode};
use sealblock_protocols_nvme_tcp::BlockCrcs;
use sealblock_protocols_nvme_tcp::target::{CommandData, DataError, Received, Token};
use sealblock_runtime_memory::Buffer;
use sealblock_units::Lba;

use crate::admin;
use crate::command_error::CommandError;
use crate::commands::{annex, later};
use crate::connection::{Connection, Reply, Role};
use crate::io::{IoRequest, TransferLengths};
use crate::slots::{CommandResult, NoSlot};

/// The most data that a command which is no I/O command may bring, in bytes.
const CONTROL_BYTES: u64 = 8192;

/// A command that was checked.
pub(crate) struct PreparedCommand {
    command: Command,
    /// `None` for Fabrics and admin commands.
    job: Option<IoRequest>,
}

fn read_bytes(job: &Option<IoRequest>) -> u64 {
    job.as_ref().map_or(0, IoRequest::read_bytes)
}

/// A command that waits for room.
pub(crate) enum Waiting {
    /// Its data is to be fetched.
    Fetch(Token, PreparedCommand, usize),
    /// It reads.
    Read(Token, PreparedCommand),
}

impl Waiting {
    pub(crate) fn token(&self) -> Token {
        match self {
            Waiting::Fetch(token, ..) | Waiting::Read(token, _) => *token,
        }
    }
}

impl Connection {
    pub(crate) fn on_command(self: &Rc<Self>, token: Token, command: Command, data: CommandData) {
        self.advance_head();
        if !self.fuse(token, &command) {
            return;
        }
        let is_to_controller = direction(&command) == Direction::ToController;
        let (room, sums, received) = match brought(data, is_to_controller) {
            Ok(brought) => brought,
            Err(error) => return self.refuse(token, &command, error.status_code().into()),
        };
        let mut job = match self.prepare(&command, room) {
            Ok(job) => job,
            Err(refusal) => return self.refuse(token, &command, refusal),
        };
        if let (Some(job), Some(sums)) = (&mut job, sums) {
            job.set_sums(sums);
        }
        if is_to_controller && received.is_none() && room.brings > 0 {
            return self.wait(Waiting::Fetch(token, PreparedCommand { command, job }, room.brings as usize));
        }
        match read_bytes(&job) {
            0 => self.carry_out(token, &command, job, received, room.wants),
            bytes if self.waiting.borrow().is_empty() && self.may_read(bytes) => {
                self.begin_read(token, &command, job, bytes);
            }
            _ => self.waiting.borrow_mut().push_back(Waiting::Read(token, PreparedCommand { command, job })),
        }
    }

    pub(crate) fn on_data(self: &Rc<Self>, token: Token, data: Result<Received, DataError>) {
        let Some(PreparedCommand { command, mut job }) = self.take_fetching(token) else { return };
        match data {
            Ok(Received { buffer, crcs: sums }) => {
                if let (Some(job), Some(sums)) = (&mut job, sums) {
                    job.set_sums(sums);
                }
                self.carry_out(token, &command, job, Some(buffer), 0);
            }
            Err(error) => self.refuse(token, &command, error.status_code().into()),
        }
    }

    /// Refuses what cannot be carried out, before any data is fetched.
    fn prepare(&self, command: &Command, room: TransferLengths) -> Result<Option<IoRequest>, CommandError> {
        match &*self.role.borrow() {
            // There are fused pairs of I/O commands only.
            Role::New | Role::Admin(_) if command.fuse() != Fuse::Normal => Err(Invalid::field("FUSE", 0, 8).into()),
            Role::Io(controller, _) if command.opcode != FABRICS_OPCODE => {
                if !controller.is_ready() {
                    return Err(StatusCode::COMMAND_SEQUENCE_ERROR.into());
                }
                self.line.note_traffic();
                IoRequest::prepare(controller, &self.target.limits, command, room).map(Some)
            }
            Role::Admin(controller) if annex::brings(controller, command).is_some_and(|bytes| bytes == room.brings) => {
                Ok(None)
            }
            _ if room.brings > CONTROL_BYTES || !room.brings.is_multiple_of(4) => {
                Err(StatusCode::DATA_SGL_LENGTH_INVALID.into())
            }
            _ => Ok(None),
        }
    }

    fn wait(self: &Rc<Self>, waiting: Waiting) {
        if self.waiting.borrow().is_empty() && self.has_room(&waiting) {
            return self.admit(waiting);
        }
        self.waiting.borrow_mut().push_back(waiting);
    }

    /// Lets commands go on, in order, as far as there is room.
    pub(crate) fn admit_waiting(self: &Rc<Self>) {
        loop {
            let next = self.waiting.borrow().front().is_some_and(|waiting| self.has_room(waiting));
            let next = if next { self.waiting.borrow_mut().pop_front() } else { None };
            match next {
                None => return,
                Some(waiting) => self.admit(waiting),
            }
        }
    }

    fn admit(self: &Rc<Self>, waiting: Waiting) {
        match waiting {
            Waiting::Fetch(token, task, len) => self.fetch(token, task, len),
            Waiting::Read(token, PreparedCommand { command, job }) => {
                let bytes = read_bytes(&job);
                self.begin_read(token, &command, job, bytes);
            }
        }
    }

    fn begin_read(self: &Rc<Self>, token: Token, command: &Command, job: Option<IoRequest>, bytes: u64) {
        self.read_bytes.set(self.read_bytes.get() + bytes);
        self.carry_out(token, command, job, None, 0);
    }

    fn has_room(&self, waiting: &Waiting) -> bool {
        match waiting {
            Waiting::Fetch(_, _, len) => self.may_fetch(*len),
            Waiting::Read(_, task) => self.may_read(read_bytes(&task.job)),
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

    /// Bytes of data that came or are fetched, and bytes of data that are read or not sent yet.
    fn bytes_in_flight(&self) -> (usize, usize) {
        let core = self.core.borrow();
        let sent = core.payload_bytes_sent() - self.sending_bytes.get();
        let unsent = self.read_bytes.get().saturating_sub(sent);
        (core.bytes_in_flight(), unsent as usize)
    }

    /// Tells the other connections what this one has in flight now.
    pub(crate) fn settle_share(&self) {
        let (write_bytes, read_bytes) = self.bytes_in_flight();
        self.share.settle(write_bytes + read_bytes);
    }

    fn fetch(self: &Rc<Self>, token: Token, task: PreparedCommand, len: usize) {
        let shape = task.job.as_ref().and_then(IoRequest::shape);
        let accepted = self.core.borrow_mut().fetch_data(token, self.pool.take(len), shape);
        if accepted.is_err() {
            return self.refuse(token, &task.command, StatusCode::DATA_SGL_LENGTH_INVALID.into());
        }
        let mut fetching = self.fetching.borrow_mut();
        if fetching.len() <= token.place() {
            fetching.resize_with(token.place() + 1, || None);
        }
        fetching[token.place()] = Some((token, task));
        drop(fetching);
        self.ring();
    }

    pub(crate) fn take_fetching(&self, token: Token) -> Option<PreparedCommand> {
        let mut fetching = self.fetching.borrow_mut();
        let place = fetching.get_mut(token.place())?;
        place.take_if(|(of, _)| *of == token).map(|(_, task)| task)
    }

    fn carry_out(
        self: &Rc<Self>,
        token: Token,
        command: &Command,
        job: Option<IoRequest>,
        data: Option<Buffer>,
        room: u64,
    ) {
        let Some(job) = job else {
            let data = data.unwrap_or_default();
            if later::takes(self, token, command, &data, room as usize) {
                return;
            }
            let outcome = admin::run(self, command, &data, room as usize);
            return self.finish(token, command, outcome);
        };
        if self.is_half(command) {
            return self.fused_ready(token, job, data.unwrap_or_default());
        }
        let work = match job.at_once(data.unwrap_or_default()) {
            Ok(outcome) => return self.conclude(token, command, job.read_bytes(), outcome),
            Err(work) => work,
        };
        match self.slots.begin((token, *command), job, work) {
            Ok(None) => {}
            Ok(Some(ended)) => self.on_ended(ended),
            // As many slots as commands in flight; when the core forgot those of a closed connection, nobody waits.
            Err(NoSlot) => self.finish(token, command, Err(StatusCode::INTERNAL_ERROR.into())),
        }
    }

    pub(crate) fn on_ended(&self, ended: CommandResult) {
        self.conclude(ended.token, &ended.command, ended.read_bytes, ended.outcome);
    }

    fn conclude(&self, token: Token, command: &Command, read_bytes: u64, outcome: Result<Reply, CommandError>) {
        if outcome.is_err() {
            self.read_bytes.set(self.read_bytes.get().saturating_sub(read_bytes));
        }
        // A host counts answers as signs of life as well, so they must count here.
        self.line.note_traffic();
        self.finish(token, command, outcome);
    }

    /// Answers a command that is not carried out; half of a fused pair is answered with the other.
    fn refuse(self: &Rc<Self>, token: Token, command: &Command, refusal: CommandError) {
        match self.is_half(command) {
            true => self.fused_refused(token, refusal),
            false => self.finish(token, command, Err(refusal)),
        }
    }

    /// Answers a command. If the connection is over, nobody waits for the answer.
    pub(crate) fn finish(&self, token: Token, command: &Command, outcome: Result<Reply, CommandError>) {
        let cid = command.cid.get();
        let complete = |status, result| Completion::new(cid, status, result).with_sqhd(self.sqhd());
        let answered = match outcome {
            Ok(Reply::Done(result)) => self.core.borrow_mut().respond(token, complete(Status::SUCCESS, result)),
            Ok(Reply::Data(data, result)) => {
                let completion = complete(Status::SUCCESS, result);
                self.core.borrow_mut().send_data(token, data, Some(completion))
            }
            Err(refusal) => {
                let status = self.log(command, &refusal);
                let (opcode, nsid) = (command.opcode, command.nsid.get());
                tracing::debug!(opcode, nsid, lba = refusal.lba.map(Lba::get), ?status, "a command failed");
                self.core.borrow_mut().respond(token, complete(status, refusal.result))
            }
        };
        if let Err(error) = answered {
            tracing::debug!(%error, "a command was not answered");
        }
        self.ring();
    }

    fn log(&self, command: &Command, refusal: &CommandError) -> Status {
        match &*self.role.borrow() {
            Role::New => refusal.status,
            Role::Admin(controller) => controller.log(0, command, refusal),
            Role::Io(controller, queue) => controller.log(*queue, command, refusal),
        }
    }

    fn advance_head(&self) {
        if let Some((head, entries)) = self.head.get() {
            self.head.set(Some(((head + 1) % entries, entries)));
        }
    }

    /// SQHD: FFFFh with flow control off.
    fn sqhd(&self) -> u16 {
        self.head.get().map_or(0xFFFF, |(head, _)| head as u16)
    }
}

/// What a capsule says of its command's data: its length by way, and the data if it came along, with its sums.
fn brought(
    data: CommandData,
    is_to_controller: bool,
) -> Result<(TransferLengths, Option<BlockCrcs>, Option<Buffer>), DataError> {
    Ok(match data {
        CommandData::Unusable(error) => return Err(error),
        CommandData::None => (TransferLengths { brings: 0, wants: 0 }, None, None),
        CommandData::InCapsule(Received { buffer, crcs: sums }) => {
            (TransferLengths { brings: buffer.len() as u64, wants: 0 }, sums, Some(buffer))
        }
        CommandData::Transport { len_bytes } if is_to_controller => {
            (TransferLengths { brings: len_bytes.into(), wants: 0 }, None, None)
        }
        CommandData::Transport { len_bytes } => (TransferLengths { brings: 0, wants: len_bytes.into() }, None, None),
    })
}

/// Which way a command's data goes.
fn direction(command: &Command) -> Direction {
    match command.opcode {
        FABRICS_OPCODE => Direction::of(command.nsid.get() as u8),
        opcode => Direction::of(opcode),
    }
}
