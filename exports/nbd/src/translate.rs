//! Translates NBD requests to requests of a device, in one place, and executes those that take several.

use std::cell::Cell;

use sealblock_block::{
    Ability, BlockState, Device, Durability, Error, ErrorKind, Expectations, Outcome, Request, RequestKind, Response,
};
use sealblock_integrity::{Tags, Unsealed};
use sealblock_layers_cross_core::Attached;
use sealblock_protocols_nbd::{Command, ErrorCode, ErrorReply, StatusDescriptor};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::{BlockSize, Extent};

/// Bytes that are trimmed or zeroed at once: a long request of a client that has disconnected ends after the next
/// piece.
const PIECE_BYTES: u64 = 256 << 20;
/// Bytes that are read at once for CACHE.
const CACHE_BYTES: u64 = 1 << 20;

/// The reply to a request that succeeded.
pub(crate) enum Reply {
    Done,
    Data(Slice),
    Status(Vec<StatusDescriptor>),
}

/// The error reply to a request, and the data before the error of a read.
pub(crate) struct FailedRequest {
    pub(crate) reply: ErrorReply,
    pub(crate) data_before: Option<Slice>,
}

impl From<ErrorReply> for FailedRequest {
    fn from(reply: ErrorReply) -> FailedRequest {
        FailedRequest { reply, data_before: None }
    }
}

impl From<ErrorCode> for FailedRequest {
    fn from(code: ErrorCode) -> FailedRequest {
        ErrorReply::from(code).into()
    }
}

/// The device of a chosen export.
pub(crate) struct OpenExport {
    pub(crate) device: Attached,
    /// True if a failed read may return the data before the error.
    pub(crate) can_return_partial: bool,
}

/// What is left to do of a request that was not executed in place.
pub(crate) enum RemainingWork {
    /// All of it.
    Command(Command),
    /// To execute this request of the device.
    Request(Request),
}

impl OpenExport {
    /// Executes a request now if its device need not wait; otherwise returns what is left to do.
    pub(crate) fn try_execute(&self, command: Command) -> Result<Result<Reply, FailedRequest>, RemainingWork> {
        let request = match self.translate(command) {
            Ok(request) => request,
            Err(command) => return Err(RemainingWork::Command(command)),
        };
        match self.device.try_execute(&request) {
            None => Err(RemainingWork::Request(request)),
            // The data before the bad block is read again, which may wait.
            Some(Err(_)) if self.can_return_partial && request.kind() == RequestKind::Read => {
                Err(RemainingWork::Request(request))
            }
            Some(outcome) => Ok(self.reply(request.kind(), outcome)),
        }
    }

    /// Translates a valid request that is one request of the device.
    fn translate(&self, command: Command) -> Result<Request, Command> {
        let extent = |offset, length| self.extent(offset, length).ok();
        Ok(match command {
            Command::Flush => Request::flush(),
            Command::Read { offset, length } => match extent(offset, length.into()) {
                Some(extent) => Request::read(extent, Expectations::NONE),
                None => return Err(command),
            },
            Command::Write { offset, data, fua } => match extent(offset, data.len() as u64) {
                Some(extent) => self.write_of(extent, data, fua),
                None => return Err(Command::Write { offset, data, fua }),
            },
            _ => return Err(command),
        })
    }

    fn reply(&self, kind: RequestKind, outcome: Outcome) -> Result<Reply, FailedRequest> {
        match outcome {
            Ok(Response::Data(sealed)) => Ok(Reply::Data(sealed.joined_data())),
            // Only a broken device returns another response to a read.
            Ok(_) if kind == RequestKind::Read => Err(ErrorCode::Io.into()),
            Ok(_) => Ok(Reply::Done),
            Err(error) => Err(self.error_reply(&error).into()),
        }
    }

    /// Executes what is left of a request. A long one ends early once `is_gone`.
    pub(crate) async fn execute(&self, work: RemainingWork, is_gone: &Cell<bool>) -> Result<Reply, FailedRequest> {
        match work {
            RemainingWork::Request(request) => match request.kind() {
                RequestKind::Read => self.read(request.extents.one()).await,
                kind => self.reply(kind, self.device.execute(request).await),
            },
            RemainingWork::Command(command) => self.execute_steps(command, is_gone).await,
        }
    }

