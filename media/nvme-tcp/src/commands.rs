//! Executes single commands on a namespace, and sends them again if that may help; and Flush, which covers all of them.

use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{
    BadBlock, BadBlocks, Coverage, Error, ErrorKind, Expectations, Outcome, RequestKind, Response, Unchecked,
    WhyUnchecked, WriteSet,
};
use sealblock_integrity::Sealed;
use sealblock_media_nvme::{
    Admin as _, CommandContext, CompletedCommand as Completed, Namespace, NamespaceProfile, bad_blocks, failure,
    may_be_sent_again,
};
use sealblock_protocols_nvme::admin::Cns;
use sealblock_protocols_nvme::extensions::Extensions;
use sealblock_protocols_nvme::logs::ErrorEntry;
use sealblock_protocols_nvme::nvm::{BlockCommand, IoCommand, ProtectionInfo};
use sealblock_protocols_nvme::{Command, Invalid, Status, StatusCode};
use sealblock_protocols_nvme_tcp::host::HostData;
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_transport::{Attempt, Sending};
use sealblock_units::Extent;

use crate::block_codec::BlockCodec;
use crate::damage;
use crate::options::add;
use crate::queue::{CommandResult, Queue};
use crate::remote_namespace::ReconnectingSession;
use crate::session::Session;

/// Pause before a retry if the status does not request one by CRD.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// A command with a final completion, and the session and queue that executed it.
pub(crate) struct CompletedCommand {
    pub(crate) session: Rc<Session>,
    /// [`FlushEpochs::epoch`](sealblock_block::FlushEpochs::epoch) of that session.
    pub(crate) epoch: u64,
    pub(crate) queue: u16,
    pub(crate) result: CommandResult,
}

impl Completed for CompletedCommand {
    fn status(&self) -> Status {
        self.result.completion.status()
    }
}

/// Executes block requests on one namespace.
pub(crate) struct Io {
    pub(crate) session: Rc<ReconnectingSession>,
    pub(crate) codec: BlockCodec,
}

impl Io {
    pub(crate) fn nsid(&self) -> u32 {
        self.session.profile.nsid
    }

    pub(crate) fn encode(&self, command: IoCommand) -> Result<Command, Error> {
        let unfit = |invalid: Invalid| ErrorKind::Media { reason: format!("no command says that: {invalid}") }.into();
        command.encode(self.nsid()).map_err(unfit)
    }

    /// Executes an idempotent I/O command: again on a new session when the connection is lost, and again when its
    /// status allows it. The returned completion is final, success or not.
    pub(crate) async fn execute(
        &self,
        build: impl Fn(&Session) -> Result<(Command, HostData), Error>,
    ) -> Result<CompletedCommand, Error> {
        self.execute_change(WriteSet::default(), build).await
    }

    /// The same with a command that changes `write_set`.
    async fn execute_change(
        &self,
        write_set: WriteSet,
        build: impl Fn(&Session) -> Result<(Command, HostData), Error>,
    ) -> Result<CompletedCommand, Error> {
        self.execute_on(Session::pick, write_set, build).await
    }

    /// The same with an admin command.
    pub(crate) async fn execute_admin(
        &self,
        write_set: WriteSet,
        build: impl Fn(&Session) -> Result<(Command, HostData), Error>,
    ) -> Result<CompletedCommand, Error> {
        self.execute_on(|session| session.controller.admin.queue(), write_set, build).await
    }

    async fn execute_on(
        &self,
        pick: fn(&Session) -> &Rc<Queue>,
        write_set: WriteSet,
        build: impl Fn(&Session) -> Result<(Command, HostData), Error>,
    ) -> Result<CompletedCommand, Error> {
        let mut retries = 0;
        let attempt = async |session: Rc<Session>, Sending { epoch, change }| {
            let request = build(&session)?;
            let queue = pick(&session);
            let id = queue.core().id;
            let result = queue.execute_change(request, change).await?;
            let status = result.completion.status();
            if status.is_success() || !may_be_sent_again(status) || retries >= self.session.config.options.retries {
                return Ok(Attempt::Done(CompletedCommand { session, epoch, queue: id, result }));
            }
            retries += 1;
            add(&self.session.counters.retries, 1);
            Ok(Attempt::Again(retry_pause(&session, status)))
        };
        let completed = self.session.execute(write_set, attempt).await?;
        if completed.status().code() == StatusCode::INVALID_FIELD && self.is_taken_away(&completed.session).await {
            let reason = format!("the target has no namespace {} any more", self.nsid());
            return Err(ErrorKind::Unreachable { reason }.into());
        }
        Ok(completed)
    }

