//! Executes single commands on a namespace through the kernel's passthrough, and sends them again if that may help.

use std::io;
use std::time::Duration;

use sealblock_block::{BadBlock, Coverage, Error, ErrorKind, Expectations, Outcome, RequestKind};
use sealblock_integrity::Sealed;
use sealblock_media_nvme::{
    Admin, CommandContext, CompletedCommand, Namespace, NamespaceProfile, failure, is_not_supported, may_be_sent_again,
};
use sealblock_protocols_nvme::admin::{Cns, GetLogPage, Identify};
use sealblock_protocols_nvme::logs::{CommandEffects, EffectsLog, ErrorEntry, LogPage};
use sealblock_protocols_nvme::nvm::{BlockCommand, IoCommand, ProtectionInfo};
use sealblock_protocols_nvme::{Command, Invalid, IoOpcode, Status};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::{File, NvmeCommand, NvmeQueue, Transfer, pool, sleep};
use sealblock_units::Extent;

use super::error::OpenError;
use crate::block_codec::{BlockCodec, Memory};
use crate::node::{call_error, forget_cached};

/// How often a command is sent again after a status that allows it, and the pause before.
const RETRIES: u32 = 3;
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// A drive's node, for sending commands unchanged.
#[derive(Clone)]
pub(crate) struct Passthrough {
    pub(crate) file: File,
    /// How long the kernel waits for one command.
    pub(crate) timeout: Duration,
}

/// The completion of a command, and the memory that it transferred.
pub(crate) struct Completed {
    status: Status,
    data: Transfer,
    metadata: Transfer,
}

impl CompletedCommand for Completed {
    fn status(&self) -> Status {
        self.status
    }
}

impl Passthrough {
    /// Sends a command once.
    pub(crate) async fn send(
        &self,
        queue: NvmeQueue,
        command: &Command,
        (data, metadata): (Transfer, Transfer),
        is_change: bool,
    ) -> (io::Result<Status>, Transfer, Transfer) {
        let dwords = [command.cdw10, command.cdw11, command.cdw12, command.cdw13, command.cdw14, command.cdw15];
        let command = NvmeCommand {
            opcode: command.opcode,
            nsid: command.nsid.get(),
            cdw2_3: [command.cdw2.get(), command.cdw3.get()],
            cdw10_15: dwords.map(|dword| dword.get()),
            timeout_ms: u32::try_from(self.timeout.as_millis()).unwrap_or(u32::MAX),
        };
        let (result, data, metadata) = self.file.nvme(queue, command, data, metadata, is_change).await;
        (result.map(|(status, _)| Status::from_bits(status)), data, metadata)
    }

    /// Sends an idempotent I/O command, again while its status allows it; returns its final completion.
    async fn execute(
        &self,
        doing: &str,
        command: &Command,
        mut memory: (Transfer, Transfer),
        is_change: bool,
    ) -> Result<Completed, Error> {
        let mut retries = 0;
        loop {
            let (result, data, metadata) = self.send(NvmeQueue::Io, command, memory, is_change).await;
            let status = result.map_err(|error| call_error(doing, &error))?;
            if status.is_success() || retries == RETRIES || !may_be_sent_again(status) {
                return Ok(Completed { status, data, metadata });
            }
            retries += 1;
            memory = (data, metadata);
            sleep(RETRY_PAUSE).await;
        }
    }

    /// Sends an admin command that reads this many bytes.
    async fn read(
        &self,
        what: &'static str,
        command: &Command,
        length_bytes: usize,
    ) -> Result<Result<Buffer, Status>, OpenError> {
        let memory = (Transfer::In(Buffer::zeroed(length_bytes)), Transfer::None);
        let (result, data, _) = self.send(NvmeQueue::Admin, command, memory, false).await;
        let status = result.map_err(|error| OpenError::call_error(what, error))?;
        match (status.is_success(), data) {
            (true, Transfer::In(buffer)) => Ok(Ok(buffer)),
            (true, _) => Ok(Ok(Buffer::zeroed(0))),
            (false, _) => Ok(Err(status)),
        }
    }
}

impl Passthrough {
    /// The Commands Supported and Effects log; `None` if the drive does not have the page.
    pub(crate) async fn effects(&self) -> Result<Option<EffectsLog>, OpenError> {
        let request = GetLogPage {
            retain_event: true,
            ..GetLogPage::new(LogPage::CommandEffects.code(), EffectsLog::BYTES as u64)
        };
        let what = "Get Log Page, Commands Supported and Effects";
        let page = self.read(what, &request.encode(), EffectsLog::BYTES).await?;
        Ok(page.ok().and_then(|page| EffectsLog::decode(&page).ok()))
    }
}

/// True if the log lists this command.
pub(crate) fn has_command(log: &EffectsLog, opcode: IoOpcode) -> bool {
    log.io(opcode.code()).contains(CommandEffects::SUPPORTED)
}

impl Admin for Passthrough {
    type Error = OpenError;

    async fn identify(&self, cns: Cns, nsid: u32) -> Result<Buffer, OpenError> {
        let what = name_of(cns);
        let command = Identify { cns, nsid, cntid: 0, csi: 0 }.encode();
        let page = self.read(what, &command, Identify::DATA_BYTES).await?;
        page.map_err(|status| OpenError::Refused { what, status })
    }