    async fn execute_steps(&self, command: Command, is_gone: &Cell<bool>) -> Result<Reply, FailedRequest> {
        match command {
            // Only an invalid extent leads here.
            Command::Read { .. } | Command::Write { .. } => Err(ErrorCode::Invalid.into()),
            Command::Flush => self.run_request(Request::flush()).await.map(|_| Reply::Done),
            Command::Trim { offset, length, fua } => {
                let discard = |extent| Request::discard([extent]);
                self.in_pieces(offset, length, PIECE_BYTES, is_gone, discard).await?;
                // One Flush behind all pieces, by this client: so it learns of flushes of others that failed in between.
                if fua { self.run_request(Request::flush()).await.map(|_| Reply::Done) } else { Ok(Reply::Done) }
            }
            Command::Cache { offset, length } => {
                let read = |extent| Request::read(extent, Expectations::NONE);
                self.in_pieces(offset, length.into(), CACHE_BYTES, is_gone, read).await
            }
            Command::WriteZeroes { fast: true, no_hole, .. } if no_hole || !self.zeroes_fast() => {
                Err(ErrorCode::NotSupported.into())
            }
            Command::WriteZeroes { offset, length, fua, no_hole, .. } => {
                let (may_unmap, durability) = (!no_hole, durability(fua));
                let zero = |extent| Request::write_zeroes(extent, may_unmap, durability);
                self.in_pieces(offset, length, PIECE_BYTES, is_gone, zero).await
            }
            Command::BlockStatus { offset, length, one } => self.status(offset, length, one, is_gone).await,
        }
    }

    /// True if zeroes cost less than writing them: only where the device deallocates the blocks.
    fn zeroes_fast(&self) -> bool {
        let abilities = self.device.abilities();
        abilities.write_zeroes == Ability::Native && abilities.unmap_zeroes
    }

    pub(crate) fn extent(&self, offset: u64, length: u64) -> Result<Extent, FailedRequest> {
        let shift = self.block_shift();
        Extent::from_raw(offset >> shift, length >> shift).map_err(|_| ErrorCode::Invalid.into())
    }

    pub(crate) fn block_shift(&self) -> u32 {
        self.device.geometry().block_size.shift()
    }

    fn error_reply(&self, error: &Error) -> ErrorReply {
        of_error(error, self.device.geometry().block_size)
    }

    pub(crate) async fn run_request(&self, request: Request) -> Result<Response, FailedRequest> {
        self.device.execute(request).await.map_err(|error| self.error_reply(&error).into())
    }

    async fn read(&self, extent: Extent) -> Result<Reply, FailedRequest> {
        match self.device.execute(Request::read(extent, Expectations::NONE)).await {
            Err(error) => {
                let reply = self.error_reply(&error);
                let before = self.read_before(extent, reply.offset).await;
                Err(FailedRequest { reply, data_before: before })
            }
            outcome => self.reply(RequestKind::Read, outcome),
        }
    }

    /// Reads the data of a failed read again, up to the first bad block. Best effort: the read has failed anyway.
    async fn read_before(&self, asked: Extent, damaged: Option<u64>) -> Option<Slice> {
        let size = self.device.geometry().block_size;
        let offset = asked.start().get() << size.shift();
        let length = damaged?.checked_sub(offset).filter(|length| (1..asked.bytes(size)).contains(length))?;
        if !self.can_return_partial {
            return None;
        }
        let extent = self.extent(offset, length).ok()?;
        match self.device.execute(Request::read(extent, Expectations::NONE)).await {
            Ok(Response::Data(sealed)) => Some(sealed.joined_data()),
            _ => None,
        }
    }

    fn write_of(&self, extent: Extent, data: Buffer, fua: bool) -> Request {
        let geometry = self.device.geometry();
        let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: extent.start().get() };
        let data = Unsealed::new(data.freeze(), geometry.block_size, geometry.protection, tags);
        Request::write(extent, data, durability(fua))
    }

    async fn in_pieces(
        &self,
        offset: u64,
        length: u64,
        piece_bytes: u64,
        is_gone: &Cell<bool>,
        request: impl Fn(Extent) -> Request,
    ) -> Result<Reply, FailedRequest> {
        let end = offset + length;
        let mut at = offset;
        while at < end && !is_gone.get() {
            let piece = piece_bytes.min(end - at);
            self.run_request(request(self.extent(at, piece)?)).await?;
            at += piece;
        }
        // A client that has disconnected gets no reply.
        if at < end { Err(ErrorCode::Shutdown.into()) } else { Ok(Reply::Done) }
    }
}

fn durability(fua: bool) -> Durability {
    if fua { Durability::ForceUnitAccess } else { Durability::Volatile }
}

