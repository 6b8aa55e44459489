//! Executes single commands on a namespace, and sends them again where that may help.

use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{Error, ErrorKind, RequestKind};
use sealblock_integrity::Checks;
use sealblock_protocols_nvme::nvm::{BlockCommand, IoCommand, ProtectionInfo};
use sealblock_protocols_nvme::{Command, Invalid, Status, StatusCode};
use sealblock_protocols_nvme_tcp::host::HostData;
use sealblock_transport::Attempt;
use sealblock_units::Extent;

use crate::block_codec::BlockCodec;
use crate::options::add;
use crate::queue::{CommandResult, Queue};
use crate::remote_namespace::ReconnectingSession;
use crate::session::Session;
use crate::status::{CommandContext, failure, may_be_sent_again};

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

impl CompletedCommand {
    pub(crate) fn status(&self) -> Status {
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

    pub(crate) fn failed(&self, kind: RequestKind, extent: Option<Extent>, completed: &CompletedCommand) -> Error {
        let context = CommandContext { kind, extent, queue: completed.queue, nsid: self.nsid() };
        failure(completed.status(), context)
    }

    /// Executes one Read; returns its completion, whatever the status.
    pub(crate) async fn read_once(
        &self,
        extent: Extent,
        protection: ProtectionInfo,
    ) -> Result<CompletedCommand, Error> {
        let len_bytes = self.codec.read_bytes(extent);
        let command = self.encode(IoCommand::Read(BlockCommand { protection, ..BlockCommand::new(extent) }))?;
        let build = |session: &Session| {
            let (buffer, shape) = (session.pool().take(len_bytes), self.codec.crc_layout.clone());
            Ok((command, HostData::Read { buffer, layout: shape }))
        };
        self.execute(build).await
    }

    pub(crate) async fn execute_without_data(&self, command: Command) -> Result<CompletedCommand, Error> {
        self.execute(|_| Ok((command, HostData::None))).await
    }

    /// Executes one Verify; returns its completion, whatever the status.
    pub(crate) async fn verify_once(&self, extent: Extent, checks: &Checks) -> Result<CompletedCommand, Error> {
        let (protection, _) = self.codec.read_checks(extent, checks, true);
        let command = self.encode(IoCommand::Verify(BlockCommand { protection, ..BlockCommand::new(extent) }))?;
        self.execute_without_data(command).await
    }

    /// Executes an idempotent I/O command: again on a new session when the connection is lost, and again when its status
    /// allows it. The returned completion is final, success or not.
    pub(crate) async fn execute(
        &self,
        build: impl Fn(&Session) -> Result<(Command, HostData), Error>,
    ) -> Result<CompletedCommand, Error> {
        self.execute_on(Session::pick, build).await
    }

    /// The same with an admin command.
    pub(crate) async fn execute_admin(
        &self,
        build: impl Fn(&Session) -> Result<(Command, HostData), Error>,
    ) -> Result<CompletedCommand, Error> {
        self.execute_on(|session| session.controller.admin.queue(), build).await
    }

    async fn execute_on(
        &self,
        pick: fn(&Session) -> &Rc<Queue>,
        build: impl Fn(&Session) -> Result<(Command, HostData), Error>,
    ) -> Result<CompletedCommand, Error> {
        let mut retries = 0;
        let attempt = async |session: Rc<Session>, epoch| {
            let request = build(&session)?;
            let queue = pick(&session);
            let id = queue.core().id;
            let result = queue.execute(request).await?;
            let status = result.completion.status();
            if status.is_success() || !may_be_sent_again(status) || retries >= self.session.config.options.retries {
                return Ok(Attempt::Done(CompletedCommand { session, epoch, queue: id, result }));
            }
            retries += 1;
            add(&self.session.counters.retries, 1);
            Ok(Attempt::Again(retry_pause(&session, status)))
        };
        self.session.execute(attempt).await
    }
}

/// Pause before a retry: the time that the controller requests by CRD, if it does.
fn retry_pause(session: &Session, status: Status) -> Duration {
    let controller = &session.pages.controller;
    let delay_100ms = match status.retry_delay() {
        1 => controller.crdt1,
        2 => controller.crdt2,
        3 => controller.crdt3,
        _ if status.code() == StatusCode::TRANSIENT_TRANSPORT_ERROR => return Duration::ZERO,
        _ => return RETRY_PAUSE,
    };
    // Bounded: a controller must not delay a request for minutes.
    Duration::from_millis(u64::from(delay_100ms) * 100).min(Duration::from_secs(5))
}
