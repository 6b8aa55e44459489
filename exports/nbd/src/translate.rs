//! Translates NBD requests to requests of a device, in one place, and executes those that take several.

use std::cell::Cell;
use std::time::Instant;

use sealblock_block::{
    BlockState, Device, Durability, Error, ErrorKind, Expectations, Outcome, Request, RequestKind, Response,
};
use sealblock_integrity::{Tags, Unsealed};
use sealblock_layers_cross_core::Attached;
use sealblock_protocols_nbd::{Command, ErrorCode, ErrorReply, StatusDescriptor};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{now, submitted};
use sealblock_units::{BlockSize, Extent};

/// Bytes that are trimmed or zeroed at once. After each piece other tasks run: others wait for one piece of each long
/// request that has started, and a request of a client that has disconnected ends after the next piece.
pub(crate) const PIECE_BYTES: u64 = 16 << 20;
/// The most that a request without data counts against the server's memory for work, although it needs less. It limits
/// how many long requests start at a time.
const MAX_WORK_BYTES: u64 = 1 << 20;
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

impl FailedRequest {
    /// The same error for a request from this offset on, which may begin within the bad block.
    fn from(mut self, offset: u64) -> FailedRequest {
        self.reply.offset = self.reply.offset.map(|at| at.max(offset));
        self
    }
}

/// The device of a chosen export.
pub(crate) struct OpenExport {
    pub(crate) device: Attached,
    /// True if a failed read may return the data before the error.
    pub(crate) can_return_partial: bool,
}

/// What remains to be done of a request that was not executed in place.
pub(crate) enum RemainingWork {
    /// Everything.
    Command(Command),
    /// Execute this request of the device.
    Request(Request),
}

impl RemainingWork {
    /// What it counts against the memory for work: more than nothing if it has no data, because then its client decides
    /// how long it takes.
    pub(crate) fn work_bytes(&self) -> usize {
        let RemainingWork::Command(command) = self else { return 0 };
        match command {
            Command::Trim { length, .. }
            | Command::WriteZeroes { length, .. }
            | Command::BlockStatus { length, .. } => (*length).min(MAX_WORK_BYTES) as usize,
            Command::Cache { length, .. } => u64::from(*length).min(MAX_WORK_BYTES) as usize,
            Command::Read { .. } | Command::Write { .. } | Command::Flush => 0,
        }
    }
}

impl OpenExport {
    /// Executes a request now if its device need not wait; otherwise returns what remains to be done.
    pub(crate) fn try_execute(
        &self,
        command: Command,
        arrived: Instant,
    ) -> Result<Result<Reply, FailedRequest>, RemainingWork> {
        let request = match self.translate(command) {
            Ok(request) => request,
            Err(command) => return Err(RemainingWork::Command(command)),
        };
        match self.device.try_execute_arrived(&request, arrived) {
            None => Err(RemainingWork::Request(request)),
            // The data before the bad block is read again, which may wait.
            Some(Err(_)) if self.can_return_partial && request.kind() == RequestKind::Read => {
                Err(RemainingWork::Request(request))
            }
            Some(outcome) => Ok(self.reply(request.kind(), outcome)),
        }
    }