/// Bytes of a device in one block status request.
const WINDOW_BYTES: u64 = 64 << 20;
/// The maximum number of such requests for one reply. Clients continue after its end.
const WINDOWS: usize = 64;
/// The maximum number of runs of one reply.
const RUNS: usize = 1024;
/// NBD_STATE_HOLE and NBD_STATE_ZERO. A hole of a device always reads as zeroes, and a device reports no other zeroes.
const HOLE: u32 = 3;

impl OpenExport {
    /// Returns the status of the bytes from `offset` on: of all that was requested, or of enough for one reply.
    pub(crate) async fn status(
        &self,
        offset: u64,
        length: u64,
        one: bool,
        is_gone: &Cell<bool>,
    ) -> Result<Reply, FailedRequest> {
        let max_runs = if one { 1 } else { RUNS };
        let (mut at, end) = (offset, offset + length);
        let mut runs: Vec<StatusDescriptor> = Vec::new();
        for _ in 0..WINDOWS {
            // One run more than the limit proves that the last one is complete.
            if at == end || runs.len() > max_runs || is_gone.get() {
                break;
            }
            let window = WINDOW_BYTES.min(end - at);
            self.window(at, window, &mut runs).await?;
            at += window;
        }
        runs.truncate(max_runs);
        if runs.is_empty() { Err(ErrorCode::Shutdown.into()) } else { Ok(Reply::Status(runs)) }
    }

    /// Appends the runs of a window.
    async fn window(&self, offset: u64, length: u64, runs: &mut Vec<StatusDescriptor>) -> Result<(), FailedRequest> {
        let extent = self.extent(offset, length)?;
        let Response::BlockStatus(found) = self.run_request(Request::block_status(extent)).await? else {
            return Err(ErrorCode::Io.into());
        };
        let shift = self.block_shift();
        for run in found {
            let length = u64::from(run.blocks.get()) << shift;
            let status = match run.state {
                BlockState::Allocated => 0,
                BlockState::Hole => HOLE,
            };
            match runs.last_mut() {
                Some(last) if last.status == status => last.length += length,
                _ => runs.push(StatusDescriptor { length, status }),
            }
        }
        Ok(())
    }
}

/// Returns the error reply for a device's error, with the offset of the first bad block if it is about one.
pub(crate) fn of_error(error: &Error, size: BlockSize) -> ErrorReply {
    let first = error.bad_blocks().map(|bad_blocks| bad_blocks.first().lba.get());
    let offset = first.and_then(|lba| lba.checked_mul(size.bytes() as u64));
    ErrorReply { code: code(error.kind()), offset, message: error.kind().to_string() }
}

fn code(kind: &ErrorKind) -> ErrorCode {
    match kind {
        ErrorKind::Integrity(_)
        | ErrorKind::Expectation { .. }
        | ErrorKind::Miscompare { .. }
        | ErrorKind::Media { .. }
        | ErrorKind::MayBeOlder(_)
        | ErrorKind::Unreachable { .. } => ErrorCode::Io,
        ErrorKind::NoSpace { .. } => ErrorCode::NoSpace,
        ErrorKind::ReadOnly => ErrorCode::NotPermitted,
        // ENOTSUP is reserved for zeroes that would not be fast ("Error values").
        ErrorKind::Range { .. } | ErrorKind::Limit { .. } | ErrorKind::Absent(_) => ErrorCode::Invalid,
    }
}

#[cfg(test)]
mod tests {
    use sealblock_block::{BadBlock, BadBlocks, RequestKind};
    use sealblock_units::Lba;

    use super::*;

    #[test]
    fn damage_names_its_first_block() {
        let bad_blocks = BadBlocks::new(vec![BadBlock::media(Lba::new(9)), BadBlock::media(Lba::new(7))]).unwrap();
        let reply = of_error(&Error::from(bad_blocks), BlockSize::B4096);
        assert_eq!((reply.code, reply.offset), (ErrorCode::Io, Some(7 * 4096)));
    }

    #[test]
    fn other_failures_have_their_errors() {
        let reason = String::new;
        for (kind, error) in [
            (ErrorKind::Media { reason: reason() }, ErrorCode::Io),
            (ErrorKind::Unreachable { reason: reason() }, ErrorCode::Io),
            (ErrorKind::NoSpace { reason: reason() }, ErrorCode::NoSpace),
            (ErrorKind::ReadOnly, ErrorCode::NotPermitted),
            (ErrorKind::Absent(RequestKind::Discard), ErrorCode::Invalid),
        ] {
            let reply = of_error(&kind.into(), BlockSize::B4096);
            assert_eq!((reply.code, reply.offset), (error, None));
        }
    }
}