    async fn identify_if_known(&self, cns: Cns, nsid: u32) -> Result<Option<Buffer>, OpenError> {
        match self.identify(cns, nsid).await {
            Ok(page) => Ok(Some(page)),
            Err(OpenError::Refused { status, .. }) if is_not_supported(status) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

const fn name_of(cns: Cns) -> &'static str {
    match cns {
        Cns::Controller => "Identify Controller",
        Cns::Namespace => "Identify Namespace",
        Cns::NamespaceDescriptors => "Identify, namespace identification descriptors",
        Cns::CommandSetNamespace => "Identify CNS 05h",
        Cns::CommandSetController => "Identify CNS 06h",
        Cns::IndependentNamespace => "Identify CNS 08h",
        _ => "Identify",
    }
}

/// An open namespace.
pub(crate) struct Drive {
    pub(crate) passthrough: Passthrough,
    pub(crate) profile: NamespaceProfile,
    pub(crate) codec: BlockCodec,
    /// True if the node is a block device, which has a page cache.
    pub(crate) is_cached: bool,
}

impl Drive {
    fn encode(&self, command: IoCommand) -> Result<Command, Error> {
        let unfit = |invalid: Invalid| ErrorKind::Media { reason: format!("no command says that: {invalid}") }.into();
        command.encode(self.profile.nsid).map_err(unfit)
    }

    /// Sends a Write or Compare with its blocks.
    async fn send_blocks(
        &self,
        doing: &'static str,
        command: IoCommand,
        data: &Sealed,
        is_change: bool,
    ) -> Result<Completed, Error> {
        let Memory { data, metadata } = self.codec.memory_of(data, &pool());
        let memory = (Transfer::Out(data), metadata.map_or(Transfer::None, Transfer::Out));
        self.passthrough.execute(doing, &self.encode(command)?, memory, is_change).await
    }

    /// Makes the kernel drop its cached pages of blocks that a command has changed.
    fn forget_cached(&self, extent: Extent) {
        if self.is_cached {
            let size = self.profile.geometry.block_size;
            forget_cached(&self.passthrough.file, extent.start().get() << size.shift(), extent.bytes(size));
        }
    }
}

impl Namespace for Drive {
    type Completed = Completed;

    // The kernel tells neither the queue nor the identifier of a command.
    const LOG_NAMES_COMMANDS: bool = false;

    fn profile(&self) -> &NamespaceProfile {
        &self.profile
    }

    async fn read_once(&self, extent: Extent, protection: ProtectionInfo) -> Result<Completed, Error> {
        let command = self.encode(IoCommand::Read(BlockCommand { protection, ..BlockCommand::new(extent) }))?;
        let Memory { data, metadata } = self.codec.room(extent, &pool());
        let memory = (Transfer::In(data), metadata.map_or(Transfer::None, Transfer::In));
        self.passthrough.execute("a Read", &command, memory, false).await
    }

    fn check_read(&self, extent: Extent, expectations: &Expectations, completed: Completed) -> Outcome {
        let Transfer::In(data) = completed.data else {
            let reason = "a Read came back without its memory".to_owned();
            return Err(ErrorKind::Media { reason }.into());
        };
        let metadata = match completed.metadata {
            Transfer::In(metadata) => Some(metadata),
            Transfer::None | Transfer::Out(_) => None,
        };
        self.codec.check_read(extent, Memory { data, metadata }, expectations, &pool())
    }

    async fn write_once(&self, command: BlockCommand, data: &Sealed) -> Result<Completed, Error> {
        let completed = self.send_blocks("a Write", IoCommand::Write(command), data, true).await;
        self.forget_cached(command.extent);
        completed
    }

    async fn compare_once(&self, command: BlockCommand, data: &Sealed) -> Result<Completed, Error> {
        self.send_blocks("a Compare", IoCommand::Compare(command), data, false).await
    }

    async fn execute_once(&self, command: IoCommand) -> Result<Completed, Error> {
        let (doing, changed) = match &command {
            IoCommand::WriteZeroes(zeroes) => ("a Write Zeroes", Some(zeroes.blocks.extent)),
            IoCommand::Verify(_) => ("a Verify", None),
            IoCommand::Flush => ("a Flush", None),
            _ => ("a command", None),
        };
        let memory = (Transfer::None, Transfer::None);
        let completed = self.passthrough.execute(doing, &self.encode(command)?, memory, changed.is_some()).await;
        changed.into_iter().for_each(|extent| self.forget_cached(extent));
        completed
    }

    async fn execute_with_ranges(
        &self,
        command: IoCommand,
        ranges: Slice,
        used: &[Extent],
    ) -> Result<Completed, Error> {
        let doing = if matches!(command, IoCommand::Copy(_)) { "a Copy" } else { "a Dataset Management" };
        let memory = (Transfer::Out(ranges), Transfer::None);
        let completed = self.passthrough.execute(doing, &self.encode(command)?, memory, true).await;
        used.iter().for_each(|extent| self.forget_cached(*extent));
        completed
    }

    async fn read_page(&self, _: &Completed, command: Command, length_bytes: usize) -> Option<Buffer> {
        self.passthrough.read("a log page", &command, length_bytes).await.ok()?.ok()
    }

    fn is_logged_as(&self, completed: &Completed, entry: &ErrorEntry) -> bool {
        entry.nsid == self.profile.nsid && entry.status().code() == completed.status.code()
    }

    async fn add_values(&self, _: &Completed, _: &mut [BadBlock]) {}

    fn failed(&self, kind: RequestKind, extent: Option<Extent>, completed: &Completed) -> Error {
        let context = CommandContext { responder: "drive", kind, extent, queue: None, nsid: self.profile.nsid };
        failure(completed.status, context)
    }

    /// The drive itself reports writes that it has lost, with the status of a Flush.
    fn write_completed(&self, _: &Completed) {}

    fn verify_coverage(&self, _: Extent, _: &Completed) -> Coverage {
        Coverage::of(self.profile.checks_seals())
    }

    fn read_coverage(&self, _: Extent) -> Coverage {
        Coverage::of(self.profile.checks_seals())
    }
}