    /// True if the namespace is inactive now. Its status, Invalid Field, is also the status of a command that the
    /// target does not support, and only the former may be temporary.
    async fn is_taken_away(&self, session: &Session) -> bool {
        match session.controller.admin.identify(Cns::Namespace, self.nsid()).await {
            Ok(page) => page.iter().all(|byte| *byte == 0),
            Err(_) => false,
        }
    }
}

impl Io {
    pub(crate) async fn flush(&self) -> Outcome {
        let command = self.encode(IoCommand::Flush)?;
        let mark = std::cell::Cell::new(0);
        let build = |_: &Session| {
            mark.set(self.session.flush_epochs.flush_started()?);
            Ok((command, HostData::None))
        };
        let completed = self.execute(build).await?;
        if !completed.status().is_success() {
            return Err(self.failed(RequestKind::Flush, None, &completed));
        }
        self.session.flush_epochs.flush_completed(completed.epoch, mark.get());
        Ok(Response::Done)
    }

    /// Coverage of checks by a target with these extensions: whether they compare guards.
    pub(crate) fn reach(&self, extensions: Extensions) -> Coverage {
        let profile = &self.session.profile;
        let is_plain = profile.pi_mode.kept().is_none();
        Coverage::of(profile.checks_seals() || is_plain && extensions.contains(Extensions::SEALS))
    }
}

impl Namespace for Io {
    type Completed = CompletedCommand;

    const LOG_NAMES_COMMANDS: bool = true;

    fn profile(&self) -> &NamespaceProfile {
        &self.session.profile
    }

    async fn read_once(&self, extent: Extent, protection: ProtectionInfo) -> Result<CompletedCommand, Error> {
        let len_bytes = self.codec.read_bytes(extent);
        let command = self.encode(IoCommand::Read(BlockCommand { protection, ..BlockCommand::new(extent) }))?;
        let build = |session: &Session| {
            if protection.checks_escapes {
                session.offers(Extensions::ESCAPES, RequestKind::Read)?;
            }
            let (buffer, shape) = (session.pool().take(len_bytes), self.codec.crc_layout.clone());
            Ok((command, HostData::Read { buffer, layout: shape }))
        };
        self.execute(build).await
    }

    fn check_read(&self, extent: Extent, expectations: &Expectations, completed: CompletedCommand) -> Outcome {
        let needed = self.codec.read_bytes(extent);
        let read = completed.result.data.filter(|data| data.buffer.len() == needed && !data.is_damaged);
        let Some(read) = read else {
            let reason =
                format!("the target says that it has read {extent}, and sent less than the {needed} bytes of them");
            return Err(ErrorKind::Media { reason }.into());
        };
        let checksummed_bytes = &self.session.counters.guard_bytes_checksummed;
        let own = self.profile().own_checks(extent.start());
        match self.codec.check_read(read, &own, completed.session.pool(), checksummed_bytes) {
            Ok(sealed) => {
                expectations.beyond(&own).check(extent, &sealed)?;
                Ok(Response::Data(sealed))
            }
            Err(mismatches) => {
                let bad_blocks = BadBlocks::new(bad_blocks(extent.start(), &mismatches));
                Err(bad_blocks.expect("a mismatch is about a block").into())
            }
        }
    }

    async fn write_once(&self, command: BlockCommand, data: &Sealed) -> Result<CompletedCommand, Error> {
        let changed = WriteSet::of_extents([command.extent]);
        let command = self.encode(IoCommand::Write(command))?;
        self.execute_change(changed, |session| Ok((command, HostData::Write(self.codec.payload(data, session.pool())))))
            .await
    }