    /// Translates a valid request that corresponds to one request of the device.
    fn translate(&self, command: Command) -> Result<Request, Command> {
        let extent = |offset, length| self.extent(offset, length).ok();
        Ok(match command {
            Command::Flush => Request::flush(),
            Command::Read { offset, length } => match extent(offset, length.into()) {
                Some(extent) => Request::read(extent, Expectations::NONE),
                None => return Err(command),
            },
            Command::Write { offset, data, fua } => match extent(offset, data.len() as u64) {
                Some(extent) => self.write_of(extent, data.freeze(), fua),
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

    /// Executes what remains of a request. A long one ends early once `is_gone` is set.
    pub(crate) async fn execute(
        &self,
        work: RemainingWork,
        arrived: Instant,
        is_gone: &Cell<bool>,
    ) -> Result<Reply, FailedRequest> {
        match work {
            RemainingWork::Request(request) => match request.kind() {
                RequestKind::Read => {
                    let (extent, size) = (request.extents.one(), self.device.geometry().block_size);
                    self.read(extent.start().get() << size.shift(), extent.bytes(size), arrived).await
                }
                kind => self.reply(kind, self.device.execute_arrived(request, arrived).await),
            },
            RemainingWork::Command(command) => self.execute_steps(command, arrived, is_gone).await,
        }
    }

    async fn execute_steps(
        &self,
        command: Command,
        arrived: Instant,
        is_gone: &Cell<bool>,
    ) -> Result<Reply, FailedRequest> {
        match command {
            // These begin or end within a block.
            Command::Read { offset, length } => self.read(offset, length.into(), arrived).await,
            Command::Write { offset, data, fua } => {
                let written = self.write_bytes(offset, data.freeze(), fua).await;
                written.map_err(|failed| failed.from(offset))
            }
            Command::Flush => self.run_request(Request::flush()).await.map(|_| Reply::Done),
            Command::Trim { offset, length, fua } => {
                let discard = |extent| Request::discard([extent]);
                let (offset, length) = self.whole_blocks(offset, length);
                self.in_pieces(offset, length, PIECE_BYTES, is_gone, discard).await?;
                // One Flush by this client after all pieces, so that it also reports failed flushes of others in
                // between.
                if fua { self.run_request(Request::flush()).await.map(|_| Reply::Done) } else { Ok(Reply::Done) }
            }
            Command::Cache { offset, length } => {
                let read = |extent| Request::read(extent, Expectations::NONE);
                let (start, covered) = self.covering(offset, length.into());
                let cached = self.in_pieces(start, covered, CACHE_BYTES, is_gone, read).await;
                cached.map_err(|failed| failed.from(offset))
            }
            // Parts of blocks must be written.
            Command::WriteZeroes { offset, length, fast: true, no_hole, .. }
                if no_hole || !self.zeroes_fast() || self.covering(offset, length) != (offset, length) =>
            {
                Err(ErrorCode::NotSupported.into())
            }
            Command::WriteZeroes { offset, length, fua, no_hole, .. } => {
                let zeroed = self.zero_bytes((offset, length), !no_hole, fua, is_gone).await;
                zeroed.map_err(|failed| failed.from(offset))
            }
            Command::BlockStatus { offset, length, one } => self.status(offset, length, one, is_gone).await,
        }
    }

    /// True if zeroing costs less than writing: only if the device deallocates the blocks.
    fn zeroes_fast(&self) -> bool {
        let abilities = self.device.abilities();
        abilities.is_native(RequestKind::WriteZeroes) && abilities.unmap_zeroes
    }

    /// The blocks with exactly these bytes.
    ///
    /// # Errors
    /// If there are none, or if they begin or end within a block.
    pub(crate) fn extent(&self, offset: u64, length: u64) -> Result<Extent, FailedRequest> {
        let shift = self.block_shift();
        if (offset | length).trailing_zeros() < shift {
            return Err(ErrorCode::Invalid.into());
        }
        Extent::from_raw(offset >> shift, length >> shift).map_err(|_| ErrorCode::Invalid.into())
    }

    pub(crate) fn block_shift(&self) -> u32 {
        self.device.geometry().block_size.shift()
    }

    pub(crate) fn error_reply(&self, error: &Error) -> ErrorReply {
        of_error(error, self.device.geometry().block_size)
    }

    pub(crate) async fn run_request(&self, request: Request) -> Result<Response, FailedRequest> {
        self.device.execute(request).await.map_err(|error| self.error_reply(&error).into())
    }

    async fn read(&self, offset: u64, length: u64, arrived: Instant) -> Result<Reply, FailedRequest> {
        match self.read_bytes((offset, length), arrived).await {
            Err(reply) => {
                let data_before = self.read_before((offset, length), reply.offset).await;
                Err(FailedRequest { reply, data_before }.from(offset))
            }
            Ok(data) => Ok(Reply::Data(data)),
        }
    }

    /// Reads the blocks that contain these bytes.
    async fn read_bytes(&self, (offset, length): (u64, u64), arrived: Instant) -> Result<Slice, ErrorReply> {
        let (start, covered) = self.covering(offset, length);
        let extent = self.extent(start, covered).map_err(|failed| failed.reply)?;
        match self.device.execute_arrived(Request::read(extent, Expectations::NONE), arrived).await {
            Ok(Response::Data(sealed)) => {
                let from = (offset - start) as usize;
                Ok(sealed.joined_data().slice(from..from + length as usize))
            }
            // Only a broken device returns another response to a read.
            Ok(_) => Err(ErrorCode::Io.into()),
            Err(error) => Err(self.error_reply(&error)),
        }
    }

    /// Reads the data of a failed read again, up to the first bad block. This is done if possible; the read has failed
    /// in any case.
    async fn read_before(&self, (offset, asked): (u64, u64), damaged: Option<u64>) -> Option<Slice> {
        let length = damaged?.checked_sub(offset).filter(|length| (1..asked).contains(length))?;
        if !self.can_return_partial {
            return None;
        }
        self.read_bytes((offset, length), now()).await.ok()
    }

    pub(crate) fn write_of(&self, extent: Extent, data: Slice, fua: bool) -> Request {
        let geometry = self.device.geometry();
        let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: extent.start().get() };
        let data = Unsealed::new(data, geometry.block_size, geometry.protection, tags);
        Request::write(extent, data, durability(fua))
    }

    pub(crate) async fn in_pieces(
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
            if at < end {
                submitted().await;
            }
        }
        // A client that has disconnected gets no reply.
        if at < end { Err(ErrorCode::Shutdown.into()) } else { Ok(Reply::Done) }
    }
}

pub(crate) fn durability(fua: bool) -> Durability {
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
    /// Returns the status of the bytes from `offset` on: of all that was requested, or of as many as fit in one reply.
    pub(crate) async fn status(
        &self,
        offset: u64,
        length: u64,
        one: bool,
        is_gone: &Cell<bool>,
    ) -> Result<Reply, FailedRequest> {
        let max_runs = if one { 1 } else { RUNS };
        // The reported status ends with a block, which may be after the end of the request.
        let (start, covered) = self.covering(offset, length);
        let (mut at, end) = (start, start + covered);
        let mut runs: Vec<StatusDescriptor> = Vec::new();
        for _ in 0..WINDOWS {
            // One run more than the limit shows that the last one is complete.
            if at == end || runs.len() > max_runs || is_gone.get() {
                break;
            }
            let window = WINDOW_BYTES.min(end - at);
            self.window(at, window, &mut runs).await?;
            at += window;
            submitted().await;
        }
        runs.truncate(max_runs);
        // A run consists of whole blocks, so the first one contains the first requested byte.
        runs.iter_mut().take(1).for_each(|first| first.length -= offset - start);
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

/// Returns the error reply for a device's error, with the offset of the first bad block if it has one.
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