    async fn compare_once(&self, command: BlockCommand, data: &Sealed) -> Result<CompletedCommand, Error> {
        let command = self.encode(IoCommand::Compare(command))?;
        self.execute(|session| Ok((command, HostData::Write(self.codec.comparand(data, session.pool()))))).await
    }

    async fn execute_once(&self, command: IoCommand) -> Result<CompletedCommand, Error> {
        let changed = match &command {
            IoCommand::WriteZeroes(zeroes) => WriteSet::of_extents([zeroes.blocks.extent]),
            IoCommand::WriteUncorrectable(extent) => WriteSet::of_extents([*extent]),
            _ => WriteSet::default(),
        };
        let checks_escapes = matches!(&command, IoCommand::Verify(blocks) if blocks.protection.checks_escapes);
        let command = self.encode(command)?;
        let build = |session: &Session| {
            if checks_escapes {
                session.offers(Extensions::ESCAPES, RequestKind::Verify)?;
            }
            Ok((command, HostData::None))
        };
        self.execute_change(changed, build).await
    }

    async fn execute_with_ranges(
        &self,
        command: IoCommand,
        ranges: Slice,
        used: &[Extent],
    ) -> Result<CompletedCommand, Error> {
        let changed = WriteSet::of_extents(used.iter().copied());
        let command = self.encode(command)?;
        self.execute_change(changed, |_| Ok((command, HostData::Write(ranges.clone().into())))).await
    }

    async fn read_page(&self, completed: &CompletedCommand, command: Command, length_bytes: usize) -> Option<Buffer> {
        let data = HostData::Read { buffer: Buffer::zeroed(length_bytes), layout: None };
        let finished = completed.session.controller.admin.try_execute(command, data).await.ok()?;
        finished.data.filter(|_| finished.completion.status().is_success()).map(|data| data.buffer)
    }

    fn is_logged_as(&self, completed: &CompletedCommand, entry: &ErrorEntry) -> bool {
        entry.sqid == completed.queue && entry.cid == completed.result.cid
    }

    async fn add_values(&self, completed: &CompletedCommand, bad_blocks: &mut [BadBlock]) {
        damage::add_values(&completed.session, bad_blocks).await;
    }

    fn failed(&self, kind: RequestKind, extent: Option<Extent>, completed: &CompletedCommand) -> Error {
        let (queue, nsid) = (Some(completed.queue), self.nsid());
        failure(completed.status(), CommandContext { responder: "target", kind, extent, queue, nsid })
    }

    fn write_completed(&self, completed: &CompletedCommand) {
        self.session.flush_epochs.write_completed(completed.epoch);
    }

    /// Uses the extensions of the session that executed it: a later session may have another target.
    fn verify_coverage(&self, extent: Extent, completed: &CompletedCommand) -> Coverage {
        match completed.session.pages.extensions.contains(Extensions::COVERAGE) {
            true => Coverage::from_bits(completed.result.completion.dword0(), extent),
            false => Coverage::of(self.session.profile.checks_seals()),
        }
    }

    /// Reads check one copy only.
    fn read_coverage(&self, extent: Extent) -> Coverage {
        let extensions = self.session.current_session().map_or(Extensions::NONE, |session| session.pages.extensions);
        let mut coverage = self.reach(extensions);
        if extensions.contains(Extensions::COPIES) {
            coverage.add(Unchecked::new(extent, WhyUnchecked::OneCopy));
        }
        coverage
    }
}

/// Pause before a retry: the time that the controller requests by CRD, if it does.
pub(crate) fn retry_pause(session: &Session, status: Status) -> Duration {
    let controller = &session.pages.controller;
    let delay_100ms = match status.retry_delay() {
        1 => controller.crdt1,
        2 => controller.crdt2,
        3 => controller.crdt3,
        _ if status.code() == StatusCode::TRANSIENT_TRANSPORT_ERROR => return Duration::ZERO,
        _ => return RETRY_PAUSE,
    };
    // Limited: a controller must not delay a request for minutes.
    Duration::from_millis(u64::from(delay_100ms) * 100).min(Duration::from_secs(5))
}
